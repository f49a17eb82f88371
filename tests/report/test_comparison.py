"""Comparisons of several runs: cautions, and the comparison as data."""

import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.report.builders import ROUNDS
from unheard.errors import InvalidValue
from unheard.report.comparison import Comparison, choose_baseline
from unheard.report.page import render_page
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
