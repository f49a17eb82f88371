"""`unheard sweep`: one run file, some of its keys varied, all runs side by side."""

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unheard.cli.processes import MaxRestarts, Processes, RankTimeout, lead

if TYPE_CHECKING:
    from unheard.engines.distributed.process_group import Ranks
    from unheard.training.loop import RoundReport

EXAMPLES = """Examples:

  unheard sweep run.toml --out runs/clips --vary clip.norm=10,15,20

  unheard sweep run.toml --out runs/seeds --vary training.reproducible_seed=1,2,3 --vary noise.noise_std=0.003,0.012

  unheard sweep run.toml --out runs/clips --vary clip.norm=10,15,20    (again: goes on where it was stopped)
"""


def sweep(
    run_file: Annotated[Path, typer.Argument(help="A run file; `unheard init` writes one.", metavar="RUN.toml")],
    out: Annotated[Path, typer.Option(help="The folder for the runs, one folder each.")],
    vary: Annotated[
        list[str], typer.Option(help="table.key=value,value,...: every combination becomes a run. May be repeated.")
    ],
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Change one key of every run: table.key=value. May be repeated.")
    ] = None,
    engine: Annotated[str | None, typer.Option(help="auto, stacked, vectorised or reference.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:1 ...")] = None,
    stop_after: Annotated[
        float | None, typer.Option(help="Seconds after which to stop cleanly, at the end of a round.", min=0)
    ] = None,
    processes: Processes = 1,
    max_restarts: MaxRestarts = 0,
    rank_timeout: RankTimeout = None,
) -> None:
    """Train variants of a run side by side. Each is what it would be alone, in a folder and with a ledger of its own; and each is
    charged to the people it was trained on: ten variants cost them ten runs."""
    fixed = [*(set_ or [])]
    fixed += [f"engine.kind={engine}"] if engine else []
    fixed += [f"engine.device={device}"] if device else []
    fixed += [f"engine.rank_timeout={rank_timeout}"] if rank_timeout else []

    def work(ranks: "Ranks | None") -> None:
        from unheard.cli.display import show_together, warn_of_no_noise
        from unheard.mechanism.noise import NoNoise
        from unheard.training.loop import train_together
        from unheard.training.run_file import read_run_file

        names, runs, choice = [], [], None
        for changes in combinations(vary):
            run, choice = read_run_file(run_file, [*fixed, *changes])
            names.append(",".join(change.partition(".")[2] for change in changes))
            runs.append((run, out / names[-1]))
        assert choice is not None
        if without := [run for run, _ in runs if isinstance(run.plan.noise, NoNoise)]:
            warn_of_no_noise(without[0].corpus)
        last = show_together(train_together(runs, engine=choice, ranks=ranks), names, stop_after)
        _table(names, last, out)

    lead(work, processes, max_restarts)


def combinations(vary: list[str]) -> list[tuple[str, ...]]:
    """--vary clip.norm=10,20 --vary a.b=1,2: the four lists of changes."""
    from unheard.errors import InvalidValue

    each = []
    for varied in vary:
        key, equals, values = varied.partition("=")
        chosen = [value.strip() for value in values.split(",") if value.strip()]
        if not (equals and "." in key and chosen):
            raise InvalidValue(f"--vary {varied}: write table.key=value,value, for example --vary clip.norm=10,15,20.")
        if len(set(chosen)) < len(chosen):
            raise InvalidValue(f"--vary {varied}: a value stands there twice; each would be the same run.")
        each.append([f"{key.strip()}={value}" for value in chosen])
    return list(itertools.product(*each))


def _table(names: list[str], last: dict[int, "RoundReport"], out: Path) -> None:
    from rich.table import Table

    from unheard.cli.display import console, epsilon_text, say
    from unheard.run_folder import RunFolder

    table = Table(title="Held-out accuracy and cost, by run", title_justify="left")
    for name in ("run", "round", "top 1", "top 3", "ε so far", "stopped"):
        table.add_column(name, justify="left" if name in ("run", "stopped") else "right")
    for place, name in enumerate(names):
        rows = RunFolder.open(out / name).read_metrics()
        figures = [f"{100 * rows[-1][key]:.2f} %" if rows else "-" for key in ("accuracy_top1", "accuracy_top3")]
        report = last.get(place)
        ending = [str(rows[-1]["round"]) if rows else "-", *figures]
        if report is None:
            table.add_row(name, *ending, "-", "was complete")
        else:
            table.add_row(name, str(report.round), *figures, epsilon_text(report.epsilon), report.stopped or "")
    console.print(table)
    if any(report.round < report.rounds and not report.stopped for report in last.values()):
        say("Stopped before the last round. What was done is saved: the same command goes on.")
    say(f"Compare them: unheard compare {out}/*")
