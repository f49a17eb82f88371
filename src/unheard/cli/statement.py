"""`unheard statement`: what may be said about a run's privacy, read from its ledger alone."""

from pathlib import Path
from typing import Annotated

import typer

EXAMPLES = """
Examples:

unheard statement runs/first

unheard statement runs/first --delta 1e-8 --json

unheard statement runs/first --all-runs    (everything that was ever charged to these people)

unheard statement corpora/chat    (the same, from the store)
"""


def statement(
    folder: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="A run folder, a store, or the ledger.jsonl of either.", show_default=False),
    ],
    delta: Annotated[
        float | None, typer.Option(help="Another delta than the declared one.", show_default=False)
    ] = None,
    epsilon: Annotated[
        float | None, typer.Option(help="Also give the delta at this epsilon.", show_default=False)
    ] = None,
    all_runs: Annotated[
        bool, typer.Option("--all-runs", help="Compose every run on the same people, by the store's own ledger.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """What may be said about a run's privacy, or a store's. Needs only DIR/ledger.jsonl: no model, no data, no torch."""
    from json import dumps

    from unheard.errors import InvalidValue, RunFolderMissing
    from unheard.privacy.ledger import Ledger
    from unheard.privacy.population_statement import all_runs as state_all
    from unheard.privacy.population_statement import find_population_ledger, render_all_runs
    from unheard.privacy.statement import render
    from unheard.privacy.statement import statement as state

    path = folder / "ledger.jsonl" if folder.is_dir() else folder
    if not path.is_file():
        raise RunFolderMissing(f"{folder} holds no ledger.jsonl: name the folder that `unheard train --out` wrote.")
    population = find_population_ledger(path, all_runs)
    if population is not None:
        if epsilon is not None:
            raise InvalidValue("--epsilon asks about one run; leave it out for all runs together.")
        told = state_all(population, delta=delta)
        typer.echo(dumps(told, allow_nan=False, indent=2) if json else render_all_runs(told), nl=json)
        return
    ledger = Ledger.read(path)
    told = state(ledger.facts, ledger.entries, delta=delta, epsilon=epsilon)
    typer.echo(dumps(told, allow_nan=False, indent=2) if json else render(told), nl=json)
