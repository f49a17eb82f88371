"""Writing a shard's streams, many users at once, gives what one user at a time by hand gives."""

from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unheard.corpus.encode import EncodeShard, EncodingOptions
from unheard.corpus.splits import SplitRule
from unheard.corpus.store import Shard
from unheard.corpus.tokenizers import WordTokenizer
from unheard.corpus.vocabulary import BOS, EOS, Vocabulary
from unheard.errors import InvalidValue

WORDS = Vocabulary.of(["a", "b", "c", "."])
USERS = st.lists(st.lists(st.text("abz. \u200b\n", max_size=14), min_size=1, max_size=4), max_size=6)


def by_hand(posts, cap, minimum):
    stream, left = [], cap
    for post in posts:
        words = [WORDS.id(w) for w in WordTokenizer().split(post)]
        body = ([*words, EOS] if words else [])[: None if cap is None else left]
        stream += [BOS, *body] if body else []
        left = None if cap is None else left - len(body)
    return stream if sum(i != BOS for i in stream) >= minimum else None


@settings(max_examples=150, deadline=None)
@given(
    users=USERS,
    cap=st.one_of(st.none(), st.integers(1, 9)),
    minimum=st.integers(1, 5),
    helping=st.integers(1, 60),
    rows_at_once=st.integers(1, 9),
)
def test_any_users_with_any_cap_come_out_as_by_hand(tmp_path_factory, users, cap, minimum, helping, rows_at_once):
    folder = tmp_path_factory.mktemp("shard")
    minimum = minimum if cap is None else min(cap, minimum)
    rule = EncodingOptions(tokens_per_user=cap, min_tokens=minimum)
    task = EncodeShard(
        folder=folder, tokens=WordTokenizer(), vocabulary=WORDS, rule=rule, splits=SplitRule(held_out=0.4)
    )
    rows = [(f"u{i}", post) for i, posts in enumerate(users) for post in posts]
    with mock.patch("unheard.corpus.encode.HELPING_CHARS", helping):
        counts = task(0, (tuple(zip(*some, strict=True)) for some in in_parts(rows, rows_at_once)))
    wanted = {"train": [], "held_out": []}
    for i, posts in enumerate(users):
        stream = by_hand(posts, cap, minimum)
        if stream is not None:
            wanted[task.splits.split_of(f"u{i}")].append(stream)
    for split, streams in wanted.items():
        shard = Shard.found(folder / split / "00000.offsets", task_dtype())
        found = [shard.tokens[shard.offsets[k] : shard.offsets[k + 1]].tolist() for k in range(shard.num_users)]
        assert found == streams
        assert counts.get(f"{split}_users", 0) == len(streams)
        assert counts.get(f"{split}_tokens", 0) == sum(i != BOS for s in streams for i in s)
    assert counts.get("users_seen", 0) == len(users)


def in_parts(rows, number):
    return (rows[i : i + number] for i in range(0, len(rows), number))


def task_dtype():
    from unheard.corpus.shards import token_dtype

    return token_dtype(len(WORDS))


def test_a_rule_that_nobody_can_meet_is_refused():
    with pytest.raises(InvalidValue, match="below min_tokens"):
        EncodingOptions(tokens_per_user=5, min_tokens=6)
    with pytest.raises(InvalidValue):
        EncodingOptions(min_tokens=0)
