"""A user's posts become one stream: BOS words EOS, BOS words EOS, in time order, cut at exactly N predicted tokens.

In: texts of one user. Out: the ids of their stream as bytes in the store's width. N counts what a model has to
predict, words and EOS, not BOS, which is given (decision 0020): 1,600 tokens a user are the paper's 20 batches of 8 x
10 predictions.
"""

import itertools
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Literal

import numpy as np

from unheard.corpus.shards import token_dtype
from unheard.corpus.tokens import Tokens, WordTokens
from unheard.corpus.vocabulary import BOS, EOS, UNK, Vocabulary

Sequence = Literal["post", "sentence"]

_SENTENCE_END = re.compile(r"(?<=[.!?…。！？])\s+|\n+")
_HELPING_CHARS = 1 << 18
_MEMO_ENTRIES = 1 << 19  # about 100 MB of remembered chunks, then forget all and begin again


class ChunkMemo(dict[str | None, bytes]):
    """Chunk of text between white space -> the bytes of its ids, remembered.

    Running text repeats its chunks, so nearly every one costs one lookup instead of one run of the rules: some twenty
    times the speed, and the same result, since the rules of WordTokens look at one chunk at a time.
    """

    def __init__(self, tokens: WordTokens, ids: "WordBytes", between: bytes) -> None:
        self._tokens, self._ids, self._between = tokens, ids, between
        # None stands between two posts. Known words go in first: neighbours in memory are quicker to find.
        known = {word: encoded for word, encoded in ids.items() if tokens.split_chunk(word) == [word]}
        super().__init__({None: between, **known})

    def __missing__(self, chunk: str | None) -> bytes:
        if chunk is None:
            self[None] = self._between
            return self._between
        if len(self) >= _MEMO_ENTRIES:
            self.clear()
        encoded = b"".join(map(self._ids.__getitem__, self._tokens.split_chunk(chunk)))
        if len(chunk) <= 40:  # longer ones (addresses, screams) hardly come again
            self[chunk] = encoded
        return encoded


class WordBytes(dict[str, bytes]):
    """Word -> the bytes of its id; any other word is UNK."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._unk = id_bytes(UNK, vocabulary)
        super().__init__((word, id_bytes(i, vocabulary)) for i, word in enumerate(vocabulary.words) if i > UNK)

    def __missing__(self, word: str) -> bytes:
        return self._unk


def id_bytes(i: int, vocabulary: Vocabulary) -> bytes:
    return i.to_bytes(token_dtype(len(vocabulary)).itemsize, "little")


class Encoder:
    """Posts -> ids as bytes."""

    def __init__(self, tokens: Tokens, vocabulary: Vocabulary) -> None:
        self.dtype = token_dtype(len(vocabulary))
        self.width = self.dtype.itemsize
        self._bos, self._eos = id_bytes(BOS, vocabulary), id_bytes(EOS, vocabulary)
        self._tokens = tokens
        self._ids = WordBytes(vocabulary)
        self._memo = ChunkMemo(tokens, self._ids, self._eos + self._bos) if isinstance(tokens, WordTokens) else None

    def encode(self, texts: Iterable[str]) -> tuple[bytes, int]:
        """BOS words EOS for each text, end to end, and how many of these ids are predicted: all but BOS."""
        if self._memo is None:
            bodies = [b"".join(map(self._ids.__getitem__, self._tokens.split(text))) for text in texts]
            return self._wrapped([body for body in bodies if body])
        chunks: list[str | None] = []
        count = 0
        for text in texts:
            chunks += text.split()
            chunks.append(None)
            count += 1
        stream = (self._bos + b"".join(map(self._memo.__getitem__, chunks)))[: -self.width]
        if self._bos + self._eos in stream:  # a text without any token, or (harmless) four bytes across two ids
            return self._without_empty(stream)
        return stream, len(stream) // self.width - count

    def _without_empty(self, stream: bytes) -> tuple[bytes, int]:
        ids = np.frombuffer(stream, dtype=self.dtype)
        empty = np.flatnonzero((ids[:-1] == BOS) & (ids[1:] == EOS))
        ids = np.delete(ids, np.concatenate([empty, empty + 1]))
        return ids.tobytes(), int(np.count_nonzero(ids != BOS))

    def _wrapped(self, bodies: list[bytes]) -> tuple[bytes, int]:
        stream = b"".join(self._bos + body + self._eos for body in bodies)
        return stream, len(stream) // self.width - len(bodies)

    def cut(self, stream: bytes, count: int, cap: int) -> tuple[bytes, int]:
        """The longest front part of a stream with at most `cap` of its `count` predicted tokens."""
        if count <= cap:
            return stream, count
        return cut(np.frombuffer(stream, dtype=self.dtype), cap).tobytes(), cap


def cut(ids: np.ndarray, cap: int) -> np.ndarray:
    """The longest front part with at most `cap` predicted tokens; a BOS with nothing after it goes too."""
    end = int(np.searchsorted(np.cumsum(ids != BOS), cap, side="right"))
    return ids[: end - 1] if end and ids[end - 1] == BOS else ids[:end]


def sequences(texts: Iterable[str], unit: Sequence) -> Iterable[str]:
    """What is wrapped in BOS and EOS: the whole post, or each of its sentences (after . ! ? or at a line's end)."""
    return texts if unit == "post" else itertools.chain.from_iterable(map(_SENTENCE_END.split, texts))


def stream_pieces(
    posts: Iterable[str], encoder: Encoder, unit: Sequence, cap: int | None
) -> Iterator[tuple[bytes, int]]:
    """The user's stream piece by piece, each with the number of its predicted tokens; stops reading at the cap.

    A piece is about what the cap needs (six characters a token), and never more than fits in memory.
    """
    enough = _HELPING_CHARS if cap is None else min(_HELPING_CHARS, 6 * cap)
    left = sys.maxsize if cap is None else cap
    texts: list[str] = []
    chars = 0
    for text in sequences(posts, unit):
        texts.append(text)
        chars += len(text)
        if chars >= enough:
            stream, count = encoder.cut(*encoder.encode(texts), left)
            yield stream, count
            left -= count
            if not left:
                return
            texts, chars = [], 0
    if texts:
        yield encoder.cut(*encoder.encode(texts), left)
