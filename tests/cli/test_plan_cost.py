"""`unheard plan --cost`: the machine time on every measured machine, with its source."""

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from unheard.cli import plan
from unheard.cli.main import as_typer_command
from unheard.errors import UnheardError
from unheard.performance.estimate import measured_speeds

app = typer.Typer()
app.command()(as_typer_command(plan.plan))
SMALL = ["--users", "1000", "--users-per-round", "10", "--noise-multiplier", "1", "--rounds", "7200", "--cost"]


def told(*words):
    done = CliRunner().invoke(app, [*words, "--json"])
    assert done.exception is None, done.exception
    return json.loads(done.stdout)["cost"]


def test_the_json_has_every_machine_with_its_source_and_no_price_unless_one_is_given():
    plain, priced = told(*SMALL), told(*SMALL, "--gpus", "8", "--gpu-hour-price", "2")
    assert plain["user_updates"] == 72_000
    assert {m["device"] for m in plain["machines"]} == {s.device for s in measured_speeds()}
    assert all(m["price"] is None for m in plain["machines"])
    for machine in priced["machines"]:
        is_gpu = "CPU" not in machine["device"]
        assert machine["machines"] == (8 if is_gpu else 1)
        assert machine["price"] == (pytest.approx(2 * machine["machine_hours"]) if is_gpu else None)


def test_the_table_names_where_each_figure_was_measured():
    page = CliRunner().invoke(app, [*SMALL, "--gpus", "2"], env={"COLUMNS": "200"}).stdout
    for each in measured_speeds():
        assert each.device in page
    assert "benchmarks/results/" in page
    assert "not a measurement" in page


def benchmark(path: Path, **changes) -> Path:
    content = {
        "machine": {"device": "NVIDIA Z"},
        "parameters": 5,
        "updates": [],
        "rounds": [
            {"users_per_round": 10, "runs_at_once": 1, "users_per_second": 2.0, "rounds_per_second": 0.2},
            {"users_per_round": 10, "runs_at_once": 16, "users_per_second": 9.0, "rounds_per_second": 0.9},
            {"users_per_round": 10, "runs_at_once": 1, "users_per_second": 40.0, "tokens_per_user": 80},
        ],
        **changes,
    }
    path.write_text(json.dumps(content))
    return path


def test_a_speed_of_ones_own_machine_comes_from_the_benchmarks_json(tmp_path):
    (mine,) = told(*SMALL, "--speed-from", str(benchmark(tmp_path / "speed.json")))["machines"]
    assert (mine["device"], mine["machine_hours"], mine["source"]) == ("NVIDIA Z", 10.0, "speed.json")


@pytest.mark.parametrize(
    ("words", "cure"),
    [
        (["--speed-from", "FILE"], "unheard benchmark"),
        (["--speed-from", "missing.json"], "Cannot read"),
        (["--efficiency", "1.5"], "at most 1"),
        (["--efficiency", "0"], "above 0"),
        (["--gpu-hour-price", "-1"], "above 0"),
    ],
)
def test_impossible_costs_are_refused(words, cure, tmp_path):
    other = tmp_path / "other.json"
    other.write_text('{"rounds": 3}')
    done = CliRunner().invoke(app, [*SMALL, *(str(other) if w == "FILE" else w for w in words)])
    assert isinstance(done.exception, UnheardError)
    assert cure in str(done.exception)


def test_rounds_that_were_not_measured_are_asked_for(tmp_path):
    done = CliRunner().invoke(app, [*SMALL, "--speed-from", str(benchmark(tmp_path / "speed.json", rounds=[]))])
    assert "no measurement of whole rounds" in str(done.exception)


def test_options_of_cost_without_it_are_refused():
    done = CliRunner().invoke(app, [*SMALL[:-1], "--gpus", "4"])
    assert "go with --cost" in str(done.exception)
