"""Rounds that draw examples: the bound for all examples of one user, compared with an integral and with sampling of users."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.optimize import brentq
from scipy.stats import binom, norm

from unheard.errors import BudgetExceeded, InvalidValue, LedgerError
from unheard.privacy.accountants import (
    FILTER_ORDERS,
    best_epsilon,
    delta_at,
    epsilon,
    epsilons,
    replace_one_epsilon,
)
from unheard.privacy.budget import Budget, RunningEpsilon
from unheard.privacy.events import (
    ExampleGaussian,
    FailureProbability,
    Gaussian,
    PoissonGaussian,
    from_record,
    to_record,
)
from unheard.privacy.planner import CostEstimate, compare_sampling

FINE_TUNING = Path(__file__).parents[2] / "benchmarks" / "results" / "2026-11-17-h200-fine-tuning" / "results.jsonl"
ROUND = ExampleGaussian(sampling_prob=0.05, examples_per_user=3, noise_multiplier=2.0)


def exact_delta(event: ExampleGaussian, epsilon: float) -> float:
    """Return delta of one round by integrating the densities with and without the user, in the worse direction."""
    shares = binom.pmf(range(event.examples_per_user + 1), event.examples_per_user, event.sampling_prob)

    def with_user(x):
        return sum(p * norm.pdf(x, i, event.noise_multiplier) for i, p in enumerate(shares))

    def without(x):
        return norm.pdf(x, 0, event.noise_multiplier)

    def excess(one, other):
        reach = 12 * event.noise_multiplier + event.examples_per_user
        area = quad(lambda x: max(0.0, one(x) - math.exp(epsilon) * other(x)), -reach, reach, limit=400)
        return area[0]

    return max(excess(with_user, without), excess(without, with_user))


@pytest.mark.parametrize("eps", [0.05, 0.3, 1.0])
def test_one_round_is_bounded_by_the_integral_of_its_densities(eps):
    exact, given = exact_delta(ROUND, eps), delta_at([ROUND], eps, "pld")
    assert exact <= given * (1 + 1e-6)
    assert given <= exact * 1.02 + 1e-9


def composed_epsilons(event: ExampleGaussian, rounds: int, delta: float, step: float = 5e-4) -> tuple[float, float]:
    """Return a lower and an upper bound on epsilon, computed without dp-accounting.

    The loss of a round is computed from its densities on a grid, rounded down and up. One Fourier transform composes all
    rounds."""
    z, G = event.noise_multiplier, event.examples_per_user
    edges = np.linspace(-9 * z, G + 9 * z, 100_001)  # the tail beyond has probability below 1e-18
    middle = (edges[1:] + edges[:-1]) / 2
    shares = binom.pmf(range(G + 1), G, event.sampling_prob)
    ratio = np.log(sum(p * np.exp((i * middle - i * i / 2) / z**2) for i, p in enumerate(shares)))
    with_user = sum(p * np.diff(norm.cdf(edges, i, z)) for i, p in enumerate(shares))
    without = np.diff(norm.cdf(edges, 0, z))
    bounds = []
    for rounding in (np.floor, np.ceil):
        found = []
        for mass, loss in ((with_user, ratio), (without, -ratio)):
            cell = rounding(loss / step).astype(int)
            one = np.bincount(cell - cell.min(), weights=mass)
            size = 2 ** math.ceil(math.log2(rounds * len(one)))
            whole = np.maximum(np.fft.irfft(np.fft.rfft(one, size) ** rounds, size), 0)
            losses = (np.arange(size) + rounds * cell.min()) * step

            whole, losses = whole[losses > 0], losses[losses > 0]  # other outcomes add nothing for epsilon >= 0

            def excess(eps, whole=whole, losses=losses):
                above = losses > eps
                return float(whole[above] @ -np.expm1(eps - losses[above])) - delta

            found.append(brentq(excess, 0, 60))
        bounds.append(max(found))
    return bounds[0], bounds[1]


@pytest.mark.system
@pytest.mark.parametrize(
    ("event", "rounds", "delta"),
    [
        (ExampleGaussian(sampling_prob=0.1, examples_per_user=4, noise_multiplier=1.6), 15, 2e-4),
        (ExampleGaussian(sampling_prob=0.1, examples_per_user=2, noise_multiplier=0.9), 8, 1e-3),
    ],
)
def test_many_rounds_are_bounded_by_the_convolution_of_their_losses(event, rounds, delta):
    low, high = composed_epsilons(event, rounds, delta)
    given = epsilon([(event, rounds)], delta, "pld")
    assert low <= given <= high * 1.002
    assert high < 1.01 * low


def published_runs() -> list[tuple[str, float, float, float, int, float, float]]:
    """Return each private setting of the published fine-tuning results once.

    The fields are kind, requested and claimed epsilon, z, rounds, q and delta."""
    lines = [json.loads(line) for line in FINE_TUNING.read_text().splitlines()]
    settings = set()
    for line in lines:
        if line.get("epsilon") is not None:
            population = round(line["delta"] ** (-1 / 1.1))  # delta = N^-1.1
            q = line["settings"]["users_per_round"] / population
            spent, z = line["claimed"]["epsilon"], line["noise_multiplier"]
            settings.add((line["kind"], line["epsilon"], spent, z, line["settings"]["rounds"], q, line["delta"]))
    return sorted(settings)


def test_there_is_one_claim_for_each_private_setting_of_the_published_results():
    assert [run[:2] for run in published_runs()] == [(k, e) for k in ("examples", "users") for e in (2, 2, 8, 8)]


@pytest.mark.system
@pytest.mark.parametrize(("kind", "asked", "claimed", "z", "rounds", "q", "delta"), published_runs())
def test_published_claims_are_bounded_by_the_convolution_of_their_losses(kind, asked, claimed, z, rounds, q, delta):
    G = 4 if kind == "examples" else 1  # a user who is drawn as a whole is one example
    event = ExampleGaussian(sampling_prob=q, examples_per_user=G, noise_multiplier=z)
    low, high = composed_epsilons(event, rounds, delta)
    assert low <= claimed <= high * 1.002
    assert high < 1.01 * low
    assert 0.98 * asked <= claimed <= asked


def test_one_example_per_user_is_sampling_of_users():
    one = ExampleGaussian(sampling_prob=0.02, examples_per_user=1, noise_multiplier=1.0)
    users = PoissonGaussian(sampling_prob=0.02, noise_multiplier=1.0)
    given, expected = (epsilon([(event, 200)], 1e-6, "pld") for event in (one, users))
    assert expected - 1e-3 <= given <= 1.02 * expected


def test_more_examples_of_a_user_cost_more_and_never_more_than_all_at_once():
    """The worst case: all G examples are drawn together, as one example of G times the bound, so with noise z / G."""
    costs = [
        epsilon([(ExampleGaussian(sampling_prob=0.02, examples_per_user=G, noise_multiplier=4.0), 50)], 1e-6, "pld")
        for G in (1, 2, 4)
    ]
    assert costs == sorted(costs)
    assert costs[0] < costs[-1]
    together = PoissonGaussian(sampling_prob=1 - 0.98**4, noise_multiplier=1.0)
    assert costs[-1] < epsilon([(together, 50)], 1e-6, "pld")


def test_only_pld_has_a_bound_and_it_is_claimed():
    by = epsilons([(ROUND, 10)], 1e-6)
    assert math.isinf(by["rdp"])
    assert math.isinf(by["moments"])
    assert best_epsilon([(ROUND, 10)], 1e-6).accountant == "pld"
    assert by["pld"] < replace_one_epsilon([(ROUND, 10)], 1e-6).epsilon < math.inf


def test_the_running_epsilon_is_tabulated_and_never_below_the_bound():
    running = RunningEpsilon(1e-6)
    assert running.accountant == "rdp"
    seen = []
    for _ in range(80):
        after = running.epsilon_after(ROUND)
        running.charge(ROUND)
        assert running.epsilon == after
        seen.append(after)
    assert running.accountant == "pld"
    assert seen == sorted(seen)
    for rounds in (1, 70, 75):  # 70 lies between two entries of the table
        exact = epsilon([(ROUND, rounds)], 1e-6, "pld")
        assert exact <= seen[rounds - 1] <= 1.05 * exact
    assert len(set(seen)) < 80  # the table has fewer entries than there are rounds


def test_a_budget_stops_rounds_of_examples():
    budget = Budget(epsilon=epsilon([(ROUND, 20)], 1e-6, "pld"), delta=1e-6)
    running = budget.running([ROUND] * 15)
    budget.check(running, ROUND, round=15)
    with pytest.raises(BudgetExceeded, match=r"\(pld\)"):
        budget.check(budget.running([ROUND] * 20), ROUND, round=20)


def test_the_event_reads_back_and_values_out_of_range_are_refused():
    assert from_record(to_record(ROUND)) == ROUND
    with pytest.raises(LedgerError, match="examples_per_user"):
        from_record({**to_record(ROUND), "examples_per_user": 0})
    for changes in (
        {"sampling_prob": 0.0},
        {"sampling_prob": 1.5},
        {"noise_multiplier": -1.0},
        {"examples_per_user": 2.5},
    ):
        with pytest.raises(InvalidValue):
            ExampleGaussian(**{**vars(ROUND), **changes})
    assert np.isinf(
        best_epsilon([ExampleGaussian(sampling_prob=0.1, examples_per_user=2, noise_multiplier=0.0)], 1e-6).epsilon
    )


def test_the_planner_compares_both_ways_to_sample_at_one_epsilon(monkeypatch):
    monkeypatch.setattr(
        "unheard.privacy.accountants.EXAMPLE_GRID", 0.01
    )  # a coarse bound is valid, and quick to search
    estimate = CostEstimate(population=200, users_per_round=20, noise_multiplier=2.0, rounds=3, delta=1e-4)
    both = compare_sampling(estimate, 2)
    event = ExampleGaussian(sampling_prob=0.1, examples_per_user=2, noise_multiplier=both.examples_noise)
    assert epsilon([(event, 3)], 1e-4, "pld") <= both.epsilon
    assert 2.0 < both.examples_noise < 4.0  # between the z of one example and of all at once
    assert both.examples_std < both.users_std


def test_rounds_that_are_charged_at_once_count_as_often_as_one_after_the_other():
    event = ExampleGaussian(sampling_prob=0.1, examples_per_user=2, noise_multiplier=4.0)
    at_once, each = RunningEpsilon(1e-4), RunningEpsilon(1e-4)
    at_once.charge(event, 7)
    for _ in range(7):
        each.charge(event)
    assert at_once.epsilon == each.epsilon == epsilon([(event, 7)], 1e-4, "pld")


OTHERS = [PoissonGaussian(sampling_prob=0.2, noise_multiplier=2.0), Gaussian(noise_multiplier=4.0)]


@pytest.mark.parametrize("other", [*OTHERS, FailureProbability(delta=4e-6)], ids=lambda event: type(event).__name__)
def test_the_running_epsilon_of_examples_counts_what_else_was_charged(other):
    running = RunningEpsilon(1e-5, events=[other, ROUND, ROUND])
    assert running.epsilon == epsilon([other, (ROUND, 2)], 1e-5, "pld") > epsilon([(ROUND, 2)], 1e-5, "pld")
    assert RunningEpsilon(1e-5, events=[ROUND, ROUND]).epsilon_after(other) == running.epsilon


def test_a_budget_over_all_runs_has_no_room_for_a_round_that_only_pld_bounds():
    """No proof covers a filter that is kept by pld, so such a round costs everything there."""
    few = PoissonGaussian(sampling_prob=0.01, noise_multiplier=4.0)
    running = RunningEpsilon(1e-5, events=[few], orders=FILTER_ORDERS)
    assert math.isfinite(running.epsilon)
    assert running.epsilon_after(ROUND) == math.inf
    budget = Budget(epsilon=100.0, delta=1e-5, orders=FILTER_ORDERS)
    with pytest.raises(BudgetExceeded):
        budget.check(running, ROUND, 1)
    running.charge(ROUND)
    assert (running.epsilon, running.accountant) == (math.inf, "rdp")
