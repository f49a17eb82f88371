"""Malformed rows are counted and the others kept; unusable input raises an error that says what to do."""

import errno
import gzip
import json
import os
import resource
import shutil
import sqlite3
import subprocess
from dataclasses import replace

import pytest

from tests.corpus.inputs import (
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
from unheard.corpus import encode
from unheard.corpus.encode import Encoder, EncodingOptions
from unheard.corpus.grouping import SplitRule
from unheard.corpus.private_vocabulary import CachedSplitter
from unheard.corpus.sources import find_sources, zstd_window
from unheard.corpus.store import ShardWriter, TokenStore
from unheard.corpus.tokenizers import WordTokenizer
from unheard.corpus.vocabulary import Vocabulary
from unheard.errors import CorpusError, CorpusMissing, InputError

GOOD = {"who": "ann", "what": "a", "when": 1}


def test_broken_lines_are_counted_apart_from_rows_that_lack_a_field(tmp_path):
    broken = ['{"who": "ann", "what": "b"', "not json", "[1]", '"s"', '{"who": "ann", "what": "\\ud800"}', ""]
    no_user = ["", '"who": "", ', '"who": "  ", ', '"who": null, ', '"who": ["x"], ']
    no_text = ["", ', "what": ""', ', "what": " \\n"', ', "what": 5', ', "what": null']
    lines = [json.dumps(GOOD), *broken]
    lines += [f'{{{field}"what": "a"}}' for field in no_user]
    lines += [f'{{"who": "ann"{field}}}' for field in no_text]
    file = tmp_path / "x.jsonl"
    file.write_bytes(
        "\n".join(lines).encode() + b'\n{"who": "ann", "what": "\xff\xfe"}\n' + json.dumps({**GOOD, "when": 2}).encode()
    )
    done = prepared(tmp_path, file)
    rows = done.counts["rows"]
    assert (rows["malformed"], rows["no_user"], rows["no_text"], rows["kept"]) == (6, 5, 5, 2)
    assert rows["rows"] == 18
    assert words_of(done.store) == ["<BOS> a <EOS> <BOS> a <EOS>"]


def test_broken_csv_rows_are_counted_apart_from_short_ones(tmp_path):
    file = tmp_path / "x.csv"
    good = b'who,what,when\nann,"a, a",1\nfay,"b\nb",4\nguy,a\x00b,5\n"iv""an",c,8\n'
    short, lacking = b"carl\n", b",a,6\nhal,,7\n"
    broken = b'dan,x,y,z\neve,\xff\xfe bad,3\nzed,"never closed,9\n'
    file.write_bytes(good + short + lacking + broken)
    done = prepared(tmp_path, file)
    rows = done.counts["rows"]
    assert (rows["malformed"], rows["no_user"], rows["no_text"], rows["kept"]) == (3, 1, 2, 4)
    assert words_of(done.store) == ["<BOS> a , a <EOS>", "<BOS> b b <EOS>", "<BOS> a b <EOS>", "<BOS> c <EOS>"]


def test_a_csv_with_two_kinds_of_line_ends_is_read(tmp_path):
    (tmp_path / "x.csv").write_bytes(b'who,what,when\r\nann,"a\nb",1\r\nbob,b,2\ncarl,c,3\r\n')
    assert words_of(prepared(tmp_path, tmp_path / "x.csv").store) == [
        "<BOS> a b <EOS>",
        "<BOS> b <EOS>",
        "<BOS> c <EOS>",
    ]


@pytest.mark.parametrize("name", ["x.jsonl", "x.csv", "x.jsonl.gz"])
def test_an_empty_file_is_refused_alone_and_accepted_beside_others(tmp_path, name):
    file = tmp_path / name
    if name.endswith(".gz"):
        gzip.open(file, "wb").close()
    else:
        file.touch()
    with pytest.raises(InputError, match=r"No usable row.*It is empty"):
        prepared(tmp_path, file)
    assert words_of(prepared(tmp_path, [file, write_jsonl(tmp_path / "y.jsonl", POSTS[1:2])]).store) == [BOB]


@pytest.mark.parametrize(
    "content", [b'[{"who": "ann", "what": "a", "when": 0}]', b'{"who": "ann", "what": "\xe9", "when": 0}']
)
def test_where_every_row_is_malformed_encoding_and_kind_are_suspected(tmp_path, content):
    (tmp_path / "x.jsonl").write_bytes(content + b"\n")
    with pytest.raises(InputError, match="Check that it is UTF-8"):
        prepared(tmp_path, tmp_path / "x.jsonl")


@pytest.mark.parametrize(
    ("name", "write"),
    [("x.jsonl", write_jsonl), ("x.csv", write_csv), ("x.parquet", write_with_duckdb), ("x.db", write_sqlite)],
)
def test_a_missing_column_is_refused_with_the_columns_there_are(tmp_path, name, write):
    with pytest.raises(InputError, match=r"no column 'whom'.*Did you mean 'who'\?.*what, when, who"):
        prepared(tmp_path, write(tmp_path / name, POSTS), fields=replace(FIELDS, user="whom"))
    assert not (tmp_path / "store.partial").exists()


def test_a_json_path_reaches_into_a_row(tmp_path):
    rows = [{"by": {"name": "ann"}, "a/b": "a", "when": 0}]
    done = prepared(
        tmp_path, write_jsonl(tmp_path / "x.jsonl", rows), fields=replace(FIELDS, user="/by/name", text="a/b")
    )
    assert words_of(done.store) == ["<BOS> a <EOS>"]


def test_a_zstd_window_above_27_bits_is_refused_with_the_cure(tmp_path):
    file = tmp_path / "x.jsonl.zst"
    # a frame header (RFC 8878): magic, no single segment, window descriptor with exponent 21: 2^31 bytes
    file.write_bytes(b"\x28\xb5\x2f\xfd\x00" + bytes([21 << 3]) + bytes(10))
    assert zstd_window(file) == 1 << 31
    with pytest.raises(InputError, match=r"2048 MiB.*zstd --long=27"):
        find_sources([str(file)])


@pytest.mark.skipif(shutil.which("zstd") is None, reason="the zstd program is not installed")
def test_zstd_windows_of_27_and_31_bits_as_the_program_writes_them(tmp_path):
    write_jsonl(tmp_path / "x.jsonl", [{**GOOD, "what": "a " * 50}] * 20)
    for bits in (27, 31):
        command = f"cat x.jsonl | zstd -q --ultra --long={bits} -o {bits}.jsonl.zst"
        subprocess.run(command, shell=True, check=True, cwd=tmp_path)
    assert prepared(tmp_path, tmp_path / "27.jsonl.zst").counts["rows"]["kept"] == 20
    with pytest.raises(InputError, match="zstd window"):
        prepared(tmp_path, tmp_path / "31.jsonl.zst", out="other")


def test_one_user_with_half_the_data_is_one_user(tmp_path, monkeypatch):
    monkeypatch.setattr("unheard.corpus.encode.BATCH_CHARS", 40)  # so that the user arrives in many pieces
    rows = [{"who": "giant", "what": "a b c", "when": i} for i in range(300)] + [
        {"who": f"u{i}", "what": "a", "when": 0} for i in range(20)
    ]
    done = prepared(tmp_path, write_jsonl(tmp_path / "x.jsonl", rows), shards=2)
    longest = max(words_of(done.store), key=len)
    assert longest == " ".join(["<BOS> a b c <EOS>"] * 300)
    assert done.store.train.num_users == 21


def test_thousands_of_users_with_one_word_each_are_all_kept(tmp_path):
    rows = [{"who": f"u{i}", "what": "a", "when": 0} for i in range(20_000)]
    done = prepared(tmp_path, write_jsonl(tmp_path / "x.jsonl", rows), shards=4)
    assert done.store.train.num_users == 20_000
    assert done.store.train.num_tokens == 60_000


def test_text_of_any_script_and_nul_bytes_goes_through(tmp_path):
    (tmp_path / "list.txt").write_text("שלום\nעולם\n👩\u200d👧\nمرحبا\n", encoding="utf-8")
    from unheard.corpus.vocabulary import FileVocabulary

    rows = [{"who": "عمر\0", "what": "\u202bשלום עולם\u202c 👩\u200d👧 x\0y مرحبا", "when": 0}]
    done = prepared(
        tmp_path, write_jsonl(tmp_path / "x.jsonl", rows), vocabulary=FileVocabulary(path=str(tmp_path / "list.txt"))
    )
    assert done.store.train.tokens(0).tolist() == [0, 3, 4, 5, 2, 2, 6, 1]


def test_sqlite_text_that_is_no_utf8_is_counted(tmp_path):
    file = write_sqlite(tmp_path / "x.db", POSTS[1:2])
    connection = sqlite3.connect(file)
    connection.execute("INSERT INTO posts VALUES ('ann', CAST(x'fffe' AS TEXT), 1), ('ann', NULL, 2), (5, 'a', 3)")
    connection.commit()
    connection.close()
    done = prepared(tmp_path, file)
    assert done.counts["rows"]["malformed"] == 1
    assert done.counts["rows"]["no_text"] == 1
    assert done.store.train.num_users == 2


def test_a_database_with_several_tables_asks_which(tmp_path):
    file = write_sqlite(tmp_path / "x.db", POSTS)
    connection = sqlite3.connect(file)
    connection.execute("CREATE TABLE other (x)")
    connection.commit()
    connection.close()
    with pytest.raises(InputError, match=r"2 tables \(other, posts\): choose one with --table"):
        prepared(tmp_path, file)
    with pytest.raises(InputError, match="Did you mean 'posts'"):
        prepared(tmp_path, file, fields=replace(FIELDS, table="post"))
    assert prepared(tmp_path, file, fields=replace(FIELDS, table="posts")).store.train.num_users == 2


def test_inputs_that_are_not_there_or_not_known_are_refused(tmp_path):
    write_jsonl(tmp_path / "posts.jsonl", POSTS)
    (tmp_path / "notes.md").write_text("x")
    (tmp_path / "fake.db").write_text("x" * 40)
    (tmp_path / "empty").mkdir()
    for name, message in [
        ("post.jsonl", "Did you mean 'posts.jsonl'"),
        ("notes.md", "--format"),
        ("fake.db", "neither an SQLite nor a DuckDB"),
        ("empty", "no file of a known kind"),
        ("nowhere/x.jsonl", "no folder"),
    ]:
        with pytest.raises(InputError, match=message):
            find_sources([str(tmp_path / name)])
    with pytest.raises(InputError, match="Did you mean 'jsonl'"):
        find_sources([str(tmp_path / "posts.jsonl")], "jsnl")


def test_a_name_that_says_nothing_is_read_as_the_format_given(tmp_path):
    write_jsonl(tmp_path / "dump.txt", POSTS)
    assert prepared(tmp_path, tmp_path / "dump.txt", given="jsonl").store.train.num_users == 2


def test_a_damaged_file_is_refused_by_name(tmp_path):
    file = write_with_duckdb(tmp_path / "x.parquet", POSTS)
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(InputError, match=r"Cannot read .*x\.parquet"):
        prepared(tmp_path, file)


def test_a_full_disk_is_a_sentence_and_the_work_goes_on_afterwards(tmp_path, monkeypatch):
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


@pytest.mark.parametrize(
    ("name", "where"), [("x.jsonl", ", line 4,"), ("x.jsonl.gz", ", line 4,"), ("x.json", "a record")]
)
def test_a_line_that_is_too_long_is_refused_by_its_number(tmp_path, name, where):
    rows = [json.dumps(row) for row in (GOOD, GOOD, GOOD, {**GOOD, "what": "a" * (40 << 20)}, GOOD)]
    file = tmp_path / name
    text = "\n".join(rows) if name != "x.json" else f"[{','.join(rows)}]"
    file.write_bytes(gzip.compress(text.encode(), 1) if name.endswith(".gz") else text.encode())
    with pytest.raises(InputError, match=rf"{name}.*{where}.*Cut its text"):
        prepared(tmp_path, file)


def test_reading_a_long_line_holds_little_of_it(tmp_path):
    """A line of 2 GB must not come into memory to find its end."""
    file = tmp_path / "x.jsonl"
    with open(file, "wb") as out:
        out.truncate(400 << 20)  # one line of zeros, without its bytes on the disk
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InputError, match="line 1,"):
        prepared(tmp_path, file)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10  # KiB


def test_a_csv_file_with_too_many_columns_is_refused(tmp_path):
    columns = ["who", "what", "when", *(f"c{i}" for i in range(1000))]
    file = write_csv(tmp_path / "x.csv", [dict.fromkeys(columns, "1")])
    with pytest.raises(InputError, match="line 1: 1003 columns, of which at most 1000"):
        prepared(tmp_path, file)
    assert prepared(tmp_path, write_csv(tmp_path / "x.csv", [dict.fromkeys(columns[:1000], "1")])).counts["rows"][
        "kept"
    ]


def test_a_very_long_text_is_encoded_in_pieces_without_a_difference(monkeypatch):
    encoder = Encoder(WordTokenizer(), Vocabulary.of(["a", "b", "!"]))
    texts = ["a b! " * 40, "", "b\tb\na", "a" * 300 + " b"]
    whole = [part.tolist() for part in encoder.encode(texts)]
    monkeypatch.setattr(encode, "BATCH_CHARS", 7)
    assert [part.tolist() for part in encoder.encode(texts)] == whole
    assert CachedSplitter(WordTokenizer())("a b! " * 40) == ["a", "b", "!"] * 40
