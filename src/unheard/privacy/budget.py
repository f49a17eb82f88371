"""Keep the budget during training, and compute the claim of a run that may have been stopped or extended.

**The budget.** `Budget.check` refuses a round that would exceed the budget, before the round starts. Input: one event
per round. Output: the epsilon spent so far and the epsilon after one more round. Each takes well under a millisecond,
because the cost of an event is computed once and then added. Only an accountant with additive costs can do that, so a
budget uses `rdp` or `moments`; the statement of the run still claims the smaller of `pld` and `rdp`. Rounds that draw
examples (`ExampleGaussian`) have a bound by `pld` only, which is slow. Their epsilon is computed for some numbers of
rounds, a few percent apart; for a number in between, the epsilon of the next larger one is used.

    budget = Budget(epsilon=4.0, delta=1e-9)
    running = budget.running()
    for number in range(rounds):
        budget.check(running, event, number)      # raises BudgetExceeded before the round starts
        ledger.charge(event, number)
        running.charge(event)

The plan of a run fixes its events, so the round at which the budget of a run is spent is a public number. The events of
several runs may be chosen after looking at results. A budget over several runs therefore uses RDP orders that are fixed
when the budget is declared, which makes it a privacy filter (Feldman and Zrnic 2021).

**The claim.** Composition bounds a list of events that was fixed beforehand. But the operator can stop early, train
longer than planned (`resume --rounds`), or begin a run with another z, each after looking at results. The list of
events then depends on the data. This module computes what is proved in each case; docs/privacy.md, section 8, has the
proofs.

    claim_of_run(facts, items, delta)       one run: its ledger declares the plan, and only the length may be chosen
    odometer(counts, failure, delta)        several runs: anything may be chosen; no budget is needed

- **Stopped early.** The result of a run that was stopped early is a function of the longest run that its declaration
  allows: all declared rounds, or as many as its declared budget allows. The run claims the cost of that longest run.
- **Longer than declared.** Without a budget, a run of up to 2^k times the declared rounds claims the cost of that many
  rounds, at delta / 2^k.
- **Begun from an earlier run** on the same users. The result depends on both runs, and the settings of both may have
  been chosen after looking at results. The run claims the bound of an odometer over everything that was charged.
- **Parameters.** Over several runs, a budget that was declared before the first round is an RDP filter at fixed orders
  (Feldman and Zrnic 2021), and the claim is the budget. Without one, the claim is that of an odometer: filters of growing
  budgets at the same orders, which share delta (Rogers et al. 2016; Lécuyer 2021; Whitehouse et al. 2023).
"""

import copy
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
        orders: The fixed RDP orders of a budget over several runs. If empty, epsilon is the smallest over all orders.

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
        self._times: dict[Event, int] = {}
        for event in events:
            self.charge(event)

    @property
    def accountant(self) -> str:
        """The name of the accountant of `epsilon`: "pld" if a round draws examples, otherwise the one asked for."""
        return "pld" if self._draws_examples(self._times) else self.asked

    def charge(self, event: Event, times: int = 1) -> None:
        """Add the same event `times` times to the events charged so far."""
        self._cost, self._failure = self._with(event, times)
        self._times = {**self._times, event: self._times.get(event, 0) + times}

    @property
    def failure(self) -> float:
        """The sum of the failure probabilities charged so far."""
        return self._failure

    @property
    def epsilon(self) -> float:
        """The epsilon of all events charged so far."""
        if self._draws_examples(self._times):
            return _tabulated(self._times, self.delta)
        return self._epsilon(self._cost, self._failure) if self._times else 0.0

    def epsilon_after(self, event: Event) -> float:
        """Return the epsilon that charging this event would lead to. Charges nothing."""
        after = {**self._times, event: self._times.get(event, 0) + 1}
        return _tabulated(after, self.delta) if self._draws_examples(after) else self._epsilon(*self._with(event))

    def _draws_examples(self, times: Mapping[Event, int]) -> bool:
        """Whether PLD computes the epsilon, because a round draws examples.

        A privacy filter (`orders` given) never uses PLD, since no proof covers a filter with PLD.
        """
        return not self.orders and any(isinstance(event, ExampleGaussian) for event in times)

    def _with(self, event: Event, times: int = 1) -> tuple[np.ndarray, float]:
        """Return the total cost and failure probability after `times` more charges of an event."""
        charged = accounted(event)
        if charged is None:  # the charge of the first round of the block covers this round
            return self._cost, self._failure
        event = charged
        failure = event.delta if isinstance(event, FailureProbability) else 0.0
        return self._cost + times * self._additive.cost(event), self._failure + times * failure

    def _epsilon(self, cost: np.ndarray, failure: float) -> float:
        """Compute epsilon from a total cost, at the delta that is left after the failure probability."""
        rest = self.delta - failure
        if not cost.any():
            return 0.0 if rest >= 0 else float("inf")
        if rest <= 0:
            return float("inf")
        # DP: the orders were fixed with the budget; the best of all orders would depend on what was charged.
        return filter_epsilon(cost, rest, self.orders) if self.orders else self._additive.epsilon(cost, rest)


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The epsilon at delta that a run, or all runs on a population, may spend.

    Args:
        epsilon: The largest epsilon that may be spent, above 0.
        delta: Between 0 and 1.
        accountant: The accountant that computes what is spent, one with additive costs: "rdp" or "moments".
        orders: For a budget over several runs, the fixed orders of "rdp". The budget is then a privacy filter: it holds
            even if events are chosen after looking at results. If empty, epsilon is the smallest over all orders, which
            is proved only for events that are fixed beforehand.

    Raises:
        InvalidValue: A value is out of range, or the accountant has no additive costs.

    >>> from unheard.privacy.events import NonPrivate
    >>> budget = Budget(epsilon=4.0, delta=1e-9)
    >>> budget.check(budget.running(), NonPrivate(reason="no noise"), round=0)
    Traceback (most recent call last):
        ...
    unheard.errors.BudgetExceeded: Round 1 would bring epsilon to inf at delta 1e-09 (rdp); the budget of this run is ...
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
        """The budget as plain JSON values; `Budget(**record)` gives it back."""
        plain = {"epsilon": self.epsilon, "delta": self.delta, "accountant": self.accountant}
        return {**plain, "orders": list(self.orders)} if self.orders else plain

    def running(self, events: Iterable[Event] = ()) -> RunningEpsilon:
        """Return the object that tracks the epsilon spent, for `check`. `events` are those that were charged already."""
        return RunningEpsilon(self.delta, self.accountant, events, self.orders)

    def check(
        self, running: RunningEpsilon, event: Event, round: int, whose: str = "this run", larger: str = "in a new run"
    ) -> None:
        """Check that one more event fits into the budget.

        Args:
            running: The events spent so far, from `running`.
            event: The event of the round that is about to start.
            round: The number of rounds done so far, for the error message.
            whose: Whose budget it is, for the error message.
            larger: How to declare a larger budget, for the error message.

        Raises:
            BudgetExceeded: Charging `event` would spend more than the budget.
            InvalidValue: `running` has another delta, accountant or orders than this budget.
        """
        if (running.delta, running.asked, running.orders) != (self.delta, self.accountant, self.orders):
            raise InvalidValue("The running epsilon must have the budget's own delta and accountant, and its orders.")
        after = running.epsilon_after(event)
        # DP: checked before the round starts, because a release cannot be undone. NaN must not pass.
        if not after <= self.epsilon:
            advice = f"{'keep this model, or ' if round else ''}declare a larger budget {larger}."
            if running.epsilon == float("inf"):
                advice = "what is spent is infinite, and no budget can hold it. `unheard statement` names the reason."
            raise BudgetExceeded(
                f"Round {round + 1} would bring epsilon to {after:.4f} at delta {self.delta:g} ({running.accountant}); "
                f"the budget of {whose} is {self.epsilon:g} and {running.epsilon:.4f} is spent. Training stops here: {advice}"
            )


STEP_OF_TABLE = 1.03
"""The ratio of neighbouring numbers of rounds for which `_tabulated` computes epsilon."""


def _tabulated(times: Mapping[Event, int], delta: float) -> float:
    """Compute epsilon by pld, with the number of rounds rounded up so that few slow computations are needed."""
    # DP: the number of rounds is rounded up, so the epsilon is never too small.
    return _table_entry(tuple(sorted(((event, _rounded_up(n)) for event, n in times.items()), key=repr)), delta)


def _rounded_up(count: int) -> int:
    """Return the smallest number of the series 1, 2, 3, ... with steps of about 3 percent that is at least `count`."""
    number = 1
    while number < count:
        number = max(number + 1, math.floor(number * STEP_OF_TABLE))
    return number


@functools.lru_cache(maxsize=1024)
def _table_entry(counts: Counts, delta: float) -> float:
    return epsilon(counts, delta, "pld")


def _additive_cost(name: str) -> AdditiveCost:
    """Return the costs of an accountant with additive costs. Raises `InvalidValue` for any other accountant."""
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
"""The value of `start.from` in a ledger's header if the run began from the model of an earlier run on these users."""
PUBLIC_START = "a model declared public"
UNKNOWN_START = "a model file of unknown cost"
LARGE_DELTA = 1e-2
SMALLEST_DELTA = 1e-200
"""The smallest delta that `_smallest` tries."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """The epsilon that a statement claims, and how it was computed.

    Attributes:
        epsilon: The bound.
        accountant: The name of the accountant, with a remark if the claim covers more than the charged events.
        basis: A key of `WHY`, which has the reason for the claim.
        events: The events whose cost is claimed. They include those that were charged.
        delta: The delta at which the cost of `events` is computed: the delta of the statement divided by 2^level.
        level: 0, or k if the run has up to 2^k times its declared rounds.
        among: The names of the accountants whose bounds are compared.
    """

    epsilon: float
    accountant: str
    basis: str
    events: Sequence[Event | tuple[Event, int]]
    delta: float
    level: int = 0
    among: tuple[str, ...] = CLAIMED

    def by(self, accountants: Iterable[str]) -> "Claim":
        """Return the claim for the same events by some of the accountants, as a version that had only these computed it."""
        if self.basis == ADAPTIVE:  # an odometer always uses one accountant
            return self
        among = tuple(name for name in self.among if name in set(accountants))
        return _claim(self.events, self.delta * 2**self.level, self.basis, self.level, among)

    def cost(self, events: Events) -> Bound:
        """Compute the epsilon of other events by the method of the claim, for example of rounds as a server sees them.

        Args:
            events: The events to compute the epsilon of, instead of `self.events`.
        """
        return (
            odometer(*collapse(events), self.delta)
            if self.basis == ADAPTIVE
            else best_epsilon(events, self.delta, self.among)
        )

    def replace_one(self) -> Bound:
        """Compute the epsilon of the claim for the case that one user is replaced by another."""
        if self.basis != ADAPTIVE:
            return replace_one_epsilon(self.events, self.delta, self.among)
        bound = odometer(*collapse(self.events), self.delta, of_two=True)
        return Bound(epsilon=bound.epsilon, accountant=f"{bound.accountant} for a group of two")

    def delta_at(self, epsilon: float) -> float:
        """Return the smallest delta, to the precision of the search, at which this run can claim at most `epsilon`."""
        counts, failure = collapse(self.events)
        if self.basis == ADAPTIVE:
            # DP: the delta of all filters together, as in the claim; that of one list of events would be too small.
            return _smallest(lambda delta: odometer(counts, failure, delta).epsilon <= epsilon)
        again = [*counts, (FailureProbability(delta=min(1.0, failure)), 1)]
        # DP: the claim is the cost at delta / 2^k, so the delta of the statement is 2^k times the delta of the cost.
        return min(1.0, 2**self.level * min(delta_at(again, epsilon, accountant) for accountant in self.among))


def declaration(rounds: int, phases: Sequence[tuple[int, Mapping[str, Any]]], budget: Budget | None) -> dict[str, Any]:
    """Return the record `declared` for the header of a run's ledger. `claim_of_run` reads it.

    Args:
        rounds: The number of rounds in the run file when the run began.
        phases: The first round of each phase of the schedule, and the record of its event.
        budget: The budget of the run; None if it has none.
    """
    record = {"rounds": rounds, "phases": [{"from_round": first, "event": dict(event)} for first, event in phases]}
    return record if budget is None else {**record, "budget": budget.record}


def rounds_within(budget: Budget, before: Iterable[Event], declared: Mapping[str, Any]) -> int:
    """Return how many of the declared rounds of a run a budget allows.

    Args:
        budget: The budget of the run, or that of all runs on its users.
        before: The events that were charged to the budget before the first round.
        declared: The rounds of the run, as `declaration` returns them.
    """
    plan = _Declared.read(declared)
    return plan.rounds_within(budget, before, most=plan.rounds)


def claim_after(
    facts: Mapping[str, Any], entries: Sequence[Entry], delta: float, rounds: int, *, new_noise: bool = False
) -> Claim:
    """Compute what a run may claim if it is continued, possibly beyond its declared rounds.

    Args:
        facts: The public facts in the header of the run's ledger, with a declaration.
        entries: Everything that was charged so far.
        delta: Between 0 and 1.
        rounds: The total number of rounds after the continuation.
        new_noise: Whether correlated noise begins a new mechanism (`unheard resume --new-noise`).
    """
    plan, past = _Declared.read(facts["declared"]), facts["start"]["charges"]
    done = entries[past:]
    reached = max((entry.round + 1 for entry in done), default=0)
    first = done[-1].event if done else plan.phases[0][1]
    events: Iterable[Event]
    if isinstance(first, CorrelatedGaussian):
        begun = first.index + 1 if done and not new_noise else 0
        events = (replace(first, index=begun + i) for i in range(rounds - reached))
    else:
        events = (plan.event(number) for number in range(reached, rounds))
    added = [Entry(event=event, round=reached + i, hash="") for i, event in enumerate(events)]
    return claim_of_run(facts, [*entries, *added], delta)


def claim_of_run(facts: Mapping[str, Any], items: Sequence[Entry | Event], delta: float) -> Claim:
    """Compute what a run may claim at delta.

    Args:
        facts: The public facts in the header of the run's ledger.
        items: Everything that was charged, in order: entries of the ledger, or events.
        delta: Between 0 and 1.

    Raises:
        LedgerError: The declaration in the header is malformed, or the number of earlier charges is missing.
    """
    charged = [item.event if isinstance(item, Entry) else item for item in items]
    declared = facts.get("declared")
    past = (facts.get("start") or {}).get("charges")
    # DP: without the number of earlier charges, the declared rounds cannot be told from the charges before them.
    if declared is not None and (type(past) is not int or not 0 <= past <= len(items)):
        raise LedgerError(
            "The ledger's first line declares rounds but does not say how many charges came before them. Put the right "
            "ledger back."
        )
    rounds = [item for item in items[past or 0 :] if isinstance(item, Entry)]
    is_known = isinstance(past, int) and len(rounds) == len(items) - past
    # DP: the earlier run may have been stopped, and this run planned, after looking at results, so no list of events
    # was fixed.
    if declared is not None and (facts.get("start") or {}).get("from") == EARLIER_RUN and has_rounds(charged):
        bound = odometer(*collapse(charged), delta)
        return Claim(epsilon=bound.epsilon, accountant=bound.accountant, basis=ADAPTIVE, events=charged, delta=delta)
    # The length was not chosen if no round was charged, or if one charge covers the whole run (a selection).
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
        # DP: the claim covers the blocks of all rounds up to the limit, not only those that have begun.
        begun = last.index + 1
        blocks = _blocks(last, begun + max(0, limit - reached)) - _blocks(last, begun)
        if not blocks and not level:
            return _claim(charged, delta, FIXED)
        return _claim([*charged, (replace(last, index=0), blocks)], delta, basis, level)
    # DP: the claim covers all rounds up to the limit, not only those that happened: the operator may have stopped after
    # looking at the model.
    events: list[Event | tuple[Event, int]] = [*before, *plan.events(limit)]
    # A round is repeated because of a crash, not because of results. So the claim adds the repetitions that happened,
    # and need not allow for others.
    numbers: set[int] = set()
    for entry in rounds:
        if entry.round in numbers:
            events.append(entry.event)
        numbers.add(entry.round)
    return _claim(events, delta, basis, level)


def _blocks(event: CorrelatedGaussian, rounds: int) -> int:
    """Return the number of charges for the first `rounds` rounds with correlated noise: one per block."""
    return -(-rounds // event.block)


def _claim(
    events: Sequence[Event | tuple[Event, int]],
    delta: float,
    basis: str,
    level: int = 0,
    among: tuple[str, ...] = CLAIMED,
) -> Claim:
    """Return the claim for a list of events: their smallest epsilon at `delta` / 2^`level`."""
    # DP: each level has its own delta, and the deltas of all levels add up to at most twice the first.
    share = delta / 2**level
    bound = best_epsilon(events, share, among)
    name = bound.accountant if basis in (FIXED, UNKNOWN) else f"{bound.accountant} of the {basis}"
    return Claim(
        epsilon=bound.epsilon, accountant=name, basis=basis, events=events, delta=share, level=level, among=among
    )


@dataclass(frozen=True, kw_only=True)
class _Declared:
    """The declaration of a run: the checked content of `declared` in the header of its ledger."""

    rounds: int
    phases: tuple[tuple[int, Event], ...]
    budget: Budget | None

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> "_Declared":
        """Read the record that `declaration` wrote. Raises `LedgerError` if it is malformed."""
        try:
            phases = tuple((int(phase["from_round"]), from_record(phase["event"])) for phase in record["phases"])
            budget = record.get("budget")
            firsts = [first for first, _ in phases]
            if firsts[0] != 0 or firsts != sorted(firsts) or int(record["rounds"]) < 1:
                raise ValueError
            return cls(rounds=int(record["rounds"]), phases=phases, budget=None if budget is None else Budget(**budget))
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, InvalidValue):
            raise LedgerError(
                "The ledger's first line declares rounds in a form that this version does not know. Put back an intact copy, "
                "or use the version that wrote it."
            ) from None

    def events(self, rounds: int) -> list[tuple[Event, int]]:
        """Return the events of the first `rounds` rounds of the plan, with their counts."""
        first_event = self.phases[0][1]
        if isinstance(first_event, CorrelatedGaussian):  # a run with correlated noise has no schedule
            return [(first_event, _blocks(first_event, rounds))]
        ends = [first for first, _ in self.phases[1:]] + [rounds]
        counts = [(event, min(end, rounds) - first) for (first, event), end in zip(self.phases, ends, strict=True)]
        return [(event, count) for event, count in counts if count > 0]

    def event(self, number: int) -> Event:
        """Return the event of round `number` of the plan, counted from 0."""
        return next(event for first, event in reversed(self.phases) if number >= first)

    def limit(self, before: Sequence[Event], reached: int) -> tuple[int, int]:
        """Return the number of rounds that the claim must cover, and the level.

        The level is 0 for a run within its declared rounds or with a declared budget, and k for a run without a budget
        that has up to 2^k times its declared rounds.

        Args:
            before: The events that were charged before the first round, for example for the vocabulary.
            reached: The number of rounds that the run has reached.
        """
        allowed = None if self.budget is None else self.rounds_within(self.budget, before)
        if reached <= self.rounds:
            return (self.rounds if allowed is None else min(self.rounds, allowed)), 0
        if allowed is not None:
            return allowed, 0
        level = math.ceil(math.log2(reached / self.rounds))
        return self.rounds * 2**level, level

    def rounds_within(self, budget: Budget, before: Iterable[Event], most: int = 1 << 40) -> int:
        """Return how many rounds of the plan, at most `most`, a budget allows. It depends on public numbers alone."""
        spent = budget.running(before)

        def fits(rounds: int) -> bool:
            """Whether this number of rounds stays within the budget."""
            running = copy.copy(spent)
            for event, count in self.events(rounds):
                running.charge(event, count)
            return running.epsilon <= budget.epsilon

        if fits(most):
            return most
        low, high = 0, 1
        while fits(high):
            low, high = high, min(2 * high, most)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low


def odometer(counts: Counts, failure: float, delta: float, *, of_two: bool = False) -> Bound:
    """Bound the epsilon of events that were chosen adaptively: each event may depend on all earlier results.

    An odometer is a sequence of privacy filters with growing budgets at each order. The bound is that of the smallest
    filter that still covers the events.

    Args:
        counts: Counted events, from `collapse`.
        failure: The sum of the failure probabilities, which must not depend on results.
        delta: The delta of all filters together.
        of_two: Whether the bound is for two users, which covers the case that one user is replaced by another.

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
        # DP: one filter for each order and level; their deltas add up to `rest`, since sum 1/k^2 = pi^2/6.
        share = rest * 6 / (math.pi**2 * (level + 1) ** 2 * len(FILTER_ORDERS))
        best = min(best, (_epsilon_of_two if of_two else epsilon_at_order)(order, budget, share))
    return Bound(epsilon=best, accountant=name)


def _epsilon_of_two(order: float, divergence: float, delta: float) -> float:
    """Bound epsilon for a group of two users, from the divergence at one order.

    A guarantee of (epsilon, d) for one user is a guarantee of (2 epsilon, (1 + e^epsilon) d) for two (group privacy).
    The function searches for the largest d whose delta for two users is at most `delta`.
    """
    if order <= 2:  # at such an order a smaller d does not make (1 + e^epsilon) d smaller
        return math.inf

    def is_too_large(share: float) -> bool:
        """Whether the delta for two users is above `delta` if the delta for one user is `share`."""
        epsilon = epsilon_at_order(order, divergence, share)
        # DP: the delta of two users must not be above the delta of the filter.
        return epsilon > 600 or (1 + math.exp(epsilon)) * share > delta

    share = _smallest(is_too_large) / 1.001
    return math.inf if is_too_large(share) else 2 * epsilon_at_order(order, divergence, share)


def _smallest(holds: Callable[[float], bool]) -> float:
    """Return the smallest delta at and above which a property holds, to three digits; 1 if it holds nowhere below 1."""
    low, high = math.log(SMALLEST_DELTA), 0.0
    for _ in range(24):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(math.exp(middle)) else (middle, high)
    return math.exp(high)


def default_delta(population: int) -> float:
    """Return the paper's delta: population^-1.1."""
    return population**-1.1


def delta_caution(delta: float) -> str | None:
    """Return a warning if delta is allowed but so large that the guarantee means little; None otherwise.

    The default delta, users^-1.1, is that large for populations below 66 users.
    """
    if delta <= LARGE_DELTA:
        return None
    return (
        f"delta = {delta:.3g} is large: with that probability, more than once in a hundred, epsilon need not hold. Only a "
        "population below 100 users allows it. Give a smaller one ([privacy] delta in a run file, --delta of `unheard plan`), "
        "which costs more epsilon, or learn from more users."
    )
