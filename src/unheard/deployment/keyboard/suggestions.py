"""Suggest words for a text: completions of the word that is being typed, or next words after a finished word.

    suggester = suggester_for(open_model("runs/private"))
    suggester.suggest("see you tom")         # [Suggestion(word='tomorrow', share=0.93), ...]

`Suggester` is for models whose tokens are whole words. The candidates are the words of the vocabulary that begin with
the typed letters, and the model ranks them. If the typed word is itself a word, and the model finds it at least as
likely as all longer words together, it counts as finished, and the suggestions are the next words. The model's state
after each word is cached in memory, so most keys need no step of the model, and some need one. `suggest_ahead` computes
the suggestions for every key that may follow, so that the page can show them without waiting for the server. It needs
one more step for each key that finishes a word.

`PieceSuggester` is for models whose tokens are pieces of words, such as fine-tuned language models. The candidates are
the pieces that a word can begin with, and the model ranks them. A piece that is only the beginning of a word is
continued with the most likely pieces until the word ends. If no piece begins with the typed letters, the word is
continued from the pieces into which the tokenizer splits these letters. The probabilities after each text are cached in
memory. A step of such a model takes about a tenth of a second on a CPU, so there is no `suggest_ahead`.
"""

import bisect
import threading
import unicodedata
from collections import OrderedDict
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from unheard.corpus.tokenizers import HuggingFaceTokenizer
from unheard.corpus.vocabulary import BOS, SPECIALS
from unheard.deployment.model import LoadedModel, probabilities, scores_after
from unheard.errors import ModelError

MAX_STATES = 128
"""The number of texts for which a suggester caches the model's state and the probability of each word. The
probabilities take 5 MB at the paper's size."""
WINDOW = 100
"""`Suggester` reads only the last 100 to 199 words of a long message. It starts at a multiple of 100, so that the start
seldom moves and most keys find a cached state."""
MAX_PIECES = 4
"""The largest number of pieces with which `PieceSuggester` continues the beginning of a word."""
CONTEXT = 200
"""`PieceSuggester` reads only this many of the last tokens of a long message."""
_APOSTROPHES = str.maketrans("’‘ʼ＇", "''''")


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    """A suggested word."""

    word: str
    share: float
    """The probability of the word, divided by the sum of the probabilities of all candidates."""
    follows: bool = False
    """Whether the word follows the finished word at the cursor, after a space. If not, it completes the word that is
    being typed, or begins a new word."""


class Dictionary:
    """An index of words by spelling. It finds the words that begin with given letters.

    Args:
        words: The words by token id.

    Attributes:
        spellings: The spellings of the words (`folded`), sorted.
        ids: The token ids of all words, sorted.
    """

    def __init__(self, words: Mapping[int, str]) -> None:
        by_spelling = sorted((folded(word), i) for i, word in words.items())
        self.spellings = [spelling for spelling, _ in by_spelling]
        self._ids_by_spelling = np.array([i for _, i in by_spelling], dtype=np.int64)
        self.ids = np.array(sorted(words), dtype=np.int64)

    def beginning_with(self, begun: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of the words that equal the typed letters, and the ids of longer words that begin with them.

        Args:
            begun: The typed letters. Case and the kind of apostrophe do not matter.
        """
        front = folded(begun)
        first = bisect.bisect_left(self.spellings, front)
        last = bisect.bisect_left(self.spellings, front + "\U0010ffff", lo=first)
        longer = first
        while longer < last and self.spellings[longer] == front:
            longer += 1
        return self._ids_by_spelling[first:longer], self._ids_by_spelling[longer:last]


class Suggester:
    """Suggests words by a model whose tokens are whole words. Several threads may use it at the same time.

    Args:
        model: A model whose tokens are whole words.

    Raises:
        ModelError: The tokens of the model may be smaller than words.
    """

    def __init__(self, model: LoadedModel) -> None:
        if model.tokenizer.is_subword:
            raise ModelError(
                f"{model.name} reads pieces smaller than words; `Suggester` needs whole words. Use `PieceSuggester`."
            )
        self.model = model
        self._states: OrderedDict[tuple[int, ...], tuple[Any, np.ndarray]] = OrderedDict()
        self._lock = threading.Lock()
        words = enumerate(model.vocabulary.words)
        usable = {i: word for i, word in words if i >= len(SPECIALS) and any(c.isalnum() for c in word)}
        self._dictionary = Dictionary(usable)
        self._letters = sorted({letter for spelling in self._dictionary.spellings for letter in spelling})

    def suggest(self, text: str, top: int = 3) -> list[Suggestion]:
        """Return the best words at the cursor, most likely first.

        Args:
            text: The text up to the cursor. If it ends inside a word, the suggestions complete that word. If it ends
                with a finished word, they are the next words.
            top: The largest number of suggestions.
        """
        before, begun = split_at_cursor(text)
        return self._at(before, begun, top)

    def suggest_ahead(self, text: str, top: int = 3) -> dict[str, list[Suggestion]]:
        """Return the suggestions after one more key, for every key that has suggestions.

        Args:
            text: The text up to the cursor.
            top: The largest number of suggestions for each key.

        Returns:
            The suggestions by key. The keys are the letters with which a word can continue or begin and, if a word is
            being typed, the space.
        """
        before, begun = split_at_cursor(text)
        by_key = {letter: self._at(before, begun + letter, top) for letter in self._letters}
        if begun:
            by_key[" "] = self._best(self._dictionary.ids, self._after(f"{before}{begun} "), top)
        return {key: suggestions for key, suggestions in by_key.items() if suggestions}

    def _at(self, before: str, begun: str, top: int) -> list[Suggestion]:
        """Return the best words at the cursor.

        Args:
            before: The text before the word that is being typed.
            begun: The letters of that word typed so far; may be empty.
            top: The largest number of suggestions.
        """
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
        """Return the most likely candidates. Of two equally likely words the one with the lower id comes first.

        Args:
            candidates: The ids of the candidates.
            probs_V: The probability of each word.
            top: The largest number of suggestions.
            follows: The value of `Suggestion.follows`.
        """
        if not len(candidates):
            return []
        probs_C = probs_V[candidates]
        total = float(probs_C.sum()) or 1.0
        if len(candidates) > top:  # to sort all candidates would take ten times as long
            enough = np.partition(probs_C, -top)[-top]
            candidates, probs_C = candidates[probs_C >= enough], probs_C[probs_C >= enough]
        best = candidates[np.argsort(-probs_C, kind="stable")[:top]]
        return [
            Suggestion(word=self.model.vocabulary.word(i), share=float(probs_V[i]) / total, follows=follows)
            for i in best.tolist()
        ]

    def _after(self, before: str) -> np.ndarray:
        """Return the probability of each word after a text of whole words.

        The computation starts from the longest prefix of the text whose state is cached.
        """
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
        """Cache the state and the probabilities after some words, and return both. Drop the least recently used."""
        kept = self._states[words] = (state, probabilities(scores_V).astype(np.float32))
        while len(self._states) > MAX_STATES:
            self._states.popitem(last=False)
        return kept


class PieceSuggester:
    """Suggests words by a model whose tokens are pieces of words. Threads may share it; one computes at a time.

    Args:
        model: A model with a Hugging Face tokenizer.

    Raises:
        ModelError: The model has another tokenizer, for example one whose tokens are characters.
    """

    def __init__(self, model: LoadedModel) -> None:
        if not isinstance(model.tokenizer, HuggingFaceTokenizer):
            raise ModelError(
                f"{model.name} reads characters, and this keyboard suggests whole words. "
                "`unheard predict` suggests characters. For the keyboard prepare the corpus with the tokenizer.json of a "
                "language model (--tokens FILE) or, if the language puts spaces between words, with --tokens words."
            )
        self.model = model
        self._lock = threading.RLock()
        self._cache: OrderedDict[tuple[int, ...], np.ndarray] = OrderedDict()
        self._texts = _texts_of_pieces(model)
        words = {i: text.removeprefix(" ") for i, text in enumerate(self._texts) if _is_word(text.removeprefix(" "))}
        self._continues = np.zeros(len(self._texts), dtype=bool)
        self._continues[[i for i in words if not self._texts[i].startswith(" ")]] = True
        self._after_space = Dictionary({i: word for i, word in words.items() if not self._continues[i]})
        self._at_start = Dictionary({i: word for i, word in words.items() if self._continues[i] and word[0].isalnum()})

    def suggest(self, text: str, top: int = 3) -> list[Suggestion]:
        """Return the best words at the cursor, most likely first (see `Suggester.suggest`)."""
        before, begun = split_at_cursor(text)
        with self._lock:
            words, dictionary = self._read(before)
            probs_V = self._after(words)
            if not begun:
                return self._best(words, _weights(dictionary.ids, probs_V), top)
            typed, longer = dictionary.beginning_with(begun)
            if not len(typed) and not len(longer):
                words = self._tokens(f"{before}{begun}")
                continuing = np.flatnonzero(self._continues)
                return self._best(words, _weights(continuing, self._after(words)), top, begun=begun)
            # A piece that equals the typed letters may be the whole word or the beginning of a longer word. `goes_on`
            # has the probability that the word continues after such a piece.
            goes_on = {i: float(self._after((*words, i))[self._continues].sum()) for i in typed.tolist()}
            ends = sum(float(probs_V[i]) * (1 - share) for i, share in goes_on.items())
            weights = _weights(longer, probs_V) | {i: float(probs_V[i]) * share for i, share in goes_on.items()}
            if typed.size and ends >= sum(weights.values()):
                words, dictionary = self._read(f"{before}{begun} ")
                return self._best(words, _weights(dictionary.ids, self._after(words)), top, follows=True)
            return self._best(words, weights, top, must_go_on=goes_on)

    def suggest_ahead(self, text: str, top: int = 3) -> None:
        """Return None: a step takes too long to compute the suggestions for every key that may follow."""
        return

    def _read(self, before: str) -> tuple[tuple[int, ...], Dictionary]:
        """Return the tokens of a text of whole words, and the pieces with which the next word may begin.

        A space before a word is part of the first piece of the word. So trailing spaces are removed from the text, and
        the pieces for the next word are those that begin with a space.
        """
        text = before.rstrip(" ")
        is_spaced = text != before and bool(text)
        return self._tokens(text), self._after_space if is_spaced else self._at_start

    def _tokens(self, text: str) -> tuple[int, ...]:
        """Return the last `CONTEXT` token ids of a text."""
        return tuple(self.model.vocabulary.encode_words(self.model.tokenizer.split(text)).tolist()[-CONTEXT:])

    def _best(
        self,
        words: tuple[int, ...],
        weights: Mapping[int, float],
        top: int,
        *,
        follows: bool = False,
        begun: str = "",
        must_go_on: Container[int] = (),
    ) -> list[Suggestion]:
        """Return the best words that begin with one of the given pieces. Each word appears once.

        Args:
            words: The token ids of the text before these pieces.
            weights: The weight of each piece, by token id; a larger weight comes first.
            top: The largest number of suggestions.
            follows: The value of `Suggestion.follows`.
            begun: Typed letters to put in front of each word, if `words` already includes them.
            must_go_on: The ids of pieces that equal the typed letters, so that at least one more piece must follow.
        """
        total = sum(weights.values()) or 1.0
        best: dict[str, Suggestion] = {}
        for i in sorted(weights, key=lambda i: (-weights[i], i))[: 2 * top]:
            word = begun + self._continued(words, i, must_go_on=i in must_go_on)
            if folded(word) not in best:
                best[folded(word)] = Suggestion(word=word, share=weights[i] / total, follows=follows)
            if len(best) == top:
                break
        return list(best.values())

    def _continued(self, words: tuple[int, ...], piece: int, *, must_go_on: bool) -> str:
        """Return a word that begins with a piece, continued with the most likely piece at each step until it ends.

        Args:
            words: The token ids before the piece.
            piece: The id of the piece.
            must_go_on: Whether at least one more piece must follow.
        """
        text = self._texts[piece].removeprefix(" ")
        for number in range(MAX_PIECES):
            words = (*words, piece)
            probs_V = self._after(words)
            piece = int((np.where(self._continues, probs_V, 0) if must_go_on and number == 0 else probs_V).argmax())
            if not self._continues[piece]:
                break
            text += self._texts[piece]
        return text

    def _after(self, words: tuple[int, ...]) -> np.ndarray:
        """Return the probability of each piece after some tokens, from the cache if it is there."""
        if words not in self._cache:
            self._cache[words] = probabilities(scores_after(self.model.stepper, words)).astype(np.float32)
        self._cache.move_to_end(words)
        while len(self._cache) > MAX_STATES:
            self._cache.popitem(last=False)
        return self._cache[words]


def _weights(candidates: np.ndarray, probs_V: np.ndarray) -> dict[int, float]:
    """Return the probability of each candidate, by token id."""
    return dict(zip(candidates.tolist(), probs_V[candidates].tolist(), strict=True))


def _texts_of_pieces(model: LoadedModel) -> list[str]:
    """Return the text of each piece inside a text, including a space before it; empty for special tokens.

    Some tokenizers drop the space at the beginning of a text. So each piece is joined to another piece, whose text is
    then removed.
    """
    pieces, join = model.vocabulary.words, model.tokenizer.join
    front = next(piece for piece in pieces[len(SPECIALS) :] if piece.isalnum())
    length = len(join([front]))
    return [""] * len(SPECIALS) + [join([front, piece])[length:] for piece in pieces[len(SPECIALS) :]]


def _is_word(text: str) -> bool:
    """Whether a text consists of letters, digits and apostrophes, and not of apostrophes alone."""
    return bool(text) and all(c.isalnum() or c in "'’" for c in text) and any(c.isalnum() for c in text)


def suggester_for(model: LoadedModel) -> Suggester | PieceSuggester:
    """Return the suggester that fits the tokens of a model.

    Raises:
        ModelError: The tokens of the model are characters, from which no suggester makes words.
    """
    return PieceSuggester(model) if model.tokenizer.is_subword else Suggester(model)


def split_at_cursor(text: str) -> tuple[str, str]:
    """Split the last line of a text into the part before the word that is being typed, and that word.

    A new line starts a new message, so earlier lines are dropped.

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
    """Return the spelling by which words are compared: lower case, Unicode form NFC, and one kind of apostrophe."""
    return unicodedata.normalize("NFC", word).lower().translate(_APOSTROPHES)
