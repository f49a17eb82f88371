"""The picture of an audit: how the scores of canaries that were in and of those that were not lie over each other.

In: the scores. Out: an SVG that stands by itself, drawn by Vega-Lite. Where the two heaps lie on each other, nothing was heard.
"""

import json
from typing import Any

import numpy as np

from unheard.audit.one_run import OneRunAudit

BINS = 60


def score_plot(audit: OneRunAudit, title: str) -> str:
    """One SVG."""
    import vl_convert

    return vl_convert.vegalite_to_svg(json.dumps(_picture(audit, title)))


def _picture(audit: OneRunAudit, title: str) -> dict[str, Any]:
    low, high = float(audit.score_M.min()), float(audit.score_M.max())
    edges = np.linspace(low, high if high > low else low + 1.0, BINS + 1)
    rows = []
    for words, mine in (("in the run", audit.was_in_M), ("not in it", ~audit.was_in_M)):
        counts = np.histogram(audit.score_M[mine], bins=edges)[0]
        rows += [
            {"canaries": words, "from": float(a), "to": float(b), "count": int(n)}
            for a, b, n in zip(edges[:-1], edges[1:], counts, strict=True)
        ]
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v5.json",
        "title": {"text": title, "subtitle": f"{len(audit.score_M)} canary users, {audit.rounds} rounds"},
        "width": 640,
        "height": 280,
        "data": {"values": rows},
        "mark": {"type": "bar", "opacity": 0.55},
        "encoding": {
            "x": {"field": "from", "type": "quantitative", "title": "score: evidence that this canary took part"},
            "x2": {"field": "to"},
            "y": {"field": "count", "type": "quantitative", "stack": None, "title": "canaries"},
            "color": {
                "field": "canaries",
                "type": "nominal",
                "scale": {"domain": ["in the run", "not in it"], "range": ["#c4491d", "#3a6ea5"]},
            },
        },
    }
