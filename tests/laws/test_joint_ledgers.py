"""The ledger of a run, the ledger of its population and the files of the run agree: no charge is missing in one of them."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from unheard import storage
from unheard.errors import LedgerError, UnprovenCombination
from unheard.privacy import population_ledger, statement
from unheard.privacy.accountants import FILTER_ORDERS, epsilons
from unheard.privacy.budget import EARLIER_RUN, Budget, declaration
from unheard.privacy.events import (
    CorrelatedGaussian,
    DistributedGaussian,
    ExampleGaussian,
    FailureProbability,
    Gaussian,
    NonPrivate,
    PoissonGaussian,
    Selection,
    to_record,
)
from unheard.privacy.ledger import Entry, Ledger
from unheard.privacy.population_ledger import FILE, RECORD, PopulationLedger, known_position, open_population_ledger
from unheard.privacy.population_statement import all_runs
from unheard.privacy.run_ledger import REPEATED_FACTS, JointLedger, SavedPosition, check_ledger, saved_positions
from unheard.privacy.statement import compute_statement, rounded_up
from unheard.privacy.trade_off import figures_of_pair
from unheard.randomness import ReproducibleStreams
from unheard.run_folder import RunFolder
from unheard.training.checkpoint import _save
from unheard.training.initialise import _inherited

DELTA = 1.23456789e-3
ROUND = PoissonGaussian(sampling_prob=1.0, noise_multiplier=9.0)
VOCABULARY = [Gaussian(noise_multiplier=8.0), FailureProbability(delta=3e-4)]
FACTS = {
    "population": 67,
    "delta": DELTA,
    "randomness": ReproducibleStreams(seed=1, scope="", shared_cohorts=True).describe(),
    "drop_duplicates": True,
    "synthetic": "fitted to other users",
    "declared": declaration(9, [(0, to_record(ROUND))], None),
}


def run_ledger(folder: Path, charges: int, **facts) -> Ledger:
    """Return the ledger of a run on a store with a private vocabulary, after some rounds."""
    folder.mkdir()
    start = {"charges": len(VOCABULARY)}
    ledger = Ledger.create(folder / "ledger.jsonl", {"run_id": folder.name, "start": start, **facts})
    ledger.charge_all(VOCABULARY, 0)
    for number in range(charges):
        ledger.charge(ROUND, number)
    return ledger


@pytest.mark.parametrize("known", range(4))
def test_a_run_brings_every_charge_that_a_population_lacks(tmp_path, known):
    """The population's ledger is new, or it was restored to an earlier state and has some of the charges."""
    ledger = run_ledger(tmp_path / "r", 3)
    population = PopulationLedger.open(tmp_path / "ledger.jsonl", {})
    if known:
        population.register("r", {"name": "r"}, num_charged=0)
        population.settle("r", ledger.entries[:known])
    joint = JointLedger(ledger, population)
    joint.charge(ROUND, 3)
    for held in (population, PopulationLedger.read(population.path)):
        assert held.runs["r"].events == ledger.events == [*VOCABULARY, *[ROUND] * 4]
        assert held.runs["r"].num_charged == len(ledger)
        assert held.runs["r"].facts.get("came_with", 0) == (0 if known else 5)
    warned = "came here with 5 charges" in str(all_runs(population, delta=DELTA)["warnings"])
    assert warned == (not known)


@pytest.mark.parametrize("way", ["begin", "come", "as the parent"])
@pytest.mark.parametrize("fact", FACTS)
def test_a_population_repeats_each_public_fact_of_a_run(tmp_path, way, fact):
    population = PopulationLedger.open(tmp_path / "ledger.jsonl", {})
    ledger = run_ledger(tmp_path / "r", 1, **FACTS)
    if way == "begin":
        JointLedger.register(ledger, population, "r")
    elif way == "come":
        JointLedger(ledger, population)
    else:
        JointLedger.register(run_ledger(tmp_path / "child", 0), population, "child", parent=ledger)
    facts = PopulationLedger.read(population.path).runs["r"].facts
    assert (facts["name"], facts[fact]) == ("r", FACTS[fact])
    assert set(REPEATED_FACTS) == set(FACTS)


def test_runs_that_drew_the_same_cohorts_have_no_total_and_no_budget(tmp_path):
    population = PopulationLedger.open(tmp_path / "ledger.jsonl", {})
    for name in ("a", "b"):
        all_runs(population, delta=DELTA)
        JointLedger.register(run_ledger(tmp_path / name, 0, **FACTS), population, name)
    for refused in (
        lambda: all_runs(population, delta=DELTA),
        lambda: population.set_budget(Budget(epsilon=9.0, delta=DELTA)),
    ):
        with pytest.raises(UnprovenCombination, match="a, b"):
            refused()


def test_no_round_is_charged_to_a_budget_if_two_runs_draw_the_same_cohorts(tmp_path):
    population = PopulationLedger.open(tmp_path / "ledger.jsonl", {})
    population.set_budget(Budget(epsilon=9.0, delta=DELTA))
    first, second = (run_ledger(tmp_path / name, 0, **FACTS) for name in ("a", "b"))
    JointLedger(first, population).charge(ROUND, 0)
    with pytest.raises(UnprovenCombination):
        JointLedger(second, population).charge(ROUND, 0)
    assert len(second) == len(VOCABULARY)


def test_the_charges_of_an_earlier_run_are_under_its_own_name_and_counted_once(tmp_path):
    parent, population = run_ledger(tmp_path / "parent", 2), PopulationLedger.open(tmp_path / "ledger.jsonl", {})
    child = run_ledger(tmp_path / "child", 0)
    child.charge_all(parent.events, 0)
    JointLedger.register(child, population, "child", parent=parent, store="digest")
    joint = JointLedger(child, population)
    joint.charge(ROUND, 0)
    known = PopulationLedger.read(population.path)
    assert known.runs["parent"].events == parent.events
    assert known.runs["child"].events == [ROUND]
    assert known.runs["child"].num_charged == len(child)
    assert known.runs["child"].facts["store"] == "digest"
    assert known.events == [*parent.events, ROUND]


def test_what_an_earlier_run_was_charged_since_the_population_saw_it_is_charged_too(tmp_path):
    """It was trained further beside a copy of the store, and the new run begins from its last model."""
    parent, population = run_ledger(tmp_path / "parent", 2), PopulationLedger.open(tmp_path / "ledger.jsonl", {})
    JointLedger(parent, population)
    parent.charge(ROUND, 2)
    JointLedger.register(run_ledger(tmp_path / "child", 0), population, "child", parent=parent)
    assert population.runs["parent"].events == parent.events


def test_each_file_of_a_run_is_asked_for_everything_that_it_remembers(tmp_path):
    folder = RunFolder(tmp_path)
    folder.checkpoints.mkdir()
    expected = []
    paths = [folder.checkpoints / f"round-{number:08d}.safetensors" for number in (2, 4, 11)]
    for number, path in zip((2, 4, 11, 9), [*paths, folder.model], strict=True):
        position = {"ledger": "first", "length": number + 5, "head": f"head of population {number}"}
        facts = {"round": number, "ledger_length": number + 3, "ledger_head": f"head {number}"}
        _save(path, {"params": torch.zeros(1)}, {**facts, "people": position, "nodes": f"nodes {number}"})
        expected.append(
            SavedPosition(
                source=path,
                round=number,
                length=number + 3,
                head=f"head {number}",
                population_position=position,
                nodes=f"nodes {number}",
            )
        )
    assert saved_positions(folder) == expected
    _save(folder.model, {"params": torch.zeros(1)}, {})  # of version 0.1
    old = SavedPosition(source=folder.model, round=0, length=None, head=None, population_position=None, nodes="unknown")
    assert saved_positions(folder)[-1] == old


LATER = {
    "the same": {},
    "a larger epsilon": {"epsilon": 9.5},
    "a smaller epsilon": {"epsilon": 8.5},
    "another delta": {"delta": DELTA / 2},
    "other orders": {"orders": FILTER_ORDERS[:3]},
    "no orders": {"orders": ()},
}


@pytest.mark.parametrize("later", LATER)
@pytest.mark.parametrize("has_rounds", [False, True])
def test_only_a_budget_that_was_never_changed_is_a_filter(tmp_path, later, has_rounds):
    population = PopulationLedger.open(tmp_path / "ledger.jsonl", {})
    population.settle("vocabulary", VOCABULARY)  # charged before the budget was declared, and counted in it
    first = Budget(epsilon=9.0, delta=DELTA, orders=FILTER_ORDERS)
    population.set_budget(first)
    if has_rounds:
        population.charge("r", 0, ROUND, 0)
    assert population.is_filter
    population.set_budget(replace(first, **LATER[later]))
    for known in (population, PopulationLedger.read(population.path)):
        assert known.is_filter == (later == "the same")


@pytest.mark.parametrize("before", ["a round", "a budget", "a failure", "no orders", "nothing"])
def test_only_a_budget_that_came_before_rounds_and_other_budgets_is_a_filter(tmp_path, before):
    population = PopulationLedger.open(tmp_path / "ledger.jsonl", {})
    budget = Budget(epsilon=9.0, delta=DELTA, orders=() if before == "no orders" else FILTER_ORDERS)
    if before == "a round":
        population.charge("r", 0, ROUND, 0)
    elif before == "a budget":
        population.set_budget(replace(budget, orders=()))
    elif before == "a failure":
        population.settle("vocabulary", VOCABULARY)
    population.set_budget(budget)
    assert population.is_filter == (before in ("nothing", "a failure"))
    population.settle("other words", [FailureProbability(delta=1e-5)])
    assert not population.is_filter  # the failure probability was not known when the budget was declared
    assert not PopulationLedger.read(population.path).is_filter


def test_a_part_of_a_store_has_no_ledger_of_its_own(tmp_path):
    """Charges in a ledger of the part would be missing in the ledger of the whole store."""
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "part.json").write_text("{}")
    with pytest.raises(LedgerError, match="part of a store"):
        open_population_ledger(tmp_path / "part", "corpus", [])
    assert not (tmp_path / "part" / "ledger.jsonl").exists()
    assert open_population_ledger(tmp_path / "part", "corpus", [], tmp_path / "ledger.jsonl").events == []


def test_a_copy_of_a_run_is_refused_at_every_attempt_within_a_mechanism(tmp_path):
    population = PopulationLedger.open(tmp_path / "ledger.jsonl", {})
    event = CorrelatedGaussian(sampling_prob=0.5, noise_multiplier=2.0, block=2, index=0)
    for position in range(6):
        population.charge("r", position, replace(event, index=position), position)
    for position in range(1, 6):
        with pytest.raises(LedgerError, match="Another copy of this run"):
            population.charge("r", position, replace(event, index=position), position)
        before = population.runs["r"].last_once  # what a process knows that was killed between its two charges
        population.charge("r", position, replace(event, index=position), position, again=before)
        with pytest.raises(LedgerError, match="Another copy of this run"):  # a copy of its folder knows the same
            population.charge("r", position, replace(event, index=position), position, again=before)
    population.charge("r", 3, event, 3)  # a new mechanism, which pays for itself
    assert len(population.events) == 12


COUNTED = {
    "a round": (ROUND, 1),
    "a round of nodes": (DistributedGaussian(sampling_prob=1.0, noise_multiplier=3.0, min_parties=2), 1),
    "a round of examples": (ExampleGaussian(sampling_prob=1.0, examples_per_user=2, noise_multiplier=3.0), 1),
    "a round of correlated noise": (CorrelatedGaussian(sampling_prob=1.0, noise_multiplier=3.0, block=2, index=0), 1),
    "a round without noise": (NonPrivate(reason="none"), 1),
    "a selection": (
        Selection(sampling_prob=1.0, noise_multiplier=3.0, rounds=7, mean_trials=2, drawn_from="geometric"),
        7,
    ),
    "a release": (VOCABULARY[0], 0),
    "a failure": (VOCABULARY[1], 0),
}


@pytest.mark.parametrize("kind", COUNTED)
def test_a_statement_counts_the_rounds_of_every_kind(kind):
    event, rounds = COUNTED[kind]
    entries = [Entry(event=one, round=0, hash=f"{i}") for i, one in enumerate([*VOCABULARY, event, event])]
    assert statement._rounds(entries) == {"charged": 2 * rounds, "redone": int(rounds == 1)}
    assert statement._ledger(entries) == {"charges": 4, "head": "3"}
    paid = statement._vocabulary_cost([entry.event for entry in entries], DELTA)
    assert paid["events"] == (4 if rounds == 0 else 2)


def test_a_total_shows_the_epsilon_of_every_event_by_every_accountant(tmp_path):
    population = open_population_ledger(tmp_path, "corpus", [to_record(event) for event in VOCABULARY])
    for run in ("a", "b"):  # equal events are not merged
        population.register(run, {"name": run, "delta": DELTA}, num_charged=0)
        for position in range(2):
            population.charge(run, position, ROUND, position)
    assert all_runs(population)["epsilon"] == epsilons([*VOCABULARY, *[ROUND] * 4], DELTA)


@pytest.mark.parametrize("rounds", [3, 9, 12])
def test_a_run_that_came_with_its_charges_has_the_total_of_one_that_was_charged_here(tmp_path, rounds):
    """Also if the run was stopped, or was made longer than declared. Charges from another ledger have no round number."""
    ledger = run_ledger(tmp_path / "r", rounds, **FACTS)
    totals = []
    for way in ("charged here", "came"):
        population = PopulationLedger.open(tmp_path / f"{way}.jsonl", {})
        if way == "came":
            population.settle("vocabulary", VOCABULARY)
            population.register("r", {"name": "r", **FACTS}, num_charged=2)
            population.settle("r", ledger.entries)
        else:
            population.settle("vocabulary", VOCABULARY)
            population.register("r", {"name": "r", **FACTS}, num_charged=2)
            for position, entry in enumerate(ledger.entries[2:], start=2):
                population.charge("r", position, entry.event, entry.round)
        totals.append(all_runs(population, delta=DELTA))
    assert totals[0]["claimed"] == totals[1]["claimed"]
    assert totals[0]["attacker"] == totals[1]["attacker"]
    own = compute_statement(ledger.facts, ledger.entries)["claimed"]
    assert totals[0]["claimed"]["epsilon"] == own["epsilon"]
    # With 12 rounds the claim is at another delta, so an attacker's rates follow from the claim and not from the events.
    if rounds == 12:
        pair = figures_of_pair(own["epsilon"], DELTA)
        assert totals[0]["attacker"] == {**pair.record, "method": pair.method}


def test_a_run_is_named_as_one_without_noise_if_any_of_its_rounds_was(tmp_path):
    population = PopulationLedger.open(tmp_path / "ledger.jsonl", {})
    for name, events in (("clean", [ROUND]), ("mixed", [ROUND, NonPrivate(reason="none"), ROUND])):
        population.register(name, {"name": name, "delta": DELTA}, num_charged=0)
        population.settle(name, events)
    content = all_runs(population)
    assert "without noise: mixed)" in content["claim"]
    assert [w for w in content["warnings"] if "added no noise" in w] == [
        "run 'mixed' added no noise: epsilon over all runs is infinite."
    ]


def test_each_weakness_of_a_run_is_a_warning_of_its_statement():
    public, seeded = "a model declared public", {"mode": "reproducible"}
    cases = [
        ({"start": {"from": public}}, "declared public"),
        ({"start": {"from": "an earlier run", "base": public}}, "declared public"),
        ({"start": {"randomness": seeded}}, "REPRODUCIBLE NOISE: the noise of the run that this one began from"),
        ({"randomness": seeded}, "REPRODUCIBLE NOISE: the noise was"),
        ({"drop_duplicates": True}, "were dropped"),
        ({"start": {"drop_duplicates": True}}, "were dropped"),
        ({"synthetic": "fitted to a"}, "SYNTHETIC TEXT: the users of this store are not people"),
        ({"start": {"synthetic": "fitted to a"}}, "SYNTHETIC TEXT: the run that this one began from"),
        ({"population": 100, "delta": 0.01}, "is not below 1/users"),
        ({"population": 100, "delta": 0.015}, "is not below 1/users"),
    ]
    for facts, words in cases:
        warnings = compute_statement({"delta": DELTA, **facts}, [ROUND])["warnings"]
        assert len([warning for warning in warnings if words in warning]) == 1, facts
    assert not compute_statement({"delta": 0.0099, "population": 100, "start": {"from": "seed 0"}}, [ROUND])["warnings"]


def test_the_claim_in_words_has_the_digits_of_the_claim():
    content = compute_statement({"delta": DELTA}, [ROUND])
    pair = f"({rounded_up(content['claimed']['epsilon'])}, {rounded_up(DELTA, 3)})"
    assert content["claim"].startswith(f"{pair}-differential privacy")


def test_ledgers_and_the_record_of_a_store_are_written_under_their_locks(tmp_path, monkeypatch):
    """Another process cannot take the lock while the file is written."""
    written = []

    def under_lock(write, lock):
        def checked(path, *args, **named):
            with pytest.raises(storage.FileInUse), storage.locked(lock(path)):
                pass
            written.append(path.name)
            return write(path, *args, **named)

        return checked

    monkeypatch.setattr(
        population_ledger.storage,
        "replace_file",
        under_lock(storage.replace_file, lambda path: path.with_name(f".{path.name}.lock")),
    )
    monkeypatch.setattr(
        storage, "append", under_lock(storage.append, lambda path: path.with_name(f".{path.name}.lock"))
    )
    population = open_population_ledger(tmp_path, "corpus", [to_record(event) for event in VOCABULARY])
    population.charge("r", 0, ROUND, 0)
    population.set_budget(Budget(epsilon=9.0, delta=DELTA))
    population.record_release("r", "digest")
    population.remember()
    assert sorted(set(written)) == ["ledger.jsonl", "ledgers.json"]


def remembered(store: Path) -> int:
    """Return the number of lines, without the header, that a store remembers of its ledger."""
    position = known_position(store, store / FILE)
    assert position is not None
    return position["length"]


def test_stores_that_are_joined_one_after_the_other_hold_every_position_that_a_run_remembers(tmp_path):
    """Also for a run that was under way on the first store: its ledger was moved, and moved again."""
    populations = []
    for name in ("first", "second", "third"):
        (tmp_path / name).mkdir()
        populations.append(open_population_ledger(tmp_path / name, name, []))
        populations[-1].charge(name, 0, ROUND, 0)
    held = [population.position for population in populations]
    under_way, read_once = populations[0], PopulationLedger.read(populations[0].path)
    for number, (earlier, later) in enumerate(pairwise(populations), start=1):
        later.join(earlier)
        under_way.charge("first", number, ROUND, number)
    read_once.charge("second", 1, ROUND, 1)
    for population in (under_way, read_once, PopulationLedger.read(tmp_path / "first" / FILE)):
        assert all(population.contains(position) for position in held)
        assert not any(population.contains({**position, "head": "0" * 64}) for position in held)
    under_way.remember()
    for name in ("first", "second"):  # each store knows where its own file ends, also if it was moved
        path = tmp_path / name / FILE
        open_population_ledger(tmp_path / name, name, [])
        assert remembered(tmp_path / name) == len(path.read_bytes().splitlines()) - 1
    path = tmp_path / "first" / FILE
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]))
    with pytest.raises(LedgerError, match="shortened or replaced"):
        open_population_ledger(tmp_path / "first", "first", [])


def test_a_run_that_is_under_way_when_its_ledger_is_moved_remembers_it_in_its_own_store(tmp_path):
    (tmp_path / "own").mkdir()
    under_way = open_population_ledger(tmp_path / "own", "corpus", [])
    PopulationLedger.open(tmp_path / "other.jsonl", {}).join(PopulationLedger.read(under_way.path))
    under_way.charge("r", 0, ROUND, 0)
    (tmp_path / "own" / RECORD).unlink(missing_ok=True)  # as after a stop before the move was recorded
    under_way.remember()
    assert remembered(tmp_path / "own") == 1  # the line that says where it is now


@pytest.mark.parametrize("length", range(4))
def test_a_ledger_holds_a_position_only_with_the_whole_hash_of_its_line(tmp_path, length):
    """A checkpoint without a hash, or with a part of one, is of no known ledger."""
    ledger = run_ledger(tmp_path / "r", charges=1)
    population = PopulationLedger.open(tmp_path / "ledger.jsonl", {})
    population.settle("r", ledger.events)
    own, position = ledger.hash_at(length), population._file.hashes
    others = lambda right: ["", None, right[:16], right[:-1], right + "0", right.upper(), right[::-1]]  # noqa: E731
    assert ledger.contains(length, own)
    assert not any(ledger.contains(length, other) for other in others(own))
    for other in others(own):
        source = SavedPosition(source=tmp_path / "model", round=0, length=length, head=other)
        with pytest.raises(LedgerError, match="shortened or replaced"):
            check_ledger(ledger, [source])
    known = {"ledger": position[0], "length": length, "head": position[length]}
    assert population.contains(known)
    assert not any(population.contains({**known, "head": other}) for other in others(position[length]))


@pytest.mark.parametrize(
    ("weakness", "words"),
    [
        ({"randomness": {"mode": "reproducible"}}, "REPRODUCIBLE NOISE"),
        ({"drop_duplicates": True}, "were dropped"),
        ({"synthetic": "fitted to a"}, "SYNTHETIC TEXT"),
        ({"start": {"from": "a model declared public"}}, "declared public"),
        ({"start": {"from": "seed 0", "base": "a model declared public"}}, "declared public"),
    ],
)
def test_a_weakness_of_a_run_is_a_warning_of_every_run_that_descends_from_it(weakness, words):
    facts = {"delta": DELTA, "randomness": {"mode": "secure"}, "drop_duplicates": False, **weakness}
    for _ in range(4):
        assert any(words in warning for warning in compute_statement(facts, [ROUND])["warnings"])
        start = {"from": EARLIER_RUN, "charges": 1, **_inherited(facts)}
        facts = {"delta": DELTA, "randomness": {"mode": "secure"}, "drop_duplicates": False, "start": start}


def test_a_ledger_is_the_same_for_its_store_by_whichever_path_both_are_named(tmp_path, monkeypatch):
    (tmp_path / "own").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "own")
    monkeypatch.chdir(tmp_path)
    stores = [Path("own"), tmp_path / "own", tmp_path / "link", tmp_path / "own" / ".." / "link"]
    open_population_ledger(stores[0], "corpus", []).charge("r", 0, ROUND, 0)
    position = open_population_ledger(stores[0], "corpus", []).position
    paths = [(store, each / FILE) for store in stores for each in stores]
    assert all(known_position(store, path) == position for store, path in paths)
    (tmp_path / "own" / FILE).unlink()
    for store, path in paths:
        with pytest.raises(LedgerError, match="missing"):
            open_population_ledger(store, "corpus", [], path)
