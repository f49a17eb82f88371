"""Sources that DuckDB cannot read itself become files that it can: SQLite, hub datasets, the default corpus.

In: a source and the names of its fields. Out: a source of JSON lines or Parquet in the work folder, with only the
fields asked for. SQLite goes through Python's sqlite3: DuckDB's own extension has to be downloaded, and cannot be
everywhere.
"""

import importlib.util
import json
import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from unheard.config import nearest
from unheard.corpus.readers import choose_table
from unheard.corpus.sources import Fields, Source
from unheard.errors import CorpusMissing, InputError

CHITCHAT_FIELDS = Fields(user="sender", text="text", time="timestamp")


def import_source(source: Source, number: int, work: Path, fields: Fields) -> list[Source]:
    """The source as files that the scan reads; unchanged if it is one. Done once: a finished file has its name."""
    folder = work / "imports"
    if source.format == "hub":
        return _import_dataset(source, folder / f"{number:05d}", fields)
    if source.format not in ("sqlite", "chitchat"):
        return [source]
    target = folder / f"{number:05d}.jsonl"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        rows = _sqlite_rows(source, fields) if source.format == "sqlite" else _chitchat_rows(Path(source.path))
        writing = target.with_suffix(".writing")
        with open(writing, "w", encoding="utf-8") as file:
            file.writelines(rows)
        writing.replace(target)
    return [replace(source, path=str(target), format="jsonl", compression="none")]


def find_chitchat() -> Source:
    """The default corpus: a file of the installed package `chitchat-dataset`, found without running its code."""
    found = importlib.util.find_spec("chitchat_dataset")
    path = Path(found.origin).with_name("dataset.json") if found is not None and found.origin is not None else None
    if path is None or not path.is_file():
        raise CorpusMissing("The default corpus is not installed: pip install 'unheard[demo]'.")
    return Source(path=str(path), format="chitchat")


def _chitchat_rows(path: Path) -> Iterator[str]:
    """Conversations of turns of messages, flattened; 258,000 messages, so it is read whole."""
    for conversation in json.loads(path.read_text(encoding="utf-8")).values():
        for turn in conversation["messages"]:
            for message in turn:
                yield json.dumps({key: message.get(key) for key in ("sender", "timestamp", "text")}) + "\n"


def _sqlite_rows(source: Source, fields: Fields) -> Iterator[str]:
    connection = sqlite3.connect(f"file:{Path(source.path).absolute().as_posix()}?mode=ro", uri=True)
    connection.text_factory = bytes  # SQLite does not check its UTF-8; the scan does, and counts what is not
    try:
        tables = connection.execute(
            "SELECT name FROM sqlite_master WHERE type IN ('table', 'view') AND name NOT LIKE 'sqlite_%'"
        )
        table = choose_table(source.path, [name.decode() for (name,) in tables], fields.table)
        table_sql = '"' + table.replace('"', '""') + '"'
        names = [bytes(row[1]).decode() for row in connection.execute(f"PRAGMA table_info({table_sql})")]
        wanted = [field for field in (fields.user, fields.text, fields.time) if field is not None]
        for field in wanted:
            if field not in names:
                raise InputError(f"Table {table} of {source.path} has no column '{field}'.{nearest(field, names)}")
        columns = ", ".join('"' + field.replace('"', '""') + '"' for field in wanted)
        for row in connection.execute(f"SELECT {columns} FROM {table_sql}"):
            yield _json_line(dict(zip(wanted, row, strict=True)))
    except sqlite3.Error as trouble:
        raise InputError(f"Cannot read {source.path}: {trouble}.") from None
    finally:
        connection.close()


def _json_line(row: dict[str, Any]) -> str:
    try:
        return json.dumps({k: v.decode("utf-8") if isinstance(v, bytes) else v for k, v in row.items()}) + "\n"
    except UnicodeDecodeError:
        return "not UTF-8\n"  # no JSON: the scan counts it among the malformed rows


def _import_dataset(source: Source, folder: Path, fields: Fields) -> list[Source]:
    """A Hugging Face dataset (hub name, or a folder saved to disk) as Parquet, all of its splits."""
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise InputError("Hugging Face datasets need an extra: pip install 'unheard[hub]'.") from None
    if not folder.exists():
        name, _, config = source.path.partition("@")
        try:
            on_disk = Path(name).is_dir() and not config and any(Path(name).glob("dataset_*.json"))
            loaded: Any = datasets.load_from_disk(name) if on_disk else datasets.load_dataset(name, config or None)
        except Exception as trouble:  # the library raises many kinds
            raise InputError(f"Cannot load the dataset {name}: {str(trouble).splitlines()[0]}") from None
        writing = folder.with_suffix(".writing")
        writing.mkdir(parents=True, exist_ok=True)
        for split, part in loaded.items() if isinstance(loaded, dict) else [("all", loaded)]:
            wanted = [field for field in (fields.user, fields.text, fields.time) if field is not None]
            for field in wanted:
                if field not in part.column_names:
                    raise InputError(f"Dataset {name} has no column '{field}'.{nearest(field, part.column_names)}")
            part.select_columns(wanted).to_parquet(str(writing / f"{split}.parquet"))
        writing.replace(folder)
    return [Source(path=str(p), format="parquet") for p in sorted(folder.glob("*.parquet"))]
