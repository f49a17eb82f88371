"""`unheard sweep` and `unheard benchmark` on the command line."""

import json

import pytest
from typer.testing import CliRunner

import unheard
from unheard.cli.main import app
from unheard.cli.sweep import combinations
from unheard.errors import InvalidValue
from unheard.training.run_file import run_toml


@pytest.fixture
def run_file(store, model, plan, tmp_path):
    run = unheard.Run(
        corpus=store.path,
        model=model,
        plan=plan,
        training=unheard.Training(rounds=3, reproducible_seed=1),
        evaluation=unheard.Evaluation(every=2),
        delta=1e-3,
    )
    file = tmp_path / "run.toml"
    file.write_text(run_toml(run))
    return file


def test_every_combination_becomes_a_run_and_the_table_names_them(run_file, tmp_path):
    sweep = ["sweep", str(run_file), "--out", str(tmp_path / "runs"), "--vary", "clip.norm=1,2"]
    result = CliRunner().invoke(app, [*sweep, "--vary", "training.reproducible_seed=1,2"], catch_exceptions=False)
    assert result.exit_code == 0
    folders = {folder.name for folder in (tmp_path / "runs").iterdir()}
    assert folders == {f"norm={n},reproducible_seed={s}" for n in (1, 2) for s in (1, 2)}
    again = CliRunner().invoke(app, [*sweep, "--vary", "training.reproducible_seed=1,2"], catch_exceptions=False)
    assert "was complete" in again.output


@pytest.mark.parametrize("bad", ["clip.norm", "norm=1,2", "clip.norm=", "clip.norm=1,1"])
def test_what_cannot_be_varied_is_refused(bad):
    with pytest.raises(InvalidValue, match="--vary"):
        combinations([bad])


def test_the_benchmark_times_engines_and_rounds(run_file):
    asked = ["benchmark", "--json", "--device", "cpu", "--users", "2", "--rounds", "2"]
    result = CliRunner().invoke(app, [*asked, "--model", str(run_file)], catch_exceptions=False)
    found = json.loads(result.stdout)
    assert {row["engine"] for row in found["updates"]} == {"StackedEngine", "VectorisedEngine"}
    assert all(row["users_per_second"] > 0 and row["share_of_memory_limit"] > 0 for row in found["updates"])
    assert [(row["users_per_round"], row["runs_at_once"]) for row in found["rounds"]] == [(2, 1)]
