"""Several runs beside each other: everything that the terminal and the page show, worked out once.

In: run folders. Out: `Comparison`: the records, who the baseline is, what it took to be as good, what must be said with it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from unheard.privacy.statement import plain
from unheard.report.compute_cost import ComputeCost, choose_baseline, compute_costs
from unheard.report.hypothetical import Hypothetical, hypothetical_epsilon
from unheard.report.run_record import RunRecord, accuracy_points, epsilon_points, read_runs


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Runs, a baseline among them, and the accuracy to be reached (None: the baseline's own)."""

    records: Sequence[RunRecord]
    baseline: RunRecord
    accuracy: float | None = None
    as_if_users: int | None = None
    as_if_users_per_round: float | None = None

    @classmethod
    def read(
        cls,
        paths: Sequence[str | Path],
        *,
        baseline: str | None = None,
        accuracy: float | None = None,
        as_if_users: int | None = None,
        as_if_users_per_round: float | None = None,
    ) -> "Comparison":
        records = read_runs(paths)
        return cls(
            records=records,
            baseline=choose_baseline(records, baseline),
            accuracy=accuracy,
            as_if_users=as_if_users,
            as_if_users_per_round=as_if_users_per_round,
        )

    @cached_property
    def compute_costs(self) -> list[ComputeCost]:
        return compute_costs(self.records, self.baseline, self.accuracy)

    @cached_property
    def hypotheticals(self) -> list[Hypothetical]:
        """One for each run that has a finite epsilon, if more users were asked about."""
        if self.as_if_users is None:
            return []
        asked = (
            hypothetical_epsilon(r, self.as_if_users, self.as_if_users_per_round) for r in self.records if r.is_private
        )
        return [one for one in asked if one is not None]

    @property
    def measured(self) -> dict[str, dict[str, Any]]:
        """Full measures by run, of those that have them."""
        return {record.name: dict(record.measures) for record in self.records if record.measures}

    @property
    def cautions(self) -> list[str]:
        """What makes a comparison unfair, in words."""
        found = []
        if len({record.facts.get("corpus") for record in self.records}) > 1:
            found.append("These runs were not measured on the same corpus: their accuracies are about different text.")
        texts = {(m["max_tokens"], m["unroll"]) for m in self.measured.values()}
        if len(texts) > 1:
            found.append(
                "The full measures read different amounts of held-out text: measure again with one --max-tokens."
            )
        if len({record.rounds for record in self.records}) > 1:
            found.append("These runs have different numbers of rounds.")
        for record in self.records:
            asked = record.tables.get("training", {}).get("rounds")
            if isinstance(asked, int) and record.rounds < asked:
                found.append(f"{record.name} is at round {record.rounds:,} of {asked:,}.")
            if not record.measures:
                found.append(f"{record.name} has no full measures of its newest model: unheard evaluate --full.")
        return found

    def as_json(self) -> dict[str, Any]:
        """The same as data; infinity is the word."""
        return plain(
            {
                "baseline": self.baseline.name,
                "cautions": self.cautions,
                "runs": [_run(record) for record in self.records],
                "reach": [vars(line) for line in self.compute_costs],
                "hypothetical": [{**vars(one), "note": one.words} for one in self.hypotheticals],
            }
        )


def _run(record: RunRecord) -> dict[str, Any]:
    return {
        "run": record.name,
        "rounds": record.rounds,
        "users_per_round": record.users_per_round,
        "epsilon": record.epsilon,
        "delta": record.delta,
        "accountant": record.statement["claimed"]["accountant"],
        "accuracy_by_round": accuracy_points(record),
        "epsilon_by_round": epsilon_points(record),
        "measures": record.measures,
    }
