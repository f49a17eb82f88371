"""Every input format gives the same store: users grouped, sorted by time, cut, filtered and split; a call resumes."""

import dataclasses
import errno
import json
import os
from dataclasses import replace

import numpy as np
import pytest

from tests.corpus.inputs import (
    ANN,
    BOB,
    FIELDS,
    POSTS,
    prepared,
    words_of,
    write_csv,
    write_jsonl,
    write_sqlite,
    write_with_duckdb,
)
from unheard.corpus.canaries import Canary
from unheard.corpus.encode import EncodeShard, EncodingOptions
from unheard.corpus.grouping import DuckDBBackend, SplitRule
from unheard.corpus.pipeline import Preparation, _release_request
from unheard.corpus.private_vocabulary import PrivateVocabulary
from unheard.corpus.sources import Fields, find_sources
from unheard.corpus.store import ShardWriter, TokenStore, write_store
from unheard.corpus.tokenizers import CharacterTokenizer
from unheard.corpus.vocabulary import BOS, EOS, PublicVocabulary, Vocabulary
from unheard.errors import CorpusError, CorpusMissing, InputError

WRITERS = {
    "x.jsonl": write_jsonl,
    "x.ndjson": write_jsonl,
    "x.jsonl.gz": write_jsonl,
    "x.jsonl.zst": write_with_duckdb,
    "x.csv": write_csv,
    "x.tsv": lambda path, rows: write_csv(path, rows, "\t"),
    "x.parquet": write_with_duckdb,
    "x.duckdb": write_with_duckdb,
    "x.sqlite": write_sqlite,
    "x.db": write_sqlite,
    "x.json": lambda path, rows: path.write_text(json.dumps(rows, indent=1)) and path,
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_gives_the_same_two_users(tmp_path, name):
    done = prepared(tmp_path, WRITERS[name](tmp_path / name, POSTS))
    assert words_of(done.store) == [ANN, BOB]
    assert done.counts["rows"]["rows"] == 4


def test_a_folder_of_files_is_one_corpus_and_no_user_is_split(tmp_path):
    folder = tmp_path / "months" / "deep"
    folder.mkdir(parents=True)
    write_jsonl(folder / "2.jsonl", POSTS[:2])
    write_jsonl(folder.parent / "1.jsonl.gz", POSTS[2:])
    (folder / "readme.md").write_text("not data")
    assert words_of(prepared(tmp_path, tmp_path / "months").store) == [ANN, BOB]
    assert words_of(prepared(tmp_path, str(tmp_path / "months" / "**" / "*.jsonl*"), out="again").store) == [ANN, BOB]


def test_users_are_cut_at_exactly_n_and_shorter_ones_left_out(tmp_path):
    rows = [{"who": f"u{n}", "what": "a " * n, "when": 0} for n in range(1, 8)]
    done = prepared(
        tmp_path, write_jsonl(tmp_path / "x.jsonl", rows), encoding=EncodingOptions(min_tokens=5, tokens_per_user=5)
    )
    # n words and EOS: 4 words make 5 tokens
    assert words_of(done.store) == ["<BOS> a a a a <EOS>", *["<BOS> a a a a a"] * 3]
    assert done.counts["users"]["users_too_short"] == 3
    assert done.counts["users"]["train_tokens"] == 20


def test_all_users_stay_under_a_cap_when_the_minimum_is_lower(tmp_path):
    rows = [{"who": f"u{n}", "what": "a " * n, "when": 0} for n in (1, 9)]
    done = prepared(
        tmp_path, write_jsonl(tmp_path / "x.jsonl", rows), encoding=EncodingOptions(min_tokens=1, tokens_per_user=3)
    )
    assert words_of(done.store) == ["<BOS> a <EOS>", "<BOS> a a a"]


def test_test_posts_come_from_held_out_users_only(tmp_path):
    rule = SplitRule(held_out=0.5)
    rows = [
        {"who": u, "what": "a b c" if rule.split_of(u) == "held_out" else "d e f", "when": 0}
        for u in map(str, range(40))
    ]
    done = prepared(tmp_path, write_jsonl(tmp_path / "x.jsonl", rows), splits=rule, test_tokens=10, shards=2)
    assert sum(len(w.split()) - 1 for w in words_of(done.store, "test_posts")) == 10
    assert not {"d", "e", "f"} & set(" ".join(words_of(done.store, "test_posts")).split())


def test_quotes_are_stripped_on_request(tmp_path):
    rows = [{"who": "ann", "what": "> a a a\nb", "when": 0}]
    done = prepared(tmp_path, write_jsonl(tmp_path / "x.jsonl", rows), encoding=EncodingOptions(strip_quotes=True))
    assert words_of(done.store) == ["<BOS> b <EOS>"]


def test_characters_and_public_words_work_through_the_whole_pipeline(tmp_path):
    done = prepared(
        tmp_path,
        write_jsonl(tmp_path / "x.jsonl", POSTS),
        tokenizer=CharacterTokenizer(),
        vocabulary=PublicVocabulary(size=60),
    )
    assert words_of(done.store)[1] == "<BOS> b ,   b ! <EOS>"
    assert done.store.info["tokens"] == {"kind": "characters", "lowercase": True}
    assert done.store.info["vocabulary"]["kind"] == "public"


def private_words(tmp_path, **choices):
    rows = [{"who": f"u{i}", "what": " ".join(f"w{j}" for j in range(30)), "when": 0} for i in range(300)]
    file = tmp_path / "x.jsonl"
    if not file.exists():
        write_jsonl(file, rows)
    return prepared(tmp_path, file, **{"vocabulary": PrivateVocabulary(epsilon=4.0, delta=1e-9), **choices})


def test_a_canary_that_fails_after_the_draw_does_not_draw_again(tmp_path):
    with pytest.raises(InputError, match="kept in"):
        private_words(tmp_path, canaries=(Canary(text="w1 zebra"),))
    kept = sorted(path.name for path in (tmp_path / "store.partial").iterdir())
    assert len(kept) == 2  # the words and their cost, and no text
    drawn = Vocabulary.load(tmp_path / "store.partial" / kept[0])
    done = private_words(tmp_path, canaries=(Canary(text="w1 w2"),))
    assert done.store.vocabulary == drawn
    assert [event["kind"] for event in done.store.vocabulary_events] == ["gaussian", "failure_probability"]


def test_a_store_pays_for_draws_of_calls_that_failed(tmp_path):
    with pytest.raises(InputError, match="kept in"):
        private_words(tmp_path, canaries=(Canary(text="w1 zebra"),))
    again = private_words(tmp_path, vocabulary=PrivateVocabulary(epsilon=3.0, delta=1e-9)).store
    assert [event["kind"] for event in again.vocabulary_events] == ["gaussian", "failure_probability"] * 2
    assert again.vocabulary_events[0] != again.vocabulary_events[2]


def test_a_public_vocabulary_after_a_failed_private_one_still_pays(tmp_path):
    with pytest.raises(InputError, match="kept in"):
        private_words(tmp_path, canaries=(Canary(text="w1 zebra"),))
    assert len(private_words(tmp_path, vocabulary=PublicVocabulary(size=100)).store.vocabulary_events) == 2


def test_a_canary_that_no_vocabulary_can_have_fails_before_the_draw(tmp_path):
    with pytest.raises(InputError, match="no vocabulary has"):
        private_words(tmp_path, canaries=(Canary(text="x" * 65),))
    assert not (tmp_path / "store.partial").exists()


def test_rows_of_another_number_of_shards_are_not_continued(tmp_path, monkeypatch):
    """Otherwise one user could be in two shards, as two users. Another version may choose another number of shards."""
    rows = [{"who": f"u{i}", "what": "a b", "when": 0} for i in range(50)]
    file = write_jsonl(tmp_path / "x.jsonl", rows)
    monkeypatch.setattr("unheard.corpus.pipeline.choose_shards", lambda sources: 3)
    with monkeypatch.context() as patch:
        patch.setattr(EncodeShard, "__call__", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prepared(tmp_path, file, shards=0, backend=DuckDBBackend(workers=1))
    record = tmp_path / "store.partial" / "work" / "shards.json"
    monkeypatch.setattr("unheard.corpus.pipeline.choose_shards", lambda sources: 4)
    with pytest.raises(CorpusError, match="divides the users in another way"):
        prepared(tmp_path, file, shards=0, backend=DuckDBBackend(workers=1))
    record.unlink()
    with pytest.raises(CorpusError, match="missing or damaged"):
        prepared(tmp_path, file, shards=0, backend=DuckDBBackend(workers=1))


def test_a_stopped_prepare_is_no_store_and_continues_where_it_was(tmp_path, monkeypatch):
    rows = [{"who": f"u{i}", "what": "a b", "when": 0} for i in range(50)]
    file = write_jsonl(tmp_path / "x.jsonl", rows)
    write = EncodeShard.__call__

    def stop_at_two(self, shard, rows):
        return write(self, shard, rows) if shard < 2 else 1 / 0

    with monkeypatch.context() as patch:
        patch.setattr(EncodeShard, "__call__", stop_at_two)
        with pytest.raises(ZeroDivisionError):
            prepared(tmp_path, file, shards=4, backend=DuckDBBackend(workers=1))
    with pytest.raises(CorpusMissing, match="unfinished"):
        TokenStore.open(tmp_path / "store")
    again = []

    def watched(self, shard, rows):
        again.append(shard)
        return write(self, shard, rows)

    monkeypatch.setattr(EncodeShard, "__call__", watched)
    monkeypatch.setattr("unheard.corpus.grouping.scan_batch", lambda *args: 1 / 0)  # the scan was finished
    done = prepared(tmp_path, file, shards=4, backend=DuckDBBackend(workers=1))
    assert again == [2, 3]
    assert done.store.train.num_users == 50
    assert sorted(p.name for p in tmp_path.iterdir()) == ["store", "words.txt", "x.jsonl"]


def test_another_question_does_not_continue_from_the_old_answer(tmp_path, monkeypatch):
    file = write_jsonl(tmp_path / "x.jsonl", POSTS)
    with monkeypatch.context() as patch:
        patch.setattr(EncodeShard, "__call__", lambda self, shard, rows: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prepared(tmp_path, file)
    write_jsonl(tmp_path / "x.jsonl", POSTS[:2])
    assert words_of(prepared(tmp_path, file).store) == ["<BOS> c c <EOS>", BOB]


def test_a_file_that_was_changed_in_place_is_read_again(tmp_path, monkeypatch):
    """Its size is the same, so only its time tells."""
    file = write_jsonl(tmp_path / "x.jsonl", POSTS)
    with monkeypatch.context() as patch:
        patch.setattr(EncodeShard, "__call__", lambda self, shard, rows: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prepared(tmp_path, file)
    size = file.stat().st_size
    write_jsonl(file, [{**post, "what": post["what"].replace("c", "d")} for post in POSTS])
    assert file.stat().st_size == size
    assert words_of(prepared(tmp_path, file).store) == [ANN.replace("c", "d"), BOB]


OTHER_CHOICES = {
    "fields": Fields(user="who", text="what"),
    "tokenizer": CharacterTokenizer(),
    "vocabulary": PrivateVocabulary(epsilon=1.0, delta=1e-6),
    "encoding": EncodingOptions(min_tokens=2),
    "splits": SplitRule(salt="another"),
    "excluded": ("ann",),
    "drop_duplicates": True,
    "duplicate_chars": 99,
}


def test_words_that_were_drawn_are_used_again_for_the_same_votes_and_mechanism_only(tmp_path):
    """Every choice that changes the votes or the mechanism of a private vocabulary is in the hash of its request."""
    file = write_jsonl(tmp_path / "x.jsonl", POSTS)
    sources, chosen = find_sources([str(file)]), Preparation(fields=FIELDS)
    request = _release_request(sources, chosen)
    later = {"test_tokens", "canaries", "shards", "name"}  # decided after the votes, or without effect on them
    assert OTHER_CHOICES.keys() | later == {field.name for field in dataclasses.fields(Preparation)}
    requests = {request, *(_release_request(sources, replace(chosen, **{k: v})) for k, v in OTHER_CHOICES.items())}
    assert len(requests) == 1 + len(OTHER_CHOICES)
    same = replace(chosen, test_tokens=5, canaries=(Canary(text="a"),), shards=3, name="other")
    assert _release_request(sources, same) == request
    before = file.stat()
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert _release_request(sources, chosen) != request
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert _release_request(sources, chosen) == request
    file.write_bytes(file.read_bytes() + b"\n")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert _release_request(sources, chosen) != request
    assert _release_request([], chosen) != request


def test_files_that_may_be_copied_hold_no_count_of_users(tmp_path):
    rows = [{"who": f"u{i}", "what": "a", "when": 0} for i in range(30)]
    few = prepared(
        tmp_path,
        write_jsonl(tmp_path / "few.jsonl", rows[:5]),
        out="1/s",
        excluded=("u1",),
        canaries=(Canary(text="a b"),),
    )
    many = prepared(
        tmp_path,
        write_jsonl(tmp_path / "many.jsonl", [*rows * 20, "not a row", {"what": "of nobody"}]),
        out="2/s",
        shards=3,
        excluded=("u2", "u3", "u4"),
        canaries=(Canary(text="b c", users=2, repeats=3), Canary(text="c a")),
    )
    record = (few.store.path / "corpus.json").read_bytes()
    assert record == (many.store.path / "corpus.json").read_bytes()
    assert (json.loads(record)["excluded_users"], json.loads(record)["canaries"]) == (True, True)


@pytest.fixture
def held_out(tmp_path):
    users = [np.array([BOS, 3 + u, 4 + u, EOS] * 5 + [BOS, 9]) for u in range(4)]
    return write_store(tmp_path / "s", train=[], held_out=users, vocabulary=Vocabulary.of("abcdefghij")).held_out


def test_test_posts_are_whole_posts_up_to_exactly_n_predicted_tokens(held_out):
    posts = held_out.random_posts(20, "salt")
    assert sum(len(p) - 1 for p in posts) == 20
    assert all(p[0] == BOS and BOS not in p[1:] for p in posts)
    assert all(p[-1] == EOS or len(p) == 2 for p in posts[:-1])


def test_test_posts_depend_on_the_salt_alone_and_stop_when_there_are_no_more(held_out):
    same = [p.tolist() for p in held_out.random_posts(20, "salt")]
    assert same == [p.tolist() for p in held_out.random_posts(20, "salt")]
    assert same != [p.tolist() for p in held_out.random_posts(20, "pepper")]
    assert sum(len(p) - 1 for p in held_out.random_posts(10_000, "salt")) == 4 * 16


def test_a_full_disk_is_one_message_and_work_continues_afterwards(tmp_path, monkeypatch):
    file = write_jsonl(tmp_path / "x.jsonl", POSTS)

    def full(self, piece):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "write", full)
        with pytest.raises(CorpusError, match=r"No space left on device.*run the same command again"):
            prepared(tmp_path, file)
    with pytest.raises(CorpusMissing):
        TokenStore.open(tmp_path / "store")
    assert prepared(tmp_path, file).store.train.num_users == 2


def test_rules_that_leave_nobody_say_which_rule(tmp_path):
    file = write_jsonl(tmp_path / "x.jsonl", POSTS)
    with pytest.raises(InputError, match="No user has 1600 tokens"):
        prepared(tmp_path, file, encoding=EncodingOptions(min_tokens=1600))
    held = [
        {"who": u, "what": "a", "when": 0}
        for u in map(str, range(50))
        if SplitRule(held_out=0.5).split_of(u) == "held_out"
    ]
    with pytest.raises(InputError, match="all are held out"):
        prepared(tmp_path, write_jsonl(tmp_path / "held.jsonl", held), splits=SplitRule(held_out=0.5))
