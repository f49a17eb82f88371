"""One scan for every format and both engines: a batch of files in, rows of (shard, reason, user, text, time, place) out.

In: sources and the names of their fields. Out: an SQL query for DuckDB. The DuckDB engine runs it here, Spark runs the
same query on its workers, so both see the same rows to the byte. A row that cannot be used keeps its reason and loses
its text.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import duckdb

from unheard.corpus.file_ranges import PieceFiles, after_mark, cut_places
from unheard.corpus.readers import rows_sql
from unheard.corpus.readers.columns import Fields, FileBatch, quoted
from unheard.corpus.readers.csv import rejected_rows
from unheard.corpus.readers.json import count_undecided, is_quick
from unheard.corpus.sources import Source
from unheard.errors import CorpusError, InputError

UNUSABLE = -1  # the shard of rows that are only counted
_BATCH_BYTES = 128 << 20
_BATCH_FILES = 500
_ROW_BITS = 40  # of a row's place in the input: its batch, then its number in it
_SPACE = " \t\n\r\v\f\u00a0\u2007\u202f\u3000\ufeff"
_INK = r"[^\s\x{a0}\x{2007}\x{202f}\x{3000}\x{feff}\x{0}]"  # a search stops at the first; a trim would copy every text


def batches(sources: Sequence[Source]) -> list[FileBatch]:
    """Neighbouring sources of one kind, up to a fixed size. Depends on the files alone: both engines get the same."""
    groups: list[list[Source]] = []
    size = 0
    for source in (piece for whole in sources for piece in in_pieces(whole)):
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
    return [FileBatch(number=i, sources=tuple(group)) for i, group in enumerate(groups)]


def in_pieces(source: Source) -> list[Source]:
    """A large plain file of JSON lines as several sources; plain JSON without its byte-order mark; anything else as it is."""
    if source.format not in ("jsonl", "json") or source.compression != "none":
        return [source]
    begin = after_mark(source.path)
    if source.format == "jsonl" and source.text_bytes > _BATCH_BYTES:
        places = cut_places(source.path, _BATCH_BYTES, begin)
        return [replace(source, piece=piece) for piece in itertools.pairwise(places)]
    return [replace(source, piece=(begin, source.text_bytes))] if begin else [source]


def open_database(
    memory_bytes: int, threads: int, temp: str, excluded: Sequence[str] = ()
) -> duckdb.DuckDBPyConnection:
    """A DuckDB of our own with a fixed memory limit; what does not fit goes to `temp`."""
    database = duckdb.connect(":memory:")
    database.register_filesystem(PieceFiles())
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


def scan_sql(
    database: duckdb.DuckDBPyConnection, batch: FileBatch, fields: Fields, shards: int, duplicate_chars: int
) -> str:
    """The query for one batch. Raises InputError, with the columns there are, if a field is in none of its rows."""
    rows = rows_sql(database, batch, fields)
    usable = "reason IS NULL"
    ((excluded,),) = database.execute("SELECT count(*) FROM excluded").fetchall()
    return f"""
      WITH raw AS ({rows}),
      numbered AS (SELECT *, row_number() OVER () AS row FROM raw),
      cleaned AS (SELECT row, trouble, text, time, {_user('"user"')} AS id FROM numbered),
      judged AS (
        SELECT *, CASE WHEN trouble IS NOT NULL THEN trouble WHEN id IS NULL OR id = '' THEN 'no_user'
                       WHEN text IS NULL OR NOT regexp_matches(text, {quoted(_INK)}) THEN 'no_text'
                       {"WHEN id IN (SELECT id FROM excluded) THEN 'excluded'" if excluded else ""}
                       END AS reason FROM cleaned)
      SELECT CASE WHEN {usable} THEN CAST(hash(id) % {shards} AS INTEGER) ELSE {UNUSABLE} END AS shard,
             reason,
             CASE WHEN {usable} THEN id END AS "user",
             CASE WHEN {usable} THEN text END AS text,
             {_time_sql(fields)} AS time,
             CAST({batch.number << _ROW_BITS} + row AS BIGINT) AS place,
             CASE WHEN {usable} AND {_at_least(duplicate_chars)}
                  THEN CAST(hash(text) >> 1 AS BIGINT) END AS text_hash
      FROM judged"""


@dataclass(frozen=True, kw_only=True)
class Aftermath:
    """What only the end of a scan can tell: rows that it could not count, by reason, and sentences for the owner."""

    rows: dict[str, int]
    noticed: list[str]


def after_scan(database: duckdb.DuckDBPyConnection, batch: FileBatch, fields: Fields, unusable: bool) -> Aftermath:
    """To be asked once the scan's query is done; `unusable` says whether it met any unusable row."""
    rows, noticed = rejected_rows(database, batch)
    if unusable and is_quick(batch, fields):
        rows = count_undecided(database, batch, fields)
    return Aftermath(rows=rows, noticed=noticed)


def as_refusal(trouble: Exception, batch: FileBatch) -> CorpusError:
    """DuckDB's trouble in our words: which files, and what to do."""
    names = ", ".join(s.path for s in batch.sources[:3]) + (" and others" if len(batch.sources) > 3 else "")
    first = str(trouble).strip().split("\n")[0]
    lowered = str(trouble).lower()
    if "no space left" in lowered or "disk full" in lowered or "max_temp_directory_size" in lowered:
        return CorpusError(
            f"The disk is full while reading {names}: make room beside --out, then run the same command again."
        )
    if "out of memory" in lowered:
        return CorpusError(f"Reading {names} needs more memory than the limit: raise --memory. ({first})")
    if "too much memory for decoding" in lowered:
        return InputError(f"{names} needs a zstd window above 27 bits: pack it again with `zstd --long=27`.")
    return InputError(f"Cannot read {names}: {first}")


def _at_least(chars: int) -> str:
    """Whether a text has so many characters. Bytes are known, characters (1 to 4 bytes) have to be counted."""
    return f"(strlen(text) >= {4 * chars} OR (strlen(text) >= {chars} AND length(text) >= {chars}))"


def _time_sql(fields: Fields) -> str:
    """Seconds as a number: a number as it stands, else a date in ISO 8601 (UTC if it names no zone) or --time-format."""
    if fields.time is None:
        return "CAST(NULL AS DOUBLE)"
    if fields.time_format:
        return f"epoch(try_strptime(time, {quoted(fields.time_format)}))"
    return "coalesce(try_cast(time AS DOUBLE), epoch(try_cast(time AS TIMESTAMPTZ)))"


def _user(expression: str) -> str:
    """Ids are one person's when they are the same after Unicode composition and without white space around them."""
    whole = f"nfc_normalize(trim({expression}, {quoted(_SPACE)}))"
    # Nearly all ids are plain already; to look is cheaper than to compose and trim.
    return f"CASE WHEN regexp_full_match({expression}, '[!-~]+') THEN {expression} ELSE {whole} END"
