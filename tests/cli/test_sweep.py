"""`unheard sweep` on the command line."""

import pytest
from typer.testing import CliRunner

import unheard
from unheard.cli.display import show_runs
from unheard.cli.main import app
from unheard.cli.train import parse_vary
from unheard.errors import InvalidValue, PrivacyError
from unheard.training.loop import RoundReport
from unheard.training.run import run_toml


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


def test_a_variant_without_noise_is_warned_of_before_the_first_round(run_file, tmp_path):
    sweep = ["sweep", str(run_file), "--out", str(tmp_path / "runs"), "--vary"]
    for kinds in ("gaussian,none", "none,gaussian"):
        without = [*sweep, f"noise.kind={kinds}", "--set", "training.rounds=1"]
        assert isinstance(CliRunner().invoke(app, without).exception, PrivacyError)
        assert not (tmp_path / "runs").exists()
        allowed = CliRunner().invoke(app, [*without, "--yes", "--out", str(tmp_path / kinds)])
        assert allowed.exit_code == 0
        assert "Without noise epsilon is infinite" in allowed.stderr
    assert (
        "Without noise" not in CliRunner().invoke(app, [*sweep, "clip.norm=1,2", "--set", "training.rounds=1"]).stderr
    )


def test_a_sweep_that_is_out_of_time_saves_every_run_and_can_be_continued(run_file, tmp_path):
    sweep = ["sweep", str(run_file), "--out", str(tmp_path / "runs"), "--vary", "clip.norm=1,2,3"]
    stopped = CliRunner().invoke(app, [*sweep, "--stop-after", "0"], catch_exceptions=False).output
    assert "was complete" not in stopped
    assert "the same command continues" in stopped
    assert [line.split()[3] for line in stopped.splitlines() if line.startswith("│ norm=")] == ["1", "1", "1"]
    ended = CliRunner().invoke(app, sweep, catch_exceptions=False).output
    assert "the same command continues" not in ended


def test_time_is_up_also_when_the_last_run_has_fewer_rounds_or_was_complete():
    def reports(ends):
        for turn in range(1, 9):
            for place, rounds in ends:
                if turn <= rounds:
                    yield place, RoundReport(round=turn, rounds=rounds, epsilon=1.0, delta=1e-5)

    first_two = show_runs(reports([(0, 8), (1, 1)]), ["a", "b"], stop_after=0)
    assert {place: report.round for place, report in first_two.items()} == {0: 1, 1: 1}
    without_last = show_runs(reports([(0, 8), (1, 8)]), ["a", "b", "complete"], stop_after=0)
    assert {place: report.round for place, report in without_last.items()} == {0: 2, 1: 2}


@pytest.mark.parametrize("bad", ["clip.norm", "norm=1,2", "clip.norm=", "clip.norm=1,1"])
def test_malformed_variations_are_refused(bad):
    with pytest.raises(InvalidValue, match="--vary"):
        parse_vary([bad])
