"""Suggest words with a model whose tokens are pieces of words, such as a fine-tuned language model.

    suggester = PieceSuggester(open_model("runs/smollm2"))
    suggester.suggest("see you tom")         # [Suggestion(word='tomorrow', share=0.97), ...]

Pieces that begin a word are the candidates, and the model ranks them. A piece that is only the beginning of a word is
continued by the most likely pieces until the word ends. A word at the cursor that no piece begins with is continued
from its own pieces. The scores after each text are cached in memory. A step of such a model takes about a tenth of a
second on a CPU, so nothing is computed ahead of the keys.
"""

import threading
from collections import OrderedDict
from collections.abc import Container, Mapping

import numpy as np

from unheard.corpus.tokenizers import HuggingFaceTokenizer
from unheard.corpus.vocabulary import SPECIALS
from unheard.deployment.keyboard.suggestions import (
    MAX_STATES,
    Dictionary,
    Suggester,
    Suggestion,
    folded,
    split_at_cursor,
)
from unheard.deployment.model import LoadedModel, probabilities, scores_after
from unheard.errors import ModelError

MAX_PIECES = 4
"""The largest number of pieces by which a begun word is continued."""
CONTEXT = 200
"""Of a long message only this many of the last tokens are read."""


class PieceSuggester:
    """The suggestions of one model with pieces of words. Several threads may use it; they take turns.

    Args:
        model: A model with a Hugging Face tokenizer.

    Raises:
        ModelError: The model has another kind of tokens.
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
        """The best words at the end of a text; see `Suggester.suggest`."""
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
            # A piece that is what was typed may be the whole word, or the beginning of a longer one.
            goes_on = {i: float(self._after((*words, i))[self._continues].sum()) for i in typed.tolist()}
            ends = sum(float(probs_V[i]) * (1 - share) for i, share in goes_on.items())
            weights = _weights(longer, probs_V) | {i: float(probs_V[i]) * share for i, share in goes_on.items()}
            if typed.size and ends >= sum(weights.values()):
                words, dictionary = self._read(f"{before}{begun} ")
                return self._best(words, _weights(dictionary.ids, self._after(words)), top, follows=True)
            return self._best(words, weights, top, must_go_on=goes_on)

    def suggest_ahead(self, text: str, top: int = 3) -> None:
        """None: the suggestions after the next key are not known ahead."""
        return

    def _read(self, before: str) -> tuple[tuple[int, ...], Dictionary]:
        """The tokens of a text of whole words, and the pieces with which the next word may begin.

        The space before a word is a part of its first piece."""
        text = before.rstrip(" ")
        is_spaced = text != before and bool(text)
        return self._tokens(text), self._after_space if is_spaced else self._at_start

    def _tokens(self, text: str) -> tuple[int, ...]:
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
        """Return the best words that begin with one of some pieces, each word once.

        Args:
            words: The token ids before the word.
            weights: The weight of each piece that the word may begin with.
            top: The number of words.
            follows: Whether the word comes after a finished word.
            begun: The part of the word that is typed already.
            must_go_on: Pieces that are not a whole word and need another piece.
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
        """The most likely word that begins with a piece."""
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
        """The probability of each piece after some tokens."""
        if words not in self._cache:
            self._cache[words] = probabilities(scores_after(self.model.stepper, words)).astype(np.float32)
        self._cache.move_to_end(words)
        while len(self._cache) > MAX_STATES:
            self._cache.popitem(last=False)
        return self._cache[words]


def _weights(candidates: np.ndarray, probs_V: np.ndarray) -> dict[int, float]:
    """The probability of each candidate."""
    return dict(zip(candidates.tolist(), probs_V[candidates].tolist(), strict=True))


def suggester_for(model: LoadedModel) -> Suggester | PieceSuggester:
    """The suggester that fits the tokens of a model."""
    return PieceSuggester(model) if model.tokenizer.is_subword else Suggester(model)


def _texts_of_pieces(model: LoadedModel) -> list[str]:
    """The text of each piece within a text, with the space before it; empty for special tokens.

    Some tokenizers drop the space at the beginning of a text, so each piece is read after another one."""
    pieces, join = model.vocabulary.words, model.tokenizer.join
    front = next(piece for piece in pieces[len(SPECIALS) :] if piece.isalnum())
    length = len(join([front]))
    return [""] * len(SPECIALS) + [join([front, piece])[length:] for piece in pieces[len(SPECIALS) :]]


def _is_word(text: str) -> bool:
    return bool(text) and all(c.isalnum() or c in "'’" for c in text) and any(c.isalnum() for c in text)
