"""A sum over users is the sum of what each user adds alone, however memory, chunks and cohorts divide the users."""

import itertools

import numpy as np
import pytest
import torch

from unheard import FedAvg, FlatClip, GaussianNoise, NoClip, NoNoise, PerLayerClip, Plan, PoissonSampling
from unheard.mechanism import aggregation
from unheard.mechanism.aggregation import GRID_BITS, LARGEST_UNNOISED_UNITS, Contribution
from unheard.parameters import Layout
from unheard.updates.user_update import ONE

LAYOUT = Layout((("a", (2,)), ("b", (3,))))
USERS = 7


def contribution(clip) -> Contribution:
    noise = NoNoise() if isinstance(clip, NoClip) else GaussianNoise(noise_multiplier=1.0)
    plan = Plan(population=10, sampling=PoissonSampling(users_per_round=5), update=FedAvg(), clip=clip, noise=noise)
    return plan.at(0, LAYOUT).contribution


@pytest.mark.parametrize("at_once", [1, 5, 9, 10, 15, 34, 35, 1000])
@pytest.mark.parametrize("clip", [FlatClip(norm=2.0), PerLayerClip(norm=2.0), NoClip()], ids=str)
def test_the_number_of_users_in_memory_at_once_changes_nothing(monkeypatch, clip, at_once):
    """Each user has a delta and a weight that no other user has; one is not finite, and one has no weight."""
    each, rng = contribution(clip), np.random.default_rng(1)
    delta_UP = torch.from_numpy(rng.standard_normal((USERS, 5)) * np.arange(1, USERS + 1)[:, None])
    delta_UP[3, 1] = float("nan")
    weights = np.array([ONE, ONE // 7, 0, ONE // 2, ONE // 1000, ONE - 1, ONE // 3])
    alone = [each.of_users(delta_UP[k : k + 1], weights[k : k + 1]) for k in range(USERS)]
    assert all(one.units_P.any() for k, one in enumerate(alone) if k not in (2, 3))
    monkeypatch.setattr(aggregation, "NUMBERS_AT_ONCE", at_once)
    together = each.of_users(delta_UP, weights)
    assert torch.equal(together.units_P, torch.stack([one.units_P for one in alone]).sum(0))
    assert together.weight == sum(one.weight for one in alone) == weights.sum() / ONE


@pytest.mark.parametrize("broken", [0, 2, 4])
@pytest.mark.parametrize("at_once", [1, 10, 1000])
def test_each_users_integers_are_checked_against_the_users_own_weight(monkeypatch, at_once, broken):
    """With a broken clip, a delta of norm 0.9 fits for users of weight 1 and not for the one user of weight 1/2^20."""
    each, weights = contribution(FlatClip(norm=1.0)), np.full(USERS, ONE)
    monkeypatch.setattr(aggregation, "NUMBERS_AT_ONCE", at_once)
    weights[broken] = ONE // 2**20
    monkeypatch.setattr(Contribution, "_whole_units", without_weights(Contribution._whole_units))
    total = each.of_users(torch.eye(USERS, 5) * 0.9, weights)
    assert (total.units_P != 0).tolist() == [k != broken for k in range(5)]


def without_weights(real):
    """Return `_whole_units` without the multiplication by the weights, so that the check must find what is too large."""
    return lambda self, delta_UP, weight_U, largest_U: real(self, delta_UP, torch.ones_like(weight_U), largest_U)


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
def test_a_balance_is_the_sum_of_all_chunks_and_unknown_if_that_of_one_chunk_is_unknown(order):
    each = contribution(FlatClip(norm=1.0))
    unclipped = [torch.tensor([True] * 5), torch.tensor([False] * 2), torch.tensor([True] * 11)]
    chunks = [each.of_users(torch.zeros(len(u), 5), np.full(len(u), ONE), u) for u in unclipped]
    assert each.sum([chunks[k] for k in order], 5).balance == 5 - 2 + 11
    assert each.sum([], 5).balance == 0  # so that an adaptive clip can follow an empty cohort
    chunks[0] = each.of_users(torch.zeros(5, 5), np.full(5, ONE))
    assert each.sum([chunks[k] for k in order], 5).balance is None


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("place", [0, 4])
def test_no_int64_that_a_node_may_send_passes_as_a_small_one(sign, place):
    each = contribution(FlatClip(norm=1.0))
    units_P = torch.zeros(5, dtype=torch.int64)
    for size in (0, 1, 2**GRID_BITS):  # S is 2^20 units
        units_P[place] = sign * size
        assert each.accepts(units_P, ONE)
    for size in (2**GRID_BITS + 1, 2 ** (GRID_BITS + 1), 2**31, 2**32, 2**53, 2**62, 2**63 - 1, 2**63):
        units_P[place] = -(2**63) if sign < 0 and size == 2**63 else sign * min(size, 2**63 - 1)
        assert not each.accepts(units_P, ONE)


@pytest.mark.parametrize("place", [0, 4])
def test_without_noise_a_coordinate_counts_up_to_2_to_the_12(place):
    each = contribution(NoClip())
    assert LARGEST_UNNOISED_UNITS * each.grid == 2.0**12
    for coordinate, is_kept in ((3000.0, True), (-3000.0, True), (2.0**12, True), (2.0**12 + 0.001, False)):
        delta_UP = torch.full((1, 5), 0.5, dtype=torch.float64)
        delta_UP[0, place] = coordinate
        units_P = each.of_users(delta_UP, np.array([ONE])).units_P
        assert (units_P.double() * each.grid).tolist() == (delta_UP[0].tolist() if is_kept else [0.0] * 5)
