"""Figure 2: AccuracyTop1 against S after 100, 500 and 3,000 rounds, flat and per layer."""

from reproduction.exhibit import Exhibit, Figure, Table
from reproduction.exhibit_parts import by_clip, cell, reached, shown
from reproduction.figures import CLIPS, VARIABLE
from reproduction.recipe import Recipe
from reproduction.results_query import Found
from reproduction.runs import clipped
from reproduction.verdict import SMALL, Verdict, about_seeds, judged, missing, plural, points

FLAT = {norm: clipped(norm).name for norm in CLIPS}
LAYERED = {norm: clipped(norm, "per_layer").name for norm in CLIPS}
FREE = VARIABLE.name
RANGE = (10, 15, 20)
RULE = (
    "At every round drawn that all of them reached, and where they all got to, flat and (where it was run) per-layer clipping with "
    f"S = 10, 15 and 20 are at most {points(SMALL)} below the run without a clip."
)


def clipping(recipe: Recipe, found: Found) -> Exhibit:
    marks = _marks(found)
    lines = by_clip(found, marks, FLAT, LAYERED, without=("no clip", FREE))
    figure = Figure(name="clipping", title="AccuracyTop1 against S", x="S", lines=lines, is_log=True)
    columns = ["", *(f"{kind}, {mark:,}" for mark in marks for kind in ("flat", "per layer"))]
    rows = [
        [f"S = {norm:g}", *(cell(found, runs[norm], mark) for mark in marks for runs in (FLAT, LAYERED))]
        for norm in CLIPS
    ]
    rows.append(["no clip", *(text for mark in marks for text in (cell(found, FREE, mark), ""))])
    table = Table(title="AccuracyTop1 by S, kind of clip and rounds", columns=columns, rows=rows)
    return shown(recipe, found, judge(found), tables=[table], figures=[figure])


def judge(found: Found) -> Verdict:
    needed = [FREE, *(FLAT[norm] for norm in RANGE)]
    if lacking := missing(found, needed, RULE, against=[FREE]):
        return lacking
    losses = {}
    # The sweep is drawn where most of its runs got to, which may be too early to tell.
    for mark in sorted({*_marks(found), found.rounds(*needed) or 0}):
        free = found.accuracy(FREE, mark)
        if any(found.accuracy(FLAT[norm], mark) is None for norm in RANGE):
            continue  # the one that lost most may be the one that is missing
        for kind, runs in (("flat", FLAT), ("per layer", LAYERED)):
            for norm in RANGE:
                value = found.accuracy(runs[norm], mark)
                if free is not None and value is not None:
                    losses[free - value] = (kind, norm, mark)
    if not losses:
        return judged(None, "No two of the runs were evaluated at the same round.", RULE)
    most = max(losses)
    kind, norm, mark = losses[most]
    last = max(place[2] for place in losses.values())
    end = max(loss for loss, place in losses.items() if place[2] == last)
    sentence = (
        f"With S from 10 to 20 the largest loss against no clip is {points(max(most, 0.0))} (S = {norm:g}, {kind}, "
        f"after {plural(mark)}); after {plural(last)} it is {points(max(end, 0.0))}. {about_seeds(found, [most], last)}"
    )
    return judged(most <= SMALL, sentence, RULE)


def _marks(found: Found) -> tuple[int, ...]:
    return reached(found, [FREE, *FLAT.values(), *LAYERED.values()])
