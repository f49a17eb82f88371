"""Spark and DuckDB write the same store, byte for byte, from valid and from invalid input."""

import gzip
import hashlib
import os
import shutil

import pytest

from tests.corpus.inputs import FIELDS, prepared, write_csv, write_jsonl, write_with_duckdb
from unheard.corpus.encode import EncodingOptions
from unheard.corpus.grouping import SplitRule
from unheard.errors import InputError

pytestmark = pytest.mark.system

pytest.importorskip("pyspark", reason="the extra `spark` is not installed")
pytest.importorskip("pyarrow", reason="the extra `spark` is not installed")
if shutil.which("java") is None and "JAVA_HOME" not in os.environ:
    pytest.skip("Java is not installed", allow_module_level=True)


@pytest.fixture(scope="module")
def spark():
    from pyspark.sql import SparkSession

    from unheard.corpus.spark import SparkBackend

    with pytest.MonkeyPatch.context() as patch:  # in such a short time Java mostly compiles
        patch.setenv("JAVA_TOOL_OPTIONS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
        yield SparkBackend(master="local[2]")
        session = SparkSession.getActiveSession()
        if session is not None:
            session.stop()


@pytest.fixture
def inputs(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    rows = [
        {"who": f"u{i * 7 % 23}é", "what": "a b c " * (i % 5) + "d", "when": i * 31 % 11 or None} for i in range(300)
    ]
    copied = [
        {"who": "u1", "what": "a copy of some length", "when": 1},
        {"who": "u2", "what": "a copy of some length", "when": 2},
    ]
    broken = [
        "not json",
        '{"who": "u1"}',
        '{"what": "a"}',
        '{"other": 1}',
        '{"who": "emoji👩\u200d👧\\u0000", "what": "ש 👍 \\u0000 a", "when": 0}',
    ]
    write_jsonl(folder / "a.jsonl", rows[:100] + broken)
    write_jsonl(folder / "b.jsonl.gz", rows[100:150] + copied)
    write_csv(folder / "c.csv", rows[150:200])
    with open(folder / "c.csv", "ab") as file:
        file.write(b'short\r\nu1,too,many,columns\r\nu1,\xff\xfe,1\r\nu1,"never closed\r\nu1,a,1\r\n')
    whole = gzip.compress(
        "".join(f'{{"who": "u{i}", "what": "a {i * 7919}", "when": 1}}\n' for i in range(99)).encode()
    )
    (folder / "torn.jsonl.gz").write_bytes(whole[:-200])
    write_with_duckdb(folder / "d.parquet", rows[200:])
    return folder


def checksums(path):
    files = sorted(p for p in path.rglob("*") if p.is_file())
    return {str(p.relative_to(path)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def test_both_engines_make_the_same_store_byte_for_byte(tmp_path, inputs, spark):
    choices = {
        "shards": 3,
        "splits": SplitRule(held_out=0.3, public=0.1),
        "encoding": EncodingOptions(min_tokens=5, tokens_per_user=40),
        "excluded": ("u3é",),
        "drop_duplicates": True,
        "duplicate_chars": 15,
        "test_tokens": 30,
    }
    duck = prepared(tmp_path, inputs, out="duck/store", user_map=tmp_path / "duck.json", **choices)
    sparks = prepared(tmp_path, inputs, out="spark/store", user_map=tmp_path / "spark.json", backend=spark, **choices)
    assert (duck.counts["rows"]["malformed"], duck.counts["rows"]["no_text"], duck.counts["rows"]["no_user"]) == (
        5,
        2,
        2,
    )
    assert [s.split(":")[0].split("/")[-1] for s in duck.counts["noticed"]] == [
        "c.csv, line 55",
        "torn.jsonl.gz is truncated",
    ]
    assert duck.counts["duplicate_posts"] >= 2
    assert duck.store.train.num_users > 5
    assert checksums(duck.store.path) == checksums(sparks.store.path)
    assert (tmp_path / "duck.json").read_bytes() == (tmp_path / "spark.json").read_bytes()


def test_a_missing_column_is_the_same_refusal_and_no_pages_of_java(tmp_path, inputs, spark):
    from dataclasses import replace

    with pytest.raises(InputError, match=r"no column 'body'.*what"):
        prepared(tmp_path, inputs, backend=spark, fields=replace(FIELDS, text="body"))


def test_a_private_vocabulary_is_found_on_spark_too(tmp_path, spark):
    from unheard.corpus.private_vocabulary import PrivateVocabulary

    rows = [{"who": f"u{i}", "what": f"common words own{i}", "when": 0} for i in range(1000)]
    choice = PrivateVocabulary(epsilon=4.0, delta=1e-9)
    done = prepared(tmp_path, write_jsonl(tmp_path / "x.jsonl", rows), vocabulary=choice, shards=2, backend=spark)
    assert sorted(done.store.vocabulary.words[3:]) == ["common", "words"]
