"""Who takes part in a round: the sampler that draws the cohort is the object that says what drawing it so is worth.

In: how many users the store has, and the declared population. Out: a cohort of user numbers; the round's privacy event.
Where in the paper: section 2, modification A, "select users independently with probability q".
"""

from dataclasses import dataclass

import numpy as np

from unheard.config import require, require_positive
from unheard.errors import InvalidValue, UnprovenCombination
from unheard.privacy.events import Event, NonPrivate, PoissonGaussian


@dataclass(frozen=True, kw_only=True)
class PoissonSampling:
    """Every user is in with probability q, independently, every round. Give q, or C = users_per_round (then q = C / population)."""

    users_per_round: float | None = None
    sampling_prob: float | None = None

    def __post_init__(self) -> None:
        given = [v for v in (self.users_per_round, self.sampling_prob) if v is not None]
        require(len(given) == 1, "give exactly one of users_per_round and sampling_prob.")
        require_positive(users_per_round=self.users_per_round)
        require(self.sampling_prob is None or 0 < self.sampling_prob <= 1, "sampling_prob must be in (0, 1].")

    def probability(self, population: int) -> float:
        """q, from declared numbers only."""
        if self.sampling_prob is not None:
            return self.sampling_prob
        assert self.users_per_round is not None
        if self.users_per_round > population:
            raise InvalidValue(
                f"users_per_round = {self.users_per_round:g} is more than the declared population of {population}. "
                "Lower it, or declare the population that you really have."
            )
        return self.users_per_round / population

    def draw(self, num_users: int, population: int, rng: np.random.Generator) -> np.ndarray:
        """The cohort, sorted. A binomial count and then a uniform subset is the same distribution as a coin for every user,
        and costs what the cohort costs, not what the population does."""
        # DP: q is the one that the event below charges for, and the number of users drawn is random, zero included.
        count = rng.binomial(num_users, self.probability(population))
        return np.sort(rng.choice(num_users, size=count, replace=False, shuffle=False))

    def event(self, population: int, noise_multiplier: float) -> Event:
        return PoissonGaussian(sampling_prob=self.probability(population), noise_multiplier=noise_multiplier)


@dataclass(frozen=True, kw_only=True)
class FixedSizeSampling:
    """Exactly C users a round, without replacement: the paper's non-private baseline."""

    users_per_round: int

    def __post_init__(self) -> None:
        require(1 <= self.users_per_round <= 2**40, "users_per_round must be at least 1, and at most 2^40.")

    def probability(self, population: int) -> float:
        return min(self.users_per_round / population, 1.0)

    def draw(self, num_users: int, population: int, rng: np.random.Generator) -> np.ndarray:
        if self.users_per_round > num_users:
            raise InvalidValue(
                f"users_per_round = {self.users_per_round} is more users than the corpus has. Lower it in [sampling]."
            )
        return np.sort(rng.choice(num_users, size=self.users_per_round, replace=False, shuffle=False))

    def event(self, population: int, noise_multiplier: float) -> Event:
        if noise_multiplier > 0:
            raise UnprovenCombination(
                "Fixed-size sampling with noise: the accountants here are for independent (Poisson) draws, and may not be used "
                "for it. Use [sampling] kind = 'poisson' for a private run, or [noise] kind = 'none' for a baseline."
            )
        return NonPrivate(reason="fixed-size sampling, no noise")


Sampling = PoissonSampling | FixedSizeSampling
