"""Read one run folder as plain data for tables, plots and pages, and report its status while it is training.

    record = RunRecord.read("runs/private")
    record.epsilon, record.rounds            # the claimed epsilon, computed from the ledger; the newest round
    accuracy_points(record)                  # held-out AccuracyTop1 by round, also smoothed as in the paper
    epsilon_points(record)                   # epsilon by round as the ledger grew

The data come from `run.toml`, `ledger.jsonl`, `metrics.jsonl` and `measures.json`. The run may be finished or still
training. Neither torch nor the store is needed. `LedgerError` is raised if the ledger was edited, or if the
checkpoints, the model or the store's ledger show that entries are missing.

    monitor = RunMonitor("runs/private")
    status = monitor.status()
    status.state, status.round, status.rounds, status.epsilon        # ('training', 120, 3000, 0.84)

`RunMonitor` takes no lock and ignores an incomplete last line, so it does not disturb a run that is training. It reads
the ledger again only if its size has changed.

Paper, section 3: "We evaluate accuracy every 20 rounds and plot metrics smoothed over 5 evaluations".
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from unheard.errors import InvalidValue, LedgerError, RunFolderError
from unheard.formatting import printable, smoothed
from unheard.privacy.accountants import RUNNING_ACCOUNTANT
from unheard.privacy.budget import RunningEpsilon
from unheard.privacy.events import CorrelatedGaussian, Event, ExampleGaussian, NonPrivate, PoissonGaussian
from unheard.privacy.ledger import Entry, Ledger, run_id
from unheard.privacy.population_ledger import PopulationLedger
from unheard.privacy.population_statement import all_runs, other_runs
from unheard.privacy.run_ledger import population_of, read_run_ledger
from unheard.privacy.statement import compute_statement
from unheard.run_folder import RunFolder, distinct_names

MAX_POINTS = 200
"""The largest number of points of an epsilon curve, not counting the first round."""
SILENT_AFTER = 120.0
"""Seconds without a charged round after which the state of a run is `silent`. Either its process was killed, or its
rounds take longer than this."""


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The content of one run folder, as plain data."""

    name: str
    """The name to show for the run. Runs that are shown together have different names."""
    tables: Mapping[str, Any]
    """The content of the run file: a dictionary for each table, such as `training` and `privacy`."""
    facts: Mapping[str, Any]
    """The public facts in the header of the ledger: population, delta, sampling and others."""
    entries: Sequence[Entry]
    """The ledger entries, in the order in which they were charged."""
    metrics: Sequence[Mapping[str, Any]]
    """The evaluations on held-out users, in order of rounds."""
    measures: Mapping[str, Any] | None = None
    """The full measures of the newest model (`unheard evaluate --full`); None if it has not been measured."""
    run_id: str = ""
    """The id of the run in the ledger of its population."""
    population_ledger: PopulationLedger | None = None
    """The ledger of all runs on the same users; None if the store is not at the path that the run file names."""

    @classmethod
    def read(cls, path: str | Path, name: str | None = None) -> "RunRecord":
        """Read a run folder.

        Args:
            path: The run folder.
            name: The name to show. By default the name of the folder.

        Raises:
            RunFolderError: The folder is not a run folder, or one of its files is damaged or was changed.
            LedgerError: The ledger is damaged, was edited, shortened or rolled back, or belongs to another run.
        """
        folder = RunFolder.open(path)
        tables, ledger = folder.read_tables(), read_run_ledger(folder)
        _check(folder, tables, ledger.facts)
        return cls(
            name=printable(name or Path(path).resolve().name),  # drawing a control character would end the process
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
        """The privacy statement, computed from the ledger. The first access can take seconds (PLD accountant)."""
        return compute_statement(self.facts, self.entries)

    @property
    def other_runs(self) -> list[str]:
        """The names of the other runs that were charged to the same users; empty if `population_ledger` is None."""
        if self.population_ledger is None:
            return []
        return other_runs(self.population_ledger, self.run_id, str(self.facts.get("corpus", "")))

    @cached_property
    def all_runs(self) -> dict[str, Any] | None:
        """The privacy statement about all runs on the same users; None if `other_runs` is empty.

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
        """The delta of the claimed (epsilon, delta)."""
        return self.statement["delta"]

    @property
    def is_private(self) -> bool:
        """Whether the claimed epsilon is finite."""
        return math.isfinite(self.epsilon)

    @property
    def rounds(self) -> int:
        """The number of rounds up to the last evaluation; before the first evaluation, the number of charged rounds."""
        return int(self.metrics[-1]["round"]) if self.metrics else max((e.round + 1 for e in self.entries), default=0)

    @property
    def population(self) -> int:
        """The number of users, as declared in the ledger."""
        return int(self.facts["population"])

    @property
    def users_per_round(self) -> float:
        """The expected number of users per round, as declared in the ledger. The sizes of the cohorts are private."""
        sampling = self.facts["sampling"]
        return float(sampling.get("users_per_round") or sampling["sampling_prob"] * self.population)


def _check(folder: RunFolder, tables: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    """Check the entries of the run file and of the ledger's header that all tables and plots need.

    Raises:
        RunFolderError: The run file has no number of rounds, or its budget is not a number.
        LedgerError: The header of the ledger lacks the delta, the population or the sampling.
    """
    training, privacy = tables.get("training"), tables.get("privacy", {})
    budget = privacy.get("budget_epsilon") if isinstance(privacy, dict) else "?"
    if not isinstance(training, dict) or type(training.get("rounds")) is not int or not _is_number(budget, None):
        raise RunFolderError(
            f"{folder.run_file} is not the run file of a run: [training] rounds or [privacy] budget_epsilon is not a "
            "number. Put back the run file that the run began with."
        )
    sampling = facts.get("sampling") or {}
    drawn = sampling.get("users_per_round") or sampling.get("sampling_prob")
    if not (_is_number(facts.get("delta")) and _is_number(facts.get("population")) and _is_number(drawn)):
        raise LedgerError(
            f"{folder.ledger} does not declare delta, population and sampling, as the ledger of a run does. Put the right one back."
        )


def _is_number(value: Any, *others: Any) -> bool:
    """Whether `value` is an int or a float, but not a bool, or equals one of `others`."""
    return value in others or (isinstance(value, int | float) and not isinstance(value, bool))


def read_runs(paths: Sequence[str | Path]) -> list[RunRecord]:
    """Read several run folders.

    Each record has the name of its folder. If two folders have the same name, parent folders are added to all names
    until they differ: `sweep/1` and `repeat/1`.

    Raises:
        InvalidValue: `paths` is empty, or names the same folder twice.
        RunFolderError, LedgerError: See `RunRecord.read`.
    """
    if not paths:
        raise InvalidValue("Name at least one run folder.")
    folders = [Path(path).resolve() for path in paths]
    if len(set(folders)) < len(folders):
        raise InvalidValue("The same run folder is named twice: name each run once.")
    return [RunRecord.read(folder, name) for folder, name in zip(folders, distinct_names(folders), strict=True)]


def latest(record: RunRecord, measure: str) -> float | None:
    """Return one figure of the last evaluation; None if there is no evaluation yet or it lacks the figure.

    Args:
        record: The run.
        measure: The key of a figure in metrics.jsonl, such as `perplexity`.
    """
    return record.metrics[-1].get(measure) if record.metrics else None


def accuracy_points(record: RunRecord) -> list[dict[str, Any]]:
    """Return the AccuracyTop1 of every evaluation, as data for a plot.

    Returns:
        For each evaluation a dictionary with `run`, `round`, `value`, and `smoothed`: the mean over this evaluation and
        up to four before it, as in the paper.
    """
    rows = [row for row in record.metrics if isinstance(row.get("accuracy_top1"), int | float)]
    means = smoothed([row["accuracy_top1"] for row in rows])
    return [
        {"run": record.name, "round": row["round"], "value": row["accuracy_top1"], "smoothed": mean}
        for row, mean in zip(rows, means, strict=True)
    ]


def final_accuracy(record: RunRecord) -> float | None:
    """Return the mean AccuracyTop1 of the last five evaluations; None before the first evaluation."""
    points = accuracy_points(record)
    return points[-1]["smoothed"] if points else None


def epsilon_points(record: RunRecord) -> list[dict[str, Any]]:
    """Return epsilon by round, as data for a plot.

    The epsilon at a round includes all rounds charged until then. A round that was repeated after a crash was charged
    twice and counts twice.

    Returns:
        Dictionaries with `run`, `round` and `epsilon`, in order of rounds, at most `MAX_POINTS` + 1. Empty if epsilon
        is infinite.
    """
    running, points = RunningEpsilon(record.facts["delta"]), dict[int, float]()
    every = max(1, -(-len(record.entries) // MAX_POINTS))
    for i, entry in enumerate(record.entries, start=1):
        running.charge(entry.event)
        if i > 1 and entry.round < record.entries[i - 2].round:  # repeated: what was charged before stays charged
            points = {number: epsilon for number, epsilon in points.items() if number <= entry.round}
        if i % every == 0 or i in (1, len(record.entries)):
            epsilon = running.epsilon
            if math.isinf(epsilon):
                return []
            points[entry.round + 1] = epsilon
    return [{"run": record.name, "round": r, "epsilon": e} for r, e in sorted(points.items())]


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """The status of a run at the time of one call of `RunMonitor.status`."""

    state: str
    """One of five words: `training`; `silent` (no round was charged for `SILENT_AFTER` seconds); `stopped` (training
    ended before the last round); `spent` (it ended because the budget allows no further round); `complete`."""
    round: int
    """The number of completed rounds."""
    rounds: int
    """The number of planned rounds."""
    epsilon: float
    """Epsilon of the rounds charged so far, by `accountant`."""
    delta: float
    """The delta at which `epsilon` is computed."""
    accountant: str
    """The name of the accountant of `epsilon`."""
    budget: float | None
    """The largest epsilon that the run may spend; None if it has no budget."""
    points: list[dict[str, Any]]
    """The AccuracyTop1 of the evaluations so far, as `accuracy_points` returns it."""
    newest: dict[str, Any]
    """The figures of the last evaluation; empty before the first evaluation."""
    seconds_since: float
    """The number of seconds since the last charge to the ledger."""
    rounds_per_second: float | None
    """The mean speed since the first call of `RunMonitor.status`; None if no round was completed since that call."""

    @property
    def seconds_left(self) -> float | None:
        """The estimated seconds to the last round; None if the run is not training or its speed is unknown."""
        if not self.rounds_per_second or self.state != "training":
            return None
        return max(0, self.rounds - self.round) / self.rounds_per_second


class RunMonitor:
    """Reads the status of one run repeatedly. Each call accounts only for the ledger entries that are new.

    Args:
        path: The run folder.

    Raises:
        RunFolderError, LedgerError: See `RunRecord.read`.
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
        """Return the current status.

        Raises:
            LedgerError: The ledger is damaged, or has fewer entries than at the last call.
            RunFolderError: The evaluations were changed or are damaged.
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
        """Add the ledger entries that are new since the last call to the running epsilon.

        Raises:
            LedgerError: The ledger is damaged, or has fewer entries than at the last call.
        """
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
        """Return the state of the run: one of the words of `RunStatus.state`.

        Args:
            evaluated: The round of the last evaluation.
            rounds: The number of planned rounds.
            since: Seconds since the last charge.
        """
        # The training loop deletes statement.json when it starts and writes it when it ends, so the file exists only
        # while no process is training.
        if self.folder.statement.exists():
            if evaluated >= rounds:
                return "complete"
            return "spent" if self._budget and self._running.epsilon_after(self._last) > self._budget else "stopped"
        return "training" if since < SILENT_AFTER else "silent"

    def _rounds_per_second(self, done: int) -> float | None:
        """Return the rounds per second since the first call; None if no round was completed since then.

        Args:
            done: The number of completed rounds.
        """
        now = time.monotonic()
        if self._started is None:
            self._started = (now, done)
        started, first = self._started
        return (done - first) / (now - started) if done > first and now > started else None
