"""Describe the guarantee of a run in sentences that need no mathematics, followed by the formal statement.

    promise = describe_promise(RunRecord.read("runs/private"))
    promise.headline         # 'A guarantee for every single person'
    promise.paragraphs       # what changes by one person's presence; the same as a bet; the formal statement

Every number comes from the privacy statement of the run and of all runs on the same users, which are computed from the
ledgers. Bounds are rounded up, never down.
"""

import math
from dataclasses import dataclass, replace

from unheard.errors import UnprovenCombination
from unheard.formatting import accountant_title, epsilon_text, odds_factor, small
from unheard.report.run_record import RunRecord

STRONG, WEAK = 1.0, 8.0
"""Up to STRONG an epsilon is called strong, above WEAK weak. A convention, not theory: the number is always shown as
well."""
HEADLINES = {
    "strong": "A strong guarantee for every single person",
    "moderate": "A guarantee for every single person",
    "weak": "A guarantee, but a weak one",
    "none": "An experiment: no guarantee against whoever knows the seed",
    "all": "No guarantee over all runs on these users",
}


@dataclass(frozen=True, kw_only=True)
class Promise:
    """The guarantee of a run in words."""

    headline: str
    grade: str
    """`none`, `weak`, `moderate` or `strong`."""
    paragraphs: tuple[str, ...]
    warnings: tuple[str, ...]
    """The warnings of the privacy statement."""


def describe_promise(record: RunRecord) -> Promise:
    """Describe what each person is promised, or say that there is no guarantee and why.

    Other runs on the same users count: the guarantee is about all of them together, if the store's ledger is here.
    """
    alone = _describe_run(record)
    if not record.is_private:
        return alone
    if record.population_ledger is None:
        unknown = (
            "This is about this run alone: the ledger of its store is not on this machine. Every other run on the same "
            "users adds to what they have spent; `unheard statement STORE` composes them."
        )
        return replace(alone, paragraphs=(*alone.paragraphs, unknown))
    if not record.other_runs:
        return alone
    return _over_all_runs(record, alone)


def _over_all_runs(record: RunRecord, alone: Promise) -> Promise:
    """Return the guarantee over all runs on the same users, followed by what holds for this run by itself."""
    names = record.other_runs
    others = f"{', '.join(names[:4])}{f' and {len(names) - 4} more' if len(names) > 4 else ''}"
    runs = f"The same users were also charged for {'another run' if len(names) == 1 else f'{len(names)} other runs'} ({others})."
    by_itself = (
        "For somebody who sees this model and nothing of the other runs, and if nothing of this run was chosen in the "
        f"light of them, the ε of this run alone holds: {epsilon_text(record.epsilon)} by "
        f"{accountant_title(record.statement['claimed']['accountant'])} at δ = {small(record.delta)}. "
    )
    try:
        total = record.all_runs
    except UnprovenCombination as error:
        return replace(
            alone,
            headline=HEADLINES["all"],
            grade="none",
            paragraphs=(f"{runs} {error}", by_itself + alone.paragraphs[-1]),
        )
    assert total is not None
    epsilon, delta = float(total["claimed"]["epsilon"]), float(total["delta"])
    if math.isinf(epsilon):
        why = total["claim"].split("(", 1)[-1].rstrip(")")
        lost = f"{runs} Over all these runs ε is infinite ({why}): together they promise nobody anything."
        return replace(
            alone, headline=HEADLINES["all"], grade="none", paragraphs=(lost, by_itself + alone.paragraphs[-1])
        )
    grade = "none" if alone.grade == "none" else _grade(epsilon)
    together = (
        f"{runs} Over all these runs ε = {epsilon_text(epsilon)} by {accountant_title(total['claimed']['accountant'])} at "
        f"δ = {small(delta)}, and this is what each person is promised."
    )
    return replace(
        alone,
        headline=HEADLINES[grade],
        grade=grade,
        paragraphs=(together, *_paragraphs(epsilon, delta), by_itself + alone.paragraphs[-1]),
    )


def _grade(epsilon: float) -> str:
    return "strong" if epsilon <= STRONG else "moderate" if epsilon <= WEAK else "weak"


def _describe_run(record: RunRecord) -> Promise:
    """The guarantee of one run by itself."""
    statement = record.statement
    warnings = tuple(warning[0].upper() + warning[1:] for warning in statement["warnings"])
    if not record.is_private:
        return Promise(
            headline="No privacy guarantee",
            grade="none",
            paragraphs=(
                "This model was trained without privacy protection. What one person wrote may be read out of it, in "
                "whole or in part. It is shown for comparison, and should not be given to anyone who may not read the text "
                "itself.",
                f"Why: {statement['claim'].split('(', 1)[-1].rstrip(')')}.",
            ),
            warnings=tuple(warning for warning in warnings if "infinite" not in warning),
        )
    epsilon, delta = record.epsilon, record.delta
    grade = _grade(epsilon)
    # The noise of a seeded run can be recomputed by whoever knows the seed. The paragraphs hold against everybody else.
    if any("REPRODUCIBLE NOISE" in warning for warning in warnings):
        grade = "none"
    return Promise(
        headline=HEADLINES[grade],
        grade=grade,
        paragraphs=(
            *_paragraphs(epsilon, delta),
            f"Formally: ({epsilon:.4g}, {small(delta)})-differential privacy at the level of users, to add or remove one "
            f"user, by {accountant_title(statement['claimed']['accountant'])} over {statement['rounds']['charged']:,} "
            f"charged rounds. By the paper's own accountant (moments) ε is {epsilon_text(float(statement['epsilon']['moments']))}.",
        ),
        warnings=warnings,
    )


def _paragraphs(epsilon: float, delta: float) -> tuple[str, ...]:
    """The bound as a factor on the odds, and as a bet on whether a person took part."""
    unit = "One person means everything they wrote, all of it at once."
    bet = "Somebody who tosses a coin on whether you took part is right 50 times in 100."
    knowing = "with this model, all models before it, unlimited computers and everybody else's text"
    if epsilon > WEAK:
        return (
            f"{unit} Each person's part in this model was limited and covered with noise, but the number that measures what is "
            f"left is large: one person's presence may change the odds of an outcome by a factor of {odds_factor(epsilon)}. By "
            "itself such a bound promises little.",
            f"{bet} The bound leaves open that, {knowing}, they are right {_success_rate(epsilon, delta)}. More users, more "
            "noise or fewer rounds make it smaller; `unheard plan` says by how much.",
        )
    return (
        f"{unit} Whether any one of them took part changes the odds of anything that can be seen of this run, all its models "
        f"included, by a bounded factor: no outcome becomes more than {odds_factor(epsilon)} times as likely, or as unlikely, by "
        f"one person's presence (except for a remainder of δ = {small(delta)}).",
        f"As a bet: {bet[0].lower()}{bet[1:]} Even {knowing}, they are right at most {_success_rate(epsilon, delta)}.",
    )


def _success_rate(epsilon: float, delta: float) -> str:
    """The best success rate of a guess at even odds under (epsilon, delta): (e^epsilon + delta) / (1 + e^epsilon)."""
    wrong = (1.0 - delta) / (1.0 + math.exp(min(epsilon, 700.0)))
    if wrong > 0.005:
        return f"{math.ceil(1000 * (1 - wrong)) / 10:g} times in 100"
    return "nearly always"
