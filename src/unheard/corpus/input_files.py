"""Low-level access to input files: byte ranges of large files, and compressed files whose end is missing.

Byte ranges. A large file of JSON lines is read in several ranges, so that several processes or a cluster read one file
at the same time. `FileRangeSystem` is an fsspec file system that shows each range to DuckDB as a file of its own:

    range_path("posts.jsonl", 0, 1048576)     ->  "range://0-1048576:posts.jsonl"
    line_boundaries("posts.jsonl", 1 << 27)   ->  [0, 134217801, 268435502, ...]

Only uncompressed files can be cut: the middle of a compressed file cannot be read without its beginning.

Truncated files. An interrupted download must not pass for a whole corpus. DuckDB reads a truncated .zst file up to its
last whole block without an error, and rejects a truncated .gz file. `zstd_is_truncated` and `gzip_is_truncated` detect
both; `unpack_gzip` recovers what can be read of the latter. The formats are RFC 8878 (zstd) and RFC 1952 (gzip).
"""

import codecs
import datetime
import io
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fsspec.spec import AbstractFileSystem

from unheard.errors import InputError

SCHEME = "range://"
MAX_RECORD_BYTES = 16 << 20
"""The longest line or record that is read. It bounds the memory of every reader."""
_READ_BYTES = 1 << 20
_ZSTD_MAGIC, _ZSTD_SKIPPABLE = 0xFD2FB528, range(0x184D2A50, 0x184D2A60)


def text_start(path: str) -> int:
    """Return the number of bytes of the byte-order mark (0 or 3).

    A JSON reader would reject the line that holds the mark.
    """
    with open(path, "rb") as file:
        return 3 if file.read(3) == codecs.BOM_UTF8 else 0


def line_boundaries(path: str, range_bytes: int, begin: int = 0) -> list[int]:
    """Cut a file into ranges of about `range_bytes` bytes that begin and end at line ends.

    Args:
        path: The file.
        range_bytes: The wanted size of a range. A range is longer if a line crosses its end.
        begin: Where the first range begins.

    Returns:
        The boundaries: `begin`, then positions just after a line end, then the size of the file.

    Raises:
        InputError: A line at the end of a range is longer than `MAX_RECORD_BYTES`.
    """
    size = os.path.getsize(path)
    boundaries = [begin]
    with open(path, "rb") as file:
        for number in range(1, size // range_bytes + 1):
            file.seek(number * range_bytes)
            line = file.readline(MAX_RECORD_BYTES)
            if len(line) == MAX_RECORD_BYTES and not line.endswith(b"\n"):
                raise record_too_long(path)
            if boundaries[-1] < file.tell() < size:
                boundaries.append(file.tell())
    return [*boundaries, size]


def record_too_long(path: str, compression: str = "none", is_lines: bool = True) -> InputError:
    """The error for a file with a record above `MAX_RECORD_BYTES`. It names the line where that can be known."""
    line = _first_long_line(path, compression) if is_lines and compression in ("none", "gzip") else None
    name = f"{path}, line {line}," if line else f"{path} has a record that"
    return InputError(
        f"{name} is longer than {MAX_RECORD_BYTES >> 20} MiB, the most that is read as one record. Cut its text into "
        "several records of the same user, or remove it, and run the same command again. Nothing was left out."
    )


def _first_long_line(path: str, compression: str) -> int | None:
    """The number of the first line above `MAX_RECORD_BYTES`, or None. Reads the file in blocks."""
    number, length = 1, 0
    for block in _blocks(path) if compression == "none" else (content for content, _ in _decompress(path)):
        first = block.find(b"\n")
        if length + (first if first >= 0 else len(block)) > MAX_RECORD_BYTES:
            return number
        newlines = block.count(b"\n")  # a line that begins and ends within one block is short
        number += newlines
        length = len(block) - 1 - block.rfind(b"\n") if newlines else length + len(block)
    return None


def _blocks(path: str) -> Iterator[bytes]:
    with open(path, "rb") as file:
        while block := file.read(_READ_BYTES):
            yield block


def range_path(path: str, begin: int, end: int) -> str:
    """The path under which `FileRangeSystem` opens the bytes `begin` to `end` of a file."""
    return f"{SCHEME}{begin}-{end}:{path}"


class FileRange(io.RawIOBase):
    """A readable file that consists of the bytes `begin` to `end` of another file."""

    def __init__(self, path: str, begin: int, end: int) -> None:
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 (closed by `close`)
        self._begin, self._size, self._position = begin, end - begin, 0
        self._file.seek(begin)

    def read(self, size: int = -1, /) -> bytes:
        """Read up to `size` bytes, and never beyond the end of the range."""
        left = self._size - self._position
        content = self._file.read(left if size < 0 else min(size, left)) or b""
        self._position += len(content)
        return content

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """Move to a position relative to the begin of the range, the current position or the end of the range."""
        self._position = {0: 0, 1: self._position, 2: self._size}[whence] + offset
        self._file.seek(self._begin + self._position)
        return self._position

    def tell(self) -> int:
        """Return the position within the range."""
        return self._position

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        self._file.close()
        super().close()


class FileRangeSystem(AbstractFileSystem):
    """The methods of a file system that DuckDB calls, for paths made by `range_path`."""

    protocol = "range"
    cachable = False

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        """Return the size of the range as the size of a file."""
        begin, end, _ = self._parse(path)
        return {"name": path, "size": end - begin, "type": "file"}

    def exists(self, path: str, **kwargs: Any) -> bool:
        return os.path.isfile(self._parse(path)[2])

    def glob(self, path: str, **kwargs: Any) -> list[str]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the path itself: the path of a range contains no pattern, whatever the name of the file."""
        return [path]

    def modified(self, path: str) -> Any:
        return datetime.datetime.fromtimestamp(os.path.getmtime(self._parse(path)[2]), tz=datetime.UTC)

    def open(self, path: str, mode: str = "rb", **kwargs: Any) -> FileRange:  # pyright: ignore[reportIncompatibleMethodOverride]
        begin, end, real = self._parse(path)
        return FileRange(real, begin, end)

    def _parse(self, path: str) -> tuple[int, int, str]:
        """The inverse of `range_path`: begin, end, path."""
        numbers, _, real = path.removeprefix(SCHEME).partition(":")
        begin, _, end = numbers.partition("-")
        return int(begin), int(end), real


def zstd_window(path: Path) -> int | None:
    """Return the window size in the first frame header (RFC 8878, 3.1.1.1), or None if the file has no such header."""
    with open(path, "rb") as file:
        head = file.read(18)
    if len(head) < 6 or int.from_bytes(head[:4], "little") != _ZSTD_MAGIC:
        return None
    descriptor = head[4]
    if descriptor & 0x20:  # a single segment: the window is the content
        size_bytes = (1, 2, 4, 8)[descriptor >> 6]
        begin = 5 + (0, 1, 2, 4)[descriptor & 3]
        return int.from_bytes(head[begin : begin + size_bytes], "little") + (256 if size_bytes == 2 else 0)
    base = 1 << (10 + (head[5] >> 3))
    return base + base // 8 * (head[5] & 7)


def zstd_is_truncated(path: str) -> bool:
    """Whether a zstd file ends within a frame.

    A file is a series of frames; a frame is a header, blocks with their sizes, and an optional checksum (RFC 8878,
    3.1.1). Only the headers are read and nothing is decompressed, so this is quick also for large files.
    """
    size = os.path.getsize(path)
    with open(path, "rb", buffering=0) as file:

        def number(position: int, length: int) -> int:
            return int.from_bytes(os.pread(file.fileno(), length, position), "little")

        position = 0
        while position < size:
            magic = number(position, 4)
            if magic in _ZSTD_SKIPPABLE:
                position += 8 + number(position + 4, 4)
                continue
            if magic != _ZSTD_MAGIC:
                return position + 4 > size  # otherwise not zstd at all: the reader reports that
            descriptor = number(position + 4, 1)
            single = descriptor >> 5 & 1  # a single segment has no window field, and always a size field
            position += 6 - single + (0, 1, 2, 4)[descriptor & 3] + (single, 2, 4, 8)[descriptor >> 6]
            is_last = False
            while not is_last and position + 3 <= size:
                block = number(position, 3)
                is_last, kind = bool(block & 1), block >> 1 & 3
                position += 3 + (1 if kind == 1 else block >> 3)
            if not is_last:
                return True
            position += 4 * (descriptor >> 2 & 1)  # the checksum
        return position > size


def gzip_is_truncated(path: str) -> bool:
    """Whether a gzip file ends within a member. Decompresses the file. A corrupt file is not called truncated."""
    try:
        return not all(is_whole for _, is_whole in _decompress(path))
    except zlib.error:
        return False


def unpack_gzip(path: str, target: Path) -> None:
    """Decompress a gzip file to `target` as far as it can be read."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target, "wb") as file:
        file.writelines(content for content, _ in _decompress(path))


def is_truncation_error(error: Exception) -> bool:
    """Whether this is DuckDB's error for a truncated .gz file."""
    return "unexpected end of gzip" in str(error).lower()


def _decompress(path: str) -> Iterator[tuple[bytes, bool]]:
    """The content of a gzip file in pieces; the last item says whether the end of the file is there."""
    with open(path, "rb") as file:
        member = zlib.decompressobj(31)
        is_inside = False
        while packed := file.read(_READ_BYTES):
            while packed:
                if not is_inside and not packed.strip(b"\0"):
                    break  # padding
                is_inside = True
                yield member.decompress(packed, _READ_BYTES), True  # zeros would expand a thousandfold
                packed = member.unconsumed_tail or member.unused_data
                if member.eof:
                    member, is_inside = zlib.decompressobj(31), False
        yield b"", not is_inside
