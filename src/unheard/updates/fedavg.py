"""FederatedAveraging: a user takes many small steps on their own text, and is clipped after every one.

Where in the paper: UserUpdateFedAvg of Algorithm 1. This part says which batches a user steps through; the engines take the
steps (engines/reference.py is the pseudocode, line by line).
"""

from dataclasses import dataclass, replace

import numpy as np

from unheard.config import LARGEST_NUMBER, require, require_positive
from unheard.updates.users import User, batches_of, windows_of


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
        require(1 <= self.batch_size <= 10**6, "batch_size must be at least 1, and at most a million.")
        require(1 <= self.unroll <= 10**6, "unroll must be at least 1 token, and at most a million.")
        require(1 <= self.epochs <= 1000, "epochs must be at least 1, and at most 1000.")
        require_positive(learning_rate=self.learning_rate)
        require(0 <= self.update_penalty <= LARGEST_NUMBER, "update_penalty must be 0 or more.")

    def batches(self, user: User, seed: int) -> np.ndarray:
        """E passes over the user's batches, in the order in which they wrote: [S, B, T + 1]. Nothing here is drawn."""
        once_SBW = batches_of(windows_of(user.tokens, self.unroll), self.batch_size)
        return np.tile(once_SBW, (self.epochs, 1, 1))

    def at_learning_rate(self, learning_rate: float) -> "FedAvg":
        return replace(self, learning_rate=learning_rate)
