"""Runs that train together have the same results as runs that train alone, and do not affect each other."""

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import unheard
from unheard.errors import InvalidValue, LedgerError
from unheard.privacy.accountants import epsilon
from unheard.privacy.ledger import Ledger
from unheard.privacy.run_ledger import JointLedger
from unheard.randomness import ReproducibleStreams
from unheard.run_folder import RunFolder
from unheard.training import loop
from unheard.training.checkpoint import load_model, newest_checkpoint
from unheard.training.loop import train_together


@pytest.fixture
def runs(store, model, plan) -> list[unheard.Run]:
    """Return runs that differ in S, noise, learning rate, seed, clip and length."""
    plans = [
        plan,
        replace(plan, clip=unheard.FlatClip(norm=0.3)),
        replace(plan, clip=unheard.PerLayerClip(norm=1.0), noise=unheard.GaussianNoise(noise_multiplier=0.9)),
        replace(plan, update=replace(plan.update, learning_rate=0.3), clip=unheard.NoClip(), noise=unheard.NoNoise()),
    ]
    return [
        unheard.Run(
            corpus=store.path,
            model=model,
            plan=p,
            training=unheard.Training(rounds=3 + k % 2, checkpoint_every=2, reproducible_seed=k),
            evaluation=unheard.Evaluation(every=2),
            delta=1e-3,
        )
        for k, p in enumerate(plans)
    ]


def final(folder: Path, model) -> torch.Tensor:
    return load_model(folder / "model.safetensors", model)


def test_each_run_is_what_it_would_be_alone(runs, model, tmp_path):
    for k, run in enumerate(runs):
        list(unheard.train(run, tmp_path / f"alone-{k}", allow_no_privacy=True))
    places = [(run, tmp_path / f"together-{k}") for k, run in enumerate(runs)]
    reports = list(train_together(places, allow_no_privacy=True))
    assert [sum(place == k for place, _ in reports) for k in range(4)] == [3, 4, 3, 4]
    for k in range(4):
        ours, alone = (tmp_path / f"{name}-{k}" for name in ("together", "alone"))
        assert torch.equal(final(ours, model), final(alone, model))
        assert Ledger.read(ours / "ledger.jsonl").events == Ledger.read(alone / "ledger.jsonl").events
        assert (ours / "metrics.jsonl").read_text() == (alone / "metrics.jsonl").read_text()


def test_runs_that_are_left_in_the_middle_are_saved_and_resume(runs, model, tmp_path):
    places = [(run, tmp_path / f"parts-{k}") for k, run in enumerate(runs)]
    for _, report in (going := train_together(places, allow_no_privacy=True)):
        if report.round == 2:
            break
    going.close()
    list(train_together(places, allow_no_privacy=True))
    list(train_together([(run, tmp_path / f"whole-{k}") for k, run in enumerate(runs)], allow_no_privacy=True))
    for k in range(4):
        assert torch.equal(final(tmp_path / f"parts-{k}", model), final(tmp_path / f"whole-{k}", model))


def test_a_run_that_reaches_its_budget_leaves_the_others_running(runs, tmp_path):
    event = runs[0].plan.at(0, runs[0].model.layout).event()
    enough = epsilon([(event, 2)], runs[0].claimed_delta, "rdp") + 1e-6
    limited = replace(runs[0], budget=unheard.Budget(epsilon=enough, delta=runs[0].claimed_delta))
    reports = list(train_together([(limited, tmp_path / "limited"), (runs[1], tmp_path / "free")]))
    assert [(index, report.round, report.stopped is not None) for index, report in reports] == [
        *[(0, 1, False), (1, 1, False), (0, 2, False), (1, 2, False)],
        *[(0, 2, True), (1, 3, False), (1, 4, False)],
    ]
    assert len(Ledger.read(tmp_path / "limited" / "ledger.jsonl")) == 2
    assert all((tmp_path / name / "statement.json").exists() for name in ("limited", "free"))


def test_an_error_in_one_run_is_raised_and_all_runs_are_saved(runs, model, tmp_path, monkeypatch):
    places = [(run, tmp_path / f"run-{k}") for k, run in enumerate(runs[:2])]
    real = RunFolder.append_metrics

    def disk_full(folder, row):
        if folder.path.name == "run-0":
            raise OSError("No space left on device")
        real(folder, row)

    monkeypatch.setattr(RunFolder, "append_metrics", disk_full)
    with pytest.raises(OSError, match="No space left"):
        list(train_together(places))
    monkeypatch.undo()
    for _, folder in places:
        assert newest_checkpoint(RunFolder(folder)).ledger_length <= len(Ledger.read(folder / "ledger.jsonl")) == 2
        assert (folder / "statement.json").exists()
    list(train_together(places))
    assert [newest_checkpoint(RunFolder(folder)).state.round for _, folder in places] == [3, 4]


def test_a_folder_of_another_run_is_not_continued(runs, tmp_path):
    list(unheard.train(runs[0], tmp_path / "a"))
    with pytest.raises(LedgerError, match="another configuration"):
        train_together([(runs[1], tmp_path / "a")], allow_no_privacy=True)


def test_models_of_two_shapes_are_refused(runs, store, tmp_path):
    other = replace(runs[1], model=unheard.TiedLSTM(vocabulary_size=50, embedding_size=4))
    with pytest.raises(InvalidValue, match="the same model"):
        train_together([(runs[0], tmp_path / "a"), (other, tmp_path / "b")], allow_no_privacy=True)


def test_two_runs_in_one_folder_are_refused(runs, tmp_path):
    with pytest.raises(InvalidValue, match="of its own"):
        train_together([(runs[0], tmp_path / "a"), (runs[1], tmp_path / "a")], allow_no_privacy=True)


def test_training_no_runs_is_an_error(tmp_path):
    with pytest.raises(InvalidValue, match="at least one run"):
        train_together([])


def test_noise_of_the_next_round_is_drawn_ahead_once_per_round(runs, tmp_path, monkeypatch):
    """The noise of a round is drawn while the round before it is charged. No noise is drawn that is not used."""
    drawn, turns, noise_of, run_rounds = [], [], ReproducibleStreams.noise, loop.run_rounds
    monkeypatch.setattr(
        ReproducibleStreams,
        "noise",
        lambda self, attempt: (drawn.append((len(turns), attempt)), noise_of(self, attempt))[1],
    )
    monkeypatch.setattr(loop, "run_rounds", lambda *given: (run_rounds(*given), turns.append(0))[0])
    pair = [replace(run, ledger=tmp_path / f"{k}.jsonl") for k, run in enumerate(runs[:2])]
    assert [run.training.rounds for run in pair] == [3, 4]
    list(train_together([(run, tmp_path / f"r{k}") for k, run in enumerate(pair)]))
    # In turn 0 the noise of attempts 0 and 1 of both runs, then that of the next attempt.
    assert sorted(drawn) == [(0, 0), (0, 0), (0, 1), (0, 1), (1, 2), (1, 2), (2, 3)]


@pytest.mark.parametrize("is_shared", [False, True])
def test_ledgers_of_their_own_are_charged_at_the_same_time(runs, tmp_path, monkeypatch, is_shared):
    """Runs that share a ledger are charged one after the other."""
    together, most, charge = [], [], JointLedger.charge
    meeting = threading.Barrier(2)

    def slow(self, *given, **more):
        together.append(0)
        if not is_shared:
            meeting.wait(timeout=20)  # raises unless the other charge begins before this one ends
        most.append(len(together))
        charge(self, *given, **more)
        together.pop()

    monkeypatch.setattr(JointLedger, "charge", slow)
    pair = [replace(runs[k], ledger=tmp_path / ("all.jsonl" if is_shared else f"{k}.jsonl")) for k in (0, 2)]
    list(train_together([(run, tmp_path / f"r{k}") for k, run in enumerate(pair)]))
    assert len(most) == 6
    assert max(most) == (1 if is_shared else 2)
