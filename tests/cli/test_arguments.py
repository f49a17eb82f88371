"""What a command passes to the library: every argument of the call, with the shortest command line and with each option."""

import contextlib
import importlib
import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import unheard
from tests.cli.test_option_values import Asked, as_text, changes, options_of, values
from tests.conftest import CLIP_NORM
from unheard.cli.main import app
from unheard.corpus.store import write_store
from unheard.corpus.vocabulary import Vocabulary
from unheard.errors import InvalidValue
from unheard.models.recurrent import TiedLSTM
from unheard.privacy.ledger import Ledger
from unheard.training.run import run_toml


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command line, the call that it makes, and what each further option changes in the arguments of the call.

    Attributes:
        line: The shortest command line.
        calls: The function of the library.
        given: The arguments with the shortest line. Objects that the test does not make are left out.
        options: Words to add to the line, and the arguments that they change.
        elsewhere: The options that have no part in this call, or that other tests check.
        before: Functions that do nothing during the command, and what they return.
    """

    line: str
    calls: str
    given: dict[str, Any]
    options: dict[str, dict[str, Any]]
    elsewhere: str = ""
    before: dict[str, Any] = field(default_factory=dict)


DEFAULT_COST = {"gpus": 1, "efficiency": 1.0, "gpu_hour_price": None}
PLAN = "plan --users 1000"
MACHINE = "--processes --log-file --trust-code"
OPENED = SimpleNamespace(run=SimpleNamespace(corpus="its/store", model=TiedLSTM(vocabulary_size=9)))
"""A released model of which a command reads no more than the store and the model."""
AUDITED = {
    "unheard.training.released.Released.open": OPENED,
    "unheard.training.initialise.build_engine": "the engine",
    "unheard.cli.audit.confirm_no_noise": True,
}
RUNS = {
    "unheard.cli.evaluate.full_measures_if_possible": None,
    "unheard.report.page.check_page_folder": None,
}
COMPARISON = {
    "--baseline b": {"baseline": "b"},
    "--as-if-users 7": {"options.as_if_users": 7},
    "--as-if-users-per-round 7": {"options.as_if_users_per_round": 7.0},
}
COMPARED = {"baseline": None} | dict.fromkeys(
    ("options.accuracy", "options.as_if_users", "options.as_if_users_per_round")
)
READ = {**RUNS, "unheard.report.comparison.Comparison.read": "the comparison"}

COMMANDS = {
    "init": Command(
        line="init --population 1000",
        calls="unheard.training.new_run_file.new_run_file",
        given={
            "name": "run.toml",
            "corpus": "corpora/chitchat",
            "population": 1000,
            "users_per_round": None,
            "rounds": 1000,
            "epsilon": None,
            "compares_noise": False,
            "base": None,
        },
        options={
            "other.toml": {"name": "other.toml"},
            "--corpus c": {"corpus": "c"},
            "--population 7": {"population": 7},
            "--users-per-round 7.5": {"users_per_round": 7.5},
            "--rounds 7": {"rounds": 7},
            "--epsilon 7.5": {"epsilon": 7.5},
            "--noise auto": {"compares_noise": True},
            "--base b": {"base": "b"},
        },
        elsewhere="--force --log-file",
    ),
    "evaluate": Command(
        line="evaluate r",
        calls="unheard.training.released.evaluate",
        given={"model": "r", "corpus": None, "max_tokens": None, "ranks": None},
        options={"--corpus c": {"corpus": "c"}, "--max-tokens 7": {"max_tokens": 7}},
        elsewhere=f"--full --json {MACHINE}",
    ),
    "evaluate --full": Command(
        line="evaluate r --full",
        calls="unheard.cli.evaluate.full_measures_of",
        given={"path": "r", "corpus": None, "max_tokens": None, "again": True, "ranks": None},
        options={"--corpus c": {"corpus": "c"}, "--max-tokens 7": {"max_tokens": 7}},
        elsewhere=f"--full --json {MACHINE}",
    ),
    "audit": Command(
        line="audit runs/r",
        calls="unheard.audit.summary.audit_run",
        given={
            "store": "its/store",
            "engine": "the engine",
            "name": "r",
            "canaries": None,
            "rounds": None,
            "candidates": 10_000,
            "with_users": False,
            "skip_one_run": False,
            "allow_no_privacy": False,
        },
        options={
            "--corpus c": {"store": "c"},
            "--canaries 7": {"canaries": 7},
            "--rounds 7": {"rounds": 7},
            "--candidates 700": {"candidates": 700},
            "--with-users": {"with_users": True, "allow_no_privacy": True},
            "--skip-one-run": {"skip_one_run": True},
        },
        elsewhere=f"--out --json --yes {MACHINE}",
        before=AUDITED,
    ),
    "audit's engine": Command(
        line="audit r",
        calls="unheard.training.initialise.build_engine",
        given={"choice": "EngineChoice", "choice.kind": "auto", "choice.device": "auto", "ranks": None},
        options={},
        before={"unheard.training.released.Released.open": OPENED},
    ),
    "canaries": Command(
        line="canaries words --out c.jsonl",
        calls="unheard.corpus.canaries.draw_canaries",
        given={"carriers": [0, 1, 14, 200], "each": 3, "words": 5, "repeats": 1},
        options={
            "--users 7 --users 8": {"carriers": [7, 8]},
            "--each 7": {"each": 7},
            "--words 7": {"words": 7},
            "--repeats 7": {"repeats": 7},
        },
        elsewhere="--out --log-file",
        before={"unheard.corpus.vocabulary.Vocabulary.load": "the words"},
    ),
    "corpus synth": Command(
        line="corpus synth --like l --users 30 --tokens-per-user 16 --out s",
        calls="unheard.corpus.synthetic.synthesise",
        given={
            "like": "the store",
            "out": "s",
            "users": 30,
            "tokens_per_user": 16,
            "held_out": None,
            "seed": 0,
            "workers": 0,
        },
        options={
            "--users 7": {"users": 7},
            "--tokens-per-user 7": {"tokens_per_user": 7},
            "--held-out 7": {"held_out": 7},
            "--seed 7": {"seed": 7},
            "--workers 7": {"workers": 7},
            "--out o": {"out": "o"},
        },
        elsewhere="--like --log-file",
        before={"unheard.corpus.store.TokenStore.open": "the store"},
    ),
    "corpus narrow": Command(
        line="corpus narrow s --vocab-size 9 --out n",
        calls="unheard.corpus.transform.shrink_vocabulary",
        given={"store": "the store", "out": "n", "vocabulary_size": 9},
        options={"--vocab-size 7": {"vocabulary_size": 7}, "--out o": {"out": "o"}},
        elsewhere="--log-file",
        before={"unheard.corpus.store.TokenStore.open": "the store"},
    ),
    "corpus part": Command(
        line="corpus part s --part 2/8 --out p",
        calls="unheard.corpus.transform.split_store",
        given={"store": "the store", "out": "p", "part": 2, "of": 8},
        options={"--part 3/7": {"part": 3, "of": 7}, "--out o": {"out": "o"}},
        elsewhere="--log-file",
        before={"unheard.corpus.store.TokenStore.open": "the store"},
    ),
    "benchmark": Command(
        line="benchmark",
        calls="unheard.performance.benchmark.run_benchmark",
        given={
            "model": "TiedLSTM",
            "model.vocabulary_size": 10_000,
            "choice.device": "auto",
            "choice.kind": "auto",
            "settings.engines": ("stacked", "vectorised"),
            "settings.precisions": None,
            "settings.users": None,
            "settings.rounds": None,
            "settings.short": None,
            "settings.runs": None,
            "settings.noise": "GaussianNoise",
            "settings.noise.noise_multiplier": 1.0,
        },
        options={
            "--engine reference": {"settings.engines": ["reference"]},
            "--precision bfloat16": {"settings.precisions": ["bfloat16"]},
            "--users 7": {"settings.users": [7]},
            "--rounds 7": {"settings.rounds": [7]},
            "--short 7": {"settings.short": [7]},
            "--runs 7": {"settings.runs": 7},
            "--noise none": {"settings.noise": "NoNoise", "settings.noise.noise_multiplier": None},
            "--device cpu": {"choice.device": "cpu"},
            "--model small.toml": {"model.vocabulary_size": 50, "model.embedding_size": 6, "model.hidden_size": 8},
        },
        elsewhere="--json --log-file --trust-code",
    ),
    "export": Command(
        line="export runs/r",
        calls="unheard.deployment.export.export",
        given={"run": "runs/r", "out": "exports/r"},
        options={"--out o": {"out": "o"}},
        elsewhere="--to --license --log-file --trust-code",
    ),
    "export --to hub-folder": Command(
        line="export runs/r --to hub-folder",
        calls="unheard.deployment.hugging_face_export.write_hub_folder",
        given={"run": "runs/r", "out": "exports/r", "license": None},
        options={"--out o": {"out": "o"}, "--license mit": {"license": "mit"}},
        elsewhere="--to --log-file --trust-code",
    ),
    **{
        f"export --to {to}": Command(
            line=f"export runs/r --to {to}",
            calls="unheard.deployment.hugging_face_export.write_language_model",
            given={"run": "runs/r", "out": "exports/r", "to": to},
            options={"--out o": {"out": "o"}},
            elsewhere="--to --license --log-file --trust-code",
        )
        for to in ("adapter", "merged", "gguf")
    },
    "card": Command(
        line="card runs/r",
        calls="unheard.deployment.card.write_card",
        given={"run": "runs/r", "out": "runs/r/README.md", "license": None, "force": False},
        options={"--out o": {"out": "o"}, "--license mit": {"license": "mit"}, "--force": {"force": True}},
        elsewhere="--log-file",
    ),
    "keyboard's models": Command(
        line="keyboard r",
        calls="unheard.deployment.model.open_models",
        given={"paths": "['r']"},
        options={"q": {"paths": "['r', 'q']"}},
        elsewhere="--port --open --log-file --trust-code",
    ),
    "keyboard": Command(
        line="keyboard r",
        calls="unheard.deployment.keyboard.server.KeyboardServer",
        given={"suggesters": ["for a", "for b"], "port": 0},
        options={"--port 7": {"port": 7}},
        elsewhere="--open --log-file --trust-code",
        before={
            "unheard.deployment.model.open_models": ["a", "b"],
            "unheard.deployment.keyboard.suggestions.suggester_for": lambda model: f"for {model}",
        },
    ),
    "personalize": Command(
        line="personalize r --text mine.txt --out o",
        calls="unheard.deployment.personalize.personalize",
        given={
            "released": "the model of r",
            "text": "my words",
            "settings.passes": 5,
            "settings.learning_rate": None,
            "settings.later": 0.2,
        },
        options={
            "--passes 7": {"settings.passes": 7},
            "--learning-rate 0.7": {"settings.learning_rate": 0.7},
            "--later 0.4": {"settings.later": 0.4},
        },
        elsewhere="--text --out --log-file --trust-code",
        before={
            "unheard.training.released.Released.open": lambda path: f"the model of {path}",
            "unheard.deployment.personalize.check_output_folder": None,
        },
    ),
    "save of personalize": Command(
        line="personalize r --text mine.txt --out o",
        calls="unheard.deployment.personalize.save_personal",
        given={"released": "the model of r", "result": "learned", "statement": "of r", "out": "o"},
        options={"--out p": {"out": "p"}},
        elsewhere="--text --passes --learning-rate --later --log-file --trust-code",
        before={
            "unheard.training.released.Released.open": lambda path: f"the model of {path}",
            "unheard.deployment.personalize.check_output_folder": None,
            "unheard.deployment.personalize.personalize": "learned",
            "unheard.run_folder.RunFolder.open": lambda path: path,
            "unheard.deployment.model.run_statement": lambda folder: f"of {folder}",
        },
    ),
    "report's runs": Command(
        line="report a b --out o",
        calls="unheard.report.comparison.Comparison.read",
        given={"paths": "['a', 'b']", **COMPARED},
        options=COMPARISON,
        elsewhere="--out --title --prompt --no-measure --force --log-file --trust-code",
        before=RUNS,
    ),
    "report": Command(
        line="report a --out o",
        calls="unheard.report.page.write_page",
        given={"compared": "the comparison", "out": "o", "title": None, "force": False},
        options={"--title t": {"title": "t"}, "--force": {"force": True}, "--out p": {"out": "p"}},
        elsewhere="--baseline --as-if-users --as-if-users-per-round --prompt --no-measure --log-file --trust-code",
        before=READ,
    ),
    "report's check": Command(
        line="report a --out o",
        calls="unheard.report.page.check_page_folder",
        given={"out": "o", "force": False},
        options={"--force": {"force": True}, "--out p": {"out": "p"}},
    ),
    "compare's runs": Command(
        line="compare a b",
        calls="unheard.report.comparison.Comparison.read",
        given={"paths": "['a', 'b']", **COMPARED},
        options={**COMPARISON, "--accuracy 0.25": {"options.accuracy": 0.25}},
        elsewhere="--html --png --json --prompt --no-measure --force --log-file --trust-code",
        before=RUNS,
    ),
    "compare --html": Command(
        line="compare a --html h",
        calls="unheard.report.page.write_page",
        given={"compared": "the comparison", "out": "h", "force": False},
        options={"--force": {"force": True}, "--html g": {"out": "g"}},
        before={**READ, "unheard.cli.report._print_comparison": None},
    ),
    "compare's check": Command(
        line="compare a --html h",
        calls="unheard.report.page.check_page_folder",
        given={"out": "h", "force": False},
        options={"--force": {"force": True}, "--html g": {"out": "g"}},
    ),
    "compare --png": Command(
        line="compare a --png p",
        calls="unheard.report.plots.write_images",
        given={"compared": "the comparison", "out": "p"},
        options={"--png q": {"out": "q"}},
        before={**READ, "unheard.cli.report._print_comparison": None},
    ),
    **{
        f"the measures of {name}": Command(
            line=line,
            calls="unheard.cli.evaluate.full_measures_if_possible",
            given={"path": "a", "prompts": None},
            options={"--prompt x --prompt y": {"prompts": ["x", "y"]}},
            before={"unheard.report.page.check_page_folder": None},
        )
        for name, line in (("report", "report a --out o"), ("compare", "compare a"))
    },
    "base": Command(
        line="base smollm2",
        calls="unheard.models.base.get_base",
        given={"name": "smollm2", "out": "base", "wheel": None},
        options={"--out o": {"out": "o"}, "--wheel w": {"wheel": "w"}},
        elsewhere="--log-file",
    ),
    "plan that solves": Command(
        line=f"{PLAN} --epsilon 8 --rounds 10",
        calls="unheard.privacy.planner.plan",
        given={
            "users": 1000,
            "epsilon": 8.0,
            "users_per_round": None,
            "noise_multiplier": None,
            "rounds": 10,
            "delta": 1000**-1.1,
            "accountant": "best",
        },
        options={
            "--users 2000": {"users": 2000, "delta": 2000**-1.1},
            "--users-per-round 7": {"users_per_round": 7.0},
            "--noise-multiplier 0.75": {"noise_multiplier": 0.75},
            "--rounds 7": {"rounds": 7},
            "--epsilon 7": {"epsilon": 7.0},
            "--delta 1.25e-9": {"delta": 1.25e-9},
            "--accountant pld": {"accountant": "pld"},
        },
        elsewhere="--clip-norm --parameters --examples-per-user --compare-noise --cost --gpus --efficiency "
        "--gpu-hour-price --speed-from --json --log-file",
    ),
    "plan of what is feasible": Command(
        line=f"{PLAN} --epsilon 8",
        calls="unheard.privacy.planner.feasible_plans",
        given={
            "population": 1000,
            "epsilon": 8.0,
            "delta": 1000**-1.1,
            "clip_norm": 15.0,
            "parameters": 1_346_144,
        },
        options={
            "--users 2000": {"population": 2000, "delta": 2000**-1.1},
            "--epsilon 7": {"epsilon": 7.0},
            "--delta 1.25e-9": {"delta": 1.25e-9},
            "--clip-norm 7": {"clip_norm": 7.0},
            "--parameters 7": {"parameters": 7},
        },
    ),
    "plan that compares noise": Command(
        line=f"{PLAN} --epsilon 8 --users-per-round 10 --rounds 8 --compare-noise",
        calls="unheard.privacy.noise_choice.compare_noise",
        given={
            "population": 1000,
            "users_per_round": 10.0,
            "rounds": 8,
            "epsilon": 8.0,
            "delta": 1000**-1.1,
            "accountant": "best",
        },
        options={
            "--users 2000": {"population": 2000, "delta": 2000**-1.1},
            "--users-per-round 7": {"users_per_round": 7.0},
            "--rounds 7": {"rounds": 7},
            "--epsilon 7": {"epsilon": 7.0},
            "--delta 1.25e-9": {"delta": 1.25e-9},
            "--accountant rdp": {"accountant": "rdp"},
        },
    ),
    "plan that compares examples": Command(
        line=f"{PLAN} --noise-multiplier 1 --users-per-round 10 --rounds 8 --examples-per-user 4",
        calls="unheard.privacy.planner.compare_sampling",
        given={
            "estimate.population": 1000,
            "estimate.users_per_round": 10.0,
            "estimate.noise_multiplier": 1.0,
            "estimate.rounds": 8,
            "estimate.delta": 1000**-1.1,
            "examples_per_user": 4,
        },
        options={
            "--users 2000": {"estimate.population": 2000, "estimate.delta": 2000**-1.1},
            "--users-per-round 7": {"estimate.users_per_round": 7.0},
            "--noise-multiplier 0.75": {"estimate.noise_multiplier": 0.75},
            "--rounds 7": {"estimate.rounds": 7},
            "--delta 1.25e-9": {"estimate.delta": 1.25e-9},
            "--examples-per-user 7": {"examples_per_user": 7},
        },
    ),
    "plan --cost": Command(
        line=f"{PLAN} --noise-multiplier 1 --users-per-round 10 --rounds 8 --cost",
        calls="unheard.performance.estimate.costs_on_measured_machines",
        given={"speeds": ["measured"], "rounds": 8, "users_per_round": 10.0, **DEFAULT_COST},
        options={
            "--users-per-round 7": {"users_per_round": 7.0},
            "--rounds 7": {"rounds": 7},
            "--gpus 7": {"gpus": 7},
            "--efficiency 0.5": {"efficiency": 0.5},
            "--gpu-hour-price 7": {"gpu_hour_price": 7.0},
            "--speed-from speed.json": {"speeds": ["of speed.json"]},
        },
        before={
            "unheard.performance.estimate.measured_speeds": ["measured"],
            "unheard.performance.estimate.speeds_from": lambda path: [f"of {path}"],
        },
    ),
}
"""Commands whose call needs neither a run folder nor a store, or with the opening of these replaced."""


PLAIN = (str, int, float, Path, list, tuple, type(None))
"""The types of arguments that are compared; others are objects that the command makes."""


def place_of(path: str) -> tuple[Any, str]:
    """Return the module or the class that has a function of the library, and the name of the function in it."""
    *words, name = path.split(".")
    for end in range(len(words), 0, -1):
        with contextlib.suppress(ModuleNotFoundError):
            place = importlib.import_module(".".join(words[:end]))
            for word in words[end:]:
                place = getattr(place, word)
            return place, name
    raise LookupError(path)


@pytest.fixture
def call_of(tmp_path, monkeypatch) -> Callable[..., dict[str, Any]]:
    """Return a function that runs a command line and returns the arguments with which it calls the library."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.txt").write_text("my words")

    def call(command: Command, words: str = "") -> dict[str, Any]:
        place, name = place_of(command.calls)
        real, calls = getattr(place, name), []

        def stop(*positional, **named):
            calls.append(inspect.signature(real).bind(*positional, **named).arguments)
            raise Asked

        with monkeypatch.context() as patch:
            for path, result in command.before.items():
                instead = result if callable(result) else lambda *_, result=result, **__: result
                patch.setattr(*place_of(path), instead)
            patch.setattr(place, name, stop)
            with pytest.raises(Asked):
                CliRunner().invoke(app, f"{command.line} {words}".split(), catch_exceptions=False)
        found = dict(pair for key, value in calls[0].items() for pair in values(value, key))
        found = {key: value for key, value in found.items() if isinstance(value, PLAIN)}
        return {key: list(map(str, v)) if isinstance(v, list) and "path" in key else v for key, v in found.items()}

    return call


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_passes_each_option_on_as_one_argument_and_nothing_else(name, run, call_of):
    Path("small.toml").write_text(run_toml(run))
    command = COMMANDS[name]
    before = call_of(command)
    assert as_text({key: before.get(key) for key in command.given}) == as_text(command.given)
    for words, expected in command.options.items():
        assert as_text(changes(before, call_of(command, words))) == as_text(expected), words


def test_no_option_of_these_commands_is_left_out():
    """Every option is in a table above, or named as one that has no part in the call."""
    for name in {command.line.split()[0] for command in COMMANDS.values()} - {"corpus", "tune"}:
        own = [command for command in COMMANDS.values() if command.line.split()[0] == name]
        tried = {word for c in own for word in " ".join([*c.options, c.elsewhere]).split() if word.startswith("--")}
        assert tried == options_of(name), name


@pytest.fixture
def begun(run, store, tmp_path, monkeypatch) -> Path:
    """Return a folder with a run file and a run folder that has one charge less than it declared."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(run_toml(run, unheard.EngineChoice(users_at_once=3)))
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "run.toml").write_text(run_toml(run, unheard.EngineChoice(users_at_once=3)))
    Ledger.create(tmp_path / "r" / "ledger.jsonl", {"delta": 1e-5, "population": 60})
    return tmp_path


STEPS = {
    "train": ("unheard.training.loop.train", "unheard.cli.train.show_rounds"),
    "resume": ("unheard.training.loop.resume", "unheard.cli.train.show_rounds"),
    "sweep": ("unheard.training.loop.train_together", "unheard.cli.train.show_runs"),
}
LINES = {
    "train": "train run.toml --out r2",
    "resume": "resume r",
    "sweep": "sweep run.toml --out s --vary clip.norm=1,2.5",
}
BOTH = ("engine.kind", "engine.device", "engine.rank_timeout")
TRAINING = {
    "train": {
        "given": {
            "run.plan.clip.norm": CLIP_NORM,
            "run.training.rounds": 6,
            "out": "r2",
            "engine.users_at_once": 3,
            "on": None,
            "ranks": "the ranks",
            "again": False,
            "allow_no_privacy": False,
            "title": "r2",
            "stop_after": None,
            "folder": "r2",
            "track": None,
            "secure_aggregation": False,
            "nodes.on": "here",
            "nodes.supernodes": 10,
        },
        "options": {
            "--set clip.norm=7": {"run.plan.clip.norm": 7.0},
            "--set clip.norm=7 --set training.rounds=7": {"run.plan.clip.norm": 7.0, "run.training.rounds": 7},
            "--set engine.kind=stacked": {"engine.kind": "stacked"},
            "--set engine.kind=stacked --engine reference": {"engine.kind": "reference"},
            "--out o/q": {"out": "o/q", "folder": "o/q", "title": "q"},
            "--secure-aggregation": {"engine.secure_aggregation": True, "secure_aggregation": True},
        },
    },
    "resume": {
        "given": {
            "out": "r",
            "engine.users_at_once": 3,
            "on": None,
            "rounds": None,
            "corpus": None,
            "ranks": "the ranks",
            "allow_no_privacy": False,
            "new_noise": False,
            "title": "r",
            "stop_after": None,
            "folder": "r",
            "track": None,
            "nodes.on": "here",
            "nodes.supernodes": 10,
        },
        "options": {
            "--rounds 7": {"rounds": 7},
            "--corpus c": {"corpus": "c", "run.corpus": "c"},
            "--new-noise": {"new_noise": True},
        },
    },
    "sweep": {
        "given": {
            "ranks": "the ranks",
            "allow_no_privacy": False,
            "names": ["norm=1", "norm=2.5"],
            "stop_after": None,
            "engine.users_at_once": 3,
        },
        "options": {
            "--set clip.norm=7": {},  # --vary is applied after --set
            "--set training.rounds=7": {"runs.0.training.rounds": 7, "runs.1.training.rounds": 7},
        },
    },
}
ALL = {
    "--engine reference": {"engine.kind": "reference"},
    "--device cpu": {"engine.device": "cpu"},
    "--rank-timeout 7": {"engine.rank_timeout": 7.0},
    "--stop-after 7": {"stop_after": 7.0},
}
ONE = {
    "--track mlflow --track tensorboard": {"track": ["mlflow", "tensorboard"], "checked": ["mlflow", "tensorboard"]},
    "--on flower --supernodes 7": {"nodes.on": "flower", "nodes.supernodes": 7, "on": "the nodes"},
}


@pytest.mark.parametrize("name", LINES)
def test_a_command_that_trains_passes_each_option_to_the_loop_the_nodes_and_the_display(name, begun, monkeypatch):
    """The processes, the nodes and the display of the rounds get what was given, and the loop gets what these return."""
    found: dict[str, Any] = {}

    def record(function: str, result: Any) -> Callable[..., Any]:
        real = getattr(*place_of(function))

        def instead(*positional, **named):
            for key, value in inspect.signature(real).bind(*positional, **named).arguments.items():
                if key == "runs":
                    found.update({f"runs.{i}": str(out) for i, (_, out) in enumerate(value)})
                    value = [one for one, _ in value]
                found.update(values(value, key) if key != "run" or function != "unheard.cli.train.nodes_of" else ())
                if key == "run":
                    found["run.corpus"] = str(value.corpus)
                if key == "on" and value is not None:
                    found["on"] = value
            return result

        return instead

    take_nodes = record("unheard.cli.train.nodes_of", None)

    @contextlib.contextmanager
    def nodes(nodes, *given):
        take_nodes(nodes, *given)
        yield "the nodes" if nodes.on == "flower" else None

    trains, shows = STEPS[name]
    monkeypatch.setattr(*place_of(trains), record(trains, iter(())))
    monkeypatch.setattr(*place_of(shows), record(shows, {}))
    monkeypatch.setattr("unheard.cli.train.nodes_of", nodes)
    monkeypatch.setattr("unheard.cli.train._print_result", lambda *_: None)
    monkeypatch.setattr("unheard.cli.train._print_results", lambda *_: None)
    monkeypatch.setattr("unheard.cli.train.confirm_longer", lambda *_, **__: None)
    monkeypatch.setattr("unheard.training.checkpoint.newest_checkpoint", lambda _: SimpleNamespace(state=FIRST))
    monkeypatch.setattr(
        "unheard.report.tracking.Tracking.check", lambda tracking: found.update(checked=list(tracking.kinds))
    )
    started: list[tuple[int, int]] = []
    monkeypatch.setattr(
        "unheard.cli.train.run_on_processes",
        lambda work, *counts: (started.append(counts), work("the ranks")),  # type: ignore[arg-type]
    )

    def told(words: str = "") -> dict[str, Any]:
        found.clear()
        done = CliRunner().invoke(app, f"{LINES[name]} {words}".split())
        assert done.exit_code == 0, done.output
        return {key: value for key, value in found.items() if not key.startswith("choice")}

    before, table = told(), TRAINING[name]
    assert as_text({key: before.get(key) for key in table["given"]}) == as_text(table["given"])
    for words, expected in {**table["options"], **ALL, **(ONE if name != "sweep" else {})}.items():
        assert as_text(changes(before, told(words))) == as_text(expected), words
    started.clear()
    told("--processes 3 --max-restarts 2")
    told()
    assert started == [(3, 2), (1, 0)]
    if name == "sweep":
        assert [before[f"runs.{i}.plan.clip.norm"] for i in (0, 1)] == [1.0, 2.5]


FIRST = SimpleNamespace(round=0)


@pytest.mark.parametrize("name", LINES)
@pytest.mark.parametrize("permission", [False, True])
def test_a_command_that_trains_passes_on_the_permission_that_was_asked_for_each_run(
    name, permission, begun, monkeypatch
):
    """A rank of a launcher has no terminal to ask on."""
    asked, allowed = [], []

    def confirm(runs, yes, *, can_ask=True):
        asked.append((len(runs), yes, can_ask))
        return permission

    def train(*_, allow_no_privacy, **__):
        allowed.append(allow_no_privacy)
        return iter(())

    monkeypatch.setattr("unheard.cli.train.confirm_no_noise", confirm)
    monkeypatch.setattr(*place_of(STEPS[name][0]), train)
    monkeypatch.setattr(*place_of(STEPS[name][1]), lambda *_, **__: {})
    monkeypatch.setattr("unheard.cli.train._print_result", lambda *_: None)
    monkeypatch.setattr("unheard.cli.train._print_results", lambda *_: None)
    for ranks in (None, "the ranks"):
        monkeypatch.setattr("unheard.cli.train.run_on_processes", lambda work, *_, ranks=ranks: work(ranks))
        for words in ("", "--yes"):
            assert CliRunner().invoke(app, f"{LINES[name]} {words}".split()).exit_code == 0
    runs = 2 if name == "sweep" else 1
    assert asked == [(runs, yes, can_ask) for can_ask in (True, False) for yes in (False, True)]
    assert allowed == [permission] * 4


@pytest.mark.parametrize("restarts", [None, "0", "1"])
def test_train_continues_a_folder_only_after_a_restart_of_its_processes(restarts, begun, monkeypatch):
    again = []

    def train(*_, **named):
        again.append(named["again"])
        return iter(())

    monkeypatch.setattr("unheard.training.loop.train", train)
    monkeypatch.setattr("unheard.cli.train.show_rounds", lambda *_, **__: None)
    if restarts:
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
    done = CliRunner().invoke(app, ["train", "run.toml", "--out", "r"])
    assert again == ([True] if restarts == "1" else [])
    assert (done.exit_code == 0) is (restarts == "1")


@pytest.mark.parametrize("line", ["train run.toml --out q", "resume r"])
def test_trackers_are_checked_before_a_run_is_read(line, begun, monkeypatch):
    def refuse(_):
        raise InvalidValue("no such tracker")

    monkeypatch.setattr("unheard.report.tracking.Tracking.check", refuse)
    monkeypatch.setattr("unheard.training.run.run_from_tables", lambda *_, **__: pytest.fail("read"))
    assert "no such tracker" in str(CliRunner().invoke(app, [*line.split(), "--track", "mlflow"]).exception)


@pytest.mark.parametrize(("line", "counts"), [("evaluate r", (3,)), ("audit r", (3,))])
def test_a_command_that_measures_shares_its_work_among_the_processes_that_were_asked_for(line, counts, monkeypatch):
    """The ranks that a launcher has started reach the function that computes."""
    started, got = [], []

    def compute(*given, ranks=None, **_):
        got.append(ranks or given[-1])
        raise Asked

    module = f"unheard.cli.{line.split()[0]}"
    monkeypatch.setattr(f"{module}.run_on_processes", lambda work, *counts: (started.append(counts), work("the ranks")))
    monkeypatch.setattr("unheard.training.released.Released.open", lambda _: OPENED)
    for path in ("training.released.evaluate", "cli.evaluate.full_measures_of", "training.initialise.build_engine"):
        monkeypatch.setattr(*place_of(f"unheard.{path}"), compute)
    for words in (["--full"], []) if "evaluate" in line else ([],):
        with pytest.raises(Asked):
            CliRunner().invoke(app, [*line.split(), *words, "--processes", "3"], catch_exceptions=False)
    assert set(got) == {"the ranks"}
    assert set(started) == {counts}


def test_an_audit_is_written_where_and_under_the_name_that_was_given(tmp_path, monkeypatch):
    written = []
    result = SimpleNamespace(
        holds=True, exposures=[], record=lambda: {"verdict": []}, write=lambda *given: written.append(given)
    )
    for path, instead in {**AUDITED, "unheard.audit.summary.audit_run": result}.items():
        monkeypatch.setattr(*place_of(path), lambda *_, instead=instead, **__: instead)
    for words in ([], ["--out", str(tmp_path / "elsewhere" / "deep")]):
        assert CliRunner().invoke(app, ["audit", str(tmp_path / "r"), *words]).exit_code == 0
    assert written == [(tmp_path / "r" / "audit", "r"), (tmp_path / "elsewhere" / "deep", "r")]


def test_no_more_phrases_are_drawn_than_a_store_has_users_to_carry_them(tmp_path):
    """Each phrase of each group has carriers of its own: 2 + 1 users in each of two rounds are six of six users."""
    users = [[0, 3, 1]] * 6
    words = Vocabulary.of([a + b for a in "abcdefgh" for b in "klmnop"])
    arrays = [np.array(user) for user in users]
    store = write_store(tmp_path / "store", train=arrays, held_out=arrays[:1], vocabulary=words)
    line = ["canaries", str(store.path), "--users", "2", "--users", "1", "--out", str(tmp_path / "c.jsonl")]
    refused = CliRunner().invoke(app, [*line, "--each", "3"])
    assert "9 users would carry" in str(refused.exception)
    assert CliRunner().invoke(app, [*line, "--each", "2"], catch_exceptions=False).exit_code == 0
    drawn = [json.loads(each) for each in (tmp_path / "c.jsonl").read_text().splitlines()]
    assert sorted(one["users"] for one in drawn) == [1, 1, 2, 2]


class FakeStages:
    """Stages of a sweep that train nothing and end with a result."""

    def __init__(self, result: Any) -> None:
        self.result = result
        self.shown: list[tuple[list[str], float | None]] = []

    def __call__(self, run, grid, allowance, out, choice):
        self.given = (run, grid, allowance, out, choice)
        trial = SimpleNamespace(name="S = 1", seed=4, run=run)
        yield SimpleNamespace(title="first", left=[trial], reports=lambda: iter(()))
        yield SimpleNamespace(title="second", left=[trial], reports=lambda: iter(()))
        return self.result


@pytest.mark.parametrize("is_proxy", [False, True])
@pytest.mark.parametrize("refusal", [None, "too few users"])
def test_tune_concludes_for_the_private_run_from_the_trials_on_the_proxy(
    run, store, tmp_path, monkeypatch, is_proxy, refusal
):
    """The trials have the proxy's store and population, the plan has the run's. A refusal ends the command with it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(run_toml(run))
    stages, concluded = FakeStages("the result"), {}
    conclude = getattr(*place_of("unheard.tuning.output.conclude"))

    def end(*positional, **named):
        concluded.update(inspect.signature(conclude).bind(*positional, **named).arguments)
        return SimpleNamespace(record={"plan": None}, refusal=refusal)

    clock = iter([100.0, 103.0, 111.0])
    monkeypatch.setattr("unheard.cli.tune.time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr("unheard.tuning.pipeline.run_stages", stages)
    monkeypatch.setattr("unheard.tuning.output.conclude", end)
    monkeypatch.setattr("unheard.tuning.output.check_can_be_private", lambda *given: concluded.update(checked=given))
    monkeypatch.setattr("unheard.tuning.pipeline.trial_run", lambda run, *given: replace_corpus(run, given))
    monkeypatch.setattr("unheard.cli.tune.show_runs", lambda _, *given: stages.shown.append(given))
    words = ["--corpus", "proxy", "--population", "77"] if is_proxy else []
    line = "tune run.toml --out t --yes --json --stop-after 10 --noise-multiplier 1.75 --allow-loss 0.75 --engine"
    done = CliRunner().invoke(app, [*line.split(), "reference", *words])
    assert str(done.exception) == refusal if refusal else done.exit_code == 0
    trained, grid, allowance, out, choice = stages.given
    assert trained.corpus == str((Path("proxy"), 77) if is_proxy else (None, None))
    assert concluded["run"].corpus == run.corpus
    assert (concluded["result"], concluded["noise_multiplier"], concluded["is_proxy"]) == ("the result", 1.75, is_proxy)
    assert concluded["allowance"] == allowance
    assert (concluded["out"], concluded["engine"]) == (out, choice)
    assert (str(out), choice.kind, allowance.loss) == ("t", "reference", 0.75)
    assert concluded["checked"] == (concluded["run"], grid, 1.75)
    assert stages.shown == [(["S = 1"], 7.0), (["S = 1"], 0.0)]  # 10 seconds for all stages together


def replace_corpus(run: unheard.Run, given: tuple) -> unheard.Run:
    """Return a run whose corpus is named after the arguments."""
    return replace(run, corpus=str(given))


@pytest.mark.parametrize("option", ["--vary clip.norm=1,2", "--trials 7", "--trials-from poisson"])
def test_an_option_of_a_selection_is_refused_for_a_sweep(option, begun):
    done = CliRunner().invoke(app, f"tune run.toml --out t --yes {option}".split())
    assert f"{option.split()[0]} has no meaning for a sweep" in str(done.exception)


@pytest.mark.parametrize(
    "option",
    [
        *("--corpus c", "--population 7", "--norms 1", "--noise-stds 1", "--users-per-round 7", "--rounds 7"),
        *("--seeds 7", "--allow-clip-loss 7", "--allow-loss 7", "--noise-multiplier 7", "--stop-after 7", "--yes"),
    ],
)
def test_an_option_of_a_sweep_is_refused_for_a_selection(option, begun):
    done = CliRunner().invoke(app, f"tune run.toml --out t --select --vary clip.norm=1,2 {option}".split())
    assert f"{option.split()[0]} has no meaning for --select" in str(done.exception)
