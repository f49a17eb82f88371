"""Figure 3: AccuracyTop1 against sigma at S = 20, flat and per layer; 0.2 is what z = 1 would need with 100 users a round."""

from reproduction.exhibit import Exhibit, Figure, Table
from reproduction.exhibit_parts import by_clip, cell, reached, shown
from reproduction.figures import NOISES
from reproduction.printed import DROWNED
from reproduction.recipe import Recipe
from reproduction.results_query import Found
from reproduction.runs import clipped, noised
from reproduction.verdict import NEARLY, SMALL, Verdict, about_seeds, judged, margin, missing, plural, points
from unheard.formatting import in_points, percent

FLAT = {sigma: noised(20, sigma).name for sigma in NOISES}
LAYERED = {sigma: noised(20, sigma, "per_layer").name for sigma in NOISES}
QUIET, QUIET_LAYERED = clipped(20).name, clipped(20, "per_layer").name
NEEDED = DROWNED.value
"""sigma for z = 1 at S = 20 with 100 users a round: the dashed line of the figure."""
EARLY = 100
RULE = (
    f"With flat clipping: after {EARLY} rounds σ = 0.024 costs at most {points(NEARLY)}; at the end σ = 0.012 costs at most "
    f"{points(SMALL)}, 0.024 costs more than that, and σ = 0.2 loses more than half of the accuracy. Where 0.024 and 0.012 lie no "
    "further apart than two seeds can, it cannot be told."
)


def noise(recipe: Recipe, found: Found) -> Exhibit:
    marks = _marks(found)
    figure = Figure(
        name="noise",
        title="AccuracyTop1 against σ, S = 20",
        x="σ",
        lines=by_clip(found, marks, FLAT, LAYERED, without=("no noise", QUIET)),
        is_log=True,
        upright=(NEEDED, "σ = 0.2"),
    )
    columns = ["", *(f"{kind}, {mark:,}" for mark in marks for kind in ("flat", "per layer"))]
    rows = [["no noise", *(cell(found, name, mark) for mark in marks for name in (QUIET, QUIET_LAYERED))]]
    rows += [
        [f"σ = {sigma:g}", *(cell(found, runs[sigma], mark) for mark in marks for runs in (FLAT, LAYERED))]
        for sigma in NOISES
    ]
    table = Table(title="AccuracyTop1 by σ, kind of clip and rounds", columns=columns, rows=rows)
    return shown(recipe, found, judge(found), tables=[table], figures=[figure])


def judge(found: Found) -> Verdict:
    needed = [QUIET, FLAT[0.012], FLAT[0.024], FLAT[NEEDED]]
    if lacking := missing(found, needed, RULE, against=[QUIET]):
        return lacking
    at = found.rounds(*needed)
    early, quiet = found.accuracy(QUIET, EARLY) or 0.0, found.accuracy(QUIET, at) or 0.0
    soon = early - (found.accuracy(FLAT[0.024], EARLY) or 0.0)
    small, more, drowned = (quiet - (found.accuracy(FLAT[sigma], at) or 0.0) for sigma in (0.012, 0.024, NEEDED))
    left = quiet - drowned
    sentence = (
        f"After {EARLY} rounds σ = 0.024 costs {in_points(soon)} points. After {plural(at or 0)} σ = 0.012 costs "
        f"{in_points(small)}, 0.024 "
        f"{in_points(more)}, and at 0.2 {percent(left)} is left of {percent(quiet)}. {about_seeds(found, [small], at)}"
    )
    held = soon <= NEARLY and small <= SMALL and left < quiet / 2
    is_open = abs(more - small) <= margin(found, at)
    return judged(None if held and is_open else held and more > small, sentence, RULE)


def _marks(found: Found) -> tuple[int, ...]:
    return reached(found, [QUIET, QUIET_LAYERED, *FLAT.values(), *LAYERED.values()])
