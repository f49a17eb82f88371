"""Compare several runs: everything that the terminal and the page show, computed once.

A `Comparison` reads the run folders and chooses a baseline among them:

    compared = Comparison.read(["runs/plain", "runs/private"], as_if_users=1_000_000)
    compared.baseline.name          # 'plain': the first run without privacy
    compared.compute_costs          # rounds and user updates to the baseline's accuracy
    compared.cautions               # sentences on what makes the comparison unfair
    compared.as_json()              # all of it as plain data
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from unheard.formatting import colour_numbers
from unheard.privacy.statement import plain
from unheard.report.compute_cost import ComputeCost, choose_baseline, compute_costs
from unheard.report.hypothetical import Hypothetical, hypothetical_epsilon
from unheard.report.run_record import RunRecord, accuracy_points, epsilon_points, read_runs


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Several runs, one of which is the baseline."""

    records: Sequence[RunRecord]
    baseline: RunRecord
    accuracy: float | None = None
    """The accuracy to which computation is compared; None: the baseline's final accuracy."""
    as_if_users: int | None = None
    """Population of the hypothetical runs; None: there are none."""
    as_if_users_per_round: float | None = None
    """Users per round of the hypothetical runs; None: as in each run."""

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
        """Read run folders and compare them.

        Args:
            paths: Run folders, each named once.
            baseline: Name of the run to compare with. By default the first run without privacy, else the first run.
            accuracy: AccuracyTop1 to which computation is compared. By default the baseline's final accuracy.
            as_if_users: Also compute the epsilon that each run would have with this many users.
            as_if_users_per_round: Users per round of those hypothetical runs.

        Raises:
            InvalidValue: No folder, a folder named twice, or a baseline that is none of the runs.
            RunFolderError: A path is not a run folder.
            LedgerError: A ledger is damaged or was edited.
        """
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
        """Computation to the same accuracy, one item per run; empty before the first evaluation of the baseline."""
        return compute_costs(self.records, self.baseline, self.accuracy)

    @cached_property
    def hypotheticals(self) -> list[Hypothetical]:
        """The hypothetical epsilon of each private run, if `as_if_users` is set."""
        if self.as_if_users is None:
            return []
        private = (record for record in self.records if record.is_private)
        results = (hypothetical_epsilon(r, self.as_if_users, self.as_if_users_per_round) for r in private)
        return [result for result in results if result is not None]

    @cached_property
    def colours(self) -> dict[str, int]:
        """The number of each run's colour by its name (`formatting.colour_numbers`)."""
        numbers = colour_numbers([record.is_private for record in self.records])
        return {record.name: number for record, number in zip(self.records, numbers, strict=True)}

    @property
    def measured(self) -> dict[str, dict[str, Any]]:
        """The full measures by run name, of the runs that have them."""
        return {record.name: dict(record.measures) for record in self.records if record.measures}

    @property
    def cautions(self) -> list[str]:
        """Sentences on what makes the comparison unfair or incomplete."""
        cautions = []
        if len({record.facts.get("corpus") for record in self.records}) > 1:
            cautions.append(
                "These runs were not measured on the same corpus: their accuracies are about different text."
            )
        if len({(m["max_tokens"], m["unroll"]) for m in self.measured.values()}) > 1:
            cautions.append(
                "The full measures read different amounts of held-out text: measure again with one --max-tokens."
            )
        if len({record.rounds for record in self.records}) > 1:
            cautions.append("These runs have different numbers of rounds.")
        for record in self.records:
            planned = record.tables.get("training", {}).get("rounds")
            if isinstance(planned, int) and record.rounds < planned:
                cautions.append(f"{record.name} is at round {record.rounds:,} of {planned:,}.")
            if not record.measures:
                cautions.append(f"{record.name} has no full measures of its newest model: unheard evaluate --full.")
        return cautions

    def as_json(self) -> dict[str, Any]:
        """The comparison as plain JSON data; infinity is written as the word."""
        return plain(
            {
                "baseline": self.baseline.name,
                "cautions": self.cautions,
                "runs": [_run(record) for record in self.records],
                "reach": [vars(cost) for cost in self.compute_costs],
                "hypothetical": [{**vars(result), "note": result.words} for result in self.hypotheticals],
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
