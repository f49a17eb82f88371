"""The plots of a comparison as Vega-Lite specifications.

    for plot in plots(Comparison.read(["runs/plain", "runs/private"])):
        plot.name, plot.title, plot.spec

    accuracy_by_round        held-out AccuracyTop1, each evaluation and smoothed, with the baselines as horizontal lines
    epsilon_by_round         the running epsilon, the claimed epsilon as a ring, and the budget as a horizontal line
    accuracy_by_band         AccuracyTop1 by word frequency
    accuracy_by_user         percentiles of AccuracyTop1 over held-out users
    head_word_histograms     the paper's head-word histograms

`tables.py` has the same numbers as tables. `page.py` puts the plots on the page. The plots of `reproduction/` also use
`curve_layer`, `hover_layers` and `end_rounds`.

`write_images` writes all plots as PNG files. It needs no browser, uses the colours of the light theme, and draws title
and legend into the image. `write_png` writes a single plot.

    write_images(Comparison.read(["runs/plain", "runs/private"]), "plots")
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unheard.formatting import accountant_title
from unheard.report.comparison import Comparison
from unheard.report.run_record import accuracy_points, epsilon_points
from unheard.report.style import (
    LIGHT,
    VEGALITE,
    SeriesStyle,
    colour,
    colour_encoding,
    dash_encoding,
    series_styles,
    specification,
)
from unheard.report.tables import PERCENTILES
from unheard.run_folder import replace_file


@dataclass(frozen=True, kw_only=True)
class Plot:
    """One plot and its legend."""

    name: str
    """The name of the image file, without its ending, and the anchor of the plot on the page."""
    title: str
    """The title above the plot."""
    spec: dict[str, Any]
    """The Vega-Lite specification. Its colours are CSS variables of the page (`style.colour`)."""
    legend: Sequence[SeriesStyle] = ()
    """The entries of the legend, in order: one for each run, and one for the baseline if it is drawn."""
    zoom: tuple[int, int] | None = None
    """The first and the last round if the horizontal axis is the round, so that the plot can be zoomed; else None."""
    has_lines: bool = False
    """Whether the runs are drawn as lines. If so, the legend shows their dashes."""


ROUND_AXIS = {
    "field": "round",
    "type": "quantitative",
    "axis": {"title": "round", "format": "~s", "tickCount": 6, "tickMinStep": 1},
    "scale": {"nice": False, "padding": 12},
}
"""The encoding of the horizontal axis of all plots by round."""
ZOOM = {
    "type": "interval",
    "encodings": ["x"],
    "zoom": "wheel![event.ctrlKey || event.metaKey]",
    "translate": "[pointerdown[event.pointerType != 'touch'], window:pointerup] > window:pointermove!",
}
"""How the reader zooms. The wheel zooms only together with Ctrl or Cmd, and a finger does not drag the plot, so that
the wheel and the finger still scroll the page."""
PADDING = 20
"""The number of pixels between the smallest or largest value and the edge of a plot."""
BIGRAM = "bigram with back-off"
"""The name in `measures.json` of the baseline that `accuracy_by_band` shows."""
OUTSIDE = "not in the dictionary"
"""The band of words outside the dictionary. It is not drawn: such a word always counts as wrong."""


def plots(compared: Comparison) -> list[Plot]:
    """Return all plots for which the runs have data.

    `accuracy_by_round` needs an evaluation, and `epsilon_by_round` a private run. The other plots need full measures
    (`unheard evaluate --full`) of at least one run.
    """
    drawn = [accuracy_by_round(compared), epsilon_by_round(compared)]
    if compared.measured:
        drawn += [accuracy_by_band(compared), accuracy_by_user(compared), *head_word_histograms(compared)]
    return [plot for plot in drawn if plot is not None]


def accuracy_by_round(compared: Comparison) -> Plot | None:
    """Plot held-out AccuracyTop1 by round. Return None if no run has an evaluation yet.

    A thin line shows each evaluation, and a bold line the mean over five evaluations, as in the paper. Dotted
    horizontal lines show the simple baselines, if a run has full measures.
    """
    points = [point for record in compared.records for point in accuracy_points(record)]
    if not points:
        return None
    styles = series_styles(compared.colours)
    first = next(iter(compared.measured.values()), {})
    baselines = [
        {"label": name, "value": figures["tokens"]["accuracy_top1"]}
        for name, figures in first.get("baselines", {}).items()
    ]
    scale = share_scale([point["value"] for point in points] + [baseline["value"] for baseline in baselines])
    y = {"type": "quantitative", "scale": scale, "axis": {"title": None, "format": ".0%"}}
    layers = [
        *rule_layers(baselines),
        curve_layer({**y, "field": "value"}, styles, width=1.1, opacity=0.4),
        curve_layer({**y, "field": "smoothed"}, styles, zoom=True),
        *hover_layers(styles, "smoothed", ".2%"),
    ]
    names = ", ".join(style.name for style in styles)
    spec = specification(
        {"data": {"values": points}, "layer": layers},
        description=f"AccuracyTop1 on held-out users by round, for {names}: each evaluation thin, smoothed over 5 "
        "bold.",
    )
    return Plot(
        name="accuracy-by-round",
        title="AccuracyTop1 by round",
        spec=spec,
        legend=styles,
        zoom=end_rounds(points),
        has_lines=True,
    )


def epsilon_by_round(compared: Comparison) -> Plot | None:
    """Plot epsilon by round for the private runs. Return None if there are none.

    The line is the bound of the RDP accountant during training. The ring is the claimed epsilon at the end. It can be
    smaller, because the claim may use a tighter accountant. Dotted horizontal lines show the budgets.
    """
    private = [record for record in compared.records if record.is_private]
    points = [point for record in private for point in epsilon_points(record)]
    if not points:
        return None
    all_styles = series_styles(compared.colours)
    styles = [style for style in all_styles if style.name in {record.name for record in private}]
    claims = [
        {
            "run": r.name,
            "round": r.rounds,
            "epsilon": r.epsilon,
            "by": accountant_title(r.statement["claimed"]["accountant"]),
        }
        for r in private
    ]
    budgets = [r.tables.get("privacy", {}).get("budget_epsilon") for r in private]
    y = {"field": "epsilon", "type": "quantitative", "axis": {"title": None}, "scale": {"domainMin": 0, "nice": True}}
    ring = {
        "data": {"values": claims},
        "mark": {"type": "point", "filled": False, "size": 120, "strokeWidth": 2.5, "opacity": 1},
        "encoding": {
            "x": ROUND_AXIS,
            "y": y,
            "color": colour_encoding(styles),
            "tooltip": [
                {"field": "run"},
                {"field": "epsilon", "type": "quantitative", "format": ".4g", "title": "ε claimed"},
                {"field": "by"},
            ],
        },
    }
    layers = [
        *rule_layers([{"label": "budget", "value": budget} for budget in budgets if budget]),
        curve_layer(y, styles, zoom=True),
        *hover_layers(styles, "epsilon", ".4g"),
        ring,
    ]
    names = ", ".join(style.name for style in styles)
    spec = specification(
        {"data": {"values": points}, "layer": layers},
        description=f"Epsilon spent by round, by RDP, for {names}. Rings: the claimed bound at the end.",
    )
    return Plot(
        name="epsilon-by-round", title="ε by round", spec=spec, legend=styles, zoom=end_rounds(points), has_lines=True
    )


def curve_layer(
    y: dict[str, Any], styles: Sequence[SeriesStyle], *, width: float = 2.5, opacity: float = 1.0, zoom: bool = False
) -> dict[str, Any]:
    """Return a Vega-Lite layer with one curve per run.

    Args:
        y: The encoding of the vertical axis.
        styles: The styles of the runs.
        width: The stroke width in pixels.
        opacity: The opacity of the curves, from 0 to 1.
        zoom: Whether to add the zoom of the plot. Set it for exactly one layer of a plot.
    """
    encoding = {"x": ROUND_AXIS, "y": y, "color": colour_encoding(styles), "strokeDash": dash_encoding(styles)}
    layer = {"mark": {"type": "line", "strokeWidth": width, "opacity": opacity, "clip": True}, "encoding": encoding}
    return {**layer, "params": [{"name": "view", "select": ZOOM, "bind": "scales"}]} if zoom else layer


def hover_layers(styles: Sequence[SeriesStyle], field: str, number_format: str) -> list[dict[str, Any]]:
    """Return layers that show the values of all runs at the round under the pointer, as dots and in a tooltip.

    Args:
        styles: The styles of the runs.
        field: The field of the data whose value is shown.
        number_format: The number format of the tooltip, in the notation of d3-format.
    """
    near = {"type": "point", "fields": ["round"], "nearest": True, "on": "pointerover", "clear": "pointerout"}

    def seen(value: float) -> dict[str, Any]:
        """Return the encoding of an opacity: `value` at the round under the pointer, 0 at all other rounds."""
        return {"condition": {"param": "near", "empty": False, "value": value}, "value": 0}

    # Vega-Lite reads dots and brackets in a field name as a path, and a run name may contain them. So the columns are
    # numbered, and the run names are their titles. It copies a title into a string of JavaScript without escaping it.
    names = [style.name for style in styles]
    number = f"indexof({json.dumps(names)}, datum.run)"
    tips = [{"field": "round", "type": "quantitative", "format": ","}]
    tips += [
        {"field": f"run{i}", "type": "quantitative", "format": number_format, "title": name.replace("\\", r"\\")}
        for i, name in enumerate(names)
    ]
    rule = {
        "transform": [
            {"calculate": f"'run' + {number}", "as": "column"},
            {"pivot": "column", "value": field, "groupby": ["round"]},
        ],
        "mark": {"type": "rule", "color": colour("soft"), "strokeWidth": 1},
        "encoding": {"x": ROUND_AXIS, "opacity": seen(0.6), "tooltip": tips},
        "params": [{"name": "near", "select": near}],
    }
    dots = {
        "mark": {"type": "point", "filled": True, "size": 70, "clip": True},
        "encoding": {
            "x": ROUND_AXIS,
            "y": {"field": field, "type": "quantitative"},
            "color": colour_encoding(styles),
            "opacity": seen(1),
        },
    }
    return [dots, rule]


def rule_layers(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return layers with dotted horizontal lines and their labels.

    Args:
        lines: For each line a dictionary with `label` and `value`, its height on the vertical axis.
    """
    if not lines:
        return []
    y = {"field": "value", "type": "quantitative"}
    rule = {"mark": {"type": "rule", "color": colour("floor"), "strokeDash": [2, 4]}, "encoding": {"y": y}}
    text = {"type": "text", "align": "right", "baseline": "bottom", "dy": -4, "color": colour("soft"), "x": "width"}
    label = {"mark": text, "encoding": {"y": y, "text": {"field": "label"}}}
    return [{"data": {"values": list(lines)}, **layer} for layer in (rule, label)]


def share_scale(values: Sequence[float | None]) -> dict[str, Any]:
    """Return a scale for shares whose axis does not extend below zero.

    If the smallest value is near zero, the padding would extend the axis to negative shares, so the axis begins at
    zero. Otherwise it begins near the smallest value.

    Args:
        values: The values on the axis. None and infinite values are ignored.
    """
    known = [value for value in values if value is not None and math.isfinite(value)] or [0.0]
    low, high = min(known), max(known)
    if low < 0.15 * (high - low) or low == high:
        return {"domainMin": 0, "nice": True}
    return {"zero": False, "padding": PADDING}


def end_rounds(points: Sequence[dict[str, Any]]) -> tuple[int, int]:
    """Return the first and the last round of the points of a plot."""
    rounds = [int(point["round"]) for point in points]
    return min(rounds), max(rounds)


def accuracy_by_band(compared: Comparison) -> Plot:
    """Plot AccuracyTop1 by word frequency as bars, for each run with full measures and for the bigram baseline."""
    measured = compared.measured
    shown = {name: measures["bands"] for name, measures in measured.items()}
    legend = _measured_styles(compared)
    if floor := next(iter(measured.values()))["baselines"].get(BIGRAM):
        shown[BIGRAM] = floor["bands"]
        legend = [*legend, SeriesStyle(BIGRAM, colour("floor"), [1, 0])]
    rows = [
        {"words": band["band"], "run": name, "value": band["accuracy_top1"], "share": band["share"]}
        for name, bands in shown.items()
        for band in bands
        if band["accuracy_top1"] is not None and band["band"] != OUTSIDE
    ]
    order = list(dict.fromkeys(row["words"] for row in rows))
    encoding = {
        "y": {"field": "words", "type": "nominal", "sort": order, "axis": {"title": None, "labelLimit": 130}},
        "yOffset": {"field": "run", "sort": list(shown)},
        "x": {"field": "value", "type": "quantitative", "axis": _share_axis("AccuracyTop1")},
        "color": colour_encoding(legend),
        "tooltip": [
            {"field": "words"},
            {"field": "run"},
            {"field": "value", "type": "quantitative", "format": ".2%", "title": "AccuracyTop1"},
            {"field": "share", "type": "quantitative", "format": ".1%", "title": "share of text"},
        ],
    }
    spec = specification(
        {"data": {"values": rows}, "mark": {"type": "bar"}, "encoding": encoding},
        description=f"AccuracyTop1 by how frequent the word is, for {', '.join(shown)}.",
        height=max(220, 18 * len(rows)),
    )
    return Plot(name="accuracy-by-band", title="AccuracyTop1 by word frequency", spec=spec, legend=legend)


def accuracy_by_user(compared: Comparison) -> Plot:
    """Plot the distribution of AccuracyTop1 over held-out users, for each run with full measures.

    A line goes from the 5th to the 95th percentile, a bar from the 25th to the 75th, and a tick marks the median.
    """
    rows = [{"run": name, **m["users"]["accuracy_top1"]} for name, m in compared.measured.items()]
    legend = _measured_styles(compared)
    x: dict[str, Any] = {"type": "quantitative", "scale": share_scale([row[p] for row in rows for p in ("p5", "p95")])}
    axis, titles = _share_axis("AccuracyTop1 of one user"), {**PERCENTILES, "mean": "mean"}
    shared = {
        "y": {"field": "run", "type": "nominal", "sort": [row["run"] for row in rows], "axis": None},
        "color": colour_encoding(legend),
        "tooltip": [{"field": "run"}]
        + [{"field": f, "type": "quantitative", "format": ".1%", "title": title} for f, title in titles.items()],
    }
    layers = [
        {"mark": {"type": "rule", "strokeWidth": 2}, "encoding": {"x": {**x, "field": "p5", "axis": axis}, "x2": {"field": "p95"}}},
        {"mark": {"type": "bar", "height": 18, "opacity": 0.45}, "encoding": {"x": {**x, "field": "p25"}, "x2": {"field": "p75"}}},
        {"mark": {"type": "tick", "thickness": 3, "size": 26}, "encoding": {"x": {**x, "field": "p50"}}},
    ]  # fmt: skip
    spec = specification(
        {"data": {"values": rows}, "encoding": shared, "layer": layers},
        description="AccuracyTop1 over held-out users: 5th to 95th percentile, the middle half, and the "
        "median of each run.",
        height=54 * len(rows),
    )
    return Plot(name="accuracy-by-user", title="AccuracyTop1 by user", spec=spec, legend=legend)


def head_word_histograms(compared: Comparison) -> list[Plot]:
    """Plot how many of the 10 best suggestions are among the 10, 50 and 100 most frequent words, as three plots."""
    return [_head(compared, head) for head in ("10", "50", "100")]


def _head(compared: Comparison, head: str) -> Plot:
    """Plot how many of the 10 best suggestions are among the `head` most frequent words.

    Args:
        compared: The runs.
        head: "10", "50" or "100", as in `measures.json`.
    """
    rows, legend = [], _measured_styles(compared)
    for name, measures in compared.measured.items():
        counts = measures["head_words"][head]
        rows += [{"run": name, "n": n, "count": c, "share": c / max(sum(counts), 1)} for n, c in enumerate(counts)]
    encoding = {
        "x": {"field": "n", "type": "ordinal", "axis": {"title": "of 10 suggestions", "labelAngle": 0}},
        "xOffset": {"field": "run", "sort": [style.name for style in legend]},
        "y": {"field": "share", "type": "quantitative", "axis": {"title": None, "format": ".0%", "tickCount": 4}},
        "color": colour_encoding(legend),
        "tooltip": [
            {"field": "run"},
            {"field": "n", "title": f"in the top {head}"},
            {"field": "share", "type": "quantitative", "format": ".1%", "title": "of places"},
            {"field": "count", "type": "quantitative", "format": ",", "title": "places"},
        ],
    }
    spec = specification(
        {"data": {"values": rows}, "mark": {"type": "bar"}, "encoding": encoding},
        description=f"How many of the 10 suggestions are among the {head} most frequent words: share of places, for "
        "each run.",
        height=190,
    )
    return Plot(name=f"head-words-{head}", title=f"Among the {head} most frequent", spec=spec, legend=legend)


def _measured_styles(compared: Comparison) -> list[SeriesStyle]:
    """Return the styles of the runs that have full measures."""
    return [style for style in series_styles(compared.colours) if style.name in compared.measured]


def _share_axis(title: str) -> dict[str, Any]:
    """Return an axis whose labels are percentages."""
    return {"title": title, "format": ".0%", "grid": True, "tickCount": 6}


WIDTH = 720
"""The width of a plot in an image file, in pixels before scaling."""
SCALE = 2.0
"""The number of pixels of a PNG file for one pixel of the plot; 2 suits screens with high resolution."""


def write_images(compared: Comparison, out: str | Path) -> list[Path]:
    """Write each plot of a comparison as a PNG file.

    Args:
        compared: The runs.
        out: The folder. It is created if it does not exist; files of the same names are replaced.

    Returns:
        The paths of the files, one `NAME.png` per plot.
    """
    return [write_png(plot, Path(out)) for plot in plots(compared)]


def write_png(plot: Plot, folder: Path) -> Path:
    """Write one plot as `folder/NAME.png`, where NAME is the plot's name, and return the path.

    Args:
        plot: The plot.
        folder: The folder. It is created if it does not exist.
    """
    import vl_convert

    path = folder / f"{plot.name}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, vl_convert.vegalite_to_png(spec_for_file(plot), vl_version=VEGALITE, scale=SCALE))
    return path


def spec_for_file(plot: Plot) -> str:
    """Return the specification of a plot for an image file, as JSON.

    On the page, HTML and CSS supply the title, the legend, the background, the width and the values of the colour
    variables. In a file the specification must contain them.
    """
    # Three columns: four or more legend entries in one row would be wider than the image.
    legend = {"orient": "top", "title": None, "labelColor": LIGHT["ink"], "labelLimit": 320, "symbolOpacity": 1}
    legend |= {"columns": 3, "columnPadding": 24, "rowPadding": 6}
    if plot.has_lines:  # the dashes of a run are visible on a line, not on a dot
        legend |= {"symbolType": "stroke", "symbolSize": 500, "symbolStrokeWidth": 3}
    spec = {
        **plot.spec,
        "width": WIDTH,
        "background": LIGHT["card"],
        "padding": 24,
        "title": {"text": plot.title, "anchor": "start", "color": LIGHT["ink"], "fontSize": 16, "offset": 16},
        "config": {**plot.spec["config"], "legend": legend},
    }
    text = json.dumps(spec)
    for name, value in LIGHT.items():
        text = text.replace(f"var(--{name})", value)
    return text
