"""The complete configuration of one run of the paper.

`build_run` takes a `PaperRun`, the corpus in its role and a scale, and returns a `Run` that `train_together` accepts:
the common tables of a run file, with the changes of the run. `settings_of` and `comparable_settings` give the part of
a run file that a result stores and that two sessions of one run must agree on.
"""

import copy
from pathlib import Path
from typing import Any

from reproduction.corpora import Corpus
from reproduction.recipe import FULL, PaperRun, Scale, common_tables
from unheard.mechanism.clipping import AdaptiveClip
from unheard.training.run import Run, fill_added_keys, run_from_tables, set_key, tables_from_run

POPULATION = "POPULATION"
"""In the changes of a run, this stands for the declared population of the corpus."""


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
    """The complete configuration of one run.

    Args:
        paper_run: The run, relative to the common configuration.
        corpus: The corpus in the role that the run asks for.
        ledger: File of the population ledger that the run is charged to.
        rounds: Number of rounds.
        scale: Sizes that all runs share.
        seed_shift: Number added to the seed.
        start: Folder of the run that this one starts from, if any.
    """
    tables = common_tables(corpus.path, corpus.population, vocabulary_size=corpus.vocabulary_size)
    tables["evaluation"] = {"every": scale.evaluate_every, "max_tokens": scale.held_out_tokens}
    tables["training"]["checkpoint_every"] = scale.checkpoint_every
    for change in (*paper_run.changes, *scale.changes):
        set_key(tables, change.replace(POPULATION, str(corpus.population)))
    update, windows = tables["update"], -(-(corpus.longest - 1) // tables["update"]["unroll"])
    # FedSGD takes all data of a user in one batch. A fixed batch size is faster, because engines can stack users; it is
    # kept if it holds the longest user and is at least half full. Otherwise it is removed, which means all data.
    if update["kind"] == "fedsgd" and not update["batch_size"] / 2 < windows <= update["batch_size"]:
        del update["batch_size"]
    tables["sampling"]["users_per_round"] = scale.users(paper_run, min(corpus.population, corpus.users))
    tables["privacy"]["ledger"] = str(ledger)
    # Runs of one seed are compared on the same cohorts.
    seed = paper_run.seed + seed_shift
    tables["training"] |= {"rounds": rounds, "reproducible_seed": seed, "shared_cohorts": True}
    if start is not None:
        tables["training"] |= {"init_from": str(start), "init_is_public": paper_run.is_after_public}
    return run_from_tables(tables)[0]


def settings_of(run: Run, after: str | None = None) -> dict[str, Any]:
    """Return the complete run file as tables without paths, for a result.

    Args:
        run: The run.
        after: The name of the run that it started from; None if there is none.
    """
    tables = tables_from_run(run)
    del tables["corpus"], tables["engine"]
    for table, key in (("privacy", "ledger"), ("training", "init_from")):
        tables[table].pop(key, None)
    if after is not None:
        tables["training"]["init_from"] = after
    return tables


def comparable_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings without the keys that may differ between two sessions of one run."""
    kept = copy.deepcopy(fill_added_keys(settings))
    # Versions before 0.2.0 had no shared_cohorts, and all runs of a seed shared theirs.
    for key in ("rounds", "checkpoint_every", "keep_checkpoints", "init_from", "shared_cohorts"):
        kept["training"].pop(key, None)
    return kept


def side_by_side_key(run: Run, role: str) -> tuple[Any, ...]:
    """Runs with equal keys can train side by side: same store, same model, same shape of a local batch.

    Runs with an adaptive clip wait for a count in every round, and therefore form groups of their own.
    """
    follows = isinstance(run.plan.clip, AdaptiveClip)
    return role, run.model, type(run.plan.update), run.plan.update.batch_size, run.plan.update.unroll, follows
