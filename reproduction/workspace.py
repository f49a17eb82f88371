"""The workspace of a session: run folders, ledgers and results on disk, and the state of its jobs.

A `Workspace` combines the corpora, a work folder, a results folder, a scale and an engine. For each job it gives the
`Run`, its folder, the remaining rounds, and the reason if it cannot run here. Every run has a population ledger of
its own, because each is a separate experiment (docs/decisions/0060-populations-of-experiments.md).
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryFile

from reproduction.base_config import build_run, comparable_settings, settings_of, side_by_side_key
from reproduction.corpora import Corpus
from reproduction.measures import device_name
from reproduction.recipe import PaperRun, Scale
from reproduction.results import FILE, RunResult, read_runs
from reproduction.scheduling import SPEED, Job, PendingJob, Step, furthest, jobs_of
from unheard.engines.choice import EngineChoice
from unheard.engines.distributed.process_group import ProcessGroup
from unheard.errors import CorpusMissing, InvalidValue, RunFolderError, RunFolderExists
from unheard.privacy.ledger import Ledger
from unheard.run_folder import RunFolder, replace_file
from unheard.training.run import Run, run_hash

OF_RECIPES = {
    "training.rounds": "recipes say how long a run is. Fewer: --rounds N.",
    "training.reproducible_seed": "recipes number their seeds. Others: --seed N.",
    "training.init_from": "recipes say what a run begins from.",
    "training.init_is_public": "recipes say what a run begins from.",
    "sampling.users_per_round": "recipes say how many users a round has. Fewer: --scale smoke.",
    "clip.norm": "recipes say what S is: runs are named by it.",
    "noise.noise_std": "recipes say what sigma is: runs are named by it.",
    "noise.noise_multiplier": "recipes say what sigma is: runs are named by it.",
    "privacy.population": "say it with --population N.",
    "privacy.ledger": "each of these runs has a ledger of its own, under --work.",
    "corpus.path": "say it with --corpus ROLE=DIR.",
}
"""Keys that `--set` must not change, because recipes or other options determine them, and what to use instead."""
CPU_SPEED = 7.0
"""User updates per second on two CPU cores."""
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

    def speed(self, given: float | None) -> tuple[float, str]:
        """User updates per second for an estimate of time, and the source of the number.

        Args:
            given: The number that the user states; None for what was measured.
        """
        if given is not None:
            return given, "as given"
        device = self.engine.torch_device()
        known = [run.users_per_second for run in read_runs(self.results).values() if run.device == device_name(device)]
        if measured := [speed for speed in known if speed > 0]:
            return median(measured), "as measured here before"
        speed, machine = (CPU_SPEED, "two CPU cores") if device.type == "cpu" else (SPEED, "one H200")
        return speed, f"as on {machine}; --users-per-second says otherwise"

    def left(self, steps: Sequence[Step], cap: int | None) -> tuple[list[PendingJob], dict[str, str]]:
        """Return the jobs of all steps that lack rounds, and the reason for each job that cannot run.

        Args:
            steps: The steps.
            cap: Largest number of rounds of every run.

        Raises:
            CorpusMissing: None of the jobs can run.
        """
        jobs = furthest(job for step in steps for job in jobs_of(step, self.scale, cap))
        pending, reasons = self.pending_jobs(jobs)
        if len(reasons) == len(jobs):
            raise CorpusMissing(f"None of these runs can be made: {'; '.join(sorted(set(reasons.values())))}.")
        return pending, reasons

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
            scale=replace(self.scale, checkpoint_every=min(self.scale.checkpoint_every, ROUNDS_LOST_ON_A_CPU))
            if self.engine.torch_device().type == "cpu"
            else self.scale,
            seed_shift=self.seed_shift,
            start=None if job.run.after is None else self.work / job.run.after,
        )

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

    def pending_jobs(self, jobs: Sequence[Job]) -> tuple[list[PendingJob], dict[str, str]]:
        """Return the jobs that lack rounds, with the jobs that those start from, and the reasons why others cannot run.

        Args:
            jobs: Jobs, with those that they start from.

        Raises:
            InvalidValue: There is a result of a run with other settings.
            RunFolderExists: There is a run folder of a run with other settings.
        """
        by_name = {job.run.name: job for job in jobs}
        reasons = {name: why for name, job in by_name.items() if (why := self.reason_not_runnable(job, by_name))}
        jobs = [job for job in jobs if job.run.name not in reasons]
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
        return pending, reasons

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
        """Runs that started from an earlier state of another run than that run has now, or will have.

        Returns the runs by a sentence that says so; their names do not.
        """
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

    @property
    def _notes(self) -> Path:
        return self.work / "began_after.json"

    def _suffices(self, result: RunResult | None, job: Job, run: Run) -> bool:
        """Whether a result has all rounds of a job. Raises `InvalidValue` if it belongs to other settings."""
        if result is None:
            return False
        is_same_store = result.store in ("", self.corpora[job.run.corpus].digest)
        settings = json.loads(json.dumps(settings_of(run)))  # as it is read again: JSON turns tuples into lists
        if not is_same_store or comparable_settings(settings) != comparable_settings(result.settings):
            raise InvalidValue(
                f"{self.results / FILE} has a result for {job.run.name} with other settings (another corpus, "
                "population, seed, scale, dictionary or default). Choose another --name, so that they do not mix."
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
                f"{folder.path} holds this run with other settings (another population, seed, scale, corpus or work "
                "folder). Choose another --work or --name, or remove it."
            )


def check_changes(changes: Sequence[str], runs: Iterable[PaperRun]) -> None:
    """Raise `InvalidValue` if a change cannot be made to all runs of a recipe.

    That is so if it concerns what distinguishes the runs, what another option sets, or one key twice.
    """

    def key_of(change: str) -> str:
        """The key of a change `table.key=value`."""
        return change.partition("=")[0].strip()

    keys = [key_of(change) for change in changes]
    refused = {key: f"{key} is given twice." for key in keys if keys.count(key) > 1} | OF_RECIPES
    refused |= {key: "say it with --engine, --device or --rank-timeout." for key in keys if key.startswith("engine.")}
    own = {key_of(change): run.name for run in runs for change in run.changes}
    refused |= {
        key: f"{name} says itself what {key} is. Choose recipes that leave it alone." for key, name in own.items()
    }
    for key, change in zip(keys, changes, strict=True):
        if key in refused:
            raise InvalidValue(f"--set {change}: {refused[key]}")
