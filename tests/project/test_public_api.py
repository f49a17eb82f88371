"""The public API: every name of `import unheard` is documented, and the examples in its docstrings run.

The examples run in a temporary folder that holds a small store (corpora/posts) and a run of two rounds on it
(runs/first). The name `run` is that run; `rows` are posts of a few users.
"""

import doctest
import inspect
import re
import types
from dataclasses import replace
from typing import Any

import pytest

import unheard

CALLABLE = [name for name in unheard.__all__ if not isinstance(getattr(unheard, name), types.ModuleType)]
ROWS = [{"user": f"u{k % 12}", "text": "how are you today , my friend"} for k in range(48)]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory, store, model, plan):
    """A folder with corpora/posts and runs/first, and the names that the examples use."""
    folder = tmp_path_factory.mktemp("public-api")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        import shutil

        shutil.copytree(store.path, folder / "corpora" / "posts")
        run = unheard.Run(
            corpus="corpora/posts",
            model=model,
            plan=plan,
            training=unheard.Training(rounds=2),
            evaluation=unheard.Evaluation(every=2, max_tokens=100),
        )
        list(unheard.train(run, "runs/first"))
        yield {"unheard": unheard, "run": replace(run), "rows": ROWS}


def undocumented(thing: Any) -> list[str]:
    """The parameters that a docstring does not describe, in it or in that of the public name that it refers to."""
    text = inspect.getdoc(thing) or ""
    parameters = inspect.signature(thing).parameters
    if refers := re.search(r"The arguments are those of `(\w+)`, with the same defaults", text):
        other = getattr(unheard, refers[1])
        assert list(inspect.signature(other).parameters.values()) == list(parameters.values())
        return undocumented(other)
    described = re.findall(r"^    (\w+(?:, \w+)*): ", text, re.MULTILINE)
    return [name for name in parameters if name not in {word for words in described for word in words.split(", ")}]


def test_every_name_has_a_docstring_with_each_of_its_arguments_and_an_example():
    lacking = {}
    for name in CALLABLE:
        thing = getattr(unheard, name)
        text = inspect.getdoc(thing) or ""
        if isinstance(thing, type) and issubclass(thing, Exception):
            missing = [] if len(text) > 20 else ["a docstring"]
        else:
            missing = undocumented(thing) + ([] if ">>>" in text else ["an example"])
        if missing:
            lacking[name] = missing
    assert lacking == {}


@pytest.mark.parametrize("name", [name for name in CALLABLE if ">>>" in (inspect.getdoc(getattr(unheard, name)) or "")])
def test_the_examples_of_a_public_name_run(name, workplace, monkeypatch):
    thing = getattr(unheard, name)
    module = inspect.getmodule(thing)
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    finder, runner = doctest.DocTestFinder(), doctest.DocTestRunner(optionflags=flags, verbose=False)
    for test in finder.find(thing, name, module=module, globs={**vars(module), **workplace}):
        assert runner.run(test).failed == 0, f"{test.name}: see the captured output"


def test_the_api_has_what_a_notebook_needs():
    names = {"train", "resume", "evaluate", "statement", "plan", "epsilon", "errors", "UnheardError", "AdamServer"}
    assert names <= set(unheard.__all__)
