"""Aggregation: the deltas of a cohort in, one average with a bounded sensitivity out.

    deltas --Contribution--> CohortSum --Estimator--> BoundedAverage --noise--> NoisyAverage --> server

**The types say who may see a value**: `CohortSum` and `BoundedAverage` are private, `NoisyAverage` is public. The server
accepts a `NoisyAverage` only, so nothing computed from users can reach the model without the noise. All three hold
integers on a public grid, or what is computed from those integers. The sensitivity travels with the value: the sum
carries the bound of each user in it, the average carries its own sensitivity, and the noise takes its scale from there
and from nowhere else.

**The sum.** Every user's delta goes through `Contribution.of_users`, whichever engine computed it. Input: deltas [U, P]
and fixed-point weights. Output: a `CohortSum`. In the paper: the sum of w_k * Delta_k in Algorithm 1. For each user n_k =
trunc(w_k * Clip(delta_k) / g), rounded towards zero, with a public grid g that is a power of two. Truncation cannot
raise a norm, so g * ||n_k|| <= w_k * S holds without a correction, and it is checked on the integers. Integers add
exactly, so the sum is the same in any order and on any number of workers, and its low bits do not depend on how floats
were rounded. The whole argument is in docs/privacy.md. On CUDA the same computation runs as Triton kernels
(kernels.py); tests compare the two.

    >>> each = Contribution(balls=(Ball(slice(0, 2), 1.0),), l2_bound=1.0, grid=noised_grid(1.0), is_noised=True)
    >>> total = each.of_users(torch.tensor([[3.0, 4.0]]), np.array([ONE]))
    >>> (total.units_P * total.grid).tolist()  # scaled to norm 1, then truncated to the grid
    [0.5999994277954102, 0.7999992370605469]

**The average.** An estimator turns the sum into an average, and says how far one user can move that average. In the
paper: section 2, "Bounded-sensitivity estimators", and Lemma 1 with its proof.

| class | divides by | sensitivity |
| --- | --- | --- |
| `FixedDenominator` (f_f) | q W | S / (q W) |
| `ClippedDenominator` (f_c) | max(q W_min, weight drawn), then clips to norm S | 2 S / (q W_min), plus the rounding |
| `TrueAverage` | the weight drawn | none: for a baseline without noise |

q, W and W_min are declared in the run file. No private estimator divides by the weight drawn alone.

    >>> FixedDenominator().sensitivity(l2_bound=15.0, expected_weight=100.0, num_parameters=10)
    0.15
"""

import importlib.util
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from unheard.config import require_positive
from unheard.errors import UnprovenCombination
from unheard.parameters import to_device
from unheard.updates.user_update import ONE

GRID_BITS = 20
"""A noised sum lies on a grid of about S / 2^20: far below the noise, and coarse enough for float64 normals to fill
evenly."""

UNNOISED_GRID = 2.0**-30
"""Without noise there is nothing to protect; the grid only makes sums exact, so it is absolute and fine."""

LARGEST_UNNOISED_UNITS = 2.0**42
"""Without a clip a coordinate may be anything: one beyond 2^12 is treated as not finite, so that no int64 sum
overflows."""

LARGEST_COHORT = 2**40
"""A noised user adds at most 2^21 units per coordinate, so a sum over this many users, with its noise, stays within
int64."""

NUMBERS_AT_ONCE = 2**21
"""Coordinates whose float64 copies exist at the same time, 16 MB: one user of the paper's model, many of a small
model."""

QUOTIENT_GRID_BITS = 20
"""The clipped denominator's quotient is rounded to about its sensitivity / 2^20."""


@dataclass(frozen=True, kw_only=True)
class CohortSum:
    """PRIVATE. The sum over a cohort of w_k * delta_k, in units of a public grid. Never print or save it."""

    units_P: Tensor = field(repr=False)
    """int64: the same in any order of summation, on any number of workers."""
    grid: float
    """The size of one unit, public."""
    weight: float = field(repr=False)
    """The weight drawn: the sum of w_k over the cohort."""
    l2_bound: float
    """S: no user's delta has a larger norm, and no user's w_k * delta_k a larger norm than w_k * S.

    Infinite without a clip.
    """
    balance: int | None = field(default=None, repr=False)
    """How many more users were never clipped than were clipped; counted for an adaptive clip only."""
    added_noise: float = 0.0
    """The standard deviation, in units, of the noise that the nodes have added (mechanism/noise.py).

    0 for a sum without noise; infinite for a sum that holds nothing of any user.
    """


@dataclass(frozen=True, kw_only=True)
class BoundedAverage:
    """PRIVATE. An estimate of the average update, and how far adding or removing one user can move it."""

    units_P: Tensor = field(repr=False)
    unit: float
    """The size of one unit of the average. Public, unless the sensitivity is infinite."""
    sensitivity: float
    """The largest L2 distance between the averages of two cohorts that differ by one user."""
    added_noise: float = 0.0
    """As in `CohortSum`, in units of this average."""

    @property
    def average_P(self) -> Tensor:
        """The average itself, float64. As private as the users."""
        return self.units_P.double() * self.unit


@dataclass(frozen=True, kw_only=True)
class NoisyAverage:
    """PUBLIC. What a round releases: everything computed from it is post-processing."""

    average_P: Tensor
    noise_std: float
    """sigma, the standard deviation of the noise in each coordinate; 0 for a run without noise."""


@dataclass(frozen=True)
class Ball:
    """A stretch of the flat vector and the largest L2 norm allowed to it."""

    where: slice
    radius: float


def noised_grid(l2_bound: float) -> float:
    """The public grid for a bound S: a power of two with S / grid in [2^20, 2^21)."""
    return 2.0 ** (math.floor(math.log2(l2_bound)) - GRID_BITS)


@dataclass(frozen=True, kw_only=True)
class Contribution:
    """What each user may add to the sum. Public, and the same for every user.

    Args:
        balls: The balls of the clip; empty for a baseline without a clip.
        l2_bound: S, the largest L2 norm of what a user adds.
        grid: The size of one unit.
        is_noised: Whether noise will be added; then the bound is enforced on the integers.
    """

    balls: tuple[Ball, ...]
    l2_bound: float
    grid: float
    is_noised: bool

    def sum(self, chunks: Iterable[CohortSum], num_parameters: int) -> CohortSum:
        """The sum of the sums of chunks, in any order.

        Without chunks the sum is zero: an empty cohort still takes a full noised step. Chunks are added one by one as
        they arrive, so that a large cohort needs no more memory than a small one.

        Args:
            chunks: The sums of disjoint groups of users.
            num_parameters: P, the length of an empty sum.
        """
        total: CohortSum | None = None
        for chunk in chunks:
            total = self.add(total, chunk)
        nothing = {"grid": self.grid, "weight": 0.0, "l2_bound": self.l2_bound, "balance": 0}
        return total or CohortSum(units_P=torch.zeros(num_parameters, dtype=torch.int64), **nothing)

    def add(self, total: CohortSum | None, chunk: CohortSum) -> CohortSum:
        """Add one chunk to the total in place, so that the old total must not be used afterwards."""
        if total is None:
            return replace(chunk, units_P=chunk.units_P.clone(), grid=self.grid, l2_bound=self.l2_bound)
        counted = total.balance is not None and chunk.balance is not None
        return replace(
            total,
            units_P=total.units_P.add_(chunk.units_P),
            weight=total.weight + chunk.weight,
            balance=(total.balance or 0) + (chunk.balance or 0) if counted else None,
        )

    @torch.no_grad()
    def of_users(
        self,
        delta_UP: Tensor,
        weight_units_U: np.ndarray,
        unclipped_U: Tensor | None = None,
        square_UJ: Tensor | None = None,
    ) -> CohortSum:
        """Clips, weights and adds the deltas of a chunk of users.

        Args:
            delta_UP: One delta per row, as the engine computed it, in any float type.
            weight_units_U: Fixed-point weights from updates/user_update.py.
            unclipped_U: For an adaptive clip, which users had no local step clipped; they are counted in the result.
            square_UJ: The squared norms of each user's delta by ball, float64, if an engine on a GPU knows them. They save
                a pass over the deltas. The bound does not rest on them: it is checked on the integers.
        """
        # DP: weights are in [0, 1] whatever was asked for.
        weight_units_U = np.clip(weight_units_U, 0, ONE)
        weight_U = to_device(weight_units_U / ONE, delta_UP.device)
        if has_kernels(delta_UP.device) and len(delta_UP):
            from unheard.mechanism.kernels import sum_users

            # S and the grid are exact in float64, and the grid is a power of two: so is the quotient.
            largest = self.l2_bound / self.grid if self.is_noised else LARGEST_UNNOISED_UNITS
            units_P = sum_users(
                delta_UP, weight_U, self.balls, self.grid, largest, is_noised=self.is_noised, square_UJ=square_UJ
            )
        else:
            largest_U = to_device(self._largest(weight_units_U), delta_UP.device)
            units_P = torch.zeros(delta_UP.shape[1], dtype=torch.int64, device=delta_UP.device)
            at_once = max(1, NUMBERS_AT_ONCE // max(1, delta_UP.shape[1]))
            for start in range(0, len(delta_UP), at_once):
                part = slice(start, start + at_once)
                units_P += _added(self._whole_units(delta_UP[part], weight_U[part], largest_U[part]))
        return CohortSum(
            units_P=units_P,
            grid=self.grid,
            weight=int(weight_units_U.sum()) / ONE,
            l2_bound=self.l2_bound,
            # DP: +1 or -1 for each user, whatever their weight: one person moves the balance by 1.
            balance=None if unclipped_U is None else 2 * int(unclipped_U.bool().sum()) - len(delta_UP),
        )

    def accepts(self, units_P: Tensor, weight_units: int) -> bool:
        """Whether one user's integers, which another machine computed, are within the bound.

        Args:
            units_P: int64, the user's integers.
            weight_units: The user's fixed-point weight.
        """
        if not 0 <= weight_units <= ONE:
            return False
        # Checked before squaring: an int64 of another machine may be anything, and its square may overflow.
        if self.is_noised and bool((units_P.abs() > 2 ** (GRID_BITS + 1)).any() | (units_P < -(2**62)).any()):
            return False
        largest = torch.from_numpy(self._largest(np.array([weight_units])))
        return bool(self._fits(units_P[None].to(torch.float64), largest).all())

    def _whole_units(self, delta_UP: Tensor, weight_U: Tensor, largest_U: Tensor) -> Tensor:
        """n_k for each user, int64 [U, P].

        In place where possible: on a CPU most of the time goes into first touching memory.
        """
        units_UP = delta_UP.to(torch.float64, copy=True)
        # DP: the clip of what is returned, after the last cast, in float64 so that the check below finds nothing to
        # drop.
        for ball in self.balls:
            norm_U1 = torch.linalg.vector_norm(units_UP[:, ball.where], dim=1, keepdim=True)
            units_UP[:, ball.where] *= torch.where(norm_U1 > ball.radius, ball.radius / norm_U1, 1.0)
        # DP: towards zero, after weighting: truncation cannot raise a norm.
        units_UP.mul_(weight_U[:, None]).div_(self.grid, rounding_mode="trunc")
        # DP: who does not fit, or is not finite, contributes exactly zero (0 * NaN is NaN, so assign, never multiply).
        # By index: a mask would pass over every user's coordinates, and almost always change nothing.
        units_UP[torch.nonzero(~self._fits(units_UP, largest_U))[:, 0]] = 0.0
        return units_UP.to(torch.int64)

    def _fits(self, units_UP: Tensor, largest_U: Tensor) -> Tensor:
        """Whether each user is within the bound, bool [U]. A NaN or an infinity anywhere makes the comparison false."""
        if not self.is_noised:
            return torch.linalg.vector_norm(units_UP, ord=math.inf, dim=1) <= largest_U
        # DP: the bound is checked on the integers themselves.
        return torch.linalg.vecdot(units_UP, units_UP) <= largest_U

    def _largest(self, weight_units_U: np.ndarray) -> np.ndarray:
        """The largest ||n_k||^2 allowed to each user, float64 [U]; without noise, the largest coordinate.

        From g * ||n_k|| <= w_k * S, computed in rational numbers without rounding; squares below 2^53 are exact in
        float64."""
        if not self.is_noised:
            return np.full(len(weight_units_U), LARGEST_UNNOISED_UNITS)
        # DP: with the user's own weight.
        bound = Fraction(self.l2_bound) / Fraction(self.grid) / ONE
        weights, which_U = np.unique(weight_units_U, return_inverse=True)
        largest = np.array([math.floor((int(w) * bound) ** 2) for w in weights], dtype=np.float64)
        return largest[which_U]


def _added(units_UP: Tensor) -> Tensor:
    """The sum over users. A single row is returned as it is, which saves a pass over memory."""
    return units_UP[0] if len(units_UP) == 1 else units_UP.sum(dim=0)


def has_kernels(device: torch.device) -> bool:
    """Whether the Triton kernels can run on this device."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


class Estimator(Protocol):
    """What the plan needs of an estimator."""

    def minimum_weight(self, total_weight: float) -> float:
        """The declared weight that q is multiplied with: W, or W_min."""
        ...

    def sensitivity(self, l2_bound: float, expected_weight: float, num_parameters: int) -> float:
        """The sensitivity of `average` in L2 norm; infinite if it has no bound.

        Args:
            l2_bound: S, the bound of each user's delta.
            expected_weight: q times `minimum_weight`.
            num_parameters: P, for estimators that round.
        """
        ...

    def average(self, total: CohortSum, expected_weight: float) -> BoundedAverage:
        """The average of a cohort, with its sensitivity.

        Args:
            total: The sum over the cohort.
            expected_weight: q times `minimum_weight`.
        """
        ...

    def check_private(self) -> None:
        """Raise `UnprovenCombination` if a plan with noise may not use the estimator."""
        ...


class BaseEstimator:
    """Defaults of `Estimator` for an estimator with a bounded sensitivity and the whole declared weight."""

    def minimum_weight(self, total_weight: float) -> float:
        """The least total weight W that the sensitivity is computed for."""
        return total_weight

    def check_private(self) -> None:
        """Raise `UnprovenCombination` if the estimator has no sensitivity. By default it has one."""
        return None


@dataclass(frozen=True, kw_only=True)
class FixedDenominator(BaseEstimator):
    """f_f of the paper: divides by the declared q W, whoever was drawn. Unbiased. Sensitivity S / (q W).

    Example:
        >>> FixedDenominator().minimum_weight(1000.0)
        1000.0
    """

    def sensitivity(self, l2_bound: float, expected_weight: float, num_parameters: int) -> float:
        """Return S / (qW): one user changes the sum by at most S, and the denominator not at all."""
        return l2_bound / expected_weight

    def average(self, total: CohortSum, expected_weight: float) -> BoundedAverage:
        """The sum divided by the declared constant qW."""
        # DP: the denominator is a declared constant; with the integer sum it is a public change of unit.
        return BoundedAverage(
            units_P=total.units_P,
            unit=total.grid / expected_weight,
            sensitivity=self.sensitivity(total.l2_bound, expected_weight, total.units_P.numel()),
            added_noise=total.added_noise,
        )


@dataclass(frozen=True, kw_only=True)
class ClippedDenominator(BaseEstimator):
    """f_c of the paper: divides by the weight drawn, but by no less than q W_min.

    Its sensitivity is 2 S / (q W_min), plus the rounding.

    An average of deltas of norm at most S has norm at most S. It is clipped to S all the same: under secure aggregation
    a hostile node may add any vector, and the sensitivity for everybody else rests on this bound.

    Args:
        min_total_weight: W_min, declared: a lower bound on the total weight below which the average is no longer scaled
            up.

    Example:
        >>> ClippedDenominator(min_total_weight=500).minimum_weight(1000.0)
        500
    """

    min_total_weight: float

    def __post_init__(self) -> None:
        require_positive(min_total_weight=self.min_total_weight)

    def minimum_weight(self, total_weight: float) -> float:
        """Return W_min as declared, whatever the total weight is."""
        return self.min_total_weight

    def sensitivity(self, l2_bound: float, expected_weight: float, num_parameters: int) -> float:
        """2 S / (q W_min) and the rounding; `expected_weight` is q W_min here.

        Rounding each of d coordinates to a grid h can add h sqrt(d) to the distance of two averages. The last factor
        covers the float64 error of the division, which stays far below it for any cohort of fewer than 2^10 sqrt(d)
        users."""
        if math.isinf(l2_bound):
            return math.inf
        rounding = self._quotient_grid(l2_bound, expected_weight) * math.sqrt(num_parameters) * (1 + 2.0**-20)
        # DP: 2 S / (q W_min): one user moves the numerator and the denominator. The proof needs ||delta_k|| <= S for
        # each user.
        return 2 * l2_bound / expected_weight + rounding

    def average(self, total: CohortSum, expected_weight: float) -> BoundedAverage:
        """The sum divided by max(qW_min, the weight of the cohort), clipped and rounded to a public grid."""
        # DP: never less than the declared minimum, so that a small cohort cannot make one user large.
        denominator = max(expected_weight, total.weight)
        sensitivity = self.sensitivity(total.l2_bound, expected_weight, total.units_P.numel())
        if math.isinf(sensitivity):
            return BoundedAverage(units_P=total.units_P, unit=total.grid / denominator, sensitivity=sensitivity)
        # DP: the denominator is private, so divide first, and put the quotient on a grid that does not depend on it.
        grid = self._quotient_grid(total.l2_bound, expected_weight)
        units_P = total.units_P.double() * (total.grid / denominator) / grid
        # DP: the average has norm at most S whatever other users have added; the proof of 2 S / (q W_min) needs it. The
        # sum is pairwise, so that its rounding is far below that of the quotient.
        norm = units_P.square().sum().sqrt()
        units_P *= (total.l2_bound / grid / norm).clamp(max=1.0)
        return BoundedAverage(units_P=torch.round(units_P).to(torch.int64), unit=grid, sensitivity=sensitivity)

    @staticmethod
    def _quotient_grid(l2_bound: float, expected_weight: float) -> float:
        """A public power of two near 2 S / (q W_min) / 2^20."""
        return 2.0 ** (math.floor(math.log2(2 * l2_bound / expected_weight)) - QUOTIENT_GRID_BITS)


@dataclass(frozen=True, kw_only=True)
class TrueAverage(BaseEstimator):
    """Divides by the weight drawn, for a non-private baseline.

    Its sensitivity has no bound, so a plan with noise refuses it.

    Example:
        >>> TrueAverage().sensitivity(15.0, 100.0, 10)
        inf
    """

    def sensitivity(self, l2_bound: float, expected_weight: float, num_parameters: int) -> float:
        """Infinity: the denominator is the weight of the users who were drawn."""
        return math.inf

    def average(self, total: CohortSum, expected_weight: float) -> BoundedAverage:
        """The sum divided by the weight of the users who were drawn."""
        unit = total.grid / total.weight if total.weight > 0 else 0.0
        return BoundedAverage(units_P=total.units_P, unit=unit, sensitivity=math.inf)

    def check_private(self) -> None:
        """Raise `UnprovenCombination`: the sensitivity of the true average has no bound."""
        raise UnprovenCombination(
            "Noise on the true average proves nothing: its denominator is the weight drawn, so its sensitivity has no bound. "
            "Set [estimator] kind = 'fixed_denominator', or 'clipped_denominator' with min_total_weight."
        )
