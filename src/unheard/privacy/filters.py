"""What may be claimed when a length or parameters were chosen after results were seen: filters and an odometer.

Composition bounds a list of events that was fixed beforehand. Whoever trains can stop early, train longer than planned
(`resume --rounds`), or begin a run with another z, each after looking at results. The list of events is then itself an
outcome. This module computes what is proved in each case; docs/privacy.md, section 8, has the proofs.

    claim_of_run(facts, entries, delta)     a run: its plan is declared in its ledger, and only the length may be chosen
    odometer(counts, failure, delta)        several runs: anything may be chosen; no budget is needed

- **Stopping time.** A run that was stopped early reveals a function of the run that its declaration allows (all declared
  rounds, or as many as its declared budget allows). It claims the cost of that run.
- **Longer than declared.** Without a budget, a run of up to 2^k times the declared rounds claims the cost of that many
  rounds, at delta / 2^k.
- **Parameters.** Over several runs, a budget that was declared before the first round is an RDP filter at fixed orders
  (Feldman and Zrnic 2021), and the claim is the budget. Without one, the claim is that of an odometer: filters of growing
  budgets at the same orders, which share delta (Rogers et al. 2016; Lécuyer 2021; Whitehouse et al. 2023).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from unheard.errors import InvalidValue, LedgerError
from unheard.privacy.accountants import Bound, best_epsilon
from unheard.privacy.budget import Budget
from unheard.privacy.events import (
    CorrelatedGaussian,
    Counts,
    Event,
    ExampleGaussian,
    NonPrivate,
    PoissonGaussian,
    from_record,
)
from unheard.privacy.ledger import Entry
from unheard.privacy.rdp import FILTER_ORDERS, RDP_COST, at_orders, epsilon_at_order

FIXED, DECLARED, DOUBLED, UNKNOWN = "fixed beforehand", "declared rounds", "doubled rounds", "not recorded"

WHY = {
    FIXED: "every event was declared before the run began: composition of what was charged",
    DECLARED: "the length may have been chosen after a look at results: the claim is the cost of all rounds that were "
    "declared, or that the declared budget allows",
    DOUBLED: "the run was made longer than it was declared, perhaps after a look at results: the claim is the cost of the "
    "next doubling of the declared rounds, at a smaller delta",
    UNKNOWN: "the ledger, of an older version, does not say how many rounds were declared: the claim holds if the length "
    "was not chosen after a look at results",
}

ODOMETER_FIRST, ODOMETER_STEP = 0.02, 1.25
"""The budgets of the odometer's filters: ODOMETER_FIRST * ODOMETER_STEP^k for k = 0, 1, ..., at each order."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What a run may claim.

    Attributes:
        epsilon: The bound.
        accountant: How it was computed, in words if it is not the composition of what was charged.
        basis: One of `WHY`.
        events: The events whose cost is claimed. They include those that were charged.
        delta: The delta at which their cost is taken: that of the statement, or a part of it.
    """

    epsilon: float
    accountant: str
    basis: str
    events: Sequence[Event | tuple[Event, int]]
    delta: float


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
    rounds = [item for item in items[past or 0 :] if isinstance(item, Entry)]
    is_known = isinstance(past, int) and len(rounds) == len(items) - past
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
        return _claim([*charged, (replace(last, index=0), blocks)], delta / 2**level, basis)
    # DP: all rounds up to the limit, not only those that were done: whoever stopped may have looked at the model.
    events: list[Event | tuple[Event, int]] = [*before, *plan.events(limit)]
    # Rounds that were done again follow a crash, not a look at results.
    numbers: set[int] = set()
    for entry in rounds:
        if entry.round in numbers:
            events.append(entry.event)
        numbers.add(entry.round)
    # DP: each level has a delta of its own, and their sum is at most twice the first.
    return _claim(events, delta / 2**level, basis)


def _blocks(event: CorrelatedGaussian, rounds: int) -> int:
    """How many charges cover the first `rounds` rounds of a mechanism with correlated noise."""
    return -(-rounds // event.block)


def _claim(events: Sequence[Event | tuple[Event, int]], delta: float, basis: str) -> Claim:
    bound = best_epsilon(events, delta)
    name = bound.accountant if basis in (FIXED, UNKNOWN) else f"{bound.accountant} of the {basis}"
    return Claim(epsilon=bound.epsilon, accountant=name, basis=basis, events=events, delta=delta)


@dataclass(frozen=True, kw_only=True)
class _Declared:
    """The fact `declared` of a header, checked."""

    rounds: int
    phases: tuple[tuple[int, Event], ...]
    budget: Budget | None

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> "_Declared":
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
        """How many rounds are allowed, and the level: 0 within the declaration, k for up to 2^k times as many."""
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


def odometer(counts: Counts, failure: float, delta: float) -> Bound:
    """The epsilon of events that were chosen in any way, each after a look at all results before it.

    Args:
        counts: Counted events, from `collapse`.
        failure: The sum of the failure probabilities.
        delta: The delta of all filters together.
    """
    name = "an RDP odometer"
    rest = delta - failure
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
        best = min(best, epsilon_at_order(order, budget, share))
    return Bound(epsilon=best, accountant=name)
