"""What is read and what its columns are called: the words in which the readers of all formats speak.

In: names that the user gave, files. Out: `Fields`, `FileBatch`, and the refusal that lists the columns there are.
"""

from collections.abc import Sequence

from unheard.config import nearest
from unheard.corpus.sources import Fields, FileBatch
from unheard.errors import InputError

LINE_BYTES = 16 << 20


def lacking_columns(names: Sequence[str], fields: Fields) -> list[tuple[str, str]]:
    """(flag, field) for each field that is not among the columns; a JSON path may be anywhere."""
    asked = (("--user-field", fields.user), ("--text-field", fields.text), ("--time-field", fields.time))
    return [(flag, f) for flag, f in asked if f is not None and not f.startswith("/") and f not in names]


def check_columns(names: Sequence[str], fields: Fields, batch: FileBatch) -> None:
    for flag, field in lacking_columns(names, fields):
        raise InputError(f"{batch.sources[0].path} has no column '{field}' ({flag}).{nearest(field, names)}")


def sql_paths(batch: FileBatch) -> str:
    return sql_list([s.sql_path for s in batch.sources])


def sql_list(texts: Sequence[str]) -> str:
    return "[" + ", ".join(quoted(text) for text in texts) + "]"


def quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def column_name(column: str | None) -> str:
    return '"' + str(column).replace('"', '""') + '"'
