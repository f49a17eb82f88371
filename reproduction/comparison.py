"""Compare two sets of results of the same runs, with another setting, with other seeds, or on another corpus.

`comparison_tables(first, second)` returns two tables of text: the outcome of every exhibit in both sets, and the
accuracy of every run in both sets after the number of rounds that both completed. Runs that started from different
models are not compared. The command `python -m reproduction compare` and the pages show these tables.
"""

import re

from reproduction.exhibit import Table, signed
from reproduction.exhibits import EXHIBITS, exhibit
from reproduction.recipe import distinct
from reproduction.recipes import RECIPES
from reproduction.results import ResultSet
from reproduction.verdict import points
from unheard.formatting import percent

SEEDS = re.compile(r"-?seeds\+\d+")
"""Pattern of the part of a results folder's name that states the number added to all seeds, such as `seeds+10`."""


def comparison_tables(first: ResultSet, second: ResultSet) -> tuple[Table, Table]:
    """Return two tables: the outcomes in both sets, and the accuracy of each run in both sets.

    Args:
        first: A set of results.
        second: The set to compare with.
    """
    return _conclusions(first, second), _runs(first, second)


def _conclusions(first: ResultSet, second: ResultSet) -> Table:
    """Return a table of outcomes, with one row per exhibit that both sets decide."""
    rows = []
    for name in EXHIBITS:
        if RECIPES[name].runs:
            one, other = (exhibit(name, results).verdict for results in (first, second))
            if "cannot tell" not in (one.outcome, other.outcome):
                rows.append([name, one.outcome, other.outcome])
    theirs = [row for row in rows if RECIPES[row[0]].is_of_the_paper]
    held = [sum(row[column] == "held" for row in theirs) for column in (1, 2)]
    note = (
        f"Each outcome uses all rounds of its set. {len(theirs)} rows are conclusions of the paper, of which {held[0]} held "
        f"in the first set and {held[1]} in the second; the others are our own expectations."
    )
    columns, nothing = ["", *_names(first, second)], "No conclusion can be drawn from both yet."
    return Table(title="Outcomes in both sets", columns=columns, rows=rows, note=note if rows else nothing)


def _runs(first: ResultSet, second: ResultSet) -> Table:
    """Return a table of accuracies after the rounds that both sets completed, with one row per run in both sets."""
    rows = []
    for run in distinct(RECIPES.values()):
        ends = [end for results in (first, second) if (end := results.rounds(run.name)) is not None]
        if len(ends) < 2 or _began(first, run.name) != _began(second, run.name):
            continue
        at = min(ends)
        one, other = (results.accuracy(run.name, at) for results in (first, second))
        apart = None if one is None or other is None else other - one
        rows.append([run.name, f"{at:,}", percent(one), percent(other), signed(apart)])
    text = f"Points: the second minus the first. {_what_counts(first, second)}"
    return Table(
        title="AccuracyTop1 after the rounds that both completed",
        columns=["run", "rounds", *_names(first, second), "points"],
        rows=rows,
        note=f"Smoothed over 5 evaluations. {text}" if rows else "No run is in both.",
    )


def _what_counts(first: ResultSet, second: ResultSet) -> str:
    """Return a sentence: how large a difference must be to count, or that the sets differ in their seeds only."""
    apart = first.corpus == second.corpus and first.changed != second.changed
    if apart and SEEDS.sub("", first.changed) == SEEDS.sub("", second.changed):
        return "The two sets differ only in their seeds, so all differences are due to chance."
    return f"Two runs differ if they lie over {points(max(results.margin() for results in (first, second)))} apart."


def _names(first: ResultSet, second: ResultSet) -> tuple[str, str]:
    """Return the names of the two results folders as column titles.

    If one name extends the other, as `blogs-model.keep_norm=true` extends `blogs`, only the extension is shown for it.
    """
    one, other = first.folder, second.folder
    return one.removeprefix(f"{other}-"), other.removeprefix(f"{one}-")


def _began(results: ResultSet, name: str) -> str | None:
    """Return which run a run started from, and after how many of its rounds, as text; None if it started anew."""
    return results.runs[name].settings.get("training", {}).get("init_from")
