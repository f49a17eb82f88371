"""Curves by round: accuracy, smoothed as in the paper, and epsilon as the ledger grew.

In: a RunRecord. Out: points. Paper, section 3: "We evaluate accuracy every 20 rounds and plot metrics smoothed over 5
evaluations (100 rounds)". Smoothed here is the mean of an evaluation and the four before it: no point knows the future.
"""

import math
from collections.abc import Sequence
from typing import Any

from unheard.privacy.budget import RunningEpsilon
from unheard.report.record import RunRecord

SMOOTHED_OVER = 5
MOST_POINTS = 200


def smoothed(values: Sequence[float], over: int = SMOOTHED_OVER) -> list[float]:
    """The mean of each value and up to over - 1 before it."""
    windows = (values[max(0, i + 1 - over) : i + 1] for i in range(len(values)))
    return [math.fsum(window) / len(window) for window in windows]


def accuracy_points(record: RunRecord, measure: str = "accuracy_top1") -> list[dict[str, Any]]:
    """Round, the evaluation's figure, and the smoothed one."""
    rows = [row for row in record.metrics if isinstance(row.get(measure), int | float)]
    soft = smoothed([row[measure] for row in rows])
    return [
        {"run": record.name, "round": row["round"], "value": row[measure], "smoothed": s}
        for row, s in zip(rows, soft, strict=True)
    ]


def final(record: RunRecord, measure: str = "accuracy_top1") -> float | None:
    """Where a run ended: its last smoothed figure."""
    points = accuracy_points(record, measure)
    return points[-1]["smoothed"] if points else None


def epsilon_points(record: RunRecord, accountant: str = "rdp") -> list[dict[str, Any]]:
    """Epsilon after the rounds charged so far, by an accountant that can follow a run. Rounds done again cost again."""
    running, points = RunningEpsilon(record.facts["delta"], accountant), {}
    every = max(1, -(-len(record.entries) // MOST_POINTS))
    for i, entry in enumerate(record.entries, start=1):
        running.charge(entry.event)
        if i % every == 0 or i in (1, len(record.entries)):
            epsilon = running.epsilon
            if math.isinf(epsilon):
                return []
            points[entry.round + 1] = epsilon
    return [{"run": record.name, "round": r, "epsilon": e} for r, e in sorted(points.items())]
