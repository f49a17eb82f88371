"""The hypothetical epsilon of runs with other numbers of users."""

from dataclasses import replace

import pytest

from tests.report.builders import made_up_record
from unheard.errors import InvalidValue
from unheard.privacy.accountants import best_epsilon
from unheard.privacy.events import (
    CorrelatedGaussian,
    ExampleGaussian,
    FailureProbability,
    Gaussian,
    NonPrivate,
    PoissonGaussian,
    Selection,
)
from unheard.report.comparison import hypothetical_epsilon


def test_the_hypothetical_epsilon_of_the_papers_private_run():
    """Trained with 100 users per round at sigma = 0.003 and S = 15 (z = 0.02), accounted for 5,000 of 763,430 (z = 1)."""
    trained = PoissonGaussian(sampling_prob=100 / 763_430, noise_multiplier=0.003 / (15 / 100))
    result = hypothetical_epsilon(made_up_record("a", [], events=[trained] * 5000), 763_430, 5000)
    assert result is not None
    meant = PoissonGaussian(sampling_prob=5000 / 763_430, noise_multiplier=1.0)
    assert result.epsilon == pytest.approx(best_epsilon([(meant, 5000)], 763_430**-1.1).epsilon, rel=1e-6)
    assert result.figure == "3.12 by PLD"
    assert result.figure in result.words
    assert result.words.startswith("Hypothetical")
    assert "did not happen" in result.words


def test_more_users_without_more_a_round_is_only_a_smaller_q():
    event = PoissonGaussian(sampling_prob=0.1, noise_multiplier=0.7)
    result = hypothetical_epsilon(
        made_up_record("a", [], events=[event] * 30, users_per_round=75, population=750), 1_000_000
    )
    assert result is not None
    meant = PoissonGaussian(sampling_prob=75 / 1_000_000, noise_multiplier=0.7)
    assert result.epsilon == best_epsilon([(meant, 30)], 1_000_000**-1.1).epsilon


def test_rounds_that_were_repeated_would_cost_again():
    event = PoissonGaussian(sampling_prob=0.1, noise_multiplier=0.7)
    once = made_up_record("a", [], events=[event] * 10, users_per_round=75, population=750)
    again = replace(once, entries=[*once.entries, *once.entries[4:]])
    result = hypothetical_epsilon(again, 1_000_000)
    assert result is not None
    meant = PoissonGaussian(sampling_prob=75 / 1_000_000, noise_multiplier=0.7)
    assert result.epsilon == best_epsilon([(meant, 16)], 1_000_000**-1.1).epsilon


def test_no_hypothetical_epsilon_for_a_run_without_privacy_or_an_impossible_draw():
    assert hypothetical_epsilon(made_up_record("a", [], events=[NonPrivate(reason="no noise is added")]), 10**6) is None
    private = made_up_record("a", [], events=[PoissonGaussian(sampling_prob=0.1, noise_multiplier=0.7)])
    with pytest.raises(InvalidValue, match="cannot be drawn"):
        hypothetical_epsilon(private, 10)


def test_a_fixed_noise_on_the_count_of_the_clipped_does_not_grow_with_the_users():
    """Adaptive clip with sigma_b = 5: 1/z^2 = 1/z_delta^2 + 1/(2 sigma_b)^2, and only z_delta grows with the users per round."""
    together = PoissonGaussian(sampling_prob=0.001, noise_multiplier=(1.0**-2 + 10.0**-2) ** -0.5)
    run = made_up_record("a", [], events=[together] * 30, users_per_round=100, population=100_000)
    fixed = replace(run, tables={"clip": {"kind": "adaptive", "count_noise_std": 5.0}})
    result = hypothetical_epsilon(fixed, 10**6, 5000)
    assert result is not None
    meant = PoissonGaussian(sampling_prob=0.005, noise_multiplier=(50.0**-2 + 10.0**-2) ** -0.5)
    assert result.epsilon == pytest.approx(best_epsilon([(meant, 30)], 1e6**-1.1).epsilon, rel=1e-9)
    by_users = hypothetical_epsilon(
        replace(run, tables={"clip": {"kind": "adaptive"}}), 10**6, 5000
    )  # sigma_b: a twentieth
    assert by_users is not None
    assert by_users.epsilon < result.epsilon


ROUND = PoissonGaussian(sampling_prob=0.1, noise_multiplier=0.7)


@pytest.mark.parametrize(
    "other",
    [
        Gaussian(noise_multiplier=5.0),
        FailureProbability(delta=1e-7),
        NonPrivate(reason="no noise is added"),
        Selection(sampling_prob=0.1, noise_multiplier=0.7, rounds=3, mean_trials=2.0, drawn_from="geometric"),
        ExampleGaussian(sampling_prob=0.1, examples_per_user=2, noise_multiplier=0.7),
        CorrelatedGaussian(sampling_prob=0.1, noise_multiplier=0.7, block=2, index=0),
    ],
    ids=lambda event: type(event).__name__,
)
def test_one_charge_of_another_kind_leaves_no_hypothetical_epsilon(other):
    """It is known how a round costs with more users, and of nothing else; a figure without the charge would be too small."""
    for events in ([other], [ROUND, other], [other, ROUND], [ROUND] * 3 + [other]):
        assert hypothetical_epsilon(made_up_record("a", [], events=events), 1_000_000) is None
    assert hypothetical_epsilon(made_up_record("a", [], events=[ROUND]), 1_000_000) is not None
