"""The paper's model: one LSTM whose input embedding is also its output layer, every word's vector of norm 1.

Where in the paper: section 3 "Model structure" and appendix "Experiment details". With the default sizes it has 1,346,144
parameters in 11 named vectors: the embedding, a weight and a bias for each of 4 gates, and the projection's weight and bias.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from unheard.parameters import Layout
from unheard.parts import require

GATES = ("input", "forget", "cell", "output")


@dataclass(frozen=True, kw_only=True)
class TiedLSTM:
    """Word -> embedding (D) -> LSTM state (H) -> output embedding (D) -> inner product with every word's embedding (V)."""

    vocabulary_size: int = 10_000
    embedding_size: int = 96
    hidden_size: int = 256
    tied: bool = True
    """False gives the output layer an embedding of its own: a 70 % larger model for a little accuracy (appendix)."""
    unit_norm: bool = True
    """Word vectors of norm 1.0, which the paper found to converge faster. Normalised in the forward pass, so that
    a user's clipped delta needs no projection, and put back on the sphere by the server after the noise."""
    user_features: int = 0
    """Length of an optional vector about the user, given to the LSTM beside each word (appendix, personalization)."""

    def __post_init__(self) -> None:
        require(self.vocabulary_size >= 4, "vocabulary_size must be at least 4: BOS, EOS, UNK and a word.")
        require(self.embedding_size >= 1, "embedding_size must be at least 1.")
        require(self.hidden_size >= 1, "hidden_size must be at least 1.")
        require(self.user_features >= 0, "user_features must be 0 or more.")

    @property
    def layout(self) -> Layout:
        return self._layout

    @cached_property
    def _layout(self) -> Layout:
        V, D, H = self.vocabulary_size, self.embedding_size, self.hidden_size
        shapes: list[tuple[str, tuple[int, ...]]] = [("embedding", (V, D))]
        for gate in GATES:
            shapes += [(f"{gate}_weight", (D + self.user_features + H, H)), (f"{gate}_bias", (H,))]
        shapes += [("projection_weight", (H, D)), ("projection_bias", (D,))]
        if not self.tied:
            shapes.append(("output_embedding", (V, D)))
        return Layout(tuple(shapes))

    def initial(self, seed: int) -> Tensor:
        """Every product begins with a variance of about 1: word vectors have norm 1, so the weights that meet them are drawn with
        deviation 1, those that meet the H numbers of the state with 1/sqrt(H). Biases are 0. After 100 rounds on the blogs corpus
        this is worth 2.6 points of accuracy over the usual 1/sqrt(fan-in) (docs/log.md, 2026-11-15)."""
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
        embedding_VD = self._word_vectors(params["embedding"])
        output_VD = embedding_VD if self.tied else self._word_vectors(params["output_embedding"])
        input_BTX = embedding_VD[tokens_BT]
        if self.user_features:
            assert features_F is not None, "a model with user_features needs each user's features"
            input_BTX = torch.cat([input_BTX, features_F.expand(*tokens_BT.shape, self.user_features)], dim=-1)
        hidden_BTH = self._unroll(params, input_BTX)
        return (hidden_BTH @ params["projection_weight"] + params["projection_bias"]) @ output_VD.mT

    def project(self, params_P: Tensor) -> Tensor:
        if not self.unit_norm:
            return params_P
        params_P = params_P.clone()
        params = self.layout.split(params_P)
        for name in ("embedding",) if self.tied else ("embedding", "output_embedding"):
            params[name].copy_(_on_the_sphere(params[name]))
        return params_P

    def _word_vectors(self, rows_VD: Tensor) -> Tensor:
        return _on_the_sphere(rows_VD) if self.unit_norm else rows_VD

    def _unroll(self, params: Mapping[str, Tensor], input_BTX: Tensor) -> Tensor:
        """The LSTM over T steps from a zero state. All four gates are one product: inputs at once, states step by step."""
        weight_YG = torch.cat([params[f"{gate}_weight"] for gate in GATES], dim=-1)
        bias_G = torch.cat([params[f"{gate}_bias"] for gate in GATES], dim=-1)
        from_input, from_state = weight_YG[: input_BTX.shape[-1]], weight_YG[input_BTX.shape[-1] :]
        gates_BTG = input_BTX @ from_input + bias_G
        state_BH = cell_BH = torch.zeros_like(gates_BTG[:, 0, : self.hidden_size])
        states = []
        for t in range(input_BTX.shape[1]):
            i, f, g, o = (gates_BTG[:, t] + state_BH @ from_state).chunk(4, dim=-1)
            cell_BH = torch.sigmoid(f) * cell_BH + torch.sigmoid(i) * torch.tanh(g)
            state_BH = torch.sigmoid(o) * torch.tanh(cell_BH)
            states.append(state_BH)
        return torch.stack(states, dim=1)


def _on_the_sphere(rows_VD: Tensor) -> Tensor:
    """Each row with norm 1. The tiny floor keeps a row of zeros (and its gradient) finite."""
    return rows_VD / rows_VD.square().sum(dim=-1, keepdim=True).clamp(min=1e-24).sqrt()
