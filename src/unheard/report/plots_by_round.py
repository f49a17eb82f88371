"""Plots over time: accuracy and epsilon by round, with one note for all runs under the pointer, and zoom.

In: a Comparison. Out: a `Plot` of each; None where there is nothing to draw.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from unheard.report.comparison import Comparison
from unheard.report.curves import accuracy_points, epsilon_points
from unheard.report.style import Look, colour, colours_of, dashes_of, looks, specification


@dataclass(frozen=True, kw_only=True)
class Plot:
    """One plot; `name` is its file's name and its anchor on the page."""

    name: str
    title: str
    spec: dict[str, Any]
    legend: Sequence[Look] = ()
    zoom: tuple[int, int] | None = None
    """First and last round, if the horizontal axis is time."""
    is_line: bool = False
    """Lines over another axis: the legend shows their dashes too."""


X = {
    "field": "round",
    "type": "quantitative",
    "axis": {"title": "round", "format": "~s", "tickCount": 6, "tickMinStep": 1},
    "scale": {"nice": False, "padding": 12},
}
# A plain wheel scrolls the page; with Ctrl (or a pinch) it zooms. A finger scrolls; a mouse drags. Buttons and keys do the same.
ZOOM = {
    "type": "interval",
    "encodings": ["x"],
    "zoom": "wheel![event.ctrlKey || event.metaKey]",
    "translate": "[pointerdown[event.pointerType != 'touch'], window:pointerup] > window:pointermove!",
}


def accuracy_by_round(compared: Comparison) -> Plot | None:
    points = [point for record in compared.records for point in accuracy_points(record)]
    if not points:
        return None
    shown = looks([record.name for record in compared.records])
    first = next(iter(compared.measured.values()), {})
    floors = [
        {"floor": name, "value": figures["tokens"]["accuracy_top1"]}
        for name, figures in first.get("baselines", {}).items()
    ]
    y = {"type": "quantitative", "scale": {"zero": False, "padding": 20}, "axis": {"title": None, "format": ".0%"}}
    layers = [
        *rule_layers(floors),
        curve_layer({**y, "field": "value"}, shown, width=1.1, opacity=0.4),
        curve_layer({**y, "field": "smoothed"}, shown, zoom=True),
        *hover_layers(shown, "smoothed", ".2%"),
    ]
    names = ", ".join(look.name for look in shown)
    spec = specification(
        {"data": {"values": points}, "layer": layers},
        description=f"AccuracyTop1 on held-out users by round, for {names}: each evaluation thin, smoothed over 5 bold.",
    )
    return Plot(name="accuracy-by-round", title="AccuracyTop1 by round", spec=spec, legend=shown, zoom=ends(points))


def epsilon_by_round(compared: Comparison) -> Plot | None:
    private = [record for record in compared.records if record.is_private]
    points = [point for record in private for point in epsilon_points(record)]
    if not points:
        return None
    everyone = looks([record.name for record in compared.records])
    shown = [look for look in everyone if look.name in {record.name for record in private}]
    claims = [
        {"run": r.name, "round": r.rounds, "epsilon": r.epsilon, "by": r.told["claimed"]["accountant"].upper()}
        for r in private
    ]
    budgets = [r.tables.get("privacy", {}).get("budget_epsilon") for r in private]
    y = {"field": "epsilon", "type": "quantitative", "axis": {"title": None}, "scale": {"domainMin": 0, "nice": True}}
    ring = {
        "data": {"values": claims},
        "mark": {"type": "point", "filled": False, "size": 120, "strokeWidth": 2.5, "opacity": 1},
        "encoding": {
            "x": X,
            "y": y,
            "color": colours_of(shown),
            "tooltip": [
                {"field": "run"},
                {"field": "epsilon", "type": "quantitative", "format": ".4g", "title": "ε claimed"},
                {"field": "by"},
            ],
        },
    }
    layers = [
        *rule_layers([{"floor": "budget", "value": budget} for budget in budgets if budget]),
        curve_layer(y, shown, zoom=True),
        *hover_layers(shown, "epsilon", ".4g"),
        ring,
    ]
    names = ", ".join(look.name for look in shown)
    spec = specification(
        {"data": {"values": points}, "layer": layers},
        description=f"Epsilon spent by round, by RDP, for {names}. Rings: the claimed bound at the end.",
    )
    return Plot(name="epsilon-by-round", title="ε by round", spec=spec, legend=shown, zoom=ends(points))


def curve_layer(
    y: dict[str, Any], shown: Sequence[Look], *, width: float = 2.5, opacity: float = 1.0, zoom: bool = False
) -> dict[str, Any]:
    encoding = {"x": X, "y": y, "color": colours_of(shown), "strokeDash": dashes_of(shown)}
    layer = {"mark": {"type": "line", "strokeWidth": width, "opacity": opacity, "clip": True}, "encoding": encoding}
    return {**layer, "params": [{"name": "view", "select": ZOOM, "bind": "scales"}]} if zoom else layer


def hover_layers(shown: Sequence[Look], field: str, form: str) -> list[dict[str, Any]]:
    """A line under the pointer, dots on it, and one note with every run's figure at that round."""
    near = {"type": "point", "fields": ["round"], "nearest": True, "on": "pointerover", "clear": "pointerout"}

    def seen(value: float) -> dict[str, Any]:
        return {"condition": {"param": "near", "empty": False, "value": value}, "value": 0}

    # A run's name may hold dots and brackets, which Vega-Lite reads as a path: runs are numbered, and named in the titles.
    names = [look.name for look in shown]
    number = f"indexof({json.dumps(names)}, datum.run)"
    tips = [{"field": "round", "type": "quantitative", "format": ","}]
    tips += [{"field": f"run{i}", "type": "quantitative", "format": form, "title": n} for i, n in enumerate(names)]
    rule = {
        "transform": [
            {"calculate": f"'run' + {number}", "as": "column"},
            {"pivot": "column", "value": field, "groupby": ["round"]},
        ],
        "mark": {"type": "rule", "color": colour("soft"), "strokeWidth": 1},
        "encoding": {"x": X, "opacity": seen(0.6), "tooltip": tips},
        "params": [{"name": "near", "select": near}],
    }
    dots = {
        "mark": {"type": "point", "filled": True, "size": 70, "clip": True},
        "encoding": {
            "x": X,
            "y": {"field": field, "type": "quantitative"},
            "color": colours_of(shown),
            "opacity": seen(1),
        },
    }
    return [dots, rule]


def rule_layers(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Quiet horizontal lines with their names on them."""
    if not lines:
        return []
    y = {"field": "value", "type": "quantitative"}
    rule = {"mark": {"type": "rule", "color": colour("floor"), "strokeDash": [2, 4]}, "encoding": {"y": y}}
    text = {"type": "text", "align": "right", "baseline": "bottom", "dy": -4, "color": colour("soft"), "x": "width"}
    label = {"mark": text, "encoding": {"y": y, "text": {"field": "floor"}}}
    return [{"data": {"values": list(lines)}, **layer} for layer in (rule, label)]


def ends(points: Sequence[dict[str, Any]]) -> tuple[int, int]:
    rounds = [int(point["round"]) for point in points]
    return min(rounds), max(rounds)
