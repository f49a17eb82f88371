"""`unheard resume`: a run folder goes on from its newest checkpoint.
The last lines of `train` and `resume`: where the run stands, and what to do next.
`unheard train`: a run file in, a run folder out.
"""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unheard.cli.display import epsilon_text, say
from unheard.cli.processes import MaxRestarts, Processes, RankTimeout, lead

if TYPE_CHECKING:
    from unheard.training.loop import RoundReport


def finish(folder: Path, last: "RoundReport | None") -> None:
    from unheard.run_folder import RunFolder

    if last is None:
        say(f"{folder} is complete: nothing left to do. To train longer: unheard resume {folder} --rounds N")
        return
    rows = RunFolder.open(folder).read_metrics()
    if rows:
        row = rows[-1]
        say(
            f"Held-out AccuracyTop1 {100 * row['accuracy_top1']:.2f} % (top 3: {100 * row['accuracy_top3']:.2f} %), "
            f"perplexity {row['perplexity']:.4g}, after round {row['round']}."
        )
    say(f"Spent so far: ε = {epsilon_text(last.epsilon)} at δ = {last.delta:.2e}.")
    if last.stopped:
        say(f"Stopped: {last.stopped}")
    elif last.round < last.rounds:
        say(f"Stopped after round {last.round} of {last.rounds}. Continue with: unheard resume {folder}")
    say(f"Run folder: {folder}. What it guarantees: unheard statement {folder}")


if TYPE_CHECKING:
    from unheard.engines.distributed.process_group import Ranks

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
        from unheard.cli.processes import again
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


if TYPE_CHECKING:
    from unheard.engines.distributed.process_group import Ranks

RESUME_EXAMPLES = """Examples:

  unheard resume runs/first

  unheard resume runs/first --rounds 5000    (train longer than the run file said)

  unheard resume runs/first --processes 8    (on more cores or GPUs than before: the result is the same)

  unheard resume runs/first --corpus /data/chat    (the run folder, or the corpus, has moved)
"""


def resume(
    folder: Annotated[Path, typer.Argument(help="A run folder.", metavar="DIR")],
    rounds: Annotated[int | None, typer.Option(help="A new last round.", min=1)] = None,
    corpus: Annotated[Path | None, typer.Option(help="Where the corpus lies now.")] = None,
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
    """Continue a run after a stop, a crash or a kill; rounds that were lost are done, and charged, again."""

    def work(ranks: "Ranks | None") -> None:
        from unheard.cli.display import show
        from unheard.run_folder import RunFolder
        from unheard.training.loop import resume as go_on
        from unheard.training.run_file import read_saved_run

        _, choice = read_saved_run(RunFolder.open(folder).run_file)
        choice = replace(
            choice,
            kind=engine or choice.kind,
            device=device or choice.device,
            rank_timeout=rank_timeout or choice.rank_timeout,
        )
        reports = go_on(folder, rounds=rounds, corpus=corpus, engine=choice, ranks=ranks)
        finish(folder, show(reports, folder.name, stop_after, folder=folder))

    lead(work, processes, max_restarts)
