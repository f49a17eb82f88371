"""Copy the evaluations of a run to trackers: TensorBoard, MLflow, Weights & Biases.

    tracking = Tracking(path=Path("runs/private"), kinds=("mlflow",))
    tracking.check()                # before training: is the package installed?
    tracking.update()               # before the first round, and after each evaluation
    tracking.finish()               # when the command ends

All trackers receive the figures of `metrics.jsonl`, which are released with the model. MLflow and Weights & Biases also
receive the name of the run folder, the settings of the run file without paths, and the claim of the privacy statement.
No tracker receives system metrics, code, the state of a git repository or the name of the machine.

The time of an upload would reveal how long a round takes, and so how much text the users of its cohort have. For this
reason TensorBoard's files and MLflow receive times that are computed from the number of the round, and everything that
leaves the machine (a remote MLflow server, Weights & Biases) is sent only once, when the command ends.

**TensorBoard.** `update_event_file` copies `metrics.jsonl` to `RUN/tensorboard/events.out.tfevents.*`, one record per
evaluation, in order. `tensorboard --logdir runs` shows them. Records are only appended, so a TensorBoard that is
already open shows new evaluations. The commands `train`, `resume` and `watch` update the file; the training loop does
not (docs/decisions/0044-tensorboard-from-metrics.md). The wall time of a record is the number of its round. A record
consists of the length of its content (8 bytes), a checksum of the length, the content (a protocol buffer), and a
checksum of the content.
"""

import contextlib
import itertools
import json
import logging
import math
import os
import struct
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from unheard.config import read_json
from unheard.errors import InvalidValue
from unheard.run_folder import RunFolder, replace_file
from unheard.storage import FileInUse, locked

TRACKERS = ("tensorboard", "mlflow", "wandb")
"""The trackers that `--track` accepts."""
PROJECT = "unheard"
"""The name of the MLflow experiment and of the Weights & Biases project, unless the environment variable
`MLFLOW_EXPERIMENT_NAME` or `WANDB_PROJECT` names another."""
FILE = "tracking.json"
"""The file in the run folder with the id of the run in MLflow and in Weights & Biases, and the evaluations that each has
received."""
EVENT_FILE = "events.out.tfevents.0000000000.unheard"
"""The name of TensorBoard's file. Other programs put the time and the name of the machine into it, which a run folder
should not reveal. TensorBoard reads every file with `tfevents` in its name."""
NAMES = {
    "accuracy_top1": "held_out/AccuracyTop1",
    "accuracy_top3": "held_out/AccuracyTop3",
    "accuracy_top5": "held_out/AccuracyTop5",
    "accuracy_top1_words": "held_out/AccuracyTop1_words",
    "loss": "held_out/loss",
    "perplexity": "held_out/perplexity",
    "epsilon": "privacy/epsilon",
}
"""The figures of an evaluation that are copied, and their names in all trackers."""

T = TypeVar("T")
logger = logging.getLogger("unheard.report")


def update_event_file(folder: RunFolder) -> int:
    """Append the new evaluations of a run to its TensorBoard file. Does nothing while another process writes the file.

    An evaluation that was repeated after a crash is appended again: TensorBoard treats a smaller step as a restart of the
    run, and discards the earlier evaluations from that step on.

    Returns:
        The number of evaluations that were appended.
    """
    if not folder.metrics.exists():
        return 0
    folder.tensorboard.mkdir(exist_ok=True)
    path = folder.tensorboard / EVENT_FILE
    with contextlib.suppress(FileInUse), locked(folder.tensorboard / ".lock"), open(path, "ab+") as file:
        records = _complete_records(file)
        file.truncate(sum(map(len, records)))  # an incomplete record is left by a crash, and readers would stop there
        if not records:
            file.write(_record({}))
        missing = _not_copied([_record(row) for row in _rows(folder.metrics)], _without_repeated(records[1:], _step))
        for record in missing:
            file.write(record)
        return len(missing)
    return 0


def _without_repeated(items: Iterable[T], round_of: Callable[[T], int]) -> list[T]:
    """Return the items without those that come from before a restart: an item replaces all with its round or a later one."""
    kept: list[T] = []
    for item in items:
        while kept and round_of(kept[-1]) >= round_of(item):
            kept.pop()
        kept.append(item)
    return kept


def _not_copied(items: Sequence[T], copied: Sequence[T]) -> Sequence[T]:
    """Return the items from the first one that differs from the item at the same place in `copied`."""
    same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(items, copied, strict=False)))
    return items[same:]


def _rows(path: Path) -> list[dict[str, Any]]:
    """Return the evaluations in the order of their rounds. Of a round that was repeated, the last one is returned.

    An incomplete last line, and lines that are not an evaluation, are ignored.
    """
    rows = []
    for line in path.read_bytes().split(b"\n")[:-1]:
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            if isinstance(row, dict) and isinstance(row.get("round"), int):
                rows.append(row)
    return _without_repeated(rows, lambda row: row["round"])


def _record(row: dict[str, Any]) -> bytes:
    """Return one record of TensorBoard's file, with its length and checksums.

    Args:
        row: An evaluation. An empty dictionary gives the first record of a file, which only names the format.
    """
    # Imported here and not at the top, because tensorboardX imports torch if torch is installed.
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


def _complete_records(file: BinaryIO) -> list[bytes]:
    """Return the complete records at the beginning of the file."""
    file.seek(0)
    data = file.read()
    end, records = 0, []
    while end + 12 <= len(data):
        (length,) = struct.unpack_from("<Q", data, end)
        if end + 16 + length > len(data):
            break
        records.append(data[end : end + 16 + length])
        end += 16 + length
    return records


def _step(record: bytes) -> int:
    """Return the round of a record."""
    from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]

    return Event.FromString(record[12:-4]).step


@dataclass(kw_only=True)
class Tracking:
    """Copies the evaluations of one run to its trackers.

    If a tracker fails, a warning is logged once and training continues.

    Args:
        path: The run folder.
        kinds: The names of the trackers, from `TRACKERS`.
        failures: The names of the trackers that have failed so far.
    """

    path: Path
    kinds: Sequence[str] = ("tensorboard",)
    failures: set[str] = field(default_factory=set)

    def check(self) -> None:
        """Check that all trackers are known and installed. Call this before training, since a round costs privacy.

        Raises:
            InvalidValue: A tracker is unknown, or its package is not installed.
        """
        import importlib.util

        for kind in self.kinds:
            if kind not in TRACKERS:
                raise InvalidValue(f"Unknown tracker '{kind}'. Known: {', '.join(TRACKERS)}.")
            if kind != "tensorboard" and importlib.util.find_spec(kind) is None:
                raise InvalidValue(f"--track {kind} needs the package {kind}: pip install 'unheard[{kind}]'.")

    def update(self) -> None:
        """Copy new evaluations to the trackers on this machine: TensorBoard's file and a local MLflow store."""
        self._copy(at_end=False)

    def finish(self) -> None:
        """Copy new evaluations to all trackers, remote ones included. Call this once, when the command ends."""
        self._copy(at_end=True)

    def _copy(self, *, at_end: bool) -> None:
        """Copy new evaluations.

        Args:
            at_end: Whether the command is ending, so that evaluations may be sent to other machines.
        """
        # An error of a tracker must not end the run, because its rounds have already cost privacy.
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
    """Return the finite figures of one evaluation, under their names in the trackers (`NAMES`)."""
    return {
        tag: float(row[name])
        for name, tag in NAMES.items()
        if isinstance(row.get(name), int | float) and math.isfinite(row[name])
    }


def _saved(folder: RunFolder) -> dict[str, Any]:
    """Return the content of tracking.json; an empty dictionary if the file is missing or damaged."""
    content = read_json(folder.path / FILE)
    return content if isinstance(content, dict) else {}


def _save(folder: RunFolder, kind: str, record: Mapping[str, Any]) -> None:
    """Write the record of one tracker to tracking.json. The records of the other trackers stay."""
    replace_file(folder.path / FILE, (json.dumps({**_saved(folder), kind: record}, indent=1) + "\n").encode())


def _to_mlflow(folder: RunFolder, *, at_end: bool) -> None:
    """Copy new evaluations to MLflow.

    Args:
        folder: The run folder.
        at_end: Whether the command is ending. Only then are evaluations sent to a server, the claim recorded, and the
            run of MLflow ended.
    """
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    import mlflow
    from mlflow.entities import Metric, Param
    from mlflow.tracking import MlflowClient

    address = mlflow.get_tracking_uri()
    if not at_end and not address.startswith(("file:", "sqlite:", "/", ".")):
        return
    client, record, rows = MlflowClient(address), _saved(folder).get("mlflow", {}), folder.read_metrics()
    if record.get("address") != address:  # the first call, or the user chose another MLflow store
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        known = client.get_experiment_by_name(experiment)
        number = known.experiment_id if known else client.create_experiment(experiment)
        start = time.time_ns() // 1_000_000
        run = client.create_run(number, start_time=start, run_name=folder.path.name)
        record = {"address": address, "run_id": run.info.run_id, "start": start, "copied": []}
        items = [Param(key, str(value)[:6000]) for key, value in folder.public_settings().items()]
        for first in range(0, len(items), 100):  # MLflow accepts at most 100 parameters per call
            client.log_batch(record["run_id"], params=items[first : first + 100])
    for row in _not_copied(rows, record.get("copied", [])):
        step = int(row["round"])
        # DP: a millisecond per round instead of its time, since its duration depends on how much text its users have.
        metrics = [Metric(key, value, record["start"] + step, step) for key, value in _figures(row).items()]
        client.log_batch(record["run_id"], metrics=metrics)
    _save(folder, "mlflow", {**record, "copied": rows})
    if at_end:
        if claim := folder.claim():
            client.set_tag(record["run_id"], "unheard.claim", claim)
        last = int(rows[-1]["round"]) if rows else 0
        client.set_terminated(record["run_id"], end_time=record["start"] + last)


def _to_wandb(folder: RunFolder) -> None:
    """Upload new evaluations and the claim to Weights & Biases. Call this only when the command ends."""
    import wandb  # pyright: ignore[reportMissingImports]

    record = _saved(folder).get("wandb", {"id": uuid.uuid4().hex[:16], "copied": []})
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
    for row in _not_copied(rows, record.get("copied", [])):
        run.log(_figures(row), step=int(row["round"]))
    if claim := folder.claim():
        run.summary["claim"] = claim
    run.finish()
    _save(folder, "wandb", {**record, "copied": rows})
