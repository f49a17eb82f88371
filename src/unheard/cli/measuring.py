"""The full measures of run folders, taken where they are missing: what `evaluate --full`, `compare`, `report` and `demo` share."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unheard.cli.display import notes
from unheard.errors import CorpusError

if TYPE_CHECKING:
    from unheard.engines.distributed.process_group import Ranks


def measured(
    path: Path,
    *,
    corpus: Path | None = None,
    max_tokens: int | None = None,
    prompts: Sequence[str] | None = None,
    again: bool = False,
    ranks: "Ranks | None" = None,
) -> dict[str, Any]:
    """measures.json as it stands if it is of the newest model and answers what is asked; else measured now, and kept."""
    from unheard.run_folder import RunFolder

    folder = RunFolder.open(path)
    kept = None if again or corpus else folder.read_measures()
    if kept and _answers(kept, max_tokens, prompts):
        return kept
    return _measure(folder, corpus, max_tokens, prompts, ranks)


def measured_if_possible(path: Path, *, prompts: Sequence[str] | None = None) -> dict[str, Any] | None:
    """The same for a page that can do without: a run whose corpus is not here, or that has no model yet, is told so."""
    from unheard.errors import RunFolderMissing

    try:
        return measured(path, prompts=prompts)
    except (CorpusError, RunFolderMissing) as refusal:
        notes.print(f"{path}: not measured. {refusal}", style="yellow", markup=False, highlight=False)
        return None


def _answers(kept: dict[str, Any], max_tokens: int | None, prompts: Sequence[str] | None) -> bool:
    said = [prompt["text"] for prompt in kept["prompts"]]
    return max_tokens in (None, kept["max_tokens"]) and (prompts is None or list(prompts) == said)


def _measure(
    folder: Any,
    corpus: Path | None,
    max_tokens: int | None,
    prompts: Sequence[str] | None,
    ranks: "Ranks | None" = None,
) -> dict[str, Any]:
    from dataclasses import replace

    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from unheard.corpus.store import TokenStore
    from unheard.errors import ModelError
    from unheard.evaluation.baselines import FIT_TOKENS
    from unheard.evaluation.full import PROMPTS, Measured, full_measures, write_measures
    from unheard.training.released import Released
    from unheard.training.worker import parallel_map_for
    from unheard.updates.users import users_in_turn

    released = Released.open(folder.path)
    store = TokenStore.open(corpus or released.run.corpus)
    if store.vocabulary != released.vocabulary:
        raise ModelError(
            f"{store.path} has another vocabulary than {folder.path}: prepare it with --vocab from-corpus."
        )
    how = replace(released.run.evaluation, max_tokens=max_tokens or released.run.evaluation.max_tokens)
    counted = replace(how, max_tokens=max(how.max_tokens, FIT_TOKENS))
    # DP: measures and baselines read held-out and public users only; what they print is in nobody's ledger.
    what = Measured(
        model=released.run.model,
        params_P=released.params_P,
        vocabulary=released.vocabulary,
        tokens=released.tokens,
        held_out=counted.choose(users_in_turn(store.held_out, released.run.model)),
        public=[u.tokens for u in counted.choose(users_in_turn(store.public, released.run.model))]
        if store.public
        else (),
    )
    columns = (TextColumn("Measuring {task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=notes) as bar:
        task = bar.add_task(folder.path.name, total=None)

        def progress(done: int, of: int) -> None:
            bar.update(task, completed=done, total=of)

        asked, spread = PROMPTS if prompts is None else prompts, parallel_map_for(what.model, ranks)
        found = full_measures(what, how, prompts=asked, progress=progress, spread=spread)
    if corpus is None:  # measures of another corpus are not this run's
        write_measures(folder, found)
    return found
