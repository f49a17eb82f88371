"""What may be said about a population after all its runs: the composed statement, as data and as a page for people.

In: the population's ledger. Out: epsilon of everything that was ever charged to these people, and what each run had in it.
Composition holds for runs chosen in the light of earlier results too: each round's bound holds whatever was seen before.
"""

import json
import math
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from unheard.errors import InvalidValue, LedgerError
from unheard.privacy.accountants import best_epsilon, epsilon, epsilons, versions
from unheard.privacy.events import NonPrivate, Selection
from unheard.privacy.population_ledger import FILE, FORMAT, Member, PopulationLedger
from unheard.privacy.statement import plain

NOT_COVERED = [
    "runs that were not charged to this ledger: on copies of the store, or on other stores with the same people",
    "held-out users: metrics are exact functions of their text",
]


def all_runs(population: PopulationLedger, *, delta: float | None = None) -> dict[str, Any]:
    """The statement about all runs on one population."""
    events = population.events
    delta = _delta(population, delta)
    best = best_epsilon(events, delta)
    return plain(
        {
            "claim": _claim(best.epsilon, delta, best.accountant, population),
            "unit": "user",
            "adjacency": "add or remove one user with everything they wrote",
            "delta": delta,
            "epsilon": epsilons(events, delta),
            "claimed": {"epsilon": best.epsilon, "accountant": best.accountant, "of": "the smaller of pld and rdp"},
            "charges": len(events),
            "runs": [_one(member, delta) for member in population.members.values()],
            "budget": _budget(population),
            "warnings": _warnings(population),
            "not_covered": NOT_COVERED,
            "ledger": population.position,
            "versions": versions(),
        }
    )


def find_population_ledger(path: Path, wanted: bool) -> PopulationLedger | None:
    """The population of a ledger file: the file itself if it is a store's; for a run's, if wanted, that of its store."""
    first = _first_line(path)
    if first.get("ledger") == FORMAT:
        return PopulationLedger.read(path)
    if not wanted:
        return None
    try:
        tables = tomllib.loads((path.parent / "run.toml").read_text(encoding="utf-8"))
        place = Path(tables["privacy"].get("ledger") or Path(tables["corpus"]["path"]) / FILE)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise LedgerError(
            f"{path.parent / 'run.toml'} does not say where the run's store lies. Name the store itself."
        ) from None
    place = place / FILE if place.is_dir() else place
    if not place.is_file():
        raise LedgerError(f"The store's ledger is not at {place}. Name the store itself: unheard statement STORE.")
    return PopulationLedger.read(place)


def _first_line(path: Path) -> dict[str, Any]:
    """Enough to tell whose ledger it is; whoever reads it properly checks it."""
    try:
        with open(path, "rb") as file:
            found = json.loads(file.readline(1 << 24))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def render_all_runs(told: Mapping[str, Any]) -> str:
    return "\n".join(_lines(told)) + "\n"


def _delta(population: PopulationLedger, asked: float | None) -> float:
    """The asked-for delta, else the budget's, else the smallest that a run declared (the largest epsilon of those)."""
    if asked is not None:
        return asked
    if population.budget is not None:
        return population.budget.delta
    declared = [m.facts["delta"] for m in population.members.values() if isinstance(m.facts.get("delta"), float)]
    if not declared:
        raise InvalidValue("No run on this population has declared a delta: give one with --delta.")
    return min(declared)


def _claim(total: float, delta: float, accountant: str, population: PopulationLedger) -> str:
    if math.isinf(total):
        free = [m.facts.get("name", m.id) for m in population.members.values() if _is_free(m)]
        why = f"without noise: {', '.join(sorted(map(str, free)))}" if free else "no epsilon holds at this delta"
        return f"no guarantee over all runs: epsilon is infinite ({why})"
    return f"({total:.4g}, {delta:.3g})-differential privacy for every user over all runs together, by {accountant}"


def _one(member: Member, delta: float) -> dict[str, Any]:
    return {
        "run": member.id,
        "name": member.facts.get("name", "not named"),
        "charges": len(member.events),
        "alone": {"epsilon": epsilon(member.events, delta, "rdp"), "accountant": "rdp"},
        "came_with": member.facts.get("came_with", 0),
    }


def _budget(population: PopulationLedger) -> dict[str, Any] | None:
    budget = population.budget
    if budget is None:
        return None
    spent = epsilon(population.events, budget.delta, budget.accountant)
    return {"epsilon": budget.epsilon, "delta": budget.delta, "accountant": budget.accountant, "spent": spent}


def _is_free(member: Member) -> bool:
    return any(isinstance(event, NonPrivate) for event in member.events)


def _warnings(population: PopulationLedger) -> list[str]:
    found = []
    for member in population.members.values():
        name = member.facts.get("name", member.id)
        if (member.facts.get("randomness") or {}).get("mode") == "reproducible":
            found.append(
                f"REPRODUCIBLE NOISE in run '{name}': THE GUARANTEE DOES NOT HOLD against anyone who knows the seed."
            )
        if _is_free(member):
            found.append(f"run '{name}' added no noise: epsilon over all runs is infinite.")
        if any(isinstance(event, Selection) for event in member.events):
            found.append(f"run '{name}' is the best of a secret number of runs: nothing of the others may be shown.")
        if member.facts.get("came_with"):
            found.append(
                f"run '{name}' came here with {member.facts['came_with']} charges from another ledger: whatever else that one "
                "holds is not counted here. Declare the two stores one population (unheard budget STORE --same-people OTHER)."
            )
    return found


def _lines(told: Mapping[str, Any]) -> Iterator[str]:
    yield "PRIVACY STATEMENT OF A POPULATION: ALL RUNS TOGETHER"
    yield ""
    yield f"  {told['claim']}"
    for warning in told["warnings"]:
        yield f"  !! {warning}"
    yield ""
    yield f"  {'delta':<18}{told['delta']:.4g}"
    for accountant, value in told["epsilon"].items():
        note = "  <- claimed" if accountant == told["claimed"]["accountant"] else ""
        yield f"  {'epsilon, ' + accountant:<18}{_number(value)}{note}"
    if told["budget"]:
        b = told["budget"]
        spent = f"{_number(b['spent'])} of {_number(b['epsilon'])}"
        yield f"  {'budget':<18}{spent} spent at delta {b['delta']:.3g}, by {b['accountant']}"
    else:
        yield f"  {'budget':<18}none set for all runs (unheard budget STORE --epsilon E)"
    yield ""
    for i, run in enumerate(told["runs"]):
        alone = _number(run["alone"]["epsilon"])
        yield f"  {'runs' if i == 0 else '':<18}{run['name']}: {run['charges']} charges, epsilon {alone} alone by rdp"
    for i, line in enumerate(told["not_covered"]):
        yield f"  {'not covered' if i == 0 else '':<18}{line}"


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
