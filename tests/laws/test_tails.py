"""The tail of numpy's normal generator is right beyond eight standard deviations, where no random sample reaches.

numpy's ziggurat algorithm draws values beyond r = 3.65 by Marsaglia's exact method, from two uniform numbers. The test
supplies uniform numbers that lead beyond 8 and checks that the accepted values have the normal distribution there.
"""

import math

import numpy as np
import pytest
from randomgen import UserBitGenerator
from scipy import stats

from unheard.randomness import _generator, secure_generator

R = 3.6541528853610088
INTO_THE_TAIL = 0xFFFFFFFFFFFFFF00
"""A 64-bit word for layer 0 with the largest abscissa, for which the ziggurat algorithm draws from the tail."""


def raw_of(uniform: float) -> int:
    """Return the 64 bits that numpy converts to this double in [0, 1)."""
    return int(uniform * 2.0**53) << 11


def fed(*raws: int) -> np.random.Generator:
    feed = iter(raws)
    return np.random.Generator(UserBitGenerator(lambda state: next(feed), 64))


def proposal(x: float) -> float:
    """Return the uniform number for which Marsaglia's method proposes x."""
    return -math.expm1(-(x - R) * R)


@pytest.mark.parametrize("x", [3.7, 5.0, 6.5, 8.0, 9.0, 10.5])
def test_the_generator_can_reach_it(x):
    drawn = fed(INTO_THE_TAIL, raw_of(proposal(x)), raw_of(1 - 2.0**-53)).standard_normal()
    assert abs(drawn) == pytest.approx(x, abs=0.02)


def test_beyond_eight_deviations_it_is_the_normal_distribution():
    """All proposals are beyond 8. The accepted values must have the normal distribution conditional on being beyond 8."""
    rng, low = np.random.default_rng(6), proposal(8.0)
    accept_low = -math.expm1(-((8.0 - R) ** 2) / 2)
    drawn: list[float] = []
    while len(drawn) < 3000:
        raws = [INTO_THE_TAIL]
        for _ in range(40):
            raws += [raw_of(low + rng.random() * (1 - low)), raw_of(accept_low + rng.random() * (1 - accept_low))]
        drawn.append(abs(fed(*raws).standard_normal()))
    tail = stats.truncnorm(8.0, np.inf)
    assert min(drawn) >= 8.0
    assert stats.kstest(drawn, tail.cdf).pvalue > 1e-4
    assert stats.kstest(drawn, stats.truncnorm(7.8, np.inf).cdf).pvalue < 1e-4


def test_ours_is_that_generator_and_its_first_tail_is_right_too():
    """The generator of Unheard is numpy's, on AES bits. Its tail from r on, which samples reach, is that of a normal."""
    assert type(secure_generator()) is np.random.Generator
    drawn = np.abs(np.concatenate([_generator(bytes([i] * 16)).standard_normal(5 * 10**6) for i in range(4)]))
    far = drawn[drawn > R]
    assert len(far) == pytest.approx(2e7 * 2 * stats.norm.sf(R), rel=0.06)
    assert stats.kstest(far, stats.truncnorm(R, np.inf).cdf).pvalue > 1e-4
