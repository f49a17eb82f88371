"""`unheard watch`: a run while it trains, in the terminal: how far, how good, how much privacy is spent."""

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from unheard.report.run_monitor import RunStatus

EXAMPLES = """Examples:

  unheard watch runs/first

  unheard watch runs/first --once    (one look, for scripts)
"""

ENDED = ("complete", "stopped", "spent")


def watch(
    folder: Annotated[Path, typer.Argument(help="A run folder; it may be written to meanwhile.", metavar="DIR")],
    every: Annotated[float, typer.Option(help="Seconds between looks.", min=0.1)] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look once and leave.")] = False,
) -> None:
    """Follow a run while it trains: progress, held-out accuracy, epsilon and budget. Ctrl-C leaves it training."""
    import time

    from rich.live import Live

    from unheard.cli.display import console
    from unheard.report.run_monitor import RunMonitor
    from unheard.report.tensorboard import update_event_file

    run = RunMonitor(folder)
    standing = run.status()
    mirrored = _mirrored(update_event_file, run.folder)
    if once or standing.state in ENDED:
        console.print(_view(folder, standing))
        return
    with Live(_view(folder, standing), console=console, auto_refresh=False) as live, suppress(KeyboardInterrupt):
        while standing.state not in ENDED:
            time.sleep(every)
            standing = run.status()
            if len(standing.points) != mirrored:
                mirrored = _mirrored(update_event_file, run.folder)
            live.update(_view(folder, standing), refresh=True)


def _mirrored(update_event_file: Any, folder: Any) -> int:
    """TensorBoard's files follow; a folder that may only be read is watched all the same."""
    with suppress(OSError):
        update_event_file(folder)
    return len(folder.read_metrics())


def _view(folder: Path, standing: "RunStatus") -> Any:
    from rich.console import Group
    from rich.panel import Panel
    from rich.text import Text

    from unheard.cli.display import console, curves

    width = min(console.width, 110)
    parts: list[Any] = [_progress(standing, width), Text(), _figures(standing)]
    if len(standing.points) > 1:
        drawn = curves(standing.points, "smoothed", width=width - 4, height=min(16, console.height - 10), times=100)
        title = Text("AccuracyTop1 in %, smoothed over 5 evaluations", style="dim")
        parts += [Text(), title, drawn] if drawn is not None else []
    title = Text.assemble((folder.name, "bold"), f"  {_in_words(standing)}")
    return Panel(Group(*parts), title=title, title_align="left", width=width)


def _progress(standing: "RunStatus", width: int) -> Any:
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    grid = Table.grid(padding=(0, 1))
    bar_width = max(10, width - 50)
    left = "" if standing.seconds_left is None else f"about {_duration(standing.seconds_left)} left"
    bar = ProgressBar(total=standing.rounds, completed=standing.round, width=bar_width)
    grid.add_row("round", f"{standing.round:,}/{standing.rounds:,}", bar, left)
    if standing.budget:
        spent = ProgressBar(total=standing.budget, completed=min(standing.epsilon, standing.budget), width=bar_width)
        grid.add_row("budget", f"{standing.epsilon:.3g}/{standing.budget:g}", spent, f"ε by {standing.accountant}")
    return grid


def _figures(standing: "RunStatus") -> Any:
    from rich.table import Table

    from unheard.formatting import epsilon_text, number, percent, small

    grid = Table.grid(padding=(0, 3))
    newest = standing.newest
    smoothed = standing.points[-1]["smoothed"] if standing.points else None
    names = ("AccuracyTop1", "smoothed", "top 3", "perplexity", "ε so far", "at δ")
    figures = (
        percent(newest.get("accuracy_top1")),
        percent(smoothed),
        percent(newest.get("accuracy_top3")),
        number(newest.get("perplexity")),
        epsilon_text(standing.epsilon),
        small(standing.delta),
    )
    for name in names:
        grid.add_column(justify="right", header=name)
    grid.add_row(*(f"[dim]{name}[/]" for name in names))
    grid.add_row(*(f"[bold]{figure}[/]" for figure in figures))
    return grid


def _in_words(standing: "RunStatus") -> str:
    return {
        "training": "training",
        "silent": f"no round for {_duration(standing.seconds_since)}: killed, or its rounds are long",
        "stopped": "stopped; unheard resume goes on",
        "spent": "stopped: its budget allows no further round",
        "complete": "complete",
    }[standing.state]


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
