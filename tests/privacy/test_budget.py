"""The running epsilon equals the accountant's, and a budget stops the run before the first round that would exceed it."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unheard.errors import BudgetExceeded, InvalidValue
from unheard.privacy.accountants import epsilon
from unheard.privacy.budget import Budget, RunningEpsilon
from unheard.privacy.events import FailureProbability, Gaussian, NonPrivate, PoissonGaussian

ROUND = PoissonGaussian(sampling_prob=0.01, noise_multiplier=1)
EVENTS = [
    ROUND,
    PoissonGaussian(sampling_prob=0.02, noise_multiplier=2),
    Gaussian(noise_multiplier=20),
    FailureProbability(delta=1e-7),
]


@pytest.mark.parametrize("accountant", ["rdp", "moments"])
@settings(max_examples=20)
@given(events=st.lists(st.sampled_from(EVENTS), max_size=8))
def test_the_running_epsilon_is_that_of_the_whole_list(accountant, events):
    running = RunningEpsilon(1e-6, accountant)
    for count, event in enumerate(events):
        expected = epsilon(events[: count + 1], 1e-6, accountant)
        assert running.epsilon_after(event) == pytest.approx(expected, rel=1e-12)
        running.charge(event)
        assert running.epsilon == pytest.approx(expected, rel=1e-12)
    assert RunningEpsilon(1e-6, accountant, events=events).epsilon == running.epsilon


def test_asking_what_would_be_spent_spends_nothing():
    running = RunningEpsilon(1e-6, events=[ROUND])
    before = running.epsilon
    running.epsilon_after(ROUND)
    assert running.epsilon == before


def test_nothing_is_spent_before_the_first_round():
    assert RunningEpsilon(1e-6).epsilon == 0.0


def test_failures_that_use_up_delta_cost_everything():
    running = RunningEpsilon(1e-6, events=[FailureProbability(delta=1e-6)])
    assert running.epsilon == 0.0
    assert running.epsilon_after(ROUND) == math.inf


def test_a_round_without_noise_costs_everything():
    assert RunningEpsilon(1e-6).epsilon_after(NonPrivate(reason="no noise")) == math.inf


def test_the_budget_lets_pass_what_fits_and_stops_the_round_that_does_not():
    limit = epsilon([(ROUND, 100)], 1e-6, "rdp")
    budget = Budget(epsilon=limit, delta=1e-6)
    running = budget.running()
    for number in range(100):
        budget.check(running, ROUND, number)
        running.charge(ROUND)
    with pytest.raises(BudgetExceeded) as refusal:
        budget.check(running, ROUND, 100)
    for named in ("Round 101", f"{limit:g}", f"{running.epsilon:.4f}", f"{running.epsilon_after(ROUND):.4f}", "rdp"):
        assert named in str(refusal.value)
    assert running.epsilon == pytest.approx(limit)


def test_no_budget_pays_for_a_round_without_noise():
    budget = Budget(epsilon=1e9, delta=1e-6)
    with pytest.raises(BudgetExceeded):
        budget.check(budget.running(), NonPrivate(reason="no noise"), 0)
    # After such a round, no budget allows another round.
    with pytest.raises(BudgetExceeded, match="no budget can hold it"):
        budget.check(budget.running([NonPrivate(reason="no noise")]), ROUND, 1)


def test_an_epsilon_that_is_not_a_number_does_not_pass_for_one_that_fits(monkeypatch):
    monkeypatch.setattr(RunningEpsilon, "epsilon_after", lambda self, event: math.nan)
    with pytest.raises(BudgetExceeded):
        Budget(epsilon=5.0, delta=1e-6).check(
            RunningEpsilon(1e-6), PoissonGaussian(sampling_prob=0.1, noise_multiplier=1.0), 0
        )


def test_a_budget_is_checked_by_its_own_delta_and_accountant():
    budget = Budget(epsilon=1, delta=1e-6)
    for other in (RunningEpsilon(1e-5), RunningEpsilon(1e-6, "moments")):
        with pytest.raises(InvalidValue, match="own delta and accountant"):
            budget.check(other, ROUND, 0)


def test_pld_is_too_slow_for_every_round_and_the_refusal_names_rdp():
    for make in (lambda: RunningEpsilon(1e-6, "pld"), lambda: Budget(epsilon=1, delta=1e-6, accountant="pld")):
        with pytest.raises(InvalidValue, match=r"'pld' takes seconds for every round: budget by 'rdp'"):
            make()


@pytest.mark.parametrize(
    "values",
    [
        {"epsilon": 0, "delta": 1e-6},
        {"epsilon": math.nan, "delta": 1e-6},
        {"epsilon": 1, "delta": 0},
        {"epsilon": 1, "delta": 1},
        {"epsilon": 1, "delta": 1e-6, "accountant": "rpd"},
    ],
)
def test_an_impossible_budget_is_refused(values):
    with pytest.raises(InvalidValue):
        Budget(**values)
