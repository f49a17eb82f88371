"""Train the private run, its baseline and the runs of Table 2 on reviews_81, as `rules.toml` registers them.

The inputs are reviews_81.jsonl.zst and blogs_1600.jsonl.zst. The outputs are run folders under WORK/runs and small
result files. `prepare`, `run` and `all` continue where an earlier call stopped.

    python -m reproduction.private_run prepare --data DATA --work WORK             both token stores (no GPU needed)
    python -m reproduction.private_run run choose-S --work WORK                    choose S on blogs
    python -m reproduction.private_run run private --work WORK --stop-after 580    a step of reproduction/schedule.toml
    python -m reproduction.private_run all --work WORK --stop-after 1500           all steps in order, with a time limit
    python -m reproduction.batch A --work WORK --bundle OUT/a.tar.gz --stop-after 1500     a batch of schedule.toml
    python -m reproduction.private_run measure WORK/runs/private                   hits of each held-out user
    python -m reproduction.private_run commit --out COMMIT                         for a machine without the repository
    python -m reproduction.private_run code                                        SHA-256 of the code, as in facts.json
    python -m reproduction.private_run digest WORK/reviews_81                      SHA-256 of the content of a store
    python -m reproduction.private_run counted WORK/reviews_81 --out counted.json  unigram and bigram, without privacy
    python -m reproduction.private_run collect --work WORK --out OUT               copy result files (numbers, no text)
    python -m reproduction.private_run collect --work WORK --bundle OUT/a.tar.gz   pack results and the state of runs
    python -m reproduction.private_run restore OUT/a.tar.gz* --work WORK           continue the runs on another machine
    python -m reproduction.private_run unpack OUT/a.tar.gz* --out reproduction/results/reviews_81    extract a bundle

Paper: the private run corresponds to the first row of Table 2 (z = 1, 5,000 users per round, 5,000 rounds), which the
paper estimated with 100 users per round. `private_results.py` applies the registered rules to the results.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from reproduction.bundles import bundle, collect, restore, unpack
from reproduction.recipe import POPULATION, PaperRun, common_tables
from reproduction.recipes import (
    MAIN,
    RUNS,
    SEEDS,
    SWEEP,
    TRADES,
    TRADES_PER_LAYER,
    baseline,
    clipped,
    noised,
    traded,
    variant,
)
from unheard import formatting
from unheard.run_folder import RunFolder
from unheard.storage import replace_file

WORDS = 64
"""Number of words in one segment of blogs_64, equal to the largest number of words per user in reviews_81."""
CANDIDATES = (2, 4, 8, 12, 16)
"""Values of S among which the rule private-S chooses."""
POPULATIONS = {"reviews_81": 750_947, "blogs_64": 260_000, "reviews_1600_200k": 191_709, "blogs_1600": 10_229}
POPULATIONS |= dict.fromkeys(("reviews_1600_200k_20k", "reviews_1600_200k_30k"), 191_709)
POPULATIONS |= {"scotus_for_blogs": 8_100, "blogs_1600_characters": 10_229}
"""Declared population of each corpus."""
PREPARE = ["--user-field", "user", "--text-field", "text", "--time-field", "time"]
"""Registered options of `unheard prepare` that are the same for all corpora."""
CUT = {
    "reviews_81": ["--tokens-per-user", "81", "--min-tokens", "21", "--held-out", "0.005"],
    "blogs_64": ["--tokens-per-user", "81", "--min-tokens", "21", "--held-out", "0.01"],
    "reviews_1600_200k": ["--tokens-per-user", "1600", "--min-tokens", "21", "--held-out", "0.02"],
    "blogs_1600": ["--tokens-per-user", "1600", "--min-tokens", "1500", "--held-out", "0.05"],
}
CUT["scotus_for_blogs"] = CUT["blogs_1600"]
"""Registered options of `unheard prepare` that depend on the corpus."""
SOURCES = {"blogs_64": "blogs_1600", "scotus_for_blogs": "scotus_1600"}
"""Name of the file of a corpus, without its ending, where it is not the name of the corpus."""
WORDS_OF = {"20k": 20_000, "30k": 30_000}
"""Words of the larger dictionaries, by the role of the corpus (`PaperRun.corpus`), which ends the name of its store."""
VARIANTS = {role: ["--vocab-size", str(size)] for role, size in WORDS_OF.items()} | {
    "characters": ["--tokens", "characters"]
}
"""Options of `unheard prepare` of each role that a corpus has a store of its own for."""
STEPS = ("choose-S", "private", "baseline-C5000", "table-2", "C1250")
"""Steps that the command `all` runs, in this order."""
MORE_STEPS = ("z1-C1667", "baseline-C1667", "z1-C1250", "baseline-C1250", "trade-offs", "trade-offs-adjusted")
MORE_STEPS += ("public", "public-start", "far", "far-public")
"""Further steps, which the batches of schedule.toml use: `public` on blogs_64, the others on reviews_81."""
SWEEP_STEPS = ("long-noise", "long-estimators", "long-clipping", "long-clipping-curve")
"""Steps on reviews_1600_200k whose rules are read at round 500 or before, so that they are evaluated every 20 rounds."""
LONG_STEPS = ("long-table-2", "long-C1250", "long-trade-offs", "long-trade-offs-adjusted", *SWEEP_STEPS)
LONG_STEPS += ("long-users-per-round", "long-head-words", "long-dictionaries-clipping", "long-dictionaries-noise")
"""Steps on reviews_1600_200k, whose users have text for several local steps. They need a separate work folder."""
BLOGS_STEPS = (
    "fedsgd-clipping",
    "fedsgd-noise",
    "readings",
    "readings-step",
    "text",
    "larger-S",
    "adaptive",
    "other-models",
)
"""Steps on blogs_1600, the corpus `blogs` of the rules, where each user has 20 local steps."""
FAR = {1: (2.233, 4.296, 4), 2: (1.319, 3.262, 8), 4: (0.895, 2.535, 16), 8: (0.688, 2.017, 32)}
"""Noise of the plan of the private run by epsilon, as `unheard plan --compare-noise` solves it: z of independent noise, z
of correlated noise, and the groups of its sampler."""
Z1 = {1667: 10, 1250: 15}
"""S of the other private runs with z = 1, by their users per round, as in Table 2."""
READINGS = {"growing": "model.keep_norm=false", "server": "model.keep_norm=true", "step": "model.step_norm=true"}
"""The readings of the paper's "a fixed L2 norm of 1.0": vectors that grow, that the server projects after every round,
and that users project after every local step."""


# ------------------------------------------------------------------------------------------------------------------- stores


def segments(source: Path, target: Path) -> int:
    """Cut the text of each user into consecutive segments of `WORDS` words, each of which becomes a user.

    The rest of a user's text that does not fill a segment is left out.

    Args:
        source: File of JSON lines with `user`, `time` and `text`.
        target: File of JSON lines to write.

    Returns:
        The number of segments.
    """
    import duckdb

    lines = duckdb.connect().execute(
        'SELECT "user", "text" FROM read_json(?, format = \'newline_delimited\') ORDER BY "user", "time"', [str(source)]
    )
    count, number, user, left = 0, 0, None, []
    with open(target, "w", encoding="utf-8") as file:
        for name, text in itertools.chain.from_iterable(iter(lambda: lines.fetchmany(10_000), [])):
            if name != user:
                user, left, number = name, [], 0
            left += text.split()
            while len(left) >= WORDS:
                row = {"user": f"{user}-{number}", "time": number, "text": " ".join(left[:WORDS])}
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
                left, number, count = left[WORDS:], number + 1, count + 1
    return count


def prepare(data: Path, work: Path, corpora: Sequence[str]) -> None:
    """Prepare token stores with the registered options. Stores that exist are kept.

    Args:
        data: Folder of the corpora, as `build_corpora.py` writes them.
        work: Folder for the stores.
        corpora: Keys of `POPULATIONS`.
    """
    work.mkdir(parents=True, exist_ok=True)
    for name in (name for name in corpora if not (work / name).exists()):
        corpus, _, role = name.rpartition("_")
        source = _file_of(data, SOURCES.get(name) or (corpus if role in VARIANTS else name))
        if name == "blogs_64":
            print(f"{segments(source, work / 'blogs_64.jsonl'):,} segments", flush=True)
            source = work / "blogs_64.jsonl"
        out = work / ("scotus_1600" if name == "scotus_for_blogs" else name)
        options = [*PREPARE, *CUT.get(name, CUT.get(corpus, [])), *VARIANTS.get(role, []), "--out", str(out)]
        if not out.exists():
            subprocess.run([sys.executable, "-m", "unheard", "prepare", str(source), *options], check=True)
        if name == "scotus_for_blogs":
            with_held_out_of(out, work / "blogs_1600", work / name)
        (work / "blogs_64.jsonl").unlink(missing_ok=True)


def with_held_out_of(trained: Path, evaluated: Path, out: Path) -> None:
    """Write a store with the training users of one store and the held-out users of another, for rule text-other-corpus.

    Args:
        trained: Store of the training users.
        evaluated: Store of the held-out users, with the same dictionary.
        out: Folder of the new store.

    Raises:
        SystemExit: The dictionaries differ, or there is no second store.
    """
    from unheard.corpus.store import TokenStore, write_store

    if not evaluated.exists():
        raise SystemExit(f"{out.name} needs {evaluated.name}: name it before {out.name}.")
    users, others = TokenStore.open(trained), TokenStore.open(evaluated)
    if users.vocabulary.words != others.vocabulary.words:
        raise SystemExit(f"The dictionaries of {trained.name} and {evaluated.name} differ.")
    train, held_out = (split.users(np.arange(split.num_users)) for split in (users.train, others.held_out))
    write_store(out, train=train, held_out=held_out, vocabulary=users.vocabulary, info={"name": out.name})


def _file_of(data: Path, name: str) -> Path:
    """Return the file of a corpus, compressed or not. Raise `SystemExit` if there is none."""
    for suffix in (".zst", ".gz", ""):
        if (file := data / f"{name}.jsonl{suffix}").exists():
            return file
    raise SystemExit(f"{data} has no {name}.jsonl.gz: build it with python -m reproduction.build_corpora {name}.")


# --------------------------------------------------------------------------------------------------------------------- runs


def run_tables(
    run: PaperRun, work: Path, corpus: str, *, seed: int | None, scale: float = 1.0, evaluated_every: int = 100
) -> dict[str, Any]:
    """Return the tables of a run file for one run.

    Args:
        run: The run, as changes to the common configuration.
        work: Folder with the stores and the run folders.
        corpus: Name of the corpus.
        seed: Seed of the run and of the run that it starts from; None for noise from a secure generator.
        scale: Factor on rounds and users; below 1 for tests only.
        evaluated_every: Rounds between evaluations.
    """
    from unheard.training.run import set_key

    every, checkpoint_every = (max(1, round(rounds * scale)) for rounds in (evaluated_every, 500))
    tables = common_tables(work / corpus, POPULATIONS[corpus], vocabulary_size=WORDS_OF.get(run.corpus, 10_000))
    tables["model"] |= {"unit_norm": True, "keep_norm": False}
    if run.corpus == "characters":  # the run takes the number of characters from its store
        del tables["model"]["vocabulary_size"]
    for change in run.changes:
        set_key(tables, change.replace(POPULATION, str(POPULATIONS[corpus])))
    tables["sampling"]["users_per_round"] = max(4, round(run.users * scale))
    tables["evaluation"] = {"every": every, "max_tokens": 10_000_000}
    training = {
        "rounds": max(5, round(run.rounds * scale)),
        "checkpoint_every": checkpoint_every,
        "keep_checkpoints": 1,
    }
    if seed is not None:
        training["reproducible_seed"] = seed
    if run.after is not None:
        start = work / "runs" / f"{run.after}-seed{seed or 1}"
        training |= {"init_from": str(start), "init_is_public": run.is_after_public}
    tables["training"] |= training
    return tables


def runs_of(step: str, work: Path, *, repetition: int = 1, scale: float = 1.0) -> dict[str, dict[str, Any]]:
    """Return the run file of each run of a step, as tables, by the name of the run.

    Args:
        step: One of `STEPS`, `MORE_STEPS`, `LONG_STEPS` or `BLOGS_STEPS`.
        work: Folder with the stores, the run folders and the chosen S.
        repetition: Number of the repetition, from 1.
        scale: Factor on rounds and users; below 1 for tests only.
    """
    every = 20 if step in SWEEP_STEPS else 100
    return {
        name: run_tables(run, work, store_of(step, run), seed=seed, scale=scale, evaluated_every=every)
        for name, (run, seed) in named_runs(step, work, repetition).items()
    }


def corpus_of(step: str) -> str:
    """Return the name of the corpus, a key of `POPULATIONS`, that the runs of a step train on."""
    if step in LONG_STEPS:
        return "reviews_1600_200k"
    return "blogs_1600" if step in BLOGS_STEPS else "blogs_64" if step in ("choose-S", "public") else "reviews_81"


def store_of(step: str, run: PaperRun) -> str:
    """Return the name of the store that a run of a step trains on: that of the step, or one of its variants."""
    if run.corpus == "other":
        return "scotus_for_blogs"
    return corpus_of(step) + ("" if run.corpus == "main" else f"_{run.corpus}")


def named_runs(step: str, work: Path, repetition: int = 1) -> dict[str, tuple[PaperRun, int | None]]:
    """Return the runs of one step. Most of them are runs of the recipes under another name.

    Args:
        step: One of `STEPS`, `MORE_STEPS`, `LONG_STEPS` or `BLOGS_STEPS`.
        work: Folder with the chosen S.
        repetition: Number of the repetition, which becomes part of the name of a private run or the seed of a baseline.
            Steps with several seeds ignore it.

    Returns:
        Each run and its seed, by its name. The seed is None if the noise comes from a secure generator.

    Raises:
        SystemExit: There is no such step, or it needs an S that is not chosen yet.
    """
    kind, _, size = step.removeprefix("long-").rpartition("-C")  # z1-C1250: kind z1 with 1,250 users per round
    suffix = "" if repetition == 1 else f"-repetition{repetition}"
    seeded: dict[str, PaperRun] = {}
    match kind or size:
        case "choose-S":
            return {f"S{n}": (noised(n, n / 5000, users=1000, rounds=1000), 1) for n in CANDIDATES}
        case "private":
            return {f"private{suffix}": (_private(5000, chosen_norm(work)), None)}
        case "public":
            return {"public-seed1": (baseline(1000, rounds=1000), 1)}
        case "public-start":
            start = replace(_private(5000, chosen_norm(work)), after="public", is_after_public=True)
            return {f"public-start{suffix}": (start, None)}
        case "far" | "far-public":
            mark, starts = ("public-", {"after": "public", "is_after_public": True}) if "-" in step else ("", {})
            return {
                f"epsilon{epsilon}-{mark}{kind}{suffix}": (replace(run, **starts), None)
                for epsilon in FAR
                for kind, run in _runs_for(epsilon, chosen_norm(work)).items()
            }
        case "z1":
            return {f"{step}{suffix}": (_private(int(size), Z1[int(size)]), None)}
        case "baseline":
            return {f"{step}-seed{repetition}": (baseline(int(size)), repetition)}
        case "C1250":
            seeded = {"S15-sigma0.012-C1250": noised(15, 0.012, users=1250)}
        case "table-2":
            seeded = {run.name.removeprefix("flat-"): run for run in MAIN}
            if step not in LONG_STEPS:
                norm = chosen_norm(work)
                seeded["estimate"] = noised(norm, norm / 5000, rounds=5000)
        case "trade-offs":
            seeded = {f"trade-S{norm:g}": traded(norm) for norm in TRADES}
        case "trade-offs-adjusted":
            seeded = {f"then-S{norm:g}": traded(norm, after="trade-S20") for norm in TRADES}
            per_layer = {norm: traded(norm, "per_layer", after="trade-S20") for norm in TRADES_PER_LAYER}
            seeded |= {f"then-S{norm:g}-per-layer": run for norm, run in per_layer.items()}
        case "noise":
            seeded = {run.name: run for run in (clipped(20), *(noised(20, sigma) for sigma in (0.012, 0.024, 0.2)))}
        case "estimators":
            _, *others = RUNS["estimators"]
            seeded = {"fixed-size-true-average": baseline(rounds=SWEEP), **{run.name: run for run in others}}
        case "clipping":
            sweep = [clipped(norm, kind) for kind in ("flat", "per_layer") for norm in (10, 15, 20)]
            seeded = {run.name: run for run in sweep if run.name != clipped(20).name}
        case "clipping-curve":
            curve = [clipped(norm, kind) for kind in ("flat", "per_layer") for norm in (2.5, 5, 30, 40)]
            seeded = {run.name: run for run in curve}
        case "dictionaries-clipping":
            # Those with 10,000 words are runs of Figure 2.
            seeded = {run.name: run for run in RUNS["dictionaries-clipping"] if run.corpus != "main"}
        case "dictionaries-noise":
            # The others with 10,000 words are runs of Figure 3; those without noise are runs of Figures 2 and 11.
            known = [clipped(20), noised(20, 0.012), noised(20, 0.024), *RUNS["dictionaries-clipping"]]
            seeded = {run.name: run for run in RUNS["dictionaries-noise"] if run not in known}
        case "users-per-round":
            # The baseline with 100 users per round is that of table-2.
            seeded = {run.name: run for run in (baseline(users, SWEEP) for users in (10, 30, 300, 1000))}
        case "head-words":
            # The baseline of 3,000 rounds is `fixed-size-true-average`.
            runs = [replace(run, rounds=SWEEP) for run in MAIN[1:]] + [noised(20, sigma) for sigma in (0.024, 0.048)]
            runs.append(noised(15, 0.012, users=1250))
            seeded = {f"heads-{run.name.removeprefix('flat-')}": run for run in runs}
        case "fedsgd-clipping":
            seeded = {run.name: run for run in RUNS[step]}
        case "fedsgd-noise":
            seeded = {run.name: run for run in RUNS[step] if run not in RUNS["fedsgd-clipping"]}
        case "readings" | "readings-step":
            some = {"step"} if step == "readings-step" else READINGS.keys() - {"step"}
            for reading in (name for name in READINGS if name in some):
                main = {run.name.removeprefix("flat-"): run for run in MAIN} | {"flat-S15": clipped(15)}
                seeded |= {f"{reading}-{name}": variant(reading, run, READINGS[reading]) for name, run in main.items()}
            if step == "readings":
                seeded["free-flat-S15"] = variant("free", clipped(15), "model.unit_norm=false")
        case "text":
            other = variant("other", baseline(rounds=SWEEP), corpus="other")
            runs = [*RUNS["update-penalty"][1:], RUNS["tied-embeddings"][1], other]
            seeded = {run.name: run for run in runs}
        case "larger-S":
            # Those with S = 15, and those with S = 20 without noise, are runs of `readings` and of Figure 9.
            seeded = {run.name: run for run in (noised(20, 0.003), noised(30, 0.003), clipped(30))}
        case "adaptive":
            seeded = {f"trade-S{norm:g}": replace(traded(norm), rounds=SWEEP) for norm in TRADES}
            seeded["adaptive-z0.06"] = RUNS["adaptive-clipping"][-1]
        case "other-models":
            seeded = {run.name: run for run in RUNS[step]}
        case _:
            every_step = ", ".join((*STEPS, *MORE_STEPS, *LONG_STEPS, *BLOGS_STEPS))
            raise SystemExit(f"There is no step {step}: choose from {every_step}.")
    return {f"{name}-seed{seed}": (run, seed) for name, run in seeded.items() for seed in SEEDS}


def _private(users: int, norm: float, z: float = 1.0, *more: str) -> PaperRun:
    """Return a run of 5,000 rounds with a noise multiplier, and with more changes to the common configuration."""
    changes = (f"sampling.users_per_round={users}", f"clip.norm={norm:g}", f"noise.noise_multiplier={z}", *more)
    return PaperRun(name=f"z{z:g}-C{users}", changes=changes, rounds=5000)


def _runs_for(epsilon: int, norm: float) -> dict[str, PaperRun]:
    """Return the private run with independent and with correlated noise at an epsilon of `FAR`, by the kind of noise."""
    alone, correlated, groups = FAR[epsilon]
    changes = ("sampling.kind=cyclic_poisson", f"sampling.groups={groups}", "noise.kind=correlated")
    return {
        "independent": _private(5000, norm, alone),
        "correlated": _private(5000, norm, correlated, *changes, "noise.strategy=banded"),
    }


def chosen_norm(work: Path) -> float:
    """Return the S that rule private-S chose. Raise `SystemExit` if it is not chosen yet."""
    file = work / "chosen_S.json"
    if not file.exists():
        raise SystemExit("S is not chosen yet: run the step choose-S first.")
    return float(json.loads(file.read_text())["S"])


def choose_norm(work: Path) -> dict[str, Any]:
    """Apply rule private-S: choose the S with the highest accuracy, and the smaller one if two are equal.

    Write the choice to `chosen_S.json`, and return the content of this file: `S`, the `round` at which the candidates
    were compared, and the `accuracy_top1` of each.
    """
    curves = {norm: smoothed(read_metrics(work / "runs" / f"S{norm}")) for norm in CANDIDATES}
    at = min(max(curve) for curve in curves.values())
    by_norm = {norm: curve[at] for norm, curve in curves.items()}
    best = max(by_norm, key=lambda norm: (by_norm[norm], -norm))
    result = {"S": best, "round": at, "accuracy_top1": {f"{norm}": value for norm, value in by_norm.items()}}
    (work / "chosen_S.json").write_text(json.dumps(result, indent=1) + "\n")
    return result


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the evaluations of a run in order. If a round was evaluated twice, the later evaluation counts."""
    return RunFolder(folder).read_metrics()


def smoothed(rows: Sequence[dict[str, Any]]) -> dict[int, float]:
    """Return the accuracy by round as the rules define it: the mean of an evaluation and the four before it."""
    values = formatting.smoothed([row["accuracy_top1"] for row in rows])
    return {row["round"]: value for row, value in zip(rows, values, strict=True)}


def run_step(
    step: str,
    work: Path,
    *,
    device: str,
    stop_after: float | None,
    scale: float,
    repetition: int,
    only: Sequence[str] = ("*",),
) -> bool:
    """Train the runs of one step side by side, or continue them. Complete runs are measured and then skipped.

    Args:
        step: One of `STEPS`, `MORE_STEPS`, `LONG_STEPS` or `BLOGS_STEPS`.
        work: Folder of stores, ledgers and run folders.
        device: Device of the engine: `cuda` or `cpu`.
        stop_after: Seconds after which the runs stop; None to train until they are complete.
        scale: Factor on rounds and users; below 1 for tests only.
        repetition: Number of the repetition.
        only: Shell patterns; runs whose names match none of them are left for a later call.

    Returns:
        Whether the selected runs are complete and measured.

    Raises:
        SystemExit: The commit of the code is unknown, or files were changed since the commit.
    """
    from reproduction.measures import facts, measure
    from unheard import EngineChoice
    from unheard.training.loop import train_together
    from unheard.training.run import run_from_tables

    began = time.monotonic()
    origin = facts(device)  # called here so that an unknown commit fails before the training, not after it
    if scale == 1 and origin["commit"].endswith("-dirty"):
        raise SystemExit("Runs need a clean commit (reproduction/rules.md): commit or remove the changes.")
    wanted = {
        name: tables
        for name, tables in runs_of(step, work, repetition=repetition, scale=scale).items()
        if any(fnmatchcase(name, pattern) for pattern in only)
        and not is_measured(work / "runs" / name, tables["training"]["rounds"])
    }
    if not wanted:
        print(f"{step}: complete", flush=True)
        return True
    precision = "bfloat16" if device.startswith("cuda") else "float32"
    # The engine `stacked` does not project word vectors after local steps.
    kind = "vectorised" if any(tables["model"].get("step_norm") for tables in wanted.values()) else "stacked"
    choice = EngineChoice(kind=kind, device=device, precision=precision, users_at_once=None)
    folders = {name: work / "runs" / name for name in wanted}
    (work / "ledgers").mkdir(parents=True, exist_ok=True)
    runs = []
    for name, tables in wanted.items():
        # Each run has its own population ledger, although all runs have the same users: the corpus is public, and the
        # statement of a run is about this run alone.
        privacy = tables["privacy"] | {"ledger": str(work / "ledgers" / f"{name}.jsonl")}
        runs.append((run_from_tables(tables | {"privacy": privacy})[0], folders[name]))
    users = sum(tables["sampling"]["users_per_round"] for tables in wanted.values())
    sitting = Sitting(step, began, users, folders, origin)
    with closing(train_together(runs, engine=choice, allow_no_privacy=True)) as reports:
        for number, report in reports:
            sitting.add(list(wanted)[number], report)
            # `train_together` reports a round only after all runs have completed it, so stopping here loses no work.
            if stop_after is not None and time.monotonic() - began >= stop_after:
                break
    sitting.write()
    if sitting.first is not None and sitting.last < max(tables["training"]["rounds"] for tables in wanted.values()):
        return False
    for folder in folders.values():
        measure(folder, device)
    if step == "choose-S":
        print(json.dumps(choose_norm(work)), flush=True)
    return True


class Sitting:
    """The record of one process that trained the runs of a step ("sitting" = session).

    The record has the rounds, the seconds, the users per second, and when each run was evaluated. It is written at an
    evaluation if ten seconds have passed since the last write, so that little of it is lost if the process is killed.

    Args:
        step: The name of the step.
        began: When the process began, by `time.monotonic`.
        users: Users per round of all runs together.
        folders: The run folders, by the names of the runs.
        origin: Commit, device, version of torch and date, which each record repeats.
    """

    def __init__(self, step: str, began: float, users: int, folders: dict[str, Path], origin: dict[str, Any]) -> None:
        self.step, self.began, self.users, self.folders, self.origin = step, began, users, folders, origin
        self.first: int | None = None
        self.last = 0
        self.marks: list[dict[str, Any]] = []
        self._written = began
        self._before: dict[str, str] | None = None

    def add(self, name: str, report: Any) -> None:
        """Add the report of one round of a run to the record, and print its evaluation if it has one.

        Args:
            name: The name of the run.
            report: The report that `train_together` yields.
        """
        self.last = report.round
        if self.first is None:
            self.first = report.round - 1
        if report.metrics:
            elapsed, accuracy = time.monotonic() - self.began, report.metrics["accuracy_top1"]
            self.marks.append({"run": name, "round": report.round, "seconds": round(elapsed, 3)})
            print(f"{name}: round {report.round}, {100 * accuracy:.2f} %, {elapsed:.0f} s", flush=True)
            if time.monotonic() - self._written > 10:
                self.write()

    def write(self) -> None:
        """Write the record to `sittings.jsonl` of each run, after the records of earlier processes."""
        if self.first is None:
            return
        files = {name: folder / "sittings.jsonl" for name, folder in self.folders.items()}
        self._written = time.monotonic()
        if self._before is None:
            self._before = {name: file.read_text() if file.exists() else "" for name, file in files.items()}
        seconds = time.monotonic() - self.began
        speed = round((self.last - self.first) * self.users / seconds, 1)
        record = {
            "step": self.step,
            "from_round": self.first,
            "to_round": self.last,
            "seconds": round(seconds, 3),
            "users_per_second": speed,
            "runs_side_by_side": len(self.folders),
        }
        for name, file in files.items():
            mine = [mark for mark in self.marks if mark["run"] == name]
            line = json.dumps(record | {"marks": mine} | self.origin)
            replace_file(file, f"{self._before[name]}{line}\n".encode())
        print(f"{self.step}: rounds {self.first} to {self.last}, {seconds:.1f} s, {speed:,} users/s", flush=True)


def is_measured(folder: Path, rounds: int) -> bool:
    """Whether a run has completed its rounds and its last model was measured.

    Args:
        folder: The run folder.
        rounds: The number of rounds of the complete run.
    """
    has_files = (folder / "facts.json").exists() and (folder / "metrics.jsonl").exists()
    return has_files and read_metrics(folder)[-1]["round"] >= rounds


# ------------------------------------------------------------------------------------------------------------- command line


def main() -> None:
    """Run the command line of this module."""
    a_path: dict[str, Any] = {"type": Path}
    path = a_path | {"required": True}
    options: dict[str, dict[str, Any]] = {
        "store": a_path,
        "steps": {"nargs": "+", "choices": (*STEPS, *MORE_STEPS, *LONG_STEPS, *BLOGS_STEPS)},
        "folders": a_path | {"nargs": "+", "help": "run folders, complete or not"},
        "kept": a_path | {"nargs": "+", "help": "result folders with checkpoints/, or the files of a bundle"},
        "files": a_path | {"nargs": "+"},
        "--data": path,
        "--work": path,
        "--out": path,
        "--corpus": {"nargs": "+", "choices": tuple(POPULATIONS), "default": ["blogs_64", "reviews_81"]},
        "--only": {"nargs": "+", "default": ["*"], "help": "patterns of names of runs, such as '*-seed1'"},
        "--device": {"default": "cuda"},
        "--stop-after": {"type": float, "help": "seconds after which the runs stop and are saved"},
        "--stop-at": {"type": float, "help": "time at which the runs stop, in seconds since 1970"},
        "--repetition": {"type": int, "default": 1},
        "--scale": {"type": float, "default": 1.0, "help": "shrinks rounds and users; for tests only"},
    }
    limits = "--work --device --stop-after --stop-at --repetition --scale"
    verbs: dict[str, tuple[Callable[[argparse.Namespace], object], str]] = {
        "commit": (lambda given: _measures().write_commit(given.out), "--out"),
        "code": (lambda given: print(_measures().code_digest()), ""),
        "digest": (lambda given: print(_measures().content_digest(given.store)), "store"),
        "counted": (lambda given: _measures().counted(given.store, given.out), "store --out"),
        "prepare": (lambda given: prepare(given.data, given.work.resolve(), given.corpus), "--data --work --corpus"),
        "run": (_run, f"steps --only {limits}"),
        "all": (_run, limits),
        "measure": (
            lambda given: [_measures().measure(one, given.device) for one in given.folders],
            "folders --device",
        ),
        "restore": (lambda given: restore(given.kept, given.work), "kept --work"),
        "collect": (_collect, "--work"),
        "unpack": (lambda given: print(*unpack(given.files, given.out), sep="\n"), "files --out"),
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="verb", required=True)
    for name, (work_on, taken) in verbs.items():
        command = commands.add_parser(name)
        command.set_defaults(work_on=work_on)
        for option in taken.split():
            command.add_argument(option, **options[option])
        if name == "collect":
            either = command.add_mutually_exclusive_group(required=True)
            either.add_argument("--out", type=Path, help="folder to which the result files are copied")
            bundled = "FILE.tar.gz for result files and the state of runs, in parts of 15 MiB"
            either.add_argument("--bundle", type=Path, help=bundled)
    arguments = parser.parse_args()
    arguments.work_on(arguments)


def _measures() -> ModuleType:
    """Return the module `measures`. It takes seconds to import, so only the commands that need it do."""
    from reproduction import measures

    return measures


def _collect(arguments: argparse.Namespace) -> None:
    """Copy the results to the folder `--out`, or pack them into the bundle `--bundle`."""
    work = arguments.work.resolve()
    if arguments.bundle is None:
        collect(work, arguments.out)
    else:
        for file in bundle(work, arguments.bundle):
            print(f"{file}: {file.stat().st_size:,} bytes", flush=True)


def _run(arguments: argparse.Namespace) -> None:
    """Run the given steps, or all of `STEPS`, until the time limit is reached."""
    until = arguments.stop_at if arguments.stop_after is None else time.time() + arguments.stop_after
    for step in getattr(arguments, "steps", STEPS):
        left = None if until is None else until - time.time()
        if left is not None and left <= 0:
            break
        run_step(
            step,
            arguments.work.resolve(),
            device=arguments.device,
            stop_after=left,
            scale=arguments.scale,
            repetition=arguments.repetition,
            only=getattr(arguments, "only", ["*"]),
        )


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    main()
