"""Encodes text: turns the posts of each user into one stream of token ids and writes it to the user's shard.

The stream of a user is BOS words EOS, BOS words EOS, ..., one such sequence per post (or per sentence), in the order of
time, cut at exactly `tokens_per_user` tokens. The count includes EOS and excludes BOS, which is never predicted
(docs/decisions/0020). In the paper, users are "truncated to have exactly 1600 tokens", and BOS and EOS are implicit.

    EncodingOptions   the choices: sequence, tokens_per_user, min_tokens, strip_quotes
    EncodeShard       the task that a grouping backend runs on each shard: writes its files and returns counts
    Encoder           converts texts to ids
    FastWordEncoder   does the same for `WordTokenizer`, with a cache

Short users are encoded many at a time and a very long user is encoded in pieces, so that at most a few megabytes of
text are in memory. The same code runs on one machine and on Spark workers.

**The fast encoder** caches the ids of every chunk of text and looks up thousands of chunks at once. A chunk is the text
between two white spaces. Most chunks occur many times in a text, and `WordTokenizer` splits each chunk independently of
its neighbours, so a table from chunks to ids gives the same result as the tokenizer. A test compares the two. The key
of a chunk of up to 8 bytes is one 64-bit integer with these bytes, that of a chunk of 9 to 16 bytes is two such
integers, so no two chunks have the same key. Longer chunks are rare and are kept in a dictionary. For measurements and
alternatives see docs/decisions/0026.
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
from typing import Any, Literal

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
"""The number of characters that are collected before they are encoded together."""

SequenceUnit = Literal["post", "sentence"]
"""What one pair of BOS and EOS encloses."""

_SENTENCE_END = re.compile(r"(?<=[.!?…。！？])\s+|\n+")

# The header of a forwarded message and all text after it, which another user wrote.
_FORWARDED = re.compile(
    r"^[ \t>]*(?:-{2,}[ \t]*(?:original message|forwarded (?:message|by)\b.*?)[ \t]*-*|begin forwarded message:)"
    r"[ \t]*$.*",
    re.IGNORECASE | re.MULTILINE | re.DOTALL,
)
# A line such as "On Mon, 14 May 2001, Kim wrote:" directly above a quoted line.
_INTRODUCTION = re.compile(
    r"^[ \t]*(?:on|am|le|el)\b[^\n]{0,200}(?:\n[^\n>]{0,100})?:[ \t]*\n+(?=[ \t]*(?:>|&gt;))", re.I | re.M
)
_QUOTED_LINE = re.compile(r"^[ \t]*(?:>|&gt;)[^\n]*(?:\n|\Z)", re.MULTILINE)
_QUOTE_BLOCK = re.compile(r"\[quote[^\]]*\].*?\[/quote\]", re.IGNORECASE | re.DOTALL)


def strip_quotes(text: str) -> str:
    """Return the text without quoted lines, the lines that introduce them, [quote] blocks and forwarded messages.

    Another user wrote the quoted words. If they stayed, they would also influence the model through the user who quotes
    them, and the guarantee of the user who wrote them does not cover that.

    Example:
        >>> strip_quotes("> what do you think?\\nI agree.")
        'I agree.'
    """
    if ">" not in text and "&gt;" not in text and "--" not in text and "[" not in text and "orwarded" not in text:
        return text  # Most posts end here: these five substring searches are faster than the four regular expressions.
    text = _FORWARDED.sub("", text)
    text = _QUOTE_BLOCK.sub(" ", text)
    text = _INTRODUCTION.sub("", text)
    return _QUOTED_LINE.sub("", text)


def split_sequences(texts: Iterable[str], unit: SequenceUnit) -> Iterable[str]:
    """Return the sequences of a user: the whole posts, or the sentences (up to . ! ? or the end of a line).

    Args:
        texts: The posts of a user.
        unit: What becomes one sequence, enclosed by BOS and EOS: "post" or "sentence".
    """
    return texts if unit == "post" else itertools.chain.from_iterable(map(_SENTENCE_END.split, texts))


@dataclass(frozen=True, kw_only=True)
class EncodingOptions:
    """How posts become the stream of a user, and which users stay in the store.

    Args:
        sequence: What BOS and EOS enclose: "post" or "sentence".
        min_tokens: Users with fewer tokens are left out.
        tokens_per_user: The streams of users with more tokens are cut at exactly this number; None cuts nothing.
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
        """Split posts into sequences, to be enclosed by BOS and EOS. If `strip_quotes` is set, remove quotes first."""
        return split_sequences(map(strip_quotes, posts) if self.strip_quotes else posts, self.sequence)


@dataclass(frozen=True, kw_only=True)
class GroupedText:
    """The scanned text of all users and the choices for its encoding: the input of `VocabularySource.build`.

    A source that counts words in the users' text runs a task over the shards with `backend`.

    Args:
        tokenizer: Splits text into words.
        encoding: How posts become streams.
        splits: Which users train.
        backend: Runs a task on each shard.
        grouping: The plan of the grouping, with the folder of the scanned rows.
        progress: Called with the finished fraction of a step.
        releases: The log of private vocabularies drawn for this store, with their costs.
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
    """A `ShardTask` that writes the streams of the users of a shard into `folder`/<split>/ and returns counts.

    Args:
        folder: The folder of the store.
        tokenizer: Splits text into words.
        vocabulary: Gives each word its id.
        options: How posts become streams.
        splits: Which user is in which split.
        user_ids: A folder for the user ids of each shard, from which `pipeline` makes the owner's map; None writes no
            user ids.
    """

    folder: Path
    tokenizer: Tokenizer
    vocabulary: Vocabulary
    options: EncodingOptions
    splits: SplitRule
    user_ids: Path | None = None

    def __call__(self, shard: int, rows: Rows) -> dict[str, Any]:
        """Write the files of one shard and return its counts, which only the owner of the data may see.

        Returns:
            `users_seen`, `users_too_short`, and for each split `<split>_users`, `<split>_tokens` (BOS not counted),
            `<split>_unknown` (UNK) and `<split>_ends` (EOS).

        Raises:
            CorpusError: The files cannot be written, for example because the disk is full.
        """
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
                output.counts[f"{split}_unknown"] += 0  # makes sure that the key exists
        except OSError as error:
            for writer in writers.values():
                writer.abandon()
            raise CorpusError(
                f"Cannot write to {self.folder}: {error.strerror}. Free some space, then run the same command again."
            ) from None
        if self.user_ids is not None:
            storage.replace_file(self.user_ids / f"{shard:05d}.json", json.dumps(output.written_users).encode())
        return dict(output.counts)


@dataclass(frozen=True, slots=True, repr=False)
class _WaitingUser:
    """A user whose text is not encoded yet.

    The first `num_texts` texts of the user are in `_ShardOutput.texts`; `rest` holds the texts after them.
    """

    user: str
    num_texts: int
    rest: list[str]


@dataclass(kw_only=True, repr=False)
class _ShardOutput:
    """Collects the users of one shard, encodes many of them together, and writes them to the shard's files.

    If there is a cap (`tokens_per_user`), only as many of the first texts of a user are encoded as usually reach the
    cap. The other texts are kept in `_WaitingUser.rest` and are encoded only if the first ones did not reach it.
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
        """Collect the text of the next user. A very long user is encoded and written immediately, in pieces.

        Args:
            user: The id of the user.
            lists: The user's sequences in order, in one or several lists.
        """
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
        """Encode all waiting users, cut each at the cap, and write those with at least `min_tokens` to their splits."""
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
        """Encode the texts of several users.

        Args:
            texts: The texts of all users, one user after the other.
            per_user: The number of texts of each user.

        Returns:
            The ids of all users in one array, the number of ids of each user, and the number of tokens of each user
            (the ids without BOS).
        """
        ids, begins = self.encoder.encode(texts)
        first = np.concatenate([[0], np.cumsum(per_user)]).astype(np.int64)
        lengths = np.diff(begins[first])
        sequences = np.concatenate([[0], np.cumsum(np.diff(begins) > 0)])[first]
        return ids, lengths, lengths - np.diff(sequences)  # each sequence has one BOS, which is not a token of the user

    def _write_long(self, user: str, texts: Iterator[str]) -> None:
        """Encode and write one user piece by piece; remove what was written if there are fewer than `min_tokens`."""
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
        """Add users that were written to a split to the counts and to the list of written user ids."""
        self.counts[f"{split}_users"] += len(users)
        self.counts[f"{split}_tokens"] += tokens
        self.counts[f"{split}_unknown"] += int(unknown_and_ends[0])
        self.counts[f"{split}_ends"] += int(unknown_and_ends[1])
        self.written_users.setdefault(split, []).extend(users)


def _first_chars(cap: int | None) -> int:
    """Return the number of characters to encode first: 6 for each of `cap` tokens, but at most `BATCH_CHARS`."""
    return BATCH_CHARS if cap is None else min(BATCH_CHARS, 6 * cap)


def _unknown_and_ends(ids: np.ndarray) -> np.ndarray:
    """Return an array of two integers: how many of these ids are UNK, and how many are EOS."""
    return np.array([np.count_nonzero(ids == UNK), np.count_nonzero(ids == EOS)], dtype=np.int64)


def unknown_rate(counts: Mapping[str, int]) -> float:
    """Return the fraction of the training users' words that are UNK; 0 if they have no words.

    Args:
        counts: The counts that `EncodeShard` returns, summed over the shards (`users` in counts.json).
    """
    words = counts.get("train_tokens", 0) - counts.get("train_ends", 0)
    return counts.get("train_unknown", 0) / words if words else 0.0


class Encoder:
    """Converts texts to ids with a tokenizer and a vocabulary. It uses `FastWordEncoder` for a `WordTokenizer`.

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
            The ids of all texts in one array, and an array with the index at which each text begins, followed by the
            total number of ids. A text without any word has no ids, not even BOS and EOS.
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
        """Encode with `FastWordEncoder`. A very long text is cut, since the encoder needs a few 100 bytes per word."""
        assert self._fast is not None
        if max(map(len, texts)) <= BATCH_CHARS:
            return self._fast.encode(texts)
        ends = np.array([BOS], dtype=self.dtype), np.array([EOS], dtype=self.dtype)
        bodies = [[self._fast.encode([piece])[0][1:-1] for piece in cut_text(text, BATCH_CHARS)] for text in texts]
        ids = np.concatenate([part for body in bodies for part in (ends[0], *body, ends[1])])
        return ids, np.concatenate([[0], np.cumsum([sum(map(len, body)) + 2 for body in bodies])])

    def _encode_each(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Encode with any other tokenizer, one text at a time."""
        bodies = [self._vocabulary.encode_words(self._tokenizer.split(text)) for text in texts]
        ids = np.concatenate([part for body in bodies for part in ([BOS], body, [EOS])]).astype(self.dtype)
        return ids, np.concatenate([[0], np.cumsum([len(body) + 2 for body in bodies])])


@functools.lru_cache(maxsize=1)
def _cached_encoder(tokenizer: Tokenizer, vocabulary: Vocabulary) -> Encoder:
    """Return the encoder of this process. It is kept, so that its cache is used for all shards of the process."""
    return Encoder(tokenizer, vocabulary)


def truncate_stream(ids: np.ndarray, cap: int) -> np.ndarray:
    """Return the beginning of a stream: its first `cap` tokens, or all of it if it has fewer.

    BOS does not count as a token. A stream that is cut never ends with BOS.

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
    """Encode one long user in pieces, and stop reading when the cap is reached.

    A piece has about as much text as the cap needs, and at most about `BATCH_CHARS` characters.

    Args:
        texts: The sequences of the user, in order.
        encoder: Converts texts to ids.
        cap: The largest number of tokens of the user; None reads everything.

    Yields:
        The ids of each piece, and its number of tokens (the ids without BOS).
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
    """Yield the texts in lists of at least `min_chars` characters; the last list may have fewer.

    Args:
        texts: Texts of any length. A text is never divided.
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


_FIRST_BITS = 15  # A new hash table has 2^15 slots.
_MIX = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F))  # odd, so multiplication is invertible


BREAK = "\x7f"  # the chunk that is inserted between two texts; its ids are EOS, BOS
_SPACE = 0x20  # This byte and all smaller ones (white space and control characters) separate chunks.
_MAX_CHUNKS = 1 << 20  # The cache is cleared when it has more chunks than this, or more than 16 times as many ids.
_COUNT_BITS = 31  # A value of the table holds the number of ids of a chunk in its low 31 bits, their index above.
_COUNT = (1 << _COUNT_BITS) - 1
_END = -1  # marks the end of the ids of a chunk in `_tokenize`
# _MASK[n] selects the n low bytes of an integer. Entry 9 is 0, so that chunks of more than 8 bytes get the key 0.
_MASK = np.array([*((1 << 8 * n) - 1 for n in range(9)), 0], dtype=np.uint64)


class IntegerHashTable:
    """A hash table from integer keys to integer values, with vectorised lookup. The key 0 always has the value 0.

    The table uses open addressing with linear probing and is at most half full, so that nearly every key is found in
    the first slot. All keys of a lookup are probed together. Key and value are neighbours in one row, since memory
    access dominates the cost of a lookup. Slot 0 is reserved for the key 0; the first integer of any other key must not
    be 0.

    Args:
        key_size: The number of 64-bit integers in a key, 1 or 2.
    """

    def __init__(self, key_size: int) -> None:
        self.num_keys = 0
        self._allocate(_FIRST_BITS, key_size)

    def find(self, *key: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Look up many keys.

        Args:
            key: `key_size` arrays of uint64 of equal length: the first integers of the keys, then the second.

        Returns:
            The values, int64 (undefined for missing keys), and the indices of the keys that are not in the table.
        """
        slot = self._first_slot(key)
        rows = self._rows.take(slot, axis=0, mode="clip")  # "clip" is faster, since it needs no bounds check
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
        """Add keys with their values. The keys must be distinct and must not be in the table yet."""
        self.num_keys += len(values)
        if 2 * self.num_keys > self._last:
            self._grow()
        self._fill(np.stack([*key, values.view(np.uint64)], axis=1))

    def _fill(self, rows: np.ndarray) -> None:
        """Write rows into free slots. If several rows need one slot, the first gets it and the others try the next."""
        slot = self._first_slot([rows[:, i] for i in range(rows.shape[1] - 1)])
        while len(slot):
            wanted, first = np.unique(slot, return_index=True)
            first = first[(self._rows[wanted, 0] == 0) & (wanted != 0)]
            self._rows[slot[first]] = rows[first]
            rest = np.ones(len(slot), dtype=bool)
            rest[first] = False
            rows, slot = rows[rest], (slot[rest] + 1) & self._last

    def _allocate(self, bits: int, key_size: int) -> None:
        """Replace the table by an empty one with 2^bits slots."""
        self._shift, self._last = np.uint64(64 - bits), (1 << bits) - 1
        self._rows = np.zeros((1 << bits, key_size + 1), dtype=np.uint64)

    def _grow(self) -> None:
        """Move all rows to a table with at least four slots per key."""
        old = self._rows[self._rows[:, 0] != 0]
        self._allocate((4 * self.num_keys).bit_length(), self._rows.shape[1] - 1)
        self._fill(old)

    def _first_slot(self, key: "tuple[np.ndarray, ...] | list[np.ndarray]") -> np.ndarray:
        """Return the slot at which the search for each key begins: the top bits of its multiplicative hash."""
        mixed = key[0] * _MIX[0]
        for numbers in key[1:]:
            mixed ^= numbers * _MIX[1]
            mixed *= _MIX[0]
        mixed >>= self._shift
        return mixed.view(np.int64)


def _differ(rows: np.ndarray, key: "tuple[np.ndarray, ...] | list[np.ndarray]") -> np.ndarray:
    """Return a mask of the rows whose key is not the key at the same index of `key`."""
    differ = rows[:, 0] != key[0]
    for i in range(1, len(key)):
        differ |= rows[:, i] != key[i]
    return differ


class TextChunks:
    """The positions of the chunks of a text, and the keys of chunks of up to 8 bytes.

    Between two white spaces in a row there is an empty chunk, whose key is 0. Chunks of more than 8 bytes have the key
    0 here; they are looked up separately.

    Args:
        text: The text in UTF-8.

    Attributes:
        begin: The index of the first byte of each chunk.
        length: The length of each chunk in bytes.
        low: The key of each chunk.
    """

    def __init__(self, text: bytes) -> None:
        self.bytes = b" %b%b" % (text, b" " * 17)  # padded, so that 16 bytes can be read from any chunk
        space = np.flatnonzero(np.frombuffer(self.bytes, dtype=np.uint8)[:-16] <= _SPACE)
        self.begin = space[:-1] + 1
        self.length = space[1:] - self.begin
        self._eight = np.ndarray(
            (len(self.bytes) - 7,), dtype="<u8", buffer=self.bytes, strides=(1,)
        )  # the 8 bytes from each position, as an integer
        self.low = self._eight[self.begin]
        self.low &= _MASK.take(self.length, mode="clip")

    def long_keys(self, i: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the keys, each two integers, of the chunks with these indices. They must have 9 to 16 bytes."""
        begin = self.begin[i]
        return self._eight[begin], self._eight[begin + 8] & _MASK[self.length[i] - 8]

    def contents(self, i: "np.ndarray | list[int]") -> list[bytes]:
        """Return the bytes of the chunks with these indices."""
        begin = self.begin[i]
        return [self.bytes[b:e] for b, e in zip(begin.tolist(), (begin + self.length[i]).tolist(), strict=True)]


class FastWordEncoder:
    """Encodes texts with a cache from chunks to ids. The tokenizer splits only chunks that are not in the cache.

    Chunks of up to 8 bytes are cached in `_short`, chunks of 9 to 16 bytes in `_middle`, longer ones in `_long`. The
    value of a chunk is the index of its first id in `_ids` and the number of its ids, packed into one integer.
    """

    def __init__(self, tokenizer: WordTokenizer, vocabulary: Vocabulary) -> None:
        self._tokenizer = tokenizer
        self._dtype = token_dtype(len(vocabulary))
        # Special words have no entry, so that "<BOS>" in a text does not get the id of BOS. "\n" marks the end of a
        # chunk for `_tokenize`; no chunk contains it.
        self._id_of = {word: i for i, word in enumerate(vocabulary.words) if i > UNK} | {"\n": _END}
        self._clear()

    def encode(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Encode each text as BOS words EOS.

        The texts are joined with a break between them and split into chunks, whose values are looked up together. One
        indexing operation then collects the ids of all chunks.

        Args:
            texts: The texts; at least one.

        Returns:
            The ids of all texts in one array, and an array with the index at which each text begins, followed by the
            total number of ids. A text without words has the ids BOS, EOS.
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
        index = values.repeat(count)  # with the next line: the index in self._ids of each id of the result
        index += self._range(total)
        ids = np.empty(total, dtype=self._dtype)
        ids[0], ids[1:] = BOS, self._ids[index[:-1]]  # dropped: the BOS of the last break, after which no text begins
        return ids, np.append(np.flatnonzero(ids == BOS), total)

    def _look_up(self, chunks: TextChunks) -> np.ndarray:
        """Return the value of every chunk. Chunks that are not in the cache are tokenized and added to it."""
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
        """Do the same as `_look_up` for the chunks with the indices `middle`, which have 9 to 16 bytes."""
        key = chunks.long_keys(middle)
        values, unknown = self._middle.find(*key)
        if len(unknown):
            new, learned = self._tokenize(chunks, middle[unknown])
            self._middle.put(learned, *chunks.long_keys(new))
            values[unknown], _ = self._middle.find(*(numbers[unknown] for numbers in key))
        return values

    def _tokenize(self, chunks: TextChunks, unknown: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tokenize chunks that are not in the cache and store their ids.

        Args:
            chunks: The chunks of a text.
            unknown: The indices of the new chunks, in which a chunk may occur several times.

        Returns:
            One index for each distinct chunk, and the value of that chunk.
        """
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
        """Append ids to the cache and return the value of each chunk. The ids of every chunk end with `_END`."""
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
        """Return the integers from 0 to `total` - 1, a slice of an array that is kept between calls."""
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
    """Return the texts in UTF-8, with a break after each. A break character in a text is replaced by a space.

    The texts are encoded before they are joined: a joined str with one emoji would need 4 bytes for every character.
    """
    joined = f" {BREAK} ".encode().join([text.encode("utf-8", "surrogatepass") for text in [*texts, ""]])
    if joined.count(BREAK.encode()) == len(texts):
        return joined
    return _join_texts([text.replace(BREAK, " ") for text in texts])
