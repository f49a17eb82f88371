"""Small pieces of a page: everything that comes from a run is escaped here, and only here.

In: tables, plots, words. Out: HTML text.
"""

import json
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from unheard.formatting import shown_word
from unheard.report.plots import Plot
from unheard.report.tables import Table


def table(made: Table, *, classes: str = "") -> str:
    """A table with a caption, column and row headers, and its note; wide ones scroll by themselves, not the page."""
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in made.columns)
    rows = "".join(_row(row) for row in made.rows)
    note = f'<p class="note">{escape(made.note)}</p>' if made.note else ""
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(made.title)}">'
        f'<table class="data {classes}"><caption>{escape(made.title)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>{note}"
    )


def _row(row: Sequence[str]) -> str:
    inner = ' class="inner"' if row[0].startswith("  ") else ""
    cells = "".join(f"<td>{escape(cell)}</td>" for cell in row[1:])
    return f'<tr><th scope="row"{inner}>{escape(row[0].strip())}</th>{cells}</tr>'


def figure(plot: Plot, *, alternative: str = "", inside: bool = False) -> str:
    """A plot with its name, keys to zoom if it is by round, and its numbers as a table for who wants them."""
    zoom, keys = "", ""
    if plot.zoom:
        zoom = f' data-zoom="{plot.zoom[0]},{plot.zoom[1]}"'
        keys = "".join(
            f'<button type="button" data-for="{plot.name}" data-does="{does}" aria-label="{label}">{sign}</button>'
            for does, label, sign in (
                ("out", "Zoom out", "−"),
                ("in", "Zoom in", "+"),
                ("left", "Earlier rounds", "←"),
                ("right", "Later rounds", "→"),
                ("all", "All rounds", "all"),
            )
        )
        keys = f'<div class="keys" role="group" aria-label="Zoom: {escape(plot.title)}">{keys}</div>'
    place = (
        f'<div class="head"><h3 id="{plot.name}-title">{escape(plot.title)}</h3>{keys}</div>{"" if inside else legend(plot)}'
        f'<div class="plot" id="{plot.name}" data-spec="{plot.name}-spec"{zoom} tabindex="0" role="group" '
        f'aria-labelledby="{plot.name}-title"></div>{data(f"{plot.name}-spec", plot.spec)}'
    )
    more = f"<details><summary>The same as a table</summary>{alternative}</details>" if alternative else ""
    return f"<div>{place}{more}</div>" if inside else f"<figure>{place}{more}</figure>"


def legend(plot: Plot) -> str:
    """Which colour and dash is which run, outside the plot: it wraps on a phone and can be read aloud."""
    drawn = bool(plot.zoom) or plot.is_line
    items = "".join(
        f'<li><svg width="26" height="10" aria-hidden="true"><line x1="2" y1="5" x2="24" y2="5" style="stroke:{look.colour}" '
        f'stroke-width="{3 if drawn else 9}" stroke-dasharray="{" ".join(map(str, look.dash)) if drawn else ""}"/></svg>'
        f"{escape(look.name)}</li>"
        for look in plot.legend
    )
    return f'<ul class="legend">{items}</ul>'


def data(name: str, content: Any) -> str:
    """JSON in a page: no word of any run can end the script that it stands in."""
    text = (
        json.dumps(content, ensure_ascii=False).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    )
    return f'<script type="application/json" id="{name}">{text}</script>'


def suggestions(words: Sequence[dict[str, Any]]) -> str:
    items = "".join(
        f"<li>{escape(shown_word(word['word']))}<small>{100 * word['probability']:.0f} %</small></li>" for word in words
    )
    return f'<ul class="words">{items}</ul>' if items else "—"


def items(texts: Iterable[str], classes: str = "") -> str:
    inner = "".join(f"<li>{escape(text)}</li>" for text in texts)
    return f'<ul class="{classes}">{inner}</ul>' if inner else ""


def paragraphs(texts: Iterable[str], classes: str = "") -> str:
    return "".join(
        f'<p class="{classes}">{escape(text)}</p>' if classes else f"<p>{escape(text)}</p>" for text in texts
    )
