"""Every user is in one split, by salt and id alone."""

import hashlib

import pytest

from unheard.corpus.grouping import SplitRule, unit_hash
from unheard.errors import InvalidValue


def test_a_user_is_in_the_same_split_every_time_and_the_salt_changes_it():
    rule, other = SplitRule(held_out=0.5), SplitRule(held_out=0.5, salt="other")
    names = [f"user {i}" for i in range(200)]
    assert [rule.split_of(n) for n in names] == [rule.split_of(n) for n in names]
    assert 50 < sum(rule.split_of(n) != other.split_of(n) for n in names) < 150


def test_the_hash_is_the_same_on_every_machine():
    # by hand: each label after its length in eight bytes, SHA-256, the first six bytes as a fraction
    message = b"\7" + bytes(7) + b"unheard" + b"\5" + bytes(7) + b"split" + b"\3" + bytes(7) + b"ann"
    assert (
        unit_hash("unheard", "split", "ann") == int.from_bytes(hashlib.sha256(message).digest()[:6], "little") / 2**48
    )
    assert unit_hash("unheard", "split", "ann") == 0.21935344510945498  # and never again another
    assert unit_hash("ab", "c") != unit_hash("a", "bc")


def test_fractions_come_out_as_asked():
    rule = SplitRule(held_out=0.2, public=0.1)
    found = [rule.split_of(str(i)) for i in range(20_000)]
    # 4 standard deviations of a binomial: 4 * sqrt(20000 * 0.2 * 0.8) = 226
    assert abs(found.count("held_out") - 4_000) < 226
    assert abs(found.count("public") - 2_000) < 170
    assert SplitRule(held_out=0).split_of("x") == "train"


@pytest.mark.parametrize("values", [{"held_out": 1.0}, {"held_out": -0.1}, {"held_out": 0.6, "public": 0.5}])
def test_fractions_that_leave_nobody_are_refused(values):
    with pytest.raises(InvalidValue):
        SplitRule(**values)
