"""`python -m reproduction run`: train the runs of recipes and write their results.

The command can be stopped at any time; the same command continues. It reads the options, checks `--set`, prints the
plan with an estimate of time, and passes the events of `runner.run_steps` to the progress display.
"""

import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from reproduction.cli.options import ALL_RESULTS, MostRounds, ScaleName
from unheard.cli.options import EngineOptions, ProcessOptions
from unheard.cli.processes import run_on_processes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reproduction.corpora import Corpus
    from reproduction.recipe import PaperRun
    from reproduction.scheduling import PendingJob, Step
    from reproduction.workspace import Workspace
    from unheard.engines.choice import EngineChoice
    from unheard.engines.distributed.process_group import ProcessGroup

EXAMPLES = """Examples:

  python -m reproduction run noised-vs-baseline --corpus corpora/blogs --scale smoke    (does it work here? a minute)

  python -m reproduction run all --corpus corpora/paper --name blogs --dry-run    (what there is to run, and how long it takes)

  python -m reproduction run all --corpus corpora/paper --name blogs --schedule schedule.toml --stop-after 1500

  python -m reproduction run estimators clipping --corpus main=corpora/reddit --rounds 1000 --seed 10

  python -m reproduction run all --corpus corpora/paper --name blogs --set model.keep_norm=true
"""

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
_IN_A_FILE_NAME = re.compile(r"[^\w.=+-]")
"""Characters that are replaced in the name of a folder."""
SPEED = 4_250.0
"""User updates per second of the model of the paper on one H200, sixteen runs side by side (benchmarks/results)."""
CPU_SPEED = 7.0
"""User updates per second on two CPU cores."""


@dataclass(frozen=True, kw_only=True)
class WhatToRun:
    """The recipes' corpora, how much of each run to make, and what to change in all of them."""

    corpus: Annotated[
        list[str],
        typer.Option(help="A store, a folder of stores named by role, or ROLE=DIR. May be repeated.", metavar="DIR"),
    ]
    scale: ScaleName = "full"
    rounds: MostRounds = None
    seed: Annotated[
        int,
        typer.Option(min=0, help="Added to the seeds of cohorts and noise; results go to NAME-seeds+N.", metavar="N"),
    ] = 0
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Change a key of every run, for example model.keep_norm=true. The results get a folder of their own. "
            "May be repeated.",
            metavar="KEY=VALUE",
            show_default="none",
        ),
    ] = None
    population: Annotated[
        list[str] | None,
        typer.Option(
            help="The declared number of users: N, or ROLE=N. May be repeated.",
            metavar="N",
            show_default="counted, which is right for research corpora only",
        ),
    ] = None
    name: Annotated[
        str | None,
        typer.Option(help="The name of the corpus in results.", metavar="NAME", show_default="as in the store"),
    ] = None


@dataclass(frozen=True, kw_only=True)
class HowToRun:
    """The folders, the order and the time limit of the runs."""

    work: Annotated[Path, typer.Option(help="The folder for the run folders.")] = Path("runs/paper")
    results: Annotated[Path, typer.Option(help="The folder for results: DIR/NAME/runs.jsonl.", metavar="DIR")] = (
        ALL_RESULTS
    )
    schedule: Annotated[
        Path | None,
        typer.Option(
            help="A TOML file of steps (recipes, rounds, runs, seconds). NAME... then chooses among its steps.",
            metavar="FILE",
            show_default="recipes in the order of `list`",
        ),
    ] = None
    stop_after: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Stop after this many seconds, at the end of a round. Everything is saved and recorded.",
            metavar="SECONDS",
            show_default="no limit",
        ),
    ] = None
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would be run, and how long it takes.")] = (
        False
    )
    users_per_second: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            help="User updates per second, for the estimate.",
            metavar="N",
            show_default="as measured on this machine, or that of one H200 or two CPU cores",
        ),
    ] = None


def run(
    names: Annotated[
        list[str], typer.Argument(metavar="NAME...", help="Recipes (`python -m reproduction list`), or all.")
    ],
    *,
    what: WhatToRun,
    how: HowToRun,
    engine: EngineOptions,
    processes: ProcessOptions,
) -> None:
    """Make the runs behind the paper's tables and figures.

    A run that several recipes share is made once. Runs of the same shape are trained side by side. The same command
    continues after a stop.
    """
    began = time.monotonic()

    def work(ranks: "ProcessGroup | None") -> None:
        """Plan and make the runs, with the help of other processes if there are any."""
        from reproduction.cli.display import show_plan, show_running, show_skipped
        from reproduction.runner import run_steps
        from unheard.cli.display import say

        steps = _steps(names, how.schedule)
        workspace = _workspace(steps, what, how, _engine(engine, processes), ranks)
        left, impossible = _left(workspace, steps, what.rounds)
        show_plan(workspace, left, *_speed(workspace, how.users_per_second))
        if how.dry_run or not left:
            show_skipped(impossible)
            return
        workspace.make_folders()
        updates = sum(one.left * one.users for one in left)
        used = time.monotonic() - began  # reading and planning count
        stop_after = None if how.stop_after is None else how.stop_after - used
        went_well = show_running(run_steps(workspace, steps, cap=what.rounds, stop_after=stop_after), updates)
        file = workspace.results / "runs.jsonl"
        say(f"Results: {file}. The same command goes on; `python -m reproduction page` shows them.")
        if not went_well:
            raise typer.Exit(1)

    run_on_processes(work, processes.processes, processes.max_restarts)


def _engine(engine: EngineOptions, processes: ProcessOptions) -> "EngineChoice":
    """Return the engine of every run. Recipes name none, so that options that are left out mean `auto`."""
    from unheard.engines.choice import EngineChoice

    given = {"kind": engine.engine, "device": engine.device, "rank_timeout": processes.rank_timeout}
    return EngineChoice(**{key: value for key, value in given.items() if value})


def _workspace(
    steps: "list[Step]", what: WhatToRun, how: HowToRun, engine: "EngineChoice", ranks: "ProcessGroup | None"
) -> "Workspace":
    """Check `--set`, open the corpora, and return the corpora, folders and engine of all runs."""
    from reproduction.recipe import scale_named
    from reproduction.scheduling import jobs_of
    from reproduction.workspace import Workspace

    scale, changes = scale_named(what.scale), what.set_ or []
    _check_changes(changes, [job.run for step in steps for job in jobs_of(step, scale)])
    corpora = _corpora(what.corpus, what.population, what.name)
    title = _title(what.name or corpora["main"].name, what.scale, what.seed, changes)
    return Workspace(
        corpora=corpora,
        work=how.work / title,
        results=how.results / title,
        scale=scale.changed(changes),
        seed_shift=what.seed,
        engine=engine,
        ranks=ranks,
    )


def _corpora(given: list[str], population: list[str] | None, name: str | None) -> "Mapping[str, Corpus]":
    """Open the corpora, check `--name`, and warn if a population is counted."""
    from reproduction.corpora import find_corpora
    from unheard.errors import CorpusMissing, InvalidValue

    if name is not None and (name in ("", ".", "..") or set(name) & set("/\\\0\n")):
        raise InvalidValue(f"--name {name!r} is no folder's name, which results and runs go by: leave out slashes.")
    corpora = find_corpora(given, population or [], name)
    if "main" not in corpora and name is None:
        raise CorpusMissing(
            "There is no main corpus: give it with --corpus DIR, or say what results are called (--name)."
        )
    _say_what_is_counted(corpora)
    return corpora


def _speed(workspace: "Workspace", given: float | None) -> tuple[float, str]:
    """User updates per second for the estimate, and the source of the number."""
    from statistics import median

    from reproduction.record import device_name
    from reproduction.results import read_runs

    if given is not None:
        return given, "as given"
    device = device_name(workspace.engine.torch_device())
    known = [one.users_per_second for one in read_runs(workspace.results).values() if one.device == device]
    if measured := [speed for speed in known if speed > 0]:
        return median(measured), "as measured here before"
    if workspace.engine.torch_device().type == "cpu":
        return CPU_SPEED, "as on two CPU cores; --users-per-second says otherwise"
    return SPEED, "as on one H200; --users-per-second says otherwise"


def _steps(names: list[str], schedule: Path | None) -> list["Step"]:
    """The steps of the schedule for the requested recipes, or one step per rank."""
    from dataclasses import replace

    from reproduction.scheduling import read_schedule, steps_by_rank
    from unheard.errors import InvalidValue

    requested = {name for step in steps_by_rank(names) for name in step.recipes}
    if schedule is None:
        steps = steps_by_rank(names)
    else:
        kept = [replace(s, recipes=tuple(n for n in s.recipes if n in requested)) for s in read_schedule(schedule)]
        steps = [step for step in kept if step.recipes]
        if not steps:
            raise InvalidValue(f"{schedule} has no step for {', '.join(names)}. Add one, or leave out --schedule.")
    if not steps:
        raise InvalidValue(
            f"{', '.join(names)}: nothing here needs a run. `python -m reproduction show {names[0]}` shows it."
        )
    return steps


def _left(workspace: "Workspace", steps: list["Step"], cap: int | None) -> tuple[list["PendingJob"], dict[str, str]]:
    """The jobs that lack rounds, and the reason for each job that cannot run. Raises `CorpusMissing` if none can."""
    from reproduction.scheduling import furthest, jobs_of
    from unheard.errors import CorpusMissing

    jobs = furthest(job for step in steps for job in jobs_of(step, workspace.scale, cap))
    by_name = {job.run.name: job for job in jobs}
    reasons = {job.run.name: why for job in jobs if (why := workspace.reason_not_runnable(job, by_name))}
    if len(reasons) == len(jobs):
        raise CorpusMissing(f"None of these runs can be made: {'; '.join(sorted(set(reasons.values())))}.")
    return workspace.pending_jobs([job for job in jobs if job.run.name not in reasons]), reasons


def _check_changes(changes: list[str], runs: list["PaperRun"]) -> None:
    """Raise `InvalidValue` if `--set` changes what distinguishes the runs of a recipe, what another option sets, or one
    key twice."""
    from unheard.errors import InvalidValue

    own = {_key(change): run.name for run in runs for change in run.changes}
    keys = [_key(change) for change in changes]
    for key, change in zip(keys, changes, strict=True):
        if key in own:
            raise InvalidValue(
                f"--set {change}: {own[key]} says itself what {key} is. Choose recipes that leave it alone."
            )
        if key.startswith("engine."):
            raise InvalidValue(f"--set {change}: say it with --engine, --device or --rank-timeout.")
        if key in OF_RECIPES:
            raise InvalidValue(f"--set {change}: {OF_RECIPES[key]}")
        if keys.count(key) > 1:
            raise InvalidValue(f"--set {change}: {key} is given twice.")


def _key(change: str) -> str:
    """The key of a change `table.key=value`."""
    return change.partition("=")[0].strip()


def _title(name: str, scale: str, seed: int, changes: list[str]) -> str:
    """Name of the folder of runs and results. Smoke tests, other seeds and other settings get folders of their own."""
    marks = ["" if scale == "full" else scale, f"seeds+{seed}" if seed else "", *sorted(changes)]
    return "-".join([name, *(_IN_A_FILE_NAME.sub("_", mark) for mark in marks if mark)])


def _say_what_is_counted(corpora: "Mapping[str, Corpus]") -> None:
    """Warn that the population of some corpora is counted instead of declared."""
    from unheard.cli.display import notes

    counted = [one.role for one in corpora.values() if one.is_counted]
    if counted:
        notes.print(
            f"No --population was declared for {', '.join(counted)}: the number of training users is COUNTED in the store, "
            "which is a fact about private users. That is right for research corpora only. All these runs are seeded "
            "experiments: their epsilon is no guarantee against anyone who knows the seed.",
            style="bold yellow",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
