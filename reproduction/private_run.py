"""Train the private run, its baseline and the runs of Table 2 on reviews_81, as `rules.toml` registers them.

The inputs are reviews_81.jsonl.zst and blogs_1600.jsonl.zst. The outputs are run folders under WORK/runs and small
result files. Every command continues where an earlier call stopped.

    python -m reproduction.private_run prepare --data DATA --work WORK             both token stores (no GPU needed)
    python -m reproduction.private_run run choose-S --work WORK                    choose S on blogs
    python -m reproduction.private_run run private --work WORK --stop-after 580    a step of reproduction/schedule.toml
    python -m reproduction.private_run all --work WORK --stop-after 1500           all steps in order, until the time is over
    python -m reproduction.private_run batch A --work WORK --bundle OUT/a.tar.gz --stop-after 1500    a batch of it
    python -m reproduction.private_run measure WORK/runs/private                   hits of each held-out user
    python -m reproduction.private_run digest WORK/reviews_81                      SHA-256 of the content of a store
    python -m reproduction.private_run counted WORK/reviews_81 --out counted.json  unigram and bigram, without privacy
    python -m reproduction.private_run collect --work WORK --out OUT               result files: figures only, no text
    python -m reproduction.private_run collect --work WORK --bundle OUT/a.tar.gz   the same in a few files, with the state
    python -m reproduction.private_run restore OUT/a.tar.gz* --work WORK           go on with them on another machine
    python -m reproduction.private_run unpack OUT/a.tar.gz* --out reproduction/results/reviews_81

Paper: the private run corresponds to the first row of Table 2 (z = 1, 5,000 users per round, 5,000 rounds), which the
paper estimated with 100 users per round. `private_results.py` applies the registered rules to the results.
"""

import argparse
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
WORDS = 64
"""Words in one segment of blogs_64: as many as reviews_81 keeps of a reviewer."""
CANDIDATES = (2, 4, 8, 12, 16)
"""Values of S to choose from (rule private-S)."""
SMOOTHED_OVER = 5
"""Number of evaluations that an accuracy is averaged over."""
POPULATIONS = {"reviews_81": 750_947, "blogs_64": 260_000}
"""Declared population of each corpus."""
PREPARE = ["--user-field", "user", "--text-field", "text", "--time-field", "time"]
"""Registered options of `unheard prepare`."""
CUT = ["--tokens-per-user", "81", "--min-tokens", "21"]
HELD_OUT = {"reviews_81": "0.005", "blogs_64": "0.01"}
STEPS = ("choose-S", "private", "baseline-C5000", "table-2", "C1250")
"""Steps of `all` in their order."""
MORE_STEPS = ("z1-C1667", "baseline-C1667", "z1-C1250", "baseline-C1250", "trade-offs", "trade-offs-adjusted")
"""Further steps, which batches of schedule.toml name."""
Z1 = {1667: 10, 1250: 15}
"""S of the private runs with fewer users per round, as in Table 2."""
TRADES = (6.3, 7.9, 10, 12.6, 15.9, 20)
"""Values of S in Figures 4 and 8; sigma = 0.0006 S."""
TRADES_PER_LAYER = (7.9, 12.6, 20)
"""Values of S with the clip of each layer in Figure 4."""
TABLE_2 = ((15, 0.003), (10, 0.006), (15, 0.012))
"""S and sigma of the rows of Table 2."""
SEEDS = (1, 2, 3)
TEST_TOKENS = 75_122
"""Size of the paper's kind of test set: random posts of held-out users with this many predicted tokens."""
PROMPTS = ("The room was very", "We would definitely", "The staff at the", "Breakfast was", "Next time I will")
"""Beginnings of sentences of our own. What a model suggests after them is recorded with its measures."""
SMALL_FILES = (
    "run.toml",
    "ledger.jsonl",
    "metrics.jsonl",
    "statement.json",
    "per_user.npz",
    "per_post.npz",
    "sittings.jsonl",
    "facts.json",
)
"""Files of a run folder that `collect` copies. None of them holds text."""
KEPT_WHOLE = ("private*", "z1-*", "baseline-C5000-*")
"""Runs whose model and ledgers stay in a bundle when they are complete."""
PART, LIMIT = 15 * 2**20, 60 * 2**20
"""Bytes in one file of a bundle, and in all of its checkpoints and models together."""


# ------------------------------------------------------------------------------------------------------------------- stores


def segments(source: Path, target: Path, words: int = WORDS) -> int:
    """Cut the text of each user into consecutive segments of `words` words, each of which becomes a user. Returns the
    number of segments."""
    import duckdb

    lines = duckdb.connect().execute(
        'SELECT "user", "text" FROM read_json(?, format = \'newline_delimited\') ORDER BY "user", "time"', [str(source)]
    )
    count, number, user, left = 0, 0, None, []
    with open(target, "w", encoding="utf-8") as file:
        for name, text in _rows(lines):
            if name != user:
                user, left, number = name, [], 0
            left += text.split()
            while len(left) >= words:
                row = {"user": f"{user}-{number}", "time": number, "text": " ".join(left[:words])}
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
                left, number, count = left[words:], number + 1, count + 1
    return count


def _rows(lines: Any) -> Iterator[tuple[str, str]]:
    """The rows of a DuckDB result, in batches."""
    while batch := lines.fetchmany(10_000):
        yield from batch


def prepare(data: Path, work: Path) -> None:
    """Prepare both token stores with the registered options, unless they exist."""
    work.mkdir(parents=True, exist_ok=True)
    cut = work / "blogs_64.jsonl"
    if not (work / "blogs_64").exists():
        print(f"{segments(_file_of(data, 'blogs_1600'), cut):,} segments", flush=True)
    for name, source in (("blogs_64", cut), ("reviews_81", _file_of(data, "reviews_81"))):
        if not (work / name).exists():
            options = [*PREPARE, *CUT, "--held-out", HELD_OUT[name], "--out", str(work / name)]
            subprocess.run([sys.executable, "-m", "unheard", "prepare", str(source), *options], check=True)
    cut.unlink(missing_ok=True)


def _file_of(data: Path, name: str) -> Path:
    """The file of a corpus, compressed or not. Exits with a message if there is none."""
    files = [data / f"{name}.jsonl{suffix}" for suffix in (".zst", ".gz", "")]
    if existing := [file for file in files if file.exists()]:
        return existing[0]
    raise SystemExit(f"{data} has no {name}.jsonl.gz: build it with python -m reproduction.build_corpora {name}.")


# --------------------------------------------------------------------------------------------------------------------- runs


def tables(work: Path, corpus: str, users: int, rounds: int, *, every: int = 100) -> dict[str, Any]:
    """The tables of the run file that all runs share. Each run adds its clip, noise and seed."""
    return {
        "corpus": {"path": str(work / corpus)},
        "privacy": {"population": POPULATIONS[corpus]},
        "model": {"kind": "tied_lstm", "vocabulary_size": 10_000, "unit_norm": True, "keep_norm": False},
        "sampling": {"kind": "poisson", "users_per_round": users},
        "weights": {"kind": "equal"},
        "update": {"kind": "fedavg", "learning_rate": 6.0, "batch_size": 8, "unroll": 10, "epochs": 1},
        "estimator": {"kind": "fixed_denominator"},
        "server": {"kind": "add"},
        "evaluation": {"every": every, "max_tokens": 10_000_000},
        "training": {"rounds": rounds, "init_seed": 0, "checkpoint_every": 500, "keep_checkpoints": 1},
    }


def noised(shared: dict[str, Any], norm: float, noise: dict[str, Any], seed: int | None) -> dict[str, Any]:
    """A flat clip and Gaussian noise. Without a seed the noise comes from a secure generator."""
    training = shared["training"] | ({} if seed is None else {"reproducible_seed": seed})
    return shared | {
        "clip": {"kind": "flat", "norm": float(norm)},
        "noise": {"kind": "gaussian", **noise},
        "training": training,
    }


def unclipped(shared: dict[str, Any], seed: int) -> dict[str, Any]:
    """The non-private baseline: fixed-size sampling, true average, no clip, no noise."""
    return shared | {
        "sampling": {"kind": "fixed_size", "users_per_round": shared["sampling"]["users_per_round"]},
        "estimator": {"kind": "true_average"},
        "clip": {"kind": "none"},
        "noise": {"kind": "none"},
        "training": shared["training"] | {"reproducible_seed": seed},
    }


def runs_of(step: str, work: Path, *, repetition: int = 1, scale: float = 1.0) -> dict[str, dict[str, Any]]:
    """The runs of one step.

    Args:
        step: One of `STEPS` or `MORE_STEPS`.
        work: Folder with the stores and the chosen S.
        repetition: Number of the repetition, which is part of the name or the seed.
        scale: Factor on rounds and users; below 1 for tests only.

    Returns:
        The tables of each run by its name.
    """

    def shared(corpus: str, users: int, rounds: int) -> dict[str, Any]:
        """The tables that the runs of this step have in common."""
        every = max(1, round(100 * scale))
        return tables(work, corpus, max(4, round(users * scale)), max(5, round(rounds * scale)), every=every)

    suffix = "" if repetition == 1 else f"-repetition{repetition}"
    if step == "choose-S":
        common = shared("blogs_64", 1000, 1000)
        return {f"S{norm}": noised(common, norm, {"noise_std": norm / 5000}, 1) for norm in CANDIDATES}
    if step == "private":
        norm = chosen_norm(work)
        return {f"private{suffix}": noised(shared("reviews_81", 5000, 5000), norm, {"noise_multiplier": 1.0}, None)}
    if step == "baseline-C5000":
        return {f"baseline-C5000-seed{repetition}": unclipped(shared("reviews_81", 5000, 5000), repetition)}
    if step == "C1250":
        common = shared("reviews_81", 1250, 3000)
        return {f"S15-sigma0.012-C1250-seed{k}": noised(common, 15, {"noise_std": 0.012}, k) for k in SEEDS}
    if step in ("z1-C1667", "z1-C1250"):
        users = int(step.removeprefix("z1-C"))
        common = shared("reviews_81", users, 5000)
        return {f"{step}{suffix}": noised(common, Z1[users], {"noise_multiplier": 1.0}, None)}
    if step in ("baseline-C1667", "baseline-C1250"):
        users = int(step.removeprefix("baseline-C"))
        return {f"{step}-seed{repetition}": unclipped(shared("reviews_81", users, 5000), repetition)}
    if step == "trade-offs":
        common = shared("reviews_81", 100, 4885)
        pairs = [(norm, seed) for norm in TRADES for seed in SEEDS]
        return {f"trade-S{n:g}-seed{k}": noised(common, n, {"noise_std": _traded(n)}, k) for n, k in pairs}
    if step == "trade-offs-adjusted":
        return _adjusted(shared("reviews_81", 100, 6000), work)
    if step == "table-2":
        common, norm = shared("reviews_81", 100, 5000), chosen_norm(work)
        named = {f"baseline-seed{seed}": unclipped(common, seed) for seed in SEEDS}
        for clip, sigma in TABLE_2:
            named |= {f"S{clip}-sigma{sigma:g}-seed{k}": noised(common, clip, {"noise_std": sigma}, k) for k in SEEDS}
        return named | {f"estimate-seed{k}": noised(common, norm, {"noise_std": norm / 5000}, k) for k in SEEDS}
    raise SystemExit(f"There is no step {step}: choose from {', '.join((*STEPS, *MORE_STEPS))}.")


def _traded(norm: float) -> float:
    """sigma of the trade-off between noise and clip: z = 0.06 with 100 users per round."""
    return round(0.0006 * norm, 6)


def _adjusted(shared: dict[str, Any], work: Path) -> dict[str, dict[str, Any]]:
    """The runs of Figure 4: noise and clip are adjusted after 4,885 rounds with S = 20, flat and per layer."""
    named = {}
    for seed in SEEDS:
        start = {"init_from": str(work / "runs" / f"trade-S20-seed{seed}"), "init_is_public": False}
        continued = shared | {"training": shared["training"] | start}
        for kind, norms in (("flat", TRADES), ("per_layer", TRADES_PER_LAYER)):
            for norm in norms:
                run = noised(continued, norm, {"noise_std": _traded(norm)}, seed)
                label = "" if kind == "flat" else "-per-layer"
                named[f"then-S{norm:g}{label}-seed{seed}"] = run | {"clip": {"kind": kind, "norm": float(norm)}}
    return named


def chosen_norm(work: Path) -> float:
    """S by rule private-S. Exits with a message if it is not chosen yet."""
    file = work / "chosen_S.json"
    if not file.exists():
        raise SystemExit("S is not chosen yet: run the step choose-S first.")
    return float(json.loads(file.read_text())["S"])


def choose_norm(work: Path) -> dict[str, Any]:
    """Apply rule private-S: the S with the highest accuracy; of two equal ones the smaller. The choice is stored in
    `chosen_S.json`."""
    accuracies = {norm: smoothed(read_metrics(work / "runs" / f"S{norm}")) for norm in CANDIDATES}
    at = min(max(curve) for curve in accuracies.values())
    by_norm = {norm: curve[at] for norm, curve in accuracies.items()}
    best = max(by_norm, key=lambda norm: (by_norm[norm], -norm))
    result = {"S": best, "round": at, "accuracy_top1": {f"{norm}": value for norm, value in by_norm.items()}}
    (work / "chosen_S.json").write_text(json.dumps(result, indent=1) + "\n")
    return result


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The evaluations of a run in order. If a round was evaluated twice, the later evaluation counts."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for _, row in sorted({row["round"]: row for row in rows}.items())]


def smoothed(rows: Iterable[dict[str, Any]], key: str = "accuracy_top1") -> dict[int, float]:
    """Accuracy by round as the rules define it: the mean of an evaluation and the four before it."""
    rows = list(rows)
    values = [row[key] for row in rows]
    return {row["round"]: float(np.mean(values[max(0, n + 1 - SMOOTHED_OVER) : n + 1])) for n, row in enumerate(rows)}


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
    """Train the runs of one step side by side, or continue them.

    Args:
        step: One of `STEPS`.
        work: Folder of stores, ledgers and run folders.
        device: Device of the engine: `cuda` or `cpu`.
        stop_after: Seconds after which the runs stop; None means when they are complete.
        scale: Factor on rounds and users; below 1 for tests only.
        repetition: Number of the repetition.
        only: Patterns of names; other runs of the step are left for a later call.

    Returns:
        Whether these runs of the step are complete. They are then also measured.
    """
    from unheard import EngineChoice
    from unheard.training.loop import train_together
    from unheard.training.run_file import run_from_tables

    began = time.monotonic()
    origin = facts(device)  # fails here, not after the training, if the commit is unknown
    chosen = {
        name: run_tables
        for name, run_tables in runs_of(step, work, repetition=repetition, scale=scale).items()
        if any(fnmatchcase(name, pattern) for pattern in only)
    }
    wanted = {
        name: run_tables
        for name, run_tables in chosen.items()
        if not is_measured(work / "runs" / name, run_tables["training"]["rounds"])
    }
    if not wanted:
        print(f"{step}: complete", flush=True)
        return True
    is_gpu = device.startswith("cuda")
    choice = EngineChoice(
        kind="stacked", device=device, precision="bfloat16" if is_gpu else "float32", users_at_once=None
    )
    folders = {name: work / "runs" / name for name in wanted}
    runs = []
    for name, run_tables in wanted.items():
        # Each run has a ledger of its population of its own: the runs are experiments on one public corpus, and each
        # statement is about one run.
        ledger = work / "ledgers" / f"{name}.jsonl"
        ledger.parent.mkdir(parents=True, exist_ok=True)
        runs.append(
            (
                run_from_tables(run_tables | {"privacy": run_tables["privacy"] | {"ledger": str(ledger)}})[0],
                folders[name],
            )
        )
    rounds = max(run_tables["training"]["rounds"] for run_tables in wanted.values())
    users = sum(run_tables["sampling"]["users_per_round"] for run_tables in wanted.values())
    first, last, marks = None, 0, []
    with closing(train_together(runs, engine=choice, allow_no_privacy=True)) as reports:
        for number, report in reports:
            last = report.round
            if first is None:
                first = report.round - 1
            if report.metrics:
                elapsed = time.monotonic() - began
                name, accuracy = list(wanted)[number], 100 * report.metrics["accuracy_top1"]
                marks.append({"run": name, "round": report.round, "seconds": round(elapsed, 3)})
                print(f"{name}: round {report.round}, {accuracy:.2f} %, {elapsed:.0f} s", flush=True)
            is_turn_over = number == len(runs) - 1
            if is_turn_over and stop_after is not None and time.monotonic() - began >= stop_after:
                break
    seconds = time.monotonic() - began
    is_complete = last >= rounds or first is None
    if first is not None:
        sitting = {
            "step": step,
            "from_round": first,
            "to_round": last,
            "seconds": round(seconds, 3),
            "users_per_second": round((last - first) * users / seconds, 1),
            "runs_side_by_side": len(runs),
            "marks": marks,
            **origin,
        }
        for name, folder in folders.items():
            with open(folder / "sittings.jsonl", "a", encoding="utf-8") as file:
                mine = [mark for mark in marks if mark["run"] == name]
                file.write(json.dumps(sitting | {"marks": mine}) + "\n")
        print(f"{step}: rounds {first} to {last}, {seconds:.1f} s, {sitting['users_per_second']:,} users/s", flush=True)
    if is_complete:
        for folder in folders.values():
            measure(folder, device)
        if step == "choose-S":
            print(json.dumps(choose_norm(work)), flush=True)
    return is_complete


def is_measured(folder: Path, rounds: int) -> bool:
    """Whether a run has all its rounds and its last model was measured."""
    if not (folder / "facts.json").exists() or not (folder / "metrics.jsonl").exists():
        return False
    return read_metrics(folder)[-1]["round"] >= rounds


def read_batch(name: str, schedule: Path = HERE / "schedule.toml") -> list[tuple[str, int]]:
    """The steps of a batch in order, each with the number of its repetition.

    Args:
        name: Name of a `[[batch]]`.
        schedule: The schedule file. A step is written `private`, or `private:2` for its second repetition.
    """
    batches = {batch["name"]: batch for batch in tomllib.loads(schedule.read_text(encoding="utf-8"))["batch"]}
    if name not in batches:
        raise SystemExit(f"There is no batch {name}: choose from {', '.join(batches)}.")
    steps = [written.partition(":") for written in batches[name]["steps"]]
    return [(step, int(repetition or 1)) for step, _, repetition in steps]


def run_batch(arguments: argparse.Namespace) -> None:
    """Run the steps of a batch until the time is over, and collect the results after each."""
    work, until = arguments.work.resolve(), None
    if arguments.stop_after is not None:
        until = time.monotonic() + arguments.stop_after
    if not (work / "chosen_S.json").exists():  # S was chosen once, on blogs
        shutil.copyfile(HERE / "results" / "blogs_64" / "chosen_S.json", work / "chosen_S.json")
    for step, repetition in read_batch(arguments.name):
        left = None if until is None else until - time.monotonic()
        if left is not None and left <= 0:
            print(f"{step}: no time left; the same command goes on here", flush=True)
            break
        run_step(step, work, device=arguments.device, stop_after=left, scale=arguments.scale, repetition=repetition)
        _collect(arguments)


def facts(device: str) -> dict[str, Any]:
    """What a result states about its origin: commit, device, version of torch, date."""
    import torch

    return {
        "commit": commit(),
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else platform.processor() or "cpu",
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def commit() -> str:
    """The commit of this code, from reproduction/COMMIT if there is no git repository; `-dirty` if files were changed."""
    if (HERE / "COMMIT").exists():
        return (HERE / "COMMIT").read_text().strip()
    git = ["git", "-C", str(HERE)]
    name = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    if not name:
        raise SystemExit(f"There is no git repository here: write the commit into {HERE / 'COMMIT'}.")
    is_dirty = subprocess.run(
        [*git, "status", "--porcelain"], capture_output=True, text=True, check=True
    ).stdout.strip()
    return f"{name}-dirty" if is_dirty else name


# ------------------------------------------------------------------------------------------------------------------ measures


def measure(folder: Path, device: str) -> None:
    """Measure the last model of a run.

    Writes `per_user.npz`: for each held-out user the number of targets and of hits, with and without sentence ends and
    punctuation; `per_post.npz`: the same for each post of the paper's kind of test set; and `facts.json`: commit,
    digest of the store, size of the model, and what it suggests after `PROMPTS`.
    """
    from unheard import Released, TokenStore
    from unheard.corpus.grouping import SplitRule
    from unheard.corpus.pipeline import draw_test_posts

    released = Released.open(folder)
    store = TokenStore.open(released.run.corpus)
    # The posts that `unheard prepare --test-tokens` would draw, without another store.
    posts = draw_test_posts(store.held_out, TEST_TOKENS, SplitRule().salt)
    counts = hits_of(released, store.held_out.users(np.arange(store.held_out.num_users)), device)
    of_posts = hits_of(released, posts, device)
    np.savez_compressed(folder / "per_user.npz", **counts)  # pyright: ignore[reportArgumentType]
    np.savez_compressed(folder / "per_post.npz", **of_posts)  # pyright: ignore[reportArgumentType]
    total = {name: int(value.sum()) for name, value in counts.items()}
    described = {
        "commit": commit(),
        "store": store.name,
        "store_content": content_digest(Path(released.run.corpus)),
        "held_out_users": len(counts["targets"]),
        "parameters": int(released.params_P.numel()),
        "accuracy_top1": total["hits"] / total["targets"],
        "accuracy_top1_without_ends": total["word_hits"] / total["words"],
        "accuracy_top1_without_ends_and_punctuation": total["plain_hits"] / total["plain"],
        "test_posts": len(posts),
        "test_tokens": int(of_posts["targets"].sum()),
        "accuracy_top1_test_posts": int(of_posts["hits"].sum()) / int(of_posts["targets"].sum()),
        "suggestions": {text: [word for word, _ in released.predict(text, 3)] for text in PROMPTS},
    }
    (folder / "facts.json").write_text(json.dumps(described, indent=1) + "\n")


def counted(store_path: Path, out: Path) -> None:
    """Write the accuracy of a unigram and a bigram model with the counts of all training users to `out`. The counts are
    exact, so this is for a public corpus only."""
    from unheard import TokenStore
    from unheard.corpus.vocabulary import BOS
    from unheard.evaluation.full import Counts, score_bigram, score_unigram

    store = TokenStore.open(store_path)
    counts = Counts.of(store.train.users(np.arange(store.train.num_users)), len(store.vocabulary.words))
    texts = store.held_out.users(np.arange(store.held_out.num_users))
    before_N = np.concatenate([tokens[:-1] for tokens in texts]).astype(np.int64)
    target_N = np.concatenate([tokens[1:] for tokens in texts]).astype(np.int64)
    before_N, target_N = before_N[target_N != BOS], target_N[target_N != BOS]
    shares = {}
    for name, score in (("unigram", score_unigram), ("bigram", score_bigram)):
        rank_N, _ = score(counts, before_N, target_N)
        shares[name] = round(100 * float(np.mean(rank_N == 0)), 4)
    described = {"accuracy_top1": shares, "targets": len(target_N), "store_content": content_digest(store_path)}
    out.write_text(json.dumps(described, indent=1) + "\n")


def content_digest(store: Path) -> str:
    """SHA-256 over the vocabulary and all shards. The name of a store only says how it was prepared, not from which
    text."""
    digest = hashlib.sha256()
    for file in sorted([store / "vocabulary.txt", *store.glob("*/*.offsets"), *store.glob("*/*.tokens")]):
        digest.update(f"{file.relative_to(store)}\0{file.stat().st_size}\0".encode() + file.read_bytes())
    return digest.hexdigest()


def hits_of(
    released: Any, texts: Sequence[np.ndarray], device: str, unroll: int = 80, texts_at_once: int = 500
) -> dict[str, np.ndarray]:
    """Targets and hits in each text (the tokens of a user or of a post), counted like AccuracyTop1.

    Args:
        released: The model.
        texts: Tokens of each text.
        device: Where to compute.
        unroll: Tokens of context, as in the evaluations of a run.
        texts_at_once: Texts in one batch.

    Returns:
        For each text the number of `targets` and `hits`; `words` and `word_hits` without sentence ends; `plain` and
        `plain_hits` also without punctuation.
    """
    import torch

    from unheard.corpus.vocabulary import EOS, UNK
    from unheard.evaluation.next_word import target_rank
    from unheard.models.model import window_targets
    from unheard.updates.user_update import windows_of

    model = released.run.model
    params = model.layout.split(released.params_P.to(device))
    # BOS, EOS and UNK count as words here; EOS is left out where a rule says so.
    words = [str(word) for word in released.vocabulary.words]
    is_mark_V = torch.tensor([not any(c.isalnum() for c in word) for word in words], device=device)
    names = ("targets", "hits", "words", "word_hits", "plain", "plain_hits")
    counts = {name: np.zeros(len(texts), dtype=np.int64) for name in names}
    for start in range(0, len(texts), texts_at_once):
        windows = [windows_of(tokens, unroll) for tokens in texts[start : start + texts_at_once]]
        owner_B = start + np.repeat(np.arange(len(windows)), [len(window) for window in windows])
        with torch.no_grad():
            input_BT, target_BT, counts_BT = window_targets(torch.as_tensor(np.concatenate(windows), device=device))
            logits_NV = model.logits(params, input_BT, None).flatten(0, -2)
            rank_BT = target_rank(logits_NV, target_BT.flatten()).view(target_BT.shape)
            hit_BT = counts_BT & (target_BT != UNK) & (rank_BT == 1)
            word_BT = counts_BT & (target_BT != EOS)
            plain_BT = word_BT & ~is_mark_V[target_BT]
            columns = (counts_BT, hit_BT, word_BT, hit_BT & word_BT, plain_BT, hit_BT & plain_BT)
            for name, column_BT in zip(names, columns, strict=True):
                np.add.at(counts[name], owner_B, column_BT.sum(dim=1).cpu().numpy())
    return counts


# ------------------------------------------------------------------------------------------------------------------- results


def collect(work: Path, out: Path, *, models: bool) -> None:
    """Copy the small result files of every run to `out`, and with `models` also the final models. No text is copied."""
    out.mkdir(parents=True, exist_ok=True)
    for folder in sorted((work / "runs").iterdir()):
        if folder.name.startswith("."):
            continue
        target_folder = out / folder.name
        target_folder.mkdir(parents=True, exist_ok=True)
        for name in (*SMALL_FILES, *(("model.safetensors",) if models else ())):
            if (folder / name).exists():
                shutil.copyfile(folder / name, target_folder / name)
        if (target_folder / "run.toml").exists():  # without the paths of the machine
            text = (target_folder / "run.toml").read_text(encoding="utf-8")
            (target_folder / "run.toml").write_text(text.replace(f"{work.resolve()}/", ""), encoding="utf-8")
    if (work / "chosen_S.json").exists():
        shutil.copyfile(work / "chosen_S.json", out / "chosen_S.json")


def bundle(work: Path, target: Path, part: int = PART, limit: int = LIMIT) -> list[Path]:
    """Pack the results of every run into one tar file, cut into parts if it is large.

    A run in progress comes with its ledgers and its newest checkpoint, so that `restore` can continue it elsewhere; a
    complete run with its ledgers and its final model if `KEPT_WHOLE` names it, otherwise with its small files. If the
    limit is too small for all, final models are left out first, then runs in progress with the highest seeds.

    Args:
        work: Folder of stores, ledgers and run folders.
        target: The file to write. Parts have the endings `.00`, `.01`, …
        part: Largest number of bytes of one file.
        limit: Largest number of bytes of checkpoints and models together.

    Returns:
        The files. Parts of an earlier bundle of this name are removed.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    for old in parts_of(target):
        old.unlink()
    with tempfile.TemporaryDirectory(dir=work) as scratch:
        copied, packed = Path(scratch) / "runs", Path(scratch) / "packed"
        collect(work, copied, models=False)
        (copied / "chosen_S.json").unlink(missing_ok=True)  # a result of blogs_64
        folders = [path for path in copied.iterdir() if path.is_dir()]
        for folder in sorted(folders, key=lambda path: ((path / "facts.json").exists(), path.name.split("-")[::-1])):
            limit -= _add_state(work, folder, limit)
        with tarfile.open(packed, "w:gz", compresslevel=1) as archive:
            archive.add(copied, arcname=".")
        size = packed.stat().st_size
        if size <= part:
            shutil.copyfile(packed, target)
            return [target]
        with open(packed, "rb") as file:
            for number in range(-(-size // part)):
                target.with_name(f"{target.name}.{number:02d}").write_bytes(file.read(part))
    return parts_of(target)


def _add_state(work: Path, folder: Path, limit: int) -> int:
    """Add to a folder of a bundle what continues the run, or its ledgers and model; remove the ledger of other complete
    runs. Returns the bytes of the checkpoint or model."""
    source, is_complete = work / "runs" / folder.name, (folder / "facts.json").exists()
    if is_complete and not any(fnmatchcase(folder.name, pattern) for pattern in KEPT_WHOLE):
        (folder / "ledger.jsonl").unlink(missing_ok=True)
        return 0
    kept = [source / "model.safetensors"] if is_complete else sorted((source / "checkpoints").glob("round-*"))[-1:]
    files = [file for file in kept if file.exists()]
    size = sum(file.stat().st_size for file in files)
    if size > limit or not files:
        print(f"{folder.name}: {'its model' if is_complete else 'the run in progress'} is left out", flush=True)
        if not is_complete:
            shutil.rmtree(folder)
        return 0
    shutil.copyfile(work / "ledgers" / f"{folder.name}.jsonl", folder / "population_ledger.jsonl")
    shutil.copyfile(source / "tokens.json", folder / "tokens.json")
    target = folder if is_complete else folder / "checkpoints"
    target.mkdir(exist_ok=True)
    shutil.copyfile(files[0], target / files[0].name)
    return size


def parts_of(target: Path) -> list[Path]:
    """The files of a bundle in order: the file itself, or its parts."""
    if target.exists():
        return [target]
    return sorted(target.parent.glob(f"{target.name}.[0-9][0-9]"))


def unpack(files: Sequence[Path], out: Path) -> list[Path]:
    """Unpack a bundle, given as its file or its parts, and return the folders of its runs."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile() as joined_parts:
        for file in sorted(files):
            joined_parts.write(file.read_bytes())
        joined_parts.seek(0)
        with tarfile.open(fileobj=joined_parts, mode="r:gz") as archive:
            names = {Path(name).parts[0] for name in archive.getnames() if len(Path(name).parts) > 1}
            archive.extractall(out, filter="data")
    return [out / name for name in sorted(names)]


def restore(kept: Sequence[Path], work: Path) -> None:
    """Copy runs back into the work folder, so that `run` continues those in progress and passes over the others.

    Args:
        kept: Result folders with `checkpoints/`, or the files of a bundle.
        work: Folder with the stores.
    """
    folders = [path for path in kept if path.is_dir()]
    with tempfile.TemporaryDirectory() as scratch:
        if files := [path for path in kept if not path.is_dir()]:
            folders += unpack(files, Path(scratch))
        for folder in folders:
            _restore_run(folder, work)
    shutil.copyfile(HERE / "results" / "blogs_64" / "chosen_S.json", work / "chosen_S.json")


def _restore_run(kept: Path, work: Path) -> None:
    """Copy one run back, with the paths of this machine."""
    folder = work / "runs" / kept.name
    shutil.copytree(kept, folder)
    text = (folder / "run.toml").read_text(encoding="utf-8")
    for name in ("reviews_81", "ledgers/"):  # `collect` removed the path of the work folder
        text = text.replace(f'"{name}', f'"{work.resolve()}/{name}')
    (folder / "run.toml").write_text(text, encoding="utf-8")
    shutil.copyfile(work / "reviews_81" / "vocabulary.txt", folder / "vocabulary.txt")
    (work / "ledgers").mkdir(parents=True, exist_ok=True)
    if (folder / "population_ledger.jsonl").exists():
        shutil.move(folder / "population_ledger.jsonl", work / "ledgers" / f"{kept.name}.jsonl")


def main() -> None:
    """The command line of this module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)

    def verb(name: str, work: Callable[[argparse.Namespace], None]) -> argparse.ArgumentParser:
        """Add a subcommand and the function that it calls."""
        command = verbs.add_parser(name)
        command.set_defaults(work_on=work)
        return command

    named = verb("digest", lambda arguments: print(content_digest(arguments.store)))
    named.add_argument("store", type=Path)
    words = verb("counted", lambda arguments: counted(arguments.store, arguments.out))
    words.add_argument("store", type=Path)
    words.add_argument("--out", type=Path, required=True)
    cut = verb("segments", lambda arguments: print(segments(arguments.source, arguments.target)))
    cut.add_argument("source", type=Path)
    cut.add_argument("target", type=Path)
    stores = verb("prepare", lambda arguments: prepare(arguments.data, arguments.work.resolve()))
    stores.add_argument("--data", type=Path, required=True)
    stores.add_argument("--work", type=Path, required=True)
    for name in ("run", "all", "batch"):
        run = verb(name, run_batch if name == "batch" else _run)
        if name == "batch":
            run.add_argument("name", help="a [[batch]] of reproduction/schedule.toml")
            _add_targets(run)
        if name == "run":
            run.add_argument("steps", nargs="+", choices=(*STEPS, *MORE_STEPS))
            run.add_argument("--only", nargs="+", default=["*"], help="names of runs, such as '*-seed1'")
        run.add_argument("--work", type=Path, required=True)
        run.add_argument("--device", default="cuda")
        run.add_argument("--stop-after", type=float, help="seconds")
        if name != "batch":
            run.add_argument("--repetition", type=int, default=1)
        run.add_argument("--scale", type=float, default=1.0, help="shrinks rounds and users; for tests only")
    read = verb("measure", _measure)
    read.add_argument("folders", type=Path, nargs="+", help="run folders, complete or not")
    read.add_argument("--device", default="cuda")
    back = verb("restore", lambda arguments: restore(arguments.kept, arguments.work))
    back.add_argument("kept", type=Path, nargs="+", help="result folders with checkpoints/, or the files of a bundle")
    back.add_argument("--work", type=Path, required=True)
    got = verb("collect", _collect)
    got.add_argument("--work", type=Path, required=True)
    _add_targets(got)
    got.add_argument("--models", action="store_true")
    open_ = verb("unpack", lambda arguments: print(*unpack(arguments.files, arguments.out), sep="\n"))
    open_.add_argument("files", type=Path, nargs="+")
    open_.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.work_on(arguments)


def _add_targets(command: argparse.ArgumentParser) -> None:
    """The options that say where results go: a folder or a bundle."""
    either = command.add_mutually_exclusive_group(required=True)
    either.add_argument("--out", type=Path, help="result files are copied to this folder, after each step of a batch")
    either.add_argument(
        "--bundle", type=Path, help="result files and the state go into FILE.tar.gz, in parts of 15 MiB"
    )


def _collect(arguments: argparse.Namespace) -> None:
    """Write the results to where the options say."""
    work = arguments.work.resolve()
    if arguments.bundle is None:
        collect(work, arguments.out, models=getattr(arguments, "models", True))
    else:
        for file in bundle(work, arguments.bundle):
            print(f"{file}: {file.stat().st_size:,} bytes", flush=True)


def _measure(arguments: argparse.Namespace) -> None:
    """Measure several run folders."""
    for folder in arguments.folders:
        measure(folder, arguments.device)


def _run(arguments: argparse.Namespace) -> None:
    """Run the given steps, or all of them, within the time limit."""
    until = None if arguments.stop_after is None else time.monotonic() + arguments.stop_after
    for step in getattr(arguments, "steps", STEPS):
        left = None if until is None else until - time.monotonic()
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
