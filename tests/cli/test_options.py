"""Options that several commands share, and options with a fixed set of values."""

import dataclasses
import doctest
from typing import Annotated, get_args, get_type_hints

import pytest
import typer
from typer.testing import CliRunner

from unheard.cli import options, plan, statement, train
from unheard.cli.main import app, as_typer_command
from unheard.engines.choice import ENGINES
from unheard.mechanism.clipping import FlatClip
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
    formats = get_type_hints(statement.StatementOptions, include_extras=True)["format"]
    assert get_args(get_args(formats)[0]) == FORMATS
    accountants = get_type_hints(plan.RunOptions, include_extras=True)["accountant"]
    assert set(get_args(get_args(accountants)[0])) == {"best", *ACCOUNTANTS}


def test_options_of_the_machine_replace_keys_of_the_run_file(tmp_path):
    run_file = tmp_path / "run.toml"
    assert CliRunner().invoke(app, ["init", str(run_file), "--population", "1000"]).exit_code == 0
    engine = options.EngineOptions(engine="stacked", device="cpu")
    processes = options.ProcessOptions(rank_timeout=5.0)
    run, choice = train.read_run(run_file, ["clip.norm=3"], engine, processes)
    assert run.plan.clip == FlatClip(norm=3.0)
    assert (choice.kind, choice.device, choice.rank_timeout) == ("stacked", "cpu", 5.0)
    run, choice = train.read_run(run_file)
    assert run.plan.clip == FlatClip(norm=15.0)
    assert (choice.kind, choice.device) == ("auto", "auto")


def test_a_group_becomes_options_and_reaches_the_command():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Group:
        needed: Annotated[int, typer.Option(help="A number.")]
        word: Annotated[str, typer.Option(help="A word.")] = "default"

    received = []

    def command(first: Annotated[str, typer.Argument(help="An argument.")], *, group: Group) -> None:
        """Do something."""
        received.append((first, group))

    typer_app = typer.Typer()
    typer_app.command()(as_typer_command(command))
    assert CliRunner().invoke(typer_app, ["a", "--needed", "3"]).exit_code == 0
    assert received == [("a", Group(needed=3, word="default"))]
    assert CliRunner().invoke(typer_app, ["a"]).exit_code == 2  # a field without a default is a required option


def test_the_examples_in_the_docstrings_are_true():
    assert doctest.testmod(train).failed == 0
