"""The file format of token ids: a shard is two files, one with the ids of its users and one with their boundaries.

    NNNNN.tokens     ids, little-endian unsigned integers of 2 or 4 bytes (`token_dtype`), one user after the other
    NNNNN.offsets    int64: the index of the first id of each user, and at the end the number of ids

`ShardWriter` writes a shard in one pass; `Shard.open` checks that the sizes of the two files agree and maps them into
memory when they are first used.

    write_shard(folder, 0, [ids_of_user_0, ids_of_user_1], token_dtype(10_000))
    shard = Shard.open(folder / "00000.offsets", token_dtype(10_000))
    shard.tokens[shard.offsets[1] : shard.offsets[2]]      # the ids of user 1
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from unheard import storage
from unheard.errors import CorpusCorrupt, CorpusError

OFFSET_BYTES = 8
REMEDY = "The store was damaged after it was written: prepare it again, or bring back an undamaged copy."
"""The last sentence of every `CorpusCorrupt` message."""


def token_dtype(vocabulary_size: int) -> np.dtype:
    """Return the narrowest dtype that holds every id. It is little-endian on every machine, so stores can be copied."""
    return np.dtype("<u2" if vocabulary_size <= 1 << 16 else "<u4")


class ShardWriter:
    """Writes one shard. A user may be written in pieces, so memory does not grow with the text of one user.

    The files get their names in `close`, when they are complete and on disk.

    Args:
        folder: The folder of the split; it is created if missing.
        number: The number of the shard.
        dtype: The dtype of the ids.
    """

    def __init__(self, folder: Path, number: int, dtype: np.dtype) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._stem = folder / f"{number:05d}"
        self._dtype = dtype
        self._tokens = open(f"{self._stem}.tokens.writing", "wb")  # noqa: SIM115 (closed by `close` or `abandon`)
        self._ends = [0]
        self._written = 0

    def write(self, piece: bytes | bytearray | memoryview) -> None:
        """Write more ids of the current user, already in the dtype of the shard."""
        self._tokens.write(piece)
        self._written += len(piece)

    def end_user(self) -> None:
        """End the current user; the next `write` begins another one."""
        self._ends.append(self._written // self._dtype.itemsize)

    def discard_user(self) -> None:
        """Remove what was written since the last user ended."""
        self._written = self._ends[-1] * self._dtype.itemsize
        self._tokens.seek(self._written)
        self._tokens.truncate()

    def append(self, tokens: np.ndarray) -> None:
        """Write one whole user."""
        self.write(np.ascontiguousarray(tokens, dtype=self._dtype).tobytes())
        self.end_user()

    def append_many(self, flat: np.ndarray, lengths: np.ndarray) -> None:
        """Write many whole users: their ids one after the other, and the number of ids of each."""
        ends = self._written // self._dtype.itemsize + np.cumsum(lengths)
        self.write(np.ascontiguousarray(flat, dtype=self._dtype).tobytes())
        self._ends.extend(ends.tolist())

    def close(self) -> None:
        """Sync both files and give them their names, the offsets last: a shard with offsets is a whole shard."""
        storage.finish_file(self._tokens, Path(f"{self._stem}.tokens"))
        storage.replace_file(Path(f"{self._stem}.offsets"), np.array(self._ends, dtype="<i8").tobytes())

    def abandon(self) -> None:
        """Delete the unfinished file."""
        self._tokens.close()
        Path(f"{self._stem}.tokens.writing").unlink(missing_ok=True)


def write_shard(folder: Path, number: int, users: Iterable[np.ndarray], dtype: np.dtype) -> None:
    """Write a shard from arrays in memory, one per user."""
    writer = ShardWriter(folder, number, dtype)
    for tokens in users:
        writer.append(tokens)
    writer.close()


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One shard on disk. Its size is known at once; its content is mapped into memory on first use."""

    stem: str
    dtype: np.dtype
    num_users: int
    num_tokens: int
    is_local: bool = True
    """Whether the ids are in this copy of the store (a part of a store lacks some); the offsets always are."""

    @classmethod
    def open(cls, offsets_path: Path, dtype: np.dtype, *, may_lack_tokens: bool = False) -> "Shard":
        """Check that the two files of a shard agree, with three system calls whatever their size.

        Args:
            offsets_path: The .offsets file.
            dtype: The dtype of the ids.
            may_lack_tokens: Whether the .tokens file may be missing, as in a part of a store.

        Raises:
            CorpusCorrupt: A file is missing or its size is wrong.
        """
        stem = str(offsets_path.with_suffix(""))
        num_offsets, rest = divmod(offsets_path.stat().st_size, OFFSET_BYTES)
        token_bytes = None
        try:
            token_bytes = os.stat(f"{stem}.tokens").st_size
        except FileNotFoundError:
            if not may_lack_tokens:
                raise CorpusCorrupt(f"{stem}.tokens is missing beside its offsets. {REMEDY}") from None
        if rest or not num_offsets:
            raise CorpusCorrupt(f"{offsets_path} is cut short: {offsets_path.stat().st_size} bytes. {REMEDY}")
        with open(offsets_path, "rb") as offsets:
            offsets.seek(-OFFSET_BYTES, os.SEEK_END)
            last = int.from_bytes(offsets.read(OFFSET_BYTES), "little", signed=True)
        if token_bytes is not None and last * dtype.itemsize != token_bytes:
            wanted = last * dtype.itemsize
            raise CorpusCorrupt(f"{stem}.tokens holds {token_bytes} bytes where its offsets ask for {wanted}. {REMEDY}")
        is_local = token_bytes is not None
        return cls(stem=stem, dtype=dtype, num_users=num_offsets - 1, num_tokens=last, is_local=is_local)

    @cached_property
    def tokens(self) -> np.ndarray:
        """The ids of all users, one after the other."""
        if not self.is_local:
            raise CorpusError(
                f"{self.stem}.tokens is not in this part of the store. "
                "Use the whole store, or train on ranks that hold all of it."
            )
        if not self.num_tokens:  # an empty file cannot be mapped
            return np.empty(0, dtype=self.dtype)
        return np.asarray(np.memmap(f"{self.stem}.tokens", dtype=self.dtype, mode="r"))

    @cached_property
    def offsets(self) -> np.ndarray:
        """The index of the first id of each user, and at the end the number of ids."""
        return np.asarray(np.memmap(f"{self.stem}.offsets", dtype="<i8", mode="r"))
