"""A distinguisher that uses low bits succeeds if noise is added in floating point, and fails on what Unheard releases."""

import numpy as np
import pytest
import torch
from scipy import stats

from unheard import ClippedDenominator, FedAvg, FixedDenominator, FlatClip, GaussianNoise, Plan, PoissonSampling
from unheard.parameters import Layout
from unheard.randomness import reproducible_generator
from unheard.updates.user_update import ONE

MANY = 400_000
LAYOUT = Layout((("a", (MANY,)),))


def grid_of_floats(released: np.ndarray) -> np.ndarray:
    """Return for each number the exponent of its lowest set bit: of the largest power of two that divides it."""
    mantissa, exponent = np.frexp(released)
    whole = np.abs(mantissa * 2.0**53).astype(np.int64)
    whole[whole == 0] = 1
    return exponent - 53 + np.log2(whole & -whole).astype(int)


def advantage(one: np.ndarray, other: np.ndarray) -> float:
    """Return the advantage of the best threshold on the lowest set bit, over numbers with absolute value below 1/4."""
    near_one, near_other = (x[(np.abs(x) < 0.25)] for x in (one, other))
    a, b = grid_of_floats(near_one), grid_of_floats(near_other)
    edges = np.arange(min(a.min(), b.min()), max(a.max(), b.max()) + 1)
    return max(abs((a <= e).mean() - (b <= e).mean()) for e in edges)


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_float_addition_is_broken_by_the_distinguisher(precision):
    """0 + noise keeps the lowest bits of the noise, and 1 + noise rounds them off."""
    noise = [reproducible_generator(3, i).standard_normal(MANY).astype(precision) for i in range(2)]
    without, with_user = noise[0], np.ones(1, dtype=precision) + noise[1]
    assert advantage(without.astype(np.float64), with_user.astype(np.float64)) > 0.2


def released(estimator, users: int, seed: int) -> tuple[np.ndarray, float]:
    """Return the released average of a round, and its unit. Each user adds 1/3 to every coordinate, which is off the grid."""
    plan = Plan(
        population=1000, sampling=PoissonSampling(users_per_round=100), update=FedAvg(), clip=FlatClip(norm=300.0),
        noise=GaussianNoise(noise_multiplier=0.01), estimator=estimator,
    ).at(0, LAYOUT)  # fmt: skip
    delta = torch.full((users, MANY), 1 / 3)
    average = plan.average(plan.contribution.sum([plan.contribution.of_users(delta, np.full(users, ONE))], MANY))
    noisy = plan.noise.add(average, reproducible_generator(4, seed))
    return noisy.average_P.numpy(), average.unit


@pytest.mark.parametrize("estimator", [FixedDenominator(), ClippedDenominator(min_total_weight=900.0)])
def test_the_same_distinguisher_finds_nothing_here(estimator):
    one, _ = released(estimator, users=1, seed=0)
    none, _ = released(estimator, users=0, seed=1)
    scale = np.abs(none).max()  # the same scale for both, because the maximum varies between samples
    assert advantage(one / scale, none / scale) < 0.01


@pytest.mark.parametrize("estimator", [FixedDenominator(), ClippedDenominator(min_total_weight=900.0)])
def test_the_last_byte_of_what_is_released_says_nothing_about_who_was_there(estimator):
    counts = []
    for users in (0, 1, 2):
        average, unit = released(estimator, users, seed=10 + users)
        units = np.rint(average / unit).astype(np.int64)
        assert np.abs(average / unit - units).max() < 1e-3  # on the grid with any users
        counts.append(np.bincount(units % 256, minlength=256))
    assert stats.chi2_contingency(np.array(counts)).pvalue > 1e-4
    assert all(stats.chisquare(c).pvalue > 1e-4 for c in counts)
