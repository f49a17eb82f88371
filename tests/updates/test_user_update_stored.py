"""Users of a store are read at the first access, and printing them shows nothing private."""

from dataclasses import replace

import numpy as np
import pytest

from unheard.corpus.store import write_store
from unheard.corpus.vocabulary import Vocabulary
from unheard.engines.engine import Cohort
from unheard.randomness import reproducible_generator
from unheard.updates.user_update import StoredExamples, StoredUsers, User, concatenated_tokens, read_users


@pytest.fixture
def drawn(store) -> StoredUsers:
    return StoredUsers(store.train, np.array([41, 3, 17, 55]), with_features=False)


def test_stored_users_come_in_the_requested_order(store, drawn):
    assert [user.number for user in drawn] == [41, 3, 17, 55]
    assert np.array_equal(drawn[2].tokens, store.train.tokens(17))
    assert drawn.lengths().tolist() == [len(user.tokens) for user in drawn]
    assert [user.number for user in drawn[1:3]] == [3, 17]
    assert [user.number for user in drawn.chosen(np.array([True, False, False, True]))] == [41, 55]


def test_each_user_has_their_own_text_and_features_in_whatever_order_they_are_drawn(tmp_path):
    users, features = [np.array([0, 3 + k, 1]) for k in range(6)], np.arange(12.0).reshape(6, 2)
    own = write_store(
        tmp_path / "s",
        train=users,
        held_out=users[:1],
        vocabulary=Vocabulary.of("abcdefgh"),
        features={"train": features},
        shards=2,
    )
    for numbers in ([4, 0, 5, 1], [0, 1, 4, 5], [3, 3]):
        for k, user in zip(numbers, read_users(own.train, np.array(numbers), True), strict=True):
            assert (user.number, user.tokens.tolist(), user.features.tolist()) == (k, [0, 3 + k, 1], [2 * k, 2 * k + 1])
        tokens, lengths = concatenated_tokens([User(users[k][: 1 + k % 3]) for k in numbers])
        assert lengths.tolist() == [1 + k % 3 for k in numbers]
        assert tokens.tolist() == [int(t) for k in numbers for t in users[k][: 1 + k % 3]]


def test_no_text_is_read_before_it_is_used(store, drawn, monkeypatch):
    read = []
    monkeypatch.setattr(
        "unheard.updates.user_update.read_users", lambda *args: read.append(args[1].tolist()) or [None] * 9
    )
    assert len(drawn) == 4
    drawn.lengths()
    part = drawn[1:3]
    assert read == []
    list(part)
    list(part)
    assert read == [[3, 17]]  # once, and only those


def test_users_of_a_store_that_are_printed_show_nothing_private(drawn, model, plan):
    cohort = Cohort(
        params_P=model.initial(0), users=drawn, plan=plan.at(0, model.layout), rng=reproducible_generator(1)
    )
    listed = replace(cohort, users=[drawn[0], drawn[1]])
    assert "users=" not in repr(cohort)
    assert repr(listed) == repr(cohort)
    for said in (repr(drawn), str(drawn), repr([drawn]), repr(cohort), repr(drawn[1:3])):
        assert not any(number in said.split("0x")[0] for number in ("41", "17", "55"))
        assert "4 users" not in said


def test_a_user_that_is_printed_shows_nothing():
    user = User(np.array([77_123, 77_124]), np.array([0.77125]), 77_126)
    for said in (repr(user), str(user), repr([user])):
        assert "77" not in said.split("0x")[0]


def test_a_slice_of_examples_has_the_windows_of_its_own_users(store):
    long = int(store.train.lengths().argmax())
    examples = StoredExamples(store.train, np.array([long, long, 0, long]), np.array([0, 2, 0, 1]), 5)
    tokens = [user.tokens.tolist() for user in examples]
    for begin in range(4):
        assert [user.tokens.tolist() for user in examples[begin:]] == tokens[begin:]
