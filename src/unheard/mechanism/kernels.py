"""Triton kernels that clip, weight, truncate and sum users' deltas without copies of them (`sum_users`).

Input: deltas [U, P] on a GPU, weights, balls, the grid. Output: the integer sum [P]. The reference implementation is
`Contribution.of_users` in aggregation.py, which explains each step; comments marked DP are on the same steps in both.
The numbers of one user are computed block by block in a fixed order and do not depend on the other users of the chunk.
Integers add exactly, so the sum does not depend on how users are divided into chunks.

n_k = trunc(y_k) with y_k = factor_k * delta_k, one product in float32 per coordinate. factor_k = w_k * min(1, S / norm) / g
is rounded down by more than the rounding error of the product (`MARGIN`), so n_k is never larger than in exact
arithmetic. It may be smaller, by a relative error of a few millionths and by one unit, which is far below the noise.
The bound is checked on sum(y_k^2), which is at least sum(n_k^2). The limit of this sum is lowered by more than its
rounding error (`CHECKED`).

`sum_users` launches these kernels. K is the number of blocks (of at most `BLOCK` coordinates), J the number of balls, G
the number of groups (of at most `GROUP` users):

| kernel | grid | computes |
| --- | --- | --- |
| `_squares`, unless the engine gives them | (K / `SQUARED`, U) | part[u, k]: the squared norm of a block |
| `_factors` | (J, U) | factor[u, j] |
| `_sum` | (K, G) | units[p]: the sum over all users; part[u, k]: the sum of y^2 (without noise: the largest) |
| `_fits` | (U,) | fits[u]: whether user u is within the bound; and the number of users of each group who are not |
| `_sum`, with `REMOVE` | (K, G) | subtracts the users that do not fit from units[p] |

Almost always every user fits, so adding first and removing later saves a pass over the deltas.
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
"""The number of coordinates that one program (one instance of a Triton kernel) processes."""
GROUP = 64
"""Users per program of `_sum`. With noise, the sum over this many users (2^22 * 2^6) fits into int32."""
SQUARED = 8
"""The number of blocks that one program of `_squares` processes."""
CHECKED = 1.0 - 2.0**-18
"""The factor that lowers the limit of sum(y^2), by more than the rounding error of the sum in float32 (2^-19)."""
MARGIN = 1.0 - 2.0**-17
"""The clip scales deltas to S times this factor, so that they stay within the limit. The margin is larger than the sum
of these: `CHECKED`, the errors of squared norms from an engine (2^-20), and the rounding of the factor and of the
product (2^-24 each)."""


def sum_users(
    delta_UP: Tensor,
    weight_U: Tensor,
    balls: Sequence[Ball],
    grid: float,
    largest: float,
    is_noised: bool,
    square_UJ: Tensor | None = None,
) -> Tensor:
    """Compute the sum of n_k over users, int64 [P].

    Args:
        delta_UP: One delta per row, on a GPU.
        weight_U: The users' weights in [0, 1], float64.
        balls: The balls of the clip; empty if there is no clip.
        grid: The size of one unit.
        largest: S in units of the grid. Without noise: the largest coordinate that a user may add.
        is_noised: Whether noise will be added to the sum.
        square_UJ: The squared norm of each user's delta in each ball, if the engine has computed them; else None.
    """
    U, P = delta_UP.shape
    device = delta_UP.device
    assert delta_UP.stride(1) == 1
    table, first_block, radius = _blocks(tuple((b.where.start, b.where.stop, b.radius) for b in balls), P, device)
    blocks, num_balls = table.shape[1], len(radius)
    groups = triton.cdiv(U, GROUP)
    part_UK = torch.empty(U, blocks, device=device)
    factor_UJ = torch.empty(U, num_balls, device=device)
    fits_U = torch.empty(U, dtype=torch.int32, device=device)
    misfits_G = torch.zeros(groups, dtype=torch.int32, device=device)
    units_P = torch.zeros(P, dtype=torch.int64, device=device)
    # If all blocks begin and end at multiples of 16 bytes, Triton can read 16 bytes per thread and instruction.
    edges = [delta_UP.stride(0), P, *(ball.where.start for ball in balls)]
    aligned = 8 if all(edge % 8 == 0 for edge in edges) else 1
    each = dict(ROW=delta_UP.stride(0), ALIGNED=aligned, BLOCK=BLOCK, num_warps=4)
    # Without a clip no norm is needed.
    is_clipped, is_known = bool(balls), square_UJ is not None
    squares, row = (square_UJ, square_UJ.stride(0)) if square_UJ is not None else (factor_UJ, 0)
    if is_clipped and not is_known:
        squares = torch.empty(U, blocks, dtype=torch.float64, device=device)
        _squares[(triton.cdiv(blocks, SQUARED), U)](delta_UP, table, squares, blocks, SQUARED=SQUARED, **each)
    _factors[(num_balls, U)](
        squares, row, first_block, radius, weight_U, factor_UJ, 1.0 / grid, blocks,
        CLIPPED=is_clipped, KNOWN=is_known, MARGIN=MARGIN if is_noised else 1.0, BLOCK=1024,
    )  # fmt: skip
    numbers = (delta_UP, table, factor_UJ, fits_U, misfits_G, part_UK, units_P, blocks, num_balls, U)
    _sum[(blocks, groups)](*numbers, REMOVE=False, NOISED=is_noised, GROUP=GROUP, **each)
    _fits[(U,)](
        part_UK, weight_U, fits_U, misfits_G, largest, blocks,
        NOISED=is_noised, CHECKED=CHECKED, GROUP=GROUP, BLOCK=1024,
    )  # fmt: skip
    _sum[(blocks, groups)](*numbers, REMOVE=True, NOISED=is_noised, GROUP=GROUP, **each)
    return units_P


@lru_cache
def _blocks(balls: tuple[tuple[int, int, float], ...], P: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Divide the parameter vector into blocks, none of which crosses from one ball into the next.

    Each block then belongs to one ball, with one norm and one radius.

    Returns:
        The start, the end and the ball of each block, [3, K]; the first block of each ball, [J + 1]; the radii, [J].
    """
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
def _block(table, blocks, k, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """Return `BLOCK` coordinates from the start of block k on, and a mask of those that are inside the block."""
    begin, end = tl.load(table + k), tl.load(table + blocks + k)
    i = tl.multiple_of(begin, ALIGNED) + tl.arange(0, BLOCK)
    return i, i < tl.multiple_of(end, ALIGNED)


@triton.jit
def _squares(
    delta, table, part, blocks,
    SQUARED: tl.constexpr, ROW: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the squared norms of `SQUARED` blocks of one user, in float64."""
    u = tl.program_id(1).to(tl.int64)
    for j in range(SQUARED):
        k = tl.program_id(0) * SQUARED + j
        if k < blocks:
            i, inside = _block(table, blocks, k, ALIGNED, BLOCK)
            x = tl.load(delta + u * ROW + i, mask=inside, other=0.0).to(tl.float64)
            tl.store(part + u * blocks + k, tl.sum(x * x))


@triton.jit
def _factors(
    square, row, first_block, radius, weight, factor, per_unit, blocks,
    CLIPPED: tl.constexpr, KNOWN: tl.constexpr, MARGIN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute w * min(1, S / norm) / grid for one ball of one user."""
    ball, u = tl.program_id(0), tl.program_id(1).to(tl.int64)
    # DP: the weight is part of the factor, so truncation comes after weighting.
    by = tl.load(weight + u) * per_unit
    if CLIPPED:
        if KNOWN:
            norm = tl.sqrt(tl.load(square + u * row + ball))
        else:
            begin, end = tl.load(first_block + ball), tl.load(first_block + ball + 1)
            k = tl.arange(0, BLOCK)
            total = tl.zeros([BLOCK], tl.float64)
            at = begin
            while at < end:
                total += tl.load(square + u * blocks + at + k, mask=at + k < end, other=0.0)
                at += BLOCK
            norm = tl.sqrt(tl.sum(total))
        bound = tl.load(radius + ball)
        # DP: this clips the final delta to less than S, by a margin that is larger than the rounding errors that
        # follow.
        by = by * tl.where(norm > bound, bound / norm, 1.0)
    tl.store(factor + u * tl.num_programs(0) + ball, (by * MARGIN).to(tl.float32))


@triton.jit
def _fits(
    part, weight, fits, misfits, largest, blocks,
    NOISED: tl.constexpr, CHECKED: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Check whether one user is within the bound, and count the users of each group who are not.

    With noise the bound is g * ||n|| <= w * S. Without noise no coordinate may be above `largest`.
    """
    u = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float64)
    at = 0
    while at < blocks:
        x = tl.load(part + u * blocks + at + k, mask=at + k < blocks, other=0.0).to(tl.float64)
        total = total + x if NOISED else tl.maximum(total, x)
        at += BLOCK
    if NOISED:
        # DP: sum(y^2) is at least sum(n^2); the limit is scaled by the user's own weight.
        limit = tl.load(weight + u) * largest
        is_within = tl.sum(total) <= limit * limit * CHECKED
    else:
        is_within = tl.max(total) <= largest
    # DP: a NaN makes the comparison false, and its user does not fit.
    tl.store(fits + u, is_within.to(tl.int32))
    tl.atomic_add(misfits + u // GROUP, 1 - is_within.to(tl.int32))


@triton.jit
def _scaled(delta, factor, u, end, i, inside, ball, balls, ROW: tl.constexpr):
    """Return y = factor * delta for a block of one user, in float32; zero if `u` is not below `end`."""
    here = u < end
    x = tl.load(delta + u * ROW + i, mask=inside & here, other=0.0).to(tl.float32)
    return x * tl.load(factor + u * balls + ball, mask=here, other=0.0)


@triton.jit
def _add(total, y, fits, part, u, k, end, blocks, REMOVE: tl.constexpr, NOISED: tl.constexpr):
    """Return total + trunc(y), and store the size of y. With `REMOVE`: total - trunc(y) if the user does not fit."""
    size = tl.abs(y)
    # The limits are 2^22 with noise and 2^43 without. A user within the bound is below 2^21 with noise, and has at most
    # 2^42 without.
    small = size < (4194304.0 if NOISED else 8796093022208.0)
    # DP: truncates towards zero. A value that is too large, or not finite, adds zero here, and its user does not fit.
    n = tl.where(small, y, 0.0).to(tl.int32 if NOISED else tl.int64)
    if REMOVE:
        # DP: a user who does not fit adds exactly zero: the integers that were added are subtracted again.
        return total - tl.where(tl.load(fits + u, mask=u < end, other=1) == 0, n, 0)
    largest = tl.sum(y * y) if NOISED else tl.max(tl.where(small, size, float("inf")))
    tl.store(part + u * blocks + k, largest, mask=u < end)
    return total + n


@triton.jit
def _sum(
    delta, table, factor, fits, misfits, part, units, blocks, balls, U,
    REMOVE: tl.constexpr, NOISED: tl.constexpr, GROUP: tl.constexpr, ROW: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Add one block of a group of users to the sum, and store the size of each user's block.

    With `REMOVE`: subtract the users who do not fit. Most groups have none, and return at once.
    """
    k, group = tl.program_id(0), tl.program_id(1)
    if REMOVE:  # noqa: SIM102
        if tl.load(misfits + group) == 0:
            return
    i, inside = _block(table, blocks, k, ALIGNED, BLOCK)
    ball = tl.load(table + 2 * blocks + k)
    u = group.to(tl.int64) * GROUP
    end = tl.minimum(u + GROUP, U)
    total = tl.zeros([BLOCK], tl.int32 if NOISED else tl.int64)
    while u < end:
        # Two users at a time, so that the second read need not wait for the first addition.
        y0 = _scaled(delta, factor, u, end, i, inside, ball, balls, ROW)
        y1 = _scaled(delta, factor, u + 1, end, i, inside, ball, balls, ROW)
        total = _add(total, y0, fits, part, u, k, end, blocks, REMOVE, NOISED)
        total = _add(total, y1, fits, part, u + 1, k, end, blocks, REMOVE, NOISED)
        u += 2
    # Atomic additions come in any order. The sum of integers does not depend on it.
    tl.atomic_add(units + i, total.to(tl.int64), mask=inside)
