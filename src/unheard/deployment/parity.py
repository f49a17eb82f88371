"""Check that an exported graph predicts what the trained model predicts.

    agreement = ParityCheck(model, params_P, {"model.onnx": OnnxStepper(graph)}).run()
    agreement["model.onnx"].is_equal                            # the same predictions up to rounding

The trained model in torch and the graphs in onnxruntime read the same 10,240 contexts. The texts are drawn from the
model itself, so no user's text is read.
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
"""10,240: every prefix of 256 texts of 40 words."""
ROUNDING = 1e-4
"""The allowed difference of two scores, relative to the largest score: what float32 rounding may cause.

A noisy recurrent model amplifies rounding from word to word. The allowance therefore also includes eight times the
difference between the model's own scores in float32 and in float64.
"""


@dataclass
class Agreement:
    """How well one graph agrees with the trained model."""

    contexts: int = 0
    top1: int = 0
    """Contexts with the same first choice, or with first choices whose scores are equal up to rounding."""
    top3: int = 0
    """Suggestions in common, of three per context."""
    furthest: float = 0.0
    """The largest difference between two scores of a word."""
    too_far: int = 0
    """Contexts with a difference that rounding does not explain."""

    def add(self, torch_NV: np.ndarray, graph_NV: np.ndarray, allowed: float = ROUNDING) -> None:
        """Add the scores of N contexts.

        Args:
            torch_NV: Scores of the trained model.
            graph_NV: Scores of the graph.
            allowed: The difference up to which two scores count as equal.
        """
        rows_N = np.arange(len(torch_NV))
        torch_N3, graph_N3 = _best(torch_NV), _best(graph_NV)
        gap_N = torch_NV[rows_N, torch_N3[:, 0]] - torch_NV[rows_N, graph_N3[:, 0]]
        self.contexts += len(torch_NV)
        self.top1 += int((gap_N <= allowed).sum())
        self.top3 += int((torch_N3[:, :, None] == graph_N3[:, None, :]).sum())
        apart_N = np.nan_to_num(np.abs(torch_NV - graph_NV).max(axis=1), nan=np.inf)
        self.too_far += int((~(apart_N <= allowed)).sum())
        self.furthest = max(self.furthest, float(apart_N.max()))

    @property
    def is_equal(self) -> bool:
        """Whether all first choices agree and no score differs by more than rounding."""
        return self.top1 == self.contexts and not self.too_far

    def numbers(self) -> dict[str, Any]:
        """The figures for `export.json`."""
        return {
            "contexts": self.contexts,
            "same_first_choice": self.top1 / self.contexts,
            "same_suggestions_of_three": self.top3 / (3 * self.contexts),
            "furthest_scores_apart": self.furthest,
        }


@dataclass
class ParityCheck:
    """Compares exported graphs with one trained model."""

    model: LanguageModel
    params_P: Tensor
    graphs: dict[str, OnnxStepper]
    agreement: dict[str, Agreement] = field(default_factory=dict)

    def run(self, progress: Callable[[int, int], None] = lambda done, of: None) -> dict[str, Agreement]:
        """Draw texts from the first graph and compare all graphs with torch on them.

        Args:
            progress: Called with the number of texts compared and their total.

        Returns:
            The agreement of each graph, by its name.
        """
        self.agreement = {name: Agreement() for name in self.graphs}
        generator = reproducible_generator(0, "contexts of an export")
        for done in range(0, TEXTS, AT_ONCE):
            words_NT = draw_texts(next(iter(self.graphs.values())), AT_ONCE, LENGTH, generator)
            self.add(words_NT)
            progress(done + AT_ONCE, TEXTS)
        return self.agreement

    @torch.no_grad()
    def add(self, words_NT: np.ndarray) -> None:
        """Compare the scores after every word of N texts."""
        features_F = torch.zeros(self.model.user_features) if self.model.user_features else None
        torch_NTV = self._logits(self.params_P.float(), words_NT, features_F)
        exact_NTV = self._logits(self.params_P.double(), words_NT, None if features_F is None else features_F.double())
        rounding_T = np.abs(torch_NTV - exact_NTV).max(axis=(0, 2))
        allowed_T = ROUNDING * max(1.0, float(np.abs(torch_NTV).max())) + 8 * np.maximum.accumulate(rounding_T)
        for name, steps in self.graphs.items():
            agreement, states = self.agreement.setdefault(name, Agreement()), None
            for t in range(words_NT.shape[1]):
                states, graph_NV = steps.read_many(states, words_NT[:, t])
                agreement.add(torch_NTV[:, t], graph_NV, float(allowed_T[t]))

    def _logits(self, params_P: Tensor, words_NT: np.ndarray, features_F: Tensor | None) -> np.ndarray:
        return self.model.logits(self.model.layout.split(params_P), torch.as_tensor(words_NT), features_F).numpy()


def draw_texts(steps: OnnxStepper, number: int, length: int, generator: np.random.Generator) -> np.ndarray:
    """Sample texts from a model, each starting with BOS.

    Args:
        steps: The model, one word at a time for many texts.
        number: N, the number of texts.
        length: T, the number of words of each, BOS included.
        generator: The random draws.

    Returns:
        Word ids, [N, T].
    """
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
    """The three best words of each row as `predict` shows them, without BOS and UNK."""
    shown_NV = logits_NV.copy()
    shown_NV[:, [BOS, UNK]] = -np.inf
    best_N3 = np.argpartition(-shown_NV, 2, axis=1)[:, :3]
    order_N3 = np.argsort(-np.take_along_axis(shown_NV, best_N3, axis=1), axis=1, kind="stable")
    return np.take_along_axis(best_N3, order_N3, axis=1)
