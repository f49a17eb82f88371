"""The parametric bound: close to the true epsilon, seldom above it, and not reported if its assumptions fail."""

import math
from collections import Counter

import numpy as np
import pytest

from unheard.audit.lower_bound import best_guesses, f_dp_bound, parametric_bound, ruled_out_factor, score_moments
from unheard.privacy.accountants import best_epsilon
from unheard.privacy.events import PoissonGaussian

DELTA = 2.54321e-7
"""The delta of an audit with 4,000 canaries."""


def simulated(seed, canaries, q, z, rounds, *, factor=1.0, noise=1.0):
    """Return scores of canaries in rounds with sampling probability q and noise multiplier z, and which were included."""
    rng, signal = np.random.default_rng(seed), 1 / z
    included = rng.random(canaries) < 0.5
    score = np.zeros(canaries)
    for _ in range(rounds):
        is_drawn = included & (rng.random(canaries) < q)
        exponent = (noise * rng.standard_normal(canaries) + factor * signal * is_drawn) * signal - signal**2 / 2
        score += exponent if q == 1 else np.logaddexp(math.log1p(-q), math.log(q) + exponent)
    return score, included, Counter({(q, signal): rounds})


@pytest.mark.parametrize(
    ("claim", "q", "z", "rounds"),
    [(4, 1.0, 1.2567, 1), (8, 1.0, 0.6828, 1), (4, 0.1, 1.582, 100), (8, 0.1, 1.043, 100)],
)
def test_with_4000_canaries_it_shows_at_least_85_percent_of_the_claim(claim, q, z, rounds):
    event = PoissonGaussian(sampling_prob=q, noise_multiplier=z)
    assert best_epsilon([(event, rounds)], DELTA).epsilon == pytest.approx(claim, rel=2e-3)
    score, included, signals = simulated(2, 4000, q, z, rounds)
    bound = parametric_bound(score, included, signals, DELTA)
    assert 0.85 * claim <= bound.epsilon <= 1.02 * claim
    assert bound.epsilon > best_guesses(score, included, DELTA).epsilon


def test_the_three_bounds_are_in_the_order_of_their_assumptions():
    score, included, signals = simulated(3, 4000, 1.0, 1.2567, 1)
    free = best_guesses(score, included, DELTA).epsilon
    by_f_dp = f_dp_bound(score, included, [PoissonGaussian(sampling_prob=1, noise_multiplier=1.2567)], DELTA)
    assert 1.2 < free < 0.8 * by_f_dp < by_f_dp < 0.9 * parametric_bound(score, included, signals, DELTA).epsilon


@pytest.mark.parametrize(("q", "z", "rounds"), [(1.0, 2.0, 3), (0.2, 1.0, 10), (0.05, 0.7, 40)])
def test_the_bound_is_too_high_in_about_one_of_twenty_sound_audits(q, z, rounds):
    above = 0
    for seed in range(300):
        factor, reason = ruled_out_factor(*simulated(seed, 200, q, z, rounds))
        assert not reason
        above += factor > 1
    assert 0.01 * 300 <= above <= (0.05 + 3 * math.sqrt(0.05 * 0.95 / 300)) * 300


def test_a_bound_that_is_surer_is_lower():
    audit = simulated(4, 1000, 1.0, 1.2567, 1)
    bounds = [parametric_bound(*audit, DELTA, confidence) for confidence in (0.5, 0.9, 0.99)]
    factors = [ruled_out_factor(*audit, confidence)[0] for confidence in (0.5, 0.9, 0.99)]
    assert [bound.factor for bound in bounds] == factors == sorted(factors, reverse=True)
    assert bounds[0].epsilon > bounds[1].epsilon > bounds[2].epsilon


def test_the_moments_of_the_score_agree_with_a_simulation():
    for q, z, factor in ((1.0, 1.0, 1.0), (0.3, 0.8, 1.0), (0.1, 1.5, 2.0)):
        score, included, signals = simulated(5, 100_000, q, z, 2, factor=factor)
        for group, size in ((score[included], factor), (score[~included], 0.0)):
            mean, variance = score_moments(signals, size)
            assert group.mean() == pytest.approx(mean, abs=4 * math.sqrt(variance / len(group)))
            assert group.var() == pytest.approx(variance, rel=0.1)


def test_a_signal_larger_than_foreseen_is_noticed():
    factor, _ = ruled_out_factor(*simulated(1, 1000, 0.5, 2.0, 10, factor=1.5))
    assert 1.2 < factor < 1.6


def test_noise_of_another_size_or_unequal_signals_give_no_bound():
    for noise in (0.7, 1.4):
        factor, reason = ruled_out_factor(*simulated(1, 2000, 1.0, 1.0, 5, noise=noise))
        assert math.isnan(factor)
        assert "pure noise" in reason
    score, included, signals = simulated(1, 2000, 1.0, 0.5, 1)
    score[included] += np.where(np.arange(included.sum()) % 2, 8.0, -8.0)
    assert "common signal" in ruled_out_factor(score, included, signals)[1]


def test_without_noise_or_with_few_canaries_there_is_no_bound_and_a_reason():
    score, included, signals = simulated(1, 100, 1.0, 1.0, 1)
    assert "correlated noise or none" in parametric_bound(score, included, Counter(), DELTA).reason
    few = parametric_bound(score[:10], included[:10], signals, DELTA)
    assert math.isnan(few.epsilon)
    assert "too few" in few.reason


def test_a_bound_is_zero_if_scores_show_nothing():
    score, included, signals = simulated(1, 400, 1.0, 5.0, 1, factor=0.0)
    assert parametric_bound(score, included, signals, DELTA).epsilon == 0.0
