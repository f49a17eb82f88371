"""The picture of an audit: how the scores of canaries that were in and of those that were not lie over each other.

In: the scores. Out: an SVG that stands by itself, drawn by Vega-Lite. Where the two heaps lie on each other, nothing was heard.
What an audit means, in plain words and as plain data.

In: exposures and the one-run audit, either of which may be missing. Out: sentences; a table for JSON; whether the claim survived.
"""

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from unheard.audit.exposure import Exposure, learned_by_heart
from unheard.audit.one_run import OneRunAudit
from unheard.privacy.statement import plain


def verdict(found: Sequence[Exposure] | None, audit: OneRunAudit | None) -> Iterator[str]:
    """One sentence or two for each part."""
    if found is not None:
        yield from _about_exposures(found)
    if audit is not None:
        yield from _about_one_run(audit)


def as_data(found: Sequence[Exposure] | None, audit: OneRunAudit | None) -> dict[str, Any]:
    return plain(
        {
            "verdict": list(verdict(found, audit)),
            "exposure": None if found is None else [vars(one) for one in found],
            "learned_by_heart": None if found is None else [one.number for one in learned_by_heart(found)],
            "one_run": None if audit is None else _one_run(audit),
            "holds": audit is None or audit.holds,
        }
    )


def _one_run(audit: OneRunAudit) -> dict[str, Any]:
    return {
        "canaries": len(audit.score_M),
        "rounds": audit.rounds,
        "guesses": audit.guesses.made,
        "right": audit.guesses.right,
        "epsilon_at_least": audit.bound,
        "confidence": audit.confidence,
        "epsilon_estimate": audit.estimate if math.isfinite(audit.estimate) else str(audit.estimate),
        "epsilon_claimed": audit.claimed,
        "delta": audit.delta,
        "holds": audit.holds,
    }


def _about_exposures(found: Sequence[Exposure]) -> Iterator[str]:
    learned = learned_by_heart(found)
    most = found[0].most if found else 0.0
    if learned:
        who = ", ".join(f"{one.number} (carried by {one.users}: {one.exposure:.1f} bits)" for one in learned[:10])
        yield f"Secrets: {len(learned)} of {len(found)} canaries were learned by heart: number {who}."
        yield f"(Among so many candidates {most:.1f} bits are the most that can be seen.)"
    else:
        yield f"Secrets: none of {len(found)} canaries is more exposed than chance explains."


def _about_one_run(audit: OneRunAudit) -> Iterator[str]:
    yield (
        f"One run: {audit.guesses.right} of {audit.guesses.made} guesses about {len(audit.score_M)} canary users were right. "
        f"So epsilon is at least {audit.bound:.3g} at delta {audit.delta:.2g}, with {100 * audit.confidence:.0f} % confidence."
    )
    if math.isinf(audit.claimed):
        yield "The run claims no guarantee (epsilon is infinite), and the audit is what that looks like."
    elif audit.holds:
        yield f"The claim of {audit.claimed:.3g} for these rounds stands: an audit can refute it, not prove it."
    else:
        yield (
            f"THE CLAIM IS REFUTED: {audit.claimed:.3g} was claimed for these rounds. Release nothing of this run, and look for "
            "the fault: by chance this happens less than once in 20 audits, so repeat it once."
        )


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
