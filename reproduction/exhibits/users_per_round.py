"""Figure 6: more users a round help, with diminishing returns."""

from reproduction.exhibit import Exhibit, Figure, Table
from reproduction.exhibit_parts import by_round, cell, reached, shown, sweep
from reproduction.recipe import Recipe
from reproduction.results_query import Found
from reproduction.runs import baseline
from reproduction.verdict import Verdict, about_seeds, judged, margin, missing, plural
from unheard.formatting import in_points

RUNS = {users: baseline(users).name for users in (10, 30, 100, 300, 1000)}
ENDS = [RUNS[10], RUNS[100], RUNS[1000]]
RULE = (
    "Where all got to, 100 users a round are above 10 by more than two seeds can differ; from 100 to 1,000 the gain "
    "is smaller than from 10 to 100, and no loss beyond that difference."
)


def users_per_round(recipe: Recipe, found: Found) -> Exhibit:
    labels = {name: f"{users:,} users a round" for users, name in RUNS.items()}
    curves = by_round(found, "users-per-round", "AccuracyTop1 by round", labels)
    marks = reached(found, RUNS.values())
    by_users = Figure(
        name="users-per-round-by-C",
        title="AccuracyTop1 against users a round",
        x="users a round",
        lines=tuple(sweep(found, {float(u): n for u, n in RUNS.items()}, m, name=f"after {plural(m)}") for m in marks),
        is_log=True,
    )
    rows = [[labels[name], *(cell(found, name, mark) for mark in marks)] for name in RUNS.values()]
    table = Table(title="AccuracyTop1 after some rounds", columns=["", *(f"{mark:,}" for mark in marks)], rows=rows)
    return shown(recipe, found, judge(found), tables=[table], figures=[curves, by_users])


def judge(found: Found) -> Verdict:
    if lacking := missing(found, ENDS, RULE, against=[RUNS[100]]):
        return lacking
    at = found.rounds(*ENDS)
    few, some, many = (found.accuracy(name, at) or 0.0 for name in ENDS)
    first, second = some - few, many - some
    sentence = (
        f"After {plural(at or 0)} going from 10 to 100 users a round gains {in_points(first)} points, from 100 to 1,000 "
        f"{in_points(second)}. {about_seeds(found, [first, second], at)}"
    )
    same = margin(found, at)
    return judged(first > same and -same <= second < first, sentence, RULE)
