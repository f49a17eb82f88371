"""The cells of the tables, and how numbers are written."""

import math

import pytest

from tests.report.builders import with_statement
from unheard.formatting import epsilon_text, in_points, small
from unheard.report import tables
from unheard.report.comparison import Comparison


def test_head_words_and_bands_hold_the_measures_own_numbers(compared):
    heads = tables.head_words(compared.measured)
    counts = compared.measured["private"]["head_words"]["50"]
    (row,) = [row for row in heads.rows if row[0] == "50 · private"]
    assert row[-1] == f"{sum(i * c for i, c in enumerate(counts)) / sum(counts):.2f}"
    bands = tables.bands(compared.measured)
    assert bands.rows[-1][0] == "not in the dictionary"
    assert bands.columns[2:] == ["plain", "private"]


@pytest.mark.parametrize(
    ("difference", "plain", "signed"),
    [(0.00134, "0.13", "+0.13"), (-0.0002, "−0.02", "−0.02"), (-0.00001, "0.00", "0.00"), (None, "—", "—")],
)
def test_a_difference_in_points_has_a_true_minus_and_zero_no_sign(difference, plain, signed):
    assert (in_points(difference), in_points(difference, signed=True)) == (plain, signed)


def test_small_numbers_are_written_as_powers_of_ten():
    assert [small(1e-9), small(2e-5), small(6.88e-4)] == ["10⁻⁹", "2 × 10⁻⁵", "6.9 × 10⁻⁴"]
    assert [epsilon_text(e) for e in (1.0, 39.28, 108.2, 4321.0, math.inf)] == ["1.00", "39.3", "108", "4,321", "∞"]


def test_each_figure_of_the_summary_is_that_of_its_own_run(compared):
    claimed = {"epsilon": 1.25, "accountant": "pld"}
    own = {"claimed": claimed, "epsilon": {"moments": 9.5, "rdp": 2.5, "pld": 1.25}, "delta": 3e-7}
    plain, private = compared.records
    private = with_statement(private, {**private.statement, **own})
    rows = {
        row[0].strip(): row[1:] for row in tables.summary(Comparison(records=[plain, private], baseline=plain)).rows
    }
    assert rows["ε, claimed"] == ["∞", "1.25 by PLD"]
    assert rows["by moments, as in the paper"] == ["∞", "9.50"]
    assert rows["δ"] == ["—", "3 × 10⁻⁷"]
    assert rows["users, declared"] == [f"{record.facts['population']:,}" for record in (plain, private)]


def test_each_figure_of_the_summary_is_named_as_what_it_is(compared):
    """The users of a round are an expected number, those of a run a declared one: the true ones are private."""
    names = [row[0] for row in tables.summary(compared).rows]
    assert names == [
        "AccuracyTop1, held-out",
        "  smoothed over 5 evaluations",
        "AccuracyTop3",
        "perplexity",
        "ε, claimed",
        "  by moments, as in the paper",
        "δ",
        "ε hypothetical, as if 1,000,000 users",
        "rounds",
        "users per round, expected",
        "users, declared",
    ]


def test_the_baselines_of_a_table_say_on_whose_text_they_were_fitted(compared):
    for fitted in ("other held-out users", "the corpus's public users"):
        measured = {name: {**m, "baselines_fitted_on": fitted} for name, m in compared.measured.items()}
        table = tables.accuracies(measured)
        assert table.note == f"The baselines were fitted on the text of {fitted}, never on text of training users."
        assert sum(row[0].endswith("(baseline)") for row in table.rows) == 2
