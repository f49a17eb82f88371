"""Compute privacy bounds from events: epsilon at delta, delta at epsilon, and the bound that a run claims.

Input: events, or pairs of an event and the number of times it happened, with a delta or an epsilon. Output: an upper
bound on the epsilon at that delta, or on the delta at that epsilon. Two data sets are adjacent if one has one user more
(paper: Definition 1 and Theorem 1; Table 1 for `moments`).

    epsilon(events, delta, accountant)      by one accountant
    epsilons(events, delta)                 by each accountant
    best_epsilon(events, delta)             the bound that a run claims: the smaller of pld and rdp, and which one it is
    delta_at(events, epsilon, accountant)   the delta at an epsilon, by one accountant
    replace_one_epsilon(events, delta)      the bound if one user is replaced, not added or removed

>>> from unheard.privacy.events import PoissonGaussian
>>> rounds = (PoissonGaussian(sampling_prob=5000 / 763_430, noise_multiplier=1.0), 5000)
>>> {name: round(value, 3) for name, value in epsilons([rounds], delta=1e-9).items()}
{'moments': 4.634, 'rdp': 4.183, 'pld': 3.899}
>>> best_epsilon([rounds], delta=1e-9).accountant
'pld'

The module has four parts, in this order. `ACCOUNTANTS` is the registry. To add an accountant, write two functions of
counted events and add one record to the registry; commands, statements, plans and budgets read it.

**RDP** (`RDP_COST`). The cost of an event is its Rényi divergence at many orders, computed by Google's dp-accounting.
Costs add up over rounds, even if the rounds have different q or z. The accountant is fast enough to run before every
round, so budgets use it. Literature: Mironov, "Rényi Differential Privacy" (2017): composition (Proposition 1) and the
conversion to epsilon; Mironov, Talwar and Zhang, "Rényi Differential Privacy of the Sampled Gaussian Mechanism" (2019):
the divergence of a round of the paper's Algorithm 1; Canonne, Kamath and Steinke (2020): the tighter conversion that
dp-accounting uses; Papernot and Steinke, "Hyperparameter Tuning with Rényi Differential Privacy" (2022): `Selection`.

**The moments accountant** (`MOMENTS_COST`), as the paper used it. The cost of an event is a vector of log moments of
its privacy loss, at the integer moments 1 to 32. Costs add up, and a tail bound turns their sum into epsilon at delta:

    alpha(lambda) = log E[exp(lambda * loss)]           delta = min over lambda of exp(alpha(lambda) - lambda * epsilon)

With these 32 moments the accountant gives every epsilon that the paper prints (Table 1); `rdp` and `pld` are tighter.
Paper: Theorem 1. Literature: Abadi et al., "Deep Learning with Differential Privacy" (CCS 2016), Theorems 1 and 2 and
Lemma 3; the code that accompanied that article computes the same moments. A log moment is lambda times the Rényi
divergence of order lambda + 1 (Mironov 2017), which is how `Selection` events are bounded here.

**PLD** (`LossDistribution`) composes the distribution of the privacy loss numerically, with dp-accounting. It is the
tightest of the three. This module adds two things: it chooses the grid that losses are rounded up to, and it adds an
allowance for the rounding errors of the library's Fourier transforms. The library ignores these errors, and they can
make its epsilon too small. Literature: Koskela, Jälkö and Honkela, "Computing Tight Differential Privacy Guarantees
Using FFT" (2020); Meiser and Mohammadi, "Tight on Budget?" (2018); Doroshenko et al., "Connect the Dots" (2022), which
dp-accounting implements. The test suite compares with Microsoft's independent prv-accountant (Gopi, Lee and Wutschitz
2021).

**The registry** (`ACCOUNTANTS`), and the functions in the list at the top.
"""

import contextlib
import functools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, TypeAlias, cast

import numpy as np
from dp_accounting import GaussianDpEvent, NeighboringRelation, NonPrivateDpEvent, NoOpDpEvent, PoissonSampledDpEvent
from dp_accounting.dp_event import DpEvent, MixtureOfGaussiansDpEvent
from dp_accounting.pld import PLDAccountant, privacy_loss_distribution
from dp_accounting.rdp import RdpAccountant, compute_epsilon
from dp_accounting.rdp.rdp_privacy_accountant import (
    _compute_rdp_repeat_and_select,  # pyright: ignore[reportPrivateUsage]
    compute_delta,
)
from scipy.special import gammaln, logsumexp
from scipy.stats import binom

from unheard.config import nearest, require
from unheard.errors import InvalidValue
from unheard.privacy.events import (
    Counts,
    Event,
    ExampleGaussian,
    FailureProbability,
    Gaussian,
    NonPrivate,
    PoissonGaussian,
    Selection,
    accounted,
)

Events: TypeAlias = Iterable[Event | tuple[Event, int]]
"""Events, or pairs of an event and the number of times it happened."""

NO_NOISE = 1e-6
"""Below this z the computation overflows. Epsilon would be above 10^11, so it is reported as infinity."""

RDP_ORDERS = RdpAccountant().orders
"""The orders of the Rényi divergences: dp-accounting's default list."""

# For small q and large z, rounding errors in dp-accounting give divergences of -1e-16, from which it concludes that
# epsilon is 0. This allowance is added to every divergence.
RDP_ROUNDING = 1e-13 * RDP_ORDERS / (RDP_ORDERS - 1)

# dp-accounting's parameter for the distribution of the number of trials (Papernot and Steinke 2022, Theorems 2 and 6).
SHAPES = {"geometric": 1.0, "poisson": math.inf}


@dataclass(frozen=True, kw_only=True)
class AdditiveCost:
    """An accountant whose costs add up over rounds.

    Attributes:
        cost: Computes the cost of one event: a vector with one number per order (or per moment).
        epsilon: Computes epsilon from a sum of costs and a delta.
        delta: Computes delta from a sum of costs and an epsilon.
    """

    cost: Callable[[Event], np.ndarray]
    epsilon: Callable[[np.ndarray, float], float]
    delta: Callable[[np.ndarray, float], float]

    def total(self, counts: Counts) -> np.ndarray:
        """Return the sum of the costs of counted events; zero if there are no events."""
        return sum((count * self.cost(event) for event, count in counts), np.zeros(1))

    def epsilon_of(self, counts: Counts, delta: float) -> float:
        """Compute the epsilon of counted events at a delta."""
        return self.epsilon(self.total(counts), delta)

    def delta_of(self, counts: Counts, epsilon: float) -> float:
        """Compute the delta of counted events at an epsilon."""
        return self.delta(self.total(counts), epsilon)


def library_event(event: Event) -> DpEvent:
    """Convert an event into the matching class of dp-accounting.

    A failure probability becomes a no-op event, because `_epsilon` subtracts it from delta.

    Raises:
        TypeError: The event is a selection, for which dp-accounting has no class. `rdp_cost` computes its bound from
            the divergences of one run.
    """
    if isinstance(event, NonPrivate):
        return NonPrivateDpEvent()
    if isinstance(event, FailureProbability):
        return NoOpDpEvent()
    if event.noise_multiplier < NO_NOISE:
        return NonPrivateDpEvent()
    if isinstance(event, Selection):
        raise TypeError("dp-accounting has no event for a selection: use rdp or moments")
    if isinstance(event, ExampleGaussian):
        drawn = np.arange(event.examples_per_user + 1)
        shares = binom.pmf(drawn, event.examples_per_user, event.sampling_prob)
        # DP: one user moves the sum by one bound for each of their examples that is drawn, and all of them may be
        # drawn.
        return MixtureOfGaussiansDpEvent(event.noise_multiplier, [float(i) for i in drawn], list(shares / shares.sum()))
    if isinstance(event, Gaussian) or event.sampling_prob == 1:
        return GaussianDpEvent(event.noise_multiplier)
    return PoissonSampledDpEvent(event.sampling_prob, GaussianDpEvent(event.noise_multiplier))


@functools.lru_cache(maxsize=4096)
def rdp_cost(event: Event) -> np.ndarray:
    """Compute the Rényi divergences of one event at `RDP_ORDERS`, rounded up; infinity where there is no bound.

    A `FailureProbability` costs zero here. `collapse` returns it separately, and it is subtracted from delta.
    """
    if isinstance(event, FailureProbability):
        return np.zeros(len(RDP_ORDERS))
    if isinstance(event, Selection):
        return selected_divergence(event, RDP_ORDERS, rdp_cost(one_round(event)))
    if isinstance(event, ExampleGaussian):
        # DP: no bound on the divergence of this mixture is implemented; pld has a bound.
        return np.full(len(RDP_ORDERS), math.inf)
    with _quiet_library():
        cost = RdpAccountant().compose(library_event(event)).rdp
    # DP: rounded up, so that a tiny divergence is not taken for zero, which would give an epsilon of 0.
    return np.where(np.isnan(cost), math.inf, np.maximum(cost, 0.0) + RDP_ROUNDING)


def rdp_epsilon(cost: np.ndarray, delta: float) -> float:
    """Compute the epsilon at delta of a sum of divergences: the smallest over all orders.

    dp-accounting converts at each of its 156 orders in a loop, which takes 0.4 ms. Training needs this number after
    every round, so this function first finds the orders that can give the smallest epsilon and converts only at those.
    """
    best_M = _best_orders(np.asarray(cost), delta)
    # DP: the bound holds at every order, so a wrong choice of orders can only make epsilon larger.
    return float(compute_epsilon(RDP_ORDERS[best_M], cost[best_M], delta)[0])  # pyright: ignore[reportArgumentType]


def _best_orders(cost: np.ndarray, delta: float) -> np.ndarray:
    """Return a boolean mask over `RDP_ORDERS`: the orders that give the smallest epsilon, up to rounding errors.

    If no order has a finite epsilon, the mask selects all orders.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        epsilon_M = cost + np.log1p(-1 / RDP_ORDERS) - np.log(delta * RDP_ORDERS) / (RDP_ORDERS - 1)
        least = np.nanmin(epsilon_M) if np.isfinite(epsilon_M).any() else math.inf
        # For a divergence below about delta^2 dp-accounting uses another bound, with which epsilon is 0.
        best_M = (epsilon_M <= least + 1e-9 * (1 + abs(least))) | (cost <= 2 * delta**2)
    return best_M if best_M.any() else np.full(RDP_ORDERS.shape, True)


FILTER_ORDERS = (1.2, 1.5, 2.0, 3.0, 4.5, 7.0, 11.0, 18.0, 30.0, 50.0)
"""The RDP orders of filters and odometers. They are constants, so their choice cannot depend on results."""


ROUGH_ORDERS = (1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0)
"""The RDP orders that `rough_epsilon` uses: few, to save time."""


def at_orders(cost: np.ndarray, orders: Sequence[float]) -> np.ndarray:
    """Return the divergences at some of the orders.

    Args:
        cost: The divergences at `RDP_ORDERS`.
        orders: The orders to select.

    Raises:
        InvalidValue: One of `orders` is not in `RDP_ORDERS`.
    """
    where = [np.flatnonzero(np.isclose(RDP_ORDERS, order, rtol=1e-9)) for order in orders]
    require(
        all(len(index) == 1 for index in where), f"orders must be among those of dp-accounting, not {list(orders)}."
    )
    return np.broadcast_to(cost, RDP_ORDERS.shape)[np.concatenate(where)]


def filter_epsilon(cost: np.ndarray, delta: float, orders: Sequence[float]) -> float:
    """Compute the epsilon at delta that a privacy filter with fixed orders reports.

    The bound also holds if the events were chosen during training, after a look at earlier results.

    Args:
        cost: The sum of the divergences of all events, at `RDP_ORDERS`.
        delta: The delta of the filter; each order has an equal share of it.
        orders: The orders that were declared with the filter.
    """
    # DP: each order has its share of delta, because the best order is chosen after the events are known.
    return float(compute_epsilon(orders, at_orders(cost, orders), delta / len(orders))[0])  # pyright: ignore[reportArgumentType]


def epsilon_at_order(order: float, divergence: float, delta: float) -> float:
    """Convert a divergence at one order to an epsilon at delta (Canonne, Kamath and Steinke 2020)."""
    return float(compute_epsilon([order], [divergence], delta)[0]) if math.isfinite(divergence) else math.inf


def rough_epsilon(counts: Counts, delta: float) -> float:
    """Compute a valid but slightly larger epsilon from few orders.

    It is a few percent above `rdp_epsilon` and takes a twentieth of the time.

    Args:
        counts: Counted events.
        delta: The delta of the guarantee.
    """
    accountant = RdpAccountant(orders=ROUGH_ORDERS)
    with _quiet_library():
        for event, count in counts:
            accountant.compose(library_event(event), count)
    return float(accountant.get_epsilon(delta))


def rdp_delta(cost: np.ndarray, epsilon: float) -> float:
    """Compute the delta at epsilon of a sum of divergences: the smallest over all orders."""
    return float(compute_delta(RDP_ORDERS, cost, epsilon)[0])  # pyright: ignore[reportArgumentType]


RDP_COST = AdditiveCost(cost=rdp_cost, epsilon=rdp_epsilon, delta=rdp_delta)


def one_round(event: Selection) -> PoissonGaussian:
    """Return the event of one round of a run that the selection chooses from. All rounds have the same q and z."""
    return PoissonGaussian(sampling_prob=event.sampling_prob, noise_multiplier=event.noise_multiplier)


def selected_divergence(event: Selection, orders: np.ndarray, divergence_of_round: np.ndarray) -> np.ndarray:
    """Bound the divergences of releasing the best of a random number of runs.

    Literature: Papernot and Steinke (2022), Theorems 2 and 6.

    Args:
        event: The selection: how many rounds a run has, and how the number of runs was drawn.
        orders: The orders of the divergences.
        divergence_of_round: The divergences of one round, one per order, rounded up.

    Returns:
        One divergence per order; infinity at all orders if no divergence of a run is finite.
    """
    # DP: each trial is a whole run, so the bound is computed from the divergences of all rounds of a run together.
    divergence_of_run = event.rounds * divergence_of_round
    if not np.isfinite(divergence_of_run).any():
        return np.full(len(orders), math.inf)
    # This is a part of dp-accounting's function for selections. The whole function computes the divergences itself,
    # without rounding up, and treats 1e-17 as "no privacy loss".
    with _quiet_library():
        return np.asarray(
            _compute_rdp_repeat_and_select(orders, divergence_of_run, event.mean_trials, SHAPES[event.drawn_from])  # pyright: ignore[reportArgumentType]
        )


@contextlib.contextmanager
def _quiet_library() -> Iterator[None]:
    """Suppress dp-accounting's warnings about orders that it skips. Skipping is safe, and a caller cannot change it."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


MOMENTS = np.arange(1, 33)
"""The moments lambda of the moments accountant, as in the paper."""


@functools.lru_cache(maxsize=4096)
def moments_cost(event: Event) -> np.ndarray:
    """Compute alpha(lambda) for lambda = 1..32, the log moments of the privacy loss of one event."""
    if isinstance(event, FailureProbability):
        return np.zeros(len(MOMENTS))
    if isinstance(event, NonPrivate | ExampleGaussian) or event.noise_multiplier < NO_NOISE:
        return np.full(len(MOMENTS), math.inf)  # DP: without noise the cost is infinite, in every accountant.
    if isinstance(event, Selection):
        divergence = moments_cost(one_round(event)) / MOMENTS
        return MOMENTS * selected_divergence(event, MOMENTS + 1.0, divergence + 1e-13 * (MOMENTS + 1) / MOMENTS)
    q = event.sampling_prob if isinstance(event, PoissonGaussian) else 1.0
    return np.array([_log_moment(q, event.noise_multiplier, int(order)) for order in MOMENTS])


def moments_epsilon(cost: np.ndarray, delta: float) -> float:
    """Return the smallest epsilon that the tail bound gives at delta."""
    return float(np.min((cost + math.log(1 / delta)) / MOMENTS))


def moments_delta(cost: np.ndarray, epsilon: float) -> float:
    """Return the smallest delta that the tail bound gives at epsilon; at most 1."""
    return math.exp(min(0.0, float(np.min(cost - MOMENTS * epsilon))))


MOMENTS_COST = AdditiveCost(cost=moments_cost, epsilon=moments_epsilon, delta=moments_delta)


def _log_moment(q: float, z: float, moment: int) -> float:
    """Compute log E[(nu / mu)^(moment + 1)] under mu, for mu = N(0, z^2) and nu = (1 - q) mu + q N(1, z^2).

    With n = moment + 1 this is log sum_k Binomial(n, q)(k) exp(k (k - 1) / 2 z^2). The probabilities sum to 1 and the
    exponents of k = 0 and k = 1 are 0, so the result is log(1 + x), where x is a sum of positive terms from k = 2. The
    code computes log x, so that x neither overflows (small z) nor is lost when 1 is added (small q).
    """
    n = moment + 1
    if q == 1:
        return n * (n - 1) / (2 * z**2)
    k = np.arange(2, n + 1)
    exponent = k * (k - 1) / (2 * z**2)
    log_expm1 = exponent + np.log(-np.expm1(-exponent))
    log_binomial = gammaln(n + 1) - gammaln(k + 1) - gammaln(n - k + 1) + k * math.log(q) + (n - k) * math.log1p(-q)
    return float(np.logaddexp(0.0, cast(Any, logsumexp(log_binomial + log_expm1))))


PLD_GRID = 1e-4  # dp-accounting's default width of a bin
# Bins per typical loss of a round (see `_usual_loss`). With 4 bins epsilon is within a few tenths of a percent of its
# value on the finest grid; with 300 it is within 1e-5, and more bins only take longer.
FEWEST_BINS = 4
MOST_BINS = 300
TYPICAL_DELTA = 1e-8
MAX_BINS_OF_A_ROUND = 3e5  # about 1.5 s to build
MAX_BINS_OF_A_RUN = 4e6
EXAMPLE_GRID = 1e-3  # coarser, because a mixture of G + 1 Gaussians is slow to build; the bound stays valid
MAX_BINS_OF_EXAMPLES = 4e4
WIDEST_GRID = 700.0  # the library computes exp of the width; on a grid this coarse, RDP gives the better bound
# With more rounds the library takes minutes, and its rounding errors reach the size of common deltas. A run claims the
# bound of RDP then.
MAX_ROUNDS = 10**7
MAX_KINDS = 24  # the library computes one Fourier transform per kind of round

# The library raises a Fourier transform to the power of the number of rounds, so its rounding errors grow with that
# number. The exact delta is known for rounds without sampling: in runs of 100 to 10^6 such rounds the measured error
# stayed below 0.4 x 1.1e-16 per round. This allowance is five times as large. tests/privacy/test_accountants_pld.py has
# a run for which the library alone gives a wrong result.
ERROR_PER_ROUND = 2.2e-16


class LossDistribution:
    """The distribution of the composed privacy loss of counted events, on one grid.

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
            if isinstance(event, Gaussian) or _sampling_prob(event) == 1:  # these compose in closed form
                self._accountant.compose(library_event(event), count)
                continue
            several = _loss_of_round(event, grid, relation).self_compose(count)
            self._accountant._pld = self._accountant._pld.compose(several)  # pyright: ignore[reportPrivateUsage]
        self._error = ERROR_PER_ROUND * sum(count for _, count in counts)

    def epsilon(self, delta: float) -> float:
        """Return an epsilon that holds at delta; infinity if delta is below the numerical error of the computation."""
        # DP: the error of the transforms is subtracted from delta first; otherwise the epsilon of a long run can be too
        # small.
        rest = delta - self._error
        return float(self._accountant.get_epsilon(rest)) if rest > 0 else math.inf

    def delta(self, epsilon: float) -> float:
        """Return a delta that holds at epsilon; at most 1."""
        return min(1.0, max(0.0, float(self._accountant.get_delta(epsilon))) + self._error)


@functools.lru_cache(maxsize=16)
def _loss_of_round(event: Event, grid: float, relation: NeighboringRelation) -> Any:
    """Build the loss distribution of one round with sampling.

    Building takes up to a minute. The result is cached and used again for runs of other lengths.
    """
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
    """Return the epsilon at delta by PLD; infinity where PLD has no bound."""
    composed = _composed(counts)
    return composed.epsilon(delta) if composed else math.inf


@functools.lru_cache(maxsize=1024)
def replace_one_pld_epsilon(counts: Counts, delta: float) -> float | None:
    """Return the epsilon at delta by PLD if one user is replaced by another; None where the library has no bound.

    docs/privacy.md, section 8, has the proof for rounds and Gaussian releases: the worst case is two users with
    opposite updates, and the library composes the pair of distributions of that case.
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
    """Return the delta at epsilon by PLD; 1 where PLD has no bound."""
    composed = _composed(counts)
    return composed.delta(epsilon) if composed else 1.0


def _composed(counts: Counts) -> LossDistribution | None:
    """Compose the losses of all events on a suitable grid.

    Returns:
        The composed loss. None if an event has no noise, if the noise is so small that the grid would be wider than
        `WIDEST_GRID`, or if there are more than `MAX_ROUNDS` events.
    """
    if not _is_composable(counts):
        return None
    counts = in_few_kinds(counts)
    grid = _grid(counts)
    return loss_distribution(counts, grid) if grid <= WIDEST_GRID else None


def _is_composable(counts: Counts) -> bool:
    """Whether each event is a round or a Gaussian release with noise, and there are at most `MAX_ROUNDS` of them."""
    has_noise = all(_noise_multiplier(event) >= NO_NOISE for event, _ in counts)
    return has_noise and sum(count for _, count in counts) <= MAX_ROUNDS


@functools.lru_cache(maxsize=4)
def loss_distribution(counts: Counts, grid: float) -> LossDistribution:
    """Build a `LossDistribution`. It is cached because a privacy curve needs many points of one distribution."""
    return LossDistribution(counts, grid)


@functools.lru_cache(maxsize=16)
def _grid(counts: Counts) -> float:
    """Choose the width of a bin of the privacy loss.

    The width is dp-accounting's default in most cases. It is larger if the noise is small: losses are then large, and a
    wider bin is as accurate and much faster. It is smaller if typical losses are far below the default, or if PLD would
    give a larger epsilon than RDP; both happen at very small epsilons. Any width gives a valid bound. The width depends
    on the events only, so all points of one privacy curve use the same grid.
    """
    of_a_round = 2 * max(_largest_loss(event) for event, _ in counts)
    # The choice below compares with RDP, which has no bound for rounds that draw examples.
    if any(isinstance(event, ExampleGaussian) for event, _ in counts):
        return max(EXAMPLE_GRID, of_a_round / MAX_BINS_OF_EXAMPLES)
    of_a_run = 4 * RDP_COST.epsilon_of(counts, 1e-15)
    usual = min(_usual_loss(event) for event, _ in counts)
    fine = max(PLD_GRID, min(usual, 1.0) / MOST_BINS)
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
    """Return roughly the standard deviation of the loss of one round. Bins much wider than this are inaccurate."""
    return _sampling_prob(event) * math.sqrt(math.expm1(min(_noise_multiplier(event) ** -2, 100.0)))


def _largest_loss(event: Event) -> float:
    """Return roughly the largest loss of one round that the library represents: noise of ten standard deviations."""
    z, q = _noise_multiplier(event), _sampling_prob(event)
    if isinstance(event, ExampleGaussian):
        drawn = np.arange(event.examples_per_user + 1)
        furthest = event.examples_per_user + 10.2 * z
        exponents = binom.logpmf(drawn, event.examples_per_user, q) + (drawn * furthest - drawn**2 / 2) / z**2
        return float(cast(Any, logsumexp(exponents)))
    exponent = math.log(q) + (1 + 10.2 * z) / z**2
    return exponent + 1 if exponent > 0 else math.exp(exponent)


def in_few_kinds(counts: Counts, limit: int = MAX_KINDS) -> Counts:
    """Merge similar events until at most `limit` kinds are left. The merged events cost the same or slightly more.

    A schedule can give every round its own z, and each kind of event costs a Fourier transform. All Gaussian releases
    in which every user takes part are replaced by one release of exactly the same cost, whose 1/z^2 is the sum of
    theirs. For rounds with sampling, z is rounded down and q is rounded up, in steps that double until few enough kinds
    are left. Rounds that draw examples are not merged.

    Args:
        counts: Counted events.
        limit: The largest number of kinds of rounds with sampling.
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
    """Return the round with z rounded down and q rounded up to powers of exp(`step`)."""
    # DP: less noise and more sampling never cost less, so the bound stays valid; with the opposite rounding it would
    # not.
    z = min(_noise_multiplier(event), math.exp(step * math.floor(math.log(_noise_multiplier(event)) / step)))
    q = min(1.0, max(_sampling_prob(event), math.exp(step * math.ceil(math.log(_sampling_prob(event)) / step))))
    return PoissonGaussian(sampling_prob=q, noise_multiplier=z)


def _noise_multiplier(event: Event) -> float:
    return event.noise_multiplier if isinstance(event, PoissonGaussian | ExampleGaussian | Gaussian) else 0.0


def _sampling_prob(event: Event) -> float:
    return event.sampling_prob if isinstance(event, PoissonGaussian | ExampleGaussian) else 1.0


@dataclass(frozen=True, kw_only=True)
class Accountant:
    """One way to bound the privacy loss of counted events.

    Attributes:
        name: The name in run files, commands and statements.
        title: The heading of the accountant's column in a table.
        description: What the accountant computes, how exact it is, and where it comes from.
        epsilon: Computes epsilon from counted events and a delta; infinity if the accountant has no bound.
        delta: Computes delta from counted events and an epsilon.
        additive: The cost per event, if costs add up; None otherwise. Only an accountant with additive costs is fast
            enough to run before every round.
        is_claimed: Whether a run may claim the bound of this accountant. A run claims the smallest such bound.
        note: A remark that a printed statement adds to the epsilon.
        since: The first version of this package with the accountant. Statements of earlier versions do not have it.
    """

    name: str
    title: str
    description: str
    epsilon: Callable[[Counts, float], float]
    delta: Callable[[Counts, float], float]
    additive: AdditiveCost | None = None
    is_claimed: bool = False
    note: str = ""
    since: str = "0.1"


ACCOUNTANTS = {
    accountant.name: accountant
    for accountant in (
        Accountant(
            name="moments",
            title="moments (the paper's)",
            description="The moments accountant with the integer moments 1 to 32 (Abadi et al. 2016). It gives the epsilons "
            "that the paper prints, and serves to compare with the paper.",
            epsilon=MOMENTS_COST.epsilon_of,
            delta=MOMENTS_COST.delta_of,
            additive=MOMENTS_COST,
            note="the paper's, for comparison",
        ),
        Accountant(
            name="rdp",
            title="RDP",
            description="Rényi differential privacy of the sampled Gaussian mechanism (Mironov, Talwar and Zhang 2019), by "
            "dp-accounting. Quick; no bound where examples are drawn instead of users.",
            epsilon=RDP_COST.epsilon_of,
            delta=RDP_COST.delta_of,
            additive=RDP_COST,
            is_claimed=True,
        ),
        Accountant(
            name="pld",
            title="PLD",
            description="Numerical composition of privacy loss distributions (Koskela, Jälkö and Honkela 2020), by "
            "dp-accounting. The tightest of the three; takes seconds; no bound for selections or above 10^7 rounds.",
            epsilon=pld_epsilon,
            delta=pld_delta,
            is_claimed=True,
        ),
    )
}

CLAIMED = tuple(name for name in reversed(ACCOUNTANTS) if ACCOUNTANTS[name].is_claimed)
"""The names of the accountants whose bounds a run may claim. A run claims the smallest bound; if two bounds are equal,
the first accountant in this tuple is named."""

RUNNING_ACCOUNTANT = "rdp"
"""The accountant for an epsilon that is computed after every round: in budgets and in curves over rounds."""


def claim_rule(claimed: Sequence[str] = CLAIMED) -> str:
    """Return how a claim is chosen, in words. The argument is that of `best_epsilon`."""
    return f"the smaller of {' and '.join(claimed)}"


def running_accountant(events: Iterable[Event]) -> str:
    """Return the name of the accountant for the running epsilon of these events.

    It is "pld" if a round draws examples, because "rdp" has no bound for such rounds, and "rdp" otherwise.
    """
    return "pld" if any(isinstance(event, ExampleGaussian) for event in events) else RUNNING_ACCOUNTANT


@dataclass(frozen=True, kw_only=True)
class Bound:
    """An epsilon and the name of the accountant that computed it.

    Attributes:
        epsilon: The bound; infinity if there is none.
        accountant: The name of the accountant. `replace_one_epsilon` adds words that say how the bound was computed.
    """

    epsilon: float
    accountant: str


def epsilon(events: Events, delta: float, accountant: str) -> float:
    """Compute the epsilon that holds at delta, by one accountant.

    Args:
        events: All events, in any order.
        delta: Between 0 and 1.
        accountant: A key of `ACCOUNTANTS`.

    Returns:
        An upper bound: 0.0 for no events, infinity if something was released without noise.

    Raises:
        InvalidValue: The delta is not between 0 and 1, or there is no such accountant.
    """
    _check_delta(delta)
    return _epsilon(*collapse(events), delta, find_accountant(accountant))


def bound_by(events: Events, delta: float, accountant: str) -> Bound:
    """Compute the bound of one accountant, or with "best" the bound that a run claims (`best_epsilon`)."""
    if accountant == "best":
        return best_epsilon(events, delta)
    return Bound(epsilon=epsilon(events, delta, accountant), accountant=accountant)


def delta_at(events: Events, epsilon: float, accountant: str) -> float:
    """Compute the delta that holds at epsilon, by one accountant.

    Args:
        events: All events, in any order.
        epsilon: 0 or more, and finite.
        accountant: A key of `ACCOUNTANTS`.

    Raises:
        InvalidValue: The epsilon is out of range, or there is no such accountant.
    """
    require(0 <= epsilon < math.inf, f"epsilon must be a number from 0 up, not {epsilon}.")
    return _delta(*collapse(events), epsilon, find_accountant(accountant))


def epsilons(events: Events, delta: float, accountants: Iterable[str] | None = None) -> dict[str, float]:
    """Compute epsilon at delta by each accountant.

    Args:
        events: All events, in any order.
        delta: Between 0 and 1.
        accountants: The names of the accountants; None for all.

    Returns:
        One epsilon per accountant, by name, in the order of `ACCOUNTANTS`.
    """
    _check_delta(delta)
    counts, failure = collapse(events)
    names = ACCOUNTANTS if accountants is None else accountants
    return {name: _epsilon(counts, failure, delta, ACCOUNTANTS[name]) for name in names}


def best_epsilon(events: Events, delta: float, claimed: Sequence[str] = CLAIMED) -> Bound:
    """Compute the bound that a run claims: the smaller of the bounds by pld and by rdp. Both are valid.

    The choice depends only on the events, which are public, so it costs no privacy.

    Args:
        events: All events, in any order.
        delta: Between 0 and 1.
        claimed: The names of the accountants whose bounds are compared.

    Returns:
        The epsilon, with the name of the accountant that gave it.
    """
    _check_delta(delta)
    counts, failure = collapse(events)
    return _smallest(lambda accountant: _epsilon(counts, failure, delta, accountant), claimed)


def replace_one_epsilon(events: Events, delta: float, claimed: Sequence[str] = CLAIMED) -> Bound:
    """Compute epsilon for the case that the data of one user is replaced by that of another, not added or removed.

    The bound comes from one of two arguments:

    - If all events are rounds or Gaussian releases, dp-accounting composes their losses under this adjacency. It
      assumes that the worst case is two users with opposite updates; docs/privacy.md proves this in any number of
      dimensions.
    - Otherwise the bound is for a group of two users, one removed and one added: a guarantee of (epsilon, delta) for
      one user is a guarantee of (2 epsilon, (1 + e^epsilon) delta) for two (group privacy).

    Failure probabilities count twice in both cases, once for each of the two users.

    Args:
        events: All events, in any order.
        delta: Between 0 and 1.
        claimed: The names of the accountants whose bounds are compared for a group of two.

    Returns:
        The bound; its `accountant` says which of the two arguments was used.
    """
    _check_delta(delta)
    counts, failure = collapse(events)
    # DP: each of the two users may be the one for whom the release fails.
    rest = delta - 2 * failure
    direct = replace_one_pld_epsilon(counts, rest) if counts and rest > 0 else None
    if direct is not None and direct < math.inf:
        return Bound(epsilon=direct, accountant="pld for replacing one user")
    two = _smallest(lambda accountant: _epsilon_of_two(counts, failure, delta, accountant), claimed)
    return Bound(epsilon=two.epsilon, accountant=f"{two.accountant} for a group of two")


def collapse(events: Events) -> tuple[Counts, float]:
    """Count equal events, and add up the failure probabilities.

    A block of rounds with correlated noise becomes the one release that the accountants charge for (`accounted`).

    Returns:
        A pair: the counted events without failure probabilities, in an order that does not depend on the order of the
        input; and the sum of the failure probabilities.
    """
    counted: dict[Event, int] = {}
    for item in events:
        event, count = item if isinstance(item, tuple) else (item, 1)
        require(isinstance(count, int) and count >= 0, f"An event happens a whole number of times, not {count!r}.")
        if count and (event := accounted(event)) is not None:
            counted[event] = counted.get(event, 0) + count
    failure = math.fsum(e.delta * count for e, count in counted.items() if isinstance(e, FailureProbability))
    kept = ((event, count) for event, count in counted.items() if not isinstance(event, FailureProbability))
    return tuple(sorted(kept, key=repr)), failure


def find_accountant(name: str) -> Accountant:
    """Return the accountant of this name. Raises `InvalidValue`, with the nearest known name, if there is none."""
    if name not in ACCOUNTANTS:
        raise InvalidValue(f"Unknown accountant '{name}'.{nearest(str(name), ACCOUNTANTS)}")
    return ACCOUNTANTS[name]


def versions() -> dict[str, str]:
    """Return the versions of the packages that compute the numbers of a statement, by package name."""
    return {name: _version(name) for name in ("unheard", "dp-accounting", "numpy", "scipy")}


@functools.cache
def _version(name: str) -> str:
    """Return the version of a package. Cached, since reading the metadata takes milliseconds and every run needs it."""
    return version(name)


def _epsilon(counts: Counts, failure: float, delta: float, accountant: Accountant) -> float:
    # DP: failure probabilities are subtracted from delta before the other events are composed, so that delta covers
    # both.
    rest = delta - failure
    if not counts:
        return 0.0 if rest >= 0 else math.inf
    return accountant.epsilon(counts, rest) if rest > 0 else math.inf


def _delta(counts: Counts, failure: float, epsilon: float, accountant: Accountant) -> float:
    return min(1.0, failure + (accountant.delta(counts, epsilon) if counts else 0.0))


def _epsilon_of_two(counts: Counts, failure: float, delta: float, accountant: Accountant) -> float:
    """Bound epsilon for a group of two users.

    Search for the smallest epsilon of one user at which (1 + e^epsilon) times the delta of one user is at most the
    delta that is left after the failure probabilities. Return twice that epsilon; infinity if none is found.
    """
    rest = delta - 2 * failure
    if rest <= 0:
        return math.inf

    def holds(epsilon: float) -> bool:
        """Whether (1 + e^epsilon) times the delta of one user at this epsilon is at most `rest`."""
        log_delta = math.log(max(_delta(counts, 0.0, epsilon, accountant), 1e-300))
        return epsilon + math.log1p(math.exp(-epsilon)) + log_delta <= math.log(rest)

    low = _epsilon(counts, 0.0, rest, accountant)
    if math.isinf(low) or (low == 0 and holds(low)):
        return low
    step = 0.05 * max(low, 0.01)
    high = next((low + i * step for i in range(1, 100) if holds(low + i * step)), math.inf)
    if math.isinf(high):
        return high
    low = high - step
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return 2 * high


def _smallest(epsilon_by: Callable[[Accountant], float], claimed: Sequence[str]) -> Bound:
    bounds = [Bound(epsilon=epsilon_by(ACCOUNTANTS[name]), accountant=name) for name in claimed]
    return min(bounds, key=lambda bound: bound.epsilon)


def _check_delta(delta: float) -> None:
    require(0 < delta < 1, f"delta must be between 0 and 1, not {delta}.")
