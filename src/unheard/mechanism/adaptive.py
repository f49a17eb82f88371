"""A clip norm that follows the users: S moves towards a quantile of their update norms, which is counted in private.

In: how many users of a cohort were never clipped. Out: the next round's S, public. Where from: Andrew, Thakkar, McMahan and
Ramaswamy, "Differentially Private Learning with Adaptive Clipping" (2021). With a clip after every local step the final norm
never exceeds S, so the bit that a user gives is "no local step of mine was clipped". The proof: docs/privacy.md, section 5a.
"""

import math
from dataclasses import dataclass

import numpy as np

from unheard.errors import UnprovenCombination
from unheard.mechanism.clipping import Ball, FlatClip
from unheard.parameters import Layout
from unheard.parts import require, require_positive

WIDEST = 2.0**30
"""S stays within this factor of where it began, so that no streak of noise makes it vanish or overflow."""


@dataclass(frozen=True, kw_only=True)
class AdaptiveClip:
    """S <- S * exp(-learning_rate * (fraction unclipped - quantile)), with the fraction counted under noise."""

    initial_norm: float
    quantile: float = 0.5
    """The share of users whose updates should stay whole: 0.5 is the median of their norms."""
    learning_rate: float = 0.2
    count_noise_std: float | None = None
    """sigma_b, the noise on the count of unclipped users. None: a twentieth of the users expected in a round."""

    def __post_init__(self) -> None:
        require_positive(initial_norm=self.initial_norm, count_noise_std=self.count_noise_std)
        require(0 < self.quantile < 1, "quantile must be between 0 and 1.")
        require(0 < self.learning_rate <= 1, "learning_rate must be above 0, and at most 1.")

    def balls(self, layout: Layout) -> list[Ball]:
        return FlatClip(norm=self.initial_norm).balls(layout)

    def l2_bound(self, layout: Layout) -> float:
        return self.initial_norm

    def at_norm(self, norm: float) -> "AdaptiveClip":
        raise UnprovenCombination(
            "A schedule sets clip_norm, but [clip] is 'adaptive' and sets it itself. Leave clip_norm out of [[schedule]]."
        )

    def noise_on_the_count(self, expected_users: float) -> float:
        """sigma_b, from declared numbers only."""
        return self.count_noise_std if self.count_noise_std is not None else max(expected_users / 20, 1e-9)

    def share_for_the_update(self, z: float, count_noise_std: float) -> float:
        """z_delta, the noise on the update, so that update and count together are one release at z."""
        if not z < 2 * count_noise_std:
            # DP: a count with so little noise costs more than the whole round may; there is no z_delta that pays for it.
            raise UnprovenCombination(
                f"Adaptive clipping at noise_multiplier = {z:g} with count_noise_std = {count_noise_std:g}: the count alone would "
                "cost more than the round is charged, since z must be below 2 * count_noise_std. Raise count_noise_std, or lower z."
            )
        return (z**-2 - (2 * count_noise_std) ** -2) ** -0.5

    def together(self, z_delta: float, count_noise_std: float) -> float:
        """The noise multiplier of update and count as one Gaussian release, which is what a round is charged as."""
        # DP: one user moves the update by 1 in units of its sensitivity and the centred count by 1/2, both in one release:
        # 1/z^2 = 1/z_delta^2 + 1/(2 sigma_b)^2. Charged as one Poisson event, since one cohort gave both.
        return (z_delta**-2 + (2 * count_noise_std) ** -2) ** -0.5

    def next_norm(
        self, norm: float, balance: int, expected_users: float, count_noise_std: float, rng: np.random.Generator
    ) -> float:
        """S of the next round. `balance` is how many more users were unclipped than clipped: each counts +1/2 or -1/2."""
        # DP: in half users one person moves the balance by 1, so the noise is 2 sigma_b; whole numbers, as in the sum.
        noisy = balance + round(float(rng.standard_normal()) * 2 * count_noise_std)
        # DP: the denominator is the expected number of users, declared; who came is not known here.
        fraction = 0.5 + noisy / (2 * expected_users)
        # Too many unclipped: S is above the quantile, and goes down. (The other sign runs away from it.)
        moved = math.log(norm) - self.learning_rate * (fraction - self.quantile)
        limits = math.log(self.initial_norm / WIDEST), math.log(self.initial_norm * WIDEST)
        return math.exp(min(max(moved, limits[0]), limits[1]))

    def __str__(self) -> str:
        return f"flat, S from {self.initial_norm:g} on following the {self.quantile:g} quantile"
