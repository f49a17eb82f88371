"""One reader for every format and both engines: a batch of files in, rows of (shard, user, time, place, text) out.

In: sources and the names of their fields. Out: an SQL query for DuckDB. The DuckDB engine runs it here, Spark runs the same query on its
workers, so both see the same rows to the byte. A row that cannot be used keeps its reason and loses its text.
"""

import csv
from collections.abc import Sequence
from dataclasses import dataclass

import duckdb

from unheard.corpus.sources import Source
from unheard.errors import CorpusError, InputError
from unheard.parts import nearest

UNUSABLE = -1  # the shard of rows that are only counted
LINE_BYTES = 16 << 20
_BATCH_BYTES = 256 << 20
_BATCH_FILES = 500
_SPACE = " \t\n\r\v\f\u00a0\u2007\u202f\u3000\ufeff"
_INK = r"[^\s\x{a0}\x{2007}\x{202f}\x{3000}\x{feff}\x{0}]"  # the search stops at the first; trimming would copy every text
COLUMNS = ("shard", "status", "user", "text", "time", "batch", "row", "text_hash")


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


def batches(sources: Sequence[Source]) -> list[Batch]:
    """Neighbouring sources of one kind, up to a fixed size. Depends on the files alone: both engines get the same."""
    groups: list[list[Source]] = []
    size = 0
    for source in sources:
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
    return [Batch(number=i, sources=tuple(group)) for i, group in enumerate(groups)]


def open_database(memory_bytes: int, threads: int, temp: str, excluded: Sequence[str] = ()) -> duckdb.DuckDBPyConnection:
    """A DuckDB of our own with a fixed memory limit; what does not fit goes to `temp`."""
    database = duckdb.connect(":memory:")
    database.execute(f"SET memory_limit='{max(memory_bytes >> 20, 64)}MiB'")
    database.execute(f"SET threads={threads}")
    database.execute(f"SET temp_directory={quoted(temp)}")
    database.execute("SET TimeZone='UTC'")
    database.execute("SET preserve_insertion_order=true")
    database.execute("SET enable_progress_bar=true")  # so that query_progress() knows; it draws nothing
    database.execute("SET enable_progress_bar_print=false")
    database.execute("CREATE TEMP TABLE excluded (id VARCHAR)")
    if excluded:
        database.execute("INSERT INTO excluded SELECT unnest(?)", [list(excluded)])
        database.execute(f"CREATE OR REPLACE TEMP TABLE excluded AS SELECT DISTINCT {_user('id')} AS id FROM excluded")
    return database


def scan_sql(database: duckdb.DuckDBPyConnection, batch: Batch, fields: Fields, shards: int, duplicate_chars: int) -> str:
    """The query for one batch. Raises InputError, with the columns there are, if a field is in none of its rows."""
    rows = _rows_sql(database, batch, fields)
    usable = "status = 'kept'"
    return f"""
      WITH raw AS ({rows}),
      numbered AS (SELECT *, row_number() OVER () AS row FROM raw),
      cleaned AS (SELECT row, malformed, text, time, {_user('"user"')} AS id FROM numbered),
      judged AS (
        SELECT *, CASE WHEN malformed THEN 'malformed' WHEN id IS NULL OR id = '' THEN 'no_user'
                       WHEN text IS NULL OR NOT regexp_matches(text, {quoted(_INK)}) THEN 'no_text'
                       WHEN id IN (SELECT id FROM excluded) THEN 'excluded' ELSE 'kept' END AS status FROM cleaned)
      SELECT CASE WHEN {usable} THEN CAST(md5_number_lower(id) % {shards} AS INTEGER) ELSE {UNUSABLE} END AS shard,
             status,
             CASE WHEN {usable} THEN id END AS "user",
             CASE WHEN {usable} THEN text END AS text,
             {_time_sql(fields)} AS time,
             CAST({batch.number} AS INTEGER) AS batch,
             CAST(row AS BIGINT) AS row,
             CASE WHEN {usable} AND length(text) >= {duplicate_chars} THEN CAST(hash(text) >> 1 AS BIGINT) END AS text_hash
      FROM judged"""


def rejected_rows(database: duckdb.DuckDBPyConnection) -> int:
    """Rows that the CSV reader could not make sense of in the last query: they reach no query at all."""
    known = database.execute("SELECT count(*) FROM duckdb_tables() WHERE table_name = 'reject_errors'").fetchone()
    if not known or not known[0]:
        return 0
    count = database.execute("SELECT count(DISTINCT (file_id, line)) FROM reject_errors").fetchone()
    database.execute("DROP TABLE reject_errors")
    database.execute("DROP TABLE IF EXISTS reject_scans")
    return int(count[0]) if count else 0


def as_refusal(trouble: Exception, batch: Batch) -> CorpusError:
    """DuckDB's trouble in our words: which files, and what to do."""
    names = ", ".join(s.path for s in batch.sources[:3]) + (" and others" if len(batch.sources) > 3 else "")
    first = str(trouble).strip().split("\n")[0]
    lowered = str(trouble).lower()
    if "no space left" in lowered or "disk full" in lowered or "max_temp_directory_size" in lowered:
        return CorpusError(f"The disk is full while reading {names}: make room beside --out, then run the same command again.")
    if "out of memory" in lowered:
        return CorpusError(f"Reading {names} needs more memory than the limit: raise --memory. ({first})")
    if "too much memory for decoding" in lowered:
        return InputError(f"{names} needs a zstd window above 27 bits: pack it again with `zstd --long=27`.")
    return InputError(f"Cannot read {names}: {first}")


def _rows_sql(database: duckdb.DuckDBPyConnection, batch: Batch, fields: Fields) -> str:
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
    sample = f"SELECT DISTINCT unnest(json_keys(json)) FROM (SELECT json FROM {table} LIMIT 2000) WHERE json_type(json) = 'OBJECT'"
    names = sorted(row[0] for row in database.execute(sample).fetchall())
    if names:  # no object at all: every line is malformed, and counted so
        _require_columns(names, fields, batch)
    # One extraction for all fields, since each call reads the whole line again. A user may be text or a number.
    wanted = ", ".join(_pointer(f) for f in (fields.user, fields.text, fields.time or fields.text))
    return f"""
        SELECT malformed, CASE WHEN starts_with(CAST(f[1] AS VARCHAR), '"') THEN f[1] ->> '$'
                               WHEN regexp_matches(CAST(f[1] AS VARCHAR), '^-?[0-9]') THEN CAST(f[1] AS VARCHAR) END AS "user",
               CASE WHEN starts_with(CAST(f[2] AS VARCHAR), '"') THEN f[2] ->> '$' END AS text,
               {"f[3] ->> '$'" if fields.time else "NULL"} AS time
        FROM (SELECT json IS NULL OR json_type(json) <> 'OBJECT' AS malformed, json_extract(json, [{wanted}]) AS f FROM {table})"""


def _csv_sql(database: duckdb.DuckDBPyConnection, batch: Batch, fields: Fields, delimiter: str) -> str:
    """No guessing of dialects: people's text has every mark in it. Quotes double inside quotes (RFC 4180)."""
    source = batch.sources[0]
    plain = f"auto_detect=false, ignore_errors=true, max_line_size={LINE_BYTES}, comment='', {_compression(source)}"
    first_line = f"read_csv({_paths(batch)}, columns={{'line': 'VARCHAR'}}, delim='\\x01', quote='', escape='', header=false, {plain})"
    head = database.execute(f"SELECT line FROM {first_line} LIMIT 1").fetchone()
    if head is None or head[0] is None:
        return "SELECT true AS malformed, '' AS \"user\", '' AS text, '' AS time WHERE false"
    names = next(csv.reader([head[0].removeprefix("\ufeff")], delimiter=delimiter))
    _require_columns(names, fields, batch)
    columns = ", ".join(f"'c{i}': 'VARCHAR'" for i in range(len(names)))
    table = (
        f"read_csv({_paths(batch)}, columns={{{columns}}}, delim={quoted(delimiter)}, quote='\"', escape='\"', header=true, "
        f"null_padding=true, parallel=false, store_rejects=true, {plain})"
    )
    user, text = (f"c{names.index(field)}" for field in (fields.user, fields.text))
    time = f"c{names.index(fields.time)}" if fields.time else "NULL"
    return f'SELECT false AS malformed, {user} AS "user", {text} AS text, {time} AS time FROM {table}'


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


def _require_columns(names: Sequence[str], fields: Fields, batch: Batch) -> None:
    for flag, field in (("--user-field", fields.user), ("--text-field", fields.text), ("--time-field", fields.time)):
        if field is not None and not field.startswith("/") and field not in names:
            raise InputError(f"{batch.sources[0].path} has no column '{field}' ({flag}).{nearest(field, names)}")


def _time_sql(fields: Fields) -> str:
    """Seconds as a number: a number as it stands, else a date in ISO 8601 (UTC if it names no zone) or --time-format."""
    if fields.time is None:
        return "CAST(NULL AS DOUBLE)"
    if fields.time_format:
        return f"epoch(try_strptime(time, {quoted(fields.time_format)}))"
    return "coalesce(try_cast(time AS DOUBLE), epoch(try_cast(time AS TIMESTAMPTZ)))"


def _user(expression: str) -> str:
    """Ids are one person's when they are the same after Unicode composition and without white space around them."""
    return f"nfc_normalize(trim({expression}, {quoted(_SPACE)}))"


def _paths(batch: Batch) -> str:
    return "[" + ", ".join(quoted(s.path) for s in batch.sources) + "]"


def _compression(source: Source) -> str:
    return f"compression='{source.compression}'"


def _pointer(field: str) -> str:
    return quoted(field if field.startswith("/") else "/" + field.replace("~", "~0").replace("/", "~1"))


def quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _name(column: str | None) -> str:
    return '"' + str(column).replace('"', '""') + '"'
