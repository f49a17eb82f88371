"""What the documents print is true: their Python runs, their run files are run files, the files and tests they name exist.

Conventions. Every ```python block is a whole program, run in a working folder of its own. Where it names a store under
corpora/, the tests' own small one is there. A ```text block right after it is what it prints. A ```toml block with a
[corpus] is a whole run file; any other replaces or adds tables of the first whole one.
"""

import re
import runpy
import shutil
import tomllib
from pathlib import Path

import pytest

import unheard
from unheard.training.run_file import run_from_tables

ROOT = Path(__file__).parents[2]
SRC = Path(unheard.__file__).parent
SOURCES = [path.read_text() for folder in (SRC, ROOT / "reproduction") for path in folder.rglob("*.py")]
RUNNABLE = [ROOT / "README.md", ROOT / "docs" / "guide.md"]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)
PATH = re.compile(r"`([a-z_]+(?:/[a-z_]+)*\.py)`")
TEST = re.compile(r"`(test_\w+)`")


def blocks(path: Path, language: str) -> list[tuple[str, str]]:
    """The blocks of one language, each with the ```text block that follows it (or nothing)."""
    return [(code, printed) for kind, code, printed in BLOCK.findall(path.read_text()) if kind == language]


PROGRAMS = [
    pytest.param(code, printed, id=f"{path.name}-{i}")
    for path in RUNNABLE
    for i, (code, printed) in enumerate(blocks(path, "python"))
]


@pytest.mark.parametrize(("code", "printed"), PROGRAMS)
def test_every_python_block_runs_and_prints_what_it_says(store, tmp_path, monkeypatch, capsys, code, printed):
    for name in set(re.findall(r"corpora/[\w-]+", code)):
        shutil.copytree(store.path, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    program = tmp_path / "block.py"
    program.write_text(code)
    runpy.run_path(str(program), run_name="__main__")
    shown = capsys.readouterr().out
    if printed:
        assert shown == printed


def test_the_guide_has_programs_and_one_of_them_trains():
    code = [code for code, _ in blocks(ROOT / "docs" / "guide.md", "python")]
    assert len(code) >= 2
    assert any("unheard.train(" in one for one in code)


@pytest.mark.parametrize("path", RUNNABLE, ids=lambda p: p.name)
def test_every_run_file_in_a_document_is_one(path):
    tables = [tomllib.loads(code) for code, _ in blocks(path, "toml")]
    whole = next((t for t in tables if "corpus" in t), {})
    for changes in tables:
        run, _ = run_from_tables(changes if "corpus" in changes else {**whole, **changes})
        assert run.training.rounds >= 1


@pytest.mark.parametrize("name", ["glossary.md", "sharp-edges.md"])
def test_every_file_that_a_table_names_is_there(name):
    named = set(PATH.findall((ROOT / "docs" / name).read_text()))
    assert len(named) > 10
    missing = [path for path in named if not ((SRC / path).is_file() or (ROOT / path).is_file())]
    assert not missing


def test_every_test_that_guards_a_sharp_edge_is_there():
    named = set(TEST.findall((ROOT / "docs" / "sharp-edges.md").read_text()))
    assert len(named) > 50
    written = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    missing = [name for name in named if f"def {name}(" not in written]
    assert not missing


def test_every_field_that_the_glossary_names_is_there():
    """`FlatClip.norm` and its like: a class, and a word in the file that defines it."""
    named = set(re.findall(r"`([A-Z]\w+)\.(\w+)", (ROOT / "docs" / "glossary.md").read_text()))
    assert len(named) > 40
    defined = {cls: text for text in SOURCES for cls in re.findall(r"^class (\w+)", text, re.MULTILINE)}
    missing = [f"{cls}.{field}" for cls, field in named if not re.search(rf"\b{field}\b", defined.get(cls, ""))]
    assert not missing


@pytest.mark.parametrize("path", sorted((ROOT / "docs").glob("*.md")), ids=lambda p: p.name)
def test_every_link_between_documents_leads_somewhere(path):
    for target in re.findall(r"\]\(([\w./-]+\.md)\)", path.read_text()):
        assert (path.parent / target).is_file(), target
