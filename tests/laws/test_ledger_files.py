"""Two processes use one ledger or one store: each decides with what the other has written, and no charge is lost."""

import itertools
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from unheard import storage
from unheard.errors import InvalidValue, LedgerError
from unheard.privacy import ledger as chain
from unheard.privacy import population_ledger
from unheard.privacy.budget import Budget
from unheard.privacy.events import Gaussian, PoissonGaussian, to_record
from unheard.privacy.ledger import ChainedFile, Ledger, run_id
from unheard.privacy.population_ledger import (
    FILE,
    MAX_MOVES,
    ChargedRun,
    PopulationLedger,
    continue_ledger,
    known_ledgers,
    known_position,
    ledger_to_join,
    mark_joined,
    open_population_ledger,
    read_population_ledger,
    remember_position,
)
from unheard.privacy.run_ledger import JointLedger

DELTA = 1.23456789e-3
EVENTS = [PoissonGaussian(sampling_prob=1.0, noise_multiplier=z) for z in (5.0, 6.0, 7.0, 8.0)]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger.jsonl"


def position(length: int, head: str = "h") -> dict:
    return {"ledger": "x", "length": length, "head": head}


# The record of the ledgers in a store


@pytest.mark.parametrize("own", ["a position", "an earlier ledger", "that it was joined"])
def test_what_another_process_records_in_a_store_before_the_lock_is_held_is_kept(tmp_path, monkeypatch, own):
    """Otherwise a run that begins at the same time would remove the position of another ledger, and a cut stays unseen."""
    first, other = tmp_path / "first.jsonl", tmp_path / "other.jsonl"
    if own == "that it was joined":
        continue_ledger(tmp_path, first)
    lock, entered = storage.locked, []

    def late(*args, **named):
        if not entered:
            entered.append(args)
            remember_position(tmp_path, other, position(3))
        return lock(*args, **named)

    monkeypatch.setattr(population_ledger.storage, "locked", late)
    if own == "a position":
        remember_position(tmp_path, first, position(5))
        assert known_position(tmp_path, first) == position(5)
    elif own == "an earlier ledger":
        continue_ledger(tmp_path, first)
        assert ledger_to_join(tmp_path) == first
    else:
        mark_joined(tmp_path)
        assert ledger_to_join(tmp_path) is None
    assert entered
    assert known_position(tmp_path, other) == position(3)


def test_a_later_position_that_another_process_records_before_the_lock_is_held_stays(tmp_path, monkeypatch):
    lock, entered = storage.locked, []

    def late(*args, **named):
        if not entered:
            entered.append(args)
            remember_position(tmp_path, tmp_path / FILE, position(9))
        return lock(*args, **named)

    monkeypatch.setattr(population_ledger.storage, "locked", late)
    remember_position(tmp_path, tmp_path / FILE, position(5))
    assert known_position(tmp_path, tmp_path / FILE) == position(9)


def test_a_store_lists_every_ledger_that_was_recorded_and_keeps_the_position_of_each(tmp_path):
    store = tmp_path / "store"
    store.mkdir()
    paths = [store / FILE, tmp_path / "people.jsonl", store / "named.jsonl", tmp_path / "other" / FILE]
    for number, path in enumerate(paths):
        assert known_position(store, path) is None
        remember_position(store, path, position(number, f"{number}"))
    continue_ledger(store, tmp_path / "earlier.jsonl")
    mark_joined(store)
    assert [known_position(store, path) for path in paths] == [position(i, f"{i}") for i in range(4)]
    assert known_ledgers(store) == paths


def test_a_store_finds_the_ledger_that_it_continues_from_any_working_folder(tmp_path, monkeypatch):
    (tmp_path / "store").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    PopulationLedger.open("earlier.jsonl", {}).charge("a run", 0, EVENTS[0], 0)
    continue_ledger(Path("store"), Path("earlier.jsonl"))
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert ledger_to_join(tmp_path / "store") == tmp_path / "earlier.jsonl"
    assert open_population_ledger(tmp_path / "store", "c", []).events == EVENTS[:1]
    assert not list((tmp_path / "elsewhere").iterdir())


def test_an_earlier_ledger_that_is_gone_is_not_begun_anew(tmp_path):
    earlier, store = tmp_path / "earlier.jsonl", tmp_path / "store"
    store.mkdir()
    PopulationLedger.open(earlier, {}).charge("a run", 0, EVENTS[0], 0)
    continue_ledger(store, earlier)
    earlier.unlink()
    for _ in range(2):
        with pytest.raises(LedgerError, match="is missing"):
            open_population_ledger(store, "c", [])
        assert not earlier.exists()
        assert ledger_to_join(store) == earlier


# A ledger with several writers


def test_each_line_is_decided_with_what_another_process_has_written(path):
    """An object that has read the file earlier does not know the lines of the other one until it holds the lock."""
    PopulationLedger.open(path, {})
    own, other = PopulationLedger.open(path, {}), PopulationLedger.open(path, {})
    other.register("r", {"name": "r"}, num_charged=0)
    own.register("r", {"name": "second"}, num_charged=0)
    assert (own.runs["r"].begun, own.runs["r"].facts) == (1, {"name": "r"})
    assert other.settle("r", EVENTS[:2]) == 2
    assert own.settle("r", EVENTS[:3]) == 1
    other.record_release("r", "digest")
    own.record_release("s", "digest")
    assert own.released == {"digest": "r"}
    lines = len(path.read_bytes().splitlines())
    assert other.settle("r", EVENTS[:3]) == 0
    own.record_release("s", "digest")
    assert len(path.read_bytes().splitlines()) == lines == 6
    known = PopulationLedger.read(path)
    assert known.runs["r"].events == EVENTS[:3]
    assert known.runs["r"].rounds == [-1] * 3
    assert known.released == {"digest": "r"}


def test_an_event_is_charged_under_its_run_its_position_and_its_round(path):
    population = PopulationLedger.open(path, {})
    population.charge("r", 4, EVENTS[0], 11)
    population.charge("s", 7, EVENTS[1], 12)
    population.charge("r", 2, EVENTS[2], 13)
    for known in (population, PopulationLedger.read(path)):
        assert [*known.runs] == ["r", "s"]
        r, s = known.runs.values()
        assert (r.events, r.rounds, r.num_charged, r.is_charged_again) == ([EVENTS[0], EVENTS[2]], [11, 13], 5, True)
        assert (s.events, s.rounds, s.num_charged, s.is_charged_again) == ([EVENTS[1]], [12], 8, False)
        assert known.events == [EVENTS[0], EVENTS[2], EVENTS[1]]
        spent = Budget(epsilon=1, delta=DELTA).running(known.events).epsilon
        assert known.running(DELTA).epsilon == spent
        assert known.running(2 * DELTA, "moments").asked == "moments"
        assert known.running(2 * DELTA, "moments").delta == 2 * DELTA


@pytest.mark.parametrize("is_seeded", [True, False])
@pytest.mark.parametrize("begun", [0, 1, 2])
@pytest.mark.parametrize("again", [True, False])
def test_only_a_seeded_run_that_began_or_was_charged_twice_has_repeats(is_seeded, begun, again):
    run = ChargedRun(id="reproducible-0" if is_seeded else "0-reproducible-", begun=begun, is_charged_again=again)
    assert run.has_repeats == (is_seeded and (begun == 2 or again))


def test_a_ledger_is_read_after_the_position_that_it_is_compared_with(tmp_path, monkeypatch):
    """A run that is charged while the ledger is read, and records a new position, is no false alarm."""
    writer = open_population_ledger(tmp_path, "c", [])
    writer.charge("r", 0, EVENTS[0], 0)
    writer.remember()
    real, added = PopulationLedger.read, itertools.count(1)

    def read(path):
        population = real(path)
        for _ in range(2):
            number = next(added)
            writer.charge("r", number, EVENTS[number % 4], number)
        writer.remember()
        return population

    monkeypatch.setattr(PopulationLedger, "read", read)
    for _ in range(2):
        read_population_ledger(tmp_path, tmp_path / FILE)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_ledgers_are_locked_in_the_same_order_whichever_is_joined(tmp_path, monkeypatch, order):
    """If two processes locked them in two orders, each could hold one lock and wait for the other."""
    ledgers = [PopulationLedger.open(tmp_path / f"{name}.jsonl", {}) for name in "ab"]
    taken, locked = [], ChainedFile.locked
    monkeypatch.setattr(ChainedFile, "locked", lambda file: (taken.append(file.path.name), locked(file))[1])
    ledgers[order[0]].join(ledgers[order[1]])
    assert taken == ["a.jsonl", "b.jsonl"]


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("own", [True, False])
def test_a_ledger_takes_the_budget_of_another_one_only_on_request_and_if_it_has_none(tmp_path, keep, own):
    first, second = (PopulationLedger.open(tmp_path / f"{name}.jsonl", {}) for name in "ab")
    if own:
        first.set_budget(Budget(epsilon=1.0, delta=DELTA))
    second.set_budget(Budget(epsilon=2.0, delta=DELTA))
    second.charge("r", 0, EVENTS[0], 0)
    first.join(second, keep_budget=keep)
    for known in (first, PopulationLedger.read(first.path)):
        assert known.events == EVENTS[:1]
        assert (known.budget.epsilon if known.budget else None) == (1.0 if own else 2.0 if keep else None)


def test_stores_that_share_a_ledger_may_be_moved_together(tmp_path):
    base = tmp_path / "base"
    for name in ("first", "second"):
        (base / name).mkdir(parents=True)
    first, second = (PopulationLedger.open(base / name / FILE, {}) for name in ("first", "second"))
    second.charge("r", 0, EVENTS[0], 0)
    first.join(second)
    moved = base.rename(tmp_path / "moved")
    for known in (PopulationLedger.read(moved / "second" / FILE), PopulationLedger.open(moved / "second" / FILE, {})):
        assert known.path == moved / "first" / FILE
        assert known.events == EVENTS[:1]


def test_ledgers_that_refer_to_each_other_are_an_error_and_not_a_loop(tmp_path):
    first, second = (PopulationLedger.open(tmp_path / f"{name}.jsonl", {}) for name in "ab")
    first.join(second)
    first._write({"moved": {"to": "b.jsonl"}})
    for use in (
        lambda: PopulationLedger.read(tmp_path / "a.jsonl"),
        lambda: PopulationLedger.open(tmp_path / "b.jsonl", {}),
        lambda: first.charge("r", 0, EVENTS[0], 0),
    ):
        with pytest.raises(LedgerError, match="refers back to it"):
            use()


def test_a_ledger_may_be_moved_as_often_as_the_limit_says(tmp_path):
    paths = [tmp_path / f"{i}.jsonl" for i in range(MAX_MOVES)]
    for earlier, later in itertools.pairwise(paths):
        PopulationLedger.open(later, {}).join(PopulationLedger.open(earlier, {}))
    under_way = PopulationLedger.open(paths[0], {})
    assert under_way.path == PopulationLedger.read(paths[0]).path == paths[-1]
    under_way.charge("r", 0, EVENTS[0], 0)
    assert PopulationLedger.read(paths[-1]).events == EVENTS[:1]


def test_a_ledger_is_not_joined_to_itself_by_another_path(tmp_path):
    (tmp_path / "one").mkdir()
    PopulationLedger.open(tmp_path / "one" / FILE, {})
    with pytest.raises(InvalidValue, match="already"):
        PopulationLedger.open(tmp_path / "one" / FILE, {}).join(
            PopulationLedger.open(tmp_path / "one" / ".." / "one" / FILE, {})
        )


# The ledger of a run, and both together


def test_both_ledgers_of_a_run_are_charged_for_the_same_and_only_the_own_one_is_shown(tmp_path):
    """The run's own ledger has other entries than the population's: the vocabulary is charged there under another id."""
    population = PopulationLedger.open(tmp_path / "people.jsonl", {})
    population.charge("another run", 0, EVENTS[3], 0)
    own = Ledger.create(tmp_path / FILE, {"run_id": "r", "population": 7})
    own.charge_all([Gaussian(noise_multiplier=3.0)], 0)
    JointLedger.register(own, population, "r")
    joint, calls = JointLedger(own, population), []
    charge = PopulationLedger.charge
    population.charge = lambda *args, **named: (calls.append((args, named)), charge(population, *args, **named))[1]
    for number in range(2):
        joint.charge(EVENTS[number], number + 5, again=f"before {number}", once=f"once {number}")
    named = [{"again": f"before {i}", "once": f"once {i}"} for i in range(2)]
    assert calls == [(("r", i + 1, EVENTS[i], i + 5), named[i]) for i in range(2)]
    assert population.runs["r"].last_once == "once 1"
    joint.record_release("digest")
    assert population.released == {"digest": "r"}
    kept = Ledger.read(own.path)
    assert joint.facts == kept.facts == {"run_id": "r", "population": 7}
    assert joint.entries == own.entries == kept.entries
    assert [entry.round for entry in kept.entries] == [0, 5, 6]
    assert joint.events == kept.events == [Gaussian(noise_multiplier=3.0), *EVENTS[:2]]
    assert (joint.head, len(joint)) == (kept.head, 3)
    assert joint.position == PopulationLedger.read(population.path).position != own._file.position
    assert [joint.contains(n, kept.hash_at(n)) for n in range(5) if n < 4] == [True] * 4
    assert not joint.contains(*[population.position[key] for key in ("length", "head")])
    assert [entry.hash for entry in kept.entries] == [kept.hash_at(n) for n in range(1, 4)]


def test_a_ledger_holds_what_it_shows_after_it_is_created_and_after_it_is_read(path):
    """Values that JSON writes in another form have that form at once, and the caller's table is copied."""
    given = {"start": {"charges": 0}, "phases": ({"clip": (1, 2)},)}
    ledger = Ledger.create(path, given)
    given["start"]["charges"] = 9
    assert ledger.facts == Ledger.read(path).facts == {"start": {"charges": 0}, "phases": [{"clip": [1, 2]}]}
    ledger.facts["start"]["charges"] = 7
    assert ledger.facts["start"] == {"charges": 0}


def test_old_runs_without_an_id_are_told_apart_by_their_first_line():
    heads = ["".join("b" if i == changed else "a" for i in range(64)) for changed in (None, *range(16))]
    ledgers = [
        SimpleNamespace(facts={}, hash_at=lambda length, head=head: (head, "of a charge")[length]) for head in heads
    ]
    assert len({run_id(ledger) for ledger in ledgers}) == 17  # pyright: ignore[reportArgumentType]
    named = SimpleNamespace(facts={"run_id": "own"}, hash_at=lambda length: "0" * 64)
    assert run_id(named) == "own"  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("lines", [1, 2, 4])
def test_a_repair_names_the_line_that_it_changes_and_how_many_bytes(path, lines):
    ledger = Ledger.create(path, {})
    for number in range(lines):
        ledger.charge(EVENTS[number], number)
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"round":7')
    assert f"line {lines + 2} was torn (10 bytes)" in (Ledger.read(path).repaired or "")
    path.write_bytes(whole[:-1])
    assert f"line {lines + 1} lacked its end" in (Ledger.read(path).repaired or "")
    assert Ledger.open(path).entries == ledger.entries
    assert path.read_bytes() == whole


@pytest.mark.parametrize("what", ["create", "repair"])
def test_a_ledger_that_cannot_be_written_is_an_error_of_the_library_and_cannot_be_charged(path, monkeypatch, what):
    if what == "repair":
        Ledger.create(path, {})
        path.write_bytes(path.read_bytes() + b'{"round":7')

    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    for name in ("create_file", "truncate"):
        monkeypatch.setattr(chain.storage, name, fail)
    with pytest.raises(LedgerError, match=r"No space left on device.*Check space"):
        Ledger.create(path, {}) if what == "create" else Ledger.open(path)


def test_a_ledger_that_another_process_holds_is_an_error_that_names_it(path, monkeypatch):
    monkeypatch.setattr(chain, "LOCK_WAIT_SECONDS", 0.01)
    own, other = PopulationLedger.open(path, {}), ChainedFile(path, population_ledger.FORMAT)
    with other.locked(), pytest.raises(LedgerError, match=r"ledger\.jsonl is held by another process"):
        own.charge("r", 0, EVENTS[0], 0)
    own.charge("r", 0, EVENTS[0], 0)
    assert PopulationLedger.read(path).events == EVENTS[:1]


@pytest.mark.parametrize("how", ["a pipe", "a folder", "of the system"])
def test_a_ledger_that_is_no_regular_file_is_never_opened(tmp_path, monkeypatch, how):
    path = Path("/proc/self/ledger.jsonl") if how == "of the system" else tmp_path / "ledger.jsonl"
    os.mkfifo(path) if how == "a pipe" else path.mkdir() if how == "a folder" else None
    monkeypatch.setattr("builtins.open", lambda *_, **__: pytest.fail("the path was opened"))
    for use in (Ledger.read, Ledger.open, PopulationLedger.read, lambda path: PopulationLedger.open(path, {})):
        with pytest.raises(LedgerError, match="is not a regular file"):
            use(path)


def test_a_copy_of_a_ledger_that_was_charged_for_both_counts_each_line_of_both(tmp_path, path):
    """Also the budget and the released models, and if one copy is only a beginning of the other."""
    own = PopulationLedger.open(path, {})
    own.charge("r", 0, EVENTS[0], 0)
    shutil.copy(path, tmp_path / "copy.jsonl")
    copy = PopulationLedger.open(tmp_path / "copy.jsonl", {})
    copy.charge("r", 1, EVENTS[1], 1)
    copy.record_release("r", "digest")
    own.join(copy)
    assert own.events == EVENTS[:2]
    assert own.released == {"digest": "r"}
    assert PopulationLedger.read(path).position == own.position


def test_the_vocabulary_of_each_store_is_charged_once_and_before_any_run(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for _ in range(2):
            open_population_ledger(
                tmp_path / name,
                name,
                [to_record(Gaussian(noise_multiplier=4.0)), to_record(EVENTS[0])],
                tmp_path / FILE,
            )
    population = PopulationLedger.read(tmp_path / FILE)
    assert [run.facts["name"] for run in population.runs.values()] == ["the private vocabulary"] * 2
    assert [run.events for run in population.runs.values()] == [[Gaussian(noise_multiplier=4.0), EVENTS[0]]] * 2
    assert [run.begun for run in population.runs.values()] == [1, 1]
    assert population.facts["corpus"] == "a"
    for name in ("a", "b"):
        assert known_position(tmp_path / name, tmp_path / FILE) is not None
