"""No command sends a DNS query: each runs in a network namespace whose only name server logs all queries.

The namespace has no connection to other machines. `dns_trap.py` is the name server, `every_command.py` runs the commands.
"""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
import typer.main

import unheard
from tests.cli import every_command
from unheard.cli.main import app

pytestmark = pytest.mark.system

HERE = Path(__file__).parent
KEPT = ("PATH", "LD_LIBRARY_PATH", "LANG")
"""The only environment variables of the commands. Others could switch telemetry off: those that unheard sets itself, and
those by which a dependency detects continuous integration."""


def unshare() -> list[str]:
    """Return the command that creates the namespaces: as root, or as a user who is root in a user namespace."""
    refusals = []
    for who in ([], ["--map-root-user"]):
        command = ["unshare", "--net", "--mount", *who]
        try:
            done = subprocess.run([*command, "mount", "--bind", "/etc", "/etc"], capture_output=True, text=True)
        except FileNotFoundError:
            pytest.skip("network namespaces need the program `unshare` (Linux)")
        if done.returncode == 0:
            return command
        refusals.append(done.stderr.strip())
    pytest.skip(f"network namespaces are not allowed here: {'; '.join(refusals)}")


def looked_up(log: Path, *command: str, home: Path, **env: str) -> tuple[set[str], str]:
    """Run a command, which must succeed, and return the names that it looked up, and its output."""
    source = str(Path(unheard.__file__).parents[1])
    kept = {name: os.environ[name] for name in KEPT if name in os.environ}
    done = subprocess.run(
        [*unshare(), sys.executable, str(HERE / "dns_trap.py"), str(log), *command],
        env={**kept, "HOME": str(home), "PYTHONPATH": source, "OMP_NUM_THREADS": "1", **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    return set(log.read_text().splitlines()), done.stdout


@pytest.mark.parametrize("options", ["", "use-vc"], ids=["udp", "tcp"])
def test_the_trap_logs_a_look_up(tmp_path, options):
    code = f"import contextlib, socket\nwith contextlib.suppress(OSError): socket.getaddrinfo({every_command.LOOKED_UP!r}, 443)"
    names, _ = looked_up(tmp_path / "names", sys.executable, "-c", code, home=tmp_path, RES_OPTIONS=options)
    assert names == {every_command.LOOKED_UP}


@pytest.mark.parametrize("words", [[], ["nodes"]], ids=["commands", "nodes of Flower"])
def test_no_command_looks_up_a_name(tmp_path, words):
    pytest.importorskip("onnxruntime", reason="`export` and the keyboard on an export need the extra `export`")
    pytest.importorskip("transformers", reason="`base` needs the extra `hf`")
    if words:
        pytest.importorskip("ray", reason="a simulation with Flower needs the extra `flower`")
    work, home = tmp_path / "work", tmp_path / "home"
    work.mkdir()
    home.mkdir()
    script = str(HERE / "every_command.py")
    names, printed = looked_up(tmp_path / "names", sys.executable, script, str(work), *words, home=home)
    ended = json.loads((work / every_command.ENDED).read_text())
    assert [line for line, status, _ in ended if status != 0] == [], printed[-20000:]
    # The script looks this name up at the end, to show that queries were logged.
    assert names == {every_command.LOOKED_UP}


def test_every_command_of_the_program_is_run():
    """All except hidden commands, which only name the command that replaced them."""
    group = typer.main.get_command(app)
    assert isinstance(group, click.Group)
    verbs = {name: verb for name, verb in group.commands.items() if not verb.hidden}
    groups = {name: list(verb.commands) for name, verb in verbs.items() if isinstance(verb, click.Group)}
    known = {f"{name} {sub}" for name, subs in groups.items() for sub in subs} | (set(verbs) - set(groups))
    run = set()
    for line in every_command.COMMANDS:
        first, second, *_ = [*shlex.split(line), ""]
        run.add(f"{first} {second}" if first in groups else first)
    assert run == known
