"""Reads JSON lines and JSON arrays: one row per line or element, with only the columns that are needed.

Two readers give the same rows. The quick reader parses each line once and extracts only the columns; it is used for
lines. The thorough reader (`read_json_objects`) keeps every line as it is and extracts the columns afterwards. If the
quick reader finds none of the columns in a line, it cannot tell a broken line from one that lacks the columns: it marks
the row *undecided*, and `count_undecided` counts such rows after the scan with the thorough reader.

`json_sql` chooses the reader. A column name that begins with "/" is a JSON pointer (RFC 6901).
"""

from collections.abc import Sequence

import duckdb

from unheard.corpus.input_files import MAX_RECORD_BYTES
from unheard.corpus.readers import check_columns, column_name, missing_columns, quoted, sql_paths
from unheard.corpus.sources import Fields, FileBatch

UNDECIDED = "undecided"


def json_sql(database: duckdb.DuckDBPyConnection, batch: FileBatch, fields: Fields) -> str:
    """Return SQL for the rows of a batch.

    Args:
        database: A connection.
        batch: Files of JSON lines, or files with one JSON array each.
        fields: The columns to read, as keys or as JSON pointers.

    Raises:
        InputError: A key is in none of the rows. The first 2,000 rows are tried first, then all.
    """
    table = _objects(batch)
    names = _keys(database, f"SELECT json FROM {table} LIMIT 2000")
    # No key at all means that every line is malformed: the scan counts them.
    if missing_columns(names, fields) and (names := _keys(database, f"SELECT json FROM {table}")):
        check_columns(names, fields, batch)
    return _quick_sql(batch, fields) if is_quick(batch, fields) else _thorough_sql(batch, fields)


def is_quick(batch: FileBatch, fields: Fields) -> bool:
    """Whether the quick reader can be used: on lines, if the names differ in more than case (DuckDB ignores case)."""
    keys = _top_keys(fields)
    return batch.sources[0].format == "jsonl" and all(keys) and len({key.lower() for key in keys}) == len(keys)


def count_undecided(database: duckdb.DuckDBPyConnection, batch: FileBatch, fields: Fields) -> dict[str, int]:
    """Count the undecided rows of the quick reader: broken lines, and valid JSON without any of the columns."""
    keys = [quoted("/" + _escaped(key)) for key in _top_keys(fields)]
    nothing = " AND ".join(f"coalesce(json_type(json, {key}), 'NULL') = 'NULL'" for key in keys)
    broken = "json IS NULL OR json_type(json) <> 'OBJECT'"
    query = f"SELECT {broken} AS broken, count(*) FROM {_objects(batch)} WHERE {broken} OR ({nothing}) GROUP BY 1"
    counts = dict(database.execute(query).fetchall())
    return {"malformed": counts.get(True, 0), "no_user": counts.get(False, 0)}


def _quick_sql(batch: FileBatch, fields: Fields) -> str:
    """SQL of the quick reader: DuckDB extracts the top-level keys while it parses a line."""
    columns = ", ".join(f"{quoted(key)}: 'JSON'" for key in _top_keys(fields))
    # records=true: if only one column is requested and one line is not an object, DuckDB would return whole lines.
    table = f"read_ndjson({sql_paths(batch)}, columns={{{columns}}}, records=true, {_options(batch)})"
    values = [_extract_sql(f) for f in (fields.user, fields.text, fields.time or fields.text)]
    nothing = " AND ".join(f"{column_name(key)} IS NULL" for key in _top_keys(fields))
    problem = f"CASE WHEN {nothing} THEN '{UNDECIDED}' END"
    return _fields_sql(
        fields, f"SELECT {problem} AS problem, {', '.join(f'{e} AS f{i}' for i, e in enumerate(values))} FROM {table}"
    )


def _thorough_sql(batch: FileBatch, fields: Fields) -> str:
    """SQL of the thorough reader. It extracts all columns in one call, since each call parses the whole line again."""
    wanted = ", ".join(quoted(_pointer(f)) for f in (fields.user, fields.text, fields.time or fields.text))
    problem = "CASE WHEN json IS NULL OR json_type(json) <> 'OBJECT' THEN 'malformed' END"
    rows = f"SELECT {problem} AS problem, json_extract(json, [{wanted}]) AS f FROM {_objects(batch)}"
    return _fields_sql(fields, f"SELECT problem, f[1] AS f0, f[2] AS f1, f[3] AS f2 FROM ({rows})")


def _fields_sql(fields: Fields, rows: str) -> str:
    """Convert JSON values to text. A user id is a string or a number, a text is a string, a time is anything."""
    user, text = "CAST(f0 AS VARCHAR)", "CAST(f1 AS VARCHAR)"
    return f"""
        SELECT problem,
               CASE WHEN starts_with({user}, '"') THEN f0 ->> '$'
                    WHEN left({user}, 1) BETWEEN '-' AND '9' THEN {user} END AS "user",
               CASE WHEN starts_with({text}, '"') THEN f1 ->> '$' END AS text,
               {"f2 ->> '$'" if fields.time else "NULL"} AS time
        FROM ({rows})"""


def _keys(database: duckdb.DuckDBPyConnection, objects: str) -> list[str]:
    """The top-level keys of these objects, sorted."""
    query = f"SELECT DISTINCT unnest(json_keys(json)) FROM ({objects}) WHERE json_type(json) = 'OBJECT'"
    return sorted(row[0] for row in database.execute(query).fetchall())


def _objects(batch: FileBatch) -> str:
    """SQL for all records as JSON values, NULL where a record is not valid JSON."""
    reader = "read_ndjson_objects" if batch.sources[0].format == "jsonl" else "read_json_objects"
    return f"{reader}({sql_paths(batch)}, {_options(batch)})"


def _options(batch: FileBatch) -> str:
    return f"ignore_errors=true, maximum_object_size={MAX_RECORD_BYTES}, compression='{batch.sources[0].compression}'"


def _top_keys(fields: Fields) -> Sequence[str]:
    """The top-level keys that the columns are in, each once."""
    return list(dict.fromkeys(_split_pointer(f)[0] for f in fields.columns()))


def _split_pointer(field: str) -> tuple[str, str]:
    """The top-level key and the rest of the JSON pointer: "/a/b" gives ("a", "/b"), "a" gives ("a", "")."""
    if not field.startswith("/"):
        return field, ""
    key, slash, rest = field[1:].partition("/")
    return key.replace("~1", "/").replace("~0", "~"), slash + rest


def _extract_sql(field: str) -> str:
    """SQL for the value of a column, from the columns of the quick reader."""
    key, rest = _split_pointer(field)
    return f"json_extract({column_name(key)}, {quoted(rest)})" if rest else column_name(key)


def _pointer(field: str) -> str:
    """The JSON pointer of a column."""
    return field if field.startswith("/") else "/" + _escaped(field)


def _escaped(key: str) -> str:
    """A key as a part of a JSON pointer."""
    return key.replace("~", "~0").replace("/", "~1")
