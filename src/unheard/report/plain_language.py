"""What a run promises each person, in words that need no mathematics; and the same in the reviewer's.

In: a RunRecord. Out: sentences. Every number in them comes from the statement, which comes from the ledger.
"""

import math
from dataclasses import dataclass

from unheard.formatting import epsilon_text, raised, small
from unheard.report.run_record import RunRecord

WEAK, STRONG = 8.0, 1.0
"""Where we say that an epsilon promises little, and where that it promises much. Custom, not theory: the number stands beside."""


@dataclass(frozen=True, kw_only=True)
class InWords:
    """A headline, paragraphs for anybody, and lines for a reviewer."""

    headline: str
    grade: str
    """none, weak, moderate or strong: only for colour and a word; the sentences carry the meaning."""
    paragraphs: tuple[str, ...]
    warnings: tuple[str, ...]


def in_words(record: RunRecord) -> InWords:
    told = record.statement
    warnings = tuple(warning[0].upper() + warning[1:] for warning in told["warnings"])
    if not record.is_private:
        return InWords(
            headline="No privacy guarantee",
            grade="none",
            paragraphs=(
                "This model was trained without privacy protection. What one person wrote may be read out of "
                "it, in whole or in part. It is here for comparison, and should not leave the people who may read the text.",
                f"Why: {told['claim'].split('(', 1)[-1].rstrip(')')}.",
            ),
            warnings=tuple(w for w in warnings if "infinite" not in w),
        )
    epsilon, delta = record.epsilon, record.delta
    grade = "strong" if epsilon <= STRONG else "moderate" if epsilon <= WEAK else "weak"
    if any("REPRODUCIBLE NOISE" in warning for warning in warnings):
        grade = "none"  # a seed is known: the sentences below hold against those who do not know it, and the warning says so
    return InWords(
        headline={
            "strong": "A strong guarantee for every single person",
            "moderate": "A guarantee for every single person",
            "weak": "A guarantee, but a weak one",
            "none": "An experiment: no guarantee against whoever knows the seed",
        }[grade],
        grade=grade,
        paragraphs=(
            *_promise(epsilon, delta),
            f"Formally: ({epsilon:.4g}, {small(delta)})-differential privacy at the level of users, to add or remove one "
            f"user, by the {told['claimed']['accountant'].upper()} accountant over {told['rounds']['charged']:,} charged "
            f"rounds. By the paper's own accountant ε is {epsilon_text(float(told['epsilon']['moments']))}.",
        ),
        warnings=warnings,
    )


def _promise(epsilon: float, delta: float) -> tuple[str, ...]:
    one = "One person means everything they wrote, all of it at once."
    coin = "Somebody who tosses a coin on whether you took part is right 50 times in 100."
    given = "with this model, all models before it, unlimited computers and everybody else's text"
    if epsilon > WEAK:
        return (
            f"{one} Each person's part in this model was limited and covered with noise, but the number that measures what is "
            f"left is large: one person's presence may change the odds of an outcome by a factor of {_factor(epsilon)}. By "
            "itself such a bound promises little, and this page does not pretend otherwise.",
            f"{coin} The bound leaves open that, {given}, they are right {_bet(epsilon, delta)}. More users, more noise or "
            "fewer rounds make it smaller; unheard plan says by how much.",
        )
    return (
        f"{one} Whether any one of them took part changes the odds of anything that can be seen of this run, all its models "
        f"included, by a bounded factor: no outcome becomes more than {_factor(epsilon)} times as likely, or as unlikely, by "
        f"one person's presence (but for a remainder of δ = {small(delta)}).",
        f"As a bet: {coin[0].lower()}{coin[1:]} Even {given}, they are right at most {_bet(epsilon, delta)}.",
    )


def _factor(epsilon: float) -> str:
    """e^epsilon in three digits, rounded up: a bound that is rounded down is no bound."""
    if epsilon > math.log(1e6):
        return f"10{raised(math.ceil(epsilon / math.log(10)))}"
    factor = math.exp(epsilon)
    digits = 10.0 ** (math.floor(math.log10(factor)) - 2)
    return f"{math.ceil(factor / digits - 1e-9) * digits:,.10g}"


def _bet(epsilon: float, delta: float) -> str:
    """The best success of a guess at even odds under (epsilon, delta): (e^epsilon + delta) / (1 + e^epsilon)."""
    wrong = (1.0 - delta) / (1.0 + math.exp(min(epsilon, 700.0)))
    if wrong > 0.005:
        return f"{math.ceil(1000 * (1 - wrong)) / 10:g} times in 100"
    return "nearly always"
