"""Draw the figures of the paper: curves by round with their seeds, sweeps over a setting, and points of models.

    plot = plot_of(figure)          # takes a `Figure`, returns a `Plot` (Vega-Lite specification and legend)

The page shows the legend next to the plot; a picture file shows it inside the picture (`unheard.report.plots`).
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

from reproduction.exhibit import Figure, Line
from unheard.report.plots import ROUND_AXIS, Plot, curve_layer, end_rounds, hover_layers
from unheard.report.style import DASHES, SERIES, SeriesStyle, colour, colour_encoding, dash_encoding, specification

EARLY = 25
"""The first 1/EARLY of the rounds is ignored when the lower end of the vertical axis is chosen."""
NEAR_ZERO = 0.02
"""If the smallest value is below this, the vertical axis begins at zero; padding would show negative accuracies."""
LABEL_OFFSET = 84
"""Pixels between the right edge and the label of a level, in a figure whose labelled vertical line is at that edge."""
SOLID, DASHED, DOTTED = [1, 0], [7, 4], [2, 3]


def plot_of(figure: Figure) -> Plot:
    """Return the Vega-Lite specification and the legend of a figure. Lines without points are left out."""
    drawn = [line for line in figure.lines if line.points]
    legend = legend_styles(drawn)
    make = _by_round if figure.x == "round" else _scatter if figure.is_scatter else _sweep
    description = f"{figure.title}, for {', '.join(style.name for style in legend)}."
    spec, zoom = specification(make(figure, drawn, legend), description=description), None
    if figure.x == "round":
        zoom = end_rounds([{"round": x} for line in drawn for x, _ in line.points])
    shown = {"spec": spec, "legend": legend, "zoom": zoom, "has_lines": not figure.is_scatter}
    return Plot(name=figure.name, title=figure.title, **shown)


def legend_styles(lines: Sequence[Line]) -> list[SeriesStyle]:
    """Return the styles of the lines in the legend. Single seeds and horizontal levels are not in the legend.

    Lines with the same tint have the same colour. If dashes have a meaning in this figure (`per layer`), only the lines
    with `is_dashed` are dashed; otherwise each line has its own dashes, so that colour is not the only difference.
    """
    tints = list(dict.fromkeys(line.tint or line.name for line in lines))
    has_meaning = any(line.is_dashed or line.is_level for line in lines)
    styles = []
    for line in lines:
        if line.is_thin or line.is_level:
            continue
        i = tints.index(line.tint or line.name)
        plain = SOLID if has_meaning else DASHES[(i + i // SERIES) % len(DASHES)]
        styles.append(SeriesStyle(line.name, _colour(lines, line), DASHED if line.is_dashed else plain))
    return styles


def _colour(lines: Sequence[Line], line: Line) -> str:
    """Return the colour of a line: tints get the colours of the series in the order of the lines."""
    tints = list(dict.fromkeys(one.tint or one.name for one in lines))
    return colour(f"series-{tints.index(line.tint or line.name) % SERIES + 1}")


def _by_round(figure: Figure, lines: Sequence[Line], legend: Sequence[SeriesStyle]) -> dict[str, Any]:
    """Return curves by round, with zoom and a tooltip. Single seeds are thin lines behind their mean."""
    y = {"field": "value", **_y(figure)}
    y["scale"] = {**y["scale"], **_begin(lines)}
    bold = [line for line in lines if not line.is_thin]
    layers: list[dict[str, Any]] = []
    for line in (line for line in lines if line.is_thin):
        mark = {"type": "line", "strokeWidth": 1.1, "opacity": 0.4, "clip": True, "color": _colour(lines, line)}
        data = {"values": _values([line], "round")}
        layers.append({"data": data, "mark": mark, "encoding": {"x": ROUND_AXIS, "y": y}})
    layers += [curve_layer(y, legend, zoom=True), *hover_layers(legend, "value", ".2%")]
    # A line with one point is invisible, so a run that was evaluated once is drawn as a dot.
    if single := [line for line in bold if len(line.points) == 1]:
        dot = {"type": "point", "filled": True, "size": 70, "opacity": 1, "clip": True}
        encoding = {"x": ROUND_AXIS, "y": y, "color": colour_encoding(legend)}
        layers.append({"data": {"values": _values(single, "round")}, "mark": dot, "encoding": encoding})
    return {"data": {"values": _values(bold, "round")}, "layer": layers}


def _sweep(figure: Figure, lines: Sequence[Line], legend: Sequence[SeriesStyle]) -> dict[str, Any]:
    """Return lines of accuracy over a setting, with levels as dotted horizontal lines."""
    across = [line for line in lines if not line.is_level]
    where = sorted({x for line in across for x, _ in line.points})
    axis = {"title": figure.x, "values": where, "format": ".4~g", "labelOverlap": "greedy", "grid": False}
    kind = {"type": "log"} if figure.is_log else {"type": "linear", "zero": False}
    scale = {**kind, "nice": False, "padding": 24}
    x = {"field": "x", "type": "quantitative", "axis": axis, "scale": scale}
    y = {"field": "value", **_y(figure)}
    lowest = min(value for line in lines for _, value in line.points)
    if lowest < NEAR_ZERO:
        y["scale"] = {**y["scale"], "domainMin": 0}
    tips = _tips(figure, "line", {}, ".2%")
    encoding = {"x": x, "y": y, "color": colour_encoding(legend)}
    layers = [] if figure.upright is None else _upright(figure.upright, x)
    for line in (line for line in lines if line.is_level):
        others = [other for other in lines if other is not line]
        layers += _level(line, y, _colour(lines, line), others, 4 if figure.upright is None else LABEL_OFFSET)
    dashes = {**encoding, "strokeDash": dash_encoding(legend)}
    point = {"type": "point", "filled": True, "size": 60, "opacity": 1}
    layers.append({"mark": {"type": "line", "strokeWidth": 2.5}, "encoding": dashes})
    layers.append({"mark": point, "encoding": {**encoding, "tooltip": tips}})
    return {"data": {"values": _values(across, "x")}, "layer": layers}


def _scatter(figure: Figure, lines: Sequence[Line], legend: Sequence[SeriesStyle]) -> dict[str, Any]:
    """Return a scatter plot with one point per model."""
    x = {
        "field": "x",
        "type": "quantitative",
        "axis": {"title": figure.x, "tickCount": 6, "format": ".4~g"},
        "scale": {"zero": False, "padding": 24, "nice": False},
    }
    tips = _tips(figure, "among", {"format": ".2f"}, ".2f")
    return {
        "data": {"values": _values(lines, "x")},
        "mark": {"type": "point", "filled": True, "size": 90, "opacity": 0.9},
        "encoding": {"x": x, "y": {"field": "value", **_y(figure)}, "color": colour_encoding(legend), "tooltip": tips},
    }


def _tips(figure: Figure, series: str, x_format: dict[str, str], y_format: str) -> list[dict[str, Any]]:
    """Return the fields of the tooltip: the name of the line or model, and both values.

    Args:
        figure: The figure, whose labels name the values.
        series: Label of the name of the line.
        x_format: Format of x, as keys of a Vega-Lite field; empty for the default.
        y_format: Format of y.
    """
    x = {"field": "x", "type": "quantitative", **x_format, "title": figure.x}
    y = {"field": "value", "type": "quantitative", "format": y_format, "title": figure.y}
    return [{"field": "run", "title": series}, x, y]


def _begin(lines: Sequence[Line]) -> dict[str, float]:
    """Return the lower end of the vertical axis: the smallest value after the first 1/EARLY of the rounds.

    Accuracy rises steeply at first. An axis that showed this rise would leave little resolution for the later rounds,
    which are compared.
    """
    rounds = [x for line in lines for x, _ in line.points]
    early = min(rounds) + (max(rounds) - min(rounds)) / EARLY
    later = [y for line in lines for x, y in line.points if x >= early]
    if not later:
        return {}
    return {"domainMin": 0 if min(later) < NEAR_ZERO else min(later)}


def _y(figure: Figure) -> dict[str, Any]:
    """Return the encoding of the vertical axis; the caller adds the field."""
    axis = {"title": None, "format": ".2~%"} if figure.is_share else {"title": figure.y}
    return {"type": "quantitative", "scale": {"zero": False, "padding": 20}, "axis": axis}


def _level(line: Line, y: dict[str, Any], tint: str, others: Sequence[Line], from_end: int) -> list[dict[str, Any]]:
    """Return a dotted horizontal line with a label where the other lines leave most space.

    Args:
        line: The level.
        y: Encoding of the vertical axis.
        tint: Colour of the line and its label.
        others: The other lines of the figure.
        from_end: Pixels between the label and the right edge, if the label is there.
    """
    word = line.name.rpartition(", ")[2]
    values = {"values": [{"value": line.points[0][1], "word": word}]}
    rule = {"type": "rule", "color": tint, "strokeDash": DOTTED, "strokeWidth": 1.5, "opacity": 0.8}
    is_at_end, is_above = _label_position(line, others)
    side = {"align": "right", "dx": -from_end, "x": "width"} if is_at_end else {"align": "left", "dx": 4, "x": 0}
    height = {"baseline": "bottom", "dy": -3} if is_above else {"baseline": "top", "dy": 3}
    text = {"type": "text", "color": tint, "fontSize": 11, **side, **height}
    return [
        {"data": values, "mark": rule, "encoding": {"y": y}},
        {"data": values, "mark": text, "encoding": {"y": y, "text": {"field": "word"}}},
    ]


def _label_position(level: Line, others: Sequence[Line]) -> tuple[bool, bool]:
    """Return the position of the label: whether it is at the right end, and whether it is above the line."""
    own = level.points[0][1]

    def distance_to_next_line(position: tuple[bool, bool]) -> float:
        """Return the free space at a position, in units of the vertical axis."""
        is_at_end, is_above = position
        gaps = [line.points[-1 if is_at_end else 0][1] - own for line in others]
        return min((abs(gap) for gap in gaps if gap == 0 or (gap > 0) is is_above), default=math.inf)

    return max(itertools.product((True, False), (True, False)), key=distance_to_next_line)


def _upright(upright: tuple[float, str], x: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a dashed vertical line with a label.

    Args:
        upright: Position and label.
        x: Encoding of the horizontal axis.
    """
    values = {"values": [{"x": upright[0], "word": upright[1]}]}
    rule = {"type": "rule", "color": colour("series-6"), "strokeDash": DASHED, "strokeWidth": 1.5}
    text = {"type": "text", "align": "right", "baseline": "top", "dx": -6, "dy": 4, "color": colour("series-6"), "y": 0}
    return [
        {"data": values, "mark": rule, "encoding": {"x": x}},
        {"data": values, "mark": text, "encoding": {"x": x, "text": {"field": "word"}}},
    ]


def _values(lines: Sequence[Line], axis: str) -> list[dict[str, Any]]:
    """Return the points as Vega-Lite data, rounded to five decimals to keep pages with thousands of points small.

    Args:
        lines: The lines.
        axis: Name of the field for the horizontal coordinate.
    """
    return [{"run": line.name, axis: x, "value": round(y, 5)} for line in lines for x, y in line.points]
