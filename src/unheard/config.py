"""Parts are their own configuration: a frozen dataclass is both the thing and the record of it that a run file keeps.

In: tables as TOML gives them ({"kind": "flat", "norm": 15.0}). Out: checked parts (FlatClip(norm=15.0)), and back again.
A key that no field answers to, or a value of the wrong type, is refused with the nearest right name.
"""

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from unheard.errors import InvalidValue, UnknownKey

P = TypeVar("P")

LARGEST_NUMBER = 1e15
"""No setting needs a larger one, and every whole number up to here is exact as a float."""


def nearest(word: str, known: Iterable[str]) -> str:
    """The end of an error sentence: the nearest known word if one is near, and in any case all of them."""
    known = sorted(known)
    if not known:
        return " It takes no keys."
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    hint = f" Did you mean '{close[0]}'?" if close else ""
    return f"{hint} Known: {', '.join(known)}."


def part_from_table(cls: type[P], table: Mapping[str, Any], where: str) -> P:
    """Build one part from its table; `where` is the table's name in the run file, for the error message."""
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
    except InvalidValue as refusal:
        raise InvalidValue(f"[{where}] {refusal}") from None


def part_of_kind(kinds: Mapping[str, type], table: Mapping[str, Any], where: str) -> Any:
    """Build the part that the table's `kind` names."""
    if not isinstance(table, Mapping):
        raise InvalidValue(f"[{where}] must be a table of keys, not {table!r}.")
    kind = table.get("kind")
    if not isinstance(kind, str):
        raise InvalidValue(f"[{where}] lacks 'kind'. Known kinds: {', '.join(sorted(kinds))}.")
    if kind not in kinds:
        raise UnknownKey(f"Unknown kind '{kind}' in [{where}].{nearest(str(kind), kinds)}")
    return part_from_table(kinds[kind], table, where)


def table_from_part(part: Any, kinds: Mapping[str, type] | None = None) -> dict[str, Any]:
    """The record of a part: its kind (if it has sisters) and every field that is not None."""
    table: dict[str, Any] = {}
    if kinds is not None:
        table["kind"] = next(kind for kind, cls in kinds.items() if cls is type(part))
    for f in dataclasses.fields(part):
        value = getattr(part, f.name)
        if f.init and value is not None:
            table[f.name] = dict(value) if isinstance(value, Mapping) else value
    return table


def require_positive(**values: float | None) -> None:
    """What most settings need: a number above 0, neither so small nor so large that arithmetic with it would fail."""
    for name, value in values.items():
        require(
            value is None or 1 / LARGEST_NUMBER <= value <= LARGEST_NUMBER,
            f"{name} must be above 0, from 1e-15 to 1e15.",
        )


def require(condition: bool, message: str) -> None:
    """What a part says in `__post_init__` about its own values."""
    if not condition:
        raise InvalidValue(message)


def _checked(value: Any, hint: Any, name: str) -> Any:
    """The value as its field's type, or a refusal: TOML integers may stand for floats, nothing else is converted."""
    allowed = (
        typing.get_args(hint)
        if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
        else (hint,)
    )
    for one in allowed:
        origin = typing.get_origin(one) or one
        if origin is typing.Literal:
            if value in typing.get_args(one):
                return value
        elif origin in (float, int) and isinstance(value, int | float) and not isinstance(value, bool):
            if abs(value) <= LARGEST_NUMBER and isinstance(value, origin | int):
                return origin(value)
        elif origin is tuple and isinstance(value, list | tuple):
            inner = (typing.get_args(one) or (Any,))[0]
            return tuple(
                value if inner is Any else _checked(item, inner, f"{name}[{i}]") for i, item in enumerate(value)
            )
        elif origin is dict and isinstance(value, Mapping):
            inner = (typing.get_args(one) or (str, Any))[1]
            return {str(k): v if inner is Any else _checked(v, inner, f"{name}.{k}") for k, v in value.items()}
        elif (origin in (str, bool) and isinstance(value, origin)) or origin is Any:
            return value
    raise InvalidValue(f"{name} must be {_in_words(allowed)}, not {value!r}.")


def _in_words(allowed: tuple[Any, ...]) -> str:
    words = {
        float: "a number",
        int: "a whole number",
        str: "text",
        bool: "true or false",
        tuple: "a list",
        dict: "a table",
    }
    named = []
    for one in allowed:
        if typing.get_origin(one) is typing.Literal:
            named.extend(repr(v) for v in typing.get_args(one))
        elif one is not type(None):
            named.append(words.get(typing.get_origin(one) or one, str(one)))
    return " or ".join(named)
