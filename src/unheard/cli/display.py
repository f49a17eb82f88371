"""What commands print: sentences and warnings, progress bars, tables, and curves drawn with characters.

Results go to `console` (standard output), everything else to `notes` (standard error), so that results can be piped. A
progress bar in a log file would only appear at its end; there `log` prints a line for each evaluation instead.

    say(sentence), echo(text)                     one sentence, or plain text, on standard output
    safe_console()                                a Rich console for what these do not do
    warn_of_delta(delta)                          a warning before a run begins
    show_noise(run), warn_of_noise(level)         sigma, and a warning if the noise will dominate the updates
    confirm_no_noise(runs, yes)                   the question before a run without noise
    with step_bars() as progress: ...             one bar for each named step: progress(step, fraction)
    with counted_bar() as progress: ...           the same for counted steps: progress(step, done, total)
    show_rounds(reports, title), show_runs(...)   the bars of one training run, or of several side by side
    print_table(table), print_curves(...)         tables and curves of `report/`
"""

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook, RenderResult
from rich.padding import Padding
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.segment import Segment
from rich.table import Table as RichTable
from rich.text import Text

from unheard.cli.processes import is_rank, let_unwind, stop_message
from unheard.formatting import SEPARATOR, accountant_title, epsilon_text, printable, small

if TYPE_CHECKING:
    from unheard.privacy.planner import NoiseLevel
    from unheard.report.tables import Table
    from unheard.training.loop import RoundReport
    from unheard.training.run import Run

logger = logging.getLogger("unheard.cli")


class _Printable(RenderHook):
    """Shows control characters in anything that a console prints as escapes (`formatting.printable`)."""

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        """Wrap everything that the console is about to print."""
        return [_PrintableRenderable(renderable) for renderable in renderables]


class _PrintableRenderable:
    def __init__(self, renderable: ConsoleRenderable) -> None:
        self._renderable = renderable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segment in console.render(self._renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


def safe_console(**options: Any) -> Console:
    """Make a Rich console that shows control characters as escapes. Arguments are those of `rich.console.Console`."""
    console = Console(emoji=False, **options)  # a path with `:M:` in it is printed as it is
    console.push_render_hook(_Printable())
    return console


console = safe_console()
notes = safe_console(stderr=True)

FIGURE_WIDTH = 16
"""A table cell of at most this many characters is a figure and is never broken over two lines."""
COLOURS = ("blue", "orange", "green", "magenta", "cyan", "red")


def say(sentence: str) -> None:
    """Print a sentence without breaking lines, so that paths and commands in it can be copied and searched for."""
    logger.info(sentence.strip())
    console.print(sentence, markup=False, highlight=False, soft_wrap=True)


def echo(text: str, *, nl: bool = True) -> None:
    """Print text on standard output as it is, except that control characters are shown as escapes."""
    typer.echo(printable(text), nl=nl)


def note(sentence: str, style: str = "") -> None:
    """Print a sentence on standard error."""
    logger.info(sentence)
    notes.print(sentence, style=style, markup=False, highlight=False, soft_wrap=True)


def warn_of_delta(delta: float) -> None:
    """Warn, before any text is read, of a delta so large that the guarantee is worth little."""
    from unheard.privacy.planner import caution

    if sentence := caution(delta):
        note(sentence, style="bold yellow")


def show_noise(run: "Run") -> None:
    """Print sigma before the first round of a private run, and warn if the noise will dominate the updates."""
    from unheard.training.initialise import noise_level, pinned

    if (level := noise_level(pinned(run))) is not None:
        warn_of_noise(level)


def warn_of_noise(level: "NoiseLevel") -> None:
    """Print sigma, or a warning with advice if the noise will dominate the updates."""
    if sentence := level.caution():
        note(sentence, style="bold yellow")
    else:
        note(str(level))


def confirm_no_noise(runs: "Sequence[Run]", yes: bool, *, can_ask: bool = True) -> bool:
    """Ask before the first round of a run without noise, which cannot be taken back once it is charged.

    Args:
        runs: What will be trained. Nothing is asked if all of them add noise.
        yes: `--yes`: print the warning and do not ask.
        can_ask: False in a process that a launcher started: it has no terminal to read from.

    Returns:
        Whether a run without noise is among them and was allowed: `allow_no_privacy` of `train`.

    Raises:
        PrivacyError: There is no terminal to ask on, and `yes` is False.
        typer.Exit: The answer was no.
    """
    from unheard.mechanism.noise import NoNoise
    from unheard.training.initialise import check_permission

    without_noise = [run for run in runs if isinstance(run.plan.noise, NoNoise)]
    if not without_noise:
        return False
    if not yes and not (can_ask and sys.stdin.isatty() and notes.is_terminal):
        check_permission(without_noise[0], allow_no_privacy=False)
    note(
        "Without noise epsilon is infinite. From the first round on it is infinite over all runs on the users of "
        f"{without_noise[0].corpus}, permanently (unheard statement --all-runs). That is right for public text, or for users who "
        "agreed.",
        style="bold yellow",
    )
    if not yes and not typer.confirm("Train without noise?", default=False, err=True):
        note("Not started: nothing was charged.")
        raise typer.Exit(1)
    return True


@contextlib.contextmanager
def if_interrupted(sentence: str = "") -> Iterator[None]:
    """Print what is kept and how to continue if Ctrl-C ends the block, except in a rank, whose launcher prints it.

    Args:
        sentence: What to print; by default the message of `processes.set_stop_message`.
    """
    try:
        yield
    except KeyboardInterrupt:
        if not is_rank():
            note(f"unheard: {f'Stopped. {sentence}' if sentence else stop_message()}")
        raise


def log(line: str) -> None:
    """Print a line on standard error if that is not a terminal.

    In a log file a progress bar would appear only at its end.
    """
    if not notes.is_terminal:
        note(line)


@contextlib.contextmanager
def step_bars() -> Iterator[Callable[[str, float], None]]:
    """Show one bar for each named step; the block calls `progress(step, fraction)`."""
    columns = (TextColumn("[bold]{task.description:<14}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with _bars(*columns, TimeRemainingColumn()) as update:
        yield lambda step, fraction: update(step, fraction, 1.0)


@contextlib.contextmanager
def counted_bar() -> Iterator[Callable[[str, int, int], None]]:
    """Show one bar for each named step; the block calls `progress(step, done, total)`."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with _bars(*columns) as update:
        yield update


@contextlib.contextmanager
def _bars(*columns: ProgressColumn) -> Iterator[Callable[[str, float, float], None]]:
    """Yield a function that draws one bar for each step."""
    with Progress(*columns, console=notes, refresh_per_second=4) as display:
        tasks: dict[str, TaskID] = {}

        def update(step: str, done: float, total: float) -> None:
            """Set how much of a step is done; adds its bar at the first call."""
            if step not in tasks:
                tasks[step] = display.add_task(printable(step), total=total)
            display.update(tasks[step], completed=done, total=total)

        yield update


def show_rounds(
    reports: Iterator["RoundReport"],
    title: str,
    stop_after: float | None = None,
    *,
    folder: Path | None = None,
    track: Sequence[str] | None = None,
) -> "RoundReport | None":
    """Show the progress of one training run: round, held-out accuracy and the epsilon spent so far.

    Args:
        reports: The reports that `train` or `resume` yields. They are closed at the end, which saves the run.
        title: The name on the bar.
        stop_after: Seconds after which to stop, at the end of a round.
        folder: The run folder, for the trackers.
        track: Where to copy the evaluations to, `report.tracking.TRACKERS`; by default to TensorBoard's event files.

    Returns:
        The last report, None if there was none.
    """
    from unheard.report.tracking import Tracking

    start, last, accuracy = time.monotonic(), None, None
    columns = (
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=None),
        TextColumn("round"),
        MofNCompleteColumn(),
        TextColumn("{task.fields[figures]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    let_unwind()
    tracking = Tracking(path=folder, kinds=tuple(track or ("tensorboard",))) if folder else None
    with if_interrupted(), Progress(*columns, console=notes, refresh_per_second=4) as bar:
        task = bar.add_task(printable(title), total=None, figures="starting")
        if tracking:
            tracking.update()  # before the first round: a run that begins later would show how long that round took
        # Closing the generator saves the state of the run; `closing` does it now and not when the generator is
        # collected.
        with contextlib.closing(reports) as open_reports:  # pyright: ignore[reportArgumentType]
            for last in open_reports:
                accuracy = last.metrics["accuracy_top1"] if last.metrics else accuracy
                figures = f"{_accuracy_text(accuracy)}ε {_running_epsilon(last)}"
                if last.metrics:
                    log(f"{title}: round {last.round} of {last.rounds}, {figures} at δ = {small(last.delta)}")
                    if tracking:
                        tracking.update()
                bar.update(task, completed=last.round, total=last.rounds, figures=figures)
                if stop_after is not None and time.monotonic() - start >= stop_after:
                    break
    if tracking:
        tracking.finish()
        for kind in sorted(tracking.failures):
            note(f"{kind} did not get every evaluation: see --log-file. metrics.jsonl has all of them.", style="yellow")
    return last


def show_runs(
    reports: Iterator[tuple[int, "RoundReport"]], names: list[str], stop_after: float | None = None
) -> dict[int, "RoundReport"]:
    """Show the progress of several runs side by side, a bar for each.

    Args:
        reports: Pairs of a run's index and its report, as `train_together` yields them. They are closed at the end.
        names: The name of each run.
        stop_after: Seconds after which to stop, when every run has finished its round.

    Returns:
        The last report of each run that reported, by its index.
    """
    start, last, previous = time.monotonic(), {}, -1
    active = set(range(len(names)))
    accuracy: dict[int, float] = {}
    columns = (
        TextColumn("[bold]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[figures]}"),
        TimeRemainingColumn(),
    )
    let_unwind()
    with if_interrupted(), Progress(*columns, console=notes, refresh_per_second=4) as bar:
        tasks = [bar.add_task(name, total=None, figures="starting") for name in names]
        with contextlib.closing(reports) as open_reports:  # pyright: ignore[reportArgumentType]
            for index, report in open_reports:
                last[index] = report
                if report.metrics:
                    accuracy[index] = report.metrics["accuracy_top1"]
                figures = f"{_accuracy_text(accuracy.get(index))}ε {_running_epsilon(report)}"
                if report.metrics:
                    log(f"{names[index]}: round {report.round} of {report.rounds}, {figures}")
                bar.update(tasks[index], completed=report.round, total=report.rounds, figures=figures)
                if index <= previous:
                    active &= set(last)  # the second turn begins: a run that has not reported was complete before
                if report.round >= report.rounds or report.stopped:
                    active.discard(index)
                previous = index
                # All runs have finished their round when the last of the active ones reports.
                is_turn_over = index >= max(active, default=index)
                if is_turn_over and stop_after is not None and time.monotonic() - start >= stop_after:
                    break
    return last


def _running_epsilon(report: "RoundReport") -> str:
    return f"{epsilon_text(report.epsilon)} ({accountant_title(report.accountant)})"


def _accuracy_text(accuracy: float | None) -> str:
    return "" if accuracy is None else f"top-1 {100 * accuracy:5.2f} %  "


def print_table(table: "Table") -> None:
    """Print a table whose first column names the rows; as a list where the terminal is too narrow for its figures."""
    title, widths = Text(table.title, style="bold"), _minimal_widths(table)
    if table.rows:
        console.print()
    if sum(widths) + 3 * (len(widths) - 1) > console.width:
        console.print(title)
        for row in table.rows:
            cells = (f"{name} {cell}" for name, cell in zip(table.columns[1:], row[1:], strict=True) if cell)
            console.print(Text(row[0]))
            console.print(Padding(Text(SEPARATOR.join(cells), style="dim"), (0, 0, 0, 4)))
    elif table.rows:
        rich_table = RichTable(title=title, title_justify="left", show_edge=False, pad_edge=False)
        for i, (column, width) in enumerate(zip(table.columns, widths, strict=True)):
            rich_table.add_column(Text(column), justify="left" if i == 0 else "right", overflow="fold", min_width=width)
        for row in table.rows:
            rich_table.add_row(*(Text(cell) for cell in row))
        console.print(rich_table)
    if table.note:
        console.print(Text(table.note, style="dim"))


def _minimal_widths(table: "Table") -> list[int]:
    """Return for each column the width that breaks no word and no figure."""

    def width(i: int) -> int:
        """The least width of one column."""
        cells = [row[i] for row in table.rows]
        figures = [cell for cell in cells if i > 0 and len(cell) <= FIGURE_WIDTH]
        words = [word for text in (table.columns[i], *cells) for word in text.split()]
        return max(map(cell_len, [*figures, *words]), default=0)

    return [width(i) for i in range(len(table.columns))] if table.rows else []


def print_curves(
    title: str,
    points: Sequence[dict[str, Any]],
    field: str,
    *,
    times: float = 1.0,
    colours: Mapping[str, int] | None = None,
) -> None:
    """Print one curve for each run, by round; nothing if there are no points."""
    drawing = curves(points, field, width=min(console.width, 100), height=16, times=times, colours=colours)
    if drawing is not None:
        console.print()
        console.print(title, style="bold", markup=False, highlight=False)
        console.print(drawing)


def curves(
    points: Sequence[dict[str, Any]],
    field: str,
    *,
    width: int,
    height: int,
    times: float = 1.0,
    colours: Mapping[str, int] | None = None,
) -> Any:
    """Draw curves with characters.

    Args:
        points: Dictionaries with `run`, `round` and the field.
        field: The value to draw.
        width: Columns of the drawing.
        height: Lines of the drawing.
        times: A factor for the values, 100 for per cent.
        colours: The number of each run's colour, from 1; by default in the order of the runs.

    Returns:
        A Rich text; None if there are no points or no space.
    """
    import plotext

    names = list(dict.fromkeys(point["run"] for point in points))
    if not names or width < 20 or height < 5:
        return None
    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plot_size(width, height)
    for i, name in enumerate(names):
        own = [point for point in points if point["run"] == name]
        number = colours[name] if colours else i + 1
        colour = COLOURS[(number - 1) % len(COLOURS)]
        x, y = [point["round"] for point in own], [times * point[field] for point in own]
        plotext.plot(x, y, label=name if len(names) > 1 else None, marker="braille", color=colour)
    values = {times * point[field] for point in points}
    if len(values) == 1:  # plotext would begin the axis 1 below the value: at -1 % for an accuracy of 0
        plotext.ylim(0, max(1, 2 * values.pop()))
    rounds = [point["round"] for point in points]
    low, high = min(rounds), max(rounds)
    plotext.xticks(sorted({round(low + i * (high - low) / 4) for i in range(5)}))
    plotext.xlabel("round")
    return Text.from_ansi(plotext.build())
