"""Compare independent and correlated noise at a target epsilon, and choose the kind with the smallest error.

Input: the declared population, users per round, rounds, epsilon and delta. Output: one `NoiseOption` for each kind of
noise, with the smallest noise multiplier that meets the target and the error of the summed updates. Every epsilon here
is *hypothetical*: it belongs to a run that has not happened.

    kind           sampling
    independent    poisson            one event per round
    banded         cyclic_poisson     b groups; b is chosen so that the error is smallest
    banded         min_separation     each user takes part at most every b-th round, b = users / users per round
    blt            min_separation     as above, but the noise keeps 2 to 4 vectors in memory instead of up to b - 1

With min_separation the guarantee does not depend on random sampling. Correlated noise reduces the error most if there
are many rounds and each user takes part in few of them. It helps little if q is large.

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
from unheard.privacy.accountants import CLAIMED, RUNNING_ACCOUNTANT, Bound, bound_by, rough_epsilon
from unheard.privacy.budget import default_delta
from unheard.privacy.events import Event, Gaussian, PoissonGaussian
from unheard.privacy.matrix_factorization import Factorisation, independent_error, optimise
from unheard.privacy.planner import LEAST_NOISE, MOST_NOISE, CostEstimate, Progress

STEPS_PER_UNIT = 1000
"""Noise multipliers are rounded up to a multiple of 1 / `STEPS_PER_UNIT`."""
ROUGH_MARGIN = 1.01
"""The relative precision of the search in `_rough_multiplier`; the result is rounded up by this factor."""
MOST_BANDS = 256
"""The largest number of bands by default: each band needs a vector of the model's size in memory and in checkpoints."""
REFINED = 3
"""The number of candidates that the slow accountant compares, after the fast one has ranked all numbers of bands."""


@dataclass(frozen=True, kw_only=True)
class NoiseOption:
    """One kind of noise at the target epsilon.

    Attributes:
        kind: "independent", "banded" or "blt".
        sampling: The kind of sampler that this option requires, as in a run file.
        noise_multiplier: z, the smallest that meets the target.
        events: The cost of all rounds: an event, and the number of times it happens.
        epsilon: The hypothetical epsilon at the delta given to `compare_noise`; at most the target.
        accountant: The name of the accountant that computed `epsilon`.
        rms_error: The noise in one coordinate of the summed updates, as the root mean square over the rounds, in units
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
        """The number of vectors of the model's size that the noise keeps between rounds."""
        if self.factorisation is None:
            return 0
        if self.kind == "banded":
            return len(self.factorisation.coefficients) - 1
        return len(self.factorisation.decays)

    def record(self, independent: "NoiseOption", parameters: int) -> dict[str, Any]:
        """Return the option as plain JSON values.

        Args:
            independent: The option with independent noise; "change" is the error relative to it, minus 1.
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
    """Compute the smallest noise of each kind that meets a target epsilon, and its error.

    Args:
        population: The number of users that the run would declare.
        users_per_round: The expected size of a cohort.
        rounds: T, the number of rounds.
        epsilon: The target.
        delta: The delta of the guarantee. None: `default_delta(population)`.
        accountant: The accountant whose bound must meet the target; "best" is the smaller of pld and rdp.
        buffers: The number of buffers of BLT noise, 2 to 4.
        most_bands: The largest number of bands to propose.
        progress: Called with a line of text before each slow computation.

    Returns:
        Independent noise, banded noise with cyclic Poisson sampling, then banded and BLT noise with min_separation.
        The last two are omitted if a cohort is more than half of the population, or if there is only one round.

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
        """Return the option with the smallest z that meets the target."""
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
        """Return a function of z: the event of one block of b rounds with cyclic Poisson sampling."""
        return lambda z: PoissonGaussian(sampling_prob=min(1.0, b * q), noise_multiplier=z)

    def released(z: float) -> Event:
        """Return the event of a release without sampling, with noise multiplier z."""
        return Gaussian(noise_multiplier=z)

    def rough_error(b: int) -> float:
        """Compute the error with b bands, by the fast accountant."""
        progress(f"{b} bands")
        matrix = optimise("banded", rounds=rounds, separation=b)
        return _rough_multiplier(sampled(b), matrix.participations, epsilon, delta) * matrix.rms_error()

    def cyclic(b: int) -> NoiseOption:
        """Compute the option with b bands, by the accountant that the caller asked for."""
        progress(f"{b} bands, exactly")
        matrix = optimise("banded", rounds=rounds, separation=b)
        return solved("cyclic_poisson", matrix, sampled(b), matrix.participations)

    progress("independent noise")
    options = [solved("poisson", None, sampled(1), rounds)]
    near = _best_bands(rough_error, _numbers_of_bands(1 / q, rounds, most_bands))
    options.append(min((cyclic(b) for b in near), key=lambda option: option.rms_error))
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
    """Return the best option: of those with an error within one percent of the smallest, the one with least memory."""
    smallest = min(option.rms_error for option in options)
    return min((option for option in options if option.rms_error <= 1.01 * smallest), key=lambda option: option.vectors)


def _best_bands(rough_error: Callable[[int], float], numbers: Sequence[int]) -> list[int]:
    """Return the `REFINED` numbers of bands with the smallest errors, best first.

    The error as a function of the number of bands has one minimum, so the search stops after three numbers that are not
    better than the best one.

    Args:
        rough_error: Computes the error with a number of bands.
        numbers: The candidates, in increasing order.
    """
    errors: dict[int, float] = {}
    for b in numbers:
        errors[b] = rough_error(b)
        if list(errors).index(min(errors, key=errors.__getitem__)) < len(errors) - 3:
            break
    return sorted(errors, key=errors.__getitem__)[:REFINED]


def _numbers_of_bands(largest: float, rounds: int, most: int) -> list[int]:
    """Return the candidates 1, 2, 3, 4, 6, 8, 12, ... up to the smallest of the three arguments, which is included.

    Args:
        largest: 1 / q; more groups would leave less than one cohort per group.
        rounds: The number of rounds.
        most: The largest number of bands that the caller allows.
    """
    limit = int(min(largest + 1e-9, rounds, most))
    steps = {2**i for i in range(20)} | {3 * 2**i for i in range(20)} | {limit}
    return sorted(b for b in steps if 1 <= b <= limit)


def _rough_multiplier(event: Callable[[float], Event], times: int, target: float, delta: float) -> float:
    """Return a z that meets the target by `rough_epsilon`: a few percent above the smallest possible z.

    Args:
        event: The event as a function of z.
        times: The number of times that the event happens.
        target: The epsilon to meet.
        delta: The delta of the guarantee.
    """

    def excess(z: float) -> float:
        """Return log(epsilon / target) by the fast accountant; at most 0 if the target is met."""
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
    """Return the smallest z, in thousandths, that meets the target, and its bound. The arguments are as above."""

    def bound_of(z: float, by: str = accountant) -> Bound:
        """Return the epsilon of all events with noise multiplier z, by one accountant or by "best"."""
        return bound_by([(event(z), times)], delta, by)

    def excess(z: float, by: str) -> float:
        """Return log(epsilon / target) by one accountant; at most 0 if the target is met."""
        return math.log(max(bound_of(z, by).epsilon, 1e-9) / target)

    high = _rough_multiplier(event, times, target, delta)
    by = CLAIMED[0] if accountant == "best" else accountant
    if accountant == "best" and excess(high, by) > 0:
        by = RUNNING_ACCOUNTANT  # at very small epsilons rdp can be below pld
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
