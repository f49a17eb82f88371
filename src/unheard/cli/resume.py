"""`unheard resume`: a run folder goes on from its newest checkpoint."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unheard.cli.ranks import MaxRestarts, Processes, RankTimeout, lead

if TYPE_CHECKING:
    from unheard.engines.ranks import Ranks

EXAMPLES = """Examples:

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
        from unheard.cli.finish import finish
        from unheard.runs import RunFolder
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
