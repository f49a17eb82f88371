"""Canaries are in exactly the users that the record names, and in no other user."""

import json
import os
import stat

import pytest

from tests.corpus.inputs import prepared, words_of, write_jsonl
from unheard.corpus.canaries import MAX_TOKENS, Canary, has_canaries, read_canaries
from unheard.corpus.encode import EncodingOptions
from unheard.errors import CorpusCorrupt, InputError, InvalidValue

ROWS = [{"who": f"u{i}", "what": "a a a", "when": 0} for i in range(30)]


def test_a_canary_is_in_its_carriers_as_often_as_asked_and_nowhere_else(tmp_path):
    canaries = (Canary(text="d e f", users=3, repeats=2), Canary(text="f e d", users=1), Canary(text="e e", users=0))
    done = prepared(tmp_path, write_jsonl(tmp_path / "x.jsonl", ROWS), canaries=canaries, shards=3)
    record = json.loads((done.store.path / "canaries.json").read_text())
    words = words_of(done.store)
    assert [len(entry["users"]) for entry in record] == [3, 1, 0]
    for k, text in enumerate(words):
        assert text.count("<BOS> d e f <EOS>") == (2 if k in record[0]["users"] else 0)
        assert text.count("<BOS> f e d <EOS>") == (1 if k in record[1]["users"] else 0)
        assert "e e" not in text
        assert text.endswith("<BOS> a a a <EOS>")
    carriers = [k for entry in record for k in entry["users"]]
    assert len(set(carriers)) == len(carriers)


def test_the_record_is_private_and_the_store_says_that_there_are_canaries(tmp_path):
    done = prepared(tmp_path, write_jsonl(tmp_path / "x.jsonl", ROWS), canaries=(Canary(text="d"),))
    assert stat.S_IMODE(os.stat(done.store.path / "canaries.json").st_mode) == 0o600
    assert done.store.info["canaries"] is True
    assert "canary" not in (done.store.path / "corpus.json").read_text()


def test_carriers_keep_the_cap(tmp_path):
    done = prepared(
        tmp_path,
        write_jsonl(tmp_path / "x.jsonl", ROWS),
        canaries=(Canary(text="d e", users=30),),
        encoding=EncodingOptions(tokens_per_user=4),
    )
    assert set(words_of(done.store)) == {"<BOS> d e <EOS> <BOS> a"}


def test_canaries_that_could_not_be_found_again_are_refused(tmp_path):
    file = write_jsonl(tmp_path / "x.jsonl", ROWS)
    with pytest.raises(InputError, match="outside the vocabulary"):
        prepared(tmp_path, file, canaries=(Canary(text="d zebra"),))
    with pytest.raises(InputError, match="more than there are training users"):
        prepared(tmp_path, file, out="other", canaries=(Canary(text="d", users=31),))
    for values in ({"text": " "}, {"text": "a", "users": -1}, {"text": "a", "repeats": 0}):
        with pytest.raises(InvalidValue):
            Canary(**values)


def test_a_damaged_record_of_planted_phrases_is_refused(tmp_path):
    store = prepared(tmp_path, write_jsonl(tmp_path / "x.jsonl", ROWS), canaries=(Canary(text="d e"),)).store
    file = store.path / "canaries.json"
    (canary,) = json.loads(file.read_text())
    assert read_canaries(store.path, len(store.vocabulary))[0]["tokens"] == canary["tokens"]
    size = len(store.vocabulary)
    for tokens in ([0], [size - 1], [3] * MAX_TOKENS):
        file.write_text(json.dumps([{**canary, "tokens": tokens}]))
        assert read_canaries(store.path, size)[0]["tokens"] == tokens
    damaged = [{**canary, "tokens": tokens} for tokens in ([], [3] * (MAX_TOKENS + 1), [-1], [size], "?", None)]
    for content in (*([one] for one in damaged), [{}], [3], {"a": 1}):
        file.write_text(json.dumps(content))
        with pytest.raises(CorpusCorrupt, match="is damaged"):
            read_canaries(store.path, len(store.vocabulary))


def test_a_stop_while_planting_does_not_plant_twice(tmp_path, monkeypatch):
    from unheard.corpus import canaries as module

    file = write_jsonl(tmp_path / "x.jsonl", ROWS)
    wanted = (Canary(text="d e f", users=20),)
    rewrite, calls = module._rewrite, []

    def stop_at_the_second(*arguments):
        calls.append(1)
        return rewrite(*arguments) if len(calls) < 2 else 1 / 0

    with monkeypatch.context() as patch:
        patch.setattr(module, "_rewrite", stop_at_the_second)
        with pytest.raises(ZeroDivisionError):
            prepared(tmp_path, file, canaries=wanted, shards=3)
    done = prepared(tmp_path, file, canaries=wanted, shards=3)
    assert sum(text.count("d e f") for text in words_of(done.store)) == 20


def test_a_lost_record_of_planted_phrases_is_an_error(tmp_path):
    """An audit would otherwise say nothing about the phrases, which may have been memorized."""
    assert not has_canaries(tmp_path)
    (tmp_path / "corpus.json").write_text('{"canaries": true}')
    with pytest.raises(CorpusCorrupt, match="is missing"):
        has_canaries(tmp_path)
    (tmp_path / "canaries.json").symlink_to("nowhere")
    with pytest.raises(CorpusCorrupt, match="is damaged"):
        read_canaries(tmp_path, 50)
    (tmp_path / "canaries.json").unlink()
    (tmp_path / "part.json").write_text("{}")
    assert not has_canaries(tmp_path)
    (tmp_path / "part.json").unlink()
    for content in ('{"canaries": false}', "[]", "["):
        (tmp_path / "corpus.json").write_text(content)
        assert not has_canaries(tmp_path)
