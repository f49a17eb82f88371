"""Figure 5: a fixed or a variable sample, and the three estimators of the average: convergence does not change."""

from reproduction.exhibit import Exhibit, Table
from reproduction.exhibit_parts import by_round, cell, reached, shown
from reproduction.recipe import Recipe
from reproduction.results_query import Found
from reproduction.verdict import NEARLY, Verdict, about_seeds, idle, judged, missing, plural, points
from unheard.formatting import percent

LABELS = {
    "baseline": "fixed sample, true average",
    "variable-true-average": "variable sample, true average",
    "variable-fixed-denominator": "variable sample, fixed denominator",
    "variable-clipped-denominator": "variable sample, clipped denominator",
}
RULE = f"Where all four got to, the best and the worst are at most {points(NEARLY)} apart."


def estimators(recipe: Recipe, found: Found) -> Exhibit:
    figure = by_round(found, "estimators", "AccuracyTop1 by round", LABELS)
    marks = reached(found, LABELS)
    rows = [[label, *(cell(found, name, mark) for mark in marks)] for name, label in LABELS.items()]
    table = Table(title="AccuracyTop1 after some rounds", columns=["", *(f"{mark:,}" for mark in marks)], rows=rows)
    return shown(recipe, found, judge(found), tables=[table], figures=[figure])


def judge(found: Found) -> Verdict:
    if lacking := missing(found, list(LABELS), RULE):
        return lacking
    at = found.rounds(*LABELS)
    if lacking := idle(found, [max(LABELS, key=lambda name: found.accuracy(name, at) or 0.0)], RULE, at):
        return lacking
    values = {label: found.accuracy(name, at) or 0.0 for name, label in LABELS.items()}
    best, worst = max(values, key=lambda label: values[label]), min(values, key=lambda label: values[label])
    apart = values[best] - values[worst]
    sentence = (
        f"After {plural(at or 0)} all four lie within {points(apart)}: from {percent(values[worst])} ({worst}) to "
        f"{percent(values[best])} ({best}). {about_seeds(found, [apart], at)}"
    )
    return judged(apart <= NEARLY, sentence, RULE)
