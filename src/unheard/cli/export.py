"""`unheard export`: a released model in a folder for devices."""

from pathlib import Path
from typing import Annotated

import typer

EXAMPLES = """Examples:

  unheard export runs/first --to onnx --out exports/first

  unheard predict exports/first/model.int8.onnx "how are"
"""


def export(
    folder: Annotated[Path, typer.Argument(help="A run folder.", metavar="DIR")],
    to: Annotated[str, typer.Option(help="The format: onnx.")] = "onnx",
    out: Annotated[Path | None, typer.Option(help="The folder to make; default: exports/ and the run's name.")] = None,
) -> None:
    """Write a run's newest model for devices: ONNX in float32 and int8, its words and its privacy statement."""
    from rich.progress import Progress
    from rich.table import Table

    from unheard.cli.display import console, notes, say
    from unheard.config import nearest
    from unheard.deployment.export import export as write
    from unheard.errors import InvalidValue

    if to != "onnx":
        raise InvalidValue(f"--to {to}: there is no such format.{nearest(to, ['onnx'])}")
    place = out or Path("exports") / folder.resolve().name
    with Progress(console=notes, transient=True) as bar:
        task = bar.add_task("Comparing with PyTorch", total=None)
        made = write(folder, place, progress=lambda done, of: bar.update(task, completed=done, total=of))
    table = Table(
        "file", "size", "same first word as PyTorch", "same three words", title=f"{made.parameters:,} parameters"
    )
    for name, size in made.sizes.items():
        found = made.agreement[name].numbers()
        shares = (f"{100 * found[key]:.2f} %" for key in ("same_first_choice", "same_suggestions_of_three"))
        table.add_row(name, f"{size / 1e6:.2f} MB", *shares)
    console.print(table)
    contexts = next(iter(made.agreement.values())).contexts
    told = [
        f"Compared on {contexts:,} contexts, drawn from the model itself. Float32 is checked equal before anything is written."
    ]
    told.append(f"What may be said about it travels with it: {made.statement['claim']}.")
    if made.statement["claimed"]["epsilon"] == "infinity":
        told.append("Think before you ship it: with no guarantee, a model can repeat what its users wrote.")
    told.append(f'Try it: unheard predict {place} "how are"   or: unheard keyboard {place}')
    for line in told:
        say(line)
