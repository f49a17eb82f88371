"""`verify` accepts an intact run folder, and names what is wrong in any other."""

import json
import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import unheard
from tests.conftest import NOISE_MULTIPLIER
from tests.stores import uncharged_copy
from unheard import run_folder
from unheard.audit import verification
from unheard.audit.verification import verify
from unheard.corpus.store import TokenStore
from unheard.errors import CheckpointCorrupt, CodeNotTrusted, RunFolderError, RunFolderMissing
from unheard.privacy import ledger as chain
from unheard.privacy import saved_statement
from unheard.privacy.accountants import ACCOUNTANTS, Accountant
from unheard.privacy.budget import Budget, declaration
from unheard.privacy.events import PoissonGaussian, Selection, to_record
from unheard.privacy.ledger import Entry, Ledger
from unheard.privacy.statement import compute_statement
from unheard.run_folder import RunFolder
from unheard.training.checkpoint import newest_checkpoint, recorded_layout, save_checkpoint
from unheard.training.run import read_saved_run


def wrong(folder, **more) -> dict[str, str]:
    return {finding.name: finding.words for finding in verify(folder, **more) if finding.fits is False}


@pytest.fixture(scope="module")
def trained(tmp_path_factory, store, model, plan):
    run = unheard.Run(
        corpus=store.path,
        model=model,
        plan=replace(plan, sampling=unheard.PoissonSampling(users_per_round=60)),  # q = 1 is quick to account for
        training=unheard.Training(rounds=6, checkpoint_every=2),
        evaluation=unheard.Evaluation(every=3, max_tokens=200, unroll=20),
    )
    folder = tmp_path_factory.mktemp("runs") / "r"
    list(unheard.train(run, folder))
    return folder


@pytest.fixture
def folder(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "r")


def resealed(lines: list[bytes], change) -> bytes:
    """Write a ledger with changed records and valid hashes, as a forger would."""
    records, head, out = [json.loads(line) for line in lines], "", b""
    for record in records:
        record.pop("hash")
    for record in change(records):
        line, head = chain.seal(record, head)
        out += line
    return out


def lines_of(folder) -> list[bytes]:
    return (folder / "ledger.jsonl").read_bytes().splitlines(keepends=True)


def test_a_true_folder_fits_and_nothing_is_written(folder):
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    found = verify(folder)
    assert [f.name for f in found if f.fits is not True] == []
    assert "6 charges" in next(f.words for f in found if f.name == "ledger")
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before


def test_epsilon_is_recomputed_from_the_ledger(folder):
    told = json.loads((folder / "statement.json").read_text())
    said = next(f.words for f in verify(folder) if f.name == "epsilon")
    assert said.startswith(f"{told['claimed']['epsilon']:.6g} at delta")


ADDED = Accountant(
    name="sum",
    title="sum",
    description="A looser bound.",
    epsilon=lambda counts, delta: 2 * ACCOUNTANTS["rdp"].epsilon(counts, delta),
    delta=ACCOUNTANTS["rdp"].delta,
    since="99.0",
)


@pytest.mark.parametrize("since", ["0.1", "99.0"])
def test_a_statement_may_lack_only_accountants_that_were_added_after_its_version(folder, monkeypatch, since):
    """With the accountants that it names, each figure is computed again and compared."""
    path = folder / "statement.json"
    before = json.loads(path.read_text())
    monkeypatch.setitem(ACCOUNTANTS, "sum", replace(ADDED, since=since))
    assert ("epsilon" in wrong(folder).get("statement", "")) is (since == "0.1")
    ledger = Ledger.read(folder / "ledger.jsonl")
    path.write_text(json.dumps(compute_statement(ledger.facts, ledger.entries)))
    saved = json.loads(path.read_text())
    assert "sum" in saved["epsilon"]
    assert wrong(folder) == {}
    for table in (saved, before):
        for name in table["epsilon"]:
            for value in (None, 0.9 * table["epsilon"][name]):
                changed = {key: number for key, number in table["epsilon"].items() if key != name}
                changed |= {} if value is None else {name: value}
                path.write_text(json.dumps({**table, "epsilon": changed}))
                is_fine = value is None and name == "sum" and since == "99.0"
                assert ("epsilon" in wrong(folder).get("statement", "")) is not is_fine
    path.write_text(json.dumps({**saved, "epsilon": {**saved["epsilon"], "unknown": 0.1}}))
    assert "epsilon" in wrong(folder)["statement"]


def test_a_statement_from_before_an_accountant_may_claim_more_and_not_less(folder, monkeypatch):
    """If PLD had been added later, an earlier statement would claim the bound by RDP, the only one then."""
    path, ledger = folder / "statement.json", Ledger.read(folder / "ledger.jsonl")
    earlier = compute_statement(ledger.facts, ledger.entries, accountants=["moments", "rdp"])
    assert earlier["claimed"] == {"epsilon": earlier["epsilon"]["rdp"], "accountant": "rdp", "of": "the smaller of rdp"}
    assert earlier["claim"].endswith("by rdp")
    assert earlier["claimed"]["epsilon"] > compute_statement(ledger.facts, ledger.entries)["claimed"]["epsilon"]
    path.write_text(json.dumps(earlier))
    assert "epsilon" in wrong(folder)["statement"]
    monkeypatch.setitem(ACCOUNTANTS, "pld", replace(ACCOUNTANTS["pld"], since="99.0"))
    assert wrong(folder) == {}
    path.write_text(json.dumps({**earlier, "claimed": {**earlier["claimed"], "epsilon": 0.1}}))
    assert "claimed" in wrong(folder)["statement"]


@pytest.mark.parametrize("change", ["edit", "swap", "drop one", "cut at a line", "repeat"])
def test_a_ledger_that_was_touched_does_not_fit(folder, change):
    lines = lines_of(folder)
    (folder / "ledger.jsonl").write_bytes(
        b"".join(
            {
                "edit": [*lines[:2], lines[2].replace(b"0.5", b"5.0"), *lines[3:]],
                "swap": [*lines[:2], lines[3], lines[2], *lines[4:]],
                "drop one": [*lines[:2], *lines[3:]],
                "cut at a line": lines[:-2],
                "repeat": [*lines, lines[-1]],
            }[change]
        )
    )
    found = wrong(folder)
    assert ("checkpoints" if change == "cut at a line" else "ledger") in found


def test_a_torn_last_line_is_reported_and_accepted(folder):
    file = folder / "ledger.jsonl"
    file.write_bytes(file.read_bytes() + b'{"round":6,"eve')
    (folder / "statement.json").unlink()
    assert wrong(folder) == {}
    assert any("torn" in f.words for f in verify(folder))


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (lambda r: [r[0], *({**x, "event": {**x["event"], "sampling_prob": 0.01}} for x in r[1:])], "charges"),
        (lambda r: [r[0], *({**x, "event": {**x["event"], "noise_multiplier": 5.0}} for x in r[1:])], "charges"),
        (lambda r: r[:-1], "checkpoints"),
        (lambda r: [r[0], *r[2:]], "charges"),
        (lambda r: [{**r[0], "facts": {**r[0]["facts"], "population": 10**9}}, *r[1:]], "facts"),
        (lambda r: [{**r[0], "facts": {**r[0]["facts"], "delta": 1e-3}}, *r[1:]], "facts"),
        (lambda r: [{**r[0], "facts": {**r[0]["facts"], "run_hash": "0" * 64}}, *r[1:]], "configuration"),
        (lambda r: [{**r[0], "facts": {**r[0]["facts"], "start": {"charges": 1}}}, *r[1:]], "charges"),
        (lambda r: [{**r[0], "facts": {**r[0]["facts"], "start": {"charges": 7}}}, *r[1:]], "charges"),
    ],
)
def test_a_ledger_that_was_written_anew_does_not_fit_its_run_file_or_checkpoints(folder, change, where):
    file = folder / "ledger.jsonl"
    file.write_bytes(resealed(lines_of(folder), change))
    found = wrong(folder)
    assert where in found
    assert "checkpoints" in found  # its hashes are those of the original


def test_every_fact_that_follows_from_the_run_file_is_compared_with_it(folder):
    """Also the mode of randomness: if the ledger of a seeded run said "secure", the statement would lack its warning."""
    run, _ = read_saved_run(folder / "run.toml")
    lines, file = lines_of(folder), folder / "ledger.jsonl"
    for name in [*run.plan.facts(run.model.layout), "delta", "randomness", "parameters"]:

        def changed(records, name=name):
            facts = records[0]["facts"]
            kind = type(facts[name])
            other = {"mode": "another"} if kind is dict else [] if kind is list else kind(2 * facts[name])
            return [{**records[0], "facts": {**facts, name: other}}, *records[1:]]

        file.write_bytes(resealed(lines, changed))
        assert name in wrong(folder)["facts"], name


def test_one_charge_that_the_population_lacks_does_not_fit(folder):
    ledger = Ledger.open(folder / "ledger.jsonl")
    ledger.charge(ledger.events[-1], 6)
    assert "has 6 of this run's 7 charges" in wrong(folder)["population"]


def with_declared(folder, **change) -> dict[str, str]:
    def changed(records):
        facts = records[0]["facts"]
        return [{**records[0], "facts": {**facts, "declared": {**facts["declared"], **change}}}, *records[1:]]

    (folder / "ledger.jsonl").write_bytes(resealed(lines_of(folder), changed))
    return wrong(folder)


def test_another_declaration_than_that_of_the_run_file_and_of_the_population_does_not_fit(folder):
    assert "different declarations" in with_declared(folder, rounds=3)["population"]
    assert any("run.toml now says 6" in finding.words for finding in verify(folder))
    for change in ({"rounds": None}, {"budget": {"epsilon": 1.0, "delta": 1e-9, "accountant": "rdp"}}):
        found = with_declared(folder, **change)
        assert "declares other events or another budget" in found["facts"]
        assert "population" in found
    cheaper = {"kind": "poisson_gaussian", "sampling_prob": 0.5, "noise_multiplier": 9.0}
    assert "facts" in with_declared(folder, rounds=6, phases=[{"from_round": 0, "event": cheaper}])


def test_a_ledger_that_lost_its_declaration_does_not_fit(folder):
    def without(records):
        return [
            {**records[0], "facts": {k: v for k, v in records[0]["facts"].items() if k != "declared"}},
            *records[1:],
        ]

    (folder / "ledger.jsonl").write_bytes(resealed(lines_of(folder), without))
    assert "different declarations" in wrong(folder)["population"]


def test_an_edited_run_file_does_not_fit(folder):
    file = folder / "run.toml"
    file.write_text(file.read_text().replace("noise_multiplier = 0.5", "noise_multiplier = 0.1"))
    assert "changed after the run began" in wrong(folder)["configuration"]


def test_a_checkpoint_of_a_round_that_was_never_charged_does_not_fit(folder, model):
    place = RunFolder(folder)
    ledger, newest = Ledger.read(place.ledger), newest_checkpoint(place)
    save_checkpoint(place, model, replace(newest.state, round=9), ledger, keep=9)
    assert "round 6 was never charged" in wrong(folder)["checkpoints"]


def test_a_checkpoint_that_was_saved_before_its_rounds_were_charged_does_not_fit(folder, model):
    place = RunFolder(folder)
    ledger, newest = Ledger.read(place.ledger), newest_checkpoint(place)

    class AfterFour:
        facts, head = ledger.facts, ledger.hash_at(4)

        def __len__(self):
            return 4

    save_checkpoint(place, model, newest.state, AfterFour(), keep=9)  # pyright: ignore[reportArgumentType]
    assert "round 4 was never charged" in wrong(folder)["checkpoints"]


def test_every_fact_of_a_checkpoint_and_of_a_model_is_under_its_digest(folder):
    for file in (folder / "model.safetensors", *sorted((folder / "checkpoints").iterdir())):
        content = file.read_bytes()
        size = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + size])
        written = json.loads(header["__metadata__"]["unheard"])
        facts = written["facts"]
        others = [{**facts, key: [value]} for key, value in facts.items()]
        others += [{k: v for k, v in facts.items() if k != key} for key in facts]
        others += [{**facts, "clip_norm": 3.0}, {**facts, "ledger_length": facts["ledger_length"] - 1}]
        for other in others:
            header["__metadata__"]["unheard"] = json.dumps({**written, "facts": other})
            changed = json.dumps(header).encode()
            file.write_bytes(len(changed).to_bytes(8, "little") + changed + content[8 + size :])
            with pytest.raises(CheckpointCorrupt, match="does not read back as it was written"):
                recorded_layout(file)
        file.write_bytes(content)
        recorded_layout(file)


@pytest.mark.parametrize("how", ["rename", "flip", "empty"])
def test_a_damaged_or_renamed_checkpoint_does_not_fit(folder, how):
    newest = sorted((folder / "checkpoints").iterdir())[-1]
    if how == "rename":
        newest.rename(newest.with_name("round-00000900.safetensors"))
    else:
        content = bytearray(newest.read_bytes())
        content[-3] ^= 1
        newest.write_bytes(bytes(content) if how == "flip" else b"")
    assert "checkpoints read back" in wrong(folder)


def test_a_model_that_was_replaced_does_not_fit(folder, model):
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        facts = file.metadata()
    tensors = load_file(folder / "model.safetensors")
    tensors["embedding"] += 1e-3
    save_file(tensors, folder / "model.safetensors", facts)
    assert "does not read back" in wrong(folder)["model"]
    from unheard.training.checkpoint import save_model

    save_model(folder / "model.safetensors", model, torch.zeros(model.layout.total), {"round": 6})
    assert "it was replaced" in wrong(folder)["model"]
    close_P = newest_checkpoint(RunFolder(folder)).state.params_P.clone()
    close_P[0] = torch.nextafter(close_P[0], torch.tensor(torch.inf))  # the last bit of one number
    save_model(folder / "model.safetensors", model, close_P, {"round": 6})
    assert "it was replaced" in wrong(folder)["model"]
    save_model(folder / "model.safetensors", model, torch.zeros(model.layout.total), {"round": 7})
    assert "no checkpoint" in wrong(folder)["model"]


def test_a_stop_between_checkpoint_and_model_is_reported_and_accepted(folder, model):
    from unheard.training.checkpoint import checkpoint_files, read_checkpoint, save_model

    older = read_checkpoint(checkpoint_files(RunFolder(folder))[0]).state
    save_model(folder / "model.safetensors", model, older.params_P, {"round": older.round})
    assert wrong(folder) == {}
    assert any("stopped between two writes" in f.words for f in verify(folder))


def test_a_statement_that_says_something_else_does_not_fit(folder):
    file = folder / "statement.json"
    told = json.loads(file.read_text())
    told["epsilon"]["pld"] = 0.1
    file.write_text(json.dumps(told))
    assert "epsilon" in wrong(folder)["statement"]
    file.write_text("{")
    assert "not JSON" in wrong(folder)["statement"]
    file.unlink()
    assert wrong(folder) == {}


def changed_once(value):
    """Yield the value with one number, word, key or item changed, left out or added, at any depth."""
    if isinstance(value, dict):
        yield {**value, "one more": 1}
        for key, item in value.items():
            yield {name: other for name, other in value.items() if name != key}
            yield from ({**value, key: changed} for changed in changed_once(item))
    elif isinstance(value, list):
        yield [*value, 1]
        for i, item in enumerate(value):
            yield value[:i] + value[i + 1 :]
            yield from ([*value[:i], changed, *value[i + 1 :]] for changed in changed_once(item))
    else:
        yield None if value is not None else 0
        yield value * 1.001 + 1e-9 if type(value) in (int, float) else f"{value}."


def test_every_entry_of_a_statement_is_compared(folder, monkeypatch):
    file = folder / "statement.json"
    saved = json.loads(file.read_text())
    ledger = Ledger.read(folder / "ledger.jsonl")
    expected = saved_statement.compute_statement(ledger.facts, ledger.entries)
    monkeypatch.setattr(saved_statement, "compute_statement", lambda *_, **__: expected)  # the same each time
    read = verification.Folder(RunFolder(folder), ledger=ledger)
    assert [*verification._statement(read)]
    for key in saved.keys() - {"versions", "software"}:  # the version may differ
        is_deep = isinstance(saved[key], dict | list) and key != "basis"  # compared in depth by the next test
        for other in [[saved[key]], *(() if is_deep else changed_once(saved[key]))]:
            file.write_text(json.dumps({**saved, key: other}))
            with pytest.raises(RunFolderError, match=rf"and the ledger differ in: .*\b{key}\b"):
                [*verification._statement(read)]


def test_one_change_anywhere_in_a_statement_is_noticed(folder):
    saved = json.loads((folder / "statement.json").read_text())
    assert saved_statement._agree(saved, saved)
    changes = list(changed_once(saved))
    assert len(changes) > 200
    for changed in changes:
        assert not saved_statement._agree(changed, saved)
        assert not saved_statement._agree(saved, changed)


def test_other_words_or_metrics_of_no_round_do_not_fit(folder):
    words = (folder / "vocabulary.txt").read_text()
    (folder / "vocabulary.txt").write_text(words.replace("w7\n", "seven\n"))
    (folder / "metrics.jsonl").write_text('{"round": 99, "epsilon": 1.0}\n')
    assert {"vocabulary", "metrics"} <= set(wrong(folder))


def test_metrics_of_the_round_after_the_last_charge_do_not_fit(folder):
    *rows, last = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(rows) + json.dumps({**json.loads(last), "round": 7}) + "\n")
    assert "never charged" in wrong(folder)["metrics"]


def test_metrics_are_those_that_the_newest_checkpoint_remembers(folder):
    file = folder / "metrics.jsonl"
    own = file.read_text()
    assert "digest is that of the newest checkpoint" in next(f.words for f in verify(folder) if f.name == "metrics")
    first, *rows = [json.loads(line) for line in own.splitlines()]
    # Another run with the same rounds: every row is an evaluation of a round that was charged.
    for changed in ({"accuracy_top1": 0.999}, {"epsilon": 0.01}):
        others = [{**row, **changed} for row in (first, *rows)]
        for some in (others, [others[0], *rows], [first, *others[1:]]):
            file.write_text("".join(json.dumps(row) + "\n" for row in some))
            assert "another run" in wrong(folder)["metrics"]
    file.write_text(own + own.splitlines(keepends=True)[-1][:20])  # a kill left an incomplete line
    assert wrong(folder) == {}
    file.unlink()  # as the message says
    assert wrong(folder) == {}


def test_checkpoints_of_older_versions_remember_no_metrics(folder, monkeypatch):
    rows = (folder / "metrics.jsonl").read_text().replace('"accuracy_top1": 0.', '"accuracy_top1": 0.1')
    (folder / "metrics.jsonl").write_text(rows)
    assert "metrics" in wrong(folder)
    read = verification.read_checkpoint
    monkeypatch.setattr(verification, "read_checkpoint", lambda path: replace(read(path), metrics=None))
    facts = run_folder.read_facts
    monkeypatch.setattr(run_folder, "read_facts", lambda path: {**facts(path), "metrics": None})
    found = next(f for f in verify(folder) if f.name == "metrics")
    assert (found.fits, "not recorded" in found.words) == (True, True)


def test_a_missing_file_is_named_and_the_rest_is_still_checked(folder):
    (folder / "ledger.jsonl").unlink()
    found = {f.name: f.fits for f in verify(folder)}
    assert found["ledger"] is False
    assert found["model"] is True
    assert found["statement"] is None
    shutil.rmtree(folder)
    with pytest.raises(RunFolderMissing):
        verify(folder)


def test_a_run_that_began_from_another_fits_before_its_first_round_and_after(run, tmp_path):
    run = replace(run, plan=replace(run.plan, sampling=unheard.PoissonSampling(users_per_round=60)))
    list(unheard.train(run, tmp_path / "first"))
    other = replace(run.plan, noise=unheard.GaussianNoise(noise_multiplier=0.8))
    child = replace(run, plan=other, training=unheard.Training(rounds=2, init_from=str(tmp_path / "first")))
    unheard.train(child, tmp_path / "second").close()
    assert wrong(tmp_path / "second") == {}
    list(unheard.resume(tmp_path / "second"))
    assert wrong(tmp_path / "second") == {}
    assert any("6 charges from before the first round" in f.words for f in verify(tmp_path / "second"))


def test_a_changed_byte_of_the_stores_text_does_not_fit(folder, store, tmp_path):
    corpus = shutil.copytree(store.path, tmp_path / "corpus")
    assert next(f for f in verify(folder, corpus) if f.name == "store").fits is True
    tokens = corpus / "held_out" / "00000.tokens"
    content = bytearray(tokens.read_bytes())
    content[2] ^= 1
    tokens.write_bytes(content)
    assert "held_out/00000.tokens" in wrong(folder, corpus=corpus)["store"]


def test_a_statement_of_another_ledger_position_or_of_none_is_noticed(folder):
    path = folder / "statement.json"
    saved = json.loads(path.read_text())
    assert saved["ledger"] == {"charges": 6, "head": Ledger.read(folder / "ledger.jsonl").head}
    for key in ("ledger", "basis"):  # only version 0.1 wrote statements without them
        less = {name: value for name, value in saved.items() if name != key}
        for versions in (saved["versions"], {"unheard": "0.1.0"}, {"unheard": "nothing"}, None):
            path.write_text(json.dumps({**less, "versions": versions}))
            assert key in wrong(folder)["statement"]
    path.write_text(json.dumps({**saved, "ledger": {**saved["ledger"], "charges": 5}}))
    assert "ledger" in wrong(folder)["statement"]


def test_a_store_is_not_a_run_folder(store):
    with pytest.raises(RunFolderMissing, match=r"is a token store, not a run folder.*unheard corpus show"):
        verify(store.path)


@pytest.mark.parametrize("other", [{}, {"sampling_prob": 0.3}, {"noise_multiplier": 0.6}, {"none": True}])
def test_a_selected_run_was_charged_as_a_selection_with_its_own_q_and_z(run, other):
    own = {
        "sampling_prob": 0.2,
        "noise_multiplier": NOISE_MULTIPLIER,
        "rounds": 6,
        "mean_trials": 3.0,
        "drawn_from": "geometric",
    }
    charged = (
        PoissonGaussian(sampling_prob=0.2, noise_multiplier=NOISE_MULTIPLIER)
        if "none" in other
        else Selection(**{**own, **other})
    )
    ledger = FakeLedger(
        facts={"selection": {"mean_trials": 3.0}, "start": {"charges": 1}},
        entries=[Entry(event=charged, round=0, hash="")],
    )
    if other:
        with pytest.raises(verification.CheckFailed, match="was not charged for a selection"):
            verification._rounds_of_selection(run, ledger)  # pyright: ignore[reportArgumentType]
    else:
        assert verification._rounds_of_selection(run, ledger) == 6  # pyright: ignore[reportArgumentType]


@dataclass
class FakeLedger:
    facts: dict
    entries: list

    def __len__(self):
        return len(self.entries)


def test_a_run_with_a_schedule_is_charged_for_each_phase_and_for_no_other(run, tmp_path):
    phases = (unheard.Change(from_round=1, noise_multiplier=0.7), unheard.Change(from_round=2, noise_multiplier=0.9))
    plan = replace(run.plan, sampling=unheard.PoissonSampling(users_per_round=60), schedule=phases)
    two = replace(run, plan=plan, training=unheard.Training(rounds=3), ledger=tmp_path / "people.jsonl")
    list(unheard.train(two, tmp_path / "r"))
    assert wrong(tmp_path / "r") == {}
    ledger = Ledger.read(tmp_path / "r" / "ledger.jsonl")
    assert [entry.event.noise_multiplier for entry in ledger.entries] == [NOISE_MULTIPLIER, 0.7, 0.9]
    (tmp_path / "r" / "ledger.jsonl").unlink()
    again = Ledger.create(tmp_path / "r" / "ledger.jsonl", ledger.facts)
    for number, entry in enumerate(ledger.entries):  # the noise of the next phase, one round too early
        again.charge(ledger.entries[min(number + 1, 2)].event, entry.round)
    assert "round 0 was charged as" in wrong(tmp_path / "r")["charges"]


def test_figures_of_a_statement_agree_to_four_digits_or_do_not_fit():
    for factor, agrees in ((1.0, True), (1 + 9e-5, True), (1 - 2e-4, False), (0.999, False), (1.01, False)):
        assert saved_statement._agree({"epsilon": 2.0 * factor}, {"epsilon": 2.0}) is agrees
        assert saved_statement._agree([1.0, {"delta": 3e-5 * factor}], [1.0, {"delta": 3e-5}]) is agrees


@pytest.mark.parametrize("change", ["budget", "no budget", "event", "rounds"])
def test_every_part_of_a_declaration_is_compared_with_the_run_file(run, change):
    own = replace(run, budget=Budget(epsilon=4.0, delta=run.claimed_delta))
    phases = [(first, to_record(plan.event())) for first, plan in own.plan.phases(own.model.layout)]
    declared = declaration(6, phases, own.budget)
    assert "are those of run.toml" in verification._declared(own, declared)
    other = {
        "budget": declaration(6, phases, Budget(epsilon=8.0, delta=run.claimed_delta)),
        "no budget": declaration(6, phases, None),
        "event": declaration(6, [(0, {**phases[0][1], "noise_multiplier": 0.4})], own.budget),
        "rounds": {**declared, "rounds": "6"},
    }
    with pytest.raises(verification.CheckFailed, match="other events or another budget"):
        verification._declared(own, other[change])


@pytest.mark.parametrize("budget", [True, False])
def test_one_change_anywhere_in_a_declaration_is_noticed(run, budget):
    """A number, a word, a key or an item changed, left out or added, at any depth. Only `rounds` may be another number."""
    own = replace(run, budget=Budget(epsilon=4.0, delta=run.claimed_delta) if budget else None)
    phases = [(first, to_record(plan.event())) for first, plan in own.plan.phases(own.model.layout)]
    declared = json.loads(json.dumps(declaration(6, phases, own.budget)))
    assert "are those of run.toml" in verification._declared(own, declared)
    assert "run.toml now says 6" in verification._declared(own, {**declared, "rounds": 5})
    changes = [*changed_once(declared), [declared], None, "declared", {}]
    changes += [{**declared, "budget": {"epsilon": 4.0, "delta": 1e-3}}] if not budget else []
    assert len(changes) > 20
    for changed in changes:
        with pytest.raises(verification.CheckFailed, match="other events or another budget"):
            verification._declared(own, changed)


@pytest.mark.parametrize("is_named", [True, False])
def test_another_store_than_the_one_that_the_ledger_names_does_not_fit(run, tmp_path, is_named):
    """Neither if the run file names its folder nor if the caller does (`--corpus`)."""
    ledger = FakeLedger(facts={"corpus": "0" * 64}, entries=[])
    own = replace(run, corpus=tmp_path / "elsewhere") if is_named else run
    folder = verification.Folder(RunFolder(tmp_path), run=own, ledger=ledger)  # pyright: ignore[reportArgumentType]
    with pytest.raises(verification.CheckFailed, match="is not the store that the ledger names"):
        list(verification._store(folder, run.corpus if is_named else None))


def with_facts(folder, **facts) -> None:
    """Write the ledger with other facts in its header and valid hashes. A value of None removes the fact."""

    def changed(records):
        kept = {key: value for key, value in {**records[0]["facts"], **facts}.items() if value is not None}
        return [{**records[0], "facts": kept}, *records[1:]]

    (folder / "ledger.jsonl").write_bytes(resealed(lines_of(folder), changed))


def with_fewer_words(folder) -> None:
    """Make a run folder of a version whose ledgers did not name the word list, with fewer words."""
    with_facts(folder, vocabulary=None)
    words = (folder / "vocabulary.txt").read_text().splitlines(keepends=True)
    (folder / "vocabulary.txt").write_text("".join(words[:-1]))


def without_checkpoints(folder) -> None:
    shutil.rmtree(folder / "checkpoints")
    (folder / "checkpoints").mkdir()


def of_another_tokenizer(folder) -> None:
    """Make a run folder of a version whose ledgers did not name the tokenizer, with another tokenizer."""
    with_facts(folder, tokens_sha256=None)
    (folder / "tokens.json").write_text('{"kind": "characters"}')


@pytest.mark.parametrize(
    ("damage", "where", "words"),
    [
        (without_checkpoints, "checkpoints read back", "has no checkpoint"),
        (lambda f: with_facts(f, correlated_noise={"strategy": "blt"}), "correlated noise", r"run\.toml has none"),
        (with_fewer_words, "vocabulary", "has 49 words, the model 50 rows"),
        (lambda f: (f / "tokens.json").write_text("[]"), "tokens", "is damaged"),
        (lambda f: (f / "tokens.json").write_text("{}"), "tokens", "another tokenizer than the run began with"),
        (lambda f: (f / "tokens.json").unlink(), "tokens", "is missing"),
        (of_another_tokenizer, "tokens", "another tokenizer than .*counting"),
        (lambda f: (f / "statement.json").write_text("[]"), "statement", "not a privacy statement"),
        (lambda f: (f / "measures.json").write_text("[]"), "measures", "is damaged"),
        (lambda f: with_facts(f, delta=0.0), "epsilon", "no delta between 0 and 1"),
        (lambda f: with_facts(f, delta=1.0), "epsilon", "no delta between 0 and 1"),
    ],
)
def test_each_kind_of_damage_is_found_by_its_own_check(folder, damage, where, words):
    damage(folder)
    assert re.search(words, wrong(folder).get(where, "nothing was found"))


def test_a_run_that_its_population_does_not_list_does_not_fit(folder, run, store, tmp_path):
    copy = uncharged_copy(store.path, tmp_path / "copy")
    unheard.train(replace(run, corpus=copy), tmp_path / "other").close()
    assert "does not list this run" in wrong(folder, corpus=copy)["population"]


def test_a_store_whose_files_have_no_digests_is_not_said_to_be_whole(folder, store, tmp_path):
    copy = uncharged_copy(store.path, tmp_path / "copy")
    (copy / "digests.json").unlink()
    info = json.loads((copy / "corpus.json").read_text())
    del info["digests"]
    (copy / "corpus.json").write_text(json.dumps(info))
    with_facts(folder, corpus=TokenStore.open(copy).name)
    found = next(f for f in verify(folder, copy) if f.name == "store")
    assert (found.fits, "recorded no digests" in found.words) == (None, True)


BLT = unheard.CorrelatedNoise(noise_multiplier=4.0, strategy="blt", buffers=2, rounds=8)


@pytest.mark.parametrize(
    ("separation", "noise"),
    [
        (3, BLT),
        (2, replace(BLT, rounds=9)),
        (2, replace(BLT, strategy="banded")),
        (2, replace(BLT, noise_multiplier=5.0)),
    ],
)
def test_a_whole_record_of_another_correlated_noise_does_not_fit_the_run_file(run, separation, noise):
    """The record is consistent: its sensitivity is that of its coefficients."""

    def with_noise(separation, noise):
        sampling = unheard.MinSeparationSampling(separation=separation)
        return replace(run, plan=replace(run.plan, sampling=sampling, noise=noise))

    own, other = with_noise(2, BLT), with_noise(separation, noise)
    read = verification.Folder(RunFolder(Path("nowhere")), run=own)
    for stated, fits in ((own, True), (other, False)):
        facts = {"correlated_noise": json.loads(json.dumps(stated.plan.correlated_facts()))}
        read.ledger = FakeLedger(facts=facts, entries=[])  # pyright: ignore[reportAttributeAccessIssue]
        finding = verification._finding("correlated noise", verification._correlated_noise, read)
        assert finding.fits is fits


@pytest.mark.parametrize(("past", "rounds"), [(2, []), (2, [0]), (2, [0, 1]), (1, [1])])
def test_charges_from_before_the_first_round_are_in_the_ledger_and_of_no_round(run, past, rounds):
    event = run.plan.at(0, run.model.layout).event()
    entries = [Entry(event=event, round=round, hash="") for round in rounds]
    ledger = FakeLedger(facts={"start": {"charges": past}}, entries=entries)
    read = verification.Folder(RunFolder(Path("nowhere")), run=run, ledger=ledger)  # pyright: ignore[reportArgumentType]
    with pytest.raises(verification.CheckFailed, match=f"declares {past} charges before the first round"):
        [*verification._charges(read)]


@pytest.mark.parametrize("line", range(7))
def test_every_charge_is_compared_with_the_plan_also_of_rounds_that_were_repeated(run, line):
    rounds, event = [0, 1, 2, 1, 2, 3, 3], run.plan.at(0, run.model.layout).event()
    assert isinstance(event, PoissonGaussian)
    other = replace(event, noise_multiplier=1.001 * event.noise_multiplier)
    for changed in (None, line):
        entries = [Entry(event=other if k == changed else event, round=at, hash="") for k, at in enumerate(rounds)]
        ledger = FakeLedger(facts={"start": {"charges": 0}}, entries=entries)
        read = verification.Folder(RunFolder(Path("nowhere")), run=run, ledger=ledger)  # pyright: ignore[reportArgumentType]
        assert verification._finding("charges", verification._charges, read).fits is (changed is None)


@pytest.mark.parametrize(
    ("attempts", "fits"),
    [([0, 1, 2], True), ([0, 1, 0, 1], True), ([1, 2], False), ([0, 2], False), ([0, 1, 1], False), ([0, 0, 2], False)],
)
def test_attempts_of_correlated_noise_follow_each_other_or_begin_anew(run, attempts, fits):
    """A missing attempt was not charged, and a repeated index would hide another attempt."""
    sampling = unheard.MinSeparationSampling(separation=2)
    own = replace(run, plan=replace(run.plan, sampling=sampling, noise=BLT))
    events = [own.plan.at(round, run.model.layout).event(index) for round, index in enumerate(attempts)]
    entries = [Entry(event=event, round=round, hash="") for round, event in enumerate(events)]
    ledger = FakeLedger(facts={"start": {"charges": 0}}, entries=entries)
    read = verification.Folder(RunFolder(Path("nowhere")), run=own, ledger=ledger)  # pyright: ignore[reportArgumentType]
    finding = verification._finding("charges", verification._charges, read)
    assert (finding.fits, "attempt" in finding.words) == (fits, not fits)


@pytest.mark.parametrize(
    ("error", "fits"),
    [
        (verification.CheckFailed("no"), False),
        (CheckpointCorrupt("no"), False),
        (PermissionError(13, "no", "model.safetensors"), False),
        (OSError("no"), False),
        (verification.CheckSkipped("not here"), None),
        (CodeNotTrusted("no"), None),
    ],
)
def test_an_error_of_a_check_is_a_finding_and_only_what_was_not_looked_at_is_left_open(error, fits):
    def check(folder):
        yield "a sentence before"
        raise error

    finding = verification._finding("model", check, verification.Folder(RunFolder(Path("nowhere"))))
    assert finding.fits is fits
    assert "a sentence before" not in finding.words


def test_a_whole_checkpoint_of_another_model_does_not_fit(folder, model):
    place, larger = RunFolder(folder), replace(model, hidden_size=9)
    newest = newest_checkpoint(place).state
    for file in (folder / "checkpoints").iterdir():
        file.unlink()
    other = replace(newest, params_P=larger.initial(0))
    save_checkpoint(place, larger, other, Ledger.read(place.ledger), keep=9)  # pyright: ignore[reportArgumentType]
    assert "belongs to another model than run.toml describes" in wrong(folder)["checkpoints"]


@pytest.mark.parametrize(
    "changed",
    [
        {"round": "3"},
        {"round": None},
        {"accuracy_top1": 1.5},
        {"accuracy_top5": -0.1},
        {"accuracy_top3": "many"},
        {"epsilon": -1.0},
        {"loss": [1.0]},
        None,
    ],
)
def test_a_damaged_evaluation_is_named_also_where_no_checkpoint_remembers_it(folder, monkeypatch, changed):
    read = verification.read_checkpoint
    monkeypatch.setattr(verification, "read_checkpoint", lambda path: replace(read(path), metrics=None))
    facts = run_folder.read_facts
    monkeypatch.setattr(run_folder, "read_facts", lambda path: {**facts(path), "metrics": None})
    first, *rest = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    line = first[:-9] if changed is None else json.dumps({**json.loads(first), **changed})
    (folder / "metrics.jsonl").write_text(first + line + "\n" + "".join(rest))
    assert "line 2 is not an evaluation" in wrong(folder)["metrics"]
