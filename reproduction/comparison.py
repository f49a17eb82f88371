"""Two sets of results beside each other: the same runs with another setting, another seed, or on another corpus.

In: two Founds. Out: tables of text. Runs are compared where both got to; those that began from different models are not.
"""

import re

from reproduction.exhibit import Table
from reproduction.exhibit_parts import signed
from reproduction.exhibits import EXHIBITS, exhibit
from reproduction.recipe import distinct
from reproduction.recipes import RECIPES
from reproduction.results_query import Found
from reproduction.verdict import margin, points
from unheard.formatting import percent

SEEDS = re.compile(r"-?seeds\+\d+")
"""In the name of a folder of results: all seeds were moved by so many."""


def beside(first: Found, second: Found) -> tuple[Table, Table]:
    """What both concluded, and what each run of both reached."""
    return _conclusions(first, second), _runs(first, second)


def _conclusions(first: Found, second: Found) -> Table:
    rows = []
    for name in EXHIBITS:
        if RECIPES[name].runs:
            one, other = (exhibit(name, found).verdict for found in (first, second))
            if "cannot tell" not in (one.outcome, other.outcome):
                rows.append([name, one.outcome, other.outcome])
    return Table(
        title="What was concluded from both",
        columns=["", *_names(first, second)],
        rows=rows,
        note=_counted(rows) if rows else "No conclusion can be drawn from both yet.",
    )


def _counted(rows: list[list[str]]) -> str:
    theirs = [row for row in rows if RECIPES[row[0]].is_of_the_paper]
    held = [sum(row[column] == "held" for row in theirs) for column in (1, 2)]
    return (
        f"Each from all rounds that its set has. {len(theirs)} are conclusions of the paper, of which {held[0]} held in the first "
        f"and {held[1]} in the second; the others are expectations of our own."
    )


def _runs(first: Found, second: Found) -> Table:
    rows = []
    for run in distinct(RECIPES.values()):
        ends = [found.rounds(run.name) for found in (first, second)]
        known = [end for end in ends if end is not None]
        if len(known) < 2 or _began(first, run.name) != _began(second, run.name):
            continue
        at = min(known)
        one, other = (found.accuracy(run.name, at) for found in (first, second))
        apart = None if one is None or other is None else other - one
        rows.append([run.name, f"{at:,}", percent(one), percent(other), signed(apart)])
    told = f"Points: the second less the first. {_what_counts(first, second)}"
    return Table(
        title="AccuracyTop1 after as many rounds as both got to",
        columns=["run", "rounds", *_names(first, second), "points"],
        rows=rows,
        note=f"Smoothed over 5 evaluations. {told}" if rows else "No run is in both.",
    )


def _what_counts(first: Found, second: Found) -> str:
    """How far apart two runs differ, or that only chance is between them."""
    apart = first.corpus == second.corpus and first.changed != second.changed
    if apart and SEEDS.sub("", first.changed) == SEEDS.sub("", second.changed):
        return "The two sets differ in their seeds alone: what lies between two runs is chance."
    return f"Two runs differ if they lie over {points(max(map(margin, (first, second))))} apart."


def _names(first: Found, second: Found) -> tuple[str, str]:
    """Their folders, the longer name without what it shares with the other: `model.keep_norm=true`."""
    one, other = first.folder, second.folder
    return one.removeprefix(f"{other}-"), other.removeprefix(f"{one}-")


def _began(found: Found, name: str) -> str | None:
    """The run that it began from, and after how many of its rounds."""
    return found.runs[name].settings.get("training", {}).get("init_from")
