"""A large file of JSON lines is read in pieces, so that several processes, or a cluster, can read one file at once.

In: a path and a range of bytes that begins and ends at line ends. Out: to DuckDB, a file of its own
(`piece://0-1048576:posts.jsonl`). Only plain files can be cut so: in the middle of a packed one nobody knows what
came before.
"""

import codecs
import io
import os
from typing import Any

from fsspec.spec import AbstractFileSystem

SCHEME = "piece://"


def after_mark(path: str) -> int:
    """Where a text begins: behind a byte-order mark, if some editor has put one there; to a JSON reader it is a broken line."""
    with open(path, "rb") as file:
        return 3 if file.read(3) == codecs.BOM_UTF8 else 0


def cut_places(path: str, piece_bytes: int, begin: int = 0) -> list[int]:
    """Where to cut a file into pieces of about this size: its beginning, then each time just after a line end, at last its size."""
    size = os.path.getsize(path)
    places = [begin]
    with open(path, "rb") as file:
        for number in range(1, size // piece_bytes + 1):
            file.seek(number * piece_bytes)
            file.readline()
            if places[-1] < file.tell() < size:
                places.append(file.tell())
    return [*places, size]


def piece_path(path: str, begin: int, end: int) -> str:
    return f"{SCHEME}{begin}-{end}:{path}"


class Piece(io.RawIOBase):
    """The bytes of a file from `begin` to `end`, as if they were all of it."""

    def __init__(self, path: str, begin: int, end: int) -> None:
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 (closed with the piece)
        self._begin, self._size, self._place = begin, end - begin, 0
        self._file.seek(begin)

    def read(self, size: int = -1, /) -> bytes:
        left = self._size - self._place
        found = self._file.read(left if size < 0 else min(size, left)) or b""
        self._place += len(found)
        return found

    def seek(self, offset: int, whence: int = 0, /) -> int:
        self._place = {0: 0, 1: self._place, 2: self._size}[whence] + offset
        self._file.seek(self._begin + self._place)
        return self._place

    def tell(self) -> int:
        return self._place

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        self._file.close()
        super().close()


class PieceFiles(AbstractFileSystem):
    """What DuckDB asks of a file system, for paths of pieces."""

    protocol = "piece"
    cachable = False

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        begin, end, _ = self._range(path)
        return {"name": path, "size": end - begin, "type": "file"}

    def exists(self, path: str, **kwargs: Any) -> bool:
        return os.path.isfile(self._range(path)[2])

    def glob(self, path: str, **kwargs: Any) -> list[str]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return [path]

    def modified(self, path: str) -> Any:
        import datetime

        return datetime.datetime.fromtimestamp(os.path.getmtime(self._range(path)[2]), tz=datetime.UTC)

    def open(self, path: str, mode: str = "rb", **kwargs: Any) -> Piece:  # pyright: ignore[reportIncompatibleMethodOverride]
        begin, end, real = self._range(path)
        return Piece(real, begin, end)

    def _range(self, path: str) -> tuple[int, int, str]:
        numbers, _, real = path.removeprefix(SCHEME).partition(":")
        begin, _, end = numbers.partition("-")
        return int(begin), int(end), real
