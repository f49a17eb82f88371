"""Every command is documented: a section in docs/commands.md, options with help, examples that name the command.

Each rule is one test that lists every offender. The tables of options on the site are generated (tools/site_hooks.py).
"""

import inspect
import re
import sys
from pathlib import Path

from typer.testing import CliRunner

from unheard.cli.main import app

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import site_hooks  # noqa: E402  # pyright: ignore[reportMissingImports]

COMMANDS = site_hooks.all_commands()
UNHEARD = {name: command for name, command in COMMANDS.items() if name.startswith("unheard ")}
SCREEN = 50
"""Lines of one screen."""


def flags_of(name: str) -> list[str]:
    """The long options of a command."""
    parameters = COMMANDS[name].params
    return [flag for p in parameters for flag in (*p.opts, *p.secondary_opts) if flag.startswith("--")]


def test_all_commands_are_found():
    expected = {"unheard train", "unheard plan", "unheard corpus show", "python -m reproduction run"}
    assert expected <= set(COMMANDS)


def test_every_command_has_a_section_and_every_section_a_command():
    page = (ROOT / "docs" / "commands.md").read_text()
    assert set(re.findall(r"^## (.*)$", page, re.MULTILINE)) == set(COMMANDS)


def test_the_generated_section_has_every_option_and_argument():
    missing = []
    for name, command in COMMANDS.items():
        section = site_hooks.command_section(name)
        names = [flag for flag in flags_of(name) if flag != "--help"]
        names += [p.metavar or p.name for p in command.params if p.param_type_name == "argument"]
        missing += [f"{name} {shown}" for shown in names if f"`{shown}`" not in section]
    assert missing == []


def test_every_option_and_argument_has_help():
    missing = [
        f"{name} {parameter.name}"
        for name, command in COMMANDS.items()
        for parameter in command.params
        if not (parameter.help or "").strip() and parameter.name != "help"
    ]
    assert missing == []


def test_every_command_has_a_docstring():
    assert [name for name, command in COMMANDS.items() if not (command.help or "").strip()] == []


def test_help_shows_the_whole_name_of_every_option_on_80_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 80)
    cut = []
    for name in UNHEARD:
        shown = CliRunner().invoke(app, [*name.split()[1:], "--help"]).output
        # In the panels; the examples of an epilog name options too.
        panel = "\n".join(line for line in shown.splitlines() if line.startswith("│"))
        cut += [f"{name} {flag}" for flag in flags_of(name) if not re.search(rf"{flag}[\s,]", panel)]
    assert cut == []


def test_every_command_ends_with_examples():
    without = [
        name
        for name, command in COMMANDS.items()
        if "Examples" not in (command.epilog or "") or name not in (command.epilog or "")
    ]
    assert without == []


def test_help_shows_the_default_of_every_option():
    """Flags are off by default; every other option that may be left out shows a value, or says in words what happens."""
    without = [
        f"{name} {p.opts[0]}"
        for name, command in COMMANDS.items()
        for p in command.params
        if p.param_type_name == "option" and not p.required and not p.is_flag
        if not isinstance(p.show_default, str) and (p.default is None or p.show_default is False)
    ]
    assert without == []


def test_every_command_function_fits_on_a_screen():
    """With its signature and docstring. Options that belong together are a group, and the work is in the packages."""
    lines = {name: len(inspect.getsourcelines(inspect.unwrap(c.callback))[0]) for name, c in COMMANDS.items()}
    assert {name: number for name, number in lines.items() if number > SCREEN} == {}
