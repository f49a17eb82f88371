"""The accuracy of each trial setting, and the margin within which two settings cannot be told apart.

`results(trials)` reads AccuracyTop1 of held-out users from the trials' run folders: the mean of the last five
evaluations, as the paper reads its curves ("smoothed over 5 evaluations"), for each repetition of a setting.
`margin(results)` estimates, from the spread of repetitions, how far two settings may differ by chance.
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
    """The accuracy of one setting.

    Attributes:
        stage: "baseline", "clip" or "noise".
        norm: S; infinite without a clip.
        noise_std: sigma; 0 without noise.
        name: The setting in words.
        last: For each repetition, up to the last five evaluations of AccuracyTop1, as fractions.
    """

    stage: str
    norm: float
    noise_std: float
    name: str
    last: tuple[tuple[float, ...], ...]

    @property
    def of_seeds(self) -> list[float]:
        """The smoothed accuracy of each repetition."""
        return [math.fsum(values) / len(values) for values in self.last]

    @property
    def accuracy(self) -> float:
        """The mean over all repetitions."""
        return math.fsum(self.of_seeds) / len(self.last)

    def loss_against(self, other: "Result") -> float:
        """Returns how many percentage points of AccuracyTop1 this setting is below another; negative if it is above."""
        return 100 * (other.accuracy - self.accuracy)


@dataclass(frozen=True, kw_only=True)
class Margin:
    """How far two settings may differ by chance.

    Attributes:
        points: The margin in percentage points of AccuracyTop1; None if it cannot be estimated. of_seeds: True if the
        margin was estimated from repeated runs. False if it was estimated from the last evaluations of
            single runs, which do not show how much another run would differ.
    """

    points: float | None
    of_seeds: bool

    def hides(self, difference: float) -> bool:
        """Whether a difference may be chance."""
        return self.points is None or abs(difference) < self.points

    @property
    def sentence(self) -> str:
        """The margin in words."""
        if self.points is None:
            return "With one evaluation of one run each, no difference can be told from chance: use --seeds 3 and more evaluations."
        if self.of_seeds:
            return (
                f"Differences under {self.points:.2f} points are within noise: repeated runs of one setting differ as much "
                f"({CONFIDENCE:.0%} margin)."
            )
        return (
            f"Differences under {self.points:.2f} points are within noise, and perhaps larger ones too: that is only how much the "
            "last evaluations of one run differ. --seeds 3 measures how much another run would differ."
        )


def results(trials: Sequence[Trial]) -> list[Result]:
    """Returns one result for each setting, in the order of the trials. Repetitions of a setting must be adjacent."""
    grouped = []
    for (stage, norm, std), group in groupby(trials, key=lambda trial: trial.setting):
        repetitions = list(group)
        last = tuple(_last_evaluations(trial) for trial in repetitions)
        grouped.append(Result(stage=stage, norm=norm, noise_std=std, name=repetitions[0].name, last=last))
    return grouped


def margin(results: Iterable[Result]) -> Margin:
    """Estimates the margin for the difference of two means, by Student's t with the variance pooled over all
    settings."""
    results = list(results)
    of_seeds = any(len(result.last) > 1 for result in results)
    groups = [result.of_seeds for result in results] if of_seeds else [list(v) for r in results for v in r.last]
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
    """Returns the smoothed AccuracyTop1 of one run from its metrics; -1 if it was never evaluated or is not finite."""
    values = [row["accuracy_top1"] for row in rows[-SMOOTHED_OVER:]]
    mean = math.fsum(values) / len(values) if values else -1.0
    return mean if math.isfinite(mean) else -1.0


def _last_evaluations(trial: Trial) -> tuple[float, ...]:
    """Returns up to five evaluations, none after the trial's last round: an earlier tuning may have trained longer."""
    rows = [row for row in RunFolder(trial.folder).read_metrics() if row["round"] <= trial.run.training.rounds]
    values = tuple(row["accuracy_top1"] for row in rows[-SMOOTHED_OVER:])
    if not values:
        raise InvalidValue(f"{trial.folder} has no evaluation: its run has not ended. Run the same command again.")
    return values
