"""`unheard train`: a run file in, a run folder out."""

from pathlib import Path
from typing import Annotated

import typer

EXAMPLES = """Examples:

  unheard train run.toml --out runs/first

  unheard train run.toml --out runs/narrow --set clip.norm=10 --set training.rounds=2000

  unheard train run.toml --out runs/night --stop-after 28800    (then: unheard resume runs/night)
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
) -> None:
    """Train with user-level privacy, from a run file into a new run folder."""
    from unheard.cli.display import show
    from unheard.cli.finish import finish
    from unheard.training.loop import train as begin
    from unheard.training.run_file import read_run_file

    overrides = [*(set_ or [])]
    overrides += [f"engine.kind={engine}"] if engine else []
    overrides += [f"engine.device={device}"] if device else []
    run, engine_choice = read_run_file(run_file, overrides)
    last = show(begin(run, out, engine=engine_choice), out.name, stop_after, folder=out)
    finish(out, last)
