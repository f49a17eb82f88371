"""Groups rows by user on a Spark cluster, which shuffles and sorts them.

Reading and encoding use the same code as the DuckDB backend: each worker scans whole batches with the query of
`readers` and runs the tasks of whole shards. The resulting store is byte for byte the store of `DuckDBBackend`.

How the three methods of a backend map to Spark:

    scan             one task per batch runs the DuckDB query and returns Arrow batches; Spark writes them by shard
    find_duplicates  an aggregation by the hash of the text
    over_shards      a repartition by shard, a sort within each partition, then one Python task per shard

Requirements:

- The extra `unheard[spark]` and Java 17. PYSPARK_PYTHON must name an interpreter that has Unheard installed.
- Inputs and `--out` on a file system that all workers see under the same path.
- The same version of DuckDB on all workers, since DuckDB's hash of a user id decides the shard. This is checked.
- For parallel reading, many files or large uncompressed files: a compressed file is read by one task.
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

from unheard import storage
from unheard.corpus import Progress
from unheard.corpus.grouping import Grouping, ShardTask, count_rows, equal_groups
from unheard.corpus.readers import UNUSABLE, open_database, scan_error, scan_sql, summarise_scan
from unheard.corpus.sources import FileBatch, is_truncation_error
from unheard.errors import CorpusError, InputError, UnheardError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession  # pyright: ignore[reportMissingImports]

_ROWS = "shard int, reason string, user string, spelling string, text string, time double, position bigint, text_hash bigint"
_ARROW_ROWS = 1 << 14  # the largest number of rows in one Arrow batch


@dataclass(frozen=True, kw_only=True)
class SparkBackend:
    """A `GroupingBackend` that runs on a Spark cluster.

    Args:
        master: The address of the cluster; the default "local[*]" runs Spark on this machine.
    """

    master: str = "local[*]"

    def scan(self, grouping: Grouping, batches: Sequence[FileBatch], progress: Progress) -> Counter[str]:
        """Read all batches, one Spark task each, and write the rows to rows/00000 (see `GroupingBackend.scan`)."""
        folder = grouping.rows / "00000"
        if not folder.is_dir():
            _check_fields(grouping, batches)
            session = self._session(grouping)
            table = session.createDataFrame([(batch.number,) for batch in batches], "number int")
            table = table.repartitionByRange(len(batches), "number")
            rows = table.mapInArrow(_scanner(grouping, {b.number: b for b in batches}), _ROWS)
            rows = rows.write.partitionBy("shard").option("compression", "none").mode("overwrite")
            with storage.staged_folder(folder) as staged:
                self._run(lambda: rows.parquet(str(staged)))
        progress("Reading", 1.0)
        return count_rows(grouping)

    def find_duplicates(self, grouping: Grouping) -> int:
        """Find identical posts of several users, and return their number (see `GroupingBackend.find_duplicates`)."""
        from pyspark.sql import functions as f  # pyright: ignore[reportMissingImports]

        session = self._session(grouping)
        rows = self._kept(session, grouping).where("text_hash IS NOT NULL").groupBy("text_hash")
        totals = rows.agg(f.count("*").alias("posts"), f.min("user").alias("a"), f.max("user").alias("b"))
        several = totals.where("a <> b")
        self._run(
            lambda: several.select("text_hash", "posts").write.mode("overwrite").parquet(str(grouping.duplicates))
        )
        total = session.read.parquet(str(grouping.duplicates)).agg(f.sum("posts")).first()
        return int(total[0] or 0) if total is not None else 0

    def over_shards(
        self, grouping: Grouping, task: ShardTask, shards: Sequence[int]
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """Run a task on the given shards, and yield each shard with its result (see `GroupingBackend.over_shards`).

        The results are yielded when Spark has finished all shards.
        """
        if not shards:
            return
        session = self._session(grouping)
        rows = self._kept(session, grouping).where(f"shard IN ({', '.join(map(str, shards))})")
        if grouping.drop_duplicates:
            unwanted = session.read.parquet(str(grouping.duplicates)).select("text_hash")
            rows = rows.join(unwanted, "text_hash", "left_anti")
        ordered = rows.repartition(len(shards), "shard").sortWithinPartitions(
            "shard", "user", rows["time"].asc_nulls_last(), "position"
        )
        results = ordered.select("shard", "user", "text").mapInArrow(_runner(task), "shard int, result string")
        done = {int(row[0]): json.loads(row[1]) for row in self._run(results.collect)}
        for shard in shards:  # Spark runs no task for a shard without rows, so such a shard is run here.
            yield shard, done[shard] if shard in done else task(shard, iter(()))

    def _kept(self, session: "SparkSession", grouping: Grouping) -> "DataFrame":
        """Return the rows that can be used. The scan gives all other rows the shard number -1."""
        return session.read.parquet(str(grouping.rows / "00000")).where("shard >= 0")

    def _session(self, grouping: Grouping) -> "SparkSession":
        """Return the Spark session, and start it if there is none. Raise `InputError` if Spark or Java is missing."""
        try:
            from pyspark.sql import SparkSession  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise InputError("--engine spark needs an extra: pip install 'unheard[spark]', and Java 17.") from None
        if shutil.which("java") is None and "JAVA_HOME" not in os.environ:
            raise InputError("--engine spark needs Java 17: install it, or set JAVA_HOME.")
        if self.master.startswith("local"):
            # By default Spark starts the `python3` of the PATH, which may not have Unheard installed.
            os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        # The warning is about pandas, which is not used: rows are exchanged as Arrow batches.
        warnings.filterwarnings("ignore", message="PySpark does not yet fully support pandas")
        builder = SparkSession.builder.master(self.master).appName("unheard prepare")  # pyright: ignore[reportAttributeAccessIssue]
        settings = {
            "spark.sql.session.timeZone": "UTC",
            "spark.sql.sources.partitionColumnTypeInference.enabled": "true",
            "spark.sql.execution.arrow.maxRecordsPerBatch": str(_ARROW_ROWS),
            "spark.sql.adaptive.enabled": "false",  # keeps one task per shard
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
            "spark.log.level": "ERROR",
        }
        if self.master.startswith("local"):  # Spark's default of 200 shuffle tasks is too many for one machine.
            settings["spark.sql.shuffle.partitions"] = str(max(2, grouping.shards))
        for key, value in settings.items():
            builder = builder.config(key, value)
        return builder.getOrCreate()

    def _run(self, action):
        """Run a Spark action and return its result.

        An error that this package raised in a worker is raised again, without the Java stack trace. Every other error
        of Spark becomes a `CorpusError`.
        """
        try:
            return action()
        except Exception as error:
            for line in str(error).splitlines():
                for kind in (InputError, CorpusError):
                    marker = f"{kind.__module__}.{kind.__name__}: "
                    if marker in line:
                        raise kind(line.split(marker, 1)[1]) from None
            if isinstance(error, UnheardError):
                raise
            raise CorpusError(f"Spark failed: {str(error).strip().splitlines()[0]}") from None


def _check_fields(grouping: Grouping, batches: Sequence[FileBatch]) -> None:
    """Raise `InputError` for a missing column before any worker starts."""
    database = open_database(grouping.memory_bytes, 1, str(grouping.work / "temp"))
    for batch in batches:
        try:
            scan_sql(database, batch, grouping.fields, grouping.shards, grouping.duplicate_chars)
        except duckdb.Error as error:
            if not is_truncation_error(error):  # Workers can read the beginning of a truncated file.
                raise scan_error(error, batch) from None
    database.close()


def _scanner(grouping: Grouping, batches: dict[int, FileBatch]):
    """Return the function that workers run to scan batches, for `DataFrame.mapInArrow`.

    Args:
        grouping: The settings of the scan.
        batches: All batches by number.
    """

    def scan(numbers):
        """Read the batches with these numbers and yield their rows as Arrow batches.

        Rows that the query itself cannot return, such as broken lines, are added with the shard -1 and the reason.
        """
        import pyarrow  # pyright: ignore[reportMissingImports]

        for numbered in numbers:
            for number in numbered.column(0).to_pylist():
                grouping.check_version()
                unpacked = grouping.work / "temp" / f"unpacked-{number}"
                # Check .gz files first: DuckDB reports a truncated file only after rows of it were yielded to Spark.
                batch, truncated = batches[number].replace_truncated(unpacked, check_gzip=True)
                temp = str(grouping.work / "temp" / f"scan-{number}")
                database = open_database(grouping.memory_bytes, 1, temp, grouping.excluded)
                try:
                    query = scan_sql(database, batch, grouping.fields, grouping.shards, grouping.duplicate_chars)
                    has_unusable = False
                    for rows in database.sql(query).to_arrow_reader(_ARROW_ROWS):
                        has_unusable |= UNUSABLE in rows.column("shard").unique().to_pylist()
                        yield rows
                    summary = summarise_scan(database, batch, grouping.fields, has_unusable)
                except duckdb.Error as error:
                    raise scan_error(error, batch) from None
                grouping.save_warnings(batch, [*truncated, *summary.warnings])
                shutil.rmtree(unpacked, ignore_errors=True)
                for reason, number in summary.rows.items():
                    columns = {"shard": [-1] * number, "reason": [reason] * number}
                    columns |= {
                        name: [None] * number for name in ("user", "spelling", "text", "time", "position", "text_hash")
                    }
                    types = ("int32", "string", "string", "string", "string", "float64", "int64", "int64")
                    schema = pyarrow.schema(list(zip(columns, map(pyarrow.type_for_alias, types), strict=True)))
                    yield pyarrow.RecordBatch.from_pydict(columns, schema=schema)
                database.close()

    return scan


def _runner(task: ShardTask):
    """Return the function that workers run to execute a task on whole shards, for `DataFrame.mapInArrow`."""

    def run(batches):
        """Run the task on each shard of a partition, and yield the shard numbers and results as one Arrow batch.

        Args:
            batches: Arrow batches with the columns shard, user and text, sorted by shard and then by user.
        """
        import itertools
        from operator import itemgetter

        import pyarrow  # pyright: ignore[reportMissingImports]

        columns = ([batch.column(i).to_pylist() for i in range(3)] for batch in batches)
        rows = (
            (shard, users[part], texts[part])
            for numbers, users, texts in columns
            for shard, part in equal_groups(numbers)
        )
        shards, results = [], []
        for shard, mine in itertools.groupby(rows, key=itemgetter(0)):
            shards.append(shard)
            results.append(json.dumps(task(shard, ((users, texts) for _, users, texts in mine))))
        if shards:
            yield pyarrow.RecordBatch.from_pydict({"shard": pyarrow.array(shards, "int32"), "result": results})

    return run
