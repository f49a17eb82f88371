"""What has been charged, kept so that it can only grow: one line per event, on disk before the model can be seen.

In: the public facts of a run, then one event per attempted round. Out: the events that really happened, in order.
A hash chain is no signature: whoever can write the file can write all of it anew. A checkpoint that remembers
(len(ledger), ledger.head) can show that the ledger was not shortened since: ledger.contains(length, head).
"""

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unheard import storage
from unheard.errors import LedgerError
from unheard.privacy import hash_chain as chain
from unheard.privacy.events import Event, from_record, to_record

FORMAT = "unheard-ledger-1"
_FACTS: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("delta",), (int, float)),
    **dict.fromkeys(("population", "parameters"), int),
    **dict.fromkeys(("run_id", "run_hash", "corpus"), str),
    **dict.fromkeys(
        ("sampling", "weights", "estimator", "update", "vocabulary", "start", "randomness", "software", "selection"),
        dict,
    ),
}
"""What a header's facts must be where they are given, so that nobody downstream has to wonder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One charged event, the round it was charged for, and the hash of its line."""

    event: Event
    round: int
    hash: str


class Ledger:
    """An append-only list of events in a file. Begin one with `create`, go on with `open`, look with `read`."""

    def __init__(self, path: Path, facts: dict[str, Any], head: str, size: int) -> None:
        self.path = path
        self.repaired: str | None = None  # what a power loss left behind and `open` mended, in words
        self._facts = facts
        self._hashes = [head]  # of the header, then of every entry
        self._entries: list[Entry] = []
        self._size = size  # of the whole lines, in bytes; a file of another size is not written to
        self._writable = False

    @classmethod
    def create(cls, path: str | os.PathLike[str], facts: Mapping[str, Any]) -> "Ledger":
        """Begin a ledger with the run's public facts. An existing file is never written over."""
        path = Path(os.path.abspath(path))
        kept = copy.deepcopy(dict(facts))
        line, head = chain.seal({"ledger": FORMAT, "facts": kept}, "")
        try:
            storage.create_file(path, line)
        except FileExistsError:
            raise LedgerError(
                f"{path} exists: a ledger is never written over. Resume its run or take a new folder."
            ) from None
        except OSError as trouble:
            raise LedgerError(
                f"{path} cannot be written ({trouble.strerror}). Check space and permissions."
            ) from trouble
        ledger = cls(path, kept, head, len(line))
        ledger._writable = True
        return ledger

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> "Ledger":
        """Read and verify a ledger in order to go on with it. Half a last line, from a power loss, is cut off."""
        ledger, size_on_disk = cls._load(path)
        try:
            if ledger._size < size_on_disk:
                storage.truncate(ledger.path, ledger._size, expected_size=size_on_disk)
            elif ledger._size > size_on_disk:  # whole but for its newline
                storage.append(ledger.path, b"\n", expected_size=size_on_disk)
        except OSError as trouble:
            raise LedgerError(f"The torn end of {ledger.path} cannot be mended ({trouble.strerror}).") from trouble
        ledger._writable = True
        return ledger

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> "Ledger":
        """Read and verify a ledger without touching the file (a run may be writing to it)."""
        return cls._load(path)[0]

    @property
    def facts(self) -> dict[str, Any]:
        return copy.deepcopy(self._facts)

    @property
    def entries(self) -> list[Entry]:
        return list(self._entries)

    @property
    def events(self) -> list[Event]:
        return [entry.event for entry in self._entries]

    @property
    def head(self) -> str:
        """The hash of the last line; together with len(ledger) it names everything charged so far."""
        return self._hashes[-1]

    def hash_at(self, length: int) -> str:
        """The hash of the line after which the ledger had `length` entries; of 0, the header's."""
        return self._hashes[length]

    def __len__(self) -> int:
        return len(self._entries)

    def contains(self, length: int, head: str) -> bool:
        """Whether this ledger is the one so remembered, or has grown out of it."""
        # DP: a ledger cut at a line's end has a valid chain; only this tells it from a shorter, cheaper run.
        return 0 <= length <= len(self) and self._hashes[length] == head

    def charge(self, event: Event, round: int) -> None:
        """Append one event; when this returns, it is on disk. A round that is done again is charged again."""
        self.charge_all([event], round)

    def charge_all(self, events: Sequence[Event], round: int) -> None:
        """Append many events in one write: what an earlier run has cost, of which nothing may be left out."""
        if not self._writable:
            raise LedgerError(f"{self.path} is not open for charging. Open it (again) with Ledger.open.")
        if not _is_round(round):
            raise LedgerError(f"A round is a whole number from 0 up, not {round!r}.")
        sealed, head = [], self.head
        for event in events:
            one, head = chain.seal({"round": round, "event": to_record(event)}, head)
            sealed.append((event, head, one))
        line = b"".join(one for _, _, one in sealed)
        self._writable = False  # until the line is known to be on disk
        try:
            # DP: written and synced before charge() returns, and so before anything of the round can be seen.
            storage.append(self.path, line, expected_size=self._size)
        except OSError as trouble:
            raise LedgerError(
                f"The event of round {round} could not be written to {self.path} ({trouble.strerror or trouble}). "
                "Nothing of this round may be released. Free some space if the disk is full, then resume the run."
            ) from trouble
        self._writable = True
        for event, head, one in sealed:
            self._keep(event, round, head, len(one))

    @classmethod
    def _load(cls, path: str | os.PathLike[str]) -> tuple["Ledger", int]:
        """The ledger as its whole lines tell it, and the file's true size (another one if its end is torn)."""
        path = Path(os.path.abspath(path))
        try:
            data = path.read_bytes()
        except OSError as trouble:
            raise LedgerError(f"No ledger can be read at {path} ({trouble.strerror}). Name a run folder.") from None
        *lines, rest = data.split(b"\n")
        if not lines:
            hint = "If a run was just being created, delete the file: nothing was charged."
            raise LedgerError(f"{path} is not a ledger: it has no whole first line. {hint}")
        ledger = cls._from_header(path, lines[0])
        if not rest and len(lines) > 1 and chain.is_torn(lines[-1]):
            rest = lines.pop()
        for number, line in enumerate(lines[1:], start=2):
            ledger._read_line(line, number)
        if rest:
            ledger._mend(rest)
        return ledger, len(data)

    @classmethod
    def _from_header(cls, path: Path, line: bytes) -> "Ledger":
        record, head = _unsealed(line, "", path, 1)
        if record.keys() != {"ledger", "facts"} or record["ledger"] != FORMAT or not isinstance(record["facts"], dict):
            raise LedgerError(f"{path}, line 1: not the header of a '{FORMAT}' file. Use the version that wrote it.")
        for name, kind in _FACTS.items():
            if (fact := record["facts"].get(name)) is not None and (
                not isinstance(fact, kind) or isinstance(fact, bool)
            ):
                raise LedgerError(
                    f"{path}, line 1: '{name}' is {str(fact)[:50]!r}, which no run declares. {chain.CURE}"
                )
        return cls(path, record["facts"], head, len(line) + 1)

    def _read_line(self, line: bytes, number: int) -> None:
        record, head = _unsealed(line, self.head, self.path, number)
        if record.keys() != {"round", "event"} or not _is_round(record["round"]):
            raise LedgerError(f"{self.path}, line {number}: an entry has a 'round' and an 'event' only. {chain.CURE}")
        try:
            event = from_record(record["event"])
        except LedgerError as refusal:
            raise LedgerError(f"{self.path}, line {number}: {refusal}") from None
        self._keep(event, record["round"], head, len(line) + 1)

    def _mend(self, rest: bytes) -> None:
        """Decide about bytes after the last whole line: a line that lacks only its newline counts, others never did."""
        number = len(self) + 2
        if chain.is_torn(rest):
            # charge() had not returned when these bytes were written, so nothing was released on their account.
            self.repaired = f"line {number} was torn ({len(rest)} bytes) and has been cut off"
        else:
            self._read_line(rest, number)  # DP: the event is there to be read; to cut it would be to under-count.
            self.repaired = f"line {number} lacked its end and has been completed"

    def _keep(self, event: Event, round: int, head: str, size: int) -> None:
        self._entries.append(Entry(event=event, round=round, hash=head))
        self._hashes.append(head)
        self._size += size


def _unsealed(line: bytes, previous: str, path: Path, number: int) -> tuple[dict[str, Any], str]:
    try:
        return chain.unseal(line, previous)
    except LedgerError as refusal:
        raise LedgerError(f"{path}, line {number}: {refusal}") from None


def _is_round(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
