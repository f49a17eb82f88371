"""Measure how close the three lower bounds of the one-run audit come to a known epsilon, on simulated mechanisms.

Usage: python benchmarks/audit_bounds.py [repetitions]

For each claim (4 and 8) and each entry of `ROUNDS`, a mechanism with exactly this epsilon is simulated with 4,000
canary users. The columns of the table are:

    distribution-free, f-DP, parametric     mean of each bound (over the first 20, the first 3, and all simulations)
    median, 5 % quantile, lowest            of the parametric bounds, as shares of the claim
    above the claim                         how often the parametric bound exceeds the claim; at 95 % confidence it may
                                            in one of 20 simulations
    information                             share of the Fisher information about the factor s that the mean score uses

By the Cramér-Rao inequality, the standard error of any unbiased estimate of s from the same canaries is at least the
square root of that share times the error of the mean score's estimate.
"""

import math
import sys
from collections import Counter

import numpy as np
from scipy import stats
from scipy.optimize import brentq

from unheard.audit.lower_bound import best_guesses, f_dp_bound, parametric_bound, score_moments
from unheard.privacy.accountants import best_epsilon
from unheard.privacy.events import PoissonGaussian

CANARIES = 4000
DELTA = 1e-3 / CANARIES
ROUNDS = ((1.0, 1), (1.0, 20), (0.1, 100), (0.02, 1000))
"""Sampling probability and number of rounds of the simulated mechanisms."""


def scores(seed: int, q: float, z: float, rounds: int) -> tuple[np.ndarray, np.ndarray]:
    """Simulate a mechanism and return the score of each canary, and whether each canary was included.

    Args:
        seed: Seed of the simulation.
        q: Sampling probability.
        z: Noise multiplier.
        rounds: Number of rounds.
    """
    rng = np.random.default_rng(seed)
    included_M = rng.random(CANARIES) < 0.5
    score_M = np.zeros(CANARIES)
    for _ in range(rounds):
        is_drawn_M = included_M & (rng.random(CANARIES) < q)
        exponent_M = (rng.standard_normal(CANARIES) + is_drawn_M / z) / z - 0.5 / z**2
        score_M += exponent_M if q == 1 else np.logaddexp(math.log1p(-q), math.log(q) + exponent_M)
    return score_M, included_M


def information_share(q: float, z: float) -> float:
    """Return the Fisher information about s in the mean score of included canaries, as a share of all their outputs'."""
    signal, step = 1 / z, 1e-4
    x_N, width = np.linspace(-12.0, 12.0 + signal, 200_001, retstep=True)
    density_N = (1 - q) * stats.norm.pdf(x_N) + q * stats.norm.pdf(x_N - signal)
    slope_N = q * signal * (x_N - signal) * stats.norm.pdf(x_N - signal)  # derivative of the density by s, at s = 1
    rounds = Counter({(q, signal): 1})
    slope = (score_moments(rounds, 1 + step)[0] - score_moments(rounds, 1 - step)[0]) / (2 * step)
    return slope**2 / score_moments(rounds, 1.0)[1] / float((slope_N**2 / density_N).sum() * width)


def main(repetitions: int) -> None:
    """Print the table. Each row has `repetitions` simulations."""
    print(
        "| q | rounds | z | claim | distribution-free | f-DP | parametric | median | 5 % quantile | lowest | above the claim "
        "| information |"
    )
    print("| --- " * 12 + "|")
    for q, rounds in ROUNDS:
        for claim in (4.0, 8.0):

            def excess(z: float, q: float = q, rounds: int = rounds, claim: float = claim) -> float:
                """Return the epsilon at noise multiplier z minus the claim."""
                event = PoissonGaussian(sampling_prob=q, noise_multiplier=z)
                return best_epsilon([(event, rounds)], DELTA).epsilon - claim

            z = float(brentq(excess, 0.3, 30.0, xtol=1e-3))  # pyright: ignore[reportArgumentType]
            events = [PoissonGaussian(sampling_prob=q, noise_multiplier=z)] * rounds
            rows = []
            for seed in range(repetitions):
                score_M, included_M = scores(seed, q, z, rounds)
                parametric = parametric_bound(score_M, included_M, Counter({(q, 1 / z): rounds}), DELTA)
                by_f_dp = f_dp_bound(score_M, included_M, events, DELTA) if seed < 3 else math.nan
                by_guesses = best_guesses(score_M, included_M, DELTA).epsilon if seed < 20 else math.nan
                rows.append((by_guesses, by_f_dp, parametric.epsilon))
            free, by_f_dp, fitted = np.array(rows).T
            print(
                f"| {q:g} | {rounds} | {z:.3f} | {claim:g} "
                f"| {np.nanmean(free):.2f} | {np.nanmean(by_f_dp):.2f} | {fitted.mean():.2f} "
                f"| {100 * np.median(fitted) / claim:.0f} % | {100 * np.quantile(fitted, 0.05) / claim:.0f} % "
                f"| {100 * fitted.min() / claim:.0f} % | {int((fitted > claim).sum())} of {repetitions} "
                f"| {100 * information_share(q, z):.0f} % |",
                flush=True,
            )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 200)
