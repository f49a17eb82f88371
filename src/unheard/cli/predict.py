"""`unheard predict`: predict the next word, as a keyboard would suggest it.

Takes a run folder, an export or a personal model. An export runs on ONNX Runtime and does not import torch.
"""

import json
from pathlib import Path
from typing import Annotated

import typer

EXAMPLES = """Examples:

  unheard predict runs/first "how are"

  unheard predict runs/first "see you" --top 10 --json

  unheard predict exports/first/model.int8.onnx "see you"    (an export; needs no torch)
"""


def predict(
    folder: Annotated[
        Path,
        typer.Argument(help="A run folder, an export (or one of its .onnx files), or a personal model.", metavar="DIR"),
    ],
    text: Annotated[str, typer.Argument(help="Some words to continue.")],
    top: Annotated[int, typer.Option(help="The number of suggestions.", min=1, metavar="N")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list on standard output.")] = False,
) -> None:
    """Suggest the next word after some words."""
    from rich.markup import escape
    from rich.table import Table

    from unheard.cli.display import console
    from unheard.formatting import shown_word

    words = _open(folder).predict(text.encode("utf-8", "replace").decode("utf-8"), top)
    if as_json:
        print(json.dumps([{"word": word, "probability": probability} for word, probability in words]))
        return
    table = Table("next word", "probability")
    for word, probability in words:
        table.add_row(escape(shown_word(word)), f"{100 * probability:.1f} %")
    console.print(table)


def _open(folder: Path):
    """Opens a model. A run is opened without its privacy statement, which takes seconds to compute."""
    from unheard.deployment.device import is_export
    from unheard.deployment.loading import is_personal

    if is_export(folder) or is_personal(folder):
        from unheard.deployment.loading import open_model

        return open_model(folder)
    from unheard.training.released import Released

    return Released.open(folder)
