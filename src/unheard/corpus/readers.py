"""How each format is read: a batch of files in, a query for (trouble, user, text, time) out.

In: a batch and the names of its fields. Out: SQL in which every row of the files is one row, usable or not (then trouble
says why). A field
that is in none of a batch's rows is refused here, with the columns there are.
"""

import csv
from collections.abc import Sequence

import duckdb

from unheard.corpus.fields import LINE_BYTES, Batch, Fields, check_columns, column_name, quoted, sql_paths
from unheard.corpus.json_rows import json_sql
from unheard.errors import InputError
from unheard.parts import nearest


def rows_sql(database: duckdb.DuckDBPyConnection, batch: Batch, fields: Fields) -> str:
    """One row for every row of the batch, in its order."""
    kind = batch.sources[0].format
    if kind in ("jsonl", "json"):
        return json_sql(database, batch, fields)
    if kind in ("csv", "tsv"):
        return _csv_sql(database, batch, fields, "," if kind == "csv" else "\t")
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


def _csv_sql(database: duckdb.DuckDBPyConnection, batch: Batch, fields: Fields, delimiter: str) -> str:
    """No guessing of dialects: people's text has every mark in it. Quotes double inside quotes (RFC 4180)."""
    source = batch.sources[0]
    plain = f"auto_detect=false, ignore_errors=true, max_line_size={LINE_BYTES}, comment='', compression='{source.compression}'"
    one_column = f"columns={{'line': 'VARCHAR'}}, delim={quoted(chr(1))}, quote='', escape='', header=false"
    first_line = f"read_csv({sql_paths(batch)}, {one_column}, strict_mode=false, {plain})"
    head = database.execute(f"SELECT line FROM {first_line} LIMIT 1").fetchall()
    if not head or head[0][0] is None:
        return "SELECT NULL AS trouble, '' AS \"user\", '' AS text, '' AS time WHERE false"
    names = next(csv.reader([head[0][0].removeprefix("\ufeff")], delimiter=delimiter))
    check_columns(names, fields, batch)
    columns = ", ".join(f"'c{i}': 'VARCHAR'" for i in range(len(names)))
    dialect = f"delim={quoted(delimiter)}, quote='\"', escape='\"', header=true"
    table = f"read_csv({sql_paths(batch)}, columns={{{columns}}}, {dialect}, {plain}"
    # Lines that end now in \r\n and now in \n stop the strict reader for the whole file: only then the lenient one,
    # which takes a row with too many columns for a good one.
    strict = _runs(database, f"SELECT count(*) FROM {table})")
    table += f", strict_mode={str(strict).lower()}, store_rejects=true)"
    user, text = (f"c{names.index(field)}" for field in (fields.user, fields.text))
    time = f"c{names.index(fields.time)}" if fields.time else "NULL"
    return f'SELECT NULL AS trouble, {user} AS "user", {text} AS text, {time} AS time FROM {table}'


def _runs(database: duckdb.DuckDBPyConnection, query: str) -> bool:
    try:
        database.execute(query).fetchall()
    except duckdb.InvalidInputException:
        return False
    return True


def _attached(database: duckdb.DuckDBPyConnection, batch: Batch, table: str | None) -> str:
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
