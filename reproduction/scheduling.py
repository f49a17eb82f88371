"""How fast a group of runs goes, and when it must stop so that all of it is saved and recorded in time.

In: a clock and the user updates that were done. Out: user updates a second, and whether the time is up. A group's first turn is not
counted towards its pace: it compiles kernels and fills memory.
What is run in which order, and how far: by the recipes' own ranks, or by a schedule file for the time that there is.

In: names of recipes, or a TOML file of steps. Out: jobs, each a run and the rounds that it is wanted for. No torch.

    [[step]]
    recipes = ["noised-vs-baseline", "head-words"]
    rounds = 2000            # of every run here; left out: as many as the paper
    runs = ["baseline*"]     # only runs named so; left out: all of these recipes
    seconds = 600            # then the next step; left out: until all is done
Which runs go side by side: those of one model and one shape of batch, of about the same length, no more than fill the device.

In: jobs that could begin now, in the order of how much they are wanted. Out: the next group of them. No torch.
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
    """Recipes that are run together; a step begins when the one before it has ended."""

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
    """A run, and how far it is wanted."""

    run: PaperRun
    rounds: int
    planned: int
    """As far as its recipes go at this scale, had one the time."""


def steps_by_rank(names: Sequence[str]) -> list[Step]:
    """The recipes named (or `all`), the most wanted first, those of one rank together."""
    if "all" in names:
        names = list(RECIPES)
    Step(recipes=tuple(names))  # refuses names that there are not
    ranks = sorted({RECIPES[name].rank for name in names})
    steps = [Step(recipes=tuple(n for n in RECIPES if n in names and RECIPES[n].rank == rank)) for rank in ranks]
    return [step for step in steps if any(RECIPES[name].runs for name in step.recipes)]


def read_schedule(path: Path) -> list[Step]:
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
        if unknown := [
            pattern for pattern in step.runs if pattern != "*" and not any(fnmatchcase(n, pattern) for n in names)
        ]:
            raise UnknownKey(
                f"No run of {', '.join(step.recipes)} is called '{unknown[0]}'.{nearest(unknown[0], names)}"
            )
    return steps


def jobs_of(step: Step, scale: Scale, cap: int | None = None) -> list[Job]:
    """Every run of a step once, the most wanted first, each after the one that it begins from."""
    recipes = [RECIPES[name] for name in step.recipes]
    runs = distinct(recipes)
    wanted = {run.name for run in runs if any(fnmatchcase(run.name, pattern) for pattern in step.runs)}
    wanted |= {run.after for run in runs if run.name in wanted and run.after is not None}
    limits = [limit for limit in (cap, step.rounds) if limit is not None]
    longest = planned_rounds(scale)
    return [
        Job(run=run, rounds=scale.rounds(run, min(limits, default=None)), planned=longest[run.name])
        for run in runs
        if run.name in wanted
    ]


def planned_rounds(scale: Scale) -> dict[str, int]:
    """Of every run, as many as the longest of its recipes asks."""
    return {run.name: scale.rounds(run) for run in distinct(RECIPES.values())}


def furthest(jobs: Iterable[Job]) -> list[Job]:
    """Each run once, with the rounds of the step that takes it furthest: what a whole schedule comes to."""
    by_name: dict[str, Job] = {}
    for job in jobs:
        before = by_name.get(job.run.name, job)
        by_name[job.run.name] = replace(before, rounds=max(before.rounds, job.rounds))
    return list(by_name.values())


MOST_RUNS = 16
MOST_USERS = 2_000
"""Users of all runs of a group in one turn. More would be no faster, and stopping would be coarser."""
LIKE_LENGTH = 2.0
"""The longest run of a group has at most so many times the rounds of its first one left."""


@dataclass(frozen=True, kw_only=True)
class PendingJob:
    """A job with what decides its company."""

    job: Job
    key: Hashable
    left: int
    """Rounds that it still lacks."""
    users: int
    """Users a round."""


def next_group(waiting: Sequence[PendingJob], is_ready: Callable[[Job], bool] = lambda job: True) -> list[PendingJob]:
    """The most wanted job that can begin, and those in line that fit beside it."""
    ready = [pending for pending in waiting if is_ready(pending.job)]
    if not ready:
        return []
    first, *others = ready
    group, users = [first], first.users
    for pending in others:
        fits = len(group) < MOST_RUNS and users + pending.users <= MOST_USERS
        if fits and pending.key == first.key and _alike(pending.left, first.left):
            group.append(pending)
            users += pending.users
    return group


def _alike(first: int, second: int) -> bool:
    return max(first, second) <= LIKE_LENGTH * max(min(first, second), 1)


CLOSING_SECONDS = 1.0
"""To save, state and measure one run when its group ends: a first guess, then as measured."""

Clock = Callable[[], float]


class Throughput:
    """One for a sitting; `begin` for each group."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._closing = CLOSING_SECONDS
        self.begin()

    def begin(self) -> None:
        self._began = self._turned = self._ended = self._clock()
        self._last, self._turns = -1, 0
        self._updates = {"first turn": 0, "later": 0}

    def count(self, number: int, updates: int) -> None:
        """Run `number` of the group has done a round. Runs report in their order, so a turn begins where numbers fall."""
        if number <= self._last or not self._turns:
            self._turns += 1
        self._last, self._ended = number, self._clock()
        if self._turns == 1:
            self._turned = self._ended
        self._updates["first turn" if self._turns == 1 else "later"] += updates

    @property
    def is_first_turn(self) -> bool:
        return self._turns == 1

    def settled(self) -> None:
        """The device has finished the first turn, of which it may only have been told when the runs reported."""
        self._turned = self._ended = self._clock()

    @property
    def updates_per_second(self) -> float:
        """Of the group; 0 if it did nothing."""
        if self._updates["later"]:
            return self._updates["later"] / max(self._ended - self._turned, 1e-9)
        return self._updates["first turn"] / max(self._ended - self._began, 1e-9)

    def closed(self, runs: int) -> None:
        """All runs of the group are recorded: the next one knows what that takes."""
        self._closing = (self._clock() - self._ended) / max(runs, 1)

    def is_over(self, until: float | None, runs: int) -> bool:
        """Whether so many runs must be closed now to be done in time."""
        return until is not None and self._clock() + runs * self._closing >= until
