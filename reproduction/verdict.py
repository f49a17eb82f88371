"""Whether a conclusion of the paper held here: three answers, each with a sentence and the rule that decided.

In: numbers. Out: Verdict. Tolerances stand here, once, so that no figure gets one of its own. A verdict is computed, never typed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from reproduction.results_query import POINT, Found
from unheard.formatting import in_points, percent

NEARLY = 0.5 * POINT
"""At most so far apart, two accuracies nearly match."""
SMALL = 1.0 * POINT
"""At most so much is a small effect. (The paper calls 0.13 points negligible, and shows 0.58 and 1.29 as costs.)"""
UNCERTAIN = 0.2 * POINT
"""Below this, or below the distance between two seeds if that is more, two single runs do not differ."""
TRAINED = 500
"""Fewer rounds say nothing about a trained model."""
LEARNED = 5.0 * POINT
"""Below this a run has learned no more than to say the most frequent words, or has gone astray. Nothing can be held against it:
noise costs nothing where there is nothing to lose."""

Outcome = Literal["held", "did not hold", "cannot tell"]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The answer, the sentence with its numbers, and the rule."""

    outcome: Outcome
    sentence: str
    rule: str


def judged(is_so: bool | None, sentence: str, rule: str) -> Verdict:
    """None: the numbers do not decide."""
    outcome: Outcome = "cannot tell" if is_so is None else "held" if is_so else "did not hold"
    return Verdict(outcome=outcome, sentence=sentence, rule=rule)


def missing(
    found: Found, names: Sequence[str], rule: str, least: int = TRAINED, against: Sequence[str] = ()
) -> Verdict | None:
    """Why nothing can be said, if these runs are not all there or did not get far enough to say anything; or if those of them that
    the others are held `against` have learned nothing."""
    absent = [name for name in names if name not in found]
    if len(absent) == len(names):
        return judged(None, "Not run.", rule)
    if absent:
        return judged(None, f"Not run yet: {', '.join(absent)}.", rule)
    if unknown := [name for name in names if found.rounds(name) is None]:
        return judged(None, f"Too few rounds to be evaluated: {', '.join(unknown)}.", rule)
    rounds = found.rounds(*names)
    if rounds is not None and rounds < least:
        return judged(None, f"After {plural(rounds)} it is too early to tell: the rule asks for {least:,}.", rule)
    return idle(found, against, rule, rounds) or blurred(found, names, rule)


def blurred(found: Found, names: Sequence[str], rule: str) -> Verdict | None:
    """Why nothing can be said, if the held-out text is so short that two accuracies nearly match, or not, by chance alone."""
    for name in names:
        accuracy, targets = found.accuracy(name) or 0.0, found.targets(name)
        error = math.sqrt(accuracy * (1 - accuracy) / targets) if targets else 0.0
        if error > NEARLY:
            told = f"The held-out text is too short to tell: its standard error is {points(error)} for {name}."
            return judged(None, f"{told} Hold out more users.", rule)
    return None


def idle(found: Found, names: Sequence[str], rule: str, at: int | None) -> Verdict | None:
    """Why nothing can be held against these runs, if one of them has learned nothing."""
    for name in names:
        accuracy = found.accuracy(name, at) or 0.0
        if accuracy < LEARNED:
            sentence = f"After {plural(at or 0)} {name} has {percent(accuracy)}: it has learned nothing that others could lose."
            return judged(None, sentence, rule)
    return None


def margin(found: Found, at: int | None = None) -> float:
    """How far apart two single runs must lie to differ."""
    return max(UNCERTAIN, found.seed_distance(at) or 0.0)


def about_seeds(found: Found, differences: Sequence[float], at: int | None = None) -> str:
    """A sentence on the noise of training, where several seeds were run; said of differences that it could explain."""
    distance = found.seed_distance(at)
    if distance is None:
        return "One seed each: chance alone can move a figure by a few tenths of a point."
    inside = all(abs(difference) <= distance for difference in differences)
    words = f"Two seeds of one run lie up to {points(distance)} apart"
    return f"{words}; this is within that." if inside else f"{words}."


def points(difference: float) -> str:
    """A difference of accuracies in words: 0.13 points."""
    return f"{in_points(abs(difference))} points"


def below(difference: float) -> str:
    """First less second: `0.13 points below` if the first is lower."""
    return f"{points(difference)} {'above' if difference > 0 else 'below'}"


def plural(rounds: int) -> str:
    return f"{rounds:,} round{'' if rounds == 1 else 's'}"
