"""A private selection: charged before its first trial, with secret draws, and nothing remains except the best trial."""

import dataclasses
import json
import logging
import re
import shutil
import signal
import subprocess
import sys
import warnings
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from typer.testing import CliRunner

import unheard
from tests.stores import uncharged_copy
from unheard.audit.verification import verify
from unheard.cli.main import app
from unheard.corpus.store import TokenStore, write_digests, write_store
from unheard.engines import vectorised
from unheard.engines.choice import EngineChoice
from unheard.errors import BudgetExceeded, CorpusError, InvalidValue, LedgerError, UnprovenCombination
from unheard.mechanism.aggregation import NoisyAverage
from unheard.mechanism.noise import GaussianNoise
from unheard.privacy.accountants import best_epsilon
from unheard.privacy.budget import Budget
from unheard.privacy.events import FailureProbability, Gaussian, Selection, from_record, to_record
from unheard.privacy.ledger import Ledger
from unheard.privacy.population_ledger import PopulationLedger
from unheard.privacy.population_statement import all_runs
from unheard.run_folder import RunFolder
from unheard.training.loop import resume, train
from unheard.training.run import run_toml
from unheard.tuning import private_selection as selecting
from unheard.tuning.private_selection import TrialCount, select


@pytest.fixture
def candidates(run, store, tmp_path):
    """Return two runs with different learning rates, on a copy of the store."""
    uncharged_copy(store.path, tmp_path / "store")
    short = replace(
        run,
        corpus=tmp_path / "store",
        plan=replace(run.plan, noise=unheard.GaussianNoise(noise_multiplier=2.0)),
        training=unheard.Training(rounds=3, checkpoint_every=2),
        evaluation=unheard.Evaluation(every=1, max_tokens=100),
    )
    rates = (0.01, 1.0)
    return [
        replace(short, plan=replace(short.plan, update=replace(short.plan.update, learning_rate=rate)))
        for rate in rates
    ]


class Drawn(TrialCount):
    """A number of trials that is not random: it is always the mean."""

    def draw(self, rng):
        return int(self.mean)


def population_of(candidates):
    return PopulationLedger.read(candidates[0].corpus / "ledger.jsonl")


def test_one_charge_for_all_trials_in_both_ledgers_and_the_folder_fits_together(candidates, tmp_path):
    folder = select(candidates, tmp_path / "best", Drawn(mean=2))
    event = Selection(sampling_prob=12 / 60, noise_multiplier=2.0, rounds=3, mean_trials=2.0, drawn_from="geometric")
    assert Ledger.read(folder.ledger).events == [event]
    assert population_of(candidates).events == [event]
    assert all(finding.fits for finding in verify(tmp_path / "best"))
    told = json.loads(folder.statement.read_text())
    assert told["claimed"]["epsilon"] == best_epsilon([event], told["delta"]).epsilon
    assert told["rounds"]["charged"] == 3
    for printed in (told["warnings"], all_runs(population_of(candidates))["warnings"]):
        assert any("best of a secret number of runs" in warning for warning in printed)


def test_a_selected_run_pays_for_its_vocabulary_too(candidates, tmp_path):
    spent = [Gaussian(noise_multiplier=4.0), Gaussian(noise_multiplier=4.0), FailureProbability(delta=1e-7)]
    path = candidates[0].corpus / "corpus.json"
    record = json.loads(path.read_text())
    record["vocabulary"]["events"] = [to_record(event) for event in spent]
    path.write_text(json.dumps(record))
    write_digests(candidates[0].corpus)
    folder = select(candidates, tmp_path / "best", Drawn(mean=2))
    events = Ledger.read(folder.ledger).events
    assert events[:3] == spent
    assert [type(event) for event in events[3:]] == [Selection]
    assert sorted(map(repr, population_of(candidates).events)) == sorted(map(repr, events))
    stated = json.loads(folder.statement.read_text())
    assert stated["vocabulary_cost"]["events"] == 3
    assert sum(row["times"] for row in stated["composed"]) == 4
    assert all(finding.fits for finding in verify(tmp_path / "best"))


def test_the_users_are_charged_before_any_text_is_read(candidates, tmp_path, monkeypatch):
    seen = []

    def no_training(runs, **_):
        seen.append(population_of(candidates).events)
        raise KeyboardInterrupt

    monkeypatch.setattr(selecting, "train_together", no_training)
    with pytest.raises(KeyboardInterrupt):
        select(candidates, tmp_path / "best", TrialCount(mean=2))
    assert [[type(event) for event in events] for events in seen] == [[Selection]]
    assert len(population_of(candidates).events) == 1  # a stopped selection stays charged
    assert [path.name for path in tmp_path.iterdir()] == ["store"]  # and leaves nothing


@pytest.mark.parametrize("is_stopped", [False, True])
def test_the_store_remembers_nothing_of_the_trials(candidates, tmp_path, monkeypatch, is_stopped):
    """The length of the trials' temporary ledger would say how many trials there were."""
    if is_stopped:
        monkeypatch.setattr(selecting, "mean_of_last", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            select(candidates, tmp_path / "best", Drawn(mean=2))
    else:
        select(candidates, tmp_path / "best", Drawn(mean=2))
    record = json.loads((candidates[0].corpus / "ledgers.json").read_text())
    assert record["known"].keys() == {"ledger.jsonl"}


def test_of_the_other_trials_nothing_is_left(candidates, tmp_path):
    folder = select(candidates, tmp_path / "best", Drawn(mean=3))
    names = {path.name for path in folder.path.rglob("*") if path.is_file()}
    assert names == {
        *("run.toml", "ledger.jsonl", "metrics.jsonl", "statement.json", "model.safetensors", "vocabulary.txt"),
        *("tokens.json", "round-00000003.safetensors"),
    }
    assert {path.name for path in tmp_path.iterdir()} == {"store", "best"}
    assert "people.jsonl" not in folder.run_file.read_text()  # the ledger of the trials is not that of the run
    whole = best_epsilon(Ledger.read(folder.ledger).events, folder_delta(folder)).epsilon
    assert {row["epsilon"] for row in folder.read_metrics()} == {whole}


def folder_delta(folder):
    return Ledger.read(folder.ledger).facts["delta"]


def test_the_best_by_held_out_accuracy_is_kept(candidates, tmp_path, monkeypatch):
    """The test sets the scores: the second of three trials is the best."""
    scores = iter([0.1, 0.3, 0.2])
    kept, made = [], []
    train = selecting.train_together
    monkeypatch.setattr(
        selecting,
        "train_together",
        lambda runs, **how: (made.extend(place for _, place in runs), train(runs, **how))[1],
    )
    monkeypatch.setattr(selecting, "mean_of_last", lambda rows: next(scores))
    real = selecting._release
    evaluated = []

    def release(run, trial, *rest):
        kept.append(trial.path)
        evaluated.extend(trial.read_metrics())
        real(run, trial, *rest)

    monkeypatch.setattr(selecting, "_release", release)
    folder = select(candidates, tmp_path / "best", Drawn(mean=3))
    assert kept == [made[1]]
    # Every evaluation of the best trial is kept as it was, with the epsilon of the selection.
    assert [row["round"] for row in evaluated] == [1, 2, 3]
    assert folder.read_metrics() == [
        {**row, "epsilon": new["epsilon"]} for row, new in zip(evaluated, folder.read_metrics(), strict=True)
    ]
    # A name does not reveal the number of a trial.
    assert all(re.fullmatch("[0-9a-f]{16}", place.name) for place in made)


KILLED = """
import sys
from pathlib import Path
from unheard.tuning import private_selection as selecting
from unheard.tuning.private_selection import TrialCount
from unheard.training.run import read_run_file
import os, signal

def killed(runs, **how):
    for _, place in runs:
        place.mkdir()
        (place / "model.safetensors").write_text("of a trial")
    os.kill(os.getpid(), signal.SIGKILL)

selecting.train_together = killed
selecting.select([read_run_file(Path(sys.argv[1]))[0]], sys.argv[2], TrialCount(mean=1))
"""


@pytest.mark.system
def test_the_next_selection_deletes_the_rest_of_a_killed_one(candidates, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(run_toml(candidates[1]))
    done = subprocess.run([sys.executable, "-c", KILLED, str(file), str(tmp_path / "best")], check=False)
    assert done.returncode == -signal.SIGKILL
    (left,) = tmp_path.glob(".best.*.new")
    assert left.stat().st_mode & 0o077 == 0
    with RunFolder(left / "trials").locked():
        selecting.delete_killed_selections(tmp_path / "best")  # files of a running selection are not deleted
    assert left.exists()
    select(candidates, tmp_path / "best", Drawn(mean=1))
    assert not left.exists()
    assert len(population_of(candidates).events) == 2  # both were charged


@pytest.mark.parametrize("name", ["best", "b" * 60, "a[b]*?"])
def test_a_selection_begins_by_deleting_the_trials_of_a_killed_one(candidates, tmp_path, monkeypatch, name):
    left = RunFolder.begin(tmp_path / name).path / "trials"
    of_others = RunFolder.begin(tmp_path / "second").path / "trials"
    for trials in (left, of_others):
        (trials / "one").mkdir(parents=True)

    def no_training(runs, **_):
        assert not left.parent.exists()
        raise KeyboardInterrupt

    monkeypatch.setattr(selecting, "train_together", no_training)
    with pytest.raises(KeyboardInterrupt):
        select(candidates, tmp_path / name, TrialCount(mean=2))
    assert not left.parent.exists()
    assert of_others.exists()


def test_where_the_number_drawn_is_zero_there_is_no_model_but_a_charge(candidates, tmp_path):
    class Zero(TrialCount):
        def draw(self, rng):
            return 0

    assert select(candidates, tmp_path / "best", Zero(mean=2, drawn_from="poisson")) is None
    assert len(population_of(candidates).events) == 1
    assert not (tmp_path / "best").exists()


def test_a_selected_run_continues_like_any_other_and_pays_for_its_further_rounds(candidates, tmp_path):
    folder = select(candidates, tmp_path / "best", Drawn(mean=1))
    assert [report.round for report in resume(folder.path, rounds=5)] == [4, 5]
    kinds = [type(event).__name__ for event in Ledger.read(folder.ledger).events]
    assert kinds == ["Selection", "PoissonGaussian", "PoissonGaussian"]
    assert len(population_of(candidates).events) == 3
    assert all(finding.fits for finding in verify(folder.path))


@pytest.mark.parametrize("drawn_from", ["geometric", "poisson"])
def test_the_number_is_drawn_from_the_distribution_that_is_charged(drawn_from):
    """Mean and probability of the smallest number, within five standard errors of 20,000 draws."""
    rng, count = np.random.default_rng(1), TrialCount(mean=4.0, drawn_from=drawn_from)
    drawn = np.array([count.draw(rng) for _ in range(20_000)])
    variance = 4.0 * 3.0 if drawn_from == "geometric" else 4.0
    assert abs(drawn.mean() - 4.0) < 5 * (variance / 20_000) ** 0.5
    least, share = (1, 0.25) if drawn_from == "geometric" else (0, np.exp(-4.0))
    assert drawn.min() == least
    assert abs((drawn == least).mean() - share) < 5 * (share / 20_000) ** 0.5
    event = Selection(sampling_prob=0.1, noise_multiplier=1, rounds=1, mean_trials=4.0, drawn_from=drawn_from)
    assert (event.mean_trials, event.drawn_from) == (count.mean, count.drawn_from)


@pytest.mark.parametrize(
    "wrong", [{"mean_trials": 0.5}, {"drawn_from": "fixed"}, {"rounds": 0}, {"rounds": 2.5}, {"sampling_prob": 0.0}]
)
def test_a_selection_that_the_bound_is_not_for_is_no_event(wrong):
    right = {"sampling_prob": 0.1, "noise_multiplier": 1.0, "rounds": 3, "mean_trials": 2.0, "drawn_from": "geometric"}
    assert from_record({"kind": "selection", **right}) == Selection(**right)
    with pytest.raises(InvalidValue):
        Selection(**{**right, **wrong})
    with pytest.raises(LedgerError):
        from_record({"kind": "selection", **right, **wrong})


def test_every_trial_draws_its_candidate_anew_and_from_all_of_them(candidates, tmp_path, monkeypatch):
    asked = []

    def pretend(runs, **_):
        asked.extend(run.plan.update.learning_rate for run, _ in runs)
        for run, place in runs:
            place.mkdir()
            # Trials have no budget: a trial stopped by a budget would reveal something about their number.
            assert (run.budget, run.ledger) == (None, tmp_path / "people.jsonl")
        return iter(())

    monkeypatch.setattr(selecting, "train_together", pretend)
    limited = [replace(run, budget=Budget(epsilon=9.0, delta=run.claimed_delta)) for run in candidates]
    selecting._best(limited, 400, tmp_path, unheard.EngineChoice())
    assert len(asked) == 400
    assert 140 < asked.count(1.0) < 260  # six standard deviations
    changes = sum(a != b for a, b in pairwise(asked))
    assert 140 < changes < 260


def test_the_names_of_trials_are_random_in_every_bit_and_tell_nothing_of_their_number(
    candidates, tmp_path, monkeypatch
):
    """An error message may name the folder of a trial. A count, a time or a number of the group would show in a name."""
    places, groups = [], []

    def pretend(runs, **_):
        groups.append(len(runs))
        for _, place in runs:
            place.mkdir()
            places.append(place)
        return iter(())

    monkeypatch.setattr(selecting, "train_together", pretend)
    for _ in range(2):
        selecting._best(candidates, 100, tmp_path, EngineChoice())
    assert sum(groups) == len({place.name for place in places}) == 200
    assert {place.parent for place in places} == {tmp_path}
    names = [int(place.name, 16) for place in places]
    assert {len(place.name) for place in places} == {16}
    for bit in range(64):  # six standard deviations of 200 tosses are 42
        ones = [name >> bit & 1 for name in names]
        assert 57 < sum(ones) < 143
        assert 56 < sum(a != b for a, b in pairwise(ones)) < 143  # a counter would turn its bits in order


def test_each_evaluation_of_a_selected_run_has_the_epsilon_of_everything_in_its_ledger(candidates, tmp_path):
    """Of the vocabulary, of the run that it began from and of all trials."""
    path = candidates[0].corpus / "corpus.json"
    record = json.loads(path.read_text())
    spent = [Gaussian(noise_multiplier=3.0), FailureProbability(delta=1e-7)]
    record["vocabulary"]["events"] = [to_record(event) for event in spent]
    path.write_text(json.dumps(record))
    write_digests(candidates[0].corpus)
    list(train(candidates[0], tmp_path / "first"))
    start = {"init_from": str(tmp_path / "first")}
    candidates = [replace(run, training=replace(run.training, **start)) for run in candidates]
    folder = select(candidates, tmp_path / "best", Drawn(mean=1))
    ledger = Ledger.read(folder.ledger)
    assert ledger.facts["start"]["charges"] == len(ledger) == 2 + (2 + 3) + 1
    parts = [ledger.events[:2], ledger.events[2:7], ledger.events[7:]]
    assert parts[0] == spent
    assert parts[1] == Ledger.read(tmp_path / "first" / "ledger.jsonl").events
    whole = best_epsilon(ledger.events, ledger.facts["delta"]).epsilon
    rows = folder.read_metrics()
    assert len(rows) == 3
    assert {row["epsilon"] for row in rows} == {whole}
    for missing in range(3):  # every part is visible in the figure
        rest = [event for number, part in enumerate(parts) if number != missing for event in part]
        assert best_epsilon(rest, ledger.facts["delta"]).epsilon < whole


def other(run, **parts):
    return replace(run, plan=replace(run.plan, **parts))


def test_candidates_of_different_cost_are_refused(candidates):
    for cheaper in (
        other(candidates[0], noise=unheard.GaussianNoise(noise_multiplier=1.9)),
        other(candidates[0], sampling=unheard.PoissonSampling(users_per_round=13)),
        replace(candidates[0], training=replace(candidates[0].training, rounds=4)),
    ):
        with pytest.raises(UnprovenCombination, match="must all cost the same"):
            TrialCount(mean=2).event([candidates[1], cheaper])


def test_another_clip_at_the_same_z_costs_the_same(candidates):
    wider = other(candidates[0], clip=unheard.FlatClip(norm=4.0))
    assert TrialCount(mean=2).event([*candidates, wider]) == TrialCount(mean=2).event(candidates)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda run: other(run, noise=unheard.NoNoise()), "must be private runs"),
        (
            lambda run: other(run, schedule=(unheard.Change(from_round=1, noise_multiplier=1.0),)),
            "must be private runs",
        ),
        (lambda run: replace(run, training=replace(run.training, reproducible_seed=1)), "reproducible_seed"),
    ],
)
def test_what_has_no_proof_is_refused_before_anything_is_charged(candidates, tmp_path, change, why):
    with pytest.raises(UnprovenCombination, match=why):
        select([change(run) for run in candidates], tmp_path / "best", TrialCount(mean=2))
    assert not (candidates[0].corpus / "ledger.jsonl").exists()


def test_a_selection_of_nothing_is_refused(tmp_path):
    with pytest.raises(InvalidValue, match="at least one candidate"):
        select([], tmp_path / "best", TrialCount(mean=2))


def test_a_corpus_part_is_refused_before_anything_is_charged(candidates, tmp_path):
    with pytest.raises(InvalidValue, match="this process is alone"):
        select(candidates, tmp_path / "best", TrialCount(mean=2), engine=EngineChoice(corpus_part="/parts/{node}"))
    assert not (candidates[0].corpus / "ledger.jsonl").exists()


@pytest.mark.parametrize("what", ["device", "start", "origin"])
def test_a_run_that_no_trial_could_start_is_refused_before_anything_is_charged(candidates, tmp_path, what):
    """An error in the run file must not cost the users a whole selection."""
    engine = EngineChoice(device="tpu") if what == "device" else EngineChoice()
    start = {"start": tmp_path / "nowhere", "origin": tmp_path / "model.safetensors"}.get(what)
    if start is not None:
        (tmp_path / "model.safetensors").write_bytes(b"")
        candidates = [replace(r, training=replace(r.training, init_from=str(start))) for r in candidates]
    with pytest.raises((InvalidValue, UnprovenCombination)):
        select(candidates, tmp_path / "best", TrialCount(mean=2), engine=engine)
    assert not (candidates[0].corpus / "ledger.jsonl").exists()


def test_each_candidate_is_checked_before_anything_is_charged(candidates, tmp_path, monkeypatch):
    """Otherwise an invalid candidate would end a charged selection, depending on the number of trials."""
    checked = []

    def check(run, store):
        checked.append(run.plan.update.learning_rate)
        if run.plan.update.learning_rate == 1.0:
            raise InvalidValue("not this one")

    monkeypatch.setattr(selecting, "check_run", check)
    with pytest.raises(InvalidValue, match="not this one"):
        select(candidates, tmp_path / "best", TrialCount(mean=2))
    assert checked == [0.01, 1.0]
    assert not (candidates[0].corpus / "ledger.jsonl").exists()


@pytest.mark.parametrize("what", ["no text held out", "a model of these users"])
def test_each_check_of_a_run_is_made_for_a_selection_too(candidates, tmp_path, what):
    if what == "no text held out":
        store = TokenStore.open(candidates[0].corpus)
        users = [store.train.tokens(k) for k in range(5)]
        write_store(tmp_path / "other", train=users, held_out=[], vocabulary=store.vocabulary, info=store.info)
        candidates = [replace(run, corpus=tmp_path / "other") for run in candidates]
        with pytest.raises(CorpusError, match="others held out"):
            select(candidates, tmp_path / "best", TrialCount(mean=2))
        # A trial would raise this too, but only after the charge.
        assert not (tmp_path / "other" / "ledger.jsonl").exists()
        return
    list(train(candidates[0], tmp_path / "first"))
    charged = len(population_of(candidates).events)
    start = {"init_from": str(tmp_path / "first"), "init_is_public": True}
    candidates = [replace(run, training=replace(run.training, **start)) for run in candidates]
    with pytest.raises(UnprovenCombination, match="was trained on these same users"):
        select(candidates, tmp_path / "best", TrialCount(mean=2))
    assert len(population_of(candidates).events) == charged


def test_selection_on_several_processes_is_refused(candidates, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UnprovenCombination, match="one process"):
        select(candidates, tmp_path / "best", TrialCount(mean=2))
    assert not (candidates[0].corpus / "ledger.jsonl").exists()


def test_candidates_that_differ_in_anything_but_update_clip_and_server_are_refused(candidates, tmp_path):
    first, second = (replace(run, delta=1e-3) for run in candidates)
    other = {
        "corpus": "elsewhere",
        "ledger": "elsewhere.jsonl",
        "model": replace(first.model, hidden_size=9),
        "training": replace(first.training, init_seed=1),
        "evaluation": replace(first.evaluation, every=2),
        "budget": Budget(epsilon=99.0, delta=first.claimed_delta),
        "delta": 2e-3,
        "plan": replace(first.plan, population=61),
    }
    assert {*other, "server"} == {field.name for field in dataclasses.fields(unheard.Run)}
    for name, value in other.items():
        word = {"delta": "claimed_delta", "plan": "population"}.get(name, name)
        with pytest.raises(InvalidValue, match=f"the same {word}"):
            select([second, replace(first, **{name: value})], tmp_path / "best", TrialCount(mean=2))
    assert not (first.corpus / "ledger.jsonl").exists()


def test_a_budget_is_asked_before_the_first_trial(candidates, tmp_path):
    tight = [replace(run, budget=Budget(epsilon=0.5, delta=run.claimed_delta)) for run in candidates]
    with pytest.raises(BudgetExceeded):
        select(tight, tmp_path / "best", TrialCount(mean=2))
    assert not population_of(candidates).events


def test_nothing_that_is_printed_logged_or_written_follows_the_number_of_trials(
    candidates, tmp_path, monkeypatch, caplog, capfd
):
    """With one trial and with nine (two groups), of a run that warns its operator whenever it is checked."""
    plan = replace(candidates[0].plan, population=13, noise=GaussianNoise(noise_multiplier=20.0))
    warned = replace(candidates[0], plan=plan, training=unheard.Training(rounds=1))  # the store has more than 13 users
    monkeypatch.setattr(
        GaussianNoise, "add", lambda noise, average, rng: NoisyAverage(average_P=0 * average.average_P, noise_std=1.0)
    )
    (tmp_path / "run.toml").write_text(run_toml(warned))
    words = f"tune {tmp_path / 'run.toml'} --out {tmp_path / 'best'} --select --vary clip.norm=2 --log-file {tmp_path / 'log'}"
    caplog.set_level(logging.DEBUG, logger="unheard")
    seen = []
    for trials in (1, 9):
        monkeypatch.setattr(TrialCount, "draw", lambda count, rng, trials=trials: trials)
        caplog.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            done = CliRunner().invoke(app, words.split(), catch_exceptions=False)
        assert done.exit_code == 0
        logged = [record.getMessage() for record in caplog.records]
        files = {str(path.relative_to(tmp_path / "best")) for path in (tmp_path / "best").rglob("*")}
        rows = RunFolder.open(tmp_path / "best").read_metrics()
        seen.append((done.output, capfd.readouterr(), logged, (tmp_path / "log").read_text(), files, rows))
        shutil.rmtree(tmp_path / "best")
        (tmp_path / "log").unlink()
    assert seen[0] == seen[1]
    assert any("smaller than the number of users" in line for line in seen[0][2])  # of the check before the trials


@pytest.mark.parametrize("name", ["unheard", "unheard.training", "unheard.engines", "unheard.made.later"])
def test_trials_are_trained_in_silence_and_levels_come_back(name, caplog, capfd):
    log = logging.getLogger(name)
    with caplog.at_level(logging.DEBUG, logger=name):
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            with selecting._silence():
                warnings.warn("a group of trials", stacklevel=1)
                log.critical("a trial")
                vectorised._progress("compiled for a group of trials")
        assert not warned
        assert not caplog.records
        assert capfd.readouterr() == ("", "")
        log.info("afterwards")
        assert [record.getMessage() for record in caplog.records] == ["afterwards"]
    vectorised._progress("compiled")
    assert "compiled" in capfd.readouterr().err


def test_the_command_prints_the_best_and_its_cost_and_nothing_of_the_others(candidates, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(run_toml(candidates[0]))
    asked = ["tune", str(file), "--out", str(tmp_path / "best"), "--select", "--trials", "2"]
    done = CliRunner().invoke(app, [*asked, "--vary", "update.learning_rate=0.5,1.0"], catch_exceptions=False)
    assert done.exit_code == 0
    assert "The best: update.learning_rate=" in done.output
    assert "differential privacy for every user, by rdp" in done.output
    assert "held-out users, who are not protected" in done.output
    assert "%" not in done.output  # no score
    for words, why in (
        ([], "needs candidates"),
        (["--vary", "clip.norm=1,2", "--seeds", "2"], "--seeds has no meaning"),
    ):
        with pytest.raises(InvalidValue, match=why):
            CliRunner().invoke(app, [*asked, *words], catch_exceptions=False)
    with pytest.raises(InvalidValue, match="--trials has no meaning for a sweep"):
        CliRunner().invoke(app, ["tune", str(file), "--out", "x", "--trials", "3"], catch_exceptions=False)
