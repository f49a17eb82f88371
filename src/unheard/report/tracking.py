"""Copy the evaluations of a run to the trackers that the user asks for: TensorBoard, MLflow, Weights & Biases.

    tracking = Tracking(path=Path("runs/private"), kinds=("mlflow",))
    tracking.check()                # before training: is the package installed?
    tracking.update()               # before the first round, and after each evaluation
    tracking.finish()               # when the command ends

All trackers get the same: the run file without paths, and the figures of `metrics.jsonl`, which are released with the
model. They get nothing else: no system metrics, no code, no git state, no host name.

The time of an upload would reveal how long rounds take, and so how much text the users of a cohort have. TensorBoard's
files and a local MLflow store therefore get the round instead of a time, and everything that leaves the machine (a
remote MLflow server, Weights & Biases) is sent in one piece when the command ends.

**TensorBoard.** `update_event_file` copies `metrics.jsonl` to `RUN/tensorboard/events.out.tfevents.*`, one record per
evaluation, in order; `tensorboard --logdir runs` shows them. The file only grows, so a TensorBoard that is already open
follows it. `train`, `resume` and `watch` update the file; the training loop never does
(docs/decisions/0044-tensorboard-from-metrics.md). The wall time of a record is the number of its round. Format of a
record: length (8 bytes), its checksum, the content (a protocol buffer), its checksum.
"""

import contextlib
import json
import logging
import math
import os
import struct
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from unheard.errors import InvalidValue
from unheard.run_folder import RunFolder, replace_file
from unheard.storage import FileInUse, locked

TRACKERS = ("tensorboard", "mlflow", "wandb")
PROJECT = "unheard"
"""The experiment of MLflow and the project of Weights & Biases; `MLFLOW_EXPERIMENT_NAME` and `WANDB_PROJECT` change it."""
FILE = "tracking.json"
"""In the run folder: the id of the run in each tracker, and how many evaluations it has."""
EVENT_FILE = "events.out.tfevents.0000000000.unheard"
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

logger = logging.getLogger("unheard.report")


def update_event_file(folder: RunFolder) -> int:
    """Append the evaluations that the event file lacks.

    Does nothing while another process is writing the file.

    Returns:
        The number of evaluations appended.
    """
    if not folder.metrics.exists():
        return 0
    folder.tensorboard.mkdir(exist_ok=True)
    path = folder.tensorboard / EVENT_FILE
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

    figures = [Summary.Value(tag=tag, simple_value=value) for tag, value in _figures(row).items()]
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


@dataclass(kw_only=True)
class Tracking:
    """The trackers of one run.

    Args:
        path: The run folder.
        kinds: Names of `TRACKERS`.
    """

    path: Path
    kinds: Sequence[str] = ("tensorboard",)
    failures: set[str] = field(default_factory=set)

    def check(self) -> None:
        """Raise `InvalidValue` if a tracker is unknown or not installed: before the first round, not after it."""
        import importlib.util

        for kind in self.kinds:
            if kind not in TRACKERS:
                raise InvalidValue(f"Unknown tracker '{kind}'. Known: {', '.join(TRACKERS)}.")
            if kind != "tensorboard" and importlib.util.find_spec(kind) is None:
                raise InvalidValue(f"--track {kind} needs the package {kind}: pip install 'unheard[{kind}]'.")

    def update(self) -> None:
        """Copy new evaluations to the trackers on this machine."""
        self._copy(at_end=False)

    def finish(self) -> None:
        """Copy new evaluations to all trackers."""
        self._copy(at_end=True)

    def _copy(self, *, at_end: bool) -> None:
        """Bring all trackers up to date."""
        # Rounds cost privacy, so a tracker that fails must not end a run. It is named once.
        for kind in self.kinds:
            try:
                if kind == "tensorboard":
                    update_event_file(RunFolder(self.path))
                elif kind == "mlflow":
                    _to_mlflow(RunFolder(self.path), at_end=at_end)
                # DP: one upload when the command ends: Weights & Biases stamps every record with the time of the day.
                elif at_end:
                    _to_wandb(RunFolder(self.path))
            except Exception as error:
                if kind not in self.failures:
                    logger.warning("%s is not up to date: %s", kind, error)
                self.failures.add(kind)


def _figures(row: Mapping[str, Any]) -> dict[str, float]:
    """The figures of one evaluation under the names that every tracker uses."""
    return {
        tag: float(row[name])
        for name, tag in NAMES.items()
        if isinstance(row.get(name), int | float) and math.isfinite(row[name])
    }


def _saved(folder: RunFolder) -> dict[str, Any]:
    """Read what was copied so far; empty if that cannot be read."""
    try:
        content = json.loads((folder.path / FILE).read_text(encoding="utf-8"))
        return content if isinstance(content, dict) else {}
    except (OSError, ValueError):
        return {}


def _save(folder: RunFolder, kind: str, record: Mapping[str, Any]) -> None:
    replace_file(folder.path / FILE, (json.dumps({**_saved(folder), kind: record}, indent=1) + "\n").encode())


def _to_mlflow(folder: RunFolder, *, at_end: bool) -> None:
    """Copy new rows to MLflow; to a server only when the command ends."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    import mlflow
    from mlflow.entities import Metric, Param
    from mlflow.tracking import MlflowClient

    address = mlflow.get_tracking_uri()
    if not at_end and not address.startswith(("file:", "sqlite:", "/", ".")):
        return
    client, record, rows = MlflowClient(address), _saved(folder).get("mlflow", {}), folder.read_metrics()
    if record.get("address") != address:  # the first time, or another store than before
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        known = client.get_experiment_by_name(experiment)
        number = known.experiment_id if known else client.create_experiment(experiment)
        start = time.time_ns() // 1_000_000
        run = client.create_run(number, start_time=start, run_name=folder.path.name)
        record = {"address": address, "run_id": run.info.run_id, "start": start, "rows": 0}
        items = [Param(key, str(value)[:6000]) for key, value in folder.public_settings().items()]
        for first in range(0, len(items), 100):  # MLflow takes at most 100 at a time
            client.log_batch(record["run_id"], params=items[first : first + 100])
    for row in rows[record["rows"] :]:
        step = int(row["round"])
        # DP: a millisecond per round instead of its time, since its duration depends on how much text its users have.
        metrics = [Metric(key, value, record["start"] + step, step) for key, value in _figures(row).items()]
        client.log_batch(record["run_id"], metrics=metrics)
    record["rows"] = max(len(rows), record["rows"])
    _save(folder, "mlflow", record)
    if at_end:
        if folder.statement.exists():
            claim = json.loads(folder.statement.read_text(encoding="utf-8"))["claim"]
            client.set_tag(record["run_id"], "unheard.claim", claim)
        last = int(rows[-1]["round"]) if rows else 0
        client.set_terminated(record["run_id"], end_time=record["start"] + last)


def _to_wandb(folder: RunFolder) -> None:
    """Upload new rows to Weights & Biases."""
    import wandb  # pyright: ignore[reportMissingImports]

    record = _saved(folder).get("wandb", {"id": uuid.uuid4().hex[:16], "rows": 0})
    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT", PROJECT),
        name=folder.path.name,
        id=record["id"],
        resume="allow",
        config=folder.public_settings(),
        settings=wandb.Settings(
            console="off",
            disable_code=True,
            disable_git=True,
            disable_job_creation=True,
            save_code=False,
            host="unheard",
            x_disable_meta=True,
            x_disable_stats=True,
        ),
    )
    rows = folder.read_metrics()
    for row in rows[record["rows"] :]:
        run.log(_figures(row), step=int(row["round"]))
    if folder.statement.exists():
        run.summary["claim"] = json.loads(folder.statement.read_text(encoding="utf-8"))["claim"]
    run.finish()
    _save(folder, "wandb", {**record, "rows": len(rows)})
