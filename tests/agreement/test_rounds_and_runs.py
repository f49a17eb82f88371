"""An engine that computes other rounds and other runs too gives each cohort the sum of a new engine, bit for bit."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import unheard
from unheard.engines.engine import Cohort
from unheard.engines.reference import ReferenceEngine
from unheard.engines.stacked.engine import StackedEngine
from unheard.engines.vectorised import VectorisedEngine
from unheard.randomness import reproducible_generator
from unheard.updates.user_update import User

from ..conftest import ManyAtOnce, counting_user
from .test_engines import HalvesClip

ENGINES = [ReferenceEngine, VectorisedEngine, ManyAtOnce, StackedEngine]
FEDAVG = unheard.FedAvg(batch_size=2, unroll=5, learning_rate=1.0)
PLAN = unheard.Plan(
    population=60,
    sampling=unheard.PoissonSampling(users_per_round=12),
    update=FEDAVG,
    clip=unheard.FlatClip(norm=0.5),
    noise=unheard.GaussianNoise(noise_multiplier=0.5),
)
OTHERS = {
    "another learning rate": {"update": replace(FEDAVG, learning_rate=0.3)},
    "a penalty": {"update": replace(FEDAVG, update_penalty=0.4)},
    "another batch size": {"update": replace(FEDAVG, batch_size=3)},
    "another unroll": {"update": replace(FEDAVG, unroll=4)},
    "two passes": {"update": replace(FEDAVG, epochs=2)},
    "drawn windows": {"update": unheard.FedSGD(batch_size=2, unroll=5, learning_rate=1.0)},
    "all windows": {"update": unheard.FedSGD(unroll=5, learning_rate=1.0)},
    "another S": {"clip": unheard.FlatClip(norm=0.2)},
    "a clip by layer": {"clip": unheard.PerLayerClip(norm=0.5)},
    "a clip without kernels": {"clip": HalvesClip(norm=0.2)},
    "an adaptive clip": {"clip": unheard.AdaptiveClip(initial_norm=0.3)},
    "no clip": {"clip": unheard.NoClip(), "noise": unheard.NoNoise()},
    "weights": {"weights": unheard.CappedWeights(weight_cap=40, total_weight=25.0)},
}


def cohort(model, number: int, **parts) -> Cohort:
    """Return a cohort whose parameters, users and stream follow its number."""
    rng = np.random.default_rng(number)
    lengths = (12, 0, 31, 1, 24, 2)[number % 2 :]
    return Cohort(
        params_P=model.initial(number),
        users=[User(counting_user(rng, n), None, 10 * number + k) for k, n in enumerate(lengths)],
        plan=replace(PLAN, **parts).at(0, model.layout),
        rng=reproducible_generator(number),
    )


def assert_equal(one, other) -> None:
    assert torch.equal(one.units_P, other.units_P)
    rest = [(s.weight, s.balance, s.grid, s.l2_bound, s.added_noise) for s in (one, other)]
    assert rest[0] == rest[1]


def alone(engine, model, number: int, **parts):
    one = cohort(model, number, **parts)
    return engine(model).sum_updates(one.params_P, one.users, one.plan, one.rng)


OF_ROUNDS = [(StackedEngine, other) for other in OTHERS]
OF_ROUNDS += [(engine, other) for engine in (ReferenceEngine, ManyAtOnce) for other in ("a penalty", "a clip by layer")]


@pytest.mark.parametrize(("engine", "other"), OF_ROUNDS)
def test_each_round_is_computed_with_the_settings_of_its_own_plan(model, engine, other):
    """As after a change of the schedule: no setting of an earlier round may stay in the buffers of an engine."""
    first, second = alone(engine, model, 1), alone(engine, model, 1, **OTHERS[other])
    assert not (torch.equal(first.units_P, second.units_P) and first.weight == second.weight)
    used = engine(model)
    for parts, expected in (({}, first), (OTHERS[other], second), ({}, first)):
        one = cohort(model, 1, **parts)
        assert_equal(used.sum_updates(one.params_P, one.users, one.plan, one.rng), expected)


@pytest.mark.parametrize("other", ["all windows", "a clip without kernels", "another unroll"])
def test_runs_that_the_stacked_engine_cannot_compute_together_have_the_sums_that_they_have_alone(model, other):
    """In any order: whether the run that needs another engine, or has other shapes, is the first or the last."""
    kinds = [OTHERS["another S"], OTHERS[other], {}]
    expected = [alone(ReferenceEngine, model, number, **parts) for number, parts in enumerate(kinds)]
    used = StackedEngine(model)
    for order in ([0, 1, 2], [1, 0, 2]):
        sums = used.sum_cohorts([cohort(model, number, **kinds[number]) for number in order])
        for number, total in zip(order, sums, strict=True):
            error = (total.units_P - expected[number].units_P).double().norm() / expected[
                number
            ].units_P.double().norm()
            assert error < 1e-4
            assert total.weight == expected[number].weight


@pytest.mark.parametrize("engine", ENGINES)
def test_runs_of_one_shape_have_the_sums_that_they_have_alone(model, engine):
    """The engine `stacked` computes all of these runs together, because their batches have the same shape."""
    names = ("another learning rate", "a clip by layer", "an adaptive clip", "weights")
    kinds = [{}, *(OTHERS[name] for name in names)]
    expected = [alone(engine, model, number, **parts) for number, parts in enumerate(kinds)]
    assert len({total.units_P.numpy().tobytes() for total in expected}) == len(kinds)
    assert [total.balance is None for total in expected].count(False) == 1
    used = engine(model)
    for order in ([0, 1, 2, 3, 4], [3, 4, 2, 1, 0])[: 2 if engine is StackedEngine else 1]:
        sums = used.sum_cohorts([cohort(model, number, **kinds[number]) for number in order])
        for number, total in zip(order, sums, strict=True):
            assert_equal(total, expected[number])


@pytest.mark.parametrize("engine", ENGINES)
def test_nobody_stays_clipped_after_the_round(model, engine):
    """First a round in which every local step is clipped, then one in which none is, then the first again."""
    used = engine(model)
    for norm, sign in ((1e-4, -1), (1e4, 1), (1e-4, -1)):
        one = cohort(model, 1, clip=unheard.AdaptiveClip(initial_norm=norm))
        total = used.sum_updates(one.params_P, one.users, one.plan, one.rng)
        steps = sum(len(user.tokens) > 1 for user in one.users)
        assert total.balance == sign * steps + (len(one.users) - steps)  # users without a step are never clipped
