"""evaluate --full, compare, report, watch and the end of the demo on the command line: output, files and refusals."""

import json
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from unheard.cli import demo, display, evaluate
from unheard.cli.main import main
from unheard.corpus.store import TokenStore, write_store
from unheard.corpus.vocabulary import Vocabulary
from unheard.run_folder import RunFolder

ONE = np.array([1])


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def unheard(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")

    def run_words(*words: object, ok: bool = True) -> Done:
        monkeypatch.setattr(sys, "argv", ["unheard", *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main()
        out, err = capsys.readouterr()
        done = Done(int(left.value.code or 0), out, err)
        assert not ok or done.returncode == 0, done.stderr
        return done

    return run_words


@pytest.fixture
def copies(runs, tmp_path) -> list[Path]:
    return [Path(shutil.copytree(run, tmp_path / run.name)) for run in runs]


def test_evaluate_full_prints_and_keeps_what_it_measured(unheard, copies):
    (copies[1] / "measures.json").unlink()
    numbers = json.loads(unheard("evaluate", copies[1], "--full", "--json").stdout)
    kept = RunFolder(copies[1]).read_measures()
    assert kept is not None
    assert kept["tokens"] == numbers["tokens"]
    quick = json.loads(unheard("evaluate", copies[1], "--json").stdout)
    assert numbers["tokens"] == pytest.approx(quick)
    shown = unheard("evaluate", copies[1], "--full").stdout
    for words in ("bigram with back-off", "ranks 1–10", "not in the dictionary", "95th", "10 · private"):
        assert words in shown


def test_measures_of_another_corpus_are_not_kept_as_the_runs_own(unheard, copies, store, tmp_path):
    other = shutil.copytree(store.path, tmp_path / "other")
    (copies[1] / "measures.json").unlink()
    json.loads(unheard("evaluate", copies[1], "--full", "--corpus", other, "--json").stdout)
    assert RunFolder(copies[1]).read_measures() is None


def test_saved_measures_are_given_for_the_same_question_only(copies, monkeypatch):
    """Neither for another store, nor for other prompts or another amount of text, nor if they are asked for again."""

    class Measuring(Exception):
        pass

    def opened(*_):
        raise Measuring

    monkeypatch.setattr("unheard.training.released.open_for_evaluation", opened)
    saved = RunFolder(copies[1]).read_measures()
    prompts = [prompt["text"] for prompt in saved["prompts"]]
    for same in ({}, {"prompts": prompts}, {"max_tokens": saved["max_tokens"]}):
        assert evaluate.full_measures_of(copies[1], **same) == saved
    more = {"max_tokens": saved["max_tokens"] + 1}
    for other in (
        {"corpus": copies[0]},
        {"again": True},
        {"prompts": prompts[:-1]},
        {"prompts": [*prompts, "w"]},
        more,
    ):
        with pytest.raises(Measuring):
            evaluate.full_measures_of(copies[1], **other)
    (copies[1] / "measures.json").unlink()
    with pytest.raises(Measuring):
        evaluate.full_measures_of(copies[1])


def test_no_measure_and_no_baseline_looks_at_a_training_user(unheard, copies, monkeypatch):
    """Counting in their text, or measuring on it, would be a release outside the ledger."""
    from unheard.corpus.store import TokenStore

    opened = TokenStore.open.__func__

    def without_training_users(cls, path):
        store = opened(cls, path)
        store.train = None  # any access fails
        return store

    monkeypatch.setattr(TokenStore, "open", classmethod(without_training_users))
    (copies[1] / "measures.json").unlink()
    assert json.loads(unheard("evaluate", copies[1], "--full", "--json").stdout)["baselines"]


def test_compare_shows_every_table_and_writes_plots_and_page(unheard, copies, tmp_path):
    done = unheard(
        "compare",
        *copies,
        "--prompt",
        "w1",
        "--as-if-users",
        10**6,
        "--png",
        tmp_path / "png",
        "--html",
        tmp_path / "html",
    )
    for words in (
        "Summary",
        "AccuracyTop1 by round",
        "ε by round",
        "Computation to the same accuracy",
        "by word frequency",
        "Head words",
        "w1 …",
        "∞",
        "hypothetical",
    ):
        assert words in done.stdout
    assert "w1 w2" not in done.stdout  # the prompt asked for, in place of those measured before
    assert len(list((tmp_path / "png").glob("*.png"))) == 7
    assert (tmp_path / "html" / "index.html").exists()


def test_compare_prints_strict_json(unheard, copies):
    data = json.loads(unheard("compare", *copies, "--json", "--baseline", "private", "--accuracy", 0.0).stdout)
    assert data["baseline"] == "private"
    assert [run["epsilon"] == "infinity" for run in data["runs"]] == [True, False]
    assert [line["rounds"] for line in data["reach"]] == [2, 2]  # any accuracy is reached at the first evaluation
    assert data["reach"][0]["times"] == 0.5  # 6 users per round, in units of 12
    assert data["hypothetical"] == []


def test_report_writes_the_page_and_names_its_address(unheard, copies, tmp_path):
    done = unheard("report", *copies, "--out", tmp_path / "page", "--title", "Ours")
    (address,) = re.findall(r"file://\S+", done.stdout)
    assert address == (tmp_path / "page" / "index.html").as_uri()
    assert "<h1>Ours</h1>" in (tmp_path / "page" / "index.html").read_text()


def test_a_run_whose_corpus_is_gone_is_shown_with_what_is_there(unheard, copies, tmp_path):
    (copies[1] / "measures.json").unlink()
    run_file = copies[1] / "run.toml"
    run_file.write_text(re.sub(r'path = ".*"', 'path = "nowhere"', run_file.read_text()))
    done = unheard("report", copies[1], "--out", tmp_path / "page")
    assert "not measured" in done.stderr
    assert "unheard evaluate --full" in (tmp_path / "page" / "index.html").read_text()
    assert unheard("evaluate", copies[1], "--full", ok=False).returncode == 2


def test_watch_looks_once_and_leaves_a_finished_run(unheard, copies):
    for words in (["--once"], []):
        shown = unheard("watch", copies[1], *words).stdout
        assert "complete" in shown
        assert "12/12" in shown
        assert "ε so far" in shown
    assert list((copies[1] / "tensorboard").glob("*tfevents*"))


@pytest.mark.parametrize("verb", [["compare"], ["watch"], ["report", "--out", "page"], ["evaluate", "--full"]])
def test_a_folder_without_a_run_is_refused_with_a_message(unheard, tmp_path, verb):
    done = unheard(*verb, tmp_path, ok=False)
    assert done.returncode == 2
    assert "not a run folder" in done.stderr.replace("\n", " ")
    assert "Traceback" not in done.stderr


def test_training_leaves_event_files_beside_the_metrics(unheard, run, tmp_path):
    from unheard.training.run import run_toml

    (tmp_path / "run.toml").write_text(run_toml(run))
    unheard("train", tmp_path / "run.toml", "--out", tmp_path / "r", "--set", "training.rounds=3")
    assert list((tmp_path / "r" / "tensorboard").glob("events.out.tfevents.*"))


@pytest.mark.parametrize("accuracy", [0.0, 0.25])
def test_the_axis_of_a_flat_curve_does_not_begin_below_zero(accuracy):
    points = [{"run": "a", "round": round_, "accuracy": accuracy} for round_ in (2, 4)]
    drawing = str(display.curves(points, "accuracy", width=60, height=12, times=100))
    labels = [float(value) for value in re.findall(r"(-?[\d.]+)┤", drawing)]
    assert min(labels) == 0
    assert max(labels) == max(1, 200 * accuracy)


def test_the_demo_compares_the_same_users_per_round():
    plain, private = demo._plain_plan(), demo._private_plan()
    assert plain.sampling.users_per_round == private.sampling.users_per_round
    assert all(f"{plain.sampling.users_per_round} users per round" in about for about in demo.ABOUT.values())


@pytest.mark.system
def test_the_demo_declares_as_many_users_as_its_corpus_has(tmp_path):
    """Otherwise `make demo` would begin with a warning about a population that is too small."""
    pytest.importorskip("chitchat_dataset", reason="the extra `demo` is not installed")
    demo._prepare(tmp_path / "store")
    assert TokenStore.open(tmp_path / "store").train.num_users <= demo.POPULATION


def test_the_demo_says_where_each_model_stands_beside_a_bigram():
    def measures(accuracy, perplexity):
        return {"accuracy_top1": accuracy, "perplexity": perplexity}

    baselines = {"bigram with back-off": {"tokens": measures(0.12, 150.0)}}
    plain = {"tokens": measures(0.14, 120.0), "baselines": baselines, "baselines_fitted_on": "other held-out users"}
    (sentence,) = demo.beside_bigram({"plain": plain, "private": {"tokens": measures(0.10, 180.0)}})
    assert "predicts 12.0 % of the same words (perplexity 150)" in sentence
    assert "plain is 2.0 points above it with 14.0 % (perplexity 120)" in sentence
    assert "private is 2.0 points below it with 10.0 % (perplexity 180)" in sentence
    assert demo.beside_bigram({}) == []


def test_only_the_demos_own_corpus_is_public(tmp_path):
    """A store of the same name that was prepared in another way may contain private text."""
    record = {"name": "chitchat", **json.loads(json.dumps(demo._preparation().choices()))}
    write_store(tmp_path / "a", train=[ONE], held_out=[ONE], vocabulary=Vocabulary.of(["w"]), info=record)
    assert demo._is_demo_corpus(tmp_path / "a")
    for key, change in (("name", "posts"), ("streams", {}), ("splits", {})):
        folder = tmp_path / key
        write_store(folder, train=[ONE], held_out=[ONE], vocabulary=Vocabulary.of(["w"]), info={**record, key: change})
        assert not demo._is_demo_corpus(folder)


def test_the_demo_ends_with_the_page_and_its_address(copies, capsys):
    demo._compare(copies[0].parent)
    shown = capsys.readouterr().out
    page = copies[0].parent / "page" / "index.html"
    assert page.as_uri() in shown.replace("\n", "")
    assert "did not happen" in " ".join(shown.split())
    assert page.exists()


@pytest.mark.parametrize("words", [["report", "nowhere", "--out", "page"], ["compare", "nowhere"]])
def test_a_path_without_a_run_is_named_once(words, tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from unheard.cli.main import app
    from unheard.errors import RunFolderMissing

    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, words)
    assert isinstance(done.exception, RunFolderMissing)
    assert "not a run folder" not in done.output  # `main` prints the exception


def test_a_page_is_overwritten_only_with_force(runs, tmp_path):
    from typer.testing import CliRunner

    from unheard.cli.main import app
    from unheard.errors import InvalidValue

    words = ["report", str(runs[1]), "--out", str(tmp_path), "--no-measure"]
    (tmp_path / "mine.txt").write_text("mine")
    refused = CliRunner().invoke(app, words)
    assert isinstance(refused.exception, InvalidValue)
    assert "--force" in str(refused.exception)
    assert CliRunner().invoke(app, [*words, "--force"]).exit_code == 0
    assert (tmp_path / "index.html").exists()
    assert (tmp_path / "mine.txt").read_text() == "mine"
