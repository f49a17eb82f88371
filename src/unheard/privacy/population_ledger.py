"""The ledger of a population: what all runs on the same users have been charged together.

A run's statement covers that run. Training again every month on the same users composes, so every run on a store is
also charged to a ledger that belongs to the store, or to several stores whose users overlap. This module implements the
composition over runs (docs/privacy.md, "all runs compose") and, if the owner sets one, the budget over all runs. The
design and its reasons: docs/decisions/0030-a-ledger-for-the-store.md. Adaptive composition holds for events that are
chosen in the light of earlier results (Dwork, Rothblum and Vadhan 2010; for running stops, Feldman and Zrnic 2021).

    open_population_ledger(store, ...)    the ledger of a store, begun if there is none; charges the store's vocabulary
    PopulationLedger.read(path)           look without a lock and without writing
    JointLedger(ledger, population)       a run's ledger that also charges the population (`run_ledger.py`)

Each line of the file (format: `ledger.py`) after the header is one of

    {"began": {"run": ..., "facts": ..., "held": n}}                  a run begins
    {"run": ..., "position": n, "event": {...}, "once": ...}          an event, at its position in the run's ledger
    {"budget": {"epsilon": ..., "delta": ..., "orders": [...], ...}}  the budget of all runs; the newest one counts
    {"moved": {"to": path}}                                           this ledger was joined to another one
    {"released": {"run": ..., "sha256": ...}}                         a model that a run on these users is about to write

**What a store remembers.** The ledger lies in the store, or where `[privacy] ledger` says. A new run has nothing else to
compare it with: no checkpoint of its own remembers the ledger yet. So the store keeps a small file, `ledgers.json`, and
a ledger that is deleted, swapped or cut is an error, never a fresh start:

    {"known": {"ledger.jsonl": {"ledger": ..., "length": n, "head": ...}},     where each ledger stood at the last save
     "continues": {"ledger": path, "joined": false}}                           the ledger of an earlier store

The file holds paths and hashes only, and it is copied with the store: a copy without the ledger is refused too. A store
has it from its preparation on, and `digests.json` says so: where it is missing, it was deleted. Stores of version 0.1.0
and parts of stores have none.
"""

import contextlib
import errno
import hashlib
import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

from unheard import storage
from unheard.config import parse_json
from unheard.errors import InvalidValue, LedgerError, UnprovenCombination
from unheard.privacy.accountants import RUNNING_ACCOUNTANT
from unheard.privacy.budget import Budget, RunningEpsilon
from unheard.privacy.events import CorrelatedGaussian, Event, from_record, has_rounds, to_record
from unheard.privacy.ledger import DIGESTS, NO_LEDGERS, RECORD, REPRODUCIBLE, ChainedFile, Entry

FORMAT = "unheard-population-1"
FILE = "ledger.jsonl"
MAX_MOVES = 8


@dataclass
class Member:
    """One run in the ledger of a population.

    Attributes:
        id: The name of the run, unique among all runs.
        facts: Some public facts that the run declared.
        held: How many entries of the run's own ledger, from the first on, are charged here.
        events: The events that are charged here under this run's name.
        begun: How often a run with this id began. Only a seeded run can begin twice, as a repetition.
        is_charged_again: Whether a position of the run's ledger was charged more than once.
        rounds: The number of the round of each event; -1 where the ledger does not say.
    """

    id: str
    facts: dict[str, Any] = field(default_factory=dict)
    held: int = 0
    events: list[Event] = field(default_factory=list)
    begun: int = 0
    is_charged_again: bool = False
    rounds: list[int] = field(default_factory=list)

    @property
    def has_repeats(self) -> bool:
        """Whether the charges may be of several folders: a seeded run repeats under one id, with the same releases."""
        return self.id.startswith(REPRODUCIBLE) and (self.begun > 1 or self.is_charged_again)


class PopulationLedger:
    """An append-only list of the events of all runs on one population, with several writers.

    Every method that writes takes the file's lock, reads what other processes have written meanwhile, and has its own
    line on disk when it returns. All methods raise `LedgerError` if the file is damaged, cannot be read or written, or
    was shortened while in use.

    Attributes:
        members: The runs by id, in the order in which they began.
        budget: The budget of all runs together; None if none is set.
        released: The digests of the parameters of every model that was trained on these users, and the id of its run.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.members: dict[str, Member] = {}
        self.released: dict[str, str] = {}
        self.budget: Budget | None = None
        self._running: RunningEpsilon | None = None
        self._is_declared, self._failure = False, 0.0
        self._records: list[dict[str, Any]] = []
        self._moved_to: Path | None = None
        self._came_from: tuple[ChainedFile, ...] = ()
        self._file = ChainedFile(path, FORMAT)
        self._home: tuple[Path, Path] | None = None  # the store, and the ledger as the run file names it

    @classmethod
    def open(
        cls, path: str | os.PathLike[str], facts: Mapping[str, Any], *, must_exist: bool = False
    ) -> "PopulationLedger":
        """Open the ledger at `path`, or where it has moved to, in order to charge it.

        Args:
            path: The file. If nothing is there, a new ledger is created.
            facts: The public facts of a new ledger.
            must_exist: Whether a ledger was there before, so that a missing file is an error.

        Raises:
            LedgerError: Something that is no ledger is at the path (it is left as it is), the ledger is damaged, or it
                must exist and is missing.
        """

        def open_here(path: Path) -> "PopulationLedger":
            """Open the ledger at a path, or create it."""
            population = cls(path)
            file = population._file
            with _advice_on_failure(file.path), file.locked():
                # DP: a ledger that is gone held charges; to begin a new one would forget them.
                if must_exist and not os.path.lexists(file.path):
                    raise LedgerError(
                        f"{file.path} is missing: what these users have spent was recorded there. Put it back, or name "
                        "where it lies now: [privacy] ledger in the run file."
                    )
                if not os.path.lexists(file.path):
                    # A random id tells copies of one ledger from two ledgers that were begun with equal facts.
                    file.create({"id": secrets.token_hex(16), **facts})
                population._refresh(repair=True)
            return population

        return _follow_moves(open_here(Path(path)), open_here)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> "PopulationLedger":
        """Read and verify the ledger at `path`, or where it has moved to, without a lock and without writing."""

        def read_here(path: Path) -> "PopulationLedger":
            """Read the ledger at a path without repairing it."""
            population = cls(path)
            with _advice_on_failure(population.path):
                population._refresh(repair=False)
            return population

        return _follow_moves(read_here(Path(path)), read_here)

    @property
    def path(self) -> Path:
        """The file, as an absolute path."""
        return self._file.path

    @property
    def facts(self) -> dict[str, Any]:
        """The public facts of the header: a random id, and the name of the corpus it was begun for."""
        return dict(self._file.facts)

    @property
    def position(self) -> dict[str, Any]:
        """Identifies everything charged so far; the checkpoints of a run remember it. See `contains`."""
        return {"ledger": self._file.hashes[0], "length": len(self._file), "head": self._file.head}

    def position_at(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """The position of the file at `path`: of this ledger, or of one that has moved here."""
        for file in (self._file, *self._came_from):
            if os.path.realpath(file.path) == os.path.realpath(path):
                return {"ledger": file.hashes[0], "length": len(file), "head": file.head}
        return self.position

    @property
    def events(self) -> list[Event]:
        """The events of all runs, grouped by run."""
        return [event for member in self.members.values() for event in member.events]

    def contains(self, position: Mapping[str, Any]) -> bool | None:
        """Whether this ledger has grown out of that position; None if the position belongs to another ledger."""
        for file in (self._file, *self._came_from):
            if file.hashes[0] == position["ledger"]:
                # DP: a ledger cut at a line's end has a valid chain; only this tells it from one that was charged less.
                return file.contains(position["length"], position["head"])
        return None

    def register(self, run: str, facts: Mapping[str, Any], held: int, *, is_new: bool = False) -> None:
        """Record that a run begins; does nothing if the run is known, unless it begins again.

        Args:
            run: The id of the run.
            facts: Public facts of the run.
            held: The number of entries at the start of the run's own ledger that belong to an earlier run and are
                charged here under the earlier run's id.
            is_new: Whether the run begins now. A known run is then a repetition of a seeded run.
        """
        with self._up_to_date():
            if is_new or run not in self.members:
                self._write({"began": {"run": run, "facts": dict(facts), "held": held}})

    def settle(self, run: str, entries: Sequence[Entry | Event]) -> int:
        """Charge what a run's own ledger has and this ledger lacks, for example after a store was copied without it.

        Args:
            run: The id of the run.
            entries: The whole of the run's own ledger.

        Returns:
            The number of events that were missing.
        """
        with self._up_to_date():
            held = self.members[run].held if run in self.members else 0
            events = [item.event if isinstance(item, Entry) else item for item in entries[held:]]
            # DP: what a run was charged before it came here was charged to the same users; no budget can undo it.
            self._write(*(_charge(run, position, event) for position, event in enumerate(events, start=held)))
            return len(events)

    def charge(self, run: str, position: int, event: Event, round: int, *, again: bool = False) -> None:
        """Charge one more event of a run; it is on disk when this returns.

        Args:
            run: The id of the run.
            position: The position that the event will have in the run's own ledger.
            event: What the round will do to the users' data.
            round: The number of the round, for the error message.
            again: With correlated noise, whether a kill left this position charged here and not in the run's ledger.

        Raises:
            BudgetExceeded: The event would exceed the budget of all runs together. Nothing is charged.
            LedgerError: A copy of the run has gone on with the same history of correlated noise.
        """
        with self._up_to_date():
            is_copy = run in self.members and position < self.members[run].held and not run.startswith(REPRODUCIBLE)
            # DP: rounds within a block cost nothing more only if one process makes them: a copy has noise of its own.
            if is_copy and isinstance(event, CorrelatedGaussian) and event.index and not again:
                raise LedgerError(
                    f"Another copy of this run was charged for the same attempt in {self.path}. Two copies must not share one "
                    "history of correlated noise. Go on with the other copy, or delete the folder `noise` of this one: a new "
                    "mechanism then begins and is charged from its first round."
                )
            if self.budget is not None:
                assert self._running is not None
                self.check_cohorts()
                # DP: asked under the lock, with every other run's rounds counted, before anything of the round exists.
                whose = f"all runs on this population ({self.path})"
                self.budget.check(self._running, event, round, whose, larger="with `unheard budget --epsilon`")
            # DP: always a new line: a copy of this run that is trained further releases models of its own.
            self._write({**_charge(run, position, event), "round": round})

    def record_release(self, run: str, sha256: str) -> None:
        """Record a model that a run is about to write, so that it is known wherever the file is copied to.

        Args:
            run: The id of the run.
            sha256: The digest of the model's parameters.
        """
        with self._up_to_date():
            if sha256 not in self.released:
                self._write({"released": {"run": run, "sha256": sha256}})

    def remember(self) -> None:
        """Let the store record how far its ledger has grown, so that a ledger that is cut later is noticed."""
        if self._home is not None:
            store, path = self._home
            with _advice_on_failure(store):
                remember_position(store, path, self.position_at(path))

    def set_budget(self, budget: Budget) -> None:
        """Set what all runs together may spend from now on. The newest budget counts; earlier ones stay on record.

        A budget with orders (`accountants.FILTER_ORDERS`) is a privacy filter: see `is_filter`.
        """
        with self._up_to_date():
            self.check_cohorts()
            self._write({"budget": budget.record})

    def join(self, other: "PopulationLedger", *, keep_budget: bool = False) -> None:
        """Declare that `other` has the same users: copy its charges here, and let it refer to this ledger from now on.

        Args:
            other: The other ledger.
            keep_budget: Whether the budget of `other` counts here too, if this ledger has none.

        Raises:
            InvalidValue: Both are the same ledger already.
        """
        if other.path == self.path:
            raise InvalidValue(f"{self.path} already is the ledger of both stores.")
        first, second = sorted((self, other), key=lambda population: population.path)  # one lock order: no deadlock
        with first._up_to_date(), second._up_to_date():
            # Copies of one ledger share their first lines. Every later line is a charge of its own, even for the same
            # run.
            pairs = zip(self._file.hashes, other._file.hashes, strict=False)
            shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            with_budget = keep_budget and self.budget is None
            records = other._records[max(shared - 1, 0) :]
            self._write(*(record for record in records if "budget" not in record or with_budget))
            # DP: from the next line on, every charge to the other ledger comes here, also of runs that are training now.
            other._write({"moved": {"to": os.path.relpath(self.path, other.path.parent)}})

    def take_over(self, earlier: "PopulationLedger") -> None:
        """Continue the ledger of an earlier store of (some of) the same users: its charges, and its budget."""
        # DP: users who are in both stores keep what they were charged; a user who is only in one is counted too high.
        if earlier.path != self.path:  # else it was done before, and interrupted at the end
            self.join(earlier, keep_budget=True)

    def check_cohorts(self) -> None:
        """Raise `UnprovenCombination` if several runs drew the same cohorts (`training.shared_cohorts`)."""
        names = [
            str(member.facts.get("name", member.id))
            for member in self.members.values()
            if "cohorts" in (member.facts.get("randomness") or {})
        ]
        # DP: composition takes the coins of each run to be independent of those of every other.
        if len(names) > 1:
            more = f" and {len(names) - 8} more" if len(names) > 8 else ""
            raise UnprovenCombination(
                f"The runs {', '.join(names[:8])}{more} drew the same cohorts (training.shared_cohorts), and composition is "
                "proved for cohorts drawn independently: there is no epsilon of all runs together, and no budget can hold "
                "it. `unheard statement RUN` is about one of them. For all together, train without shared_cohorts."
            )

    @property
    def is_filter(self) -> bool:
        """Whether everything charged is within a budget that was declared before the first round: a privacy filter."""
        running, budget = self._running, self.budget
        if budget is None or running is None or not self._is_declared:
            return False
        return running.failure == self._failure and running.epsilon <= budget.epsilon

    def running(self, delta: float, accountant: str = RUNNING_ACCOUNTANT) -> RunningEpsilon:
        """The epsilon of all runs together at `delta`, ready for further charges.

        Args:
            delta: The delta of the guarantee.
            accountant: One whose costs add up.
        """
        return RunningEpsilon(delta, accountant, self.events)

    @contextlib.contextmanager
    def _up_to_date(self) -> Iterator[None]:
        """Hold the lock with everything read that other runs wrote. A ledger that has moved meanwhile is followed."""
        for _ in range(MAX_MOVES):
            with _advice_on_failure(self.path), self._file.locked():
                self._refresh(repair=True)
                if self._moved_to is None:
                    yield
                    return
            there = PopulationLedger.open(self._moved_to, {}, must_exist=True)
            there._came_from += (self._file, *self._came_from)
            self.__dict__.update(there.__dict__, _home=self._home)
        raise LedgerError(
            f"{self.path} refers to a ledger that refers back to it. Name the right one: [privacy] ledger."
        )

    def _write(self, *records: dict[str, Any]) -> None:
        if records:
            self._file.append(records)
        for record in records:
            self._apply(record)

    def _refresh(self, *, repair: bool) -> None:
        """Apply the records that were appended since the last read."""
        for record in self._file.read():
            try:
                self._apply(record)
            except (KeyError, TypeError, ValueError, AttributeError, InvalidValue):
                raise LedgerError(f"{self.path}: a line is sealed, but this version does not know its kind.") from None
        if repair:
            self._file.repair()

    def _apply(self, record: dict[str, Any]) -> None:
        """Take one record into `members`, `budget` and the rest."""
        if "began" in record:
            began = record["began"]
            member = self.members.setdefault(began["run"], Member(id=began["run"]))
            member.facts, member.held = dict(began["facts"]), max(member.held, int(began["held"]))
            member.begun += 1
        elif "budget" in record:
            budget = Budget(**record["budget"])
            is_first = self.budget is None and not has_rounds(self.events)
            # DP: a budget that was declared or changed after results were seen may have been chosen by them.
            self._is_declared = bool(budget.orders) and (is_first or (self._is_declared and budget == self.budget))
            self.budget = budget
            self._running = self.budget.running(self.events)
            self._failure = self._running.failure
        elif "released" in record:
            self.released[str(record["released"]["sha256"])] = str(record["released"]["run"])
        elif "moved" in record:
            self._moved_to = self.path.parent / record["moved"]["to"]
        else:
            event = from_record(record["event"])
            member = self.members.setdefault(record["run"], Member(id=record["run"]))
            member.is_charged_again |= int(record["position"]) < member.held
            member.held = max(member.held, int(record["position"]) + 1)
            member.events.append(event)
            member.rounds.append(int(record.get("round", -1)))
            if self._running is not None:
                self._running.charge(event)
        self._records.append(record)


def vocabulary_member(corpus: str) -> str:
    """Return the id under which the private vocabulary of a corpus is charged."""
    return f"vocabulary-{corpus[:16]}"


def check_ledger_path(ledger: str | os.PathLike[str] | None) -> None:
    """Raise `InvalidValue` if a ledger is named by an empty path, which would be a file in the working folder."""
    # DP: a run that is started in another folder would charge another ledger, and the charges would not compose.
    if ledger is not None and os.fspath(ledger).strip() in ("", "."):
        raise InvalidValue(
            f"[privacy] ledger = {os.fspath(ledger)!r} names no file. Leave it out for the store's own ledger, or name a file: "
            "the same one for every run on these users."
        )


def open_population_ledger(
    store: str | os.PathLike[str],
    corpus: str,
    vocabulary_events: Sequence[Mapping[str, Any]],
    ledger: str | os.PathLike[str] | None = None,
    *,
    must_exist: bool = False,
) -> PopulationLedger:
    """Open the ledger of a store's population, and charge the store's vocabulary to it once.

    Args:
        store: The folder of the token store.
        corpus: The name of the corpus, for the header of a new ledger.
        vocabulary_events: The records of the events that the store's vocabulary has cost; empty for a public
            vocabulary.
        ledger: The file or folder of the ledger if it is not in the store (`[privacy] ledger` in the run file).
        must_exist: Whether a ledger was there before, so that a missing file is an error.

    Raises:
        InvalidValue: `ledger` is empty.
        LedgerError: The store is a part of another store and no ledger is named, the ledger cannot be used, or it is
            not the one that the store was charged in before.
    """
    check_ledger_path(ledger)
    # DP: a part of a store has no ledger of its own: what was charged there would be missing in the population's.
    if ledger is None and (Path(store) / "part.json").is_file():
        raise LedgerError(
            f"{store} is a part of a store, and the ledger of its users lies with the whole one. Name it: [privacy] ledger = "
            "the whole store's ledger.jsonl; or give the whole store as corpus.path, and the parts as engine.corpus_part."
        )
    path = Path(ledger) if ledger is not None else Path(store) / FILE
    if path.is_dir():
        path = path / FILE
    if ledger is not None and not must_exist:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LedgerError(
                f"[privacy] ledger = {str(path)!r} cannot be made ({error.strerror}). Choose another folder."
            ) from None
    position = known_position(Path(store), path)
    population = PopulationLedger.open(path, {"corpus": corpus}, must_exist=must_exist or position is not None)
    _check_position(population, position, path)
    if (earlier := ledger_to_join(Path(store))) is not None:
        population.take_over(PopulationLedger.open(earlier, {}, must_exist=True))
        mark_joined(Path(store))
    name = vocabulary_member(corpus)
    if vocabulary_events:
        population.register(name, {"name": "the private vocabulary"}, held=0)
        # DP: a vocabulary found in the users' own text was paid for by the same users, once for all runs.
        population.settle(name, [from_record(record) for record in vocabulary_events])
    population._home = (Path(store), path)
    population.remember()
    return population


def read_population_ledger(store: Path, ledger: Path) -> PopulationLedger:
    """Read the ledger of a store's population without writing, and check that it holds what the store remembers of it.

    Args:
        store: The folder of the token store.
        ledger: The file of the population's ledger.

    Raises:
        LedgerError: The ledger is damaged, shortened or replaced, or the store's record of its ledgers is damaged.
    """
    # In this order a run that trains meanwhile is read without contradictions: the ledger only grows.
    position = known_position(store, ledger)
    population = PopulationLedger.read(ledger)
    _check_position(population, position, ledger)
    return population


def read_corpus_record(store: Path) -> dict[str, Any]:
    """Read corpus.json, which names what the vocabulary has cost.

    Raises:
        LedgerError: It cannot be read, or is not as it was written.
    """
    path = store / "corpus.json"
    try:
        content = path.read_bytes()
        digests = _digests(store)
        written = None if digests is None else digests["files"]["corpus.json"]["sha256"]
        record = parse_json(content)
        # DP: a damaged record may have lost the events of a private vocabulary.
        if written not in (None, hashlib.sha256(content).hexdigest()) or not isinstance(record, dict):
            raise ValueError
        return record
    except (OSError, ValueError, KeyError, TypeError):
        raise LedgerError(
            f"{path} is not as it was written, so what the vocabulary of this store cost cannot be known. Put a whole copy "
            "back."
        ) from None


def known_position(store: Path, ledger: Path) -> Mapping[str, Any] | None:
    """The position of a ledger when it was last opened for this store; None if it never was.

    Args:
        store: The folder of the token store.
        ledger: The file of the population's ledger.

    Raises:
        LedgerError: The store's record is damaged.
    """
    return _read_record(store)["known"].get(_record_key(store, ledger))


def remember_position(store: Path, ledger: Path, position: Mapping[str, Any]) -> None:
    """Record where a ledger stands. A read-only store, whose ledger lies elsewhere, is left as it is.

    Args:
        store: The folder of the token store.
        ledger: The file of the population's ledger.
        position: `PopulationLedger.position` of that file.
    """
    key = _record_key(store, ledger)

    def change(record: dict[str, Any]) -> dict[str, Any]:
        """The record with the position, unless it has a later one."""
        known = record["known"].get(key)
        # DP: another run may have recorded a later position meanwhile. An earlier one would hide that the ledger was cut.
        is_later = known and known["ledger"] == position["ledger"] and known["length"] > position["length"]
        return {**record, "known": {**record["known"], key: known if is_later else dict(position)}}

    record = _read_record(store)
    if change(record) != record:
        try:
            _change_record(store, change)
        except OSError as error:
            if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM) or not os.path.isabs(key):
                raise


def continue_ledger(store: Path, earlier: Path) -> None:
    """Record that a store continues the ledger at `earlier`, whose charges are joined when the store's own is opened."""
    continues = {"ledger": os.path.abspath(earlier), "joined": False}
    _change_record(store, lambda record: {**record, "continues": continues})


def ledger_to_join(store: Path) -> Path | None:
    """The ledger of the earlier store, if its charges were not joined yet."""
    continues = _read_record(store)["continues"]
    return None if continues is None or continues["joined"] else Path(continues["ledger"])


def mark_joined(store: Path) -> None:
    """Record that the charges of the earlier ledger are in the store's own: the earlier store may be deleted."""
    _change_record(store, lambda record: {**record, "continues": {**record["continues"], "joined": True}})


def _check_position(population: PopulationLedger, position: Mapping[str, Any] | None, path: Path) -> None:
    """Refuse a ledger that does not hold the position recorded in its store."""
    # DP: a ledger that was cut or replaced would make these users look less spent than they are.
    if position is not None and not population.contains(position):
        raise LedgerError(
            f"{path} does not hold what was charged when its store last recorded it ({RECORD}): it was shortened or "
            "replaced. Put the right one back; without it what these users have spent cannot be known."
        )


def _charge(run: str, position: int, event: Event) -> dict[str, Any]:
    # The random number keeps the lines of two copies of one ledger apart if both are charged for the same event.
    return {"run": run, "position": position, "event": to_record(event), "once": secrets.token_hex(8)}


def _follow_moves(population: PopulationLedger, open_here: Callable[[Path], PopulationLedger]) -> PopulationLedger:
    """Return the ledger that this one has moved to, or itself."""
    for _ in range(MAX_MOVES):
        path = population._moved_to
        if path is None:
            return population
        if not path.is_file():
            raise LedgerError(
                f"{population.path} has moved to {path}, which is not there: these stores were declared one population. "
                "Bring that ledger back, or name where it lies now: [privacy] ledger in the run file."
            )
        before, population = population, open_here(path)
        population._came_from = (before._file, *before._came_from)
    raise LedgerError(
        f"{population.path} refers to a ledger that refers back to it. Name the right one: [privacy] ledger in the run file."
    )


@contextlib.contextmanager
def _advice_on_failure(path: Path) -> Iterator[None]:
    """Turn an `OSError` about the file into a `LedgerError` that says what to do."""
    try:
        yield
    except OSError as error:
        raise LedgerError(
            f"{path}: {error.strerror or error}. Every run on a store is charged to the store's own ledger before it "
            "releases anything. Make the folder writable, free some space, or keep the ledger elsewhere: "
            '[privacy] ledger = "some/folder/ledger.jsonl" in the run file (the same file for every run on these users).'
        ) from None


def _record_key(store: Path, ledger: Path) -> str:
    """A path within the store is relative, so that the store can be moved."""
    here, there = os.path.realpath(store), os.path.realpath(ledger)
    return os.path.relpath(there, here) if os.path.dirname(there) == here else there


def _read_record(store: Path) -> dict[str, Any]:
    """Read which ledgers a store has been charged in."""
    path = store / RECORD
    try:
        if not os.path.lexists(path):
            # DP: a store that was prepared with the record and lacks it may have been charged in a ledger that is gone.
            if (_digests(store) or {}).get("ledgers"):
                raise LedgerError(
                    f"{path} is missing: it records which ledgers this store has been charged in. Put it back; without it "
                    "nobody can say whether the ledger is whole. If it is lost, prepare the store again with `unheard "
                    "prepare --continues`, which keeps the charges."
                )
            return dict(NO_LEDGERS)
        record = parse_json(path.read_text(encoding="utf-8"))
        known, continues = record["known"], record.get("continues")
        is_whole = all({*position} == {"ledger", "length", "head"} for position in known.values())
        if continues is not None:
            is_whole &= isinstance(continues["ledger"], str) and isinstance(continues["joined"], bool)
        if not is_whole:
            raise ValueError
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise LedgerError(
            f"{path} is damaged: it records which ledgers this store has been charged in. Put back a whole copy."
        ) from None
    return {"known": known, "continues": continues}


def _digests(store: Path) -> dict[str, Any] | None:
    """The content of digests.json; None for a store of version 0.1.0, which has none."""
    if os.path.lexists(store / DIGESTS):
        return parse_json((store / DIGESTS).read_text(encoding="utf-8"))
    # DP: corpus.json says whether the store was prepared with digests; without them a deleted record is not noticed.
    if os.path.lexists(store / "corpus.json") and parse_json((store / "corpus.json").read_bytes()).get("digests"):
        raise LedgerError(
            f"{store / DIGESTS} is missing: it says which files this store was prepared with, the record of its ledgers "
            "among them. Put it back; without it nobody can say whether the ledger is whole."
        )
    return None


def _change_record(store: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Read the record, change it and replace it, while no other process does so."""
    with storage.locked(store / f".{RECORD}.lock", wait=60):
        record = change(_read_record(store))
        storage.replace_file(store / RECORD, (json.dumps(record, indent=2) + "\n").encode())
