"""The numbers that the paper prints in its tables and figures, and functions that compute its epsilons again.

Exhibits and tests take printed numbers only from this module. Epsilons are strings of digits, because the paper
truncates two of them instead of rounding. `moments` computes an epsilon with the accountant of the paper, `today`
with the tightest accountants of `unheard`.

>>> TABLE_1[0][0].digits, TABLE_1[0][0].agrees(0.9749)
('0.97', True)

Paper: Tables 1 and 2, Sections 1 and 3, Appendices B and D.
"""

import math
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from unheard.privacy.accountants import best_epsilon, epsilon
from unheard.privacy.events import PoissonGaussian

REDDIT = 763_430
"""Number of users K of the paper's corpus, each with 1,600 tokens."""
LARGER = 10**8
"""A hypothetical number of users K."""
TINY_DELTA = 1e-9
"""The delta of Table 2 and of the epsilons in the text of the paper."""


@dataclass(frozen=True, kw_only=True)
class PrintedEpsilon:
    """An epsilon that the paper prints, with the parameters of the run that it describes."""

    location: str
    """Where the paper prints it, such as `Table 1, row 2`."""
    population: int
    users_per_round: int
    noise_multiplier: float = 1.0
    rounds: int
    delta: float
    digits: str
    """The number as it is printed."""
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
    """A row of Table 2.

    The accuracy is that of a run with 100 users per round; epsilon is for a hypothetical run with `users_per_round`.
    """

    noise_std: float = 0.0
    clip_norm: float | None = None
    population: int
    users_per_round: int
    epsilon: PrintedEpsilon | None = None
    """The printed epsilon; None means infinite."""
    accuracy: float

    @property
    def run(self) -> str:
        """Name of our run that has the sigma and the S of this row."""
        return "baseline" if self.clip_norm is None else f"flat-S{self.clip_norm:g}-sigma{self.noise_std:g}"


_PRINTED = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
POWERS = tuple(range(7))
"""Columns of Table 1: 10^0 to 10^6 rounds."""
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
    for row, (users, drawn, z, line) in enumerate(_PRINTED["table_1"], 1)
)
"""Table 1: six rows with seven epsilons each, one per number of `POWERS`."""

ACCURACY_ROUNDS = 5000
"""Number of rounds of Table 2."""
BASELINE_ACCURACY = 0.1762
"""AccuracyTop1 of the non-private baseline in Table 2."""


def _at_z1(location: str, users: int, drawn: int, rounds: int, digits: str, is_cut: bool = False) -> PrintedEpsilon:
    """Return a printed epsilon with z = 1 and delta = 1e-9."""
    size = {"population": users, "users_per_round": drawn, "rounds": rounds}
    return PrintedEpsilon(location=location, **size, delta=TINY_DELTA, digits=digits, is_cut=is_cut)


TABLE_2: tuple[PrintedModel, ...] = (
    PrintedModel(population=REDDIT, users_per_round=100, accuracy=BASELINE_ACCURACY),
    *(
        PrintedModel(
            noise_std=sigma,
            clip_norm=norm,
            population=users,
            users_per_round=drawn,
            epsilon=_at_z1(f"Table 2, row {row}", users, drawn, ACCURACY_ROUNDS, digits),
            accuracy=accuracy,
        )
        for row, (sigma, norm, users, drawn, digits, accuracy) in enumerate(_PRINTED["table_2"], 2)
    ),
)
"""Table 2: the baseline and six rows with an epsilon."""
IN_TEXT: tuple[PrintedEpsilon, ...] = tuple(_at_z1(*line) for line in _PRINTED["in_text"])
"""Epsilons in the text of the paper."""
FIGURES_OF_RULES: dict[str, str] = _PRINTED["figures_of_rules"]
"""The paper's numbers behind the registered rules, by the name of the rule."""

SAME_ACCURACY = 0.175
"""AccuracyTop1 that the baseline and the private run both reach (Section 1)."""
BASELINE_ROUNDS, PRIVATE_ROUNDS = 4120, 4980
"""Rounds that the baseline and the private run need to reach `SAME_ACCURACY` (Section 1)."""
COMPUTATION = 60
"""User updates of the private run to reach `SAME_ACCURACY`, divided by the baseline's (Section 1)."""
PRIVACY_COST, OTHER_CORPUS_COST = -0.0013, -0.0250
"""Differences of AccuracyTop1 to the baseline: at sigma = 0.003, and of a model of another corpus (Section 3)."""
DROWNED = 0.2
"""The sigma that z = 1 gives with S = 20 and C = 100, at which the paper reports that training fails (Section 3)."""
PARAMETERS, TIED_SMALLER = 1.35e6, 0.40
"""Number of parameters of the model, and the fraction of parameters that tying saves (Appendix B)."""


@cache
def by_accountant(cell: PrintedEpsilon, accountant: str) -> float:
    """Compute the epsilon of a printed cell with one accountant. Cached.

    Args:
        cell: The printed epsilon, whose parameters are used.
        accountant: `moments`, `rdp` or `pld`.
    """
    return epsilon([(_event(cell), cell.rounds)], cell.delta, accountant)


def moments(cell: PrintedEpsilon) -> float:
    """Compute the epsilon of a printed cell with the moments accountant, as the paper does."""
    return by_accountant(cell, "moments")


def today(cell: PrintedEpsilon) -> float:
    """Compute the epsilon of a printed cell with the accountants of `unheard`: the smaller bound of PLD and RDP."""
    return best_epsilon_today(_event(cell), cell.rounds, cell.delta)


@cache
def best_epsilon_today(event: PoissonGaussian, rounds: int, delta: float) -> float:
    """Compute the smaller bound of PLD and RDP. Cached, because Table 1 takes about fifteen seconds with PLD.

    Args:
        event: One round of the run.
        rounds: The number of rounds.
        delta: The delta of the claim.
    """
    return best_epsilon([(event, rounds)], delta).epsilon


def _event(cell: PrintedEpsilon) -> PoissonGaussian:
    """Return one round of the cell's run as an event for the accountants."""
    return PoissonGaussian(sampling_prob=cell.users_per_round / cell.population, noise_multiplier=cell.noise_multiplier)
