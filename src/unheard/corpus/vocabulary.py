"""A vocabulary: a list of words by rank that gives each word its id. A word outside the list has the id UNK.

    >>> vocabulary = Vocabulary.of(["the", "cat"])
    >>> vocabulary.id("cat"), vocabulary.id("dog"), vocabulary.word(3)
    (4, 2, 'the')

Ids 0, 1 and 2 are BOS, EOS and UNK in every store and count in the size: the paper's 10,000 words are the rows of one
embedding, including these three. `public_vocabulary` is the default: the most frequent words of a language, from the
package `wordfreq`. It is built from public text, so it has no privacy cost. `vocabulary_sources` has the alternatives.
"""

import hashlib
import itertools
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np

from unheard import storage
from unheard.config import nearest
from unheard.corpus.tokenizers import Tokenizer, WordTokenizer
from unheard.errors import CorpusCorrupt, CorpusMissing, InputError, InvalidValue

BOS, EOS, UNK = 0, 1, 2
SPECIALS = ("<BOS>", "<EOS>", "<UNK>")

# Punctuation marks per 1,000 English words in print (V. Cook, "Frequencies for English punctuation marks", 2013); the
# values from the brackets on are estimates. `wordfreq` counts words only: without this table a public vocabulary would
# have no full stop.
_MARKS_PER_1000_WORDS = {
    ".": 65.3, ",": 61.6, '"': 26.7, "'": 24.3, "-": 15.3, "?": 5.6, ":": 3.4, "!": 3.3, ";": 3.2,
    "(": 2.0, ")": 2.0, "/": 1.0, "&": 0.5, "$": 0.5, "%": 0.5, "*": 0.3, "#": 0.3, "@": 0.3, "+": 0.2, "=": 0.2,
    "[": 0.2, "]": 0.2, "<": 0.1, ">": 0.1, "~": 0.1, "^": 0.1, "_": 0.1, "|": 0.05, "\\": 0.05, "{": 0.02, "}": 0.02,
}  # fmt: skip
# Marks of other scripts, with the frequency of the English mark that each stands for. English keeps its list as it is.
_EAST_ASIAN = {
    "。": ".", "、": ",", "，": ",", "？": "?", "！": "!", "「": "(", "」": ")", "『": "[", "』": "]", "（": "(", "）": ")",
    "：": ":", "；": ";", "・": "/", "～": "~", "《": "[", "》": "]", "【": "[", "】": "]", "〜": "~",
}  # fmt: skip
_ARABIC = {"،": ",", "؟": "?", "؛": ";", "۔": "["}
_MARKS_OF_LANGUAGE = {
    "ja": _EAST_ASIAN, "zh": _EAST_ASIAN, "ko": _EAST_ASIAN, "ar": _ARABIC, "fa": _ARABIC, "ur": _ARABIC | {"۔": "."},
    "es": {"¿": "?", "¡": "!"}, "ca": {"·": ";"}, "el": {"·": ";"}, "hi": {"।": ".", "॥": "["}, "bn": {"।": ".", "॥": "["},
    "he": {"־": "-", "״": '"', "׳": "'"},
}  # fmt: skip
_QUOTES = {"«": "[", "»": "[", "„": "[", "“": "[", "”": "[", "‘": "[", "’": "[", "–": ";", "—": ";", "…": ":"}


class Vocabulary:
    """Words in the order of their ids, the special words first.

    Args:
        words: All words, beginning with `SPECIALS`.

    Raises:
        InvalidValue: The special words are missing, or a word occurs twice.
    """

    def __init__(self, words: Iterable[str]) -> None:
        self.words: tuple[str, ...] = tuple(words)
        if self.words[: len(SPECIALS)] != SPECIALS:
            raise InvalidValue(f"A vocabulary begins with {', '.join(SPECIALS)}, not with {self.words[:3]}.")
        if len(self._ids) != len(self.words):
            repeated = next(w for i, w in enumerate(self.words) if self._ids[w] != i)
            raise InvalidValue(f"The word {repeated!r} stands twice in the vocabulary: each word has one id.")

    @classmethod
    def of(cls, words: Iterable[str]) -> "Vocabulary":
        """Make a vocabulary of words by rank, without the special words."""
        return cls((*SPECIALS, *words))

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {word: i for i, word in enumerate(self.words)}

    def __len__(self) -> int:
        return len(self.words)

    def __contains__(self, word: str) -> bool:
        return word in self._ids

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Vocabulary) and other.words == self.words

    def __hash__(self) -> int:
        return hash(self.words)

    def id(self, word: str) -> int:
        """Return the id of a word, or UNK. The text "<BOS>" is an unknown word, never the special word."""
        i = self._ids.get(word, UNK)
        return i if i > UNK else UNK

    def encode_words(self, words: Sequence[str]) -> np.ndarray:
        """Return the ids of words, int64."""
        return np.fromiter((self.id(w) for w in words), dtype=np.int64, count=len(words))

    @property
    def digest(self) -> str:
        """A hash of the words in their order, by which a store detects that its word list was replaced."""
        return hashlib.sha256("\n".join(_one_line(w) for w in self.words).encode("utf-8", "surrogatepass")).hexdigest()

    def word(self, i: int) -> str:
        """Return the word of an id."""
        return self.words[i]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the words to a file, one per line (atomic replace)."""
        storage.replace_file(Path(path), "".join(f"{_one_line(w)}\n" for w in self.words).encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Vocabulary":
        """Read a file written by `save`; raises `CorpusCorrupt` for other files."""
        words = read_word_list(path)
        if tuple(words[: len(SPECIALS)]) != SPECIALS:
            raise CorpusCorrupt(f"{path} does not begin with {', '.join(SPECIALS)}: it is no store's vocabulary.")
        return cls(words)


def read_word_list(path: str | os.PathLike[str]) -> list[str]:
    """Read a file with one word per line."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise CorpusMissing(f"No word list at {path}.") from None
    except UnicodeDecodeError:
        raise InputError(f"{path} is not UTF-8 text: save the word list as UTF-8, one word on each line.") from None
    lines = text.split("\n")
    return [_from_one_line(line.removesuffix("\r")) for line in (lines[:-1] if lines[-1] == "" else lines)]


def vocabulary_from_file(path: str | os.PathLike[str], size: int | None = None) -> Vocabulary:
    """Make a vocabulary of a word list.

    Args:
        path: A file with one word per line, most frequent first, with or without the special words.
        size: The largest number of words, including BOS, EOS and UNK; None takes all.

    Raises:
        InputError: The file is empty or not UTF-8.
        CorpusMissing: There is no such file.
    """
    words = [w for w in read_word_list(path) if w and w not in SPECIALS]
    words = list(dict.fromkeys(words))
    if not words:
        raise InputError(f"The word list {path} is empty: give one word on each line, most frequent first.")
    return Vocabulary.of(words if size is None else words[: size - len(SPECIALS)])


def public_vocabulary(size: int = 10_000, language: str = "en", tokenizer: Tokenizer | None = None) -> Vocabulary:
    """Make a vocabulary of the most frequent words of a language. It is built from public text and has no privacy cost.

    Args:
        size: The number of words, including BOS, EOS and UNK.
        language: A language code of `wordfreq`, such as "en".
        tokenizer: Only words that this tokenizer produces are taken; words are counted in pieces for a subword
            tokenizer.

    Raises:
        InvalidValue: The language is unknown or the size too small.
    """
    import wordfreq

    tokenizer = tokenizer or WordTokenizer()
    known = wordfreq.available_languages()
    if language not in known:
        raise InvalidValue(f"No public word list for language '{language}'.{nearest(language, known)}")
    if size <= len(SPECIALS):
        raise InvalidValue(f"A vocabulary of {size} rows has no room for words: {len(SPECIALS)} are BOS, EOS and UNK.")
    if tokenizer.is_subword:
        weights = _piece_weights(_frequencies(language), tokenizer)
        ranked = _by_weight(weights)
    else:
        ranked = _words_by_frequency(language)
    kept = []
    for word in ranked:
        if len(kept) == size - len(SPECIALS):
            break
        # A word that the tokenizer never produces would be useless. (It produces a space only between other tokens.)
        if _is_a_word(word) and (tokenizer.split(word) == [word] or word == " "):
            kept.append(word)
    return Vocabulary.of(kept)


def likely_language(texts: Iterable[str]) -> str | None:
    """Return the language whose most frequent words cover most of a text, as a code of `wordfreq`.

    Returns None if no language covers a tenth of the words. Japanese and Chinese are told apart by their characters.

    Example:
        >>> likely_language(["Das ist nicht das, was ich mit dem Wort meinte."]), likely_language(["xyzzy plugh"])
        ('de', None)
    """
    import wordfreq

    texts = list(texts)
    characters = Counter(itertools.chain.from_iterable(texts))
    kana = sum(n for c, n in characters.items() if "\u3040" <= c <= "\u30ff")
    han = sum(n for c, n in characters.items() if "\u3400" <= c <= "\u9fff")
    if 2 * (kana + han) > sum(n for c, n in characters.items() if c.isalpha()):
        return "ja" if 10 * kana > han else "zh"
    words = Counter(w for text in texts for w in WordTokenizer(punctuation="drop").split(text))
    covered = {
        language: sum(words[w] for w in set(wordfreq.top_n_list(language, 200, wordlist="small")))
        for language in sorted(wordfreq.available_languages())
    }
    best = max(covered, key=lambda language: covered[language])
    return best if 10 * covered[best] > words.total() else None


def _frequencies(language: str) -> dict[str, float]:
    """The frequency of each word and punctuation mark of a language."""
    import wordfreq

    marks = {mark: count / 1000.0 for mark, count in _MARKS_PER_1000_WORDS.items()}
    if language != "en":
        others = _QUOTES | _MARKS_OF_LANGUAGE.get(language, {})
        marks |= {mark: marks[english] for mark, english in others.items()}
        return marks | wordfreq.get_frequency_dict(language) | marks  # `wordfreq` counts "_" in words alone
    return marks | wordfreq.get_frequency_dict(language)


def _by_weight(weights: dict[str, float]) -> tuple[str, ...]:
    return tuple(sorted(weights, key=lambda word: (-weights[word], word)))


@lru_cache(maxsize=2)
def _words_by_frequency(language: str) -> tuple[str, ...]:
    """All words of a language, most frequent first; cached, since sorting 300,000 of them takes most of the time."""
    return _by_weight(_frequencies(language))


def _piece_weights(words: dict[str, float], tokenizer: Tokenizer) -> dict[str, float]:
    """The frequency of each subword token in these words, if one word in twenty begins with a capital."""
    weights: dict[str, float] = {" ": sum(words.values())}
    for word, weight in itertools.islice(words.items(), 20_000):  # the others are one word in a hundred
        for form, share in ((word, 0.95), (word.capitalize(), 0.05)):
            for piece in tokenizer.split(form):
                weights[piece] = weights.get(piece, 0.0) + weight * share
    return weights


def _is_a_word(word: str) -> bool:
    """False for the patterns under which `wordfreq` counts numbers ("a00")."""
    return "00" not in word and word not in SPECIALS


def _one_line(word: str) -> str:
    return word.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")


def _from_one_line(line: str) -> str:
    if "\\" not in line:
        return line
    parts = line.split("\\\\")
    return "\\".join(part.replace("\\n", "\n").replace("\\r", "\r") for part in parts)
