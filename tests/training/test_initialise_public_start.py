"""A public start: train without privacy on public text, then privately from that model, and check the statement."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from tests.conftest import WORDS, counting_user

import unheard
from unheard.corpus.store import write_store
from unheard.corpus.vocabulary import Vocabulary
from unheard.privacy.ledger import Ledger
from unheard.privacy.population_ledger import PopulationLedger
from unheard.privacy.statement import compute_statement, render_text
from unheard.training import checkpoint
from unheard.training.checkpoint import load_model


@pytest.fixture(scope="module")
def public_store(tmp_path_factory):
    """A store of other users with the same vocabulary."""
    rng = np.random.default_rng(99)
    return write_store(
        tmp_path_factory.mktemp("public") / "corpus",
        train=[counting_user(rng, 200) for _ in range(40)],
        held_out=[counting_user(rng, 60) for _ in range(5)],
        vocabulary=Vocabulary.of([f"w{i}" for i in range(WORDS)]),
        info={"tokens": {"kind": "words"}, "vocabulary": {"kind": "file", "source": "a test's own words"}},
    )


@pytest.fixture(scope="module")
def public_run(public_store, model, tmp_path_factory):
    plan = unheard.Plan(
        population=40,
        sampling=unheard.FixedSizeSampling(users_per_round=10),
        update=unheard.FedAvg(batch_size=2, unroll=5, learning_rate=2.0),
        clip=unheard.NoClip(),
        estimator=unheard.TrueAverage(),
        noise=unheard.NoNoise(),
    )
    run = unheard.Run(
        corpus=public_store.path,
        model=model,
        plan=plan,
        training=unheard.Training(rounds=8),
        evaluation=unheard.Evaluation(every=8, max_tokens=200, unroll=20),
    )
    folder = tmp_path_factory.mktemp("runs") / "public"
    for _ in unheard.train(run, folder, allow_no_privacy=True):
        pass
    return folder


def finished(run, folder) -> dict:
    """Train a run to its end and return its last evaluation."""
    for _ in unheard.train(run, folder):
        pass
    return json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])


def test_a_public_start_improves_the_model_costs_nothing_and_is_in_the_statement(run, public_run, tmp_path):
    start = unheard.Training(rounds=3, init_from=str(public_run), init_is_public=True)
    begun = finished(replace(run, training=start), tmp_path / "from-public")
    alone = finished(replace(run, training=unheard.Training(rounds=3)), tmp_path / "from-seed")
    assert begun["loss"] < alone["loss"]
    assert begun["epsilon"] == alone["epsilon"]  # three rounds, and nothing for the start
    ledger = Ledger.read(tmp_path / "from-public" / "ledger.jsonl")
    assert len(ledger) == 3
    told = compute_statement(ledger.facts, ledger.entries)
    assert math.isfinite(told["claimed"]["epsilon"])
    assert told["start"]["from"] == "a model declared public"
    page = render_text(told)
    assert "declared public" in page
    assert "The people of that public corpus are not protected" in page


def test_a_private_run_continues_from_the_very_parameters(run, public_run, model, tmp_path):
    start = replace(run.training, rounds=1, init_from=str(public_run), init_is_public=True)
    reports = unheard.train(replace(run, training=start), tmp_path / "r")
    right = load_model(public_run / "model.safetensors", model)
    assert (load_model(tmp_path / "r" / "model.safetensors", model) == right).all()
    del reports


def test_undeclared_the_public_run_is_charged_and_epsilon_is_infinite(run, public_run, tmp_path):
    start = replace(run.training, rounds=1, init_from=str(public_run))
    assert finished(replace(run, training=start), tmp_path / "r")["epsilon"] is None
    told = compute_statement(*_ledger(tmp_path / "r"))
    assert told["claimed"]["epsilon"] == "infinity"


def _ledger(folder):
    ledger = Ledger.read(folder / "ledger.jsonl")
    return ledger.facts, ledger.entries


def test_a_model_is_known_to_the_population_before_it_is_on_disk(run, tmp_path, monkeypatch):
    """Also if the write fails: a copy of the written file can never be declared a public model."""
    own = replace(run, ledger=tmp_path / "ledger.jsonl", training=unheard.Training(rounds=1))
    real, known = checkpoint._save, []

    def save(path, tensors, facts):
        known.append((facts["round"], len(PopulationLedger.read(tmp_path / "ledger.jsonl").released)))
        real(path, tensors, facts)

    monkeypatch.setattr(checkpoint, "_save", save)
    list(unheard.train(own, tmp_path / "r"))
    assert known == [(0, 0), (0, 0), (1, 1), (1, 1)]
