"""The commands that show runs: `report`, `compare` and `watch`.

    report   write a self-contained HTML page about one or more runs; it needs no network
    compare  print tables and curves in the terminal: what each run learned, and what each cost
    watch    follow a run in the terminal while it trains

`report` and `compare` first measure the runs that have no full measures yet (`full_measures_if_possible`). `watch`
reads the run folder without locking it, so it can run while another process trains, and keeps TensorBoard's event file
in the folder up to date. The package `report/` does the work."""

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from unheard.cli.display import (
    console,
    curves,
    note,
    notes,
    output_stop_message,
    print_curves,
    print_table,
    say,
    set_stop_message,
)
from unheard.cli.options import MEASURES_SAVED, AsJson, ComparisonOptions, RunDirs, option
from unheard.cli.processes import let_unwind
from unheard.formatting import accountant_title, duration, epsilon_text, number, percent, small

if TYPE_CHECKING:
    from unheard.report.comparison import Comparison
    from unheard.report.run_record import RunStatus
    from unheard.run_folder import RunFolder

REPORT_EXAMPLES = """Examples:

  unheard report runs/first --out page

  unheard report runs/plain runs/private --out page --title "Keyboard model, autumn"

  unheard report runs/private --out page --as-if-users 1000000    (adds a hypothetical ε)
"""


def report(
    folders: RunDirs,
    *,
    out: Annotated[Path, option("The folder for the page.")],
    title: Annotated[str | None, option("The page's heading.", otherwise="the names of the runs")] = None,
    options: ComparisonOptions,
) -> None:
    """Write a self-contained HTML page about runs: the privacy guarantee in plain words, curves, tables, settings."""
    set_stop_message(
        lambda: (
            "Stopped. The page is as it was."
            if options.force
            else output_stop_message(out / "index.html", also=MEASURES_SAVED)
        )
    )
    from unheard.report.page import check_page_folder, write_page

    check_page_folder(out, force=options.force)
    comparison = _read(folders, options)
    with notes.status("Writing the page"):
        page = write_page(comparison, out, title=title, force=options.force)
    say(f"The page is written: {page.resolve().as_uri()}")


def _read(folders: list[Path], options: ComparisonOptions, accuracy: float | None = None) -> "Comparison":
    """Return the comparison of the runs, after measuring those that have no full measures yet.

    Args:
        folders: The run folders.
        options: The options of the command; `--no-measure` skips the measuring.
        accuracy: The AccuracyTop1 up to which computation is compared, as a fraction; None for the baseline's.
    """
    from unheard.cli.evaluate import full_measures_if_possible
    from unheard.report.comparison import Comparison

    if not options.no_measure:
        for folder in folders:
            full_measures_if_possible(folder, prompts=options.prompt)
    with notes.status("Computing what each run cost"):
        return Comparison.read(
            folders,
            baseline=options.baseline,
            accuracy=accuracy,
            as_if_users=options.as_if_users,
            as_if_users_per_round=options.as_if_users_per_round,
        )


COMPARE_EXAMPLES = """Examples:

  unheard compare runs/demo/plain runs/demo/private

  unheard compare runs/a runs/b runs/c --baseline runs/a --prompt "see you" --png plots

  unheard compare runs/plain runs/noisy --as-if-users 763430 --as-if-users-per-round 5000    (a hypothetical ε)
"""


def compare(
    folders: RunDirs,
    *,
    options: ComparisonOptions,
    accuracy: Annotated[
        float | None,
        option(
            "Compare the rounds to this AccuracyTop1, as a fraction.",
            min=0,
            max=1,
            metavar="A",
            otherwise="the baseline's",
        ),
    ] = None,
    html: Annotated[
        Path | None, option("Also write the page of `unheard report` into this folder.", otherwise="not written")
    ] = None,
    png: Annotated[
        Path | None, option("Also write each plot as a PNG file into this folder.", otherwise="not written")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare runs: accuracy, epsilon, word frequencies, predictions, and the user updates needed for the same accuracy."""
    set_stop_message(lambda: f"Stopped. {MEASURES_SAVED} The same command continues.")
    from unheard.report.page import check_page_folder, write_page
    from unheard.report.plots import write_images

    if html:
        check_page_folder(html, force=options.force)
    comparison = _read(folders, options, accuracy)
    if as_json:
        print(json.dumps(comparison.as_json(), allow_nan=False))
    else:
        _print_comparison(comparison)
    written = [write_page(comparison, html, force=options.force)] if html else []
    written += write_images(comparison, png) if png else []
    for path in written:
        (note if as_json else say)(f"Written: {path}")


def _print_comparison(comparison: "Comparison") -> None:
    """Print the tables, the warnings and the curves of a comparison on standard output."""
    from unheard.report import tables
    from unheard.report.run_record import accuracy_points, epsilon_points

    print_table(tables.summary(comparison))
    for caution in comparison.cautions:
        console.print(Text(f"Note: {caution}", style="yellow"))
    accuracies = [point for record in comparison.records for point in accuracy_points(record)]
    title = "AccuracyTop1 by round, in %, smoothed over 5 evaluations"
    print_curves(title, accuracies, "smoothed", times=100, colours=comparison.colours)
    epsilons = [point for record in comparison.records for point in epsilon_points(record)]
    print_curves("ε by round (RDP)", epsilons, "epsilon", colours=comparison.colours)
    if len(comparison.records) > 1:
        print_table(tables.computation(comparison))
    if measured := comparison.measured:
        for table in (tables.accuracies, tables.users, tables.bands, tables.head_words, tables.predictions):
            print_table(table(measured))


WATCH_EXAMPLES = """Examples:

  unheard watch runs/first

  unheard watch runs/first --once    (print once and stop, for scripts)
"""

ENDED = ("complete", "stopped", "spent")


def watch(
    folder: Annotated[Path, typer.Argument(help="A run folder, while it is trained or later.", metavar="DIR")],
    every: Annotated[float, option("Seconds between two updates.", min=0.1, metavar="SECONDS")] = 1.0,
    once: Annotated[bool, option("Print the state once and stop.", "--once")] = False,
) -> None:
    """Follow a run while it trains: progress, held-out accuracy, epsilon and budget. Ctrl-C ends only the display."""
    from unheard.report.run_record import RunMonitor

    monitor = RunMonitor(folder)
    status = monitor.status()
    written = _update_tensorboard(monitor.folder)
    if once or status.state in ENDED:
        console.print(_view(folder, status))
        return
    let_unwind()
    with Live(_view(folder, status), console=console, auto_refresh=False) as live, suppress(KeyboardInterrupt):
        while status.state not in ENDED:
            time.sleep(every)
            status = monitor.status()
            if len(status.points) != written:
                written = _update_tensorboard(monitor.folder)
            live.update(_view(folder, status), refresh=True)


def _update_tensorboard(folder: "RunFolder") -> int:
    """Update TensorBoard's event file, unless the folder is read-only. Return the number of evaluations so far."""
    from unheard.report.tracking import update_event_file

    with suppress(OSError):
        update_event_file(folder)
    return len(folder.read_metrics())


def _view(folder: Path, status: "RunStatus") -> Any:
    """Return a Rich panel with the progress bars, the newest figures and the curve of accuracy."""
    width = min(console.width, 110)
    parts: list[Any] = [_progress(status, width), Text(), _figures(status)]
    if len(status.points) > 1:
        drawing = curves(status.points, "smoothed", width=width - 4, height=min(16, console.height - 10), times=100)
        title = Text("AccuracyTop1 in %, smoothed over 5 evaluations", style="dim")
        parts += [Text(), title, drawing] if drawing is not None else []
    state = {
        "training": "training",
        "silent": f"no round for {duration(status.seconds_since)}: killed, or its rounds are long",
        "stopped": "stopped; unheard resume continues",
        "spent": "stopped: its budget allows no further round",
        "complete": "complete",
    }[status.state]
    title = Text.assemble((folder.name, "bold"), f"  {state}")
    return Panel(Group(*parts), title=title, title_align="left", width=width)


def _progress(status: "RunStatus", width: int) -> Any:
    """Return a grid with the progress bar of rounds, and a bar of the budget if there is one."""
    grid = Table.grid(padding=(0, 1))
    bar_width = max(10, width - 50)
    left = "" if status.seconds_left is None else f"about {duration(status.seconds_left)} left"
    bar = ProgressBar(total=status.rounds, completed=status.round, width=bar_width)
    grid.add_row("round", f"{status.round:,}/{status.rounds:,}", bar, left)
    if status.budget:
        spent = ProgressBar(total=status.budget, completed=min(status.epsilon, status.budget), width=bar_width)
        grid.add_row(
            "budget", f"{status.epsilon:.3g}/{status.budget:g}", spent, f"ε by {accountant_title(status.accountant)}"
        )
    return grid


def _figures(status: "RunStatus") -> Any:
    """Return a grid with the newest accuracy, perplexity and epsilon of a run."""
    figures = {
        "AccuracyTop1": percent(status.newest.get("accuracy_top1")),
        "smoothed": percent(status.points[-1]["smoothed"] if status.points else None),
        "top 3": percent(status.newest.get("accuracy_top3")),
        "perplexity": number(status.newest.get("perplexity")),
        f"ε so far, {accountant_title(status.accountant)}": epsilon_text(status.epsilon),
        "at δ": small(status.delta),
    }
    grid = Table.grid(padding=(0, 3))
    for name in figures:
        grid.add_column(justify="right", header=name)
    grid.add_row(*(f"[dim]{name}[/]" for name in figures))
    grid.add_row(*(f"[bold]{figure}[/]" for figure in figures.values()))
    return grid
