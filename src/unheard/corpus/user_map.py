"""The map of user ids: a file outside the store, for its owner only, with the number of each user in each split.

A store contains no ids. On request (`unheard prepare --user-map FILE`) the ids of its users are written to a file of
the owner's choice, with the columns split, number and user, for example to erase a user or to look at one user's text.
"""

import csv
import io
import json
from collections import Counter
from pathlib import Path
from typing import Any

from unheard import storage
from unheard.corpus.grouping import read_work_file
from unheard.corpus.readers import open_database, quoted
from unheard.corpus.store import write_private_json
from unheard.errors import InputError, PrivacyError

SUFFIXES = (".csv", ".json", ".jsonl", ".parquet")
"""The name of the file ends in one of these, which is also its format."""


def check_user_map(path: Path, out: Path) -> None:
    """Check that the map can be written and lies outside the store. `prepare` calls this before it reads text.

    Args:
        path: The file of the map.
        out: The folder of the store.

    Raises:
        InputError: The suffix is not in `SUFFIXES`, or the folder does not exist.
        PrivacyError: The file would be in the store.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise InputError(f"--user-map {path}: its name must end in {', '.join(SUFFIXES)}, which is the format.")
    if path.resolve().is_relative_to(out.resolve()):
        raise PrivacyError(f"--user-map {path} lies in the store, which holds no ids. Name a file outside {out}.")
    if path.is_dir() or not path.resolve().parent.is_dir():
        raise InputError(f"--user-map {path} is not a file in a folder that is there: make the folder first.")


def write_user_map(path: Path, work: Path, shards: int) -> None:
    """Write the number of each user id to a file that only its owner can read.

    Args:
        path: The file, which `check_user_map` has accepted.
        work: The work folder of the pipeline; `names` in it has the ids of the written users by shard.
        shards: The number of shards.
    """
    entries: list[dict[str, Any]] = []
    numbers: Counter[str] = Counter()
    for shard in range(shards):
        for split, users in read_work_file(work / "names" / f"{shard:05d}.json", dict).items():
            entries += [{"split": split, "number": numbers[split] + i, "user": user} for i, user in enumerate(users)]
            numbers[split] += len(users)
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        content = _parquet(entries, work)
    elif suffix == ".csv":
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, ["split", "number", "user"], lineterminator="\n")
        writer.writeheader()
        writer.writerows(entries)
        content = text.getvalue().encode()
    elif suffix == ".jsonl":
        content = "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries).encode()
    else:
        write_private_json(path, entries)
        return
    path.unlink(missing_ok=True)
    storage.create_file(path, content)


def _parquet(entries: list[dict[str, Any]], work: Path) -> bytes:
    """Return the entries as the bytes of a Parquet file with the columns split, number and user."""
    lines, table = work / "user_map.jsonl", work / "user_map.parquet"
    lines.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
    database = open_database(1 << 28, 1, str(work / "temp"))
    columns = "{split: 'VARCHAR', number: 'BIGINT', user: 'VARCHAR'}"
    rows = f"SELECT * FROM read_json({quoted(str(lines))}, format = 'newline_delimited', columns = {columns})"
    database.execute(f"COPY ({rows}) TO {quoted(str(table))} (FORMAT parquet)")
    database.close()
    return table.read_bytes()
