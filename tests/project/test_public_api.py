"""The public API: every name of `import unheard` is documented, and the examples in its docstrings run.

The examples run in a temporary folder that holds a small store (corpora/posts) and a run of two rounds on it
(runs/first). The name `run` is that run; `rows` are posts of a few users.
"""

import doctest
import inspect
import types
from dataclasses import replace

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


def test_every_name_has_a_docstring_with_its_arguments_and_an_example():
    def is_documented(thing: object) -> bool:
        text = inspect.getdoc(thing) or ""
        if isinstance(thing, type) and issubclass(thing, Exception):
            return len(text) > 20
        takes_nothing = callable(thing) and not inspect.signature(thing).parameters
        return ">>>" in text and (takes_nothing or "Args:" in text or "Attributes:" in text)

    assert [name for name in CALLABLE if not is_documented(getattr(unheard, name))] == []


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
