"""A user's posts become one stream: BOS words EOS, BOS words EOS, in time order, cut at exactly N predicted tokens.

In: texts of one user. Out: the ids of their stream as bytes in the store's width. N counts what a model has to predict, words and
EOS, not BOS, which is given (decision 0020): 1,600 tokens a user are the paper's 20 batches of 8 x 10 predictions.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Literal

from unheard.corpus.shards import token_dtype
from unheard.corpus.tokens import Tokens, WordTokens
from unheard.corpus.vocabulary import BOS, EOS, UNK, Vocabulary

Sequence = Literal["post", "sentence"]

_SENTENCE_END = re.compile(r"(?<=[.!?…。！？])\s+|\n+")
_MEMO_ENTRIES = 1 << 19  # about 100 MB of remembered chunks, then forget all and begin again


class ChunkMemo(dict[str, bytes]):
    """Chunk of text between white space -> the bytes of its ids, remembered.

    Running text repeats its chunks, so nearly every one costs one lookup instead of one run of the tokenizer's rules: some
    twenty times the speed, and the same result, since the rules of WordTokens look at one chunk at a time.
    """

    def __init__(self, tokens: WordTokens, ids: "WordBytes") -> None:
        super().__init__()
        self._tokens, self._ids = tokens, ids

    def __missing__(self, chunk: str) -> bytes:
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
    """Text -> ids as bytes."""

    def __init__(self, tokens: Tokens, vocabulary: Vocabulary) -> None:
        self.width = token_dtype(len(vocabulary)).itemsize
        self.bos, self.eos = id_bytes(BOS, vocabulary), id_bytes(EOS, vocabulary)
        self._tokens = tokens
        self._ids = WordBytes(vocabulary)
        self._memo = ChunkMemo(tokens, self._ids) if isinstance(tokens, WordTokens) else None

    def encode(self, text: str) -> bytes:
        if self._memo is not None:
            return b"".join(map(self._memo.__getitem__, text.split()))
        return b"".join(map(self._ids.__getitem__, self._tokens.split(text)))


def sequences(text: str, unit: Sequence) -> list[str]:
    """What is wrapped in BOS and EOS: the whole post, or each of its sentences (after . ! ? or at a line's end)."""
    return [text] if unit == "post" else _SENTENCE_END.split(text)


def stream_pieces(posts: Iterable[str], encoder: Encoder, unit: Sequence, cap: int | None) -> Iterator[tuple[bytes, int]]:
    """The user's stream piece by piece, each with the number of its predicted tokens; stops reading at the cap."""
    left = cap if cap is not None else -1
    for post in posts:
        for text in sequences(post, unit):
            if left == 0:
                return
            words = encoder.encode(text)
            if not words:
                continue
            count = len(words) // encoder.width + 1
            if 0 <= left < count:
                yield encoder.bos + (words + encoder.eos)[: left * encoder.width], left
                return
            yield encoder.bos + words + encoder.eos, count
            left -= count if left > 0 else 0
