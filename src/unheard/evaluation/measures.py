"""All measures of a released model on held-out users, written as measures.json into the run folder.

    measures = full_measures(Measured(model=..., params_P=..., ...), run.evaluation)
    write_measures(folder, measures)

Input: a model, held-out users and the vocabulary. Output: accuracies by token, by user and by word frequency, the
paper's head-word histograms (its last table), baselines on the same targets, and predictions after a few prompts.
`report/` reads the file without torch. The numbers are exact functions of held-out users' text: they have no noise, and
held-out users have no guarantee. Nothing here reads a training user.

**Scores.** All figures are computed from the same rows, one for each target that counts, in the order of the text. Which
targets count is decided in docs/decisions/0004-what-counts-in-accuracy.md.

    scores, heads = score(model, params_P, users, unroll=80)
    by_token(scores)        # each target counts once, as in training's evaluations
    by_user(scores)         # each user counts once, however much the user wrote
    by_band(scores, 10_000) # accuracy by word frequency: privacy costs accuracy on rare words first

**Baselines** on the same text as a model: the most frequent word, and a bigram model with back-off.

    score_baselines(users, other_texts, vocabulary_size, are_public=False)     # {"bigram with back-off": Scores, ...}

Input: held-out users, and text of other users to count words in. Output: `Scores` with the same rows as a model's. The
counts are never of training users' text: counting it without noise would be a release outside the ledger. They are of
the corpus's public users if it has some, else of held-out users, each scored by counts of the others
(docs/decisions/0040-baselines-without-training-users.md).
"""

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unheard.corpus.tokenizers import Tokenizer
from unheard.corpus.vocabulary import BOS, EOS, UNK, Vocabulary
from unheard.engines.distributed.parallel_map import ParallelMap, sequential_map
from unheard.errors import InvalidValue
from unheard.evaluation.next_word import TOP, Evaluation, batches_of_users, losses, predict, target_rank, tokens_at_once
from unheard.models.model import LanguageModel, window_targets
from unheard.run_folder import MEASURES_FORMAT, RunFolder, replace_file
from unheard.updates.user_update import User

GUESSES = 10
"""How many of a model's predictions are examined: the paper's head-word histograms take the top 10."""
HEADS = (10, 50, 100)
"""Sizes of the sets of most frequent words in the head-word histograms."""
FIRST_WORD = UNK + 1
"""The id of the dictionary's most frequent word. BOS, EOS and UNK come before it and are not words."""
PERCENTILES = (5, 25, 50, 75, 95)
BANDS = (10, 100, 1_000, 10_000)
"""Last ranks of the bands of word frequency, in the dictionary's order (docs/decisions/0041-bands-and-heads.md)."""
DISCOUNT = 0.75
"""Absolute discounting (Ney, Essen and Kneser, 1994): subtracted from every count of a pair, and given to unseen
pairs."""
FOLDS = 5
"""Folds of held-out users, where they are scored by counts of the others."""
FIT_TOKENS = 2_000_000
"""The most tokens to count in: more would be slow and would not change the figures."""


@dataclass(frozen=True, kw_only=True)
class Scores:
    """The model's predictions on held-out text, with one row for each target (each next word).

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
    """How many of the top 10 predictions are among the 10, 50 and 100 most frequent words, as histograms over targets.

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
    parallel_map: ParallelMap = sequential_map,
) -> tuple[Scores, HeadCounts]:
    """Score every target of these users, with the windows and ranks of training's evaluations.

    Args:
        model: The model.
        params_P: Its parameters, on the device to evaluate on.
        users: Held-out users.
        unroll: Tokens per window; each window starts from a zero state.
        at_once: Tokens per batch; None: as many as the device takes.
        progress: Called after each batch with the number of users done and their total.
        parallel_map: How the batches are distributed: one after the other, or over ranks (training/worker.py).

    Raises:
        InvalidValue: The users have no text to predict.
    """
    at_once = at_once or tokens_at_once(model, params_P.device)
    heads = {head: np.zeros(GUESSES + 1, dtype=np.int64) for head in HEADS}
    rows: list[tuple[np.ndarray, ...]] = []
    batches = list(batches_of_users(users, unroll, max(1, at_once // unroll), bool(model.user_features)))
    results = parallel_map(score_batch, model, params_P, [batch for batch, _ in batches])
    for (batch, owner_B), row in zip(batches, results, strict=True):
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
    return _joined(rows), HeadCounts(histograms=heads)


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


def _ranks(logits_NV: Tensor, target_N: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The target's rank among all predictions (UNK is one of them), its loss, and the top predictions."""
    most = min(GUESSES + 2, logits_NV.shape[1])  # two more, since BOS and UNK are never suggested
    top_NK = logits_NV.topk(most, dim=1).indices
    rank_N = target_rank(logits_NV, target_N)  # as in training's evaluations, so that one model has one accuracy
    rank_N = torch.where((rank_N > 0) & (rank_N <= GUESSES), rank_N - 1, GUESSES)
    return rank_N.cpu().numpy(), losses(logits_NV, target_N).cpu().numpy(), top_NK.cpu().numpy()


def _histogram(top_NK: np.ndarray, head: int) -> np.ndarray:
    """How many of the top 10 predictions of each row are head words (never BOS or UNK), as a histogram over rows."""
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


@dataclass(frozen=True)
class Counts:
    """Counts of words and of pairs of successive words.

    Attributes:
        unigram_V: How often each word occurs as a target.
        pairs_M: The pairs that occur, as previous * V + word, sorted.
        times_M: How often each of them occurs.
    """

    unigram_V: np.ndarray
    pairs_M: np.ndarray
    times_M: np.ndarray

    @classmethod
    def of(cls, texts: Sequence[np.ndarray], size: int) -> "Counts":
        """Count the words and the pairs of words of texts.

        Args:
            texts: One array of token ids for each user.
            size: The number of token ids of the vocabulary.
        """
        empty = [np.empty(0, dtype=np.int64)]
        before = np.concatenate([text[:-1].astype(np.int64) for text in texts] or empty)
        word = np.concatenate([text[1:].astype(np.int64) for text in texts] or empty)
        before, word = before[word != BOS], word[word != BOS]
        pairs, times = np.unique(before * size + word, return_counts=True)
        return cls(np.bincount(word, minlength=size), pairs, times)

    @cached_property
    def probs_V(self) -> np.ndarray:
        """Unigram probabilities with add-one smoothing; 0 for BOS, which is never a target."""
        raised_V = self.unigram_V + 1.0
        raised_V[BOS] = 0.0
        return raised_V / raised_V.sum()

    @cached_property
    def order(self) -> np.ndarray:
        """Words by falling frequency, ties by the dictionary's rank; without UNK and BOS, which are never predicted."""
        order = np.argsort(-self.unigram_V, kind="stable")
        return order[(order != BOS) & (order != UNK)]

    def after(self, previous: int) -> tuple[np.ndarray, np.ndarray]:
        """The words that occur after `previous`, and how often."""
        size = len(self.unigram_V)
        begin, end = np.searchsorted(self.pairs_M, [previous * size, (previous + 1) * size])
        return self.pairs_M[begin:end] - previous * size, self.times_M[begin:end]


def score_unigram(counts: Counts, before_N: np.ndarray, target_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return ranks and losses of a model that always predicts the most frequent words.

    Args:
        counts: Counts of words and of pairs.
        before_N: The word before each target.
        target_N: The targets.
    """
    rank_V = np.full(len(counts.unigram_V), GUESSES)
    rank_V[counts.order[:GUESSES]] = np.arange(len(counts.order[:GUESSES]))
    return rank_V[target_N], -np.log(counts.probs_V[target_N])


def score_bigram(counts: Counts, before_N: np.ndarray, target_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return ranks and losses of a bigram model that backs off to unigrams (absolute discounting).

    Args:
        counts: Counts of words and of pairs.
        before_N: The word before each target.
        target_N: The targets.
    """
    rank_N, loss_N = np.full(len(target_N), GUESSES), np.zeros(len(target_N))
    for previous in np.unique(before_N):
        rows = np.flatnonzero(before_N == previous)
        probs_V, guesses = bigram(counts, int(previous))
        loss_N[rows] = -np.log(probs_V[target_N[rows]])
        for rank, word in enumerate(guesses):
            rank_N[rows[target_N[rows] == word]] = rank
    return rank_N, loss_N


def bigram(counts: Counts, previous: int) -> tuple[np.ndarray, np.ndarray]:
    """Return P(word | previous) for every word, and the ten most likely words.

    Args:
        counts: Counts of words and of pairs.
        previous: The id of the word before.
    """
    seen, times = counts.after(previous)
    unseen_mass = 1.0 - counts.probs_V[seen].sum()
    probs_V = counts.probs_V.copy()
    if len(seen):
        discount = DISCOUNT if unseen_mass > 1e-12 else 0.0
        probs_V *= discount * len(seen) / times.sum() / max(unseen_mass, 1e-12)
        probs_V[seen] = (times - discount) / times.sum()
    may = seen[(seen != UNK) & (seen != BOS)]
    rest = counts.order[: GUESSES + len(seen)]  # unseen words are ordered by their own frequency
    may = np.concatenate([may, rest[~np.isin(rest, seen)][:GUESSES]])
    return probs_V, may[np.lexsort((may, -probs_V[may]))][:GUESSES]


BASELINES = {"most frequent word": score_unigram, "bigram with back-off": score_bigram}


def score_baselines(
    users: Sequence[User], others: Sequence[np.ndarray], size: int, *, are_public: bool
) -> dict[str, Scores]:
    """Score held-out users by each baseline.

    Args:
        users: The users to score.
        others: Text to count in: public text, or the text of all held-out users, with `users` first and in order.
        size: The size of the vocabulary.
        are_public: Whether `others` is public text. Else each user is scored by the counts of other folds.

    Returns:
        Scores by the name of the baseline; empty if there are fewer than two users to count in.
    """
    if not are_public and len(others) < 2:
        return {}  # one user cannot be scored by the counts of the others
    folds = 1 if are_public else min(FOLDS, len(others))
    parts: dict[str, list[tuple[np.ndarray, ...]]] = {name: [] for name in BASELINES}
    for fold in range(folds):
        fitted = Counts.of([t for i, t in enumerate(others) if are_public or i % folds != fold], size)
        user_N, before_N, target_N = _targets([(i, u) for i, u in enumerate(users) if i % folds == fold])
        for name, scored in BASELINES.items():
            parts[name].append((user_N, target_N, *scored(fitted, before_N, target_N)))
    return {name: _joined(part) for name, part in parts.items()}


def _targets(users: Sequence[tuple[int, User]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For every target that counts: the user's index, the token before it, and the token."""
    empty = [np.empty(0, dtype=np.int64)]
    numbers = np.concatenate([np.full(max(len(u.tokens) - 1, 0), i) for i, u in users] or empty)
    before = np.concatenate([u.tokens[:-1].astype(np.int64) for _, u in users] or empty)
    target = np.concatenate([u.tokens[1:].astype(np.int64) for _, u in users] or empty)
    counts = target != BOS
    return numbers[counts], before[counts], target[counts]


def _joined(parts: list[tuple[np.ndarray, ...]]) -> Scores:
    """Scores of all parts, each of them the columns of `Scores` for some targets."""
    user_N, target_N, rank_N, loss_N = (np.concatenate(column) for column in zip(*parts, strict=True))
    return Scores(user_N=user_N, target_N=target_N, rank_N=rank_N, loss_N=loss_N)


SUGGESTIONS = 5
"""Predicted words per prompt."""
logger = logging.getLogger("unheard.evaluation")
PROMPTS = ("how are", "i don't", "what do you", "have a nice", "thank you so")
"""English beginnings to continue. `prompts_for` returns none for a vocabulary of another language."""


def prompts_for(vocabulary: Mapping[str, Any]) -> Sequence[str]:
    """Return the usual prompts if they may be in the language of a store's text.

    >>> prompts_for({"kind": "public", "language": "de"})
    ()

    Args:
        vocabulary: The record of the vocabulary in corpus.json. A vocabulary that is not a public list names no language.
    """
    return PROMPTS if vocabulary.get("language", "en") == "en" else ()


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A model with the text to evaluate it on.

    Args:
        model: The model.
        params_P: Its parameters.
        vocabulary: The words of its output layer.
        tokenizer: How prompts are split into tokens.
        held_out: Held-out users in the store's order: at least those that are evaluated. The baselines count in all.
        public: Text of the corpus's public users, if it has some: the baselines are then fitted on it.
    """

    model: LanguageModel
    params_P: Tensor
    vocabulary: Vocabulary
    tokenizer: Tokenizer
    held_out: Sequence[User]
    public: Sequence[np.ndarray] = field(default=())


def full_measures(
    what: Measured,
    how: Evaluation,
    *,
    prompts: Sequence[str] = PROMPTS,
    progress: Callable[[int, int], None] | None = None,
    parallel_map: ParallelMap = sequential_map,
) -> dict[str, Any]:
    """Compute the content of measures.json.

    Args:
        what: The model and the text.
        how: How much held-out text, in which windows.
        prompts: Texts whose most likely next words are included.
        progress: Called with the number of users done and their total.
        parallel_map: How the batches are distributed: one after the other, or over ranks (training/worker.py).
    """
    users, size = how.choose(what.held_out), len(what.vocabulary)
    scores, heads = score(
        what.model, what.params_P, users, unroll=how.unroll, progress=progress, parallel_map=parallel_map
    )
    others = what.public or [user.tokens for user in what.held_out]
    baselines = score_baselines(users, others, size, are_public=bool(what.public))
    measures = {
        "format": MEASURES_FORMAT,
        "max_tokens": how.max_tokens,
        "unroll": how.unroll,
        "tokens": by_token(scores),
        "users": by_user(scores),
        "bands": by_band(scores, size),
        "head_words": {str(head): counts.tolist() for head, counts in heads.histograms.items()},
        "baselines": {
            name: {"tokens": by_token(s), "users": by_user(s), "bands": by_band(s, size)}
            for name, s in baselines.items()
        },
        "baselines_fitted_on": "the corpus's public users" if what.public else "other held-out users",
        "prompts": [{"text": text, "words": _predictions(what, text)} for text in prompts],
    }
    return _finite(measures)


def write_measures(folder: RunFolder, measures: dict[str, Any]) -> None:
    """Write measures.json, with the digest of the model that it describes.

    Args:
        folder: The run folder.
        measures: The result of `full_measures`.
    """
    content = {**measures, "model_sha256": folder.model_digest()}
    replace_file(folder.measures, (json.dumps(content, indent=1, allow_nan=False) + "\n").encode())
    logger.info("%s: measures.json written", folder.path.name)


def _predictions(what: Measured, text: str) -> list[dict[str, Any]]:
    words = predict(what.model, what.params_P, what.vocabulary, what.tokenizer.split(text), SUGGESTIONS)
    return [{"word": word, "probability": p} for word, p in words if math.isfinite(p)]


def _finite(value: Any) -> Any:
    """The value with null for NaN and infinity, which JSON does not have: a model that diverged has no loss."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
