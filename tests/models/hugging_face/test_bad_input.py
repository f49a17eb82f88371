"""Invalid base models, users with NaN, and small machines: an error that says what to do, or an update of exactly zero."""

import json
import shutil

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

import unheard
from tests.conftest import ManyAtOnce
from unheard.corpus.vocabulary import Vocabulary
from unheard.engines import packed as engine
from unheard.engines import vectorised
from unheard.engines.engine import Drawn
from unheard.engines.packed import PackedCohorts
from unheard.engines.reference import ReferenceEngine
from unheard.errors import ModelError
from unheard.models import hugging_face
from unheard.updates.user_update import User

from .conftest import model_of, other_base, run_of
from .test_packed import packed, plan_of, start_of, users_of


def with_config(base, folder, **changes):
    """Copy a base model with other values in config.json."""
    shutil.copytree(base, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


# ------------------------------------------------------------------------------------------------- bases


@pytest.mark.parametrize("train", ["all", "lora"])
def test_dropout_of_the_base_is_off_in_every_engine(train, base, tmp_path):
    dropout = {"attn_pdrop": 0.5, "embd_pdrop": 0.5, "resid_pdrop": 0.5}
    wet = model_of(with_config(base, tmp_path / "wet", **dropout), train)
    dry = model_of(with_config(base, tmp_path / "dry", **dict.fromkeys(dropout, 0.0)), train)
    assert any(isinstance(part, nn.Dropout) and part.p == 0.5 for part in wet.store_module.modules())
    users, params, plan = users_of(dry, (9, 30, 4)), start_of(dry), plan_of(dry)
    for sum_of in (
        lambda model: ReferenceEngine(model).sum_updates(params, users, plan, Drawn(1)).units_P,
        lambda model: ManyAtOnce(model).sum_updates(params, users, plan, Drawn(1)).units_P,
        lambda model: packed(model).sum_updates(params, users, plan, 1).units_P,
    ):
        assert torch.equal(sum_of(wet), sum_of(dry))


class Normed(nn.Module):
    """A layer after a batch normalisation."""

    def __init__(self, layer, width):
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(width), layer

    def forward(self, x_BTD):
        return self.layer(self.norm(x_BTD.transpose(1, 2)).transpose(1, 2).contiguous())


@pytest.fixture
def with_statistics(base, monkeypatch):
    """Return a base model with batch normalisation, which no model of transformers has."""
    real = hugging_face.read_base

    def read(path):
        loaded = real(path)
        for block in loaded.transformer.h:
            block.mlp = Normed(block.mlp, 16)
            block.mlp.norm.running_mean.uniform_(-0.1, 0.1)
        return loaded.train()  # as a careless loader would return it

    monkeypatch.setattr(hugging_face, "read_base", read)
    torch.manual_seed(7)
    return model_of(base, "lora", lora_layers=("c_attn",))


def test_statistics_of_batches_stay_those_of_the_base_and_couple_no_users(with_statistics):
    model = with_statistics
    users, params, plan = users_of(model, (9, 30, 4)), start_of(model), plan_of(model)
    before = {name: buffer.clone() for name, buffer in model.store_module.named_buffers()}
    for sum_of in (
        lambda some: ReferenceEngine(model).sum_updates(params, some, plan, Drawn(1)).units_P,
        lambda some: vectorised.VectorisedEngine(model).sum_updates(params, some, plan, Drawn(1)).units_P,
        lambda some: packed(model).sum_updates(params, some, plan, 1).units_P,
    ):
        apart = sum(sum_of([user]).double() for user in users)
        assert (sum_of(users).double() - apart).norm() / apart.norm() < 1e-6
    after = dict(model.store_module.named_buffers())
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_trained_normalisation_of_batches_has_no_packed_rule(base, with_statistics):
    model = model_of(base, "all")
    with pytest.raises(engine.CannotPack, match="BatchNorm1d"):
        packed(model).check(start_of(model))


def test_code_beside_a_known_kind_of_model_is_not_run(base, tmp_path):
    """config.json names code for a model that transformers supports: the class of transformers is used."""
    auto_map = {"AutoConfig": "mine.C", "AutoModelForCausalLM": "mine.M"}
    folder = with_config(base, tmp_path / "model", auto_map=auto_map)
    (folder / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    assert torch.equal(model_of(folder).initial(0), model_of(base).initial(0))
    assert not (tmp_path / "ran").exists()


def test_another_tokenizer_in_the_folder_of_a_base_is_refused_before_anything_is_charged(base, corpus, tmp_path):
    """The other tokenizer has the same size and other words."""
    shutil.copytree(base, tmp_path / "base")
    shutil.copytree(corpus, tmp_path / "corpus")
    table = json.loads((tmp_path / "base" / "tokenizer.json").read_text())
    (one, first), (other, second) = list(table["model"]["vocab"].items())[-2:]
    table["model"]["vocab"] |= {one: second, other: first}
    (tmp_path / "base" / "tokenizer.json").write_text(json.dumps(table))
    with pytest.raises(ModelError, match=r"another tokenizer .*--tokens"):
        unheard.train(run_of(tmp_path / "corpus", model_of(tmp_path / "base", "lora")), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "corpus" / "ledger.jsonl").exists()


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("content", ["[]", "3", "{", "[" * 100_000, ""])
def test_a_record_of_a_base_that_is_no_table_is_named(base, tmp_path, name, content):
    folder = shutil.copytree(base, tmp_path / "base")
    (folder / name).write_text(content)
    with pytest.raises(ModelError, match=r"is not a table in JSON"):
        model_of(folder).pinned(None)


def test_windows_longer_than_the_context_are_refused_wherever_the_model_reads(base):
    model = model_of(base)
    params, longest = model.layout.split(model.initial(0)), model.context
    model.logits(params, torch.zeros((1, longest), dtype=torch.long))
    with pytest.raises(ModelError, match=f"reads at most {longest} tokens, not {longest + 1}"):
        model.logits(params, torch.zeros((1, longest + 1), dtype=torch.long))


def test_a_store_whose_words_are_in_another_order_than_the_tokenizers_is_refused(base, corpus):
    store, model = unheard.TokenStore.open(corpus), model_of(base)
    model.check_words(store.info["tokens"], store.vocabulary)
    *words, one, other = store.vocabulary.words
    for wrong in ([*words, other, one], [*words, one], [*words, one, other, "more"]):
        with pytest.raises(ModelError, match="has other tokens, or another order"):
            model.check_words(store.info["tokens"], Vocabulary(wrong))


# ------------------------------------------------------------------------------------------------- users


@pytest.mark.parametrize(
    ("update", "tokens"),
    [(unheard.FedSGD(unroll=250, learning_rate=0.4), 10**5), (unheard.FedAvg(unroll=250, batch_size=32), 10**5)],
)
def test_a_user_with_much_text_adds_no_more_than_the_bound_and_moves_nobody(update, tokens, tmp_path, base):
    """One gradient of 13 streams, or 13 local steps of one user."""
    tiny = {"hidden_size": 4, "intermediate_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1}
    folder = other_base(tmp_path / "tiny", base, **tiny, num_key_value_heads=1, max_position_embeddings=256)
    model = model_of(folder, "lora", lora_rank=1)
    rng, params, plan = np.random.default_rng(5), start_of(model), plan_of(model, update)
    long = User(rng.integers(3, model.vocabulary_size, size=tokens), None, 9)
    others = users_of(model, (40, 3, 300))

    def total(some):
        fast = PackedCohorts(model, torch.device("cpu"), torch.float32, tokens_at_once=8192, users_at_once=4)
        return fast.sum_updates(params, some, plan, 1)

    everybody, rest = total([*others, long]), total(others)
    alone = everybody.units_P.double() - rest.units_P.double()
    assert 0 < alone.norm() * everybody.grid <= 0.4 * (1 + 1e-6)
    assert everybody.weight == rest.weight + 1
    part = [User(long.tokens[:10_000])]
    expected = ReferenceEngine(model).sum_updates(params, part, plan, Drawn(1))
    assert (expected.units_P - total(part).units_P).abs().max() <= 2 + 1e-4 * expected.units_P.abs().max()


@pytest.mark.parametrize("length", [0, 1])
def test_a_user_without_a_target_adds_exactly_zero(length, llama):
    model = model_of(llama, "lora")
    total = packed(model).sum_updates(start_of(model), users_of(model, (length,)), plan_of(model), 1)
    assert not total.units_P.any()
    assert total.weight == 1


def test_a_user_who_is_not_finite_does_not_stop_a_run_or_harm_its_model(llama, corpus, tmp_path, monkeypatch):
    """The updates of all users who write one frequent word are NaN."""
    shutil.copytree(corpus, tmp_path / "corpus")
    model = model_of(llama, "lora", lora_layers=("q_proj", "down_proj"))
    tokens = np.concatenate([unheard.TokenStore.open(corpus).train.tokens(k) for k in range(8)])
    common = int(np.bincount(tokens)[4:].argmax()) + 4
    row = int(model.store_module.get_buffer("row_V")[common])
    model.store_module.base.get_input_embeddings().weight.data[row] = float("nan")
    as_on_a_gpu(monkeypatch)
    run = run_of(tmp_path / "corpus", model, training=unheard.Training(rounds=1))
    reports = list(unheard.train(run, tmp_path / "run"))
    assert len(reports) == 1
    assert unheard.Released.open(tmp_path / "run").params_P.isfinite().all()


# ----------------------------------------------------------------------------------------------- machines


def as_on_a_gpu(monkeypatch):
    """Make the engine pack users on a CPU, in float32."""

    class InFloat32(PackedCohorts):
        def __init__(self, model, device, dtype, **settings):
            super().__init__(model, device, torch.float32, **{**settings, "tokens_at_once": 96, "users_at_once": 5})

    monkeypatch.setattr(vectorised.VectorisedEngine, "ALONE_ON", ())
    monkeypatch.setattr(vectorised.VectorisedEngine, "_is_coarse", True)
    monkeypatch.setattr(engine, "PackedCohorts", InFloat32)


def test_out_of_memory_in_a_run_charges_every_round_once_and_gives_the_same_model(llama, corpus, tmp_path, monkeypatch):
    as_on_a_gpu(monkeypatch)
    training = unheard.Training(rounds=2, reproducible_seed=3)
    real, calls, models, charged = engine._Step.run, [], [], []

    def failing(step, stream):
        real(step, stream)
        calls.append(0)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("made by a test")

    def trained(name):
        shutil.copytree(corpus, tmp_path / name)  # a copy, because it is charged
        run = run_of(tmp_path / name, model_of(llama, "lora"), training=training)
        list(unheard.train(run, tmp_path / f"run-{name}"))
        models.append(unheard.Released.open(tmp_path / f"run-{name}").params_P)
        charged.append(unheard.statement(tmp_path / f"run-{name}")["claimed"])

    trained("whole")
    monkeypatch.setattr(engine._Step, "run", failing)
    with pytest.warns(UserWarning, match="Memory ran out"):
        trained("short")
    assert (models[0] - models[1]).norm() < 1e-5 * models[0].norm()
    assert charged[0] == charged[1]


def test_a_base_that_changed_between_stop_and_resume_is_refused_before_anything_is_charged(base, corpus, tmp_path):
    shutil.copytree(base, tmp_path / "base")
    shutil.copytree(corpus, tmp_path / "corpus")
    list(unheard.train(run_of(tmp_path / "corpus", model_of(tmp_path / "base", "lora")), tmp_path / "run"))
    ledgers = sorted([*(tmp_path / "run").glob("*ledger*"), *(tmp_path / "corpus").glob("*ledger*")])
    before = [file.read_bytes() for file in ledgers]
    assert len(ledgers) >= 2
    file = tmp_path / "base" / "model.safetensors"
    whole, weights = file.read_bytes(), safetensors.torch.load_file(file)
    weights["transformer.wpe.weight"][0, 0] += 1e-6
    safetensors.torch.save_file(weights, file, {"format": "pt"})
    with pytest.raises(ModelError, match=r"its files have changed\. Put them back"):
        unheard.resume(tmp_path / "run", rounds=3)
    file.unlink()
    with pytest.raises(ModelError, match="safetensors"):
        unheard.resume(tmp_path / "run", rounds=3)
    assert [file.read_bytes() for file in ledgers] == before
    file.write_bytes(whole)
    assert [report.round for report in unheard.resume(tmp_path / "run", rounds=3)] == [3]
