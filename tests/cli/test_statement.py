"""`unheard statement` needs only the ledger, and never writes to it."""

import json
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

import unheard
from unheard.cli import statement
from unheard.cli.main import as_typer_command
from unheard.corpus.private_vocabulary import WordRelease
from unheard.errors import InvalidValue, LedgerError, RunFolderError, RunFolderMissing
from unheard.privacy.events import PoissonGaussian, to_record
from unheard.privacy.ledger import Ledger, run_id
from unheard.privacy.statement import ALONE

app = typer.Typer(rich_markup_mode="rich")
app.command(epilog=statement.STATEMENT_EXAMPLES)(as_typer_command(statement.statement))


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


def test_a_copy_of_a_ledger_is_said_to_be_read_alone_also_in_a_whole_run_folder(store, model, plan, tmp_path):
    training, run_folder = unheard.Training(rounds=1), tmp_path / "r"
    list(unheard.train(unheard.Run(corpus=store.path, model=model, plan=plan, training=training), run_folder))
    (run_folder / "copy.jsonl").write_bytes((run_folder / "ledger.jsonl").read_bytes())
    for name, is_alone in (("ledger.jsonl", False), ("copy.jsonl", True)):
        warnings = json.loads(run(run_folder / name, "--json").stdout)["warnings"]
        assert (ALONE in warnings) == is_alone


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


@pytest.mark.system
def test_neither_plan_nor_statement_imports_torch(folder):
    code = (
        "import sys; from unheard.cli.main import app\n"
        f"app(['statement', {str(folder)!r}], standalone_mode=False)\n"
        "plan = 'plan --users 1000 --users-per-round 10 --noise-multiplier 1 --rounds 5'\n"
        "app(plan.split(), standalone_mode=False)\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, check=False).returncode == 0


def test_a_format_can_be_chosen_and_has_a_json_form(folder):
    assert run(folder, "--format", "text").stdout == run(folder).stdout
    assert run(folder, "--format", "report").stdout.startswith("## Privacy report")
    assert "### Data collection exposure" in run(folder, "--format", "nist").stdout
    entry = run(folder, "--format", "registry").stdout
    assert json.loads(entry)["deployment"]["privacy_loss"]["privacy_unit"] == "user"
    assert run(folder, "--format", "registry", "--json").stdout == entry
    told = json.loads(run(folder, "--format", "report", "--json").stdout)
    assert told["ledger"] == {"charges": 3, "head": Ledger.read(folder / "ledger.jsonl").head}
    assert run(folder, "--format", "pdf").exit_code == 2


@pytest.mark.parametrize("name", ["run.toml", "metrics.jsonl", "statement.json", "vocabulary.txt"])
def test_a_run_folder_without_its_checkpoints_is_refused(folder, name):
    """Without checkpoints nothing shows whether the ledger was shortened. A ledger file on its own is accepted."""
    (folder / name).write_text("")
    assert isinstance(run(folder).exception, LedgerError)


@pytest.mark.parametrize("form", ["report", "nist", "registry"])
def test_a_report_has_the_audit_of_its_own_run_and_no_other(folder, form):
    """If an audit has refuted a claim, the report of the claim includes the audit."""
    ledger = Ledger.read(folder / "ledger.jsonl")
    refuted = {"canaries": 4000, "rounds": 100, "epsilon_at_least": 7.31, "confidence": 0.95, "epsilon_claimed": 4.0}
    record = {"run": run_id(ledger), "one_run": {**refuted, "delta": 1e-6, "holds": False}}
    (folder / "audit").mkdir()
    (folder / "audit" / "audit.json").write_text(json.dumps(record))
    assert json.loads(run(folder, "--format", "report", "--json").stdout)["audit"]["holds"] is False
    assert "7.31" in run(folder, "--format", form).stdout
    (folder / "audit" / "audit.json").write_text(json.dumps({**record, "run": "another"}))
    assert isinstance(run(folder, "--format", form).exception, RunFolderError)


@pytest.mark.parametrize("asked", [("--format", "report"), ("--epsilon", "2")])
def test_a_format_and_an_epsilon_are_about_one_run(tmp_path, asked):
    from unheard.privacy.population_ledger import open_population_ledger

    open_population_ledger(tmp_path, "store", [], tmp_path / "ledger.jsonl")
    refusal = run(tmp_path, *asked, "--delta", "1e-6").exception
    assert isinstance(refusal, InvalidValue)
    assert "one run" in str(refusal)


def store_with(tmp_path, vocabulary):
    (tmp_path / "corpus.json").write_text(json.dumps({"format": 1, "vocabulary": vocabulary}))
    return tmp_path


def test_a_store_before_any_run_states_what_its_vocabulary_cost(tmp_path):
    release = WordRelease.for_budget(2.0, 1e-6, 10)
    events = [to_record(event) for event in release.events()]
    store = store_with(tmp_path, {"kind": "private", "epsilon": 2.0, "delta": 1e-6, "events": events})
    stated = json.loads(run(store, "--json").stdout)
    assert stated["delta"] == 1e-6
    assert stated["claimed"]["epsilon"] == pytest.approx(2.0, rel=1e-6)
    assert [charged_run["name"] for charged_run in stated["runs"]] == ["the private vocabulary"]
    text = run(store).stdout
    assert stated["claim"] in text
    assert "has no ledger yet" in text
    stricter = json.loads(run(store, "--delta", "1e-8", "--json").stdout)
    assert float(stricter["claimed"]["epsilon"]) > 2.1
    assert not (store / "ledger.jsonl").exists()


def test_a_store_with_a_public_vocabulary_has_cost_nothing(tmp_path):
    text = run(store_with(tmp_path, {"kind": "public"})).stdout
    assert "nothing was charged to the users of this store: its vocabulary (public) is public" in text
    assert "put it back" in text


def test_a_store_whose_cost_cannot_be_known_is_refused(tmp_path):
    (tmp_path / "corpus.json").write_text("{}")
    assert isinstance(run(tmp_path).exception, LedgerError)
    store_with(tmp_path, {"kind": "public"})
    (tmp_path / "part.json").write_text("{}")
    assert isinstance(run(tmp_path).exception, LedgerError)
