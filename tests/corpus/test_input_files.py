"""Byte ranges of large files, truncated compressed files, and quotes in CSV files that are not closed."""

import gzip
import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.corpus.inputs import prepared, words_of, write_csv, write_jsonl
from unheard.corpus.sources import (
    FileRange,
    find_sources,
    gzip_is_truncated,
    line_boundaries,
    make_batches,
    zstd_is_truncated,
)
from unheard.errors import InputError


@given(
    lines=st.lists(st.binary(max_size=9).map(lambda b: b.replace(b"\n", b"-")), max_size=12), size=st.integers(1, 30)
)
def test_pieces_together_are_the_file_and_end_at_line_ends(tmp_path_factory, lines, size):
    file = tmp_path_factory.mktemp("p") / "x"
    file.write_bytes(b"\n".join(lines))
    places = line_boundaries(str(file), size)
    pieces = [FileRange(str(file), a, b) for a, b in itertools.pairwise(places)]
    read = [piece.read() for piece in pieces]
    for piece in pieces:
        piece.close()
    assert b"".join(read) == file.read_bytes()
    assert all(part.endswith(b"\n") for part in read[:-1])


def test_a_piece_seeks_within_itself(tmp_path):
    (tmp_path / "x").write_bytes(b"0123456789")
    with FileRange(str(tmp_path / "x"), 2, 8) as piece:
        assert piece.seek(1) == 1
        assert piece.read(2) == b"34"
        assert piece.tell() == 3
        assert piece.seek(-1, 2) == 5
        assert piece.read(99) == b"7"
        assert piece.read() == b""


def test_a_large_file_in_pieces_gives_the_same_store(tmp_path, monkeypatch):
    rows = [{"who": f"u{i % 7}", "what": "a b c"[: 1 + 2 * (i % 3)], "when": 0} for i in range(300)]
    file = write_jsonl(tmp_path / "x.jsonl", rows)
    whole = prepared(tmp_path, file, out="whole")
    monkeypatch.setattr("unheard.corpus.sources._BATCH_BYTES", 1000)
    assert len(make_batches(find_sources([str(file)]))) > 10
    pieces = prepared(tmp_path, file, out="pieces")
    # all times are equal: the order of the input must survive the cuts
    assert words_of(whole.store) == words_of(pieces.store)
    assert whole.counts["rows"] == pieces.counts["rows"]


@pytest.mark.parametrize("name", ["x.jsonl", "x.json"])
@pytest.mark.parametrize("batch_bytes", [1000, 1 << 20])
def test_a_byte_order_mark_costs_no_row(tmp_path, monkeypatch, name, batch_bytes):
    rows = [{"who": f"u{i % 7}", "what": "a b c", "when": i} for i in range(100)]
    text = json.dumps(rows) if name == "x.json" else "\n".join(map(json.dumps, rows))
    (tmp_path / name).write_text(text, encoding="utf-8")
    plain = prepared(tmp_path, tmp_path / name, out="plain")
    (tmp_path / name).write_text(text, encoding="utf-8-sig")
    monkeypatch.setattr("unheard.corpus.sources._BATCH_BYTES", batch_bytes)
    marked = prepared(tmp_path, tmp_path / name, out="marked")
    assert words_of(marked.store) == words_of(plain.store)
    assert marked.counts["rows"] == plain.counts["rows"]


@pytest.mark.parametrize("name", ["x.jsonl.gz", "x.csv"])
def test_only_plain_json_lines_are_cut(tmp_path, monkeypatch, name):
    monkeypatch.setattr("unheard.corpus.sources._BATCH_BYTES", 10)
    (tmp_path / name).write_bytes(b"x" * 500)
    assert [len(b.sources) for b in make_batches(find_sources([str(tmp_path / name)]))] == [1]


ROWS = [{"who": f"u{i}", "what": f"a b c {i * 7919 % 1000}", "when": i} for i in range(20_000)]


def pack(path, kind):
    """Compress a file; return the new path and its bytes."""
    if kind == "gz":
        packed = path.with_name(path.name + ".gz")
        packed.write_bytes(gzip.compress(path.read_bytes(), mtime=0))
    else:
        packed = path.with_name(path.name + ".zst")
        import duckdb

        text = f"read_csv('{path}', columns={{'line': 'VARCHAR'}}, delim=chr(1), quote='', escape='', header=false)"
        options = "FORMAT csv, COMPRESSION zstd, HEADER false, QUOTE '', ESCAPE '', DELIMITER '\x01'"
        duckdb.connect().execute(f"COPY (SELECT line FROM {text}) TO '{packed}' ({options})")
    path.unlink()
    return packed, packed.read_bytes()


@pytest.mark.parametrize("kind", ["gz", "zst"])
@pytest.mark.parametrize("write", [write_jsonl, write_csv])
def test_a_file_that_breaks_off_is_named_and_its_rows_are_kept(tmp_path, kind, write):
    file = write(tmp_path / ("x.jsonl" if write is write_jsonl else "x.csv"), ROWS)
    packed, whole = pack(file, kind)
    assert prepared(tmp_path, packed, out="whole").counts["noticed"] == []
    packed.write_bytes(whole[: len(whole) * 2 // 3])
    done = prepared(tmp_path, packed, out="torn")
    (sentence,) = done.counts["noticed"]
    assert sentence.startswith(f"{packed} breaks off: its end is missing")
    assert 5_000 < done.counts["rows"]["kept"] < len(ROWS)
    assert done.counts["rows"]["malformed"] + done.counts["rows"]["no_text"] <= 1


def test_every_tear_is_seen_and_no_whole_file_is_called_torn(tmp_path):
    file = write_jsonl(tmp_path / "x.jsonl", ROWS[:50])
    text = file.read_bytes()
    for kind, is_torn in (("gz", gzip_is_truncated), ("zst", zstd_is_truncated)):
        file.write_bytes(text)
        packed, whole = pack(file, kind)
        for good in (whole, whole + whole, b""):
            packed.write_bytes(good)
            assert not is_torn(str(packed))
        for end in range(1, len(whole)):
            for front in (b"", whole):
                packed.write_bytes(front + whole[:end])
                assert is_torn(str(packed)), (kind, end)
    packed.write_bytes(b"\x50\x2a\x4d\x18\x02\x00\x00\x00hi" + whole)
    assert not zstd_is_truncated(str(packed))  # a frame that is skipped


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
        more.write(b'eve,"a\xff' + b"\nb" * 40 + b'",3\r\n')  # malformed, for its bytes
    done = prepared(tmp_path, file)
    assert done.counts["noticed"] == []
    assert done.counts["rows"]["malformed"] == 1
    assert len(words_of(done.store)) == 3
