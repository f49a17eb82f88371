"""`unheard watch`: follow a run in the terminal while it trains: progress, accuracy, and the privacy spent.

Reads the run folder without locking it, from any process (`report/run_monitor.py`), and keeps TensorBoard's event files
in it up to date.
"""

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from unheard.report.run_monitor import RunStatus
    from unheard.run_folder import RunFolder

EXAMPLES = """Examples:

  unheard watch runs/first

  unheard watch runs/first --once    (one look, for scripts)
"""

ENDED = ("complete", "stopped", "spent")


def watch(
    folder: Annotated[Path, typer.Argument(help="A run folder; it may be written to meanwhile.", metavar="DIR")],
    every: Annotated[float, typer.Option(help="Seconds between looks.", min=0.1, metavar="SECONDS")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look once and stop.")] = False,
) -> None:
    """Follow a run while it trains: progress, held-out accuracy, epsilon and budget. Ctrl-C ends only the display."""
    import time

    from rich.live import Live

    from unheard.cli.display import console
    from unheard.cli.interruption import let_unwind
    from unheard.report.run_monitor import RunMonitor

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
    """Updates TensorBoard's files and returns the number of evaluations. A folder that is read-only is watched all the
    same."""
    from unheard.report.tensorboard import update_event_file

    with suppress(OSError):
        update_event_file(folder)
    return len(folder.read_metrics())


def _view(folder: Path, status: "RunStatus") -> Any:
    """Returns the whole panel: progress bars, figures, and the curve of accuracy."""
    from rich.console import Group
    from rich.panel import Panel
    from rich.text import Text

    from unheard.cli.display import console, curves

    width = min(console.width, 110)
    parts: list[Any] = [_progress(status, width), Text(), _figures(status)]
    if len(status.points) > 1:
        drawing = curves(status.points, "smoothed", width=width - 4, height=min(16, console.height - 10), times=100)
        title = Text("AccuracyTop1 in %, smoothed over 5 evaluations", style="dim")
        parts += [Text(), title, drawing] if drawing is not None else []
    state = {
        "training": "training",
        "silent": f"no round for {_duration(status.seconds_since)}: killed, or its rounds are long",
        "stopped": "stopped; unheard resume continues",
        "spent": "stopped: its budget allows no further round",
        "complete": "complete",
    }[status.state]
    title = Text.assemble((folder.name, "bold"), f"  {state}")
    return Panel(Group(*parts), title=title, title_align="left", width=width)


def _progress(status: "RunStatus", width: int) -> Any:
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    grid = Table.grid(padding=(0, 1))
    bar_width = max(10, width - 50)
    left = "" if status.seconds_left is None else f"about {_duration(status.seconds_left)} left"
    bar = ProgressBar(total=status.rounds, completed=status.round, width=bar_width)
    grid.add_row("round", f"{status.round:,}/{status.rounds:,}", bar, left)
    if status.budget:
        spent = ProgressBar(total=status.budget, completed=min(status.epsilon, status.budget), width=bar_width)
        grid.add_row("budget", f"{status.epsilon:.3g}/{status.budget:g}", spent, f"ε by {status.accountant}")
    return grid


def _figures(status: "RunStatus") -> Any:
    from rich.table import Table

    from unheard.formatting import epsilon_text, number, percent, small

    figures = {
        "AccuracyTop1": percent(status.newest.get("accuracy_top1")),
        "smoothed": percent(status.points[-1]["smoothed"] if status.points else None),
        "top 3": percent(status.newest.get("accuracy_top3")),
        "perplexity": number(status.newest.get("perplexity")),
        f"ε so far, {status.accountant.upper()}": epsilon_text(status.epsilon),
        "at δ": small(status.delta),
    }
    grid = Table.grid(padding=(0, 3))
    for name in figures:
        grid.add_column(justify="right", header=name)
    grid.add_row(*(f"[dim]{name}[/]" for name in figures))
    grid.add_row(*(f"[bold]{figure}[/]" for figure in figures.values()))
    return grid


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
