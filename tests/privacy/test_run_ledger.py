"""Every reader of a run's ledger notices a ledger that was shortened, replaced, rolled back or lost."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

import unheard
from tests.stores import uncharged_copy
from unheard.audit.verification import verify
from unheard.cli.main import app
from unheard.corpus.store import TokenStore, write_digests, write_store
from unheard.corpus.vocabulary import Vocabulary
from unheard.deployment.model import run_statement
from unheard.errors import (
    CheckpointCorrupt,
    CorpusError,
    InvalidValue,
    LedgerError,
    ModelError,
    RunFolderError,
    RunFolderMissing,
    UnheardError,
)
from unheard.privacy.ledger import NO_LEDGERS, RECORD, Ledger
from unheard.privacy.population_ledger import PopulationLedger, open_population_ledger
from unheard.privacy.run_ledger import earlier_models, read_run_ledger
from unheard.privacy.statement import compute_statement
from unheard.report.run_record import RunMonitor, RunRecord
from unheard.run_folder import RunFolder, read_facts, record_digest
from unheard.training import released
from unheard.training.checkpoint import newest_checkpoint, save_checkpoint, save_model
from unheard.training.initialise import population_ledger_of
from unheard.training.run import read_saved_run

READERS = {
    "statement": lambda folder: invoke("statement", folder),
    "statement of the file": lambda folder: invoke("statement", folder / "ledger.jsonl"),
    "statement of all runs": lambda folder: invoke("statement", folder, "--all-runs"),
    "unheard.statement": unheard.statement,
    "report": lambda folder: invoke("report", folder, "--no-measure", "--out", folder.parent / "page", "--force"),
    "compare": lambda folder: invoke("compare", folder, "--no-measure", "--json"),
    "record": RunRecord.read,
    "watch": RunMonitor,
    "export": lambda folder: run_statement(RunFolder(folder)),
    "resume": lambda folder: list(unheard.resume(folder, rounds=7)),
}


def invoke(*words: str | Path) -> str:
    done = CliRunner().invoke(app, [*map(str, words)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture(scope="module")
def trained(tmp_path_factory, store, model, plan) -> Path:
    """Train two runs of 6 rounds on a copy of the store, and keep a copy of the first run after 2 rounds."""
    base = tmp_path_factory.mktemp("rolled")
    uncharged_copy(store.path, base / "store")
    run = unheard.Run(
        corpus=base / "store",
        model=model,
        plan=replace(plan, sampling=unheard.PoissonSampling(users_per_round=60)),  # q = 1 is quick to account for
        training=unheard.Training(rounds=2, checkpoint_every=2),
        evaluation=unheard.Evaluation(every=2, max_tokens=200, unroll=20),
    )
    list(unheard.train(run, base / "r"))
    shutil.copytree(base / "r", base / "early")
    list(unheard.resume(base / "r", rounds=6))
    list(unheard.train(run, base / "other"))
    return base


@pytest.fixture
def base(trained, tmp_path) -> Path:
    """Copy `trained`, and change the run files to name the copied store."""
    copy = shutil.copytree(trained, tmp_path / "copy")
    for file in copy.glob("*/run.toml"):
        file.write_text(file.read_text().replace(str(trained), str(copy)))
    return copy


def shorten(path: Path, lines: int) -> None:
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-lines]))


def findings(folder: Path) -> dict[str, str]:
    return {finding.name: finding.words for finding in verify(folder) if finding.fits is False}


@pytest.mark.parametrize("reader", READERS)
def test_every_reader_accepts_a_whole_folder(base, reader):
    READERS[reader](base / "r")


@pytest.mark.parametrize("reader", READERS)
def test_every_reader_refuses_a_shortened_ledger(base, reader):
    shorten(base / "r" / "ledger.jsonl", 4)
    with pytest.raises(LedgerError, match=r"shortened or replaced.*[Pp]ut the right one back"):
        READERS[reader](base / "r")


@pytest.mark.parametrize("reader", READERS)
def test_every_reader_refuses_the_ledger_of_another_run(base, reader):
    shutil.copy(base / "other" / "ledger.jsonl", base / "r" / "ledger.jsonl")
    with pytest.raises(LedgerError):
        READERS[reader](base / "r")


@pytest.mark.parametrize("reader", READERS)
def test_every_reader_refuses_a_folder_that_was_rolled_back_whole(base, reader):
    shutil.rmtree(base / "r")
    (base / "early").rename(base / "r")
    with pytest.raises(LedgerError, match=r"holds 6 charges of this run, the run's own ledger 2.*newest copy"):
        READERS[reader](base / "r")
    assert "newest copy" in findings(base / "r")["population"]


@pytest.mark.parametrize("where", ["a file", "a folder"])
def test_a_folder_that_was_rolled_back_is_compared_with_the_ledger_that_its_run_file_names(base, tmp_path, where):
    run, _ = read_saved_run(base / "other" / "run.toml")
    uncharged_copy(base / "store", base / "fresh")
    (tmp_path / "named").mkdir()
    named = replace(run, corpus=base / "fresh", ledger=tmp_path / "named" / ("" if where == "a folder" else "l.jsonl"))
    list(unheard.train(named, base / "n"))
    shutil.copytree(base / "n", base / "n-early")
    list(unheard.resume(base / "n", rounds=6))
    assert not (base / "fresh" / "ledger.jsonl").exists()
    READERS["statement"](base / "n")
    for reader in ("statement", "unheard.statement", "export", "record"):
        with pytest.raises(LedgerError, match="newest copy"):
            READERS[reader](base / "n-early")


@pytest.mark.parametrize("reader", READERS)
def test_a_run_folder_without_its_ledger_is_an_error(base, reader):
    (base / "r" / "ledger.jsonl").unlink()
    with pytest.raises(UnheardError, match=r"ledger"):
        READERS[reader](base / "r")


def test_measures_of_an_older_model_are_not_shown(base):
    invoke("evaluate", base / "r", "--full")
    assert RunRecord.read(base / "r").measures is not None
    file = base / "r" / "measures.json"
    content = json.loads(file.read_text())
    for changed in ({"format": 0}, {"format": 3}, {"model_sha256": "0" * 64}):  # another version, or another model
        changed = content | changed
        file.write_text(json.dumps(changed | {"sha256": record_digest(changed)}))
        assert RunRecord.read(base / "r").measures is None
    file.write_text(json.dumps(content))
    assert RunRecord.read(base / "r").measures is not None
    list(unheard.resume(base / "r", rounds=7))
    assert RunRecord.read(base / "r").measures is None


@pytest.mark.parametrize("reader", ["statement", "unheard.statement", "record", "export"])
def test_a_model_remembers_the_ledger_in_a_folder_without_checkpoints(base, reader):
    shutil.rmtree(base / "r" / "checkpoints")
    READERS[reader](base / "r")
    shorten(base / "r" / "ledger.jsonl", 1)
    with pytest.raises(LedgerError, match="shortened or replaced"):
        READERS[reader](base / "r")


def test_a_folder_in_which_nothing_remembers_the_ledger_is_refused(base):
    shutil.rmtree(base / "r" / "checkpoints")
    (base / "r" / "model.safetensors").unlink()
    with pytest.raises(LedgerError, match="neither a checkpoint nor a model"):
        read_run_ledger(base / "r")


@pytest.mark.parametrize("content", [b"", b"\xff" * 64, b"\x02" + b"\0" * 7 + b"{}"])
def test_a_checkpoint_that_cannot_be_read_is_an_error_with_advice(base, content):
    sorted((base / "r" / "checkpoints").iterdir())[-1].write_bytes(content)
    with pytest.raises(CheckpointCorrupt, match=r"Put back an intact copy"):
        read_run_ledger(base / "r")


@pytest.mark.parametrize("reader", READERS)
def test_a_checkpoint_that_is_listed_and_cannot_be_found_is_an_error(base, reader):
    """Without the position in this checkpoint, a shortened or new ledger would not be detected."""
    (base / "r" / "checkpoints" / "round-00000099.safetensors").symlink_to(base / "gone")
    with pytest.raises(CheckpointCorrupt, match=r"changes while it is read|is missing"):
        READERS[reader](base / "r")


def test_a_bare_ledger_can_be_stated(base, tmp_path):
    shutil.copy(base / "r" / "ledger.jsonl", tmp_path / "ledger.jsonl")
    shutil.copy(base / "r" / "ledger.jsonl", tmp_path / "another-name.jsonl")
    for words in (tmp_path, tmp_path / "ledger.jsonl", tmp_path / "another-name.jsonl"):
        content = json.loads(invoke("statement", words, "--json"))
        assert content["rounds"]["charged"] == 6
        assert [warning for warning in content["warnings"] if warning.startswith("only the ledger was read")]
    assert unheard.statement(tmp_path)["warnings"] == content["warnings"]
    assert "only the ledger was read" not in str(unheard.statement(base / "r")["warnings"])


@pytest.mark.parametrize(
    "left", ["metrics.jsonl", "statement.json", "vocabulary.txt", "checkpoints", "model.safetensors"]
)
def test_a_ledger_beside_any_file_of_a_run_is_not_read_alone(base, tmp_path, left):
    """A folder without its other files and without the end of its ledger would have a statement with a smaller epsilon."""
    (tmp_path / "left").mkdir()
    for name in ("ledger.jsonl", left):
        (base / "r" / name).rename(tmp_path / "left" / name)
    shorten(tmp_path / "left" / "ledger.jsonl", 4)
    for reader in ("statement", "unheard.statement"):
        with pytest.raises(LedgerError, match=r"run\.toml is missing or damaged"):
            READERS[reader](tmp_path / "left")


def test_one_charge_that_a_crash_leaves_in_the_populations_ledger_is_no_fault(base, monkeypatch):
    def power_loss(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(Ledger, "charge", power_loss)
    for _ in range(3):  # always after the charge to the population
        with pytest.raises(KeyboardInterrupt):
            list(unheard.resume(base / "r", rounds=7))
    monkeypatch.undo()
    assert len(read_run_ledger(base / "r")) == 6
    assert [report.round for report in unheard.resume(base / "r", rounds=7)] == [7]
    assert findings(base / "r") == {}


def test_a_seeded_run_that_is_repeated_continues_and_one_that_was_rolled_back_does_not(base):
    run, _ = read_saved_run(base / "other" / "run.toml")
    seeded = replace(run, training=unheard.Training(rounds=2, reproducible_seed=3))
    list(unheard.train(seeded, base / "a"))
    shutil.copytree(base / "a", base / "a-early")
    list(unheard.resume(base / "a", rounds=5))
    with pytest.raises(LedgerError, match="newest copy"):
        list(unheard.resume(base / "a-early", rounds=5))
    list(unheard.train(seeded, base / "b"))
    list(unheard.resume(base / "b", rounds=5))
    assert (base / "a" / "model.safetensors").read_bytes() == (base / "b" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("has_record", [True, False])
@pytest.mark.parametrize("name", ["r", "early"])
def test_a_populations_ledger_that_is_gone_is_never_begun_anew(base, name, has_record):
    """The store's record of its ledgers shows the loss; if the record is lost too, the run's checkpoints do."""
    (base / "store" / "ledger.jsonl").unlink()
    if not has_record:
        (base / "store" / RECORD).write_text(json.dumps(NO_LEDGERS))
    with pytest.raises(LedgerError, match=r"is missing.*Put it back"):
        list(unheard.resume(base / name, rounds=7))
    assert not (base / "store" / "ledger.jsonl").exists()
    assert "is missing" in findings(base / name)["population"]


@pytest.mark.parametrize("record", ["kept", "put back to its first state", "begun anew"])
@pytest.mark.parametrize("reader", READERS)
def test_every_reader_asks_for_the_ledger_that_the_store_has_lost(base, reader, record):
    """The lost ledger may have had more charges of the run than the folder, which may have been restored to an earlier state."""
    store = base / "store"
    (store / "ledger.jsonl").unlink()
    if record != "kept":
        (store / RECORD).write_text(json.dumps(NO_LEDGERS))
    if record == "begun anew":
        run, _ = read_saved_run(base / "other" / "run.toml")
        opened = TokenStore.open(store)
        population_ledger_of(run, opened).register("another run", {}, num_charged=0)
    said = "is missing" if record == "kept" else "(is missing|has lost the ledger|shortened or replaced)"
    with pytest.raises(LedgerError, match=rf"{said}.*[Pp]ut .* back"):
        READERS[reader](base / "early")
    assert (store / "ledger.jsonl").exists() == (record == "begun anew")


def test_a_run_is_stated_beside_a_store_of_other_users_at_the_path_of_its_own(base):
    store = base / "store"
    (store / "ledger.jsonl").unlink()
    info = json.loads((store / "corpus.json").read_text())
    (store / "corpus.json").write_text(json.dumps({**info, "name": "of next year"}))
    (store / RECORD).write_text(json.dumps(NO_LEDGERS))
    write_digests(store)
    assert unheard.statement(base / "r")["rounds"]["charged"] == 6
    with pytest.raises(LedgerError, match=r"ledger of the run's store is not where .* says"):
        READERS["statement of all runs"](base / "r")
    run, _ = read_saved_run(base / "other" / "run.toml")
    population_ledger_of(run, TokenStore.open(store)).register("another run", {"delta": 1e-5}, num_charged=0)
    assert unheard.statement(base / "r")["rounds"]["charged"] == 6
    with pytest.raises(LedgerError, match="does not list this run"):
        READERS["statement of all runs"](base / "r")


def test_a_run_can_be_stated_on_a_machine_without_its_store(base):
    shutil.rmtree(base / "store")
    assert unheard.statement(base / "r")["rounds"]["charged"] == 6


@pytest.mark.parametrize("how", ["deleted", "emptied", "damaged", "another table"])
@pytest.mark.parametrize("reader", READERS)
def test_every_reader_needs_the_run_file_to_find_the_ledger_of_the_store(base, reader, how):
    file = base / "early" / "run.toml"
    file.unlink() if how == "deleted" else file.write_text(
        {"emptied": "", "damaged": "[corpus\n", "another table": "corpus = 1\n"}[how]
    )
    with pytest.raises(UnheardError, match=r"run\.toml") as error:
        READERS[reader](base / "early")
    assert "was changed after the run began" not in str(error.value)  # the message names the damage


@pytest.mark.parametrize(
    ("name", "reader"),
    [("run.toml", reader) for reader in READERS]
    + [("metrics.jsonl", reader) for reader in ("report", "compare", "record", "resume")],
)
def test_every_reader_refuses_the_files_of_another_run(base, reader, name):
    file = base / "r" / name
    old, new = (
        ("init_seed = 0", "init_seed = 1") if name == "run.toml" else ('"accuracy_top1": 0.', '"accuracy_top1": 0.9')
    )
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))
    with pytest.raises(UnheardError, match=rf"{name} .*(is|was).* another (run|configuration)"):
        READERS[reader](base / "r")


def test_evaluations_are_refused_if_the_newest_checkpoint_is_listed_and_cannot_be_found(base):
    folder = RunFolder(base / "r")
    newest = sorted(folder.checkpoints.glob("round-*.safetensors"))[-1]
    newest.unlink()
    newest.symlink_to("nowhere")
    with pytest.raises(CheckpointCorrupt, match=newest.name):
        folder.read_metrics()


@pytest.mark.parametrize("content", ["", "x" * 70_000, "of a run"])
def test_a_damaged_ledger_of_a_store_is_named_in_its_statement(base, content):
    file = base / "store" / "ledger.jsonl"
    file.write_text((base / "r" / "ledger.jsonl").read_text() if content == "of a run" else content)
    with pytest.raises(LedgerError, match=r"store/ledger\.jsonl") as error:
        invoke("statement", base / "store")
    assert "run.toml" not in str(error.value)


@pytest.mark.parametrize("how", ["added", "changed", "deleted", "emptied", "dangling"])
def test_every_reader_needs_the_record_of_the_nodes_that_the_run_began_with(base, how):
    folder = RunFolder(base / "r")
    folder.federated.write_text('{"secure_aggregation": false}')
    if how != "added":  # now the checkpoint is that of a federated run
        run, _ = read_saved_run(folder.run_file)
        save_checkpoint(folder, run.model, newest_checkpoint(folder).state, Ledger.read(folder.ledger), keep=1)
        assert Ledger.read(folder.ledger).facts["federated"] == {"secure_aggregation": False}
        READERS["record"](folder.path)
        folder.federated.unlink()
    if how == "dangling":
        folder.federated.symlink_to("nowhere")
    if how in ("changed", "emptied"):
        folder.federated.write_text("" if how == "emptied" else '{"secure_aggregation": true}')
    for reader in ("unheard.statement", "record", "export", "resume"):
        with pytest.raises(UnheardError, match=r"federated\.json"):
            READERS[reader](folder.path)
    assert "federated.json" in findings(folder.path)["checkpoints"]


@pytest.mark.parametrize("how", ["added", "deleted"])
def test_a_model_without_its_checkpoints_names_the_nodes_that_its_run_began_with(base, how):
    folder = RunFolder(base / "r")
    folder.federated.write_text('{"secure_aggregation": true}')
    if how == "deleted":
        run, _ = read_saved_run(folder.run_file)
        save_checkpoint(folder, run.model, newest_checkpoint(folder).state, Ledger.read(folder.ledger), keep=1)
        folder.federated.unlink()
    shutil.rmtree(folder.checkpoints)
    for reader in ("unheard.statement", "record", "export"):
        with pytest.raises(UnheardError, match=r"federated\.json"):
            READERS[reader](folder.path)


def test_a_model_that_is_written_again_names_its_nodes_and_the_models_before_it(base, tmp_path):
    training = unheard.Training(rounds=1, init_from=str(base / "r"))
    run, _ = read_saved_run(base / "r" / "run.toml")
    list(unheard.train(replace(run, training=training, budget=None), tmp_path / "child"))
    folder = RunFolder(tmp_path / "child")
    facts = read_facts(folder.model)
    assert facts["earlier"] == [Ledger.read(folder.ledger).facts["start"]["sha256"]]
    assert facts["nodes"] is None
    folder.model.unlink()
    list(unheard.resume(folder.path))
    assert read_facts(folder.model) == facts


@pytest.mark.parametrize(
    ("start", "models"),
    [
        ({}, []),
        ({"from": "seed 0", "sha256": "a"}, []),  # many runs begin with these weights
        ({"from": "its base", "sha256": "a", "base_sha256": "b"}, ["b"]),
        ({"from": "an earlier run", "sha256": "a"}, ["a"]),
        ({"from": "a model declared public", "sha256": "a", "base_sha256": "b", "earlier": ["c", "d"]}, list("abcd")),
        ({"from": "a model file of unknown cost", "sha256": "a", "earlier": ["c"]}, ["a", "c"]),
    ],
)
def test_the_models_before_a_run_are_those_that_were_trained(start, models):
    assert earlier_models({"start": start}) == models
    assert earlier_models({}) == []


def test_the_first_checkpoint_remembers_the_populations_ledger(base):
    run, _ = read_saved_run(base / "other" / "run.toml")
    training = unheard.train(run, base / "new")
    training.close()
    (base / "store" / "ledger.jsonl").unlink()
    with pytest.raises(LedgerError, match="is missing"):
        list(unheard.resume(base / "new"))


@pytest.mark.parametrize("how", ["another", "shortened", "copy that was charged less"])
def test_a_populations_ledger_that_was_swapped_is_refused(base, how):
    file = base / "store" / "ledger.jsonl"
    if how == "another":
        file.unlink()
        PopulationLedger.open(file, {"corpus": "c"})
    else:
        shorten(file, 9 if how == "shortened" else 4)
    before = file.read_bytes()
    name = "r" if how != "copy that was charged less" else "other"
    with pytest.raises(LedgerError, match=r"shortened or replaced.*Put the right one back"):
        list(unheard.resume(base / name, rounds=7))
    assert file.read_bytes() == before
    assert "population" in findings(base / name)


def test_a_ledger_that_has_moved_is_not_begun_anew_where_it_went(base):
    (base / "elsewhere").mkdir()
    away = PopulationLedger.open(base / "elsewhere" / "ledger.jsonl", {"corpus": "c"})
    here = PopulationLedger.open(base / "store" / "ledger.jsonl", {})
    away.join(PopulationLedger.open(base / "store" / "ledger.jsonl", {}))
    away.path.unlink()
    with pytest.raises(UnheardError, match="is missing"):
        here.register("x", {}, num_charged=0)


MODEL_READERS = {
    **{name: READERS[name] for name in ("statement", "report", "compare", "record", "export")},
    "predict": lambda folder: invoke("predict", folder, "w1 w2"),
    "evaluate": lambda folder: invoke("evaluate", folder),
    "unheard.evaluate": lambda folder: unheard.evaluate(folder, max_tokens=100),
    "Released": unheard.Released.open,
}


@pytest.mark.parametrize("reader", MODEL_READERS)
def test_a_model_of_another_run_is_refused(base, reader):
    MODEL_READERS[reader](base / "r")
    shutil.copy(base / "other" / "model.safetensors", base / "r" / "model.safetensors")
    with pytest.raises(LedgerError, match=r"of another run.*own model back"):
        MODEL_READERS[reader](base / "r")
    assert "of another run" in findings(base / "r")["checkpoints"]


def test_a_model_of_version_0_1_is_compared_with_its_checkpoint(base, model):
    folder = RunFolder(base / "r")
    params_P = newest_checkpoint(folder).state.params_P
    save_model(folder.model, model, params_P, {"round": 6})
    assert unheard.Released.open(base / "r").params_P.equal(params_P)
    save_model(folder.model, model, params_P + 1, {"round": 6})
    with pytest.raises(CheckpointCorrupt, match="own model back"):
        unheard.Released.open(base / "r")


def test_each_round_is_evaluated_once_in_the_metrics_after_a_resume(base):
    file = base / "early" / "metrics.jsonl"
    row = json.loads(file.read_text().splitlines()[-1])
    run, _ = read_saved_run(base / "early" / "run.toml")
    list(unheard.train(run, base / "new"))
    file = base / "new" / "metrics.jsonl"
    with open(file, "a") as lines:  # the state after a kill in rounds without a checkpoint
        lines.write(json.dumps({**row, "round": 4, "accuracy_top1": 0.999}) + "\n" + '{"round": 5, "acc')
    list(unheard.resume(base / "new", rounds=6))
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["round"] for row in rows] == [2, 4, 6]
    assert rows[1]["accuracy_top1"] != 0.999


@pytest.mark.parametrize(
    ("name", "content", "check"),
    [
        ("metrics.jsonl", '{"round": 2, "accuracy_top1": "much"}\n', "metrics"),
        ("metrics.jsonl", '{"round": 2, "accuracy_top1": 7.0}\n', "metrics"),
        ("metrics.jsonl", "[" * 200_000 + "\n", "metrics"),
        ("metrics.jsonl", "nothing\n", "metrics"),
        ("metrics.jsonl", "", "metrics"),
        ("metrics.jsonl", "all lines but the last", "metrics"),
        ("metrics.jsonl", "all lines but the second", "metrics"),
        ("tokens.json", "{", "tokens"),
        ("tokens.json", "[" * 200_000, "tokens"),
        ("tokens.json", '{"kind": "nonsense"}', "tokens"),
        ("tokens.json", '{"kind": "words", "lowercase": false}', "tokens"),
        ("measures.json", "{", "measures"),
        ("measures.json", "[" * 200_000, "measures"),
        ("measures.json", '{"format": 1, "tokens": {}}', "measures"),
    ],
)
def test_verify_notices_damaged_metrics_tokens_and_measures(base, name, content, check):
    assert findings(base / "r") == {}
    lines = (base / "r" / name).read_text().splitlines(keepends=True) if "all lines" in content else []
    kept = {"all lines but the last": lines[:-1], "all lines but the second": lines[:1] + lines[2:]}.get(content)
    (base / "r" / name).write_text(content if kept is None else "".join(kept))
    found = findings(base / "r")
    assert list(found) == [check]
    if kept is not None:  # detected by the missing rounds, not only by the digest
        assert "lacks the evaluation" in found[check]


def test_verify_knows_the_tokenizer_of_a_run_without_its_store(base):
    shutil.rmtree(base / "store")
    assert "tokens" not in findings(base / "r")
    file = base / "r" / "tokens.json"
    file.write_text('{"kind": "words", "lowercase": false}')
    assert "another tokenizer" in findings(base / "r")["tokens"]
    file.unlink()
    assert "tokens.json is missing" in findings(base / "r")["tokens"]


def test_a_model_is_not_opened_without_the_record_of_its_tokenizer(base):
    (base / "r" / "tokens.json").unlink()
    with pytest.raises(RunFolderError, match=r"tokens\.json is not the one that the run began with"):
        released.Released.open(base / "r")


def test_metrics_may_be_deleted_and_begin_anew(base):
    """Neither the model nor the ledger needs metrics.jsonl. The messages about a damaged file recommend to delete it."""
    (base / "r" / "metrics.jsonl").unlink()
    assert findings(base / "r") == {}
    list(unheard.resume(base / "r", rounds=9))
    assert findings(base / "r") == {}


def test_verify_notices_a_store_without_its_record(base):
    (base / "store" / "corpus.json").unlink()
    assert "corpus.json is missing" in findings(base / "r")["store"]
    with pytest.raises(CorpusError, match=r"corpus\.json is missing beside the other files"):
        unheard.evaluate(base / "r")


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [("vocabulary.txt", "w1\n", "v1\n"), ("tokens.json", '"words"', '"characters"'), ("tokens.json", None, None)],
)
@pytest.mark.parametrize("reader", ["predict", "Released", "evaluate", "unheard.evaluate"])
def test_words_and_tokens_of_another_run_are_refused(base, reader, name, old, new):
    file = base / "r" / name
    if old is None:
        file.unlink()
    else:
        assert old in file.read_text()
        file.write_text(file.read_text().replace(old, new, 1))
    with pytest.raises(UnheardError, match=rf"{name} is not the one that the run began with"):
        MODEL_READERS[reader](base / "r")


def other_claim(content: bytes) -> bytes:
    """A statement with a smaller epsilon."""
    saved = json.loads(content)
    return json.dumps({**saved, "claimed": {**saved["claimed"], "epsilon": 0.1}}).encode()


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("vocabulary.txt", lambda _: None, "Copy vocabulary.txt from the corpus"),
        ("vocabulary.txt", lambda content: content.replace(b"w1\n", b"v1\n", 1), "copy it from the corpus"),
        ("vocabulary.txt", lambda _: b"\xff\xfe", "from the corpus"),
        ("vocabulary.txt", lambda content: content + b"w1\n", "copy it from the corpus"),
        ("tokens.json", lambda _: None, "copy it from the corpus"),
        ("tokens.json", lambda _: b"[]", "copy it from the corpus"),
        ("tokens.json", lambda content: content.replace(b'"words"', b'"characters"'), "copy it from the corpus"),
        ("statement.json", lambda content: content[:-9], "Delete it"),
        ("statement.json", lambda _: b"[]", "Delete it"),
        ("statement.json", other_claim, "Delete it"),
    ],
)
def test_a_run_is_not_continued_with_damaged_words_tokens_or_statement(base, name, change, words):
    file, population = base / "r" / name, base / "store" / "ledger.jsonl"
    before, content = population.read_bytes(), change(file.read_bytes())
    file.unlink()
    if content is not None:
        file.write_bytes(content)
    for rounds in (None, 7):
        with pytest.raises(UnheardError, match=words) as raised:
            list(unheard.resume(base / "r", rounds=rounds))
        assert str(file) in str(raised.value)
    assert population.read_bytes() == before
    assert (file.read_bytes() if file.exists() else None) == content


def test_a_run_whose_statement_covers_only_the_first_charges_is_continued(base):
    """A full disk can leave a charge in the ledger that the statement of the same process does not cover."""
    file, ledger = base / "r" / "statement.json", Ledger.read(base / "r" / "ledger.jsonl")
    whole = json.loads(file.read_text())
    older = compute_statement(ledger.facts, ledger.entries[:-1])
    for ledger_part in ({"head": "0" * 64}, {"charges": 0}, {"charges": -1}):
        file.write_text(json.dumps({**older, "ledger": {**older["ledger"], **ledger_part}}))
        with pytest.raises(UnheardError, match="Delete it"):
            list(unheard.resume(base / "r"))
    file.write_text(json.dumps(older))
    list(unheard.resume(base / "r"))
    assert json.loads(file.read_text()) == whole


@pytest.mark.parametrize("reader", ["predict", "Released", "evaluate", "unheard.evaluate"])
def test_words_of_another_number_are_refused_also_where_the_ledger_names_none(base, reader, monkeypatch):
    """Ledgers of version 0.1.0 do not name the word list."""
    facts = Ledger.read(base / "r" / "ledger.jsonl").facts
    older = SimpleNamespace(facts={name: fact for name, fact in facts.items() if name != "vocabulary"})
    monkeypatch.setattr(released, "read_run_ledger", lambda _: older)
    file = base / "r" / "vocabulary.txt"
    file.write_text(file.read_text() + "more\n")
    with pytest.raises(UnheardError, match="has 51 words, the model 50 rows"):
        MODEL_READERS[reader](base / "r")


def test_a_model_is_not_measured_on_a_store_of_other_words(base, tmp_path):
    for words in (["a", "b"], [f"w{i}" for i in reversed(range(47))]):
        users = [np.array([0, 3, 4, 1])] * 2
        other = write_store(tmp_path / str(len(words)), train=users, held_out=users, vocabulary=Vocabulary.of(words))
        for read in (
            lambda folder, store: unheard.evaluate(folder, corpus=store.path),
            lambda folder, store: invoke("evaluate", folder, "--corpus", store.path),
        ):
            with pytest.raises(ModelError, match="another vocabulary"):
                read(base / "r", other)


@pytest.mark.parametrize("reader", ["predict", "Released", "evaluate", "unheard.evaluate"])
def test_a_run_that_has_released_no_model_says_so(base, reader):
    (base / "r" / "model.safetensors").unlink()
    with pytest.raises(RunFolderMissing, match="has released no model yet"):
        MODEL_READERS[reader](base / "r")


@pytest.mark.parametrize(
    ("lost", "error"),
    [("model.safetensors", r"has lost it.*unheard resume"), ("vocabulary.txt", "Copy vocabulary.txt")],
)
def test_a_page_is_not_made_of_a_run_that_has_lost_its_model_or_its_words(base, lost, error):
    (base / "r" / lost).unlink()
    for words in (["report", base / "r", "--out", base / "page"], ["compare", base / "r"]):
        with pytest.raises(RunFolderError, match=error):
            invoke(*words)
    assert not (base / "page" / "index.html").exists()


@pytest.mark.parametrize("reader", ["predict", "Released", "evaluate", "unheard.evaluate"])
def test_an_older_model_of_the_same_run_is_refused(base, reader, monkeypatch):
    monkeypatch.setattr(released, "SECONDS_TO_WRITE_A_MODEL", 0.0)
    newest = (base / "r" / "model.safetensors").read_bytes()
    shutil.copy(base / "early" / "model.safetensors", base / "r" / "model.safetensors")
    with pytest.raises(CheckpointCorrupt, match="is the model after round 2, but there is a checkpoint after round 6"):
        MODEL_READERS[reader](base / "r")
    list(unheard.resume(base / "r"))
    assert (base / "r" / "model.safetensors").read_bytes() == newest
    shutil.copy(
        base / "r" / "checkpoints" / "round-00000006.safetensors", base / "r" / "checkpoints" / "round-x.safetensors"
    )
    with pytest.raises(CheckpointCorrupt, match="round-x"):
        MODEL_READERS[reader](base / "r")


def test_a_run_is_not_measured_on_damaged_text_nor_on_another_store_at_its_path(base, tmp_path):
    file = next((base / "store" / "held_out").glob("*.tokens"))
    content = file.read_bytes()
    file.write_bytes(content[::-1])
    for words in (
        ["evaluate", base / "r"],
        ["evaluate", base / "r", "--full"],
        ["report", base / "r", "--out", base / "p"],
    ):
        with pytest.raises(CorpusError, match="does not have the content that it was written with"):
            invoke(*words)
    file.write_bytes(content)
    words = TokenStore.open(base / "store").vocabulary
    users = [np.array([0, 3, 4, 1])] * 20
    other = write_store(tmp_path / "other", train=users, held_out=users, vocabulary=words, info={"made": "otherwise"})
    run_file = base / "r" / "run.toml"
    run_file.write_text(run_file.read_text().replace(str(base / "store"), str(other.path)))
    with pytest.raises(CorpusError, match=r"is not the store that this run began with.*--corpus"):
        invoke("evaluate", base / "r", "--full")
    assert not (base / "r" / "measures.json").exists()
    invoke("evaluate", base / "r", "--corpus", other.path)


def test_measures_with_other_figures_are_never_shown(base):
    invoke("evaluate", base / "r", "--full")
    file = base / "r" / "measures.json"
    whole = json.loads(file.read_text())
    assert RunRecord.read(base / "r").measures == whole
    for changed in ({"format": 3}, {"sha256": "0" * 64}, {"tokens": {**whole["tokens"], "accuracy_top1": 0.99}}):
        file.write_text(json.dumps({**whole, **changed}))
        assert RunRecord.read(base / "r").measures is None
        assert "is damaged" in findings(base / "r")["measures"]
    older = {key: value for key, value in whole.items() if key != "sha256"} | {"format": 1}
    file.write_text(json.dumps(older))  # as older versions wrote it
    assert RunRecord.read(base / "r").measures == older


def test_measures_of_another_model_are_not_said_to_fit(base):
    """Of an older model of this run, whose digest nothing records, or of another run."""
    invoke("evaluate", base / "other", "--full")
    shutil.copy(base / "other" / "measures.json", base / "r" / "measures.json")
    for folder, fits in ((base / "other", True), (base / "r", None)):
        found = next(finding for finding in verify(folder) if finding.name == "measures")
        assert (found.fits, "not checked" in found.words) == (fits, fits is None)
    invoke("verify", base / "r")


@pytest.mark.parametrize("content", ["{", "[" * 200_000, "null", '{"format": 1, "model_sha256": "MODEL"}'])
def test_damaged_measures_are_measured_again_and_never_shown(base, content):
    digest = RunFolder(base / "r").model_digest()
    (base / "r" / "measures.json").write_text(content.replace("MODEL", digest))
    assert RunRecord.read(base / "r").measures is None
    invoke("compare", base / "r")
    assert RunRecord.read(base / "r").measures is not None
    assert findings(base / "r") == {}


@pytest.mark.parametrize("ledger", ["", "  ", ".", "./", "x/..", Path()])
def test_an_empty_path_of_a_ledger_is_refused(base, tmp_path, monkeypatch, ledger):
    monkeypatch.chdir(tmp_path)
    run, _ = read_saved_run(base / "other" / "run.toml")
    with pytest.raises(InvalidValue, match="names no file"):
        replace(run, ledger=ledger)
    with pytest.raises(InvalidValue, match="names no file"):
        open_population_ledger(base / "store", "c", [], ledger)
    assert not (tmp_path / "ledger.jsonl").exists()


@pytest.mark.skipif(os.name != "posix", reason="special files of POSIX")
@pytest.mark.parametrize("ledger", ["/proc/self/mem", "/dev/zero", "/dev/null", "fifo", "loop"])
def test_a_special_file_is_refused_as_a_ledger_at_once(tmp_path, ledger):
    """Opening a named pipe would block, and no lock file can be created next to a file such as /dev/zero."""
    path = Path(ledger) if ledger.startswith("/") else tmp_path / ledger
    if ledger == "fifo":
        os.mkfifo(path)
    elif ledger == "loop":
        path.symlink_to(path)
    for read in (PopulationLedger.read, Ledger.read, lambda path: open_population_ledger(tmp_path, "c", [], path)):
        with pytest.raises(LedgerError, match="not a regular file") as error:
            read(path)
        assert "\n" not in str(error.value)


def test_a_run_folder_that_has_lost_its_ledger_is_not_opened(tmp_path):
    (tmp_path / "run.toml").write_text("")
    with pytest.raises(RunFolderMissing, match="has lost its ledger"):
        RunFolder.open(tmp_path)
    (tmp_path / "ledger.jsonl").write_text("")
    assert RunFolder.open(tmp_path).path == tmp_path
