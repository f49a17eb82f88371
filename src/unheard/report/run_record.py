"""Read one run folder as plain data for tables, plots and pages, and report its status while it is training.

    record = RunRecord.read("runs/private")
    record.epsilon, record.rounds            # the claimed epsilon, computed from the ledger; the newest round
    accuracy_points(record)                  # held-out AccuracyTop1 by round, also smoothed as in the paper
    epsilon_points(record)                   # epsilon by round as the ledger grew

Reads only `run.toml`, `ledger.jsonl`, `metrics.jsonl` and `measures.json`, of a finished run or of one that is still
training; no torch or corpus. A ledger that was edited, or that lacks what the folder's checkpoints, its model or the
store's ledger remember, raises `LedgerError`.

    monitor = RunMonitor("runs/private")
    status = monitor.status()
    status.state, status.round, status.rounds, status.epsilon        # ('training', 120, 3000, 0.84)

`RunMonitor` takes no lock and skips an incomplete last line, so it does not disturb the run. It reads the ledger again
only if the ledger has grown.

Paper, section 3: "We evaluate accuracy every 20 rounds and plot metrics smoothed over 5 evaluations".
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from unheard.config import parse_toml
from unheard.errors import InvalidValue, LedgerError, RunFolderError
from unheard.formatting import smoothed
from unheard.privacy.accountants import RUNNING_ACCOUNTANT
from unheard.privacy.budget import RunningEpsilon
from unheard.privacy.events import CorrelatedGaussian, Event, ExampleGaussian, NonPrivate, PoissonGaussian
from unheard.privacy.ledger import Entry, Ledger, run_id
from unheard.privacy.population_ledger import PopulationLedger, vocabulary_member
from unheard.privacy.population_statement import all_runs
from unheard.privacy.run_ledger import population_of, read_run_ledger
from unheard.privacy.statement import compute_statement
from unheard.run_folder import RunFolder

MAX_POINTS = 200
"""A curve of epsilon has about this many points at most."""
SILENT_AFTER = 120.0
"""Seconds without a charged round after which a run is called silent: its process was killed, or its rounds take
long."""


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The content of one run folder."""

    name: str
    """Unique among the runs that are shown together."""
    tables: Mapping[str, Any]
    """The run file."""
    facts: Mapping[str, Any]
    """The public facts at the head of the ledger: population, delta, sampling."""
    entries: Sequence[Entry]
    """The charged rounds."""
    metrics: Sequence[Mapping[str, Any]]
    """The evaluations on held-out users, in order of rounds."""
    measures: Mapping[str, Any] | None = None
    """The full measures of the newest model (`unheard evaluate --full`), if there are any."""
    run_id: str = ""
    """The id of the run in the ledger of its population."""
    population_ledger: PopulationLedger | None = None
    """The ledger of all runs on the same users; None if the store is not where the run file says."""

    @classmethod
    def read(cls, path: str | Path, name: str | None = None) -> "RunRecord":
        """Read a run folder.

        Args:
            path: The run folder.
            name: The name to show. By default the name of the folder.

        Raises:
            RunFolderError: The folder is not a run folder, or its run file cannot be read.
            LedgerError: The ledger is damaged, was edited, shortened or rolled back, or is of another run.
        """
        folder = RunFolder.open(path)
        try:
            tables = parse_toml(folder.run_file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise RunFolderError(f"{folder.run_file} cannot be read as a run file: {error}.") from None
        ledger = read_run_ledger(folder)
        _check(folder, tables, ledger.facts)
        return cls(
            name=name or Path(path).resolve().name,
            tables=tables,
            facts=ledger.facts,
            entries=ledger.entries,
            metrics=folder.read_metrics(),
            measures=folder.read_measures(),
            run_id=run_id(ledger),
            population_ledger=population_of(folder),
        )

    @cached_property
    def statement(self) -> dict[str, Any]:
        """The privacy statement, computed from the ledger. The tightest accountant takes seconds."""
        return compute_statement(self.facts, self.entries)

    @property
    def other_runs(self) -> list[str]:
        """The names of the other runs that were charged to the same users, as far as the store's ledger is here."""
        if self.population_ledger is None:
            return []
        own = (self.run_id, vocabulary_member(str(self.facts.get("corpus", ""))))
        members = self.population_ledger.members.values()
        others = (member for member in members if member.events and member.id not in own)
        return [str(member.facts.get("name", member.id)) for member in others]

    @cached_property
    def all_runs(self) -> dict[str, Any] | None:
        """The privacy statement over all runs on the same users; None if there is no other run, or no ledger here.

        Raises:
            UnprovenCombination: Several runs drew the same cohorts, so there is no statement about all of them.
        """
        if self.population_ledger is None or not self.other_runs:
            return None
        return all_runs(self.population_ledger)

    @property
    def epsilon(self) -> float:
        """The claimed epsilon; infinite if any round was not private."""
        return float(self.statement["claimed"]["epsilon"])

    @property
    def delta(self) -> float:
        """The delta of the claim."""
        return self.statement["delta"]

    @property
    def is_private(self) -> bool:
        """Whether the claimed epsilon is finite."""
        return math.isfinite(self.epsilon)

    @property
    def rounds(self) -> int:
        """The round of the last evaluation; before the first evaluation the last round charged."""
        return int(self.metrics[-1]["round"]) if self.metrics else max((e.round + 1 for e in self.entries), default=0)

    @property
    def population(self) -> int:
        """The declared number of users."""
        return int(self.facts["population"])

    @property
    def users_per_round(self) -> float:
        """The expected number of users per round, as declared."""
        sampling = self.facts["sampling"]
        return float(sampling.get("users_per_round") or sampling["sampling_prob"] * self.population)


def _check(folder: RunFolder, tables: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    """Check what every view of a run reads of its run file and of the head of its ledger."""
    training, privacy = tables.get("training"), tables.get("privacy", {})
    budget = privacy.get("budget_epsilon") if isinstance(privacy, dict) else "?"
    if not isinstance(training, dict) or type(training.get("rounds")) is not int or not _is_number(budget, None):
        raise RunFolderError(f"{folder.run_file} is not the run file of a run: put back the one that it began with.")
    sampling = facts.get("sampling") or {}
    drawn = sampling.get("users_per_round") or sampling.get("sampling_prob")
    if not (_is_number(facts.get("delta")) and _is_number(facts.get("population")) and _is_number(drawn)):
        raise LedgerError(
            f"{folder.ledger} does not declare delta, population and sampling, as the ledger of a run does. Put the right one back."
        )


def _is_number(value: Any, *others: Any) -> bool:
    return value in others or (isinstance(value, int | float) and not isinstance(value, bool))


def read_runs(paths: Sequence[str | Path]) -> list[RunRecord]:
    """Read several run folders.

    A record is named after its folder. If two folders have the same name, parent folders are added until all names
    differ.

    Raises:
        InvalidValue: There is no path, or one folder is given twice.
    """
    if not paths:
        raise InvalidValue("Name at least one run folder.")
    folders = [Path(path).resolve() for path in paths]
    if len(set(folders)) < len(folders):
        raise InvalidValue("The same run folder is named twice: name each run once.")
    depth = 1
    while len({folder.parts[-depth:] for folder in folders}) < len(folders):
        depth += 1
    return [RunRecord.read(folder, "/".join(folder.parts[-depth:])) for folder in folders]


def latest(record: RunRecord, measure: str) -> float | None:
    """A figure of the last evaluation, that is, of the newest model; None before the first evaluation.

    Args:
        record: The run.
        measure: The key of a figure in metrics.jsonl.
    """
    return record.metrics[-1].get(measure) if record.metrics else None


def accuracy_points(record: RunRecord, measure: str = "accuracy_top1") -> list[dict[str, Any]]:
    """A figure by round, as data for a plot.

    Args:
        record: The run.
        measure: The key of a figure in metrics.jsonl.

    Returns:
        For each evaluation a dictionary with `run`, `round`, `value`, and `smoothed`: the mean over this evaluation and
        the four before it.
    """
    rows = [row for row in record.metrics if isinstance(row.get(measure), int | float)]
    means = smoothed([row[measure] for row in rows])
    return [
        {"run": record.name, "round": row["round"], "value": row[measure], "smoothed": mean}
        for row, mean in zip(rows, means, strict=True)
    ]


def final_accuracy(record: RunRecord, measure: str = "accuracy_top1") -> float | None:
    """The last smoothed figure; None before the first evaluation.

    Args:
        record: The run.
        measure: The key of a figure in metrics.jsonl.
    """
    points = accuracy_points(record, measure)
    return points[-1]["smoothed"] if points else None


def epsilon_points(record: RunRecord, accountant: str = RUNNING_ACCOUNTANT) -> list[dict[str, Any]]:
    """Epsilon after the rounds charged so far, as data for a plot.

    A round that was computed twice, after a crash, is charged twice.

    Args:
        record: The run.
        accountant: An accountant that can add one round at a time.

    Returns:
        Dictionaries with `run`, `round` and `epsilon`, about 200 at most; empty if epsilon is infinite.
    """
    running, points = RunningEpsilon(record.facts["delta"], accountant), {}
    every = max(1, -(-len(record.entries) // MAX_POINTS))
    for i, entry in enumerate(record.entries, start=1):
        running.charge(entry.event)
        if i % every == 0 or i in (1, len(record.entries)):
            epsilon = running.epsilon
            if math.isinf(epsilon):
                return []
            points[entry.round + 1] = epsilon
    return [{"run": record.name, "round": r, "epsilon": e} for r, e in sorted(points.items())]


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """The status of a run at one moment."""

    state: str
    """`training`, `silent`, `stopped`, `spent` (the budget allows no further round) or `complete`."""
    round: int
    """Completed rounds."""
    rounds: int
    """Planned rounds."""
    epsilon: float
    """Epsilon of the rounds charged so far, by `accountant`."""
    delta: float
    accountant: str
    budget: float | None
    """The epsilon at which the run stops; None: no budget."""
    points: list[dict[str, Any]]
    """The evaluations so far, from `accuracy_points`."""
    newest: dict[str, Any]
    """The figures of the last evaluation; empty before the first."""
    seconds_since: float
    """Seconds since a round was last charged."""
    rounds_per_second: float | None
    """Speed since the first call of `RunMonitor.status`; None until a round has been completed since."""

    @property
    def seconds_left(self) -> float | None:
        """Estimated time to the last round; None unless the run is training at a known speed."""
        if not self.rounds_per_second or self.state != "training":
            return None
        return max(0, self.rounds - self.round) / self.rounds_per_second


class RunMonitor:
    """Reads the status of one run repeatedly. Keeps the running epsilon, so that only new rounds are added to it.

    Args:
        path: The run folder.
    """

    def __init__(self, path: str | Path) -> None:
        self.folder = RunFolder.open(path)
        self._record = RunRecord.read(path)
        privacy = self._record.tables.get("privacy", {})
        self._budget = privacy.get("budget_epsilon")
        self._accountant = privacy.get("budget_accountant", RUNNING_ACCOUNTANT)
        self._running = RunningEpsilon(self._record.facts["delta"], self._accountant)
        self._seen = self._round = 0
        self._last: Event = NonPrivate(reason="nothing was charged yet")
        self._size = -1
        self._started: tuple[float, int] | None = None

    def status(self) -> RunStatus:
        """Read the current status.

        Raises:
            LedgerError: The ledger became shorter since the last call.
        """
        self._read_ledger()
        metrics = self.folder.read_metrics()
        record = RunRecord(
            name=self._record.name, tables=self._record.tables, facts=self._record.facts, entries=(), metrics=metrics
        )
        since = max(0.0, time.time() - self.folder.ledger.stat().st_mtime)
        rounds = int(self._record.tables["training"]["rounds"])
        evaluated = int(metrics[-1]["round"]) if metrics else 0
        state = self._state(evaluated, rounds, since)
        # A round is charged before it is computed, so the newest charged round may not be complete.
        done = max(evaluated, self._round - 1 if state in ("training", "silent") else self.folder.saved_round)
        return RunStatus(
            state=state,
            round=done,
            rounds=max(rounds, done),
            epsilon=self._running.epsilon,
            delta=self._running.delta,
            accountant=self._running.accountant,
            budget=self._budget,
            points=accuracy_points(record),
            newest=dict(metrics[-1]) if metrics else {},
            seconds_since=since,
            rounds_per_second=self._rounds_per_second(done),
        )

    def _read_ledger(self) -> None:
        """Charge the entries that were appended since the last read."""
        size = self.folder.ledger.stat().st_size
        if size == self._size:
            return
        entries = Ledger.read(self.folder.ledger).entries
        if len(entries) < self._seen:
            raise LedgerError(
                f"{self.folder.ledger} became shorter while it was watched: it was replaced. Put the right one back."
            )
        for entry in entries[self._seen :]:
            self._running.charge(entry.event)
            if isinstance(entry.event, PoissonGaussian | CorrelatedGaussian | ExampleGaussian | NonPrivate):
                self._round, self._last = entry.round + 1, entry.event
        self._seen, self._size = len(entries), size

    def _state(self, evaluated: int, rounds: int, since: float) -> str:
        """Tell whether the run trains, is silent, has stopped or is complete."""
        # The training loop removes the statement when it starts and writes it whenever it ends.
        if self.folder.statement.exists():
            if evaluated >= rounds:
                return "complete"
            return "spent" if self._budget and self._running.epsilon_after(self._last) > self._budget else "stopped"
        return "training" if since < SILENT_AFTER else "silent"

    def _rounds_per_second(self, done: int) -> float | None:
        """Rounds a second since the watch began; None until a round is done."""
        now = time.monotonic()
        if self._started is None:
            self._started = (now, done)
        started, first = self._started
        return (done - first) / (now - started) if done > first and now > started else None
