"""An epsilon for a run that did not happen: the same rounds, clip and noise, drawn from more users. Always called hypothetical.

In: a record, a number of users, users a round. Out: the bound that such a run would have. Paper, section 3, "Estimating the
accuracy of private models for large datasets": train with 100 users a round at some sigma, and account for 5,000.
"""

from collections import Counter
from dataclasses import dataclass

from unheard.errors import InvalidValue
from unheard.formatting import epsilon_text, small
from unheard.privacy.accountants import best_epsilon
from unheard.privacy.events import PoissonGaussian
from unheard.privacy.planner import default_delta
from unheard.report.run_record import RunRecord


@dataclass(frozen=True, kw_only=True)
class Hypothetical:
    """What the run would have cost."""

    run: str
    users: int
    users_per_round: float
    epsilon: float
    delta: float
    accountant: str

    @property
    def words(self) -> str:
        """Never a bare number: which run it would have been stands beside it."""
        return (
            f"Hypothetical: the same rounds, clip and noise, with about {self.users_per_round:,.10g} users a round drawn from "
            f"{self.users:,}, would cost ε = {epsilon_text(self.epsilon)} at δ = {small(self.delta)}. That run did not happen."
        )

    @property
    def words_for_several(self) -> str:
        """The same above a column of several runs' figures."""
        return (
            f"Hypothetical: the same rounds, clip and noise of each run, with users drawn from {self.users:,}, at δ = "
            f"{small(self.delta)}. Those runs did not happen."
        )


def hypothetical_epsilon(record: RunRecord, users: int, users_per_round: float | None = None) -> Hypothetical | None:
    """None for a run without a finite epsilon, or with events that more users would not dilute."""
    per_round = users_per_round or record.users_per_round
    if not 0 < per_round <= users:
        raise InvalidValue(
            f"{per_round:g} users a round cannot be drawn from {users:g} users: name more users, or fewer."
        )
    events = Counter(entry.event for entry in record.entries)
    grown = per_round / record.users_per_round
    # Where S follows the users and the noise on their count was given, that noise is what it is, however many they are.
    count_noise_std = record.tables.get("clip", {}).get("count_noise_std")
    fixed = 0.0 if count_noise_std is None else (2 * count_noise_std) ** -2
    would_be = []
    for event, times in events.items():
        if not isinstance(event, PoissonGaussian):
            return None
        # sigma and S stay as they were and the denominator grows, so the noise is so many times more sensitivities
        z = ((event.noise_multiplier**-2 - fixed) / grown**2 + fixed) ** -0.5
        would_be.append((PoissonGaussian(sampling_prob=per_round / users, noise_multiplier=z), times))
    if not would_be:
        return None
    delta = default_delta(users)
    bound = best_epsilon(would_be, delta)
    return Hypothetical(
        run=record.name,
        users=users,
        users_per_round=per_round,
        epsilon=bound.epsilon,
        delta=delta,
        accountant=bound.accountant,
    )
