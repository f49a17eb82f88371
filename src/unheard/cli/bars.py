"""Bars for work in named steps, on stderr, so that what is printed can be piped."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

notes = Console(stderr=True, soft_wrap=True)


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
    with Progress(*columns, console=notes) as display:
        tasks: dict[str, TaskID] = {}

        def progress(step: str, fraction: float) -> None:
            if step not in tasks:
                tasks[step] = display.add_task(step, total=1.0)
            display.update(tasks[step], completed=fraction)

        yield progress
