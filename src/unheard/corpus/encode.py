"""Encodes text: the posts of each user become one stream of token ids, which is written to the shard of the user.

The stream of a user is BOS words EOS, BOS words EOS, ..., one such sequence per post (or per sentence), in the order of
time, cut at exactly `tokens_per_user` tokens. The count includes EOS and excludes BOS, which is never predicted
(docs/decisions/0020). The paper: users "truncated to have exactly 1600 tokens", sequences with implicit BOS and EOS.

    EncodingOptions   the choices: sequence, tokens_per_user, min_tokens, strip_quotes
    EncodeShard       the task that a grouping backend runs on each shard: writes its files and returns counts
    Encoder           texts to ids
    FastWordEncoder   the same for `WordTokenizer`, with a cache

Many users are encoded together and a very long user in pieces, so that at most some megabytes of text are in memory. The
same code runs on one machine and on Spark workers.

**The fast encoder** caches the ids of every chunk of text and looks up thousands of chunks at once. A chunk is the text
between white space. Running text repeats its chunks, and the rules of `WordTokenizer` look at one chunk at a time, so a
table from chunks to ids gives the same result as the rules. A test compares the two. A chunk of up to 8 bytes is its
own key as one integer, one of up to 16 bytes as two: no two chunks have the same key. Longer chunks are rare and are
kept in a dictionary. Measurements and the alternatives that were tried: docs/decisions/0026.
"""

import bisect
import functools
import itertools
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from unheard import storage
from unheard.config import require
from unheard.corpus import Progress
from unheard.corpus.grouping import Grouping, GroupingBackend, Rows, SplitRule, by_user
from unheard.corpus.store import ShardWriter, token_dtype
from unheard.corpus.tokenizers import Tokenizer, WordTokenizer, cut_text
from unheard.corpus.vocabulary import BOS, EOS, UNK, ReleaseLog, Vocabulary
from unheard.errors import CorpusError

BATCH_CHARS = 1 << 20
"""Characters of text that are encoded at once."""

SequenceUnit = Literal["post", "sentence"]

_SENTENCE_END = re.compile(r"(?<=[.!?…。！？])\s+|\n+")

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
    """Remove quoted lines, the line that introduces them, and forwarded messages.

    Quoted words belong to another user. If they stayed, the text of that user would reach the model through a second
    user, and the guarantee for the first would not cover it.

    Example:
        >>> strip_quotes("> what do you think?\\nI agree.")
        'I agree.'
    """
    if ">" not in text and "&gt;" not in text and "--" not in text and "[" not in text and "orwarded" not in text:
        return text  # nearly every post; five quick searches instead of four slow ones
    text = _FORWARDED.sub("", text)
    text = _QUOTE_BLOCK.sub(" ", text)
    text = _INTRODUCTION.sub("", text)
    return _QUOTED_LINE.sub("", text)


def split_sequences(texts: Iterable[str], unit: SequenceUnit) -> Iterable[str]:
    """Return what BOS and EOS enclose: each whole post, or each sentence (up to . ! ? or the end of a line).

    Args:
        texts: The posts of a user.
        unit: What BOS and EOS enclose.
    """
    return texts if unit == "post" else itertools.chain.from_iterable(map(_SENTENCE_END.split, texts))


@dataclass(frozen=True, kw_only=True)
class EncodingOptions:
    """How posts become the stream of a user, and which users stay in the store.

    Args:
        sequence: What BOS and EOS enclose: "post" or "sentence".
        min_tokens: Users with fewer tokens are left out.
        tokens_per_user: Longer users are cut at exactly this many tokens; None keeps everything.
        strip_quotes: Whether to remove quoted and forwarded text.
    """

    sequence: SequenceUnit = "post"
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
        """Split posts into sequences, each of which BOS and EOS will enclose; quotes are removed before, if so chosen."""
        return split_sequences(map(strip_quotes, posts) if self.strip_quotes else posts, self.sequence)


@dataclass(frozen=True, kw_only=True)
class GroupedText:
    """The scanned text of the users and how it will be encoded: what the source of a vocabulary gets to count words.

    Args:
        tokenizer: Splits text into words.
        encoding: How posts become streams.
        splits: Which users train.
        backend: Runs a task on each shard.
        grouping: The plan of the grouping, with the folder of the scanned rows.
        progress: Called with the finished fraction of a step.
        releases: The private vocabularies that were drawn for the store, and their cost.
    """

    tokenizer: Tokenizer
    encoding: EncodingOptions
    splits: SplitRule
    backend: GroupingBackend
    grouping: Grouping
    progress: Progress
    releases: ReleaseLog


@dataclass(frozen=True, kw_only=True)
class EncodeShard:
    """A `ShardTask`: writes the streams of the users of a shard into `folder`/<split>/ and returns counts.

    Args:
        folder: The folder of the store.
        tokenizer: Splits text into words.
        vocabulary: Gives each word its id.
        options: How posts become streams.
        splits: Which user is in which split.
        user_ids: A folder for the ids of the written users, for the owner's map from ids to numbers; None writes no
            ids.
    """

    folder: Path
    tokenizer: Tokenizer
    vocabulary: Vocabulary
    options: EncodingOptions
    splits: SplitRule
    user_ids: Path | None = None

    def __call__(self, shard: int, rows: Rows) -> dict[str, Any]:
        """Write the files of one shard, and return the counts of its users, tokens and unknown words by split."""
        dtype = token_dtype(len(self.vocabulary))
        writers = {name: ShardWriter(self.folder / name, shard, dtype) for name in self.splits.names()}
        encoder = _cached_encoder(self.tokenizer, self.vocabulary)
        output = _ShardOutput(options=self.options, splits=self.splits, writers=writers, encoder=encoder)
        try:
            for user, lists in by_user(rows):
                output.add_user(user, (self.options.texts(posts) for posts in lists))
            output.write_waiting()
            for split, writer in writers.items():
                writer.close()
                output.counts[f"{split}_unknown"] += 0  # the key is there even if the count is 0
        except OSError as error:
            for writer in writers.values():
                writer.abandon()
            raise CorpusError(
                f"Cannot write to {self.folder}: {error.strerror}. Free some space, then run the same command again."
            ) from None
        if self.user_ids is not None:
            storage.replace_file(self.user_ids / f"{shard:05d}.json", json.dumps(output.written_users).encode())
        return dict(output.counts)


class _WaitingUser(NamedTuple):
    """A user whose text waits to be encoded: the number of texts that are encoded first, and the texts after them."""

    user: str
    num_texts: int
    rest: list[str]


@dataclass(kw_only=True)
class _ShardOutput:
    """Collects the users of one shard and writes them to its files.

    Users wait until there are enough to encode together. Of a long user only the first texts are encoded, as many as
    the cap usually needs; the rest waits too, and is encoded if the cap is not reached.
    """

    options: EncodingOptions
    splits: SplitRule
    writers: dict[str, ShardWriter]
    encoder: "Encoder"
    counts: Counter[str] = field(default_factory=Counter)
    written_users: dict[str, list[str]] = field(default_factory=dict)
    waiting: list[_WaitingUser] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    chars: int = 0
    rest_chars: int = 0

    def add_user(self, user: str, lists: Iterator[Iterable[str]]) -> None:
        """Collect the text of the next user for encoding. A very long user is encoded at once, in pieces."""
        cap = self.options.tokens_per_user
        first_chars = _first_chars(cap)
        max_chars = first_chars if cap is None else first_chars + BATCH_CHARS
        own: list[str] = []
        chars = 0
        for texts in lists:
            known = len(own)
            own.extend(texts)
            chars += sum(map(len, own[known:] if known else own))
            if chars > max_chars:
                self.write_waiting()
                self._write_long(user, itertools.chain(own, itertools.chain.from_iterable(lists)))
                return
        number = len(own)
        if chars > first_chars:
            ends = list(itertools.accumulate(map(len, own)))
            number = bisect.bisect_left(ends, first_chars) + 1
            self.rest_chars += chars - ends[number - 1]
            chars = ends[number - 1]
        self.waiting.append(_WaitingUser(user, number, own[number:]))
        self.texts += own[:number]
        self.chars += chars
        if self.chars >= BATCH_CHARS or self.rest_chars >= BATCH_CHARS:
            self.write_waiting()

    def write_waiting(self) -> None:
        """Encode all waiting users together, cut each at the cap, and write those who stay, split by split."""
        ids, lengths, counts = self._encode_together(self.texts, [user.num_texts for user in self.waiting])
        cap = self.options.tokens_per_user
        if cap is not None:
            more = [i for i, user in enumerate(self.waiting) if user.rest and counts[i] < cap]
            if more:
                rests = [self.waiting[i].rest for i in more]
                texts = list(itertools.chain.from_iterable(rests))
                rest_ids, rest_lengths, rest_counts = self._encode_together(texts, [len(rest) for rest in rests])
                ids = np.insert(ids, lengths.cumsum()[more].repeat(rest_lengths), rest_ids)
                lengths[more] += rest_lengths
                counts[more] += rest_counts
            if (counts > cap).any():
                edges = np.concatenate([[0], np.cumsum(lengths)])
                keep = np.ones(len(ids), dtype=bool)
                for i in np.flatnonzero(counts > cap).tolist():
                    lengths[i] = len(truncate_stream(ids[edges[i] : edges[i + 1]], cap))
                    keep[edges[i] + lengths[i] : edges[i + 1]] = False
                ids, counts = ids[keep], np.minimum(counts, cap)
        users = [user.user for user in self.waiting]
        split_of = np.array([self.splits.split_of(user) for user in users], dtype=object)
        stays = counts >= self.options.min_tokens
        for split, writer in self.writers.items():
            mine = stays & (split_of == split)
            own = ids[np.repeat(mine, lengths)]
            writer.append_many(own, lengths[mine])
            self._count(
                split, [users[i] for i in np.flatnonzero(mine)], int(counts[mine].sum()), _unknown_and_ends(own)
            )
        self.counts["users_seen"] += len(users)
        self.counts["users_too_short"] += len(users) - int(stays.sum())
        self.waiting, self.texts, self.chars, self.rest_chars = [], [], 0, 0

    def _encode_together(self, texts: list[str], per_user: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Encode the texts of several users; return all ids, and for each user the numbers of ids and of tokens."""
        ids, begins = self.encoder.encode(texts)
        first = np.concatenate([[0], np.cumsum(per_user)]).astype(np.int64)
        lengths = np.diff(begins[first])
        sequences = np.concatenate([[0], np.cumsum(np.diff(begins) > 0)])[first]
        return ids, lengths, lengths - np.diff(sequences)  # each sequence has one BOS, which is not counted

    def _write_long(self, user: str, texts: Iterator[str]) -> None:
        """Write a user in pieces, and discard the user if they turn out too short."""
        split = self.splits.split_of(user)
        writer, count, unknown_and_ends = self.writers[split], 0, np.zeros(2, dtype=np.int64)
        for ids, number in encode_in_pieces(texts, self.encoder, self.options.tokens_per_user):
            writer.write(ids.tobytes())
            count += number
            unknown_and_ends += _unknown_and_ends(ids)
        self.counts["users_seen"] += 1
        if count >= self.options.min_tokens:
            writer.end_user()
            self._count(split, [user], count, unknown_and_ends)
        else:
            writer.discard_user()
            self.counts["users_too_short"] += 1

    def _count(self, split: str, users: list[str], tokens: int, unknown_and_ends: np.ndarray) -> None:
        self.counts[f"{split}_users"] += len(users)
        self.counts[f"{split}_tokens"] += tokens
        self.counts[f"{split}_unknown"] += int(unknown_and_ends[0])
        self.counts[f"{split}_ends"] += int(unknown_and_ends[1])
        self.written_users.setdefault(split, []).extend(users)


def _first_chars(cap: int | None) -> int:
    """The number of characters that usually have `cap` tokens (six for each), and at most `BATCH_CHARS`."""
    return BATCH_CHARS if cap is None else min(BATCH_CHARS, 6 * cap)


def _unknown_and_ends(ids: np.ndarray) -> np.ndarray:
    """The numbers of UNK and of EOS among these ids."""
    return np.array([np.count_nonzero(ids == UNK), np.count_nonzero(ids == EOS)], dtype=np.int64)


def unknown_rate(counts: Mapping[str, int], split: str = "train") -> float:
    """Return the fraction of the words of a split that are not in the vocabulary, from the counts of `EncodeShard`.

    Args:
        counts: The counts of users by split, as in counts.json.
        split: The split.
    """
    words = counts.get(f"{split}_tokens", 0) - counts.get(f"{split}_ends", 0)
    return counts.get(f"{split}_unknown", 0) / words if words else 0.0


class Encoder:
    """Turns texts into ids with a tokenizer and a vocabulary. Texts that are split into words use `FastWordEncoder`.

    Args:
        tokenizer: Splits text into words.
        vocabulary: Gives each word its id.

    Example:
        >>> encoder = Encoder(WordTokenizer(), Vocabulary.of(["a", "b"]))
        >>> ids, begins = encoder.encode(["a b", "", "b zebra"])
        >>> ids.tolist(), begins.tolist()
        ([0, 3, 4, 1, 0, 4, 2, 1], [0, 4, 4, 8])
    """

    def __init__(self, tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
        self.dtype = token_dtype(len(vocabulary))
        self._tokenizer, self._vocabulary = tokenizer, vocabulary
        self._fast = FastWordEncoder(tokenizer, vocabulary) if isinstance(tokenizer, WordTokenizer) else None

    def encode(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Encode each text as BOS words EOS.

        Returns:
            The ids of all texts one after the other, and the index where each text begins (at the end, the number of
            ids). A text without any word has no ids: it begins where the next text does.
        """
        if not texts:
            return np.empty(0, dtype=self.dtype), np.zeros(1, dtype=np.int64)
        ids, begins = self._encode_words(texts) if self._fast is not None else self._encode_each(texts)
        lengths = np.diff(begins)
        is_empty = lengths == 2  # BOS, EOS
        if is_empty.any():
            empty_begins = begins[:-1][is_empty]
            ids = np.delete(ids, np.concatenate([empty_begins, empty_begins + 1]))
            begins = np.concatenate([[0], np.cumsum(np.where(is_empty, 0, lengths))])
        return ids, begins

    def _encode_words(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Encode with `FastWordEncoder`, which needs some hundred bytes per word: a very long text goes in pieces."""
        assert self._fast is not None
        if max(map(len, texts)) <= BATCH_CHARS:
            return self._fast.encode(texts)
        ends = np.array([BOS], dtype=self.dtype), np.array([EOS], dtype=self.dtype)
        bodies = [[self._fast.encode([piece])[0][1:-1] for piece in cut_text(text, BATCH_CHARS)] for text in texts]
        ids = np.concatenate([part for body in bodies for part in (ends[0], *body, ends[1])])
        return ids, np.concatenate([[0], np.cumsum([sum(map(len, body)) + 2 for body in bodies])])

    def _encode_each(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        bodies = [self._vocabulary.encode_words(self._tokenizer.split(text)) for text in texts]
        ids = np.concatenate([part for body in bodies for part in ([BOS], body, [EOS])]).astype(self.dtype)
        return ids, np.concatenate([[0], np.cumsum([len(body) + 2 for body in bodies])])


@functools.lru_cache(maxsize=1)
def _cached_encoder(tokenizer: Tokenizer, vocabulary: Vocabulary) -> Encoder:
    """One encoder per process, so that the words it has cached serve every shard."""
    return Encoder(tokenizer, vocabulary)


def truncate_stream(ids: np.ndarray, cap: int) -> np.ndarray:
    """Return the longest prefix of a stream with at most `cap` tokens. BOS is not counted, and is never the last id.

    Args:
        ids: The stream of a user.
        cap: The largest number of tokens.

    Example:
        >>> truncate_stream(np.array([BOS, 3, EOS, BOS, 4, EOS]), 2).tolist()
        [0, 3, 1]
    """
    counted = np.flatnonzero(ids != BOS)
    if len(counted) <= cap:
        return ids
    return ids[: int(counted[cap - 1]) + 1 if cap else 0]


def encode_in_pieces(texts: Iterable[str], encoder: Encoder, cap: int | None) -> Iterator[tuple[np.ndarray, int]]:
    """Encode one long user in pieces; yield each piece with its number of tokens, and stop reading at the cap.

    A piece has about as much text as the cap needs, and at most `BATCH_CHARS`.

    Args:
        texts: The sequences of the user, in order.
        encoder: Turns texts into ids.
        cap: The largest number of tokens; None reads everything.
    """
    piece_chars = _first_chars(cap)
    left = sys.maxsize if cap is None else cap
    for piece in text_batches(texts, piece_chars):
        ids, begins = encoder.encode(piece)
        count = len(ids) - int(np.count_nonzero(np.diff(begins)))
        yield (ids, count) if count <= left else (truncate_stream(ids, left), left)
        left -= min(count, left)
        if not left:
            return


def text_batches(texts: Iterable[str], min_chars: int) -> Iterator[list[str]]:
    """Group texts into lists of about `min_chars` characters.

    Args:
        texts: Texts of any length.
        min_chars: A list ends with the text that reaches this number of characters.
    """
    batch: list[str] = []
    chars = 0
    for text in texts:
        batch.append(text)
        chars += len(text)
        if chars >= min_chars:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


_FIRST_BITS = 15  # the first size of a table, as a power of two
_MIX = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F))  # odd, so multiplication is invertible


BREAK = "\x7f"  # a chunk that separates two texts: EOS, BOS
_SPACE = 0x20  # this byte and all below separate chunks: white space and control characters
_MAX_CHUNKS = 1 << 20  # chunks in the cache, with 16 ids each on average; then the cache is cleared
_COUNT_BITS = 31  # a value of the table: the index of a chunk's ids, and in the last bits their number
_COUNT = (1 << _COUNT_BITS) - 1
_END = -1  # marks the end of the ids of a chunk in `_tokenize`
# The low n bytes; 0 for anything longer than 8 bytes.
_MASK = np.array([*((1 << 8 * n) - 1 for n in range(9)), 0], dtype=np.uint64)


class IntegerHashTable:
    """A hash table from integer keys to integer values, with vectorised lookup. The key 0 always has the value 0.

    Open addressing with linear probing, at most half full: all keys of a lookup take their steps together, and nearly
    all are found in the first slot. A row of the table is a slot, with key and value next to each other, since the cost
    of a lookup is the access to memory. Slot 0 is reserved for the key 0; no other key has 0 as its first integer.

    Args:
        key_size: The number of 64-bit integers in a key, 1 or 2.
    """

    def __init__(self, key_size: int) -> None:
        self.num_keys = 0
        self._allocate(_FIRST_BITS, key_size)

    def find(self, *key: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Look up keys.

        Args:
            key: One or two arrays of uint64, the integers of the keys.

        Returns:
            The value of each key, int64, and the indices of the keys that are not in the table.
        """
        slot = self._first_slot(key)
        rows = self._rows.take(slot, axis=0, mode="clip")  # clip skips the bounds check
        values = rows[:, -1].copy()
        missed = np.flatnonzero(_differ(rows, key))
        slot, unknown = slot[missed], [missed[:0]]
        while len(missed):
            empty = (self._rows[slot, 0] == 0) & (slot != 0)
            unknown.append(missed[empty])
            missed, slot = missed[~empty], (slot[~empty] + 1) & self._last
            rows = self._rows[slot]
            values[missed] = rows[:, -1]
            on = _differ(rows, [numbers[missed] for numbers in key])
            missed, slot = missed[on], slot[on]
        return values.view(np.int64), np.concatenate(unknown)

    def put(self, values: np.ndarray, *key: np.ndarray) -> None:
        """Add new keys, each once, with their values."""
        self.num_keys += len(values)
        if 2 * self.num_keys > self._last:
            self._grow()
        self._fill(np.stack([*key, values.view(np.uint64)], axis=1))

    def _fill(self, rows: np.ndarray) -> None:
        """Of several rows with one slot, the first gets it and the others try the next slot."""
        slot = self._first_slot([rows[:, i] for i in range(rows.shape[1] - 1)])
        while len(slot):
            wanted, first = np.unique(slot, return_index=True)
            first = first[(self._rows[wanted, 0] == 0) & (wanted != 0)]
            self._rows[slot[first]] = rows[first]
            rest = np.ones(len(slot), dtype=bool)
            rest[first] = False
            rows, slot = rows[rest], (slot[rest] + 1) & self._last

    def _allocate(self, bits: int, key_size: int) -> None:
        self._shift, self._last = np.uint64(64 - bits), (1 << bits) - 1
        self._rows = np.zeros((1 << bits, key_size + 1), dtype=np.uint64)

    def _grow(self) -> None:
        """Move all rows to a table of at least four slots per key."""
        old = self._rows[self._rows[:, 0] != 0]
        self._allocate((4 * self.num_keys).bit_length(), self._rows.shape[1] - 1)
        self._fill(old)

    def _first_slot(self, key: "tuple[np.ndarray, ...] | list[np.ndarray]") -> np.ndarray:
        """The slot where the search for a key begins: the top bits of a product."""
        mixed = key[0] * _MIX[0]
        for numbers in key[1:]:
            mixed ^= numbers * _MIX[1]
            mixed *= _MIX[0]
        mixed >>= self._shift
        return mixed.view(np.int64)


def _differ(rows: np.ndarray, key: "tuple[np.ndarray, ...] | list[np.ndarray]") -> np.ndarray:
    """A mask of the slots that hold another key."""
    differ = rows[:, 0] != key[0]
    for i in range(1, len(key)):
        differ |= rows[:, i] != key[i]
    return differ


class TextChunks:
    """The positions of the chunks of a text, and the keys of the short ones.

    Two white spaces in a row have an empty chunk with key 0 between them. Chunks of more than 8 bytes have key 0 too;
    they are looked up separately.
    """

    def __init__(self, text: bytes) -> None:
        self.bytes = b" %b%b" % (text, b" " * 17)  # room to read a key as 8 or 16 bytes at the last chunk
        space = np.flatnonzero(np.frombuffer(self.bytes, dtype=np.uint8)[:-16] <= _SPACE)
        self.begin = space[:-1] + 1
        self.length = space[1:] - self.begin
        self._eight = np.ndarray(
            (len(self.bytes) - 7,), dtype="<u8", buffer=self.bytes, strides=(1,)
        )  # a key at every byte
        self.low = self._eight[self.begin]
        self.low &= _MASK.take(self.length, mode="clip")

    def long_keys(self, i: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the keys of chunks of 9 to 16 bytes."""
        begin = self.begin[i]
        return self._eight[begin], self._eight[begin + 8] & _MASK[self.length[i] - 8]

    def contents(self, i: "np.ndarray | list[int]") -> list[bytes]:
        """Return the bytes of chunks."""
        begin = self.begin[i]
        return [self.bytes[b:e] for b, e in zip(begin.tolist(), (begin + self.length[i]).tolist(), strict=True)]


class FastWordEncoder:
    """Encodes texts with a cache from chunks to ids. Chunks that are not in the cache go through the tokenizer."""

    def __init__(self, tokenizer: WordTokenizer, vocabulary: Vocabulary) -> None:
        self._tokenizer = tokenizer
        self._dtype = token_dtype(len(vocabulary))
        # The word "<BOS>" in a text is not the special word. A line end is in no chunk, so it can mark the end.
        self._id_of = {word: i for i, word in enumerate(vocabulary.words) if i > UNK} | {"\n": _END}
        self._clear()

    def encode(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Encode each text as BOS words EOS.

        The texts are joined with a break between them, split into chunks, and all chunks are looked up at once. The
        value of a chunk says where its ids are in the cache and how many they are; one indexing operation collects all
        ids.

        Args:
            texts: The texts; at least one.

        Returns:
            The ids of all texts one after the other, and the index where each text begins (at the end, the total).
        """
        if (
            self._short.num_keys + self._middle.num_keys + len(self._long) > _MAX_CHUNKS
            or self._used > 16 * _MAX_CHUNKS
        ):
            self._clear()
        values = self._look_up(TextChunks(_join_texts(texts)))
        count = values & _COUNT
        end = count.cumsum()
        total = int(end[-1])
        values >>= _COUNT_BITS
        values -= end
        values += count
        index = values.repeat(count)  # of each id in self._ids
        index += self._range(total)
        ids = np.empty(total, dtype=self._dtype)
        ids[0], ids[1:] = BOS, self._ids[index[:-1]]  # the BOS of the last break begins no text
        return ids, np.append(np.flatnonzero(ids == BOS), total)

    def _look_up(self, chunks: TextChunks) -> np.ndarray:
        """Return the value of every chunk; new chunks are added to the cache."""
        values, unknown = self._short.find(chunks.low)
        long = np.flatnonzero(chunks.length > 8)
        if len(unknown):
            new, learned = self._tokenize(chunks, unknown)
            self._short.put(learned, chunks.low[new])
            values[unknown], _ = self._short.find(chunks.low[unknown])
        if len(long):
            length = chunks.length[long]
            middle, rest = long[length <= 16], long[length > 16].tolist()
            values[middle] = self._look_up_middle(chunks, middle)
            for i, chunk in zip(rest, chunks.contents(rest), strict=True):
                if chunk not in self._long:
                    self._long[chunk] = int(self._tokenize(chunks, np.array([i]))[1][0])
                values[i] = self._long[chunk]
        return values

    def _look_up_middle(self, chunks: TextChunks, middle: np.ndarray) -> np.ndarray:
        """The same for chunks of 9 to 16 bytes, whose keys are two integers."""
        key = chunks.long_keys(middle)
        values, unknown = self._middle.find(*key)
        if len(unknown):
            new, learned = self._tokenize(chunks, middle[unknown])
            self._middle.put(learned, *chunks.long_keys(new))
            values[unknown], _ = self._middle.find(*(numbers[unknown] for numbers in key))
        return values

    def _tokenize(self, chunks: TextChunks, unknown: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tokenize chunks that are not in the cache; return the index of each distinct chunk, and its value."""
        new = dict(zip(chunks.contents(unknown), unknown.tolist(), strict=True))
        texts = [chunk.decode("utf-8", "surrogatepass") for chunk in new]
        plain = np.array([text.isascii() for text in texts])
        flat = self._tokenizer.split_ascii([text for text in texts if text.isascii()])
        for text in texts:
            if not text.isascii():
                flat += [*self._tokenizer.split_chunk(text), "\n"]
        ids = np.fromiter(map(self._id_of.get, flat, itertools.repeat(UNK)), dtype=np.int64, count=len(flat))
        indices = np.array([*new.values()])
        return np.concatenate([indices[plain], indices[~plain]]), self._store_ids(ids)

    def _store_ids(self, ids: np.ndarray) -> np.ndarray:
        """Append the ids of chunks, each ended by `_END`, to the cache; return the value of each chunk."""
        end = np.flatnonzero(ids == _END)
        count = np.diff(end, prepend=-1) - 1
        begin = self._used + count.cumsum() - count
        ids = ids[ids != _END]
        while self._used + len(ids) > len(self._ids):
            self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
        self._ids[self._used : self._used + len(ids)] = ids
        self._used += len(ids)
        return (begin << _COUNT_BITS) + count

    def _range(self, total: int) -> np.ndarray:
        """0, 1, 2, ..., computed once."""
        if total > len(self._integers):
            self._integers = np.arange(2 * total)
        return self._integers[:total]

    def _clear(self) -> None:
        """Empty the cache, except for the break between texts."""
        self._short, self._middle = IntegerHashTable(1), IntegerHashTable(2)
        self._long: dict[bytes, int] = {}
        self._ids, self._used = np.empty(1 << 16, dtype=self._dtype), 0
        self._integers = np.empty(0, dtype=np.int64)
        self._short.put(self._store_ids(np.array([EOS, BOS, _END])), np.array([ord(BREAK)], dtype=np.uint64))


def _join_texts(texts: list[str]) -> bytes:
    """Join texts with a break after each. Each is encoded alone: one emoji makes a joined str four times as wide."""
    joined = f" {BREAK} ".encode().join([text.encode("utf-8", "surrogatepass") for text in [*texts, ""]])
    if joined.count(BREAK.encode()) == len(texts):
        return joined
    return _join_texts([text.replace(BREAK, " ") for text in texts])
