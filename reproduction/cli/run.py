"""`python -m reproduction run`: train the runs of recipes and write their results.

The command opens the workspace, prints the plan with an estimate of time, and passes the events of `runner.run_steps`
to the progress display. It can be stopped at any time; the same command then continues.
"""

import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from reproduction.cli.options import ALL_RESULTS, MostRounds, ScaleName
from unheard.cli.display import note, say
from unheard.cli.options import EngineOptions, ProcessOptions, number, option
from unheard.cli.processes import run_on_processes
from unheard.cli.train import engine_keys
from unheard.errors import CorpusMissing, InvalidValue

if TYPE_CHECKING:
    from reproduction.scheduling import Step
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


COUNTED = (
    "No --population was declared for {}: the number of training users is COUNTED in the store, which is a fact about "
    "private users. That is right for research corpora only. All these runs are seeded experiments: their epsilon is no "
    "guarantee against anyone who knows the seed."
)
"""The warning if a population is counted instead of declared."""


@dataclass(frozen=True, kw_only=True)
class WhatToRun:
    """Options that say what to train: the corpora, the size of the runs, and changes to all runs."""

    corpus: Annotated[
        list[str], option("A store, a folder of stores named by role, or ROLE=DIR. May be repeated.", metavar="DIR")
    ]
    scale: ScaleName = "full"
    rounds: MostRounds = None
    seed: Annotated[int, number("Added to the seeds of cohorts and noise; results go to NAME-seeds+N.", min=0)] = 0
    set_: Annotated[
        list[str] | None,
        option(
            "Change a key of every run, for example model.keep_norm=true. The results get a folder of their own. "
            "May be repeated.",
            "--set",
            metavar="KEY=VALUE",
            otherwise="none",
        ),
    ] = None
    population: Annotated[
        list[str] | None,
        number(
            "The declared number of users: N, or ROLE=N. May be repeated.",
            otherwise="counted, which is right for research corpora only",
        ),
    ] = None
    name: Annotated[
        str | None, option("The name of the corpus in results.", metavar="NAME", otherwise="as in the store")
    ] = None


@dataclass(frozen=True, kw_only=True)
class HowToRun:
    """Options that say how to train: the folders, the order and the time limit of the runs."""

    work: Annotated[Path, option("The folder for the run folders.")] = Path("runs/paper")
    results: Annotated[Path, option("The folder for results: DIR/NAME/runs.jsonl.", metavar="DIR")] = ALL_RESULTS
    schedule: Annotated[
        Path | None,
        option(
            "A TOML file of steps (recipes, rounds, runs, seconds). NAME... then chooses among its steps.",
            metavar="FILE",
            otherwise="recipes in the order of `list`",
        ),
    ] = None
    stop_after: Annotated[
        float | None,
        option(
            "Stop after this many seconds, at the end of a round. Everything is saved and recorded.",
            min=0,
            metavar="SECONDS",
            otherwise="no limit",
        ),
    ] = None
    dry_run: Annotated[bool, option("Only print what would be run, and how long it takes.", "--dry-run")] = False
    users_per_second: Annotated[
        float | None,
        number(
            "User updates per second, for the estimate.",
            min=0.001,
            otherwise="as measured on this machine, or that of one H200 or two CPU cores",
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
    """Train the runs that the paper's tables and figures need.

    A run that several recipes share is trained once. Runs of the same shape are trained side by side. The same command
    continues after a stop.
    """
    began = time.monotonic()

    def work(ranks: "ProcessGroup | None") -> None:
        """Print the plan and train the runs.

        Args:
            ranks: The processes that train together; None if there is only this process.
        """
        from reproduction.cli.display import show_plan, show_running, show_skipped
        from reproduction.runner import run_steps
        from reproduction.scheduling import choose_steps
        from unheard.engines.choice import EngineChoice

        steps = choose_steps(names, how.schedule)
        # Recipes do not set the engine, so an option that is left out keeps the default of `EngineChoice`.
        choice = EngineChoice(**engine_keys(engine, processes))
        workspace = _workspace(steps, what, how, choice, ranks)
        left, impossible = workspace.left(steps, what.rounds)
        show_plan(workspace, left, *workspace.speed(how.users_per_second))
        if how.dry_run or not left:
            show_skipped(impossible)
            return
        workspace.make_folders()
        updates = sum(one.left * one.users for one in left)
        used = time.monotonic() - began  # --stop-after counts from the start of the command
        stop_after = None if how.stop_after is None else how.stop_after - used
        went_well = show_running(run_steps(workspace, steps, cap=what.rounds, stop_after=stop_after), updates)
        file = workspace.results / "runs.jsonl"
        say(f"Results: {file}. `python -m reproduction page` shows them. The same command continues unfinished runs.")
        if not went_well:
            raise typer.Exit(1)

    run_on_processes(work, processes.processes, processes.max_restarts)


def _workspace(
    steps: "list[Step]", what: WhatToRun, how: HowToRun, choice: "EngineChoice", ranks: "ProcessGroup | None"
) -> "Workspace":
    """Check the options, open the corpora, and return the workspace of the session.

    Smoke tests, shifted seeds and changed settings get their own folders, whose names say so. Prints a warning if a
    population is counted.

    Raises:
        InvalidValue: A change or the name is not allowed.
        CorpusMissing: There is no main corpus and no name for the results.
    """
    from reproduction.corpora import find_corpora
    from reproduction.recipe import scale_named
    from reproduction.scheduling import jobs_of
    from reproduction.workspace import Workspace, check_changes

    scale, changes, name = scale_named(what.scale), what.set_ or [], what.name
    check_changes(changes, [job.run for step in steps for job in jobs_of(step, scale)])
    if name is not None and (name in ("", ".", "..") or set(name) & set("/\\\0\n")):
        raise InvalidValue(f"--name {name!r} cannot be the name of the folders of runs and results: leave out slashes.")
    corpora = find_corpora(what.corpus, what.population or (), name)
    if "main" not in corpora and name is None:
        raise CorpusMissing(
            "There is no main corpus, which names the results. Give it with --corpus DIR, or give a name with --name."
        )
    if counted := [corpus.role for corpus in corpora.values() if corpus.is_counted]:
        note(COUNTED.format(", ".join(counted)), style="bold yellow")
    marks = ["" if what.scale == "full" else what.scale, f"seeds+{what.seed}" if what.seed else "", *sorted(changes)]
    marks = [re.sub(r"[^\w.=+-]", "_", mark) for mark in marks if mark]
    title = "-".join([name or corpora["main"].name, *marks])
    folders = {"work": how.work / title, "results": how.results / title}
    scale = scale.changed(changes)
    return Workspace(corpora=corpora, **folders, scale=scale, seed_shift=what.seed, engine=choice, ranks=ranks)
