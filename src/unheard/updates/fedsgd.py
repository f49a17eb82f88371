"""FederatedSGD: a user gives one gradient, clipped once.

Where in the paper: UserUpdateFedSGD of Algorithm 1, and appendix "Experiments with SGD" (B = the user's whole data). It is one
local step, so what an engine computes is the same as ever: theta0 - eta * gradient, clipped, minus theta0.
"""

from dataclasses import dataclass, replace

import numpy as np

from unheard.config import require, require_positive
from unheard.randomness import reproducible_generator
from unheard.updates.users import User, batches_of, windows_of


@dataclass(frozen=True, kw_only=True)
class FedSGD:
    """A batch of `batch_size` windows drawn from the user's own, or (None) all of the user's data."""

    batch_size: int | None = None
    unroll: int = 10
    learning_rate: float = 6.0
    update_penalty = 0.0  # the first step starts at theta0, where a penalty on theta - theta0 has no gradient

    def __post_init__(self) -> None:
        in_range = self.batch_size is None or 1 <= self.batch_size <= 10**6
        require(in_range, "batch_size must be at least 1, and at most a million; leave it out for all data.")
        require(1 <= self.unroll <= 10**6, "unroll must be at least 1 token, and at most a million.")
        require_positive(learning_rate=self.learning_rate)

    def batches(self, user: User, seed: int) -> np.ndarray:
        """One batch, [1, B, T + 1], or none if the user has nothing to predict. `seed` is the round's."""
        windows_KW = windows_of(user.tokens, self.unroll)
        if self.batch_size is not None and len(windows_KW) > self.batch_size:
            # DP: a stream for each user, so that what one draws does not move what another draws.
            rng = reproducible_generator(seed, "batch", user.number)
            windows_KW = windows_KW[np.sort(rng.choice(len(windows_KW), size=self.batch_size, replace=False))]
        return batches_of(windows_KW, self.batch_size or _windows_of_batch(len(windows_KW)))

    def at_learning_rate(self, learning_rate: float) -> "FedSGD":
        return replace(self, learning_rate=learning_rate)


def _windows_of_batch(windows: int) -> int:
    """Of a batch of all of a user's data: a few sizes for everybody, reached with empty windows (at most a quarter of them), since
    engines take users of one size together. It depends on this user alone."""
    step = 2 ** max(windows.bit_length() - 3, 0)
    return max(-(-windows // step) * step, 1)
