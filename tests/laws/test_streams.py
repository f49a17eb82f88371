"""Every random stream is secret and new: tests over all purposes, and tests of how each stream is used."""

import inspect
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import unheard
from unheard import randomness
from unheard.corpus.private_vocabulary import UNIT, WordRelease
from unheard.engines.choice import EngineChoice
from unheard.engines.engine import Cohort
from unheard.mechanism.clipping import AdaptiveClip
from unheard.mechanism.correlated import CorrelatedNoise, CorrelatedNormals, NoiseHistory
from unheard.mechanism.noise import GaussianNoise
from unheard.mechanism.sampling import CyclicPoissonSampling, ExampleSampling, PoissonSampling, Turn
from unheard.privacy.events import Selection
from unheard.randomness import ReproducibleStreams, SecureStreams, Streams, generator_from_key
from unheard.training.initialise import first_state, streams_of
from unheard.training.round import Round, run_rounds
from unheard.tuning import private_selection
from unheard.tuning.private_selection import TrialCount
from unheard.updates.user_update import StoredUsers, User

PURPOSES = [name for name, _ in inspect.getmembers(Streams, inspect.isfunction) if not name.startswith("_")]
PURPOSES.remove("describe")
PURPOSES = [name for name in PURPOSES if not name.endswith("_key")]  # keys of correlated noise: test_randomness.py


@pytest.fixture
def keys(monkeypatch):
    """Record the key of every generator, and the bytes that the operating system returned."""
    used, given = [], []
    real_urandom, real_generator = randomness.os.urandom, randomness._generator

    def urandom(size):
        given.append(real_urandom(size))
        return given[-1]

    def generator(key):
        used.append(key)
        return real_generator(key)

    monkeypatch.setattr(randomness.os, "urandom", urandom)
    monkeypatch.setattr(randomness, "_generator", generator)
    return used, given


@pytest.mark.parametrize("purpose", PURPOSES)
def test_a_secure_stream_of_any_purpose_has_a_new_key_of_16_bytes_from_the_system(keys, purpose):
    used, given = keys
    drawn = {getattr(SecureStreams(), purpose)(attempt).integers(2**63) for attempt in (0, 0, 1, 1, 2)}
    assert len(drawn) == len(set(used)) == 5
    assert set(used) <= set(given)
    assert {len(key) for key in used} == {16}


@pytest.mark.parametrize("purpose", ["noise_key", "groups_key"])
def test_a_secure_key_of_any_attempt_comes_from_the_system(keys, purpose):
    _, given = keys
    drawn = [getattr(SecureStreams(), purpose)(attempt) for attempt in (0, 0, 1, 1, 2, 300)]
    assert len(set(drawn)) == 6
    assert set(drawn) <= set(given)


def test_no_two_streams_of_seeded_runs_share_a_key(keys):
    used, _ = keys
    runs = [ReproducibleStreams(seed=seed, scope=scope) for seed in (1, 2, 2**40 + 1) for scope in (None, "a", "b")]
    for streams in runs:
        for purpose in PURPOSES:
            for attempt in (0, 1, 256, 65_536):
                getattr(streams, purpose)(attempt)
    assert len(set(used)) == len(used) == len(runs) * len(PURPOSES) * 4
    assert all(len({key[i] for key in used}) > 1 for i in range(16))  # every byte of the key depends on the seed


def test_shared_cohorts_share_cohorts_and_batches_and_nothing_else(keys):
    used, _ = keys
    for purpose in PURPOSES:
        for scope in ("a", "b"):
            getattr(ReproducibleStreams(seed=1, scope=scope, shared_cohorts=True), purpose)(0)
        is_shared = used[-1] == used[-2]
        assert is_shared == (purpose in ("sampling", "batches")), purpose


class Labelled:
    """Streams that record the purpose and the attempt of each generator."""

    def __init__(self):
        self.made = []

    def __getattr__(self, purpose):
        if purpose not in PURPOSES:
            raise AttributeError(purpose)

        def make(attempt):
            rng = randomness.reproducible_generator(len(self.made))
            self.made.append((purpose, attempt, rng))
            return rng

        return make


def parts_of(kind):
    """Return the parts of a plan whose rounds draw users, examples, or users of one group (cyclic sampling)."""
    if kind == "users":
        return {"clip": unheard.AdaptiveClip(initial_norm=2.0, quantile=0.5, learning_rate=0.2)}
    if kind == "examples":
        sampling = ExampleSampling(examples_per_user=2, examples_per_round=10, total_examples=100)
        return {"sampling": sampling, "update": unheard.FedSGD(unroll=5), "weights": unheard.EqualWeights()}
    noise = CorrelatedNoise(noise_multiplier=0.5, rounds=4)
    return {"sampling": CyclicPoissonSampling(users_per_round=10, groups=2), "noise": noise}


@pytest.mark.parametrize("kind", ["users", "examples", "turns"])
def test_each_draw_of_a_round_has_the_stream_of_its_purpose_and_attempt(run, store, monkeypatch, kind):
    """Cohort, batches, noise and the count of an adaptive clip each have their own generator, also in a repeated round."""
    seen = {}

    def spy(cls, name, purpose, position):
        real = getattr(cls, name)

        def called(self, *args, **named):
            seen.setdefault(purpose, []).append(args[position])
            return real(self, *args, **named)

        monkeypatch.setattr(cls, name, called)

    spy(PoissonSampling, "draw", "sampling", 2)
    spy(CyclicPoissonSampling, "draw", "sampling", 2)
    spy(ExampleSampling, "draw_examples", "sampling", 3)
    spy(GaussianNoise, "ahead", "noise", 0)
    spy(AdaptiveClip, "next_norm", "count", 4)
    real_init = Cohort.__init__
    monkeypatch.setattr(
        Cohort,
        "__init__",
        lambda self, **parts: seen.setdefault("batches", []).append(parts["rng"]) or real_init(self, **parts),
    )
    parts = {"noise": unheard.GaussianNoise(noise_multiplier=0.5), "clip": unheard.FlatClip(norm=2.0), **parts_of(kind)}
    plan = replace(run.plan, **parts)
    streams, layout, given = Labelled(), run.model.layout, {}
    if kind == "turns":
        history = NoiseHistory(
            plan.noise.factorisation(plan.sampling, plan.population), layout.total, torch.device("cpu")
        )
        normals = CorrelatedNormals(bytes(16), history, layout.total, torch.device("cpu"))
        given = {"turn": Turn(index=0, groups_key=bytes(16)), "normals": normals}
    round = Round(
        state=first_state(replace(run, plan=plan)),
        plan=plan.at(0, layout),
        model=run.model,
        server=run.server,
        users=store.train,
        streams=streams,  # pyright: ignore[reportArgumentType]
        attempt=17,
        **given,
    )
    run_rounds([round], EngineChoice(kind="reference").build(run.model))
    drawn = (
        {"sampling", "batches"} | ({"noise"} if kind != "turns" else set()) | ({"count"} if kind == "users" else set())
    )
    assert {attempt for _, attempt, _ in streams.made} == {17}
    assert len({purpose for purpose, *_ in streams.made}) == len(streams.made)
    assert seen.keys() == drawn
    for purpose, _, rng in streams.made:
        if purpose in drawn:
            assert [each is rng for each in seen[purpose]] == [True], purpose


class Ones:
    """A generator whose normals are all 1, which shows the exact scale of the noise."""

    def __init__(self):
        self.asked = []

    def standard_normal(self, count=None):
        return 1.0 if count is None else np.ones(count)

    def geometric(self, p):
        self.asked.append(p)
        return 1

    poisson = geometric


def test_the_noise_of_a_vocabulary_and_of_a_count_has_exactly_the_charged_scale():
    z = 3.1415926535
    release = WordRelease(noise_multiplier=z, threshold_delta=1.2345e-7, words_per_user=5)
    _, noisy = release.release(np.zeros(3, dtype=np.int64), Ones())  # pyright: ignore[reportArgumentType]
    assert noisy.tolist() == [round(z * UNIT)] * 3
    assert [event.noise_multiplier for event in release.events()[:1]] == [z]
    clip = AdaptiveClip(initial_norm=1.0, quantile=0.5, learning_rate=1.0)
    still = clip.next_norm(1.0, 0, 1000.0, 0.0, Ones())  # pyright: ignore[reportArgumentType]
    moved = clip.next_norm(1.0, 0, 1000.0, 123.4, Ones())  # pyright: ignore[reportArgumentType]
    assert math.log(still / moved) == pytest.approx(round(2 * 123.4) / 2000, rel=1e-12)


def test_the_number_of_trials_is_drawn_with_exactly_the_charged_mean():
    for mean in (1.0, 3.7, 123.456):
        rng = Ones()
        TrialCount(mean=mean).draw(rng)  # pyright: ignore[reportArgumentType]
        TrialCount(mean=mean, drawn_from="poisson").draw(rng)  # pyright: ignore[reportArgumentType]
        assert rng.asked == [1 / mean, mean]


def test_the_number_of_trials_and_each_candidate_have_new_keys_of_the_system(keys, run, store, tmp_path, monkeypatch):
    """Run a selection up to its first trial: one key for the number of trials, and one for the candidate of each trial."""
    used, given = keys
    drawn, chosen = [], []

    class Number(TrialCount):
        def draw(self, rng):
            drawn.append(used[-1])
            assert rng.integers(2**63) == generator_from_key(used[-1]).integers(2**63)
            return 5

    def stop(runs, **_):
        chosen.extend(run.plan.update.learning_rate for run, _ in runs)
        raise KeyboardInterrupt

    monkeypatch.setattr(private_selection, "train_together", stop)
    run = replace(run, ledger=tmp_path / "ledger.jsonl", delta=1e-3)
    update = run.plan.update
    candidates = [replace(run, plan=replace(run.plan, update=replace(update, learning_rate=r))) for r in (1.0, 2.0, 3)]
    for out in ("one", "two"):
        before = len(used)
        with pytest.raises(KeyboardInterrupt):
            private_selection.select(candidates, tmp_path / out, Number(mean=2.5))
        trials = [int(generator_from_key(key).integers(3)) for key in used[-5:]]
        assert chosen[-5:] == [(1.0, 2.0, 3)[i] for i in trials]
        assert len(set(used[before:])) >= 6
        assert {*used[before:]} - {*drawn} >= {*used[-5:]}
    assert len(set(drawn)) == 2
    assert set(drawn) <= set(given)


@pytest.mark.parametrize("changed", ["run_hash", "corpus", "first model", "seed"])
def test_a_seeded_run_that_differs_in_one_thing_shares_no_stream(run, changed):
    def keys_of(seed, parts):
        facts = {"run_hash": parts[0], "corpus": parts[1], "start": {"sha256": parts[2]}, "randomness": {"streams": ""}}
        streams = streams_of(replace(run, training=replace(run.training, reproducible_seed=seed)), facts, "")
        return {getattr(streams, purpose)(0).integers(2**63) for purpose in PURPOSES}

    other = {"run_hash": ("x", "b", "c"), "corpus": ("a", "x", "c"), "first model": ("a", "b", "x")}
    own, others = (
        keys_of(1, ("a", "b", "c")),
        keys_of(2 if changed == "seed" else 1, other.get(changed, ("a", "b", "c"))),
    )
    assert len(own | others) == 2 * len(PURPOSES)


def test_a_selection_is_charged_with_exactly_the_numbers_of_its_runs(run):
    for z, drawn_from in ((0.7654321, "geometric"), (1.3456789, "poisson")):
        one = replace(run, plan=replace(run.plan, noise=GaussianNoise(noise_multiplier=z)))
        event = TrialCount(mean=3.7, drawn_from=drawn_from).event([one, one])
        assert event == Selection(
            sampling_prob=12 / 60, noise_multiplier=z, rounds=6, mean_trials=3.7, drawn_from=drawn_from
        )


@pytest.mark.parametrize("kind", ["reference", "vectorised", "stacked"])
def test_batches_follow_the_stream_of_the_round_on_every_engine(run, store, kind):
    """FedSGD draws the same windows from the same stream, and other windows from another stream."""
    update = unheard.FedSGD(batch_size=1, unroll=5, learning_rate=1.0)
    plan = replace(run.plan, update=update).at(0, run.model.layout)
    engine, params_P = EngineChoice(kind=kind, device="cpu").build(run.model), run.model.initial(0)
    users = StoredUsers(store.train, np.arange(6), with_features=False)

    def total(seed, how):
        cohort = Cohort(params_P=params_P, users=users, plan=plan, rng=np.random.default_rng(seed))
        if how == "cohorts":
            return engine.sum_cohorts([cohort])[0].units_P
        return engine.sum_updates(params_P, users, plan, np.random.default_rng(seed)).units_P

    for how in ("cohorts", "updates"):
        assert torch.equal(total(1, how), total(1, how))
        assert not torch.equal(total(1, how), total(2, how))
    drawn = [
        Cohort(params_P=params_P, users=users, plan=plan, rng=np.random.default_rng(seed)).seed for seed in range(5)
    ]
    assert len(set(drawn)) == 5


def test_each_user_draws_windows_of_their_own_in_each_round():
    tokens = np.arange(1000)
    update = unheard.FedSGD(batch_size=3, unroll=5)
    drawn = {
        (number, seed): update.batches(User(tokens, number=number), seed).tobytes()
        for number in range(4)
        for seed in (1, 2)
    }
    assert len(set(drawn.values())) == len(drawn)
    assert drawn[0, 1] == update.batches(User(tokens, number=0), 1).tobytes()
