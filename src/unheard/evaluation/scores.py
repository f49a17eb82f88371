"""The same scores, seen by token, by user and by how frequent the word is.

In: `Scores`. Out: plain numbers, ready for JSON. By token is what training's evaluations print; by user every person counts
the same, however much they wrote; by band shows what privacy takes first, if it takes anything: the rare words.
Every held-out target, scored once: where the model ranked it, and how surprised it was.

In: a model, its parameters, held-out users. Out: `Scores`, one row for each target that counts, in the order of the text.
Everything else in this room is arithmetic on these rows, so that a figure by user, by band or by token is about one and the
same pass over one and the same text. What counts as a target is decided in docs/decisions/0004-what-counts-in-accuracy.md.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unheard.corpus.vocabulary import BOS, EOS, UNK
from unheard.engines.distributed.parallel_map import Batch, Spread, in_turn
from unheard.errors import InvalidValue
from unheard.evaluation.next_word import TOP, losses, place, tokens_at_once
from unheard.models.model import LanguageModel, window_targets
from unheard.updates.users import User, windows_of

GUESSES = 10
"""How many of a model's guesses are looked at: the paper's head-word histograms take the top 10."""
HEADS = (10, 50, 100)
FIRST_WORD = UNK + 1
"""The id of the dictionary's most frequent word: BOS, EOS and UNK stand before it and are no words."""


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Rows by target: whose text it stands in, what it was, its place among the guesses, its loss."""

    user_N: np.ndarray
    target_N: np.ndarray
    place_N: np.ndarray
    """0 for the best guess, 1 for the second ...; GUESSES or more: not among them."""
    loss_N: np.ndarray

    def hits(self, k: int) -> np.ndarray:
        """Which targets are among the first k guesses. A word outside the dictionary is always a mistake."""
        return (self.place_N < k) & (self.target_N != UNK)

    def __len__(self) -> int:
        return len(self.target_N)


@dataclass(frozen=True, kw_only=True)
class HeadCounts:
    """How many of the top 10 suggestions lie among the 10, 50, 100 most frequent words: a histogram of 0 to 10 for each."""

    histograms: dict[int, np.ndarray]


def score(
    model: LanguageModel,
    params_P: Tensor,
    users: Sequence[User],
    *,
    unroll: int,
    at_once: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    spread: Spread = in_turn,
) -> tuple[Scores, HeadCounts]:
    """Score every target of these users, text read in windows of `unroll` from a zero state, as in training's evaluations."""
    at_once = at_once or tokens_at_once(model, params_P.device)
    heads = {head: np.zeros(GUESSES + 1, dtype=np.int64) for head in HEADS}
    rows: list[tuple[np.ndarray, ...]] = []
    batches, owners = [], []
    for windows_BW, owner_B, features_F in _batches(users, unroll, max(1, at_once // unroll), model):
        batches.append(Batch(windows_BW, features_F))
        owners.append(owner_B)
    found = spread(places, model, params_P, batches)
    for batch, owner_B, row in zip(batches, owners, found, strict=True):
        _, target_BT, counts_BT = (t.numpy() for t in window_targets(torch.from_numpy(batch.rows_BW)))
        N = int(counts_BT.sum())
        place_N, loss_N, histograms = row[:N].astype(np.int64), row[N : 2 * N], row[2 * N :].astype(np.int64)
        for head, counts in zip(HEADS, histograms.reshape(len(HEADS), -1), strict=True):
            heads[head] += counts
        owner_BT = np.broadcast_to(owner_B[:, None], counts_BT.shape)
        rows.append((owner_BT[counts_BT], target_BT[counts_BT], place_N, loss_N))
        if progress:
            progress(int(owner_B[-1]) + 1, len(users))
    if not sum(len(row[0]) for row in rows):
        raise InvalidValue("There is no held-out text to measure on. Prepare the corpus with held-out users.")
    user_N, target_N, place_N, loss_N = (np.concatenate(column) for column in zip(*rows, strict=True))
    scores = Scores(user_N=user_N, target_N=target_N, place_N=place_N, loss_N=loss_N)
    return scores, HeadCounts(histograms=heads)


def places(
    model: LanguageModel, params: Mapping[str, Tensor], windows_BW: Tensor, features_F: Tensor | None
) -> np.ndarray:
    """One batch: the place of every target, then their losses, then a histogram for each of HEADS."""
    input_BT, target_BT, counts_BT = window_targets(windows_BW)
    logits_NV = model.logits(params, input_BT, features_F)[counts_BT]
    place_N, loss_N, top_NK = _places(logits_NV, target_BT[counts_BT])
    return np.concatenate([place_N, loss_N, *(_histogram(top_NK, head) for head in HEADS)])


def _batches(
    users: Sequence[User], unroll: int, size: int, model: LanguageModel
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray | None]]:
    """Windows with their owners: of many users together, or of one at a time if the model looks at features."""
    groups = [[i] for i in range(len(users))] if model.user_features else [list(range(len(users)))]
    for group in groups:
        windows = [windows_of(users[i].tokens, unroll) for i in group]
        if not any(len(w) for w in windows):
            continue
        windows_KW, owner_K = np.concatenate(windows), np.repeat(group, [len(w) for w in windows])
        features_F = users[group[0]].features if model.user_features else None
        for start in range(0, len(windows_KW), size):
            yield windows_KW[start : start + size], owner_K[start : start + size], features_F


def _places(logits_NV: Tensor, target_N: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The target's place among all guesses (UNK is one: a model that says it wastes a guess), its loss, and the guesses."""
    most = min(GUESSES + 2, logits_NV.shape[1])  # two more, since BOS and UNK are not suggestions
    top_NK = logits_NV.topk(most, dim=1).indices
    place_N = place(logits_NV, target_N)  # as in training's evaluations, so that one model has one accuracy
    place_N = torch.where((place_N > 0) & (place_N <= GUESSES), place_N - 1, GUESSES)
    return place_N.cpu().numpy(), losses(logits_NV, target_N).cpu().numpy(), top_NK.cpu().numpy()


def _histogram(top_NK: np.ndarray, head: int) -> np.ndarray:
    """Of each row's first 10 suggestions (BOS and UNK are none), how many are head words; counted over rows."""
    may_NK = (top_NK != BOS) & (top_NK != UNK)
    suggested_NK = may_NK & (np.cumsum(may_NK, axis=1) <= GUESSES)
    in_head_NK = suggested_NK & (top_NK >= FIRST_WORD) & (top_NK < FIRST_WORD + head)
    return np.bincount(in_head_NK.sum(axis=1), minlength=GUESSES + 1)


PERCENTILES = (5, 25, 50, 75, 95)
BANDS = (10, 100, 1_000, 10_000)
"""Last ranks of the bands of frequency, by the dictionary's own order (docs/decisions/0041-bands-and-heads.md)."""


def by_token(scores: Scores) -> dict[str, float]:
    """Each target counts once."""
    is_word_N = scores.target_N != EOS
    return {
        **{f"accuracy_top{k}": float(scores.hits(k).mean()) for k in TOP},
        "accuracy_top1_words": float(scores.hits(1)[is_word_N].sum() / max(is_word_N.sum(), 1)),
        "loss": float(scores.loss_N.mean()),
        "perplexity": _perplexity(float(scores.loss_N.mean())),
        "tokens": len(scores),
    }


def by_user(scores: Scores) -> dict[str, dict[str, float]]:
    """Each user counts once: the mean over users, and percentiles of them. How many they are is not said."""
    users_U, of_user_N = np.unique(scores.user_N, return_inverse=True)
    targets_U = np.bincount(of_user_N, minlength=len(users_U))
    columns = {f"accuracy_top{k}": np.bincount(of_user_N, weights=scores.hits(k)) / targets_U for k in TOP}
    mean_loss_U = np.bincount(of_user_N, weights=scores.loss_N) / targets_U
    columns["perplexity"] = np.exp(np.minimum(mean_loss_U, 700.0))
    return {name: _spread(values_U) for name, values_U in columns.items()}


def by_band(scores: Scores, vocabulary_size: int) -> list[dict[str, Any]]:
    """Accuracy on targets of each band; `share` is the part of all targets that it holds."""
    last_word = vocabulary_size - FIRST_WORD
    found = [_band(scores, "end of sentence", scores.target_N == EOS)]
    first = 1
    for last in (*BANDS, math.inf):
        if first > last_word:
            break
        last = int(min(last, last_word))
        rank_N = scores.target_N - FIRST_WORD + 1
        inside_N = (rank_N >= first) & (rank_N <= last)
        found.append({**_band(scores, f"ranks {first:,}–{last:,}", inside_N), "first": first, "last": last})
        first = last + 1
    return [*found, _band(scores, "not in the dictionary", scores.target_N == UNK)]


def _band(scores: Scores, name: str, inside_N: np.ndarray) -> dict[str, Any]:
    targets = int(inside_N.sum())
    accuracies = {f"accuracy_top{k}": float(scores.hits(k)[inside_N].mean()) if targets else None for k in TOP}
    return {"band": name, "share": targets / max(len(scores), 1), "targets": targets, **accuracies}


def _spread(values_U: np.ndarray) -> dict[str, float]:
    marks = np.percentile(values_U, PERCENTILES)
    return {"mean": float(values_U.mean()), **{f"p{p}": float(m) for p, m in zip(PERCENTILES, marks, strict=True)}}


def _perplexity(loss: float) -> float:
    return math.exp(min(loss, 700.0))
