"""Batches run several steps in parallel within a time limit, and bundles pack results and runs in progress."""

import shutil
import sys
import time
import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from reproduction.batch import BatchStep, read_batch, run_batch
from reproduction.bundles import bundle, restore, unpack
from reproduction.private_run import corpus_of, is_measured

import unheard
from reproduction import batch as batch_module
from tests.reproduction.test_private_results import flat, make_run
from unheard.privacy.ledger import Ledger


def test_every_step_of_a_batch_has_runs_and_no_run_is_trained_twice(tmp_path):
    (tmp_path / "chosen_S.json").write_text('{"S": 8}')
    batches = tomllib.loads((Path(batch_module.__file__).parent / "schedule.toml").read_text())["batch"]
    names = []
    for batch in batches:
        for step in read_batch(batch["name"]):
            corpus = "" if corpus_of(step.name) == "reviews_81" else f"{corpus_of(step.name)}/"
            runs = [f"{corpus}{name}" for name in step.runs(tmp_path, 1.0)]
            assert runs, step
            models = {str(tables["model"]) for tables in step.runs(tmp_path, 1.0).values()}
            assert len(models) == 1, step  # a process trains runs of one model
            names += runs
    assert len(names) == len(set(names))
    seeded = {f"{name}-seed{k}" for k in (1, 2, 3) for name in ("baseline", "S15-sigma0.012-C1250", "trade-S20")}
    assert seeded | {"private-repetition3", "z1-C1667", "baseline-C1250-seed2", "then-S7.9-per-layer-seed3"} < set(
        names
    )
    with pytest.raises(SystemExit, match="no batch Z: choose from A"):
        read_batch("Z")


def make_work(work: Path, names: dict[str, bool]) -> None:
    """Create a work folder with runs that are complete (True) or in progress."""
    (work / "reviews_81").mkdir(parents=True)
    (work / "reviews_81" / "vocabulary.txt").write_text("a\n")
    (work / "ledgers").mkdir()
    for name, is_complete in names.items():
        folder = work / "runs" / name
        make_run(folder, flat(20), rounds=300)
        paths = f'[corpus]\npath = "{work}/reviews_81"\n[privacy]\nledger = "{work}/ledgers/{name}.jsonl"\n'
        (folder / "run.toml").write_text(paths)
        (folder / "ledger.jsonl").write_text("charges")
        (folder / "tokens.json").write_text("{}")
        (folder / "vocabulary.txt").write_text("a\n")
        (folder / "model.safetensors").write_bytes(np.random.default_rng(1).bytes(3000))
        (folder / "checkpoints").mkdir()
        for at in (200, 300):
            (folder / "checkpoints" / f"round-{at:08d}.safetensors").write_bytes(np.random.default_rng(at).bytes(3000))
        if is_complete:
            (folder / "facts.json").write_text("{}")
        (work / "ledgers" / f"{name}.jsonl").write_text("charges of the population")


def test_a_bundle_brings_back_results_and_the_state_of_runs_in_progress(tmp_path, capsys):
    work, elsewhere = tmp_path / "work", tmp_path / "elsewhere"
    make_work(work, {"z1-C1250": True, "baseline-seed1": True, "estimate-seed1": False, "estimate-seed2": False})
    make_work(elsewhere, {})
    all_files = [tmp_path / "all.tar.gz", tmp_path / "all.tar.gz.state"]
    assert bundle(work, tmp_path / "all.tar.gz") == all_files
    files = bundle(work, tmp_path / "out" / "a.tar.gz", part=2000, limit=7000)
    assert {file.name for file in files} > {"a.tar.gz.00", "a.tar.gz.01", "a.tar.gz.state.00", "a.tar.gz.state.01"}
    assert all(file.stat().st_size <= 2000 for file in files)
    assert "z1-C1250: its model is left out" in capsys.readouterr().out  # both runs in progress come first
    restore(all_files, elsewhere)
    whole, small, going = (elsewhere / "runs" / name for name in ("z1-C1250", "baseline-seed1", "estimate-seed1"))
    assert (whole / "model.safetensors").read_bytes() == (work / "runs" / "z1-C1250" / "model.safetensors").read_bytes()
    assert not (small / "model.safetensors").exists()
    assert not (small / "ledger.jsonl").exists()
    assert is_measured(small, 300)
    assert [path.name for path in (going / "checkpoints").iterdir()] == ["round-00000300.safetensors"]
    assert f'"{elsewhere}/reviews_81"' in (going / "run.toml").read_text()
    assert (elsewhere / "ledgers" / "estimate-seed2.jsonl").read_text() == "charges of the population"
    bundle(elsewhere, tmp_path / "again.tar.gz")  # complete runs without a model are no error
    with pytest.raises(FileExistsError):
        restore(all_files, elsewhere)


def test_the_results_of_a_bundle_survive_the_loss_of_a_part_of_the_state(tmp_path):
    work, out = tmp_path / "work", tmp_path / "out"
    make_work(work, {"then-S10-seed1": False, "then-S10-seed2": False})
    files = bundle(work, tmp_path / "a.tar.gz", part=2000)
    with pytest.raises(SystemExit, match=r"a\.tar\.gz\.state: a part is missing"):
        unpack(files[:-2], out)  # the last part alone may hold nothing but padding
    for name in ("then-S10-seed1", "then-S10-seed2"):
        assert (out / name / "metrics.jsonl").read_bytes() == (work / "runs" / name / "metrics.jsonl").read_bytes()


def test_no_damaged_bundle_is_unpacked(tmp_path):
    """A bit may fall into the content of a file, where the format of the archive has no checksum."""
    work = tmp_path / "work"
    make_work(work, {"then-S10-seed1": False, "then-S10-seed2": False})
    files = bundle(work, tmp_path / "a.tar.gz", part=3000)
    parts = [file for file in files if ".state" in file.name]
    assert len(parts) > 1
    for file in parts:
        content = file.read_bytes()
        for at in range(0, len(content), 700):
            file.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
            with pytest.raises(SystemExit, match=r"a\.tar\.gz\.state: a part is missing or damaged"):
                unpack(parts, tmp_path / "out")
        file.unlink()
        with pytest.raises(SystemExit, match="missing or damaged"):
            unpack([part for part in parts if part != file], tmp_path / "out")
        file.mkdir()
        with pytest.raises(SystemExit, match="missing or damaged"):
            unpack(parts, tmp_path / "out")
        file.rmdir()
        file.write_bytes(content)
    assert list((tmp_path / "out").iterdir()) == []
    assert len(unpack(files, tmp_path / "out")) == 2


def test_no_run_is_restored_from_one_half_of_a_bundle(tmp_path):
    """It would start again from round 0, and what it was charged would be lost."""
    work, elsewhere = tmp_path / "work", tmp_path / "elsewhere"
    make_work(work, {"then-S10-seed1": False, "private": True})
    make_work(elsewhere, {})
    results, state = bundle(work, tmp_path / "a.tar.gz")
    for half in (results, state):
        with pytest.raises(SystemExit, match="give both files of its bundle"):
            restore([half], elsewhere)
        assert not (elsewhere / "runs").exists()
    restore([results, state], elsewhere)
    assert {path.name for path in (elsewhere / "runs").iterdir()} == {"then-S10-seed1", "private"}


def test_a_bundle_replaces_all_files_of_the_one_before(tmp_path):
    work, target = tmp_path / "work", tmp_path / "out" / "a.tar.gz"
    make_work(work, {"then-S10-seed1": False, "then-S10-seed2": False})
    bundle(work, target, part=1000)
    files = bundle(work, target)
    assert [file.name for file in files] == [target.name, f"{target.name}.state"]
    assert sorted(target.parent.iterdir()) == files
    assert [file.name for file in bundle(work, target, limit=0)] == [target.name]
    assert list(target.parent.iterdir()) == [target]


def test_a_small_bundle_keeps_the_models_that_other_runs_begin_from(tmp_path, capsys):
    work, elsewhere = tmp_path / "work", tmp_path / "elsewhere"
    make_work(work, {"trade-S20-seed3": True, "then-S10-seed1": False, "then-S10-seed2": False, "private": True})
    make_work(elsewhere, {})
    bundle(work, tmp_path / "a.tar.gz", limit=7000)
    said = capsys.readouterr().out
    assert "trade-S20-seed3" not in said
    assert "then-S10-seed1" not in said
    assert "then-S10-seed2: the state of the run in progress is left out" in said
    assert "private: its model is left out" in said
    restore([tmp_path / "a.tar.gz", tmp_path / "a.tar.gz.state"], elsewhere)
    assert "then-S10-seed2: starts again" in capsys.readouterr().out
    runs = {path.name for path in (elsewhere / "runs").iterdir() if not path.name.startswith(".")}
    assert runs == {"trade-S20-seed3", "then-S10-seed1", "private"}
    unpack([tmp_path / "a.tar.gz"], tmp_path / "shown")
    assert (tmp_path / "shown" / "then-S10-seed2" / "metrics.jsonl").exists()  # its evaluations are not lost


def test_the_past_noise_of_a_run_in_progress_is_in_no_bundle(tmp_path, capsys):
    work = tmp_path / "work"
    make_work(work, {"epsilon8-correlated": False, "epsilon8-independent": True})
    (work / "runs" / "epsilon8-correlated" / "noise").mkdir()
    bundle(work, tmp_path / "a.tar.gz")
    assert "epsilon8-correlated: the state of the run in progress is left out" in capsys.readouterr().out
    (_, kept) = unpack([tmp_path / "a.tar.gz", tmp_path / "a.tar.gz.state"], tmp_path / "out")
    assert (kept / "model.safetensors").exists()
    assert not (tmp_path / "out" / "epsilon8-correlated" / "checkpoints").exists()


def test_a_bundle_of_a_run_that_trains_can_be_restored_and_continues(run, tmp_path):
    """If the machine is lost after the bundle was written, rounds since the newest checkpoint are charged again."""
    work, elsewhere = tmp_path / "work", tmp_path / "elsewhere"
    for place in (work, elsewhere):
        (place / "ledgers").mkdir(parents=True)
        shutil.copytree(run.corpus, place / "reviews_81")
    run = replace(run, corpus=work / "reviews_81", ledger=work / "ledgers" / "private.jsonl")
    reports = unheard.train(run, work / "runs" / "private")
    assert [next(reports).round for _ in range(3)] == [1, 2, 3]  # the checkpoint is of round 2
    restore(bundle(work, tmp_path / "live.tar.gz"), elsewhere)
    assert [report.round for report in unheard.resume(elsewhere / "runs" / "private")] == [3, 4, 5, 6]
    rounds = [entry.round for entry in Ledger.read(elsewhere / "runs" / "private" / "ledger.jsonl").entries]
    assert rounds == [0, 1, 2, 2, 3, 4, 5]
    assert [report.round for report in reports] == [4, 5, 6]


@pytest.mark.parametrize("written", ["private", "private:2", "trade-offs *-seed1", "z1-C1250:3 z1*"])
def test_a_step_is_written_as_it_is_read(written):
    assert str(BatchStep.parse(written)) == written


@pytest.fixture
def processes(tmp_path, monkeypatch):
    """Create steps whose process records its name when it ends. A step "until-NAME" waits until NAME has ended."""
    log = tmp_path / "log"
    log.touch()
    program = (
        "import sys, time, pathlib\n"
        "name, log = sys.argv[1], pathlib.Path(sys.argv[2])\n"
        "while name.startswith('until-') and name[6:] not in log.read_text().split():\n"
        "    time.sleep(0.05)\n"
        "print(name, file=open(log, 'a'))"
    )

    def command(step, *given):
        script = "raise SystemExit(3)" if step.name == "fails" else program
        return [sys.executable, "-c", script, step.name, str(log)]

    monkeypatch.setattr(batch_module, "_command", command)
    monkeypatch.setattr(BatchStep, "runs", lambda *given: {"run": {"training": {"rounds": 5}}})
    (tmp_path / "chosen_S.json").write_text('{"S": 8}')
    return log


def test_steps_run_two_at_a_time_in_their_order_and_are_bundled_after_each(tmp_path, monkeypatch, processes, capsys):
    ended = []
    (tmp_path / "runs").mkdir()

    def bundle_at_this_time(work, target, limit):
        ended.append(processes.read_text().split())
        return [target]

    monkeypatch.setattr(batch_module, "bundle", bundle_at_this_time)
    steps = [BatchStep("until-third"), BatchStep("fails"), BatchStep("second"), BatchStep("third"), BatchStep("last")]
    # If steps ran one at a time, this would not end.
    run_batch(steps, tmp_path, bundled=tmp_path / "a.tar.gz", processes=2)
    assert processes.read_text().split()[:2] == ["second", "third"]
    assert sorted(processes.read_text().split()[2:]) == ["last", "until-third"]
    assert ["second"] in ended
    assert len(ended[-1]) == 4
    assert "fails: failed with exit status 3" in capsys.readouterr().out


def test_no_step_begins_when_the_time_is_over_and_complete_steps_are_passed_over(
    tmp_path, monkeypatch, processes, capsys
):
    monkeypatch.setattr(BatchStep, "is_complete", lambda step, *given: step.name == "complete")
    steps = [BatchStep("complete"), BatchStep("first"), BatchStep("late")]
    clock = iter([0.0, 0.0, 10.0])
    monkeypatch.setattr(batch_module, "time", SimpleNamespace(time=lambda: next(clock, 75.0), sleep=time.sleep))
    run_batch(steps, tmp_path, bundled=tmp_path / "a.tar.gz", stop_after=100.0)  # at 75 s less than SHORTEST is left
    assert processes.read_text().split() == ["first"]
    assert "late: not started" in capsys.readouterr().out


def test_a_step_waits_for_the_runs_that_it_begins_from(tmp_path):
    (tmp_path / "chosen_S.json").write_text('{"S": 8}')
    step = BatchStep.parse("trade-offs-adjusted *-seed1")
    assert not step.is_ready(tmp_path, 1.0)
    make_run(tmp_path / "runs" / "trade-S20-seed1", flat(20))
    (tmp_path / "runs" / "trade-S20-seed1" / "facts.json").write_text("{}")
    assert step.is_ready(tmp_path, 1.0)
    assert not BatchStep.parse("trade-offs-adjusted *-seed2").is_ready(tmp_path, 1.0)
    assert BatchStep.parse("trade-offs *-seed2").is_ready(tmp_path, 1.0)


def test_the_command_of_a_step_says_which_runs_and_until_when():
    command = batch_module._command(BatchStep.parse("private:2"), Path("work"), "cpu", 1234.5, 1.0)
    assert command[1:6] == ["-m", "reproduction.private_run", "run", "private", "--work"]
    assert command[command.index("--repetition") + 1] == "2"
    assert command[command.index("--stop-at") + 1] == "1234.5"
