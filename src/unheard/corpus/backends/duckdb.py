"""The grouping on one machine: DuckDB scans and sorts within a fixed memory, one process for each core.

In: the plan of grouping.py. Out: rows in Parquet files by shard, then each shard's rows in order. Finished batches have
their names: a repeated scan does not read them again.
"""

import gc
import json
import multiprocessing
import os
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb

from unheard.corpus.backends import ORDER, Grouping, Rows, ShardTask, count_rows
from unheard.corpus.compression import as_far_as_they_go, is_tear
from unheard.corpus.progress import Progress, cores
from unheard.corpus.readers.columns import FileBatch, quoted, sql_list
from unheard.corpus.scan import UNUSABLE, Aftermath, after_scan, as_refusal, open_database, scan_sql
from unheard.errors import CorpusError

_FETCH_ROWS = 4096
_ROW_GROUP = 8192  # small groups leave the writer's buffers early: a quarter less work than its default


@dataclass(frozen=True, kw_only=True)
class DuckDBBackend:
    """This machine; 0 workers means one for each core."""

    workers: int = 0

    def scan(self, grouping: Grouping, batches: Sequence[FileBatch], progress: Progress) -> Counter[str]:
        total = sum(b.text_bytes for b in batches) or 1
        waiting = [b for b in batches if not grouping.batch_folder(b).is_dir()]
        done = total - sum(b.text_bytes for b in waiting)
        if len(waiting) == 1:
            scan_batch(
                grouping, waiting[0], 1, lambda part: progress("Reading", (done + part * waiting[0].text_bytes) / total)
            )
        else:
            for batch, _ in self._parallel(scan_batch, grouping, waiting):
                done += batch.text_bytes
                progress("Reading", done / total)
        progress("Reading", 1.0)
        return count_rows(grouping)

    def find_duplicates(self, grouping: Grouping) -> int:
        files = [file for shard in range(grouping.shards) for file in grouping.shard_files(shard)]
        if not files:
            return 0
        database = open_database(grouping.memory_bytes, cores(), str(grouping.work / "temp"))
        target = quoted(str(grouping.duplicates))
        hashes = f'SELECT text_hash, "user" FROM read_parquet({sql_list(files)}) WHERE text_hash IS NOT NULL'
        # Few posts stand twice: found by their hashes alone, and only then is it asked whose they are.
        twice = f"SELECT text_hash FROM ({hashes}) GROUP BY text_hash HAVING count(*) > 1"
        several = (
            f"SELECT text_hash, count(*) AS posts FROM ({hashes}) WHERE text_hash IN ({twice}) "
            'GROUP BY text_hash HAVING min("user") <> max("user")'
        )
        database.execute(f"COPY ({several}) TO {target} (FORMAT parquet)")
        ((count,),) = database.execute(f"SELECT coalesce(sum(posts), 0) FROM {target}").fetchall()
        database.close()
        return int(count)

    def over_shards(
        self, grouping: Grouping, task: ShardTask, shards: Sequence[int]
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        yield from self._parallel(run_on_shard, grouping, shards, task)

    def _parallel(
        self, function: Callable[..., Any], grouping: Grouping, items: Sequence[Any], *more: Any
    ) -> Iterator[Any]:
        """(item, function(grouping, item, sharers, *more)) as they finish, each in a process that shares the memory."""
        workers = min(self.workers or cores(), len(items))
        if workers <= 1:
            for item in items:
                yield item, function(grouping, item, 1, *more)
            return
        # spawn: a forked copy of a process with DuckDB's threads in it may hang
        spawn = multiprocessing.get_context("spawn")
        # gc.disable: rows are tuples and texts, millions of them and never in a circle; looking for circles is a tenth
        with ProcessPoolExecutor(workers, mp_context=spawn, initializer=gc.disable) as pool:
            waiting = {pool.submit(function, grouping, item, workers, *more): item for item in items}
            try:
                for finished in as_completed(waiting):
                    yield waiting[finished], finished.result()
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise


def scan_batch(
    grouping: Grouping, batch: FileBatch, sharers: int, report: Callable[[float], None] = lambda part: None
) -> None:
    """One batch's rows into files by shard: written apart, named when whole."""
    folder = grouping.batch_folder(batch)
    writing = folder.with_suffix(".writing")
    unpacked = grouping.work / "temp" / f"unpacked-{batch.number}"
    readable, torn = as_far_as_they_go(batch, unpacked, gzip_too=False)
    try:
        after = _scan_into(writing, grouping, readable, sharers, report)
    except duckdb.Error as trouble:
        if not is_tear(trouble):
            raise as_refusal(trouble, batch) from None
        readable, torn = as_far_as_they_go(batch, unpacked, gzip_too=True)
        try:
            after = _scan_into(writing, grouping, readable, sharers, report)
        except duckdb.Error as again:
            raise as_refusal(again, batch) from None
    grouping.notice(batch, [*torn, *after.noticed])
    (writing / "rejected.json").write_text(json.dumps(after.rows))
    os.replace(writing, folder)
    shutil.rmtree(unpacked, ignore_errors=True)


def _scan_into(
    writing: Path, grouping: Grouping, batch: FileBatch, sharers: int, report: Callable[[float], None]
) -> Aftermath:
    shutil.rmtree(writing, ignore_errors=True)
    writing.mkdir(parents=True)
    temp = str(grouping.work / "temp" / f"batch-{batch.number}")
    database = open_database(grouping.memory_bytes // sharers, max(1, cores() // sharers), temp, grouping.excluded)
    # Rows wait in memory until a shard has this many: their product with the number of shards must stay small.
    database.execute(f"SET partitioned_write_flush_threshold={max(2048, 262_144 // grouping.shards)}")
    try:
        query = scan_sql(database, batch, grouping.fields, grouping.shards, grouping.duplicate_chars)
        options = f"FORMAT parquet, COMPRESSION uncompressed, ROW_GROUP_SIZE {_ROW_GROUP}"
        options += ", PARTITION_BY (shard), OVERWRITE_OR_IGNORE"
        _run_watched(database, f"COPY ({query}) TO {quoted(str(writing))} ({options})", report)
        return after_scan(database, batch, grouping.fields, (writing / f"shard={UNUSABLE}").is_dir())
    finally:
        database.close()


def run_on_shard(grouping: Grouping, shard: int, sharers: int, task: ShardTask) -> dict[str, Any]:
    """One shard's task in this process, with its part of the memory."""
    return task(shard, sorted_rows(grouping, shard, sharers))


def sorted_rows(grouping: Grouping, shard: int, sharers: int) -> Rows:
    """Users and texts of one shard in the fixed order. Sorting spills to disk: one user may have half of all text."""
    files = grouping.shard_files(shard)
    if not files:
        return
    temp = str(grouping.work / "temp" / f"shard-{shard}")
    database = open_database(grouping.memory_bytes // sharers, max(1, cores() // sharers), temp)
    unwanted = ""
    if grouping.drop_duplicates:
        unwanted = (
            f"WHERE text_hash IS NULL OR text_hash NOT IN (SELECT text_hash FROM {quoted(str(grouping.duplicates))})"
        )
    try:
        result = database.execute(
            f'SELECT "user", text FROM read_parquet({sql_list(files)}) {unwanted} ORDER BY {ORDER}'
        )
        while rows := result.fetchmany(_FETCH_ROWS):
            users, texts = zip(*rows, strict=True)
            yield users, texts
    except duckdb.Error as trouble:
        first = str(trouble).strip().split("\n")[0]
        raise CorpusError(
            f"Sorting a part of the corpus failed: {first} Make room on disk or raise --memory."
        ) from None
    finally:
        database.close()


def _run_watched(database: duckdb.DuckDBPyConnection, query: str, report: Callable[[float], None]) -> None:
    """Run a query in another thread, so that this one can say how far it is and can be interrupted."""
    trouble: list[BaseException] = []

    def work() -> None:
        try:
            database.execute(query)
        except BaseException as error:
            trouble.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(0.1)
            report(min(max(0.0, database.query_progress()) / 100.0, 1.0))
    except BaseException:
        database.interrupt()
        thread.join()
        raise
    if trouble:
        raise trouble[0]
