"""`unheard evaluate`: how well a run's newest model guesses the next word of held-out users."""

import json
from pathlib import Path
from typing import Annotated

import typer

EXAMPLES = """Examples:

  unheard evaluate runs/first

  unheard evaluate runs/first --corpus corpora/other --max-tokens 1000000 --json
"""


def evaluate(
    folder: Annotated[Path, typer.Argument(help="A run folder.", metavar="DIR")],
    corpus: Annotated[
        Path | None, typer.Option(help="Another corpus with the same vocabulary; default: the run's own.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Held-out tokens to use; default: as in training.", min=1)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Measure AccuracyTop1/3/5, loss and perplexity on held-out users."""
    from dataclasses import replace

    from rich.table import Table

    from unheard.cli.display import console, notes
    from unheard.corpus.store import TokenStore
    from unheard.errors import ModelError
    from unheard.measure.next_word import evaluate as measure
    from unheard.training.released import Released
    from unheard.training.round import users_in_turn

    released = Released.open(folder)
    store = TokenStore.open(corpus or released.run.corpus)
    if store.vocabulary != released.vocabulary:
        raise ModelError(f"{store.path} has another vocabulary than {folder}: prepare it with --vocab from-corpus.")
    how = replace(released.run.evaluation, max_tokens=max_tokens or released.run.evaluation.max_tokens)
    with notes.status("Evaluating on held-out users"):
        users = how.choose(users_in_turn(store.held_out, released.run.model))
        numbers = measure(released.run.model, released.params_P, users, unroll=how.unroll)
    if as_json:
        print(json.dumps(numbers))
        return
    table = Table("measure", "held-out users", title=str(folder))
    for name, value in numbers.items():
        table.add_row(name, f"{100 * value:.2f} %" if name.startswith("accuracy") else f"{value:,.6g}")
    console.print(table)
