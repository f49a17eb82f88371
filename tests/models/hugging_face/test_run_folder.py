"""A whole run of a Hugging Face model: declarations, refusals, the files of the run folder, and reading them back."""

import json
import shutil
import tomllib
from pathlib import Path

import pytest
import safetensors.torch
import torch
from typer.testing import CliRunner

import unheard
from unheard.errors import LedgerError, ModelError, UnprovenCombination
from unheard.models.hugging_face import base_digest
from unheard.training.initialise import build_engine
from unheard.training.run import read_run_file
from unheard.tuning.private_selection import TrialCount, select

from .conftest import model_of, run_of


@pytest.fixture(scope="module")
def trained(tmp_path_factory, base, corpus) -> Path:
    """Train a run with LoRA on copies of the base model and of the corpus, which tests may damage and charge."""
    folder = tmp_path_factory.mktemp("runs")
    shutil.copytree(base, folder / "base")
    shutil.copytree(corpus, folder / "corpus")
    for _ in unheard.train(run_of(folder / "corpus", model_of(folder / "base", "lora")), folder / "run"):
        pass
    return folder


def test_only_what_is_trained_is_in_the_run_folder_and_the_base_is_named(trained, base):
    model = model_of(base, "lora")
    released = safetensors.torch.load_file(trained / "run" / "model.safetensors")
    assert set(released) == set(model.layout.names)
    assert all("lora_" in name for name in released)
    assert model.layout.total < 0.2 * model_of(base, "all").layout.total
    assert not list((trained / "run").rglob("base*"))
    saved = tomllib.loads((trained / "run" / "run.toml").read_text())["model"]
    assert saved["base_sha256"] == model.pinned().base_sha256
    assert saved["kind"] == "hugging_face"


def test_lora_begins_where_the_base_is_and_all_begins_with_its_weights(base):
    whole, lora = model_of(base), model_of(base, "lora")
    tokens = torch.tensor([[0, 5, 6, 7]])
    one, other = (m.logits(m.layout.split(m.initial(3)), tokens) for m in (whole, lora))
    assert torch.equal(one, other)
    assert torch.equal(whole.initial(3), whole.initial(4))
    assert not torch.equal(lora.initial(3), lora.initial(4))
    assert torch.equal(lora.initial(3), lora.initial(3))


def test_a_hugging_face_run_predicts_and_is_measured_from_its_folder(trained):
    from unheard.cli.main import app

    words = [word for word, _ in unheard.Released.open(trained / "run").predict("i like " * 40)]  # beyond its context
    assert len(words) == 3
    done = CliRunner().invoke(app, ["evaluate", str(trained / "run"), "--json"])
    assert done.exit_code == 0, done.output
    assert 0 < json.loads(done.stdout)["accuracy_top1"] < 1


def test_resume_continues_also_with_the_base_in_another_place(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "moved", dirs_exist_ok=True)
    (tmp_path / "moved" / "base").rename(tmp_path / "elsewhere")
    file = tmp_path / "moved" / "run" / "run.toml"
    file.write_text(file.read_text().replace(str(trained / "base"), str(tmp_path / "elsewhere")))
    reports = list(unheard.resume(tmp_path / "moved" / "run", rounds=3, corpus=tmp_path / "moved" / "corpus"))
    assert [report.round for report in reports] == [3]


def changed(folder: Path) -> None:
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    weights["transformer.wpe.weight"][0, 0] += 1.0
    safetensors.torch.save_file(weights, folder / "model.safetensors", {"format": "pt"})


def test_other_weights_under_a_run_are_refused(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "copy")
    file = tmp_path / "copy" / "run" / "run.toml"
    file.write_text(file.read_text().replace(str(trained), str(tmp_path / "copy")))
    assert unheard.Released.open(tmp_path / "copy" / "run").predict("i like")
    changed(tmp_path / "copy" / "base")
    with pytest.raises(ModelError, match="not the model that this run began from"):
        unheard.Released.open(tmp_path / "copy" / "run")
    with pytest.raises(ModelError, match="not the model that this run began from"):
        unheard.resume(tmp_path / "copy" / "run", rounds=3)


def test_the_best_of_several_runs_names_its_base_and_continues(base, corpus, tmp_path):
    shutil.copytree(corpus, tmp_path / "corpus")
    run = run_of(tmp_path / "corpus", model_of(base, "lora"))
    folder = select([run], tmp_path / "best", TrialCount(mean=1))
    assert read_run_file(folder.run_file)[0].model.base_sha256 == run.model.pinned().base_sha256
    assert [report.round for report in unheard.resume(folder.path, rounds=3)] == [3]


def test_a_digest_edited_to_fit_other_weights_is_another_run(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "copy")
    changed(tmp_path / "copy" / "base")
    file = tmp_path / "copy" / "run" / "run.toml"
    run, _ = read_run_file(file)
    new = model_of(tmp_path / "copy" / "base", "lora").pinned().base_sha256
    assert isinstance(run.model, unheard.HuggingFaceModel)
    text = file.read_text().replace(str(trained), str(tmp_path / "copy"))
    file.write_text(text.replace(run.model.base_sha256 or "", new or ""))
    with pytest.raises(LedgerError, match="was changed after the run began"):
        unheard.resume(tmp_path / "copy" / "run", rounds=3)


@pytest.mark.parametrize("train", ["all", "lora"])
def test_weights_of_unknown_origin_are_refused_with_noise(base, corpus, tmp_path, train):
    model = model_of(base, train, base_is_public=False)
    with pytest.raises(UnprovenCombination, match="base_is_public"):
        unheard.train(run_of(corpus, model), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_statement_says_that_the_base_was_declared_public(trained):
    told = json.loads((trained / "run" / "statement.json").read_text())
    assert any("declared public" in warning for warning in told["warnings"])


def test_a_corpus_of_other_words_is_refused_with_advice(base, store, corpus, tmp_path):
    with pytest.raises(ModelError, match=r"--tokens .*tokenizer\.json"):
        unheard.train(run_of(store.path, model_of(base)), tmp_path / "run")
    other = tmp_path / "other"
    shutil.copytree(base, other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    tokenizer["model"]["merges"] = tokenizer["model"]["merges"][:-1]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ModelError, match="another tokenizer"):
        unheard.train(run_of(corpus, model_of(other)), tmp_path / "run")


def test_windows_longer_than_the_model_looks_are_refused_before_the_run(base, corpus, tmp_path):
    evaluation = unheard.Evaluation(unroll=65)
    with pytest.raises(ModelError, match="at most 64 tokens"):
        unheard.train(run_of(corpus, model_of(base), evaluation=evaluation), tmp_path / "run")


@pytest.mark.parametrize(
    ("lost", "message"),
    [("config.json", "no config.json"), ("tokenizer.json", "no tokenizer.json"), ("model.safetensors", "safetensors")],
)
def test_a_folder_that_is_not_whole_is_refused(base, tmp_path, lost, message):
    folder = tmp_path / "model"
    shutil.copytree(base, folder)
    (folder / lost).rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=message):
        _ = model_of(folder).layout


def test_a_weight_that_is_missing_is_never_drawn_at_random(base, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(base, folder)
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    del weights["transformer.h.1.mlp.c_fc.weight"]
    safetensors.torch.save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks weights"):
        _ = model_of(folder).layout


def sharded(base, folder, where):
    """Write the base model in several files with an index, as large models are saved."""
    shutil.copytree(base, folder)
    names = safetensors.torch.load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, where)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_a_model_in_several_files_is_read_and_its_index_is_under_the_digest(base, tmp_path):
    folder = sharded(base, tmp_path / "model", "model-00001-of-00001.safetensors")
    one, other = (model.initial(0) for model in (model_of(base), model_of(folder)))
    assert torch.equal(one, other)
    before = model_of(folder).pinned().base_sha256
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text() + " ")
    assert model_of(folder).pinned().base_sha256 != before


@pytest.mark.parametrize("where", ["../base/model.safetensors", "inside/model.safetensors"])
def test_weights_from_outside_the_digest_are_refused(base, tmp_path, where):
    shutil.copytree(base, tmp_path / "base")
    folder = sharded(base, tmp_path / "model", where)
    shutil.copytree(base, folder / "inside")
    with pytest.raises(ModelError, match="not one of its"):
        model_of(folder).pinned()
    shutil.copytree(base, tmp_path / "other")
    config = tmp_path / "other" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "transformers_weights": where}))
    with pytest.raises(ModelError, match="not one of its"):
        model_of(tmp_path / "other").pinned()


def test_an_adapter_beside_the_base_is_refused(base, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(base, folder)
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="merge_and_unload"):
        model_of(folder).pinned()


def test_code_in_a_folder_is_never_run(base, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(base, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.C", "AutoModelForCausalLM": "mine.M"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(ModelError):
        _ = model_of(folder).layout
    assert not (tmp_path / "ran").exists()


def test_the_example_fine_tunes_whole_and_with_lora_and_prints_its_epsilon(example, base, corpus, tmp_path, capsys):
    rows = example.fine_tune(corpus, base, tmp_path, rounds=1, users_per_round=8)
    assert [row[0] for row in rows] == ["all", "lora"]
    assert all(0 < epsilon < 100 for *_, epsilon in rows)
    assert capsys.readouterr().out.count("held-out accuracy") == 2


class Told(Exception):
    pass


class OneOther:
    """A process group that raises an error at its first message."""

    size, rank, local_size, others = 2, 0, 1, range(1, 2)

    def send_all(self, kind, fields=None):
        raise Told(fields["model"])


def test_every_rank_gets_the_digest_of_the_weights(base):
    model = model_of(base, "lora")
    with pytest.raises(Told) as told:
        build_engine(unheard.EngineChoice(device="cpu"), model, OneOther())
    assert told.value.args[0]["base_sha256"] == base_digest(base)
