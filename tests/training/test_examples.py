"""Sampling of examples with a guarantee for users: the draw, the sum, the charge, and the refused combinations."""

import json
import math

import numpy as np
import pytest
import torch
from dp_accounting.dp_event import MixtureOfGaussiansDpEvent
from dp_accounting.pld import PLDAccountant

import unheard
from unheard.engines.engine import Drawn
from unheard.engines.reference import ReferenceEngine
from unheard.errors import InvalidValue, UnprovenCombination
from unheard.mechanism.sampling import ExampleSampling
from unheard.privacy.events import ExampleGaussian
from unheard.updates.user_update import StoredExamples, User

SAMPLING = ExampleSampling(examples_per_user=3, examples_per_round=12, total_examples=150)


def plan_of(**changes):
    settings = {
        "population": 60,
        "sampling": SAMPLING,
        "update": unheard.FedSGD(unroll=5, learning_rate=0.5),
        "clip": unheard.FlatClip(norm=0.3),
        "noise": unheard.GaussianNoise(noise_multiplier=1.0),
    }
    return unheard.Plan(**{**settings, **changes})


def test_no_user_has_more_than_g_examples_and_each_is_drawn_with_probability_q():
    lengths_U = np.array([0, 1, 2, 6, 7, 100, 16])  # windows of five tokens: 0, 0, 1, 1, 2, 20, 3
    rng = np.random.default_rng(1)
    drawn = [SAMPLING.draw_examples(lengths_U, 5, 60, rng) for _ in range(4000)]
    counts = np.zeros((7, 20))
    for user_E, window_E in drawn:
        assert len(np.unique(user_E * 100 + window_E)) == len(user_E)
        np.add.at(counts, (user_E, window_E), 1)
    possible = np.zeros((7, 20), dtype=bool)
    for user, examples in enumerate([0, 0, 1, 1, 2, 3, 3]):
        possible[user, :examples] = True
    assert not counts[~possible].any()
    assert counts[possible] / 4000 == pytest.approx(np.full(10, 12 / 150), abs=0.02)
    assert len({len(user_E) for user_E, _ in drawn}) > 3  # the number of examples is random
    empty = SAMPLING.draw_examples(np.array([], dtype=np.int64), 5, 60, rng)
    assert [len(part) for part in empty] == [0, 0]


def test_every_example_adds_one_clipped_gradient(store):
    model = unheard.TiedLSTM(vocabulary_size=len(store.vocabulary), embedding_size=4, hidden_size=5)
    plan, params = plan_of().at(0, model.layout), model.initial(0)
    assert plan.expected_weight == 12
    assert plan.sensitivity == pytest.approx(0.3 / 12)
    long = int(np.argmax(store.train.lengths()))
    examples = StoredExamples(store.train, np.array([long, long, 0]), np.array([0, 2, 0]), 5)
    engine = ReferenceEngine(model)
    total = engine.sum_updates(params, examples, plan, Drawn(1))
    tokens = store.train.tokens(long)
    windows = [tokens[:6], tokens[10:16], store.train.tokens(0)[:6]]
    alone = [engine.sum_updates(params, [User(window)], plan, Drawn(1)).units_P for window in windows]
    assert torch.equal(total.units_P, torch.stack(alone).sum(dim=0))
    assert total.weight == 3
    assert repr(examples).startswith("<unheard.updates.user_update.StoredExamples object")


def test_a_run_charges_its_event_and_the_statement_says_what_is_left_out(store, tmp_path, monkeypatch):
    import shutil

    monkeypatch.setattr("unheard.privacy.accountants.EXAMPLE_GRID", 0.02)  # quick; both bounds below are on this grid
    shutil.copytree(store.path, tmp_path / "store")
    run = unheard.Run(
        corpus=tmp_path / "store",
        model=unheard.TiedLSTM(embedding_size=4, hidden_size=5),
        plan=plan_of(),
        training=unheard.Training(rounds=3),
        evaluation=unheard.Evaluation(every=3, max_tokens=200),
    )
    reports = list(unheard.train(run, tmp_path / "run"))
    assert reports[-1].accountant == "pld"
    assert 0 < reports[-1].epsilon < 100
    statement = json.loads((tmp_path / "run" / "statement.json").read_text())
    assert statement["claimed"]["accountant"] == "pld"
    assert any("at most 3 examples of each user" in line for line in statement["warnings"])
    # The same epsilon, computed by dp-accounting from the text of the ledger alone.
    lines = [json.loads(line) for line in (tmp_path / "run" / "ledger.jsonl").read_text().splitlines()]
    charged = [line["event"] for line in lines if "event" in line]
    assert charged == [charged[0]] * 3
    G, q = charged[0]["examples_per_user"], charged[0]["sampling_prob"]
    shares = [math.comb(G, i) * q**i * (1 - q) ** (G - i) for i in range(G + 1)]
    accountant = PLDAccountant(value_discretization_interval=0.02)
    accountant.compose(MixtureOfGaussiansDpEvent(charged[0]["noise_multiplier"], list(range(G + 1)), shares), 3)
    assert statement["claimed"]["epsilon"] == pytest.approx(accountant.get_epsilon(statement["delta"]), rel=2e-3)
    event = run.plan.at(0, unheard.TiedLSTM(vocabulary_size=5, embedding_size=2, hidden_size=2).layout).event()
    assert event == ExampleGaussian(sampling_prob=12 / 150, examples_per_user=3, noise_multiplier=1.0)


def test_parts_without_a_proof_are_refused():
    with pytest.raises(UnprovenCombination, match="FedAvg"):
        plan_of(update=unheard.FedAvg())
    with pytest.raises(UnprovenCombination, match="without batch_size"):
        plan_of(update=unheard.FedSGD(batch_size=2))
    with pytest.raises(UnprovenCombination, match="every example counts 1"):
        plan_of(estimator=unheard.ClippedDenominator(min_total_weight=5.0))
    with pytest.raises(UnprovenCombination, match="every example counts 1"):
        plan_of(weights=unheard.CappedWeights(weight_cap=5, total_weight=60.0))
    with pytest.raises(UnprovenCombination, match="adaptive clip"):
        plan_of(clip=unheard.AdaptiveClip(initial_norm=0.3))
    with pytest.raises(InvalidValue, match="cannot have 500 examples"):
        plan_of(sampling=ExampleSampling(examples_per_user=3, examples_per_round=12, total_examples=500))
