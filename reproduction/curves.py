"""Curves of runs of the reproduction, smoothed as in the paper."""

from typing import Any

from reproduction.results import RunResult
from unheard.curves import Points, smoothed


def curve(result: RunResult, measure: str = "accuracy_top1") -> Points:
    """Round and smoothed figure of every evaluation."""
    rows = _rows(result, measure)
    return tuple(zip((row["round"] for row in rows), smoothed([row[measure] for row in rows]), strict=True))


def last_quarter(result: RunResult, at: int) -> Points:
    """Round and AccuracyTop1 in the last quarter of so many rounds, as it was evaluated, not smoothed."""
    rows = _rows(result, "accuracy_top1")
    return tuple((row["round"], row["accuracy_top1"]) for row in rows if 3 * at < 4 * row["round"] <= 4 * at)


def _rows(result: RunResult, measure: str) -> list[dict[str, Any]]:
    """In order, and each as far from the one before: where a sitting ended between two of them, a run that went on since has an
    evaluation more than one made in a sitting, and would be smoothed over fewer rounds."""
    rows = sorted((row for row in result.evaluations if row.get(measure) is not None), key=lambda row: row["round"])
    every = result.settings.get("evaluation", {}).get("every", 1)
    return [row for row in rows if row["round"] % every == 0 or row is rows[-1]]
