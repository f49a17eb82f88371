"""Computes a lower bound on epsilon from the scores of canary users, assuming Gaussian noise of known size.

A guess says only whether a score is large. Its size says more, if the distribution of the scores is known. Here it is
assumed that in each round the component of the released average along the direction of a canary is

    x ~ N(0, 1)                                       for an excluded canary,
    x ~ (1 - q) N(0, 1) + q N(s t, 1)                 for an included canary,

in units of the standard deviation of the noise, where t is the signal that the plan foresees (1/z, if the canary has the
full norm) and s is an unknown factor, the same for all canaries and rounds. The score of a canary is the sum over rounds
of log(1 - q + q exp(x t - t^2 / 2)). Its mean and variance for each s follow by numerical integration. The mean score of
the included canaries is approximately normal, and increases with s; the values of s for which the observed mean would be
too large are ruled out. The bound on epsilon is that of the run's rounds with noise multiplier 1 / (s t), for the largest
s that is ruled out.

The assumptions are tested on the data where they can be: mean and variance of the excluded scores must be those of pure
noise, and the variance of the included scores that of the fitted s. If they are not, no bound is given.

    bound = parametric_bound(score_M, included_M, signals, delta)
    bound.epsilon, bound.factor

Reference for the fitted Gaussian: Andrew et al., "One-shot Empirical Privacy Estimation for Federated Learning", ICLR
2024, https://arxiv.org/abs/2302.03098, which fits a Gaussian to the scores and states an estimate without confidence.
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy import stats

from unheard.audit.lower_bound import CONFIDENCE, LARGEST_FACTOR
from unheard.privacy.accountants import best_epsilon
from unheard.privacy.events import PoissonGaussian

NODES, WEIGHTS = np.polynomial.hermite_e.hermegauss(120)
WEIGHTS = WEIGHTS / WEIGHTS.sum()
LEAST_DRAWS = 50
"""The normal approximation needs so many draws of included canaries, summed over all rounds."""
MISFIT = 5.0
"""The assumptions are rejected if a mean or variance is so many standard errors from what they say."""
MAX_KINDS = 24

Signals = Counter[tuple[float, float]]
"""How many rounds had each pair of a sampling probability q and a foreseen signal t."""


@dataclass(frozen=True, kw_only=True)
class ParametricBound:
    """The bound of a fitted model, or the reason why there is none.

    Attributes:
        epsilon: The lower bound on epsilon; NaN if there is none.
        factor: The largest s that is ruled out: the signal is at least so many times what the plan foresees.
        reason: Why there is no bound; empty if there is one.
    """

    epsilon: float
    factor: float
    reason: str = ""


def parametric_bound(
    score_M: np.ndarray, included_M: np.ndarray, signals: Signals, delta: float, confidence: float = CONFIDENCE
) -> ParametricBound:
    """Bounds epsilon from below under the model of this module.

    Args:
        score_M: The sum over rounds of the log likelihood ratio of each canary.
        included_M: Which canaries were included.
        signals: The sampling probability and the foreseen signal of each round.
        delta: The delta at which epsilon is stated.
        confidence: The probability that the bound is not above the true epsilon, under the model.

    Returns:
        The bound, or the reason why there is none.
    """
    factor, reason = ruled_out_factor(score_M, included_M, signals, confidence)
    epsilon = math.nan if reason else _epsilon(signals, factor, delta)
    return ParametricBound(epsilon=epsilon, factor=factor, reason=reason)


def ruled_out_factor(
    score_M: np.ndarray, included_M: np.ndarray, signals: Signals, confidence: float = CONFIDENCE
) -> tuple[float, str]:
    """Returns the largest factor s that is ruled out, and an empty string; or NaN and the reason why there is none."""
    included, excluded = score_M[included_M], score_M[~included_M]
    if not signals:
        return math.nan, "the run adds no noise"
    draws = len(included) * sum(q * count for (q, _), count in signals.items())
    if draws < LEAST_DRAWS or len(excluded) < 2:
        return math.nan, f"fewer than {LEAST_DRAWS} draws of canaries are too few for a normal approximation"
    if _misfit(excluded, *score_moments(signals, 0.0)):
        return math.nan, "the scores of excluded canaries are not those of pure noise"
    observed = float(included.mean())
    fitted = _largest(lambda s: score_moments(signals, s)[0] < observed)
    if _misfit(included, *score_moments(signals, fitted)):
        return math.nan, "the scores of included canaries do not spread as those of one common signal"
    quantile = float(stats.norm.ppf(confidence))
    return _largest(lambda s: _is_too_large(observed, len(included), signals, s, quantile)), ""


def _is_too_large(observed: float, count: int, signals: Signals, factor: float, quantile: float) -> bool:
    """Whether a mean score of included canaries is more than `quantile` standard errors above that of a factor."""
    mean, variance = score_moments(signals, factor)
    return observed - mean > quantile * math.sqrt(variance / count)


def score_moments(signals: Signals, factor: float) -> tuple[float, float]:
    """Returns mean and variance of the score of a canary whose signal is `factor` times the foreseen one.

    Args:
        signals: The sampling probability and the foreseen signal of each round.
        factor: 0 for an excluded canary.
    """
    mean = variance = 0.0
    for (q, signal), count in signals.items():
        moments = [
            (weight, *_moments_at(q, signal, centre))
            for weight, centre in ((1 - q, 0.0), (q, factor * signal))
            if weight > 0
        ]
        first = sum(weight * mean_at for weight, mean_at, _ in moments)
        second = sum(weight * square_at for weight, _, square_at in moments)
        mean += count * first
        variance += count * max(second - first**2, 0.0)
    return mean, variance


def _moments_at(q: float, signal: float, centre: float) -> tuple[float, float]:
    """Returns mean and mean square of the log likelihood ratio of x ~ N(centre, 1)."""
    exponent_N = (centre + NODES) * signal - signal**2 / 2
    score_N = exponent_N if q >= 1 else np.logaddexp(math.log1p(-q), math.log(q) + exponent_N)
    return float(WEIGHTS @ score_N), float(WEIGHTS @ score_N**2)


def _misfit(score: np.ndarray, mean: float, variance: float) -> bool:
    """Whether mean or variance of the scores is far from what is expected."""
    deviation = score - mean
    error_of_mean = math.sqrt(variance / len(score))
    error_of_variance = math.sqrt(max(float(np.var(deviation**2)), 2 * variance**2) / len(score))
    return (
        abs(float(deviation.mean())) > MISFIT * error_of_mean
        or abs(float((deviation**2).mean()) - variance) > MISFIT * error_of_variance
    )


def _largest(holds: Callable[[float], bool]) -> float:
    """Returns the largest factor for which a condition holds that fails from some factor on; 0 if it never holds."""
    if not holds(0.0):
        return 0.0
    low, high = 0.0, LARGEST_FACTOR
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _epsilon(signals: Signals, factor: float, delta: float) -> float:
    """Returns the epsilon of the rounds with noise multiplier 1 / (factor x signal)."""
    if factor == 0:
        return 0.0
    # The accountant would merge many kinds of rounds upwards. The smallest signal keeps this a lower bound.
    smallest = min(signal for _, signal in signals) if len(signals) > MAX_KINDS else math.inf
    events = [
        (PoissonGaussian(sampling_prob=q, noise_multiplier=1 / (factor * min(signal, smallest))), count)
        for (q, signal), count in signals.items()
    ]
    return best_epsilon(events, delta).epsilon
