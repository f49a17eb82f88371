"""The moments accountant gives every epsilon that the paper prints: 42 cells of Table 1, and ten figures more."""

import math

import pytest

from unheard.privacy.accountants import epsilon
from unheard.privacy.events import NonPrivate, PoissonGaussian

# users, users a round, z, then epsilon after 10^0 ... 10^6 rounds, at delta = users^-1.1
TABLE_1 = [
    (10**5, 10**2, 1.0, "0.97 0.98 1.00 1.07 1.18 2.21 7.50"),
    (10**6, 10**1, 1.0, "0.68 0.69 0.69 0.69 0.69 0.72 0.73"),
    (10**6, 10**3, 1.0, "1.17 1.17 1.20 1.28 1.39 2.44 8.13"),
    (10**6, 10**4, 1.0, "1.73 1.92 2.08 3.06 8.49 32.38 187.01"),
    (10**6, 10**3, 3.0, "0.47 0.47 0.48 0.48 0.49 0.67 1.95"),
    (10**9, 10**3, 1.0, "0.84 0.84 0.84 0.85 0.88 0.88 0.88"),
]
CELLS = [
    (users, users_per_round, z, 10**power, printed)
    for users, users_per_round, z, row in TABLE_1
    for power, printed in enumerate(row.split())
]


def moments(users, users_per_round, z, rounds, delta):
    event = PoissonGaussian(sampling_prob=users_per_round / users, noise_multiplier=z)
    return epsilon([(event, rounds)], delta, "moments")


@pytest.mark.parametrize(("users", "users_per_round", "z", "rounds", "printed"), CELLS)
def test_table_1_to_the_printed_digit(users, users_per_round, z, rounds, printed):
    assert f"{moments(users, users_per_round, z, rounds, users**-1.1):.2f}" == printed


def test_table_1_has_42_cells():
    assert len(CELLS) == 42


@pytest.mark.parametrize(
    ("users", "users_per_round", "printed"),
    [
        (763430, 5000, "4.634"),
        (763430, 1667, "2.314"),
        (763430, 1250, "2.038"),
        (10**8, 5000, "1.152"),
        (10**8, 1667, "0.991"),
        (10**8, 1250, "0.987"),
    ],
)
def test_the_accuracy_table_after_5000_rounds(users, users_per_round, printed):
    assert f"{moments(users, users_per_round, 1.0, 5000, 1e-9):.3f}" == printed


@pytest.mark.parametrize(
    ("users_per_round", "rounds", "printed"), [(1250, 3000, 1.97), (5000, 3000, 3.81), (5000, 20000, 8.92)]
)
def test_the_figures_in_the_text_which_are_cut_to_two_digits(users_per_round, rounds, printed):
    assert math.floor(100 * moments(763430, users_per_round, 1.0, rounds, 1e-9)) / 100 == printed


def test_the_row_without_noise_is_infinite():
    assert epsilon([(NonPrivate(reason="sigma = 0"), 5000)], 1e-9, "moments") == math.inf
    assert moments(763430, 100, 0.0, 5000, 1e-9) == math.inf
