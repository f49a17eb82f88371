"""`python -m reproduction show` and `page` on the command line: output, files and refusals."""

import json
import sys

import pytest
from reproduction.cli.main import app

from reproduction import results as results_module
from tests.reproduction.builders import world
from unheard.cli.main import run_app

pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture
def unheard(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")

    def run_words(*words: object, status: int = 0):
        monkeypatch.setattr(sys, "argv", ["unheard", *map(str, words)])
        with pytest.raises(SystemExit) as left:
            run_app(app)
        assert (left.value.code or 0) == status
        return capsys.readouterr()

    return run_words


@pytest.fixture
def folder(tmp_path):
    results_module.append(tmp_path / "blogs", world(rounds=1000, without=["flat-S10-sigma0.006"]).runs.values())
    return tmp_path


def test_show_prints_claim_verdict_rule_curves_and_tables(unheard, folder):
    said = unheard("show", "noised-vs-baseline", "--results", folder).out
    for words in (
        "Figure 1",
        "The paper: sigma = 0.003",
        "Held",
        "After 1,000 rounds",
        "The rule:",
        "The runs",
        "not run",
    ):
        assert words in said
    assert "Stopped at 1,000 of 5,000 rounds" in said


def test_show_prints_one_json_object(unheard, folder):
    content = json.loads(unheard("show", "clipping", "--results", folder / "blogs", "--json").out)
    assert content["verdict"]["outcome"] == "held"
    assert content["corpus"] == "made-up (blogs)"
    assert content["figures"][0]["lines"][0]["points"]


def test_table_1_needs_no_results(unheard, tmp_path):
    said = unheard("show", "table-rounds", "--results", tmp_path / "none").out
    assert said.count("187.01") == 2
    assert "42 of 42 cells" in said


def test_show_says_which_results_it_shows_and_what_others_there_are(unheard, folder):
    assert "others too" not in unheard("show", "clipping", "--results", folder).out
    results_module.append(folder / "more", world(rounds=20, only=["baseline"]).runs.values())
    said = unheard("show", "clipping", "--results", folder).out
    assert f"Run on made-up (blogs). {folder} holds others too: more." in said
    assert "Run on made-up (more)." in unheard("show", "clipping", "--results", folder / "more").out
    assert "Run on" not in unheard("show", "table-rounds", "--results", folder).out
    (folder / "empty").mkdir()
    (folder / "empty" / results_module.FILE).touch()
    assert "Run on" not in unheard("show", "clipping", "--results", folder / "empty").out


def test_a_mistyped_folder_of_results_is_reported(unheard, tmp_path):
    (tmp_path / "nine").mkdir()
    for how in ([], ["--json"]):
        assert f"Did you mean {tmp_path / 'nine'}?" in unheard("list", "--results", tmp_path / "nin", *how).err
    assert "There is no folder" in unheard("show", "clipping", "--results", tmp_path / "none").err
    assert "There is no folder" not in unheard("show", "table-rounds", "--results", tmp_path / "none").err


@pytest.mark.parametrize("width", [40, 80, 140])
def test_no_terminal_is_too_narrow_for_a_figure_or_a_word(unheard, tmp_path, monkeypatch, width):
    """Rich truncates text that does not fit, so 7.50 could become 7.5."""
    monkeypatch.setattr("unheard.cli.display.console._width", width)
    said = unheard("show", "table-rounds", "--results", tmp_path).out.partition("ε after")[2]
    assert said.count("187.01") == said.count("32.38") == 2
    assert said.count("7.50") >= 2
    assert said.count("accountant") == 6
    assert "The runs" not in said


def test_an_unknown_name_is_refused_with_all_known_names(unheard, tmp_path):
    said = unheard("show", "noise-vs-baseline", "--results", tmp_path, status=2).err
    assert "Did you mean 'noised-vs-baseline'?" in said
    assert "table-rounds" in said


def test_results_that_are_not_results_are_refused_with_their_line(unheard, tmp_path):
    (tmp_path / "runs.jsonl").write_text('{"name": "half"}\n')
    said = unheard("show", "clipping", "--results", tmp_path, status=2).err
    assert "line 1" in said
    assert "Traceback" not in said


def test_a_file_in_the_place_of_a_folder_is_refused(unheard, tmp_path):
    (tmp_path / "file").write_text("")
    assert "is a file" in unheard("show", "clipping", "--results", tmp_path / "file", status=2).err


def test_page_writes_the_page_and_says_where(unheard, folder):
    said = unheard("page", "--results", folder, "--out", folder / "out", "--no-pictures").out
    assert (folder / "out" / "index.html").as_uri() in said
    assert not (folder / "out" / "figures").exists()
