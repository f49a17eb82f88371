"""What a tuning tries: runs made from one run by replacing its sampling, clip, estimator and noise, and nothing else.

In: the run that is to be planned, and the grids. Out: trials, each a Run and its folder, by stage. Where in the paper: section 3,
"Building towards DP": a fixed sample and the true average, then S without noise, then sigma at few users a round.
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
    """What is tried, how often, and with how many users a round. The values are the paper's."""

    norms: tuple[float, ...] = (5.0, 10.0, 15.0, 20.0, 30.0)
    """S, without noise."""
    noise_stds: tuple[float, ...] = (0.003, 0.006, 0.012, 0.024)
    """sigma, at the S that was chosen."""
    users_per_round: int = 100
    seeds: int = 1
    """How often each trial is run. One run cannot tell a difference from chance."""

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
    """One run of a tuning. `norm` is infinite without a clip, `noise_std` 0 without noise."""

    stage: str
    norm: float
    noise_std: float
    seed: int
    run: Run
    folder: Path

    @property
    def setting(self) -> tuple[str, float, float]:
        """What the trials of several seeds have in common."""
        return self.stage, self.norm, self.noise_std

    @property
    def name(self) -> str:
        words = {BASELINE: "baseline", CLIP: f"S={self.norm:g}", NOISE: f"S={self.norm:g},sigma={self.noise_std:g}"}
        return words[self.stage]

    def is_complete(self) -> bool:
        """Whether its last round is evaluated, saved and stated: then there is nothing left to train."""
        folder = RunFolder(self.folder)
        rows = folder.read_metrics()
        return folder.statement.exists() and bool(rows) and rows[-1]["round"] >= self.run.training.rounds


def check_can_be_tuned(run: Run) -> None:
    """A road-map for one S and one sigma: what would move them during training is refused."""
    if run.plan.schedule:
        raise InvalidValue("The run file has a [[schedule]]; tuning looks for one S and one sigma. Take it out first.")
    if isinstance(run.plan.clip, AdaptiveClip):
        raise InvalidValue(
            "[clip] kind = 'adaptive' finds its own S: there is nothing to sweep. Set 'flat' or 'per_layer'."
        )


def on_proxy(run: Run, corpus: Path, population: int) -> Run:
    """The run on other people's text, with what is declared about them: only the trials are theirs."""
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
    # The private run's ledger, delta and budget are its own people's; the proxy's trials are charged to the proxy's.
    return replace(run, corpus=corpus, plan=plan, ledger=None, delta=None, budget=None)


def baseline_trials(run: Run, grid: Grid, out: Path) -> list[Trial]:
    """A fixed number of users, the true average, no clip, no noise."""
    plan = replace(
        run.plan,
        sampling=FixedSizeSampling(users_per_round=grid.users_per_round),
        clip=NoClip(),
        estimator=TrueAverage(),
        noise=NoNoise(),
    )
    return list(
        _seeded(Trial(stage=BASELINE, norm=math.inf, noise_std=0.0, seed=1, run=_with(run, plan), folder=out), grid)
    )


def clip_trials(run: Run, grid: Grid, out: Path) -> list[Trial]:
    """Independent draws, the private estimator, each S of the grid, no noise."""
    found = []
    for norm in grid.norms:
        plan = replace(_sampled(run, grid), clip=clip_at(run.plan.clip, norm), noise=NoNoise())
        found += _seeded(Trial(stage=CLIP, norm=norm, noise_std=0.0, seed=1, run=_with(run, plan), folder=out), grid)
    return found


def noise_trials(run: Run, grid: Grid, out: Path, norm: float) -> list[Trial]:
    """The same at one S with each sigma of the grid: far too little noise for so few users, but that much for the model."""
    found = []
    for std in grid.noise_stds:
        plan = replace(_sampled(run, grid), clip=clip_at(run.plan.clip, norm), noise=GaussianNoise(noise_std=std))
        found += _seeded(Trial(stage=NOISE, norm=norm, noise_std=std, seed=1, run=_with(run, plan), folder=out), grid)
    return found


def clip_at(clip: Clip | AdaptiveClip, norm: float) -> Clip:
    """The run's own way of clipping at another S; flat, where it has none."""
    return FlatClip(norm=norm) if isinstance(clip, NoClip | AdaptiveClip) else clip.at_norm(norm)


def private_estimator(estimator: Estimator) -> Estimator:
    """The run's own, if noise can be put on it."""
    return FixedDenominator() if isinstance(estimator, TrueAverage) else estimator


def check_same(trial: Trial) -> None:
    """A folder that holds another run, or one on another corpus, is neither gone on with nor read under this trial's name."""
    if not RunFolder(trial.folder).run_file.exists():
        return
    facts = Ledger.read(RunFolder.open(trial.folder).ledger).facts
    if (facts.get("run_hash"), facts.get("corpus")) != (run_hash(trial.run), TokenStore.open(trial.run.corpus).name):
        raise RunFolderExists(
            f"{trial.folder} holds a trial of another run file, corpus or of other options (all but grids, --seeds and --rounds "
            f"must stay as they were). Choose another --out.{hint_for_older_run(trial.run, str(facts.get('run_hash')))}"
        )


def _sampled(run: Run, grid: Grid) -> Plan:
    return replace(
        run.plan,
        sampling=PoissonSampling(users_per_round=grid.users_per_round),
        estimator=private_estimator(run.plan.estimator),
        noise=NoNoise(),
    )


def _with(run: Run, plan: Plan) -> Run:
    return replace(run, plan=plan, budget=None)


def _seeded(trial: Trial, grid: Grid) -> Iterator[Trial]:
    """The trial once for each seed. Without a seed in the run file every repetition draws securely, and so differs anyway."""
    for number in range(1, grid.seeds + 1):
        training = trial.run.training
        if training.reproducible_seed is not None:
            training = replace(training, reproducible_seed=training.reproducible_seed + number - 1)
        folder = trial.folder / trial.stage / f"{trial.name},seed={number}"
        yield replace(trial, seed=number, run=replace(trial.run, training=training), folder=folder)
