"""FederatedSGD: each user contributes one gradient.

In the paper: UserUpdateFedSGD of Algorithm 1, and appendix, "Experiments with SGD" (B = the user's whole data). It is
one local step, so the engines compute it as they compute FedAvg: theta0 - eta * gradient, clipped, minus theta0.

    >>> from unheard.updates.users import User
    >>> FedSGD(unroll=5).batches(User(np.arange(23)), seed=0).shape  # one batch of all of the user's windows
    (1, 5, 6)
"""

from dataclasses import dataclass, replace

import numpy as np

from unheard.config import require, require_positive
from unheard.randomness import reproducible_generator
from unheard.updates.users import User, batches_of, windows_of


@dataclass(frozen=True, kw_only=True)
class FedSGD:
    """One gradient of a user, on all or on some of their text.

    Args:
        batch_size: windows drawn from the user's own; None: all of them.
        unroll: T, tokens per window.
        learning_rate: eta, the factor of the gradient.

    Raises:
        InvalidValue: for a number out of range.
    """

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
        """One batch, [1, B, T + 1], or none if the user has no target. `seed` is the seed of the round's batches."""
        windows_KW = windows_of(user.tokens, self.unroll)
        if self.batch_size is not None and len(windows_KW) > self.batch_size:
            # DP: a stream for each user, so that what one draws does not move what another draws.
            rng = reproducible_generator(seed, "batch", user.number)
            windows_KW = windows_KW[np.sort(rng.choice(len(windows_KW), size=self.batch_size, replace=False))]
        return batches_of(windows_KW, self.batch_size or _windows_of_batch(len(windows_KW)))

    def cost(self, num_tokens_U: np.ndarray) -> np.ndarray:
        """About the time of each user's update, in local steps of FedAvg's default size, plus one for the clip and the
        sum."""
        targets_U = np.maximum(np.asarray(num_tokens_U, dtype=np.int64) - 1, 0)
        windows_U = -(-targets_U // self.unroll)
        return 1.0 + (windows_U if self.batch_size is None else np.minimum(windows_U, self.batch_size)) / 8

    def at_learning_rate(self, learning_rate: float) -> "FedSGD":
        """The same with another learning rate, for a schedule."""
        return replace(self, learning_rate=learning_rate)


def _windows_of_batch(windows: int) -> int:
    """The size of a batch of all of a user's windows, rounded up to one of a few sizes with empty windows (at most a
    quarter).

    Engines process users with batches of one size together. The size depends on this user alone."""
    step = 2 ** max(windows.bit_length() - 3, 0)
    return max(-(-windows // step) * step, 1)
