"""What the paper recommends and did not do: a public start, then private training: rounds saved at equal accuracy."""

from reproduction.exhibit import NOT_RUN, Exhibit, Table
from reproduction.exhibit_parts import by_round, cell, shown
from reproduction.recipe import Recipe
from reproduction.recipes import PUBLIC
from reproduction.results_query import Found
from reproduction.runs import noised
from reproduction.verdict import Verdict, judged, missing, plural
from unheard.formatting import NOTHING, percent

SCRATCH = noised(15, 0.003).name
STARTED = f"after-public-{SCRATCH}"
LABELS = {SCRATCH: "from nothing", STARTED: "from the public model"}
MARKS = (100, 200, 500, 1000, 1500, 3000, 5000)
FEWER = 0.9
RULE = (
    "The accuracy that training from nothing has where both got to is reached from the public model in at most "
    f"{FEWER:.0%} of the rounds."
)


def public_start(recipe: Recipe, found: Found) -> Exhibit:
    figure = by_round(found, "public-start", "AccuracyTop1 by private round, σ = 0.003, S = 15", LABELS)
    rows = []
    for mark in MARKS:
        target = found.accuracy(SCRATCH, mark)
        rounds = None if target is None else found.reach(STARTED, target)
        saved = NOTHING if rounds is None else f"{mark - rounds:,}"
        rows.append([f"{mark:,}", cell(found, SCRATCH, mark), _reached(found, target, rounds), saved])
    table = Table(
        title="Private rounds to the same accuracy",
        columns=["rounds from nothing", "AccuracyTop1", "from the public model", "saved"],
        rows=rows,
        note=(
            f"Rounds of private training only. The public model ({PUBLIC.name}) cost its own people, who are not "
            "protected, and nobody here."
        ),
    )
    return shown(recipe, found, judge(found), tables=[table], figures=[figure])


def _reached(found: Found, target: float | None, rounds: int | None) -> str:
    if target is None or not found.curve(STARTED):
        return NOTHING if STARTED in found else NOT_RUN
    return f"not within {found.runs[STARTED].rounds:,}" if rounds is None else f"{rounds:,}"


def judge(found: Found) -> Verdict:
    if lacking := missing(found, [SCRATCH, STARTED], RULE, against=[SCRATCH]):
        return lacking
    at = found.rounds(SCRATCH, STARTED) or 0
    target = found.accuracy(SCRATCH, at) or 0.0
    rounds = found.reach(STARTED, target)
    if rounds is None:
        best = max(value for _, value in found.curve(STARTED))
        return judged(
            False,
            f"From nothing {percent(target)} is reached in {plural(at)}; from the public model never (at best {percent(best)}).",
            RULE,
        )
    sentence = (
        f"From nothing {percent(target)} takes {plural(at)}, from the public model {rounds:,}: {at - rounds:,} "
        f"private rounds saved, {100 * (at - rounds) / at:.0f} %."
    )
    return judged(rounds <= FEWER * at, sentence, RULE)
