"""Trackers get the evaluations of a run, once each, and nothing whose time or value depends on a cohort."""

import json
import shutil
import sys
from types import SimpleNamespace

import pytest

from tests.report.builders import ROUNDS
from unheard.errors import InvalidValue
from unheard.report import tracking
from unheard.report.tracking import Tracking
from unheard.run_folder import LOCAL_KEYS, RunFolder

STEPS = list(range(2, ROUNDS + 1, 2))


@pytest.fixture
def folder(runs, tmp_path) -> RunFolder:
    shutil.copytree(runs[1], tmp_path / "private")
    return RunFolder(tmp_path / "private")


@pytest.mark.system
@pytest.mark.filterwarnings("ignore")  # MLflow's own
def test_a_local_mlflow_store_gets_each_evaluation_once_and_rounds_for_times(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(RunFolder, "check_metrics", lambda folder: None)  # its checkpoints are of a later round
    pytest.importorskip("mlflow", reason="the extra `mlflow` is not installed")
    from mlflow.tracking import MlflowClient

    address = f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    monkeypatch.chdir(tmp_path)
    rows = folder.metrics.read_text().splitlines(keepends=True)
    folder.metrics.write_text("".join(rows[:2]))
    trackers = Tracking(path=folder.path, kinds=("mlflow",))
    trackers.update()
    folder.metrics.write_text("".join(rows))
    trackers.update()
    trackers.finish()
    assert trackers.failures == set()
    client = MlflowClient(address)
    (run,) = client.search_runs([client.get_experiment_by_name("unheard").experiment_id])
    history = client.get_metric_history(run.info.run_id, "held_out/AccuracyTop1")
    assert [metric.step for metric in history] == STEPS
    assert [metric.value for metric in history] == [row["accuracy_top1"] for row in folder.read_metrics()]
    assert [metric.timestamp - run.info.start_time for metric in history] == STEPS
    assert run.info.end_time - run.info.start_time == ROUNDS
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "private"
    assert run.data.tags["unheard.claim"] == json.loads(folder.statement.read_text())["claim"]
    assert run.data.params["clip.norm"] == "2.0"
    assert not {"mlflow.user", "mlflow.source.name", "mlflow.source.git.commit"} & set(run.data.tags)
    assert str(tmp_path) not in json.dumps(run.data.params)


def test_a_seed_is_not_among_the_settings_that_trackers_get(folder):
    text = folder.run_file.read_text()
    assert "[training]\n" in text
    folder.run_file.write_text(text.replace("[training]\n", "[training]\nreproducible_seed = 987654321\n"))
    assert folder.public_settings()["training.reproducible_seed"] == "set, and not shown"
    assert "987654321" not in str(folder.public_settings())


def test_a_remote_mlflow_server_is_not_contacted_before_the_end(folder, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="the extra `mlflow` is not installed")
    monkeypatch.setattr(mlflow, "get_tracking_uri", lambda: "https://mlflow.example.com")
    asked = []
    monkeypatch.setattr("mlflow.tracking.MlflowClient", lambda address: asked.append(address))
    trackers = Tracking(path=folder.path, kinds=("mlflow",))
    trackers.update()
    assert asked == []
    trackers.finish()
    assert asked == ["https://mlflow.example.com"]
    assert trackers.failures == {"mlflow"}  # the client of this test fails at every call, and the run continues


def test_mlflow_is_told_when_a_run_began_and_no_other_time(folder, monkeypatch):
    """How long a round took depends on how much text its users have: a round counts as one millisecond."""
    asked, logged, ended = [], [], []
    client = SimpleNamespace(
        get_experiment_by_name=lambda name: None,
        create_experiment=lambda name: "1",
        create_run=lambda number, **named: SimpleNamespace(info=SimpleNamespace(run_id="r")),
        log_batch=lambda run, metrics=(), params=(): logged.extend(metrics),
        set_tag=lambda *_: None,
        set_terminated=lambda run, end_time: ended.append(end_time),
    )
    made = {
        "mlflow": SimpleNamespace(get_tracking_uri=lambda: "sqlite:///x.db"),
        "mlflow.entities": SimpleNamespace(Metric=lambda *given: given, Param=lambda *given: given),
        "mlflow.tracking": SimpleNamespace(MlflowClient=lambda address: client),
    }
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, name, module)

    def clock() -> int:
        asked.append(len(asked))
        return 7_000_000_000 * len(asked)

    monkeypatch.setattr(tracking.time, "time_ns", clock)
    trackers = Tracking(path=folder.path, kinds=("mlflow",))
    trackers.update()
    trackers.finish()
    assert trackers.failures == set()
    assert asked == [0]
    assert sorted({(time, step) for _, _, time, step in logged}) == [(7_000 + step, step) for step in STEPS]
    assert ended == [7_000 + ROUNDS]


class FakeRun(SimpleNamespace):
    def log(self, figures, step):
        self.logged.append((step, figures))

    def finish(self):
        self.logged.append("finished")


NOTHING_OF_THE_MACHINE = {
    **dict.fromkeys(("disable_code", "disable_git", "disable_job_creation", "x_disable_meta", "x_disable_stats"), True),
    "console": "off",
    "save_code": False,
    "host": "unheard",
}
"""What Weights & Biases would record by itself: code, output, host, hardware, and the load of the machine over time."""


def test_weights_and_biases_gets_everything_in_one_piece_and_no_system_metrics(folder, monkeypatch):
    begun = []

    def init(**options):
        begun.append(options)
        runs.append(FakeRun(logged=[], summary={}))
        return runs[-1]

    runs: list[FakeRun] = []
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Settings=lambda **settings: settings))
    trackers = Tracking(path=folder.path, kinds=("wandb",))
    trackers.update()
    assert begun == []
    trackers.finish()
    trackers.finish()
    assert trackers.failures == set()
    first, second = runs
    assert [entry[0] for entry in first.logged[:-1]] == STEPS
    assert first.logged[-1] == "finished"
    assert second.logged == ["finished"]
    assert begun[0]["id"] == begun[1]["id"]
    assert all(options["settings"] == NOTHING_OF_THE_MACHINE for options in begun)
    assert "corpus.path" not in begun[0]["config"]
    assert first.summary["claim"].startswith("(")


def test_parameters_are_the_run_file_without_paths(folder):
    parameters = folder.public_settings()
    assert parameters["clip.norm"] == 2.0
    assert not set(LOCAL_KEYS) & set(parameters)


def test_an_unknown_tracker_or_one_that_is_not_installed_is_refused_before_training(folder, monkeypatch):
    with pytest.raises(InvalidValue, match="Known: tensorboard, mlflow, wandb"):
        Tracking(path=folder.path, kinds=("paper",)).check()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InvalidValue, match=r"pip install 'unheard\[mlflow\]'"):
        Tracking(path=folder.path, kinds=("mlflow",)).check()
    Tracking(path=folder.path, kinds=("tensorboard",)).check()


def test_a_tracker_that_fails_does_not_end_a_run(folder, monkeypatch, caplog):
    monkeypatch.setattr(tracking, "update_event_file", lambda folder: 1 / 0)
    trackers = Tracking(path=folder.path)
    trackers.update()
    trackers.update()
    assert trackers.failures == {"tensorboard"}
    assert caplog.text.count("not up to date") == 1
