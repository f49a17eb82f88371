"""`unheard tune --select`: the best of a secret number of private runs, with the words that must stand beside it."""

from collections.abc import Sequence
from pathlib import Path


def select_best(
    run_file: Path, overrides: Sequence[str], vary: list[str], out: Path, mean: float, drawn_from: str, as_json: bool
) -> None:
    """Nothing is shown while the trials run but that they do: their number and their scores are secret."""
    import signal
    import sys
    from json import loads

    import typer

    from unheard.cli.display import notes, say
    from unheard.cli.sweep import combinations
    from unheard.errors import InvalidValue
    from unheard.training.loop import pinned
    from unheard.training.run_file import read_run_file, read_saved_run, run_hash
    from unheard.tuning.selecting import select
    from unheard.tuning.trial_count import TrialCount

    if not vary:
        raise InvalidValue("--select needs candidates: --vary clip.norm=8,15,20, for example. May be repeated.")
    changes = combinations(vary)
    read = [read_run_file(run_file, [*overrides, *some]) for some in changes]
    candidates = [run for run, _ in read]
    count = TrialCount(mean=mean, drawn_from=drawn_from)
    notes.print(
        f"{len(candidates)} candidates, {mean:g} trials on average ({drawn_from}). How many there will be is drawn by the machine "
        "and told to nobody: hence no bar. It may take several times the average.",
        highlight=False,
        soft_wrap=True,
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(2))  # leave as by Ctrl-C: nothing of the trials may stay
    with notes.status("Training"):
        folder = select(candidates, out, count, engine=read[0][1])
    if folder is None:
        say("The number drawn was zero: there is no model. It was charged all the same.")
        return
    if as_json:
        typer.echo(folder.statement.read_text(encoding="utf-8"))
        return
    best = run_hash(read_saved_run(folder.run_file)[0])
    chosen = next(some for some, run in zip(changes, candidates, strict=True) if run_hash(pinned(run)) == best)
    say(f"The best: {', '.join(chosen)}. Run folder: {out}")
    say(f"What it and the choice of it cost: {loads(folder.statement.read_text(encoding='utf-8'))['claim']}.")
    say(
        "That holds while nothing else is told: not how many trials there were, how long it took or how the others did. They are "
        "deleted. It was chosen by exact accuracy on held-out users, who are not protected by this."
    )
    say(f"In full: unheard statement {out}")
