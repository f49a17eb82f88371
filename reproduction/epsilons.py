"""The paper's epsilons, computed again: by its own accountant, and by what can be claimed today.

In: a PrintedEpsilon. Out: numbers. Each is worked out once in a process: Table 1 takes some fifteen seconds by PLD.
"""

from functools import cache

from reproduction.printed import PrintedEpsilon
from unheard.privacy.accountants import best_epsilon, epsilon
from unheard.privacy.events import PoissonGaussian


@cache
def moments(cell: PrintedEpsilon) -> float:
    """By the moments accountant, as the paper did."""
    return epsilon([(_event(cell), cell.rounds)], cell.delta, "moments")


def today(cell: PrintedEpsilon) -> float:
    """The smaller of PLD and RDP for the same run."""
    return claimed_today(_event(cell), cell.rounds, cell.delta)


@cache
def claimed_today(event: PoissonGaussian, rounds: int, delta: float) -> float:
    """The smaller of PLD and RDP for so many rounds."""
    return best_epsilon([(event, rounds)], delta).epsilon


def _event(cell: PrintedEpsilon) -> PoissonGaussian:
    return PoissonGaussian(sampling_prob=cell.users_per_round / cell.population, noise_multiplier=cell.noise_multiplier)
