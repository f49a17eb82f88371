"""The comparison of independent, banded and BLT noise at one epsilon, and the choice among them."""

import itertools
import math
from dataclasses import replace

import pytest

from unheard.errors import AccountingError, InvalidValue
from unheard.mechanism.correlated import CorrelatedNoise
from unheard.mechanism.sampling import CyclicPoissonSampling, MinSeparationSampling, PoissonSampling
from unheard.privacy import noise_choice
from unheard.privacy.accountants import Bound, best_epsilon, epsilon
from unheard.privacy.budget import default_delta
from unheard.privacy.events import Gaussian, PoissonGaussian
from unheard.privacy.matrix_factorization import Factorisation, independent_error, optimise
from unheard.privacy.noise_choice import NoiseOption, best, compare_noise

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


def option(kind: str, error: float, kept: int = 0, separation: int = 700) -> NoiseOption:
    """Return an option with this error, whose noise keeps `kept` vectors."""
    own = {"strategy": kind, "rounds": 900, "separation": separation}
    matrix = {
        "independent": lambda: None,
        "banded": lambda: Factorisation(**own, coefficients=(0.9,) + (0.01,) * kept),
        "blt": lambda: Factorisation(**own, decays=(0.5,) * kept, scales=(0.1,) * kept),
    }[kind]()
    event = (Gaussian(noise_multiplier=1.75), 3)
    return NoiseOption(
        kind=kind,
        sampling=f"sampling of {kind}",
        noise_multiplier=1.75,
        events=event,
        epsilon=3.25,
        accountant="pld",
        rms_error=error,
        factorisation=matrix,
    )


def test_the_best_option_is_that_with_least_memory_of_those_within_one_percent_of_the_least_error():
    for errors, chosen in (
        ((9.0, 3.0, 2.99, 2.98), "blt"),
        ((9.0, 2.98, 3.02, 3.5), "banded"),
        ((2.999, 2.98, 2.99, 2.97), "independent"),
        ((3.01, 2.98, 2.99, 2.97), "blt"),
        ((9.0, 2.9, 2.8, 2.83), "other"),
    ):
        independent, banded, other, blt = (
            option("independent", errors[0]),
            option("banded", errors[1], kept=63),
            option("banded", errors[2], kept=300),
            option("blt", errors[3], kept=4),
        )
        named = {"independent": independent, "banded": banded, "other": other, "blt": blt}
        for order in ([*named.values()], [*named.values()][::-1]):
            assert best(order) is named[chosen], errors


@pytest.mark.parametrize(
    ("kind", "kept", "separation"), [("independent", 0, 1), ("banded", 0, 700), ("banded", 63, 700), ("blt", 4, 31)]
)
def test_the_record_of_an_option_has_each_of_its_figures(kind, kept, separation):
    own = option(kind, 2.5, kept=kept, separation=separation)
    assert own.record(replace(option("independent", 10.0), noise_multiplier=9.0, epsilon=1.0), parameters=1000) == {
        "noise": kind,
        "sampling": f"sampling of {kind}",
        "separation": separation,
        "noise_multiplier": 1.75,
        "epsilon": 3.25,
        "accountant": "pld",
        "rms_error": 2.5,
        "change": -0.75,  # a quarter of the error
        "history_bytes": 8 * 1000 * kept,  # float64
    }


@pytest.fixture
def quick(monkeypatch):
    """Replace the searches for z by known values: z = 2, or 1 / 2 for one release, and a rough z of 3."""
    asked = []

    def least(event, times, target, delta, accountant):
        z = 2.0 if times > 1 else 0.5
        asked.append((event(z), times, target, delta, accountant))
        return z, Bound(epsilon=target - 0.25, accountant=f"{accountant} at {delta:g}")

    monkeypatch.setattr(noise_choice, "_least_multiplier", least)
    monkeypatch.setattr(noise_choice, "_rough_multiplier", lambda *_: 3.0)
    return asked


@pytest.mark.parametrize(
    ("users_per_round", "separation"),
    [(100, 10), (101, 9), (99.9, 10), (91, 10), (90.8, 11), (334, 2), (500, 2), (501, 1), (4, 12)],
)
@pytest.mark.parametrize(("buffers", "most_bands"), [(2, 256), (4, 3)])
def test_the_comparison_of_noise_has_the_matrices_that_were_asked_for(
    quick, users_per_round, separation, buffers, most_bands
):
    """Users are `separation` rounds apart: so many whole cohorts are in 1,000 users, and there are twelve rounds."""
    rounds, q, delta = 12, users_per_round / 1000, 3e-5
    given = {"population": 1000, "users_per_round": users_per_round, "rounds": rounds, "epsilon": 4.0}
    options = compare_noise(**given, delta=delta, accountant="moments", buffers=buffers, most_bands=most_bands)
    independent, banded, *separated = options
    assert [o.kind for o in separated] == (["banded", "blt"] if separation >= 2 else [])
    assert banded.factorisation is not None
    groups = banded.factorisation.separation
    assert 1 <= groups <= min(separation, most_bands)
    assert groups * q <= 1 + 1e-9
    bands = min(separation, most_bands)
    expected = {
        "poisson": [(None, (PoissonGaussian(sampling_prob=q, noise_multiplier=2.0), rounds))],
        "cyclic_poisson": [
            (
                optimise("banded", rounds=rounds, separation=groups),
                (
                    PoissonGaussian(
                        sampling_prob=min(1.0, groups * q), noise_multiplier=0.5 if groups == rounds else 2.0
                    ),
                    -(-rounds // groups),
                ),
            )
        ],
        "min_separation": [
            (
                optimise("banded", rounds=rounds, separation=separation, bands=bands),
                (Gaussian(noise_multiplier=0.5 if separation == rounds else 2.0), -(-rounds // separation)),
            ),
            (
                optimise("blt", rounds=rounds, separation=separation, buffers=buffers),
                (Gaussian(noise_multiplier=0.5), 1),
            ),
        ][: len(separated)],
    }
    found = [(o.sampling, o.factorisation, o.events) for o in options]
    assert found == [(sampling, *pair) for sampling, pairs in expected.items() for pair in pairs]
    for own in options:
        error = independent_error(rounds) if own.factorisation is None else own.factorisation.rms_error()
        assert own.rms_error == own.noise_multiplier * error
        assert own.noise_multiplier == own.events[0].noise_multiplier
        assert (own.epsilon, own.accountant) == (3.75, "moments at 3e-05")
    assert {asked[2:] for asked in quick} == {(4.0, delta, "moments")}
    assert independent.vectors == 0
    # Of the numbers of bands that are compared, that with the least error is taken: more bands are better at one z.
    assert groups == min(separation, most_bands)


def test_kinds_of_noise_are_compared_at_the_default_delta_and_by_the_accountants_of_a_claim(quick):
    compare_noise(population=1000, users_per_round=100, rounds=12, epsilon=4.0)
    assert {asked[3:] for asked in quick} == {(default_delta(1000), "best")}


@pytest.mark.parametrize("target", [0.3])
def test_the_least_noise_of_the_best_accountant_meets_the_target_by_the_claim(target):
    def event(z):
        return PoissonGaussian(sampling_prob=0.1, noise_multiplier=z)

    z, bound = noise_choice._least_multiplier(event, 20, target, 1e-5, "best")
    assert bound == best_epsilon([(event(z), 20)], 1e-5)
    assert bound.epsilon <= target < best_epsilon([(event(z - 0.002), 20)], 1e-5).epsilon


@pytest.mark.parametrize(("largest", "rounds", "most"), [(1.0, 9, 9), (2.5, 99, 99), (700.3, 53, 256), (97, 500, 61)])
def test_the_numbers_of_bands_to_try_go_from_one_to_the_largest_that_is_possible(largest, rounds, most):
    tried = noise_choice._numbers_of_bands(largest, rounds, most)
    assert tried == sorted(set(tried))
    assert (tried[0], tried[-1]) == (1, min(int(largest), rounds, most))
    assert all(b <= max(a + 1, 1.5 * a) for a, b in itertools.pairwise(tried))


@pytest.mark.parametrize(
    ("errors", "chosen", "tried"),
    [
        ((9, 8, 7, 6, 5), [5, 4, 3], 5),
        ((5, 6, 7, 8, 1), [1, 2, 3], 4),  # three that are not better end the search
        ((5, 6, 7, 4, 8, 9), [4, 1, 2], 6),
        ((9, 5, 6, 7, 4, 4.5), [5, 6, 2], 6),
        ((9, 4, 5, 6, 7, 1), [2, 3, 4], 5),
        ((3, 2), [2, 1], 2),
        ((3,), [1], 1),
    ],
)
def test_the_numbers_of_bands_with_the_least_errors_are_compared_exactly(errors, chosen, tried):
    asked = []

    def error(bands):
        asked.append(bands)
        return errors[bands - 1]

    numbers = range(1, len(errors) + 1)
    assert noise_choice._best_bands(error, numbers) == chosen
    assert asked == [*numbers][:tried]
