"""`Contribution`: for any update of a user, its output is weighted integers of bounded norm."""

import math
import weakref
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from unheard import (
    CappedWeights,
    FixedDenominator,
    FlatClip,
    GaussianNoise,
    NoClip,
    NoNoise,
    PerLayerClip,
    Plan,
    PoissonSampling,
)
from unheard.mechanism.aggregation import UNNOISED_GRID, noised_grid
from unheard.parameters import Layout
from unheard.updates.user_update import ONE, FedAvg

LAYOUT = Layout((("a", (2,)), ("b", (3,)), ("c", (1,))))
any_number = st.floats(width=32, allow_nan=True, allow_infinity=True)
some_users = st.integers(1, 6).flatmap(
    lambda u: st.tuples(
        hnp.arrays("float32", (u, 6), elements=any_number), hnp.arrays("int64", u, elements=st.integers(-ONE, 3 * ONE))
    )
)
clips = st.one_of(
    st.floats(1e-3, 1e4).map(lambda s: FlatClip(norm=s)),
    st.floats(1e-3, 1e4).map(lambda s: PerLayerClip(norm=s)),
    st.tuples(*[st.floats(1e-3, 1e2)] * 3).map(lambda s: PerLayerClip(norms=dict(zip("abc", s, strict=True)))),
)


def contribution(clip, noise=None):
    noise = noise or GaussianNoise(noise_multiplier=1.0)
    plan = Plan(population=10, sampling=PoissonSampling(users_per_round=5), update=FedAvg(), clip=clip, noise=noise)
    return plan.at(0, LAYOUT).contribution


@given(some_users, clips)
def test_one_user_moves_the_sum_by_at_most_their_weight_times_s(users, clip):
    delta, weights = users
    bounded = contribution(clip)
    for k in range(len(delta)):
        alone = bounded.of_users(torch.from_numpy(delta[k : k + 1]), weights[k : k + 1])
        moved = math.sqrt(sum(int(n) ** 2 for n in alone.units_P)) * bounded.grid
        weight = min(max(int(weights[k]), 0), ONE) / ONE
        assert moved <= weight * clip.l2_bound(LAYOUT)
        assert 0 <= alone.weight <= 1


@given(some_users, clips)
def test_each_layer_of_one_user_stays_within_its_own_ball(users, clip):
    delta, weights = users
    bounded = contribution(clip)
    units = bounded.of_users(torch.from_numpy(delta[:1]), weights[:1]).units_P.double() * bounded.grid
    for ball in bounded.balls:
        assert units[ball.where].norm() <= ball.radius * (1 + 1e-12)


@given(clips)
def test_a_plan_with_noise_has_the_grid_of_its_bound_and_one_without_the_absolute_one(clip):
    """A finer grid would leave low bits that the noise does not cover. The grid must not depend on the users."""
    bounded = contribution(clip)
    assert bounded.grid == noised_grid(clip.l2_bound(LAYOUT))
    assert 2**20 <= bounded.l2_bound / bounded.grid < 2**21
    assert contribution(clip, NoNoise()).grid == UNNOISED_GRID


@pytest.mark.parametrize("layer", range(len(LAYOUT.names)))
def test_a_long_update_within_one_layer_is_scaled_to_the_ball_of_this_layer(layer):
    """The norm of the update is above the bound of its layer and below the bound of the whole."""
    clip = PerLayerClip(norm=2.0)
    bounded, delta = contribution(clip), torch.zeros(1, LAYOUT.total, dtype=torch.float64)
    ball = bounded.balls[layer]
    delta[0, ball.where] = 1.9 / math.sqrt(delta[0, ball.where].numel())
    assert ball.radius < delta.norm() < clip.l2_bound(LAYOUT)
    moved = (bounded.of_users(delta, np.array([ONE])).units_P.double() * bounded.grid).norm()
    assert 0.999 * ball.radius < moved <= ball.radius


@given(some_users, clips, st.randoms())
def test_the_sum_is_bit_identical_in_any_order_and_any_chunks(users, clip, shuffler):
    delta, weights = users
    bounded = contribution(clip)
    together = bounded.of_users(torch.from_numpy(delta), weights)
    order = list(range(len(delta)))
    shuffler.shuffle(order)
    cut = shuffler.randint(0, len(delta))
    chunks = [
        bounded.of_users(torch.from_numpy(delta[part]), weights[part]) for part in (order[:cut], order[cut:]) if part
    ]
    apart = bounded.sum(chunks, 6)
    assert torch.equal(together.units_P, apart.units_P)
    assert together.weight == apart.weight


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("clip", [FlatClip(norm=1.0), PerLayerClip(norm=1.0), NoClip()])
def test_a_user_who_is_not_finite_adds_exactly_zero_and_still_counts(bad, clip):
    bounded = contribution(clip, NoNoise() if isinstance(clip, NoClip) else None)
    delta = torch.tensor([[0.1, 0, 0, 0, 0, 0], [0.2, 0, bad, 0, 0, 0]])
    both = bounded.of_users(delta, np.array([ONE, ONE]))
    one = bounded.of_users(delta[:1], np.array([ONE]))
    assert torch.equal(both.units_P, one.units_P)
    assert both.weight == 2.0


def test_a_number_too_large_for_the_grid_counts_as_not_finite_without_a_clip():
    bounded = contribution(NoClip(), NoNoise())
    assert not bounded.of_users(torch.full((1, 6), 1e30), np.array([ONE])).units_P.any()


@given(hnp.arrays("float32", (1, 6), elements=st.floats(-100, 100, width=32)), st.integers(0, ONE))
def test_truncation_goes_towards_zero_and_is_below_one_unit(delta, weight):
    bounded = contribution(FlatClip(norm=1e4))
    exact = delta[0].astype(np.float64) * (weight / ONE) / bounded.grid
    units = bounded.of_users(torch.from_numpy(delta), np.array([weight])).units_P.numpy()
    assert (np.abs(units) <= np.abs(exact)).all()
    assert (np.abs(exact - units) < 1).all()


@given(st.floats(1e-6, 1e9))
def test_the_grid_is_a_power_of_two_far_below_the_bound(S):
    grid = noised_grid(S)
    assert math.frexp(grid)[0] == 0.5
    assert 2**20 <= S / grid < 2**21


def test_an_update_of_exactly_the_bound_is_kept_whole():
    bounded = contribution(FlatClip(norm=5.0))
    total = bounded.of_users(torch.tensor([[3.0, 4.0, 0, 0, 0, 0]]), np.array([ONE]))
    assert (total.units_P.double() * bounded.grid).tolist() == [3.0, 4.0, 0, 0, 0, 0]


def test_an_update_beyond_the_bound_is_scaled_and_not_dropped():
    bounded = contribution(FlatClip(norm=5.0))
    total = bounded.of_users(torch.tensor([[30.0, 40.0, 0, 0, 0, 0]]), np.array([ONE]))
    assert (total.units_P.double() * bounded.grid).tolist() == pytest.approx(
        [3.0, 4.0, 0, 0, 0, 0], abs=2 * bounded.grid
    )


@given(hnp.arrays("float64", (1, 6), elements=st.floats(-1e3, 1e3)), st.integers(0, ONE))
def test_a_contribution_does_not_change_its_input(delta, weight):
    before = torch.from_numpy(delta.copy())
    contribution(FlatClip(norm=0.5)).of_users(torch.from_numpy(delta), np.array([weight]))
    assert torch.equal(torch.from_numpy(delta), before)


def test_the_last_clip_is_done_in_double_precision():
    """Compared with numpy: in single precision some of these 1,200 coordinates would be another integer."""
    bounded, rng = contribution(FlatClip(norm=5.0)), np.random.default_rng(3)
    for delta in rng.standard_normal((200, 6)).astype("float32") * 100:
        exact = delta.astype(np.float64) * (5.0 / np.linalg.norm(delta.astype(np.float64))) / bounded.grid
        units = bounded.of_users(torch.from_numpy(delta[None]), np.array([ONE])).units_P.numpy()
        assert units.tolist() == np.trunc(exact).tolist()


@pytest.mark.parametrize("S", [0.3, 1.0, 1.7, 2.0])
@pytest.mark.parametrize("weight", [1, ONE // 3, ONE - 1, ONE])
def test_integers_fit_up_to_the_exact_square_of_the_bound_and_not_one_beyond(S, weight):
    each = contribution(FlatClip(norm=S))
    largest = math.floor((Fraction(S) / Fraction(each.grid) * weight / ONE) ** 2)
    for square, is_accepted in ((largest, True), (largest + 1, False)):
        units, left = [], square
        while left:
            units.append(math.isqrt(left))
            left -= units[-1] ** 2
        assert each.accepts(torch.tensor(units), weight) == is_accepted


def test_a_user_whose_integers_exceed_the_bound_is_dropped():
    """The check of the integers does not depend on the clip before it: it holds even if that clip is wrong."""
    bounded = contribution(FlatClip(norm=1.0))
    object.__setattr__(bounded, "balls", ())  # a broken clip
    delta = torch.tensor([[0.9, 0, 0, 0, 0, 0], [0, 1.1, 0, 0, 0, 0], [0, 0, 1.5, 0, 0, 0], [0, 0, 0, 0.9, 0, 0]])
    total = bounded.of_users(delta, np.array([ONE, ONE, ONE // 2, ONE // 2]))
    assert total.units_P[0] > 0
    assert total.units_P[1] == 0
    assert total.units_P[2] == 0  # 0.75 is below S, but not below half of it
    assert total.units_P[3] > 0


@pytest.mark.parametrize("num_tokens", [*range(12), 10**9])
def test_weights_are_the_papers_and_never_above_one(num_tokens):
    units = CappedWeights(weight_cap=7, total_weight=10).units(np.array([num_tokens]))[0]
    assert units <= ONE
    assert units / ONE == pytest.approx(min(num_tokens / 7, 1), abs=2**-29)
    assert Fraction(int(units), ONE) <= Fraction(num_tokens, 7)  # rounding never raises a weight


def test_an_empty_cohort_sums_to_nothing():
    total = contribution(FlatClip(norm=1.0)).sum([], 6)
    assert total.units_P.tolist() == [0] * 6
    assert total.weight == 0
    assert FixedDenominator().average(total, 5.0).sensitivity == pytest.approx(0.2)


def test_chunks_are_added_as_they_come_and_none_is_kept_or_changed():
    bounded = contribution(FlatClip(norm=1.0))
    one_user = bounded.of_users(torch.full((1, 6), 0.1), np.array([ONE]))
    before_P = one_user.units_P.clone()
    seen = []

    def chunks():
        for _ in range(5):
            # Only the last chunk may still be in memory.
            assert [units() is None for units in seen[:-1]] == [True] * len(seen[:-1])
            chunk = replace(one_user, units_P=one_user.units_P.clone())
            seen.append(weakref.ref(chunk.units_P))
            yield chunk
            del chunk

    assert bounded.sum(chunks(), 6).units_P.tolist() == (5 * before_P).tolist()
    assert bounded.sum([one_user, one_user], 6).units_P.tolist() == (2 * before_P).tolist()
    assert one_user.units_P.tolist() == before_P.tolist()
