"""Small inputs in every format, and functions that prepare stores from them, for the tests of this folder."""

import csv
import gzip
import json
import sqlite3
from pathlib import Path

import duckdb

from unheard.corpus.grouping import DuckDBBackend, SplitRule
from unheard.corpus.pipeline import Preparation, build_store
from unheard.corpus.sources import Fields, find_sources
from unheard.corpus.vocabulary import FileVocabulary

FIELDS = Fields(user="who", text="what", time="when")
ONE_PROCESS = DuckDBBackend(workers=1)  # a process per shard takes seconds to start

# The same posts in every format: two users, not in order of time.
POSTS = [
    {"who": "ann", "what": "c c", "when": 30},
    {"who": "bob", "what": "b, b!", "when": 5},
    {"who": "ann", "what": "a a", "when": 10},
    {"who": "ann", "what": 'b "b"\nb', "when": 20},
]
ANN = '<BOS> a a <EOS> <BOS> b " b " b <EOS> <BOS> c c <EOS>'
BOB = "<BOS> b , b ! <EOS>"


def word_list(folder: Path) -> FileVocabulary:
    file = folder / "words.txt"
    file.write_text('a\nb\nc\n,\n!\n"\nd\ne\nf\n', encoding="utf-8")
    return FileVocabulary(path=str(file))


def write_jsonl(path: Path, rows) -> Path:
    text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    if path.suffix == ".gz":
        with gzip.open(path, "wt", encoding="utf-8") as file:
            file.write(text)
    else:
        path.write_text(text, encoding="utf-8", errors="surrogateescape")
    return path


def write_csv(path: Path, rows, delimiter: str = ",") -> Path:
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)
    return path


def write_with_duckdb(path: Path, rows) -> Path:
    """Write rows as Parquet, as JSON lines compressed with zstd, or as a DuckDB file with one table."""
    lines = write_jsonl(path.with_name("source.jsonl"), rows)
    columns = "columns={'who': 'VARCHAR', 'what': 'VARCHAR', 'when': 'BIGINT'}, format='newline_delimited'"
    database = duckdb.connect(str(path) if path.suffix == ".duckdb" else ":memory:")
    table = f"read_json('{lines}', {columns})"
    if path.suffix == ".duckdb":
        database.execute(f"CREATE TABLE posts AS SELECT * FROM {table}")
    else:
        kind = "FORMAT parquet" if path.suffix == ".parquet" else "FORMAT json, COMPRESSION zstd"
        database.execute(f"COPY (SELECT * FROM {table}) TO '{path}' ({kind})")
    database.close()
    lines.unlink()
    return path


def write_sqlite(path: Path, rows) -> Path:
    connection = sqlite3.connect(path)
    connection.execute('CREATE TABLE posts (who TEXT, what TEXT, "when" INTEGER)')
    connection.executemany("INSERT INTO posts VALUES (?, ?, ?)", [(r["who"], r["what"], r["when"]) for r in rows])
    connection.commit()
    connection.close()
    return path


def prepared(
    folder: Path,
    inputs,
    *,
    out="store",
    backend=ONE_PROCESS,
    memory_bytes=1 << 28,
    user_map=None,
    given=None,
    **choices,
):
    """Prepare a store. All users are in the training split unless the test passes another rule."""
    inputs = [inputs] if isinstance(inputs, str | Path) else inputs
    choices = {"fields": FIELDS, "splits": SplitRule(held_out=0), "vocabulary": word_list(folder), **choices}
    return build_store(
        find_sources([str(i) for i in inputs], given),
        folder / out,
        Preparation(**choices),
        backend=backend,
        memory_bytes=memory_bytes,
        user_map=user_map,
    )


def words_of(store, split="train") -> list[str]:
    users = getattr(store, split)
    return [" ".join(store.vocabulary.word(i) for i in users.tokens(k)) for k in range(users.num_users)]
