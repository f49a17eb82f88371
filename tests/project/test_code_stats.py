"""tools/code_stats.py gives the right table for a small package with known figures."""

import runpy
from pathlib import Path

TOOL = Path(__file__).parents[2] / "tools" / "code_stats.py"
MODULE = '''"""A module."""

import shop.prices
from shop import stock


def buy(n):
    """Buy things.

    Args:
        n: how many.
    """

    def inner():
        return n

    # a comment
    return _sum(inner())


def sell(n):
    return n


def _sum(n):
    return n


class Thing:
    """A thing."""
'''


def test_the_figures_of_a_small_package(tmp_path):
    tool = runpy.run_path(str(TOOL))
    package = tmp_path / "shop" / "shop"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "cart.py").write_text(MODULE)
    (package / "prices.py").write_text('"""Prices."""\n\n\nclass Thing:\n    pass\n')
    (package / "stock.py").write_text('"""Stock."""\n\nfrom shop import prices\n')
    assert tool["packages_of"](tmp_path / "shop") == [package]
    found = tool["measure"](package)
    assert found["files"] == "4"
    assert found["lines"] == str(len(MODULE.splitlines()) + 5 + 3)
    assert found["code lines"] == str(11 + 2 + 1)
    lines = len(MODULE.splitlines()) + 8
    assert found["docstrings, share of lines"] == f"{100 * 9 / lines:.1f} %"
    assert found["docstrings and comments, share of lines"] == f"{100 * 10 / lines:.1f} %"
    assert found["modules with a single importer"] == "1 of 4"  # stock; two modules import prices
    assert found["private functions used once"] == "1 of 1"
    assert found["public functions without docstring"] == "1 of 2"  # sell; a function inside a function is not public
    assert found["public functions with Args"] == "1 of 2"
    assert found["class names used twice"] == "1 of 1"


def test_of_a_checkout_of_this_project_documents_and_tests_are_counted(tmp_path):
    tool = runpy.run_path(str(TOOL))
    for folder in ("src/unheard", "docs", "tests/cli", "reproduction"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "docs" / "page.md").write_text("x" * 121 + "\n\n| " + "x" * 200 + " |\n")
    (tmp_path / "tests" / "cli" / "test_a.py").write_text("def test_a(): ...\n\n\ndef helper(): ...\n")
    assert tool["packages_of"](tmp_path) == [tmp_path / "src" / "unheard", tmp_path / "reproduction"]
    found = tool["measure_checkout"](tmp_path, with_trace=False)
    assert found == {"lines of docs/ over 120 characters": "1", "test functions": "1"}
