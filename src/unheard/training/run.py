"""A run: everything that decides what training means, as one frozen value.

In: parts. Out: the same, checked together; its hash names it in the ledger.
"""

import math
from dataclasses import dataclass
from pathlib import Path

from unheard.config import require
from unheard.errors import InvalidValue
from unheard.evaluation.next_word import Evaluation
from unheard.mechanism.plan import Plan
from unheard.models.model import LanguageModel
from unheard.privacy.budget import Budget
from unheard.training.server import AddServer, Server


@dataclass(frozen=True, kw_only=True)
class Training:
    """How long, from where, and how often the state is saved."""

    rounds: int
    init_seed: int = 0
    """All runs with one seed begin from one common initialisation, as the paper's do. Public, and no part of the noise."""
    init_from: str | None = None
    """A run folder or a model.safetensors to begin from instead. What an earlier run cost is charged to this one too."""
    init_is_public: bool = False
    """Declares that no user of this corpus had a part in `init_from`, so that it costs them nothing."""
    checkpoint_every: int = 20
    """Rounds between checkpoints: after a crash at most so many are done, and charged, again."""
    keep_checkpoints: int = 2
    reproducible_seed: int | None = None
    """Set it only for experiments: cohorts and noise then follow from the seed, and the guarantee does not hold against
    anyone who knows it. Left out, randomness is secure."""

    def __post_init__(self) -> None:
        require(self.rounds >= 1, "rounds must be at least 1.")
        require(self.checkpoint_every >= 1, "checkpoint_every must be at least 1.")
        require(self.keep_checkpoints >= 1, "keep_checkpoints must be at least 1.")
        require(self.init_seed >= 0, "init_seed must be 0 or more.")


@dataclass(frozen=True, kw_only=True)
class Run:
    """What `train` takes: the corpus by its folder, the model, the plan, the server, the accounting, the evaluation."""

    corpus: Path | str
    model: LanguageModel
    plan: Plan
    training: Training
    delta: float | None = None
    """The delta at which epsilon is shown and claimed; None: population^-1.1, as in the paper."""
    budget: Budget | None = None
    ledger: Path | str | None = None
    """Where all runs on these people are charged; None: in the store's own folder."""
    server: Server = AddServer()
    evaluation: Evaluation = Evaluation()

    def __post_init__(self) -> None:
        if not 0 < self.claimed_delta < 1 / self.plan.population:
            raise InvalidValue(
                f"delta = {self.claimed_delta:g} must be above 0 and below 1 / population = {1 / self.plan.population:g}: "
                "a larger one would allow publishing somebody whole. Lower it, or leave it out for population^-1.1."
            )

    @property
    def claimed_delta(self) -> float:
        return self.delta if self.delta is not None else math.pow(self.plan.population, -1.1)
