"""Exhibits: the content of one table or figure of the paper as plain data, and the functions that build it from results.

An `Exhibit` holds tables of text, figures as lists of points, a verdict, notes and the list of its runs. It does not
depend on how it is displayed: the terminal (`cli/`), the page (`page.py`) and the pictures (`plots.py`) do that.

Every function in `exhibits/` fills a `Draft`, whose methods add tables, and figures of accuracy over rounds or over a
setting:

    draft = Draft(recipe, results)
    draft.add_curves("AccuracyTop1 by round", {"baseline": "no clip", "flat-S15": "S = 15"})
    draft.exhibit(verdict)
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from reproduction.recipe import PaperRun, Recipe, distinct
from reproduction.recipes import RECIPES
from reproduction.results import ResultSet, RunResult
from reproduction.verdict import LEARNED, NEARLY, TRAINED, Undecided, Verdict, in_points, plural, points
from unheard.formatting import NOTHING, Points, epsilon_text, percent, small
from unheard.report.tables import Table

NOT_RUN = "not run"
"""Content of a table cell whose run has no result."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of a figure.

    Lines with the same tint have the same colour, for example a mean and its seeds, or flat and per-layer clipping.
    """

    name: str
    points: Points
    tint: str = ""
    """Name of the colour group; empty for the line's own name."""
    is_dashed: bool = False
    is_thin: bool = False
    """Whether the line is one seed of several, which is drawn thin and faint behind the others."""
    is_level: bool = False
    """Whether the line has one value for every x, and is drawn horizontally from edge to edge."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A figure: lines or points over one horizontal axis."""

    name: str
    """Name of the picture file, without its suffix."""
    title: str
    x: str
    """Label of the horizontal axis. `round` means curves by round; any other label names a setting that was varied."""
    y: str = "AccuracyTop1"
    """Label of the vertical axis."""
    lines: tuple[Line, ...]
    is_log: bool = False
    """Whether the horizontal axis is logarithmic."""
    upright: tuple[float, str] | None = None
    """Position and label of a dashed vertical line; None for no such line."""
    is_scatter: bool = False
    """Whether the figure shows separate points instead of lines."""
    is_share: bool = True
    """Whether the values of y are fractions, which the axis shows in percent."""


@dataclass(frozen=True, kw_only=True)
class Exhibit:
    """One table or figure of the paper, filled with results."""

    recipe: Recipe
    corpus: str
    """Title of the set of results, which names the corpus."""
    tables: tuple[Table, ...] = ()
    figures: tuple[Figure, ...] = ()
    verdict: Verdict
    notes: tuple[str, ...] = ()
    runs: Table
    """One row per run that the exhibit uses: rounds, seed, epsilon, hardware, date and commit."""

    @property
    def runs_done(self) -> int:
        """The number of its runs that have results. The template of the page shows it."""
        return sum(row[1] != NOT_RUN for row in self.runs.rows)

    def as_json(self) -> dict[str, Any]:
        """Return the whole exhibit as values that `json.dumps` accepts."""
        return asdict(self) | {"recipe": self.recipe.summary()}


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
    absent, by_end = [run.name for run in runs if run.name not in results], {}
    for run in (run for run in runs if run.name in results):
        done, wanted = results.runs[run.name].rounds, _wanted_rounds(run, results)
        if done < wanted:
            by_end.setdefault(f"Stopped at {done:,} of {wanted:,} rounds", []).append(run.name)
    tiny = "Tiny runs, with fewer users per round than stated: they only show that everything runs."
    notes = [tiny] if any(_is_tiny(run, results) for run in runs) else []
    notes += [f"Not run: {', '.join(absent)}."] if absent else []
    return notes + [f"{end}: {', '.join(names)}." for end, names in by_end.items()]


def _wanted_rounds(run: PaperRun, results: ResultSet) -> int:
    """Return the number of rounds that the recipe asks for, or for a smoke test the number that it planned."""
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
    rows = [_row(run, results) if run.name in results else [run.name, NOT_RUN, *[NOTHING] * 10] for run in runs]
    columns = ["run", "rounds", "of", "seed", "q", "visits", "AccuracyTop1", "ε", "δ", "users/s", "on", "date, commit"]
    note = (
        "q is the probability that a user takes part in a round; visits are q times rounds. AccuracyTop1 at the end, "
        "smoothed over 5 evaluations. ε is the cost of the run for its own users: the smaller of PLD and RDP. The runs have "
        "known seeds, so that they can be repeated. Their ε does not hold against anyone who knows the seed."
    )
    return Table(title="The runs", columns=columns, rows=rows, note=note if rows else "No run is needed for this one.")


def _row(run: PaperRun, results: ResultSet) -> list[str]:
    """Return the row of `run_table` for a run that has a result."""
    result = results.runs[run.name]
    epsilon, users = own_epsilon(result), result.settings.get("sampling", {}).get("users_per_round")
    population, exposure = result.settings.get("privacy", {}).get("population"), [NOTHING, NOTHING]
    if users and population:
        exposure = [f"{users / population:.2g}", f"{result.rounds * users / population:.2g}"]
    delta = NOTHING if math.isinf(epsilon) else small(result.epsilon.get("delta") or 0.0)
    rounds = [f"{result.rounds:,}", f"{_wanted_rounds(run, results):,}", str(result.seed)]
    figures = [percent(results.accuracy(run.name)), epsilon_text(epsilon), delta, f"{result.users_per_second:,.0f}"]
    return [run.name, *rounds, *exposure, *figures, result.device, f"{result.date}, {result.commit[:9]}"]


def own_epsilon(result: RunResult) -> float:
    """Return the epsilon of a run for its own population: the smaller of PLD and RDP, or infinity without noise."""
    bounds = [value for by in ("pld", "rdp") if (value := result.epsilon.get(by)) is not None]
    return min(bounds, default=math.inf)


CHECKPOINTS = (100, 500, 3000)
"""Numbers of rounds after which the sweeps of the paper show the accuracy."""


class Draft:
    """A table or figure under construction. A function of `exhibits/` fills it and then calls `exhibit`.

    Args:
        recipe: The table or figure.
        results: Results of one corpus.

    Attributes:
        tables: The tables so far.
        figures: The figures so far.
        notes: Remarks below the tables.
        compared_with: Names of runs of other recipes that the exhibit also shows.
        is_over_seeds: Whether the exhibit shows all seeds of a run. Otherwise it shows the first seed, and a note says
            so.
    """

    def __init__(self, recipe: Recipe, results: ResultSet) -> None:
        self.recipe, self.results = recipe, results
        self.tables: list[Table] = []
        self.figures: list[Figure] = []
        self.notes: list[str] = []
        self.compared_with: Iterable[str] = ()
        self.is_over_seeds = False

    def exhibit(self, verdict: Verdict) -> Exhibit:
        """Return the finished exhibit, with the list of its runs and notes on missing runs.

        Figures without a point of a run are left out. Points of level lines do not count.

        Args:
            verdict: The verdict on the conclusion of the paper.
        """
        runs, results, notes = exhibit_runs(self.recipe, self.compared_with), self.results, self.notes
        if not self.is_over_seeds and any(len(results.seeds(run.name)) > 1 for run in runs):
            notes = [*notes, "Of a run with several seeds, only the first is shown here."]
        return Exhibit(
            recipe=self.recipe,
            corpus=results.title,
            tables=tuple(self.tables),
            figures=tuple(f for f in self.figures if any(line.points and not line.is_level for line in f.lines)),
            verdict=verdict,
            notes=(*notes, *gap_notes(runs, results)),
            runs=run_table(runs, results),
        )

    def add_table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], note: str = "") -> None:
        """Add a table (see `Table`)."""
        self.tables.append(Table(title=title, columns=columns, rows=rows, note=note))

    def add_rounds_table(self, labels: Mapping[str, str], marks: Sequence[int] | None = None) -> None:
        """Add a table of the AccuracyTop1 of each run after given numbers of rounds.

        Args:
            labels: The label of each row, by the name of its run.
            marks: The numbers of rounds, one for each column; None for the result of `drawn_rounds`.
        """
        marks = marks or self.drawn_rounds(labels)
        rows = [[label, *(self.cell(name, mark) for mark in marks)] for name, label in labels.items()]
        self.add_table("AccuracyTop1 after some rounds", ["", *(f"{mark:,}" for mark in marks)], rows)

    def add_figure(self, title: str, x: str, lines: Iterable[Line], *, name: str = "", **style: Any) -> None:
        """Add a figure.

        Args:
            title: Title of the figure.
            x: Label of the horizontal axis.
            lines: Its lines.
            name: Name of the figure and of its picture file; empty for the name of the recipe.
            style: Other fields of `Figure`.
        """
        named = name or self.recipe.name
        self.figures.append(Figure(name=named, title=title, x=x, lines=tuple(lines), **style))

    def add_curves(self, title: str, labels: Mapping[str, str], *, first: int = 0, name: str = "") -> None:
        """Add a figure of accuracy by round. If `is_over_seeds` is true, it shows every seed and their mean.

        The figure ends at the last round that at least two lines reach. One run that is longer than all others would
        otherwise compress the part that can be compared.

        Args:
            title: Title of the figure.
            labels: Label of each run by its name.
            first: Number that is added to every round, for runs that continue another run.
            name: Name of the figure and of its picture file; empty for the name of the recipe.
        """
        lines = [line for run, label in labels.items() for line in self._curves(run, label, first)]
        ends = sorted(line.points[-1][0] for line in lines if line.points and not line.is_thin)
        last = ends[-2] if len(ends) > 1 else math.inf
        cut = [replace(line, points=tuple(point for point in line.points if point[0] <= last)) for line in lines]
        self.add_figure(title, "round", cut, name=name)

    def _curves(self, name: str, label: str, first: int) -> list[Line]:
        """Return the lines of one run: its accuracy by round, or thin lines of its seeds and a line of their mean."""
        results, seeds = self.results, self.results.seeds(name)
        if not self.is_over_seeds or len(seeds) < 2:
            points = results.curve(name)
            return [Line(name=label, points=_later(points, first))] if points else []
        named = {f"{label}, seed {results.runs[one].seed}": _later(results.curve(one), first) for one in seeds}
        thin = [Line(name=name, points=points, tint=label, is_thin=True) for name, points in named.items()]
        return [*thin, Line(name=label, points=_later(_mean_curve(results, seeds), first), tint=label)]

    def drawn_rounds(self, names: Iterable[str]) -> tuple[int, ...]:
        """Return the numbers of rounds after which a sweep shows the accuracy: 100, 500 and 3,000 (`CHECKPOINTS`).

        A checkpoint that most runs did not reach is left out. In its place comes the number of rounds that all runs
        completed or, if that is not later than the remaining checkpoints, the number that at least half of them
        completed.

        Args:
            names: The runs of the sweep.
        """
        ends = sorted(self.results.runs[name].rounds for name in names if self.results.curve(name))
        if not ends:
            return CHECKPOINTS
        all_, most = ends[0], ends[(len(ends) - 1) // 2]
        marks = [mark for mark in CHECKPOINTS if mark <= most]
        if len(marks) < len(CHECKPOINTS):
            marks.append(all_ if all_ > max(marks, default=0) else most)
        return tuple(dict.fromkeys(marks))

    def sweep(self, runs: Mapping[float, str], at: int, name: str, *, tint: str = "", dashed: bool = False) -> Line:
        """Return a line of the accuracy after `at` rounds over the values of a setting.

        Args:
            runs: The name of the run by the value of the setting.
            at: The number of rounds.
            name: The name of the line.
            tint: The colour group; empty for its own colour.
            dashed: Whether the line is dashed.
        """
        known = ((x, self.results.accuracy(run, at)) for x, run in sorted(runs.items()))
        drawn = tuple((x, y) for x, y in known if y is not None)
        return Line(name=name, points=drawn, tint=tint or name, is_dashed=dashed)

    def level(self, run: str, at: int, name: str, *, tint: str) -> list[Line]:
        """Return a list with one horizontal line at the accuracy of a run, or an empty list if it has no value.

        Args:
            run: The name of the run.
            at: The number of rounds.
            name: The name of the line.
            tint: The colour group.
        """
        value = self.results.accuracy(run, at)
        return [] if value is None else [Line(name=name, points=((0.0, value),), tint=tint, is_level=True)]

    def cell(self, run: str, at: int | None = None, *, over_seeds: bool = False) -> str:
        """Return AccuracyTop1 as a table cell, or the reason why there is no value: not run, stopped, or not evaluated.

        Args:
            run: The name of the run.
            at: The number of rounds; None for the end of the run.
            over_seeds: Whether the cell is the mean over the seeds of the run.
        """
        value = self.results.mean(run, at) if over_seeds else self.results.accuracy(run, at)
        return self.reason_missing(run, at) if value is None else percent(value)

    def reason_missing(self, run: str, at: int | None = None) -> str:
        """Return why a run has no value after `at` rounds, as a table cell: not run, stopped, or not evaluated."""
        if run not in self.results:
            return NOT_RUN
        rounds = self.results.runs[run].rounds
        return f"stopped at {rounds:,}" if at is not None and rounds < at else "not evaluated"

    def shared_round(self, names: Iterable[str], against: Iterable[str] = ()) -> int:
        """Return the last round that all runs reached, after checking that a rule can be applied to them.

        Args:
            names: Runs that the rule needs.
            against: Runs that serve as the reference of the comparison. Their accuracy must be at least `LEARNED`.

        Raises:
            Undecided: A run is missing or has fewer than `TRAINED` rounds, a reference run has learned nothing, or the
                held-out text is too short.
        """
        names, results = list(names), self.results
        absent = [name for name in names if name not in results]
        if len(absent) == len(names):
            raise Undecided("Not run.")
        if absent:
            raise Undecided(f"Not run yet: {', '.join(absent)}.")
        if unknown := [name for name in names if results.rounds(name) is None]:
            raise Undecided(f"Too few rounds to be evaluated: {', '.join(unknown)}.")
        rounds = results.rounds(*names) or 0
        if rounds < TRAINED:
            raise Undecided(f"After {plural(rounds)} it is too early to tell: the rule needs {TRAINED:,}.")
        self.require_learned(against, rounds)
        self.require_precise(names)
        return rounds

    def require_precise(self, names: Iterable[str]) -> None:
        """Raise `Undecided` if the held-out text is so short that the standard error of an accuracy exceeds `NEARLY`.

        Args:
            names: The runs that a rule needs.
        """
        for name in names:
            accuracy, targets = self.results.value(name), self.results.targets(name)
            error = math.sqrt(accuracy * (1 - accuracy) / targets) if targets else 0.0
            if error > NEARLY:
                text = f"The held-out text is too short to tell: its standard error is {points(error)} for {name}."
                raise Undecided(f"{text} Hold out more users.")

    def require_learned(self, names: Iterable[str], at: int) -> None:
        """Raise `Undecided` if the accuracy of a run is below `LEARNED`.

        Args:
            names: Runs that serve as the reference of a comparison.
            at: The round of the comparison.
        """
        for name in names:
            if (accuracy := self.results.value(name, at)) < LEARNED:
                text = f"After {plural(at)} {name} has {percent(accuracy)}"
                raise Undecided(f"{text}: it has learned nothing, so others cannot be compared with it.")

    def about_seeds(self, differences: Iterable[float], at: int | None = None) -> str:
        """Return a sentence on the variation between seeds, and on whether it could explain the given differences.

        Args:
            differences: Differences of accuracies, as fractions.
            at: The round at which seeds are compared (`ResultSet.seed_distance`); None for the last common round.
        """
        distance = self.results.seed_distance(at)
        if distance is None:
            return "One seed each: chance alone can move a figure by a few tenths of a point."
        inside = all(abs(difference) <= distance for difference in differences)
        words = f"Two seeds of one run lie up to {points(distance)} apart"
        return f"{words}; this is within that." if inside else f"{words}."


def signed(difference: float | None) -> str:
    """Return a difference of accuracies in points with its sign; a dash for None."""
    return in_points(difference, signed=True)


def _mean_curve(results: ResultSet, seeds: Sequence[str]) -> Points:
    """Return the mean accuracy over seeds, at the rounds at which all seeds were evaluated."""
    curves = [dict(points) for one in seeds if (points := results.curve(one))]
    shared = sorted(set.intersection(*(set(one) for one in curves))) if curves else []
    return tuple((round_, math.fsum(one[round_] for one in curves) / len(curves)) for round_ in shared)


def _later(points: Points, first: int) -> Points:
    """Return the points with `first` added to every round."""
    return tuple((round_ + first, value) for round_, value in points)
