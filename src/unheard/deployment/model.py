"""A finished model, one word at a time: what a keyboard needs of it, wherever it came from.

In: a word's id and the state after the words before it. Out: the new state, and a score for every next word.
Nothing here knows of torch: an exported model runs where there is none.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

from unheard.corpus.tokenizers import Tokenizer
from unheard.corpus.vocabulary import BOS, UNK, Vocabulary
from unheard.errors import ModelError

PERSONAL_RECORD = "personal.json"
"""The file that marks the folder of a personal model (`personalize.py` writes it)."""


class Stepper(Protocol):
    """A model that reads word after word. The state is its own business: keep it, hand it back."""

    def read(self, state: Any, word: int) -> tuple[Any, np.ndarray]:
        """The state after one more word, and scores_V; the state before the first word, BOS, is None."""
        ...


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model with its words, its name and what may be said about it."""

    name: str
    kind: Literal["run", "export", "personal"]
    stepper: Stepper = field(repr=False)
    vocabulary: Vocabulary = field(repr=False)
    tokens: Tokenizer
    statement: Mapping[str, Any] = field(repr=False)

    def predict(self, text: str, top: int = 3) -> list[tuple[str, float]]:
        """The most likely next words after a text, with their probabilities; UNK and BOS left out."""
        state, scores_V = self.stepper.read(None, BOS)
        for word in self.vocabulary.encode_words(self.tokens.split(text)).tolist():
            state, scores_V = self.stepper.read(state, word)
        probs_V = probabilities(scores_V)
        probs_V[[BOS, UNK]] = 0.0
        best = np.argsort(-probs_V, kind="stable")[: max(top, 0)]
        return [(self.vocabulary.word(i), float(probs_V[i])) for i in best.tolist()]


def probabilities(scores_V: np.ndarray) -> np.ndarray:
    """Softmax, in float64."""
    shifted_V = np.exp(scores_V.astype(np.float64) - scores_V.max())
    return shifted_V / shifted_V.sum()


def check_rows(rows: int, vocabulary: Vocabulary, where: str) -> None:
    """A model that has another number of rows than its vocabulary has words would suggest the wrong ones."""
    if rows != len(vocabulary):
        raise ModelError(f"{where}: the model has {rows} rows, vocabulary.txt {len(vocabulary)} words. Put it back.")
