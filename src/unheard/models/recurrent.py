"""The paper's language model, with an LSTM or a GRU, and one table for input and output embeddings.

Word -> embedding (D) -> recurrent state (H) -> projection (D) -> inner product with every word's embedding (V). In the
paper: section 3, "Model structure", and appendix, "Experiment details". With the paper's sizes the LSTM has 1,346,144
parameters in 11 named vectors: the embedding, a weight and a bias for each of four gates, and the weight and bias of
the projection.

    >>> model = TiedLSTM(vocabulary_size=10_000)
    >>> model.layout.total, len(model.layout)
    (1346144, 11)
    >>> params = model.layout.split(model.initial(seed=0))
    >>> model.logits(params, torch.tensor([[0, 5, 7]])).shape
    torch.Size([1, 3, 10000])

`vocabulary_size` may be left out: a run takes it from its store when it begins. The GRU is the form whose reset gate
acts on the product of state and weights, n = tanh(x W + b + r * (h U)), so that all gates of a time step are one
product (Cho et al. 2014, in the form that fast implementations use)."""

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
"""The squared norm of a word vector below which it is no longer scaled up."""


@dataclass(frozen=True, kw_only=True)
class TiedModel(BaseModel):
    """What `TiedLSTM` and `TiedGRU` share: everything but the gates. `TiedLSTM` describes the arguments."""

    vocabulary_size: int = None  # pyright: ignore[reportAssignmentType]  # an int wherever a model is used: see `pinned`
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
        """The states [B, T, H] over T steps from a zero state.

        Args:
            gates_BTG: What the gates get from the input, [B, T, gates * H].
            from_state_HG: The gates' weights on the state, side by side.
        """
        raise NotImplementedError

    @property
    def layout(self) -> Layout:
        """The embedding, weight and bias of each gate, the projection, and the output embedding if it is not tied."""
        return self._layout

    @cached_property
    def _layout(self) -> Layout:
        """Names and shapes of all parameters."""
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
        """The model with the vocabulary size of the store, if it has none of its own."""
        if self.vocabulary_size is not None or vocabulary_size is None:
            return self
        return replace(self, vocabulary_size=vocabulary_size)

    def initial(self, seed: int) -> Tensor:
        """The first parameters, params_P, drawn such that every product begins with a variance of about 1.

        Word vectors have norm 1, so the weights on them are drawn with standard deviation 1, and the weights on the H
        numbers of the state with 1/sqrt(H). Biases are 0. After 100 rounds on the blogs corpus this gives 2.6 points
        more accuracy than the usual 1/sqrt(fan-in) (docs/log.md, 2026-11-15)."""
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
        """The scores of the next word at every position, [B, T, V]."""
        output_BTD, vector_VD = self.factored_logits(params, tokens_BT, features_F)
        return output_BTD @ vector_VD.mT

    def factored_logits(
        self, params: Mapping[str, Tensor], tokens_BT: Tensor, features_F: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The factors of the scores: outputs [B, T, D] and word vectors [V, D]."""
        embedding_VD = self.word_vectors(params["embedding"])
        output_VD = embedding_VD if self.tied else self.word_vectors(params["output_embedding"])
        input_BTX = embedding_VD[tokens_BT]
        if self.user_features:
            assert features_F is not None, "a model with user_features needs each user's features"
            input_BTX = torch.cat([input_BTX, features_F.expand(*tokens_BT.shape, self.user_features)], dim=-1)
        # Cast once, not at each of the T products: autocast would make T copies.
        dtype = _product_dtype(input_BTX)
        weight_YG = torch.cat([params[f"{gate}_weight"].to(dtype) for gate in self.gates], dim=-1)
        bias_G = torch.cat([params[f"{gate}_bias"] for gate in self.gates], dim=-1)
        from_input, from_state = weight_YG[: input_BTX.shape[-1]], weight_YG[input_BTX.shape[-1] :]
        hidden_BTH = self._unroll(input_BTX @ from_input + bias_G, from_state)
        return hidden_BTH @ params["projection_weight"] + params["projection_bias"], output_VD

    def project(self, params_P: Tensor) -> Tensor:
        """The parameters with word vectors of norm 1, if `keep_norm` or `step_norm` asks for it."""
        if not (self.unit_norm and (self.keep_norm or self.step_norm)):
            return params_P
        return self._with_unit_vectors(params_P)

    def project_local(self, params_P: Tensor) -> Tensor:
        """A user's parameters after a local step, with word vectors of norm 1 if `step_norm` asks for it."""
        return self._with_unit_vectors(params_P) if self.projects_locally else params_P

    @property
    def projects_locally(self) -> bool:
        """Whether users project word vectors to norm 1 after each local step."""
        return self.unit_norm and self.step_norm

    def _with_unit_vectors(self, params_P: Tensor) -> Tensor:
        """A copy of the parameters, [P] or one row per user, whose word vectors have norm 1."""
        params_P = params_P.clone()
        params = self.layout.split(params_P)
        for name in ("embedding",) if self.tied else ("embedding", "output_embedding"):
            params[name].copy_(on_the_sphere(params[name]))
        return params_P

    def word_vectors(self, rows_VD: Tensor) -> Tensor:
        """The vectors that a table stands for: its rows, normalised if the model has `unit_norm`."""
        return on_the_sphere(rows_VD) if self.unit_norm else rows_VD


def _product_dtype(like: Tensor) -> torch.dtype:
    """The precision in which matrix products are computed: that of autocast where it is on."""
    kind = like.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else like.dtype


def on_the_sphere(rows_VD: Tensor) -> Tensor:
    """Each row scaled to norm 1. `SMALLEST_SQUARE` keeps a row of zeros, and its gradient, finite."""
    return rows_VD / rows_VD.square().sum(dim=-1, keepdim=True).clamp(min=SMALLEST_SQUARE).sqrt()


@dataclass(frozen=True, kw_only=True)
class TiedLSTM(TiedModel):
    """The paper's model: one LSTM whose input embedding is also its output layer.

    c_t = sigmoid(f) c_(t-1) + sigmoid(i) tanh(g), h_t = sigmoid(o) tanh(c_t).

    Args:
        vocabulary_size: V, the number of words. Left out: that of the store, taken when a run begins (`pinned`).
        embedding_size: D, the length of a word vector.
        hidden_size: H, the length of the cell's state.
        tied: False gives the output layer an embedding of its own: a 70 % larger model for a little accuracy
            (appendix).
        unit_norm: Word vectors of norm 1.0, which the paper found to converge faster. They are normalised in the
            forward pass, so that a user's clipped delta needs no projection.
        keep_norm: With `unit_norm`, the server also projects the stored word vectors to norm 1 after the noise.
            Otherwise their length is whatever training gives, and only their direction counts: the longer a vector, the
            less gradients and noise turn it.
        step_norm: With `unit_norm`, a user also projects the word vectors to norm 1 after each local step, before the
            clip, and the server after the noise. The engine `stacked` does not support it.
        user_features: F, the length of an optional vector about the user that is an input of the cell with each word
            (appendix, personalization).

    Raises:
        InvalidValue: For sizes out of range.
        ModelError: By `layout`, while `vocabulary_size` is not known.

    Example:
        >>> TiedLSTM(vocabulary_size=10_000).layout.names[:3]
        ('embedding', 'input_weight', 'input_bias')
    """

    @property
    def gates(self) -> tuple[str, ...]:
        """The gates of an LSTM cell, in the order of the weight matrices."""
        return ("input", "forget", "cell", "output")

    def _unroll(self, gates_BTG: Tensor, from_state_HG: Tensor) -> Tensor:
        """Compute the state after every token with an LSTM."""
        if gates_BTG.is_cuda and torch.is_grad_enabled():
            return lstm_states(gates_BTG, from_state_HG)
        # All four gates are one product: of the inputs for all T at once, of the states step by step.
        state_BH = cell_BH = torch.zeros_like(gates_BTG[:, 0, : from_state_HG.shape[0]])
        states = []
        for t in range(gates_BTG.shape[1]):
            i, f, g, o = (gates_BTG[:, t] + state_BH @ from_state_HG).chunk(4, dim=-1)
            cell_BH = torch.sigmoid(f) * cell_BH + torch.sigmoid(i) * torch.tanh(g)
            state_BH = torch.sigmoid(o) * torch.tanh(cell_BH)
            states.append(state_BH)
        return torch.stack(states, dim=1)


class _LSTMStates(torch.autograd.Function):
    """`TiedLSTM._unroll` with a backward pass of its own: the gradient of the weights is one product over all T steps.

    Autograd computes T such products and adds them up, which takes T times the memory traffic: it matters where each
    user has weights of their own (`engines/vectorised.py`)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(gates_BTG: Tensor, from_state_HG: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The states, and what the backward pass needs: the cells and the gates after their activations."""
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
        """Keep what the backward pass reads."""
        ctx.save_for_backward(inputs[1], *output)
        ctx.mark_non_differentiable(output[1], output[2])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The gradients by what the gates get from the input, and by the weights on the state."""
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
    """The states [B, T, H] of `TiedLSTM._unroll`.

    torch.compile cannot look into an autograd.Function under vmap: an engine that compiles calls
    `torch.compiler.allow_in_graph` with this function first. Not here: that imports the compiler, which takes as long as
    importing torch.
    """
    return _LSTMStates.apply(gates_BTG, from_state_HG)[0]


@dataclass(frozen=True, kw_only=True)
class TiedGRU(TiedModel):
    """The paper's model with a GRU: three gates instead of four, and no cell state.

    n = tanh(x W + b + r * (h U)), h_t = (1 - z) n + z h_(t-1).

    The arguments are those of `TiedLSTM`, with the same defaults and errors.

    Example:
        >>> TiedGRU(vocabulary_size=10_000).gates
        ('reset', 'update', 'new')
    """

    @property
    def gates(self) -> tuple[str, ...]:
        """The gates of a GRU cell, in the order of the weight matrices."""
        return ("reset", "update", "new")

    def _unroll(self, gates_BTG: Tensor, from_state_HG: Tensor) -> Tensor:
        """Compute the state after every token with a GRU."""
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
