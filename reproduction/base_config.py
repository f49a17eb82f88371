"""Build the complete configuration of one run of the paper.

`build_run` takes a `PaperRun`, a corpus and a scale, and returns a `Run` that `train_together` accepts. It starts from
the tables that all runs share and applies the changes of this run. `settings_of` returns the part of a run file that a
result stores. `comparable_settings` returns the part that must be equal in two sessions of one run.
"""

import copy
from pathlib import Path
from typing import Any

from reproduction.corpora import Corpus
from reproduction.recipe import FULL, POPULATION, PaperRun, Scale, common_tables
from unheard.mechanism.clipping import AdaptiveClip
from unheard.training.run import Run, fill_added_keys, run_from_tables, set_key, tables_from_run


def build_run(
    paper_run: PaperRun,
    corpus: Corpus,
    *,
    ledger: Path,
    rounds: int,
    scale: Scale = FULL,
    seed_shift: int = 0,
    start: Path | None = None,
) -> Run:
    """Return the complete configuration of one run.

    Args:
        paper_run: The run, as changes to the common configuration.
        corpus: The corpus that the run trains on.
        ledger: File of the population ledger that the run is charged to.
        rounds: Number of rounds.
        scale: Sizes that all runs share, and changes that apply to all runs.
        seed_shift: Number added to the seed of the run.
        start: Folder of the run whose final model is the first model of this run; None for a random initialisation.
    """
    tables = common_tables(corpus.path, corpus.population, vocabulary_size=corpus.vocabulary_size)
    tables["evaluation"] = {"every": scale.evaluate_every, "max_tokens": scale.held_out_tokens}
    tables["training"]["checkpoint_every"] = scale.checkpoint_every
    for change in (*paper_run.changes, *scale.changes):
        set_key(tables, change.replace(POPULATION, str(corpus.population)))
    update, windows = tables["update"], -(-(corpus.longest - 1) // tables["update"]["unroll"])
    # FedSGD takes all data of a user in one batch. A fixed batch size is faster, because engines can then stack users.
    # Keep it if the longest user fits and fills more than half of it. Without it, the batch is all data of a user.
    if update["kind"] == "fedsgd" and not update["batch_size"] / 2 < windows <= update["batch_size"]:
        del update["batch_size"]
    tables["sampling"]["users_per_round"] = scale.users(paper_run, min(corpus.population, corpus.users))
    tables["privacy"]["ledger"] = str(ledger)
    # Runs with the same seed draw the same cohorts, so that their differences do not come from sampling.
    seed = paper_run.seed + seed_shift
    tables["training"] |= {"rounds": rounds, "reproducible_seed": seed, "shared_cohorts": True}
    if start is not None:
        tables["training"] |= {"init_from": str(start), "init_is_public": paper_run.is_after_public}
    return run_from_tables(tables)[0]


def settings_of(run: Run, after: str | None = None) -> dict[str, Any]:
    """Return the tables of a run file as a result stores them: without paths and without the engine.

    Args:
        run: The run.
        after: The name of the run that it started from, which replaces the path; None if there is none.
    """
    tables = tables_from_run(run)
    del tables["corpus"], tables["engine"]
    for table, key in (("privacy", "ledger"), ("training", "init_from")):
        tables[table].pop(key, None)
    if after is not None:
        tables["training"]["init_from"] = after
    return tables


def comparable_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of the settings without the keys that may differ between two sessions of one run.

    Keys that a later version of `unheard` added are filled with their default.
    """
    kept = copy.deepcopy(fill_added_keys(settings))
    # Versions before 0.2.0 had no key shared_cohorts: all runs with the same seed drew the same cohorts.
    for key in ("rounds", "checkpoint_every", "keep_checkpoints", "init_from", "shared_cohorts"):
        kept["training"].pop(key, None)
    return kept


def side_by_side_key(run: Run, role: str) -> tuple[Any, ...]:
    """Return a key: runs with equal keys can train side by side in one process.

    Such runs have the same store, the same model and local batches of the same shape. Runs with an adaptive clip form
    groups of their own, because each of their rounds waits for a count that sets the next S.
    """
    follows = isinstance(run.plan.clip, AdaptiveClip)
    return role, run.model, type(run.plan.update), run.plan.update.batch_size, run.plan.update.unroll, follows
