"""Word vectors whose direction alone counts: put back to norm 1 after every round, or left as long as training makes them."""

from unheard.numbers import percent
from unheard.paper.around import GROWN, WORD_NORMS
from unheard.paper.exhibit import Exhibit, Table
from unheard.paper.found import Found
from unheard.paper.recipe import Recipe
from unheard.paper.showing import by_round, cell, shown, signed
from unheard.paper.verdict import Verdict, about_seeds, judged, margin, missing, plural

BASELINE, NOISED, MUCH, CLIPPED = (run.name for run in WORD_NORMS)
LABELS = {BASELINE: "no clip, no noise", CLIPPED: "S = 15", NOISED: "S = 15, σ = 0.003", MUCH: "S = 15, σ = 0.012"}
MARKS = (100, 500, 1000, 1500, 2000, 2500, 3000)
RULE = (
    "Where all got to, each run whose vectors were left to grow is above its twin with vectors put back, or below it by no more "
    "than two seeds can differ; and σ = 0.003 and σ = 0.012 with S = 15 cost it less, against its own baseline, than they cost the "
    "twin."
)


def word_norms(recipe: Recipe, found: Found) -> Exhibit:
    labels = {name: LABELS[name] for name in (BASELINE, NOISED, MUCH)}
    labels |= {grown(name): f"left to grow: {label}" for name, label in labels.items()}
    return shown(
        recipe,
        found,
        judge(found),
        tables=[_both_ways(found), _by_round(found)],
        figures=[by_round(found, "word-norms", "AccuracyTop1 by round", labels)],
    )


def judge(found: Found) -> Verdict:
    names = [*LABELS, *map(grown, LABELS)]
    if lacking := missing(found, names, RULE, against=[BASELINE, grown(BASELINE)]):
        return lacking
    at = found.rounds(*names) or 0
    more = {name: found.apart(grown(name), name, at) or 0.0 for name in LABELS}
    cost = {name: -(found.apart(name, BASELINE, at) or 0.0) for name in (NOISED, MUCH)}
    less = {name: -(found.apart(grown(name), grown(BASELINE), at) or 0.0) for name in (NOISED, MUCH)}
    sentence = (
        f"After {plural(at)} vectors left to grow are {signed(more[BASELINE])} points from those put back without clip and noise, "
        f"{signed(more[CLIPPED])} with S = 15, {signed(more[NOISED])} with σ = 0.003 and {signed(more[MUCH])} with 0.012. "
        f"σ = 0.003 costs them {100 * less[NOISED]:.2f} points ({100 * cost[NOISED]:.2f} put back), 0.012 {100 * less[MUCH]:.2f} "
        f"({100 * cost[MUCH]:.2f}). {about_seeds(found, list(more.values()), at)}"
    )
    is_no_worse = all(better >= -margin(found, at) for better in more.values())
    return judged(is_no_worse and all(less[name] < cost[name] for name in cost), sentence, RULE)


def grown(name: str) -> str:
    """The twin whose vectors were left to grow."""
    return f"{GROWN}-{name}"


def _both_ways(found: Found) -> Table:
    rows = []
    for name, label in LABELS.items():
        at = found.rounds(name, grown(name))
        both = [cell(found, one) if at is None else percent(found.mean(one, at)) for one in (name, grown(name))]
        rows.append([label, "" if at is None else f"{at:,}", *both, signed(found.apart(grown(name), name, at))])
    return Table(
        title="AccuracyTop1 after as many rounds as both got to",
        columns=["", "rounds", "put back", "left to grow", "difference, points"],
        rows=rows,
        note="Mean of the seeds that got so far.",
    )


def _by_round(found: Found) -> Table:
    """How what the clip and the noise cost goes on."""
    end = found.rounds(BASELINE, grown(BASELINE)) or MARKS[-1]
    marks = [mark for mark in MARKS if mark <= end] or [end]
    costs = {
        label: [found.apart(way(NOISED), way(BASELINE), mark) for mark in marks]
        for label, way in (("put back", str), ("left to grow", grown))
    }
    return Table(
        title="S = 15, σ = 0.003 less the baseline of the same kind after some rounds, in points",
        columns=["", *(f"{mark:,}" for mark in marks)],
        rows=[[label, *map(signed, row)] for label, row in costs.items()],
    )
