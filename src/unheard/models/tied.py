"""What the paper's models share: word vectors on the sphere, one table for input and output, a cell between them.

Where in the paper: section 3 "Model structure" and appendix "Experiment details". A cell is a list of gates, each with a weight
[input + state, H] and a bias [H]; models/tied_lstm.py and models/tied_gru.py say what their gates do.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from unheard.parameters import Layout
from unheard.parts import require


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
    require(model.vocabulary_size >= 4, "vocabulary_size must be at least 4: BOS, EOS, UNK and a word.")
    require(model.embedding_size >= 1, "embedding_size must be at least 1.")
    require(model.hidden_size >= 1, "hidden_size must be at least 1.")
    require(model.user_features >= 0, "user_features must be 0 or more.")


def layout_of(model: Tied) -> Layout:
    """The embedding, a weight and a bias for each gate, the projection; and the output table if it is not the input's."""
    V, D, H = model.vocabulary_size, model.embedding_size, model.hidden_size
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
