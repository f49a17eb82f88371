"""Compares independent and correlated noise for a target epsilon, and chooses the kind with the smallest error.

In: the declared population, users per round, rounds, epsilon and delta. Out: one `NoiseOption` for each kind of noise,
with the least noise multiplier that meets the target and the error of the summed updates. Every epsilon here is
*hypothetical*: it belongs to a run that has not happened.

    kind           sampling
    independent    poisson            one event per round
    banded         cyclic_poisson     b groups; b is chosen so that the error is smallest
    banded         min_separation     each user takes part every b-th round, b = users / users per round
    blt            min_separation     the same, with 2 to 4 vectors of memory instead of b - 1

With min_separation the guarantee does not rest on random sampling. Correlated noise gains much where each user is seen
seldom and rounds are many, and little where q is large.

>>> options = compare_noise(population=100_000, users_per_round=1000, rounds=200, epsilon=4.0, accountant="rdp")
>>> best(options).kind, best(options).sampling
('banded', 'cyclic_poisson')
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from scipy.optimize import brentq

from unheard.config import require
from unheard.errors import AccountingError
from unheard.privacy.accountants import CLAIMED, RUNNING_ACCOUNTANT, Bound, best_epsilon, epsilon, rough_epsilon
from unheard.privacy.events import Event, Gaussian, PoissonGaussian
from unheard.privacy.matrix_factorization import Factorisation, independent_error, optimise
from unheard.privacy.planner import LEAST_NOISE, MOST_NOISE, CostEstimate, Progress, default_delta

STEPS_PER_UNIT = 1000
"""Noise multipliers are solved for in thousandths, rounded up."""
ROUGH_MARGIN = 1.01
"""Rough multipliers, which order the numbers of bands, are exact to this factor."""
MOST_BANDS = 256
"""More bands are not proposed: each needs a vector of the model's size in memory and in every checkpoint."""
REFINED = 3
"""How many numbers of bands are compared with the slow accountant, after the quick one has ordered all."""


@dataclass(frozen=True, kw_only=True)
class NoiseOption:
    """One kind of noise at the target epsilon.

    Attributes:
        kind: "independent", "banded" or "blt".
        sampling: The kind of sampler that the events hold for, as in a run file.
        noise_multiplier: z, the least that meets the target.
        events: What all rounds would cost, as an event and how often it happens.
        epsilon: Hypothetical, at `delta`; at most the target.
        accountant: The accountant that shows it.
        rms_error: The root mean square over the rounds of the noise in one coordinate of the summed updates, in units
            of S.
        factorisation: The matrix of correlated noise; None for independent noise.
    """

    kind: str
    sampling: str
    noise_multiplier: float
    events: tuple[Event, int]
    epsilon: float
    accountant: str
    rms_error: float
    factorisation: Factorisation | None = None

    @property
    def vectors(self) -> int:
        """How many vectors of the model's size the noise keeps between rounds."""
        if self.factorisation is None:
            return 0
        if self.kind == "banded":
            return len(self.factorisation.coefficients) - 1
        return len(self.factorisation.decays)

    def record(self, independent: "NoiseOption", parameters: int) -> dict[str, Any]:
        """The option as data for JSON.

        Args:
            independent: The option to compare the error with.
            parameters: The number of parameters of the model, for the size of the noise that the run keeps.
        """
        return {
            "noise": self.kind,
            "sampling": self.sampling,
            "separation": 1 if self.factorisation is None else self.factorisation.separation,
            "noise_multiplier": self.noise_multiplier,
            "epsilon": self.epsilon,
            "accountant": self.accountant,
            "rms_error": self.rms_error,
            "change": self.rms_error / independent.rms_error - 1,
            "history_bytes": self.vectors * parameters * 8,
        }


def compare_noise(
    *,
    population: int,
    users_per_round: float,
    rounds: int,
    epsilon: float,
    delta: float | None = None,
    accountant: str = "best",
    buffers: int = 3,
    most_bands: int = MOST_BANDS,
    progress: Progress = lambda _: None,
) -> list[NoiseOption]:
    """The least noise of each kind that meets a target epsilon, and its error.

    Args:
        population: The number of users that the run would declare.
        users_per_round: The expected size of a cohort.
        rounds: T, the number of rounds.
        epsilon: The target.
        delta: `default_delta(population)` if left out.
        accountant: The accountant whose bound must meet the target; "best" is the smaller of pld and rdp.
        buffers: The number of buffers of BLT noise, 2 to 4.
        most_bands: The largest number of bands to propose.
        progress: Called with a line of text before each computation that takes long.

    Returns:
        Independent noise, banded noise with cyclic Poisson sampling, then banded and BLT noise with min_separation.
        The last two are left out if a cohort is more than half of the population.

    Raises:
        InvalidValue: A value is out of range.
        AccountingError: No noise meets the target.
    """
    delta = default_delta(population) if delta is None else delta
    require(0 < epsilon < math.inf, f"the target epsilon must be above 0, not {epsilon}.")
    estimate = CostEstimate(
        population=population, users_per_round=users_per_round, noise_multiplier=1.0, rounds=rounds, delta=delta
    )
    q = estimate.event.sampling_prob

    def solved(sampling: str, matrix: Factorisation | None, event: Callable[[float], Event], times: int) -> NoiseOption:
        """The option with the least z that meets the target."""
        z, bound = _least_multiplier(event, times, epsilon, delta, accountant)
        return NoiseOption(
            kind="independent" if matrix is None else matrix.strategy,
            sampling=sampling,
            noise_multiplier=z,
            events=(event(z), times),
            epsilon=bound.epsilon,
            accountant=bound.accountant,
            rms_error=z * (independent_error(rounds) if matrix is None else matrix.rms_error()),
            factorisation=matrix,
        )

    def sampled(b: int) -> Callable[[float], Event]:
        """The event of one block of b rounds as a function of z."""
        return lambda z: PoissonGaussian(sampling_prob=min(1.0, b * q), noise_multiplier=z)

    def released(z: float) -> Event:
        """The event of a release without sampling as a function of z."""
        return Gaussian(noise_multiplier=z)

    def rough_error(b: int) -> float:
        """The error with b bands, by the quick accountant."""
        progress(f"{b} bands")
        matrix = optimise("banded", rounds=rounds, separation=b)
        return _rough_multiplier(sampled(b), matrix.participations, epsilon, delta) * matrix.rms_error()

    def cyclic(b: int) -> NoiseOption:
        """The option with b bands, by the accountant that was asked for."""
        progress(f"{b} bands, exactly")
        matrix = optimise("banded", rounds=rounds, separation=b)
        return solved("cyclic_poisson", matrix, sampled(b), matrix.participations)

    progress("independent noise")
    options = [solved("poisson", None, sampled(1), rounds)]
    near = _best_bands(rough_error, _numbers_of_bands(1 / q, rounds, most_bands))
    options.append(min((cyclic(b) for b in near), key=_error))
    separation = min(int(1 / q + 1e-9), rounds)
    if separation >= 2:
        progress(f"rounds of one user {separation} apart")
        bands = min(separation, most_bands)
        matrix = optimise("banded", rounds=rounds, separation=separation, bands=bands)
        options.append(solved("min_separation", matrix, released, matrix.participations))
        matrix = optimise("blt", rounds=rounds, separation=separation, buffers=buffers)
        options.append(solved("min_separation", matrix, released, 1))
    return options


def best(options: Sequence[NoiseOption]) -> NoiseOption:
    """The option with the smallest error; of those within one percent of it, the one that keeps the fewest vectors."""
    smallest = min(option.rms_error for option in options)
    return min((option for option in options if option.rms_error <= 1.01 * smallest), key=lambda option: option.vectors)


def _error(option: NoiseOption) -> float:
    return option.rms_error


def _best_bands(rough_error: Callable[[int], float], numbers: Sequence[int]) -> list[int]:
    """The `REFINED` numbers of bands with the smallest errors.

    The search ends three numbers after the best one, since the error has one minimum.
    """
    errors: dict[int, float] = {}
    for b in numbers:
        errors[b] = rough_error(b)
        if list(errors).index(min(errors, key=errors.__getitem__)) < len(errors) - 3:
            break
    return sorted(errors, key=errors.__getitem__)[:REFINED]


def _numbers_of_bands(largest: float, rounds: int, most: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, ... up to what the population and the rounds allow."""
    limit = int(min(largest + 1e-9, rounds, most))
    steps = {2**i for i in range(20)} | {3 * 2**i for i in range(20)} | {limit}
    return sorted(b for b in steps if 1 <= b <= limit)


def _rough_multiplier(event: Callable[[float], Event], times: int, target: float, delta: float) -> float:
    """A z that meets the target by a rough bound, a few percent above the least."""

    def excess(z: float) -> float:
        """The logarithm of epsilon by the quick accountant, divided by the target."""
        return math.log(max(rough_epsilon(((event(z), times),), delta), 1e-9) / target)

    high = 0.25
    while excess(high) > 0:
        if high > MOST_NOISE:
            raise AccountingError(f"No noise meets epsilon {target:g} at delta {delta:.3g}: allow a larger epsilon.")
        high *= 2
    low = max(LEAST_NOISE, high / 4)
    if excess(low) <= 0:
        return low
    return ROUGH_MARGIN * float(brentq(excess, low, high, rtol=ROUGH_MARGIN - 1))  # pyright: ignore[reportArgumentType]


def _least_multiplier(
    event: Callable[[float], Event], times: int, target: float, delta: float, accountant: str
) -> tuple[float, Bound]:
    """The least z, in thousandths, at which an event that happens `times` times meets the target, and its bound."""

    def bound_of(z: float, by: str = accountant) -> Bound:
        """The bound with z by an accountant."""
        events = [(event(z), times)]
        return best_epsilon(events, delta) if by == "best" else Bound(epsilon=epsilon(events, delta, by), accountant=by)

    def excess(z: float, by: str) -> float:
        """The logarithm of epsilon by an accountant, divided by the target."""
        return math.log(max(bound_of(z, by).epsilon, 1e-9) / target)

    high = _rough_multiplier(event, times, target, delta)
    by = CLAIMED[0] if accountant == "best" else accountant
    if accountant == "best" and excess(high, by) > 0:
        by = RUNNING_ACCOUNTANT  # for very small epsilons
    while excess(high, by) > 0:
        if high > MOST_NOISE:
            raise AccountingError(
                f"No noise meets epsilon {target:g} at delta {delta:.3g} by {by}: try another accountant."
            )
        high *= 1.1
    low = high / 1.1
    while low > LEAST_NOISE and excess(low, by) <= 0:
        low, high = low / 1.2, low
    root = high if excess(low, by) <= 0 else float(brentq(excess, low, high, args=(by,), xtol=0.2 / STEPS_PER_UNIT))  # pyright: ignore[reportArgumentType]
    step = math.ceil(root * STEPS_PER_UNIT)
    while (bound := bound_of(step / STEPS_PER_UNIT)).epsilon > target:
        step += 1
    return step / STEPS_PER_UNIT, bound
