"""A user's posts become one stream: BOS words EOS, BOS words EOS, in time order, cut at exactly N tokens.

In: texts. Out: the ids of their streams. N counts words and EOS, not BOS, which is given (decision 0020). The paper: users
"truncated to have exactly 1600 tokens", sequences with implicit BOS and EOS.
What a person wrote, without what they only passed on: quoted and forwarded text, taken out on request.

In: the text of a post. Out: the same without quoted lines, the line that introduces them, and forwarded messages.
Quoted words belong to another user: left in, that user's text would reach the model through a second person, whom the
guarantee for the first does not cover.
"""

import functools
import itertools
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from unheard.config import require
from unheard.corpus.backends import Rows, by_user
from unheard.corpus.fast_encoder import ChunkTable
from unheard.corpus.shards import ShardWriter, token_dtype
from unheard.corpus.splits import SplitRule
from unheard.corpus.tokenizers import Tokenizer, WordTokenizer
from unheard.corpus.vocabulary import BOS, EOS, UNK, Vocabulary
from unheard.errors import CorpusError

# Everything from here on was written by someone else.
_FORWARDED = re.compile(
    r"^[ \t>]*(?:-{2,}[ \t]*(?:original message|forwarded (?:message|by)\b.*?)[ \t]*-*|begin forwarded message:)"
    r"[ \t]*$.*",
    re.IGNORECASE | re.MULTILINE | re.DOTALL,
)
# "On Mon, 14 May 2001, Kim wrote:" directly above a quoted line.
_INTRODUCTION = re.compile(
    r"^[ \t]*(?:on|am|le|el)\b[^\n]{0,200}(?:\n[^\n>]{0,100})?:[ \t]*\n+(?=[ \t]*(?:>|&gt;))", re.I | re.M
)
_QUOTED_LINE = re.compile(r"^[ \t]*(?:>|&gt;)[^\n]*(?:\n|\Z)", re.MULTILINE)
_QUOTE_BLOCK = re.compile(r"\[quote[^\]]*\].*?\[/quote\]", re.IGNORECASE | re.DOTALL)


def strip_quotes(text: str) -> str:
    """Only the user's own lines."""
    if ">" not in text and "&gt;" not in text and "--" not in text and "[" not in text and "orwarded" not in text:
        return text  # nearly every post: five quick looks instead of four slow ones
    text = _FORWARDED.sub("", text)
    text = _QUOTE_BLOCK.sub(" ", text)
    text = _INTRODUCTION.sub("", text)
    return _QUOTED_LINE.sub("", text)


Sequence = Literal["post", "sentence"]

_SENTENCE_END = re.compile(r"(?<=[.!?…。！？])\s+|\n+")
HELPING_CHARS = 1 << 19  # text encoded at once


class Encoder:
    """Texts -> ids."""

    def __init__(self, tokens: Tokenizer, vocabulary: Vocabulary) -> None:
        self.dtype = token_dtype(len(vocabulary))
        self._tokens, self._vocabulary = tokens, vocabulary
        self._table = ChunkTable(tokens, vocabulary) if isinstance(tokens, WordTokenizer) else None

    def encode(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """BOS words EOS for each text, end to end, and where each begins (at last, where the last ends).

        A text without any token leaves no trace: it begins where the next one does.
        """
        if not texts:
            return np.empty(0, dtype=self.dtype), np.zeros(1, dtype=np.int64)
        ids, begins = self._table.encode(texts) if self._table is not None else self._one_by_one(texts)
        lengths = np.diff(begins)
        empty = lengths == 2  # BOS, EOS
        if empty.any():
            gone = begins[:-1][empty]
            ids = np.delete(ids, np.concatenate([gone, gone + 1]))
            begins = np.concatenate([[0], np.cumsum(np.where(empty, 0, lengths))])
        return ids, begins

    def _one_by_one(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        bodies = [self._vocabulary.encode_words(self._tokens.split(text)) for text in texts]
        ids = np.concatenate([part for body in bodies for part in ([BOS], body, [EOS])]).astype(self.dtype)
        return ids, np.concatenate([[0], np.cumsum([len(body) + 2 for body in bodies])])


def cut(ids: np.ndarray, cap: int) -> np.ndarray:
    """The longest front part of one stream with at most `cap` tokens. BOS is not counted, and none is last."""
    counted = np.flatnonzero(ids != BOS)
    if len(counted) <= cap:
        return ids
    return ids[: int(counted[cap - 1]) + 1 if cap else 0]


def sequences(texts: Iterable[str], unit: Sequence) -> Iterable[str]:
    """What is wrapped in BOS and EOS: the whole post, or each of its sentences (after . ! ? or at a line's end)."""
    return texts if unit == "post" else itertools.chain.from_iterable(map(_SENTENCE_END.split, texts))


def stream_pieces(texts: Iterable[str], encoder: Encoder, cap: int | None) -> Iterator[tuple[np.ndarray, int]]:
    """One user's stream piece by piece, each with the number of its tokens without BOS; stops reading at the cap.

    A piece is about what the cap needs (six characters a token), and never more than fits in memory.
    """
    enough = HELPING_CHARS if cap is None else min(HELPING_CHARS, 6 * cap)
    left = sys.maxsize if cap is None else cap
    for some in helpings(texts, enough):
        ids, begins = encoder.encode(some)
        count = len(ids) - int(np.count_nonzero(np.diff(begins)))
        yield (ids, count) if count <= left else (cut(ids, left), left)
        left -= min(count, left)
        if not left:
            return


def helpings(texts: Iterable[str], enough: int) -> Iterator[list[str]]:
    """Texts in lists of about so many characters."""
    some: list[str] = []
    chars = 0
    for text in texts:
        some.append(text)
        chars += len(text)
        if chars >= enough:
            yield some
            some, chars = [], 0
    if some:
        yield some


@dataclass(frozen=True, kw_only=True)
class EncodingOptions:
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
class EncodeShard:
    """Writes the streams of a shard into `folder`/<split>/. Given `names`, also who is who, for the owner's map."""

    folder: Path
    tokens: Tokenizer
    vocabulary: Vocabulary
    rule: EncodingOptions
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

    rule: EncodingOptions
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
def _encoder(tokens: Tokenizer, vocabulary: Vocabulary) -> Encoder:
    """One for a process, so that what it has by heart serves every shard."""
    return Encoder(tokens, vocabulary)


def _unknown(ids: np.ndarray) -> int:
    return int(np.count_nonzero(ids == UNK))
