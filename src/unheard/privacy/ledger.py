"""A run's ledger: the events that the run was charged for, in a hash-chained file that can only grow.

This module implements "charge before release" for one run: the event of a round is on disk before the round's cohort is
drawn (docs/privacy.md; paper: the composition over rounds of Theorem 1 counts every round that was started). A crash
can leave an event without a model, never a model without its event. The statement of a run is computed from its ledger.

    ledger = Ledger.create("runs/first/ledger.jsonl", {"population": 763_430, "delta": 1e-9})
    ledger.charge(PoissonGaussian(sampling_prob=0.0065, noise_multiplier=1.0), round=0)
    Ledger.read("runs/first/ledger.jsonl").events

In: the public facts of a run, then one event per attempted round. Out: the events that happened, in order. A checkpoint
remembers `(len(ledger), ledger.head)`; on resume `ledger.contains(length, head)` shows that nothing was cut off since.
The file format and its verification are in `hash_chain.py`; the ledger of all runs on a population is in
`population_ledger.py`.
"""

import copy
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unheard.errors import LedgerError
from unheard.privacy.events import Event, from_record, to_record
from unheard.privacy.hash_chain import RESTORE, ChainedFile

FORMAT = "unheard-ledger-1"
_FACTS: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("delta",), (int, float)),
    **dict.fromkeys(("population", "parameters"), int),
    **dict.fromkeys(("run_id", "run_hash", "corpus"), str),
    **dict.fromkeys(
        (
            "sampling",
            "weights",
            "estimator",
            "update",
            "vocabulary",
            "start",
            "randomness",
            "software",
            "selection",
            "declared",
            "correlated_noise",
            "federated",
        ),
        dict,
    ),
}
"""The types of the facts that a header may declare; checked on reading, so that later code can rely on them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One charged event.

    Attributes:
        event: What happened to the users' data.
        round: The round that was charged. A round that is repeated after a crash is charged again.
        hash: The hash of the line in the file.
    """

    event: Event
    round: int
    hash: str


class Ledger:
    """An append-only list of events in a file, with one writer.

    `Ledger.create` begins a ledger, `Ledger.open` continues one, and `Ledger.read` looks at one, also while a run is
    writing to it. All three verify the whole file and raise `LedgerError` if it is damaged.

    >>> import tempfile
    >>> from unheard.privacy.events import PoissonGaussian
    >>> path = Path(tempfile.mkdtemp()) / "ledger.jsonl"
    >>> ledger = Ledger.create(path, {"population": 1000})
    >>> ledger.charge(PoissonGaussian(sampling_prob=0.01, noise_multiplier=1.0), round=0)
    >>> Ledger.read(path).events
    [PoissonGaussian(sampling_prob=0.01, noise_multiplier=1.0)]
    """

    def __init__(self, file: ChainedFile) -> None:
        self._file = file
        self._entries: list[Entry] = []
        self._writable = False

    @classmethod
    def create(cls, path: str | os.PathLike[str], facts: Mapping[str, Any]) -> "Ledger":
        """Begin a ledger.

        Args:
            path: A file that does not exist yet.
            facts: The run's public facts, as plain JSON values; they become the file's first line.

        Raises:
            LedgerError: The path exists, cannot be written, or the facts are no plain JSON.
        """
        file = ChainedFile(path, FORMAT)
        try:
            file.create(facts)
        except FileExistsError:
            raise LedgerError(
                f"{file.path} exists: a ledger is never written over. Resume its run or take a new folder."
            ) from None
        except OSError as error:
            raise LedgerError(
                f"{file.path} cannot be written ({error.strerror}). Check space and permissions."
            ) from error
        ledger = cls(file)
        ledger._writable = True
        return ledger

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> "Ledger":
        """Read and verify a ledger in order to charge it further; a line torn by a power loss is cut off.

        Raises:
            LedgerError: There is no ledger at the path, it is damaged, or it cannot be repaired.
        """
        ledger = cls.read(path)
        try:
            ledger._file.repair()
        except OSError as error:
            raise LedgerError(f"The torn end of {ledger.path} cannot be mended ({error.strerror}).") from error
        ledger._writable = True
        return ledger

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> "Ledger":
        """Read and verify a ledger without touching the file.

        Raises:
            LedgerError: There is no ledger at the path, or it is damaged.
        """
        file = ChainedFile(path, FORMAT)
        try:
            records = file.read()
        except OSError as error:
            raise LedgerError(f"No ledger can be read at {file.path} ({error.strerror}). Name a run folder.") from None
        for name, kind in _FACTS.items():
            fact = file.facts.get(name)
            if fact is not None and (not isinstance(fact, kind) or isinstance(fact, bool)):
                raise LedgerError(
                    f"{file.path}, line 1: '{name}' is {str(fact)[:50]!r}, which no run declares. {RESTORE}"
                )
        ledger = cls(file)
        for number, record in enumerate(records, start=2):
            if record.keys() != {"round", "event"} or not _is_round(record["round"]):
                raise LedgerError(f"{file.path}, line {number}: an entry has a 'round' and an 'event' only. {RESTORE}")
            try:
                event = from_record(record["event"])
            except LedgerError as error:
                raise LedgerError(f"{file.path}, line {number}: {error}") from None
            ledger._entries.append(Entry(event=event, round=record["round"], hash=file.hashes[number - 1]))
        return ledger

    @property
    def path(self) -> Path:
        """The file, as an absolute path."""
        return self._file.path

    @property
    def repaired(self) -> str | None:
        """What a power loss left at the end of the file and `open` mends, in words; None if the file was whole."""
        return self._file.repaired

    @property
    def facts(self) -> dict[str, Any]:
        """A copy of the public facts of the run.

        The header has them, but for those about the nodes of a federated run: they are in federated.json beside the
        ledger, so that the same run without nodes has the same ledger.

        Raises:
            LedgerError: federated.json is damaged.
        """
        facts, beside = copy.deepcopy(self._file.facts), self._file.path.with_name("federated.json")
        if beside.exists():
            try:
                nodes = json.loads(beside.read_text(encoding="utf-8"))
            except (OSError, ValueError, RecursionError):
                nodes = None
            if not isinstance(nodes, dict):
                raise LedgerError(f"{beside} is damaged. {RESTORE}")
            facts.setdefault("federated", nodes)
        return facts

    @property
    def entries(self) -> list[Entry]:
        """All charges in order."""
        return list(self._entries)

    @property
    def events(self) -> list[Event]:
        """The events of all charges in order."""
        return [entry.event for entry in self._entries]

    @property
    def head(self) -> str:
        """The hash of the last line; together with `len(ledger)` it identifies everything charged so far."""
        return self._file.head

    def hash_at(self, length: int) -> str:
        """The hash that `head` was when the ledger had `length` entries; for 0, the header's."""
        return self._file.hashes[length]

    def __len__(self) -> int:
        return len(self._entries)

    def contains(self, length: int, head: str) -> bool:
        """Whether this ledger is the one that had `length` entries and the hash `head`, or has grown out of it."""
        return self._file.contains(length, head)

    def charge(self, event: Event, round: int) -> None:
        """Append one event; it is on disk when this returns. A round that is repeated is charged again.

        Args:
            event: What the round will do to the users' data.
            round: The number of the round, from 0.

        Raises:
            LedgerError: The event could not be written, or another process has written to the file. Nothing of the
                round may be released.
        """
        self.charge_all([event], round)

    def charge_all(self, events: Sequence[Event], round: int) -> None:
        """Append several events in one write, for example everything that an earlier run has cost."""
        if not self._writable:
            raise LedgerError(f"{self.path} is not open for charging. Open it (again) with Ledger.open.")
        if not _is_round(round):
            raise LedgerError(f"A round is a whole number from 0 up, not {round!r}.")
        records = [{"round": round, "event": to_record(event)} for event in events]
        self._writable = False  # until the lines are known to be on disk
        try:
            # DP: written and synced before charge() returns, and so before anything of the round can be seen.
            self._file.append(records)
        except OSError as error:
            raise LedgerError(
                f"The event of round {round} could not be written to {self.path} ({error.strerror or error}). "
                "Nothing of this round may be released. Free some space if the disk is full, then resume the run."
            ) from error
        self._writable = True
        hashes = self._file.hashes[len(self) + 1 :]
        self._entries += [Entry(event=e, round=round, hash=h) for e, h in zip(events, hashes, strict=True)]


def _is_round(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
