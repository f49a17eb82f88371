"""The paper's model: one LSTM whose input embedding is also its output layer, every word's vector of norm 1.

Where in the paper: section 3 "Model structure" and appendix "Experiment details". With the default sizes it has 1,346,144
parameters in 11 named vectors: the embedding, a weight and a bias for each of 4 gates, and the projection's weight and bias.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from unheard.models.tied import check_sizes, initial_params, layout_of, project_words, tied_logits
from unheard.parameters import Layout


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
        return tied_logits(self, _unroll, params, tokens_BT, features_F)

    def project(self, params_P: Tensor) -> Tensor:
        return project_words(self, params_P)


def _unroll(gates_BTG: Tensor, from_state_HG: Tensor) -> Tensor:
    """The LSTM over T steps from a zero state. All four gates are one product: inputs at once, states step by step."""
    state_BH = cell_BH = torch.zeros_like(gates_BTG[:, 0, : from_state_HG.shape[0]])
    states = []
    for t in range(gates_BTG.shape[1]):
        i, f, g, o = (gates_BTG[:, t] + state_BH @ from_state_HG).chunk(4, dim=-1)
        cell_BH = torch.sigmoid(f) * cell_BH + torch.sigmoid(i) * torch.tanh(g)
        state_BH = torch.sigmoid(o) * torch.tanh(cell_BH)
        states.append(state_BH)
    return torch.stack(states, dim=1)
