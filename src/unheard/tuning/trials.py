"""Defines the trials of a tuning and reads their results. Trials differ in sampling, clip, estimator and noise.

`unheard tune` trains them in two stages (baseline and clip, then noise), as in section 3 of the paper ("Building
towards DP"):

    baseline_trials    a fixed number of users per round, the true average, no clip, no noise
    clip_trials        Poisson sampling and the private estimator, with each S of the grid, no noise
    noise_trials       the same at the chosen S, with each sigma of the grid

All use few users per round. With so few users the noise sigma gives no useful guarantee, but it costs as much accuracy
as the same sigma in a private run with many users per round (`output.py`).

Each trial is an ordinary run folder, so a tuning that was stopped continues from the checkpoints of its trials.

**Results.** `results(trials)` reads AccuracyTop1 on held-out users from the trials' run folders. The accuracy of one
repetition is the mean of its last five evaluations ("smoothed over 5 evaluations" in the paper). `margin(results)`
estimates from the spread of repetitions how far two settings may differ by chance."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from unheard.config import require, require_positive
from unheard.corpus.store import TokenStore
from unheard.engines.distributed.engine import store_fingerprint
from unheard.errors import InvalidValue, RunFolderExists
from unheard.formatting import SMOOTHED_OVER
from unheard.mechanism.aggregation import ClippedDenominator, Estimator, FixedDenominator, TrueAverage
from unheard.mechanism.clipping import AdaptiveClip, Clip, FlatClip, NoClip
from unheard.mechanism.noise import GaussianNoise, NoNoise
from unheard.mechanism.plan import Plan
from unheard.mechanism.sampling import FixedSizeSampling, PoissonSampling
from unheard.privacy.ledger import Ledger
from unheard.privacy.population_ledger import FILE, PopulationLedger
from unheard.run_folder import RunFolder
from unheard.training.run import Run, hint_for_older_run, run_hash
from unheard.updates.user_update import CappedWeights

BASELINE, CLIP, NOISE = "baseline", "clip", "noise"
"""The values of `Trial.stage`, which are also the names of the folders of the trials."""


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The values to try. The defaults are the paper's.

    Attributes:
        norms: Values of S, tried without noise.
        noise_stds: Values of sigma, tried at the chosen S.
        users_per_round: Users per round of every trial.
        seeds: The number of repetitions of each setting. With one, a real difference cannot be told from chance.

    Raises:
        InvalidValue: A list is empty or has a value twice, or a value is out of range.
    """

    norms: tuple[float, ...] = (5.0, 10.0, 15.0, 20.0, 30.0)
    noise_stds: tuple[float, ...] = (0.003, 0.006, 0.012, 0.024)
    users_per_round: int = 100
    seeds: int = 1

    def __post_init__(self) -> None:
        for name, values in (("norms", self.norms), ("noise_stds", self.noise_stds)):
            require(bool(values), f"{name} needs at least one value.")
            require(len(set(values)) == len(values), f"{name} has a value twice: each would be the same trial.")
            for value in values:
                require_positive(**{name: value})
        require(self.users_per_round >= 1, "users_per_round must be at least 1.")
        require(self.seeds >= 1, "seeds must be at least 1.")


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One run of a tuning.

    Attributes:
        stage: "baseline", "clip" or "noise".
        norm: S, the norm of the clip; infinite without a clip.
        noise_std: sigma, the noise on each parameter; 0 without noise.
        seed: Which repetition of the setting this is, from 1.
        run: The run to train.
        folder: Its run folder.
    """

    stage: str
    norm: float
    noise_std: float
    seed: int
    run: Run
    folder: Path

    @property
    def setting(self) -> tuple[str, float, float]:
        """The stage, S and sigma, which all repetitions of a trial have in common."""
        return self.stage, self.norm, self.noise_std

    @property
    def name(self) -> str:
        """The setting in words, for tables and folder names."""
        names = {BASELINE: "baseline", CLIP: f"S={self.norm:g}", NOISE: f"S={self.norm:g},sigma={self.noise_std:g}"}
        return names[self.stage]

    def is_complete(self) -> bool:
        """Whether the last round of the trial has been trained, evaluated and saved."""
        folder = RunFolder(self.folder)
        rows = folder.read_metrics()
        return folder.statement.exists() and bool(rows) and rows[-1]["round"] >= self.run.training.rounds


def check_can_be_tuned(run: Run) -> None:
    """Raise `InvalidValue` if S or sigma changes during the run, since tuning chooses one S and one sigma."""
    if run.plan.schedule:
        raise InvalidValue("The run file has a [[schedule]]; tuning looks for one S and one sigma. Take it out first.")
    if isinstance(run.plan.clip, AdaptiveClip):
        raise InvalidValue(
            "[clip] kind = 'adaptive' finds its own S: there is nothing to sweep. Set 'flat' or 'per_layer'."
        )


def on_proxy(run: Run, corpus: Path, population: int) -> Run:
    """Return the run on a proxy corpus, with declared weights and denominators scaled to the population of the proxy.

    The trials are charged to the users of the proxy, so the run's own ledger, delta and budget are removed. Sampling
    and noise are placeholders: each trial sets its own.

    Args:
        run: The run that is tuned.
        corpus: The folder of the proxy corpus.
        population: The declared population of the proxy.
    """
    share = population / run.plan.population
    weights, estimator = run.plan.weights, run.plan.estimator
    if isinstance(weights, CappedWeights):
        weights = replace(weights, total_weight=weights.total_weight * share)
    if isinstance(estimator, ClippedDenominator):
        estimator = replace(estimator, min_total_weight=estimator.min_total_weight * share)
    plan = replace(
        run.plan,
        population=population,
        weights=weights,
        estimator=estimator,
        sampling=FixedSizeSampling(users_per_round=1),
        noise=NoNoise(),
    )
    return replace(run, corpus=corpus, plan=plan, ledger=None, delta=None, budget=None)


def check_other_population(run: Run, proxy: Path) -> None:
    """Raise `InvalidValue` if a proxy is the run's own store, a copy of it, or charged to the same ledger.

    If one of the two stores is not on this machine, only the paths of stores and ledgers are compared.

    Args:
        run: The run that is tuned.
        proxy: The folder of the proxy corpus.
    """
    own = Path(run.corpus)
    ledger = _ledger_path(proxy)
    is_same = proxy.resolve() == own.resolve()
    is_same |= ledger is not None and ledger in (_ledger_path(own), _ledger_path(run.ledger))
    if not is_same and (own / "corpus.json").is_file() and (proxy / "corpus.json").is_file():
        stores = [TokenStore.open(path) for path in (own, proxy)]
        is_same = bool(
            (store_fingerprint(stores[0], stores[0].train) == store_fingerprint(stores[1], stores[1].train)).all()
        )
    if is_same:
        # DP: the sentence that a tuning on a proxy prints, that the run's own users paid nothing, would be false.
        raise InvalidValue(
            f"{proxy} cannot be the proxy: it is the run's own corpus, or holds the same users. Leave out --corpus and "
            "--population, or give text of other users."
        )


def _ledger_path(path: str | Path | None) -> Path | None:
    """Return the path of the ledger that users are charged to. If it was joined with another ledger, return that path.

    Args:
        path: The folder of a store, or the file of a ledger.

    Returns:
        The path; None if there is no ledger there.
    """
    file = None if path is None else Path(path) / FILE if Path(path).is_dir() else Path(path)
    return PopulationLedger.read(file).path if file is not None and file.is_file() else None


def baseline_trials(run: Run, grid: Grid, out: Path) -> list[Trial]:
    """Return the trials of the non-private baseline: a fixed number of users, the true average, no clip, no noise.

    Args:
        run: The run whose variants are the trials.
        grid: The values to try, the users per round and the number of seeds.
        out: The folder of the tuning, in which each trial gets its run folder.
    """
    plan = replace(
        run.plan,
        sampling=FixedSizeSampling(users_per_round=grid.users_per_round),
        clip=NoClip(),
        estimator=TrueAverage(),
        noise=NoNoise(),
    )
    return list(_repetitions(run, plan, BASELINE, math.inf, 0.0, grid, out))


def clip_trials(run: Run, grid: Grid, out: Path) -> list[Trial]:
    """Return one trial for each S of the grid and each seed: Poisson sampling, the private estimator, no noise.

    Args:
        run: The run whose variants are the trials.
        grid: The values to try, the users per round and the number of seeds.
        out: The folder of the tuning, in which each trial gets its run folder.
    """
    trials = []
    for norm in grid.norms:
        plan = replace(_poisson_plan(run, grid), clip=clip_at(run.plan.clip, norm), noise=NoNoise())
        trials += _repetitions(run, plan, CLIP, norm, 0.0, grid, out)
    return trials


def noise_trials(run: Run, grid: Grid, out: Path, norm: float) -> list[Trial]:
    """Return one trial for each sigma of the grid and each seed, all with the chosen S.

    Args:
        run: The run whose variants are the trials.
        grid: The values to try, the users per round and the number of seeds.
        out: The folder of the tuning, in which each trial gets its run folder.
        norm: The chosen S.
    """
    trials = []
    for std in grid.noise_stds:
        plan = replace(_poisson_plan(run, grid), clip=clip_at(run.plan.clip, norm), noise=GaussianNoise(noise_std=std))
        trials += _repetitions(run, plan, NOISE, norm, std, grid, out)
    return trials


def clip_at(clip: Clip | AdaptiveClip, norm: float) -> Clip:
    """Return the clip of a run with another S; a flat clip if the run has no clip or an adaptive clip.

    Args:
        clip: The clip of the run.
        norm: S, the largest L2 norm of a user's update.
    """
    return FlatClip(norm=norm) if isinstance(clip, NoClip | AdaptiveClip) else clip.at_norm(norm)


def private_estimator(estimator: Estimator) -> Estimator:
    """Return the estimator of a run if it has a bounded sensitivity, else the fixed denominator."""
    return FixedDenominator() if isinstance(estimator, TrueAverage) else estimator


def check_same(trial: Trial) -> None:
    """Raise `RunFolderExists` if the trial's folder holds another run, or the same run on another corpus."""
    if not RunFolder(trial.folder).run_file.exists():
        return
    facts = Ledger.read(RunFolder.open(trial.folder).ledger).facts
    if (facts.get("run_hash"), facts.get("corpus")) != (run_hash(trial.run), TokenStore.open(trial.run.corpus).name):
        raise RunFolderExists(
            f"{trial.folder} holds a trial of another run file, corpus or of other options (all but grids, --seeds and --rounds "
            f"must stay as they were). Choose another --out.{hint_for_older_run(trial.run, str(facts.get('run_hash')))}"
        )


def _poisson_plan(run: Run, grid: Grid) -> Plan:
    """Return the plan of the run with Poisson sampling at the grid's users per round, and without noise."""
    return replace(
        run.plan,
        sampling=PoissonSampling(users_per_round=grid.users_per_round),
        estimator=private_estimator(run.plan.estimator),
        noise=NoNoise(),
    )


def _repetitions(
    run: Run, plan: Plan, stage: str, norm: float, noise_std: float, grid: Grid, out: Path
) -> Iterator[Trial]:
    """Yield one trial for each repetition of a setting.

    If the run has a reproducible seed, the repetitions get consecutive seeds. Otherwise each repetition draws its
    randomness from the operating system, so repetitions differ anyway.
    """
    for number in range(1, grid.seeds + 1):
        training = run.training
        if training.reproducible_seed is not None:
            training = replace(training, reproducible_seed=training.reproducible_seed + number - 1)
        trial_run = replace(run, plan=plan, budget=None, training=training)
        trial = Trial(stage=stage, norm=norm, noise_std=noise_std, seed=number, run=trial_run, folder=out)
        yield replace(trial, folder=out / stage / f"{trial.name},seed={number}")


CONFIDENCE = 0.95
"""The confidence level of `margin`."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """The accuracy of one setting.

    Attributes:
        stage: "baseline", "clip" or "noise".
        norm: S; infinite without a clip.
        noise_std: sigma; 0 without noise.
        name: The setting in words.
        last: For each repetition, AccuracyTop1 at its last evaluations (at most five), as fractions.
    """

    stage: str
    norm: float
    noise_std: float
    name: str
    last: tuple[tuple[float, ...], ...]

    @property
    def of_seeds(self) -> list[float]:
        """The accuracy of each repetition: the mean of its last evaluations."""
        return [math.fsum(values) / len(values) for values in self.last]

    @property
    def accuracy(self) -> float:
        """The accuracy of the setting: the mean over all repetitions."""
        return math.fsum(self.of_seeds) / len(self.last)

    def loss_against(self, other: "Result") -> float:
        """Return how many percentage points of AccuracyTop1 this setting is below another; negative if it is above."""
        return 100 * (other.accuracy - self.accuracy)


@dataclass(frozen=True, kw_only=True)
class Margin:
    """How far the accuracies of two settings may differ by chance.

    Attributes:
        points: The margin in percentage points of AccuracyTop1; None if it cannot be estimated.
        of_seeds: Whether the margin was estimated from repeated runs. If False, it was estimated from the last
            evaluations of single runs, which do not show how much another run would differ.
    """

    points: float | None
    of_seeds: bool

    def hides(self, difference: float) -> bool:
        """Whether a difference, in percentage points, may be due to chance. True if the margin is unknown."""
        return self.points is None or abs(difference) < self.points

    @property
    def sentence(self) -> str:
        """The margin as a sentence for the user, with advice if it is unknown or uncertain."""
        if self.points is None:
            return "With one evaluation of one run each, no difference can be told from chance: use --seeds 3 and more evaluations."
        if self.of_seeds:
            return (
                f"Differences under {self.points:.2f} points are within noise: repeated runs of one setting differ as much "
                f"({CONFIDENCE:.0%} margin)."
            )
        return (
            f"Differences under {self.points:.2f} points are within noise, and perhaps larger ones too: this margin shows only how "
            "much the last evaluations of one run differ. --seeds 3 measures how much another run would differ."
        )


def results(trials: Sequence[Trial]) -> list[Result]:
    """Read the result of each setting from the run folders, in the order of the trials.

    Repetitions of a setting must be adjacent in `trials`.

    Raises:
        InvalidValue: A trial has no evaluation.
    """
    grouped = []
    for (stage, norm, std), group in groupby(trials, key=lambda trial: trial.setting):
        repetitions = list(group)
        last = tuple(_last_evaluations(trial) for trial in repetitions)
        grouped.append(Result(stage=stage, norm=norm, noise_std=std, name=repetitions[0].name, last=last))
    return grouped


def margin(results: Iterable[Result]) -> Margin:
    """Estimate how far the means of two settings may differ by chance, with a confidence of 95 %.

    Uses Student's t with the variance within settings, pooled over all settings. If a setting has several repetitions,
    only the spread of repetitions counts; otherwise the spread of each run's last evaluations.
    """
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
    """Return the mean of the last five AccuracyTop1 values in a run's metrics; -1 if there is none or it is not finite.

    The value -1 is below every accuracy, so a selection never prefers such a run.
    """
    values = [row["accuracy_top1"] for row in rows[-SMOOTHED_OVER:]]
    mean = math.fsum(values) / len(values) if values else -1.0
    return mean if math.isfinite(mean) else -1.0


def _last_evaluations(trial: Trial) -> tuple[float, ...]:
    """Return AccuracyTop1 of the last evaluations of a trial, at most five.

    Evaluations after the trial's last round are ignored: an earlier tuning with more rounds may have written them.

    Raises:
        InvalidValue: The trial has no evaluation.
    """
    rows = [row for row in RunFolder(trial.folder).read_metrics() if row["round"] <= trial.run.training.rounds]
    values = tuple(row["accuracy_top1"] for row in rows[-SMOOTHED_OVER:])
    if not values:
        raise InvalidValue(f"{trial.folder} has no evaluation: its run has not ended. Run the same command again.")
    return values
