"""The ledger of a population: the events of all runs on the same users.

The statement of a run covers only that run. If several runs train on the same users, for example one every month, their
costs add up. So every run on a store is also charged to a second ledger, which belongs to the store, or to several
stores whose users overlap. This module implements the composition over runs (docs/privacy.md, "all runs compose") and,
if the owner sets one, the budget over all runs. The design and its reasons:
docs/decisions/0030-a-ledger-for-the-store.md. Adaptive composition holds for events that are chosen after looking at
earlier results (Dwork, Rothblum and Vadhan 2010; for a run that is stopped when a budget is spent, Feldman and Zrnic
2021).

    open_population_ledger(store, ...)    open the ledger of a store, or create it; charges the store's vocabulary
    PopulationLedger.read(path)           read a ledger without a lock and without writing
    JointLedger(ledger, population)       a run's ledger that also charges the population (`run_ledger.py`)

Each line of the file (format: `ledger.py`) after the header is one of

    {"began": {"run": ..., "facts": ..., "held": n}, "once": ...}     a run began; the facts hold a digest of the text
    {"run": ..., "position": n, "event": {...}, "once": ...}          an event, at its position in the run's ledger; with
                                                                      its "round" if it was charged here, and "joined"
                                                                      if it came from another ledger
    {"budget": {"epsilon": ..., "delta": ..., "orders": [...], ...}}  the budget of all runs; the newest one counts
    {"moved": {"to": path}}                                           this ledger was joined to another one
    {"released": {"run": ..., "sha256": ...}}                         a model that a run on these users is about to write

`held` is the number of entries at the start of the run's ledger that are charged here under another id. `once` is a
random number, so that no two lines are equal.

**The record in the store.** The ledger is in the store, or at the path of `[privacy] ledger`. A new run has no
checkpoint that it could compare the ledger with. So the store has a small file, `ledgers.json`, with the position of
each ledger. If a ledger was deleted, replaced or cut, the run stops with an error instead of starting with an empty
ledger:

    {"known": {"ledger.jsonl": {"ledger": ..., "length": n, "head": ...}},     the last recorded position of each ledger
     "continues": {"ledger": path, "joined": false}}                           the ledger of an earlier store

The file has paths and hashes only. It is copied with the store, so a copy of the store without the ledger is refused
too. `prepare` writes the file and notes it in `digests.json`; if the file is missing, it was deleted. Stores of version
0.1.0 and parts of stores have no such file.
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
class ChargedRun:
    """One run in the ledger of a population.

    Attributes:
        id: The id of the run, unique among all runs.
        facts: Some of the public facts that the run declared.
        num_charged: The first `num_charged` entries of the run's own ledger are charged here.
        events: The events that are charged here under the id of this run.
        begun: How many times a run with this id began. Only a seeded run can begin twice, as a repetition.
        is_charged_again: Whether a position of the run's ledger was charged more than once.
        rounds: The round number of each event; -1 if the ledger does not say it.
        last_once: The text `once` of the newest charge.
    """

    id: str
    facts: dict[str, Any] = field(default_factory=dict)
    num_charged: int = 0
    events: list[Event] = field(default_factory=list)
    begun: int = 0
    is_charged_again: bool = False
    rounds: list[int] = field(default_factory=list)
    last_once: str = ""

    @property
    def has_repeats(self) -> bool:
        """Whether the charges may come from several run folders.

        Repetitions of a seeded run have the same id, and release the same models.
        """
        return self.id.startswith(REPRODUCIBLE) and (self.begun > 1 or self.is_charged_again)


class PopulationLedger:
    """An append-only list of the events of all runs on one population, with several writers.

    Every method that writes takes the lock of the file, reads what other processes have written meanwhile, and returns
    after its own line is synced to disk. All methods raise `LedgerError` if the file is damaged, cannot be read or
    written, or was shortened while in use.

    Attributes:
        runs: The runs by id, in the order in which they began.
        budget: The budget of all runs together; None if none is set.
        released: The id of the run of each model that was trained on these users, by the digest of its parameters.
        store: The folder of the store for which the ledger was opened or read; None if no store was named.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.runs: dict[str, ChargedRun] = {}
        self.released: dict[str, str] = {}
        self.budget: Budget | None = None
        self._running: RunningEpsilon | None = None
        self._is_declared, self._failure = False, 0.0
        self._records: list[dict[str, Any]] = []
        self._moved_to: Path | None = None
        self._came_from: tuple[ChainedFile, ...] = ()
        self._file = ChainedFile(path, FORMAT)
        self._home: tuple[Path, Path] | None = None  # the store, and the path of its ledger
        self.store: Path | None = None

    @classmethod
    def open(
        cls, path: str | os.PathLike[str], facts: Mapping[str, Any], *, must_exist: bool = False
    ) -> "PopulationLedger":
        """Open the ledger at `path` for charging. If it was moved, open it at its new path.

        Args:
            path: The file. If it does not exist, a new ledger is created.
            facts: The public facts of a new ledger.
            must_exist: Whether a missing file is an error, because a ledger existed before.

        Raises:
            LedgerError: The path is not a ledger (it is left unchanged), the ledger is damaged, or it must exist and is
                missing.
        """

        def open_here(path: Path) -> "PopulationLedger":
            """Open the ledger at a path, or create it. Does not follow moves."""
            population = cls(path)
            file = population._file
            with _advice_on_failure(file.path), file.locked():
                # DP: the missing ledger had charges, which a new ledger would forget.
                if must_exist and not os.path.lexists(file.path):
                    raise LedgerError(
                        f"{file.path} is missing: what these users have spent was recorded there. Put it back, or give "
                        "its new path: [privacy] ledger in the run file."
                    )
                if not os.path.lexists(file.path):
                    # With a random id, two new ledgers with equal facts are not mistaken for copies of one ledger.
                    file.create({"id": secrets.token_hex(16), **facts})
                population._refresh(repair=True)
            return population

        return _follow_moves(open_here(Path(path)), open_here)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> "PopulationLedger":
        """Read and verify the ledger at `path`, without a lock and without writing. If it was moved, follow it."""

        def read_here(path: Path) -> "PopulationLedger":
            """Read the ledger at a path without repairing it. Does not follow moves."""
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
        """The public facts of the header: a random id, and the name of the corpus that the ledger was created for."""
        return dict(self._file.facts)

    @property
    def position(self) -> dict[str, Any]:
        """The position of the ledger: its identity, length and last hash.

        It identifies everything charged so far. The checkpoints of a run store it, and `contains` checks it later.
        """
        return self._file.position

    def position_at(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """Return the position of the ledger file at `path`: this ledger, or a ledger that was moved to this one."""
        for file in (self._file, *self._came_from):
            if os.path.realpath(file.path) == os.path.realpath(path):
                return file.position
        return self.position

    @property
    def events(self) -> list[Event]:
        """The events of all runs, grouped by run."""
        return [event for charged_run in self.runs.values() for event in charged_run.events]

    def contains(self, position: Mapping[str, Any]) -> bool | None:
        """Whether this ledger had that position earlier and has only grown since.

        Returns:
            None if the position belongs to another ledger.
        """
        for file in (self._file, *self._came_from):
            if file.hashes[0] == position["ledger"]:
                # DP: a ledger that was cut at the end of a line has a valid chain; only this check shows that charges
                # are missing.
                return file.contains(position["length"], position["head"])
        return None

    def register(self, run: str, facts: Mapping[str, Any], num_charged: int, *, is_new: bool = False) -> None:
        """Record that a run began. Does nothing if the run is already recorded, unless `is_new`.

        Args:
            run: The id of the run.
            facts: Public facts of the run.
            num_charged: The number of entries at the start of the run's own ledger that need not be charged here, because they
                are charged under another id: those of the vocabulary and of an earlier run.
            is_new: Whether the run begins now. If the run is already recorded, it is a repetition of a seeded run.
        """
        with self._up_to_date():
            if is_new or run not in self.runs:
                began = {"run": run, "facts": dict(facts), "held": num_charged}
                # DP: a checkpoint holds the hash of this line, and the line holds a digest of the users' text; without
                # a secret number a reader of the checkpoint could test guesses about that text.
                self._write({"began": began, "once": secrets.token_hex(16)})

    def settle(self, run: str, entries: Sequence[Entry | Event]) -> int:
        """Charge the entries of a run's own ledger that are missing here, for example after a copy of the store.

        No budget is checked, because the rounds have already happened.

        Args:
            run: The id of the run.
            entries: All entries of the run's own ledger.

        Returns:
            The number of events that were missing.
        """
        with self._up_to_date():
            charged = self.runs[run].num_charged if run in self.runs else 0
            events = [item.event if isinstance(item, Entry) else item for item in entries[charged:]]
            # DP: the run was charged for the same users before its charges came here; no budget can undo that.
            self._write(*(_charge(run, position, event) for position, event in enumerate(events, start=charged)))
            return len(events)

    def charge(
        self, run: str, position: int, event: Event, round: int, *, again: str | None = None, once: str | None = None
    ) -> None:
        """Charge one more event of a run. It is synced to disk when this returns.

        Args:
            run: The id of the run.
            position: The position that the event will have in the run's own ledger.
            event: What the round will do to the users' data.
            round: The number of the round, for the entry and for error messages.
            again: For correlated noise: the text `once` of the charge here for this position, if the process was killed
                before it charged the run's ledger.
            once: A text that only this charge has, by which the caller can recognise it; None for a random text.

        Raises:
            BudgetExceeded: The event would exceed the budget of all runs together. Nothing is charged.
            LedgerError: A copy of the run was trained further with the same history of correlated noise.
            UnprovenCombination: There is a budget, and several runs drew the same cohorts.
        """
        with self._up_to_date():
            is_copy = run in self.runs and position < self.runs[run].num_charged and not run.startswith(REPRODUCIBLE)
            # DP: the later rounds of a block are free only if one process computes them all; a copy of the run draws
            # other noise.
            if is_copy and isinstance(event, CorrelatedGaussian) and event.index and again != self.runs[run].last_once:
                raise LedgerError(
                    f"Another copy of this run was charged for the same attempt in {self.path}. Two copies must not share one "
                    "history of correlated noise. Go on with the other copy, or resume this one with --new-noise: a new "
                    "mechanism begins and is charged from its first round."
                )
            if self.budget is not None:
                assert self._running is not None
                self.check_cohorts()
                # DP: checked under the lock, after the charges of all other runs are read, and before the round starts.
                whose = f"all runs on this population ({self.path})"
                self.budget.check(self._running, event, round, whose, larger="with `unheard budget --epsilon`")
            # DP: every charge is a new line, because a copy of this run that is trained further releases its own
            # models.
            self._write({**_charge(run, position, event, once), "round": round})

    def record_release(self, run: str, sha256: str) -> None:
        """Record a model that a run is about to write. A copy of the model can then be recognised by its parameters.

        Args:
            run: The id of the run.
            sha256: The digest of the model's parameters.
        """
        with self._up_to_date():
            if sha256 not in self.released:
                self._write({"released": {"run": run, "sha256": sha256}})

    def remember(self) -> None:
        """Record the position of the ledger in the store, so that a later cut of the ledger is detected.

        It is recorded in the store that it was opened for, and in the store that it lies in.

        Raises:
            LedgerError: The ledger lacks charges that one of these stores has recorded.
        """
        places = {self._home} if self._home is not None else set()
        if (self.path.parent / RECORD).exists():
            places.add((self.path.parent, self.path))
        for store, path in places:
            with _advice_on_failure(store):
                known, position = known_position(store, path), self.position_at(path)
                # DP: a later position would hide that charges were cut off before. Another process may know a longer
                # ledger; then the record stays as it is.
                if known is None or not _is_later(known, position):
                    _check_position(self, known, path)
                remember_position(store, path, position)

    def set_budget(self, budget: Budget) -> None:
        """Set what all runs together may spend, including what is spent already.

        The newest budget counts; earlier ones stay in the file. A budget with orders (`accountants.FILTER_ORDERS`) is a
        privacy filter: see `is_filter`.

        Raises:
            UnprovenCombination: Several runs drew the same cohorts.
        """
        with self._up_to_date():
            self.check_cohorts()
            self._write({"budget": budget.record})

    def join(self, other: "PopulationLedger", *, keep_budget: bool = False) -> None:
        """Declare that another ledger has the same users. Copies its charges here, and makes it refer to this ledger.

        Args:
            other: The other ledger. Later charges to it are written here.
            keep_budget: Whether to copy the budget of `other` too, if this ledger has none.

        Raises:
            InvalidValue: Both are already the same ledger.
        """
        if other.path == self.path:
            raise InvalidValue(f"{self.path} already is the ledger of both stores.")
        # Lock in a fixed order, so that two processes cannot deadlock.
        first, second = sorted((self, other), key=lambda population: population.path)
        with first._up_to_date(), second._up_to_date():
            # Copies of one ledger have the same first lines, which must not be charged twice. Every later line is a
            # separate charge, even if it is for the same run.
            pairs = zip(self._file.hashes, other._file.hashes, strict=False)
            shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            with_budget = keep_budget and self.budget is None
            records = other._records[max(shared - 1, 0) :]
            if not with_budget:
                # DP: the budget of this ledger may have been declared after a look at the results of these rounds.
                records = [{**record, "joined": True} for record in records if "budget" not in record]
            self._write(*records)
            # DP: from the next line on, every charge to the other ledger is written here, also by runs that are
            # training now.
            other._write({"moved": {"to": os.path.relpath(self.path, other.path.parent)}})
            # DP: the other ledger as it was before would take the next charges, and this one would miss them.
            other.remember()

    def take_over(self, earlier: "PopulationLedger") -> None:
        """Copy the charges and the budget of the ledger of an earlier store that has some of the same users."""
        # DP: users who are in both stores keep what they were charged; a user who is only in one is counted too high.
        if earlier.path != self.path:  # equal if an earlier call was interrupted after the join
            self.join(earlier, keep_budget=True)
        # DP: the earlier ledger was copied to this one, which was lost and begun anew.
        elif not self._records and any(len(file) > 1 for file in earlier._came_from):
            raise LedgerError(
                f"{self.path} has lost the charges that were copied to it from {earlier._came_from[-1].path}. Put the "
                "right ledger back; without it what these users have spent cannot be known."
            )

    def check_cohorts(self) -> None:
        """Raise `UnprovenCombination` if several runs drew the same cohorts (`training.shared_cohorts`)."""
        names = [
            str(charged_run.facts.get("name", charged_run.id))
            for charged_run in self.runs.values()
            if "cohorts" in (charged_run.facts.get("randomness") or {})
        ]
        # DP: composition assumes that each run draws its cohorts independently of all other runs.
        if len(names) > 1:
            more = f" and {len(names) - 8} more" if len(names) > 8 else ""
            raise UnprovenCombination(
                f"The runs {', '.join(names[:8])}{more} drew the same cohorts (training.shared_cohorts), and composition is "
                "proved for cohorts drawn independently: there is no epsilon of all runs together, and no budget can hold "
                "it. `unheard statement RUN` is about one of them. For all together, train without shared_cohorts."
            )

    @property
    def is_filter(self) -> bool:
        """Whether all charges are within a budget that was declared before the first round.

        The budget is then a privacy filter, and the claim over all runs is the budget itself. Rounds that were charged
        to another ledger and came here later end this, because they may have been known when the budget was declared.
        """
        running, budget = self._running, self.budget
        if budget is None or running is None or not self._is_declared:
            return False
        return running.failure == self._failure and running.epsilon <= budget.epsilon

    def running(self, delta: float, accountant: str = RUNNING_ACCOUNTANT) -> RunningEpsilon:
        """Return the running epsilon of all runs together. Further events can be charged to it.

        Args:
            delta: The delta of the guarantee.
            accountant: An accountant with additive costs: "rdp" or "moments".
        """
        return RunningEpsilon(delta, accountant, self.events)

    @contextlib.contextmanager
    def _up_to_date(self) -> Iterator[None]:
        """Hold the lock of the ledger, after reading what other processes wrote.

        If another process has moved the ledger meanwhile, this object becomes the ledger at the new path.
        """
        for _ in range(MAX_MOVES):
            with _advice_on_failure(self.path), self._file.locked():
                self._refresh(repair=True)
                if self._moved_to is None:
                    yield
                    return
            there = PopulationLedger.open(self._moved_to, {}, must_exist=True)
            there._came_from += (self._file, *self._came_from)
            self.__dict__.update(there.__dict__, _home=self._home, store=self.store)
        raise LedgerError(
            f"{self.path} refers to a ledger that refers back to it. Name the right one: [privacy] ledger."
        )

    def _write(self, *records: dict[str, Any]) -> None:
        if records:
            self._file.append(records)
        for record in records:
            self._apply(record)

    def _refresh(self, *, repair: bool) -> None:
        """Read the records that were appended since the last read, and apply them.

        Args:
            repair: Whether to repair an incomplete last line of the file.
        """
        for record in self._file.read():
            try:
                self._apply(record)
            except (KeyError, TypeError, ValueError, AttributeError, InvalidValue):
                raise LedgerError(
                    f"{self.path}: a line is intact, but this version does not know its kind. Use the version that wrote it."
                ) from None
        if repair:
            self._file.repair()

    def _apply(self, record: dict[str, Any]) -> None:
        """Update `runs`, `budget` and the other attributes with one record of the file."""
        if "began" in record:
            began = record["began"]
            charged_run = self.runs.setdefault(began["run"], ChargedRun(id=began["run"]))
            charged_run.facts = dict(began["facts"])
            charged_run.num_charged = max(charged_run.num_charged, int(began["held"]))
            charged_run.begun += 1
        elif "budget" in record:
            budget = Budget(**record["budget"])
            is_first = self.budget is None and not has_rounds(self.events)
            # DP: a budget that was declared or changed after results were seen may depend on them.
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
            charged_run = self.runs.setdefault(record["run"], ChargedRun(id=record["run"]))
            charged_run.is_charged_again |= int(record["position"]) < charged_run.num_charged
            charged_run.num_charged = max(charged_run.num_charged, int(record["position"]) + 1)
            charged_run.events.append(event)
            charged_run.rounds.append(int(record.get("round", -1)))
            charged_run.last_once = str(record.get("once", ""))
            # DP: rounds that were charged elsewhere, and came by `join` or `settle`, were not checked against the budget.
            self._is_declared &= not has_rounds([event]) or ("round" in record and "joined" not in record)
            if self._running is not None:
                self._running.charge(event)
        self._records.append(record)


def vocabulary_run(corpus: str) -> str:
    """Return the id under which the private vocabulary of a corpus is charged."""
    return f"vocabulary-{corpus[:16]}"


def check_ledger_path(ledger: str | os.PathLike[str] | None) -> None:
    """Raise `InvalidValue` if the path of a ledger is empty, which would mean a file in the working folder."""
    # DP: a run that is started in another folder would charge another ledger, and the charges would not compose.
    if ledger is not None and os.path.normpath(os.fspath(ledger).strip()) == ".":
        raise InvalidValue(
            f"[privacy] ledger = {os.fspath(ledger)!r} names no file. Leave it out for the store's own ledger, or name a file: "
            "the same one for every run on these users."
        )


def ledger_path(store: str | os.PathLike[str], ledger: str | os.PathLike[str] | None) -> Path:
    """Return the file of the ledger of a store's users.

    Args:
        store: The folder of the store.
        ledger: The file that the run file names, or the folder that holds it; None for the store's own ledger.
    """
    path = Path(ledger) if ledger is not None else Path(store) / FILE
    return path / FILE if path.is_dir() else path


def open_population_ledger(
    store: str | os.PathLike[str],
    corpus: str,
    vocabulary_events: Sequence[Mapping[str, Any]],
    ledger: str | os.PathLike[str] | None = None,
    *,
    must_exist: bool = False,
    must_be_only: bool = False,
) -> PopulationLedger:
    """Open the ledger of a store's population, and charge the store's vocabulary to it once.

    Args:
        store: The folder of the token store.
        corpus: The name of the corpus, for the header of a new ledger.
        vocabulary_events: The records of the events of the store's private vocabulary; empty for a public vocabulary.
        ledger: The file or folder of the ledger if it is not in the store (`[privacy] ledger` in the run file).
        must_exist: Whether a missing file is an error, because a ledger existed before.
        must_be_only: Whether it is an error if runs on the store were charged in another ledger.

    Raises:
        InvalidValue: `ledger` is empty.
        LedgerError: The store is a part of another store and no ledger is named, the ledger cannot be used, or it is
            not the ledger that earlier runs on the store were charged to.
    """
    check_ledger_path(ledger)
    # DP: a part of a store has no ledger, because charges to it would be missing in the population's ledger.
    if ledger is None and (Path(store) / "part.json").is_file():
        raise LedgerError(
            f"{store} is a part of a store, and the ledger of its users belongs to the whole one. Name it: [privacy] ledger = "
            "the whole store's ledger.jsonl; or give the whole store as corpus.path, and the parts as engine.corpus_part."
        )
    path = ledger_path(store, ledger)
    if must_be_only and not os.path.lexists(path):
        check_one_ledger(Path(store), path, None)
    if ledger is not None and not must_exist:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LedgerError(
                f"[privacy] ledger = {str(path)!r} cannot be created ({error.strerror}). Choose another folder."
            ) from None
    known = _known_positions(Path(store), path)
    joined = None
    # DP: opened first, so that no empty ledger of this store is left behind if the earlier one cannot be used.
    if (earlier := ledger_to_join(Path(store))) is not None:
        position = known_position(earlier.parent, earlier)
        joined = PopulationLedger.open(earlier, {}, must_exist=True)
        _check_position(joined, position, earlier)
    population = PopulationLedger.open(path, {"corpus": corpus}, must_exist=must_exist or any(known))
    for position in known:
        _check_position(population, position, path)
    if joined is not None:
        population.take_over(joined)
        mark_joined(Path(store))
    if must_be_only:
        check_one_ledger(Path(store), path, population)
    name = vocabulary_run(corpus)
    if vocabulary_events:
        population.register(name, {"name": "the private vocabulary"}, num_charged=0)
        # DP: a private vocabulary was computed from the same users' text, so they are charged for it, once for all
        # runs.
        population.settle(name, [from_record(record) for record in vocabulary_events])
    population._home, population.store = (Path(store), path), Path(store)
    population.remember()
    return population


def read_population_ledger(store: Path, ledger: Path) -> PopulationLedger:
    """Read the ledger of a store's population without writing, and check it against the record in the store.

    Args:
        store: The folder of the token store.
        ledger: The file of the population's ledger.

    Raises:
        LedgerError: The ledger is damaged, shortened or replaced, lacks the charges of an earlier store that the store
            continues, or the store's record of its ledgers is damaged.
    """
    check_joined(store)
    # A run may be training meanwhile. The ledger only grows, so a position that is read first is in the ledger later.
    known = _known_positions(store, ledger)
    population = PopulationLedger.read(ledger)
    for position in known:
        _check_position(population, position, ledger)
    population.store = store
    return population


def read_corpus_record(store: Path) -> dict[str, Any]:
    """Read corpus.json of a store, which lists the events of a private vocabulary.

    Raises:
        LedgerError: The file cannot be read, or was changed after it was written.
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
            f"{path} is not as it was written, so what the vocabulary of this store cost cannot be known. Put an intact copy "
            "back."
        ) from None


def known_position(store: Path, ledger: Path) -> Mapping[str, Any] | None:
    """Return the position of a ledger that the store last recorded; None if the store has no record of this ledger.

    Args:
        store: The folder of the token store.
        ledger: The file of the population's ledger.

    Raises:
        LedgerError: The store's record is damaged.
    """
    known = _read_record(store)["known"]
    # If the store's ledger is a symbolic link, an earlier version recorded the path of the target.
    return known.get(_record_key(store, ledger)) or known.get(os.path.realpath(ledger))


def _known_positions(store: Path, ledger: Path) -> list[Mapping[str, Any] | None]:
    """Return the positions of a ledger that a store and the store that the ledger lies in have recorded.

    Args:
        store: The folder of the token store.
        ledger: The file of the population's ledger, in this or another folder.
    """
    # DP: the ledger may have been cut before this store was charged to it for the first time.
    return [known_position(place, ledger) for place in (store, ledger.parent)]


def _is_later(known: Mapping[str, Any], position: Mapping[str, Any]) -> bool:
    """Whether a recorded position is one of the same ledger with more charges."""
    is_same = known["ledger"] == position["ledger"] and type(known["length"]) is int
    return is_same and known["length"] > position["length"]


def known_ledgers(store: Path) -> list[Path]:
    """Return the files of all ledgers that the store has recorded. A ledger outside the store may not be there.

    Raises:
        LedgerError: The store's record is damaged.
    """
    return [store / key for key in _read_record(store)["known"]]


def check_one_ledger(store: Path, path: Path, population: PopulationLedger | None) -> None:
    """Raise `LedgerError` if runs on a store were charged in another ledger (see `charged_elsewhere`)."""
    # DP: a total, a budget or a newer store would not count the charges in the other ledger.
    if message := charged_elsewhere(store, path, population):
        raise LedgerError(message)


def charged_elsewhere(store: Path, path: Path, population: PopulationLedger | None) -> str:
    """Return which other ledger has charges to the users of a store, and how to count them; empty if none has.

    Args:
        store: The folder of the store.
        path: The file of the ledger that should have all charges.
        population: The ledger; None if the file is still to be created.

    Raises:
        LedgerError: The other ledger is damaged.
    """
    counted = {os.path.realpath(path)} | ({os.path.realpath(population.path)} if population is not None else set())
    for key, position in _read_record(store)["known"].items():
        other = store / key
        # A ledger that contains the position is the same one, perhaps at another path, or the other was moved to it.
        if os.path.realpath(other) in counted or (population is not None and population.contains(position)):
            continue
        if not other.is_file():
            return f"{other} is missing: runs on {store} were charged there. Put it back."
        read = PopulationLedger.read(other)
        if os.path.realpath(read.path) not in counted and read.events:
            outside = path if other.parent == store else other
            return (
                f"Runs on {store} were charged in {other}, and {path} does not count them. Count all runs in one ledger: "
                f"unheard budget {store} --ledger {outside} --same-users {store}."
            )
    return ""


def remember_position(store: Path, ledger: Path, position: Mapping[str, Any]) -> None:
    """Record the position of a ledger in the store.

    Nothing is recorded if the store is read-only and the ledger is outside the store, or for the temporary ledger of
    the trials of a private selection.

    Args:
        store: The folder of the token store.
        ledger: The file of the population's ledger.
        position: `PopulationLedger.position` of that file.
    """
    # DP: the length of the ledger of a selection's trials would say how many trials there were.
    if any(Path(ledger).is_relative_to(folder) for folder in storage.STAGED):
        return
    key = _record_key(store, ledger)

    def change(record: dict[str, Any]) -> dict[str, Any]:
        """Return the record with the new position, unless it already has a later position of the same ledger."""
        known = record["known"].get(key)
        # DP: another run may have recorded a later position meanwhile. Replacing it by an earlier one could hide a cut
        # of the ledger.
        is_later = known is not None and _is_later(known, position)
        return {**record, "known": {**record["known"], key: known if is_later else dict(position)}}

    record = _read_record(store)
    if change(record) != record:
        try:
            _change_record(store, change)
        except OSError as error:
            if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM) or not os.path.isabs(key):
                raise


def continue_ledger(store: Path, earlier: Path) -> None:
    """Record in a new store that it continues the ledger at `earlier`.

    The charges of that ledger are copied when the store's own ledger is opened for the first time.
    """
    continues = {"ledger": os.path.abspath(earlier), "joined": False}
    _change_record(store, lambda record: {**record, "continues": continues})


def ledger_to_join(store: Path) -> Path | None:
    """Return the path of the earlier store's ledger if its charges still have to be copied; None otherwise."""
    continues = _read_record(store)["continues"]
    return None if continues is None or continues["joined"] else Path(continues["ledger"])


def check_joined(store: Path) -> None:
    """Raise `LedgerError` if the store continues the charges of an earlier store that are not copied yet."""
    # DP: users of the earlier store have charges that are not in a ledger of this store yet.
    if (earlier := ledger_to_join(store)) is not None:
        raise LedgerError(
            f"{store} continues the charges in {earlier}, which are not copied yet. `unheard budget {store}` copies them."
        )


def mark_joined(store: Path) -> None:
    """Record that the store's own ledger has the charges of the earlier one. The earlier store may then be deleted."""
    _change_record(store, lambda record: {**record, "continues": {**record["continues"], "joined": True}})


def _check_position(population: PopulationLedger, position: Mapping[str, Any] | None, path: Path) -> None:
    """Raise `LedgerError` if a ledger does not contain the position that its store recorded."""
    # DP: a ledger that was cut or replaced would hide charges to these users.
    if position is not None and not population.contains(position):
        raise LedgerError(
            f"{path} does not hold what was charged when its store last recorded it ({RECORD}): it was shortened or "
            "replaced. Put the right one back; without it what these users have spent cannot be known."
        )


def _charge(run: str, position: int, event: Event, once: str | None = None) -> dict[str, Any]:
    """Return the record of one charge."""
    # Two copies of a ledger may be charged for equal events. With the random number the lines differ, so that `join`
    # counts both.
    return {"run": run, "position": position, "event": to_record(event), "once": once or secrets.token_hex(8)}


def _follow_moves(population: PopulationLedger, open_here: Callable[[Path], PopulationLedger]) -> PopulationLedger:
    """Return the ledger that this one was moved to, or the ledger itself if it was not moved.

    Args:
        population: The ledger to start from.
        open_here: Opens or reads the ledger at a path.
    """
    for _ in range(MAX_MOVES):
        path = population._moved_to
        if path is None:
            return population
        if not path.is_file():
            raise LedgerError(
                f"{population.path} has moved to {path}, which is not there: these stores were declared one population. "
                "Put that ledger back, or give its new path: [privacy] ledger in the run file."
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
    """Return the key of a ledger in `ledgers.json`: its name if it is in the store, else its path."""
    # DP: a link in the place of the store's ledger is compared with the record of that ledger, not with that of the
    # file it leads to.
    if os.path.realpath(ledger.parent) == os.path.realpath(store):
        return ledger.name
    return os.path.realpath(ledger)


def _read_record(store: Path) -> dict[str, Any]:
    """Read `ledgers.json` of a store. Raises `LedgerError` if it is damaged, or missing although it was written."""
    path = store / RECORD
    try:
        if not os.path.lexists(path):
            # DP: a store that was prepared with the record but lacks it may have been charged to a ledger that is
            # missing.
            if (_digests(store) or {}).get("ledgers"):
                raise LedgerError(
                    f"{path} is missing: it records which ledgers this store has been charged in. Put it back; without it "
                    "it is unknown whether the ledger is complete. If it is lost, prepare the store again with `unheard "
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
            f"{path} is damaged: it records which ledgers this store has been charged in. Put back an intact copy."
        ) from None
    return {"known": known, "continues": continues}


def _digests(store: Path) -> dict[str, Any] | None:
    """Return the content of digests.json; None for a store of version 0.1.0, which has no such file."""
    if os.path.lexists(store / DIGESTS):
        return parse_json((store / DIGESTS).read_text(encoding="utf-8"))
    # DP: corpus.json says whether the store was prepared with digests; without them a deleted record is not noticed.
    if os.path.lexists(store / "corpus.json") and parse_json((store / "corpus.json").read_bytes()).get("digests"):
        raise LedgerError(
            f"{store / DIGESTS} is missing: it says which files this store was prepared with, the record of its ledgers "
            "among them. Put it back; without it, it is unknown whether the ledger is complete."
        )
    return None


def _change_record(store: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Replace `ledgers.json` of a store by a changed one, under a lock.

    Args:
        store: The folder of the token store.
        change: Computes the new record from the current one.
    """
    with storage.locked(store / f".{RECORD}.lock", wait=60):
        record = change(_read_record(store))
        storage.replace_file(store / RECORD, (json.dumps(record, indent=2) + "\n").encode())
