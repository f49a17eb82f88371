"""`unheard budget`: what all runs on a store together have spent, what they may spend, and which stores are the same people."""

from pathlib import Path
from typing import Annotated

import typer

EXAMPLES = """Examples:

  unheard budget corpora/chat    (what was spent so far)

  unheard budget corpora/chat --epsilon 8 --delta 1e-7

  unheard budget corpora/chat --same-people corpora/chat-may    (two stores with the same users share one ledger)
"""


def budget(
    store: Annotated[Path, typer.Argument(help="A store made by `unheard prepare`.", metavar="STORE")],
    epsilon: Annotated[
        float | None, typer.Option(help="What all runs together may spend from now on.", show_default=False)
    ] = None,
    delta: Annotated[
        float | None, typer.Option(help="At which delta; needed with --epsilon.", show_default=False)
    ] = None,
    accountant: Annotated[str, typer.Option(help="rdp or moments.")] = "rdp",
    same_people: Annotated[
        list[Path] | None, typer.Option(help="Another store with (some of) the same users. May be repeated.")
    ] = None,
    ledger: Annotated[
        Path | None, typer.Option(help="Where the ledger lies, if not in the store: the run files' [privacy] ledger.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Show or set the privacy budget of all runs on a store together. A run that would exceed it stops before the round."""
    from json import dumps

    from unheard.cli.display import notes
    from unheard.corpus.store import TokenStore
    from unheard.errors import InvalidValue
    from unheard.privacy.budget import Budget
    from unheard.privacy.population_ledger import open_population_ledger
    from unheard.privacy.population_statement import all_runs, render_all_runs

    def population_ledger_of(path: Path, at: Path | None = None):
        opened = TokenStore.open(path)
        return open_population_ledger(opened.path, opened.name, opened.vocabulary_events, at)

    population = population_ledger_of(store, ledger)
    for other in same_people or []:
        population.join(population_ledger_of(other))
        notes.print(
            f"{other} and {store} are one population from now on: {population.path}", highlight=False, markup=False
        )
    if epsilon is not None:
        known = delta if delta is not None else population.budget.delta if population.budget else None
        if known is None:
            raise InvalidValue("A budget is an epsilon at a delta: give --delta too, below 1 / users.")
        population.set_budget(Budget(epsilon=epsilon, delta=known, accountant=accountant))
    elif delta is not None and not population.events:
        raise InvalidValue("Nothing was charged yet. To set a budget give --epsilon with --delta.")
    if not population.events and population.budget is None:
        typer.echo("{}" if as_json else f"Nothing was charged to {population.path} yet, and no budget is set.")
        return
    told = all_runs(population, delta=delta)
    typer.echo(dumps(told, allow_nan=False, indent=2) if as_json else render_all_runs(told), nl=as_json)
