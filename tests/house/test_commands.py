"""Every command and every option stands in docs/commands.md, and every command shows examples."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from unheard.cli.main import app

PAGE = (Path(__file__).parents[2] / "docs" / "commands.md").read_text()


def commands(group: Any, name: str = "unheard") -> Iterator[tuple[str, Any]]:
    """Every command that does something, by its whole name; groups are only walked through."""
    for verb, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{name} {verb}")
        else:
            yield f"{name} {verb}", command


COMMANDS = dict(commands(typer.main.get_command(app)))
by_command = pytest.mark.parametrize("name", COMMANDS)


def section(name: str) -> str:
    """What the page says under the command's heading, up to the next one."""
    found = re.search(rf"^## {re.escape(name)}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found, f"docs/commands.md has no heading '## {name}'"
    return found.group(1)


def test_the_walk_finds_the_commands():
    assert {"unheard train", "unheard resume", "unheard plan", "unheard corpus show"} <= set(COMMANDS)


@by_command
def test_every_command_has_a_section_with_an_example_of_it(name):
    assert re.search(rf"^    {re.escape(name)}\b", section(name), re.MULTILINE)


@by_command
def test_every_option_is_in_its_commands_section(name):
    flags = [flag for p in COMMANDS[name].params for flag in (*p.opts, *p.secondary_opts) if flag.startswith("--")]
    missing = [flag for flag in flags if f"`{flag}`" not in section(name) and flag != "--help"]
    assert not missing


@by_command
def test_every_argument_is_in_its_commands_section(name):
    arguments = [p.metavar or p.name for p in COMMANDS[name].params if p.param_type_name == "argument"]
    assert all(f"`{argument}`" in section(name) for argument in arguments), arguments


@by_command
def test_help_shows_the_whole_name_of_every_option_on_80_columns(name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 80)
    shown = CliRunner().invoke(app, [*name.split()[1:], "--help"]).output
    flags = [flag for p in COMMANDS[name].params for flag in (*p.opts, *p.secondary_opts) if flag.startswith("--")]
    # In the panel; an epilogue's examples name options too.
    panel = "\n".join(line for line in shown.splitlines() if line.startswith("│"))
    assert not [flag for flag in flags if not re.search(rf"{flag}\s", panel)]


@by_command
def test_no_option_is_documented_that_is_not_there(name):
    known = {flag for p in COMMANDS[name].params for flag in (*p.opts, *p.secondary_opts)}
    tables = [line for line in section(name).splitlines() if line.startswith("|")]
    assert set(re.findall(r"`(--[\w-]+)`", "\n".join(tables))) <= known


@by_command
def test_every_command_ends_with_examples(name):
    epilog = COMMANDS[name].epilog or ""
    assert "Examples" in epilog
    assert name in epilog


def test_no_section_is_about_a_command_that_is_not_there():
    assert set(re.findall(r"^## (unheard .*)$", PAGE, re.MULTILINE)) == set(COMMANDS)
