"""Count the rows, users and tokens of an input without DuckDB, and compare them with the counts of `unheard prepare`.

    unheard prepare posts.csv --user-field who --text-field what --out corpora/posts [--tokens-per-user N]
    python benchmarks/corpus_counts.py corpora/posts posts.csv --user-field who --text-field what [--table T]

The script reads CSV, TSV, JSON lines (also .gz), SQLite and Parquet (needs pyarrow) with Python's own readers. It
counts as docs/corpus.md says, and splits words with the rules of the tokenizer, without a cache. It prints both counts,
and its exit status is 1 if they differ.
"""

import argparse
import csv
import gzip
import json
import sqlite3
import sys
import unicodedata
from collections import Counter
from collections.abc import Iterator
from typing import Any

from unheard.corpus.store import TokenStore
from unheard.corpus.tokenizers import WordTokenizer

SPACE = " \t\n\r\v\f\u00a0\u2007\u202f\u3000\ufeff"
"""Characters that do not count as a user's name or as text."""
Row = tuple[Any, Any] | None
"""User and text; None for a malformed row."""


def rows_of(path: str, user: str, text: str, table: str | None) -> Iterator[Row]:
    """Yield the rows of a file.

    Args:
        path: The file; its suffix says the format.
        user: Name of the column of users.
        text: Name of the column of texts.
        table: Table of an SQLite file; None for the first.
    """
    name = path.removesuffix(".gz")
    if name.endswith((".db", ".sqlite")):
        database = sqlite3.connect(path)
        database.text_factory = bytes
        table = table or database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchone()[0].decode()
        for who, what in database.execute(f'SELECT "{user}", "{text}" FROM "{table}"'):
            yield _decoded(who), _decoded(what)
    elif name.endswith(".parquet"):
        import pyarrow.parquet  # pyright: ignore[reportMissingImports]

        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(columns=[user, text]):
            yield from zip(batch.column(user).to_pylist(), batch.column(text).to_pylist(), strict=True)
    else:
        with (gzip.open if path.endswith(".gz") else open)(path, "rb") as file:
            yield from _csv_rows(file, name, user, text) if not name.endswith("jsonl") else _json_rows(file, user, text)


def _csv_rows(file: Any, name: str, user: str, text: str) -> Iterator[Row]:
    """Yield the rows of a CSV or TSV file. A row with another number of fields or with invalid UTF-8 is malformed."""
    csv.field_size_limit(1 << 30)
    lines = (line.decode("utf-8", "surrogateescape") for line in file)
    reader = csv.reader(lines, delimiter="\t" if name.endswith(".tsv") else ",")
    heading = next(reader)
    who, what = heading.index(user), heading.index(text)
    for row in reader:
        broken = len(row) != len(heading) or any("\udc80" <= c <= "\udcff" for field in row for c in field)
        if row:
            yield None if broken else (row[who], row[what])


def _json_rows(file: Any, user: str, text: str) -> Iterator[Row]:
    """Yield the rows of a file of JSON lines. A line that is not a JSON object is malformed."""
    for line in file:
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            yield (row.get(user), row.get(text)) if isinstance(row, dict) else None
        except ValueError:
            yield None


def _decoded(value: Any) -> Any:
    """Return bytes as text, and any other value unchanged."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def count(rows: Iterator[Row], minimum: int, cap: int | None) -> Counter[str]:
    """Count rows, users and tokens.

    Args:
        rows: The rows of the input.
        minimum: Users with fewer tokens are left out.
        cap: Largest number of tokens per user; None for no limit.
    """
    counts: Counter[str] = Counter()
    tokens: dict[str, int] = {}
    split = WordTokenizer().split_by_rules
    for row in rows:
        counts["rows"] += 1
        who, what = row if row is not None else (None, None)
        who = unicodedata.normalize("NFC", str(who).strip(SPACE)) if who is not None else ""
        if row is None or not who or not isinstance(what, str) or not what.strip(SPACE + "\0"):
            counts["malformed" if row is None else "no_user" if not who else "no_text"] += 1
            continue
        counts["kept"] += 1
        so_far = tokens.get(who, 0)
        if cap is None or so_far < cap:
            words = sum(len(split(chunk)) for chunk in what.split())
            so_far += words + 1 if words else 0
        tokens[who] = so_far if cap is None else min(so_far, cap)
    stay = [number for number in tokens.values() if number >= minimum]
    return counts + Counter(users_seen=len(tokens), users=len(stay), tokens=sum(stay))


def main() -> None:
    """Print the counts of the store and of this script side by side."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("store", "input", "--user-field", "--text-field", "--table"):
        asked.add_argument(name)
    given = asked.parse_args()
    store = TokenStore.open(given.store)
    rule = store.info["streams"]
    theirs = count(
        rows_of(given.input, given.user_field, given.text_field, given.table),
        rule["min_tokens"],
        rule.get("tokens_per_user"),
    )
    rows, users = store.counts["rows"], store.counts["users"]
    ours = {name: rows.get(name, 0) for name in ("rows", "kept", "malformed", "no_user", "no_text")}
    ours["users_seen"] = users["users_seen"]
    for name in ("users", "tokens"):
        ours[name] = sum(users.get(f"{split}_{name}", 0) for split in ("train", "held_out", "public"))
    for name, number in ours.items():
        print(f"{name:12} {number:>12,} {theirs[name]:>12,} {'' if number == theirs[name] else '  differs'}")
    sys.exit(int(any(number != theirs[name] for name, number in ours.items())))


if __name__ == "__main__":
    main()
