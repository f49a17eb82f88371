"""Every command and every option is documented in docs/commands.md, and every command shows examples.

Each rule is one test that lists every offender.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main
from typer.testing import CliRunner

from unheard.cli.main import app

PAGE = (Path(__file__).parents[2] / "docs" / "commands.md").read_text()


def commands(group: Any, name: str = "unheard") -> Iterator[tuple[str, Any]]:
    """Every command that does something, by its whole name; groups are only walked through."""
    for verb, command in group.commands.items():
        if getattr(command, "hidden", False):
            continue
        if hasattr(command, "commands"):
            yield from commands(command, f"{name} {verb}")
        else:
            yield f"{name} {verb}", command


COMMANDS = dict(commands(typer.main.get_command(app)))


def section(name: str) -> str:
    """What the page says under the command's heading, up to the next one."""
    found = re.search(rf"^## {re.escape(name)}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found, f"docs/commands.md has no heading '## {name}'"
    return found.group(1)


def test_the_walk_finds_the_commands():
    assert {"unheard train", "unheard resume", "unheard plan", "unheard corpus show"} <= set(COMMANDS)


def flags_of(name: str) -> list[str]:
    parameters = COMMANDS[name].params
    return [flag for p in parameters for flag in (*p.opts, *p.secondary_opts) if flag.startswith("--")]


def test_every_command_has_a_section_with_an_example_of_it():
    assert [name for name in COMMANDS if not re.search(rf"^    {re.escape(name)}\b", section(name), re.MULTILINE)] == []


def test_every_option_is_in_its_commands_section():
    missing = [
        f"{name} {flag}"
        for name in COMMANDS
        for flag in flags_of(name)
        if f"`{flag}`" not in section(name) and flag != "--help"
    ]
    assert missing == []


def test_every_argument_is_in_its_commands_section():
    missing = [
        f"{name} {p.metavar or p.name}"
        for name in COMMANDS
        for p in COMMANDS[name].params
        if p.param_type_name == "argument" and f"`{p.metavar or p.name}`" not in section(name)
    ]
    assert missing == []


def test_help_shows_the_whole_name_of_every_option_on_80_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 80)
    cut = []
    for name in COMMANDS:
        shown = CliRunner().invoke(app, [*name.split()[1:], "--help"]).output
        # In the panel; an epilogue's examples name options too.
        panel = "\n".join(line for line in shown.splitlines() if line.startswith("│"))
        cut += [f"{name} {flag}" for flag in flags_of(name) if not re.search(rf"{flag}\s", panel)]
    assert cut == []


def test_no_option_is_documented_that_is_not_there():
    unknown = {}
    for name, command in COMMANDS.items():
        known = {flag for p in command.params for flag in (*p.opts, *p.secondary_opts)}
        tables = [line for line in section(name).splitlines() if line.startswith("|")]
        unknown[name] = set(re.findall(r"`(--[\w-]+)`", "\n".join(tables))) - known
    assert {name: flags for name, flags in unknown.items() if flags} == {}


def test_every_command_ends_with_examples():
    without = [
        name
        for name, command in COMMANDS.items()
        if "Examples" not in (command.epilog or "") or name not in (command.epilog or "")
    ]
    assert without == []


def test_no_section_is_about_a_command_that_is_not_there():
    assert set(re.findall(r"^## (unheard .*)$", PAGE, re.MULTILINE)) == set(COMMANDS)
