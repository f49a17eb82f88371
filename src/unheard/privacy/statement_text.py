"""The sentences of a privacy statement: what is released, what is not covered, and the statement as a page of text.

In: a statement, as `statement.py` computes it or as `statement.json` keeps it. Out: about 40 lines of text.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from unheard.privacy.accountants import ACCOUNTANTS

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
    """Render a statement as a page of plain text.

    Args:
        statement: The data of `statement.json`.
    """
    return "\n".join(_lines(statement)) + "\n"


def _lines(statement: Mapping[str, Any]) -> Iterator[str]:
    yield "PRIVACY STATEMENT"
    yield ""
    yield f"  {statement['claim']}"
    for warning in statement["warnings"]:
        yield f"  !! {warning}"
    yield ""
    yield row("unit", statement["unit"])
    yield row("adjacency", statement["adjacency"])
    yield row("population", statement["population"])
    for name in ("sampling", "weights", "estimator", "update"):
        yield row(name, _in_words(statement[name]))
    rounds = statement["rounds"]
    again = f", {rounds['redone']} of them for rounds charged before (done again, or of the run that it began from)"
    yield row("rounds charged", f"{rounds['charged']}{again if rounds['redone'] else ''}")
    yield from _list("phases", statement["phases"])
    if "correlated_noise" in statement:
        yield row("correlated noise", _correlated_noise(statement["correlated_noise"]))
    yield row("vocabulary", _in_words(statement["vocabulary"]))
    yield row("vocabulary cost", _vocabulary_cost(statement["vocabulary_cost"]))
    yield row("randomness", _in_words(statement["randomness"]))
    yield ""
    yield row("delta", figure(statement["delta"]))
    for accountant, epsilon in statement["epsilon"].items():
        note = "  <- claimed" if accountant == statement["claimed"]["accountant"] else ""
        if not note and accountant in ACCOUNTANTS and ACCOUNTANTS[accountant].note:
            note = f"  ({ACCOUNTANTS[accountant].note})"
        yield row(f"epsilon, {accountant}", figure(epsilon) + note)
    claimed = statement["claimed"]
    if claimed["accountant"] not in statement["epsilon"]:
        yield row("epsilon, claimed", f"{figure(claimed['epsilon'])}  (by {claimed['accountant']})")
    if "basis" in statement:  # not in statements of version 0.1
        yield row("why this claim", statement["basis"]["why"])
    replaced = statement["replace_one"]
    yield row("replace one user", f"{figure(replaced['epsilon'])} (by {replaced['accountant']})")
    if server := statement.get("against_server"):
        yield row("against server", f"{figure(server['epsilon'])} (by {server['accountant']}): it knows who was drawn")
    if statement["asked"]:
        yield row(
            "asked", f"delta {figure(statement['asked']['delta'])} at epsilon {figure(statement['asked']['epsilon'])}"
        )
    yield from _list(
        "delta(epsilon)", [f"{figure(p['epsilon'])}: {figure(p['delta'])}" for p in statement["curve"]], most=99
    )
    yield ""
    yield from _list("covered", statement["released"])
    yield from _list("not covered", statement["not_covered"])
    yield row("computed with", _in_words(statement["versions"]))


def row(name: str, value: Any) -> str:
    """One line of a statement: a name and its value in aligned columns."""
    return f"  {name:<18}{value}"


def _list(name: str, items: Any, most: int = MOST_ROWS) -> Iterator[str]:
    """One row per item under one name; a long list is cut, and a last row says so."""
    if not isinstance(items, list):
        yield row(name, _in_words(items))
        return
    for i, item in enumerate(items[:most]):
        yield row(name if i == 0 else "", _in_words(item))
    if len(items) > most:
        yield row("", f"... and {len(items) - most} more, in the JSON form")


def _correlated_noise(noise: Mapping[str, Any]) -> str:
    release = f"each {noise['block']} rounds are one release" if noise["strategy"] == "banded" else "one release in all"
    return (
        f"{noise['strategy']}, T = {noise['rounds']}, b = {noise['separation']}, k = {noise['participations']}, sensitivity "
        f"{figure(noise['sensitivity'])}, q = {figure(noise['sampling_prob'])}, z = {figure(noise['noise_multiplier'])}: {release}"
    )


def _vocabulary_cost(cost: Mapping[str, Any]) -> str:
    if not cost["events"]:
        return "nothing was charged for it"
    return f"epsilon {figure(cost['epsilon'])} at delta {figure(cost['delta'])} by itself, included below"


def _in_words(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_in_words(item)}" for key, item in value.items() if item is not None)
    return figure(value)


def figure(value: Any) -> str:
    """A number with four significant digits; anything else as it is."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def rounded_up(bound: float | str) -> str:
    """An upper bound with four significant digits, never below the bound.

    >>> rounded_up(0.0123411), rounded_up("infinity")
    ('0.01235', 'infinity')
    """
    if not isinstance(bound, float) or bound <= 0:
        return figure(bound)
    unit = 10.0 ** (math.floor(math.log10(bound)) - 3)
    return f"{math.ceil(bound / unit - 1e-9) * unit:.4g}"
