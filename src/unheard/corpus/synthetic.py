"""A corpus of any size for load tests: what real words follow each other, said by users who do not exist.

In: a store to follow, a number of users, tokens for each. Out: a store, marked synthetic for ever in corpus.json.
Each user mixes two sources at a rate of their own: pairs of neighbouring words of the whole store, and the favourite
words of one of a few topics. It is fitted to real users without noise: treat it as private as the store that it
follows.
"""

import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np

from unheard.corpus.shards import ShardWriter, token_dtype
from unheard.corpus.store import StoreWriter, TokenStore
from unheard.corpus.vocabulary import BOS, EOS
from unheard.corpus.word_model import TOPICS, WordModel, fit
from unheard.corpus.workers import Progress, cores
from unheard.parts import require
from unheard.randomness import reproducible_generator

_SHARD_TOKENS = 1 << 26  # 128 MiB at two bytes
_TOGETHER = 8_192  # users generated side by side


def generate(
    model: WordModel, users: int, tokens_per_user: int, generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """The streams of many users side by side: all their ids end to end, and each one's length. BOS is not counted."""
    topic = generator.choice(len(model.topic_weights), size=users, p=model.topic_weights)
    rate = generator.uniform(0.05, 0.35, size=users)  # how much of a user's text is their topic's
    predicted = np.empty((users, tokens_per_user), dtype=np.int64)
    last = np.full(users, BOS)
    for t in range(tokens_per_user):
        draw = generator.random(users, dtype=np.float64)
        own = (generator.random(users, dtype=np.float32) < rate) & (last != BOS)
        word = model.next_words(last, draw)
        word[own] = model.topic_next(topic[own], draw[own])
        predicted[:, t] = word
        last = np.where(word == EOS, BOS, word)
    return with_bos(predicted)


def with_bos(predicted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Put BOS in front of every user and after every EOS that something follows."""
    begins = np.ones(predicted.shape, dtype=bool)
    begins[:, 1:] = predicted[:, :-1] == EOS
    flat_begins = begins.ravel()
    places = np.arange(predicted.size) + np.cumsum(flat_begins)
    flat = np.full(predicted.size + int(flat_begins.sum()), BOS, dtype=np.int64)
    flat[places] = predicted.ravel()
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
    progress: Progress = lambda step, fraction: None,
) -> TokenStore:
    """Write a synthetic store; shards are made in parallel, each from its own stream of random numbers."""
    require(users >= 1 and tokens_per_user >= 1, "users and tokens_per_user must be 1 or more.")
    held_out = max(1, users // 100) if held_out is None else held_out
    with StoreWriter(out) as writer:
        model = fit(like, seed)
        shards = max(1, -(-users * tokens_per_user // _SHARD_TOKENS))
        jobs = [*_jobs("train", users, shards), *_jobs("held_out", held_out, shards)]
        task = WriteSynthetic(folder=writer.partial, model=model, tokens_per_user=tokens_per_user, seed=seed)
        for done, _ in enumerate(_run_all(task, jobs, workers), start=1):
            progress("Synthesising", done / len(jobs))
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
    """Writes one shard, in this process or another, from a stream of random numbers that is the shard's own."""

    folder: Path
    model: WordModel
    tokens_per_user: int
    seed: int

    def __call__(self, split: str, number: int, users: int) -> None:
        generator = reproducible_generator(self.seed, "synthetic", split, number)
        writer = ShardWriter(self.folder / split, number, token_dtype(self.model.size))
        together = max(1, min(_TOGETHER, (1 << 24) // self.tokens_per_user))
        for begin in range(0, users, together):
            some = min(together, users - begin)
            writer.append_many(*generate(self.model, some, self.tokens_per_user, generator))
        writer.close()


def _jobs(split: str, users: int, shards: int) -> list[tuple[str, int, int]]:
    cuts = [users * s // shards for s in range(shards + 1)]
    return [(split, s, cuts[s + 1] - cuts[s]) for s in range(shards)]


def _run_all(task: WriteSynthetic, jobs: Sequence[tuple[str, int, int]], workers: int) -> Iterator[None]:
    workers = min(workers or cores(), len(jobs))
    if workers <= 1 or sum(n for _, _, n in jobs) < _TOGETHER:
        for job in jobs:
            yield task(*job)
        return
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        for finished in as_completed([pool.submit(task, *job) for job in jobs]):
            yield finished.result()
