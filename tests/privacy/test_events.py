"""Events: values are checked, records read back unchanged, and unknown events are refused."""

import math
import re
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unheard.errors import InvalidValue, LedgerError
from unheard.privacy.accountants import epsilons
from unheard.privacy.events import (
    KINDS,
    CorrelatedGaussian,
    DistributedGaussian,
    ExampleGaussian,
    FailureProbability,
    Gaussian,
    NoiseLevel,
    NonPrivate,
    PoissonGaussian,
    Selection,
    accounted,
    against_server,
    from_record,
    has_rounds,
    to_record,
)

EVENTS = [
    PoissonGaussian(sampling_prob=0.01, noise_multiplier=1.0),
    CorrelatedGaussian(sampling_prob=0.1, noise_multiplier=1.0, block=8, index=3),
    Gaussian(noise_multiplier=2.0),
    FailureProbability(delta=1e-10),
    NonPrivate(reason="no noise was asked for"),
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_an_event_reads_back_as_it_was_written(event):
    assert from_record(to_record(event)) == event


@given(st.floats(min_value=1e-300, max_value=1), st.floats(min_value=0, max_value=1e100))
def test_every_round_reads_back_exactly(q, z):
    event = PoissonGaussian(sampling_prob=q, noise_multiplier=z)
    assert from_record(to_record(event)) == event


def test_whole_numbers_and_their_floats_are_one_event():
    assert to_record(Gaussian(noise_multiplier=1)) == {"kind": "gaussian", "noise_multiplier": 1.0}


@pytest.mark.parametrize("q", [0, -0.1, 1.0001, math.nan, math.inf, "0.1", True, None])
def test_a_sampling_probability_outside_0_and_1_is_refused(q):
    with pytest.raises(InvalidValue, match="sampling_prob"):
        PoissonGaussian(sampling_prob=q, noise_multiplier=1)


@pytest.mark.parametrize("z", [-1, math.nan, math.inf, "1", False])
def test_noise_below_nothing_is_refused(z):
    with pytest.raises(InvalidValue, match="noise_multiplier"):
        PoissonGaussian(sampling_prob=0.5, noise_multiplier=z)
    with pytest.raises(InvalidValue, match="noise_multiplier"):
        Gaussian(noise_multiplier=z)


def test_a_failure_probability_above_one_is_refused():
    with pytest.raises(InvalidValue, match="delta"):
        FailureProbability(delta=1.1)


def test_a_non_private_event_must_say_why():
    with pytest.raises(InvalidValue, match="reason"):
        NonPrivate(reason=" ")


@pytest.mark.parametrize(
    "record",
    [
        {"kind": "laplace", "noise_multiplier": 1.0},
        {"noise_multiplier": 1.0},
        {"kind": ["gaussian"], "noise_multiplier": 1.0},
        {"kind": "gaussian"},
        {"kind": "gaussian", "noise_multiplier": 1.0, "discount": 0.5},
        {"kind": "gaussian", "noise_multiplier": -1.0},
        {"kind": "gaussian", "noise_multiplier": "1.0"},
        ["gaussian"],
    ],
)
def test_a_record_of_unknown_cost_is_refused(record):
    with pytest.raises(LedgerError):
        from_record(record)


def test_the_first_round_of_each_block_of_correlated_noise_pays_for_the_block():
    from unheard.privacy.accountants import collapse, epsilon
    from unheard.privacy.budget import RunningEpsilon

    running, events = RunningEpsilon(1e-5), []
    for index in range(11):
        event = CorrelatedGaussian(sampling_prob=0.2, noise_multiplier=1.5, block=4, index=index)
        assert running.epsilon_after(event) == RunningEpsilon(1e-5, events=[*events, event]).epsilon
        running.charge(event)
        events.append(event)
        blocks = -(-len(events) // 4)
        one = PoissonGaussian(sampling_prob=0.2, noise_multiplier=1.5)
        assert collapse(events) == (((one, blocks),), 0.0)
        assert running.epsilon == pytest.approx(epsilon([(one, blocks)], 1e-5, "rdp"))


def test_without_sampling_a_block_of_correlated_noise_is_one_gaussian_release():
    event = CorrelatedGaussian(sampling_prob=1, noise_multiplier=2, block=100, index=0)
    assert accounted(event) == Gaussian(noise_multiplier=2.0)
    assert accounted(CorrelatedGaussian(sampling_prob=1, noise_multiplier=2, block=100, index=99)) is None
    assert from_record(to_record(event)) == event


@pytest.mark.parametrize(
    "wrong", [{"block": 0}, {"index": -1}, {"index": 1.0}, {"block": True}, {"sampling_prob": 1.5}]
)
def test_a_round_of_correlated_noise_out_of_range_is_refused(wrong):
    good = {"sampling_prob": 0.5, "noise_multiplier": 1.0, "block": 4, "index": 0}
    with pytest.raises(InvalidValue):
        CorrelatedGaussian(**{**good, **wrong})


ROUND = {"sampling_prob": 0.1, "noise_multiplier": 1.0}
AGAINST_SERVER = {
    PoissonGaussian(**ROUND): NonPrivate,
    ExampleGaussian(**ROUND, examples_per_user=2): NonPrivate,
    DistributedGaussian(**ROUND, min_parties=3): Gaussian,
    CorrelatedGaussian(**ROUND, block=2, index=0): NonPrivate,
    Gaussian(noise_multiplier=2.0): Gaussian,
    FailureProbability(delta=1e-10): FailureProbability,
    NonPrivate(reason="no noise"): NonPrivate,
    Selection(**ROUND, rounds=3, mean_trials=2.0, drawn_from="geometric"): NonPrivate,
}
"""The event of each kind against a server that knows which users were drawn. Only noise of the nodes counts."""


def test_only_noise_of_the_nodes_and_releases_before_training_are_private_against_the_server():
    assert {type(event) for event in AGAINST_SERVER} == {*KINDS.values()}
    for event, kind in AGAINST_SERVER.items():
        assert type(against_server(event)) is kind, event


def test_every_event_but_those_of_a_vocabulary_is_a_round():
    for event in AGAINST_SERVER:
        assert has_rounds([event]) is not isinstance(event, Gaussian | FailureProbability), event


NUMBERS = {"sampling_prob": 1 / 3, "noise_multiplier": 2 / 3, "delta": 1e-7 / 3, "mean_trials": 4 / 3}
WHOLE = {"examples_per_user": 3, "min_parties": 4, "block": 5, "index": 5, "rounds": 6, "drawn_from": "poisson"}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "non_private"])
def test_an_event_has_its_numbers_to_the_last_bit_also_as_it_is_accounted_and_seen_by_a_server(kind):
    names = {field.name for field in fields(KINDS[kind])}
    event = KINDS[kind](**{name: value for name, value in {**NUMBERS, **WHOLE}.items() if name in names})
    for one in (event, from_record(to_record(event)), accounted(event), against_server(event)):
        for name in vars(one).keys() & NUMBERS.keys():
            assert getattr(one, name) == NUMBERS[name], name


ABOVE_1, BELOW_1 = math.nextafter(1, 2), math.nextafter(1, 0)
NO_NUMBERS = (math.nan, math.inf, -math.inf, "1", True, None)
NOT_WHOLE = (1.0, 2.5, *NO_NUMBERS)
RANGES = {
    "sampling_prob": ((1e-300, 0.5, 1), (0, 1e-301, -1e-9, ABOVE_1, *NO_NUMBERS)),
    "noise_multiplier": ((0, 1e-9, 1e100), (-1e-9, 1.1e100, 10**400, *NO_NUMBERS)),
    "delta": ((0, 1e-12, 1), (-1e-12, -0.5, ABOVE_1, *NO_NUMBERS)),
    "mean_trials": ((1, ABOVE_1, 1e6), (0, BELOW_1, -2, *NO_NUMBERS)),
    "examples_per_user": ((1, 4096), (0, -1, 4097, *NOT_WHOLE)),
    "min_parties": ((1, 10**9), (0, -1, *NOT_WHOLE)),
    "block": ((1, 10**9), (0, -1, *NOT_WHOLE)),
    "index": ((0, 10**9), (-1, *NOT_WHOLE)),
    "rounds": ((1, 10**9), (0, -1, *NOT_WHOLE)),
    "drawn_from": (("geometric", "poisson"), ("", "Geometric", "fixed", "binomial", None, 1)),
    "reason": (("no noise",), ("", " ", "\n\t", None, 1)),
}
"""Values of each field of an event: those that are in range, also at both ends, and those that are not."""


@pytest.mark.parametrize("q", [1e-300, 0.5])
@pytest.mark.parametrize("z", [1e-300, 1e100])
def test_accountants_can_compute_with_every_number_of_an_event(q, z):
    assert all(bound >= 0 for bound in epsilons([PoissonGaussian(sampling_prob=q, noise_multiplier=z)], 1e-6).values())


@pytest.mark.parametrize("kind", KINDS)
def test_each_field_of_each_event_is_accepted_up_to_its_limits_and_refused_beyond_them(kind):
    names = [field.name for field in fields(KINDS[kind])]
    middle = {name: RANGES[name][0][-1] for name in names}
    for name in names:
        accepted, refused = RANGES[name]
        for value in accepted:
            event = KINDS[kind](**{**middle, name: value})
            assert from_record({"kind": kind, **middle, name: value}) == event
            assert getattr(event, name) == value
            assert type(getattr(event, name)) is (float if name in NUMBERS else type(value))  # 1 and 1.0 are one event
        for value in refused:
            with pytest.raises(InvalidValue):
                KINDS[kind](**{**middle, name: value})
            with pytest.raises(LedgerError):
                from_record({"kind": kind, **middle, name: value})


@pytest.mark.parametrize(
    ("limit", "up_to", "above"),
    [(0.25, "small cost", "trains"), (1.0, "trains", "costs much"), (5.0, "costs much", "dominates")],
)
def test_the_verdict_about_noise_changes_right_above_the_limits_that_experiments_gave(limit, up_to, above):
    for ratio, verdict in ((limit, up_to), (math.nextafter(limit, 9), above)):
        level = NoiseLevel(noise_std=ratio, clip_norm=1.0, parameters=1)
        assert (level.ratio, level.verdict) == (ratio, verdict)
        assert level.is_dominant is (level.caution() is not None) is (verdict == "dominates")


@pytest.mark.parametrize(("sigma", "norm", "parameters", "ratio"), [(0.7, 2.0, 400, 7.0), (3.0, 0.75, 100, 40.0)])
def test_the_advice_about_noise_asks_for_as_many_users_as_let_the_model_train(sigma, norm, parameters, ratio):
    level = NoiseLevel(noise_std=sigma, clip_norm=norm, parameters=parameters)
    assert level.ratio == pytest.approx(ratio)
    factor = int(re.search(r"about (\d+) times as many users per round", level.caution())[1])
    assert factor == ratio
    # sigma = z S / users per round
    assert NoiseLevel(noise_std=sigma / factor, clip_norm=norm, parameters=parameters).ratio == pytest.approx(1.0)
    expected = {"noise_std": sigma, "clip_norm": norm, "parameters": parameters, "ratio": level.ratio}
    assert level.record() == {**expected, "verdict": "dominates"}
