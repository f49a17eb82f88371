"""FederatedAveraging: each user takes many local steps on their own text.

In the paper: UserUpdateFedAvg of Algorithm 1. This part defines which batches a user steps through and with which
learning rate; the engines take the steps and clip after each (engines/reference.py follows the pseudocode line by
line).

    >>> from unheard.updates.users import User
    >>> FedAvg(batch_size=2, unroll=5).batches(User(np.arange(23)), seed=0).shape  # [steps, batch, unroll + 1]
    (3, 2, 6)
"""

from dataclasses import dataclass, replace

import numpy as np

from unheard.config import LARGEST_NUMBER, require, require_positive
from unheard.updates.users import User, batches_of, windows_of


@dataclass(frozen=True, kw_only=True)
class FedAvg:
    """The local training of a user by FederatedAveraging. The defaults are the paper's.

    Args:
        batch_size: B, sequences per local batch.
        unroll: T, tokens per sequence.
        epochs: E, passes over the user's text.
        learning_rate: eta of the local steps.
        update_penalty: lambda of an L2 penalty lambda/2 ||theta - theta0||^2 on the update, which the paper tried
            without effect (appendix).

    Raises:
        InvalidValue: for a number out of range.
    """

    batch_size: int = 8
    unroll: int = 10
    epochs: int = 1
    learning_rate: float = 6.0
    update_penalty: float = 0.0

    def __post_init__(self) -> None:
        require(1 <= self.batch_size <= 10**6, "batch_size must be at least 1, and at most a million.")
        require(1 <= self.unroll <= 10**6, "unroll must be at least 1 token, and at most a million.")
        require(1 <= self.epochs <= 1000, "epochs must be at least 1, and at most 1000.")
        require_positive(learning_rate=self.learning_rate)
        require(0 <= self.update_penalty <= LARGEST_NUMBER, "update_penalty must be 0 or more.")

    def batches(self, user: User, seed: int) -> np.ndarray:
        """The batches of the user's local steps:

        E passes over their text in the order written, [S, B, T + 1]. Nothing is random.
        """
        once_SBW = batches_of(windows_of(user.tokens, self.unroll), self.batch_size)
        return np.tile(once_SBW, (self.epochs, 1, 1))

    def cost(self, num_tokens_U: np.ndarray) -> np.ndarray:
        """About the time of each user's update, in local steps, plus one for the clip and the sum; to balance the load
        of ranks."""
        targets_U = np.maximum(np.asarray(num_tokens_U, dtype=np.int64) - 1, 0)
        return 1.0 + self.epochs * -(-targets_U // (self.batch_size * self.unroll))

    def at_learning_rate(self, learning_rate: float) -> "FedAvg":
        """The same with another learning rate, for a schedule."""
        return replace(self, learning_rate=learning_rate)
