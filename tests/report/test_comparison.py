"""Comparisons of several runs: cautions, and the comparison as data."""

import math
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tests.report.builders import ROUNDS, with_statement
from unheard.errors import InvalidValue
from unheard.report import tables
from unheard.report.comparison import Comparison, choose_baseline
from unheard.report.page import render_page
from unheard.report.plots import plots
from unheard.report.run_record import RunRecord
from unheard.run_folder import RunFolder


def test_unlike_runs_are_compared_with_cautions(runs, tmp_path, monkeypatch):
    monkeypatch.setattr(RunFolder, "check_metrics", lambda folder: None)  # its checkpoints are of a later round
    other = tmp_path / "other"
    shutil.copytree(runs[1], other)
    lines = (other / "metrics.jsonl").read_text().splitlines()
    # Three evaluations and an incomplete line.
    (other / "metrics.jsonl").write_text("\n".join(lines[:3]) + '\n{"round": 9')
    (other / "measures.json").unlink()
    cautions = " ".join(Comparison.read([runs[0], other]).cautions)
    assert "different numbers of rounds" in cautions
    assert f"other is at round 6 of {ROUNDS}" in cautions
    assert "other has no full measures" in cautions
    assert Comparison.read(runs).cautions == []
    assert "other" in render_page(Comparison.read([other]))


def _with(record, **changes):
    """A copy of a record in which one fact of the ledger, of the measures or of the evaluations is another."""
    for name, (key, value) in changes.items():
        record = replace(record, **{name: {**getattr(record, name), key: value}})
    return record


def test_each_way_in_which_two_runs_differ_has_its_caution(compared):
    one = compared.records[1]
    assert Comparison(records=[one, replace(one, name="two")], baseline=one).cautions == []
    unlike = {
        "not measured on the same corpus": _with(one, facts=("corpus", "another")),
        "different amounts of held-out text": _with(one, measures=("max_tokens", one.measures["max_tokens"] + 1)),
        "used different amounts": _with(one, measures=("unroll", one.measures["unroll"] + 1)),
        "is at round 12 of 13": _with(one, tables=("training", {**one.tables["training"], "rounds": ROUNDS + 1})),
        "no full measures": replace(one, measures=None),
    }
    for words, other in unlike.items():
        other = replace(other, name="two")
        for records in ([one, other], [other, one], [one, replace(one, name="three"), other]):
            (caution,) = Comparison(records=records, baseline=one).cautions
            assert words in caution


def test_a_hypothetical_epsilon_as_data_says_that_it_is_hypothetical(compared):
    found = compared.as_json()
    assert [row["run"] for row in found["hypothetical"]] == [r.name for r in compared.records if r.is_private]
    for row, result in zip(found["hypothetical"], compared.hypotheticals, strict=True):
        assert row["note"] == result.words
        assert row["note"].startswith("Hypothetical: ")
        assert row["note"].endswith("That run did not happen.")
    for row, record in zip(found["runs"], compared.records, strict=True):
        assert row["epsilon"] == ("infinity" if not record.is_private else record.epsilon)
    assert found["cautions"] == compared.cautions


def test_the_baseline_with_the_exact_name_comes_before_one_with_the_same_folder_name():
    records = [SimpleNamespace(name=name, is_private=True) for name in ("a/x", "b/x", "c")]
    for name, index in (("b/x", 1), ("a/x", 0), ("b/x/", 1), ("somewhere/c", 2), ("x", 0)):
        assert choose_baseline(records, name) is records[index]  # pyright: ignore[reportArgumentType]
    with pytest.raises(InvalidValue, match="not one of the runs"):
        choose_baseline(records, "d")  # pyright: ignore[reportArgumentType]


def _unlike_any_other(record: RunRecord, number: int) -> RunRecord:
    """A private run in which every figure that is shown differs from that of the runs with other numbers."""
    scale = 1 + number / 7

    def other(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: item if key in ("max_tokens", "unroll") else other(item) for key, item in value.items()}
        if isinstance(value, list):
            return [other(item) for item in value]
        return value / scale if isinstance(value, float) else value + number if type(value) is int else value

    statement = {
        **record.statement,
        "claimed": {"epsilon": 2.5 + number, "accountant": ("rdp", "pld")[number % 2]},
        "epsilon": {"moments": 4.5 + number, "rdp": 3.5 + number, "pld": 2.5 + number},
        "delta": 1e-4 / (1 + number),
        "claim": f"the claim of run {number}",
        "warnings": [f"the warning of run {number}."],
    }
    changed = replace(
        record,
        name=f"run{number}",
        population_ledger=None,
        facts={**record.facts, "population": 60 + number, "delta": statement["delta"], "corpus": "one"}
        | {"sampling": {"users_per_round": 5.0 + number}},
        entries=record.entries[: ROUNDS - number],
        metrics=[{**row, **other({key: row[key] for key in row.keys() - {"round"}})} for row in record.metrics],
        measures=other(record.measures),
        tables={**record.tables, "privacy": {"budget_epsilon": 50.0 + number}},
    )
    return with_statement(changed, statement)


def _shown(compared: Comparison, name: str) -> dict[str, Any]:
    """Everything that a comparison shows for one run: its cells, boxes, curves, bars and JSON, without its colour."""
    shown: dict[str, Any] = {}
    tabled = [tables.summary(compared), tables.bands(compared.measured), tables.predictions(compared.measured)]
    for table in [*tabled, tables.accuracy_by_round(compared), tables.epsilon_by_round(compared)]:
        column = list(table.columns).index(name)
        shown[table.title] = {row[0]: row[column] for row in table.rows if row[column] != "—"}
    for table in (tables.accuracies(compared.measured), tables.users(compared.measured), tables.computation(compared)):
        shown[table.title] = [row[:-1] for row in table.rows if row[0] == name]
    shown["head words"] = [row for row in tables.head_words(compared.measured).rows if row[0].endswith(name)]
    page = re.sub(r"--series-\d", "", render_page(compared))
    boxes = re.findall(r"<article.*?</article>", page, re.DOTALL)
    shown["boxes"] = [box for box in boxes if f"</span>{name}</p>" in box]
    shown["suggestions"] = re.findall(rf'<td data-run="{name}".*?</td>', page, re.DOTALL)
    shown["first sentence"] = re.findall(rf"<b>{name}</b> [^;]*?(?=;|\. Measured)", page)
    shown |= {plot.name: [point for point in _points(plot.spec) if point["run"] == name] for plot in plots(compared)}
    data = compared.as_json()
    shown["runs as data"] = [row for row in data["runs"] if row["run"] == name]
    shown["hypothetical as data"] = [row for row in data["hypothetical"] if row["run"] == name]
    shown["computation as data"] = [{**row, "times": 0} for row in data["reach"] if row["run"] == name]
    return shown


def _points(value: Any) -> Iterator[dict[str, Any]]:
    """Yield the rows of data of a plot that belong to a run."""
    if isinstance(value, dict) and "run" in value:
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _points(item)


def test_what_is_shown_for_a_run_does_not_depend_on_the_runs_beside_it(compared, monkeypatch):
    """So no table, plot, page or file has a figure of one run in the place of another."""

    def quick(events, delta):  # a number that depends on the events as epsilon does, and takes no time to compute
        epsilon = sum(count * (1e5 * event.sampling_prob + 1 / event.noise_multiplier) for event, count in events)
        return SimpleNamespace(epsilon=epsilon - math.log(delta), accountant="pld")

    monkeypatch.setattr("unheard.report.comparison.best_epsilon", quick)
    monkeypatch.setattr("unheard.report.page._plot_library", str)
    records = [_unlike_any_other(compared.records[1], number) for number in range(3)]
    options: dict[str, Any] = {"accuracy": 0.001, "as_if_users": 1_000_000}
    alone = {r.name: _shown(Comparison(records=[r], baseline=r, **options), r.name) for r in records}
    hypothetical = [values["Summary"]["ε hypothetical, as if 1,000,000 users"] for values in alone.values()]
    assert len(set(hypothetical)) == len(records)
    first, *others = alone.values()
    for what, values in first.items():
        assert values, what
        for other in others:
            assert other[what] != values, f"{what} does not differ between the runs"
    baseline = records[2]  # neither the first nor the last
    together = Comparison(records=[records[1], baseline, records[0]], baseline=baseline, **options)
    for name, expected in alone.items():
        shown = _shown(together, name)
        assert [what for what in expected if shown[what] != expected[what]] == []
    costs = together.as_json()["reach"]
    unit = next(cost["updates"] for cost in costs if cost["run"] == baseline.name)
    assert [cost["times"] for cost in costs] == [cost["updates"] / unit for cost in costs]
