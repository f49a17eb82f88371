"""Clips: bound how far one user can move the model.

A clip is a list of balls. A ball is a range of the flat parameter vector and the largest L2 norm that a delta may have
in that range; the ranges are in order, disjoint and without gaps. Clipping scales each range of a delta into its ball:
delta * min(1, S / ||delta||).

| class | ball(s) | in the paper |
| --- | --- | --- |
| `FlatClip` | one around the whole delta | FlatClip of Algorithm 1, equation 1 |
| `PerLayerClip` | one around each layer | PerLayerClip of Algorithm 1 |
| `AdaptiveClip` | one, whose radius follows a quantile of the users' norms | - (Andrew et al., NeurIPS 2021) |
| `NoClip` | none: a non-private baseline | - |

A delta is clipped twice. The engines clip after every local step, as in the paper (`clip_`). mechanism/aggregation.py
clips the final delta again, with norms in float64; the guarantee depends only on this second clip. `l2_bound` is S, the
largest L2 norm of a clipped delta, which determines the sensitivity.

    >>> from unheard.parameters import Layout
    >>> layout = Layout((("weight", (3, 4)), ("bias", (4,))))
    >>> FlatClip(norm=15.0).l2_bound(layout)
    15.0
    >>> [ball.where for ball in PerLayerClip(norm=15.0).balls(layout)]
    [slice(0, 12, None), slice(12, 16, None)]

To add a clip, write a class that inherits from `Clip`, and add a line to `KINDS` in mechanism/plan.py
(docs/extending.md has an example).

Reference: Andrew, Thakkar, McMahan and Ramaswamy, "Differentially Private Learning with Adaptive Clipping", NeurIPS
2021, arXiv:1905.03871. The proof for the form used here is in docs/privacy.md, section 7.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from unheard.config import nearest, require, require_positive
from unheard.errors import InvalidValue, UnprovenCombination
from unheard.mechanism.aggregation import Ball
from unheard.mechanism.noise import Noise
from unheard.parameters import Layout


class Clip(Protocol):
    """The interface of a clip, which the plan, the aggregation and the engines use."""

    def balls(self, layout: Layout) -> list[Ball]:
        """Return the ranges of the parameter vector and their radii.

        The ranges are in order and disjoint, and cover the vector. The list is empty if there is no clip.
        """
        ...

    def l2_bound(self, layout: Layout) -> float:
        """Return S, the largest L2 norm of a clipped delta, rounded up; infinity if there is no clip."""
        ...

    def at_norm(self, norm: float) -> "Clip":
        """Return the same clip with another S, for a schedule that sets `clip_norm`.

        Raises:
            InvalidValue: The clip has no S.
            UnprovenCombination: A schedule may not set the S of this clip.
        """
        ...

    def check_private(self, noises: Sequence[Noise], expected_users: float) -> None:
        """Raise `UnprovenCombination` if a plan with these noises may not use the clip.

        Does nothing by default: a clip with a fixed bound may be used with every noise.

        Args:
            noises: The noise of each phase of the schedule.
            expected_users: q K, from declared numbers.
        """
        return None

    @property
    def adaptive(self) -> "AdaptiveClip | None":
        """The clip itself if its norm S follows the users' updates, else None, which is the default."""
        return None


@dataclass(frozen=True, kw_only=True)
class FlatClip(Clip):
    """Clip the whole delta to an L2 norm of at most S (the paper's FlatClip).

    Args:
        norm: S, above 0.

    Example:
        >>> str(FlatClip(norm=15.0))
        'flat, S = 15'
    """

    norm: float

    def __post_init__(self) -> None:
        require_positive(norm=self.norm)

    def balls(self, layout: Layout) -> list[Ball]:
        """Return one ball of radius S over all parameters."""
        return [Ball(slice(0, layout.total), self.norm)]

    def l2_bound(self, layout: Layout) -> float:
        """Return S, the radius of the one ball."""
        return self.norm

    def at_norm(self, norm: float) -> "FlatClip":
        """Return the same clip with another S, for a schedule."""
        return replace(self, norm=norm)

    def __str__(self) -> str:
        return f"flat, S = {self.norm:g}"


@dataclass(frozen=True, kw_only=True)
class PerLayerClip(Clip):
    """Clip each of the m layers to its own bound S_j. In total S = sqrt(sum of S_j^2) (the paper's PerLayerClip).

    Args:
        norm: The total S; each layer gets S_j = S / sqrt(m).
        norms: S_j by the name of the layer, instead of `norm`; every layer needs one.

    Raises:
        InvalidValue: Both or none of the two are given, or a bound is not above 0. `balls` and `l2_bound` raise it if
            the names in `norms` are not the layers of the model.

    Example:
        >>> str(PerLayerClip(norm=15.0))
        'per layer, S = 15 shared equally'
    """

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
        """Return one ball per layer, of radius S_j."""
        return [Ball(layout.slices[name], radius) for name, radius in self._radii(layout).items()]

    def l2_bound(self, layout: Layout) -> float:
        """Return S, the root of the sum of the squared radii, rounded up."""
        # DP: S is the root of the sum of squares, not the largest S_j, and never below the true value.
        radii = self._radii(layout).values()
        bound = math.nextafter(math.sqrt(math.fsum(r * r for r in radii)), math.inf)
        while Fraction(bound) ** 2 < sum(Fraction(r) ** 2 for r in radii):
            bound = math.nextafter(bound, math.inf)
        return bound

    def at_norm(self, norm: float) -> "PerLayerClip":
        """Return the same clip with another total S. The proportions of the S_j stay the same."""
        if self.norms is None:
            return replace(self, norm=norm)
        share = norm / math.sqrt(math.fsum(r * r for r in self.norms.values()))
        return replace(self, norms={name: r * share for name, r in self.norms.items()})

    def _radii(self, layout: Layout) -> dict[str, float]:
        """Return S_j by the name of the layer, in the order of the layout."""
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
class NoClip(Clip):
    """Do not clip, for a non-private baseline. A plan with noise raises `UnprovenCombination`.

    Example:
        >>> str(NoClip())
        'none'
    """

    def balls(self, layout: Layout) -> list[Ball]:
        """Return no ball: nothing is clipped."""
        return []

    def l2_bound(self, layout: Layout) -> float:
        """Return infinity: one user may move the sum by any amount."""
        return math.inf

    def at_norm(self, norm: float) -> "NoClip":
        """Raise `InvalidValue`: there is no S to change."""
        raise InvalidValue(
            "A schedule sets clip_norm, but [clip] is 'none'. Start with a clip, or leave clip_norm out."
        )

    def check_private(self, noises: Sequence[Noise], expected_users: float) -> None:
        """Raise `UnprovenCombination` for every noise."""
        raise UnprovenCombination(
            "Noise without a clip proves nothing: no noise is large enough. Set [clip] kind = 'flat'."
        )

    def __str__(self) -> str:
        return "none"


WIDEST = 2.0**30
"""An adaptive S stays within this factor of its initial value, so that the noise cannot make it vanish or overflow."""


@dataclass(frozen=True, kw_only=True)
class AdaptiveClip:
    """A flat clip whose S follows a quantile of the norms of the users' updates.

    After each round S <- S * exp(-learning_rate * (fraction unclipped - quantile)). The fraction is computed from a
    count of unclipped users with noise. The engines clip after every local step, so the norm of the final delta is
    never above S; a user therefore counts as unclipped if none of their local steps was clipped. The update and the
    count are one release with the declared noise multiplier z. The count uses a part of this privacy cost, so the
    update gets noise with a larger multiplier z_delta > z.

    Args:
        initial_norm: S of the first round.
        quantile: The fraction of users whose updates should stay unclipped; 0.5 is the median of their norms.
        learning_rate: How fast S moves, above 0 and at most 1.
        count_noise_std: sigma_b, the standard deviation of the noise on the count of unclipped users, in users. None: a
            twentieth of the expected number of users per round.

    Raises:
        InvalidValue: A number is out of range.
        UnprovenCombination: The plan declares a fixed sigma, or its z is not below 2 * sigma_b (`check_private`).

    Example:
        >>> str(AdaptiveClip(initial_norm=1.0))
        'flat, S from 1 on following the 0.5 quantile'
    """

    initial_norm: float
    quantile: float = 0.5
    learning_rate: float = 0.2
    count_noise_std: float | None = None

    def __post_init__(self) -> None:
        require_positive(initial_norm=self.initial_norm, count_noise_std=self.count_noise_std)
        require(0 < self.quantile < 1, "quantile must be between 0 and 1.")
        require(0 < self.learning_rate <= 1, "learning_rate must be above 0, and at most 1.")

    def balls(self, layout: Layout) -> list[Ball]:
        """Return one ball over all parameters, with the S of the first round. `RoundPlan.clip` has the present S."""
        return FlatClip(norm=self.initial_norm).balls(layout)

    def l2_bound(self, layout: Layout) -> float:
        """Return the S of the first round. `RoundPlan` replaces this clip by a `FlatClip` with the S of its round."""
        return self.initial_norm

    def at_norm(self, norm: float) -> "AdaptiveClip":
        """Raise `UnprovenCombination`: the clip sets S itself, so a schedule may not."""
        raise UnprovenCombination(
            "A schedule sets clip_norm, but [clip] is 'adaptive' and sets it itself. Leave clip_norm out of [[schedule]]."
        )

    def check_private(self, noises: Sequence[Noise], expected_users: float) -> None:
        """Check that the declared z covers the cost of the count too.

        Raises:
            UnprovenCombination: A noise has a fixed sigma, or the count alone costs as much as a round is charged.
        """
        if any(noise.noise_std is not None for noise in noises):
            # DP: with a fixed sigma, z would depend on S and so on the users' data; no proof here covers a cost that
            # depends on the data.
            raise UnprovenCombination(
                "Adaptive clipping needs noise that grows and shrinks with S: give noise_multiplier (z), not noise_std (sigma)."
            )
        for noise in noises:
            if noise.noise_multiplier is not None:
                self.update_multiplier(noise.noise_multiplier, self.count_noise(expected_users))

    @property
    def adaptive(self) -> "AdaptiveClip":
        """This clip itself: its S follows a quantile of the users' norms."""
        return self

    def at_round(self, norm: float | None) -> FlatClip:
        """Return the flat clip of one round.

        Args:
            norm: The present S; None in the first round.
        """
        return FlatClip(norm=norm or self.initial_norm)

    def count_noise(self, expected_users: float) -> float:
        """Return sigma_b, the standard deviation of the noise on the count. It depends on declared numbers only."""
        return self.count_noise_std if self.count_noise_std is not None else max(expected_users / 20, 1e-9)

    def update_multiplier(self, z: float, count_noise_std: float) -> float:
        """Return z_delta, the noise multiplier of the update with which update and count together are a release at z.

        Args:
            z: The noise multiplier of the round.
            count_noise_std: sigma_b.

        Raises:
            UnprovenCombination: The count alone costs as much as the round is charged.
        """
        if not z < 2 * count_noise_std:
            # DP: with so little noise the count alone costs at least as much as the round is charged, and no z_delta
            # can compensate.
            raise UnprovenCombination(
                f"Adaptive clipping at noise_multiplier = {z:g} with count_noise_std = {count_noise_std:g}: the count alone would "
                "cost more than the round is charged, since z must be below 2 * count_noise_std. Raise count_noise_std, or lower z."
            )
        return (z**-2 - (2 * count_noise_std) ** -2) ** -0.5

    def joint_multiplier(self, z_delta: float, count_noise_std: float) -> float:
        """Return the noise multiplier of update and count as one Gaussian release, at which the round is charged."""
        # DP: one user moves the update by 1 in units of its sensitivity and the centred count by 1/2, both in one
        # release: 1/z^2 = 1/z_delta^2 + 1/(2 sigma_b)^2. Charged as one Poisson event, since one cohort gave both.
        return (z_delta**-2 + (2 * count_noise_std) ** -2) ** -0.5

    def next_norm(
        self, norm: float, balance: int, expected_users: float, count_noise_std: float, rng: np.random.Generator
    ) -> float:
        """Move S towards the quantile of the norms, and return the S of the next round.

        Args:
            norm: S of this round.
            balance: The number of unclipped users minus the number of clipped users. Private.
            expected_users: The declared expected number of users per round, the denominator of the fraction.
            count_noise_std: sigma_b, the standard deviation of the noise on the count, in users.
            rng: The stream for the noise on the count.
        """
        # DP: the balance counts half users: one user moves it by 1, so its noise is 2 sigma_b. The noise is rounded to
        # whole numbers, as in the sum.
        noisy = balance + round(float(rng.standard_normal()) * 2 * count_noise_std)
        # DP: the denominator is the declared expected number of users, not the number of users that were drawn.
        fraction = 0.5 + noisy / (2 * expected_users)
        # If too many users are unclipped, S is above the quantile and must become smaller.
        moved = math.log(norm) - self.learning_rate * (fraction - self.quantile)
        limits = math.log(self.initial_norm / WIDEST), math.log(self.initial_norm * WIDEST)
        return math.exp(min(max(moved, limits[0]), limits[1]))

    def __str__(self) -> str:
        return f"flat, S from {self.initial_norm:g} on following the {self.quantile:g} quantile"


def clip_(delta_UP: Tensor, balls: Sequence[Ball], unclipped_U: Tensor | None = None) -> Tensor:
    """Clip deltas in place, ball by ball: delta * min(1, S / ||delta||), with norms in float64.

    Args:
        delta_UP: [..., P], one delta per row. A NaN stays a NaN; the aggregation replaces such a delta by zero.
        balls: The balls of `Clip.balls`.
        unclipped_U: A bool tensor; set to False for every row that is scaled. None if it is not needed.

    Returns:
        `delta_UP` itself.
    """
    for ball in balls:
        part_UL = delta_UP[..., ball.where]
        norm_U = torch.linalg.vector_norm(part_UL, dim=-1, keepdim=True, dtype=torch.float64)
        if unclipped_U is not None:
            unclipped_U &= ~(norm_U[..., 0] > ball.radius)
        # `where` instead of min(1, S / norm): with a NaN norm the minimum can be 1, which would not clip.
        part_UL.mul_(torch.where(norm_U > ball.radius, ball.radius / norm_U, 1.0).to(delta_UP.dtype))
    return delta_UP
