"""`unheard tune` on a small store: it chooses, plans, resumes, and reports its cost."""

import itertools
import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

import unheard
from tests.stores import uncharged_copy
from unheard.cli.main import app, main
from unheard.corpus.store import TokenStore, write_store
from unheard.corpus.transform import shrink_vocabulary
from unheard.errors import InvalidValue, PrivacyError, RunFolderError, RunFolderExists
from unheard.privacy.accountants import best_epsilon
from unheard.privacy.events import PoissonGaussian
from unheard.privacy.ledger import Ledger
from unheard.privacy.population_ledger import PopulationLedger, open_population_ledger
from unheard.training.run import read_run_file, run_toml
from unheard.tuning import output as cost_module
from unheard.tuning import trials as trials_module
from unheard.tuning.pipeline import Allowance, run_stages, users_per_second
from unheard.tuning.trials import (
    Grid,
    Trial,
    _last_evaluations,
    baseline_trials,
    check_can_be_tuned,
    clip_trials,
    noise_trials,
    on_proxy,
)

QUICK = ["--rounds", "4", "--users-per-round", "10", "--norms", "1,4", "--noise-stds", "0.001,0.002"]
GENEROUS = ["--allow-clip-loss", "90", "--allow-loss", "95"]


@pytest.fixture
def run_file(run, store, tmp_path):
    """Write the run file of a private run with 20,000 declared users, on a copy of the store."""
    uncharged_copy(store.path, tmp_path / "private")
    planned = replace(
        run,
        corpus=tmp_path / "private",
        plan=replace(run.plan, population=20_000, sampling=unheard.PoissonSampling(users_per_round=50)),
        training=unheard.Training(rounds=1000, reproducible_seed=3),
        evaluation=unheard.Evaluation(every=1, max_tokens=100),
    )
    file = tmp_path / "run.toml"
    file.write_text(run_toml(planned))
    return file


@pytest.fixture
def proxy(store, tmp_path):
    """Write a store of other users with similar text."""
    users = store.train.users(np.arange(store.train.num_users)[::-1])
    held_out = store.held_out.users(np.arange(store.held_out.num_users))
    info = {key: value for key, value in store.info.items() if key not in ("format", "vocabulary")}
    return write_store(tmp_path / "proxy", train=users, held_out=held_out, vocabulary=store.vocabulary, info=info).path


def tune(*words):
    return CliRunner().invoke(app, ["tune", *map(str, words), "--yes"], catch_exceptions=False)


def test_tune_trains_on_a_proxy_and_plans_for_the_private_corpus(run_file, proxy, store, tmp_path):
    asked = [run_file, "--out", tmp_path / "t", "--corpus", proxy, "--population", 60, *QUICK, *GENEROUS]
    asked += ["--set", "engine.corpus_part=/parts/{node}"]
    done = tune(*asked)
    assert done.exit_code == 0
    found = json.loads((tmp_path / "t" / "tuning.json").read_text())
    assert [row["stage"] for row in found["trials"]] == ["baseline", "clip", "clip", "noise", "noise"]
    assert found["chosen"]["norm"] == 1
    assert found["chosen"]["noise_std"] == 0.002
    chosen, engine = read_run_file(tmp_path / "t" / "chosen.toml")
    assert engine.corpus_part == "/parts/{node}"  # for the run that is planned; the trials went in one process
    event = chosen.plan.at(0, chosen.model.layout).event()
    assert event.noise_multiplier == 1.0
    assert event.sampling_prob == 500 / 20_000  # 1 x 1 / 0.002 users of the declared population
    assert chosen.training.rounds == 1000
    assert chosen.corpus.name == "private"
    assert found["plan"]["hypothetical"] is True
    assert found["plan"]["users_per_second"] > 0
    assert found["plan"]["noise_std"] == pytest.approx(0.002)
    assert "Hypothetical" in done.output
    assert "hypothetical until it is trained" in (tmp_path / "t" / "chosen.toml").read_text()
    # By the ledgers, every round of every trial is charged to the users of the proxy, and none to those of the run.
    charged = PopulationLedger.read(proxy / "ledger.jsonl")
    assert len(charged.runs) == 5
    assert len(charged.events) == 20 == found["tuning_cost"]["charges"]
    assert found["tuning_cost"]["epsilon"] == "infinity"
    assert not (tmp_path / "private" / "ledger.jsonl").exists()
    assert "paid nothing" in done.output
    with pytest.raises(RunFolderExists, match="other options"):  # results of other settings are not reused
        tune(*asked, "--set", "update.learning_rate=0.5")
    write_store(
        tmp_path / "elsewhere", train=[], held_out=[], vocabulary=store.vocabulary, info={"tokens": {"kind": "other"}}
    )
    with pytest.raises(RunFolderExists, match="another run file, corpus"):
        tune(*asked, "--corpus", tmp_path / "elsewhere")
    # again: nothing is trained, nothing is charged, the same is chosen
    again = tune(*asked, "--json")
    assert json.loads(again.stdout)["chosen"] == found["chosen"]
    assert len(PopulationLedger.read(proxy / "ledger.jsonl").events) == 20


SMALL = ["--set", "privacy.population=60", "--set", "privacy.delta=1e-3"]


def test_tuning_on_the_runs_own_users_says_that_they_have_no_guarantee(run_file, tmp_path):
    done = tune(run_file, "--out", tmp_path / "t", *QUICK, *GENEROUS, "--noise-stds", "0.05", *SMALL)
    assert done.exit_code == 0
    warned = f"over all runs on the users of {tmp_path / 'private'}, permanently"  # while it can still be stopped
    assert warned in done.stderr
    assert done.stderr.index(warned) < done.stderr.index("Baseline, and clipping")
    assert "ε = infinity" in done.output
    assert "over all runs they have no guarantee" in done.output
    assert "--corpus PROXY" in done.output
    assert len(PopulationLedger.read(tmp_path / "private" / "ledger.jsonl").runs) == 4
    assert "over all runs they have no guarantee" in (tmp_path / "t" / "chosen.toml").read_text()


def test_tuning_on_the_private_users_is_refused_without_a_terminal_and_names_the_ways_out(run_file, tmp_path):
    with pytest.raises(PrivacyError, match=r"baseline without noise.*--corpus STORE --population N.*--select.*--yes"):
        CliRunner().invoke(app, ["tune", str(run_file), "--out", str(tmp_path / "t"), *QUICK], catch_exceptions=False)
    assert not (tmp_path / "t").exists()


def test_a_population_too_small_gets_its_table_its_price_and_then_the_reason(run_file, tmp_path, monkeypatch, capsys):
    asked = ["tune", run_file, "--out", tmp_path / "t", *QUICK, *GENEROUS, "--noise-stds", "0.001", *SMALL, "--yes"]
    monkeypatch.setattr("sys.argv", ["unheard", *map(str, asked)])
    monkeypatch.setattr("unheard.tuning.output.check_can_be_private", lambda *_: None)
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "chosen.toml").write_text("the choice of an earlier call")
    with pytest.raises(SystemExit, match="2"):
        main()
    shown = capsys.readouterr()
    assert "baseline" in shown.out
    assert "ε = infinity" in shown.out
    assert "need 1,000 users per round" in shown.err
    assert json.loads((tmp_path / "t" / "tuning.json").read_text())["plan"] is None
    assert not (tmp_path / "t" / "chosen.toml").exists()


def test_where_every_clip_costs_too_much_no_noise_is_tried(run, tmp_path):
    """With a negative allowed loss, not even a clip that is better than the baseline is accepted.

    The result counts every run that was trained, including repetitions.
    """
    tried = replace(
        run, training=replace(run.training, rounds=2), evaluation=unheard.Evaluation(every=1, max_tokens=50)
    )
    stages = run_stages(
        tried, Grid(norms=(2.0,), users_per_round=5, seeds=2), Allowance(clip_loss=-99.0), tmp_path / "t"
    )
    trained = []
    while True:
        try:
            stage = next(stages)
        except StopIteration as end:
            tuned = end.value
            break
        trained += stage.trials
        for _ in stage.reports():
            pass
    assert [trial.name for trial in trained] == ["baseline", "baseline", "S=2", "S=2"]
    assert list(tuned.trials) == trained
    cost = cost_module.tuning_cost(tuned.trials, tmp_path / "t", is_proxy=False)
    assert (cost.runs, cost.charges, cost.without_noise) == (4, 8, 8)
    assert tuned.noise is None
    assert "Every S of the grid" in tuned.refusal


@pytest.mark.system
def test_a_stopped_command_continues_where_it_was(run_file, tmp_path, proxy):
    asked = [run_file, "--out", tmp_path / "t", "--corpus", proxy, "--population", 60, *QUICK, *GENEROUS]
    done = tune(*asked, "--stop-after", 0)
    assert "The same command continues" in done.output
    assert not (tmp_path / "t" / "chosen.toml").exists()
    ledgers = sorted((tmp_path / "t").glob("*/*/ledger.jsonl"))
    assert [len(Ledger.read(path)) for path in ledgers] == [1, 1, 1]
    assert tune(*asked).exit_code == 0
    assert len(PopulationLedger.read(proxy / "ledger.jsonl").events) == 20  # no round was done twice


def test_a_trial_that_has_lost_its_evaluations_is_an_error_and_not_a_stop(run, tmp_path):
    tried = replace(
        run, training=replace(run.training, rounds=2), evaluation=unheard.Evaluation(every=1, max_tokens=50)
    )
    grid = Grid(norms=(2.0,), users_per_round=5)
    for _ in next(run_stages(tried, grid, Allowance(), tmp_path / "t")).reports():
        pass
    next((tmp_path / "t").glob("clip/*/metrics.jsonl")).unlink()
    stages = run_stages(tried, grid, Allowance(), tmp_path / "t")
    assert list(next(stages).reports()) == []
    with pytest.raises(RunFolderError, match=r"lacks the evaluation.*delete the folder"):
        next(stages)


@pytest.mark.parametrize("name", ["speed.jsonl", "baseline/baseline,seed=1/metrics.jsonl"])
def test_a_device_in_the_folder_of_a_tuning_is_refused_at_once(run, tmp_path, name):
    (tmp_path / "t" / name).parent.mkdir(parents=True)
    (tmp_path / "t" / name).symlink_to("/dev/zero")
    with pytest.raises(RunFolderError, match="is not a regular file"):
        next(run_stages(run, Grid(norms=(2.0,), users_per_round=5), Allowance(), tmp_path / "t"))


def test_a_folder_with_other_trials_is_not_continued(run_file, tmp_path, proxy):
    asked = [run_file, "--out", tmp_path / "t", "--corpus", proxy, "--population", 60, *QUICK, *GENEROUS]
    tune(*asked, "--stop-after", 0)
    with pytest.raises(RunFolderExists, match="other options"):
        tune(*asked, "--set", "update.learning_rate=0.5")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--corpus", "elsewhere"], "go together"),
        (["--population", "60"], "go together"),
        (["--norms", "1,x"], "--norms 1,x"),
        (["--norms", "1,1"], "twice"),
        (["--noise-stds", "0"], "above 0"),
        (["--set", "privacy.budget_epsilon=8"], "budget of ε = 8"),
        (["--norms", "30", "--noise-stds", "0.001"], "nothing was trained"),
        (["--noise-multiplier", "1e9"], "nothing was trained"),
        (["--set", "clip.kind=adaptive", "--set", "clip.initial_norm=1"], "nothing to sweep"),
    ],
)
def test_what_cannot_be_tuned_is_refused_before_anything_is_charged(run_file, tmp_path, words, why):
    with pytest.raises(InvalidValue, match=why):
        tune(run_file, "--out", tmp_path / "t", *words)
    assert not (tmp_path / "private" / "ledger.jsonl").exists()


def test_a_run_with_a_schedule_is_not_tuned(run):
    schedule = (unheard.Change(from_round=1, noise_multiplier=2.0),)
    check_can_be_tuned(run)
    with pytest.raises(InvalidValue, match="Take it out first"):
        check_can_be_tuned(replace(run, plan=replace(run.plan, schedule=schedule)))


def test_a_trial_without_an_evaluation_has_no_accuracy(run, tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"round": 9, "accuracy_top1": 0.5}\n')  # after its last round
    with pytest.raises(InvalidValue, match="has no evaluation"):
        _last_evaluations(SimpleNamespace(folder=tmp_path, run=run))  # pyright: ignore[reportArgumentType]


def test_a_trial_is_complete_with_the_evaluation_of_its_last_round_and_its_statement(run, tmp_path):
    own = replace(run, training=replace(run.training, rounds=3))
    trial = Trial(stage="clip", norm=1.0, noise_std=0.0, seed=1, run=own, folder=tmp_path)
    for last, is_stated in itertools.product((0, 2, 3, 4), (False, True)):
        rows = [{"round": round, "accuracy_top1": 0.5} for round in range(1, last + 1)]
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (tmp_path / "statement.json").unlink(missing_ok=True)
        if is_stated:
            (tmp_path / "statement.json").write_text("{}")
        assert trial.is_complete() is (last >= 3 and is_stated)


def test_the_accuracy_of_a_trial_is_that_of_its_last_five_evaluations(run, tmp_path):
    """Not of earlier ones, nor of those after its last round, which a tuning with more rounds has written."""
    own = replace(run, training=replace(run.training, rounds=7))
    rows = [{"round": round, "accuracy_top1": round / 100} for round in range(1, 10)]
    for until in (7, 9):
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:until]))
        trial = SimpleNamespace(folder=tmp_path, run=own)
        assert _last_evaluations(trial) == (0.03, 0.04, 0.05, 0.06, 0.07)  # pyright: ignore[reportArgumentType]


def test_the_runs_own_corpus_is_no_proxy(run_file, tmp_path):
    with pytest.raises(InvalidValue, match="cannot be the proxy"):
        tune(run_file, "--out", tmp_path / "t", "--corpus", tmp_path / "private", "--population", 60)


def test_a_store_with_the_same_users_is_no_proxy(run_file, proxy, tmp_path):
    """Refused as proxy: a copy of the store, a store derived from it, and stores that share its ledger."""
    asked = [run_file, "--out", tmp_path / "t", "--population", 60, *QUICK, "--corpus"]
    shutil.copytree(tmp_path / "private", tmp_path / "copy")
    with pytest.raises(InvalidValue, match="or holds the same users"):
        tune(*asked, tmp_path / "copy")
    shrink_vocabulary(TokenStore.open(tmp_path / "private"), tmp_path / "narrow", vocabulary_size=20)
    with pytest.raises(InvalidValue, match="or holds the same users"):
        tune(*asked, tmp_path / "narrow")
    populations = [open_population_ledger(path, path.name, []) for path in (tmp_path / "private", proxy)]
    named = tmp_path / "named.toml"
    named.write_text(run_toml(replace(read_run_file(run_file)[0], ledger=proxy / "ledger.jsonl")))
    with pytest.raises(InvalidValue, match="or holds the same users"):
        tune(named, *asked[1:], proxy)
    (tmp_path / "private").rename(tmp_path / "elsewhere")  # the run's own store may be on another machine
    with pytest.raises(InvalidValue, match="or holds the same users"):
        tune(named, *asked[1:], proxy)
    (tmp_path / "elsewhere").rename(tmp_path / "private")
    populations[0].join(populations[1])
    with pytest.raises(InvalidValue, match="or holds the same users"):
        tune(*asked, proxy)
    assert not (tmp_path / "t").exists()


def test_each_stage_changes_what_the_papers_does_and_nothing_else(run, tmp_path):
    """Baseline: fixed sample, true average. Then Poisson sampling and S. Then sigma. Model, update and start never change."""
    grid = Grid(norms=(5.0, 10.0), noise_stds=(0.01,), users_per_round=7, seeds=2)
    first = baseline_trials(run, grid, tmp_path)
    clips = clip_trials(run, grid, tmp_path)
    noises = noise_trials(run, grid, tmp_path, 10.0)
    assert [len(trials) for trials in (first, clips, noises)] == [2, 4, 2]
    assert {trial.run.plan.sampling for trial in first} == {unheard.FixedSizeSampling(users_per_round=7)}
    assert {trial.run.plan.estimator for trial in first} == {unheard.TrueAverage()}
    assert {trial.run.plan.clip for trial in first} == {unheard.NoClip()}
    assert {trial.run.plan.noise for trial in first + clips} == {unheard.NoNoise()}
    assert {trial.run.plan.sampling for trial in clips + noises} == {unheard.PoissonSampling(users_per_round=7)}
    assert [trial.run.plan.clip.norm for trial in clips] == [5, 5, 10, 10]
    assert {trial.run.plan.noise for trial in noises} == {unheard.GaussianNoise(noise_std=0.01)}
    everything = first + clips + noises
    assert len({trial.folder for trial in everything}) == 8
    assert {(t.run.model, t.run.plan.update, t.run.training.init_seed) for t in everything} == {
        (run.model, run.plan.update, run.training.init_seed)
    }


ACCURACIES = {
    "baseline": 0.300,
    "S=1": 0.290,
    "S=1,sigma=0.1": 0.2895,
    "S=1,sigma=0.2": 0.2851,
    "S=1,sigma=0.4": 0.2805,
    "S=2": 0.2955,
    "S=2,sigma=0.1": 0.2945,
    "S=2,sigma=0.2": 0.2915,
    "S=2,sigma=0.4": 0.2855,
    "S=4": 0.2975,
    "S=4,sigma=0.1": 0.2965,
    "S=4,sigma=0.2": 0.2925,
    "S=4,sigma=0.4": 0.2885,
    "S=8": 0.3005,
    "S=8,sigma=0.1": 0.2985,
    "S=8,sigma=0.2": 0.2945,
    "S=8,sigma=0.4": 0.2905,
}
"""AccuracyTop1 of each setting. Without noise S = 1, 2, 4, 8 lose 1.0, 0.45, 0.25 and -0.05 points."""


@pytest.mark.parametrize("clip_loss", [-1.0, 0.0, 0.3, 0.5, 1.5])
@pytest.mark.parametrize("loss", [-1.0, 0.2, 0.5, 0.8, 1.2, 1.3, 1.9, 9.0])
def test_each_choice_is_made_among_its_own_trials_and_by_its_loss_against_the_baseline(
    run, tmp_path, monkeypatch, clip_loss, loss
):
    """The smallest S and the largest sigma at this S that lose less than allowed. The clip is part of the loss."""
    monkeypatch.setattr(Trial, "is_complete", lambda trial: True)
    monkeypatch.setattr(trials_module, "_last_evaluations", lambda trial: (ACCURACIES[trial.name],))
    grid = Grid(norms=(4.0, 1.0, 8.0, 2.0), noise_stds=(0.2, 0.1, 0.4), users_per_round=5)
    stages = run_stages(run, grid, Allowance(clip_loss=clip_loss, loss=loss), tmp_path / "t")
    with pytest.raises(StopIteration) as end:
        next(stages)
    tuned = end.value.value
    lost = {name: 100 * (ACCURACIES["baseline"] - accuracy) for name, accuracy in ACCURACIES.items()}
    norm = next((s for s in (1, 2, 4, 8) if lost[f"S={s}"] < clip_loss), None)
    sigma = next((s for s in (0.4, 0.2, 0.1) if norm and lost[f"S={norm},sigma={s}"] < loss), None)
    assert tuned.baseline.name == "baseline"
    expected = ["baseline", *(f"S={s}" for s in (4, 1, 8, 2))]
    expected += [f"S={norm},sigma={s}" for s in (0.2, 0.1, 0.4)] if norm else []
    assert [(result.name, result.accuracy) for result in tuned.results] == [(n, ACCURACIES[n]) for n in expected]
    assert [trial.name for trial in tuned.trials] == expected
    for choice, name in ((tuned.norm, norm and f"S={norm}"), (tuned.noise, sigma and f"S={norm},sigma={sigma}")):
        assert (choice and choice.result.name) == name
        assert choice is None or choice.loss == pytest.approx(lost[name])
    assert (tuned.refusal is None) is bool(norm and sigma)
    if tuned.refusal:
        symbol, allowed = ("sigma", loss) if norm else ("S", clip_loss)
        least = min(lost[name] for name in expected[-3:] if norm) if norm else min(lost[name] for name in expected[1:])
        assert f"Every {symbol} of the grid costs {allowed:g} points" in tuned.refusal
        assert f"the least: {least:.2f}" in tuned.refusal


def test_seeds_of_one_setting_differ_where_the_run_file_has_a_seed(run, tmp_path):
    seeded = replace(run, training=replace(run.training, reproducible_seed=5))
    trials = baseline_trials(seeded, Grid(seeds=3), tmp_path)
    assert [trial.run.training.reproducible_seed for trial in trials] == [5, 6, 7]


def test_trials_on_a_proxy_are_charged_to_the_proxys_own_ledger(run, tmp_path):
    named = replace(run, ledger=tmp_path / "people.jsonl", budget=unheard.Budget(epsilon=1.0, delta=1e-3), delta=1e-3)
    tried = on_proxy(named, tmp_path / "proxy", 1000)
    assert (tried.ledger, tried.budget, tried.delta) == (None, None, None)
    assert tried.plan.population == 1000


def test_what_is_declared_of_all_weights_is_scaled_to_the_users_of_the_proxy(run, tmp_path):
    weights = unheard.CappedWeights(weight_cap=10, total_weight=48.0)
    estimator = unheard.ClippedDenominator(min_total_weight=36.0)
    tried = on_proxy(replace(run, plan=replace(run.plan, weights=weights, estimator=estimator)), tmp_path / "proxy", 15)
    assert tried.plan.weights == replace(weights, total_weight=12.0)
    assert tried.plan.estimator == replace(estimator, min_total_weight=9.0)


@pytest.mark.parametrize("points", [float("nan"), float("inf")])
def test_an_allowance_that_is_no_number_is_refused_before_anything_is_trained(points):
    with pytest.raises(InvalidValue, match="--allow-loss"):
        Allowance(loss=points)


def test_the_cost_of_a_tuning_is_that_of_every_charge_of_every_trial_at_the_smallest_delta(monkeypatch, tmp_path):
    event = PoissonGaussian(sampling_prob=0.1, noise_multiplier=2.0)
    ledgers = iter(
        SimpleNamespace(events=[event] * rounds, facts={"delta": delta})
        for rounds, delta in ((3, 1e-5), (4, 1e-6), (3, 1e-4))
    )
    monkeypatch.setattr(cost_module, "read_run_ledger", lambda folder: next(ledgers))
    monkeypatch.setattr(cost_module.RunFolder, "open", lambda folder: folder)
    folders = [tmp_path / "clip" / name for name in "abc"]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "ledger.jsonl").touch()
    # The third trial is not in the grid any more.
    trials = [SimpleNamespace(folder=folder, run=SimpleNamespace(corpus="c")) for folder in folders[:2]]
    cost = cost_module.tuning_cost(trials, tmp_path, is_proxy=False)  # pyright: ignore[reportArgumentType]
    assert (cost.charges, cost.runs, cost.delta) == (10, 3, 1e-6)
    assert cost.bound.epsilon == cost.noised.epsilon == best_epsilon([(event, 10)], 1e-6).epsilon


@pytest.mark.parametrize(
    "content", [None, "", "{", "[1]", '{"users": 3}', '{"users": "a", "seconds": 2}', "[" * 100_000]
)
def test_a_damaged_record_of_the_speed_is_an_unknown_speed(tmp_path, content):
    (tmp_path / "speed.jsonl").write_text('{"users": 6, "seconds": 2.0}\n')
    assert users_per_second(tmp_path) == 3
    (tmp_path / "speed.jsonl").unlink() if content is None else (tmp_path / "speed.jsonl").write_text(content)
    assert users_per_second(tmp_path) is None
