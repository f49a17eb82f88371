"""Builds the query that turns a batch of input files into checked rows, each with the shard of its user.

`scan_sql` returns one SQL query for DuckDB with the columns

    shard       hash of the user id modulo the number of shards; -1 (`UNUSABLE`) for a row that is only counted
    reason      why the row is unusable: malformed, no_user, no_text, excluded; NULL if it is usable
    user        the id, Unicode-normalised (NFC), without surrounding white space, and numbers in one spelling (1.0 is
                1): one person has one id
    spelling    the id as it is in the input, where it differs from `user`
    text        the post
    time        seconds as a number, or NULL
    position    the position of the row in the whole input, which orders posts with equal times
    text_hash   a hash of posts of at least `duplicate_chars` characters, to find copies under several users

The DuckDB backend runs the query in its own processes and the Spark backend on its workers, so both see the same rows.
An unusable row keeps its reason and loses its text.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import duckdb

from unheard.corpus.readers import (
    check_columns,
    choose_table,
    column_name,
    count_undecided,
    csv_sql,
    is_quick,
    json_sql,
    quoted,
    rejected_rows,
    sql_paths,
)
from unheard.corpus.sources import Fields, FileBatch, FileRangeSystem, record_too_long
from unheard.errors import CorpusError, InputError

UNUSABLE = -1
"""The shard number of rows that are only counted."""

_ROW_BITS = 40  # a position is the number of the batch, shifted by this, plus the number of the row in the batch
_SPACE = " \t\n\r\v\f\u00a0\u2007\u202f\u3000\ufeff"
# Any character that is not white space. A search stops at the first one; trimming would copy every text.
_VISIBLE = r"[^\s\x{a0}\x{2007}\x{202f}\x{3000}\x{feff}\x{0}]"

# SQL that gives equal numbers in the column `id` one spelling: 1 and 1.0, 0 and -0.0, 007 and 7, 1e+16 and
# 10000000000000000 are one user, since one file may hold the ids of another as floats. It works on the digits as text,
# so that no long id is rounded.
_NUMBER, _EXPONENT = "[+-]?[0-9]+([.][0-9]*)?", "[eE][+]?[0-9]{1,2}"
_POWER = "try_cast(regexp_extract(id, '([0-9]+)$', 1) AS INTEGER)"
_FRACTION = "regexp_extract(id, '[.]([0-9]*)', 1)"
_WITHOUT_EXPONENT = (
    f"CASE WHEN regexp_full_match(id, '{_NUMBER}{_EXPONENT}') THEN regexp_extract(id, '^[+-]?[0-9]+') "
    f"|| left({_FRACTION} || repeat('0', {_POWER}), {_POWER}) || '.' || substr({_FRACTION}, {_POWER} + 1) ELSE id END"
)
_WITHOUT_ZEROS = (
    rf"regexp_replace(regexp_replace({_WITHOUT_EXPONENT}, '^[+]?(-?)0*([0-9])', '\1\2'), "
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
    """Open an in-memory DuckDB.

    Args:
        memory_bytes: The memory limit (at least 64 MiB). Larger intermediate results go to `temp`.
        threads: The number of threads.
        temp: A folder for intermediate results.
        excluded: Ids of users to leave out; they are normalised as the ids in the input are.
    """
    database = duckdb.connect(":memory:")
    database.register_filesystem(FileRangeSystem())
    database.execute(f"SET memory_limit='{max(memory_bytes >> 20, 64)}MiB'")
    database.execute(f"SET threads={threads}")
    database.execute(f"SET temp_directory={quoted(temp)}")
    database.execute("SET TimeZone='UTC'")
    database.execute("SET preserve_insertion_order=true")
    with contextlib.suppress(duckdb.Error):  # in a notebook without ipywidgets; then there is no progress within a file
        database.execute("SET enable_progress_bar=true")  # needed by query_progress(); prints nothing
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
        InputError: A column is in none of the batch's rows. The message lists the columns that there are.
    """
    rows = rows_sql(database, batch, fields)
    usable = "reason IS NULL"
    ((excluded,),) = database.execute("SELECT count(*) FROM excluded").fetchall()
    # The number of bytes of a text is known; its characters (1 to 4 bytes each) have to be counted.
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
    """Return SQL for (problem, user, text, time), one row per record of the batch, in its order."""
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
        raise InputError(f"{batch.sources[0].path}: a {kind} source must be imported first.")
    names = [row[0] for row in database.execute(f"DESCRIBE SELECT * FROM {table}").fetchall()]
    check_columns(names, fields, batch)
    text, user = f"CAST({column_name(fields.text)} AS VARCHAR)", f"CAST({column_name(fields.user)} AS VARCHAR)"
    time = f"CAST({column_name(fields.time)} AS VARCHAR)" if fields.time else "NULL"
    return f'SELECT NULL AS problem, {user} AS "user", {text} AS text, {time} AS time FROM {table}'


@dataclass(frozen=True, kw_only=True)
class ScanSummary:
    """What is known only after a scan: rows that the query did not count, by reason, and warnings for the owner."""

    rows: dict[str, int]
    warnings: list[str]


def summarise_scan(
    database: duckdb.DuckDBPyConnection, batch: FileBatch, fields: Fields, has_unusable: bool
) -> ScanSummary:
    """Count what the query could not count. To be called after the query has run on the same connection.

    Args:
        database: The connection.
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
    """Return an error of this package for an error of DuckDB: it names the files and what to do."""
    names = ", ".join(s.path for s in batch.sources[:3]) + (" and others" if len(batch.sources) > 3 else "")
    first = str(error).strip().split("\n")[0]
    lowered = str(error).lower()
    if "no space left" in lowered or "disk full" in lowered or "max_temp_directory_size" in lowered:
        return CorpusError(
            f"The disk is full while reading {names}: make room beside --out, then run the same command again."
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
    """SQL for seconds: a number as it is, or a date in ISO 8601 (UTC unless it names a zone) or in `time_format`."""
    if fields.time is None:
        return "CAST(NULL AS DOUBLE)"
    if fields.time_format:
        return f"epoch(try_strptime(time, {quoted(fields.time_format)}))"
    return "coalesce(try_cast(time AS DOUBLE), epoch(try_cast(time AS TIMESTAMPTZ)))"


def _trimmed_sql(expression: str) -> str:
    """SQL for the normalised id: ids that differ only in Unicode composition or surrounding space are one user."""
    normalised = f"nfc_normalize(trim({expression}, {quoted(_SPACE)}))"
    # Nearly all ids are printable ASCII; to test this is cheaper than to normalise.
    return f"CASE WHEN regexp_full_match({expression}, '[!-~]+') THEN {expression} ELSE {normalised} END"
