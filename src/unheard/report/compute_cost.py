"""The computation that privacy costs: rounds and user updates until a run is as accurate as the baseline.

Paper, section 1: the baseline reaches 17.5 % in 4,120 rounds of 100 users, the private run in 4,980 rounds of about
5,000: "a significant computational cost of roughly 60x".

    baseline = choose_baseline(records)
    for cost in compute_costs(records, baseline):
        print(cost.run, cost.rounds, cost.updates, cost.times)
"""

from collections.abc import Sequence
from dataclasses import dataclass

from unheard.errors import InvalidValue
from unheard.report.run_record import RunRecord, accuracy_points, final_accuracy


@dataclass(frozen=True, kw_only=True)
class ComputeCost:
    """The computation of one run until its smoothed AccuracyTop1 first reached the target."""

    run: str
    target: float
    """The AccuracyTop1 to reach."""
    best: float | None
    """The highest smoothed AccuracyTop1 of the run; None before the first evaluation."""
    rounds: int | None
    """None if the target has not been reached."""
    updates: float | None
    """Expected user updates up to that round: rounds times the declared users per round."""
    times: float | None
    """`updates` divided by the updates of the baseline."""


def choose_baseline(records: Sequence[RunRecord], name: str | None = None) -> RunRecord:
    """The run with the given name or folder; by default the first run without privacy, else the first run.

    Raises:
        InvalidValue: No run has the name.
    """
    if name is not None:
        for record in records:
            if name.rstrip("/").split("/")[-1] == record.name.split("/")[-1] or name == record.name:
                return record
        raise InvalidValue(f"--baseline {name} is none of the runs: {', '.join(r.name for r in records)}.")
    return next((record for record in records if not record.is_private), records[0])


def compute_costs(
    records: Sequence[RunRecord], baseline: RunRecord, accuracy: float | None = None
) -> list[ComputeCost]:
    """Rounds and updates of each run to the same accuracy.

    Args:
        records: The runs.
        baseline: One of the runs; its updates are the unit of `ComputeCost.times`.
        accuracy: The target. By default the final smoothed accuracy of the baseline.

    Returns:
        One item per run; empty if there is no target because the baseline has not been evaluated.
    """
    target = final_accuracy(baseline) if accuracy is None else accuracy
    if target is None:
        return []
    costs, unit = [], _updates(baseline, _first_round(baseline, target))
    for record in records:
        rounds = _first_round(record, target)
        updates = _updates(record, rounds)
        costs.append(
            ComputeCost(
                run=record.name,
                target=target,
                best=max((point["smoothed"] for point in accuracy_points(record)), default=None),
                rounds=rounds,
                updates=updates,
                times=updates / unit if updates is not None and unit else None,
            )
        )
    return costs


def _first_round(record: RunRecord, target: float) -> int | None:
    return next((int(point["round"]) for point in accuracy_points(record) if point["smoothed"] >= target), None)


def _updates(record: RunRecord, rounds: int | None) -> float | None:
    return None if rounds is None else rounds * record.users_per_round
