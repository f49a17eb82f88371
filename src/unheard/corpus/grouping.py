"""Everything one user wrote, in one place and in time order: scanned once, cut into shards by user, each shard sorted.

In: batches of files. Out: for each shard a stream of (user, text), users in order of their ids, posts in order of time and then of
their place in the input. Two engines stand behind this door: DuckDB (here) and Spark (spark.py), with the same result to the byte.
"""

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
from typing import Any, Protocol

import duckdb

from unheard.corpus.scan import UNUSABLE, Batch, Fields, as_refusal, open_database, quoted, rejected_rows, scan_sql
from unheard.errors import CorpusError

ORDER = '"user", "time" NULLS LAST, batch, row'
Progress = Callable[[str, float], None]
_FETCH_ROWS = 4096


class ShardTask(Protocol):
    """What is done with the users of one shard: picklable, since it may run in another process or on another machine."""

    def __call__(self, shard: int, rows: Iterator[tuple[str, str]]) -> dict[str, Any]: ...


@dataclass(frozen=True, kw_only=True)
class Grouping:
    """The plan that both engines follow. `work` is where rows wait between the scan and the tasks."""

    work: Path
    fields: Fields
    shards: int
    excluded: tuple[str, ...] = ()
    duplicate_chars: int = 100
    drop_duplicates: bool = False
    memory_bytes: int = 1 << 30

    @property
    def rows(self) -> Path:
        return self.work / "rows"

    @property
    def duplicates(self) -> Path:
        return self.work / "duplicates.parquet"

    def shard_files(self, shard: int) -> list[str]:
        return sorted(str(p) for p in self.rows.glob(f"*/shard={shard}/*.parquet"))


class Engine(Protocol):
    """Who does the work. What it means is above."""

    def scan(self, grouping: Grouping, batches: Sequence[Batch], progress: Progress) -> Counter[str]: ...

    def find_duplicates(self, grouping: Grouping) -> int: ...

    def over_shards(self, grouping: Grouping, task: ShardTask, shards: Sequence[int]) -> Iterator[tuple[int, dict[str, Any]]]: ...


@dataclass(frozen=True, kw_only=True)
class DuckDBEngine:
    """This machine: DuckDB scans and sorts, one process per core runs the tasks."""

    workers: int = 0

    def scan(self, grouping: Grouping, batches: Sequence[Batch], progress: Progress) -> Counter[str]:
        """Write every batch's rows into files by shard. A finished batch has its name and is not scanned again."""
        temp = grouping.work / "temp"
        database = open_database(grouping.memory_bytes, _cores(), str(temp), grouping.excluded)
        # Rows wait in memory until a partition has this many: the product with the number of shards must stay small.
        database.execute(f"SET partitioned_write_flush_threshold={max(2048, 262_144 // grouping.shards)}")
        total, done = sum(b.text_bytes for b in batches) or 1, 0
        for batch in batches:
            folder = grouping.rows / f"{batch.number:05d}"
            if not folder.is_dir():
                report = _share(progress, "Reading", done / total, batch.text_bytes / total)
                self._scan_batch(database, grouping, batch, folder, report)
            done += batch.text_bytes
            progress("Reading", done / total)
        database.close()
        return count_rows(grouping)

    def _scan_batch(self, database, grouping: Grouping, batch: Batch, folder: Path, report: Callable[[float], None]) -> None:
        writing = folder.with_suffix(".writing")
        shutil.rmtree(writing, ignore_errors=True)
        writing.mkdir(parents=True)
        try:
            query = scan_sql(database, batch, grouping.fields, grouping.shards, grouping.duplicate_chars)
            copy = f"COPY ({query}) TO {quoted(str(writing))} (FORMAT parquet, COMPRESSION uncompressed, PARTITION_BY (shard), OVERWRITE_OR_IGNORE)"
            _run_watched(database, copy, report)
            rejected = rejected_rows(database)
        except duckdb.Error as trouble:
            raise as_refusal(trouble, batch) from None
        (writing / "rejected.json").write_text(json.dumps(rejected))
        os.replace(writing, folder)

    def find_duplicates(self, grouping: Grouping) -> int:
        """Posts of some length that stand word for word under several users: counted, their hashes kept."""
        database = open_database(grouping.memory_bytes, _cores(), str(grouping.work / "temp"))
        files = [f for shard in range(grouping.shards) for f in grouping.shard_files(shard)]
        if not files:
            return 0
        database.execute(
            f"""COPY (SELECT text_hash, count(*) AS posts FROM read_parquet({_list(files)}) WHERE text_hash IS NOT NULL
                GROUP BY text_hash HAVING min("user") <> max("user")) TO {quoted(str(grouping.duplicates))} (FORMAT parquet)"""
        )
        count = database.execute(f"SELECT coalesce(sum(posts), 0) FROM {quoted(str(grouping.duplicates))}").fetchone()
        database.close()
        return int(count[0]) if count else 0

    def over_shards(self, grouping: Grouping, task: ShardTask, shards: Sequence[int]) -> Iterator[tuple[int, dict[str, Any]]]:
        workers = min(self.workers or _cores(), len(shards))
        if workers <= 1:
            for shard in shards:
                yield shard, run_on_shard(grouping, task, shard, 1)
            return
        # spawn: a forked copy of a process with DuckDB's threads in it may hang
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(workers, mp_context=context) as pool:
            waiting = {pool.submit(run_on_shard, grouping, task, shard, workers): shard for shard in shards}
            try:
                for finished in as_completed(waiting):
                    yield waiting[finished], finished.result()
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise


def run_on_shard(grouping: Grouping, task: ShardTask, shard: int, sharers: int) -> dict[str, Any]:
    """One shard's task in this process, with its part of the memory."""
    return task(shard, sorted_rows(grouping, shard, sharers))


def sorted_rows(grouping: Grouping, shard: int, sharers: int) -> Iterator[tuple[str, str]]:
    """(user, text) of one shard in the fixed order. Sorting spills to disk: one user may have half of all text."""
    files = grouping.shard_files(shard)
    if not files:
        return
    temp = str(grouping.work / "temp" / f"shard-{shard}")
    database = open_database(grouping.memory_bytes // sharers, max(1, _cores() // sharers), temp)
    unwanted = ""
    if grouping.drop_duplicates:
        unwanted = f"WHERE text_hash IS NULL OR text_hash NOT IN (SELECT text_hash FROM {quoted(str(grouping.duplicates))})"
    try:
        result = database.execute(f'SELECT "user", text FROM read_parquet({_list(files)}) {unwanted} ORDER BY {ORDER}')
        while rows := result.fetchmany(_FETCH_ROWS):
            yield from rows
    except duckdb.Error as trouble:
        first = str(trouble).strip().split("\n")[0]
        raise CorpusError(f"Sorting a part of the corpus failed: {first} Make room on disk or raise --memory.") from None
    finally:
        database.close()


def count_rows(grouping: Grouping) -> Counter[str]:
    """How many rows were read and why some cannot be used, from the scanned files: the same for both engines."""
    counts: Counter[str] = Counter({"malformed": sum(_rejected(grouping)), "no_user": 0, "no_text": 0, "excluded": 0, "kept": 0})
    database = open_database(grouping.memory_bytes, _cores(), str(grouping.work / "temp"))
    for shard in range(UNUSABLE, grouping.shards):
        if files := grouping.shard_files(shard):
            query = f"SELECT status, count(*), count(*) - count(time) FROM read_parquet({_list(files)}) GROUP BY status"
            for status, rows, timeless in database.execute(query).fetchall():
                counts[status] += rows
                if status == "kept" and grouping.fields.time is not None:
                    counts["no_time"] += timeless
    database.close()
    counts["rows"] = sum(counts[s] for s in ("malformed", "no_user", "no_text", "excluded", "kept"))
    return counts


def _rejected(grouping: Grouping) -> Iterator[int]:
    for file in sorted(grouping.rows.glob("*/rejected.json")):
        yield int(json.loads(file.read_text()))


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
            report(max(0.0, database.query_progress()) / 100.0)
    except BaseException:
        database.interrupt()
        thread.join()
        raise
    if trouble:
        raise trouble[0]


def _share(progress: Progress, name: str, before: float, part: float) -> Callable[[float], None]:
    return lambda fraction: progress(name, before + part * min(fraction, 1.0))


def _list(files: Sequence[str]) -> str:
    return "[" + ", ".join(quoted(f) for f in files) + "]"


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
