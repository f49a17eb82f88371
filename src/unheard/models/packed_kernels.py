"""Kernels in Triton for Hugging Face models with the windows of many users in one stream.

- `score_gradient_`: the gradient of cross-entropy by the logits, in the memory of the logits. The readable version is
  `score_gradient` in packed.py. One program computes one token: it reads the logits once for their maximum and the sum
  of their exponentials, and once more, from the cache, for the gradient.
- `attention` and `attention_gradients`: causal attention within each window of a stream. The readable version is
  `plain_attention` in packed.py. Each window is divided into tiles (`attention_tiles`). Forward and for the gradient by
  the query, one program computes one tile of queries for one head; for the gradients by key and value, one tile of keys
  for all heads that share it. Nothing is added atomically, so sums have one order, and a program reads the tokens of
  one window only: a number that is not finite stays with the user who has it.
- `gated_product` and `gated_gradient`: silu(gate) * up of a product whose output is both, one beside the other.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
"""Logits that a program reads at a time."""
SCORE_WARPS = 8
"""Warps of a program of `score_gradient_`."""
TILE = 64
"""Tokens of a tile of attention."""
FORWARD = {"OTHERS": 32, "num_warps": 4, "num_stages": 2}
BACKWARD = {"OTHERS": 64, "num_warps": 4, "num_stages": 2}
"""How programs of attention run. OTHERS: tokens that a program compares with its tile at a time."""
LOG2_E = 1.4426950408889634


def score_gradient_(logits_LR: Tensor, target_L: Tensor, weight_L: Tensor, silent_R: Tensor) -> Tensor:
    """Replace logits by the gradient of the weighted cross-entropies by them.

    Args:
        logits_LR: Scores of all rows of the model; overwritten.
        target_L: The row of the next token.
        weight_L: The weight of each target.
        silent_R: Rows that are left out of the softmax.
    """
    assert logits_LR.is_contiguous()
    L, R = logits_LR.shape
    silent_R = silent_R.view(torch.uint8)
    _score_gradient[(L,)](logits_LR, target_L, weight_L.contiguous(), silent_R, R, BLOCK=BLOCK, num_warps=SCORE_WARPS)
    return logits_LR


@triton.jit
def _score_gradient(logits_LR, target_L, weight_L, silent_R, R, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    start_of_row = logits_LR + token * R
    weight = tl.load(weight_L + token)
    target = tl.load(target_L + token)
    top = float("-inf")
    whole = 0.0
    for first in range(0, R, BLOCK):
        row = first + tl.arange(0, BLOCK)
        score = tl.load(start_of_row + row, mask=row < R, other=float("-inf")).to(tl.float32)
        is_silent = tl.load(silent_R + row, mask=row < R, other=1) != 0
        score = tl.where(is_silent, float("-inf"), score)
        larger = tl.maximum(top, tl.max(score, 0))
        finite = tl.where(larger == float("-inf"), 0.0, larger)
        whole = whole * tl.exp(top - finite) + tl.sum(tl.exp(score - finite), 0)
        top = larger
    for first in range(0, R, BLOCK):
        row = first + tl.arange(0, BLOCK)
        score = tl.load(start_of_row + row, mask=row < R, other=float("-inf")).to(tl.float32)
        is_silent = tl.load(silent_R + row, mask=row < R, other=1) != 0
        share = tl.where(is_silent, 0.0, tl.exp(score - top) / whole)
        gradient = (share - tl.where(row == target, 1.0, 0.0)) * weight
        # Assigned, not multiplied: padding stays exactly zero if the hidden state is not finite.
        gradient = tl.where(weight == 0.0, 0.0, gradient)
        tl.store(start_of_row + row, gradient.to(logits_LR.dtype.element_ty), mask=row < R)


# ---------------------------------------------------------------------------------------------- attention


def attention_tiles(ends_M: Tensor, tokens: int) -> Tensor:
    """The tiles of the windows of a stream: first token, begin and end of the window, int32 [3, J].

    J does not depend on the windows. Tiles that are not needed have no token: their first is not before their end.

    Args:
        ends_M: The cumulative lengths of windows, beginning with 0.
        tokens: N, the number of tokens of the stream.
    """
    tiles_M = (ends_M.diff() + TILE - 1) // TILE
    last_M = tiles_M.cumsum(0)
    number_J = torch.arange(tokens // TILE + len(tiles_M), device=ends_M.device)
    window_J = torch.searchsorted(last_M, number_J, right=True).clamp(max=len(tiles_M) - 1)
    begin_J, end_J = ends_M[window_J], ends_M[window_J + 1]
    first_J = begin_J + (number_J - (last_M - tiles_M)[window_J]) * TILE
    return torch.stack([first_J, begin_J, end_J]).to(torch.int32)


def attention(
    query_NHD: Tensor, key_NGD: Tensor, value_NGD: Tensor, tiles_3J: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute causal attention within each window of a stream.

    Args:
        query_NHD: The queries, contiguous as all tensors here.
        key_NGD: The keys; several heads may share one.
        value_NGD: The values.
        tiles_3J: The tiles of the windows (`attention_tiles`).
        scale: The factor on the products of queries and keys.

    Returns:
        The output [N, H, D], and the base-2 logarithm of the sum of exponentials [H, N], which the gradients need.
    """
    N, H, D = query_NHD.shape
    output_NHD = torch.empty_like(query_NHD)
    lse_HN = torch.empty(H, N, dtype=torch.float32, device=query_NHD.device)
    J, group = tiles_3J.shape[1], H // key_NGD.shape[1]
    _attend[(H, J)](
        query_NHD, key_NGD, value_NGD, output_NHD, lse_HN, tiles_3J, N, J, scale * LOG2_E,
        H=H, GROUP=group, D=D, TILE=TILE, **FORWARD,
    )  # fmt: skip
    return output_NHD, lse_HN


def attention_gradients(
    grad_NHD: Tensor,
    query_NHD: Tensor,
    key_NGD: Tensor,
    value_NGD: Tensor,
    output_NHD: Tensor,
    lse_HN: Tensor,
    tiles_3J: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `attention` by query, key and value."""
    N, H, D = query_NHD.shape
    G, J = key_NGD.shape[1], tiles_3J.shape[1]
    by_query, by_key, by_value = (torch.empty_like(t) for t in (query_NHD, key_NGD, value_NGD))
    product_HN = torch.empty_like(lse_HN)
    sizes: dict[str, int] = {"H": H, "GROUP": H // G, "D": D, "TILE": TILE, **BACKWARD}
    _query_gradient[(H, J)](
        grad_NHD, query_NHD, key_NGD, value_NGD, output_NHD, lse_HN, product_HN, by_query, tiles_3J, N, J, scale,
        **sizes,
    )  # fmt: skip
    _key_gradients[(G, J)](
        grad_NHD, query_NHD, key_NGD, value_NGD, lse_HN, product_HN, by_key, by_value, tiles_3J, N, J, scale, **sizes
    )
    return by_query, by_key, by_value


@triton.jit
def _attend(
    query, key, value, output, lse, tiles, N, J, scale,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, OTHERS: tl.constexpr,
):  # fmt: skip
    head, tile = tl.program_id(0), tl.program_id(1)
    first, begin, end = tl.load(tiles + tile), tl.load(tiles + J + tile), tl.load(tiles + 2 * J + tile)
    if first >= end:
        return
    row, d = first + tl.arange(0, TILE), tl.arange(0, D)
    here = row[:, None] * (H * D) + head * D + d[None, :]
    is_row = (row < end)[:, None]
    q = tl.load(query + here, mask=is_row, other=0.0)
    top = tl.full((TILE,), -1e30, tl.float32)
    total = tl.zeros((TILE,), tl.float32)
    mean = tl.zeros((TILE, D), tl.float32)
    for start in range(begin, tl.minimum(first + TILE, end), OTHERS):
        other = start + tl.arange(0, OTHERS)
        there = other[:, None] * (H // GROUP * D) + (head // GROUP) * D + d[None, :]
        is_other = (other < end)[:, None]
        k = tl.load(key + there, mask=is_other, other=0.0)
        score = tl.dot(q, tl.trans(k)) * scale
        # Each row has a score that counts in the first pass, so the largest is a true score from then on.
        score = tl.where(other[None, :] <= row[:, None], score, -1e30)
        larger = tl.maximum(top, tl.max(score, 1))
        share = tl.exp2(score - larger[:, None])
        shrink = tl.exp2(top - larger)
        total = total * shrink + tl.sum(share, 1)
        v = tl.load(value + there, mask=is_other, other=0.0)
        mean = tl.dot(share.to(v.dtype), v, mean * shrink[:, None])
        top = larger
    tl.store(output + here, (mean / total[:, None]).to(output.dtype.element_ty), mask=is_row)
    tl.store(lse + head * N + row, top + tl.log2(total), mask=row < end)


@triton.jit
def _query_gradient(
    grad, query, key, value, output, lse, product, by_query, tiles, N, J, scale,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, OTHERS: tl.constexpr,
):  # fmt: skip
    """Also writes the product of gradient and output of each token, which `_key_gradients` reads."""
    head, tile = tl.program_id(0), tl.program_id(1)
    first, begin, end = tl.load(tiles + tile), tl.load(tiles + J + tile), tl.load(tiles + 2 * J + tile)
    if first >= end:
        return
    row, d = first + tl.arange(0, TILE), tl.arange(0, D)
    here = row[:, None] * (H * D) + head * D + d[None, :]
    is_row = (row < end)[:, None]
    q = tl.load(query + here, mask=is_row, other=0.0)
    g = tl.load(grad + here, mask=is_row, other=0.0)
    o = tl.load(output + here, mask=is_row, other=0.0)
    inner = tl.sum(g.to(tl.float32) * o.to(tl.float32), 1)
    tl.store(product + head * N + row, inner, mask=row < end)
    whole = tl.load(lse + head * N + row, mask=row < end, other=0.0)
    gradient = tl.zeros((TILE, D), tl.float32)
    for start in range(begin, tl.minimum(first + TILE, end), OTHERS):
        other = start + tl.arange(0, OTHERS)
        there = other[:, None] * (H // GROUP * D) + (head // GROUP) * D + d[None, :]
        is_other = (other < end)[:, None]
        k = tl.load(key + there, mask=is_other, other=0.0)
        v = tl.load(value + there, mask=is_other, other=0.0)
        score = tl.dot(q, tl.trans(k)) * (scale * 1.4426950408889634)
        share = tl.where(other[None, :] <= row[:, None], tl.exp2(score - whole[:, None]), 0.0)
        moved = share * (tl.dot(g, tl.trans(v)) - inner[:, None])
        gradient = tl.dot(moved.to(k.dtype), k, gradient)
    tl.store(by_query + here, (gradient * scale).to(by_query.dtype.element_ty), mask=is_row)


@triton.jit
def _key_gradients(
    grad, query, key, value, lse, product, by_key, by_value, tiles, N, J, scale,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, OTHERS: tl.constexpr,
):  # fmt: skip
    group, tile = tl.program_id(0), tl.program_id(1)
    first, end = tl.load(tiles + tile), tl.load(tiles + 2 * J + tile)
    if first >= end:
        return
    row, d = first + tl.arange(0, TILE), tl.arange(0, D)
    here = row[:, None] * (H // GROUP * D) + group * D + d[None, :]
    is_row = (row < end)[:, None]
    k = tl.load(key + here, mask=is_row, other=0.0)
    v = tl.load(value + here, mask=is_row, other=0.0)
    gradient_k = tl.zeros((TILE, D), tl.float32)
    gradient_v = tl.zeros((TILE, D), tl.float32)
    for member in range(GROUP):
        head = group * GROUP + member
        for start in range(first, end, OTHERS):
            other = start + tl.arange(0, OTHERS)
            there = other[:, None] * (H * D) + head * D + d[None, :]
            is_other = other < end
            q = tl.load(query + there, mask=is_other[:, None], other=0.0)
            g = tl.load(grad + there, mask=is_other[:, None], other=0.0)
            whole = tl.load(lse + head * N + other, mask=is_other, other=0.0)
            inner = tl.load(product + head * N + other, mask=is_other, other=0.0)
            score = tl.dot(k, tl.trans(q)) * (scale * 1.4426950408889634)
            counts = (row[:, None] <= other[None, :]) & is_other[None, :]
            share = tl.where(counts, tl.exp2(score - whole[None, :]), 0.0)
            gradient_v = tl.dot(share.to(g.dtype), g, gradient_v)
            moved = share * (tl.dot(v, tl.trans(g)) - inner[None, :])
            gradient_k = tl.dot(moved.to(q.dtype), q, gradient_k)
    tl.store(by_key + here, (gradient_k * scale).to(by_key.dtype.element_ty), mask=is_row)
    tl.store(by_value + here, gradient_v.to(by_value.dtype.element_ty), mask=is_row)


# ------------------------------------------------------------------------------------- gated layers


def gated_product(both_NJ: Tensor) -> Tensor:
    """silu(gate) * up, [N, I]; gate and up are the halves of [N, 2 I], contiguous."""
    N, J = both_NJ.shape
    output_NI = both_NJ.new_empty(N, J // 2)
    _gate[(N,)](both_NJ, output_NI, I=J // 2, BLOCK=min(triton.next_power_of_2(J // 2), 4096))
    return output_NI


def gated_gradient(grad_NI: Tensor, both_NJ: Tensor) -> Tensor:
    """The gradient of `gated_product`, [N, 2 I]."""
    N, I = grad_NI.shape  # noqa: E741
    gradient_NJ = torch.empty_like(both_NJ)
    _gate_gradient[(N,)](grad_NI, both_NJ, gradient_NJ, I=I, BLOCK=min(triton.next_power_of_2(I), 4096))
    return gradient_NJ


@triton.jit
def _gate(both, output, I: tl.constexpr, BLOCK: tl.constexpr):  # noqa: E741
    token = tl.program_id(0).to(tl.int64)
    for first in range(0, I, BLOCK):
        column = first + tl.arange(0, BLOCK)
        gate = tl.load(both + token * (2 * I) + column, mask=column < I, other=0.0).to(tl.float32)
        up = tl.load(both + token * (2 * I) + I + column, mask=column < I, other=0.0).to(tl.float32)
        result = gate * tl.sigmoid(gate) * up
        tl.store(output + token * I + column, result.to(output.dtype.element_ty), mask=column < I)


@triton.jit
def _gate_gradient(grad, both, gradient, I: tl.constexpr, BLOCK: tl.constexpr):  # noqa: E741
    token = tl.program_id(0).to(tl.int64)
    for first in range(0, I, BLOCK):
        column = first + tl.arange(0, BLOCK)
        gate = tl.load(both + token * (2 * I) + column, mask=column < I, other=0.0).to(tl.float32)
        up = tl.load(both + token * (2 * I) + I + column, mask=column < I, other=0.0).to(tl.float32)
        by = tl.load(grad + token * I + column, mask=column < I, other=0.0).to(tl.float32)
        share = tl.sigmoid(gate)
        by_gate = by * up * share * (1.0 + gate * (1.0 - share))
        kind = gradient.dtype.element_ty
        tl.store(gradient + token * (2 * I) + column, by_gate.to(kind), mask=column < I)
        tl.store(gradient + token * (2 * I) + I + column, (by * gate * share).to(kind), mask=column < I)
