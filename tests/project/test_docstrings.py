"""The examples in docstrings run and print what they say. Those of the public API run in test_public_api.py."""

import doctest
import importlib
import types
from pathlib import Path

import pytest

import unheard

ROOT = Path(unheard.__file__).parent
MODULES = [
    ".".join(("unheard", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
    for path in sorted(ROOT.rglob("*.py"))
    if ">>> " in path.read_text(encoding="utf-8")
]
PUBLIC = tuple(
    f"{thing.__module__}.{thing.__qualname__}"
    for thing in (getattr(unheard, name) for name in unheard.__all__)
    if not isinstance(thing, types.ModuleType)
)


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_run(name):
    if name == "unheard.federated.secure_aggregation":
        pytest.importorskip("Crypto", reason="needs the extra flower")
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    for test in doctest.DocTestFinder().find(importlib.import_module(name)):
        if not test.name.startswith(PUBLIC):
            assert runner.run(test).failed == 0, f"{test.name}: see the captured output"
