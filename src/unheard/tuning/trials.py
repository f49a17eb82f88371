"""The trial runs of a tuning: variants of one run that differ in sampling, clip, estimator and noise.

`unheard tune` trains them in two stages, as section 3 of the paper ("Building towards DP") does:

    baseline_trials    a fixed number of users per round, the true average, no clip, no noise
    clip_trials        Poisson sampling and the private estimator, with each S of the grid, no noise
    noise_trials       the same at the chosen S, with each sigma of the grid

All use few users per round. That much noise on so few users protects nobody, but it has the effect on accuracy that
the same sigma has on a private run with many users per round (`projected_plan.py`).

Each trial is an ordinary run folder, so a tuning that was stopped continues where it was.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from unheard.config import require, require_positive
from unheard.corpus.store import TokenStore
from unheard.errors import InvalidValue, RunFolderExists
from unheard.mechanism.clipping import AdaptiveClip, Clip, FlatClip, NoClip
from unheard.mechanism.estimators import ClippedDenominator, Estimator, FixedDenominator, TrueAverage
from unheard.mechanism.noise import GaussianNoise, NoNoise
from unheard.mechanism.plan import Plan
from unheard.mechanism.sampling import FixedSizeSampling, PoissonSampling
from unheard.privacy.ledger import Ledger
from unheard.run_folder import RunFolder
from unheard.training.run import Run
from unheard.training.run_file import hint_for_older_run, run_hash
from unheard.updates.weighting import CappedWeights

BASELINE, CLIP, NOISE = "baseline", "clip", "noise"


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The values to try. The defaults are the paper's.

    Attributes:
        norms: Values of S, tried without noise.
        noise_stds: Values of sigma, tried at the chosen S.
        users_per_round: Users per round of every trial.
        seeds: How often each trial is repeated. One run cannot tell a difference from chance.
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
        norm: S; infinite without a clip.
        noise_std: sigma; 0 without noise.
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
        """What the repetitions of a trial have in common."""
        return self.stage, self.norm, self.noise_std

    @property
    def name(self) -> str:
        """The setting in words, for tables and folder names."""
        names = {BASELINE: "baseline", CLIP: f"S={self.norm:g}", NOISE: f"S={self.norm:g},sigma={self.noise_std:g}"}
        return names[self.stage]

    def is_complete(self) -> bool:
        """Whether the last round is evaluated and saved, so that nothing is left to train."""
        folder = RunFolder(self.folder)
        rows = folder.read_metrics()
        return folder.statement.exists() and bool(rows) and rows[-1]["round"] >= self.run.training.rounds


def check_can_be_tuned(run: Run) -> None:
    """Raises `InvalidValue` for a run whose S or sigma changes during training: tuning chooses one of each."""
    if run.plan.schedule:
        raise InvalidValue("The run file has a [[schedule]]; tuning looks for one S and one sigma. Take it out first.")
    if isinstance(run.plan.clip, AdaptiveClip):
        raise InvalidValue(
            "[clip] kind = 'adaptive' finds its own S: there is nothing to sweep. Set 'flat' or 'per_layer'."
        )


def on_proxy(run: Run, corpus: Path, population: int) -> Run:
    """Returns the run on a proxy corpus, with weights and denominators scaled to the population of the proxy.

    The ledger, delta and budget of the private run are dropped: the trials are charged to the users of the proxy.
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


def baseline_trials(run: Run, grid: Grid, out: Path) -> list[Trial]:
    """Returns the non-private baseline: a fixed number of users, the true average, no clip, no noise."""
    plan = replace(
        run.plan,
        sampling=FixedSizeSampling(users_per_round=grid.users_per_round),
        clip=NoClip(),
        estimator=TrueAverage(),
        noise=NoNoise(),
    )
    return list(_repetitions(run, plan, BASELINE, math.inf, 0.0, grid, out))


def clip_trials(run: Run, grid: Grid, out: Path) -> list[Trial]:
    """Returns one trial for each S of the grid: Poisson sampling, the private estimator, no noise."""
    trials = []
    for norm in grid.norms:
        plan = replace(_poisson_plan(run, grid), clip=clip_at(run.plan.clip, norm), noise=NoNoise())
        trials += _repetitions(run, plan, CLIP, norm, 0.0, grid, out)
    return trials


def noise_trials(run: Run, grid: Grid, out: Path, norm: float) -> list[Trial]:
    """Returns one trial for each sigma of the grid, at one S."""
    trials = []
    for std in grid.noise_stds:
        plan = replace(_poisson_plan(run, grid), clip=clip_at(run.plan.clip, norm), noise=GaussianNoise(noise_std=std))
        trials += _repetitions(run, plan, NOISE, norm, std, grid, out)
    return trials


def clip_at(clip: Clip | AdaptiveClip, norm: float) -> Clip:
    """Returns the clip of a run at another S; a flat clip if the run has none."""
    return FlatClip(norm=norm) if isinstance(clip, NoClip | AdaptiveClip) else clip.at_norm(norm)


def private_estimator(estimator: Estimator) -> Estimator:
    """Returns the estimator of a run if it has a bounded sensitivity, else the fixed denominator."""
    return FixedDenominator() if isinstance(estimator, TrueAverage) else estimator


def check_same(trial: Trial) -> None:
    """Raises `RunFolderExists` if the trial's folder holds another run, or the same run on another corpus."""
    if not RunFolder(trial.folder).run_file.exists():
        return
    facts = Ledger.read(RunFolder.open(trial.folder).ledger).facts
    if (facts.get("run_hash"), facts.get("corpus")) != (run_hash(trial.run), TokenStore.open(trial.run.corpus).name):
        raise RunFolderExists(
            f"{trial.folder} holds a trial of another run file, corpus or of other options (all but grids, --seeds and --rounds "
            f"must stay as they were). Choose another --out.{hint_for_older_run(trial.run, str(facts.get('run_hash')))}"
        )


def _poisson_plan(run: Run, grid: Grid) -> Plan:
    return replace(
        run.plan,
        sampling=PoissonSampling(users_per_round=grid.users_per_round),
        estimator=private_estimator(run.plan.estimator),
        noise=NoNoise(),
    )


def _repetitions(
    run: Run, plan: Plan, stage: str, norm: float, noise_std: float, grid: Grid, out: Path
) -> Iterator[Trial]:
    """Yields one trial for each repetition.

    Repetitions of a run with a reproducible seed get consecutive seeds; others differ because they draw securely.
    """
    for number in range(1, grid.seeds + 1):
        training = run.training
        if training.reproducible_seed is not None:
            training = replace(training, reproducible_seed=training.reproducible_seed + number - 1)
        trial_run = replace(run, plan=plan, budget=None, training=training)
        trial = Trial(stage=stage, norm=norm, noise_std=noise_std, seed=number, run=trial_run, folder=out)
        yield replace(trial, folder=out / stage / f"{trial.name},seed={number}")
