"""Finds the input of `prepare` (files, globs, folders, databases, Hugging Face datasets) and groups it into batches.

    sources = find_sources(["RC_2015-*.jsonl.zst", "extra.csv"])
    batches = make_batches(sources)        # each batch is read by one query

Nothing is read here except a few bytes at the front of each file. The order of the sources is fixed, since the position
of a row in the input decides between posts with equal times. Formats that DuckDB does not read (SQLite, Hugging Face
datasets, the demo corpus) are converted first: see `conversion`.

**Byte ranges.** A large file of JSON lines is read in several ranges, so that several processes or a cluster read one
file at the same time. `FileRangeSystem` is an fsspec file system that shows each range to DuckDB as a file of its own:

    range_path("posts.jsonl", 0, 1048576)     ->  "range://0-1048576:posts.jsonl"
    line_boundaries("posts.jsonl", 1 << 27)   ->  [0, 134217801, 268435502, ...]

Only uncompressed files can be cut: the middle of a compressed file cannot be read without its beginning.

**Truncated files.** An interrupted download must not pass for a whole corpus. DuckDB reads a truncated .zst file up to
its last whole block without an error, and rejects a truncated .gz file. `zstd_is_truncated` and `gzip_is_truncated`
detect both; `unpack_gzip` recovers what can be read of the latter. The formats are RFC 8878 (zstd) and RFC 1952 (gzip).
"""

import codecs
import datetime
import glob
import importlib.util
import io
import itertools
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from fsspec.spec import AbstractFileSystem

from unheard.config import nearest
from unheard.errors import CorpusError, CorpusMissing, InputError

SCHEME = "range://"
MAX_RECORD_BYTES = 16 << 20
"""The longest line or record that is read. It bounds the memory of every reader."""
_READ_BYTES = 1 << 20
"""DuckDB asks for 32 MiB, and again for what is missing. Small reads are faster: they reuse memory."""
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
    """The error for a file with a record above `MAX_RECORD_BYTES`. It names the line where that can be known.

    Args:
        path: The file.
        compression: Its compression.
        is_lines: Whether each line is a record.
    """
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
        content = self._file.read(left if size < 0 else min(size, left, _READ_BYTES)) or b""
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
        """Whether the range can be read: always."""
        return True

    def seekable(self) -> bool:
        """Whether the position can be set: always."""
        return True

    def close(self) -> None:
        """Close the underlying file."""
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
        """Whether the file that the range lies in exists."""
        return os.path.isfile(self._parse(path)[2])

    def glob(self, path: str, **kwargs: Any) -> list[str]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the path itself: the path of a range contains no pattern, whatever the name of the file."""
        return [path]

    def modified(self, path: str) -> Any:
        """When the file that the range lies in was modified, in UTC."""
        return datetime.datetime.fromtimestamp(os.path.getmtime(self._parse(path)[2]), tz=datetime.UTC)

    def open(self, path: str, mode: str = "rb", **kwargs: Any) -> FileRange:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Open a range for reading, as a file of its own."""
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
            """Read a little-endian integer of the file."""
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
    """Decompress a gzip file to `target` as far as it can be read.

    Args:
        path: The compressed file.
        target: The file to write; its folder is created if missing.
    """
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


Format = Literal["jsonl", "json", "csv", "tsv", "parquet", "duckdb", "sqlite", "hub", "chitchat"]

_FORMATS: dict[str, Format] = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".csv": "csv", ".tsv": "tsv", ".tab": "tsv",
    ".parquet": "parquet", ".pq": "parquet", ".duckdb": "duckdb", ".ddb": "duckdb",
    ".sqlite": "sqlite", ".sqlite3": "sqlite", ".db": "sqlite",
}  # fmt: skip
_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
_COMPRESSION_RATIO = 4  # typical for text
_MAX_WINDOW_LOG = 27  # the limit of DuckDB's zstd reader, since the window is held in memory
_BATCH_BYTES = 128 << 20
_BATCH_FILES = 500


@dataclass(frozen=True, kw_only=True)
class Fields:
    """The names of the columns to read. In JSON a name that begins with "/" is a JSON pointer (/author/name).

    Args:
        user: The column with the id of the author.
        text: The column with the text.
        time: The column to sort each user's posts by; None keeps the order of the input.
        time_format: A `strptime` format for times that are neither numbers nor ISO 8601.
        table: The table to read, for a database that has several.
    """

    user: str
    text: str
    time: str | None = None
    time_format: str | None = None
    table: str | None = None

    def columns(self) -> list[str]:
        """The names of the columns that are read."""
        return [name for name in (self.user, self.text, self.time) if name is not None]


CHITCHAT_FIELDS = Fields(user="sender", text="text", time="timestamp")
"""The columns of the demo corpus."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """One file, table or dataset; with `byte_range`, only these bytes of a file."""

    path: str
    format: Format
    compression: str = "none"
    byte_range: tuple[int, int] | None = None

    @property
    def needs_conversion(self) -> bool:
        """Whether DuckDB cannot read the format itself (see `conversion`)."""
        return self.format in ("sqlite", "hub", "chitchat")

    @property
    def sql_path(self) -> str:
        """The path that DuckDB opens."""
        return self.path if self.byte_range is None else range_path(self.path, *self.byte_range)

    @property
    def text_bytes(self) -> int:
        """An estimate of the size of the text, which decides the numbers of batches and shards."""
        if self.format == "hub" or not os.path.isfile(self.path):
            return 0
        if self.byte_range is not None:
            return self.byte_range[1] - self.byte_range[0]
        is_packed = self.compression != "none" or self.format == "parquet"
        return os.path.getsize(self.path) * (_COMPRESSION_RATIO if is_packed else 1)


@dataclass(frozen=True, kw_only=True)
class FileBatch:
    """Files that one query reads in order: many small files, or one CSV file (each CSV file has its own header)."""

    number: int
    sources: tuple[Source, ...]

    @property
    def text_bytes(self) -> int:
        """An estimate of the size of the text in the batch."""
        return sum(s.text_bytes for s in self.sources)

    def replace_truncated(self, folder: Path, check_gzip: bool) -> tuple["FileBatch", list[str]]:
        """Make the batch readable although some of its compressed files are truncated.

        Args:
            folder: Truncated .gz files are unpacked into this folder as far as they go.
            check_gzip: Whether to look at .gz files too. Only decompression shows that one is truncated.

        Returns:
            The batch to read, and one warning for the owner per truncated file.
        """
        sources, warnings = [], []
        for number, source in enumerate(self.sources):
            is_gzip = check_gzip and source.compression == "gzip" and gzip_is_truncated(source.path)
            if is_gzip or (source.compression == "zstd" and zstd_is_truncated(source.path)):
                warnings.append(
                    f"{source.path} breaks off: its end is missing. The rows before are kept, and the last of them may "
                    "be malformed; fetch the file again for the rest."
                )
            if is_gzip:
                source = _unpacked(source, folder / str(number))
            sources.append(source)
        return replace(self, sources=tuple(sources)), warnings


def is_demo_corpus(inputs: Any) -> bool:
    """Whether the input is the word "chitchat", for the demo corpus, and no file of that name is there."""
    names = [inputs] if isinstance(inputs, str) else inputs
    is_named = isinstance(names, list) and len(names) == 1 and isinstance(names[0], str) and names[0] == "chitchat"
    return is_named and not Path("chitchat").exists()


def find_chitchat() -> Source:
    """Return the demo corpus, a file of the installed package `chitchat-dataset`. The code of the package is not run.

    Raises:
        CorpusMissing: The package is not installed.
    """
    package = importlib.util.find_spec("chitchat_dataset")
    path = (
        Path(package.origin).with_name("dataset.json") if package is not None and package.origin is not None else None
    )
    if path is None or not path.is_file():
        raise CorpusMissing("The default corpus is not installed: pip install 'unheard[demo]'.")
    return Source(path=str(path), format="chitchat")


def find_sources(inputs: Sequence[str], given: str | None = None) -> list[Source]:
    """List every source that the inputs name, each once, sorted by path within an input.

    Args:
        inputs: Paths, globs, folders, "hub:NAME" for a dataset of the Hugging Face hub, or "chitchat" for the demo
            corpus.
        given: The format, for files whose names do not tell it.

    Raises:
        InputError: An input does not exist or its format is unknown.
        CorpusMissing: The demo corpus is not installed.
    """
    if given is not None and given not in _FORMATS.values():
        raise InputError(f"Unknown --format '{given}'.{nearest(given, set(_FORMATS.values()))}")
    sources: dict[str, Source] = {}
    for text in inputs:
        for source in _sources_of(text, given):
            sources.setdefault(source.path if source.format == "hub" else os.path.realpath(source.path), source)
    if not sources:
        raise InputError("No input: name at least one file, glob or folder.")
    return list(sources.values())


def make_batches(sources: Sequence[Source]) -> list[FileBatch]:
    """Group neighbouring sources of one kind into batches of up to 128 MiB of text.

    Small files are read together, which is much faster than one query each. Large files of JSON lines are cut into
    ranges. A batch is also the unit of a resumed scan. The batches depend on the files alone, and not on the backend.
    """
    groups: list[list[Source]] = []
    size = 0
    for source in (part for whole in sources for part in _in_ranges(whole)):
        joins = (
            groups
            and source.format in ("jsonl", "json", "parquet")
            and (source.format, source.compression) == (groups[-1][0].format, groups[-1][0].compression)
            and len(groups[-1]) < _BATCH_FILES
            and size + source.text_bytes <= _BATCH_BYTES
        )
        if not joins:
            groups.append([])
            size = 0
        groups[-1].append(source)
        size += source.text_bytes
    return [FileBatch(number=i, sources=tuple(group)) for i, group in enumerate(groups)]


def _in_ranges(source: Source) -> list[Source]:
    """Split a large file of plain JSON lines into ranges, and skip the byte-order mark of plain JSON."""
    if source.format not in ("jsonl", "json") or source.compression != "none":
        return [source]
    begin = text_start(source.path)
    if source.format == "jsonl" and source.text_bytes > _BATCH_BYTES:
        boundaries = line_boundaries(source.path, _BATCH_BYTES, begin)
        return [replace(source, byte_range=bounds) for bounds in itertools.pairwise(boundaries)]
    return [replace(source, byte_range=(begin, source.text_bytes))] if begin else [source]


def _sources_of(text: str, given: str | None) -> list[Source]:
    """The sources of one input. Files of unknown formats are ignored in a folder, and an error in a glob."""
    if text.startswith("hub:"):
        return [Source(path=text.removeprefix("hub:"), format="hub")]
    path = Path(text)
    if text == "chitchat" and not path.exists():
        return [find_chitchat()]
    if path.is_dir() and ((path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file()):
        return [Source(path=text, format="hub")]  # a Hugging Face dataset saved to disk
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.is_file() and not p.name.startswith("."))
        known = [s for s in (_source_of_file(p, given) for p in files) if s is not None]
        if not known:
            raise InputError(
                f"The folder {text} holds no file of a known kind ({_known_formats()}). Name the kind with --format."
            )
        return known
    files = [path] if path.is_file() else sorted(Path(p) for p in glob.glob(text, recursive=True) if os.path.isfile(p))
    if not files:
        names = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        hint = nearest(path.name, names[:50]) if names else f" There is no folder {path.parent}."
        raise InputError(f"No file matches {text}.{hint}")
    sources = []
    for file in files:
        source = _source_of_file(file, given)
        if source is None:
            raise InputError(
                f"Cannot tell what kind of file {file} is: name it with --format (one of {_known_formats()})."
            )
        sources.append(source)
    return sources


def _source_of_file(path: Path, given: str | None) -> Source | None:
    """Tell the format by the file name; of databases by the first bytes, since both kinds use the ending `.db`."""
    name = path.name.lower()
    ending = next((e for e in _COMPRESSIONS if name.endswith(e)), "")
    kind = given or _FORMATS.get(Path(name.removesuffix(ending)).suffix)
    if kind is None:
        return None
    if kind in ("sqlite", "duckdb"):
        with open(path, "rb") as file:
            head = file.read(16)
        kind = "sqlite" if head.startswith(b"SQLite format 3") else "duckdb" if head[8:12] == b"DUCK" else None
        if kind is None:
            raise InputError(
                f"{path} has the name of a database, but is neither an SQLite nor a DuckDB file. Name its kind with --format."
            )
    window = zstd_window(path) if ending == ".zst" else None
    if window is not None and window > 1 << _MAX_WINDOW_LOG:  # refused here, before hours of work
        raise InputError(
            f"{path} needs a zstd window of {window >> 20} MiB; at most {1 << _MAX_WINDOW_LOG - 20} MiB can be read. "
            f"Pack it again: zstd -dc --long=31 {path.name} | zstd --long={_MAX_WINDOW_LOG} -o again-{path.name}"
        )
    compression = _COMPRESSIONS.get(ending, "none")
    return Source(path=str(path), format=kind, compression=compression)  # pyright: ignore[reportArgumentType]


def _unpacked(source: Source, target: Path) -> Source:
    """Unpack a truncated .gz file as far as it goes."""
    try:
        unpack_gzip(source.path, target)
    except OSError as error:
        raise CorpusError(
            f"Cannot unpack {source.path} to {target.parent}: {error.strerror}. Free some space."
        ) from None
    return replace(source, path=str(target), compression="none")


def _known_formats() -> str:
    return ", ".join(sorted(set(_FORMATS.values())))
