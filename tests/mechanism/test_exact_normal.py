"""exact_normal.py: integers with exactly the distribution of a rounded Gaussian."""

import math
from fractions import Fraction

import mpmath
import numpy as np
import pytest
import torch
from scipy import stats

import unheard
from unheard.mechanism import exact_normal
from unheard.mechanism.exact_normal import rounded_normals
from unheard.mechanism.values import BoundedAverage
from unheard.randomness import reproducible_generator

CPU = torch.device("cpu")


def cell_probabilities(scale: float, most: int) -> np.ndarray:
    """P(round(scale * X) = k) for |k| <= most, and the tail at the end."""
    k = np.arange(-most, most + 1)
    inside = stats.norm.cdf((k + 0.5) / scale) - stats.norm.cdf((k - 0.5) / scale)
    return np.append(inside, 1 - inside.sum())


@pytest.mark.parametrize("margin", [exact_normal.MARGIN, 0.3])
@pytest.mark.parametrize("scale", [0.3, 1.5, 7.25])
def test_the_frequencies_are_those_of_a_rounded_gaussian(scale, margin):
    """With a wide margin a third of the cases take the exact path, which must have the same distribution."""
    count = 40_000 if margin < 0.1 else 4_000
    drawn = rounded_normals(reproducible_generator(1, "test", str(scale)), count, scale, margin=margin)
    most = max(1, round(3 * scale))
    observed = np.append([(drawn == k).sum() for k in range(-most, most + 1)], (np.abs(drawn) > most).sum())
    expected = cell_probabilities(scale, most) * count
    keep = expected > 5
    statistic = ((observed - expected)[keep] ** 2 / expected[keep]).sum()
    assert stats.chi2.sf(statistic, keep.sum() - 1) > 1e-4


def test_wide_noise_is_gaussian():
    drawn = rounded_normals(reproducible_generator(2, "wide"), 200_000, 2.0**21) / 2.0**21
    assert stats.kstest(drawn, "norm").pvalue > 1e-4
    assert abs(drawn.std() - 1) < 0.01


def test_the_thresholds_are_those_of_the_integer_part():
    mpmath.mp.prec = 200
    total = mpmath.nsum(lambda j: mpmath.exp(-(j**2) / 2), [0, mpmath.inf])
    for k, threshold in enumerate(exact_normal._THRESHOLDS):
        part = mpmath.fsum(mpmath.exp(-mpmath.mpf(j * j) / 2) for j in range(k + 1)) / total
        assert int(threshold) == int(mpmath.floor(part * 2**63))
    assert int(exact_normal._THRESHOLDS[-1]) == 2**63 - 1  # beyond it, the exact path decides


class Bits:
    """A generator that returns given words, then zeros."""

    def __init__(self, *words: int) -> None:
        self.words = list(words)

    def integers(self, low: int, high: int, dtype: type) -> np.uint64:
        return np.uint64(self.words.pop(0) if self.words else 0)


def test_an_integer_part_on_a_threshold_is_decided_by_more_digits():
    threshold = int(exact_normal._THRESHOLDS[1])
    following = exact_normal._cumulative(1, 63 + 64) & (2**64 - 1)
    assert exact_normal._integer_part_exactly(Bits(following - 1), threshold, 63) == 1  # pyright: ignore[reportArgumentType]
    assert exact_normal._integer_part_exactly(Bits(following + 1), threshold, 63) == 2  # pyright: ignore[reportArgumentType]


def test_a_number_half_way_between_two_integers_is_decided_by_more_digits():
    half = 2**63  # x = 0.5, followed by unknown digits
    assert exact_normal._round_exactly(Bits(), 0, half - 1, 64, 1.0) == 0  # pyright: ignore[reportArgumentType]
    assert exact_normal._round_exactly(Bits(), 0, half, 64, 1.0) == 1  # pyright: ignore[reportArgumentType]
    # scale * x just below one half with 64 digits: 0.1 is no dyadic number, so the boundary has more digits than 64.
    scale = 0.1
    boundary = math.floor(Fraction(1, 2) / Fraction(scale) % 1 * 2**64)
    k = math.floor(Fraction(1, 2) / Fraction(scale))
    results = {exact_normal._round_exactly(Bits(word), k, boundary, 64, scale) for word in (0, 2**64 - 1)}  # pyright: ignore[reportArgumentType]
    assert results == {0, 1}


def test_acceptance_follows_the_exponential():
    """k = 1, x just below 0.5: the bound is exp(-x (2 + x) / 2); uniform numbers on either side are decided at once."""
    x = 2**63 - 1
    bound = math.exp(-0.5 * 0.5 * 2.5)
    for offset, expected in ((-1e-9, True), (1e-9, False)):
        uniform = int((bound + offset) * 2**64)
        assert exact_normal._accept_exactly(Bits(), 1, x, uniform)[0] is expected  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan, 2.0**43])
def test_a_scale_outside_the_range_is_refused(scale):
    with pytest.raises(ValueError, match="scale"):
        rounded_normals(reproducible_generator(1), 10, scale)


def average_of(units_P: torch.Tensor, unit: float = 0.5, sensitivity: float = 10.0) -> BoundedAverage:
    return BoundedAverage(units_P=units_P, unit=unit, sensitivity=sensitivity)


def test_exact_noise_has_the_deviation_that_the_event_is_charged_for():
    noise = unheard.ExactGaussianNoise(noise_multiplier=1.5)
    average = average_of(torch.zeros(200_000, dtype=torch.int64), unit=2.0**-10, sensitivity=0.25)
    noisy = noise.add(average, reproducible_generator(4, "std"))
    assert noisy.noise_std == 1.5 * 0.25
    assert noisy.average_P.std().item() == pytest.approx(1.5 * 0.25, rel=0.01)
    assert torch.equal(noisy.average_P / 2.0**-10, (noisy.average_P / 2.0**-10).round())  # on the grid


def test_exact_noise_is_added_to_the_average():
    noise = unheard.ExactGaussianNoise(noise_multiplier=1.0)
    units_P = torch.arange(-3, 4)
    without, with_units = (
        noise.add(average_of(units), reproducible_generator(2)).average_P
        for units in (torch.zeros_like(units_P), units_P)
    )
    assert (with_units - without).tolist() == (units_P * 0.5).tolist()


def test_exact_noise_is_never_narrower_than_the_event_says(monkeypatch):
    """The scale of the integers is at least z * sensitivity / unit as a real number, whatever float64 rounds."""
    scales = []
    monkeypatch.setattr(
        exact_normal.ExactNormals, "rounded", lambda self, scale: (scales.append(scale), np.zeros(1, np.int64))[1]
    )
    rng = np.random.default_rng(0)
    for z, sensitivity, unit in rng.uniform((0.1, 0.01, 1e-9), (3, 1, 1e-6), size=(200, 3)):
        noise = unheard.ExactGaussianNoise(noise_multiplier=float(z))
        noise.add(average_of(torch.zeros(1, dtype=torch.int64), float(unit), float(sensitivity)), rng)
        assert Fraction(scales[-1]) >= Fraction(float(z)) * Fraction(float(sensitivity)) / Fraction(float(unit))


def test_exact_noise_is_drawn_ahead_and_given_once():
    noise = unheard.ExactGaussianNoise(noise_multiplier=1.0)
    average = average_of(torch.zeros(50, dtype=torch.int64))
    ahead = noise.ahead(reproducible_generator(6), 50, CPU)
    drawn = noise.add(average, ahead).average_P
    assert torch.equal(drawn, noise.add(average, reproducible_generator(6)).average_P)
    with pytest.raises(RuntimeError, match="given already"):
        noise.add(average, ahead)
    with pytest.raises(RuntimeError, match="another number"):
        noise.add(average, noise.ahead(reproducible_generator(6), 49, CPU))


def test_float64_normals_are_never_taken_for_exact_noise():
    average = average_of(torch.zeros(5, dtype=torch.int64))
    floats = unheard.GaussianNoise(noise_multiplier=1.0).ahead(reproducible_generator(6), 5, CPU)
    with pytest.raises(TypeError, match="NormalsAhead"):
        unheard.ExactGaussianNoise(noise_multiplier=1.0).add(average, floats)


def test_a_run_with_exact_noise_trains_and_costs_what_gaussian_noise_costs(run, tmp_path):
    from dataclasses import replace

    exact = unheard.ExactGaussianNoise(noise_multiplier=0.5)
    reports = list(unheard.train(replace(run, plan=replace(run.plan, noise=exact)), tmp_path / "exact"))
    usual = list(unheard.train(run, tmp_path / "usual"))
    assert reports[-1].epsilon == usual[-1].epsilon
    assert 'kind = "exact_gaussian"' in (tmp_path / "exact" / "run.toml").read_text()
    assert [report.round for report in unheard.resume(tmp_path / "exact", rounds=7)] == [7]
