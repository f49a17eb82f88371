"""The appearance of every plot: colours of the light and the dark theme, axes, and the style of each run.

    styles = series_styles({"plain": 2, "private": 1})      # a colour and a dash per run
    encoding = {"color": colour_encoding(styles), "strokeDash": dash_encoding(styles)}
    spec = specification({"data": ..., "mark": "line", "encoding": encoding}, description="...")

Colours in a specification are CSS variables, so a plot on the page follows the reader's theme without being drawn
again. `write_images` in plots.py replaces them by the values of the light theme.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"  # an identifier; nothing is fetched
VEGALITE = "6.4"
"""Version of Vega-Lite, as vl-convert names it."""

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
"""Colours of the light theme by name. `series-1` to `series-6` are those of the runs."""
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
"""Colours of the dark theme, with the same names."""
SERIES = 6
"""Number of series colours."""
DASHES = [[1, 0], [8, 3], [3, 3], [10, 3, 3, 3], [5, 5], [14, 4]]
"""Runs differ by dash as well as by colour, for readers who cannot distinguish colours and for grey printers."""
FONT = "ui-sans-serif, system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"


def colour(name: str) -> str:
    """The CSS variable of a theme colour."""
    return f"var(--{name})"


@dataclass(frozen=True)
class SeriesStyle:
    """The colour and dash of one run, the same in every plot and legend."""

    name: str
    colour: str
    """A CSS colour or variable."""
    dash: list[int]
    """Lengths of strokes and gaps in pixels; [1, 0] is a solid line."""


def series_styles(numbers: Mapping[str, int]) -> list[SeriesStyle]:
    """A style for each run, in the order of the runs.

    Args:
        numbers: The number of each run's colour, from 1 (`formatting.colour_numbers`). After the sixth the colours repeat
            with other dashes.
    """
    return [
        SeriesStyle(name, colour(f"series-{(i - 1) % SERIES + 1}"), DASHES[(i - 1 + (i - 1) // SERIES) % len(DASHES)])
        for name, i in numbers.items()
    ]


def colour_encoding(styles: Sequence[SeriesStyle]) -> dict[str, Any]:
    """A Vega-Lite encoding of the field `run` by colour."""
    scale = {"domain": [style.name for style in styles], "range": [style.colour for style in styles]}
    return {"field": "run", "type": "nominal", "scale": scale}


def dash_encoding(styles: Sequence[SeriesStyle]) -> dict[str, Any]:
    """A Vega-Lite encoding of the field `run` by dash."""
    scale = {"domain": [style.name for style in styles], "range": [style.dash for style in styles]}
    return {"field": "run", "type": "nominal", "scale": scale}


def specification(body: dict[str, Any], *, description: str, height: int = 300) -> dict[str, Any]:
    """Complete a Vega-Lite view to a specification with the common axes, fonts and colours.

    Args:
        body: The view: data, mark or layers, encoding.
        description: What the plot shows, for screen readers.
        height: Height in pixels; the width follows the page.
    """
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
            "legend": {"disable": True},  # the page has its own legend (macros.html)
            "line": {"strokeCap": "butt", "strokeJoin": "round"},
            "bar": {"cornerRadiusEnd": 2},
            "text": {"color": colour("soft"), "fontSize": 12},
        },
    }
