"""ledger.py, the file: the bytes of both file formats, and a file that is read while another process adds to it."""

import hashlib

import pytest

from unheard.errors import LedgerError
from unheard.privacy.ledger import ChainedFile, seal, unseal

HEADER = b'{"ledger":"some-kind","facts":{"a":1},"hash":"22ca40ce46963cce5e168c1bb19d5a89e6450ca35bae0d46ebc11f8fbb6c03af"}\n'


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger.jsonl"


@pytest.fixture
def file(path):
    file = ChainedFile(path, "some-kind")
    file.create({"a": 1})
    return file


def test_the_format_of_a_line_does_not_change(file, path):
    assert path.read_bytes() == HEADER
    line, digest = seal({"n": 1}, file.head)
    assert line == b'{"n":1,"hash":"' + digest.encode() + b'"}\n'
    assert unseal(line[:-1], file.head) == ({"n": 1}, digest)


@pytest.mark.parametrize("length", [None, "0", [0], {"a": 0}, 0.0, float("inf"), False])
def test_a_length_that_is_no_whole_number_is_in_no_ledger(file, length):
    """The length comes from a checkpoint or from `ledgers.json`, which may be damaged."""
    assert file.contains(0, file.head)
    assert not file.contains(length, file.head)


def test_a_reader_gets_each_record_once(file, path):
    reader = ChainedFile(path, "some-kind")
    assert reader.read() == []
    file.append([{"n": 1}, {"n": 2}])
    assert reader.read() == [{"n": 1}, {"n": 2}]
    file.append([{"n": 3}])
    assert reader.read() == [{"n": 3}]
    assert reader.hashes == file.hashes
    assert reader.facts == {"a": 1}


def test_a_reader_continues_after_another_process_has_repaired_the_end(file, path):
    file.append([{"n": 1}])
    path.write_bytes(path.read_bytes()[:-1])
    reader, writer = ChainedFile(path, "some-kind"), ChainedFile(path, "some-kind")
    assert reader.read() == [{"n": 1}]
    assert reader.read() == []
    writer.read()
    writer.repair()
    writer.append([{"n": 2}])
    assert reader.read() == [{"n": 2}]


def test_a_torn_line_that_is_the_only_new_one_is_cut(file, path):
    whole = path.read_bytes()
    path.write_bytes(whole + b"\0\0\0\n")
    assert file.read() == []
    file.repair()
    assert path.read_bytes() == whole


def test_a_file_that_another_writer_changed_is_not_appended_to(file, path):
    other = ChainedFile(path, "some-kind")
    other.read()
    other.append([{"n": 1}])
    with pytest.raises(OSError, match="another process"):
        file.append([{"n": 2}])


@pytest.mark.parametrize("body", [b'{"a":}', b'{"a":' + b"[" * 100_000 + b"}"])
def test_a_sealed_line_that_is_no_json_is_an_error_of_the_ledger(file, path, body):
    digest = hashlib.sha256(file.head.encode() + b"\n" + body).hexdigest()
    with open(path, "ab") as raw:
        raw.write(body[:-1] + b',"hash":"' + digest.encode() + b'"}\n' + HEADER)
    with pytest.raises(LedgerError, match="line 2"):
        ChainedFile(path, "some-kind").read()


def test_the_hash_of_a_line_depends_on_every_digit_of_the_hash_before(file):
    line, _ = seal({"n": 1}, file.head)
    for place in range(64):
        changed = "f" if file.head[place] == "0" else "0"
        with pytest.raises(LedgerError, match="does not match"):
            unseal(line[:-1], file.head[:place] + changed + file.head[place + 1 :])


@pytest.mark.parametrize("length", [2, 16])
def test_a_last_line_with_zero_bytes_anywhere_is_cut_and_the_rest_stays(file, path, length):
    """After a power loss any block of a line can be missing, also if the end of the line was written."""
    whole = path.read_bytes()
    line, _ = seal({"n": 1, "more": "x" * 40}, file.head)
    for begin in range(len(line) - length):
        path.write_bytes(whole + line[:begin] + bytes(length) + line[begin + length :])
        reader = ChainedFile(path, "some-kind")
        assert reader.read() == []
        reader.repair()
        assert path.read_bytes() == whole


@pytest.mark.parametrize("end", ["", "\n", '"}\n'])
def test_a_last_line_that_is_too_deep_for_the_parser_is_an_error_and_stays(file, path, end):
    """No write that was interrupted leaves such a line, so it may have been a charge."""
    damaged = path.read_bytes() + b'{"a":' + b"[" * 100_000 + end.encode()
    path.write_bytes(damaged)
    with pytest.raises(LedgerError):
        ChainedFile(path, "some-kind").read()
    assert path.read_bytes() == damaged


@pytest.mark.parametrize("rest", [b'{"n":', b'{"n":1,"hash":"'])
def test_an_end_that_another_process_has_cut_off_is_forgotten(file, path, rest):
    with open(path, "ab") as raw:
        raw.write(rest)
    reader, writer = ChainedFile(path, "some-kind"), ChainedFile(path, "some-kind")
    assert reader.read() == []
    assert reader.repaired is not None
    writer.read()
    writer.repair()
    writer.append([{"n": 2}])
    assert reader.read() == [{"n": 2}]
    assert reader.repaired is None
    reader.repair()
    reader.append([{"n": 3}])
    assert writer.read() == [{"n": 3}]
