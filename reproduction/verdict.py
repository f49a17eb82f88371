"""Verdicts: whether a conclusion of the paper held in our runs.

A verdict has one of three outcomes, a sentence with the measured numbers, and the rule that decided. All tolerances
are constants of this module, so that every exhibit uses the same ones. A verdict is always computed from results and
never written by hand.

    at = shared_round(results, ["baseline", "flat-S15"], against=["baseline"])     # or raises `Undecided`
    ruling = loss <= SMALL, f"After {plural(at)} ..."

Inputs are a `ResultSet` and names of runs; the output is a `Verdict`. The rules of the runs with registered
thresholds are in `rules.toml` and `private_results.py`.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from reproduction.results import POINT, ResultSet
from unheard.formatting import in_points, percent

NEARLY = 0.5 * POINT
"""Two accuracies nearly match if they differ by at most this."""
SMALL = 1.0 * POINT
"""An effect is small up to this. (The paper calls 0.13 points negligible, and reports 0.58 and 1.29 as costs.)"""
UNCERTAIN = 0.2 * POINT
"""Two single runs do not differ if they are closer than this, or closer than two seeds of one run."""
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


def shared_round(results: ResultSet, names: Iterable[str], against: Iterable[str] = ()) -> int:
    """Return the last round that all runs reached, if they exist and were trained long enough to be judged.

    Args:
        results: The results of one corpus.
        names: Runs that the rule needs.
        against: Those of the runs that the others are compared with. They must have learned something.

    Raises:
        Undecided: A run is missing, too short or not learned, or the held-out text is too short.
    """
    names = list(names)
    absent = [name for name in names if name not in results]
    if len(absent) == len(names):
        raise Undecided("Not run.")
    if absent:
        raise Undecided(f"Not run yet: {', '.join(absent)}.")
    if unknown := [name for name in names if results.rounds(name) is None]:
        raise Undecided(f"Too few rounds to be evaluated: {', '.join(unknown)}.")
    rounds = results.rounds(*names) or 0
    if rounds < TRAINED:
        raise Undecided(f"After {plural(rounds)} it is too early to tell: the rule asks for {TRAINED:,}.")
    require_learned(results, against, rounds)
    require_precise(results, names)
    return rounds


def require_precise(results: ResultSet, names: Iterable[str]) -> None:
    """Raise `Undecided` unless the held-out text is so long that the standard error of an accuracy is at most `NEARLY`.

    Args:
        results: The results of one corpus.
        names: The runs that a rule needs.
    """
    for name in names:
        accuracy, targets = results.value(name), results.targets(name)
        error = math.sqrt(accuracy * (1 - accuracy) / targets) if targets else 0.0
        if error > NEARLY:
            text = f"The held-out text is too short to tell: its standard error is {points(error)} for {name}."
            raise Undecided(f"{text} Hold out more users.")


def require_learned(results: ResultSet, names: Iterable[str], at: int) -> None:
    """Raise `Undecided` if a run is below the accuracy `LEARNED`.

    Args:
        results: The results of one corpus.
        names: The runs that others are compared with.
        at: The round at which they are compared.
    """
    for name in names:
        if (accuracy := results.value(name, at)) < LEARNED:
            text = f"After {plural(at)} {name} has {percent(accuracy)}"
            raise Undecided(f"{text}: it has learned nothing that others could lose.")


def margin(results: ResultSet, at: int | None = None) -> float:
    """Return how far apart two single runs must be to differ: `UNCERTAIN`, or the distance between seeds if it is larger.

    Args:
        results: The results of one corpus.
        at: The round at which seeds are compared (`ResultSet.seed_distance`).
    """
    return max(UNCERTAIN, results.seed_distance(at) or 0.0)


def about_seeds(results: ResultSet, differences: Iterable[float], at: int | None = None) -> str:
    """Return a sentence on the variation between seeds, and on whether it could explain the given differences.

    Args:
        results: The results of one corpus.
        differences: Differences of accuracies, as fractions.
        at: The round at which seeds are compared (`ResultSet.seed_distance`).
    """
    distance = results.seed_distance(at)
    if distance is None:
        return "One seed each: chance alone can move a figure by a few tenths of a point."
    inside = all(abs(difference) <= distance for difference in differences)
    words = f"Two seeds of one run lie up to {points(distance)} apart"
    return f"{words}; this is within that." if inside else f"{words}."


def points(difference: float) -> str:
    """A difference of accuracies in words: `0.13 points`."""
    return f"{in_points(abs(difference))} points"


def below(difference: float) -> str:
    """A difference with its direction: `0.13 points below`, or `above` if it is positive."""
    return f"{points(difference)} {'above' if difference > 0 else 'below'}"


def plural(rounds: int) -> str:
    """A number of rounds in words: `1 round`, `3,000 rounds`."""
    return f"{rounds:,} round{'' if rounds == 1 else 's'}"
