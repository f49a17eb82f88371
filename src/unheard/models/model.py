"""What a language model is to Unheard: a layout, a starting point, and logits as a pure function of the parameters.

In: named parameters, tokens [B, T]. Out: logits [B, T, V], and the mean loss of a batch of windows.
Nothing here knows of users, clipping or noise; a model holds no parameters, they are passed.
"""

from collections.abc import Mapping
from typing import Protocol

import torch
import torch.nn.functional as nnf
from torch import Tensor

from unheard.corpus.vocabulary import BOS
from unheard.parameters import Layout

PAD = -1
"""Marks a place in a window where the user has no token. It is never an input and never a target."""


class LanguageModel(Protocol):
    """Any frozen object with these: TiedLSTM, or ModuleModel around a torch.nn.Module."""

    @property
    def layout(self) -> Layout: ...

    @property
    def vocabulary_size(self) -> int: ...

    @property
    def user_features(self) -> int: ...

    def initial(self, seed: int) -> Tensor:
        """A random starting point, params_P; the same seed gives the same on every machine."""
        ...

    def logits(self, params: Mapping[str, Tensor], tokens_BT: Tensor, features_F: Tensor | None) -> Tensor:
        """Scores of the next token at every place, [B, T, V]."""
        ...

    def project(self, params_P: Tensor) -> Tensor:
        """Where the server puts the parameters back into the model's set (unit-norm embeddings), after the noise."""
        ...


def window_targets(window_BW: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, targets and which targets count, from windows of T + 1 tokens (W = T + 1).

    BOS is an input only: it always follows EOS, so predicting it would be a free point. PAD is nobody's word.
    """
    input_BT, target_BT = window_BW[..., :-1], window_BW[..., 1:]
    counts_BT = (target_BT != PAD) & (target_BT != BOS) & (input_BT != PAD)
    return input_BT.clamp(min=0), target_BT.clamp(min=0), counts_BT


def mean_loss(
    model: LanguageModel, params: Mapping[str, Tensor], window_BW: Tensor, features_F: Tensor | None
) -> Tensor:
    """The paper's l(theta; b): cross-entropy of the next word, averaged over the targets in the batch. 0 if there are none."""
    input_BT, target_BT, counts_BT = window_targets(window_BW)
    logits_BTV = model.logits(params, input_BT, features_F)
    loss_N = nnf.cross_entropy(logits_BTV.flatten(0, -2), target_BT.flatten(), reduction="none")
    counts_N = counts_BT.flatten()
    return torch.where(counts_N, loss_N, 0.0).sum() / counts_N.sum().clamp(min=1)
