"""Triton kernels for Hugging Face models with the windows of many users in one stream (packed.py).

- `score_gradient_`: the gradient of the cross-entropy with respect to the logits; it overwrites the logits. The
  readable version is `score_gradient` in packed.py. One program computes one token. It reads the logits once for their
  maximum and the sum of their exponentials, and once more, from the cache, for the gradient.
- `attention` and `attention_gradients`: causal attention within each window of a stream. The readable version is
  `plain_attention` in packed_layers.py. Each window is divided into tiles (`attention_tiles`). In the forward pass and
  for the gradient of the query, one program computes one tile of queries for one head. For the gradients of key and
  value, one program computes one tile of keys for all heads that share the key. There are no atomic additions, so the
  order of every sum is fixed. A program reads only the tokens of one window, so a number that is not finite affects
  only the user who has it.
- `gated_product` and `gated_gradient`: silu(gate) * up, where one product has computed gate and up as the two halves of
  its output.
- `user_product`, `add_user_product` and `user_gradient`: products with the low-rank matrices of each user, for LoRA.
  The readable versions have the same names in packed_layers.py. One program computes one block of tokens, which belong
  to one user, or a part of the gradient of one user. It reads only the matrices of this user.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
"""The number of logits that a program of `score_gradient_` reads at a time."""
SCORE_WARPS = 8
"""The number of warps of a program of `score_gradient_`."""
TILE = 64
"""The number of tokens of a tile of attention."""
FORWARD = {"OTHERS": 32, "num_warps": 4, "num_stages": 2}
BACKWARD = {"OTHERS": 64, "num_warps": 4, "num_stages": 2}
"""The launch settings of the attention kernels. OTHERS is the number of tokens that a program compares with its tile at
a time."""
LOG2_E = 1.4426950408889634
"""log2(e). The kernels compute exponentials with base 2, which is faster."""


def score_gradient_(logits_LR: Tensor, target_L: Tensor, weight_L: Tensor, silent_R: Tensor) -> Tensor:
    """Replace the logits by the gradient of the weighted cross-entropies with respect to them, and return it.

    Args:
        logits_LR: The scores of all rows of the model for each token, contiguous. They are overwritten.
        target_L: The row of the next token.
        weight_L: The weight of each target.
        silent_R: A mask of the rows that are left out of the softmax.
    """
    assert logits_LR.is_contiguous()
    L, R = logits_LR.shape
    silent_R = silent_R.view(torch.uint8)
    _score_gradient[(L,)](logits_LR, target_L, weight_L.contiguous(), silent_R, R, BLOCK=BLOCK, num_warps=SCORE_WARPS)
    return logits_LR


@triton.jit
def _score_gradient(logits_LR, target_L, weight_L, silent_R, R, BLOCK: tl.constexpr):
    """Replace the logits of one token by their gradient."""
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
        # Set the gradient of padding to zero. A product with weight 0 would not be zero if a logit is not finite.
        gradient = tl.where(weight == 0.0, 0.0, gradient)
        tl.store(start_of_row + row, gradient.to(logits_LR.dtype.element_ty), mask=row < R)


# ---------------------------------------------------------------------------------------------- attention


def attention_tiles(ends_M: Tensor, tokens: int) -> Tensor:
    """Divide the windows of a stream into tiles of at most `TILE` tokens.

    Args:
        ends_M: The cumulative lengths of the windows, beginning with 0.
        tokens: N, the number of tokens of the stream.

    Returns:
        For each tile the index of its first token, the index of the first token of its window, and the index after the
        last token of its window; int32 [3, J]. J depends only on N and the number of windows. Tiles that are not needed
        are empty: their first token is not before the end of the window.
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
        query_NHD: The queries of H heads. All tensors must be contiguous.
        key_NGD: The keys. G divides H, and H / G heads share a key.
        value_NGD: The values, shared like the keys.
        tiles_3J: The tiles of the windows (`attention_tiles`).
        scale: The factor on the products of queries and keys.

    Returns:
        The output [N, H, D], and the base-2 logarithm of the sum of exponentials [H, N], which `attention_gradients`
        needs.
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
    """Return the gradients of `attention` with respect to query, key and value.

    Args:
        grad_NHD: The gradient with respect to the output.
        query_NHD, key_NGD, value_NGD, tiles_3J, scale: The arguments of `attention`.
        output_NHD, lse_HN: The results of `attention`.
    """
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
    """Compute the output of attention for one tile of queries and one head, with a running maximum of the scores."""
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
        # The first token of the window is visible to every query. So after the first pass `larger` is the score of a
        # visible token and never the -1e30 of a masked one.
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
    """Compute the gradient of the query for one tile and head.

    It also writes the inner product of the gradient and the output of each token, which `_key_gradients` reads.
    """
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
    """Compute the gradients of key and value for one tile of keys, summed over all heads that share the key."""
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
    """Return silu(gate) * up, [N, I].

    Args:
        both_NJ: gate and up as the two halves of the columns, [N, 2 I], contiguous.
    """
    N, J = both_NJ.shape
    output_NI = both_NJ.new_empty(N, J // 2)
    _gate[(N,)](both_NJ, output_NI, I=J // 2, BLOCK=min(triton.next_power_of_2(J // 2), 4096))
    return output_NI


def gated_gradient(grad_NI: Tensor, both_NJ: Tensor) -> Tensor:
    """Return the gradient of `gated_product` with respect to its input, [N, 2 I].

    Args:
        grad_NI: The gradient with respect to the output, contiguous.
        both_NJ: The input of `gated_product`.
    """
    N, I = grad_NI.shape  # noqa: E741
    gradient_NJ = torch.empty_like(both_NJ)
    _gate_gradient[(N,)](grad_NI, both_NJ, gradient_NJ, I=I, BLOCK=min(triton.next_power_of_2(I), 4096))
    return gradient_NJ


@triton.jit
def _gate(both, output, I: tl.constexpr, BLOCK: tl.constexpr):  # noqa: E741
    """Compute `gated_product` for one token."""
    token = tl.program_id(0).to(tl.int64)
    for first in range(0, I, BLOCK):
        column = first + tl.arange(0, BLOCK)
        gate = tl.load(both + token * (2 * I) + column, mask=column < I, other=0.0).to(tl.float32)
        up = tl.load(both + token * (2 * I) + I + column, mask=column < I, other=0.0).to(tl.float32)
        result = gate * tl.sigmoid(gate) * up
        tl.store(output + token * I + column, result.to(output.dtype.element_ty), mask=column < I)


@triton.jit
def _gate_gradient(grad, both, gradient, I: tl.constexpr, BLOCK: tl.constexpr):  # noqa: E741
    """Compute `gated_gradient` for one token."""
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


# ------------------------------------------------------------------------------------- low-rank products


def user_product(x_NI: Tensor, weight_CRI: Tensor, span_2C: Tensor, scale: float, out_NR: Tensor) -> None:
    """Write scale * x W^T into `out_NR`, where W is the matrix of the user of each token.

    Rows of tokens that belong to no user are not written.

    Args:
        x_NI: One row per token. The elements of a row must be contiguous.
        weight_CRI: The matrix W [R, I] of each user, with any strides.
        span_2C: The index of the first token of each user, and the index after the last one.
        scale: A factor.
        out_NR: The result. The elements of a row must be contiguous.
    """
    (N, I), (C, R) = x_NI.shape, weight_CRI.shape[:2]  # noqa: E741
    _user_product[(C, _tiles_per_user(N, C))](
        x_NI, weight_CRI, span_2C, out_NR, scale, C, x_NI.stride(0), out_NR.stride(0), *weight_CRI.stride(),
        I=I, R=R, RB=_padded(R), TOKENS=TOKENS, **PRODUCT,
    )  # fmt: skip


def add_user_product(out_NO: Tensor, small_NR: Tensor, weight_CRO: Tensor, span_2C: Tensor, scale: float) -> None:
    """Add scale * small W to `out_NO`, where W is the matrix of the user of each token.

    Args:
        out_NO: The tensor to which the product is added. The elements of a row must be contiguous.
        small_NR: One row per token. The elements of a row must be contiguous.
        weight_CRO: The matrix W [R, O] of each user, with any strides.
        span_2C: The index of the first token of each user, and the index after the last one.
        scale: A factor.
    """
    (N, O), (C, R) = out_NO.shape, weight_CRO.shape[:2]  # noqa: E741
    _add_user_product[(triton.cdiv(O, ADDED["BO"]), C, _tiles_per_user(N, C))](
        out_NO, small_NR, weight_CRO, span_2C, scale, C, out_NO.stride(0), small_NR.stride(0), *weight_CRO.stride(),
        O=O, R=R, RB=_padded(R), TOKENS=TOKENS, **ADDED,
    )  # fmt: skip


def user_gradient(d_NR: Tensor, x_NI: Tensor, span_2C: Tensor, scale: float, out_CRI: Tensor) -> None:
    """Write scale * d^T x, summed over the tokens of each user, into `out_CRI`.

    Args:
        d_NR: One row per token. The elements of a row must be contiguous.
        x_NI: One row per token. The elements of a row must be contiguous.
        span_2C: The index of the first token of each user, and the index after the last one.
        scale: A factor.
        out_CRI: The result, with any strides. It is zero for users without tokens.
    """
    C, R, I = out_CRI.shape  # noqa: E741
    _user_gradient[(C, triton.cdiv(I, 64))](
        d_NR, x_NI, span_2C, out_CRI, scale, C, d_NR.stride(0), x_NI.stride(0), *out_CRI.stride(),
        I=I, R=R, RB=_padded(R), BI=64, TOKENS=64, num_warps=4,
    )  # fmt: skip


TOKENS = 64
"""The number of tokens of a tile of the low-rank products."""
PRODUCT = {"BI": 64, "num_warps": 8, "num_stages": 2}
ADDED = {"BO": 64, "num_warps": 4, "num_stages": 2}
"""The columns per step of `_user_product` and per program of `_add_user_product`, and their launch settings."""


def _padded(rank: int) -> int:
    """Return the rank padded to a size that `tl.dot` supports: a power of two, at least 16."""
    return max(16, triton.next_power_of_2(rank))


def _tiles_per_user(tokens: int, users: int) -> int:
    """Return the number of programs for each user: enough for a user with four times the mean number of tokens."""
    return triton.cdiv(4 * tokens, TOKENS * users)


@triton.jit
def _user_product(
    x, weight, spans, out, scale, C, x_row, out_row, weight_user, weight_rank, weight_input,
    I: tl.constexpr, R: tl.constexpr, RB: tl.constexpr, TOKENS: tl.constexpr, BI: tl.constexpr,  # noqa: E741
):  # fmt: skip
    """Compute `user_product` for every n-th tile of one user's tokens, where n is the number of programs per user."""
    user = tl.program_id(0)
    begin, end = tl.load(spans + user), tl.load(spans + C + user)
    r = tl.arange(0, RB)
    for first in range(begin + tl.program_id(1) * TOKENS, end, tl.num_programs(1) * TOKENS):
        token = (first + tl.arange(0, TOKENS)).to(tl.int64)
        here = (token < end)[:, None]
        total = tl.zeros((TOKENS, RB), tl.float32)
        for column in range(0, I, BI):
            i = column + tl.arange(0, BI)
            left = tl.load(x + token[:, None] * x_row + i[None, :], mask=here & (i < I)[None, :], other=0.0)
            there = weight + user.to(tl.int64) * weight_user + i[:, None] * weight_input + r[None, :] * weight_rank
            right = tl.load(there, mask=(i < I)[:, None] & (r < R)[None, :], other=0.0)
            total = tl.dot(left, (right * scale).to(left.dtype), total, input_precision="ieee")
        result = out + token[:, None] * out_row + r[None, :]
        tl.store(result, total.to(out.dtype.element_ty), mask=here & (r < R)[None, :])


@triton.jit
def _add_user_product(
    out, small, weight, spans, scale, C, out_row, small_row, weight_user, weight_rank, weight_output,
    O: tl.constexpr, R: tl.constexpr, RB: tl.constexpr, TOKENS: tl.constexpr, BO: tl.constexpr,  # noqa: E741
):  # fmt: skip
    """Compute BO columns of `add_user_product` for every n-th tile of one user's tokens, as in `_user_product`."""
    user = tl.program_id(1)
    begin, end = tl.load(spans + user), tl.load(spans + C + user)
    begin += tl.program_id(2) * TOKENS
    if begin >= end:
        return
    r, o = tl.arange(0, RB), tl.program_id(0) * BO + tl.arange(0, BO)
    there = weight + user.to(tl.int64) * weight_user + r[:, None] * weight_rank + o[None, :] * weight_output
    right = tl.load(there, mask=(r < R)[:, None] & (o < O)[None, :], other=0.0)
    right = (right * scale).to(small.dtype.element_ty)
    for first in range(begin, end, tl.num_programs(2) * TOKENS):
        token = (first + tl.arange(0, TOKENS)).to(tl.int64)
        here = (token < end)[:, None]
        left = tl.load(small + token[:, None] * small_row + r[None, :], mask=here & (r < R)[None, :], other=0.0)
        result, inside = out + token[:, None] * out_row + o[None, :], here & (o < O)[None, :]
        whole = tl.load(result, mask=inside, other=0.0).to(tl.float32)
        total = tl.dot(left, right, whole, input_precision="ieee")
        tl.store(result, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _user_gradient(
    d, x, spans, out, scale, C, d_row, x_row, out_user, out_rank, out_input,
    I: tl.constexpr, R: tl.constexpr, RB: tl.constexpr, BI: tl.constexpr, TOKENS: tl.constexpr,  # noqa: E741
):  # fmt: skip
    """Compute BI columns of `user_gradient` for one user."""
    user = tl.program_id(0)
    begin, end = tl.load(spans + user), tl.load(spans + C + user)
    i, r = tl.program_id(1) * BI + tl.arange(0, BI), tl.arange(0, RB)
    total = tl.zeros((RB, BI), tl.float32)
    for first in range(begin, end, TOKENS):
        token = (first + tl.arange(0, TOKENS)).to(tl.int64)
        here = token < end
        left = tl.load(d + token[:, None] * d_row + r[None, :], mask=here[:, None] & (r < R)[None, :], other=0.0)
        right = tl.load(x + token[:, None] * x_row + i[None, :], mask=here[:, None] & (i < I)[None, :], other=0.0)
        total = tl.dot(tl.trans(left), right, total, input_precision="ieee")
    there = out + user.to(tl.int64) * out_user + r[:, None] * out_rank + i[None, :] * out_input
    tl.store(there, (total * scale).to(out.dtype.element_ty), mask=(r < R)[:, None] & (i < I)[None, :])
