"""Generates a synthetic store of any size for load tests, with the word statistics of a real store.

    fit           fits a `WordModel` to a store: which words follow which, and the favourite words of 16 topics
    generate      draws the streams of many users at once from the model
    synthesise    writes a store of such users, marked as synthetic in corpus.json

Each user mixes two distributions at their own rate: the successors of the previous word, and the words of one topic.
The model is fitted to real users without noise, so a synthetic store is as private as the store that it was fitted to.
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
_FIT_TOKENS = 20_000_000
_FIT_USERS = 2_000


@dataclass(frozen=True, kw_only=True)
class WordModel:
    """The successors of every word in one cumulative table, and the words of every topic in another.

    `after` holds, for each successor of word w, the sum of w and the cumulative probability: one ascending array over
    all words, so one `searchsorted` draws the next words of any number of users. `topics` is built in the same way.
    """

    size: int
    after: np.ndarray
    successors: np.ndarray
    topics: np.ndarray
    topic_words: np.ndarray
    topic_weights: np.ndarray

    def next_words(self, last: np.ndarray, draw: np.ndarray) -> np.ndarray:
        """Draw a successor of each word in `last`; `draw` has uniform numbers in [0, 1).

        Args:
            last: The last word of each user.
            draw: A uniform number in [0, 1) for each user.
        """
        return self.successors[np.minimum(np.searchsorted(self.after, last + draw, side="right"), len(self.after) - 1)]

    def topic_words_drawn(self, topic: np.ndarray, draw: np.ndarray) -> np.ndarray:
        """Draw a word of each topic in `topic`.

        Args:
            topic: The topic of each user.
            draw: A uniform number in [0, 1) for each user.
        """
        return self.topic_words[
            np.minimum(np.searchsorted(self.topics, topic + draw, side="right"), len(self.topics) - 1)
        ]


def fit(store: TokenStore, seed: int = 0) -> WordModel:
    """Fit a model to a store.

    Counts pairs of neighbouring words over up to 20 million tokens, and clusters up to 2,000 users into 16 topics.

    Args:
        store: The store to follow.
        seed: Decides which users are clustered, and the first assignment of users to topics.
    """
    size = len(store.vocabulary)
    pairs: list[np.ndarray] = []
    seen = 0
    for block in store.train.blocks():
        block = block.astype(np.int64)
        inside = block[1:] != BOS  # the id after EOS begins the next post
        pairs.append((block[:-1] * size + block[1:])[inside])
        seen += len(block)
        if seen >= _FIT_TOKENS:
            break
    # Every word can end its post, so every word has a successor.
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
    """Turn counts, sorted by row, into row + cumulative share: one ascending array over all rows."""
    total = np.zeros(int(row.max()) + 1)
    np.add.at(total, row, count)
    running = np.cumsum(count)
    before = np.concatenate([[0], running])[np.searchsorted(row, row)]
    return row + (running - before) / total[row], column.astype(np.int64)


def _topics(store: TokenStore, size: int, seed: int, rounds: int = 5) -> tuple[np.ndarray, np.ndarray]:
    """The word counts and the share of users of each topic, by hard EM for a mixture of unigram models.

    Each round assigns every user to the topic under which their words are most likely, then counts the words again.
    """
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
    if not alive.any():  # a store without words: the only topic ends the post
        sums = np.zeros((1, size), dtype=np.float32)
        sums[0, EOS] = 1
        return sums, np.ones(1)
    return sums[alive], weights[alive] / weights[alive].sum()


_SHARD_TOKENS = 1 << 26  # 128 MiB at two bytes
_USERS_AT_ONCE = 8_192


def generate(
    model: WordModel, users: int, tokens_per_user: int, generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Draw the streams of many users at once.

    A user writes the words of their topic at their own rate, between 5 and 35 %, and successors of the last word
    otherwise.

    Args:
        model: The fitted model.
        users: The number of users.
        tokens_per_user: The number of tokens of each user, without BOS.
        generator: The source of random numbers.

    Returns:
        The ids of all users one after the other, and the number of ids of each user.
    """
    topic = generator.choice(len(model.topic_weights), size=users, p=model.topic_weights)
    rate = generator.uniform(0.05, 0.35, size=users)  # the share of topic words in a user's text
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
    """Insert BOS in front of every user and after every EOS except the last id of a user."""
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
    """Write a synthetic store. Shards are written in parallel, each from its own stream of random numbers.

    Args:
        like: The store to fit the model to.
        out: The folder of the new store.
        users: The number of training users.
        tokens_per_user: The number of tokens of each user, without BOS.
        held_out: The number of held-out users; None means a hundredth of `users`.
        seed: The same seed gives the same store.
        workers: The number of processes; 0 means one per core.
        progress: Called with the finished fraction.
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
    """Writes one shard, in this process or another, from the shard's own stream of random numbers."""

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
    """(split, shard, number of users) for each shard of a split."""
    cuts = [users * s // shards for s in range(shards + 1)]
    return [(split, s, cuts[s + 1] - cuts[s]) for s in range(shards)]


def _run_all(task: WriteSynthetic, pieces: Sequence[tuple[str, int, int]], workers: int) -> Iterator[None]:
    """Write all pieces, on several processes if that is worth starting them."""
    workers = min(workers or AVAILABLE_CORES, len(pieces))
    if workers <= 1 or sum(n for _, _, n in pieces) < _USERS_AT_ONCE:
        for piece in pieces:
            yield task(*piece)
        return
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        for finished in as_completed([pool.submit(task, *piece) for piece in pieces]):
            yield finished.result()
