"""Three suggestions after each key: the word being typed is completed from the dictionary, the next one comes from the model.

In: the text up to the cursor. Out: words with their shares. Either way the model ranks them. Its state after each word is
kept for a while, in memory only, so that a key costs one step of the model at most and not the whole text again. And with each
answer goes one for each key that may come next: the page has it before the key is pressed.
"""

import bisect
import threading
import unicodedata
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np

from unheard.corpus.vocabulary import BOS, SPECIALS
from unheard.deployment.model import LoadedModel, probabilities
from unheard.errors import ModelError

REMEMBERED = 128
"""States kept, with a score for each word of the dictionary: 5 MB at the paper's size."""
WINDOW = 100
"""A long message is read from its last whole hundred of words on, so at most 200: most keys still find their state."""
_APOSTROPHES = str.maketrans("’‘ʼ＇", "''''")


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    """A word, and how likely the model holds it among all words that could stand here."""

    word: str
    share: float


class Suggester:
    """One model's suggestions. Many threads may ask at once; they wait for each other."""

    def __init__(self, model: LoadedModel) -> None:
        if model.tokens.is_subword:
            raise ModelError(
                f"{model.name} reads pieces smaller than words, and this keyboard suggests whole words. "
                "Prepare the corpus with --tokens words for a model to type on."
            )
        self.model = model
        self._states: OrderedDict[tuple[int, ...], tuple[Any, np.ndarray]] = OrderedDict()
        self._one_at_a_time = threading.Lock()
        words = model.vocabulary.words
        usable = [i for i in range(len(SPECIALS), len(words)) if any(c.isalnum() for c in words[i])]
        by_spelling = sorted((_folded(words[i]), i) for i in usable)
        self._spellings = [spelling for spelling, _ in by_spelling]
        self._ids_by_spelling = np.array([i for _, i in by_spelling], dtype=np.int64)
        self._usable = np.array(usable, dtype=np.int64)
        self._letters = sorted({letter for spelling in self._spellings for letter in spelling})

    def suggest(self, text: str, top: int = 3) -> list[Suggestion]:
        """The best words for this place; fewer than `top` if the dictionary has no more that begin so."""
        before, begun = split_at_cursor(text)
        return self._best(self._beginning_with(begun) if begun else self._usable, self._after(before), top)

    def ahead(self, text: str, top: int = 3) -> dict[str, list[Suggestion]]:
        """The same for this text and one more key: each letter that some word goes on with, and the space after a word."""
        before, begun = split_at_cursor(text)
        probs_V = self._after(before)
        found = {letter: self._best(self._beginning_with(begun + letter), probs_V, top) for letter in self._letters}
        if begun:
            found[" "] = self._best(self._usable, self._after(f"{before}{begun} "), top)
        return {key: suggestions for key, suggestions in found.items() if suggestions}

    def _best(self, candidates: np.ndarray, probs_V: np.ndarray, top: int) -> list[Suggestion]:
        """Stable: of two equal words the more frequent one (the lower id) comes first, every time."""
        if not len(candidates):
            return []
        probs_C = probs_V[candidates]
        whole = float(probs_C.sum()) or 1.0
        if len(candidates) > top:  # sorting all of them would take ten times as long
            enough = np.partition(probs_C, -top)[-top]
            candidates, probs_C = candidates[probs_C >= enough], probs_C[probs_C >= enough]
        best = candidates[np.argsort(-probs_C, kind="stable")[:top]]
        return [Suggestion(word=self.model.vocabulary.word(i), share=float(probs_V[i]) / whole) for i in best.tolist()]

    def _beginning_with(self, begun: str) -> np.ndarray:
        """The dictionary's words that go on from here; the very word that is typed already is no suggestion."""
        front = _folded(begun)
        first = bisect.bisect_left(self._spellings, front)
        last = bisect.bisect_left(self._spellings, front + "\U0010ffff", lo=first)
        while first < last and self._spellings[first] == front:
            first += 1
        return self._ids_by_spelling[first:last]

    def _after(self, before: str) -> np.ndarray:
        """Probabilities of every word after a text of whole words, from its longest beginning whose state is still known."""
        words = self.model.vocabulary.encode_words(self.model.tokens.split(before)).tolist()
        if len(words) >= 2 * WINDOW:
            words = words[len(words) // WINDOW * WINDOW - WINDOW :]
        with self._one_at_a_time:
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
        while len(self._states) > REMEMBERED:
            self._states.popitem(last=False)
        return kept


def split_at_cursor(text: str) -> tuple[str, str]:
    """What is written, and the word that is being written (empty after a space or a mark). A new line is a new message."""
    message = text[text.rfind("\n") + 1 :]
    at = len(message)
    while at and (message[at - 1] in "'’‘ʼ＇" or unicodedata.category(message[at - 1])[0] in "LMN"):
        at -= 1
    begun = message[at:].lstrip("'’‘ʼ＇")  # a quotation mark before a word is not part of it
    return message[: len(message) - len(begun)], begun


def _folded(word: str) -> str:
    return unicodedata.normalize("NFC", word).lower().translate(_APOSTROPHES)
