"""Measure the last model of a run on all held-out users, and record where a result comes from.

`measure` takes a run folder of `private_run.py` and writes three files: `per_user.npz` (targets and hits of each
held-out user), `per_post.npz` (the same for each post of a test set drawn as in the paper) and `facts.json` (commit,
digest of the store, accuracies, suggestions). `record` takes a run of a recipe, complete or not, and returns a
`RunResult`: accuracy by round, head words of the last model (Table 3), epsilon, and time. Neither reads training users
or stores text.

    measure(Path("WORK/runs/private"), "cuda")
    counted(Path("WORK/reviews_81"), Path("counted.json"))      # unigram and bigram, counted without privacy

Paper: AccuracyTop1 of the appendix "Accuracy metrics"; the test set of 75,122 tokens.
"""

import hashlib
import json
import math
import shutil
import subprocess
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from reproduction.base_config import settings_of
from reproduction.bootstrap import POSTS, USERS
from reproduction.corpora import Corpus
from reproduction.results import RunResult
from reproduction.scheduling import Job
from unheard.corpus.store import TokenStore
from unheard.corpus.vocabulary import BOS, EOS, UNK
from unheard.evaluation.measures import GUESSES, Counts, head_words, score, score_bigram, score_unigram
from unheard.evaluation.next_word import evaluate, target_rank
from unheard.models.model import LanguageModel, window_targets
from unheard.training.checkpoint import released_model
from unheard.training.released import Released
from unheard.training.run import Run
from unheard.updates.user_update import User, users_in_turn, windows_of

if TYPE_CHECKING:  # a real import would be circular: workspace.py imports this module
    from reproduction.workspace import Workspace

HERE = Path(__file__).resolve().parent
COMMIT = "COMMIT"
"""Name of the file beside this one that says the commit on a machine without the repository (`write_commit`)."""
CODE = (".py", ".toml", ".cu", ".cuh")
"""Endings of the files that `code_digest` covers."""
TEST_TOKENS = 75_122
"""Number of predicted tokens in the paper's test set. `measure` draws random held-out posts up to this size."""
SALT = "unheard"
"""The default salt of `SplitRule`, with which all stores were prepared; its module needs DuckDB, and measuring does not."""
PROMPTS = ("The room was very", "We would definitely", "The staff at the", "Breakfast was", "Next time I will")
"""Beginnings of sentences that we wrote. `measure` records which words a model suggests after each."""
HEAD = 100
"""Number of most frequent words that count as head words in the counts per user, as in the rules of Table 3."""
EVALUATED = ("accuracy_top1", "accuracy_top3", "accuracy_top5", "loss", "perplexity")
"""Metrics of every evaluation that a result stores."""


def facts(device: str) -> dict[str, Any]:
    """Return what a result states about its origin: commit, digest of the code, device, version of torch, date.

    Raises:
        SystemExit: The commit is unknown.
    """
    if commit() is None:
        raise SystemExit(
            f"There is no git repository here: run `python -m reproduction.private_run commit --out {COMMIT}` where there is "
            f"one, and copy the file to {HERE / COMMIT}."
        )
    origin = {"commit": commit(), "code": code_digest(), "device": device_name(torch.device(device))}
    return origin | {"torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}


def device_name(device: torch.device) -> str:
    """Return the name of the GPU, or the number of CPU threads as text."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"CPU, {threads} thread{'s' if threads != 1 else ''}"


def commit() -> str | None:
    """Return the commit of this code: the HEAD of the repository, or the commit that `write_commit` wrote.

    The commit has the ending `-dirty` if files were changed, or if the code is not that of `write_commit`. Return None if
    there is neither a file nor a repository.
    """
    if (HERE / COMMIT).exists():
        head, digest = [*(HERE / COMMIT).read_text().split(), "", ""][:2]
        return head if digest == code_digest() else f"{head}-dirty"
    if shutil.which("git") is None:
        return None
    head, status = (
        subprocess.run(["git", "-C", str(HERE), *asked], capture_output=True, text=True, check=False).stdout.strip()
        for asked in (["rev-parse", "HEAD"], ["status", "--porcelain"])
    )
    return f"{head}-dirty" if head and status else head or None


def write_commit(path: Path) -> None:
    """Write the commit and the digest of this code to a file, for a machine without the repository.

    Copied there as `reproduction/COMMIT`, the file tells runs their commit. They refuse to start if the code is another.

    Raises:
        SystemExit: The commit is unknown, or files were changed since the commit.
    """
    head = commit()
    if head is None or head.endswith("-dirty"):
        raise SystemExit("Only a clean checkout of a repository has a commit: commit or remove the changes.")
    path.write_text(f"{head} {code_digest()}\n")


def code_digest() -> str:
    """Return a SHA-256 of the code and settings below `src/unheard` and `reproduction`, without results and texts."""
    digest = hashlib.sha256()
    for package in (HERE.parent / "src" / "unheard", HERE):
        files = (path for path in package.rglob("*") if path.suffix in CODE and HERE / "results" not in path.parents)
        for path in sorted(files):
            content = path.read_bytes()
            digest.update(f"{path.relative_to(HERE.parent).as_posix()}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def measure(folder: Path, device: str) -> None:
    """Measure the last model of a run on all held-out users, and write three files into its folder.

    `per_user.npz` has the number of targets, hits and head words of each held-out user, with and without sentence ends
    and punctuation. `per_post.npz` has the same for each post of a test set of `TEST_TOKENS`, as in the paper. `facts.json`
    has the commit, the digest of the store, the accuracies, the size of the model, and its suggestions after `PROMPTS`.

    Args:
        folder: The run folder.
        device: The torch device that computes.
    """
    released = Released.open(folder)
    store = TokenStore.open(released.run.corpus)
    # Draw the same posts as `unheard prepare --test-tokens`, without preparing a second store.
    posts = store.held_out.random_posts(TEST_TOKENS, SALT)
    users = store.held_out.users(np.arange(store.held_out.num_users))
    model, params_P, words = released.run.model, released.params_P.to(device), released.vocabulary.words
    counts, of_posts = (hits_of(model, params_P, words, texts) for texts in (users, posts))
    write_counts(folder / USERS, counts)
    write_counts(folder / POSTS, of_posts)
    total = {name: int(value.sum()) for name, value in counts.items()}
    described = {
        "commit": commit(),
        "code": code_digest(),
        "store": store.name,
        "store_content": content_digest(Path(released.run.corpus)),
        "held_out_users": len(users),
        "parameters": int(released.params_P.numel()),
        "accuracy_top1": total["hits"] / total["targets"],
        "accuracy_top1_without_ends": total["word_hits"] / total["words"],
        "accuracy_top1_without_ends_and_punctuation": total["plain_hits"] / total["plain"],
        "test_posts": len(posts),
        "test_tokens": int(of_posts["targets"].sum()),
        "accuracy_top1_test_posts": int(of_posts["hits"].sum()) / int(of_posts["targets"].sum()),
        "head_words": total["head_words"] / total["targets"],
        "suggestions": {text: [word for word, _ in released.predict(text, 3)] for text in PROMPTS},
    }
    (folder / "facts.json").write_text(json.dumps(described, indent=1) + "\n")


def record(job: Job, workspace: "Workspace", *, seconds: float, users_per_second: float) -> RunResult:
    """Return the result of a run up to its last completed round.

    Also write the targets and hits of each held-out user to `NAME/per_user.npz` in the results folder, unless the model
    takes user features. A model that was trained on the corpus `other` is evaluated on the main corpus as well.

    Args:
        job: The run and its planned rounds.
        workspace: The folders and corpora of all runs, and the engine whose device evaluates the model.
        seconds: Wall time of the run's rounds.
        users_per_second: Throughput of the group of runs that it trained with.
    """
    name, run, corpus = job.run.name, workspace.run(job), workspace.corpora[job.run.corpus]
    folder, device, unroll = workspace.folder(name), workspace.engine.torch_device(), run.evaluation.unroll
    params_P, rounds = released_model(folder.model, run.model)
    params_P = params_P.to(device)
    after = None if job.run.after is None else f"{job.run.after} after {workspace.began_after.get(name)} rounds"
    heads = score(run.model, params_P, _held_out(run, corpus), unroll=unroll)[1]
    store = TokenStore.open(corpus.path)
    texts = store.held_out.users(np.arange(store.held_out.num_users))
    if not run.model.user_features and texts:
        (workspace.results / name).mkdir(parents=True, exist_ok=True)
        counts = hits_of(run.model, params_P, store.vocabulary.words, texts, unroll=unroll)
        write_counts(workspace.results / name / USERS, counts)
    elsewhere = {}
    if corpus.role == "other" and (main := workspace.corpora.get("main")):
        elsewhere = {"main": _kept(evaluate(run.model, params_P, _held_out(run, main), unroll=unroll))}
    statement = json.loads(folder.statement.read_text(encoding="utf-8"))
    bounds = {**statement["epsilon"], "delta": statement["delta"]}
    return RunResult(
        name=name,
        corpus=corpus.name,
        seed=run.training.reproducible_seed or 0,
        rounds=rounds,
        planned=job.planned,
        settings=settings_of(run, after),
        # A killed process can leave evaluations of rounds later than the newest checkpoint. Leave them out.
        evaluations=[{"round": row["round"], **_kept(row)} for row in folder.read_metrics() if row["round"] <= rounds],
        head_words={str(head): counts.tolist() for head, counts in heads.items()},
        accuracy_elsewhere=elsewhere,
        parameters=run.model.layout.total,
        epsilon={by: _finite(float(value)) for by, value in bounds.items()},
        population=run.plan.population,
        store=corpus.digest,
        seconds=round(seconds, 3),
        users_per_second=round(users_per_second, 2),
        device=device_name(device),
        date=time.strftime("%Y-%m-%d", time.gmtime()),
        commit=commit() or f"unheard {version('unheard')}",
    )


def _held_out(run: Run, corpus: Corpus) -> list[User]:
    """Return the held-out users of a corpus that the evaluations of a run use."""
    return run.evaluation.choose(users_in_turn(TokenStore.open(corpus.path).held_out, run.model))


def _kept(metrics: dict[str, Any]) -> dict[str, float | None]:
    """Return the metrics of `EVALUATED`, rounded to six decimals: one target of 75,000 changes the fifth decimal."""
    return {name: _finite(round(metrics[name], 6)) for name in EVALUATED}


def _finite(value: float) -> float | None:
    """Return the value, or None for infinity and NaN, which JSON lacks. A diverged model has such a loss."""
    return value if math.isfinite(value) else None


def counted(store_path: Path, out: Path) -> None:
    """Count unigrams and bigrams of all training users, and write the accuracies of both models to `out`.

    The counts are exact and therefore not private: use this for a public corpus only.

    Args:
        store_path: Folder of the store.
        out: JSON file to write: both accuracies in percent, the number of targets, and the digest of the store.
    """
    store = TokenStore.open(store_path)
    counts = Counts.of(store.train.users(np.arange(store.train.num_users)), len(store.vocabulary.words))
    texts = store.held_out.users(np.arange(store.held_out.num_users))
    before_N = np.concatenate([tokens[:-1] for tokens in texts]).astype(np.int64)
    target_N = np.concatenate([tokens[1:] for tokens in texts]).astype(np.int64)
    before_N, target_N = before_N[target_N != BOS], target_N[target_N != BOS]
    shares = {}
    for name, baseline in (("unigram", score_unigram), ("bigram", score_bigram)):
        rank_N, _ = baseline(counts, before_N, target_N)
        shares[name] = round(100 * float(np.mean(rank_N == 0)), 4)
    described = {"accuracy_top1": shares, "targets": len(target_N), "store_content": content_digest(store_path)}
    out.write_text(json.dumps(described, indent=1) + "\n")


def content_digest(store: Path) -> str:
    """Return a SHA-256 of the content of a store: its vocabulary and all shards.

    The name of a store is a digest of how it was prepared; it does not depend on the text.
    """
    digest = hashlib.sha256()
    for file in sorted([store / "vocabulary.txt", *store.glob("*/*.offsets"), *store.glob("*/*.tokens")]):
        digest.update(f"{file.relative_to(store)}\0{file.stat().st_size}\0".encode() + file.read_bytes())
    return digest.hexdigest()


def hits_of(
    model: LanguageModel,
    params_P: Tensor,
    words: Sequence[str],
    texts: Sequence[np.ndarray],
    *,
    unroll: int = 80,
    windows_at_once: int = 500,
) -> dict[str, np.ndarray]:
    """Count the targets and hits in each text as AccuracyTop1 counts them. A text is a user or a post.

    Args:
        model: The model.
        params_P: Its parameters, on the device to compute on.
        words: The words of its dictionary.
        texts: Token ids of each text.
        unroll: Length of a window in tokens, as in the evaluations of a run.
        windows_at_once: Number of windows in one batch.

    Returns:
        Arrays with one number per text: `targets` and `hits`; `words` and `word_hits`, which leave out sentence ends;
        `plain` and `plain_hits`, which leave out sentence ends and punctuation; and `head_words`, the sum over targets of
        the head words among the ten predictions.
    """
    params, device = model.layout.split(params_P), params_P.device
    # A token without a letter or digit is punctuation. The names of BOS, EOS and UNK have letters, so they are not.
    is_mark_V = torch.tensor([not any(c.isalnum() for c in word) for word in words], device=device)
    names = ("targets", "hits", "words", "word_hits", "plain", "plain_hits", "head_words")
    counts = {name: np.zeros(len(texts), dtype=np.int64) for name in names}
    windows = [windows_of(tokens, unroll) for tokens in texts]
    owner_K = np.repeat(np.arange(len(windows)), [len(window) for window in windows])
    windows_KW = np.concatenate(windows)
    for start in range(0, len(windows_KW), windows_at_once):
        part = slice(start, start + windows_at_once)
        with torch.no_grad():
            input_BT, target_BT, counts_BT = window_targets(torch.as_tensor(windows_KW[part], device=device))
            logits_NV = model.logits(params, input_BT, None).flatten(0, -2)
            rank_BT = target_rank(logits_NV, target_BT.flatten()).view(target_BT.shape)
            hit_BT = counts_BT & (target_BT != UNK) & (rank_BT == 1)
            word_BT = counts_BT & (target_BT != EOS)
            plain_BT = word_BT & ~is_mark_V[target_BT]
            top_NK = logits_NV.topk(min(GUESSES + 2, len(words)), dim=1).indices.cpu().numpy()
            heads_BT = counts_BT * torch.as_tensor(head_words(top_NK, HEAD), device=device).view(target_BT.shape)
            columns = (counts_BT, hit_BT, word_BT, hit_BT & word_BT, plain_BT, hit_BT & plain_BT, heads_BT)
            for name, column_BT in zip(names, columns, strict=True):
                np.add.at(counts[name], owner_K[part], column_BT.sum(dim=1).cpu().numpy())
    return counts


def write_counts(file: Path, counts: dict[str, np.ndarray]) -> None:
    """Write the counts of each user or post to a compressed `.npz` file, which `bootstrap.load` reads."""
    np.savez_compressed(file, **counts)  # pyright: ignore[reportArgumentType]
