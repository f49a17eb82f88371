"""Samplers: draw the users of a round, and give the privacy event of this draw.

Input: the number of users of the store, and the declared population. Output: a cohort of user numbers, and the round's
privacy event. In the paper: section 2, modification A, "select users independently with probability q".

    >>> sampler = PoissonSampling(users_per_round=100)
    >>> sampler.probability(population=10_000)
    0.01
    >>> sampler.event(population=10_000, noise_multiplier=1.0)
    PoissonGaussian(sampling_prob=0.01, noise_multiplier=1.0)

`ExampleSampling` draws examples, not users; the guarantee is for a user with all their examples (Charles et al. 2024).
`event` raises `UnprovenCombination` if no proof covers the sampler with this noise.

`CyclicPoissonSampling` and `MinSeparationSampling` are for correlated noise (`correlated.py`). Each user is assigned to
one of b groups by an independent draw that stays fixed, and the groups take turns. The group of an attempt depends on
the number of the attempt in its mechanism (`Turn`), not on the round, so a round that is repeated uses another group.
"""

import functools
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from unheard.config import require, require_positive
from unheard.errors import InvalidValue, UnprovenCombination
from unheard.privacy.events import Event, ExampleGaussian, NonPrivate, PoissonGaussian
from unheard.randomness import generator_from_key


class Sampling(Protocol):
    """The interface of a sampler, which the plan and the round use."""

    def probability(self, population: int) -> float:
        """Return q, the probability that a given user takes part in a round. It depends on declared numbers only."""
        ...

    def draw(self, num_users: int, population: int, rng: np.random.Generator) -> np.ndarray:
        """Draw a cohort: sorted user numbers, each below `num_users` and at most once. Private.

        Args:
            num_users: The real number of users in the store. Private: q must not depend on it.
            population: The declared number of users.
            rng: The stream of the round.
        """
        ...

    def event(self, population: int, noise_multiplier: float) -> Event:
        """Return the privacy event of a round that draws its cohort with this sampler and adds noise.

        Args:
            population: The declared number of users.
            noise_multiplier: z of the round.

        Raises:
            UnprovenCombination: No proof covers this sampler with noise of this kind.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class PoissonSampling:
    """Every user takes part in every round with probability q, independently of all others.

    Args:
        users_per_round: C, the expected number of users; then q = C / population.
        sampling_prob: q itself, instead of `users_per_round`.

    Raises:
        InvalidValue: Both or none of the two are given, or a value is out of range.

    Example:
        >>> PoissonSampling(users_per_round=5000).probability(population=1_000_000)
        0.005
    """

    users_per_round: float | None = None
    sampling_prob: float | None = None

    def __post_init__(self) -> None:
        given = [v for v in (self.users_per_round, self.sampling_prob) if v is not None]
        require(len(given) == 1, "give exactly one of users_per_round and sampling_prob.")
        require_positive(users_per_round=self.users_per_round)
        require(self.sampling_prob is None or 0 < self.sampling_prob <= 1, "sampling_prob must be in (0, 1].")

    def probability(self, population: int) -> float:
        """Return q. It depends on declared numbers only."""
        if self.sampling_prob is not None:
            return self.sampling_prob
        return _checked(self.users_per_round, population) / population

    def draw(self, num_users: int, population: int, rng: np.random.Generator) -> np.ndarray:
        """Draw a cohort, sorted.

        First a binomial number of users is drawn, then a uniform subset of this size. This has the same distribution as
        one coin per user, and takes time proportional to the cohort instead of the population.
        """
        # DP: this is the q that the event charges for, and the number of users drawn is random and may be 0.
        count = rng.binomial(num_users, self.probability(population))
        return np.sort(rng.choice(num_users, size=count, replace=False, shuffle=False))

    def event(self, population: int, noise_multiplier: float) -> Event:
        """Return the event of a subsampled Gaussian mechanism, with the same q as `draw`."""
        return PoissonGaussian(sampling_prob=self.probability(population), noise_multiplier=noise_multiplier)


def _checked(users_per_round: float | None, population: int) -> float:
    """Return `users_per_round`, which is not None here. Raise `InvalidValue` if the population has fewer users."""
    assert users_per_round is not None
    if users_per_round > population:
        raise InvalidValue(
            f"users_per_round = {users_per_round:g} is more than the declared population of {population}. "
            "Lower it, or declare the population that you really have."
        )
    return users_per_round


@dataclass(frozen=True, kw_only=True)
class FixedSizeSampling:
    """Exactly C users per round, without replacement, as in the paper's non-private baseline.

    It may not be used with noise: `event` then raises `UnprovenCombination`.

    Args:
        users_per_round: C, the number of users in every cohort.

    Example:
        >>> len(FixedSizeSampling(users_per_round=3).draw(num_users=10, population=10, rng=np.random.default_rng(0)))
        3
    """

    users_per_round: int

    def __post_init__(self) -> None:
        require(1 <= self.users_per_round <= 2**40, "users_per_round must be at least 1, and at most 2^40.")

    def probability(self, population: int) -> float:
        """Return the fraction of the declared population that is in each round, at most 1."""
        return min(self.users_per_round / population, 1.0)

    def draw(self, num_users: int, population: int, rng: np.random.Generator) -> np.ndarray:
        """Draw exactly C distinct users, and return their numbers in increasing order."""
        if self.users_per_round > num_users:
            raise InvalidValue(
                f"users_per_round = {self.users_per_round} is more users than the corpus has. Lower it in [sampling]."
            )
        return np.sort(rng.choice(num_users, size=self.users_per_round, replace=False, shuffle=False))

    def event(self, population: int, noise_multiplier: float) -> Event:
        """Return `NonPrivate` for a baseline without noise. Raises `UnprovenCombination` if there is noise."""
        if noise_multiplier > 0:
            raise UnprovenCombination(
                "Fixed-size sampling with noise: the accountants here are for independent (Poisson) draws, and may not be used "
                "for it. Use [sampling] kind = 'poisson' for a private run, or [noise] kind = 'none' for a baseline."
            )
        return NonPrivate(reason="fixed-size sampling, no noise")


@dataclass(frozen=True, kw_only=True)
class ExampleSampling:
    """Every example takes part in every round with probability q; a user has at most G examples.

    The guarantee is for a user with all their examples (Charles et al. 2024). An example is one window of
    `update.unroll` tokens, and adds one clipped gradient (`[update] kind = "fedsgd"`). Windows beyond a user's first G
    are never used.

    Args:
        examples_per_user: G. A smaller value needs less noise, but uses less of the text of users who write much.
        examples_per_round: The expected number of examples of a round; then q = examples_per_round / total_examples.
        total_examples: The declared number of examples of all users, at most population times G. It may be published,
            because it is declared and never counted from the store.

    Raises:
        InvalidValue: A number is out of range, or `examples_per_round` is above `total_examples`.

    Example:
        >>> sampling = ExampleSampling(examples_per_user=8, examples_per_round=1000, total_examples=500_000)
        >>> sampling.probability(population=100_000)
        0.002
    """

    examples_per_user: int
    examples_per_round: float
    total_examples: int

    def __post_init__(self) -> None:
        require(1 <= self.examples_per_user <= 4096, "examples_per_user must be at least 1, and at most 4096.")
        require_positive(examples_per_round=self.examples_per_round)
        require(1 <= self.total_examples <= 2**40, "total_examples must be at least 1, and at most 2^40.")
        require(
            self.examples_per_round <= self.total_examples,
            f"examples_per_round = {self.examples_per_round:g} is more than total_examples = {self.total_examples}.",
        )

    def probability(self, population: int) -> float:
        """Return q, the probability that a given example is drawn. It depends on declared numbers only."""
        require(
            self.total_examples <= population * self.examples_per_user,
            f"{population} users with at most {self.examples_per_user} examples each cannot have {self.total_examples} examples. "
            "Lower total_examples.",
        )
        return self.examples_per_round / self.total_examples

    def draw(self, num_users: int, population: int, rng: np.random.Generator) -> np.ndarray:
        """Raise `InvalidValue`: this sampler draws examples, with `draw_examples`."""
        raise InvalidValue("[sampling] kind = 'examples' draws examples, not users: use draw_examples.")

    def draw_examples(
        self, lengths_U: np.ndarray, unroll: int, population: int, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draw the examples of a round. Private.

        Args:
            lengths_U: The number of tokens of each user of the store. Private.
            unroll: The number of tokens in a window.
            population: The declared number of users.
            rng: The stream of the round.

        Returns:
            Two arrays with one number per example: the user, and the window in that user's text.
        """
        windows_U = -(-np.maximum(np.asarray(lengths_U, dtype=np.int64) - 1, 0) // unroll)
        # DP: at most G examples of each user, however much text they have; the event relies on it.
        last_U = np.cumsum(np.minimum(windows_U, self.examples_per_user))
        examples = int(last_U[-1]) if len(last_U) else 0
        # DP: this is the q that the event charges for, and the number of examples drawn is random and may be 0.
        count = rng.binomial(examples, self.probability(population))
        drawn_E = np.sort(rng.choice(examples, size=count, replace=False, shuffle=False))
        user_E = np.searchsorted(last_U, drawn_E, side="right")
        first_U = np.concatenate([[0], last_U[:-1]]) if len(last_U) else last_U
        return user_E, drawn_E - first_U[user_E]

    def event(self, population: int, noise_multiplier: float) -> Event:
        """Return the event of one round: the cost for a user with up to G examples.

        Args:
            population: The declared number of users.
            noise_multiplier: z, in units of the bound of one example.
        """
        return ExampleGaussian(
            sampling_prob=self.probability(population),
            examples_per_user=self.examples_per_user,
            noise_multiplier=noise_multiplier,
        )


@dataclass(frozen=True, kw_only=True)
class Turn:
    """The data that decide which group of users has its turn in an attempt of a run with correlated noise.

    Args:
        index: The number of the attempt in its mechanism, from 0. Attempts that were lost in a crash count too.
        groups_key: The key from which the users' groups are drawn, fixed for the mechanism. Private.
    """

    index: int
    groups_key: bytes = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class CyclicPoissonSampling:
    """Groups of users take turns; each user of the group whose turn it is takes part with probability b C / population.

    For `[noise] kind = "correlated"`. Each user is assigned to one of b groups by an independent draw that stays fixed.
    An attempt samples the group (attempt mod b), so two rounds of one user are at least b attempts apart.

    Args:
        users_per_round: C, the expected number of users.
        groups: b, at most population / users_per_round.

    Raises:
        InvalidValue: A value is out of range.

    Example:
        >>> CyclicPoissonSampling(users_per_round=100, groups=20).probability(population=10_000)
        0.01
    """

    users_per_round: float
    groups: int

    def __post_init__(self) -> None:
        require_positive(users_per_round=self.users_per_round)
        require(1 <= self.groups <= 2**20, "groups must be at least 1, and at most 2^20.")

    def probability(self, population: int) -> float:
        """Return q = C / population, the probability averaged over the groups. It depends on declared numbers only."""
        self.turn_probability(population)
        return self.users_per_round / population

    def turn_probability(self, population: int) -> float:
        """Return q' = b C / population, the probability of drawing a user whose group has its turn.

        Raises:
            InvalidValue: q' would be above 1.
        """
        q = self.groups * self.users_per_round / population
        if q > 1:
            raise InvalidValue(
                f"{self.groups} groups of {population} users have about {population / self.groups:.4g} users each, fewer than "
                f"users_per_round = {self.users_per_round:g}. Lower groups to at most population / users_per_round, or lower "
                "users_per_round."
            )
        return q

    def rounds_apart(self, population: int) -> int:
        """Return b. Two rounds of one user are at least b attempts apart."""
        return self.groups

    def draw(self, num_users: int, population: int, rng: np.random.Generator, turn: Turn | None = None) -> np.ndarray:
        """Draw a cohort, sorted: each user of the group whose turn it is takes part with probability q'."""
        members_U = _members(num_users, self.groups, _needed(turn))
        # DP: this is the q' that the event charges for, and the number of users drawn is random and may be 0.
        count = rng.binomial(len(members_U), self.turn_probability(population))
        return np.sort(rng.choice(members_U, size=count, replace=False, shuffle=False))

    def event(self, population: int, noise_multiplier: float) -> Event:
        """Raise `UnprovenCombination`: this sampler is proved for correlated noise only."""
        raise UnprovenCombination(_GOES_WITH_CORRELATED)


@dataclass(frozen=True, kw_only=True)
class MinSeparationSampling:
    """Each user takes part in every b-th attempt. The first attempt of each user is drawn independently.

    For `[noise] kind = "correlated"`. The guarantee does not depend on this draw: it holds for every user who takes
    part at most once in any b consecutive attempts. Adding one user does not change the attempts of the other users.

    Args:
        users_per_round: C; then b = population / C, rounded down, and population / b users are expected per round.
        separation: b itself, instead of `users_per_round`.

    Raises:
        InvalidValue: Both or none of the two are given, or a value is out of range.

    Example:
        >>> MinSeparationSampling(users_per_round=100).probability(population=10_000)
        0.01
    """

    users_per_round: float | None = None
    separation: int | None = None

    def __post_init__(self) -> None:
        given = [v for v in (self.users_per_round, self.separation) if v is not None]
        require(len(given) == 1, "give exactly one of users_per_round and separation.")
        require_positive(users_per_round=self.users_per_round)
        require(self.separation is None or self.separation >= 1, "separation must be at least 1.")

    def probability(self, population: int) -> float:
        """Return q = 1 / b, the fraction of attempts in which a user takes part. Depends on declared numbers only."""
        return 1 / self.rounds_apart(population)

    def turn_probability(self, population: int) -> float:
        """Return 1: every user whose turn it is takes part, so there is no amplification by sampling."""
        return 1.0

    def rounds_apart(self, population: int) -> int:
        """Return b. Two consecutive rounds of one user are exactly b attempts apart."""
        if self.separation is not None:
            return self.separation
        return max(1, int(population / _checked(self.users_per_round, population) + 1e-9))

    def draw(self, num_users: int, population: int, rng: np.random.Generator, turn: Turn | None = None) -> np.ndarray:
        """Return the cohort, sorted: all users whose turn it is."""
        return _members(num_users, self.rounds_apart(population), _needed(turn))

    def event(self, population: int, noise_multiplier: float) -> Event:
        """Raise `UnprovenCombination`: this sampler is proved for correlated noise only."""
        raise UnprovenCombination(_GOES_WITH_CORRELATED)


_GOES_WITH_CORRELATED = (
    "[sampling] kind = 'cyclic_poisson' and 'min_separation' are for [noise] kind = 'correlated', whose proof needs them; with "
    "independent noise use [sampling] kind = 'poisson'."
)

GroupedSampling = CyclicPoissonSampling | MinSeparationSampling
"""The samplers that keep any two rounds of one user at least a known number of attempts apart."""


def groups_of(num_users: int, groups: int, key: bytes) -> np.ndarray:
    """Draw the group of each user, independently of all other users.

    The group of user k is computed from the k-th number of a stream, so it depends only on the key and on k.

    Args:
        num_users: The number of users in the store.
        groups: b, the number of groups.
        key: The key of the mechanism (`Turn.groups_key`).

    Returns:
        The group of each user, from 0 to b - 1.
    """
    # DP: one number per user, in the users' order: a store with one user more gives all others the same groups.
    return (generator_from_key(key).random(num_users) * groups).astype(np.int64)


@functools.lru_cache(maxsize=8)
def _members_by_group(num_users: int, groups: int, key: bytes) -> list[np.ndarray]:
    """Return the users of each group, sorted. Cached, since the groups do not change during a mechanism."""
    group_U = groups_of(num_users, groups, key)
    order_U = np.argsort(group_U, kind="stable")
    return np.split(order_U, np.searchsorted(group_U[order_U], np.arange(1, groups)))


def _members(num_users: int, groups: int, turn: Turn) -> np.ndarray:
    """Return the users of the group whose turn it is, sorted."""
    # DP: the index of an attempt is never used twice, so the rounds of one user are b apart even if rounds are
    # repeated.
    return _members_by_group(num_users, groups, turn.groups_key)[turn.index % groups]


def _needed(turn: Turn | None) -> Turn:
    """Return the turn. Raises `InvalidValue` if it is None, because the run has no correlated noise."""
    if turn is None:
        raise InvalidValue(_GOES_WITH_CORRELATED)
    return turn
