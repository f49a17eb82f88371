"""The bound of a selection, compared with an exact divergence: the maximum of K sampled Gaussians with random K."""

import math

import numpy as np
import pytest
from scipy.special import logsumexp
from scipy.stats import norm

from unheard.privacy.accountants import RDP_ORDERS, best_epsilon, epsilons, rdp_cost
from unheard.privacy.events import PoissonGaussian, Selection

SETTINGS = [(1.0, 4.0, 3.0), (1.0, 1.0, 10.0), (0.1, 1.0, 3.0), (0.3, 0.8, 10.0)]
by_distribution = pytest.mark.parametrize("drawn_from", ["geometric", "poisson"])
by_setting = pytest.mark.parametrize(("q", "z", "mean"), SETTINGS)


def trial_probabilities(drawn_from, mean):
    """Return P(K = k) for k = 0, 1, ..., computed from the definition without a library."""
    k = np.arange(0, 1000)
    if drawn_from == "geometric":
        weights = np.where(k > 0, (1 / mean) * (1 - 1 / mean) ** np.maximum(k - 1, 0), 0.0)
    else:
        weights = np.exp(k * math.log(mean) - mean - np.array([math.lgamma(i + 1) for i in k]))
    assert weights.sum() == pytest.approx(1)
    assert (k * weights).sum() == pytest.approx(mean)
    return weights


def the_best(q, z, mean, drawn_from, shifted):
    """Return the log probabilities of the maximum of K draws, on cells of the real line. The last entry is for K = 0.

    With F the distribution and f the density of one draw, the density of the largest is sum_k P(k) k F^(k-1) f.
    """
    y = np.linspace(-12 * z, 12 * z + 1, 8001)
    log_f = norm.logpdf(y, scale=z) + np.log(y[1] - y[0])
    log_F = norm.logcdf(y, scale=z)
    if shifted and q < 1:
        log_f = np.logaddexp(math.log1p(-q) + log_f, math.log(q) + norm.logpdf(y, 1, z) + np.log(y[1] - y[0]))
        log_F = np.logaddexp(math.log1p(-q) + log_F, math.log(q) + norm.logcdf(y, 1, z))
    elif shifted:
        log_f, log_F = norm.logpdf(y, 1, z) + np.log(y[1] - y[0]), norm.logcdf(y, 1, z)
    largest = np.full_like(y, -np.inf)
    for k, weight in enumerate(trial_probabilities(drawn_from, mean)):
        if k and weight > 1e-30:
            largest = np.logaddexp(largest, math.log(k * weight) + (k - 1) * log_F)
    none = trial_probabilities(drawn_from, mean)[0]
    return np.append(largest + log_f, math.log(none) if none else -1e9)


def renyi(log_p, log_r, order):
    return logsumexp(order * log_p + (1 - order) * log_r) / (order - 1)


def exact_epsilon(p, r, delta):
    """Return the smallest epsilon whose hockey-stick divergence is at most delta, in both directions."""
    p, r, low, high = np.exp(p), np.exp(r), 0.0, 60.0
    for _ in range(60):
        middle = (low + high) / 2
        sticks = [np.maximum(a - math.exp(middle) * b, 0.0).sum() for a, b in ((p, r), (r, p))]
        low, high = (low, middle) if max(sticks) <= delta else (middle, high)
    return high


@by_distribution
@by_setting
def test_the_bound_is_above_the_exact_divergence_at_every_order(drawn_from, q, z, mean):
    """The worst case for two neighbouring data sets: the score of a trial is the released number itself."""
    p = the_best(q, z, mean, drawn_from, shifted=False)
    r = the_best(q, z, mean, drawn_from, shifted=True)
    event = Selection(sampling_prob=q, noise_multiplier=z, rounds=1, mean_trials=mean, drawn_from=drawn_from)
    for order, bound in zip(RDP_ORDERS, rdp_cost(event), strict=True):
        if order <= 64:
            assert max(renyi(p, r, order), renyi(r, p, order)) <= bound * (1 + 1e-6) + 1e-9, order


@by_distribution
@by_setting
def test_the_claimed_epsilon_is_above_the_exact_one_and_not_absurdly(drawn_from, q, z, mean):
    p = the_best(q, z, mean, drawn_from, shifted=False)
    r = the_best(q, z, mean, drawn_from, shifted=True)
    event = Selection(sampling_prob=q, noise_multiplier=z, rounds=1, mean_trials=mean, drawn_from=drawn_from)
    exact, claimed = exact_epsilon(p, r, 1e-5), best_epsilon([event], 1e-5)
    assert claimed.accountant == "rdp"  # PLD has no loss distribution for a selection
    assert exact <= claimed.epsilon <= 2.5 * exact


@by_distribution
@pytest.mark.parametrize(("z", "mean"), [(4.0, 3.0), (1.0, 10.0), (30.0, 200.0)])
def test_the_bound_is_the_one_that_is_printed_in_the_paper_of_papernot_and_steinke(drawn_from, z, mean):
    """Theorems 2 and 6 for the Gaussian mechanism, whose divergence of order a is a / 2 z^2 and whose delta is known."""
    a = RDP_ORDERS
    once = a / (2 * z**2)
    if drawn_from == "geometric":
        wanted = once + 2 * np.min((1 - 1 / a) * once + math.log(mean) / a) + math.log(mean) / (a - 1)
    else:
        eps = np.log1p(1 / (a - 1))
        delta = norm.cdf(1 / (2 * z) - eps * z) - np.exp(eps) * norm.cdf(-1 / (2 * z) - eps * z)
        wanted = once + mean * delta + math.log(mean) / (a - 1)
    event = Selection(sampling_prob=1.0, noise_multiplier=z, rounds=1, mean_trials=mean, drawn_from=drawn_from)
    ours = rdp_cost(event)
    if drawn_from == "geometric":  # divergences do not decrease with the order, so that of a higher order is a bound
        wanted = np.minimum.accumulate(wanted[::-1])[::-1]
        assert ours == pytest.approx(wanted, rel=1e-9)
    else:  # the delta in it is bounded by the divergences, not exact
        assert np.all(ours >= wanted * (1 - 1e-9))


@by_distribution
@pytest.mark.parametrize(("q", "z", "rounds"), [(1e-8, 3.0, 1), (1e-8, 1e4, 1000), (1e-6, 100.0, 1), (1e-4, 1e5, 10)])
def test_divergences_below_what_floats_tell_from_zero_neither_fail_nor_count_for_nothing(drawn_from, q, z, rounds):
    """For small q and much noise the library returns divergences such as -1e-16 (read as delta 0) and 1e-17 (it fails)."""
    event = Selection(sampling_prob=q, noise_multiplier=z, rounds=rounds, mean_trials=10.0, drawn_from=drawn_from)
    one = PoissonGaussian(sampling_prob=q, noise_multiplier=z)
    assert np.all(rdp_cost(event) >= rounds * rdp_cost(one) + math.log(10) / (RDP_ORDERS[-1] - 1))
    for epsilon in epsilons([event], 1e-9).values():
        assert epsilon > 0
    alone = epsilons([(one, rounds)], 1e-9)
    assert epsilons([event], 1e-9)["rdp"] > alone["rdp"]


@by_distribution
def test_rounds_are_repeated_together_as_one_run(drawn_from):
    """Four rounds with q = 1 and z = 2 equal one round with z = 1, so a selection among such runs costs the same."""
    four = Selection(sampling_prob=1.0, noise_multiplier=2.0, rounds=4, mean_trials=5.0, drawn_from=drawn_from)
    one = Selection(sampling_prob=1.0, noise_multiplier=1.0, rounds=1, mean_trials=5.0, drawn_from=drawn_from)
    assert best_epsilon([four], 1e-6).epsilon == pytest.approx(best_epsilon([one], 1e-6).epsilon)


@by_distribution
def test_a_selection_costs_more_than_one_run_and_less_than_its_average_number_of_them(drawn_from):
    q, z, rounds = 5000 / 763_430, 1.0, 5000
    run = PoissonGaussian(sampling_prob=q, noise_multiplier=z)
    ten = Selection(sampling_prob=q, noise_multiplier=z, rounds=rounds, mean_trials=10.0, drawn_from=drawn_from)
    alone, all_ten = best_epsilon([(run, rounds)], 1e-9).epsilon, best_epsilon([(run, 10 * rounds)], 1e-9).epsilon
    assert alone < best_epsilon([ten], 1e-9).epsilon < all_ten
    assert epsilons([ten], 1e-9)["moments"] >= best_epsilon([ten], 1e-9).epsilon


def test_a_selection_among_runs_without_noise_costs_everything():
    event = Selection(sampling_prob=0.1, noise_multiplier=0.0, rounds=3, mean_trials=2.0, drawn_from="geometric")
    assert set(epsilons([event], 1e-5).values()) == {math.inf}
