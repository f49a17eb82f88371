"""`unheard personalize`: a shared model goes on learning from one person's text, for that person only."""

from pathlib import Path
from typing import Annotated

import typer

EXAMPLES = """Examples:

  unheard personalize runs/first --text mine.txt --out ~/my-keyboard

  unheard keyboard ~/my-keyboard runs/first    (what it learned, beside the shared model)
"""


def personalize(
    folder: Annotated[Path, typer.Argument(help="A run folder: the shared model.", metavar="DIR")],
    text: Annotated[Path, typer.Option(help="The person's text: one message on each line, the oldest first.")],
    out: Annotated[Path, typer.Option(help="The folder to make, outside everything that is shared.")],
    passes: Annotated[int, typer.Option(help="Passes over the text, at most.", min=1, max=100)] = 5,
    learning_rate: Annotated[
        float | None, typer.Option(help="Of the local steps; default: a tenth of the run's.")
    ] = None,
    later: Annotated[float, typer.Option(help="The latest share of the text: measured on, never learned from.")] = 0.2,
) -> None:
    """Go on training a run's model on one person's text, here, for that person only."""
    import torch
    from rich.progress import Progress
    from rich.table import Table

    from unheard.cli.display import console, notes, say
    from unheard.deployment.loading import run_statement
    from unheard.deployment.personalize import NOT_FOR_OTHERS, PersonalSettings, check_output_folder, save_personal
    from unheard.deployment.personalize import personalize as finish
    from unheard.errors import InputError
    from unheard.run_folder import RunFolder
    from unheard.training.released import Released

    torch.set_num_threads(1)  # a step is small: threads would wait for each other longer than they work
    out = out.expanduser()
    check_output_folder(out)
    how = PersonalSettings(passes=passes, learning_rate=learning_rate, later=later)
    released = Released.open(folder)
    try:
        words = text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as trouble:
        raise InputError(f"Cannot read {text} as UTF-8 text: {trouble}.") from None
    with Progress(console=notes, transient=True) as bar:
        task = bar.add_task("Learning from this text", total=None)
        made = finish(released, words, how, progress=lambda done, of: bar.update(task, completed=done, total=of))
    save_personal(released, made, run_statement(RunFolder.open(folder)), out)
    table = Table(
        "", "shared model", "personal model", title="On the latest part of this text, which was not learned from"
    )
    for key, name in (("accuracy_top1", "AccuracyTop1"), ("accuracy_top3", "AccuracyTop3")):
        table.add_row(name, *(f"{100 * side[key]:.2f} %" for side in (made.before, made.after)))
    table.add_row("perplexity", *(f"{side['perplexity']:.4g}" for side in (made.before, made.after)))
    console.print(table)
    if made.passes == 0:
        told = "No pass over the text helped on its own middle part: the personal model is the shared one. More text may do it."
    elif made.after["accuracy_top1"] < made.before["accuracy_top1"]:
        told = f"It learned for {made.passes} passes and guesses fewer of the latest words: keep the shared model."
    else:
        told = f"It learned for {made.passes} passes; how many was found on the middle part of the text."
    for line in (told, f"{NOT_FOR_OTHERS} It is in {out}, readable by you alone; {folder} is unchanged."):
        say(line)
