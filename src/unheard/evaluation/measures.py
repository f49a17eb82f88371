"""Computes all measures of a released model on held-out users and writes them to measures.json in the run folder.

    measures = full_measures(Measured(model=..., params_P=..., ...), run.evaluation)
    write_measures(folder, measures)

Input: a model, held-out users and the vocabulary. Output: accuracies by token, by user and by word frequency, the
paper's head-word histograms (its last table), baselines on the same targets, and predictions after a few prompts.
`report/` reads the file without torch. The measures are computed from held-out users' text without noise, so held-out
users have no privacy guarantee. This module never reads the text of training users.

**Scores.** All measures are computed from the same rows. There is one row for each target that counts, in the order of
the text. docs/decisions/0004-what-counts-in-accuracy.md decides which targets count.

    scores, heads = score(model, params_P, users, unroll=80)
    by_token(scores)        # each target counts once, as in training's evaluations
    by_user(scores)         # each user counts once, even if one user wrote more than another
    by_band(scores, 10_000) # accuracy by word frequency: private training loses accuracy on rare words first

**Baselines.** Two simple models are scored on the same text: one always predicts the most frequent words, the other is
a bigram model with back-off.

    score_baselines(users, other_texts, vocabulary_size, are_public=False)     # {"bigram with back-off": Scores, ...}

Input: held-out users, and text of other users in which words are counted. Output: `Scores` with the same rows as a
model's. Words of training users are never counted: an exact count would be a release that no ledger records. If the
store has public users, their words are counted. Otherwise the words of held-out users are counted, and each held-out
user is scored with the counts of other held-out users (docs/decisions/0040-baselines-without-training-users.md).
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
from unheard.evaluation.next_word import (
    TOP,
    Evaluation,
    batches_of_users,
    losses,
    perplexity,
    predict,
    target_rank,
    tokens_at_once,
)
from unheard.models.model import LanguageModel, window_targets
from unheard.run_folder import MEASURES_FORMAT, RunFolder, record_digest, replace_file
from unheard.updates.user_update import User

GUESSES = 10
"""The number of predictions per target that are examined. The paper's head-word histograms use the top 10."""
HEADS = (10, 50, 100)
"""The numbers of most frequent words ("head words") for which a histogram is computed."""
FIRST_WORD = UNK + 1
"""The id of the dictionary's most frequent word. BOS, EOS and UNK come before it and are not words."""
PERCENTILES = (5, 25, 50, 75, 95)
BANDS = (10, 100, 1_000, 10_000)
"""The last rank of each band of word frequency. Ranks are positions in the dictionary, which is sorted by frequency
(docs/decisions/0041-bands-and-heads.md)."""
DISCOUNT = 0.75
"""The discount of absolute discounting (Ney, Essen and Kneser, 1994). It is subtracted from the count of each pair of
words that was seen, and its mass is given to the pairs that were not seen."""
FOLDS = 5
"""The number of folds of held-out users. Each fold is scored with the word counts of the other folds."""
FIT_TOKENS = 2_000_000
"""The number of tokens to count words in, at most. More tokens would take longer and hardly change the measures."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Scores:
    """How well a model predicts held-out text, with one row for each target (each next word).

    Attributes:
        user_N: The index of the user who wrote the target.
        target_N: The token id of the target.
        rank_N: The rank of the target among the model's predictions: 0 for the most likely word, 1 for the second;
            GUESSES if the target is not among the top GUESSES words.
        loss_N: The cross-entropy of the target, in nats.
    """

    user_N: np.ndarray
    target_N: np.ndarray
    rank_N: np.ndarray
    loss_N: np.ndarray

    def hits(self, k: int) -> np.ndarray:
        """Return which targets are among the top k predictions, bool [N]. UNK as a target is always a mistake."""
        return (self.rank_N < k) & (self.target_N != UNK)

    def __len__(self) -> int:
        return len(self.target_N)


def score(
    model: LanguageModel,
    params_P: Tensor,
    users: Sequence[User],
    *,
    unroll: int,
    at_once: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    parallel_map: ParallelMap = sequential_map,
) -> tuple[Scores, dict[int, np.ndarray]]:
    """Score every target of these users. Windows and ranks are the same as in the evaluations during training.

    Args:
        model: The model.
        params_P: Its parameters, on the device to evaluate on.
        users: Held-out users.
        unroll: Tokens per window; each window starts from a zero state.
        at_once: Tokens per batch; None for the number that `tokens_at_once` returns for the device.
        progress: Called after each batch with the number of users scored so far and the number of all users.
        parallel_map: Computes the batches: `sequential_map` in this process, or a map over ranks (training/worker.py).

    Returns:
        One row of scores for each target, and a histogram for each number of `HEADS`: how many targets have 0, 1, ..., 10
        head words among their top 10 predictions, int64 [11]. Paper: the last table of the appendix.

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
    return _joined(rows), heads


def score_batch(
    model: LanguageModel, params: Mapping[str, Tensor], windows_BW: Tensor, features_F: Tensor | None
) -> np.ndarray:
    """Return the scores of one batch in one array, since a `ParallelMap` sends one array per batch between processes.

    Args:
        model: The model.
        params: Its parameters by layer.
        windows_BW: Windows of token ids; all from one user if the model takes features.
        features_F: The features of that user; None if the model takes none.

    Returns:
        The ranks of all N targets that count, then their losses, then a histogram of 11 numbers for each of HEADS.
    """
    input_BT, target_BT, counts_BT = window_targets(windows_BW)
    logits_NV = model.logits(params, input_BT, features_F)[counts_BT]
    rank_N, loss_N, top_NK = _ranks(logits_NV, target_BT[counts_BT])
    return np.concatenate(
        [rank_N, loss_N, *(np.bincount(head_words(top_NK, head), minlength=GUESSES + 1) for head in HEADS)]
    )


def _ranks(logits_NV: Tensor, target_N: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the rank of each target (as in `Scores.rank_N`), its loss, and the 12 words with the highest logits.

    BOS and UNK are included in ranks and words.
    """
    most = min(GUESSES + 2, logits_NV.shape[1])  # two more than GUESSES, because `head_words` leaves out BOS and UNK
    top_NK = logits_NV.topk(most, dim=1).indices
    rank_N = target_rank(logits_NV, target_N)  # the function that training's evaluations use, so accuracies agree
    rank_N = torch.where((rank_N > 0) & (rank_N <= GUESSES), rank_N - 1, GUESSES)
    return rank_N.cpu().numpy(), losses(logits_NV, target_N).cpu().numpy(), top_NK.cpu().numpy()


def head_words(top_NK: np.ndarray, head: int) -> np.ndarray:
    """Return how many of the top 10 predictions of each target are head words, [N].

    BOS and UNK are never suggested as next words, so they are removed before the top 10 are taken.

    Args:
        top_NK: The token ids with the highest logits, best first, two more than the predictions that count.
        head: The number of head words.
    """
    may_NK = (top_NK != BOS) & (top_NK != UNK)
    suggested_NK = may_NK & (np.cumsum(may_NK, axis=1) <= GUESSES)
    return (suggested_NK & (top_NK >= FIRST_WORD) & (top_NK < FIRST_WORD + head)).sum(axis=1)


def by_token(scores: Scores) -> dict[str, float]:
    """Return accuracies, loss and perplexity over all targets. Each target counts once.

    The keys are those of `evaluate` in next_word.py.
    """
    is_word_N = scores.target_N != EOS
    return {
        **{f"accuracy_top{k}": float(scores.hits(k).mean()) for k in TOP},
        "accuracy_top1_words": float(scores.hits(1)[is_word_N].sum() / max(is_word_N.sum(), 1)),
        "loss": float(scores.loss_N.mean()),
        "perplexity": perplexity(float(scores.loss_N.mean())),
        "tokens": len(scores),
    }


def by_user(scores: Scores) -> dict[str, dict[str, float]]:
    """Compute accuracies and perplexity for each user; return the mean and the percentiles over users.

    The result has one item per measure. It does not contain the number of users.
    """
    users_U, of_user_N = np.unique(scores.user_N, return_inverse=True)
    targets_U = np.bincount(of_user_N, minlength=len(users_U))
    columns = {f"accuracy_top{k}": np.bincount(of_user_N, weights=scores.hits(k)) / targets_U for k in TOP}
    mean_loss_U = np.bincount(of_user_N, weights=scores.loss_N) / targets_U
    columns["perplexity"] = np.exp(np.minimum(mean_loss_U, 700.0))
    return {name: _distribution(values_U) for name, values_U in columns.items()}


def by_band(scores: Scores, vocabulary_size: int) -> list[dict[str, Any]]:
    """Return the accuracies on the targets of each band of word frequency.

    Args:
        scores: The scores of all targets.
        vocabulary_size: The number of token ids, BOS, EOS and UNK included; the last band of words ends there.

    Returns:
        One item per band: end of sentence, then the words by rank, then UNK. `targets` is the number of targets in the
        band and `share` their fraction of all targets; `first` and `last` are ranks of words. An accuracy is None if
        the band has no target.
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


@dataclass(frozen=True)
class Counts:
    """Counts of words and of pairs of successive words, from which the baselines are computed.

    Attributes:
        unigram_V: How often each word occurs as a target.
        pairs_M: The pairs that occur, sorted; a pair is stored as the number previous * V + word.
        times_M: How often each pair of `pairs_M` occurs.
    """

    unigram_V: np.ndarray
    pairs_M: np.ndarray
    times_M: np.ndarray

    @classmethod
    def of(cls, texts: Sequence[np.ndarray], size: int) -> "Counts":
        """Count the words and the pairs of successive words in some texts.

        Args:
            texts: One array of token ids for each user.
            size: V, the number of token ids of the vocabulary.
        """
        empty = [np.empty(0, dtype=np.int64)]
        before = np.concatenate([text[:-1].astype(np.int64) for text in texts] or empty)
        word = np.concatenate([text[1:].astype(np.int64) for text in texts] or empty)
        before, word = before[word != BOS], word[word != BOS]
        pairs, times = np.unique(before * size + word, return_counts=True)
        return cls(np.bincount(word, minlength=size), pairs, times)

    @cached_property
    def probs_V(self) -> np.ndarray:
        """The unigram probability of each word, with add-one smoothing; 0 for BOS, which is never a target."""
        raised_V = self.unigram_V + 1.0
        raised_V[BOS] = 0.0
        return raised_V / raised_V.sum()

    @cached_property
    def order(self) -> np.ndarray:
        """The token ids, most frequent first; ties are in the order of the dictionary. UNK and BOS are left out."""
        order = np.argsort(-self.unigram_V, kind="stable")
        return order[(order != BOS) & (order != UNK)]

    def after(self, previous: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the words that occur after the word `previous`, and how often each of them does."""
        size = len(self.unigram_V)
        begin, end = np.searchsorted(self.pairs_M, [previous * size, (previous + 1) * size])
        return self.pairs_M[begin:end] - previous * size, self.times_M[begin:end]


def score_unigram(counts: Counts, before_N: np.ndarray, target_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Score a model that always predicts the most frequent words.

    Args:
        counts: Counts of words and of pairs.
        before_N: The word before each target; not used here, see `score_bigram`.
        target_N: The targets.

    Returns:
        The rank and the loss of each target, as in `Scores`.
    """
    rank_V = np.full(len(counts.unigram_V), GUESSES)
    rank_V[counts.order[:GUESSES]] = np.arange(len(counts.order[:GUESSES]))
    return rank_V[target_N], -np.log(counts.probs_V[target_N])


def score_bigram(counts: Counts, before_N: np.ndarray, target_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Score a bigram model that backs off to unigrams, with absolute discounting.

    Args:
        counts: Counts of words and of pairs.
        before_N: The word before each target.
        target_N: The targets.

    Returns:
        The rank and the loss of each target, as in `Scores`.
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
    """Return P(word | previous) for every word, [V], and the ten most likely words without BOS and UNK.

    Args:
        counts: Counts of words and of pairs.
        previous: The token id of the previous word.
    """
    seen, times = counts.after(previous)
    unseen_mass = 1.0 - counts.probs_V[seen].sum()
    probs_V = counts.probs_V.copy()
    if len(seen):
        discount = DISCOUNT if unseen_mass > 1e-12 else 0.0
        probs_V *= discount * len(seen) / times.sum() / max(unseen_mass, 1e-12)
        probs_V[seen] = (times - discount) / times.sum()
    may = seen[(seen != UNK) & (seen != BOS)]
    # The probability of an unseen word is proportional to its unigram probability, so the most frequent are the best.
    rest = counts.order[: GUESSES + len(seen)]
    may = np.concatenate([may, rest[~np.isin(rest, seen)][:GUESSES]])
    return probs_V, may[np.lexsort((may, -probs_V[may]))][:GUESSES]


BASELINES = {"most frequent word": score_unigram, "bigram with back-off": score_bigram}
"""The functions that score the baselines, by the names under which measures.json lists them."""


def score_baselines(
    users: Sequence[User], others: Sequence[np.ndarray], size: int, *, are_public: bool
) -> dict[str, Scores]:
    """Score held-out users with each baseline.

    Args:
        users: The users to score.
        others: The texts in which words are counted, one per user: public text, or the text of held-out users. In the
            second case it must begin with the texts of `users`, in the same order.
        size: The size of the vocabulary.
        are_public: Whether `others` is public text. If not, each user is scored with the counts of the other folds, so
            that no user's own text is counted.

    Returns:
        Scores by the name of the baseline; empty if `others` is not public and has fewer than two users.
    """
    if not are_public and len(others) < 2:
        return {}  # a single user has no other users whose words can be counted
    folds = 1 if are_public else min(FOLDS, len(others))
    parts: dict[str, list[tuple[np.ndarray, ...]]] = {name: [] for name in BASELINES}
    for fold in range(folds):
        fitted = Counts.of([t for i, t in enumerate(others) if are_public or i % folds != fold], size)
        user_N, before_N, target_N = _targets([(i, u) for i, u in enumerate(users) if i % folds == fold])
        for name, scored in BASELINES.items():
            parts[name].append((user_N, target_N, *scored(fitted, before_N, target_N)))
    return {name: _joined(part) for name, part in parts.items()}


def _targets(users: Sequence[tuple[int, User]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return three arrays with one entry per target that counts: the user's index, the token before it, and the target.

    `users` holds pairs of an index and a user.
    """
    empty = [np.empty(0, dtype=np.int64)]
    numbers = np.concatenate([np.full(max(len(u.tokens) - 1, 0), i) for i, u in users] or empty)
    before = np.concatenate([u.tokens[:-1].astype(np.int64) for _, u in users] or empty)
    target = np.concatenate([u.tokens[1:].astype(np.int64) for _, u in users] or empty)
    counts = target != BOS
    return numbers[counts], before[counts], target[counts]


def _joined(parts: list[tuple[np.ndarray, ...]]) -> Scores:
    """Concatenate parts into one `Scores`. A part is a tuple of the columns of `Scores`, in order, for some targets."""
    user_N, target_N, rank_N, loss_N = (np.concatenate(column) for column in zip(*parts, strict=True))
    return Scores(user_N=user_N, target_N=target_N, rank_N=rank_N, loss_N=loss_N)


SUGGESTIONS = 5
"""The number of predicted words per prompt."""
logger = logging.getLogger("unheard.evaluation")
PROMPTS = ("how are", "i don't", "what do you", "have a nice", "thank you so")
"""English texts whose next word is predicted. `prompts_for` omits them for a vocabulary of another language."""


def prompts_for(vocabulary: Mapping[str, Any]) -> Sequence[str]:
    """Return the English PROMPTS, or none if the vocabulary of a store is known to be of another language.

    >>> prompts_for({"kind": "public", "language": "de"})
    ()

    Args:
        vocabulary: The record of the vocabulary in corpus.json. Only public word lists name a language; without it the
            language is taken to be English.
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
        held_out: Held-out users in the store's order. The first are evaluated, up to `Evaluation.max_tokens`. Without
            public text the baselines count the words of all of them.
        public: The texts of the store's public users, in which the baselines count words; empty if there are none.
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
        how: How much held-out text is used, and the length of the windows.
        prompts: Texts; the result contains the most likely next words after each.
        progress: Called after each batch with the number of users scored so far and the number of all users.
        parallel_map: Computes the batches: `sequential_map` in this process, or a map over ranks (training/worker.py).

    Returns:
        Measures as values that JSON can hold; None stands for a number that is not finite.

    Raises:
        InvalidValue: The users have no text to predict.
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
        "head_words": {str(head): counts.tolist() for head, counts in heads.items()},
        "baselines": {
            name: {"tokens": by_token(s), "users": by_user(s), "bands": by_band(s, size)}
            for name, s in baselines.items()
        },
        "baselines_fitted_on": "the corpus's public users" if what.public else "other held-out users",
        "prompts": [{"text": text, "words": _predictions(what, text)} for text in prompts],
    }
    return _finite(measures)


def write_measures(folder: RunFolder, measures: dict[str, Any]) -> None:
    """Write measures.json into a run folder, with the digests of the folder's model and of the measures themselves.

    The digests let a reader of the file detect that the model or the figures have changed since.

    Args:
        folder: The run folder.
        measures: The result of `full_measures`.
    """
    content = {**measures, "model_sha256": folder.model_digest()}
    content["sha256"] = record_digest(content)
    replace_file(folder.measures, (json.dumps(content, indent=1, allow_nan=False) + "\n").encode())
    logger.info("%s: measures.json written", folder.path.name)


def _predictions(what: Measured, text: str) -> list[dict[str, Any]]:
    words = predict(what.model, what.params_P, what.vocabulary, what.tokenizer.split(text), SUGGESTIONS)
    return [{"word": word, "probability": p} for word, p in words if math.isfinite(p)]


def _finite(value: Any) -> Any:
    """Return the value with None in place of NaN and infinity, which JSON cannot hold.

    The loss of a model that diverged is not finite.
    """
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
