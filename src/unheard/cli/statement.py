"""`unheard statement`: what may be said about a run's privacy, read from its ledger alone."""

from pathlib import Path
from typing import Annotated

import typer

EXAMPLES = """
Examples:

unheard statement runs/first

unheard statement runs/first --delta 1e-8 --json
"""


def statement(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="A run folder (or its ledger.jsonl).", show_default=False)
    ],
    delta: Annotated[
        float | None, typer.Option(help="Another delta than the declared one.", show_default=False)
    ] = None,
    epsilon: Annotated[
        float | None, typer.Option(help="Also give the delta at this epsilon.", show_default=False)
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """What may be said about a run's privacy. Needs only DIR/ledger.jsonl: no model, no data, no torch."""
    from json import dumps

    from unheard.errors import RunFolderMissing
    from unheard.privacy.ledger import Ledger
    from unheard.privacy.statement import render
    from unheard.privacy.statement import statement as state

    path = folder / "ledger.jsonl" if folder.is_dir() else folder
    if not path.is_file():
        raise RunFolderMissing(f"{folder} holds no ledger.jsonl: name the folder that `unheard train --out` wrote.")
    ledger = Ledger.read(path)
    told = state(ledger.facts, ledger.entries, delta=delta, epsilon=epsilon)
    typer.echo(dumps(told, allow_nan=False, indent=2) if json else render(told), nl=json)
