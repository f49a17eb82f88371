"""The ledger of a run: the events that the run was charged for, in an append-only file of hash-chained lines.

This module implements "charge before release" for one run: the event of a round is on disk before the cohort of the
round is drawn (docs/privacy.md; paper: the composition over rounds of Theorem 1 counts every round that was started).
After a crash there can be an event without a model, but never a model without its event. The statement of a run is
computed from its ledger.

    ledger = Ledger.create("runs/first/ledger.jsonl", {"population": 763_430, "delta": 1e-9})
    ledger.charge(PoissonGaussian(sampling_prob=0.0065, noise_multiplier=1.0), round=0)
    Ledger.read("runs/first/ledger.jsonl").events

Input: the public facts of a run, then one event per attempted round. Output: the events that happened, in order. A
checkpoint stores `(len(ledger), ledger.head)`; on resume `ledger.contains(length, head)` shows that no entry was
removed since.

**The file.** `ChainedFile` reads and writes the file. The population's ledger (`population_ledger.py`) uses it too,
with several writers that take turns under a lock. A line is the JSON of its record with one more key at the end,
`hash`: the SHA-256 of the hash of the previous line and of the bytes of the record. The hash covers the bytes as they
are in the file, so the JSON needs no normal form. The first line, the header, names the kind of ledger and its public
facts; its previous hash is the empty string.

    {"ledger":"unheard-ledger-1","facts":{"population":1000},"hash":"2c52..."}
    {"round":0,"event":{"kind":"poisson_gaussian","sampling_prob":0.01,"noise_multiplier":1.0},"hash":"f301..."}

Reading a ledger that was edited or reordered raises an error, so such a change never makes a run look cheaper. A hash
chain is not a signature: anyone who can write the file can replace all of it, or cut it at the end of a line.
Checkpoints therefore store a length and a hash, and `contains(length, hash)` shows that the file has only grown since.
The construction is the linked time-stamping of Haber and Stornetta, "How to Time-Stamp a Digital Document" (1991).
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
from unheard.config import read_json
from unheard.errors import LedgerError
from unheard.privacy.events import Event, from_record, to_record

_SEAL = b',"hash":"'  # then 64 hex digits, then the end of the line
_SEAL_LENGTH = len(_SEAL) + 64 + len(b'"}')
_WHOLE_SEAL = re.compile(re.escape(_SEAL) + rb'[0-9a-f]{64}"}')
LOCK_WAIT_SECONDS = 60.0
"""How long to wait for the lock of a ledger. Another process holds the lock only while it writes a line."""

# These names of files in a store are here, because `corpus/store.py` needs them and must not import scipy, which
# `population_ledger.py` loads.
RECORD = "ledgers.json"
"""The name of the file in a store that lists the ledgers to which runs on the store were charged."""
DIGESTS = "digests.json"
"""The name of the file in a store that has the digests of its other files."""
NO_LEDGERS: dict[str, Any] = {"known": {}, "continues": None}
"""The content of the file `RECORD` in a new store, before any run was charged."""

RESTORE = (
    "The file was changed after it was written: put back an untouched copy, or count the run as not accounted for."
)


def seal(record: Mapping[str, Any], previous: str) -> tuple[bytes, str]:
    """Encode a record as the next line of a ledger, with a hash over the record and the previous line.

    Args:
        record: Plain JSON values, all finite.
        previous: The hash of the previous line; "" for the first line.

    Returns:
        The line with its newline, and its hash, which is `previous` of the next line.

    Raises:
        LedgerError: The record has a value that JSON cannot represent.

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
    """Verify one line, and return its record and its hash.

    Args:
        line: The bytes of the line, without its newline.
        previous: The hash of the previous line; "" for the first line.

    Raises:
        LedgerError: The line does not match its hash, or was not written after the line with the hash `previous`.
    """
    body, ending = line[:-_SEAL_LENGTH] + b"}", line[-_SEAL_LENGTH:]
    digest = _digest(body, previous)
    # DP: an edited, swapped, repeated or removed line does not match here; its cost would otherwise go uncounted.
    if ending != _SEAL + digest.encode() + b'"}':
        raise LedgerError(f"the line does not match its hash and the line before it. {RESTORE}")
    try:
        return json.loads(body), digest
    except (ValueError, RecursionError):
        raise LedgerError(f"the line matches its hash but is not JSON. {RESTORE}") from None


class ChainedFile:
    """A file of sealed lines: a header with public facts, then one line per record.

    The object remembers how far it has read, and `read` returns only the records that are new since the last call.
    Several processes can therefore share a file: each takes the lock, reads, repairs and appends.

        file = ChainedFile(path, "unheard-population-1")
        with file.locked():
            records = file.read()
            file.repair()
            file.append([{"run": "a", "position": 0, "event": {...}}])

    A method raises `LedgerError` if the content is wrong, and `OSError` if the file cannot be read or written. The two
    classes of ledgers turn an `OSError` into a `LedgerError` that says what to do.

    Args:
        path: The file. A relative path is resolved once, here, and does not follow later changes of the working
            directory.
        kind: The name of the format, which the header must have.

    Attributes:
        facts: The public facts of the header, after `create` or `read`.
        hashes: The hash of the header and of every record read or written so far.
        repaired: What `repair` changes at the end of the file, as text; None if the file is complete.
    """

    def __init__(self, path: str | os.PathLike[str], kind: str) -> None:
        self.path = Path(os.path.abspath(path))
        self.kind = kind
        self._lock = storage.Lock(self.path.with_name(f".{self.path.name}.lock"), wait=LOCK_WAIT_SECONDS)
        self.facts: dict[str, Any] = {}
        self.hashes: list[str] = []
        self.repaired: str | None = None
        self._size = 0  # the verified bytes on disk; `append` refuses to write if the file has another size
        self._torn = 0  # the bytes of an incomplete last line, left by a power loss
        self._lacks_newline = False  # the last verified line is complete except for its newline

    @property
    def head(self) -> str:
        """The hash of the last line; "" before the file is read or created."""
        return self.hashes[-1] if self.hashes else ""

    def __len__(self) -> int:
        """The number of records read or written, without the header."""
        return max(len(self.hashes) - 1, 0)

    @property
    def position(self) -> dict[str, Any]:
        """The identity of the file (the hash of its header), its length and its last hash."""
        return {"ledger": self.hashes[0], "length": len(self), "head": self.head}

    def contains(self, length: int, head: str) -> bool:
        """Whether record number `length` of this file has the hash `head`: the file is the same, or has only grown.

        Args:
            length: A number of records, without the header.
            head: The hash of the last of them.
        """
        # DP: a ledger that was cut at the end of a line has a valid chain; only this check tells it from the ledger of
        # a shorter run.
        return type(length) is int and 0 <= length <= len(self) and self.hashes[length] == head

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of the ledger while the `with` block runs.

        The lock is on a hidden file next to the ledger. The operating system releases it if the process dies.

        Raises:
            LedgerError: Another process has held the lock for more than `LOCK_WAIT_SECONDS`.
        """
        self._check_kind()
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(self._lock.held())
            except storage.FileInUse:
                raise LedgerError(
                    f"{self.path} is held by another process for more than {LOCK_WAIT_SECONDS:g} s. "
                    "End that process if it was stopped or hangs, then run the same command again."
                ) from None
            yield

    def create(self, facts: Mapping[str, Any]) -> None:
        """Create the file with its header. The file is complete and synced to disk, or does not exist.

        Raises:
            FileExistsError: The path exists. The file or folder there is left unchanged.
        """
        line, head = seal({"ledger": self.kind, "facts": dict(facts)}, "")
        # DP: an existing file is never overwritten, not even an empty one: it may be what is left of a ledger.
        storage.create_file(self.path, line)
        self.facts, self.hashes, self._size = json.loads(line)["facts"], [head], len(line)

    def read(self) -> list[dict[str, Any]]:
        """Read and verify what was added since the last call. The file is not changed.

        A power loss can leave an incomplete last line. Such a line is ignored: `append` had not returned when it was
        written, so nothing that it pays for was released. A last line that lacks only its newline counts. A last line
        that is complete but does not match its hash is an error.

        Returns:
            The new records in the order of the file, without the header.

        Raises:
            LedgerError: The file is not a ledger of this kind, became shorter, or has a line that does not match its
                hash.
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
                f"{self.path} is not a ledger: it has no complete first line. Put back an untouched copy. If a run was just "
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
                # DP: the event is complete and can be read; cutting it off would under-count.
                records += self._verify(rest, len(rest))
                self._lacks_newline = True
                self.repaired = f"line {number} lacked its end and has been completed"
        return records

    def repair(self) -> None:
        """Repair the end of the file that the last `read` saw: cut off an incomplete line, or add a missing newline."""
        if self._torn:
            storage.truncate(self.path, self._size, expected_size=self._size + self._torn)
            self._torn = 0
        elif self._lacks_newline:
            storage.append(self.path, b"\n", expected_size=self._size)
            self._size, self._lacks_newline = self._size + 1, False

    def append(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Append records in one write. They are synced to disk when this returns.

        Call `read` and `repair` first. If the file has several writers, call all three inside `locked()`.

        Raises:
            LedgerError: A record has a value that JSON cannot represent.
            OSError: The write failed, or another process has written to the file. The file is unchanged, or ends with
                an incomplete line.
        """
        lines, hashes = b"", [self.head]
        for record in records:
            line, head = seal(record, hashes[-1])
            lines += line
            hashes.append(head)
        # DP: synced to disk before this returns, and so before anything is released for which the records are a charge.
        storage.append(self.path, lines, expected_size=self._size)
        self.hashes += hashes[1:]
        self._size += len(lines)

    def _check_kind(self) -> None:
        """Raise `LedgerError` if the path is not a regular file: a device, pipe, socket, folder, or in /proc or /sys.

        Opening such a path could block or have side effects.
        """
        # Once lines of the file were verified it cannot be in /proc or /sys, so links need not be resolved again.
        there = self.path if self.hashes else Path(os.path.realpath(self.path))
        is_of_kernel = there.parts[1:2] in (("proc",), ("sys",))
        if is_of_kernel or (os.path.lexists(there) and not there.is_file()):
            raise LedgerError(
                f"{self.path} is not a regular file, but a ledger must be one. Name a file in a folder of yours."
            )

    def _verify(self, line: bytes, size: int) -> list[dict[str, Any]]:
        """Verify one line and store its hash.

        Args:
            line: The bytes of the line, without its newline.
            size: The number of bytes that the line takes in the file.

        Returns:
            A list of the record, or an empty list if the line is the header.
        """
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
    """Whether a power loss left the last line incomplete: its end is missing, or parts of it are zero bytes."""
    # DP: a line that has its end was written completely. If a byte of it changed later, cutting it off would drop its
    # charge.
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
"""The prefix of the id of a seeded run."""
_FACTS: dict[str, type | tuple[type, ...]] = {
    "delta": (int, float),
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
"""The types of the facts in a header. `Ledger.read` checks them, so later code can rely on them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One charged event.

    Attributes:
        event: What the round did to the users' data.
        round: The number of the round that was charged. A round that is repeated after a crash is charged again.
        hash: The hash of the entry's line in the file.
    """

    event: Event
    round: int
    hash: str


class Ledger:
    """An append-only list of events in a file, with one writer.

    `Ledger.create` begins a ledger. `Ledger.open` continues one. `Ledger.read` only reads one, even while a run writes
    to it. `open` and `read` verify the whole file and raise `LedgerError` if it is damaged.

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
        """Create the file of a new ledger, and open it for charging.

        Args:
            path: A file that does not exist yet.
            facts: The run's public facts, as plain JSON values; they become the first line of the file.

        Raises:
            LedgerError: The path exists, cannot be written, or the facts have a value that JSON cannot represent.
        """
        file = ChainedFile(path, FORMAT)
        try:
            file.create(facts)
        except FileExistsError:
            raise LedgerError(
                f"{file.path} exists: a ledger is never overwritten. Resume its run or choose a new folder."
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
        """Read and verify a ledger, and open it for charging. An incomplete last line after a power loss is cut off.

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
        """Read and verify a ledger without changing the file. The returned ledger cannot be charged.

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
        """What `open` repairs at the end of the file after a power loss, as text; None if the file was complete."""
        return self._file.repaired

    @property
    def facts(self) -> dict[str, Any]:
        """A copy of the public facts of the run.

        They come from the header. The facts about the nodes of a federated run come from federated.json in the same
        folder, so that the ledger is the same as that of the run without nodes.

        Raises:
            LedgerError: The file federated.json is damaged.
        """
        facts, beside = copy.deepcopy(self._file.facts), self._file.path.with_name("federated.json")
        if beside.exists():
            nodes = read_json(beside)
            if not isinstance(nodes, dict):
                raise LedgerError(f"{beside} is damaged. {RESTORE}")
            facts.setdefault("federated", nodes)
        return facts

    @property
    def entries(self) -> list[Entry]:
        """All entries, in the order in which they were charged."""
        return list(self._entries)

    @property
    def events(self) -> list[Event]:
        """The events of all entries, in the order in which they were charged."""
        return [entry.event for entry in self._entries]

    @property
    def head(self) -> str:
        """The hash of the last line; together with `len(ledger)` it identifies everything charged so far."""
        return self._file.head

    def hash_at(self, length: int) -> str:
        """Return the value that `head` had when the ledger had `length` entries; for 0, the hash of the header."""
        return self._file.hashes[length]

    def __len__(self) -> int:
        return len(self._entries)

    def contains(self, length: int, head: str) -> bool:
        """Whether entry number `length` has the hash `head`: the ledger is the same as then, or has only grown."""
        return self._file.contains(length, head)

    def charge(self, event: Event, round: int) -> None:
        """Append one event. It is synced to disk when this returns. A repeated round must be charged again.

        Args:
            event: What the round will do to the users' data.
            round: The number of the round, from 0.

        Raises:
            LedgerError: The event could not be written, or another process has written to the file. The caller must
                then not release anything of the round.
        """
        self.charge_all([event], round)

    def charge_all(self, events: Sequence[Event], round: int) -> None:
        """Append several events in one write, for example all events of an earlier run.

        Args:
            events: What was, or will be, done to the users' data.
            round: The number of the round that the events are charged to.

        Raises:
            LedgerError: The events could not be written, or another process has written to the file. The caller must
                then not release anything of the round.
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
    """Return an id for a new run: random, so that no other run has it, or fixed for a seeded run.

    Args:
        reproducible: For a seeded run, a hash of its configuration and of its population's ledger. The id is then
            computed from it, so that repeating the run on the same population gives the same ledger.

    >>> new_run_id("0123456789abcdef" * 4)
    'reproducible-0123456789abcdef'
    """
    return secrets.token_hex(16) if reproducible is None else f"{REPRODUCIBLE}{reproducible[:16]}"


def run_id(ledger: Ledger) -> str:
    """Return the id of a ledger's run. For an old ledger without an id, it is made from the hash of the first line."""
    return str(ledger.facts.get("run_id") or f"unnamed-{ledger.hash_at(0)[:32]}")


def corpus_name(record: Mapping[str, Any]) -> str:
    """Return the name by which a run's ledger identifies its store: a hash of how the corpus was prepared.

    Args:
        record: The content of the store's corpus.json. Nothing in it depends on the text or on the number of users.
    """
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _is_round(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
