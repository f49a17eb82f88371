"""Every input format gives the same store: users grouped, sorted by time, cut, filtered and split; a call resumes."""

import json
import os
import stat
from dataclasses import replace

import duckdb
import numpy as np
import pytest

import unheard
from tests.corpus.inputs import (
    ANN,
    BOB,
    FIELDS,
    POSTS,
    prepared,
    word_list,
    words_of,
    write_csv,
    write_jsonl,
    write_sqlite,
    write_with_duckdb,
)
from unheard.corpus.canaries import Canary
from unheard.corpus.encode import EncodeShard, EncodingOptions
from unheard.corpus.grouping import DuckDBBackend, SplitRule
from unheard.corpus.pipeline import draw_test_posts
from unheard.corpus.private_vocabulary import CorpusVocabulary, PrivateVocabulary
from unheard.corpus.store import TokenStore, write_store
from unheard.corpus.tokenizers import CharacterTokenizer
from unheard.corpus.vocabulary import BOS, EOS, PublicVocabulary, Vocabulary
from unheard.errors import CorpusMissing, InputError

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


def test_without_a_time_the_order_of_the_input_stands(tmp_path):
    rows = [{"who": "ann", "what": w} for w in "cabcab"]
    done = prepared(tmp_path, write_jsonl(tmp_path / "x.jsonl", rows), fields=replace(FIELDS, time=None))
    assert words_of(done.store)[0].split()[1::3] == list("cabcab")


def test_ties_of_time_stand_in_the_order_of_the_input_across_files(tmp_path):
    for i, letters in enumerate(["ab", "ca", "bc"]):
        write_jsonl(tmp_path / f"{i}.jsonl", [{"who": "ann", "what": w, "when": "2002-11-18"} for w in letters])
    done = prepared(tmp_path, str(tmp_path / "*.jsonl"))
    assert words_of(done.store)[0].split()[1::3] == list("abcabc")


@pytest.mark.parametrize(
    ("times", "order"),
    [
        ([1300000000.5, 2, "3"], "bca"),
        (["2018-05-02T19:38:15Z", "2018-05-02T19:38:15+02:00", "2018-05-02 18:00"], "bca"),
        (["1940", "1939", "1941"], "bac"),
        (["no date", None, "1999-01-01"], "cab"),
    ],
)
def test_times_are_numbers_or_iso_dates_and_unreadable_ones_come_last(tmp_path, times, order):
    rows = [{"who": "ann", "what": w, "when": t} for w, t in zip("abc", times, strict=True)]
    done = prepared(tmp_path, write_jsonl(tmp_path / "x.jsonl", rows))
    assert words_of(done.store)[0].split()[1::3] == list(order)


def test_a_time_format_reads_other_dates(tmp_path):
    rows = [
        {"who": "ann", "what": w, "when": t}
        for w, t in (("a", "Mon, 14 May 2001 16:39:00 -0700"), ("b", "Sun, 13 May 2001 16:39:00 -0700"))
    ]
    fields = replace(FIELDS, time_format="%a, %d %b %Y %H:%M:%S %z")
    done = prepared(tmp_path, write_jsonl(tmp_path / "x.jsonl", rows), fields=fields)
    assert words_of(done.store)[0].split()[1::3] == ["b", "a"]


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


def test_ids_that_differ_only_in_spaces_or_composition_are_one_user(tmp_path):
    rows = [{"who": w, "what": "a", "when": 0} for w in ("Zoe\u0308", " Zoë\n", "Zoë\u00a0", "zoë", 7, "7")]
    done = prepared(tmp_path, write_jsonl(tmp_path / "x.jsonl", rows), shards=3)
    assert sorted(len(w.split()) // 3 for w in words_of(done.store)) == [1, 2, 3]


EQUAL_NUMBERS = [
    ["1", "1.0", 1, 1.0, "+1", "01", " 1.00 "],
    ["0", "-0.0", -0.0, "0.", "-0"],
    ["-7.5", -7.50, "-07.500"],
    ["12345678901234567891", "12345678901234567891.0"],
    ["10000000000000000", 1e16, "1e16", "1.0E+16"],
    ["12.5", "1.25e1"],
    ["12345678901234567892", "12345678901234567892.00"],
]


def test_ids_that_are_equal_numbers_are_one_user_and_the_merges_are_counted(tmp_path):
    ids = [spelling for spellings in EQUAL_NUMBERS for spelling in spellings]
    others = ["a1", "1e", "1.2.3", "--1", "1e999", "2e999", "0x10", "1-2", "10", "100", "1.05", "1.5"]
    lines = write_jsonl(tmp_path / "p.jsonl", [{"who": who, "what": "a", "when": 0} for who in ids + others])
    done = prepared(tmp_path, lines, shards=3)
    assert done.counts["users"]["users_seen"] == len(EQUAL_NUMBERS) + len(others)
    assert done.counts["rows"]["merged_users"] == len(EQUAL_NUMBERS)


def test_excluded_users_are_gone_whole_and_their_ids_are_matched_as_users_are(tmp_path):
    done = prepared(tmp_path, write_jsonl(tmp_path / "x.jsonl", POSTS), excluded=(" ann ", "nobody"))
    assert words_of(done.store) == [BOB]
    assert done.counts["rows"]["excluded"] == 3


def test_neither_ids_nor_text_are_in_the_store_and_the_map_is_apart_on_request(tmp_path):
    rows = [{"who": f"secret-id-{i}", "what": "unspeakable a", "when": 0} for i in range(40)]
    done = prepared(
        tmp_path,
        write_jsonl(tmp_path / "x.jsonl", rows),
        shards=3,
        splits=SplitRule(held_out=0.3),
        user_map=tmp_path / "map.json",
    )
    for file in done.store.path.rglob("*"):
        if file.is_file():
            assert b"secret-id" not in file.read_bytes()
            assert b"unspeakable" not in file.read_bytes()
    entries = json.loads((tmp_path / "map.json").read_text())
    assert stat.S_IMODE(os.stat(tmp_path / "map.json").st_mode) == 0o600
    assert sorted(e["user"] for e in entries) == sorted(r["who"] for r in rows)
    for split in ("train", "held_out"):
        assert [e["number"] for e in entries if e["split"] == split] == list(
            range(getattr(done.store, split).num_users)
        )


def test_the_map_names_the_user_that_has_the_tokens(tmp_path):
    rows = [{"who": f"u{i}", "what": "a " * (i + 1), "when": 0} for i in range(20)]
    done = prepared(tmp_path, write_jsonl(tmp_path / "x.jsonl", rows), shards=4, user_map=tmp_path / "map.json")
    for entry in json.loads((tmp_path / "map.json").read_text()):
        words = done.store.train.tokens(entry["number"])
        assert len(words) - 2 == int(entry["user"][1:]) + 1


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_the_map_has_the_format_that_its_name_says(tmp_path, suffix):
    users = ["plain", 'with "quotes", and a comma', "Zoë"]
    rows = [{"who": user, "what": "a b", "when": 0} for user in users]
    file = tmp_path / f"map{suffix}"
    prepared(tmp_path, write_jsonl(tmp_path / "x.jsonl", rows), splits=SplitRule(held_out=0.0), user_map=file)
    written = duckdb.sql(f"SELECT split, number, \"user\" FROM '{file}' ORDER BY number").fetchall()
    assert sorted(row[2] for row in written) == sorted(users)
    assert [row[:2] for row in written] == [("train", i) for i in range(3)]
    assert file.stat().st_mode & 0o077 == 0


def test_a_map_in_an_unknown_format_is_refused_before_anything_is_read(tmp_path):
    with pytest.raises(InputError, match=r"\.csv, \.json, \.jsonl, \.parquet"):
        prepared(tmp_path, write_jsonl(tmp_path / "x.jsonl", []), user_map=tmp_path / "map.txt")
    assert not (tmp_path / "store.partial").exists()


def test_users_are_split_by_their_ids_whatever_else_is_in_the_input(tmp_path):
    rule = SplitRule(held_out=0.3, public=0.2)
    rows = [{"who": f"u{i}", "what": "a", "when": 0} for i in range(60)]
    done = prepared(tmp_path, write_jsonl(tmp_path / "x.jsonl", rows), splits=rule, shards=2)
    wanted = [rule.split_of(r["who"]) for r in rows]
    assert done.store.train.num_users == wanted.count("train")
    assert done.store.held_out.num_users == wanted.count("held_out")
    assert done.store.public.num_users == wanted.count("public")


def test_test_posts_come_from_held_out_users_only(tmp_path):
    rule = SplitRule(held_out=0.5)
    rows = [
        {"who": u, "what": "a b c" if rule.split_of(u) == "held_out" else "d e f", "when": 0}
        for u in map(str, range(40))
    ]
    done = prepared(tmp_path, write_jsonl(tmp_path / "x.jsonl", rows), splits=rule, test_tokens=10, shards=2)
    assert sum(len(w.split()) - 1 for w in words_of(done.store, "test_posts")) == 10
    assert not {"d", "e", "f"} & set(" ".join(words_of(done.store, "test_posts")).split())


def test_posts_under_several_users_are_counted_and_dropped_on_request(tmp_path):
    rows = [
        {"who": "ann", "what": "a b a b", "when": 0},
        {"who": "bob", "what": "a b a b", "when": 0},
        {"who": "bob", "what": "c c c c", "when": 1},
    ]
    rows += [{"who": "ann", "what": "c", "when": 2}, {"who": "bob", "what": "c", "when": 2}, rows[2]]
    file = write_jsonl(tmp_path / "x.jsonl", rows)
    kept = prepared(tmp_path, file, duplicate_chars=5)
    assert kept.counts["duplicate_posts"] == 2
    assert "a b a b" in words_of(kept.store)[0]
    dropped = prepared(tmp_path, file, out="dropped", duplicate_chars=5, drop_duplicates=True)
    # one's own repetition stays, and so does what is too short to be a copy
    assert words_of(dropped.store) == ["<BOS> c <EOS>", "<BOS> c c c c <EOS> <BOS> c c c c <EOS> <BOS> c <EOS>"]
    assert dropped.store.info["drop_duplicates"] is True


def test_quotes_are_stripped_on_request(tmp_path):
    rows = [{"who": "ann", "what": "> a a a\nb", "when": 0}]
    done = prepared(tmp_path, write_jsonl(tmp_path / "x.jsonl", rows), encoding=EncodingOptions(strip_quotes=True))
    assert words_of(done.store) == ["<BOS> b <EOS>"]


def test_any_number_of_shards_and_workers_gives_the_same_users(tmp_path):
    rows = [{"who": f"u{i % 50}", "what": "a " * (i % 7 + 1), "when": i} for i in range(400)]
    file = write_jsonl(tmp_path / "x.jsonl", rows)
    one = prepared(tmp_path, file, out="one", shards=1)
    five = prepared(tmp_path, file, out="five", shards=5, backend=DuckDBBackend(workers=2))
    assert sorted(words_of(one.store)) == sorted(words_of(five.store))
    assert one.counts == five.counts


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
    choice = PrivateVocabulary(epsilon=2.0, delta=1e-10)  # 2,700 users with a word of their own: none slips through
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


def test_a_draw_is_charged_before_its_noise_is_drawn(tmp_path, monkeypatch):
    from unheard.corpus import private_vocabulary

    with monkeypatch.context() as patch:
        patch.setattr(private_vocabulary, "secure_generator", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            private_words(tmp_path)
    assert len(private_words(tmp_path).store.vocabulary_events) == 4


def test_a_canary_that_no_vocabulary_can_have_fails_before_the_draw(tmp_path):
    with pytest.raises(InputError, match="no vocabulary has"):
        private_words(tmp_path, canaries=(Canary(text="x" * 65),))
    assert not (tmp_path / "store.partial").exists()


def test_a_stopped_prepare_is_no_store_and_goes_on_where_it_was(tmp_path, monkeypatch):
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


def test_another_question_does_not_go_on_from_the_old_answer(tmp_path, monkeypatch):
    file = write_jsonl(tmp_path / "x.jsonl", POSTS)
    with monkeypatch.context() as patch:
        patch.setattr(EncodeShard, "__call__", lambda self, shard, rows: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prepared(tmp_path, file)
    write_jsonl(tmp_path / "x.jsonl", POSTS[:2])
    assert words_of(prepared(tmp_path, file).store) == ["<BOS> c c <EOS>", BOB]


def test_files_that_may_be_copied_hold_no_count_of_users(tmp_path):
    rows = [{"who": f"u{i}", "what": "a", "when": 0} for i in range(30)]
    few = prepared(tmp_path, write_jsonl(tmp_path / "few.jsonl", rows[:3]), out="1/s")
    many = prepared(tmp_path, write_jsonl(tmp_path / "many.jsonl", rows * 20), out="2/s", shards=3)
    assert (few.store.path / "corpus.json").read_bytes() == (many.store.path / "corpus.json").read_bytes()


def test_a_local_hugging_face_dataset_is_an_input(tmp_path):
    datasets = pytest.importorskip("datasets", reason="the extra `hub` is not installed")
    datasets.disable_progress_bars()
    datasets.Dataset.from_list(POSTS).save_to_disk(str(tmp_path / "saved"))
    assert words_of(prepared(tmp_path, tmp_path / "saved").store) == [ANN, BOB]
    with pytest.raises(InputError, match="has no column"):
        prepared(tmp_path, tmp_path / "saved", out="x", fields=replace(FIELDS, text="body"))


def test_the_default_corpus_is_the_installed_package_through_the_same_pipeline(tmp_path):
    pytest.importorskip("chitchat_dataset", reason="the extra `demo` is not installed")
    store = unheard.prepare("chitchat", tmp_path / "chitchat")
    # the package: 1,315 senders; counted apart from this code with json and a dictionary
    assert store.counts["users"]["users_seen"] == 1315
    assert store.counts["rows"]["rows"] == 258145
    lengths = np.array([np.count_nonzero(store.train.tokens(k) != BOS) for k in range(store.train.num_users)])
    assert lengths.min() >= 100
    assert lengths.max() == 1600
    assert word_list(tmp_path).path  # the folder is still writable: nothing was left locked


def test_the_noise_of_a_private_vocabulary_comes_from_the_secure_generator(tmp_path, monkeypatch):
    class Loud:
        def standard_normal(self, n):
            return np.full(n, 1e6)  # so much that every word passes

    monkeypatch.setattr("unheard.corpus.private_vocabulary.secure_generator", Loud)
    choice = PrivateVocabulary(epsilon=1.0, delta=1e-6)
    done = prepared(tmp_path, write_jsonl(tmp_path / "x.jsonl", POSTS), vocabulary=choice)
    assert {"a", "b", "c"} <= set(done.store.vocabulary.words)


def test_a_notebook_without_widgets_can_prepare(tmp_path, monkeypatch):
    """There DuckDB refuses to switch on its progress bar, which would not be shown anyway."""
    connect = duckdb.connect

    class InNotebook:
        def __init__(self, *arguments):
            self.database = connect(*arguments)

        def execute(self, query, *arguments):
            if "progress_bar=" in query:
                raise duckdb.InvalidInputException("required package 'ipywidgets' is missing")
            return self.database.execute(query, *arguments)

        def __getattr__(self, name):
            return getattr(self.database, name)

    monkeypatch.setattr("unheard.corpus.readers.duckdb.connect", InNotebook)
    rows = [{"who": "a", "what": "hello there", "when": 0}]
    assert prepared(tmp_path, write_jsonl(tmp_path / "x.jsonl", rows)).store.train.num_users == 1


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
