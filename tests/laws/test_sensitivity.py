"""Removing any one user moves the average by at most the declared sensitivity, for any layout, clip, weight, length and dtype."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unheard import (
    CappedWeights,
    ClippedDenominator,
    EqualWeights,
    FedAvg,
    FixedDenominator,
    FlatClip,
    GaussianNoise,
    PerLayerClip,
    Plan,
    PoissonSampling,
)
from unheard.parameters import Layout

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
ODD = (math.nan, math.inf, -math.inf, 0.0, 1e-40, 3e38)

shapes = st.lists(st.sampled_from([(), (1,), (2,), (3,), (2, 2), (1, 3), (2, 1, 2)]), min_size=1, max_size=4)
norms = st.floats(1e-4, 1e4)
weightings = st.one_of(
    st.just(EqualWeights()),
    st.tuples(st.floats(0.5, 50), st.floats(1, 100)).map(lambda t: CappedWeights(weight_cap=t[0], total_weight=t[1])),
)
estimators = st.one_of(
    st.just(FixedDenominator()), st.floats(0.5, 100).map(lambda w: ClippedDenominator(min_total_weight=w))
)


@st.composite
def rounds(draw):
    """A plan for some model, and a cohort of users for it."""
    layout = Layout(tuple((f"layer{i}", shape) for i, shape in enumerate(draw(shapes))))
    kind = draw(st.sampled_from(["flat", "shared", "by layer"]))
    clip = {
        "flat": lambda: FlatClip(norm=draw(norms)),
        "shared": lambda: PerLayerClip(norm=draw(norms)),
        "by layer": lambda: PerLayerClip(norms={name: draw(norms) for name in layout.names}),
    }[kind]()
    plan = Plan(
        population=100,
        sampling=PoissonSampling(sampling_prob=draw(st.floats(0.01, 1.0))),
        weights=draw(weightings),
        update=FedAvg(),
        clip=clip,
        estimator=draw(estimators),
        noise=GaussianNoise(noise_multiplier=1.0),
    ).at(0, layout)
    num_users = draw(st.integers(1, 6))
    dtype = draw(st.sampled_from(DTYPES))
    seed, scale = draw(st.integers(0, 2**32 - 1)), 10.0 ** draw(st.integers(-6, 6))
    rng = np.random.default_rng(seed)
    delta = rng.standard_normal((num_users, layout.total)) * scale
    if draw(st.booleans()):
        delta[rng.integers(num_users), rng.integers(layout.total)] = draw(st.sampled_from(ODD))
    lengths = rng.integers(0, 200, size=num_users)
    return plan, torch.from_numpy(delta).to(dtype), lengths


@settings(max_examples=300)
@given(rounds())
def test_removing_any_one_user_moves_the_average_by_at_most_the_declared_sensitivity(made):
    plan, delta_UP, lengths = made
    weights = plan.weights.units(lengths)
    whole = plan.average(plan.contribution.of_users(delta_UP, weights))
    for gone in range(len(delta_UP)):
        rest = [k for k in range(len(delta_UP)) if k != gone]
        without = plan.average(plan.contribution.of_users(delta_UP[rest], weights[rest]))
        assert whole.sensitivity == without.sensitivity == plan.sensitivity
        assert whole.unit == without.unit  # the grid does not depend on the users
        moved = (whole.units_P - without.units_P).double().norm().item() * whole.unit
        assert moved <= plan.sensitivity * (1 + 1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_user_reaches_nearly_the_whole_bound_whatever_the_dtype(dtype):
    """The bound is tight: a user with a large update moves the average by nearly the whole sensitivity."""
    layout = Layout((("a", (30,)), ("b", (5, 4))))
    plan = Plan(
        population=10,
        sampling=PoissonSampling(users_per_round=5),
        update=FedAvg(),
        clip=FlatClip(norm=3.0),
        noise=GaussianNoise(noise_multiplier=1.0),
    ).at(0, layout)
    loud = torch.full((1, 50), 100.0).to(dtype)
    moved = plan.average(plan.contribution.of_users(loud, plan.weights.units(np.array([7])))).average_P.norm()
    assert moved.item() == pytest.approx(plan.sensitivity, rel=1e-4)
