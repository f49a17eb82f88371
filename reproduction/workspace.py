"""The workspace of a session: run folders, ledgers and results on disk; which jobs are complete, and which cannot be
run.

A `Workspace` combines the corpora, a work folder, a results folder, a scale and an engine. For each job it gives the
`Run`, its folder, the remaining rounds, and the reason if it cannot run here. Every run has a population ledger of
its own, because each is a separate experiment (docs/decisions/0060-populations-of-experiments.md).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from reproduction.base_config import build_run, comparable_settings, settings_of, side_by_side_key
from reproduction.corpora import Corpus
from reproduction.recipe import Scale
from reproduction.results import FILE, RunResult, read_runs
from reproduction.scheduling import Job, PendingJob
from unheard.engines.choice import EngineChoice
from unheard.engines.distributed.process_group import ProcessGroup
from unheard.errors import InvalidValue, RunFolderError, RunFolderExists
from unheard.privacy.ledger import Ledger
from unheard.run_folder import RunFolder, replace_file
from unheard.training.run import Run, run_hash

ROUNDS_LOST_ON_A_CPU = 20
"""Largest number of rounds that a killed run loses on a CPU, where rounds are slow."""


@dataclass(frozen=True, kw_only=True)
class Workspace:
    """Everything that a session needs except the list of runs."""

    corpora: Mapping[str, Corpus]
    work: Path
    results: Path
    """Folder of the results of this corpus."""
    scale: Scale
    seed_shift: int = 0
    engine: EngineChoice = EngineChoice()
    ranks: ProcessGroup | None = None
    """The other processes, if several train together."""

    def make_folders(self) -> None:
        """Create the folders. Raises `RunFolderError` now if one cannot be written to, and not after the first run."""
        for folder, option in ((self.work, "--work"), (self.results, "--results")):
            try:
                folder.mkdir(parents=True, exist_ok=True)
                TemporaryFile(dir=folder).close()
            except OSError as error:
                raise RunFolderError(
                    f"Cannot write to {folder}: {error.strerror}. Name another folder with {option}."
                ) from None

    def folder(self, name: str) -> RunFolder:
        """The run folder of a run."""
        return RunFolder(self.work / name)

    def run(self, job: Job) -> Run:
        """The complete configuration of a job."""
        return build_run(
            job.run,
            self.corpora[job.run.corpus],
            ledger=self.work / "ledgers" / f"{job.run.name}.jsonl",
            rounds=job.rounds,
            scale=self._saving_scale,
            seed_shift=self.seed_shift,
            start=None if job.run.after is None else self.work / job.run.after,
        )

    @property
    def _saving_scale(self) -> Scale:
        """The scale, with more frequent checkpoints on a CPU."""
        every = self.scale.checkpoint_every
        is_slow = self.engine.torch_device().type == "cpu"
        return replace(self.scale, checkpoint_every=min(every, ROUNDS_LOST_ON_A_CPU) if is_slow else every)

    def reason_not_runnable(self, job: Job, others: Mapping[str, Job]) -> str | None:
        """Return why a job cannot run here, as the end of a sentence; None if it can.

        Args:
            job: The job.
            others: The jobs that it may start from, by the name of their run.
        """
        corpus = self.corpora.get(job.run.corpus)
        if corpus is None:
            maker = "unheard corpus synth" if job.run.corpus == "synthetic" else "python -m reproduction prepare"
            return f"there is no corpus '{job.run.corpus}' (--corpus {job.run.corpus}=DIR; `{maker}` makes one)"
        if not corpus.held_out:
            return f"{corpus.name} holds nobody out to measure on (prepare it with a larger --held-out, or more users)"
        if (users := self.scale.users(job.run, corpus.population)) > min(corpus.users, corpus.population):
            return f"{users:,} users per round are more than {corpus.name} has (--scale smoke takes fewer)"
        if job.run.after is not None and (why := self.reason_not_runnable(others[job.run.after], others)):
            return f"it begins from {job.run.after}, and {why}"
        return None

    def pending_jobs(self, jobs: Sequence[Job]) -> list[PendingJob]:
        """The jobs that lack rounds, and the jobs that those start from.

        Args:
            jobs: Jobs that can run here.

        Raises:
            InvalidValue: There is a result of a run with other settings.
            RunFolderExists: There is a run folder of a run with other settings.
        """
        known = read_runs(self.results)
        runs = {job.run.name: self.run(job) for job in jobs}
        incomplete = [job for job in jobs if not self._suffices(known.get(job.run.name), job, runs[job.run.name])]
        begun_from = {job.run.after for job in incomplete if not self.folder(job.run.name).run_file.exists()}
        pending = []
        for job in jobs:
            left = job.rounds - self.rounds_done(job.run.name)
            if job in incomplete or (job.run.name in begun_from and left > 0):
                run = runs[job.run.name]
                self._check_same(job, run)
                corpus = self.corpora[job.run.corpus]
                users = self.scale.users(job.run, min(corpus.users, corpus.population))
                key = side_by_side_key(run, job.run.corpus)
                pending.append(PendingJob(job=job, key=key, left=max(left, 0), users=users))
        return pending

    def is_ready(self, job: Job, others: Mapping[str, Job]) -> bool:
        """Return whether the run that a job starts from is complete, or the job itself has started.

        Args:
            job: The job.
            others: The jobs that it may start from, by the name of their run.
        """
        if job.run.after is None or self.folder(job.run.name).run_file.exists():
            return True
        return self.rounds_done(job.run.after) >= others[job.run.after].rounds

    def started_early(self, jobs: Sequence[Job]) -> dict[str, list[str]]:
        """Runs that started from an earlier state of another run than that run has now, or will have. Returns the runs
        by a sentence that says so; their names do not."""
        wanted = {job.run.name: job.rounds for job in jobs}
        reasons: dict[str, list[str]] = {}
        for job in jobs:
            began, after = self.began_after.get(job.run.name), job.run.after
            if after is None or began is None or not self.folder(job.run.name).run_file.exists():
                continue
            further = max(self.rounds_done(after), wanted.get(after, 0))
            if began < further:
                why = f"began from {after} after {began:,} of its rounds, of which there are to be {further:,}"
                reasons.setdefault(why, []).append(job.run.name)
        return reasons

    def rounds_done(self, name: str) -> int:
        """Number of rounds in the last checkpoint of a run."""
        return self.folder(name).saved_round

    def record_start(self, job: Job) -> None:
        """Store the number of rounds of the earlier run that this job starts from, since that run may continue later."""
        if job.run.after is not None and not self.folder(job.run.name).run_file.exists():
            self.work.mkdir(parents=True, exist_ok=True)
            notes = {**self.began_after, job.run.name: self.rounds_done(job.run.after)}
            replace_file(self._notes, json.dumps(notes, indent=1).encode())

    @property
    def began_after(self) -> dict[str, int]:
        """For each run that started from another one, the number of rounds which that one had."""
        return json.loads(self._notes.read_text(encoding="utf-8")) if self._notes.exists() else {}

    @cached_property
    def _notes(self) -> Path:
        return self.work / "began_after.json"

    def _suffices(self, result: RunResult | None, job: Job, run: Run) -> bool:
        """Whether a result has all rounds of a job. Raises `InvalidValue` if it belongs to other settings."""
        if result is None:
            return False
        is_same_store = result.store in ("", self.corpora[job.run.corpus].digest)
        if not is_same_store or comparable_settings(_as_read(settings_of(run))) != comparable_settings(result.settings):
            raise InvalidValue(
                f"{self.results / FILE} has a result for {job.run.name} with other settings (another corpus, "
                "population, "
                "seed, scale, dictionary or default). Choose another --name, so that they do not mix."
            )
        return result.rounds >= job.rounds

    def _check_same(self, job: Job, run: Run) -> None:
        """Raise `RunFolderExists` if the run folder belongs to other settings."""
        folder = self.folder(job.run.name)
        if not folder.run_file.exists():
            return
        facts = Ledger.read(folder.ledger).facts
        if (facts.get("run_hash"), facts.get("corpus")) != (run_hash(run), self.corpora[job.run.corpus].digest):
            raise RunFolderExists(
                f"{folder.path} holds this run with other settings (another population, seed, scale, corpus or "
                "work folder). "
                "Choose another --work or --name, or remove it."
            )


def _as_read(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings as they are after a round trip through JSON, which turns tuples into lists."""
    return json.loads(json.dumps(settings))
