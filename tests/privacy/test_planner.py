"""A plan costs what the accountants say; a solved plan meets its target, and a slightly cheaper one does not."""

import math

import pytest

from unheard.errors import InvalidValue
from unheard.privacy.accountants import epsilon
from unheard.privacy.budget import default_delta
from unheard.privacy.events import NoiseLevel
from unheard.privacy.planner import PAPER_PARAMETERS, CostEstimate, feasible_plans, plan

PAPER = {"population": 763430, "users_per_round": 5000, "noise_multiplier": 1.0, "rounds": 5000, "delta": 1e-9}
PLANNED = {"users" if name == "population" else name: value for name, value in PAPER.items()}


def test_a_plan_is_rounds_of_one_event():
    paper = CostEstimate(**PAPER)
    assert paper.event.sampling_prob == 5000 / 763430
    assert paper.epsilons() == {name: epsilon([(paper.event, 5000)], 1e-9, name) for name in ("moments", "rdp", "pld")}
    assert paper.bound().epsilon == paper.epsilons()["pld"]
    assert paper.bound("moments").epsilon == paper.epsilons()["moments"]


def test_delta_defaults_to_the_paper_s_choice():
    assert default_delta(10**6) == pytest.approx(10**-6.6)


@pytest.mark.parametrize("accountant", ["rdp", "moments", "best"])
@pytest.mark.parametrize("unknown", ["noise_multiplier", "users_per_round", "rounds"])
def test_the_answer_meets_the_target_and_a_slightly_cheaper_one_does_not(unknown, accountant):
    given = {"users": 10**8, "users_per_round": 5000, "noise_multiplier": 1.0, "rounds": 1000, "delta": 1e-9}
    truth = given.pop(unknown)
    target = {"moments": 1.2, "rdp": 0.95, "best": 0.02}[accountant]
    solution = plan(epsilon=target, accountant=accountant, **given)
    found, cheaper = getattr(solution.estimate, unknown), getattr(solution.cheaper, unknown)
    assert solution.solved_for == unknown
    assert solution.bound.epsilon <= target < solution.cheaper.bound(accountant).epsilon
    assert abs(cheaper - found) <= max(2e-3 * found, unknown != "noise_multiplier")
    assert (cheaper < found) if unknown == "noise_multiplier" else (cheaper > found)
    assert 0.1 < found / truth < 10_000


def test_solving_back_finds_the_paper_s_plan():
    target = CostEstimate(**PAPER).bound("rdp").epsilon
    for unknown in ("noise_multiplier", "users_per_round", "rounds"):
        given = {name: value for name, value in PLANNED.items() if name != unknown}
        solution = plan(epsilon=target * (1 + 1e-9), accountant="rdp", **given)
        assert getattr(solution.estimate, unknown) == pytest.approx(PAPER[unknown], rel=2e-3)


def test_a_target_below_what_rdp_can_show_is_met_by_pld():
    solution = plan(users=10**8, users_per_round=5000, rounds=100, epsilon=0.005)
    assert solution.bound.accountant == "pld"
    assert solution.bound.epsilon <= 0.005


def test_the_search_says_when_it_ends_at_an_edge():
    solution = plan(users=1000, noise_multiplier=10, rounds=10, epsilon=50, accountant="rdp")
    assert solution.estimate.users_per_round == 1000
    assert solution.cheaper is None


def test_progress_is_reported_before_each_trial():
    told = []
    plan(users=1000, users_per_round=10, rounds=10, epsilon=2, accountant="rdp", progress=told.append)
    assert len(told) > 5
    assert all("noise_multiplier" in line for line in told)


def test_a_target_out_of_reach_is_refused_with_advice():
    with pytest.raises(InvalidValue, match=r"out of reach.*larger epsilon"):
        plan(users=1000, users_per_round=500, noise_multiplier=0.1, epsilon=0.1)


@pytest.mark.parametrize(
    "left_out", [[], ["rounds", "noise_multiplier"], ["rounds", "noise_multiplier", "users_per_round"]]
)
def test_exactly_one_value_is_left_out(left_out):
    given = {name: value for name, value in PLANNED.items() if name not in left_out}
    with pytest.raises(InvalidValue, match="exactly one"):
        plan(epsilon=1, **given)


@pytest.mark.parametrize("target", [0, -1, math.nan, math.inf])
def test_an_impossible_target_is_refused(target):
    with pytest.raises(InvalidValue, match="target"):
        plan(users=1000, users_per_round=10, rounds=10, epsilon=target)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"delta": 1 / 763430}, "below 1/users"),
        ({"delta": 0.0}, "above 0"),
        ({"users_per_round": 763431}, "not possible"),
        ({"users_per_round": 0}, "users per round"),
        ({"rounds": 0}, "rounds"),
        ({"noise_multiplier": -1.0}, "noise multiplier"),
        ({"noise_multiplier": math.nan}, "noise multiplier"),
        ({"population": 0}, "users"),
    ],
)
def test_an_impossible_plan_is_refused(change, message):
    with pytest.raises(InvalidValue, match=message):
        CostEstimate(**{**PAPER, **change})


def test_a_plan_without_noise_costs_everything():
    assert CostEstimate(**{**PAPER, "noise_multiplier": 0}).bound().epsilon == math.inf


@pytest.mark.parametrize(
    ("sigma", "verdict"),
    [(0.75, "dominates"), (0.3, "dominates"), (0.03, "costs much"), (0.012, "trains"), (0.003, "small cost")],
)
def test_noise_is_judged_by_its_norm_beside_the_clip(sigma, verdict):
    level = NoiseLevel(noise_std=sigma, clip_norm=15.0, parameters=PAPER_PARAMETERS)
    assert level.verdict == verdict
    assert f"sigma = {sigma:g}" in str(level)
    warning = level.caution()
    assert (warning is not None) == (verdict == "dominates")
    for cure in ("users per round", "fewer rounds", "public start", "LoRA", "correlated noise") if warning else ():
        assert cure in warning


def test_fewer_parameters_bear_more_noise():
    """The norm of the noise grows with the square root of the number of parameters, so LoRA and small models tolerate more."""
    large, small = (NoiseLevel(noise_std=0.3, clip_norm=15.0, parameters=n) for n in (1_000_000, 10_000))
    assert large.ratio == pytest.approx(10 * small.ratio)
    assert large.is_dominant
    assert not small.is_dominant


def test_feasible_plans_meet_the_target_and_larger_cohorts_have_less_noise(monkeypatch):
    monkeypatch.setattr("unheard.privacy.planner.FEASIBLE_COHORTS", (100, 5000))
    monkeypatch.setattr("unheard.privacy.planner.FEASIBLE_ROUNDS", (500,))
    plans = feasible_plans(population=14_000, epsilon=8.0)
    assert [plan.estimate.users_per_round for plan in plans] == [100, 5000]
    assert all(plan.bound.epsilon <= 8.0 for plan in plans)
    assert all(plan.noise.noise_std == pytest.approx(sigma_of(plan.estimate)) for plan in plans)
    assert plans[0].noise.noise_std > plans[1].noise.noise_std
    assert plans[0].noise.is_dominant
    assert not plans[1].noise.is_dominant
    assert [plan.estimate.users_per_round for plan in feasible_plans(population=30, epsilon=0.5)] == [15]


def sigma_of(estimate):
    return estimate.noise_multiplier * 15.0 / estimate.users_per_round
