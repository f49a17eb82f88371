"""Decide which runs are trained in which order, which of them side by side, and when a group must stop.

The input is a list of recipe names (`steps_by_rank`) or a TOML file of steps (`read_schedule`):

    [[step]]
    recipes = ["noised-vs-baseline", "head-words"]
    rounds = 2000            # largest number of rounds of each run; default: as many as in the paper
    runs = ["baseline*"]     # patterns of the names of runs; default: all runs of the recipes
    seconds = 600            # time limit of the step; default: until all runs are complete

`jobs_of` turns a step into jobs (a run and its number of rounds). `next_group` selects the next jobs that train side
by side. They have the same model, the same batch shape and a similar length, and together they fit on the device.
`Throughput` measures user updates per second, and says when a group must stop so that everything is saved and recorded
before a deadline. This module does not import torch.
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
    """Recipes whose runs are trained together. A step starts when the previous one has ended.

    Attributes:
        recipes: Names of recipes.
        rounds: Largest number of rounds of each run; None for no limit.
        runs: Shell patterns; only runs whose names match one of them are trained, and the runs that they start from.
        seconds: Time limit of the step; None for no limit.

    Raises:
        UnknownKey: A recipe is unknown.
        InvalidValue: A limit is not positive.
    """

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
    """A run and the number of rounds that it must complete."""

    run: PaperRun
    rounds: int
    planned: int
    """Number of rounds that the recipes ask for at this scale, without the limits of a step or the command line."""


def steps_by_rank(names: Sequence[str]) -> list[Step]:
    """Return one step per rank of the named recipes (or `all`), highest priority first.

    A rank without runs is left out. Raise `UnknownKey` if a recipe is unknown.
    """
    if "all" in names:
        names = list(RECIPES)
    Step(recipes=tuple(names))  # raises for an unknown name
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
    """Return the steps for the requested recipes: those of a schedule, or one step per rank.

    Args:
        names: Names of recipes, or `all`.
        schedule: A schedule file; None for one step per rank.

    Raises:
        InvalidValue: The recipes need no run, or the schedule cannot be read or has no step for them.
        UnknownKey: A recipe is unknown.
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
            f"{', '.join(names)}: nothing here needs a run. `python -m reproduction show {names[0]}` shows the result."
        )
    return steps


def jobs_of(step: Step, scale: Scale, cap: int | None = None) -> list[Job]:
    """Return the jobs of one step.

    Args:
        step: Recipes, and limits on their runs.
        scale: Sizes that all runs share.
        cap: A second limit on the number of rounds, in addition to that of the step; None for no limit.

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
    """Return one job per run, with the largest number of rounds of its jobs: what all steps of a schedule need."""
    by_name: dict[str, Job] = {}
    for job in jobs:
        by_name[job.run.name] = max(by_name.get(job.run.name, job), job, key=lambda one: one.rounds)
    return list(by_name.values())


SPEED = 4_250.0
"""User updates per second of the paper's model on one H200 with sixteen runs side by side (benchmarks/results), for
estimates of time."""
MOST_RUNS = 16
"""Largest number of runs in a group."""
MOST_USERS = 2_000
"""Largest number of users per round over all runs of a group. More users are not faster, and a group can stop only
between rounds."""
LIKE_LENGTH = 2.0
"""The remaining rounds of a run and of the first run of its group differ by at most this factor."""


@dataclass(frozen=True, kw_only=True)
class PendingJob:
    """A job that is not complete, with the properties that decide which group it can join."""

    job: Job
    key: Hashable
    """Runs with equal keys can train side by side (`side_by_side_key`)."""
    left: int
    """Remaining rounds."""
    users: int
    """Users per round."""


def next_group(waiting: Sequence[PendingJob], is_ready: Callable[[Job], bool] = lambda job: True) -> list[PendingJob]:
    """Return the first job that is ready and the later jobs that can train side by side with it.

    The list is empty if no job is ready.

    Args:
        waiting: Jobs in the order of their priority.
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
"""Seconds to save, evaluate and record one run when its group ends: the estimate before the first measurement."""

Clock = Callable[[], float]
"""A function that returns the time in seconds, like `time.monotonic`."""


class Throughput:
    """Measures user updates per second of the current group, and says when the group must stop.

    There is one instance per session; `begin` starts a new group. A turn is one round of every run of the group. The
    first turn is not counted if there are others, because it compiles kernels and allocates memory.

    Args:
        clock: Function that returns the time in seconds.
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
        """Record that the device has finished the first turn, and start measuring here.

        GPU work is asynchronous, so the reports of a turn arrive before the device has finished it.
        """
        self._turned = self._ended = self._clock()

    @property
    def updates_per_second(self) -> float:
        """User updates per second of the group; 0 if it completed no round."""
        if self._updates["later"]:
            return self._updates["later"] / max(self._ended - self._turned, 1e-9)
        return self._updates["first turn"] / max(self._ended - self._began, 1e-9)

    def closed(self, runs: int) -> None:
        """Record that all runs of the group were saved. The time this took becomes the estimate for the next group.

        Args:
            runs: The number of runs in the group.
        """
        self._closing = (self._clock() - self._ended) / max(runs, 1)

    def is_over(self, until: float | None, runs: int) -> bool:
        """Return whether the group must stop now so that its runs are saved before `until`.

        Args:
            until: The time by which everything must be saved, by the clock of this object; None for no limit.
            runs: How many runs must be saved.
        """
        return until is not None and self._clock() + runs * self._closing >= until
