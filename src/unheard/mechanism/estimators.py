"""Estimators: from the sum over a cohort to an average, and how far one user can move that average.

Input: a `CohortSum`. Output: a `BoundedAverage` with its sensitivity. In the paper: section 2, "Bounded-sensitivity
estimators", and Lemma 1 with its proof.

| class | divides by | sensitivity |
| --- | --- | --- |
| `FixedDenominator` (f_f) | q W | S / (q W) |
| `ClippedDenominator` (f_c) | max(q W_min, weight drawn), then clips to norm S | 2 S / (q W_min), plus the rounding |
| `TrueAverage` | the weight drawn | none: for a baseline without noise |

q, W and W_min are declared in the run file. No private estimator divides by the weight drawn alone.

    >>> FixedDenominator().sensitivity(l2_bound=15.0, expected_weight=100.0, num_parameters=10)
    0.15
"""

import math
from dataclasses import dataclass
from typing import Protocol

import torch

from unheard.config import require_positive
from unheard.errors import UnprovenCombination
from unheard.mechanism.values import BoundedAverage, CohortSum

QUOTIENT_GRID_BITS = 20
"""The clipped denominator's quotient is rounded to about its sensitivity / 2^20."""


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
        """The average of a cohort, with its sensitivity."""
        ...

    def check_private(self) -> None:
        """Raises `UnprovenCombination` if a plan with noise may not use the estimator."""
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
        """S / (qW)."""
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
    """f_c of the paper: divides by the weight drawn, but by no less than q W_min. Sensitivity 2 S / (q W_min), plus the
    rounding.

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
        """W_min, as declared."""
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
    """Divides by the weight drawn. Its sensitivity has no bound, so a plan with noise refuses it: for a non-private
    baseline.

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
        """Raises `UnprovenCombination`: the true average has no useful sensitivity."""
        raise UnprovenCombination(
            "Noise on the true average proves nothing: its denominator is the weight drawn, so its sensitivity has no bound. "
            "Set [estimator] kind = 'fixed_denominator', or 'clipped_denominator' with min_total_weight."
        )
