"""A shard is two plain files, tokens and offsets: written once in order, then only ever mapped into memory.

In: the tokens of one user after another. Out: `NNNNN.tokens` (little-endian unsigned integers, user after user) and
`NNNNN.offsets` (int64, where each user begins, and at last where the file ends). Sizes alone tell whether both agree.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from unheard.errors import CorpusCorrupt, CorpusError

OFFSET_BYTES = 8


def token_dtype(vocabulary_size: int) -> np.dtype:
    """The narrowest width that holds every token id; little-endian on every machine, so that stores can travel."""
    return np.dtype("<u2" if vocabulary_size <= 1 << 16 else "<u4")


class ShardWriter:
    """Writes one shard. A user arrives in pieces, so that one user with half of all the text needs no memory."""

    def __init__(self, folder: Path, number: int, dtype: np.dtype) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._stem = folder / f"{number:05d}"
        self._dtype = dtype
        self._tokens = open(f"{self._stem}.tokens.writing", "wb")  # noqa: SIM115 (open across calls)
        self._ends = [0]
        self._written = 0

    def write(self, piece: bytes | bytearray | memoryview) -> None:
        """More tokens of the user in hand, already in this store's width."""
        self._tokens.write(piece)
        self._written += len(piece)

    def end_user(self) -> None:
        self._ends.append(self._written // self._dtype.itemsize)

    def take_back(self) -> None:
        """Forget what was written since the last user ended."""
        self._written = self._ends[-1] * self._dtype.itemsize
        self._tokens.seek(self._written)
        self._tokens.truncate()

    def append(self, tokens: np.ndarray) -> None:
        """One whole user."""
        self.write(np.ascontiguousarray(tokens, dtype=self._dtype).tobytes())
        self.end_user()

    def append_many(self, flat: np.ndarray, lengths: np.ndarray) -> None:
        """Many whole users laid end to end: what a generator of load-test corpora writes."""
        ends = self._written // self._dtype.itemsize + np.cumsum(lengths)
        self.write(np.ascontiguousarray(flat, dtype=self._dtype).tobytes())
        self._ends.extend(ends.tolist())

    def close(self) -> None:
        """Make both files durable, then give them their names: a named shard is a whole shard."""
        with open(f"{self._stem}.offsets.writing", "wb") as offsets:
            offsets.write(np.array(self._ends, dtype="<i8").tobytes())
            _flush(offsets)
        _flush(self._tokens)
        self._tokens.close()
        for kind in ("tokens", "offsets"):
            os.replace(f"{self._stem}.{kind}.writing", f"{self._stem}.{kind}")

    def abandon(self) -> None:
        self._tokens.close()
        Path(f"{self._stem}.tokens.writing").unlink(missing_ok=True)


def write_shard(folder: Path, number: int, users: Iterable[np.ndarray], dtype: np.dtype) -> None:
    """A shard from arrays in memory."""
    writer = ShardWriter(folder, number, dtype)
    for tokens in users:
        writer.append(tokens)
    writer.close()


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One shard as found on disk: its size is known at once, its contents are mapped at the first touch."""

    stem: str
    dtype: np.dtype
    num_users: int
    num_tokens: int
    is_here: bool = True
    """Whether its tokens lie in this copy of the store; offsets always do."""

    @classmethod
    def found(cls, offsets_path: Path, dtype: np.dtype, *, elsewhere: bool = False) -> "Shard":
        """Check that the two files agree: three system calls, whatever their size. `elsewhere`: a part of a store does without
        these tokens."""
        stem = str(offsets_path.with_suffix(""))
        num_users, rest = divmod(offsets_path.stat().st_size, OFFSET_BYTES)
        token_bytes = None
        try:
            token_bytes = os.stat(f"{stem}.tokens").st_size
        except FileNotFoundError:
            if not elsewhere:
                raise CorpusCorrupt(f"{stem}.tokens is missing beside its offsets. {CURE}") from None
        if rest or not num_users:
            raise CorpusCorrupt(f"{offsets_path} is cut short: {offsets_path.stat().st_size} bytes. {CURE}")
        with open(offsets_path, "rb") as offsets:
            offsets.seek(-OFFSET_BYTES, os.SEEK_END)
            last = int.from_bytes(offsets.read(OFFSET_BYTES), "little", signed=True)
        if token_bytes is not None and last * dtype.itemsize != token_bytes:
            wanted = last * dtype.itemsize
            raise CorpusCorrupt(f"{stem}.tokens holds {token_bytes} bytes where its offsets ask for {wanted}. {CURE}")
        is_here = token_bytes is not None
        return cls(stem=stem, dtype=dtype, num_users=num_users - 1, num_tokens=last, is_here=is_here)

    @cached_property
    def tokens(self) -> np.ndarray:
        if not self.is_here:
            raise CorpusError(
                f"{self.stem}.tokens is not in this part of the store. Use the whole store, or train on ranks that hold all of it."
            )
        if not self.num_tokens:  # an empty file cannot be mapped
            return np.empty(0, dtype=self.dtype)
        return np.asarray(np.memmap(f"{self.stem}.tokens", dtype=self.dtype, mode="r"))

    @cached_property
    def offsets(self) -> np.ndarray:
        return np.asarray(np.memmap(f"{self.stem}.offsets", dtype="<i8", mode="r"))


CURE = "The store was damaged after it was written: prepare it again, or bring back an undamaged copy."


def _flush(file) -> None:
    file.flush()
    os.fsync(file.fileno())
