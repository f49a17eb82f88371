"""Curves by round: accuracy, smoothed as in the paper, and epsilon as the ledger grew.

In: a RunRecord. Out: points.
"""

import math
from typing import Any

from unheard.curves import smoothed
from unheard.privacy.budget import RunningEpsilon
from unheard.report.run_record import RunRecord

MOST_POINTS = 200


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
