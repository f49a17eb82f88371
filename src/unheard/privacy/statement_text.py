"""The statement's sentences: what is released, what is not covered, and the page for people.

In: a statement, as statement.py makes it or as statement.json keeps it. Out: text, some 40 lines of it.
"""

from collections.abc import Iterator, Mapping
from typing import Any

NOT_DECLARED = "not declared"
MOST_ROWS = 8

RELEASED = [
    "every model after every round, all intermediate models included",
    "anything computed from those models without looking at the users again",
]
NOT_COVERED = [
    "tuning and other runs on these users: this is about one run; `unheard statement --all-runs` adds up all of them",
    "evaluation: metrics on held-out users are computed without noise; those users have no guarantee",
    "other uses of these people's text, in other runs or elsewhere",
    "what is true of many users at once: the guarantee is about any one of them taking part or not",
]


def render(statement: Mapping[str, Any]) -> str:
    """The statement as a page of plain text."""
    return "\n".join(_lines(statement)) + "\n"


def _lines(told: Mapping[str, Any]) -> Iterator[str]:
    yield "PRIVACY STATEMENT"
    yield ""
    yield f"  {told['claim']}"
    for warning in told["warnings"]:
        yield f"  !! {warning}"
    yield ""
    yield _row("unit", told["unit"])
    yield _row("adjacency", told["adjacency"])
    yield _row("population", told["population"])
    for name in ("sampling", "weights", "estimator", "update"):
        yield _row(name, _in_words(told[name]))
    rounds = told["rounds"]
    again = f", {rounds['redone']} of them for rounds charged before (done again, or of the run that it began from)"
    yield _row("rounds charged", f"{rounds['charged']}{again if rounds['redone'] else ''}")
    yield from _list("phases", told["phases"])
    yield _row("vocabulary", _in_words(told["vocabulary"]))
    yield _row("vocabulary cost", _vocabulary_cost(told["vocabulary_cost"]))
    yield _row("randomness", _in_words(told["randomness"]))
    yield ""
    yield _row("delta", _number(told["delta"]))
    for accountant, epsilon in told["epsilon"].items():
        note = "  <- claimed" if accountant == told["claimed"]["accountant"] else ""
        note = note or ("  (the paper's, for comparison)" if accountant == "moments" else "")
        yield _row(f"epsilon, {accountant}", _number(epsilon) + note)
    replaced = told["replace_one"]
    yield _row("replace one user", f"{_number(replaced['epsilon'])} (by {replaced['accountant']})")
    if told["asked"]:
        yield _row("asked", f"delta {_number(told['asked']['delta'])} at epsilon {_number(told['asked']['epsilon'])}")
    yield from _list(
        "delta(epsilon)", [f"{_number(p['epsilon'])}: {_number(p['delta'])}" for p in told["curve"]], most=99
    )
    yield ""
    yield from _list("covered", told["released"])
    yield from _list("not covered", told["not_covered"])
    yield _row("computed with", _in_words(told["versions"]))


def _row(name: str, value: Any) -> str:
    return f"  {name:<18}{value}"


def _list(name: str, items: Any, most: int = MOST_ROWS) -> Iterator[str]:
    """One row per item under one name; a long list is cut, and says so."""
    if not isinstance(items, list):
        yield _row(name, _in_words(items))
        return
    for i, item in enumerate(items[:most]):
        yield _row(name if i == 0 else "", _in_words(item))
    if len(items) > most:
        yield _row("", f"... and {len(items) - most} more, in the JSON form")


def _vocabulary_cost(cost: Mapping[str, Any]) -> str:
    if not cost["events"]:
        return "nothing was charged for it"
    return f"epsilon {_number(cost['epsilon'])} at delta {_number(cost['delta'])} by itself, included below"


def _in_words(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_in_words(one)}" for key, one in value.items() if one is not None)
    return _number(value)


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
