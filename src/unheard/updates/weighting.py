"""How much a user counts: w_k = min(n_k / w-hat, 1), always in [0, 1], as fixed-point integers.

In: how many tokens each user has. Out: weights in units of 2^-30, so that sums of them are exact and the same in any order.
Where in the paper: Algorithm 1, "per-user example cap w-hat", and W = sum of w_k. W is itself a fact about the users, so here
it is declared in the run file, never computed from the store.
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
        return np.full(len(num_tokens_U), ONE, dtype=np.int64)

    def total(self, population: int) -> float:
        return float(population)


@dataclass(frozen=True, kw_only=True)
class CappedWeights:
    """w_k = min(n_k / weight_cap, 1) with the declared total W."""

    weight_cap: float
    total_weight: float
    """The declared W: your estimate of the sum of all users' weights, from public knowledge or a count that you paid for."""

    def __post_init__(self) -> None:
        require_positive(weight_cap=self.weight_cap, total_weight=self.total_weight)

    def units(self, num_tokens_U: np.ndarray) -> np.ndarray:
        # DP: the minimum with 1 bounds what a user with much text can add; floor() so that rounding never raises a weight.
        return np.floor(np.minimum(np.asarray(num_tokens_U, dtype=np.float64) / self.weight_cap, 1.0) * ONE).astype(
            np.int64
        )

    def total(self, population: int) -> float:
        return self.total_weight
