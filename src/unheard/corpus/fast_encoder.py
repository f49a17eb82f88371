"""Chunks of text to ids, thousands at once: what the tokens' rules make of a chunk is worked out once and remembered.

In: texts. Out: the ids of all their words. A chunk is what stands between white space; running text repeats its chunks,
and the rules of WordTokenizer look at one chunk at a time, so a table gives the same as the rules. A chunk of up to 16 bytes
is its own key, as one or two 64-bit numbers: no two can be mistaken for each other (slots.py). What each look costs, and
what else was tried: decision 0026.
A hash table of numpy arrays: thousands of keys are looked up at once, so that memory answers many at once.

In: keys of one or two 64-bit numbers each. Out: the value of each, and which have none. Open addressing with linear
probing: all keys take their steps together, and nearly all are home at the first. A slot is a row, key and value side by
side, since what a look costs is the way to memory. The empty key, 0, lives in slot 0, alone: nothing else has a first
number of 0.
"""

from itertools import repeat

import numpy as np

from unheard.corpus.shards import token_dtype
from unheard.corpus.tokenizers import WordTokenizer
from unheard.corpus.vocabulary import BOS, EOS, UNK, Vocabulary

_FIRST_BITS = 15
_MIX = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F))  # odd: multiplication loses nothing


class Slots:
    """Values by key; the empty key, 0, has the value 0. At most half full: it grows."""

    def __init__(self, numbers_per_key: int) -> None:
        self.known = 0
        self._make(_FIRST_BITS, numbers_per_key)

    def find(self, *key: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The value of each key, and the places of those that have none."""
        slot = self._home(key)
        rows = self._rows.take(slot, axis=0, mode="clip")  # clip: slots need no check
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
        """New keys, each once, with their values. Of several that want one slot the first gets it, the others go on."""
        self.known += len(values)
        if 2 * self.known > self._last:
            self._grow()
        self._fill(np.stack([*key, values.view(np.uint64)], axis=1))

    def _fill(self, rows: np.ndarray) -> None:
        slot = self._home([rows[:, i] for i in range(rows.shape[1] - 1)])
        while len(slot):
            places, first = np.unique(slot, return_index=True)
            first = first[(self._rows[places, 0] == 0) & (places != 0)]
            self._rows[slot[first]] = rows[first]
            rest = np.ones(len(slot), dtype=bool)
            rest[first] = False
            rows, slot = rows[rest], (slot[rest] + 1) & self._last

    def _make(self, bits: int, numbers_per_key: int) -> None:
        self._shift, self._last = np.uint64(64 - bits), (1 << bits) - 1
        self._rows = np.zeros((1 << bits, numbers_per_key + 1), dtype=np.uint64)

    def _grow(self) -> None:
        old = self._rows[self._rows[:, 0] != 0]
        self._make((4 * self.known).bit_length(), self._rows.shape[1] - 1)
        self._fill(old)

    def _home(self, key: "tuple[np.ndarray, ...] | list[np.ndarray]") -> np.ndarray:
        """The slot that a key wants: the top bits of a product."""
        mixed = key[0] * _MIX[0]
        for numbers in key[1:]:
            mixed ^= numbers * _MIX[1]
            mixed *= _MIX[0]
        mixed >>= self._shift
        return mixed.view(np.int64)


def _differ(rows: np.ndarray, key: "tuple[np.ndarray, ...] | list[np.ndarray]") -> np.ndarray:
    differ = rows[:, 0] != key[0]
    for i in range(1, len(key)):
        differ |= rows[:, i] != key[i]
    return differ


BREAK = "\x7f"  # a chunk that stands between two texts: EOS, BOS
_SPACE = 0x20  # it and all below part words, white space or control characters; BREAK is one, too, when a text holds it
_LIMIT = 1 << 20  # remembered chunks, and 16 ids for each; then forget all and begin again
_COUNT_BITS = 31  # a value in the table: where a chunk's ids begin, and in its last bits how many they are
_COUNT = (1 << _COUNT_BITS) - 1
_END = -1  # behind the ids of a chunk that is being learned
_MASK = np.array([*((1 << 8 * n) - 1 for n in range(9)), 0], dtype=np.uint64)  # nothing of what is longer


class Chunks:
    """Where the chunks of a text are, and the keys of the short ones. Two white spaces in a row have an empty chunk
    between them, of key 0; what is longer than 8 bytes has that key, too, and is looked for elsewhere."""

    def __init__(self, text: bytes) -> None:
        self.bytes = b" %b%b" % (text, b" " * 17)  # a key is read as 8 or 16 bytes, however short its chunk
        space = np.flatnonzero(np.frombuffer(self.bytes, dtype=np.uint8)[:-16] <= _SPACE)
        self.begin = space[:-1] + 1
        self.length = space[1:] - self.begin
        self._eight = np.ndarray((len(self.bytes) - 7,), dtype="<u8", buffer=self.bytes, strides=(1,))  # at every byte
        self.low = self._eight[self.begin]
        self.low &= _MASK.take(self.length, mode="clip")

    def long_keys(self, i: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The keys of chunks with 9 to 16 bytes."""
        begin = self.begin[i]
        return self._eight[begin], self._eight[begin + 8] & _MASK[self.length[i] - 8]

    def some(self, i: "np.ndarray | list[int]") -> list[bytes]:
        begin = self.begin[i]
        return [self.bytes[b:e] for b, e in zip(begin.tolist(), (begin + self.length[i]).tolist(), strict=True)]


class ChunkTable:
    """Remembers the ids of chunks; what it does not know it asks the tokens."""

    def __init__(self, tokens: WordTokenizer, vocabulary: Vocabulary) -> None:
        self._tokens = tokens
        self._dtype = token_dtype(len(vocabulary))
        # A text's own "<BOS>" is no special word; a line end is in no chunk
        self._id_of = {word: i for i, word in enumerate(vocabulary.words) if i > UNK} | {"\n": _END}
        self._forget()

    def encode(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """BOS words EOS for each text, end to end, and where each begins (at last, where the last ends)."""
        if self._short.known + self._middle.known + len(self._long) > _LIMIT or self._used > 16 * _LIMIT:
            self._forget()
        values = self._look_up(Chunks(_joined(texts)))
        count = values & _COUNT
        end = count.cumsum()
        total = int(end[-1])
        values >>= _COUNT_BITS
        values -= end
        values += count
        place = values.repeat(count)  # of each id among those remembered
        place += self._numbers(total)
        ids = np.empty(total, dtype=self._dtype)
        ids[0], ids[1:] = BOS, self._ids[place[:-1]]  # the last break's BOS begins nothing
        return ids, np.append(np.flatnonzero(ids == BOS), total)

    def _look_up(self, chunks: Chunks) -> np.ndarray:
        """The value of every chunk; new chunks get one."""
        values, unknown = self._short.find(chunks.low)
        long = np.flatnonzero(chunks.length > 8)
        if len(unknown):
            new, learned = self._learn(chunks, unknown)
            self._short.put(learned, chunks.low[new])
            values[unknown], _ = self._short.find(chunks.low[unknown])
        if len(long):
            length = chunks.length[long]
            middle, rest = long[length <= 16], long[length > 16].tolist()
            values[middle] = self._look_up_middle(chunks, middle)
            for i, chunk in zip(rest, chunks.some(rest), strict=True):
                if chunk not in self._long:
                    self._long[chunk] = int(self._learn(chunks, np.array([i]))[1][0])
                values[i] = self._long[chunk]
        return values

    def _look_up_middle(self, chunks: Chunks, middle: np.ndarray) -> np.ndarray:
        """The same for chunks of 9 to 16 bytes, whose keys are two numbers."""
        key = chunks.long_keys(middle)
        values, unknown = self._middle.find(*key)
        if len(unknown):
            new, learned = self._learn(chunks, middle[unknown])
            self._middle.put(learned, *chunks.long_keys(new))
            values[unknown], _ = self._middle.find(*(numbers[unknown] for numbers in key))
        return values

    def _learn(self, chunks: Chunks, unknown: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What the rules make of chunks not known: where each different one stands, and its value."""
        new = dict(zip(chunks.some(unknown), unknown.tolist(), strict=True))
        texts = [chunk.decode("utf-8", "surrogatepass") for chunk in new]
        plain = np.array([text.isascii() for text in texts])
        flat = self._tokens.split_ascii([text for text in texts if text.isascii()])
        for text in texts:
            if not text.isascii():
                flat += [*self._tokens.split_chunk(text), "\n"]
        ids = np.fromiter(map(self._id_of.get, flat, repeat(UNK)), dtype=np.int64, count=len(flat))
        where = np.array([*new.values()])
        return np.concatenate([where[plain], where[~plain]]), self._remember(ids)

    def _remember(self, ids: np.ndarray) -> np.ndarray:
        """Values for the ids of chunks, of which _END closes each."""
        end = np.flatnonzero(ids == _END)
        count = np.diff(end, prepend=-1) - 1
        begin = self._used + count.cumsum() - count
        ids = ids[ids != _END]
        while self._used + len(ids) > len(self._ids):
            self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
        self._ids[self._used : self._used + len(ids)] = ids
        self._used += len(ids)
        return (begin << _COUNT_BITS) + count

    def _numbers(self, total: int) -> np.ndarray:
        """0, 1, 2 ... made once."""
        if total > len(self._counting):
            self._counting = np.arange(2 * total)
        return self._counting[:total]

    def _forget(self) -> None:
        self._short, self._middle = Slots(1), Slots(2)
        self._long: dict[bytes, int] = {}
        self._ids, self._used = np.empty(1 << 16, dtype=self._dtype), 0
        self._counting = np.empty(0, dtype=np.int64)
        self._short.put(self._remember(np.array([EOS, BOS, _END])), np.array([ord(BREAK)], dtype=np.uint64))


def _joined(texts: list[str]) -> bytes:
    """Texts with breaks between and behind. Each is encoded alone: one emoji makes a joined text four times as wide."""
    joined = f" {BREAK} ".encode().join([text.encode("utf-8", "surrogatepass") for text in [*texts, ""]])
    if joined.count(BREAK.encode()) == len(texts):
        return joined
    return _joined([text.replace(BREAK, " ") for text in texts])
