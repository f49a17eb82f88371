"""The TensorBoard event file: every evaluation once, in order, also after a crash."""

import json
import shutil
import struct

import pytest

from tests.report.builders import ROUNDS
from unheard.report.tracking import EVENT_FILE, update_event_file
from unheard.run_folder import RunFolder
from unheard.storage import locked


@pytest.fixture
def folder(runs, tmp_path) -> RunFolder:
    shutil.copytree(runs[1], tmp_path / "private")
    return RunFolder(tmp_path / "private")


def events(folder: RunFolder):
    """The records of the event file, read by hand: length, checksum, content, checksum."""
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import masked_crc32c

    content, offset, events_read = (folder.tensorboard / EVENT_FILE).read_bytes(), 0, []
    while offset < len(content):
        (length,) = struct.unpack_from("<Q", content, offset)
        body = content[offset + 12 : offset + 12 + length]
        assert struct.unpack_from("<I", content, offset + 12 + length)[0] == masked_crc32c(body)
        events_read.append(Event.FromString(body))
        offset += 16 + length
    return events_read


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


def test_the_event_file_holds_no_time_of_the_day(folder):
    """The duration of a round depends on its users' text, so the times of two evaluations would reveal something."""
    update_event_file(folder)
    assert [event.wall_time for event in events(folder)] == [0, *range(2, ROUNDS + 1, 2)]


def test_an_infinite_epsilon_is_left_out(runs, tmp_path):
    shutil.copytree(runs[0], tmp_path / "plain")
    folder = RunFolder(tmp_path / "plain")
    update_event_file(folder)
    tags = {value.tag for event in events(folder) for value in event.summary.value}
    assert "privacy/epsilon" not in tags
    assert "held_out/perplexity" in tags


def test_event_files_only_grow_and_repair_an_incomplete_record(folder):
    update_event_file(folder)
    path = folder.tensorboard / EVENT_FILE
    before = path.read_bytes()
    path.write_bytes(before[:-5])
    with open(folder.metrics, "a") as file:
        file.write(json.dumps({"round": 14, "accuracy_top1": 0.5}) + "\n" + '{"round": 16')
    assert update_event_file(folder) == 2
    assert [event.step for event in events(folder)][-2:] == [ROUNDS, 14]
    with open(folder.metrics, "a") as file:
        file.write(', "accuracy_top1": 0.75}\n{"round": 14, "accuracy_top1": 0.6}\n')
    grown = path.read_bytes()
    assert update_event_file(folder) == 1
    assert path.read_bytes().startswith(grown)
    assert [event.step for event in events(folder)][-2:] == [14, 14]  # a round done again is logged again


def test_evaluations_that_resume_removes_and_repeats_are_logged_again(folder):
    update_event_file(folder)
    rows = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    for accuracy, length in ((0.9, len(rows)), (0.8, len(rows) - 1)):
        repeated = [*rows[:-2], *({**row, "accuracy_top1": accuracy} for row in rows[-2:length])]
        folder.metrics.write_text("".join(json.dumps(row) + "\n" for row in repeated))
        assert update_event_file(folder) == length - len(rows) + 2
        assert update_event_file(folder) == 0
    assert [event.step for event in events(folder)][-3:] == [ROUNDS - 2, ROUNDS, ROUNDS - 2]


def test_two_processes_write_every_record_once(folder):
    folder.tensorboard.mkdir(exist_ok=True)
    with locked(folder.tensorboard / ".lock"):
        assert update_event_file(folder) == 0
    assert update_event_file(folder) == ROUNDS // 2


def test_no_metrics_no_events(folder):
    folder.metrics.unlink()
    assert update_event_file(folder) == 0
