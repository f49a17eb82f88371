"""The kernels for packed models give what their readable versions give. (Triton's interpreter without a GPU.)"""

import pytest
import torch

from tests.kernels import KERNEL_DEVICE, needs_triton, quietly
from unheard.models.packed import score_gradient
from unheard.models.packed_layers import gated_gradient, gated_product, plain_attention

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


@pytest.mark.parametrize(("heads", "groups", "width"), [(6, 2, 16), (2, 2, 32)])
def test_attention_and_its_gradients_are_those_of_the_readable_version(heads, groups, width):
    """Windows of one token, of some tiles, of no token, and one whose numbers are not finite."""
    from unheard.models import packed_kernels as kernels

    generator = torch.Generator().manual_seed(2)
    ends_M = torch.tensor([0, 70, 70, 71, 230, 250, 320, 320, 320], dtype=torch.int32)
    shapes = [(320, heads, width), (320, groups, width), (320, groups, width)]
    inputs = [torch.randn(*shape, generator=generator) for shape in shapes]
    grad_NHD = torch.randn(*shapes[0], generator=generator)
    leaves = [t.clone().requires_grad_() for t in inputs]
    expected = plain_attention(*leaves, ends_M, 0.3)
    expected_gradients = torch.autograd.grad(expected, leaves, grad_NHD)
    for t in inputs:
        t[235] = float("nan")
    query, key, value, grad, ends = (t.to(KERNEL_DEVICE) for t in (*inputs, grad_NHD, ends_M))
    tiles = kernels.attention_tiles(ends, 320)
    output, lse = kernels.attention(query, key, value, tiles, 0.3)
    gradients = kernels.attention_gradients(grad, query, key, value, output, lse, tiles, 0.3)
    finite = torch.ones(320, dtype=torch.bool)
    finite[230:250] = False
    tolerance = 1e-5 if KERNEL_DEVICE.type == "cpu" else 2e-2  # TF32 on a GPU
    for one, other in zip((expected, *expected_gradients), (output, *gradients), strict=True):
        assert torch.allclose(one[finite], other.cpu()[finite], atol=tolerance)
        assert not torch.isfinite(other.cpu()[240:250]).all()


def test_gated_layers_and_their_gradient_are_those_of_the_readable_version():
    from unheard.models import packed_kernels as kernels

    generator = torch.Generator().manual_seed(3)
    both_NJ, grad_NI = torch.randn(5, 2 * 24, generator=generator), torch.randn(5, 24, generator=generator)
    leaf = both_NJ.clone().requires_grad_()
    expected = torch.nn.functional.silu(leaf[:, :24]) * leaf[:, 24:]
    (expected_gradient,) = torch.autograd.grad(expected, leaf, grad_NI)
    given = [t.to(KERNEL_DEVICE) for t in (grad_NI, both_NJ)]
    for product, gradient in (
        (kernels.gated_product(given[1]), kernels.gated_gradient(*given)),
        (gated_product(both_NJ), gated_gradient(grad_NI, both_NJ)),
    ):
        assert torch.allclose(product.cpu(), expected, atol=1e-6)
        assert torch.allclose(gradient.cpu(), expected_gradient, atol=1e-5)
