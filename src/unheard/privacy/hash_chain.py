"""Lines that hold on to each other: how the ledger's file is sealed, written and checked, byte by byte.

In: a table and the hash of the line before. Out: one line of JSON that ends with the SHA-256 over both; and back.
The hash is taken over the bytes as they stand in the file, so there is one spelling of a line and nothing to normalise.
"""

import hashlib
import json
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


def _digest(body: bytes, previous: str) -> str:
    return hashlib.sha256(previous.encode() + b"\n" + body).hexdigest()
