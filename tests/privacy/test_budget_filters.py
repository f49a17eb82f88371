"""Claims of runs whose length or parameters were chosen after a look at results: limits, filters and odometers."""

import math
from dataclasses import replace

import pytest
from scipy.stats import norm
from typer.testing import CliRunner

import unheard
from tests.stores import uncharged_copy
from unheard.cli.main import app
from unheard.errors import BudgetExceeded, InvalidValue, LedgerError, UnprovenCombination
from unheard.privacy.accountants import (
    FILTER_ORDERS,
    at_orders,
    best_epsilon,
    collapse,
    epsilon,
    epsilon_at_order,
    rdp_cost,
)
from unheard.privacy.budget import (
    ADAPTIVE,
    ODOMETER_FIRST,
    ODOMETER_STEP,
    Budget,
    claim_after,
    claim_of_run,
    declaration,
    odometer,
    rounds_within,
)
from unheard.privacy.events import (
    CorrelatedGaussian,
    DistributedGaussian,
    FailureProbability,
    Gaussian,
    NonPrivate,
    PoissonGaussian,
    Selection,
    from_record,
    to_record,
)
from unheard.privacy.ledger import Entry, Ledger
from unheard.privacy.population_ledger import PopulationLedger
from unheard.privacy.population_statement import all_runs, render_all_runs
from unheard.privacy.statement import compute_statement, render_text

ROUND, OTHER = (PoissonGaussian(sampling_prob=q, noise_multiplier=z) for q, z in ((0.01, 1.0), (0.02, 1.5)))
EVERYBODY = PoissonGaussian(sampling_prob=1.0, noise_multiplier=6.0)  # quick to account for
DELTA = 1.23456789e-6


def facts(rounds, budget=None, phases=((0, ROUND),), charges=0):
    declared = declaration(rounds, [(first, to_record(event)) for first, event in phases], budget)
    return {"population": 10_000, "delta": DELTA, "run_id": "r", "start": {"charges": charges}, "declared": declared}


def done(rounds, event=ROUND):
    return [Entry(event=event, round=i, hash="") for i in range(rounds)]


def test_a_run_declares_its_rounds_before_the_first(run, tmp_path):
    budget = Budget(epsilon=500.0, delta=run.claimed_delta)
    schedule = (unheard.Change(from_round=3, clip_norm=1.0),)
    two = replace(run, plan=replace(run.plan, schedule=schedule), budget=budget)
    reports = unheard.train(two, tmp_path / "r")
    next(reports)
    reports.close()
    declared = Ledger.read(tmp_path / "r" / "ledger.jsonl").facts["declared"]
    assert (declared["rounds"], declared["budget"]) == (6, budget.record)
    assert [phase["from_round"] for phase in declared["phases"]] == [0, 3]
    assert declared["phases"][0]["event"] == to_record(run.plan.at(0, run.model.layout).event())


@pytest.mark.parametrize("budget", [None, Budget(epsilon=9.0, delta=DELTA)])
def test_a_run_as_long_as_declared_claims_what_was_charged(budget):
    """Also if its budget would have allowed more rounds."""
    claim = claim_of_run(facts(20, budget), done(20), DELTA)
    best = best_epsilon([(ROUND, 20)], DELTA)
    assert (claim.epsilon, claim.accountant, claim.basis) == (best.epsilon, best.accountant, "fixed beforehand")


@pytest.mark.parametrize("charges", [None, "0", True, -1, 6])
def test_a_declaration_that_does_not_say_what_was_charged_before_it_is_refused(charges):
    header = facts(20)
    header["start"] = {**header.get("start", {}), "charges": charges}
    with pytest.raises(LedgerError, match="how many charges came before"):
        claim_of_run(header, done(5), DELTA)


def test_a_run_that_was_stopped_claims_what_was_declared():
    stopped = compute_statement(facts(20, phases=((0, ROUND), (15, OTHER))), done(7))
    assert stopped["claimed"]["epsilon"] == best_epsilon([(ROUND, 15), (OTHER, 5)], DELTA).epsilon
    assert stopped["claimed"]["accountant"] == "pld of the declared rounds"
    assert stopped["claimed"]["epsilon"] > stopped["epsilon"]["pld"] == best_epsilon([(ROUND, 7)], DELTA).epsilon
    assert "look at results" in render_text(stopped)


def test_a_stopped_run_claims_each_repetition_of_each_of_its_rounds():
    entries = [*done(4), *done(4)[1:], *done(4)[1:], *done(4, OTHER)[3:]]  # rounds 1 and 2 three times, 3 four times
    claim = claim_of_run(facts(9, phases=((0, ROUND), (8, OTHER))), entries, DELTA)
    assert dict(collapse(claim.events)[0]) == {ROUND: 8 + 6, OTHER: 1 + 1}
    assert claim.epsilon == best_epsilon([(ROUND, 14), (OTHER, 2)], DELTA).epsilon


def test_a_run_claims_what_was_declared_wherever_it_was_stopped():
    whole = best_epsilon([(ROUND, 12), (OTHER, 5)], DELTA).epsilon
    for length in range(1, 18):
        entries = [*done(min(length, 12)), *done(length, OTHER)[12:]]
        assert claim_of_run(facts(17, phases=((0, ROUND), (12, OTHER))), entries, DELTA).epsilon == whole


def test_charges_before_the_run_and_rounds_done_again_are_claimed_too():
    vocabulary = [Entry(event=Gaussian(noise_multiplier=5.0), round=0, hash="")]
    again = [*done(7), *done(7)[5:]]
    claim = claim_of_run(facts(20, charges=1), [*vocabulary, *again], DELTA)
    assert claim.epsilon == best_epsilon([(ROUND, 22), Gaussian(noise_multiplier=5.0)], DELTA).epsilon
    phases = ((0, ROUND), (5, OTHER))
    claim = claim_of_run(facts(20, phases=phases), [*done(5), *done(7, OTHER)[5:], *done(7, OTHER)[6:]], DELTA)
    assert claim.epsilon == best_epsilon([(ROUND, 5), (OTHER, 16)], DELTA).epsilon


def test_a_run_with_a_budget_claims_all_rounds_that_the_budget_allows():
    budget = Budget(epsilon=1.5, delta=DELTA)
    running, allowed = budget.running(), 0
    while running.epsilon_after(ROUND) <= budget.epsilon:
        running.charge(ROUND)
        allowed += 1
    whole = best_epsilon([(ROUND, allowed)], DELTA).epsilon
    for declared, length in ((10**6, 3), (5, 8)):  # stopped early; or made longer than declared
        claim = claim_of_run(facts(declared, budget), done(length), DELTA)
        assert claim.epsilon == whole <= budget.epsilon
        assert claim.basis == "declared rounds"
    ended = claim_of_run(facts(10**6, budget), done(allowed), DELTA)
    assert (ended.epsilon, ended.basis) == (whole, "fixed beforehand")
    # With earlier charges fewer rounds are within the budget.
    vocabulary = Gaussian(noise_multiplier=5.0)
    running, fewer = budget.running([vocabulary]), 0
    while running.epsilon_after(ROUND) <= budget.epsilon:
        running.charge(ROUND)
        fewer += 1
    claim = claim_of_run(facts(10**6, budget, charges=1), [Entry(event=vocabulary, round=0, hash=""), *done(3)], DELTA)
    assert 3 < fewer < allowed
    assert claim.epsilon == best_epsilon([(ROUND, fewer), vocabulary], DELTA).epsilon


@pytest.mark.parametrize("orders", [(), FILTER_ORDERS])
@pytest.mark.parametrize("declared", [1, 7, 40, 10**5])
def test_the_rounds_that_a_budget_allows_are_those_after_which_it_refuses(orders, declared):
    budget, before = Budget(epsilon=2.0, delta=DELTA, orders=orders), [Gaussian(noise_multiplier=8.0)]
    running, allowed = budget.running(before), 0
    while allowed < declared and running.epsilon_after(ROUND if allowed < 5 else OTHER) <= budget.epsilon:
        running.charge(ROUND if allowed < 5 else OTHER)
        allowed += 1
    plan = facts(declared, phases=((0, ROUND), (5, OTHER)))["declared"]
    assert rounds_within(budget, before, plan) == allowed > 0
    assert rounds_within(Budget(epsilon=0.1, delta=DELTA, orders=orders), before, plan) == 0


@pytest.mark.parametrize("rounds", [10, 20, 21, 70])
def test_the_claim_after_more_rounds_is_known_before_they_are_trained(rounds):
    phases = ((0, ROUND), (8, OTHER))
    every = [Entry(event=ROUND if i < 8 else OTHER, round=i, hash="") for i in range(rounds)]
    for plan, entries in (
        (facts(20), done(rounds)),
        (facts(20, phases=phases), every),
        (facts(20, charges=1), [Entry(event=Gaussian(noise_multiplier=5.0), round=0, hash=""), *done(rounds)]),
        (facts(20, phases=((0, _attempt(0)),)), [Entry(event=_attempt(i), round=i, hash="") for i in range(rounds)]),
    ):
        for length in (1, 6, 10):
            assert (
                claim_after(plan, entries[:length], DELTA, rounds).epsilon == claim_of_run(plan, entries, DELTA).epsilon
            )


def test_the_claim_that_is_announced_with_new_noise_is_that_of_a_second_mechanism():
    plan = facts(20, phases=((0, _attempt(0)),))
    entries = [Entry(event=_attempt(i), round=i, hash="") for i in range(6)]
    second = [Entry(event=_attempt(i), round=6 + i, hash="") for i in range(24)]
    expected = claim_of_run(plan, [*entries, *second], DELTA).epsilon
    assert claim_after(plan, entries, DELTA, 30, new_noise=True).epsilon == expected
    assert claim_after(plan, entries, DELTA, 30).epsilon <= expected


def _attempt(index):
    return CorrelatedGaussian(sampling_prob=0.2, noise_multiplier=6.0, block=4, index=index)


@pytest.mark.parametrize(("length", "level"), [(21, 1), (40, 1), (41, 2), (161, 4)])
def test_a_run_that_was_made_longer_claims_the_next_doubling(length, level):
    claim = claim_of_run(facts(20), done(length), DELTA)
    assert claim.epsilon == best_epsilon([(ROUND, 20 * 2**level)], DELTA / 2**level).epsilon
    assert claim.basis == "doubled rounds"


def test_a_run_with_correlated_noise_claims_the_blocks_of_all_declared_rounds():
    """Each block of 4 rounds is one release. The run may be stopped within a block or after one."""

    def attempt(index, block=4, q=0.2):
        return CorrelatedGaussian(sampling_prob=q, noise_multiplier=2.0, block=block, index=index)

    def attempts(rounds, **kind):
        return [Entry(event=attempt(i, **kind), round=i, hash="") for i in range(rounds)]

    release = PoissonGaussian(sampling_prob=0.2, noise_multiplier=2.0)
    declared = facts(18, phases=((0, attempt(0)), (5, attempt(0))))
    for length in (1, 4, 5, 17, 18):
        claim = claim_of_run(declared, attempts(length), DELTA)
        assert claim.epsilon == best_epsilon([(release, 5)], DELTA).epsilon
    # A new mechanism after round 6 begins its blocks anew: 2 blocks before, and 3 for the 12 rounds that are left.
    again = [*attempts(6), Entry(event=attempt(0), round=6, hash="")]
    assert claim_of_run(declared, again, DELTA).epsilon == best_epsilon([(release, 5)], DELTA).epsilon
    redone = [*attempts(6), *(Entry(event=attempt(i), round=i - 2, hash="") for i in range(6, 9))]
    assert claim_of_run(declared, redone, DELTA).epsilon == best_epsilon([(release, 5)], DELTA).epsilon
    assert claim_of_run(declared, attempts(19), DELTA).epsilon == best_epsilon([(release, 9)], DELTA / 2).epsilon
    # With BLT noise one charge covers the whole run.
    whole = claim_of_run(facts(18, phases=((0, attempt(0, 18, 1.0)),)), attempts(3, block=18, q=1.0), DELTA)
    assert (whole.epsilon, whole.basis) == (
        best_epsilon([Gaussian(noise_multiplier=2.0)], DELTA).epsilon,
        "fixed beforehand",
    )
    budget = Budget(epsilon=1.01 * epsilon([(release, 2)], DELTA, "rdp"), delta=DELTA)
    within = claim_of_run(facts(18, budget, phases=((0, attempt(0)),)), attempts(1), DELTA)
    assert within.epsilon == best_epsilon([(release, 2)], DELTA).epsilon


def test_a_ledger_without_a_declaration_says_so():
    old = {key: value for key, value in facts(20).items() if key != "declared"}
    told = compute_statement(old, done(7))
    assert told["claimed"]["epsilon"] == best_epsilon([(ROUND, 7)], DELTA).epsilon
    assert "older version" in told["basis"]["why"]


@pytest.mark.parametrize("declared", [{}, {"rounds": "x", "phases": []}, {"rounds": 5, "phases": [{"from_round": 0}]}])
def test_a_malformed_declaration_is_an_error(declared):
    with pytest.raises(LedgerError):
        claim_of_run({**facts(20), "declared": declared}, done(3), DELTA)


def test_the_shares_of_the_odometer_add_up_to_delta():
    """The claim is that of one filter, at its share of delta, with a budget that holds what was charged."""
    for rounds in (1, 50, 3000):
        bound = odometer(((ROUND, rounds),), 0.0, DELTA).epsilon
        claims = []
        for order in FILTER_ORDERS:
            spent = rounds * float(at_orders(rdp_cost(ROUND), [order])[0])
            level = next(k for k in range(200) if spent <= ODOMETER_FIRST * ODOMETER_STEP**k * (1 + 1e-9))
            share = DELTA * 6 / (math.pi**2 * (level + 1) ** 2) / len(FILTER_ORDERS)
            claims.append(epsilon_at_order(order, ODOMETER_FIRST * ODOMETER_STEP**level, share))
        assert bound == pytest.approx(min(claims), rel=1e-6)
        assert bound > epsilon([(ROUND, rounds)], DELTA, "rdp")
    assert sum(6 / (math.pi**2 * (k + 1) ** 2) for k in range(10**5)) <= 1
    assert odometer((), 0.0, DELTA).epsilon == 0.0
    assert odometer(((NonPrivate(reason="none"), 1),), 0.0, DELTA).epsilon == math.inf
    assert odometer(((ROUND, 1),), DELTA, DELTA).epsilon == math.inf


def test_a_budget_over_all_runs_is_a_filter_at_fixed_orders(tmp_path):
    population = PopulationLedger.open(tmp_path / "ledger.jsonl", {"corpus": "c"})
    population.set_budget(Budget(epsilon=4.0, delta=DELTA, orders=FILTER_ORDERS))
    assert population.budget is not None
    assert population.budget.orders == FILTER_ORDERS
    assert PopulationLedger.read(population.path).budget == population.budget
    share = DELTA / len(FILTER_ORDERS)
    running = population.budget.running()
    running.charge(ROUND, 100)
    spent = {order: 100 * float(at_orders(rdp_cost(ROUND), [order])[0]) for order in FILTER_ORDERS}
    assert running.epsilon == pytest.approx(min(epsilon_at_order(o, cost, share) for o, cost in spent.items()))
    population.charge("one", 0, ROUND, 0)
    population.charge("two", 0, OTHER, 0)
    told = all_runs(population)
    assert told["claimed"]["epsilon"] == 4.0
    assert "RDP filter" in told["claim"]
    with pytest.raises(BudgetExceeded):
        population.charge("two", 1, PoissonGaussian(sampling_prob=1.0, noise_multiplier=0.3), 1)
    with pytest.raises(InvalidValue, match="orders"):
        Budget(epsilon=1.0, delta=DELTA, orders=(2.05,))


def test_the_command_declares_a_budget_as_a_filter(store, tmp_path):
    uncharged_copy(store.path, tmp_path / "store")
    done = CliRunner().invoke(app, ["budget", str(tmp_path / "store"), "--epsilon", "4", "--delta", "1e-6"])
    assert done.exit_code == 0, done.output
    assert PopulationLedger.read(tmp_path / "store" / "ledger.jsonl").is_filter


def test_only_a_budget_that_was_declared_first_is_claimed(tmp_path):
    late = PopulationLedger.open(tmp_path / "late.jsonl", {"corpus": "c"})
    for run in ("one", "two"):
        late.charge(run, 0, ROUND, 0)
    late.set_budget(Budget(epsilon=4.0, delta=DELTA, orders=FILTER_ORDERS))
    raised = PopulationLedger.open(tmp_path / "raised.jsonl", {"corpus": "c"})
    raised.set_budget(Budget(epsilon=3.0, delta=DELTA, orders=FILTER_ORDERS))
    for run in ("one", "two"):
        raised.charge(run, 0, ROUND, 0)
    assert raised.is_filter
    raised.set_budget(Budget(epsilon=4.0, delta=DELTA, orders=FILTER_ORDERS))
    for population in (late, raised):
        assert not population.is_filter
        told = all_runs(population)
        assert told["claimed"]["epsilon"] == odometer(*collapse(population.events), DELTA).epsilon
        assert "odometer" in render_all_runs(told)


def test_a_vocabulary_drawn_after_the_budget_ends_its_claim(tmp_path):
    population = PopulationLedger.open(tmp_path / "ledger.jsonl", {"corpus": "c"})
    population.set_budget(Budget(epsilon=4.0, delta=DELTA, orders=FILTER_ORDERS))
    population.settle("vocabulary", [FailureProbability(delta=DELTA / 10)])
    assert not population.is_filter


def test_words_that_exceed_the_budget_end_its_claim(tmp_path):
    """Their charge has no round, and no failure probability, and the budget cannot refuse it."""
    for noise, is_filter in ((5.0, True), (0.2, False)):
        population = PopulationLedger.open(tmp_path / f"{noise}.jsonl", {"corpus": "c"})
        population.set_budget(Budget(epsilon=4.0, delta=DELTA, orders=FILTER_ORDERS))
        population.settle("vocabulary", [Gaussian(noise_multiplier=noise)])
        assert population.is_filter is is_filter
        assert PopulationLedger.read(population.path).is_filter is is_filter


def test_charges_that_came_with_a_run_and_exceed_the_budget_end_its_claim(tmp_path):
    """A budget cannot refuse charges that were made elsewhere. A budget that is exceeded is no longer a filter."""
    many = [EVERYBODY] * 900
    for how in ("settled", "joined"):
        population = PopulationLedger.open(tmp_path / f"{how}.jsonl", {"corpus": "c"})
        population.set_budget(Budget(epsilon=4.0, delta=DELTA, orders=FILTER_ORDERS))
        population.charge("own", 0, EVERYBODY, 0)
        assert population.is_filter
        if how == "settled":
            population.settle("came", many)
        else:
            other = PopulationLedger.open(tmp_path / "other.jsonl", {"corpus": "c"})
            other.settle("came", many)
            population.join(other)
        assert not population.is_filter
        assert all_runs(population)["claimed"]["epsilon"] == odometer(*collapse(population.events), DELTA).epsilon
        assert not PopulationLedger.read(population.path).is_filter


@pytest.mark.parametrize("how", ["settled", "joined"])
def test_a_budget_is_not_claimed_for_rounds_that_were_charged_elsewhere(tmp_path, how):
    """A budget of what was spent, declared in a new ledger after the results, would claim less than an odometer."""
    other = PopulationLedger.open(tmp_path / "other.jsonl", {"corpus": "c"})
    for run in ("one", "two"):
        other.charge(run, 0, ROUND, 0)
    population = PopulationLedger.open(tmp_path / "new.jsonl", {"corpus": "c"})
    population.set_budget(Budget(epsilon=4.0, delta=DELTA, orders=FILTER_ORDERS))
    if how == "joined":
        population.join(other)
    else:
        population.settle("one", [ROUND])
        population.charge("two", 0, ROUND, 0)
    for known in (population, PopulationLedger.read(population.path)):
        assert not known.is_filter
        assert all_runs(known)["claimed"]["epsilon"] == odometer(*collapse(other.events), DELTA).epsilon
    third = PopulationLedger.open(tmp_path / "third.jsonl", {"corpus": "c"})
    third.take_over(population)  # a newer store: the budget and the charges are copied in their order
    assert third.budget == population.budget
    assert not third.is_filter


@pytest.mark.parametrize(
    ("rounds", "before"),
    [([*range(7)], 0), ([0, 1, 1, 2], 2), ([0, 1, 2, 3, 2, 3, 4, 4], 0), ([*range(20), 18, 19], 2)],
)
def test_one_run_on_a_population_claims_what_the_run_claims(tmp_path, rounds, before):
    """Also if the run was stopped early, rounds were repeated after a crash, or a vocabulary was charged before."""
    population = PopulationLedger.open(tmp_path / "ledger.jsonl", {"corpus": "c"})
    words = [Gaussian(noise_multiplier=5.0)] * before
    population.settle("vocabulary", words)
    declared = facts(20, charges=before, phases=((0, EVERYBODY),))
    population.register("r", {"name": "r", "delta": DELTA, "declared": declared["declared"]}, num_charged=before)
    for position, round in enumerate(rounds, start=before):
        population.charge("r", position, EVERYBODY, round)
    own = [Entry(event=event, round=0, hash="") for event in words]
    own += [Entry(event=EVERYBODY, round=round, hash="") for round in rounds]
    expected = claim_of_run(declared, own, DELTA).epsilon
    assert all_runs(population)["claimed"]["epsilon"] == expected
    assert all_runs(PopulationLedger.read(population.path))["claimed"]["epsilon"] == expected


def test_rates_over_all_runs_follow_from_what_is_claimed(tmp_path):
    """For one run: mu and rates of its Gaussian rounds. For several: rates by the odometer's (epsilon, delta), and no mu."""
    population = PopulationLedger.open(tmp_path / "ledger.jsonl", {})
    rounds = [PoissonGaussian(sampling_prob=1.0, noise_multiplier=6.0)] * 9
    population.settle("first", rounds)
    one = all_runs(population, delta=DELTA)["attacker"]
    assert 0.5 <= one["mu"] <= 0.505
    for row in one["true_positive_rates"]:
        exact = norm.cdf(norm.ppf(row["false_positive_rate"]) + 0.5)
        assert exact <= row["at_most"] <= 1.002 * exact
    population.settle("second", rounds[:4])
    several = all_runs(population, delta=DELTA)
    epsilon = several["claimed"]["epsilon"]
    assert several["attacker"]["mu"] is None
    for row in several["attacker"]["true_positive_rates"]:
        rate = row["false_positive_rate"]
        pair = min(1, math.exp(epsilon) * rate + DELTA, 1 - math.exp(-epsilon) * (1 - DELTA - rate))
        assert row["at_most"] == pytest.approx(pair)
        assert row["at_most"] > norm.cdf(norm.ppf(rate) + math.sqrt(13) / 6)
    assert "% true positives at 0.1 % false positives" in render_all_runs(several)


def child_of(rounds, earlier, own):
    """Return header and entries of a run of `rounds` rounds that began from a run with the events `earlier`."""
    header = facts(rounds, charges=len(earlier))
    header["start"]["from"] = "an earlier run"
    return header, [*(Entry(event=event, round=0, hash="") for event in earlier), *done(own, OTHER)]


@pytest.mark.parametrize("own", [0, 3, 20])
def test_a_run_that_began_from_an_earlier_run_claims_an_odometer(own):
    """The earlier run may have been stopped, and this one planned, after a look at results."""
    stated = compute_statement(*child_of(20, [ROUND] * 5, own))
    counts = collapse([(ROUND, 5), (OTHER, own)])
    assert stated["claimed"]["epsilon"] == odometer(*counts, DELTA).epsilon > stated["epsilon"]["pld"]
    assert (stated["claimed"]["accountant"], stated["basis"]["of"]) == ("an RDP odometer", ADAPTIVE)
    assert "an odometer covers that" in render_text(stated).lower()


def test_a_run_from_an_earlier_run_that_was_stopped_never_claims_less_than_the_odometer(run, tmp_path):
    reports = unheard.train(run, tmp_path / "parent")
    next(reports)
    reports.close()
    training = unheard.Training(rounds=2, init_from=str(tmp_path / "parent"))
    list(unheard.train(replace(run, training=training), tmp_path / "child"))
    ledger = Ledger.read(tmp_path / "child" / "ledger.jsonl")
    stated = unheard.statement(tmp_path / "child")
    assert len(ledger) == 3
    assert stated["claimed"]["epsilon"] == odometer(*collapse(ledger.events), run.claimed_delta).epsilon


def test_a_budget_of_a_run_that_begins_from_an_earlier_run_is_refused(run, tmp_path):
    list(unheard.train(replace(run, training=unheard.Training(rounds=1)), tmp_path / "parent"))
    training = unheard.Training(rounds=2, init_from=str(tmp_path / "parent"))
    child = replace(run, training=training, budget=Budget(epsilon=100.0, delta=run.claimed_delta))
    with pytest.raises(UnprovenCombination, match="unheard budget STORE"):
        list(unheard.train(child, tmp_path / "child"))


@pytest.mark.parametrize("length", [20, 21, 45])
def test_points_of_the_curve_belong_to_the_claim(length):
    """Also for a run that was made longer: the claim at each delta of the curve has the epsilon of that point."""
    stated = compute_statement(facts(20), done(length))
    points = [
        *stated["curve"],
        compute_statement(facts(20), done(length), epsilon=stated["claimed"]["epsilon"])["asked"],
    ]
    assert points[-1]["delta"] == pytest.approx(DELTA, rel=1e-3)
    for point in points:
        again = claim_of_run(facts(20), done(length), point["delta"])
        assert again.epsilon == pytest.approx(point["epsilon"], rel=1e-3)


def test_points_of_the_curve_of_an_odometer_belong_to_the_claim():
    header, entries = child_of(20, [ROUND] * 5, 7)
    for point in compute_statement(header, entries)["curve"]:
        if point["delta"] < 1:
            assert claim_of_run(header, entries, point["delta"]).epsilon <= point["epsilon"]
            assert claim_of_run(header, entries, point["delta"] / 1.01).epsilon > point["epsilon"]


def test_an_odometer_for_a_user_who_is_replaced_shares_its_delta_between_two():
    header, entries = child_of(20, [ROUND] * 5, 7)
    claim = claim_of_run(header, entries, DELTA)
    replaced = claim.replace_one()
    assert replaced.accountant == "an RDP odometer for a group of two"
    assert 2 * claim.epsilon < replaced.epsilon < 4 * claim.epsilon
    half = replaced.epsilon / 2
    assert odometer(*collapse(claim.events), DELTA / (1 + math.exp(half))).epsilon == pytest.approx(half, rel=1e-3)
    failing = replace(claim, events=[*claim.events, FailureProbability(delta=0.45 * DELTA)])
    assert failing.replace_one().epsilon > replaced.epsilon
    assert (
        replace(claim, events=[*claim.events, FailureProbability(delta=0.5 * DELTA)]).replace_one().epsilon == math.inf
    )


def test_rounds_added_to_a_selected_run_cost_the_population_what_they_cost_the_run(tmp_path):
    selection = Selection(sampling_prob=0.01, noise_multiplier=1.0, rounds=4, mean_trials=2.0, drawn_from="geometric")
    header = facts(4, charges=1)
    population = PopulationLedger.open(tmp_path / "ledger.jsonl", {"corpus": "c"})
    population.register("r", {"name": "r", "delta": DELTA, "declared": header["declared"]}, num_charged=0)
    population.charge("r", 0, selection, 0)
    entries = [Entry(event=selection, round=0, hash="")]
    assert all_runs(population)["claimed"]["epsilon"] == claim_of_run(header, entries, DELTA).epsilon
    for position, number in enumerate(range(4, 9), start=1):
        population.charge("r", position, ROUND, number)
        entries.append(Entry(event=ROUND, round=number, hash=""))
        own = claim_of_run(header, entries, DELTA)
        assert all_runs(population)["claimed"]["epsilon"] == own.epsilon > best_epsilon(own.events[:1], DELTA).epsilon


EVENT = to_record(PoissonGaussian(sampling_prob=0.01, noise_multiplier=1.0))
DECLARED = {
    "rounds": 6,
    "phases": [{"from_round": 0, "event": EVENT}, {"from_round": 3, "event": EVENT}],
    "budget": None,
}


@pytest.mark.parametrize(
    "change",
    [
        {"rounds": 0},
        {"rounds": -1},
        {"rounds": "many"},
        {"rounds": None},
        {"phases": []},
        {"phases": None},
        {"phases": [{"from_round": 1, "event": EVENT}]},
        {"phases": [*reversed(DECLARED["phases"])]},
        {
            "phases": [
                {"from_round": 0, "event": EVENT},
                {"from_round": 4, "event": EVENT},
                {"from_round": 2, "event": EVENT},
            ]
        },
        {"budget": {"epsilon": -1.0, "delta": 1e-6}},
        {"budget": {"epsilon": 1.0}},
        {"budget": 3},
    ],
)
def test_a_declaration_that_cannot_be_is_an_error_and_no_smaller_claim(change):
    charged = [Entry(event=from_record(EVENT), round=0, hash="")]
    start = {"start": {"charges": 0}}
    assert "declared" in claim_of_run({**start, "declared": DECLARED}, charged, 1e-6).accountant
    with pytest.raises(LedgerError, match="in a form that this version does not know"):
        claim_of_run({**start, "declared": {**DECLARED, **change}}, charged, 1e-6)


@pytest.mark.parametrize("rounds", [(0, 1, 2, 3, 4, 2), (0, 1, 2, 3, 4, 0, 1), (0, 4, 3, 2, 1)])
def test_a_run_has_come_as_far_as_its_furthest_round_whatever_was_done_again_last(rounds):
    """Three rounds were declared. The run was made longer, and then resumed from an earlier checkpoint."""
    entries = [Entry(event=EVERYBODY, round=number, hash="") for number in rounds]
    claim = claim_of_run(facts(3, phases=((0, EVERYBODY),)), entries, DELTA)
    assert claim.basis == "doubled rounds"
    assert claim.epsilon == best_epsilon([(EVERYBODY, 6 + len(rounds) - len({*rounds}))], DELTA / 2).epsilon


@pytest.mark.parametrize("declared", [2, 4, 9])
def test_a_run_that_was_stopped_claims_what_it_declared_and_what_its_budget_allows_whichever_is_less(declared):
    budget = Budget(epsilon=1.0001 * epsilon([(EVERYBODY, 6)], DELTA, "rdp"), delta=DELTA)
    claim = claim_of_run(facts(declared, budget, phases=((0, EVERYBODY),)), done(1, EVERYBODY), DELTA)
    assert claim.epsilon == best_epsilon([(EVERYBODY, min(declared, 6))], DELTA).epsilon


@pytest.mark.parametrize("own", [1, 3])
def test_a_run_that_began_from_a_run_without_rounds_claims_an_odometer_too(own):
    """The settings of this run may depend on the vocabulary, which the earlier run released."""
    stated = compute_statement(*child_of(3, [Gaussian(noise_multiplier=5.0)], own))
    counts = collapse([Gaussian(noise_multiplier=5.0), (OTHER, own)])
    assert (stated["claimed"]["epsilon"], stated["basis"]["of"]) == (odometer(*counts, DELTA).epsilon, ADAPTIVE)


def test_a_run_from_an_earlier_run_claims_an_odometer_against_the_server_too():
    header, entries = child_of(20, [Gaussian(noise_multiplier=9.0)], 0)
    shared = DistributedGaussian(sampling_prob=0.1, noise_multiplier=8.0, min_parties=3)
    entries += [Entry(event=shared, round=number, hash="") for number in range(4)]
    seen = [Gaussian(noise_multiplier=9.0), (Gaussian(noise_multiplier=8.0), 4)]
    bound = compute_statement(header, entries)["against_server"]["epsilon"]
    assert bound == odometer(*collapse(seen), DELTA).epsilon > best_epsilon(seen, DELTA).epsilon


@pytest.mark.parametrize("orders", [(), FILTER_ORDERS])
def test_what_a_failure_takes_from_the_delta_of_a_budget_is_missing_for_the_rounds(orders):
    events = [ROUND, FailureProbability(delta=0.3 * DELTA), OTHER, FailureProbability(delta=0.2 * DELTA)]
    running = Budget(epsilon=9.0, delta=DELTA, orders=orders).running(events)
    half = Budget(epsilon=9.0, delta=0.5 * DELTA, orders=orders).running([ROUND, OTHER])
    assert running.epsilon == pytest.approx(half.epsilon, rel=1e-9)
    assert running.epsilon_after(ROUND) == pytest.approx(half.epsilon_after(ROUND), rel=1e-9)
    assert running.epsilon_after(FailureProbability(delta=0.5 * DELTA)) == math.inf


DECLARED_BUDGET = {"epsilon": 4.0, "delta": DELTA, "orders": FILTER_ORDERS}


@pytest.mark.parametrize("change", [{}, {"epsilon": 4.1}, {"delta": 2 * DELTA}, {"orders": FILTER_ORDERS[1:]}])
def test_a_budget_that_was_changed_in_any_number_after_a_round_is_not_claimed(tmp_path, change):
    population = PopulationLedger.open(tmp_path / "ledger.jsonl", {"corpus": "c"})
    population.set_budget(Budget(**DECLARED_BUDGET))
    population.charge("r", 0, ROUND, 0)
    population.set_budget(Budget(**{**DECLARED_BUDGET, **change}))
    for known in (population, PopulationLedger.read(population.path)):
        assert known.is_filter is (not change)


@pytest.mark.parametrize(("orders", "is_filter"), [((), False), (FILTER_ORDERS, True)])
def test_only_a_budget_at_orders_that_were_declared_is_a_filter(tmp_path, orders, is_filter):
    """Also after a vocabulary, whose failure probability was known when the budget was declared."""
    population = PopulationLedger.open(tmp_path / "ledger.jsonl", {"corpus": "c"})
    population.settle("vocabulary", [Gaussian(noise_multiplier=9.0), FailureProbability(delta=DELTA / 10)])
    population.set_budget(Budget(**{**DECLARED_BUDGET, "orders": orders}))
    population.charge("r", 0, ROUND, 0)
    assert population.is_filter is is_filter
    claimed = all_runs(population)["claimed"]
    assert (claimed["epsilon"] == 4.0) is is_filter
