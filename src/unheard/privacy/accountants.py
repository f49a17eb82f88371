"""Events in, epsilon out, by three accountants: moments (the paper's), rdp and pld.

In: events (or pairs of an event and how often it happened) and a delta, or an epsilon. Out: the other of the two, an
upper bound under add-or-remove-one-user adjacency. `moments` is there to compare with the paper; what a run claims is
the smaller of pld and rdp, named. Paper: Theorem 1, Table 1.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import version
from typing import TypeAlias

from unheard.config import nearest, require
from unheard.errors import InvalidValue
from unheard.privacy.budget import Budget, RunningEpsilon
from unheard.privacy.events import Event, FailureProbability, Gaussian
from unheard.privacy.pld import pld_delta, pld_epsilon
from unheard.privacy.rdp import CURVES, Counts

ACCOUNTANTS = ("moments", "rdp", "pld")
CLAIMED = ("pld", "rdp")  # of these the smaller is claimed
Events: TypeAlias = Iterable[Event | tuple[Event, int]]

__all__ = ["ACCOUNTANTS", "Bound", "Budget", "Events", "RunningEpsilon", "best_epsilon", "collapse", "delta_at"]
__all__ += ["epsilon", "epsilons", "replace_one_epsilon", "versions"]


@dataclass(frozen=True, kw_only=True)
class Bound:
    """An epsilon, and by what it was shown."""

    epsilon: float
    accountant: str


def epsilon(events: Events, delta: float, accountant: str) -> float:
    """The epsilon that holds at delta: 0.0 for no events, infinity where nothing was hidden."""
    _check(delta, accountant)
    return _epsilon(*collapse(events), delta, accountant)


def delta_at(events: Events, epsilon: float, accountant: str) -> float:
    """The delta that holds at epsilon."""
    _check(0.5, accountant)
    require(0 <= epsilon < math.inf, f"epsilon must be a number from 0 up, not {epsilon}.")
    return _delta(*collapse(events), epsilon, accountant)


def epsilons(events: Events, delta: float) -> dict[str, float]:
    """Epsilon by each accountant."""
    _check(delta, "rdp")
    counts, failure = collapse(events)
    return {accountant: _epsilon(counts, failure, delta, accountant) for accountant in ACCOUNTANTS}


def best_epsilon(events: Events, delta: float) -> Bound:
    """The smaller of the two modern bounds, both valid, and which one it is."""
    _check(delta, "rdp")
    counts, failure = collapse(events)
    return _smaller(lambda accountant: _epsilon(counts, failure, delta, accountant))


def replace_one_epsilon(events: Events, delta: float) -> Bound:
    """Epsilon when one user's data is replaced by another's, not added or removed; the Bound says how it was found.

    Where everybody always takes part, two vectors lie up to twice the sensitivity apart, which is half the z. For
    sampled rounds dp-accounting's PLD takes two opposite vectors as the worst case; we know of no proof of that in many
    dimensions, and take the group of two instead: to replace is to remove one user and to add one, and a guarantee of
    (epsilon, delta) for one user is one of (2 epsilon, (1 + e^epsilon) delta) for two. A failure probability counts
    twice either way: once for each of the two users.
    """
    _check(delta, "rdp")
    counts, failure = collapse(events)
    if all(isinstance(event, Gaussian) for event, _ in counts):
        halved = tuple(
            (Gaussian(noise_multiplier=e.noise_multiplier / 2), n) for e, n in counts if isinstance(e, Gaussian)
        )
        bound = _smaller(lambda accountant: _epsilon(halved, 2 * failure, delta, accountant))
        return Bound(epsilon=bound.epsilon, accountant=f"{bound.accountant} at twice the sensitivity")
    bound = _smaller(lambda accountant: _epsilon_of_two(counts, failure, delta, accountant))
    return Bound(epsilon=bound.epsilon, accountant=f"{bound.accountant} for a group of two")


def collapse(events: Events) -> tuple[Counts, float]:
    """Equal events counted, in an order that does not depend on theirs; and the sum of the failure probabilities."""
    counted: dict[Event, int] = {}
    for item in events:
        event, count = item if isinstance(item, tuple) else (item, 1)
        require(isinstance(count, int) and count >= 0, f"An event happens a whole number of times, not {count!r}.")
        if count:
            counted[event] = counted.get(event, 0) + count
    failure = math.fsum(e.delta * count for e, count in counted.items() if isinstance(e, FailureProbability))
    kept = ((event, count) for event, count in counted.items() if not isinstance(event, FailureProbability))
    return tuple(sorted(kept, key=repr)), failure


def versions() -> dict[str, str]:
    """What computed the figures of a statement."""
    return {name: version(name) for name in ("unheard", "dp-accounting", "numpy", "scipy")}


def _epsilon(counts: Counts, failure: float, delta: float, accountant: str) -> float:
    # DP: a failure probability comes off delta before the rest is composed; added after, it would not be covered.
    rest = delta - failure
    if not counts:
        return 0.0 if rest >= 0 else math.inf
    if rest <= 0:
        return math.inf
    if accountant == "pld":
        return pld_epsilon(counts, rest)
    curve = CURVES[accountant]
    return curve.epsilon(curve.total(counts), rest)


def _delta(counts: Counts, failure: float, epsilon: float, accountant: str) -> float:
    if not counts:
        return min(1.0, failure)
    if accountant == "pld":
        return min(1.0, failure + pld_delta(counts, epsilon))
    curve = CURVES[accountant]
    return min(1.0, failure + curve.delta(curve.total(counts), epsilon))


def _epsilon_of_two(counts: Counts, failure: float, delta: float, accountant: str) -> float:
    """2 epsilon, for the smallest epsilon found at which (1 + e^epsilon) times its delta is no more than delta."""
    rest = delta - 2 * failure
    if rest <= 0:
        return math.inf

    def holds(epsilon: float) -> bool:
        log_delta = math.log(max(_delta(counts, 0.0, epsilon, accountant), 1e-300))
        return epsilon + math.log1p(math.exp(-epsilon)) + log_delta <= math.log(rest)

    low = _epsilon(counts, 0.0, rest, accountant)
    if math.isinf(low) or (low == 0 and holds(low)):
        return low
    step = 0.05 * max(low, 0.01)
    high = next((low + i * step for i in range(1, 100) if holds(low + i * step)), math.inf)
    if math.isinf(high):
        return high
    low = high - step
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return 2 * high


def _smaller(epsilon_by: Callable[[str], float]) -> Bound:
    found = {accountant: epsilon_by(accountant) for accountant in CLAIMED}
    best = min(CLAIMED, key=lambda accountant: found[accountant])
    return Bound(epsilon=found[best], accountant=best)


def _check(delta: float, accountant: str) -> None:
    require(0 < delta < 1, f"delta must be between 0 and 1, not {delta}.")
    if accountant not in ACCOUNTANTS:
        raise InvalidValue(f"Unknown accountant '{accountant}'.{nearest(str(accountant), ACCOUNTANTS)}")
