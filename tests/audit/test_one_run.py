"""One run with canary users: the bound is large where nothing protects, and never above a true claim."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import unheard
from unheard.audit.background_users import BackgroundUsers
from unheard.audit.canary_users import CanaryUsers
from unheard.audit.lower_bound import best_guesses, lower_bound, p_value
from unheard.audit.one_run import OneRunResult, audit_one_run
from unheard.audit.summary import AuditResult
from unheard.engines.choice import EngineChoice
from unheard.errors import InvalidValue
from unheard.mechanism.noise import GaussianNoise
from unheard.privacy.population_ledger import PopulationLedger, open_population_ledger
from unheard.randomness import ReproducibleStreams, reproducible_generator
from unheard.updates.weighting import ONE


def audited(run: unheard.Run, seed=1, **more) -> OneRunResult:
    *rounds, audit = audit_one_run(run, ReproducibleStreams(seed=seed), **more)
    assert rounds == list(range(1, len(rounds) + 1))
    assert isinstance(audit, OneRunResult)
    return audit


def with_plan(run, **changes) -> unheard.Run:
    return replace(run, plan=replace(run.plan, **changes))


EVERYBODY = unheard.PoissonSampling(sampling_prob=1.0)


def test_the_p_value_is_that_of_honest_coins():
    assert p_value(100, 10, 10, 0.0, 0.0) == pytest.approx(0.5**10)
    assert p_value(100, 10, 10, math.log(3), 0.0) == pytest.approx(0.75**10)
    assert p_value(100, 10, 0, 1.0, 0.0) == 1.0
    assert p_value(100, 10, 10, 0.0, 1e-3) > 0.5**10  # delta makes success likelier
    assert p_value(10, 4, 3, 0.0, 0.01) == pytest.approx(
        5 / 16 + 2 * 10 * 0.01 * 6 / 16
    )  # by hand: max over i is i = 1


def test_the_bound_follows_from_the_guesses():
    assert lower_bound(1000, 1000, 500, 0.0) == 0.0
    assert lower_bound(1000, 0, 0, 0.0) == 0.0
    perfect = lower_bound(1000, 1000, 1000, 0.0)
    p = 0.05 ** (1 / 1000)
    assert perfect == pytest.approx(math.log(p / (1 - p)), rel=1e-6)
    assert lower_bound(1000, 1000, 1000, 1e-5) < perfect


def test_the_bound_is_too_high_in_no_more_than_one_of_twenty_audits_of_randomised_response():
    """Each canary says the truth with probability e/(1+e): epsilon is exactly 1."""
    rng, above = np.random.default_rng(2), 0
    for _ in range(200):
        was_in = rng.random(200) < 0.5
        says_in = was_in ^ (rng.random(200) > math.e / (1 + math.e))
        above += best_guesses(says_in + rng.random(200) * 1e-3, was_in, 0.0).epsilon > 1.0
    assert above <= 0.05 * 200


def test_every_canary_has_a_direction_of_its_own_at_the_full_norm(run):
    plan = run.plan.at(0, run.model.layout)
    users = CanaryUsers.draw(20, run.model.layout, np.random.default_rng(1))
    units_P = users.units(plan)
    assert users.norms(units_P) * plan.contribution.grid == pytest.approx(np.full(20, 2.0), rel=0.05)
    alone = users.cohort(np.array([3]), units_P, plan)
    heard = users.projections(alone.units_P.double().numpy() * plan.contribution.grid, units_P, users.norms(units_P))
    assert heard[3] == pytest.approx(2.0, rel=0.05)
    assert np.abs(np.delete(heard, 3)).max() == 0


def test_what_canaries_add_has_gone_through_the_door(run):
    """The selection of shares is the same sum, to the unit, as every canary's delta through `of_users`."""
    plan = run.plan.at(0, run.model.layout)
    users = CanaryUsers.draw(7, run.model.layout, np.random.default_rng(1))
    units_P = users.units(plan)
    drawn = np.array([0, 2, 5])
    loud = torch.from_numpy(np.stack([np.where(users.owner_P == k, 1e6 * users.sign_P, 0.0) for k in drawn]))
    through = plan.contribution.of_users(loud, np.full(3, ONE))
    selected = users.cohort(drawn, units_P, plan)
    assert selected.weight == through.weight == 3.0
    assert ((through.units_P != 0) == (selected.units_P != 0)).all()


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
        assert audit.bound > 0.5  # and it is no audit that never finds anything


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
    assert any("REFUTED" in sentence for sentence in AuditResult(exposures=None, one_run=audit).sentences())


def test_the_stores_people_may_be_there_too_and_are_charged_for_it(run, store, tmp_path):
    people = open_population_ledger(tmp_path, store.name, [], tmp_path / "ledger.jsonl")
    streams = ReproducibleStreams(seed=3)
    free = with_plan(run, noise=unheard.NoNoise(), sampling=EVERYBODY)
    engine = EngineChoice(kind="reference").build(run.model)
    background = BackgroundUsers(free, store, engine, streams, people, "r")
    *_, audit = audit_one_run(free, streams, canaries=12, rounds=2, background=background)
    assert isinstance(audit, OneRunResult)
    assert audit.score_M[audit.included_M].mean() > audit.score_M[~audit.included_M].max()  # heard among sixty others
    charged = PopulationLedger.read(tmp_path / "ledger.jsonl")
    assert len(charged.events) == 2
    assert not torch.equal(background.state.params_P, run.model.initial(0))


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
    assert told["holds"] is True
    picture = result.score_plot("a run")
    assert picture is not None
    assert picture.startswith("<svg")
    assert "canary users" in picture


def test_seeds_are_for_tests_and_the_draw_of_who_is_in_is_fair():
    users = reproducible_generator(1).random(1000) < 0.5
    assert 400 < users.sum() < 600
