"""`unheard card`: write a model card, with the privacy statement in it, in the form that the Hugging Face hub shows."""

from pathlib import Path
from typing import Annotated

import typer

from unheard.cli.interruption import output_kept, set_kept
from unheard.cli.options import Force, License, RunDir

EXAMPLES = """Examples:

  unheard card runs/first

  unheard card runs/first --out README.md --license apache-2.0

  unheard export runs/first --to hub-folder --out hub/first    (a whole folder to upload, with this card)
"""


def card(
    folder: RunDir,
    out: Annotated[
        Path | None, typer.Option(help="The file to write.", metavar="FILE", show_default="DIR/README.md")
    ] = None,
    license: License = None,
    force: Force = False,
) -> None:
    """Write a model card: README.md with YAML front matter, accuracy, settings and the privacy report of the run."""
    target = out or folder / "README.md"
    set_kept(lambda: output_kept(target))
    from unheard.cli.display import notes, say
    from unheard.deployment.hub import write_card

    with notes.status("Computing the privacy statement"):
        path = write_card(folder, target, license=license, force=force)
    say(f"The model card is written: {path}")
