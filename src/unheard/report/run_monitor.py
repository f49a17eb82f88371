"""A run folder while it is being written to: where it stands, looked at as often as one likes.

In: a run folder. Out: `RunStatus` objects. Reading takes no lock, passes over half-written last lines, and reads again only what changed.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unheard.errors import LedgerError
from unheard.privacy.budget import RunningEpsilon
from unheard.privacy.events import Event, NonPrivate, PoissonGaussian
from unheard.privacy.ledger import Ledger
from unheard.report.run_record import RunRecord, accuracy_points
from unheard.run_folder import RunFolder

SILENT_AFTER = 120.0
"""Seconds without a charged round after which a run is called silent: it may have been killed, or its rounds are long."""


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """Where a run stands."""

    state: str
    """training, silent, stopped, spent (its budget allows no further round) or complete."""
    round: int
    rounds: int
    epsilon: float
    delta: float
    accountant: str
    budget: float | None
    points: list[dict[str, Any]]
    """Evaluations so far, smoothed too."""
    newest: dict[str, Any]
    """The last evaluation's figures; empty before the first."""
    seconds_since: float
    """Since a round was last charged."""
    rounds_per_second: float | None
    """As seen since the first look."""

    @property
    def seconds_left(self) -> float | None:
        if not self.rounds_per_second or self.state != "training":
            return None
        return max(0, self.rounds - self.round) / self.rounds_per_second


class RunMonitor:
    """Looks at one run again and again; keeps the epsilon so that only new rounds are added to it."""

    def __init__(self, path: str | Path) -> None:
        self.folder = RunFolder.open(path)
        self._record = RunRecord.read(path)
        privacy = self._record.tables.get("privacy", {})
        self._budget = privacy.get("budget_epsilon")
        self._accountant = privacy.get("budget_accountant", "rdp")
        self._running = RunningEpsilon(self._record.facts["delta"], self._accountant)
        self._seen = self._round = 0
        self._last: Event = NonPrivate(reason="nothing was charged yet")
        self._size = -1
        self._began: tuple[float, int] | None = None

    def status(self) -> RunStatus:
        """The run as it is now."""
        self._read_ledger()
        metrics = self.folder.read_metrics()
        record = RunRecord(
            name=self._record.name, tables=self._record.tables, facts=self._record.facts, entries=(), metrics=metrics
        )
        since = max(0.0, time.time() - self.folder.ledger.stat().st_mtime)
        rounds = int(self._record.tables["training"]["rounds"])
        evaluated = int(metrics[-1]["round"]) if metrics else 0
        state = self._state(evaluated, rounds, since)
        # A charged round is not a done one: the newest is still being computed, or was when the run was left.
        done = max(evaluated, self._round - 1 if state in ("training", "silent") else self.folder.saved_round)
        return RunStatus(
            state=state,
            round=done,
            rounds=max(rounds, done),
            epsilon=self._running.epsilon,
            delta=self._running.delta,
            accountant=self._accountant,
            budget=self._budget,
            points=accuracy_points(record),
            newest=dict(metrics[-1]) if metrics else {},
            seconds_since=since,
            rounds_per_second=self._pace(done),
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
            if isinstance(entry.event, PoissonGaussian | NonPrivate):
                self._round, self._last = entry.round + 1, entry.event
        self._seen, self._size = len(entries), size

    def _state(self, evaluated: int, rounds: int, since: float) -> str:
        # The loop removes the statement when it begins and writes it when it is left, however it is left.
        if self.folder.statement.exists():
            if evaluated >= rounds:
                return "complete"
            return "spent" if self._budget and self._running.epsilon_after(self._last) > self._budget else "stopped"
        return "training" if since < SILENT_AFTER else "silent"

    def _pace(self, done: int) -> float | None:
        now = time.monotonic()
        if self._began is None:
            self._began = (now, done)
        began, first = self._began
        return (done - first) / (now - began) if done > first and now > began else None
