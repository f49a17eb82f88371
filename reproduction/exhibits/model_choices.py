"""The model's two tricks: one embedding for input and output, and word vectors of norm 1."""

from reproduction.exhibit import NOT_RUN, Exhibit, Table
from reproduction.exhibit_parts import by_round, cell, reached, shown
from reproduction.printed import TIED_SMALLER
from reproduction.recipe import Recipe
from reproduction.results_query import Found
from reproduction.verdict import SMALL, Verdict, about_seeds, below, judged, margin, missing, plural, points
from unheard.formatting import percent

OURS, UNTIED = "baseline", "untied-baseline"
UNIT, FREE = "flat-S15", "free-norm-flat-S15"
"""With a clip: without one, free vectors may not train at all at this learning rate, which says nothing of how fast they do."""
SMALLER = (TIED_SMALLER.value - 0.05, TIED_SMALLER.value + 0.05)
"""The paper says about 40 %."""
RULE_TIED = (
    f"The tied model is {SMALLER[0]:.0%} to {SMALLER[1]:.0%} smaller than the untied one; where both got to, it is at most "
    f"{points(SMALL)} below it."
)
RULE_NORM = (
    "Both with a clip of S = 15: with vectors of norm 1 the model reaches, in fewer rounds, the accuracy at which free vectors "
    "ended (or where both got to), and is then above them by more than chance."
)


def tied_embeddings(recipe: Recipe, found: Found) -> Exhibit:
    labels = {OURS: "tied", UNTIED: "untied"}
    return shown(
        recipe,
        found,
        judge_tied(found),
        tables=[_table(found, labels)],
        figures=[by_round(found, "tied-embeddings", "AccuracyTop1 by round", labels)],
    )


def unit_norm(recipe: Recipe, found: Found) -> Exhibit:
    labels = {
        UNIT: "vectors of norm 1, S = 15",
        FREE: "free vectors, S = 15",
        OURS: "vectors of norm 1, no clip",
        f"free-norm-{OURS}": "free vectors, no clip",
    }
    return shown(
        recipe,
        found,
        judge_norm(found),
        tables=[_table(found, labels)],
        figures=[by_round(found, "unit-norm", "AccuracyTop1 by round", labels)],
    )


def judge_tied(found: Found) -> Verdict:
    if lacking := missing(found, [OURS, UNTIED], RULE_TIED, against=[UNTIED]):
        return lacking
    at = found.rounds(OURS, UNTIED)
    tied, untied = found.accuracy(OURS, at) or 0.0, found.accuracy(UNTIED, at) or 0.0
    share = 1 - found.runs[OURS].parameters / found.runs[UNTIED].parameters
    sentence = (
        f"Tied, the model is {100 * share:.0f} % smaller ({found.runs[OURS].parameters:,} parameters against "
        f"{found.runs[UNTIED].parameters:,}) "
        f"and after {plural(at or 0)} {below(tied - untied)} the untied one. {about_seeds(found, [tied - untied], at)}"
    )
    return judged(SMALLER[0] <= share <= SMALLER[1] and tied >= untied - SMALL, sentence, RULE_TIED)


def judge_norm(found: Found) -> Verdict:
    if lacking := missing(found, [UNIT, FREE], RULE_NORM, against=[FREE]):
        return lacking
    at = found.rounds(UNIT, FREE) or 0
    free, unit = found.accuracy(FREE, at) or 0.0, found.accuracy(UNIT, at) or 0.0
    sooner = found.reach(UNIT, free)
    words = f"reach that after {plural(sooner)}" if sooner is not None else "never reach that"
    sentence = (
        f"Free vectors have {percent(free)} after {plural(at)}; vectors of norm 1 {words}, and end at {percent(unit)}. "
        f"{about_seeds(found, [unit - free], at)}"
    )
    if abs(unit - free) <= margin(found, at):
        return judged(None, sentence, RULE_NORM)
    is_faster = sooner is not None and sooner < (found.reach(FREE, free) or at)
    return judged(is_faster and unit > free, sentence, RULE_NORM)


def _table(found: Found, labels: dict[str, str]) -> Table:
    marks = reached(found, labels)
    rows = []
    for name, label in labels.items():
        size = f"{found.runs[name].parameters:,}" if name in found else NOT_RUN
        rows.append([label, size, *(cell(found, name, mark) for mark in marks)])
    return Table(
        title="Size, and AccuracyTop1 after some rounds",
        columns=["", "parameters", *(f"{mark:,}" for mark in marks)],
        rows=rows,
    )
