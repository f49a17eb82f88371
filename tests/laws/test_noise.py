"""The noise has the right standard deviation and distribution, is drawn for every coordinate and round, and is on the grid."""

import math
import random
import time
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from scipy import stats

from unheard import (
    ClippedDenominator,
    FedAvg,
    FixedDenominator,
    FlatClip,
    GaussianNoise,
    NoNoise,
    Plan,
    PoissonSampling,
    TrueAverage,
)
from unheard.errors import InvalidValue, UnprovenCombination
from unheard.mechanism import noise as noise_module
from unheard.mechanism.aggregation import BoundedAverage, noised_grid
from unheard.mechanism.noise import ExactNormalsAhead, NormalsAhead, in_units, standard_normals
from unheard.parameters import Layout
from unheard.randomness import SecureStreams, reproducible_generator

CPU = torch.device("cpu")
MANY = 1_000_000
LAYOUT = Layout((("a", (MANY // 2,)), ("b", (MANY // 2,))))


def release(estimator, noise, S=15.0, attempt=0):
    """Return the release of a round with an empty cohort, which is only noise."""
    plan = Plan(
        population=1000, sampling=PoissonSampling(users_per_round=100), update=FedAvg(), clip=FlatClip(norm=S), noise=noise,
        estimator=estimator,
    ).at(0, LAYOUT)  # fmt: skip
    average = plan.average(plan.contribution.sum([], MANY))
    return plan, average, plan.noise.add(average, reproducible_generator(1, attempt)).average_P.numpy()


@pytest.mark.parametrize("estimator", [FixedDenominator(), ClippedDenominator(min_total_weight=800.0)])
@pytest.mark.parametrize("z", [0.06, 1.0, 7.0])
def test_sigma_is_z_times_the_sensitivity_within_half_a_percent_of_a_million_draws(estimator, z):
    plan, _, released = release(estimator, GaussianNoise(noise_multiplier=z))
    assert released.std() == pytest.approx(z * plan.sensitivity, rel=0.005)
    assert plan.event().noise_multiplier == pytest.approx(z)


def test_z_derived_from_sigma_is_what_the_event_records():
    plan, _, released = release(FixedDenominator(), GaussianNoise(noise_std=0.003))
    assert released.std() == pytest.approx(0.003, rel=0.005)
    assert plan.event().noise_multiplier == pytest.approx(0.003 / (15 / 100))


def test_the_shape_is_gaussian_and_a_kolmogorov_test_would_see_three_percent():
    plan, _, released = release(FixedDenominator(), GaussianNoise(noise_multiplier=1.0))
    for scale, fits in [(1.0, True), (0.97, False), (1.03, False)]:
        assert (stats.kstest(released / (plan.sensitivity * scale), "norm").pvalue > 1e-4) == fits


def test_every_coordinate_has_noise_of_its_own():
    _, _, released = release(FixedDenominator(), GaussianNoise(noise_multiplier=1.0))
    a, b = released[: MANY // 2], released[MANY // 2 :]
    assert abs(np.corrcoef(a, b)[0, 1]) < 0.01
    assert abs(np.corrcoef(a[:-1], a[1:])[0, 1]) < 0.01


def test_the_tails_continue_past_five_sigma():
    drawn = np.concatenate([np.abs(reproducible_generator(5, i).standard_normal(10**7)) for i in range(4)])
    expected = 4e7 * 2 * stats.norm.sf(5.0)  # about 23
    assert 0.3 * expected < (drawn > 5.0).sum() < 3 * expected


def test_two_rounds_share_no_noise():
    noise = GaussianNoise(noise_multiplier=1.0)
    _, average, _ = release(FixedDenominator(), noise)
    streams = SecureStreams()
    first, again = (noise.add(average, streams.noise(0)).average_P.numpy() for _ in range(2))
    assert abs(np.corrcoef(first, again)[0, 1]) < 0.01


@pytest.mark.parametrize("estimator", [FixedDenominator(), ClippedDenominator(min_total_weight=800.0)])
def test_what_is_released_lies_on_the_public_grid(estimator):
    _, average, released = release(estimator, GaussianNoise(noise_multiplier=1.0))
    units = released / average.unit
    assert np.abs(units - np.rint(units)).max() < 1e-3
    assert len(np.unique(np.rint(units) % 16)) == 16  # the noise reaches the last bit of the grid


def test_torch_manual_seed_does_not_move_the_noise():
    noise, average = (
        GaussianNoise(noise_multiplier=1.0),
        release(FixedDenominator(), GaussianNoise(noise_multiplier=1.0))[1],
    )

    def draw():
        torch.manual_seed(0)
        return noise.add(average, SecureStreams().noise(0)).average_P

    assert not torch.equal(draw(), draw())


def test_noise_is_added_to_the_average_and_not_put_in_its_place():
    noise = GaussianNoise(noise_multiplier=1.0)
    units = torch.arange(-3, 4)
    zero = BoundedAverage(units_P=torch.zeros(7, dtype=torch.int64), unit=0.5, sensitivity=10.0)
    some = BoundedAverage(units_P=units, unit=0.5, sensitivity=10.0)
    with_zero, with_some = (noise.add(a, reproducible_generator(2)).average_P for a in (zero, some))
    assert (with_some - with_zero).tolist() == (units * 0.5).tolist()


def test_noise_comes_from_the_stream_that_it_is_given_and_from_nowhere_else():
    noise, average = (
        GaussianNoise(noise_multiplier=1.0),
        release(FixedDenominator(), GaussianNoise(noise_multiplier=1.0))[1],
    )
    assert torch.equal(*(noise.add(average, reproducible_generator(8)).average_P for _ in range(2)))


def test_noise_is_drawn_finely_enough_to_fill_the_grid_even_when_it_is_wide():
    """At z = 1000 the noise spans 2^30 units. In single precision the last bits of most draws would be zero."""
    _, average, released = release(FixedDenominator(), GaussianNoise(noise_multiplier=1000.0))
    last_bits = np.bincount((np.rint(released / average.unit).astype(np.int64) % 16), minlength=16)
    assert stats.chisquare(last_bits).pvalue > 1e-4


def test_noise_is_rounded_to_the_nearest_unit_and_not_towards_zero():
    """Only rounding to nearest makes it post-processing. With a standard deviation of 0.8 units, 47 % of draws round to 0."""
    average = BoundedAverage(units_P=torch.zeros(MANY, dtype=torch.int64), unit=1.0, sensitivity=0.8)
    released = GaussianNoise(noise_multiplier=1.0).add(average, reproducible_generator(6)).average_P
    expected = 1 - 2 * stats.norm.sf(0.5 / 0.8)
    assert (released == 0).double().mean().item() == pytest.approx(expected, abs=0.003)


def test_an_average_without_a_bound_gets_no_noise_but_a_refusal():
    free = TrueAverage().average(release(FixedDenominator(), NoNoise())[0].contribution.sum([], MANY), 1.0)
    with pytest.raises(UnprovenCombination, match="bounded sensitivity"):
        GaussianNoise(noise_multiplier=1.0).add(free, reproducible_generator(1))


@pytest.mark.parametrize(
    "bad", [{}, {"noise_multiplier": 1.0, "noise_std": 1.0}, {"noise_multiplier": 0.0}, {"noise_std": -1.0}]
)
def test_impossible_noise_is_refused(bad):
    with pytest.raises(InvalidValue):
        GaussianNoise(**bad)


@pytest.mark.parametrize("noise", [{"noise_multiplier": 1e13}, {"noise_std": 1e9}])
def test_noise_too_wide_for_the_integers_is_refused_and_the_widest_allowed_still_fills_them(noise):
    """A cast beyond int64 gives the same constant for every draw: there would be no noise, with a claimed epsilon of 0."""
    average = BoundedAverage(units_P=torch.zeros(MANY, dtype=torch.int64), unit=2.0**-21, sensitivity=1.0)
    with pytest.raises(InvalidValue, match="at most"):
        GaussianNoise(**noise).add(average, reproducible_generator(1))
    few = replace(average, units_P=average.units_P[:20_000])
    widest = GaussianNoise(noise_multiplier=2.0**19).add(few, reproducible_generator(1)).average_P.numpy()
    assert widest.std() == pytest.approx(2.0**19, rel=0.03)
    assert stats.chisquare(np.bincount(np.rint(widest * 2.0**21).astype(np.int64) % 16)).pvalue > 1e-4


def test_normals_drawn_ahead_are_given_once():
    ahead = NormalsAhead(reproducible_generator(3), 10, CPU)
    assert np.array_equal(ahead.take(10).numpy(), reproducible_generator(3).standard_normal(10))
    with pytest.raises(RuntimeError, match="taken already"):
        ahead.take(10)


def test_normals_drawn_ahead_are_not_given_before_they_are_drawn():
    class Slow:
        def standard_normal(self, *, out):
            time.sleep(0.2)
            out[:] = 7.0

    assert torch.equal(NormalsAhead(Slow(), 10, CPU).take(10), torch.full((10,), 7.0, dtype=torch.float64))


def test_normals_drawn_ahead_are_all_given_or_none():
    with pytest.raises(RuntimeError, match="another number"):
        NormalsAhead(reproducible_generator(3), 10, CPU).take(9)


def test_normals_of_many_blocks_do_not_depend_on_the_threads_that_draw_them(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(noise_module, "NORMALS_PER_BLOCK", 1000)
    ahead = NormalsAhead(reproducible_generator(3), 3500, CPU).take(3500)
    assert torch.equal(ahead, standard_normals(reproducible_generator(3), 3500, CPU))
    assert np.array_equal(ahead[:1000].numpy(), reproducible_generator(3).standard_normal(1000))
    monkeypatch.setattr(noise_module, "EXACT_NORMALS_PER_BLOCK", 1000)
    exact = [
        ExactNormalsAhead(reproducible_generator(3), 3500, CPU, scale).take(3500, 2.0**20) for scale in (None, 2.0**20)
    ]
    assert torch.equal(*exact)
    assert abs(exact[0].double().std() / 2.0**20 - 1) < 0.05


def test_blocks_of_normals_share_no_noise(monkeypatch: pytest.MonkeyPatch):
    """Nor do they share numbers with what the same generator draws afterwards."""
    monkeypatch.setattr(noise_module, "NORMALS_PER_BLOCK", 1000)
    monkeypatch.setattr(noise_module, "EXACT_NORMALS_PER_BLOCK", 1000)
    rng = reproducible_generator(3)
    drawn = torch.cat([standard_normals(rng, 3500, CPU), standard_normals(rng, 3500, CPU)])
    assert len(drawn.unique()) == 7000
    exact = [ExactNormalsAhead(rng, 3500, CPU).take(3500, 2.0**34) for _ in range(2)]
    assert len(torch.cat(exact).abs().unique()) == 7000


def test_the_integer_noise_of_a_round_is_at_least_z_times_what_one_user_moves_as_real_numbers():
    """One user moves the integers by S / g, independently of the float64 rounding of S / (q W), the unit and their product."""
    rng, fixed = random.Random(1), FixedDenominator()
    for _ in range(20_000):
        S, weight, z = (math.exp(rng.uniform(*span)) for span in ((-5, 5), (-3, 9), (-3, 3)))
        grid, noise = noised_grid(S), GaussianNoise(noise_multiplier=z)
        scale = in_units(noise.std(fixed.sensitivity(S, weight, 1)), fixed.unit(S, grid, weight))
        assert z * (1 + 1e-14) > scale / (S / grid)
        assert Fraction(scale) >= Fraction(z) * Fraction(S) / Fraction(grid)
