"""The gradient of cross-entropy in Triton is that of the readable version. (Triton's interpreter without a GPU.)"""

import pytest
import torch
from tests.kernels import KERNEL_DEVICE, needs_triton, quietly

from unheard.models.packed import score_gradient

pytestmark = [needs_triton, quietly]


@pytest.mark.parametrize("rows", [300, 4096, 5003])
def test_the_gradient_by_the_logits_is_that_of_the_readable_version(rows):
    from unheard.models.packed_kernels import score_gradient_

    generator = torch.Generator().manual_seed(1)
    logits_LR = 4 * torch.randn(5, rows, generator=generator)
    target_L = torch.randint(0, rows - 3, (5,), generator=generator)
    weight_L = torch.tensor([0.5, 0.0, 0.1, 0.3, 0.0])
    silent_R = torch.zeros(rows, dtype=torch.bool)
    silent_R[-3:] = True
    logits_LR[1, 7] = float("nan")  # of padding: its gradient is exactly zero
    expected = score_gradient(logits_LR, target_L, weight_L, silent_R)
    row = logits_LR[0].clone().requires_grad_()
    given = [t.to(KERNEL_DEVICE) for t in (logits_LR, target_L, weight_L, silent_R)]
    assert score_gradient_(*given) is given[0]
    assert torch.allclose(given[0].cpu(), expected, atol=1e-6)
    assert not given[0][1].any()
    loss = torch.nn.functional.cross_entropy(row[:-3], target_L[0]) * weight_L[0]
    assert torch.allclose(torch.autograd.grad(loss, row)[0], expected[0], atol=1e-6)
