"""The appearance of all plots: the colours of the light and the dark theme, the axes, and the style of each run.

    styles = series_styles({"plain": 2, "private": 1})      # a colour and a dash per run
    encoding = {"color": colour_encoding(styles), "strokeDash": dash_encoding(styles)}
    spec = specification({"data": ..., "mark": "line", "encoding": encoding}, description="...")

Colours in a specification are CSS variables. So if the reader changes the theme of the page, the plots change without
being drawn again. For image files, `plots.py` replaces the variables by the colours of the light theme.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
"""The identifier of the Vega-Lite format. Nothing is loaded from this address."""
VEGALITE = "6.4"
"""The version of Vega-Lite that draws the plots, in the form that vl-convert expects."""

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
"""The colours of the light theme by name. The runs have the colours `series-1` to `series-6`; `floor` is for baselines
and budgets."""
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
"""The colours of the dark theme, with the same names."""
SERIES = 6
"""The number of colours for runs."""
DASHES = [[1, 0], [8, 3], [3, 3], [10, 3, 3, 3], [5, 5], [14, 4]]
"""The dash patterns of the runs, as lengths of strokes and gaps in pixels. Runs differ in dash and in colour, for
readers who cannot distinguish the colours and for prints without colour."""
FONT = "ui-sans-serif, system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"


def colour(name: str) -> str:
    """Return a theme colour as a CSS variable.

    >>> colour("ink")
    'var(--ink)'
    """
    return f"var(--{name})"


@dataclass(frozen=True)
class SeriesStyle:
    """The colour and dash of one run. They are the same in all plots and legends."""

    name: str
    """The name of the run."""
    colour: str
    """A CSS colour or CSS variable."""
    dash: list[int]
    """The lengths of strokes and gaps in pixels; [1, 0] is a solid line."""


def series_styles(numbers: Mapping[str, int]) -> list[SeriesStyle]:
    """Return the style of each run, in the order of the runs.

    Args:
        numbers: The colour number of each run, from 1, by run name (`formatting.colour_numbers`). From the seventh on,
            the colours repeat with other dashes.
    """
    return [
        SeriesStyle(name, colour(f"series-{(i - 1) % SERIES + 1}"), DASHES[(i - 1 + (i - 1) // SERIES) % len(DASHES)])
        for name, i in numbers.items()
    ]


def colour_encoding(styles: Sequence[SeriesStyle]) -> dict[str, Any]:
    """Return a Vega-Lite encoding that gives each value of the field `run` its colour."""
    scale = {"domain": [style.name for style in styles], "range": [style.colour for style in styles]}
    return {"field": "run", "type": "nominal", "scale": scale}


def dash_encoding(styles: Sequence[SeriesStyle]) -> dict[str, Any]:
    """Return a Vega-Lite encoding that gives each value of the field `run` its dash."""
    scale = {"domain": [style.name for style in styles], "range": [style.dash for style in styles]}
    return {"field": "run", "type": "nominal", "scale": scale}


def specification(body: dict[str, Any], *, description: str, height: int = 300) -> dict[str, Any]:
    """Return a complete Vega-Lite specification, with the axes, fonts and colours that all plots share.

    Args:
        body: The view: its data, its mark or layers, and its encoding.
        description: A sentence that says what the plot shows, for screen readers.
        height: The height in pixels. The width is that of the element on the page.
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
            "legend": {"disable": True},  # the page shows its own legend (macros.html)
            "line": {"strokeCap": "butt", "strokeJoin": "round"},
            "bar": {"cornerRadiusEnd": 2},
            "text": {"color": colour("soft"), "fontSize": 12},
        },
    }
