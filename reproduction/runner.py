"""Train the runs of the paper in groups of runs that train side by side.

`run_steps` takes steps and a workspace. It yields an event when a run is skipped, a group starts, a run completes a
round, or a group ends; the command line displays the events. When a group ends for any reason except a kill, a line of
results is written for each of its runs. After a kill, the same call continues from the checkpoints of the runs.

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
    """A group of runs starts. `updates` is the number of user updates that its runs still need."""

    names: tuple[str, ...]
    updates: int


@dataclass(frozen=True, kw_only=True)
class RoundDone:
    """A run of the group has completed a round of `updates` user updates. `accuracy` is None without an evaluation."""

    name: str
    round: int
    updates: int
    accuracy: float | None = None


@dataclass(frozen=True, kw_only=True)
class GroupEnded:
    """A group of runs has ended, for any reason. The other groups continue.

    Attributes:
        results: The results that were recorded.
        stopped: Whether a run of the group has not completed its rounds.
        error: Why the group, or the record of a run, failed; None if nothing failed.
    """

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
    """Run all steps in order until they are complete or the time limit is reached.

    Args:
        workspace: Corpora, folders, scale and engine.
        steps: Steps in order.
        cap: Largest number of rounds of every run; None for no limit.
        stop_after: Seconds within which all runs are saved and recorded; None for no limit.
        clock: Function that returns the time in seconds; tests replace it.

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
    """Run the jobs of one step, group by group, and yield the events. Jobs that cannot run yield `Skipped`.

    Args:
        workspace: Corpora, folders, scale and engine.
        jobs: The jobs of the step.
        until: The time by which everything must be saved; None for no limit.
        pace: The throughput of this session.
    """
    by_name = {job.run.name: job for job in jobs}
    waiting, reasons = workspace.pending_jobs(jobs)
    yield from (Skipped(name=name, why=why) for name, why in reasons.items())
    while waiting and not pace.is_over(until, 1):
        group = next_group(waiting, lambda job: workspace.is_ready(job, by_name))
        if not group:
            yield from (Skipped(name=w.job.run.name, why=f"{w.job.run.after} is not complete yet") for w in waiting)
            return
        yield from _run_group(workspace, group, until, pace)
        waiting = [pending for pending in waiting if pending not in group]


def _run_group(workspace: Workspace, group: list[PendingJob], until: float | None, pace: Throughput) -> Iterator[Event]:
    """Train one group side by side and yield its events. Record its runs when it ends, for whatever reason."""
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
        # The corpora of the reproduction are public text, and its baselines have no noise.
        rounds_of_all = train_together(runs, engine=workspace.engine, ranks=workspace.ranks, allow_no_privacy=True)
        with closing(rounds_of_all) as reports:  # pyright: ignore[reportArgumentType]
            for number, report in reports:
                pace.count(number, group[number].users)
                accuracy = None if report.metrics is None else report.metrics["accuracy_top1"]
                yield RoundDone(name=names[number], round=report.round, updates=group[number].users, accuracy=accuracy)
                # All runs complete a round before the first of them reports it. Stop only after the last report of a
                # turn, so that all runs of the group end at the same round.
                if report.round >= report.rounds:
                    ended.add(number)
                if number == max(going - ended | {number}):
                    if pace.is_first_turn:
                        finish(workspace.engine.torch_device())
                        pace.settled()
                    if pace.is_over(until, len(group)):
                        break
    except RankError:
        raise  # a rank is lost, so every other group would fail as well
    except Exception as error:  # for example out of memory: smaller groups can still run
        errors.append(_error_text(error))
    finally:
        # Also if the caller closes the generator, or on Ctrl-C.
        recorded += _record_all(workspace, group, began_at, pace, errors)
        pace.closed(len(group))
    stopped = any(done.rounds < rounds[done.name] for done in recorded)
    yield GroupEnded(results=recorded, stopped=stopped, error="\n".join(errors) or None)


def _record_all(
    workspace: Workspace, group: list[PendingJob], began_at: dict[str, int], pace: Throughput, errors: list[str]
) -> list[RunResult]:
    """Write a line of results for each run of the group that has completed a round, and return the results.

    If the result of a run cannot be computed, its error is added to `errors`, and the other runs are still recorded.

    Args:
        workspace: Corpora, folders, scale and engine.
        group: The jobs of the group.
        began_at: The round at which each run began in this session, by name.
        pace: The throughput of the group.
        errors: List that receives the errors as text.
    """
    known, recorded = results.read_runs(workspace.results), []
    for pending in group:
        job, name = pending.job, pending.job.run.name
        folder, done = workspace.folder(name), workspace.rounds_done(name)
        if not done or not folder.statement.exists():
            continue
        per_second = pace.updates_per_second
        before = known.get(name)
        # The last line of results has the time of earlier sessions. Rounds of a session that was killed, which has no
        # line, count at the current throughput.
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
    """Return the message of an `UnheardError`, or the traceback of any other error."""
    return str(error) if isinstance(error, UnheardError) else "".join(traceback.format_exception(error))
