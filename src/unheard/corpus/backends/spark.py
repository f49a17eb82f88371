"""The same grouping on a Spark cluster: Spark shuffles and sorts, the reading and the writing are the very same code.

In: the plan of grouping.py. Out: the same shard files, to the byte. Every worker scans whole batches with the one
reader (scan.py), and runs the tasks of whole shards. Inputs and --out must lie where all workers see them under one
path (a shared file system).
"""

import json
import os
import shutil
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import duckdb

from unheard.corpus.backends import Grouping, ShardTask, count_rows, runs
from unheard.corpus.compression import as_far_as_they_go, is_tear
from unheard.corpus.progress import Progress
from unheard.corpus.readers.columns import FileBatch
from unheard.corpus.scan import UNUSABLE, after_scan, as_refusal, open_database, scan_sql
from unheard.errors import CorpusError, InputError, UnheardError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession  # pyright: ignore[reportMissingImports]

_ROWS = "shard int, reason string, user string, text string, time double, place bigint, text_hash bigint"
_SCANNED = 1 << 14  # rows in one Arrow batch


@dataclass(frozen=True, kw_only=True)
class SparkBackend:
    """A Spark session for each step's work; `local[*]` runs it on this machine."""

    master: str = "local[*]"

    def scan(self, grouping: Grouping, batches: Sequence[FileBatch], progress: Progress) -> Counter[str]:
        """One task for each batch; all rows land under rows/00000, by shard, as the DuckDB engine lays them."""
        folder = grouping.rows / "00000"
        if not folder.is_dir():
            _check_fields(grouping, batches)
            writing = folder.with_suffix(".writing")
            shutil.rmtree(writing, ignore_errors=True)
            session = self._session(grouping)
            table = session.createDataFrame([(batch.number,) for batch in batches], "number int")
            table = table.repartitionByRange(len(batches), "number")
            rows = table.mapInArrow(_scanner(grouping, {b.number: b for b in batches}), _ROWS)
            self._run(lambda: rows.write.partitionBy("shard").option("compression", "none").parquet(str(writing)))
            os.replace(writing, folder)
        progress("Reading", 1.0)
        return count_rows(grouping)

    def find_duplicates(self, grouping: Grouping) -> int:
        from pyspark.sql import functions as f  # pyright: ignore[reportMissingImports]

        session = self._session(grouping)
        rows = self._kept(session, grouping).where("text_hash IS NOT NULL").groupBy("text_hash")
        found = rows.agg(f.count("*").alias("posts"), f.min("user").alias("a"), f.max("user").alias("b")).where(
            "a <> b"
        )
        self._run(lambda: found.select("text_hash", "posts").write.mode("overwrite").parquet(str(grouping.duplicates)))
        total = session.read.parquet(str(grouping.duplicates)).agg(f.sum("posts")).first()
        return int(total[0] or 0) if total is not None else 0

    def over_shards(
        self, grouping: Grouping, task: ShardTask, shards: Sequence[int]
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        if not shards:
            return
        session = self._session(grouping)
        rows = self._kept(session, grouping).where(f"shard IN ({', '.join(map(str, shards))})")
        if grouping.drop_duplicates:
            unwanted = session.read.parquet(str(grouping.duplicates)).select("text_hash")
            rows = rows.join(unwanted, "text_hash", "left_anti")
        ordered = rows.repartition(len(shards), "shard").sortWithinPartitions(
            "shard", "user", rows["time"].asc_nulls_last(), "place"
        )
        results = ordered.select("shard", "user", "text").mapInArrow(_runner(task), "shard int, result string")
        done = {int(row[0]): json.loads(row[1]) for row in self._run(results.collect)}
        for shard in shards:  # a shard that no user fell into has no row to run its task
            yield shard, done[shard] if shard in done else task(shard, iter(()))

    def _kept(self, session: "SparkSession", grouping: Grouping) -> "DataFrame":
        return session.read.parquet(str(grouping.rows / "00000")).where("shard >= 0")

    def _session(self, grouping: Grouping) -> "SparkSession":
        try:
            from pyspark.sql import SparkSession  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise InputError("--engine spark needs an extra: pip install 'unheard[spark]', and Java 17.") from None
        if shutil.which("java") is None and "JAVA_HOME" not in os.environ:
            raise InputError("--engine spark needs Java 17: install it, or set JAVA_HOME.")
        if self.master.startswith("local"):
            os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # this interpreter, not whatever `python3` is
        # Rows cross as Arrow; pandas, of which this warns, is not used.
        warnings.filterwarnings("ignore", message="PySpark does not yet fully support pandas")
        builder = SparkSession.builder.master(self.master).appName("unheard prepare")  # pyright: ignore[reportAttributeAccessIssue]
        settings = {
            "spark.sql.session.timeZone": "UTC",
            "spark.sql.sources.partitionColumnTypeInference.enabled": "true",
            "spark.sql.execution.arrow.maxRecordsPerBatch": str(_SCANNED),
            "spark.sql.adaptive.enabled": "false",  # one task for each shard, as asked
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
            "spark.log.level": "ERROR",
        }
        if self.master.startswith("local"):  # two hundred tasks for a shuffle are for clusters
            settings["spark.sql.shuffle.partitions"] = str(max(2, grouping.shards))
        for key, value in settings.items():
            builder = builder.config(key, value)
        return builder.getOrCreate()

    def _run(self, action):
        """A refusal inside a worker comes back wrapped in pages of Java: only its sentence is for people."""
        try:
            return action()
        except Exception as trouble:
            for line in str(trouble).splitlines():
                for kind in (InputError, CorpusError):
                    marker = f"{kind.__module__}.{kind.__name__}: "
                    if marker in line:
                        raise kind(line.split(marker, 1)[1]) from None
            if isinstance(trouble, UnheardError):
                raise
            raise CorpusError(f"Spark failed: {str(trouble).strip().splitlines()[0]}") from None


def _check_fields(grouping: Grouping, batches: Sequence[FileBatch]) -> None:
    """A missing column is refused here, before any worker starts."""
    database = open_database(grouping.memory_bytes, 1, str(grouping.work / "temp"))
    for batch in batches:
        try:
            scan_sql(database, batch, grouping.fields, grouping.shards, grouping.duplicate_chars)
        except duckdb.Error as trouble:
            if not is_tear(trouble):  # its worker will read it as far as it goes
                raise as_refusal(trouble, batch) from None
    database.close()


def _scanner(grouping: Grouping, batches: dict[int, FileBatch]):
    """Runs on a worker: batch numbers in, their rows out."""

    def scan(numbers):
        import pyarrow  # pyright: ignore[reportMissingImports]

        for numbered in numbers:
            for number in numbered.column(0).to_pylist():
                grouping.check_version()
                unpacked = grouping.work / "temp" / f"unpacked-{number}"
                batch, torn = as_far_as_they_go(batches[number], unpacked, gzip_too=True)  # rows cannot be called back
                temp = str(grouping.work / "temp" / f"scan-{number}")
                database = open_database(grouping.memory_bytes, 1, temp, grouping.excluded)
                try:
                    query = scan_sql(database, batch, grouping.fields, grouping.shards, grouping.duplicate_chars)
                    unusable = False
                    for rows in database.sql(query).to_arrow_reader(_SCANNED):
                        unusable |= UNUSABLE in rows.column("shard").unique().to_pylist()
                        yield rows
                    after = after_scan(database, batch, grouping.fields, unusable)
                except duckdb.Error as trouble:
                    raise as_refusal(trouble, batch) from None
                grouping.notice(batch, [*torn, *after.noticed])
                shutil.rmtree(unpacked, ignore_errors=True)
                for reason, number in after.rows.items():
                    columns = {"shard": [-1] * number, "reason": [reason] * number}
                    columns |= {name: [None] * number for name in ("user", "text", "time", "place", "text_hash")}
                    types = ("int32", "string", "string", "string", "float64", "int64", "int64")
                    schema = pyarrow.schema(list(zip(columns, map(pyarrow.type_for_alias, types), strict=True)))
                    yield pyarrow.RecordBatch.from_pydict(columns, schema=schema)
                database.close()

    return scan


def _runner(task: ShardTask):
    """Runs on a worker: sorted rows of whole shards in, one result for each shard out."""

    def run(batches):
        import itertools
        from operator import itemgetter

        import pyarrow  # pyright: ignore[reportMissingImports]

        columns = ([batch.column(i).to_pylist() for i in range(3)] for batch in batches)
        rows = ((shard, users[part], texts[part]) for numbers, users, texts in columns for shard, part in runs(numbers))
        shards, results = [], []
        for shard, mine in itertools.groupby(rows, key=itemgetter(0)):
            shards.append(shard)
            results.append(json.dumps(task(shard, ((users, texts) for _, users, texts in mine))))
        if shards:
            yield pyarrow.RecordBatch.from_pydict({"shard": pyarrow.array(shards, "int32"), "result": results})

    return run
