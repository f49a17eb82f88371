"""`unheard statement`: the ledger is all it needs, and it never writes to it."""

import json
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from unheard.cli import statement
from unheard.errors import LedgerError, RunFolderMissing
from unheard.privacy.events import PoissonGaussian
from unheard.privacy.ledger import Ledger

app = typer.Typer(rich_markup_mode="rich")
app.command(epilog=statement.EXAMPLES)(statement.statement)


@pytest.fixture
def folder(tmp_path):
    ledger = Ledger.create(tmp_path / "ledger.jsonl", {"population": 10_000, "delta": 1e-5})
    for number in range(3):
        ledger.charge(PoissonGaussian(sampling_prob=0.01, noise_multiplier=1), number)
    return tmp_path


def run(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def test_the_page_and_the_json_tell_the_same(folder):
    told = json.loads(run(folder, "--json").stdout)
    assert told["rounds"]["charged"] == 3
    assert told["claim"] in run(folder).stdout


def test_a_ledger_can_be_named_directly(folder):
    assert run(folder / "ledger.jsonl").stdout == run(folder).stdout


def test_another_point_can_be_asked_for(folder):
    told = json.loads(run(folder, "--delta", "1e-8", "--epsilon", "0.5", "--json").stdout)
    assert told["delta"] == 1e-8
    assert told["asked"]["epsilon"] == 0.5


def test_a_torn_ledger_is_read_and_left_as_it_is(folder):
    path = folder / "ledger.jsonl"
    path.write_bytes(path.read_bytes()[:-10])
    before = path.read_bytes()
    assert json.loads(run(folder, "--json").stdout)["rounds"]["charged"] == 2
    assert path.read_bytes() == before


def test_an_edited_ledger_is_refused(folder):
    path = folder / "ledger.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"round":1', b'"round":7'))
    assert isinstance(run(folder).exception, LedgerError)


def test_a_folder_without_a_ledger_is_refused(tmp_path):
    for where in (tmp_path, tmp_path / "nowhere"):
        refusal = run(where).exception
        assert isinstance(refusal, RunFolderMissing)
        assert "unheard train" in str(refusal)


def test_neither_plan_nor_statement_imports_torch(folder):
    code = (
        "import sys, unheard.cli.plan as p, unheard.cli.statement as s; from pathlib import Path\n"
        f"s.statement(Path({str(folder)!r})); p.plan(users=1000, users_per_round=10, noise_multiplier=1, rounds=5)\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, check=False).returncode == 0
