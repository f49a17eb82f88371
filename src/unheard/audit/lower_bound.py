"""Computes a lower bound on epsilon from guesses about who took part in a run.

Each of m canary users is included or excluded by a fair coin. An auditor sees the released outputs and guesses, for
some or all canaries, whether they were included. Theorem 5.2 of Steinke, Nasr and Jagielski (2023) says that against an
(epsilon, delta)-private mechanism the number of correct guesses is stochastically dominated by a sum of independent
coins that are correct with probability e^epsilon / (1 + e^epsilon), up to a term in delta. More correct guesses than
that rule the epsilon out.

    lower_bound(canaries, guesses, correct, delta)   the largest epsilon that is ruled out
    best_guesses(score_M, included_M, delta)         the same from scores, over a fixed set of guessing rules

    >>> lower_bound(canaries=1000, guesses=1000, correct=500, delta=0.0)
    0.0
    >>> round(lower_bound(canaries=1000, guesses=1000, correct=900, delta=0.0), 2)
    2.02

Reference: Steinke, Nasr, Jagielski, "Privacy Auditing with One (1) Training Run", NeurIPS 2023,
https://arxiv.org/abs/2305.08846.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

CONFIDENCE = 0.95
FRACTIONS = (0.45, 0.25, 0.1, 0.05, 0.02)
"""Guessing rules, as fractions of all canaries: guess "included" for the highest scores, and either nothing or
"excluded" for as many of the lowest. The rules are fixed before the scores are known. The confidence is divided among
them and the rule that guesses every canary by the sign of its score (Bonferroni), so that the best rule may be chosen
afterwards."""

LARGEST_EPSILON = 100.0
"""The search stops here: no audit of a feasible size can rule out a larger epsilon."""


@dataclass(frozen=True, kw_only=True)
class Guesses:
    """The outcome of one guessing rule.

    Attributes:
        count: How many canaries the rule made a guess about.
        correct: How many of these guesses were correct.
        epsilon: The lower bound on epsilon that follows.
    """

    count: int
    correct: int
    epsilon: float


def p_value(canaries: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """Bounds the probability of at least `correct` correct guesses under (epsilon, delta)-differential privacy.

    Args:
        canaries: The number m of canaries, each included with probability 1/2.
        guesses: The number of canaries about which a guess was made; the auditor may abstain from the others.
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
    # below[i - 1] = P[correct - i <= coins < correct], the probability that i changed guesses would reach `correct`.
    below = np.cumsum(stats.binom.pmf(np.arange(correct - 1, -1, -1), guesses, probability))
    return min(tail + 2 * canaries * delta * float((below / np.arange(1, correct + 1)).max()), 1.0)


def lower_bound(canaries: int, guesses: int, correct: int, delta: float, confidence: float = CONFIDENCE) -> float:
    """Returns the largest epsilon under which so many correct guesses have probability below 1 - confidence.

    Args:
        canaries: The number of canaries, each included with probability 1/2.
        guesses: The number of canaries about which a guess was made.
        correct: The number of correct guesses.
        delta: The delta at which epsilon is bounded.
        confidence: The probability that the bound is not above the true epsilon.

    Returns:
        The bound, 0 if the guesses rule nothing out.
    """

    def is_ruled_out(epsilon: float) -> bool:
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
    """Applies every guessing rule to the scores and returns the one with the highest bound.

    Args:
        score_M: One score for each canary, higher where its inclusion is more likely; 0 is neutral.
        included_M: Which canaries were included.
        delta: The delta at which epsilon is bounded.
        confidence: The confidence of the returned bound, over all rules together.

    Returns:
        The guesses of the best rule. Their bound holds at `confidence` although the rule was chosen by its outcome.
    """
    total, rules = len(score_M), _rules(len(score_M))
    each = 1 - (1 - confidence) / (len(rules) + 1)
    order_M = np.argsort(score_M, kind="stable")

    def outcome(count: int, correct: int) -> Guesses:
        return Guesses(count=count, correct=correct, epsilon=lower_bound(total, count, correct, delta, each))

    outcomes = [outcome(total, int(((score_M > 0) == included_M).sum()))]
    for num_in, num_out in rules:
        correct = int(included_M[order_M[total - num_in :]].sum() + (~included_M[order_M[:num_out]]).sum())
        outcomes.append(outcome(num_in + num_out, correct))
    return max(outcomes, key=lambda guesses: guesses.epsilon)


def _rules(canaries: int) -> Sequence[tuple[int, int]]:
    """Returns for each rule how many canaries it guesses to be included, and how many excluded."""
    sizes = sorted({max(int(canaries * fraction), 1) for fraction in FRACTIONS})
    return [(size, 0) for size in sizes] + [(size, size) for size in sizes if 2 * size <= canaries]
