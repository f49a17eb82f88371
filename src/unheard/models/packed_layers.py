"""The layers of a Hugging Face model with the windows of many users in one stream.

- `packed_attention`: causal attention within each window, by the kernels of packed_kernels.py or FlashAttention.
- `PackedLora`, `PackedLinear`, `PackedEmbedding`, `PackedNorm`: trained layers, with parameters of each user.
- `MergedLinears`, `GatedLayers`: frozen layers with the same input as one product.

models/packed.py decides which layers are replaced.
"""

import importlib.util
import itertools
from typing import Any

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

ATTENTION = "unheard_packed"
"""The name of the attention in transformers' registry."""
WIDTHS = (16, 32, 64, 128)
"""Widths of heads for which there are kernels of attention; others go through FlashAttention."""
USES_KERNELS = importlib.util.find_spec("triton") is not None
"""Whether the kernels of packed_kernels.py are used on CUDA."""
SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers of one module that have the same input: their frozen weights are multiplied at once."""


class CannotPack(Exception):
    """The model has a part for which packing has no rule; the message names it."""


# ---------------------------------------------------------------------------------------------- attention


@torch.library.custom_op("unheard::packed_attention", mutates_args=())
def packed_attention(
    query_NHD: Tensor, key_NGD: Tensor, value_NGD: Tensor, ends_M: Tensor, tiles_3J: Tensor, longest: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Causal attention within each window of a stream, on CUDA: the output [N, H, D] and the log-sum-exp [H, N].

    By the kernels of packed_kernels.py if there are tiles, else by FlashAttention with variable lengths.
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
    """The gradients of `packed_attention` by query, key and value."""
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
    *tensors, ctx.longest, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)


def _attention_gradients(ctx: Any, grad_NHD: Tensor, _: Any) -> tuple[Any, ...]:
    """Backward pass of the packed attention."""
    query, key, value, ends, tiles, output, lse = ctx.saved_tensors
    gradients = packed_attention_backward(
        grad_NHD.contiguous(), query, key, value, output, lse, ends, tiles, ctx.longest, ctx.scale
    )
    return *gradients, None, None, None, None


packed_attention.register_autograd(_attention_gradients, setup_context=_keep)


def plain_attention(query_NHD: Tensor, key_NHD: Tensor, value_NHD: Tensor, ends_M: Tensor, scale: float) -> Tensor:
    """The readable version of `packed_attention`."""
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
    """The attention function that transformers calls."""
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
    """A layer in which each user has parameters of their own.

    `PackedModel` sets `own` before a forward pass, and `user_K`, the user of each block, where a user can have several
    blocks."""

    own: dict[str, Tensor]
    user_K: Tensor | None = None

    def by_user(self, x_1N: Tensor, users: int) -> Tensor:
        """The stream as [C, n, ...]: each user's part."""
        return x_1N.reshape(users, -1, *x_1N.shape[2:])


class PackedLora(_Trained):
    """A frozen layer plus each user's low-rank product."""

    def __init__(self, base: nn.Module, scale: float, frozen_a: Tensor | None) -> None:
        super().__init__()
        self.base, self.scale, self.frozen_a = base, scale, frozen_a
        self.a_CRI: Tensor
        self.b_COR: Tensor

    def forward(self, x_1NI: Tensor) -> Tensor:
        """The frozen layer plus the low-rank product of the user of each block."""
        return _plus_low_rank([self], [self.base(x_1NI)], x_1NI)[0]


def _plus_low_rank(layers: list[PackedLora], wholes: list[Tensor], x_1NI: Tensor) -> list[Tensor]:
    """The outputs of frozen layers with the same input, plus the low-rank products of each block's user."""
    user_K = layers[0].user_K
    assert user_K is not None
    x_KLI = x_1NI.reshape(len(user_K), -1, x_1NI.shape[-1])
    if all(layer.frozen_a is not None for layer in layers):
        small_KLR = nnf.linear(x_KLI, torch.cat([layer.frozen_a for layer in layers]))  # pyright: ignore
    else:
        # In float32 until after the copy, so that the gradients of a user's blocks are added in float32.
        copies = [layer.a_CRI.index_select(0, user_K).to(x_1NI.dtype) for layer in layers]
        small_KLR = torch.bmm(x_KLI, torch.cat(copies, dim=1).transpose(1, 2))
    ranks = [layer.b_COR.shape[-1] for layer in layers]
    sums = []
    for layer, whole_1NO, part_KLR in zip(layers, wholes, small_KLR.split(ranks, dim=-1), strict=True):
        b_KOR = (layer.b_COR.index_select(0, user_K) * layer.scale).to(x_1NI.dtype)
        sums.append(whole_1NO + torch.bmm(part_KLR, b_KOR.transpose(1, 2)).reshape(whole_1NO.shape))
    return sums


class _MergedProduct(torch.autograd.Function):
    """x W + b with frozen W and b, divided into parts of the given sizes."""

    @staticmethod
    def forward(ctx: Any, x_1NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, sizes: list[int]) -> Any:
        """One product for all merged layers, split into their outputs."""
        ctx.save_for_backward(weight_OI)
        return nnf.linear(x_1NI, weight_OI, bias_O).split(sizes, dim=-1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        """The gradient of the input; the weights are frozen."""
        (weight_OI,) = ctx.saved_tensors
        return joined(list(gradients)) @ weight_OI, None, None, None


@torch.library.custom_op("unheard::joined", mutates_args=())
def joined(parts: list[Tensor]) -> Tensor:
    """Concatenate tensors along the last dimension, as `torch.cat`.

    It is a custom operation so that torch.compile does not fuse it: for each element of the result the fused kernel would
    compute the elements of all parts and then select one.
    """
    return torch.cat(parts, dim=-1)


@joined.register_fake
def _(parts):
    return torch.cat(parts, dim=-1)


class MergedLinears(nn.Module):
    """Frozen layers with the same input as one product, plus each user's low-rank products.

    Args:
        layers: `nn.Linear`, or `PackedLora` around one.
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
        """The outputs of all merged layers, with the low-rank products of those that have one."""
        outputs = list(_MergedProduct.apply(x_1NI, self.weight, self.bias, self.sizes))  # pyright: ignore
        if self.low_rank:
            layers: Any = list(self.layers)
            sums = _plus_low_rank(layers, [outputs[k] for k in self.low_rank], x_1NI)
            for k, whole_1NO in zip(self.low_rank, sums, strict=True):
                outputs[k] = whole_1NO
        return outputs

    def part(self, number: int, x_1NI: Tensor) -> Tensor:
        """The output of one layer. The first call computes all of them, and the last forgets them."""
        if self._input is not x_1NI:
            self._input, self._outputs, self._left = x_1NI, self(x_1NI), len(self.sizes)
        output = self._outputs[number]
        self._left -= 1
        if not self._left:
            self._input, self._outputs = None, []
        return output


@torch.library.custom_op("unheard::gated_product", mutates_args=())
def gated_product(both_1NJ: Tensor) -> Tensor:
    """silu(gate) * up, where gate and up are the halves of the last dimension."""
    if both_1NJ.is_cuda and USES_KERNELS:
        from unheard.models import packed_kernels

        return packed_kernels.gated_product(both_1NJ[0])[None]
    gate_1NI, up_1NI = both_1NJ.chunk(2, dim=-1)
    return nnf.silu(gate_1NI) * up_1NI


@torch.library.custom_op("unheard::gated_gradient", mutates_args=())
def gated_gradient(grad_1NI: Tensor, both_1NJ: Tensor) -> Tensor:
    """The gradient of `gated_product`."""
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
    """down(silu(gate(x)) * up(x)), with gate and up as one product."""

    def __init__(self, merged: MergedLinears, down: nn.Module) -> None:
        super().__init__()
        self.merged, self.down = merged, down

    def forward(self, x_1NI: Tensor) -> Tensor:
        """The output of the gated layers, computed from one merged product."""
        return self.down(gated_product(nnf.linear(x_1NI, self.merged.weight, self.merged.bias)))


class _MergedPart(nn.Module):
    """One layer of `MergedLinears`, where the model calls it."""

    def __init__(self, merged: MergedLinears, number: int) -> None:
        super().__init__()
        self.merged, self.number = merged, number

    def forward(self, x_1NI: Tensor) -> Tensor:
        """The output of this layer; the first one that is called computes all."""
        return self.merged.part(self.number, x_1NI)


class PackedLinear(_Trained):
    """y = x W + b with each user's W and b."""

    def __init__(self, is_transposed: bool) -> None:
        super().__init__()
        self.is_transposed = is_transposed
        self.weight: Tensor
        self.bias: Tensor | None = None

    def forward(self, x_1NI: Tensor) -> Tensor:
        """The product with the weights of the user of each block."""
        x_CLI = self.by_user(x_1NI, len(self.weight))
        weight_CIO = self.weight if self.is_transposed else self.weight.transpose(1, 2)
        if self.bias is None:
            y_CLO = torch.bmm(x_CLI, weight_CIO)
        else:
            y_CLO = torch.bmm(x_CLI, weight_CIO) + self.bias[:, None].to(x_1NI.dtype)
        return y_CLO.reshape(*x_1NI.shape[:-1], -1)


class PackedEmbedding(_Trained):
    """An embedding in which each user has a table of their own."""

    weight: Tensor

    def forward(self, row_1N: Tensor) -> Tensor:
        """Return the word vectors of the tokens, each from the table of its block's user."""
        C, V, D = self.weight.shape
        first_C1 = torch.arange(C, device=row_1N.device)[:, None] * V
        rows_CL = row_1N.reshape(C, -1) + first_C1
        return nnf.embedding(rows_CL, self.weight.reshape(C * V, D)).reshape(*row_1N.shape, D)


class PackedNorm(_Trained):
    """LayerNorm or RMSNorm with each user's factors, computed in float32."""

    def __init__(self, width: int, eps: float, is_centred: bool) -> None:
        super().__init__()
        self.width, self.eps, self.is_centred = width, eps, is_centred
        self.weight: Tensor
        self.bias: Tensor | None = None

    def forward(self, x_1ND: Tensor) -> Tensor:
        """The normalisation with the weights of the user of each block."""
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
    """A packed layer for a layer of torch or transformers; None if there is no rule."""
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
    """Replace the named layers by parts of one product, if the module has them and they are alike."""
    layers: list[Any] = [module._modules.get(name) for name in names]
    frozen: list[Any] = [layer.base if isinstance(layer, PackedLora) else layer for layer in layers]
    if not _are_alike(frozen) or len({part.frozen_a is None for part in layers if isinstance(part, PackedLora)}) > 1:
        return
    merged = MergedLinears(layers)
    for number, name in enumerate(names):
        module._modules[name] = _MergedPart(merged, number)


def gated_layers(module: nn.Module) -> GatedLayers | None:
    """The replacement of a module that is down(silu(gate(x)) * up(x)), where gate and up are frozen; else None."""
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
    """Whether the weights of these layers can lie below one another."""
    return all(type(layer) is nn.Linear for layer in layers) and (
        len({(layer.in_features, layer.bias is None) for layer in layers}) == 1
    )


def register_attention() -> None:
    """Register the packed attention with transformers, under the name `ATTENTION`."""
    from transformers import AttentionInterface  # pyright: ignore[reportMissingImports]

    AttentionInterface.register(ATTENTION, _attend)
