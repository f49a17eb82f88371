"""From runs to the pieces of an exhibit: lines, sweeps at several rounds, cells of tables.

In: Found and the names of runs. Out: lines, cells, and the exhibit put together. Every exhibit is made with these.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from reproduction.exhibit import NOT_RUN, Exhibit, Figure, Line, Table
from reproduction.listing import lacks, ordered, run_table
from reproduction.recipe import Recipe
from reproduction.results_query import Found
from reproduction.verdict import Verdict, plural
from unheard.formatting import in_points, percent

CHECKPOINTS = (100, 500, 3000)
"""After so many rounds the paper's sweeps are drawn."""


def shown(
    recipe: Recipe,
    found: Found,
    verdict: Verdict,
    *,
    tables: Iterable[Table] = (),
    figures: Iterable[Figure] = (),
    notes: Iterable[str] = (),
    beside: Iterable[str] = (),
    over_seeds: bool = False,
) -> Exhibit:
    """The exhibit, with its list of runs and what they lack; a figure without a line of its own is left out.

    `beside`: runs of other recipes that it is compared with. `over_seeds`: all seeds of a run are in it, not only the first.
    """
    runs = ordered(recipe, beside)
    if not over_seeds and any(len(found.seeds(run.name)) > 1 for run in runs):
        notes = (*notes, "Of a run with several seeds the first is shown here, beside others of that seed.")
    drawn = tuple(f for f in figures if any(line.points and not line.is_level for line in f.lines))
    return Exhibit(
        recipe=recipe,
        corpus=found.title,
        tables=tuple(tables),
        figures=drawn,
        verdict=verdict,
        notes=(*notes, *lacks(runs, found)),
        runs=run_table(runs, found),
    )


def _lines(found: Found, names: Mapping[str, str], *, first: int = 0, over_seeds: bool = False) -> tuple[Line, ...]:
    """Accuracy by round: run name to the name in print. Over seeds: several are thin lines behind their mean."""
    made = []
    for name, label in names.items():
        seeds = found.seeds(name)
        if over_seeds and len(seeds) > 1:
            made += [
                Line(
                    name=f"{label}, seed {found.runs[one].seed}",
                    points=_later(found.curve(one), first),
                    tint=label,
                    is_thin=True,
                )
                for one in seeds
            ]
            made.append(Line(name=label, points=_later(_mean_curve(found, seeds), first), tint=label))
        elif found.curve(name):
            made.append(Line(name=label, points=_later(found.curve(name), first)))
    return tuple(made)


def by_round(
    found: Found, name: str, title: str, names: Mapping[str, str], *, first: int = 0, over_seeds: bool = False
) -> Figure:
    """A figure of curves; `first` is the round that the runs began from. It ends where only one of them goes on: a run
    that other figures need longer would press all that can be compared into a corner."""
    made = _lines(found, names, first=first, over_seeds=over_seeds)
    ends = sorted(line.points[-1][0] for line in made if line.points and not line.is_thin)
    last = ends[-2] if len(ends) > 1 else math.inf
    cut = [replace(line, points=tuple(point for point in line.points if point[0] <= last)) for line in made]
    return Figure(name=name, title=title, x="round", lines=tuple(cut))


def reached(found: Found, names: Iterable[str]) -> tuple[int, ...]:
    """The rounds at which a sweep is drawn: 100, 500, 3,000. If most of its runs stopped before one of them, as far as all got
    instead; as far as most did, if that shows nothing new."""
    ends = sorted(found.runs[name].rounds for name in names if found.curve(name))
    if not ends:
        return CHECKPOINTS
    all_, most = ends[0], ends[(len(ends) - 1) // 2]
    marks = [mark for mark in CHECKPOINTS if mark <= most]
    if len(marks) < len(CHECKPOINTS):
        marks.append(all_ if all_ > max(marks, default=0) else most)
    return tuple(dict.fromkeys(marks))


def sweep(found: Found, runs: Mapping[float, str], at: int, *, name: str, tint: str = "", dashed: bool = False) -> Line:
    """Accuracy after so many rounds against what was swept: its value to the run's name."""
    known = ((x, found.accuracy(run, at)) for x, run in sorted(runs.items()))
    return Line(name=name, points=tuple((x, y) for x, y in known if y is not None), tint=tint or name, is_dashed=dashed)


def by_clip(
    found: Found,
    marks: Iterable[int],
    flat: Mapping[float, str],
    layered: Mapping[float, str],
    *,
    without: tuple[str, str],
) -> tuple[Line, ...]:
    """At each mark, in one colour: what was swept with flat and with per-layer clipping, and the level of the run without it (what
    it lacks, and its name)."""
    lacks, run = without
    made = []
    for mark in marks:
        name = f"after {plural(mark)}"
        made.append(sweep(found, flat, mark, name=f"{name}, flat", tint=name))
        made.append(sweep(found, layered, mark, name=f"{name}, per layer", tint=name, dashed=True))
        made += level(found, run, mark, name=f"{name}, {lacks}", tint=name)
    return tuple(made)


def level(found: Found, run: str, at: int, *, name: str, tint: str = "") -> tuple[Line, ...]:
    """The accuracy of one run as a line from edge to edge; nothing if it did not get there."""
    value = found.accuracy(run, at)
    return () if value is None else (Line(name=name, points=((0.0, value),), tint=tint or name, is_level=True),)


def cell(found: Found, run: str, at: int | None = None) -> str:
    """AccuracyTop1 in print; what was not run says so, what stopped before says where."""
    value = found.accuracy(run, at)
    return lacking(found, run, at) if value is None else percent(value)


def lacking(found: Found, run: str, at: int | None = None) -> str:
    """Why there is no figure of a run after so many rounds."""
    if run not in found:
        return NOT_RUN
    rounds = found.runs[run].rounds
    return f"stopped at {rounds:,}" if at is not None and rounds < at else "not evaluated"


def signed(difference: float | None) -> str:
    """A difference in points, with its sign."""
    return in_points(difference, signed=True)


def _mean_curve(found: Found, seeds: Sequence[str]) -> tuple[tuple[float, float], ...]:
    """Where every seed was evaluated."""
    curves = [dict(found.curve(one)) for one in seeds]
    curves = [one for one in curves if one]
    shared = sorted(set.intersection(*(set(one) for one in curves))) if curves else []
    return tuple((round_, math.fsum(one[round_] for one in curves) / len(curves)) for round_ in shared)


def _later(points: tuple[tuple[float, float], ...], first: int) -> tuple[tuple[float, float], ...]:
    return tuple((round_ + first, value) for round_, value in points)
