"""A plan costs what the accountants say; a solved plan meets its target, and a slightly cheaper one does not."""

import itertools
import math
from types import SimpleNamespace

import pytest

import unheard
from unheard.errors import AccountingError, InvalidValue
from unheard.privacy import planner
from unheard.privacy.accountants import Bound, epsilon
from unheard.privacy.budget import default_delta
from unheard.privacy.events import ExampleGaussian, NoiseLevel, PoissonGaussian
from unheard.privacy.planner import PAPER_PARAMETERS, CostEstimate, Solution, compare_sampling, feasible_plans, plan

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


def test_a_plan_that_does_not_meet_its_target_is_not_returned(monkeypatch):
    """The search may end wrongly; the plan is checked once more before it is returned."""
    monkeypatch.setattr(CostEstimate, "meets", lambda *_: False)
    with pytest.raises(AccountingError, match="No noise_multiplier could be verified to meet epsilon 2"):
        plan(users=1000, users_per_round=10, rounds=10, epsilon=2, accountant="rdp")


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


@pytest.mark.system  # recomputes many plans
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


SMALL = {"users": 800, "users_per_round": 40, "noise_multiplier": 1.3, "rounds": 30}


@pytest.mark.parametrize("accountant", ["moments", "rdp", "pld", "best"])
@pytest.mark.parametrize("delta", [None, 1e-5])
def test_the_epsilon_of_a_run_is_that_of_its_rounds_at_its_delta_by_the_accountant_asked_for(accountant, delta):
    given = {**SMALL, "accountant": accountant, "delta": delta}
    rounds = [(PoissonGaussian(sampling_prob=0.05, noise_multiplier=1.3), 30)]
    by = ("pld", "rdp") if accountant == "best" else (accountant,)
    expected = min(epsilon(rounds, 800**-1.1 if delta is None else delta, name) for name in by)
    assert unheard.epsilon(**given) == expected
    solution = plan(**{**given, "rounds": None}, epsilon=expected * (1 + 1e-9))
    assert solution.estimate.rounds == 30
    assert solution.bound.epsilon == expected
    assert solution.cheaper is not None
    assert solution.cheaper.rounds == 31


def test_the_record_of_an_estimate_has_each_of_its_values_and_claims_the_smaller_valid_bound(monkeypatch):
    estimate = CostEstimate(population=800, users_per_round=40, noise_multiplier=1.3, rounds=30, delta=1e-5)
    values = {"users": 800, "users_per_round": 40, "sampling_prob": 0.05, "noise_multiplier": 1.3, "rounds": 30}
    for found, claimed in (
        ({"moments": 3.0, "rdp": 2.0, "pld": 2.5}, {"epsilon": 2.0, "accountant": "rdp"}),
        ({"moments": 1.0, "rdp": 2.0, "pld": 1.5}, {"epsilon": 1.5, "accountant": "pld"}),
    ):
        asked = []
        monkeypatch.setattr(planner, "epsilons", lambda *given, found=found, asked=asked: asked.append(given) or found)
        record = estimate.record()
        assert asked == [([(estimate.event, 30)], 1e-5)]
        assert {name: record[name] for name in values} == values
        assert (record["delta"], record["epsilon"], record["claimed"]) == (1e-5, found, claimed)
        assert (record["hypothetical"], record["unit"], record["adjacency"]) == (True, "user", "add or remove one user")
        estimate.epsilons(rounds=7)
        assert asked[1:] == [([(estimate.event, 7)], 1e-5)]
    assert estimate.updates == 1200


@pytest.mark.parametrize("unknown", planner.UNKNOWNS)
def test_the_record_of_a_solution_has_the_target_and_the_value_that_misses_it(unknown):
    at, beyond = (
        CostEstimate(population=800, users_per_round=40 + n, noise_multiplier=1.3 + n, rounds=30 + n, delta=1e-5)
        for n in (0, 1)
    )
    bound = Bound(epsilon=1.9, accountant="pld")
    for cheaper, missed in ((beyond, getattr(beyond, unknown)), (None, None)):
        solution = Solution(solved_for=unknown, target=2.0, estimate=at, bound=bound, cheaper=cheaper)
        target = {"epsilon": 2.0, "accountant": "best"}
        assert solution.record("best") == {"solved_for": unknown, "target": target, "not_enough": missed}


@pytest.mark.parametrize("population", [1, 30, 199, 200, 2000, 59_999, 60_000, 10**9])
@pytest.mark.parametrize("delta", [None, 1e-12])
def test_feasible_plans_are_of_the_largest_cohorts_up_to_half_of_the_users_and_pass_every_value_on(
    monkeypatch, population, delta
):
    """The solver is replaced by one that refuses every third combination."""
    asked = []

    def solve(**given):
        asked.append(given)
        if len(asked) % 3 == 1:
            raise (InvalidValue, AccountingError)[len(asked) % 2]("out of reach")
        values = {name: given[name] for name in ("users_per_round", "rounds")}
        z = 1.0 + len(asked)
        return SimpleNamespace(estimate=CostEstimate(population=population, noise_multiplier=z, delta=1e-12, **values))

    monkeypatch.setattr(planner, "plan", solve)
    monkeypatch.setattr(CostEstimate, "bound", lambda self: Bound(epsilon=3.5, accountant="rdp"))
    told = []
    plans = feasible_plans(
        population=population, epsilon=4.0, delta=delta, clip_norm=2.5, parameters=700, progress=told.append
    )
    cohorts = [n for n in (100, 300, 1000, 3000, 10_000, 30_000, 100_000) if 2 * n <= population][-4:]
    pairs = list(itertools.product(cohorts or [max(1, population // 2)], (500, 2000)))
    same = {"users": population, "epsilon": 4.0, "delta": delta, "accountant": "rdp"}
    assert asked == [{**same, "users_per_round": n, "rounds": rounds} for n, rounds in pairs]
    assert len(told) == len(pairs)
    reached = [number for number in range(1, len(pairs) + 1) if number % 3 != 1]
    assert len(plans) == len(reached)
    for found, number in zip(plans, reached, strict=True):
        (n, rounds), z, record = pairs[number - 1], 1.0 + number, found.record()
        assert (record["users"], record["users_per_round"], record["rounds"]) == (population, n, rounds)
        assert (record["noise_multiplier"], record["delta"]) == (z, 1e-12)
        assert record["claimed"] == {"epsilon": 3.5, "accountant": "rdp"}
        assert found.noise == NoiseLevel(noise_std=z * 2.5 / n, clip_norm=2.5, parameters=700)
        assert record["noise"] == found.noise.record()


def test_where_no_combination_meets_the_target_the_reason_is_told(monkeypatch):
    def refuse(**given):
        raise InvalidValue(f"not with {given['users_per_round']} users and {given['rounds']} rounds")

    monkeypatch.setattr(planner, "plan", refuse)
    with pytest.raises(InvalidValue, match="not with 100 users and 2000 rounds"):
        feasible_plans(population=200, epsilon=4.0)


@pytest.mark.parametrize("exact", [0.3, 1.99, 2.01, 7.0, 90.0])
def test_sampling_of_examples_is_compared_at_the_epsilon_of_sampled_users_and_every_figure_is_its_own(
    monkeypatch, exact
):
    """The bound for examples is replaced by one that meets the target from z = `exact` on."""
    estimate = CostEstimate(population=200, users_per_round=20, noise_multiplier=2.0, rounds=9, delta=1e-4)
    asked = []

    def bound(events, delta, accountant):
        asked.append((events, delta, accountant))
        return 3.5 * exact / events[0][0].noise_multiplier

    monkeypatch.setattr(planner, "epsilon_of_events", bound)
    monkeypatch.setattr(CostEstimate, "bound", lambda self: Bound(epsilon=3.5, accountant="rdp"))
    both = compare_sampling(estimate, 6)
    z = both.examples_noise
    # A search that begins at half of the z of sampled users finds nothing smaller.
    assert max(exact, 1.0) <= z <= 1.02 * max(exact, 1.0) + 1e-9
    expected = {"epsilon": 3.5, "examples_per_user": 6, "examples_per_round": 120.0, "users_noise": 2.0}
    assert vars(both) == {**expected, "examples_noise": z, "users_std": 0.1, "examples_std": z / 120}
    for events, delta, accountant in asked:
        tried = events[0][0].noise_multiplier
        event = ExampleGaussian(sampling_prob=0.1, examples_per_user=6, noise_multiplier=tried)
        assert (events, delta, accountant) == ([(event, 9)], 1e-4, "pld")


def test_a_run_without_noise_has_no_epsilon_to_compare_sampling_at():
    for z in (0.0, 1e-9):
        with pytest.raises(InvalidValue, match="no epsilon to compare at"):
            compare_sampling(
                CostEstimate(population=200, users_per_round=20, noise_multiplier=z, rounds=9, delta=1e-4), 2
            )
