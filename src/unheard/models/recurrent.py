"""The paper's language model, with an LSTM or a GRU. Input and output share one embedding.

Word -> embedding (D) -> recurrent state (H) -> projection (D) -> inner product with the embedding of every word (V).
See section 3, "Model structure", and appendix "Experiment details" of the paper. With the paper's sizes the LSTM has
1,346,144 parameters in 11 layers: the embedding, a weight and a bias for each of four gates, and the weight and bias of
the projection.

    >>> model = TiedLSTM(vocabulary_size=10_000)
    >>> model.layout.total, len(model.layout)
    (1346144, 11)
    >>> params = model.layout.split(model.initial(seed=0))
    >>> model.logits(params, torch.tensor([[0, 5, 7]])).shape
    torch.Size([1, 3, 10000])

`vocabulary_size` may be left out; then a run takes it from its store when it begins. In this form of the GRU (Cho et
al. 2014) the reset gate multiplies the product of state and weights, n = tanh(x W + b + r * (h U)). So all gates of a
time step need only one matrix product. Fast implementations use the same form."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor

from unheard.config import require
from unheard.errors import ModelError
from unheard.models.model import BaseModel, check_memory
from unheard.parameters import Layout

SMALLEST_SQUARE = 1e-24
"""A word vector with a smaller squared norm is not scaled to norm 1, to avoid a division by zero."""


@dataclass(frozen=True, kw_only=True)
class TiedModel(BaseModel):
    """The base class of `TiedLSTM` and `TiedGRU`, which add only their gates. `TiedLSTM` describes the arguments."""

    vocabulary_size: int = None  # pyright: ignore[reportAssignmentType]  # `pinned` sets it before the model is used
    embedding_size: int = 96
    hidden_size: int = 256
    tied: bool = True
    unit_norm: bool = True
    keep_norm: bool = False
    user_features: int = 0
    step_norm: bool = False

    def __post_init__(self) -> None:
        require(
            self.vocabulary_size is None or self.vocabulary_size >= 4,
            "vocabulary_size must be at least 4: BOS, EOS, UNK and a word.",
        )
        require(self.embedding_size >= 1, "embedding_size must be at least 1.")
        require(self.hidden_size >= 1, "hidden_size must be at least 1.")
        require(self.user_features >= 0, "user_features must be 0 or more.")

    @property
    def gates(self) -> tuple[str, ...]:
        """The names of the gates, in the order of the layout. Each has a weight [D + F + H, H] and a bias [H]."""
        raise NotImplementedError

    def _unroll(self, gates_BTG: Tensor, from_state_HG: Tensor) -> Tensor:
        """Return the states [B, T, H] after each of T steps, starting from a zero state.

        Args:
            gates_BTG: The part of the gates that comes from the input, [B, T, gates * H].
            from_state_HG: The weights of the gates on the state, concatenated, [H, gates * H].
        """
        raise NotImplementedError

    @property
    def layout(self) -> Layout:
        """The names and shapes of the layers.

        In order: the embedding, the weight and bias of each gate, the weight and bias of the projection, and the output
        embedding if it is not tied. Raises `ModelError` while `vocabulary_size` is not known.
        """
        return self._layout

    @cached_property
    def _layout(self) -> Layout:
        """The cached value of `layout`."""
        V, D, H = self.vocabulary_size, self.embedding_size, self.hidden_size
        if V is None:
            name = type(self).__name__
            raise ModelError(
                f"{name} has no vocabulary_size yet: a run takes it from its store. Outside of a run, set it: "
                f"{name}(vocabulary_size=10_000)."
            )
        shapes: list[tuple[str, tuple[int, ...]]] = [("embedding", (V, D))]
        for gate in self.gates:
            shapes += [(f"{gate}_weight", (D + self.user_features + H, H)), (f"{gate}_bias", (H,))]
        shapes += [("projection_weight", (H, D)), ("projection_bias", (D,))]
        if not self.tied:
            shapes.append(("output_embedding", (V, D)))
        return Layout(tuple(shapes))

    def pinned(self, vocabulary_size: int | None = None) -> Self:
        """Return the model with `vocabulary_size` filled in, if it has none (see `LanguageModel.pinned`)."""
        if self.vocabulary_size is not None or vocabulary_size is None:
            return self
        return replace(self, vocabulary_size=vocabulary_size)

    def initial(self, seed: int) -> Tensor:
        """Return random initial parameters [P] with which every matrix product has a variance of about 1.

        Word vectors have norm 1, so the weights on them are drawn with standard deviation 1. The weights on the H
        numbers of the state are drawn with standard deviation 1/sqrt(H). Biases are 0. After 100 rounds on the blogs
        corpus, the accuracy is 2.6 points higher than with the usual 1/sqrt(fan-in) (docs/log.md, 2026-11-15)."""
        check_memory(self.layout)
        generator = torch.Generator().manual_seed(seed)
        input_size, state_scale = self.embedding_size + self.user_features, self.hidden_size**-0.5
        params: dict[str, Tensor] = {}
        for name, shape in self.layout.shapes:
            if name.endswith("bias"):
                params[name] = torch.zeros(shape)
                continue
            drawn = torch.randn(shape, generator=generator)
            if name.endswith("embedding"):
                drawn /= drawn.norm(dim=-1, keepdim=True)
            elif name == "projection_weight":
                drawn *= state_scale
            else:
                drawn[input_size:] *= state_scale
            params[name] = drawn
        return self.layout.join(params)

    def logits(self, params: Mapping[str, Tensor], tokens_BT: Tensor, features_F: Tensor | None = None) -> Tensor:
        """Return the scores of the next word at every position, [B, T, V] (see `LanguageModel.logits`)."""
        output_BTD, vector_VD = self.factored_logits(params, tokens_BT, features_F)
        return output_BTD @ vector_VD.mT

    def factored_logits(
        self, params: Mapping[str, Tensor], tokens_BT: Tensor, features_F: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the factors of the logits: outputs [B, T, D] and word vectors [V, D]."""
        embedding_VD = self.word_vectors(params["embedding"])
        output_VD = embedding_VD if self.tied else self.word_vectors(params["output_embedding"])
        input_BTX = embedding_VD[tokens_BT]
        if self.user_features:
            assert features_F is not None, "a model with user_features needs each user's features"
            input_BTX = torch.cat([input_BTX, features_F.expand(*tokens_BT.shape, self.user_features)], dim=-1)
        # Cast the weights once; autocast would make a copy for each of the T products.
        dtype = _product_dtype(input_BTX)
        weight_YG = torch.cat([params[f"{gate}_weight"].to(dtype) for gate in self.gates], dim=-1)
        bias_G = torch.cat([params[f"{gate}_bias"] for gate in self.gates], dim=-1)
        from_input, from_state = weight_YG[: input_BTX.shape[-1]], weight_YG[input_BTX.shape[-1] :]
        hidden_BTH = self._unroll(input_BTX @ from_input + bias_G, from_state)
        return hidden_BTH @ params["projection_weight"] + params["projection_bias"], output_VD

    def project(self, params_P: Tensor) -> Tensor:
        """Return the parameters with word vectors of norm 1, if `unit_norm` and `keep_norm` or `step_norm` are set."""
        if not (self.unit_norm and (self.keep_norm or self.step_norm)):
            return params_P
        return self._with_unit_vectors(params_P)

    def project_local(self, params_P: Tensor) -> Tensor:
        """Return the parameters of a user with word vectors of norm 1, if `projects_locally`; otherwise unchanged."""
        return self._with_unit_vectors(params_P) if self.projects_locally else params_P

    @property
    def projects_locally(self) -> bool:
        """Whether users scale word vectors to norm 1 after each local step: if `unit_norm` and `step_norm` are set."""
        return self.unit_norm and self.step_norm

    def _with_unit_vectors(self, params_P: Tensor) -> Tensor:
        """Return a copy of the parameters, [P] or [U, P], in which the word vectors have norm 1."""
        params_P = params_P.clone()
        params = self.layout.split(params_P)
        for name in ("embedding",) if self.tied else ("embedding", "output_embedding"):
            params[name].copy_(on_the_sphere(params[name]))
        return params_P

    def word_vectors(self, rows_VD: Tensor) -> Tensor:
        """Return the word vectors of an embedding table [V, D]: its rows, scaled to norm 1 if `unit_norm` is set."""
        return on_the_sphere(rows_VD) if self.unit_norm else rows_VD


def _product_dtype(like: Tensor) -> torch.dtype:
    """Return the dtype of matrix products: that of autocast if it is enabled, otherwise that of the tensor."""
    kind = like.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else like.dtype


def on_the_sphere(rows_VD: Tensor) -> Tensor:
    """Return the rows scaled to norm 1. `SMALLEST_SQUARE` keeps a row of zeros and its gradient finite."""
    return rows_VD / rows_VD.square().sum(dim=-1, keepdim=True).clamp(min=SMALLEST_SQUARE).sqrt()


@dataclass(frozen=True, kw_only=True)
class TiedLSTM(TiedModel):
    """The paper's model: one LSTM whose input embedding is also its output layer.

    With the gates i, f, g, o, cell c and state h: c_t = sigmoid(f) c_(t-1) + sigmoid(i) tanh(g), h_t = sigmoid(o)
    tanh(c_t).

    Args:
        vocabulary_size: V, the number of words. If it is left out, a run takes it from its store (`pinned`).
        embedding_size: D, the length of a word vector.
        hidden_size: H, the length of the cell's state.
        tied: Whether input and output share one embedding. False gives the output layer a separate embedding: the model
            is 70 % larger and a little more accurate (paper, appendix).
        unit_norm: Whether word vectors are scaled to norm 1.0, with which the paper found faster convergence. They are
            scaled in the forward pass, so the clipped delta of a user needs no projection.
        keep_norm: With `unit_norm`, whether the server also scales the stored word vectors to norm 1 after it has added
            the noise. If not, the stored vectors may become longer. Only their direction matters, and gradients and
            noise turn a longer vector less.
        step_norm: With `unit_norm`, whether a user also scales the word vectors to norm 1 after each local step, before
            the clip, and the server after it has added the noise. The engine `stacked` does not support it.
        user_features: F, the number of features of a user, which are an extra input of the cell with each word (paper,
            appendix on personalization).

    Raises:
        InvalidValue: A size is out of range.
        ModelError: `layout` is used while `vocabulary_size` is not known.

    Example:
        >>> TiedLSTM(vocabulary_size=10_000).layout.names[:3]
        ('embedding', 'input_weight', 'input_bias')
    """

    @property
    def gates(self) -> tuple[str, ...]:
        """The names of the gates of an LSTM cell, in the order of the layout."""
        return ("input", "forget", "cell", "output")

    def _unroll(self, gates_BTG: Tensor, from_state_HG: Tensor) -> Tensor:
        """Return the state after every token, [B, T, H], computed by an LSTM."""
        if gates_BTG.is_cuda and torch.is_grad_enabled():
            return lstm_states(gates_BTG, from_state_HG)
        # One product computes all four gates. The products of the inputs were computed for all T steps at once; those
        # of the states follow step by step.
        state_BH = cell_BH = torch.zeros_like(gates_BTG[:, 0, : from_state_HG.shape[0]])
        states = []
        for t in range(gates_BTG.shape[1]):
            i, f, g, o = (gates_BTG[:, t] + state_BH @ from_state_HG).chunk(4, dim=-1)
            cell_BH = torch.sigmoid(f) * cell_BH + torch.sigmoid(i) * torch.tanh(g)
            state_BH = torch.sigmoid(o) * torch.tanh(cell_BH)
            states.append(state_BH)
        return torch.stack(states, dim=1)


class _LSTMStates(torch.autograd.Function):
    """`TiedLSTM._unroll` with a faster backward pass, in which one product gives the gradient of the weights.

    Autograd would compute T products, one per step, and add them up, with T times the memory traffic. This matters when
    each user has their own weights (`engines/vectorised.py`)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(gates_BTG: Tensor, from_state_HG: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the states, and for the backward pass the cells and the gates after their activation functions.

        The shapes are [B, T, H], [B, T, H] and [B, T, 4 H].
        """
        state_BH = cell_BH = torch.zeros_like(gates_BTG[:, 0, : from_state_HG.shape[0]])
        states, cells, gates = [], [], []
        for t in range(gates_BTG.shape[1]):
            i, f, g, o = (gates_BTG[:, t] + state_BH.to(from_state_HG.dtype) @ from_state_HG).chunk(4, dim=-1)
            i, f, g, o = torch.sigmoid(i), torch.sigmoid(f), torch.tanh(g), torch.sigmoid(o)
            cell_BH = f * cell_BH + i * g
            state_BH = o * torch.tanh(cell_BH)
            states.append(state_BH)
            cells.append(cell_BH)
            gates.append(torch.cat([i, f, g, o], dim=-1))
        return torch.stack(states, dim=1), torch.stack(cells, dim=1), torch.stack(gates, dim=1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor, Tensor]) -> None:
        """Save the weights on the state, the states, the cells and the gates for the backward pass."""
        ctx.save_for_backward(inputs[1], *output)
        ctx.mark_non_differentiable(output[1], output[2])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the gradients with respect to `gates_BTG` and `from_state_HG`."""
        from_state_HG, state_BTH, cell_BTH, gate_BTG = ctx.saved_tensors
        dtype = from_state_HG.dtype
        d_state_BH = d_cell_BH = torch.zeros_like(state_BTH[:, 0])
        before_first_BH = torch.zeros_like(d_cell_BH)
        d_gates: list[Tensor] = []
        for t in reversed(range(state_BTH.shape[1])):
            i, f, g, o = gate_BTG[:, t].chunk(4, dim=-1)
            d_state_BH = d_state_BH + gradients[0][:, t]
            tanh_BH = torch.tanh(cell_BTH[:, t])
            d_cell_BH = d_cell_BH + d_state_BH * o * (1 - tanh_BH * tanh_BH)
            previous_BH = cell_BTH[:, t - 1] if t else before_first_BH
            d_input, d_forget = d_cell_BH * g * i * (1 - i), d_cell_BH * previous_BH * f * (1 - f)
            d_new, d_output = d_cell_BH * i * (1 - g * g), d_state_BH * tanh_BH * o * (1 - o)
            d_gates.insert(0, torch.cat([d_input, d_forget, d_new, d_output], dim=-1))
            d_state_BH = (d_gates[0].to(dtype) @ from_state_HG.mT).to(d_state_BH.dtype)
            d_cell_BH = d_cell_BH * f
        d_gate_BTG = torch.stack(d_gates, dim=1)
        previous_BTH = torch.cat([before_first_BH[:, None], state_BTH[:, :-1]], dim=1)
        d_from_state_HG = previous_BTH.to(dtype).flatten(0, 1).mT @ d_gate_BTG.to(dtype).flatten(0, 1)
        return d_gate_BTG, d_from_state_HG


def lstm_states(gates_BTG: Tensor, from_state_HG: Tensor) -> Tensor:
    """Return the states [B, T, H] of `TiedLSTM._unroll`, with the faster backward pass of `_LSTMStates`.

    torch.compile cannot trace an autograd.Function under vmap, so an engine that compiles must first call
    `torch.compiler.allow_in_graph` with this function. It is not called here because it imports the compiler, which
    takes as long as importing torch.
    """
    return _LSTMStates.apply(gates_BTG, from_state_HG)[0]


@dataclass(frozen=True, kw_only=True)
class TiedGRU(TiedModel):
    """The paper's model with a GRU instead of the LSTM: three gates instead of four, and no cell state.

    With the gates r, z and n: n = tanh(x W + b + r * (h U)), h_t = (1 - z) n + z h_(t-1).

    The arguments are those of `TiedLSTM`, with the same defaults and errors.

    Example:
        >>> TiedGRU(vocabulary_size=10_000).gates
        ('reset', 'update', 'new')
    """

    @property
    def gates(self) -> tuple[str, ...]:
        """The names of the gates of a GRU cell, in the order of the layout."""
        return ("reset", "update", "new")

    def _unroll(self, gates_BTG: Tensor, from_state_HG: Tensor) -> Tensor:
        """Return the state after every token, [B, T, H], computed by a GRU."""
        state_BH = torch.zeros_like(gates_BTG[:, 0, : from_state_HG.shape[0]])
        states = []
        for t in range(gates_BTG.shape[1]):
            input_r, input_z, input_n = gates_BTG[:, t].chunk(3, dim=-1)
            state_r, state_z, state_n = (state_BH @ from_state_HG).chunk(3, dim=-1)
            reset, keep = torch.sigmoid(input_r + state_r), torch.sigmoid(input_z + state_z)
            new = torch.tanh(input_n + reset * state_n)
            state_BH = (1 - keep) * new + keep * state_BH
            states.append(state_BH)
        return torch.stack(states, dim=1)
