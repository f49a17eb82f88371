"""The privacy boundary as types: `CohortSum` and `BoundedAverage` are private, `NoisyAverage` is public.

    CohortSum --estimator--> BoundedAverage --noise--> NoisyAverage --> server

The server accepts a `NoisyAverage` only, so nothing computed from users can reach the model without the noise. All
three values hold integers on a public grid, or what is computed from those integers. The sensitivity travels with the
value: the sum carries the bound of each user in it, the average carries its own sensitivity, and the noise takes its
scale from there and from nowhere else."""

from dataclasses import dataclass, field

from torch import Tensor


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
    """The standard deviation, in units, of the noise that the nodes have added (mechanism/distributed_noise.py).

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
