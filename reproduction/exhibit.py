"""Exhibits: the content of one table or figure of the paper as plain data, and the functions that build it from results.

An `Exhibit` holds tables of text, figures as lists of points, a verdict, notes and the list of its runs. The terminal
(`cli/`), the page (`page.py`) and the pictures (`plots.py`) display it; nothing here depends on how.

Every module in `exhibits/` uses the functions below: `curves_by_round` for accuracy over rounds, `sweep_line` and
`clip_lines` for accuracy over a setting after 100, 500 and 3,000 rounds, `cell` and `signed` for table cells, and
`build_exhibit` to put the parts together.

    figure = curves_by_round(results, "clip", "AccuracyTop1 by round", {"baseline": "no clip", "flat-S15": "S = 15"})
    build_exhibit(recipe, results, verdict, tables=[table], figures=[figure])
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from reproduction.recipe import PaperRun, Recipe, distinct
from reproduction.recipes import RECIPES
from reproduction.results import ResultSet, RunResult
from reproduction.verdict import Verdict, plural
from unheard.formatting import NOTHING, Points, epsilon_text, in_points, percent, small
from unheard.report.tables import Table

NOT_RUN = "not run"
"""Content of a table cell whose run has no result."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of a figure. Lines with the same tint have the same colour: a mean and its seeds, flat and per-layer
    clipping."""

    name: str
    points: Points
    tint: str = ""
    """Name of the colour group; empty means the line's own name."""
    is_dashed: bool = False
    is_thin: bool = False
    """Drawn faintly behind the others: one seed of several."""
    is_level: bool = False
    """One value for every x: drawn from edge to edge."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """Lines over one axis. `name` is the name of its picture file."""

    name: str
    title: str
    x: str
    """Label of the horizontal axis. `round` is time; any other label is a setting that was varied."""
    y: str = "AccuracyTop1"
    lines: tuple[Line, ...]
    is_log: bool = False
    upright: tuple[float, str] | None = None
    """Position and label of a dashed vertical line."""
    is_scatter: bool = False
    """Whether the points are drawn without joining them, each with its name."""
    is_share: bool = True
    """Whether y is a fraction that is written in percent."""


@dataclass(frozen=True, kw_only=True)
class Exhibit:
    """One table or figure of the paper, filled with results."""

    recipe: Recipe
    corpus: str
    tables: tuple[Table, ...] = ()
    figures: tuple[Figure, ...] = ()
    verdict: Verdict
    notes: tuple[str, ...] = ()
    runs: Table
    """The runs behind it: rounds, seed, epsilon, hardware, date and commit."""

    def as_json(self) -> dict[str, Any]:
        """The whole exhibit as values that JSON can hold."""
        content = asdict(self)
        content["recipe"] = {
            "name": self.recipe.name,
            "title": self.recipe.title,
            "place": self.recipe.location,
            "claim": self.recipe.claim,
            "runs": [run.name for run in self.recipe.runs],
        }
        return content


def exhibit_runs(recipe: Recipe, compared_with: Iterable[str] = ()) -> list[PaperRun]:
    """Return the runs of a recipe, then the runs of other recipes that it is compared with, each once.

    Args:
        recipe: The recipe.
        compared_with: Names of runs of other recipes.
    """
    known = {run.name: run for run in distinct(RECIPES.values())}
    return list(({run.name: run for run in recipe.runs} | {name: known[name] for name in compared_with}).values())


def gap_notes(runs: Sequence[PaperRun], results: ResultSet) -> list[str]:
    """Return notes on runs that are missing, that stopped early, or that were smoke tests.

    Args:
        runs: The runs of an exhibit.
        results: The results of one corpus.
    """
    absent = [run.name for run in runs if run.name not in results]
    wanted = {run.name: _wanted_rounds(run, results) for run in runs if run.name in results}
    stopped = [name for name, rounds in wanted.items() if results.runs[name].rounds < rounds]
    notes = []
    if any(_is_tiny(run, results) for run in runs):
        notes.append(
            "Tiny runs, with fewer users per round than stated: they show that all of it works, and nothing else."
        )
    if absent:
        notes.append(f"Not run: {', '.join(absent)}.")
    by_end: dict[tuple[int, int], list[str]] = {}
    for name in stopped:
        by_end.setdefault((results.runs[name].rounds, wanted[name]), []).append(name)
    notes += [f"Stopped at {done:,} of {all_:,} rounds: {', '.join(names)}." for (done, all_), names in by_end.items()]
    return notes


def _wanted_rounds(run: PaperRun, results: ResultSet) -> int:
    """Number of rounds that the recipe asks for; smoke tests have their own."""
    return results.runs[run.name].planned if _is_tiny(run, results) else run.rounds


def _is_tiny(run: PaperRun, results: ResultSet) -> bool:
    """Whether the run had fewer users per round than the recipe states, as in a smoke test."""
    drawn = results.runs[run.name].settings.get("sampling", {}) if run.name in results else {}
    return drawn.get("users_per_round", run.users) != run.users


def run_table(runs: Sequence[PaperRun], results: ResultSet) -> Table:
    """Return a table with one row per run, including runs without a result.

    Args:
        runs: The runs of an exhibit.
        results: The results of one corpus.
    """
    rows = []
    for run in runs:
        result = results.runs.get(run.name)
        rows.append([run.name, NOT_RUN, *[NOTHING] * 10] if result is None else _row(run, result, results))
    columns = ["run", "rounds", "of", "seed", "q", "visits", "AccuracyTop1", "ε", "δ", "users/s", "on", "date, commit"]
    note = (
        "q is the probability that a user takes part in a round; visits are q times rounds. AccuracyTop1 at the end, "
        "smoothed over 5 evaluations. ε is what that run itself cost its own users, as it "
        "is: the smaller "
        "of PLD and RDP. The runs are seeded, to be repeated: against whoever knows the seed no ε holds."
    )
    return Table(title="The runs", columns=columns, rows=rows, note=note if rows else "No run is needed for this one.")


def _row(run: PaperRun, result: RunResult, results: ResultSet) -> list[str]:
    epsilon = own_epsilon(result)
    return [
        run.name,
        f"{result.rounds:,}",
        f"{_wanted_rounds(run, results):,}",
        str(result.seed),
        *_exposure(result),
        percent(results.accuracy(run.name)),
        epsilon_text(epsilon),
        NOTHING if math.isinf(epsilon) else small(result.epsilon.get("delta") or 0.0),
        f"{result.users_per_second:,.0f}",
        result.device,
        f"{result.date}, {result.commit[:9]}",
    ]


def _exposure(result: RunResult) -> tuple[str, str]:
    """q and the mean number of rounds in which a user took part, as table cells."""
    users = result.settings.get("sampling", {}).get("users_per_round")
    population = result.settings.get("privacy", {}).get("population")
    if not users or not population:
        return NOTHING, NOTHING
    return f"{users / population:.2g}", f"{result.rounds * users / population:.2g}"


def own_epsilon(result: RunResult) -> float:
    """Epsilon of a run for its own population: the smaller bound of PLD and RDP; infinite without noise."""
    bounds = [value for by in ("pld", "rdp") if (value := result.epsilon.get(by)) is not None]
    return min(bounds, default=math.inf)


CHECKPOINTS = (100, 500, 3000)
"""Numbers of rounds after which the sweeps of the paper are drawn."""


def build_exhibit(
    recipe: Recipe,
    results: ResultSet,
    verdict: Verdict,
    *,
    tables: Iterable[Table] = (),
    figures: Iterable[Figure] = (),
    notes: Iterable[str] = (),
    compared_with: Iterable[str] = (),
    over_seeds: bool = False,
) -> Exhibit:
    """Put an exhibit together, with the list of its runs and notes on what is missing. A figure without points is left
    out.

    Args:
        recipe: The table or figure.
        results: Results of one corpus.
        verdict: Whether the claim of the recipe held.
        tables: Tables in the order of display.
        figures: Figures in the order of display.
        notes: Remarks below the tables.
        compared_with: Names of runs of other recipes that appear in it.
        over_seeds: Whether all seeds of a run are in it. Otherwise only the first is, and a note says so.
    """
    runs = exhibit_runs(recipe, compared_with)
    if not over_seeds and any(len(results.seeds(run.name)) > 1 for run in runs):
        notes = (*notes, "Of a run with several seeds the first is shown here, beside others of that seed.")
    drawn = tuple(f for f in figures if any(line.points and not line.is_level for line in f.lines))
    return Exhibit(
        recipe=recipe,
        corpus=results.title,
        tables=tuple(tables),
        figures=drawn,
        verdict=verdict,
        notes=(*notes, *gap_notes(runs, results)),
        runs=run_table(runs, results),
    )


def _lines(
    results: ResultSet, names: Mapping[str, str], *, first: int = 0, over_seeds: bool = False
) -> tuple[Line, ...]:
    """Lines of accuracy by round, from the names of runs to their labels. With `over_seeds`, single seeds are thin lines
    behind their mean."""
    lines = []
    for name, label in names.items():
        seeds = results.seeds(name)
        if over_seeds and len(seeds) > 1:
            lines += [
                Line(
                    name=f"{label}, seed {results.runs[one].seed}",
                    points=_later(results.curve(one), first),
                    tint=label,
                    is_thin=True,
                )
                for one in seeds
            ]
            lines.append(Line(name=label, points=_later(_mean_curve(results, seeds), first), tint=label))
        elif results.curve(name):
            lines.append(Line(name=label, points=_later(results.curve(name), first)))
    return tuple(lines)


def curves_by_round(
    results: ResultSet, name: str, title: str, names: Mapping[str, str], *, first: int = 0, over_seeds: bool = False
) -> Figure:
    """A figure of accuracy by round.

    The figure ends where only one run continues, so that a run without a counterpart does not compress the part that
    can be compared.

    Args:
        results: Results of one corpus.
        name: Name of the figure and of its picture file.
        title: Title of the figure.
        names: Label of each run by its name.
        first: Round at which the runs started, if they continue another run.
        over_seeds: Whether to draw every seed and the mean instead of the first seed.
    """
    lines = _lines(results, names, first=first, over_seeds=over_seeds)
    ends = sorted(line.points[-1][0] for line in lines if line.points and not line.is_thin)
    last = ends[-2] if len(ends) > 1 else math.inf
    cut = [replace(line, points=tuple(point for point in line.points if point[0] <= last)) for line in lines]
    return Figure(name=name, title=title, x="round", lines=tuple(cut))


def drawn_rounds(results: ResultSet, names: Iterable[str]) -> tuple[int, ...]:
    """Return the rounds at which a sweep is drawn: 100, 500 and 3,000.

    If most runs stopped before one of them, it is replaced by the number of rounds that all runs completed, or, if that adds
    nothing, by the number that most runs completed.

    Args:
        results: The results of one corpus.
        names: The runs of the sweep.
    """
    ends = sorted(results.runs[name].rounds for name in names if results.curve(name))
    if not ends:
        return CHECKPOINTS
    all_, most = ends[0], ends[(len(ends) - 1) // 2]
    marks = [mark for mark in CHECKPOINTS if mark <= most]
    if len(marks) < len(CHECKPOINTS):
        marks.append(all_ if all_ > max(marks, default=0) else most)
    return tuple(dict.fromkeys(marks))


def sweep_line(
    results: ResultSet, runs: Mapping[float, str], at: int, *, name: str, tint: str = "", dashed: bool = False
) -> Line:
    """Return a line of the accuracy after `at` rounds over the values of a setting.

    Args:
        results: The results of one corpus.
        runs: The name of the run by the value of the setting.
        at: The number of rounds.
        name: The name of the line.
        tint: The colour group; empty for a colour of its own.
        dashed: Whether the line is dashed.
    """
    known = ((x, results.accuracy(run, at)) for x, run in sorted(runs.items()))
    return Line(name=name, points=tuple((x, y) for x, y in known if y is not None), tint=tint or name, is_dashed=dashed)


def clip_lines(
    results: ResultSet,
    marks: Iterable[int],
    flat: Mapping[float, str],
    layered: Mapping[float, str],
    *,
    without: tuple[str, str],
) -> tuple[Line, ...]:
    """For every number of rounds in `marks`, in one colour: the sweep with flat clipping, with per-layer clipping, and
    the level of a reference run.

    Args:
        results: Results of one corpus.
        marks: Numbers of rounds.
        flat: Value of the setting to the name of the run with flat clipping.
        layered: The same for per-layer clipping.
        without: Label and name of the reference run (no clip, or no noise).
    """
    label, run = without
    lines = []
    for mark in marks:
        name = f"after {plural(mark)}"
        lines.append(sweep_line(results, flat, mark, name=f"{name}, flat", tint=name))
        lines.append(sweep_line(results, layered, mark, name=f"{name}, per layer", tint=name, dashed=True))
        lines += level_line(results, run, mark, name=f"{name}, {label}", tint=name)
    return tuple(lines)


def level_line(results: ResultSet, run: str, at: int, *, name: str, tint: str = "") -> tuple[Line, ...]:
    """Return the accuracy of one run as a horizontal line; nothing if it did not complete `at` rounds.

    Args:
        results: The results of one corpus.
        run: The name of the run.
        at: The number of rounds.
        name: The name of the line.
        tint: The colour group; empty for a colour of its own.
    """
    value = results.accuracy(run, at)
    return () if value is None else (Line(name=name, points=((0.0, value),), tint=tint or name, is_level=True),)


def rounds_table(results: ResultSet, labels: Mapping[str, str], marks: Sequence[int]) -> Table:
    """Return a table of the AccuracyTop1 of each run after each number of rounds.

    Args:
        results: The results of one corpus.
        labels: The label of each row, by the name of its run.
        marks: The numbers of rounds, one for each column.
    """
    rows = [[label, *(cell(results, name, mark) for mark in marks)] for name, label in labels.items()]
    return Table(title="AccuracyTop1 after some rounds", columns=["", *(f"{mark:,}" for mark in marks)], rows=rows)


def cell(results: ResultSet, run: str, at: int | None = None) -> str:
    """Return AccuracyTop1 as a table cell, or the reason why there is no value.

    Args:
        results: The results of one corpus.
        run: The name of the run.
        at: The number of rounds; None for the end of the run.
    """
    value = results.accuracy(run, at)
    return reason_missing(results, run, at) if value is None else percent(value)


def reason_missing(results: ResultSet, run: str, at: int | None = None) -> str:
    """Return why a run has no value after `at` rounds: not run, stopped, or not evaluated.

    Args:
        results: The results of one corpus.
        run: The name of the run.
        at: The number of rounds; None for the end of the run.
    """
    if run not in results:
        return NOT_RUN
    rounds = results.runs[run].rounds
    return f"stopped at {rounds:,}" if at is not None and rounds < at else "not evaluated"


def signed(difference: float | None) -> str:
    """A difference in points with its sign."""
    return in_points(difference, signed=True)


def _mean_curve(results: ResultSet, seeds: Sequence[str]) -> tuple[tuple[float, float], ...]:
    """Mean over seeds at the rounds at which all of them were evaluated."""
    curves = [dict(results.curve(one)) for one in seeds]
    curves = [one for one in curves if one]
    shared = sorted(set.intersection(*(set(one) for one in curves))) if curves else []
    return tuple((round_, math.fsum(one[round_] for one in curves) / len(curves)) for round_ in shared)


def _later(points: tuple[tuple[float, float], ...], first: int) -> tuple[tuple[float, float], ...]:
    """The points with `first` added to every round."""
    return tuple((round_ + first, value) for round_, value in points)
