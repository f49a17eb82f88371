"""One page that opens from disk: what the model learned, what privacy cost, for a product owner and for a privacy reviewer.

In: a Comparison. Out: index.html, whole: text, plots, their library, colours of both themes. It asks no network for anything.
What every page has around its sections: themes, header, contents, the plots' library. It opens from disk and asks no network.

In: pieces of HTML, already escaped except the heading. Out: the page's text.
"""

from collections.abc import Mapping
from datetime import date
from functools import cache
from html import escape
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

from unheard.report import sections
from unheard.report.comparison import Comparison
from unheard.report.style import DARK, LIGHT, VEGALITE
from unheard.run_folder import replace_file


def document(
    *,
    heading: str,
    mark: str,
    lede: str,
    contents: str,
    body: str,
    source: str,
    styles: tuple[str, ...] = ("page.css",),
) -> str:
    """A whole page. `source` says what it was written from."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="generator" content="unheard {version("unheard")}">
<title>{escape(heading)} · Unheard</title>
<link rel="icon" href="data:,">
<style>{_colours()}{"".join(_file(name) for name in styles)}</style>
</head>
<body>
<a class="skip" href="#main">To the content</a>
<header class="top">
<p class="mark"><b>Unheard</b> · {escape(mark)}</p>
<h1>{escape(heading)}</h1>
<p class="lede">{lede}</p>
<nav aria-label="On this page">{contents}</nav>
</header>
<main id="main">{body}</main>
<footer>Written by unheard {version("unheard")} on {date.today().isoformat()} from {escape(source)} alone. This page loads nothing
and sends nothing.</footer>
<script>{_library()}</script>
<script>{_file("page.js")}</script>
</body>
</html>
"""


def _colours() -> str:
    # Dark on screens only: a printed page is light.
    return f":root{{{_variables(LIGHT)}}}@media screen and (prefers-color-scheme: dark){{:root{{{_variables(DARK)}}}}}"


def _variables(colours: Mapping[str, str]) -> str:
    return "".join(f"--{name}:{value};" for name, value in colours.items())


def _file(name: str) -> str:
    return files("unheard.report").joinpath(name).read_text(encoding="utf-8")


@cache
def _library() -> str:
    """Vega, Vega-Lite and vega-embed (BSD-3-Clause), as vl-convert carries them: 0.9 MB."""
    import vl_convert

    # A script element ends at the first closing tag, wherever it stands: inside a string it may be written with an escape.
    bundle = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", vl_version=VEGALITE)
    return bundle.replace("</script", "<\\/script")


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
