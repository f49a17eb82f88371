"""One run folder as a page sees it: what was configured, what it cost, what was measured.

In: a run folder, finished or being written to. Out: `RunRecord`, read only from run.toml, ledger.jsonl, metrics.jsonl and
measures.json. What it cost is worked out again from the ledger; an edited ledger is refused. No torch, no corpus, no model.
"""

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from unheard.curves import smoothed
from unheard.errors import InvalidValue, RunFolderError
from unheard.privacy.budget import RunningEpsilon
from unheard.privacy.ledger import Entry, Ledger
from unheard.privacy.statement import statement as privacy_statement
from unheard.run_folder import RunFolder


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """What is known of one run. `name` is unique among the runs that are shown together."""

    name: str
    tables: Mapping[str, Any]
    facts: Mapping[str, Any]
    entries: Sequence[Entry]
    metrics: Sequence[Mapping[str, Any]]
    measures: Mapping[str, Any] | None = None

    @classmethod
    def read(cls, path: str | Path, name: str | None = None) -> "RunRecord":
        folder = RunFolder.open(path)
        try:
            tables = tomllib.loads(folder.run_file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise RunFolderError(f"{folder.run_file} cannot be read as a run file: {error}.") from None
        ledger = Ledger.read(folder.ledger)
        return cls(
            name=name or Path(path).resolve().name,
            tables=tables,
            facts=ledger.facts,
            entries=ledger.entries,
            metrics=folder.read_metrics(),
            measures=folder.read_measures(),
        )

    @cached_property
    def statement(self) -> dict[str, Any]:
        """The privacy statement, from the ledger alone. Seconds, for the tightest accountant."""
        return privacy_statement(self.facts, self.entries)

    @property
    def epsilon(self) -> float:
        """The claimed epsilon; infinite if a round was not private."""
        return float(self.statement["claimed"]["epsilon"])

    @property
    def delta(self) -> float:
        return self.statement["delta"]

    @property
    def is_private(self) -> bool:
        return math.isfinite(self.epsilon)

    @property
    def rounds(self) -> int:
        """How far the run has come: its last evaluation, or the last round charged."""
        return int(self.metrics[-1]["round"]) if self.metrics else max((e.round + 1 for e in self.entries), default=0)

    @property
    def population(self) -> int:
        return int(self.facts["population"])

    @property
    def users_per_round(self) -> float:
        """Expected users a round, as declared."""
        sampling = self.facts["sampling"]
        return float(sampling.get("users_per_round") or sampling["sampling_prob"] * self.population)


def read_runs(paths: Sequence[str | Path]) -> list[RunRecord]:
    """Records of several runs, named by their folders; folders of one name by the folder above as well."""
    if not paths:
        raise InvalidValue("Name at least one run folder.")
    whole = [Path(path).resolve() for path in paths]
    if len(set(whole)) < len(whole):
        raise InvalidValue("The same run folder is named twice: name each run once.")
    depth = 1
    while len({_tail(path, depth) for path in whole}) < len(whole):
        depth += 1
    return [RunRecord.read(path, _tail(path, depth)) for path in whole]


def _tail(path: Path, depth: int) -> str:
    return "/".join(path.parts[-depth:])


MOST_POINTS = 200


def accuracy_points(record: RunRecord, measure: str = "accuracy_top1") -> list[dict[str, Any]]:
    """Round, the evaluation's figure, and the smoothed one."""
    rows = [row for row in record.metrics if isinstance(row.get(measure), int | float)]
    soft = smoothed([row[measure] for row in rows])
    return [
        {"run": record.name, "round": row["round"], "value": row[measure], "smoothed": s}
        for row, s in zip(rows, soft, strict=True)
    ]


def final_accuracy(record: RunRecord, measure: str = "accuracy_top1") -> float | None:
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
