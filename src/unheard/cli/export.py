"""`unheard export`: write a released model for devices.

Creates a folder with the model in ONNX (float32 and int8), its vocabulary, tokenizer and privacy statement, after
comparing its predictions with those of PyTorch (`deployment/export.py`).
"""

from pathlib import Path
from typing import Annotated, Literal

import typer

from unheard.cli.options import RunDir

EXAMPLES = """Examples:

  unheard export runs/first --to onnx --out exports/first

  unheard predict exports/first/model.int8.onnx "how are"
"""


def export(
    folder: RunDir,
    to: Annotated[Literal["onnx"], typer.Option(help="The format.")] = "onnx",
    out: Annotated[
        Path | None, typer.Option(help="The folder to create.", show_default="exports/ and the run's name")
    ] = None,
) -> None:
    """Write a run's newest model for devices: ONNX in float32 and int8, its vocabulary and its privacy statement."""
    from rich.table import Table

    from unheard.cli.display import console, counted_bar, say
    from unheard.deployment.export import export as export_model

    target = out or Path("exports") / folder.resolve().name
    with counted_bar() as progress:
        exported = export_model(
            folder, target, progress=lambda done, total: progress("Comparing with PyTorch", done, total)
        )
    title = f"{exported.parameters:,} parameters"
    table = Table("file", "size", "same first word as PyTorch", "same three words", title=title)
    for name, size in exported.sizes.items():
        numbers = exported.agreement[name].numbers()
        shares = (f"{100 * numbers[key]:.2f} %" for key in ("same_first_choice", "same_suggestions_of_three"))
        table.add_row(name, f"{size / 1e6:.2f} MB", *shares)
    console.print(table)
    contexts = next(iter(exported.agreement.values())).contexts
    say(
        f"Compared on {contexts:,} contexts, drawn from the model itself. Float32 is checked equal before anything is written."
    )
    say(f"Its privacy statement is exported with it: {exported.statement['claim']}.")
    if exported.statement["claimed"]["epsilon"] == "infinity":
        say("Think before you ship it: with no guarantee, a model can repeat what its users wrote.")
    say(f'Try it: unheard predict {target} "how are"   or: unheard keyboard {target}')
