"""From runs to the pieces of an exhibit: lines, sweeps at several rounds, the list of runs, what is still missing.

In: Found and the names of runs. Out: lines, tables, notes. Every exhibit is made with these.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

from unheard.numbers import NOTHING, epsilon_text, percent, small
from unheard.paper.exhibit import NOT_RUN, Exhibit, Figure, Line, Table
from unheard.paper.found import Found
from unheard.paper.recipe import PaperRun, Recipe, distinct
from unheard.paper.recipes import RECIPES
from unheard.paper.results import RunResult
from unheard.paper.verdict import Verdict, plural

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
) -> Exhibit:
    """The exhibit, with its list of runs and what they lack; a figure without a line of its own is left out.

    `beside`: runs of other recipes that it is compared with.
    """
    runs = ordered(recipe, beside)
    drawn = tuple(f for f in figures if any(line.points and not line.is_level for line in f.lines))
    return Exhibit(
        recipe=recipe,
        corpus=found.title,
        tables=tuple(tables),
        figures=drawn,
        verdict=verdict,
        notes=(*notes, *_lacks(runs, found)),
        runs=_runs(runs, found),
    )


def lines(found: Found, names: Mapping[str, str], *, first: int = 0) -> tuple[Line, ...]:
    """Accuracy by round: run name to the name in print. Several seeds are thin lines behind their mean."""
    made = []
    for name, label in names.items():
        seeds = found.seeds(name)
        if len(seeds) > 1:
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


def by_round(found: Found, name: str, title: str, names: Mapping[str, str], *, first: int = 0) -> Figure:
    """A figure of curves; `first` is the round that the runs began from."""
    return Figure(name=name, title=title, x="round", lines=lines(found, names, first=first))


def reached(found: Found, names: Iterable[str]) -> tuple[int, ...]:
    """The rounds at which a sweep is drawn: 100, 500, 3,000, or as far as most of its runs got instead."""
    ends = sorted(found.runs[name].rounds for name in names if found.curve(name))
    if not ends:
        return CHECKPOINTS
    usual = ends[(len(ends) - 1) // 2]
    marks = [mark for mark in CHECKPOINTS if mark <= usual]
    return tuple(marks if len(marks) == len(CHECKPOINTS) else sorted({*marks, usual}))


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
    if value is not None:
        return percent(value)
    rounds = found.rounds(run)
    return NOT_RUN if rounds is None else f"stopped at {rounds:,}"


def signed(difference: float | None) -> str:
    """A difference in points, with its sign."""
    return NOTHING if difference is None else f"{100 * difference:+.2f}".replace("-", "−")


def ordered(recipe: Recipe, beside: Iterable[str] = ()) -> list[PaperRun]:
    """The recipe's runs, then those of other recipes, each once."""
    known = {run.name: run for run in distinct(RECIPES.values())}
    return list(({run.name: run for run in recipe.runs} | {name: known[name] for name in beside}).values())


def _mean_curve(found: Found, seeds: Sequence[str]) -> tuple[tuple[float, float], ...]:
    """Where every seed was evaluated."""
    curves = [dict(found.curve(one)) for one in seeds]
    curves = [one for one in curves if one]
    shared = sorted(set.intersection(*(set(one) for one in curves))) if curves else []
    return tuple((round_, math.fsum(one[round_] for one in curves) / len(curves)) for round_ in shared)


def _later(points: tuple[tuple[float, float], ...], first: int) -> tuple[tuple[float, float], ...]:
    return tuple((round_ + first, value) for round_, value in points)


def _lacks(runs: Sequence[PaperRun], found: Found) -> list[str]:
    absent = [run.name for run in runs if run.name not in found]
    stopped = [run for run in runs if run.name in found and found.runs[run.name].rounds < run.rounds]
    notes = []
    if any(_is_tiny(run, found) for run in runs):
        notes.append(
            "Tiny runs, with fewer users a round than stated: they show that all of it works, and nothing else."
        )
    if absent:
        notes.append(f"Not run: {', '.join(absent)}.")
    by_end: dict[tuple[int, int], list[str]] = {}
    for run in stopped:
        by_end.setdefault((found.runs[run.name].rounds, run.rounds), []).append(run.name)
    notes += [
        f"Stopped at {done:,} of {asked:,} rounds: {', '.join(names)}." for (done, asked), names in by_end.items()
    ]
    return notes


def _is_tiny(run: PaperRun, found: Found) -> bool:
    drawn = found.runs[run.name].settings.get("sampling", {}) if run.name in found else {}
    return drawn.get("users_per_round", run.users) != run.users


def _runs(runs: Sequence[PaperRun], found: Found) -> Table:
    rows = []
    for run in runs:
        result = found.runs.get(run.name)
        rows.append([run.name, NOT_RUN, *[NOTHING] * 8] if result is None else _row(run, result, found))
    columns = ["run", "rounds", "of", "seed", "AccuracyTop1", "ε", "δ", "users/s", "on", "date, commit"]
    note = (
        "AccuracyTop1 at the end, smoothed over 5 evaluations. ε is what that run itself cost its own users, as it is: the smaller "
        "of PLD and RDP. The runs are seeded, to be repeated: against whoever knows the seed no ε holds."
    )
    return Table(title="The runs", columns=columns, rows=rows, note=note if rows else "No run is needed for this one.")


def _row(run: PaperRun, result: RunResult, found: Found) -> list[str]:
    epsilon = own_epsilon(result)
    return [
        run.name,
        f"{result.rounds:,}",
        f"{run.rounds:,}",
        str(result.seed),
        percent(found.accuracy(run.name)),
        epsilon_text(epsilon),
        NOTHING if math.isinf(epsilon) else small(result.epsilon.get("delta") or 0.0),
        f"{result.users_per_second:,.0f}",
        result.device,
        f"{result.date}, {result.commit[:9]}",
    ]


def own_epsilon(result: RunResult) -> float:
    """What the run cost its own population: the smaller bound of PLD and RDP."""
    bounds = [value for by in ("pld", "rdp") if (value := result.epsilon.get(by)) is not None]
    return min(bounds, default=math.inf)
