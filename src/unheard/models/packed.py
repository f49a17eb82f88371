"""A Hugging Face model that computes the gradients of many users at once, with their tokens in one stream.

The windows of all users of a step lie one after the other in a stream of N tokens. N does not change during a run, so
the computation is compiled once. Frozen layers multiply the whole stream by their weights; only layers that are trained
have parameters of each user:

- LoRA: the stream is divided into blocks, and each block belongs to one user. The small matrices are copied for each
  block, and the gradients of a user's blocks are added. Frozen layers with the same input (query, key and value) are
  one product.
- All parameters: each user has a part of the stream of fixed length, and the products are batched over users.

Attention looks at the tokens of its own window only (FlashAttention with variable lengths). The gradient of the loss
by the last hidden state is computed for some thousand tokens at a time, so that the logits of a whole stream never
exist.

    packed = PackedModel(module, layout, size, device, torch.bfloat16)
    packed.load(theta_CP)                       # the parameters of each of C users
    gradients = packed.gradients(stream)        # one tensor [C, ...] for each layer

`PackedModel` raises `CannotPack` with the reason for a model that it has no rule for. `packed_logits` and
tests/hugging_face compare the result with the model itself.
"""

import importlib.util
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from unheard.models.module import shell_of
from unheard.parameters import Layout

ATTENTION = "unheard_packed"
"""The name of the attention in transformers' registry."""
LOGITS_AT_ONCE = 2**28
"""Logits that exist at the same time."""
WIDTHS = (16, 32, 64, 128)
"""Widths of heads for which there are kernels of attention; others go through FlashAttention."""
USES_KERNELS = False
"""Whether attention is computed by the kernels of packed_kernels.py."""
SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers of one module that have the same input: their frozen weights are multiplied at once."""


class CannotPack(Exception):
    """The model has a part for which packing has no rule; the message names it."""


@dataclass(frozen=True, kw_only=True)
class StreamSize:
    """The shapes of a stream; all of them are fixed during a run.

    Args:
        tokens: N.
        block: tokens of a block. Each block belongs to one user.
        users: C, users whose parameters exist at the same time.
        windows: the largest number of windows, those of padding included.
        longest: the largest number of tokens of a window, with the padding up to the end of its block.
        is_shared: whether blocks take the parameters of any user (LoRA); else block k belongs to user k.
    """

    tokens: int
    block: int
    users: int
    windows: int
    longest: int
    is_shared: bool

    @property
    def blocks(self) -> int:
        return self.tokens // self.block


@dataclass(frozen=True)
class Stream:
    """The tensors of one step.

    Args:
        row_N: the model's row number of each token.
        position_N: the position of each token in its window.
        target_N: the row number of the next token.
        weight_N: what each target counts in its user's mean loss; 0 for padding.
        user_K: the user of each block.
        ends_M: the cumulative lengths of windows, beginning with 0; int32.
    """

    row_N: Tensor
    position_N: Tensor
    target_N: Tensor
    weight_N: Tensor
    user_K: Tensor
    ends_M: Tensor


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
    """A layer with parameters of each user. `Packed` sets the tensors; `user_K` is set for blocks that share users."""

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
        outputs = list(nnf.linear(x_1NI, self.weight, self.bias).split(self.sizes, dim=-1))
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


class _MergedPart(nn.Module):
    """One layer of `MergedLinears`, where the model calls it."""

    def __init__(self, merged: MergedLinears, number: int) -> None:
        super().__init__()
        self.merged, self.number = merged, number

    def forward(self, x_1NI: Tensor) -> Tensor:
        return self.merged.part(self.number, x_1NI)


class PackedLinear(_Trained):
    """y = x W + b with each user's W and b."""

    def __init__(self, is_transposed: bool) -> None:
        super().__init__()
        self.is_transposed = is_transposed
        self.weight: Tensor
        self.bias: Tensor | None = None

    def forward(self, x_1NI: Tensor) -> Tensor:
        x_CLI = self.by_user(x_1NI, len(self.weight))
        weight_CIO = self.weight if self.is_transposed else self.weight.transpose(1, 2)
        if self.bias is None:
            y_CLO = torch.bmm(x_CLI, weight_CIO)
        else:
            y_CLO = torch.bmm(x_CLI, weight_CIO) + self.bias[:, None].to(x_1NI.dtype)
        return y_CLO.reshape(*x_1NI.shape[:-1], -1)


class PackedEmbedding(_Trained):
    """Rows of each user's table."""

    weight: Tensor

    def forward(self, row_1N: Tensor) -> Tensor:
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
        x_CLD = self.by_user(x_1ND, len(self.weight)).float()
        if self.is_centred:
            x_CLD = nnf.layer_norm(x_CLD, (self.width,), eps=self.eps)
        else:
            x_CLD = x_CLD * torch.rsqrt(x_CLD.pow(2).mean(-1, keepdim=True) + self.eps)
        y_CLD = x_CLD * self.weight[:, None]
        if self.bias is not None:
            y_CLD = y_CLD + self.bias[:, None]
        return y_CLD.to(x_1ND.dtype).reshape(x_1ND.shape)


# -------------------------------------------------------------------------------------------------- the model


class PackedModel:
    """The gradients of C users' mean losses by their own parameters.

    Args:
        module: a `StoreVocabularyModel`; its tensors are not changed.
        layout: the trained parameters, by their names in `module.base`.
        size: of the streams.
        device: where to compute.
        dtype: of frozen weights, trained matrices and activations.

    Raises:
        CannotPack: for a model without a rule, with the reason.
    """

    def __init__(self, module: Any, layout: Layout, size: StreamSize, device: torch.device, dtype: torch.dtype) -> None:
        self.layout, self.size, self.device, self.dtype = layout, size, device, dtype
        self.leaves: dict[str, Tensor] = {}
        for name, shape in layout.shapes:
            kind = dtype if len(shape) > 1 and not size.is_shared else torch.float32
            kind = torch.float64 if dtype == torch.float64 else kind
            self.leaves[name] = torch.zeros(size.users, *shape, dtype=kind, device=device).requires_grad_()
        self.user_K = torch.zeros(size.blocks, dtype=torch.int64, device=device)
        self.ends_M = torch.zeros(size.windows + 1, dtype=torch.int32, device=device)
        self.tiles_3J = self._tiles(self.ends_M)
        _register_attention()
        base = shell_of(module.base)
        self.names = {id(p): name for name, p in base.named_parameters() if name in layout.slices}
        self._used: set[str] = set()
        base = self._replaced(base)
        if unused := set(layout.names) - self._used:
            raise CannotPack(f"it has no rule for the layer of {min(unused)!r}")
        self._freeze(base)
        whole: Any = base
        inner: Any = whole.get_base_model() if hasattr(whole, "get_base_model") else whole
        inner.config._attn_implementation = ATTENTION
        self.inner = inner.eval()
        for part in base.modules():
            vars(part)["window_ends_M"], vars(part)["longest_window"] = self.ends_M, size.longest
            vars(part)["window_tiles_3J"] = self.tiles_3J
        self.body, self.head = _body_and_head(inner)
        self.silent_R = _silent_rows(module, self._num_rows()).to(device)
        self.layers = _decoder_layers(self.body, inner.config)
        self.last_norms = [part for part in self.body.children() if type(part).__name__.endswith("Norm")]
        self.score_gradient: Callable[..., Tensor] = score_gradient

    def load(self, theta_CP: Tensor) -> None:
        """Sets the users' parameters."""
        with torch.no_grad():
            for name, layer in self.layout.split(theta_CP).items():
                self.leaves[name].copy_(layer)

    def hidden(self, stream: Stream) -> Tensor:
        """The last hidden state of each token, [N, D]."""
        self.user_K.copy_(stream.user_K)
        self.ends_M.copy_(stream.ends_M)
        self.tiles_3J.copy_(self._tiles(stream.ends_M))
        inputs = {"input_ids": stream.row_N[None], "position_ids": stream.position_N[None], "use_cache": False}
        return self.body(**inputs).last_hidden_state[0]

    def gradients(self, stream: Stream) -> dict[str, Tensor]:
        """The gradient of each user's mean loss by that user's parameters, [C, ...] for each layer."""
        with torch.enable_grad():
            hidden_ND = self.hidden(stream)
        grad_ND, head_gradient = self._loss_gradient(hidden_ND.detach(), stream)
        leaves = list(self.leaves.values())
        gradients = torch.autograd.grad(hidden_ND, leaves, grad_ND, allow_unused=True)
        named = {
            name: torch.zeros_like(leaf) if gradient is None else gradient
            for (name, leaf), gradient in zip(self.leaves.items(), gradients, strict=True)
        }
        for name, gradient in head_gradient.items():
            named[name] = named[name] + gradient
        return named

    @torch.no_grad()
    def packed_logits(self, stream: Stream) -> Tensor:
        """The scores of all rows of the model, [N, R]; for tests and for the check of a new model."""
        hidden_ND, head = self.hidden(stream), self.head
        return head(hidden_ND[None])[0] if isinstance(head, PackedLinear) else head(hidden_ND)

    @torch.no_grad()
    def _loss_gradient(self, hidden_ND: Tensor, stream: Stream) -> tuple[Tensor, dict[str, Tensor]]:
        """The gradient of the sum of users' losses by the hidden state, and by the head where it is trained."""
        head: Any = self.head
        grad_ND = torch.empty_like(hidden_ND)
        if not isinstance(head, PackedLinear):
            at_once = _divisor_below(self.size.tokens, max(1, LOGITS_AT_ONCE // self._num_rows()))
            for start in range(0, self.size.tokens, at_once):
                part = slice(start, start + at_once)
                logits_LR = nnf.linear(hidden_ND[part], head.weight, head.bias)
                grad_LR = self.score_gradient(logits_LR, stream.target_N[part], stream.weight_N[part], self.silent_R)
                grad_ND[part] = grad_LR @ head.weight
            return grad_ND, {}
        C, n = self.size.users, self.size.block
        weight_CRD = head.weight
        hidden_CLD, grad_CLD = hidden_ND.view(C, n, -1), grad_ND.view(C, n, -1)
        grad_CRD = torch.empty_like(weight_CRD)
        bias_gradient = None if head.bias is None else torch.empty_like(head.bias)
        at_once = _divisor_below(C, max(1, LOGITS_AT_ONCE // (n * self._num_rows())))
        for start in range(0, C, at_once):
            part, tokens = slice(start, start + at_once), slice(start * n, (start + at_once) * n)
            logits_CLR = torch.bmm(hidden_CLD[part], weight_CRD[part].transpose(1, 2))
            if head.bias is not None:
                logits_CLR = logits_CLR + head.bias[part, None].to(logits_CLR.dtype)
            flat_LR = logits_CLR.view(at_once * n, -1)
            grad_LR = self.score_gradient(flat_LR, stream.target_N[tokens], stream.weight_N[tokens], self.silent_R)
            grad_CLR = grad_LR.view(logits_CLR.shape)
            torch.bmm(grad_CLR, weight_CRD[part], out=grad_CLD[part])
            torch.bmm(grad_CLR.transpose(1, 2), hidden_CLD[part], out=grad_CRD[part])
            if bias_gradient is not None:
                bias_gradient[part] = grad_CLR.float().sum(dim=1).to(bias_gradient.dtype)
        names: Any = head
        trained: dict[str, Tensor] = {names.weight_name: grad_CRD}
        return grad_ND, trained if bias_gradient is None else {**trained, names.bias_name: bias_gradient}

    def _tiles(self, ends_M: Tensor) -> Tensor:
        """What the kernels of attention take; without a column where they are not used."""
        if self.device.type != "cuda" or not USES_KERNELS:
            return torch.zeros(3, 0, dtype=torch.int32, device=self.device)
        from unheard.models.packed_kernels import attention_tiles

        return attention_tiles(ends_M, self.size.tokens)

    def _num_rows(self) -> int:
        head: Any = self.head
        return head.weight.shape[-2] if isinstance(head, PackedLinear) else head.weight.shape[0]

    def _replaced(self, module: nn.Module) -> nn.Module:
        """The module, with its trained layers replaced by those of this file."""
        if (packed := self._packed(module)) is not None:
            return packed
        for name, child in list(module.named_children()):
            if (new := self._replaced(child)) is not child:
                module._modules[name] = new
        for names in SAME_INPUT if self.size.is_shared else ():
            _merge(module, names)
        return module

    def _packed(self, module: nn.Module) -> nn.Module | None:
        """The replacement of a layer that is trained; None for one that is not, or that only contains such layers."""
        if hasattr(module, "lora_A") and hasattr(module, "base_layer"):
            return self._lora(module)
        own = {key: self.names[id(p)] for key, p in module._parameters.items() if p is not None and id(p) in self.names}
        if not own:
            return None
        packed = _rule_for(module)
        if packed is None or self.size.is_shared:
            raise CannotPack(f"it has no rule for the trained layer {type(module).__name__}")
        if lacking := [key for key, p in module._parameters.items() if p is not None and key not in own]:
            raise CannotPack(f"a part of {type(module).__name__} is frozen: {lacking[0]}")
        for key, name in own.items():
            self._used.add(name)
            vars(packed)[key] = self.leaves[name]
            vars(packed)[f"{key}_name"] = name
        return packed

    def _lora(self, module: Any) -> PackedLora:
        if not self.size.is_shared or type(module).__name__ != "Linear" or getattr(module, "lora_variant", None):
            raise CannotPack(f"it has no rule for the LoRA layer {type(module).__name__}")
        (adapter,) = module.lora_A.keys()
        a, b = module.lora_A[adapter].weight, module.lora_B[adapter].weight
        is_frozen = id(a) not in self.names
        packed = PackedLora(
            module.base_layer, module.scaling[adapter], a.detach().to(self.device, self.dtype) if is_frozen else None
        )
        vars(packed)["user_K"] = self.user_K
        for key, parameter in (("b_COR", b),) if is_frozen else (("a_CRI", a), ("b_COR", b)):
            name = self.names[id(parameter)]
            self._used.add(name)
            vars(packed)[key] = self.leaves[name]
        return packed

    def _freeze(self, base: nn.Module) -> None:
        """Moves the weights that are not trained to the device, once, in the precision of products."""
        copies: dict[int, nn.Parameter] = {}
        for part in base.modules():
            for key, p in part._parameters.items():
                if p is not None:
                    if id(p) not in copies:
                        copies[id(p)] = nn.Parameter(p.detach().to(self.device, self.dtype), requires_grad=False)
                    part._parameters[key] = copies[id(p)]
            for key, buffer in part._buffers.items():
                if buffer is not None:
                    part._buffers[key] = buffer.to(self.device)


def score_gradient(logits_LR: Tensor, target_L: Tensor, weight_L: Tensor, silent_R: Tensor) -> Tensor:
    """The gradient of weighted cross-entropies by the logits, in the type of the logits.

    Args:
        logits_LR: scores of all rows of the model.
        target_L: the row of the next token.
        weight_L: the weight of each target.
        silent_R: rows that stand for no word of the store; they are left out of the softmax.
    """
    scores_LR = logits_LR.float().masked_fill(silent_R, -math.inf)
    share_LR = torch.softmax(scores_LR, dim=-1)
    hit_LR = torch.arange(logits_LR.shape[-1], device=logits_LR.device) == target_L[:, None]
    gradient_LR = (share_LR - hit_LR.float()) * weight_L[:, None]
    # Assigned, not multiplied: padding stays exactly zero if the hidden state is not finite.
    return torch.where(weight_L[:, None] == 0, 0.0, gradient_LR).to(logits_LR.dtype)


def fast_score_gradient() -> Callable[..., Tensor]:
    """`score_gradient` for CUDA: a Triton kernel, or the compiled function where Triton is not installed."""
    if importlib.util.find_spec("triton") is None:
        return torch.compile(score_gradient, dynamic=False)
    from unheard.models.packed_kernels import score_gradient_

    return score_gradient_


def _merge(module: nn.Module, names: tuple[str, ...]) -> None:
    """Replaces the named layers by parts of one product, if the module has them and they are alike."""
    layers: list[Any] = [module._modules.get(name) for name in names]
    frozen: list[Any] = [layer.base if isinstance(layer, PackedLora) else layer for layer in layers]
    if not all(type(layer) is nn.Linear for layer in frozen):
        return
    if len({(layer.in_features, layer.bias is None) for layer in frozen}) > 1:
        return
    if len({layer.frozen_a is None for layer in layers if isinstance(layer, PackedLora)}) > 1:
        return
    merged = MergedLinears(layers)
    for number, name in enumerate(names):
        module._modules[name] = _MergedPart(merged, number)


def _register_attention() -> None:
    from transformers import AttentionInterface  # pyright: ignore[reportMissingImports]

    AttentionInterface.register(ATTENTION, _attend)


def _rule_for(module: Any) -> _Trained | None:
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


def _body_and_head(inner: Any) -> tuple[nn.Module, nn.Module]:
    """The part that returns hidden states, and the layer that scores them."""
    head, body = inner.get_output_embeddings(), getattr(inner, inner.base_model_prefix, None)
    if not isinstance(head, nn.Linear | PackedLinear) or body is None:
        raise CannotPack("its scores are not a linear function of its hidden states")
    return body, head


def _silent_rows(module: Any, num_rows: int) -> Tensor:
    """Rows of the model that stand for no word of the store."""
    silent_R = torch.ones(num_rows, dtype=torch.bool)
    silent_R[module.get_buffer("row_V")[module.get_buffer("is_said_V")]] = False
    return silent_R


def _decoder_layers(body: nn.Module, config: Any) -> nn.ModuleList:
    for part in body.modules():
        if isinstance(part, nn.ModuleList) and len(part) == config.num_hidden_layers:
            return part
    raise CannotPack("its layers are not in one list")


def _divisor_below(number: int, limit: int) -> int:
    """The largest divisor of a number that is at most `limit`."""
    return next(d for d in range(min(limit, number), 0, -1) if number % d == 0)


def inputs_of(module: Any) -> tuple[Mapping[str, Any], Any]:
    """For the packing of words on the host: the row of each word, and which words are targets that can be learned."""
    row_V, is_said_V = module.get_buffer("row_V").cpu().numpy(), module.get_buffer("is_said_V").cpu().numpy()
    return row_V, is_said_V
