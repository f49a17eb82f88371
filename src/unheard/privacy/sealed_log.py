"""A sealed file that several processes add to: each takes the lock, reads what the others wrote, and appends its own line.

In: plain tables. Out: the same tables in the order in which they were written, every line chained to the one before it and
on disk before `append` returns. The run's own ledger has one writer and is in ledger.py; this is for what runs share.
"""

import contextlib
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from unheard import storage
from unheard.errors import LedgerError
from unheard.privacy import hash_chain as chain

PATIENCE = 60.0
"""Seconds to wait for another process, which holds the lock only while it writes one line."""


class SealedLog:
    """Records in a file. `refresh` inside `locked()` gives those that are new since the last time."""

    def __init__(self, path: Path, kind: str) -> None:
        self.path = Path(os.path.abspath(path))
        self.kind = kind
        self.facts: dict[str, Any] = {}
        self.hashes: list[str] = []  # of the header, then of every record
        self._size = 0  # of the lines read so far, in bytes

    @property
    def head(self) -> str:
        return self.hashes[-1] if self.hashes else ""

    def __len__(self) -> int:
        """How many records were read or written, the header not among them."""
        return max(len(self.hashes) - 1, 0)

    def contains(self, length: int, head: str) -> bool:
        """Whether this log is the one so remembered, or has grown out of it."""
        return 0 <= length < len(self.hashes) and self.hashes[length] == head

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """The operating system's lock on a file beside the log: it dies with its process."""
        with contextlib.ExitStack() as stack:
            try:
                with _said(self.path):
                    stack.enter_context(storage.locked(self.path.with_name(f".{self.path.name}.lock"), wait=PATIENCE))
            except storage.FileInUse:
                raise LedgerError(
                    f"{self.path} is held by another process for more than {PATIENCE:g} s. Is a training process stopped half-way?"
                ) from None
            yield

    def begin(self, facts: Mapping[str, Any]) -> None:
        """Write the header if there is no file yet. Under the lock, so that two beginners make one file."""
        if self.path.exists():
            with _said(self.path):
                if b"\n" in self.path.read_bytes()[:65536]:
                    return
                self.path.unlink()  # power was lost while the header was written: nothing can have been charged
        # A name of its own: copies of one file can be told from two files that were begun alike.
        line, _ = chain.seal({"ledger": self.kind, "facts": {"id": secrets.token_hex(16), **facts}}, "")
        with _said(self.path):
            storage.create_file(self.path, line)

    def refresh(self, *, mend: bool) -> list[dict[str, Any]]:
        """Read and verify what was added since the last time. With `mend` (and the lock), a torn end is repaired."""
        with _said(self.path), open(self.path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < self._size:
                raise LedgerError(f"{self.path} became shorter while it was in use. {chain.CURE}")
            file.seek(self._size)
            data = file.read(size - self._size)
        *lines, rest = data.split(b"\n")
        if not self.hashes and not lines:
            raise LedgerError(f"{self.path} is not a ledger: it has no whole first line. Put back an untouched copy.")
        if not rest and len(lines) > 1 and chain.is_torn(lines[-1]):
            rest = lines.pop() + b"\n"
        found = [record for line in lines if (record := self._read(line)) is not None]
        if rest:
            found += self._torn_end(rest, mend)
        return found

    def append(self, *records: Mapping[str, Any]) -> None:
        """Add records in one write; when this returns, they are on disk. Call it inside `locked()`, after `refresh`."""
        sealed, hashes = [], [self.head]
        for record in records:
            line, head = chain.seal(dict(record), hashes[-1])
            sealed.append(line)
            hashes.append(head)
        lines = b"".join(sealed)
        with _said(self.path):
            # DP: synced before it returns, and so before anything that it pays for can be seen.
            storage.append(self.path, lines, expected_size=self._size)
        self.hashes += hashes[1:]
        self._size += len(lines)

    def _read(self, line: bytes) -> dict[str, Any] | None:
        """One whole line's record; the header's goes into `facts`."""
        try:
            record, head = chain.unseal(line, self.head)
        except LedgerError as refusal:
            raise LedgerError(f"{self.path}, line {len(self.hashes) + 1}: {refusal}") from None
        if not self.hashes:
            if record.get("ledger") != self.kind or not isinstance(record.get("facts"), dict):
                raise LedgerError(f"{self.path}, line 1: not the header of a '{self.kind}' file.")
            self.facts = record["facts"]
        first = not self.hashes
        self.hashes.append(head)
        self._size += len(line) + 1
        return None if first else record

    def _torn_end(self, rest: bytes, mend: bool) -> list[dict[str, Any]]:
        """Bytes after the last whole line: a line that lacks only its newline counts, any other never did."""
        size = self._size
        if chain.is_torn(rest):
            if mend:
                with _said(self.path):
                    storage.truncate(self.path, size, expected_size=size + len(rest))
            return []
        record = self._read(rest)  # DP: the event is there to be read; to cut it would be to under-count.
        if mend:
            with _said(self.path):
                storage.append(self.path, b"\n", expected_size=size + len(rest))
        return [] if record is None else [record]


@contextlib.contextmanager
def _said(path: Path) -> Iterator[None]:
    """Trouble with the file, in words that name it."""
    try:
        yield
    except storage.FileInUse:
        raise
    except OSError as trouble:
        raise LedgerError(
            f"{path}: {trouble.strerror or trouble}. Every run on a store is charged to the store's own ledger before it "
            "releases anything. Make the folder writable, free some space, or keep the ledger elsewhere: "
            '[privacy] ledger = "some/folder/ledger.jsonl" in the run file (the same file for every run on these people).'
        ) from None
