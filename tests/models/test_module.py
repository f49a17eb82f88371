"""Models from any torch module, given by name or as an object, and refused modules."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import unheard
from unheard.audit.verification import verify
from unheard.cli.main import app
from unheard.errors import InvalidValue, ModelError, UnprovenCombination
from unheard.models.module import no_code
from unheard.privacy.ledger import Ledger
from unheard.privacy.statement import compute_statement
from unheard.training.run import run_hash


class Scores(nn.Module):
    def __init__(self, rows: int = 5) -> None:
        super().__init__()
        self.words = nn.Embedding(rows, rows)

    def forward(self, tokens):
        return self.words(tokens)


def by_name(**changes) -> unheard.ModuleModel:
    return unheard.ModuleModel(**{"module": f"{__name__}:Scores", "vocabulary_size": 5, **changes})


def test_a_module_by_name_gives_its_own_logits():
    model = by_name()
    params_P = torch.arange(25.0)
    assert model.logits(model.layout.split(params_P), torch.tensor([[2]])).tolist() == [[[10, 11, 12, 13, 14]]]


def test_the_initialisation_of_a_module_follows_the_seed():
    model = by_name()
    assert torch.equal(model.initial(1), model.initial(1))
    assert not torch.equal(model.initial(1), model.initial(2))


def test_arguments_reach_the_class():
    assert by_name(arguments={"rows": 7}, vocabulary_size=7).layout.total == 49


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("no.such.place:Scores", "No module class"),
        (f"{__name__}:Missing", "No module class"),
        ("os:system", "not a torch.nn.Module"),
    ],
)
def test_what_is_not_a_module_class_is_never_called(module, message):
    with pytest.raises(ModelError, match=message):
        _ = by_name(module=module).layout


def test_a_module_without_parameters_is_refused():
    with pytest.raises(ModelError, match="nothing to train"):
        _ = unheard.ModuleModel(module="torch.nn:Identity", vocabulary_size=4).layout


def test_wrong_arguments_and_wrong_shapes_are_named():
    with pytest.raises(ModelError, match=r"model\.arguments"):
        _ = by_name(arguments={"columns": 1}).layout
    model = by_name(vocabulary_size=6)
    with pytest.raises(ModelError, match=r"was expected"):
        model.logits(model.layout.split(torch.zeros(25)), torch.tensor([[2]]))
    with pytest.raises(InvalidValue, match=r"package\.file:Class"):
        by_name(module="Scores")


def test_a_module_in_hand_begins_with_the_weights_that_it_has():
    mine = Scores()
    model = unheard.ModuleModel.wrap(mine, vocabulary_size=5)
    assert torch.equal(model.initial(0), mine.words.weight.detach().flatten())
    assert torch.equal(model.initial(1), model.initial(0))


class WithDropout(Scores):
    def forward(self, tokens):
        return nn.functional.dropout(self.words(tokens), 0.5, training=self.training)


def test_a_private_round_is_a_function_of_parameters_and_tokens_alone_so_dropout_is_off():
    model = unheard.ModuleModel.wrap(WithDropout(), vocabulary_size=5)
    params, tokens = model.layout.split(model.initial(0)), torch.arange(5).view(1, 5)
    assert torch.equal(model.logits(params, tokens), model.logits(params, tokens))


def test_a_module_in_the_working_folder_is_imported_only_if_it_is_trusted(tmp_path, monkeypatch):
    (tmp_path / "my_own_file.py").write_text(
        "from pathlib import Path\nfrom torch import nn\n\nPath('executed').touch()\n\n\nclass Mine(nn.Embedding):\n    pass\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")  # as in `python -m unheard` and in an interactive Python
    model = unheard.ModuleModel(
        module="my_own_file:Mine", arguments={"num_embeddings": 5, "embedding_dim": 5}, vocabulary_size=5
    )
    with pytest.raises(ModelError, match="--trust-code"):
        _ = model.layout
    assert not (tmp_path / "executed").exists()
    with unheard.trusted_code():
        assert model.layout.total == 25
    monkeypatch.delitem(sys.modules, "my_own_file")


def test_verify_imports_no_model(run, tmp_path):
    list(unheard.train(replace(run, model=named(Big)), tmp_path / "r"))
    before = {finding.name: finding.fits for finding in verify(tmp_path / "r")}
    assert set(before.values()) == {True}
    text = (tmp_path / "r" / "run.toml").read_text()
    (tmp_path / "r" / "run.toml").write_text(text.replace(f"{__name__}:Big", "antigravity_of_others:Big"))
    with no_code():
        for finding in verify(tmp_path / "r"):
            assert "No module class" not in finding.words


COMMANDS = [
    *(
        ["verify"],
        ["statement"],
        ["report"],
        ["evaluate"],
        ["predict", "w1"],
        ["resume", "--yes"],
        ["export", "--out", "e"],
    ),
    *(["keyboard", "--no-browser"], ["compare"], ["watch", "--once"], ["audit", "--yes"], ["personalize", "w.txt"]),
]


def test_no_command_executes_code_beside_a_run_folder(run, tmp_path, monkeypatch):
    """The run folder names a class in a file in the working folder."""
    list(unheard.train(replace(run, model=named(Big)), tmp_path / "r"))
    text = (tmp_path / "r" / "run.toml").read_text()
    (tmp_path / "r" / "run.toml").write_text(text.replace(f"{__name__}:Big", "of_others:Big"))
    (tmp_path / "of_others.py").write_text("open('executed', 'w').close()\n")
    (tmp_path / "w.txt").write_text("w1 w2\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    for command, *more in COMMANDS:
        CliRunner().invoke(app, [command, "r", *more])
        assert not (tmp_path / "executed").exists(), command
    (tmp_path / "r" / "model.safetensors").unlink()  # now only the class knows the shapes of the parameters
    with unheard.trusted_code():
        verify(tmp_path / "r")  # also not with --trust-code
        assert not (tmp_path / "executed").exists()
        with pytest.raises(ModelError, match="no attribute"):
            _ = replace(named(Big), module="of_others:Big").layout
    assert (tmp_path / "executed").exists()


@pytest.mark.parametrize("name", ["lazy_loader", "typer", "torch"])
def test_python_m_imports_nothing_from_the_working_folder(tmp_path, name):
    (tmp_path / f"{name}.py").write_text("raise SystemExit('executed')\n")
    done = subprocess.run(
        [sys.executable, "-m", "unheard", "--version"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(unheard.__file__).parents[1])},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, "executed" in done.stdout + done.stderr) == (0, False)


SECRET = torch.linspace(-1, 1, 50 * 50).view(50, 50)


class Big(Scores):
    """Draws all of its weights."""

    def __init__(self) -> None:
        super().__init__(50)
        self.norm, self.scale = nn.LayerNorm(50), nn.Parameter(torch.ones(50))


class LoadsParameter(Big):
    def __init__(self) -> None:
        super().__init__()
        self.secret = nn.Parameter(SECRET.clone())


class LoadsOneRow(Big):
    def __init__(self) -> None:
        super().__init__()
        self.secret = nn.Parameter(torch.cat([torch.randn(49, 50), SECRET[:1]]))


class LoadsBuffer(Big):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("tokens_of_somebody", torch.arange(50) * 7)


class LoadsAttribute(Big):
    def __init__(self) -> None:
        super().__init__()
        self.secret = SECRET.clone()


class Table(nn.Embedding):
    def reset_parameters(self) -> None:
        self.weight.data.copy_(SECRET)


class LoadsWhenReset(Big):
    def __init__(self) -> None:
        super().__init__()
        self.words = Table(50, 50)


class LoadsWithNoise(Big):
    def __init__(self) -> None:
        super().__init__()
        self.secret = nn.Parameter(SECRET + 0.3 * torch.randn(50, 50))


class LoadsTimesAFactor(Big):
    def __init__(self) -> None:
        super().__init__()
        self.secret = nn.Parameter(SECRET * (torch.rand(()) - 0.5))


LOADERS = [
    LoadsParameter,
    LoadsOneRow,
    LoadsBuffer,
    LoadsAttribute,
    LoadsWhenReset,
    LoadsWithNoise,
    LoadsTimesAFactor,
]


def named(kind: type, **changes) -> unheard.ModuleModel:
    return unheard.ModuleModel(module=f"{__name__}:{kind.__name__}", vocabulary_size=50, **changes)


@pytest.mark.parametrize(
    "model", [unheard.ModuleModel.wrap(Big(), vocabulary_size=50), *map(named, LOADERS)], ids=lambda m: m.module
)
def test_weights_that_are_not_drawn_from_the_seed_are_refused_with_noise(run, tmp_path, model):
    with pytest.raises(UnprovenCombination, match="weights_are_public = true"):
        unheard.train(replace(run, model=model), tmp_path / "r")
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    "model",
    [
        unheard.ModuleModel.wrap(Big(), vocabulary_size=50, weights_are_public=True),
        named(LoadsBuffer, weights_are_public=True),
    ],
    ids=lambda m: m.module,
)
def test_weights_declared_public_are_recorded_and_the_statement_repeats_the_declaration(run, tmp_path, model):
    list(unheard.train(replace(run, model=model), tmp_path / "r"))
    ledger = Ledger.read(tmp_path / "r" / "ledger.jsonl")
    start = ledger.facts["start"]
    assert start["base"] == "a model declared public"
    assert start["base_sha256"] == model.pinned().weights_sha256
    assert len(start["base_sha256"]) == 64
    assert any("declared public" in warning for warning in compute_statement(ledger.facts, ledger.entries)["warnings"])
    list(unheard.resume(tmp_path / "r", rounds=7))


def test_weights_that_are_drawn_need_no_declaration(run, tmp_path):
    list(unheard.train(replace(run, model=named(Big)), tmp_path / "r"))
    assert Ledger.read(tmp_path / "r" / "ledger.jsonl").facts["start"]["from"] == "seed 0"


def test_runs_from_other_weights_have_other_hashes(run):
    models = [unheard.ModuleModel.wrap(Big(), vocabulary_size=50).pinned() for _ in range(2)]
    assert len({run_hash(replace(run, model=model)) for model in models}) == 2
