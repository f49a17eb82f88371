"""The scores of targets in Triton are those of the plain evaluation. (Triton's interpreter without a GPU.)"""

import pytest
import torch
from tests.kernels import KERNEL_DEVICE, needs_triton, quietly

from unheard.evaluation.next_word import losses, target_rank

pytestmark = [needs_triton, quietly]


def scored(
    output_ND: torch.Tensor, vector_VD: torch.Tensor, target_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    from unheard.evaluation.kernels import score_targets

    rank_N, loss_N = score_targets(*(x.to(KERNEL_DEVICE) for x in (output_ND, vector_VD, target_N)))
    return rank_N.cpu(), loss_N.cpu()


@pytest.mark.parametrize(("N", "V", "D"), [(70, 150, 12), (1, 64, 96), (0, 10, 4)])
def test_ranks_and_losses_agree_with_those_of_all_scores(N, V, D):
    generator = torch.Generator().manual_seed(N + V)
    output_ND, vector_VD = (torch.randn(size, D, generator=generator) for size in (N, V))
    target_N = torch.randint(0, V, (N,), generator=generator)
    logits_NV = output_ND @ vector_VD.T
    rank_N, loss_N = scored(output_ND, vector_VD, target_N)
    assert torch.equal(rank_N, target_rank(logits_NV, target_N))
    assert torch.allclose(loss_N.double(), losses(logits_NV, target_N), atol=1e-4)


def test_a_target_comes_after_words_with_the_same_score():
    vector_VD = torch.eye(4)[[0, 0, 0, 1]]
    rank_N, _ = scored(torch.tensor([[1.0, 0.0, 0.0, 0.0]]), vector_VD, torch.tensor([1]))
    assert rank_N.tolist() == [3]


def test_a_score_that_is_not_a_number_has_rank_zero():
    rank_N, _ = scored(torch.full((1, 2), float("nan")), torch.ones(5, 2), torch.tensor([1]))
    assert rank_N.tolist() == [0]
