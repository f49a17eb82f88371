"""Measure the last model of a run on all held-out users, and record where a result comes from.

The input is a run folder of `private_run.py`. The outputs are `per_user.npz` and `per_post.npz` (targets and hits of each
held-out user and of each post of the paper's kind of test set) and `facts.json` (commit, digest of the store, accuracies,
suggestions). None of them holds text.

    measure(Path("WORK/runs/private"), "cuda")
    counted(Path("WORK/reviews_81"), Path("counted.json"))      unigram and bigram, counted without privacy

Paper: AccuracyTop1 of the appendix "Accuracy metrics"; the test set of 75,122 tokens.
"""

import hashlib
import json
import platform
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:  # the page is written without torch
    from torch import Tensor

    from unheard.models.model import LanguageModel

HERE = Path(__file__).resolve().parent
TEST_TOKENS = 75_122
"""Size of the paper's kind of test set: random posts of held-out users with this many predicted tokens."""
PROMPTS = ("The room was very", "We would definitely", "The staff at the", "Breakfast was", "Next time I will")
"""Beginnings of sentences of our own. What a model suggests after them is recorded with its measures."""


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
    model, params_P, words = released.run.model, released.params_P.to(device), released.vocabulary.words
    counts = hits_of(model, params_P, words, store.held_out.users(np.arange(store.held_out.num_users)))
    of_posts = hits_of(model, params_P, words, posts)
    write_counts(folder / "per_user.npz", counts)
    write_counts(folder / "per_post.npz", of_posts)
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
    """Write the accuracy of a unigram and a bigram model with the counts of all training users to `out`.

    The counts are exact, so this is for a public corpus only.
    """
    from unheard import TokenStore
    from unheard.corpus.vocabulary import BOS
    from unheard.evaluation.measures import Counts, score_bigram, score_unigram

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
    """SHA-256 over the vocabulary and all shards.

    The name of a store only says how it was prepared, not from which text.
    """
    digest = hashlib.sha256()
    for file in sorted([store / "vocabulary.txt", *store.glob("*/*.offsets"), *store.glob("*/*.tokens")]):
        digest.update(f"{file.relative_to(store)}\0{file.stat().st_size}\0".encode() + file.read_bytes())
    return digest.hexdigest()


def hits_of(
    model: "LanguageModel",
    params_P: "Tensor",
    words: Sequence[str],
    texts: Sequence[np.ndarray],
    *,
    unroll: int = 80,
    windows_at_once: int = 500,
) -> dict[str, np.ndarray]:
    """Targets and hits in each text (the tokens of a user or of a post), counted like AccuracyTop1.

    Args:
        model: The model.
        params_P: Its parameters, on the device to compute on.
        words: The words of its dictionary.
        texts: Tokens of each text.
        unroll: Tokens of context, as in the evaluations of a run.
        windows_at_once: Windows of `unroll` tokens in one batch.

    Returns:
        For each text the number of `targets` and `hits`; `words` and `word_hits` without sentence ends; `plain` and
        `plain_hits` also without punctuation.
    """
    import torch

    from unheard.corpus.vocabulary import EOS, UNK
    from unheard.evaluation.next_word import target_rank
    from unheard.models.model import window_targets
    from unheard.updates.user_update import windows_of

    params, device = model.layout.split(params_P), params_P.device
    # BOS, EOS and UNK count as words here; EOS is left out where a rule says so.
    is_mark_V = torch.tensor([not any(c.isalnum() for c in word) for word in words], device=device)
    names = ("targets", "hits", "words", "word_hits", "plain", "plain_hits")
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
            columns = (counts_BT, hit_BT, word_BT, hit_BT & word_BT, plain_BT, hit_BT & plain_BT)
            for name, column_BT in zip(names, columns, strict=True):
                np.add.at(counts[name], owner_K[part], column_BT.sum(dim=1).cpu().numpy())
    return counts


def write_counts(file: Path, counts: dict[str, np.ndarray]) -> None:
    """Write the counts of each user or post; `bootstrap.py` reads them."""
    np.savez_compressed(file, **counts)  # pyright: ignore[reportArgumentType]
