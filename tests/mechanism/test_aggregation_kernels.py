"""The aggregation in Triton agrees with the plain one and has the same bounds. (Without a GPU: Triton's interpreter.)"""

import math

import numpy as np
import pytest
import torch
from tests.kernels import KERNEL_DEVICE, needs_triton, quietly

from unheard.mechanism.aggregation import LARGEST_UNNOISED_UNITS, UNNOISED_GRID, Contribution, noised_grid
from unheard.mechanism.clipping import Ball
from unheard.updates.user_update import ONE

pytestmark = [needs_triton, quietly]

P = 5000  # more than two blocks, and no multiple of one
FLAT = (Ball(slice(0, P), 2.0),)
LAYERS = (Ball(slice(0, 7), 0.1), Ball(slice(7, 4100), 1.5), Ball(slice(4100, P), 0.5))


def contribution(balls: tuple[Ball, ...], is_noised: bool = True) -> Contribution:
    bound = math.nextafter(math.sqrt(sum(b.radius**2 for b in balls)), math.inf) if balls else math.inf
    grid = noised_grid(bound) if is_noised else UNNOISED_GRID
    return Contribution(balls=balls, l2_bound=bound, grid=grid, is_noised=is_noised)


def summed(
    each: Contribution, delta_UP: torch.Tensor, weight_units_U: np.ndarray, square_UJ: torch.Tensor | None = None
) -> torch.Tensor:
    from unheard.mechanism.kernels import sum_users

    weight_U = torch.from_numpy(weight_units_U / ONE)
    return sum_users(
        delta_UP.to(KERNEL_DEVICE),
        weight_U.to(KERNEL_DEVICE),
        each.balls,
        each.grid,
        each.l2_bound / each.grid if each.is_noised else LARGEST_UNNOISED_UNITS,
        is_noised=each.is_noised,
        square_UJ=None if square_UJ is None else square_UJ.to(KERNEL_DEVICE),
    ).cpu()


def some_users(scales: list[float]) -> torch.Tensor:
    drawn = torch.randn(len(scales), P, generator=torch.Generator().manual_seed(3))
    return drawn * torch.tensor(scales)[:, None] / math.sqrt(P)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("balls", "is_noised"), [(FLAT, True), (LAYERS, True), (FLAT, False), ((), False)])
@pytest.mark.parametrize("scale", [0.5, 2.0, 40.0, 0.0])
def test_the_kernels_add_what_the_plain_contribution_adds(balls, is_noised, dtype, scale):
    delta_UP, weights = some_users([scale]).to(dtype), np.array([ONE // 3])
    each = contribution(balls, is_noised)
    plain = each.of_users(delta_UP, weights).units_P
    ours = summed(each, delta_UP, weights)
    # Products in float32: smaller by at most one unit and the margin of the clip, and with noise never larger.
    assert ((ours - plain).abs() <= 1 + plain.abs() * 2.0**-16).all()
    if is_noised:
        assert (ours.abs() <= plain.abs()).all()


@pytest.mark.parametrize("balls", [FLAT, LAYERS])
def test_norms_that_the_engine_knows_give_the_same_sum(balls):
    each, weights = contribution(balls), np.array([ONE, ONE // 3, ONE])
    delta_UP = some_users([0.5, 2.0, 40.0])
    square_UJ = torch.stack([delta_UP[:, ball.where].double().square().sum(dim=1) for ball in balls], dim=1)
    assert (summed(each, delta_UP, weights, square_UJ) - summed(each, delta_UP, weights)).abs().max() <= len(weights)


@pytest.mark.parametrize("wrong", [0.0, 0.5, math.nan])
def test_a_user_who_exceeds_the_bound_because_of_a_wrong_norm_adds_exactly_zero(wrong):
    each, delta_UP, weights = contribution(FLAT), some_users([1.0, 40.0, 1.0]), np.array([ONE, ONE, ONE])
    square_UJ = delta_UP.double().square().sum(dim=1, keepdim=True)
    expected = summed(each, delta_UP[[0, 2]], weights[[0, 2]], square_UJ[[0, 2]])
    square_UJ[1] *= wrong
    assert torch.equal(summed(each, delta_UP, weights, square_UJ), expected)


@pytest.mark.parametrize("balls", [FLAT, LAYERS])
def test_no_user_passes_with_more_than_their_weight_times_s(balls):
    each = contribution(balls)
    for scale, weight in [(1e-3, ONE), (2.0, ONE), (1e6, ONE), (1e30, ONE), (50.0, ONE // 7), (50.0, 1)]:
        units_P = summed(each, some_users([scale]), np.array([weight])).double()
        for ball in balls:
            assert units_P[ball.where].norm() * each.grid <= weight / ONE * ball.radius * (1 + 1e-12)
        assert units_P.norm() * each.grid <= weight / ONE * each.l2_bound


def test_the_check_of_the_bound_is_with_the_users_own_weight():
    each, delta_UP = contribution(FLAT), some_users([40.0])
    # The given norm is half of the true one, and the weight is 1/3: the update is within S, but not within S / 3.
    square_UJ = delta_UP.double().square().sum(dim=1, keepdim=True) / 4
    assert not summed(each, delta_UP, np.array([ONE // 3]), square_UJ).any()


@pytest.mark.parametrize("is_noised", [True, False])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_user_who_is_not_finite_adds_exactly_zero_in_kernels(bad, is_noised):
    each, weights = contribution(FLAT, is_noised), np.array([ONE, ONE, ONE])
    delta_UP = some_users([1.0, 3.0, 1.0])
    delta_UP[1, P - 1] = bad
    expected = summed(each, delta_UP[[0, 2]], weights[[0, 2]])
    assert torch.equal(summed(each, delta_UP, weights), expected)


def test_without_noise_a_coordinate_too_large_to_add_is_left_out_with_its_user():
    each, delta_UP = contribution((), is_noised=False), some_users([1.0, 1.0])
    delta_UP[0, 3] = 2.0**13
    expected = summed(each, delta_UP[1:], np.array([ONE]))
    assert torch.equal(summed(each, delta_UP, np.array([ONE, ONE])), expected)


def test_units_are_cut_towards_zero():
    each = contribution(FLAT)
    delta_UP = torch.zeros(1, P)
    delta_UP[0, :4] = torch.tensor([1.75, -1.75, 0.99, -0.99]) * each.grid
    assert summed(each, delta_UP, np.array([ONE]))[:4].tolist() == [1, -1, 0, 0]


def test_the_sum_is_the_same_in_any_order_and_any_chunks():
    each, weights = contribution(LAYERS), np.array([ONE, ONE // 3, ONE // 5, ONE])
    delta_UP = some_users([0.5, 9.0, 2.0, 1.0])
    together = summed(each, delta_UP, weights)
    turned = summed(each, delta_UP.flip(0), weights[::-1].copy())
    apart = sum(summed(each, delta_UP[k : k + 1], weights[k : k + 1]) for k in range(4))
    assert torch.equal(together, turned)
    assert torch.equal(together, apart)
