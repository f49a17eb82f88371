"""What a store remembers of its ledgers: a ledger that is deleted, swapped or cut is an error, never a fresh start.

The ledger of a population lies in the store, or where `[privacy] ledger` says. A new run has nothing else to compare it
with: no checkpoint of its own remembers the ledger yet. So the store keeps a small file, `ledgers.json`:

    {"known": {"ledger.jsonl": {"ledger": ..., "length": n, "head": ...}},     where each ledger stood at the last save
     "continues": {"ledger": path, "joined": false},                           the ledger of an earlier store
     "at": {"path": ..., "inode": ...}}                                        the store itself, to tell it from a copy

In: the folder of a store, and the path of a ledger. Out: the position that the ledger must have grown out of, and the
ledger of the earlier store that this one continues (`unheard prepare --continues`). Both hold paths and hashes only.
A store has the file from its preparation on, and `digests.json` says so: where it is missing, it was deleted. Stores of
version 0.1.0 and parts of stores have none.
"""

import errno
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from unheard import storage
from unheard.config import parse_json
from unheard.errors import LedgerError

RECORD = "ledgers.json"
DIGESTS = "digests.json"


def begin_record(store: Path) -> None:
    """Write the record of a new store: it was charged in no ledger yet."""
    storage.create_file(store / RECORD, (json.dumps(_NOTHING_KNOWN, indent=2) + "\n").encode())


def read_corpus_record(store: Path) -> dict[str, Any]:
    """Read corpus.json, which names what the vocabulary has cost.

    Raises:
        LedgerError: It cannot be read, or is not as it was written.
    """
    path = store / "corpus.json"
    try:
        content = path.read_bytes()
        written = _digests(store)["files"]["corpus.json"]["sha256"] if os.path.lexists(store / DIGESTS) else None
        record = parse_json(content)
        # DP: a damaged record may have lost the events of a private vocabulary.
        if written not in (None, hashlib.sha256(content).hexdigest()) or not isinstance(record, dict):
            raise ValueError
        return record
    except (OSError, ValueError, KeyError, TypeError):
        raise LedgerError(
            f"{path} is not as it was written, so what the vocabulary of this store cost cannot be known. Put a whole copy "
            "back."
        ) from None


def known_position(store: Path, ledger: Path) -> Mapping[str, Any] | None:
    """The position of a ledger when it was last opened for this store; None if it never was.

    Raises:
        LedgerError: The store's record is damaged.
    """
    record = _read(store)
    is_copy = record["at"] is not None and not {*record["at"].values()} & {*_place_of(store).values()}
    # A copy of a store without its ledger has no ledger of its own yet (docs/sharp-edges.md).
    return None if is_copy and not os.path.lexists(ledger) else record["known"].get(_key(store, ledger))


def remember_position(store: Path, ledger: Path, position: Mapping[str, Any]) -> None:
    """Record where a ledger stands. A read-only store, whose ledger lies elsewhere, is left as it is."""
    here, key = _place_of(store), _key(store, ledger)

    def change(record: dict[str, Any]) -> dict[str, Any]:
        known = record["known"].get(key)
        # DP: another run may have recorded a later position meanwhile; an earlier one would let the ledger be cut.
        is_later = known and known["ledger"] == position["ledger"] and known["length"] > position["length"]
        return {**record, "known": {**record["known"], key: known if is_later else dict(position)}, "at": here}

    record = _read(store)
    if change(record) != record:
        try:
            _change(store, change)
        except OSError as error:
            if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM) or not os.path.isabs(key):
                raise


def continue_ledger(store: Path, earlier: Path) -> None:
    """Record that a store continues the ledger at `earlier`, whose charges are joined when the store's own is opened."""
    continues = {"ledger": os.path.abspath(earlier), "joined": False}
    _change(store, lambda record: {**record, "continues": continues})


def ledger_to_join(store: Path) -> Path | None:
    """The ledger of the earlier store, if its charges were not joined yet."""
    continues = _read(store)["continues"]
    return None if continues is None or continues["joined"] else Path(continues["ledger"])


def mark_joined(store: Path) -> None:
    """Record that the charges of the earlier ledger are in the store's own: the earlier store may be deleted."""
    _change(store, lambda record: {**record, "continues": {**record["continues"], "joined": True}})


_NOTHING_KNOWN: dict[str, Any] = {"known": {}, "continues": None, "at": None}


def _place_of(store: Path) -> dict[str, str]:
    """Tells a store from a copy of it: one that was moved keeps its inode, one that was put back its path."""
    status = os.stat(store)
    return {"path": os.path.realpath(store), "inode": f"{status.st_dev}:{status.st_ino}"}


def _key(store: Path, ledger: Path) -> str:
    """A path within the store is relative, so that the store can be moved."""
    here, there = os.path.realpath(store), os.path.realpath(ledger)
    return os.path.relpath(there, here) if os.path.dirname(there) == here else there


def _read(store: Path) -> dict[str, Any]:
    path = store / RECORD
    try:
        if not os.path.lexists(path):
            # DP: a store that was prepared with the record and lacks it may have been charged in a ledger that is gone.
            if os.path.lexists(store / DIGESTS) and _digests(store).get("ledgers"):
                raise LedgerError(
                    f"{path} is missing: it records which ledgers this store has been charged in. Put it back; without it "
                    "nobody can say whether the ledger is whole. If it is lost, prepare the store again with `unheard "
                    "prepare --continues`, which keeps the charges."
                )
            return dict(_NOTHING_KNOWN)
        record = parse_json(path.read_text(encoding="utf-8"))
        known, continues, at = record["known"], record.get("continues"), record.get("at")
        is_place = at is None or {*at} == {"path", "inode"}
        is_whole = all({*position} == {"ledger", "length", "head"} for position in known.values())
        if continues is not None:
            is_whole &= isinstance(continues["ledger"], str) and isinstance(continues["joined"], bool)
        if not is_whole or not is_place:
            raise ValueError
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise LedgerError(
            f"{path} is damaged: it records which ledgers this store has been charged in. Put back a whole copy."
        ) from None
    return {"known": known, "continues": continues, "at": at}


def _digests(store: Path) -> dict[str, Any]:
    return parse_json((store / DIGESTS).read_text(encoding="utf-8"))


def _change(store: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Read the record, change it and replace it, while no other process does so."""
    with storage.locked(store / f".{RECORD}.lock", wait=60):
        record = change(_read(store))
        storage.replace_file(store / RECORD, (json.dumps(record, indent=2) + "\n").encode())
