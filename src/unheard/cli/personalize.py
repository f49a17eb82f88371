"""`unheard personalize`: fine-tune a shared model on one person's text, for that person only.

The text is divided by time: the model learns from the earlier part, chooses the number of passes on the middle part,
and is measured on the latest part. The result has learned from one person without noise, so it must not be shared; the
folder is readable by its owner alone (`deployment/personalize.py`).
"""

from pathlib import Path
from typing import Annotated

import typer

EXAMPLES = """Examples:

  unheard personalize runs/first --text mine.txt --out ~/my-keyboard

  unheard keyboard ~/my-keyboard runs/first    (the personal model beside the shared one)
"""


def personalize(
    folder: Annotated[Path, typer.Argument(help="A run folder: the shared model.", metavar="DIR")],
    text: Annotated[Path, typer.Option(help="The person's text: one message per line, the oldest first.")],
    out: Annotated[Path, typer.Option(help="The folder to create, outside everything that is shared.")],
    passes: Annotated[int, typer.Option(help="The most passes over the text.", min=1, max=100, metavar="N")] = 5,
    learning_rate: Annotated[
        float | None, typer.Option(help="The learning rate.", show_default="a tenth of the run's", metavar="RATE")
    ] = None,
    later: Annotated[
        float,
        typer.Option(help="The fraction of the text, the latest, that is measured on and never learned.", metavar="F"),
    ] = 0.2,
) -> None:
    """Fine-tune a run's model on one person's text, on this machine, for that person only."""
    import torch
    from rich.table import Table

    from unheard.cli.display import console, counted_bar, say
    from unheard.cli.interruption import output_kept, set_kept
    from unheard.deployment.loading import run_statement
    from unheard.deployment.personalize import NOT_FOR_OTHERS, PersonalSettings, check_output_folder, save_personal
    from unheard.deployment.personalize import personalize as personalize_model
    from unheard.errors import InputError
    from unheard.run_folder import RunFolder
    from unheard.training.released import Released

    torch.set_num_threads(1)  # a step is small: threads would wait for each other longer than they work
    out = out.expanduser()
    set_kept(lambda: output_kept(out))
    check_output_folder(out)
    settings = PersonalSettings(passes=passes, learning_rate=learning_rate, later=later)
    released = Released.open(folder)
    try:
        words = text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"Cannot read {text} as UTF-8 text: {error}.") from None
    with counted_bar() as progress:
        personal = personalize_model(
            released,
            words,
            settings,
            progress=lambda done, total: progress("Learning from this text", done, total),
        )
    save_personal(released, personal, run_statement(RunFolder.open(folder)), out)
    both = (personal.before, personal.after)
    title = "On the latest part of this text, which was not learned"
    table = Table("", "shared model", "personal model", title=title)
    for key, name in (("accuracy_top1", "AccuracyTop1"), ("accuracy_top3", "AccuracyTop3")):
        table.add_row(name, *(f"{100 * numbers[key]:.2f} %" for numbers in both))
    table.add_row("perplexity", *(f"{numbers['perplexity']:.4g}" for numbers in both))
    console.print(table)
    if personal.passes == 0:
        say("No pass over the text improved its middle part: the personal model is the shared one. More text may help.")
    elif personal.after["accuracy_top1"] < personal.before["accuracy_top1"]:
        say(f"It learned for {personal.passes} passes and predicts fewer of the latest words: keep the shared model.")
    else:
        say(f"It learned for {personal.passes} passes; the number was chosen on the middle part of the text.")
    say(f"{NOT_FOR_OTHERS} It is in {out}, readable by you alone; {folder} is unchanged.")
