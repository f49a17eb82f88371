"""The runner: trains the runs of the paper, one group of side-by-side runs after the other.

`run_steps` takes steps and a workspace, and yields an event when a run is skipped, a group starts, a run completes a
round, and a group ends; the command line displays them. When a group ends for any reason, a line of results is
written for each of its runs. After a kill, the same call continues from the checkpoints of the runs.

    for event in run_steps(workspace, steps_by_rank(["clipping"]), stop_after=1500):
        print(event)
"""

import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

from reproduction import results
from reproduction.measures import record
from reproduction.results import RunResult
from reproduction.scheduling import Clock, Job, PendingJob, Step, Throughput, jobs_of, next_group
from reproduction.workspace import Workspace
from unheard.errors import RankError, UnheardError
from unheard.parameters import finish
from unheard.training.loop import train_together


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """A run that is not trained in this session, and the reason."""

    name: str
    why: str


@dataclass(frozen=True, kw_only=True)
class GroupBegan:
    """A group of runs starts; `updates` are the user updates that they lack."""

    names: tuple[str, ...]
    updates: int


@dataclass(frozen=True, kw_only=True)
class RoundDone:
    """One run of the group has completed a round."""

    name: str
    round: int
    updates: int
    accuracy: float | None = None


@dataclass(frozen=True, kw_only=True)
class GroupEnded:
    """The results of a group. `stopped`: it ran out of time. `error`: it failed, and the other groups continue."""

    results: list[RunResult]
    stopped: bool
    error: str | None = None


Event = Skipped | GroupBegan | RoundDone | GroupEnded


def run_steps(
    workspace: Workspace,
    steps: Sequence[Step],
    *,
    cap: int | None = None,
    stop_after: float | None = None,
    clock: Clock = time.monotonic,
) -> Iterator[Event]:
    """Run all steps in order until they are complete or the time is over.

    Args:
        workspace: Corpora, folders, scale and engine.
        steps: Steps in order.
        cap: Largest number of rounds of every run.
        stop_after: Seconds after which everything is saved and recorded.
        clock: Source of time; tests replace it.

    Yields:
        Events. If the caller closes the generator, the current group is saved and recorded first.
    """
    pace = Throughput(clock)
    until = None if stop_after is None else clock() + stop_after
    for step in steps:
        ends = [until] if until is not None else []
        ends += [clock() + step.seconds] if step.seconds is not None else []
        yield from _run_step(workspace, jobs_of(step, workspace.scale, cap), min(ends, default=None), pace)
        if pace.is_over(until, 1):
            return


def _run_step(workspace: Workspace, jobs: list[Job], until: float | None, pace: Throughput) -> Iterator[Event]:
    """Run the jobs of one step, group by group; report those that cannot run."""
    by_name = {job.run.name: job for job in jobs}
    waiting, reasons = workspace.pending_jobs(jobs)
    yield from (Skipped(name=name, why=why) for name, why in reasons.items())
    while waiting and not pace.is_over(until, 1):
        group = next_group(waiting, lambda job: workspace.is_ready(job, by_name))
        if not group:
            yield from (Skipped(name=w.job.run.name, why=f"{w.job.run.after} is not as far yet") for w in waiting)
            return
        yield from _run_group(workspace, group, until, pace)
        waiting = [pending for pending in waiting if pending not in group]


def _run_group(workspace: Workspace, group: list[PendingJob], until: float | None, pace: Throughput) -> Iterator[Event]:
    """Train one group side by side, and record its runs however it ends."""
    jobs = [pending.job for pending in group]
    for job in jobs:
        workspace.record_start(job)
    began_at = {job.run.name: workspace.rounds_done(job.run.name) for job in jobs}
    names = tuple(began_at)
    yield GroupBegan(names=names, updates=sum(one.left * one.users for one in group))
    runs = [(workspace.run(job), workspace.folder(job.run.name).path) for job in jobs]
    rounds = {job.run.name: job.rounds for job in jobs}
    recorded: list[RunResult] = []
    errors: list[str] = []
    going, ended = {number for number, pending in enumerate(group) if pending.left}, set()
    pace.begin()
    try:
        # The paper's corpora are public text, and its baselines have no noise.
        rounds_of_all = train_together(runs, engine=workspace.engine, ranks=workspace.ranks, allow_no_privacy=True)
        with closing(rounds_of_all) as reports:  # pyright: ignore[reportArgumentType]
            for number, report in reports:
                pace.count(number, group[number].users)
                accuracy = None if report.metrics is None else report.metrics["accuracy_top1"]
                yield RoundDone(name=names[number], round=report.round, updates=group[number].users, accuracy=accuracy)
                # All runs of the group have trained on this turn's cohorts when the first reports; the last report ends the turn.
                if report.round >= report.rounds:
                    ended.add(number)
                if number == max(going - ended | {number}):
                    if pace.is_first_turn:
                        finish(workspace.engine.torch_device())
                        pace.settled()
                    if pace.is_over(until, len(group)):
                        break
    except RankError:
        raise  # the ranks are gone, so every other group would fail as well
    except Exception as error:  # a group that ran out of memory does not stop smaller groups
        errors.append(_error_text(error))
    finally:
        # However the group ends: at its last round, at the deadline, because the caller closes the generator, or by Ctrl-C.
        recorded += _record_all(workspace, group, began_at, pace, errors)
        pace.closed(len(group))
    stopped = any(done.rounds < rounds[done.name] for done in recorded)
    yield GroupEnded(results=recorded, stopped=stopped, error="\n".join(errors) or None)


def _record_all(
    workspace: Workspace, group: list[PendingJob], began_at: dict[str, int], pace: Throughput, errors: list[str]
) -> list[RunResult]:
    """Write a line of results for each run of the group that completed a round.

    A run that cannot be evaluated does not prevent the lines of the others.
    """
    known, recorded = results.read_runs(workspace.results), []
    for pending in group:
        job, name = pending.job, pending.job.run.name
        folder, done = workspace.folder(name), workspace.rounds_done(name)
        if not done or not folder.statement.exists():
            continue
        per_second = pace.updates_per_second
        before = known.get(name)
        # The time of earlier sessions is in their line; rounds of a killed session count at the current throughput.
        counted = before.rounds if before and before.rounds == began_at[name] else 0
        seconds = (done - counted) * pending.users / per_second if per_second else 0.0
        try:
            seconds += before.seconds if before and counted else 0.0
            result = record(job, workspace, seconds=seconds, users_per_second=per_second)
        except Exception as error:
            errors.append(_error_text(error))
            continue
        results.append(workspace.results, [result])
        recorded.append(result)
    return recorded


def _error_text(error: Exception) -> str:
    """The message of an expected error; other errors with their traceback."""
    return str(error) if isinstance(error, UnheardError) else "".join(traceback.format_exception(error))
