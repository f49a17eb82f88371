"""What privacy cost in computation: rounds and user updates until a run is as accurate as the baseline.

In: records. Out: one line for each. Paper, section 1: the baseline reaches 17.5 % in 4,120 rounds of 100 users, the private
run in 4,980 rounds of about 5,000: "a significant computational cost of roughly 60x".
"""

from collections.abc import Sequence
from dataclasses import dataclass

from unheard.errors import InvalidValue
from unheard.report.run_record import RunRecord, accuracy_points, final_accuracy


@dataclass(frozen=True, kw_only=True)
class ComputeCost:
    """When one run first was as accurate as asked, by its smoothed AccuracyTop1; None if it has not been."""

    run: str
    target: float
    best: float | None
    rounds: int | None
    updates: float | None
    """Expected user updates up to then: rounds times the declared users a round."""
    times: float | None
    """Updates in units of the baseline's."""


def choose_baseline(records: Sequence[RunRecord], name: str | None = None) -> RunRecord:
    """The run asked for; else the first without privacy; else the first."""
    if name is not None:
        for record in records:
            if name.rstrip("/").split("/")[-1] == record.name.split("/")[-1] or name == record.name:
                return record
        raise InvalidValue(f"--baseline {name} is none of the runs: {', '.join(r.name for r in records)}.")
    return next((record for record in records if not record.is_private), records[0])


def compute_costs(
    records: Sequence[RunRecord], baseline: RunRecord, accuracy: float | None = None
) -> list[ComputeCost]:
    """Rounds and updates to the baseline's final accuracy, or to the one given."""
    target = final_accuracy(baseline) if accuracy is None else accuracy
    if target is None:
        return []
    found = {record.name: _first_round(record, target) for record in records}
    unit = updates(baseline, found[baseline.name]) if baseline.name in found else None
    lines = []
    for record in records:
        points, spent = accuracy_points(record), updates(record, found[record.name])
        lines.append(
            ComputeCost(
                run=record.name,
                target=target,
                best=max((p["smoothed"] for p in points), default=None),
                rounds=found[record.name],
                updates=spent,
                times=spent / unit if spent is not None and unit else None,
            )
        )
    return lines


def updates(record: RunRecord, rounds: int | None) -> float | None:
    """Expected user updates of so many rounds."""
    return None if rounds is None else rounds * record.users_per_round


def _first_round(record: RunRecord, target: float) -> int | None:
    return next((int(p["round"]) for p in accuracy_points(record) if p["smoothed"] >= target), None)
