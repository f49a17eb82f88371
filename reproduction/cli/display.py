"""Terminal output of `python -m reproduction`: the plan of a session, progress bars, results and warnings.

`show_plan` prints the jobs with an estimate of time. `show_running` draws one progress bar for all runs and one for the
current group. If standard error is not a terminal, it prints a line every 30 seconds instead.
"""

import difflib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from rich import progress
from rich.table import Table

from unheard.cli.display import if_interrupted, log, note, notes, say
from unheard.formatting import duration

if TYPE_CHECKING:
    from reproduction.runner import Event, GroupEnded
    from reproduction.scheduling import PendingJob
    from reproduction.workspace import Workspace

_WIDE = 110
"""Width in characters; narrower terminals show fewer columns."""
EVERY = 30
"""Seconds between two lines of progress if there is no terminal."""


def show_plan(workspace: "Workspace", left: Sequence["PendingJob"], users_per_second: float, why: str) -> None:
    """Print every job that is not complete, with its user updates and the estimated time.

    Args:
        workspace: Folders and state of the session.
        left: The jobs that are not complete.
        users_per_second: User updates per second, for the estimate.
        why: Where this number comes from.
    """
    if not left:
        say(f"{workspace.results}: nothing is left to run.")
        return
    columns = {
        "run": lambda one: one.job.run.name,
        "corpus": lambda one: one.job.run.corpus,
        "users": lambda one: f"{one.users:,}",
        "rounds": lambda one: f"{one.job.rounds:,}",
        "left": lambda one: f"{one.left:,}",
        "user updates": lambda one: f"{one.left * one.users:,}",
        "time": lambda one: duration(one.left * one.users / users_per_second),
    }
    if notes.width < _WIDE:  # keep room for whole names of runs, because users copy them
        del columns["corpus"], columns["rounds"]
    rows = [[cell(one) for cell in columns.values()] for one in left]
    notes.print(rich_table("To be run", columns, rows, left=("run", "corpus")))
    total = sum(one.left * one.users for one in left)
    needed = duration(total / users_per_second)
    runs = f"{len(left):,} run{'' if len(left) == 1 else 's'}"
    say(f"{runs}, {total:,} user updates: about {needed} at {users_per_second:,.0f} per second ({why}).")
    for reason, names in workspace.started_early([pending.job for pending in left]).items():
        went_on = f"{', '.join(names)}: {reason}, and continues from there."
        note(f"{went_on} To start again, first remove its folder in {workspace.work}.", style="yellow")


def rich_table(
    title: str, columns: Iterable[str], rows: Iterable[Sequence[str]], *, left: Sequence[str], folded: str = ""
) -> Table:
    """Return a table for the terminal.

    Args:
        title: The title.
        columns: Names of the columns.
        rows: The cells.
        left: The columns that are aligned to the left; the others are aligned to the right.
        folded: The column whose cells may be broken over lines; empty for none.
    """
    table = Table(title=title, title_justify="left", show_edge=False, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="left" if name in left else "right", no_wrap=name != folded)
    for row in rows:
        table.add_row(*row)
    return table


def say_if_missing(results: Path) -> None:
    """Print a warning if the results folder does not exist, and suggest the most similar name.

    Without the warning, a misspelt name looks like missing runs.
    """
    if not results.exists():
        siblings = [one.name for one in results.parent.iterdir()] if results.parent.is_dir() else []
        close = difflib.get_close_matches(results.name, siblings, n=1)
        hint = f" Did you mean {results.parent / close[0]}?" if close else " `python -m reproduction run` makes some."
        missing = f"There is no folder {results}: no results are shown.{hint}"
        note(f"{missing} --results names the folder of results.", style="yellow")


def show_skipped(reasons: Mapping[str, str]) -> None:
    """Print a line for each run that cannot be trained here."""
    for name, why in reasons.items():
        note(f"{name} is not run: {why}.", style="yellow")


def show_running(events: Iterator["Event"], updates: int) -> bool:
    """Show progress bars while groups of runs train, and print a line per run when its group ends.

    Args:
        events: The events of `runner.run_steps`.
        updates: The number of user updates of all runs, which is the length of the first bar.

    Returns:
        Whether no group failed.
    """
    from reproduction.runner import GroupBegan, GroupEnded, RoundDone, Skipped

    columns = (
        progress.TextColumn("[bold]{task.description}"),
        progress.BarColumn(),
        progress.TaskProgressColumn(),
        progress.TextColumn("{task.fields[figures]}"),
        progress.TimeElapsedColumn(),
        progress.TimeRemainingColumn(),
    )
    # `closing` makes the runner save and record the current group in every case, also on Ctrl-C.
    stopped = if_interrupted("All completed rounds are saved and recorded. The same command continues.")
    logged = time.monotonic()
    with stopped, progress.Progress(*columns, console=notes, refresh_per_second=2) as bars, closing(events):  # pyright: ignore[reportArgumentType]
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
                    if (now := time.monotonic()) >= logged + EVERY:  # for log files, which do not show the bars
                        logged, all_, remaining = now, bars.tasks[0], bars.tasks[0].time_remaining
                        left = "" if remaining is None else f", about {duration(remaining)} left"
                        doing = f"{bars.tasks[-1].description}, round {one.round:,}{best}"
                        log(f"{all_.percentage:.0f} % of all runs{left}: {doing}")
                case GroupEnded():
                    _show_results(one)
                    went_well = went_well and one.error is None
                case _:
                    pass
    return went_well


def _show_results(ended: "GroupEnded") -> None:
    """Print the results of a group, and its error if it failed."""
    for result in ended.results:
        last = result.evaluations[-1] if result.evaluations else None
        accuracy = f"top-1 {100 * last['accuracy_top1']:.2f} % after {last['round']:,}" if last else "not evaluated"
        rounds = f"{result.rounds:,} of {result.planned:,} rounds"
        say(f"{result.name}: {rounds}, {accuracy}, {result.users_per_second:,.1f} users/s")
    if ended.error:
        note(ended.error, style="red")
        note("This group failed. Its completed rounds are kept, and the other groups continue.", style="bold red")
