"""Recipes as data: the settings of each run, shared runs, and the order and groups in which runs are trained."""

from dataclasses import replace
from pathlib import Path

import pytest
from reproduction.base_config import build_run, comparable_settings, settings_of
from reproduction.corpora import Corpus, find_corpora
from reproduction.recipe import CORPORA, FULL, SMOKE, distinct, scale_named
from reproduction.recipes import RECIPES
from reproduction.scheduling import (
    MOST_RUNS,
    MOST_USERS,
    Job,
    PendingJob,
    Step,
    furthest,
    jobs_of,
    next_group,
    read_schedule,
    steps_by_rank,
)
from reproduction.verdict import TRAINED

from reproduction import recipes
from unheard.errors import ConfigError, CorpusError
from unheard.mechanism.aggregation import ClippedDenominator, FixedDenominator, TrueAverage
from unheard.mechanism.clipping import AdaptiveClip, NoClip, PerLayerClip
from unheard.mechanism.noise import NoNoise
from unheard.mechanism.sampling import FixedSizeSampling, PoissonSampling
from unheard.updates.user_update import FedSGD

RUNS = {run.name: run for run in distinct(RECIPES.values())}
SIZES = {"20k": 20_000, "30k": 30_000, "characters": 104}


def corpus(role: str = "main", population: int = 763_430, users: int = 763_000) -> Corpus:
    return Corpus(
        role=role,
        path=Path("corpora") / role,
        name="paper",
        population=population,
        is_counted=False,
        users=users,
        held_out=40_000,
        longest=1_915,
        digest="",
        vocabulary_size=SIZES.get(role, 10_000),
        vocabulary_digest="",
    )


def made(name: str, scale=FULL, **more):
    run = RUNS[name]
    start = Path("runs") / run.after if run.after else None
    return build_run(run, corpus(run.corpus), ledger=Path("l"), rounds=run.rounds, scale=scale, start=start, **more)


@pytest.mark.parametrize("name", RUNS)
def test_every_run_is_the_papers_setting_with_its_own_changes(name):
    run = made(name)
    update = run.plan.update
    assert (update.learning_rate, update.unroll) == (6.0, 10)
    assert isinstance(update, FedSGD) == name.startswith("fedsgd")
    if isinstance(update, FedSGD):
        assert update.batch_size * update.unroll >= 1600  # and the BOS of every sentence
    else:
        assert update.batch_size * update.unroll == 80
    assert run.claimed_delta == pytest.approx(763_430**-1.1)
    assert (run.training.init_seed, run.training.reproducible_seed) == (0, RUNS[name].seed)
    assert (run.evaluation.every, run.evaluation.max_tokens) == (100, 10_000_000)  # all held-out users
    assert (run.training.init_from is None) == (RUNS[name].after is None)


def test_every_recipe_has_runs_and_a_rule_with_its_limits_filled_in():
    assert set(recipes.RUNS) == set(RECIPES) - {"table-rounds"}
    assert [name for name, recipe in RECIPES.items() if "{" in recipe.rule or not recipe.rule.endswith(".")] == []
    assert "at most 90% of the rounds" in RECIPES["public-start"].rule
    assert "at most 0.50 points below the baseline" in RECIPES["noised-vs-baseline"].rule


def test_the_main_model_is_the_papers_and_the_untied_one_is_seventy_percent_larger():
    assert made("baseline").model.layout.total == 1_346_144
    assert made("untied-baseline").model.layout.total == 2_306_144


def event(name: str):
    run = made(name)
    return run.plan.at(0, run.model.layout).event()


@pytest.mark.parametrize("name", ["flat-S15-sigma0.012-C1250", "flat-S15-sigma0.003-C5000", "cost-C5000"])
def test_private_runs_have_z_one(name):
    assert event(name).noise_multiplier == pytest.approx(1.0)


def test_traded_runs_cost_the_same_whatever_their_clip():
    runs = {
        run.name for name in ("trade-offs", "trade-offs-adjusted", "adaptive-clipping") for run in RECIPES[name].runs
    }
    assert len(runs) == 7 + 9 + 1
    assert all(event(name).noise_multiplier == pytest.approx(0.06) for name in runs)
    assert isinstance(made("adaptive-z0.06").plan.clip, AdaptiveClip)
    assert isinstance(made("then-per-layer-S20-sigma0.012").plan.clip, PerLayerClip)


def test_the_estimators_recipe_is_what_its_names_say():
    kinds = {
        "baseline": (FixedSizeSampling, TrueAverage),
        "variable-true-average": (PoissonSampling, TrueAverage),
        "variable-fixed-denominator": (PoissonSampling, FixedDenominator),
        "variable-clipped-denominator": (PoissonSampling, ClippedDenominator),
    }
    assert {run.name for run in RECIPES["estimators"].runs} == set(kinds)
    for name, (sampling, estimator) in kinds.items():
        plan = made(name).plan
        assert (type(plan.sampling), type(plan.estimator)) == (sampling, estimator)
        assert (type(plan.clip), type(plan.noise)) == (NoClip, NoNoise)
        assert plan.sampling.users_per_round == 100


def test_the_clipped_denominators_minimum_is_the_declared_population():
    run = RUNS["variable-clipped-denominator"]
    plan = build_run(run, corpus(population=5_000), ledger=Path("l"), rounds=1).plan
    assert plan.estimator == ClippedDenominator(min_total_weight=5_000)


def test_seeds_shift_and_settings_hold_no_path():
    run = made("then-flat-S10-sigma0.006", seed_shift=40)
    assert run.training.reproducible_seed == 41
    settings = settings_of(run, "flat-S20-sigma0.012 after 9 rounds")
    assert settings["training"]["init_from"] == "flat-S20-sigma0.012 after 9 rounds"
    assert "ledger" not in settings["privacy"]
    assert "corpora" not in str(settings)


def test_results_from_before_a_key_came_mean_what_was_done_then():
    run = made("baseline")
    put_back, grown = (settings_of(replace(run, model=replace(run.model, keep_norm=kept))) for kept in (True, False))
    before = {**put_back, "model": {key: value for key, value in put_back["model"].items() if key != "keep_norm"}}
    assert comparable_settings(before) == comparable_settings(put_back) != comparable_settings(grown)


def test_only_the_public_start_is_declared_public():
    declared = {name for name in RUNS if made(name).training.init_is_public}
    assert declared == {"after-public-flat-S15-sigma0.003"}


def test_shared_runs_are_one_and_as_long_as_the_longest_asks():
    jobs = {job.run.name: job for job in jobs_of(Step(recipes=("noise", "trade-offs")), FULL)}
    assert jobs["flat-S20-sigma0.012"].rounds == 4885
    assert sum(len(recipe.runs) for recipe in RECIPES.values()) > len(RUNS) == 108
    everything = furthest(job for step in steps_by_rank(["all"]) for job in jobs_of(step, FULL))
    assert len(everything) == 108


def test_all_runs_the_most_wanted_first_and_parents_before_children():
    steps = steps_by_rank(["all"])
    assert [RECIPES[step.recipes[0]].rank for step in steps] == sorted(RECIPES[step.recipes[0]].rank for step in steps)
    assert steps[0].recipes == ("noised-vs-baseline", "table-accuracy")
    for step in steps:
        names = [job.run.name for job in jobs_of(step, FULL)]
        for job in jobs_of(step, FULL):
            assert job.run.after is None or names.index(job.run.after) < names.index(job.run.name)


def test_a_cap_holds_for_what_comes_after_too():
    assert {job.rounds for job in jobs_of(Step(recipes=("trade-offs-adjusted",), rounds=700), FULL)} == {700}
    assert {job.planned for job in jobs_of(Step(recipes=("trade-offs-adjusted",), rounds=700), FULL)} == {4885, 6000}


def test_the_tiny_scale_keeps_every_difference_but_size():
    assert SMOKE.rounds(RUNS["baseline"]) == 2
    assert {SMOKE.users(run, 2) for run in RUNS.values()} == {1, 2}
    small = made("gru-baseline", SMOKE).model
    assert (small.embedding_size, small.hidden_size) == (8, 16)
    with pytest.raises(ConfigError, match="Did you mean 'smoke'"):
        scale_named("smok")


SCHEDULE = """
[[step]]
recipes = ["noised-vs-baseline"]
rounds = 2000
[[step]]
recipes = ["clipping", "trade-offs-adjusted"]
runs = ["flat-S1*", "then-flat-S10*"]
seconds = 60
"""


def test_a_schedule_says_order_rounds_runs_and_time(tmp_path):
    file = tmp_path / "schedule.toml"
    file.write_text(SCHEDULE)
    first, second = read_schedule(file)
    assert {job.rounds for job in jobs_of(first, FULL)} == {2000}
    assert second.seconds == 60
    names = [job.run.name for job in jobs_of(second, FULL)]
    assert names == [
        "flat-S20-sigma0.012",
        "then-flat-S10-sigma0.006",
        "flat-S10",
        "flat-S15",
    ]  # the parent run is included


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[step]]\nrecipes = ['noises']", "Did you mean 'noise'"),
        ("[[step]]\nrecipes = ['noise']\nround = 3", "Did you mean 'rounds'"),
        ("[[step]]\nrecipes = ['noise']\nrounds = 0", "at least 1"),
        ("[steps]\n", "a list of"),
        ("[[step", "not valid TOML"),
    ],
)
def test_a_malformed_schedule_is_refused(tmp_path, text, said):
    file = tmp_path / "schedule.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_schedule(file)


def waiting(name: str, key="k", left=100, users=100) -> PendingJob:
    return PendingJob(job=Job(run=RUNS[name], rounds=left, planned=left), key=key, left=left, users=users)


def test_a_group_is_of_one_kind_of_like_length_and_not_too_large():
    names = iter(RUNS)
    first = waiting(next(names))
    others = [waiting(next(names), key="other"), waiting(next(names), left=201), waiting(next(names), left=49)]
    alike = [waiting(next(names), left=50 + k) for k in range(20)]
    assert next_group([first, *others, *alike]) == [first, *alike[: MOST_RUNS - 1]]
    large = [waiting(next(names), users=1250) for _ in range(3)]
    assert next_group(large) == large[:1]
    assert next_group([waiting("baseline", users=2 * MOST_USERS)])
    assert next_group([first, alike[0]], lambda job: job is alike[0].job) == [alike[0]]
    assert next_group([]) == []


def test_a_corpus_is_a_store_a_folder_of_roles_or_named(store, tmp_path):
    results = find_corpora([str(store.path)])
    assert set(results) == {"main"}
    assert (results["main"].population, results["main"].is_counted, results["main"].name) == (60, True, "counting")
    for role in ("main", "other"):
        (tmp_path / role).symlink_to(store.path)
    both = find_corpora([str(tmp_path), f"20k={store.path}"], ["1000", "other=50"], "blogs")
    assert {role: one.population for role, one in both.items()} == {"main": 1000, "20k": 1000, "other": 50}
    assert both["main"].name == "blogs"
    assert not both["main"].is_counted
    assert set(both) < set(CORPORA)


@pytest.mark.parametrize(
    ("given", "populations", "said"),
    [
        (["/nowhere"], [], "reproduction prepare"),
        (["main=/nowhere"], [], "No token store"),
        ([], ["many"], "whole number"),
    ],
)
def test_a_folder_that_is_no_corpus_is_refused(given, populations, said):
    with pytest.raises((CorpusError, ConfigError), match=said):
        find_corpora(given, populations)


def test_the_half_hours_schedule_leaves_no_run_out():
    steps = read_schedule(Path(__file__).parents[2] / "examples" / "paper_half_hour.toml")
    jobs = furthest(job for step in steps for job in jobs_of(step, FULL))
    assert {job.run.name for job in jobs} == set(RUNS)
    half_an_hour = 30 * 60 * 4_250
    assert sum(FULL.updates(job.run, job.rounds) for job in jobs) < half_an_hour
    # enough rounds for the rules, except for 5,000 users per round and for runs that are only timed
    assert {job.run.name for job in jobs if job.rounds < TRAINED} == {
        "flat-S15-sigma0.003-C5000",
        "cost-C1250",
        "cost-C5000",
    }
