"""Copies of stores for tests that need users to whom nothing was charged."""

import json
import shutil
from pathlib import Path

from unheard.privacy.ledger import NO_LEDGERS, RECORD


def uncharged_copy(store: Path, to: Path) -> Path:
    """Copy a store as it was when it was prepared: without a ledger, and without the record of one."""
    shutil.copytree(store, to, ignore=shutil.ignore_patterns("*ledger*.lock"))
    forget_charges(to)
    return to


def forget_charges(store: Path) -> None:
    """Bring a store back to the state in which it was prepared, which no command does."""
    (store / "ledger.jsonl").unlink(missing_ok=True)
    if (store / RECORD).exists():
        (store / RECORD).write_text(json.dumps(NO_LEDGERS))
