"""The workspace of a session: corpora, run folders, ledgers and results on disk, and the state of the jobs.

A `Workspace` combines the corpora, a work folder, a results folder, a scale and an engine. For each job it returns the
`Run`, the run folder, the remaining rounds, and the reason if the job cannot run here. Every run has its own population
ledger, because each is a separate experiment (docs/decisions/0060-populations-of-experiments.md).
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
    "training.init_from": "recipes say what a run starts from.",
    "training.init_is_public": "recipes say what a run starts from.",
    "sampling.users_per_round": "recipes say how many users a round has. Fewer: --scale smoke.",
    "clip.norm": "recipes say what S is: runs are named by it.",
    "noise.noise_std": "recipes say what sigma is: runs are named by it.",
    "noise.noise_multiplier": "recipes say what sigma is: runs are named by it.",
    "privacy.population": "use --population N.",
    "privacy.ledger": "each of these runs has its own ledger, under --work.",
    "corpus.path": "use --corpus ROLE=DIR.",
}
"""Keys that `--set` must not change, because recipes or other options set them, with a text that says what to do."""
CPU_SPEED = 7.0
"""User updates per second on two CPU cores, for estimates of time."""
ROUNDS_LOST_ON_A_CPU = 20
"""Largest number of rounds between checkpoints on a CPU. Rounds are slow there, and a killed run repeats them."""


@dataclass(frozen=True, kw_only=True)
class Workspace:
    """Everything that a session needs except the list of runs."""

    corpora: Mapping[str, Corpus]
    """The corpora by role."""
    work: Path
    """Folder of the run folders and ledgers."""
    results: Path
    """Folder of the results of this corpus."""
    scale: Scale
    seed_shift: int = 0
    """Number added to the seed of every run."""
    engine: EngineChoice = EngineChoice()
    ranks: ProcessGroup | None = None
    """The processes that train together; None if there is only this process."""

    def make_folders(self) -> None:
        """Create the folders for runs and results, and check that both can be written.

        Raises:
            RunFolderError: A folder cannot be written. Without this check, the error would come after the first run.
        """
        for folder, option in ((self.work, "--work"), (self.results, "--results")):
            try:
                folder.mkdir(parents=True, exist_ok=True)
                TemporaryFile(dir=folder).close()
            except OSError as error:
                raise RunFolderError(
                    f"Cannot write to {folder}: {error.strerror}. Name another folder with {option}."
                ) from None

    def speed(self, given: float | None) -> tuple[float, str]:
        """Return the user updates per second for an estimate of time, and a text that says where the number comes from.

        Args:
            given: The number from the command line; None for the median of earlier results on this device, or for a
                default if there are none.
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
        """Return the jobs of all steps that are not complete, and the reason for each job that cannot run.

        Args:
            steps: The steps.
            cap: Largest number of rounds of every run; None for no limit.

        Raises:
            CorpusMissing: None of the jobs can run.
        """
        jobs = furthest(job for step in steps for job in jobs_of(step, self.scale, cap))
        pending, reasons = self.pending_jobs(jobs)
        if len(reasons) == len(jobs):
            raise CorpusMissing(f"None of these runs can be trained: {'; '.join(sorted(set(reasons.values())))}.")
        return pending, reasons

    def folder(self, name: str) -> RunFolder:
        """Return the run folder of a run."""
        return RunFolder(self.work / name)

    def run(self, job: Job) -> Run:
        """Return the complete configuration of a job."""
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
            return f"{corpus.name} has no held-out users (prepare it with a larger --held-out, or more users)"
        if (users := self.scale.users(job.run, corpus.population)) > min(corpus.users, corpus.population):
            return f"{users:,} users per round are more than {corpus.name} has (--scale smoke takes fewer)"
        if job.run.after is not None and (why := self.reason_not_runnable(others[job.run.after], others)):
            return f"it starts from {job.run.after}, and {why}"
        return None

    def pending_jobs(self, jobs: Sequence[Job]) -> tuple[list[PendingJob], dict[str, str]]:
        """Return the jobs that are not complete, and the reason for each job that cannot run.

        A job is complete if its result has enough rounds. A complete job is pending all the same if an incomplete job
        starts from it and its run folder lacks rounds.

        Args:
            jobs: Jobs, including the jobs that they start from.

        Raises:
            InvalidValue: The results of a run have other settings.
            RunFolderExists: The folder of a run has other settings.
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
        """Return whether a job can start: the run that it starts from is complete, or the job has already started.

        Args:
            job: The job.
            others: The jobs that it may start from, by the name of their run.
        """
        if job.run.after is None or self.folder(job.run.name).run_file.exists():
            return True
        return self.rounds_done(job.run.after) >= others[job.run.after].rounds

    def started_early(self, jobs: Sequence[Job]) -> dict[str, list[str]]:
        """Return the runs that started from a model that its run has trained further since then, or will train further.

        Args:
            jobs: The jobs of this session.

        Returns:
            The names of the runs, by a text that says from which round they started.
        """
        wanted = {job.run.name: job.rounds for job in jobs}
        reasons: dict[str, list[str]] = {}
        for job in jobs:
            began, after = self.began_after.get(job.run.name), job.run.after
            if after is None or began is None or not self.folder(job.run.name).run_file.exists():
                continue
            further = max(self.rounds_done(after), wanted.get(after, 0))
            if began < further:
                why = f"started from {after} after {began:,} of {further:,} rounds"
                reasons.setdefault(why, []).append(job.run.name)
        return reasons

    def rounds_done(self, name: str) -> int:
        """Return the number of rounds in the last checkpoint of a run."""
        return self.folder(name).saved_round

    def record_start(self, job: Job) -> None:
        """Store how many rounds the run that this job starts from has completed now; it may be continued later."""
        if job.run.after is not None and not self.folder(job.run.name).run_file.exists():
            self.work.mkdir(parents=True, exist_ok=True)
            notes = {**self.began_after, job.run.name: self.rounds_done(job.run.after)}
            replace_file(self._notes, json.dumps(notes, indent=1).encode())

    @property
    def began_after(self) -> dict[str, int]:
        """The number of rounds of the earlier run, by the name of each run that started from another run."""
        return json.loads(self._notes.read_text(encoding="utf-8")) if self._notes.exists() else {}

    @property
    def _notes(self) -> Path:
        """The file with the content of `began_after`."""
        return self.work / "began_after.json"

    def _suffices(self, result: RunResult | None, job: Job, run: Run) -> bool:
        """Return whether a result has all rounds of a job. Raise `InvalidValue` if it has other settings."""
        if result is None:
            return False
        is_same_store = result.store in ("", self.corpora[job.run.corpus].digest)
        settings = json.loads(json.dumps(settings_of(run)))  # as in a stored result: JSON turns tuples into lists
        if not is_same_store or comparable_settings(settings) != comparable_settings(result.settings):
            raise InvalidValue(
                f"{self.results / FILE} has a result for {job.run.name} with other settings (another corpus, "
                "population, seed, scale, dictionary or default). Choose another --name, so that they do not mix."
            )
        return result.rounds >= job.rounds

    def _check_same(self, job: Job, run: Run) -> None:
        """Raise `RunFolderExists` if the run folder has other settings."""
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
    """Raise `InvalidValue` if a change cannot be applied to all runs.

    A key must not be one that distinguishes the runs or that another option sets, and must not be given twice.

    Args:
        changes: Values of `--set`, in the form `table.key=value`.
        runs: The runs that they apply to.
    """

    def key_of(change: str) -> str:
        """Return the key of a change `table.key=value`."""
        return change.partition("=")[0].strip()

    keys = [key_of(change) for change in changes]
    refused = {key: f"{key} is given twice." for key in keys if keys.count(key) > 1} | OF_RECIPES
    refused |= {key: "use --engine, --device or --rank-timeout." for key in keys if key.startswith("engine.")}
    own = {key_of(change): run.name for run in runs for change in run.changes}
    refused |= {
        key: f"the run {name} sets {key} itself. Choose recipes that do not set it." for key, name in own.items()
    }
    for key, change in zip(keys, changes, strict=True):
        if key in refused:
            raise InvalidValue(f"--set {change}: {refused[key]}")
