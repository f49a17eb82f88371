"""Converts input that DuckDB does not read into files that it reads.

    SQLite databases           JSON lines, read with sqlite3 (DuckDB's extension would have to be downloaded)
    Hugging Face datasets      Parquet
    the demo corpus            JSON lines; it is a file of the PyPI package `chitchat-dataset`
    Python objects             JSON lines or Parquet: rows (dicts), pandas and Arrow tables, `datasets.Dataset`

Only the columns that `prepare` reads are converted. The pipeline calls `convert_source` for each source in one of the
first three formats; `unheard.prepare` calls `opened_sources`, which writes Python objects to temporary files.
"""

import contextlib
import json
import math
import os
import shutil
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from unheard import storage
from unheard.config import nearest
from unheard.corpus.readers import choose_table, column_name, quoted
from unheard.corpus.sources import Fields, Source, find_sources
from unheard.corpus.store import StoreWriter
from unheard.errors import InputError

_MALFORMED = "not a row\n"
"""The line written for a row that cannot be converted. It is not JSON, so the scan counts it as a malformed row."""


def convert_source(source: Source, number: int, work: Path, fields: Fields) -> list[Source]:
    """Convert a source that DuckDB cannot read (`Source.needs_conversion`) into files in `work`.

    A converted file gets its final name only when it is complete, so a repeated call reuses it.

    Args:
        source: A source with the format "hub", "sqlite" or "chitchat".
        number: The index of the source among all sources. It is the name of the converted file or folder.
        work: The work folder of the pipeline.
        fields: The columns to convert.

    Returns:
        The converted files, as sources that DuckDB reads.

    Raises:
        InputError: A column or table is missing, the file cannot be read, or an optional package is not installed.
    """
    folder = work / "imports"
    if source.format == "hub":
        return _import_dataset(source, folder / f"{number:05d}", fields)
    target = folder / f"{number:05d}.jsonl"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        rows = _sqlite_rows(source, fields) if source.format == "sqlite" else _chitchat_rows(Path(source.path))
        _write_lines(target, rows)
    return [replace(source, path=str(target), format="jsonl", compression="none")]


@contextlib.contextmanager
def opened_sources(source: Any, out: str | os.PathLike[str], fields: Fields) -> Iterator[Sequence[Source]]:
    """Yield the sources that the first argument of `unheard.prepare` stands for.

    Python objects are written to a temporary folder next to `out`, which is deleted at the end of the `with` block.

    Args:
        source: A path, a glob, a folder, "hub:NAME", "chitchat" or a list of these; or Python objects (`write_rows`).
        out: The folder of the store; it must be missing or empty.
        fields: The columns of Python objects to keep.

    Raises:
        InputError: There is no such file, or the Python objects cannot be used.
        CorpusError: `out` is not empty. This is only checked here for Python objects.
    """
    if isinstance(source, str | os.PathLike):
        source = [source]
    if isinstance(source, list | tuple) and source and all(isinstance(item, str | os.PathLike) for item in source):
        yield find_sources([os.fspath(item) for item in source])
        return
    StoreWriter.check_path(out)  # raises before a long iterable is read and written
    folder = storage.new_folder_beside(Path(out))
    try:
        yield write_rows(source, folder, fields)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write_rows(rows: Any, folder: Path, fields: Fields) -> list[Source]:
    """Write Python objects to files in `folder`, as Parquet or JSON lines, and return these files as sources.

    Args:
        rows: A pandas DataFrame, an Arrow table, a Hugging Face `Dataset` or `DatasetDict`, or an iterable of dicts.
            The type is recognised by its attributes, so none of these libraries is imported.
        folder: An existing folder.
        fields: The columns to keep.

    Raises:
        InputError: A column is missing, or `rows` is none of these types.
    """
    if isinstance(rows, Mapping) and all(hasattr(part, "to_parquet") for part in rows.values()):  # a DatasetDict
        return [
            source for name, part in rows.items() for source in _write_table(part, folder / f"{name}.parquet", fields)
        ]
    if hasattr(rows, "column_names") or hasattr(rows, "columns"):
        return _write_table(rows, folder / "rows.parquet", fields)
    if isinstance(rows, Iterable) and not isinstance(rows, str | bytes | Mapping):
        target = folder / "rows.jsonl"
        _write_lines(target, _dict_rows(rows, fields))
        return [Source(path=str(target), format="jsonl")]
    raise InputError(
        f"Cannot prepare a {type(rows).__name__}: give a path, an iterable of dicts, a pandas DataFrame, "
        "an Arrow table or a Hugging Face Dataset."
    )


def _write_table(table: Any, target: Path, fields: Fields) -> list[Source]:
    """Write the columns of `fields` as a Parquet file. Raise `InputError` if the table lacks one of them."""
    names = [str(name) for name in (table.column_names if hasattr(table, "column_names") else table.columns)]
    _check_names(names, fields, f"The {type(table).__name__}")
    columns = list(dict.fromkeys(fields.columns()))
    if hasattr(table, "select_columns"):
        # A Hugging Face Dataset may be a selection of the rows of its Arrow table, so DuckDB must not read the table.
        table.select_columns(columns).to_parquet(str(target))
    else:
        import duckdb

        with duckdb.connect(":memory:") as database:
            database.register("rows", table[columns] if hasattr(table, "loc") else table)
            selected = ", ".join(column_name(name) for name in columns)
            database.execute(f"COPY (SELECT {selected} FROM rows) TO {quoted(str(target))} (FORMAT parquet)")
    return [Source(path=str(target), format="parquet")]


def _dict_rows(rows: Iterable[Any], fields: Fields) -> Iterator[str]:
    """Yield a JSON line per row; after the last row, raise `InputError` if no row had one of the columns.

    The rows are treated like the lines of a JSON file: a row that is not a dict counts as malformed, a row without
    user or text counts as such, and a row with an unreadable time comes after the other rows of its user.
    """
    columns = fields.columns()
    names: dict[str, None] = {}
    for row in rows:
        if not isinstance(row, Mapping):
            yield _MALFORMED
            continue
        if len(names) < 1000:
            names.update(dict.fromkeys(map(str, row)))
        text = row.get(fields.text)
        values = {name: _json_value(row.get(name)) for name in columns}
        # As in a JSON file, a row whose text is not a string counts as a row without text.
        yield json.dumps(values | {fields.text: text if isinstance(text, str) else None}) + "\n"
    if names:  # if there was no row, the pipeline raises its own error: the input is empty
        _check_names(list(names), fields, "The input")


def _json_value(value: Any) -> Any:
    """Convert a user id or a time for JSON: numbers and strings as they are, dates to ISO 8601, other objects to str.

    A missing value (None, NaN or infinity) becomes None.
    """
    if hasattr(value, "item"):
        value = value.item()  # a numpy scalar
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return None
    if isinstance(value, str | int | float):
        return value
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def _check_names(names: list[str], fields: Fields, what: str) -> None:
    """Raise `InputError` for the first column of `fields` that is not in `names`.

    The message names the argument of `unheard.prepare` to correct. `what` is the subject of the message.
    """
    for option, name in (("user", fields.user), ("text", fields.text), ("time", fields.time)):
        if name is not None and name not in names:
            raise InputError(f"{what} has no column '{name}' ({option}=).{nearest(name, names)}")


def _write_lines(target: Path, lines: Iterable[str]) -> None:
    """Write lines to a file, which gets its final name only when it is complete."""
    with storage.open_replacement(target) as file:
        file.writelines(line.encode() for line in lines)


def _chitchat_rows(path: Path) -> Iterator[str]:
    """Yield a JSON line per message of the demo corpus. It has only 258,000 messages, so the file is read at once."""
    for conversation in json.loads(path.read_text(encoding="utf-8")).values():
        for turn in conversation["messages"]:
            for message in turn:
                yield json.dumps({key: message.get(key) for key in ("sender", "timestamp", "text")}) + "\n"


def _sqlite_rows(source: Source, fields: Fields) -> Iterator[str]:
    """Yield a JSON line per row of a table or view. The database is opened read-only.

    Raises:
        InputError: The table or a column is missing, or SQLite cannot read the file.
    """
    connection = sqlite3.connect(f"file:{Path(source.path).absolute().as_posix()}?mode=ro", uri=True)
    connection.text_factory = bytes  # SQLite may hold invalid UTF-8, which is decoded and counted as malformed below
    try:
        tables = connection.execute(
            "SELECT name FROM sqlite_master WHERE type IN ('table', 'view') AND name NOT LIKE 'sqlite_%'"
        )
        table = choose_table(source.path, [name.decode() for (name,) in tables], fields.table)
        names = [bytes(row[1]).decode() for row in connection.execute(f"PRAGMA table_info({column_name(table)})")]
        wanted = fields.columns()
        for field in wanted:
            if field not in names:
                raise InputError(f"Table {table} of {source.path} has no column '{field}'.{nearest(field, names)}")
        columns = ", ".join(column_name(field) for field in wanted)
        for row in connection.execute(f"SELECT {columns} FROM {column_name(table)}"):
            try:
                values = [v.decode("utf-8") if isinstance(v, bytes) else v for v in row]
            except UnicodeDecodeError:
                yield _MALFORMED
            else:
                yield json.dumps(dict(zip(wanted, values, strict=True))) + "\n"
    except sqlite3.Error as error:
        raise InputError(f"Cannot read {source.path}: {error}.") from None
    finally:
        connection.close()


def _import_dataset(source: Source, folder: Path, fields: Fields) -> list[Source]:
    """Write each split of a Hugging Face dataset as a Parquet file and return the files. A finished folder is reused.

    The dataset is a name on the hub or a folder written by `save_to_disk`. Raises `InputError` for a missing column.
    """
    if not folder.exists():
        with storage.staged_folder(folder) as staged:
            for split, part in _load_dataset(source.path).items():
                for field in fields.columns():
                    if field not in part.column_names:
                        name = source.path.partition("@")[0]
                        raise InputError(f"Dataset {name} has no column '{field}'.{nearest(field, part.column_names)}")
                part.select_columns(fields.columns()).to_parquet(str(staged / f"{split}.parquet"))
    return [Source(path=str(p), format="parquet") for p in sorted(folder.glob("*.parquet"))]


def _load_dataset(path: str) -> Mapping[str, Any]:
    """Return the splits, by name, of the dataset "NAME" or "NAME@CONFIG", or of a folder written by `save_to_disk`.

    Raises:
        InputError: The package `datasets` is not installed, or it cannot load the dataset.
    """
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise InputError("Hugging Face datasets need an extra: pip install 'unheard[hub]'.") from None
    name, _, config = path.partition("@")
    is_on_disk = Path(name).is_dir() and not config and any(Path(name).glob("dataset_*.json"))
    try:
        loaded: Any = datasets.load_from_disk(name) if is_on_disk else datasets.load_dataset(name, config or None)
    except Exception as error:  # the library raises exceptions of many types
        raise InputError(f"Cannot load the dataset {name}: {str(error).splitlines()[0]}") from None
    return loaded if isinstance(loaded, dict) else {"all": loaded}
