"""Every part accepts the values of its range, ends included, and refuses the nearest values outside with a message."""

import math
from dataclasses import replace

import pytest

import unheard
from tests.report.builders import made_up_record
from unheard.corpus.canaries import Canary
from unheard.corpus.encode import EncodingOptions
from unheard.corpus.grouping import SplitRule
from unheard.corpus.private_vocabulary import MAX_NOISE, MAX_WORDS_PER_USER, PrivateVocabulary, WordRelease
from unheard.corpus.vocabulary import PublicVocabulary
from unheard.deployment.personalize import PersonalSettings
from unheard.errors import InvalidValue
from unheard.federated.node import NodeData
from unheard.mechanism.noise import LARGEST_MULTIPLIER, DistributedGaussianNoise
from unheard.mechanism.sampling import ExampleSampling, FixedSizeSampling
from unheard.privacy import planner
from unheard.privacy.accountants import epsilon
from unheard.privacy.budget import Budget, RunningEpsilon
from unheard.privacy.events import (
    CorrelatedGaussian,
    DistributedGaussian,
    ExampleGaussian,
    FailureProbability,
    Gaussian,
    PoissonGaussian,
    Selection,
)
from unheard.privacy.matrix_factorization import BUFFERS, MOST_ROUNDS, Factorisation
from unheard.privacy.planner import CostEstimate
from unheard.privacy.statement import compute_statement
from unheard.report.comparison import hypothetical_epsilon
from unheard.training.round import AdamServer, MomentumServer
from unheard.training.run import run_from_tables, tables_from_run
from unheard.tuning.private_selection import TrialCount
from unheard.tuning.trials import Grid

NAN, INF = math.nan, math.inf
POSITIVE = ([1e-15, 1e15], [0.0, -1.0, 9e-16, 1.1e15, NAN, INF])  # as `require_positive` checks
SHARE = ([1e-300, 0.999], [0.0, 1.0, -0.1, 1.1, NAN])  # between 0 and 1, without the ends
FRACTION = ([0.0, 0.999], [-0.001, 1.0, NAN])  # with 0, without 1
COUNT = ([1], [0, -1])
WHOLE_COUNT = ([1], [0, -1, 1.0, True, "1"])
PROBABILITY = ([1e-12, 1.0], [0.0, -0.1, 1.0001, NAN, INF])
MILLION = ([1, 10**6], [0, 10**6 + 1])
EVENT = {"sampling_prob": 0.1, "noise_multiplier": 1.0}
Z = {"noise_multiplier": ([0.0, 1e9], [-0.001, NAN, INF])}

PARTS = [
    (unheard.FedAvg, {}, {"batch_size": MILLION, "unroll": MILLION, "epochs": ([1, 1000], [0, 1001])}),
    (unheard.FedAvg, {}, {"learning_rate": POSITIVE, "update_penalty": ([0.0, 1e15], [-1e-9, 1.1e15, NAN])}),
    (
        unheard.FedSGD,
        {},
        {"batch_size": ([None, *MILLION[0]], MILLION[1]), "unroll": MILLION, "learning_rate": POSITIVE},
    ),
    (
        unheard.CappedWeights,
        {"weight_cap": 10, "total_weight": 5.0},
        {"weight_cap": POSITIVE, "total_weight": POSITIVE},
    ),
    (unheard.PoissonSampling, {}, {"users_per_round": POSITIVE, "sampling_prob": PROBABILITY}),
    (FixedSizeSampling, {}, {"users_per_round": ([1, 2**40], [0, 2**40 + 1])}),
    (
        ExampleSampling,
        {"examples_per_user": 3, "examples_per_round": 5.0, "total_examples": 150},
        {
            "examples_per_user": ([1, 4096], [0, 4097]),
            "examples_per_round": ([1e-15, 150.0], [0.0, -1.0, 150.5, NAN]),
            "total_examples": ([5, 2**40], [0, 4, 2**40 + 1]),
        },
    ),
    (unheard.CyclicPoissonSampling, {"users_per_round": 3, "groups": 2}, {"groups": ([1, 2**20], [0, 2**20 + 1])}),
    (unheard.CyclicPoissonSampling, {"groups": 2}, {"users_per_round": POSITIVE}),
    (unheard.MinSeparationSampling, {}, {"separation": COUNT, "users_per_round": POSITIVE}),
    (unheard.FlatClip, {}, {"norm": POSITIVE}),
    (unheard.PerLayerClip, {}, {"norm": POSITIVE}),
    (unheard.AdaptiveClip, {"initial_norm": 1.0}, {"initial_norm": POSITIVE, "count_noise_std": POSITIVE}),
    (
        unheard.AdaptiveClip,
        {"initial_norm": 1.0},
        {"quantile": SHARE, "learning_rate": ([1e-9, 1.0], [0.0, 1.001, NAN])},
    ),
    (unheard.ClippedDenominator, {}, {"min_total_weight": POSITIVE}),
    (unheard.GaussianNoise, {}, {"noise_multiplier": POSITIVE, "noise_std": POSITIVE}),
    (
        DistributedGaussianNoise,
        {"noise_multiplier": 1.0, "min_parties": 3},
        {
            "noise_multiplier": ([1e-15, LARGEST_MULTIPLIER], [0.0, 2.0 * LARGEST_MULTIPLIER, NAN]),
            "min_parties": ([2], [1, 0]),
        },
    ),
    (
        unheard.CorrelatedNoise,
        {"noise_multiplier": 1.0},
        {
            "noise_multiplier": ([1e-15, 1e15], [None, 0.0, NAN]),
            "rounds": ([None, 1, MOST_ROUNDS], [0, MOST_ROUNDS + 1]),
            "bands": ([None, 1], [0]),
            "buffers": ([BUFFERS[0], BUFFERS[-1]], [BUFFERS[0] - 1, BUFFERS[-1] + 1]),
            "strategy": (["banded", "blt"], ["bands", ""]),
        },
    ),
    (unheard.Change, {"clip_norm": 1.0}, {"from_round": COUNT}),
    (
        unheard.Change,
        {"from_round": 1},
        {"clip_norm": POSITIVE, "noise_multiplier": POSITIVE, "learning_rate": POSITIVE},
    ),
    (
        unheard.Training,
        {"rounds": 3},
        {"rounds": COUNT, "checkpoint_every": COUNT, "keep_checkpoints": COUNT, "init_seed": ([0], [-1])},
    ),
    (unheard.Evaluation, {}, {"every": COUNT, "max_tokens": COUNT, "unroll": MILLION}),
    (MomentumServer, {}, {"learning_rate": ([1e-9], [0.0, -1.0]), "momentum": FRACTION}),
    (
        AdamServer,
        {},
        {"learning_rate": ([1e-9], [0.0, -1.0]), "beta1": FRACTION, "beta2": FRACTION, "epsilon": ([1e-9], [0.0])},
    ),
    (
        unheard.TiedLSTM,
        {"vocabulary_size": 5, "embedding_size": 2, "hidden_size": 2},
        {
            "vocabulary_size": ([None, 4], [3, 0]),
            "embedding_size": COUNT,
            "hidden_size": COUNT,
            "user_features": ([0], [-1]),
        },
    ),
    (
        unheard.HuggingFaceModel,
        {"path": "x"},
        {"lora_rank": ([1, 4096], [0, 4097]), "lora_alpha": POSITIVE, "path": (["x"], ["", " "])},
    ),
    (
        unheard.ModuleModel,
        {"module": "a.b:C", "vocabulary_size": 5},
        {"user_features": ([0], [1]), "module": (["a:b"], ["a", "a:b:c"])},
    ),
    (unheard.EngineChoice, {}, {"rank_timeout": POSITIVE, "node_timeout": POSITIVE, "parties": ([None, 3], [2, 0])}),
    (unheard.EngineChoice, {}, {"users_at_once": ([None, 1], [0, -1]), "precision": (["float32"], ["float8", ""])}),
    (NodeData, {"store": "x", "parts": 3}, {"part": ([0, 2], [-1, 3]), "trust": (["central"], ["all", ""])}),
    (TrialCount, {}, {"mean": ([1, 1000], [0.999, 1000.5, NAN])}),
    (TrialCount, {"mean": 2}, {"drawn_from": (["geometric", "poisson"], ["fixed", ""])}),
    (Grid, {}, {"users_per_round": COUNT, "seeds": COUNT, "norms": ([(1.0,)], [(), (1.0, 1.0), (0.0,)])}),
    (Grid, {}, {"noise_stds": ([(0.1, 0.2)], [(), (0.1, 0.1), (-1.0,)])}),
    (SplitRule, {"held_out": 0.0}, {"held_out": FRACTION, "public": FRACTION}),
    (SplitRule, {"public": 0.5}, {"held_out": ([0.49], [0.5, 0.6])}),
    (EncodingOptions, {}, {"min_tokens": COUNT}),
    (EncodingOptions, {"min_tokens": 10}, {"tokens_per_user": ([None, 10], [9])}),
    (Canary, {"text": "a"}, {"users": ([0], [-1]), "repeats": COUNT, "text": (["a"], ["", " "])}),
    (PublicVocabulary, {}, {"size": ([4], [3, 0])}),
    (PrivateVocabulary, {"epsilon": 1.0, "delta": 1e-6}, {"size": ([4], [3]), "delta": ([1e-9, 0.5], SHARE[1])}),
    (
        WordRelease,
        {"noise_multiplier": 1.0, "threshold_delta": 1e-6, "words_per_user": 10},
        {
            "noise_multiplier": ([1e-9, MAX_NOISE], [0.0, 2 * MAX_NOISE, NAN]),
            "threshold_delta": SHARE,
            "words_per_user": ([1, MAX_WORDS_PER_USER], [0, MAX_WORDS_PER_USER + 1]),
        },
    ),
    (
        PersonalSettings,
        {},
        {"passes": ([1, 100], [0, 101]), "later": ([0.05, 0.5], [0.049, 0.51]), "learning_rate": POSITIVE},
    ),
    (Budget, {"epsilon": 1.0, "delta": 1e-6}, {"epsilon": ([1e-9, 1e9], [0.0, -1.0, NAN]), "delta": SHARE}),
    (PoissonGaussian, EVENT, {"sampling_prob": PROBABILITY, **Z}),
    (Gaussian, {}, Z),
    (ExampleGaussian, {**EVENT, "examples_per_user": 3}, {"sampling_prob": PROBABILITY, **Z}),
    (ExampleGaussian, EVENT, {"examples_per_user": ([1, 4096], [0, 4097, 1.5, True])}),
    (CorrelatedGaussian, {**EVENT, "index": 0}, {"block": WHOLE_COUNT}),
    (CorrelatedGaussian, {**EVENT, "block": 1}, {"index": ([0, 7], [-1, 0.0, True])}),
    (DistributedGaussian, {**EVENT, "min_parties": 3}, {"min_parties": WHOLE_COUNT, "sampling_prob": PROBABILITY, **Z}),
    (FailureProbability, {}, {"delta": ([0.0, 1.0], [-1e-9, 1.001, NAN])}),
    (
        Selection,
        {**EVENT, "rounds": 3, "mean_trials": 2.0, "drawn_from": "poisson"},
        {"rounds": WHOLE_COUNT, "mean_trials": ([1, 9.5], [0.999, NAN, INF]), "drawn_from": (["geometric"], ["fixed"])},
    ),
    (
        CostEstimate,
        {"population": 100, "users_per_round": 10, "noise_multiplier": 1.0, "rounds": 5, "delta": 1e-3},
        {
            "population": ([10], [9, 0]),
            "users_per_round": ([0.1, 100], [0, 100.5]),
            "noise_multiplier": ([0.0], [-0.1, NAN, INF]),
            "rounds": COUNT,
            "delta": ([1e-300, 0.00999], [0.0, 0.01, NAN]),
        },
    ),
    (
        Factorisation,
        {"strategy": "banded", "rounds": 4, "separation": 2, "coefficients": (1.0, 0.5)},
        {
            "strategy": (["banded"], ["other"]),
            "rounds": ([1, MOST_ROUNDS], [0, MOST_ROUNDS + 1, 4.0, True]),
            "separation": ([2], [1, 0, 2.0]),
            "coefficients": ([(1.0,)], [(), (0.0, 1.0), (1.0, NAN), (1, 0.5), (1.0, 0.5, 0.2)]),
            "decays": ([()], [(0.5,)]),
            "scales": ([()], [(0.5,)]),
        },
    ),
    (
        Factorisation,
        {"strategy": "blt", "rounds": 4, "separation": 2, "decays": (0.5,), "scales": (0.5,)},
        {
            "decays": ([(0.999,)], [(), (0.0,), (1.0,), (0.5, 0.5)]),
            "scales": ([(0.0,), (1.0,)], [(), (-0.1,), (1.1,)]),
            "coefficients": ([()], [(1.0,)]),
        },
    ),
]


def cases() -> list:
    return [
        pytest.param(part, others, name, *values, id=f"{part.__name__}-{name}")
        for part, others, fields in PARTS
        for name, values in fields.items()
    ]


@pytest.mark.parametrize(("part", "others", "name", "inside", "outside"), cases())
def test_a_part_takes_the_values_of_its_range_and_no_others(part, others, name, inside, outside):
    for value in inside:
        part(**{**others, name: value})
    for value in outside:
        with pytest.raises(InvalidValue) as refusal:
            part(**{**others, name: value})
        assert len(str(refusal.value)) > 15


@pytest.mark.parametrize("population", [60, 1_000, 763_430])
@pytest.mark.parametrize("where", ["run", "estimate"])
def test_a_declared_delta_is_above_0_and_below_one_over_the_users_to_the_last_bit(run, population, where):
    """At delta = 1/users the guarantee would allow the release of one user's text in full."""

    def declare(delta: float) -> object:
        if where == "run":
            return replace(run, plan=replace(run.plan, population=population), delta=delta)
        return CostEstimate(population=population, users_per_round=6, noise_multiplier=1.0, rounds=3, delta=delta)

    limit = 1 / population
    for delta in (math.nextafter(limit, 0), limit / 2, 5e-324):
        declare(delta)
    for delta in (limit, math.nextafter(limit, 1), 1.0, 0.0, -limit, math.nan, math.inf):
        with pytest.raises(InvalidValue, match="delta"):
            declare(delta)


@pytest.mark.parametrize(
    ("part", "given"),
    [
        (unheard.PoissonSampling, {"users_per_round": 5, "sampling_prob": 0.1}),
        (unheard.PoissonSampling, {}),
        (unheard.MinSeparationSampling, {"users_per_round": 5, "separation": 2}),
        (unheard.MinSeparationSampling, {}),
        (unheard.GaussianNoise, {"noise_multiplier": 1.0, "noise_std": 0.1}),
        (unheard.GaussianNoise, {}),
        (unheard.CorrelatedNoise, {"noise_std": 0.1}),
        (unheard.CorrelatedNoise, {"noise_multiplier": 1.0, "strategy": "blt", "bands": 2}),
        (unheard.PerLayerClip, {"norm": 1.0, "norms": {"a": 1.0}}),
        (unheard.PerLayerClip, {}),
        (unheard.PerLayerClip, {"norms": {"a": 1.0, "b": 0.0}}),
        (unheard.Change, {"from_round": 1}),
        (unheard.Change, {"from_round": 1, "noise_std": 1.0, "noise_multiplier": 1.0}),
        (unheard.Training, {"rounds": 3, "shared_cohorts": True}),
    ],
)
def test_values_that_exclude_each_other_are_refused(part, given):
    with pytest.raises(InvalidValue):
        part(**given)


@pytest.mark.parametrize("delta", SHARE[1])
def test_a_running_epsilon_needs_a_delta_between_0_and_1(delta):
    with pytest.raises(InvalidValue, match="delta must be between 0 and 1"):
        RunningEpsilon(delta)


def budget_without_a_delta(users, run):
    """Return the budget of a run if neither the budget nor the run file declares a delta."""
    tables = tables_from_run(replace(run, plan=replace(run.plan, population=users)))
    tables["privacy"] = {"population": users, "budget_epsilon": 4.0}
    return run_from_tables(tables)[0].budget


EVENT = PoissonGaussian(sampling_prob=0.1, noise_multiplier=2.0)
TARGET = {"epsilon": 4.0, "users_per_round": 40, "rounds": 20, "accountant": "rdp"}
BY_DEFAULT = {
    "plan": lambda users, _: planner.plan(users=users, **TARGET).estimate.delta,
    "a run": lambda users, run: replace(run, plan=replace(run.plan, population=users), delta=None).claimed_delta,
    "the budget of a run file": lambda users, run: budget_without_a_delta(users, run).delta,
    "a statement": lambda users, _: compute_statement({"population": users}, [EVENT])["delta"],
    "a hypothetical run": lambda users, _: hypothetical_epsilon(made_up_record("r", [], events=[EVENT]), users).delta,
}


@pytest.mark.parametrize("where", BY_DEFAULT)
def test_the_default_delta_is_users_to_the_minus_1_1_to_the_last_bit_everywhere(run, where):
    assert BY_DEFAULT[where](1234, run) == 1234**-1.1
    of_plan = planner.epsilon(users=1234, users_per_round=40, noise_multiplier=2.0, rounds=20, accountant="rdp")
    event = PoissonGaussian(sampling_prob=40 / 1234, noise_multiplier=2.0)
    assert of_plan == epsilon([(event, 20)], 1234**-1.1, "rdp")
