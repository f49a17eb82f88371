"""Comparisons of several runs: cautions, and the comparison as data."""

import shutil
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


def test_the_baseline_with_the_exact_name_comes_before_one_with_the_same_folder_name():
    records = [SimpleNamespace(name=name, is_private=True) for name in ("a/x", "b/x", "c")]
    for name, index in (("b/x", 1), ("a/x", 0), ("b/x/", 1), ("somewhere/c", 2), ("x", 0)):
        assert choose_baseline(records, name) is records[index]  # pyright: ignore[reportArgumentType]
    with pytest.raises(InvalidValue, match="not one of the runs"):
        choose_baseline(records, "d")  # pyright: ignore[reportArgumentType]
