"""The plots of a page, each a Vega-Lite specification with a sentence that says what it shows.

In: a Comparison. Out: `Plot`s, those that there is something to draw for. The page's tables hold the same numbers for those who
do not see plots.
Plots over time: accuracy and epsilon by round, with one note for all runs under the pointer, and zoom.

In: a Comparison. Out: a `Plot` of each; None where there is nothing to draw.
Plots of the newest models: accuracy by word frequency and by person, and the paper's head-word histograms.

In: a Comparison with full measures. Out: `Plot`s.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from unheard.report.comparison import Comparison
from unheard.report.run_record import accuracy_points, epsilon_points
from unheard.report.style import SeriesStyle, colour, colour_encoding, dash_encoding, series_styles, specification


@dataclass(frozen=True, kw_only=True)
class Plot:
    """One plot; `name` is its file's name and its anchor on the page."""

    name: str
    title: str
    spec: dict[str, Any]
    legend: Sequence[SeriesStyle] = ()
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
    shown = series_styles([record.name for record in compared.records])
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
    everyone = series_styles([record.name for record in compared.records])
    shown = [look for look in everyone if look.name in {record.name for record in private}]
    claims = [
        {"run": r.name, "round": r.rounds, "epsilon": r.epsilon, "by": r.statement["claimed"]["accountant"].upper()}
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
            "color": colour_encoding(shown),
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
    y: dict[str, Any], shown: Sequence[SeriesStyle], *, width: float = 2.5, opacity: float = 1.0, zoom: bool = False
) -> dict[str, Any]:
    encoding = {"x": X, "y": y, "color": colour_encoding(shown), "strokeDash": dash_encoding(shown)}
    layer = {"mark": {"type": "line", "strokeWidth": width, "opacity": opacity, "clip": True}, "encoding": encoding}
    return {**layer, "params": [{"name": "view", "select": ZOOM, "bind": "scales"}]} if zoom else layer


def hover_layers(shown: Sequence[SeriesStyle], field: str, form: str) -> list[dict[str, Any]]:
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
            "color": colour_encoding(shown),
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


FLOOR = "bigram with back-off"
MISSING = "not in the dictionary"
SPREAD = (
    ("p5", "5th percentile"),
    ("p25", "25th"),
    ("p50", "median"),
    ("p75", "75th"),
    ("p95", "95th"),
    ("mean", "mean"),
)


def accuracy_by_band(compared: Comparison) -> Plot:
    measured = compared.measured
    shown = {name: measures["bands"] for name, measures in measured.items()}
    legend = _measured_looks(compared)
    if floor := next(iter(measured.values()))["baselines"].get(FLOOR):
        shown[FLOOR] = floor["bands"]
        legend = [*legend, SeriesStyle(FLOOR, colour("floor"), [1, 0])]
    rows = [
        {"words": band["band"], "run": name, "value": band["accuracy_top1"], "share": band["share"]}
        for name, bands in shown.items()
        for band in bands
        if band["accuracy_top1"] is not None and band["band"] != MISSING
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
    rows = [{"run": name, **m["users"]["accuracy_top1"]} for name, m in compared.measured.items()]
    legend = _measured_looks(compared)
    x: dict[str, Any] = {"type": "quantitative", "scale": {"zero": False, "padding": 16}}
    axis = _share_axis("AccuracyTop1 of one person")
    shared = {
        "y": {"field": "run", "type": "nominal", "sort": [row["run"] for row in rows], "axis": None},
        "color": colour_encoding(legend),
        "tooltip": [{"field": "run"}]
        + [{"field": f, "type": "quantitative", "format": ".1%", "title": title} for f, title in SPREAD],
    }
    layers = [
        {"mark": {"type": "rule", "strokeWidth": 2}, "encoding": {"x": {**x, "field": "p5", "axis": axis}, "x2": {"field": "p95"}}},
        {"mark": {"type": "bar", "height": 18, "opacity": 0.45}, "encoding": {"x": {**x, "field": "p25"}, "x2": {"field": "p75"}}},
        {"mark": {"type": "tick", "thickness": 3, "size": 26}, "encoding": {"x": {**x, "field": "p50"}}},
    ]  # fmt: skip
    spec = specification(
        {"data": {"values": rows}, "encoding": shared, "layer": layers},
        description="AccuracyTop1 over held-out users: 5th to 95th percentile, the middle half, and the median of each run.",
        height=54 * len(rows),
    )
    return Plot(name="accuracy-by-user", title="AccuracyTop1 by person", spec=spec, legend=legend)


def head_word_histograms(compared: Comparison) -> list[Plot]:
    return [_head(compared, head) for head in ("10", "50", "100")]


def _head(compared: Comparison, head: str) -> Plot:
    rows, legend = [], _measured_looks(compared)
    for name, measures in compared.measured.items():
        counts = measures["head_words"][head]
        rows += [{"run": name, "n": n, "count": c, "share": c / max(sum(counts), 1)} for n, c in enumerate(counts)]
    encoding = {
        "x": {"field": "n", "type": "ordinal", "axis": {"title": "of 10 suggestions", "labelAngle": 0}},
        "xOffset": {"field": "run", "sort": [look.name for look in legend]},
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
        description=f"How many of the 10 suggestions are among the {head} most frequent words: share of places, for each run.",
        height=190,
    )
    return Plot(name=f"head-words-{head}", title=f"Among the {head} most frequent", spec=spec, legend=legend)


def _measured_looks(compared: Comparison) -> list[SeriesStyle]:
    return [look for look in series_styles([r.name for r in compared.records]) if look.name in compared.measured]


def _share_axis(title: str) -> dict[str, Any]:
    return {"title": title, "format": ".0%", "grid": True, "tickCount": 6}


__all__ = ["Plot", "plots"]


def plots(compared: Comparison) -> list[Plot]:
    made = [accuracy_by_round(compared), epsilon_by_round(compared)]
    if compared.measured:
        made += [accuracy_by_band(compared), accuracy_by_user(compared), *head_word_histograms(compared)]
    return [plot for plot in made if plot is not None]
