"""A user's posts become one stream: BOS words EOS, BOS words EOS, in time order, cut at exactly N tokens.

In: texts. Out: the ids of their streams. N counts words and EOS, not BOS, which is given (decision 0020). The paper: users
"truncated to have exactly 1600 tokens", sequences with implicit BOS and EOS.
What a person wrote, without what they only passed on: quoted and forwarded text, taken out on request.

In: the text of a post. Out: the same without quoted lines, the line that introduces them, and forwarded messages.
Quoted words belong to another user: left in, that user's text would reach the model through a second person, whom the
guarantee for the first does not cover.
"""

import itertools
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Literal

import numpy as np

from unheard.corpus.fast_encoder import ChunkTable
from unheard.corpus.shards import token_dtype
from unheard.corpus.tokenizers import Tokens, WordTokens
from unheard.corpus.vocabulary import BOS, EOS, Vocabulary

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

    def __init__(self, tokens: Tokens, vocabulary: Vocabulary) -> None:
        self.dtype = token_dtype(len(vocabulary))
        self._tokens, self._vocabulary = tokens, vocabulary
        self._table = ChunkTable(tokens, vocabulary) if isinstance(tokens, WordTokens) else None

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
