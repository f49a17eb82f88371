"""Bootstrap intervals over held-out users, as `rules.toml` defines them.

The input is `per_user.npz` of one or more runs (targets and hits of each held-out user, from `private_run.py
measure`). The output is a 95 % interval of an accuracy or of a difference of accuracies. Users are resampled, not
words, because the words of one user are not independent (Efron and Tibshirani, 1993).

    python -m reproduction.bootstrap reproduction/results/reviews_81/private [OTHER_RUN]
"""

import argparse
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np

RESAMPLES = 2000
"""Number of resamples."""
SEED = 20261116
"""Seed of the resampling. It is the same for every run, so that differences are paired."""
LEVEL = 0.95
"""Coverage of the intervals."""


USERS, POSTS = "per_user.npz", "per_post.npz"
"""Names of two files of a result: counts per held-out user, and counts per post of a test set drawn as in the paper."""


def load(folder: Path, file_name: str = USERS) -> dict[str, np.ndarray]:
    """Return the counts of each held-out user (or post) of a run, by the name of the count.

    Args:
        folder: The results of one run.
        file_name: `USERS` or `POSTS`.
    """
    with np.load(folder / file_name) as file:
        return {name: file[name] for name in file.files}


def resampled_accuracy(
    counts: Sequence[dict[str, np.ndarray]], kind: tuple[str, str] = ("targets", "hits")
) -> np.ndarray:
    """Return the accuracy in each resample of the held-out users, with counts averaged over runs.

    Args:
        counts: For each run, its counts per user. All runs have the same users.
        kind: Names of the counts of targets and of hits.

    Returns:
        One accuracy per resample, of shape [R]. Every call draws the same users, so the difference of two results is a
        paired difference.
    """
    targets_U, hits_U = (np.mean([run[name] for run in counts], axis=0) for name in kind)
    times_RU = resamples(len(targets_U), RESAMPLES)
    return (times_RU @ hits_U) / (times_RU @ targets_U)


@cache
def resamples(users: int, count: int) -> np.ndarray:
    """Return how often each user is drawn in each resample, of shape [R, U].

    Args:
        users: The number of users U; each resample draws as many, with replacement.
        count: The number of resamples R.
    """
    drawn_RU = np.random.default_rng(SEED).integers(users, size=(count, users))
    return np.stack([np.bincount(drawn_U, minlength=users) for drawn_U in drawn_RU]).astype(np.float64)


def interval(values_R: np.ndarray) -> tuple[float, float]:
    """Return the two ends of the 95 % percentile interval of resampled values."""
    low, high = np.quantile(values_R, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def accuracy_interval(folders: Sequence[Path]) -> tuple[float, float]:
    """Return the 95 % interval over users of the mean accuracy of some runs, given the folders of their results."""
    return interval(resampled_accuracy([load(folder) for folder in folders]))


def difference_interval(
    first: Sequence[Path],
    second: Sequence[Path],
    file_name: str = USERS,
    kind: tuple[str, str] = ("targets", "hits"),
) -> tuple[float, float]:
    """Return the 95 % interval of the mean accuracy of the first runs minus that of the second.

    Args:
        first: The results of some runs.
        second: The results of other runs, on the same users (or posts).
        file_name: `USERS` or `POSTS`.
        kind: Names of the counts of targets and of hits.
    """
    sides = [resampled_accuracy([load(folder, file_name) for folder in side], kind) for side in (first, second)]
    return interval(sides[0] - sides[1])


def half_width(first: Sequence[Path], second: Sequence[Path]) -> float | None:
    """Return half the width of the 95 % interval of a difference; None if the counts of a run are missing.

    Args:
        first: The results of some runs.
        second: The results of other runs, on the same users.
    """
    if not first or not second or any(not (folder / "per_user.npz").exists() for folder in (*first, *second)):
        return None
    low, high = difference_interval(first, second)
    return (high - low) / 2


def main() -> None:
    """Print the interval of one run, or of the difference of two."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path, nargs="?")
    arguments = parser.parse_args()
    if arguments.second is None:
        low, high = accuracy_interval([arguments.first])
        counts = load(arguments.first)
        print(f"AccuracyTop1 {100 * counts['hits'].sum() / counts['targets'].sum():.2f} %, 95 % interval ", end="")
        print(f"{100 * low:.2f} to {100 * high:.2f} %, {len(counts['targets']):,} held-out users")
    else:
        low, high = difference_interval([arguments.first], [arguments.second])
        print(f"difference, 95 % interval {100 * low:.2f} to {100 * high:.2f} points")


if __name__ == "__main__":
    main()
