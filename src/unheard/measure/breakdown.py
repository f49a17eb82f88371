"""The same scores, seen by token, by user and by how frequent the word is.

In: `Scores`. Out: plain numbers, ready for JSON. By token is what training's evaluations print; by user every person counts
the same, however much they wrote; by band shows what privacy takes first, if it takes anything: the rare words.
"""

import math
from typing import Any

import numpy as np

from unheard.corpus.vocabulary import EOS, UNK
from unheard.measure.next_word import TOP
from unheard.measure.scores import FIRST_WORD, Scores

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
