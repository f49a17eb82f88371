"""The paper's common setting, and a run made of it: the tables of a run file, changed as the run says.

In: a PaperRun, the corpus in its role, a scale. Out: a Run that `train_together` takes. Where in the paper: section 3 and appendix
"Experiment details": eta = 6, B = 8, unroll 10, E = 1, 100 users a round drawn by independent coins, the fixed denominator, one
common initialisation, an evaluation every 20 rounds.
"""

from pathlib import Path
from typing import Any

from reproduction.corpora import Corpus
from reproduction.recipe import FULL, PaperRun, Scale
from unheard.mechanism.clipping import AdaptiveClip
from unheard.training.run import Run
from unheard.training.run_file import fill_added_keys, run_from_tables, set_key, tables_from_run

POPULATION = "POPULATION"
"""In a run's changes: the declared population of its corpus."""


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
    """The run, on this corpus. `start` is the folder of the run that it begins from; `ledger` is where its people are charged."""
    tables = common_tables(corpus, scale)
    for change in (*paper_run.changes, *scale.changes):
        set_key(tables, change.replace(POPULATION, str(corpus.population)))
    if tables["update"]["kind"] == "fedsgd":
        _take_all_data(tables["update"], corpus)
    tables["sampling"]["users_per_round"] = scale.users(paper_run, min(corpus.population, corpus.users))
    tables["privacy"]["ledger"] = str(ledger)
    tables["training"] |= {"rounds": rounds, "reproducible_seed": paper_run.seed + seed_shift}
    if start is not None:
        tables["training"] |= {"init_from": str(start), "init_is_public": paper_run.is_after_public}
    return run_from_tables(tables)[0]


def _take_all_data(update: dict[str, Any], corpus: Corpus) -> None:
    """FedSGD is of a user's whole data. Its batch is of one size, which engines take together faster, where that holds all of the
    longest user and is not mostly empty; elsewhere it is left out, which means all data."""
    windows = -(-(corpus.longest - 1) // update["unroll"])
    if not update["batch_size"] / 2 < windows <= update["batch_size"]:
        del update["batch_size"]


def common_tables(corpus: Corpus, scale: Scale = FULL) -> dict[str, Any]:
    """What all runs share. S and sigma are each run's own."""
    return {
        "corpus": {"path": str(corpus.path)},
        "privacy": {"population": corpus.population},
        "model": {"kind": "tied_lstm", "vocabulary_size": corpus.vocabulary_size},
        "sampling": {"kind": "poisson", "users_per_round": 100},
        "weights": {"kind": "equal"},
        "update": {"kind": "fedavg", "learning_rate": 6.0, "batch_size": 8, "unroll": 10, "epochs": 1},
        "clip": {"kind": "flat"},
        "estimator": {"kind": "fixed_denominator"},
        "noise": {"kind": "gaussian"},
        "server": {"kind": "add"},
        "evaluation": {"every": scale.evaluate_every, "max_tokens": scale.held_out_tokens},
        "training": {"init_seed": 0, "checkpoint_every": scale.checkpoint_every},
    }


def settings_of(run: Run, after: str | None = None) -> dict[str, Any]:
    """The whole run file as tables, without paths: what a result keeps. `after` names the run that it began from."""
    tables = tables_from_run(run)
    for table, key in (("corpus", "path"), ("privacy", "ledger"), ("training", "init_from")):
        tables[table].pop(key, None)
    del tables["corpus"], tables["engine"]
    if after is not None:
        tables["training"]["init_from"] = after
    return tables


def comparable_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings less what may differ between two sittings of one run."""
    kept = {
        name: dict(table) if isinstance(table, dict) else table for name, table in fill_added_keys(settings).items()
    }
    for key in ("rounds", "checkpoint_every", "keep_checkpoints", "init_from"):
        kept["training"].pop(key, None)
    return kept


def side_by_side_key(run: Run, role: str) -> tuple[Any, ...]:
    """Runs of one key can share an engine's chunks: one store, one shape of model, one shape of a local batch. Those whose clip
    follows the users wait for a count every round, and would keep the others waiting."""
    follows = isinstance(run.plan.clip, AdaptiveClip)
    return role, run.model, type(run.plan.update), run.plan.update.batch_size, run.plan.update.unroll, follows
