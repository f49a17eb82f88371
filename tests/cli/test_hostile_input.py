"""Malicious numbers, files and words: each is refused with a message, and control characters are never printed."""

import contextlib
import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import click
import pytest
import typer.main
from rich.table import Table
from typer.testing import CliRunner

import unheard
from tests.stores import uncharged_copy
from unheard.audit.verification import verify
from unheard.cli import display
from unheard.cli.main import app
from unheard.config import parse_toml
from unheard.corpus.canaries import read_canaries
from unheard.corpus.private_vocabulary import WordRelease
from unheard.corpus.store import TokenStore, write_store
from unheard.corpus.vocabulary import Vocabulary
from unheard.deployment.model import open_export
from unheard.deployment.personalize import open_personal
from unheard.errors import CorpusMissing, InvalidValue, ModelError, RunFolderError, UnheardError
from unheard.formatting import printable, shown_word
from unheard.privacy.population_ledger import PopulationLedger
from unheard.privacy.population_statement import find_population_ledger
from unheard.report.run_record import RunMonitor, RunRecord
from unheard.run_folder import RunFolder
from unheard.training.initialise import check_run
from unheard.training.released import Released
from unheard.training.run import run_toml

BRACKETS = "[" * 200_000
ESCAPES = "\x1b]0;title\x07\x1b[31mred\x9b2J\u202eabc\r\x00"


def numeric_options():
    """Return every option of every command that takes a number."""
    root = typer.main.get_command(app)
    assert isinstance(root, click.Group)
    for name, command in root.commands.items():
        inner = command.commands.items() if isinstance(command, click.Group) else [("", command)]
        for sub, leaf in inner:
            for option in leaf.params:
                if isinstance(option, click.Option) and not option.is_flag and option.type.name[:3] in ("int", "flo"):
                    yield [name, sub] if sub else [name], option


@pytest.mark.parametrize("value", ["inf", "nan", "-inf", "1e308", "1e999", str(10**30)])
def test_numbers_without_a_bound_are_refused_by_every_command(value, monkeypatch):
    options = list(numeric_options())
    assert len(options) > 60
    for words, option in options:
        if option.type.name.startswith("int") and not value.lstrip("-").isdigit():
            continue
        root = typer.main.get_command(app)
        command = root
        for word in words:
            assert isinstance(command, click.Group)
            command = command.commands[word]
        for other in command.params:  # so that nothing else is missing
            monkeypatch.setattr(other, "required", False)
        repeats = 2 if option.nargs == 2 else 1
        with pytest.raises(click.UsageError):
            command.make_context(words[-1], [option.opts[0], *[value] * repeats])


@pytest.mark.parametrize("epsilon", [0.0, -1.0, 1e308, 1e4, float("inf"), float("nan")])
def test_a_private_vocabulary_is_refused_before_anything_is_charged(epsilon):
    with pytest.raises(InvalidValue, match="epsilon"):
        WordRelease.for_budget(epsilon, 1e-6, 100)
    with pytest.raises(InvalidValue, match="words_per_user"):
        WordRelease.for_budget(1.0, 1e-6, 10**12)
    with pytest.raises(InvalidValue, match="noise_multiplier"):
        WordRelease.for_budget(1e-300, 1e-300, 100)


@pytest.mark.parametrize("path", ["/", ".", "..", ""])
def test_a_corpus_that_is_no_store_is_refused(run, tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CorpusMissing):
        list(unheard.train(replace(run, corpus=Path(path)), tmp_path / "r"))


def test_a_folder_whose_name_is_not_utf8_is_refused_before_anything_is_charged(run, store, tmp_path):
    """DuckDB and safetensors cannot open a file there."""
    own = replace(run, corpus=uncharged_copy(store.path, tmp_path / "s"))
    with pytest.raises(RunFolderError, match="is not UTF-8"):
        unheard.train(own, tmp_path / "r\udcff")
    (tmp_path / "posts.jsonl").write_text('{"user": "a", "text": "b"}\n')
    with pytest.raises(InvalidValue, match="is not UTF-8"):
        unheard.prepare(tmp_path / "posts.jsonl", tmp_path / "c\udcff")
    assert {path.name for path in tmp_path.iterdir()} == {"s", "posts.jsonl"}
    assert own.ledger is None
    assert PopulationLedger.read(tmp_path / "s" / "ledger.jsonl").runs == {}


def test_a_model_beyond_the_memory_is_refused_before_it_is_allocated(run, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.randn", lambda *_, **__: pytest.fail("allocated"))
    for size in (10**5 * 8, 10**12):
        with pytest.raises(ModelError, match=r"parameters.*hidden_size"):
            unheard.TiedLSTM(vocabulary_size=50, hidden_size=size).initial(0)
    with pytest.raises(InvalidValue, match="unroll"):
        unheard.Evaluation(unroll=10**12)


def test_deep_brackets_in_any_file_are_refused(run, store, tmp_path):
    """In a run folder, a store, an export and a personal model."""
    own = tmp_path / "store"
    shutil.copytree(store.path, own)
    (own / "canaries.json").write_text("[]")
    list(unheard.train(replace(run, corpus=own, training=unheard.Training(rounds=1)), tmp_path / "r"))
    for folder, name in ((tmp_path / "export", "export.json"), (tmp_path / "mine", "personal.json")):
        folder.mkdir()
        (folder / name).write_text(BRACKETS)
        with pytest.raises(UnheardError):
            (open_export if name == "export.json" else open_personal)(folder)
    names = ["run.toml", "metrics.jsonl", "measures.json", "statement.json", "ledger.jsonl", "tokens.json"]
    files = [tmp_path / "r" / name for name in names]
    files += [own / name for name in ("corpus.json", "counts.json", "canaries.json", "ledger.jsonl")]
    for file in files:
        before = file.read_bytes() if file.exists() else None
        file.write_text(f"a = {BRACKETS}" if file.suffix == ".toml" else BRACKETS)
        for look in (
            lambda: verify(tmp_path / "r"),
            lambda: Released.open(tmp_path / "r"),
            lambda: RunRecord.read(tmp_path / "r"),
            lambda: RunMonitor(tmp_path / "r").status(),
            lambda: PopulationLedger.read(own / "ledger.jsonl"),
            lambda: TokenStore.open(own).counts,
            lambda: read_canaries(own, 50),
        ):
            with contextlib.suppress(UnheardError):
                look()
        file.unlink() if before is None else file.write_bytes(before)
    with pytest.raises(ValueError, match="nested"):
        parse_toml(f"a = {BRACKETS}")


@pytest.mark.parametrize("row", [{"round": 3, "perplexity": "x"}, {"round": 2, "accuracy_top1": {}}, [], None, {}])
def test_a_line_of_the_metrics_that_is_no_evaluation_is_an_error(run, tmp_path, row):
    list(unheard.train(replace(run, training=unheard.Training(rounds=3)), tmp_path / "r"))
    folder = RunFolder.open(tmp_path / "r")
    whole, content = folder.read_metrics(), folder.metrics.read_bytes()
    folder.metrics.write_bytes(content + json.dumps(row).encode())
    assert folder.read_metrics() == whole  # a torn last line is skipped
    folder.metrics.write_bytes(content + json.dumps(row).encode() + b"\n")
    for read in (folder.read_metrics, lambda: RunRecord.read(folder.path)):
        with pytest.raises(UnheardError, match="is not an evaluation"):
            read()


@pytest.mark.parametrize(
    "text", ["", "[training]\nrounds = 'x'", "[training]\nrounds = 1\n[privacy]\nbudget_epsilon = []"]
)
def test_a_run_file_without_what_views_read_is_refused(run, tmp_path, text):
    list(unheard.train(replace(run, training=unheard.Training(rounds=1)), tmp_path / "r"))
    (tmp_path / "r" / "run.toml").write_text(text)
    with pytest.raises(UnheardError):
        RunMonitor(tmp_path / "r").status()


def test_control_characters_do_not_reach_the_terminal(capsys):
    """Tests all ways to print: a sentence, a table, a style, plain text, and an error."""
    shown = printable(ESCAPES)
    assert shown == r"\x1b]0;title\x07\x1b[31mred\x9b2J\u202eabc\r\x00"
    assert shown_word(ESCAPES) == shown
    table = Table()
    table.add_column(ESCAPES)
    table.add_row(ESCAPES)
    console = display.safe_console(width=200)
    for thing in (ESCAPES, table):
        console.print(thing, markup=False)
        console.print(thing, style="bold", soft_wrap=True)
    display.echo(ESCAPES)
    terminal = display.safe_console(width=200, force_terminal=True)
    with terminal.capture() as capture:
        terminal.print(ESCAPES, style="bold", markup=False)
    out = capsys.readouterr().out
    assert not set(ESCAPES) - set("abctitlered031m2J];[") & set(out)
    assert "\x1b[1m" in capture.get()  # the console's own style stays
    assert "\x1b[31m" not in capture.get()


def test_a_word_of_a_vocabulary_cannot_steer_the_terminal(run, store, tmp_path):
    """A run folder from somebody else may have escape sequences as words."""
    own = replace(run, plan=replace(run.plan, noise=unheard.GaussianNoise(noise_multiplier=0.01)))
    evil = write_store(
        tmp_path / "store",
        train=[store.train.tokens(user) for user in range(20)],
        held_out=[store.held_out.tokens(user) for user in range(5)],
        vocabulary=Vocabulary.of([f"\x1b[3{i % 8}mw{i}\x07" for i in range(len(store.vocabulary) - 3)]),
        info={"tokens": {"kind": "words"}, "vocabulary": {"kind": "file", "source": "a test's own words"}},
    )
    list(unheard.train(replace(own, corpus=evil.path, training=unheard.Training(rounds=1)), tmp_path / "r"))
    done = CliRunner().invoke(app, ["predict", str(tmp_path / "r"), "w1 w2", "--top", "9"])
    assert done.exit_code == 0, done.output
    assert "\x1b" not in done.output
    assert "\x07" not in done.output
    assert r"\x1b[3" in done.output


def test_the_name_of_a_step_cannot_steer_the_terminal(capsys):
    """The bars of `compare` and `report` show the names of folders, and Rich prints a bar without the render hooks."""
    with display.counted_bar() as progress:
        progress(f"Measuring {ESCAPES}", 1, 2)
    assert not {"\x07", "\x9b", "\u202e", "\x00"} & set(capsys.readouterr().err)


def test_a_path_with_colons_is_printed_as_it_is(capsys):
    display.safe_console(width=200).print("runs/:warning:/:M:", markup=False)
    assert capsys.readouterr().out == "runs/:warning:/:M:\n"


def test_the_command_line_prints_what_the_library_warns_the_operator_of(run, store, tmp_path):
    """The declared population is below the number of users in the store, so the run warns its operator."""
    uncharged_copy(store.path, tmp_path / "store")
    plan = replace(run.plan, population=50)
    small = replace(run, corpus=tmp_path / "store", plan=plan, training=unheard.Training(rounds=1))
    (tmp_path / "run.toml").write_text(run_toml(small))
    done = CliRunner().invoke(app, ["train", str(tmp_path / "run.toml"), "--out", str(tmp_path / "r")])
    assert done.exit_code == 0, done.output
    assert done.stderr.count("privacy.population = 50) is smaller than the number of users") == 1
    warning = done.stderr.split("is smaller than")[1].split("\n")[0].replace(str(tmp_path), "")
    assert str(store.train.num_users) not in warning


def test_a_population_that_is_far_too_large_is_warned_of(run, store, tmp_path, caplog):
    users = store.train.num_users
    for population, is_warned in ((3 * users, False), (3 * users + 1, True)):
        caplog.clear()
        check_run(replace(run, plan=replace(run.plan, population=population)), store)
        assert ("is more than 3 times the number of users" in caplog.text) is is_warned
        assert str(users) not in caplog.text.replace(str(population), "").replace(str(store.path), "")


@pytest.fixture(scope="module")
def trained(store, model, plan, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "r"
    run = unheard.Run(corpus=store.path, model=model, plan=plan, training=unheard.Training(rounds=1))
    list(unheard.train(run, folder))
    return folder


@pytest.mark.parametrize(
    "name",
    [
        "run.toml",
        "ledger.jsonl",
        "metrics.jsonl",
        "vocabulary.txt",
        "tokens.json",
        "x.txt",
        "checkpoints/x.safetensors",
        "noise/history",
        "tensorboard/x",
        "audit/audit.json",
    ],
)
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_pipe_or_a_device_in_a_folder_is_refused_at_once(trained, tmp_path, name, kind):
    folder = shutil.copytree(trained, tmp_path / "r")
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(folder / name)
    else:
        (folder / name).symlink_to("/dev/zero")
    readers = [verify, unheard.statement, Released.open, RunRecord.read, lambda f: list(unheard.resume(f, rounds=2))]
    if name != "ledger.jsonl":
        readers.append(lambda f: find_population_ledger(f / "ledger.jsonl", True))
    for read in readers:
        with pytest.raises(UnheardError, match=rf"{name} is not a regular file|holds no ledger"):
            read(folder)


PLANNED = ["--users", "9000", "--users-per-round", "50", "--rounds", "9", "--noise-multiplier", "1"]
READ_WHOLE = {
    "canaries": ("canaries", "FILE", "--out", "out"),
    "prepare --canaries": ("prepare", "posts.jsonl", "--out", "out", "--canaries", "FILE"),
    "prepare --tokens": ("prepare", "posts.jsonl", "--out", "out", "--tokens", "FILE"),
    "prepare --exclude-users": ("prepare", "posts.jsonl", "--out", "out", "--exclude-users", "FILE"),
    "prepare --vocab": ("prepare", "posts.jsonl", "--out", "out", "--vocab", "FILE"),
    "personalize --text": ("personalize", "RUN", "--text", "FILE", "--out", "out"),
    "train": ("train", "FILE", "--out", "out"),
    "plan --speed-from": ("plan", *PLANNED, "--cost", "--speed-from", "FILE"),
}


@pytest.mark.parametrize("words", READ_WHOLE.values(), ids=list(READ_WHOLE))
@pytest.mark.parametrize("kind", ["pipe", "device"])
@pytest.mark.timeout(60)
def test_a_pipe_or_a_device_in_place_of_a_file_is_refused_at_once(trained, tmp_path, monkeypatch, words, kind):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "posts.jsonl").write_text('{"user": "a", "text": "b"}\n')
    os.mkfifo(tmp_path / "pipe")
    stands_for = {"FILE": "pipe" if kind == "pipe" else "/dev/zero", "RUN": str(trained)}
    read = Path.read_text  # it would fill the memory, or wait forever
    monkeypatch.setattr(Path, "read_text", lambda path, **k: read(path, **k) if path.is_file() else pytest.fail("read"))
    done = CliRunner().invoke(app, [stands_for.get(word, word) for word in words])
    assert isinstance(done.exception, UnheardError), done.output
    assert re.search("copy its content into a file|--vocab .* is neither", str(done.exception))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "words",
    [
        ("compare", "runs/x", "--prompt", "\udcff"),
        ("report", "runs/x", "--prompt=\udcff", "--out", "o"),
        ("init", "\udcff\udcfe", "--population", "50"),
        ("corpus", "show", "\udcff"),
    ],
)
def test_an_argument_that_is_not_utf8_is_refused_by_every_command(tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidValue, match="is not UTF-8 text"):
        CliRunner().invoke(app, words, catch_exceptions=False)
    assert os.listdir(tmp_path) == []


def test_a_pipe_in_a_store_or_an_export_is_refused_at_once(store, tmp_path):
    copy = uncharged_copy(store.path, tmp_path / "store")
    os.mkfifo(copy / "counts.txt")
    with pytest.raises(UnheardError, match=r"counts\.txt is not a regular file"):
        TokenStore.open(copy)
    (tmp_path / "export").mkdir()
    os.mkfifo(tmp_path / "export" / "vocabulary.txt")
    with pytest.raises(UnheardError, match=r"vocabulary\.txt is not a regular file"):
        open_export(tmp_path / "export")
