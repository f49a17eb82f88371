"""`unheard paper compare`: two sets of results beside each other."""

from pathlib import Path
from typing import Annotated

import typer

EXAMPLES = """Examples:

  unheard paper compare results/blogs results/blogs-model.keep_norm=true

  unheard paper compare results/blogs results/reddit --json
"""


def compare(
    first: Annotated[Path, typer.Argument(help="A folder of results.", metavar="DIR")],
    second: Annotated[Path, typer.Argument(help="Another.", metavar="DIR")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON list on standard output: both tables.")] = False,
) -> None:
    """The same runs twice: with another setting (`paper run --set`), another seed or on another corpus. What both concluded, and
    what each run reached after as many rounds as both did."""
    import json
    from dataclasses import asdict

    from unheard.cli.display import notes
    from unheard.cli.tables import print_table
    from unheard.errors import CorpusMissing
    from unheard.paper.comparison import beside
    from unheard.paper.found import read
    from unheard.paper.results import FILE

    for folder in (first, second):
        if not (folder / FILE).exists():
            raise CorpusMissing(
                f"There is no {folder / FILE}. Give a folder that `unheard paper run` wrote results to."
            )
    with notes.status("Working out what both show"):
        tables = beside(read(first), read(second))
    if as_json:
        print(json.dumps([asdict(table) for table in tables]))
    else:
        for table in tables:
            print_table(table)
