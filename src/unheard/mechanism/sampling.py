"""Samplers: which users take part in a round, and the privacy event of drawing them so.

Input: the number of users of the store, and the declared population. Output: a cohort of user numbers, and the round's
privacy event. In the paper: section 2, modification A, "select users independently with probability q".

    >>> sampler = PoissonSampling(users_per_round=100)
    >>> sampler.probability(population=10_000)
    0.01
    >>> sampler.event(population=10_000, noise_multiplier=1.0)
    PoissonGaussian(sampling_prob=0.01, noise_multiplier=1.0)

A sampler without a proved event for its noise raises `UnprovenCombination` in `event`.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from unheard.config import require, require_positive
from unheard.errors import InvalidValue, UnprovenCombination
from unheard.privacy.events import Event, NonPrivate, PoissonGaussian


class Sampling(Protocol):
    """What the plan and the round need of a sampler."""

    def probability(self, population: int) -> float:
        """q, the probability that a given user takes part in a round, from declared numbers only."""
        ...

    def draw(self, num_users: int, population: int, rng: np.random.Generator) -> np.ndarray:
        """The cohort: sorted user numbers, each below `num_users` and at most once.

        Args:
            num_users: how many users the store really has. Private: it may decide who is drawn, never q.
            population: the declared number of users.
            rng: the stream of the round.
        """
        ...

    def event(self, population: int, noise_multiplier: float) -> Event:
        """What a round costs that draws its cohort so and adds noise with this multiplier.

        Raises:
            UnprovenCombination: if there is no proof for that combination.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class PoissonSampling:
    """Every user takes part in every round with probability q, independently of all others.

    Args:
        users_per_round: C, the expected number of users; then q = C / population.
        sampling_prob: q itself, instead of `users_per_round`.

    Raises:
        InvalidValue: unless exactly one of the two is given and in range.
    """

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
        """The cohort, sorted. A binomial count and then a uniform subset has the same distribution as one coin per
        user, and its cost grows with the cohort instead of the population."""
        # DP: q is the one that the event below charges for, and the number of users drawn is random, zero included.
        count = rng.binomial(num_users, self.probability(population))
        return np.sort(rng.choice(num_users, size=count, replace=False, shuffle=False))

    def event(self, population: int, noise_multiplier: float) -> Event:
        return PoissonGaussian(sampling_prob=self.probability(population), noise_multiplier=noise_multiplier)


@dataclass(frozen=True, kw_only=True)
class FixedSizeSampling:
    """Exactly C users per round, without replacement: the paper's non-private baseline. A plan with noise refuses it.

    Args:
        users_per_round: C.
    """

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
