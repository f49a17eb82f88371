"""Watching a run that is being written, and TensorBoard's event files: read while torn, never twice, never out of step."""

import json
import os
import shutil
import struct
import time

import pytest

from tests.report.making import ROUNDS
from unheard.errors import LedgerError
from unheard.privacy.accountants import epsilons
from unheard.privacy.ledger import Ledger
from unheard.report.run_monitor import SILENT_AFTER, RunMonitor
from unheard.report.tensorboard import FILE, update_event_file
from unheard.run_folder import RunFolder
from unheard.storage import locked


@pytest.fixture
def folder(runs, tmp_path) -> RunFolder:
    shutil.copytree(runs[1], tmp_path / "private")
    return RunFolder(tmp_path / "private")


def test_a_complete_run(folder):
    standing = RunMonitor(folder.path).status()
    assert standing.state == "complete"
    assert (standing.round, standing.rounds) == (ROUNDS, ROUNDS)
    ledger = Ledger.read(folder.ledger)
    assert standing.epsilon == pytest.approx(epsilons(ledger.events, ledger.facts["delta"])["rdp"])
    assert standing.newest["round"] == ROUNDS
    assert standing.seconds_left is None


def test_a_run_is_followed_while_it_is_written(folder):
    """The ledger and the metrics grow by halves of lines; every look is of what is whole."""
    ledger, metrics = folder.ledger.read_bytes(), folder.metrics.read_bytes()
    lines, rows = ledger.splitlines(keepends=True), metrics.splitlines(keepends=True)
    folder.statement.unlink()
    folder.ledger.write_bytes(b"".join(lines[:3]) + lines[3][:20])
    folder.metrics.write_bytes(rows[0] + rows[1][:10])
    live = RunMonitor(folder.path)
    first = live.status()
    assert first.state == "training"
    assert [p["round"] for p in first.points] == [2]
    assert first.round == 2  # the newest evaluation: two rounds were charged and evaluated
    folder.ledger.write_bytes(b"".join(lines[:9]))
    folder.metrics.write_bytes(b"".join(rows[:3]))
    second = live.status()
    assert second.round == 7  # eight are charged; the eighth is being computed
    assert second.epsilon > first.epsilon
    assert second.rounds_per_second
    assert second.seconds_left
    folder.ledger.write_bytes(ledger)
    folder.metrics.write_bytes(metrics)
    folder.statement.write_text("{}")
    assert live.status().state == "complete"


def test_a_run_that_was_stopped_and_one_that_fell_silent(folder):
    rows = folder.metrics.read_text().splitlines(keepends=True)
    folder.metrics.write_text("".join(rows[:2]))
    standing = RunMonitor(folder.path).status()
    assert standing.state == "stopped"
    assert standing.round == ROUNDS  # as saved, though the last evaluation is older
    folder.statement.unlink()
    then = time.time() - SILENT_AFTER - 5
    os.utime(folder.ledger, (then, then))
    assert RunMonitor(folder.path).status().state == "silent"


def test_a_round_that_was_charged_and_then_lost_is_not_counted(folder):
    """Ctrl-C while a round is computed: it was paid for, and the model saved is of the round before."""
    rows = folder.metrics.read_text().splitlines(keepends=True)
    folder.metrics.write_text("".join(rows[:2]))
    newest = sorted(folder.checkpoints.iterdir())[-1]
    newest.rename(newest.with_name(f"round-{ROUNDS - 1:08d}.safetensors"))
    assert RunMonitor(folder.path).status().round == ROUNDS - 1


def test_a_run_that_its_budget_stopped_is_not_told_to_go_on(folder):
    text, spent = folder.run_file.read_text(), RunMonitor(folder.path).status().epsilon
    folder.run_file.write_text(text.replace("[privacy]", f"[privacy]\nbudget_epsilon = {spent + 0.01}"))
    folder.metrics.write_text("".join(folder.metrics.read_text().splitlines(keepends=True)[:4]))
    assert RunMonitor(folder.path).status().state == "spent"


def test_a_ledger_that_is_replaced_by_a_shorter_one_is_noticed(folder):
    live = RunMonitor(folder.path)
    live.status()
    lines = folder.ledger.read_bytes().splitlines(keepends=True)
    folder.ledger.write_bytes(b"".join(lines[:4]))
    with pytest.raises(LedgerError, match="shorter"):
        live.status()


def test_the_budget_is_shown(folder):
    text = folder.run_file.read_text()
    folder.run_file.write_text(text.replace("[privacy]", "[privacy]\nbudget_epsilon = 99.0"))
    assert RunMonitor(folder.path).status().budget == 99.0


def events(folder: RunFolder):
    """The records of the event file, read by hand: length, checksum, content, checksum."""
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import masked_crc32c

    content, place, found = (folder.tensorboard / FILE).read_bytes(), 0, []
    while place < len(content):
        (length,) = struct.unpack_from("<Q", content, place)
        body = content[place + 12 : place + 12 + length]
        assert struct.unpack_from("<I", content, place + 12 + length)[0] == masked_crc32c(body)
        found.append(Event.FromString(body))
        place += 16 + length
    return found


def test_event_files_hold_every_evaluation_once(folder):
    assert update_event_file(folder) == ROUNDS // 2
    assert update_event_file(folder) == 0
    version, *rest = events(folder)
    assert version.file_version == "brain.Event:2"
    assert [event.step for event in rest] == list(range(2, ROUNDS + 1, 2))
    metrics = folder.read_metrics()
    for event, row in zip(rest, metrics, strict=True):
        figures = {value.tag: value.simple_value for value in event.summary.value}
        assert figures["held_out/AccuracyTop1"] == pytest.approx(row["accuracy_top1"])
        assert figures["privacy/epsilon"] == pytest.approx(row["epsilon"])


def test_an_infinite_epsilon_is_left_out(runs, tmp_path):
    shutil.copytree(runs[0], tmp_path / "plain")
    folder = RunFolder(tmp_path / "plain")
    update_event_file(folder)
    tags = {value.tag for event in events(folder) for value in event.summary.value}
    assert "privacy/epsilon" not in tags
    assert "held_out/perplexity" in tags


def test_event_files_only_grow_and_mend_their_torn_end(folder):
    update_event_file(folder)
    path = folder.tensorboard / FILE
    before = path.read_bytes()
    path.write_bytes(before[:-5])
    with open(folder.metrics, "a") as file:
        file.write(json.dumps({"round": 14, "accuracy_top1": 0.5}) + "\n" + '{"round": 16')
    assert update_event_file(folder) == 2
    assert [event.step for event in events(folder)][-2:] == [ROUNDS, 14]
    with open(folder.metrics, "a") as file:
        file.write(', "accuracy_top1": 0.75}\n{"round": 14, "accuracy_top1": 0.6}\n')
    grown = path.read_bytes()
    assert update_event_file(folder) == 2
    assert path.read_bytes().startswith(grown)
    assert [event.step for event in events(folder)][-2:] == [16, 14]  # a round done again is logged again


def test_two_who_mirror_at_once_write_once(folder):
    folder.tensorboard.mkdir(exist_ok=True)
    with locked(folder.tensorboard / ".lock"):
        assert update_event_file(folder) == 0
    assert update_event_file(folder) == ROUNDS // 2


def test_no_metrics_no_events(folder):
    folder.metrics.unlink()
    assert update_event_file(folder) == 0
