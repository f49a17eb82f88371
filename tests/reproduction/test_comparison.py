"""The comparison of two sets of results, in the terminal and on the page."""

import json
from dataclasses import asdict, replace

import pytest
from reproduction.cli.main import app
from reproduction.comparison import comparison_tables
from reproduction.page import write_pages
from reproduction.recipes import RECIPES
from reproduction.results import ResultSet, append
from typer.testing import CliRunner

from tests.reproduction.builders import changed, moved, world
from unheard.errors import CorpusMissing

pytestmark = pytest.mark.usefixtures("quick")
USUAL = replace(world(), folder="made-up")


def another(by: float, **cut: int) -> ResultSet:
    """Write results in which every run is better by some points, in a folder that records the changed settings."""
    results = world(**cut)
    return replace(moved(results, dict.fromkeys(results.runs, by)), folder="made-up-model.tied=false")


def test_runs_are_compared_where_both_got_to():
    _, runs = comparison_tables(USUAL, another(1.5, rounds=600))
    assert runs.columns == ["run", "rounds", "made-up", "model.tied=false", "points"]
    rows = {row[0]: row[1:] for row in runs.rows}
    assert set(rows) == set(USUAL.runs)
    rounds, first, second, points = rows["baseline"]
    assert (rounds, points) == ("600", "+1.50")
    assert float(second[:-2]) - float(first[:-2]) == pytest.approx(1.5, abs=0.011)
    assert {row[-1] for row in runs.rows} == {"+1.50"}


def test_what_the_paper_concluded_is_counted_apart_from_what_we_expected():
    worse = replace(moved(world(), {"flat-S15-penalty0.01": 3.0}), folder="b")
    table, _ = comparison_tables(USUAL, worse)
    theirs = [row for row in table.rows if RECIPES[row[0]].is_of_the_paper]
    assert len(theirs) < len(table.rows)
    held = [sum(row[i] == "held" for row in theirs) for i in (1, 2)]
    assert held[0] == held[1] + 1
    told = f"{len(theirs)} rows are conclusions of the paper, of which {held[0]} held in the first set and {held[1]} in the second"
    assert told in table.note


@pytest.mark.parametrize(
    ("one", "other", "is_chance"),
    [
        ("made-up", "made-up-seeds+7", True),
        ("made-up-smoke", "made-up-smoke-seeds+7", True),
        ("made-up-seeds+1", "made-up-seeds+7", True),
        ("made-up", "made-up", False),
        ("made-up", "made-up-model.tied=false", False),
        ("made-up", "made-up-smoke-seeds+7", False),
    ],
)
def test_between_two_seeds_there_is_chance(one, other, is_chance):
    _, runs = comparison_tables(replace(USUAL, folder=one), replace(USUAL, folder=other))
    assert ("all differences are due to chance" in runs.note) == is_chance
    assert ("Two runs differ if they lie over" in runs.note) != is_chance


def test_a_run_that_began_elsewhere_or_is_in_one_alone_is_left_out():
    name = "then-flat-S10-sigma0.006"
    settings = {"training": {"init_from": "flat-S20-sigma0.012 after 1,000 rounds"}}
    other = changed(another(1.0), name, settings=settings)
    left = {row[0] for row in comparison_tables(USUAL, ResultSet(other.corpus, {**other.runs}, "b"))[1].rows}
    assert name not in left
    assert "baseline" in left
    assert {row[0] for row in comparison_tables(USUAL, world(only=["baseline", "flat-S15"]))[1].rows} == {
        "baseline",
        "flat-S15",
    }


def test_conclusions_stand_beside_each_other_where_both_have_one():
    worse = replace(moved(world(without=["baseline-C10"]), {"flat-S15-penalty0.01": 3.0}), folder="b")
    rows = {row[0]: row[1:] for row in comparison_tables(USUAL, worse)[0].rows}
    assert rows["update-penalty"] == ["held", "did not hold"]
    assert rows["estimators"] == ["held", "held"]
    assert "users-per-round" not in rows  # not run
    assert "table-rounds" not in rows  # needs no run
    nothing = [table.note for table in comparison_tables(USUAL, ResultSet())]
    assert nothing == ["No conclusion can be drawn from both yet.", "No run is in both."]


@pytest.mark.system
def test_on_the_command_line_and_on_the_page(tmp_path):
    for results in (USUAL, another(1.0, rounds=600)):
        append(tmp_path / results.folder, results.runs.values())
    folders = [str(tmp_path / folder) for folder in ("made-up", "made-up-model.tied=false")]
    shown = CliRunner(env={"COLUMNS": "120"}).invoke(app, ["compare", *folders], catch_exceptions=False).output
    assert "model.tied=false" in shown
    assert "+1.00" in shown
    said = CliRunner().invoke(app, ["compare", *folders, "--json"], catch_exceptions=False).stdout
    assert json.loads(said) == [asdict(table) for table in comparison_tables(USUAL, another(1.0, rounds=600))]
    with pytest.raises(CorpusMissing, match="no-such"):
        CliRunner().invoke(app, ["compare", folders[0], str(tmp_path / "no-such")], catch_exceptions=False)
    main, other = (path.read_text() for path in write_pages(tmp_path, tmp_path / "out", pictures=False))
    assert 'id="beside"' not in main
    assert "Compared with made-up" in other
    assert "The paper, run on made-up (model.tied=false)" in other
