"""How CSV and TSV are read, and what quotes can do to them: a quote that nobody closes swallows the rows behind it.

In: one file with a heading line. Out: SQL for (trouble, user, text, time); after the scan, how many rows the reader gave up
on, and a sentence for each place where it took many lines for one row. DuckDB gives such a row up, or believes it if
another stray quote closes it; the rows behind are kept.
"""

import csv

import duckdb

from unheard.corpus.readers.columns import LINE_BYTES, Fields, FileBatch, check_columns, quoted, sql_paths

_MANY_LINES = 10  # in one field, each with just as many delimiters as a row has: rows, not prose
_NAMED = 3  # places that are named; the others are only counted


def csv_sql(database: duckdb.DuckDBPyConnection, batch: FileBatch, fields: Fields) -> str:
    """No guessing of dialects: people's text has every mark in it. Quotes double inside quotes (RFC 4180)."""
    delimiter = "\t" if batch.sources[0].format == "tsv" else ","
    lines = _lines(batch)
    head = database.execute(f"SELECT line FROM {lines} LIMIT 1").fetchall()
    if not head or head[0][0] is None:
        return "SELECT NULL AS trouble, '' AS \"user\", '' AS text, '' AS time WHERE false"
    names = next(csv.reader([head[0][0].removeprefix("\ufeff")], delimiter=delimiter))
    check_columns(names, fields, batch)
    columns = ", ".join(f"'c{i}': 'VARCHAR'" for i in range(len(names)))
    dialect = f"delim={quoted(delimiter)}, quote='\"', escape='\"', header=true"
    table = f"read_csv({sql_paths(batch)}, columns={{{columns}}}, {dialect}, {_plain(batch)}"
    # Lines that end now in \r\n and now in \n stop the strict reader for the whole file: only then the lenient one,
    # which takes a row with too many columns for a good one.
    strict = True
    try:
        _find_swallowed(database, f"{table})", len(names), delimiter)
    except duckdb.InvalidInputException:
        strict = False
        _find_swallowed(database, f"{table}, strict_mode=false)", len(names), delimiter)
    table += f", strict_mode={str(strict).lower()}, store_rejects=true)"
    user, text = (f"c{names.index(field)}" for field in (fields.user, fields.text))
    time = f"c{names.index(fields.time)}" if fields.time else "NULL"
    return f'SELECT NULL AS trouble, {user} AS "user", {text} AS text, {time} AS time FROM {table}'


def _find_swallowed(database: duckdb.DuckDBPyConnection, table: str, columns: int, delimiter: str) -> None:
    """Fields that hold what look like rows, into a table: a look at the whole file before the scan."""
    mark = "\\t" if delimiter == "\t" else delimiter
    row = quoted(f"(?m)^[^{mark}\\n]*(?:{mark}[^{mark}\\n]*){{{columns - 1}}}$")
    several = " OR ".join(f"contains(c{i}, chr(10))" for i in range(columns))
    fields = f"SELECT unnest([{', '.join(f'c{i}' for i in range(columns))}]) AS field FROM {table} WHERE {several}"
    # its first and its last line are parts of rows; of those between, nearly all must look like one
    lines = "strlen(field) - strlen(replace(field, chr(10), ''))"
    looks = f"len(regexp_extract_all(field, {row})) >= 0.9 * ({lines} - 1)"
    rows = f"SELECT split_part(field, chr(10), 1) AS first, {lines} AS lines FROM ({fields})"
    database.execute(f"CREATE OR REPLACE TEMP TABLE swallowed AS {rows} WHERE {lines} >= {_MANY_LINES} AND {looks}")


def rejected_rows(database: duckdb.DuckDBPyConnection, batch: FileBatch) -> tuple[dict[str, int], list[str]]:
    """After the scan: rows that the reader gave up on, by reason (they reach no query), and what to tell about quotes."""
    places = _believed(database, batch)
    if not database.execute("SELECT 1 FROM duckdb_tables() WHERE table_name = 'reject_errors'").fetchall():
        return {}, _sentences(batch, places)
    by_line = "SELECT bool_and(error_type = 'MISSING COLUMNS') AS short FROM reject_errors GROUP BY file_id, line"
    rows = database.execute(
        f"SELECT if(short, 'no_text', 'malformed'), count(*) FROM ({by_line}) GROUP BY 1"
    ).fetchall()
    lines = "strlen(rtrim(csv_line, chr(13) || chr(10))) - strlen(replace(rtrim(csv_line, chr(13) || chr(10)), chr(10), ''))"
    quote = "bool_or(error_type IN ('UNQUOTED VALUE', 'LINE SIZE OVER MAXIMUM'))"
    other = (
        "bool_or(error_type IN ('MISSING COLUMNS', 'TOO MANY COLUMNS'))"  # bad UTF-8 in a long post is no quote's fault
    )
    spans = (
        f"SELECT line, max({lines}) + 1 AS lines, {quote} AS quote, {other} AS other FROM reject_errors GROUP BY line"
    )
    places += database.execute(
        f"SELECT line, lines, true FROM ({spans}) WHERE quote OR (other AND lines > {_MANY_LINES})"
    ).fetchall()
    database.execute("DROP TABLE reject_errors")
    database.execute("DROP TABLE IF EXISTS reject_scans")
    return {str(reason): int(number) for reason, number in rows}, _sentences(batch, places)


def _believed(database: duckdb.DuckDBPyConnection, batch: FileBatch) -> list[tuple[int, int, bool]]:
    """(line, lines, False) for each field that swallowed rows and came out whole: its line is found by its first words."""
    if not database.execute("SELECT 1 FROM duckdb_tables() WHERE table_name = 'swallowed'").fetchall():
        return []
    found = database.execute("SELECT first, max(lines) FROM swallowed GROUP BY first").fetchall()
    database.execute("DROP TABLE swallowed")
    places = []
    for first, lines in found:
        opening = quoted('"' + first.replace('"', '""').rstrip("\r"))
        numbered = f"SELECT row_number() OVER () AS n, line FROM {_lines(batch)}"
        where = database.execute(f"SELECT n FROM ({numbered}) WHERE contains(line, {opening}) LIMIT 1").fetchall()
        places.append((int(where[0][0]) if where else 0, int(lines) + 1, False))
    return places


def _sentences(batch: FileBatch, places: list[tuple[int, int, bool]]) -> list[str]:
    path = batch.sources[0].path
    cure = "Close it, or double the quotes inside (RFC 4180)."
    told = [
        f"{path}, line {line}: a quote opens that does not close at the end of its field. {lines} lines from there "
        f"were taken for one row, {'broken and left out' if broken else 'which was kept'}. {cure}"
        for line, lines, broken in sorted(places)[:_NAMED]
    ]
    more = sorted(places)[_NAMED:]
    if more:
        told.append(f"{path}: {len(more)} more such places, {sum(lines for _, lines, _ in more)} lines.")
    return told


def _lines(batch: FileBatch) -> str:
    """The file line by line, whatever stands in it."""
    one_column = f"columns={{'line': 'VARCHAR'}}, delim={quoted(chr(1))}, quote='', escape='', header=false"
    return f"read_csv({sql_paths(batch)}, {one_column}, strict_mode=false, {_plain(batch)})"


def _plain(batch: FileBatch) -> str:
    # DuckDB would take a buffer of sixteen lines, a quarter of all memory, for every packed file
    packing = f"compression='{batch.sources[0].compression}', buffer_size={2 * LINE_BYTES}"
    return f"auto_detect=false, ignore_errors=true, max_line_size={LINE_BYTES}, comment='', {packing}"
