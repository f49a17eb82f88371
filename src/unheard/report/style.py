"""One look for every plot: colours of the page's light and dark themes, quiet axes, room to breathe.

In: a Vega-Lite layer. Out: a whole specification. On the page colours are CSS variables, so that a plot follows the reader's
theme without being drawn again; in a PNG or SVG file they are the light theme's own values.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"  # a name, as an XML namespace is: nothing is fetched
VEGALITE = "6.4"

LIGHT = {
    "paper": "#fbfaf7",
    "card": "#ffffff",
    "ink": "#22272e",
    "soft": "#5a6370",
    "line": "#e4e1d9",
    "floor": "#8b8578",
    "series-1": "#2c5f8d",
    "series-2": "#b9511d",
    "series-3": "#2d7a58",
    "series-4": "#84489a",
    "series-5": "#86670f",
    "series-6": "#ad3558",
}
DARK = {
    "paper": "#14171b",
    "card": "#1b1f25",
    "ink": "#e6e4df",
    "soft": "#a3aab4",
    "line": "#30363e",
    "floor": "#8f897c",
    "series-1": "#82b4e6",
    "series-2": "#f0a273",
    "series-3": "#79cba4",
    "series-4": "#cda2e2",
    "series-5": "#d9bf6c",
    "series-6": "#f293b0",
}
SERIES = 6
DASHES = [[1, 0], [8, 3], [3, 3], [10, 3, 3, 3], [5, 5], [14, 4]]
"""Runs differ by dash as well as by colour, for those who do not tell colours apart and for grey printers."""
FONT = "ui-sans-serif, system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"


def colour(name: str) -> str:
    return f"var(--{name})"


@dataclass(frozen=True)
class SeriesStyle:
    """How one run looks, in every plot and beside its name."""

    name: str
    colour: str
    dash: list[int]


def series_styles(names: Sequence[str]) -> list[SeriesStyle]:
    """By the order of the runs; after the sixth the colours begin again, with other dashes."""
    return [
        SeriesStyle(name, colour(f"series-{i % SERIES + 1}"), DASHES[(i + i // SERIES) % len(DASHES)])
        for i, name in enumerate(names)
    ]


def colour_encoding(shown: Sequence[SeriesStyle]) -> dict[str, Any]:
    """An encoding of the run by its colour."""
    scale = {"domain": [look.name for look in shown], "range": [look.colour for look in shown]}
    return {"field": "run", "type": "nominal", "scale": scale}


def dash_encoding(shown: Sequence[SeriesStyle]) -> dict[str, Any]:
    scale = {"domain": [look.name for look in shown], "range": [look.dash for look in shown]}
    return {"field": "run", "type": "nominal", "scale": scale}


def specification(body: dict[str, Any], *, description: str, height: int = 300) -> dict[str, Any]:
    """The layer with everything around it."""
    axis = {
        "labelColor": colour("soft"),
        "titleColor": colour("soft"),
        "labelFontSize": 12,
        "titleFontSize": 12,
        "titleFontWeight": 400,
        "titlePadding": 12,
        "labelPadding": 6,
        "gridColor": colour("line"),
        "domain": False,
        "ticks": False,
    }
    return {
        "$schema": SCHEMA,
        "description": description,
        "width": "container",
        "height": height,
        "background": None,
        "autosize": {"type": "fit-x", "contains": "padding"},
        **body,
        "config": {
            "font": FONT,
            "view": {"stroke": None},
            "axis": axis,
            "axisX": {"grid": False},
            "legend": {"disable": True},  # the page has its own, which wraps and can be read aloud
            "line": {"strokeCap": "butt", "strokeJoin": "round"},
            "bar": {"cornerRadiusEnd": 2},
            "text": {"color": colour("soft"), "fontSize": 12},
        },
    }


def for_file(spec: dict[str, Any], title: str, width: int = 720, *, is_line: bool = False) -> dict[str, Any]:
    """The same plot for a file: a title and a legend in it, colours written out, a width of its own, a background."""
    legend = {"orient": "top", "title": None, "labelColor": LIGHT["ink"], "labelLimit": 320, "symbolOpacity": 1}
    # Three in a row: more run out of the picture. Lines are shown as lines, since dashes do not show on dots.
    legend |= {"columns": 3, "columnPadding": 24, "rowPadding": 6}
    if is_line:
        legend |= {"symbolType": "stroke", "symbolSize": 500, "symbolStrokeWidth": 3}
    around = {
        "width": width,
        "background": LIGHT["card"],
        "padding": 24,
        "title": {"text": title, "anchor": "start", "color": LIGHT["ink"], "fontSize": 16, "offset": 16},
        "config": {**spec["config"], "legend": legend},
    }
    text = json.dumps({**spec, **around})
    for name, value in LIGHT.items():
        text = text.replace(f"var(--{name})", value)
    return json.loads(text)
