"""Epsilon while training, and the stop: a round that would cost more than the budget is refused before it starts.

In: one event per round. Out: the epsilon spent so far and the epsilon after one more round, in well under a
millisecond, because the cost of an event is computed once and then added. Only an accountant with additive costs can do
that, so a budget is kept by `rdp` or `moments`; the statement of the run still claims the smaller of `pld` and `rdp`.
Rounds that draw examples (`ExampleGaussian`) have a bound by `pld` only: their epsilon is tabulated, at numbers of
rounds that are a few percent apart, and a number between two of them has the epsilon of the larger one.

    budget = Budget(epsilon=4.0, delta=1e-9)
    running = budget.running()
    for number in range(rounds):
        budget.check(running, event, number)      # raises BudgetExceeded before the round starts
        ledger.charge(event, number)
        running.charge(event)

The events of one run are fixed by its plan, so the round at which its budget is spent is a public number. Events of
several runs may be chosen after a look at results: a budget over all runs is kept at orders of RDP that are fixed when it
is declared, which makes it a privacy filter (Feldman and Zrnic 2021).

What may be claimed when a length or parameters were chosen after results were seen: filters and an odometer.

Composition bounds a list of events that was fixed beforehand. The operator can stop early, train longer than planned
(`resume --rounds`), or begin a run with another z, each after looking at results. The list of events is then itself an
outcome. This module computes what is proved in each case; docs/privacy.md, section 8, has the proofs.

    claim_of_run(facts, entries, delta)     a run: its plan is declared in its ledger, and only the length may be chosen
    odometer(counts, failure, delta)        several runs: anything may be chosen; no budget is needed

- **Stopping time.** A run that was stopped early reveals a function of the run that its declaration allows (all declared
  rounds, or as many as its declared budget allows). It claims the cost of that run.
- **Longer than declared.** Without a budget, a run of up to 2^k times the declared rounds claims the cost of that many
  rounds, at delta / 2^k.
- **A run that begins from an earlier one** on the same users contains both, and both may have been chosen: it claims what
  an odometer gives for everything that was charged.
- **Parameters.** Over several runs, a budget that was declared before the first round is an RDP filter at fixed orders
  (Feldman and Zrnic 2021), and the claim is the budget. Without one, the claim is that of an odometer: filters of growing
  budgets at the same orders, which share delta (Rogers et al. 2016; Lécuyer 2021; Whitehouse et al. 2023).
"""

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from unheard.config import nearest, require
from unheard.errors import BudgetExceeded, InvalidValue, LedgerError
from unheard.privacy.accountants import (
    ACCOUNTANTS,
    CLAIMED,
    FILTER_ORDERS,
    RDP_COST,
    RUNNING_ACCOUNTANT,
    AdditiveCost,
    Bound,
    Events,
    at_orders,
    best_epsilon,
    collapse,
    delta_at,
    epsilon,
    epsilon_at_order,
    filter_epsilon,
    replace_one_epsilon,
)
from unheard.privacy.events import (
    CorrelatedGaussian,
    Counts,
    Event,
    ExampleGaussian,
    FailureProbability,
    NonPrivate,
    PoissonGaussian,
    accounted,
    from_record,
    has_rounds,
)
from unheard.privacy.ledger import Entry


class RunningEpsilon:
    """The epsilon at `delta` of the events charged so far.

    Args:
        delta: Between 0 and 1.
        accountant: An accountant with additive costs, "rdp" or "moments".
        events: Events that are charged already.
        orders: The orders of the filters of a budget over several runs; none for the best of all orders.

    Raises:
        InvalidValue: The delta is out of range, or the accountant is unknown or has no additive costs.

    >>> from unheard.privacy.events import PoissonGaussian
    >>> running = RunningEpsilon(delta=1e-6)
    >>> running.epsilon
    0.0
    >>> running.charge(PoissonGaussian(sampling_prob=0.01, noise_multiplier=1.0))
    >>> round(running.epsilon, 2)
    1.21
    """

    def __init__(
        self,
        delta: float,
        accountant: str = RUNNING_ACCOUNTANT,
        events: Iterable[Event] = (),
        orders: Sequence[float] = (),
    ) -> None:
        require(0 < delta < 1, f"delta must be between 0 and 1, not {delta}.")
        self.delta = delta
        self.asked = accountant
        self.orders = tuple(orders)
        self._additive = _additive_cost(accountant)
        self._cost = np.zeros(1)
        self._failure = 0.0
        self._count = 0
        self._times: dict[Event, int] = {}
        for event in events:
            self.charge(event)

    @property
    def accountant(self) -> str:
        """The accountant of `epsilon`: the one that was asked for, or "pld" where examples are drawn."""
        return "pld" if self._draws_examples(self._times) else self.asked

    def charge(self, event: Event) -> None:
        """Count one event as spent."""
        self.charge_times(event, 1)

    def charge_times(self, event: Event, times: int) -> None:
        """Count the same event as spent several times."""
        self._cost, self._failure = self._with(event, times)
        self._count += times
        self._times[event] = self._times.get(event, 0) + times

    @property
    def failure(self) -> float:
        """The sum of the failure probabilities charged so far."""
        return self._failure

    @property
    def epsilon(self) -> float:
        """The epsilon of all events charged so far."""
        if self._draws_examples(self._times):
            return _tabulated(self._times, self.delta)
        return self._epsilon(self._cost, self._failure) if self._count else 0.0

    def epsilon_after(self, event: Event) -> float:
        """The epsilon if this event were charged too. Charges nothing."""
        after = {**self._times, event: self._times.get(event, 0) + 1}
        return _tabulated(after, self.delta) if self._draws_examples(after) else self._epsilon(*self._with(event))

    def _draws_examples(self, times: Mapping[Event, int]) -> bool:
        """Whether PLD computes the epsilon, because examples are drawn. A privacy filter never uses PLD: it has no proof."""
        return not self.orders and any(isinstance(event, ExampleGaussian) for event in times)

    def _with(self, event: Event, times: int = 1) -> tuple[np.ndarray, float]:
        """Cost and failure probability after `times` more of an event."""
        charged = accounted(event)
        if charged is None:  # a round that the first round of its block has paid for
            return self._cost, self._failure
        event = charged
        failure = event.delta if isinstance(event, FailureProbability) else 0.0
        return self._cost + times * self._additive.cost(event), self._failure + times * failure

    def _epsilon(self, cost: np.ndarray, failure: float) -> float:
        """Epsilon of a cost at the delta that the failure probability leaves."""
        rest = self.delta - failure
        if not cost.any():
            return 0.0 if rest >= 0 else float("inf")
        if rest <= 0:
            return float("inf")
        # DP: at the orders that were fixed with the budget; the best of all orders would be chosen by what was charged.
        return filter_epsilon(cost, rest, self.orders) if self.orders else self._additive.epsilon(cost, rest)


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The epsilon at delta that a run, or all runs on a population, may spend.

    Args:
        epsilon: The most that may be spent, above 0.
        delta: Between 0 and 1.
        accountant: The accountant that decides, one with additive costs: "rdp" or "moments".
        orders: For a budget over several runs, the orders of "rdp" at which it is kept: it is then a privacy filter,
            whatever the events are chosen by. None for the best of all orders, which is proved for events that are
            fixed beforehand.

    Raises:
        InvalidValue: A value is out of range, or the accountant cannot be asked before every round.

    >>> from unheard.privacy.events import NonPrivate
    >>> budget = Budget(epsilon=4.0, delta=1e-9)
    >>> budget.check(budget.running(), NonPrivate(reason="no noise"), round=0)
    Traceback (most recent call last):
        ...
    unheard.errors.BudgetExceeded: Round 0 would bring epsilon to inf at delta 1e-09 (rdp); the budget of this run ...
    """

    epsilon: float
    delta: float
    accountant: str = RUNNING_ACCOUNTANT
    orders: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        require(self.epsilon > 0, f"epsilon must be above 0, not {self.epsilon}.")
        require(0 < self.delta < 1, f"delta must be between 0 and 1, not {self.delta}.")
        _additive_cost(self.accountant)
        object.__setattr__(self, "orders", tuple(self.orders))
        if self.orders:
            require(self.accountant == "rdp", f"orders are for the accountant 'rdp', not for '{self.accountant}'.")
            at_orders(np.zeros(1), self.orders)

    @property
    def record(self) -> dict[str, Any]:
        """The budget as plain JSON."""
        plain = {"epsilon": self.epsilon, "delta": self.delta, "accountant": self.accountant}
        return {**plain, "orders": list(self.orders)} if self.orders else plain

    def running(self, events: Iterable[Event] = ()) -> RunningEpsilon:
        """The running epsilon that this budget is checked against, with `events` charged already."""
        return RunningEpsilon(self.delta, self.accountant, events, self.orders)

    def check(
        self, running: RunningEpsilon, event: Event, round: int, whose: str = "this run", larger: str = "in a new run"
    ) -> None:
        """Check that one more event fits into the budget.

        Args:
            running: What is spent so far, from `running`.
            event: The event of the round that is about to start.
            round: Its number, for the error message.
            whose: Whose budget it is, for the error message.
            larger: How a larger budget is declared, for the error message.

        Raises:
            BudgetExceeded: Charging `event` would spend more than the budget.
        """
        if (running.delta, running.asked, running.orders) != (self.delta, self.accountant, self.orders):
            raise InvalidValue("The running epsilon must have the budget's own delta and accountant, and its orders.")
        after = running.epsilon_after(event)
        # DP: asked before the round starts; a round that has been seen cannot be given back. NaN must not pass.
        if not after <= self.epsilon:
            advice = f"keep this model, or declare a larger budget {larger}."
            if running.epsilon == float("inf"):
                advice = "what is spent is infinite, and no budget can hold it. `unheard statement` names the reason."
            raise BudgetExceeded(
                f"Round {round} would bring epsilon to {after:.4f} at delta {self.delta:g} ({running.accountant}); "
                f"the budget of {whose} is {self.epsilon:g} and {running.epsilon:.4f} is spent. Training stops here: {advice}"
            )


STEP_OF_TABLE = 1.03
"""The ratio of neighbouring numbers of rounds in the table of epsilons."""


def _tabulated(times: Mapping[Event, int], delta: float) -> float:
    """Epsilon by pld, at numbers of rounds that are rounded up to those of the table."""
    # DP: rounded up, so the epsilon is that of as many rounds or more.
    return _table_entry(tuple(sorted(((event, _rounded_up(n)) for event, n in times.items()), key=repr)), delta)


def _rounded_up(count: int) -> int:
    number = 1
    while number < count:
        number = max(number + 1, math.floor(number * STEP_OF_TABLE))
    return number


@functools.lru_cache(maxsize=1024)
def _table_entry(counts: Counts, delta: float) -> float:
    return epsilon(counts, delta, "pld")


def _additive_cost(name: str) -> AdditiveCost:
    """The costs of an accountant that can be asked before every round; `InvalidValue` for any other."""
    additive = {key: accountant.additive for key, accountant in ACCOUNTANTS.items() if accountant.additive is not None}
    if name in ACCOUNTANTS and name not in additive:
        raise InvalidValue(
            f"'{name}' takes seconds for every round: budget by '{RUNNING_ACCOUNTANT}'. "
            f"The statement still claims {name}'s bound."
        )
    if name not in additive:
        raise InvalidValue(f"Unknown accountant '{name}'.{nearest(str(name), additive)}")
    return additive[name]


FIXED, DECLARED, DOUBLED, UNKNOWN = "fixed beforehand", "declared rounds", "doubled rounds", "not recorded"
ADAPTIVE = "chosen after results"

WHY = {
    FIXED: "every event was declared before the run began: composition of what was charged",
    DECLARED: "the length may have been chosen after a look at results: the claim is the cost of all rounds that were "
    "declared, or that the declared budget allows",
    DOUBLED: "the run was made longer than it was declared, perhaps after a look at results: the claim is the cost of the "
    "next doubling of the declared rounds, at a smaller delta. Over all lengths that the run could have been given, the "
    "deltas add up to at most twice the delta of this statement",
    ADAPTIVE: "the run began from an earlier run on these users: the length of that run and the settings of this one may "
    "have been chosen after a look at results. An odometer covers that, at a price. It has no bound for rounds that draw "
    "examples",
    UNKNOWN: "the ledger, of an older version, does not say how many rounds were declared: the claim holds if the length "
    "was not chosen after a look at results",
}

ODOMETER_FIRST, ODOMETER_STEP = 0.02, 1.25
"""The budgets of the odometer's filters: ODOMETER_FIRST * ODOMETER_STEP^k for k = 0, 1, ..., at each order."""
EARLIER_RUN = "an earlier run"
"""What the header of a ledger says about a run that began from the model of an earlier run on the same users."""
SMALLEST_DELTA = 1e-200
"""The smallest delta that is tried."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What a run may claim.

    Attributes:
        epsilon: The bound.
        accountant: How it was computed, in words if it is not the composition of what was charged.
        basis: One of `WHY`.
        events: The events whose cost is claimed. They include those that were charged.
        delta: The delta at which their cost is taken: that of the statement, or a part of it.
        level: k for a run that was made up to 2^k times as long as declared: its cost is taken at delta / 2^k.
    """

    epsilon: float
    accountant: str
    basis: str
    events: Sequence[Event | tuple[Event, int]]
    delta: float
    level: int = 0

    def cost(self, events: Events) -> Bound:
        """The epsilon of other events, for example of the same rounds as the server sees them, computed like the claim."""
        return odometer(*collapse(events), self.delta) if self.basis == ADAPTIVE else best_epsilon(events, self.delta)

    def replace_one(self) -> Bound:
        """The epsilon of the claim for the case that one user is replaced by another."""
        if self.basis != ADAPTIVE:
            return replace_one_epsilon(self.events, self.delta)
        bound = odometer(*collapse(self.events), self.delta, of_two=True)
        return Bound(epsilon=bound.epsilon, accountant=f"{bound.accountant} for a group of two")

    def delta_at(self, epsilon: float) -> float:
        """The smallest delta found at which a statement of this run would claim at most this epsilon."""
        counts, failure = collapse(self.events)
        if self.basis == ADAPTIVE:
            # DP: the delta of all filters together, as in the claim; that of one list of events would be too small.
            return _smallest(lambda delta: odometer(counts, failure, delta).epsilon <= epsilon)
        again = [*counts, (FailureProbability(delta=min(1.0, failure)), 1)]
        # DP: the claim takes the cost at delta / 2^k, so the delta that belongs to a cost is 2^k times as large.
        return min(1.0, 2**self.level * min(delta_at(again, epsilon, accountant) for accountant in CLAIMED))


def declaration(rounds: int, phases: Sequence[tuple[int, Mapping[str, Any]]], budget: Budget | None) -> dict[str, Any]:
    """The fact `declared` in the header of a run's ledger.

    Args:
        rounds: The rounds of the run file when the run began.
        phases: The first round of each phase of the schedule, and the record of its event.
        budget: The budget of the run; None if it has none.
    """
    record = {"rounds": rounds, "phases": [{"from_round": first, "event": dict(event)} for first, event in phases]}
    return record if budget is None else {**record, "budget": budget.record}


def claim_of_run(facts: Mapping[str, Any], items: Sequence[Entry | Event], delta: float) -> Claim:
    """Compute what a run may claim at delta.

    Args:
        facts: The header of the run's ledger.
        items: Everything that was charged.
        delta: Between 0 and 1.

    Raises:
        LedgerError: The header's declaration is malformed.
    """
    charged = [item.event if isinstance(item, Entry) else item for item in items]
    declared = facts.get("declared")
    past = (facts.get("start") or {}).get("charges")
    # DP: without the number of earlier charges the declared rounds cannot be told from others, and nothing was fixed.
    if declared is not None and (type(past) is not int or not 0 <= past <= len(items)):
        raise LedgerError(
            "The ledger's first line declares rounds and does not say how many charges came before them. Put the right "
            "ledger back."
        )
    rounds = [item for item in items[past or 0 :] if isinstance(item, Entry)]
    is_known = isinstance(past, int) and len(rounds) == len(items) - past
    # DP: the earlier run may have been stopped, and this one planned, after a look at results: no list of events was fixed.
    if declared is not None and (facts.get("start") or {}).get("from") == EARLIER_RUN and has_rounds(charged):
        bound = odometer(*collapse(charged), delta)
        return Claim(epsilon=bound.epsilon, accountant=bound.accountant, basis=ADAPTIVE, events=charged, delta=delta)
    # Nothing was chosen if no round was charged, or if one charge covers the whole run (a selection).
    if (
        declared is None
        or not is_known
        or not rounds
        or not all(isinstance(e.event, PoissonGaussian | ExampleGaussian | CorrelatedGaussian) for e in rounds)
    ):
        return _claim(charged, delta, UNKNOWN if declared is None and rounds and facts.get("run_id") else FIXED)
    before, reached = charged[:past], max(entry.round for entry in rounds) + 1
    plan = _Declared.read(declared)
    limit, level = plan.limit(before, reached)
    if reached >= limit and level == 0:
        return _claim(charged, delta, FIXED)
    basis, last = DOUBLED if level else DECLARED, rounds[-1].event
    if isinstance(last, CorrelatedGaussian):
        # DP: the blocks of all rounds up to the limit, not only those that have begun.
        begun = last.index + 1
        blocks = _blocks(last, begun + max(0, limit - reached)) - _blocks(last, begun)
        if not blocks and not level:
            return _claim(charged, delta, FIXED)
        return _claim([*charged, (replace(last, index=0), blocks)], delta, basis, level)
    # DP: all rounds up to the limit, not only those that were done: the person who stopped may have looked at the model.
    events: list[Event | tuple[Event, int]] = [*before, *plan.events(limit)]
    # Rounds that were done again follow a crash, not a look at results.
    numbers: set[int] = set()
    for entry in rounds:
        if entry.round in numbers:
            events.append(entry.event)
        numbers.add(entry.round)
    return _claim(events, delta, basis, level)


def _blocks(event: CorrelatedGaussian, rounds: int) -> int:
    """How many charges cover the first `rounds` rounds of a mechanism with correlated noise."""
    return -(-rounds // event.block)


def _claim(events: Sequence[Event | tuple[Event, int]], delta: float, basis: str, level: int = 0) -> Claim:
    # DP: each level has a delta of its own, and their sum is at most twice the first.
    share = delta / 2**level
    bound = best_epsilon(events, share)
    name = bound.accountant if basis in (FIXED, UNKNOWN) else f"{bound.accountant} of the {basis}"
    return Claim(epsilon=bound.epsilon, accountant=name, basis=basis, events=events, delta=share, level=level)


@dataclass(frozen=True, kw_only=True)
class _Declared:
    """The fact `declared` of a header, checked."""

    rounds: int
    phases: tuple[tuple[int, Event], ...]
    budget: Budget | None

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> "_Declared":
        """Read the declaration from the header of a ledger."""
        try:
            phases = tuple((int(phase["from_round"]), from_record(phase["event"])) for phase in record["phases"])
            budget = record.get("budget")
            firsts = [first for first, _ in phases]
            if firsts[0] != 0 or firsts != sorted(firsts) or int(record["rounds"]) < 1:
                raise ValueError
            return cls(rounds=int(record["rounds"]), phases=phases, budget=None if budget is None else Budget(**budget))
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, InvalidValue):
            raise LedgerError(
                "The ledger's first line declares rounds in a form that this version does not know. Put back a whole copy, "
                "or use the version that wrote it."
            ) from None

    def events(self, rounds: int) -> list[tuple[Event, int]]:
        """The events of the first `rounds` rounds of the plan."""
        first_event = self.phases[0][1]
        if isinstance(first_event, CorrelatedGaussian):  # no schedule changes it
            return [(first_event, _blocks(first_event, rounds))]
        ends = [first for first, _ in self.phases[1:]] + [rounds]
        counts = [(event, min(end, rounds) - first) for (first, event), end in zip(self.phases, ends, strict=True)]
        return [(event, count) for event, count in counts if count > 0]

    def limit(self, before: Sequence[Event], reached: int) -> tuple[int, int]:
        """Return the number of rounds that are allowed, and the level.

        The level is 0 within the declared rounds, and k for up to 2^k times as many.
        """
        allowed = None if self.budget is None else self._rounds_within(self.budget, before)
        if reached <= self.rounds:
            return (self.rounds if allowed is None else min(self.rounds, allowed)), 0
        if allowed is not None:
            return allowed, 0
        level = math.ceil(math.log2(reached / self.rounds))
        return self.rounds * 2**level, level

    def _rounds_within(self, budget: Budget, before: Sequence[Event]) -> int:
        """The largest number of rounds of the plan that the budget allows. It depends on public numbers alone."""

        def fits(rounds: int) -> bool:
            """Whether a number of rounds stays within the budget."""
            running = budget.running(before)
            for event, count in self.events(rounds):
                running.charge_times(event, count)
            return running.epsilon <= budget.epsilon

        high = 1
        while fits(high) and high < 1 << 40:
            high *= 2
        low = 0
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low


def odometer(counts: Counts, failure: float, delta: float, *, of_two: bool = False) -> Bound:
    """Bound the epsilon of events that were chosen adaptively: each may depend on all results before it.

    Args:
        counts: Counted events, from `collapse`.
        failure: The sum of the failure probabilities, which must not depend on results.
        delta: The delta of all filters together.
        of_two: Whether the bound is for two users, so that one may be replaced by another.

    Returns:
        The bound; infinity if an event has no noise, or if the failure probabilities use up delta.
    """
    name = "an RDP odometer"
    rest = delta - (2 if of_two else 1) * failure
    if any(isinstance(event, NonPrivate) for event, _ in counts) or rest <= 0:
        return Bound(epsilon=math.inf, accountant=name)
    if not counts:
        return Bound(epsilon=0.0, accountant=name)
    cost = RDP_COST.total(counts)
    best = math.inf
    for order in FILTER_ORDERS:
        spent = float(at_orders(cost, [order])[0])
        if not math.isfinite(spent):
            continue
        level = max(0, math.ceil(math.log(spent / ODOMETER_FIRST, ODOMETER_STEP) - 1e-12)) if spent > 0 else 0
        budget = max(spent, ODOMETER_FIRST * ODOMETER_STEP**level)
        # DP: one filter for each order and level; their deltas add up to delta, since sum 1/k^2 = pi^2/6.
        share = rest * 6 / (math.pi**2 * (level + 1) ** 2 * len(FILTER_ORDERS))
        best = min(best, (_epsilon_of_two if of_two else epsilon_at_order)(order, budget, share))
    return Bound(epsilon=best, accountant=name)


def _epsilon_of_two(order: float, divergence: float, delta: float) -> float:
    """Bound epsilon for two users: (epsilon, d) for one user is (2 epsilon, (1 + e^epsilon) d) for two (group privacy)."""
    if order <= 2:  # a smaller d raises (1 + e^epsilon) d there
        return math.inf

    def is_too_large(share: float) -> bool:
        epsilon = epsilon_at_order(order, divergence, share)
        # DP: the delta of two users is that of the filter.
        return epsilon > 600 or (1 + math.exp(epsilon)) * share > delta

    share = _smallest(is_too_large) / 1.001
    return math.inf if is_too_large(share) else 2 * epsilon_at_order(order, divergence, share)


def _smallest(holds: Callable[[float], bool]) -> float:
    """The smallest delta found, to three digits, at and above which a property holds; 1 if it holds nowhere below 1."""
    low, high = math.log(SMALLEST_DELTA), 0.0
    for _ in range(24):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(math.exp(middle)) else (middle, high)
    return math.exp(high)
