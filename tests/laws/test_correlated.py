"""Correlated noise: the recursion computes C^-1 z, its covariance is C^-1 C^-T, it is on the grid, and groups take turns."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import toeplitz

from tests.kernels import KERNEL_DEVICE, needs_triton
from unheard import (
    AdaptiveClip,
    Change,
    ClippedDenominator,
    CorrelatedNoise,
    CyclicPoissonSampling,
    FedAvg,
    FixedSizeSampling,
    FlatClip,
    GaussianNoise,
    MinSeparationSampling,
    NoClip,
    NoNoise,
    Plan,
    PoissonSampling,
)
from unheard.errors import InvalidValue, UnprovenCombination
from unheard.mechanism.aggregation import BoundedAverage
from unheard.mechanism.correlated import CorrelatedNormals, NoiseHistory
from unheard.mechanism.noise import standard_normals
from unheard.mechanism.sampling import Turn, groups_of
from unheard.parameters import Layout
from unheard.privacy.events import CorrelatedGaussian
from unheard.privacy.matrix_factorization import Factorisation, optimise
from unheard.randomness import generator_from_key, reproducible_generator

CPU = torch.device("cpu")
BANDED = optimise("banded", rounds=8, separation=3)
BLT = optimise("blt", rounds=8, separation=3, buffers=2)
KEY = bytes(range(16))


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def dense(matrix: Factorisation, rounds: int) -> np.ndarray:
    column = matrix.column(rounds)
    return toeplitz(column, np.zeros(len(column)))


def noise_of(matrix: Factorisation, normals: np.ndarray) -> np.ndarray:
    history = NoiseHistory(matrix, normals.shape[1], CPU)
    return np.stack([history.next(torch.from_numpy(row.copy())).numpy().copy() for row in normals])


@given(
    rounds=st.integers(1, 24),
    separation=st.integers(1, 9),
    strategy=st.sampled_from(["banded", "blt"]),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=60)
def test_the_recursion_is_the_inverse_of_the_dense_matrix(rounds, separation, strategy, seed):
    matrix = optimise(strategy, rounds=rounds, separation=separation, buffers=2)
    more = rounds + 5 if strategy == "banded" else rounds  # banded noise may continue beyond T
    normals = np.random.default_rng(seed).normal(size=(more, 3))
    noise = noise_of(matrix, normals)
    assert dense(matrix, more) @ noise == pytest.approx(normals * matrix.sensitivity(), abs=1e-9)


@pytest.mark.parametrize("matrix", [BANDED, BLT], ids=["banded", "blt"])
def test_the_covariance_of_a_hundred_thousand_runs_is_that_of_the_inverse(matrix):
    runs = 100_000  # each coordinate is an independent run
    noise = noise_of(matrix, np.random.default_rng(1).normal(size=(8, runs)))
    inverse = np.linalg.inv(dense(matrix, 8)) * matrix.sensitivity()
    expected = inverse @ inverse.T
    spread = np.sqrt((np.outer(np.diag(expected), np.diag(expected)) + expected**2) / runs)
    assert np.abs((noise @ noise.T / runs - expected) / spread).max() < 5
    history = NoiseHistory(matrix, 1, CPU)
    for t in range(8):
        assert history.row_norm == pytest.approx(math.sqrt(expected[t, t]))
        history.next(torch.zeros(1, dtype=torch.float64))


def released(noise: CorrelatedNoise, matrix: Factorisation, units_TP: np.ndarray, seed: int) -> np.ndarray:
    """Return the releases of T attempts in units of the grid, for averages that are whole numbers of units."""
    history, rows = NoiseHistory(matrix, units_TP.shape[1], CPU), []
    for t, units_P in enumerate(units_TP):
        average = BoundedAverage(units_P=torch.from_numpy(units_P), unit=2.0**-20, sensitivity=1.0)
        normals = CorrelatedNormals(key(1000 * seed + t), history, units_TP.shape[1], CPU)
        rows.append(noise.add(average, normals).average_P.numpy() * 2**20)
    return np.stack(rows)


@pytest.mark.parametrize("matrix", [BANDED, BLT], ids=["banded", "blt"])
def test_what_is_released_is_a_function_of_c_x_plus_z(matrix):
    noise = CorrelatedNoise(noise_multiplier=1.0, strategy=matrix.strategy, rounds=8)
    units = np.random.default_rng(0).integers(-(2**20), 2**20, size=(8, 50))
    with_users, without = released(noise, matrix, units, 1), released(noise, matrix, np.zeros_like(units), 1)
    assert (with_users == np.round(with_users)).all()  # on the grid
    assert (with_users - without == units).all()  # X + round(x) = round(X + x), and X + x = C^-1 (C X + z)
    normals = np.stack([standard_normals(generator_from_key(key(1000 + t)), 50, CPU) for t in range(8)])
    exact = np.linalg.solve(dense(matrix, 8), normals * matrix.sensitivity())
    assert np.abs(without - exact * 2**20).max() < 0.5 + 1e-6  # the recursion keeps the unrounded noise


@pytest.mark.parametrize(("matrix", "z"), [(BANDED, 1.5), (BLT, 1.0)], ids=["banded", "blt"])
def test_the_best_distinguisher_sees_a_user_as_the_event_says_and_no_better(matrix, z):
    """One user takes part in rounds 0, 3 and 6. The log-likelihood ratio is Gaussian with distance 1 / z, per block or in all."""
    runs = 40_000
    noise = CorrelatedNoise(noise_multiplier=z, strategy=matrix.strategy, rounds=8)
    user = np.zeros((8, 1), dtype=np.int64)
    user[::3] = 2**20  # the whole sensitivity, in each of the user's rounds
    column = dense(matrix, 8)
    blocks = math.sqrt(3) if matrix.strategy == "banded" else 1.0
    direction = (column @ user)[:, 0] / np.linalg.norm(column @ user)
    scores = [
        direction @ column @ released(noise, matrix, np.repeat(units, runs, axis=1), 7)
        for units in (user, np.zeros_like(user))
    ]
    distance = (scores[0].mean() - scores[1].mean()) / scores[1].std()
    assert distance == pytest.approx(blocks / z, rel=0.02)
    # The last release alone, and the sum of all releases (the model), distinguish less well.
    for statistic in (np.eye(8)[-1], np.ones(8)):
        one, other = (
            statistic @ released(noise, matrix, np.repeat(units, runs, axis=1), 9)
            for units in (user, np.zeros_like(user))
        )
        assert (one.mean() - other.mean()) / other.std() < blocks / z


def test_low_bits_of_what_is_released_say_nothing_about_who_was_there():
    noise = CorrelatedNoise(noise_multiplier=1.0, rounds=8)
    units = np.full((8, 20_000), 12_345_678)
    one, other = released(noise, BANDED, units, 1), released(noise, BANDED, np.zeros_like(units), 2)
    for bits in (2, 16, 256):
        shares = [np.bincount(rows[-1].astype(np.int64) % bits, minlength=bits) / 20_000 for rows in (one, other)]
        assert np.abs(shares[0] - shares[1]).sum() / 2 < 1.5 * math.sqrt(bits / 20_000)


@pytest.mark.parametrize("matrix", [BANDED, BLT], ids=["banded", "blt"])
def test_a_history_that_is_restored_continues_to_the_bit(matrix):
    normals = torch.from_numpy(np.random.default_rng(2).normal(size=(8, 40)))
    whole = NoiseHistory(matrix, 40, CPU)
    noise = [whole.next(row).clone() for row in normals]
    first = NoiseHistory(matrix, 40, CPU)
    for row in normals[:5]:
        first.next(row)
    restored = NoiseHistory(matrix, 40, CPU, index=5, rows_RP=first.rows)
    for t in range(5, 8):
        assert torch.equal(restored.next(normals[t]), noise[t])
    with pytest.raises(ValueError, match="history"):
        NoiseHistory(matrix, 41, CPU, index=5, rows_RP=first.rows)


@needs_triton
def test_the_kernel_agrees_with_the_plain_recursion_to_the_bit():
    from unheard.mechanism.noise_kernels import weighted_past

    matrix = optimise("banded", rounds=20, separation=5)
    history = NoiseHistory(matrix, 1500, CPU)
    for index in range(9):
        if lags := min(index, 4):
            coefficient_L = torch.tensor(matrix.coefficients[1 : lags + 1], dtype=torch.float64, device=KERNEL_DEVICE)
            past_P = weighted_past(history.rows.to(KERNEL_DEVICE), coefficient_L, index)
            assert torch.equal(past_P.cpu(), history._past_banded())
        history.next(standard_normals(reproducible_generator(index), 1500, CPU))


def test_the_noise_of_an_attempt_is_given_once_and_in_its_turn():
    history = NoiseHistory(BANDED, 5, CPU)
    first, second = (CorrelatedNormals(key(i), history, 5, CPU) for i in range(2))
    first.take(5)
    with pytest.raises(RuntimeError):
        first.take(5)
    with pytest.raises(RuntimeError, match="earlier attempt"):
        second.take(5)  # created for attempt 0, which is complete
    with pytest.raises(TypeError, match="CorrelatedNormals"):
        CorrelatedNoise(noise_multiplier=1.0).add(
            BoundedAverage(units_P=torch.zeros(5, dtype=torch.int64), unit=1.0, sensitivity=1.0),
            reproducible_generator(1),
        )


def turns(sampling, num_users: int, population: int, attempts: int, seed: int = 0) -> np.ndarray:
    seen = np.zeros((attempts, num_users), dtype=bool)
    for index in range(attempts):
        turn = Turn(index=index, groups_key=KEY)
        seen[index, sampling.draw(num_users, population, reproducible_generator(seed, index), turn)] = True
    return seen


def test_users_take_part_in_their_own_groups_turn_only_at_the_rate_that_is_charged():
    sampling = CyclicPoissonSampling(users_per_round=20, groups=5)
    seen = turns(sampling, 200, 200, 2000)
    groups = groups_of(200, 5, KEY)
    for group in range(5):
        own = seen[np.arange(2000) % 5 == group]
        assert not own[:, groups != group].any()
        assert own[:, groups == group].mean() == pytest.approx(0.5, abs=0.02)
    assert sampling.turn_probability(200) == 0.5
    assert sampling.probability(200) == 0.1
    plan = plan_with(sampling=sampling, population=200)
    assert plan.at(0, LAYOUT).event(7) == CorrelatedGaussian(sampling_prob=0.5, noise_multiplier=1.0, block=5, index=7)
    assert turns(sampling, 400, 200, 500).sum(1).mean() == pytest.approx(40, rel=0.05)  # q' is declared, not counted


def test_with_a_minimum_separation_users_take_part_in_every_bth_attempt():
    sampling = MinSeparationSampling(users_per_round=30)
    seen = turns(sampling, 200, 200, 24)
    assert sampling.rounds_apart(200) == 6
    for k in range(200):
        assert set(np.diff(np.flatnonzero(seen[:, k]))) == {6}
    assert seen.sum(0).max() == 4  # k = ceil(24 / 6)
    more = turns(sampling, 500, 200, 24)  # b follows from the declared population, whatever the number of users is
    assert all(set(np.diff(np.flatnonzero(more[:, k]))) == {6} for k in range(500))


@pytest.mark.parametrize("groups", [2, 5, 48])
def test_one_user_more_moves_nobody_else(groups):
    for users in (1, 10, 1000):
        assert (groups_of(users, groups, KEY) == groups_of(users + 1, groups, KEY)[:users]).all()
    shares = np.bincount(groups_of(20_000, groups, KEY), minlength=groups) / 20_000
    assert np.abs(shares - 1 / groups).max() < 5 * math.sqrt(1 / groups / 20_000)
    assert (groups_of(1000, groups, KEY) != groups_of(1000, groups, key(3))).any()


LAYOUT = Layout((("weight", (3, 4)),))


def plan_with(**parts) -> Plan:
    standard = {
        "population": 600,
        "sampling": CyclicPoissonSampling(users_per_round=20, groups=5),
        "update": FedAvg(),
        "clip": FlatClip(norm=1.0),
        "noise": CorrelatedNoise(noise_multiplier=1.0, rounds=20),
    }
    return Plan(**{**standard, **parts})


def test_plans_that_have_a_proof_state_what_they_cost():
    banded = plan_with(schedule=(Change(from_round=5, learning_rate=1.0),))
    assert banded.at(0, LAYOUT).event(3) == CorrelatedGaussian(
        sampling_prob=5 * 20 / 600, noise_multiplier=1.0, block=5, index=3
    )
    separated = plan_with(sampling=MinSeparationSampling(separation=30))
    assert separated.at(0, LAYOUT).event() == CorrelatedGaussian(
        sampling_prob=1.0, noise_multiplier=1.0, block=30, index=0
    )
    blt = plan_with(
        sampling=MinSeparationSampling(users_per_round=20),
        noise=CorrelatedNoise(noise_multiplier=1.0, rounds=20, strategy="blt"),
    )
    assert blt.at(0, LAYOUT).event(19) == CorrelatedGaussian(
        sampling_prob=1.0, noise_multiplier=1.0, block=20, index=19
    )
    assert blt.at(0, LAYOUT).expected_weight == 600 / 30
    facts = blt.correlated_facts()
    assert facts is not None
    assert (facts["rounds"], facts["separation"], facts["participations"]) == (20, 30, 1)


@pytest.mark.parametrize("apart", [1, 2, 5])
@pytest.mark.parametrize("bands", [None, 1, 2, 5])
def test_the_block_of_a_charge_is_the_separation_whatever_the_number_of_bands(apart, bands):
    noise = CorrelatedNoise(noise_multiplier=1.5, rounds=20, bands=bands)
    events = [noise.event(CyclicPoissonSampling(users_per_round=20, groups=apart), 600, k) for k in range(20)]
    assert events == [
        CorrelatedGaussian(sampling_prob=apart * 20 / 600, noise_multiplier=1.5, block=apart, index=k)
        for k in range(20)
    ]


@pytest.mark.parametrize("separation", [2, 5, 30])
@pytest.mark.parametrize("buffers", [2, 4])
def test_blt_noise_is_one_release_of_all_rounds_without_amplification(separation, buffers):
    noise = CorrelatedNoise(noise_multiplier=1.5, rounds=20, strategy="blt", buffers=buffers)
    events = [noise.event(MinSeparationSampling(separation=separation), 600, k) for k in range(20)]
    assert events == [CorrelatedGaussian(sampling_prob=1.0, noise_multiplier=1.5, block=20, index=k) for k in range(20)]


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"sampling": PoissonSampling(users_per_round=20)}, "cyclic_poisson"),
        ({"sampling": FixedSizeSampling(users_per_round=20)}, "cyclic_poisson"),
        ({"noise": CorrelatedNoise(noise_multiplier=1.0, rounds=20, strategy="blt")}, "min_separation"),
        ({"estimator": ClippedDenominator(min_total_weight=10)}, "fixed_denominator"),
        ({"clip": AdaptiveClip(initial_norm=1.0)}, "adaptive"),
        ({"clip": NoClip()}, "clip"),
        ({"schedule": (Change(from_round=5, clip_norm=0.5),)}, "schedule"),
        ({"schedule": (Change(from_round=5, noise_multiplier=2.0),)}, "schedule"),
        ({"schedule": (Change(from_round=5, noise_std=2.0),)}, "schedule"),
        ({"noise": GaussianNoise(noise_multiplier=1.0)}, "correlated"),
        ({"noise": NoNoise()}, "correlated"),
        ({"sampling": MinSeparationSampling(separation=9), "noise": NoNoise()}, "correlated"),
    ],
)
def test_what_has_no_proof_with_correlated_noise_is_refused(parts, words):
    with pytest.raises(UnprovenCombination, match=words):
        plan_with(**parts)


def test_values_out_of_range_are_refused():
    for wrong in (
        {"noise_std": 1.0},
        {"noise_multiplier": 1.0, "bands": 0},
        {"noise_multiplier": 1.0, "buffers": 5},
        {"noise_multiplier": 1.0, "rounds": 0},
        {"noise_multiplier": 1.0, "strategy": "dense"},
        {"noise_multiplier": 1.0, "strategy": "blt", "bands": 3},
    ):
        with pytest.raises(InvalidValue):
            CorrelatedNoise(**wrong)
    with pytest.raises(InvalidValue, match="groups"):
        plan_with(sampling=CyclicPoissonSampling(users_per_round=200, groups=5))  # q' above 1
    with pytest.raises(InvalidValue):
        MinSeparationSampling(users_per_round=2.0, separation=3)
    with pytest.raises(InvalidValue):
        plan_with(noise=CorrelatedNoise(noise_multiplier=1.0, rounds=20, bands=6)).correlated_facts()
    with pytest.raises(InvalidValue, match=r"2\^19"):
        plan_with(noise=CorrelatedNoise(noise_multiplier=500_000.0, rounds=20)).correlated_facts()


@pytest.mark.parametrize("strategy", ["banded", "blt"])
def test_a_history_of_another_mechanism_or_model_is_not_continued(strategy):
    """With a row too few the noise of a round would be lost; with a row too many, noise would be added that was never drawn."""
    matrix = optimise(strategy, rounds=12, separation=4, **({"bands": 4} if strategy == "banded" else {"buffers": 3}))
    rows = NoiseHistory(matrix, 5, CPU).rows
    NoiseHistory(matrix, 5, CPU, index=2, rows_RP=rows)
    for wrong in (rows[1:], torch.cat([rows, rows[:1]]), rows[:, 1:], rows[0], torch.zeros(0, 5)):
        with pytest.raises(ValueError, match="the saved history has shape"):
            NoiseHistory(matrix, 5, CPU, index=2, rows_RP=wrong)
