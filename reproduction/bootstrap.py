"""Bootstrap intervals over held-out users, as reproduction/rules.toml defines them.

Input: per_user.npz of one or more runs (targets and hits of each held-out user). Output: 95 % intervals of an accuracy or of a
difference of accuracies. Users are resampled, never single words: words of one user are not independent.

    python -m reproduction.bootstrap reproduction/results/reviews_81/private [OTHER_RUN]
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

RESAMPLES = 2000
SEED = 20261116
LEVEL = 0.95


def load(folder: Path) -> dict[str, np.ndarray]:
    """Counts of each held-out user."""
    with np.load(folder / "per_user.npz") as file:
        return {name: file[name] for name in file.files}


def resampled_accuracy(
    counts: Sequence[dict[str, np.ndarray]], kind: tuple[str, str] = ("targets", "hits")
) -> np.ndarray:
    """Accuracy, mean over runs, in each resample of the users. The same seed gives the same users, so differences are paired."""
    targets_U, hits_U = (np.mean([run[name] for run in counts], axis=0) for name in kind)
    rng = np.random.default_rng(SEED)
    drawn_RU = rng.integers(len(targets_U), size=(RESAMPLES, len(targets_U)))
    return hits_U[drawn_RU].sum(axis=1) / targets_U[drawn_RU].sum(axis=1)


def interval(values_R: np.ndarray) -> tuple[float, float]:
    """The 95 % percentile interval."""
    low, high = np.quantile(values_R, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def accuracy_interval(folders: Sequence[Path]) -> tuple[float, float]:
    """Of the mean accuracy of some runs."""
    return interval(resampled_accuracy([load(folder) for folder in folders]))


def difference_interval(first: Sequence[Path], second: Sequence[Path]) -> tuple[float, float]:
    """Of the mean accuracy of the first runs minus that of the second, on the same users."""
    sides = [resampled_accuracy([load(folder) for folder in folders]) for folders in (first, second)]
    return interval(sides[0] - sides[1])


def half_width(first: Sequence[Path], second: Sequence[Path]) -> float | None:
    """Half of the length of the interval of the difference; None where a model was not kept."""
    if not first or not second or any(not (folder / "per_user.npz").exists() for folder in (*first, *second)):
        return None
    low, high = difference_interval(first, second)
    return (high - low) / 2


def main() -> None:
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
