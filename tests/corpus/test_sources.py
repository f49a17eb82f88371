"""Which files an input names, byte ranges of large files, truncated compressed files, and lines that are too long."""

import gzip
import itertools
import json
import resource
import shutil
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.corpus.inputs import POSTS, prepared, words_of, write_csv, write_jsonl
from unheard.corpus.sources import (
    FileRange,
    find_sources,
    gzip_is_truncated,
    line_boundaries,
    make_batches,
    zstd_is_truncated,
    zstd_window,
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
    assert sentence.startswith(f"{packed} is truncated: its end is missing")
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


GOOD = {"who": "ann", "what": "a", "when": 1}


def test_a_zstd_window_above_27_bits_is_refused_with_advice(tmp_path):
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
    """A line of 2 GB must not be read into memory to find its end."""
    file = tmp_path / "x.jsonl"
    with open(file, "wb") as out:
        out.truncate(400 << 20)  # one line of zeros, without its bytes on the disk
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InputError, match="line 1,"):
        prepared(tmp_path, file)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10  # KiB
