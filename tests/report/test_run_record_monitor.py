"""The status of runs that are training, stopped, inactive, out of budget, or complete."""

import os
import re
import shutil
import time
from types import SimpleNamespace

import pytest

from tests.report.builders import ROUNDS
from unheard.errors import LedgerError
from unheard.privacy.accountants import epsilons
from unheard.privacy.budget import RunningEpsilon
from unheard.privacy.events import FailureProbability, Gaussian, PoissonGaussian
from unheard.privacy.ledger import Ledger
from unheard.report.run_record import SILENT_AFTER, RunMonitor
from unheard.run_folder import RunFolder


@pytest.fixture
def folder(runs, tmp_path) -> RunFolder:
    shutil.copytree(runs[1], tmp_path / "private")
    return RunFolder(tmp_path / "private")


def test_the_status_of_a_complete_run(folder):
    status = RunMonitor(folder.path).status()
    assert status.state == "complete"
    assert (status.round, status.rounds) == (ROUNDS, ROUNDS)
    ledger = Ledger.read(folder.ledger)
    assert status.epsilon == pytest.approx(epsilons(ledger.events, ledger.facts["delta"])["rdp"])
    assert status.newest["round"] == ROUNDS
    assert status.seconds_left is None


def test_a_run_is_followed_while_it_is_written(folder, monkeypatch):
    """Ledger and metrics are written in half lines. The monitor reads complete lines only."""
    # The folder is cut back to an earlier state, which its checkpoints contradict.
    monkeypatch.setattr("unheard.report.run_record.read_run_ledger", lambda folder: Ledger.read(folder.ledger))
    monkeypatch.setattr(RunFolder, "check_metrics", lambda folder: None)
    ledger, metrics = folder.ledger.read_bytes(), folder.metrics.read_bytes()
    lines, rows = ledger.splitlines(keepends=True), metrics.splitlines(keepends=True)
    folder.statement.unlink()
    folder.ledger.write_bytes(b"".join(lines[:3]) + lines[3][:20])
    folder.metrics.write_bytes(rows[0] + rows[1][:10])
    monitor = RunMonitor(folder.path)
    first = monitor.status()
    assert first.state == "training"
    assert [p["round"] for p in first.points] == [2]
    assert first.round == 2  # the newest evaluation: two rounds were charged and evaluated
    folder.ledger.write_bytes(b"".join(lines[:9]))
    folder.metrics.write_bytes(b"".join(rows[:3]))
    second = monitor.status()
    assert second.round == 7  # eight are charged; the eighth is being computed
    assert second.epsilon > first.epsilon
    assert second.rounds_per_second
    assert second.seconds_left
    folder.ledger.write_bytes(ledger)
    folder.metrics.write_bytes(metrics)
    folder.statement.write_text("{}")
    assert monitor.status().state == "complete"


def test_rounds_that_are_charged_again_while_a_run_is_watched_cost_again(folder, monkeypatch):
    monkeypatch.setattr("unheard.report.run_record.read_run_ledger", lambda folder: Ledger.read(folder.ledger))
    monkeypatch.setattr(RunFolder, "check_metrics", lambda folder: None)
    monitor = RunMonitor(folder.path)
    before = monitor.status().epsilon
    ledger = Ledger.open(folder.ledger)
    ledger.charge(ledger.events[-1], ROUNDS - 2)
    after = monitor.status().epsilon
    assert after == pytest.approx(epsilons(ledger.events, ledger.facts["delta"])["rdp"])
    assert after > before


def test_a_run_that_was_stopped_and_one_that_fell_silent(folder, monkeypatch):
    monkeypatch.setattr(RunFolder, "check_metrics", lambda folder: None)  # its checkpoints are of a later round
    rows = folder.metrics.read_text().splitlines(keepends=True)
    folder.metrics.write_text("".join(rows[:2]))
    status = RunMonitor(folder.path).status()
    assert status.state == "stopped"
    assert status.round == ROUNDS  # as saved, though the last evaluation is older
    folder.statement.unlink()
    then = time.time() - SILENT_AFTER - 5
    os.utime(folder.ledger, (then, then))
    assert RunMonitor(folder.path).status().state == "silent"


def test_a_round_that_was_charged_and_then_lost_is_not_counted(folder, monkeypatch):
    """After Ctrl-C during a round, the round is charged, and the saved model is that of the previous round."""
    monkeypatch.setattr(RunFolder, "check_metrics", lambda folder: None)  # its checkpoints are of a later round
    rows = folder.metrics.read_text().splitlines(keepends=True)
    folder.metrics.write_text("".join(rows[:2]))
    newest = sorted(folder.checkpoints.iterdir())[-1]
    newest.rename(newest.with_name(f"round-{ROUNDS - 1:08d}.safetensors"))
    assert RunMonitor(folder.path).status().round == ROUNDS - 1


def test_a_run_that_its_budget_stopped_is_not_advised_to_resume(folder, monkeypatch):
    monkeypatch.setattr("unheard.privacy.run_ledger.check_configuration", lambda *_: None)  # the ledger names no budget
    monkeypatch.setattr(RunFolder, "check_metrics", lambda folder: None)  # its checkpoints are of a later round
    text, spent = folder.run_file.read_text(), RunMonitor(folder.path).status().epsilon
    folder.run_file.write_text(text.replace("[privacy]", f"[privacy]\nbudget_epsilon = {spent + 0.01}"))
    folder.metrics.write_text("".join(folder.metrics.read_text().splitlines(keepends=True)[:4]))
    assert RunMonitor(folder.path).status().state == "spent"


def test_a_ledger_that_is_replaced_by_a_shorter_one_is_noticed(folder):
    monitor = RunMonitor(folder.path)
    monitor.status()
    lines = folder.ledger.read_bytes().splitlines(keepends=True)
    folder.ledger.write_bytes(b"".join(lines[:4]))
    with pytest.raises(LedgerError, match="shorter"):
        monitor.status()


def test_the_budget_is_shown(folder, monkeypatch):
    monkeypatch.setattr("unheard.privacy.run_ledger.check_configuration", lambda *_: None)  # the ledger names no budget
    text = folder.run_file.read_text()
    folder.run_file.write_text(text.replace("[privacy]", "[privacy]\nbudget_epsilon = 99.0"))
    assert RunMonitor(folder.path).status().budget == 99.0


@pytest.mark.parametrize("accountant", [None, "rdp", "moments"])
def test_a_budget_is_compared_with_the_epsilon_of_its_own_accountant(folder, monkeypatch, accountant):
    """Each figure is that of the accountant that keeps the budget: what was spent, and whether a further round fits."""
    monkeypatch.setattr("unheard.privacy.run_ledger.check_configuration", lambda *_: None)  # the ledger names no budget
    monkeypatch.setattr(RunFolder, "check_metrics", lambda folder: None)  # its checkpoints are of a later round
    folder.metrics.write_text("".join(folder.metrics.read_text().splitlines(keepends=True)[:4]))
    ledger = Ledger.read(folder.ledger)
    text = re.sub(r"budget_accountant.*\n", "", folder.run_file.read_text())
    spent, after = (
        epsilons([*ledger.events, *ledger.events[:more]], ledger.facts["delta"])[accountant or "rdp"] for more in (0, 1)
    )
    by_other = epsilons(ledger.events, ledger.facts["delta"])["rdp" if accountant == "moments" else "moments"]
    assert abs(spent - by_other) > 0.01
    named = "" if accountant is None else f'\nbudget_accountant = "{accountant}"'
    for budget, state in ((None, "stopped"), (after * 0.999, "spent"), (after * 1.001, "stopped")):
        limit = "" if budget is None else f"\nbudget_epsilon = {budget}"
        folder.run_file.write_text(text.replace("[privacy]", f"[privacy]{limit}{named}"))
        status = RunMonitor(folder.path).status()
        assert (status.state, status.budget, status.accountant) == (state, budget, accountant or "rdp")
        assert status.epsilon == pytest.approx(spent)
        assert status.delta == ledger.facts["delta"]


def test_what_was_charged_before_the_first_round_counts_while_a_run_is_watched(folder, monkeypatch):
    monkeypatch.setattr("unheard.report.run_record.read_run_ledger", lambda folder: Ledger.read(folder.ledger))
    facts = Ledger.read(folder.ledger).facts
    spent = [Gaussian(noise_multiplier=3.0), FailureProbability(delta=1e-6)]
    spent += [PoissonGaussian(sampling_prob=0.2, noise_multiplier=1.0)]
    folder.ledger.unlink()
    ledger = Ledger.create(folder.ledger, facts)
    for event in spent[:2]:
        ledger.charge(event, 0)
    monitor = RunMonitor(folder.path)
    assert monitor.status().epsilon == RunningEpsilon(facts["delta"], events=spent[:2]).epsilon
    ledger.charge(spent[2], 0)
    assert monitor.status().epsilon == RunningEpsilon(facts["delta"], events=spent).epsilon


@pytest.mark.parametrize(("evaluated", "state"), [(0, "stopped"), (9, "stopped"), (10, "complete"), (11, "complete")])
def test_an_ended_run_is_complete_from_its_last_planned_round_on(evaluated, state):
    folder = SimpleNamespace(statement=SimpleNamespace(exists=lambda: True))
    monitor = SimpleNamespace(folder=folder, _budget=None)
    assert RunMonitor._state(monitor, evaluated, 10, 0.0) == state  # pyright: ignore[reportArgumentType]
