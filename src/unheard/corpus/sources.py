"""Finds the input of `prepare` (files, globs, folders, databases, Hugging Face datasets) and groups it into batches.

    sources = find_sources(["RC_2015-*.jsonl.zst", "extra.csv"])
    batches = make_batches(sources)        # each batch is read by one query

These two functions read only the first bytes of a file and, in a large file of JSON lines, the lines at which it is
cut. The order of the sources is fixed, because posts with equal times keep the order of the input. Formats that DuckDB
does not read (SQLite, Hugging Face datasets, the demo corpus) are converted first: see `conversion`.

**Byte ranges.** A large file of JSON lines is read in several ranges, so that several processes or a cluster read one
file at the same time. `FileRangeSystem` is an fsspec file system that presents each range to DuckDB as a separate file:

    range_path("posts.jsonl", 0, 1048576)     ->  "range://0-1048576:posts.jsonl"
    line_boundaries("posts.jsonl", 1 << 27)   ->  [0, 134217801, 268435502, ...]

Only uncompressed files are cut, since the middle of a compressed file cannot be read without its beginning.

**Truncated files.** The owner must learn that a download was interrupted. DuckDB reads a truncated .zst file up to its
last complete block without an error, and rejects a truncated .gz file. `zstd_is_truncated` and `gzip_is_truncated`
detect both. `unpack_gzip` recovers the readable beginning of a .gz file. The formats are defined in RFC 8878 (zstd) and
RFC 1952 (gzip).
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
"""The beginning of the paths that `FileRangeSystem` opens."""
MAX_RECORD_BYTES = 16 << 20
"""The largest number of bytes of a line or record. The limit bounds the memory of every reader."""
_READ_BYTES = 1 << 20
"""The largest number of bytes of one read.

DuckDB requests 32 MiB and repeats the request for the missing bytes. Small reads are faster, since they reuse memory.
"""
_ZSTD_MAGIC, _ZSTD_SKIPPABLE = 0xFD2FB528, range(0x184D2A50, 0x184D2A60)
"""The first four bytes of a zstd frame, and those of frames without data (RFC 8878)."""


def text_start(path: str) -> int:
    """Return the number of bytes of the byte-order mark at the beginning of a file: 3, or 0 if there is none.

    The JSON reader must begin after the mark; otherwise it rejects the first line.
    """
    with open(path, "rb") as file:
        return 3 if file.read(3) == codecs.BOM_UTF8 else 0


def line_boundaries(path: str, range_bytes: int, begin: int = 0) -> list[int]:
    """Cut a file into ranges of about `range_bytes` bytes that begin and end at line ends.

    Args:
        path: The file.
        range_bytes: The wanted size of a range. A range is longer if a line crosses its end.
        begin: The position at which the first range begins.

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
    """Return the error for a file with a record of more than `MAX_RECORD_BYTES`.

    The message names the line, unless records are not lines or the file has a compression other than gzip.

    Args:
        path: The file.
        compression: The compression of the file: "none", "gzip" or "zstd".
        is_lines: Whether each line is a record.
    """
    line = _first_long_line(path, compression) if is_lines and compression in ("none", "gzip") else None
    name = f"{path}, line {line}," if line else f"{path} has a record that"
    return InputError(
        f"{name} is longer than {MAX_RECORD_BYTES >> 20} MiB, the largest size of a record. Cut its text into several "
        "records of the same user, or remove it, and run the same command again. No record was skipped."
    )


def _first_long_line(path: str, compression: str) -> int | None:
    """Return the number of the first line with more than `MAX_RECORD_BYTES`, from 1, or None if there is none."""
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
    """Yield the content of a file in blocks of `_READ_BYTES`."""
    with open(path, "rb") as file:
        while block := file.read(_READ_BYTES):
            yield block


def range_path(path: str, begin: int, end: int) -> str:
    """Return the path under which `FileRangeSystem` opens the bytes from `begin` to `end` (exclusive) of a file."""
    return f"{SCHEME}{begin}-{end}:{path}"


class FileRange(io.RawIOBase):
    """A read-only file object that consists of the bytes from `begin` to `end` (exclusive) of a file.

    Args:
        path: The file on disk.
        begin: The position of the first byte.
        end: The position after the last byte.
    """

    def __init__(self, path: str, begin: int, end: int) -> None:
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 (closed by `close`)
        self._begin, self._size, self._position = begin, end - begin, 0
        self._file.seek(begin)

    def read(self, size: int = -1, /) -> bytes:
        """Read up to `size` bytes, at most `_READ_BYTES`; a negative `size` reads to the end of the range."""
        left = self._size - self._position
        content = self._file.read(left if size < 0 else min(size, left, _READ_BYTES)) or b""
        self._position += len(content)
        return content

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """Set the position and return it.

        Args:
            offset: The number of bytes to add to the reference point.
            whence: The reference point: 0 is the beginning of the range, 1 the current position, 2 the end.
        """
        self._position = {0: 0, 1: self._position, 2: self._size}[whence] + offset
        self._file.seek(self._begin + self._position)
        return self._position

    def tell(self) -> int:
        """Return the position, counted from the beginning of the range."""
        return self._position

    def readable(self) -> bool:
        """Return True: a range can be read."""
        return True

    def seekable(self) -> bool:
        """Return True: the position can be set."""
        return True

    def close(self) -> None:
        """Close the underlying file."""
        self._file.close()
        super().close()


class FileRangeSystem(AbstractFileSystem):
    """An fsspec file system for the paths of `range_path`. It has only the methods that DuckDB calls."""

    protocol = "range"
    cachable = False

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        """Return the properties of a range as those of a file; its size is that of the range."""
        begin, end, _ = self._parse(path)
        return {"name": path, "size": end - begin, "type": "file"}

    def exists(self, path: str, **kwargs: Any) -> bool:
        """Whether the file that contains the range exists."""
        return os.path.isfile(self._parse(path)[2])

    def glob(self, path: str, **kwargs: Any) -> list[str]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the path unchanged, so that a file name with `*` or `?` is not taken for a pattern."""
        return [path]

    def modified(self, path: str) -> Any:
        """Return the time at which the file that contains the range was modified, in UTC."""
        return datetime.datetime.fromtimestamp(os.path.getmtime(self._parse(path)[2]), tz=datetime.UTC)

    def open(self, path: str, mode: str = "rb", **kwargs: Any) -> FileRange:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Open a range for reading."""
        begin, end, real = self._parse(path)
        return FileRange(real, begin, end)

    def _parse(self, path: str) -> tuple[int, int, str]:
        """Return (begin, end, path of the file) for a path of `range_path`."""
        numbers, _, real = path.removeprefix(SCHEME).partition(":")
        begin, _, end = numbers.partition("-")
        return int(begin), int(end), real


def zstd_window(path: Path) -> int | None:
    """Return the window size of a zstd file in bytes, from its first frame header (RFC 8878, 3.1.1.1).

    A decompressor needs about this much memory. Returns None if the file does not begin with such a header.
    """
    with open(path, "rb") as file:
        head = file.read(18)
    if len(head) < 6 or int.from_bytes(head[:4], "little") != _ZSTD_MAGIC:
        return None
    descriptor = head[4]
    if descriptor & 0x20:  # The frame is a single segment, whose window size is the size of its content.
        size_bytes = (1, 2, 4, 8)[descriptor >> 6]
        begin = 5 + (0, 1, 2, 4)[descriptor & 3]
        return int.from_bytes(head[begin : begin + size_bytes], "little") + (256 if size_bytes == 2 else 0)
    base = 1 << (10 + (head[5] >> 3))
    return base + base // 8 * (head[5] & 7)


def zstd_is_truncated(path: str) -> bool:
    """Whether a zstd file ends within a frame.

    A zstd file is a series of frames. A frame consists of a header, blocks that begin with their sizes, and an optional
    checksum (RFC 8878, 3.1.1). The function reads only the headers and decompresses nothing, so it is fast for large
    files too.
    """
    size = os.path.getsize(path)
    with open(path, "rb", buffering=0) as file:

        def number(position: int, length: int) -> int:
            """Return the little-endian integer of `length` bytes at `position`."""
            return int.from_bytes(os.pread(file.fileno(), length, position), "little")

        position = 0
        while position < size:
            magic = number(position, 4)
            if magic in _ZSTD_SKIPPABLE:
                position += 8 + number(position + 4, 4)
                continue
            if magic != _ZSTD_MAGIC:
                return position + 4 > size  # If the four bytes are complete, the file is not zstd; DuckDB reports that.
            descriptor = number(position + 4, 1)
            single = descriptor >> 5 & 1  # A frame of a single segment has no window field and always a size field.
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
    """Whether a gzip file ends within a member, as after an interrupted download. Decompresses the whole file.

    Returns False for a file that is damaged in another way; the reader reports it.
    """
    try:
        return not all(is_whole for _, is_whole in _decompress(path))
    except zlib.error:
        return False


def unpack_gzip(path: str, target: Path) -> None:
    """Decompress a gzip file to `target`. If the file is truncated, write everything before its end.

    Args:
        path: The compressed file.
        target: The file to write; its folder is created if missing.

    Raises:
        OSError: The target cannot be written.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target, "wb") as file:
        file.writelines(content for content, _ in _decompress(path))


def is_truncation_error(error: Exception) -> bool:
    """Whether an error is the one that DuckDB raises for a truncated .gz file."""
    return "unexpected end of gzip" in str(error).lower()


def _decompress(path: str) -> Iterator[tuple[bytes, bool]]:
    """Yield the content of a gzip file as pairs of bytes and a flag.

    The flag of the last pair is False if the file is truncated; all other flags are True.

    Raises:
        zlib.error: The file is damaged.
    """
    with open(path, "rb") as file:
        member = zlib.decompressobj(31)
        is_inside = False
        while packed := file.read(_READ_BYTES):
            while packed:
                if not is_inside and not packed.strip(b"\0"):
                    break  # zero bytes may follow the last gzip member
                is_inside = True
                # The limit bounds memory: repetitive content can be a thousand times larger than its compressed form.
                yield member.decompress(packed, _READ_BYTES), True
                packed = member.unconsumed_tail or member.unused_data
                if member.eof:
                    member, is_inside = zlib.decompressobj(31), False
        yield b"", not is_inside


Format = Literal["jsonl", "json", "csv", "tsv", "parquet", "duckdb", "sqlite", "hub", "chitchat"]
"""The format of a source. "hub" is a Hugging Face dataset, "chitchat" the demo corpus."""

_FORMATS: dict[str, Format] = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".csv": "csv", ".tsv": "tsv", ".tab": "tsv",
    ".parquet": "parquet", ".pq": "parquet", ".duckdb": "duckdb", ".ddb": "duckdb",
    ".sqlite": "sqlite", ".sqlite3": "sqlite", ".db": "sqlite",
}  # fmt: skip
_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
_COMPRESSION_RATIO = 4  # The typical ratio of compressed text, with which `Source.text_bytes` estimates a size.
_MAX_WINDOW_LOG = 27  # DuckDB's zstd reader refuses windows of more than 2^27 bytes, since it keeps them in memory.
_BATCH_BYTES = 128 << 20  # The largest amount of text in a batch of several files.
_BATCH_FILES = 500  # The largest number of files in a batch.


@dataclass(frozen=True, kw_only=True)
class Fields:
    """The names of the columns to read. In JSON a name that begins with "/" is a JSON pointer (/author/name).

    Args:
        user: The column with the id of the user who wrote the text.
        text: The column with the text.
        time: The column by which the posts of each user are sorted; None keeps the order of the input.
        time_format: A `strptime` format for times that are neither numbers nor ISO 8601.
        table: The table to read, for a database that has several.
    """

    user: str
    text: str
    time: str | None = None
    time_format: str | None = None
    table: str | None = None

    def columns(self) -> list[str]:
        """Return the names of the columns to read: user, text and, if given, time."""
        return [name for name in (self.user, self.text, self.time) if name is not None]


CHITCHAT_FIELDS = Fields(user="sender", text="text", time="timestamp")
"""The columns of the demo corpus "chitchat"."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """One input: a file, a range of a file, a database or a Hugging Face dataset.

    Args:
        path: The path of the file, or the name of a dataset on the Hugging Face hub.
        format: The format of the content.
        compression: "none", "gzip" or "zstd".
        byte_range: The first byte to read and the byte after the last one; None reads the whole file.
    """

    path: str
    format: Format
    compression: str = "none"
    byte_range: tuple[int, int] | None = None

    @property
    def needs_conversion(self) -> bool:
        """Whether DuckDB cannot read the format, so that the source must be converted first (see `conversion`)."""
        return self.format in ("sqlite", "hub", "chitchat")

    @property
    def sql_path(self) -> str:
        """The path that DuckDB opens: the file, or the `range_path` of its byte range."""
        return self.path if self.byte_range is None else range_path(self.path, *self.byte_range)

    @property
    def text_bytes(self) -> int:
        """An estimate of the uncompressed size in bytes, from which the numbers of batches and shards follow.

        It is 0 for a dataset of the Hugging Face hub, whose size is not known here.
        """
        if self.format == "hub" or not os.path.isfile(self.path):
            return 0
        if self.byte_range is not None:
            return self.byte_range[1] - self.byte_range[0]
        is_packed = self.compression != "none" or self.format == "parquet"
        return os.path.getsize(self.path) * (_COMPRESSION_RATIO if is_packed else 1)


@dataclass(frozen=True, kw_only=True)
class FileBatch:
    """Sources that one query reads, in order.

    Several small files of JSON or Parquet form one batch. A source of another format is always a batch by itself.

    Args:
        number: The number of the batch, from 0.
        sources: The sources, which have the same format and compression.
    """

    number: int
    sources: tuple[Source, ...]

    @property
    def text_bytes(self) -> int:
        """An estimate of the uncompressed size of the batch, in bytes."""
        return sum(s.text_bytes for s in self.sources)

    def replace_truncated(self, folder: Path, check_gzip: bool) -> tuple["FileBatch", list[str]]:
        """Find truncated files of the batch, and replace truncated .gz files by copies that DuckDB can read.

        DuckDB reads the beginning of a truncated .zst file, so these files are only reported.

        Args:
            folder: The folder for the copies: the readable beginnings of truncated .gz files, decompressed.
            check_gzip: Whether to check .gz files. The check is slow, since it decompresses each file.

        Returns:
            The batch to read, and one warning for the owner of the data per truncated file.

        Raises:
            CorpusError: A copy cannot be written.
        """
        sources, warnings = [], []
        for number, source in enumerate(self.sources):
            is_gzip = check_gzip and source.compression == "gzip" and gzip_is_truncated(source.path)
            if is_gzip or (source.compression == "zstd" and zstd_is_truncated(source.path)):
                warnings.append(
                    f"{source.path} is truncated: its end is missing. The rows before the end are kept, and the "
                    "last of them may be malformed. Fetch the file again for the other rows."
                )
            if is_gzip:
                source = _unpacked(source, folder / str(number))
            sources.append(source)
        return replace(self, sources=tuple(sources)), warnings


def is_demo_corpus(inputs: Any) -> bool:
    """Whether the only input is "chitchat", the name of the demo corpus.

    Returns False if the current folder has a file or folder of this name, which is then read instead.
    """
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
    """Return all sources of the inputs, each once, in the order of the inputs and sorted by path within an input.

    Args:
        inputs: Paths, globs, folders, "hub:NAME" for a dataset of the Hugging Face hub, or "chitchat" for the demo
            corpus.
        given: The format of all files. None means that the file names tell it.

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
    """Group neighbouring sources of the same format into batches of up to 128 MiB of text.

    Small files are read together, which is much faster than one query per file. Large files of JSON lines are cut into
    ranges. A single file that cannot be cut may be larger than 128 MiB. A scan that is resumed skips the batches that
    were finished, so the batches depend only on the files and not on the backend.
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
    """Return the ranges of a source that are read separately; a source that cannot be cut is returned whole.

    Large uncompressed files of JSON lines are cut. Ranges of uncompressed JSON begin after a byte-order mark.
    """
    if source.format not in ("jsonl", "json") or source.compression != "none":
        return [source]
    begin = text_start(source.path)
    if source.format == "jsonl" and source.text_bytes > _BATCH_BYTES:
        boundaries = line_boundaries(source.path, _BATCH_BYTES, begin)
        return [replace(source, byte_range=bounds) for bounds in itertools.pairwise(boundaries)]
    return [replace(source, byte_range=(begin, source.text_bytes))] if begin else [source]


def _sources_of(text: str, given: str | None) -> list[Source]:
    """Return the sources of one input.

    Files of unknown formats are ignored in a folder, but raise `InputError` if they are named or match a glob.
    """
    if text.startswith("hub:"):
        return [Source(path=text.removeprefix("hub:"), format="hub")]
    path = Path(text)
    if text == "chitchat" and not path.exists():
        return [find_chitchat()]
    if path.is_dir() and ((path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file()):
        return [Source(path=text, format="hub")]  # a dataset that Hugging Face `save_to_disk` wrote
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
        names = [p.name for p in path.parent.glob("[!.]*")] if path.parent.is_dir() else []
        hint = nearest(path.name, names) if names else f" There is no folder {path.parent}, or it is empty."
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
    """Return the source for one file, or None if its format is unknown.

    The format follows from the file name or is given. For databases the first bytes decide, since SQLite and DuckDB
    files both have names that end in .db.

    Raises:
        InputError: A file with the name of a database is not one, or a .zst file needs too much memory.
    """
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
    if window is not None and window > 1 << _MAX_WINDOW_LOG:  # checked here, since a scan may fail only after hours
        raise InputError(
            f"{path} needs a zstd window of {window >> 20} MiB; at most {1 << _MAX_WINDOW_LOG - 20} MiB can be read. "
            f"Compress it again: zstd -dc --long=31 {path.name} | zstd --long={_MAX_WINDOW_LOG} -o again-{path.name}"
        )
    compression = _COMPRESSIONS.get(ending, "none")
    return Source(path=str(path), format=kind, compression=compression)  # pyright: ignore[reportArgumentType]


def _unpacked(source: Source, target: Path) -> Source:
    """Decompress the readable beginning of a truncated .gz file to `target`, and return `target` as a source."""
    try:
        unpack_gzip(source.path, target)
    except OSError as error:
        raise CorpusError(
            f"Cannot unpack {source.path} to {target.parent}: {error.strerror}. Free some space."
        ) from None
    return replace(source, path=str(target), compression="none")


def _known_formats() -> str:
    """Return the formats that can be given with --format, for messages."""
    return ", ".join(sorted(set(_FORMATS.values())))
