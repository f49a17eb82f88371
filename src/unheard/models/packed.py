"""Computes the gradients of many users of a Hugging Face model at once, with the tokens of all users in one stream.

In one step, the windows of all users are concatenated to a stream of N tokens. N does not change during a run, so the
computation is compiled only once. Frozen layers multiply the whole stream by their weights. Trained layers have
separate parameters for each user:

- LoRA: the tokens of a user are adjacent in the stream, and are multiplied by the low-rank matrices of this user
  (`low_rank_product`). Frozen layers with the same input (query, key and value) are computed as one product.
- All parameters: each user has a part of the stream of fixed length, and the products are batched over users.

Attention is limited to the tokens of the same window (kernels of packed_kernels.py, or FlashAttention with variable
lengths). The gradient of the loss with respect to the last hidden state is computed for a few thousand tokens at a
time, so that the logits of the whole stream are never in memory.

    packed = PackedModel(module, layout, size, device, torch.bfloat16)
    packed.load(theta_CP)                       # the parameters of each of C users
    gradients = packed.gradients(stream)        # one tensor [C, ...] for each layer

`PackedModel` raises `CannotPack`, with the reason, for a model that it does not support. The tests in
tests/models/hugging_face compare its results, such as `packed_logits`, with those of the model itself.
"""

import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from unheard.models.module import shell_of
from unheard.models.packed_layers import (
    ATTENTION,
    SAME_INPUT,
    USES_KERNELS,
    CannotPack,
    PackedLinear,
    PackedLora,
    gated_layers,
    merge,
    register_attention,
    rule_for,
)
from unheard.parameters import Layout

LOGITS_AT_ONCE = 2**28
"""The largest number of logits that are in memory at the same time."""


@dataclass(frozen=True, kw_only=True)
class StreamSize:
    """The sizes of a stream. They do not change during a run.

    Args:
        tokens: N, the number of tokens of a stream.
        block: Each user's part of a stream begins at a multiple of this number of tokens: 1 if users share a stream.
        users: C, the number of users whose parameters are in memory at the same time.
        windows: The largest number of windows of a stream, including windows of padding.
        longest: The largest number of tokens of a window.
        is_shared: Whether users share a stream (LoRA). If False, the k-th block of the stream belongs to user k.
    """

    tokens: int
    block: int
    users: int
    windows: int
    longest: int
    is_shared: bool


@dataclass(frozen=True, repr=False)
class Stream:
    """The tokens of one local step of many users.

    Args:
        row_N: The row number of each token in the model.
        position_N: The position of each token in its window.
        target_N: The row number of the next token.
        weight_N: The weight of each target in the mean loss of its user; 0 for padding.
        ends_M: The cumulative lengths of the windows, beginning with 0; int32.
        span_2C: With LoRA, the index of the first token of each user, and the index after the last one; int32.
    """

    row_N: Tensor
    position_N: Tensor
    target_N: Tensor
    weight_N: Tensor
    ends_M: Tensor
    span_2C: Tensor


# -------------------------------------------------------------------------------------------------- the model


class PackedModel:
    """Computes the gradient of each user's mean loss with respect to this user's parameters, for C users at once.

    Args:
        module: A `StoreVocabularyModel`. Its tensors are not changed.
        layout: The trained parameters, by their names in `module.base`.
        size: The sizes of the streams.
        device: The device of the computation.
        dtype: The dtype of frozen weights and activations and, unless LoRA is used, of trained matrices. Other trained
            parameters are float32 (float64 if `dtype` is float64).

    Raises:
        CannotPack: A layer of the model is not supported. The message gives the reason.
    """

    def __init__(self, module: Any, layout: Layout, size: StreamSize, device: torch.device, dtype: torch.dtype) -> None:
        self.layout, self.size, self.device, self.dtype = layout, size, device, dtype
        self.leaves: dict[str, Tensor] = {}
        for name, shape in layout.shapes:
            kind = dtype if len(shape) > 1 and not size.is_shared else torch.float32
            kind = torch.float64 if dtype == torch.float64 else kind
            self.leaves[name] = torch.zeros(size.users, *shape, dtype=kind, device=device).requires_grad_()
        self.span_2C = torch.zeros(2, size.users, dtype=torch.int32, device=device)
        self.ends_M = torch.zeros(size.windows + 1, dtype=torch.int32, device=device)
        self.tiles_3J = self._tiles(self.ends_M)
        register_attention()
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
        """Set the trained parameters of all users.

        Args:
            theta_CP: One flat vector of parameters per user.
        """
        with torch.no_grad():
            for name, layer in self.layout.split(theta_CP).items():
                self.leaves[name].copy_(layer)

    def hidden(self, stream: Stream) -> Tensor:
        """Return the last hidden state of each token, [N, D]."""
        self.span_2C.copy_(stream.span_2C)
        self.ends_M.copy_(stream.ends_M)
        self.tiles_3J.copy_(self._tiles(stream.ends_M))
        inputs = {"input_ids": stream.row_N[None], "position_ids": stream.position_N[None], "use_cache": False}
        return self.body(**inputs).last_hidden_state[0]

    def gradients(self, stream: Stream) -> dict[str, Tensor]:
        """Return the gradient of each user's mean loss with respect to that user's parameters, [C, ...] by layer."""
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
        """Return the scores of all rows of the model, [N, R]. Use it in tests and to check a new model.

        All logits of the stream are in memory at the same time.
        """
        hidden_ND, head = self.hidden(stream), self.head
        return head(hidden_ND[None])[0] if isinstance(head, PackedLinear) else head(hidden_ND)

    @torch.no_grad()
    def _loss_gradient(self, hidden_ND: Tensor, stream: Stream) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the gradients of the sum of the users' losses with respect to the hidden state and the head.

        The second value is a dictionary from layer names to gradients [C, ...]. It is empty if the head, the layer that
        scores hidden states, is frozen.
        """
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
        """Return the tiles of the windows for the attention kernels (`attention_tiles`), or [3, 0] without kernels."""
        if self.device.type != "cuda" or not USES_KERNELS:
            return torch.zeros(3, 0, dtype=torch.int32, device=self.device)
        from unheard.models.packed_kernels import attention_tiles

        return attention_tiles(ends_M, self.size.tokens)

    def _num_rows(self) -> int:
        """Return R, the number of rows of the model that the head scores."""
        head: Any = self.head
        return head.weight.shape[-2] if isinstance(head, PackedLinear) else head.weight.shape[0]

    def _replaced(self, module: nn.Module) -> nn.Module:
        """Return the module with its trained layers replaced by layers of packed_layers.py, recursively.

        With LoRA, frozen layers with the same input are also merged.
        """
        if (packed := self._packed(module)) is not None:
            return packed
        for name, child in list(module.named_children()):
            if (new := self._replaced(child)) is not child:
                module._modules[name] = new
        if not self.size.is_shared:
            return module
        if (gated := gated_layers(module)) is not None:
            return gated
        for names in SAME_INPUT:
            merge(module, names)
        return module

    def _packed(self, module: nn.Module) -> nn.Module | None:
        """Return the packed replacement of a layer; None if the layer itself has no trained parameters.

        Raises:
            CannotPack: The layer is trained but not supported, or only some of its parameters are trained.
        """
        if hasattr(module, "lora_A") and hasattr(module, "base_layer"):
            return self._lora(module)
        own = {key: self.names[id(p)] for key, p in module._parameters.items() if p is not None and id(p) in self.names}
        if not own:
            return None
        packed = rule_for(module)
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
        """Return the packed replacement of a LoRA layer of peft, in which each user has separate matrices.

        Raises:
            CannotPack: The LoRA layer is of a kind that is not supported.
        """
        if not self.size.is_shared or type(module).__name__ != "Linear" or getattr(module, "lora_variant", None):
            raise CannotPack(f"it has no rule for the LoRA layer {type(module).__name__}")
        (adapter,) = module.lora_A.keys()
        a, b = module.lora_A[adapter].weight, module.lora_B[adapter].weight
        is_frozen = id(a) not in self.names
        packed = PackedLora(
            module.base_layer, module.scaling[adapter], a.detach().to(self.device, self.dtype) if is_frozen else None
        )
        vars(packed)["span_2C"] = self.span_2C
        for key, parameter in (("b_COR", b),) if is_frozen else (("a_CRI", a), ("b_COR", b)):
            name = self.names[id(parameter)]
            self._used.add(name)
            vars(packed)[key] = self.leaves[name]
        return packed

    def _freeze(self, base: nn.Module) -> None:
        """Replace frozen weights by copies on the device, in `dtype`. A tensor that layers share is copied once."""
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
    """Return the gradient of the weighted cross-entropies with respect to the logits, in the dtype of the logits.

    Args:
        logits_LR: The scores of all rows of the model for each token.
        target_L: The row of the next token.
        weight_L: The weight of each target.
        silent_R: A mask of the rows that are not a word of the store. They are left out of the softmax.
    """
    scores_LR = logits_LR.float().masked_fill(silent_R, -math.inf)
    share_LR = torch.softmax(scores_LR, dim=-1)
    hit_LR = torch.arange(logits_LR.shape[-1], device=logits_LR.device) == target_L[:, None]
    gradient_LR = (share_LR - hit_LR.float()) * weight_L[:, None]
    # Set the gradient of padding to zero. A product with weight 0 would not be zero if the hidden state is not finite.
    return torch.where(weight_L[:, None] == 0, 0.0, gradient_LR).to(logits_LR.dtype)


def fast_score_gradient() -> Callable[..., Tensor]:
    """Return a fast version of `score_gradient` for CUDA.

    It is a Triton kernel, which overwrites the logits, or the compiled function if Triton is not installed.
    """
    if importlib.util.find_spec("triton") is None:
        return torch.compile(score_gradient, dynamic=False)
    from unheard.models.packed_kernels import score_gradient_

    return score_gradient_


def _body_and_head(inner: Any) -> tuple[nn.Module, nn.Module]:
    """Return the part of a model that computes hidden states, and the linear layer that scores them.

    Raises:
        CannotPack: The scores are not a linear function of the hidden states.
    """
    head, body = inner.get_output_embeddings(), getattr(inner, inner.base_model_prefix, None)
    if not isinstance(head, nn.Linear | PackedLinear) or body is None:
        raise CannotPack("its scores are not a linear function of its hidden states")
    return body, head


def _silent_rows(module: Any, num_rows: int) -> Tensor:
    """Return a mask [R] of the rows of the model that no word of the store owns.

    Args:
        module: The `StoreVocabularyModel`.
        num_rows: R, the number of rows of the model.
    """
    silent_R = torch.ones(num_rows, dtype=torch.bool)
    silent_R[module.get_buffer("row_V")[module.get_buffer("is_said_V")]] = False
    return silent_R


def _decoder_layers(body: nn.Module, config: Any) -> nn.ModuleList:
    """Return the list of the decoder layers of a model. Raise `CannotPack` if there is no such list."""
    for part in body.modules():
        if isinstance(part, nn.ModuleList) and len(part) == config.num_hidden_layers:
            return part
    raise CannotPack("its layers are not in one list")


def _divisor_below(number: int, limit: int) -> int:
    """Return the largest divisor of a number that is at most `limit`."""
    return next(d for d in range(min(limit, number), 0, -1) if number % d == 0)
