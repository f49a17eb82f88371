"""The wall is a type: CohortSum and BoundedAverage are private, NoisyAverage is public, and the server takes only the last.

All three hold integers on a public grid, or what becomes of them. The sensitivity travels with the value: the sum knows the
bound of each user in it, the average knows its own sensitivity, and the noise takes its scale from there and nowhere else.
"""

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class CohortSum:
    """PRIVATE. The sum over a cohort of w_k * delta_k, in units of a public grid. Never print or save one."""

    units_P: Tensor = field(repr=False)
    """int64: the same in any order, on any number of workers."""
    grid: float
    """The size of one unit, public."""
    weight: float = field(repr=False)
    """The weight drawn: sum of w_k over the cohort."""
    l2_bound: float
    """S: no user's delta has a larger norm, and none's w_k * delta_k a larger one than w_k * S. Infinite without a clip."""
    balance: int | None = field(default=None, repr=False)
    """How many more users were never clipped than were; only counted when the clip follows the users."""


@dataclass(frozen=True, kw_only=True)
class BoundedAverage:
    """PRIVATE. An estimate of the average update, and how far adding or removing one user can move it."""

    units_P: Tensor = field(repr=False)
    unit: float
    """The size of one unit of the average. Public, unless the sensitivity is infinite."""
    sensitivity: float

    @property
    def average_P(self) -> Tensor:
        """The average itself, float64. As private as the users."""
        return self.units_P.double() * self.unit


@dataclass(frozen=True, kw_only=True)
class NoisyAverage:
    """PUBLIC. What a round releases: everything computed from it is post-processing."""

    average_P: Tensor
    noise_std: float
    """sigma, the standard deviation of the noise in each coordinate (0 when a run adds none)."""
