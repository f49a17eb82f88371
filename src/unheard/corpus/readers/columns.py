"""What is read and what its columns are called: the words in which the readers of all formats speak.

In: names that the user gave, files. Out: `Fields`, `Batch`, and the refusal that lists the columns there are.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from unheard.config import nearest
from unheard.corpus.sources import Source
from unheard.errors import InputError

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


def lacking_columns(names: Sequence[str], fields: Fields) -> list[tuple[str, str]]:
    """(flag, field) for each field that is not among the columns; a JSON path may be anywhere."""
    asked = (("--user-field", fields.user), ("--text-field", fields.text), ("--time-field", fields.time))
    return [(flag, f) for flag, f in asked if f is not None and not f.startswith("/") and f not in names]


def check_columns(names: Sequence[str], fields: Fields, batch: Batch) -> None:
    for flag, field in lacking_columns(names, fields):
        raise InputError(f"{batch.sources[0].path} has no column '{field}' ({flag}).{nearest(field, names)}")


def sql_paths(batch: Batch) -> str:
    return sql_list([s.sql_path for s in batch.sources])


def sql_list(texts: Sequence[str]) -> str:
    return "[" + ", ".join(quoted(text) for text in texts) + "]"


def quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def column_name(column: str | None) -> str:
    return '"' + str(column).replace('"', '""') + '"'
