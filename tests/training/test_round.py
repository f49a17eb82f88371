"""One round: which users are drawn, which are evaluated, and which facts the ledger records."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import unheard
from unheard.corpus.vocabulary import BOS
from unheard.errors import ModelError
from unheard.mechanism.aggregation import CohortSum
from unheard.privacy.ledger import Ledger
from unheard.randomness import ReproducibleStreams
from unheard.training.round import AddServer, MomentumServer, Round, State, run_rounds


class CountingEngine:
    """An engine that records the cohorts and returns a sum of zero."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.cohorts: list[list[int]] = []

    def sum_cohorts(self, cohorts) -> list[CohortSum]:
        self.cohorts += [[user.number for user in cohort.users] for cohort in cohorts]
        return [cohort.plan.contribution.sum([], len(cohort.params_P)) for cohort in cohorts]

    def sum_updates(self, params_P, users, plan, rng) -> CohortSum:
        raise NotImplementedError


def test_a_cohort_is_drawn_with_the_declared_q_and_not_with_one_counted_in_the_store(store, model, plan):
    """12 users per round of 600 declared: q = 0.02, so 1.2 of the store's 60 users are drawn on average, not 12."""
    declared = replace(plan, population=600).at(0, model.layout)
    engine, streams, state = CountingEngine(), ReproducibleStreams(seed=3), State(round=0, params_P=model.initial(0))
    rounds = [
        Round(
            state=state,
            plan=declared,
            model=model,
            server=AddServer(),
            users=store.train,
            streams=streams,
            attempt=attempt,
        )
        for attempt in range(400)
    ]
    run_rounds(rounds, engine)
    assert 0.9 < np.mean([len(cohort) for cohort in engine.cohorts]) < 1.5
    assert {k for cohort in engine.cohorts for k in cohort} == set(range(store.train.num_users))


@pytest.mark.parametrize("population", [7, 60, 600])
def test_every_user_of_the_store_is_drawn_with_the_declared_q_however_many_were_declared(
    store, model, plan, population
):
    """With q = 1 all 60 users of the store take part, whatever population was declared."""
    sampling = unheard.PoissonSampling(sampling_prob=1.0)
    declared = replace(plan, population=population, sampling=sampling).at(0, model.layout)
    streams, state = ReproducibleStreams(seed=3), State(round=0, params_P=model.initial(0))
    engine = CountingEngine()
    parts = {"state": state, "model": model, "server": AddServer(), "users": store.train, "streams": streams}
    run_rounds([Round(plan=declared, attempt=0, **parts)], engine)
    assert engine.cohorts == [list(range(60))]


def test_rounds_of_several_runs_are_each_what_they_would_be_alone(store, model, plan):
    """Each has its own state, S, q, denominator, noise, adaptive clip and streams."""
    plans = [
        plan,
        replace(plan, clip=unheard.FlatClip(norm=0.3), noise=unheard.GaussianNoise(noise_multiplier=3.0)),
        replace(plan, sampling=unheard.PoissonSampling(users_per_round=31.0), population=70),
        replace(plan, estimator=unheard.ClippedDenominator(min_total_weight=20.0)),
        replace(plan, clip=unheard.AdaptiveClip(initial_norm=0.7)),
        replace(plan, update=replace(plan.update, learning_rate=0.1), clip=unheard.AdaptiveClip(initial_norm=1.7)),
    ]
    rounds = [
        Round(
            state=State(round=number, params_P=model.initial(number)),
            plan=one.at(0, model.layout),
            model=model,
            server=MomentumServer(learning_rate=1.0 + number),
            users=store.train,
            streams=ReproducibleStreams(seed=number),
            attempt=number,
        )
        for number, one in enumerate(plans)
    ]
    engine = unheard.EngineChoice(kind="stacked", device="cpu").build(model)
    alone = [run_rounds([one], engine)[0] for one in rounds]
    for number, state in enumerate(reversed(run_rounds(rounds[::-1], engine))):
        assert torch.equal(state.params_P, alone[number].params_P), number
        assert (state.round, state.clip_norm) == (number + 1, alone[number].clip_norm)
        assert torch.equal(state.server_memory["velocity"], alone[number].server_memory["velocity"])
    assert [state.clip_norm is None for state in alone] == [True] * 4 + [False] * 2


def test_a_run_is_measured_on_held_out_users_and_never_on_those_it_learned_from(run, store, tmp_path):
    everybody = replace(run, evaluation=unheard.Evaluation(every=6, unroll=20))
    last = list(unheard.train(everybody, tmp_path / "r"))[-1]
    held_out = [store.held_out.tokens(k) for k in range(store.held_out.num_users)]
    assert last.metrics is not None
    assert last.metrics["tokens"] == sum(int((tokens[1:] != BOS).sum()) for tokens in held_out)
    assert unheard.evaluate(tmp_path / "r")["tokens"] == last.metrics["tokens"]


def test_the_ledger_writes_down_these_facts_and_no_others(run, store, tmp_path):
    """All of them are declared or public. Before you add a fact, check that it does not depend on the users."""
    list(unheard.train(run, tmp_path / "r"))
    facts = Ledger.read(tmp_path / "r" / "ledger.jsonl").facts
    assert set(facts) == {
        *("population", "sampling", "weights", "estimator", "update", "phases", "delta", "randomness", "vocabulary"),
        *("tokens_sha256", "drop_duplicates", "start", "parameters", "corpus", "software", "run_hash", "run_id"),
        "declared",
    }
    assert str(store.train.num_tokens) not in json.dumps(facts)


class Remembers(nn.Module):
    """A model that keeps state between calls: it adds the previous input to the current one."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.last = nn.Embedding(50, 50), None

    def forward(self, tokens):
        scores = self.words(tokens)
        seen, self.last = self.last, scores.detach().mean((0, 1))
        return scores if seen is None else scores + seen


class AlwaysDrops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 50)

    def forward(self, tokens):
        return nn.functional.dropout(self.words(tokens), 0.5, training=True)


@pytest.mark.parametrize("kind", [Remembers, AlwaysDrops])
def test_a_model_that_remembers_or_draws_is_refused(run, tmp_path, kind):
    careless = replace(run, model=unheard.ModuleModel.wrap(kind(), vocabulary_size=50, weights_are_public=True))
    with pytest.raises(ModelError, match="function of parameters and tokens alone"):
        unheard.train(careless, tmp_path / "r")
    assert not (tmp_path / "r").exists()
