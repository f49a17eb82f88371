"""accountants.py: known answers, laws for any events, and infinity for a release without noise."""

import math
import random

import numpy as np
import pytest
from dp_accounting.rdp import compute_epsilon
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.special import log_ndtr, ndtr
from scipy.stats import norm

from unheard.errors import BudgetExceeded, InvalidValue
from unheard.privacy import accountants
from unheard.privacy.accountants import (
    ACCOUNTANTS,
    RDP_ORDERS,
    Accountant,
    AdditiveCost,
    best_epsilon,
    collapse,
    delta_at,
    epsilon,
    epsilons,
    rdp_cost,
    rdp_epsilon,
    replace_one_epsilon,
    running_accountant,
    versions,
)
from unheard.privacy.budget import Budget
from unheard.privacy.events import (
    ExampleGaussian,
    FailureProbability,
    Gaussian,
    NonPrivate,
    PoissonGaussian,
    Selection,
)
from unheard.privacy.planner import CostEstimate
from unheard.privacy.statement import compute_statement, render_text

PAPER_ROUND = PoissonGaussian(sampling_prob=5000 / 763430, noise_multiplier=1.0)
QUICK = ("moments", "rdp")

rounds = st.builds(
    PoissonGaussian,
    sampling_prob=st.floats(min_value=1e-7, max_value=1),
    noise_multiplier=st.floats(min_value=0.3, max_value=20),
)
deltas = st.floats(min_value=1e-12, max_value=1e-2)
by_each = pytest.mark.parametrize("accountant", ACCOUNTANTS)


def exact_delta(mu: float, epsilon: float) -> float:
    """Return delta of one Gaussian release with sensitivity / standard deviation = mu (Balle and Wang 2018)."""
    return float(ndtr(mu / 2 - epsilon / mu) - math.exp(epsilon + log_ndtr(-mu / 2 - epsilon / mu)))


def exact_epsilon(mu: float, delta: float) -> float:
    return brentq(lambda epsilon: exact_delta(mu, epsilon) - delta, 0, 1000)


def test_the_paper_s_best_model_by_the_three_accountants():
    found = epsilons([(PAPER_ROUND, 5000)], 1e-9)
    assert {name: round(value, 3) for name, value in found.items()} == {"moments": 4.634, "rdp": 4.183, "pld": 3.899}


def test_the_smaller_of_pld_and_rdp_is_claimed_and_named():
    bound = best_epsilon([(PAPER_ROUND, 5000)], 1e-9)
    assert (round(bound.epsilon, 3), bound.accountant) == (3.899, "pld")


def test_rdp_is_claimed_where_pld_cannot_resolve_the_delta():
    bound = best_epsilon([(PoissonGaussian(sampling_prob=1e-6, noise_multiplier=1), 10**6)], 1e-10)
    assert bound.accountant == "rdp"
    assert 0 < bound.epsilon < 1


@by_each
@pytest.mark.parametrize(("z", "times", "delta"), [(1, 1, 1e-5), (10, 100, 1e-9), (100, 10**4, 1e-8), (2, 30, 1e-6)])
@pytest.mark.parametrize("q", [1.0, None])
def test_no_accountant_is_below_the_exact_epsilon_when_everybody_takes_part(accountant, z, times, delta, q):
    event = Gaussian(noise_multiplier=z) if q is None else PoissonGaussian(sampling_prob=q, noise_multiplier=z)
    exact = exact_epsilon(math.sqrt(times) / z, delta)
    found = epsilon([(event, times)], delta, accountant)
    assert exact <= found <= {"pld": 1.001, "rdp": 1.15, "moments": 1.5}[accountant] * exact


@by_each
def test_no_events_cost_nothing(accountant):
    assert epsilon([], 1e-6, accountant) == 0.0
    assert delta_at([], 0.0, accountant) == 0.0


@by_each
@pytest.mark.parametrize(
    "event",
    [
        NonPrivate(reason="no noise"),
        Gaussian(noise_multiplier=0),
        PoissonGaussian(sampling_prob=0.1, noise_multiplier=0),
    ],
)
def test_one_release_without_noise_costs_everything(accountant, event):
    assert epsilon([(PAPER_ROUND, 10), event], 1e-6, accountant) == math.inf
    assert delta_at([(PAPER_ROUND, 10), event], 10.0, accountant) == 1.0


@by_each
def test_noise_too_small_to_compute_with_is_no_noise(accountant):
    assert epsilon([PoissonGaussian(sampling_prob=0.1, noise_multiplier=1e-200)], 1e-6, accountant) == math.inf


@by_each
def test_very_little_noise_gives_a_large_but_finite_epsilon(accountant):
    assert (
        100 < epsilon([(PoissonGaussian(sampling_prob=0.1, noise_multiplier=0.02), 100)], 1e-6, accountant) < math.inf
    )


@by_each
@pytest.mark.parametrize("q", [1e-12, 1e-9, 1e-5])
def test_tiny_sampling_probabilities_work(accountant, q):
    found = epsilon([(PoissonGaussian(sampling_prob=q, noise_multiplier=1), 1000)], 1e-6, accountant)
    assert 0 <= found < 1


def test_a_tiny_divergence_is_not_read_as_none():
    """dp-accounting returns epsilon 0, but delta at epsilon 0 is about q sqrt(T) / (z sqrt(2 pi)) = 4e-10, not 1e-13."""
    events = [(PoissonGaussian(sampling_prob=1e-9, noise_multiplier=1000), 10**6)]
    assert epsilon(events, 1e-13, "rdp") > 0


@by_each
def test_a_failure_probability_is_taken_from_delta_first(accountant):
    with_failure = epsilon([(PAPER_ROUND, 100), FailureProbability(delta=4e-10)], 1e-9, accountant)
    assert with_failure == epsilon([(PAPER_ROUND, 100)], 1e-9 - 4e-10, accountant)
    assert with_failure > epsilon([(PAPER_ROUND, 100)], 1e-9, accountant)


@by_each
def test_failure_probabilities_add_up_until_nothing_is_left(accountant):
    halves = [FailureProbability(delta=0.5e-9), FailureProbability(delta=0.5e-9)]
    assert epsilon(halves, 1e-9, accountant) == 0.0
    assert epsilon([*halves, PAPER_ROUND], 1e-9, accountant) == math.inf
    assert epsilon([*halves, FailureProbability(delta=1e-20)], 1e-9, accountant) == math.inf
    assert delta_at(halves, 0.0, accountant) == pytest.approx(1e-9)


@by_each
def test_heterogeneous_rounds_cost_between_the_cheaper_and_the_dearer_kind(accountant):
    dear, cheap = (
        PoissonGaussian(sampling_prob=0.01, noise_multiplier=1),
        PoissonGaussian(sampling_prob=0.01, noise_multiplier=2),
    )
    mixed = epsilon([(dear, 500), (cheap, 500)], 1e-6, accountant)
    assert epsilon([(cheap, 1000)], 1e-6, accountant) < mixed < epsilon([(dear, 1000)], 1e-6, accountant)


@by_each
def test_equal_rounds_can_be_given_as_one_event_and_a_number(accountant):
    event = PoissonGaussian(sampling_prob=0.001, noise_multiplier=3)
    listed = epsilon([event] * 10_000, 1e-6, accountant)
    assert listed == epsilon([(event, 10_000)], 1e-6, accountant)
    assert listed < epsilon([(event, 10**6)], 1e-6, accountant) < 2


@settings(max_examples=30)
@given(st.lists(rounds, min_size=1, max_size=4), deltas, st.sampled_from(QUICK), st.randoms())
def test_order_and_grouping_do_not_matter(events, delta, accountant, rng: random.Random):
    listed = [event for event in events for _ in range(3)]
    rng.shuffle(listed)
    expected = epsilon([(event, 3) for event in events], delta, accountant)
    assert epsilon(listed, delta, accountant) == expected


def test_order_does_not_matter_for_pld():
    other = PoissonGaussian(sampling_prob=0.01, noise_multiplier=2)
    there = epsilon([(PAPER_ROUND, 10), (other, 5), (PAPER_ROUND, 3)], 1e-7, "pld")
    assert there == epsilon([(PAPER_ROUND, 6), (PAPER_ROUND, 7), (other, 5)], 1e-7, "pld")


@settings(max_examples=30)
@given(rounds, st.integers(1, 10**6), deltas, st.sampled_from(QUICK))
def test_more_rounds_never_cost_less(event, count, delta, accountant):
    assert epsilon([(event, count)], delta, accountant) <= epsilon([(event, 2 * count)], delta, accountant)


@settings(max_examples=30)
@given(rounds, st.integers(1, 10**5), deltas, st.sampled_from(QUICK))
def test_more_noise_never_costs_more(event, count, delta, accountant):
    quieter = PoissonGaussian(sampling_prob=event.sampling_prob, noise_multiplier=1.1 * event.noise_multiplier)
    assert epsilon([(quieter, count)], delta, accountant) <= epsilon([(event, count)], delta, accountant) * (1 + 1e-9)


@settings(max_examples=30)
@given(rounds, st.integers(1, 10**5), deltas)
def test_a_smaller_delta_never_costs_less(event, count, delta):
    for accountant in QUICK:
        assert epsilon([(event, count)], delta, accountant) <= epsilon([(event, count)], delta / 10, accountant)


@settings(max_examples=30)
@given(rounds, st.integers(1, 10**4), deltas, st.sampled_from(QUICK))
def test_delta_at_the_epsilon_of_a_delta_is_that_delta(event, count, delta, accountant):
    events = [(event, count), FailureProbability(delta=delta / 10)]
    assert delta_at(events, epsilon(events, delta, accountant), accountant) <= delta * (1 + 1e-6)


@pytest.mark.parametrize("delta", [1e-4, 1e-7, 1e-9])
@pytest.mark.parametrize("users", [10**4, 763430, 10**8])
def test_delta_at_the_epsilon_of_a_delta_is_that_delta_for_pld(users, delta):
    events = [(PoissonGaussian(sampling_prob=1000 / users, noise_multiplier=1), 1000)]
    assert delta_at(events, epsilon(events, delta, "pld"), "pld") <= delta * (1 + 1e-6)


@pytest.mark.parametrize("delta", [1e-4, 1e-9])
@pytest.mark.parametrize("count", [1, 100, 5000])
def test_pld_is_the_tightest_and_moments_the_loosest(count, delta):
    found = epsilons([(PAPER_ROUND, count)], delta)
    assert found["pld"] < found["rdp"] < found["moments"]


def test_replacing_a_user_is_a_move_of_twice_the_sensitivity_when_everybody_takes_part():
    bound = replace_one_epsilon([(Gaussian(noise_multiplier=4), 4)], 1e-6)
    assert bound.epsilon == pytest.approx(exact_epsilon(1.0, 1e-6), rel=1e-3)
    assert bound.accountant == "pld for replacing one user"


def replaced_delta(q: float, z: float, epsilon: float) -> float:
    """Return delta of one round by the proof: for the best half-space between two users with opposite updates."""
    edge = np.linspace(-9, 9, 20_001)
    alpha = math.exp(epsilon)
    return float(
        np.max(q * norm.cdf(edge + 1 / z) - alpha * q * norm.cdf(edge - 1 / z) + (1 - q) * (1 - alpha) * norm.cdf(edge))
    )


@pytest.mark.parametrize(("q", "z"), [(0.01, 0.6), (0.2, 1.0), (0.7, 2.0)])
def test_replacing_a_user_in_one_round_costs_what_the_proof_gives(q, z):
    event = PoissonGaussian(sampling_prob=q, noise_multiplier=z)
    for delta in (1e-3, 1e-6):
        epsilon = replace_one_epsilon([event], delta).epsilon
        assert epsilon > best_epsilon([event], delta).epsilon
        assert replaced_delta(q, z, epsilon) <= delta
        assert replaced_delta(q, z, 0.99 * epsilon - 1e-3) > delta


def test_two_users_with_opposite_updates_are_the_worst_case_in_two_dimensions():
    """Integrates the densities on a grid, for updates at any angle and of any length up to the sensitivity."""
    q, z, alpha = 0.3, 0.8, math.exp(0.5)
    x, y = np.meshgrid(np.linspace(-6, 6, 301), np.linspace(-6, 6, 301))

    def density(mean: tuple[float, float]) -> np.ndarray:
        return np.exp(-((x - mean[0]) ** 2 + (y - mean[1]) ** 2) / (2 * z**2))

    def stick(first: tuple[float, float], second: tuple[float, float]) -> float:
        p, r = ((1 - q) * density((0, 0)) + q * density(mean) for mean in (first, second))
        return float(np.maximum(p - alpha * r, 0).sum() / p.sum())

    worst = stick((1, 0), (-1, 0))
    for angle in np.linspace(0, math.pi, 7):
        for length in (0.5, 1.0):
            own = (length * math.cos(angle), length * math.sin(angle))
            assert stick((1, 0), own) <= worst * (1 + 1e-9)
            assert stick(own, (1, 0)) <= worst * (1 + 1e-9)
    assert worst == pytest.approx(replaced_delta(q, z, 0.5), rel=1e-2)


def test_an_event_without_a_loss_distribution_is_replaced_as_a_group_of_two():
    chosen = Selection(sampling_prob=0.01, noise_multiplier=2.0, rounds=10, mean_trials=2.0, drawn_from="geometric")
    bound = replace_one_epsilon([chosen], 1e-6)
    assert bound.accountant == "rdp for a group of two"
    half = bound.epsilon / 2
    assert (1 + math.exp(half)) * delta_at([chosen], half, "rdp") <= 1e-6 * (1 + 1e-9)


def test_a_failure_probability_counts_for_both_users_who_are_swapped():
    events = [(PAPER_ROUND, 100)]
    failing = [*events, FailureProbability(delta=1e-10)]
    assert replace_one_epsilon(failing, 1e-9).epsilon == replace_one_epsilon(events, 0.8e-9).epsilon
    assert replace_one_epsilon([*events, FailureProbability(delta=0.5e-9)], 1e-9).epsilon == math.inf


def test_replacing_nobody_costs_nothing_and_without_noise_everything():
    assert replace_one_epsilon([], 1e-9).epsilon == 0.0
    assert replace_one_epsilon([NonPrivate(reason="no noise")], 1e-9).epsilon == math.inf


def test_equal_events_collapse():
    counts, failure = collapse([PAPER_ROUND, (PAPER_ROUND, 2), (PAPER_ROUND, 0), (FailureProbability(delta=0.1), 2)])
    assert counts == ((PAPER_ROUND, 3),)
    assert failure == pytest.approx(0.2)


@pytest.mark.parametrize("delta", [0, 1, -1, math.nan])
def test_an_impossible_delta_is_refused(delta):
    for ask in (epsilons, best_epsilon, replace_one_epsilon):
        with pytest.raises(InvalidValue, match="delta"):
            ask([PAPER_ROUND], delta)


def test_an_unknown_accountant_is_refused_with_the_nearest_name():
    with pytest.raises(InvalidValue, match="Did you mean 'moments'"):
        epsilon([PAPER_ROUND], 1e-6, "moment")


@pytest.mark.parametrize("asked", [-1, math.nan, math.inf])
def test_an_impossible_epsilon_is_refused(asked):
    with pytest.raises(InvalidValue, match="epsilon"):
        delta_at([PAPER_ROUND], asked, "rdp")


def test_an_event_cannot_happen_a_negative_number_of_times():
    with pytest.raises(InvalidValue, match="whole number"):
        epsilon([(PAPER_ROUND, -1)], 1e-6, "rdp")


def test_the_versions_of_what_computed_are_named():
    assert versions().keys() == {"unheard", "dp-accounting", "numpy", "scipy"}


def test_nothing_is_printed_about_orders_that_the_library_leaves_out(capfd):
    epsilon([(PoissonGaussian(sampling_prob=0.11, noise_multiplier=0.9), 7)], 1e-5, "rdp")
    assert capfd.readouterr() == ("", "")


def test_a_new_accountant_needs_only_a_record(monkeypatch):
    """Statements, plans and budgets read the registry."""
    cost = AdditiveCost(
        cost=lambda event: np.ones(1), epsilon=lambda cost, delta: float(cost[0]), delta=lambda cost, epsilon: 0.5
    )
    record = Accountant(
        name="one_each",
        title="ONE",
        description="Every event costs an epsilon of 1.",
        epsilon=cost.epsilon_of,
        delta=cost.delta_of,
        additive=cost,
        note="for a test",
    )
    monkeypatch.setitem(ACCOUNTANTS, record.name, record)
    assert epsilons([(PAPER_ROUND, 7)], 1e-9)["one_each"] == 7.0
    assert "(for a test)" in render_text(compute_statement({"delta": 1e-9}, [PAPER_ROUND]))
    plan = CostEstimate(population=763_430, users_per_round=5000, noise_multiplier=1.0, rounds=7, delta=1e-9)
    assert plan.bound("one_each").epsilon == 7.0
    budget = Budget(epsilon=1.5, delta=1e-9, accountant="one_each")
    budget.check(budget.running(), PAPER_ROUND, 0)
    with pytest.raises(BudgetExceeded):
        budget.check(budget.running([PAPER_ROUND]), PAPER_ROUND, 1)


@settings(max_examples=50, deadline=None)
@given(round=rounds, times=st.integers(1, 10**6), delta=deltas)
def test_epsilon_by_rdp_is_the_smallest_over_all_orders_to_the_bit(round, times, delta):
    cost = times * rdp_cost(round)
    assert rdp_epsilon(cost, delta) == compute_epsilon(RDP_ORDERS, cost, delta)[0]


@pytest.mark.parametrize("cost", [0.0, 1e-30, 1e-13, 1e300, math.inf])
def test_epsilon_by_rdp_of_extreme_divergences_is_that_of_all_orders(cost):
    for delta in (1e-12, 1e-6, 0.5):
        costs = np.full(len(RDP_ORDERS), cost)
        assert rdp_epsilon(costs, delta) == compute_epsilon(RDP_ORDERS, costs, delta)[0]
        costs[::2] = math.inf
        assert rdp_epsilon(costs, delta) == compute_epsilon(RDP_ORDERS, costs, delta)[0]


def test_each_of_a_hundred_kinds_of_events_counts():
    """With a schedule every round may have another z."""
    kinds = [PoissonGaussian(sampling_prob=1.0, noise_multiplier=90 + number / 7) for number in range(100)]
    failures = [FailureProbability(delta=1e-9 * (number + 1)) for number in range(100)]
    counts, failure = collapse([*kinds, *failures, *failures, *kinds, kinds[0]])
    assert dict(counts) == {**dict.fromkeys(kinds, 2), kinds[0]: 3}
    assert failure == pytest.approx(2 * sum(one.delta for one in failures), rel=1e-12)
    mu = math.sqrt(sum(one.noise_multiplier**-2 for one in kinds))
    for accountant in ACCOUNTANTS:
        assert epsilon(kinds, 1e-6, accountant) >= exact_epsilon(mu, 1e-6)


def test_a_divergence_that_cannot_be_computed_is_infinite(monkeypatch):
    class Uncertain:
        rdp = np.full(len(RDP_ORDERS), math.nan)

        def compose(self, event):
            return self

    monkeypatch.setattr(accountants, "RdpAccountant", Uncertain)
    assert (rdp_cost.__wrapped__(PAPER_ROUND) == math.inf).all()  # without the cache of other tests


def test_pld_has_no_bound_above_its_largest_number_of_rounds():
    release = Gaussian(noise_multiplier=1e5)
    for times, has_bound in ((10**7, True), (10**7 + 1, False)):
        assert math.isfinite(epsilon([(release, times)], 1e-6, "pld")) is has_bound
        assert (delta_at([(release, times)], 1.0, "pld") < 1) is has_bound
        assert ("group of two" not in replace_one_epsilon([(release, times)], 1e-6).accountant) is has_bound


@pytest.mark.parametrize("failure", [0.0, 3e-7])
def test_the_pair_that_is_claimed_for_a_group_of_two_holds_exactly(failure):
    chosen = Selection(sampling_prob=0.01, noise_multiplier=2.0, rounds=9, mean_trials=3.0, drawn_from="poisson")
    bound = replace_one_epsilon([chosen, FailureProbability(delta=failure)], 1e-6)
    half = bound.epsilon / 2
    assert bound.accountant == "rdp for a group of two"
    assert (1 + math.exp(half)) * delta_at([chosen], half, "rdp") <= (1e-6 - 2 * failure) * (1 + 1e-12)
    assert (1 + math.exp(0.999 * half)) * delta_at([chosen], 0.999 * half, "rdp") > 1e-6 - 2 * failure


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
@pytest.mark.parametrize("at", [0.001, 0.5, 2.0])
def test_a_failure_probability_is_added_to_the_delta_of_the_other_events(accountant, at):
    release = Gaussian(noise_multiplier=3.0)
    alone = delta_at([release], at, accountant)
    for failure in (1e-9, 3e-4, 0.01):
        both = delta_at([release, FailureProbability(delta=failure)], at, accountant)
        assert both == pytest.approx(min(1.0, alone + failure), rel=1e-12)
        assert delta_at([FailureProbability(delta=failure)], at, accountant) == failure


def test_rounds_that_draw_examples_are_bounded_by_pld_alone_which_has_no_bound_for_two_users():
    drawn = ExampleGaussian(sampling_prob=1.0, examples_per_user=2, noise_multiplier=9.0)
    for events in ([drawn], [Gaussian(noise_multiplier=9.0), drawn]):
        assert running_accountant(events) == running_accountant(events[::-1]) == "pld"
        assert accountants.replace_one_pld_epsilon(collapse(events)[0], 1e-3) is None
    assert running_accountant([Gaussian(noise_multiplier=9.0)]) == "rdp"
