"""Mu and true-positive rates, compared with a computation without the accountants."""

import doctest
import math

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import norm

from unheard.privacy import trade_off
from unheard.privacy.events import FailureProbability, Gaussian, NonPrivate, PoissonGaussian, Selection
from unheard.privacy.trade_off import figures, figures_of_pair, gaussian_delta

RATES = (0.001, 0.01)


class Profile:
    """The privacy profile of Poisson-sampled Gaussian rounds by numerical convolution of the loss, in both directions.

    The loss of one round is binned finely (to the nearest bin, not upwards) and convolved by a Fourier transform.
    """

    def __init__(self, q: float, z: float, rounds: int):
        x = np.linspace(-12 * z, 1 + 12 * z, 100_001)
        without = norm.pdf(x, 0, z) * (x[1] - x[0])
        with_user = (1 - q) * without + q * norm.pdf(x, 1, z) * (x[1] - x[0])
        loss = np.log1p(q * np.expm1((2 * x - 1) / (2 * z * z)))
        self.loss, self.pmf = [], []
        for sign, weights in ((1, with_user), (-1, without)):
            bins = np.round(sign * loss / 2e-3).astype(int)
            low = bins.min()
            size = 1 << int(np.ceil(np.log2((bins.max() - low) * rounds + 1)))
            one = np.bincount(bins - low, weights=weights, minlength=size)
            pmf = np.maximum(np.fft.irfft(np.fft.rfft(one) ** rounds, n=size), 0)
            values = (np.arange(size) + rounds * low) * 2e-3
            kept = values > 0
            self.loss.append(values[kept])
            self.pmf.append(pmf[kept])

    def delta(self, epsilon: float) -> float:
        def one_way(loss, pmf):
            first = np.searchsorted(loss, epsilon, side="right")
            return float(pmf[first:] @ -np.expm1(epsilon - loss[first:]))

        return max(map(one_way, self.loss, self.pmf))


def test_the_figures_of_a_gaussian_release_are_exact():
    for rounds, z in ((1, 1.0), (16, 16.0), (9, 1.5)):
        mu = math.sqrt(rounds) / z
        figure = figures([(Gaussian(noise_multiplier=z), rounds)], 1e-6)
        assert mu <= figure.mu <= 1.01 * mu
        for rate in RATES:
            exact = norm.cdf(norm.ppf(rate) + mu)
            assert exact <= figure.true_positive_rates[rate] <= 1.001 * exact + 1e-9


def test_the_true_positive_rate_of_one_sampled_round_is_that_of_the_best_test():
    """By the Neyman-Pearson lemma the best test of one round is a threshold on the noisy sum, in either direction."""
    q, z = 0.3, 0.8
    found = figures([PoissonGaussian(sampling_prob=q, noise_multiplier=z)], 1e-6).true_positive_rates
    for rate in RATES:
        above = (1 - q) * rate + q * norm.sf(norm.isf(rate) - 1 / z)
        low = brentq(lambda t, r=rate: (1 - q) * norm.cdf(t / z) + q * norm.cdf((t - 1) / z) - r, -20, 20)
        exact = max(above, norm.cdf(low / z))
        assert exact <= found[rate] <= 1.01 * exact


@pytest.mark.parametrize(("q", "z", "rounds", "delta"), [(0.2, 1.0, 8, 1e-5), (0.05, 0.8, 30, 1e-4)])
def test_the_figures_of_sampled_rounds_agree_with_a_direct_convolution(q, z, rounds, delta):
    profile = Profile(q, z, rounds)
    found = figures([(PoissonGaussian(sampling_prob=q, noise_multiplier=z), rounds)], delta)
    top = brentq(lambda epsilon: profile.delta(epsilon) - delta, 0, 20)
    needed = []
    for epsilon in np.linspace(0, top, 40):
        wanted = profile.delta(epsilon)
        needed.append(brentq(lambda mu, e=epsilon, w=wanted: gaussian_delta(np.array([e]), mu)[0] - w, 1e-3, 10))
    assert max(needed) * 0.995 <= found.mu <= max(needed) * 1.02
    for rate in RATES:
        bounds = [(math.exp(e) * rate + profile.delta(e), e) for e in np.linspace(0, top, 100)]
        bounds += [(1 - math.exp(-e) * (1 - profile.delta(e) - rate), e) for _, e in bounds]
        assert found.true_positive_rates[rate] == pytest.approx(min(bounds)[0], rel=0.01)


def test_mu_covers_the_whole_profile_down_to_delta():
    events = [(PoissonGaussian(sampling_prob=0.05, noise_multiplier=0.8), 30)]
    profile, found = Profile(0.05, 0.8, 30), figures(events, 1e-4)
    for epsilon in np.linspace(0, 12, 50):
        assert profile.delta(epsilon) <= max(gaussian_delta(np.array([epsilon]), found.mu)[0] * 1.001, 1e-4)


def test_every_event_counts():
    """Each figure grows with every further event, whatever its kind."""
    rounds = [(PoissonGaussian(sampling_prob=0.05, noise_multiplier=1.0), 30)]
    base = figures(rounds, 1e-3)
    for more in (
        Gaussian(noise_multiplier=3.0),
        FailureProbability(delta=5e-4),
        PoissonGaussian(sampling_prob=0.5, noise_multiplier=1.0),
    ):
        larger = figures([*rounds, more], 1e-3)
        assert larger.mu > base.mu
        assert all(larger.true_positive_rates[rate] > base.true_positive_rates[rate] for rate in RATES)


def test_without_a_guarantee_the_attacker_is_always_right():
    found = figures([Gaussian(noise_multiplier=1.0), NonPrivate(reason="no noise")], 1e-6)
    assert found.mu == math.inf
    assert set(found.true_positive_rates.values()) == {1.0}


def test_nothing_charged_reveals_nothing():
    found = figures([], 1e-6)
    assert found.mu == 0.0
    assert all(found.true_positive_rates[rate] == rate for rate in RATES)


def test_a_selection_has_figures_by_rdp():
    event = Selection(sampling_prob=0.01, noise_multiplier=1.0, rounds=50, mean_trials=3, drawn_from="geometric")
    alone = figures([(PoissonGaussian(sampling_prob=0.01, noise_multiplier=1.0), 50)], 1e-5)
    found = figures([event], 1e-5)
    assert alone.mu < found.mu < math.inf
    assert alone.true_positive_rates[0.01] < found.true_positive_rates[0.01] < 1


def test_a_single_pair_gives_rates_and_no_mu():
    found = figures_of_pair(2.0, 1e-5)
    assert math.isnan(found.mu)
    assert found.true_positive_rates[0.01] == pytest.approx(0.01 * math.exp(2) + 1e-5)
    assert figures_of_pair(math.inf, 1e-5).true_positive_rates[0.01] == 1.0
    assert figures_of_pair(9.0, 1e-5).true_positive_rates[0.01] == pytest.approx(1 - math.exp(-9) * (1 - 1e-5 - 0.01))


def test_the_examples_in_the_docstring_are_true():
    assert doctest.testmod(trade_off).failed == 0


def test_a_release_that_does_not_depend_on_the_user_has_no_delta():
    assert gaussian_delta(np.array([0.0, 1.0]), 0.0).tolist() == [0.0, 0.0]
