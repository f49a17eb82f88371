"""Laws of the accountants: delta and epsilon belong together, and every bound is that of the accountants asked for."""

import importlib.metadata
import itertools
import json
import math

import dp_accounting
import numpy as np
import pytest
import scipy

import unheard
from tests.privacy.test_accountants import exact_delta
from unheard.errors import InvalidValue
from unheard.privacy.accountants import (
    ACCOUNTANTS,
    CLAIMED,
    FILTER_ORDERS,
    best_epsilon,
    bound_by,
    delta_at,
    epsilon,
    epsilons,
    replace_one_epsilon,
    rough_epsilon,
    versions,
)
from unheard.privacy.budget import (
    ADAPTIVE,
    DECLARED,
    DOUBLED,
    FIXED,
    Budget,
    Claim,
    RunningEpsilon,
    delta_caution,
    odometer,
)
from unheard.privacy.events import FailureProbability, Gaussian, PoissonGaussian, Selection

DELTA = 1.23456789e-6
MIXED = [
    (PoissonGaussian(sampling_prob=0.01, noise_multiplier=1.1), 40),
    (PoissonGaussian(sampling_prob=0.03, noise_multiplier=2.3), 25),
    (Gaussian(noise_multiplier=9.0), 3),
]
FAILING = [*MIXED, (FailureProbability(delta=3e-8), 2)]
SELECTED = Selection(sampling_prob=0.02, noise_multiplier=1.5, rounds=12, mean_trials=3.0, drawn_from="poisson")
SUBSETS = [names for size in (1, 2, 3) for names in itertools.permutations(ACCOUNTANTS, size)]


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
@pytest.mark.parametrize(("z", "times"), [(1.0, 1), (6.0, 9), (30.0, 25)])
def test_no_delta_of_gaussian_releases_is_below_the_exact_one(accountant, z, times):
    mu = math.sqrt(times) / z
    for at in (0.0, 0.3 * mu, mu, 3 * mu, 6 * mu):
        found = delta_at([(Gaussian(noise_multiplier=z), times)], at, accountant)
        assert exact_delta(mu, at) * (1 - 1e-9) <= found <= 1  # the exact delta is a difference of two floats


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
@pytest.mark.parametrize("delta", [1e-3, 1e-6, 1e-9])
def test_delta_at_an_epsilon_is_the_delta_at_which_that_epsilon_holds(accountant, delta):
    """Neither is smaller than the other allows, so both come from one bound."""
    for events in (MIXED, MIXED[2:], [*MIXED, (FailureProbability(delta=delta / 8), 3)]):
        at = epsilon(events, delta, accountant)
        assert delta_at(events, at, accountant) == pytest.approx(delta, rel=1e-3)
        assert delta_at(events, 0.9 * at, accountant) > delta * 1.01


@pytest.mark.parametrize("events", [MIXED, MIXED[:1], MIXED[1:2], MIXED[2:], [(MIXED[0][0], 1)], [(MIXED[0][0], 9000)]])
def test_the_rough_epsilon_is_valid_and_not_far_above_that_of_rdp(events):
    fine = epsilon(events, DELTA, "rdp")
    assert fine * (1 - 1e-9) <= rough_epsilon(tuple(events), DELTA) <= 1.5 * fine


@pytest.mark.parametrize("names", SUBSETS, ids=lambda names: "-".join(names))
def test_epsilons_of_some_accountants_are_those_of_each_alone(names):
    assert epsilons(FAILING, DELTA, names) == {name: epsilon(FAILING, DELTA, name) for name in names}
    assert list(epsilons(FAILING, DELTA, names)) == list(names)
    found = best_epsilon(FAILING, DELTA, names)
    assert found.epsilon == min(epsilons(FAILING, DELTA, names).values())
    assert found.accountant == min(names, key=lambda name: epsilon(FAILING, DELTA, name))
    assert bound_by(FAILING, DELTA, names[0]) == best_epsilon(FAILING, DELTA, names[:1])
    assert best_epsilon([], DELTA, names).accountant == names[0]  # of equal bounds the first is named


def test_a_run_claims_the_smaller_of_pld_and_rdp_and_no_other_bound():
    assert CLAIMED == ("pld", "rdp")
    assert [name for name, record in ACCOUNTANTS.items() if record.is_claimed] == ["rdp", "pld"]
    assert [name for name, record in ACCOUNTANTS.items() if record.additive is not None] == ["moments", "rdp"]
    for events in (MIXED, FAILING, [SELECTED]):
        assert best_epsilon(events, DELTA).epsilon == min(epsilon(events, DELTA, name) for name in ("pld", "rdp"))
        assert bound_by(events, DELTA, "best") == best_epsilon(events, DELTA)


def test_a_group_of_two_is_bounded_by_the_accountants_asked_for():
    """Of a selection there is no bound by pld."""
    assert replace_one_epsilon([SELECTED], DELTA, ("pld",)).epsilon == math.inf
    by = {name: replace_one_epsilon([SELECTED], DELTA, (name,)) for name in ("moments", "rdp")}
    assert by["rdp"].epsilon < by["moments"].epsilon < math.inf
    for names in SUBSETS:
        bounds = [by[name] for name in names if name in by]
        if bounds:
            assert replace_one_epsilon([SELECTED], DELTA, names) == min(bounds, key=lambda bound: bound.epsilon)


def test_each_version_is_that_of_its_own_package():
    assert versions() == {
        "unheard": unheard.__version__,
        "dp-accounting": importlib.metadata.version(dp_accounting.__name__.replace("_", "-")),
        "numpy": np.__version__,
        "scipy": scipy.__version__,
    }


@pytest.mark.parametrize("names", [("pld",), ("rdp",), ("rdp", "pld"), ("moments", "rdp"), ("moments", "pld", "rdp")])
@pytest.mark.parametrize(("basis", "level"), [(FIXED, 0), (DECLARED, 0), (DOUBLED, 1), (DOUBLED, 3)])
def test_each_figure_of_a_claim_is_at_its_share_of_delta_and_by_its_accountants(basis, level, names):
    """The claim of a run of up to 2^k times its declared rounds is the cost at delta / 2^k."""
    share, other = DELTA / 2**level, [(MIXED[1][0], 7)]
    among = tuple(name for name in CLAIMED if name in names)
    for events in (FAILING, [SELECTED]):
        best = best_epsilon(events, share)
        whole = Claim(
            epsilon=best.epsilon, accountant=best.accountant, basis=basis, events=events, delta=share, level=level
        )
        claim = whole.by(names)
        bound = best_epsilon(events, share, among)
        assert (claim.epsilon, claim.basis, claim.level) == (bound.epsilon, basis, level)
        assert (claim.delta, claim.among, list(claim.events)) == (share, among, events)
        assert claim.accountant.split()[0] == bound.accountant
        assert ("of the" in claim.accountant) == (basis != FIXED)
        assert claim.cost(other) == best_epsilon(other, share, among)
        assert claim.cost([SELECTED]) == best_epsilon([SELECTED], share, among)
        assert claim.replace_one() == replace_one_epsilon(events, share, among)
        at = best.epsilon / 2
        assert claim.delta_at(at) == min(1.0, 2**level * min(delta_at(events, at, name) for name in among))
        assert whole.by(ACCOUNTANTS) == whole.by(CLAIMED) == _with_name_of(whole.by(CLAIMED), whole)


def _with_name_of(named: Claim, claim: Claim) -> Claim:
    """Return a claim with the name of another: `by` adds what the claim covers to the name of the accountant."""
    return Claim(**{**vars(claim), "accountant": named.accountant})


def test_the_claim_of_an_odometer_has_no_accountants_to_choose_from():
    counts = (tuple(MIXED), 0.0)
    bound = odometer(*counts, DELTA)
    claim = Claim(epsilon=bound.epsilon, accountant=bound.accountant, basis=ADAPTIVE, events=MIXED, delta=DELTA)
    assert claim.by(("moments",)) == claim
    assert claim.cost(MIXED[:1]) == odometer(tuple(MIXED[:1]), 0.0, DELTA)
    assert claim.replace_one().epsilon == odometer(*counts, DELTA, of_two=True).epsilon > claim.epsilon


BUDGETS = [
    Budget(epsilon=2.5, delta=1e-7),
    Budget(epsilon=3.5, delta=1e-5, accountant="moments"),
    Budget(epsilon=4.5, delta=1e-6, orders=FILTER_ORDERS),
    Budget(epsilon=4.5, delta=1e-6, orders=FILTER_ORDERS[1:]),
    Budget(epsilon=4.5, delta=1e-6),
]


@pytest.mark.parametrize("budget", BUDGETS, ids=lambda budget: f"{budget.accountant}, {len(budget.orders)} orders")
def test_a_budget_comes_back_from_its_record_and_counts_by_its_own_delta_accountant_and_orders(budget):
    assert Budget(**json.loads(json.dumps(budget.record))) == budget
    event = MIXED[0][0]
    running = budget.running([event] * 3)
    same = RunningEpsilon(budget.delta, budget.accountant, [event] * 3, budget.orders)
    assert (running.delta, running.asked, running.orders) == (budget.delta, budget.accountant, budget.orders)
    assert running.epsilon == same.epsilon > 0
    budget.check(running, event, 3)
    for other in BUDGETS:
        if (other.delta, other.accountant, other.orders) != (budget.delta, budget.accountant, budget.orders):
            with pytest.raises(InvalidValue, match="own delta and accountant"):
                budget.check(other.running(), event, 0)


def test_a_delta_above_one_in_a_hundred_is_called_large_and_one_in_a_hundred_is_not():
    assert delta_caution(0.01) is None
    assert delta_caution(1e-9) is None
    for delta in (math.nextafter(0.01, 1), 0.05, 0.5):
        assert "is large" in (delta_caution(delta) or "")
