"""examples/dp_fedavg_plain.py and the library compute the same models, noise included, up to the grid."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import torch

import unheard
from unheard.engines.vectorised import VectorisedEngine
from unheard.models.model import mean_loss
from unheard.randomness import ReproducibleStreams
from unheard.training.round import run_round
from unheard.training.server import AddServer, State

EXAMPLE = Path(__file__).parents[2] / "examples" / "dp_fedavg_plain.py"


def load_example():
    spec = importlib.util.spec_from_file_location("dp_fedavg_plain", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_plain_example_and_the_library_agree_round_by_round(store, model):
    model = replace(model, keep_norm=True)  # so that there is something to project
    plain, streams = load_example(), ReproducibleStreams(seed=11)
    settings = dict(q=0.2, W=40.0, w_hat=60, z=0.8, S=1.5, B=2, E=2, eta=0.7, unroll=5, rounds=4)
    models = plain.dp_fedavg(
        [store.train.tokens(k) for k in range(store.train.num_users)],
        model.initial(3),
        lambda theta, batch: mean_loss(model, model.layout.split(theta), batch, None),
        **settings,
        sampling=streams.sampling,
        noise=streams.noise,
        project=model.project,
    )
    plan = unheard.Plan(
        population=60,
        sampling=unheard.PoissonSampling(sampling_prob=0.2),
        weights=unheard.CappedWeights(weight_cap=60, total_weight=40.0),
        update=unheard.FedAvg(batch_size=2, unroll=5, epochs=2, learning_rate=0.7),
        clip=unheard.FlatClip(norm=1.5),
        noise=unheard.GaussianNoise(noise_multiplier=0.8),
    ).at(0, model.layout)
    state = State(round=0, params_P=model.initial(3))
    for t, theta in enumerate(models):
        state = run_round(state, plan, model, AddServer(), store.train, VectorisedEngine(model), streams, t)
        torch.testing.assert_close(state.params_P, theta, atol=3e-5, rtol=0)
    assert state.round == 4


def test_the_plain_example_runs_and_learns(capsys):
    load_example().main()
    last = capsys.readouterr().out.splitlines()[-1]
    assert int(last.split(":")[1].split("%")[0]) > 50  # a guess would be right 1 time in 27
