"""Parts are their own configuration: a frozen dataclass is both the object and its record in a run file.

In: tables as TOML gives them, `{"kind": "flat", "norm": 15.0}`. Out: checked parts, `FlatClip(norm=15.0)`; and back
again. Unknown keys and values of the wrong type raise an error that names the nearest right one, so that a misspelt
option never leaves a default in force.

    part_of_kind(kinds, table, where)       a part from a table, its class chosen by the table's `kind`
    part_from_table(cls, table, where)      a part of a known class from a table
    table_from_part(part, kinds)            the table of a part
    parse_json(text), parse_toml(text)      plain data; every failure is a `ValueError`
    require(condition, message)             for `__post_init__`: raises `InvalidValue`

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
from typing import Any, TypeVar

from unheard.errors import InvalidValue, UnknownKey

P = TypeVar("P")

LARGEST_NUMBER = 1e15
"""No setting needs a larger number, and every whole number up to here is exact as a float."""


def parse_json(text: str | bytes) -> Any:
    """Parse JSON. Raises `ValueError` for anything else, also for brackets that are nested too deeply.

    >>> parse_json("[" * 200_000)
    Traceback (most recent call last):
        ...
    ValueError: the brackets are nested too deeply
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("the brackets are nested too deeply") from None


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML. Raises `tomllib.TOMLDecodeError`, a `ValueError`, also for brackets that are nested too deeply."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise tomllib.TOMLDecodeError("the brackets are nested too deeply") from None


def nearest(word: str, known: Iterable[str]) -> str:
    """Write the end of an error message: the nearest known word if one is similar, and the list of all known words.

    >>> nearest("nois", ["noise", "clip"])
    " Did you mean 'noise'? Known: clip, noise."
    """
    known = sorted(known)
    if not known:
        return " It takes no keys."
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    hint = f" Did you mean '{close[0]}'?" if close else ""
    return f"{hint} Known: {', '.join(known)}."


def part_from_table(cls: type[P], table: Mapping[str, Any], where: str) -> P:
    """Build a part of a known class from its table.

    Args:
        cls: A frozen dataclass.
        table: Its fields; whole numbers may stand for floats, nothing else is converted. The key `kind` is ignored.
        where: The name of the table in the run file, for error messages.

    Raises:
        UnknownKey: The class has no field of that name.
        InvalidValue: A value has the wrong type or is out of range, or a field without a default is missing.
    """
    if not isinstance(table, Mapping):
        raise InvalidValue(f"[{where}] must be a table of keys, not {table!r}.")
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}  # pyright: ignore[reportArgumentType]
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for key, value in table.items():
        if key == "kind" and key not in fields:
            continue  # it chose the class
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
    """Build the part whose class the table's `kind` names.

    Args:
        kinds: The registered classes by kind.
        table: `kind` and the fields of the class.
        where: The name of the table in the run file, for error messages.

    Raises:
        UnknownKey: No class is registered under the kind, or it has no field of some name.
        InvalidValue: There is no `kind`, or a value is not allowed.
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
    """Write a part as a table: its kind, and every field that is not None.

    Args:
        part: A part.
        kinds: The registered classes by kind; None for a class that needs no kind.

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
    """Check that numbers are above 0, and neither so small nor so large that arithmetic with them would fail.

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
    """Return the value as its field's type. TOML integers may stand for floats; nothing else is converted."""
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
    """Name the allowed types or values for an error message."""
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
