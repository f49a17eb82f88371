"""`unheard train`: a run file in, a run folder out."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unheard.cli.ranks import MaxRestarts, Processes, RankTimeout, lead

if TYPE_CHECKING:
    from unheard.engines.ranks import Ranks

EXAMPLES = """Examples:

  unheard train run.toml --out runs/first

  unheard train run.toml --out runs/narrow --set clip.norm=10 --set training.rounds=2000

  unheard train run.toml --out runs/night --stop-after 28800    (then: unheard resume runs/night)

  unheard train run.toml --out runs/wide --processes 8 --max-restarts 3

  torchrun --nnodes 4 --nproc-per-node 8 --max-restarts 3 ... -m unheard train run.toml --out runs/cluster
"""


def train(
    run_file: Annotated[Path, typer.Argument(help="A run file; `unheard init` writes one.", metavar="RUN.toml")],
    out: Annotated[Path, typer.Option(help="The folder to make for this run.")],
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change one key of the run file: table.key=value. May be repeated."),
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help="auto, stacked, vectorised or reference; the result is the same.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:1 ...")] = None,
    stop_after: Annotated[
        float | None, typer.Option(help="Seconds after which to stop cleanly, at the end of a round.", min=0)
    ] = None,
    processes: Processes = 1,
    max_restarts: MaxRestarts = 0,
    rank_timeout: RankTimeout = None,
) -> None:
    """Train with user-level privacy, from a run file into a new run folder."""
    overrides = [*(set_ or [])]
    overrides += [f"engine.kind={engine}"] if engine else []
    overrides += [f"engine.device={device}"] if device else []
    overrides += [f"engine.rank_timeout={rank_timeout}"] if rank_timeout else []

    def work(ranks: "Ranks | None") -> None:
        from unheard.cli.display import show, warn_of_delta, warn_of_no_noise
        from unheard.cli.finish import finish
        from unheard.cli.ranks import again
        from unheard.mechanism.noise import NoNoise
        from unheard.training.loop import train as begin
        from unheard.training.run_file import read_run_file

        run, engine_choice = read_run_file(run_file, overrides)
        if isinstance(run.plan.noise, NoNoise):
            warn_of_no_noise(run.corpus)
        else:
            warn_of_delta(run.claimed_delta)
        reports = begin(run, out, engine=engine_choice, ranks=ranks, again=again())
        finish(out, show(reports, out.name, stop_after, folder=out))

    lead(work, processes, max_restarts)
