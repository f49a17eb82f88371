"""Each event of each kind counts in every figure of a statement and in the total over all runs."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from unheard.errors import BudgetExceeded, LedgerError
from unheard.privacy.accountants import FILTER_ORDERS, best_epsilon, delta_at, epsilons, replace_one_epsilon
from unheard.privacy.budget import Budget, RunningEpsilon, declaration
from unheard.privacy.events import (
    DistributedGaussian,
    FailureProbability,
    Gaussian,
    PoissonGaussian,
    Selection,
    to_record,
)
from unheard.privacy.ledger import Entry, Ledger
from unheard.privacy.population_ledger import PopulationLedger, open_population_ledger
from unheard.privacy.population_statement import all_runs
from unheard.privacy.run_ledger import SavedPosition, check_ledger, check_population
from unheard.privacy.statement import compute_statement
from unheard.privacy.statement_formats import render
from unheard.report.run_record import RunRecord

DELTA = 1.23456789e-3
KINDS = {
    "a round": PoissonGaussian(sampling_prob=1.0, noise_multiplier=3.0),
    "a release": Gaussian(noise_multiplier=4.0),
    "a failure probability": FailureProbability(delta=3e-4),
    "a selection": Selection(sampling_prob=0.3, noise_multiplier=3.0, rounds=3, mean_trials=2, drawn_from="geometric"),
}
BASE = [PoissonGaussian(sampling_prob=1.0, noise_multiplier=5.0), Gaussian(noise_multiplier=6.0)]
AT = 2.0
"""The epsilon at which deltas are compared."""


@pytest.mark.parametrize("kind", KINDS)
def test_one_more_event_of_any_kind_raises_every_figure_of_a_statement(kind):
    def figures(events):
        content = compute_statement({"delta": DELTA, "population": 100}, events, epsilon=AT)
        return {
            **{f"epsilon {name}": float(value) for name, value in content["epsilon"].items()},
            "claimed": float(content["claimed"]["epsilon"]),
            "replace one": float(content["replace_one"]["epsilon"]),
            "asked": content["asked"]["delta"],
        }

    less, more = figures(BASE), figures([*BASE, KINDS[kind]])
    for name in less:
        assert more[name] > less[name], name
    content = compute_statement({"delta": DELTA}, [*BASE, KINDS[kind]])
    assert content["delta"] == DELTA
    for point in content["curve"]:
        exact = min(delta_at([*BASE, KINDS[kind]], point["epsilon"], name) for name in ("pld", "rdp"))
        assert point["delta"] == pytest.approx(exact, rel=1e-12)
        assert point["delta"] >= min(delta_at(BASE, point["epsilon"], name) for name in ("pld", "rdp"))


def test_the_claim_of_a_statement_is_that_of_all_its_events_and_no_others():
    events = [*BASE, *KINDS.values(), *BASE]
    content = compute_statement({"delta": DELTA}, events)
    assert content["epsilon"]["rdp"] == epsilons(events, DELTA)["rdp"]
    assert content["claimed"]["epsilon"] == best_epsilon(events, DELTA).epsilon
    assert content["replace_one"]["epsilon"] == replace_one_epsilon(events, DELTA).epsilon
    assert sum(record["times"] for record in content["composed"]) == len(events)


@pytest.mark.parametrize("kind", KINDS)
def test_one_more_event_of_any_kind_raises_the_running_epsilon_and_the_total_of_all_runs(tmp_path, kind):
    running = RunningEpsilon(DELTA, events=BASE)
    before, after = running.epsilon, running.epsilon_after(KINDS[kind])
    running.charge(KINDS[kind])
    assert before < after == running.epsilon
    population = open_population_ledger(tmp_path, "corpus", [], tmp_path / "ledger.jsonl")
    for run in ("first", "second", "third"):
        population.register(run, {"name": run, "delta": DELTA}, num_charged=0)
        population.charge(run, 0, BASE[0], 0)
    for run in ("first", "second", "third"):  # charged to either run
        total = all_runs(population)
        population.charge(run, population.runs[run].num_charged, KINDS[kind], 0)
        assert float(all_runs(population)["claimed"]["epsilon"]) > float(total["claimed"]["epsilon"])
        assert all_runs(population)["charges"] == total["charges"] + 1
    assert all_runs(population)["delta"] == DELTA


def test_numbers_come_back_from_both_ledgers_to_the_last_bit(tmp_path):
    event = PoissonGaussian(sampling_prob=1 / 3, noise_multiplier=0.1 + 0.2)
    ledger = Ledger.create(tmp_path / "run.jsonl", {"delta": DELTA})
    ledger.charge(event, 0)
    assert Ledger.read(tmp_path / "run.jsonl").events == [event]
    assert Ledger.read(tmp_path / "run.jsonl").facts["delta"] == DELTA
    population = open_population_ledger(tmp_path, "corpus", [], tmp_path / "ledger.jsonl")
    population.charge("r", 0, event, 0)
    assert open_population_ledger(tmp_path, "corpus", [], tmp_path / "ledger.jsonl").events == [event]


def test_a_budget_of_exactly_n_rounds_allows_n_and_one_bit_less_allows_one_less():
    event = PoissonGaussian(sampling_prob=0.25, noise_multiplier=2.0)
    exact = RunningEpsilon(DELTA, events=[event] * 5).epsilon
    for epsilon, allowed in ((exact, 5), (math.nextafter(exact, 0), 4)):
        budget = Budget(epsilon=epsilon, delta=DELTA)
        running = budget.running()
        for number in range(allowed):
            budget.check(running, event, number)
            running.charge(event)
        with pytest.raises(BudgetExceeded):
            budget.check(running, event, allowed)


@pytest.mark.parametrize("selected", [0, 2])
def test_a_model_of_n_rounds_needs_the_charge_of_each_of_them(tmp_path, selected):
    """Also for rounds that were added to a selected run: the one charge of the selection covers only its own rounds."""
    event = PoissonGaussian(sampling_prob=0.25, noise_multiplier=2.0)
    chosen = replace(KINDS["a selection"], rounds=selected or 1)
    for missing in range(selected, 4):
        ledger = Ledger.create(tmp_path / f"{missing}.jsonl", {})
        if selected:
            ledger.charge(chosen, 0)
        for number in range(selected, 4):
            if number != missing:
                ledger.charge(event, number)
        held = SavedPosition(source=Path("model"), round=4, length=len(ledger), head=ledger.head)
        with pytest.raises(LedgerError, match=f"round {missing} was never charged"):
            check_ledger(ledger, [held])
        for few in range(selected, missing):
            length = few - selected + bool(selected)
            known = SavedPosition(source=Path("model"), round=few, length=length, head=ledger.hash_at(length))
            check_ledger(ledger, [known])
        late = SavedPosition(source=Path("model"), round=1, length=0, head=ledger.hash_at(0))
        with pytest.raises(LedgerError):  # charged, but only after the model was saved
            check_ledger(ledger, [late])


def test_a_population_may_be_one_charge_ahead_of_a_run_and_no_more(tmp_path):
    event = PoissonGaussian(sampling_prob=0.25, noise_multiplier=2.0)
    population = open_population_ledger(tmp_path, "corpus", [], tmp_path / "ledger.jsonl")
    population.register("r", {"name": "r"}, num_charged=0)
    for position in range(4):
        population.charge("r", position, event, position)
    check_population(population, "r", 4, [])
    check_population(population, "r", 3, [])
    for length in range(3):
        with pytest.raises(LedgerError, match="earlier state"):
            check_population(population, "r", length, [])


def test_a_run_that_comes_to_a_population_is_charged_for_everything_that_is_missing(tmp_path):
    events = [*BASE, *KINDS.values()]
    for held in range(len(events) + 1):
        population = open_population_ledger(tmp_path, "corpus", [], tmp_path / f"{held}.jsonl")
        population.register("r", {"name": "r"}, num_charged=held)
        assert population.settle("r", events) == len(events) - held
        assert population.events == events[held:]
        assert population.settle("r", events) == 0


def test_a_ledger_of_another_run_with_as_many_charges_is_refused(tmp_path):
    event = PoissonGaussian(sampling_prob=0.25, noise_multiplier=2.0)
    own, other = (Ledger.create(tmp_path / f"{name}.jsonl", {"run_id": name}) for name in ("own", "other"))
    for number in range(3):
        own.charge(event, number)
        other.charge(event, number)
    model = SavedPosition(source=Path("model"), round=3, length=3, head=own.head)
    check_ledger(own, [model])
    with pytest.raises(LedgerError, match="shortened or replaced"):
        check_ledger(other, [model])
    for length in range(4):  # also the first line, when nothing is charged yet
        assert own.contains(length, own.hash_at(length))
        assert not other.contains(length, own.hash_at(length))
        assert not any(own.contains(n, own.hash_at(length)) for n in (-1, *range(6)) if n != length)


def test_a_checkpoint_knows_the_ledger_of_its_population_from_every_other(tmp_path):
    event = PoissonGaussian(sampling_prob=0.25, noise_multiplier=2.0)
    own, other = (open_population_ledger(tmp_path, "corpus", [], tmp_path / f"{n}.jsonl") for n in ("own", "other"))
    for population in (own, other):  # the other ledger has the same number of charges
        population.register("r", {"name": "r"}, num_charged=0)
        population.charge("r", 0, event, 0)
    model = SavedPosition(source=Path("model"), round=1, length=1, head="", population_position=own.position)
    check_population(own, "r", 1, [model])
    with pytest.raises(LedgerError, match="shortened or replaced"):
        check_population(other, "r", 1, [model])
    check_population(other, "r", 1, [model], is_known=False)


def test_every_figure_of_a_run_that_was_stopped_is_that_of_what_it_declared():
    event = PoissonGaussian(sampling_prob=1.0, noise_multiplier=9.0)
    facts = {
        "delta": DELTA,
        "run_id": "r",
        "start": {"charges": len(BASE)},
        "declared": declaration(9, [(0, to_record(event))], None),
    }
    entries = [Entry(event=past, round=0, hash="") for past in BASE]
    entries += [Entry(event=event, round=number, hash="") for number in range(3)]
    content, whole = compute_statement(facts, entries, epsilon=AT), [*BASE, *[event] * 9]
    assert content["claimed"]["epsilon"] == best_epsilon(whole, DELTA).epsilon
    assert content["replace_one"]["epsilon"] == replace_one_epsilon(whole, DELTA).epsilon
    for point in (content["asked"], content["curve"][0], content["curve"][-1]):
        exact = min(delta_at(whole, point["epsilon"], name) for name in ("pld", "rdp"))
        assert point["delta"] == pytest.approx(exact, rel=1e-12)
    entry = json.loads(render(content, "registry"))["deployment"]["privacy_loss"]["privacy_parameters"]
    assert entry == {"epsilon": content["claimed"]["epsilon"], "delta": DELTA}
    sampling = {"users_per_round": 1.0}
    record = RunRecord(
        name="r", tables={}, facts={**facts, "population": 9, "sampling": sampling}, entries=entries, metrics=[]
    )
    assert record.epsilon == content["claimed"]["epsilon"]


def test_joined_stores_have_every_charge_of_both(tmp_path):
    ledgers, events = [], []
    for number, name in enumerate(("one", "other")):
        (tmp_path / name).mkdir()
        paid = [Gaussian(noise_multiplier=20.0 + number), FailureProbability(delta=1e-6 * (number + 1))]
        ledger = open_population_ledger(tmp_path / name, f"corpus of {name}", [to_record(event) for event in paid])
        for kind, event in KINDS.items():
            ledger.register(f"{kind} of {name}", {"name": kind, "delta": DELTA}, num_charged=0)
            ledger.charge(f"{kind} of {name}", 0, event, 0)
        ledgers.append(ledger)
        events += [*paid, *KINDS.values()]
    ledgers[0].join(ledgers[1])
    for name in ("one", "other"):
        joined = PopulationLedger.read(tmp_path / name / "ledger.jsonl")
        assert sorted(map(repr, joined.events)) == sorted(map(repr, events))
        assert all_runs(joined)["charges"] == len(events)


@pytest.mark.parametrize("orders", [(), FILTER_ORDERS])
def test_a_budget_over_all_runs_counts_what_was_charged_before_it_was_set(tmp_path, orders):
    event = PoissonGaussian(sampling_prob=0.25, noise_multiplier=2.0)
    five = Budget(epsilon=1.0, delta=DELTA, orders=orders).running([event] * 5).epsilon
    for before in range(6):
        population = open_population_ledger(tmp_path, "corpus", [], tmp_path / f"{before}.jsonl")
        population.register("r", {"name": "r", "delta": DELTA}, num_charged=0)
        for position in range(5):
            if position == before:
                population.set_budget(Budget(epsilon=five, delta=DELTA, orders=orders))
            population.charge("r" if position % 2 else "s", position, event, position)
        if before == 5:
            population.set_budget(Budget(epsilon=five, delta=DELTA, orders=orders))
        for again in (population, PopulationLedger.read(population.path)):
            assert again.budget is not None
            assert all_runs(again)["budget"]["spent"] == pytest.approx(five, rel=1e-12)
        with pytest.raises(BudgetExceeded):
            population.charge("r", 5, event, 5)


@pytest.mark.parametrize("orders", [(), FILTER_ORDERS])
def test_a_budget_over_all_runs_counts_charges_of_every_kind_whenever_it_is_set(tmp_path, orders):
    events = [*BASE, *KINDS.values(), FailureProbability(delta=1e-5)]
    budget = Budget(epsilon=99.0, delta=DELTA, orders=orders)
    spent = budget.running(events).epsilon
    for before in range(len(events) + 1):
        population = PopulationLedger.open(tmp_path / f"{before}.jsonl", {})
        population.settle("earlier", events[:before])
        population.set_budget(budget)
        population.settle("later", events[before:])
        for known in (population, PopulationLedger.read(population.path)):
            assert known._running is not None
            assert known._running.epsilon == pytest.approx(spent, rel=1e-12)
            assert known._running.failure == pytest.approx(3e-4 + 1e-5, rel=1e-12)


@pytest.mark.parametrize("declared", [3, 9])
def test_the_total_of_one_run_and_a_vocabulary_is_that_of_both(tmp_path, declared):
    """For a run of three rounds that is complete or was stopped early."""
    event = PoissonGaussian(sampling_prob=1.0, noise_multiplier=9.0)
    paid = [Gaussian(noise_multiplier=8.0), FailureProbability(delta=3e-4)]
    population = open_population_ledger(tmp_path, "corpus", [to_record(one) for one in paid])
    facts = {"name": "r", "delta": DELTA, "declared": declaration(declared, [(0, to_record(event))], None)}
    population.register("r", facts, num_charged=2)
    for number in range(3):
        population.charge("r", 2 + number, event, number)
    content, whole = all_runs(population), [*paid, *[event] * declared]
    assert content["claimed"]["epsilon"] == best_epsilon(whole, DELTA).epsilon
    assert [run["charges"] for run in content["runs"]] == [2, 3]
    alone = [RunningEpsilon(DELTA, events=events).epsilon for events in (paid, [event] * 3)]
    assert [run["alone"]["epsilon"] for run in content["runs"]] == pytest.approx(alone)


@pytest.mark.parametrize("rounds", [(0, 1, 1, 2), (0, 1, 2, 2), (0, 0, 1, 2), (0, 1, 2, 0)])
def test_a_round_that_was_done_again_counts_in_the_total_wherever_it_stands(tmp_path, rounds):
    event = PoissonGaussian(sampling_prob=1.0, noise_multiplier=9.0)
    population = open_population_ledger(tmp_path, "corpus", [])
    facts = {"name": "r", "delta": DELTA, "declared": declaration(3, [(0, to_record(event))], None)}
    population.register("r", facts, num_charged=0)
    for position, number in enumerate(rounds):
        population.charge("r", position, event, number)
    assert all_runs(population)["claimed"]["epsilon"] == best_epsilon([(event, 4)], DELTA).epsilon


def test_every_charge_of_a_run_counts_also_of_a_copy_that_is_behind(tmp_path):
    """Two copies of one run folder are trained further. Each releases models, so all charges of both count."""
    event = PoissonGaussian(sampling_prob=0.25, noise_multiplier=2.0)
    population = open_population_ledger(tmp_path, "corpus", [])
    population.register("r", {"name": "r", "delta": DELTA}, num_charged=0)
    for count, position in enumerate((0, 1, 2, 3, 0, 1, 2, 0, 3, 4), start=1):
        population.charge("r", position, event, position)
        for known in (population, PopulationLedger.read(population.path)):
            assert known.events == [event] * count
            assert len(known.runs["r"].rounds) == count
    assert all_runs(population)["charges"] == 10


def test_a_vocabulary_counts_in_the_total_of_several_runs(tmp_path):
    event = PoissonGaussian(sampling_prob=1.0, noise_multiplier=9.0)
    totals = []
    for paid in (
        [],
        [Gaussian(noise_multiplier=4.0)],
        [Gaussian(noise_multiplier=4.0), FailureProbability(delta=3e-4)],
    ):
        (tmp_path / str(len(paid))).mkdir()
        population = open_population_ledger(tmp_path / str(len(paid)), "corpus", [to_record(one) for one in paid])
        for run in ("a", "b"):
            population.charge(run, 0, event, 0)
        totals.append(all_runs(population, delta=DELTA)["claimed"]["epsilon"])
    assert totals == sorted(set(totals))


@pytest.mark.parametrize("kind", KINDS)
def test_an_event_that_is_charged_several_times_costs_as_much_as_one_after_the_other(kind):
    at_once, each = RunningEpsilon(DELTA, events=BASE), RunningEpsilon(DELTA, events=BASE)
    at_once.charge(KINDS[kind], 3)
    for _ in range(3):
        each.charge(KINDS[kind])
    assert at_once.epsilon == pytest.approx(each.epsilon, rel=1e-12)
    assert at_once.failure == pytest.approx(each.failure, rel=1e-12)
    assert RunningEpsilon(DELTA, events=[*BASE, *[KINDS[kind]] * 3]).epsilon == each.epsilon


def test_a_run_that_begins_again_keeps_what_is_charged_for_it(tmp_path):
    event = PoissonGaussian(sampling_prob=0.25, noise_multiplier=2.0)
    population = open_population_ledger(tmp_path, "corpus", [])
    for _ in range(2):
        population.register("reproducible-r", {"name": "r"}, num_charged=0, is_new=True)
        population.settle("reproducible-r", [event] * 3)
    charged_run = PopulationLedger.read(population.path).runs["reproducible-r"]
    assert (charged_run.num_charged, charged_run.begun, len(charged_run.events)) == (3, 2, 3)


def test_the_epsilon_against_the_server_counts_every_event_too():
    own = DistributedGaussian(sampling_prob=0.3, noise_multiplier=6.0, min_parties=3)
    paid = [Gaussian(noise_multiplier=7.0), FailureProbability(delta=3e-4)]
    content = compute_statement({"delta": DELTA}, [*paid, own, own])
    seen = [*paid, Gaussian(noise_multiplier=6.0), Gaussian(noise_multiplier=6.0)]
    assert content["against_server"]["epsilon"] == best_epsilon(seen, DELTA).epsilon
    for kind in ("a round", "a selection"):  # here the server itself adds the noise
        assert compute_statement({"delta": DELTA}, [KINDS[kind], own])["against_server"]["epsilon"] == "infinity"


def test_a_declared_budget_is_claimed_at_its_delta_and_above_and_not_below(tmp_path):
    population = open_population_ledger(tmp_path, "corpus", [])
    population.set_budget(Budget(epsilon=4.0, delta=DELTA, orders=FILTER_ORDERS))
    population.charge("r", 0, KINDS["a round"], 0)
    for delta, is_claimed in ((DELTA, True), (2 * DELTA, True), (DELTA / 2, False), (DELTA * (1 - 1e-9), False)):
        content = all_runs(population, delta=delta)
        assert ("declared budget" in content["claimed"]["accountant"]) == is_claimed
        assert content["delta"] == delta


def test_the_total_is_stated_at_the_smallest_delta_that_a_run_declared(tmp_path):
    population = open_population_ledger(tmp_path, "corpus", [])
    for run, delta in (("a", DELTA), ("b", DELTA / 3), ("c", DELTA / 2)):
        population.register(run, {"name": run, "delta": delta}, num_charged=0)
        population.charge(run, 0, KINDS["a round"], 0)
    assert all_runs(population)["delta"] == DELTA / 3


def test_models_that_were_released_are_known_after_stores_are_joined(tmp_path):
    one, other = (PopulationLedger.open(tmp_path / f"{name}.jsonl", {}) for name in ("one", "other"))
    one.record_release("a", "11" * 32)
    other.record_release("b", "22" * 32)
    before = other.position
    one.join(other)
    for path in ("one", "other"):
        joined = PopulationLedger.read(tmp_path / f"{path}.jsonl")
        assert joined.released == {"11" * 32: "a", "22" * 32: "b"}
    assert PopulationLedger.read(tmp_path / "other.jsonl").contains(before) is True
    assert PopulationLedger.read(tmp_path / "one.jsonl").contains(before) is None


@pytest.mark.parametrize("delta", [1e-12, 1e-5, 1e-2])
def test_the_total_is_stated_at_the_delta_of_the_budget(tmp_path, delta):
    population = open_population_ledger(tmp_path, "corpus", [])
    population.set_budget(Budget(epsilon=40.0, delta=delta, orders=FILTER_ORDERS))
    population.register("r", {"name": "r", "delta": 1e-3}, num_charged=0)
    population.charge("r", 0, KINDS["a round"], 0)
    assert all_runs(population)["delta"] == delta


def test_only_a_seeded_run_may_have_charges_of_several_folders(tmp_path):
    """A run folder that was restored to an earlier state is an error, even if its rounds were charged several times."""
    population = open_population_ledger(tmp_path, "corpus", [])
    for run in ("r", "reproducible-r"):
        population.register(run, {"name": run}, num_charged=0)
        for position in (0, 1, 2, 3, 1, 2):
            population.charge(run, position, KINDS["a round"], position)
    check_population(population, "reproducible-r", 1, [])
    with pytest.raises(LedgerError, match="earlier state"):
        check_population(population, "r", 1, [])


def test_a_population_holds_as_many_entries_of_a_run_as_the_furthest_of_its_copies_had(tmp_path):
    """Charges of copies that are behind, or late charges, do not hide that a folder was restored to an earlier state."""
    population = open_population_ledger(tmp_path, "corpus", [])
    population.register("r", {"name": "r"}, num_charged=0)
    for position, held in ((0, 1), (1, 2), (2, 3), (0, 3), (3, 4), (1, 4)):
        population.charge("r", position, KINDS["a round"], position)
        for known in (population, PopulationLedger.read(population.path)):
            assert known.runs["r"].num_charged == held


def test_a_seeded_run_that_was_never_repeated_cannot_be_put_back(tmp_path):
    population = open_population_ledger(tmp_path, "corpus", [])
    for run, positions in (("reproducible-r", (0, 1, 2, 3)), ("reproducible-s", (0, 1, 2, 1, 2, 3))):
        population.register(run, {"name": run}, num_charged=0)
        for position in positions:
            population.charge(run, position, KINDS["a round"], position)
    check_population(population, "reproducible-s", 1, [])
    with pytest.raises(LedgerError, match="earlier state"):
        check_population(population, "reproducible-r", 1, [])


def test_two_stores_with_one_ledger_pay_for_the_words_of_each(tmp_path):
    """Also if the names of the corpora have a common prefix."""
    events = []
    for number, name in enumerate(("a" * 16, "a" * 15 + "b", "b" * 16)):
        (tmp_path / name).mkdir()
        events.append(Gaussian(noise_multiplier=5.0 + number))
        for _ in range(2):  # opening a store again charges nothing
            population = open_population_ledger(
                tmp_path / name, name, [to_record(events[-1])], tmp_path / "ledger.jsonl"
            )
            assert population.events == events


def test_two_copies_of_a_ledger_that_were_charged_alike_are_two_charges_when_they_are_joined(tmp_path):
    event = KINDS["a round"]
    one = PopulationLedger.open(tmp_path / "one.jsonl", {"corpus": "c"})
    one.register("r", {"name": "r"}, num_charged=0)
    one.charge("r", 0, event, 0)
    shutil.copy(tmp_path / "one.jsonl", tmp_path / "other.jsonl")
    other = PopulationLedger.open(tmp_path / "other.jsonl", {"corpus": "c"})
    for copy in (one, other):
        copy.charge("r", 1, event, 1)
    one.join(other)
    assert one.events == [event] * 3


def test_every_model_of_a_run_is_known_as_one_of_its_users(tmp_path):
    population = PopulationLedger.open(tmp_path / "ledger.jsonl", {"corpus": "c"})
    digests = [f"{number:02d}" * 32 for number in range(5)]
    for number, digest in enumerate(digests):
        population.record_release("r" if number % 2 else "s", digest)
    assert list(PopulationLedger.read(population.path).released) == digests


@pytest.mark.parametrize("delta", [1e-12, 1e-7, 1e-2])
def test_a_statement_is_made_at_the_delta_that_was_declared(delta):
    content = compute_statement({"delta": delta, "population": 50}, BASE, epsilon=AT)
    assert content["delta"] == delta
    assert content["claimed"]["epsilon"] == best_epsilon(BASE, delta).epsilon
    for point in content["curve"]:  # below the claimed epsilon each delta is larger than the declared one
        asked = compute_statement({"delta": delta}, BASE, epsilon=point["epsilon"])["asked"]
        assert asked == point
        assert (point["delta"] > delta) == (point["epsilon"] < content["claimed"]["epsilon"])
