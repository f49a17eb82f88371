"""Checks docs/paper.md: every file, link, test, field and experiment that it names exists, and it names every experiment."""

import re
from pathlib import Path

from reproduction.recipes import RECIPES

import unheard

ROOT = Path(__file__).parents[2]
SRC = Path(unheard.__file__).parent
PAGE = (ROOT / "docs" / "paper.md").read_text()


def test_every_named_file_exists():
    named = re.findall(r"`((?:[\w-]+/)*[\w-]+\.(?:py|md|toml))`", PAGE)
    assert len(named) > 60
    assert [path for path in sorted(set(named)) if not ((SRC / path).is_file() or (ROOT / path).is_file())] == []


def test_every_link_has_a_target():
    targets = set(re.findall(r"\]\(([^)]+)\)", PAGE))
    assert len(targets) > 10
    assert [target for target in sorted(targets) if not (ROOT / "docs" / target).is_file()] == []


def test_every_named_test_exists():
    written = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    assert named
    assert [name for name in named if f"def {name}(" not in written] == []


def test_the_page_names_exactly_the_existing_experiments():
    assert set(re.findall(r"`python -m reproduction run ([\w-]+)`", PAGE)) == set(RECIPES)


def test_every_named_class_and_field_exists():
    sources = [path.read_text() for path in SRC.rglob("*.py")]
    defined = {cls: text for text in sources for cls in re.findall(r"^class (\w+)", text, re.MULTILINE)}
    named = set(re.findall(r"`([A-Z]\w+)\.(\w+)`", PAGE))
    assert named
    assert [f"{c}.{f}" for c, f in named if not re.search(rf"\b{f}\b", defined.get(c, ""))] == []


def test_the_page_names_every_table_and_figure_of_the_paper():
    assert {f"Figure {n}" for n in range(1, 13)} <= set(re.findall(r"Figure \d+", PAGE))
    assert {f"Table {n}" for n in range(1, 4)} <= set(re.findall(r"Table \d+", PAGE))
