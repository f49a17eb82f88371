"""Files that break off and quotes that never close are noticed, with their place; the rows around them are kept."""

import gzip

import pytest

from tests.corpus.making import made, words_of, write_csv, write_jsonl
from unheard.corpus.compression import gzip_is_torn, zstd_is_torn
from unheard.errors import InputError

ROWS = [{"who": f"u{i}", "what": f"a b c {i * 7919 % 1000}", "when": i} for i in range(20_000)]


def pack(path, kind):
    """A packed twin of a file, and its bytes."""
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
    assert made(tmp_path, packed, out="whole").counts["noticed"] == []
    packed.write_bytes(whole[: len(whole) * 2 // 3])
    done = made(tmp_path, packed, out="torn")
    (sentence,) = done.counts["noticed"]
    assert sentence.startswith(f"{packed} breaks off: its end is missing")
    assert 5_000 < done.counts["rows"]["kept"] < len(ROWS)
    assert done.counts["rows"]["malformed"] + done.counts["rows"]["no_text"] <= 1


def test_every_tear_is_seen_and_no_whole_file_is_called_torn(tmp_path):
    file = write_jsonl(tmp_path / "x.jsonl", ROWS[:50])
    text = file.read_bytes()
    for kind, is_torn in (("gz", gzip_is_torn), ("zst", zstd_is_torn)):
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
    assert not zstd_is_torn(str(packed))  # a frame that is skipped


def test_an_unclosed_quote_is_told_with_its_line_and_the_rows_behind_the_next_quote_are_kept(tmp_path):
    plain = "".join(f"u{i},a b,{i}\n" for i in range(30))
    opened = 'who,what,when\nann,a,1\nzed,"never closed,9\n' + plain
    (tmp_path / "x.csv").write_text(opened + 'bob,"b ""x""",2\n' + plain)
    done = made(tmp_path, tmp_path / "x.csv", out="one")
    (sentence,) = done.counts["noticed"]
    assert f"{tmp_path / 'x.csv'}, line 3: a quote opens" in sentence
    assert "32 lines from there were taken for one row, broken and left out" in sentence
    assert (done.counts["rows"]["kept"], done.counts["rows"]["malformed"]) == (31, 1)
    (tmp_path / "x.csv").write_text(opened)
    done = made(tmp_path, tmp_path / "x.csv", out="two")
    assert "line 3: a quote opens" in done.counts["noticed"][0]
    assert "31 lines" in done.counts["noticed"][0]
    (tmp_path / "x.csv").write_text(opened.replace("ann,a,1\n", ""))
    with pytest.raises(InputError, match=r"No usable row.*line 2: a quote opens"):
        made(tmp_path, tmp_path / "x.csv", out="three")


@pytest.mark.parametrize(("name", "mark"), [("x.csv", ","), ("x.tsv", "\t")])
@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_rows_inside_a_field_that_a_second_stray_quote_closes_are_told(tmp_path, name, mark, ending):
    rows = "".join(f"u{i},a b,{i}\n" for i in range(30))
    text = f'who,what,when\nann,"a\nb\nc",1\nzed,"open,9\n{rows}bob,shut",2\n{rows}'
    (tmp_path / name).write_text(text.replace(",", mark).replace("\n", ending), newline="")
    done = made(tmp_path, tmp_path / name)
    (sentence,) = done.counts["noticed"]
    assert "line 5: a quote opens" in sentence
    assert "32 lines from there were taken for one row, which was kept" in sentence


def test_long_posts_in_quotes_are_no_news(tmp_path):
    poem = "\n".join("roses are red, violets are blue" for _ in range(40))
    table = "\n".join("1,2,3,4" for _ in range(40))
    rows = [{"who": "ann", "what": poem, "when": 1}, {"who": "bob", "what": table, "when": 2}, ROWS[1]]
    file = write_csv(tmp_path / "x.csv", rows)
    with open(file, "ab") as more:
        more.write(b'eve,"a\xff' + b"\nb" * 40 + b'",3\r\n')  # malformed, for its bytes
    done = made(tmp_path, file)
    assert done.counts["noticed"] == []
    assert done.counts["rows"]["malformed"] == 1
    assert len(words_of(done.store)) == 3
