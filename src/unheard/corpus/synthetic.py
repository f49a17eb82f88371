"""Generates a synthetic store of any size for load tests, with the word statistics of a real store.

    fit           fits a `WordModel` to a store: the successors of each word, and the frequent words of 16 topics
    generate      draws the streams of many users at once from the model
    synthesise    writes a store of such users, marked as synthetic in corpus.json

Each user mixes two distributions at their own rate: the successors of the previous word, and the words of one topic.
The model is fitted to real users without noise, so a synthetic store must be kept as secret as the store that the model
was fitted to.
"""

import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np

from unheard.config import require
from unheard.corpus import AVAILABLE_CORES, Progress, no_progress
from unheard.corpus.store import ShardWriter, StoreWriter, TokenStore, token_dtype
from unheard.corpus.vocabulary import BOS, EOS
from unheard.randomness import reproducible_generator

TOPICS = 16
"""The largest number of topics of a `WordModel`."""
_FIT_TOKENS = 20_000_000  # `fit` counts pairs of words until it has read this many tokens.
_FIT_USERS = 2_000  # `fit` clusters at most this many users into topics.
_TOPIC_ITERATIONS = 5


@dataclass(frozen=True, kw_only=True)
class WordModel:
    """The probabilities of the successors of every word, and of the words of every topic.

    `after` has one entry for each pair of a word w and a successor: w plus the cumulative probability of the successors
    up to this one. The array is ascending over all words, so a single `searchsorted` draws the next words of any number
    of users. `topics` is built in the same way from pairs of a topic and a word.

    Attributes:
        size: The size of the vocabulary.
        after: The cumulative probabilities of successors, float64.
        successors: The successor that belongs to each entry of `after`, int64.
        topics: The cumulative probabilities of the words of each topic, float64.
        topic_words: The word that belongs to each entry of `topics`, int64.
        topic_weights: The fraction of users with each topic.
    """

    size: int
    after: np.ndarray
    successors: np.ndarray
    topics: np.ndarray
    topic_words: np.ndarray
    topic_weights: np.ndarray

    def next_words(self, last: np.ndarray, draw: np.ndarray) -> np.ndarray:
        """Return a random successor of each word in `last`.

        Args:
            last: The last word of each user.
            draw: A uniform random number in [0, 1) for each user.
        """
        return self.successors[np.minimum(np.searchsorted(self.after, last + draw, side="right"), len(self.after) - 1)]

    def topic_words_drawn(self, topic: np.ndarray, draw: np.ndarray) -> np.ndarray:
        """Return a random word of each topic in `topic`.

        Args:
            topic: The topic of each user.
            draw: A uniform random number in [0, 1) for each user.
        """
        return self.topic_words[
            np.minimum(np.searchsorted(self.topics, topic + draw, side="right"), len(self.topics) - 1)
        ]


def fit(store: TokenStore, seed: int = 0) -> WordModel:
    """Fit a `WordModel` to the training users of a store, without noise. The result is private.

    Counts pairs of neighbouring words in about 20 million tokens, and clusters up to 2,000 users into 16 topics.

    Args:
        store: The store with the real users.
        seed: The seed of the choice of users to cluster and of their first assignment to topics.
    """
    size = len(store.vocabulary)
    pairs: list[np.ndarray] = []
    seen = 0
    for block in store.train.blocks():
        block = block.astype(np.int64)
        inside = block[1:] != BOS  # A pair whose second id is BOS belongs to two posts.
        pairs.append((block[:-1] * size + block[1:])[inside])
        seen += len(block)
        if seen >= _FIT_TOKENS:
            break
    # Count the pair (word, EOS) once more for every word, so that every word has a successor.
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
    """Return an ascending array of row + cumulative share of the count within the row, and the columns as int64.

    Args:
        row: The row of each entry, ascending.
        column: The column of each entry.
        count: The count of each entry.
    """
    total = np.zeros(int(row.max()) + 1)
    np.add.at(total, row, count)
    running = np.cumsum(count)
    before = np.concatenate([[0], running])[np.searchsorted(row, row)]
    return row + (running - before) / total[row], column.astype(np.int64)


def _topics(store: TokenStore, size: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Cluster users into topics by hard EM for a mixture of unigram models.

    Each iteration counts the words of each topic, then assigns every user to the topic under which the user's words are
    most likely.

    Args:
        store: The store with the real users.
        size: The size of the vocabulary.
        seed: The seed of the choice of users and of their first topics.

    Returns:
        The word counts of each topic, shape [topics, size], and the fraction of users with each topic. Topics without
        words are left out.
    """
    users = store.train
    generator = reproducible_generator(seed, "topics")
    chosen = np.sort(generator.permutation(users.num_users)[:_FIT_USERS])
    counts = np.stack([np.bincount(t, minlength=size).astype(np.float32) for t in users.users(chosen)])
    counts[:, [BOS, EOS]] = 0
    number = min(TOPICS, len(counts))
    member = generator.integers(number, size=len(counts))
    for _ in range(_TOPIC_ITERATIONS):
        sums = np.stack([counts[member == k].sum(0) for k in range(number)])
        shares = np.log(sums + 0.1) - np.log((sums + 0.1).sum(1, keepdims=True))
        member = np.argmax(counts @ shares.T, axis=1)
    sums = np.stack([counts[member == k].sum(0) for k in range(number)])
    weights = np.bincount(member, minlength=number).astype(np.float64)
    alive = sums.sum(1) > 0
    if not alive.any():  # The store has no words. Return one topic, whose only word is EOS.
        sums = np.zeros((1, size), dtype=np.float32)
        sums[0, EOS] = 1
        return sums, np.ones(1)
    return sums[alive], weights[alive] / weights[alive].sum()


_SHARD_TOKENS = 1 << 26  # Tokens per shard: 128 MiB at two bytes per id.
_USERS_AT_ONCE = 8_192  # The largest number of users that are generated together.


def generate(
    model: WordModel, users: int, tokens_per_user: int, generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Draw the streams of many users at once.

    Each user has a topic and a rate between 5 and 35 %. With this rate the next word is a word of the topic; otherwise
    it is a successor of the last word.

    Args:
        model: The fitted model.
        users: The number of users.
        tokens_per_user: The number of tokens of each user, without BOS.
        generator: The random generator.

    Returns:
        The ids of all users one after the other, and the number of ids of each user.
    """
    topic = generator.choice(len(model.topic_weights), size=users, p=model.topic_weights)
    rate = generator.uniform(0.05, 0.35, size=users)
    predicted = np.empty((users, tokens_per_user), dtype=np.int64)
    last = np.full(users, BOS)
    for t in range(tokens_per_user):
        draw = generator.random(users, dtype=np.float64)
        own = (generator.random(users, dtype=np.float32) < rate) & (last != BOS)
        word = model.next_words(last, draw)
        word[own] = model.topic_words_drawn(topic[own], draw[own])
        predicted[:, t] = word
        last = np.where(word == EOS, BOS, word)
    return with_bos(predicted)


def with_bos(predicted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Insert BOS at the beginning of every user and after every EOS that is not the last id of a user.

    Args:
        predicted: The ids of each user without BOS, shape [users, tokens].

    Returns:
        The ids of all users one after the other, and the number of ids of each user.
    """
    begins = np.ones(predicted.shape, dtype=bool)
    begins[:, 1:] = predicted[:, :-1] == EOS
    flat_begins = begins.ravel()
    positions = np.arange(predicted.size) + np.cumsum(flat_begins)
    flat = np.full(predicted.size + int(flat_begins.sum()), BOS, dtype=np.int64)
    flat[positions] = predicted.ravel()
    return flat, predicted.shape[1] + begins.sum(1)


def synthesise(
    like: TokenStore,
    out: str | os.PathLike[str],
    *,
    users: int,
    tokens_per_user: int,
    held_out: int | None = None,
    seed: int = 0,
    workers: int = 0,
    progress: Progress = no_progress,
) -> TokenStore:
    """Write a synthetic store and open it.

    Shards are written in parallel. Each shard has its own stream of random numbers, so the result does not depend on
    the number of processes.

    Args:
        like: The store to which the model is fitted.
        out: The folder of the new store; it must be missing or empty.
        users: The number of training users.
        tokens_per_user: The number of tokens of each user, without BOS.
        held_out: The number of held-out users; None means a hundredth of `users`, at least 1.
        seed: The seed of all random numbers. The same seed gives the same store.
        workers: The number of processes; 0 means one per core.
        progress: A callback that gets the finished fraction.
    """
    require(users >= 1 and tokens_per_user >= 1, "users and tokens_per_user must be 1 or more.")
    held_out = max(1, users // 100) if held_out is None else held_out
    with StoreWriter(out) as writer:
        model = fit(like, seed)
        shards = max(1, -(-users * tokens_per_user // _SHARD_TOKENS))
        pieces = [*_pieces("train", users, shards), *_pieces("held_out", held_out, shards)]
        task = WriteSynthetic(folder=writer.partial, model=model, tokens_per_user=tokens_per_user, seed=seed)
        for done, _ in enumerate(_run_all(task, pieces, workers), start=1):
            progress("Synthesising", done / len(pieces))
        info = {
            "name": writer.path.name,
            "made_by": f"unheard {version('unheard')}",
            "synthetic": True,
            "fitted_to": like.info.get("name", like.path.name),
            "tokens": like.info.get("tokens", {"kind": "words"}),
            "vocabulary": {k: v for k, v in like.info["vocabulary"].items() if k not in ("size", "sha256")},
            "streams": {"tokens_per_user": tokens_per_user, "min_tokens": tokens_per_user},
            "synthesis": {"seed": seed, "topics": TOPICS, "model": "word pairs and topics, mixed for each user"},
        }
        counts = {"users": {"train_users": users, "held_out_users": held_out}}
        return writer.finish(vocabulary=like.vocabulary, info=info, counts=counts, shards=shards)


@dataclass(frozen=True, kw_only=True)
class WriteSynthetic:
    """A function that writes one shard of synthetic users. It can be sent to another process.

    Args:
        folder: The folder of the unfinished store.
        model: The fitted model.
        tokens_per_user: The number of tokens of each user, without BOS.
        seed: The seed. The random numbers of a shard depend on the seed, the split and the number of the shard.
    """

    folder: Path
    model: WordModel
    tokens_per_user: int
    seed: int

    def __call__(self, split: str, number: int, users: int) -> None:
        generator = reproducible_generator(self.seed, "synthetic", split, number)
        writer = ShardWriter(self.folder / split, number, token_dtype(self.model.size))
        users_at_once = max(1, min(_USERS_AT_ONCE, (1 << 24) // self.tokens_per_user))
        for begin in range(0, users, users_at_once):
            some = min(users_at_once, users - begin)
            writer.append_many(*generate(self.model, some, self.tokens_per_user, generator))
        writer.close()


def _pieces(split: str, users: int, shards: int) -> list[tuple[str, int, int]]:
    """Return (split, shard, number of users) for each shard of a split. Shards have nearly equal numbers of users."""
    cuts = [users * s // shards for s in range(shards + 1)]
    return [(split, s, cuts[s + 1] - cuts[s]) for s in range(shards)]


def _run_all(task: WriteSynthetic, pieces: Sequence[tuple[str, int, int]], workers: int) -> Iterator[None]:
    """Write all shards, and yield after each. Small stores are written without starting other processes."""
    workers = min(workers or AVAILABLE_CORES, len(pieces))
    if workers <= 1 or sum(n for _, _, n in pieces) < _USERS_AT_ONCE:
        for piece in pieces:
            yield task(*piece)
        return
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        for finished in as_completed([pool.submit(task, *piece) for piece in pieces]):
            yield finished.result()
