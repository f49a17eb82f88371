"""The plan: its values in each round, changes by a schedule, and refused combinations."""

import math
from dataclasses import replace

import numpy as np
import pytest

import unheard
from unheard.errors import InvalidValue, UnprovenCombination
from unheard.mechanism.noise import DistributedGaussianNoise
from unheard.mechanism.plan import Change
from unheard.parameters import Layout
from unheard.privacy.events import NonPrivate, PoissonGaussian

LAYOUT = Layout((("a", (4,)), ("b", (5,))))


def plan(**changes) -> unheard.Plan:
    parts = dict(
        population=1000,
        sampling=unheard.PoissonSampling(users_per_round=100),
        update=unheard.FedAvg(),
        clip=unheard.FlatClip(norm=15.0),
        noise=unheard.GaussianNoise(noise_multiplier=1.0),
    )
    return unheard.Plan(**{**parts, **changes})


def test_a_round_costs_what_its_sampling_and_noise_say():
    assert plan().at(0, LAYOUT).event() == PoissonGaussian(sampling_prob=0.1, noise_multiplier=1.0)


def test_sigma_is_turned_into_z_by_the_sensitivity():
    by_sigma = plan(noise=unheard.GaussianNoise(noise_std=0.012)).at(0, LAYOUT)
    assert by_sigma.sensitivity == pytest.approx(15 / 100)
    assert by_sigma.event().noise_multiplier == pytest.approx(0.012 / 0.15)
    clipped = plan(
        noise=unheard.GaussianNoise(noise_std=0.012), estimator=unheard.ClippedDenominator(min_total_weight=500)
    ).at(0, LAYOUT)
    assert clipped.event().noise_multiplier == pytest.approx(0.012 / (2 * 15 / 50), rel=1e-5)


def test_the_schedule_changes_what_it_names_from_its_round_on_and_nothing_else():
    scheduled = plan(
        schedule=(
            unheard.Change(from_round=10, clip_norm=7.4567),
            unheard.Change(from_round=20, noise_std=0.031234, learning_rate=2.0987),
            unheard.Change(from_round=30, noise_multiplier=4.0321),
        )
    )
    seen = [
        (p.clip.norm, p.event().noise_multiplier, p.noise.std(p.sensitivity), p.update.learning_rate)
        for p in (scheduled.at(r, LAYOUT) for r in (0, 9, 10, 19, 20, 29, 30, 999))
    ]
    first, second = (15, 1, 0.15, 6), (7.4567, 1, 0.074567, 6)
    third = (7.4567, 0.031234 / 0.074567, 0.031234, 2.0987)
    fourth = (7.4567, 4.0321, 4.0321 * 0.074567, 2.0987)
    assert seen == [pytest.approx(s) for s in (first, first, second, second, third, third, fourth, fourth)]


def test_a_schedule_sets_the_learning_rate_of_fedsgd_and_keeps_the_rest_of_it():
    update = unheard.FedSGD(learning_rate=3.0, batch_size=2, unroll=7)
    scheduled = plan(update=update, schedule=(unheard.Change(from_round=4, learning_rate=0.25),))
    assert [scheduled.at(r, LAYOUT).update for r in (3, 4)] == [update, replace(update, learning_rate=0.25)]


def test_a_sigma_that_stays_while_s_changes_is_another_z():
    scheduled = plan(
        noise=unheard.GaussianNoise(noise_std=0.15), schedule=(unheard.Change(from_round=1, clip_norm=30.0),)
    )
    assert [scheduled.at(r, LAYOUT).event().noise_multiplier for r in (0, 1)] == pytest.approx([1.0, 0.5])


def test_no_noise_is_non_private_in_any_case():
    assert isinstance(plan(noise=unheard.NoNoise()).at(0, LAYOUT).event(), NonPrivate)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampling": unheard.FixedSizeSampling(users_per_round=10)}, "Fixed-size sampling with noise"),
        ({"clip": unheard.NoClip()}, "Noise without a clip"),
        ({"estimator": unheard.TrueAverage()}, "true average"),
    ],
)
def test_combinations_without_a_proof_are_refused(changes, message):
    with pytest.raises(UnprovenCombination, match=message):
        plan(**changes)
    plan(**changes, noise=unheard.NoNoise())  # each is fine for a baseline


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"population": 0}, "population"),
        ({"population": 2**41}, "population"),
        ({"population": 50}, "declared population"),
        (
            {"schedule": (unheard.Change(from_round=5, clip_norm=1), unheard.Change(from_round=5, clip_norm=2))},
            "increasing",
        ),
        ({"noise": unheard.NoNoise(), "schedule": (unheard.Change(from_round=5, noise_std=1.0),)}, "sets noise"),
        (
            {
                "noise": unheard.NoNoise(),
                "clip": unheard.NoClip(),
                "schedule": (unheard.Change(from_round=5, clip_norm=1.0),),
            },
            "sets clip_norm",
        ),
    ],
)
def test_impossible_plans_are_refused(changes, message):
    with pytest.raises(InvalidValue, match=message):
        plan(**changes)


@pytest.mark.parametrize(
    "bad", [{"from_round": 0, "clip_norm": 1.0}, {"from_round": 1}, {"from_round": 1, "clip_norm": -1.0}]
)
def test_impossible_changes_are_refused(bad):
    with pytest.raises(InvalidValue):
        unheard.Change(**bad)


def test_the_facts_hold_every_declared_number_by_phase_and_are_plain_json():
    import json

    facts = plan(schedule=(unheard.Change(from_round=7, clip_norm=5.0),)).facts(LAYOUT)
    json.dumps(facts, allow_nan=False)
    assert facts["sampling"]["sampling_prob"] == 0.1
    assert facts["weights"]["total_weight"] == 1000
    assert [(p["from_round"], p["clip_norm"], p["noise_multiplier"]) for p in facts["phases"]] == [
        (0, 15, 1),
        (7, 5, 1),
    ]
    assert facts["phases"][0]["noise_std"] == pytest.approx(0.15)
    weighted = plan(weights=unheard.CappedWeights(weight_cap=40, total_weight=250.0)).facts(LAYOUT)
    assert weighted["phases"][0]["expected_weight"] == pytest.approx(0.1 * 250)
    assert facts["phases"][0]["expected_weight"] == pytest.approx(0.1 * 1000)
    baseline = plan(noise=unheard.NoNoise(), clip=unheard.NoClip()).facts(LAYOUT)
    assert baseline["phases"][0]["clip_norm"] is None
    assert math.isinf(plan(noise=unheard.NoNoise(), clip=unheard.NoClip()).at(0, LAYOUT).sensitivity)


EITHER = {
    unheard.GaussianNoise: {"noise_multiplier": 1.0, "noise_std": 0.1},
    unheard.ExactGaussianNoise: {"noise_multiplier": 1.0, "noise_std": 0.1},
    unheard.PoissonSampling: {"users_per_round": 5.0, "sampling_prob": 0.1},
    unheard.MinSeparationSampling: {"users_per_round": 5.0, "separation": 3},
    unheard.PerLayerClip: {"norm": 1.0, "norms": {"weight": 1.0}},
}
"""Parts that need exactly one of two values. If both were accepted, one of them would be ignored silently."""


@pytest.mark.parametrize("part", EITHER, ids=lambda part: part.__name__)
def test_one_of_two_values_is_given_and_never_both_or_none(part):
    values = EITHER[part]
    for name, value in values.items():
        assert getattr(part(**{name: value}), name) == value
    for wrong in (values, {}):
        with pytest.raises(InvalidValue, match="exactly one"):
            part(**wrong)


def test_a_change_of_the_noise_has_one_of_two_values():
    for given in ({"noise_std": 0.1}, {"noise_multiplier": 1.0}):
        assert Change(from_round=1, **given)
    with pytest.raises(InvalidValue, match="not both"):
        Change(from_round=1, noise_std=0.1, noise_multiplier=1.0)
    with pytest.raises(InvalidValue, match="must change something"):
        Change(from_round=1)


def test_distributed_noise_out_of_range_or_without_a_bound_is_refused():
    noise = DistributedGaussianNoise(noise_multiplier=1.0, min_parties=4)
    for wrong in ({"noise_multiplier": 2.0**19 + 1}, {"noise_multiplier": 0.0}, {"min_parties": 1}):
        with pytest.raises(InvalidValue):
            replace(noise, **wrong)
    with pytest.raises(UnprovenCombination, match="bounded sensitivity"):
        noise.multiplier(math.inf)
    with pytest.raises(InvalidValue, match="noise_multiplier, not noise_std"):
        noise.changed(None, 0.1)
    assert noise.changed(2.0, None) == replace(noise, noise_multiplier=2.0)


UNPROVEN_WITH_ADAPTIVE = {
    "examples": {
        "sampling": unheard.ExampleSampling(examples_per_user=2, examples_per_round=5, total_examples=100),
        "update": unheard.FedSGD(unroll=5),
    },
    "banded noise": {
        "sampling": unheard.CyclicPoissonSampling(users_per_round=5, groups=4),
        "noise": unheard.CorrelatedNoise(noise_multiplier=1.0, rounds=9),
    },
    "BLT noise": {
        "sampling": unheard.MinSeparationSampling(separation=4),
        "noise": unheard.CorrelatedNoise(noise_multiplier=1.0, rounds=9, strategy="blt"),
    },
    "noise of the nodes": {"noise": DistributedGaussianNoise(noise_multiplier=1.0, min_parties=4)},
}


@pytest.mark.parametrize("case", UNPROVEN_WITH_ADAPTIVE)
def test_an_adaptive_clip_is_refused_where_its_count_has_no_proof(case):
    parts = {
        "population": 100,
        "sampling": unheard.PoissonSampling(users_per_round=5),
        "update": unheard.FedAvg(),
        "noise": unheard.GaussianNoise(noise_multiplier=0.1),
        **UNPROVEN_WITH_ADAPTIVE[case],
    }
    unheard.Plan(**parts, clip=unheard.FlatClip(norm=1.0))
    with pytest.raises(UnprovenCombination):
        unheard.Plan(**parts, clip=unheard.AdaptiveClip(initial_norm=1.0, count_noise_std=9.0))
    with pytest.raises(InvalidValue, match="population must be at least 1"):
        unheard.Plan(**{**parts, "population": 0}, clip=unheard.FlatClip(norm=1.0))


def test_numbers_of_samplers_out_of_range_are_refused():
    good = {"examples_per_user": 2, "examples_per_round": 5, "total_examples": 100}
    wrong = [(unheard.FixedSizeSampling, {"users_per_round": n}) for n in (0, 2**40 + 1)]
    wrong += [(unheard.ExampleSampling, {**good, "examples_per_user": n}) for n in (0, 4097)]
    wrong += [(unheard.ExampleSampling, {**good, "total_examples": n}) for n in (0, 4, 2**40 + 1)]
    wrong += [(unheard.CyclicPoissonSampling, {"users_per_round": 5, "groups": n}) for n in (0, 2**20 + 1)]
    for part, values in wrong:
        with pytest.raises(InvalidValue):
            part(**values)
    for sampling in (
        unheard.CyclicPoissonSampling(users_per_round=5, groups=4),
        unheard.MinSeparationSampling(separation=4),
    ):
        with pytest.raises(InvalidValue, match="correlated"):  # the group whose turn it is is unknown
            sampling.draw(100, 100, np.random.default_rng(0))
