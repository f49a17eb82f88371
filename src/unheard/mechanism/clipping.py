"""Clips: how far one user may move the model.

A clip is described by balls: disjoint stretches of the flat parameter vector, in order and without gaps, each with the
largest L2 norm allowed to it. A delta is clipped by scaling each stretch into its ball, delta * min(1, S / ||delta||).

| class | ball(s) | in the paper |
| --- | --- | --- |
| `FlatClip` | one around the whole delta | FlatClip of Algorithm 1, equation 1 |
| `PerLayerClip` | one around each layer | PerLayerClip of Algorithm 1 |
| `AdaptiveClip` | one, whose radius follows a quantile of the users' norms | - (Andrew et al., NeurIPS 2021) |
| `NoClip` | none: a non-private baseline | - |

The clip is applied twice: by the engines after every local step, which is the paper's algorithm (`clip_`), and by
mechanism/aggregation.py to the returned delta in float64, which is what the guarantee rests on. `l2_bound` is the S of
the sensitivity: the norm that no clipped delta exceeds.

    >>> from unheard.parameters import Layout
    >>> layout = Layout((("weight", (3, 4)), ("bias", (4,))))
    >>> FlatClip(norm=15.0).l2_bound(layout)
    15.0
    >>> [ball.where for ball in PerLayerClip(norm=15.0).balls(layout)]
    [slice(0, 12, None), slice(12, 16, None)]

A new clip implements `Clip`, inherits the defaults of `BaseClip`, and gets a line in `KINDS` of mechanism/plan.py
(docs/extending.md has an example).

Reference: Andrew, Thakkar, McMahan and Ramaswamy, "Differentially Private Learning with Adaptive Clipping", NeurIPS
2021, arXiv:1905.03871. The proof for the form used here is in docs/privacy.md, section 7.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
    """What the plan, the aggregation and the engines need of a clip."""

    def balls(self, layout: Layout) -> list[Ball]:
        """The balls of the clip for a model: in order, disjoint, covering the vector; none for no clip."""
        ...

    def l2_bound(self, layout: Layout) -> float:
        """S: no clipped delta has a larger L2 norm. Never below the true value; infinite without a clip."""
        ...

    def at_norm(self, norm: float) -> "Clip":
        """The same clip with another S, for a schedule that sets `clip_norm`; raises if the clip has no S to set."""
        ...

    def check_private(self, noises: Sequence[Noise], expected_users: float) -> None:
        """Raise `UnprovenCombination` if a plan with these noises may not use the clip.

        Args:
            noises: The noise of each phase of the schedule.
            expected_users: q K, from declared numbers.
        """
        ...

    @property
    def adaptive(self) -> "AdaptiveClip | None":
        """The clip itself if its norm S follows the users' updates, else None."""
        ...


class BaseClip:
    """Defaults of `Clip` for a clip that has a bound and a fixed norm."""

    def check_private(self, noises: Sequence[Noise], expected_users: float) -> None:
        """Raise `UnprovenCombination` if the clip with this noise has no proof. By default every noise is allowed."""
        return None

    @property
    def adaptive(self) -> "AdaptiveClip | None":
        """The clip itself if its norm follows the users' updates, else None."""
        return None


@dataclass(frozen=True, kw_only=True)
class FlatClip(BaseClip):
    """The whole update has L2 norm at most S (the paper's FlatClip).

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
        """One ball of radius S over all parameters."""
        return [Ball(slice(0, layout.total), self.norm)]

    def l2_bound(self, layout: Layout) -> float:
        """Return S, the radius of the one ball."""
        return self.norm

    def at_norm(self, norm: float) -> "FlatClip":
        """The same clip with another S, for a schedule."""
        return replace(self, norm=norm)

    def __str__(self) -> str:
        return f"flat, S = {self.norm:g}"


@dataclass(frozen=True, kw_only=True)
class PerLayerClip(BaseClip):
    """Each of the m layers has a bound S_j of its own, and S = sqrt(sum of S_j^2) (the paper's PerLayerClip).

    Args:
        norm: The total S; each layer gets S_j = S / sqrt(m).
        norms: S_j by the name of the layer, instead of `norm`; every layer needs one.

    Raises:
        InvalidValue: Unless exactly one of the two is given; and, once the model is known, if `norms` has other layers.

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
        """One ball for each layer, of radius S_j."""
        return [Ball(layout.slices[name], radius) for name, radius in self._radii(layout).items()]

    def l2_bound(self, layout: Layout) -> float:
        """The root of the sum of the squared radii, rounded up."""
        # DP: S is the root of the sum of squares, not the largest S_j. fsum and nextafter: never below the true value.
        return math.nextafter(math.sqrt(math.fsum(r * r for r in self._radii(layout).values())), math.inf)

    def at_norm(self, norm: float) -> "PerLayerClip":
        """Another total S in the same proportions."""
        if self.norms is None:
            return replace(self, norm=norm)
        share = norm / math.sqrt(math.fsum(r * r for r in self.norms.values()))
        return replace(self, norms={name: r * share for name, r in self.norms.items()})

    def _radii(self, layout: Layout) -> dict[str, float]:
        """S_j by layer, in the order of the layout."""
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
class NoClip(BaseClip):
    """No bound, for a non-private baseline. A plan with noise refuses it.

    Example:
        >>> str(NoClip())
        'none'
    """

    def balls(self, layout: Layout) -> list[Ball]:
        """No ball: nothing is clipped."""
        return []

    def l2_bound(self, layout: Layout) -> float:
        """Infinity: one user may move the sum by any amount."""
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
"""An adaptive S stays within this factor of its initial value, so that no series of noise makes it vanish or
overflow."""


@dataclass(frozen=True, kw_only=True)
class AdaptiveClip:
    """A flat clip whose S follows a quantile of the users' update norms, which is counted under noise.

    After each round S <- S * exp(-learning_rate * (fraction unclipped - quantile)). With a clip after every local step
    the final norm never exceeds S, so the bit that a user contributes is "no local step of mine was clipped". The
    update and the count are one release with the declared noise multiplier z: the count takes a share of it, and the
    update is noised with z_delta > z.

    Args:
        initial_norm: S of the first round.
        quantile: The share of users whose updates should stay unclipped; 0.5 is the median of their norms.
        learning_rate: How fast S moves, above 0 and at most 1.
        count_noise_std: sigma_b, the noise on the count of unclipped users. None: a twentieth of the expected users per
            round.

    Raises:
        InvalidValue: For a number out of range.
        UnprovenCombination: In a plan whose noise is a fixed sigma, or whose z is not below 2 * sigma_b.

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
        """One ball over all parameters, at the initial S. The plan of a round has the present S."""
        return FlatClip(norm=self.initial_norm).balls(layout)

    def l2_bound(self, layout: Layout) -> float:
        """Return the S of the first round."""
        return self.initial_norm

    def at_norm(self, norm: float) -> "AdaptiveClip":
        """Raise `UnprovenCombination`: the clip sets its own S."""
        raise UnprovenCombination(
            "A schedule sets clip_norm, but [clip] is 'adaptive' and sets it itself. Leave clip_norm out of [[schedule]]."
        )

    def check_private(self, noises: Sequence[Noise], expected_users: float) -> None:
        """Check that the noise can pay for the count of unclipped users as well."""
        if any(noise.noise_std is not None for noise in noises):
            # DP: with sigma fixed, z would follow S and so the users; composition with a cost chosen by them has no
            # proof here.
            raise UnprovenCombination(
                "Adaptive clipping needs noise that grows and shrinks with S: give noise_multiplier (z), not noise_std (sigma)."
            )
        for noise in noises:
            if noise.noise_multiplier is not None:
                self.update_multiplier(noise.noise_multiplier, self.count_noise(expected_users))

    @property
    def adaptive(self) -> "AdaptiveClip":
        """This clip, which follows a quantile of the users' norms."""
        return self

    def at_round(self, norm: float | None) -> FlatClip:
        """The clip of one round; `norm` is the S that training has reached, None in the first round."""
        return FlatClip(norm=norm or self.initial_norm)

    def count_noise(self, expected_users: float) -> float:
        """Return sigma_b, the noise on the count of unclipped users; it depends on declared numbers only."""
        return self.count_noise_std if self.count_noise_std is not None else max(expected_users / 20, 1e-9)

    def update_multiplier(self, z: float, count_noise_std: float) -> float:
        """z_delta, the noise multiplier of the update, such that update and count together are one release at z.

        Raises:
            UnprovenCombination: If the count alone costs as much as the round is charged.
        """
        if not z < 2 * count_noise_std:
            # DP: a count with so little noise costs more than the whole round may; there is no z_delta that pays for
            # it.
            raise UnprovenCombination(
                f"Adaptive clipping at noise_multiplier = {z:g} with count_noise_std = {count_noise_std:g}: the count alone would "
                "cost more than the round is charged, since z must be below 2 * count_noise_std. Raise count_noise_std, or lower z."
            )
        return (z**-2 - (2 * count_noise_std) ** -2) ** -0.5

    def joint_multiplier(self, z_delta: float, count_noise_std: float) -> float:
        """The noise multiplier of update and count as one Gaussian release, which is what a round is charged as."""
        # DP: one user moves the update by 1 in units of its sensitivity and the centred count by 1/2, both in one
        # release: 1/z^2 = 1/z_delta^2 + 1/(2 sigma_b)^2. Charged as one Poisson event, since one cohort gave both.
        return (z_delta**-2 + (2 * count_noise_std) ** -2) ** -0.5

    def next_norm(
        self, norm: float, balance: int, expected_users: float, count_noise_std: float, rng: np.random.Generator
    ) -> float:
        """Move S towards the quantile of the norms, and return the S of the next round.

        Args:
            norm: S of this round.
            balance: How many more users were unclipped than clipped: each counts +1/2 or -1/2.
            expected_users: Declared, the denominator of the fraction.
            count_noise_std: sigma_b, the standard deviation of the noise on the count, in users.
            rng: The stream that the count's noise is drawn from.
        """
        # DP: in half users one person moves the balance by 1, so the noise is 2 sigma_b; whole numbers, as in the sum.
        noisy = balance + round(float(rng.standard_normal()) * 2 * count_noise_std)
        # DP: the denominator is the expected number of users, declared; who came is not known here.
        fraction = 0.5 + noisy / (2 * expected_users)
        # Too many unclipped: S is above the quantile, and goes down. (The other sign diverges from the quantile.)
        moved = math.log(norm) - self.learning_rate * (fraction - self.quantile)
        limits = math.log(self.initial_norm / WIDEST), math.log(self.initial_norm * WIDEST)
        return math.exp(min(max(moved, limits[0]), limits[1]))

    def __str__(self) -> str:
        return f"flat, S from {self.initial_norm:g} on following the {self.quantile:g} quantile"


def clip_(delta_UP: Tensor, balls: Sequence[Ball], unclipped_U: Tensor | None = None) -> Tensor:
    """Clip deltas in place, ball by ball: delta * min(1, S / ||delta||), with norms in float64.

    Args:
        delta_UP: [..., P], one delta per row. A NaN stays a NaN; the aggregation gives such a user exactly zero.
        balls: As from `Clip.balls`.
        unclipped_U: Bool, set to False for every row that a ball scales.
    """
    for ball in balls:
        part_UL = delta_UP[..., ball.where]
        norm_U = torch.linalg.vector_norm(part_UL, dim=-1, keepdim=True, dtype=torch.float64)
        if unclipped_U is not None:
            unclipped_U &= ~(norm_U[..., 0] > ball.radius)
        # `where`, not min(1, S/norm): with a NaN the latter can come out as 1, which is no clip at all.
        part_UL.mul_(torch.where(norm_U > ball.radius, ball.radius / norm_U, 1.0).to(delta_UP.dtype))
    return delta_UP
