"""The PLD accountant: composes the distribution of the privacy loss numerically; the tightest of the three accountants.

In: events with their counts. Out: epsilon at delta and delta at epsilon, both upper bounds, computed with the privacy
loss distributions of Google's dp-accounting. This module adds two things: the choice of the grid that losses are
rounded up to, and an allowance for the rounding errors of the library's Fourier transforms, which the library leaves
out and which can put its epsilon below the truth.

    pld_epsilon(counts, delta)      epsilon; infinity where there is no bound (no noise, a selection, over 10^7 rounds)
    pld_delta(counts, epsilon)      delta; 1 where there is no bound

Literature: Koskela, Jälkö and Honkela, "Computing Tight Differential Privacy Guarantees Using FFT" (2020); Meiser and
Mohammadi, "Tight on Budget?" (2018); Doroshenko et al., "Connect the Dots" (2022), which dp-accounting implements. The
test suite compares with Microsoft's independent prv-accountant (Gopi, Lee and Wutschitz 2021).
"""

import functools
import math
from typing import Any, cast

import numpy as np
from dp_accounting import NeighboringRelation
from dp_accounting.pld import PLDAccountant, privacy_loss_distribution
from scipy.special import logsumexp
from scipy.stats import binom

from unheard.privacy.events import Counts, Event, ExampleGaussian, Gaussian, PoissonGaussian
from unheard.privacy.rdp import NO_NOISE, RDP_COST, library_event

GRID = 1e-4  # dp-accounting's own default
FEWEST_BINS = 4  # in a usual loss: enough for an epsilon within a few tenths of a percent of the finest grid's
MOST_BINS = 300  # in a usual loss, or in a loss of 1 if it is larger: epsilon within 1e-5 of the finest grid's
TYPICAL_DELTA = 1e-8
MAX_BINS_OF_A_ROUND = 3e5  # about 1.5 s to build
MAX_BINS_OF_A_RUN = 4e6
EXAMPLE_GRID = 1e-3  # a mixture of G + 1 Gaussians is slow to build: a coarser grid, which is valid too
MAX_BINS_OF_EXAMPLES = 4e4
WIDEST_GRID = 700.0  # the library takes exp of it; a loss so coarse says nothing that RDP does not say better
MAX_ROUNDS = 10**7  # of more the library takes minutes, and its rounding errors reach usual deltas; RDP is claimed then
MAX_KINDS = 24  # each further kind of round costs a Fourier transform more

# The library raises a Fourier transform to the power of the number of rounds, and its rounding errors grow with that
# number. Measured against the exact delta of Gaussian rounds (100 to 10^6 of them) the error stayed under 0.4 x 1.1e-16
# a round; this is five times as much. tests/privacy/test_pld.py has a run that the library alone gets wrong.
ERROR_PER_ROUND = 2.2e-16


class LossDistribution:
    """The composed privacy loss of counted events, on one grid.

    Args:
        counts: Events that have a loss distribution: rounds and Gaussian releases.
        grid: The width of a bin of the loss. Losses are rounded up, so any width gives a valid bound.
        relation: Which data sets are adjacent: one user is added or removed, or one user is replaced.
    """

    def __init__(
        self, counts: Counts, grid: float, relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE
    ) -> None:
        self._accountant = PLDAccountant(relation, value_discretization_interval=grid)
        for event, count in counts:
            if isinstance(event, Gaussian) or _sampling_prob(event) == 1:  # composed in closed form, not by transforms
                self._accountant.compose(library_event(event), count)
                continue
            several = _one_round(event, grid, relation).self_compose(count)
            self._accountant._pld = self._accountant._pld.compose(several)  # pyright: ignore[reportPrivateUsage]
        self._error = ERROR_PER_ROUND * sum(count for _, count in counts)

    def epsilon(self, delta: float) -> float:
        """An epsilon that holds at delta; infinity if delta is below the error of the computation."""
        # DP: the transform's error is taken from delta first; without that a long run's epsilon can be too small.
        rest = delta - self._error
        return float(self._accountant.get_epsilon(rest)) if rest > 0 else math.inf

    def delta(self, epsilon: float) -> float:
        """A delta that holds at epsilon."""
        return min(1.0, max(0.0, float(self._accountant.get_delta(epsilon))) + self._error)


@functools.lru_cache(maxsize=16)
def _one_round(event: Event, grid: float, relation: NeighboringRelation) -> Any:
    """The loss of one sampled round, cached: it takes up to a minute to build, and runs differ in their length."""
    library: Any = library_event(event)
    if isinstance(event, ExampleGaussian):
        return privacy_loss_distribution.from_mixture_gaussian_mechanism(
            library.standard_deviation,
            library.sensitivities,
            library.sampling_probs,
            value_discretization_interval=grid,
        )
    return privacy_loss_distribution.from_gaussian_mechanism(
        library.event.noise_multiplier,
        sampling_prob=library.sampling_probability,
        value_discretization_interval=grid,
        neighboring_relation=relation,
    )


@functools.lru_cache(maxsize=1024)
def pld_epsilon(counts: Counts, delta: float) -> float:
    """An epsilon that holds at delta; infinity where there is no bound."""
    composed = _composed(counts)
    return composed.epsilon(delta) if composed else math.inf


@functools.lru_cache(maxsize=1024)
def replace_one_pld_epsilon(counts: Counts, delta: float) -> float | None:
    """An epsilon that holds at delta if one user is replaced by another; None where the library has no bound.

    docs/privacy.md, section 8, has the proof for rounds and Gaussian releases: the worst case are two users with
    opposite updates, which is the pair of distributions that the library composes.
    """
    if not _is_composable(counts) or any(isinstance(event, ExampleGaussian) for event, _ in counts):
        return None
    counts = in_few_kinds(counts)
    grid = 2 * _grid(counts)  # two opposite updates have up to twice the loss of one
    return (
        LossDistribution(counts, grid, NeighboringRelation.REPLACE_ONE).epsilon(delta) if grid <= WIDEST_GRID else None
    )


@functools.lru_cache(maxsize=1024)
def pld_delta(counts: Counts, epsilon: float) -> float:
    """A delta that holds at epsilon; 1 where there is no bound."""
    composed = _composed(counts)
    return composed.delta(epsilon) if composed else 1.0


def _composed(counts: Counts) -> LossDistribution | None:
    """The loss of all events on a suitable grid.

    None if an event has no noise, or so little that no grid fits, or if there are more events than `MAX_ROUNDS`.
    """
    if not _is_composable(counts):
        return None
    counts = in_few_kinds(counts)
    grid = _grid(counts)
    return loss_distribution(counts, grid) if grid <= WIDEST_GRID else None


def _is_composable(counts: Counts) -> bool:
    """Whether there are not too many events, and each of them is a round or a Gaussian release with noise."""
    has_noise = all(_noise_multiplier(event) >= NO_NOISE for event, _ in counts)
    return has_noise and sum(count for _, count in counts) <= MAX_ROUNDS


@functools.lru_cache(maxsize=4)
def loss_distribution(counts: Counts, grid: float) -> LossDistribution:
    """A `LossDistribution`, cached: one curve asks for many points of one distribution."""
    return LossDistribution(counts, grid)


@functools.lru_cache(maxsize=16)
def _grid(counts: Counts) -> float:
    """Choose the width of a bin.

    It is dp-accounting's default, unless losses are far below it or it puts PLD above RDP (very small epsilons), where
    a finer grid is taken, or unless little noise makes losses so large that a wider one is as exact and much quicker.
    Any grid gives a valid bound. The choice depends on the events alone, so all points of their curve agree.
    """
    of_a_round = 2 * max(_largest_loss(event) for event, _ in counts)
    if any(
        isinstance(event, ExampleGaussian) for event, _ in counts
    ):  # RDP, which the choice below needs, has no bound
        return max(EXAMPLE_GRID, of_a_round / MAX_BINS_OF_EXAMPLES)
    of_a_run = 4 * RDP_COST.epsilon_of(counts, 1e-15)
    usual = min(_usual_loss(event) for event, _ in counts)
    fine = max(GRID, min(usual, 1.0) / MOST_BINS)
    grid = max(fine, of_a_round / MAX_BINS_OF_A_ROUND, of_a_run / MAX_BINS_OF_A_RUN)
    if grid > WIDEST_GRID:
        return grid
    if grid > 10 * usual or loss_distribution(counts, grid).epsilon(TYPICAL_DELTA) > RDP_COST.epsilon_of(
        counts, TYPICAL_DELTA
    ):
        finest = max(3 * of_a_round / MAX_BINS_OF_A_ROUND, of_a_run / MAX_BINS_OF_A_RUN)
        return min(grid, max(finest, usual / FEWEST_BINS))
    return grid


def _usual_loss(event: Event) -> float:
    """About the standard deviation of the loss of one round; a grid much wider than that loses most of the accuracy."""
    return _sampling_prob(event) * math.sqrt(math.expm1(min(_noise_multiplier(event) ** -2, 100.0)))


def _largest_loss(event: Event) -> float:
    """About the largest loss of one round that the library keeps: noise ten deviations out."""
    z, q = _noise_multiplier(event), _sampling_prob(event)
    if isinstance(event, ExampleGaussian):
        drawn = np.arange(event.examples_per_user + 1)
        furthest = event.examples_per_user + 10.2 * z
        exponents = binom.logpmf(drawn, event.examples_per_user, q) + (drawn * furthest - drawn**2 / 2) / z**2
        return float(cast(Any, logsumexp(exponents)))
    exponent = math.log(q) + (1 + 10.2 * z) / z**2
    return exponent + 1 if exponent > 0 else math.exp(exponent)


def in_few_kinds(counts: Counts, limit: int = MAX_KINDS) -> Counts:
    """Merge similar events until at most `limit` kinds are left; the loss is the same or a little larger.

    A schedule may give every round its own z, and each kind costs a Fourier transform. Releases in which everybody
    takes part are one release with the sum of their 1/z^2, exactly. For the other events z is rounded down and q is
    rounded up, with steps that double until few enough kinds are left.
    """
    of_examples = tuple((event, count) for event, count in counts if isinstance(event, ExampleGaussian))
    counts = tuple((event, count) for event, count in counts if not isinstance(event, ExampleGaussian))
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
    return (*of_examples, *together, *sampled.items())


def _a_little_worse(event: Event, step: float) -> Event:
    # DP: less noise and more sampling never cost less, so the bound stays a bound; the other way it would not.
    z = min(_noise_multiplier(event), math.exp(step * math.floor(math.log(_noise_multiplier(event)) / step)))
    q = min(1.0, max(_sampling_prob(event), math.exp(step * math.ceil(math.log(_sampling_prob(event)) / step))))
    return PoissonGaussian(sampling_prob=q, noise_multiplier=z)


def _noise_multiplier(event: Event) -> float:
    return event.noise_multiplier if isinstance(event, PoissonGaussian | ExampleGaussian | Gaussian) else 0.0


def _sampling_prob(event: Event) -> float:
    return event.sampling_prob if isinstance(event, PoissonGaussian | ExampleGaussian) else 1.0
