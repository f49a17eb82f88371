"""Scheduling: which runs are trained in which order, which of them side by side, and when a group must stop.

The input is a list of recipe names (`steps_by_rank`) or a TOML file of steps (`read_schedule`):

    [[step]]
    recipes = ["noised-vs-baseline", "head-words"]
    rounds = 2000            # of every run here; default: as many as in the paper
    runs = ["baseline*"]     # only runs with these names; default: all runs of the recipes
    seconds = 600            # then the next step; default: until all runs are complete

`jobs_of` turns a step into jobs (a run and its number of rounds). `next_group` selects the next jobs that train side
by side: the same model and batch shape, similar length, no more than fill the device. `Throughput` measures user
updates per second, and says when a group must stop so that everything is saved and recorded before a deadline. The
module does not import torch.
"""

import tomllib
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

from reproduction.recipe import PaperRun, Scale, distinct
from reproduction.recipes import RECIPES
from unheard.config import nearest, part_from_table, require
from unheard.errors import InvalidValue, UnknownKey


@dataclass(frozen=True, kw_only=True)
class Step:
    """Recipes that run together. A step starts when the previous one has ended."""

    recipes: tuple[str, ...]
    rounds: int | None = None
    runs: tuple[str, ...] = ("*",)
    seconds: float | None = None

    def __post_init__(self) -> None:
        for name in self.recipes:
            if name not in RECIPES:
                raise UnknownKey(f"Unknown recipe '{name}'.{nearest(name, RECIPES)}")
        require(self.rounds is None or self.rounds >= 1, "rounds must be at least 1.")
        require(self.seconds is None or self.seconds > 0, "seconds must be above 0.")


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run and the number of rounds that it is to reach."""

    run: PaperRun
    rounds: int
    planned: int
    """Number of rounds of its recipes at this scale, without limits of time."""


def steps_by_rank(names: Sequence[str]) -> list[Step]:
    """One step per rank for the named recipes (or `all`), highest priority first. Recipes without runs are left out."""
    if "all" in names:
        names = list(RECIPES)
    Step(recipes=tuple(names))  # refuses names that there are not
    ranks = sorted({RECIPES[name].rank for name in names})
    steps = [Step(recipes=tuple(n for n in RECIPES if n in names and RECIPES[n].rank == rank)) for rank in ranks]
    return [step for step in steps if any(RECIPES[name].runs for name in step.recipes)]


def read_schedule(path: Path) -> list[Step]:
    """Read a schedule file.

    Raises:
        InvalidValue: The file cannot be read, is not TOML, or is not a list of steps.
        UnknownKey: A recipe, a run or a key of a step is unknown.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidValue(f"Cannot read the schedule {path}: {error.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidValue(f"The schedule {path} is not valid TOML: {error}.") from None
    if set(content) != {"step"} or not isinstance(content["step"], list):
        raise InvalidValue(f"The schedule {path} is a list of [[step]], and nothing else.")
    steps = [part_from_table(Step, table, "step") for table in content["step"]]
    for step in steps:
        names = [run.name for name in step.recipes for run in RECIPES[name].runs]
        for pattern in step.runs:
            if pattern != "*" and not any(fnmatchcase(name, pattern) for name in names):
                raise UnknownKey(f"No run of {', '.join(step.recipes)} is called '{pattern}'.{nearest(pattern, names)}")
    return steps


def choose_steps(names: Sequence[str], schedule: Path | None) -> list[Step]:
    """The steps of a schedule for the requested recipes, or one step per rank.

    Args:
        names: Names of recipes, or `all`.
        schedule: A schedule file; None for none.

    Raises:
        InvalidValue: There is nothing to run.
    """
    steps = steps_by_rank(names)
    if schedule is not None:
        requested = {name for step in steps for name in step.recipes}
        kept = [replace(s, recipes=tuple(n for n in s.recipes if n in requested)) for s in read_schedule(schedule)]
        steps = [step for step in kept if step.recipes]
        if not steps:
            raise InvalidValue(f"{schedule} has no step for {', '.join(names)}. Add one, or leave out --schedule.")
    if not steps:
        raise InvalidValue(
            f"{', '.join(names)}: nothing here needs a run. `python -m reproduction show {names[0]}` shows it."
        )
    return steps


def jobs_of(step: Step, scale: Scale, cap: int | None = None) -> list[Job]:
    """The jobs of one step.

    Args:
        step: Recipes, and limits on their runs.
        scale: Sizes that all runs share.
        cap: Largest number of rounds, in addition to the limit of the step.

    Returns:
        Every run once, highest priority first, each after the run that it starts from.
    """
    runs = distinct(RECIPES[name] for name in step.recipes)
    wanted = {run.name for run in runs if any(fnmatchcase(run.name, pattern) for pattern in step.runs)}
    wanted |= {run.after for run in runs if run.name in wanted and run.after is not None}
    limits = [limit for limit in (cap, step.rounds) if limit is not None]
    longest = {run.name: scale.rounds(run) for run in distinct(RECIPES.values())}
    return [
        Job(run=run, rounds=scale.rounds(run, min(limits, default=None)), planned=longest[run.name])
        for run in runs
        if run.name in wanted
    ]


def furthest(jobs: Iterable[Job]) -> list[Job]:
    """Every run once, with the largest number of rounds of any job: the total of a schedule."""
    by_name: dict[str, Job] = {}
    for job in jobs:
        by_name[job.run.name] = max(by_name.get(job.run.name, job), job, key=lambda one: one.rounds)
    return list(by_name.values())


SPEED = 4_250.0
"""User updates per second of the model of the paper on one H200, sixteen runs side by side (benchmarks/results)."""
MOST_RUNS = 16
"""Largest number of runs in a group."""
MOST_USERS = 2_000
"""Largest number of users per turn over all runs of a group. More is not faster, and a group can stop only between
turns."""
LIKE_LENGTH = 2.0
"""The remaining rounds of two runs of a group differ at most by this factor."""


@dataclass(frozen=True, kw_only=True)
class PendingJob:
    """A job that lacks rounds, with the properties that decide its group."""

    job: Job
    key: Hashable
    """Runs with equal keys can train side by side (`side_by_side_key`)."""
    left: int
    """Remaining rounds."""
    users: int
    """Users per round."""


def next_group(waiting: Sequence[PendingJob], is_ready: Callable[[Job], bool] = lambda job: True) -> list[PendingJob]:
    """Return the first job that is ready, and the following jobs that can train side by side with it; empty if none is.

    Args:
        waiting: Jobs in the order in which they are wanted.
        is_ready: Whether a job can start now.
    """
    ready = [pending for pending in waiting if is_ready(pending.job)]
    if not ready:
        return []
    first, *others = ready
    group, users = [first], first.users
    for pending in others:
        shorter, longer = sorted((pending.left, first.left))
        is_alike = pending.key == first.key and longer <= LIKE_LENGTH * max(shorter, 1)
        if is_alike and len(group) < MOST_RUNS and users + pending.users <= MOST_USERS:
            group.append(pending)
            users += pending.users
    return group


CLOSING_SECONDS = 1.0
"""Initial estimate of the seconds to save, state and evaluate one run when its group ends; replaced by the measured
time."""

Clock = Callable[[], float]
"""Returns seconds, like `time.monotonic`."""


class Throughput:
    """User updates per second of the current group, and the deadline.

    One instance per session; `begin` starts a group. The first turn of a group is not counted, because it compiles
    kernels and fills memory.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._closing = CLOSING_SECONDS
        self.begin()

    def begin(self) -> None:
        """Start measuring a group."""
        self._began = self._turned = self._ended = self._clock()
        self._last, self._turns = -1, 0
        self._updates = {"first turn": 0, "later": 0}

    def count(self, number: int, updates: int) -> None:
        """Record that a run of the group has completed a round.

        Args:
            number: The number of the run in its group. Runs report in order, so a smaller number starts a new turn.
            updates: The user updates of the round.
        """
        if number <= self._last or not self._turns:
            self._turns += 1
        self._last, self._ended = number, self._clock()
        if self._turns == 1:
            self._turned = self._ended
        self._updates["first turn" if self._turns == 1 else "later"] += updates

    @property
    def is_first_turn(self) -> bool:
        """Whether the group is in its first turn."""
        return self._turns == 1

    def settled(self) -> None:
        """The device has finished the first turn. Reports come before that, because GPU work is asynchronous."""
        self._turned = self._ended = self._clock()

    @property
    def updates_per_second(self) -> float:
        """User updates per second of the group; 0 if it completed no round."""
        if self._updates["later"]:
            return self._updates["later"] / max(self._ended - self._turned, 1e-9)
        return self._updates["first turn"] / max(self._ended - self._began, 1e-9)

    def closed(self, runs: int) -> None:
        """Note that all runs of the group were recorded: the time that this took is the estimate for the next group."""
        self._closing = (self._clock() - self._ended) / max(runs, 1)

    def is_over(self, until: float | None, runs: int) -> bool:
        """Return whether the runs must be closed now to finish before `until`.

        Args:
            until: The time by which everything must be saved, by the clock of this object; None for no limit.
            runs: How many runs must be saved.
        """
        return until is not None and self._clock() + runs * self._closing >= until
