"""Does an exported graph say what the trained model says: both read the same contexts, and their first choices are compared.

In: a model in torch, graphs in onnxruntime. Out: how often they agree, and how far apart their scores are at most. The contexts
are drawn from the model itself: no user's text is needed, and none is read.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unheard.corpus.vocabulary import BOS, UNK
from unheard.deployment.device import OnnxStepper
from unheard.models.model import LanguageModel
from unheard.randomness import reproducible_generator

TEXTS, LENGTH, AT_ONCE = 256, 40, 16
CONTEXTS = TEXTS * LENGTH
"""10,240: 256 texts of 40 words, each with all its beginnings."""
ROUNDING = 1e-4
"""Of the largest score: as far as float32 may move one. A model whose own rounding in PyTorch moves it further (a noisy recurrent
one magnifies it from word to word) is given eight times as much as that."""


@dataclass
class Agreement:
    """Of one graph with the trained model."""

    contexts: int = 0
    top1: int = 0
    """Contexts with the same first choice, or one whose scores are the same."""
    top3: int = 0
    """Of three suggestions each, how many both make."""
    furthest: float = 0.0
    """The largest difference of any two scores."""
    too_far: int = 0
    """Contexts in which some score is further off than rounding explains."""

    def add(self, right_NV: np.ndarray, found_NV: np.ndarray, allowed: float = ROUNDING) -> None:
        """Scores in the same contexts; `allowed` is how far apart two may be and still be one."""
        rows_N = np.arange(len(right_NV))
        right_N3, found_N3 = _best(right_NV), _best(found_NV)
        gap_N = right_NV[rows_N, right_N3[:, 0]] - right_NV[rows_N, found_N3[:, 0]]
        self.contexts += len(right_NV)
        self.top1 += int((gap_N <= allowed).sum())
        self.top3 += int((right_N3[:, :, None] == found_N3[:, None, :]).sum())
        apart_N = np.nan_to_num(np.abs(right_NV - found_NV).max(axis=1), nan=np.inf)
        self.too_far += int((~(apart_N <= allowed)).sum())
        self.furthest = max(self.furthest, float(apart_N.max()))

    @property
    def is_equal(self) -> bool:
        return self.top1 == self.contexts and not self.too_far

    def numbers(self) -> dict[str, Any]:
        return {
            "contexts": self.contexts,
            "same_first_choice": self.top1 / self.contexts,
            "same_suggestions_of_three": self.top3 / (3 * self.contexts),
            "furthest_scores_apart": self.furthest,
        }


@dataclass
class ParityCheck:
    """Any number of graphs against one model."""

    model: LanguageModel
    params_P: Tensor
    graphs: dict[str, OnnxStepper]
    found: dict[str, Agreement] = field(default_factory=dict)

    def run(self, progress: Callable[[int, int], None] = lambda done, of: None) -> dict[str, Agreement]:
        """Draw texts from the first graph, and have all of them read by every graph and by torch."""
        self.found = {name: Agreement() for name in self.graphs}
        generator = reproducible_generator(0, "contexts of an export")
        for done in range(0, TEXTS, AT_ONCE):
            words_NT = draw_texts(next(iter(self.graphs.values())), AT_ONCE, LENGTH, generator)
            self.add(words_NT)
            progress(done + AT_ONCE, TEXTS)
        return self.found

    @torch.no_grad()
    def add(self, words_NT: np.ndarray) -> None:
        """Compare after every word of these texts."""
        features_F = torch.zeros(self.model.user_features) if self.model.user_features else None
        right_NTV = self._logits(self.params_P.float(), words_NT, features_F)
        exact_NTV = self._logits(self.params_P.double(), words_NT, None if features_F is None else features_F.double())
        rounding_T = np.abs(right_NTV - exact_NTV).max(axis=(0, 2))
        allowed_T = ROUNDING * max(1.0, float(np.abs(right_NTV).max())) + 8 * np.maximum.accumulate(rounding_T)
        for name, steps in self.graphs.items():
            agreement, states = self.found.setdefault(name, Agreement()), None
            for t in range(words_NT.shape[1]):
                states, found_NV = steps.read_many(states, words_NT[:, t])
                agreement.add(right_NTV[:, t], found_NV, float(allowed_T[t]))

    def _logits(self, params_P: Tensor, words_NT: np.ndarray, features_F: Tensor | None) -> np.ndarray:
        return self.model.logits(self.model.layout.split(params_P), torch.as_tensor(words_NT), features_F).numpy()


def draw_texts(steps: OnnxStepper, number: int, length: int, generator: np.random.Generator) -> np.ndarray:
    """Texts as the model would write them, each from BOS on, [N, T]."""
    words_NT = np.full((number, length), BOS, dtype=np.int64)
    states = None
    for t in range(length - 1):
        states, logits_NV = steps.read_many(states, words_NT[:, t])
        scores_NV = np.nan_to_num(logits_NV)
        sums_NV = np.cumsum(np.exp(scores_NV - scores_NV.max(axis=1, keepdims=True)), axis=1)
        drawn_N1 = generator.random((number, 1)) * sums_NV[:, -1:]
        words_NT[:, t + 1] = np.minimum((sums_NV < drawn_N1).sum(axis=1), sums_NV.shape[1] - 1)
    return words_NT


def _best(logits_NV: np.ndarray) -> np.ndarray:
    """Three best words of each row, as `predict` shows them: without BOS and UNK."""
    shown_NV = logits_NV.copy()
    shown_NV[:, [BOS, UNK]] = -np.inf
    best_N3 = np.argpartition(-shown_NV, 2, axis=1)[:, :3]
    order_N3 = np.argsort(-np.take_along_axis(shown_NV, best_N3, axis=1), axis=1, kind="stable")
    return np.take_along_axis(best_N3, order_N3, axis=1)
