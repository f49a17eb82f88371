"""config.py: parts convert to tables and back, and an error message names the wrong key or value."""

from dataclasses import dataclass

import pytest

from unheard.config import LARGEST_NUMBER, nearest, part_from_table, part_of_kind, table_from_part
from unheard.errors import InvalidValue, UnknownKey


@dataclass(frozen=True, kw_only=True)
class Flat:
    norm: float
    layers: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Unregistered:
    norm: float = 1.0


KINDS = {"flat": Flat}


def test_a_part_is_read_back_from_its_table():
    for part in (Flat(norm=15.0), Flat(norm=0.5, layers=("a", "b"))):
        assert part_of_kind(KINDS, table_from_part(part, KINDS), "clip") == part


def test_a_part_that_is_not_registered_is_named_with_the_known_kinds():
    with pytest.raises(InvalidValue, match=r"Unregistered is not registered.*Known kinds: flat"):
        table_from_part(Unregistered(), KINDS)


def test_a_long_list_of_known_words_is_cut_after_the_nearest_was_found():
    message = nearest("column_998", [f"column_{i}" for i in range(1000)])
    assert message.startswith(" Did you mean 'column_998'? Known: column_0, column_1, ")
    assert message.endswith(" and 970 more.")


@pytest.mark.parametrize(
    ("table", "error", "words"),
    [
        ({"kind": "flatt", "norm": 1.0}, UnknownKey, "Did you mean 'flat'"),
        ({"kind": "flat", "nrom": 1.0}, UnknownKey, "Did you mean 'norm'"),
        ({"kind": "flat", "norm": "1"}, InvalidValue, "must be a number"),
        ({"kind": "flat"}, InvalidValue, "lacks 'norm'"),
        ({"norm": 1.0}, InvalidValue, "lacks 'kind'"),
    ],
)
def test_a_table_that_does_not_fit_is_refused_with_the_nearest_right_name(table, error, words):
    with pytest.raises(error, match=words):
        part_of_kind(KINDS, table, "clip")


@dataclass(frozen=True, kw_only=True)
class Numbers:
    whole: int = 0
    real: float = 0.0
    some: float | None = None
    several: tuple[float, ...] = ()
    named: dict[str, int] | None = None


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("key", ["whole", "real", "some", "several", "named"])
def test_a_number_of_a_table_is_one_that_a_float_holds_exactly(key, sign):
    """A larger one would be rounded without a word, and a truth value would count as 0 or 1."""

    def table(value):
        return {key: {"several": [value], "named": {"a": value}}.get(key, value)}

    largest = sign * int(LARGEST_NUMBER)
    assert part_from_table(Numbers, table(largest), "n")
    for value in (largest + sign, float(sign) * 2e15, float("nan"), sign * float("inf"), sign > 0):
        with pytest.raises(InvalidValue, match=f"n.{key}"):
            part_from_table(Numbers, table(value), "n")
