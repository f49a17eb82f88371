"""The moments accountant gives every epsilon that the paper prints: 42 cells of Table 1 and twelve other figures."""

import math

import pytest
from reproduction.printed import IN_TEXT, TABLE_1, TABLE_2, PrintedEpsilon

from unheard.privacy.accountants import epsilon
from unheard.privacy.events import NonPrivate, PoissonGaussian

CELLS = [cell for row in TABLE_1 for cell in row]
MODELS = [row.epsilon for row in TABLE_2 if row.epsilon is not None]


def moments(cell: PrintedEpsilon, z: float | None = None) -> float:
    event = PoissonGaussian(
        sampling_prob=cell.users_per_round / cell.population,
        noise_multiplier=cell.noise_multiplier if z is None else z,
    )
    return epsilon([(event, cell.rounds)], cell.delta, "moments")


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: f"{cell.location}, {cell.rounds} rounds")
def test_table_1_to_the_printed_digit(cell):
    assert f"{moments(cell):.2f}" == cell.digits


def test_table_1_has_42_cells():
    assert len(CELLS) == 42


@pytest.mark.parametrize("cell", MODELS, ids=lambda cell: cell.location)
def test_the_accuracy_table_after_5000_rounds(cell):
    assert cell.rounds == 5000
    assert f"{moments(cell):.3f}" == cell.digits


@pytest.mark.parametrize("cell", IN_TEXT, ids=lambda cell: f"{cell.location}, {cell.digits}")
def test_the_figures_in_the_text_of_which_two_are_cut(cell):
    assert cell.agrees(moments(cell))


def test_the_cut_figures_would_round_up():
    cut = [cell for cell in IN_TEXT if cell.is_cut]
    assert [cell.digits for cell in cut] == ["1.97", "3.81"]
    for cell in cut:
        assert f"{moments(cell):.2f}" != cell.digits
        assert math.floor(100 * moments(cell)) / 100 == float(cell.digits)


def test_the_row_without_noise_is_infinite():
    assert TABLE_2[0].epsilon is None
    assert epsilon([(NonPrivate(reason="sigma = 0"), 5000)], 1e-9, "moments") == math.inf
    assert moments(MODELS[0], z=0.0) == math.inf
