"""Draw the private run: held-out accuracy by round on the left axis, the epsilon spent so far on the right axis.

The input is reproduction/results/reviews_81; the output is an SVG or PNG file. The picture shows recorded evaluations
only; the line of an interrupted run ends where the run stopped.

    python -m reproduction.private_picture --out docs/images/private-run.svg
"""

import argparse
import json
from pathlib import Path
from typing import Any

from reproduction.private_report import INTERRUPTED, REVIEWS, counted_baselines
from reproduction.private_run import read_metrics
from unheard.storage import replace_file

PRIVATE, BASELINE, EPSILON = "#2563a8", "#6b7280", "#c2570c"


def specification(root: Path = REVIEWS) -> dict[str, Any]:
    """The Vega-Lite specification of the picture, with the results in `root` as its data."""
    private = [(row["round"], 100 * row["accuracy_top1"], row["epsilon"]) for row in read_metrics(root / "private")]
    baseline = root / "baseline-C5000-seed1"
    is_whole = baseline.is_dir()
    rows = read_metrics(baseline if is_whole else root / INTERRUPTED.name / "baseline-C5000-seed1")
    label = "no privacy (no clip, no noise)" + ("" if is_whole else ", interrupted")
    accuracy = [{"round": r, "value": a, "run": "private (z = 1, S = 8)"} for r, a, _ in private]
    accuracy += [{"round": row["round"], "value": 100 * row["accuracy_top1"], "run": label} for row in rows]
    spent = [{"round": r, "value": e} for r, _, e in private]
    last = max(private)[0]
    x = {"field": "round", "type": "quantitative", "title": "round", "scale": {"domain": [0, 500 * -(-last // 500)]}}
    left = {
        "field": "value",
        "type": "quantitative",
        "title": "AccuracyTop1 on 3,551 held-out users, %",
        "scale": {"domain": [10, 28]},
        "axis": {"grid": True},
    }
    right = {
        "field": "value",
        "type": "quantitative",
        "title": "epsilon spent so far (RDP, delta = 3.4e-7)",
        "scale": {"domain": [0, 4]},
        "axis": {"orient": "right", "grid": False, "titleColor": EPSILON, "labelColor": EPSILON},
    }
    colours = {"domain": ["private (z = 1, S = 8)", label], "range": [PRIVATE, BASELINE]}
    lines = {
        "data": {"values": accuracy},
        "mark": {"type": "line", "strokeWidth": 2.5},
        "encoding": {
            "x": x,
            "y": left,
            "color": {
                "field": "run",
                "type": "nominal",
                "scale": colours,
                "legend": {"title": None, "orient": "bottom", "columnPadding": 40},
            },
        },
    }
    level_line = {"data": {"values": [{"value": counted_baselines()["bigram"]}]}, "encoding": {"y": left}}
    bigram = [
        {**level_line, "mark": {"type": "rule", "strokeDash": [3, 3], "color": BASELINE}},
        {
            **level_line,
            "mark": {"type": "text", "align": "right", "dy": 9, "x": 634, "color": BASELINE, "fontSize": 11},
            "encoding": {"y": left, "text": {"value": "bigram, counted without privacy"}},
        },
    ]
    epsilon = {
        "data": {"values": spent},
        "mark": {"type": "line", "strokeWidth": 1.5, "strokeDash": [6, 3], "color": EPSILON},
        "encoding": {"x": x, "y": right},
    }
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v5.json",
        "background": "white",
        "title": {"text": "A next-word model of 750,947 reviewers, 5,000 users per round", "anchor": "start"},
        "width": 640,
        "height": 300,
        "layer": [{"layer": [lines, *bigram]}, epsilon],
        "resolve": {"scale": {"y": "independent"}},
        "config": {"font": "sans-serif", "view": {"stroke": None}, "legend": {"labelLimit": 300}},
    }


def main() -> None:
    """Write the picture."""
    import vl_convert

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/images/private-run.svg"))
    out = parser.parse_args().out
    out.parent.mkdir(parents=True, exist_ok=True)
    specification_json = json.dumps(specification())
    if out.suffix == ".png":
        replace_file(out, vl_convert.vegalite_to_png(specification_json, scale=2.0))
    else:
        replace_file(out, vl_convert.vegalite_to_svg(specification_json).encode())
    print(out)


if __name__ == "__main__":
    main()
