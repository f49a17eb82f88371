"""Coefficients of correlated noise: sensitivity, error and optima, compared with brute force, dense matrices and jax-privacy."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.linalg import toeplitz

from unheard.errors import InvalidValue, LedgerError
from unheard.privacy.matrix_factorization import (
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
