"""Trackers get the evaluations of a run, once each, and nothing whose time or value depends on a cohort."""

import json
import shutil
import sys
import tomllib
from types import SimpleNamespace

import pytest
import tomli_w

from tests.conftest import CLIP_NORM
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
    assert run.data.params["clip.norm"] == str(CLIP_NORM)
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


class FakeMlflow:
    """The modules of MLflow, with a client that keeps what it is told."""

    def __init__(self, monkeypatch, address: str) -> None:
        self.asked: list[str] = []
        self.params: dict[str, str] = {}
        self.metrics: list[tuple] = []
        self.tags: dict[str, str] = {}
        self.runs: list[dict] = []
        client = SimpleNamespace(
            get_experiment_by_name=lambda name: None,
            create_experiment=lambda name: "1",
            create_run=self.create_run,
            log_batch=lambda run, metrics=(), params=(): (self.metrics.extend(metrics), self.params.update(params)),
            set_tag=lambda run, key, value: self.tags.update({key: value}),
            set_terminated=lambda run, end_time: None,
        )
        made = {
            "mlflow": SimpleNamespace(get_tracking_uri=lambda: address),
            "mlflow.entities": SimpleNamespace(Metric=lambda *given: given, Param=lambda *given: given),
            "mlflow.tracking": SimpleNamespace(MlflowClient=lambda address: self.asked.append(address) or client),
        }
        for name, module in made.items():
            monkeypatch.setitem(sys.modules, name, module)

    def create_run(self, number: str, **named) -> SimpleNamespace:
        self.runs.append(named)
        return SimpleNamespace(info=SimpleNamespace(run_id="r"))


REMOTE = [
    *("http://localhost:5000", "http://tracking.example.com", "https://mlflow.example.com", "HTTP://example.com"),
    *("databricks", "databricks://profile", "postgresql://user@db/mlflow", "mysql+pymysql://db/mlflow", ""),
    *("sqlite+http://x", "s3://bucket/runs", "ftp://example.com/runs", "example.com:5000"),
]
"""Addresses at which another machine or process could note the time of each upload, or that nobody knows."""


@pytest.mark.parametrize("address", REMOTE)
def test_no_address_but_a_file_of_this_machine_hears_of_a_run_before_it_ends(folder, monkeypatch, address):
    """The times of uploads would show how long each round took, and so how much text its users have."""
    mlflow, trackers = FakeMlflow(monkeypatch, address), Tracking(path=folder.path, kinds=("mlflow",))
    trackers.update()
    trackers.update()
    assert mlflow.asked == []
    trackers.finish()
    assert mlflow.asked == [address]
    assert trackers.failures == set()
    assert sorted({step for *_, step in mlflow.metrics}) == STEPS


@pytest.mark.parametrize("address", ["sqlite:///runs.db", "file:///runs", "file:runs", "/runs", "./runs", "../runs"])
def test_a_file_of_this_machine_gets_each_evaluation_when_it_is_made(folder, monkeypatch, address):
    mlflow, trackers = FakeMlflow(monkeypatch, address), Tracking(path=folder.path, kinds=("mlflow",))
    trackers.update()
    assert mlflow.asked == [address]
    assert sorted({step for *_, step in mlflow.metrics}) == STEPS
    assert mlflow.tags == {}  # the claim is that of the end


@pytest.mark.parametrize("seed", [0, 987_654_321])
@pytest.mark.parametrize("kind", ["mlflow", "wandb"])
def test_a_tracker_gets_the_public_settings_all_figures_and_the_claim_and_nothing_else(folder, monkeypatch, kind, seed):
    """Never the seed, whatever its value, and no path of this machine."""
    tables = tomllib.loads(folder.run_file.read_text())
    tables["training"]["reproducible_seed"] = seed
    for key in LOCAL_KEYS:
        table, name = key.split(".")
        tables.setdefault(table, {})[name] = "/private-place/last"
    folder.run_file.write_text(tomli_w.dumps(tables))
    mlflow, begun, run = FakeMlflow(monkeypatch, "sqlite:///runs.db"), [], FakeRun(logged=[], summary={})
    wandb = SimpleNamespace(init=lambda **options: begun.append(options) or run, Settings=lambda **settings: settings)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    trackers = Tracking(path=folder.path, kinds=(kind,))
    trackers.finish()
    assert trackers.failures == set()
    public = folder.public_settings()
    assert public.pop("training.reproducible_seed") == "set, and not shown"
    rows, claim = folder.read_metrics(), json.loads(folder.statement.read_text())["claim"]
    figures = [(row["round"], {tag: row[key] for key, tag in tracking.NAMES.items()}) for row in rows]
    assert [set(found) for _, found in figures] == [set(tracking.NAMES.values())] * len(STEPS)
    if kind == "mlflow":
        told, received = mlflow.params, [(step, key, value) for key, value, _, step in mlflow.metrics]
        assert received == [(step, key, value) for step, found in figures for key, value in found.items()]
        assert mlflow.tags == {"unheard.claim": claim}
        assert [(set(options), options["run_name"]) for options in mlflow.runs] == [
            ({"start_time", "run_name"}, "private")
        ]
        public = {key: str(value) for key, value in public.items()}
    else:
        (options,) = begun
        told = options.pop("config")
        assert set(options) == {"project", "name", "id", "resume", "settings"}
        assert (options["project"], options["name"]) == ("unheard", "private")
        assert run.logged == [*figures, "finished"]
        assert run.summary == {"claim": claim}
    assert told.pop("training.reproducible_seed") == "set, and not shown"
    assert told == public
    assert not any(
        "private-place" in str(value) or str(seed or "reproducible = 0") in str(value) for value in told.values()
    )


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
    assert parameters["clip.norm"] == CLIP_NORM
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
