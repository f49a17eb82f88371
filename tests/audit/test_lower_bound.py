"""The lower bound on epsilon, compared with figures computed by hand and with mechanisms of known epsilon."""

import doctest
import math
from collections import Counter

import numpy as np
import pytest
from scipy.stats import binom, norm

from unheard.audit import lower_bound as module
from unheard.audit.lower_bound import AttackCurve, best_guesses, f_dp_bound, lower_bound, p_value, refutes
from unheard.privacy.accountants import best_epsilon
from unheard.privacy.events import Gaussian, NonPrivate, PoissonGaussian


def test_the_p_value_is_that_of_honest_coins():
    assert p_value(100, 10, 10, 0.0, 0.0) == pytest.approx(0.5**10)
    assert p_value(100, 10, 10, math.log(3), 0.0) == pytest.approx(0.75**10)
    assert p_value(100, 10, 0, 1.0, 0.0) == 1.0
    assert p_value(100, 10, 10, 0.0, 1e-3) > 0.5**10  # delta makes success likelier
    assert p_value(10, 4, 3, 0.0, 0.01) == pytest.approx(
        5 / 16 + 2 * 10 * 0.01 * 6 / 16
    )  # by hand: max over i is i = 1


def test_the_bound_follows_from_the_guesses():
    assert lower_bound(1000, 1000, 500, 0.0) == 0.0
    assert lower_bound(1000, 0, 0, 0.0) == 0.0
    perfect = lower_bound(1000, 1000, 1000, 0.0)
    p = 0.05 ** (1 / 1000)
    assert perfect == pytest.approx(math.log(p / (1 - p)), rel=1e-6)
    assert lower_bound(1000, 1000, 1000, 1e-5) < perfect


def test_the_bound_is_too_high_in_no_more_than_one_of_twenty_audits_of_randomised_response():
    """Each canary is reported correctly with probability e/(1+e), so epsilon is exactly 1."""
    rng, above = np.random.default_rng(2), 0
    for _ in range(200):
        was_in = rng.random(200) < 0.5
        says_in = was_in ^ (rng.random(200) > math.e / (1 + math.e))
        above += best_guesses(says_in + rng.random(200) * 1e-3, was_in, 0.0).epsilon > 1.0
    assert above <= 0.05 * 200


@pytest.mark.parametrize("mu", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("canaries", [5, 60, 500])
def test_f_dp_rules_nothing_out_that_happens_so_often(mu, canaries):
    """Independent Gaussian releases, guessed by sign: each guess is correct with probability Phi(mu / 2)."""
    curve = AttackCurve.of_events([(Gaussian(noise_multiplier=1 / mu), 1)])
    p = norm.cdf(mu / 2)
    for correct in range(1, canaries + 1):
        tail = binom.sf(correct - 1, canaries, p)
        assert not curve.rules_out(canaries, canaries, correct, tail)
    most = int(binom.isf(1e-6, canaries, p)) + canaries // 5
    if most <= canaries:
        # The test has power: too many correct guesses are rejected.
        assert curve.rules_out(canaries, canaries, most, 0.05)


def test_f_dp_holds_for_rules_that_abstain():
    """Guesses for the highest tenth of the scores only: the tail of the number of correct guesses, by simulation."""
    rng, mu, canaries, guesses = np.random.default_rng(1), 1.5, 100, 10
    included = rng.random((20_000, canaries)) < 0.5
    score = rng.standard_normal((20_000, canaries)) + mu * included
    top = np.argpartition(score, canaries - guesses, axis=1)[:, -guesses:]
    correct = np.take_along_axis(included, top, axis=1).sum(axis=1)
    curve = AttackCurve.of_events([(Gaussian(noise_multiplier=1 / mu), 1)])
    for count in range(1, guesses + 1):
        tail = float((correct >= count).mean())
        assert not curve.rules_out(canaries, guesses, count, tail - 3 * math.sqrt(tail / 20_000))


def test_the_curve_of_sampled_rounds_is_that_of_the_best_test():
    q, z = 0.3, 0.8
    curve = AttackCurve.of_events([(PoissonGaussian(sampling_prob=q, noise_multiplier=z), 1)])
    for false_positives in (0.02, 0.1, 0.3):
        best = (1 - q) * false_positives + q * norm.sf(norm.isf(false_positives) - 1 / z)
        assert 0.97 * false_positives <= curve.false_positive_rate(best) <= false_positives * (1 + 1e-6)


def test_f_dp_refutes_noise_of_a_quarter_and_no_sound_noise():
    events, rng = [Gaussian(noise_multiplier=1.0)], np.random.default_rng(3)
    included = rng.random(2000) < 0.5
    noise = rng.standard_normal(2000)
    assert not refutes(noise + included - 0.5, included, events, 0.01)
    assert refutes(noise + 4 * included - 2, included, events, 0.01)
    assert not refutes(noise + 4 * included - 2, included, [NonPrivate(reason="no noise")], 0.01)
    assert f_dp_bound(noise, included, events, 1e-6) < 0.5


def test_the_examples_in_the_docstring_are_true():
    assert doctest.testmod(module).failed == 0


def test_the_levels_of_all_guessing_rules_add_up_to_that_of_the_bound(monkeypatch):
    """The best rule is chosen by its outcome, so the probability of error is divided among the rules (Bonferroni)."""
    rng = np.random.default_rng(1)
    included_M = rng.random(300) < 0.5
    score_M = rng.standard_normal(300) + included_M
    events = [Gaussian(noise_multiplier=1.0)]
    levels: list[float] = []

    def rules_out(self, canaries, guesses, correct, probability):
        levels.append(probability)
        return False

    def bound(canaries, guesses, correct, delta, confidence):
        levels.append(1 - confidence)
        return 0.0

    monkeypatch.setattr(module.AttackCurve, "rules_out", rules_out)
    monkeypatch.setattr(module, "lower_bound", bound)
    for judge, level in (
        (lambda: module.refutes(score_M, included_M, events, 0.01), 0.01),
        (lambda: module.best_guesses(score_M, included_M, 1e-6, 0.9), 0.1),
        (lambda: module.f_dp_bound(score_M, included_M, events, 1e-6, 0.9), 0.1),
    ):
        levels.clear()
        judge()
        rules = len(module._outcomes(score_M, included_M))
        assert rules > 5
        assert math.fsum(levels[:rules]) == pytest.approx(level)
        assert len(set(levels)) == 1


def test_the_best_rule_is_taken_where_only_the_extreme_scores_tell_something():
    """Of 1,000 canaries, guesses for the 25 highest and lowest scores are right, and all others are random."""
    rng = np.random.default_rng(5)
    score_M, included_M = np.linspace(-1.0, 1.0, 1000), rng.random(1000) < 0.5
    included_M[:25], included_M[-25:] = False, True
    best = best_guesses(score_M, included_M, 0.0)
    assert best.count <= 60
    assert best.epsilon > 1.0
    sign = lower_bound(1000, 1000, int(((score_M > 0) == included_M).sum()), 0.0)
    assert best.epsilon > 4 * sign


def test_many_kinds_of_rounds_are_bounded_by_the_smallest_signal():
    """The accountant merges kinds of rounds towards a higher cost; a lower bound must not exceed the true value."""
    signals = Counter({(0.1, 0.5 + 0.01 * i): 1 for i in range(30)})
    as_smallest = best_epsilon([(PoissonGaussian(sampling_prob=0.1, noise_multiplier=2.0), 30)], 1e-5).epsilon
    assert module._epsilon(signals, 1.0, 1e-5) <= as_smallest * (1 + 1e-9)


def guessed_by_hand(score, included) -> list[tuple[int, int]]:
    """Return the numbers of guesses and of correct guesses of each rule: by the sign, then of the extreme scores."""
    total = len(score)
    order = sorted(range(total), key=lambda canary: score[canary])
    found = [(total, sum((score[canary] > 0) == included[canary] for canary in range(total)))]
    sizes = sorted({max(1, math.floor(total * fraction + 1e-9)) for fraction in (0.45, 0.25, 0.1, 0.05, 0.02)})
    highest = {size: sum(bool(included[canary]) for canary in order[-size:]) for size in sizes}
    lowest = {size: sum(not included[canary] for canary in order[:size]) for size in sizes}
    found += [(size, highest[size]) for size in sizes]
    return found + [(2 * size, highest[size] + lowest[size]) for size in sizes if 2 * size <= total]


@pytest.mark.parametrize("canaries", [1, 2, 3, 10, 61, 400])
@pytest.mark.parametrize("signal", [-3.0, 0.0, 3.0])
def test_every_rule_guesses_what_was_fixed_before_the_scores_are_known(canaries, signal):
    """The more likely answer is a property of the scores; a rule may not be turned round after its outcome is known."""
    rng = np.random.default_rng(canaries)
    included_M = rng.random(canaries) < 0.3
    score_M = rng.standard_normal(canaries) + signal * (included_M - 0.5) + 0.2
    assert module._outcomes(score_M, included_M) == guessed_by_hand(score_M.tolist(), included_M.tolist())


def test_a_score_of_zero_is_a_guess_that_the_canary_was_excluded():
    for included_M in (np.array([True] * 8), np.array([False] * 8)):
        assert module._outcomes(np.zeros(8), included_M)[0] == (8, 0 if included_M[0] else 8)


def test_scores_of_the_wrong_sign_are_no_evidence():
    """Included canaries have the lowest scores. Whoever could turn a rule round would call this a perfect attack."""
    included_M = np.arange(100) % 2 == 0
    score_M = np.where(included_M, -3.0, 3.0) + np.linspace(-0.1, 0.1, 100)
    events = [Gaussian(noise_multiplier=1.0)]
    assert best_guesses(-score_M, included_M, 1e-6).epsilon > 2
    assert best_guesses(score_M, included_M, 1e-6).epsilon == 0.0
    assert refutes(-score_M, included_M, events, 0.01)
    assert not refutes(score_M, included_M, events, 0.01)
    assert f_dp_bound(score_M, included_M, events, 1e-6) == 0.0
