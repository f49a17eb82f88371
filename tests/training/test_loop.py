"""The training loop: rounds are charged before a release, a resume never under-counts, and a budget stops the run."""

import itertools
import json
import shutil
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.conftest import NOISE_MULTIPLIER, counting_user
from tests.stores import uncharged_copy

import unheard
from unheard.audit.verification import verify
from unheard.corpus.store import TokenStore, write_store
from unheard.corpus.synthetic import synthesise
from unheard.corpus.vocabulary import _cost_of_list
from unheard.errors import (
    BudgetExceeded,
    CheckpointCorrupt,
    CorpusMissing,
    InvalidValue,
    LedgerError,
    ModelError,
    NoiseWarning,
    PrivacyError,
    RunFolderExists,
    RunFolderInUse,
    RunFolderMissing,
    UnprovenCombination,
)
from unheard.privacy.accountants import epsilon
from unheard.privacy.ledger import Ledger, run_id
from unheard.privacy.population_ledger import PopulationLedger
from unheard.privacy.population_statement import all_runs
from unheard.privacy.run_ledger import population_of
from unheard.privacy.statement import _BEGAN_SYNTHETIC, SYNTHETIC
from unheard.privacy.statement_formats import FORMATS, render
from unheard.randomness import ReproducibleStreams, reproducible_generator
from unheard.run_folder import RunFolder
from unheard.training import initialise, loop
from unheard.training import round as round_module
from unheard.training.checkpoint import load_model, read_checkpoint, save_model


def reproducible(run: unheard.Run, **changes) -> unheard.Run:
    return replace(run, training=replace(run.training, reproducible_seed=1, **changes))


def final_model(folder: Path, run: unheard.Run) -> torch.Tensor:
    return load_model(RunFolder(folder).model, run.model)


def test_train_warns_before_anything_is_created_if_the_noise_will_dominate_the_updates(run, tmp_path):
    loud = replace(run, plan=replace(run.plan, noise=unheard.GaussianNoise(noise_multiplier=100.0)))
    with warnings.catch_warnings():
        warnings.simplefilter("error", NoiseWarning)
        with pytest.raises(NoiseWarning, match=r"will dominate the updates: with sigma = .* To lower it: "):
            unheard.train(loud, tmp_path / "loud")
        assert not (tmp_path / "loud").exists()
        quiet = replace(run.plan, noise=unheard.GaussianNoise(noise_multiplier=0.01))
        unheard.train(replace(run, plan=quiet), tmp_path / "quiet").close()
    assert (tmp_path / "quiet").exists()


def test_a_run_folder_has_every_documented_file(run, tmp_path):
    reports = list(unheard.train(run, tmp_path / "r"))
    assert [r.round for r in reports] == [1, 2, 3, 4, 5, 6]
    assert [r.metrics is not None for r in reports] == [False, False, True, False, False, True]
    names = {p.name for p in (tmp_path / "r").iterdir()}
    assert names >= {"run.toml", "ledger.jsonl", "metrics.jsonl", "statement.json", "model.safetensors", "checkpoints"}
    assert names >= {"vocabulary.txt", "tokens.json"}
    ledger = Ledger.read(tmp_path / "r" / "ledger.jsonl")
    assert [e.round for e in ledger.entries] == [0, 1, 2, 3, 4, 5]
    assert set(ledger.events) == {run.plan.at(0, run.model.layout).event()}
    assert reports[-1].epsilon == pytest.approx(epsilon(ledger.events, run.claimed_delta, "rdp"))
    statement = json.loads((tmp_path / "r" / "statement.json").read_text())
    assert statement["epsilon"]["rdp"] == pytest.approx(reports[-1].epsilon)
    assert [row["round"] for row in RunFolder(tmp_path / "r").read_metrics()] == [3, 6]


def test_the_model_learns_on_text_that_can_be_learned(run, tmp_path):
    easy = replace(
        run,
        plan=replace(
            run.plan,
            noise=unheard.NoNoise(),
            clip=unheard.FlatClip(norm=10.0),
            update=unheard.FedAvg(batch_size=2, unroll=5, learning_rate=3.0),
        ),
        training=unheard.Training(rounds=30, reproducible_seed=1),
        evaluation=unheard.Evaluation(every=30, max_tokens=500, unroll=20),
    )
    last = list(unheard.train(easy, tmp_path / "r", allow_no_privacy=True))[-1]
    assert last.metrics is not None
    assert last.metrics["accuracy_top1"] > 0.2  # a guess would be right 1 time in 48
    assert last.epsilon == float("inf")


def test_a_run_without_noise_is_refused_unless_it_is_allowed(run, tmp_path):
    bare = replace(run, plan=replace(run.plan, noise=unheard.NoNoise()), ledger=tmp_path / "population.jsonl")
    with pytest.raises(PrivacyError, match="allow_no_privacy=True"):
        unheard.train(bare, tmp_path / "r")
    with pytest.raises(PrivacyError, match="allow_no_privacy=True"):
        unheard.train_together([(run, tmp_path / "private"), (bare, tmp_path / "r")])
    assert not (tmp_path / "r").exists()
    assert not (tmp_path / "private").exists()
    assert not (tmp_path / "population.jsonl").exists()
    unheard.train(bare, tmp_path / "r", allow_no_privacy=True).close()
    with pytest.raises(PrivacyError, match="allow_no_privacy=True"):
        unheard.resume(tmp_path / "r")
    assert next(unheard.resume(tmp_path / "r", allow_no_privacy=True)).epsilon == float("inf")


def test_the_event_is_on_disk_before_anybody_is_drawn(run, tmp_path, monkeypatch):
    def crash(*args, **kwargs):
        charged.append(len(Ledger.read(tmp_path / "r" / "ledger.jsonl")))
        raise RuntimeError("power loss")

    charged: list[int] = []
    monkeypatch.setattr(round_module, "draw_cohort", crash)
    with pytest.raises(RuntimeError, match="power loss"):
        list(unheard.train(run, tmp_path / "r"))
    assert charged == [1]
    assert len(Ledger.read(tmp_path / "r" / "ledger.jsonl")) == 1


def test_rounds_done_again_are_charged_again_and_draw_anew(run, tmp_path, monkeypatch):
    attempts, real, crashes = [], round_module.draw_cohort, iter([False, False, False, True, *[False] * 9])

    def sometimes_crash(r):
        attempts.append(r.attempt)
        if next(crashes):
            raise MemoryError
        return real(r)

    monkeypatch.setattr(round_module, "draw_cohort", sometimes_crash)
    monkeypatch.setattr(loop, "save_checkpoint", _only_at_even_rounds(loop.save_checkpoint))
    with pytest.raises(MemoryError):
        list(unheard.train(run, tmp_path / "r"))
    reports = list(unheard.resume(tmp_path / "r"))
    assert [report.round for report in reports] == [3, 4, 5, 6]
    ledger = Ledger.read(tmp_path / "r" / "ledger.jsonl")
    assert [entry.round for entry in ledger.entries] == [0, 1, 2, 3, 2, 3, 4, 5]
    assert attempts == list(range(8))  # no attempt's randomness is used twice
    for report, charges in zip(reports, (5, 6, 7, 8), strict=True):
        assert report.epsilon == pytest.approx(epsilon(ledger.events[:charges], run.claimed_delta, "rdp"))


def _only_at_even_rounds(save):
    """Return a function that saves checkpoints at even rounds only, so a stop at an odd round loses it as kill -9 does."""
    return lambda folder, model, state, ledger, keep: state.round % 2 or save(folder, model, state, ledger, keep)


def test_a_stop_and_a_resume_is_the_same_run_as_one_without(run, tmp_path):
    list(unheard.train(reproducible(run), tmp_path / "whole"))
    for report in (stopped := unheard.train(reproducible(run), tmp_path / "parts")):
        if report.round == 3:
            break
    stopped.close()
    shutil.move(tmp_path / "parts", tmp_path / "moved")
    list(unheard.resume(tmp_path / "moved"))
    assert torch.equal(final_model(tmp_path / "whole", run), final_model(tmp_path / "moved", run))
    ledgers = [Ledger.read(tmp_path / f / "ledger.jsonl") for f in ("whole", "moved")]
    assert ledgers[0].head == ledgers[1].head


def test_secure_runs_never_repeat(run, tmp_path):
    for name in ("a", "b"):
        list(unheard.train(run, tmp_path / name))
    assert not torch.equal(final_model(tmp_path / "a", run), final_model(tmp_path / "b", run))


def test_the_engine_changes_neither_the_model_nor_the_ledger(run, tmp_path):
    for kind in ("reference", "vectorised"):
        list(unheard.train(reproducible(run), tmp_path / kind, engine=unheard.EngineChoice(kind=kind)))
    models = [final_model(tmp_path / kind, run) for kind in ("reference", "vectorised")]
    torch.testing.assert_close(*models, atol=1e-4, rtol=1e-3)
    assert len({Ledger.read(tmp_path / kind / "ledger.jsonl").head for kind in ("reference", "vectorised")}) == 1


def test_an_empty_cohort_still_takes_a_full_noised_step_and_is_charged(run, tmp_path):
    nobody = replace(
        run,
        plan=replace(run.plan, sampling=unheard.PoissonSampling(sampling_prob=1e-9)),
        training=unheard.Training(rounds=1),
    )
    list(unheard.train(nobody, tmp_path / "r"))
    moved = final_model(tmp_path / "r", run) - run.model.initial(0)
    assert (run.model.layout.split(moved)["output_weight"] != 0).all()
    assert len(Ledger.read(tmp_path / "r" / "ledger.jsonl")) == 1


def test_a_schedule_is_charged_as_it_was(run, tmp_path):
    scheduled = replace(run, plan=replace(run.plan, schedule=(unheard.Change(from_round=4, noise_multiplier=2.0),)))
    list(unheard.train(scheduled, tmp_path / "r"))
    charged = [e.noise_multiplier for e in Ledger.read(tmp_path / "r" / "ledger.jsonl").events]
    assert charged == [NOISE_MULTIPLIER] * 4 + [2.0] * 2


def budgeted(run, rounds_worth: int) -> unheard.Run:
    event = run.plan.at(0, run.model.layout).event()
    enough = epsilon([(event, rounds_worth)], run.claimed_delta, "rdp") + 1e-6
    return replace(run, budget=unheard.Budget(epsilon=enough, delta=run.claimed_delta))


def test_a_budget_stops_before_the_round_that_would_exceed_it(run, tmp_path):
    reports = list(unheard.train(budgeted(run, 4), tmp_path / "r"))
    assert reports[-1].round == 4
    assert reports[-1].stopped is not None
    assert len(Ledger.read(tmp_path / "r" / "ledger.jsonl")) == 4
    with pytest.raises(BudgetExceeded):
        list(unheard.resume(tmp_path / "r"))
    assert len(Ledger.read(tmp_path / "r" / "ledger.jsonl")) == 4


def test_resume_goes_further_when_asked_to(run, tmp_path):
    list(unheard.train(run, tmp_path / "r"))
    assert list(unheard.resume(tmp_path / "r")) == []
    assert [r.round for r in unheard.resume(tmp_path / "r", rounds=8)] == [7, 8]


@pytest.mark.parametrize("is_lost", [True, False])
def test_resuming_writes_a_model_that_is_missing_or_older_than_the_newest_checkpoint(run, tmp_path, is_lost):
    """Otherwise, after a kill between the last checkpoint and its model, the released model would stay an older one."""
    folder = tmp_path / "r"
    list(unheard.train(run, folder))
    complete = (folder / "model.safetensors").read_bytes()
    ledger = (folder / "ledger.jsonl").read_bytes()
    facts = {"round": 4, "ledger_length": 4, "ledger_head": Ledger.read(folder / "ledger.jsonl").entries[3].hash}
    older = read_checkpoint(folder / "checkpoints" / "round-00000004.safetensors").state.params_P
    save_model(folder / "model.safetensors", run.model, older, facts)
    if is_lost:
        (folder / "model.safetensors").unlink()
    assert list(unheard.resume(folder)) == []
    assert (folder / "model.safetensors").read_bytes() == complete
    assert (folder / "ledger.jsonl").read_bytes() == ledger
    assert all(finding.fits is not False for finding in verify(folder))


def test_old_checkpoints_are_forgotten(run, tmp_path):
    list(unheard.train(run, tmp_path / "r"))
    kept = sorted(p.name for p in (tmp_path / "r" / "checkpoints").iterdir())
    assert kept == ["round-00000004.safetensors", "round-00000006.safetensors"]


def test_a_folder_in_use_is_left_alone(run, tmp_path):
    first = unheard.train(run, tmp_path / "r")
    next(first)
    with pytest.raises(RunFolderInUse, match="another process"):
        next(unheard.resume(tmp_path / "r"))
    first.close()


def test_a_folder_that_holds_a_run_is_not_written_over(run, tmp_path):
    list(unheard.train(run, tmp_path / "r"))
    before = (tmp_path / "r" / "ledger.jsonl").read_bytes()
    with pytest.raises(RunFolderExists, match="unheard resume"):
        unheard.train(run, tmp_path / "r")
    assert (tmp_path / "r" / "ledger.jsonl").read_bytes() == before


def test_a_run_whose_making_was_interrupted_leaves_nothing_that_looks_like_one(run, tmp_path, monkeypatch):
    def power_loss(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(initialise, "charge_earlier_costs", power_loss)
    with pytest.raises(KeyboardInterrupt):
        unheard.train(run, tmp_path / "r")
    with pytest.raises(RunFolderMissing):
        unheard.resume(tmp_path / "r")
    monkeypatch.undo()
    assert len(list(unheard.train(run, tmp_path / "r"))) == 6


def test_a_run_continues_from_the_model_that_it_began_with_whatever_became_of_its_source(run, tmp_path):
    list(unheard.train(run, tmp_path / "parent"))
    child = replace(run, training=unheard.Training(rounds=2, init_from=str(tmp_path / "parent")))
    unheard.train(child, tmp_path / "child").close()
    shutil.rmtree(tmp_path / "parent")
    assert [r.round for r in unheard.resume(tmp_path / "child")] == [1, 2]


def test_no_statement_of_fewer_rounds_stands_beside_a_newer_model(run, tmp_path):
    list(unheard.train(run, tmp_path / "r"))
    going = unheard.resume(tmp_path / "r", rounds=8)
    next(going)
    assert not (tmp_path / "r" / "statement.json").exists()
    going.close()
    assert json.loads((tmp_path / "r" / "statement.json").read_text())["rounds"]


def test_resuming_nothing_is_refused(tmp_path):
    with pytest.raises(RunFolderMissing):
        unheard.resume(tmp_path)


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "garbage"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_can_be_used(run, tmp_path, damage):
    list(unheard.train(run, tmp_path / "r"))
    newest = tmp_path / "r" / "checkpoints" / "round-00000006.safetensors"
    content = newest.read_bytes()
    flipped = bytearray(content)
    flipped[-5] ^= 1
    newest.write_bytes({"cut": content[:-10], "flip": bytes(flipped), "empty": b"", "garbage": b"x" * 500}[damage])
    with pytest.raises(CheckpointCorrupt, match="Delete it"):
        next(unheard.resume(tmp_path / "r", rounds=7))
    newest.unlink()
    assert [r.round for r in unheard.resume(tmp_path / "r", rounds=7)] == [5, 6, 7]
    assert len(Ledger.read(tmp_path / "r" / "ledger.jsonl")) == 9


def test_a_shortened_ledger_is_refused(run, tmp_path):
    list(unheard.train(run, tmp_path / "r"))
    file = tmp_path / "r" / "ledger.jsonl"
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[:-2]))
    with pytest.raises(LedgerError, match="shortened"):
        next(unheard.resume(tmp_path / "r", rounds=9))


def test_an_edited_run_file_is_refused(run, tmp_path):
    list(unheard.train(run, tmp_path / "r"))
    file = tmp_path / "r" / "run.toml"
    file.write_text(file.read_text().replace("noise_multiplier = 0.5", "noise_multiplier = 0.1"))
    with pytest.raises(LedgerError, match="changed after the run began"):
        unheard.resume(tmp_path / "r")


def test_a_run_without_a_newer_key_resumes_unchanged_and_another_run_of_that_name_is_refused(run, tmp_path):
    """Run files without the key keep_norm are of a version that always rescaled word vectors, and have another hash."""
    begun = replace(run, model=replace(run.model, keep_norm=True))
    list(unheard.train(begun, tmp_path / "r"))
    file = tmp_path / "r" / "run.toml"
    file.write_text(file.read_text().replace("keep_norm = true\n", ""))
    with pytest.raises(LedgerError, match=r"--set model\.keep_norm=true continues it"):
        list(loop.train_together([(run, tmp_path / "r")]))
    list(unheard.resume(tmp_path / "r", rounds=8))
    vectors = begun.model.layout.split(load_model(RunFolder(tmp_path / "r").model, begun.model))["embedding"]
    torch.testing.assert_close(vectors.norm(dim=1), torch.ones(len(vectors)))
    list(unheard.train(run, tmp_path / "grown"))
    file = tmp_path / "grown" / "run.toml"
    file.write_text(file.read_text().replace("keep_norm = false\n", ""))
    with pytest.raises(LedgerError, match="changed after the run began"):
        unheard.resume(tmp_path / "grown")


def test_resuming_on_another_corpus_is_refused(run, store, tmp_path):
    other = write_store(
        tmp_path / "other",
        train=[store.train.tokens(0)],
        held_out=[store.held_out.tokens(0)],
        vocabulary=store.vocabulary,
        info={**store.info, "name": "another"},
    )
    list(unheard.train(run, tmp_path / "r"))
    with pytest.raises(LedgerError, match="not the corpus"):
        unheard.resume(tmp_path / "r", rounds=9, corpus=other.path)
    moved = shutil.copytree(store.path, tmp_path / "moved")
    assert len(list(unheard.resume(tmp_path / "r", rounds=9, corpus=moved))) == 3


def test_a_corpus_that_is_missing_or_does_not_fit_is_refused_before_anything_is_made(run, tmp_path):
    with pytest.raises(CorpusMissing, match="unheard prepare"):
        unheard.train(replace(run, corpus=tmp_path / "none"), tmp_path / "r")
    with pytest.raises(ModelError, match=r"model\.vocabulary_size = 50"):
        unheard.train(replace(run, model=unheard.TiedLSTM(vocabulary_size=99)), tmp_path / "r")
    assert not (tmp_path / "r").exists()


def on_other_users(run: unheard.Run, tmp_path: Path) -> unheard.Run:
    """The run on a store of its own, with a ledger of its own."""
    return replace(run, corpus=uncharged_copy(Path(run.corpus), tmp_path / "others"))


def test_starting_from_an_earlier_run_costs_what_it_cost(run, tmp_path):
    list(unheard.train(run, tmp_path / "first"))
    from_run = replace(run, training=unheard.Training(rounds=2, init_from=str(tmp_path / "first")))
    list(unheard.train(from_run, tmp_path / "second"))
    assert len(Ledger.read(tmp_path / "second" / "ledger.jsonl")) == 6 + 2
    list(unheard.train(on_other_users(run, tmp_path), tmp_path / "of-others"))
    elsewhere = unheard.Training(rounds=2, init_from=str(tmp_path / "of-others"), init_is_public=True)
    list(unheard.train(replace(run, training=elsewhere), tmp_path / "third"))
    assert len(Ledger.read(tmp_path / "third" / "ledger.jsonl")) == 2


@pytest.fixture
def seeded_elsewhere(run, store, tmp_path) -> unheard.Run:
    """Train a seeded run on the users of `run`, and the same settings on other users. Return the second run."""
    rng = np.random.default_rng(31)
    train, held_out = ([counting_user(rng, 40) for _ in range(users)] for users in (60, 10))
    others = write_store(
        tmp_path / "others", train=train, held_out=held_out, vocabulary=store.vocabulary, info=dict(store.info)
    )
    first = replace(reproducible(run, rounds=2), corpus=uncharged_copy(store.path, tmp_path / "own"))
    list(unheard.train(first, tmp_path / "first"))
    other = replace(first, corpus=others.path)
    list(unheard.train(other, tmp_path / "of-others"))
    return first


def test_a_seeded_run_on_other_users_may_be_public_for_these(seeded_elsewhere, tmp_path):
    public = unheard.Training(rounds=1, init_from=str(tmp_path / "of-others"), init_is_public=True)
    list(unheard.train(replace(seeded_elsewhere, training=public), tmp_path / "second"))
    assert len(Ledger.read(tmp_path / "second" / "ledger.jsonl")) == 1


def test_charges_of_two_seeded_runs_with_the_same_settings_are_both_counted(seeded_elsewhere, tmp_path):
    """A run that begins from one of them brings its charges along, also where the other one was charged before."""
    child = unheard.Training(rounds=1, init_from=str(tmp_path / "of-others"))
    list(unheard.train(replace(seeded_elsewhere, training=child), tmp_path / "second"))
    population = PopulationLedger.read(tmp_path / "own" / "ledger.jsonl")
    assert [len(charged.events) for charged in population.runs.values()] == [2, 2, 1]


@pytest.mark.parametrize(("lost", "rows"), [(2, [2, 4, 5]), (4, [2, 4, 5]), (5, [2, 4, 5])])
def test_an_evaluation_that_could_not_be_written_is_made_again(run, tmp_path, monkeypatch, lost, rows):
    """The disk was full. The model of that round is saved when the loop is left, and no other process evaluates it."""
    tried = replace(run, evaluation=replace(run.evaluation, every=2), training=unheard.Training(rounds=5))
    append = RunFolder.append_metrics

    def full(folder, row):
        if row["round"] == lost:
            raise OSError("No space left on device")
        append(folder, row)

    monkeypatch.setattr(RunFolder, "append_metrics", full)
    with pytest.raises(OSError, match="No space"):
        list(unheard.train(tried, tmp_path / "r"))
    monkeypatch.undo()
    list(unheard.resume(tmp_path / "r"))
    folder = RunFolder(tmp_path / "r")
    assert [row["round"] for row in folder.read_metrics()] == rows
    list(unheard.train(tried, tmp_path / "whole"))
    spent = [row["epsilon"] for row in RunFolder(tmp_path / "whole").read_metrics()]
    assert [row["epsilon"] for row in folder.read_metrics()] == spent  # no round was charged twice
    folder.metrics.unlink()  # deleted by hand: it would begin with the last round
    list(unheard.resume(tmp_path / "r"))
    assert not folder.metrics.exists()


def test_equal_models_are_equal_files(run, tmp_path):
    for name in "abcd":
        list(unheard.train(reproducible(run), tmp_path / name))
    assert len({(tmp_path / name / "model.safetensors").read_bytes() for name in "abcd"}) == 1


def test_a_model_that_was_charged_to_the_users_is_not_public_for_them(run, tmp_path):
    list(unheard.train(run, tmp_path / "first"))
    public = unheard.Training(rounds=2, init_from=str(tmp_path / "first"), init_is_public=True)
    with pytest.raises(UnprovenCombination, match="these same users"):
        unheard.train(replace(run, training=public), tmp_path / "second")
    assert not (tmp_path / "second").exists()


def test_starting_from_a_bare_model_needs_a_word_about_its_origin(run, tmp_path):
    list(unheard.train(run, tmp_path / "first"))
    bare = replace(run, training=unheard.Training(rounds=1, init_from=str(tmp_path / "first" / "model.safetensors")))
    with pytest.raises(UnprovenCombination, match="init_is_public"):
        unheard.train(bare, tmp_path / "second")
    save_model(tmp_path / "other.safetensors", run.model, run.model.initial(5), {"round": 3})
    public = replace(bare.training, init_from=str(tmp_path / "other.safetensors"), init_is_public=True)
    list(unheard.train(replace(bare, training=public), tmp_path / "third"))


@pytest.mark.parametrize("noise", [unheard.NoNoise(), unheard.GaussianNoise(noise_multiplier=0.5)])
def test_a_model_that_was_trained_on_these_users_is_not_public_wherever_its_file_lies(run, tmp_path, noise):
    list(unheard.train(replace(run, plan=replace(run.plan, noise=noise)), tmp_path / "first", allow_no_privacy=True))
    model = tmp_path / "first" / "model.safetensors"
    copied, written_again = tmp_path / "elsewhere" / "base.safetensors", tmp_path / "elsewhere" / "again.safetensors"
    copied.parent.mkdir()
    copied.write_bytes(model.read_bytes())
    save_model(written_again, run.model, load_model(model, run.model), {"round": 0})
    for path in (model, copied, written_again):
        public = unheard.Training(rounds=2, init_from=str(path), init_is_public=True)
        for ledger in (None, tmp_path / "another-ledger.jsonl"):
            with pytest.raises(UnprovenCombination, match="these same users"):
                unheard.train(replace(run, training=public, ledger=ledger), tmp_path / "second")
            assert not (tmp_path / "second").exists()


@pytest.mark.parametrize("is_public", [True, False])
@pytest.mark.parametrize("hops", [1, 2])
def test_a_model_of_these_users_is_not_public_after_it_was_trained_on_others(run, tmp_path, is_public, hops):
    """Runs on other users are declared to begin from a public model, or pay for it. Their models are no public start."""
    for name in ("here", "there"):
        uncharged_copy(run.corpus, tmp_path / name)
    here, there = (replace(run, corpus=tmp_path / name) for name in ("here", "there"))
    list(unheard.train(here, tmp_path / "start"))
    begins = tmp_path / "start"
    for hop in range(hops):
        training = unheard.Training(rounds=1, init_from=str(begins), init_is_public=is_public and hop == 0)
        list(unheard.train(replace(there, training=training), tmp_path / f"hop{hop}"))
        begins = tmp_path / f"hop{hop}"
    copied = tmp_path / "copy.safetensors"
    copied.write_bytes((begins / "model.safetensors").read_bytes())
    for path in (begins, begins / "model.safetensors", copied):
        public = replace(here, training=unheard.Training(rounds=1, init_from=str(path), init_is_public=True))
        with pytest.raises(UnprovenCombination, match="these same users"):
            list(unheard.train(public, tmp_path / "end"))


def test_a_run_from_a_seed_is_public_for_the_users_of_another_run_from_that_seed(run, tmp_path):
    for name in ("here", "there"):
        uncharged_copy(run.corpus, tmp_path / name)
        list(unheard.train(replace(run, corpus=tmp_path / name), tmp_path / f"from-{name}"))
    public = unheard.Training(rounds=1, init_from=str(tmp_path / "from-there"), init_is_public=True)
    list(unheard.train(replace(run, corpus=tmp_path / "here", training=public), tmp_path / "end"))


def test_a_total_says_which_of_its_runs_began_from_a_model_declared_public(run, tmp_path):
    uncharged_copy(run.corpus, tmp_path / "store")
    run = replace(run, corpus=tmp_path / "store")
    save_model(tmp_path / "other.safetensors", run.model, run.model.initial(5), {"round": 3})
    public = unheard.Training(rounds=1, init_from=str(tmp_path / "other.safetensors"), init_is_public=True)
    list(unheard.train(run, tmp_path / "from-seed"))
    list(unheard.train(replace(run, training=public), tmp_path / "from-public"))
    content = all_runs(population_of(RunFolder(tmp_path / "from-public")))
    words = "run 'from-public': it began from a model that was declared public"
    assert [text for text in content["warnings"] if text.startswith(words)] != []
    assert not [text for text in content["warnings"] if text.startswith("run 'from-seed': it began")]


def test_nothing_is_public_for_users_one_of_whose_ledgers_is_missing(run, tmp_path):
    """The model may come from a run that was charged there."""
    ledger = tmp_path / "elsewhere" / "ledger.jsonl"
    list(unheard.train(replace(run, ledger=ledger), tmp_path / "first"))
    save_model(tmp_path / "other.safetensors", run.model, run.model.initial(5), {"round": 3})
    public = unheard.Training(rounds=1, init_from=str(tmp_path / "other.safetensors"), init_is_public=True)
    hidden = ledger.rename(tmp_path / "hidden")
    with pytest.raises(LedgerError, match="is missing"):
        unheard.train(replace(run, training=public), tmp_path / "second")
    moved = replace(run, corpus=uncharged_copy(Path(run.corpus), tmp_path / "store"), ledger=ledger)
    list(unheard.train(moved, tmp_path / "third"))
    new_path = ledger.rename(tmp_path / "new-path.jsonl")
    list(unheard.train(replace(moved, training=public, ledger=new_path), tmp_path / "fourth"))
    hidden.rename(ledger)
    list(unheard.train(replace(run, training=public), tmp_path / "second"))


def test_a_run_from_before_digests_were_recorded_is_known_by_the_folder_of_its_model(run, tmp_path, monkeypatch):
    monkeypatch.setattr(PopulationLedger, "record_release", lambda *_: None)
    list(unheard.train(run, tmp_path / "first"))
    for path in ("first/model.safetensors", "first"):
        public = unheard.Training(rounds=2, init_from=str(tmp_path / path), init_is_public=True)
        with pytest.raises(UnprovenCombination, match="these same users"):
            unheard.train(replace(run, training=public), tmp_path / "second")


def test_runs_with_one_seed_begin_from_one_model(run, tmp_path):
    other = replace(run, plan=replace(run.plan, clip=unheard.FlatClip(norm=1.0)))
    assert torch.equal(run.model.initial(run.training.init_seed), other.model.initial(other.training.init_seed))


def test_the_list_of_a_run_with_a_private_vocabulary_keeps_its_cost(run, store, tmp_path, monkeypatch):
    events = [{"kind": "gaussian", "noise_multiplier": 2.0}, {"kind": "failure_probability", "delta": 1e-5}]
    info = {**store.info, "vocabulary": {"kind": "private", "events": events}}
    paid = write_store(
        tmp_path / "paid",
        train=[store.train.tokens(k) for k in range(60)],
        held_out=[store.held_out.tokens(0)],
        vocabulary=store.vocabulary,
        info=info,
    )
    for name, corpus, expected in (("paid-run", paid.path, events), ("free-run", store.path, [])):
        list(unheard.train(replace(run, corpus=corpus, ledger=tmp_path / f"{name}.jsonl"), tmp_path / name))
        draws = [run_id(Ledger.read(tmp_path / name / "ledger.jsonl"))] if expected else []
        assert _cost_of_list(str(tmp_path / name / "vocabulary.txt")) == (expected, draws)


def test_a_vocabulary_that_was_paid_for_is_in_the_ledger(run, store, tmp_path, monkeypatch):
    cost = [{"kind": "gaussian", "noise_multiplier": 3.0}, {"kind": "failure_probability", "delta": 1e-6}]
    monkeypatch.setattr(type(store), "vocabulary_events", property(lambda self: cost))
    list(unheard.train(run, tmp_path / "r"))
    events = Ledger.read(tmp_path / "r" / "ledger.jsonl").events
    assert [type(e).__name__ for e in events[:3]] == ["Gaussian", "FailureProbability", "PoissonGaussian"]
    (further,) = unheard.resume(tmp_path / "r", rounds=run.training.rounds + 1)
    assert further.epsilon == pytest.approx(epsilon([*events, events[-1]], run.claimed_delta, "rdp"))


def test_a_released_model_predicts(run, tmp_path):
    list(unheard.train(run, tmp_path / "r"))
    words = unheard.Released.open(tmp_path / "r").predict("w3 w4", top=4)
    assert len(words) == 4
    assert words == sorted(words, key=lambda pair: -pair[1])


def test_two_that_begin_in_one_place_never_fill_one_folder(run, tmp_path):
    one, other = RunFolder.begin(tmp_path / "r"), RunFolder.begin(tmp_path / "r")
    assert one.path != other.path
    (one.path / "mine").touch()
    one.publish(tmp_path / "r")
    with pytest.raises(RunFolderExists):
        other.publish(tmp_path / "r")
    assert (tmp_path / "r" / "mine").exists()


def test_a_run_cannot_begin_from_one_whose_ledger_was_shortened(run, tmp_path):
    list(unheard.train(run, tmp_path / "first"))
    file = tmp_path / "first" / "ledger.jsonl"
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[:-3]))
    child = replace(run, training=unheard.Training(rounds=1, init_from=str(tmp_path / "first")))
    with pytest.raises(LedgerError, match="shortened"):
        unheard.train(child, tmp_path / "second")
    assert not (tmp_path / "second").exists()


def test_a_statement_names_a_seeded_parent_and_a_model_declared_public(run, tmp_path):
    list(unheard.train(reproducible(run), tmp_path / "first"))
    list(unheard.train(on_other_users(run, tmp_path), tmp_path / "of-others"))
    child = replace(run, training=unheard.Training(rounds=1, init_from=str(tmp_path / "first")))
    for name, training, said in (
        ("a", child.training, "REPRODUCIBLE"),
        ("b", unheard.Training(rounds=1, init_from=str(tmp_path / "of-others"), init_is_public=True), "trust"),
    ):
        list(unheard.train(replace(child, training=training), tmp_path / name))
        assert said in json.loads((tmp_path / name / "statement.json").read_text())["warnings"][0]


def test_a_run_on_synthetic_text_promises_nothing_to_those_from_whose_text_it_was_made(run, store, tmp_path):
    """Nor does any run that begins from its model, on whatever users."""
    made = synthesise(store, tmp_path / "synthetic", users=60, tokens_per_user=30)
    list(unheard.train(replace(run, corpus=made.path), tmp_path / "first"))
    own = on_other_users(run, tmp_path)
    for name, parent in (("child", "first"), ("grandchild", "child")):
        training = unheard.Training(rounds=1, init_from=str(tmp_path / parent))
        list(unheard.train(replace(own, training=training), tmp_path / name))
    for name in ("first", "child", "grandchild"):
        content = unheard.statement(tmp_path / name)
        assert content["warnings"][0] == (SYNTHETIC if name == "first" else _BEGAN_SYNTHETIC)
        assert "privacy for every user except those to whom the synthetic text was fitted, by" in content["claim"]
        for form in FORMATS:
            shown = json.dumps(json.loads(render(content, form))) if form == "registry" else render(content, form)
            assert "NO GUARANTEE" in shown
            assert "except those to whom the synthetic text was fitted" in shown
        total = all_runs(population_of(RunFolder(tmp_path / name)))
        assert "SYNTHETIC TEXT" in total["warnings"][0]
        assert "every user except those" in total["claim"]


def test_warnings_of_the_first_run_are_in_the_statements_of_later_runs(run, tmp_path):
    """All later models contain the noise and the start of the first run."""
    list(unheard.train(reproducible(run), tmp_path / "seeded"))
    list(unheard.train(on_other_users(run, tmp_path), tmp_path / "of-others"))
    for name, start in (
        ("a", unheard.Training(rounds=1, init_from=str(tmp_path / "seeded"))),
        ("b", unheard.Training(rounds=1, init_from=str(tmp_path / "a"))),
        ("c", unheard.Training(rounds=1, init_from=str(tmp_path / "of-others"), init_is_public=True)),
        ("d", unheard.Training(rounds=1, init_from=str(tmp_path / "c"))),
        ("e", unheard.Training(rounds=1, init_from=str(tmp_path / "d"))),
    ):
        list(unheard.train(replace(run, training=start), tmp_path / name))
    for name, said in (("b", "REPRODUCIBLE NOISE"), ("d", "declared public"), ("e", "declared public")):
        warnings = json.loads((tmp_path / name / "statement.json").read_text())["warnings"]
        assert any(said in warning for warning in warnings), (name, warnings)


@pytest.mark.parametrize("number", [0, -1])
def test_a_chunk_of_no_users_is_refused(number):
    with pytest.raises(InvalidValue, match="at least 1"):
        unheard.EngineChoice(users_at_once=number)


def noise_of(folder: Path, run: unheard.Run, attempt: int = 0) -> dict[str, int]:
    streams = initialise.streams_of(
        run, Ledger.read(folder / "ledger.jsonl").facts, TokenStore.open(run.corpus).content_digest
    )
    purposes = ("sampling", "batches", "noise", "count")
    return {name: int(getattr(streams, name)(attempt).integers(2**63)) for name in purposes}


def test_a_run_is_continued_with_the_engine_that_is_asked_for_else_with_its_own(run, tmp_path, monkeypatch):
    list(itertools.islice(unheard.train(reproducible(run, rounds=6), tmp_path / "r"), 2))
    used, build = [], loop.build_engine
    monkeypatch.setattr(loop, "build_engine", lambda choice, *rest: (used.append(choice), build(choice, *rest))[1])
    asked = unheard.EngineChoice(kind="reference")
    next(unheard.resume(tmp_path / "r", engine=asked))
    next(unheard.resume(tmp_path / "r"))
    assert used == [asked, unheard.EngineChoice()]


def test_no_stream_of_noise_is_taken_twice_in_the_life_of_a_seeded_run(run, tmp_path, monkeypatch):
    """A round that is done again is another attempt, so from then on attempts and rounds have other numbers."""
    taken, noise, save = [], ReproducibleStreams.noise, loop._ActiveRun.save
    monkeypatch.setattr(ReproducibleStreams, "noise", lambda self, at: (taken.append(at), noise(self, at))[1])
    going = unheard.train(reproducible(run, rounds=6), tmp_path / "r")
    assert [next(going).round for _ in range(3)] == [1, 2, 3]
    monkeypatch.setattr(loop._ActiveRun, "save", lambda *_: None)  # as in a killed process
    going.close()
    monkeypatch.setattr(loop._ActiveRun, "save", save)
    charged = len(Ledger.read(tmp_path / "r" / "ledger.jsonl"))
    before = len(taken)
    assert [report.round for report in unheard.resume(tmp_path / "r")] == [3, 4, 5, 6]
    assert sorted(taken[before:]) == list(range(charged, charged + 4))
    assert sorted(set(taken[:before])) == sorted(taken[:before])


def test_two_runs_of_one_seed_share_no_stream_and_one_run_repeats_to_the_bit(run, tmp_path):
    run = replace(run, ledger=tmp_path / "ledger.jsonl")
    first = reproducible(run, rounds=2)
    others = {
        "clip": replace(first, plan=replace(first.plan, clip=unheard.FlatClip(norm=1.9))),
        "evaluation": replace(first, evaluation=replace(first.evaluation, every=2)),
        "init": reproducible(run, rounds=2, init_seed=1),
    }
    drawn = {}
    for name, one in {"first": first, **others}.items():
        list(unheard.train(one, tmp_path / name))
        drawn[name] = noise_of(tmp_path / name, one)
    list(unheard.train(first, tmp_path / "again", engine=unheard.EngineChoice(kind="reference")))
    assert noise_of(tmp_path / "again", first) == drawn["first"]
    told = all_runs(PopulationLedger.read(tmp_path / "ledger.jsonl"))["warnings"]
    assert sum("was repeated: its folders share their noise" in warning for warning in told) == 1
    for name in others:
        assert not set(drawn[name].values()) & set(drawn["first"].values())


def test_a_run_from_another_model_at_the_same_path_has_other_noise(run, tmp_path):
    seeded = reproducible(run, rounds=1, init_from=str(tmp_path / "start.safetensors"), init_is_public=True)
    drawn = []
    for seed in (1, 2):
        save_model(tmp_path / "start.safetensors", run.model, run.model.initial(seed), {"round": 0})
        list(unheard.train(seeded, tmp_path / f"from {seed}"))
        drawn.append(noise_of(tmp_path / f"from {seed}", seeded))
    assert not set(drawn[0].values()) & set(drawn[1].values())


def other_text(store: TokenStore, path: Path) -> TokenStore:
    """Write a store from other text that was prepared in the same way, so that its corpus.json is the same."""
    users = [store.train.tokens(k)[::-1].copy() for k in range(store.train.num_users)]
    held_out = [store.held_out.tokens(k) for k in range(store.held_out.num_users)]
    other = write_store(path, train=users, held_out=held_out, vocabulary=store.vocabulary, info=store.info)
    assert other.name == store.name
    return other


def test_runs_of_one_seed_on_stores_that_were_prepared_alike_share_no_noise(run, store, tmp_path):
    seeded = reproducible(run, rounds=1)
    drawn = []
    for name, corpus in (("one", store.path), ("two", other_text(store, tmp_path / "store").path)):
        one = replace(seeded, corpus=corpus)
        list(unheard.train(one, tmp_path / name))
        drawn.append(noise_of(tmp_path / name, one))
    assert not set(drawn[0].values()) & set(drawn[1].values())


def test_a_run_is_not_resumed_on_other_text_that_was_prepared_alike(run, store, tmp_path):
    named = replace(run, ledger=tmp_path / "ledger.jsonl", training=unheard.Training(rounds=1))
    list(unheard.train(named, tmp_path / "run"))
    other = other_text(store, tmp_path / "store")
    with pytest.raises(LedgerError, match="other text"):
        list(unheard.resume(tmp_path / "run", rounds=2, corpus=other.path))
    assert [report.round for report in unheard.resume(tmp_path / "run", rounds=2)] == [2]


def test_runs_with_shared_cohorts_share_cohorts_and_never_noise(run, tmp_path):
    one = replace(reproducible(run, rounds=1, shared_cohorts=True), ledger=tmp_path / "ledger.jsonl")
    two = replace(one, plan=replace(one.plan, clip=unheard.FlatClip(norm=1.9)))
    drawn = []
    for name, shared in (("one", one), ("two", two)):
        list(unheard.train(shared, tmp_path / name))
        drawn.append(noise_of(tmp_path / name, shared))
    same = {purpose for purpose in drawn[0] if drawn[0][purpose] == drawn[1][purpose]}
    assert same == {"sampling", "batches"}


def test_shared_cohorts_need_a_seed():
    with pytest.raises(InvalidValue, match="reproducible_seed"):
        unheard.Training(rounds=1, shared_cohorts=True)


def test_a_seeded_folder_of_an_older_version_continues_with_its_streams(run):
    seeded = reproducible(run)
    old = initialise.streams_of(seeded, {"randomness": {"mode": "reproducible"}}, "")
    assert old == ReproducibleStreams(seed=1)
    assert old.noise(3).integers(2**63) == reproducible_generator(1, "noise", 3).integers(2**63)


def test_runs_that_shared_their_cohorts_are_not_composed(run, store, tmp_path):
    shared = replace(reproducible(run, rounds=1, shared_cohorts=True), ledger=tmp_path / "ledger.jsonl")
    list(unheard.train(shared, tmp_path / "one"))
    all_runs(PopulationLedger.read(tmp_path / "ledger.jsonl"))
    list(unheard.train(replace(shared, plan=replace(run.plan, clip=unheard.FlatClip(norm=1.9))), tmp_path / "two"))
    with pytest.raises(UnprovenCombination, match="shared_cohorts"):
        all_runs(PopulationLedger.read(tmp_path / "ledger.jsonl"))


def test_evaluations_after_a_round_are_dropped_and_the_others_stay_as_they_are(tmp_path):
    folder = RunFolder(tmp_path)
    for kept in range(5):
        folder.metrics.unlink(missing_ok=True)
        for round in range(1, 5):
            folder.append_metrics({"round": round, "epsilon": None, "accuracy": 1 / 3})
        before = folder.metrics.read_bytes()
        folder.drop_metrics_after(kept)
        assert [row["round"] for row in folder.read_metrics()] == [*range(1, kept + 1)]
        assert before.startswith(folder.metrics.read_bytes())  # a checkpoint has the digest of these bytes
