"""Scores of every held-out target, and figures by token, by user and by word frequency.

    scores, heads = score(model, params_P, users, unroll=80)
    by_token(scores)        # each target counts once, as in training's evaluations
    by_user(scores)         # each user counts once, however much the user wrote
    by_band(scores, 10_000) # accuracy by word frequency: privacy costs accuracy on rare words first

Input: a model, its parameters, held-out users. Output: `Scores`, one row for each target that counts, in the order of
the text; and plain numbers, ready for JSON. All figures are computed from the same rows, so they describe one pass over
one text. Which targets count is decided in docs/decisions/0004-what-counts-in-accuracy.md.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unheard.corpus.vocabulary import BOS, EOS, UNK
from unheard.engines.distributed.parallel_map import ParallelMap, TokenBatch, sequential_map
from unheard.errors import InvalidValue
from unheard.evaluation.next_word import TOP, losses, target_rank, tokens_at_once
from unheard.models.model import LanguageModel, window_targets
from unheard.updates.user_update import User, windows_of

GUESSES = 10
"""How many of a model's predictions are examined: the paper's head-word histograms take the top 10."""
HEADS = (10, 50, 100)
"""Sizes of the sets of most frequent words in the head-word histograms."""
FIRST_WORD = UNK + 1
"""The id of the dictionary's most frequent word. BOS, EOS and UNK come before it and are not words."""
PERCENTILES = (5, 25, 50, 75, 95)
BANDS = (10, 100, 1_000, 10_000)
"""Last ranks of the bands of word frequency, in the dictionary's order (docs/decisions/0041-bands-and-heads.md)."""


@dataclass(frozen=True, kw_only=True)
class Scores:
    """One row for each target.

    Attributes:
        user_N: The index of the user who wrote it.
        target_N: The token id.
        rank_N: Its rank among the model's predictions: 0 for the first, 1 for the second; GUESSES if not among them.
        loss_N: Its cross-entropy, in nats.
    """

    user_N: np.ndarray
    target_N: np.ndarray
    rank_N: np.ndarray
    loss_N: np.ndarray

    def hits(self, k: int) -> np.ndarray:
        """Which targets are among the top k predictions. A word outside the dictionary is always a mistake."""
        return (self.rank_N < k) & (self.target_N != UNK)

    def __len__(self) -> int:
        return len(self.target_N)


@dataclass(frozen=True, kw_only=True)
class HeadCounts:
    """For the 10, 50 and 100 most frequent words, a histogram over targets of how many of the top 10 predictions they
    are.

    Paper: the last table of the appendix. A model that predicts frequent words only has most of its mass at 10.
    """

    histograms: dict[int, np.ndarray]


def score(
    model: LanguageModel,
    params_P: Tensor,
    users: Sequence[User],
    *,
    unroll: int,
    at_once: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    spread: ParallelMap = sequential_map,
) -> tuple[Scores, HeadCounts]:
    """Score every target of these users, with the windows and ranks of training's evaluations.

    Args:
        model: The model.
        params_P: Its parameters, on the device to evaluate on.
        users: Held-out users.
        unroll: Tokens per window; each window starts from a zero state.
        at_once: Tokens per batch; None: as many as the device takes.
        progress: Called after each batch with the number of users done and their total.
        spread: How the batches are distributed: one after the other, or over ranks (training/worker.py).

    Raises:
        InvalidValue: The users have no text to predict.
    """
    at_once = at_once or tokens_at_once(model, params_P.device)
    heads = {head: np.zeros(GUESSES + 1, dtype=np.int64) for head in HEADS}
    rows: list[tuple[np.ndarray, ...]] = []
    batches, owners = [], []
    for windows_BW, owner_B, features_F in _batches(users, unroll, max(1, at_once // unroll), model):
        batches.append(TokenBatch(windows_BW, features_F))
        owners.append(owner_B)
    results = spread(score_batch, model, params_P, batches)
    for batch, owner_B, row in zip(batches, owners, results, strict=True):
        _, target_BT, counts_BT = (t.numpy() for t in window_targets(torch.from_numpy(batch.rows_BW)))
        N = int(counts_BT.sum())
        rank_N, loss_N, histograms = row[:N].astype(np.int64), row[N : 2 * N], row[2 * N :].astype(np.int64)
        for head, counts in zip(HEADS, histograms.reshape(len(HEADS), -1), strict=True):
            heads[head] += counts
        owner_BT = np.broadcast_to(owner_B[:, None], counts_BT.shape)
        rows.append((owner_BT[counts_BT], target_BT[counts_BT], rank_N, loss_N))
        if progress:
            progress(int(owner_B[-1]) + 1, len(users))
    if not sum(len(row[0]) for row in rows):
        raise InvalidValue("There is no held-out text to measure on. Prepare the corpus with held-out users.")
    user_N, target_N, rank_N, loss_N = (np.concatenate(column) for column in zip(*rows, strict=True))
    scores = Scores(user_N=user_N, target_N=target_N, rank_N=rank_N, loss_N=loss_N)
    return scores, HeadCounts(histograms=heads)


def score_batch(
    model: LanguageModel, params: Mapping[str, Tensor], windows_BW: Tensor, features_F: Tensor | None
) -> np.ndarray:
    """Return the row of one batch: the rank of every target, then their losses, then a histogram for each of HEADS.

    Args:
        model: The model.
        params: Its parameters by layer.
        windows_BW: Windows of token ids, all with the same features of the user.
        features_F: The features of the user, if the model takes them.
    """
    input_BT, target_BT, counts_BT = window_targets(windows_BW)
    logits_NV = model.logits(params, input_BT, features_F)[counts_BT]
    rank_N, loss_N, top_NK = _ranks(logits_NV, target_BT[counts_BT])
    return np.concatenate([rank_N, loss_N, *(_histogram(top_NK, head) for head in HEADS)])


def _batches(
    users: Sequence[User], unroll: int, size: int, model: LanguageModel
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray | None]]:
    """Windows, their users and features: of many users together, or of one at a time if the model takes features."""
    groups = [[i] for i in range(len(users))] if model.user_features else [list(range(len(users)))]
    for group in groups:
        windows = [windows_of(users[i].tokens, unroll) for i in group]
        if not any(len(w) for w in windows):
            continue
        windows_KW, owner_K = np.concatenate(windows), np.repeat(group, [len(w) for w in windows])
        features_F = users[group[0]].features if model.user_features else None
        for start in range(0, len(windows_KW), size):
            yield windows_KW[start : start + size], owner_K[start : start + size], features_F


def _ranks(logits_NV: Tensor, target_N: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The target's rank among all predictions (UNK is one of them), its loss, and the top predictions."""
    most = min(GUESSES + 2, logits_NV.shape[1])  # two more, since BOS and UNK are never suggested
    top_NK = logits_NV.topk(most, dim=1).indices
    rank_N = target_rank(logits_NV, target_N)  # as in training's evaluations, so that one model has one accuracy
    rank_N = torch.where((rank_N > 0) & (rank_N <= GUESSES), rank_N - 1, GUESSES)
    return rank_N.cpu().numpy(), losses(logits_NV, target_N).cpu().numpy(), top_NK.cpu().numpy()


def _histogram(top_NK: np.ndarray, head: int) -> np.ndarray:
    """How many of the top 10 predictions of each row (BOS and UNK left out) are head words, as a histogram over
    rows."""
    may_NK = (top_NK != BOS) & (top_NK != UNK)
    suggested_NK = may_NK & (np.cumsum(may_NK, axis=1) <= GUESSES)
    in_head_NK = suggested_NK & (top_NK >= FIRST_WORD) & (top_NK < FIRST_WORD + head)
    return np.bincount(in_head_NK.sum(axis=1), minlength=GUESSES + 1)


def by_token(scores: Scores) -> dict[str, float]:
    """Accuracies, loss and perplexity over all targets, each counted once."""
    is_word_N = scores.target_N != EOS
    return {
        **{f"accuracy_top{k}": float(scores.hits(k).mean()) for k in TOP},
        "accuracy_top1_words": float(scores.hits(1)[is_word_N].sum() / max(is_word_N.sum(), 1)),
        "loss": float(scores.loss_N.mean()),
        "perplexity": _perplexity(float(scores.loss_N.mean())),
        "tokens": len(scores),
    }


def by_user(scores: Scores) -> dict[str, dict[str, float]]:
    """Mean and percentiles over users of each user's accuracies and perplexity. The number of users is not returned."""
    users_U, of_user_N = np.unique(scores.user_N, return_inverse=True)
    targets_U = np.bincount(of_user_N, minlength=len(users_U))
    columns = {f"accuracy_top{k}": np.bincount(of_user_N, weights=scores.hits(k)) / targets_U for k in TOP}
    mean_loss_U = np.bincount(of_user_N, weights=scores.loss_N) / targets_U
    columns["perplexity"] = np.exp(np.minimum(mean_loss_U, 700.0))
    return {name: _distribution(values_U) for name, values_U in columns.items()}


def by_band(scores: Scores, vocabulary_size: int) -> list[dict[str, Any]]:
    """Accuracies on the targets of each band of word frequency; `share` is its fraction of all targets.

    Args:
        scores: The scores of all targets.
        vocabulary_size: The number of words; the last band ends there.
    """
    last_word = vocabulary_size - FIRST_WORD
    bands = [_band(scores, "end of sentence", scores.target_N == EOS)]
    first = 1
    for last in (*BANDS, math.inf):
        if first > last_word:
            break
        last = int(min(last, last_word))
        frequency_rank_N = scores.target_N - FIRST_WORD + 1
        inside_N = (frequency_rank_N >= first) & (frequency_rank_N <= last)
        bands.append({**_band(scores, f"ranks {first:,}–{last:,}", inside_N), "first": first, "last": last})
        first = last + 1
    return [*bands, _band(scores, "not in the dictionary", scores.target_N == UNK)]


def _band(scores: Scores, name: str, inside_N: np.ndarray) -> dict[str, Any]:
    targets = int(inside_N.sum())
    accuracies = {f"accuracy_top{k}": float(scores.hits(k)[inside_N].mean()) if targets else None for k in TOP}
    return {"band": name, "share": targets / max(len(scores), 1), "targets": targets, **accuracies}


def _distribution(values_U: np.ndarray) -> dict[str, float]:
    marks = np.percentile(values_U, PERCENTILES)
    return {"mean": float(values_U.mean()), **{f"p{p}": float(m) for p, m in zip(PERCENTILES, marks, strict=True)}}


def _perplexity(loss: float) -> float:
    return math.exp(min(loss, 700.0))
