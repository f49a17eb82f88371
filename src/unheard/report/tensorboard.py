"""Copy the evaluations of a run into a TensorBoard event file: `tensorboard --logdir runs` shows them.

Reads `metrics.jsonl` and writes `RUN/tensorboard/events.out.tfevents.*`, one record per evaluation, in order. The file
only grows, so a TensorBoard that is already open follows it. `train`, `resume` and `watch` call `update_event_file`;
the training loop never does (docs/decisions/0044-tensorboard-from-metrics.md).

    update_event_file(RunFolder.open("runs/private"))

The wall time of a record is the number of its round: a time of the day would reveal how long rounds take, and so how
much text the users of a cohort have.

Format of a record: length (8 bytes), its checksum, the content (a protocol buffer), its checksum.
"""

import contextlib
import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from unheard.run_folder import RunFolder
from unheard.storage import FileInUse, locked

FILE = "events.out.tfevents.0000000000.unheard"
"""The same name on every machine: a run folder does not name the machine. TensorBoard reads any file with `tfevents` in
its name."""
NAMES = {
    "accuracy_top1": "held_out/AccuracyTop1",
    "accuracy_top3": "held_out/AccuracyTop3",
    "accuracy_top5": "held_out/AccuracyTop5",
    "accuracy_top1_words": "held_out/AccuracyTop1_words",
    "loss": "held_out/loss",
    "perplexity": "held_out/perplexity",
    "epsilon": "privacy/epsilon",
}
"""Figures of an evaluation and their TensorBoard tags."""


def update_event_file(folder: RunFolder) -> int:
    """Append the evaluations that the event file lacks.

    Does nothing while another process is writing the file.

    Returns:
        The number of evaluations appended.
    """
    if not folder.metrics.exists():
        return 0
    folder.tensorboard.mkdir(exist_ok=True)
    path = folder.tensorboard / FILE
    with contextlib.suppress(FileInUse), locked(folder.tensorboard / ".lock"), open(path, "ab+") as file:
        end, records = _complete_records(file)
        file.truncate(end)  # readers stop at an incomplete record, which a crash may leave
        missing = list(_rows(folder.metrics))[max(records - 1, 0) :]
        if records == 0:
            file.write(_record({}))
        for row in missing:
            file.write(_record(row))
        return len(missing)
    return 0


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """Every complete line, also of a round that was computed again: TensorBoard treats an earlier step as a restart."""
    for line in path.read_bytes().split(b"\n")[:-1]:
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            if isinstance(row, dict) and isinstance(row.get("round"), int):
                yield row


def _record(row: dict[str, Any]) -> bytes:
    """One record with its length and checksums. The first record of a file has no figures and names the format."""
    # Imported here because tensorboardX imports torch where it is installed.
    from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
    from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
    from tensorboardX.record_writer import masked_crc32c

    figures = [
        Summary.Value(tag=tag, simple_value=float(row[name]))
        for name, tag in NAMES.items()
        if isinstance(row.get(name), int | float) and math.isfinite(row[name])
    ]
    # DP: the round instead of a time, since the duration of a round depends on how much text its users have.
    if row:
        event = Event(wall_time=float(row["round"]), step=row["round"], summary=Summary(value=figures))
    else:
        event = Event(wall_time=0.0, file_version="brain.Event:2")
    content = event.SerializeToString()
    length = struct.pack("<Q", len(content))
    return b"".join(
        [length, struct.pack("<I", masked_crc32c(length)), content, struct.pack("<I", masked_crc32c(content))]
    )


def _complete_records(file: BinaryIO) -> tuple[int, int]:
    """The end of the last complete record, and the number of complete records."""
    file.seek(0)
    data = file.read()
    end, records = 0, 0
    while end + 12 <= len(data):
        (length,) = struct.unpack_from("<Q", data, end)
        if end + 16 + length > len(data):
            break
        end, records = end + 16 + length, records + 1
    return end, records
