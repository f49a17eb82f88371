"""Compute what the best attacker can achieve: mu of Gaussian differential privacy, and true-positive rates.

Input: events and the delta of the claim. Output: figures that a report prints next to epsilon, to say what the
guarantee means for one user. All of them are upper bounds on what the best attacker can do. They follow from the
privacy profile delta(epsilon) of the accountants, which bounds the mechanism at every epsilon at once.

    figures(events, delta)        `Figures` of everything that was charged
    figures_of_pair(0.5, 1e-6)    `Figures` of a run that claims a single pair (epsilon, delta) only
    privacy_profile(events, 1e-6) points of delta(epsilon), from epsilon 0 to the epsilon at this delta

**True-positive rate.** An attacker decides from the released models whether a user took part. Under (epsilon, delta)
a test with false-positive rate a has a true-positive rate of at most min(e^epsilon a + delta, 1 - e^-epsilon
(1 - delta - a)) (Kairouz, Oh and Viswanath 2017, Theorem 2.1). This holds at every point of the profile, so the smallest
of these bounds is valid. The search over epsilon may miss the best point; the result is still a valid bound.

**mu.** The smallest mu with delta(epsilon) <= max(delta_mu(epsilon), delta) for all epsilon >= 0, where delta_mu is the
profile of a Gaussian release with sensitivity mu and standard deviation 1 (Dong, Roth and Su 2022, Corollary 2.13). The
profiles are compared only down to the delta of the claim, because the far tail of sampled rounds is heavier than that
of any useful mu, and failure probabilities have no mu. Between two computed points the true profile lies below the
straight line through them, since it is convex in e^epsilon. The comparison uses that line, so mu holds between the
points too.

Why a report should give mu: Gomez et al., "(epsilon, delta) Considered Harmful: Best Practices for Reporting
Differential Privacy Guarantees" (2025). Why it should give true-positive rates at small false-positive rates: Carlini
et al., "Membership Inference Attacks From First Principles" (2022).

>>> from unheard.privacy.events import Gaussian
>>> one = figures([Gaussian(noise_multiplier=1.0)], delta=1e-6)
>>> round(one.mu, 2), round(one.true_positive_rates[0.01], 3)
(1.0, 0.092)
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import optimize
from scipy.special import log_ndtr, ndtr, ndtri

from unheard.privacy.accountants import CLAIMED, Events, best_epsilon, collapse, delta_at
from unheard.privacy.events import FailureProbability

FALSE_POSITIVE_RATES = (0.001, 0.01)
POINTS = 48
"""The number of points of the profile that are computed, from epsilon 0 to the claimed epsilon."""
LARGEST_MU = 1e3


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Upper bounds on what the best attacker can achieve.

    Attributes:
        mu: The mu of Gaussian differential privacy, valid for deltas of at least `delta`. Infinity if there is no
            guarantee; NaN if only one pair (epsilon, delta) is claimed, because no mu follows from one pair.
        delta: The delta of the claim.
        true_positive_rates: An upper bound on the true-positive rate, by false-positive rate.
        method: How the figures were computed, in one sentence.
    """

    mu: float
    delta: float
    true_positive_rates: Mapping[float, float]
    method: str

    @property
    def record(self) -> dict[str, Any]:
        """Mu (None if it is NaN) and the rates as plain JSON values."""
        rates = self.true_positive_rates.items()
        return {
            "mu": None if math.isnan(self.mu) else "infinity" if math.isinf(self.mu) else self.mu,
            "true_positive_rates": [{"false_positive_rate": rate, "at_most": bound} for rate, bound in rates],
        }


def figures(events: Events, delta: float) -> Figures:
    """Compute mu and true-positive rates from the privacy profile of all events.

    Args:
        events: Everything that was charged.
        delta: The delta of the claim.

    Returns:
        Upper bounds. Without a guarantee mu is infinite and every rate is 1.
    """
    counted = list(events)
    method = (
        "upper bounds from the privacy profile delta(epsilon) of the events of the claim, by the smaller of "
        f"{' and '.join(CLAIMED)} at {POINTS} values of epsilon"
    )
    epsilon_E, delta_E = privacy_profile(counted, delta)
    if not len(epsilon_E):
        return Figures(
            mu=math.inf, delta=delta, true_positive_rates=dict.fromkeys(FALSE_POSITIVE_RATES, 1.0), method=method
        )
    profile = _profile(counted)
    rates = {rate: _true_positive_rate(rate, epsilon_E, delta_E, profile) for rate in FALSE_POSITIVE_RATES}
    return Figures(mu=_mu(epsilon_E, delta_E, delta), delta=delta, true_positive_rates=rates, method=method)


def privacy_profile(events: Events, delta: float, points: int = POINTS) -> tuple[np.ndarray, np.ndarray]:
    """Compute points of the privacy profile delta(epsilon).

    Args:
        events: Everything that was charged.
        delta: The delta at which the profile ends: the last epsilon is the epsilon at this delta.
        points: The number of points.

    Returns:
        The epsilons, from 0 upwards, and an upper bound on delta at each. Both are empty if there is no guarantee.
    """
    counted = list(events)
    largest = best_epsilon(counted, delta).epsilon
    if math.isinf(largest):
        return np.zeros(0), np.zeros(0)
    profile = _profile(counted)
    # More points at small epsilons, where delta changes most.
    epsilon_E = largest * np.linspace(0.0, 1.0, points) ** 1.5
    return epsilon_E, np.array([profile(float(epsilon)) for epsilon in epsilon_E])


def _profile(events: Events) -> Callable[[float], float]:
    """Return a function that computes delta at an epsilon: the smallest by the accountants of `CLAIMED`."""
    counts, failure = collapse(events)
    # DP: failure probabilities are part of every delta; without them an attacker would seem weaker than it is.
    again = [*counts, (FailureProbability(delta=min(1.0, failure)), 1)]
    return lambda epsilon: min(delta_at(again, epsilon, accountant) for accountant in CLAIMED)


def figures_of_pair(epsilon: float, delta: float) -> Figures:
    """Compute the true-positive rates that follow from a single pair (epsilon, delta). No mu follows from a pair."""
    rates = {rate: float(_rate_at(rate, epsilon, delta)) for rate in FALSE_POSITIVE_RATES}
    return Figures(
        mu=math.inf if math.isinf(epsilon) else math.nan,
        delta=delta,
        true_positive_rates=rates,
        method="upper bounds from the claimed pair (epsilon, delta) alone, from which no mu follows",
    )


def gaussian_delta(epsilon_E: np.ndarray, mu: float) -> np.ndarray:
    """Compute the delta, at each epsilon, of a Gaussian release with sensitivity mu and standard deviation 1."""
    if mu == 0:  # a release that does not depend on the user
        return np.zeros_like(epsilon_E)
    tail_E = np.exp(np.minimum(epsilon_E + log_ndtr(-epsilon_E / mu - mu / 2), 0.0))
    return np.maximum(ndtr(-epsilon_E / mu + mu / 2) - tail_E, 0.0)


def _rate_at(rate: float, epsilon: float | np.ndarray, delta: float | np.ndarray) -> np.ndarray:
    """Compute the largest true-positive rate at a false-positive rate that each pair (epsilon, delta) allows."""
    above = np.exp(np.minimum(epsilon, 700.0)) * rate + delta
    below = 1.0 - np.exp(-np.asarray(epsilon, dtype=float)) * (1.0 - delta - rate)
    return np.minimum(1.0, np.minimum(above, below))


def _true_positive_rate(
    rate: float, epsilon_E: np.ndarray, delta_E: np.ndarray, profile: Callable[[float], float]
) -> float:
    """Bound the true-positive rate at one false-positive rate: the smallest bound over the points of the profile.

    Args:
        rate: The false-positive rate.
        epsilon_E: The epsilons of the computed points.
        delta_E: The delta at each of them.
        profile: Computes delta at any other epsilon, for a search near the best point.
    """
    rate_E = _rate_at(rate, epsilon_E, delta_E)
    best = int(rate_E.argmin())
    low, high = float(epsilon_E[max(best - 1, 0)]), float(epsilon_E[min(best + 1, POINTS - 1)])
    if low == high:
        return float(rate_E[best])
    # Every evaluated point is a valid bound, whether or not the search has converged.
    nearby = optimize.minimize_scalar(
        lambda epsilon: float(_rate_at(rate, epsilon, profile(epsilon))),
        bounds=(low, high),
        method="bounded",
        options={"maxiter": 20},
    )
    return min(float(rate_E[best]), float(nearby.fun))


def _mu(epsilon_E: np.ndarray, delta_E: np.ndarray, delta: float) -> float:
    """Return the smallest mu whose Gaussian profile is an upper bound of the computed profile, where it is above `delta`.

    The computed profile is linear in e^epsilon between its points. Values below `delta` are raised to `delta`.

    Args:
        epsilon_E: Increasing epsilons.
        delta_E: The delta at each epsilon.
        delta: The delta of the statement.
    """
    above_E = np.maximum(delta_E, delta)
    if above_E[0] <= delta:
        return 0.0
    x_E = np.exp(epsilon_E)
    slope_I = np.diff(above_E) / np.maximum(np.diff(x_E), 1e-300)

    def is_covered(mu: float) -> bool:
        """Whether the profile of mu lies on or above the lines through the computed points."""
        # The profile of mu is convex in x = e^epsilon, with derivative -ndtr(-epsilon / mu - mu / 2). Its distance from a
        # line is smallest where the two slopes are equal, or at an end of the interval.
        touch_I = -mu * (ndtri(np.clip(-slope_I, 1e-300, 0.5)) + mu / 2)
        touch_I = np.clip(touch_I, epsilon_E[:-1], epsilon_E[1:])
        line_I = above_E[:-1] + slope_I * (np.exp(touch_I) - x_E[:-1])
        is_above_I = gaussian_delta(touch_I, mu) >= line_I * (1 - 1e-9)
        return bool(is_above_I.all() and (gaussian_delta(epsilon_E[:-1], mu) >= above_E[:-1] * (1 - 1e-9)).all())

    if not is_covered(LARGEST_MU):
        return math.inf
    low, high = 0.0, LARGEST_MU
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if is_covered(middle) else (middle, high)
    return high
