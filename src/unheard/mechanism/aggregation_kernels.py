"""Aggregation in Triton: clips, weights, truncates and sums users' deltas without float64 copies of them.

Input: deltas [U, P] on a GPU, weights, balls, the grid. Output: the integer sum [P]. The reference implementation is
`Contribution.of_users` in aggregation.py, which explains each step; comments marked DP are on the same steps in both. A
user's numbers are computed block by block in a fixed order, whoever else is in the chunk, and integers are added, so
the sum does not depend on how users are divided into chunks.

Five kernels, launched by `sum_users`. K is the number of blocks (of at most `BLOCK` coordinates), J the number of
balls:

| kernel | grid | computes |
| --- | --- | --- |
| `_squares` | (K, U) | part[u, k]: the squared norm of a block |
| `_scales` | (J, U) | scale[u, j] = min(1, radius / norm) |
| `_measures` | (K, U) | part[u, k]: the squared norm of the block's integers (without noise: their largest) |
| `_fits` | (U,) | fits[u]: whether the integers are within the bound |
| `_sum` | (K,) | units[p]: the sum over the users that fit |
"""

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from unheard.mechanism.clipping import Ball

BLOCK = 2048
"""Coordinates per program."""


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
    units_P = torch.empty(P, dtype=torch.int64, device=device)
    each = dict(ROW=delta_UP.stride(0), BLOCK=BLOCK, num_warps=4)
    _squares[(blocks, U)](delta_UP, table, part_UK, blocks, **each)
    _scales[(num_balls, U)](part_UK, first_block, radius, scale_UJ, blocks, BLOCK=1024)
    _measures[(blocks, U)](
        delta_UP, table, scale_UJ, weight_U, part_UK, 1.0 / grid, blocks, num_balls, NOISED=is_noised, **each
    )
    _fits[(U,)](part_UK, largest_U, fits_U, blocks, NOISED=is_noised, BLOCK=1024)
    _sum[(blocks,)](delta_UP, table, scale_UJ, weight_U, fits_U, units_P, 1.0 / grid, blocks, num_balls, U, **each)
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
def _whole_units(delta, table, scale, weight, per_unit, blocks, balls, u, k, ROW: tl.constexpr, BLOCK: tl.constexpr):
    """n_k of a block, as float64; a value that is not finite stays so."""
    i = tl.load(table + k) + tl.arange(0, BLOCK)
    inside = i < tl.load(table + blocks + k)
    x = tl.load(delta + u * ROW + i, mask=inside, other=0.0).to(tl.float64)
    x = x * tl.load(scale + u * balls + tl.load(table + 2 * blocks + k)) * tl.load(weight + u) * per_unit
    # DP: towards zero, after weighting. (As an integer and back; beyond 2^62, and for a NaN, the value itself.)
    small = tl.abs(x) < 4611686018427387904.0
    return tl.where(small, tl.where(small, x, 0.0).to(tl.int64).to(tl.float64), x), i, inside


@triton.jit
def _measures(
    delta, table, scale, weight, part, per_unit, blocks, balls,
    NOISED: tl.constexpr, ROW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The squared norm of a block's integers, or without noise the largest of them. A NaN makes either result a NaN."""
    k, u = tl.program_id(0), tl.program_id(1).to(tl.int64)
    n, _, _ = _whole_units(delta, table, scale, weight, per_unit, blocks, balls, u, k, ROW, BLOCK)
    if NOISED:
        tl.store(part + u * blocks + k, tl.sum(n * n))
    else:
        unknown = tl.sum((n != n).to(tl.int32)) > 0
        tl.store(part + u * blocks + k, tl.where(unknown, float("nan"), tl.max(tl.abs(n))))


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
def _sum(delta, table, scale, weight, fits, units, per_unit, blocks, balls, U, ROW: tl.constexpr, BLOCK: tl.constexpr):
    """The sum over users of one block."""
    k = tl.program_id(0)
    total = tl.zeros([BLOCK], tl.int64)
    u = tl.full([], 0, tl.int64)
    while u < U:
        n, _, _ = _whole_units(delta, table, scale, weight, per_unit, blocks, balls, u, k, ROW, BLOCK)
        # DP: who does not fit, or is not finite, adds exactly zero.
        total += tl.where(tl.load(fits + u) != 0, n, 0.0).to(tl.int64)
        u += 1
    i = tl.load(table + k) + tl.arange(0, BLOCK)
    tl.store(units + i, total, mask=i < tl.load(table + blocks + k))
