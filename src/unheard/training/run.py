"""The configuration of a run as one frozen value.

    run = Run(corpus="corpora/posts", model=TiedLSTM(), plan=Plan(...), training=Training(rounds=100))

Input: the parts (model, plan, server, evaluation). Output: the same parts, checked together. `run_file.run_toml` writes
a run as TOML, and `run_file.run_hash` gives the hash that names the configuration in the ledger. How a run is computed
(engine, device, processes) is not part of it.
"""

import math
import os
from dataclasses import dataclass, replace
from pathlib import Path

from unheard.config import require
from unheard.errors import InvalidValue
from unheard.evaluation.next_word import Evaluation
from unheard.mechanism.correlated import CorrelatedNoise
from unheard.mechanism.plan import Plan
from unheard.models.model import LanguageModel
from unheard.privacy.budget import Budget
from unheard.privacy.population_ledger import check_ledger_path
from unheard.training.server import AddServer, Server


@dataclass(frozen=True, kw_only=True)
class Training:
    """How long a run trains, which model it starts from, and how often it saves its state.

    >>> Training(rounds=1000, checkpoint_every=50).checkpoint_every
    50

    Args:
        rounds: Rounds to train.
        init_seed: Seed of the initial parameters. Runs with one seed start from the same parameters, as the paper's do.
            The seed is public and has no part in the noise.
        init_from: A run folder or a model.safetensors to start from instead. What an earlier run cost its users is
            charged to this run too.
        init_is_public: Declares that no user of this corpus contributed to `init_from`, so that starting from it costs
            them nothing.
        checkpoint_every: Rounds between checkpoints. After a crash at most this many rounds run again and are charged
            again.
        keep_checkpoints: How many of the newest checkpoints are kept.
        reproducible_seed: For experiments only. Cohorts and noise follow from the seed, the settings, the store and the
            first model, and the guarantee does not hold against anyone who knows the seed. None, the default, uses
            secure randomness.
        shared_cohorts: For experiments that compare runs on the same cohorts: cohorts and batches follow from the seed
            alone. Runs with this setting cannot be composed into a statement about all runs.

    Raises:
        InvalidValue: A value is out of its range.
    """

    rounds: int
    init_seed: int = 0
    init_from: str | None = None
    init_is_public: bool = False
    checkpoint_every: int = 20
    keep_checkpoints: int = 2
    reproducible_seed: int | None = None
    shared_cohorts: bool = False

    def __post_init__(self) -> None:
        require(self.rounds >= 1, "rounds must be at least 1.")
        require(self.checkpoint_every >= 1, "checkpoint_every must be at least 1.")
        require(self.keep_checkpoints >= 1, "keep_checkpoints must be at least 1.")
        require(self.init_seed >= 0, "init_seed must be 0 or more.")
        require(
            not self.shared_cohorts or self.reproducible_seed is not None,
            "shared_cohorts needs a reproducible_seed: secure cohorts are never the same.",
        )


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything that decides the result of a training run: what `train` takes.

    >>> import unheard
    >>> run = unheard.Run(
    ...     corpus="corpora/posts",
    ...     model=unheard.TiedLSTM(vocabulary_size=10_000),
    ...     plan=unheard.Plan(
    ...         population=50_000,
    ...         sampling=unheard.PoissonSampling(users_per_round=1000),
    ...         update=unheard.FedAvg(),
    ...         clip=unheard.FlatClip(norm=15.0),
    ...         noise=unheard.GaussianNoise(noise_multiplier=1.0),
    ...     ),
    ...     training=unheard.Training(rounds=1000),
    ... )
    >>> f"{run.claimed_delta:.2e}"
    '6.78e-06'

    Args:
        corpus: A token store (`unheard prepare`) or its folder.
        model: The language model.
        plan: The parameters of Algorithm 1: sampling, updates, clip, estimator and noise.
        training: Rounds, initial model and checkpoints.
        delta: The delta at which epsilon is reported and claimed. None: population^-1.1, as in the paper.
        budget: An epsilon that the run must not exceed; training stops before the round that would.
        ledger: The population's ledger, to which all runs on these users are charged. None: the one in the store's
            folder.
        server: What the server does with the noisy average of each round.
        evaluation: How often and on how much held-out text the model is evaluated.

    Raises:
        InvalidValue: delta is not above 0 and below 1 / population, or `ledger` is empty.
    """

    corpus: str | os.PathLike[str]
    model: LanguageModel
    plan: Plan
    training: Training
    delta: float | None = None
    budget: Budget | None = None
    ledger: Path | str | None = None
    server: Server = AddServer()
    evaluation: Evaluation = Evaluation()

    def __post_init__(self) -> None:
        check_ledger_path(self.ledger)
        if isinstance(self.plan.noise, CorrelatedNoise):
            noise = self.plan.noise.for_rounds(self.training.rounds)
            object.__setattr__(self, "plan", replace(self.plan, noise=noise))
        if not 0 < self.claimed_delta < 1 / self.plan.population:
            raise InvalidValue(
                f"delta = {self.claimed_delta:g} must be above 0 and below 1 / population = "
                f"{1 / self.plan.population:g}: a larger one would allow publishing somebody whole. Lower it, or "
                "leave it out for population^-1.1."
            )

    @property
    def claimed_delta(self) -> float:
        """`delta`, or population^-1.1 where it is None."""
        return self.delta if self.delta is not None else math.pow(self.plan.population, -1.1)
