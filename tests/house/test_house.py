"""The house: which room may know which, what the menu offers, what every file says over its door."""

import ast
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import unheard

SRC = Path(unheard.__file__).parent
FILES = sorted(SRC.rglob("*.py"))

ORDER = [
    "privacy",
    "corpus",
    "models",
    "updates",
    "mechanism",
    "engines",
    "measure",
    "training",
    "audit",
    "paper",
    "tuning",
    "deploy",
    "report",
    "cli",
]
"""Rooms in the order of the sentence: text -> tokens -> cohort -> updates -> sum -> average -> noise -> model -> numbers -> page.
A room imports only rooms before it (docs/decisions/0002-rooms.md)."""

WITHOUT_TORCH = {"privacy", "corpus", "report", "cli"}
"""An auditor runs the accounting on a laptop; `unheard --help` must be quick."""


def room(path: Path) -> str:
    parts = path.relative_to(SRC).parts
    return parts[0] if len(parts) > 1 else ""


def imports(path: Path, at_top: bool = False) -> set[str]:
    tree = ast.parse(path.read_text())
    nodes = tree.body if at_top else list(ast.walk(tree))
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("path", [f for f in FILES if room(f)], ids=lambda p: str(p.relative_to(SRC)))
def test_no_room_imports_one_that_stands_later(path):
    mine = ORDER.index(room(path))
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "unheard" and len(parts) > 1 and parts[1] in ORDER:
            assert ORDER.index(parts[1]) <= mine, f"{path.name} imports {name}"


@pytest.mark.parametrize("path", [f for f in FILES if room(f) in WITHOUT_TORCH], ids=lambda p: str(p.relative_to(SRC)))
def test_rooms_that_do_without_torch_never_import_it_at_the_top(path):
    heavy_rooms = {f"unheard.{r}" for r in ("models", "updates", "mechanism", "engines", "measure", "training")}
    for name in imports(path, at_top=True):
        assert name.split(".")[0] != "torch"
        assert not any(name.startswith(r) for r in heavy_rooms), f"{path.name} imports {name}"


@pytest.mark.parametrize("module", ["unheard", "unheard.privacy.statement", "unheard.corpus.store", "unheard.cli.main"])
def test_importing_it_does_not_import_torch(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SRC)))
def test_every_file_opens_with_the_sentence_over_its_door(path):
    first = (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n")[0]
    assert len(first) > 15
    assert first[-1] in ".:!,;" or first.endswith("line")


def test_everything_on_the_menu_is_there():
    for name in unheard.__all__:
        assert getattr(unheard, name).__name__ == name
    with pytest.raises(AttributeError):
        _ = unheard.NoSuchThing


def test_the_menu_and_the_type_checkers_view_of_it_are_the_same():
    tree = ast.parse((SRC / "__init__.py").read_text())
    block = next(n for n in tree.body if isinstance(n, ast.If))
    seen = {alias.asname: f"{n.module}" for n in block.body if isinstance(n, ast.ImportFrom) for alias in n.names}
    assert seen == {name: f"unheard.{where}" for name, where in unheard._MENU.items()}


def test_nothing_is_ever_unpickled():
    for path in FILES:
        for name in imports(path):
            assert name.split(".")[0] not in {"pickle", "shelve", "dill", "joblib", "marshal"}, path
        assert "torch.load(" not in path.read_text(), path


def test_only_one_module_imports_onnxruntime():
    """It contacts its vendor when imported, unless a variable is set first: see the comment at that import."""
    users = [path for path in FILES if any(name.split(".")[0] == "onnxruntime" for name in imports(path))]
    assert users == [SRC / "deploy" / "device.py"]
    dynamic = [path for path in FILES if re.search(r"import_module\(\s*[\"']onnxruntime", path.read_text())]
    assert dynamic == []


def test_the_switches_against_telemetry_are_set_and_the_users_own_values_stay():
    code = "import os, unheard; print({name: os.environ[name] for name in unheard._NO_TELEMETRY})"
    env = {name: value for name, value in os.environ.items() if name not in unheard._NO_TELEMETRY}

    def values(**own: str) -> dict[str, str]:
        done = subprocess.run([sys.executable, "-c", code], env=env | own, capture_output=True, text=True, check=True)
        return ast.literal_eval(done.stdout)

    assert values() == unheard._NO_TELEMETRY
    assert unheard._NO_TELEMETRY["ORT_DISABLE_TELEMETRY"] == "1"
    assert values(DO_NOT_TRACK="0") == unheard._NO_TELEMETRY | {"DO_NOT_TRACK": "0"}


def test_every_exception_is_in_the_tree():
    errors = importlib.import_module("unheard.errors")
    for name, thing in vars(errors).items():
        if isinstance(thing, type) and issubclass(thing, Exception):
            assert name in (errors.__doc__ or "")
            assert issubclass(thing, errors.UnheardError)
