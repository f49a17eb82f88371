"""The L2 penalty on updates that the paper tried: it was hoped to make clipping needless, and did not help."""

from reproduction.exhibit import Exhibit, Table
from reproduction.exhibit_parts import by_round, cell, reached, shown, signed
from reproduction.recipe import Recipe
from reproduction.results_query import Found
from reproduction.runs import clipped
from reproduction.verdict import Verdict, about_seeds, judged, margin, missing, plural

WITHOUT = clipped(15).name
WITH = {penalty: f"{WITHOUT}-penalty{penalty:g}" for penalty in (0.001, 0.01)}
RULE = "Where all got to, no penalty is above the run without one by more than two seeds can differ."


def update_penalty(recipe: Recipe, found: Found) -> Exhibit:
    labels = {WITHOUT: "no penalty", **{name: f"penalty {penalty:g}" for penalty, name in WITH.items()}}
    figure = by_round(found, "update-penalty", "AccuracyTop1 by round, S = 15", labels)
    marks = reached(found, labels)
    rows = [[label, *(cell(found, name, mark) for mark in marks)] for name, label in labels.items()]
    table = Table(title="AccuracyTop1 after some rounds", columns=["", *(f"{mark:,}" for mark in marks)], rows=rows)
    return shown(recipe, found, judge(found), tables=[table], figures=[figure])


def judge(found: Found) -> Verdict:
    names = [WITHOUT, *WITH.values()]
    if lacking := missing(found, names, RULE, against=[WITHOUT]):
        return lacking
    at = found.rounds(*names)
    plain = found.accuracy(WITHOUT, at) or 0.0
    gains = {penalty: (found.accuracy(name, at) or 0.0) - plain for penalty, name in WITH.items()}
    listed = " and ".join(f"{signed(gain)} points at {penalty:g}" for penalty, gain in gains.items())
    sentence = (
        f"After {plural(at or 0)} the penalty changes AccuracyTop1 by {listed}. "
        f"{about_seeds(found, list(gains.values()), at)}"
    )
    return judged(max(gains.values()) <= margin(found, at), sentence, RULE)
