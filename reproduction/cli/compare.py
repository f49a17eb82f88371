"""`python -m reproduction compare`: two sets of results beside each other."""

from pathlib import Path
from typing import Annotated

import typer

EXAMPLES = """Examples:

  python -m reproduction compare reproduction/results/blogs reproduction/results/blogs-model.keep_norm=true

  python -m reproduction compare reproduction/results/blogs results/reddit --json
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

    from reproduction.comparison import comparison_tables
    from reproduction.results import FILE, read_results
    from unheard.cli.display import notes, print_table
    from unheard.errors import CorpusMissing

    for folder in (first, second):
        if not (folder / FILE).exists():
            raise CorpusMissing(
                f"There is no {folder / FILE}. Give a folder that `python -m reproduction run` wrote results to."
            )
    with notes.status("Working out what both show"):
        tables = comparison_tables(read_results(first), read_results(second))
    if as_json:
        print(json.dumps([asdict(table) for table in tables]))
    else:
        for table in tables:
            print_table(table)
