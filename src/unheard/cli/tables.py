"""The report's tables and plots, in a terminal."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from unheard.cli.display import console

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
