"""What is done with one shard's users: their streams are written. The same code on a laptop and on a Spark worker.

In: users and texts in order. Out: shard files, one for each split, and counts. Many short users are encoded together, a long
one in pieces: never more than some hundred kilobytes of text at a time.
"""

import functools
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from unheard.config import require
from unheard.corpus.backends import Rows, by_user
from unheard.corpus.encode import HELPING_CHARS, Encoder, Sequence, cut, sequences, stream_pieces, strip_quotes
from unheard.corpus.shards import ShardWriter, token_dtype
from unheard.corpus.splits import SplitRule
from unheard.corpus.tokenizers import Tokens
from unheard.corpus.vocabulary import UNK, Vocabulary
from unheard.errors import CorpusError


@dataclass(frozen=True, kw_only=True)
class StreamRule:
    """How posts become a stream, and which users stay."""

    sequence: Sequence = "post"
    min_tokens: int = 1
    tokens_per_user: int | None = None
    strip_quotes: bool = False

    def __post_init__(self) -> None:
        cap = self.tokens_per_user
        require(self.min_tokens >= 1, f"min_tokens must be 1 or more, not {self.min_tokens}.")
        require(
            cap is None or cap >= self.min_tokens, f"tokens_per_user = {cap} is below min_tokens = {self.min_tokens}."
        )

    def texts(self, posts: Iterable[str]) -> Iterable[str]:
        return sequences(map(strip_quotes, posts) if self.strip_quotes else posts, self.sequence)


@dataclass(frozen=True, kw_only=True)
class WriteStreams:
    """Writes the streams of a shard into `folder`/<split>/. Given `names`, also who is who, for the owner's map."""

    folder: Path
    tokens: Tokens
    vocabulary: Vocabulary
    rule: StreamRule
    splits: SplitRule
    names: Path | None = None

    def __call__(self, shard: int, rows: Rows) -> dict[str, Any]:
        dtype = token_dtype(len(self.vocabulary))
        writers = {name: ShardWriter(self.folder / name, shard, dtype) for name in self.splits.names()}
        out = _Output(
            rule=self.rule, splits=self.splits, writers=writers, encoder=_encoder(self.tokens, self.vocabulary)
        )
        try:
            for user, lists in by_user(rows):
                out.take(user, (self.rule.texts(posts) for posts in lists))
            out.write_waiting()
            for split, writer in writers.items():
                writer.close()
                out.counts[f"{split}_unknown"] += 0  # named, even if there is none
        except OSError as trouble:
            for writer in writers.values():
                writer.abandon()
            raise CorpusError(
                f"Cannot write to {self.folder}: {trouble.strerror}. Make room, then run the same command again."
            ) from None
        if self.names is not None:
            (self.names / f"{shard:05d}.json").write_text(json.dumps(out.kept), encoding="utf-8")
        return dict(out.counts)


@dataclass(kw_only=True)
class _Output:
    """Users on their way into a shard: short ones wait until there are enough to encode together."""

    rule: StreamRule
    splits: SplitRule
    writers: dict[str, ShardWriter]
    encoder: Encoder
    counts: Counter[str] = field(default_factory=Counter)
    kept: dict[str, list[str]] = field(default_factory=dict)
    waiting: list[tuple[str, int]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    chars: int = 0

    def take(self, user: str, lists: Iterator[Iterable[str]]) -> None:
        """Twice what the cap needs is encoded whole and cut; more than that is read only as far as the cap."""
        cap = self.rule.tokens_per_user
        short = HELPING_CHARS if cap is None else min(HELPING_CHARS, 12 * cap)
        own: list[str] = []
        chars = 0
        for texts in lists:
            known = len(own)
            own.extend(texts)
            chars += sum(map(len, own[known:] if known else own))
            if chars > short:
                self.write_waiting()
                self._write_long(user, itertools.chain(own, itertools.chain.from_iterable(lists)))
                return
        self.waiting.append((user, len(own)))
        self.texts += own
        self.chars += chars
        if self.chars >= HELPING_CHARS:
            self.write_waiting()

    def write_waiting(self) -> None:
        """Encode all that wait in one go, cut each user at the cap, and write those who stay, split by split."""
        ids, begins = self.encoder.encode(self.texts)
        first = np.concatenate([[0], np.cumsum([number for _, number in self.waiting])]).astype(np.int64)
        edges = begins[first]  # where each user begins
        lengths = np.diff(edges)
        posts = np.concatenate([[0], np.cumsum(np.diff(begins) > 0)])[first]
        counts = lengths - np.diff(posts)  # each post has one BOS, which is not counted
        cap = self.rule.tokens_per_user
        if cap is not None and (counts > cap).any():
            keep = np.ones(len(ids), dtype=bool)
            for i in np.flatnonzero(counts > cap).tolist():
                lengths[i] = len(cut(ids[edges[i] : edges[i + 1]], cap))
                keep[edges[i] + lengths[i] : edges[i + 1]] = False
            ids, counts = ids[keep], np.minimum(counts, cap)
        users = [user for user, _ in self.waiting]
        split_of = np.array([self.splits.split_of(user) for user in users], dtype=object)
        stay = counts >= self.rule.min_tokens
        for split, writer in self.writers.items():
            mine = stay & (split_of == split)
            own = ids[np.repeat(mine, lengths)]
            writer.append_many(own, lengths[mine])
            self._count(split, [users[i] for i in np.flatnonzero(mine)], int(counts[mine].sum()), _unknown(own))
        self.counts["users_seen"] += len(users)
        self.counts["users_too_short"] += len(users) - int(stay.sum())
        self.waiting, self.texts, self.chars = [], [], 0

    def _write_long(self, user: str, texts: Iterator[str]) -> None:
        """A user in pieces; what is written of one who turns out too short is taken back."""
        split = self.splits.split_of(user)
        writer, count, unknown = self.writers[split], 0, 0
        for ids, number in stream_pieces(texts, self.encoder, self.rule.tokens_per_user):
            writer.write(ids.tobytes())
            count += number
            unknown += _unknown(ids)
        self.counts["users_seen"] += 1
        if count >= self.rule.min_tokens:
            writer.end_user()
            self._count(split, [user], count, unknown)
        else:
            writer.take_back()
            self.counts["users_too_short"] += 1

    def _count(self, split: str, users: list[str], tokens: int, unknown: int) -> None:
        self.counts[f"{split}_users"] += len(users)
        self.counts[f"{split}_tokens"] += tokens
        self.counts[f"{split}_unknown"] += unknown
        self.kept.setdefault(split, []).extend(users)


@functools.lru_cache(maxsize=1)
def _encoder(tokens: Tokens, vocabulary: Vocabulary) -> Encoder:
    """One for a process, so that what it has by heart serves every shard."""
    return Encoder(tokens, vocabulary)


def _unknown(ids: np.ndarray) -> int:
    return int(np.count_nonzero(ids == UNK))
