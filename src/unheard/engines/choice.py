"""The choice of engine: which engine sums the updates, on which device, in which precision.

`EngineChoice` is the `[engine]` table of a run file. The table does not define what a run computes: a run may be
resumed with another engine on another machine, and gives the same model within the rounding that tests/agreement
states.

    engine = EngineChoice(kind="reference", device="cpu").build(model)

`ENGINES` is the registry. A new engine needs a class with `device`, `sum_updates` and `sum_cohorts` (the protocol
`Engine` in engines/engine.py), the constructor and the class method of `EngineClass` below, and a line in `ENGINES`."""

import logging
from dataclasses import dataclass
from typing import Protocol

import torch

from unheard.config import nearest, require, require_positive
from unheard.engines.engine import Engine
from unheard.engines.reference import ReferenceEngine
from unheard.engines.stacked.engine import StackedEngine
from unheard.engines.vectorised import VectorisedEngine
from unheard.errors import InvalidValue
from unheard.models.model import LanguageModel


class EngineClass(Protocol):
    """What `EngineChoice` calls on the class of an engine: its constructor and the class method `unsupported`."""

    def __call__(self, model: LanguageModel, device: torch.device, users_at_once: int | None, precision: str) -> Engine:
        """Return an engine for one model on one device.

        Args:
            model: The model whose updates the engine sums.
            device: The device on which the engine computes.
            users_at_once: The number of users in a chunk. None: the engine chooses as many as fit into memory.
            precision: "auto", "float32" or "bfloat16".
        """
        ...

    def unsupported(self, model: LanguageModel, precision: str) -> str | None:
        """Return the reason why the engine cannot run this model in this precision; None if it can.

        The reason is a sentence that also says what to do. `EngineChoice.build` uses it as the error message.
        """
        ...


ENGINES: dict[str, EngineClass] = {
    "stacked": StackedEngine,
    "vectorised": VectorisedEngine,
    "reference": ReferenceEngine,
}
"""The engines by their name in a run file.

`kind = "auto"` takes the first engine that supports the model, so faster engines come first.
"""

logger = logging.getLogger("unheard.engines")
PRECISIONS = ("auto", "float32", "bfloat16")


@dataclass(frozen=True, kw_only=True)
class EngineChoice:
    """Which engine sums the updates, on which device and in which precision.

    The choice does not define what a run computes, so a resumed run may have another engine.

    Args:
        kind: "auto", or a name of `ENGINES`.
        device: "auto" (CUDA if there is a GPU), "cpu", "cuda" or "cuda:N".
        users_at_once: The number of users in a chunk. None: as many as fit into memory. The engine `vectorised` always
            computes one user at a time on a CPU.
        precision: The precision of the products within a user's local steps: "float32", or "bfloat16" (the default on
            CUDA). On a CPU bfloat16 is faster if the processor has instructions for it (avx512_bf16 or AMX). The clip
            of the returned delta and the sum are exact in either case, so the guarantee does not depend on `precision`.
        rank_timeout: Seconds that ranks wait for each other. After that a `RankError` names the rank that is late.
        corpus_part: The path at which each rank finds its part of the store, for machines without a shared disk.
            {rank}, {local_rank} and {node} in it are replaced by the numbers of the rank. None: every rank reads the
            store at the path of the run file. A run with a single process raises `InvalidValue` if this is set.
        node_timeout: Seconds that the server of a federated run waits for its nodes in each stage of a round. A node
            that is late contributes nothing to the round.
        secure_aggregation: Whether the nodes of a federated run mask their updates, so that the server sees only the
            sum (federated/secure_aggregation.py).
        parties: The smallest number of nodes in each secure aggregation. Nodes without a drawn user add zero. None: the
            expected number of users per round plus 3 standard deviations, at least 8, but at most the number of nodes.

    Raises:
        InvalidValue: The engine or the precision is unknown, or a number is out of range.

    Example:
        >>> EngineChoice(kind="vectorised", device="cpu").kind
        'vectorised'
    """

    kind: str = "auto"
    device: str = "auto"
    users_at_once: int | None = None
    precision: str = "auto"
    rank_timeout: float = 600.0
    corpus_part: str | None = None
    node_timeout: float = 600.0
    secure_aggregation: bool = False
    parties: int | None = None

    def __post_init__(self) -> None:
        kinds = ("auto", *ENGINES)
        if self.kind not in kinds:
            raise InvalidValue(f"Unknown engine '{self.kind}'.{nearest(self.kind, kinds)}")
        require(
            self.precision in PRECISIONS, f"precision must be one of {', '.join(PRECISIONS)}, not '{self.precision}'."
        )
        require(
            self.users_at_once is None or self.users_at_once >= 1,
            "users_at_once must be at least 1; leave it out to let the engine choose.",
        )
        require_positive(rank_timeout=self.rank_timeout, node_timeout=self.node_timeout)
        require(self.parties is None or self.parties >= 3, "parties must be at least 3; leave it out for the default.")

    def build(self, model: LanguageModel) -> Engine:
        """Return the engine for a model.

        Raises:
            InvalidValue: The engine does not support the model or the precision, or the device is not available.
        """
        device = self.torch_device()
        kinds = list(ENGINES) if self.kind == "auto" else [self.kind]
        reasons = []
        for kind in kinds:
            reason = ENGINES[kind].unsupported(model, self.precision)
            if reason is None:
                logger.info("engine %s on %s", kind, device)
                return ENGINES[kind](model, device, self.users_at_once, self.precision)
            reasons.append(reason)
        raise InvalidValue(reasons[0])

    def torch_device(self) -> torch.device:
        """Return the torch device of this choice. Allocates a small tensor to check that a named device works.

        Raises:
            InvalidValue: The device is neither "cpu" nor "cuda", or cannot be used on this machine.
        """
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            device = torch.device(self.device)
            if device.type not in ("cpu", "cuda"):
                raise RuntimeError("only cpu and cuda are supported")
            torch.zeros(1, device=device)
        except (RuntimeError, AssertionError) as error:
            raise InvalidValue(
                f"Device '{self.device}' cannot be used here ({error}). Use device = 'auto' or 'cpu'."
            ) from None
        return device
