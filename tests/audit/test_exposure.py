"""Exposure of planted phrases: high if the model has memorised a phrase, and low if not."""

import math

import numpy as np
import pytest
import torch

import unheard
from unheard.audit.exposure import Exposure, exposures, log_probability, memorized
from unheard.corpus.store import write_store
from unheard.corpus.vocabulary import BOS, EOS, Vocabulary
from unheard.errors import InvalidValue

WORDS = 60
SECRETS = [[7, 31, 12, 55, 20], [40, 9, 9, 33, 61], [5, 58, 22, 17, 48]]
CONTROLS = [[11, 60, 4, 37, 26]]


def record(*phrases, users=()) -> list[dict]:
    return [
        {"tokens": [BOS, *phrase, EOS], "carriers": carriers, "repeats": 1}
        for phrase, carriers in zip(phrases, users, strict=True)
    ]


def trained(tmp_path, noise, clip, rounds, carriers):
    """Train a model on users who count, some of whom also write the secrets."""
    rng = np.random.default_rng(5)
    users = [np.array([BOS, *(3 + (rng.integers(WORDS) + np.arange(14)) % WORDS), EOS]) for _ in range(40)]
    for secret, number in zip(SECRETS, carriers, strict=True):
        for k in rng.permutation(40)[:number]:
            users[k] = np.concatenate([np.tile([BOS, *secret, EOS], 4), users[k]])
    store = write_store(
        tmp_path / "corpus",
        train=users,
        held_out=users[:4],
        vocabulary=Vocabulary.of([f"w{i}" for i in range(WORDS)]),
        info={"tokens": {"kind": "words"}},
    )
    run = unheard.Run(
        corpus=store.path,
        model=unheard.TiedLSTM(vocabulary_size=WORDS + 3, embedding_size=24, hidden_size=32),
        plan=unheard.Plan(
            population=40,
            sampling=unheard.PoissonSampling(sampling_prob=1.0),
            update=unheard.FedAvg(batch_size=4, unroll=7, learning_rate=4.0),
            clip=clip,
            noise=noise,
        ),
        training=unheard.Training(rounds=rounds, reproducible_seed=1, checkpoint_every=1000),
        evaluation=unheard.Evaluation(every=1000, max_tokens=100, unroll=7),
    )
    list(unheard.train(run, tmp_path / "r", allow_no_privacy=True))
    return unheard.Released.open(tmp_path / "r")


def test_log_probability_by_hand():
    model = unheard.TiedLSTM(vocabulary_size=10, embedding_size=4, hidden_size=5)
    params_P = model.initial(3)
    phrase = [4, 8, 3]
    context, expected = [BOS], 0.0
    for word in phrase:
        logits = model.logits(model.layout.split(params_P), torch.tensor([context]))[0, -1].double()
        expected += torch.log_softmax(logits, -1)[word].item()
        context.append(word)
    assert log_probability(model, params_P, np.array([phrase]))[0] == pytest.approx(expected, rel=1e-5)


def test_of_an_untrained_model_exposures_are_those_of_chance():
    model = unheard.TiedLSTM(vocabulary_size=63, embedding_size=8, hidden_size=8)
    rng = np.random.default_rng(1)
    phrases = rng.integers(3, 63, size=(200, 5)).tolist()
    planted = record(*phrases, users=[1] * 200)
    found = np.array([e.exposure for e in exposures(model, model.initial(0), planted, rng, candidates=2000)])
    for x in (1, 2, 3):
        assert np.mean(found >= x) == pytest.approx(2.0**-x, abs=3.5 * math.sqrt(2.0**-x / 200))


@pytest.mark.parametrize("carried", [1, 3, 40])
def test_chance_alone_memorizes_something_in_one_of_twenty_audits_at_most(carried):
    rng, candidates, audits = np.random.default_rng(carried), 9_999, 800
    most = math.log2(candidates + 1)

    def chance(users):
        rank = int(rng.integers(1, candidates + 2))
        return Exposure(number=0, users=users, repeats=1, rank=rank, exposure=most - math.log2(rank), most=most)

    found = sum(bool(memorized([chance(1) for _ in range(carried)] + [chance(0)] * 3)) for _ in range(audits))
    assert found / audits == pytest.approx(0.05, abs=5 * math.sqrt(0.05 * 0.95 / audits))


def test_the_likeliest_phrase_has_the_most_exposure_and_the_least_likely_none():
    model = unheard.TiedLSTM(vocabulary_size=8, embedding_size=4, hidden_size=4)
    params_P, rng = model.initial(2), np.random.default_rng(1)
    everything = np.stack(np.meshgrid(*[np.arange(3, 8)] * 2), -1).reshape(-1, 2)
    by_likelihood = everything[np.argsort(log_probability(model, params_P, everything))]
    planted = record(by_likelihood[-1].tolist(), by_likelihood[0].tolist(), users=[1, 1])
    first, last = exposures(model, params_P, planted, rng, candidates=2000)
    assert first.rank == pytest.approx(1 + 2000 / 25, rel=0.3)  # this many candidates equal the phrase
    assert 0 <= last.exposure < 0.1
    for one in (first, last):
        assert one.exposure == pytest.approx(math.log2(2001 / one.rank), rel=1e-12)  # among the phrase and 2,000 others


def test_without_privacy_phrases_of_many_users_are_memorized_and_controls_are_not(tmp_path):
    released = trained(tmp_path, unheard.NoNoise(), unheard.NoClip(), 15, carriers=(1, 8, 30))
    planted = record(*SECRETS, *CONTROLS, users=[1, 8, 30, 0])
    found = list(exposures(released.run.model, released.params_P, planted, np.random.default_rng(1), candidates=4000))
    assert found[2].exposure > 11
    assert 2 in {one.number for one in memorized(found)}
    assert 3 not in {one.number for one in memorized(found)}
    assert found[2].exposure >= found[0].exposure


def test_with_privacy_no_single_users_secret_is(tmp_path):
    noise = unheard.GaussianNoise(noise_multiplier=2.0)
    released = trained(tmp_path, noise, unheard.FlatClip(norm=2.0), 10, carriers=(1, 1, 1))
    planted = record(*SECRETS, users=[1, 1, 1])
    found = list(exposures(released.run.model, released.params_P, planted, np.random.default_rng(1), candidates=4000))
    assert memorized(found) == []


def test_too_few_candidates_are_refused(model):
    with pytest.raises(InvalidValue, match="100"):
        list(exposures(model, model.initial(0), record([4], users=[1]), np.random.default_rng(1), candidates=5))
