"""One event in, its cost at each order out: costs that add up from round to round, and the epsilon of their sum.

In: an event. Out: a vector of log moments (the paper's moments accountant) or of Renyi divergences (RDP, by
dp-accounting). Rounds may differ: their vectors are added. Paper: Theorem 1; Abadi et al. 2016, Theorem 2.
"""

import contextlib
import functools
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from dp_accounting import GaussianDpEvent, NonPrivateDpEvent, NoOpDpEvent, PoissonSampledDpEvent
from dp_accounting.dp_event import DpEvent
from dp_accounting.rdp import RdpAccountant, compute_epsilon
from dp_accounting.rdp.rdp_privacy_accountant import (
    _compute_rdp_repeat_and_select,  # pyright: ignore[reportPrivateUsage]
    compute_delta,
)
from scipy.special import gammaln, logsumexp

from unheard.privacy.events import Event, FailureProbability, Gaussian, NonPrivate, PoissonGaussian, Selection

Counts = tuple[tuple[Event, int], ...]

# Below this z the cost overflows somewhere on the way. Epsilon would be above 10^11: infinity is a fair name for it.
NO_NOISE = 1e-6

# The paper's accountant looks at the integer moments 1..32 (the code of Abadi et al. that the paper used).
MOMENTS = np.arange(1, 33)
RDP_ORDERS = RdpAccountant().orders

# dp-accounting rounds: for small q and large z its divergences come out at -1e-16, which it reads as "epsilon is 0".
RDP_ROUNDING = 1e-13 * RDP_ORDERS / (RDP_ORDERS - 1)


# How the library names the distributions of the number of trials (Papernot and Steinke 2022, theorems 2 and 6).
SHAPES = {"geometric": 1.0, "poisson": math.inf}


@dataclass(frozen=True, kw_only=True)
class Curve:
    """An accountant whose costs add up: `cost` of an event, then `epsilon` or `delta` of a sum of costs."""

    cost: Callable[[Event], np.ndarray]
    epsilon: Callable[[np.ndarray, float], float]
    delta: Callable[[np.ndarray, float], float]

    def total(self, counts: Counts) -> np.ndarray:
        """The cost of all these rounds together; of none, nothing."""
        return sum((count * self.cost(event) for event, count in counts), np.zeros(1))


def library_event(event: Event) -> DpEvent:
    """The event in dp-accounting's words. A failure probability is no mechanism: it is taken from delta elsewhere. A selection is
    none either: its bound is worked out below, from the curve of one run."""
    if isinstance(event, NonPrivate):
        return NonPrivateDpEvent()
    if isinstance(event, FailureProbability):
        return NoOpDpEvent()
    if event.noise_multiplier < NO_NOISE:
        return NonPrivateDpEvent()
    if isinstance(event, Selection):
        raise TypeError("a selection has a curve, and no loss distribution")
    if isinstance(event, Gaussian) or event.sampling_prob == 1:
        return GaussianDpEvent(event.noise_multiplier)
    return PoissonSampledDpEvent(event.sampling_prob, GaussianDpEvent(event.noise_multiplier))


@functools.lru_cache(maxsize=4096)
def moments_cost(event: Event) -> np.ndarray:
    """alpha(lambda) for lambda = 1..32: the log moment of the privacy loss of one round."""
    if isinstance(event, FailureProbability):
        return np.zeros(len(MOMENTS))
    if isinstance(event, NonPrivate) or event.noise_multiplier < NO_NOISE:
        return np.full(len(MOMENTS), math.inf)  # DP: no noise costs everything, in every accountant.
    if isinstance(event, Selection):  # a log moment is lambda times the Renyi divergence of order lambda + 1
        one = moments_cost(_one_round(event)) / MOMENTS
        return MOMENTS * _selected(event, MOMENTS + 1.0, one + 1e-13 * (MOMENTS + 1) / MOMENTS)
    q = event.sampling_prob if isinstance(event, PoissonGaussian) else 1.0
    return np.array([_log_moment(q, event.noise_multiplier, int(order)) for order in MOMENTS])


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
    return float(np.logaddexp(0.0, logsumexp(log_binomial + log_expm1)))


def moments_epsilon(cost: np.ndarray, delta: float) -> float:
    return float(np.min((cost + math.log(1 / delta)) / MOMENTS))


def moments_delta(cost: np.ndarray, epsilon: float) -> float:
    return math.exp(min(0.0, float(np.min(cost - MOMENTS * epsilon))))


@functools.lru_cache(maxsize=4096)
def rdp_cost(event: Event) -> np.ndarray:
    """The Renyi divergences of one round at dp-accounting's orders, rounded up."""
    if isinstance(event, FailureProbability):
        return np.zeros(len(RDP_ORDERS))
    if isinstance(event, Selection):
        return _selected(event, RDP_ORDERS, rdp_cost(_one_round(event)))
    with _quiet_library():
        cost = RdpAccountant().compose(library_event(event)).rdp
    # DP: rounding up keeps a tiny divergence from being read as none (epsilon 0 where the truth is not).
    return np.where(np.isnan(cost), math.inf, np.maximum(cost, 0.0) + RDP_ROUNDING)


def _one_round(event: Selection) -> PoissonGaussian:
    return PoissonGaussian(sampling_prob=event.sampling_prob, noise_multiplier=event.noise_multiplier)


def _selected(event: Selection, orders: np.ndarray, of_a_round: np.ndarray) -> np.ndarray:
    """The best of a random number of runs (theorems 2 and 6), from the divergences of one round, rounded up: the library's own road
    to this bound takes them as they come, and one of -1e-16 or 1e-17 for "nothing can go wrong" or for an error."""
    # DP: all rounds of a run are repeated together: each trial is a whole run, and its whole curve goes into the bound.
    of_a_run = event.rounds * of_a_round
    if not np.isfinite(of_a_run).any():
        return np.full(len(orders), math.inf)
    with _quiet_library():
        return np.asarray(
            _compute_rdp_repeat_and_select(orders, of_a_run, event.mean_trials, SHAPES[event.drawn_from])  # pyright: ignore[reportArgumentType]
        )


def rdp_epsilon(cost: np.ndarray, delta: float) -> float:
    return float(compute_epsilon(RDP_ORDERS, cost, delta)[0])  # pyright: ignore[reportArgumentType]


def rdp_delta(cost: np.ndarray, epsilon: float) -> float:
    return float(compute_delta(RDP_ORDERS, cost, epsilon)[0])  # pyright: ignore[reportArgumentType]


CURVES = {
    "moments": Curve(cost=moments_cost, epsilon=moments_epsilon, delta=moments_delta),
    "rdp": Curve(cost=rdp_cost, epsilon=rdp_epsilon, delta=rdp_delta),
}


@contextlib.contextmanager
def _quiet_library() -> Iterator[None]:
    """dp-accounting warns on stderr about orders that it leaves out; that is safe, and nobody could act on it."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
