"""The cells of the tables, and how numbers are written."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.report.builders import made_up_record, with_statement
from unheard.formatting import epsilon_text, small
from unheard.report import plots, tables
from unheard.report.comparison import Comparison
from unheard.run_folder import LOCAL_KEYS


def test_head_words_and_bands_hold_the_measures_own_numbers(compared):
    heads = tables.head_words(compared.measured)
    counts = compared.measured["private"]["head_words"]["50"]
    (row,) = [row for row in heads.rows if row[0] == "50 · private"]
    assert row[-1] == f"{sum(i * c for i, c in enumerate(counts)) / sum(counts):.2f}"
    bands = tables.bands(compared.measured)
    assert bands.rows[-1][0] == "not in the dictionary"
    assert bands.columns[2:] == ["plain", "private"]


def test_a_table_by_round_is_short_and_ends_with_the_last_round(compared):
    record = compared.records[0]
    for count in range(1, 5 * tables.ROWS_BY_ROUND):
        evaluations = [{"round": 7 * number, "accuracy_top1": 0.25} for number in range(1, count + 1)]
        long = replace(record, metrics=evaluations)
        rows = tables.accuracy_by_round(Comparison(records=[long], baseline=long)).rows
        assert rows[-1][0] == f"{7 * count:,}"
        assert min(count, tables.ROWS_BY_ROUND) <= len(rows) < 2 * tables.ROWS_BY_ROUND


def test_small_numbers_are_written_as_powers_of_ten():
    assert [small(1e-9), small(2e-5), small(6.88e-4)] == ["10⁻⁹", "2 × 10⁻⁵", "6.9 × 10⁻⁴"]
    assert [epsilon_text(e) for e in (1.0, 39.28, 108.2, 999.7, 4321.0, math.inf)] == [
        "1.00",
        "39.3",
        "108",
        "1,000",
        "4,321",
        "∞",
    ]


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


def invented(numbers: Iterator[int]) -> dict[str, Any]:
    """Return measures in which every figure is another one."""

    def share() -> float:
        return next(numbers) / 1000

    accuracies = ("accuracy_top1", "accuracy_top3", "accuracy_top5")

    def figures() -> dict[str, Any]:
        tokens = {key: share() for key in (*accuracies, "accuracy_top1_words")}
        tokens |= {"loss": 1 + share(), "perplexity": 100.0 + next(numbers), "tokens": 10_000 + next(numbers)}
        spread = ("mean", "p5", "p25", "p50", "p75", "p95")
        users = {key: {of: share() for of in spread} for key in (*accuracies, "perplexity")}
        bands = ("end of sentence", "ranks 1–10", "ranks 11–47", "not in the dictionary")
        return {
            "tokens": tokens,
            "users": users,
            "bands": [
                {"band": band, "share": share(), "targets": next(numbers), **{key: share() for key in accuracies}}
                for band in bands
            ],
        }

    return {
        **figures(),
        "head_words": {head: [next(numbers) for _ in range(11)] for head in ("10", "50", "100")},
        "baselines": {name: figures() for name in ("most frequent word", "bigram with back-off")},
        "baselines_fitted_on": "other held-out users",
        "prompts": [
            {"text": text, "words": [{"word": f"w{next(numbers)}", "probability": share()} for _ in range(3)]}
            for text in ("how are", "have a")
        ],
    }


@pytest.fixture
def measured() -> dict[str, dict[str, Any]]:
    numbers = itertools.count(3)
    return {name: invented(numbers) for name in ("first", "second")}


def one_digit(share: float) -> str:
    return f"{100 * share:.1f} %"


def test_every_cell_of_the_measured_tables_is_the_figure_that_its_row_and_column_name(measured):
    found = tables.accuracies(measured)
    named = ["accuracy_top1", "accuracy_top1_words", "accuracy_top3", "accuracy_top5"]
    assert list(found.columns[1:]) == ["top 1", "top 1, words", "top 3", "top 5", "perplexity"]
    expected = {name: of_run["tokens"] for name, of_run in measured.items()}
    expected |= {f"{name} (baseline)": own["tokens"] for name, own in measured["first"]["baselines"].items()}
    assert found.rows == [
        [name, *(f"{100 * own[key]:.2f} %" for key in named), f"{own['perplexity']:.4g}"]
        for name, own in expected.items()
    ]
    found = tables.users(measured)
    assert list(found.columns[1:]) == ["mean", "5th percentile", "25th", "median", "75th", "95th"]
    assert found.rows == [
        [name, *(one_digit(own["users"]["accuracy_top1"][of]) for of in ("mean", "p5", "p25", "p50", "p75", "p95"))]
        for name, own in measured.items()
    ]
    found = tables.bands(measured)
    assert list(found.columns) == ["words", "share of text", "first", "second"]
    assert found.rows == [
        [band["band"], one_digit(band["share"]), one_digit(band["accuracy_top1"]), one_digit(other["accuracy_top1"])]
        for band, other in zip(measured["first"]["bands"], measured["second"]["bands"], strict=True)
    ]
    found = tables.head_words(measured)
    assert list(found.columns[1:]) == [*map(str, range(11)), "mean"]
    rows = {row[0]: row[1:] for row in found.rows}
    for head, (name, own) in itertools.product(("10", "50", "100"), measured.items()):
        counts = own["head_words"][head]
        mean = f"{sum(n * count for n, count in enumerate(counts)) / sum(counts):.2f}"
        assert rows.pop(f"{head} · {name}") == [*(f"{100 * count / sum(counts):.0f}" for count in counts), mean]
    assert not rows
    found = tables.predictions(measured)
    assert list(found.columns) == ["after", "first", "second"]
    for number, row in enumerate(found.rows):
        assert row[0] == f"{measured['first']['prompts'][number]['text']} …"
        for cell, own in zip(row[1:], measured.values(), strict=True):
            words = own["prompts"][number]["words"]
            assert cell == ", ".join(f"{w['word']}\u00a0{100 * w['probability']:.0f}\u00a0%" for w in words)
    assert len(found.rows) == 2


def test_every_point_of_the_measured_plots_is_the_figure_that_its_axis_names(measured):
    """The tables below the plots show the same figures, so a plot of another measure would contradict its table."""
    records = [replace(made_up_record(name, [0.1]), measures=own) for name, own in measured.items()]
    records = [
        with_statement(r, {"claimed": {"epsilon": "infinity", "accountant": "rdp"}, "delta": 1e-6}) for r in records
    ]
    compared = Comparison(records=records, baseline=records[0])
    spec = plots.accuracy_by_user(compared).spec
    assert spec["data"]["values"] == [{"run": name, **own["users"]["accuracy_top1"]} for name, own in measured.items()]
    marks = {layer["mark"]["type"]: layer["encoding"] for layer in spec["layer"]}
    shown = {kind: [axis["field"] for axis in encoding.values()] for kind, encoding in marks.items()}
    assert shown == {"rule": ["p5", "p95"], "bar": ["p25", "p75"], "tick": ["p50"]}
    everything = {name: own["bands"] for name, own in measured.items()}
    everything["bigram"] = measured["first"]["baselines"]["bigram with back-off"]["bands"]
    values = plots.accuracy_by_band(compared).spec["data"]["values"]
    assert [(row["words"], row["value"], row["share"]) for row in values] == [
        (band["band"], band["accuracy_top1"], band["share"]) for bands in everything.values() for band in bands[:-1]
    ]
    assert [row["run"] for row in values[::3]][:2] == ["first", "second"]
    for head, plot in zip(("10", "50", "100"), plots.head_word_histograms(compared), strict=True):
        for row in plot.spec["data"]["values"]:
            counts = measured[row["run"]]["head_words"][head]
            assert (row["count"], row["share"]) == (counts[row["n"]], counts[row["n"]] / sum(counts))
        assert len(plot.spec["data"]["values"]) == 2 * 11


def test_every_row_of_the_summary_is_the_figure_that_it_names():
    """Two runs in which all figures differ, and the last evaluation is neither the best nor the mean."""
    records, expected = [], []
    for number, name in enumerate(("first", "second")):
        record = made_up_record(name, [], users_per_round=100.0 + number, population=763_430 + number)
        rows = [
            {"round": 10 * i + number, "accuracy_top1": 0.1 + a / 100 + number / 1000, "accuracy_top3": 0.4 + a / 100}
            | {"perplexity": 70.0 + a + number, "accuracy_top5": 0.6, "accuracy_top1_words": 0.05, "loss": 4.5}
            for i, a in enumerate((1, 3, 2, 6, 9, 7, 4), start=1)
        ]
        figures = {"moments": 9.5 + number, "rdp": 2.5 + number, "pld": 1.25 + number}
        claimed = {"epsilon": 1.25 + number, "accountant": "pld"}
        statement = {"claimed": claimed, "epsilon": figures, "delta": 3e-7 + number * 1e-7}
        records.append(with_statement(replace(record, metrics=rows), statement))
        smooth = math.fsum(row["accuracy_top1"] for row in rows[-5:]) / 5
        expected.append(
            {
                "AccuracyTop1, held-out": f"{100 * rows[-1]['accuracy_top1']:.2f} %",
                "smoothed over 5 evaluations": f"{100 * smooth:.2f} %",
                "AccuracyTop3": f"{100 * rows[-1]['accuracy_top3']:.2f} %",
                "perplexity": f"{rows[-1]['perplexity']:.4g}",
                "ε, claimed": f"{1.25 + number:.2f} by PLD",
                "by moments, as in the paper": ("9.50", "10.5")[number],
                "δ": small(statement["delta"]),
                "rounds": str(rows[-1]["round"]),
                "users per round, expected": f"{100 + number}",
                "users, declared": ("763,430", "763,431")[number],
            }
        )
    table = tables.summary(Comparison(records=records, baseline=records[0]))
    assert list(table.columns) == ["", "first", "second"]
    for column, cells in enumerate(expected, start=1):
        assert {row[0].strip(): row[column] for row in table.rows} == cells


@pytest.mark.parametrize("seed", [0, 1, 987_654_321, -1, False, "0", ""])
@pytest.mark.parametrize("other", [None, 0, 12])
def test_a_seed_of_any_value_is_never_among_the_settings(compared, seed, other):
    """Also if it is zero, which is false, and whether or not the other run has the same one."""
    records = []
    for record, value in zip(compared.records, (seed, other), strict=True):
        seeds = {} if value is None else {"reproducible_seed": value}
        records.append(replace(record, tables={**record.tables, "training": {**record.tables["training"], **seeds}}))
    differ, same = tables.configuration(Comparison(records=records, baseline=records[0]))
    rows = [row for row in (*differ.rows, *same.rows) if row[0] == "training.reproducible_seed"]
    assert [set(row[1:]) - {"—"} for row in rows] == [{"set, and not shown"}]


def test_of_every_path_only_the_last_part_is_among_the_settings(compared):
    record = compared.records[1]
    for key in LOCAL_KEYS:
        table, name = key.split(".")
        for value in ("/private-place/last", "/private-place/last/", "private-place/last"):
            own = {**record.tables, table: {**record.tables.get(table, {}), name: value}}
            changed = replace(record, tables=own)
            differ, same = tables.configuration(Comparison(records=[changed], baseline=changed))
            assert dict(same.rows)[key] == "last"
            assert "private-place" not in str((differ.rows, same.rows))


def test_every_other_setting_is_in_the_table_of_those_that_differ_or_of_those_that_are_the_same(compared):
    first, second = compared.records
    differ, same = tables.configuration(compared)
    own = [tables._settings(record.tables) for record in (first, second)]
    flat = {f"{table}.{key}" for record in (first, second) for table, keys in record.tables.items() for key in keys}
    assert {row[0] for row in (*differ.rows, *same.rows)} == flat
    for row in differ.rows:
        assert row[1:] == [settings.get(row[0], "—") for settings in own]
        assert row[1] != row[2]
    for row in same.rows:
        assert row[1:] == [own[0][row[0]]] == [own[1][row[0]]]
