"""Exports of a fine-tuned model: peft, transformers and llama.cpp read them and compute the same scores."""

import json
import shutil
from dataclasses import asdict, replace

import pytest
import torch
from typer.testing import CliRunner

import unheard
from unheard.deployment.hugging_face_export import _difference, write_language_model
from unheard.deployment.model import run_statement
from unheard.errors import InvalidValue, ModelError, UnprovenCombination
from unheard.models.hugging_face import read_base
from unheard.run_folder import RunFolder

from .conftest import model_of, run_of

pytest.importorskip("gguf", reason="needs the extra llm: pip install 'unheard[llm]'")
pytest.importorskip("accelerate", reason="needs the extra llm: pip install 'unheard[llm]'")

ROWS = torch.arange(5, 25)[None]


@pytest.fixture(scope="module")
def trained(tmp_path_factory, llama, corpus):
    """Train a Llama with LoRA. Only the noise moves the model away from the base."""
    folder = tmp_path_factory.mktemp("runs")
    shutil.copytree(corpus, folder / "corpus")  # a copy, because it is charged
    run = run_of(folder / "corpus", model_of(llama, "lora"), training=unheard.Training(rounds=1))
    for _ in unheard.train(run, folder / "lora"):
        pass
    return folder / "lora"


def logits_of(model):
    with torch.no_grad():
        return model.eval()(ROWS, use_cache=False).logits


def test_peft_alone_loads_the_adapter(trained, llama, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from unheard.cli.main import app

    done = CliRunner().invoke(app, ["export", str(trained), "--to", "adapter", "--out", str(tmp_path / "adapter")])
    assert done.exit_code == 0, done.output
    files = {file.name for file in (tmp_path / "adapter").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "README.md", "statement.json"} <= files
    text = "".join(file.read_text() for file in (tmp_path / "adapter").iterdir() if file.suffix in (".json", ".md"))
    assert str(llama) not in text
    assert str(trained) not in text
    card = (tmp_path / "adapter" / "README.md").read_text()
    assert json.loads((tmp_path / "adapter" / "statement.json").read_text())["claim"] in card
    assert "peft.PeftModel.from_pretrained(base_model, folder)" in card
    assert "own model differ by" in card
    assert "## Accuracy" not in card  # an export has no metrics
    plain = AutoModelForCausalLM.from_pretrained(llama)
    before = logits_of(plain)
    after = logits_of(PeftModel.from_pretrained(plain, tmp_path / "adapter"))
    assert (after - before).norm() / before.norm() > 1e-4
    merged = write_language_model(trained, tmp_path / "merged", "merged")
    assert merged.difference < 1e-5
    assert torch.allclose(logits_of(read_base(tmp_path / "merged")), after, atol=1e-5)
    assert json.loads((tmp_path / "merged" / "statement.json").read_text())["claimed"]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "merged")
    assert tokenizer.eos_token_id == json.loads((llama / "config.json").read_text())["eos_token_id"]
    assert tokenizer.tokenize("i like tea") == unheard.Released.open(trained).tokenizer.split("i like tea")


def test_a_merged_model_is_no_public_base_for_the_users_that_it_was_trained_on(llama, corpus, tmp_path):
    """If the merged model of a run without noise were accepted as public, a private run could start from it at no cost."""
    shutil.copytree(corpus, tmp_path / "corpus")
    plain = run_of(tmp_path / "corpus", model_of(llama, "lora"), training=unheard.Training(rounds=1))
    plain = replace(plain, plan=replace(plain.plan, noise=unheard.NoNoise()))
    list(unheard.train(plain, tmp_path / "plain", allow_no_privacy=True))
    write_language_model(tmp_path / "plain", tmp_path / "merged", "merged")
    shutil.copytree(tmp_path / "merged", tmp_path / "elsewhere")
    for base in ("merged", "elsewhere"):
        run = run_of(tmp_path / "corpus", model_of(tmp_path / base, "lora"))
        assert run.model.base_is_public
        with pytest.raises(UnprovenCombination, match="trained on these same users"):
            unheard.train(run, tmp_path / "private")
    assert not (tmp_path / "private").exists()


def test_an_adapter_with_frozen_a_holds_both_matrices_and_every_format_has_the_same_scores(llama, corpus, tmp_path):
    """The run folder does not contain A, which is drawn from a seed. The adapter must contain it for peft."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    shutil.copytree(corpus, tmp_path / "corpus")
    model = model_of(llama, "lora", lora_freeze_a=True)
    for _ in unheard.train(run_of(tmp_path / "corpus", model), tmp_path / "run"):
        pass
    released = unheard.Released.open(tmp_path / "run")
    assert released.params_P.norm() > 0
    module = model.store_module
    rows = module.get_buffer("row_V")[torch.arange(5, 25)][None]
    expected = model.logits(model.layout.split(released.params_P), torch.arange(5, 25)[None])[0, :, 3:]
    for to in ("adapter", "merged", "gguf"):
        written = write_language_model(tmp_path / "run", tmp_path / to, to)
        assert written.difference < (1e-2 if to == "gguf" else 1e-5)
    adapter = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(llama), tmp_path / "adapter").eval()
    gguf = AutoModelForCausalLM.from_pretrained(tmp_path / "gguf", gguf_file="model.gguf", dtype=torch.float32)
    for other, limit in ((adapter, 1e-5), (read_base(tmp_path / "merged"), 1e-5), (gguf, 1e-2)):
        with torch.no_grad():
            given = other(rows, use_cache=False).logits[0][:, module.get_buffer("row_V")[3:]]
        is_said_V = module.get_buffer("is_said_V")[3:]
        error = (given - expected)[:, is_said_V].norm() / expected[:, is_said_V].norm()
        assert error < limit


def test_gguf_is_read_back_with_the_same_scores(trained, tmp_path, capsys, monkeypatch):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    statement = {**run_statement(RunFolder.open(trained)), "warnings": ["one warning", "another"]}
    monkeypatch.setattr("unheard.deployment.hugging_face_export.run_statement", lambda _: statement)
    capsys.readouterr()
    written = write_language_model(trained, tmp_path / "gguf", "gguf")
    assert not capsys.readouterr().err  # no progress bars of other libraries
    assert written.difference < 1e-2
    assert "model.gguf" in written.files
    merged = write_language_model(trained, tmp_path / "merged", "merged")
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "gguf", gguf_file="model.gguf", dtype=torch.float32)
    expected = logits_of(read_base(tmp_path / "merged"))
    assert (logits_of(back) - expected).norm() / expected.norm() < 1e-2
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "gguf", gguf_file="model.gguf")
    own = unheard.Released.open(trained).tokenizer
    assert tokenizer.tokenize("i like tea") == own.split("i like tea")
    for to in ("gguf", "merged"):
        assert json.loads((tmp_path / to / "statement.json").read_text()) == json.loads(json.dumps(statement))
        assert "another" in (tmp_path / to / "README.md").read_text()
    assert merged.statement == written.statement == statement


@pytest.mark.parametrize(("to", "most"), [("adapter", 1e-4), ("merged", 1e-4), ("gguf", 2e-2)])
def test_a_written_model_with_other_scores_is_not_kept(trained, tmp_path, monkeypatch, to, most):
    """The statement beside it is about the run's own model. A difference that is no number is too large."""
    for difference in (most, 2 * most, float("nan"), float("inf")):
        monkeypatch.setattr("unheard.deployment.hugging_face_export._difference", lambda *_, d=difference: d)
        with pytest.raises(ModelError, match="other scores"):
            write_language_model(trained, tmp_path / "out", to)
        assert not list(tmp_path.iterdir())
    monkeypatch.setattr("unheard.deployment.hugging_face_export._difference", lambda *_: 0.9 * most)
    assert write_language_model(trained, tmp_path / "out", to).difference == 0.9 * most


def test_a_difference_of_scores_is_relative_and_of_all_scores():
    """Two models are compared on the scores of all words, so that no changed weight of the output is missed."""

    class Scores:
        def __init__(self, logits):
            self.logits, self.config = logits, type("Config", (), {"vocab_size": 5})

        def __call__(self, rows, use_cache):
            assert rows.shape == (1, 24)
            assert rows.max() < 5
            return self

    own_1TV = torch.arange(1.0, 121.0).reshape(1, 24, 5)
    for t, v in ((0, 0), (11, 2), (23, 4)):
        other_1TV = own_1TV.clone()
        other_1TV[0, t, v] += 3.0
        assert _difference(Scores(own_1TV), Scores(other_1TV)) == pytest.approx(3.0 / float(own_1TV.norm()))
    assert _difference(Scores(own_1TV), Scores(own_1TV)) == 0


def test_formats_that_do_not_fit_are_refused(base, corpus, tmp_path):
    shutil.copytree(corpus, tmp_path / "corpus")
    whole = run_of(tmp_path / "corpus", model_of(base, "all"), training=unheard.Training(rounds=1))
    for _ in unheard.train(whole, tmp_path / "run"):
        pass
    with pytest.raises(InvalidValue, match="no adapter"):
        write_language_model(tmp_path / "run", tmp_path / "out", "adapter")
    with pytest.raises(InvalidValue, match="Llama family"):
        write_language_model(tmp_path / "run", tmp_path / "out", "gguf")
    assert not (tmp_path / "out").exists()


def test_a_hub_folder_has_the_adapter_and_the_model_card(trained, llama, tmp_path):
    from unheard.deployment.hugging_face_export import write_hub_folder

    names = write_hub_folder(trained, tmp_path / "hub")
    assert {"adapter_config.json", "adapter_model.safetensors", "README.md", "statement.json"} <= set(names)
    card = (tmp_path / "hub" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: unheard\n")
    assert "AutoPeftModelForCausalLM" in card
    assert str(llama) not in card
    digest = unheard.Released.open(trained).run.model.base_sha256
    assert (
        f"Base model: {llama.name}, SHA-256 of its files {digest}. The base may have been pre-trained on public text"
        in card
    )


def test_a_card_names_the_base_and_says_how_it_was_quantised_beside_the_accuracy(llama, corpus, tmp_path):
    from unheard.deployment.card import model_card
    from unheard.models.base import RECORD, BaseRecord
    from unheard.models.hugging_face import base_digest

    shutil.copytree(corpus, tmp_path / "corpus")
    shutil.copytree(llama, tmp_path / "base")
    record = BaseRecord(
        source="a-package==1.0",
        title="A-Model",
        licence=None,
        quantisation="4 bits (Q4_1)",
        parameters=10,
        source_sha256=None,
        base_sha256=base_digest(tmp_path / "base"),
    )
    (tmp_path / "base" / RECORD).write_text(json.dumps(asdict(record)))
    for _ in unheard.train(
        run_of(tmp_path / "corpus", model_of(tmp_path / "base", "lora"), training=unheard.Training(rounds=1)),
        tmp_path / "run",
    ):
        pass
    card = model_card(tmp_path / "run")
    accuracy = card[card.index("## Accuracy") : card.index("## Training")]
    assert "Base model: a-package==1.0, SHA-256" in accuracy
    assert "The weights of A-Model come from a file in which they were quantised to 4 bits (Q4_1)." in accuracy
    assert str(tmp_path) not in card
