"""Terminal output of `python -m reproduction`: the plan of a session, progress bars, results and warnings.

`show_plan` prints the jobs with an estimate of time, `show_running` draws one bar for all runs and one for the
current group, and prints a line every 30 seconds if standard error is not a terminal.
"""

import difflib
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from rich.progress import (
    BarColumn,
    Progress,
    Task,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from unheard.cli.display import console, if_interrupted, log, notes, say
from unheard.formatting import duration

if TYPE_CHECKING:
    from reproduction.runner import Event, GroupEnded
    from reproduction.scheduling import PendingJob
    from reproduction.workspace import Workspace

_WIDE = 110
"""Terminals narrower than this show fewer columns."""
EVERY = 30
"""Seconds between two lines if there is no terminal."""


def show_plan(workspace: "Workspace", left: Sequence["PendingJob"], users_per_second: float, why: str) -> None:
    """Print every job that lacks rounds, its user updates, and the estimated time."""
    if not left:
        say(f"{workspace.results}: nothing is left to run.")
        return
    table = Table(title="To be run", title_justify="left", show_edge=False, pad_edge=False)
    columns = {
        "run": lambda one: one.job.run.name,
        "corpus": lambda one: one.job.run.corpus,
        "users": lambda one: f"{one.users:,}",
        "rounds": lambda one: f"{one.job.rounds:,}",
        "left": lambda one: f"{one.left:,}",
        "user updates": lambda one: f"{one.left * one.users:,}",
        "time": lambda one: duration(one.left * one.users / users_per_second),
    }
    if notes.width < _WIDE:  # names are what one copies from here: nothing of them may be cut
        del columns["corpus"], columns["rounds"]
    for name in columns:
        table.add_column(name, justify="left" if name in ("run", "corpus") else "right", no_wrap=True)
    for one in left:
        table.add_row(*(cell(one) for cell in columns.values()))
    notes.print(table)
    total = sum(one.left * one.users for one in left)
    needed = duration(total / users_per_second)
    runs = f"{len(left):,} run{'' if len(left) == 1 else 's'}"
    say(f"{runs}, {total:,} user updates: about {needed} at {users_per_second:,.0f} a second ({why}).")
    for reason, names in workspace.started_early([pending.job for pending in left]).items():
        _warn(
            f"{', '.join(names)}: {reason}, and goes on from there. To begin anew, remove its folder in "
            f"{workspace.work} first."
        )


def say_if_missing(results: Path) -> None:
    """Warn if the results folder does not exist, with the most similar name; otherwise a typing error looks like missing
    runs."""
    if not results.exists():
        close = difflib.get_close_matches(results.name, _sibling_names(results), n=1)
        hint = f" Did you mean {results.parent / close[0]}?" if close else " `python -m reproduction run` makes some."
        _warn(f"There is no folder {results}: no results are shown.{hint} --results says where they lie.")


def _sibling_names(path: Path) -> list[str]:
    """Names in the folder that holds `path`."""
    return [one.name for one in path.parent.iterdir()] if path.parent.is_dir() else []


def show_skipped(reasons: Mapping[str, str]) -> None:
    """Print a line for each run that cannot be trained here."""
    for name, why in reasons.items():
        _warn(f"{name} is not run: {why}.")


def _warn(line: str) -> None:
    """Print a warning."""
    notes.print(line, style="yellow", markup=False, highlight=False, soft_wrap=True)


def show_running(events: Iterator["Event"], updates: int) -> bool:
    """Draw the bars while groups run, and print a row per run when its group ends. Returns whether no group failed."""
    from reproduction.runner import GroupBegan, GroupEnded, RoundDone, Skipped

    columns = (
        TextColumn("[bold]{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[figures]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    # Closed on every way out: the runner then saves and records what was begun.
    stopped = if_interrupted("What was done is saved and recorded: the same command goes on.")
    lines = _Lines()
    with stopped, Progress(*columns, console=notes, refresh_per_second=2) as bars, closing(events):  # pyright: ignore[reportArgumentType]
        whole = bars.add_task("all runs", total=max(updates, 1), figures="")
        group, accuracy, reported, went_well = None, {}, set(), True
        for one in events:
            match one:
                case Skipped() if one.name not in reported:
                    reported.add(one.name)
                    show_skipped({one.name: one.why})
                case GroupBegan():
                    if group is not None:
                        bars.remove_task(group)
                    accuracy = {}
                    first, more = one.names[0], len(one.names) - 1
                    title = first + (f" and {more} more" if more else "")
                    group = bars.add_task(title, total=max(one.updates, 1), figures="starting")
                case RoundDone():
                    assert group is not None
                    if one.accuracy is not None:
                        accuracy[one.name] = one.accuracy
                    best = f", best top-1 {100 * max(accuracy.values()):.2f} %" if accuracy else ""
                    bars.update(group, advance=one.updates, figures=f"round {one.round:,}{best}")
                    bars.update(whole, advance=one.updates)
                    lines.say(bars.tasks[0], f"{bars.tasks[-1].description}, round {one.round:,}{best}")
                case GroupEnded():
                    _show_results(one)
                    went_well = went_well and one.error is None
                case _:
                    pass
    return went_well


class _Lines:
    """Prints a line at intervals if nobody sees the bars."""

    def __init__(self) -> None:
        self.reported = time.monotonic()

    def say(self, whole: Task, doing: str) -> None:
        """Print the progress if the last line is old enough."""
        if (now := time.monotonic()) < self.reported + EVERY:
            return
        self.reported = now
        left = "" if whole.time_remaining is None else f", about {duration(whole.time_remaining)} left"
        log(f"{whole.percentage:.0f} % of all runs{left}: {doing}")


def _show_results(ended: "GroupEnded") -> None:
    """Print the results of a group, and its error if it failed."""
    for result in ended.results:
        last = result.evaluations[-1] if result.evaluations else None
        accuracy = (
            "not evaluated" if last is None else f"top-1 {100 * last['accuracy_top1']:.2f} % after {last['round']:,}"
        )
        text = f"{result.name}: {result.rounds:,} of {result.planned:,} rounds, {accuracy}, {result.users_per_second:,.1f} users/s"
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    if ended.error:
        notes.print(ended.error, style="red", markup=False, highlight=False, soft_wrap=True)
        notes.print("This group ended by an error; what it had done is kept, and the others go on.", style="bold red")
