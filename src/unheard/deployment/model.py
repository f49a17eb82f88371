"""A model in use: reads a text word by word and predicts the next word. Needs no torch.

A `LoadedModel` comes from `loading.open_model`, whatever the model is stored in. It holds a `Stepper`, which computes
one step of the model:

    state, scores_V = model.stepper.read(None, BOS)              # before the first word
    state, scores_V = model.stepper.read(state, word_id)         # after each further word
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

from unheard.corpus.tokenizers import Tokenizer
from unheard.corpus.vocabulary import BOS, UNK, Vocabulary
from unheard.errors import ModelError

PERSONAL_RECORD = "personal.json"
"""The file that marks the folder of a personal model; `personalize.py` writes it."""


class Stepper(Protocol):
    """Computes a model one word at a time. Its state is opaque: the caller keeps it and passes it to the next step."""

    def read(self, state: Any, word: int) -> tuple[Any, np.ndarray]:
        """Read one more word.

        Args:
            state: The state after the words before; None before the first word, which is BOS.
            word: The id of the word.

        Returns:
            The state after the word, and a score for each word of the vocabulary as the next one.
        """
        ...


@runtime_checkable
class ReadsAtOnce(Protocol):
    """A stepper that reads a whole text in one step."""

    def read_all(self, words: Sequence[int]) -> np.ndarray:
        """A score for each word of the vocabulary as the next one after `words`."""
        ...


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model with its vocabulary, tokenizer and privacy statement, ready to predict.

    Example:

        model = open_model("runs/private")
        model.predict("see you", top=3)         # [('tomorrow', 0.21), ('later', 0.13), ('soon', 0.08)]
    """

    name: str
    kind: Literal["run", "export", "personal"]
    """What the model is stored in."""
    stepper: Stepper = field(repr=False)
    vocabulary: Vocabulary = field(repr=False)
    tokenizer: Tokenizer
    statement: Mapping[str, Any] = field(repr=False)
    """The privacy statement; for a personal model that of the shared model it started from."""

    def __post_init__(self) -> None:
        try:
            epsilon, delta = float(self.statement["claimed"]["epsilon"]), float(self.statement["delta"])
            words = [
                self.statement["claim"],
                self.statement["claimed"].get("accountant", ""),
                *self.statement["warnings"],
            ]
            is_whole = epsilon >= 0 and 0 < delta < 1 and all(isinstance(word, str) for word in words)
        except (KeyError, TypeError, ValueError, AttributeError):
            is_whole = False
        # DP: a claim that cannot be read must not be shown as none, nor left out.
        if not is_whole:
            raise ModelError(f"{self.name}: its privacy statement cannot be read. Export the run again.")

    def predict(self, text: str, top: int = 3) -> list[tuple[str, float]]:
        """Predict the word after a text.

        Args:
            text: The text so far.
            top: How many words to return.

        Returns:
            The most likely next words with their probabilities, without UNK and BOS.
        """
        words = self.vocabulary.encode_words(self.tokenizer.split(text)).tolist()
        probs_V = probabilities(scores_after(self.stepper, words))
        probs_V[[BOS, UNK]] = 0.0
        best = np.argsort(-probs_V, kind="stable")[: max(top, 0)]
        return [(self.vocabulary.word(i), float(probs_V[i])) for i in best.tolist()]


def scores_after(stepper: Stepper, words: Sequence[int]) -> np.ndarray:
    """The scores of the next word after a text of words, which begins with BOS.

    Args:
        stepper: The model, one word at a time.
        words: The ids of the words of the text, without BOS.
    """
    if isinstance(stepper, ReadsAtOnce):
        return stepper.read_all((BOS, *words))
    state, scores_V = stepper.read(None, BOS)
    for word in words:
        state, scores_V = stepper.read(state, word)
    return scores_V


def probabilities(scores_V: np.ndarray) -> np.ndarray:
    """Softmax in float64.

    >>> probabilities(np.array([1.0, 1.0])).tolist()
    [0.5, 0.5]
    """
    shifted_V = np.exp(scores_V.astype(np.float64) - scores_V.max())
    return shifted_V / shifted_V.sum()


def check_rows(rows: int, vocabulary: Vocabulary, where: str) -> None:
    """Check that a model scores exactly the words of its vocabulary; otherwise it would suggest the wrong words.

    Args:
        rows: The number of scores of the model.
        vocabulary: The words.
        where: The file or folder, for the message.

    Raises:
        ModelError: The numbers differ.
    """
    if rows != len(vocabulary):
        raise ModelError(
            f"{where}: the model has {rows} rows, vocabulary.txt {len(vocabulary)} words. Put back the "
            "vocabulary.txt that was written with the model."
        )
