"""The ledger of a run: the events that the run was charged for, in an append-only file of hash-chained lines.

This module implements "charge before release" for one run: the event of a round is on disk before the round's cohort is
drawn (docs/privacy.md; paper: the composition over rounds of Theorem 1 counts every round that was started). A crash
can leave an event without a model, never a model without its event. The statement of a run is computed from its ledger.

    ledger = Ledger.create("runs/first/ledger.jsonl", {"population": 763_430, "delta": 1e-9})
    ledger.charge(PoissonGaussian(sampling_prob=0.0065, noise_multiplier=1.0), round=0)
    Ledger.read("runs/first/ledger.jsonl").events

In: the public facts of a run, then one event per attempted round. Out: the events that happened, in order. A checkpoint
remembers `(len(ledger), ledger.head)`; on resume `ledger.contains(length, head)` shows that nothing was cut off since.

**The file.** `ChainedFile` is also the file of the population's ledger (`population_ledger.py`), where several writers
take turns under a lock. A line is the JSON of its record with one more key at the end, `hash`: the SHA-256 of the hash
of the line before and of the bytes of the record. The hash covers the bytes as they stand in the file, so nothing has
to be normalised. The first line, the header, names the kind of ledger and its public facts; the hash before it is the
empty string.

    {"ledger":"unheard-ledger-1","facts":{"population":1000},"hash":"2c52..."}
    {"round":0,"event":{"kind":"poisson_gaussian","sampling_prob":0.01,"noise_multiplier":1.0},"hash":"f301..."}

A ledger that was edited, reordered or shortened is an error and never a cheaper ledger. A hash chain is no signature:
anyone who can write the file can write all of it anew. Checkpoints therefore remember a length and a hash, and
`contains(length, hash)` shows that the file has only grown since. The construction is the linked time-stamping of Haber
and Stornetta, "How to Time-Stamp a Digital Document" (1991).
"""

import contextlib
import copy
import hashlib
import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unheard import storage
from unheard.errors import LedgerError
from unheard.privacy.events import Event, from_record, to_record

_SEAL = b',"hash":"'  # then 64 hex digits, then the end of the line
_SEAL_LENGTH = len(_SEAL) + 64 + len(b'"}')
_WHOLE_SEAL = re.compile(re.escape(_SEAL) + rb'[0-9a-f]{64}"}')
LOCK_WAIT_SECONDS = 60.0
"""How long to wait for another process, which holds the lock only while it writes one line."""

RECORD = "ledgers.json"
"""The file of a store that says which ledgers it was charged in."""
DIGESTS = "digests.json"
"""The file of a store with the digests of its other files."""
NO_LEDGERS: dict[str, Any] = {"known": {}, "continues": None}
"""The content of `RECORD` of a new store, which was charged in no ledger yet."""

RESTORE = (
    "The file was changed after it was written: put back an untouched copy, or count the run as not accounted for."
)


def seal(record: Mapping[str, Any], previous: str) -> tuple[bytes, str]:
    """Write a record as the next line of a ledger, with a hash over the record and the line before.

    Args:
        record: Plain JSON values, all finite.
        previous: The hash of the line before; "" for the first line.

    Returns:
        The line, newline included, and its hash, which the next line builds on.

    Raises:
        LedgerError: The record holds something that JSON cannot hold.

    >>> line, digest = seal({"round": 0}, "")
    >>> unseal(line.rstrip(), "") == ({"round": 0}, digest)
    True
    """
    try:
        body = json.dumps(record, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise LedgerError(f"Only plain, finite JSON values can be kept in a ledger: {error}.") from None
    digest = _digest(body, previous)
    return body[:-1] + _SEAL + digest.encode() + b'"}\n', digest


def unseal(line: bytes, previous: str) -> tuple[dict[str, Any], str]:
    """Verify one line, without its newline, and return its record and its hash.

    Args:
        line: The bytes of the line.
        previous: The hash of the line before; "" for the first line.

    Raises:
        LedgerError: The line does not match its hash and the hash of the line before.
    """
    body, ending = line[:-_SEAL_LENGTH] + b"}", line[-_SEAL_LENGTH:]
    digest = _digest(body, previous)
    # DP: an edited, swapped, repeated or removed line does not match here; its cost would otherwise go uncounted.
    if ending != _SEAL + digest.encode() + b'"}':
        raise LedgerError(f"the line does not match its hash and the line before it. {RESTORE}")
    try:
        return json.loads(body), digest
    except (ValueError, RecursionError):
        raise LedgerError(f"the line is sealed but holds no JSON. {RESTORE}") from None


class ChainedFile:
    """A file of sealed lines: a header with public facts, then one line per record.

    The object remembers how far it has read. `read` returns the records that are new since the last call, so several
    processes can share a file: each takes the lock, reads, repairs and appends.

        file = ChainedFile(path, "unheard-population-1")
        with file.locked():
            records = file.read()
            file.repair()
            file.append([{"run": "a", "position": 0, "event": {...}}])

    A method raises `LedgerError` if the content is wrong, and the operating system's `OSError` if the file cannot be
    read or written; the two ledgers turn the latter into errors with their own advice.

    Args:
        path: The file. It stays the same file if the working directory changes.
        kind: The format that the header must name.

    Attributes:
        facts: The public facts of the header, after `create` or `read`.
        hashes: The hash of the header and of every record read or written so far.
        repaired: What `repair` mends, in words; None if the file is whole.
    """

    def __init__(self, path: str | os.PathLike[str], kind: str) -> None:
        self.path = Path(os.path.abspath(path))
        self.kind = kind
        self.facts: dict[str, Any] = {}
        self.hashes: list[str] = []
        self.repaired: str | None = None
        self._size = 0  # bytes on disk that are verified; a file of another size is not written to
        self._torn = 0  # bytes after them that a power loss left and that no reader needs
        self._lacks_newline = False  # the last verified line is whole but for its newline

    @property
    def head(self) -> str:
        """The hash of the last line; "" before the file is read or created."""
        return self.hashes[-1] if self.hashes else ""

    def __len__(self) -> int:
        """The number of records read or written, without the header."""
        return max(len(self.hashes) - 1, 0)

    def contains(self, length: int, head: str) -> bool:
        """Whether this file is the one that had `length` records and the hash `head`, or has grown out of it.

        Args:
            length: A number of records, without the header.
            head: The hash of the last of them.
        """
        # DP: a ledger cut at a line's end has a valid chain; only this tells it from a shorter, cheaper run.
        return 0 <= length <= len(self) and self.hashes[length] == head

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of the file, a lock file next to it. The operating system releases it if the process dies.

        Raises:
            LedgerError: Another process holds the lock for more than `LOCK_WAIT_SECONDS`.
        """
        self._check_kind()
        with contextlib.ExitStack() as stack:
            lock = self.path.with_name(f".{self.path.name}.lock")
            try:
                stack.enter_context(storage.locked(lock, wait=LOCK_WAIT_SECONDS))
            except storage.FileInUse:
                raise LedgerError(
                    f"{self.path} is held by another process for more than {LOCK_WAIT_SECONDS:g} s. "
                    "End that process if it was stopped or hangs, then run the same command again."
                ) from None
            yield

    def create(self, facts: Mapping[str, Any]) -> None:
        """Write the header to a new file, whole and synced or not at all.

        Raises:
            FileExistsError: Something is at the path, whatever it is. It is left as it is.
        """
        line, head = seal({"ledger": self.kind, "facts": dict(facts)}, "")
        # DP: an existing file is never written over, not even an empty one: it may be what is left of a ledger.
        storage.create_file(self.path, line)
        self.facts, self.hashes, self._size = json.loads(line)["facts"], [head], len(line)

    def read(self) -> list[dict[str, Any]]:
        """Read and verify what was added since the last call; the file is not touched.

        A last line that is not JSON and has no end is what a power loss leaves of a line. It is left out, since `append`
        had not returned when it was written and so nothing was released on its account. A last line that lacks only its
        newline counts. A last line that is whole and damaged is an error.

        Returns:
            The new records in the order of the file, without the header.

        Raises:
            LedgerError: The file is no ledger of this kind, became shorter, or a line does not match its hash.
        """
        self._check_kind()
        with open(self.path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < self._size:
                raise LedgerError(f"{self.path} became shorter while it was in use. {RESTORE}")
            file.seek(self._size)
            data = file.read(size - self._size)
        if self._lacks_newline and data.startswith(b"\n"):  # another process has repaired it
            self._size, self._lacks_newline, data = self._size + 1, False, data[1:]
        *lines, rest = data.split(b"\n")
        if not self.hashes and not lines:
            raise LedgerError(
                f"{self.path} is not a ledger: it has no whole first line. Put back an untouched copy. If a run was just "
                "being created here, delete the file: nothing was charged."
            )
        if not rest and (self.hashes or len(lines) > 1) and lines and _is_torn(lines[-1] + b"\n"):
            rest = lines.pop() + b"\n"
        records = [record for line in lines for record in self._verify(line, len(line) + 1)]
        self._torn, self.repaired = 0, None
        if rest:
            number = len(self.hashes) + 1
            if _is_torn(rest):
                self._torn = len(rest)
                self.repaired = f"line {number} was torn ({len(rest)} bytes) and has been cut off"
            else:
                # DP: the event is there to be read; to cut it would be to under-count.
                records += self._verify(rest, len(rest))
                self._lacks_newline = True
                self.repaired = f"line {number} lacked its end and has been completed"
        return records

    def repair(self) -> None:
        """Mend the end of the file as the last `read` saw it: cut a torn line, complete one that lacks its newline."""
        if self._torn:
            storage.truncate(self.path, self._size, expected_size=self._size + self._torn)
            self._torn = 0
        elif self._lacks_newline:
            storage.append(self.path, b"\n", expected_size=self._size)
            self._size, self._lacks_newline = self._size + 1, False

    def append(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Add records in one write; they are on disk when this returns.

        Call it after `read` and `repair`, and with several writers inside `locked()`.

        Raises:
            LedgerError: A record is no plain JSON.
            OSError: The write failed, or another process has written to the file. The file is as it was, or has a torn
                end.
        """
        lines, hashes = b"", [self.head]
        for record in records:
            line, head = seal(record, hashes[-1])
            lines += line
            hashes.append(head)
        # DP: synced before it returns, and so before anything that it pays for can be seen.
        storage.append(self.path, lines, expected_size=self._size)
        self.hashes += hashes[1:]
        self._size += len(lines)

    def _check_kind(self) -> None:
        """Raise `LedgerError` for a device, a pipe, a socket, a folder or a file of the kernel, before it is opened."""
        # A file whose lines were verified is none of the kernel's: the links on the way to it are followed once.
        there = self.path if self.hashes else Path(os.path.realpath(self.path))
        is_of_kernel = there.parts[1:2] in (("proc",), ("sys",))
        if is_of_kernel or (os.path.lexists(there) and not there.is_file()):
            raise LedgerError(
                f"{self.path} is not a regular file, and a ledger is one. Name a file in a folder of yours."
            )

    def _verify(self, line: bytes, size: int) -> list[dict[str, Any]]:
        """Check one line of `size` bytes and remember its hash; returns its record, or nothing for the header."""
        is_header = not self.hashes
        try:
            record, head = unseal(line, self.head)
        except LedgerError as error:
            raise LedgerError(f"{self.path}, line {len(self.hashes) + 1}: {error}") from None
        if is_header:
            if (
                record.keys() != {"ledger", "facts"}
                or record["ledger"] != self.kind
                or not isinstance(record["facts"], dict)
            ):
                raise LedgerError(
                    f"{self.path}, line 1: not the header of a '{self.kind}' file. Use the version that wrote it."
                )
            self.facts = record["facts"]
        self.hashes.append(head)
        self._size += size
        return [] if is_header else [record]


def _is_torn(line: bytes) -> bool:
    """Whether a last line is incomplete, as a power loss leaves it: only its beginning, or with blocks of zeros."""
    # DP: a line with its end was written whole. If a byte of it changed later, cutting the line off would drop its charge.
    is_whole = (_SEAL in line or line.endswith(b'"}\n')) if line.endswith(b"\n") else _WHOLE_SEAL.search(line)
    if is_whole and b"\0\0" not in line:
        return False
    try:
        json.loads(line)
    except ValueError:
        return True
    except RecursionError:
        return False
    return False


def _digest(body: bytes, previous: str) -> str:
    return hashlib.sha256(previous.encode() + b"\n" + body).hexdigest()


FORMAT = "unheard-ledger-1"
REPRODUCIBLE = "reproducible-"
"""How the id of a seeded run begins."""
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
            raise LedgerError(
                f"The incomplete last line of {ledger.path} cannot be cut off ({error.strerror}). Check space and permissions."
            ) from error
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
            LedgerError: Federated.json is damaged.
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
        """The value of `head` when the ledger had `length` entries; for 0, the hash of the header."""
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
        """Append several events in one write, for example everything that an earlier run has cost.

        Args:
            events: What was, or will be, done to the users' data.
            round: The number of the round that they are charged for.
        """
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


def new_run_id(reproducible: str | None = None) -> str:
    """Make an id that no other run has.

    Args:
        reproducible: For a seeded run, the hash of its configuration; its id then follows from its configuration too.

    >>> new_run_id("0123456789abcdef" * 4)
    'reproducible-0123456789abcdef'
    """
    return secrets.token_hex(16) if reproducible is None else f"{REPRODUCIBLE}{reproducible[:16]}"


def run_id(ledger: Ledger) -> str:
    """Return the id of a ledger's run; for a run from before runs had ids, the hash of the ledger's first line."""
    return str(ledger.facts.get("run_id") or f"unnamed-{ledger.hash_at(0)[:32]}")


def corpus_name(record: Mapping[str, Any]) -> str:
    """The name of a corpus, by which a run's ledger knows its store: a hash of how the corpus was prepared.

    Args:
        record: The content of the store's corpus.json. Nothing in it depends on a count or on text.
    """
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _is_round(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
