"""`unheard sweep`: train variants of one run file side by side.

Every combination of the values of `--vary` becomes a run folder below `--out`, named after the changed keys. The runs
share the chunks of the engine and nothing else: each has its own model, cohorts, noise and ledger. The same command
continues a sweep that was stopped.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unheard.cli.options import (
    Device,
    EngineName,
    MaxRestarts,
    Processes,
    RankTimeout,
    RunFile,
    SetKeys,
    StopAfter,
    Yes,
    overrides,
    parse_vary,
)
from unheard.cli.processes import run_on_processes

if TYPE_CHECKING:
    from unheard.engines.distributed.process_group import ProcessGroup
    from unheard.training.loop import RoundReport

EXAMPLES = """Examples:

  unheard sweep run.toml --out runs/clips --vary clip.norm=10,15,20

  unheard sweep run.toml --out runs/seeds --vary training.reproducible_seed=1,2,3 --vary noise.noise_std=0.003,0.012

  unheard sweep run.toml --out runs/clips --vary clip.norm=10,15,20    (again: continues after a stop)
"""


def sweep(
    run_file: RunFile,
    out: Annotated[Path, typer.Option(help="The folder for the runs; each gets a folder of its own in it.")],
    vary: Annotated[
        list[str],
        typer.Option(
            help="table.key=value,value,...: every combination becomes a run. May be repeated.", metavar="KEY=VALUES"
        ),
    ],
    set_: SetKeys = None,
    engine: EngineName = None,
    device: Device = None,
    stop_after: StopAfter = None,
    processes: Processes = 1,
    max_restarts: MaxRestarts = 0,
    rank_timeout: RankTimeout = None,
    yes: Yes = False,
) -> None:
    """Train variants of a run side by side.

    The result of each variant is what it would be alone, with a run folder and a ledger of its own.
    Each is charged to its users: ten variants cost them ten runs.
    """

    def work(ranks: "ProcessGroup | None") -> None:
        from unheard.cli.display import confirm_no_noise, show_runs
        from unheard.training.loop import train_together
        from unheard.training.run_file import read_run_file

        names, runs, choice = [], [], None
        for changes in parse_vary(vary):
            run, choice = read_run_file(run_file, [*overrides(set_, engine, device, rank_timeout), *changes])
            names.append(",".join(change.partition(".")[2] for change in changes))
            runs.append((run, out / names[-1]))
        assert choice is not None
        allowed = confirm_no_noise([run for run, _ in runs], yes, can_ask=ranks is None)
        reports = train_together(runs, engine=choice, ranks=ranks, allow_no_privacy=allowed)
        last = show_runs(reports, names, stop_after)
        _print_results(names, last, out)

    run_on_processes(work, processes, max_restarts)


def _print_results(names: list[str], last: dict[int, "RoundReport"], out: Path) -> None:
    """Prints the held-out accuracy and epsilon of each run."""
    from rich.table import Table

    from unheard.cli.display import console, say
    from unheard.formatting import epsilon_text
    from unheard.run_folder import RunFolder

    table = Table(title="Held-out accuracy and cost, by run", title_justify="left")
    for name in ("run", "round", "top 1", "top 3", "ε so far, by", "stopped"):
        table.add_column(name, justify="left" if name in ("run", "stopped") else "right")
    for index, name in enumerate(names):
        rows = RunFolder.open(out / name).read_metrics()
        figures = [f"{100 * rows[-1][key]:.2f} %" if rows else "-" for key in ("accuracy_top1", "accuracy_top3")]
        report = last.get(index)
        if report is None:
            table.add_row(name, str(rows[-1]["round"]) if rows else "-", *figures, "-", "was complete")
        else:
            spent = f"{epsilon_text(report.epsilon)} {report.accountant.upper()}"
            table.add_row(name, str(report.round), *figures, spent, report.stopped or "")
    console.print(table)
    if any(report.round < report.rounds and not report.stopped for report in last.values()):
        say("Stopped before the last round. What was done is saved: the same command continues.")
    say(f"Compare them: unheard compare {out}/*")
