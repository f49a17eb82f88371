"""What an engine is: parameters and a cohort in, the bounded sum of its updates out.

Maths lives in the plan, speed in the engine. Changing the engine changes neither the result (within stated rounding) nor the
ledger; tests/agreement says so for each. This is the meeting point of work: models, updates and mechanism come together here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from unheard.config import nearest, require, require_positive
from unheard.errors import InvalidValue
from unheard.mechanism.plan import RoundPlan
from unheard.mechanism.values import CohortSum
from unheard.models.model import LanguageModel
from unheard.updates.users import User


@dataclass(frozen=True, kw_only=True)
class Cohort:
    """One round's work of one run."""

    params_P: Tensor = field(repr=False)
    users: Sequence[User] = field(repr=False)  # how many were drawn is private too
    plan: RoundPlan
    rng: "np.random.Generator | Drawn" = field(repr=False)

    @cached_property
    def seed(self) -> int:
        """The seed of FedSGD's batches, drawn once, whoever looks at it and however often."""
        return int(self.rng.integers(2**63))


@dataclass(frozen=True)
class Drawn:
    """In the place of a generator: a seed that was drawn already, for all who sum a part of one cohort."""

    seed: int

    def integers(self, high: int) -> int:
        return self.seed


KINDS = ("auto", "reference", "vectorised", "stacked")
PRECISIONS = ("auto", "float32", "bfloat16")


class Engine(Protocol):
    """Engines are made for one model and one device. They may keep memory between rounds; what it held of users is
    overwritten before it is read again."""

    @property
    def device(self) -> torch.device: ...

    def sum_updates(
        self, params_P: Tensor, users: Sequence[User], plan: RoundPlan, rng: np.random.Generator | Drawn
    ) -> CohortSum:
        """The sum over users of w_k * Clip(delta_k). `rng` seeds FedSGD's batches, nothing else."""
        ...

    def sum_cohorts(self, cohorts: Sequence[Cohort]) -> list[CohortSum]:
        """The same for the cohorts of several runs of one model at once, each as if it were alone."""
        ...


@dataclass(frozen=True, kw_only=True)
class EngineChoice:
    """Which engine, on what device. Never part of what a run means: resume on another machine may choose anew."""

    kind: str = "auto"
    device: str = "auto"
    users_at_once: int | None = None
    """Users in a chunk. None: as many as fit the memory that is free. On a CPU `vectorised` takes one, whatever it says."""
    precision: str = "auto"
    """Of the products within a user's own steps: 'float32', or 'bfloat16' (the default on CUDA). The clip of what a user returns
    and the sum are exact either way, so the guarantee does not depend on it."""
    rank_timeout: float = 600.0
    """Seconds that ranks wait for each other at the end of a piece of work, before the one that is late is named."""
    corpus_part: str | None = None
    """Where each rank finds its part of the corpus, for machines without a shared disk: {rank}, {local_rank} and {node} are filled
    in. None: every rank reads the corpus where the run file says. A process that is alone refuses it."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InvalidValue(f"Unknown engine '{self.kind}'.{nearest(self.kind, KINDS)}")
        require(
            self.precision in PRECISIONS, f"precision must be one of {', '.join(PRECISIONS)}, not '{self.precision}'."
        )
        require(
            self.users_at_once is None or self.users_at_once >= 1,
            "users_at_once must be at least 1; leave it out to choose.",
        )
        require_positive(rank_timeout=self.rank_timeout)

    def build(self, model: LanguageModel) -> Engine:
        from unheard.engines.reference import ReferenceEngine
        from unheard.engines.stacked.engine import StackedEngine
        from unheard.engines.vectorised import VectorisedEngine

        device = self.torch_device()
        if self.kind == "stacked" and not StackedEngine.takes(model):
            raise InvalidValue(
                f"The engine 'stacked' is for the paper's models, not for {type(model).__name__}. Use 'vectorised' or 'auto'."
            )
        if self.kind == "stacked" or (self.kind == "auto" and StackedEngine.takes(model)):
            return StackedEngine(model, device, self.users_at_once, self.precision)
        if self.kind == "reference":
            if self.precision == "bfloat16":
                raise InvalidValue("The engine 'reference' is exact: leave precision out, or choose another engine.")
            return ReferenceEngine(model, device)
        return VectorisedEngine(model, device, self.users_at_once, self.precision)

    def torch_device(self) -> torch.device:
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            device = torch.device(self.device)
            if device.type not in ("cpu", "cuda"):
                raise RuntimeError("only cpu and cuda are known here")
            torch.zeros(1, device=device)
        except (RuntimeError, AssertionError) as error:
            raise InvalidValue(
                f"Device '{self.device}' cannot be used here ({error}). Use device = 'auto' or 'cpu'."
            ) from None
        return device
