"""An append-only file of JSON lines in which every line is sealed with the hash of the line before it.

Both ledgers are such files: a run's own (`ledger.py`, one writer) and a population's (`population_ledger.py`, several
writers that take turns under a lock). The privacy argument needs two facts from this module: a charge is on disk before
the caller goes on, and a ledger that was edited, reordered or shortened is an error and never a cheaper ledger
(docs/privacy.md, "charge before release").

    seal(record, previous)      a record and the hash of the line before -> one line, and its own hash
    unseal(line, previous)      the reverse; raises `LedgerError` if the line is not as it was sealed
    ChainedFile(path, kind)     a file of such lines: create, read, repair, append, lock

A line is the JSON of its record with one more key at the end, `hash`: the SHA-256 of the hash of the line before and of
the bytes of the record. The hash covers the bytes as they stand in the file, so nothing has to be normalised. The first
line, the header, names the kind of ledger and its public facts; the hash before it is the empty string.

    {"ledger":"unheard-ledger-1","facts":{"population":1000},"hash":"2c52..."}
    {"round":0,"event":{"kind":"poisson_gaussian","sampling_prob":0.01,"noise_multiplier":1.0},"hash":"f301..."}

A hash chain is no signature: whoever can write the file can write all of it anew. Checkpoints therefore remember a
length and a hash, and `ChainedFile.contains(length, hash)` shows that the file has only grown since. The construction
is the linked time-stamping of Haber and Stornetta, "How to Time-Stamp a Digital Document" (1991).
"""

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from unheard import storage
from unheard.errors import LedgerError

_SEAL = b',"hash":"'  # then 64 hex digits, then the end of the line
_SEAL_LENGTH = len(_SEAL) + 64 + len(b'"}')
_WHOLE_SEAL = re.compile(re.escape(_SEAL) + rb'[0-9a-f]{64}"}')
LOCK_WAIT_SECONDS = 60.0
"""How long to wait for another process, which holds the lock only while it writes one line."""

RESTORE = (
    "The file was changed after it was written: put back an untouched copy, or count the run as not accounted for."
)


def seal(record: Mapping[str, Any], previous: str) -> tuple[bytes, str]:
    """Seal one record.

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
        """Whether this file is the one that had `length` records and the hash `head`, or has grown out of it."""
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
                    "Is a training process stopped half-way?"
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
        there = Path(os.path.realpath(self.path))
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
    """Whether the bytes are what a power loss leaves of a line: its beginning, or blocks of zeros; and not JSON."""
    # DP: a line with its end was written whole. If a byte of it changed later, to cut it off would forget its charge.
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
