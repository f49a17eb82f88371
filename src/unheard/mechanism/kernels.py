"""The mechanism in Triton: the sum of clipped deltas, and the past of correlated noise.

**Aggregation** (`sum_users`) clips, weights, truncates and sums users' deltas without float64 copies of them.

Input: deltas [U, P] on a GPU, weights, balls, the grid. Output: the integer sum [P]. The reference implementation is
`Contribution.of_users` in aggregation.py, which explains each step; comments marked DP are on the same steps in both. A
user's numbers are computed block by block in a fixed order, whoever else is in the chunk, and integers are added, so
the sum does not depend on how users are divided into chunks.

Five kernels, launched by `sum_users`. K is the number of blocks (of at most `BLOCK` coordinates), J the number of
balls, G the number of groups (of at most `GROUP` users):

| kernel | grid | computes |
| --- | --- | --- |
| `_squares` | (K, U) | part[u, k]: the squared norm of a block |
| `_scales` | (J, U) | scale[u, j] = min(1, radius / norm) |
| `_sum` | (K, G) | units[p]: the sum over all users; part[u, k]: the squared norm of its integers (without noise: the largest) |
| `_fits` | (U,) | fits[u]: whether the integers are within the bound |
| `_sum`, with `REMOVE` | (K, G) | subtracts the users that do not fit from units[p] |

Almost always every user fits, so adding first and removing later saves a pass over the deltas.

**The past of banded noise** (`weighted_past`): the weighted sum of the last noises in one pass over them. Input: the
last noises [R, P] on a GPU, as a ring, and the coefficients. Output: sum_i c_i x_(t - i), float64 [P]. The reference
implementation is `NoiseHistory._past_banded` in correlated.py; the test compares them bit by bit. Products and sums are
rounded one by one (no fused multiply-add) in the same order."""

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from unheard.mechanism.clipping import Ball

BLOCK = 1024
"""Coordinates per program."""
GROUP = 64
"""Users per program of `_sum`. Sums of so many are exact in float64, with noise (2^22 * 2^6) and without (2^43 * 2^6)."""


def sum_users(
    delta_UP: Tensor, weight_U: Tensor, balls: Sequence[Ball], grid: float, largest_U: Tensor, is_noised: bool
) -> Tensor:
    """The sum of n_k over users, int64 [P].

    `largest_U` is the largest square (noised) or coordinate allowed to each user.
    """
    U, P = delta_UP.shape
    device = delta_UP.device
    assert delta_UP.stride(1) == 1
    table, first_block, radius = _blocks(tuple((b.where.start, b.where.stop, b.radius) for b in balls), P, device)
    blocks, num_balls = table.shape[1], len(radius)
    part_UK = torch.empty(U, blocks, dtype=torch.float64, device=device)
    scale_UJ = torch.empty(U, num_balls, dtype=torch.float64, device=device)
    fits_U = torch.empty(U, dtype=torch.int32, device=device)
    units_P = torch.zeros(P, dtype=torch.int64, device=device)
    each = dict(ROW=delta_UP.stride(0), BLOCK=BLOCK, num_warps=4)
    _squares[(blocks, U)](delta_UP, table, part_UK, blocks, **each)
    _scales[(num_balls, U)](part_UK, first_block, radius, scale_UJ, blocks, BLOCK=1024)
    grid_of_sum = (blocks, triton.cdiv(U, GROUP))
    numbers = (delta_UP, table, scale_UJ, weight_U, fits_U, part_UK, units_P, 1.0 / grid, blocks, num_balls, U)
    _sum[grid_of_sum](*numbers, REMOVE=False, NOISED=is_noised, GROUP=GROUP, **each)
    _fits[(U,)](part_UK, largest_U, fits_U, blocks, NOISED=is_noised, BLOCK=1024)
    _sum[grid_of_sum](*numbers, REMOVE=True, NOISED=is_noised, GROUP=GROUP, **each)
    return units_P


@lru_cache
def _blocks(balls: tuple[tuple[int, int, float], ...], P: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Blocks that do not cross from one ball into the next, so that each block has one norm and one radius.

    Returns the start, the end and the ball of each block, [3, K]; the first block of each ball, [J + 1]; the radii,
    [J]."""
    balls = balls or ((0, P, math.inf),)
    assert balls[0][0] == 0
    assert balls[-1][1] == P
    assert all(a[1] == b[0] for a, b in itertools.pairwise(balls)), "balls must cover the vector in order"
    cuts = [
        (at, min(at + BLOCK, stop), b) for b, (start, stop, _) in enumerate(balls) for at in range(start, stop, BLOCK)
    ]
    first = [*(sum(c[2] < b for c in cuts) for b in range(len(balls))), len(cuts)]
    return (
        torch.tensor(cuts, dtype=torch.int64).T.contiguous().to(device),
        torch.tensor(first, dtype=torch.int64).to(device),
        torch.tensor([radius for *_, radius in balls], dtype=torch.float64).to(device),
    )


@triton.jit
def _squares(delta, table, part, blocks, ROW: tl.constexpr, BLOCK: tl.constexpr):
    """The squared norm of a block, float64."""
    k, u = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i = tl.load(table + k) + tl.arange(0, BLOCK)
    x = tl.load(delta + u * ROW + i, mask=i < tl.load(table + blocks + k), other=0.0).to(tl.float64)
    tl.store(part + u * blocks + k, tl.sum(x * x))


@triton.jit
def _scales(part, first_block, radius, scale, blocks, BLOCK: tl.constexpr):
    """min(1, S / norm) of one ball of one user."""
    ball, u = tl.program_id(0), tl.program_id(1).to(tl.int64)
    begin, end = tl.load(first_block + ball), tl.load(first_block + ball + 1)
    k = tl.arange(0, BLOCK)
    square = tl.zeros([BLOCK], tl.float64)
    at = begin
    while at < end:
        square += tl.load(part + u * blocks + at + k, mask=at + k < end, other=0.0)
        at += BLOCK
    norm = tl.sqrt(tl.sum(square))
    bound = tl.load(radius + ball)
    # DP: the clip of what is returned, in float64.
    tl.store(scale + u * tl.num_programs(0) + ball, tl.where(norm > bound, bound / norm, 1.0))


@triton.jit
def _whole_units(
    delta, table, scale, weight, per_unit, blocks, balls, u, k,
    NOISED: tl.constexpr, ROW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """n_k of a block as float64: to add, and its size. A value that is too large to add, or not finite, is 0 in the
    first, and large or not a number in the second."""
    i = tl.load(table + k) + tl.arange(0, BLOCK)
    inside = i < tl.load(table + blocks + k)
    x = tl.load(delta + u * ROW + i, mask=inside, other=0.0).to(tl.float64)
    x = x * tl.load(scale + u * balls + tl.load(table + 2 * blocks + k)) * tl.load(weight + u) * per_unit
    size = tl.abs(x)
    # DP: towards zero, after weighting. (Adding 2^52 rounds to the nearest whole number: faster than a conversion.)
    whole = (size + 4503599627370496.0) - 4503599627370496.0
    whole = whole - tl.where(whole > size, 1.0, 0.0)
    # 2^22 with noise, where nobody has 2^21, and 2^43 without, where nobody may have more than 2^42.
    small = size < (4194304.0 if NOISED else 8796093022208.0)
    n = tl.where(small, whole, 0.0)
    return tl.where(x < 0, -n, n), tl.where(small, whole, size), i, inside


@triton.jit
def _fits(part, largest, fits, blocks, NOISED: tl.constexpr, BLOCK: tl.constexpr):
    """Whether the user is within the bound, decided on integers: squares below 2^53 are exact in float64."""
    u = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float64)
    at = 0
    while at < blocks:
        x = tl.load(part + u * blocks + at + k, mask=at + k < blocks, other=0.0)
        if NOISED:
            total += x
        else:
            total = tl.where((x != x) | (total != total), float("nan"), tl.maximum(total, x))
        at += BLOCK
    # DP: the bound is checked on the integers themselves; a NaN or an infinity makes the comparison false.
    if NOISED:
        tl.store(fits + u, (tl.sum(total) <= tl.load(largest + u)).to(tl.int32))
    else:
        too_large = tl.sum((total <= tl.load(largest + u)).to(tl.int32)) < BLOCK
        tl.store(fits + u, tl.where(too_large, 0, 1))


@triton.jit
def _sum(
    delta, table, scale, weight, fits, part, units, per_unit, blocks, balls, U,
    REMOVE: tl.constexpr, NOISED: tl.constexpr, GROUP: tl.constexpr, ROW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Adds one block of a group of users to the sum, and measures each; or removes the users who do not fit."""
    k = tl.program_id(0)
    u = tl.program_id(1).to(tl.int64) * GROUP
    end = tl.minimum(u + GROUP, U)
    total = tl.zeros([BLOCK], tl.float64)
    removed = 0
    while u < end:
        if REMOVE:
            # DP: who does not fit, or is not finite, adds exactly zero: the same integers are subtracted again.
            if tl.load(fits + u) == 0:
                n, _, _, _ = _whole_units(
                    delta, table, scale, weight, per_unit, blocks, balls, u, k, NOISED, ROW, BLOCK
                )
                total -= n
                removed += 1
        else:
            n, size, _, _ = _whole_units(delta, table, scale, weight, per_unit, blocks, balls, u, k, NOISED, ROW, BLOCK)
            total += n
            if NOISED:
                tl.store(part + u * blocks + k, tl.sum(size * size))
            else:
                unknown = tl.sum((size != size).to(tl.int32)) > 0
                tl.store(part + u * blocks + k, tl.where(unknown, float("nan"), tl.max(size)))
        u += 1
    if (not REMOVE) or removed > 0:
        i = tl.load(table + k) + tl.arange(0, BLOCK)
        # Integers: the result does not depend on the order of the additions.
        tl.atomic_add(units + i, total.to(tl.int64), mask=i < tl.load(table + blocks + k))


def weighted_past(rows_RP: Tensor, coefficient_L: Tensor, index: int) -> Tensor:
    """sum over lags 1 to L of coefficient[lag - 1] * rows[(index - lag) mod R].

    Args:
        rows_RP: The ring of the last R noises, contiguous.
        coefficient_L: The coefficients of the lags that exist, on the same device.
        index: The number of the next attempt.
    """
    rows, parameters = rows_RP.shape
    past_P = torch.empty(parameters, dtype=torch.float64, device=rows_RP.device)
    grid = (triton.cdiv(parameters, BLOCK),)
    _past[grid](
        rows_RP, coefficient_L, past_P, index % rows, rows, len(coefficient_L), parameters,
        BLOCK=BLOCK, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return past_P


@triton.jit
def _past(rows, coefficients, past, index, num_rows, lags, parameters, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < parameters
    total = tl.zeros((BLOCK,), dtype=tl.float64)
    for lag in range(1, lags + 1):
        row = ((index - lag + num_rows) % num_rows).to(tl.int64)
        noise = tl.load(rows + row * parameters + at, mask=inside, other=0.0)
        product = noise * tl.load(coefficients + lag - 1)
        # DP: the noise of the last rounds, each with its own coefficient, as in correlated.py.
        total = total + product
    tl.store(past + at, total, mask=inside)
