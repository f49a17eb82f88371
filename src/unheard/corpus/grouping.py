"""Groups the posts of the input by user, sorts the posts of each user by time, and assigns each user to a split.

The input is scanned once. Each row is written to a file of its shard, chosen by the hash of the user id, so that a user
is in exactly one shard. Then each shard is sorted and its rows are passed to a task (`ShardTask`), such as
`encode.EncodeShard`. Users are sorted by their ids, and the posts of a user by time, then by position in the input.

    Grouping           the plan: the columns, the number of shards, the work folder
    GroupingBackend    the protocol of a backend, which carries out the plan. All backends give identical stores.
    DuckDBBackend      runs on one machine: DuckDB scans and sorts within a memory limit, with one process per core
    SparkBackend       runs on a Spark cluster (module `spark`)
    SplitRule          decides which users train, which are held out, and which are public

A new backend implements the three methods of `GroupingBackend`. The work folder of `DuckDBBackend`:

    rows/00007/shard=3/*.parquet     the rows of batch 7 whose users are in shard 3
    rows/00007/shard=-1/*.parquet    the unusable rows of batch 7: the reasons, without user and text
    rows/00007/rejected.json         the numbers of rows that are counted after the query, by reason
    noticed/00007.json               warnings about the files of batch 7
    duplicates.parquet               hashes of posts that several users wrote
    temp/                            intermediate results that do not fit in memory

A batch is written into a temporary folder, which gets its final name when the batch is complete; a repeated scan
therefore skips finished batches. The processes share `Grouping.memory_bytes`, and DuckDB moves intermediate results
that do not fit to disk. Sorted shards are read in blocks of a few thousand rows, so that a user with half of all text
does not exceed the memory.
"""

import contextlib
import ctypes
import gc
import hashlib
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import Any, Protocol, TypeVar

import duckdb

from unheard import storage
from unheard.config import read_json, require
from unheard.corpus import AVAILABLE_CORES, Progress
from unheard.corpus.readers import (
    UNUSABLE,
    ScanSummary,
    open_database,
    quoted,
    scan_error,
    scan_sql,
    sql_list,
    summarise_scan,
)
from unheard.corpus.sources import Fields, FileBatch, is_truncation_error
from unheard.errors import CorpusError

T = TypeVar("T")

ORDER = '"user", "time" NULLS LAST, position'
"""The SQL order of the rows of a shard."""

Rows = Iterator[tuple[Sequence[str], Sequence[str]]]
"""The sorted rows of a shard, in blocks. A block is two columns of equal length: the user ids and the texts."""

_FETCH_ROWS = 4096
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # constants of glibc's malloc.h
_ROW_GROUP = 8192  # Small row groups keep the buffers of the Parquet writer small, which saves a quarter of the time.


class ShardTask(Protocol):
    """A function that a backend calls with the number and the sorted rows of one shard.

    It may run in another process or on another machine, so it must be picklable, and its result must be JSON.
    """

    def __call__(self, shard: int, rows: Rows) -> dict[str, Any]: ...


@dataclass(frozen=True, kw_only=True)
class Grouping:
    """The plan that every backend follows.

    Args:
        work: The work folder, which holds the scanned rows until the tasks have read them.
        fields: The columns to read.
        shards: The number of shards.
        excluded: Ids of users to leave out.
        duplicate_chars: The least number of characters of a post that is compared with the posts of other users.
        drop_duplicates: Whether posts that several users wrote word for word are left out.
        memory_bytes: The memory limit of all processes together.
        duckdb_version: The version of DuckDB that every worker must have (`check_version`).
    """

    work: Path
    fields: Fields
    shards: int
    excluded: tuple[str, ...] = field(default=(), repr=False)
    duplicate_chars: int = 100
    drop_duplicates: bool = False
    memory_bytes: int = 1 << 30
    duckdb_version: str = duckdb.__version__

    @property
    def rows(self) -> Path:
        """The folder of the scanned rows. It has one folder per batch, each with one folder per shard."""
        return self.work / "rows"

    @property
    def duplicates(self) -> Path:
        """The path of the hashes of posts that several users wrote."""
        return self.work / "duplicates.parquet"

    def batch_folder(self, batch: FileBatch) -> Path:
        """Return the folder of the rows of one batch. It exists only if the batch was scanned completely."""
        return self.rows / f"{batch.number:05d}"

    def shard_files(self, shard: int) -> list[str]:
        """Return the files with the rows of one shard, from finished batches only."""
        return sorted(str(p) for p in self.rows.glob(f"[0-9]*/shard={shard}/*.parquet"))

    def save_warnings(self, batch: FileBatch, warnings: Sequence[str]) -> None:
        """Write the warnings about a batch to the work folder. A repeated scan of the batch replaces the file."""
        folder = self.work / "noticed"
        folder.mkdir(exist_ok=True)
        storage.replace_file(folder / f"{batch.number:05d}.json", json.dumps(list(warnings)).encode())

    def warnings(self) -> list[str]:
        """Return the warnings about all batches, in the order of the batches. They are for the owner of the data."""
        files = sorted((self.work / "noticed").glob("[0-9]*.json"))
        return [warning for file in files for warning in read_work_file(file, list)]

    def check_version(self) -> None:
        """Raise `CorpusError` if this process has another version of DuckDB than the process that made the plan.

        Two versions could hash a user id differently, which would put the posts of one user into two shards.
        """
        if duckdb.__version__ != self.duckdb_version:
            raise CorpusError(
                f"A worker has DuckDB {duckdb.__version__}, the others {self.duckdb_version}: "
                "install one version on all."
            )


class GroupingBackend(Protocol):
    """Carries out a `Grouping`. A backend decides where the work runs; the result is the same with every backend."""

    def scan(self, grouping: Grouping, batches: Sequence[FileBatch], progress: Progress) -> Counter[str]:
        """Read all batches, write every row to a file of its shard under `grouping.rows`, and count the rows.

        Args:
            grouping: The plan.
            batches: The files, in the order of the input.
            progress: Called with the finished fraction.

        Returns:
            The counts of `count_rows`.
        """
        ...

    def find_duplicates(self, grouping: Grouping) -> int:
        """Return the number of posts that several users wrote word for word; write hashes to `grouping.duplicates`."""
        ...

    def over_shards(
        self, grouping: Grouping, task: ShardTask, shards: Sequence[int]
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """Run the task on the sorted rows of each shard. Yield (shard, result) as soon as a task is finished.

        Args:
            grouping: The plan. Its scan must be finished.
            task: The function to run on each shard.
            shards: The numbers of the shards.
        """
        ...


def read_work_file(file: Path, kind: type[T]) -> T:
    """Return the content of a JSON file in the work folder of an unfinished store.

    Args:
        file: The file.
        kind: The type that its content must have: `dict` or `list`.

    Raises:
        CorpusError: The file is missing, is not JSON, or has content of another type.
    """
    content = read_json(file)
    if not isinstance(content, kind):
        raise CorpusError(
            f"{file} of an unfinished store is missing or damaged. Delete its folder `work` (words that were drawn for a "
            "private vocabulary are outside this folder and are kept), then run the same command again."
        )
    return content


def count_rows(grouping: Grouping) -> Counter[str]:
    """Count the scanned rows. The counts are exact, so they are for the owner of the data only.

    Returns:
        `rows` (the total), `kept` (usable rows), and the unusable rows by reason: `malformed`, `no_user`, `no_text`,
        `excluded`. If there are any: `no_time` (kept rows without a readable time), and `merged_users` (users whose id
        has several spellings in the input, such as 1 and 1.0).
    """
    reasons = ("malformed", "no_user", "no_text", "excluded", "kept")
    counts: Counter[str] = Counter(dict.fromkeys(reasons, 0))
    for file in sorted(grouping.rows.glob("[0-9]*/rejected.json")):
        counts.update(read_work_file(file, dict))
    database = open_database(grouping.memory_bytes, AVAILABLE_CORES, str(grouping.work / "temp"))
    by_shard = {shard: files for shard in range(UNUSABLE, grouping.shards) if (files := grouping.shard_files(shard))}
    has_spellings = False
    if by_shard:
        files = list(itertools.chain.from_iterable(by_shard.values()))
        query = "SELECT reason, count(*), count(*) - count(time), count(spelling) FROM read_parquet({}) GROUP BY reason"
        for reason, rows, timeless, respelled in database.execute(query.format(sql_list(files))).fetchall():
            has_spellings |= respelled > 0
            if reason is None or reason in reasons:  # undecided rows were counted again, in rejected.json
                counts[reason or "kept"] += rows
            if reason is None and grouping.fields.time is not None:
                counts["no_time"] += timeless
    for files in by_shard.values() if has_spellings else ():
        respelled = f'SELECT DISTINCT "user" FROM read_parquet({sql_list(files)}) WHERE spelling IS NOT NULL'
        merged = (
            f'SELECT "user" FROM read_parquet({sql_list(files)}) WHERE "user" IN ({respelled}) '
            'GROUP BY "user" HAVING count(DISTINCT coalesce(spelling, "user")) > 1'
        )
        ((users,),) = database.execute(f"SELECT count(*) FROM ({merged})").fetchall()
        if users:
            counts["merged_users"] += users
    database.close()
    counts["rows"] = sum(counts[reason] for reason in reasons)
    return counts


def by_user(rows: Rows) -> Iterator[tuple[str, Iterator[Sequence[str]]]]:
    """Yield each user with an iterator of lists of the user's texts, one list per block that the user is in.

    Working on lists is faster than working on rows. The texts of a user must be read before the next user.
    """
    pieces = ((user, texts[part]) for users, texts in rows for user, part in equal_groups(users))
    for user, lists in itertools.groupby(pieces, key=itemgetter(0)):
        yield user, map(itemgetter(1), lists)


def equal_groups(values: Sequence[Any]) -> Iterator[tuple[Any, slice]]:
    """Yield (value, slice) for each group of equal neighbouring values. The slice holds the positions of the group."""
    position = 0
    for value, equal in itertools.groupby(values):
        begin, position = position, position + len(list(equal))
        yield value, slice(begin, position)


@dataclass(frozen=True, kw_only=True)
class SplitRule:
    """The rule that assigns each user to a split: held out, public, or otherwise training.

    The split of a user depends only on a hash of the user's id and a salt. It is therefore the same on every machine
    and with every backend, and it costs no privacy budget, since no other user influences it. All text of a user is in
    one split, so held-out text never comes from a user that the model was trained on.

    Args:
        held_out: The fraction of held-out users, on whom models are evaluated.
        public: The fraction of users whose text is public, for training without privacy cost.
        salt: Any text. Another salt gives another random split.

    Example:
        >>> SplitRule(held_out=0.5).split_of("ann")
        'held_out'
    """

    held_out: float = 0.05
    public: float = 0.0
    salt: str = "unheard"

    def __post_init__(self) -> None:
        require(0 <= self.held_out < 1, f"held_out must be in [0, 1), not {self.held_out}.")
        require(0 <= self.public < 1, f"public must be in [0, 1), not {self.public}.")
        require(self.held_out + self.public < 1, "held_out and public together leave no user to train on.")

    def split_of(self, user: str) -> str:
        """Return the split of a user: "train", "held_out" or "public"."""
        point = unit_hash(user, prefix=self._prefix)
        if point < self.held_out:
            return "held_out"
        return "public" if point < self.held_out + self.public else "train"

    @cached_property
    def _prefix(self) -> bytes:
        """The encoded salt, with which the hash of every user begins."""
        return encode_labels(self.salt, "split")

    def names(self) -> tuple[str, ...]:
        """Return the names of the splits of the store: "train", "held_out" and, if some users are public, "public"."""
        return ("train", "held_out", "public") if self.public else ("train", "held_out")


def unit_hash(*labels: str, prefix: bytes = b"") -> float:
    """Return a pseudo-random number in [0, 1), a hash of the labels.

    Args:
        labels: Texts to hash.
        prefix: Labels that were already encoded with `encode_labels`; they are hashed first.
    """
    return int.from_bytes(hashlib.sha256(prefix + encode_labels(*labels)).digest()[:6], "little") / 2.0**48


def encode_labels(*labels: str) -> bytes:
    """Return the labels as bytes, each after its length, so that different lists of labels have different encodings."""
    message = b""
    for label in labels:
        encoded = label.encode("utf-8", "surrogatepass")
        message += len(encoded).to_bytes(8, "little") + encoded
    return message


@dataclass(frozen=True, kw_only=True)
class DuckDBBackend:
    """Groups rows by user with DuckDB, in one or several processes of this machine.

    Args:
        workers: The number of processes; 0 means one per core. More than one process needs a main module that can be
            imported again (`if __name__ == "__main__":` in a script).
    """

    workers: int = 0
    _kept: list[ProcessPoolExecutor] = field(default_factory=list, init=False, repr=False, compare=False)

    @contextlib.contextmanager
    def kept_processes(self) -> Iterator[None]:
        """Keep one pool of processes for all steps within the `with` block. A process needs half a second to start."""
        self._kept.append(self._start_pool(self.workers or AVAILABLE_CORES))  # no process starts before the first task
        try:
            yield
        finally:
            self._kept.pop().shutdown(cancel_futures=True)

    def scan(self, grouping: Grouping, batches: Sequence[FileBatch], progress: Progress) -> Counter[str]:
        """See `GroupingBackend.scan`. Batches that were scanned before an interruption are not scanned again."""
        total = sum(b.text_bytes for b in batches) or 1
        waiting = [b for b in batches if not grouping.batch_folder(b).is_dir()]
        done = total - sum(b.text_bytes for b in waiting)
        for leftover in grouping.rows.glob(".*.new"):  # temporary folders of an interrupted scan
            shutil.rmtree(leftover, ignore_errors=True)
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
        """See `GroupingBackend.find_duplicates`."""
        files = [file for shard in range(grouping.shards) for file in grouping.shard_files(shard)]
        if not files:
            return 0
        database = open_database(grouping.memory_bytes, AVAILABLE_CORES, str(grouping.work / "temp"))
        target = quoted(str(grouping.duplicates))
        hashes = f'SELECT text_hash, "user" FROM read_parquet({sql_list(files)}) WHERE text_hash IS NOT NULL'
        # Few posts occur twice, so the users are compared only for posts whose hash occurs twice.
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
        """See `GroupingBackend.over_shards`."""
        yield from self._parallel(run_on_shard, grouping, shards, task)

    def _parallel(
        self, function: Callable[..., Any], grouping: Grouping, items: Sequence[Any], *more: Any
    ) -> Iterator[Any]:
        """Yield (item, function(grouping, item, processes, *more)) for each item, as soon as its call is finished.

        The calls run in the processes of a pool, or in this process if there is one worker or one item. Each call gets
        the number of processes, so that it uses only its share of the memory.
        """
        workers = min(self.workers or AVAILABLE_CORES, len(items))
        if workers <= 1:
            for item in items:
                yield item, function(grouping, item, 1, *more)
            return
        with contextlib.ExitStack() as stack:
            pool = self._kept[-1] if self._kept else stack.enter_context(self._start_pool(workers))
            with _signals_blocked():  # New processes inherit this: only the parent handles signals, and stops the pool.
                waiting = {pool.submit(function, grouping, item, workers, *more): item for item in items}
            try:
                for finished in as_completed(waiting):
                    yield waiting[finished], finished.result()
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise

    def _start_pool(self, workers: int) -> ProcessPoolExecutor:
        """Return a pool of at most this many processes, set up by `_start_worker`."""
        # Not fork: a forked copy of a process in which DuckDB has threads may hang.
        spawn = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(workers, mp_context=spawn, initializer=_start_worker)


_KEPT_DATABASES: dict[tuple[int, int, str], duckdb.DuckDBPyConnection] = {}
"""Open databases of this process that are not in use, by their settings (memory, threads, temporary folder).

They are reused, since opening a new database for each shard would take 5 % of the time of the encoding."""
_keeps_databases = False
"""Whether this process keeps databases for reuse. Only the processes of a pool do, since they end with the command."""


def _start_worker() -> None:
    """Set up a process of the pool: turn off the garbage collector, and keep freed memory and open databases."""
    global _keeps_databases
    _keeps_databases = True
    gc.disable()  # The rows have no reference cycles; searching millions of objects for cycles takes 10 % of the time.
    try:
        # By default glibc returns freed memory to the system and requests it again for the next array, which takes 5 %
        # of the time of the encoding. With these settings a process keeps up to 64 MiB.
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, 1 << 25)
        mallopt(_M_TRIM_THRESHOLD, 1 << 26)
    except (OSError, AttributeError, TypeError):  # another C library
        return


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    """Block SIGINT (Ctrl-C), SIGTERM and SIGHUP within the `with` block.

    This process receives them after the block. Processes that are started within the block never receive them.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def scan_batch(
    grouping: Grouping, batch: FileBatch, processes: int, report: Callable[[float], None] = lambda part: None
) -> None:
    """Write the rows of one batch into files by shard. The folder of the batch gets its name when it is complete.

    If DuckDB reports a truncated .gz file, the readable part of the file is unpacked and the batch is scanned again.

    Args:
        grouping: The plan.
        batch: The files to read.
        processes: The number of processes that share the memory and the cores.
        report: Called with the finished fraction of this batch.

    Raises:
        InputError: A column is missing, or a file cannot be read.
        CorpusError: The disk is full or the memory is too small.
    """
    unpacked = grouping.work / "temp" / f"unpacked-{batch.number}"
    readable, truncated = batch.replace_truncated(unpacked, check_gzip=False)
    with storage.staged_folder(grouping.batch_folder(batch)) as folder:
        try:
            summary = _scan_into(folder, grouping, readable, processes, report)
        except duckdb.Error as error:
            if not is_truncation_error(error):
                raise scan_error(error, batch) from None
            readable, truncated = batch.replace_truncated(unpacked, check_gzip=True)
            try:
                summary = _scan_into(folder, grouping, readable, processes, report)
            except duckdb.Error as second:
                raise scan_error(second, batch) from None
        grouping.save_warnings(batch, [*truncated, *summary.warnings])
        (folder / "rejected.json").write_text(json.dumps(summary.rows))
    shutil.rmtree(unpacked, ignore_errors=True)


def _scan_into(
    folder: Path, grouping: Grouping, batch: FileBatch, processes: int, report: Callable[[float], None]
) -> ScanSummary:
    """Run the query of `scan_sql`, write its rows into `folder`, one folder per shard, and return the summary."""
    for old in folder.iterdir():  # the output of a first attempt, which failed at a truncated file
        shutil.rmtree(old)
    temp = str(grouping.work / "temp" / f"batch-{batch.number}")
    threads = max(1, AVAILABLE_CORES // processes)
    database = open_database(grouping.memory_bytes // processes, threads, temp, grouping.excluded)
    # DuckDB keeps up to this many rows of each shard in memory, so the number must be small if there are many shards.
    database.execute(f"SET partitioned_write_flush_threshold={max(2048, 262_144 // grouping.shards)}")
    try:
        query = scan_sql(database, batch, grouping.fields, grouping.shards, grouping.duplicate_chars)
        options = f"FORMAT parquet, COMPRESSION uncompressed, ROW_GROUP_SIZE {_ROW_GROUP}"
        options += ", PARTITION_BY (shard), OVERWRITE_OR_IGNORE"
        _run_interruptibly(database, f"COPY ({query}) TO {quoted(str(folder))} ({options})", report)
        return summarise_scan(database, batch, grouping.fields, (folder / f"shard={UNUSABLE}").is_dir())
    finally:
        database.close()


def run_on_shard(grouping: Grouping, shard: int, processes: int, task: ShardTask) -> dict[str, Any]:
    """Run a task on the sorted rows of one shard and return its result.

    Args:
        grouping: The plan.
        shard: The number of the shard.
        processes: The number of processes that share the memory and the cores.
        task: The function to run.
    """
    return task(shard, sorted_rows(grouping, shard, processes))


def sorted_rows(grouping: Grouping, shard: int, processes: int) -> Rows:
    """Yield the users and texts of one shard in `ORDER`, in blocks. DuckDB sorts on disk if the memory is too small.

    Args:
        grouping: The plan.
        shard: The number of the shard.
        processes: The number of processes that share the memory and the cores.

    Raises:
        CorpusError: DuckDB failed, for example because the disk is full.
    """
    files = grouping.shard_files(shard)
    if not files:
        return
    temp = str(grouping.work / "temp" / f"process-{os.getpid()}")
    settings = (grouping.memory_bytes // processes, max(1, AVAILABLE_CORES // processes), temp)
    database = _KEPT_DATABASES.pop(settings, None) or open_database(*settings)
    unwanted = ""
    if grouping.drop_duplicates:
        unwanted = (
            f"WHERE text_hash IS NULL OR text_hash NOT IN (SELECT text_hash FROM {quoted(str(grouping.duplicates))})"
        )
    is_complete = False
    try:
        result = database.execute(
            f'SELECT "user", text FROM read_parquet({sql_list(files)}) {unwanted} ORDER BY {ORDER}'
        )
        while rows := result.fetchmany(_FETCH_ROWS):
            users, texts = zip(*rows, strict=True)
            yield users, texts
        is_complete = True
    except duckdb.Error as error:
        first = str(error).strip().split("\n")[0]
        raise CorpusError(
            f"Sorting a part of the corpus failed: {first} Free some disk space or raise --memory."
        ) from None
    finally:
        if is_complete and _keeps_databases:
            _KEPT_DATABASES[settings] = database
        else:
            database.close()


def _run_interruptibly(database: duckdb.DuckDBPyConnection, query: str, report: Callable[[float], None]) -> None:
    """Run a query in another thread, so that this thread can report progress and be interrupted.

    An exception in this thread (such as Ctrl-C) stops the query. An error of the query is raised in this thread.
    """
    errors: list[BaseException] = []

    def work() -> None:
        """Run the query and keep its error, which the caller raises."""
        try:
            database.execute(query)
        except BaseException as error:
            errors.append(error)

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
    if errors:
        raise errors[0]
