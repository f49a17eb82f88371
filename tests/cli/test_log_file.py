"""`--log-file`: every command has it, and the log contains the steps of the command and no times."""

import logging
import re
import warnings

import click
import pytest
import typer.main
from typer.testing import CliRunner

import unheard
from unheard.cli.main import app, log_to
from unheard.errors import InvalidValue, PrivacyError


def all_commands(group, name=""):
    for key, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from all_commands(command, f"{name}{key} ")
        elif not command.hidden:
            yield f"{name}{key}", command


def test_every_command_has_the_option():
    group = typer.main.get_command(app)
    without = [name for name, c in all_commands(group) if "--log-file" not in {o for p in c.params for o in p.opts}]
    assert without == []


def test_a_log_holds_the_command_what_it_printed_and_how_it_ended(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["init", "run.toml", "--population", "100", "--log-file", "log.txt"]
    assert CliRunner().invoke(app, words).exit_code == 0
    refused = CliRunner().invoke(app, words)
    assert "--force" in str(refused.exception)
    log = (tmp_path / "log.txt").read_text()
    assert "INFO unheard.cli: Wrote run.toml" in log
    assert log.count("INFO unheard.cli: done") == 1
    assert "ERROR unheard.cli: ended by InvalidValue: run.toml exists" in log


def test_a_log_of_training_has_evaluations_and_no_times(run, tmp_path):
    with log_to(tmp_path / "log.txt"):
        for _ in unheard.train(run, tmp_path / "first"):
            pass
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            logging.captureWarnings(True)
            warnings.warn("seen", stacklevel=1)
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert any(re.search(r"unheard.training: first: round 3 of 6, AccuracyTop1 0\.\d+", line) for line in lines)
    assert any("unheard.training: first: saved after round 6" in line for line in lines)
    assert any("seen" in line for line in lines)
    assert not [line for line in lines if re.search(r"\d\d:\d\d|20\d\d-", line)]
    assert {line.split()[0] for line in lines if " unheard." in line} == {"INFO"}


@pytest.mark.parametrize("name", ["unheard", "py.warnings"])
def test_without_the_option_nothing_is_logged_to_a_file_and_neither_handlers_nor_levels_stay(name, tmp_path):
    log = logging.getLogger(name)
    before, level = list(log.handlers), log.level
    log.setLevel(logging.ERROR)  # not the level of the log file
    try:
        with log_to(tmp_path / "first.txt"):
            assert log.level == logging.INFO
        assert (log.handlers, log.level) == (before, logging.ERROR)
        with pytest.raises(PrivacyError), log_to(tmp_path / "second.txt"):
            raise PrivacyError("no")
        assert (log.handlers, log.level) == (before, logging.ERROR)
        with log_to(None):
            assert (log.handlers, log.level) == (before, logging.ERROR)
    finally:
        log.setLevel(level)


def test_a_log_that_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(InvalidValue, match="Make its folder first"), log_to(tmp_path / "nowhere" / "log.txt"):
        pass
