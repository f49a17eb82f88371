"""The paper's printed figures as data: they are consistent with each other and with what the package computes.

tests/privacy/test_accountants_moments.py checks each epsilon to its printed digits.
"""

import pytest
from reproduction.printed import IN_TEXT, TABLE_1, TABLE_2, PrintedEpsilon, moments, today
from reproduction.recipes import RECIPES

import unheard
from reproduction import printed


def test_the_printed_tables_are_complete():
    assert [len(row) for row in TABLE_1] == [7] * 6
    assert len(TABLE_2) == 7
    assert [cell.digits for cell in IN_TEXT] == ["4.6", "1.2", "4.6", "1.97", "3.81", "8.92"]


def test_a_figure_that_is_off_by_one_digit_does_not_agree():
    cell = PrintedEpsilon(location="", population=10, users_per_round=1, rounds=1, delta=0.01, digits="4.63")
    assert cell.agrees(4.634)
    assert not cell.agrees(4.636)
    cut = PrintedEpsilon(
        location="", population=10, users_per_round=1, rounds=1, delta=0.01, digits="4.63", is_cut=True
    )
    assert cut.agrees(4.6399)
    assert not cut.agrees(4.6299)


def test_sigma_is_s_over_users_a_round_in_every_private_row():
    for row in TABLE_2[1:]:
        assert row.clip_norm is not None
        assert row.clip_norm / row.users_per_round == pytest.approx(row.noise_std, rel=1e-3)


def test_the_text_follows_from_the_table():
    accuracies = {row.noise_std: row.accuracy for row in TABLE_2}
    assert accuracies[0.003] - accuracies[0.0] == pytest.approx(printed.PRIVACY_COST)
    updates = printed.PRIVATE_ROUNDS * 5000 / (printed.BASELINE_ROUNDS * 100)
    assert round(updates, -1) == printed.COMPUTATION
    assert pytest.approx(accuracies[0.003], abs=0.0005) == printed.SAME_ACCURACY


def test_the_model_has_the_printed_size_and_saves_the_printed_share():
    tied, untied = (unheard.TiedLSTM(vocabulary_size=10_000, tied=tied).layout.total for tied in (True, False))
    assert round(tied, -4) == printed.PARAMETERS
    assert 1 - tied / untied == pytest.approx(printed.TIED_SMALLER, abs=0.02)


def test_every_row_has_a_run_among_the_recipes():
    assert {row.run for row in TABLE_2} == {run.name for run in RECIPES["table-accuracy"].runs}


def test_claims_of_today_are_smaller_than_those_of_the_paper():
    for row in (TABLE_2[1], TABLE_2[4]):
        assert row.epsilon is not None
        assert 0 < today(row.epsilon) < moments(row.epsilon)
