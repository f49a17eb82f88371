"""Curves as the paper draws them: smoothed over five evaluations.

In: figures in the order of their rounds. Out: smoothed figures. Paper, section 3: "We evaluate accuracy every 20 rounds and plot
metrics smoothed over 5 evaluations (100 rounds)". Smoothed here is the mean of an evaluation and the four before it: no point
knows the future.
"""

import math
import statistics
from collections.abc import Sequence
from typing import Any

from unheard.paper.results import RunResult

SMOOTHED_OVER = 5
Points = tuple[tuple[float, float], ...]


def smoothed(values: Sequence[float], over: int = SMOOTHED_OVER) -> list[float]:
    """The mean of each value and up to over - 1 before it."""
    windows = (values[max(0, i + 1 - over) : i + 1] for i in range(len(values)))
    return [math.fsum(window) / len(window) for window in windows]


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Of two or more values that swing: their mean, and how far it may be off, its standard error."""
    return statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))


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
