"""A clip norm that follows the users: S moves towards a quantile of their update norms, which is counted in private.

In: how many users of a cohort were never clipped. Out: the next round's S, public. Where from: Andrew, Thakkar, McMahan and
Ramaswamy, "Differentially Private Learning with Adaptive Clipping" (2021). With a clip after every local step the final norm
never exceeds S, so the bit that a user gives is "no local step of mine was clipped". The proof: docs/privacy.md, section 7.
How far one user may move the model: flat, per layer, or not at all.

In: deltas [.., P]. Out: the same, with ||delta|| <= S. Where in the paper: FlatClip and PerLayerClip of Algorithm 1, equation 1.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from unheard.config import nearest, require, require_positive
from unheard.errors import InvalidValue, UnprovenCombination
from unheard.parameters import Layout


@dataclass(frozen=True)
class Ball:
    """A stretch of the flat vector and the largest norm allowed to it."""

    where: slice
    radius: float


@dataclass(frozen=True, kw_only=True)
class FlatClip:
    """The whole update has norm at most S."""

    norm: float

    def __post_init__(self) -> None:
        require_positive(norm=self.norm)

    def balls(self, layout: Layout) -> list[Ball]:
        return [Ball(slice(0, layout.total), self.norm)]

    def l2_bound(self, layout: Layout) -> float:
        return self.norm

    def at_norm(self, norm: float) -> "FlatClip":
        return replace(self, norm=norm)

    def __str__(self) -> str:
        return f"flat, S = {self.norm:g}"


@dataclass(frozen=True, kw_only=True)
class PerLayerClip:
    """Each of the m layers has its own bound: S_j = norm / sqrt(m), or `norms` by layer. S = sqrt(sum of S_j^2)."""

    norm: float | None = None
    norms: dict[str, float] | None = None

    def __post_init__(self) -> None:
        require(
            (self.norm is None) != (self.norms is None),
            "give exactly one of norm (shared out equally) and norms (by layer).",
        )
        require_positive(norm=self.norm)
        for bound in (self.norms or {}).values():
            require_positive(norms=bound)

    def __hash__(self) -> int:
        return hash((self.norm, tuple(sorted((self.norms or {}).items()))))

    def balls(self, layout: Layout) -> list[Ball]:
        return [Ball(layout.slices[name], radius) for name, radius in self._radii(layout).items()]

    def l2_bound(self, layout: Layout) -> float:
        # DP: S is the root of the sum of squares, not the largest S_j. fsum and nextafter: never below the true value.
        return math.nextafter(math.sqrt(math.fsum(r * r for r in self._radii(layout).values())), math.inf)

    def at_norm(self, norm: float) -> "PerLayerClip":
        """The same shares of another total S."""
        if self.norms is None:
            return replace(self, norm=norm)
        share = norm / math.sqrt(math.fsum(r * r for r in self.norms.values()))
        return replace(self, norms={name: r * share for name, r in self.norms.items()})

    def _radii(self, layout: Layout) -> dict[str, float]:
        if self.norms is None:
            assert self.norm is not None
            return dict.fromkeys(layout.names, self.norm / math.sqrt(len(layout)))
        for name in self.norms:
            if name not in layout.names:
                raise InvalidValue(
                    f"[clip.norms] names a layer '{name}' that the model lacks.{nearest(name, layout.names)}"
                )
        if missing := [name for name in layout.names if name not in self.norms]:
            raise InvalidValue(f"[clip.norms] lacks {', '.join(missing)}: every layer needs a bound.")
        return {name: self.norms[name] for name in layout.names}

    def __str__(self) -> str:
        return (
            f"per layer, S = {self.norm:g} shared equally" if self.norms is None else f"per layer, S_j = {self.norms}"
        )


@dataclass(frozen=True, kw_only=True)
class NoClip:
    """No bound: a non-private baseline."""

    def balls(self, layout: Layout) -> list[Ball]:
        return []

    def l2_bound(self, layout: Layout) -> float:
        return math.inf

    def at_norm(self, norm: float) -> "NoClip":
        raise InvalidValue(
            "A schedule sets clip_norm, but [clip] is 'none'. Start with a clip, or leave clip_norm out."
        )

    def __str__(self) -> str:
        return "none"


Clip = FlatClip | PerLayerClip | NoClip


def clip_(delta_UP: Tensor, balls: Sequence[Ball], unclipped_U: Tensor | None = None) -> Tensor:
    """delta * min(1, S / ||delta||) in place, ball by ball. Norms in float64. A NaN stays one, and is found later. Who is clipped
    is struck from `unclipped_U`."""
    for ball in balls:
        part_UL = delta_UP[..., ball.where]
        norm_U = torch.linalg.vector_norm(part_UL, dim=-1, keepdim=True, dtype=torch.float64)
        if unclipped_U is not None:
            unclipped_U &= ~(norm_U[..., 0] > ball.radius)
        # `where`, not min(1, S/norm): with a NaN the latter can come out as 1, which is no clip at all.
        part_UL.mul_(torch.where(norm_U > ball.radius, ball.radius / norm_U, 1.0).to(delta_UP.dtype))
    return delta_UP


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
