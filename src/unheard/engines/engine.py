"""What an engine is: parameters and a cohort in, the bounded sum of its updates out.

Maths lives in the plan, speed in the engine. Changing the engine changes neither the result (within stated rounding) nor the
ledger; tests/agreement says so for each. This is the meeting point of work: models, updates and mechanism come together here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from unheard.errors import InvalidValue
from unheard.mechanism.plan import RoundPlan
from unheard.mechanism.values import CohortSum
from unheard.models.model import LanguageModel
from unheard.parts import nearest, require
from unheard.updates.user import User


class Engine(Protocol):
    """Engines are made for one model and one device, and keep no state between rounds."""

    @property
    def device(self) -> torch.device: ...

    def sum_updates(
        self, params_P: Tensor, users: Sequence[User], plan: RoundPlan, rng: np.random.Generator
    ) -> CohortSum:
        """The sum over users of w_k * Clip(delta_k). `rng` seeds FedSGD's batches, nothing else."""
        ...


@dataclass(frozen=True, kw_only=True)
class EngineChoice:
    """Which engine, on what device. Never part of what a run means: resume on another machine may choose anew."""

    kind: str = "auto"
    device: str = "auto"
    users_at_once: int | None = None
    """Users in a chunk. None: as many as fit a stated amount of memory."""

    def __post_init__(self) -> None:
        require(
            self.users_at_once is None or self.users_at_once >= 1,
            "users_at_once must be at least 1; leave it out to choose.",
        )

    def build(self, model: LanguageModel) -> Engine:
        from unheard.engines.reference import ReferenceEngine
        from unheard.engines.vectorised import VectorisedEngine

        kinds = {"auto": VectorisedEngine, "reference": ReferenceEngine, "vectorised": VectorisedEngine}
        if self.kind not in kinds:
            raise InvalidValue(f"Unknown engine '{self.kind}'.{nearest(self.kind, kinds)}")
        if kinds[self.kind] is ReferenceEngine:
            return ReferenceEngine(model, self.torch_device())
        return VectorisedEngine(model, self.torch_device(), users_at_once=self.users_at_once)

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
