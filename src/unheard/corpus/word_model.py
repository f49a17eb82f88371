"""Which words follow which in a store, and which its groups of users favour: what a synthetic corpus is drawn from.

In: an open store. Out: two cumulative tables, in which one search draws the next word for any number of users at
once. It is fitted to real users without noise: as private as the store.
"""

from dataclasses import dataclass

import numpy as np

from unheard.corpus.store import TokenStore
from unheard.corpus.vocabulary import BOS, EOS
from unheard.randomness import reproducible_generator

TOPICS = 16
_FIT_TOKENS = 20_000_000
_FIT_USERS = 2_000


@dataclass(frozen=True, kw_only=True)
class WordModel:
    """Successors of every word as one long cumulative table, and a table for each topic.

    `after` holds, for each successor of word w, w + its cumulative probability: one ascending array over all words, so one
    search draws the next word after any words at once.
    """

    size: int
    after: np.ndarray
    successors: np.ndarray
    topics: np.ndarray
    topic_words: np.ndarray
    topic_weights: np.ndarray

    def next_words(self, last: np.ndarray, draw: np.ndarray) -> np.ndarray:
        return self.successors[np.minimum(np.searchsorted(self.after, last + draw, side="right"), len(self.after) - 1)]

    def topic_next(self, topic: np.ndarray, draw: np.ndarray) -> np.ndarray:
        return self.topic_words[
            np.minimum(np.searchsorted(self.topics, topic + draw, side="right"), len(self.topics) - 1)
        ]


def fit(store: TokenStore, seed: int = 0) -> WordModel:
    """Count pairs over up to 20 million tokens, and sort users into topics by a few rounds of hard clustering."""
    size = len(store.vocabulary)
    pairs: list[np.ndarray] = []
    seen = 0
    for block in store.train.blocks():
        block = block.astype(np.int64)
        inside = block[1:] != BOS  # what follows EOS is the next post, not a word
        pairs.append((block[:-1] * size + block[1:])[inside])
        seen += len(block)
        if seen >= _FIT_TOKENS:
            break
    # every word can end its post: no word is a dead end, whatever the store holds
    ends = np.arange(size, dtype=np.int64) * size + EOS
    codes, counts = np.unique(np.concatenate([*pairs, ends]), return_counts=True)
    words, followers = np.divmod(codes, size)
    usable = words != EOS
    words, followers, counts = words[usable], followers[usable], counts[usable]
    topic_counts, topic_weights = _topics(store, size, seed)
    topic, word = np.nonzero(topic_counts)
    topics, topic_words = _cumulative(topic, word, topic_counts[topic, word])
    after, successors = _cumulative(words, followers, counts)
    return WordModel(
        size=size,
        after=after,
        successors=successors,
        topics=topics,
        topic_words=topic_words,
        topic_weights=topic_weights,
    )


def _cumulative(row: np.ndarray, column: np.ndarray, count: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows (sorted) of counts as row + cumulative share: one ascending array over all rows."""
    total = np.zeros(int(row.max()) + 1)
    np.add.at(total, row, count)
    running = np.cumsum(count)
    before = np.concatenate([[0], running])[np.searchsorted(row, row)]
    return row + (running - before) / total[row], column.astype(np.int64)


def _topics(store: TokenStore, size: int, seed: int, rounds: int = 5) -> tuple[np.ndarray, np.ndarray]:
    """Word counts of each topic, and how many users it has: hard EM for a mixture of unigrams."""
    users = store.train
    generator = reproducible_generator(seed, "topics")
    chosen = np.sort(generator.permutation(users.num_users)[:_FIT_USERS])
    counts = np.stack([np.bincount(t, minlength=size).astype(np.float32) for t in users.users(chosen)])
    counts[:, [BOS, EOS]] = 0
    number = min(TOPICS, len(counts))
    member = generator.integers(number, size=len(counts))
    for _ in range(rounds):
        sums = np.stack([counts[member == k].sum(0) for k in range(number)])
        shares = np.log(sums + 0.1) - np.log((sums + 0.1).sum(1, keepdims=True))
        member = np.argmax(counts @ shares.T, axis=1)
    sums = np.stack([counts[member == k].sum(0) for k in range(number)])
    weights = np.bincount(member, minlength=number).astype(np.float64)
    alive = sums.sum(1) > 0
    if not alive.any():  # a store without words: every topic is the end of the post
        sums = np.zeros((1, size), dtype=np.float32)
        sums[0, EOS] = 1
        return sums, np.ones(1)
    return sums[alive], weights[alive] / weights[alive].sum()
