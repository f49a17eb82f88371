"""An audit by one run with canary users: the bound is large without noise, and not above a true claim."""

import itertools
import json
import math
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch

import unheard
from tests.conftest import CLIP_NORM, NOISE_MULTIPLIER
from unheard import randomness
from unheard.audit import one_run, summary
from unheard.audit.lower_bound import Guesses, ParametricBound
from unheard.audit.one_run import BackgroundUsers, OneRunResult, audit_one_run
from unheard.audit.summary import AuditResult, audit_run
from unheard.corpus.store import write_store
from unheard.corpus.tokenizers import WordTokenizer
from unheard.corpus.transform import split_store
from unheard.engines.choice import EngineChoice
from unheard.errors import CorpusError, InvalidValue, PrivacyError, UnprovenCombination
from unheard.mechanism.correlated import CorrelatedNoise
from unheard.mechanism.noise import GaussianNoise
from unheard.privacy.events import Gaussian, PoissonGaussian
from unheard.privacy.population_ledger import PopulationLedger, open_population_ledger
from unheard.randomness import ReproducibleStreams, SecureStreams, reproducible_generator
from unheard.training.released import Released


def audited(run: unheard.Run, seed=1, **more) -> OneRunResult:
    *rounds, audit = audit_one_run(run, ReproducibleStreams(seed=seed), **more)
    assert rounds == list(range(1, len(rounds) + 1))
    assert isinstance(audit, OneRunResult)
    return audit


def with_plan(run, **changes) -> unheard.Run:
    return replace(run, plan=replace(run.plan, **changes))


EVERYBODY = unheard.PoissonSampling(sampling_prob=1.0)


@pytest.mark.parametrize("clip", [unheard.FlatClip(norm=2.0), unheard.PerLayerClip(norm=2.0), unheard.NoClip()])
def test_without_noise_every_canary_that_took_part_is_found(run, clip):
    free = with_plan(run, noise=unheard.NoNoise(), clip=clip, sampling=EVERYBODY)
    audit = audited(free, canaries=60)
    assert audit.guesses.correct == audit.guesses.count
    assert audit.bound > 2
    assert audit.estimate == math.inf
    assert audit.claimed == math.inf
    assert audit.holds


def test_the_bound_without_noise_grows_with_the_canaries(run):
    free = with_plan(run, noise=unheard.NoNoise(), sampling=EVERYBODY)
    wide = replace(free, model=unheard.TiedLSTM(vocabulary_size=50, embedding_size=64, hidden_size=64))
    assert audited(wide, canaries=1000, rounds=1).bound > 4.5


@pytest.mark.parametrize("z", [0.5, 1.0, 4.0])
def test_a_private_run_stays_below_its_claim_and_its_estimate_near_it(run, z):
    private = with_plan(run, noise=GaussianNoise(noise_multiplier=z), sampling=EVERYBODY)
    audit = audited(private, canaries=60, rounds=2)
    assert 0 <= audit.bound <= audit.claimed
    assert audit.estimate < 2 * audit.claimed
    if z == 0.5:
        assert audit.bound > 0.5  # the audit has power


@pytest.mark.parametrize("estimator", [unheard.FixedDenominator(), unheard.ClippedDenominator(min_total_weight=30.0)])
def test_sampling_and_both_estimators_are_audited_as_they_are(run, estimator):
    audit = audited(with_plan(run, estimator=estimator), canaries=60)
    assert audit.bound <= audit.claimed


def test_noise_at_a_fortieth_of_what_is_charged_is_refuted(run, monkeypatch):
    private = with_plan(run, noise=GaussianNoise(noise_multiplier=4.0), sampling=EVERYBODY)
    assert audited(private, canaries=200, rounds=3).holds
    real = GaussianNoise.add

    def quieter(self, average, rng, **more):
        return real(GaussianNoise(noise_multiplier=self.noise_multiplier / 40), average, rng, **more)

    monkeypatch.setattr(GaussianNoise, "add", quieter)
    audit = audited(private, canaries=200, rounds=3)
    assert not audit.holds
    (refuted,) = [s for s in AuditResult(exposures=None, one_run=audit).sentences() if "REFUTED" in s]
    assert f"{audit.claimed:.3g} by {audit.accountant.upper()} was claimed" in refuted


def test_noise_at_two_thirds_of_what_is_charged_is_refuted_by_the_parametric_bound(run, monkeypatch):
    private = with_plan(run, noise=GaussianNoise(noise_multiplier=4.0), sampling=EVERYBODY)
    sound = audited(private, canaries=80, rounds=60)
    assert sound.holds
    assert sound.bound < 0.6 * sound.parametric.epsilon
    real = GaussianNoise.add
    monkeypatch.setattr(
        GaussianNoise,
        "add",
        lambda self, average, rng, **more: real(
            GaussianNoise(noise_multiplier=self.noise_multiplier / 1.5), average, rng, **more
        ),
    )
    audit = audited(private, canaries=80, rounds=60)
    assert "parametric" in audit.refuted_by
    assert not audit.holds


def test_users_of_the_store_may_take_part_and_are_charged(run, store, tmp_path):
    population = open_population_ledger(tmp_path, store.name, [], tmp_path / "ledger.jsonl")
    streams = ReproducibleStreams(seed=3)
    free = with_plan(run, noise=unheard.NoNoise(), sampling=EVERYBODY)
    engine = EngineChoice(kind="reference").build(run.model)
    background = BackgroundUsers(free, store, engine, streams, population, "r")
    *_, audit = audit_one_run(free, streams, canaries=12, rounds=2, background=background)
    assert isinstance(audit, OneRunResult)
    # In a cohort with sixty other users.
    assert audit.score_M[audit.included_M].mean() > audit.score_M[~audit.included_M].max()
    charged = PopulationLedger.read(tmp_path / "ledger.jsonl")
    assert len(charged.events) == 2
    assert not torch.equal(background.state.params_P, run.model.initial(0))


def test_users_in_an_audit_are_drawn_and_charged_in_each_round_by_the_phase_of_that_round(
    run, store, tmp_path, monkeypatch
):
    """The draw and the event use the declared number of users, not the number in the store."""
    changes = (
        unheard.Change(from_round=1, noise_multiplier=0.71234),
        unheard.Change(from_round=2, noise_multiplier=0.9),
    )
    sampling = unheard.PoissonSampling(users_per_round=7.3)
    own = replace(run, delta=1.2345e-3, plan=replace(run.plan, population=67, sampling=sampling, schedule=changes))
    population = open_population_ledger(tmp_path, store.name, [], tmp_path / "ledger.jsonl")
    streams, engine = SecureStreams(), EngineChoice(kind="reference").build(run.model)
    background = BackgroundUsers(own, store, engine, streams, population, "r")
    real, drawn = unheard.PoissonSampling.draw, []
    monkeypatch.setattr(
        unheard.PoissonSampling,
        "draw",
        lambda sampling, users, population, rng: drawn.append(population) or real(sampling, users, population, rng),
    )
    monkeypatch.setattr(one_run, "_result", lambda run, events, *_: events)
    *_, stated = audit_one_run(own, streams, canaries=12, rounds=3, background=background)
    assert drawn == [67] * 6
    charged = PopulationLedger.read(tmp_path / "ledger.jsonl")
    expected = [PoissonGaussian(sampling_prob=7.3 / 67, noise_multiplier=z) for z in (NOISE_MULTIPLIER, 0.71234, 0.9)]
    assert charged.events == stated == expected
    (charged_run,) = charged.runs.values()
    assert (charged_run.facts["name"], charged_run.facts["delta"], charged_run.facts["population"]) == (
        "an audit of r",
        1.2345e-3,
        67,
    )


class RecordedStreams(SecureStreams):
    """Streams that count the requests for each stream."""

    def __getattribute__(self, name):
        value = super().__getattribute__(name)
        if name in ("sampling", "batches", "noise", "noise_key", "groups_key", "count"):
            return lambda attempt: (ASKED.append((name, attempt)), value(attempt))[1]
        return value


ASKED: list[tuple[str, int]] = []


def test_an_audit_asks_for_each_stream_once_and_its_coins_are_fair(run, store, tmp_path, monkeypatch):
    ASKED.clear()
    population = open_population_ledger(tmp_path, store.name, [], tmp_path / "ledger.jsonl")
    streams, engine = RecordedStreams(), EngineChoice(kind="reference").build(run.model)
    background = BackgroundUsers(run, store, engine, streams, population, "r")
    monkeypatch.setattr(one_run, "_result", lambda run, events, signals, score_M, included_M: included_M)
    list(audit_one_run(run, streams, canaries=40, rounds=3, background=background))
    assert len(set(ASKED)) == len(ASKED) == 1 + 3 * 3
    wide = replace(run, model=unheard.TiedLSTM(vocabulary_size=2000, embedding_size=8, hidden_size=8))
    *_, included_M = audit_one_run(wide, SecureStreams(), canaries=2000, rounds=1)
    assert isinstance(included_M, np.ndarray)
    assert abs(included_M.mean() - 0.5) < 6 * 0.5 / math.sqrt(2000)


def test_an_audit_of_correlated_noise_asks_for_each_stream_once(run, monkeypatch):
    ASKED.clear()
    noise = unheard.CorrelatedNoise(noise_multiplier=4.0, strategy="blt", buffers=2, rounds=8)
    own = with_plan(run, sampling=unheard.MinSeparationSampling(separation=2), noise=noise)
    monkeypatch.setattr(one_run, "_result", lambda *_: None)
    list(audit_one_run(own, RecordedStreams(), canaries=4, rounds=3))
    assert len(set(ASKED)) == len(ASKED)
    assert {attempt for name, attempt in ASKED if name == "noise_key"} == {0, 1, 2}


def test_an_audit_without_noise_among_users_must_be_allowed(run, store, tmp_path):
    free = with_plan(run, noise=unheard.NoNoise(), sampling=EVERYBODY)
    own = replace(free, ledger=tmp_path / "ledger.jsonl", training=unheard.Training(rounds=1))
    list(unheard.train(own, tmp_path / "r", allow_no_privacy=True))
    before = (tmp_path / "ledger.jsonl").read_bytes()
    engine = EngineChoice(kind="reference").build(run.model)
    with pytest.raises(PrivacyError, match="adds no noise"):
        audit_run(Released.open(tmp_path / "r"), store.path, engine, name="r", canaries=4, rounds=1, with_users=True)
    assert (tmp_path / "ledger.jsonl").read_bytes() == before


def test_an_audit_among_users_is_charged_in_the_ledger_that_the_run_names(run, store, tmp_path):
    own = replace(run, ledger=tmp_path / "ledger.jsonl")
    parts = {"params_P": run.model.initial(0), "vocabulary": store.vocabulary, "tokenizer": WordTokenizer()}
    engine = EngineChoice(kind="reference").build(run.model)
    released = Released(run=own, id="an id", **parts)
    result = audit_run(released, store.path, engine, name="r", canaries=4, rounds=2, with_users=True)
    assert result.record()["run"] == "an id"  # so that it is not shown with the claim of another run
    event = run.plan.at(0, run.model.layout).event()
    assert PopulationLedger.read(tmp_path / "ledger.jsonl").events == [event, event]


def test_two_audits_share_no_random_number(run, store, tmp_path, monkeypatch):
    """Cohorts and noise of an audit among users are as secret as those of a run, and its coins are tossed anew."""
    keys, generator = [], randomness._generator

    def spy(key: bytes) -> np.random.Generator:
        keys[-1].append(key)
        return generator(key)

    monkeypatch.setattr(randomness, "_generator", spy)
    own = replace(run, ledger=tmp_path / "ledger.jsonl")
    parts = {"params_P": run.model.initial(0), "vocabulary": store.vocabulary, "tokenizer": WordTokenizer()}
    engine = EngineChoice(kind="reference").build(run.model)
    for _ in range(2):
        keys.append([])
        audit_run(Released(run=own, **parts), store.path, engine, name="r", canaries=4, rounds=2, with_users=True)
    first, second = ({*drawn} - {bytes(16)} for drawn in keys)  # a part of a stream replaces the key of zeros
    assert len(first) == len(second) >= 7  # coins; canaries, users and noise of each round
    assert not first & second


def test_an_audit_among_the_users_of_a_part_of_a_store_is_refused_before_it_is_charged(run, store, tmp_path):
    users = [store.train.tokens(i) for i in range(8)]
    whole = write_store(tmp_path / "whole", train=users, held_out=users, vocabulary=store.vocabulary, shards=2)
    part = split_store(whole, tmp_path / "part", part=1, of=2)
    released = Released(
        run=replace(run, corpus=part.path, ledger=tmp_path / "ledger.jsonl"),
        params_P=run.model.initial(0),
        vocabulary=store.vocabulary,
        tokenizer=WordTokenizer(),
    )
    engine = EngineChoice(kind="reference").build(run.model)
    with pytest.raises(CorpusError, match="is a part of a store"):
        audit_run(released, part.path, engine, name="r", canaries=4, rounds=1, with_users=True)
    assert not (tmp_path / "ledger.jsonl").exists()


def test_too_few_canaries_or_too_many_are_refused(run):
    with pytest.raises(InvalidValue, match="at least 2"):
        audited(run, canaries=1)
    with pytest.raises(InvalidValue, match="fewer"):
        audited(run, canaries=10**6)


def test_the_result_is_plain_data_and_a_picture(run):
    audit = audited(run, canaries=20, rounds=1)
    result = AuditResult(exposures=None, one_run=audit)
    told = result.record()
    assert told["one_run"]["canaries"] == 20
    bounds = told["one_run"]["bounds"]
    assert [bound["name"] for bound in bounds] == ["distribution-free", "f-DP", "parametric"]
    assert all(bound["assumptions"] in "".join(told["verdict"]) for bound in bounds)
    assert bounds[0]["epsilon_at_least"] == told["one_run"]["epsilon_at_least"]
    json.dumps(told, allow_nan=False)
    assert told["holds"] is True
    picture = result.score_plot("a run")
    assert picture is not None
    assert picture.startswith("<svg")
    assert "canary users" in picture


def test_the_name_of_a_folder_cannot_end_the_process_that_draws_its_scores(run, monkeypatch):
    drawn = []
    monkeypatch.setattr("vl_convert.vegalite_to_svg", lambda spec: drawn.append(json.loads(spec)) or "<svg/>")
    AuditResult(exposures=None, one_run=audited(run, canaries=20, rounds=1)).score_plot("\x1b[31mred\udcff\ufffe")
    assert drawn[0]["title"]["text"] == r"\x1b[31mred\udcff\ufffe"


def test_seeds_are_for_tests_and_the_draw_of_who_is_in_is_fair():
    users = reproducible_generator(1).random(1000) < 0.5
    assert 400 < users.sum() < 600


@pytest.mark.parametrize(
    ("sampling", "strategy"),
    [
        (unheard.CyclicPoissonSampling(users_per_round=15, groups=4), "banded"),
        (unheard.MinSeparationSampling(separation=4), "blt"),
    ],
)
@np.errstate(all="ignore")
def test_correlated_noise_stays_below_its_claim_and_a_tenth_of_it_is_refuted(run, sampling, strategy):
    noise = unheard.CorrelatedNoise(noise_multiplier=3.0, strategy=strategy, rounds=8, buffers=2)
    private = with_plan(run, noise=noise, sampling=sampling)
    wide = replace(private, model=unheard.TiedLSTM(vocabulary_size=50, embedding_size=16, hidden_size=16))
    audit = audited(wide, canaries=200, rounds=8)
    assert audit.rounds == 8
    assert 0 <= audit.bound <= audit.claimed
    assert audit.estimate < 1.5 * audit.claimed + 0.5
    with patch.object(unheard.CorrelatedNoise, "std", lambda self, sensitivity: 0.1 * sensitivity):
        assert audited(wide, canaries=200, rounds=8).bound > audit.claimed


def test_an_audit_of_correlated_noise_has_no_background_users(run):
    private = with_plan(
        run,
        noise=unheard.CorrelatedNoise(noise_multiplier=1.0, rounds=6),
        sampling=unheard.CyclicPoissonSampling(users_per_round=12, groups=2),
    )
    with pytest.raises(UnprovenCombination, match="canaries only"):
        list(audit_one_run(private, ReproducibleStreams(seed=1), canaries=20, background=object()))  # pyright: ignore


def test_users_in_an_audit_are_charged_before_they_are_drawn(run, store, tmp_path, monkeypatch):
    population = open_population_ledger(tmp_path, store.name, [], tmp_path / "ledger.jsonl")
    engine, streams = EngineChoice(kind="reference").build(run.model), ReproducibleStreams(seed=3)
    background = BackgroundUsers(run, store, engine, streams, population, "r")
    plan = run.plan.at(0, run.model.layout)
    nobody = plan.contribution.sum([], plan.layout.total)
    real, charged = unheard.PoissonSampling.draw, []

    def draw(self, *args):
        charged.append(len(PopulationLedger.read(tmp_path / "ledger.jsonl").events))
        return real(self, *args)

    monkeypatch.setattr(unheard.PoissonSampling, "draw", draw)
    for round in range(3):
        background.join(nobody, plan, plan.event(), round)
    assert charged == [1, 2, 3]


def test_the_estimate_is_that_of_the_mean_variance_of_both_groups():
    groups = np.array([3.0, 5.0, 4.0, 4.0]), np.array([1.0, -3.0, -1.0, -1.0])  # variances 2/3 and 8/3, 5 apart
    z = math.sqrt((2 / 3 + 8 / 3) / 2) / 5
    expected = one_run.epsilon([Gaussian(noise_multiplier=z)], 1e-5, "pld")
    assert one_run._estimate(*groups, 1e-5, False) == pytest.approx(expected)
    assert one_run._estimate(groups[0] / 10, groups[1] / 10, 1e-5, False) == pytest.approx(expected)  # 0.5 apart
    assert one_run._estimate(*groups[::-1], 1e-5, False) == 0.0
    assert math.isnan(one_run._estimate(groups[0][:1], groups[1], 1e-5, False))


@pytest.mark.parametrize(
    "refuted", [(), ("distribution-free",), ("f-DP",), ("parametric",), ("distribution-free", "f-DP", "parametric")]
)
def test_each_bound_alone_refutes_a_claim_that_it_exceeds(run, monkeypatch, refuted):
    """The claim is 2.0, and a bound of 2.0 does not exceed it. Each bound is tested at its own level."""
    above = {name: 2.001 if name in refuted else 2.0 for name in one_run.ASSUMPTIONS}
    guesses = Guesses(count=4, correct=4, epsilon=above["distribution-free"])
    strict, stated = (ParametricBound(epsilon=e, factor=1.0) for e in (above["parametric"], 3.0))
    monkeypatch.setattr(one_run, "best_epsilon", lambda events, delta: SimpleNamespace(epsilon=2.0, accountant="pld"))
    monkeypatch.setattr(one_run, "best_guesses", lambda *_: guesses)
    levels = []

    def bound(*_, confidence=0.95):
        levels.append(1 - confidence)
        return strict if confidence > 0.95 else stated

    monkeypatch.setattr(one_run, "parametric_bound", bound)
    monkeypatch.setattr(one_run, "refutes", lambda *asked: levels.append(asked[-1]) or "f-DP" in refuted)
    included_M = np.array([True, True, False, False])
    result = one_run._result(run, [run.plan.at(0, run.model.layout).event()], Counter(), np.arange(4.0), included_M)
    assert (result.refuted_by, result.holds, result.parametric) == (refuted, not refuted, stated)
    # The stated bound has the confidence of 95 %; the tests have their own, smaller probabilities of an error.
    assert sorted(levels) == pytest.approx([1e-4, 0.01, 0.05])
    expected = pytest.approx({"distribution-free": 0.05, "f-DP": 0.01, "parametric": 1e-4})
    assert expected == one_run.REFUTATION_LEVELS
    for nested in (result, None):
        audit = AuditResult(run="r", exposures=None, one_run=nested)
        assert audit.holds is (nested is None or not refuted)


FIGURES = {
    "rounds": 7,
    "score_M": np.arange(5.0),
    "included_M": np.array([True, False, True, False, False]),
    "guesses": Guesses(count=4, correct=3, epsilon=0.11),
    "events": [],
    "parametric": ParametricBound(epsilon=0.22, factor=1.5),
    "refuted_by": ("f-DP", "parametric"),
    "estimate": 0.33,
    "claimed": 0.44,
    "accountant": "rdp",
    "delta": 0.55,
    "confidence": 0.66,
}
"""The fields of a result. All figures differ."""


def test_every_figure_of_the_record_is_that_of_the_result():
    """The figures differ from each other, so that one in the place of another is noticed."""
    result = OneRunResult(**FIGURES)  # pyright: ignore[reportArgumentType]
    result.__dict__["f_dp"] = 0.77
    record = AuditResult(run="a run", exposures=None, one_run=result).record()
    verdict, own = " ".join(record["verdict"]), record["one_run"]
    bounds = {"distribution-free": 0.11, "f-DP": 0.77, "parametric": 0.22}
    expected = {"canaries": 5, "rounds": 7, "guesses": 4, "right": 3, "epsilon_at_least": 0.11, "confidence": 0.66}
    expected |= {"epsilon_estimate": 0.33, "epsilon_claimed": 0.44, "delta": 0.55, "holds": False}
    assert {key: own[key] for key in own.keys() - {"bounds"}} == {**expected, "refuted_by": ["f-DP", "parametric"]}
    assert {bound["name"]: bound["epsilon_at_least"] for bound in own["bounds"]} == bounds
    assert (record["run"], record["holds"]) == ("a run", False)
    assert "3 of 4 guesses about 5 canary users were right" in verdict
    assert "THE CLAIM IS REFUTED by the f-DP and the parametric bound: 0.44 by RDP was claimed" in verdict
    assert all(f"{name:<18}{epsilon:>6}" in verdict for name, epsilon in bounds.items())


@pytest.mark.parametrize("q", [0.3, 1.0])
@pytest.mark.parametrize("rounds", [2, 3, 7, 8])
@pytest.mark.parametrize("strategy", ["banded", "blt"])
def test_the_score_of_a_canary_is_the_log_likelihood_ratio_of_all_rounds_of_its_group(strategy, rounds, q):
    """By a sum over everything that may have happened: in which turns of its group the canary took part.

    With the banded strategy each turn is drawn anew. With BLT a canary takes part in all turns of its group or in none.
    """
    noise = CorrelatedNoise(noise_multiplier=1.0, strategy=strategy, buffers=2, rounds=8)
    sampling = {
        "banded": unheard.CyclicPoissonSampling(users_per_round=15, groups=3),
        "blt": unheard.MinSeparationSampling(separation=3),
    }[strategy]
    matrix, sigma = noise.factorisation(sampling, 60), 0.7
    rng = np.random.default_rng(rounds)
    projected_TM, norm_M, groups_M = rng.standard_normal((rounds, 6)), rng.uniform(0.3, 2, 6), np.arange(6) % 3
    column = matrix.column(rounds)
    to_white_TT = np.array([[column[t - s] if s <= t else 0.0 for s in range(rounds)] for t in range(rounds)])
    found_M = one_run._correlated_scores(projected_TM, norm_M, groups_M, matrix, sigma, q)
    for canary in range(6):
        turns = range(int(groups_M[canary]), rounds, 3)
        draws = list(turns) if strategy == "banded" else [tuple(turns)]
        white_T, ratio = to_white_TT @ projected_TM[:, canary], 0.0
        for drawn in itertools.product((False, True), repeat=len(draws)):
            signal_T = np.zeros(rounds)
            for turn in itertools.compress(draws, drawn):
                signal_T[list(turn) if isinstance(turn, tuple) else [turn]] = norm_M[canary]
            mean_T = to_white_TT @ signal_T
            density = math.exp((white_T @ mean_T - mean_T @ mean_T / 2) / sigma**2)
            ratio += q ** sum(drawn) * (1 - q) ** (len(drawn) - sum(drawn)) * density
        assert found_M[canary] == pytest.approx(math.log(ratio), abs=1e-9)


@pytest.mark.parametrize("noised", [0, 1, 2, 3])
def test_there_is_a_parametric_bound_only_if_every_round_had_noise(run, noised):
    """Without noise in a round the score is not a sum of log likelihood ratios."""
    rng = np.random.default_rng(1)
    included_M = rng.random(400) < 0.5
    score_M = math.sqrt(3) * rng.standard_normal(400) + 1.5 * np.where(included_M, 1, -1)
    events = [PoissonGaussian(sampling_prob=1.0, noise_multiplier=1.0)] * 3
    result = one_run._result(run, events, Counter({(1.0, 1.0): noised} if noised else {}), score_M, included_M)
    assert (result.parametric.reason == "") is (noised == 3)
    assert math.isnan(result.parametric.epsilon) is (noised < 3)
    if noised < 3:
        assert "parametric" not in result.refuted_by


def test_the_signal_and_the_chance_of_each_round_are_those_of_its_phase(run, monkeypatch):
    """The signal of a canary with the full norm is 1 / z, up to the rounding to the grid."""
    changes = (
        unheard.Change(from_round=1, noise_multiplier=0.8, clip_norm=1.0),
        unheard.Change(from_round=3, noise_multiplier=1.6),
    )
    own = replace(run, plan=replace(run.plan, schedule=changes))
    monkeypatch.setattr(one_run, "_result", lambda run, events, signals, score_M, included_M: (events, signals))
    norms, cohort = [], one_run.CanaryUsers.cohort

    def measured(users, drawn, units_P, plan):
        norms.append(users.norms(units_P).max() * plan.contribution.grid)
        return cohort(users, drawn, units_P, plan)

    monkeypatch.setattr(one_run.CanaryUsers, "cohort", measured)
    *_, (events, signals) = audit_one_run(own, ReproducibleStreams(seed=1), canaries=20, rounds=5)
    assert norms == [pytest.approx(norm, rel=1e-3) for norm in (CLIP_NORM, 1.0, 1.0, 1.0, 1.0)]
    phases = [(12 / 60, NOISE_MULTIPLIER), (12 / 60, 0.8), (12 / 60, 1.6)]
    assert [signals[key] for key in sorted(signals, key=lambda key: -key[1])] == [1, 2, 2]
    for (q, signal), (expected, z) in zip(sorted(signals, key=lambda key: -key[1]), phases, strict=True):
        assert (q, signal) == (pytest.approx(expected), pytest.approx(1 / z, rel=1e-3))
    assert [(event.sampling_prob, event.noise_multiplier) for event in events] == [phases[i] for i in (0, 1, 1, 2, 2)]


@pytest.mark.parametrize("skipped", [False, True])
@pytest.mark.parametrize("has_phrases", [False, True])
def test_an_audit_is_recorded_with_the_id_of_its_run_and_uses_every_option(
    run, store, monkeypatch, has_phrases, skipped
):
    """Whether phrases were planted, and whether the simulated run was skipped."""
    asked, ranked = [], ["an exposure", "another"]
    monkeypatch.setattr(summary, "has_canaries", lambda corpus: has_phrases)
    monkeypatch.setattr(summary, "read_canaries", lambda corpus, rows: (corpus, rows))
    simulated = OneRunResult(**FIGURES)  # pyright: ignore[reportArgumentType]

    def exposures(*given, candidates, parallel_map):
        asked.append((given[2], candidates))
        return iter(ranked)

    def one(own, streams, *, canaries, rounds, background):
        asked.append((own, canaries, rounds, background))
        return iter([1, 2, simulated])

    monkeypatch.setattr(summary, "exposures", exposures)
    monkeypatch.setattr(summary, "audit_one_run", one)
    parts = {"params_P": run.model.initial(0), "vocabulary": store.vocabulary, "tokenizer": WordTokenizer()}
    released, engine = Released(run=run, id="an id", **parts), EngineChoice(kind="reference").build(run.model)
    options = {"canaries": 17, "rounds": 4, "candidates": 123, "skip_one_run": skipped}
    result = audit_run(released, store.path, engine, name="r", **options)
    assert (result.run, result.exposures) == ("an id", ranked if has_phrases else None)
    assert result.one_run is (None if skipped else simulated)
    assert asked == [((store.path, run.model.vocabulary_size), 123)] * has_phrases + [(run, 17, 4, None)] * (
        not skipped
    )
    audit_run(released, store.path, engine, name="r")
    assert asked[-1] == (run, one_run.CanaryUsers.default_count(run.model.layout), None, None)
