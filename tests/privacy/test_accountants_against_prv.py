"""PLD lies inside the error interval of Microsoft's prv-accountant, for chosen plans and for random plans."""

import numpy as np
import pytest

from unheard.privacy.accountants import best_epsilon, epsilon
from unheard.privacy.events import PoissonGaussian


def interval(q, z, rounds, delta):
    from prv_accountant import PRVAccountant
    from prv_accountant.privacy_random_variables import PoissonSubsampledGaussianMechanism

    prv = PoissonSubsampledGaussianMechanism(noise_multiplier=z, sampling_probability=q)
    accountant = PRVAccountant(prvs=prv, max_self_compositions=rounds, eps_error=0.02, delta_error=delta / 1000)
    lower, _, upper = accountant.compute_epsilon(delta=delta, num_self_compositions=[rounds])
    return lower, upper


@pytest.mark.parametrize(
    ("q", "z", "rounds", "delta"),
    [(5000 / 763430, 1.0, 5000, 1e-9), (0.01, 1.0, 1000, 1e-6), (0.001, 0.8, 2000, 1e-7), (0.05, 2.0, 500, 1e-5)],
)
def test_pld_is_inside_its_interval(q, z, rounds, delta):
    lower, upper = interval(q, z, rounds, delta)
    found = epsilon([(PoissonGaussian(sampling_prob=q, noise_multiplier=z), rounds)], delta, "pld")
    assert lower <= found <= upper
    assert upper - lower < 0.1


@pytest.mark.parametrize("seed", range(8))
def test_pld_is_inside_its_interval_on_random_plans_and_the_claim_is_the_smaller_valid_bound(seed):
    rng = np.random.default_rng(seed)
    q, z = 10 ** rng.uniform(-3.5, -1.0), rng.uniform(0.7, 3.0)
    rounds, delta = int(10 ** rng.uniform(0.5, 3.3)), 10 ** rng.uniform(-9, -5)
    lower, upper = interval(q, z, rounds, delta)
    events = [(PoissonGaussian(sampling_prob=q, noise_multiplier=z), rounds)]
    found = epsilon(events, delta, "pld")
    assert lower <= found <= upper
    claimed = best_epsilon(events, delta)
    assert claimed.epsilon == min(found, epsilon(events, delta, "rdp"))
    assert claimed.epsilon >= lower
