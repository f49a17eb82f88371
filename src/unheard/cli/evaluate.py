"""`unheard evaluate`: measure the accuracy of a run's newest model on held-out users.

`compare`, `report` and `demo` also call `full_measures_of` before they show a run. It reads `measures.json` if that
file belongs to the newest model; otherwise it measures the run.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.table import Table

from unheard.cli.display import console, counted_bar, note, notes, print_table, set_stop_message
from unheard.cli.options import AsJson, Processes, RunDir, number, option
from unheard.cli.processes import run_on_processes
from unheard.errors import CorpusCorrupt, CorpusError
from unheard.run_folder import RunFolder

if TYPE_CHECKING:
    from unheard.engines.distributed.process_group import ProcessGroup

EXAMPLES = """Examples:

  unheard evaluate runs/first

  unheard evaluate runs/first --full    (by user, by word frequency, head words, baselines)

  unheard evaluate runs/first --corpus corpora/other --max-tokens 1000000 --json

  unheard evaluate runs/first --full --processes 8
"""


def evaluate(
    folder: RunDir,
    corpus: Annotated[Path | None, option("Another store with the same vocabulary.", otherwise="the run's own")] = None,
    max_tokens: Annotated[
        int | None, number("How many held-out tokens to use.", min=1, otherwise="as in training")
    ] = None,
    full: Annotated[
        bool,
        option(
            "All measures: by user, by word frequency, head words, baselines. They are kept in DIR/measures.json.",
            "--full",
        ),
    ] = False,
    as_json: AsJson = False,
    processes: Processes = 1,
) -> None:
    """Measure AccuracyTop1/3/5, loss and perplexity on held-out users."""
    set_stop_message(
        lambda: "Stopped. The run folder is as it was, or has its new measures. Run the same command again."
    )

    def work(ranks: "ProcessGroup | None") -> None:
        """Evaluate the run and print the result; `ranks` are the processes that share the work, or None."""
        from unheard.report import tables
        from unheard.training.released import evaluate as evaluate_model

        if full:
            numbers = full_measures_of(folder, corpus=corpus, max_tokens=max_tokens, again=True, ranks=ranks)
        else:
            with notes.status("Evaluating on held-out users"):
                numbers = evaluate_model(folder, corpus=corpus, max_tokens=max_tokens, ranks=ranks)
        if as_json:
            print(json.dumps(numbers))
        elif full:
            for table in (tables.accuracies, tables.users, tables.bands, tables.head_words):
                print_table(table({folder.name: numbers}))
        else:
            _print_numbers(folder, numbers)

    run_on_processes(work, processes)


def full_measures_of(
    path: Path,
    *,
    corpus: Path | None = None,
    max_tokens: int | None = None,
    prompts: Sequence[str] | None = None,
    again: bool = False,
    ranks: "ProcessGroup | None" = None,
) -> dict[str, Any]:
    """Return the full measures of a run's newest model, from `measures.json` or newly computed.

    Args:
        path: The run folder.
        corpus: Another store to measure on; its measures are returned but not saved in the run folder.
        max_tokens: How many held-out tokens to use; None for as many as in training.
        prompts: Texts that the model continues; None for the default ones.
        again: Measure even if `measures.json` has the measures that are asked for.
        ranks: Processes that share the work; None for this process only.
    """
    folder = RunFolder.open(path)
    saved = None if again or corpus else folder.read_measures()
    if saved is not None:
        same_prompts = prompts is None or list(prompts) == [prompt["text"] for prompt in saved["prompts"]]
        if same_prompts and max_tokens in (None, saved["max_tokens"]):
            return saved

    from unheard.evaluation.measures import FIT_TOKENS, Measured, full_measures, prompts_for, write_measures
    from unheard.training.released import open_for_evaluation
    from unheard.training.worker import parallel_map_for
    from unheard.updates.user_update import users_in_turn

    released, store, settings = open_for_evaluation(path, corpus, max_tokens)
    counted = replace(settings, max_tokens=max(settings.max_tokens, FIT_TOKENS))
    public = counted.choose(users_in_turn(store.public, released.run.model)) if store.public else ()
    # DP: measures and baselines read held-out and public users only; what they print is in nobody's ledger.
    measured = Measured(
        model=released.run.model,
        params_P=released.params_P,
        vocabulary=released.vocabulary,
        tokenizer=released.tokenizer,
        held_out=counted.choose(users_in_turn(store.held_out, released.run.model)),
        public=[user.tokens for user in public],
    )
    with counted_bar() as progress:
        numbers = full_measures(
            measured,
            settings,
            prompts=prompts_for(store.info["vocabulary"]) if prompts is None else prompts,
            progress=partial(progress, f"Measuring {folder.path.name}"),
            parallel_map=parallel_map_for(measured.model, ranks),
        )
    if corpus is None:
        write_measures(folder, numbers)
    return numbers


def full_measures_if_possible(path: Path, *, prompts: Sequence[str] | None = None) -> None:
    """Save the full measures of a run in its folder, unless they are there already.

    If the store is not on this machine, print a note and return.

    Raises:
        RunFolderMissing: The path is not a run folder, or its model is missing.
        CorpusCorrupt: The store is damaged.
    """
    try:
        full_measures_of(path, prompts=prompts)
    except CorpusCorrupt:
        raise
    except CorpusError as error:
        note(f"{path}: not measured. {error}", style="yellow")


def _print_numbers(folder: Path, numbers: dict[str, Any]) -> None:
    table = Table("measure", "held-out users", title=str(folder))
    for name, value in numbers.items():
        table.add_row(name, f"{100 * value:.2f} %" if name.startswith("accuracy") else f"{value:,.6g}")
    console.print(table)
