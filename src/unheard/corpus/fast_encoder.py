"""A fast encoder for `WordTokenizer`: caches the ids of every chunk of text and looks up thousands of chunks at once.

A chunk is the text between white space. Running text repeats its chunks, and the rules of `WordTokenizer` look at one
chunk at a time, so a table from chunks to ids gives the same result as the rules. A test compares the two.

    IntegerHashTable   a hash table in numpy arrays, with keys of one or two 64-bit integers
    TextChunks         the positions of the chunks of a text, and the keys of the short ones
    FastWordEncoder    texts to ids

A chunk of up to 8 bytes is its own key as one integer, one of up to 16 bytes as two: no two chunks have the same key.
Longer chunks are rare and are kept in a dictionary. Measurements and the alternatives that were tried:
docs/decisions/0026.
"""

from itertools import repeat

import numpy as np

from unheard.corpus.shards import token_dtype
from unheard.corpus.tokenizers import WordTokenizer
from unheard.corpus.vocabulary import BOS, EOS, UNK, Vocabulary

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
        ids = np.fromiter(map(self._id_of.get, flat, repeat(UNK)), dtype=np.int64, count=len(flat))
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
