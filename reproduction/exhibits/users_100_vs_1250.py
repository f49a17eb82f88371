"""Figure 7: 100 against 1,250 users a round at the same sigma, and whether a cheap run may stand for a private one."""

from reproduction.exhibit import Exhibit, Table
from reproduction.exhibit_parts import by_round, cell, shown, signed
from reproduction.recipe import Recipe
from reproduction.results_query import Found
from reproduction.runs import noised
from reproduction.verdict import NEARLY, Verdict, about_seeds, below, judged, missing, plural, points
from unheard.formatting import percent

FEW, MANY = noised(15, 0.012).name, noised(15, 0.012, users=1250).name
LABELS = {FEW: "100 users a round", MANY: "1,250 users a round"}
EARLY = 100
"""Before this, smoothing over five evaluations looks back to the very beginning."""
MARKS = (100, 500, 1000, 2000, 3000)
RULE = (
    f"From round {EARLY} to where both got, the two smoothed curves lie at most {points(NEARLY)} apart on average, "
    "and at the end."
)


def users_100_vs_1250(recipe: Recipe, found: Found) -> Exhibit:
    figure = by_round(found, "users-100-vs-1250", "AccuracyTop1 by round, σ = 0.012, S = 15", LABELS)
    rows = []
    for mark in MARKS:
        few, many = found.accuracy(FEW, mark), found.accuracy(MANY, mark)
        gap = None if few is None or many is None else many - few
        rows.append([f"{mark:,}", cell(found, FEW, mark), cell(found, MANY, mark), signed(gap)])
    table = Table(
        title="AccuracyTop1 after some rounds",
        columns=["rounds", *LABELS.values(), "difference, points"],
        rows=rows,
    )
    return shown(recipe, found, judge(found), tables=[table], figures=[figure])


def judge(found: Found) -> Verdict:
    if lacking := missing(found, [FEW, MANY], RULE, against=[FEW]):
        return lacking
    at = found.rounds(FEW, MANY) or 0
    apart = [(r, d) for r, d in found.distances(MANY, FEW, after=EARLY) if r <= at]
    few, many = found.accuracy(FEW, at) or 0.0, found.accuracy(MANY, at) or 0.0
    if not apart:
        return judged(None, "The two runs were never evaluated at the same round.", RULE)
    mean = sum(abs(d) for _, d in apart) / len(apart)
    where, most = max(apart, key=lambda pair: abs(pair[1]))
    sentence = (
        f"From round {EARLY:,} on the curves lie {points(mean)} apart on average, at most {points(most)} (round {where:,}). After "
        f"{plural(at)} 1,250 users a round are {below(many - few)} 100 ({percent(many)} against {percent(few)}). "
        f"{about_seeds(found, [many - few], at)}"
    )
    return judged(mean <= NEARLY and abs(many - few) <= NEARLY, sentence, RULE)
