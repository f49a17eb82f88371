"""A run that cannot be trained or continued is refused before anything is charged or created."""

import math
import re
import subprocess
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.stores import uncharged_copy

import unheard
from unheard.corpus.store import write_store
from unheard.errors import (
    CheckpointCorrupt,
    CorpusError,
    InvalidValue,
    LedgerError,
    ModelError,
    PrivacyError,
    UnheardError,
)
from unheard.mechanism.noise import DistributedGaussianNoise
from unheard.parameters import Layout
from unheard.privacy.ledger import Ledger
from unheard.privacy.run_ledger import saved_positions
from unheard.run_folder import RunFolder
from unheard.training import checkpoint, initialise
from unheard.training.checkpoint import checkpoint_files, load_model, newest_checkpoint, save_checkpoint
from unheard.training.initialise import restore_state, streams_of
from unheard.training.round import State


@pytest.mark.parametrize("empty", ["train", "held_out"])
def test_a_store_without_users_to_train_on_or_to_hold_out_is_refused(run, store, tmp_path, empty):
    users = {name: [] if name == empty else [np.array([0, 3, 4, 1])] * 3 for name in ("train", "held_out")}
    write_store(tmp_path / "store", **users, vocabulary=store.vocabulary, info=store.info)
    with pytest.raises(CorpusError, match="needs users to train on and others held out"):
        unheard.train(replace(run, corpus=tmp_path / "store"), tmp_path / "r")
    assert [path.name for path in tmp_path.iterdir()] == ["store"]
    assert not (tmp_path / "store" / "ledger.jsonl").exists()


@pytest.mark.parametrize("is_public", [False, True])
def test_a_start_that_is_not_there_is_named(run, store, tmp_path, is_public):
    copy = uncharged_copy(store.path, tmp_path / "store")
    training = replace(run.training, init_from=str(tmp_path / "nowhere"), init_is_public=is_public)
    with pytest.raises(InvalidValue, match="neither a run folder nor a model file"):
        unheard.train(replace(run, corpus=copy, training=training), tmp_path / "r")
    assert not (copy / "ledger.jsonl").exists()


def test_a_checkpoint_of_another_model_is_not_continued(run, tmp_path):
    """The file is intact: only the number of parameters shows that it belongs to another run."""
    unheard.train(run, tmp_path / "r").close()
    folder, larger = RunFolder(tmp_path / "r"), replace(run.model, hidden_size=9)
    ledger = Ledger.read(folder.ledger)
    save_checkpoint(folder, larger, State(round=0, params_P=larger.initial(0)), ledger, keep=9)  # pyright: ignore[reportArgumentType]
    with pytest.raises(CheckpointCorrupt, match="does not fit this run's model"):
        restore_state(run, folder, torch.device("cpu"))
    with pytest.raises(CheckpointCorrupt, match="does not fit this run's model"):
        list(unheard.resume(folder.path))
    assert len(Ledger.read(folder.ledger)) == 0


@pytest.mark.parametrize("lost", ["run_hash", "corpus", "start"])
def test_a_seeded_run_whose_ledger_does_not_name_its_settings_store_and_start_is_not_continued(run, lost):
    """Streams whose key lacks one of these facts would be shared with other runs."""
    seeded = replace(run, training=replace(run.training, reproducible_seed=3))
    whole = {"randomness": {"streams": "scoped"}, "run_hash": "a", "corpus": "b", "start": {"sha256": "c"}}
    streams_of(seeded, whole, "text")
    for other in (None, {}, 7):
        with pytest.raises(LedgerError, match="does not name the settings"):
            streams_of(seeded, {**whole, lost: {"sha256": other} if lost == "start" else other}, "text")


def test_parameters_that_are_not_of_the_model_are_neither_split_nor_joined():
    layout = Layout.of({"a": torch.zeros(2, 3), "b": torch.zeros(4)})
    parts = layout.split(torch.arange(10.0))
    assert torch.equal(layout.join(parts), torch.arange(10.0))
    for length in (0, 9, 11):
        with pytest.raises(ModelError, match="does not fit a model of 10 parameters"):
            layout.split(torch.zeros(length))
    for other in ({"a": parts["a"]}, {**parts, "c": parts["b"]}, {"a": parts["a"], "c": parts["b"]}):
        with pytest.raises(ModelError, match="do not match the model's layers"):
            layout.join(other)
    for other in ({**parts, "a": parts["a"].T}, {**parts, "b": torch.zeros(5)}, {**parts, "a": torch.zeros(6)}):
        with pytest.raises(ModelError, match="this model needs"):
            layout.join(other)


@pytest.mark.parametrize(
    ("tensors", "facts", "words"),
    [
        ({"params": torch.nan}, {}, "not a finite real number"),
        ({"params": torch.inf}, {}, "not a finite real number"),
        ({"server.momentum": torch.nan}, {}, "not a finite real number"),
        ({"server.momentum": torch.tensor([1])}, {}, "not a finite real number"),
        ({"params": torch.zeros(2, 3)}, {}, "is not a checkpoint"),
        ({}, {"people": {"ledger": "x", "length": 1}}, "is not a checkpoint"),
        ({}, {"people": "x"}, "is not a checkpoint"),
        ({}, {"metrics": {"bytes": "9", "sha256": "x"}}, "is not a checkpoint"),
        ({}, {"metrics": {"bytes": 9}}, "is not a checkpoint"),
        ({}, {"clip_norm": 0.0}, "is not a checkpoint"),
        ({}, {"clip_norm": -1.0}, "is not a checkpoint"),
        ({}, {"clip_norm": math.inf}, "is not a checkpoint"),
        ({}, {"clip_norm": math.nan}, "is not a checkpoint"),
        ({}, {"clip_norm": "large"}, "is not a checkpoint"),
        ({}, {"round": None}, "is not a checkpoint"),
        ({}, {"round": 7}, "is not a checkpoint"),
    ],
)
def test_a_checkpoint_that_was_sealed_anew_with_impossible_content_is_not_continued(
    run, tmp_path, tensors, facts, words
):
    unheard.train(run, tmp_path / "r").close()
    folder = RunFolder(tmp_path / "r")
    (file,) = checkpoint_files(folder)
    own, stated = checkpoint._load(file, "")
    for name, value in tensors.items():
        own[name] = value if isinstance(value, torch.Tensor) else torch.full_like(own["params"], value)
    checkpoint._save(file, own, {**stated, **facts})
    with pytest.raises(CheckpointCorrupt, match=words):
        newest_checkpoint(folder)
    with pytest.raises(UnheardError):
        list(unheard.resume(folder.path))
    assert len(Ledger.read(folder.ledger)) == 0


@pytest.mark.parametrize("facts", [[], "x", None, 3])
def test_a_model_or_checkpoint_whose_facts_are_no_table_is_refused(run, tmp_path, facts):
    file = tmp_path / "model.safetensors"
    checkpoint._save(file, run.model.layout.split(run.model.initial(0)), facts)
    for read in (load_model, lambda path, _: checkpoint.recorded_layout(path)):
        with pytest.raises(CheckpointCorrupt, match="does not read back"):
            read(file, run.model)


def test_a_run_without_checkpoints_is_not_begun_anew(run, tmp_path):
    unheard.train(run, tmp_path / "r").close()
    for file in checkpoint_files(RunFolder(tmp_path / "r")):
        file.unlink()
    with pytest.raises(CheckpointCorrupt, match="holds no checkpoint to resume from"):
        newest_checkpoint(RunFolder(tmp_path / "r"))


@pytest.mark.parametrize("change", [{"length": None}, {"more": 1}, None])
def test_a_checkpoint_whose_position_in_the_populations_ledger_is_of_another_form_is_refused(run, tmp_path, change):
    unheard.train(run, tmp_path / "r").close()
    (file,) = checkpoint_files(RunFolder(tmp_path / "r"))
    own, stated = checkpoint._load(file, "")
    position = {k: v for k, v in {**stated["people"], **(change or {})}.items() if v is not None}
    checkpoint._save(file, own, {**stated, "people": [] if change is None else position})
    with pytest.raises(UnheardError):
        saved_positions(RunFolder(tmp_path / "r"))


@pytest.mark.parametrize("way", ["train", "resume"])
def test_noise_that_nodes_add_needs_nodes_when_a_run_begins_and_when_it_continues(run, tmp_path, monkeypatch, way):
    """Without nodes the noise would be missing."""
    noise = DistributedGaussianNoise(noise_multiplier=1.0, min_parties=3)
    federated = replace(run, plan=replace(run.plan, noise=noise))
    if way == "resume":
        with monkeypatch.context() as patch:
            patch.setattr(initialise, "check_engine", lambda *_: None)  # as if it had begun on nodes
            unheard.train(federated, tmp_path / "r").close()
    with pytest.raises(PrivacyError, match="is added by the nodes of a federated run"):
        list(unheard.train(federated, tmp_path / "r") if way == "train" else unheard.resume(tmp_path / "r"))
    assert way == "train" or len(Ledger.read(tmp_path / "r" / "ledger.jsonl")) == 0


@pytest.mark.parametrize("rows", [49, 51])
def test_a_model_with_other_rows_than_the_store_has_words_is_refused(run, store, tmp_path, rows):
    module = unheard.ModuleModel(
        module="torch.nn:Embedding", arguments={"num_embeddings": rows, "embedding_dim": rows}, vocabulary_size=rows
    )
    for model in (replace(run.model, vocabulary_size=rows), module):
        with pytest.raises(ModelError, match=r"50|words|vocabulary"):
            unheard.train(replace(run, model=model), tmp_path / "r")
        assert not (tmp_path / "r").exists()


def test_a_ledger_names_the_commit_of_the_code_and_says_if_the_code_was_changed(tmp_path, monkeypatch):
    def git(*words: str) -> None:
        settings = ("-c", "user.name=a", "-c", "user.email=a@example.com", "-c", "commit.gpgsign=false")
        subprocess.run(["git", "-C", str(tmp_path), *settings, *words], check=True, capture_output=True)

    file = tmp_path / "initialise.py"
    file.write_text("first")
    monkeypatch.setattr(initialise, "__file__", str(file))
    assert initialise.source_commit.__wrapped__() == {}  # no repository
    git("init")
    (tmp_path / "other").touch()
    git("add", "other")
    git("commit", "-m", "another project, in whose folder the code is installed")
    assert initialise.source_commit.__wrapped__() == {}
    git("add", "initialise.py")
    git("commit", "-m", "first")
    git("tag", "v1")
    (name,) = initialise.source_commit.__wrapped__().values()
    assert re.fullmatch("[0-9a-f]{40}", name)
    file.write_text("changed")
    assert initialise.source_commit.__wrapped__() == {"commit": f"{name}-dirty"}
