"""Compares the saved statement of a run (statement.json) with the statement that follows from the ledger.

    check_saved_statement(folder.statement, ledger.facts, ledger.entries)     # raises `RunFolderError` if they differ

Input: the file, and the run's ledger. `unheard verify` and `unheard resume` use this module.

A statement may have been written by an earlier version. What such a version did not write is not compared, and figures
are computed with the accountants that the statement names: an accountant that was added later cannot be in it. An
accountant that the version had must be in it.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unheard.errors import RunFolderError
from unheard.privacy.accountants import ACCOUNTANTS
from unheard.privacy.ledger import Entry
from unheard.privacy.statement import compute_statement

EPSILON_SLACK = 1e-4
"""The relative difference that is allowed between two computations of one figure.

Other versions and other machines may round the privacy losses of a round differently. A statement prints four digits.
"""
SMALLEST_FIGURE = 1e-6
"""For figures below this number, such as the smallest deltas of a curve, the allowed difference is `EPSILON_SLACK`
times this number."""


def check_saved_statement(
    path: Path, facts: Mapping[str, Any], entries: Sequence[Entry], *, may_be_older: bool = False
) -> None:
    """Check that a saved statement equals the statement that is computed from the ledger.

    Args:
        path: The file statement.json of a run folder.
        facts: The public facts in the header of the run's ledger.
        entries: The entries of the run's ledger.
        may_be_older: Whether the statement may cover only the first entries. A failed write of the ledger, for example
            on a full disk, can leave an entry that the statement of the same process does not cover.

    Raises:
        RunFolderError: The file cannot be read, is not a statement, or differs from the ledger.
    """
    again = "Delete it: resuming the run writes it again from the ledger."
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        raise RunFolderError(f"{path} is damaged: it is not JSON. {again}") from None
    if not isinstance(saved, dict):
        raise RunFolderError(f"{path} is not a privacy statement. {again}")
    written = max(_release(saved.get("versions")), _release(facts.get("software")))
    named = saved.get("epsilon")
    named = named if isinstance(named, dict) else {}
    # DP: an accountant that the writing version had must be in the statement. If it is not, the statements differ.
    accountants = [name for name, one in ACCOUNTANTS.items() if name in named or _numbers(one.since) <= written]
    if may_be_older and isinstance(position := saved.get("ledger"), dict) and type(position.get("charges")) is int:
        entries = entries[: max(0, position["charges"])]  # `ledger` also has the hash of the last entry: it is compared
    expected = compute_statement(facts, entries, accountants=accountants)
    # DP: a key that this version does not write would be believed although nothing in the ledger supports it.
    compared = (expected.keys() | saved.keys()) - {"versions", "software"}
    if written < (0, 2):  # Version 0.1 did not write these keys.
        compared -= {"ledger", "basis"} - saved.keys()
        if "basis" not in saved and _is_larger(saved.get("replace_one"), expected["replace_one"]):
            compared -= {"replace_one"}
    if _is_former_claim(saved, expected):
        compared -= {"claim"}
    different = sorted(key for key in compared if not _agree(saved.get(key), expected.get(key)))
    if different:
        raise RunFolderError(
            f"{path} and the ledger differ in: {', '.join(different)}. The ledger gives: {expected['claim']}. {again}"
        )


def _release(versions: Any) -> tuple[float, ...]:
    """Return the version of this package in a table of versions; larger than every version if the table has none."""
    named = versions.get("unheard") if isinstance(versions, Mapping) else None
    return _numbers(named) if isinstance(named, str) and re.match(r"\d+\.\d+", named) else (float("inf"),)


def _numbers(version: str) -> tuple[float, ...]:
    """Return the numbers at the beginning of a version, for example (0, 2) for "0.2.dev1"."""
    return tuple(int(part) for part in version.split(".")[:3] if part.isdecimal())


def _is_larger(saved: Any, expected: Mapping[str, Any]) -> bool:
    """Whether the epsilon of replacing a user is larger in a saved statement. Version 0.1 computed a looser bound."""
    return isinstance(saved, dict) and float(saved.get("epsilon") or 0) >= float(expected["epsilon"])


def _is_former_claim(saved: dict[str, Any], expected: dict[str, Any]) -> bool:
    """Whether the sentence of the claim has the numbers rounded to the nearest, as earlier versions wrote them."""
    epsilon, delta = expected.get("claimed", {}).get("epsilon"), expected.get("delta")
    if not isinstance(epsilon, float) or not isinstance(delta, float):
        return False
    words = expected["claim"].partition(")")[2]
    return saved.get("claim") == f"({epsilon:.4g}, {delta:.3g}){words}"


def _agree(saved: Any, expected: Any) -> bool:
    """Whether two JSON values are equal, with floats equal up to the relative difference `EPSILON_SLACK`."""
    if isinstance(saved, float) and isinstance(expected, float):
        return abs(saved - expected) <= EPSILON_SLACK * max(SMALLEST_FIGURE, abs(expected))
    if isinstance(saved, dict) and isinstance(expected, dict):
        return saved.keys() == expected.keys() and all(_agree(saved[key], expected[key]) for key in expected)
    if isinstance(saved, list) and isinstance(expected, list):
        return len(saved) == len(expected) and all(map(_agree, saved, expected))
    return saved == expected
