"""Every held-out target, scored once: where the model ranked it, and how surprised it was.

In: a model, its parameters, held-out users. Out: `Scores`, one row for each target that counts, in the order of the text.
Everything else in this room is arithmetic on these rows, so that a figure by user, by band or by token is about one and the
same pass over one and the same text. What counts as a target is decided in docs/decisions/0004-what-counts-in-accuracy.md.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from unheard.corpus.vocabulary import BOS, UNK
from unheard.engines.spread import Batch, Spread, in_turn
from unheard.errors import InvalidValue
from unheard.measure.next_word import losses, place, tokens_at_once
from unheard.models.model import LanguageModel, window_targets
from unheard.updates.user import User, windows_of

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
