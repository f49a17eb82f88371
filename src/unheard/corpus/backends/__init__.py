"""Everything one user wrote, in one place and in time order: scanned once, cut into shards by user, each shard sorted.

In: batches of files. Out: for each shard its rows, user and text: users in order of their ids, posts in order of
time, then of their place in the input. This is the plan; two engines follow it, DuckDB (duck.py) and Spark
(spark.py), with the same result to the byte.
"""

import itertools
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any, Protocol

import duckdb

from unheard.corpus.progress import Progress, cores
from unheard.corpus.readers.columns import Fields, FileBatch, sql_list
from unheard.corpus.scan import UNUSABLE, open_database
from unheard.errors import CorpusError

ORDER = '"user", "time" NULLS LAST, place'
Rows = Iterator[tuple[Sequence[str], Sequence[str]]]  # users and texts, some thousand at a time: columns are quick


class ShardTask(Protocol):
    """What is done with the users of one shard. It may run in another process or on another machine: picklable."""

    def __call__(self, shard: int, rows: Rows) -> dict[str, Any]: ...


@dataclass(frozen=True, kw_only=True)
class Grouping:
    """The plan that both engines follow. `work` is where rows wait between the scan and the tasks."""

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
        return self.work / "rows"

    @property
    def duplicates(self) -> Path:
        return self.work / "duplicates.parquet"

    def batch_folder(self, batch: FileBatch) -> Path:
        return self.rows / f"{batch.number:05d}"

    def shard_files(self, shard: int) -> list[str]:
        return sorted(str(p) for p in self.rows.glob(f"*/shard={shard}/*.parquet"))

    def notice(self, batch: FileBatch, sentences: Sequence[str]) -> None:
        """Keep what the owner should hear about a batch's files; scanned again, it is said once."""
        folder = self.work / "noticed"
        folder.mkdir(exist_ok=True)
        (folder / f"{batch.number:05d}.json").write_text(json.dumps(list(sentences)))

    def noticed(self) -> list[str]:
        files = sorted((self.work / "noticed").glob("*.json"))
        return [sentence for file in files for sentence in json.loads(file.read_text())]

    def check_version(self) -> None:
        """A user's shard is DuckDB's hash of their id, which may differ between versions and would split the user."""
        if duckdb.__version__ != self.duckdb_version:
            raise CorpusError(
                f"A worker has DuckDB {duckdb.__version__}, the others {self.duckdb_version}: install one version on all."
            )


class GroupingBackend(Protocol):
    """Who does the work. What it means is above."""

    def scan(self, grouping: Grouping, batches: Sequence[FileBatch], progress: Progress) -> Counter[str]:
        """Every row into files by shard under `grouping.rows`; how many there are, and of what kind."""
        ...

    def find_duplicates(self, grouping: Grouping) -> int:
        """How many posts stand word for word under several users; their hashes go to `grouping.duplicates`."""
        ...

    def over_shards(
        self, grouping: Grouping, task: ShardTask, shards: Sequence[int]
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """Run the task on each shard's sorted rows; (shard, result) as they finish."""
        ...


def count_rows(grouping: Grouping) -> Counter[str]:
    """How many rows were read and why some cannot be used, from the scanned files: the same for both engines."""
    reasons = ("malformed", "no_user", "no_text", "excluded", "kept")
    counts: Counter[str] = Counter(dict.fromkeys(reasons, 0))
    for file in sorted(grouping.rows.glob("*/rejected.json")):
        counts.update(json.loads(file.read_text()))
    database = open_database(grouping.memory_bytes, cores(), str(grouping.work / "temp"))
    for shard in range(UNUSABLE, grouping.shards):
        if files := grouping.shard_files(shard):
            query = (
                f"SELECT reason, count(*), count(*) - count(time) FROM read_parquet({sql_list(files)}) GROUP BY reason"
            )
            for reason, rows, timeless in database.execute(query).fetchall():
                if reason is None or reason in reasons:  # what is undecided was counted apart
                    counts[reason or "kept"] += rows
                if reason is None and grouping.fields.time is not None:
                    counts["no_time"] += timeless
    database.close()
    counts["rows"] = sum(counts[reason] for reason in reasons)
    return counts


def by_user(rows: Rows) -> Iterator[tuple[str, Iterator[Sequence[str]]]]:
    """Every user with their texts, in one or more lists. Python's work is a step for each user, not for each row."""
    pieces = ((user, texts[part]) for users, texts in rows for user, part in runs(users))
    for user, lists in itertools.groupby(pieces, key=itemgetter(0)):
        yield user, map(itemgetter(1), lists)


def runs(values: Sequence[Any]) -> Iterator[tuple[Any, slice]]:
    """Where equal values stand in a row."""
    place = 0
    for value, equal in itertools.groupby(values):
        begin, place = place, place + len(list(equal))
        yield value, slice(begin, place)
