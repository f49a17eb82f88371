"""The paper's model: its size and layers, and its LSTM compared with torch's."""

from dataclasses import replace
from functools import partial

import pytest
import tomli_w
import torch
from torch import nn
from torch.func import grad, vmap

import unheard
from unheard.engines.vectorised import VectorisedEngine
from unheard.errors import InvalidValue, ModelError
from unheard.models.model import PAD, mean_loss, window_targets
from unheard.models.recurrent import lstm_states
from unheard.training.initialise import pinned
from unheard.training.run import read_run_file, read_saved_run, run_hash, tables_from_run


def test_the_papers_model_has_1346144_parameters_in_11_vectors():
    layout = unheard.TiedLSTM(vocabulary_size=10_000).layout
    assert layout.total == 1_346_144
    assert len(layout) == 11


def test_tying_saves_about_forty_percent():
    tied, untied = (unheard.TiedLSTM(vocabulary_size=10_000, tied=tied).layout.total for tied in (True, False))
    assert untied == tied + 10_000 * 96
    assert 1 - tied / untied == pytest.approx(0.4, abs=0.02)


@pytest.mark.parametrize("cell", [unheard.TiedLSTM, unheard.TiedGRU])
def test_a_run_takes_the_vocabulary_size_that_is_left_out_from_its_store(run, store, tmp_path, cell):
    """The run file and the run's hash hold the number, so the run is the same as one that states it."""
    model = cell(embedding_size=6, hidden_size=8)
    with pytest.raises(ModelError, match="no vocabulary_size yet"):
        _ = model.layout
    run = replace(run, model=model, training=unheard.Training(rounds=1))
    list(unheard.train(run, tmp_path / "left-out"))
    saved, _ = read_saved_run(tmp_path / "left-out" / "run.toml")
    stated = replace(run, model=replace(model, vocabulary_size=len(store.vocabulary)))
    assert saved.model.vocabulary_size == len(store.vocabulary)
    assert run_hash(saved) == run_hash(stated)
    list(unheard.resume(tmp_path / "left-out", rounds=2))


def test_a_run_file_may_leave_the_vocabulary_size_out(run, store, tmp_path):
    tables = tables_from_run(run)
    del tables["model"]["vocabulary_size"]
    path = tmp_path / "run.toml"
    path.write_text(tomli_w.dumps(tables))
    left_out, _ = read_run_file(path)
    assert run_hash(pinned(left_out)) == run_hash(run)


def torchs_lstm(model: unheard.TiedLSTM, params: dict[str, torch.Tensor]) -> nn.LSTM:
    """torch orders gates input, forget, cell, output, as ours; it keeps input and state weights apart and transposed."""
    lstm = nn.LSTM(model.embedding_size, model.hidden_size, batch_first=True)
    weight = torch.cat([params[f"{gate}_weight"] for gate in model.gates], dim=1).T
    with torch.no_grad():
        lstm.weight_ih_l0.copy_(weight[:, : model.embedding_size])
        lstm.weight_hh_l0.copy_(weight[:, model.embedding_size :])
        lstm.bias_ih_l0.copy_(torch.cat([params[f"{gate}_bias"] for gate in model.gates]))
        lstm.bias_hh_l0.zero_()
    return lstm


@pytest.mark.parametrize("unit_norm", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_the_logits_are_those_of_torchs_lstm(tied, unit_norm):
    model = unheard.TiedLSTM(vocabulary_size=20, embedding_size=5, hidden_size=7, tied=tied, unit_norm=unit_norm)
    params_P = model.initial(3) * 1.7  # not of norm 1, so that normalising has an effect
    params = model.layout.split(params_P)
    tokens = torch.randint(20, (3, 6), generator=torch.Generator().manual_seed(0))
    rows = {
        name: nn.functional.normalize(params[name], dim=1) if unit_norm else params[name]
        for name in params
        if "embedding" in name
    }
    hidden, _ = torchs_lstm(model, params)(rows["embedding"][tokens])
    output = hidden @ params["projection_weight"] + params["projection_bias"]
    expected = output @ rows["embedding" if tied else "output_embedding"].T
    torch.testing.assert_close(model.logits(params, tokens, None), expected.detach(), atol=1e-5, rtol=1e-5)


def test_the_same_seed_begins_in_the_same_place_and_another_elsewhere(model):
    assert torch.equal(model.initial(1), model.initial(1))
    assert not torch.equal(model.initial(1), model.initial(2))


def test_the_server_puts_word_vectors_back_on_the_sphere_and_touches_nothing_else(model):
    model = replace(model, keep_norm=True)
    moved = model.initial(0) + 0.3
    before, after = model.layout.split(moved), model.layout.split(model.project(moved))
    torch.testing.assert_close(after["embedding"].norm(dim=1), torch.ones(model.vocabulary_size))
    torch.testing.assert_close(after["embedding"], nn.functional.normalize(before["embedding"], dim=1))
    assert all(torch.equal(after[name], before[name]) for name in after if name != "embedding")


def test_word_vectors_are_normalised_after_a_local_step_for_one_user_and_for_many(model):
    model = replace(model, step_norm=True)
    moved_UP = torch.stack([model.initial(0) + 0.3, model.initial(1) - 0.2])
    together = model.project_local(moved_UP)
    assert all(torch.equal(row, model.project_local(moved)) for row, moved in zip(together, moved_UP, strict=True))
    assert torch.equal(together[0], model.project(moved_UP[0]))  # the server does the same after the noise
    norms = model.layout.split(together)["embedding"].norm(dim=-1)
    torch.testing.assert_close(norms, torch.ones(2, model.vocabulary_size))
    assert torch.equal(replace(model, unit_norm=False).project_local(moved_UP), moved_UP)


@pytest.mark.parametrize("kind", [unheard.TiedLSTM, unheard.TiedGRU])
def test_word_vectors_can_be_left_unnormalised(kind):
    moved = kind(vocabulary_size=20, embedding_size=5, hidden_size=7).initial(0) + 0.3
    for options in ({}, {"unit_norm": False}, {"unit_norm": False, "keep_norm": True}):
        model = kind(vocabulary_size=20, embedding_size=5, hidden_size=7, **options)
        assert torch.equal(model.project(moved), moved)


def test_scaling_a_word_vector_changes_no_prediction(model):
    params_P = model.initial(0)
    scaled_P = params_P.clone()
    model.layout.split(scaled_P)["embedding"].mul_(3.0)
    tokens = torch.arange(10).view(2, 5)
    logits = [model.logits(model.layout.split(p), tokens, None) for p in (params_P, scaled_P)]
    torch.testing.assert_close(*logits)


def test_features_about_the_user_change_what_is_predicted():
    model = unheard.TiedLSTM(vocabulary_size=20, embedding_size=4, hidden_size=6, user_features=2)
    params, tokens = model.layout.split(model.initial(0)), torch.arange(6).view(1, 6)
    one, other = (model.logits(params, tokens, torch.tensor(f)) for f in ([1.0, 0.0], [0.0, 1.0]))
    assert not torch.allclose(one, other)


def test_padding_and_bos_are_never_targets():
    inputs, targets, counts = window_targets(torch.tensor([[0, 5, 1, 0, 7, PAD, PAD]]))
    assert counts.tolist() == [[True, True, False, True, False, False]]
    assert inputs.min() >= 0
    assert targets.min() >= 0


def test_a_batch_without_targets_has_no_loss_and_no_gradient(model):
    theta = model.initial(0).requires_grad_()
    loss = mean_loss(model, model.layout.split(theta), torch.full((2, 6), PAD), None)
    assert loss.item() == 0.0
    assert not torch.autograd.grad(loss, theta)[0].any()


def test_the_loss_is_the_mean_over_real_targets(model):
    params = model.layout.split(model.initial(0))
    short = mean_loss(model, params, torch.tensor([[0, 4, 5]]), None)
    padded = mean_loss(model, params, torch.tensor([[0, 4, 5, PAD, PAD], [PAD] * 5]), None)
    torch.testing.assert_close(short, padded)


@pytest.mark.parametrize(
    "bad", [{"vocabulary_size": 3}, {"embedding_size": 0}, {"hidden_size": 0}, {"user_features": -1}]
)
def test_impossible_sizes_are_refused(bad):
    with pytest.raises(InvalidValue):
        unheard.TiedLSTM(**bad)


def unrolled_gradients(unroll, gates_UBTG, weight_UHG, autocast=False):
    """Return the gradients of the sum of squared states for each user, computed as in engines/vectorised.py."""

    def loss(gates_BTG, weight_HG):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return unroll(gates_BTG, weight_HG.to(torch.bfloat16) if autocast else weight_HG).square().sum()

    return vmap(grad(loss, argnums=(0, 1)))(gates_UBTG, weight_UHG)


@pytest.mark.parametrize("compiled", [False, True])
def test_the_states_with_a_backward_pass_of_their_own_agree_with_autograd(compiled):
    torch.manual_seed(0)
    gates, weight = torch.randn(3, 2, 5, 24).double(), torch.randn(3, 6, 24).double() * 0.4
    plain = unheard.TiedLSTM(vocabulary_size=10, hidden_size=6)._unroll
    assert torch.allclose(lstm_states(gates[0], weight[0]), plain(gates[0], weight[0]), atol=1e-12)
    own = partial(unrolled_gradients, lstm_states)
    if compiled:
        torch.compiler.allow_in_graph(lstm_states)  # as engines/vectorised.py does
        own = torch.compile(own, backend="aot_eager", fullgraph=True)
    for ours, expected in zip(own(gates, weight), unrolled_gradients(plain, gates, weight), strict=True):
        assert expected.norm() > 0.5
        assert torch.allclose(ours, expected, atol=1e-12)


def test_the_states_with_a_backward_pass_of_their_own_agree_in_bfloat16():
    torch.manual_seed(0)
    gates, weight = torch.randn(3, 2, 5, 24), torch.randn(3, 6, 24) * 0.4
    plain = unheard.TiedLSTM(vocabulary_size=10, hidden_size=6)._unroll
    exact = unrolled_gradients(plain, gates, weight)
    for unroll in (plain, lstm_states):
        for coarse, expected in zip(unrolled_gradients(unroll, gates, weight, autocast=True), exact, strict=True):
            assert coarse.dtype == torch.float32
            assert (coarse - expected).norm() < 0.01 * expected.norm()


def test_the_engine_lets_the_compiler_take_the_states_whole_before_it_compiles(monkeypatch):
    done = []
    monkeypatch.setattr(torch.compiler, "allow_in_graph", done.append)
    monkeypatch.setattr(torch, "compile", lambda step: lambda *args: (*done, *args))
    engine = VectorisedEngine(unheard.TiedLSTM(vocabulary_size=10), torch.device("cuda"))
    assert engine._step("chunk") == (lstm_states, "chunk")
