"""The report's tables and plots, in a terminal.
Bars for work in named steps, on stderr, so that what is printed can be piped.
What training looks like in a terminal: one bar with the round, held-out accuracy and the epsilon spent so far.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

steps_console = Console(stderr=True, soft_wrap=True)


@contextmanager
def bar() -> Iterator[Callable[[str, float], None]]:
    """One bar for each step, on stderr, with an estimate of the time left."""
    columns = (
        TextColumn("[bold]{task.description:<14}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=steps_console) as display:
        tasks: dict[str, TaskID] = {}

        def progress(step: str, fraction: float) -> None:
            if step not in tasks:
                tasks[step] = display.add_task(step, total=1.0)
            display.update(tasks[step], completed=fraction)

        yield progress


if TYPE_CHECKING:
    from unheard.training.loop import RoundReport

console = Console()
notes = Console(stderr=True)


def say(sentence: str) -> None:
    """A sentence, as it is: never broken at a column, so that paths and commands in it can be copied and searched for."""
    console.print(sentence, markup=False, highlight=False, soft_wrap=True)


def warn_of_delta(delta: float) -> None:
    """Beside the bar or the table, before anybody's text is read: a delta that promises little."""
    from unheard.privacy.planner import caution

    if sentence := caution(delta):
        notes.print(sentence, style="bold yellow", markup=False, highlight=False, soft_wrap=True)


def warn_of_no_noise(corpus: Path | str) -> None:
    """Before the first round, when it can still be stopped: what is charged without noise can never be taken back."""
    sentence = (
        f"Without noise epsilon is infinite, and from the first round on it is so over all runs on the people of {corpus}, for "
        "good (unheard statement --all-runs). Right for public text, or for people who agreed: if these are not, press Ctrl-C now."
    )
    notes.print(sentence, style="bold yellow", markup=False, highlight=False, soft_wrap=True)


@contextlib.contextmanager
def if_interrupted(sentence: str) -> Iterator[None]:
    """Ctrl-C ends a command with a word on what is saved and how to go on, never in silence."""
    try:
        yield
    except KeyboardInterrupt:
        notes.print(f"Stopped. {sentence}", markup=False, highlight=False, soft_wrap=True)
        raise


def epsilon_text(epsilon: float | None) -> str:
    if epsilon is None or math.isinf(epsilon):
        return "∞"
    return f"{epsilon:.3g}" if epsilon < 1000 else f"{epsilon:.0f}"


def show(
    reports: Iterator["RoundReport"], title: str, stop_after: float | None = None, *, folder: Path | None = None
) -> "RoundReport | None":
    """Draw the bar while the rounds go by; leave at a round's end when the time is up. The last report comes back.

    With the run's `folder`, TensorBoard's event files follow each evaluation.
    """
    began, last, accuracy = time.monotonic(), None, None
    columns = (
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=None),
        TextColumn("round"),
        MofNCompleteColumn(),
        TextColumn("{task.fields[figures]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    stopped = if_interrupted(f"What was done is saved: unheard resume {folder or 'DIR'} goes on.")
    # The generator is closed when we leave it, which saves its state; `with` makes sure that this happens now, not later.
    with stopped, Progress(*columns, console=notes, refresh_per_second=4) as bar:
        task = bar.add_task(title, total=None, figures="starting")
        try:
            for last in reports:
                accuracy = last.metrics["accuracy_top1"] if last.metrics else accuracy
                shown = "" if accuracy is None else f"top-1 {100 * accuracy:5.2f} %  "
                figures = f"{shown}ε {epsilon_text(last.epsilon)} at δ {last.delta:.1e}"
                if last.metrics:
                    log(f"{title}: round {last.round} of {last.rounds}, {figures}")
                    if folder:
                        _follow(folder)
                bar.update(task, completed=last.round, total=last.rounds, figures=figures)
                if stop_after is not None and time.monotonic() - began >= stop_after:
                    break
        finally:
            reports.close()  # pyright: ignore[reportAttributeAccessIssue]
    return last


def show_together(
    reports: Iterator[tuple[int, "RoundReport"]], names: list[str], stop_after: float | None = None
) -> dict[int, "RoundReport"]:
    """A bar for each of several runs; the last report of each comes back."""
    began, last, before = time.monotonic(), {}, -1
    going = set(range(len(names)))
    columns = (
        TextColumn("[bold]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[figures]}"),
    )
    stopped = if_interrupted("What was done is saved: the same command goes on.")
    with stopped, Progress(*columns, TimeRemainingColumn(), console=notes, refresh_per_second=4) as bar:
        tasks = [bar.add_task(name, total=None, figures="starting") for name in names]
        accuracy: dict[int, float] = {}
        try:
            for place, report in reports:
                last[place] = report
                if report.metrics:
                    accuracy[place] = report.metrics["accuracy_top1"]
                shown = f"top-1 {100 * accuracy[place]:5.2f} %  " if place in accuracy else ""
                figures = f"{shown}ε {epsilon_text(report.epsilon)}"
                if report.metrics:
                    log(f"{names[place]}: round {report.round} of {report.rounds}, {figures}")
                bar.update(tasks[place], completed=report.round, total=report.rounds, figures=figures)
                if place <= before:
                    going &= set(last)  # a second turn: whoever has said nothing was complete before
                if report.round >= report.rounds or report.stopped:
                    going.discard(place)
                before = place
                # every run has learned from its cohort when the last of those still going reports
                is_turn_over = place >= max(going, default=place)
                if is_turn_over and stop_after is not None and time.monotonic() - began >= stop_after:
                    break
        finally:
            reports.close()  # pyright: ignore[reportAttributeAccessIssue]
    return last


def log(line: str) -> None:
    """A line for each evaluation where nobody sees a bar: in the log of a batch job it would come at the very end."""
    if not notes.is_terminal:
        notes.print(line, markup=False, highlight=False, soft_wrap=True)


def _follow(folder: Path) -> None:
    """TensorBoard's files, if they can be had. Rounds cost people's privacy: no plot that fails may end a run."""
    from unheard.report.tensorboard import update_event_file
    from unheard.run_folder import RunFolder

    with contextlib.suppress(Exception):
        update_event_file(RunFolder(folder))


if TYPE_CHECKING:
    from unheard.report.tables import Table

FIGURE = 16
"""A cell of so many letters or fewer is read as one figure, and not broken."""
COLOURS = ("blue", "orange", "green", "magenta", "cyan", "red")


def print_table(table: "Table") -> None:
    """A table of text cells; the first column names the rows. What a narrow terminal would cut is printed as a list instead."""
    from rich.padding import Padding
    from rich.table import Table as RichTable
    from rich.text import Text

    title, widths = Text(table.title, style="bold"), _least_widths(table)
    if table.rows:
        console.print()
    if sum(widths) + 3 * (len(widths) - 1) > console.width:
        console.print(title)
        for row in table.rows:
            told = (f"{name} {cell}" for name, cell in zip(table.columns[1:], row[1:], strict=True) if cell)
            console.print(Text(row[0]))
            console.print(Padding(Text(" · ".join(told), style="dim"), (0, 0, 0, 4)))
    elif table.rows:
        made = RichTable(title=title, title_justify="left", show_edge=False, pad_edge=False)
        for i, (column, width) in enumerate(zip(table.columns, widths, strict=True)):
            made.add_column(Text(column), justify="left" if i == 0 else "right", overflow="fold", min_width=width)
        for row in table.rows:
            made.add_row(*(Text(cell) for cell in row))
        console.print(made)
    if table.note:
        console.print(Text(table.note, style="dim"))


def _least_widths(table: "Table") -> list[int]:
    """For each column what leaves every word whole, and every figure on one line."""
    from rich.cells import cell_len

    def least(i: int) -> int:
        cells = [row[i] for row in table.rows]
        figures = [cell for cell in cells if i > 0 and len(cell) <= FIGURE]
        words = [word for text in (table.columns[i], *cells) for word in text.split()]
        return max(map(cell_len, [*figures, *words]), default=0)

    return [least(i) for i in range(len(table.columns))] if table.rows else []


def print_curves(title: str, points: Sequence[dict[str, Any]], field: str, *, times: float = 1.0) -> None:
    """Curves by round, one for each run. Nothing, where there is nothing to draw."""
    drawn = curves(points, field, width=min(console.width, 100), height=16, times=times)
    if drawn is not None:
        console.print()
        console.print(title, style="bold", markup=False, highlight=False)
        console.print(drawn)


def curves(points: Sequence[dict[str, Any]], field: str, *, width: int, height: int, times: float = 1.0) -> Any:
    """Curves as text for Rich; None without points."""
    import plotext
    from rich.text import Text

    names = list(dict.fromkeys(point["run"] for point in points))
    if not names or width < 20 or height < 5:
        return None
    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plot_size(width, height)
    for i, name in enumerate(names):
        mine = [point for point in points if point["run"] == name]
        colour = COLOURS[i % len(COLOURS)]
        x, y = [point["round"] for point in mine], [times * point[field] for point in mine]
        plotext.plot(x, y, label=name if len(names) > 1 else None, marker="braille", color=colour)
    rounds = [point["round"] for point in points]
    low, high = min(rounds), max(rounds)
    plotext.xticks(sorted({round(low + i * (high - low) / 4) for i in range(5)}))
    plotext.xlabel("round")
    return Text.from_ansi(plotext.build())
