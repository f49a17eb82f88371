"""Personal models learn only from the earlier text, improve on the later text, and only their owner can read them."""

import importlib.util
import json
import math
import os
import shutil
import stat
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import unheard
from unheard.corpus.vocabulary import BOS
from unheard.deployment import personalize as module
from unheard.deployment.export import export
from unheard.deployment.keyboard.suggestions import Suggester
from unheard.deployment.model import open_model, run_statement
from unheard.deployment.personalize import (
    MODEL,
    RECORD,
    PersonalSettings,
    check_output_folder,
    personalize,
    save_personal,
    split_by_time,
)
from unheard.errors import InputError, InvalidValue, RunFolderError, RunFolderExists, UnheardError
from unheard.evaluation.next_word import evaluate
from unheard.run_folder import RunFolder
from unheard.training.checkpoint import load_model
from unheard.training.released import Released


@pytest.fixture(scope="module")
def released(run_folder) -> Released:
    return Released.open(run_folder)


def habits(messages: int, seed: int = 0) -> str:
    """The text of a user who repeats a few sentences that the shared model has not seen."""
    said = ["w5 w40 w7 w33", "w11 w2 w44", "w9 w30 w9 w30 w1"]
    return "\n".join(said[i] for i in np.random.default_rng(seed).integers(len(said), size=messages))


@pytest.fixture(scope="module")
def made(released):
    return personalize(released, habits(200), PersonalSettings(learning_rate=1.0))


def test_a_personal_model_predicts_more_of_the_persons_later_words(made):
    assert made.passes >= 1
    assert made.after["accuracy_top1"] > made.before["accuracy_top1"] + 0.2
    assert made.after["tokens"] == made.before["tokens"]


def test_personalizing_never_learns_from_the_later_text(released):
    """Only the later fifth differs, so the models must be equal bit for bit."""
    how = PersonalSettings(learning_rate=1.0, passes=2)
    earlier, later = split_by_time(released, habits(200), how.later)
    lines = habits(200).splitlines()
    keep = int((earlier == BOS).sum())
    other = "\n".join(lines[:keep] + list(reversed(lines[keep:])))
    assert int((later == BOS).sum()) == len(lines) - keep
    one, two = personalize(released, habits(200), how), personalize(released, other, how)
    assert torch.equal(one.params_P, two.params_P)


def test_the_passes_are_chosen_on_the_middle_part_and_the_latest_is_only_measured(released, monkeypatch):
    how = PersonalSettings(learning_rate=1.0, passes=3)
    earlier, later = split_by_time(released, habits(200), how.later)
    texts = []

    def evaluated(model, params_P, users, **rest):
        texts.append(users[0].tokens)
        return evaluate(model, params_P, users, **rest)

    monkeypatch.setattr(module, "evaluate", evaluated)
    personalize(released, habits(200), how)
    *chosen_on, before, after = texts
    assert len(chosen_on) >= 2
    assert all(np.array_equal(text, earlier[-len(text) :]) and len(text) < len(earlier) for text in chosen_on)
    assert np.array_equal(before, later)
    assert np.array_equal(after, later)


def test_the_split_is_by_time_and_between_messages(released):
    earlier, later = split_by_time(released, habits(100), 0.2)
    assert earlier[0] == later[0] == BOS
    assert len(later) / (len(earlier) + len(later)) == pytest.approx(0.2, abs=0.03)
    whole, _ = split_by_time(released, habits(100), 0.05)
    assert (whole[: len(earlier)] == earlier).all()


def test_one_long_message_is_split_too(released):
    earlier, later = split_by_time(released, "w1 " * 300, 0.2)
    assert len(later) == pytest.approx(0.2 * 302, abs=2)
    assert len(earlier) + len(later) == 302


def test_text_that_teaches_nothing_leaves_the_shared_model(released):
    """With such a large learning rate every pass makes the model worse, so none is kept and the model does not change."""
    wild = personalize(released, habits(200), PersonalSettings(learning_rate=1e6))
    assert wild.passes == 0
    assert wild.before == wild.after


@pytest.mark.parametrize(
    ("losses", "kept"),
    [([2.0], 0), ([math.nan], 0), ([math.inf], 0), ([1.0, math.nan], 1), ([1.0, 0.9, 0.9], 2), ([1.9, 1.8, 1.7], 3)],
)
def test_a_pass_is_kept_only_if_its_loss_is_a_lower_number(released, monkeypatch, losses, kept):
    """The loss of the shared model is 2. The last number of `losses` is that of the pass that ends the search."""
    expected = iter([2.0, *losses, 0.0, 0.0])  # the last two are those of the latest part
    monkeypatch.setattr(module, "evaluate", lambda *_, **__: {"loss": next(expected)})
    monkeypatch.setattr(module, "one_pass", lambda released, params_P, *_: params_P)
    assert personalize(released, habits(100), PersonalSettings(passes=3)).passes == kept
    assert next(expected, None) is None


def test_the_shared_model_is_not_touched(released, run_folder, made):
    assert torch.equal(Released.open(run_folder).params_P, released.params_P)


@pytest.mark.parametrize("text", ["", "w1 w2 w3", "\n\n\n"])
def test_too_little_text_is_refused_with_advice(released, text):
    with pytest.raises(InputError, match="one message on each line"):
        personalize(released, text)


@pytest.mark.parametrize("bad", [dict(passes=0), dict(later=0.9), dict(learning_rate=-1.0)])
def test_settings_that_make_no_sense_are_refused(bad):
    with pytest.raises(InvalidValue):
        PersonalSettings(**bad)


@pytest.fixture
def folder(released, run_folder, made, tmp_path):
    out = tmp_path / "mine"
    save_personal(released, made, run_statement(RunFolder.open(run_folder)), out)
    return out


def test_a_personal_model_has_the_whole_statement_of_the_shared_model(released, made, run_folder, tmp_path):
    statement = {**run_statement(RunFolder.open(run_folder)), "warnings": ["one warning", "another"]}
    save_personal(released, made, statement, tmp_path / "mine")
    assert open_model(tmp_path / "mine").statement == json.loads(json.dumps(statement))
    record = json.loads((tmp_path / "mine" / RECORD).read_text())
    assert (record["passes"], record["on_later_text"]) == (made.passes, {"before": made.before, "after": made.after})


def test_only_its_owner_can_read_it(folder):
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {path.name for path in folder.iterdir()} == {RECORD, MODEL}
    for path in folder.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_an_empty_folder_that_others_could_read_becomes_the_owners_alone(released, made, run_folder, tmp_path):
    out = tmp_path / "open"
    out.mkdir(mode=0o777)
    os.chmod(out, 0o777)
    save_personal(released, made, {}, out)
    assert stat.S_IMODE(out.stat().st_mode) == 0o700


def test_a_personal_model_opens_in_the_keyboard(folder, made):
    model = open_model(folder)
    assert model.kind == "personal"
    assert model.predict("w5")[0][0] == "w40"
    assert len(Suggester(model).suggest("w5 ")) == 3
    assert "one person's own text" in json.loads((folder / RECORD).read_text())["personal"]


def test_no_other_command_takes_it_for_a_run(folder, tmp_path, model, run):
    with pytest.raises(RunFolderError):
        Released.open(folder)
    with pytest.raises(RunFolderError):
        RunFolder.open(folder)
    with pytest.raises(RunFolderError):
        unheard.resume(folder)
    with pytest.raises(RunFolderError):
        export(folder, tmp_path / "out")
    with pytest.raises(UnheardError):
        load_model(folder / MODEL, model)
    for start in (folder, folder / MODEL):  # not even if it is declared public
        begun = replace(run, training=replace(run.training, init_from=str(start), init_is_public=True))
        with pytest.raises(UnheardError):
            unheard.train(begun, tmp_path / "from-personal")
    assert not (tmp_path / "from-personal").exists()


@pytest.mark.parametrize("inside", ["", "mine", "checkpoints/mine", "a/b/c"])
def test_a_personal_model_is_never_written_into_a_run_folder(run_folder, tmp_path, inside):
    copy = tmp_path / "run"
    shutil.copytree(run_folder, copy)
    with pytest.raises(InvalidValue, match="shared"):
        check_output_folder(copy / inside)
    (tmp_path / "link").symlink_to(copy)
    with pytest.raises(InvalidValue, match="shared"):
        check_output_folder(tmp_path / "link" / "mine")


@pytest.mark.parametrize("name", ["ledger.jsonl", "model.safetensors", "checkpoints", "export.json", "corpus.json"])
@pytest.mark.parametrize("inside", [".", "mine", "a/b/c/mine"])
def test_a_personal_model_is_never_written_into_a_folder_with_any_file_of_a_run_an_export_or_a_corpus(
    tmp_path, name, inside
):
    (tmp_path / name).mkdir() if name == "checkpoints" else (tmp_path / name).touch()
    with pytest.raises(InvalidValue, match=f"a folder that may be shared, because it holds {name}"):
        check_output_folder(tmp_path / inside)


def test_a_personal_model_may_lie_beside_a_run_file(tmp_path):
    """`unheard init` writes run.toml into the current folder."""
    (tmp_path / "run.toml").write_text("")
    assert check_output_folder(tmp_path / "mine") == (tmp_path / "mine").resolve()


def test_a_folder_that_holds_something_is_left_alone(tmp_path):
    (tmp_path / "diary.txt").write_text("mine")
    with pytest.raises(RunFolderExists):
        check_output_folder(tmp_path)


def test_a_damaged_personal_model_is_named(folder):
    (folder / MODEL).write_bytes(b"nothing")
    with pytest.raises(RunFolderError, match="unheard personalize"):
        open_model(folder)


def test_a_changed_file_of_a_personal_model_is_an_error(released, made, run_folder, tmp_path):
    """The statement that is shown, and the parameters, are those that were written together."""
    statement = run_statement(RunFolder.open(run_folder))
    for name, said in (("mine", statement), ("other", {**statement, "warnings": []})):
        save_personal(released, made, said, tmp_path / name)
    folder, record = tmp_path / "mine", json.loads((tmp_path / "mine" / RECORD).read_text())
    smaller = {**record["statement_of_the_shared_model"], "claim": "ε = 0"}
    other = {**json.loads((tmp_path / "other" / RECORD).read_text()), "params_sha256": "0" * 64}
    without = {key: value for key, value in record.items() if key != "sha256"}
    for changed in (
        {**record, "statement_of_the_shared_model": smaller},
        {**record, "passes": 0},
        other,
        without,
        [],
        3,
    ):
        (folder / RECORD).write_text(json.dumps(changed))
        with pytest.raises(RunFolderError, match="unheard personalize"):
            open_model(folder)
    older = {key: value for key, value in without.items() if key != "params_sha256"}  # as older versions wrote it
    (folder / RECORD).write_text(json.dumps(older))
    assert open_model(folder).statement == statement
    (folder / RECORD).write_text(json.dumps(record))
    content = (folder / MODEL).read_bytes()
    (folder / MODEL).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(RunFolderError, match="was changed"):
        open_model(folder)
    (folder / MODEL).unlink()
    os.mkfifo(folder / MODEL)
    with pytest.raises(RunFolderError, match="not a regular file"):
        open_model(folder)


def test_models_with_features_and_other_cells_can_be_finished_too(released, plan):
    for kind in ("tied_gru", "tied_lstm"):
        size = dict(vocabulary_size=50, embedding_size=6, hidden_size=8, user_features=2)
        model = module.MODELS[kind](**size)
        other = replace(released, run=replace(released.run, model=model), params_P=model.initial(0))
        found = personalize(other, habits(60), PersonalSettings(passes=1, learning_rate=0.5))
        assert found.after["loss"] <= found.before["loss"]


def test_the_examples_writer_is_the_one_of_that_many_words_oldest_message_first():
    spec = importlib.util.spec_from_file_location(
        "one_writer", Path(__file__).parents[2] / "examples" / "one_writer.py"
    )
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    said = [
        {"sender": "a", "timestamp": "2020-01-02", "text": "one\ntwo three"},
        {"sender": "b", "timestamp": "2020-01-01", "text": "just these"},
        {"sender": "a", "timestamp": "2020-01-01", "text": "four"},
        {"sender": "a", "timestamp": "2020-01-03", "text": "  "},
    ]
    assert example.one_writer(said, 5) == ["four", "one two three"]
    assert example.one_writer(said, 1) == ["just these"]
