"""Reads CSV and TSV, and reports quotes that are not closed: such a quote takes the following rows into one field.

`csv_sql` builds the query for one file with a header line. `rejected_rows`, called after the scan, returns how many
rows DuckDB rejected (they reach no query) and a warning for each position where many lines were read as one row. DuckDB
rejects such a row, or accepts it if another stray quote closes it; the rows after it are kept.

The dialect is RFC 4180: a quote inside a quoted field is doubled. The dialect is not guessed, since text written by
people contains every punctuation mark.
"""

import csv

import duckdb

from unheard.corpus.input_files import MAX_RECORD_BYTES
from unheard.corpus.readers import MAX_COLUMNS, check_columns, quoted, sql_paths
from unheard.corpus.sources import Fields, FileBatch
from unheard.errors import InputError

_MANY_LINES = 10  # lines in one field that have as many delimiters as a row: rows rather than prose
_MAX_WARNINGS = 3  # positions that are named; the others are only counted


def csv_sql(database: duckdb.DuckDBPyConnection, batch: FileBatch, fields: Fields) -> str:
    """Return SQL for the rows of one CSV or TSV file.

    The file is also read once here, to note fields that contain whole rows; `rejected_rows` reports them.

    Args:
        database: A connection; the noted fields go into its temporary table `swallowed`.
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
    check_columns(names, fields, batch)
    columns = ", ".join(f"'c{i}': 'VARCHAR'" for i in range(len(names)))
    dialect = f"delim={quoted(delimiter)}, quote='\"', escape='\"', header=true"
    table = f"read_csv({sql_paths(batch)}, columns={{{columns}}}, {dialect}, {_options(batch)}"
    # A file that mixes the line ends \r\n and \n stops the strict reader. Only then the lenient reader is used, since
    # it accepts rows with too many columns.
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


def _find_swallowed(database: duckdb.DuckDBPyConnection, table: str, columns: int, delimiter: str) -> None:
    """Read the whole file once and write the fields that look like several rows into the table `swallowed`."""
    mark = "\\t" if delimiter == "\t" else delimiter
    row = quoted(f"(?m)^[^{mark}\\n]*(?:{mark}[^{mark}\\n]*){{{columns - 1}}}$")
    several = " OR ".join(f"contains(c{i}, chr(10))" for i in range(columns))
    fields = f"SELECT unnest([{', '.join(f'c{i}' for i in range(columns))}]) AS field FROM {table} WHERE {several}"
    # The first and the last line of such a field are parts of rows; nearly all lines between must look like a row.
    lines = "strlen(field) - strlen(replace(field, chr(10), ''))"
    looks = f"len(regexp_extract_all(field, {row})) >= 0.9 * ({lines} - 1)"
    rows = f"SELECT split_part(field, chr(10), 1) AS first, {lines} AS lines FROM ({fields})"
    database.execute(f"CREATE OR REPLACE TEMP TABLE swallowed AS {rows} WHERE {lines} >= {_MANY_LINES} AND {looks}")


def rejected_rows(database: duckdb.DuckDBPyConnection, batch: FileBatch) -> tuple[dict[str, int], list[str]]:
    """Return what the scan could not count. To be called after the query of `csv_sql` has run on the same connection.

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
    # Other errors do not count: invalid UTF-8 in a long post is not caused by a quote.
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
    """(line, lines, False) for each accepted field that contains several rows.

    The number of the line is found by searching the file for the first words of the field.
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
    """Warnings for the owner; a span is (line, number of lines, whether the row was rejected)."""
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
    """SQL for the lines of the file, whatever they contain."""
    one_column = f"columns={{'line': 'VARCHAR'}}, delim={quoted(chr(1))}, quote='', escape='', header=false"
    return f"read_csv({sql_paths(batch)}, {one_column}, strict_mode=false, {_options(batch)})"


def _options(batch: FileBatch) -> str:
    """Options of `read_csv` that both readers use: no detection of dialects, and broken rows are skipped."""
    # DuckDB's default buffer of sixteen lines, for each compressed file, would take a quarter of the memory.
    packing = f"compression='{batch.sources[0].compression}', buffer_size={2 * MAX_RECORD_BYTES}"
    return f"auto_detect=false, ignore_errors=true, max_line_size={MAX_RECORD_BYTES}, comment='', {packing}"
