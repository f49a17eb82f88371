"""`unheard export`: write a released model for devices and for other programs.

Creates a folder with the model in ONNX (float32 and int8), its vocabulary, tokenizer and privacy statement, after
comparing its predictions with those of PyTorch (`deployment/export.py`). A Hugging Face model is written as a PEFT
adapter, as a whole model or as GGUF (`deployment/language_model.py`).
"""

from pathlib import Path
from typing import Annotated, Literal

import typer

from unheard.cli.interruption import output_kept, set_kept
from unheard.cli.options import License, RunDir

EXAMPLES = """Examples:

  unheard export runs/first --to onnx --out exports/first

  unheard predict exports/first/model.int8.onnx "how are"

  unheard export runs/smollm2 --to adapter --out exports/adapter

  unheard export runs/smollm2 --to gguf --out exports/gguf

  unheard export runs/first --to hub-folder --license apache-2.0 --out hub/first    (then: hf upload OWNER/NAME hub/first)
"""


def export(
    folder: RunDir,
    to: Annotated[
        Literal["onnx", "adapter", "merged", "gguf", "hub-folder"],
        typer.Option(help="The format. adapter, merged and gguf are for Hugging Face models."),
    ] = "onnx",
    out: Annotated[
        Path | None, typer.Option(help="The folder to create.", show_default="exports/ and the run's name")
    ] = None,
    license: License = None,
) -> None:
    """Write a run's newest model for devices, other programs or the Hugging Face hub, with its privacy statement.

    onnx has the model in float32 and int8, with its vocabulary; adapter is a PEFT adapter, merged a whole model for
    transformers, gguf one file for llama.cpp; hub-folder can be uploaded to the hub as it is, with a model card.
    """
    from rich.table import Table

    from unheard.cli.display import console, counted_bar, say
    from unheard.deployment.export import export as export_model

    target = out or Path("exports") / folder.resolve().name
    set_kept(lambda: output_kept(target))
    if to == "hub-folder":
        return _write_hub_folder(folder, target, license)
    if to != "onnx":
        return _language_model(folder, target, to)
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


def _language_model(folder: Path, target: Path, to: Literal["adapter", "merged", "gguf"]) -> None:
    """Writes a Hugging Face model."""
    from unheard.cli.display import say
    from unheard.deployment.language_model import write_language_model

    written = write_language_model(folder, target, to)
    size = sum(written.files.values()) / 1e6
    say(f"{target}: {size:.1f} MB, scores within {written.difference:.1g} (relative) of the run's own model.")
    say(f"Its privacy statement is exported with it: {written.statement['claim']}.")


def _write_hub_folder(folder: Path, target: Path, license: str | None) -> None:
    from unheard.cli.display import counted_bar, say
    from unheard.deployment.hub import write_hub_folder

    with counted_bar() as progress:
        names = write_hub_folder(
            folder,
            target,
            license=license,
            progress=lambda done, total: progress("Comparing with PyTorch", done, total),
        )
    say(f"{target} holds {', '.join(names)}. README.md is the model card, with the privacy statement in it.")
    say(f"Read it, then upload the folder: hf upload OWNER/{target.resolve().name} {target}")
