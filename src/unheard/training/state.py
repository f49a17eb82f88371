"""What training carries from one round to the next: the model, and the server's memory of earlier noisy averages.

Everything in a State is public: it was computed from noisy averages alone.
"""

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class State:
    """After `round` rounds."""

    round: int
    params_P: Tensor = field(repr=False)
    server_memory: dict[str, Tensor] = field(default_factory=dict, repr=False)
    clip_norm: float | None = None
    """S of the next round, where it follows the users: counted under noise, and so public like all else here."""
