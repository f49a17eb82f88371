"""What a run would cost before it is run, and what to choose so that it costs no more than a target.

In: declared users, users a round, z, rounds, delta; or all but one of the middle three, and a target epsilon. Out: a
CostEstimate, and for a target the cheapest one that was found to meet it. Every epsilon here is *hypothetical*: it belongs to
a run that has not happened. Paper: Table 1 and "Differential privacy for large datasets".
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from unheard.config import require
from unheard.errors import AccountingError, InvalidValue
from unheard.privacy.accountants import Bound, best_epsilon, epsilon, epsilons
from unheard.privacy.events import PoissonGaussian

MOST_ROUNDS = 10**7
MOST_NOISE, LEAST_NOISE = 1e6, 1e-2
LARGE_DELTA = 1e-2
UNKNOWNS = ("noise_multiplier", "users_per_round", "rounds")
Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class CostEstimate:
    """A run that has not happened: every user is in a round with probability users_per_round / population."""

    population: int
    users_per_round: float
    noise_multiplier: float
    rounds: int
    delta: float

    def __post_init__(self) -> None:
        require(self.population >= 1, f"users must be 1 or more, not {self.population}.")
        require(self.users_per_round > 0, f"users a round must be more than 0, not {self.users_per_round:g}.")
        require(
            self.users_per_round <= self.population,
            f"{self.users_per_round:g} users a round out of {self.population} users is not possible: "
            "lower the users a round, or declare more users.",
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
        return PoissonGaussian(
            sampling_prob=self.users_per_round / self.population, noise_multiplier=self.noise_multiplier
        )

    def epsilons(self, rounds: int | None = None) -> dict[str, float]:
        """Hypothetical epsilon by each accountant, after all rounds or after some."""
        return epsilons([(self.event, rounds or self.rounds)], self.delta)

    def bound(self, accountant: str = "best") -> Bound:
        """Hypothetical epsilon by one accountant, or the smaller of pld and rdp."""
        events = [(self.event, self.rounds)]
        if accountant == "best":
            return best_epsilon(events, self.delta)
        return Bound(epsilon=epsilon(events, self.delta, accountant), accountant=accountant)

    def meets(self, target: float, accountant: str = "best") -> bool:
        """Whether epsilon is at most the target; rdp is asked first, since it is quick and valid."""
        if accountant == "best":
            return self.meets(target, "rdp") or self.meets(target, "pld")
        return self.bound(accountant).epsilon <= target


@dataclass(frozen=True, kw_only=True)
class Solution:
    """The plan that meets the target, its bound, and the next cheaper plan tried, which does not meet it."""

    solved_for: str
    target: float
    estimate: CostEstimate
    bound: Bound
    cheaper: CostEstimate | None  # None where the search ended at the edge of what is possible


def default_delta(population: int) -> float:
    """The paper's choice: users^-1.1."""
    return population**-1.1


def caution(delta: float) -> str | None:
    """What to say of a delta that is allowed, and so large that the guarantee is worth little: users^-1.1 is, below 66 users."""
    if delta <= LARGE_DELTA:
        return None
    return (
        f"delta = {delta:.3g} is large: with that probability, more than once in a hundred, epsilon need not hold. Only a "
        "population below 100 users allows it. Give a smaller one ([privacy] delta in a run file, --delta of `unheard plan`), "
        "which costs more epsilon, or learn from more people."
    )


def solve(
    *,
    population: int,
    epsilon: float,
    users_per_round: float | None = None,
    noise_multiplier: float | None = None,
    rounds: int | None = None,
    delta: float | None = None,
    accountant: str = "best",
    progress: Progress = lambda _: None,
) -> Solution:
    """Find the one value left out: the least noise, the most users a round or the most rounds that meet the target."""
    given = {"noise_multiplier": noise_multiplier, "users_per_round": users_per_round, "rounds": rounds}
    missing = [name for name in UNKNOWNS if given[name] is None]
    require(
        len(missing) == 1,
        f"To meet an epsilon, leave out exactly one of {', '.join(UNKNOWNS)}: {len(missing)} are left out.",
    )
    require(0 < epsilon < math.inf, f"the target epsilon must be above 0, not {epsilon}.")
    unknown = missing[0]
    least, most, value_at = _scale(unknown, population)
    delta = default_delta(population) if delta is None else delta

    def at(n: int) -> CostEstimate:
        return CostEstimate(population=population, delta=delta, **{**given, unknown: value_at(n)})  # pyright: ignore

    def meets(n: int, by: str) -> bool:
        progress(f"trying {unknown} = {value_at(n):g}")
        return at(n).meets(epsilon, by)

    quick = "moments" if accountant == "moments" else "rdp"  # not as tight as pld, but valid and much faster
    low, high = least, most
    if accountant != "pld" and meets(least, quick):
        low, high = _largest(lambda n: meets(n, quick), least, most)
    elif not meets(least, accountant):
        raise InvalidValue(
            f"Epsilon {epsilon:g} at delta {delta:.3g} is out of reach, even with {unknown} = {value_at(least):g}: "
            "allow a larger epsilon, or give other values."
        )
    if accountant != quick:
        low, high = _largest(lambda n: meets(n, accountant), low, most)
    estimate = at(low)
    if not estimate.meets(epsilon, accountant):
        raise AccountingError(
            f"No {unknown} could be verified to meet epsilon {epsilon:g}: give one and drop --epsilon."
        )
    cheaper = at(high) if high is not None and not at(high).meets(epsilon, accountant) else None
    return Solution(
        solved_for=unknown, target=epsilon, estimate=estimate, bound=estimate.bound(accountant), cheaper=cheaper
    )


def _scale(unknown: str, population: int) -> tuple[int, int, Callable[[int], float]]:
    """Whole numbers to search on, from the least to the most that can be spent, and the value that each stands for."""
    if unknown == "noise_multiplier":  # a tenth of a percent less noise at each step, in four digits
        steps = math.floor(1000 * math.log(MOST_NOISE / LEAST_NOISE))
        return 0, steps, lambda n: float(f"{MOST_NOISE * math.exp(-n / 1000):.4g}")
    return 1, population if unknown == "users_per_round" else MOST_ROUNDS, lambda n: n


def _largest(meets: Callable[[int], bool], low: int, most: int) -> tuple[int, int | None]:
    """The largest number that meets the target, given that `low` does, and a slightly larger one that does not.

    Ever longer steps up until one is too much, then the gap is halved; to a tenth of a percent for large numbers.
    """
    step = max(1, low // 20)
    while low < most:
        high = min(most, low + step)
        if not meets(high):
            break
        low, step = high, 2 * step
    else:
        return low, None
    while high - low > (1 if low < 20_000 else low // 1000):
        middle = (low + high) // 2
        low, high = (middle, high) if meets(middle) else (low, middle)
    return low, high
