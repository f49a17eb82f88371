"""How much of a known epsilon the three lower bounds of the one-run audit show, on simulated mechanisms.

Usage: python benchmarks/audit_bounds.py [repetitions]

For each claim and each kind of rounds, a mechanism with exactly this epsilon is simulated with 4,000 canary users. The
table lists the mean of each bound, the lowest parametric bound as a share of the claim, and how often the parametric
bound was above the claim (at 95 % confidence it may be, in one of 20).
"""

import math
import sys
from collections import Counter

import numpy as np
from scipy.optimize import brentq

from unheard.audit.lower_bound import best_guesses, f_dp_bound, parametric_bound
from unheard.privacy.accountants import best_epsilon
from unheard.privacy.events import PoissonGaussian

CANARIES = 4000
DELTA = 1e-3 / CANARIES
ROUNDS = ((1.0, 1), (1.0, 20), (0.1, 100), (0.02, 1000))


def scores(seed: int, q: float, z: float, rounds: int) -> tuple[np.ndarray, np.ndarray]:
    """The score of each canary and who was included, after rounds with sampling probability q and noise multiplier z."""
    rng = np.random.default_rng(seed)
    included_M = rng.random(CANARIES) < 0.5
    score_M = np.zeros(CANARIES)
    for _ in range(rounds):
        is_drawn_M = included_M & (rng.random(CANARIES) < q)
        exponent_M = (rng.standard_normal(CANARIES) + is_drawn_M / z) / z - 0.5 / z**2
        score_M += exponent_M if q == 1 else np.logaddexp(math.log1p(-q), math.log(q) + exponent_M)
    return score_M, included_M


def main(repetitions: int) -> None:
    print("| q | rounds | z | claim | distribution-free | f-DP | parametric | lowest share | above the claim |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for q, rounds in ROUNDS:
        for claim in (4.0, 8.0):

            def excess(z: float, q: float = q, rounds: int = rounds, claim: float = claim) -> float:
                event = PoissonGaussian(sampling_prob=q, noise_multiplier=z)
                return best_epsilon([(event, rounds)], DELTA).epsilon - claim

            z = float(brentq(excess, 0.3, 30.0, xtol=1e-3))  # pyright: ignore[reportArgumentType]
            events = [PoissonGaussian(sampling_prob=q, noise_multiplier=z)] * rounds
            rows = []
            for seed in range(repetitions):
                score_M, included_M = scores(seed, q, z, rounds)
                parametric = parametric_bound(score_M, included_M, Counter({(q, 1 / z): rounds}), DELTA)
                by_f_dp = f_dp_bound(score_M, included_M, events, DELTA) if seed < 3 else math.nan
                rows.append((best_guesses(score_M, included_M, DELTA).epsilon, by_f_dp, parametric.epsilon))
            free, by_f_dp, fitted = np.array(rows).T
            print(
                f"| {q:g} | {rounds} | {z:.3f} | {claim:g} | {free.mean():.2f} | {np.nanmean(by_f_dp):.2f} | {fitted.mean():.2f} "
                f"| {100 * fitted.min() / claim:.0f} % | {int((fitted > claim).sum())} of {repetitions} |",
                flush=True,
            )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
