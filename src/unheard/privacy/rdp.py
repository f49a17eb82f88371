"""Accountants whose costs add up over rounds: RDP, and the paper's moments accountant.

**RDP.** The cost of an event is its Rényi divergence at many orders. In: an event. Out: a vector of Rényi divergences,
computed by Google's dp-accounting; the sum over all rounds gives epsilon at delta. Rounds may differ: their vectors are
added. The accountant is quick enough to be asked before every round, so budgets use it. `AdditiveCost` is the interface
that both share.

Literature: Mironov, "Rényi Differential Privacy" (2017): composition (Proposition 1) and the conversion to epsilon;
Mironov, Talwar and Zhang, "Rényi Differential Privacy of the Sampled Gaussian Mechanism" (2019): the divergence of a
round of the paper's Algorithm 1; Canonne, Kamath and Steinke (2020): the tighter conversion that dp-accounting uses;
Papernot and Steinke, "Hyperparameter Tuning with Rényi Differential Privacy" (2022): `Selection` events.

**The moments accountant**, as the paper used it. The cost of an event is a vector of log moments of its privacy loss,
at the integer moments 1 to 32. Costs add up over rounds (composition), and a tail bound turns their sum into epsilon at
delta:

    alpha(lambda) = log E[exp(lambda * loss)]           delta = min over lambda of exp(alpha(lambda) - lambda * epsilon)

With these 32 moments the accountant gives every epsilon that the paper prints (Table 1); `rdp` and `pld` are tighter.
Paper: Theorem 1. Literature: Abadi et al., "Deep Learning with Differential Privacy" (CCS 2016), Theorems 1 and 2 and
Lemma 3; the code that accompanied that article computes the same moments. A log moment is lambda times the Rényi
divergence of order lambda + 1 (Mironov 2017), which is how `Selection` events are bounded here.
"""

import contextlib
import functools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from dp_accounting import GaussianDpEvent, NonPrivateDpEvent, NoOpDpEvent, PoissonSampledDpEvent
from dp_accounting.dp_event import DpEvent, MixtureOfGaussiansDpEvent
from dp_accounting.rdp import RdpAccountant, compute_epsilon
from dp_accounting.rdp.rdp_privacy_accountant import (
    _compute_rdp_repeat_and_select,  # pyright: ignore[reportPrivateUsage]
    compute_delta,
)
from scipy.special import gammaln, logsumexp
from scipy.stats import binom

from unheard.config import require
from unheard.privacy.events import (
    Counts,
    Event,
    ExampleGaussian,
    FailureProbability,
    Gaussian,
    NonPrivate,
    PoissonGaussian,
    Selection,
)

NO_NOISE = 1e-6
"""Below this z the computation overflows. Epsilon would be above 10^11, so it is reported as infinity."""

RDP_ORDERS = RdpAccountant().orders

# dp-accounting rounds: for small q and large z its divergences come out at -1e-16, which it reads as "epsilon is 0".
RDP_ROUNDING = 1e-13 * RDP_ORDERS / (RDP_ORDERS - 1)

# dp-accounting's parameter for the distribution of the number of trials (Papernot and Steinke 2022, Theorems 2 and 6).
SHAPES = {"geometric": 1.0, "poisson": math.inf}


@dataclass(frozen=True, kw_only=True)
class AdditiveCost:
    """An accountant whose costs add up over rounds.

    Attributes:
        cost: The cost of one event, a vector with one number per order.
        epsilon: The epsilon at delta of a sum of costs.
        delta: The delta at epsilon of a sum of costs.
    """

    cost: Callable[[Event], np.ndarray]
    epsilon: Callable[[np.ndarray, float], float]
    delta: Callable[[np.ndarray, float], float]

    def total(self, counts: Counts) -> np.ndarray:
        """The sum of the costs of counted events; zero for no events."""
        return sum((count * self.cost(event) for event, count in counts), np.zeros(1))

    def epsilon_of(self, counts: Counts, delta: float) -> float:
        """The epsilon at delta of counted events."""
        return self.epsilon(self.total(counts), delta)

    def delta_of(self, counts: Counts, epsilon: float) -> float:
        """The delta at epsilon of counted events."""
        return self.delta(self.total(counts), epsilon)


def library_event(event: Event) -> DpEvent:
    """Translate an event into dp-accounting's classes.

    A failure probability becomes no event, since `accountants.py` takes it from delta. A selection has no counterpart:
    `rdp_cost` computes its bound from the divergences of one run.
    """
    if isinstance(event, NonPrivate):
        return NonPrivateDpEvent()
    if isinstance(event, FailureProbability):
        return NoOpDpEvent()
    if event.noise_multiplier < NO_NOISE:
        return NonPrivateDpEvent()
    if isinstance(event, Selection):
        raise TypeError("a selection has a curve, and no loss distribution")
    if isinstance(event, ExampleGaussian):
        drawn = np.arange(event.examples_per_user + 1)
        shares = binom.pmf(drawn, event.examples_per_user, event.sampling_prob)
        # DP: one user moves the sum by as many bounds as examples of theirs are drawn, up to all of them.
        return MixtureOfGaussiansDpEvent(event.noise_multiplier, [float(i) for i in drawn], list(shares / shares.sum()))
    if isinstance(event, Gaussian) or event.sampling_prob == 1:
        return GaussianDpEvent(event.noise_multiplier)
    return PoissonSampledDpEvent(event.sampling_prob, GaussianDpEvent(event.noise_multiplier))


@functools.lru_cache(maxsize=4096)
def rdp_cost(event: Event) -> np.ndarray:
    """The Rényi divergences of one event at dp-accounting's orders, rounded up."""
    if isinstance(event, FailureProbability):
        return np.zeros(len(RDP_ORDERS))
    if isinstance(event, Selection):
        return selected_divergence(event, RDP_ORDERS, rdp_cost(one_round(event)))
    if isinstance(event, ExampleGaussian):
        # DP: no divergence of this mixture is known here; pld has the bound.
        return np.full(len(RDP_ORDERS), math.inf)
    with _quiet_library():
        cost = RdpAccountant().compose(library_event(event)).rdp
    # DP: rounding up keeps a tiny divergence from being read as none (epsilon 0 where the truth is not).
    return np.where(np.isnan(cost), math.inf, np.maximum(cost, 0.0) + RDP_ROUNDING)


def rdp_epsilon(cost: np.ndarray, delta: float) -> float:
    """The epsilon at delta of a sum of divergences, minimised over the orders.

    dp-accounting's conversion is a loop over 156 orders, which takes 0.4 ms; training asks for this number after every
    round. The conversion is therefore computed at the orders that can be the best one.
    """
    best_M = _best_orders(np.asarray(cost), delta)
    # DP: the bound holds at every order, so a wrong choice of orders can only make epsilon larger.
    return float(compute_epsilon(RDP_ORDERS[best_M], cost[best_M], delta)[0])  # pyright: ignore[reportArgumentType]


def _best_orders(cost: np.ndarray, delta: float) -> np.ndarray:
    """A mask of the orders whose epsilon is the smallest, up to rounding; all orders where that cannot be said."""
    with np.errstate(divide="ignore", invalid="ignore"):
        epsilon_M = cost + np.log1p(-1 / RDP_ORDERS) - np.log(delta * RDP_ORDERS) / (RDP_ORDERS - 1)
        least = np.nanmin(epsilon_M) if np.isfinite(epsilon_M).any() else math.inf
        # Below delta^2 dp-accounting bounds a divergence in another way, which gives an epsilon of 0.
        best_M = (epsilon_M <= least + 1e-9 * (1 + abs(least))) | (cost <= 2 * delta**2)
    return best_M if best_M.any() else np.full(RDP_ORDERS.shape, True)


FILTER_ORDERS = (1.2, 1.5, 2.0, 3.0, 4.5, 7.0, 11.0, 18.0, 30.0, 50.0)
"""The orders of filters and odometers: fixed here, so that nothing that was seen can have a part in their choice."""


ROUGH_ORDERS = (1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0)
"""The orders of `rough_epsilon`."""


def at_orders(cost: np.ndarray, orders: Sequence[float]) -> np.ndarray:
    """The divergences at some of the orders; raises `InvalidValue` for an order that is none of dp-accounting's."""
    where = [np.flatnonzero(np.isclose(RDP_ORDERS, order, rtol=1e-9)) for order in orders]
    require(
        all(len(index) == 1 for index in where), f"orders must be among those of dp-accounting, not {list(orders)}."
    )
    return np.broadcast_to(cost, RDP_ORDERS.shape)[np.concatenate(where)]


def filter_epsilon(cost: np.ndarray, delta: float, orders: Sequence[float]) -> float:
    """The epsilon at delta of a sum of divergences of events that were chosen on the way, by filters at fixed orders."""
    # DP: each order has its share of delta; without that, the choice of the best order would be for free.
    return float(compute_epsilon(orders, at_orders(cost, orders), delta / len(orders))[0])  # pyright: ignore[reportArgumentType]


def epsilon_at_order(order: float, divergence: float, delta: float) -> float:
    """The epsilon at delta of a divergence at one order (Canonne, Kamath and Steinke 2020)."""
    return float(compute_epsilon([order], [divergence], delta)[0]) if math.isfinite(divergence) else math.inf


def rough_epsilon(counts: Counts, delta: float) -> float:
    """An epsilon that holds at delta, from few orders: some percent above `rdp_epsilon`, in a twentieth of its time."""
    accountant = RdpAccountant(orders=ROUGH_ORDERS)
    with _quiet_library():
        for event, count in counts:
            accountant.compose(library_event(event), count)
    return float(accountant.get_epsilon(delta))


def rdp_delta(cost: np.ndarray, epsilon: float) -> float:
    """The delta at epsilon of a sum of divergences, minimised over the orders."""
    return float(compute_delta(RDP_ORDERS, cost, epsilon)[0])  # pyright: ignore[reportArgumentType]


RDP_COST = AdditiveCost(cost=rdp_cost, epsilon=rdp_epsilon, delta=rdp_delta)


def one_round(event: Selection) -> PoissonGaussian:
    """One round of one of the runs that a selection chooses from."""
    return PoissonGaussian(sampling_prob=event.sampling_prob, noise_multiplier=event.noise_multiplier)


def selected_divergence(event: Selection, orders: np.ndarray, divergence_of_round: np.ndarray) -> np.ndarray:
    """The divergence of the best of a random number of runs (Papernot and Steinke 2022, Theorems 2 and 6).

    Args:
        event: The selection: how many rounds a run has, and how the number of runs was drawn.
        orders: The orders of the divergences.
        divergence_of_round: The divergences of one round, rounded up. dp-accounting's own path to this bound takes them
            as they come, and reads -1e-16 or 1e-17 as "no privacy loss" or as an error.
    """
    # DP: all rounds of a run are repeated together: each trial is a whole run, and its whole curve goes into the bound.
    divergence_of_run = event.rounds * divergence_of_round
    if not np.isfinite(divergence_of_run).any():
        return np.full(len(orders), math.inf)
    with _quiet_library():
        return np.asarray(
            _compute_rdp_repeat_and_select(orders, divergence_of_run, event.mean_trials, SHAPES[event.drawn_from])  # pyright: ignore[reportArgumentType]
        )


@contextlib.contextmanager
def _quiet_library() -> Iterator[None]:
    """Silence dp-accounting's warnings about orders that it leaves out, which is safe and which no user can act on."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


MOMENTS = np.arange(1, 33)


@functools.lru_cache(maxsize=4096)
def moments_cost(event: Event) -> np.ndarray:
    """alpha(lambda) for lambda = 1..32: the log moments of the privacy loss of one event."""
    if isinstance(event, FailureProbability):
        return np.zeros(len(MOMENTS))
    if isinstance(event, NonPrivate | ExampleGaussian) or event.noise_multiplier < NO_NOISE:
        return np.full(len(MOMENTS), math.inf)  # DP: no noise costs everything, in every accountant.
    if isinstance(event, Selection):
        divergence = moments_cost(one_round(event)) / MOMENTS
        return MOMENTS * selected_divergence(event, MOMENTS + 1.0, divergence + 1e-13 * (MOMENTS + 1) / MOMENTS)
    q = event.sampling_prob if isinstance(event, PoissonGaussian) else 1.0
    return np.array([_log_moment(q, event.noise_multiplier, int(order)) for order in MOMENTS])


def moments_epsilon(cost: np.ndarray, delta: float) -> float:
    """The smallest epsilon that the tail bound gives at delta."""
    return float(np.min((cost + math.log(1 / delta)) / MOMENTS))


def moments_delta(cost: np.ndarray, epsilon: float) -> float:
    """The smallest delta that the tail bound gives at epsilon."""
    return math.exp(min(0.0, float(np.min(cost - MOMENTS * epsilon))))


MOMENTS_COST = AdditiveCost(cost=moments_cost, epsilon=moments_epsilon, delta=moments_delta)


def _log_moment(q: float, z: float, moment: int) -> float:
    """log E[(nu / mu)^(moment + 1)] for mu = N(0, z^2), nu = (1 - q) mu + q N(1, z^2), taken under mu.

    With n = moment + 1 it is log sum_k Binomial(n, q)(k) exp(k (k - 1) / 2 z^2). The probabilities sum to 1 and the
    first two exponents are 0, so it is log1p of a sum of positive terms from k = 2: in log space it neither overflows
    (small z) nor drowns in the 1 (small q).
    """
    n = moment + 1
    if q == 1:
        return n * (n - 1) / (2 * z**2)
    k = np.arange(2, n + 1)
    exponent = k * (k - 1) / (2 * z**2)
    log_expm1 = exponent + np.log(-np.expm1(-exponent))
    log_binomial = gammaln(n + 1) - gammaln(k + 1) - gammaln(n - k + 1) + k * math.log(q) + (n - k) * math.log1p(-q)
    return float(np.logaddexp(0.0, cast(Any, logsumexp(log_binomial + log_expm1))))
