"""The evaluations of a run again, as TensorBoard event files: `tensorboard --logdir runs` shows them.

In: metrics.jsonl. Out: RUN/tensorboard/events.out.tfevents.*, one record for each evaluation, in order. It only ever grows, so
a TensorBoard that is watching follows it. Written by whoever shows the run (`train`, `resume`, `watch`), never by the loop
(docs/decisions/0044-tensorboard-from-metrics.md).
"""

import contextlib
import json
import math
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from unheard.run_folder import RunFolder
from unheard.storage import FileInUse, locked

FILE = "events.out.tfevents.0000000000.unheard"
"""One name for every machine: TensorBoard reads any file with `tfevents` in it, and a run folder names no machine."""
NAMES = {
    "accuracy_top1": "held_out/AccuracyTop1",
    "accuracy_top3": "held_out/AccuracyTop3",
    "accuracy_top5": "held_out/AccuracyTop5",
    "accuracy_top1_words": "held_out/AccuracyTop1_words",
    "loss": "held_out/loss",
    "perplexity": "held_out/perplexity",
    "epsilon": "privacy/epsilon",
}


def update_event_file(folder: RunFolder) -> int:
    """Write the evaluations that the event file lacks; how many they were. If another process is at it, leave it to that one."""
    if not folder.metrics.exists():
        return 0
    folder.tensorboard.mkdir(exist_ok=True)
    path = folder.tensorboard / FILE
    with contextlib.suppress(FileInUse), locked(folder.tensorboard / ".lock"), open(path, "ab+") as file:
        whole, records = _whole_records(file)
        file.truncate(whole)  # a record torn by a crash would stop every reader
        missing = list(_rows(folder.metrics))[max(records - 1, 0) :]
        if records == 0:
            missing = [{}, *missing]
        for row in missing:
            file.write(_record(row))
        return len(missing) - (records == 0)
    return 0


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """Every whole line, a round that was done again too: TensorBoard takes a step back as a restart."""
    for line in path.read_bytes().split(b"\n")[:-1]:
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            if isinstance(row, dict) and isinstance(row.get("round"), int):
                yield row


def _record(row: dict[str, Any]) -> bytes:
    """One record in its frame, as the library frames it; the first of a file has no figures and names the format."""
    # tensorboardX needs no torch, but imports it where it finds one.
    from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
    from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
    from tensorboardX.record_writer import masked_crc32c

    figures = [
        Summary.Value(tag=tag, simple_value=float(row[name]))
        for name, tag in NAMES.items()
        if isinstance(row.get(name), int | float) and math.isfinite(row[name])
    ]
    now = time.time()  # metrics.jsonl keeps no times; of a run that is being watched this is the right one
    if row:
        event = Event(wall_time=now, step=row["round"], summary=Summary(value=figures))
    else:
        event = Event(wall_time=now, file_version="brain.Event:2")
    content = event.SerializeToString()
    length = struct.pack("<Q", len(content))
    return b"".join(
        [length, struct.pack("<I", masked_crc32c(length)), content, struct.pack("<I", masked_crc32c(content))]
    )


def _whole_records(file: BinaryIO) -> tuple[int, int]:
    """Where the last whole record ends, and how many there are. A frame: length (8 bytes), checksum, content, checksum."""
    file.seek(0)
    data = file.read()
    end, records = 0, 0
    while end + 12 <= len(data):
        (length,) = struct.unpack_from("<Q", data, end)
        if end + 16 + length > len(data):
            break
        end, records = end + 16 + length, records + 1
    return end, records
