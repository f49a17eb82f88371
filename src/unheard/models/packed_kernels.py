"""The gradient of cross-entropy by the logits in Triton, in the memory of the logits.

Input: logits [L, R], the row of each target, its weight, and which rows stand for no word. Output: the gradient, in the
same memory. The readable version is `score_gradient` in packed.py. One program computes one token: it reads the logits
once for their maximum and the sum of their exponentials, and once more, from the cache, for the gradient.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
"""Logits that a program reads at a time."""


def score_gradient_(logits_LR: Tensor, target_L: Tensor, weight_L: Tensor, silent_R: Tensor) -> Tensor:
    """Replaces logits by the gradient of the weighted cross-entropies by them.

    Args:
        logits_LR: scores of all rows of the model; overwritten.
        target_L: the row of the next token.
        weight_L: the weight of each target.
        silent_R: rows that are left out of the softmax.
    """
    assert logits_LR.is_contiguous()
    L, R = logits_LR.shape
    silent_R = silent_R.view(torch.uint8)
    _score_gradient[(L,)](logits_LR, target_L, weight_L.contiguous(), silent_R, R, BLOCK=BLOCK, num_warps=8)
    return logits_LR


@triton.jit
def _score_gradient(logits_LR, target_L, weight_L, silent_R, R, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    start_of_row = logits_LR + token * R
    weight = tl.load(weight_L + token)
    target = tl.load(target_L + token)
    largest = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, R, BLOCK):
        row = first + tl.arange(0, BLOCK)
        score = tl.load(start_of_row + row, mask=row < R, other=float("-inf")).to(tl.float32)
        is_silent = tl.load(silent_R + row, mask=row < R, other=1) != 0
        score = tl.where(is_silent, float("-inf"), score)
        larger = tl.maximum(largest, score)
        finite = tl.where(larger == float("-inf"), 0.0, larger)
        total = total * tl.exp(largest - finite) + tl.exp(score - finite)
        largest = larger
    top = tl.max(largest, 0)
    whole = tl.sum(total * tl.exp(largest - top), 0)
    for first in range(0, R, BLOCK):
        row = first + tl.arange(0, BLOCK)
        score = tl.load(start_of_row + row, mask=row < R, other=float("-inf")).to(tl.float32)
        is_silent = tl.load(silent_R + row, mask=row < R, other=1) != 0
        share = tl.where(is_silent, 0.0, tl.exp(score - top) / whole)
        gradient = (share - tl.where(row == target, 1.0, 0.0)) * weight
        # Assigned, not multiplied: padding stays exactly zero if the hidden state is not finite.
        gradient = tl.where(weight == 0.0, 0.0, gradient)
        tl.store(start_of_row + row, gradient.to(logits_LR.dtype.element_ty), mask=row < R)
