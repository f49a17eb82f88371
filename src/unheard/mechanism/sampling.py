"""Samplers: which users take part in a round, and the privacy event of drawing them so.

Input: the number of users of the store, and the declared population. Output: a cohort of user numbers, and the round's
privacy event. In the paper: section 2, modification A, "select users independently with probability q".

    >>> sampler = PoissonSampling(users_per_round=100)
    >>> sampler.probability(population=10_000)
    0.01
    >>> sampler.event(population=10_000, noise_multiplier=1.0)
    PoissonGaussian(sampling_prob=0.01, noise_multiplier=1.0)

`ExampleSampling` draws examples, not users, with a guarantee for a user with all their examples (Charles et al. 2024).
A sampler without a proved event for its noise raises `UnprovenCombination` in `event`.

`CyclicPoissonSampling` and `MinSeparationSampling` are for correlated noise (`correlated.py`): each user belongs to one
of b groups, by one independent draw that stays fixed, and the groups take turns. Whose turn it is follows from the
number of the attempt in its mechanism (`Turn`), not from the round, so that a round done again is another group's.
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
    """What the plan and the round need of a sampler."""

    def probability(self, population: int) -> float:
        """q, the probability that a given user takes part in a round, from declared numbers only."""
        ...

    def draw(self, num_users: int, population: int, rng: np.random.Generator) -> np.ndarray:
        """The cohort: sorted user numbers, each below `num_users` and at most once.

        Args:
            num_users: How many users the store really has. Private: it may decide who is drawn, never q.
            population: The declared number of users.
            rng: The stream of the round.
        """
        ...

    def event(self, population: int, noise_multiplier: float) -> Event:
        """Return the event of one round: what it costs to draw a cohort so and to add noise with this multiplier.

        Args:
            population: K as declared.
            noise_multiplier: z of the round.

        Raises:
            UnprovenCombination: If there is no proof for that combination.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class PoissonSampling:
    """Every user takes part in every round with probability q, independently of all others.

    Args:
        users_per_round: C, the expected number of users; then q = C / population.
        sampling_prob: q itself, instead of `users_per_round`.

    Raises:
        InvalidValue: Unless exactly one of the two is given and in range.

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
        """The cohort, sorted.

        A binomial count and then a uniform subset has the same distribution as one coin per user, and its cost grows
        with the cohort instead of the population.
        """
        # DP: q is the one that the event below charges for, and the number of users drawn is random, zero included.
        count = rng.binomial(num_users, self.probability(population))
        return np.sort(rng.choice(num_users, size=count, replace=False, shuffle=False))

    def event(self, population: int, noise_multiplier: float) -> Event:
        """A subsampled Gaussian mechanism with the probability that `draw` uses."""
        return PoissonGaussian(sampling_prob=self.probability(population), noise_multiplier=noise_multiplier)


@dataclass(frozen=True, kw_only=True)
class FixedSizeSampling:
    """Exactly C users per round, without replacement: the paper's non-private baseline. A plan with noise refuses it.

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
        """The share of the population in each round."""
        return min(self.users_per_round / population, 1.0)

    def draw(self, num_users: int, population: int, rng: np.random.Generator) -> np.ndarray:
        """Draw a fixed number of distinct users; their numbers in increasing order."""
        if self.users_per_round > num_users:
            raise InvalidValue(
                f"users_per_round = {self.users_per_round} is more users than the corpus has. Lower it in [sampling]."
            )
        return np.sort(rng.choice(num_users, size=self.users_per_round, replace=False, shuffle=False))

    def event(self, population: int, noise_multiplier: float) -> Event:
        """`NonPrivate`: this sampler is for the baseline without noise."""
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
        examples_per_user: G. Lower values need less noise, and use less of the text of users who write much.
        examples_per_round: The expected number of examples of a round; then q = examples_per_round / total_examples.
        total_examples: How many examples all users have together, as you may say in public: at most population times G.
            Declared, never counted from the store.

    Raises:
        InvalidValue: For a number out of range, or more examples in a round than there are.

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
        """q of an example, from declared numbers only."""
        require(
            self.total_examples <= population * self.examples_per_user,
            f"{population} users with at most {self.examples_per_user} examples each have no {self.total_examples} examples. "
            "Lower total_examples.",
        )
        return self.examples_per_round / self.total_examples

    def draw(self, num_users: int, population: int, rng: np.random.Generator) -> np.ndarray:
        """Raise `InvalidValue`: examples are drawn by `draw_examples`."""
        raise InvalidValue("Examples are drawn from the lengths of users: use draw_examples.")

    def draw_examples(
        self, lengths_U: np.ndarray, unroll: int, population: int, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """The examples of a round: the number of the user and of the window in that user's text, for each.

        Args:
            lengths_U: The number of tokens of each user of the store. Private.
            unroll: Tokens of a window.
            population: The declared number of users.
            rng: The stream of the round.
        """
        windows_U = -(-np.maximum(np.asarray(lengths_U, dtype=np.int64) - 1, 0) // unroll)
        # DP: at most G examples of each user, whatever they wrote; the event below counts on it.
        last_U = np.cumsum(np.minimum(windows_U, self.examples_per_user))
        examples = int(last_U[-1]) if len(last_U) else 0
        # DP: q is the one that the event charges for, and the number of examples drawn is random, zero included.
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
    """Whose turn it is in an attempt of a run with correlated noise.

    Args:
        index: The number of the attempt in its mechanism, from 0. Attempts that a crash made void count too.
        groups_key: The key of the users' groups, fixed for the mechanism.
    """

    index: int
    groups_key: bytes = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class CyclicPoissonSampling:
    """Groups of users take turns; each user of the group whose turn it is takes part with probability b C / population.

    For `[noise] kind = "correlated"`. Each user is put into one of b groups by a draw of their own, which stays fixed.
    Group (attempt mod b) is sampled, so two rounds of one user are at least b attempts apart.

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
        """q = C / population: averaged over the groups, from declared numbers only."""
        self.turn_probability(population)
        return self.users_per_round / population

    def turn_probability(self, population: int) -> float:
        """q' = b C / population, the probability of drawing a user whose group has its turn."""
        q = self.groups * self.users_per_round / population
        if q > 1:
            raise InvalidValue(
                f"{self.groups} groups of {population} users have about {population / self.groups:.4g} users each, fewer than "
                f"users_per_round = {self.users_per_round:g}. Lower groups to at most population / users_per_round, or lower "
                "users_per_round."
            )
        return q

    def rounds_apart(self, population: int) -> int:
        """b: two rounds of one user are at least this many attempts apart."""
        return self.groups

    def draw(self, num_users: int, population: int, rng: np.random.Generator, turn: Turn | None = None) -> np.ndarray:
        """The cohort, sorted: each user of the group whose turn it is with probability q'."""
        members_U = _members(num_users, self.groups, _needed(turn))
        # DP: q' is the one that the event charges for, and the number of users drawn is random, zero included.
        count = rng.binomial(len(members_U), self.turn_probability(population))
        return np.sort(rng.choice(members_U, size=count, replace=False, shuffle=False))

    def event(self, population: int, noise_multiplier: float) -> Event:
        """Raise `UnprovenCombination`: this sampler is proved for correlated noise only."""
        raise UnprovenCombination(_GOES_WITH_CORRELATED)


@dataclass(frozen=True, kw_only=True)
class MinSeparationSampling:
    """Each user takes part in every b-th attempt, from a first one that is drawn for each user alone.

    For `[noise] kind = "correlated"`. The guarantee does not rest on the draw: it holds for all users who take part at
    most once in any b consecutive attempts, whoever they are. Adding one user moves nobody else.

    Args:
        users_per_round: C; then b = population / C, rounded down, and population / b users are expected per round.
        separation: b itself, instead of `users_per_round`.

    Raises:
        InvalidValue: Unless exactly one of the two is given and in range.

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
        """q = 1 / b, averaged over the attempts, from declared numbers only."""
        return 1 / self.rounds_apart(population)

    def turn_probability(self, population: int) -> float:
        """1: nothing is gained from sampling."""
        return 1.0

    def rounds_apart(self, population: int) -> int:
        """b: two rounds of one user are exactly this many attempts apart."""
        if self.separation is not None:
            return self.separation
        assert self.users_per_round is not None
        if self.users_per_round > population:
            raise InvalidValue(
                f"users_per_round = {self.users_per_round:g} is more than the declared population of {population}. "
                "Lower it, or declare the population that you really have."
            )
        return max(1, int(population / self.users_per_round + 1e-9))

    def draw(self, num_users: int, population: int, rng: np.random.Generator, turn: Turn | None = None) -> np.ndarray:
        """The cohort, sorted: all users whose turn it is."""
        return _members(num_users, self.rounds_apart(population), _needed(turn))

    def event(self, population: int, noise_multiplier: float) -> Event:
        """Raise `UnprovenCombination`: this sampler is proved for correlated noise only."""
        raise UnprovenCombination(_GOES_WITH_CORRELATED)


_GOES_WITH_CORRELATED = (
    "[sampling] kind = 'cyclic_poisson' and 'min_separation' are for [noise] kind = 'correlated', whose proof needs them; with "
    "independent noise use [sampling] kind = 'poisson'."
)

GroupedSampling = CyclicPoissonSampling | MinSeparationSampling
"""Samplers in which two rounds of one user are apart by a known number of attempts."""


def groups_of(num_users: int, groups: int, key: bytes) -> np.ndarray:
    """The group of each user, drawn for each user alone.

    The group of user k is the k-th number of a stream: it depends on the key and on k, and on no other user.

    Args:
        num_users: How many users the store has.
        groups: b, the number of groups.
        key: The key of the mechanism.
    """
    # DP: one number per user, in the users' order: a store with one user more gives all others the same groups.
    return (generator_from_key(key).random(num_users) * groups).astype(np.int64)


@functools.lru_cache(maxsize=8)
def _members_by_group(num_users: int, groups: int, key: bytes) -> list[np.ndarray]:
    """The users of each group, sorted. Computed once per mechanism."""
    group_U = groups_of(num_users, groups, key)
    order_U = np.argsort(group_U, kind="stable")
    return np.split(order_U, np.searchsorted(group_U[order_U], np.arange(1, groups)))


def _members(num_users: int, groups: int, turn: Turn) -> np.ndarray:
    # DP: the index of the attempt, which is never used twice: one user's rounds are b apart whatever was done again.
    return _members_by_group(num_users, groups, turn.groups_key)[turn.index % groups]


def _needed(turn: Turn | None) -> Turn:
    if turn is None:
        raise InvalidValue(_GOES_WITH_CORRELATED)
    return turn
