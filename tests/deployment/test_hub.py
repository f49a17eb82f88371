"""The model card and the folder for the hub: front matter, the privacy statement, and no paths of this machine."""

import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import yaml
from safetensors import safe_open

import unheard
from tests.stores import uncharged_copy
from unheard.deployment import hugging_face_export
from unheard.deployment.card import model_card, write_card
from unheard.deployment.export import export
from unheard.deployment.hugging_face_export import write_hub_folder
from unheard.deployment.model import open_model, run_statement
from unheard.errors import InvalidValue, LedgerError, RunFolderError, UnprovenCombination
from unheard.formatting import percent
from unheard.privacy.ledger import Ledger, run_id
from unheard.privacy.population_ledger import PopulationLedger
from unheard.privacy.population_statement import all_runs
from unheard.privacy.statement_formats import markdown_line
from unheard.run_folder import RunFolder
from unheard.training.released import Released
from unheard.training.run import read_saved_run


@pytest.fixture(scope="module")
def card(run_folder) -> str:
    return model_card(run_folder, license="apache-2.0")


def test_the_card_has_front_matter_as_the_hub_reads_it(card, run_folder):
    _, front, body = card.split("---\n", 2)
    table = yaml.safe_load(front)
    assert table["library_name"] == "unheard"
    assert table["license"] == "apache-2.0"
    assert "differential-privacy" in table["tags"]
    (entry,) = table["model-index"]
    (result,) = entry["results"]
    values = {metric["name"]: metric["value"] for metric in result["metrics"]}
    assert set(values) == {"AccuracyTop1", "AccuracyTop3", "perplexity"}
    assert result["task"]["type"] == "text-generation"
    assert body.lstrip().startswith(f"# {run_folder.name}")


def test_the_card_has_the_privacy_statement_in_it(card, run_folder):
    claim = json.loads((run_folder / "statement.json").read_text())["claim"]
    assert card.count(claim) >= 2
    assert "## Privacy report" in card
    assert "### Accounting" in card


def test_the_card_states_what_all_runs_on_the_same_users_cost(run_folder, store, tmp_path):
    shutil.copytree(run_folder, tmp_path / "first")
    shutil.copytree(store.path, tmp_path / "store")
    file = tmp_path / "first" / "run.toml"
    file.write_text(file.read_text().replace(str(store.path), str(tmp_path / "store")))
    run, _ = read_saved_run(file)
    list(unheard.train(replace(run, training=unheard.Training(rounds=1)), tmp_path / "second"))
    total = all_runs(PopulationLedger.read(tmp_path / "store" / "ledger.jsonl"))["claim"]
    for name in ("first", "second"):
        assert f"Over all runs on the same users: {total}" in model_card(tmp_path / name)
    uncharged_copy(store.path, tmp_path / "other")
    list(unheard.train(replace(run, corpus=tmp_path / "other"), tmp_path / "alone"))
    assert "Over all runs" not in model_card(tmp_path / "alone")


def test_the_card_of_a_run_without_noise_claims_no_privacy(run_folder, store, tmp_path):
    uncharged_copy(store.path, tmp_path / "store")
    run, _ = read_saved_run(run_folder / "run.toml")
    plan = replace(run.plan, noise=unheard.NoNoise())
    plain = replace(run, corpus=tmp_path / "store", plan=plan, training=unheard.Training(rounds=1))
    list(unheard.train(plain, tmp_path / "plain", allow_no_privacy=True))
    card = model_card(tmp_path / "plain")
    assert "**without a privacy guarantee**" in card
    assert "trained with user-level" not in card
    assert "differential-privacy" not in yaml.safe_load(card.split("---\n", 2)[1])["tags"]


def test_a_seed_leaves_the_machine_with_no_card_and_no_hub_folder(run_folder, store, tmp_path):
    uncharged_copy(store.path, tmp_path / "store")
    run, _ = read_saved_run(run_folder / "run.toml")
    training = unheard.Training(rounds=1, reproducible_seed=987_654_321)
    list(unheard.train(replace(run, corpus=tmp_path / "store", training=training), tmp_path / "seeded"))
    write_hub_folder(tmp_path / "seeded", tmp_path / "hub")
    for path in (tmp_path / "hub").rglob("*"):
        assert not path.is_file() or b"987654321" not in path.read_bytes(), path.name
    assert RunFolder(tmp_path / "seeded").public_settings()["training.reproducible_seed"] == "set, and not shown"


def test_the_card_names_no_path_of_this_machine(card, store, run_folder):
    assert str(store.path) not in card
    assert str(run_folder.parent) not in card


def test_the_card_reads_as_one_with_the_hubs_own_library(card):
    hub = pytest.importorskip("huggingface_hub", reason="the extra `hf` is not installed")
    read = hub.ModelCard(card)
    assert read.data.eval_results[0].metric_name == "AccuracyTop1"
    assert read.data.pipeline_tag == "text-generation"


def test_a_card_is_not_overwritten_unless_asked(run_folder, tmp_path):
    (tmp_path / "README.md").write_text("mine")
    with pytest.raises(InvalidValue, match="--force"):
        write_card(run_folder, tmp_path / "README.md")
    assert write_card(run_folder, tmp_path / "README.md", force=True).read_text().startswith("---\n")


def test_a_hub_folder_is_whole_and_can_be_used(run_folder, tmp_path):
    pytest.importorskip("onnxruntime", reason="needs the extra `export`")
    names = write_hub_folder(run_folder, tmp_path / "hub")
    assert {path.name for path in (tmp_path / "hub").iterdir()} == set(names)
    assert {"README.md", "config.json", "model.safetensors", "statement.json", "vocabulary.txt", "model.onnx"} <= set(
        names
    )
    model = open_model(tmp_path / "hub")
    assert model.kind == "export"
    assert len(model.predict("w1", 3)) == 3
    config = json.loads((tmp_path / "hub" / "config.json").read_text())
    assert config["model"]["hidden_size"] == 8
    with safe_open(tmp_path / "hub" / "model.safetensors", framework="pt") as tensors:
        assert len(list(tensors.keys())) > 3
    everything = b"".join(path.read_bytes() for path in (tmp_path / "hub").iterdir())
    assert str(run_folder.parent).encode() not in everything
    with pytest.raises(InvalidValue, match="is not an empty folder"):
        write_hub_folder(run_folder, tmp_path / "hub")


def test_a_model_that_was_trained_further_during_the_export_does_not_get_an_older_statement(
    run_folder, tmp_path, monkeypatch
):
    monkeypatch.setattr(RunFolder, "model_digest", lambda _: "that of an earlier model")
    monkeypatch.setattr(hugging_face_export, "_device_files", lambda *_: {})
    with pytest.raises(RunFolderError, match="trained further"):
        write_hub_folder(run_folder, tmp_path / "hub")
    assert not (tmp_path / "hub").exists()


def test_nothing_that_goes_with_a_model_has_its_seed_or_a_path(store, model, plan, tmp_path, monkeypatch):
    """Anybody who knows the seed could subtract the noise."""
    pytest.importorskip("onnxruntime", reason="needs the extra `export`")
    monkeypatch.setattr("unheard.deployment.export.TEXTS", 1)  # compare one text with the model instead of 256
    training = unheard.Training(rounds=1, reproducible_seed=987654321)
    corpus = uncharged_copy(store.path, tmp_path / "secret-place")
    list(unheard.train(unheard.Run(corpus=corpus, model=model, plan=plan, training=training), tmp_path / "r"))
    export(tmp_path / "r", tmp_path / "exported")
    names = write_hub_folder(tmp_path / "r", tmp_path / "hub")
    assert set(names) == {
        *("README.md", "config.json", "model.safetensors", "vocabulary.txt", "tokens.json", "statement.json"),
        *("model.onnx", "model.int8.onnx", "export.json"),
    }
    written = [path.read_bytes() for place in ("exported", "hub") for path in (tmp_path / place).iterdir()]
    for content in (model_card(tmp_path / "r").encode(), *written):
        assert b"987654321" not in content
        assert b"secret-place" not in content
    # Both folders have the whole statement of the run, with its warnings.
    expected = json.loads(json.dumps(run_statement(RunFolder.open(tmp_path / "r"))))
    assert any("REPRODUCIBLE NOISE" in warning for warning in expected["warnings"])
    for place in ("exported", "hub"):
        assert json.loads((tmp_path / place / "statement.json").read_text()) == expected
        assert open_model(tmp_path / place).statement == expected
    for card in (model_card(tmp_path / "r"), (tmp_path / "hub" / "README.md").read_text()):
        assert all(markdown_line(warning[1:].rstrip(".")) in card for warning in expected["warnings"])


def test_a_card_says_why_there_is_no_total_and_has_the_audit_of_its_own_run(run_folder, tmp_path, monkeypatch):
    def no_total(population):
        raise UnprovenCombination("Several runs drew the same cohorts.")

    monkeypatch.setattr("unheard.deployment.card.other_runs", lambda *_: ["another"])
    monkeypatch.setattr("unheard.deployment.card.all_runs", no_total)
    assert "Over all runs on the same users: Several runs drew the same cohorts." in model_card(run_folder)
    shutil.copytree(run_folder, tmp_path / "r")
    (tmp_path / "r" / "audit").mkdir()
    one_run = {"canaries": 4, "rounds": 2, "epsilon_at_least": 7.31, "confidence": 0.95, "epsilon_claimed": 4.0}
    own = run_id(Ledger.read(run_folder / "ledger.jsonl"))
    record = {"run": own, "one_run": {**one_run, "delta": 1e-6, "holds": False}}
    (tmp_path / "r" / "audit" / "audit.json").write_text(json.dumps(record))
    assert "7.31" in model_card(tmp_path / "r")
    (tmp_path / "r" / "audit" / "audit.json").write_text(json.dumps({**record, "run": "another"}))
    with pytest.raises(RunFolderError, match="of another run"):
        model_card(tmp_path / "r")


def test_a_run_whose_ledger_was_shortened_gets_no_card(run_folder, tmp_path):
    import shutil

    shutil.copytree(run_folder, tmp_path / "run")
    ledger = tmp_path / "run" / "ledger.jsonl"
    ledger.write_text("".join(ledger.read_text().splitlines(keepends=True)[:-2]))
    with pytest.raises(LedgerError):
        model_card(tmp_path / "run")


@pytest.mark.parametrize("damage", ["changed", "shortened", "gone"])
def test_a_run_whose_users_have_a_damaged_ledger_gets_no_card(run_folder, store, tmp_path, damage):
    """A card without the line about all runs would say that there are no others."""
    shutil.copytree(run_folder, tmp_path / "run")
    shutil.copytree(store.path, tmp_path / "store")
    file, ledger = tmp_path / "run" / "run.toml", tmp_path / "store" / "ledger.jsonl"
    file.write_text(file.read_text().replace(str(store.path), str(tmp_path / "store")))
    model_card(tmp_path / "run")
    lines = ledger.read_bytes().splitlines(keepends=True)
    if damage == "gone":
        ledger.unlink()
    else:
        ledger.write_bytes(
            b"".join(lines[:-2] if damage == "shortened" else [lines[0].replace(b"1", b"2"), *lines[1:]])
        )
    with pytest.raises(LedgerError):
        model_card(tmp_path / "run")


def test_a_card_shows_the_last_evaluation_and_not_the_best(run_folder, tmp_path, monkeypatch):
    """The accuracy and the epsilon of a card are those of one model, the newest."""
    rows = [
        {"round": 2, "accuracy_top1": 0.31, "accuracy_top3": 0.52, "perplexity": 71.0},
        {"round": 4, "accuracy_top1": 0.24, "accuracy_top3": 0.61, "perplexity": 62.0},
        {"round": 6, "accuracy_top1": 0.22, "accuracy_top3": 0.43, "perplexity": 83.0},
    ]
    monkeypatch.setattr(RunFolder, "read_metrics", lambda self: rows)
    for card in (model_card(run_folder), write_card(run_folder, tmp_path / "README.md").read_text()):
        (result,) = yaml.safe_load(card.split("---\n", 2)[1])["model-index"][0]["results"]
        assert [metric["value"] for metric in result["metrics"]] == [0.22, 0.43, 83.0]
        assert "after round 6:" in card
        assert f"| AccuracyTop1 | {percent(0.22)} |" in card
        assert not any(percent(value) in card for value in (0.31, 0.24, 0.52, 0.61))


def test_every_baseline_and_setting_of_a_run_is_on_its_card(run_folder, monkeypatch):
    baselines = {f"baseline {i}": {"tokens": {"accuracy_top1": 0.101 + i / 100}} for i in range(4)}
    monkeypatch.setattr(RunFolder, "read_measures", lambda self: {"baselines": baselines})
    card = model_card(run_folder)
    for name, scores in baselines.items():
        assert f"{name} {percent(scores['tokens']['accuracy_top1'])} AccuracyTop1" in card
    for key, value in RunFolder(run_folder).public_settings().items():
        assert key in card
        assert markdown_line(str(value)) in card
    model = Released.open(run_folder)
    assert f"{model.run.model.layout.total:,} parameters, {len(model.vocabulary):,} tokens in the vocabulary" in card
    monkeypatch.setattr(RunFolder, "read_measures", lambda self: None)
    assert not any(name in model_card(run_folder) for name in baselines)


def test_the_total_on_a_card_comes_with_its_warnings(run_folder, store, tmp_path):
    """The seed of another run reveals that run's noise, without which the total does not hold."""
    shutil.copytree(run_folder, tmp_path / "first")
    shutil.copytree(store.path, tmp_path / "store")
    file = tmp_path / "first" / "run.toml"
    file.write_text(file.read_text().replace(str(store.path), str(tmp_path / "store")))
    run, _ = read_saved_run(file)
    for name, seed in (("seeded", 987_654_321), ("also", 987_654_322)):
        training = unheard.Training(rounds=1, reproducible_seed=seed)
        list(unheard.train(replace(run, training=training), tmp_path / name))
    total = all_runs(PopulationLedger.read(tmp_path / "store" / "ledger.jsonl"))
    card = model_card(tmp_path / "first")
    assert {f"REPRODUCIBLE NOISE in run '{name}'" in card for name in ("seeded", "also")} == {True}
    for warning in total["warnings"]:
        assert markdown_line(warning[1:].rstrip(".")) in card
    assert "98765432" not in card


@pytest.mark.parametrize("others", [[], ["another"]])
@pytest.mark.parametrize("more", [0, 1, 5])
def test_a_card_is_silent_about_all_runs_only_if_this_run_is_all_that_was_charged(
    run_folder, monkeypatch, others, more
):
    """Neither another run nor a further charge, for example of a vocabulary or of a round that was lost."""
    events = Ledger.read(run_folder / "ledger.jsonl").events
    population = SimpleNamespace(events=events + events[:more], store=None)
    total = {"claim": "the claim of all runs", "warnings": ["one warning.", "another warning."]}
    monkeypatch.setattr("unheard.deployment.card.population_of", lambda folder: population)
    monkeypatch.setattr("unheard.deployment.card.other_runs", lambda *_: others)
    monkeypatch.setattr("unheard.deployment.card.all_runs", lambda asked: total if asked is population else None)
    said = "Over all runs on the same users: the claim of all runs. One warning. Another warning"
    assert (said in model_card(run_folder)) is bool(others or more)
    assert ("Over all runs" in model_card(run_folder)) is bool(others or more)
    monkeypatch.setattr("unheard.deployment.card.population_of", lambda folder: None)  # it is on another machine
    assert "Over all runs on the same users: not known" in model_card(run_folder)


@pytest.mark.parametrize("name", ["population_of", "other_runs", "all_runs"])
def test_a_total_that_cannot_be_computed_is_an_error_and_never_left_out_of_a_card(run_folder, monkeypatch, name):
    def fail(*_):
        raise LedgerError("line 3 was changed")

    monkeypatch.setattr("unheard.deployment.card.other_runs", lambda *_: ["another"])
    monkeypatch.setattr(f"unheard.deployment.card.{name}", fail)
    with pytest.raises(LedgerError, match="line 3 was changed"):
        model_card(run_folder)
