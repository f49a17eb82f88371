"""Report the status of a run while it is training.

    monitor = RunMonitor("runs/private")
    status = monitor.status()
    status.state, status.round, status.rounds, status.epsilon        # ('training', 120, 3000, 0.84)

Reading takes no lock and skips an incomplete last line, so it does not disturb the run. The ledger is read again only
if it has grown.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unheard.errors import LedgerError
from unheard.privacy.accountants import RUNNING_ACCOUNTANT
from unheard.privacy.budget import RunningEpsilon
from unheard.privacy.events import CorrelatedGaussian, Event, ExampleGaussian, NonPrivate, PoissonGaussian
from unheard.privacy.ledger import Ledger
from unheard.report.run_record import RunRecord, accuracy_points
from unheard.run_folder import RunFolder

SILENT_AFTER = 120.0
"""Seconds without a charged round after which a run is called silent: its process was killed, or its rounds take
long."""


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
        size = self.folder.ledger.stat().st_size
        if size == self._size:
            return
        entries = Ledger.read(self.folder.ledger).entries
        if len(entries) < self._seen:
            raise LedgerError(f"{self.folder.ledger} became shorter while it was watched: it was replaced.")
        for entry in entries[self._seen :]:
            self._running.charge(entry.event)
            if isinstance(entry.event, PoissonGaussian | CorrelatedGaussian | ExampleGaussian | NonPrivate):
                self._round, self._last = entry.round + 1, entry.event
        self._seen, self._size = len(entries), size

    def _state(self, evaluated: int, rounds: int, since: float) -> str:
        # The training loop removes the statement when it starts and writes it whenever it ends.
        if self.folder.statement.exists():
            if evaluated >= rounds:
                return "complete"
            return "spent" if self._budget and self._running.epsilon_after(self._last) > self._budget else "stopped"
        return "training" if since < SILENT_AFTER else "silent"

    def _rounds_per_second(self, done: int) -> float | None:
        now = time.monotonic()
        if self._started is None:
            self._started = (now, done)
        started, first = self._started
        return (done - first) / (now - started) if done > first and now > started else None
