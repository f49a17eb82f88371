"""One page that opens from disk: what the model learned, what privacy cost, for a product owner and for a privacy reviewer.

In: a Comparison. Out: index.html, whole: text, plots, their library, colours of both themes. It asks no network for anything.
"""

from html import escape
from pathlib import Path

from unheard.report import sections
from unheard.report.comparison import Comparison
from unheard.report.document import document
from unheard.runs import replace_file


def write_page(compared: Comparison, out: str | Path, *, title: str | None = None) -> Path:
    """Write `out`/index.html, whole or not at all; its address comes back."""
    page = Path(out) / "index.html"
    page.parent.mkdir(parents=True, exist_ok=True)
    replace_file(page, render_page(compared, title=title).encode())
    return page


def render_page(compared: Comparison, *, title: str | None = None) -> str:
    """The page's text."""
    shown = sections.all_of(compared)
    links = "".join(f'<li><a href="#{s.anchor}">{escape(s.title)}</a></li>' for s in shown)
    body = "".join(
        f'<section id="{s.anchor}" aria-labelledby="{s.anchor}-h"><h2 id="{s.anchor}-h">{escape(s.title)}</h2>{s.html}</section>'
        for s in shown
    )
    return document(
        heading=title or sections.heading(compared),
        mark="accuracy and privacy report",
        lede=sections.lede(compared),
        contents=f"<ul>{links}</ul>",
        body=body,
        source="run folders",
    )
