"""Checks of the docs: Python blocks run, run files are valid, and the files, tests and pages that they name exist.

Conventions: every ```python block is a whole program, run in its own working folder. If it names a store under corpora/, a
copy of the tests' small store is put there. A ```text block right after it is its output. A ```toml block with a [corpus] table
is a whole run file; any other block replaces or adds tables of the whole run file in docs/guide.md.
"""

import inspect
import re
import runpy
import shutil
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import unheard
from unheard.training.run import run_from_tables

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SRC = Path(unheard.__file__).parent
sys.path.insert(0, str(ROOT / "tools"))

import site_hooks  # noqa: E402  # pyright: ignore[reportMissingImports]

SOURCES = [path.read_text() for folder in (SRC, ROOT / "reproduction") for path in folder.rglob("*.py")]
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)
PATH = re.compile(r"`([a-z_]+(?:/[a-z_]+)*\.py)`")
TEST = re.compile(r"`(test_\w+)`")
BARE_LINK = re.compile(r"(?:[-*] )?(?:\[[^\]]*\]\(\S+\)|<?https?://\S+>?)[.,;:]?")


def blocks(path: Path, language: str) -> list[tuple[str, str]]:
    """Return the blocks of one language, each with the ```text block that follows it (empty if there is none)."""
    return [(code, printed) for kind, code, printed in BLOCK.findall(path.read_text()) if kind == language]


PROGRAMS = [
    pytest.param(code, printed, id=f"{path.name}-{i}")
    for path in PAGES
    for i, (code, printed) in enumerate(blocks(path, "python"))
]
QUICKER = [(r"rounds=\d+", "rounds=4"), (r"users_per_round=1\d\d", "users_per_round=20"), (r"every=\d+", "every=2")]
"""The README's program trains for most of a minute. Here fewer users and rounds show that it runs."""


@pytest.mark.parametrize(("code", "printed"), PROGRAMS)
def test_every_python_block_runs_and_prints_what_it_says(store, tmp_path, monkeypatch, capsys, code, printed):
    for name in set(re.findall(r"corpora/[\w-]+", code)):
        shutil.copytree(store.path, tmp_path / name)
    for pattern, replacement in QUICKER if not printed else []:
        code = re.sub(pattern, replacement, code)
    monkeypatch.chdir(tmp_path)
    program = tmp_path / "block.py"
    program.write_text(code)
    runpy.run_path(str(program), run_name="__main__")
    shown = capsys.readouterr().out
    if printed:
        assert shown == printed


def test_the_readme_and_the_guide_have_programs_that_train():
    for path in (ROOT / "README.md", DOCS / "guide.md"):
        assert any("unheard.train(" in code for code, _ in blocks(path, "python")), path


def test_every_run_file_in_a_document_is_valid():
    whole = next(tables for code, _ in blocks(DOCS / "guide.md", "toml") if "corpus" in (tables := tomllib.loads(code)))
    checked = 0
    for path in PAGES:
        for changes in (tomllib.loads(code) for code, _ in blocks(path, "toml")):
            run, _ = run_from_tables(changes if "corpus" in changes else {**whole, **changes})
            assert run.training.rounds >= 1
            checked += 1
    assert checked >= 5


@pytest.mark.parametrize("name", ["glossary.md", "sharp-edges.md", "algorithm.md"])
def test_every_file_that_a_page_names_exists(name):
    named = set(PATH.findall((DOCS / name).read_text()))
    assert len(named) > 5
    assert [path for path in sorted(named) if not ((SRC / path).is_file() or (ROOT / path).is_file())] == []


def test_every_file_that_a_decision_names_exists():
    missing = [
        f"{page.name}: {path}"
        for page in sorted((DOCS / "decisions").glob("*.md"))
        for path in PATH.findall(page.read_text())
        if not ((SRC / path).is_file() or (ROOT / path).is_file())
    ]
    assert missing == []


def test_every_test_that_guards_a_sharp_edge_exists():
    named = set(TEST.findall((DOCS / "sharp-edges.md").read_text()))
    assert len(named) > 50
    written = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name in sorted(named) if f"def {name}(" not in written] == []


def test_every_field_that_the_glossary_names_exists():
    """`FlatClip.norm` and the like: a class, and a word in the file that defines it."""
    named = set(re.findall(r"`([A-Z]\w+)\.(\w+)", (DOCS / "glossary.md").read_text()))
    assert len(named) > 40
    defined = {cls: text for text in SOURCES for cls in re.findall(r"^class (\w+)", text, re.MULTILINE)}
    missing = [f"{cls}.{field}" for cls, field in named if not re.search(rf"\b{field}\b", defined.get(cls, ""))]
    assert not missing


def test_every_link_between_documents_has_a_target():
    generated = {DOCS / "changelog.md", DOCS / "decisions" / "index.md"}
    missing = []
    for path in [*PAGES, *ROOT.glob("*.md"), *(DOCS / "decisions").glob("*.md")]:
        for target in re.findall(r"\]\(([\w./=-]+)(?:#[\w-]+)?\)", path.read_text()):
            linked = path.parent / target
            if not linked.exists() and linked not in generated:
                missing.append(f"{path.relative_to(ROOT)} -> {target}")
    assert missing == []


def test_every_page_is_in_the_navigation_and_every_entry_has_a_page():
    def pages(entry) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        return [page for item in (entry.values() if isinstance(entry, dict) else entry) for page in pages(item)]

    listed = set(pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    generated = {"changelog.md", "decisions/index.md"}
    written = {path.name for path in DOCS.glob("*.md")} | generated
    assert listed - written == set()
    assert {path.name for path in DOCS.glob("*.md")} - listed == set()


def test_the_site_loads_nothing_from_the_network():
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    assert config["theme"]["font"] is False
    assert "http" not in str(
        [config.get("extra_css"), config.get("extra_javascript"), config["plugins"], config["extra"]]
    )


def test_every_key_of_the_run_file_has_a_meaning_on_its_page():
    page = site_hooks.run_file_page("<!-- run file tables -->")
    without = [
        f"[{table}] {kind} {field}"
        for table, kinds in site_hooks.run_file_tables().items()
        for kind, cls in kinds.items()
        for field in cls.__dataclass_fields__
        if cls.__dataclass_fields__[field].init and not site_hooks.meanings(cls).get(field)
    ]
    assert without == []
    assert "| `noise_multiplier` | number | none |" in page


def test_the_api_page_lists_every_public_name():
    page = site_hooks.api_page("<!-- public names -->")
    names = [name for name in unheard.__all__ if not inspect.ismodule(getattr(unheard, name))]
    assert [name for name in names if not re.search(rf"^::: [\w.]+\.{name}$", page, re.MULTILINE)] == []


def test_a_claim_of_the_privacy_page_links_to_its_line():
    page = site_hooks.with_links((DOCS / "privacy.md").read_text(), "privacy.md")
    assert len(re.findall(r"\]\(source/src/unheard/[\w/]+\.py\.md#line-\d+\)", page)) > 20
    assert len(re.findall(r"\]\(source/tests/[\w/]+\.py\.md#line-\d+\)", page)) > 20


def test_lines_of_documents_are_at_most_120_characters_long():
    """In prose, code and notes. Rows of tables and lines that are a single link may be longer."""
    long = [
        f"{path.relative_to(ROOT)}:{number}: {line[:60]}"
        for path in [*PAGES, *ROOT.glob("*.md"), *(DOCS / "decisions").glob("*.md")]
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if len(line) > 120 and not line.lstrip().startswith("|") and not BARE_LINK.fullmatch(line.strip())
    ]
    assert long == []


def test_every_new_module_of_the_upgrade_notes_exists():
    table = (DOCS / "upgrade.md").read_text().split("## Imports")[1]
    new = re.findall(r"^\| .* \| `(?!unheard|reproduction)([\w.]+)(?:\.\*)?` \|$", table, re.MULTILINE)
    assert len(new) > 40
    paths = {name: SRC / name.replace(".", "/") for name in new}
    assert [name for name, path in paths.items() if not (path.is_dir() or path.with_suffix(".py").is_file())] == []


def test_the_paths_through_the_code_name_what_is_there():
    """Each row of docs/code.md names a module and what to read in it."""
    rows = re.findall(r"^\| `([\w/]+\.py)` \| ([^|]+) \|", (ROOT / "docs" / "code.md").read_text(), re.MULTILINE)
    named = [(module, name) for module, names in rows for name in re.findall(r"`(\w+)`", names)]
    assert len(named) > 35
    absent = [f"{m}: {name}" for m, name in named if not re.search(rf"(def|class) {name}\b", (SRC / m).read_text())]
    assert absent == []
