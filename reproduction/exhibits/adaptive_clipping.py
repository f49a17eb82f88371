"""A clip that follows a private quantile of the users' norms, beside the best fixed S of a sweep at the same z."""

from reproduction.exhibit import Exhibit, Table
from reproduction.exhibit_parts import by_round, cell, reached, shown
from reproduction.recipe import Recipe
from reproduction.results_query import Found
from reproduction.runs import TRADES, traded
from reproduction.verdict import NEARLY, Verdict, about_seeds, below, idle, judged, missing, plural, points
from unheard.formatting import percent

FIXED = {norm: traded(norm).name for norm in TRADES}
ADAPTIVE = "adaptive-z0.06"
RULE = f"Where all got to, the adaptive clip is at most {points(NEARLY)} below the best S of the sweep."


def adaptive_clipping(recipe: Recipe, found: Found) -> Exhibit:
    labels = {**{name: f"S = {norm:g}" for norm, name in FIXED.items()}, ADAPTIVE: "adaptive"}
    figure = by_round(found, "adaptive-clipping", "AccuracyTop1 by round, z = 0.06", labels)
    marks = reached(found, labels)
    rows = [[label, *(cell(found, name, mark) for mark in marks)] for name, label in labels.items()]
    table = Table(title="AccuracyTop1 after some rounds", columns=["", *(f"{mark:,}" for mark in marks)], rows=rows)
    return shown(recipe, found, judge(found), tables=[table], figures=[figure])


def judge(found: Found) -> Verdict:
    names = [*FIXED.values(), ADAPTIVE]
    if lacking := missing(found, names, RULE):
        return lacking
    at = found.rounds(*names)
    values = {norm: found.accuracy(name, at) or 0.0 for norm, name in FIXED.items()}
    best = max(values, key=lambda norm: values[norm])
    if lacking := idle(found, [FIXED[best]], RULE, at):
        return lacking
    mine = found.accuracy(ADAPTIVE, at) or 0.0
    sentence = (
        f"After {plural(at or 0)} the adaptive clip has {percent(mine)}, {below(mine - values[best])} the best fixed "
        f"one (S = {best:g}, {percent(values[best])}). {about_seeds(found, [mine - values[best]], at)}"
    )
    return judged(mine >= values[best] - NEARLY, sentence, RULE)
