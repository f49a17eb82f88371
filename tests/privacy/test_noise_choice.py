"""The comparison of independent, banded and BLT noise at one epsilon, and the choice among them."""

import math

import pytest

from unheard.errors import AccountingError, InvalidValue
from unheard.mechanism.correlated import CorrelatedNoise
from unheard.mechanism.sampling import CyclicPoissonSampling, MinSeparationSampling, PoissonSampling
from unheard.privacy import noise_choice
from unheard.privacy.accountants import epsilon
from unheard.privacy.events import Gaussian
from unheard.privacy.noise_choice import best, compare_noise

QUICK = dict(accountant="rdp", most_bands=2)


def test_each_option_meets_the_target_with_the_least_noise_and_states_its_error():
    options = compare_noise(population=100_000, users_per_round=1000, rounds=200, epsilon=2.0, delta=1e-6, **QUICK)
    assert [(o.kind, o.sampling) for o in options] == [
        ("independent", "poisson"),
        ("banded", "cyclic_poisson"),
        ("banded", "min_separation"),
        ("blt", "min_separation"),
    ]
    for option in options:
        event, times = option.events
        assert epsilon([(event, times)], 1e-6, "rdp") == option.epsilon <= 2.0
        less = type(event)(**{**vars(event), "noise_multiplier": event.noise_multiplier - 0.002})
        assert epsilon([(less, times)], 1e-6, "rdp") > 2.0
    independent, banded, separated, blt = options
    assert independent.rms_error == pytest.approx(independent.noise_multiplier * math.sqrt(201 / 2))
    assert banded.factorisation is not None
    assert banded.events[1] == -(-200 // banded.factorisation.separation)
    assert separated.events[1] == 2
    assert blt.events[1] == 1
    assert best(options) is banded
    assert banded.rms_error < 0.9 * independent.rms_error
    assert (independent.vectors, banded.vectors, blt.vectors) == (0, banded.factorisation.separation - 1, 3)


@pytest.mark.parametrize("error", [-0.002, 0.0, 0.0005])
def test_a_target_is_met_whatever_the_search_returns(monkeypatch, error):
    """The search finds z to within a fraction of the printed step, so the nearest step may miss the target."""
    search = noise_choice.brentq
    monkeypatch.setattr(noise_choice, "brentq", lambda *args, **named: search(*args, **named) + error)

    def event(z):
        return Gaussian(noise_multiplier=z)

    for target in (0.5, 1.7, 8.0):
        z, bound = noise_choice._least_multiplier(event, 1, target, 1e-6, "rdp")
        assert epsilon([(event(z), 1)], 1e-6, "rdp") == bound.epsilon <= target
        assert epsilon([(event(z - 0.002), 1)], 1e-6, "rdp") > target


@pytest.mark.system
def test_of_options_with_the_same_error_the_one_with_the_least_memory_is_best():
    options = compare_noise(
        population=4000, users_per_round=100, rounds=40, epsilon=4.0, accountant="rdp", most_bands=40
    )
    banded, blt = options[2], options[3]
    assert banded.rms_error == pytest.approx(blt.rms_error, rel=0.01)
    assert banded.vectors > blt.vectors
    assert best([options[0], banded, blt]) is blt


def test_where_everybody_takes_part_in_most_rounds_independent_noise_is_kept():
    options = compare_noise(population=100, users_per_round=90, rounds=10, epsilon=8.0, **QUICK)
    assert [o.kind for o in options] == ["independent", "banded"]
    assert best(options).kind == "independent"


def test_impossible_values_are_refused():
    with pytest.raises(InvalidValue):
        compare_noise(population=100, users_per_round=200, rounds=10, epsilon=8.0)
    with pytest.raises(InvalidValue):
        compare_noise(population=100, users_per_round=10, rounds=10, epsilon=0.0)
    with pytest.raises((InvalidValue, AccountingError)):
        compare_noise(population=100, users_per_round=10, rounds=10, epsilon=1e-12, **QUICK)


def test_each_option_costs_what_a_run_with_its_settings_is_charged():
    """The epsilon of an option equals that of the events of a plan with its sampler and noise, over all rounds."""
    population, rounds = 1000, 12
    options = compare_noise(population=population, users_per_round=100, rounds=rounds, epsilon=8.0, delta=1e-4, **QUICK)
    for option in options:
        z, matrix = option.noise_multiplier, option.factorisation
        if matrix is None:
            charged = [PoissonSampling(users_per_round=100).event(population, z)] * rounds
        else:
            bands = len(matrix.coefficients) if option.kind == "banded" else None
            noise = CorrelatedNoise(noise_multiplier=z, strategy=option.kind, rounds=rounds, bands=bands)
            sampling = (
                CyclicPoissonSampling(users_per_round=100, groups=matrix.separation)
                if option.sampling == "cyclic_poisson"
                else MinSeparationSampling(separation=matrix.separation)
            )
            charged = [noise.event(sampling, population, index) for index in range(rounds)]
            assert noise.factorisation(sampling, population).sensitivity() == pytest.approx(matrix.sensitivity())
        assert epsilon(charged, 1e-4, "rdp") == pytest.approx(option.epsilon, rel=1e-9)
