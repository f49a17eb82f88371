"""Estimators: removing any one user moves the average by at most the declared sensitivity."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from unheard import (
    CappedWeights,
    ClippedDenominator,
    FedAvg,
    FixedDenominator,
    FlatClip,
    GaussianNoise,
    NoClip,
    NoNoise,
    PerLayerClip,
    Plan,
    PoissonSampling,
    TrueAverage,
)
from unheard.parameters import Layout
from unheard.updates.user_update import ONE

LAYOUT = Layout((("a", (2,)), ("b", (3,))))


def round_plan(estimator, clip, noise=None, users_per_round=5.0):
    return Plan(
        population=10,
        sampling=PoissonSampling(users_per_round=users_per_round),
        weights=CappedWeights(weight_cap=8, total_weight=8.0),
        update=FedAvg(),
        clip=clip,
        estimator=estimator,
        noise=noise or GaussianNoise(noise_multiplier=1.0),
    ).at(0, LAYOUT)


clips = st.sampled_from([FlatClip(norm=2.0), PerLayerClip(norm=3.0), PerLayerClip(norms={"a": 0.5, "b": 4.0})])
estimators = st.sampled_from(
    [FixedDenominator(), ClippedDenominator(min_total_weight=3.0), ClippedDenominator(min_total_weight=20.0)]
)
users = st.integers(1, 6).flatmap(
    lambda u: st.tuples(
        hnp.arrays("float32", (u, 5), elements=st.floats(-20, 20, width=32) | st.sampled_from([math.nan, math.inf])),
        hnp.arrays("int64", u, elements=st.integers(0, 12)),
    )
)


@given(users, clips, estimators, st.data())
def test_removing_any_one_user_moves_the_average_by_at_most_the_sensitivity(some, clip, estimator, data):
    delta, num_tokens = some
    plan = round_plan(estimator, clip)
    weights = plan.weights.units(num_tokens)
    gone = data.draw(st.integers(0, len(delta) - 1))
    rest = [k for k in range(len(delta)) if k != gone]
    average = plan.average(plan.contribution.of_users(torch.from_numpy(delta), weights))
    without = plan.average(plan.contribution.of_users(torch.from_numpy(delta[rest]), weights[rest]))
    assert average.sensitivity == without.sensitivity == plan.sensitivity
    assert average.unit == without.unit  # the grid does not depend on the users
    assert (average.average_P - without.average_P).norm().item() <= plan.sensitivity * (1 + 1e-12)


@given(
    hnp.arrays("float32", 5, elements=st.floats(-20, 20, width=32)),
    st.integers(0, 12),
    clips,
    estimators,
    hnp.arrays("int64", 5, elements=st.integers(-(2**61), 2**61) | st.integers(-(2**23), 2**23)),
    st.floats(-50, 50) | st.floats(-1e9, 1e9),
)
@example(
    np.array([20, 0, 0, 0, 0], "float32"),
    8,
    FlatClip(norm=2.0),
    ClippedDenominator(min_total_weight=3.0),
    np.array([0, 2**40, 0, 0, 0]),
    2.0,
)
def test_one_user_moves_the_average_by_at_most_the_sensitivity_whatever_others_have_added(
    delta, num_tokens, clip, estimator, others, weight
):
    """Under secure aggregation hostile nodes may add any vector and any weight."""
    plan = round_plan(estimator, clip)
    one = plan.contribution.of_users(torch.from_numpy(delta[None]), plan.weights.units(np.array([num_tokens])))
    rest = replace(one, units_P=torch.from_numpy(others), weight=weight)
    both = replace(one, units_P=rest.units_P + one.units_P, weight=weight + one.weight)
    moved = plan.average(both).units_P - plan.average(rest).units_P  # exact, also for large values
    assert (moved.double() * plan.average(rest).unit).norm().item() <= plan.sensitivity * (1 + 1e-12)


def test_sensitivities_are_those_of_lemma_1():
    assert round_plan(FixedDenominator(), FlatClip(norm=15.0)).sensitivity == pytest.approx(15 / (0.5 * 8))
    assert round_plan(ClippedDenominator(min_total_weight=6.0), FlatClip(norm=15.0)).sensitivity == pytest.approx(
        2 * 15 / (0.5 * 6), rel=1e-5
    )
    per_layer = PerLayerClip(norms={"a": 3.0, "b": 4.0})
    assert round_plan(FixedDenominator(), per_layer).sensitivity == pytest.approx(5 / (0.5 * 8))


def test_the_clipped_denominator_pays_for_its_rounding():
    plan = round_plan(ClippedDenominator(min_total_weight=6.0), FlatClip(norm=15.0))
    average = plan.average(plan.contribution.sum([], 5))
    assert plan.sensitivity >= 2 * 15 / (0.5 * 6) + average.unit * math.sqrt(5)


def test_the_averages_by_hand():
    """Two users, weights 1 and 1/2, q W = 4: (1*[2,0] + 0.5*[0,2]) over 4, over max(1.5, 1.5), over 1.5."""
    delta = torch.tensor([[2.0, 0, 0, 0, 0], [0, 2.0, 0, 0, 0]])
    weights = np.array([ONE, ONE // 2])
    for estimator, denominator in [
        (FixedDenominator(), 4.0),
        (ClippedDenominator(min_total_weight=3.0), 1.5),
        (ClippedDenominator(min_total_weight=10.0), 5.0),
        (TrueAverage(), 1.5),
    ]:
        plan = round_plan(estimator, FlatClip(norm=2.0), NoNoise())
        average = plan.average(plan.contribution.of_users(delta, weights)).average_P
        assert average.tolist() == pytest.approx([2 / denominator, 1 / denominator, 0, 0, 0], abs=1e-5)


def test_the_true_average_divides_by_the_whole_weight():
    """The weight has many digits, so an average that rounds it is another one."""
    contribution = round_plan(TrueAverage(), FlatClip(norm=2.0), NoNoise()).contribution
    weight = 1000 * (ONE // 7) / ONE
    average = TrueAverage().average(contribution.of_users(torch.ones(1000, 5), np.full(1000, ONE // 7)), 4.0)
    assert average.unit == contribution.grid / weight


def test_the_fixed_denominator_is_public_and_does_not_look_at_who_came():
    plan = round_plan(FixedDenominator(), FlatClip(norm=2.0))
    few = plan.contribution.of_users(torch.ones(1, 5), np.array([ONE]))
    many = plan.contribution.of_users(torch.ones(6, 5), np.full(6, ONE))
    assert plan.average(few).unit == plan.average(many).unit


def test_the_grid_of_the_clipped_denominator_does_not_depend_on_who_came():
    plan = round_plan(ClippedDenominator(min_total_weight=3.0), FlatClip(norm=2.0))
    sums = [plan.contribution.of_users(torch.ones(n, 5), np.full(n, ONE)) for n in (1, 2, 4, 9, 40)]
    assert len({plan.average(one).unit for one in sums}) == 1


def test_without_a_clip_or_with_the_true_average_there_is_no_bound():
    for estimator in (FixedDenominator(), ClippedDenominator(min_total_weight=1.0), TrueAverage()):
        assert math.isinf(round_plan(estimator, NoClip(), NoNoise()).sensitivity)
    assert math.isinf(round_plan(TrueAverage(), FlatClip(norm=1.0), NoNoise()).sensitivity)


def test_the_true_average_of_nobody_is_zero():
    plan = round_plan(TrueAverage(), FlatClip(norm=1.0), NoNoise())
    assert plan.average(plan.contribution.sum([], 5)).average_P.tolist() == [0] * 5
