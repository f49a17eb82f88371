"""From a sum to an average, and how far one user can move it.

In: a CohortSum. Out: a BoundedAverage with its sensitivity. Where in the paper: section 2, "Bounded-sensitivity estimators",
Lemma 1 and its proof. q, W and W_min are declared; nothing divides by the weight drawn alone, except the baseline.
"""

import math
from dataclasses import dataclass

import torch

from unheard.config import require_positive
from unheard.mechanism.values import BoundedAverage, CohortSum

QUOTIENT_GRID_BITS = 20
"""The clipped denominator's quotient is rounded to about its sensitivity / 2^20."""


@dataclass(frozen=True, kw_only=True)
class FixedDenominator:
    """f_f: divide by q W, whoever was drawn. Unbiased. Sensitivity S / (q W)."""

    def minimum_weight(self, total_weight: float) -> float:
        return total_weight

    def sensitivity(self, l2_bound: float, expected_weight: float, num_parameters: int) -> float:
        return l2_bound / expected_weight

    def average(self, total: CohortSum, expected_weight: float) -> BoundedAverage:
        # DP: the denominator is a declared constant; with the integer sum it is a public change of unit.
        return BoundedAverage(
            units_P=total.units_P,
            unit=total.grid / expected_weight,
            sensitivity=self.sensitivity(total.l2_bound, expected_weight, total.units_P.numel()),
        )


@dataclass(frozen=True, kw_only=True)
class ClippedDenominator:
    """f_c: divide by the weight drawn, but by no less than q W_min. Sensitivity 2 S / (q W_min), and a little for the grid."""

    min_total_weight: float
    """W_min, declared."""

    def __post_init__(self) -> None:
        require_positive(min_total_weight=self.min_total_weight)

    def minimum_weight(self, total_weight: float) -> float:
        return self.min_total_weight

    def sensitivity(self, l2_bound: float, expected_weight: float, num_parameters: int) -> float:
        """expected_weight is q W_min here. Rounding each of d coordinates to a grid h can add h sqrt(d) to the distance of two
        averages; the last factor covers the float64 error of the division, which stays far below it for any cohort of
        fewer than 2^10 sqrt(d) users."""
        if math.isinf(l2_bound):
            return math.inf
        rounding = self._quotient_grid(l2_bound, expected_weight) * math.sqrt(num_parameters) * (1 + 2.0**-20)
        # DP: 2 S / (q W_min): one user moves the numerator and the denominator. The proof needs ||delta_k|| <= S for each user.
        return 2 * l2_bound / expected_weight + rounding

    def average(self, total: CohortSum, expected_weight: float) -> BoundedAverage:
        # DP: never less than the declared minimum, so that a small cohort cannot make one user large.
        denominator = max(expected_weight, total.weight)
        sensitivity = self.sensitivity(total.l2_bound, expected_weight, total.units_P.numel())
        if math.isinf(sensitivity):
            return BoundedAverage(units_P=total.units_P, unit=total.grid / denominator, sensitivity=sensitivity)
        # DP: the denominator is private, so divide first, and put the quotient on a grid that does not depend on it.
        grid = self._quotient_grid(total.l2_bound, expected_weight)
        units_P = torch.round(total.units_P.double() * (total.grid / denominator) / grid).to(torch.int64)
        return BoundedAverage(units_P=units_P, unit=grid, sensitivity=sensitivity)

    @staticmethod
    def _quotient_grid(l2_bound: float, expected_weight: float) -> float:
        return 2.0 ** (math.floor(math.log2(2 * l2_bound / expected_weight)) - QUOTIENT_GRID_BITS)


@dataclass(frozen=True, kw_only=True)
class TrueAverage:
    """f: divide by the weight drawn. No bounded sensitivity: for the non-private baseline."""

    def minimum_weight(self, total_weight: float) -> float:
        return total_weight

    def sensitivity(self, l2_bound: float, expected_weight: float, num_parameters: int) -> float:
        return math.inf

    def average(self, total: CohortSum, expected_weight: float) -> BoundedAverage:
        unit = total.grid / total.weight if total.weight > 0 else 0.0
        return BoundedAverage(units_P=total.units_P, unit=unit, sensitivity=math.inf)


Estimator = FixedDenominator | ClippedDenominator | TrueAverage
