"""Suggest words for a text: completions of the word that is being typed, or next words after a finished word.

    suggester = Suggester(open_model("runs/private"))
    suggester.suggest("see you tom")         # [Suggestion(word='tomorrow', share=0.93), ...]
    suggester.suggest_ahead("see you ")      # the suggestions for this text and each key that may follow

The dictionary supplies the candidates and the model ranks them. A word at the cursor counts as finished, even before the
space after it, if the model finds it at least as likely as all longer words that begin with it. The model's state after
each word is cached in memory, so a key costs one step of the model or none; `suggest_ahead`, which lets the page show
suggestions without waiting for the server, costs one more for each letter that finishes a word.

Models with tokens smaller than words have a suggester of their own (keyboard/pieces.py).
"""

import bisect
import threading
import unicodedata
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from unheard.corpus.vocabulary import BOS, SPECIALS
from unheard.deployment.model import LoadedModel, probabilities
from unheard.errors import ModelError

MAX_STATES = 128
"""Number of cached states, each with a probability per word: 5 MB at the paper's size."""
WINDOW = 100
"""Of a long message only the last 100 to 199 words are read, starting at a multiple of 100, so that the start rarely
moves and most keys find a cached state."""
_APOSTROPHES = str.maketrans("’‘ʼ＇", "''''")


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    """A suggested word."""

    word: str
    share: float
    """Its probability among all candidates for this position."""
    follows: bool = False
    """Whether it comes after the word at the cursor, with a space between; else it completes that word."""


class Dictionary:
    """Words by their spelling, to find those that begin with some letters.

    Args:
        words: The words by their id.
    """

    def __init__(self, words: Mapping[int, str]) -> None:
        by_spelling = sorted((folded(word), i) for i, word in words.items())
        self.spellings = [spelling for spelling, _ in by_spelling]
        self._ids_by_spelling = np.array([i for _, i in by_spelling], dtype=np.int64)
        self.ids = np.array(sorted(words), dtype=np.int64)

    def beginning_with(self, begun: str) -> tuple[np.ndarray, np.ndarray]:
        """The ids of words that are what was typed, and the ids of longer words that begin with it."""
        front = folded(begun)
        first = bisect.bisect_left(self.spellings, front)
        last = bisect.bisect_left(self.spellings, front + "\U0010ffff", lo=first)
        longer = first
        while longer < last and self.spellings[longer] == front:
            longer += 1
        return self._ids_by_spelling[first:longer], self._ids_by_spelling[longer:last]


class Suggester:
    """The suggestions of one model. Several threads may use it; they take turns.

    Args:
        model: A model with whole words as tokens.

    Raises:
        ModelError: The model has tokens smaller than words.
    """

    def __init__(self, model: LoadedModel) -> None:
        if model.tokenizer.is_subword:
            raise ModelError(
                f"{model.name} reads pieces smaller than words, and this suggester whole words. Use `PieceSuggester`."
            )
        self.model = model
        self._states: OrderedDict[tuple[int, ...], tuple[Any, np.ndarray]] = OrderedDict()
        self._lock = threading.Lock()
        words = enumerate(model.vocabulary.words)
        usable = {i: word for i, word in words if i >= len(SPECIALS) and any(c.isalnum() for c in word)}
        self._dictionary = Dictionary(usable)
        self._letters = sorted({letter for spelling in self._dictionary.spellings for letter in spelling})

    def suggest(self, text: str, top: int = 3) -> list[Suggestion]:
        """The best words at the end of a text.

        Args:
            text: The text up to the cursor. If it ends inside a word, the suggestions complete that word; if it ends
                with a finished word, they follow it.
            top: The largest number of suggestions.
        """
        before, begun = split_at_cursor(text)
        return self._at(before, begun, top)

    def suggest_ahead(self, text: str, top: int = 3) -> dict[str, list[Suggestion]]:
        """The suggestions for the text and one more key.

        Args:
            text: The text before the cursor.
            top: The number of suggestions for each key.

        Returns:
            Suggestions by key: each letter with which some word continues, and the space after a word.
        """
        before, begun = split_at_cursor(text)
        by_key = {letter: self._at(before, begun + letter, top) for letter in self._letters}
        if begun:
            by_key[" "] = self._best(self._dictionary.ids, self._after(f"{before}{begun} "), top)
        return {key: suggestions for key, suggestions in by_key.items() if suggestions}

    def _at(self, before: str, begun: str, top: int) -> list[Suggestion]:
        """The best words after whole words and a word that is begun, which may be empty."""
        probs_V = self._after(before)
        if not begun:
            return self._best(self._dictionary.ids, probs_V, top)
        typed, longer = self._dictionary.beginning_with(begun)
        if len(typed) and probs_V[typed].sum() >= probs_V[longer].sum():
            return self._best(self._dictionary.ids, self._after(f"{before}{begun} "), top, follows=True)
        return self._best(longer, probs_V, top)

    def _best(
        self, candidates: np.ndarray, probs_V: np.ndarray, top: int, *, follows: bool = False
    ) -> list[Suggestion]:
        """The most likely candidates. Of two equally likely words the more frequent one (the lower id) comes first."""
        if not len(candidates):
            return []
        probs_C = probs_V[candidates]
        total = float(probs_C.sum()) or 1.0
        if len(candidates) > top:  # sorting all candidates would take ten times as long
            enough = np.partition(probs_C, -top)[-top]
            candidates, probs_C = candidates[probs_C >= enough], probs_C[probs_C >= enough]
        best = candidates[np.argsort(-probs_C, kind="stable")[:top]]
        return [
            Suggestion(word=self.model.vocabulary.word(i), share=float(probs_V[i]) / total, follows=follows)
            for i in best.tolist()
        ]

    def _after(self, before: str) -> np.ndarray:
        """The probability of each word after a text of whole words, from its longest prefix with a cached state."""
        words = self.model.vocabulary.encode_words(self.model.tokenizer.split(before)).tolist()
        if len(words) >= 2 * WINDOW:
            words = words[len(words) // WINDOW * WINDOW - WINDOW :]
        with self._lock:
            known = len(words)
            while known >= 0 and tuple(words[:known]) not in self._states:
                known -= 1
            if known < 0:
                known = 0
                self._keep((), *self.model.stepper.read(None, BOS))
            state, probs_V = self._states[tuple(words[:known])]
            self._states.move_to_end(tuple(words[:known]))
            for i in range(known, len(words)):
                state, probs_V = self._keep(tuple(words[: i + 1]), *self.model.stepper.read(state, words[i]))
            return probs_V

    def _keep(self, words: tuple[int, ...], state: Any, scores_V: np.ndarray) -> tuple[Any, np.ndarray]:
        kept = self._states[words] = (state, probabilities(scores_V).astype(np.float32))
        while len(self._states) > MAX_STATES:
            self._states.popitem(last=False)
        return kept


def split_at_cursor(text: str) -> tuple[str, str]:
    """Split a text into the part before the word that is being typed, and that word.

    A new line starts a new message.

    >>> split_at_cursor("see you tom")
    ('see you ', 'tom')
    >>> split_at_cursor("see you ")
    ('see you ', '')
    """
    message = text[text.rfind("\n") + 1 :]
    at = len(message)
    while at and (message[at - 1] in "'’‘ʼ＇" or unicodedata.category(message[at - 1])[0] in "LMN"):
        at -= 1
    begun = message[at:].lstrip("'’‘ʼ＇")  # an opening quotation mark is not part of the word
    return message[: len(message) - len(begun)], begun


def folded(word: str) -> str:
    """The spelling by which words are compared: in small letters, with one kind of apostrophe."""
    return unicodedata.normalize("NFC", word).lower().translate(_APOSTROPHES)
