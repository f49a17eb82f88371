"""Rows of every format are read, checked and normalised: malformed rows are counted, and one person has one id."""

import gzip
import json
from dataclasses import replace
from types import SimpleNamespace

import duckdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
from unheard.corpus import readers as json_rows
from unheard.corpus.canaries import read_canary_file
from unheard.corpus.prepare import read_user_ids
from unheard.corpus.sources import Fields, FileBatch, find_sources, make_batches
from unheard.corpus.vocabulary import vocabulary_from_file
from unheard.errors import InputError

VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=8), st.just("\\ud800"),
    st.lists(st.integers(), max_size=2), st.fixed_dictionaries({"name": st.text(max_size=4)}),
)  # fmt: skip
OBJECTS = st.dictionaries(st.sampled_from(["who", "what", "when", "Who", "other", "a/b"]), VALUES).map(json.dumps)
LINES = st.one_of(
    OBJECTS.map(str.encode),
    OBJECTS.map(lambda line: line.encode()[:-1]),
    st.binary(max_size=12).filter(lambda line: b"\n" not in line and b"\r" not in line),
    st.sampled_from([b"[1]", b'"s"', b"null", b"", b"   ", b'{"who": "x"} y', b'{"who": "\xff", "what": "a"}']),
)


def test_of_many_open_quotes_some_are_named_and_the_rest_are_counted():
    batch = SimpleNamespace(sources=[SimpleNamespace(path="x.csv")])
    spans = [(10 * i + 1, i + 1, i % 2 == 0) for i in range(json_rows._MAX_WARNINGS + 2)]
    *named, last = json_rows._warnings(batch, spans[::-1])  # pyright: ignore[reportArgumentType]
    assert len(named) == json_rows._MAX_WARNINGS
    assert all(words.startswith(f"x.csv, line {line}:") for words, (line, _, _) in zip(named, spans, strict=False))
    assert last == f"x.csv: 2 more such places, {spans[-1][1] + spans[-2][1]} lines."
    assert len(json_rows._warnings(batch, spans[:2])) == 2  # pyright: ignore[reportArgumentType]


@settings(max_examples=50, deadline=None)
@given(st.lists(LINES, max_size=8), st.sampled_from(["who", "/who/name", "a/b", "/a~1b"]))
def test_both_readers_see_the_same_rows(tmp_path_factory, lines, user):
    file = tmp_path_factory.mktemp("json") / "x.jsonl"
    file.write_bytes(b"\n".join([*lines, b'{"who": "x", "what": "x", "when": 1, "a/b": 1}\n']))
    (batch,) = make_batches(find_sources([str(file)]))
    fields = Fields(user=user, text="what", time="when")
    database = duckdb.connect(":memory:")
    quick = database.execute(json_rows._quick_sql(batch, fields)).fetchall()
    thorough = database.execute(json_rows._thorough_sql(batch, fields)).fetchall()
    decided = [row for row in zip(quick, thorough, strict=True) if row[0][0] is None]
    assert [row for row, _ in decided] == [row for _, row in decided]
    undecided = [t for q, t in zip(quick, thorough, strict=True) if q[0] is not None]
    broken = sum(t[0] == "malformed" for t in undecided)
    assert all(t[1:] == (None, None, None) for t in undecided if t[0] is None)
    assert sum(t[0] == "malformed" for t in thorough) == broken
    counted = json_rows.count_undecided(database, batch, fields)
    assert counted == {"malformed": broken, "no_user": len(undecided) - broken}


@pytest.mark.parametrize(("user", "text"), [("who", "WHO"), ("", "what"), ("/", "what")])
def test_fields_that_duckdb_takes_for_one_column_are_read_thoroughly(tmp_path, user, text):
    key = user.removeprefix("/")
    file = write_jsonl(tmp_path / "x.jsonl", [{key: "ann", text: "a b", "when": 1}])
    batch = FileBatch(number=0, sources=tuple(find_sources([str(file)])))
    fields = Fields(user=user, text=text, time="when")
    assert not json_rows.is_quick(batch, fields)
    assert words_of(prepared(tmp_path, file, fields=fields).store) == ["<BOS> a b <EOS>"]


ROWS = [{"who": f"u{i}", "what": f"a b c {i * 7919 % 1000}", "when": i} for i in range(20_000)]


def test_an_unclosed_quote_is_reported_with_its_line_and_rows_after_the_next_quote_are_kept(tmp_path):
    plain = "".join(f"u{i},a b,{i}\n" for i in range(30))
    opened = 'who,what,when\nann,a,1\nzed,"never closed,9\n' + plain
    (tmp_path / "x.csv").write_text(opened + 'bob,"b ""x""",2\n' + plain)
    done = prepared(tmp_path, tmp_path / "x.csv", out="one")
    (sentence,) = done.counts["noticed"]
    assert f"{tmp_path / 'x.csv'}, line 3: a quote opens" in sentence
    assert "32 lines from there were taken for one row, broken and left out" in sentence
    assert (done.counts["rows"]["kept"], done.counts["rows"]["malformed"]) == (31, 1)
    (tmp_path / "x.csv").write_text(opened)
    done = prepared(tmp_path, tmp_path / "x.csv", out="two")
    assert "line 3: a quote opens" in done.counts["noticed"][0]
    assert "31 lines" in done.counts["noticed"][0]
    (tmp_path / "x.csv").write_text(opened.replace("ann,a,1\n", ""))
    with pytest.raises(InputError, match=r"No usable row.*line 2: a quote opens"):
        prepared(tmp_path, tmp_path / "x.csv", out="three")


@pytest.mark.parametrize(("name", "mark"), [("x.csv", ","), ("x.tsv", "\t")])
@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_rows_inside_a_field_that_a_second_stray_quote_closes_are_reported(tmp_path, name, mark, ending):
    rows = "".join(f"u{i},a b,{i}\n" for i in range(30))
    text = f'who,what,when\nann,"a\nb\nc",1\nzed,"open,9\n{rows}bob,shut",2\n{rows}'
    (tmp_path / name).write_text(text.replace(",", mark).replace("\n", ending), newline="")
    done = prepared(tmp_path, tmp_path / name)
    (sentence,) = done.counts["noticed"]
    assert "line 5: a quote opens" in sentence
    assert "32 lines from there were taken for one row, which was kept" in sentence


def test_long_posts_in_quotes_are_not_reported(tmp_path):
    poem = "\n".join("roses are red, violets are blue" for _ in range(40))
    table = "\n".join("1,2,3,4" for _ in range(40))
    rows = [{"who": "ann", "what": poem, "when": 1}, {"who": "bob", "what": table, "when": 2}, ROWS[1]]
    file = write_csv(tmp_path / "x.csv", rows)
    with open(file, "ab") as more:
        more.write(b'eve,"a\xff' + b"\nb" * 40 + b'",3\r\n')  # malformed: the bytes are not UTF-8
    done = prepared(tmp_path, file)
    assert done.counts["noticed"] == []
    assert done.counts["rows"]["malformed"] == 1
    assert len(words_of(done.store)) == 3


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


@pytest.mark.parametrize(
    ("name", "delimiter", "message"),
    [
        ("x.csv", ";", "separated by semicolons.*Write it with commas or tabs"),
        ("x.csv", "|", "separated by vertical bars.*Write it with commas or tabs"),
        ("x.csv", "\t", "separated by tabs.*Add --format tsv"),
        ("x.tsv", ",", "separated by commas.*Add --format csv"),
    ],
)
def test_another_delimiter_is_named_with_its_remedy(tmp_path, name, delimiter, message):
    lines = [delimiter.join(words) for words in (("who", "what", "when"), ("ann", "a b", "1"))]
    (tmp_path / name).write_text("\ufeff" + "\n".join(lines), encoding="utf-8")
    with pytest.raises(InputError, match=message):
        prepared(tmp_path, tmp_path / name)


def test_a_json_path_reaches_into_a_row(tmp_path):
    rows = [{"by": {"name": "ann"}, "a/b": "a", "when": 0}]
    done = prepared(
        tmp_path, write_jsonl(tmp_path / "x.jsonl", rows), fields=replace(FIELDS, user="/by/name", text="a/b")
    )
    assert words_of(done.store) == ["<BOS> a <EOS>"]


def test_text_of_any_script_and_nul_bytes_goes_through(tmp_path):
    (tmp_path / "list.txt").write_text("שלום\nעולם\n👩\u200d👧\nمرحبا\n", encoding="utf-8")
    from unheard.corpus.vocabulary import FileVocabulary

    rows = [{"who": "عمر\0", "what": "\u202bשלום עולם\u202c 👩\u200d👧 x\0y مرحبا", "when": 0}]
    done = prepared(
        tmp_path, write_jsonl(tmp_path / "x.jsonl", rows), vocabulary=FileVocabulary(path=str(tmp_path / "list.txt"))
    )
    assert done.store.train.tokens(0).tolist() == [0, 3, 4, 5, 2, 2, 6, 1]


def test_a_damaged_file_is_refused_by_name(tmp_path):
    file = write_with_duckdb(tmp_path / "x.parquet", POSTS)
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(InputError, match=r"Cannot read .*x\.parquet"):
        prepared(tmp_path, file)


def test_a_csv_file_with_too_many_columns_is_refused(tmp_path):
    columns = ["who", "what", "when", *(f"c{i}" for i in range(1000))]
    file = write_csv(tmp_path / "x.csv", [dict.fromkeys(columns, "1")])
    with pytest.raises(InputError, match="line 1: 1003 columns, of which at most 1000"):
        prepared(tmp_path, file)
    assert prepared(tmp_path, write_csv(tmp_path / "x.csv", [dict.fromkeys(columns[:1000], "1")])).counts["rows"][
        "kept"
    ]


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
    ["0.5", ".5", "+.50"],
    ["-0.5", "-.5"],
    ["-5", "-.5e1"],
    ["12345678901234567892", "12345678901234567892.00"],
]


def test_ids_that_are_equal_numbers_are_one_user_and_the_merges_are_counted(tmp_path):
    ids = [spelling for spellings in EQUAL_NUMBERS for spelling in spellings]
    others = ["a1", "1e", "1.2.3", "--1", "1e999", "2e999", "0x10", "1-2", "10", "100", "1.05", "1.5"]
    lines = write_jsonl(tmp_path / "p.jsonl", [{"who": who, "what": "a", "when": 0} for who in ids + others])
    done = prepared(tmp_path, lines, shards=3)
    assert done.counts["users"]["users_seen"] == len(EQUAL_NUMBERS) + len(others)
    assert done.counts["rows"]["merged_users"] == len(EQUAL_NUMBERS)


def test_a_huge_list_of_excluded_users_is_refused(tmp_path, monkeypatch):
    (tmp_path / "ids").write_bytes(b"ann\nbob\n")
    assert read_user_ids(tmp_path / "ids") == ("ann", "bob")
    monkeypatch.setattr("unheard.corpus.prepare.MAX_BYTES_OF_IDS", 1 << 20)
    (tmp_path / "ids").write_bytes(b"a" * (1 << 20) + b"b")
    with pytest.raises(InputError, match="not a list of user ids"):
        read_user_ids(tmp_path / "ids")


def test_excluded_users_are_gone_whole_and_their_ids_are_matched_as_users_are(tmp_path):
    done = prepared(tmp_path, write_jsonl(tmp_path / "x.jsonl", POSTS), excluded=(" ann ", "nobody"))
    assert words_of(done.store) == [BOB]
    assert done.counts["rows"]["excluded"] == 3


def test_an_id_is_excluded_in_every_spelling_of_its_number(tmp_path):
    """Who opted out as 1.0 is also the user 1."""
    ids = [spelling for spellings in EQUAL_NUMBERS for spelling in spellings]
    file = write_jsonl(tmp_path / "x.jsonl", [{"who": who, "what": "a", "when": 0} for who in [*ids, "bob"]])
    for position in (0, 1, -1):
        excluded = tuple(str(spellings[position]) for spellings in EQUAL_NUMBERS)
        done = prepared(tmp_path, file, excluded=excluded, out=f"store {position}")
        assert (done.counts["rows"]["excluded"], done.counts["users"]["users_seen"]) == (len(ids), 1)


LINE_ENDS = {
    "one line end each": "{}\n{}\n{}\n",
    "no line end after the last": "{}\n{}\n{}",
    "a blank line last": "{}\n{}\n{}\n\n",
    "blank lines between": "\n\n{}\n \t\n\n{}\n{}\n",
    "line ends of Windows": "{}\r\n{}\r\n{}\r\n",
    "line ends of Windows, none after the last": "{}\r\n{}\r\n{}",
    "both kinds of line ends": "{}\r\n{}\n{}\r\n\r\n",
    "a byte-order mark": "\ufeff{}\n{}\n{}",
}
"""Ways to write three items into a file with one item on each line."""


@pytest.mark.parametrize("lines", LINE_ENDS.values(), ids=LINE_ENDS)
def test_every_id_of_a_file_is_excluded_however_its_lines_end(tmp_path, lines):
    """The first, the middle and the last one. Who opted out must not be trained on because of a line end."""
    (tmp_path / "ids.txt").write_bytes(lines.format("ann", "Zoë", "9").encode())
    rows = [{"who": who, "what": "a", "when": 1} for who in ("ann", "Zoë", "9")]
    file = write_jsonl(tmp_path / "x.jsonl", [*rows, {"who": "bob", "what": "b", "when": 1}])
    done = prepared(tmp_path, file, excluded=read_user_ids(tmp_path / "ids.txt"))
    assert words_of(done.store) == ["<BOS> b <EOS>"]
    assert (done.counts["rows"]["excluded"], done.counts["rows"]["kept"]) == (3, 1)


@pytest.mark.parametrize("lines", LINE_ENDS.values(), ids=LINE_ENDS)
def test_every_word_of_a_list_is_read_however_its_lines_end(tmp_path, lines):
    (tmp_path / "words.txt").write_bytes(lines.format("the", "naïve", "end").encode())
    words = vocabulary_from_file(tmp_path / "words.txt").words
    assert [word for word in words[3:] if word.strip()] == ["the", "naïve", "end"]


@pytest.mark.parametrize("lines", [text for name, text in LINE_ENDS.items() if "mark" not in name])
def test_every_canary_of_a_file_is_read_however_its_lines_end(tmp_path, lines):
    texts = ("the first", "the naïve one", "the last")
    (tmp_path / "canaries.jsonl").write_bytes(
        lines.format(*(json.dumps({"text": text, "users": n}) for n, text in enumerate(texts, start=1))).encode()
    )
    read = read_canary_file(tmp_path / "canaries.jsonl")
    assert [(canary.text, canary.users) for canary in read] == [(text, n) for n, text in enumerate(texts, start=1)]


def test_a_notebook_without_widgets_can_prepare(tmp_path, monkeypatch):
    """In such a notebook DuckDB raises an error if its progress bar is enabled."""
    connect = duckdb.connect

    class InNotebook:
        def __init__(self, *arguments):
            self.database = connect(*arguments)

        def execute(self, query, *arguments):
            if "progress_bar=" in query:
                raise duckdb.InvalidInputException("required package 'ipywidgets' is missing")
            return self.database.execute(query, *arguments)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.database.close()

        def __getattr__(self, name):
            return getattr(self.database, name)

    monkeypatch.setattr("unheard.corpus.readers.duckdb.connect", InNotebook)
    rows = [{"who": "a", "what": "hello there", "when": 0}]
    assert prepared(tmp_path, write_jsonl(tmp_path / "x.jsonl", rows)).store.train.num_users == 1
