"""A hash table of numpy arrays: thousands of keys are looked up at once, so that memory answers many at once.

In: keys of one or two 64-bit numbers each. Out: the value of each, and which have none. Open addressing with linear
probing: all keys take their steps together, and nearly all are home at the first. A slot is a row, key and value side by
side, since what a look costs is the way to memory. The empty key, 0, lives in slot 0, alone: nothing else has a first
number of 0.
"""

import numpy as np

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
