"""Runs of the paper made one group after the other: what goes side by side does, what was begun goes on, what is done is kept.

In: steps and a workplace. Out: a generator of what happens; its caller shows it. A line of results is written for each run when its
group ends or is stopped, however that comes about; after a kill, the same call goes on from the runs' own checkpoints.
"""

import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

from reproduction import results
from reproduction.record import record
from reproduction.results import RunResult
from reproduction.scheduling import Clock, Job, Pace, Step, Waiting, jobs_of, next_group
from reproduction.workspace import Workplace
from unheard.devices import finish
from unheard.errors import RankError, UnheardError
from unheard.training.loop import train_together


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """A run that is not made in this sitting, and why."""

    name: str
    why: str


@dataclass(frozen=True, kw_only=True)
class GroupBegan:
    """Runs that go side by side from now on, and the user updates that they lack."""

    names: tuple[str, ...]
    updates: int
    rounds: int
    """That the longest of them lacks."""


@dataclass(frozen=True, kw_only=True)
class RoundDone:
    """One run of the group has done a round of so many user updates."""

    name: str
    round: int
    updates: int
    accuracy: float | None = None


@dataclass(frozen=True, kw_only=True)
class GroupEnded:
    """What the group left; `stopped` if its time was up, `trouble` if it ended by an error, which does not end the others."""

    results: list[RunResult]
    stopped: bool
    trouble: str | None = None


Happening = Skipped | GroupBegan | RoundDone | GroupEnded


def run_steps(
    place: Workplace,
    steps: Sequence[Step],
    *,
    cap: int | None = None,
    stop_after: float | None = None,
    clock: Clock = time.monotonic,
) -> Iterator[Happening]:
    """All steps in order, until the time is up. Whatever was begun is saved and recorded before this ends."""
    pace = Pace(clock)
    until = None if stop_after is None else clock() + stop_after
    for step in steps:
        step_until = _earlier(until, None if step.seconds is None else clock() + step.seconds)
        yield from _run_step(place, jobs_of(step, place.scale, cap), step_until, pace)
        if pace.is_over(until, 1):
            return


def _run_step(place: Workplace, jobs: list[Job], until: float | None, pace: Pace) -> Iterator[Happening]:
    by_name = {job.run.name: job for job in jobs}
    possible = []
    for job in jobs:
        if why := place.why_not(job, by_name):
            yield Skipped(name=job.run.name, why=why)
        else:
            possible.append(job)
    waiting = place.waiting(possible)
    while waiting and not pace.is_over(until, 1):
        group = next_group(waiting, lambda job: place.is_ready(job, by_name))
        if not group:
            yield from (Skipped(name=w.job.run.name, why=f"{w.job.run.after} is not as far yet") for w in waiting)
            return
        yield from _run_group(place, group, until, pace)
        waiting = [one for one in waiting if one not in group]


def _run_group(place: Workplace, group: list[Waiting], until: float | None, pace: Pace) -> Iterator[Happening]:
    jobs = [one.job for one in group]
    for job in jobs:
        place.note_begun(job)
    began_at = {job.run.name: place.rounds_done(job.run.name) for job in jobs}
    names = tuple(began_at)
    yield GroupBegan(
        names=names, updates=sum(one.left * one.users for one in group), rounds=max(one.left for one in group)
    )
    runs = [(place.run(job), place.folder(job.run.name).path) for job in jobs]
    rounds = {job.run.name: job.rounds for job in jobs}
    made: list[RunResult] = []
    trouble: list[str] = []
    going, ended = {number for number, one in enumerate(group) if one.left}, set()
    pace.begin()
    try:
        # The paper's corpora are public text, and its baselines have no noise.
        rounds_of_all = train_together(runs, engine=place.engine, ranks=place.ranks, allow_no_privacy=True)
        with closing(rounds_of_all) as reports:  # pyright: ignore[reportArgumentType]
            for number, report in reports:
                pace.count(number, group[number].users)
                accuracy = None if report.metrics is None else report.metrics["accuracy_top1"]
                yield RoundDone(name=names[number], round=report.round, updates=group[number].users, accuracy=accuracy)
                # All have learned from this turn's cohorts when the first reports; the last one's report ends the turn.
                if report.round >= report.rounds:
                    ended.add(number)
                if number == max(going - ended | {number}):
                    if pace.is_first_turn:
                        finish(place.engine.torch_device())
                        pace.settled()
                    if pace.is_over(until, len(group)):
                        break
    except RankError:
        raise  # without its ranks no other group would do better
    except Exception as error:  # memory that was not there for this group may well be for the next
        trouble.append(_told(error))
    finally:
        # However the group ends: at its last round, by the clock, by whoever reads us, by Ctrl-C.
        made += _record_all(place, group, began_at, pace, trouble)
        pace.closed(len(group))
    stopped = any(done.rounds < rounds[done.name] for done in made)
    yield GroupEnded(results=made, stopped=stopped, trouble="\n".join(trouble) or None)


def _record_all(
    place: Workplace, group: list[Waiting], began_at: dict[str, int], pace: Pace, trouble: list[str]
) -> list[RunResult]:
    """A line for each run of the group that has done a round; one that cannot be measured does not keep the others from theirs."""
    known, made = results.read(place.results), []
    for one in group:
        job, name = one.job, one.job.run.name
        folder, done = place.folder(name), place.rounds_done(name)
        if not done or not folder.statement.exists():
            continue
        per_second = pace.updates_per_second
        before = known.get(name)
        # Earlier sittings are known from their line; rounds of one that was killed count at today's pace.
        counted = before.rounds if before and before.rounds == began_at[name] else 0
        seconds = (done - counted) * one.users / per_second if per_second else 0.0
        try:
            result = record(
                job,
                place.run(job),
                place.corpora[job.run.corpus],
                folder,
                main=place.corpora.get("main"),
                began_after=place.began_after.get(name),
                choice=place.engine,
                seconds=seconds + (before.seconds if before and counted else 0.0),
                users_per_second=per_second,
            )
        except Exception as error:
            trouble.append(_told(error))
            continue
        results.append(place.results, [result])
        made.append(result)
    return made


def _told(error: Exception) -> str:
    """A refusal speaks for itself; anything else is told with where it happened."""
    return str(error) if isinstance(error, UnheardError) else "".join(traceback.format_exception(error))


def _earlier(one: float | None, other: float | None) -> float | None:
    return min((moment for moment in (one, other) if moment is not None), default=None)
