"""`unheard evaluate`: how well the newest model of a run guesses the next word of held-out users."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unheard.cli.processes import Processes, lead

if TYPE_CHECKING:
    from unheard.engines.distributed.process_group import Ranks

EXAMPLES = """Examples:

  unheard evaluate runs/first

  unheard evaluate runs/first --full    (by user, by word frequency, head words, baselines)

  unheard evaluate runs/first --corpus corpora/other --max-tokens 1000000 --json

  unheard evaluate runs/first --full --processes 8
"""


def evaluate(
    folder: Annotated[Path, typer.Argument(help="A run folder.", metavar="DIR")],
    corpus: Annotated[
        Path | None, typer.Option(help="Another corpus with the same vocabulary; default: the run's own.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Held-out tokens to use; default: as in training.", min=1)
    ] = None,
    full: Annotated[
        bool,
        typer.Option(
            "--full", help="All measures, kept in DIR/measures.json: by user, by band, head words, baselines."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
    processes: Processes = 1,
) -> None:
    """Measure AccuracyTop1/3/5, loss and perplexity on held-out users."""

    def work(ranks: "Ranks | None") -> None:
        numbers = (_full if full else _quick)(folder, corpus, max_tokens, ranks)
        if as_json:
            print(json.dumps(numbers))
        elif full:
            _show_full(folder, numbers)
        else:
            _show_quick(folder, numbers)

    lead(work, processes)


def _quick(folder: Path, corpus: Path | None, max_tokens: int | None, ranks: "Ranks | None") -> dict[str, Any]:
    from dataclasses import replace

    from unheard.cli.display import notes
    from unheard.corpus.store import TokenStore
    from unheard.errors import ModelError
    from unheard.evaluation.next_word import evaluate as measure
    from unheard.training.released import Released
    from unheard.training.worker import parallel_map_for
    from unheard.updates.users import users_in_turn

    released = Released.open(folder)
    store = TokenStore.open(corpus or released.run.corpus)
    if store.vocabulary != released.vocabulary:
        raise ModelError(f"{store.path} has another vocabulary than {folder}: prepare it with --vocab from-corpus.")
    how = replace(released.run.evaluation, max_tokens=max_tokens or released.run.evaluation.max_tokens)
    with notes.status("Evaluating on held-out users"):
        users = how.choose(users_in_turn(store.held_out, released.run.model))
        spread = parallel_map_for(released.run.model, ranks)
        return measure(released.run.model, released.params_P, users, unroll=how.unroll, spread=spread)


def _full(folder: Path, corpus: Path | None, max_tokens: int | None, ranks: "Ranks | None") -> dict[str, Any]:
    from unheard.cli.measuring import measured

    return measured(folder, corpus=corpus, max_tokens=max_tokens, again=True, ranks=ranks)


def _show_quick(folder: Path, numbers: dict[str, Any]) -> None:
    from rich.table import Table

    from unheard.cli.display import console

    table = Table("measure", "held-out users", title=str(folder))
    for name, value in numbers.items():
        table.add_row(name, f"{100 * value:.2f} %" if name.startswith("accuracy") else f"{value:,.6g}")
    console.print(table)


def _show_full(folder: Path, numbers: dict[str, Any]) -> None:
    from unheard.cli.display import print_table
    from unheard.report import tables

    run = {folder.name: numbers}
    for table in (
        tables.accuracies(run),
        tables.users(run),
        tables.bands(run),
        tables.head_words(run),
    ):
        print_table(table)
