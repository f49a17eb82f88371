"""Packed files whose end is missing: a download that broke off must not pass for a whole corpus.

In: a batch of files. Out: the same batch, ready to be read as far as it goes, and a sentence for each torn file. DuckDB reads
a torn .zst to its last whole block without a word, and refuses a torn .gz; rows before the tear are kept in both cases.
"""

import os
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from unheard.corpus.readers.columns import FileBatch
from unheard.corpus.sources import Source
from unheard.errors import CorpusError

_PIECE = 1 << 20
_ZSTD, _SKIPPED = 0xFD2FB528, range(0x184D2A50, 0x184D2A60)


def as_far_as_they_go(batch: FileBatch, folder: Path, gzip_too: bool) -> tuple[FileBatch, list[str]]:
    """Torn .gz files unpacked into `folder`. Only reading a .gz to its end shows a tear: not done unless asked for."""
    sources, told = [], []
    for number, source in enumerate(batch.sources):
        torn = (source.compression == "zstd" and zstd_is_torn(source.path)) or (
            gzip_too and source.compression == "gzip" and gzip_is_torn(source.path)
        )
        if torn:
            told.append(
                f"{source.path} breaks off: its end is missing. The rows before are kept, and the last of them may be "
                "malformed; fetch the file again for the rest."
            )
        sources.append(_unpack(source, folder / str(number)) if torn and source.compression == "gzip" else source)
    return replace(batch, sources=tuple(sources)), told


def is_tear(trouble: Exception) -> bool:
    """Whether this is DuckDB's complaint about a torn .gz."""
    return "unexpected end of gzip" in str(trouble).lower()


def zstd_is_torn(path: str) -> bool:
    """Whether a zstd file ends within a frame, from the sizes in its block headers (RFC 8878, 3.1.1): nothing is unpacked."""
    size = os.path.getsize(path)
    with open(path, "rb", buffering=0) as file:

        def number(place: int, length: int) -> int:
            return int.from_bytes(os.pread(file.fileno(), length, place), "little")

        place = 0
        while place < size:
            magic = number(place, 4)
            if magic in _SKIPPED:
                place += 8 + number(place + 4, 4)
                continue
            if magic != _ZSTD:
                return place + 4 > size  # else something that is no zstd: the reader will say so
            descriptor = number(place + 4, 1)
            alone = descriptor >> 5 & 1  # a single segment has no window, and always its size
            place += 6 - alone + (0, 1, 2, 4)[descriptor & 3] + (alone, 2, 4, 8)[descriptor >> 6]
            last = False
            while not last and place + 3 <= size:
                block = number(place, 3)
                last, kind = bool(block & 1), block >> 1 & 3
                place += 3 + (1 if kind == 1 else block >> 3)
            if not last:
                return True
            place += 4 * (descriptor >> 2 & 1)  # the checksum
        return place > size


def gzip_is_torn(path: str) -> bool:
    """Whether a gzip file ends within a member: it has to be unpacked to be known. One that is broken is not torn."""
    try:
        return not all(whole for _, whole in _unpacked(path))
    except zlib.error:
        return False


def _unpacked(path: str) -> Iterator[tuple[bytes, bool]]:
    """What a gzip file holds, piece by piece, and at last whether its end is there."""
    with open(path, "rb") as file:
        member = zlib.decompressobj(31)
        begun = False
        while packed := file.read(_PIECE):
            while packed:
                if not begun and not packed.strip(b"\0"):
                    break  # padding
                begun = True
                yield member.decompress(packed), True
                packed = member.unused_data
                if member.eof:
                    member, begun = zlib.decompressobj(31), False
        yield b"", not begun


def _unpack(source: Source, target: Path) -> Source:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(target, "wb") as file:
            file.writelines(piece for piece, _ in _unpacked(source.path))
    except OSError as trouble:
        raise CorpusError(f"Cannot unpack {source.path} to {target.parent}: {trouble.strerror}. Make room.") from None
    return replace(source, path=str(target), compression="none")
