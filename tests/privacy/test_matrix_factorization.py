"""Coefficients of correlated noise: sensitivity, error and optima, compared with brute force, dense matrices and jax-privacy."""

import itertools
import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.linalg import toeplitz

from unheard.errors import InvalidValue, LedgerError
from unheard.privacy.matrix_factorization import (
    MOST_ROUNDS,
    Factorisation,
    independent_error,
    optimise,
    prefix_error,
    separated_sensitivity,
)


def dense(column: np.ndarray) -> np.ndarray:
    return toeplitz(column, np.zeros(len(column)))


def largest_by_brute_force(matrix: np.ndarray, separation: int) -> float:
    """Return the largest norm of a sum of columns, over all sets of rounds that are at least `separation` apart."""
    rounds, most = len(matrix), 0.0
    for pattern in range(1, 2**rounds):
        times = [t for t in range(rounds) if pattern >> t & 1]
        if all(b - a >= separation for a, b in itertools.pairwise(times)):
            most = max(most, float(np.linalg.norm(matrix[:, times].sum(1))))
    return most


@pytest.mark.parametrize(("rounds", "separation", "buffers"), [(9, 3, 2), (10, 4, 3), (12, 5, 2), (8, 1, 2), (7, 9, 4)])
def test_the_sensitivity_of_blt_is_the_largest_over_all_participation_patterns(rounds, separation, buffers):
    matrix = optimise("blt", rounds=rounds, separation=separation, buffers=buffers)
    brute = largest_by_brute_force(dense(matrix.column()), separation)
    assert matrix.sensitivity() == pytest.approx(brute, rel=1e-9)
    assert matrix.sensitivity() >= brute


@pytest.mark.parametrize(("rounds", "groups", "bands"), [(9, 3, None), (12, 4, 3), (11, 5, None)])
def test_two_rounds_of_one_user_share_no_row_so_a_block_has_the_sensitivity_of_one_column(rounds, groups, bands):
    matrix = optimise("banded", rounds=rounds, separation=groups, bands=bands)
    columns = dense(matrix.column())
    for group in range(groups):
        times = list(range(group, rounds, groups))
        rows = [set(np.flatnonzero(columns[:, t])) for t in times]
        assert all(a.isdisjoint(b) for a, b in itertools.combinations(rows, 2))
        assert all(np.linalg.norm(columns[:, t]) <= matrix.sensitivity() for t in times)
    k = matrix.participations
    assert largest_by_brute_force(columns, groups) <= math.sqrt(k) * matrix.sensitivity()
    assert matrix.sensitivity() == pytest.approx(1.0, abs=1e-9)


def test_contributions_in_other_directions_never_exceed_the_sensitivity():
    matrix = optimise("blt", rounds=12, separation=4, buffers=2)
    rng = np.random.default_rng(0)
    for _ in range(200):
        times = np.arange(int(rng.integers(4)), 12, 4)
        directions = rng.normal(size=(len(times), 3))
        directions /= np.linalg.norm(directions, axis=1, keepdims=True)
        assert np.linalg.norm(dense(matrix.column())[:, times] @ directions) <= matrix.sensitivity()


def test_coefficients_that_increase_or_are_negative_are_refused():
    with pytest.raises(InvalidValue, match="non-increasing"):
        separated_sensitivity(np.array([1.0, 0.2, 0.3]), 1, 3)
    with pytest.raises(InvalidValue, match="non-negative"):
        separated_sensitivity(np.array([1.0, -0.1, -0.2]), 1, 3)
    # For these coefficients the formula is too small: a pattern with another distance has a larger norm.
    column = np.array([1.0, 0.0, 0.9, 0.0])
    assert largest_by_brute_force(dense(column), 1) >= largest_by_brute_force(dense(column), 2)


@pytest.mark.parametrize(
    "values",
    [
        dict(strategy="banded", separation=2, coefficients=(0.8, 0.5, 0.3)),  # more bands than groups
        dict(strategy="banded", separation=4, coefficients=()),
        dict(strategy="banded", separation=4, coefficients=(0.0, 1.0)),
        dict(strategy="banded", separation=4, coefficients=(math.nan,)),
        dict(strategy="blt", separation=4, decays=(0.9,), scales=(1.2,)),  # c_1 > c_0
        dict(strategy="blt", separation=4, decays=(1.0,), scales=(0.5,)),
        dict(strategy="blt", separation=4, decays=(0.9,), scales=(-0.5,)),
        dict(strategy="blt", separation=4, decays=(0.9,), scales=()),
        dict(strategy="dense", separation=4, coefficients=(1.0,)),
        dict(strategy="banded", separation=0, coefficients=(1.0,)),
    ],
)
def test_what_has_no_proved_sensitivity_is_refused(values):
    with pytest.raises(InvalidValue):
        Factorisation(rounds=10, **values)


@given(
    rounds=st.integers(2, 30),
    separation=st.integers(1, 12),
    decays=st.lists(st.floats(0.05, 0.99), min_size=1, max_size=4, unique=True),
    total=st.floats(0.05, 1.0),
)
def test_error_and_inverse_are_those_of_the_dense_matrices(rounds, separation, decays, total):
    scales = tuple(total / len(decays) * 0.999 for _ in decays)
    matrix = Factorisation(strategy="blt", rounds=rounds, separation=separation, decays=tuple(decays), scales=scales)
    inverse = np.linalg.inv(dense(matrix.column()))
    assert matrix.inverse() == pytest.approx(inverse[:, 0], abs=1e-9)
    noise = np.tril(np.ones((rounds, rounds))) @ inverse
    error = math.sqrt((noise**2).sum() / rounds)
    assert prefix_error(matrix.inverse()) == pytest.approx(error, rel=1e-9)
    assert matrix.rms_error() == pytest.approx(error * matrix.sensitivity(), rel=1e-9)


def test_the_error_of_independent_noise_is_that_of_one_band():
    assert optimise("banded", rounds=50, separation=1).rms_error() == pytest.approx(independent_error(50))


@pytest.mark.system
def test_sensitivity_and_error_are_those_of_jax_privacy():
    """Slow, because jax takes ten seconds to start. `benchmarks/correlated_noise.py --jax-privacy` also compares the optima."""
    jax = pytest.importorskip("jax")
    from jax_privacy.matrix_factorization import buffered_toeplitz
    from jax_privacy.matrix_factorization import toeplitz as library

    with jax.enable_x64():
        blt = optimise("blt", rounds=60, separation=13, buffers=2)
        column = buffered_toeplitz.BufferedToeplitz.build(blt.decays, blt.scales).toeplitz_coefs(60)
        assert np.asarray(column) == pytest.approx(blt.column(), abs=1e-12)
        square = library.minsep_sensitivity_squared(column, 13, max_participations=blt.participations)
        assert blt.sensitivity() == pytest.approx(math.sqrt(square), rel=1e-9)
        banded = optimise("banded", rounds=60, separation=8)
        column = np.array(banded.coefficients)
        assert banded.sensitivity() == pytest.approx(math.sqrt(library.sensitivity_squared(column, n=60)), rel=1e-9)
        assert banded.rms_error() == pytest.approx(math.sqrt(library.loss(strategy_coef=column, n=60)), rel=1e-6)


def test_more_bands_are_never_worse_and_the_figures_of_long_runs_are_reached():
    errors = [optimise("banded", rounds=200, separation=b).rms_error() for b in (1, 2, 4, 8, 16, 32)]
    assert errors == sorted(errors, reverse=True)
    # 342,477 users, 1,000 per round, 2,052 rounds, epsilon 8: z = 1.065 with 64 groups; independent noise has 16.14.
    assert 1.065 * optimise("banded", rounds=2052, separation=64).rms_error() < 6.09
    # The same without sampling: z = 1.6 for each of 6 participations, 342 rounds apart.
    assert 1.6 * optimise("banded", rounds=2052, separation=342).rms_error() < 5.86


def test_a_record_reads_back_and_one_that_was_changed_is_refused():
    for matrix in (optimise("banded", rounds=20, separation=4), optimise("blt", rounds=20, separation=4, buffers=2)):
        record = matrix.to_record()
        assert Factorisation.from_record(record) == matrix
        assert record["participations"] == 5
        with pytest.raises(LedgerError, match="another sensitivity"):
            Factorisation.from_record({**record, "sensitivity": record["sensitivity"] * 0.9})
        with pytest.raises(LedgerError):
            Factorisation.from_record({**record, "rounds": "20"})
    banded = optimise("banded", rounds=20, separation=4)
    larger = [2 * c for c in banded.coefficients]
    with pytest.raises(LedgerError, match="another sensitivity"):
        Factorisation.from_record({**banded.to_record(), "coefficients": larger})
    with pytest.raises(LedgerError, match="correlated noise that no proof covers"):
        Factorisation.from_record(None)


@pytest.mark.parametrize(
    "values",
    [
        dict(strategy="banded", rounds=10, separation=4, bands=5),
        dict(strategy="blt", rounds=10, separation=4, buffers=5),
        dict(strategy="banded", rounds=0, separation=4),
        dict(strategy="banded", rounds=10, separation=0),
        dict(strategy="other", rounds=10, separation=4),
    ],
)
def test_what_cannot_be_optimised_is_refused(values):
    with pytest.raises(InvalidValue):
        optimise(values.pop("strategy"), **values)


MATRICES = {
    "banded": Factorisation(strategy="banded", rounds=20, separation=4, coefficients=(0.8, 0.4, 0.3)),
    "blt": Factorisation(strategy="blt", rounds=20, separation=4, decays=(0.9, 0.6, 0.3), scales=(0.2, 0.1, 0.3)),
}


@pytest.mark.parametrize("strategy", MATRICES)
@pytest.mark.parametrize("key", ["participations", "sensitivity"])
@pytest.mark.parametrize("factor", [0.0, 0.5, 0.8, 1 - 1e-3, 1 - 1e-6, 1 + 1e-6, 1.2])
def test_a_header_must_state_sensitivity_and_participations_as_its_coefficients_have_them(strategy, key, factor):
    record = MATRICES[strategy].to_record()
    assert Factorisation.from_record({**record, key: record[key] * (1 + 1e-12)}) == MATRICES[strategy]
    with pytest.raises(LedgerError, match="another sensitivity"):
        Factorisation.from_record({**record, key: record[key] * factor})


@pytest.mark.parametrize("strategy", MATRICES)
def test_a_header_without_one_of_its_values_is_refused(strategy):
    record = MATRICES[strategy].to_record()
    assert record["participations"] == 5
    for key in record:
        for damaged in ({k: v for k, v in record.items() if k != key}, {**record, key: None}, {**record, key: "x"}):
            with pytest.raises(LedgerError):
                Factorisation.from_record(damaged)


@pytest.mark.parametrize("strategy", MATRICES)
def test_each_number_of_a_matrix_is_checked_wherever_it_stands(strategy):
    """Each position of each tuple, and both sides of each limit."""
    matrix, below_1 = MATRICES[strategy], math.nextafter(1, 0)
    other = MATRICES["blt" if strategy == "banded" else "banded"]
    refused = {"coefficients": (math.nan, math.inf, -math.inf, 1, "0.5", None)}
    refused |= {"decays": (0.0, -0.1, 1.0, 1.5, *refused["coefficients"])}
    refused |= {"scales": (-1e-12, -0.5, 0.9, *refused["coefficients"])}
    accepted = {"coefficients": (-0.5, 0.0, 0.1), "decays": (1e-9, below_1), "scales": (0.0, 0.1, 0.5)}
    for name, wrong in refused.items():
        numbers = getattr(matrix, name)
        for i in range(len(numbers)):
            put = {value: (*numbers[:i], value, *numbers[i + 1 :]) for value in (*wrong, *accepted[name])}
            for value in accepted[name]:
                if name != "coefficients" or i or value > 0:  # c_0 is above 0
                    most = 1.0 if name != "scales" else math.fsum(put[value])
                    if most <= 1:
                        assert getattr(replace(matrix, **{name: put[value]}), name) == put[value]
            for value in wrong:
                with pytest.raises(InvalidValue):
                    replace(matrix, **{name: put[value]})
        if numbers:
            for changed in (numbers[:-1], (*numbers, 0.05)):  # one number less or more
                if name != "coefficients":
                    with pytest.raises(InvalidValue, match="as many decays as scales"):
                        replace(matrix, **{name: changed})
        else:
            with pytest.raises(InvalidValue, match="only"):  # numbers of the other kind of matrix
                replace(matrix, **{name: getattr(other, name)})
    for rounds, is_accepted in ((1, True), (MOST_ROUNDS, True), (MOST_ROUNDS + 1, False), (0, False), (20.0, False)):
        if is_accepted:
            assert replace(matrix, rounds=rounds).participations == -(-rounds // 4)
        else:
            with pytest.raises(InvalidValue, match="rounds"):
                replace(matrix, rounds=rounds)
            with pytest.raises((InvalidValue, TypeError)):
                optimise(strategy, rounds=rounds if rounds > 20 else 0, separation=4)


@pytest.mark.parametrize("position", range(1, 6))
@pytest.mark.parametrize("step", [1e-9, 0.3])
def test_a_column_that_increases_or_is_negative_anywhere_has_no_proved_sensitivity(position, step):
    column = np.array([1.0, 0.9, 0.5, 0.4, 0.4, 0.0])
    assert separated_sensitivity(column, 2, 3) > 1
    rising = column.copy()
    rising[position] = rising[position - 1] + step
    negative = column.copy()
    negative[position:] = -step
    for wrong in (rising, negative):
        with pytest.raises(InvalidValue, match="non-negative and non-increasing"):
            separated_sensitivity(wrong, 2, 3)


@given(
    numbers=st.lists(st.floats(0.01, 0.99), min_size=2, max_size=8, unique=True),
    rounds=st.integers(2, 25),
    separation=st.integers(8, 12),
)
def test_a_sensitivity_is_never_below_the_exact_norm(numbers, rounds, separation):
    """The norm of the same floats, computed with fractions."""
    banded = Factorisation(strategy="banded", rounds=rounds, separation=separation, coefficients=tuple(numbers))
    exact = sum(Fraction(c) ** 2 for c in numbers)
    assert exact <= Fraction(banded.sensitivity()) ** 2 <= exact * Fraction(1 + 1e-10)
    scales = tuple(0.9 / len(numbers) for _ in numbers)
    blt = Factorisation(strategy="blt", rounds=rounds, separation=separation, decays=tuple(numbers), scales=scales)
    column = [Fraction(c) for c in blt.column()]
    total = [sum(column[t - j] for j in range(0, t + 1, separation)) for t in range(rounds)]
    exact = sum(value**2 for value in total)
    assert exact <= Fraction(blt.sensitivity()) ** 2 <= exact * Fraction(1 + 1e-10)


@pytest.mark.parametrize(
    ("strategy", "rounds", "separation", "more"),
    [("banded", 60, 6, {}), ("banded", 40, 40, {}), ("blt", 60, 60, {"buffers": 2}), ("blt", 60, 12, {"buffers": 3})],
)
def test_no_small_change_of_the_coefficients_has_less_error(strategy, rounds, separation, more):
    matrix = optimise(strategy, rounds=rounds, separation=separation, **more)
    least, rng = matrix.rms_error(), np.random.default_rng(0)
    assert least < 0.75 * independent_error(rounds) * separated_sensitivity(
        np.eye(1, rounds)[0], separation, 1 if strategy == "banded" else matrix.participations
    )
    names = ("coefficients",) if strategy == "banded" else ("decays", "scales")
    for size in (1e-3, 1e-2, 0.1):
        for _ in range(40):
            changed = {
                name: tuple(
                    float(c)
                    for c in np.array(getattr(matrix, name))
                    * np.exp(rng.normal(size=99)[: len(getattr(matrix, name))] * size)
                )
                for name in names
            }
            if strategy == "banded" or (max(changed["decays"]) < 1 and math.fsum(changed["scales"]) <= 1):
                assert replace(matrix, **changed).rms_error() >= least * (1 - 1e-6)
