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

from scipy.optimize import brentq

from unheard.config import require
from unheard.errors import AccountingError
from unheard.privacy.accountants import CLAIMED, RUNNING_ACCOUNTANT, Bound, best_epsilon, epsilon
from unheard.privacy.events import Event, Gaussian, PoissonGaussian
from unheard.privacy.matrix_factorization import Factorisation, independent_error, optimise
from unheard.privacy.planner import LEAST_NOISE, MOST_NOISE, CostEstimate, Progress, default_delta

STEPS_PER_UNIT = 1000
"""Noise multipliers are solved for in thousandths, rounded up."""
ROUGH_STEPS = 50
"""In fiftieths to order the numbers of bands."""
MOST_BANDS = 256
"""More bands are not proposed: each needs a vector of the model's size in memory and in every checkpoint."""
REFINED = 2
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
        rounds: T.
        epsilon: The target.
        delta: `default_delta(population)` if left out.
        accountant: The accountant whose bound must meet the target; "best" is the smaller of pld and rdp.
        buffers: Of BLT, 2 to 4.
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

    def solved(
        sampling: str,
        matrix: Factorisation | None,
        event: Callable[[float], Event],
        times: int,
        *,
        is_rough: bool = False,
    ) -> NoiseOption:
        by, steps = (RUNNING_ACCOUNTANT, ROUGH_STEPS) if is_rough else (accountant, STEPS_PER_UNIT)
        z, bound = _least_multiplier(event, times, epsilon, delta, by, steps)
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
        return lambda z: PoissonGaussian(sampling_prob=min(1.0, b * q), noise_multiplier=z)

    def released(z: float) -> Event:
        return Gaussian(noise_multiplier=z)

    def cyclic(b: int, *, is_rough: bool) -> NoiseOption:
        progress(f"{b} bands")
        matrix = optimise("banded", rounds=rounds, separation=b)
        return solved("cyclic_poisson", matrix, sampled(b), matrix.participations, is_rough=is_rough)

    progress("independent noise")
    options = [solved("poisson", None, sampled(1), rounds)]
    by_error = sorted(_until_worse(cyclic, _numbers_of_bands(1 / q, rounds, most_bands)), key=_error)
    near = [option.factorisation.separation for option in by_error[:REFINED] if option.factorisation]
    options.append(min((cyclic(b, is_rough=False) for b in near), key=_error))
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
    """The option with the smallest error; independent noise if nothing is at least one percent better."""
    independent = next(option for option in options if option.kind == "independent")
    chosen = min(options, key=_error)
    return chosen if chosen.rms_error < 0.99 * independent.rms_error else independent


def _error(option: NoiseOption) -> float:
    return option.rms_error


def _until_worse(cyclic: Callable[..., NoiseOption], numbers: Sequence[int]) -> list[NoiseOption]:
    """The options for increasing numbers of bands, up to three after the best one: the error has one minimum."""
    options: list[NoiseOption] = []
    for b in numbers:
        options.append(cyclic(b, is_rough=True))
        if len(options) - options.index(min(options, key=_error)) > 3:
            break
    return options


def _numbers_of_bands(largest: float, rounds: int, most: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, ... up to what the population and the rounds allow."""
    limit = int(min(largest + 1e-9, rounds, most))
    steps = {2**i for i in range(20)} | {3 * 2**i for i in range(20)} | {limit}
    return sorted(b for b in steps if 1 <= b <= limit)


def _least_multiplier(
    event: Callable[[float], Event], times: int, target: float, delta: float, accountant: str, steps: int
) -> tuple[float, Bound]:
    """The least z, in steps of 1 / `steps`, at which an event that happens `times` times meets the target, and its bound."""

    def excess(z: float, by: str) -> float:
        return math.log(max(epsilon([(event(z), times)], delta, by), 1e-9) / target)

    def least(low: float, high: float, by: str) -> int:
        if excess(low, by) <= 0:
            return math.ceil(low * steps)
        return math.ceil(float(brentq(excess, low, high, args=(by,), xtol=0.2 / steps)) * steps)  # pyright: ignore[reportArgumentType]

    top = 0.25
    while excess(top, RUNNING_ACCOUNTANT) > 0:
        if top > MOST_NOISE:
            raise AccountingError(f"No noise meets epsilon {target:g} at delta {delta:.3g}: allow a larger epsilon.")
        top *= 2
    step = least(max(LEAST_NOISE, top / 4), top, RUNNING_ACCOUNTANT)
    if accountant != RUNNING_ACCOUNTANT:
        # The quick accountant's answer is valid, so it is the upper end of the search by the tight one.
        tight, quick = CLAIMED[0] if accountant == "best" else accountant, step / steps
        step = least(quick / 2, quick, tight) if excess(quick, tight) < 0 else step
    while True:
        events = [(event(step / steps), times)]
        bound = (
            best_epsilon(events, delta)
            if accountant == "best"
            else Bound(epsilon=epsilon(events, delta, accountant), accountant=accountant)
        )
        if bound.epsilon <= target:
            return step / steps, bound
        step += 1
