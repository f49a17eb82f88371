"""Run the steps of a batch of `schedule.toml`, several at the same time, until a time limit is reached.

The input is the work folder of `private_run.py` with its stores. Each step runs in its own process. The results and the
state of all runs are bundled after each step and once a minute, so that losing the machine loses at most the rounds
since the newest checkpoint. Calling the same command again continues where the last call stopped. `private_run restore`
prepares a work folder on another machine, where the same command then continues.

    python -m reproduction.batch B --work WORK --bundle OUT/b.tar.gz --stop-after 1500
    python -m reproduction.batch B --work WORK --bundle OUT/b.tar.gz --stop-after 540 --processes 2

A step of a batch is written `private`, `private:2` for its second repetition, or `trade-offs *-seed1` for some of its
runs.
"""

import argparse
import subprocess
import sys
import time
import tomllib
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from reproduction.bundles import LIMIT, bundle, take_chosen_norm
from reproduction.private_run import is_measured, runs_of

HERE = Path(__file__).resolve().parent
SHORTEST = 30.0
"""A step is started only if at least this many seconds are left."""
BUNDLE_EVERY = 60.0
"""Seconds between bundles while steps run."""


@dataclass(frozen=True)
class BatchStep:
    """A step of a batch: one process that executes some runs.

    Attributes:
        name: One of `private_run.STEPS` and `MORE_STEPS`.
        repetition: The number of the repetition, from 1.
        only: A shell pattern; only runs whose names match it are executed.
    """

    name: str
    repetition: int = 1
    only: str = "*"

    @classmethod
    def parse(cls, written: str) -> "BatchStep":
        """Return the step that is written as a text such as `private:2` or `trade-offs *-seed1`."""
        what, _, only = written.partition(" ")
        name, _, repetition = what.partition(":")
        return cls(name, int(repetition or 1), only or "*")

    def __str__(self) -> str:
        repetition = "" if self.repetition == 1 else f":{self.repetition}"
        return f"{self.name}{repetition}" + ("" if self.only == "*" else f" {self.only}")

    def runs(self, work: Path, scale: float) -> dict[str, dict[str, Any]]:
        """Return the run file of each run of the step, as tables, by the name of the run."""
        named = runs_of(self.name, work, repetition=self.repetition, scale=scale)
        return {name: tables for name, tables in named.items() if fnmatchcase(name, self.only)}

    def is_complete(self, work: Path, scale: float) -> bool:
        """Whether all runs of the step have completed their rounds and were measured."""
        runs = self.runs(work, scale)
        return all(is_measured(work / "runs" / name, run["training"]["rounds"]) for name, run in runs.items())

    def is_ready(self, work: Path, scale: float) -> bool:
        """Whether every run that a run of this step takes its first model from is complete."""
        starts = {run["training"].get("init_from") for run in self.runs(work, scale).values()} - {None}
        return all((Path(start) / "facts.json").exists() for start in starts)


def read_batch(name: str, schedule: Path = HERE / "schedule.toml") -> list[BatchStep]:
    """Return the steps of a batch in order.

    Args:
        name: Name of a `[[batch]]`.
        schedule: The schedule file.

    Raises:
        SystemExit: The schedule has no batch of this name.
    """
    batches = {batch["name"]: batch for batch in tomllib.loads(schedule.read_text(encoding="utf-8"))["batch"]}
    if name not in batches:
        raise SystemExit(f"There is no batch {name}: choose from {', '.join(batches)}.")
    return [BatchStep.parse(written) for written in batches[name]["steps"]]


def run_batch(
    steps: list[BatchStep],
    work: Path,
    *,
    bundled: Path,
    limit: int = LIMIT,
    device: str = "cuda",
    stop_after: float | None = None,
    processes: int = 1,
    scale: float = 1.0,
) -> None:
    """Run steps in order, several at the same time, and write a bundle after each step.

    Complete steps are skipped. A step waits until the runs that it starts from are complete. A step that fails is
    reported and does not stop the others.

    Args:
        steps: The steps, the most valuable first.
        work: Folder of stores, ledgers and run folders.
        bundled: File of the bundle with results and state (`bundles.bundle`).
        limit: Largest number of bytes of checkpoints and models in the bundle.
        device: Device of the engines.
        stop_after: Seconds after which runs stop and save their state; complete runs are still measured then. None for
            no limit.
        processes: Number of steps at the same time.
        scale: Factor on rounds and users; below 1 for tests only.
    """
    until = None if stop_after is None else time.time() + stop_after
    take_chosen_norm(work)
    waiting = [step for step in steps if not step.is_complete(work, scale)]
    running: dict[BatchStep, subprocess.Popen[bytes]] = {}
    bundled_at = time.time()
    while waiting or running:
        is_late = until is not None and until - time.time() < SHORTEST
        ready = [step for step in waiting if not is_late and step.is_ready(work, scale)]
        for step in ready[: processes - len(running)]:
            waiting.remove(step)
            print(f"{step}: begins", flush=True)
            running[step] = subprocess.Popen(_command(step, work, device, until, scale), cwd=HERE.parent)
        if not running:
            break
        time.sleep(0.2)
        ended = [step for step, process in running.items() if process.poll() is not None]
        for step in ended:
            status = running.pop(step).returncode
            print(f"{step}: {'ended' if status == 0 else f'failed with exit status {status}'}", flush=True)
        if ended or time.time() - bundled_at > BUNDLE_EVERY:
            if (work / "runs").exists():
                print(f"bundled: {', '.join(file.name for file in bundle(work, bundled, limit=limit))}", flush=True)
            bundled_at = time.time()
    for step in waiting:
        print(f"{step}: not started; call the same command again to continue", flush=True)


def _command(step: BatchStep, work: Path, device: str, until: float | None, scale: float) -> list[str]:
    command = [sys.executable, "-m", "reproduction.private_run", "run", step.name, "--work", str(work)]
    command += ["--repetition", str(step.repetition), "--only", step.only, "--device", device, "--scale", str(scale)]
    return command + ([] if until is None else ["--stop-at", str(until)])


def main() -> None:
    """Run the command line of this module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="a [[batch]] of reproduction/schedule.toml")
    parser.add_argument("--steps", nargs="+", help="steps to run instead of the batch's, such as private:2")
    parser.add_argument("--work", type=Path, required=True)
    bundled = "FILE.tar.gz for results and state, in parts of 15 MiB"
    parser.add_argument("--bundle", dest="bundled", metavar="BUNDLE", type=Path, required=True, help=bundled)
    limited = "largest number of bytes of checkpoints and models in the bundle"
    parser.add_argument("--limit", type=int, default=LIMIT, help=limited)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--stop-after", type=float, help="seconds after which runs stop and are saved")
    parser.add_argument("--processes", type=int, default=1, help="number of steps at the same time")
    parser.add_argument("--scale", type=float, default=1.0, help="shrinks rounds and users; for tests only")
    options = vars(parser.parse_args())
    name, written, work = options.pop("name"), options.pop("steps"), options.pop("work").resolve()
    steps = read_batch(name) if written is None else [BatchStep.parse(one) for one in written]
    run_batch(steps, work, **options)


if __name__ == "__main__":
    main()
