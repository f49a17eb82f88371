"""`unheard verify`: does a run folder fit together, and what does its ledger give."""

from pathlib import Path
from typing import Annotated

import typer

EXAMPLES = """Examples:

  unheard verify runs/first

  unheard verify runs/first --corpus /data/chat --json
"""

MARKS = {True: "[green]fits[/]", False: "[bold red]DOES NOT FIT[/]", None: "[yellow]not checked[/]"}


def verify(
    folder: Annotated[Path, typer.Argument(help="A run folder.", metavar="DIR")],
    corpus: Annotated[
        Path | None, typer.Option(help="Where the store lies now, to look into its own ledger too.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Recompute epsilon from the ledger and check that everything in a run folder fits it. Exit status 2 if not."""
    from dataclasses import asdict
    from json import dumps

    from rich.markup import escape
    from rich.table import Table

    from unheard.audit.verification import verify as look
    from unheard.cli.display import console, notes, say

    with notes.status("Reading the folder and recomputing epsilon"):
        found = look(folder, corpus)
    fits = not any(finding.fits is False for finding in found)
    if as_json:
        print(dumps({"fits": fits, "findings": [asdict(finding) for finding in found]}, indent=2))
    else:
        table = Table("", "", "", show_header=False, box=None)
        for finding in found:
            table.add_row(MARKS[finding.fits], finding.name, escape(finding.words))
        console.print(table)
        wrong = [finding.name for finding in found if finding.fits is False]
        verdict = (
            "Everything that was checked fits." if fits else f"This folder cannot be believed: {', '.join(wrong)}."
        )
        say(verdict)
    if not fits:
        raise typer.Exit(2)
