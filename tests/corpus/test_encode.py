"""Encoding: the stream of each user, and the files that `EncodeShard` writes for many users at once."""

from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unheard.corpus import encode
from unheard.corpus.encode import (
    Encoder,
    EncodeShard,
    EncodingOptions,
    encode_in_pieces,
    split_sequences,
    strip_quotes,
    truncate_stream,
)
from unheard.corpus.grouping import SplitRule
from unheard.corpus.private_vocabulary import CachedSplitter
from unheard.corpus.store import Shard
from unheard.corpus.tokenizers import CharacterTokenizer, WordTokenizer
from unheard.corpus.vocabulary import BOS, EOS, Vocabulary
from unheard.errors import InvalidValue

WORDS = Vocabulary.of(["a", "b", "c", "."])
A, B, C, DOT, UNK = 3, 4, 5, 6, 2


def stream(posts, unit="post", cap=None, tokens=None, vocabulary=WORDS):
    encoder = Encoder(tokens or WordTokenizer(), vocabulary)
    pieces = list(encode_in_pieces(split_sequences(posts, unit), encoder, cap))
    ids = np.concatenate([piece for piece, _ in pieces] or [np.empty(0, dtype=encoder.dtype)])
    assert ids.dtype == encoder.dtype
    assert sum(count for _, count in pieces) == np.count_nonzero(ids != BOS)
    return ids.tolist()


def test_each_post_is_wrapped():
    assert stream(["a b", "C zebra"]) == [BOS, A, B, EOS, BOS, C, UNK, EOS]


def test_each_sentence_is_wrapped_when_sentences_are_asked_for():
    assert stream(["a. b c\nb"], unit="sentence") == [BOS, A, DOT, EOS, BOS, B, C, EOS, BOS, B, EOS]


def test_bos_does_not_count_and_eos_does():
    assert stream(["a b", "c"], cap=3) == [BOS, A, B, EOS]
    assert stream(["a b", "c"], cap=4) == [BOS, A, B, EOS, BOS, C]
    assert stream(["a b", "c"], cap=2) == [BOS, A, B]
    assert stream(["a b", "c"], cap=99) == [BOS, A, B, EOS, BOS, C, EOS]


def test_a_post_without_any_token_is_skipped():
    assert stream(["\u200b", "a", "\u200b \u200e", "b", "\u200b"]) == [BOS, A, EOS, BOS, B, EOS]
    assert stream(["\u200b"]) == []
    assert stream([]) == []
    assert stream(["!?", "a"], tokens=WordTokenizer(punctuation="drop")) == [BOS, A, EOS]


def test_four_byte_ids_and_characters_go_the_same_way():
    many = Vocabulary.of(["a", "b", *(f"w{i}" for i in range(70_000))])
    assert stream(["a w5 b"], vocabulary=many) == [BOS, 3, 10, 4, EOS]
    assert stream(["ab a"], tokens=CharacterTokenizer(), vocabulary=Vocabulary.of(["a", "b", " "])) == [
        BOS,
        3,
        4,
        5,
        3,
        EOS,
    ]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.text("ab .\u200b\n", max_size=12), max_size=6),
    st.integers(1, 12),
    st.sampled_from(["post", "sentence"]),
)
def test_a_capped_stream_is_the_front_of_the_whole_one(posts, cap, unit):
    whole, capped = stream(posts, unit), stream(posts, unit, cap)
    assert capped == whole[: len(capped)]
    assert np.count_nonzero(np.array(capped) != BOS) == min(cap, np.count_nonzero(np.array(whole) != BOS))
    assert not capped or capped[-1] != BOS


@settings(max_examples=150, deadline=None)
@given(st.lists(st.text(max_size=20), max_size=5))
def test_the_quick_encoder_gives_what_splitting_and_looking_up_gives(posts):
    slow = []
    for post in posts:
        words = WordTokenizer().split(post)
        slow += [BOS, *WORDS.encode_words(words).tolist(), EOS] if words else []
    assert stream(posts) == slow


def test_forgetting_what_was_remembered_changes_nothing(monkeypatch):
    monkeypatch.setattr("unheard.corpus.encode._MAX_CHUNKS", 2)
    encoder = Encoder(WordTokenizer(), WORDS)
    for _ in range(3):
        ids, begins = encoder.encode(["a b, c a b c", "b"])
        assert ids.tolist() == [BOS, A, B, UNK, C, A, B, C, EOS, BOS, B, EOS]
        assert begins.tolist() == [0, 9, 12]


def test_chunks_that_want_one_slot_all_get_theirs(monkeypatch):
    monkeypatch.setattr("unheard.corpus.encode._MIX", (np.uint64(1), np.uint64(1)))  # all short keys hash to slot 0
    monkeypatch.setattr("unheard.corpus.encode._FIRST_BITS", 3)  # and the table has to grow
    names = [f"{front}{i}" for front in ("w", "longerword") for i in range(100)]
    vocabulary = Vocabulary.of(names)
    encoder = Encoder(WordTokenizer(), vocabulary)
    for words in (names[:50], names, names[::-1]):
        assert encoder.encode([" ".join(words)])[0][1:-1].tolist() == vocabulary.encode_words(words).tolist()


def test_chunks_of_every_length_are_distinguished():
    names = ["x" * n for n in range(1, 40)] + ["x" * n + "y" for n in range(1, 40)]
    vocabulary = Vocabulary.of(names)
    encoder = Encoder(WordTokenizer(), vocabulary)
    for _ in range(2):
        assert encoder.encode([" ".join(names)])[0][1:-1].tolist() == list(range(3, 3 + len(names)))


def test_each_text_begins_where_it_says_even_with_a_break_character_inside():
    ids, begins = Encoder(WordTokenizer(), WORDS).encode(["a", "\u200b", "b \x7f\x01 c", "\x7f", "c"])
    assert ids.tolist() == [BOS, A, EOS, BOS, B, C, EOS, BOS, C, EOS]
    assert begins.tolist() == [0, 3, 3, 7, 7, 10]


def test_cut_keeps_no_bos_at_the_end():
    ids = np.array([0, 3, 1, 0, 4, 1])
    assert [truncate_stream(ids, n).tolist() for n in range(5)] == [
        [],
        [0, 3],
        [0, 3, 1],
        [0, 3, 1, 0, 4],
        ids.tolist(),
    ]


@pytest.mark.parametrize(
    ("text", "own"),
    [
        ("> old words\nmy answer", "my answer"),
        ("&gt; old\n&gt; older\n\nmine", "\nmine"),
        ("mine\n\nOn Mon, 14 May 2001, K. wrote:\n> yours\n> all of it", "mine\n\n"),
        ("see below\n-----Original Message-----\nFrom: x\nsecret", "see below\n"),
        ("fyi\n---------- Forwarded message ----------\nsecret", "fyi\n"),
        ("Begin forwarded message:\nsecret", ""),
        ("[quote=x]yours[/quote] mine", "  mine"),
        ("5 > 3 and a -- b [sic]", "5 > 3 and a -- b [sic]"),
    ],
)
def test_quoted_and_forwarded_text_goes_and_ones_own_stays(text, own):
    assert strip_quotes(text) == own


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
    helping=st.sampled_from([1, 7, 30, 60, 500]),
    rows_at_once=st.integers(1, 9),
)
def test_any_users_with_any_cap_come_out_as_by_hand(tmp_path_factory, users, cap, minimum, helping, rows_at_once):
    folder = tmp_path_factory.mktemp("shard")
    minimum = minimum if cap is None else min(cap, minimum)
    rule = EncodingOptions(tokens_per_user=cap, min_tokens=minimum)
    task = EncodeShard(
        folder=folder, tokenizer=WordTokenizer(), vocabulary=WORDS, options=rule, splits=SplitRule(held_out=0.4)
    )
    rows = [(f"u{i}", post) for i, posts in enumerate(users) for post in posts]
    with mock.patch("unheard.corpus.encode.BATCH_CHARS", helping):
        counts = task(0, (tuple(zip(*some, strict=True)) for some in in_parts(rows, rows_at_once)))
    wanted = {"train": [], "held_out": []}
    for i, posts in enumerate(users):
        stream = by_hand(posts, cap, minimum)
        if stream is not None:
            wanted[task.splits.split_of(f"u{i}")].append(stream)
    for split, streams in wanted.items():
        shard = Shard.open(folder / split / "00000.offsets", task_dtype())
        found = [shard.tokens[shard.offsets[k] : shard.offsets[k + 1]].tolist() for k in range(shard.num_users)]
        assert found == streams
        assert counts.get(f"{split}_users", 0) == len(streams)
        assert counts.get(f"{split}_tokens", 0) == sum(i != BOS for s in streams for i in s)
    assert counts.get("users_seen", 0) == len(users)


def in_parts(rows, number):
    return (rows[i : i + number] for i in range(0, len(rows), number))


def task_dtype():
    from unheard.corpus.store import token_dtype

    return token_dtype(len(WORDS))


def test_a_rule_that_nobody_can_meet_is_refused():
    with pytest.raises(InvalidValue, match="below min_tokens"):
        EncodingOptions(tokens_per_user=5, min_tokens=6)
    with pytest.raises(InvalidValue):
        EncodingOptions(min_tokens=0)


def test_a_very_long_text_is_encoded_in_pieces_without_a_difference(monkeypatch):
    encoder = Encoder(WordTokenizer(), Vocabulary.of(["a", "b", "!"]))
    texts = ["a b! " * 40, "", "b\tb\na", "a" * 300 + " b"]
    whole = [part.tolist() for part in encoder.encode(texts)]
    monkeypatch.setattr(encode, "BATCH_CHARS", 7)
    assert [part.tolist() for part in encoder.encode(texts)] == whole
    assert CachedSplitter(WordTokenizer())("a b! " * 40) == ["a", "b", "!"] * 40
