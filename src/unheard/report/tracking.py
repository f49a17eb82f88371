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
"""

import json
import logging
import math
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unheard.errors import InvalidValue
from unheard.report.tensorboard import NAMES, update_event_file
from unheard.run_folder import RunFolder, replace_file

TRACKERS = ("tensorboard", "mlflow", "wandb")
PROJECT = "unheard"
"""The experiment of MLflow and the project of Weights & Biases; `MLFLOW_EXPERIMENT_NAME` and `WANDB_PROJECT` change it."""
FILE = "tracking.json"
"""In the run folder: the id of the run in each tracker, and how many evaluations it has."""

logger = logging.getLogger("unheard.report")


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
    try:
        content = json.loads((folder.path / FILE).read_text(encoding="utf-8"))
        return content if isinstance(content, dict) else {}
    except (OSError, ValueError):
        return {}


def _save(folder: RunFolder, kind: str, record: Mapping[str, Any]) -> None:
    replace_file(folder.path / FILE, (json.dumps({**_saved(folder), kind: record}, indent=1) + "\n").encode())


def _to_mlflow(folder: RunFolder, *, at_end: bool) -> None:
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
