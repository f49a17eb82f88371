"""Adaptive clipping: S converges to the true quantile of the norms, and update and count are charged as one release."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from unheard import (
    AdaptiveClip,
    Change,
    ClippedDenominator,
    FedAvg,
    FixedSizeSampling,
    FlatClip,
    GaussianNoise,
    NoNoise,
    Plan,
    PoissonSampling,
    TrueAverage,
)
from unheard.config import part_of_kind
from unheard.errors import InvalidValue, UnknownKey, UnprovenCombination
from unheard.mechanism.aggregation import CohortSum, Contribution, noised_grid
from unheard.mechanism.clipping import Ball
from unheard.mechanism.plan import KINDS
from unheard.parameters import Layout
from unheard.privacy.events import NonPrivate, PoissonGaussian
from unheard.randomness import reproducible_generator
from unheard.updates.user_update import ONE

LAYOUT = Layout((("a", (3,)), ("b", (2,))))
USERS = 2000


def plan(clip, noise=None, **more) -> Plan:
    return Plan(
        population=USERS,
        sampling=more.pop("sampling", PoissonSampling(users_per_round=200)),
        update=FedAvg(),
        clip=clip,
        noise=noise or GaussianNoise(noise_multiplier=1.0),
        **more,
    )


def total(unclipped: int, clipped: int) -> CohortSum:
    import torch

    return CohortSum(
        units_P=torch.zeros(5, dtype=torch.int64), grid=1.0, weight=0.0, l2_bound=1.0, balance=unclipped - clipped
    )


def followed(clip: AdaptiveClip, norms: np.ndarray, rounds: int, seed: int, noise=None) -> list[float]:
    """Return S after each round, for users whose updates have these norms. The plan draws and counts the users."""
    whole, S, seen = plan(clip, noise), None, []
    for t in range(rounds):
        now = whole.at(t, LAYOUT, S)
        cohort = norms[now.sampling.draw(len(norms), now.population, reproducible_generator(seed, "draw", t))]
        unclipped = int((cohort <= now.clip.l2_bound(LAYOUT)).sum())
        S = now.next_norm(total(unclipped, len(cohort) - unclipped), reproducible_generator(seed, "count", t))
        seen.append(S)
    return seen


@pytest.mark.parametrize("quantile", [0.3, 0.5, 0.9])
@pytest.mark.parametrize("beginning", [0.01, 100.0])
def test_s_converges_to_the_true_quantile_from_above_and_from_below(quantile, beginning):
    norms = np.exp(np.random.default_rng(1).standard_normal(USERS)) * 5.0
    clip = AdaptiveClip(initial_norm=5.0 * beginning, quantile=quantile)
    path = followed(clip, norms, 250, seed=2)
    reached = (norms <= np.median(path[-50:])).mean()
    assert reached == pytest.approx(quantile, abs=0.06)
    assert (path[10] > path[0]) == (beginning < 1)  # it moves in the right direction from the start


def test_the_sign_is_right_for_one_step():
    clip, rng = AdaptiveClip(initial_norm=1.0, quantile=0.5, learning_rate=0.2), reproducible_generator(1)
    quiet = dict(expected_users=100.0, count_noise_std=0.0, rng=rng)
    assert clip.next_norm(1.0, balance=100, **quiet) == pytest.approx(math.exp(-0.2 * 0.5))  # none clipped: S falls
    assert clip.next_norm(1.0, balance=-100, **quiet) == pytest.approx(math.exp(0.2 * 0.5))  # all clipped: S rises
    assert clip.next_norm(1.0, balance=0, **quiet) == pytest.approx(1.0)


def test_update_and_count_are_charged_as_one_event_at_the_declared_z():
    made = plan(AdaptiveClip(initial_norm=3.0, count_noise_std=10.0)).at(0, LAYOUT)
    event = made.event()
    assert isinstance(event, PoissonGaussian)
    assert event.noise_multiplier == pytest.approx(1.0, rel=1e-12)
    assert event.sampling_prob == 0.1
    z_delta = made.noise.multiplier(made.sensitivity)
    assert z_delta > 1.0
    assert 1 / event.noise_multiplier**2 == pytest.approx(1 / z_delta**2 + 1 / (2 * 10.0) ** 2)


@given(st.floats(0.05, 5.0), st.floats(0.03, 50.0))
def test_the_shares_of_update_and_count_are_the_whole(z, sigma_b):
    clip = AdaptiveClip(initial_norm=1.0)
    if z >= 2 * sigma_b:
        with pytest.raises(UnprovenCombination, match="2 \\* count_noise_std"):
            clip.update_multiplier(z, sigma_b)
        return
    z_delta = clip.update_multiplier(z, sigma_b)
    assert z_delta >= z
    if z < 1.99 * sigma_b:
        assert clip.joint_multiplier(z_delta, sigma_b) == pytest.approx(z, rel=1e-9)


def test_the_event_is_the_same_for_every_s_so_the_cost_does_not_follow_the_users():
    whole = plan(AdaptiveClip(initial_norm=3.0))
    events = {whole.at(t, LAYOUT, S).event() for t in range(3) for S in (None, 1e-5, 0.7, 3.0, 1e5)}
    assert len(events) == 1


def test_the_noise_of_the_update_follows_s():
    whole = plan(AdaptiveClip(initial_norm=3.0))
    small, large = whole.at(0, LAYOUT, 1.0), whole.at(0, LAYOUT, 10.0)
    assert large.noise.std(large.sensitivity) == pytest.approx(10 * small.noise.std(small.sensitivity))
    assert large.contribution.l2_bound == 10.0


def test_the_count_has_noise_of_two_sigma_b_in_half_users_divided_by_the_declared_number():
    clip, m, sigma_b = AdaptiveClip(initial_norm=1.0, learning_rate=1.0), 50.0, 3.0
    rng = reproducible_generator(4)
    noisy = np.array([clip.next_norm(1.0, 7, m, sigma_b, rng) for _ in range(40_000)])
    halves = (0.5 - np.log(noisy) - 0.5) * 2 * m  # compute the noisy balance from S
    assert np.abs(halves - np.rint(halves)).max() < 1e-6  # whole numbers
    assert halves.mean() == pytest.approx(7, abs=0.15)
    assert halves.std() == pytest.approx(2 * sigma_b, rel=0.02)
    jitter = reproducible_generator(5).random(len(halves)) - 0.5
    assert stats.kstest((halves - 7 + jitter) / (2 * sigma_b), "norm").pvalue > 1e-4


def test_one_user_moves_the_balance_by_one_and_nothing_divides_by_who_came():
    made = plan(AdaptiveClip(initial_norm=1.0), NoNoise()).at(0, LAYOUT)
    rng = reproducible_generator(1)
    with_user, without = (made.next_norm(total(n, 10), rng) for n in (21, 20))
    assert with_user is not None
    assert without is not None
    assert math.log(without / with_user) == pytest.approx(0.2 / (2 * 200), rel=1e-6)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (dict(clip=AdaptiveClip(initial_norm=1.0, count_noise_std=0.5)), "2 \\* count_noise_std"),
        (dict(clip=AdaptiveClip(initial_norm=1.0), noise=GaussianNoise(noise_std=0.1)), "noise_multiplier"),
        (
            dict(clip=AdaptiveClip(initial_norm=1.0), schedule=(Change(from_round=3, noise_multiplier=99.0),)),
            "2 \\* count_noise_std",
        ),
        (
            dict(clip=AdaptiveClip(initial_norm=1.0), schedule=(Change(from_round=3, noise_std=0.2),)),
            "noise_multiplier",
        ),
        (dict(clip=AdaptiveClip(initial_norm=1.0), schedule=(Change(from_round=3, clip_norm=2.0),)), "sets it itself"),
        (dict(clip=AdaptiveClip(initial_norm=1.0), sampling=FixedSizeSampling(users_per_round=9)), "poisson"),
        (dict(clip=AdaptiveClip(initial_norm=1.0), estimator=TrueAverage()), "true average"),
    ],
)
def test_what_has_no_proof_is_refused_when_the_plan_is_made(parts, message):
    with pytest.raises(UnprovenCombination, match=message):
        plan(**parts)


def test_per_layer_following_has_no_proof_and_no_name():
    with pytest.raises(UnknownKey, match="norms"):
        part_of_kind(KINDS["clip"], {"kind": "adaptive", "norms": {"a": 1.0}}, "clip")


@pytest.mark.parametrize(
    "bad",
    [
        dict(quantile=0.0),
        dict(quantile=1.0),
        dict(learning_rate=0.0),
        dict(initial_norm=-1.0),
        dict(count_noise_std=0.0),
    ],
)
def test_impossible_settings_are_refused(bad):
    with pytest.raises(InvalidValue):
        AdaptiveClip(**{"initial_norm": 1.0, **bad})


def test_both_estimators_may_follow_and_a_baseline_follows_without_a_claim():
    made = plan(AdaptiveClip(initial_norm=2.0), estimator=ClippedDenominator(min_total_weight=1000.0)).at(0, LAYOUT)
    assert made.event() == PoissonGaussian(sampling_prob=0.1, noise_multiplier=made.event().noise_multiplier)
    free = plan(AdaptiveClip(initial_norm=2.0), NoNoise()).at(0, LAYOUT)
    assert isinstance(free.event(), NonPrivate)
    assert free.count_noise_std == 0.0


def test_s_stays_within_bounds_whatever_the_noise():
    clip = AdaptiveClip(initial_norm=1.0, learning_rate=1.0)
    S, rng = 1.0, reproducible_generator(7)
    for _ in range(200):
        S = clip.next_norm(S, balance=10**9, expected_users=1.0, count_noise_std=1.0, rng=rng)
    assert pytest.approx(2.0**-30) == S
    assert FlatClip(norm=S).norm > 0


@pytest.mark.parametrize("weight", [0, 1, ONE // 4, ONE])
def test_every_user_counts_one_in_the_balance_whatever_their_weight(weight):
    each = Contribution(balls=(Ball(slice(0, 2), 1.0),), l2_bound=1.0, grid=noised_grid(1.0), is_noised=True)
    for unclipped in range(6):
        is_unclipped_U = torch.arange(5) < unclipped
        total = each.of_users(torch.zeros(5, 2), np.full(5, weight), is_unclipped_U)
        assert total.balance == 2 * min(unclipped, 5) - 5
        chunks = [
            each.of_users(torch.zeros(n, 2), np.full(n, weight), part)
            for n, part in ((2, is_unclipped_U[:2]), (3, is_unclipped_U[2:]))
        ]
        assert (each.sum(chunks, 2).balance, each.sum(chunks, 2).weight) == (total.balance, total.weight)
