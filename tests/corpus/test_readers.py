"""The quick and the thorough reader of JSON lines give the same rows for any content."""

import json

import duckdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.corpus.inputs import prepared, words_of, write_jsonl
from unheard.corpus import readers as json_rows
from unheard.corpus.sources import Fields, FileBatch, find_sources, make_batches

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


@settings(max_examples=100, deadline=None)
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
