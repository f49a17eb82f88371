"""Verdicts: whether a conclusion of the paper held in our runs.

A verdict has one of three outcomes, a sentence with the measured numbers, and the rule that decided. All tolerances
are constants of this module, so that every exhibit uses the same ones. A verdict is always computed from results and
never written by hand.

    at = draft.shared_round(["baseline", "flat-S15"], against=["baseline"])     # or raises `Undecided`
    verdict_of((loss <= SMALL, f"After {plural(at)} ..."), rule)

`Draft` (`exhibit.py`) has the checks that rules share. The rules of the runs with registered
thresholds are in `rules.toml` and `private_results.py`.
"""

from dataclasses import dataclass
from typing import Literal

from reproduction.results import POINT
from unheard.formatting import in_points

NEARLY = 0.5 * POINT
"""Two accuracies nearly match if they differ by at most this."""
SMALL = 1.0 * POINT
"""An effect is small up to this. (The paper calls 0.13 points negligible, and reports 0.58 and 1.29 as costs.)"""
TRAINED = 500
"""Runs with fewer rounds say nothing about a trained model."""
LEARNED = 5.0 * POINT
"""A run below this accuracy predicts only the most frequent words, or has diverged. Nothing can be compared with it:
noise costs nothing where there is nothing to lose."""

Outcome = Literal["held", "did not hold", "cannot tell"]
Ruling = tuple[bool | None, str]
"""Whether a conclusion holds by its rule (None if the numbers do not decide), and the measured numbers in words."""


class Undecided(Exception):
    """A rule cannot be applied. The message is the sentence of the verdict "cannot tell"."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether a conclusion held in our runs.

    Attributes:
        outcome: One of three words.
        sentence: The measured numbers in words.
        rule: The rule that decided, in words.
    """

    outcome: Outcome
    sentence: str
    rule: str


def verdict_of(ruling: Ruling, rule: str) -> Verdict:
    """Return the verdict of a ruling.

    Args:
        ruling: What a rule says about the results.
        rule: The rule in words.
    """
    is_so, sentence = ruling
    outcome: Outcome = "cannot tell" if is_so is None else "held" if is_so else "did not hold"
    return Verdict(outcome=outcome, sentence=sentence, rule=rule)


def points(difference: float) -> str:
    """A difference of accuracies in words: `0.13 points`."""
    return f"{in_points(abs(difference))} points"


def below(difference: float) -> str:
    """A difference with its direction: `0.13 points below`, or `above` if it is positive."""
    return f"{points(difference)} {'above' if difference > 0 else 'below'}"


def plural(rounds: int) -> str:
    """A number of rounds in words: `1 round`, `3,000 rounds`."""
    return f"{rounds:,} round{'' if rounds == 1 else 's'}"
