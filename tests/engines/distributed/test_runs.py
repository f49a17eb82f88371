"""Runs on many ranks equal runs in one process: model, ledger, epsilon and metrics, with one draw of noise and one folder."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import unheard
from tests.engines.distributed.forks import on_ranks
from unheard.audit.exposure import log_probability, phrases
from unheard.audit.one_run import BackgroundUsers
from unheard.engines.choice import EngineChoice
from unheard.evaluation.measures import score
from unheard.evaluation.next_word import evaluate
from unheard.privacy.accountants import epsilon
from unheard.privacy.ledger import Ledger
from unheard.randomness import ReproducibleStreams
from unheard.training import initialise, worker
from unheard.training.checkpoint import load_model
from unheard.training.initialise import population_ledger_of
from unheard.training.loop import train_together
from unheard.updates.user_update import users_in_turn

CPU = EngineChoice(device="cpu")


@pytest.fixture
def seeded(run):
    return replace(run, training=unheard.Training(rounds=3, checkpoint_every=2, reproducible_seed=3))


def released(folder: Path, model) -> torch.Tensor:
    return load_model(folder / "model.safetensors", model)


def told(folder: Path) -> tuple:
    """Return what must be equal for two runs: charges, epsilon and metrics."""
    ledger = Ledger.read(folder / "ledger.jsonl")
    return ledger.events, epsilon(ledger.events, 1e-3, "rdp"), (folder / "metrics.jsonl").read_text()


@pytest.mark.parametrize("size", [2, 8])
def test_a_run_on_many_ranks_is_the_run_of_one(seeded, model, tmp_path, size):
    """Bit for bit, including the noise, which the leader draws once."""
    list(unheard.train(seeded, tmp_path / "alone", engine=CPU))

    def lead(ranks):
        list(unheard.train(seeded, tmp_path / "together", engine=CPU, ranks=ranks))

    on_ranks(size, lead)
    assert torch.equal(released(tmp_path / "together", model), released(tmp_path / "alone", model))
    assert told(tmp_path / "together") == told(tmp_path / "alone")
    assert len(told(tmp_path / "alone")[0]) == 3


def test_a_run_continues_with_another_number_of_ranks(seeded, model, tmp_path):
    list(unheard.train(seeded, tmp_path / "alone", engine=CPU))
    shorter = replace(seeded, training=replace(seeded.training, rounds=1))
    list(unheard.train(shorter, tmp_path / "together", engine=CPU))

    def lead(ranks):
        list(unheard.resume(tmp_path / "together", rounds=3, ranks=ranks))

    on_ranks(3, lead)
    assert torch.equal(released(tmp_path / "together", model), released(tmp_path / "alone", model))


def test_runs_side_by_side_on_ranks_are_the_runs_that_each_would_be_alone(seeded, model, tmp_path):
    runs = [
        replace(seeded, plan=replace(seeded.plan, clip=clip), training=replace(seeded.training, reproducible_seed=k))
        for k, clip in enumerate([unheard.FlatClip(norm=0.3), unheard.PerLayerClip(norm=1.0)])
    ]
    for k, run in enumerate(runs):
        list(unheard.train(run, tmp_path / f"alone-{k}", engine=CPU))

    def lead(ranks):
        list(train_together([(r, tmp_path / f"together-{k}") for k, r in enumerate(runs)], engine=CPU, ranks=ranks))

    on_ranks(2, lead)
    for k in range(2):
        assert torch.equal(released(tmp_path / f"together-{k}", model), released(tmp_path / f"alone-{k}", model))
        assert told(tmp_path / f"together-{k}") == told(tmp_path / f"alone-{k}")


def measures(spread, store, model, params_P) -> np.ndarray:
    users = unheard.Evaluation(max_tokens=400).choose(users_in_turn(store.held_out, model))
    quick = evaluate(model, params_P, users, unroll=7, at_once=60, parallel_map=spread)
    scores, heads = score(model, params_P, users, unroll=7, at_once=60, parallel_map=spread)
    words = np.random.default_rng(0).integers(3, model.vocabulary_size, size=(600, 4))
    return np.concatenate(
        [
            np.array(list(quick.values())),
            *(scores.user_N, scores.target_N, scores.rank_N, scores.loss_N),
            *heads.values(),
            log_probability(model, params_P, words, parallel_map=spread),
        ]
    )


@pytest.mark.parametrize("size", [2, 3])
def test_measures_and_canary_scores_on_ranks_are_those_of_one_to_the_bit(store, model, size):
    params_P = model.initial(3)

    def lead(ranks):
        return measures(worker.parallel_map_for(model, ranks), store, model, params_P)

    alone = measures(worker.parallel_map_for(model, None), store, model, params_P)
    together = on_ranks(size, lead, lambda ranks: worker.serve(ranks, (*worker.JOBS, phrases)))
    assert np.array_equal(together, alone)


def test_a_model_with_features_is_measured_and_trained_on_ranks_too(store, tmp_path):
    from unheard.corpus.store import write_store

    rng = np.random.default_rng(1)
    features = {"train": rng.normal(size=(60, 2)), "held_out": rng.normal(size=(10, 2))}
    known = write_store(
        tmp_path / "known",
        train=store.train.users(np.arange(60)),
        held_out=store.held_out.users(np.arange(10)),
        vocabulary=store.vocabulary,
        info={"tokens": {"kind": "words"}},
        features=features,
    )
    model = unheard.TiedLSTM(vocabulary_size=50, embedding_size=4, hidden_size=4, user_features=2)
    plan = unheard.Plan(
        population=60,
        sampling=unheard.PoissonSampling(users_per_round=10),
        update=unheard.FedAvg(batch_size=2, unroll=5, learning_rate=1.0),
        clip=unheard.FlatClip(norm=1.0),
        noise=unheard.GaussianNoise(noise_multiplier=1.0),
    )
    run = unheard.Run(
        corpus=known.path, model=model, plan=plan, training=unheard.Training(rounds=2, reproducible_seed=0)
    )
    list(unheard.train(run, tmp_path / "alone", engine=CPU))
    on_ranks(2, lambda ranks: [None for _ in unheard.train(run, tmp_path / "two", engine=CPU, ranks=ranks)] and None)
    assert torch.equal(released(tmp_path / "two", model), released(tmp_path / "alone", model))
    assert told(tmp_path / "two") == told(tmp_path / "alone")


def test_an_audit_with_users_on_ranks_sums_what_one_process_sums(seeded, store, model, tmp_path):
    def sums(ranks) -> np.ndarray:
        built = initialise.build_engine(CPU, model, ranks)
        initialise.check_all_users_reachable(built, store)
        run = replace(seeded, ledger=tmp_path / f"people-{0 if ranks is None else ranks.size}.jsonl")
        company = BackgroundUsers(
            run, store, built, ReproducibleStreams(seed=1), population_ledger_of(run, store), "a run"
        )
        plan = run.plan.at(0, model.layout)
        nobody = plan.contribution.sum([], model.layout.total)
        return np.stack([company.join(nobody, plan, plan.event(), r).units_P.numpy() for r in range(2)])

    alone = sums(None)
    assert np.abs(alone).sum() > 0
    assert np.array_equal(on_ranks(2, sums), alone)
