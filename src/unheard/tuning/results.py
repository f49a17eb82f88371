"""How well each trial did, and how large a difference must be to mean something.

In: trials with their folders. Out: one result for each setting, over its seeds: AccuracyTop1 as the paper reads it off, "smoothed
over 5 evaluations", and the margin within which two results cannot be told apart. Accuracies are of held-out users, exact.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from unheard.curves import SMOOTHED_OVER
from unheard.errors import InvalidValue
from unheard.run_folder import RunFolder
from unheard.tuning.trials import Trial

CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True)
class Result:
    """The trials of one setting: the last evaluations of each seed's run."""

    stage: str
    norm: float
    noise_std: float
    name: str
    last: tuple[tuple[float, ...], ...]
    """For each seed, up to the last five AccuracyTop1, as shares."""

    @property
    def of_seeds(self) -> list[float]:
        """Each seed's own smoothed figure."""
        return [math.fsum(values) / len(values) for values in self.last]

    @property
    def accuracy(self) -> float:
        return math.fsum(self.of_seeds) / len(self.last)

    def loss_against(self, other: "Result") -> float:
        """What this setting costs against another, in points of AccuracyTop1; negative where it is better."""
        return 100 * (other.accuracy - self.accuracy)


@dataclass(frozen=True, kw_only=True)
class Margin:
    """How far two results may lie apart by chance, in points, and from what that was estimated."""

    points: float | None
    of_seeds: bool
    """True: from repetitions. False: from one run's last evaluations alone, which know nothing of another run's luck."""

    def hides(self, difference: float) -> bool:
        return self.points is None or abs(difference) < self.points

    @property
    def sentence(self) -> str:
        if self.points is None:
            return "With one evaluation of one run each, no difference can be told from chance: use --seeds 3 and more evaluations."
        if self.of_seeds:
            return (
                f"Differences under {self.points:.2f} points are within noise: repeated runs of one setting lie as far apart "
                f"({CONFIDENCE:.0%} margin)."
            )
        return (
            f"Differences under {self.points:.2f} points are within noise, and perhaps larger ones too: that is only how much the "
            "last evaluations of one run move. --seeds 3 measures what another run would do."
        )


def results(trials: Sequence[Trial]) -> list[Result]:
    """One result for each setting, in the order in which the settings stand."""
    found = []
    for (stage, norm, std), same in groupby(trials, key=lambda trial: trial.setting):
        seeds = list(same)
        last = tuple(_last_evaluations(trial) for trial in seeds)
        found.append(Result(stage=stage, norm=norm, noise_std=std, name=seeds[0].name, last=last))
    return found


def margin(found: Iterable[Result]) -> Margin:
    """Two standard errors of a difference, or so: Student's t for how many deviations were seen. Pooled over all settings."""
    found = list(found)
    of_seeds = any(len(result.last) > 1 for result in found)
    groups = [result.of_seeds for result in found] if of_seeds else [list(v) for r in found for v in r.last]
    groups = [values for values in groups if len(values) > 1]
    freedom = sum(len(values) - 1 for values in groups)
    if not freedom:
        return Margin(points=None, of_seeds=of_seeds)
    from scipy.stats import t

    squares = math.fsum((v - math.fsum(values) / len(values)) ** 2 for values in groups for v in values)
    fewest = min(len(values) for values in groups)
    error = math.sqrt(squares / freedom) * math.sqrt(2 / fewest)
    return Margin(points=100 * float(t.ppf((1 + CONFIDENCE) / 2, freedom)) * error, of_seeds=of_seeds)


def mean_of_last(rows: Sequence[Mapping[str, Any]]) -> float:
    """One run's smoothed AccuracyTop1; below everything, where it was never evaluated or is not a number."""
    values = [row["accuracy_top1"] for row in rows[-SMOOTHED_OVER:]]
    mean = math.fsum(values) / len(values) if values else -1.0
    return mean if math.isfinite(mean) else -1.0


def _last_evaluations(trial: Trial) -> tuple[float, ...]:
    """Up to five, none later than the trial's last round (an earlier tuning may have gone further)."""
    rows = [row for row in RunFolder(trial.folder).read_metrics() if row["round"] <= trial.run.training.rounds]
    values = tuple(row["accuracy_top1"] for row in rows[-SMOOTHED_OVER:])
    if not values:
        raise InvalidValue(f"{trial.folder} has no evaluation: its run has not ended. Run the same command again.")
    return values
