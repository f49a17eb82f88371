"""`unheard statement`: the privacy statement of a run or of a store, computed from its ledger alone.

For a run folder it states epsilon by each accountant, what the guarantee rests on, and warnings
(`privacy/statement.py`). For a store, or with `--all-runs`, it composes every run that was charged to the store's users
(`privacy/population_statement.py`).
"""

from pathlib import Path
from typing import Annotated

import typer

from unheard.cli.options import AsJson

EXAMPLES = """
Examples:

unheard statement runs/first

unheard statement runs/first --delta 1e-8 --json

unheard statement runs/first --all-runs    (everything that was ever charged to these users)

unheard statement corpora/chat    (the same, from the store)
"""


def statement(
    folder: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="A run folder, a store, or the ledger.jsonl of either.", show_default=False),
    ],
    delta: Annotated[
        float | None, typer.Option(help="The delta at which epsilon is stated.", show_default="the declared delta")
    ] = None,
    epsilon: Annotated[
        float | None, typer.Option(help="Also state the delta at this epsilon.", show_default="none")
    ] = None,
    all_runs: Annotated[
        bool, typer.Option("--all-runs", help="Compose all runs on the same users, from the ledger of the store.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """State the privacy of a run or of a store, from DIR/ledger.jsonl. Needs no text and no torch. A ledger that lacks
    what the checkpoints, the model or the store's ledger remember is an error."""
    from json import dumps

    from unheard.errors import InvalidValue, RunFolderMissing
    from unheard.privacy.ledger import Ledger
    from unheard.privacy.population_statement import all_runs as compose_all_runs
    from unheard.privacy.population_statement import find_population_ledger, render_all_runs
    from unheard.privacy.run_ledger import read_run_ledger
    from unheard.privacy.statement import render
    from unheard.privacy.statement import statement as compose_run

    path = folder / "ledger.jsonl" if folder.is_dir() else folder
    if not path.is_file():
        raise RunFolderMissing(f"{folder} holds no ledger.jsonl: name the folder that `unheard train --out` wrote.")
    population = find_population_ledger(path, all_runs)
    if population is not None:
        if epsilon is not None:
            raise InvalidValue("--epsilon asks about one run; leave it out for all runs together.")
        content, text = compose_all_runs(population, delta=delta), render_all_runs
    else:
        ledger = Ledger.read(path) if path.name != "ledger.jsonl" else read_run_ledger(path.parent)
        content, text = compose_run(ledger.facts, ledger.entries, delta=delta, epsilon=epsilon), render
    typer.echo(dumps(content, allow_nan=False, indent=2) if as_json else text(content), nl=as_json)
