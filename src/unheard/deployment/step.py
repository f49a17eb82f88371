"""Compute one step of a trained model in torch. A step reads one word of a text and scores the next.

    stepper = stepper_for(model, params_P, context=20)           # a `Stepper` in torch
    arrays = step_arrays(model, params_P)                        # the parameters of one step, for `export.py`

The LSTM and GRU models (`models/recurrent.py`) pass a state from word to word. Any other model reads the text so far
again at each word, which is slower.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unheard.deployment.model import Stepper
from unheard.errors import ModelError
from unheard.models.model import LanguageModel, unknown_features
from unheard.models.recurrent import TiedGRU, TiedLSTM

CELLS: dict[type, str] = {TiedLSTM: "lstm", TiedGRU: "gru"}
"""The models that pass a state from word to word, and the name of their cell in `export.json`."""
STATES = {"lstm": ("state", "cell"), "gru": ("state",)}
"""The names of the states that each cell passes from word to word."""


@dataclass(frozen=True, kw_only=True)
class StepArrays:
    """The parameters of one step of an LSTM or GRU, in float32.

    The matrices of all gates are concatenated. The word vectors are normalised if the model normalises them. The sizes
    are: D embedding, V vocabulary, H hidden, X input (D plus the number of user features), G all gates (H per gate).
    """

    cell: str
    """`lstm` or `gru`."""
    words_DV: np.ndarray
    """The input vectors of the words."""
    output_DV: np.ndarray
    """The output vectors of the words. The same array as `words_DV` if the model is tied."""
    from_input_XG: np.ndarray
    """The weights from the input to the gates."""
    from_state_HG: np.ndarray
    """The weights from the state to the gates."""
    bias_G: np.ndarray
    """The biases of the gates."""
    projection_HD: np.ndarray
    """The weights from the state to the output embedding."""
    projection_bias_D: np.ndarray
    """The bias of the output embedding."""

    @property
    def hidden_size(self) -> int:
        """H, the length of the state."""
        return self.from_state_HG.shape[0]

    @property
    def user_features(self) -> int:
        """The number of features about the user that are part of the input."""
        return self.from_input_XG.shape[0] - self.words_DV.shape[0]


@torch.no_grad()
def step_arrays(model: LanguageModel, params_P: Tensor) -> StepArrays:
    """Return the parameters of an LSTM or GRU as the arrays that one step needs.

    Args:
        model: An LSTM or GRU.
        params_P: The parameters of the model.

    Raises:
        ModelError: The model is neither an LSTM nor a GRU, so it has no state and cannot be computed in steps.
    """
    if not isinstance(model, TiedLSTM | TiedGRU):
        raise ModelError(
            f"A {type(model).__name__} cannot be exported: only models that read word by word (kinds 'tied_lstm' and 'tied_gru') "
            "have a step that a device can run. Export your own module with torch.onnx.export."
        )
    params = {name: tensor.cpu() for name, tensor in model.layout.split(params_P.float()).items()}
    weight_YG = torch.cat([params[f"{gate}_weight"] for gate in model.gates], dim=-1)
    input_size = model.embedding_size + model.user_features
    words_DV = _array(model.word_vectors(params["embedding"]).mT)
    return StepArrays(
        cell=CELLS[type(model)],
        words_DV=words_DV,
        output_DV=words_DV if model.tied else _array(model.word_vectors(params["output_embedding"]).mT),
        from_input_XG=_array(weight_YG[:input_size]),
        from_state_HG=_array(weight_YG[input_size:]),
        bias_G=_array(torch.cat([params[f"{gate}_bias"] for gate in model.gates])),
        projection_HD=_array(params["projection_weight"]),
        projection_bias_D=_array(params["projection_bias"]),
    )


class CellStepper:
    """Computes steps of an LSTM or GRU in torch. At the paper's size a step takes 0.1 ms on one thread.

    If the model takes features about the user, they are set to zero.

    Args:
        arrays: The parameters of the model.
    """

    def __init__(self, arrays: StepArrays) -> None:
        self._cell = _lstm if arrays.cell == "lstm" else _gru
        self._zero = (torch.zeros(arrays.hidden_size),) * len(STATES[arrays.cell])
        self._words_DV, self._output_DV = torch.from_numpy(arrays.words_DV), torch.from_numpy(arrays.output_DV)
        self._from_word_DG = torch.from_numpy(arrays.from_input_XG)[: len(arrays.words_DV)]
        self._from_state_HG, self._bias_G = torch.from_numpy(arrays.from_state_HG), torch.from_numpy(arrays.bias_G)
        self._projection_HD = torch.from_numpy(arrays.projection_HD)
        self._projection_bias_D = torch.from_numpy(arrays.projection_bias_D)

    @torch.no_grad()
    def read(self, state: tuple[Tensor, ...] | None, word: int) -> tuple[tuple[Tensor, ...], np.ndarray]:
        """Read one more word (see `Stepper.read`)."""
        before = state or self._zero
        from_input_G = self._words_DV[:, word] @ self._from_word_DG + self._bias_G
        after = self._cell(from_input_G, before[0] @ self._from_state_HG, *before)
        scores_V = (after[0] @ self._projection_HD + self._projection_bias_D) @ self._output_DV
        return after, scores_V.numpy()


@dataclass(frozen=True)
class ReplayStepper:
    """Computes steps of any language model. The state is the words so far, which the model reads again at each step.

    If the model takes features about the user, they are set to zero.
    """

    model: LanguageModel
    params_P: Tensor
    """The parameters of the model."""
    context: int
    """The largest number of words that are read. Earlier words are ignored; a model may have no more positions."""

    @torch.no_grad()
    def read(self, state: Sequence[int] | None, word: int) -> tuple[Any, np.ndarray]:
        """Read one more word (see `Stepper.read`)."""
        words = (*(state or ()), word)[-self.context :]
        return words, self.read_all(words)

    @torch.no_grad()
    def read_all(self, words: Sequence[int]) -> np.ndarray:
        """Read a whole text (see `ReadsAtOnce.read_all`)."""
        words = list(words)[-self.context :]
        features_F = unknown_features(self.model)
        logits_1TV = self.model.logits(self.model.layout.split(self.params_P), torch.tensor([words]), features_F)
        return logits_1TV[0, -1].float().numpy()


def stepper_for(model: LanguageModel, params_P: Tensor, context: int) -> Stepper:
    """Return the fastest stepper for a model.

    Args:
        model: The model.
        params_P: The parameters of the model.
        context: The largest number of words that a model other than an LSTM or GRU reads.
    """
    if type(model) in CELLS:
        return CellStepper(step_arrays(model, params_P))
    return ReplayStepper(model, params_P, context)


def _lstm(from_input_G: Tensor, from_state_G: Tensor, state_H: Tensor, cell_H: Tensor) -> tuple[Tensor, Tensor]:
    """Return the next state and the next cell of an LSTM."""
    i, f, g, o = (from_input_G + from_state_G).chunk(4)
    cell_H = torch.sigmoid(f) * cell_H + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(cell_H), cell_H


def _gru(from_input_G: Tensor, from_state_G: Tensor, state_H: Tensor) -> tuple[Tensor]:
    """Return the next state of a GRU."""
    (input_r, input_z, input_n), (state_r, state_z, state_n) = from_input_G.chunk(3), from_state_G.chunk(3)
    keep = torch.sigmoid(input_z + state_z)
    new = torch.tanh(input_n + torch.sigmoid(input_r + state_r) * state_n)
    return ((1 - keep) * new + keep * state_H,)


def _array(tensor: Tensor) -> np.ndarray:
    """Return a tensor as a contiguous NumPy array."""
    return np.ascontiguousarray(tensor.detach().numpy())
