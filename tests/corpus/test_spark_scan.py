"""What the workers of Spark run, without Spark: the scan of a batch and the tasks of shards give the store of DuckDB."""

import gzip
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.corpus.inputs import ONE_PROCESS, prepared, words_of, write_csv, write_jsonl
from unheard.corpus import spark
from unheard.corpus.encode import EncodingOptions
from unheard.corpus.grouping import DuckDBBackend, SplitRule, count_rows, sorted_rows

pytest.importorskip("pyarrow", reason="the extra `spark` is not installed")


@dataclass(frozen=True, kw_only=True)
class WithoutSpark(DuckDBBackend):
    """A backend that runs the functions of `SparkBackend` in this process, on Arrow batches of a few rows."""

    workers: int = 1

    def scan(self, grouping, batches, progress):
        import pyarrow
        import pyarrow.parquet

        numbers = pyarrow.RecordBatch.from_pydict({"number": [batch.number for batch in batches]})
        scan = spark._scanner(grouping, {batch.number: batch for batch in batches})
        table = pyarrow.Table.from_batches(list(scan([numbers])))
        pyarrow.parquet.write_to_dataset(table, str(grouping.rows / "00000"), partition_cols=["shard"])
        return count_rows(grouping)

    def over_shards(self, grouping, task, shards):
        import pyarrow

        batches, columns = [], ("shard", "user", "text")
        for shard in shards:
            for users, texts in sorted_rows(grouping, shard, 1):
                batches.append((shard, users, texts))
        rows = [(n, user, text) for n, users, texts in batches for user, text in zip(users, texts, strict=True)]
        few = [
            pyarrow.RecordBatch.from_pydict({c: [row[i] for row in part] for i, c in enumerate(columns)})
            for part in (rows[at : at + 7] for at in range(0, len(rows), 7))
        ]
        done = {}
        for result in spark._runner(task)(few):
            done |= {n.as_py(): json.loads(text.as_py()) for n, text in zip(*result.columns, strict=True)}
        for shard in shards:
            yield shard, done[shard] if shard in done else task(shard, iter(()))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    """Write two files with usable rows of twenty users, and rows that lack a user or a text or are damaged."""
    folder = tmp_path_factory.mktemp("in")
    rows = [
        {"who": f"u{i * 7 % 20}é", "what": "a b c " * (i % 5) + "d", "when": i * 31 % 11 or None} for i in range(90)
    ]
    rows += [{"who": who, "what": "a copy of some length", "when": 1} for who in ("u1", "u2", " u3é ", "7", "7.0")]
    write_jsonl(
        folder / "a.jsonl", [*rows[:60], "not json", '{"who": "u1"}', '{"what": "a"}', '{"who": "u1", "what": " "}']
    )
    write_csv(folder / "b.csv", rows[60:])
    whole = gzip.compress(
        "".join(f'{{"who": "u{i}", "what": "a {i * 7919}", "when": 1}}\n' for i in range(99)).encode()
    )
    (folder / "torn.jsonl.gz").write_bytes(whole[:-200])
    return folder


def content(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_the_functions_of_sparks_workers_make_the_store_of_duckdb(tmp_path, monkeypatch, inputs):
    """Every option of a preparation has the same effect on both engines."""
    options = {
        "excluded": ("7", "u2", "nobody", " u3é"),
        "duplicate_chars": 15,
        "drop_duplicates": True,
        "shards": 2,
        "splits": SplitRule(held_out=0.3, public=0.2),
        "test_tokens": 20,
        "encoding": EncodingOptions(min_tokens=5, tokens_per_user=12),
    }
    monkeypatch.setattr(spark, "_ARROW_ROWS", 7)
    for name in ("duck", "spark"):
        (tmp_path / name).mkdir()
    made = {
        name: prepared(tmp_path / name, inputs, user_map=tmp_path / name / "map.json", backend=backend, **options)
        for name, backend in (("duck", ONE_PROCESS), ("spark", WithoutSpark()))
    }
    assert made["spark"].counts == made["duck"].counts
    assert made["duck"].counts["rows"]["malformed"] >= 1
    assert made["duck"].counts["rows"]["excluded"] > 3
    assert made["duck"].store.train.num_users > 3
    assert words_of(made["spark"].store) == words_of(made["duck"].store)
    assert content(tmp_path / "spark" / "store") == content(tmp_path / "duck" / "store")
    assert (tmp_path / "spark" / "map.json").read_bytes() == (tmp_path / "duck" / "map.json").read_bytes()
