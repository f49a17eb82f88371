"""Updates of a Hugging Face model agree with a plain loop over users that uses transformers and autograd, without vmap."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as nnf

import unheard
from tests.conftest import ManyAtOnce
from unheard.corpus.vocabulary import BOS, EOS
from unheard.engines.packed import PackedCohorts
from unheard.engines.reference import ReferenceEngine
from unheard.engines.vectorised import VectorisedEngine
from unheard.evaluation.next_word import evaluate
from unheard.randomness import reproducible_generator
from unheard.updates.user_update import User, users_in_turn

from .conftest import model_of, run_of


class Plain:
    """A plain implementation with transformers and no code of Unheard: ids of the model's tokenizer, loss over all rows."""

    def __init__(self, base, model, dtype):
        from peft import LoraConfig, get_peft_model
        from tokenizers import Tokenizer
        from transformers import AutoModelForCausalLM

        self.tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
        self.module = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager").eval()
        if model.train == "lora":
            is_gpt2 = self.module.config.model_type == "gpt2"
            config = LoraConfig(r=2, lora_alpha=16.0, target_modules=list(model.lora_layers), fan_in_fan_out=is_gpt2)
            self.module = get_peft_model(self.module, config).eval()
        self.module = self.module.to(dtype)
        if model.lora_freeze_a:
            drawn = dict(model.store_module.base.named_parameters())
            for name, p in self.module.named_parameters():
                if "lora_A" in name:
                    p.data.copy_(drawn[name])
                    p.requires_grad_(False)
        self.trained = {n: p for n, p in self.module.named_parameters() if p.requires_grad}
        self.end, self.dtype = self.tokenizer.token_to_id("<|endoftext|>"), dtype

    def set(self, named):
        with torch.no_grad():
            for name, p in self.trained.items():
                p.copy_(named[name])

    def own_numbers(self, tokens, words):
        """Return a user's stream in ids of the model's tokenizer, and which of them begin a post."""
        ids = [self.end if t in (BOS, EOS) else self.tokenizer.token_to_id(words.word(int(t))) for t in tokens]
        return ids, [t == BOS for t in tokens]

    def windows(self, ids, begins, unroll):
        for start in range(0, len(ids) - 1, unroll):
            yield ids[start : start + unroll + 1], begins[start : start + unroll + 1]

    def loss(self, batch):
        total, count = torch.zeros((), dtype=self.dtype), 0
        for ids, begins in batch:
            logits = self.module(torch.tensor([ids[:-1]])).logits[0]
            for place, target in enumerate(ids[1:]):
                if not begins[place + 1]:
                    total = total + nnf.cross_entropy(logits[place], torch.tensor(target))
                    count += 1
        return total / max(count, 1)

    def delta(self, start, ids, begins, update, S):
        windows = list(self.windows(ids, begins, update.unroll))
        now = {name: t.clone() for name, t in start.items()}
        size = update.batch_size or max(len(windows), 1)
        for first in range(0, len(windows), size):
            self.set(now)
            loss = self.loss(windows[first : first + size])
            if not loss.requires_grad:  # a batch without a target
                continue
            gradients = torch.autograd.grad(loss, list(self.trained.values()))
            moved = {
                n: now[n] - update.learning_rate * g - start[n] for n, g in zip(self.trained, gradients, strict=True)
            }
            norm = torch.sqrt(sum((d**2).sum() for d in moved.values()))
            now = {n: start[n] + d * min(1.0, S / norm.item()) for n, d in moved.items()}
        return {n: now[n] - start[n] for n in now}


@pytest.mark.parametrize("train", ["all", "lora"])
def test_the_sum_of_a_cohort_and_what_is_measured_after_it_are_those_of_a_plain_loop(train, base, corpus):
    model, dtype = model_of(base, train, lora_layers=("c_attn",)), torch.float64 if train == "all" else torch.float32
    run, store = run_of(corpus, model), unheard.TokenStore.open(corpus)
    plan = run.plan.at(0, model.layout)
    users = list(users_in_turn(store.train, model))[:6]
    params = model.initial(5).to(dtype)
    total = ManyAtOnce(model, users_at_once=4).sum_updates(params, users, plan, reproducible_generator(1))
    fast = total.units_P.double() * total.grid

    plain = Plain(base, model, dtype)
    start = {name: layer.clone() for name, layer in model.layout.split(params).items()}
    assert set(start) == set(plain.trained)
    summed = torch.zeros(model.layout.total, dtype=torch.float64)
    for user in users:
        ids, begins = plain.own_numbers(user.tokens, store.vocabulary)
        summed += model.layout.join(plain.delta(start, ids, begins, run.plan.update, 0.4)).double()
    if train == "all":  # float64 on both sides: only the truncation to the grid differs
        assert (fast - summed).abs().max() <= len(users) * total.grid
    assert (fast - summed).norm() / summed.norm() < 1e-4

    after = params + (fast / 6).to(dtype)
    held_out = run.evaluation.choose(users_in_turn(store.held_out, model))
    told = evaluate(model, after, held_out, unroll=16)
    plain.set(model.layout.split(params + (summed / 6).to(dtype)))
    right, loss, count = 0, 0.0, 0
    with torch.no_grad():
        for user in held_out:
            for ids, begins in plain.windows(*plain.own_numbers(user.tokens, store.vocabulary), 16):
                logits = plain.module(torch.tensor([ids[:-1]])).logits[0]
                for place, target in enumerate(ids[1:]):
                    if not begins[place + 1]:
                        right += int(logits[place].argmax() == target)
                        loss += nnf.cross_entropy(logits[place], torch.tensor(target)).item()
                        count += 1
    assert told["tokens"] == count
    assert told["accuracy_top1"] == pytest.approx(right / count, abs=1.5 / count)  # a tie may fall either way, once
    assert told["loss"] == pytest.approx(loss / count, rel=1e-5)
    before = evaluate(model, params, held_out, unroll=16)
    assert told["loss"] < before["loss"]  # the step is not zero


WAYS = {"all": {}, "lora": {"lora_layers": ("q_proj", "v_proj", "down_proj")}}
WAYS["lora with A frozen"] = {**WAYS["lora"], "lora_freeze_a": True}


@pytest.mark.parametrize(
    "update", [unheard.FedAvg(batch_size=2, unroll=7, learning_rate=0.3), unheard.FedSGD(unroll=9)]
)
@pytest.mark.parametrize("way", list(WAYS))
def test_the_packed_sum_of_twelve_users_is_that_of_a_plain_loop_of_transformers_and_peft(way, update, llama, corpus):
    """In float64, with users of 1 to 60 tokens, in streams that are shorter than a user's batch."""
    model = model_of(llama, way[:4].strip(), **WAYS[way])
    store = unheard.TokenStore.open(corpus)
    plan = replace(run_of(corpus, model).plan, update=update).at(0, model.layout)
    users = list(users_in_turn(store.train, model))[:12]
    users = [User(user.tokens[: (1, 2, 9, 30)[k] if k < 4 else 60], None, k) for k, user in enumerate(users)]
    params = model.initial(5)
    params = (params + 0.05 * torch.randn(params.shape, generator=torch.Generator().manual_seed(1))).double()
    streams = PackedCohorts(model, torch.device("cpu"), torch.float64, tokens_at_once=96, users_at_once=5)
    total = streams.sum_updates(params, users, plan, 1)

    plain = Plain(llama, model, torch.float64)
    start = {name: layer.clone() for name, layer in model.layout.split(params).items()}
    assert set(start) == set(plain.trained)
    summed = torch.zeros(model.layout.total, dtype=torch.float64)
    for user in users:
        ids, begins = plain.own_numbers(user.tokens, store.vocabulary)
        summed += model.layout.join(plain.delta(start, ids, begins, update, 0.4)).double()
    assert (total.units_P.double() * total.grid - summed).abs().max() <= len(users) * total.grid
    assert total.weight == 12


@pytest.mark.parametrize("train", ["all", "lora"])
def test_a_users_update_does_not_depend_on_other_users(train, base, corpus):
    """Bit for bit, although the products with frozen weights are computed for all users together."""
    model = model_of(base, train)
    plan = run_of(corpus, model).plan.at(0, model.layout)
    users = list(users_in_turn(unheard.TokenStore.open(corpus).train, model))[:7]

    def total(some):
        return VectorisedEngine(model).sum_updates(model.initial(5), some, plan, reproducible_generator(1)).units_P

    for gone in (0, 3, 6):
        rest = [user for k, user in enumerate(users) if k != gone]
        assert torch.equal(total(users), total(rest) + total([users[gone]]))


def test_every_engine_gives_the_sum_of_reference(base, corpus):
    model = model_of(base, "lora")
    plan = run_of(corpus, model).plan.at(0, model.layout)
    users = list(users_in_turn(unheard.TokenStore.open(corpus).train, model))[:5]
    one, other = (
        e(model).sum_updates(model.initial(5), users, plan, reproducible_generator(1)).units_P.double()
        for e in (ReferenceEngine, VectorisedEngine)
    )
    assert np.isfinite(one.norm().item())
    assert (one - other).norm() / one.norm() < 1e-4
