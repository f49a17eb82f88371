"""The kernels for packed models agree with their readable versions. (Without a GPU: Triton's interpreter.)"""

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


@pytest.mark.parametrize("rank", [3, 8, 20])
def test_low_rank_products_of_each_user_are_those_of_the_readable_version(rank):
    """Users with many tokens, with few and with none; a user whose numbers are not finite; tokens of no user."""
    from unheard.models import packed_kernels as kernels
    from unheard.models import packed_layers as plain

    generator = torch.Generator().manual_seed(4)
    # User 1 has no tokens; tokens 45 to 47 and the last ones belong to nobody; user 3 has more than a tile per program.
    span_2C = torch.tensor([[33, 0, 0, 48], [45, 0, 33, 400]], dtype=torch.int32)
    N, wide = 417, 70
    is_of_nobody_N = torch.ones(N, dtype=torch.bool)
    for begin, end in span_2C.T.tolist():
        is_of_nobody_N[begin:end] = False
    x_NI, small_NR = torch.randn(N, wide + 3, generator=generator), torch.randn(N, rank + 2, generator=generator)
    a_CRI, b_COR = torch.randn(4, rank, wide, generator=generator), torch.randn(4, wide, rank, generator=generator)
    x_NI[33:45] = float("nan")
    # Slices of wider tensors, like the outputs of merged layers, and transposed matrices.
    x_NI, small_NR = x_NI[:, 3:], small_NR[:, 2:]
    for weight_CRI in (a_CRI, b_COR.transpose(1, 2)):
        results = []
        for of, device in ((plain, torch.device("cpu")), (kernels, KERNEL_DEVICE)):
            x, small, weight, spans = (t.to(device) for t in (x_NI, small_NR, weight_CRI, span_2C))
            down_NR = torch.full((N, rank + 1), 7.0, device=device)[:, 1:]
            of.user_product(x, weight, spans, 0.5, down_NR)
            up_NI = x.clone()
            of.add_user_product(up_NI, small, weight, spans, 2.0)
            gradient_CRI = torch.full_like(weight, 7.0)
            of.user_gradient(small, x, spans, 0.25, gradient_CRI)
            results.append([t.cpu() for t in (down_NR, up_NI, gradient_CRI)])
        tolerance = 1e-4 if KERNEL_DEVICE.type == "cpu" else 2e-2
        for one, other in zip(*results, strict=True):
            assert torch.allclose(one, other, atol=tolerance, equal_nan=True)
        down_NR, up_NI, gradient_CRI = results[1]
        assert torch.isfinite(gradient_CRI[[1, 2, 3]]).all()  # values that are not finite affect only their own user
        assert not gradient_CRI[1].any()
        assert (down_NR[is_of_nobody_N] == 7.0).all()
        assert torch.equal(up_NI[is_of_nobody_N], x_NI[is_of_nobody_N])


def test_a_low_rank_product_and_its_gradients_are_those_of_autograd():
    from unheard.models.packed_layers import PackedLora, _with_low_rank

    generator = torch.Generator().manual_seed(5)

    def drawn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    span_2C, user_N = torch.tensor([[5, 0], [12, 5]], dtype=torch.int32), torch.tensor([1] * 5 + [0] * 7)
    x_1NI, weight_OI, bias_O = drawn(1, 12, 5).requires_grad_(), drawn(9, 5), drawn(9)
    layers = [PackedLora(torch.nn.Identity(), scale, frozen) for scale, frozen in ((0.5, None), (2.0, drawn(3, 5)))]
    leaves = [drawn(2, 2, 5), drawn(2, 4, 2), drawn(2, 3, 3)]
    for leaf in leaves:
        leaf.requires_grad_()
    layers[0].a_CRI, layers[0].b_COR, layers[1].b_COR = leaves
    for layer in layers:
        layer.span_2C = span_2C
    parts = _with_low_rank(x_1NI, weight_OI, bias_O, [4, 2, 3], layers, [0, 2])
    frozen = layers[1].frozen_a
    assert frozen is not None
    whole_NO = x_1NI[0] @ weight_OI.T + bias_O
    small_N2 = torch.einsum("ni,nri->nr", x_1NI[0], leaves[0][user_N])
    first_N4 = whole_NO[:, :4] + 0.5 * torch.einsum("nr,nor->no", small_N2, leaves[1][user_N])
    last_N3 = whole_NO[:, 6:] + 2.0 * torch.einsum("nr,nor->no", x_1NI[0] @ frozen.T, leaves[2][user_N])
    expected = [first_N4, whole_NO[:, 4:6], last_N3]
    weights = [drawn(12, n) for n in (4, 2, 3)]
    sums = [
        sum((part.reshape(12, -1) * w).sum() for part, w in zip(each, weights, strict=True))
        for each in (parts, expected)
    ]
    for one, other in zip(parts, expected, strict=True):
        assert torch.allclose(one[0], other)
    ours, theirs = (torch.autograd.grad(total, [x_1NI, *leaves]) for total in sums)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.allclose(one, other)
