"""Rules for the whole package: import direction, imports without torch, docstrings, and forbidden imports.

Each rule is one test that lists every offender.
"""

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
    "evaluation",
    "training",
    "performance",
    "audit",
    "tuning",
    "deployment",
    "federated",
    "report",
    "cli",
]
"""The packages in the order of the data flow. A package imports only packages before it (docs/decisions/0002-package-order.md)."""

TESTS = Path(__file__).parents[1]
OTHER_TESTS = {
    "agreement": "engines against each other and against plain programs",
    "browser": "pages in a browser",
    "data": "files of earlier versions",
    "faults": "crashes, full disks and damaged files at every step",
    "laws": "properties that the privacy proof needs",
    "leaks": "private values in any output, and hostile input",
    "mutants": "broken lines that the tests must notice",
    "project": "rules for the whole repository",
    "reproduction": "the package reproduction/",
}
"""Test folders that are not about one package of src/unheard, and what they test."""

WITHOUT_TORCH = {"privacy", "corpus", "report", "cli"}
"""The accounting, the reports and `unheard --help` work without importing torch."""


def package(path: Path) -> str:
    parts = path.relative_to(SRC).parts
    return parts[0] if len(parts) > 1 else ""


def imports(path: Path, at_top: bool = False) -> set[str]:
    """Dotted names that a file imports; with `at_top` only those of module-level statements."""
    tree = ast.parse(path.read_text())
    names = set()
    for node in tree.body if at_top else ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_no_package_imports_a_later_package():
    assert {package(path) for path in FILES} - {""} == set(ORDER)
    offenders = []
    for path in FILES:
        if path.name == "__main__.py":
            continue
        own = ORDER.index(package(path)) if package(path) else -1
        for name in imports(path, at_top=not package(path)):
            parts = name.split(".")
            is_ours = parts[0] == "unheard" and len(parts) > 1 and parts[1] in ORDER
            if parts[0] == "reproduction" or (is_ours and ORDER.index(parts[1]) > own):
                offenders.append(f"{path.relative_to(SRC)} imports {name}")
    assert offenders == []


def test_packages_without_torch_never_import_it_at_module_level():
    heavy = {f"unheard.{name}" for name in ("models", "updates", "mechanism", "engines", "evaluation", "training")}
    offenders = [
        f"{path.relative_to(SRC)} imports {name}"
        for path in FILES
        if package(path) in WITHOUT_TORCH
        for name in imports(path, at_top=True)
        if name.split(".")[0] == "torch" or any(name.startswith(f"{one}.") for one in heavy)
    ]
    assert offenders == []


def test_importing_what_needs_no_torch_does_not_import_it():
    modules = "unheard, unheard.privacy.statement, unheard.corpus.store, unheard.cli.main"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_processes_that_prepare_text_do_not_import_scipy():
    """Importing scipy takes a second in each process."""
    code = "import sys, unheard.corpus.pipeline; sys.exit('scipy' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_every_module_has_a_docstring_that_opens_with_a_sentence():
    def opens_with_a_sentence(path: Path) -> bool:
        first = (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n")[0]
        return len(first) > 15 and first[-1] in ".:"

    assert [str(path.relative_to(SRC)) for path in FILES if not opens_with_a_sentence(path)] == []


def test_every_public_name_can_be_imported():
    assert len(unheard.__all__) > 25
    for name in unheard.__all__:
        assert getattr(unheard, name).__name__.removeprefix("unheard.") == name
    with pytest.raises(AttributeError):
        _ = unheard.NoSuchThing  # pyright: ignore[reportAttributeAccessIssue]


def test_nothing_is_ever_unpickled():
    forbidden = {"pickle", "shelve", "dill", "joblib", "marshal"}
    offenders = [
        str(path.relative_to(SRC))
        for path in FILES
        if any(name.split(".")[0] in forbidden for name in imports(path)) or "torch.load(" in path.read_text()
    ]
    assert offenders == []


def test_only_one_module_imports_onnxruntime():
    """onnxruntime contacts its vendor when imported, unless a variable is set first: see the comment at that import."""
    users = [path for path in FILES if any(name.split(".")[0] == "onnxruntime" for name in imports(path))]
    assert users == [SRC / "deployment" / "model.py"]
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


def test_only_storage_uses_file_locks_and_fsync():
    allowed = {SRC / "storage.py"}
    offenders = [
        str(path.relative_to(SRC))
        for path in FILES
        if path not in allowed and re.search(r"\bimport (fcntl|filelock|msvcrt)\b", path.read_text())
    ]
    assert offenders == []


def test_every_exception_is_in_the_tree():
    errors = importlib.import_module("unheard.errors")
    for name, thing in vars(errors).items():
        if isinstance(thing, type) and issubclass(thing, Exception):
            assert name in (errors.__doc__ or "")
            assert issubclass(thing, Warning if name.endswith("Warning") else errors.UnheardError)


def test_test_folders_are_those_of_the_packages():
    folders = {path.name for path in TESTS.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders - OTHER_TESTS.keys() == set(ORDER)
    assert OTHER_TESTS.keys() - folders == set()
    nested = [
        str(path.relative_to(TESTS))
        for package_ in ORDER
        for path in (TESTS / package_).iterdir()
        if path.is_dir() and path.name not in ("__pycache__", "data")
        if not ((SRC / package_ / path.name).is_dir() or (SRC / package_ / f"{path.name}.py").is_file())
    ]
    assert nested == []
