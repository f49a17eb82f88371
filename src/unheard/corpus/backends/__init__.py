"""Groups the input by user: all posts of one user together, in the order of their times.

The input is scanned once. Each row goes into a file of its shard, chosen by the hash of the user id, so that a user is
in exactly one shard. Then each shard is sorted and its rows are given to a task (`ShardTask`), such as
`encode.EncodeShard`: users in the order of their ids, the posts of a user in the order of time, then of their position
in the input.

`Grouping` is the plan. Two implementations of `GroupingBackend` carry it out with the same result to the byte:

    backends.duckdb.DuckDBBackend    one machine, one process per core, fixed memory
    backends.spark.SparkBackend      a Spark cluster

A new backend implements the three methods of `GroupingBackend`.
"""

import itertools
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any, Protocol, TypeVar

import duckdb

from unheard import storage
from unheard.config import parse_json
from unheard.corpus import Progress, available_cores
from unheard.corpus.readers import sql_list
from unheard.corpus.scan import UNUSABLE, open_database
from unheard.corpus.sources import Fields, FileBatch
from unheard.errors import CorpusError

T = TypeVar("T")

ORDER = '"user", "time" NULLS LAST, position'
"""The SQL order of the rows of a shard."""

Rows = Iterator[tuple[Sequence[str], Sequence[str]]]
"""Sorted rows in blocks of some thousand: the users and the texts of a block, as two columns."""


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
        """Write every row into files by shard under `grouping.rows`; return the counts of `count_rows`."""
        ...

    def find_duplicates(self, grouping: Grouping) -> int:
        """Count posts that several users wrote word for word, and write their hashes to `grouping.duplicates`."""
        ...

    def over_shards(
        self, grouping: Grouping, task: ShardTask, shards: Sequence[int]
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """Run the task on the sorted rows of each shard; yield (shard, result) as the tasks finish."""
        ...


def read_work_file(file: Path, kind: type[T]) -> T:
    """Read a JSON file of an unfinished store; raise `CorpusError` if it is damaged."""
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
    database = open_database(grouping.memory_bytes, available_cores(), str(grouping.work / "temp"))
    for shard in range(UNUSABLE, grouping.shards):
        if files := grouping.shard_files(shard):
            query = (
                f"SELECT reason, count(*), count(*) - count(time) FROM read_parquet({sql_list(files)}) GROUP BY reason"
            )
            for reason, rows, timeless in database.execute(query).fetchall():
                if reason is None or reason in reasons:  # undecided rows are in rejected.json
                    counts[reason or "kept"] += rows
                if reason is None and grouping.fields.time is not None:
                    counts["no_time"] += timeless
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
