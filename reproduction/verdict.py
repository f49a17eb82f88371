"""Verdicts: whether a conclusion of the paper held in our runs.

A verdict has one of three outcomes, a sentence with the measured numbers, and the rule that decided. All tolerances
are constants of this module, so that every exhibit uses the same ones. Every verdict is computed from results; none is
written by hand.

    at = draft.shared_round(["baseline", "flat-S15"], against=["baseline"])     # or raises `Undecided`
    verdict_of((loss <= SMALL, f"After {plural(at)} ..."), rule)

`Draft` (`exhibit.py`) has the checks that several rules need. The rules of the private runs, whose thresholds were
registered before the runs, are in `rules.toml` and `private_results.py`.
"""

from dataclasses import dataclass
from typing import Literal

from reproduction.results import POINT
from unheard.formatting import NOTHING

NEARLY = 0.5 * POINT
"""Largest difference of two accuracies that nearly match."""
SMALL = 1.0 * POINT
"""Largest size of a small effect. (The paper calls 0.13 points negligible, and reports 0.58 and 1.29 as costs.)"""
TRAINED = 500
"""Smallest number of rounds after which a rule may judge a run."""
LEARNED = 5.0 * POINT
"""Smallest accuracy of a run that others are compared with. A run below it predicts only the most frequent words, or
has diverged; compared with such a run, noise would seem to cost nothing."""

Outcome = Literal["held", "did not hold", "cannot tell"]
Ruling = tuple[bool | None, str]
"""Whether a conclusion holds by its rule (None if the numbers do not decide), and the measured numbers in words."""


class Undecided(Exception):
    """Raised when a rule cannot be applied. The message becomes the sentence of the verdict "cannot tell"."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether a conclusion held in our runs.

    Attributes:
        outcome: `held`, `did not hold` or `cannot tell`.
        sentence: The measured numbers in words.
        rule: The rule that decided, in words.
    """

    outcome: Outcome
    sentence: str
    rule: str


def verdict_of(ruling: Ruling, rule: str) -> Verdict:
    """Return the verdict of a ruling.

    Args:
        ruling: Whether the conclusion holds, and the measured numbers in words.
        rule: The rule in words.
    """
    is_so, sentence = ruling
    outcome: Outcome = "cannot tell" if is_so is None else "held" if is_so else "did not hold"
    return Verdict(outcome=outcome, sentence=sentence, rule=rule)


def in_points(difference: float | None, *, signed: bool = False) -> str:
    """Format a difference of two shares in percentage points: 0.13, −0.02.

    Args:
        difference: The difference, or None for a dash.
        signed: Whether a positive difference has a plus sign. A difference that rounds to 0.00 has no sign.
    """
    if difference is None:
        return NOTHING
    rounded = round(100 * difference, 2) + 0.0  # -0.0 + 0.0 is 0.0
    return f"{rounded:{'+' if signed and rounded else ''}.2f}".replace("-", "−")


def points(difference: float) -> str:
    """Return the size of a difference of accuracies as text, such as `0.13 points`."""
    return f"{in_points(abs(difference))} points"


def below(difference: float) -> str:
    """Return a difference with its direction as text: `0.13 points above` if it is positive, else `... below`."""
    return f"{points(difference)} {'above' if difference > 0 else 'below'}"


def plural(rounds: int) -> str:
    """Return a number of rounds as text: `1 round`, `3,000 rounds`."""
    return f"{rounds:,} round{'' if rounds == 1 else 's'}"
