"""The paper's model with a GRU for its cell: three gates instead of four, and no cell state.

The GRU is the one whose reset gate acts on the state's product with its weights, n = tanh(x W + b + r * (h U)), so that all
gates of a step are one product (Cho et al. 2014 in the form that fast implementations use).
What the paper's models share: word vectors on the sphere, one table for input and output, a cell between them.

Where in the paper: section 3 "Model structure" and appendix "Experiment details". A cell is a list of gates, each with a weight
[input + state, H] and a bias [H]; models/recurrent.py and models/recurrent.py say what their gates do.
The paper's model: one LSTM whose input embedding is also its output layer, every word's vector of norm 1.

Where in the paper: section 3 "Model structure" and appendix "Experiment details". With the default sizes it has 1,346,144
parameters in 11 named vectors: the embedding, a weight and a bias for each of 4 gates, and the projection's weight and bias.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from unheard.config import require
from unheard.errors import ModelError
from unheard.models.model import BaseModel
from unheard.parameters import Layout


class Tied(Protocol):
    """The sizes and options that a model of this family has."""

    @property
    def gates(self) -> tuple[str, ...]: ...
    @property
    def vocabulary_size(self) -> int: ...
    @property
    def embedding_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def tied(self) -> bool: ...
    @property
    def unit_norm(self) -> bool: ...
    @property
    def keep_norm(self) -> bool: ...
    @property
    def user_features(self) -> int: ...
    @property
    def layout(self) -> Layout: ...


def check_sizes(model: Tied) -> None:
    known = model.vocabulary_size is not None
    require(not known or model.vocabulary_size >= 4, "vocabulary_size must be at least 4: BOS, EOS, UNK and a word.")
    require(model.embedding_size >= 1, "embedding_size must be at least 1.")
    require(model.hidden_size >= 1, "hidden_size must be at least 1.")
    require(model.user_features >= 0, "user_features must be 0 or more.")


def with_vocabulary(model: Any, vocabulary_size: int | None) -> Any:
    """The model with the vocabulary size of the store, if it has none of its own."""
    if model.vocabulary_size is not None or vocabulary_size is None:
        return model
    return replace(model, vocabulary_size=vocabulary_size)


def layout_of(model: Tied) -> Layout:
    """The embedding, a weight and a bias for each gate, the projection; and the output table if it is not the input's."""
    V, D, H = model.vocabulary_size, model.embedding_size, model.hidden_size
    if V is None:
        raise ModelError(
            f"{type(model).__name__} has no vocabulary_size yet: a run takes it from its store. Outside of a run, set it: "
            f"{type(model).__name__}(vocabulary_size=10_000)."
        )
    shapes: list[tuple[str, tuple[int, ...]]] = [("embedding", (V, D))]
    for gate in model.gates:
        shapes += [(f"{gate}_weight", (D + model.user_features + H, H)), (f"{gate}_bias", (H,))]
    shapes += [("projection_weight", (H, D)), ("projection_bias", (D,))]
    if not model.tied:
        shapes.append(("output_embedding", (V, D)))
    return Layout(tuple(shapes))


def initial_params(model: Tied, seed: int) -> Tensor:
    """Every product begins with a variance of about 1: word vectors have norm 1, so the weights that meet them are drawn with
    deviation 1, those that meet the H numbers of the state with 1/sqrt(H). Biases are 0. After 100 rounds on the blogs corpus
    this is worth 2.6 points of accuracy over the usual 1/sqrt(fan-in) (docs/log.md, 2026-11-15)."""
    generator = torch.Generator().manual_seed(seed)
    input_size, state_scale = model.embedding_size + model.user_features, model.hidden_size**-0.5
    params: dict[str, Tensor] = {}
    for name, shape in model.layout.shapes:
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
    return model.layout.join(params)


def tied_logits(
    model: Tied,
    unroll: Callable[[Tensor, Tensor], Tensor],
    params: Mapping[str, Tensor],
    tokens_BT: Tensor,
    features_F: Tensor | None,
) -> Tensor:
    """Word -> embedding (D) -> the cell's states (H) -> projection (D) -> inner product with every word's embedding (V).

    `unroll` takes what the gates get from the input, [B, T, G * H], and the weights that they have for the state."""
    embedding_VD = word_vectors(model, params["embedding"])
    output_VD = embedding_VD if model.tied else word_vectors(model, params["output_embedding"])
    input_BTX = embedding_VD[tokens_BT]
    if model.user_features:
        assert features_F is not None, "a model with user_features needs each user's features"
        input_BTX = torch.cat([input_BTX, features_F.expand(*tokens_BT.shape, model.user_features)], dim=-1)
    weight_YG = torch.cat([params[f"{gate}_weight"] for gate in model.gates], dim=-1)
    bias_G = torch.cat([params[f"{gate}_bias"] for gate in model.gates], dim=-1)
    from_input, from_state = weight_YG[: input_BTX.shape[-1]], weight_YG[input_BTX.shape[-1] :]
    hidden_BTH = unroll(input_BTX @ from_input + bias_G, from_state)
    return (hidden_BTH @ params["projection_weight"] + params["projection_bias"]) @ output_VD.mT


def project_words(model: Tied, params_P: Tensor) -> Tensor:
    """Word vectors back on the sphere, if they are to stay there."""
    if not (model.unit_norm and model.keep_norm):
        return params_P
    params_P = params_P.clone()
    params = model.layout.split(params_P)
    for name in ("embedding",) if model.tied else ("embedding", "output_embedding"):
        params[name].copy_(on_the_sphere(params[name]))
    return params_P


def word_vectors(model: Tied, rows_VD: Tensor) -> Tensor:
    return on_the_sphere(rows_VD) if model.unit_norm else rows_VD


def on_the_sphere(rows_VD: Tensor) -> Tensor:
    """Each row with norm 1. The tiny floor keeps a row of zeros (and its gradient) finite."""
    return rows_VD / rows_VD.square().sum(dim=-1, keepdim=True).clamp(min=SMALLEST_SQUARE).sqrt()


SMALLEST_SQUARE = 1e-24
"""Of a word vector's norm, below which it is not scaled up."""


@dataclass(frozen=True, kw_only=True)
class TiedLSTM(BaseModel):
    """Word -> embedding (D) -> LSTM state (H) -> output embedding (D) -> inner product with every word's embedding (V)."""

    vocabulary_size: int = None  # pyright: ignore[reportAssignmentType]
    """V. Left out: the number of words of the store, taken from it when a run begins (`pinned`)."""
    embedding_size: int = 96
    hidden_size: int = 256
    tied: bool = True
    """False gives the output layer an embedding of its own: a 70 % larger model for a little accuracy (appendix)."""
    unit_norm: bool = True
    """Word vectors of norm 1.0, which the paper found to converge faster. Normalised in the forward pass, so that
    a user's clipped delta needs no projection."""
    keep_norm: bool = False
    """With unit_norm: the server puts word vectors back on the sphere after the noise. Otherwise they are as long as training made
    them, and only their direction counts: the longer a vector has grown, the less it turns, by gradients and by noise."""
    user_features: int = 0
    """Length of an optional vector about the user, given to the LSTM beside each word (appendix, personalization)."""

    def __post_init__(self) -> None:
        check_sizes(self)

    @property
    def gates(self) -> tuple[str, ...]:
        return ("input", "forget", "cell", "output")

    @property
    def layout(self) -> Layout:
        return self._layout

    @cached_property
    def _layout(self) -> Layout:
        return layout_of(self)

    def initial(self, seed: int) -> Tensor:
        return initial_params(self, seed)

    def logits(self, params: Mapping[str, Tensor], tokens_BT: Tensor, features_F: Tensor | None = None) -> Tensor:
        return tied_logits(self, _unroll_lstm, params, tokens_BT, features_F)

    def project(self, params_P: Tensor) -> Tensor:
        return project_words(self, params_P)

    def pinned(self, vocabulary_size: int | None = None) -> Self:
        return with_vocabulary(self, vocabulary_size)


def _unroll_lstm(gates_BTG: Tensor, from_state_HG: Tensor) -> Tensor:
    """The LSTM over T steps from a zero state. All four gates are one product: inputs at once, states step by step."""
    state_BH = cell_BH = torch.zeros_like(gates_BTG[:, 0, : from_state_HG.shape[0]])
    states = []
    for t in range(gates_BTG.shape[1]):
        i, f, g, o = (gates_BTG[:, t] + state_BH @ from_state_HG).chunk(4, dim=-1)
        cell_BH = torch.sigmoid(f) * cell_BH + torch.sigmoid(i) * torch.tanh(g)
        state_BH = torch.sigmoid(o) * torch.tanh(cell_BH)
        states.append(state_BH)
    return torch.stack(states, dim=1)


@dataclass(frozen=True, kw_only=True)
class TiedGRU(BaseModel):
    """Word -> embedding (D) -> GRU state (H) -> output embedding (D) -> inner product with every word's embedding (V)."""

    vocabulary_size: int = None  # pyright: ignore[reportAssignmentType]
    """V. Left out: the number of words of the store, taken from it when a run begins (`pinned`)."""
    embedding_size: int = 96
    hidden_size: int = 256
    tied: bool = True
    unit_norm: bool = True
    keep_norm: bool = False
    user_features: int = 0

    def __post_init__(self) -> None:
        check_sizes(self)

    @property
    def gates(self) -> tuple[str, ...]:
        return ("reset", "update", "new")

    @property
    def layout(self) -> Layout:
        return self._layout

    @cached_property
    def _layout(self) -> Layout:
        return layout_of(self)

    def initial(self, seed: int) -> Tensor:
        return initial_params(self, seed)

    def logits(self, params: Mapping[str, Tensor], tokens_BT: Tensor, features_F: Tensor | None = None) -> Tensor:
        return tied_logits(self, _unroll_gru, params, tokens_BT, features_F)

    def project(self, params_P: Tensor) -> Tensor:
        return project_words(self, params_P)

    def pinned(self, vocabulary_size: int | None = None) -> Self:
        return with_vocabulary(self, vocabulary_size)


def _unroll_gru(gates_BTG: Tensor, from_state_HG: Tensor) -> Tensor:
    """The GRU over T steps from a zero state."""
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
