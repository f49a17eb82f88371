"""A run survives kill -9 at every step and inside every write, full and read-only disks, and concurrent processes."""

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

import unheard
from tests.faults.inject import Steps, disk_full, every, in_a_child, install, kill, output_of_a_child, read_only
from tests.stores import uncharged_copy
from unheard.audit.verification import verify
from unheard.corpus.store import write_private_json, write_store
from unheard.errors import UnheardError
from unheard.privacy.ledger import NO_LEDGERS, RECORD, Ledger
from unheard.privacy.population_ledger import PopulationLedger
from unheard.run_folder import RunFolder
from unheard.training.checkpoint import newest_checkpoint, released_model
from unheard.training.run import read_run_file

ROUNDS = 2
ENGINE = unheard.EngineChoice(kind="reference")
TAKES_MANY = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def small(tmp_path_factory, store):
    """A run of a few milliseconds: six users and a model with few parameters."""
    corpus = write_store(
        tmp_path_factory.mktemp("crash") / "corpus",
        train=[store.train.tokens(k)[:12] for k in range(6)],
        held_out=[store.held_out.tokens(0)[:12]],
        vocabulary=store.vocabulary,
        info=store.info,
    )
    return unheard.Run(
        corpus=corpus.path,
        model=unheard.TiedLSTM(vocabulary_size=50, embedding_size=2, hidden_size=2),
        plan=unheard.Plan(
            population=6,
            sampling=unheard.PoissonSampling(sampling_prob=0.5),
            update=unheard.FedAvg(batch_size=2, unroll=5, learning_rate=1.0),
            clip=unheard.FlatClip(norm=2.0),
            noise=unheard.NoNoise(),  # the test does not depend on the cost, and an infinite epsilon is quick to compute
        ),
        training=unheard.Training(rounds=ROUNDS, checkpoint_every=1),
        evaluation=unheard.Evaluation(every=1, max_tokens=10, unroll=5),
    )


@pytest.fixture
def place(small, tmp_path):
    """Create a folder for a run, with a copy of the corpus to which nothing is charged yet."""
    uncharged_copy(small.corpus, tmp_path / "corpus")
    return tmp_path


def go(run: unheard.Run, place: Path) -> None:
    """Start the run, or resume it, and complete it."""
    run = replace(run, corpus=place / "corpus")
    if (place / "r").exists():
        list(unheard.resume(place / "r", engine=ENGINE, allow_no_privacy=True))
    else:
        list(unheard.train(run, place / "r", engine=ENGINE, allow_no_privacy=True))


def names_of_steps(run, tmp_path_factory) -> list[str]:
    """Return the names of the steps of a run without a fault."""
    place = tmp_path_factory.mktemp("dry")
    uncharged_copy(run.corpus, place / "corpus")

    def list_steps() -> str:
        steps = Steps(at=-1, fault=kill)
        install(steps)
        go(run, place)
        return json.dumps(steps.names)

    return json.loads(output_of_a_child(list_steps))


def never_under_counted(place: Path) -> None:
    """Check that each round of every model in the folder is charged to the run and to the population."""
    folder = RunFolder(place / "r")
    if not folder.path.exists():
        return
    ledger, population = Ledger.read(folder.ledger), PopulationLedger.read(place / "corpus" / "ledger.jsonl")
    newest = newest_checkpoint(folder)
    run, _ = read_run_file(folder.run_file)
    seen = max(newest.state.round, released_model(folder.model, run.model)[1])
    assert {e.round for e in ledger.entries} >= set(range(seen))
    assert ledger.contains(newest.ledger_length, newest.ledger_head)
    assert len(population.events) >= len(ledger)
    assert sum(len(m.events) for m in population.runs.values()) == len(population.events)


def finishes(run: unheard.Run, place: Path, most: int) -> None:
    """Check that the same command completes the run, without a lost charge or a charge for a round that did not start."""
    before = len(Ledger.read(place / "r" / "ledger.jsonl")) if (place / "r").exists() else 0
    go(run, place)
    ledger = Ledger.read(place / "r" / "ledger.jsonl")
    assert len(ledger) >= before
    assert ROUNDS <= len(ledger) <= most
    assert newest_checkpoint(RunFolder(place / "r")).state.round == ROUNDS
    assert released_model(RunFolder(place / "r").model, run.model)[1] == ROUNDS
    problems = [(f.name, f.words) for f in verify(place / "r", place / "corpus") if f.fits is not True]
    assert problems == []


@pytest.mark.system
@TAKES_MANY
def test_kill_9_at_every_step_and_inside_every_write(small, place, tmp_path_factory):
    names = names_of_steps(small, tmp_path_factory)
    assert names.count("round: draw") == ROUNDS
    assert names.count("round: add") == ROUNDS
    assert names.count("file: fsync") > 25
    for at, half in every(names):
        for old in (*place.glob(".r*"), place / "r"):
            shutil.rmtree(old, ignore_errors=True)
        for old in (place / "corpus").glob("*ledger*"):
            old.unlink()
        write_private_json(place / "corpus" / RECORD, NO_LEDGERS)

        def work(at=at, half=half) -> None:
            install(Steps(at, kill, half=half))
            go(small, place)

        assert in_a_child(work) == -9, (at, half, names[at])
        never_under_counted(place)
        finishes(small, place, most=ROUNDS + 1)
        population = PopulationLedger.read(place / "corpus" / "ledger.jsonl")
        assert ROUNDS <= len(population.events) <= ROUNDS + 1


@TAKES_MANY
@pytest.mark.system
@pytest.mark.parametrize("fault", [disk_full, read_only])
def test_a_full_or_read_only_disk_at_any_write_is_one_clear_message_and_no_loss(small, place, tmp_path_factory, fault):
    names = [name for name in names_of_steps(small, tmp_path_factory) if name.startswith("file")]
    last = max(i for i, name in enumerate(names) if name == "file: write")
    # Each step near the end, where the evaluation of the last round is written, and some of the others.
    for at in sorted({*range(0, len(names), 3 if fault is read_only else 2), *range(last - 9, last + 1)}):
        for old in (*place.glob(".r*"), place / "r"):
            shutil.rmtree(old, ignore_errors=True)
        for old in (place / "corpus").glob("*ledger*"):
            old.unlink()
        write_private_json(place / "corpus" / RECORD, NO_LEDGERS)

        def work(at=at) -> str:
            steps = Steps(at, fault, writes_only=True)
            install(steps)
            try:
                go(small, place)
            except (UnheardError, OSError) as error:  # the command line prints this and exits with status 2
                return f"refused: {error}"
            return "done" if len(steps.names) > at else "the run has fewer steps"

        output = output_of_a_child(work)
        assert output.startswith(("refused: ", "the run has fewer")), (names[at], output)
        never_under_counted(place)
        finishes(small, place, most=ROUNDS + 1)


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_drawn(small, place, monkeypatch):
    def refuse(*args, **more):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("tempfile.mkdtemp", refuse)
    with pytest.raises(OSError, match="Read-only"):
        go(small, place)
    assert not (place / "r").exists()
    assert PopulationLedger.read(place / "corpus" / "ledger.jsonl").events == []


def test_a_clock_that_goes_back_changes_nothing(small, place, monkeypatch):
    """Nothing that is stored or charged depends on a clock."""
    for report in (
        going := unheard.train(
            replace(small, corpus=place / "corpus"), place / "r", engine=ENGINE, allow_no_privacy=True
        )
    ):
        if report.round == 1:
            break
    going.close()
    monkeypatch.setattr(time, "time", lambda: -1e9)
    monkeypatch.setattr(time, "monotonic", iter(range(10**9, 0, -1000)).__next__)
    for file in (place / "r").rglob("*"):
        os.utime(file, (0, 0))
    go(small, place)
    monkeypatch.undo()
    finishes(small, place, most=ROUNDS)


TRAIN = """
import sys, unheard
for report in unheard.resume(sys.argv[1], rounds=100000, engine=unheard.EngineChoice(kind="reference"), allow_no_privacy=True):
    print(report.round, flush=True)
"""


@pytest.mark.system
def test_of_two_processes_on_one_folder_one_trains_and_one_is_refused(small, place):
    unheard.train(replace(small, corpus=place / "corpus"), place / "r", engine=ENGINE, allow_no_privacy=True).close()
    first = subprocess.Popen([sys.executable, "-c", TRAIN, place / "r"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert first.stdout is not None
    first.stdout.readline()
    with pytest.raises(UnheardError, match="another process is training"):
        list(unheard.resume(place / "r", engine=ENGINE, allow_no_privacy=True))
    first.kill()
    first.communicate()
    never_under_counted(place)
    reached = newest_checkpoint(RunFolder(place / "r")).state.round
    assert [r.round for r in unheard.resume(place / "r", rounds=reached + 1, engine=ENGINE, allow_no_privacy=True)] == [
        reached + 1
    ]


def test_many_runs_at_once_on_one_store_are_all_charged(small, place):
    folders = [place / f"run{i}" for i in range(3)]
    for folder in folders:
        unheard.train(replace(small, corpus=place / "corpus"), folder, engine=ENGINE, allow_no_privacy=True).close()
    children = []
    for folder in folders:
        child = os.fork()
        if child == 0:
            status = 3
            try:
                list(unheard.resume(folder, rounds=20, engine=ENGINE, allow_no_privacy=True))
                status = 0
            finally:
                os._exit(status)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0, 0]
    population = PopulationLedger.read(place / "corpus" / "ledger.jsonl")
    assert sorted(len(m.events) for m in population.runs.values()) == [20, 20, 20]
    assert all(not [f for f in verify(folder) if f.fits is not True] for folder in folders)
