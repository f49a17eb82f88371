"""Plots of the newest models: accuracy by word frequency and by person, and the paper's head-word histograms.

In: a Comparison with full measures. Out: `Plot`s.
"""

from typing import Any

from unheard.report.comparison import Comparison
from unheard.report.plots_by_round import Plot
from unheard.report.style import Look, colour, colours_of, looks, specification

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
        legend = [*legend, Look(FLOOR, colour("floor"), [1, 0])]
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
        "color": colours_of(legend),
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
        "color": colours_of(legend),
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
        "color": colours_of(legend),
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


def _measured_looks(compared: Comparison) -> list[Look]:
    return [look for look in looks([r.name for r in compared.records]) if look.name in compared.measured]


def _share_axis(title: str) -> dict[str, Any]:
    return {"title": title, "format": ".0%", "grid": True, "tickCount": 6}
