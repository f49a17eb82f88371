"""The report's tables and plots, in a terminal."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from unheard.cli.display import console

if TYPE_CHECKING:
    from unheard.report.tables import Table

COLOURS = ("blue", "orange", "green", "magenta", "cyan", "red")


def print_table(table: "Table") -> None:
    """A table of text cells; the first column names the rows."""
    from rich.table import Table as RichTable
    from rich.text import Text

    if not table.rows:
        console.print(Text(table.note, style="dim"))
        return
    made = RichTable(title=Text(table.title, style="bold"), title_justify="left", show_edge=False, pad_edge=False)
    for i, column in enumerate(table.columns):
        # A narrow terminal breaks names of rows between words, not within them, as long as that leaves the numbers room.
        longest = max((len(word) for row in table.rows for word in row[0].split()), default=0) if i == 0 else 0
        made.add_column(
            Text(column), justify="left" if i == 0 else "right", overflow="fold", min_width=min(longest, 24)
        )
    for row in table.rows:
        made.add_row(*(Text(cell) for cell in row))
    console.print()
    console.print(made)
    if table.note:
        console.print(Text(table.note, style="dim"))


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
