"""Epsilon while training, and the stop: a round that would cost more than the budget is refused before it starts.

In: one event per round. Out: the epsilon spent so far and the epsilon after one more round, in well under a
millisecond, because the cost of an event is computed once and then added. Only an accountant with additive costs can do
that, so a budget is kept by `rdp` or `moments`; the statement of the run still claims the smaller of `pld` and `rdp`.

    budget = Budget(epsilon=4.0, delta=1e-9)
    running = budget.running()
    for number in range(rounds):
        budget.check(running, event, number)      # raises BudgetExceeded before the round starts
        ledger.charge(event, number)
        running.charge(event)

The events of a round do not depend on the data, so stopping when the budget is spent is plain composition with a
stopping rule that is public (paper: Theorem 1; for stopping rules in general, Rogers et al., "Privacy Odometers and
Filters", 2016).
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from unheard.config import nearest, require
from unheard.errors import BudgetExceeded, InvalidValue
from unheard.privacy.accountants import ACCOUNTANTS, RUNNING_ACCOUNTANT
from unheard.privacy.events import Event, FailureProbability
from unheard.privacy.rdp import AdditiveCost


class RunningEpsilon:
    """The epsilon at `delta` of the events charged so far.

    Args:
        delta: Between 0 and 1.
        accountant: An accountant with additive costs, "rdp" or "moments".
        events: Events that are charged already.

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

    def __init__(self, delta: float, accountant: str = RUNNING_ACCOUNTANT, events: Iterable[Event] = ()) -> None:
        require(0 < delta < 1, f"delta must be between 0 and 1, not {delta}.")
        self.delta = delta
        self.accountant = accountant
        self._additive = _additive_cost(accountant)
        self._cost = np.zeros(1)
        self._failure = 0.0
        self._count = 0
        for event in events:
            self.charge(event)

    def charge(self, event: Event) -> None:
        """Count one event as spent."""
        self._cost, self._failure = self._with(event)
        self._count += 1

    @property
    def epsilon(self) -> float:
        """The epsilon of all events charged so far."""
        return self._epsilon(self._cost, self._failure) if self._count else 0.0

    def epsilon_after(self, event: Event) -> float:
        """The epsilon if this event were charged too. Charges nothing."""
        return self._epsilon(*self._with(event))

    def _with(self, event: Event) -> tuple[np.ndarray, float]:
        failure = event.delta if isinstance(event, FailureProbability) else 0.0
        return self._cost + self._additive.cost(event), self._failure + failure

    def _epsilon(self, cost: np.ndarray, failure: float) -> float:
        rest = self.delta - failure
        if not cost.any():
            return 0.0 if rest >= 0 else float("inf")
        return self._additive.epsilon(cost, rest) if rest > 0 else float("inf")


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The epsilon at delta that a run, or all runs on a population, may spend.

    Args:
        epsilon: Above 0.
        delta: Between 0 and 1.
        accountant: The accountant that decides, one with additive costs: "rdp" or "moments".

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

    def __post_init__(self) -> None:
        require(self.epsilon > 0, f"epsilon must be above 0, not {self.epsilon}.")
        require(0 < self.delta < 1, f"delta must be between 0 and 1, not {self.delta}.")
        _additive_cost(self.accountant)

    def running(self, events: Iterable[Event] = ()) -> RunningEpsilon:
        """The running epsilon that this budget is checked against, with `events` charged already."""
        return RunningEpsilon(self.delta, self.accountant, events)

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
        if (running.delta, running.accountant) != (self.delta, self.accountant):
            raise InvalidValue("The running epsilon must have the budget's own delta and accountant.")
        after = running.epsilon_after(event)
        # DP: asked before the round starts; a round that has been seen cannot be given back. NaN must not pass.
        if not after <= self.epsilon:
            advice = f"keep this model, or declare a larger budget {larger}."
            if running.epsilon == float("inf"):
                advice = "what is spent is infinite, and no budget can hold it. `unheard statement` names the reason."
            raise BudgetExceeded(
                f"Round {round} would bring epsilon to {after:.4f} at delta {self.delta:g} ({self.accountant}); "
                f"the budget of {whose} is {self.epsilon:g} and {running.epsilon:.4f} is spent. Training stops here: {advice}"
            )


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
