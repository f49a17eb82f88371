"""Every number that the paper prints for its tables and figures, and the same epsilons computed again.

Exhibits and tests take printed numbers from here only. Epsilons are kept as strings of digits, because the paper
truncates two of them instead of rounding. `moments` computes an epsilon with the accountant of the paper, `today`
with the tightest one that `unheard` has.

>>> TABLE_1[0][0].digits, TABLE_1[0][0].agrees(0.9749)
('0.97', True)

Paper: Tables 1 and 2, Sections 1 and 3, Appendices B and D.
"""

import math
from dataclasses import dataclass
from functools import cache

from unheard.privacy.accountants import best_epsilon, epsilon
from unheard.privacy.events import PoissonGaussian

REDDIT = 763_430
"""Number of users K of the paper's corpus, each with 1,600 tokens."""
LARGER = 10**8
"""A hypothetical number of users K."""
TINY_DELTA = 1e-9
"""The delta of Table 2 and of the epsilons in the text."""


@dataclass(frozen=True, kw_only=True)
class PrintedEpsilon:
    """An epsilon that the paper prints, with the parameters that it is for."""

    location: str
    """Where it is in the paper: `Table 1, row 2`."""
    population: int
    users_per_round: int
    noise_multiplier: float = 1.0
    rounds: int
    delta: float
    digits: str
    """The printed number, digit by digit."""
    is_cut: bool = False
    """Whether the last digit is truncated instead of rounded."""

    def agrees(self, epsilon: float) -> bool:
        """Whether a computed epsilon would be printed with these digits."""
        places = len(self.digits.partition(".")[2])
        if self.is_cut:
            epsilon = math.floor(epsilon * 10**places) / 10**places
        return f"{epsilon:.{places}f}" == self.digits


@dataclass(frozen=True, kw_only=True)
class PrintedModel:
    """A row of Table 2. AccuracyTop1 was trained with 100 users per round; epsilon is for `users_per_round`."""

    noise_std: float
    clip_norm: float | None
    population: int
    users_per_round: int
    epsilon: PrintedEpsilon | None
    """None means infinite."""
    accuracy: float

    @property
    def run(self) -> str:
        """Name of the run that has the sigma and the S of this row."""
        return "baseline" if self.clip_norm is None else f"flat-S{self.clip_norm:g}-sigma{self.noise_std:g}"


POWERS = tuple(range(7))
"""Columns of Table 1: 10^0 to 10^6 rounds."""
_TABLE_1 = (
    (10**5, 10**2, 1.0, "0.97 0.98 1.00 1.07 1.18 2.21 7.50"),
    (10**6, 10**1, 1.0, "0.68 0.69 0.69 0.69 0.69 0.72 0.73"),
    (10**6, 10**3, 1.0, "1.17 1.17 1.20 1.28 1.39 2.44 8.13"),
    (10**6, 10**4, 1.0, "1.73 1.92 2.08 3.06 8.49 32.38 187.01"),
    (10**6, 10**3, 3.0, "0.47 0.47 0.48 0.48 0.49 0.67 1.95"),
    (10**9, 10**3, 1.0, "0.84 0.84 0.84 0.85 0.88 0.88 0.88"),
)
TABLE_1: tuple[tuple[PrintedEpsilon, ...], ...] = tuple(
    tuple(
        PrintedEpsilon(
            location=f"Table 1, row {row}",
            population=users,
            users_per_round=drawn,
            noise_multiplier=z,
            rounds=10**power,
            delta=users**-1.1,
            digits=digits,
        )
        for power, digits in zip(POWERS, line.split(), strict=True)
    )
    for row, (users, drawn, z, line) in enumerate(_TABLE_1, 1)
)
"""Table 1: six rows with seven epsilons each."""

ACCURACY_ROUNDS = 5000
"""Number of rounds of Table 2."""
BASELINE_ACCURACY = 0.1762
_ACCURACIES = {0.003: 0.1749, 0.006: 0.1704, 0.012: 0.1633}
_TABLE_2 = (
    (0.003, 15, REDDIT, 5000, "4.634"),
    (0.006, 10, REDDIT, 1667, "2.314"),
    (0.012, 15, REDDIT, 1250, "2.038"),
    (0.003, 15, LARGER, 5000, "1.152"),
    (0.006, 10, LARGER, 1667, "0.991"),
    (0.012, 15, LARGER, 1250, "0.987"),
)
TABLE_2: tuple[PrintedModel, ...] = (
    PrintedModel(
        noise_std=0.0,
        clip_norm=None,
        population=REDDIT,
        users_per_round=100,
        epsilon=None,
        accuracy=BASELINE_ACCURACY,
    ),
    *(
        PrintedModel(
            noise_std=sigma,
            clip_norm=norm,
            population=users,
            users_per_round=drawn,
            epsilon=PrintedEpsilon(
                location=f"Table 2, row {row}",
                population=users,
                users_per_round=drawn,
                rounds=ACCURACY_ROUNDS,
                delta=TINY_DELTA,
                digits=digits,
            ),
            accuracy=_ACCURACIES[sigma],
        )
        for row, (sigma, norm, users, drawn, digits) in enumerate(_TABLE_2, 2)
    ),
)
"""Table 2: the baseline and six rows with an epsilon."""


IN_TEXT: tuple[PrintedEpsilon, ...] = tuple(
    PrintedEpsilon(
        location=location,
        population=users,
        users_per_round=drawn,
        rounds=rounds,
        delta=TINY_DELTA,
        digits=digits,
        is_cut=is_cut,
    )
    for location, users, drawn, rounds, digits, is_cut in (
        ("Section 1", REDDIT, 5000, 4980, "4.6", False),
        ("Section 1", LARGER, 5000, 4980, "1.2", False),
        ("Section 3", REDDIT, 5000, ACCURACY_ROUNDS, "4.6", False),
        ("Section 3", REDDIT, 1250, 3000, "1.97", True),
        ("Appendix D", REDDIT, 5000, 3000, "3.81", True),
        ("Appendix D", REDDIT, 5000, 20_000, "8.92", False),
    )
)
"""Epsilons in the text of the paper, with z = 1 and delta = 1e-9."""

SAME_ACCURACY = 0.175
"""AccuracyTop1 that the baseline and the private run both reach (Section 1)."""
BASELINE_ROUNDS, PRIVATE_ROUNDS = 4120, 4980
"""Rounds of the baseline and of the private run to it (Section 1)."""
COMPUTATION = 60
"""User updates of the private run, times the baseline's (Section 1)."""
PRIVACY_COST, OTHER_CORPUS_COST = -0.0013, -0.0250
"""AccuracyTop1 at sigma = 0.003, and of a model of another corpus, less the baseline's (Section 3)."""
DROWNED = 0.2
"""sigma at z = 1 with S = 20 and C = 100 (Section 3)."""
PARAMETERS, TIED_SMALLER = 1.35e6, 0.40
"""Parameters of the model, and the share by which tying makes it smaller (Appendix B)."""


@cache
def by_accountant(cell: PrintedEpsilon, accountant: str) -> float:
    """Return the epsilon of a printed cell by one accountant.

    Args:
        cell: The cell.
        accountant: `moments`, `rdp` or `pld`.
    """
    return epsilon([(_event(cell), cell.rounds)], cell.delta, accountant)


def moments(cell: PrintedEpsilon) -> float:
    """Epsilon by the moments accountant, as in the paper."""
    return by_accountant(cell, "moments")


def today(cell: PrintedEpsilon) -> float:
    """The smaller bound of PLD and RDP for the same run."""
    return best_epsilon_today(_event(cell), cell.rounds, cell.delta)


@cache
def best_epsilon_today(event: PoissonGaussian, rounds: int, delta: float) -> float:
    """The smaller bound of PLD and RDP. Cached, because Table 1 takes about fifteen seconds with PLD."""
    return best_epsilon([(event, rounds)], delta).epsilon


def _event(cell: PrintedEpsilon) -> PoissonGaussian:
    """One round of the run as an event of the accountant."""
    return PoissonGaussian(sampling_prob=cell.users_per_round / cell.population, noise_multiplier=cell.noise_multiplier)


FIGURES_OF_RULES = {
    "private-run": "17.49 % at (4.634, 1e-9), estimated with 100 users per round, against 17.62 % without privacy.",
    "private-rounds": "17.5 % after 4,120 rounds of 100 users; the same after 4,980 rounds of 5,000 users.",
    "private-estimate": "The method gives 17.49 % for 5,000 users per round.",
    "table-1-digits": "42 values of epsilon, from 0.47 to 187.01.",
    "table-1-rounds": "0.84 after 1 round, 0.88 after 10^6, for 10^9 users.",
    "table-2-epsilon": "4.634, 2.314, 2.038 for 763,430 users; 1.152, 0.991, 0.987 for 10^8.",
    "table-2-cost": "17.62, 17.49, 17.04, 16.33 %: costs of 0.13, 0.58 and 1.29 points.",
    "figure-1-match": "17.49 against 17.62 %: 0.13 points.",
    "figure-7": "Curves; (1.97, 1e-9) after 3,000 rounds of 1,250 users.",
    "text-other-corpus": "2.50 points.",
    "text-tied": "About 40 % of the parameters.",
}
"""The paper's numbers behind the registered rules, by the name of the rule."""
