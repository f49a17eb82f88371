"""The paper's figures drawn: lines by round with their seeds, sweeps over S, sigma or users, points of models.

In: a Figure, plain data. Out: a `Plot`; its legend stands on the page, and in a file inside it.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

from reproduction.exhibit import Figure, Line
from unheard.report.plots import Plot, X, curve_layer, ends, hover_layers
from unheard.report.style import DASHES, SERIES, SeriesStyle, colour, colour_encoding, dash_encoding, specification

EARLY = 25
"""The first part of training, of so many."""
NEAR_ZERO = 0.02
"""Below this an axis begins at nothing: room under it would have negative shares."""
BESIDE_UPRIGHT = 84
"""Pixels from the end to where the word of an upright line begins."""
SOLID, DASHED, DOTTED = [1, 0], [7, 4], [2, 3]


def plot_of(figure: Figure) -> Plot:
    """A figure in the house's look."""
    drawn = [line for line in figure.lines if line.points]
    legend = looks_of(drawn)
    make = _by_round if figure.x == "round" else _scatter if figure.is_scatter else _sweep
    spec = specification(make(figure, drawn, legend), description=_in_words(figure, legend))
    zoom = None
    if figure.x == "round":
        zoom = ends([{"round": x} for line in drawn for x, _ in line.points])
    return Plot(
        name=figure.name, title=figure.title, spec=spec, legend=legend, zoom=zoom, is_line=not figure.is_scatter
    )


def looks_of(lines: Sequence[Line]) -> list[SeriesStyle]:
    """Those that stand in the legend. One tint, one colour; dashes say `per layer` where some lines are, else tell lines apart."""
    tints = list(dict.fromkeys(line.tint or line.name for line in lines))
    meant = any(line.is_dashed or line.is_level for line in lines)
    looks = []
    for line in lines:
        if line.is_thin or line.is_level:
            continue
        i = tints.index(line.tint or line.name)
        plain = SOLID if meant else DASHES[(i + i // SERIES) % len(DASHES)]
        looks.append(SeriesStyle(line.name, _colour(lines, line), DASHED if line.is_dashed else plain))
    return looks


def _colour(lines: Sequence[Line], line: Line) -> str:
    tints = list(dict.fromkeys(one.tint or one.name for one in lines))
    return colour(f"series-{tints.index(line.tint or line.name) % SERIES + 1}")


def _by_round(figure: Figure, lines: Sequence[Line], legend: Sequence[SeriesStyle]) -> dict[str, Any]:
    y = {"field": "value", **_y(figure)}
    y["scale"] = {**y["scale"], **_begin(lines)}
    bold = [line for line in lines if not line.is_thin]
    layers = [
        {
            "data": {"values": _values([line], "round")},
            "mark": {
                "type": "line",
                "strokeWidth": 1.1,
                "opacity": 0.4,
                "clip": True,
                "color": _colour(lines, line),
            },
            "encoding": {"x": X, "y": y},
        }
        for line in lines
        if line.is_thin
    ]
    layers += [curve_layer(y, legend, zoom=True), *hover_layers(legend, "value", ".2%")]
    # A run that was evaluated once: a line of one point is not to be seen.
    if alone := [line for line in bold if len(line.points) == 1]:
        dot = {"type": "point", "filled": True, "size": 70, "opacity": 1, "clip": True}
        encoding = {"x": X, "y": y, "color": colour_encoding(legend)}
        layers.append({"data": {"values": _values(alone, "round")}, "mark": dot, "encoding": encoding})
    return {"data": {"values": _values(bold, "round")}, "layer": layers}


def _sweep(figure: Figure, lines: Sequence[Line], legend: Sequence[SeriesStyle]) -> dict[str, Any]:
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
    tips = [
        {"field": "run", "title": "line"},
        {"field": "x", "type": "quantitative", "title": figure.x},
        {"field": "value", "type": "quantitative", "format": ".2%", "title": figure.y},
    ]
    encoding = {"x": x, "y": y, "color": colour_encoding(legend)}
    layers: list[dict[str, Any]] = []
    if figure.upright is not None:
        layers += _upright(figure.upright, x)
    for line in lines:
        if line.is_level:
            others = [other for other in lines if other is not line]
            layers += _level(line, y, _colour(lines, line), others, 4 if figure.upright is None else BESIDE_UPRIGHT)
    layers.append(
        {"mark": {"type": "line", "strokeWidth": 2.5}, "encoding": {**encoding, "strokeDash": dash_encoding(legend)}}
    )
    point = {"type": "point", "filled": True, "size": 60, "opacity": 1}
    layers.append({"mark": point, "encoding": {**encoding, "tooltip": tips}})
    return {"data": {"values": _values(across, "x")}, "layer": layers}


def _scatter(figure: Figure, lines: Sequence[Line], legend: Sequence[SeriesStyle]) -> dict[str, Any]:
    x = {
        "field": "x",
        "type": "quantitative",
        "axis": {"title": figure.x, "tickCount": 6, "format": ".4~g"},
        "scale": {"zero": False, "padding": 24, "nice": False},
    }
    tips = [
        {"field": "run", "title": "among"},
        {"field": "x", "type": "quantitative", "format": ".2f", "title": figure.x},
        {"field": "value", "type": "quantitative", "format": ".2f", "title": figure.y},
    ]
    return {
        "data": {"values": _values(lines, "x")},
        "mark": {"type": "point", "filled": True, "size": 90, "opacity": 0.9},
        "encoding": {"x": x, "y": {"field": "value", **_y(figure)}, "color": colour_encoding(legend), "tooltip": tips},
    }


def _begin(lines: Sequence[Line]) -> dict[str, float]:
    """Where the upright axis begins: where the lines are after the first part of training. Before that they climb so steeply that
    showing it all would press the rest, which is what they are compared by, into one line."""
    rounds = [x for line in lines for x, _ in line.points]
    early = min(rounds) + (max(rounds) - min(rounds)) / EARLY
    later = [y for line in lines for x, y in line.points if x >= early]
    if not later:
        return {}
    return {"domainMin": 0 if min(later) < NEAR_ZERO else min(later)}


def _y(figure: Figure) -> dict[str, Any]:
    axis = {"title": None, "format": ".2~%"} if figure.is_share else {"title": figure.y}
    return {"type": "quantitative", "scale": {"zero": False, "padding": 20}, "axis": axis}


def _level(line: Line, y: dict[str, Any], tint: str, others: Sequence[Line], from_end: int) -> list[dict[str, Any]]:
    """From edge to edge, dotted, with its own word where the others leave most room (and beside an upright line, not on it)."""
    word = line.name.rpartition(", ")[2]
    values = {"values": [{"value": line.points[0][1], "word": word}]}
    rule = {"type": "rule", "color": tint, "strokeDash": DOTTED, "strokeWidth": 1.5, "opacity": 0.8}
    is_at_end, is_above = _freest(line, others)
    side = {"align": "right", "dx": -from_end, "x": "width"} if is_at_end else {"align": "left", "dx": 4, "x": 0}
    height = {"baseline": "bottom", "dy": -3} if is_above else {"baseline": "top", "dy": 3}
    text = {"type": "text", "color": tint, "fontSize": 11, **side, **height}
    return [
        {"data": values, "mark": rule, "encoding": {"y": y}},
        {"data": values, "mark": text, "encoding": {"y": y, "text": {"field": "word"}}},
    ]


def _freest(level: Line, others: Sequence[Line]) -> tuple[bool, bool]:
    """Whether a word on this level has most room at the end, and above: where the next line on that side is furthest away."""
    own = level.points[0][1]

    def room(place: tuple[bool, bool]) -> float:
        is_at_end, is_above = place
        away = [line.points[-1 if is_at_end else 0][1] - own for line in others]
        return min((abs(gap) for gap in away if gap == 0 or (gap > 0) is is_above), default=math.inf)

    return max(itertools.product((True, False), (True, False)), key=room)


def _upright(upright: tuple[float, str], x: dict[str, Any]) -> list[dict[str, Any]]:
    values = {"values": [{"x": upright[0], "word": upright[1]}]}
    rule = {"type": "rule", "color": colour("series-6"), "strokeDash": DASHED, "strokeWidth": 1.5}
    text = {"type": "text", "align": "right", "baseline": "top", "dx": -6, "dy": 4, "color": colour("series-6"), "y": 0}
    return [
        {"data": values, "mark": rule, "encoding": {"x": x}},
        {"data": values, "mark": text, "encoding": {"x": x, "text": {"field": "word"}}},
    ]


def _values(lines: Sequence[Line], axis: str) -> list[dict[str, Any]]:
    """Five digits: a page holds thousands of points, and a hundredth of a percent is the most that anyone reads."""
    return [{"run": line.name, axis: x, "value": round(y, 5)} for line in lines for x, y in line.points]


def _in_words(figure: Figure, legend: Sequence[SeriesStyle]) -> str:
    return f"{figure.title}, for {', '.join(look.name for look in legend)}."
