"""What may be said about a run's privacy, and what may not: the statement, as data and as a page for people.

In: the ledger's public facts and its entries. Out: `statement.json` (plain JSON; infinity is the word "infinity") and
its printed form. It says what was claimed under which assumptions, and lists what the guarantee does not cover.
Paper: Definition 1 (user-adjacent data sets), Theorem 1.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from unheard.errors import InvalidValue
from unheard.privacy.accountants import best_epsilon, collapse, delta_at, epsilons, replace_one_epsilon, versions
from unheard.privacy.events import (
    Event,
    FailureProbability,
    Gaussian,
    NonPrivate,
    PoissonGaussian,
    Selection,
    to_record,
)
from unheard.privacy.ledger import Entry
from unheard.privacy.planner import default_delta
from unheard.privacy.statement_text import NOT_COVERED, NOT_DECLARED, RELEASED, render

__all__ = ["plain", "render", "statement"]

CURVE_POINTS = 12


def statement(
    facts: Mapping[str, Any],
    events: Sequence[Entry | Event],
    *,
    delta: float | None = None,
    epsilon: float | None = None,
) -> dict[str, Any]:
    """The whole statement. `delta` overrides the declared one; `epsilon` asks for the delta at one more point."""
    kept = [item.event if isinstance(item, Entry) else item for item in events]
    delta = _delta(facts, delta)
    claimed, replaced = best_epsilon(kept, delta), replace_one_epsilon(kept, delta)
    return plain(
        {
            "claim": _claim(claimed.epsilon, delta, claimed.accountant, kept),
            "unit": "user",
            "adjacency": "add or remove one user with everything they wrote",
            "delta": delta,
            "epsilon": epsilons(kept, delta),
            "claimed": {
                "epsilon": claimed.epsilon,
                "accountant": claimed.accountant,
                "of": "the smaller of pld and rdp",
            },
            "replace_one": {"epsilon": replaced.epsilon, "accountant": replaced.accountant},
            "curve": _curve(kept, claimed.epsilon),
            "asked": None if epsilon is None else {"epsilon": epsilon, "delta": _smallest_delta(kept, epsilon)},
            "population": facts.get("population", NOT_DECLARED),
            "sampling": facts.get("sampling", NOT_DECLARED),
            "weights": facts.get("weights", NOT_DECLARED),
            "estimator": facts.get("estimator", NOT_DECLARED),
            "update": facts.get("update", NOT_DECLARED),
            "phases": facts.get("phases", NOT_DECLARED),
            "rounds": _rounds(events),
            "composed": [{**to_record(event), "times": times} for event, times in _counted(kept)],
            "vocabulary": facts.get("vocabulary", NOT_DECLARED),
            "vocabulary_cost": _vocabulary_cost(kept, delta),
            "start": facts.get("start", NOT_DECLARED),
            "randomness": facts.get("randomness", NOT_DECLARED),
            "released": RELEASED,
            "not_covered": NOT_COVERED,
            "warnings": _warnings(facts, kept, delta),
            "versions": versions(),
            "software": facts.get("software", NOT_DECLARED),
        }
    )


def plain(value: Any) -> Any:
    """The value as strict JSON allows it: infinity as the word, which Python's float() reads back."""
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, float) and math.isinf(value):
        return "infinity" if value > 0 else "-infinity"
    return value


def _delta(facts: Mapping[str, Any], asked: float | None) -> float:
    if asked is not None:
        return asked
    if facts.get("delta") is not None:
        return facts["delta"]
    if facts.get("population") is not None:
        return default_delta(facts["population"])
    raise InvalidValue("The ledger declares neither a delta nor a population: give a delta (--delta).")


def _claim(epsilon: float, delta: float, accountant: str, events: Sequence[Event]) -> str:
    if math.isinf(epsilon):
        reasons = sorted({event.reason for event in events if isinstance(event, NonPrivate)})
        why = "; ".join(reasons) or "no epsilon holds at this delta for the noise that was added"
        return f"no guarantee: epsilon is infinite ({why})"
    return f"({epsilon:.4g}, {delta:.3g})-differential privacy for every user, by {accountant}"


def _curve(events: Sequence[Event], epsilon: float) -> list[dict[str, float]]:
    """A dozen points of delta(epsilon), from a quarter of the claimed epsilon to twice it."""
    if math.isinf(epsilon) or epsilon == 0:
        return []
    points = [epsilon * (0.25 + 1.75 * i / (CURVE_POINTS - 1)) for i in range(CURVE_POINTS)]
    return [{"epsilon": point, "delta": _smallest_delta(events, point)} for point in points]


def _smallest_delta(events: Sequence[Event], epsilon: float) -> float:
    counts, failure = collapse(events)
    again = [*counts, (FailureProbability(delta=min(1.0, failure)), 1)]
    return min(delta_at(again, epsilon, accountant) for accountant in ("pld", "rdp"))


def _rounds(events: Sequence[Entry | Event]) -> dict[str, Any]:
    """How many rounds were charged, and how many of them for a round that had been charged before."""
    numbers = [item.round for item in events if isinstance(item, Entry) and _is_a_round(item.event)]
    kept = [item.event if isinstance(item, Entry) else item for item in events]
    charged = sum(event.rounds if isinstance(event, Selection) else _is_a_round(event) for event in kept)
    return {"charged": charged, "redone": len(numbers) - len(set(numbers))}


def _vocabulary_cost(events: Sequence[Event], delta: float) -> dict[str, Any]:
    """What the events outside the rounds cost by themselves; the total above includes them."""
    outside = [event for event in events if isinstance(event, Gaussian | FailureProbability)]
    if not outside:
        return {"events": 0}
    alone = best_epsilon(outside, delta)
    return {"events": len(outside), "epsilon": alone.epsilon, "delta": delta, "accountant": alone.accountant}


def _is_a_round(event: Event) -> bool:
    return isinstance(event, PoissonGaussian | NonPrivate)


def _counted(events: Sequence[Event]) -> list[tuple[Event, int]]:
    return sorted(Counter(events).items(), key=repr)


def _warnings(facts: Mapping[str, Any], events: Sequence[Event], delta: float) -> list[str]:
    found = []
    start = facts.get("start")
    start = start if isinstance(start, Mapping) else {}
    for where, source in (("", facts), (" of the run that this one began from", start)):
        randomness = source.get("randomness")
        if isinstance(randomness, Mapping) and randomness.get("mode") == "reproducible":
            found.append(
                f"REPRODUCIBLE NOISE: the noise{where} was drawn from a known seed. "
                "THE GUARANTEE DOES NOT HOLD against anyone who knows the seed."
            )
        if source.get("drop_duplicates"):
            found.append(
                "posts that stood under several users were dropped before training, so one user's posts could depend on "
                "another's: the guarantee is about the corpus after dropping."
            )
    if "a model declared public" in (start.get("from"), start.get("base")):
        found.append(
            "it began from a model that was declared public: that no user here had a part in it is taken on trust. "
            "The people of that public corpus are not protected by this guarantee."
        )
    population = facts.get("population")
    if isinstance(population, int) and population > 0 and delta >= 1 / population:
        found.append(
            f"delta {delta:.3g} is not below 1/users = {1 / population:.3g}: such a guarantee says very little."
        )
    for event in (one for one in events if isinstance(one, Selection)):
        found.append(
            f"it is the best of a secret number of runs ({event.drawn_from}, {event.mean_trials:g} on average): the guarantee is "
            "about this one alone, as long as nothing of the others is shown, nor how many there were."
        )
    if any(isinstance(event, NonPrivate) for event in events):
        found.append("not every round was private: epsilon is infinite.")
    return found
