"""Simple baselines on the same text, so that a figure has a floor to stand on: the most frequent word, and a bigram.

In: held-out users, and other people's text to count in. Out: `Scores` in the same rows as a model's.
What is counted is never the training users' text: counting it without noise would be a release of its own, outside the
ledger. It is the corpus's public users if it has some, else held-out users, each scored by counts of the others
(docs/decisions/0040-baselines-without-training-users.md).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from unheard.corpus.vocabulary import BOS, UNK
from unheard.evaluation.scores import GUESSES, Scores
from unheard.updates.users import User

DISCOUNT = 0.75
"""Taken off every count of a pair and given to the pairs never seen: the customary value of absolute discounting."""
FOLDS = 5
FIT_TOKENS = 2_000_000
"""Tokens of other people to count in, at most: more would be slow to count and would not move the figures."""


@dataclass(frozen=True)
class Counts:
    """How often each word stands in a text, and each word after each other one."""

    unigram_V: np.ndarray
    pairs_M: np.ndarray
    """previous * V + word, each once, in order."""
    times_M: np.ndarray

    @classmethod
    def of(cls, texts: Sequence[np.ndarray], size: int) -> "Counts":
        empty = [np.empty(0, dtype=np.int64)]
        before = np.concatenate([text[:-1].astype(np.int64) for text in texts] or empty)
        word = np.concatenate([text[1:].astype(np.int64) for text in texts] or empty)
        before, word = before[word != BOS], word[word != BOS]
        pairs, times = np.unique(before * size + word, return_counts=True)
        return cls(np.bincount(word, minlength=size), pairs, times)

    @cached_property
    def probs_V(self) -> np.ndarray:
        """Unigram probabilities, one added to every count; BOS is never a target and has none."""
        raised_V = self.unigram_V + 1.0
        raised_V[BOS] = 0.0
        return raised_V / raised_V.sum()

    @cached_property
    def order(self) -> np.ndarray:
        """Words from the most frequent on; ties by the dictionary's rank; UNK and BOS are never guessed."""
        order = np.argsort(-self.unigram_V, kind="stable")
        return order[(order != BOS) & (order != UNK)]

    def after(self, previous: int) -> tuple[np.ndarray, np.ndarray]:
        """The words seen after one, and how often."""
        size = len(self.unigram_V)
        begin, end = np.searchsorted(self.pairs_M, [previous * size, (previous + 1) * size])
        return self.pairs_M[begin:end] - previous * size, self.times_M[begin:end]


def score_unigram(counts: Counts, before_N: np.ndarray, target_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Always the same guesses, the most frequent words first. Places and losses."""
    place_V = np.full(len(counts.unigram_V), GUESSES)
    place_V[counts.order[:GUESSES]] = np.arange(len(counts.order[:GUESSES]))
    return place_V[target_N], -np.log(counts.probs_V[target_N])


def score_bigram(counts: Counts, before_N: np.ndarray, target_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What followed the last word, backing off to the most frequent words (absolute discounting). Places and losses."""
    place_N, loss_N = np.full(len(target_N), GUESSES), np.zeros(len(target_N))
    for previous in np.unique(before_N):
        rows = np.flatnonzero(before_N == previous)
        probs_V, guesses = bigram(counts, int(previous))
        loss_N[rows] = -np.log(probs_V[target_N[rows]])
        for place, word in enumerate(guesses):
            place_N[rows[target_N[rows] == word]] = place
    return place_N, loss_N


def bigram(counts: Counts, previous: int) -> tuple[np.ndarray, np.ndarray]:
    """P(word | previous) for every word, and the ten best guesses."""
    seen, times = counts.after(previous)
    unseen_mass = 1.0 - counts.probs_V[seen].sum()
    probs_V = counts.probs_V.copy()
    if len(seen):
        discount = DISCOUNT if unseen_mass > 1e-12 else 0.0
        probs_V *= discount * len(seen) / times.sum() / max(unseen_mass, 1e-12)
        probs_V[seen] = (times - discount) / times.sum()
    may = seen[(seen != UNK) & (seen != BOS)]
    rest = counts.order[: GUESSES + len(seen)]  # unseen words stand in the order of their own frequency
    may = np.concatenate([may, rest[~np.isin(rest, seen)][:GUESSES]])
    return probs_V, may[np.lexsort((may, -probs_V[may]))][:GUESSES]


BASELINES = {"most frequent word": score_unigram, "bigram with back-off": score_bigram}


def score_baselines(
    users: Sequence[User], others: Sequence[np.ndarray], size: int, *, are_public: bool
) -> dict[str, Scores]:
    """Each baseline's scores of `users`. `others`: public text, or the held-out users themselves, these first and in order."""
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
    """Whose, the token before, and the token, for every target that counts."""
    empty = [np.empty(0, dtype=np.int64)]
    numbers = np.concatenate([np.full(max(len(u.tokens) - 1, 0), i) for i, u in users] or empty)
    before = np.concatenate([u.tokens[:-1].astype(np.int64) for _, u in users] or empty)
    target = np.concatenate([u.tokens[1:].astype(np.int64) for _, u in users] or empty)
    counts = target != BOS
    return numbers[counts], before[counts], target[counts]


def _joined(parts: list[tuple[np.ndarray, ...]]) -> Scores:
    user_N, target_N, place_N, loss_N = (np.concatenate(column) for column in zip(*parts, strict=True))
    return Scores(user_N=user_N, target_N=target_N, place_N=place_N, loss_N=loss_N)
