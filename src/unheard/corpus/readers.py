"""How each format is read: a batch of files in, a query for (malformed, user, text, time) out.

In: a batch and the names of its fields. Out: SQL in which every row of the files is one row, usable or not. A field
that is in none of a batch's rows is refused here, with the columns there are.
"""

import csv
from collections.abc import Sequence
from dataclasses import dataclass

import duckdb

from unheard.corpus.sources import Source
from unheard.errors import InputError
from unheard.parts import nearest

LINE_BYTES = 16 << 20


@dataclass(frozen=True, kw_only=True)
class Fields:
    """What the columns are called. In JSON a name that begins with "/" is a path (/author/name)."""

    user: str
    text: str
    time: str | None = None
    time_format: str | None = None
    table: str | None = None


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Files that one query reads in order: many small ones together, a CSV alone, since each has its own heading."""

    number: int
    sources: tuple[Source, ...]

    @property
    def text_bytes(self) -> int:
        return sum(s.text_bytes for s in self.sources)


def rows_sql(database: duckdb.DuckDBPyConnection, batch: Batch, fields: Fields) -> str:
    """One row for every row of the batch, in its order."""
    kind = batch.sources[0].format
    if kind in ("jsonl", "json"):
        return _json_sql(database, batch, fields)
    if kind in ("csv", "tsv"):
        return _csv_sql(database, batch, fields, "," if kind == "csv" else "\t")
    if kind == "parquet":
        table = f"read_parquet({_paths(batch)}, union_by_name=true, binary_as_string=true)"
    elif kind == "duckdb":
        table = _attached(database, batch, fields.table)
    else:
        raise InputError(f"{batch.sources[0].path}: a {kind} source must be imported first.")
    names = [row[0] for row in database.execute(f"DESCRIBE SELECT * FROM {table}").fetchall()]
    _require_columns(names, fields, batch)
    text, user = f"CAST({_name(fields.text)} AS VARCHAR)", f"CAST({_name(fields.user)} AS VARCHAR)"
    time = f"CAST({_name(fields.time)} AS VARCHAR)" if fields.time else "NULL"
    return f'SELECT false AS malformed, {user} AS "user", {text} AS text, {time} AS time FROM {table}'


def _json_sql(database: duckdb.DuckDBPyConnection, batch: Batch, fields: Fields) -> str:
    source = batch.sources[0]
    reader = "read_ndjson_objects" if source.format == "jsonl" else "read_json_objects"
    table = f"{reader}({_paths(batch)}, ignore_errors=true, maximum_object_size={LINE_BYTES}, {_compression(source)})"
    names = _keys(database, f"SELECT json FROM {table} LIMIT 2000")
    if not _lacking(names, fields):
        pass
    elif names := _keys(database, f"SELECT json FROM {table}"):  # none at all: every line is malformed, and counted so
        _require_columns(names, fields, batch)
    # One extraction for all fields, since each call reads the whole line again. A user may be text or a number.
    wanted = ", ".join(_pointer(f) for f in (fields.user, fields.text, fields.time or fields.text))
    user, text = "CAST(f[1] AS VARCHAR)", "CAST(f[2] AS VARCHAR)"
    return f"""
        SELECT malformed,
               CASE WHEN starts_with({user}, '"') THEN f[1] ->> '$'
                    WHEN left({user}, 1) BETWEEN '-' AND '9' THEN {user} END AS "user",
               CASE WHEN starts_with({text}, '"') THEN f[2] ->> '$' END AS text,
               {"f[3] ->> '$'" if fields.time else "NULL"} AS time
        FROM (SELECT json IS NULL OR json_type(json) <> 'OBJECT' AS malformed,
                     json_extract(json, [{wanted}]) AS f FROM {table})"""


def _keys(database: duckdb.DuckDBPyConnection, objects: str) -> list[str]:
    query = f"SELECT DISTINCT unnest(json_keys(json)) FROM ({objects}) WHERE json_type(json) = 'OBJECT'"
    return sorted(row[0] for row in database.execute(query).fetchall())


def _csv_sql(database: duckdb.DuckDBPyConnection, batch: Batch, fields: Fields, delimiter: str) -> str:
    """No guessing of dialects: people's text has every mark in it. Quotes double inside quotes (RFC 4180)."""
    source = batch.sources[0]
    plain = f"auto_detect=false, ignore_errors=true, max_line_size={LINE_BYTES}, comment='', {_compression(source)}"
    one_column = f"columns={{'line': 'VARCHAR'}}, delim={quoted(chr(1))}, quote='', escape='', header=false"
    first_line = f"read_csv({_paths(batch)}, {one_column}, strict_mode=false, {plain})"
    head = database.execute(f"SELECT line FROM {first_line} LIMIT 1").fetchall()
    if not head or head[0][0] is None:
        return "SELECT true AS malformed, '' AS \"user\", '' AS text, '' AS time WHERE false"
    names = next(csv.reader([head[0][0].removeprefix("\ufeff")], delimiter=delimiter))
    _require_columns(names, fields, batch)
    columns = ", ".join(f"'c{i}': 'VARCHAR'" for i in range(len(names)))
    dialect = f"delim={quoted(delimiter)}, quote='\"', escape='\"', header=true"
    table = f"read_csv({_paths(batch)}, columns={{{columns}}}, {dialect}, {plain}"
    # Lines that end now in \r\n and now in \n stop the strict reader for the whole file: only then the lenient one,
    # which takes a row with too many columns for a good one.
    strict = _runs(database, f"SELECT count(*) FROM {table})")
    table += f", strict_mode={str(strict).lower()}, store_rejects=true)"
    user, text = (f"c{names.index(field)}" for field in (fields.user, fields.text))
    time = f"c{names.index(fields.time)}" if fields.time else "NULL"
    return f'SELECT false AS malformed, {user} AS "user", {text} AS text, {time} AS time FROM {table}'


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
    return f"{alias}.{_name(choose_table(path, [row[0] for row in known], table))}"


def choose_table(path: str, known: Sequence[str], asked: str | None) -> str:
    """The table to read in a database: the one asked for, or the only one."""
    if asked is None and len(known) == 1:
        return known[0]
    if asked is None:
        raise InputError(f"{path} has {len(known)} tables ({', '.join(sorted(known))}): choose one with --table.")
    if asked not in known:
        raise InputError(f"{path} has no table '{asked}'.{nearest(asked, known)}")
    return asked


def _lacking(names: Sequence[str], fields: Fields) -> list[tuple[str, str]]:
    """(flag, field) for each field that is not among the columns; a JSON path may be anywhere."""
    asked = (("--user-field", fields.user), ("--text-field", fields.text), ("--time-field", fields.time))
    return [(flag, f) for flag, f in asked if f is not None and not f.startswith("/") and f not in names]


def _require_columns(names: Sequence[str], fields: Fields, batch: Batch) -> None:
    for flag, field in _lacking(names, fields):
        raise InputError(f"{batch.sources[0].path} has no column '{field}' ({flag}).{nearest(field, names)}")


def _paths(batch: Batch) -> str:
    return sql_list([s.sql_path for s in batch.sources])


def _compression(source: Source) -> str:
    return f"compression='{source.compression}'"


def _pointer(field: str) -> str:
    return quoted(field if field.startswith("/") else "/" + field.replace("~", "~0").replace("/", "~1"))


def sql_list(texts: Sequence[str]) -> str:
    return "[" + ", ".join(quoted(text) for text in texts) + "]"


def quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _name(column: str | None) -> str:
    return '"' + str(column).replace('"', '""') + '"'
