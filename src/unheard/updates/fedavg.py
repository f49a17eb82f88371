"""FederatedAveraging: a user takes many small steps on their own text, and is clipped after every one.

Where in the paper: UserUpdateFedAvg of Algorithm 1. This part says which batches a user steps through; the engines take the
steps (engines/reference.py is the pseudocode, line by line).
"""

from dataclasses import dataclass, replace

import numpy as np

from unheard.parts import require
from unheard.updates.user import batches_of, windows_of


@dataclass(frozen=True, kw_only=True)
class FedAvg:
    """B, E and eta of the paper, with its defaults."""

    batch_size: int = 8
    unroll: int = 10
    epochs: int = 1
    learning_rate: float = 6.0
    update_penalty: float = 0.0
    """lambda of an L2 penalty lambda/2 ||theta - theta0||^2 on the update, which the paper tried without effect (appendix)."""

    def __post_init__(self) -> None:
        require(self.batch_size >= 1, "batch_size must be at least 1.")
        require(self.unroll >= 1, "unroll must be at least 1 token.")
        require(self.epochs >= 1, "epochs must be at least 1.")
        require(self.learning_rate > 0, "learning_rate must be above 0.")
        require(self.update_penalty >= 0, "update_penalty must be 0 or more.")

    def batches(self, tokens: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """E passes over the user's batches, in the order in which they wrote: [S, B, T + 1]. Nothing here is drawn."""
        once_SBW = batches_of(windows_of(tokens, self.unroll), self.batch_size)
        return np.tile(once_SBW, (self.epochs, 1, 1))

    def at_learning_rate(self, learning_rate: float) -> "FedAvg":
        return replace(self, learning_rate=learning_rate)
