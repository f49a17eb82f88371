"""The result of a run, computed from its run folder.

`record` evaluates the last model of a run, complete or not, and returns a `RunResult`: accuracy by round, head words
of the last model (Table 3), epsilon, and time. It reads held-out users, models and ledgers only. It reads no training
user, and stores no text.
"""

import json
import math
import subprocess
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reproduction.base_config import settings_of
from reproduction.bootstrap import USERS
from reproduction.corpora import Corpus
from reproduction.private_measures import hits_of, write_counts
from reproduction.results import RunResult
from reproduction.scheduling import Job
from unheard.corpus.store import TokenStore
from unheard.engines.choice import EngineChoice
from unheard.evaluation.measures import score
from unheard.evaluation.next_word import evaluate
from unheard.run_folder import RunFolder
from unheard.training.checkpoint import released_model
from unheard.training.run import Run
from unheard.updates.user_update import User, users_in_turn

EVALUATED = ("accuracy_top1", "accuracy_top3", "accuracy_top5", "loss", "perplexity")
"""Metrics that a result keeps of every evaluation."""


def record(
    job: Job,
    run: Run,
    corpus: Corpus,
    folder: RunFolder,
    *,
    main: Corpus | None,
    began_after: int | None,
    choice: EngineChoice,
    seconds: float,
    users_per_second: float,
    results: Path,
) -> RunResult:
    """Compute the result of a run up to its last completed round, and write the hits of each held-out user.

    Args:
        job: The run and its planned rounds.
        run: Its configuration.
        corpus: The corpus that it was trained on.
        folder: Its run folder.
        main: The main corpus. A model of another corpus is also evaluated there.
        began_after: Number of rounds of the earlier run that this run started from.
        choice: The engine, whose device evaluates the model.
        seconds: Wall time of its rounds.
        users_per_second: Throughput of the group that it trained with.
        results: Folder of the results. `NAME/per_user.npz` in it has the targets and hits of each held-out user.
    """
    device = choice.torch_device()
    params_P, rounds = released_model(folder.model, run.model)
    params_P = params_P.to(device)
    after = None if job.run.after is None else f"{job.run.after} after {began_after} rounds"
    heads = score(run.model, params_P, _held_out(run, corpus), unroll=run.evaluation.unroll)[1]
    store = TokenStore.open(corpus.path)
    texts = store.held_out.users(np.arange(store.held_out.num_users))
    if not run.model.user_features and texts:
        counts = hits_of(run.model, params_P, store.vocabulary.words, texts, unroll=run.evaluation.unroll)
        (results / job.run.name).mkdir(parents=True, exist_ok=True)
        write_counts(results / job.run.name / USERS, counts)
    return RunResult(
        name=job.run.name,
        corpus=corpus.name,
        seed=run.training.reproducible_seed or 0,
        rounds=rounds,
        planned=job.planned,
        settings=settings_of(run, after),
        evaluations=[
            {"round": row["round"], **{name: _short(row[name]) for name in EVALUATED}}
            for row in folder.read_metrics()
            if row["round"] <= rounds  # a kill can leave evaluations of rounds that were lost
        ],
        head_words={str(head): counts.tolist() for head, counts in heads.histograms.items()},
        accuracy_elsewhere={"main": _elsewhere(run, params_P, main)} if corpus.role == "other" and main else {},
        parameters=run.model.layout.total,
        epsilon=_epsilons(folder),
        population=run.plan.population,
        store=corpus.digest,
        seconds=round(seconds, 3),
        users_per_second=round(users_per_second, 2),
        device=device_name(device),
        date=datetime.now(UTC).date().isoformat(),
        commit=commit(),
    )


def device_name(device: torch.device) -> str:
    """Name of the GPU, or the number of CPU threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"CPU, {threads} thread{'s' if threads != 1 else ''}"


def commit() -> str:
    """The commit of this code; without a git repository the version of the package."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        description = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        description = ""
    return description or f"unheard {version('unheard')}"


def _held_out(run: Run, corpus: Corpus) -> list[User]:
    """The held-out users that the evaluation of this run uses."""
    return run.evaluation.choose(users_in_turn(TokenStore.open(corpus.path).held_out, run.model))


def _elsewhere(run: Run, params_P: Tensor, main: Corpus) -> dict[str, Any]:
    """Metrics of the model on held-out users of the main corpus."""
    numbers = evaluate(run.model, params_P, _held_out(run, main), unroll=run.evaluation.unroll)
    return {name: _short(numbers[name]) for name in EVALUATED}


def _epsilons(folder: RunFolder) -> dict[str, float | None]:
    """Epsilon by accountant and delta, from the privacy statement of the run. Infinity becomes None."""
    statement = json.loads(folder.statement.read_text(encoding="utf-8"))
    return {
        name: _finite(float(value)) for name, value in {**statement["epsilon"], "delta": statement["delta"]}.items()
    }


def _short(value: float) -> float | None:
    """Six decimals: one target of 75,000 changes the fifth."""
    finite = _finite(value)
    return None if finite is None else round(finite, 6)


def _finite(value: float) -> float | None:
    """None for infinity and NaN, which JSON does not have. The loss of a model that diverged is not finite."""
    return value if math.isfinite(value) else None
