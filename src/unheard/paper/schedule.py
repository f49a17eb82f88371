"""What is run in which order, and how far: by the recipes' own ranks, or by a schedule file for the time that there is.

In: names of recipes, or a TOML file of steps. Out: jobs, each a run and the rounds that it is wanted for. No torch.

    [[step]]
    recipes = ["noised-vs-baseline", "head-words"]
    rounds = 2000            # of every run here; left out: as many as the paper
    runs = ["baseline*"]     # only runs named so; left out: all of these recipes
    seconds = 600            # then the next step; left out: until all is done
"""

import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

from unheard.errors import InvalidValue, UnknownKey
from unheard.paper.recipe import PaperRun, distinct
from unheard.paper.recipes import RECIPES
from unheard.paper.scale import Scale
from unheard.parts import nearest, part_from_table, require


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
    except OSError as trouble:
        raise InvalidValue(f"Cannot read the schedule {path}: {trouble.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as trouble:
        raise InvalidValue(f"The schedule {path} is not valid TOML: {trouble}.") from None
    if set(content) != {"step"} or not isinstance(content["step"], list):
        raise InvalidValue(f"The schedule {path} is a list of [[step]], and nothing else.")
    steps = [part_from_table(Step, table, "step") for table in content["step"]]
    for step in steps:
        names = [run.name for name in step.recipes for run in RECIPES[name].runs]
        if strange := [asked for asked in step.runs if asked != "*" and not any(fnmatchcase(n, asked) for n in names)]:
            raise UnknownKey(
                f"No run of {', '.join(step.recipes)} is called '{strange[0]}'.{nearest(strange[0], names)}"
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
    found: dict[str, Job] = {}
    for job in jobs:
        before = found.get(job.run.name, job)
        found[job.run.name] = replace(before, rounds=max(before.rounds, job.rounds))
    return list(found.values())
