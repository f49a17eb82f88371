"""Votes have norm at most 1, a word of one user is released with probability delta, and each draw is paid once."""

import dataclasses
import json
import math
import shutil
from collections import Counter
from dataclasses import replace

import duckdb
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import log_ndtr

from tests.corpus.inputs import POSTS, prepared, write_jsonl
from unheard.corpus import private_vocabulary
from unheard.corpus.canaries import Canary
from unheard.corpus.encode import EncodeShard, EncodingOptions
from unheard.corpus.grouping import Grouping, SplitRule
from unheard.corpus.pipeline import Preparation, _release_request
from unheard.corpus.private_vocabulary import (
    UNIT,
    CachedSplitter,
    CorpusVocabulary,
    CountVotes,
    PrivateVocabulary,
    WordRelease,
)
from unheard.corpus.sources import Fields, find_sources
from unheard.corpus.store import write_store
from unheard.corpus.tokenizers import CharacterTokenizer, WordTokenizer
from unheard.corpus.vocabulary import FileVocabulary, Vocabulary
from unheard.errors import InputError, InvalidValue, LedgerError, PrivacyError
from unheard.privacy.events import FailureProbability, Gaussian
from unheard.privacy.population_statement import store_statement
from unheard.randomness import reproducible_generator


def release(z=2.0, delta=0.01, words=8):
    return WordRelease(noise_multiplier=z, threshold_delta=delta, words_per_user=words)


@given(st.integers(1, 10_000))
def test_a_users_votes_have_norm_at_most_one_unit_and_nearly_that(words):
    vote = release().vote(words)
    assert words * vote**2 <= UNIT**2
    assert words * (vote + 1) ** 2 > UNIT**2


def test_one_word_gets_a_whole_vote_and_four_words_a_half_each():
    assert release().vote(1) == UNIT
    assert release().vote(4) == UNIT // 2


@given(st.sets(st.text("abcdef", min_size=1, max_size=4), max_size=40), st.integers(1, 8))
def test_no_user_votes_for_more_words_than_allowed(words, allowed):
    chosen = release(words=allowed).choose(words, "salt", "ann")
    assert len(chosen) == min(allowed, len(words))
    assert set(chosen) <= words
    assert len(set(chosen)) == len(chosen)


def test_the_choice_is_fixed_for_a_user_and_different_between_users():
    words = {f"w{i}" for i in range(100)}
    mine = release().choose(words, "salt", "ann")
    assert sorted(mine) == sorted(release().choose(sorted(words), "salt", "ann"))
    assert sorted(mine) != sorted(release().choose(words, "salt", "bob"))
    assert sorted(mine) != sorted(release().choose(words, "pepper", "ann"))
    assert sorted(mine) != sorted(release().choose(words, "malt", "ann"))


@pytest.mark.parametrize("delta", [0.3, 1e-3, 1e-7, 1e-12])
@pytest.mark.parametrize("z", [0.5, 2.0, 20.0])
@pytest.mark.parametrize("words", [1, 8, 300])
def test_the_threshold_keeps_every_lone_users_words_in_by_exact_calculation(z, delta, words):
    mechanism = release(z, delta, words)
    threshold = mechanism.threshold()
    log_stay = []
    for t in range(1, words + 1):
        # A word with `vote` votes passes when rint(noise) > threshold - vote, that is, noise > threshold - vote + 1/2.
        log_stay.append(t * log_ndtr((threshold - mechanism.vote(t) + 0.5) / (z * UNIT)))
    assert min(log_stay) >= -delta * (1 + 1e-9)
    # The threshold is tight: with a threshold lower by one part in a million, some user exceeds delta.
    lower = threshold - 1e-6 * z * UNIT
    assert min(t * log_ndtr((lower - mechanism.vote(t)) / (z * UNIT)) for t in range(1, words + 1)) < -delta


def test_words_of_one_user_alone_are_released_no_more_often_than_the_delta_says():
    mechanism = release(z=1.0, delta=0.05, words=4)
    generator = reproducible_generator(1, "singletons")
    trials = 20_000
    for t in (1, 4):
        sums = np.full(t * trials, mechanism.vote(t), dtype=np.int64)
        passed, _ = mechanism.release(sums, generator)
        rate = passed.reshape(trials, t).any(axis=1).mean()
        bound = 1 - math.exp(-0.05)
        # four standard deviations of a rate near 0.0488 over 20,000 trials: 0.0061
        assert rate < bound + 0.0061
        exact = 1 - math.exp(t * log_ndtr((mechanism.threshold() - mechanism.vote(t)) / UNIT))
        assert abs(rate - exact) < 0.0061


def test_noise_is_drawn_for_each_word_with_the_stated_deviation():
    mechanism = release(z=3.0)
    _, noisy = mechanism.release(np.zeros(40_000, dtype=np.int64), reproducible_generator(2, "noise"))
    # the deviation of a sample deviation is sigma / sqrt(2n) = 0.0106; four of them
    assert abs(noisy.std() / UNIT - 3.0) < 0.0424
    assert len(np.unique(noisy)) > 39_990


def test_only_what_is_strictly_above_the_threshold_passes():
    class Still:
        def standard_normal(self, n):
            return np.zeros(n)

    mechanism = release()
    threshold = mechanism.threshold()
    passed, noisy = mechanism.release(np.array([threshold - 1, threshold, threshold + 1]), Still())  # pyright: ignore[reportArgumentType]
    assert passed.tolist() == [False, False, True]
    assert noisy.tolist() == [threshold - 1, threshold, threshold + 1]


def test_both_costs_are_recorded_and_sum_to_the_budget():
    mechanism = WordRelease.for_budget(1.5, 1e-6, 50)
    gaussian, failure = mechanism.events()
    assert gaussian == Gaussian(noise_multiplier=mechanism.noise_multiplier)
    assert failure == FailureProbability(delta=5e-7)
    from scipy.special import ndtr

    z = mechanism.noise_multiplier
    # Balle and Wang (2018): the exact delta of the Gaussian mechanism at epsilon
    spent = ndtr(0.5 / z - 1.5 * z) - math.exp(1.5) * ndtr(-0.5 / z - 1.5 * z)
    assert spent <= 5e-7 * (1 + 1e-6)
    assert spent > 5e-7 * 0.99


def test_a_user_who_is_too_short_has_no_vote_and_what_is_cut_off_has_none(tmp_path):
    def votes(rows, **rule):
        task = CountVotes(
            folder=tmp_path,
            tokenizer=WordTokenizer(),
            options=EncodingOptions(**rule),
            splits=SplitRule(held_out=0.5),
            release=release(),
        )
        return task.words_of(iter(rows), CachedSplitter(WordTokenizer()))

    assert votes(["a b", "b c"]) == {"a", "b", "c"}
    assert votes(["a b", "b c"], min_tokens=6) == {"a", "b", "c"}
    assert votes(["a b", "b c"], min_tokens=7) == set()
    # cut after 4 tokens, a b EOS b: what is not in the stream has no vote
    assert votes(["a b", "b c"], tokens_per_user=4) == {"a", "b"}
    assert votes(["a <UNK> " + "x" * 65]) == {"a", "<", "unk", ">"}


def test_a_user_with_too_many_words_has_whole_votes_for_those_that_are_chosen(tmp_path):
    """Their votes have norm 1. A smaller norm would release fewer words at the same cost."""
    task = CountVotes(
        folder=tmp_path,
        tokenizer=WordTokenizer(),
        options=EncodingOptions(min_tokens=1),
        splits=SplitRule(held_out=0.0),
        release=release(words=4),
    )
    task(0, iter([(["ann"] * 16, [f"word{'abcdefghijklmnop'[k]}" for k in range(16)])]))
    votes = duckdb.sql(f"SELECT total FROM read_parquet('{tmp_path}/*.parquet')").fetchall()
    assert votes == [(UNIT // 2,)] * 4


@pytest.mark.parametrize("most_words", [1, 2, 100])
@pytest.mark.parametrize("block", [1, 2, 3, 100])
def test_each_user_votes_once_in_whatever_blocks_and_files_the_rows_come(tmp_path, monkeypatch, block, most_words):
    """A user whose rows are in two blocks votes once. Two votes would be twice the charged sensitivity."""
    monkeypatch.setattr("unheard.corpus.private_vocabulary._MAX_WORDS", most_words)
    task = CountVotes(
        folder=tmp_path,
        tokenizer=WordTokenizer(),
        options=EncodingOptions(min_tokens=1),
        splits=SplitRule(held_out=0.0),
        release=release(words=4),
    )
    for shard, users in enumerate((("ann", "bob"), ("eve",))):
        rows = [(user, text) for user in users for text in ("a b", "b", "c", f"only{user}")]
        blocks = (rows[i : i + block] for i in range(0, len(rows), block))
        task(shard, (tuple(zip(*some, strict=True)) for some in blocks))
    sums = dict(
        duckdb.sql(f"SELECT word, sum(total) FROM read_parquet('{tmp_path}/*.parquet') GROUP BY word").fetchall()
    )
    assert sums == {**dict.fromkeys("abc", 3 * UNIT // 2), **{f"only{u}": UNIT // 2 for u in ("ann", "bob", "eve")}}


def test_one_file_of_the_users_among_others_makes_a_corpus_not_public(tmp_path):
    """It is refused even if only a part of the input is given as public, together with other files."""
    (tmp_path / "given").mkdir()
    for name in ("mine", "other"):
        write_jsonl(tmp_path / "given" / f"{name}.jsonl", POSTS)
    write_jsonl(tmp_path / "given" / "other.jsonl", POSTS[:2])
    write_jsonl(tmp_path / "more.jsonl", [*POSTS, *POSTS])
    mine, other, more = (
        find_sources([str(tmp_path / name)]) for name in ("given/mine.jsonl", "given/other.jsonl", "more.jsonl")
    )
    public = CorpusVocabulary(path=str(tmp_path / "given"))
    for own in (mine, other, [*mine, *more], [*mine, *other], [*mine, *other, *more]):
        with pytest.raises(PrivacyError, match="the users' own text"):
            public.check_is_public(own)
    public.check_is_public(more)


@pytest.mark.parametrize(
    "splits",
    [SplitRule(held_out=0.5), SplitRule(held_out=0.0, public=0.5), SplitRule(held_out=0.3, public=0.3)],
    ids=["held out", "public", "both"],
)
def test_only_training_users_have_a_vote(tmp_path, splits):
    task = CountVotes(
        folder=tmp_path,
        tokenizer=WordTokenizer(),
        options=EncodingOptions(min_tokens=1),
        splits=splits,
        release=release(),
    )
    people = [f"user{k}" for k in range(40)]
    task(0, iter([(people, [f"word{k}" for k in range(40)])]))
    ((voted,),) = duckdb.sql(f"SELECT list(word) FROM read_parquet('{tmp_path}/*.parquet')").fetchall()
    in_training = {f"word{k}" for k, user in enumerate(people) if splits.split_of(user) == "train"}
    assert set(voted) == in_training
    assert 0 < len(in_training) < 40


def test_an_impossible_cost_of_a_vocabulary_is_refused():
    for values in (
        {"epsilon": 0.0, "delta": 1e-6},
        {"epsilon": 1.0, "delta": 0.0},
        {"epsilon": math.inf, "delta": 1e-6},
    ):
        with pytest.raises(InvalidValue):
            PrivateVocabulary(**values)


def test_words_of_another_public_text_or_store_can_be_taken(tmp_path):
    other = write_jsonl(tmp_path / "other.jsonl", [{"what": "b b b a a zz"}])
    data = write_jsonl(tmp_path / "x.jsonl", POSTS)
    raw = prepared(tmp_path, data, out="raw", vocabulary=CorpusVocabulary(path=str(other)))
    assert raw.store.vocabulary.words[3:] == ("b", "a")
    (tmp_path / "lines.txt").write_text("c c\nb b b\n")
    lines = prepared(tmp_path, data, out="lines", vocabulary=CorpusVocabulary(path=str(tmp_path / "lines.txt"), size=4))
    assert lines.store.vocabulary.words[3:] == ("b",)
    same = prepared(tmp_path, data, out="same", vocabulary=CorpusVocabulary(path=str(raw.store.path)))
    assert same.store.vocabulary == raw.store.vocabulary


@pytest.mark.parametrize("line", ['"a word alone"', "[1, 2]", "5"])
def test_a_public_text_with_a_line_that_is_no_row_keeps_the_words_of_the_others(tmp_path, line):
    other = write_jsonl(tmp_path / "other.jsonl", [{"what": "b b b a a zz"}])
    other.write_text(other.read_text() + line + "\n")
    done = prepared(tmp_path, write_jsonl(tmp_path / "x.jsonl", POSTS), vocabulary=CorpusVocabulary(path=str(other)))
    assert done.store.vocabulary.words[3:] == ("b", "a")


def test_the_price_of_another_stores_private_words_is_inherited(tmp_path):
    events = [{"kind": "gaussian", "noise_multiplier": 2.0}]
    info = {"vocabulary": {"kind": "private", "events": events}}
    write_store(tmp_path / "paid", train=[], held_out=[], vocabulary=Vocabulary.of("abc"), info=info)
    done = prepared(
        tmp_path, write_jsonl(tmp_path / "x.jsonl", POSTS), vocabulary=CorpusVocabulary(path=str(tmp_path / "paid"))
    )
    assert done.store.vocabulary_events == events


def test_a_private_vocabulary_has_common_words_only_and_its_events_in_the_store(tmp_path):
    rule = SplitRule(held_out=0.1)
    rows = [{"who": f"u{i}", "what": f"common words own{i}", "when": 0} for i in range(3000)]
    # every held-out user writes one word more: if they had votes, some 300 / 2 of them would carry it over the threshold
    rows += [{"who": r["who"], "what": "elsewhere", "when": 1} for r in rows if rule.split_of(r["who"]) == "held_out"]
    choice = PrivateVocabulary(epsilon=2.0, delta=1e-10)  # 2,700 users with a word of their own: none is released
    done = prepared(tmp_path, write_jsonl(tmp_path / "x.jsonl", rows), vocabulary=choice, shards=3, splits=rule)
    # votes: 2,700 / sqrt(3) = 1,559 against a threshold far below: released but for a chance below e^-1000
    assert sorted(done.store.vocabulary.words[3:]) == ["common", "words"]
    kinds = [event["kind"] for event in done.store.vocabulary_events]
    assert kinds == ["gaussian", "failure_probability"]
    assert done.store.info["vocabulary"]["threshold_delta"] == 5e-11
    assert done.store.vocabulary_events[1] == {"kind": "failure_probability", "delta": 5e-11}


def test_a_private_vocabulary_without_enough_users_is_refused(tmp_path):
    with pytest.raises(InputError, match="No word has enough users"):
        prepared(
            tmp_path, write_jsonl(tmp_path / "x.jsonl", POSTS), vocabulary=PrivateVocabulary(epsilon=1.0, delta=1e-6)
        )


def test_a_private_vocabulary_is_drawn_once_even_if_prepare_is_stopped_after_it(tmp_path, monkeypatch):
    rows = [{"who": f"u{i}", "what": " ".join(f"w{j}" for j in range(30)), "when": 0} for i in range(300)]
    file = write_jsonl(tmp_path / "x.jsonl", rows)
    choice = PrivateVocabulary(epsilon=4.0, delta=1e-9)
    with monkeypatch.context() as patch:
        patch.setattr(EncodeShard, "__call__", lambda self, shard, rows: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prepared(tmp_path, file, vocabulary=choice)
    (saved,) = (tmp_path / "store.partial").glob("released-*.txt")
    drawn = Vocabulary.load(saved)
    assert len(drawn) > 3
    done = prepared(tmp_path, file, vocabulary=choice)
    assert done.store.vocabulary == drawn
    assert len(done.store.vocabulary_events) == 2
    assert not [*done.store.path.glob("release*")]


def test_words_that_were_drawn_are_used_again_for_the_same_votes_only(tmp_path):
    """The name of the saved draw contains every setting on which the votes depend."""
    preparation = Preparation(fields=Fields(user="who", text="what"))
    other = {
        "fields": Fields(user="who", text="else"),
        "tokenizer": CharacterTokenizer(),
        "vocabulary": PrivateVocabulary(epsilon=4.0, delta=1e-9),
        "encoding": EncodingOptions(tokens_per_user=7),
        "splits": SplitRule(salt="other"),
        "excluded": ("ann",),
        "drop_duplicates": True,
        "duplicate_chars": 7,
    }
    # Settings that are used after the draw are not in the name.
    later = {"test_tokens": 5, "canaries": (Canary(text="a b"),), "shards": 3, "name": "x"}
    assert {*other, *later} == {field.name for field in dataclasses.fields(Preparation)}
    file = write_jsonl(tmp_path / "x.jsonl", POSTS)
    sources = find_sources([str(file)])
    own = _release_request(sources, preparation)
    assert {_release_request(sources, replace(preparation, **{k: v})) for k, v in later.items()} == {own}
    requests = [_release_request(sources, replace(preparation, **{k: v})) for k, v in other.items()]
    write_jsonl(tmp_path / "x.jsonl", [*POSTS, POSTS[0]])
    requests.append(_release_request(sources, preparation))
    assert len({own, *requests}) == 1 + len(other) + 1


def private_words(tmp_path, **choices):
    rows = [{"who": f"u{i}", "what": " ".join(f"w{j}" for j in range(30)), "when": 0} for i in range(300)]
    file = tmp_path / "x.jsonl"
    if not file.exists():
        write_jsonl(file, rows)
    return prepared(tmp_path, file, **{"vocabulary": PrivateVocabulary(epsilon=4.0, delta=1e-9), **choices})


def test_a_draw_is_charged_before_its_noise_is_drawn(tmp_path, monkeypatch):
    from unheard.corpus import private_vocabulary

    with monkeypatch.context() as patch:
        patch.setattr(private_vocabulary, "secure_generator", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            private_words(tmp_path)
    assert len(private_words(tmp_path).store.vocabulary_events) == 4


def test_the_noise_of_a_private_vocabulary_comes_from_the_secure_generator(tmp_path, monkeypatch):
    class Loud:
        def standard_normal(self, n):
            return np.full(n, 1e6)  # so much that every word passes

    monkeypatch.setattr("unheard.corpus.private_vocabulary.secure_generator", Loud)
    choice = PrivateVocabulary(epsilon=1.0, delta=1e-6)
    done = prepared(tmp_path, write_jsonl(tmp_path / "x.jsonl", POSTS), vocabulary=choice)
    assert {"a", "b", "c"} <= set(done.store.vocabulary.words)


def test_a_public_corpus_that_is_the_users_own_text_is_refused(tmp_path):
    (tmp_path / "posts").mkdir()
    file = write_jsonl(tmp_path / "posts" / "posts.jsonl", POSTS)
    (tmp_path / "link.jsonl").symlink_to(file)
    for path in (file, file.parent, tmp_path / "link.jsonl", file.parent / ".." / "posts"):
        with pytest.raises(PrivacyError, match="its words are not public"):
            prepared(tmp_path, file, vocabulary=CorpusVocabulary(path=str(path)))
    with pytest.raises(PrivacyError, match="its words are not public"):
        prepared(tmp_path, tmp_path / "link.jsonl", vocabulary=CorpusVocabulary(path=str(file)))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link.jsonl", "posts", "words.txt"]  # nothing was read


def test_a_copy_of_the_users_own_text_is_not_public_either(tmp_path):
    (tmp_path / "copies").mkdir()
    own = write_jsonl(tmp_path / "x.jsonl", POSTS)
    (tmp_path / "empty.jsonl").touch()
    write_jsonl(tmp_path / "copies" / "same-size.jsonl", POSTS[::-1])
    check = CorpusVocabulary(path=str(tmp_path / "copies")).check_is_public
    sources = find_sources([str(own)])
    check(sources)
    for name in ("copies/copy.jsonl", "copy.txt"):
        (tmp_path / name).write_bytes(own.read_bytes())
    for name in ("copies", "copies/copy.jsonl", "copy.txt"):
        with pytest.raises(PrivacyError, match="or a copy of it: its words are not public"):
            CorpusVocabulary(path=str(tmp_path / name)).check_is_public(sources)


def test_the_list_of_a_private_vocabulary_keeps_its_cost_under_every_name(tmp_path):
    """The list is that of a store, by path, by a link, and cut to some words. A list elsewhere is declared public."""
    events = [{"kind": "gaussian", "noise_multiplier": 2.0}, {"kind": "failure_probability", "delta": 1e-7}]
    info = {"vocabulary": {"kind": "private", "events": events}}
    paid = write_store(tmp_path / "paid", train=[], held_out=[], vocabulary=Vocabulary.of("abc"), info=info).path
    (tmp_path / "link.txt").symlink_to(paid / "vocabulary.txt")
    (paid / "other.txt").write_text("a\nb\n")
    shutil.copy(paid / "vocabulary.txt", tmp_path / "copy.txt")
    posts = write_jsonl(tmp_path / "x.jsonl", POSTS)
    for file, size, expected in (
        (paid / "vocabulary.txt", None, events),
        (paid / "vocabulary.txt", 5, events),
        (tmp_path / "link.txt", None, events),
        (paid / "other.txt", None, []),
        (tmp_path / "copy.txt", None, []),
    ):
        given = FileVocabulary(path=str(file), size=size)
        store = prepared(tmp_path, posts, vocabulary=given, out=f"{file.parent.name}-{file.name}-{size}").store
        assert store.vocabulary_events == expected, file
        claim = store_statement(store.path, delta=1e-5)["claim"]
        assert ("its vocabulary (file) is declared public" in claim) == (not expected)
    record = json.loads((paid / "corpus.json").read_text())
    (paid / "corpus.json").write_text(json.dumps({**record, "vocabulary": {}}))
    with pytest.raises(LedgerError, match="is not as it was written"):
        prepared(tmp_path, posts, vocabulary=FileVocabulary(path=str(paid / "vocabulary.txt")), out="again")


def test_votes_are_summed_over_all_files_of_all_shards(tmp_path, monkeypatch):
    """Also if there are more words than are kept in memory."""
    monkeypatch.setattr(private_vocabulary, "_MAX_WORDS", 2)
    expected: Counter[str] = Counter()
    for shard in range(2):
        sums = private_vocabulary.WordSums(tmp_path / "sums", shard)
        for words in ("abc", "bcd", "aab", "e"):
            sums.add(Counter(words))
            expected += Counter(words)
        assert sums.finish() == 4
    grouping = Grouping(work=tmp_path, fields=Fields(user="who", text="what"), shards=2)
    (tmp_path / "temp").mkdir()
    for least in (0, 4):
        parts = private_vocabulary.summed(tmp_path / "sums", grouping, least)
        read = [(word, int(n)) for words, totals in parts for word, n in zip(words, totals, strict=True)]
        assert read == sorted((word, n) for word, n in expected.items() if n >= least)
