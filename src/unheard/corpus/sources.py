"""Where text comes from: files, globs, folders, databases and hub datasets, each named with how to read it.

In: what the user typed. Out: a list of sources in a fixed order (a row's place in its source breaks ties of time).
Nothing is read here but a few bytes at the front of a file. Databases that DuckDB cannot read itself are in
imports.py.
"""

import glob
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from unheard.config import nearest
from unheard.corpus.file_ranges import piece_path
from unheard.errors import InputError

Format = Literal["jsonl", "json", "csv", "tsv", "parquet", "duckdb", "sqlite", "hub", "chitchat"]

_ENDINGS: dict[str, Format] = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".csv": "csv", ".tsv": "tsv", ".tab": "tsv",
    ".parquet": "parquet", ".pq": "parquet", ".duckdb": "duckdb", ".ddb": "duckdb",
    ".sqlite": "sqlite", ".sqlite3": "sqlite", ".db": "sqlite",
}  # fmt: skip
_PACKED = {".gz": "gzip", ".zst": "zstd"}
_GROWTH = 4  # a compressed byte of text is about four bytes of text
MAX_WINDOW_LOG = 27  # DuckDB's zstd refuses more, since a window is memory


@dataclass(frozen=True, kw_only=True)
class Source:
    """One file, table or dataset."""

    path: str
    format: Format
    compression: str = "none"
    piece: tuple[int, int] | None = None  # only these bytes of it

    @property
    def sql_path(self) -> str:
        """What DuckDB opens."""
        return self.path if self.piece is None else piece_path(self.path, *self.piece)

    @property
    def text_bytes(self) -> int:
        """About how much text it holds: for choosing the number of shards, nothing else."""
        if self.format == "hub" or not os.path.isfile(self.path):
            return 0
        if self.piece is not None:
            return self.piece[1] - self.piece[0]
        packed = self.compression != "none" or self.format == "parquet"
        return os.path.getsize(self.path) * (_GROWTH if packed else 1)


@dataclass(frozen=True, kw_only=True)
class Fields:
    """What the columns are called. In JSON a name that begins with "/" is a path (/author/name)."""

    user: str
    text: str
    time: str | None = None
    time_format: str | None = None
    table: str | None = None


@dataclass(frozen=True, kw_only=True)
class FileBatch:
    """Files that one query reads in order: many small ones together, a CSV alone, since each has its own heading."""

    number: int
    sources: tuple[Source, ...]

    @property
    def text_bytes(self) -> int:
        return sum(s.text_bytes for s in self.sources)


def find_sources(inputs: list[str], given: str | None = None) -> list[Source]:
    """Every source that the inputs name, each once, sorted by path within an input."""
    if given is not None and given not in _ENDINGS.values():
        raise InputError(f"Unknown --format '{given}'.{nearest(given, set(_ENDINGS.values()))}")
    found: dict[str, Source] = {}
    for text in inputs:
        for source in _sources_of(text, given):
            found.setdefault(source.path if source.format == "hub" else os.path.realpath(source.path), source)
    if not found:
        raise InputError("No input: name at least one file, glob or folder.")
    return list(found.values())


def _sources_of(text: str, given: str | None) -> list[Source]:
    if text.startswith("hub:"):
        return [Source(path=text.removeprefix("hub:"), format="hub")]
    path = Path(text)
    if path.is_dir() and ((path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file()):
        return [Source(path=text, format="hub")]  # a Hugging Face dataset saved to disk
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.is_file() and not any(s.startswith(".") for s in p.parts[-1:]))
        known = [s for s in (_source_of_file(p, given) for p in files) if s is not None]
        if not known:
            raise InputError(
                f"The folder {text} holds no file of a known kind ({_kinds()}). Name the kind with --format."
            )
        return known
    if path.is_file():
        files = [path]
    else:
        files = sorted(Path(p) for p in glob.glob(text, recursive=True) if os.path.isfile(p))
        if not files:
            raise InputError(f"No file matches {text}.{_neighbours(path)}")
    sources = []
    for file in files:
        source = _source_of_file(file, given)
        if source is None:
            raise InputError(f"Cannot tell what kind of file {file} is: name it with --format (one of {_kinds()}).")
        sources.append(source)
    return sources


def _source_of_file(path: Path, given: str | None) -> Source | None:
    """The kind by the ending; databases by their first bytes, since both kinds go by `.db`."""
    name = path.name.lower()
    ending = next((e for e in _PACKED if name.endswith(e)), "")
    kind = given or _ENDINGS.get(Path(name.removesuffix(ending)).suffix)
    if kind is None:
        return None
    if kind in ("sqlite", "duckdb"):
        with open(path, "rb") as file:
            head = file.read(16)
        kind = "sqlite" if head.startswith(b"SQLite format 3") else "duckdb" if head[8:12] == b"DUCK" else None
        if kind is None:
            raise InputError(f"{path} is neither an SQLite nor a DuckDB file, whatever its name.")
    if ending == ".zst":
        _check_window(path)
    return Source(path=str(path), format=kind, compression=_PACKED.get(ending, "none"))  # pyright: ignore[reportArgumentType]


def _check_window(path: Path) -> None:
    """A zstd window above 27 bits is refused before hours of work, with the command that cures it."""
    window = zstd_window(path)
    if window is not None and window > 1 << MAX_WINDOW_LOG:
        raise InputError(
            f"{path} needs a zstd window of {window >> 20} MiB; at most {1 << MAX_WINDOW_LOG - 20} MiB can be read. "
            f"Pack it again: zstd -dc --long=31 {path.name} | zstd --long={MAX_WINDOW_LOG} -o again-{path.name}"
        )


def zstd_window(path: Path) -> int | None:
    """The window size in a zstd file's first frame header (RFC 8878, 3.1.1.1), or None if there is none to read."""
    with open(path, "rb") as file:
        head = file.read(18)
    if len(head) < 6 or head[:4] != b"\x28\xb5\x2f\xfd":
        return None
    descriptor = head[4]
    if descriptor & 0x20:  # single segment: the window is the content
        size_bytes = (1, 2, 4, 8)[descriptor >> 6]
        begin = 5 + (0, 1, 2, 4)[descriptor & 3]
        return int.from_bytes(head[begin : begin + size_bytes], "little") + (256 if size_bytes == 2 else 0)
    base = 1 << (10 + (head[5] >> 3))
    return base + base // 8 * (head[5] & 7)


def _kinds() -> str:
    return ", ".join(sorted(set(_ENDINGS.values())))


def _neighbours(path: Path) -> str:
    folder = path.parent
    names = [p.name for p in folder.iterdir()] if folder.is_dir() else []
    return nearest(path.name, names[:50]) if names else f" There is no folder {folder}."
