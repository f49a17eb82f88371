"""exact_normal.py: integers with exactly the distribution of a rounded Gaussian."""

import math
import time
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace

import mpmath
import numpy as np
import pytest
import torch
from scipy import stats
from scipy.special import ndtri
from tests.conftest import NOISE_MULTIPLIER

import unheard
from unheard.mechanism import exact_normal
from unheard.mechanism import noise as noise_module
from unheard.mechanism.aggregation import BoundedAverage
from unheard.mechanism.exact_normal import round_exactly, rounded_normals
from unheard.mechanism.noise import NormalsAhead, in_units
from unheard.randomness import reproducible_generator, secure_generator, split_stream

CPU = torch.device("cpu")


def cell_probabilities(scale: float, most: int) -> np.ndarray:
    """Return P(round(scale * X) = k) for |k| <= most, and the probability of the tail as the last entry."""
    k = np.arange(-most, most + 1)
    inside = stats.norm.cdf((k + 0.5) / scale) - stats.norm.cdf((k - 0.5) / scale)
    return np.append(inside, 1 - inside.sum())


@pytest.mark.parametrize("error", [exact_normal.ERROR, 0.02])
@pytest.mark.parametrize("scale", [0.3, 1.5, 7.25])
def test_the_frequencies_are_those_of_a_rounded_gaussian(scale, error):
    """With a large assumed error many cases take the exact path, which must have the same distribution."""
    count = 40_000 if error < 0.01 else 1_000
    drawn = rounded_normals(reproducible_generator(1, "test", str(scale)), count, scale, error=error)
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


def test_float64_inverts_the_tail_far_better_than_is_assumed():
    """Step 1 may be wrong by ERROR * (1 + x). Checked where the formula of `ndtri` changes, and at random."""
    rng = np.random.default_rng(5)
    changes = [
        c * (1 + s * 2.0**-k) for c in (math.exp(-2), math.exp(-32), 0.5) for k in range(2, 53, 5) for s in (1, -1)
    ]
    drawn = [*rng.uniform(0, 0.5, 300), *2.0 ** -rng.uniform(1, 64, 300), *2.0 ** -rng.uniform(64, 300, 50)]
    for p in [c for c in (*changes, *drawn) if c <= 0.5]:
        x = -float(ndtri(p))
        with mpmath.workprec(200):
            density = mpmath.exp(-(mpmath.mpf(x) ** 2) / 2) / mpmath.sqrt(2 * mpmath.pi)
            error = abs((mpmath.erfc(mpmath.mpf(x) / mpmath.sqrt(2)) / 2 - mpmath.mpf(float(p))) / density)
        assert error <= exact_normal.ERROR / 8 * (1 + x)
    # From the smallest P on that float64 decides, the digits that were not drawn move x by less than the bound.
    assert 1.26 * 2.0**-65 / (exact_normal.SMALLEST * 2.0**-64) < exact_normal.ERROR / 2 * (1 + 4.7)


class Bits:
    """A source of further words: the given words, then zeros, the same for every index."""

    def __init__(self, *words: int) -> None:
        self.words = words

    def further(self, index: int, number: int) -> int:
        return self(number)

    def __call__(self, number: int) -> int:
        return self.words[number] if number < len(self.words) else 0


def tail(x: float) -> int:
    """Return the first 64 binary digits of Q(x)."""
    with mpmath.workprec(300):
        return int(mpmath.floor(mpmath.erfc(mpmath.mpf(x) / mpmath.sqrt(2)) / 2 * 2**64))


def test_a_number_half_way_between_two_integers_is_decided_by_more_digits():
    boundary = tail(0.5)  # scale 1: P with exactly these digits rounds to 0 or to 1
    assert round_exactly(boundary - 1, 1.0, Bits()) == 1
    assert round_exactly(boundary + 1, 1.0, Bits()) == 0
    assert [round_exactly(boundary, 1.0, Bits(word)) for word in (0, 2**64 - 1)] == [1, 0]


@pytest.mark.parametrize("scale", [0.7, 3.0, 2.0**22, 2.0**41])
def test_the_exact_path_agrees_with_float64_where_float64_decides(scale):
    drawn = exact_normal.exact_normals(split_stream(reproducible_generator(9, "agree"), 1)[0], 60)
    exactly = [round_exactly(int(word) >> 1, scale, Bits(), error=1.0) for word in drawn.words]
    assert (np.abs(np.array(exactly) - drawn.value * scale) <= 0.5 + 2.0**-43 * scale).all()
    if scale < 2.0**30:
        assert exactly == np.abs(drawn.rounded(scale)).tolist()


def test_far_tails_are_drawn_with_more_digits():
    """P = 0 in all 64 digits: x is above Q^-1(2^-64) = 9.08, and the next digits say where."""
    for error in (exact_normal.ERROR, 1.0):  # decided by float64, and by mpmath
        assert round_exactly(0, 1.0, Bits(2**63), error=error) == 9
        assert round_exactly(0, 1.0, Bits(0, 2**63), error=error) == 13
    far = exact_normal.ExactNormals(np.array([0, 1], np.uint64), np.zeros(2), Bits(2**63))
    assert far.rounded(1.0).tolist() == [9, -9]  # the value of step 1 is not used: too few digits


def test_in_the_far_tail_float64_decides_nothing_within_its_error(monkeypatch):
    """x of a P below 2^-20 is half-way between two integers up to float64's error: only the digits decide."""
    with mpmath.workprec(300):
        boundary = int(mpmath.floor(mpmath.erfc(mpmath.mpf(8.5) / mpmath.sqrt(2)) / 2 * 2**128))
    first, further = divmod(boundary, 2**64)
    for offset, expected in ((-1, 9), (1, 8)):
        for wrong in (-(2.0**-47), 2.0**-47):
            monkeypatch.setattr(exact_normal, "ndtri", lambda p, wrong=wrong: -(8.5 + wrong))
            assert round_exactly(first, 1.0, Bits(further + offset)) == expected


def test_float64_decides_nothing_within_its_error():
    """x = 1/2 up to 2^-47: the digits say on which side of the middle it is, whatever float64 says."""
    for offset, expected in ((-1, 1), (1, 0)):
        words = np.array([2 * (tail(0.5) + offset)], np.uint64)
        for value in (0.5 - 2.0**-47, 0.5 + 2.0**-47):
            drawn = exact_normal.ExactNormals(words, np.array([value]), Bits())
            assert drawn.rounded(1.0).tolist() == [expected]


@pytest.mark.parametrize(("offset", "expected"), [(-1, 1), (1, 0)])
def test_further_digits_of_a_normal_are_its_own_and_none_is_drawn_twice(offset, expected):
    """Normals that shared digits would not be independent, and digits that repeat would not be those of a uniform P."""
    with mpmath.workprec(400):
        boundary = int(mpmath.floor(mpmath.erfc(mpmath.mpf(0.5) / mpmath.sqrt(2)) / 2 * 2**192))
    second, third = boundary >> 64 & (2**64 - 1), (boundary & (2**64 - 1)) + offset
    asked: list[tuple[int, int]] = []

    def further(index: int, number: int) -> int:
        asked.append((index, number))
        return Bits(second, third)(number)

    words = np.full(4, 2 * (boundary >> 128), np.uint64)
    drawn = exact_normal.ExactNormals(words, np.full(4, 0.5), SimpleNamespace(further=further))  # pyright: ignore
    assert drawn.rounded(1.0).tolist() == [expected] * 4
    assert asked == [(index, number) for index in range(4) for number in (0, 1)]


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan, 2.0**43])
def test_a_scale_outside_the_range_is_refused(scale):
    with pytest.raises(ValueError, match="scale"):
        rounded_normals(reproducible_generator(1), 10, scale)


def average_of(units_P: torch.Tensor, unit: float = 0.5, sensitivity: float = 10.0) -> BoundedAverage:
    return BoundedAverage(units_P=units_P, unit=unit, sensitivity=sensitivity)


def test_exact_noise_has_the_deviation_that_the_event_is_charged_for():
    noise = unheard.GaussianNoise(noise_multiplier=1.5)
    average = average_of(torch.zeros(200_000, dtype=torch.int64), unit=2.0**-10, sensitivity=0.25)
    noisy = noise.add(average, reproducible_generator(4, "std"))
    assert noisy.noise_std == 1.5 * 0.25
    assert noisy.average_P.std().item() == pytest.approx(1.5 * 0.25, rel=0.01)
    assert torch.equal(noisy.average_P / 2.0**-10, (noisy.average_P / 2.0**-10).round())  # on the grid


def test_exact_noise_is_added_to_the_average():
    noise = unheard.GaussianNoise(noise_multiplier=1.0)
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
        noise = unheard.GaussianNoise(noise_multiplier=float(z))
        noise.add(average_of(torch.zeros(1, dtype=torch.int64), float(unit), float(sensitivity)), secure_generator())
        assert Fraction(scales[-1]) >= Fraction(float(z)) * Fraction(float(sensitivity)) / Fraction(float(unit))


def test_exact_noise_is_drawn_ahead_and_given_once():
    noise = unheard.GaussianNoise(noise_multiplier=1.0)
    average = average_of(torch.zeros(50, dtype=torch.int64))
    ahead = noise.ahead(reproducible_generator(6), 50, CPU)
    drawn = noise.add(average, ahead).average_P
    assert torch.equal(drawn, noise.add(average, reproducible_generator(6)).average_P)
    with pytest.raises(RuntimeError, match="taken already"):
        noise.add(average, ahead)
    with pytest.raises(RuntimeError, match="another number"):
        noise.add(average, noise.ahead(reproducible_generator(6), 49, CPU))


def test_exact_noise_is_not_given_before_it_is_drawn(monkeypatch):
    class Slow:
        def __init__(self, part, count):
            self.count = count

        def rounded(self, scale):
            time.sleep(0.2)
            return np.full(self.count, 7)

    monkeypatch.setattr(noise_module, "exact_normals", Slow)
    for scale in (None, 3.0):
        drawn = noise_module.ExactNormalsAhead(reproducible_generator(6), 10, CPU, scale).take(10, 3.0)
        assert drawn.tolist() == [7] * 10


def test_float64_normals_are_never_taken_for_exact_noise():
    average = average_of(torch.zeros(5, dtype=torch.int64))
    floats = NormalsAhead(reproducible_generator(6), 5, CPU)
    with pytest.raises(TypeError, match="NormalsAhead"):
        unheard.GaussianNoise(noise_multiplier=1.0).add(average, floats)


def test_noise_that_was_drawn_with_another_scale_is_not_given():
    noise, average = unheard.GaussianNoise(noise_multiplier=1.0), average_of(torch.zeros(5, dtype=torch.int64))
    scale = in_units(10.0, 0.5)
    drawn = noise.add(average, noise.ahead(reproducible_generator(6), 5, CPU, scale)).average_P
    assert torch.equal(drawn, noise.add(average, reproducible_generator(6)).average_P)
    narrower = noise.ahead(reproducible_generator(6), 5, CPU, math.nextafter(scale, 0))
    with pytest.raises(RuntimeError, match="drawn with the scale"):
        noise.add(average, narrower)


@pytest.mark.parametrize("estimator", [unheard.FixedDenominator(), unheard.ClippedDenominator(min_total_weight=7.0)])
def test_a_plan_knows_the_scale_of_its_noise_before_the_sum(plan, model, estimator):
    for clip in (unheard.FlatClip(norm=0.7), unheard.PerLayerClip(norm=0.3)):
        now = replace(plan, estimator=estimator, clip=clip).at(0, model.layout)
        average = now.average(now.contribution.sum([], model.layout.total))
        assert now.noise_units == in_units(now.noise.std(average.sensitivity), average.unit)


def test_an_old_name_of_the_noise_stays_valid(run, tmp_path):
    exact = unheard.ExactGaussianNoise(noise_multiplier=NOISE_MULTIPLIER)
    reports = list(unheard.train(replace(run, plan=replace(run.plan, noise=exact)), tmp_path / "exact"))
    usual = list(unheard.train(run, tmp_path / "usual"))
    assert reports[-1].epsilon == usual[-1].epsilon
    assert 'kind = "exact_gaussian"' in (tmp_path / "exact" / "run.toml").read_text()
    assert [report.round for report in unheard.resume(tmp_path / "exact", rounds=7)] == [7]
