"""The lower bound on epsilon, against figures computed by hand and against a mechanism whose epsilon is known."""

import doctest
import math

import numpy as np
import pytest

from unheard.audit import lower_bound as module
from unheard.audit.lower_bound import best_guesses, lower_bound, p_value


def test_the_p_value_is_that_of_honest_coins():
    assert p_value(100, 10, 10, 0.0, 0.0) == pytest.approx(0.5**10)
    assert p_value(100, 10, 10, math.log(3), 0.0) == pytest.approx(0.75**10)
    assert p_value(100, 10, 0, 1.0, 0.0) == 1.0
    assert p_value(100, 10, 10, 0.0, 1e-3) > 0.5**10  # delta makes success likelier
    assert p_value(10, 4, 3, 0.0, 0.01) == pytest.approx(
        5 / 16 + 2 * 10 * 0.01 * 6 / 16
    )  # by hand: max over i is i = 1


def test_the_bound_follows_from_the_guesses():
    assert lower_bound(1000, 1000, 500, 0.0) == 0.0
    assert lower_bound(1000, 0, 0, 0.0) == 0.0
    perfect = lower_bound(1000, 1000, 1000, 0.0)
    p = 0.05 ** (1 / 1000)
    assert perfect == pytest.approx(math.log(p / (1 - p)), rel=1e-6)
    assert lower_bound(1000, 1000, 1000, 1e-5) < perfect


def test_the_bound_is_too_high_in_no_more_than_one_of_twenty_audits_of_randomised_response():
    """Each canary says the truth with probability e/(1+e): epsilon is exactly 1."""
    rng, above = np.random.default_rng(2), 0
    for _ in range(200):
        was_in = rng.random(200) < 0.5
        says_in = was_in ^ (rng.random(200) > math.e / (1 + math.e))
        above += best_guesses(says_in + rng.random(200) * 1e-3, was_in, 0.0).epsilon > 1.0
    assert above <= 0.05 * 200


def test_the_examples_in_the_docstring_are_true():
    assert doctest.testmod(module).failed == 0
