"""Options that several commands share, and options with a fixed set of words."""

import doctest

import pytest
from typer.testing import CliRunner

from unheard.cli import options
from unheard.cli.main import app


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
    ],
)
def test_an_unknown_word_is_refused_with_the_known_ones(words):
    done = CliRunner().invoke(app, [*words, "nonsense"])
    assert done.exit_code == 2
    assert f"Invalid value for '{words[-1]}'" in done.output
    assert "nonsense" in done.output


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
