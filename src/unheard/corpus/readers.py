"""Builds the DuckDB query that reads a batch of files, checks each row and assigns it to the shard of its user.

`scan_sql` returns the query. Its result has one row per record, with these columns:

    shard       hash of the user id modulo the number of shards; -1 (`UNUSABLE`) for a row that is only counted
    reason      why the row is unusable: malformed, no_user, no_text, excluded (or undecided, see below); NULL if it is
                usable
    user        the id, normalised so that one user has one id: Unicode NFC, no surrounding white space, and equal
                numbers in one spelling (1.0 becomes 1)
    spelling    the id as it is in the input, if it differs from `user`
    text        the post
    time        seconds as a number, or NULL
    position    the position of the row in the whole input, which orders posts with equal times
    text_hash   a hash of posts of at least `duplicate_chars` characters, to find posts that several users wrote

An unusable row has a reason and no user or text. The DuckDB backend runs the query in its processes and the Spark
backend on its workers, so both get the same rows. `summarise_scan`, called after the query, counts the rows that the
query could not count.

`rows_sql` is the inner query, which depends on the file format: it returns every record as one row (problem, user,
text, time), where `problem` is NULL for a usable record. If no record has one of the columns, `rows_sql` raises
`InputError` and lists the columns of the input.

**JSON lines and JSON arrays.** There are two readers, which give the same rows. The quick reader parses each line once
and extracts only the needed columns; it reads JSON lines only. The thorough reader (`read_json_objects`) returns every
record as a JSON value, from which the columns are extracted afterwards. If a line has none of the columns, the quick
reader cannot tell whether the line is valid JSON. It marks such a row as *undecided*, and after the scan
`count_undecided` counts these rows with the thorough reader. A column name that begins with "/" is a JSON pointer (RFC
6901).

**CSV and TSV** files need a header line. If a quote is not closed, the following rows become part of one field. DuckDB
rejects such a row, or accepts it if another stray quote closes it; the rows after it are kept. `rejected_rows`, called
after the scan, returns the number of rows that DuckDB rejected (the query does not return them) and a warning for each
position at which many lines were read as one row. The dialect is RFC 4180: a quote inside a quoted field is doubled.
DuckDB's detection of dialects is turned off, since the posts themselves contain every punctuation mark.

**Parquet and DuckDB** files have typed columns and are read as they are.
"""

import contextlib
import csv
from collections.abc import Sequence
from dataclasses import dataclass

import duckdb

from unheard.config import nearest
from unheard.corpus.sources import MAX_RECORD_BYTES, Fields, FileBatch, FileRangeSystem, record_too_long
from unheard.errors import CorpusError, InputError

UNUSABLE = -1
"""The shard number of rows that are only counted."""

MAX_COLUMNS = 1000
"""The largest number of columns of a CSV file. DuckDB keeps a few thousand rows of every column in memory."""

_ROW_BITS = 40  # position = (number of the batch << 40) + number of the row in the batch
_SPACE = " \t\n\r\v\f\u00a0\u2007\u202f\u3000\ufeff"
# Any character that is not white space. Searching for it finds empty texts faster than trimming, which copies the text.
_VISIBLE = r"[^\s\x{a0}\x{2007}\x{202f}\x{3000}\x{feff}\x{0}]"

# SQL that gives equal numbers in the column `id` one spelling, since one file may hold the ids of another file as floats:
# 1 and 1.0, 0 and -0.0, .5 and 0.5, 007 and 7, 1e+16 and 10000000000000000. It works on the digits as text, so that
# long ids are not rounded.
_NUMBER, _EXPONENT = "[+-]?([0-9]+([.][0-9]*)?|[.][0-9]+)", "[eE][+]?[0-9]{1,2}"
_POWER = "try_cast(regexp_extract(id, '([0-9]+)$', 1) AS INTEGER)"
_FRACTION = "regexp_extract(id, '[.]([0-9]*)', 1)"
_WITHOUT_EXPONENT = (
    f"CASE WHEN regexp_full_match(id, '{_NUMBER}{_EXPONENT}') THEN regexp_extract(id, '^[+-]?[0-9]*') "
    f"|| left({_FRACTION} || repeat('0', {_POWER}), {_POWER}) || '.' || substr({_FRACTION}, {_POWER} + 1) ELSE id END"
)
_WITH_A_ZERO = rf"regexp_replace({_WITHOUT_EXPONENT}, '^([+-]?)[.]', '\10.')"  # .5 becomes 0.5
_WITHOUT_ZEROS = (
    rf"regexp_replace(regexp_replace({_WITH_A_ZERO}, '^[+]?(-?)0*([0-9])', '\1\2'), "
    r"'[.]0*$|([.][0-9]*[1-9])0+$', '\1')"
)
# DP: equal numbers are one id; one person with two ids would be two users.
_ONE_SPELLING = (
    f"CASE WHEN regexp_full_match(id, '{_NUMBER}({_EXPONENT})?') THEN regexp_replace({_WITHOUT_ZEROS}, '^-0$', '0') "
    "ELSE id END"
)


def open_database(
    memory_bytes: int, threads: int, temp: str, excluded: Sequence[str] = ()
) -> duckdb.DuckDBPyConnection:
    """Open an in-memory DuckDB database, in which `range://` paths and the table `excluded` are available.

    Args:
        memory_bytes: The memory limit; less than 64 MiB means 64 MiB.
        threads: The number of threads.
        temp: A folder for intermediate results that do not fit in memory.
        excluded: Ids of users to leave out. They are normalised like the ids in the input and put into the table.
    """
    database = duckdb.connect(":memory:")
    database.register_filesystem(FileRangeSystem())
    database.execute(f"SET memory_limit='{max(memory_bytes >> 20, 64)}MiB'")
    database.execute(f"SET threads={threads}")
    database.execute(f"SET temp_directory={quoted(temp)}")
    database.execute("SET TimeZone='UTC'")
    database.execute("SET preserve_insertion_order=true")
    with contextlib.suppress(duckdb.Error):  # fails in a notebook without ipywidgets, where progress is then coarser
        database.execute("SET enable_progress_bar=true")  # needed for query_progress(); the next line hides the bar
        database.execute("SET enable_progress_bar_print=false")
    database.execute("CREATE TEMP TABLE excluded (id VARCHAR)")
    if excluded:
        database.execute("INSERT INTO excluded SELECT unnest(?)", [list(excluded)])
        database.execute(
            f"CREATE OR REPLACE TEMP TABLE excluded AS SELECT DISTINCT {_ONE_SPELLING} AS id "
            f"FROM (SELECT {_trimmed_sql('id')} AS id FROM excluded)"
        )
    return database


def scan_sql(
    database: duckdb.DuckDBPyConnection, batch: FileBatch, fields: Fields, shards: int, duplicate_chars: int
) -> str:
    """Return the query for one batch. The module docstring lists its columns.

    Args:
        database: A connection of `open_database`; its table `excluded` has the users to leave out.
        batch: The files to read.
        fields: The columns to read.
        shards: The number of shards.
        duplicate_chars: The least length of a post that gets a `text_hash`.

    Raises:
        InputError: No row of the batch has one of the columns. The message lists the columns of the input.
    """
    rows = rows_sql(database, batch, fields)
    usable = "reason IS NULL"
    ((excluded,),) = database.execute("SELECT count(*) FROM excluded").fetchall()
    # `strlen` (bytes) is immediate, `length` (characters of 1 to 4 bytes) has to count: it is called only if needed.
    is_long = (
        f"(strlen(text) >= {4 * duplicate_chars} "
        f"OR (strlen(text) >= {duplicate_chars} AND length(text) >= {duplicate_chars}))"
    )
    return f"""
      WITH raw AS ({rows}),
      numbered AS (SELECT *, row_number() OVER () AS row FROM raw),
      trimmed AS (SELECT row, problem, text, time, "user" AS raw_id, {_trimmed_sql('"user"')} AS id FROM numbered),
      cleaned AS (SELECT * REPLACE ({_ONE_SPELLING} AS id) FROM trimmed),
      judged AS (
        SELECT *, CASE WHEN problem IS NOT NULL THEN problem WHEN id IS NULL OR id = '' THEN 'no_user'
                       WHEN text IS NULL OR NOT regexp_matches(text, {quoted(_VISIBLE)}) THEN 'no_text'
                       {"WHEN id IN (SELECT id FROM excluded) THEN 'excluded'" if excluded else ""}
                       END AS reason FROM cleaned)
      SELECT CASE WHEN {usable} THEN CAST(hash(id) % {shards} AS INTEGER) ELSE {UNUSABLE} END AS shard,
             reason,
             CASE WHEN {usable} THEN id END AS "user",
             CASE WHEN {usable} AND raw_id <> id THEN raw_id END AS spelling,
             CASE WHEN {usable} THEN text END AS text,
             {_time_sql(fields)} AS time,
             CAST({batch.number << _ROW_BITS} + row AS BIGINT) AS position,
             CASE WHEN {usable} AND {is_long} THEN CAST(hash(text) >> 1 AS BIGINT) END AS text_hash
      FROM judged"""


def rows_sql(database: duckdb.DuckDBPyConnection, batch: FileBatch, fields: Fields) -> str:
    """Return the query that reads the records of a batch, in their order, as rows of (problem, user, text, time).

    Args:
        database: A connection of `open_database`.
        batch: The files to read, all of one format.
        fields: The columns to read.

    Raises:
        InputError: A column or a table is missing, or the format must be converted first.
    """
    kind = batch.sources[0].format
    if kind in ("jsonl", "json"):
        return json_sql(database, batch, fields)
    if kind in ("csv", "tsv"):
        return csv_sql(database, batch, fields)
    if kind == "parquet":
        table = f"read_parquet({sql_paths(batch)}, union_by_name=true, binary_as_string=true)"
    elif kind == "duckdb":
        path, alias = batch.sources[0].path, f"source_{batch.number}"
        database.execute(f"ATTACH IF NOT EXISTS {quoted(path)} AS {alias} (READ_ONLY)")
        known = database.execute("SELECT table_name FROM duckdb_tables() WHERE database_name = ?", [alias]).fetchall()
        table = f"{alias}.{column_name(choose_table(path, [row[0] for row in known], fields.table))}"
    else:
        raise InputError(f"{batch.sources[0].path}: a {kind} source must be converted first (corpus/conversion.py).")
    names = [row[0] for row in database.execute(f"DESCRIBE SELECT * FROM {table}").fetchall()]
    check_columns(names, fields, batch)
    text, user = f"CAST({column_name(fields.text)} AS VARCHAR)", f"CAST({column_name(fields.user)} AS VARCHAR)"
    time = f"CAST({column_name(fields.time)} AS VARCHAR)" if fields.time else "NULL"
    return f'SELECT NULL AS problem, {user} AS "user", {text} AS text, {time} AS time FROM {table}'


@dataclass(frozen=True, kw_only=True)
class ScanSummary:
    """Results that are known only after a scan.

    Attributes:
        rows: The numbers of unusable rows that the query did not count, by reason.
        warnings: Sentences about damaged input, for the owner of the data.
    """

    rows: dict[str, int]
    warnings: list[str]


def summarise_scan(
    database: duckdb.DuckDBPyConnection, batch: FileBatch, fields: Fields, has_unusable: bool
) -> ScanSummary:
    """Count the rows that the query could not count. Call it after the query has run on the same connection.

    Args:
        database: The connection that ran the query.
        batch: The files that were read.
        fields: The columns that were read.
        has_unusable: Whether the query returned any unusable row. If not, no row is undecided.
    """
    if batch.sources[0].format in ("csv", "tsv"):
        rows, warnings = rejected_rows(database, batch)
        return ScanSummary(rows=rows, warnings=warnings)
    is_undecided = has_unusable and is_quick(batch, fields)
    return ScanSummary(rows=count_undecided(database, batch, fields) if is_undecided else {}, warnings=[])


def scan_error(error: Exception, batch: FileBatch) -> CorpusError:
    """Convert an error of DuckDB to an error of this package, which names the files and says what to do.

    Args:
        error: The error of DuckDB.
        batch: The files that were being read.
    """
    names = ", ".join(s.path for s in batch.sources[:3]) + (" and others" if len(batch.sources) > 3 else "")
    first = str(error).strip().split("\n")[0]
    lowered = str(error).lower()
    if "no space left" in lowered or "disk full" in lowered or "max_temp_directory_size" in lowered:
        return CorpusError(
            f"The disk is full while reading {names}: free some space on the disk of --out, then run the same command again."
        )
    if "out of memory" in lowered:
        return CorpusError(f"Reading {names} needs more memory than the limit: raise --memory. ({first})")
    if "maximum_object_size" in lowered:
        source = ([s for s in batch.sources if s.path in str(error)] or list(batch.sources))[0]
        return record_too_long(source.path, source.compression, is_lines=source.format == "jsonl")
    if "too much memory for decoding" in lowered:
        return InputError(f"{names} needs a zstd window above 27 bits: pack it again with `zstd --long=27`.")
    return InputError(f"Cannot read {names}: {first}")


def _time_sql(fields: Fields) -> str:
    """Return SQL that converts the time of a row to seconds.

    With `time_format`, times are read in this format. Otherwise a time is a number of seconds or a date in ISO 8601
    (UTC unless it names a time zone).
    """
    if fields.time is None:
        return "CAST(NULL AS DOUBLE)"
    if fields.time_format:
        return f"epoch(try_strptime(time, {quoted(fields.time_format)}))"
    return "coalesce(try_cast(time AS DOUBLE), epoch(try_cast(time AS TIMESTAMPTZ)))"


def _trimmed_sql(expression: str) -> str:
    """Return SQL that normalises an id: Unicode NFC, without surrounding white space."""
    normalised = f"nfc_normalize(trim({expression}, {quoted(_SPACE)}))"
    # Nearly all ids are printable ASCII and need no normalisation; testing this is faster than normalising.
    return f"CASE WHEN regexp_full_match({expression}, '[!-~]+') THEN {expression} ELSE {normalised} END"


def missing_columns(names: Sequence[str], fields: Fields) -> list[tuple[str, str]]:
    """Return (option, column) for each column that is not among `names`. JSON pointers are not checked."""
    options = (("--user-field", fields.user), ("--text-field", fields.text), ("--time-field", fields.time))
    return [(option, f) for option, f in options if f is not None and not f.startswith("/") and f not in names]


def check_columns(names: Sequence[str], fields: Fields, batch: FileBatch) -> None:
    """Raise `InputError` if one of the columns is not in `names`. The message suggests the most similar name."""
    for option, field in missing_columns(names, fields):
        raise InputError(f"{batch.sources[0].path} has no column '{field}' ({option}).{nearest(field, names)}")


def choose_table(path: str, known: Sequence[str], wanted: str | None) -> str:
    """Return the name of the table to read: `wanted`, or the only table of the database.

    Args:
        path: The path of the database, for messages.
        known: The names of its tables.
        wanted: The table that the caller asked for, or None.

    Raises:
        InputError: The table is missing, or none was named and the database does not have exactly one.
    """
    if wanted is None and len(known) == 1:
        return known[0]
    if wanted is None:
        raise InputError(f"{path} has {len(known)} tables ({', '.join(sorted(known))}): choose one with --table.")
    if wanted not in known:
        raise InputError(f"{path} has no table '{wanted}'.{nearest(wanted, known)}")
    return wanted


def sql_paths(batch: FileBatch) -> str:
    """Return the paths of a batch as an SQL list."""
    return sql_list([s.sql_path for s in batch.sources])


def sql_list(texts: Sequence[str]) -> str:
    """Return texts as an SQL list of string literals."""
    return "[" + ", ".join(quoted(text) for text in texts) + "]"


def quoted(text: str) -> str:
    """Return a text as an SQL string literal."""
    return "'" + text.replace("'", "''") + "'"


def column_name(column: str) -> str:
    """Return the name of a column as an SQL identifier."""
    return '"' + column.replace('"', '""') + '"'


UNDECIDED = "undecided"
"""The `problem` of a row in which the quick JSON reader found none of the columns."""


def json_sql(database: duckdb.DuckDBPyConnection, batch: FileBatch, fields: Fields) -> str:
    """Return the query of `rows_sql` for JSON files.

    Args:
        database: A connection.
        batch: Files of JSON lines, or files with one JSON array each.
        fields: The columns to read, as keys or as JSON pointers.

    Raises:
        InputError: No row has one of the keys. The first 2,000 rows are searched first, then all.
    """
    table = _objects(batch)
    names = _keys(database, f"SELECT json FROM {table} LIMIT 2000")
    # If there is no key at all, every line is malformed; then the scan counts these lines and no error is raised here.
    if missing_columns(names, fields) and (names := _keys(database, f"SELECT json FROM {table}")):
        check_columns(names, fields, batch)
    return _quick_sql(batch, fields) if is_quick(batch, fields) else _thorough_sql(batch, fields)


def is_quick(batch: FileBatch, fields: Fields) -> bool:
    """Whether the quick reader can be used: for JSON lines, if no two column names differ only in upper and lower case.

    DuckDB ignores case in column names.
    """
    keys = _top_keys(fields)
    return batch.sources[0].format == "jsonl" and all(keys) and len({key.lower() for key in keys}) == len(keys)


def count_undecided(database: duckdb.DuckDBPyConnection, batch: FileBatch, fields: Fields) -> dict[str, int]:
    """Count the rows that the quick reader left undecided.

    Args:
        database: The connection of the scan.
        batch: The files that were read.
        fields: The columns that were read.

    Returns:
        `malformed`: the number of broken lines; `no_user`: the number of JSON objects without any of the columns.
    """
    keys = [quoted("/" + _escaped(key)) for key in _top_keys(fields)]
    nothing = " AND ".join(f"coalesce(json_type(json, {key}), 'NULL') = 'NULL'" for key in keys)
    broken = "json IS NULL OR json_type(json) <> 'OBJECT'"
    query = f"SELECT {broken} AS broken, count(*) FROM {_objects(batch)} WHERE {broken} OR ({nothing}) GROUP BY 1"
    counts = dict(database.execute(query).fetchall())
    return {"malformed": counts.get(True, 0), "no_user": counts.get(False, 0)}


def _quick_sql(batch: FileBatch, fields: Fields) -> str:
    """Return the query of the quick reader, with which DuckDB extracts the top-level keys while it parses a line."""
    columns = ", ".join(f"{quoted(key)}: 'JSON'" for key in _top_keys(fields))
    # Without records=true DuckDB would return whole lines if only one column is requested and a line is not an object.
    table = f"read_ndjson({sql_paths(batch)}, columns={{{columns}}}, records=true, {_json_options(batch)})"
    values = [_extract_sql(f) for f in (fields.user, fields.text, fields.time or fields.text)]
    nothing = " AND ".join(f"{column_name(key)} IS NULL" for key in _top_keys(fields))
    problem = f"CASE WHEN {nothing} THEN '{UNDECIDED}' END"
    return _fields_sql(
        fields, f"SELECT {problem} AS problem, {', '.join(f'{e} AS f{i}' for i, e in enumerate(values))} FROM {table}"
    )


def _thorough_sql(batch: FileBatch, fields: Fields) -> str:
    """Return the query of the thorough reader.

    It extracts all columns with one call of `json_extract`, since each call parses the whole record again.
    """
    wanted = ", ".join(quoted(_pointer(f)) for f in (fields.user, fields.text, fields.time or fields.text))
    problem = "CASE WHEN json IS NULL OR json_type(json) <> 'OBJECT' THEN 'malformed' END"
    rows = f"SELECT {problem} AS problem, json_extract(json, [{wanted}]) AS f FROM {_objects(batch)}"
    return _fields_sql(fields, f"SELECT problem, f[1] AS f0, f[2] AS f1, f[3] AS f2 FROM ({rows})")


def _fields_sql(fields: Fields, rows: str) -> str:
    """Return a query that converts the JSON values of `rows` to text.

    A user id must be a string or a number and a text must be a string, otherwise the value is NULL. A time may have any
    type.
    """
    user, text = "CAST(f0 AS VARCHAR)", "CAST(f1 AS VARCHAR)"
    return f"""
        SELECT problem,
               CASE WHEN starts_with({user}, '"') THEN f0 ->> '$'
                    WHEN left({user}, 1) BETWEEN '-' AND '9' THEN {user} END AS "user",
               CASE WHEN starts_with({text}, '"') THEN f1 ->> '$' END AS text,
               {"f2 ->> '$'" if fields.time else "NULL"} AS time
        FROM ({rows})"""


def _keys(database: duckdb.DuckDBPyConnection, objects: str) -> list[str]:
    """Return the top-level keys of the JSON objects that the query `objects` returns, sorted."""
    query = f"SELECT DISTINCT unnest(json_keys(json)) FROM ({objects}) WHERE json_type(json) = 'OBJECT'"
    return sorted(row[0] for row in database.execute(query).fetchall())


def _objects(batch: FileBatch) -> str:
    """Return SQL for a table of all records as JSON values; the value is NULL if a record is not valid JSON."""
    reader = "read_ndjson_objects" if batch.sources[0].format == "jsonl" else "read_json_objects"
    return f"{reader}({sql_paths(batch)}, {_json_options(batch)})"


def _json_options(batch: FileBatch) -> str:
    """Return the options of DuckDB's JSON readers: skip broken records, limit their size, decompress."""
    return f"ignore_errors=true, maximum_object_size={MAX_RECORD_BYTES}, compression='{batch.sources[0].compression}'"


def _top_keys(fields: Fields) -> Sequence[str]:
    """Return the top-level keys of the columns to read, each once."""
    return list(dict.fromkeys(_split_pointer(f)[0] for f in fields.columns()))


def _split_pointer(field: str) -> tuple[str, str]:
    """Return the top-level key and the rest of a JSON pointer: "/a/b" gives ("a", "/b"), "a" gives ("a", "")."""
    if not field.startswith("/"):
        return field, ""
    key, slash, rest = field[1:].partition("/")
    return key.replace("~1", "/").replace("~0", "~"), slash + rest


def _extract_sql(field: str) -> str:
    """Return SQL that extracts the value of a field from the columns of the quick reader."""
    key, rest = _split_pointer(field)
    return f"json_extract({column_name(key)}, {quoted(rest)})" if rest else column_name(key)


def _pointer(field: str) -> str:
    """Return the JSON pointer of a field, which is a top-level key or already a pointer."""
    return field if field.startswith("/") else "/" + _escaped(field)


def _escaped(key: str) -> str:
    """Return a key escaped for use in a JSON pointer."""
    return key.replace("~", "~0").replace("/", "~1")


_MANY_LINES = 10  # A field with at least this many line ends may consist of several rows: see `_find_swallowed`.
_DELIMITER_NAMES = {",": "commas", "\t": "tabs", ";": "semicolons", "|": "vertical bars"}
_DELIMITERS = {
    ",": "Add --format csv.",
    "\t": "Add --format tsv.",
    ";": "Write it with commas or tabs, or as Parquet.",
    "|": "Write it with commas or tabs, or as Parquet.",
}
_MAX_WARNINGS = 3  # Warnings name this many positions; the others are only counted.


def csv_sql(database: duckdb.DuckDBPyConnection, batch: FileBatch, fields: Fields) -> str:
    """Return the query of `rows_sql` for one CSV or TSV file.

    This function also reads the file once to find fields that contain whole rows, which `rejected_rows` reports.

    Args:
        database: A connection. The fields with whole rows are written to its temporary table `swallowed`.
        batch: One file. Its first line names the columns.
        fields: The columns to read.

    Raises:
        InputError: A column is missing, or there are more than `MAX_COLUMNS`.
    """
    delimiter = "\t" if batch.sources[0].format == "tsv" else ","
    lines = _lines(batch)
    head = database.execute(f"SELECT line FROM {lines} LIMIT 1").fetchall()
    if not head or head[0][0] is None:
        return "SELECT NULL AS problem, '' AS \"user\", '' AS text, '' AS time WHERE false"
    names = next(csv.reader([head[0][0].removeprefix("\ufeff")], delimiter=delimiter))
    if len(names) > MAX_COLUMNS:
        raise InputError(
            f"{batch.sources[0].path}, line 1: {len(names)} columns, of which at most {MAX_COLUMNS} can be read. Keep the "
            "columns that are needed (user, text, time), or convert the file to Parquet. Nothing was read."
        )
    _check_delimiter(head[0][0], names, delimiter, fields, batch)
    check_columns(names, fields, batch)
    columns = ", ".join(f"'c{i}': 'VARCHAR'" for i in range(len(names)))
    dialect = f"delim={quoted(delimiter)}, quote='\"', escape='\"', header=true"
    table = f"read_csv({sql_paths(batch)}, columns={{{columns}}}, {dialect}, {_csv_options(batch)}"
    # The strict reader fails on a file that mixes the line ends \r\n and \n. The lenient reader is used only for such
    # files, since it accepts rows with too many columns.
    strict = True
    try:
        _find_swallowed(database, f"{table})", len(names), delimiter)
    except duckdb.InvalidInputException:
        strict = False
        _find_swallowed(database, f"{table}, strict_mode=false)", len(names), delimiter)
    table += f", strict_mode={str(strict).lower()}, store_rejects=true)"
    user, text = (f"c{names.index(field)}" for field in (fields.user, fields.text))
    time = f"c{names.index(fields.time)}" if fields.time else "NULL"
    return f'SELECT NULL AS problem, {user} AS "user", {text} AS text, {time} AS time FROM {table}'


def _check_delimiter(head: str, names: Sequence[str], delimiter: str, fields: Fields, batch: FileBatch) -> None:
    """Raise `InputError` if the columns are missing, but the first line has them with another delimiter."""
    if not missing_columns(names, fields):
        return
    for other, remedy in _DELIMITERS.items():  # with `delimiter` itself they are missing, as just seen
        columns = next(csv.reader([head.removeprefix("\ufeff")], delimiter=other))
        if not missing_columns(columns, fields):
            raise InputError(
                f"The columns of {batch.sources[0].path} are separated by {_DELIMITER_NAMES[other]}, and it was read "
                f"with {_DELIMITER_NAMES[delimiter]} between them. {remedy}"
            )


def _find_swallowed(database: duckdb.DuckDBPyConnection, table: str, columns: int, delimiter: str) -> None:
    """Read the whole file once and write the fields that look like several rows into the table `swallowed`."""
    mark = "\\t" if delimiter == "\t" else delimiter
    row = quoted(f"(?m)^[^{mark}\\n]*(?:{mark}[^{mark}\\n]*){{{columns - 1}}}$")
    several = " OR ".join(f"contains(c{i}, chr(10))" for i in range(columns))
    fields = f"SELECT unnest([{', '.join(f'c{i}' for i in range(columns))}]) AS field FROM {table} WHERE {several}"
    # The first and the last line of such a field are parts of rows; 90 % of the lines between must look like a row.
    lines = "strlen(field) - strlen(replace(field, chr(10), ''))"
    looks = f"len(regexp_extract_all(field, {row})) >= 0.9 * ({lines} - 1)"
    rows = f"SELECT split_part(field, chr(10), 1) AS first, {lines} AS lines FROM ({fields})"
    database.execute(f"CREATE OR REPLACE TEMP TABLE swallowed AS {rows} WHERE {lines} >= {_MANY_LINES} AND {looks}")


def rejected_rows(database: duckdb.DuckDBPyConnection, batch: FileBatch) -> tuple[dict[str, int], list[str]]:
    """Return the number of rejected rows, and warnings. Call it after the query of `csv_sql` on the same connection.

    Returns:
        The number of rows that DuckDB rejected, by reason (no_text for a row with too few columns, otherwise
        malformed), and warnings about quotes that are not closed.
    """
    spans = _accepted_spans(database, batch)
    if not database.execute("SELECT 1 FROM duckdb_tables() WHERE table_name = 'reject_errors'").fetchall():
        return {}, _warnings(batch, spans)
    by_line = "SELECT bool_and(error_type = 'MISSING COLUMNS') AS short FROM reject_errors GROUP BY file_id, line"
    rows = database.execute(
        f"SELECT if(short, 'no_text', 'malformed'), count(*) FROM ({by_line}) GROUP BY 1"
    ).fetchall()
    line = "rtrim(csv_line, chr(13) || chr(10))"
    lines = f"strlen({line}) - strlen(replace({line}, chr(10), ''))"
    quote = "bool_or(error_type IN ('UNQUOTED VALUE', 'LINE SIZE OVER MAXIMUM'))"
    # Errors of other types, such as invalid UTF-8 in a long post, are not caused by a quote.
    other = "bool_or(error_type IN ('MISSING COLUMNS', 'TOO MANY COLUMNS'))"
    by_line = (
        f"SELECT line, max({lines}) + 1 AS lines, {quote} AS quote, {other} AS other FROM reject_errors GROUP BY line"
    )
    spans += database.execute(
        f"SELECT line, lines, true FROM ({by_line}) WHERE quote OR (other AND lines > {_MANY_LINES})"
    ).fetchall()
    database.execute("DROP TABLE reject_errors")
    database.execute("DROP TABLE IF EXISTS reject_scans")
    return {str(reason): int(number) for reason, number in rows}, _warnings(batch, spans)


def _accepted_spans(database: duckdb.DuckDBPyConnection, batch: FileBatch) -> list[tuple[int, int, bool]]:
    """Return (line, number of lines, False) for each accepted field that contains several rows.

    The line number is found by searching the file for the first line of the field; it is 0 if the search fails.
    """
    if not database.execute("SELECT 1 FROM duckdb_tables() WHERE table_name = 'swallowed'").fetchall():
        return []
    fields = database.execute("SELECT first, max(lines) FROM swallowed GROUP BY first").fetchall()
    database.execute("DROP TABLE swallowed")
    spans = []
    for first, lines in fields:
        opening = quoted('"' + first.replace('"', '""').rstrip("\r"))
        numbered = f"SELECT row_number() OVER () AS n, line FROM {_lines(batch)}"
        match = database.execute(f"SELECT n FROM ({numbered}) WHERE contains(line, {opening}) LIMIT 1").fetchall()
        spans.append((int(match[0][0]) if match else 0, int(lines) + 1, False))
    return spans


def _warnings(batch: FileBatch, spans: list[tuple[int, int, bool]]) -> list[str]:
    """Return warnings for the owner of the data. A span is (line, number of lines, whether the row was rejected)."""
    path = batch.sources[0].path
    cure = "Close it, or double the quotes inside (RFC 4180)."
    warnings = [
        f"{path}, line {line}: a quote opens that does not close at the end of its field. {lines} lines from there "
        f"were taken for one row, {'broken and left out' if rejected else 'which was kept'}. {cure}"
        for line, lines, rejected in sorted(spans)[:_MAX_WARNINGS]
    ]
    more = sorted(spans)[_MAX_WARNINGS:]
    if more:
        warnings.append(f"{path}: {len(more)} more such places, {sum(lines for _, lines, _ in more)} lines.")
    return warnings


def _lines(batch: FileBatch) -> str:
    """Return SQL for a table of the lines of the file, which are not parsed."""
    one_column = f"columns={{'line': 'VARCHAR'}}, delim={quoted(chr(1))}, quote='', escape='', header=false"
    return f"read_csv({sql_paths(batch)}, {one_column}, strict_mode=false, {_csv_options(batch)})"


def _csv_options(batch: FileBatch) -> str:
    """Return the options that all calls of `read_csv` share: no detection of dialects, and broken rows are skipped."""
    # By default DuckDB allocates a buffer of 16 maximal lines per compressed file, a quarter of the memory limit.
    packing = f"compression='{batch.sources[0].compression}', buffer_size={2 * MAX_RECORD_BYTES}"
    return f"auto_detect=false, ignore_errors=true, max_line_size={MAX_RECORD_BYTES}, comment='', {packing}"
