"""Groups the input by user: all posts of one user together, in the order of their times, and each user in one split.

The input is scanned once. Each row goes into a file of its shard, chosen by the hash of the user id, so that a user is
in exactly one shard. Then each shard is sorted and its rows are given to a task (`ShardTask`), such as
`encode.EncodeShard`: users in the order of their ids, the posts of a user in the order of time, then of their position
in the input.

    Grouping           the plan: the columns, the number of shards, the work folder
    GroupingBackend    the protocol of what carries out the plan, with the same result to the byte
    DuckDBBackend      one machine: DuckDB scans and sorts within a fixed memory, in one process per core
    SparkBackend       a Spark cluster (`spark`)
    SplitRule          which users train, which are held out, and which are public

A new backend implements the three methods of `GroupingBackend`. The work folder of `DuckDBBackend`:

    rows/00007/shard=3/*.parquet     the rows of batch 7 whose users are in shard 3
    rows/00007/shard=-1/*.parquet    its unusable rows: only the reasons
    rows/00007/rejected.json         rows that DuckDB rejected, by reason
    duplicates.parquet               hashes of posts that several users wrote
    temp/                            intermediate results that exceed the memory

A batch is written into a staged folder that gets its name when it is complete, so a repeated scan skips finished
batches. The processes share `Grouping.memory_bytes`, and DuckDB moves to disk what does not fit. A shard is sorted by
DuckDB and read in blocks of some thousand rows, so that even a user with half of all text fits.
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
from unheard.config import parse_json, require
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
"""Sorted rows in blocks of some thousand: the users and the texts of a block, as two columns."""

_FETCH_ROWS = 4096
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_ROW_GROUP = 8192  # small row groups leave the writer's buffers early: a quarter less work than with the default


class ShardTask(Protocol):
    """Work on the rows of one shard. It may run in another process or on another machine, so it must be picklable."""

    def __call__(self, shard: int, rows: Rows) -> dict[str, Any]: ...


@dataclass(frozen=True, kw_only=True)
class Grouping:
    """The plan that every backend follows.

    Args:
        work: A folder for the rows between the scan and the tasks.
        fields: The columns to read.
        shards: The number of shards.
        excluded: Ids of users to leave out.
        duplicate_chars: The least length of a post that counts as a duplicate.
        drop_duplicates: Whether posts that several users wrote word for word are left out.
        memory_bytes: The memory for all processes together.
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
        """The folder of the scanned rows: one folder per batch, in it one folder per shard."""
        return self.work / "rows"

    @property
    def duplicates(self) -> Path:
        """The file of the hashes of duplicate posts."""
        return self.work / "duplicates.parquet"

    def batch_folder(self, batch: FileBatch) -> Path:
        """The folder of the rows of one batch. It exists only when the batch has been scanned completely."""
        return self.rows / f"{batch.number:05d}"

    def shard_files(self, shard: int) -> list[str]:
        """The files with the rows of one shard, of finished batches only: unfinished ones are in hidden folders."""
        return sorted(str(p) for p in self.rows.glob(f"[0-9]*/shard={shard}/*.parquet"))

    def save_warnings(self, batch: FileBatch, warnings: Sequence[str]) -> None:
        """Keep the warnings about a batch for the owner. A repeated scan of the batch replaces them."""
        folder = self.work / "noticed"
        folder.mkdir(exist_ok=True)
        storage.replace_file(folder / f"{batch.number:05d}.json", json.dumps(list(warnings)).encode())

    def warnings(self) -> list[str]:
        """All warnings, in the order of the batches."""
        files = sorted((self.work / "noticed").glob("[0-9]*.json"))
        return [warning for file in files for warning in read_work_file(file, list)]

    def check_version(self) -> None:
        """Raise `CorpusError` if a worker has another version of DuckDB.

        Its hash of a user id could differ, which would put the posts of one user into two shards.
        """
        if duckdb.__version__ != self.duckdb_version:
            raise CorpusError(
                f"A worker has DuckDB {duckdb.__version__}, the others {self.duckdb_version}: "
                "install one version on all."
            )


class GroupingBackend(Protocol):
    """Carries out a `Grouping`. The backend decides where the work runs, and never what the result is."""

    def scan(self, grouping: Grouping, batches: Sequence[FileBatch], progress: Progress) -> Counter[str]:
        """Write every row into files by shard under `grouping.rows`; return the counts of `count_rows`.

        Args:
            grouping: The plan.
            batches: The files, in the order of the input.
            progress: Called with the finished fraction.
        """
        ...

    def find_duplicates(self, grouping: Grouping) -> int:
        """Count posts that several users wrote word for word, and write their hashes to `grouping.duplicates`."""
        ...

    def over_shards(
        self, grouping: Grouping, task: ShardTask, shards: Sequence[int]
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """Run the task on the sorted rows of each shard; yield (shard, result) as the tasks finish.

        Args:
            grouping: The plan, whose scan is finished.
            task: The work on one shard.
            shards: The numbers of the shards.
        """
        ...


def read_work_file(file: Path, kind: type[T]) -> T:
    """Read a JSON file of an unfinished store; raise `CorpusError` if it is damaged.

    Args:
        file: The file.
        kind: The type that its content must have: `dict` or `list`.
    """
    try:
        content = parse_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        content = None
    if not isinstance(content, kind):
        raise CorpusError(
            f"{file} of an unfinished store is missing or damaged. Delete its folder `work` (words that were drawn for a "
            "private vocabulary lie beside it and stay), then run the same command again."
        )
    return content


def count_rows(grouping: Grouping) -> Counter[str]:
    """Count the scanned rows: `rows` in total, `kept`, and the unusable ones by reason; `merged_users` is apart.

    `merged_users` is the number of users whose id is spelled in several ways in the input (1 and 1.0).
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
            if reason is None or reason in reasons:  # undecided rows are in rejected.json
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
    """Yield each user with the lists of their texts. Python takes one step per user and block, not one per row."""
    pieces = ((user, texts[part]) for users, texts in rows for user, part in equal_runs(users))
    for user, lists in itertools.groupby(pieces, key=itemgetter(0)):
        yield user, map(itemgetter(1), lists)


def equal_runs(values: Sequence[Any]) -> Iterator[tuple[Any, slice]]:
    """Yield each run of equal neighbouring values, as the value and a slice."""
    position = 0
    for value, equal in itertools.groupby(values):
        begin, position = position, position + len(list(equal))
        yield value, slice(begin, position)


@dataclass(frozen=True, kw_only=True)
class SplitRule:
    """The fractions of users in each split; the rest train.

    The split of a user depends on a hash of the user's id and a salt, and on nothing else: it is the same on every
    machine and with every backend, and it needs no privacy budget, since no other user influences it. A user is in one
    split with all of their text, so held-out text never comes from a user that the model was trained on.

    Args:
        held_out: The fraction of held-out users, on whom models are evaluated.
        public: The fraction of users whose text is public, for training without privacy cost.
        salt: Another salt gives another random split.

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
        return encode_labels(self.salt, "split")

    def names(self) -> tuple[str, ...]:
        """The splits that the store has."""
        return ("train", "held_out", "public") if self.public else ("train", "held_out")


def unit_hash(*labels: str, prefix: bytes = b"") -> float:
    """Return a pseudo-random number in [0, 1) that depends on the labels alone (and on those encoded in `prefix`)."""
    return int.from_bytes(hashlib.sha256(prefix + encode_labels(*labels)).digest()[:6], "little") / 2.0**48


def encode_labels(*labels: str) -> bytes:
    """Encode labels with their lengths, so that different lists of labels have different encodings."""
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
        """In the block all steps share their processes, each of which takes half a second to start."""
        self._kept.append(self._start_pool(self.workers or AVAILABLE_CORES))  # a process starts with its first task
        try:
            yield
        finally:
            self._kept.pop().shutdown(cancel_futures=True)

    def scan(self, grouping: Grouping, batches: Sequence[FileBatch], progress: Progress) -> Counter[str]:
        """See `GroupingBackend.scan`. Batches that were scanned before an interruption are not scanned again."""
        total = sum(b.text_bytes for b in batches) or 1
        waiting = [b for b in batches if not grouping.batch_folder(b).is_dir()]
        done = total - sum(b.text_bytes for b in waiting)
        for leftover in grouping.rows.glob(".*.new"):  # staged folders of an interrupted scan
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
        # Few posts occur twice. They are found by their hashes alone, and only then their users are compared.
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
        """Yield (item, function(grouping, item, processes, *more)) as they finish; the processes share the memory."""
        workers = min(self.workers or AVAILABLE_CORES, len(items))
        if workers <= 1:
            for item in items:
                yield item, function(grouping, item, 1, *more)
            return
        with contextlib.ExitStack() as stack:
            pool = self._kept[-1] if self._kept else stack.enter_context(self._start_pool(workers))
            with _signals_blocked():  # the processes inherit this: a signal is for their parent, which ends them
                waiting = {pool.submit(function, grouping, item, workers, *more): item for item in items}
            try:
                for finished in as_completed(waiting):
                    yield waiting[finished], finished.result()
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise

    def _start_pool(self, workers: int) -> ProcessPoolExecutor:
        # spawn: a forked copy of a process with DuckDB's threads in it may hang.
        spawn = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(workers, mp_context=spawn, initializer=_start_worker)


_KEPT_DATABASES: dict[tuple[int, int, str], duckdb.DuckDBPyConnection] = {}
"""Open databases of this process that no shard uses now, by their settings. A new one for each shard would cost a
twentieth of the encoding."""
_keeps_databases = False
"""Whether databases are kept: in the processes of a pool, which end with the command."""


def _start_worker() -> None:
    """Set up a process of the pool: no search for cycles, and freed memory and open databases are kept for later use."""
    global _keeps_databases
    _keeps_databases = True
    gc.disable()  # rows are millions of tuples and texts without cycles; to search them costs a tenth
    try:
        # By default glibc returns freed memory to the system and requests it again for the next array, which costs a
        # twentieth of the encoding. With these settings a process keeps up to 64 MiB.
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, 1 << 25)
        mallopt(_M_TRIM_THRESHOLD, 1 << 26)
    except (OSError, AttributeError, TypeError):  # another C library
        return


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    """Delay Ctrl-C, SIGTERM and SIGHUP; processes that are started in this block never receive them."""
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
    """Write the rows of one batch into files by shard. The folder of the batch appears when it is complete.

    If DuckDB finds that a .gz file is truncated, the file is unpacked as far as it goes and the batch is scanned again.

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
    """Run the query of `scan_sql` and write its rows into `folder`, partitioned by shard."""
    for old in folder.iterdir():  # of a first attempt on a truncated file
        shutil.rmtree(old)
    temp = str(grouping.work / "temp" / f"batch-{batch.number}")
    threads = max(1, AVAILABLE_CORES // processes)
    database = open_database(grouping.memory_bytes // processes, threads, temp, grouping.excluded)
    # Rows wait in memory until a shard has this many. Their product with the number of shards must stay small.
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
    """Run a task on the sorted rows of one shard, with this process's share of the memory."""
    return task(shard, sorted_rows(grouping, shard, processes))


def sorted_rows(grouping: Grouping, shard: int, processes: int) -> Rows:
    """Yield the users and texts of one shard in `ORDER`. Sorting spills to disk: one user may have half of all text.

    Args:
        grouping: The plan.
        shard: The number of the shard.
        processes: The number of processes that share the memory and the cores.
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
    """Run a query in another thread, so that this thread can report progress and be interrupted."""
    errors: list[BaseException] = []

    def work() -> None:
        """Run the query in a thread, and keep its error for the caller."""
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
