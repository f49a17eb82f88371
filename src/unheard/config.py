"""Convert the tables of a run file to parts, and parts to tables.

A part is a frozen dataclass, for example `FlatClip(norm=15.0)`. It does the work and is also its own configuration: the
table `{"kind": "flat", "norm": 15.0}` of a run file holds its fields. An unknown key raises an error that names the
nearest known key, and a value of the wrong type one that names the allowed types. So a misspelt option is never ignored
in favour of a default.

    part_of_kind(kinds, table, where)       build a part; the key `kind` of the table chooses the class
    part_from_table(cls, table, where)      build a part of a given class
    table_from_part(part, kinds)            return the table of a part
    parse_json(text), parse_toml(text)      parse text; every failure is a `ValueError`
    read_json(path)                         read a JSON file; None if it is not there or not JSON
    require(condition, message)             raise `InvalidValue` unless the condition holds

>>> from dataclasses import dataclass
>>> @dataclass(frozen=True, kw_only=True)
... class Clip:
...     norm: float
>>> part_of_kind({"flat": Clip}, {"kind": "flat", "norm": 15}, "clip")
Clip(norm=15.0)
>>> table_from_part(Clip(norm=15.0), {"flat": Clip})
{'kind': 'flat', 'norm': 15.0}
"""

import dataclasses
import difflib
import json
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from unheard.errors import InvalidValue, UnknownKey

P = TypeVar("P")

LARGEST_NUMBER = 1e15
"""The largest number that a setting may have. Every whole number up to it is exact as a float."""


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: The text is not JSON, or its brackets are nested too deeply for the parser.

    >>> parse_json("[" * 200_000)
    Traceback (most recent call last):
        ...
    ValueError: the brackets are nested too deeply
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("the brackets are nested too deeply") from None


def read_json(path: Path) -> Any:
    """Return the value of a JSON file; None if it cannot be read or is not JSON."""
    try:
        return parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def parse_toml(text: str) -> dict[str, Any]:
    """Return the tables of a TOML text.

    Raises:
        tomllib.TOMLDecodeError: The text is not TOML, or its brackets are nested too deeply. It is a `ValueError`.
    """
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise tomllib.TOMLDecodeError("the brackets are nested too deeply") from None


_MOST_KNOWN = 30  # A message lists at most this many known words: a folder or a table may have thousands.


def nearest(word: str, known: Iterable[str]) -> str:
    """Return the end of an error message: the most similar known word, if there is one, and the first known words.

    >>> nearest("nois", ["noise", "clip"])
    " Did you mean 'noise'? Known: clip, noise."
    """
    known = sorted(known)
    if not known:
        return " It takes no keys."
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    hint = f" Did you mean '{close[0]}'?" if close else ""
    more = f" and {len(known) - _MOST_KNOWN} more" if len(known) > _MOST_KNOWN else ""
    return f"{hint} Known: {', '.join(known[:_MOST_KNOWN])}{more}."


def part_from_table(cls: type[P], table: Mapping[str, Any], where: str) -> P:
    """Build a part of a known class from its table.

    Args:
        cls: A frozen dataclass.
        table: The values of its fields. A whole number becomes a float, and a list a tuple, if the field needs it; no
            other value is converted. The key `kind` is ignored.
        where: The name of the table in the run file, for error messages.

    Raises:
        UnknownKey: A key of the table is not a field of the class.
        InvalidValue: A value has the wrong type or is out of range, or a field without a default is missing.
    """
    if not isinstance(table, Mapping):
        raise InvalidValue(f"[{where}] must be a table of keys, not {table!r}.")
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}  # pyright: ignore[reportArgumentType]
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for key, value in table.items():
        if key == "kind" and key not in fields:
            continue  # `part_of_kind` has used it to choose the class
        if key not in fields:
            raise UnknownKey(f"Unknown key '{key}' in [{where}].{nearest(key, fields)}")
        values[key] = _checked(value, hints[key], f"{where}.{key}")
    missing = [
        name
        for name, f in fields.items()
        if name not in values and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise InvalidValue(f"[{where}] lacks {', '.join(repr(m) for m in missing)}: add it to the run file.")
    try:
        return cls(**values)
    except InvalidValue as error:
        raise InvalidValue(f"[{where}] {error}") from None


def part_of_kind(kinds: Mapping[str, type], table: Mapping[str, Any], where: str) -> Any:
    """Build a part from a table whose key `kind` names the class.

    Args:
        kinds: The registered classes by kind.
        table: The key `kind`, and the values of the fields of the class.
        where: The name of the table in the run file, for error messages.

    Raises:
        UnknownKey: The kind is not registered, or a key is not a field of its class.
        InvalidValue: The table has no `kind`, or `part_from_table` does not accept a value.
    """
    if not isinstance(table, Mapping):
        raise InvalidValue(f"[{where}] must be a table of keys, not {table!r}.")
    kind = table.get("kind")
    if not isinstance(kind, str):
        raise InvalidValue(f"[{where}] lacks 'kind'. Known kinds: {', '.join(sorted(kinds))}.")
    if kind not in kinds:
        raise UnknownKey(f"Unknown kind '{kind}' in [{where}].{nearest(str(kind), kinds)}")
    return part_from_table(kinds[kind], table, where)


def table_from_part(part: Any, kinds: Mapping[str, type] | None = None) -> dict[str, Any]:
    """Return the table of a part: its kind, and every field that is not None.

    Args:
        part: A part.
        kinds: The registered classes by kind. None if the table needs no key `kind`.

    Raises:
        InvalidValue: The class of the part is not registered.
    """
    table: dict[str, Any] = {}
    if kinds is not None:
        kind = next((kind for kind, cls in kinds.items() if cls is type(part)), None)
        if kind is None:
            raise InvalidValue(
                f"{type(part).__name__} is not registered as a kind of part, so no run file can record it. "
                f"Known kinds: {', '.join(sorted(kinds))}. Add it to the registry of its package."
            )
        table["kind"] = kind
    for f in dataclasses.fields(part):
        value = getattr(part, f.name)
        if f.init and value is not None:
            table[f.name] = dict(value) if isinstance(value, Mapping) else value
    return table


def require_positive(**values: float | None) -> None:
    """Raise `InvalidValue` unless each number is from 1e-15 to 1e15.

    Within these limits the arithmetic of the mechanism neither overflows nor loses a number to zero.

    >>> require_positive(norm=15.0, rate=None)  # None is not checked
    """
    for name, value in values.items():
        require(
            value is None or 1 / LARGEST_NUMBER <= value <= LARGEST_NUMBER,
            f"{name} must be above 0, from 1e-15 to 1e15.",
        )


def require(condition: bool, message: str) -> None:
    """Raise `InvalidValue` with the message unless the condition holds; parts call it in `__post_init__`."""
    if not condition:
        raise InvalidValue(message)


def _checked(value: Any, hint: Any, name: str) -> Any:
    """Return a value if its field allows it, else raise `InvalidValue`.

    A whole number becomes a float, and a list a tuple, if the field needs it. No other value is converted.

    Args:
        value: The value from the table.
        hint: The type hint of the field.
        name: The table and the key, for the error message.
    """
    allowed = (
        typing.get_args(hint)
        if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
        else (hint,)
    )
    for kind in allowed:
        origin = typing.get_origin(kind) or kind
        if origin is typing.Literal:
            if value in typing.get_args(kind):
                return value
        elif origin in (float, int) and isinstance(value, int | float) and not isinstance(value, bool):
            if abs(value) <= LARGEST_NUMBER and isinstance(value, origin | int):
                return origin(value)
        elif origin is tuple and isinstance(value, list | tuple):
            inner = (typing.get_args(kind) or (Any,))[0]
            return tuple(
                value if inner is Any else _checked(item, inner, f"{name}[{i}]") for i, item in enumerate(value)
            )
        elif origin is dict and isinstance(value, Mapping):
            inner = (typing.get_args(kind) or (str, Any))[1]
            return {str(k): v if inner is Any else _checked(v, inner, f"{name}.{k}") for k, v in value.items()}
        elif (origin in (str, bool) and isinstance(value, origin)) or origin is Any:
            return value
    raise InvalidValue(f"{name} must be {_in_words(allowed)}, not {value!r}.")


def _in_words(allowed: tuple[Any, ...]) -> str:
    """Return the allowed types or values in words, for an error message."""
    words = {
        float: "a number",
        int: "a whole number",
        str: "text",
        bool: "true or false",
        tuple: "a list",
        dict: "a table",
    }
    named = []
    for kind in allowed:
        if typing.get_origin(kind) is typing.Literal:
            named.extend(repr(v) for v in typing.get_args(kind))
        elif kind is not type(None):
            named.append(words.get(typing.get_origin(kind) or kind, str(kind)))
    return " or ".join(named)
