"""From right guesses to a lower bound on epsilon, with a stated confidence.

In: how many canaries there were, each in or out by a fair coin, and how many of the guesses about them were right. Out: the
largest epsilon that such a success rules out. Where from: Steinke, Nasr and Jagielski, "Privacy Auditing with One (1) Training
Run" (2023), theorem 5.2: guesses about an (epsilon, delta)-private run are right no more often than independent coins that
come up right with probability e^epsilon / (1 + e^epsilon), up to a term for delta.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

CONFIDENCE = 0.95
FRACTIONS = (0.45, 0.25, 0.1, 0.05, 0.02)
"""Of all canaries: how many to call "in" (the highest scores), with or without as many "out" (the lowest). Fixed beforehand;
the confidence is shared among them and a guess about everybody by the score's sign, so that choosing the best is paid for."""


@dataclass(frozen=True, kw_only=True)
class Guesses:
    """How many were made, how many were right, and the bound that follows."""

    made: int
    right: int
    epsilon: float


def p_value(canaries: int, made: int, right: int, epsilon: float, delta: float) -> float:
    """How likely at least so many right guesses are, at most, if the run is (epsilon, delta)-private."""
    honest = 1 / (1 + math.exp(-epsilon))
    at_least = float(stats.binom.sf(right - 1, made, honest))
    if delta == 0 or right == 0:
        return min(at_least, 1.0)
    below = np.cumsum(stats.binom.pmf(np.arange(right - 1, -1, -1), made, honest))  # P[right > coins >= right - i]
    return min(at_least + 2 * canaries * delta * float((below / np.arange(1, right + 1)).max()), 1.0)


def lower_bound(canaries: int, made: int, right: int, delta: float, confidence: float = CONFIDENCE) -> float:
    """The epsilon below which such a success has probability less than 1 - confidence; 0 if nothing is ruled out."""
    if not made or p_value(canaries, made, right, 0.0, delta) > 1 - confidence:
        return 0.0
    low, high = 0.0, 1.0
    while p_value(canaries, made, right, high, delta) < 1 - confidence:
        low, high = high, 2 * high
        if high > 100:
            return low
    for _ in range(50):
        middle = (low + high) / 2
        if p_value(canaries, made, right, middle, delta) < 1 - confidence:
            low = middle
        else:
            high = middle
    return low


def best_guesses(score_M: np.ndarray, was_in_M: np.ndarray, delta: float, confidence: float = CONFIDENCE) -> Guesses:
    """The best bound over a few ways to guess from the scores, valid at `confidence` for all of them together."""
    ways = list(_ways(len(score_M)))
    each = 1 - (1 - confidence) / (len(ways) + 1)
    order, total = np.argsort(score_M, kind="stable"), len(score_M)
    right = int(((score_M > 0) == was_in_M).sum())
    found = [Guesses(made=total, right=right, epsilon=lower_bound(total, total, right, delta, each))]
    for num_in, num_out in ways:
        right = int(was_in_M[order[total - num_in :]].sum() + (~was_in_M[order[:num_out]]).sum())
        made = num_in + num_out
        found.append(Guesses(made=made, right=right, epsilon=lower_bound(total, made, right, delta, each)))
    return max(found, key=lambda guesses: guesses.epsilon)


def _ways(canaries: int) -> Sequence[tuple[int, int]]:
    sizes = sorted({max(int(canaries * fraction), 1) for fraction in FRACTIONS})
    return [(size, 0) for size in sizes] + [(size, size) for size in sizes if 2 * size <= canaries]
