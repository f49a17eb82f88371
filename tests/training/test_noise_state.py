"""The secret state of correlated noise: written before its charge, recomputed exactly, never reused, deleted at the end."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from tests.faults.inject import Steps, in_a_child, install, kill, output_of_a_child
from tests.stores import uncharged_copy

import unheard
from unheard import storage
from unheard.audit import verification
from unheard.audit.verification import verify
from unheard.corpus.store import TokenStore, write_store
from unheard.errors import BudgetExceeded, CheckpointCorrupt, InvalidValue, LedgerError
from unheard.mechanism import correlated
from unheard.mechanism import noise as noise_module
from unheard.mechanism.sampling import CyclicPoissonSampling
from unheard.privacy import saved_statement
from unheard.privacy.accountants import Bound
from unheard.privacy.events import CorrelatedGaussian, PoissonGaussian, accounted
from unheard.privacy.ledger import Entry, Ledger
from unheard.privacy.matrix_factorization import optimise
from unheard.privacy.population_ledger import PopulationLedger
from unheard.privacy.run_ledger import JointLedger
from unheard.privacy.statement import render_text
from unheard.randomness import ReproducibleStreams
from unheard.run_folder import RunFolder
from unheard.training import loop, noise_state
from unheard.training.checkpoint import newest_checkpoint
from unheard.training.initialise import reopen_ledgers, streams_of
from unheard.training.run import read_saved_run

ENGINE = unheard.EngineChoice(kind="reference")
ROUNDS = 5
BANDED = (
    unheard.CyclicPoissonSampling(users_per_round=3, groups=2),
    unheard.CorrelatedNoise(noise_multiplier=1.0),
)
BLT = (
    unheard.MinSeparationSampling(separation=2),
    unheard.CorrelatedNoise(noise_multiplier=4.0, strategy="blt", buffers=2, rounds=8),
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory, store) -> Path:
    return write_store(
        tmp_path_factory.mktemp("noise") / "corpus",
        train=[store.train.tokens(k)[:12] for k in range(8)],
        held_out=[store.held_out.tokens(0)[:12]],
        vocabulary=store.vocabulary,
        info=store.info,
    ).path


@pytest.fixture
def place(corpus, tmp_path) -> Path:
    uncharged_copy(corpus, tmp_path / "corpus")
    return tmp_path


def run_of(place: Path, parts=BANDED, *, seed: int | None = None, rounds: int = ROUNDS) -> unheard.Run:
    return unheard.Run(
        corpus=place / "corpus",
        model=unheard.TiedLSTM(vocabulary_size=50, embedding_size=2, hidden_size=2),
        plan=unheard.Plan(
            population=8,
            sampling=parts[0],
            update=unheard.FedAvg(batch_size=2, unroll=5, learning_rate=1.0),
            clip=unheard.FlatClip(norm=2.0),
            noise=parts[1],
        ),
        training=unheard.Training(rounds=rounds, checkpoint_every=2, reproducible_seed=seed),
        evaluation=unheard.Evaluation(every=100, max_tokens=10, unroll=5),
        delta=0.01,
    )


@pytest.fixture(autouse=True)
def quick_statements(monkeypatch):
    """Replace the computation of statements, which takes a second each; other tests check their content."""

    def charges(_, entries, **__):
        return {"claim": "", "charges": len(entries)}

    for module in (loop, saved_statement):
        monkeypatch.setattr(module, "compute_statement", charges)
    if hasattr(verification, "best_epsilon"):
        monkeypatch.setattr(verification, "best_epsilon", lambda *_: Bound(epsilon=1.0, accountant="rdp"))


def go(
    run: unheard.Run, folder: Path, *, stop: int | None = None, rounds: int | None = None, new_noise: bool = False
) -> list[int]:
    """Start or resume the run, and stop after a round."""
    is_there, seen = folder.exists(), []
    reports = (
        unheard.resume(folder, engine=ENGINE, rounds=rounds, new_noise=new_noise)
        if is_there
        else unheard.train(run, folder, engine=ENGINE)
    )
    for report in reports:
        seen.append(report.round)
        if report.round == stop:
            reports.close()
            break
    return seen


def killed(run: unheard.Run, folder: Path, at: int) -> int:
    """Train or resume in a child that is killed at its step number `at`; 0 if it ended before."""

    def work() -> None:
        install(Steps(at, kill))
        go(run, folder)

    return in_a_child(work)


def model_of(folder: Path) -> torch.Tensor:
    return newest_checkpoint(RunFolder(folder)).state.params_P


def indices(folder: Path) -> list[int]:
    return [
        e.event.index for e in Ledger.read(folder / "ledger.jsonl").entries if isinstance(e.event, CorrelatedGaussian)
    ]


def fits(folder: Path) -> None:
    assert [(f.name, f.words) for f in verify(folder) if f.fits is not True] == []


@pytest.mark.parametrize("parts", [BANDED, BLT], ids=["banded", "blt"])
def test_a_run_that_is_left_and_resumed_has_the_noise_of_one_that_is_not(parts, place):
    whole, left = place / "whole", place / "left"
    go(run_of(place, parts, seed=3), whole)
    go(run_of(place, parts, seed=3), left, stop=1)
    go(run_of(place, parts, seed=3), left, stop=3)
    go(run_of(place, parts, seed=3), left)
    assert torch.equal(model_of(whole), model_of(left))
    assert indices(left) == list(range(ROUNDS))
    fits(left)


def test_the_key_is_on_disk_before_the_charges_and_the_charges_before_the_cohort(place, monkeypatch):
    order: list[str] = []
    spied = (
        (noise_state.NoiseState, "begin_attempt", "key"),
        (PopulationLedger, "charge", "population"),
        (Ledger, "charge", "run"),
        (CyclicPoissonSampling, "draw", "cohort"),
    )
    for owner, name, word in spied:
        real = getattr(owner, name)

        def after(*args, real=real, word=word, **more):
            result = real(*args, **more)
            if word == "key":
                lines = (place / "r" / "noise" / "keys.jsonl").read_bytes().splitlines()
                assert json.loads(lines[-1])["index"] == result.index
            order.append(word)
            return result

        monkeypatch.setattr(owner, name, after)
    go(run_of(place), place / "r")
    assert order == ["key", "population", "run", "cohort"] * ROUNDS


def test_noise_is_not_given_before_its_charge_nor_twice(place):
    folder = place / "r"
    go(run_of(place), folder, stop=1)
    ledger, state = opened(folder)
    turn = state.begin_attempt()
    with pytest.raises(LedgerError, match="before its charge"):
        state.normals()
    ledger.charge(run_of(place).plan.at(1, run_of(place).model.layout).event(turn.index), 1)
    state.normals().take(run_of(place).model.layout.total)
    with pytest.raises(LedgerError, match="twice"):
        state.normals()


def test_a_resumed_run_continues_with_the_coefficients_of_its_header(place, monkeypatch):
    """Another machine, or another version of scipy, may optimise to other numbers."""
    folder = place / "r"
    go(run_of(place), folder, stop=1)
    other = optimise("banded", rounds=99, separation=2)
    monkeypatch.setattr(correlated, "optimise", lambda *_, **__: other)
    _, state = opened(folder)
    assert (
        list(state._history.factorisation.coefficients)
        == Ledger.read(folder / "ledger.jsonl").facts["correlated_noise"]["coefficients"]
    )


def opened(folder: Path) -> tuple[JointLedger, noise_state.NoiseState]:
    """Return the ledgers and the noise state of a folder, opened as in training."""
    saved, _ = read_saved_run(folder / "run.toml")
    ledger = reopen_ledgers(saved, RunFolder(folder), TokenStore.open(saved.corpus))
    streams = streams_of(saved, ledger.facts, unheard.TokenStore.open(saved.corpus).content_digest)
    state = noise_state.open_noise_state(saved, RunFolder(folder), ledger, streams, torch.device("cpu"))
    assert state is not None
    return ledger, state


def test_only_the_owner_can_read_the_state_and_it_is_deleted_at_the_end(place):
    folder = place / "r"
    go(run_of(place), folder, stop=3)
    for path in (folder / "noise", folder / "noise" / "keys.jsonl", folder / "noise" / "history"):
        assert path.stat().st_mode & 0o077 == 0
    assert (
        len((folder / "noise" / "keys.jsonl").read_bytes().splitlines()) == 1
    )  # older keys are not needed after the history is saved
    go(run_of(place), folder)
    assert not (folder / "noise").exists()
    fits(folder)


def test_noise_that_a_killed_process_left_beside_a_complete_run_is_deleted(place):
    folder = place / "r"
    go(run_of(place), folder, stop=ROUNDS - 1)
    shutil.copytree(folder / "noise", place / "kept")
    go(run_of(place), folder)
    shutil.copytree(place / "kept", folder / "noise")
    assert list(unheard.resume(folder)) == []
    assert not (folder / "noise").exists()


def test_a_smaller_total_and_a_forgotten_one_delete_no_noise_that_was_paid_for(place):
    """The total of a longer run (`resume --rounds`) is not in run.toml, so a later call may not know it."""
    folder = place / "r"
    go(run_of(place), folder, stop=3)
    assert list(unheard.resume(folder, rounds=2)) == []
    assert (folder / "noise" / "keys.jsonl").exists()
    go(run_of(place), folder)
    longer = unheard.resume(folder, rounds=ROUNDS + 3, new_noise=True)
    next(longer)
    longer.close()
    assert list(unheard.resume(folder)) == []
    assert (folder / "noise" / "keys.jsonl").exists()
    assert [report.round for report in unheard.resume(folder, rounds=ROUNDS + 3)] == [ROUNDS + 2, ROUNDS + 3]
    assert not (folder / "noise").exists()
    fits(folder)


@pytest.mark.parametrize(
    ("name", "mode"), [("history", 0o644), ("history", 0o640), ("keys.jsonl", 0o604), ("keys.jsonl", 0o620)]
)
def test_a_state_that_others_can_read_is_refused(place, name, mode):
    folder = place / "r"
    go(run_of(place), folder, stop=3)
    (folder / "noise" / name).chmod(mode)
    with pytest.raises(CheckpointCorrupt, match="chmod 600"):
        go(run_of(place), folder)


@pytest.mark.system
@pytest.mark.parametrize("parts", [BANDED, BLT], ids=["banded", "blt"])
def test_kill_9_leaves_noise_that_can_be_recomputed_and_no_index_twice(parts, place):
    """Kill at each step of the second and third round: key, charges, draw, sum, noise, checkpoint.

    benchmarks/correlated_kills.py is a longer test."""
    dry = place / "dry"

    def list_steps() -> str:
        steps = Steps(-1, kill)
        install(steps)
        go(run_of(place, parts), dry)
        return json.dumps(steps.names)

    names = json.loads(output_of_a_child(list_steps))
    sums = [i for i, name in enumerate(names) if name == "round: sum_updates"]
    shutil.rmtree(dry)
    for at in range(sums[1] - 6, sums[2] + 2, 4 if parts is BANDED else 9):
        folder = place / f"r{at}"
        assert killed(run_of(place, parts), folder, at) == -9, names[at]
        go(run_of(place, parts), folder)
        numbers = indices(folder)
        assert numbers == list(range(len(numbers))), names[at]  # one mechanism throughout: nothing was lost
        assert ROUNDS <= len(numbers) <= ROUNDS + 2
        assert newest_checkpoint(RunFolder(folder)).state.round == ROUNDS
        assert not (folder / "noise").exists()
        fits(folder)
        shutil.rmtree(folder)


def record_noise(place: Path) -> None:
    """In this process, save the noise of each attempt to a file."""
    real = noise_state.CorrelatedNormals.take

    def take(self, count):
        noise_P = real(self, count)
        np.save(place / f"x{self.history.index - 1}", noise_P.numpy())
        return noise_P

    noise_state.CorrelatedNormals.take = take  # type: ignore[method-assign]


def test_after_a_kill_the_noise_before_it_is_recomputed_to_the_bit_and_two_attempts_share_none(place):
    folder, run = place / "r", run_of(place)

    def killed_in_round_4() -> None:
        record_noise(place)
        real, turns = loop.run_rounds, iter(range(100))

        def run_rounds(rounds, engine):
            states = real(rounds, engine)
            if next(turns) == 3:
                kill()  # the noise of the fourth round was used, and its model is lost
            return states

        loop.run_rounds = run_rounds  # type: ignore[assignment]
        go(run, folder)

    assert in_a_child(killed_in_round_4) == -9
    used = np.load(place / "x3.npy")
    _, state = opened(folder)
    assert state.index == 4
    assert np.array_equal(state._history.rows[0].numpy(), used)  # with two bands the history is the last noise

    def resumed() -> None:
        record_noise(place)
        go(run, folder)

    assert in_a_child(resumed) == 0
    again = np.load(place / "x4.npy")  # the third round once more, as attempt 4
    assert indices(folder) == list(range(7))
    assert not np.isin(used, again).any()
    c = Ledger.read(folder / "ledger.jsonl").facts["correlated_noise"]["coefficients"]
    own = again + c[1] / c[0] * used  # the rest is the z of its own key
    assert abs(np.corrcoef(used, own)[0, 1]) < 5 / np.sqrt(len(used))


def test_groups_follow_the_attempt_and_not_the_round(place, monkeypatch):
    drawn = []
    real = CyclicPoissonSampling.draw

    def draw(self, num_users, population, rng, turn=None):
        drawn.append((turn.index, turn.groups_key))
        return real(self, num_users, population, rng, turn)

    monkeypatch.setattr(CyclicPoissonSampling, "draw", draw)
    folder = place / "r"
    go(run_of(place), folder, stop=3)
    newest = sorted((folder / "checkpoints").glob("*"))[-1]
    newest.unlink()  # go back to round 2, as the error of a damaged checkpoint advises
    go(run_of(place), folder)
    assert [index for index, _ in drawn] == list(range(6))  # round 2 was done twice, with indices 2 and 3
    assert len({key for _, key in drawn}) == 1  # the groups stay fixed for the mechanism


@pytest.mark.parametrize("lost", ["noise", "noise/keys.jsonl"])
def test_a_state_that_is_missing_is_an_error_and_nothing_is_charged(lost, place):
    folder = place / "r"
    go(run_of(place), folder, stop=3)
    shutil.move(folder / lost, place / "lost")
    for rounds in (None, ROUNDS + 1):
        with pytest.raises(CheckpointCorrupt, match=r"keys.jsonl is missing.*--new-noise"):
            go(run_of(place), folder, rounds=rounds)
    assert indices(folder) == [0, 1, 2]
    shutil.move(place / "lost", folder / lost)
    go(run_of(place), folder)
    assert indices(folder) == [0, 1, 2, 3, 4]


def test_new_noise_is_for_correlated_noise_only(place):
    independent = (unheard.PoissonSampling(users_per_round=2), unheard.GaussianNoise(noise_multiplier=1.0))
    go(run_of(place, independent), place / "r", stop=1)
    with pytest.raises(InvalidValue, match="--new-noise"):
        go(run_of(place, independent), place / "r", new_noise=True)


def test_lost_state_ends_the_mechanism_and_the_new_one_is_charged(place):
    folder = place / "r"
    go(run_of(place), folder, stop=3)
    shutil.rmtree(folder / "noise")
    go(run_of(place), folder, new_noise=True)
    assert indices(folder) == [0, 1, 2, 0, 1]
    charged = [accounted(e) for e in Ledger.read(folder / "ledger.jsonl").events]
    assert sum(event is not None for event in charged) == 2 + 1
    fits(folder)


def test_a_second_mechanism_of_a_seeded_run_has_keys_of_its_own(place, monkeypatch):
    """Its attempts are numbered from 0 again, and must not reuse noise or groups of the first mechanism."""
    keys = {"noise_key": [], "groups_key": []}
    for name, seen in keys.items():
        real = getattr(ReproducibleStreams, name)
        monkeypatch.setattr(
            ReproducibleStreams, name, lambda self, n, real=real, seen=seen: (seen.append(real(self, n)), seen[-1])[1]
        )
    folder, run = place / "r", run_of(place, seed=3, rounds=3)
    go(run, folder, stop=2)
    go(run, folder, new_noise=True)
    assert indices(folder) == [0, 1, 0]
    assert len(set(keys["noise_key"])) == len(keys["noise_key"]) == 3
    assert len(set(keys["groups_key"])) == 2  # one per mechanism


def test_the_state_of_an_earlier_mechanism_of_the_same_run_is_refused(place):
    """Both mechanisms have the same number of attempts, the same coefficients and the same run."""
    folder, run = place / "r", run_of(place, rounds=9)
    go(run, folder, stop=2)
    shutil.move(folder / "noise", place / "first")
    go(run, folder, stop=4, new_noise=True)
    assert indices(folder) == [0, 1, 0, 1]
    shutil.rmtree(folder / "noise")
    shutil.move(place / "first", folder / "noise")
    with pytest.raises(CheckpointCorrupt, match="another run or mechanism"):
        go(run, folder)
    assert indices(folder) == [0, 1, 0, 1]


def test_keys_are_refused_by_a_library_that_draws_other_numbers_from_them(place, monkeypatch):
    folder, run = place / "r", run_of(place, rounds=9)
    go(run, folder, stop=2)
    with monkeypatch.context() as patch:
        patch.setattr(noise_state, "_draw_digest", lambda: "of another version")
        with pytest.raises(CheckpointCorrupt, match="draws other numbers"):
            go(run, folder, stop=3)
    go(run, folder, stop=3)
    assert indices(folder) == [0, 1, 2]
    own, draw = noise_state._draw_digest(), noise_state.standard_normals
    for size in (2**16, 2**18):
        with monkeypatch.context() as patch:
            patch.setattr(noise_module, "NORMALS_PER_BLOCK", size)
            assert noise_state._draw_digest() != own
    for other in (lambda *what: draw(*what).flip(0), lambda *what: draw(*what).nextafter(torch.tensor(9.0).double())):
        monkeypatch.setattr(noise_state, "standard_normals", other)
        assert noise_state._draw_digest() != own


def damage_keys(noise: Path) -> None:
    path = noise / "keys.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"index": 3', b'"index": 4'))


def shorten_keys(noise: Path) -> None:
    path = noise / "keys.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))


def damage_history(noise: Path) -> None:
    path = noise / "history"
    content = bytearray(path.read_bytes())
    content[-40] ^= 1
    path.write_bytes(content)


def lose_history(noise: Path) -> None:
    (noise / "history").unlink()


def swap_state(noise: Path) -> None:
    for path in (noise.parent.parent / "other" / "noise").iterdir():
        shutil.copy(path, noise / path.name)


def swap_keys(noise: Path) -> None:
    shutil.copy(noise.parent.parent / "other" / "noise" / "keys.jsonl", noise / "keys.jsonl")


def swap_history(noise: Path) -> None:
    shutil.copy(noise.parent.parent / "other" / "noise" / "history", noise / "history")


def change_key(noise: Path) -> None:
    """Change one digit of a key. The file is still valid JSON."""
    path = noise / "keys.jsonl"
    *lines, last = path.read_bytes().splitlines(keepends=True)
    key = json.loads(last)["key"]
    other = ("1" if key[0] == "0" else "0") + key[1:]
    path.write_bytes(b"".join([*lines, last.replace(key.encode(), other.encode())]))


def of_another_version(noise: Path) -> None:
    path = noise / "keys.jsonl"
    header, *lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([noise_state._sealed({**noise_state._opened(header), "format": "other"}), *lines]))


def a_number_for_a_key(noise: Path) -> None:
    """Replace the first line by JSON that is no table."""
    path = noise / "keys.jsonl"
    path.write_bytes(b"".join([b"5\n", *path.read_bytes().splitlines(keepends=True)[1:]]))


def keys_of_later_attempts(noise: Path) -> None:
    """Append a key of a later attempt, as in the folder of a run whose ledger was shortened."""
    path = noise / "keys.jsonl"
    last = json.loads(path.read_bytes().splitlines()[-1])
    later = noise_state.KeyRecord(index=last["index"] + 2, key=bytes(16))
    path.write_bytes(path.read_bytes() + noise_state._key_line(later))


HARMS = [
    change_key,
    of_another_version,
    a_number_for_a_key,
    keys_of_later_attempts,
    damage_keys,
    shorten_keys,
    damage_history,
    lose_history,
    swap_state,
    swap_keys,
    swap_history,
]


@pytest.fixture(scope="module")
def killed_runs(corpus, tmp_path_factory) -> Path:
    """Two runs that were killed with a history of 2 attempts, and the keys of 2 more."""
    place = tmp_path_factory.mktemp("killed")
    uncharged_copy(corpus, place / "corpus")
    for name in ("r", "other"):
        assert killed_after_rounds(place, place / name, 4) == -9
    return place


@pytest.mark.parametrize("harm", [None, *HARMS])
def test_a_state_that_is_damaged_shortened_or_of_another_run_is_refused(harm, killed_runs, tmp_path):
    place = shutil.copytree(killed_runs, tmp_path / "copy")
    folder = place / "r"
    text = (folder / "run.toml").read_text()
    (folder / "run.toml").write_text(text.replace(str(killed_runs), str(place)))
    if harm is None:
        assert go(run_of(place), folder, stop=5) == [5]
        return
    harm(folder / "noise")
    charged = len(indices(folder))
    with pytest.raises(CheckpointCorrupt, match="new one begins"):
        go(run_of(place), folder)
    assert len(indices(folder)) == charged


def killed_after_rounds(place: Path, folder: Path, rounds: int) -> int:
    def work() -> None:
        run = run_of(place)
        for report in unheard.train(run, folder, engine=ENGINE):
            if report.round == rounds - 1:
                noise_state.NoiseState.save = lambda *_, **__: None  # type: ignore[method-assign]
            if report.round == rounds:
                kill()

    return in_a_child(work)


def test_blt_noise_stops_after_its_attempts_and_more_rounds_begin_a_new_mechanism(place):
    folder, run = place / "r", run_of(place, (BLT[0], replace(BLT[1], rounds=4)))
    reports = list(unheard.train(run, folder, engine=ENGINE))
    assert [r.round for r in reports] == [1, 2, 3, 4, 4]
    assert "attempts" in str(reports[-1].stopped)
    assert indices(folder) == [0, 1, 2, 3]
    with pytest.raises(BudgetExceeded, match="--rounds"):
        go(run, folder)
    assert go(run, folder, rounds=ROUNDS + 2) == [5, 6, 7]
    assert indices(folder) == [0, 1, 2, 3, 0, 1, 2]
    assert not (folder / "noise").exists()
    fits(folder)
    with pytest.raises(CheckpointCorrupt, match="a complete run has deleted it"):
        go(run, folder, rounds=ROUNDS + 3)
    assert go(run, folder, rounds=ROUNDS + 3, new_noise=True) == [8]
    assert indices(folder)[-1] == 0


def test_a_run_that_begins_from_a_run_with_correlated_noise_has_a_mechanism_of_its_own(place):
    parts = (BLT[0], replace(BLT[1], rounds=2))
    go(run_of(place, parts, rounds=2), place / "first")
    run = run_of(place, parts, rounds=2)
    second = replace(run, training=replace(run.training, init_from=str(place / "first")))
    assert go(second, place / "second") == [1, 2]
    assert indices(place / "second") == [0, 1, 0, 1]


def test_a_copy_that_continues_by_itself_cannot_share_the_history(place):
    folder, copy = place / "r", place / "copy"
    go(run_of(place), folder, stop=3)
    shutil.copytree(folder, copy)
    go(run_of(place), copy, stop=4)  # one attempt more: the population is one charge ahead, as after a kill
    with pytest.raises(LedgerError, match="copy"):
        go(run_of(place), folder)
    go(run_of(place), folder, new_noise=True)
    assert indices(folder) == [0, 1, 2, 0, 1]


def test_a_charge_ahead_of_the_run_is_explained_by_the_key_that_was_written_just_before_it_alone(place):
    folder = place / "r"
    go(run_of(place), folder, stop=3)
    ledger, state = opened(folder)
    event = replace(ledger.events[-1], index=3)
    keys = [noise_state.KeyRecord(index=3, key=bytes([i] * 16)) for i in range(4)]
    last = None
    for number in (1, 2):  # a kill left a charge; then a copy of the folder was charged for the same attempt
        ledger.population.charge(ledger.run, len(ledger), event, 3, again=last, once=keys[number].once)
        last = keys[number].once
        for key in keys:
            if key is not keys[number]:
                with pytest.raises(LedgerError, match="copy"):
                    state._check_population([key])
        with pytest.raises(LedgerError, match="copy"):
            state._check_population([])
        state._check_population(keys)
    assert state.repeats == last
    state.begin_attempt()
    ledger.charge(event, 3, again=state.repeats, once=state.once)
    state.normals()
    assert state.repeats is None  # for that attempt only


def test_a_key_that_was_never_charged_does_not_explain_the_charge_of_a_copy(place, monkeypatch):
    """A process is killed between a key and its charge. Then the folder is copied, and both copies go on."""
    folder, copy = place / "r", place / "copy"
    go(run_of(place), folder, stop=3)
    with monkeypatch.context() as patch:
        patch.setattr(PopulationLedger, "charge", Mock(side_effect=RuntimeError))
        with pytest.raises(RuntimeError):
            go(run_of(place), folder)
    shutil.copytree(folder, copy)
    assert go(run_of(place), copy, stop=4) == [4]
    with pytest.raises(LedgerError, match="copy of the folder was trained further"):
        go(run_of(place), folder)


def test_a_stop_before_the_next_attempt_keeps_the_key_of_a_charge_that_the_run_does_not_hold(place, monkeypatch):
    """A process is killed between both charges; the next one stops before it is charged. The third one goes on."""
    folder = place / "r"
    with monkeypatch.context() as patch:
        patch.setattr(noise_state.NoiseState, "save", lambda *_, **__: None)  # killed: no history is saved
        go(run_of(place), folder, stop=3)
        patch.setattr(Ledger, "charge", Mock(side_effect=RuntimeError))
        with pytest.raises(RuntimeError):
            go(run_of(place), folder)
    with monkeypatch.context() as patch:
        patch.setattr(PopulationLedger, "charge", Mock(side_effect=RuntimeError))
        with pytest.raises(RuntimeError):
            go(run_of(place), folder)
    assert go(run_of(place), folder, stop=4) == [4]
    assert go(run_of(place), folder) == [5]


@pytest.mark.parametrize("seed", [None, 1])
def test_the_charge_of_an_attempt_names_its_key_and_does_not_reveal_it(place, seed):
    """The charges of a seeded run are not named: a repetition has the same keys, and each charge is a line of its own."""
    folder = place / "r"
    go(run_of(place, seed=seed), folder, stop=2)
    _, state = opened(folder)
    state.begin_attempt()
    record = state._records[-1]
    assert state.once == (None if seed else record.once)
    assert len(record.once) == 16
    assert record.once not in record.key.hex()
    assert record.once != noise_state.KeyRecord(index=record.index, key=bytes(16)).once


def test_a_mechanism_begins_after_the_charges_from_before_the_run():
    """A run that begins from another run with correlated noise has its own noise."""
    for before in range(7):
        entries = [
            Entry(event=CorrelatedGaussian(sampling_prob=1.0, noise_multiplier=1.0, block=9, index=i), round=i, hash="")
            for i in (*range(before), *range(3))
        ]
        assert noise_state.mechanism_start(entries, before) == before
        assert noise_state.mechanism_start(entries[:before], before) == before


def test_two_copies_that_train_at_once_cannot_share_the_history(place):
    event = CorrelatedGaussian(sampling_prob=1.0, noise_multiplier=1.0, block=9, index=3)
    population = PopulationLedger.open(place / "ledger.jsonl", {})
    population.register("run", {}, num_charged=0)
    for position in range(4):
        population.charge("run", position, replace(event, index=position), position)
    with pytest.raises(LedgerError, match="Another copy"):
        population.charge("run", 3, event, 3)
    killed = population.runs["run"].last_once
    population.charge("run", 3, event, 3, again=killed)  # a kill between the two ledgers
    population.charge("run", 3, replace(event, index=0), 3)  # a new mechanism is charged from its first round


def bound_state(tmp_path, *, run="r", first=2, heads="ab", parameters=7, separation=2) -> noise_state.NoiseState:
    """Return the state of a mechanism in a run whose ledger has these hashes."""
    entries = [Entry(event=PoissonGaussian(sampling_prob=1, noise_multiplier=1), round=0, hash=head) for head in heads]

    class Charged(SimpleNamespace):
        def __len__(self):
            return len(entries)

    ledger = Charged(run=run, entries=entries, population=SimpleNamespace(runs={}))
    history = correlated.NoiseHistory(
        optimise("banded", rounds=4, separation=separation), parameters, torch.device("cpu")
    )
    streams, key = ReproducibleStreams(seed=1), bytes(16)
    return noise_state.NoiseState(
        tmp_path / "noise", ledger, streams, history, first, key, parameters, torch.device("cpu")
    )


def test_a_state_is_bound_to_its_run_its_position_all_charges_before_it_the_matrix_and_the_model(tmp_path):
    others = ({"run": "s"}, {"first": 1, "heads": "b"}, {"heads": "ax"}, {"parameters": 8}, {"separation": 3})
    own = bound_state(tmp_path)._binding
    assert own == bound_state(tmp_path)._binding
    assert len({own, *(bound_state(tmp_path, **other)._binding for other in others)}) == 6


def test_nothing_of_an_older_mechanism_is_left_when_a_new_one_begins(tmp_path):
    (tmp_path / "noise").mkdir(mode=0o755)
    (tmp_path / "noise" / "history").write_bytes(b"noise of the mechanism before")
    bound_state(tmp_path).begin_attempt()
    assert [path.name for path in (tmp_path / "noise").iterdir()] == ["keys.jsonl"]
    assert (tmp_path / "noise").stat().st_mode & 0o777 == 0o700


def test_the_first_key_is_on_disk_with_the_names_of_its_file_and_folder(tmp_path, monkeypatch):
    """Also after the folder of an older mechanism was deleted. A charge whose key is lost could not be continued."""
    synced, fsync = [], os.fsync

    def spy(descriptor: int) -> None:
        status = os.fstat(descriptor)
        synced.append((status.st_ino, status.st_size))
        fsync(descriptor)

    monkeypatch.setattr(storage.os, "fsync", spy)
    for _ in range(2):
        synced.clear()
        bound_state(tmp_path).begin_attempt()
        keys, noise = (tmp_path / "noise" / "keys.jsonl").stat(), (tmp_path / "noise").stat()
        last = [(keys.st_ino, keys.st_size), noise.st_ino, tmp_path.stat().st_ino]
        assert [synced[-3], synced[-2][0], synced[-1][0]] == last


@pytest.mark.parametrize("taken", [False, True])
def test_a_round_that_fails_after_its_charge_is_done_again_with_new_noise(place, monkeypatch, taken):
    """The noise of the charged attempt stays known, whether or not the round has asked for it."""
    real, calls = loop.run_rounds, []

    def run_rounds(rounds, engine):
        calls.append(rounds)
        states = real(rounds, engine) if taken or len(calls) != 4 else []
        if len(calls) == 4:  # the noise was last saved two rounds before
            raise RuntimeError("the engine failed")
        return states

    monkeypatch.setattr(loop, "run_rounds", run_rounds)
    run, folder = run_of(place), place / "r"
    with pytest.raises(RuntimeError, match="the engine failed"):
        go(run, folder)
    _, state = opened(folder)
    assert state._history.index == state.index == 4
    go(run, folder, stop=ROUNDS - 1)
    assert indices(folder) == list(range(ROUNDS))


def test_correlated_noise_is_made_for_the_rounds_of_its_run(place):
    run = run_of(place)
    assert run.plan.noise.rounds == ROUNDS
    assert run.plan.correlated_facts()["rounds"] == ROUNDS
    assert replace(run, training=replace(run.training, rounds=ROUNDS)).plan.noise.rounds == ROUNDS


def test_a_header_with_other_coefficients_is_noticed(place):
    folder = place / "r"
    go(run_of(place), folder, stop=2)
    facts = Ledger.read(folder / "ledger.jsonl").facts
    assert facts["correlated_noise"]["strategy"] == "banded"
    path = folder / "ledger.jsonl"
    text = path.read_text()
    stated = json.dumps(facts["correlated_noise"]["sensitivity"])
    path.write_text(text.replace(f'"sensitivity":{stated}', '"sensitivity":0.5'))
    with pytest.raises(LedgerError):
        go(run_of(place), folder)


def test_a_large_history_is_not_saved_with_every_checkpoint_and_resumes_all_the_same(place, monkeypatch):
    monkeypatch.setattr(noise_state, "LARGE_HISTORY", 0)
    folder = place / "r"
    assert killed_after_rounds(place, folder, 4) == -9
    assert not (folder / "noise" / "history").exists()
    go(run_of(place), folder)
    assert indices(folder) == list(range(ROUNDS))


def test_runs_side_by_side_keep_their_own_noise(place):
    runs = [(run_of(place, BANDED, seed=1), place / "a"), (run_of(place, BLT, seed=1), place / "b")]
    for _ in unheard.train_together(runs, engine=ENGINE):
        pass
    go(run_of(place, BANDED, seed=1), place / "alone")
    assert torch.equal(model_of(place / "a"), model_of(place / "alone"))
    for name in "ab":
        fits(place / name)


def test_the_statement_of_a_run_says_which_noise_it_had_and_what_it_cost(place, monkeypatch):
    monkeypatch.undo()  # the real statement
    folder = place / "r"
    go(run_of(place, BLT), folder)
    content = json.loads((folder / "statement.json").read_text())
    assert content["correlated_noise"]["strategy"] == "blt"
    assert content["composed"] == [{"kind": "gaussian", "noise_multiplier": 4.0, "times": 1}]
    assert content["rounds"] == {"charged": ROUNDS, "redone": 0}
    text = render_text(content)
    assert "correlated noise" in text
    assert "blt, T = 8, b = 2, k = 4" in text
    fits(folder)


@pytest.mark.parametrize("key", ["sampling_prob", "noise_multiplier", "block", "separation", "sensitivity"])
def test_verify_notices_a_header_that_states_another_number_of_correlated_noise(place, key):
    """The forged ledger has a valid hash chain."""
    folder = place / "r"
    go(run_of(place), folder, stop=1)
    ledger = Ledger.read(folder / "ledger.jsonl")
    stated = {**ledger.facts["correlated_noise"]}
    stated[key] = stated[key] * 2
    (folder / "ledger.jsonl").unlink()
    again = Ledger.create(folder / "ledger.jsonl", {**ledger.facts, "correlated_noise": stated})
    for entry in ledger.entries:
        again.charge(entry.event, entry.round)
    assert {finding.name: finding.fits for finding in verify(folder)}["correlated noise"] is False


@pytest.mark.parametrize("indices", [(0, 2), (0, 1, 1), (0, 1, 3), (0, None, 1), (1, 2)])
def test_charges_that_are_not_one_after_the_other_are_an_error_or_no_mechanism(indices):
    def entry(index):
        if index is None:
            return Entry(event=PoissonGaussian(sampling_prob=1.0, noise_multiplier=1.0), round=0, hash="")
        event = CorrelatedGaussian(sampling_prob=1.0, noise_multiplier=1.0, block=9, index=index)
        return Entry(event=event, round=0, hash="")

    assert noise_state.mechanism_start([entry(0), entry(1), entry(0), entry(1), entry(2)], 0) == 2
    entries = [entry(index) for index in indices]
    if indices[0]:  # the charge that began it is missing: the run cannot continue
        assert noise_state.mechanism_start(entries, 0) == len(entries)
    else:
        with pytest.raises(LedgerError, match="not in order"):
            noise_state.mechanism_start(entries, 0)


def test_keys_are_for_their_owner_alone_from_the_first_one_on(place, monkeypatch):
    """Check the file modes before each charge, when the key of the attempt is on disk."""
    modes, real = [], JointLedger.charge

    def charge(self, *args, **named):
        noise = place / "r" / "noise"
        modes.append({path.stat().st_mode & 0o777 for path in (noise, *noise.iterdir())})
        return real(self, *args, **named)

    monkeypatch.setattr(JointLedger, "charge", charge)
    go(run_of(place), place / "r")
    assert len(modes) == ROUNDS
    assert set.union(*modes) == {0o700, 0o600}


def test_of_several_keys_of_one_attempt_the_last_one_is_that_of_its_noise(place):
    """A kill between the key and the charge leaves an unused key. The next key has the same index and is the one used."""
    folder = place / "r"
    assert killed_after_rounds(place, folder, 4) == -9

    def history() -> torch.Tensor:
        run, _ = read_saved_run(folder / "run.toml")
        store = TokenStore.open(run.corpus)
        ledger = reopen_ledgers(run, RunFolder.open(folder), store)
        streams = streams_of(run, ledger.facts, store.content_digest)
        state = noise_state.open_noise_state(run, RunFolder.open(folder), ledger, streams, torch.device("cpu"))
        assert state is not None
        return state._history.rows.clone()

    before, keys = history(), folder / "noise" / "keys.jsonl"
    *lines, last = keys.read_bytes().splitlines(keepends=True)
    unused = noise_state.KeyRecord(index=json.loads(last)["index"], key=bytes(16))
    content = b"".join([*lines, noise_state._key_line(unused), last])
    keys.write_bytes(content)
    assert torch.equal(history(), before)


def test_verify_notices_an_attempt_that_is_charged_under_a_number_that_was_used(place):
    folder = place / "r"
    go(run_of(place), folder, stop=4)
    ledger = Ledger.read(folder / "ledger.jsonl")
    for numbers in ((0, 1, 1, 2), (0, 1, 2, 1), (0, 2, 3, 4)):
        (folder / "ledger.jsonl").unlink()
        again = Ledger.create(folder / "ledger.jsonl", ledger.facts)
        for entry, number in zip(ledger.entries, numbers, strict=True):
            again.charge(replace(entry.event, index=number), entry.round)  # pyright: ignore[reportCallIssue]
        findings = {finding.name: finding.words for finding in verify(folder) if finding.fits is False}
        assert "attempt" in findings["charges"]
