"""The packed computation of Hugging Face models agrees with the reference engine, a plain loop over users."""

import math
import warnings

import numpy as np
import pytest
import torch

import unheard
from tests.conftest import ManyAtOnce
from unheard.corpus.vocabulary import BOS, EOS
from unheard.engines import packed as engine
from unheard.engines.engine import Drawn
from unheard.engines.packed import PackedCohorts
from unheard.engines.reference import ReferenceEngine
from unheard.errors import ModelError
from unheard.models import packed_layers
from unheard.models.packed import CannotPack, PackedModel, score_gradient
from unheard.updates.user_update import User

from .conftest import model_of, other_base

LENGTHS = (1, 2, 5, 20, 13, 7, 32, 9, 0, 11, 4, 110)
CPU = torch.device("cpu")


def users_of(model, lengths=LENGTHS, seed=3):
    rng = np.random.default_rng(seed)
    users = [User(rng.integers(0, model.vocabulary_size, size=n), None, k) for k, n in enumerate(lengths)]
    for user in users:
        user.tokens[:1] = BOS
        user.tokens[9:10] = EOS
    return users


def plan_of(model, update=None, **changes):
    settings = {
        "population": 60,
        "sampling": unheard.PoissonSampling(users_per_round=8),
        "update": update or unheard.FedAvg(batch_size=2, unroll=7, learning_rate=0.3),
        "clip": unheard.FlatClip(norm=0.4),
        "noise": unheard.GaussianNoise(noise_multiplier=0.5),
    }
    return unheard.Plan(**{**settings, **changes}).at(0, model.layout)


def start_of(model):
    params = model.initial(5)
    return params + 0.05 * torch.randn(params.shape, generator=torch.Generator().manual_seed(1))


def distance(one, other):
    return float((one.units_P.double() - other.units_P.double()).norm() / one.units_P.double().norm())


def packed(model, tokens=96, users=5):
    return PackedCohorts(model, CPU, torch.float32, tokens_at_once=tokens, users_at_once=users)


STEPS = unheard.FedAvg(batch_size=2, unroll=7, learning_rate=0.3, update_penalty=0.01)
ONE_STEP = unheard.FedSGD(unroll=5, learning_rate=0.4)


@pytest.mark.parametrize(
    ("kind", "train", "update"),
    [("gpt2", "lora", ONE_STEP), ("gpt2", "all", STEPS), ("llama", "lora", STEPS), ("llama", "all", ONE_STEP)],
)
def test_the_sum_of_twelve_users_is_that_of_a_loop_over_users(kind, train, update, base, llama):
    """The users have no tokens, one token, less than a window, or more windows than a stream holds."""
    model = model_of(base if kind == "gpt2" else llama, train)
    users, params = users_of(model), start_of(model)
    plan = plan_of(model, update)
    expected = ReferenceEngine(model).sum_updates(params, users, plan, Drawn(1))
    given = packed(model).sum_updates(params, users, plan, 1)
    assert distance(expected, given) < 1e-4
    assert given.weight == expected.weight


def test_short_texts_fill_the_streams_of_long_ones(llama, monkeypatch):
    """60 users, most of them with little text, fit into 5 streams.

    If all long texts came first, only short texts would be left in the end, and 6 streams would be needed."""
    model, ran, run = model_of(llama, "lora"), [], engine._Step.run
    monkeypatch.setattr(engine._Step, "run", lambda step, host: (ran.append(step), run(step, host))[1])
    shares = (np.arange(60) + 0.5) / 60
    users = users_of(model, np.maximum(-30 * np.log(1 - shares), 4).astype(int))
    plan = plan_of(model, unheard.FedAvg(batch_size=2, unroll=56, learning_rate=0.3))
    given = packed(model, tokens=448, users=16).sum_updates(start_of(model), users, plan, 1)
    assert len(ran) == 5
    expected = ReferenceEngine(model).sum_updates(start_of(model), users, plan, Drawn(1))
    assert distance(expected, given) < 1e-4


def test_large_deltas_take_their_steps_one_by_one_and_none_is_left_out(llama, monkeypatch):
    model = model_of(llama, "lora")
    users, plan = users_of(model), plan_of(model)
    expected = packed(model).sum_updates(start_of(model), users, plan, 1)
    monkeypatch.setattr(engine, "LARGE_DELTAS", 0)
    assert distance(expected, packed(model).sum_updates(start_of(model), users, plan, 1)) < 1e-6


def test_an_empty_cohort_is_zero(llama):
    model = model_of(llama, "lora")
    total = packed(model).sum_updates(start_of(model), [], plan_of(model), 1)
    assert not total.units_P.any()
    assert total.weight == 0


def test_per_layer_clips_and_counts_of_clipped_users_are_those_of_the_reference(llama):
    model = model_of(llama, "lora")
    users, params = users_of(model), start_of(model)
    adaptive = unheard.AdaptiveClip(initial_norm=0.05, quantile=0.5, learning_rate=0.2)
    for clip in (unheard.PerLayerClip(norm=0.2), adaptive):
        plan = plan_of(model, clip=clip)
        expected = ReferenceEngine(model).sum_updates(params, users, plan, Drawn(1))
        given = packed(model).sum_updates(params, users, plan, 1)
        assert distance(expected, given) < 1e-4
        assert given.balance == expected.balance


@pytest.mark.parametrize("norm", [0.1, 0.2])
def test_weights_and_counts_are_those_of_each_user_in_whatever_place_they_are(llama, norm):
    """Eight users share two places. The counts of a user must not be those of an earlier user at the same place."""
    model = model_of(llama, "lora")
    users, params = users_of(model, LENGTHS[:8]), start_of(model)
    clip = unheard.AdaptiveClip(initial_norm=norm, quantile=0.5, learning_rate=0.2)
    counted = plan_of(model, clip=clip)
    weighted = plan_of(model, weights=unheard.CappedWeights(weight_cap=20, total_weight=9.0))
    few = packed(model, tokens=64, users=2)
    alone = [ReferenceEngine(model).sum_updates(params, [user], counted, Drawn(1)).balance for user in users]
    assert few.sum_updates(params, users, counted, 1).balance == sum(alone)
    given = few.sum_updates(params, users, weighted, 1)
    expected = ReferenceEngine(model).sum_updates(params, users, weighted, Drawn(1))
    assert given.weight == expected.weight
    assert distance(expected, given) < 1e-4


def test_a_round_that_failed_leaves_nothing_for_the_next(llama, monkeypatch):
    model = model_of(llama, "lora")
    users, params, plan = users_of(model), start_of(model), plan_of(model)
    broken, run, ran = packed(model), engine._Step.run, []

    def fails(step, host):
        run(step, host)
        ran.append(step)
        if len(ran) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine._Step, "run", fails)
        with pytest.raises(KeyboardInterrupt):
            broken.sum_updates(params, users, plan, 1)
    again, fresh = (each.sum_updates(params, users[:3], plan, 1) for each in (broken, packed(model)))
    assert torch.equal(again.units_P, fresh.units_P)


@pytest.mark.parametrize("train", ["lora", "all"])
def test_a_users_update_is_the_same_beside_other_users(train, llama):
    """A user gets the place of a user who has finished, and must not be affected by that user's data."""
    model = model_of(llama, train)
    users, params, plan = users_of(model, LENGTHS[:8]), start_of(model), plan_of(model)
    everybody = packed(model, tokens=64, users=2).sum_updates(params, users, plan, 1).units_P.double()
    alone = [packed(model, tokens=64, users=2).sum_updates(params, [user], plan, 1).units_P for user in users]
    summed = torch.stack(alone).double().sum(dim=0)
    assert (everybody - summed).norm() / summed.norm() < 1e-5


@pytest.mark.parametrize("train", ["lora", "all"])
def test_a_user_who_is_not_finite_adds_exactly_zero_and_moves_nobody(train, llama):
    """The vector of one word is NaN, so the updates of users who wrote it are not finite."""
    model = model_of(llama, train, lora_layers=("q_proj", "down_proj") if train == "lora" else ())
    users, params, plan = users_of(model, (30, 40, 50, 20)), start_of(model), plan_of(model)
    bad = int(users[1].tokens[5])
    for user in users[:1] + users[2:]:
        user.tokens[user.tokens == bad] = bad - 1 if bad > 4 else bad + 1
    row = int(model.store_module.get_buffer("row_V")[bad])
    if train == "lora":
        model.store_module.base.get_input_embeddings().weight.data[row] = float("nan")
    else:
        name = next(n for n in model.layout.names if "embed" in n)
        params[model.layout.slices[name]].view(-1, 16)[row] = float("nan")
    given = packed(model).sum_updates(params, users, plan, 1)
    assert given.weight == 4
    rest = packed(model).sum_updates(params, [users[0], *users[2:]], plan, 1)
    assert rest.units_P.any()
    assert distance(rest, given) < 1e-5


class Memory:
    """Raises an out-of-memory error at the n-th call of a method of the step."""

    def __init__(self, monkeypatch, method, at):
        self.sizes, self.at, real = [], at, getattr(engine._Step, method)

        def failing(step, *args):
            real(step, *args)
            self.sizes.append(step.packed.size.tokens)
            if len(self.sizes) in self.at:
                raise torch.OutOfMemoryError("made by a test")

        monkeypatch.setattr(engine._Step, method, failing)


@pytest.mark.parametrize("train", ["lora", "all"])
@pytest.mark.parametrize("update", [STEPS, ONE_STEP])
def test_out_of_memory_in_the_middle_of_a_round_halves_the_stream_and_loses_nothing(train, update, llama, monkeypatch):
    """The error is raised after the step changed deltas and gradients, so a repeated step would change the result."""
    model = model_of(llama, train)
    users, params, plan = users_of(model), start_of(model), plan_of(model, update)
    expected = packed(model).sum_updates(params, users, plan, 1)
    memory = Memory(monkeypatch, "run", at=(2,))
    with pytest.warns(UserWarning, match="Memory ran out with 9?8?[06] tokens at once. The computation continues with"):
        given = packed(model).sum_updates(params, users, plan, 1)
    assert distance(expected, given) < 1e-5
    assert given.weight == expected.weight
    assert memory.sizes[0] == pytest.approx(2 * memory.sizes[-1], abs=16)


def test_out_of_memory_while_a_sum_is_computed_counts_nobody_twice(llama, monkeypatch):
    model = model_of(llama, "lora")
    users, params, plan = users_of(model), start_of(model), plan_of(model)
    expected = packed(model).sum_updates(params, users, plan, 1)
    real, calls = PackedCohorts._contribution, []

    def failing(self, *args):
        calls.append(0)
        total = real(self, *args)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("made by a test")
        return total

    monkeypatch.setattr(PackedCohorts, "_contribution", failing)
    with pytest.warns(UserWarning, match="Memory ran out"):
        given = packed(model).sum_updates(params, users, plan, 1)
    assert distance(expected, given) < 1e-5
    assert given.weight == expected.weight


@pytest.mark.system
def test_a_window_that_does_not_fit_is_an_error_with_advice(llama, monkeypatch):
    model = model_of(llama, "lora")
    Memory(monkeypatch, "run", at=range(1, 99))
    with pytest.warns(UserWarning, match="Memory ran out") as said, pytest.raises(ModelError, match=r"update\.unroll"):
        packed(model).sum_updates(start_of(model), users_of(model), plan_of(model), 1)
    assert "computed again" in str(said[-1].message)


def test_without_a_clip_the_sum_is_that_of_the_reference(llama):
    """The baseline without noise."""
    model = model_of(llama, "lora")
    users, params = users_of(model), start_of(model)
    plan = plan_of(model, clip=unheard.NoClip(), noise=unheard.NoNoise())
    expected = ReferenceEngine(model).sum_updates(params, users, plan, Drawn(1))
    assert distance(expected, packed(model).sum_updates(params, users, plan, 1)) < 1e-4


def test_drawn_examples_add_one_clipped_gradient_each(llama):
    """More examples than places, several of one user among them."""
    model = model_of(llama, "lora")
    sampling = unheard.ExampleSampling(examples_per_user=4, examples_per_round=12, total_examples=200)
    plan = plan_of(model, ONE_STEP, sampling=sampling)
    examples = [User(user.tokens[start : start + 6]) for user in users_of(model) for start in (0, 5, 10)]
    expected = ReferenceEngine(model).sum_updates(start_of(model), examples, plan, Drawn(1))
    given = packed(model, users=None).sum_updates(start_of(model), examples, plan, 1)
    assert distance(expected, given) < 1e-4
    assert given.weight == len(examples)


def test_recomputed_activations_give_the_same_sum(llama):
    model = model_of(llama, "lora")
    users, params, plan = users_of(model), start_of(model), plan_of(model)
    again = packed(model)
    again.is_recomputed = True
    assert distance(packed(model).sum_updates(params, users, plan, 1), again.sum_updates(params, users, plan, 1)) < 1e-6


def test_a_model_without_a_rule_trains_through_vmap_with_a_warning(tmp_path, base, monkeypatch):
    """Sliding-window attention has no packing rule, and models that scale their scores would have other scores when packed."""
    window = model_of(other_base(tmp_path / "mistral", base, "mistral", sliding_window=4), "lora")
    with pytest.raises(CannotPack, match="sliding_window"):
        packed(window).check(start_of(window))
    scaled = model_of(
        other_base(tmp_path / "granite", base, "granite", logits_scaling=7.0), "lora", lora_layers=("v_proj",)
    )
    with pytest.raises(CannotPack, match="packed scores differ"):
        packed(scaled).check(start_of(scaled))
    plain = model_of(base, "lora")
    with monkeypatch.context() as broken:
        broken.setattr(PackedModel, "gradients", lambda packed, stream: {"a": torch.tensor([1.0, math.nan])})
        with pytest.raises(CannotPack, match="not finite"):
            packed(plain).check(start_of(plain))
    users, plan, params = users_of(window, (9, 12)), plan_of(window), start_of(window)
    monkeypatch.setattr(ManyAtOnce, "_is_coarse", True)
    with pytest.warns(UserWarning, match="trains more slowly: its attention uses sliding_window"):
        ManyAtOnce(window).sum_updates(params, users, plan, Drawn(1))


def test_the_engine_vectorised_packs_where_it_may(llama, monkeypatch):
    """In bfloat16, as on a GPU; the sum is that of the reference within the precision of bfloat16."""
    model = model_of(llama, "lora")
    users, params, plan = users_of(model, (9, 30)), start_of(model), plan_of(model)
    expected = ReferenceEngine(model).sum_updates(params, users, plan, Drawn(1))
    monkeypatch.setattr(ManyAtOnce, "_is_coarse", True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        given = ManyAtOnce(model).sum_updates(params, users, plan, Drawn(1))
    assert 1e-6 < distance(expected, given) < 0.05


def test_with_frozen_a_only_b_is_trained_and_the_sum_is_that_of_the_reference(llama):
    model = model_of(llama, "lora", lora_freeze_a=True)
    assert all("lora_B" in name for name in model.layout.names)
    assert model.layout.total < model_of(llama, "lora").layout.total
    assert torch.equal(model.initial(1), model.initial(2))  # B begins at zero, and A does not depend on the seed
    users, params, plan = users_of(model), start_of(model), plan_of(model)
    expected = ReferenceEngine(model).sum_updates(params, users, plan, Drawn(1))
    assert distance(expected, packed(model).sum_updates(params, users, plan, 1)) < 1e-4
    again = model_of(llama, "lora", lora_freeze_a=True)
    tokens = torch.tensor([[0, 5, 6, 7]])
    one, other = (m.logits(m.layout.split(params), tokens) for m in (model, again))
    assert torch.equal(one, other)


@pytest.mark.system
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_compiled_layers_give_the_same_sum(kind, base, llama, monkeypatch):
    """As on a GPU, but torch compiles for the CPU, and there is no CUDA graph."""
    model = model_of(base if kind == "gpt2" else llama, "lora")
    users, params, plan = users_of(model), start_of(model), plan_of(model, STEPS)
    expected = packed(model).sum_updates(params, users, plan, 1)
    monkeypatch.setattr(engine, "fast_score_gradient", lambda: score_gradient)  # it needs a GPU
    monkeypatch.setattr(engine._Step, "record", lambda step: None)
    # The loop over windows is for CPUs only. It would be recompiled for every window length.
    monkeypatch.setattr(packed_layers, "plain_attention", torch.compiler.disable(packed_layers.plain_attention))
    compiled = packed(model)
    compiled.is_compiled = True
    assert distance(expected, compiled.sum_updates(params, users, plan, 1)) < 1e-4
    assert compiled.is_compiled  # it is False after a failed compilation
