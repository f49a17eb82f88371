"""`train` agrees with Algorithm 1 in plain torch, examples/dp_fedavg_plain.py, which does not import the package."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import unheard
from unheard.mechanism.exact_normal import exact_normals
from unheard.models.model import mean_loss
from unheard.privacy.ledger import Ledger
from unheard.randomness import split_stream
from unheard.run_folder import RunFolder
from unheard.training.checkpoint import checkpoint_files, read_checkpoint
from unheard.training.initialise import streams_of

EXAMPLE = Path(__file__).parents[2] / "examples" / "dp_fedavg_plain.py"


def load_example():
    spec = importlib.util.spec_from_file_location("dp_fedavg_plain", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Normals:
    """A generator of the normals that the example draws, for the noise of `train`."""

    def __init__(self, rng):
        self.rng = rng

    def standard_normal(self, count):
        drawn = exact_normals(split_stream(self.rng, 1)[0], count)
        return np.where(drawn.words & np.uint64(1), -drawn.value, drawn.value)


@pytest.mark.parametrize("engine", ["reference", "vectorised", "stacked"])
def test_train_and_the_plain_example_agree_after_every_round(store, model, tmp_path, engine):
    """The same seed, cohorts and noise: `train` gives the example's model after each of four rounds."""
    model = replace(model, keep_norm=True)  # so that the projection after the noise has an effect
    plain = load_example()
    run = unheard.Run(
        corpus=store.path,
        model=model,
        plan=unheard.Plan(
            population=60,
            sampling=unheard.PoissonSampling(sampling_prob=0.2),
            weights=unheard.CappedWeights(weight_cap=60, total_weight=40.0),
            update=unheard.FedAvg(batch_size=2, unroll=5, epochs=2, learning_rate=0.7),
            clip=unheard.FlatClip(norm=1.5),
            noise=unheard.GaussianNoise(noise_multiplier=0.8),
        ),
        training=unheard.Training(rounds=4, init_seed=3, reproducible_seed=11, checkpoint_every=1, keep_checkpoints=4),
        evaluation=unheard.Evaluation(every=4, max_tokens=100),
    )
    list(unheard.train(run, tmp_path / "run", engine=unheard.EngineChoice(kind=engine, device="cpu")))
    streams = streams_of(run, Ledger.read(tmp_path / "run" / "ledger.jsonl").facts, store.content_digest)
    settings = dict(q=0.2, W=40.0, w_hat=60, z=0.8, S=1.5, B=2, E=2, eta=0.7, unroll=5, rounds=4)
    models = plain.dp_fedavg(
        [store.train.tokens(k) for k in range(store.train.num_users)],
        model.initial(3),
        lambda theta, batch: mean_loss(model, model.layout.split(theta), batch, None),
        **settings,
        sampling=streams.sampling,
        noise=lambda attempt: Normals(streams.noise(attempt)),
        project=model.project,
    )
    states = [read_checkpoint(path).state for path in checkpoint_files(RunFolder(tmp_path / "run"))]
    assert [state.round for state in states] == [1, 2, 3, 4]
    for state, theta in zip(states, models, strict=True):
        torch.testing.assert_close(state.params_P, theta, atol=3e-5, rtol=0)


@pytest.mark.system
def test_the_plain_example_runs_and_learns(capsys):
    load_example().main()
    last = capsys.readouterr().out.splitlines()[-1]
    assert int(last.split(":")[1].split("%")[0]) > 50  # a guess would be right 1 time in 27
