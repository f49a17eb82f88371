"""User weights: w_k = min(n_k / w-hat, 1), always in [0, 1], as fixed-point integers.

Input: the number of tokens of each user. Output: weights in units of 2^-30, so that sums of weights are exact in any
order. In the paper: Algorithm 1, "per-user example cap w-hat", and W = sum of w_k. W depends on the users, so it is
declared in the run file and never computed from the store.

    >>> CappedWeights(weight_cap=100, total_weight=5000.0).units(np.array([50, 200])) / ONE
    array([0.5, 1. ])
"""

from dataclasses import dataclass

import numpy as np

from unheard.config import require_positive

ONE = 2**30
"""The weight 1, in fixed-point units."""


@dataclass(frozen=True, kw_only=True)
class EqualWeights:
    """w_k = 1 for every user, so W is the declared population."""

    def units(self, num_tokens_U: np.ndarray) -> np.ndarray:
        """w_k of each user in units of 2^-30, int64."""
        return np.full(len(num_tokens_U), ONE, dtype=np.int64)

    def total(self, population: int) -> float:
        """W, from declared numbers only."""
        return float(population)


@dataclass(frozen=True, kw_only=True)
class CappedWeights:
    """w_k = min(n_k / weight_cap, 1), where n_k is the number of the user's tokens.

    Args:
        weight_cap: w-hat, the number of tokens from which on a user has weight 1.
        total_weight: W as declared: your estimate of the sum of all users' weights, from public knowledge or from a
            count that was charged to a ledger.

    Raises:
        InvalidValue: unless both are above 0.
    """

    weight_cap: float
    total_weight: float

    def __post_init__(self) -> None:
        require_positive(weight_cap=self.weight_cap, total_weight=self.total_weight)

    def units(self, num_tokens_U: np.ndarray) -> np.ndarray:
        """w_k of each user in units of 2^-30, int64, rounded down."""
        # DP: the minimum with 1 bounds what a user with much text can add; floor() so that rounding never raises a
        # weight.
        return np.floor(np.minimum(np.asarray(num_tokens_U, dtype=np.float64) / self.weight_cap, 1.0) * ONE).astype(
            np.int64
        )

    def total(self, population: int) -> float:
        """W, from declared numbers only."""
        return self.total_weight
