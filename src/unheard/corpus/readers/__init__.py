"""How each format is read: a batch of files in, a query for (trouble, user, text, time) out.

In: a batch and the names of its fields. Out: SQL in which every row of the files is one row, usable or not (then trouble
says why). A field that is in none of a batch's rows is refused here, with the columns there are.
"""

from collections.abc import Sequence

import duckdb

from unheard.config import nearest
from unheard.corpus.readers.columns import Fields, FileBatch, check_columns, column_name, quoted, sql_paths
from unheard.corpus.readers.csv import csv_sql
from unheard.corpus.readers.json import json_sql
from unheard.errors import InputError


def rows_sql(database: duckdb.DuckDBPyConnection, batch: FileBatch, fields: Fields) -> str:
    """One row for every row of the batch, in its order."""
    kind = batch.sources[0].format
    if kind in ("jsonl", "json"):
        return json_sql(database, batch, fields)
    if kind in ("csv", "tsv"):
        return csv_sql(database, batch, fields)
    if kind == "parquet":
        table = f"read_parquet({sql_paths(batch)}, union_by_name=true, binary_as_string=true)"
    elif kind == "duckdb":
        table = _attached(database, batch, fields.table)
    else:
        raise InputError(f"{batch.sources[0].path}: a {kind} source must be imported first.")
    names = [row[0] for row in database.execute(f"DESCRIBE SELECT * FROM {table}").fetchall()]
    check_columns(names, fields, batch)
    text, user = f"CAST({column_name(fields.text)} AS VARCHAR)", f"CAST({column_name(fields.user)} AS VARCHAR)"
    time = f"CAST({column_name(fields.time)} AS VARCHAR)" if fields.time else "NULL"
    return f'SELECT NULL AS trouble, {user} AS "user", {text} AS text, {time} AS time FROM {table}'


def _attached(database: duckdb.DuckDBPyConnection, batch: FileBatch, table: str | None) -> str:
    path, alias = batch.sources[0].path, f"source_{batch.number}"
    database.execute(f"ATTACH IF NOT EXISTS {quoted(path)} AS {alias} (READ_ONLY)")
    known = database.execute("SELECT table_name FROM duckdb_tables() WHERE database_name = ?", [alias]).fetchall()
    return f"{alias}.{column_name(choose_table(path, [row[0] for row in known], table))}"


def choose_table(path: str, known: Sequence[str], asked: str | None) -> str:
    """The table to read in a database: the one asked for, or the only one."""
    if asked is None and len(known) == 1:
        return known[0]
    if asked is None:
        raise InputError(f"{path} has {len(known)} tables ({', '.join(sorted(known))}): choose one with --table.")
    if asked not in known:
        raise InputError(f"{path} has no table '{asked}'.{nearest(asked, known)}")
    return asked
