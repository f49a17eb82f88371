"""The full evaluation of a released model as one JSON object, measures.json in the run folder.

    measures = full_measures(Measured(model=..., params_P=..., ...), run.evaluation)
    write_measures(folder, measures)

Input: a model, held-out users and the vocabulary. Output: accuracies by token, by user and by word frequency, the
paper's head-word histograms (its last table), baselines on the same targets, and predictions after a few prompts.
`report/` reads the file without torch. The numbers are exact functions of held-out users' text: they have no noise, and
held-out users have no guarantee. Nothing here reads a training user.

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor

from unheard.corpus.tokenizers import Tokenizer
from unheard.corpus.vocabulary import BOS, UNK, Vocabulary
from unheard.engines.distributed.parallel_map import ParallelMap, sequential_map
from unheard.evaluation.next_word import Evaluation, predict
from unheard.evaluation.scores import GUESSES, Scores, by_band, by_token, by_user, score
from unheard.models.model import LanguageModel
from unheard.run_folder import MEASURES_FORMAT, RunFolder, replace_file
from unheard.updates.user_update import User

DISCOUNT = 0.75
"""Absolute discounting (Ney, Essen and Kneser, 1994): subtracted from every count of a pair, and given to unseen
pairs."""
FOLDS = 5
"""Folds of held-out users, where they are scored by counts of the others."""
FIT_TOKENS = 2_000_000
"""The most tokens to count in: more would be slow and would not change the figures."""


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
    user_N, target_N, rank_N, loss_N = (np.concatenate(column) for column in zip(*parts, strict=True))
    return Scores(user_N=user_N, target_N=target_N, rank_N=rank_N, loss_N=loss_N)


SUGGESTIONS = 5
"""Predicted words per prompt."""
logger = logging.getLogger("unheard.evaluation")
PROMPTS = ("how are", "i don't", "what do you", "have a nice", "thank you so")


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A model with the text to evaluate it on.

    Args:
        model: The model.
        params_P: Its parameters.
        vocabulary: The words of its output layer.
        tokens: How prompts are split into tokens.
        held_out: Held-out users in the store's order: at least those that are evaluated. The baselines count in all.
        public: Text of the corpus's public users, if it has some: the baselines are then fitted on it.
    """

    model: LanguageModel
    params_P: Tensor
    vocabulary: Vocabulary
    tokens: Tokenizer
    held_out: Sequence[User]
    public: Sequence[np.ndarray] = field(default=())


def full_measures(
    what: Measured,
    how: Evaluation,
    *,
    prompts: Sequence[str] = PROMPTS,
    progress: Callable[[int, int], None] | None = None,
    spread: ParallelMap = sequential_map,
) -> dict[str, Any]:
    """Compute the content of measures.json.

    Args:
        what: The model and the text.
        how: How much held-out text, in which windows.
        prompts: Texts whose most likely next words are included.
        progress: Called with the number of users done and their total.
        spread: How the batches are distributed: one after the other, or over ranks (training/worker.py).
    """
    users, size = how.choose(what.held_out), len(what.vocabulary)
    scores, heads = score(what.model, what.params_P, users, unroll=how.unroll, progress=progress, spread=spread)
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
    words = predict(what.model, what.params_P, what.vocabulary, what.tokens.split(text), SUGGESTIONS)
    return [{"word": word, "probability": p} for word, p in words if math.isfinite(p)]


def _finite(value: Any) -> Any:
    """The same with null for NaN and infinity, which JSON does not have: a model that diverged has no loss."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
