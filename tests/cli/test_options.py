"""Options that several commands share, and options with a fixed set of words."""

import doctest
import inspect
from typing import get_args

import pytest
from typer.testing import CliRunner

from unheard.cli import options, plan, statement
from unheard.cli.main import app
from unheard.engines.choice import ENGINES
from unheard.privacy.accountants import ACCOUNTANTS
from unheard.privacy.statement_formats import FORMATS


@pytest.mark.parametrize(
    "words",
    [
        ["benchmark", "--precision"],
        ["prepare", "posts.jsonl", "--out", "store", "--engine"],
        ["prepare", "posts.jsonl", "--out", "store", "--sequence"],
        ["prepare", "posts.jsonl", "--out", "store", "--punctuation"],
        ["prepare", "posts.jsonl", "--out", "store", "--format"],
        ["tune", "run.toml", "--out", "t", "--trials-from"],
        ["export", "run", "--to"],
        ["train", "run.toml", "--out", "r", "--engine"],
        ["benchmark", "--engine"],
        ["plan", "--users", "10", "--accountant"],
        ["budget", "store", "--accountant"],
    ],
)
def test_an_unknown_word_is_refused_with_the_known_ones(words):
    done = CliRunner().invoke(app, [*words, "nonsense"])
    assert done.exit_code == 2
    assert f"Invalid value for '{words[-1]}'" in done.output
    assert "nonsense" in done.output


def test_the_words_of_options_are_those_of_the_registries():
    engines = get_args(get_args(get_args(options.EngineName)[0])[0])
    assert set(engines) == {"auto", *ENGINES}
    formats = inspect.signature(statement.statement, eval_str=True).parameters["format"].annotation
    assert get_args(get_args(formats)[0]) == FORMATS
    accountants = inspect.signature(plan.plan, eval_str=True).parameters["accountant"].annotation
    assert set(get_args(get_args(accountants)[0])) == {"best", *ACCOUNTANTS}


def test_options_of_the_machine_become_keys_of_the_run_file():
    assert options.overrides(["clip.norm=3"], "stacked", "cpu", 5.0) == [
        "clip.norm=3",
        "engine.kind=stacked",
        "engine.device=cpu",
        "engine.rank_timeout=5.0",
    ]
    assert options.overrides(None) == []


def test_the_examples_in_the_docstrings_are_true():
    assert doctest.testmod(options).failed == 0
