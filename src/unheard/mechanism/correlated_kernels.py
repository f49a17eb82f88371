"""The past of banded noise in Triton: the weighted sum of the last noises in one pass over them.

Input: the last noises [R, P] on a GPU, as a ring, and the coefficients. Output: sum_i c_i x_(t - i), float64 [P]. The
reference implementation is `NoiseHistory._past_banded` in correlated.py; the test compares them bit by bit. Products and
sums are rounded one by one (no fused multiply-add) in the same order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
"""Coordinates per program."""


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
