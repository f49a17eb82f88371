"""Functions with which commands print: sentences, warnings, progress bars, tables, and curves drawn with characters.

Results go to `console` (standard output), everything else to `notes` (standard error), so that results can be piped.
If standard error is a file, progress bars appear only when they end, so `log` prints one line per evaluation.

    say(sentence), echo(text)                     one sentence, or plain text, on standard output
    safe_console()                                a Rich console, for other output
    warn_of_delta(delta)                          a warning before a run begins
    show_noise(run), warn_of_noise(level)         sigma, and a warning if the noise will dominate the updates
    confirm_no_noise(runs, yes)                   the question before a run without noise
    set_stop_message(describe)                    what a signal prints: what is saved, and how to continue
    with step_bars() as progress: ...             one bar for each named step: progress(step, fraction)
    with counted_bar() as progress: ...           the same for counted steps: progress(step, done, total)
    show_rounds(reports, title), show_runs(...)   train by reading the reports of one run or several, with progress bars
    print_table(table), print_curves(...)         tables and curves of `report/`
"""

import contextlib
import logging
import shlex
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

from unheard.cli.processes import NOTHING_WRITTEN, describe_stop, is_rank, let_unwind, stop_message
from unheard.formatting import SEPARATOR, accountant_title, epsilon_text, printable, small

if TYPE_CHECKING:
    from unheard.privacy.events import NoiseLevel
    from unheard.report.tables import Table
    from unheard.training.loop import RoundReport
    from unheard.training.run import Run

logger = logging.getLogger("unheard.cli")


class _Printable(RenderHook):
    """Replaces control characters by escapes in everything that a console prints (`formatting.printable`).

    Text of users and names of files may hold control characters that would change the terminal.
    """

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        """Wrap the objects that the console is about to print, so that each prints escapes."""
        return [_PrintableRenderable(renderable) for renderable in renderables]


class _PrintableRenderable:
    def __init__(self, renderable: ConsoleRenderable) -> None:
        self._renderable = renderable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segment in console.render(self._renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


def safe_console(**options: Any) -> Console:
    """Return a Rich console that prints control characters as escapes. `options` are passed to `Console`."""
    console = Console(emoji=False, **options)  # otherwise `:M:` in a path would be printed as an emoji
    console.push_render_hook(_Printable())
    return console


console = safe_console()
notes = safe_console(stderr=True)

FIGURE_WIDTH = 16
"""A table cell of at most this many characters counts as a number and is never broken over two lines."""
COLOURS = ("blue", "orange", "green", "magenta", "cyan", "red")


def say(sentence: str) -> None:
    """Print a sentence on standard output without line breaks, so that paths and commands in it can be copied."""
    logger.info(sentence.strip())
    console.print(sentence, markup=False, highlight=False, soft_wrap=True)


def echo(text: str, *, nl: bool = True) -> None:
    """Print text on standard output as it is, except that control characters are shown as escapes."""
    typer.echo(printable(text), nl=nl)


def note(sentence: str, style: str = "") -> None:
    """Print a sentence on standard error without line breaks, in a Rich style such as "bold yellow"."""
    logger.info(sentence)
    notes.print(sentence, style=style, markup=False, highlight=False, soft_wrap=True)


def warn_of_delta(delta: float) -> None:
    """Print a warning on standard error if delta is so large that the guarantee is weak."""
    from unheard.privacy.budget import delta_caution

    if sentence := delta_caution(delta):
        note(sentence, style="bold yellow")


def show_noise(run: "Run") -> None:
    """Print sigma of a run on standard error, or a warning if the noise will dominate the updates.

    Prints nothing for a run without noise.
    """
    from unheard.training.initialise import noise_level, pinned

    if (level := noise_level(pinned(run))) is not None:
        warn_of_noise(level)


def warn_of_noise(level: "NoiseLevel") -> None:
    """Print sigma on standard error, or a warning with advice if the noise will dominate the updates."""
    if sentence := level.caution():
        note(sentence, style="bold yellow")
    else:
        note(str(level))


def confirm_no_noise(runs: "Sequence[Run]", yes: bool, *, can_ask: bool = True) -> bool:
    """Ask for permission to train without noise, because a charge of infinite epsilon cannot be undone.

    Args:
        runs: The runs to train. Nothing is asked if all of them add noise.
        yes: The option `--yes`: print the warning and do not ask.
        can_ask: False in a process that a launcher started, which has no terminal to read from.

    Returns:
        True if a run without noise is among `runs` and was allowed; False if every run adds noise. Pass it to `train`
        as `allow_no_privacy`.

    Raises:
        PrivacyError: A question is needed, but `yes` is False and there is no terminal to ask on.
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


def set_stop_message(describe: Callable[[], str]) -> None:
    """Set the function that returns the stop message.

    It is called when the command is stopped; it looks at the disk and says what is saved and how to continue.
    """
    describe_stop[:] = [describe]


def store_stop_message(out: Path) -> str:
    """Return the stop message of `prepare`, which writes the store `out`."""
    if (out / "corpus.json").is_file():
        return f"Stopped. The store at {out} is complete."
    # As `corpus.store.partial_path`, without the imports of that module.
    partial = out.resolve().with_name(f"{out.resolve().name}.partial")
    if partial.is_dir():
        return f"Stopped. Finished steps are kept in {partial}; the same command continues from there."
    return NOTHING_WRITTEN


def output_stop_message(out: Path, *, also: str = "") -> str:
    """Return the stop message of a command whose output appears on disk only when it is complete.

    Args:
        out: The file or folder that the command writes.
        also: A sentence on what else is saved, for the case that `out` does not exist yet.
    """
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        return f"Stopped. {out} is complete."
    return f"Stopped before {out} was written.{f' {also}' if also else ''} Run the same command again."


def run_stop_message(folder: Path) -> str:
    """Return the stop message of a command that trains one run in `folder`."""
    if (folder / "ledger.jsonl").exists():
        return f"Stopped. What was done is saved: unheard resume {shlex.quote(str(folder))} continues."
    return NOTHING_WRITTEN


def runs_stop_message(out: Path) -> str:
    """Return the stop message of a command that trains several runs, each in a folder inside `out`."""
    if any(out.rglob("ledger.jsonl")):
        return "Stopped. What was done is saved: the same command continues."
    return NOTHING_WRITTEN


@contextlib.contextmanager
def if_interrupted(sentence: str = "") -> Iterator[None]:
    """If Ctrl-C ends the block, print what is saved and how to continue, and raise `KeyboardInterrupt` again.

    A rank prints nothing, because its launcher prints the message.

    Args:
        sentence: The message; by default that of `set_stop_message`.
    """
    try:
        yield
    except KeyboardInterrupt:
        if not is_rank():
            note(f"unheard: {f'Stopped. {sentence}' if sentence else stop_message()}")
        raise


def log(line: str) -> None:
    """Print a line on standard error if standard error is not a terminal.

    In a log file a progress bar appears only when it ends; lines show the progress earlier.
    """
    if not notes.is_terminal:
        note(line)


@contextlib.contextmanager
def step_bars() -> Iterator[Callable[[str, float], None]]:
    """Show a progress bar for each named step. Yields `progress(step, fraction)`, which the block calls."""
    columns = (TextColumn("[bold]{task.description:<14}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with _bars(*columns, TimeRemainingColumn()) as update:
        yield lambda step, fraction: update(step, fraction, 1.0)


@contextlib.contextmanager
def counted_bar() -> Iterator[Callable[[str, int, int], None]]:
    """Show a progress bar for each named step. Yields `progress(step, done, total)`, which the block calls."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with _bars(*columns) as update:
        yield update


@contextlib.contextmanager
def _bars(*columns: ProgressColumn) -> Iterator[Callable[[str, float, float], None]]:
    """Show progress bars with these columns. Yields `update(step, done, total)`."""
    with Progress(*columns, console=notes, refresh_per_second=4) as display:
        tasks: dict[str, TaskID] = {}

        def update(step: str, done: float, total: float) -> None:
            """Set the progress of a step. The first call with a new step adds a bar."""
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
    """Train a run by reading its reports, and show its progress: round, held-out accuracy and epsilon so far.

    Args:
        reports: The generator that `train` or `resume` returns. It is closed at the end, which saves the run.
        title: The name on the bar.
        stop_after: Seconds after which to stop, at the end of a round; None for no limit.
        folder: The run folder, for the trackers; None to track nothing.
        track: The trackers that get the evaluations (`report.tracking.TRACKERS`); None for TensorBoard's event files.

    Returns:
        The last report; None if there was none.
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
            # Start the trackers before the first round: a later start time would reveal how long that round took.
            tracking.update()
        # Closing the generator saves the state of the run. `closing` does this at the end of the block; otherwise it
        # would happen when the generator is garbage-collected.
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
        if last is None:  # the run was complete
            bar.update(task, visible=False)
    if tracking:
        tracking.finish()
        for kind in sorted(tracking.failures):
            note(f"{kind} did not get every evaluation: see --log-file. metrics.jsonl has all of them.", style="yellow")
    return last


def show_runs(
    reports: Iterator[tuple[int, "RoundReport"]], names: list[str], stop_after: float | None = None
) -> dict[int, "RoundReport"]:
    """Train several runs by reading their reports, and show a progress bar for each.

    Args:
        reports: The generator that `train_together` returns: pairs of a run's index and its report. It is closed at the
            end, which saves the runs.
        names: The name of each run.
        stop_after: Seconds after which to stop, when every run has finished its round; None for no limit.

    Returns:
        The last report of each run that reported, by the run's index.
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
                    # The second turn begins. Runs that have not reported yet were complete before.
                    active &= set(last)
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
    """Print a table whose first column names the rows.

    If the terminal is too narrow for the columns, each row is printed as a line of text under its name.
    """
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
    """Return the smallest width of each column that breaks no word and no number; empty for a table without rows."""

    def width(i: int) -> int:
        """Return the smallest width of column `i`."""
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
    """Print a title and one curve per run, by round. Prints nothing if there are no points.

    Args:
        title: The line above the drawing.
        points: Dictionaries with `run`, `round` and the field.
        field: The value to draw.
        times: A factor for the values, for example 100 for per cent.
        colours: The number of each run's colour, from 1; by default in the order of the runs.
    """
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
        times: A factor for the values, for example 100 for per cent.
        colours: The number of each run's colour, from 1; by default in the order of the runs.

    Returns:
        A Rich text; None if there are no points, or fewer than 20 columns or 5 lines.
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
    if len(values) == 1:  # plotext's own axis would begin 1 below the value, at -1 % for an accuracy of 0
        plotext.ylim(0, max(1, 2 * values.pop()))
    rounds = [point["round"] for point in points]
    low, high = min(rounds), max(rounds)
    plotext.xticks(sorted({round(low + i * (high - low) / 4) for i in range(5)}))
    plotext.xlabel("round")
    return Text.from_ansi(plotext.build())
