"""Layers that compute on a stream with the windows of many users, in place of the layers of a Hugging Face model.

- `packed_attention`: causal attention within each window, by the kernels of packed_kernels.py or FlashAttention.
- `PackedLora`, `PackedLinear`, `PackedEmbedding`, `PackedNorm`: trained layers with separate parameters for each user.
- `MergedLinears`, `GatedLayers`: frozen layers with the same input, computed as one product.

models/packed.py decides which layers are replaced.
"""

import importlib.util
import itertools
from typing import Any

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

ATTENTION = "unheard_packed"
"""The name under which `register_attention` registers the packed attention with transformers."""
WIDTHS = (16, 32, 64, 128)
"""The head widths D that the attention kernels support. Heads of other widths use FlashAttention."""
USES_KERNELS = importlib.util.find_spec("triton") is not None
"""Whether the kernels of packed_kernels.py are used on CUDA: if Triton is installed."""
SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""The names of layers of one module that have the same input. Their frozen weights are merged into one product."""


class CannotPack(Exception):
    """The packed computation does not support the model. The message gives the reason."""


# ---------------------------------------------------------------------------------------------- attention


@torch.library.custom_op("unheard::packed_attention", mutates_args=())
def packed_attention(
    query_NHD: Tensor, key_NGD: Tensor, value_NGD: Tensor, ends_M: Tensor, tiles_3J: Tensor, longest: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute causal attention within each window of a stream, on CUDA.

    Args:
        query_NHD: The queries of H heads.
        key_NGD, value_NGD: The keys and values, which several heads may share.
        ends_M: The cumulative lengths of the windows, beginning with 0.
        tiles_3J: The tiles of the windows for the kernels of packed_kernels.py. If J is 0, FlashAttention with variable
            lengths is used instead.
        longest: The largest number of tokens of a window.
        scale: The factor on the products of queries and keys.

    Returns:
        The output [N, H, D], and the log-sum-exp of the scores [H, N], which the backward pass needs.
    """
    if tiles_3J.shape[1]:
        from unheard.models.packed_kernels import attention

        return attention(query_NHD, key_NGD, value_NGD, tiles_3J, scale)
    output, lse, *_ = torch.ops.aten._flash_attention_forward(
        query_NHD, key_NGD, value_NGD, ends_M, ends_M, longest, longest, 0.0, True, False, scale=scale
    )
    return output, lse


@packed_attention.register_fake
def _(query_NHD, key_NGD, value_NGD, ends_M, tiles_3J, longest, scale):
    shape = (query_NHD.shape[1], query_NHD.shape[0])
    return torch.empty_like(query_NHD), query_NHD.new_empty(shape, dtype=torch.float32)


@torch.library.custom_op("unheard::packed_attention_backward", mutates_args=())
def packed_attention_backward(
    grad_NHD: Tensor,
    query_NHD: Tensor,
    key_NGD: Tensor,
    value_NGD: Tensor,
    output_NHD: Tensor,
    lse_HN: Tensor,
    ends_M: Tensor,
    tiles_3J: Tensor,
    longest: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of `packed_attention` with respect to query, key and value.

    Args:
        grad_NHD: The gradient with respect to the output.
        query_NHD, key_NGD, value_NGD, ends_M, tiles_3J, longest, scale: The arguments of `packed_attention`.
        output_NHD, lse_HN: The results of `packed_attention`.
    """
    if tiles_3J.shape[1]:
        from unheard.models.packed_kernels import attention_gradients

        return attention_gradients(grad_NHD, query_NHD, key_NGD, value_NGD, output_NHD, lse_HN, tiles_3J, scale)
    unused = torch.zeros(2, dtype=torch.uint64, device=query_NHD.device)
    return torch.ops.aten._flash_attention_backward(
        grad_NHD, query_NHD, key_NGD, value_NGD, output_NHD, lse_HN, ends_M, ends_M, longest, longest,
        0.0, True, unused, unused.new_empty(0), scale=scale,
    )  # fmt: skip


@packed_attention_backward.register_fake
def _(grad_NHD, query_NHD, key_NGD, value_NGD, output_NHD, lse_HN, ends_M, tiles_3J, longest, scale):
    return torch.empty_like(query_NHD), torch.empty_like(key_NGD), torch.empty_like(value_NGD)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Save the inputs and outputs of `packed_attention` for its backward pass."""
    *tensors, ctx.longest, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)


def _attention_gradients(ctx: Any, grad_NHD: Tensor, _: Any) -> tuple[Any, ...]:
    """The backward pass of `packed_attention`, in the form that torch's autograd calls."""
    query, key, value, ends, tiles, output, lse = ctx.saved_tensors
    gradients = packed_attention_backward(
        grad_NHD.contiguous(), query, key, value, output, lse, ends, tiles, ctx.longest, ctx.scale
    )
    return *gradients, None, None, None, None


packed_attention.register_autograd(_attention_gradients, setup_context=_keep)


def plain_attention(query_NHD: Tensor, key_NHD: Tensor, value_NHD: Tensor, ends_M: Tensor, scale: float) -> Tensor:
    """Return the output [N, H, D] of causal attention within each window: the readable version of `packed_attention`.

    It loops over windows and is used on the CPU and in tests.

    Args:
        query_NHD: The queries of H heads.
        key_NHD, value_NHD: The keys and values. They may have fewer heads, each shared by several heads of the query.
        ends_M: The cumulative lengths of the windows, beginning with 0.
        scale: The factor on the products of queries and keys.
    """
    parts, groups = [], query_NHD.shape[1] // key_NHD.shape[1]
    ends = ends_M.tolist()
    for start, end in itertools.pairwise(ends):
        query, key, value = (t[start:end].transpose(0, 1) for t in (query_NHD, key_NHD, value_NHD))
        key, value = key.repeat_interleave(groups, dim=0), value.repeat_interleave(groups, dim=0)
        parts.append(nnf.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale).transpose(0, 1))
    return torch.cat(parts)


def _attend(
    module: nn.Module, query_1HND: Tensor, key_1HND: Tensor, value_1HND: Tensor, _mask: Any = None, **settings: Any
) -> tuple[Tensor, None]:
    """The attention function that transformers calls, for a batch of one stream.

    `PackedModel` stores the windows of the stream in the attributes `window_ends_M`, `window_tiles_3J` and
    `longest_window` of the module.

    Raises:
        CannotPack: The model uses a variant of attention that is not supported, such as a sliding window.
    """
    for name in ("sliding_window", "softcap", "s_aux", "head_mask"):
        if settings.get(name) is not None:
            raise CannotPack(f"its attention uses {name}")
    scale = settings.get("scaling")
    scale = query_1HND.shape[-1] ** -0.5 if scale is None else scale
    here: Any = module
    query, key, value = (t[0].transpose(0, 1).contiguous() for t in (query_1HND, key_1HND, value_1HND))
    if not query.is_cuda:
        return plain_attention(query, key, value, here.window_ends_M, float(scale))[None], None
    tiles_3J = here.window_tiles_3J if query.shape[-1] in WIDTHS else here.window_tiles_3J[:, :0]
    output, _lse = packed_attention(query, key, value, here.window_ends_M, tiles_3J, here.longest_window, float(scale))
    return output[None], None


# ------------------------------------------------------------------------------------------- trained layers


class _Trained(nn.Module):
    """The base class of layers in which each user has separate parameters.

    `PackedModel` sets the parameters as attributes when it replaces a layer. For LoRA it also sets `span_2C`, the
    tokens of each user; in the other layers, the k-th block of the stream belongs to user k."""

    own: dict[str, Tensor]

    def by_user(self, x_1N: Tensor, users: int) -> Tensor:
        """Return a stream [1, N, ...] as [C, N / C, ...], one part per user."""
        return x_1N.reshape(users, -1, *x_1N.shape[2:])


class PackedLora(_Trained):
    """A frozen layer plus the low-rank product of each user (LoRA).

    Args:
        base: The frozen layer, an `nn.Linear` or transformers' `Conv1D`.
        scale: The factor of the low-rank product.
        frozen_a: The matrix A [R, I] of all users if A is not trained; otherwise None.
    """

    span_2C: Tensor

    def __init__(self, base: nn.Module, scale: float, frozen_a: Tensor | None) -> None:
        super().__init__()
        self.base, self.scale, self.frozen_a = base, scale, frozen_a
        self.a_CRI: Tensor
        self.b_COR: Tensor

    def forward(self, x_1NI: Tensor) -> Tensor:
        """Return the output of the frozen layer plus, for each token, the low-rank product of its user."""
        base: Any = self.base
        weight_OI = base.weight if isinstance(base, nn.Linear) else base.weight.t()
        return _with_low_rank(x_1NI, weight_OI, base.bias, [len(weight_OI)], [self], [0])[0]


def _with_low_rank(
    x_1NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, sizes: list[int], layers: list[PackedLora], of: list[int]
) -> list[Tensor]:
    """Return the outputs of frozen layers with the same input, plus the low-rank products of the user of each token.

    Args:
        x_1NI: The input.
        weight_OI: The weights of all layers, concatenated by rows.
        bias_O: The biases of all layers, concatenated, or None.
        sizes: The number of outputs of each layer.
        layers: The layers that have a low-rank product.
        of: For each of `layers`, its index in `sizes`.
    """
    if not layers:
        return list(_LowRank.apply(x_1NI, weight_OI, bias_O, sizes, [], [], None, 0))  # pyright: ignore
    firsts = [sum(sizes[:k]) for k in of]
    a = [layer.a_CRI if layer.frozen_a is None else layer.frozen_a for layer in layers]
    b, scales = [layer.b_COR for layer in layers], [float(layer.scale) for layer in layers]
    span_2C = layers[0].span_2C
    return list(_LowRank.apply(x_1NI, weight_OI, bias_O, sizes, firsts, scales, span_2C, len(a), *a, *b))  # pyright: ignore


class _LowRank(torch.autograd.Function):
    """x W^T + b with frozen W and b, plus the low-rank products of the user of each token.

    The output is split into parts of the given sizes, one for each of the merged layers.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_1NI: Tensor,
        weight_OI: Tensor,
        bias_O: Tensor | None,
        sizes: list[int],
        firsts: list[int],
        scales: list[float],
        span_2C: Tensor | None,
        count: int,
        *matrices: Tensor,
    ) -> Any:
        """Compute one product for all layers, and return its parts.

        Args:
            ctx: The context of autograd.
            x_1NI, weight_OI, bias_O, sizes: As in `_with_low_rank`.
            firsts, scales, span_2C: As in `low_rank_product`.
            count: The number of low-rank products.
            *matrices: The matrices A of all low-rank products, then the matrices B.
        """
        ctx.firsts, ctx.scales, ctx.count = firsts, scales, count
        if not count:
            ctx.save_for_backward(weight_OI)
            return nnf.linear(x_1NI, weight_OI, bias_O).split(sizes, dim=-1)
        a, b = list(matrices[:count]), list(matrices[count:])
        whole_NO, small_NR = low_rank_product(x_1NI[0], weight_OI, bias_O, a, b, firsts, scales, span_2C)
        ctx.save_for_backward(weight_OI, x_1NI, small_NR, span_2C, *matrices)
        return whole_NO[None].split(sizes, dim=-1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        """Return the gradients with respect to the input and the users' matrices; None for all other arguments."""
        weight_OI, *others = ctx.saved_tensors
        grad_1NO = joined(list(gradients))
        nothing = (None,) * 7
        if not ctx.count:
            return grad_1NO @ weight_OI, *nothing
        x_1NI, small_NR, span_2C, *matrices = others
        a, b = matrices[: ctx.count], matrices[ctx.count :]
        by_x_NI, *by_matrices = low_rank_gradients(
            grad_1NO[0], x_1NI[0], small_NR, weight_OI, a, b, ctx.firsts, ctx.scales, span_2C
        )
        trained = [None if len(a_RI.shape) == 2 else by for a_RI, by in zip(a, by_matrices, strict=False)]
        return by_x_NI[None], *nothing, *trained, *by_matrices[ctx.count :]


@torch.library.custom_op("unheard::low_rank_product", mutates_args=())
def low_rank_product(
    x_NI: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor | None,
    a: list[Tensor],
    b: list[Tensor],
    firsts: list[int],
    scales: list[float],
    span_2C: Tensor,
) -> tuple[Tensor, Tensor]:
    """Compute x W^T + b plus the low-rank products scale * x A^T B^T, with the A and B of the user of each token.

    Args:
        x_NI: The input.
        weight_OI: The frozen weights W.
        bias_O: The frozen biases b, or None.
        a: For each low-rank product, the A of each user [C, R, I], or one frozen A [R, I] of all users.
        b: For each low-rank product, the B of each user [C, O, R].
        firsts: For each low-rank product, the index of the first output to which it is added.
        scales: The factor of each low-rank product.
        span_2C: The index of the first token of each user, and the index after the last one; int32. The low-rank
            products of tokens of no user are 0.

    Returns:
        The output [N, O], and the products x A^T of all low-rank products, concatenated by columns.
    """
    whole_NO = nnf.linear(x_NI, weight_OI, bias_O)
    small_NR = x_NI.new_zeros(len(x_NI), sum(b_COR.shape[2] for b_COR in b))
    for a_CRI, b_COR, first, scale, part_NR in zip(a, b, firsts, scales, _ranks(small_NR, b), strict=True):
        if len(a_CRI.shape) == 2:
            part_NR.copy_(nnf.linear(x_NI, a_CRI))
        else:
            user_product(x_NI, a_CRI, span_2C, 1.0, part_NR)
        add_user_product(whole_NO[:, first : first + b_COR.shape[1]], part_NR, b_COR.transpose(1, 2), span_2C, scale)
    return whole_NO, small_NR


@low_rank_product.register_fake
def _(x_NI, weight_OI, bias_O, a, b, firsts, scales, span_2C):
    ranks = sum(b_COR.shape[2] for b_COR in b)
    return x_NI.new_empty(len(x_NI), len(weight_OI)), x_NI.new_empty(len(x_NI), ranks)


@torch.library.custom_op("unheard::low_rank_gradients", mutates_args=())
def low_rank_gradients(
    grad_NO: Tensor,
    x_NI: Tensor,
    small_NR: Tensor,
    weight_OI: Tensor,
    a: list[Tensor],
    b: list[Tensor],
    firsts: list[int],
    scales: list[float],
    span_2C: Tensor,
) -> list[Tensor]:
    """Return the gradients of `low_rank_product` with respect to x, each A and each B.

    The gradient of an A that is not trained is an empty tensor.

    Args:
        grad_NO: The gradient with respect to the output.
        small_NR: The products x A^T, the second result of `low_rank_product`.
        x_NI, weight_OI, a, b, firsts, scales, span_2C: The arguments of `low_rank_product`.
    """
    by_x_NI = grad_NO @ weight_OI
    by_a, by_b = [], []
    for a_CRI, b_COR, first, scale, part_NR in zip(a, b, firsts, scales, _ranks(small_NR, b), strict=True):
        grad_of_NO = grad_NO[:, first : first + b_COR.shape[1]]
        by_small_NR = torch.zeros_like(part_NR, memory_format=torch.contiguous_format)
        user_product(grad_of_NO, b_COR.transpose(1, 2), span_2C, scale, by_small_NR)
        by_b.append(torch.empty_like(b_COR))
        user_gradient(part_NR, grad_of_NO, span_2C, scale, by_b[-1].transpose(1, 2))
        if len(a_CRI.shape) == 2:
            by_x_NI += by_small_NR @ a_CRI
            by_a.append(a_CRI.new_empty(0))
            continue
        add_user_product(by_x_NI, by_small_NR, a_CRI, span_2C, 1.0)
        by_a.append(torch.empty_like(a_CRI))
        user_gradient(by_small_NR, x_NI, span_2C, 1.0, by_a[-1])
    return [by_x_NI, *by_a, *by_b]


@low_rank_gradients.register_fake
def _(grad_NO, x_NI, small_NR, weight_OI, a, b, firsts, scales, span_2C):
    by_a = [m.new_empty(0) if len(m.shape) == 2 else torch.empty_like(m) for m in a]
    return [torch.empty_like(x_NI), *by_a, *(torch.empty_like(m) for m in b)]


def _ranks(small_NR: Tensor, b: list[Tensor]) -> tuple[Tensor, ...]:
    """Split the concatenated products x A^T into those of each low-rank product."""
    return small_NR.split([b_COR.shape[2] for b_COR in b], dim=-1)


def user_product(x_NI: Tensor, weight_CRI: Tensor, span_2C: Tensor, scale: float, out_NR: Tensor) -> None:
    """Write scale * x W^T into `out_NR`, where W is the matrix of the user of each token.

    The arguments are described in packed_kernels.py.
    """
    if x_NI.is_cuda and USES_KERNELS:
        from unheard.models import packed_kernels

        return packed_kernels.user_product(x_NI, weight_CRI, span_2C, scale, out_NR)
    for user, (begin, end) in enumerate(span_2C.T.tolist()):
        out_NR[begin:end] = x_NI[begin:end] @ (weight_CRI[user].T * scale).to(x_NI.dtype)
    return None


def add_user_product(out_NO: Tensor, small_NR: Tensor, weight_CRO: Tensor, span_2C: Tensor, scale: float) -> None:
    """Add scale * small W to `out_NO`, where W is the matrix of the user of each token.

    The arguments are described in packed_kernels.py.
    """
    if out_NO.is_cuda and USES_KERNELS:
        from unheard.models import packed_kernels

        return packed_kernels.add_user_product(out_NO, small_NR, weight_CRO, span_2C, scale)
    for user, (begin, end) in enumerate(span_2C.T.tolist()):
        out_NO[begin:end] += small_NR[begin:end] @ (weight_CRO[user] * scale).to(small_NR.dtype)
    return None


def user_gradient(d_NR: Tensor, x_NI: Tensor, span_2C: Tensor, scale: float, out_CRI: Tensor) -> None:
    """Write scale * d^T x, summed over the tokens of each user, into `out_CRI`.

    The arguments are described in packed_kernels.py.
    """
    if x_NI.is_cuda and USES_KERNELS:
        from unheard.models import packed_kernels

        return packed_kernels.user_gradient(d_NR, x_NI, span_2C, scale, out_CRI)
    for user, (begin, end) in enumerate(span_2C.T.tolist()):
        left_LR, right_LI = (m[begin:end].to(out_CRI.dtype) for m in (d_NR, x_NI))
        out_CRI[user] = scale * (left_LR.T @ right_LI)
    return None


@torch.library.custom_op("unheard::joined", mutates_args=())
def joined(parts: list[Tensor]) -> Tensor:
    """Concatenate tensors along the last dimension, like `torch.cat`.

    It is a custom operation so that torch.compile does not fuse it. For each element of the result, a fused kernel
    would compute the elements of all parts and then select one of them.
    """
    return torch.cat(parts, dim=-1)


@joined.register_fake
def _(parts):
    return torch.cat(parts, dim=-1)


class MergedLinears(nn.Module):
    """Frozen layers with the same input, computed as one product, plus the low-rank products of each user.

    Args:
        layers: The layers: each is an `nn.Linear`, or a `PackedLora` around one.
    """

    def __init__(self, layers: list[Any]) -> None:
        super().__init__()
        frozen: list[Any] = [layer.base if isinstance(layer, PackedLora) else layer for layer in layers]
        self.weight = nn.Parameter(torch.cat([layer.weight.detach() for layer in frozen]), requires_grad=False)
        biases = [layer.bias.detach() for layer in frozen if layer.bias is not None]
        self.bias = nn.Parameter(torch.cat(biases), requires_grad=False) if biases else None
        self.sizes = [len(layer.weight) for layer in frozen]
        self.low_rank = [k for k, layer in enumerate(layers) if isinstance(layer, PackedLora)]
        for k in self.low_rank:
            layers[k].base = nn.Identity()
        self.layers = nn.ModuleList(layers[k] for k in self.low_rank)
        self._input: Tensor | None = None
        self._outputs: list[Tensor] = []
        self._left = 0

    def forward(self, x_1NI: Tensor) -> list[Tensor]:
        """Return the output of each merged layer, including its low-rank product if it has one."""
        layers: Any = list(self.layers)
        return _with_low_rank(x_1NI, self.weight, self.bias, self.sizes, layers, self.low_rank)

    def part(self, number: int, x_1NI: Tensor) -> Tensor:
        """Return the output of one of the merged layers.

        The model calls the layers one after the other. The first call with an input computes the outputs of all layers;
        the last call releases them.

        Args:
            number: The index of the layer.
            x_1NI: The input of all layers.
        """
        if self._input is not x_1NI:
            self._input, self._outputs, self._left = x_1NI, self(x_1NI), len(self.sizes)
        output = self._outputs[number]
        self._left -= 1
        if not self._left:
            self._input, self._outputs = None, []
        return output


@torch.library.custom_op("unheard::gated_product", mutates_args=())
def gated_product(both_1NJ: Tensor) -> Tensor:
    """Return silu(gate) * up, where gate and up are the two halves of the last dimension."""
    if both_1NJ.is_cuda and USES_KERNELS:
        from unheard.models import packed_kernels

        return packed_kernels.gated_product(both_1NJ[0])[None]
    gate_1NI, up_1NI = both_1NJ.chunk(2, dim=-1)
    return nnf.silu(gate_1NI) * up_1NI


@torch.library.custom_op("unheard::gated_gradient", mutates_args=())
def gated_gradient(grad_1NI: Tensor, both_1NJ: Tensor) -> Tensor:
    """Return the gradient of `gated_product` with respect to its input.

    Args:
        grad_1NI: The gradient with respect to the output.
        both_1NJ: The input of `gated_product`.
    """
    if both_1NJ.is_cuda and USES_KERNELS:
        from unheard.models import packed_kernels

        return packed_kernels.gated_gradient(grad_1NI[0].contiguous(), both_1NJ[0])[None]
    gate_1NI, up_1NI = both_1NJ.chunk(2, dim=-1)
    share_1NI = torch.sigmoid(gate_1NI)
    by_gate_1NI = grad_1NI * up_1NI * share_1NI * (1 + gate_1NI * (1 - share_1NI))
    return torch.cat([by_gate_1NI, grad_1NI * gate_1NI * share_1NI], dim=-1)


@gated_product.register_fake
def _(both_1NJ):
    return both_1NJ.new_empty(*both_1NJ.shape[:-1], both_1NJ.shape[-1] // 2)


@gated_gradient.register_fake
def _(grad_1NI, both_1NJ):
    return torch.empty_like(both_1NJ)


gated_product.register_autograd(
    lambda ctx, grad_1NI: gated_gradient(grad_1NI, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


class GatedLayers(nn.Module):
    """The module down(silu(gate(x)) * up(x)), in which one product computes gate and up.

    Args:
        merged: The frozen layers gate and up.
        down: The layer down, which may be trained.
    """

    def __init__(self, merged: MergedLinears, down: nn.Module) -> None:
        super().__init__()
        self.merged, self.down = merged, down

    def forward(self, x_1NI: Tensor) -> Tensor:
        """Return the output of the module."""
        return self.down(gated_product(nnf.linear(x_1NI, self.merged.weight, self.merged.bias)))


class _MergedPart(nn.Module):
    """One of the layers of a `MergedLinears`. It replaces the original layer in the model."""

    def __init__(self, merged: MergedLinears, number: int) -> None:
        super().__init__()
        self.merged, self.number = merged, number

    def forward(self, x_1NI: Tensor) -> Tensor:
        """Return the output of this layer (see `MergedLinears.part`)."""
        return self.merged.part(self.number, x_1NI)


class PackedLinear(_Trained):
    """A linear layer in which each user has a separate weight and bias.

    Args:
        is_transposed: Whether the weight has the shape [I, O], as in transformers' `Conv1D`, instead of [O, I].
    """

    def __init__(self, is_transposed: bool) -> None:
        super().__init__()
        self.is_transposed = is_transposed
        self.weight: Tensor
        self.bias: Tensor | None = None

    def forward(self, x_1NI: Tensor) -> Tensor:
        """Return the output of the layer, with the weight and bias of the user of each block."""
        x_CLI = self.by_user(x_1NI, len(self.weight))
        weight_CIO = self.weight if self.is_transposed else self.weight.transpose(1, 2)
        if self.bias is None:
            y_CLO = torch.bmm(x_CLI, weight_CIO)
        else:
            y_CLO = torch.bmm(x_CLI, weight_CIO) + self.bias[:, None].to(x_1NI.dtype)
        return y_CLO.reshape(*x_1NI.shape[:-1], -1)


class PackedEmbedding(_Trained):
    """An embedding in which each user has a separate table."""

    weight: Tensor

    def forward(self, row_1N: Tensor) -> Tensor:
        """Return the word vectors of the tokens, each from the table of the user of its block."""
        C, V, D = self.weight.shape
        first_C1 = torch.arange(C, device=row_1N.device)[:, None] * V
        rows_CL = row_1N.reshape(C, -1) + first_C1
        return nnf.embedding(rows_CL, self.weight.reshape(C * V, D)).reshape(*row_1N.shape, D)


class PackedNorm(_Trained):
    """LayerNorm or RMSNorm in which each user has a separate weight and bias. It is computed in float32.

    Args:
        width: The number of elements that are normalised together.
        eps: The number that is added to the variance.
        is_centred: Whether the mean is subtracted: True for LayerNorm, False for RMSNorm.
    """

    def __init__(self, width: int, eps: float, is_centred: bool) -> None:
        super().__init__()
        self.width, self.eps, self.is_centred = width, eps, is_centred
        self.weight: Tensor
        self.bias: Tensor | None = None

    def forward(self, x_1ND: Tensor) -> Tensor:
        """Return the normalised input, with the weight and bias of the user of each block."""
        x_CLD = self.by_user(x_1ND, len(self.weight)).float()
        if self.is_centred:
            x_CLD = nnf.layer_norm(x_CLD, (self.width,), eps=self.eps)
        else:
            x_CLD = x_CLD * torch.rsqrt(x_CLD.pow(2).mean(-1, keepdim=True) + self.eps)
        y_CLD = x_CLD * self.weight[:, None]
        if self.bias is not None:
            y_CLD = y_CLD + self.bias[:, None]
        return y_CLD.to(x_1ND.dtype).reshape(x_1ND.shape)


# ------------------------------------------------------------------------------------- which layer replaces which


def rule_for(module: Any) -> _Trained | None:
    """Return a packed layer that can replace a layer of torch or transformers; None if its kind is not supported.

    The caller sets the parameters of the users.
    """
    kind = type(module).__name__
    if isinstance(module, nn.Linear):
        return PackedLinear(is_transposed=False)
    if kind == "Conv1D" and hasattr(module, "nf"):
        return PackedLinear(is_transposed=True)
    if isinstance(module, nn.Embedding) and module.max_norm is None:
        return PackedEmbedding()
    if isinstance(module, nn.LayerNorm) and len(module.normalized_shape) == 1:
        return PackedNorm(module.normalized_shape[0], module.eps, is_centred=True)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if kind.endswith("RMSNorm") and eps is not None and list(module._parameters) == ["weight"]:
        return PackedNorm(module.weight.shape[0], eps, is_centred=False)
    return None


def merge(module: nn.Module, names: tuple[str, ...]) -> None:
    """Replace the named layers of a module by parts of one product. Do nothing if they cannot be merged.

    Args:
        module: The module, which is changed.
        names: The names of layers that have the same input (`SAME_INPUT`).
    """
    layers: list[Any] = [module._modules.get(name) for name in names]
    frozen: list[Any] = [layer.base if isinstance(layer, PackedLora) else layer for layer in layers]
    if not _are_alike(frozen) or len({part.frozen_a is None for part in layers if isinstance(part, PackedLora)}) > 1:
        return
    merged = MergedLinears(layers)
    for number, name in enumerate(names):
        module._modules[name] = _MergedPart(merged, number)


def gated_layers(module: nn.Module) -> GatedLayers | None:
    """Return the replacement of a module that computes down(silu(gate(x)) * up(x)) with frozen gate and up.

    Returns None for all other modules.
    """
    parts: dict[str, Any] = dict(module.named_children())
    if set(parts) != {"gate_proj", "up_proj", "down_proj", "act_fn"} or not type(module).__name__.endswith("MLP"):
        return None
    if type(parts["act_fn"]).__name__ not in ("SiLU", "SiLUActivation"):
        return None
    layers = [parts["gate_proj"], parts["up_proj"]]
    if not _are_alike(layers) or len(layers[0].weight) != len(layers[1].weight):
        return None
    return GatedLayers(MergedLinears(layers), parts["down_proj"])


def _are_alike(layers: list[Any]) -> bool:
    """Whether the weights of layers can be concatenated: linear layers of one input size, all or none with a bias."""
    return all(type(layer) is nn.Linear for layer in layers) and (
        len({(layer.in_features, layer.bias is None) for layer in layers}) == 1
    )


def register_attention() -> None:
    """Register the packed attention with transformers, under the name `ATTENTION`."""
    from transformers import AttentionInterface  # pyright: ignore[reportMissingImports]

    AttentionInterface.register(ATTENTION, _attend)
