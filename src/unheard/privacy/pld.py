"""Many rounds in, the distribution of their privacy loss out: the tightest of the three accountants (PLD).

In: events with their counts. Out: epsilon at delta and delta at epsilon, both upper bounds, by dp-accounting's PLDs.
Two things are ours: the choice of the grid that losses are rounded up to, and an allowance for the rounding errors of
its Fourier transforms, which the library leaves out and which can put its epsilon below the truth.
"""

import functools
import math

from dp_accounting.pld import PLDAccountant

from unheard.privacy.events import Event, Gaussian, PoissonGaussian
from unheard.privacy.rdp import CURVES, NO_NOISE, Counts, library_event

GRID = 1e-4  # dp-accounting's own default
BINS_IN_A_USUAL_LOSS = 4  # enough for an epsilon within a few tenths of a percent of the finest grid's
TYPICAL_DELTA = 1e-8
MAX_BINS_OF_A_ROUND = 3e5  # about 1.5 s to build
MAX_BINS_OF_A_RUN = 4e6
WIDEST_GRID = 700.0  # the library takes exp of it; a loss so coarse says nothing that RDP does not say better
MAX_ROUNDS = 10**7  # of more the library takes minutes, and its rounding errors reach usual deltas; RDP is claimed then
MAX_KINDS = 24  # each further kind of round costs a Fourier transform more

# The library raises a Fourier transform to the power of the number of rounds, and its rounding errors grow with that
# number. Measured against the exact delta of Gaussian rounds (100 to 10^6 of them) the error stayed under 0.4 x 1.1e-16
# a round; this is five times as much. tests/privacy/test_losses.py has a run that the library alone gets wrong.
ERROR_PER_ROUND = 2.2e-16


class LossDistribution:
    """The composed privacy loss of some rounds, on one grid."""

    def __init__(self, counts: Counts, grid: float) -> None:
        self._accountant = PLDAccountant(value_discretization_interval=grid)
        for event, count in counts:
            self._accountant.compose(library_event(event), count)
        self._error = ERROR_PER_ROUND * sum(count for _, count in counts)

    def epsilon(self, delta: float) -> float:
        # DP: the transform's error is taken from delta first; without that a long run's epsilon can be too small.
        rest = delta - self._error
        return float(self._accountant.get_epsilon(rest)) if rest > 0 else math.inf

    def delta(self, epsilon: float) -> float:
        return min(1.0, max(0.0, float(self._accountant.get_delta(epsilon))) + self._error)


def pld_epsilon(counts: Counts, delta: float) -> float:
    """An epsilon that holds at delta."""
    composed = _composed(counts)
    return composed.epsilon(delta) if composed else math.inf


def pld_delta(counts: Counts, epsilon: float) -> float:
    """A delta that holds at epsilon."""
    composed = _composed(counts)
    return composed.delta(epsilon) if composed else 1.0


def _composed(counts: Counts) -> LossDistribution | None:
    """The loss of all rounds on the grid that suits them; None if some had no noise, or so little that there is no grid, or if
    there are too many."""
    if sum(count for _, count in counts) > MAX_ROUNDS or any(
        _noise_multiplier(event) < NO_NOISE for event, _ in counts
    ):
        return None
    counts = in_few_kinds(counts)
    grid = _grid(counts)
    return loss_distribution(counts, grid) if grid <= WIDEST_GRID else None


@functools.lru_cache(maxsize=4)
def loss_distribution(counts: Counts, grid: float) -> LossDistribution:
    return LossDistribution(counts, grid)


@functools.lru_cache(maxsize=16)
def _grid(counts: Counts) -> float:
    """dp-accounting's default grid; a finer one where losses are far below it or it puts PLD above RDP (very small
    epsilons); a wider one where little noise makes losses so large that they would not fit on it.

    Any grid gives a valid bound. It depends on the rounds alone, so that all points of their curve agree.
    """
    of_a_round = 2 * max(_largest_loss(event) for event, _ in counts)
    of_a_run = 4 * _rdp_epsilon(counts, 1e-15)
    grid = max(GRID, of_a_round / MAX_BINS_OF_A_ROUND, of_a_run / MAX_BINS_OF_A_RUN)
    if grid > WIDEST_GRID:
        return grid
    usual = min(_usual_loss(event) for event, _ in counts)
    if grid > 10 * usual or loss_distribution(counts, grid).epsilon(TYPICAL_DELTA) > _rdp_epsilon(
        counts, TYPICAL_DELTA
    ):
        finest = max(3 * of_a_round / MAX_BINS_OF_A_ROUND, of_a_run / MAX_BINS_OF_A_RUN)
        return min(grid, max(finest, usual / BINS_IN_A_USUAL_LOSS))
    return grid


def _usual_loss(event: Event) -> float:
    """About the standard deviation of the loss of one round; a grid much wider than that loses most of the accuracy."""
    return _sampling_prob(event) * math.sqrt(math.expm1(min(_noise_multiplier(event) ** -2, 100.0)))


def _largest_loss(event: Event) -> float:
    """About the largest loss of one round that the library keeps: noise ten deviations out."""
    z, q = _noise_multiplier(event), _sampling_prob(event)
    exponent = math.log(q) + (1 + 10.2 * z) / z**2
    return exponent + 1 if exponent > 0 else math.exp(exponent)


def _rdp_epsilon(counts: Counts, delta: float) -> float:
    return CURVES["rdp"].epsilon(CURVES["rdp"].total(counts), delta)


def in_few_kinds(counts: Counts, limit: int = MAX_KINDS) -> Counts:
    """The same loss, or a little more, from at most `limit` kinds of round (a schedule may give every round its own z).

    Releases in which everybody takes part are one release with the sum of their 1/z^2, exactly. Of the others, z is
    rounded down and q up, ever more coarsely.
    """
    sampled = {event: count for event, count in counts if _sampling_prob(event) < 1}
    precision = sum(count / _noise_multiplier(event) ** 2 for event, count in counts if _sampling_prob(event) == 1)
    step = 1e-3
    while len(sampled) > limit:
        merged: dict[Event, int] = {}
        for event, count in sampled.items():
            worse = _a_little_worse(event, step)
            merged[worse] = merged.get(worse, 0) + count
        sampled, step = merged, 2 * step
    together = ((Gaussian(noise_multiplier=precision**-0.5), 1),) if precision else ()
    return (*together, *sampled.items())


def _a_little_worse(event: Event, step: float) -> Event:
    # DP: less noise and more sampling never cost less, so the bound stays a bound; the other way it would not.
    z = min(_noise_multiplier(event), math.exp(step * math.floor(math.log(_noise_multiplier(event)) / step)))
    q = min(1.0, max(_sampling_prob(event), math.exp(step * math.ceil(math.log(_sampling_prob(event)) / step))))
    return PoissonGaussian(sampling_prob=q, noise_multiplier=z)


def _noise_multiplier(event: Event) -> float:
    return event.noise_multiplier if isinstance(event, PoissonGaussian | Gaussian) else 0.0


def _sampling_prob(event: Event) -> float:
    return event.sampling_prob if isinstance(event, PoissonGaussian) else 1.0
