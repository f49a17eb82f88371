"""An outside check: PLD lies inside the error interval of Microsoft's prv-accountant."""

import pytest

from unheard.privacy.accountants import epsilon
from unheard.privacy.events import PoissonGaussian


@pytest.mark.parametrize(
    ("q", "z", "rounds", "delta"),
    [(5000 / 763430, 1.0, 5000, 1e-9), (0.01, 1.0, 1000, 1e-6), (0.001, 0.8, 2000, 1e-7), (0.05, 2.0, 500, 1e-5)],
)
def test_pld_is_inside_its_interval(q, z, rounds, delta):
    from prv_accountant import PRVAccountant
    from prv_accountant.privacy_random_variables import PoissonSubsampledGaussianMechanism

    prv = PoissonSubsampledGaussianMechanism(noise_multiplier=z, sampling_probability=q)
    accountant = PRVAccountant(prvs=prv, max_self_compositions=rounds, eps_error=0.02, delta_error=delta / 1000)
    lower, _, upper = accountant.compute_epsilon(delta=delta, num_self_compositions=[rounds])
    found = epsilon([(PoissonGaussian(sampling_prob=q, noise_multiplier=z), rounds)], delta, "pld")
    assert lower <= found <= upper
    assert upper - lower < 0.1
