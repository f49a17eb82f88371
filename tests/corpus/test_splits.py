"""Every user is in one split, by salt and id alone; test posts come from held-out users only."""

import hashlib

import numpy as np
import pytest

from unheard.corpus.splits import SplitRule, draw_test_posts, unit_hash
from unheard.corpus.store import write_store
from unheard.corpus.vocabulary import BOS, EOS, Vocabulary
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


@pytest.fixture
def held_out(tmp_path):
    users = [np.array([BOS, 3 + u, 4 + u, EOS] * 5 + [BOS, 9]) for u in range(4)]
    return write_store(tmp_path / "s", train=[], held_out=users, vocabulary=Vocabulary.of("abcdefghij")).held_out


def test_test_posts_are_whole_posts_up_to_exactly_n_predicted_tokens(held_out):
    posts = draw_test_posts(held_out, 20, "salt")
    assert sum(len(p) - 1 for p in posts) == 20
    assert all(p[0] == BOS and BOS not in p[1:] for p in posts)
    assert all(p[-1] == EOS or len(p) == 2 for p in posts[:-1])


def test_test_posts_depend_on_the_salt_alone_and_stop_when_there_are_no_more(held_out):
    same = [p.tolist() for p in draw_test_posts(held_out, 20, "salt")]
    assert same == [p.tolist() for p in draw_test_posts(held_out, 20, "salt")]
    assert same != [p.tolist() for p in draw_test_posts(held_out, 20, "pepper")]
    assert sum(len(p) - 1 for p in draw_test_posts(held_out, 10_000, "salt")) == 4 * 16
