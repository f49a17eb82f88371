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

from unheard.mechanism.plan import RoundPlan
from unheard.mechanism.values import CohortSum
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
