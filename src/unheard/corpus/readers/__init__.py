"""SQL for each file format: every record of a batch becomes one row (problem, user, text, time).

`json.json_sql` and `csv.csv_sql` build the queries for JSON and CSV; `scan.rows_sql` chooses between them and reads
Parquet and DuckDB files itself. `problem` is NULL for a usable record, or says why the record cannot be used. A column
that is in none of the records raises `InputError` with the columns that there are.

This module has what the readers share: the check of the columns, and the quoting of names and texts in SQL.
"""

from collections.abc import Sequence

from unheard.config import nearest
from unheard.corpus.sources import Fields, FileBatch
from unheard.errors import InputError

MAX_COLUMNS = 1000
"""The most columns of a CSV file: DuckDB holds some thousand rows of each column in memory at once."""


def missing_columns(names: Sequence[str], fields: Fields) -> list[tuple[str, str]]:
    """Return (option, column) for each column that is not among `names`. JSON pointers are not checked."""
    options = (("--user-field", fields.user), ("--text-field", fields.text), ("--time-field", fields.time))
    return [(option, f) for option, f in options if f is not None and not f.startswith("/") and f not in names]


def check_columns(names: Sequence[str], fields: Fields, batch: FileBatch) -> None:
    """Raise `InputError`, with the nearest name that there is, if one of the columns is missing."""
    for option, field in missing_columns(names, fields):
        raise InputError(f"{batch.sources[0].path} has no column '{field}' ({option}).{nearest(field, names)}")


def choose_table(path: str, known: Sequence[str], wanted: str | None) -> str:
    """Return the table of a database to read: `wanted`, or the only one that there is."""
    if wanted is None and len(known) == 1:
        return known[0]
    if wanted is None:
        raise InputError(f"{path} has {len(known)} tables ({', '.join(sorted(known))}): choose one with --table.")
    if wanted not in known:
        raise InputError(f"{path} has no table '{wanted}'.{nearest(wanted, known)}")
    return wanted


def sql_paths(batch: FileBatch) -> str:
    """The paths of a batch as an SQL list."""
    return sql_list([s.sql_path for s in batch.sources])


def sql_list(texts: Sequence[str]) -> str:
    """An SQL list of string literals."""
    return "[" + ", ".join(quoted(text) for text in texts) + "]"


def quoted(text: str) -> str:
    """An SQL string literal."""
    return "'" + text.replace("'", "''") + "'"


def column_name(column: str) -> str:
    """An SQL identifier."""
    return '"' + column.replace('"', '""') + '"'
