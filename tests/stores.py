"""Copies of stores for tests that need a population without charges."""

import json
import shutil
from pathlib import Path

from unheard.privacy.ledger import NO_LEDGERS, RECORD


def uncharged_copy(store: Path, to: Path) -> Path:
    """Copy a store without its ledger and without the record of its ledgers, as `prepare` leaves it. Return the path."""
    shutil.copytree(store, to, ignore=shutil.ignore_patterns("*ledger*.lock"))
    forget_charges(to)
    return to


def forget_charges(store: Path) -> None:
    """Delete the ledger of a store and reset the record of its ledgers. No command does this."""
    (store / "ledger.jsonl").unlink(missing_ok=True)
    if (store / RECORD).exists():
        (store / RECORD).write_text(json.dumps(NO_LEDGERS))
