"""The paper's model with a GRU for its cell: three gates instead of four, and no cell state.

The GRU is the one whose reset gate acts on the state's product with its weights, n = tanh(x W + b + r * (h U)), so that all
gates of a step are one product (Cho et al. 2014 in the form that fast implementations use).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from unheard.models.tied import check_sizes, initial_params, layout_of, project_words, tied_logits
from unheard.parameters import Layout


@dataclass(frozen=True, kw_only=True)
class TiedGRU:
    """Word -> embedding (D) -> GRU state (H) -> output embedding (D) -> inner product with every word's embedding (V)."""

    vocabulary_size: int = 10_000
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
        return tied_logits(self, _unroll, params, tokens_BT, features_F)

    def project(self, params_P: Tensor) -> Tensor:
        return project_words(self, params_P)


def _unroll(gates_BTG: Tensor, from_state_HG: Tensor) -> Tensor:
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
