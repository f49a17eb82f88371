"""The moments accountant, as the paper used it.

The cost of an event is a vector of log moments of its privacy loss, at the integer moments 1 to 32. Costs add up over
rounds (composition), and a tail bound turns their sum into epsilon at delta:

    alpha(lambda) = log E[exp(lambda * loss)]           delta = min over lambda of exp(alpha(lambda) - lambda * epsilon)

With these 32 moments the accountant gives every epsilon that the paper prints (Table 1); `rdp` and `pld` are tighter.
Paper: Theorem 1. Literature: Abadi et al., "Deep Learning with Differential Privacy" (CCS 2016), Theorems 1 and 2 and
Lemma 3; the code that accompanied that article computes the same moments. A log moment is lambda times the Rényi
divergence of order lambda + 1 (Mironov 2017), which is how `Selection` events are bounded here.
"""

import functools
import math

import numpy as np
from scipy.special import gammaln, logsumexp

from unheard.privacy.events import Event, ExampleGaussian, FailureProbability, NonPrivate, PoissonGaussian, Selection
from unheard.privacy.rdp import NO_NOISE, AdditiveCost, one_round, selected_divergence

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
    return float(np.logaddexp(0.0, logsumexp(log_binomial + log_expm1)))
