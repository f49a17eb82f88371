"""A Triton kernel for evaluations. Computes the rank and the loss of each target without storing the logits [N, V].

Input: the outputs of a model before its last layer [N, D], the vectors of all words [V, D], and a target for each
output. Output: the rank of each target and its loss, [N]. `target_rank` and `losses` of next_word.py compute the same
from stored logits; the tests compare the two. Each product is computed as three TF32 products, which gives the
precision of float32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

POSITIONS, WORDS = 64, 64
"""The number of positions that one program of the kernel handles, and the number of words that it scores at a time."""


def score_targets(output_ND: Tensor, vector_VD: Tensor, target_N: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the rank and the loss of each target. The logit of a word is the product of output and word vector.

    Args:
        output_ND: The outputs of the model, float32, one row per position; on a GPU.
        vector_VD: The word vectors, float32, one row per word; on the same GPU.
        target_N: The token id of the target at each position.

    Returns:
        The rank of each target, counted from 1 as in `target_rank`, int32 [N]; and its cross-entropy in nats,
        float32 [N].
    """
    (N, D), V = output_ND.shape, len(vector_VD)
    rank_N = torch.empty(N, dtype=torch.int32, device=output_ND.device)
    loss_N = torch.empty(N, dtype=torch.float32, device=output_ND.device)
    if N:
        _score[(triton.cdiv(N, POSITIONS),)](
            output_ND.contiguous(), vector_VD.contiguous(), target_N, rank_N, loss_N, N, V,
            D=D, DB=max(16, triton.next_power_of_2(D)), BN=POSITIONS, BV=WORDS, num_warps=4,
        )  # fmt: skip
    return rank_N, loss_N


@triton.jit
def _score(
    outputs, vectors, targets, ranks, losses, N, V,
    D: tl.constexpr, DB: tl.constexpr, BN: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Compute the ranks and losses of BN positions in one pass over the words, BV words at a time.

    `total` is the sum of exp(score - peak), where `peak` is the largest score so far, so that exp() cannot overflow.
    """
    n, d, v = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN), tl.arange(0, DB), tl.arange(0, BV)
    inside = n < N
    of_output = inside[:, None] & (d < D)[None, :]
    o = tl.load(outputs + n[:, None] * D + d[None, :], mask=of_output, other=0.0)
    target = tl.load(targets + n, mask=inside, other=0)
    own = tl.sum(o * tl.load(vectors + target[:, None] * D + d[None, :], mask=of_output, other=0.0), 1)
    peak = own
    total = tl.zeros([BN], tl.float32)
    ahead = tl.zeros([BN], tl.int32)
    for start in range(0, V, BV):
        word = start + v
        w = tl.load(vectors + word[:, None] * D + d[None, :], mask=(word < V)[:, None] & (d < D)[None, :], other=0.0)
        score = tl.dot(o, tl.trans(w), input_precision="tf32x3")
        score = tl.where((word < V)[None, :], score, -float("inf"))
        higher = tl.maximum(peak, tl.max(score, 1))
        total = total * tl.exp(peak - higher) + tl.sum(tl.exp(score - higher[:, None]), 1)
        peak = higher
        # Do not compare the target with itself: its score here may differ from `own` by rounding.
        ahead += tl.sum(((score >= own[:, None]) & (word[None, :] != target[:, None])).to(tl.int32), 1)
    tl.store(ranks + n, tl.where(own == own, 1 + ahead, 0), mask=inside)
    tl.store(losses + n, peak + tl.log(total) - own, mask=inside)
