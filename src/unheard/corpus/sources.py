"""Finds the input of `prepare` (files, globs, folders, databases, Hugging Face datasets) and groups it into batches.

    sources = find_sources(["RC_2015-*.jsonl.zst", "extra.csv"])
    batches = make_batches(sources)        # each batch is read by one query

Nothing is read here except a few bytes at the front of each file. The order of the sources is fixed, since the position
of a row in the input decides between posts with equal times. Formats that DuckDB does not read (SQLite, Hugging Face
datasets, the demo corpus) are converted first: see `conversion`.
"""

import glob
import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from unheard.config import nearest
from unheard.corpus.input_files import (
    gzip_is_truncated,
    line_boundaries,
    range_path,
    text_start,
    unpack_gzip,
    zstd_is_truncated,
    zstd_window,
)
from unheard.errors import CorpusError, InputError

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


def find_sources(inputs: Sequence[str], given: str | None = None) -> list[Source]:
    """List every source that the inputs name, each once, sorted by path within an input.

    Args:
        inputs: Paths, globs, folders, or "hub:NAME" for a dataset of the Hugging Face hub.
        given: The format, for files whose names do not tell it.

    Raises:
        InputError: An input does not exist or its format is unknown.
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
            raise InputError(f"{path} is neither an SQLite nor a DuckDB file, whatever its name.")
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
        raise CorpusError(f"Cannot unpack {source.path} to {target.parent}: {error.strerror}. Make room.") from None
    return replace(source, path=str(target), compression="none")


def _known_formats() -> str:
    return ", ".join(sorted(set(_FORMATS.values())))
