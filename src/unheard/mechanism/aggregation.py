"""Sum the deltas of a cohort, and compute an average with a bounded sensitivity from the sum.

    deltas --Contribution--> CohortSum --Estimator--> BoundedAverage --noise--> NoisyAverage --> server

**The types say who may see a value**: `CohortSum` and `BoundedAverage` are private, `NoisyAverage` is public. The server
accepts only a `NoisyAverage`, so nothing computed from users can reach the model without the noise. The private values
are integers on a public grid. Each value carries its bound: the sum has the bound of each user's delta, the average has
its sensitivity, and the noise takes its scale from that sensitivity only.

**The sum.** The deltas of all engines go through `Contribution.of_users`. Input: deltas [U, P] and fixed-point weights.
Output: a `CohortSum`. In the paper: the sum of w_k * Delta_k in Algorithm 1. User k adds n_k = trunc(w_k * Clip(delta_k)
/ g), rounded towards zero, with a public grid g that is a power of two. Truncation cannot raise a norm, so
g * ||n_k|| <= w_k * S holds without a correction, and it is checked on the integers. Integers add exactly, so the sum is
the same in any order and on any number of workers, and its low bits do not depend on how floats were rounded. The whole
argument is in docs/privacy.md. On CUDA the same computation runs as Triton kernels (kernels.py); tests compare the two.

    >>> each = Contribution(balls=(Ball(slice(0, 2), 1.0),), l2_bound=1.0, grid=noised_grid(1.0), is_noised=True)
    >>> total = each.of_users(torch.tensor([[3.0, 4.0]]), np.array([ONE]))
    >>> (total.units_P * total.grid).tolist()  # scaled to norm 1, then truncated to the grid
    [0.5999994277954102, 0.7999992370605469]

**The average.** An estimator turns the sum into an average, and computes its sensitivity: how far one user can move the
average. In the paper: section 2, "Bounded-sensitivity estimators", and Lemma 1 with its proof.

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
"""The grid of a sum with noise is about S / 2^20. This is far below the noise, and coarse enough that the squares of a
user's integers are exact in float64."""

UNNOISED_GRID = 2.0**-30
"""The grid of a sum without noise. It only makes the sum exact, so it is fine and does not depend on S."""

LARGEST_UNNOISED_UNITS = 2.0**42
"""The largest coordinate of a user in a sum without noise, in units of the grid; it is 2^12 in the parameters. A user with
a larger coordinate contributes zero, like one whose delta is not finite, so that no int64 sum overflows."""

LARGEST_COHORT = 2**40
"""The largest population. With noise, a user adds at most 2^21 units per coordinate, so the sum over this many users and
the noise stay within int64."""

NUMBERS_AT_ONCE = 2**21
"""The number of coordinates whose float64 copies are in memory at the same time (16 MB): one user of the paper's model, or
many users of a small model."""

QUOTIENT_GRID_BITS = 20
"""The quotient of `ClippedDenominator` is rounded to a grid of about its sensitivity / 2^20."""


@dataclass(frozen=True, kw_only=True)
class CohortSum:
    """PRIVATE. The sum over a cohort of w_k * delta_k, in units of a public grid. Never print or save it."""

    units_P: Tensor = field(repr=False)
    """The sum, int64. It does not depend on the order of summation or on the number of workers."""
    grid: float
    """The size of one unit. Public."""
    weight: float = field(repr=False)
    """The weight drawn: the sum of w_k over the cohort."""
    l2_bound: float
    """S, a bound on the L2 norm of each user's clipped delta. So w_k * delta_k has norm at most w_k * S.

    Infinite without a clip.
    """
    balance: int | None = field(default=None, repr=False)
    """The number of users without a clipped step minus the number of users with one. None if the clip is not adaptive."""
    added_noise: float = 0.0
    """The standard deviation, in units, of the noise that the nodes of a federated run have added (mechanism/noise.py).

    0 if they have added none; infinite if the sum contains the data of no user.
    """


@dataclass(frozen=True, kw_only=True)
class BoundedAverage:
    """PRIVATE. An estimate of the average update, and its sensitivity."""

    units_P: Tensor = field(repr=False)
    """The average, int64, in units of `unit`."""
    unit: float
    """The size of one unit of the average. Public, unless the sensitivity is infinite."""
    sensitivity: float
    """The largest L2 distance between the averages of two cohorts that differ by one user."""
    added_noise: float = 0.0
    """As in `CohortSum`, in units of this average."""

    @property
    def average_P(self) -> Tensor:
        """The average in units of the parameters, float64. Private."""
        return self.units_P.double() * self.unit


@dataclass(frozen=True, kw_only=True)
class NoisyAverage:
    """PUBLIC. The average with noise, which a round releases. Everything computed from it is post-processing."""

    average_P: Tensor
    """The average in units of the parameters, float64."""
    noise_std: float
    """sigma, the standard deviation of the noise in each coordinate; 0 for a run without noise."""


@dataclass(frozen=True)
class Ball:
    """A range of the flat parameter vector, and the largest L2 norm that a clipped delta has in this range."""

    where: slice
    radius: float


def noised_grid(l2_bound: float) -> float:
    """Return the public grid of a sum with noise for a bound S: the power of two with S / grid in [2^20, 2^21)."""
    return 2.0 ** (math.floor(math.log2(l2_bound)) - GRID_BITS)


@dataclass(frozen=True, kw_only=True)
class Contribution:
    """The rule by which a user's delta is clipped, weighted and turned into integers. Public; the same for every user.

    Args:
        balls: The balls of the clip; empty for a baseline without a clip.
        l2_bound: S, the largest L2 norm that a user can add to the sum.
        grid: The size of one unit.
        is_noised: Whether noise will be added to the sum. If so, the bound is checked on the integers.
    """

    balls: tuple[Ball, ...]
    l2_bound: float
    grid: float
    is_noised: bool

    def sum(self, chunks: Iterable[CohortSum], num_parameters: int) -> CohortSum:
        """Return the sum over a cohort, from the sums of its chunks.

        An empty cohort gives a sum of zeros; the round adds noise to it as to any other. Each chunk is added when it
        arrives, so a large cohort needs no more memory than a small one.

        Args:
            chunks: The sums of disjoint groups of users, in any order.
            num_parameters: P, the length of the sum of an empty cohort.
        """
        total: CohortSum | None = None
        for chunk in chunks:
            total = self.add(total, chunk)
        nothing = {"grid": self.grid, "weight": 0.0, "l2_bound": self.l2_bound, "balance": 0}
        return total or CohortSum(units_P=torch.zeros(num_parameters, dtype=torch.int64), **nothing)

    def add(self, total: CohortSum | None, chunk: CohortSum) -> CohortSum:
        """Return the total with one chunk added. `total` is changed in place and must not be used afterwards.

        Args:
            total: The sum so far; None before the first chunk.
            chunk: The sum of further users.
        """
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
        """Clip and weight the deltas of a chunk of users, turn them into integers, and return their sum.

        Args:
            delta_UP: One delta per row, as the engine computed it, in any float type.
            weight_units_U: Fixed-point weights from updates/user_update.py.
            unclipped_U: For an adaptive clip, whether no local step of the user was clipped. The result counts these users.
            square_UJ: The squared norm of each user's delta in each ball, float64, if an engine on a GPU has computed it.
                It saves a pass over the deltas. The guarantee does not depend on it: the bound is checked on the integers.
        """
        # DP: weights are in [0, 1] whatever was asked for.
        weight_units_U = np.clip(weight_units_U, 0, ONE)
        weight_U = to_device(weight_units_U / ONE, delta_UP.device)
        if has_kernels(delta_UP.device) and len(delta_UP):
            from unheard.mechanism.kernels import sum_users

            # The quotient is exact: S is a float64, and the grid is a power of two.
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
            units_P: The user's integers, int64.
            weight_units: The user's fixed-point weight.
        """
        if not 0 <= weight_units <= ONE:
            return False
        # Another machine may send any int64. Reject large ones before they become float64, which is exact only below
        # 2^53. The second condition is for -2^63, whose absolute value overflows.
        if self.is_noised and bool((units_P.abs() > 2 ** (GRID_BITS + 1)).any() | (units_P < -(2**62)).any()):
            return False
        largest = torch.from_numpy(self._largest(np.array([weight_units])))
        return bool(self._fits(units_P[None].to(torch.float64), largest).all())

    def _whole_units(self, delta_UP: Tensor, weight_U: Tensor, largest_U: Tensor) -> Tensor:
        """Return n_k for each user, int64 [U, P].

        The computation is in place where possible, because on a CPU most of the time is spent on new memory.
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
        # By index: a mask would read and write the coordinates of all users, and almost always change nothing.
        units_UP[torch.nonzero(~self._fits(units_UP, largest_U))[:, 0]] = 0.0
        return units_UP.to(torch.int64)

    def _fits(self, units_UP: Tensor, largest_U: Tensor) -> Tensor:
        """Whether each user is within the bound, bool [U]. False for a user with a NaN or an infinity."""
        if not self.is_noised:
            return torch.linalg.vector_norm(units_UP, ord=math.inf, dim=1) <= largest_U
        # DP: the bound is checked on the integers themselves.
        return torch.linalg.vecdot(units_UP, units_UP) <= largest_U

    def _largest(self, weight_units_U: np.ndarray) -> np.ndarray:
        """Return the largest ||n_k||^2 that each user may have, float64 [U]; without noise, the largest coordinate.

        It follows from g * ||n_k|| <= w_k * S. It is computed in rational numbers, without rounding, and is below 2^53,
        so float64 holds it exactly.
        """
        if not self.is_noised:
            return np.full(len(weight_units_U), LARGEST_UNNOISED_UNITS)
        # DP: with the user's own weight.
        bound = Fraction(self.l2_bound) / Fraction(self.grid) / ONE
        weights, which_U = np.unique(weight_units_U, return_inverse=True)
        largest = np.array([math.floor((int(w) * bound) ** 2) for w in weights], dtype=np.float64)
        return largest[which_U]


def _added(units_UP: Tensor) -> Tensor:
    """Return the sum over users [P]. A single row is returned without a copy, which saves a pass over memory."""
    return units_UP[0] if len(units_UP) == 1 else units_UP.sum(dim=0)


def has_kernels(device: torch.device) -> bool:
    """Whether the Triton kernels can run on this device."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


class Estimator(Protocol):
    """The interface of an estimator, which computes an average from the sum over a cohort."""

    def minimum_weight(self, total_weight: float) -> float:
        """Return the declared weight that q is multiplied by: W, which is the default, or W_min."""
        return total_weight

    def sensitivity(self, l2_bound: float, expected_weight: float, num_parameters: int) -> float:
        """Return the L2 sensitivity of `average`; infinite if there is no bound.

        Args:
            l2_bound: S, the bound of each user's delta.
            expected_weight: q times `minimum_weight`.
            num_parameters: P, for estimators that round.
        """
        ...

    def unit(self, l2_bound: float, grid: float, expected_weight: float) -> float | None:
        """Return the size of one unit of `average`. None, the default: it is not known before the sum is computed.

        Args:
            l2_bound: S, the bound of each user's delta.
            grid: The size of one unit of the sum.
            expected_weight: q times `minimum_weight`.
        """
        return None

    def average(self, total: CohortSum, expected_weight: float) -> BoundedAverage:
        """Return the average of a cohort, with its sensitivity.

        Args:
            total: The sum over the cohort.
            expected_weight: q times `minimum_weight`.
        """
        ...

    def check_private(self) -> None:
        """Raise `UnprovenCombination` if a plan with noise may not use the estimator.

        Does nothing by default: an estimator with a bounded sensitivity may be used with noise.
        """
        return None


@dataclass(frozen=True, kw_only=True)
class FixedDenominator(Estimator):
    """The estimator f_f of the paper: divides by the declared q W, which does not depend on the cohort.

    It is unbiased. Its sensitivity is S / (q W).

    Example:
        >>> FixedDenominator().minimum_weight(1000.0)
        1000.0
    """

    def sensitivity(self, l2_bound: float, expected_weight: float, num_parameters: int) -> float:
        """Return S / (q W): one user changes the sum by at most S and does not change the denominator."""
        return l2_bound / expected_weight

    def unit(self, l2_bound: float, grid: float, expected_weight: float) -> float:
        """Return the unit of the sum divided by q W."""
        return grid / expected_weight

    def average(self, total: CohortSum, expected_weight: float) -> BoundedAverage:
        """Return the sum divided by the declared constant q W."""
        # DP: the denominator is a declared constant; with the integer sum it is a public change of unit.
        return BoundedAverage(
            units_P=total.units_P,
            unit=self.unit(total.l2_bound, total.grid, expected_weight),
            sensitivity=self.sensitivity(total.l2_bound, expected_weight, total.units_P.numel()),
            added_noise=total.added_noise,
        )


@dataclass(frozen=True, kw_only=True)
class ClippedDenominator(Estimator):
    """The estimator f_c of the paper: divides by the weight drawn, but at least by q W_min.

    Its sensitivity is 2 S / (q W_min), plus a small term for rounding.

    An average of deltas of norm at most S has norm at most S. The estimator clips it to S nevertheless: under secure
    aggregation a hostile node may add any vector, and the sensitivity for all other users relies on this bound.

    Args:
        min_total_weight: W_min, the declared lower bound on the total weight. The denominator is never below q W_min.

    Example:
        >>> ClippedDenominator(min_total_weight=500).minimum_weight(1000.0)
        500
    """

    min_total_weight: float

    def __post_init__(self) -> None:
        require_positive(min_total_weight=self.min_total_weight)

    def minimum_weight(self, total_weight: float) -> float:
        """Return the declared W_min. The total weight is not used."""
        return self.min_total_weight

    def sensitivity(self, l2_bound: float, expected_weight: float, num_parameters: int) -> float:
        """Return 2 S / (q W_min) plus a term for rounding. `expected_weight` is q W_min.

        Rounding each of d coordinates to a grid h can add h sqrt(d) to the distance of two averages. The factor 1 + 2^-20
        covers the float64 error of the division, which is far smaller for any cohort of fewer than 2^10 sqrt(d) users.
        """
        if math.isinf(l2_bound):
            return math.inf
        rounding = self._quotient_grid(l2_bound, expected_weight) * math.sqrt(num_parameters) * (1 + 2.0**-20)
        # DP: 2 S / (q W_min): one user moves the numerator and the denominator. The proof needs ||delta_k|| <= S for
        # each user.
        return 2 * l2_bound / expected_weight + rounding

    def unit(self, l2_bound: float, grid: float, expected_weight: float) -> float:
        """Return the grid of the quotient, which does not depend on the weight drawn."""
        return self._quotient_grid(l2_bound, expected_weight)

    def average(self, total: CohortSum, expected_weight: float) -> BoundedAverage:
        """Return the sum divided by max(q W_min, the weight drawn), clipped to norm S and rounded to a public grid.

        Without a clip (S is infinite) the quotient is neither clipped nor rounded.
        """
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
        """Return the grid of the quotient: the largest power of two up to 2 S / (q W_min) / 2^20. Public."""
        return 2.0 ** (math.floor(math.log2(2 * l2_bound / expected_weight)) - QUOTIENT_GRID_BITS)


@dataclass(frozen=True, kw_only=True)
class TrueAverage(Estimator):
    """The true average: divides by the weight drawn. For a non-private baseline.

    Its sensitivity has no bound, so it cannot be used in a plan with noise.

    Example:
        >>> TrueAverage().sensitivity(15.0, 100.0, 10)
        inf
    """

    def sensitivity(self, l2_bound: float, expected_weight: float, num_parameters: int) -> float:
        """Return infinity: the denominator depends on the users who were drawn, and may be arbitrarily small."""
        return math.inf

    def average(self, total: CohortSum, expected_weight: float) -> BoundedAverage:
        """Return the sum divided by the weight of the users who were drawn; zero if their weight is zero."""
        unit = total.grid / total.weight if total.weight > 0 else 0.0
        return BoundedAverage(units_P=total.units_P, unit=unit, sensitivity=math.inf)

    def check_private(self) -> None:
        """Raise `UnprovenCombination`: the sensitivity of the true average has no bound."""
        raise UnprovenCombination(
            "Noise on the true average proves nothing: its denominator is the weight drawn, so its sensitivity has no bound. "
            "Set [estimator] kind = 'fixed_denominator', or 'clipped_denominator' with min_total_weight."
        )
