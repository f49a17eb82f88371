"""The epsilon of a run that did not happen: the same rounds, clip and noise, with users drawn from a larger population.

Paper, section 3, "Estimating the accuracy of private models for large datasets": train with 100 users per round at some
sigma, and account for 5,000 users per round. The result is always labelled hypothetical.

    result = hypothetical_epsilon(RunRecord.read("runs/private"), users=1_000_000, users_per_round=5000)
    print(result.words)         # Hypothetical: the same rounds, clip and noise, ... That run did not happen.
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
    """The guarantee that a run would have with more users."""

    run: str
    """The run whose rounds, clip and noise are taken."""
    users: int
    """The population of the hypothetical run."""
    users_per_round: float
    epsilon: float
    delta: float
    accountant: str
    """The accountant of the smallest bound."""

    @property
    def words(self) -> str:
        """The epsilon in a sentence that describes the run it would belong to. Shown wherever the number is shown."""
        return (
            f"Hypothetical: the same rounds, clip and noise, with about {self.users_per_round:,.10g} users per round drawn from "
            f"{self.users:,}, would cost ε = {epsilon_text(self.epsilon)} by "
            f"{self.accountant.upper()} at δ = {small(self.delta)}. That run did not happen."
        )

    @property
    def words_for_several(self) -> str:
        """The same sentence for a row with the figures of several runs."""
        return (
            f"Hypothetical: the same rounds, clip and noise of each run, with users drawn from {self.users:,}, at δ = "
            f"{small(self.delta)}. Those runs did not happen."
        )


def hypothetical_epsilon(record: RunRecord, users: int, users_per_round: float | None = None) -> Hypothetical | None:
    """Compute the epsilon that a run would have if its users were drawn from a larger population.

    Args:
        record: The run.
        users: The population of the hypothetical run. Its delta is the default for that population.
        users_per_round: Expected users per round of the hypothetical run. By default those of the run.

    Returns:
        None for a run with an event other than Poisson sampling with Gaussian noise, to which the calculation does not
        apply.

    Raises:
        InvalidValue: More users per round than users.
    """
    per_round = users_per_round or record.users_per_round
    if not 0 < per_round <= users:
        raise InvalidValue(
            f"{per_round:g} users per round cannot be drawn from {users:g} users: name more users, or fewer."
        )
    events = Counter(entry.event for entry in record.entries)
    growth = per_round / record.users_per_round
    # With an adaptive clip the noise on the count of clipped updates may be a fixed number: it does not grow with the
    # users.
    count_noise_std = record.tables.get("clip", {}).get("count_noise_std")
    fixed = 0.0 if count_noise_std is None else (2 * count_noise_std) ** -2
    would_be = []
    for event, times in events.items():
        if not isinstance(event, PoissonGaussian):
            return None
        # sigma and S stay and the denominator grows, so the noise multiplier grows in proportion to the users per
        # round.
        z = ((event.noise_multiplier**-2 - fixed) / growth**2 + fixed) ** -0.5
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
