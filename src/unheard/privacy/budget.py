"""Epsilon while training, and the stop: a round that would cost more than the budget is refused before it starts.

In: one event per round. Out: the epsilon spent so far, and what one more round would make of it, in well under a
millisecond: an event's cost is worked out once and then added. Only accountants whose costs add up can do that.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from unheard.config import nearest, require
from unheard.errors import BudgetExceeded, InvalidValue
from unheard.privacy.events import Event, FailureProbability
from unheard.privacy.rdp import CURVES


class RunningEpsilon:
    """The epsilon at `delta` of the events charged so far, by "rdp" or "moments"."""

    def __init__(self, delta: float, accountant: str = "rdp", events: Iterable[Event] = ()) -> None:
        require(0 < delta < 1, f"delta must be between 0 and 1, not {delta}.")
        check_running(accountant)
        self.delta = delta
        self.accountant = accountant
        self._curve = CURVES[accountant]
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
        """What has been spent."""
        return self._epsilon(self._cost, self._failure) if self._count else 0.0

    def epsilon_after(self, event: Event) -> float:
        """What would be spent if this event were charged too. Charges nothing."""
        return self._epsilon(*self._with(event))

    def _with(self, event: Event) -> tuple[np.ndarray, float]:
        failure = event.delta if isinstance(event, FailureProbability) else 0.0
        return self._cost + self._curve.cost(event), self._failure + failure

    def _epsilon(self, cost: np.ndarray, failure: float) -> float:
        rest = self.delta - failure
        if not cost.any():
            return 0.0 if rest >= 0 else float("inf")
        return self._curve.epsilon(cost, rest) if rest > 0 else float("inf")


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The epsilon at delta that a run may spend, and the accountant that decides."""

    epsilon: float
    delta: float
    accountant: str = "rdp"

    def __post_init__(self) -> None:
        require(self.epsilon > 0, f"epsilon must be above 0, not {self.epsilon}.")
        require(0 < self.delta < 1, f"delta must be between 0 and 1, not {self.delta}.")
        check_running(self.accountant)

    def running(self, events: Iterable[Event] = ()) -> RunningEpsilon:
        """The running epsilon that this budget is checked against."""
        return RunningEpsilon(self.delta, self.accountant, events)

    def check(
        self, running: RunningEpsilon, event: Event, round: int, whose: str = "this run", larger: str = "in a new run"
    ) -> None:
        """Raise BudgetExceeded if charging `event` for `round` would spend more than the budget."""
        if (running.delta, running.accountant) != (self.delta, self.accountant):
            raise InvalidValue("The running epsilon must have the budget's own delta and accountant.")
        after = running.epsilon_after(event)
        # DP: asked before the round starts; a round that has been seen cannot be given back. NaN must not pass.
        if not after <= self.epsilon:
            cure = f"keep this model, or declare a larger budget {larger}."
            if running.epsilon == float("inf"):
                cure = "what is spent is infinite, and no budget can hold it. `unheard statement` names the reason."
            raise BudgetExceeded(
                f"Round {round} would bring epsilon to {after:.4f} at delta {self.delta:g} ({self.accountant}); "
                f"the budget of {whose} is {self.epsilon:g} and {running.epsilon:.4f} is spent. Training stops here: {cure}"
            )


def check_running(accountant: str) -> None:
    """Refuse accountants that cannot be asked before every round."""
    if accountant == "pld":
        raise InvalidValue(
            "'pld' takes seconds for every round: budget by 'rdp'. The statement still claims pld's bound."
        )
    if accountant not in CURVES:
        raise InvalidValue(f"Unknown accountant '{accountant}'.{nearest(str(accountant), CURVES)}")
