"""Compute what a run would cost before it is started, and find the parameters that meet a target epsilon.

    epsilon(users=..., users_per_round=..., noise_multiplier=..., rounds=...)    what would it cost? (`unheard.epsilon`)
    plan(users=..., users_per_round=..., rounds=..., epsilon=2.0)                how much noise? (`unheard.plan`)
    feasible_plans(population=..., epsilon=2.0)                                  what does a population allow?

Input: the declared population, users per round, z, rounds and delta. `plan` solves for the one of users per round, z and
rounds that is left out, and returns a `Solution` with the cheapest `CostEstimate` that meets the target. Every epsilon
here is *hypothetical*: it belongs to a run that has not happened. The module needs neither torch nor a corpus.
Paper: Table 1 and "Differential privacy for large datasets".

>>> paper = CostEstimate(population=763_430, users_per_round=5000, noise_multiplier=1.0, rounds=5000, delta=1e-9)
>>> round(paper.bound("moments").epsilon, 3)
4.634
>>> plan(users=763_430, users_per_round=5000, rounds=5000, delta=1e-9, epsilon=2.0, accountant="rdp").estimate
CostEstimate(population=763430, users_per_round=5000, noise_multiplier=1.585, rounds=5000, delta=1e-09)
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from unheard.config import require
from unheard.errors import AccountingError, InvalidValue
from unheard.privacy.accountants import (
    ACCOUNTANTS,
    CLAIMED,
    RUNNING_ACCOUNTANT,
    Bound,
    bound_by,
    epsilons,
    versions,
)
from unheard.privacy.accountants import epsilon as epsilon_of_events
from unheard.privacy.budget import default_delta
from unheard.privacy.events import ExampleGaussian, NoiseLevel, PoissonGaussian

MOST_ROUNDS = 10**7
MOST_NOISE, LEAST_NOISE = 1e6, 1e-2
PAPER_PARAMETERS, PAPER_CLIP_NORM = 1_346_144, 15.0
"""The number of parameters of the paper's model, and a clip norm S that the paper uses. They are the defaults for
judging the size of the noise when no model is given."""
FEASIBLE_COHORTS, FEASIBLE_ROUNDS = (100, 300, 1000, 3000, 10_000, 30_000, 100_000), (500, 2000)
UNKNOWNS = ("noise_multiplier", "users_per_round", "rounds")
Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class CostEstimate:
    """The parameters of a run that has not happened, and what the run would cost.

    Args:
        population: The number of users that the run would declare.
        users_per_round: The expected size of a cohort. A user is in a round with probability users_per_round /
            population.
        noise_multiplier: z, the standard deviation of the noise in units of the sensitivity.
        rounds: The number of rounds.
        delta: Above 0 and below 1 / population.

    Raises:
        InvalidValue: A value is out of range.
    """

    population: int
    users_per_round: float
    noise_multiplier: float
    rounds: int
    delta: float

    def __post_init__(self) -> None:
        require(self.population >= 1, f"users must be 1 or more, not {self.population}.")
        require(self.users_per_round > 0, f"users per round must be more than 0, not {self.users_per_round:g}.")
        require(
            self.users_per_round <= self.population,
            f"{self.users_per_round:g} users per round out of {self.population} users is not possible: "
            "lower the users per round, or declare more users.",
        )
        require(
            0 <= self.noise_multiplier < math.inf,
            f"the noise multiplier must be 0 or more, not {self.noise_multiplier}.",
        )
        require(self.rounds >= 1, f"rounds must be 1 or more, not {self.rounds}.")
        # DP: at delta = 1/users the guarantee would allow the release of one user's text in full.
        require(
            0 < self.delta < 1 / self.population,
            f"delta must be above 0 and below 1/users = {1 / self.population:.3g}, not {self.delta:g}: "
            f"leave it out to get users^-1.1 = {default_delta(self.population):.3g}.",
        )

    @property
    def event(self) -> PoissonGaussian:
        """The event of one round."""
        return PoissonGaussian(
            sampling_prob=self.users_per_round / self.population, noise_multiplier=self.noise_multiplier
        )

    @property
    def updates(self) -> float:
        """The expected number of user updates of the whole run."""
        return self.rounds * self.users_per_round

    def epsilons(self, rounds: int | None = None) -> dict[str, float]:
        """Compute the hypothetical epsilon by each accountant.

        Args:
            rounds: The number of rounds to count. None: all rounds of the run.
        """
        return epsilons([(self.event, rounds or self.rounds)], self.delta)

    def bound(self, accountant: str = "best") -> Bound:
        """Compute the hypothetical epsilon by one accountant; "best" is the smaller of pld and rdp."""
        return bound_by([(self.event, self.rounds)], self.delta, accountant)

    def meets(self, target: float, accountant: str = "best") -> bool:
        """Whether epsilon is at most the target. With "best", the fast accountants are tried first."""
        if accountant == "best":
            return any(self.meets(target, name) for name in sorted(CLAIMED, key=lambda name: not _is_quick(name)))
        return self.bound(accountant).epsilon <= target

    def noise_level(self, clip_norm: float, parameters: int) -> NoiseLevel:
        """Return how large the noise of one round is, compared with the updates.

        Args:
            clip_norm: S. With a fixed denominator sigma = z S / users per round.
            parameters: P, the number of parameters that are trained.
        """
        sigma = self.noise_multiplier * clip_norm / self.users_per_round
        return NoiseLevel(noise_std=sigma, clip_norm=clip_norm, parameters=parameters)

    def record(self) -> dict[str, Any]:
        """Return the parameters and the hypothetical epsilon by each accountant, as plain JSON values."""
        by_accountant = self.epsilons()
        claimed = min(CLAIMED, key=lambda name: by_accountant[name])
        return {
            "hypothetical": True,
            "users": self.population,
            "users_per_round": self.users_per_round,
            "sampling_prob": self.event.sampling_prob,
            "noise_multiplier": self.noise_multiplier,
            "rounds": self.rounds,
            "delta": self.delta,
            "epsilon": by_accountant,
            "claimed": {"epsilon": by_accountant[claimed], "accountant": claimed},
            "unit": "user",
            "adjacency": "add or remove one user",
            "versions": versions(),
        }


def epsilon(
    *,
    users: int,
    users_per_round: float,
    noise_multiplier: float,
    rounds: int,
    delta: float | None = None,
    accountant: str = "best",
) -> float:
    """Compute the epsilon that a run with Poisson sampling and Gaussian noise would have.

    The epsilon is hypothetical: no run and no corpus are needed. The example gives the epsilon of the paper (section 1)
    by the paper's accountant, and by a tighter one:

    >>> import unheard
    >>> paper = dict(users=763_430, users_per_round=5000, noise_multiplier=1.0, rounds=5000, delta=1e-9)
    >>> round(unheard.epsilon(**paper, accountant="moments"), 3)
    4.634
    >>> round(unheard.epsilon(**paper, accountant="rdp"), 3)
    4.183

    Args:
        users: The population: the declared number of users, which may be published.
        users_per_round: The expected number of users in a round. Each user is drawn with probability users_per_round /
            users.
        noise_multiplier: z, the standard deviation of the noise in units of the sensitivity.
        rounds: The number of rounds of training.
        delta: The delta of the guarantee, below 1 / users. None: users^-1.1, as in the paper.
        accountant: "moments" (the paper's), "rdp", "pld", or "best" for the smaller of pld and rdp.

    Returns:
        Epsilon at delta, for adding or removing one user with everything that the user wrote.

    Raises:
        InvalidValue: A value is out of its range.
    """
    estimate = CostEstimate(
        population=users,
        users_per_round=users_per_round,
        noise_multiplier=noise_multiplier,
        rounds=rounds,
        delta=default_delta(users) if delta is None else delta,
    )
    return estimate.bound(accountant).epsilon


@dataclass(frozen=True, kw_only=True)
class Solution:
    """The result of `plan`.

    Attributes:
        solved_for: The name of the parameter that was left out.
        target: The epsilon to meet.
        estimate: The cheapest run found that meets the target.
        bound: The epsilon of that run, and the name of the accountant that computed it.
        cheaper: The next cheaper run that was tried and does not meet the target; None if the search ended at the limit
            of what it tries.
    """

    solved_for: str
    target: float
    estimate: CostEstimate
    bound: Bound
    cheaper: CostEstimate | None

    def record(self, accountant: str) -> dict[str, Any]:
        """Return the name of the solved parameter, the target and the nearest value that misses it, for JSON.

        Args:
            accountant: The accountant that was passed to `plan`.
        """
        return {
            "solved_for": self.solved_for,
            "target": {"epsilon": self.target, "accountant": accountant},
            "not_enough": getattr(self.cheaper, self.solved_for, None),
        }


def plan(
    *,
    users: int,
    epsilon: float,
    users_per_round: float | None = None,
    noise_multiplier: float | None = None,
    rounds: int | None = None,
    delta: float | None = None,
    accountant: str = "best",
    progress: Progress = lambda _: None,
) -> Solution:
    """Find the parameter that meets a target epsilon: the smallest noise, the most users per round, or the most rounds.

    Leave out exactly one of `users_per_round`, `noise_multiplier` and `rounds`: it is solved for.

    >>> import unheard
    >>> solution = unheard.plan(users=100_000, users_per_round=1000, rounds=1000, epsilon=2.0, accountant="rdp")
    >>> solution.solved_for
    'noise_multiplier'
    >>> solution.bound.epsilon <= 2.0
    True

    Args:
        users: The population: the declared number of users, which may be published.
        epsilon: The target.
        users_per_round: The expected number of users in a round.
        noise_multiplier: z, the standard deviation of the noise in units of the sensitivity.
        rounds: The number of rounds of training.
        delta: The delta of the guarantee, below 1 / users. None: users^-1.1, as in the paper.
        accountant: The accountant whose bound must meet the target: "moments" (the paper's), "rdp", "pld", or "best" for
            the smaller of pld and rdp.
        progress: Called with a line of text before each trial, since pld takes seconds.

    Returns:
        The cheapest solution found, and its bound. The epsilon is hypothetical: no such run has happened.

    Raises:
        InvalidValue: Not exactly one value is left out, a value is out of its range, or no value meets the target.
        AccountingError: The solution could not be confirmed by the accountant.
    """
    given = {"noise_multiplier": noise_multiplier, "users_per_round": users_per_round, "rounds": rounds}
    missing = [name for name in UNKNOWNS if given[name] is None]
    require(
        len(missing) == 1,
        f"To meet an epsilon, leave out exactly one of {', '.join(UNKNOWNS)}: {len(missing)} are left out.",
    )
    require(0 < epsilon < math.inf, f"the target epsilon must be above 0, not {epsilon}.")
    unknown = missing[0]
    least, start, most, value_at = _scale(unknown, users)
    delta = default_delta(users) if delta is None else delta

    def at(n: int) -> CostEstimate:
        """Return the estimate with the n-th value of the unknown parameter; larger n cost more epsilon."""
        return CostEstimate(population=users, delta=delta, **{**given, unknown: value_at(n)})  # pyright: ignore

    @functools.cache
    def excess(n: int, by: str) -> float:
        """Return log(epsilon / target) with the n-th value; at most 0 if the target is met."""
        progress(f"trying {unknown} = {value_at(n):g}")
        return math.log(max(at(n).bound(by).epsilon, 1e-300) / epsilon)

    # The bound of the fast accountant is valid, so its solution also meets the target by the tighter, slower accountant.
    # The slow search starts from that solution.
    quick = accountant if _is_quick(accountant) else RUNNING_ACCOUNTANT
    low, high = least, most
    if accountant in ("best", quick) and excess(least, quick) <= 0:
        low, high = _largest(lambda n: excess(n, quick), start, least, most)
    elif excess(least, accountant) > 0:
        raise InvalidValue(
            f"Epsilon {epsilon:g} at delta {delta:.3g} is out of reach, even with {unknown} = {value_at(least):g}: "
            "allow a larger epsilon, or give other values."
        )
    if accountant != quick:
        tight = CLAIMED[0] if accountant == "best" else accountant
        if accountant != "best" or excess(low, tight) <= 0:
            low, high = _largest(lambda n: excess(n, tight), low, least, most)
    estimate = at(low)
    if not estimate.meets(epsilon, accountant):
        raise AccountingError(
            f"No {unknown} could be verified to meet epsilon {epsilon:g}: give one and drop --epsilon."
        )
    cheaper = at(high) if high is not None and not at(high).meets(epsilon, accountant) else None
    return Solution(
        solved_for=unknown, target=epsilon, estimate=estimate, bound=estimate.bound(accountant), cheaper=cheaper
    )


@dataclass(frozen=True, kw_only=True)
class FeasiblePlan:
    """One combination of users per round, z and rounds that meets a target epsilon.

    Attributes:
        estimate: Users per round, z and rounds.
        bound: The hypothetical epsilon that such a run would claim, and its accountant.
        noise: sigma, and its expected effect on training.
    """

    estimate: CostEstimate
    bound: Bound
    noise: NoiseLevel

    def record(self) -> dict[str, Any]:
        """Return the plan as plain JSON values."""
        return {
            "users": self.estimate.population,
            "users_per_round": self.estimate.users_per_round,
            "rounds": self.estimate.rounds,
            "noise_multiplier": self.estimate.noise_multiplier,
            "delta": self.estimate.delta,
            "claimed": {"epsilon": self.bound.epsilon, "accountant": self.bound.accountant},
            "noise": self.noise.record(),
        }


def feasible_plans(
    *,
    population: int,
    epsilon: float,
    delta: float | None = None,
    clip_norm: float = PAPER_CLIP_NORM,
    parameters: int = PAPER_PARAMETERS,
    progress: Progress = lambda _: None,
) -> list[FeasiblePlan]:
    """Find the smallest noise that meets the target, for several cohort sizes and numbers of rounds.

    RDP solves for z, because it is fast. The claimed epsilon, usually by PLD, is then slightly below the target.

    Args:
        population: The number of users that the run would declare.
        epsilon: The target.
        delta: The delta of the guarantee. None: `default_delta(population)`.
        clip_norm: S, which sigma is computed from.
        parameters: The number of parameters of the model.
        progress: Called with a line of text before each plan.

    Raises:
        InvalidValue: A value is out of range, or no combination meets the target.
        AccountingError: The accountant could confirm none of the plans.
    """
    cohorts = [n for n in FEASIBLE_COHORTS if n <= population / 2] or [max(1, population // 2)]
    plans, refusal = [], None
    for users_per_round in cohorts[-4:]:
        for rounds in FEASIBLE_ROUNDS:
            progress(f"{users_per_round:,} users per round, {rounds:,} rounds")
            try:
                estimate = plan(
                    users=population,
                    epsilon=epsilon,
                    users_per_round=users_per_round,
                    rounds=rounds,
                    delta=delta,
                    accountant=RUNNING_ACCOUNTANT,
                ).estimate
            except (AccountingError, InvalidValue) as error:  # skip a combination that cannot meet the target
                refusal = error
                continue
            noise = estimate.noise_level(clip_norm, parameters)
            plans.append(FeasiblePlan(estimate=estimate, bound=estimate.bound(), noise=noise))
    if not plans and refusal is not None:
        raise refusal
    return plans


@dataclass(frozen=True, kw_only=True)
class SamplingComparison:
    """The noise of sampling users and of sampling examples, at the same epsilon and about the same computation.

    Attributes:
        epsilon: The epsilon of both.
        examples_per_user: G, the largest number of examples of one user.
        examples_per_round: The expected number of examples in a round: users per round times G.
        users_noise: z if users are sampled, in units of the bound of one user.
        examples_noise: z if examples are sampled, in units of the bound of one example.
        users_std: The standard deviation of the noise in the average if users are sampled and the clip norm is 1:
            z / users per round.
        examples_std: The same if examples are sampled: z / examples per round.
    """

    epsilon: float
    examples_per_user: int
    examples_per_round: float
    users_noise: float
    examples_noise: float
    users_std: float
    examples_std: float


def compare_sampling(
    estimate: CostEstimate, examples_per_user: int, progress: Progress = lambda _: None
) -> SamplingComparison:
    """Compute the noise that a run that samples examples needs to reach the epsilon of a run that samples users.

    Both runs compute gradients of the same number of examples per round. Only pld has a bound for sampling of examples,
    so one trial takes seconds, or up to a minute for many examples per user.

    Args:
        estimate: The run that samples users.
        examples_per_user: G, the largest number of examples of one user.
        progress: Called with a line of text before each trial.

    Raises:
        InvalidValue: The run has no finite epsilon.
    """
    target = estimate.bound().epsilon
    require(math.isfinite(target) and target > 0, "a run without noise has no epsilon to compare at.")

    def is_enough(z: float) -> bool:
        """Whether sampling of examples meets the target with noise multiplier z."""
        progress(f"trying noise {z:.3g} for examples")
        event = ExampleGaussian(
            sampling_prob=estimate.event.sampling_prob, examples_per_user=examples_per_user, noise_multiplier=z
        )
        return epsilon_of_events([(event, estimate.rounds)], estimate.delta, "pld") <= target

    low, high = estimate.noise_multiplier / 2, estimate.noise_multiplier
    while not is_enough(high):
        low, high = high, 2 * high
    while high / low > 1.02:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    examples = estimate.users_per_round * examples_per_user
    return SamplingComparison(
        epsilon=target,
        examples_per_user=examples_per_user,
        examples_per_round=examples,
        users_noise=estimate.noise_multiplier,
        examples_noise=high,
        users_std=estimate.noise_multiplier / estimate.users_per_round,
        examples_std=high / examples,
    )


def _is_quick(accountant: str) -> bool:
    return accountant in ACCOUNTANTS and ACCOUNTANTS[accountant].additive is not None


def _scale(unknown: str, population: int) -> tuple[int, int, int, Callable[[int], float]]:
    """Return the scale of a search, which runs over whole numbers n.

    Returns:
        The smallest n, the n to start from, the largest n, and a function from n to the value of the unknown parameter.
    """
    if unknown == "noise_multiplier":  # each step reduces the noise by 0.1 percent; values have four digits
        start, most = (math.floor(1000 * math.log(MOST_NOISE / z)) for z in (1.0, LEAST_NOISE))
        return 0, start, most, lambda n: float(f"{MOST_NOISE * math.exp(-n / 1000):.4g}")
    if unknown == "users_per_round":
        return 1, max(1, population // 100), population, lambda n: n
    return 1, 1000, MOST_ROUNDS, lambda n: n


def _largest(excess: Callable[[int], float], start: int, least: int, most: int) -> tuple[int, int | None]:
    """Find the largest n whose excess is at most 0. Numbers from 20,000 up are found to a tenth of a percent.

    The excess must grow with n, and the excess of `least` must be at most 0. The search first moves from `start` in
    steps that double, until an interval contains the answer. It then narrows the interval by linear interpolation
    between its ends, and by bisection in every third trial.

    Returns:
        That n, and a slightly larger number whose excess is above 0; None if `most` itself has an excess of at most 0.
    """
    low, high, step = least, None, max(1, start // 100)
    if excess(start) <= 0:
        low = start
        while high is None and low < most:
            middle = min(most, low + step)
            low, high, step = (middle, None, 2 * step) if excess(middle) <= 0 else (low, middle, step)
    else:
        high = start
        while (middle := max(least, high - step)) > least and excess(middle) > 0:
            high, step = middle, 2 * step
        low = middle
    if high is None:
        return low, None
    trials = 0
    while high - low > (width := 1 if low < 20_000 else low // 1000):
        below, above = excess(low), excess(high)
        middle, trials = (low + high) // 2, trials + 1
        if trials % 3 and math.isfinite(below) and math.isfinite(above):
            middle = low + math.floor((high - low) * below / (below - above))
        # Keep the trial one step away from both ends. If the answer is next to an end, this trial closes the interval.
        middle = min(max(middle, low + width), high - width)
        low, high = (middle, high) if excess(middle) <= 0 else (low, middle)
    return low, high
