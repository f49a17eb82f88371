"""The privacy statement of a population: what may be claimed about its users after all runs on them together.

In: the population's ledger. Out: the epsilon of everything that was ever charged to these users and each run's share,
as data (`all_runs`) and as text (`render_all_runs`). Composition holds also for runs that were chosen in the light of
earlier results, since the bound of each round holds whatever was seen before (adaptive composition; Mironov 2017,
Proposition 1).

    print(render_all_runs(all_runs(PopulationLedger.read("corpora/posts/ledger.jsonl"))))
"""

import json
import math
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from unheard.errors import InvalidValue, LedgerError, UnprovenCombination
from unheard.privacy.accountants import CLAIM_RULE, RUNNING_ACCOUNTANT, best_epsilon, epsilon, epsilons, versions
from unheard.privacy.events import NonPrivate, Selection
from unheard.privacy.population_ledger import FILE, FORMAT, Member, PopulationLedger
from unheard.privacy.statement import plain
from unheard.privacy.statement_text import figure, row

NOT_COVERED = [
    "runs that were not charged to this ledger: on copies of the store, or on other stores with the same people",
    "held-out users: metrics are exact functions of their text",
]


def all_runs(population: PopulationLedger, *, delta: float | None = None) -> dict[str, Any]:
    """Compute the statement about all runs on one population.

    Args:
        population: The population's ledger.
        delta: The delta of the claim; by default the budget's, else the smallest that a run declared.

    Returns:
        Plain JSON data.

    Raises:
        InvalidValue: No delta is given, set or declared.
        UnprovenCombination: Several runs drew the same cohorts, so their rounds are not independent.
    """
    _check_cohorts(population)
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
            "claimed": {"epsilon": best.epsilon, "accountant": best.accountant, "of": CLAIM_RULE},
            "charges": len(events),
            "runs": [_member(member, delta) for member in population.members.values()],
            "budget": _budget(population),
            "warnings": _warnings(population),
            "not_covered": NOT_COVERED,
            "ledger": population.position,
            "versions": versions(),
        }
    )


def find_population_ledger(path: Path, wanted: bool) -> PopulationLedger | None:
    """Read the population ledger that belongs to a ledger file.

    Args:
        path: A population's ledger, or a run's ledger in its run folder.
        wanted: For a run's ledger, whether to look up the ledger of the run's population.

    Returns:
        The ledger at `path` if it is a population's; the ledger of the run's population if that is wanted; else None.

    Raises:
        LedgerError: The ledger of the run's population is not where the run file says, or it is damaged.
    """
    first = _first_line(path)
    if first.get("ledger") == FORMAT:
        return PopulationLedger.read(path)
    if not wanted:
        return None
    try:
        tables = tomllib.loads((path.parent / "run.toml").read_text(encoding="utf-8"))
        ledger = Path(tables["privacy"].get("ledger") or Path(tables["corpus"]["path"]) / FILE)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise LedgerError(
            f"{path.parent / 'run.toml'} does not say where the run's store lies. Name the store itself."
        ) from None
    ledger = ledger / FILE if ledger.is_dir() else ledger
    if not ledger.is_file():
        raise LedgerError(f"The store's ledger is not at {ledger}. Name the store itself: unheard statement STORE.")
    return PopulationLedger.read(ledger)


def _first_line(path: Path) -> dict[str, Any]:
    """The first line, unverified: enough to tell which kind of ledger it is. The ledger's own class verifies it."""
    try:
        with open(path, "rb") as file:
            record = json.loads(file.readline(1 << 24))
    except (OSError, ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def render_all_runs(statement: Mapping[str, Any]) -> str:
    """Render the statement of `all_runs` as a page of plain text."""
    return "\n".join(_lines(statement)) + "\n"


def _delta(population: PopulationLedger, delta: float | None) -> float:
    # The smallest declared delta gives the largest epsilon.
    if delta is not None:
        return delta
    if population.budget is not None:
        return population.budget.delta
    declared = [m.facts["delta"] for m in population.members.values() if isinstance(m.facts.get("delta"), float)]
    if not declared:
        raise InvalidValue("No run on this population has declared a delta: give one with --delta.")
    return min(declared)


def _claim(total: float, delta: float, accountant: str, population: PopulationLedger) -> str:
    if math.isinf(total):
        without_noise = sorted(str(m.facts.get("name", m.id)) for m in population.members.values() if _has_no_noise(m))
        why = f"without noise: {', '.join(without_noise)}" if without_noise else "no epsilon holds at this delta"
        return f"no guarantee over all runs: epsilon is infinite ({why})"
    return f"({total:.4g}, {delta:.3g})-differential privacy for every user over all runs together, by {accountant}"


def _member(member: Member, delta: float) -> dict[str, Any]:
    return {
        "run": member.id,
        "name": member.facts.get("name", "not named"),
        "charges": len(member.events),
        "alone": {
            "epsilon": epsilon(member.events, delta, RUNNING_ACCOUNTANT),
            "accountant": RUNNING_ACCOUNTANT,
        },
        "came_with": member.facts.get("came_with", 0),
    }


def _budget(population: PopulationLedger) -> dict[str, Any] | None:
    budget = population.budget
    if budget is None:
        return None
    spent = epsilon(population.events, budget.delta, budget.accountant)
    return {"epsilon": budget.epsilon, "delta": budget.delta, "accountant": budget.accountant, "spent": spent}


def _has_no_noise(member: Member) -> bool:
    return any(isinstance(event, NonPrivate) for event in member.events)


def _check_cohorts(population: PopulationLedger) -> None:
    """Raise `UnprovenCombination` if several runs drew the same cohorts (`training.shared_cohorts`)."""
    names = [
        str(member.facts.get("name", member.id))
        for member in population.members.values()
        if "cohorts" in (member.facts.get("randomness") or {})
    ]
    # DP: composition takes the coins of each run to be independent of those of every other.
    if len(names) > 1:
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        raise UnprovenCombination(
            f"The runs {', '.join(names[:8])}{more} drew the same cohorts (training.shared_cohorts), and composition is "
            "proved for cohorts drawn independently: there is no statement about all runs together. `unheard statement "
            "RUN` is about one of them. For a statement about all, train without shared_cohorts."
        )


def _warnings(population: PopulationLedger) -> list[str]:
    warnings = []
    for member in population.members.values():
        name = member.facts.get("name", member.id)
        if (member.facts.get("randomness") or {}).get("mode") == "reproducible":
            warnings.append(
                f"REPRODUCIBLE NOISE in run '{name}': THE GUARANTEE DOES NOT HOLD against anyone who knows the seed."
            )
            if "streams" not in member.facts["randomness"]:
                warnings.append(
                    f"run '{name}' was begun by an older version: it shares its noise with other runs of its seed on these "
                    "people, and the total does not cover the difference of their models."
                )
        if _has_no_noise(member):
            warnings.append(f"run '{name}' added no noise: epsilon over all runs is infinite.")
        if any(isinstance(event, Selection) for event in member.events):
            warnings.append(f"run '{name}' is the best of a secret number of runs: nothing of the others may be shown.")
        if member.facts.get("came_with"):
            warnings.append(
                f"run '{name}' came here with {member.facts['came_with']} charges from another ledger: whatever else that one "
                "holds is not counted here. Declare the two stores one population (unheard budget STORE --same-people OTHER)."
            )
    return warnings


def _lines(statement: Mapping[str, Any]) -> Iterator[str]:
    yield "PRIVACY STATEMENT OF A POPULATION: ALL RUNS TOGETHER"
    yield ""
    yield f"  {statement['claim']}"
    for warning in statement["warnings"]:
        yield f"  !! {warning}"
    yield ""
    yield row("delta", figure(statement["delta"]))
    for accountant, value in statement["epsilon"].items():
        note = "  <- claimed" if accountant == statement["claimed"]["accountant"] else ""
        yield row(f"epsilon, {accountant}", figure(value) + note)
    if budget := statement["budget"]:
        spent = f"{figure(budget['spent'])} of {figure(budget['epsilon'])} spent"
        yield row("budget", f"{spent} at delta {budget['delta']:.3g}, by {budget['accountant']}")
    else:
        yield row("budget", "none set for all runs (unheard budget STORE --epsilon E)")
    yield ""
    for i, run in enumerate(statement["runs"]):
        alone = f"epsilon {figure(run['alone']['epsilon'])} alone by {run['alone']['accountant']}"
        yield row("runs" if i == 0 else "", f"{run['name']}: {run['charges']} charges, {alone}")
    for i, line in enumerate(statement["not_covered"]):
        yield row("not covered" if i == 0 else "", line)
