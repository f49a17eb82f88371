"""A file read in pieces is the file."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.corpus.making import made, words_of, write_jsonl
from unheard.corpus.file_ranges import Piece, cut_places
from unheard.corpus.scan import batches
from unheard.corpus.sources import find_sources


@given(
    lines=st.lists(st.binary(max_size=9).map(lambda b: b.replace(b"\n", b"-")), max_size=12), size=st.integers(1, 30)
)
def test_pieces_together_are_the_file_and_end_at_line_ends(tmp_path_factory, lines, size):
    file = tmp_path_factory.mktemp("p") / "x"
    file.write_bytes(b"\n".join(lines))
    places = cut_places(str(file), size)
    pieces = [Piece(str(file), a, b) for a, b in itertools.pairwise(places)]
    read = [piece.read() for piece in pieces]
    for piece in pieces:
        piece.close()
    assert b"".join(read) == file.read_bytes()
    assert all(part.endswith(b"\n") for part in read[:-1])


def test_a_piece_seeks_within_itself(tmp_path):
    (tmp_path / "x").write_bytes(b"0123456789")
    with Piece(str(tmp_path / "x"), 2, 8) as piece:
        assert piece.seek(1) == 1
        assert piece.read(2) == b"34"
        assert piece.tell() == 3
        assert piece.seek(-1, 2) == 5
        assert piece.read(99) == b"7"
        assert piece.read() == b""


def test_a_large_file_in_pieces_gives_the_same_store(tmp_path, monkeypatch):
    rows = [{"who": f"u{i % 7}", "what": "a b c"[: 1 + 2 * (i % 3)], "when": 0} for i in range(300)]
    file = write_jsonl(tmp_path / "x.jsonl", rows)
    whole = made(tmp_path, file, out="whole")
    monkeypatch.setattr("unheard.corpus.scan._BATCH_BYTES", 1000)
    assert len(batches(find_sources([str(file)]))) > 10
    pieces = made(tmp_path, file, out="pieces")
    # all times are equal: the order of the input must survive the cuts
    assert words_of(whole.store) == words_of(pieces.store)
    assert whole.counts["rows"] == pieces.counts["rows"]


@pytest.mark.parametrize("name", ["x.jsonl", "x.json"])
@pytest.mark.parametrize("batch_bytes", [1000, 1 << 20])
def test_a_byte_order_mark_costs_no_row(tmp_path, monkeypatch, name, batch_bytes):
    rows = [{"who": f"u{i % 7}", "what": "a b c", "when": i} for i in range(100)]
    text = json.dumps(rows) if name == "x.json" else "\n".join(map(json.dumps, rows))
    (tmp_path / name).write_text(text, encoding="utf-8")
    plain = made(tmp_path, tmp_path / name, out="plain")
    (tmp_path / name).write_text(text, encoding="utf-8-sig")
    monkeypatch.setattr("unheard.corpus.scan._BATCH_BYTES", batch_bytes)
    marked = made(tmp_path, tmp_path / name, out="marked")
    assert words_of(marked.store) == words_of(plain.store)
    assert marked.counts["rows"] == plain.counts["rows"]


@pytest.mark.parametrize("name", ["x.jsonl.gz", "x.csv"])
def test_only_plain_json_lines_are_cut(tmp_path, monkeypatch, name):
    monkeypatch.setattr("unheard.corpus.scan._BATCH_BYTES", 10)
    (tmp_path / name).write_bytes(b"x" * 500)
    assert [len(b.sources) for b in batches(find_sources([str(tmp_path / name)]))] == [1]
