"""Lines that hold on to each other: how the ledger's file is sealed, written and checked, byte by byte.

In: a table and the hash of the line before. Out: one line of JSON that ends with the SHA-256 over both; and back.
The hash is taken over the bytes as they stand in the file, so there is one spelling of a line and nothing to normalise.
"""

import errno
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from unheard.errors import LedgerError

_SEAL = b',"hash":"'  # then 64 hex digits, then the end of the line
_SEAL_LENGTH = len(_SEAL) + 64 + len(b'"}')
CURE = "The file was changed after it was written: put back an untouched copy, or count the run as not accounted for."


def seal(record: dict[str, Any], previous: str) -> tuple[bytes, str]:
    """The table as one line, newline included, and the hash that the next line must build on."""
    try:
        body = json.dumps(record, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError) as trouble:
        raise LedgerError(f"Only plain, finite JSON values can be kept in a ledger: {trouble}.") from None
    digest = _digest(body, previous)
    return body[:-1] + _SEAL + digest.encode() + b'"}\n', digest


def unseal(line: bytes, previous: str) -> tuple[dict[str, Any], str]:
    """The table of one line (without its newline) and its hash, or a LedgerError if the line is not as sealed."""
    body, ending = line[:-_SEAL_LENGTH] + b"}", line[-_SEAL_LENGTH:]
    digest = _digest(body, previous)
    # DP: an edited, swapped, repeated or removed line does not match here; its cost would otherwise go uncounted.
    if ending != _SEAL + digest.encode() + b'"}':
        raise LedgerError(f"the line does not match its hash and the line before it. {CURE}")
    return json.loads(body), digest


def is_torn(line: bytes) -> bool:
    """Whether the bytes are what a power loss leaves of a line: not JSON at all (an edited line is still JSON)."""
    try:
        json.loads(line)
    except ValueError:
        return True
    return False


def create_file(path: Path, line: bytes) -> None:
    """Write the first line of a new file, for the owner alone, and sync the file and its folder."""
    _write_and_sync(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), line, expected_size=0)
    if os.name == "posix":  # only there can a folder be synced; without it the file's name may be lost in a power loss
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def append_line(path: Path, line: bytes, expected_size: int) -> None:
    """Add bytes at the end in one write and sync them; O(1), whatever the file's length."""
    _write_and_sync(os.open(path, os.O_WRONLY | os.O_APPEND), line, expected_size)


def cut_file(path: Path, size: int, expected_size: int) -> None:
    """Cut the file to `size` bytes and sync it."""
    descriptor = os.open(path, os.O_WRONLY)
    try:
        _check_size(descriptor, expected_size)
        os.ftruncate(descriptor, size)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_and_sync(descriptor: int, line: bytes, expected_size: int) -> None:
    try:
        _check_size(descriptor, expected_size)
        if os.write(descriptor, line) != len(line):
            os.ftruncate(
                descriptor, expected_size
            )  # half a line helps nobody; were it left, the next open would cut it
            raise OSError(errno.ENOSPC, "only part of the line could be written")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check_size(descriptor: int, expected: int) -> None:
    if os.fstat(descriptor).st_size != expected:
        raise OSError(errno.EBUSY, "another process has written to the file")


def _digest(body: bytes, previous: str) -> str:
    return hashlib.sha256(previous.encode() + b"\n" + body).hexdigest()
