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
is declared, which makes it a privacy filter (`filters.py`; Feldman and Zrnic 2021).
"""

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from unheard.config import nearest, require
from unheard.errors import BudgetExceeded, InvalidValue
from unheard.privacy.accountants import ACCOUNTANTS, RUNNING_ACCOUNTANT, epsilon
from unheard.privacy.events import Counts, Event, ExampleGaussian, FailureProbability, accounted
from unheard.privacy.rdp import AdditiveCost, at_orders, filter_epsilon


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
        """Count the same event as spent so many times."""
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
        """Whether PLD must be asked. A filter never asks it: there is no proof of one for PLD."""
        return not self.orders and any(isinstance(event, ExampleGaussian) for event in times)

    def _with(self, event: Event, times: int = 1) -> tuple[np.ndarray, float]:
        charged = accounted(event)
        if charged is None:  # a round that the first round of its block has paid for
            return self._cost, self._failure
        event = charged
        failure = event.delta if isinstance(event, FailureProbability) else 0.0
        return self._cost + times * self._additive.cost(event), self._failure + times * failure

    def _epsilon(self, cost: np.ndarray, failure: float) -> float:
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
        epsilon: Above 0.
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
