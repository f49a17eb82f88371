"""Computes lower bounds on epsilon from guesses about which canary users took part in a run, or from their scores.

Each of m canary users is included or excluded by a fair coin. An auditor sees the released outputs and guesses, for
some or all canaries, whether they were included. Two theorems bound the number of correct guesses:

- **Distribution-free.** Against an (epsilon, delta)-private mechanism the number of correct guesses is stochastically
  dominated by a sum of independent coins that are correct with probability e^epsilon / (1 + e^epsilon), up to a term in
  delta (Steinke, Nasr and Jagielski 2023, Theorem 5.2). If more guesses are correct, this epsilon is ruled out.
- **f-DP.** Against a mechanism with a given trade-off curve, the probabilities p_j of j correct guesses of c satisfy
  sum_{j in T} j p_j / m <= F(sum_{j in T} (c - j + 1) p_{j-1} / m) for every set T, where F is the largest true-positive
  rate at a false-positive rate (Mahloujifar, Melis and Chaudhuri 2024). This bound uses the whole curve instead of one
  point (epsilon, delta), so it is higher. It is a bound on epsilon within a family of curves: those of the run's events
  with their noise divided by one unknown factor.

A third bound does not use guesses:

- **Parametric.** It uses the scores themselves, and assumes Gaussian noise of known size. The model is described below.

    lower_bound(canaries, guesses, correct, delta)   the largest epsilon that is ruled out
    best_guesses(score_M, included_M, delta)         the same from scores, over a fixed set of guessing rules
    f_dp_bound(score_M, included_M, events, delta)   the bound by f-DP, over the same rules
    parametric_bound(score_M, included_M, signals, delta)    the parametric bound, or why there is none

    >>> lower_bound(canaries=1000, guesses=1000, correct=500, delta=0.0)
    0.0
    >>> round(lower_bound(canaries=1000, guesses=1000, correct=900, delta=0.0), 2)
    2.02

**The parametric model.** A guess uses only whether a score is large. The size of a score has more information, if the
distribution of scores is known. The model assumes that in each round the component of the released average along the
direction of a canary is

    x ~ N(0, 1)                                       for an excluded canary,
    x ~ (1 - q) N(0, 1) + q N(s t, 1)                 for an included canary,

in units of the standard deviation of the noise. t is the signal that the plan implies (1/z, if the canary has the full
norm). s is an unknown factor, the same for all canaries and rounds. The score of a canary is the sum over rounds of
log(1 - q + q exp(x t - t^2 / 2)). The mean and variance of a score for each s are computed by numerical integration.
The mean score of the included canaries is approximately normal and increases with s, so a value of s is ruled out if
the observed mean is too large for it. The bound on epsilon is the epsilon of the run's rounds with noise multiplier
1 / (s t), for the largest s that is ruled out.

The bound is valid for the following reason. Canaries share no coordinate, so under the model the n included scores are
independent, with mean m(s) and variance v(s). At the true s, (observed mean - m(s)) / sqrt(v(s) / n) is approximately
standard normal, and above its 95 % quantile in one of 20 audits. Only in these audits is the bound above the true
epsilon, because m and epsilon both increase with s. The test is one-sided, so its whole error of 5 % is of this kind.
Excluded canaries have no information about s. The mean score uses 83 to 100 % of the Fisher information about s
(benchmarks/audit_bounds.py), so by the Cramér-Rao inequality no other estimate from these canaries reduces the distance
to the true s by more than a tenth.

The assumptions are tested on the data as far as possible: the mean and variance of the excluded scores must be those of
pure noise, and the variance of the included scores must be that of the fitted s. Otherwise there is no bound.

References: Steinke, Nasr, Jagielski, "Privacy Auditing with One (1) Training Run", NeurIPS 2023,
https://arxiv.org/abs/2305.08846. Mahloujifar, Melis, Chaudhuri, "Auditing f-Differential Privacy in One Run", 2024,
https://arxiv.org/abs/2410.22235. Andrew et al., "One-shot Empirical Privacy Estimation for Federated Learning", ICLR
2024, https://arxiv.org/abs/2302.03098, also fit a Gaussian to the scores, and give an estimate without confidence.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np
from scipy import stats

from unheard.privacy.accountants import best_epsilon
from unheard.privacy.events import Event, Gaussian, NonPrivate, PoissonGaussian
from unheard.privacy.trade_off import gaussian_delta, privacy_profile

CONFIDENCE = 0.95
"""The default probability that a lower bound is not above the true epsilon."""
FRACTIONS = (0.45, 0.25, 0.1, 0.05, 0.02)
"""The guessing rules, as fractions of all canaries.

A rule guesses "included" for this fraction of the canaries, those with the highest scores. A second rule also guesses
"excluded" for as many canaries with the lowest scores. One further rule guesses every canary by the sign of its score.
The rules are fixed before the scores are known. The confidence is divided among all rules (Bonferroni), so that the
best rule may be chosen afterwards.
"""

LARGEST_EPSILON = 100.0
"""The largest epsilon that the search for a bound tries. No audit of a feasible size can rule out a larger one."""

LARGEST_FACTOR = 2.0**7
"""The factors by which the noise is divided in the family of curves are from 1 / LARGEST_FACTOR to LARGEST_FACTOR."""
PROFILE_DELTA = 1e-9
"""The smallest delta of the privacy profile from which an `AttackCurve` is computed."""
PROFILE_POINTS = 32
"""The number of points of that privacy profile."""
CELLS = 4096
"""The number of intervals of the true-positive rate in an `AttackCurve`."""


@dataclass(frozen=True, kw_only=True)
class Guesses:
    """The outcome of one guessing rule.

    Attributes:
        count: The number of canaries about which the rule made a guess.
        correct: The number of correct guesses.
        epsilon: The lower bound on epsilon that these guesses give.
    """

    count: int
    correct: int
    epsilon: float


def p_value(canaries: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """Return an upper bound on the probability of `correct` or more correct guesses under (epsilon, delta)-privacy.

    Args:
        canaries: The number m of canaries, each included with probability 1/2.
        guesses: The number of canaries about which a guess was made; the auditor may make no guess about others.
        correct: The number of correct guesses.
        epsilon: The epsilon of the hypothesis.
        delta: The delta of the hypothesis.

    Returns:
        An upper bound on the probability, at most 1.
    """
    probability = 1 / (1 + math.exp(-epsilon))
    tail = float(stats.binom.sf(correct - 1, guesses, probability))
    if delta == 0 or correct == 0:
        return min(tail, 1.0)
    # below[i - 1] = P[correct - i <= coins < correct]: the probability that i more correct guesses would be enough.
    below = np.cumsum(stats.binom.pmf(np.arange(correct - 1, -1, -1), guesses, probability))
    return min(tail + 2 * canaries * delta * float((below / np.arange(1, correct + 1)).max()), 1.0)


def lower_bound(canaries: int, guesses: int, correct: int, delta: float, confidence: float = CONFIDENCE) -> float:
    """Return the largest epsilon that the number of correct guesses rules out.

    An epsilon is ruled out if `correct` or more correct guesses have a probability below 1 - confidence under it.

    Args:
        canaries: The number of canaries, each included with probability 1/2.
        guesses: The number of canaries about which a guess was made.
        correct: The number of correct guesses.
        delta: The delta at which epsilon is bounded.
        confidence: The probability that the bound is not above the true epsilon.

    Returns:
        The bound; 0 if the guesses rule out no epsilon.
    """

    def is_ruled_out(epsilon: float) -> bool:
        """Whether the number of correct guesses rules out (epsilon, delta)."""
        return p_value(canaries, guesses, correct, epsilon, delta) < 1 - confidence

    if not guesses or p_value(canaries, guesses, correct, 0.0, delta) > 1 - confidence:
        return 0.0
    low, high = 0.0, 1.0
    while is_ruled_out(high):
        low, high = high, 2 * high
        if high > LARGEST_EPSILON:
            return low
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if is_ruled_out(middle) else (low, middle)
    return low


def best_guesses(score_M: np.ndarray, included_M: np.ndarray, delta: float, confidence: float = CONFIDENCE) -> Guesses:
    """Apply every guessing rule to the scores, and return the outcome with the highest bound.

    Args:
        score_M: One score for each canary, higher where its inclusion is more likely; 0 is neutral.
        included_M: Which canaries were included.
        delta: The delta at which epsilon is bounded.
        confidence: The confidence of the returned bound, over all rules together.

    Returns:
        The outcome of the best rule. Its bound holds with `confidence` although the rule was chosen by its outcome.
    """
    outcomes = _outcomes(score_M, included_M)
    each = 1 - (1 - confidence) / len(outcomes)
    bounds = [
        Guesses(count=count, correct=correct, epsilon=lower_bound(len(score_M), count, correct, delta, each))
        for count, correct in outcomes
    ]
    return max(bounds, key=lambda guesses: guesses.epsilon)


def f_dp_bound(
    score_M: np.ndarray,
    included_M: np.ndarray,
    events: Iterable[Event],
    delta: float,
    confidence: float = CONFIDENCE,
) -> float:
    """Return a lower bound on epsilon by f-DP, within the family of the run's events with scaled noise.

    Args:
        score_M: One score for each canary, higher where its inclusion is more likely; 0 is neutral.
        included_M: Which canaries were included.
        events: The events of the run. A release without noise is treated as one Gaussian release.
        delta: The delta at which epsilon is stated.
        confidence: The confidence of the returned bound, over all rules together.

    Returns:
        The epsilon of the least noise that is ruled out; 0 if no noise is ruled out.
    """
    outcomes, counted = _outcomes(score_M, included_M), Counter(events)
    each = (1 - confidence) / len(outcomes)

    def is_ruled_out(factor: float) -> bool:
        """Whether the guesses are correct too often for the run's noise divided by `factor`."""
        curve = AttackCurve.of_events(scaled_noise(counted, factor))
        return any(curve.rules_out(len(score_M), count, correct, each) for count, correct in outcomes)

    factor = 1.0
    if is_ruled_out(factor):
        while factor < LARGEST_FACTOR and is_ruled_out(2 * factor):
            factor *= 2
        low = factor
    else:
        while factor > 1 / LARGEST_FACTOR and not is_ruled_out(factor / 2):
            factor /= 2
        low = factor / 2
        if low < 1 / LARGEST_FACTOR:
            return 0.0
    high = 2 * low
    for _ in range(7):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if is_ruled_out(middle) else (low, middle)
    return best_epsilon(scaled_noise(counted, low), delta).epsilon


def refutes(score_M: np.ndarray, included_M: np.ndarray, events: Iterable[Event], level: float) -> bool:
    """Whether the number of correct guesses has a probability below `level` under the trade-off curve of the events.

    This test needs no family of curves, because it tests the claim that the mechanism is at least as private as this
    one curve. Returns False if an event has no noise, since such a run claims nothing.

    Args:
        score_M: The score of each canary; a high score is evidence that it was included.
        included_M: Which canaries were included.
        events: The events of the audited rounds, as charged.
        level: The probability below which the claim is refuted.
    """
    counted = Counter(events)
    if any(isinstance(event, NonPrivate) for event in counted):
        return False
    outcomes, curve = _outcomes(score_M, included_M), AttackCurve.of_events(scaled_noise(counted, 1.0))
    return any(curve.rules_out(len(score_M), count, correct, level / len(outcomes)) for count, correct in outcomes)


def scaled_noise(events: Counter[Event], factor: float) -> list[tuple[PoissonGaussian | Gaussian, int]]:
    """Return the events with the noise multiplier of each divided by a factor.

    Args:
        events: The events of the run and how often each occurs. If one of them has no noise, the result is one Gaussian
            event with noise multiplier 1 / factor.
        factor: The factor. A factor above 1 means less noise.
    """
    if any(isinstance(event, NonPrivate) for event in events):
        return [(Gaussian(noise_multiplier=1 / factor), 1)]
    return [
        (replace(event, noise_multiplier=event.noise_multiplier / factor), count)
        for event, count in events.items()
        if isinstance(event, PoissonGaussian | Gaussian)
    ]


@dataclass(frozen=True, kw_only=True)
class AttackCurve:
    """An upper bound on the true-positive rate of any attacker at each false-positive rate, made of lines.

    A point (epsilon, delta) bounds the true-positive rate y at the false-positive rate x by y <= e^epsilon x + delta
    and by 1 - y >= e^-epsilon (1 - delta - x). Solved for x, each inequality says that x is at least a linear function
    of y. For each of `CELLS` intervals of y one line is kept, the largest in its middle.

    Attributes:
        start_C: The value at y = 0 of the line of each interval.
        slope_C: The slope of the line of each interval.
    """

    start_C: list[float]
    slope_C: list[float]

    @classmethod
    def of_events(cls, events: list[tuple[PoissonGaussian | Gaussian, int]]) -> "AttackCurve":
        """Return the curve of counted events.

        If every user takes part in every round, it follows from the exact curve of a Gaussian mechanism; otherwise from
        the privacy profile of the events.
        """
        if all(isinstance(event, Gaussian) or event.sampling_prob == 1 for event, _ in events):
            mu = math.sqrt(sum(count / event.noise_multiplier**2 for event, count in events))
            epsilon_E = np.linspace(0.0, mu * (mu / 2 + 6), 8 * PROFILE_POINTS)
            delta_E = gaussian_delta(epsilon_E, mu)
        else:
            epsilon_E, delta_E = privacy_profile(events, PROFILE_DELTA, PROFILE_POINTS)
        epsilon_E = np.minimum(epsilon_E, 700.0)
        growth_E = np.exp(epsilon_E)
        start_L = np.concatenate([[0.0], -delta_E / growth_E, 1 - delta_E - growth_E])
        slope_L = np.concatenate([[0.0], 1 / growth_E, growth_E])
        middle_C = (np.arange(CELLS) + 0.5) / CELLS
        # Every line is a valid lower bound on x, so one line may be used in the whole cell.
        best_C = (start_L[:, None] + slope_L[:, None] * middle_C).argmax(axis=0)
        return cls(start_C=start_L[best_C].tolist(), slope_C=slope_L[best_C].tolist())

    def false_positive_rate(self, rate: float) -> float:
        """Return a lower bound on the false-positive rate of a test with this true-positive rate."""
        cell = min(max(int(rate * CELLS), 0), CELLS - 1)
        return max(0.0, self.start_C[cell] + self.slope_C[cell] * rate)

    def rules_out(self, canaries: int, guesses: int, correct: int, probability: float) -> bool:
        """Whether `correct` or more correct guesses of `guesses` have less than this probability under the curve.

        The proof is by contradiction. Suppose that they have this probability or more. Define for each i the sums
        `right` = sum_{j >= i} j p_j / m and `wrong` = sum_{j >= i} (c - j) p_j / m. They have at least their initial
        values in the code for i = `correct`, and at least the values of the recursion for every smaller i, because
        `wrong` at i is at least the false-positive rate that belongs to `right` at i + 1. At i = 0 the two sums add up
        to c / m, so a larger sum is a contradiction.

        Args:
            canaries: m, the number of canaries.
            guesses: c, the number of guesses; the auditor makes no guess about the other canaries.
            correct: The number of correct guesses.
            probability: The probability to compare with.
        """
        if not guesses or not correct:
            return False
        right, wrong = probability * correct / canaries, probability * (guesses - correct) / canaries
        limit = guesses / canaries
        for i in range(correct - 1, -1, -1):
            more = max(wrong, self.false_positive_rate(right))
            right += i / (guesses - i) * (more - wrong)
            wrong = more
            if right + wrong > limit * (1 + 1e-9):
                return True
        return False


def _outcomes(score_M: np.ndarray, included_M: np.ndarray) -> list[tuple[int, int]]:
    """Return the number of guesses and the number of correct guesses of each guessing rule."""
    total, order_M = len(score_M), np.argsort(score_M, kind="stable")
    outcomes = [(total, int(((score_M > 0) == included_M).sum()))]
    sizes = sorted({max(int(total * fraction), 1) for fraction in FRACTIONS})
    rules = [(size, 0) for size in sizes] + [(size, size) for size in sizes if 2 * size <= total]
    for num_in, num_out in rules:  # how many canaries are guessed to be included, and how many excluded
        correct = int(included_M[order_M[total - num_in :]].sum() + (~included_M[order_M[:num_out]]).sum())
        outcomes.append((num_in + num_out, correct))
    return outcomes


NODES, WEIGHTS = np.polynomial.hermite_e.hermegauss(120)
WEIGHTS = WEIGHTS / WEIGHTS.sum()
"""`NODES` and `WEIGHTS` integrate functions of a standard normal variable (Gauss-Hermite quadrature)."""
LEAST_DRAWS = 50
"""The expected number of draws of included canaries, over all rounds, that the normal approximation needs."""
MISFIT = 5.0
"""The assumptions are rejected if a mean or variance differs by more than this many standard errors from its expected
value."""
MAX_KINDS = 24
"""The largest number of kinds of rounds that the accountant composes without merging them."""

Signals = Counter[tuple[float, float]]
"""The number of rounds with each pair of a sampling probability q and an expected signal t.

t is the signal that the plan implies, in units of the standard deviation of the noise.
"""


@dataclass(frozen=True, kw_only=True)
class ParametricBound:
    """The parametric bound, or the reason why there is none.

    Attributes:
        epsilon: The lower bound on epsilon; NaN if there is none.
        factor: The largest s that is ruled out: with the confidence of the bound, the true signal of a canary is larger
            than s times the signal that the plan implies. NaN if there is no bound.
        reason: Why there is no bound; empty if there is one.
    """

    epsilon: float
    factor: float
    reason: str = ""


def parametric_bound(
    score_M: np.ndarray, included_M: np.ndarray, signals: Signals, delta: float, confidence: float = CONFIDENCE
) -> ParametricBound:
    """Compute the parametric lower bound on epsilon, under the model in the docstring of this module.

    Args:
        score_M: The sum over rounds of the log likelihood ratio of each canary.
        included_M: Which canaries were included.
        signals: The sampling probability and the expected signal of each round.
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
    """Return the largest factor s that is ruled out, and an empty string; or NaN and the reason why there is none.

    Args:
        score_M: The sum over rounds of the log likelihood ratio of each canary.
        included_M: Which canaries were included.
        signals: The sampling probability and the expected signal of each round.
        confidence: The probability, under the model, that the returned factor is not above the true one.
    """
    included, excluded = score_M[included_M], score_M[~included_M]
    if not signals:
        return math.nan, "it needs independent noise in each round, and this run adds correlated noise or none"
    draws = len(included) * sum(q * count for (q, _), count in signals.items())
    if draws < LEAST_DRAWS or len(excluded) < 2:
        return math.nan, f"fewer than {LEAST_DRAWS} draws of canaries are expected, too few for a normal approximation"
    if _misfit(excluded, *score_moments(signals, 0.0)):
        return math.nan, "the scores of excluded canaries are not those of pure noise"
    observed = float(included.mean())
    fitted = _largest(lambda s: score_moments(signals, s)[0] < observed)
    if _misfit(included, *score_moments(signals, fitted)):
        return math.nan, "the variance of the scores of included canaries is not that of one common signal"
    quantile = float(stats.norm.ppf(confidence))
    return _largest(lambda s: _is_too_large(observed, len(included), signals, s, quantile)), ""


def _is_too_large(observed: float, count: int, signals: Signals, factor: float, quantile: float) -> bool:
    """Whether the observed mean score of `count` included canaries is too large for a factor.

    It is too large if it exceeds the mean under this factor by more than `quantile` standard errors.
    """
    mean, variance = score_moments(signals, factor)
    return observed - mean > quantile * math.sqrt(variance / count)


def score_moments(signals: Signals, factor: float) -> tuple[float, float]:
    """Return the mean and variance of the score of a canary whose signal is `factor` times the expected signal.

    Args:
        signals: The sampling probability and the expected signal of each round.
        factor: The factor; 0 for an excluded canary.
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
    """Return the mean and the mean square of the log likelihood ratio of one round, for x ~ N(centre, 1)."""
    exponent_N = (centre + NODES) * signal - signal**2 / 2
    score_N = exponent_N if q >= 1 else np.logaddexp(math.log1p(-q), math.log(q) + exponent_N)
    return float(WEIGHTS @ score_N), float(WEIGHTS @ score_N**2)


def _misfit(score: np.ndarray, mean: float, variance: float) -> bool:
    """Whether the mean or variance of the scores differs by more than `MISFIT` standard errors from that expected."""
    deviation = score - mean
    error_of_mean = math.sqrt(variance / len(score))
    error_of_variance = math.sqrt(max(float(np.var(deviation**2)), 2 * variance**2) / len(score))
    return (
        abs(float(deviation.mean())) > MISFIT * error_of_mean
        or abs(float((deviation**2).mean()) - variance) > MISFIT * error_of_variance
    )


def _largest(holds: Callable[[float], bool]) -> float:
    """Return the largest factor for which a condition holds, up to `LARGEST_FACTOR`; 0 if it never holds.

    Args:
        holds: The condition. If it fails for a factor, it must fail for all larger factors.
    """
    if not holds(0.0):
        return 0.0
    low, high = 0.0, LARGEST_FACTOR
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _epsilon(signals: Signals, factor: float, delta: float) -> float:
    """Return the epsilon of the rounds with noise multiplier 1 / (factor * signal)."""
    if factor == 0:
        return 0.0
    # With many kinds of rounds the accountant would merge them to an upper bound. With the smallest signal for all of
    # them, the result stays a lower bound.
    smallest = min(signal for _, signal in signals) if len(signals) > MAX_KINDS else math.inf
    events = [
        (PoissonGaussian(sampling_prob=q, noise_multiplier=1 / (factor * min(signal, smallest))), count)
        for (q, signal), count in signals.items()
    ]
    return best_epsilon(events, delta).epsilon
