"""Two ledgers charged as one: the run's own, which its statement is made from, and that of the people it learns from.

In: a run's ledger and the population's. Out: an object that training charges and saves as it would the run's ledger alone.
The population is charged first. A crash between the two lines leaves the people charged for a round that never began: too
much, never too little.
What a population has been charged by all runs together: a ledger that belongs to the store, or to several stores.

In: every run's events, each before it may be released; and, if its owner sets one, a budget for all runs. Out: what was spent.
Retraining every month on the same people composes: one run's statement is about that run, this ledger is about the people.
Lines: a run that began, an event of a run at its position, a budget, or where the ledger has moved to (stores declared one
population). How and why: docs/decisions/0030-a-ledger-for-the-store.md.
"""

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

from unheard.errors import InvalidValue, LedgerError
from unheard.privacy.budget import Budget, RunningEpsilon
from unheard.privacy.events import Event, from_record, to_record
from unheard.privacy.ledger import Entry, Ledger
from unheard.privacy.sealed_log import SealedLog

FORMAT = "unheard-population-1"
FILE = "ledger.jsonl"
MOST_MOVES = 8


@dataclass
class Member:
    """One run as the population's ledger knows it."""

    id: str
    facts: dict[str, Any] = field(default_factory=dict)
    held: int = 0
    """Positions of the run's own ledger, from 0 on, that are charged here."""
    events: list[Event] = field(default_factory=list)


class PopulationLedger:
    """Open one with `open` to charge it, or with `read` to look without a lock and without writing."""

    def __init__(self, path: Path) -> None:
        self.members: dict[str, Member] = {}
        self.budget: Budget | None = None
        self._running: RunningEpsilon | None = None
        self._records: list[dict[str, Any]] = []
        self._moved_to: Path | None = None
        self._came_from: tuple[SealedLog, ...] = ()
        self._log = SealedLog(path, FORMAT)

    @classmethod
    def open(cls, path: str | os.PathLike[str], facts: Mapping[str, Any]) -> "PopulationLedger":
        """The ledger at `path`, or where it has moved to, ready to be charged; begun with `facts` if there is none."""

        def here(place: Path) -> "PopulationLedger":
            population = cls(place)
            with population._log.locked():
                population._log.begin(facts)
                population._refresh(mend=True)
            return population

        return _followed(here(Path(path)), here)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> "PopulationLedger":
        def here(place: Path) -> "PopulationLedger":
            population = cls(place)
            population._refresh(mend=False)
            return population

        return _followed(here(Path(path)), here)

    @property
    def path(self) -> Path:
        return self._log.path

    @property
    def facts(self) -> dict[str, Any]:
        return dict(self._log.facts)

    @property
    def position(self) -> dict[str, Any]:
        """Names everything charged so far; a run's checkpoints remember it."""
        return {"ledger": self._log.hashes[0], "length": len(self._log), "head": self._log.head}

    @property
    def events(self) -> list[Event]:
        return [event for member in self.members.values() for event in member.events]

    def contains(self, position: Mapping[str, Any]) -> bool | None:
        """Whether this ledger has grown out of that position; None if the position is one of another ledger."""
        for log in (self._log, *self._came_from):
            if log.hashes[0] == position["ledger"]:
                # DP: a ledger cut at a line's end has a valid chain; only this tells it from one that was charged less.
                return log.contains(position["length"], position["head"])
        return None

    def register(self, run: str, facts: Mapping[str, Any], held: int) -> None:
        """A run begins. The first `held` entries of its own ledger are another's, charged here under that one's name."""
        with self._current():
            if run not in self.members:
                self._write({"began": {"run": run, "facts": dict(facts), "held": held}})

    def settle(self, run: str, entries: Sequence[Entry | Event]) -> int:
        """Charge what a run's own ledger has and this one lacks (a store copied without its ledger); how many that was."""
        with self._current():
            held = self.members[run].held if run in self.members else 0
            events = [item.event if isinstance(item, Entry) else item for item in entries[held:]]
            # DP: what a run was charged before it came here was charged to the same people; no budget can undo it.
            self._write(*(_charge(run, position, event) for position, event in enumerate(events, start=held)))
            return len(events)

    def charge(self, run: str, position: int, event: Event, round: int) -> None:
        """One more event of a run; on disk when this returns. Refused if it would exceed the population's budget."""
        with self._current():
            if self.budget is not None:
                assert self._running is not None
                # DP: asked under the lock, with every other run's rounds counted, before anything of the round exists.
                whose = f"all runs on this population ({self.path})"
                self.budget.check(self._running, event, round, whose, larger="with `unheard budget --epsilon`")
            # DP: always a new line: a copy of this run that goes on by itself releases models of its own.
            self._write(_charge(run, position, event))

    def set_budget(self, budget: Budget) -> None:
        """What all runs together may spend from now on. The newest one counts; earlier ones stay to be read."""
        with self._current():
            self._write({"budget": {"epsilon": budget.epsilon, "delta": budget.delta, "accountant": budget.accountant}})

    def join(self, other: "PopulationLedger") -> None:
        """Declare the users of `other` the same people: its charges are copied here, and it leads here from now on."""
        if other.path == self.path:
            raise InvalidValue(f"{self.path} already is the ledger of both stores.")
        first, second = sorted((self, other), key=lambda one: one.path)  # one order for everybody: no deadlock
        with first._current(), second._current():
            # Copies of one ledger share their first lines; whatever came after is another charge, if for the same run.
            pairs = zip(self._log.hashes, other._log.hashes, strict=False)
            shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            self._write(*(record for record in other._records[max(shared - 1, 0) :] if "budget" not in record))
            # DP: from the next line on, whoever charges the other ledger is led here, runs under way among them.
            other._write({"moved": {"to": os.path.relpath(self.path, other.path.parent)}})

    def running(self, delta: float, accountant: str = "rdp") -> RunningEpsilon:
        return RunningEpsilon(delta, accountant, self.events)

    def _write(self, *records: dict[str, Any]) -> None:
        if records:
            self._log.append(*records)
        for record in records:
            self._keep(record)

    def _current(self) -> "_Current":
        return _Current(self)

    def _refresh(self, *, mend: bool) -> None:
        for record in self._log.refresh(mend=mend):
            try:
                self._keep(record)
            except (KeyError, TypeError, ValueError, AttributeError, InvalidValue):
                raise LedgerError(f"{self.path}: a line is sealed but is none that this version knows.") from None

    def _keep(self, record: dict[str, Any]) -> None:
        if "began" in record:
            told = record["began"]
            member = self.members.setdefault(told["run"], Member(id=told["run"]))
            member.facts, member.held = dict(told["facts"]), max(member.held, int(told["held"]))
        elif "budget" in record:
            self.budget = Budget(**record["budget"])
            self._running = self.budget.running(self.events)
        elif "moved" in record:
            self._moved_to = self.path.parent / record["moved"]["to"]
        else:
            event = from_record(record["event"])
            member = self.members.setdefault(record["run"], Member(id=record["run"]))
            member.held = max(member.held, int(record["position"]) + 1)
            member.events.append(event)
            if self._running is not None:
                self._running.charge(event)
        self._records.append(record)


class _Current:
    """Inside: the lock is held, and what other runs wrote has been read. A ledger that has moved meanwhile is followed."""

    def __init__(self, population: PopulationLedger) -> None:
        self._population = population

    def __enter__(self) -> None:
        for _ in range(MOST_MOVES):
            self._lock = self._population._log.locked()
            self._lock.__enter__()
            try:
                self._population._refresh(mend=True)
                if self._population._moved_to is None:
                    return
            except BaseException:
                self._lock.__exit__(None, None, None)
                raise
            self._lock.__exit__(None, None, None)
            there = PopulationLedger.open(self._population._moved_to, {})
            there._came_from += (self._population._log, *self._population._came_from)
            self._population.__dict__.update(there.__dict__)
        raise LedgerError(f"{self._population.path} moves in a circle. Name the right one: [privacy] ledger.")

    def __exit__(self, *what: Any) -> None:
        self._lock.__exit__(*what)


def _charge(run: str, position: int, event: Event) -> dict[str, Any]:
    # A number used once: copies of one ledger that are charged apart never come to look alike.
    return {"run": run, "position": position, "event": to_record(event), "once": secrets.token_hex(8)}


def _followed(found: PopulationLedger, open_here: Callable[[Path], PopulationLedger]) -> PopulationLedger:
    """The ledger that this one has moved to, or itself."""
    for _ in range(MOST_MOVES):
        place = found._moved_to
        if place is None:
            return found
        if not place.is_file():
            raise LedgerError(
                f"{found.path} has moved to {place}, which is not there: these stores were declared one population. "
                "Bring that ledger back, or name where it lies now: [privacy] ledger in the run file."
            )
        before, found = found, open_here(place)
        found._came_from = (before._log, *before._came_from)
    raise LedgerError(f"{found.path} moves in a circle. Name the right one: [privacy] ledger in the run file.")


TOLD = ("population", "delta", "randomness", "drop_duplicates")
"""What of a run's public facts the population's ledger repeats."""


class JointLedger:
    """A run's ledger that also charges the run's population."""

    def __init__(self, ledger: Ledger, population: PopulationLedger) -> None:
        self._ledger = ledger
        self.population = population
        self.run = run_id(ledger)
        if self.run not in population.members:  # the store was copied without its ledger, or this is another one
            came = {"came_with": len(ledger)} if len(ledger) else {}
            population.register(self.run, {**told(ledger, ledger.path.parent.name), **came}, held=0)
        population.settle(self.run, ledger.entries)

    @classmethod
    def begin(cls, ledger: Ledger, population: PopulationLedger, name: str, parent: Ledger | None = None) -> None:
        """Enter a new run, whose ledger holds what was spent before it: the vocabulary and the run that it begins from."""
        if parent is not None:
            # DP: the earlier run had the same people, unless declared otherwise; on this very store it is charged already.
            population.register(run_id(parent), told(parent, parent.path.parent.name), held=0)
            population.settle(run_id(parent), parent.entries)
        population.register(run_id(ledger), told(ledger, name), held=len(ledger))

    def charge(self, event: Event, round: int) -> None:
        """Charge both, each on disk when this returns. Over the population's budget, neither is."""
        # DP: the people first: whatever happens next, their ledger never holds less than the run's.
        self.population.charge(self.run, len(self._ledger), event, round)
        self._ledger.charge(event, round)

    @property
    def facts(self) -> dict[str, Any]:
        return self._ledger.facts

    @property
    def entries(self) -> list[Entry]:
        return self._ledger.entries

    @property
    def events(self) -> list[Event]:
        return self._ledger.events

    @property
    def head(self) -> str:
        return self._ledger.head

    @property
    def position(self) -> dict[str, Any]:
        """Where the population's ledger stands; checkpoints remember it."""
        return self.population.position

    def __len__(self) -> int:
        return len(self._ledger)

    def contains(self, length: int, head: str) -> bool:
        return self._ledger.contains(length, head)


def new_run_id(reproducible: str | None = None) -> str:
    """A name that no other run has; of a seeded run, one that follows from its configuration, as all else does."""
    return secrets.token_hex(16) if reproducible is None else f"reproducible-{reproducible[:16]}"


def run_id(ledger: Ledger) -> str:
    """Of a run that was begun before runs had names: the hash of its ledger's first line."""
    return str(ledger.facts.get("run_id") or f"unnamed-{ledger.hash_at(0)[:32]}")


def told(ledger: Ledger, name: str) -> dict[str, Any]:
    facts = ledger.facts
    return {"name": name, **{key: facts[key] for key in TOLD if key in facts}}


def open_population_ledger(
    store: str | os.PathLike[str],
    corpus: str,
    vocabulary_events: Sequence[Mapping[str, Any]],
    ledger: str | os.PathLike[str] | None = None,
) -> PopulationLedger:
    """The ledger of a store's people, in the store's folder or where the run file says; their vocabulary is charged once."""
    # DP: a part of a store has no ledger of its own: what was charged there would be missing in the people's.
    if ledger is None and (Path(store) / "part.json").is_file():
        raise LedgerError(
            f"{store} is a part of a store, and its people's ledger lies with the whole one. Name it: [privacy] ledger = the whole "
            "store's ledger.jsonl; or give the whole store as corpus.path, and the parts as engine.corpus_part."
        )
    place = Path(ledger) if ledger is not None else Path(store) / FILE
    if place.is_dir():
        place = place / FILE
    if ledger is not None:
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
        except OSError as trouble:
            raise LedgerError(
                f"[privacy] ledger = {str(place)!r} cannot be made ({trouble.strerror}). Choose another folder."
            ) from None
    population = PopulationLedger.open(place, {"corpus": corpus})
    name = f"vocabulary-{corpus[:16]}"
    if vocabulary_events:
        population.register(name, {"name": "the private vocabulary"}, held=0)
        # DP: a vocabulary found in the users' own text was paid for by the same people, once for all runs.
        population.settle(name, [from_record(record) for record in vocabulary_events])
    return population
