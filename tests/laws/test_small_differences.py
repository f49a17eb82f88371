"""A small change of q, z, delta or epsilon changes every figure, so no figure is computed from a rounded value."""

import itertools

import pytest

from unheard.privacy.accountants import ACCOUNTANTS, delta_at, epsilon, replace_one_epsilon
from unheard.privacy.budget import RunningEpsilon
from unheard.privacy.events import (
    CorrelatedGaussian,
    Event,
    ExampleGaussian,
    FailureProbability,
    Gaussian,
    PoissonGaussian,
)
from unheard.privacy.trade_off import figures

STEPS = [1.0, 1.0004, 1.0008]
"""Factors in steps of 0.04 %: two of three values are equal if they are rounded to three digits."""


def poisson(q: float, z: float) -> list[tuple[Event, int]]:
    return [(PoissonGaussian(sampling_prob=0.0213 * q, noise_multiplier=1.037 * z), 40)]


def release(q: float, z: float) -> list[tuple[Event, int]]:
    return [(Gaussian(noise_multiplier=4.13 * z), 3)]


def examples(q: float, z: float) -> list[tuple[Event, int]]:
    return [(ExampleGaussian(sampling_prob=0.0213 * q, examples_per_user=3, noise_multiplier=2.037 * z), 10)]


def mixed(q: float, z: float) -> list[tuple[Event, int]]:
    return [*poisson(q, z), *release(q, z), (FailureProbability(delta=1e-7), 1)]


CASES = [
    *[(kind, name) for kind in (poisson, release, mixed) for name in ACCOUNTANTS],
    (examples, "pld"),
]


def is_decreasing(values: list[float]) -> bool:
    return all(before > after for before, after in itertools.pairwise(values))


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_each_step_of_z_q_and_delta_changes_epsilon(kind, name):
    assert is_decreasing([epsilon(kind(1.0, step), 1e-5, name) for step in STEPS])
    assert is_decreasing([epsilon(kind(1.0, 1.0), 1e-5 * step, name) for step in STEPS])
    if kind is not release:
        assert is_decreasing([epsilon(kind(1 / step, 1.0), 1e-5, name) for step in STEPS])


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_each_step_of_epsilon_and_z_changes_delta(kind, name):
    spent = epsilon(kind(1.0, 1.0), 1e-5, name)
    assert is_decreasing([delta_at(kind(1.0, 1.0), spent * step, name) for step in STEPS])
    assert is_decreasing([delta_at(kind(1.0, step), spent, name) for step in STEPS])


@pytest.mark.parametrize("kind", [poisson, release, mixed])
def test_each_step_changes_epsilon_of_replacing_a_user(kind):
    assert is_decreasing([replace_one_epsilon(kind(1.0, step), 1e-5).epsilon for step in STEPS])
    assert is_decreasing([replace_one_epsilon(kind(1.0, 1.0), 1e-5 * step).epsilon for step in STEPS])


@pytest.mark.parametrize("kind", [poisson, release])
def test_each_step_changes_the_true_positive_rates_and_mu(kind):
    by_z = [figures(kind(1.0, step), 1e-6) for step in STEPS]
    assert is_decreasing([one.mu for one in by_z])
    for rate in by_z[0].true_positive_rates:
        assert is_decreasing([one.true_positive_rates[rate] for one in by_z])


def test_the_running_epsilon_of_examples_is_at_exactly_its_delta():
    ((event, times),) = examples(1.0, 1.0)
    delta = 1.23456789e-5
    assert RunningEpsilon(delta, events=[event] * times).epsilon == epsilon([(event, times)], delta, "pld")


def test_each_step_of_the_noise_of_a_correlated_mechanism_changes_epsilon():
    def event(step: float) -> CorrelatedGaussian:
        return CorrelatedGaussian(sampling_prob=0.0213, noise_multiplier=1.037 * step, block=4, index=0)

    assert is_decreasing([epsilon([event(step)], 1e-5, "rdp") for step in STEPS])
