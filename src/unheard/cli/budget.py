"""`unheard budget`: show or limit what all runs on a store together spend, and join stores that hold the same users.

A store has one ledger for all runs on its users (`privacy/population_ledger.py`). The budget is kept in that ledger, so
it holds for every later run, whatever its run file says. Stores with common users must share one ledger:
`--same-people` joins them, which cannot be undone.
"""

from pathlib import Path
from typing import Annotated, Literal

import typer

from unheard.cli.options import AsJson

EXAMPLES = """Examples:

  unheard budget corpora/chat    (what was spent so far)

  unheard budget corpora/chat --epsilon 8 --delta 1e-7

  unheard budget corpora/chat --same-people corpora/chat-may    (two stores with the same users share one ledger)
"""


def budget(
    store: Annotated[Path, typer.Argument(help="A token store, made by `unheard prepare`.", metavar="STORE")],
    epsilon: Annotated[
        float | None,
        typer.Option(help="The epsilon that all runs together may reach.", show_default="no budget is set"),
    ] = None,
    delta: Annotated[
        float | None,
        typer.Option(help="The delta of --epsilon, or of what is shown.", show_default="that of the present budget"),
    ] = None,
    accountant: Annotated[
        Literal["rdp", "moments"], typer.Option(help="The accountant that checks the budget.")
    ] = "rdp",
    same_people: Annotated[
        list[Path] | None,
        typer.Option(
            help="Another store with (some of) the same users. May be repeated.", metavar="STORE", show_default="none"
        ),
    ] = None,
    ledger: Annotated[
        Path | None,
        typer.Option(help="The ledger that the run files name at [privacy] ledger.", show_default="the store's own"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show or set the privacy budget of all runs on a store together.

    A run stops before the round that would exceed the budget.
    """
    from json import dumps

    from unheard.cli.display import echo, note
    from unheard.corpus.store import TokenStore
    from unheard.errors import InvalidValue
    from unheard.privacy.budget import Budget
    from unheard.privacy.population_ledger import open_population_ledger
    from unheard.privacy.population_statement import all_runs, render_all_runs
    from unheard.privacy.rdp import FILTER_ORDERS

    def open_ledger(path: Path, at: Path | None = None):
        opened = TokenStore.open(path)
        return open_population_ledger(opened.path, opened.name, opened.vocabulary_events, at)

    population = open_ledger(store, ledger)
    for other in same_people or []:
        population.join(open_ledger(other))
        note(f"{other} and {store} are one population from now on: {population.path}")
    if epsilon is not None:
        known = delta if delta is not None else population.budget.delta if population.budget else None
        if known is None:
            raise InvalidValue("A budget is an epsilon at a delta: give --delta too, below 1 / users.")
        # DP: at fixed orders the budget holds whatever is chosen after a look at results: a privacy filter.
        orders = FILTER_ORDERS if accountant == "rdp" else ()
        population.set_budget(Budget(epsilon=epsilon, delta=known, accountant=accountant, orders=orders))
    elif delta is not None and not population.events:
        raise InvalidValue("Nothing was charged yet. To set a budget give --epsilon with --delta.")
    if not population.events and population.budget is None:
        echo("{}" if as_json else f"Nothing was charged to {population.path} yet, and no budget is set.")
        return
    statement = all_runs(population, delta=delta)
    echo(dumps(statement, allow_nan=False, indent=2) if as_json else render_all_runs(statement), nl=as_json)
