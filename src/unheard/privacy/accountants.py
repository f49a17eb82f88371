"""The accountants: from the events of a ledger to epsilon at delta, delta at epsilon, and the bound that a run claims.

In: events, or pairs of an event and how often it happened, and a delta (or an epsilon). Out: the other of the two, an
upper bound under add-or-remove-one-user adjacency (paper: Definition 1 and Theorem 1; Table 1 for `moments`).

    epsilon(events, delta, accountant)      by one accountant
    epsilons(events, delta)                 by each accountant
    best_epsilon(events, delta)             the bound that a run claims: the smaller of pld and rdp, named
    delta_at(events, epsilon, accountant)   the delta at an epsilon
    replace_one_epsilon(events, delta)      the bound if one user is replaced, not added or removed

`ACCOUNTANTS` is the registry. To add an accountant, write a module with its functions of counted events and add one
`Accountant` record here; commands, statements, plans and budgets read the registry.

>>> from unheard.privacy.events import PoissonGaussian
>>> rounds = (PoissonGaussian(sampling_prob=5000 / 763_430, noise_multiplier=1.0), 5000)
>>> {name: round(value, 3) for name, value in epsilons([rounds], delta=1e-9).items()}
{'moments': 4.634, 'rdp': 4.183, 'pld': 3.899}
>>> best_epsilon([rounds], delta=1e-9).accountant
'pld'
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import version
from typing import TypeAlias

from unheard.config import nearest, require
from unheard.errors import InvalidValue
from unheard.privacy.events import Counts, Event, ExampleGaussian, FailureProbability, accounted
from unheard.privacy.pld import pld_delta, pld_epsilon, replace_one_pld_epsilon
from unheard.privacy.rdp import MOMENTS_COST, RDP_COST, AdditiveCost

Events: TypeAlias = Iterable[Event | tuple[Event, int]]
"""Events, or pairs of an event and how often it happened."""


@dataclass(frozen=True, kw_only=True)
class Accountant:
    """One way to bound the privacy loss of counted events.

    Attributes:
        name: Its name in run files, commands and statements.
        title: The heading of its column in a table.
        description: What it computes, how exact it is, and where it comes from.
        epsilon: The epsilon at delta of counted events; infinity where it has no bound.
        delta: The delta at epsilon of counted events.
        additive: The cost per event, if costs add up. Only such an accountant can be asked before every round.
        is_claimed: Whether a run may claim its bound. A run claims the smallest of these.
        note: What a printed statement adds to its epsilon.
    """

    name: str
    title: str
    description: str
    epsilon: Callable[[Counts, float], float]
    delta: Callable[[Counts, float], float]
    additive: AdditiveCost | None = None
    is_claimed: bool = False
    note: str = ""


ACCOUNTANTS = {
    accountant.name: accountant
    for accountant in (
        Accountant(
            name="moments",
            title="moments (the paper's)",
            description="The moments accountant with the integer moments 1 to 32 (Abadi et al. 2016). It gives the epsilons "
            "that the paper prints, and is there to compare with the paper.",
            epsilon=MOMENTS_COST.epsilon_of,
            delta=MOMENTS_COST.delta_of,
            additive=MOMENTS_COST,
            note="the paper's, for comparison",
        ),
        Accountant(
            name="rdp",
            title="RDP",
            description="Rényi differential privacy of the sampled Gaussian mechanism (Mironov, Talwar and Zhang 2019), by "
            "dp-accounting. Quick; no bound where examples are drawn instead of users.",
            epsilon=RDP_COST.epsilon_of,
            delta=RDP_COST.delta_of,
            additive=RDP_COST,
            is_claimed=True,
        ),
        Accountant(
            name="pld",
            title="PLD",
            description="Numerical composition of privacy loss distributions (Koskela, Jälkö and Honkela 2020), by "
            "dp-accounting. The tightest of the three; takes seconds; no bound for selections or above 10^7 rounds.",
            epsilon=pld_epsilon,
            delta=pld_delta,
            is_claimed=True,
        ),
    )
}

CLAIMED = tuple(name for name in reversed(ACCOUNTANTS) if ACCOUNTANTS[name].is_claimed)
"""The accountants of which a run claims the smallest bound; of equal bounds the first one here is named."""

CLAIM_RULE = f"the smaller of {' and '.join(CLAIMED)}"

RUNNING_ACCOUNTANT = "rdp"
"""The accountant of epsilons that are computed after every round: budgets and curves over rounds."""


def running_accountant(events: Iterable[Event]) -> str:
    """The accountant of these events' running epsilon: rdp, which has no bound where examples are drawn, or pld."""
    return "pld" if any(isinstance(event, ExampleGaussian) for event in events) else RUNNING_ACCOUNTANT


@dataclass(frozen=True, kw_only=True)
class Bound:
    """An epsilon and the accountant that shows it.

    Attributes:
        epsilon: The bound; infinity if there is none.
        accountant: The name of the accountant, in words where more was needed (`replace_one_epsilon`).
    """

    epsilon: float
    accountant: str


def epsilon(events: Events, delta: float, accountant: str) -> float:
    """Compute the epsilon that holds at delta, by one accountant.

    Args:
        events: What happened.
        delta: Between 0 and 1.
        accountant: A key of `ACCOUNTANTS`.

    Returns:
        An upper bound: 0.0 for no events, infinity where something was released without noise.

    Raises:
        InvalidValue: The delta is not between 0 and 1, or there is no such accountant.
    """
    _check_delta(delta)
    return _epsilon(*collapse(events), delta, find_accountant(accountant))


def delta_at(events: Events, epsilon: float, accountant: str) -> float:
    """Compute the delta that holds at epsilon, by one accountant; the arguments are as for `epsilon`."""
    require(0 <= epsilon < math.inf, f"epsilon must be a number from 0 up, not {epsilon}.")
    return _delta(*collapse(events), epsilon, find_accountant(accountant))


def epsilons(events: Events, delta: float) -> dict[str, float]:
    """Compute epsilon at delta by each accountant, in the order of the registry."""
    _check_delta(delta)
    counts, failure = collapse(events)
    return {name: _epsilon(counts, failure, delta, accountant) for name, accountant in ACCOUNTANTS.items()}


def best_epsilon(events: Events, delta: float) -> Bound:
    """Compute the bound that a run claims: the smaller of pld's and rdp's, both valid, and which one it is.

    The choice depends on the events alone, which are public, so choosing the smaller bound costs nothing.
    """
    _check_delta(delta)
    counts, failure = collapse(events)
    return _smallest(lambda accountant: _epsilon(counts, failure, delta, accountant))


def replace_one_epsilon(events: Events, delta: float) -> Bound:
    """Compute epsilon for the case that one user's data is replaced by another's, instead of added or removed.

    dp-accounting composes the losses of rounds and Gaussian releases under this adjacency; docs/privacy.md proves that
    its worst case, two users with opposite updates, is the worst case in any number of dimensions. For every other
    event, to replace is to remove one user and to add one, and a guarantee of (epsilon, delta) for one user is one of
    (2 epsilon, (1 + e^epsilon) delta) for two (group privacy). A failure probability counts twice either way: once for
    each of the two users.

    Returns:
        The bound; its `accountant` says which of the two arguments was used.
    """
    _check_delta(delta)
    counts, failure = collapse(events)
    # DP: each of the two users may be the one for whom the release fails.
    rest = delta - 2 * failure
    direct = replace_one_pld_epsilon(counts, rest) if counts and rest > 0 else None
    if direct is not None and direct < math.inf:
        return Bound(epsilon=direct, accountant="pld for replacing one user")
    two = _smallest(lambda accountant: _epsilon_of_two(counts, failure, delta, accountant))
    return Bound(epsilon=two.epsilon, accountant=f"{two.accountant} for a group of two")


def collapse(events: Events) -> tuple[Counts, float]:
    """Count equal events, and sum the failure probabilities.

    Returns:
        The counted events in an order that does not depend on the order of the input, without failure probabilities;
        and the sum of the failure probabilities.
    """
    counted: dict[Event, int] = {}
    for item in events:
        event, count = item if isinstance(item, tuple) else (item, 1)
        require(isinstance(count, int) and count >= 0, f"An event happens a whole number of times, not {count!r}.")
        # Rounds with correlated noise are charged by block: what is counted here is what each block costs.
        if count and (event := accounted(event)) is not None:
            counted[event] = counted.get(event, 0) + count
    failure = math.fsum(e.delta * count for e, count in counted.items() if isinstance(e, FailureProbability))
    kept = ((event, count) for event, count in counted.items() if not isinstance(event, FailureProbability))
    return tuple(sorted(kept, key=repr)), failure


def find_accountant(name: str) -> Accountant:
    """Look up an accountant; raises `InvalidValue` with the nearest known name."""
    if name not in ACCOUNTANTS:
        raise InvalidValue(f"Unknown accountant '{name}'.{nearest(str(name), ACCOUNTANTS)}")
    return ACCOUNTANTS[name]


def versions() -> dict[str, str]:
    """The versions of the packages that compute the figures of a statement."""
    return {name: version(name) for name in ("unheard", "dp-accounting", "numpy", "scipy")}


def _epsilon(counts: Counts, failure: float, delta: float, accountant: Accountant) -> float:
    # DP: a failure probability comes off delta before the rest is composed; added after, it would not be covered.
    rest = delta - failure
    if not counts:
        return 0.0 if rest >= 0 else math.inf
    return accountant.epsilon(counts, rest) if rest > 0 else math.inf


def _delta(counts: Counts, failure: float, epsilon: float, accountant: Accountant) -> float:
    return min(1.0, failure + (accountant.delta(counts, epsilon) if counts else 0.0))


def _epsilon_of_two(counts: Counts, failure: float, delta: float, accountant: Accountant) -> float:
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


def _smallest(epsilon_by: Callable[[Accountant], float]) -> Bound:
    bounds = [Bound(epsilon=epsilon_by(ACCOUNTANTS[name]), accountant=name) for name in CLAIMED]
    return min(bounds, key=lambda bound: bound.epsilon)


def _check_delta(delta: float) -> None:
    require(0 < delta < 1, f"delta must be between 0 and 1, not {delta}.")
