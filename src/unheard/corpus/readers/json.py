"""How JSON is read: one row for every line (or element), whatever stands in it, and only the fields that were asked for.

In: a batch of JSON files. Out: SQL for (trouble, user, text, time). Lines are read by a quick reader that parses each once
and takes only its fields; of a row in which it finds none of them it cannot say whether the line was broken or only
lacked them. Such rows are left *undecided*, and counted afterwards, if there are any, by the thorough reader.
"""

from collections.abc import Sequence

import duckdb

from unheard.corpus.readers.columns import (
    LINE_BYTES,
    Fields,
    FileBatch,
    check_columns,
    column_name,
    lacking_columns,
    quoted,
    sql_paths,
)

UNDECIDED = "undecided"


def json_sql(database: duckdb.DuckDBPyConnection, batch: FileBatch, fields: Fields) -> str:
    """The rows of a batch. Refused if a field is in none of them."""
    table = _objects(batch)
    names = _keys(database, f"SELECT json FROM {table} LIMIT 2000")
    # none at all: every line is malformed, and counted so
    if lacking_columns(names, fields) and (names := _keys(database, f"SELECT json FROM {table}")):
        check_columns(names, fields, batch)
    return _quick_sql(batch, fields) if is_quick(batch, fields) else _thorough_sql(batch, fields)


def is_quick(batch: FileBatch, fields: Fields) -> bool:
    """Whether the quick reader can be used: on lines, if DuckDB takes the fields for different columns."""
    keys = _top_keys(fields)
    return batch.sources[0].format == "jsonl" and all(keys) and len({key.lower() for key in keys}) == len(keys)


def count_undecided(database: duckdb.DuckDBPyConnection, batch: FileBatch, fields: Fields) -> dict[str, int]:
    """What the rows are that the quick reader could not tell: broken, or good JSON without any of the fields."""
    keys = [quoted("/" + _escaped(key)) for key in _top_keys(fields)]
    nothing = " AND ".join(f"coalesce(json_type(json, {key}), 'NULL') = 'NULL'" for key in keys)
    broken = "json IS NULL OR json_type(json) <> 'OBJECT'"
    query = f"SELECT {broken} AS broken, count(*) FROM {_objects(batch)} WHERE {broken} OR ({nothing}) GROUP BY 1"
    found = dict(database.execute(query).fetchall())
    return {"malformed": found.get(True, 0), "no_user": found.get(False, 0)}


def _quick_sql(batch: FileBatch, fields: Fields) -> str:
    columns = ", ".join(f"{quoted(key)}: 'JSON'" for key in _top_keys(fields))
    # Every row is an object: asked for one column alone, DuckDB would take it for whole lines as soon as one line is no object.
    table = f"read_ndjson({sql_paths(batch)}, columns={{{columns}}}, records=true, {_options(batch)})"
    found = [_within(f) for f in (fields.user, fields.text, fields.time or fields.text)]
    nothing = " AND ".join(f"{column_name(key)} IS NULL" for key in _top_keys(fields))
    trouble = f"CASE WHEN {nothing} THEN '{UNDECIDED}' END"
    return _fields_sql(
        fields, f"SELECT {trouble} AS trouble, {', '.join(f'{e} AS f{i}' for i, e in enumerate(found))} FROM {table}"
    )


def _thorough_sql(batch: FileBatch, fields: Fields) -> str:
    """Every line as it stands, then one extraction for all fields, since each call reads the whole line again."""
    wanted = ", ".join(quoted(_pointer(f)) for f in (fields.user, fields.text, fields.time or fields.text))
    trouble = "CASE WHEN json IS NULL OR json_type(json) <> 'OBJECT' THEN 'malformed' END"
    rows = f"SELECT {trouble} AS trouble, json_extract(json, [{wanted}]) AS f FROM {_objects(batch)}"
    return _fields_sql(fields, f"SELECT trouble, f[1] AS f0, f[2] AS f1, f[3] AS f2 FROM ({rows})")


def _fields_sql(fields: Fields, rows: str) -> str:
    """Values out of their JSON. A user is text or a number, a text is text, a time is anything."""
    user, text = "CAST(f0 AS VARCHAR)", "CAST(f1 AS VARCHAR)"
    return f"""
        SELECT trouble,
               CASE WHEN starts_with({user}, '"') THEN f0 ->> '$'
                    WHEN left({user}, 1) BETWEEN '-' AND '9' THEN {user} END AS "user",
               CASE WHEN starts_with({text}, '"') THEN f1 ->> '$' END AS text,
               {"f2 ->> '$'" if fields.time else "NULL"} AS time
        FROM ({rows})"""


def _keys(database: duckdb.DuckDBPyConnection, objects: str) -> list[str]:
    query = f"SELECT DISTINCT unnest(json_keys(json)) FROM ({objects}) WHERE json_type(json) = 'OBJECT'"
    return sorted(row[0] for row in database.execute(query).fetchall())


def _objects(batch: FileBatch) -> str:
    reader = "read_ndjson_objects" if batch.sources[0].format == "jsonl" else "read_json_objects"
    return f"{reader}({sql_paths(batch)}, {_options(batch)})"


def _options(batch: FileBatch) -> str:
    return f"ignore_errors=true, maximum_object_size={LINE_BYTES}, compression='{batch.sources[0].compression}'"


def _top_keys(fields: Fields) -> Sequence[str]:
    """The keys of a line that the fields are, or begin with, each once."""
    asked = (f for f in (fields.user, fields.text, fields.time) if f is not None)
    return list(dict.fromkeys(_path(f)[0] for f in asked))


def _path(field: str) -> tuple[str, str]:
    """The key that a field begins with, and the pointer from there on ("" if there is none): /a/b is a, then /b."""
    if not field.startswith("/"):
        return field, ""
    key, slash, rest = field[1:].partition("/")
    return key.replace("~1", "/").replace("~0", "~"), slash + rest


def _within(field: str) -> str:
    key, rest = _path(field)
    return f"json_extract({column_name(key)}, {quoted(rest)})" if rest else column_name(key)


def _pointer(field: str) -> str:
    return field if field.startswith("/") else "/" + _escaped(field)


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")
