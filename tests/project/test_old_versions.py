"""A store, a run file and a run folder that version 0.1.0 wrote keep working.

`tests/data/version-0.1.0` holds what that version made of 300 random posts of 60 users: `unheard prepare`, `unheard init`
(with a small model), `unheard train` (4 rounds, a reproducible seed) and `unheard evaluate --full`.
"""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

import unheard
from unheard.audit.verification import verify
from unheard.cli.main import app
from unheard.training.run import read_run_file

DATA = Path(__file__).parents[1] / "data" / "version-0.1.0"


@pytest.fixture
def old(tmp_path: Path) -> Path:
    shutil.copytree(DATA, tmp_path / "old")
    return tmp_path / "old"


def invoke(*words: str | Path) -> str:
    done = CliRunner().invoke(app, [*map(str, words)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_a_store_of_version_0_1_opens(old):
    store = unheard.TokenStore.open(old / "store")
    assert (store.train.num_users, store.held_out.num_users, len(store.vocabulary)) == (52, 8, 13)
    assert "52" in invoke("corpus", "show", old / "store")


def test_a_run_file_of_version_0_1_is_read(old):
    run, _ = read_run_file(old / "run-file.toml")
    assert run.training.reproducible_seed == 5
    assert run.plan.clip == unheard.FlatClip(norm=2.0)


def test_the_released_model_predicts(old):
    assert len(unheard.Released.open(old / "run").predict("red green", top=3)) == 3


def test_the_statement_is_the_same(old):
    written = json.loads((old / "run" / "statement.json").read_text())
    stated = json.loads(invoke("statement", old / "run", "--json"))
    assert stated["epsilon"] == pytest.approx(written["epsilon"], rel=1e-5)
    assert stated["claimed"]["epsilon"] == pytest.approx(written["claimed"]["epsilon"], rel=1e-5)


def test_the_run_folder_fits_together(old):
    assert "Everything that was checked fits" in invoke("verify", old / "run", "--corpus", old / "store")


@pytest.mark.parametrize("key", ["replace_one", "claimed", "epsilon"])
def test_an_old_statement_with_a_smaller_epsilon_is_noticed(old, key):
    file = old / "run" / "statement.json"
    saved = json.loads(file.read_text())
    smaller = {name: 0.5 if isinstance(value, float) else value for name, value in saved[key].items()}
    file.write_text(json.dumps({**saved, key: smaller}))
    found = {finding.name: finding.words for finding in verify(old / "run", old / "store") if finding.fits is False}
    assert list(found) == ["statement"]
    assert key in found["statement"]


def test_a_run_of_version_0_1_resumes(old):
    reports = list(unheard.resume(old / "run", rounds=6, corpus=old / "store"))
    assert [report.round for report in reports] == [5, 6]
    before = json.loads((DATA / "run" / "statement.json").read_text())["epsilon"]["rdp"]
    assert reports[-1].epsilon > before
