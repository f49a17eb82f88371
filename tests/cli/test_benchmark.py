"""`unheard benchmark` on the command line."""

import json
import timeit

import pytest
from typer.testing import CliRunner

import unheard
from unheard.cli.main import app
from unheard.training.run import run_toml


@pytest.fixture
def small_run_file(store, model, plan, tmp_path):
    run = unheard.Run(corpus=store.path, model=model, plan=plan, training=unheard.Training(rounds=3), delta=1e-3)
    file = tmp_path / "run.toml"
    file.write_text(run_toml(run))
    return file


@pytest.mark.system
def test_the_benchmark_times_engines_and_rounds(small_run_file, monkeypatch):
    monkeypatch.setattr("unheard.performance.benchmark._seconds", lambda work, *_: timeit.timeit(work, number=1))
    asked = ["benchmark", "--json", "--device", "cpu", "--users", "2", "--rounds", "2", "--short", "3"]
    result = CliRunner().invoke(app, [*asked, "--model", str(small_run_file)], catch_exceptions=False)
    found = json.loads(result.stdout)
    assert {row["engine"] for row in found["updates"]} == {"StackedEngine", "VectorisedEngine"}
    assert all(row["users_per_second"] > 0 and row["share_of_memory_limit"] > 0 for row in found["updates"])
    timed = [(row["users_per_round"], row["tokens_per_user"], row["runs_at_once"]) for row in found["rounds"]]
    assert timed == [(2, 1600, 1), (3, 80, 1)]
