"""Tokenizers: split text into words, characters, or the tokens of any Hugging Face tokenizer.json, and join them again.

    >>> WordTokenizer().split("Don't panic!")
    ["don't", 'panic', '!']

Each tokenizer is a frozen dataclass. corpus.json contains its record (`tokenizer_to_table`), from which the same
tokenizer is restored, so that a trained model splits text exactly as its training corpus was split. The rules are
normalisers and pre-tokenizers of the Hugging Face library `tokenizers`. The paper uses words "after normalization".

To add a tokenizer, implement `Tokenizer` and list the class in `TOKENIZER_KINDS`.
"""

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol

from unheard import storage
from unheard.config import part_of_kind, table_from_part
from unheard.errors import InputError


class Tokenizer(Protocol):
    """Splits text into tokens. Implementations are hashable and picklable."""

    @property
    def is_subword(self) -> bool:
        """Whether tokens may be smaller than words."""
        ...

    def split(self, text: str) -> list[str]:
        """Return the tokens of a text."""
        ...

    def join(self, words: Iterable[str]) -> str:
        """Return the tokens as readable text. It may differ from the original text, for example in its spaces."""
        ...


# A word consists of letters, marks and digits. It may contain single apostrophes (don't) and zero-width joiners or
# non-joiners (Persian) between them.
_LETTERS = r"[\p{L}\p{M}\p{N}]+"
_WORD = rf"{_LETTERS}(?:['\x{{200c}}\x{{200d}}]{_LETTERS})*"
# Soft hyphens, zero-width spaces and marks of the writing direction. They are removed.
_INVISIBLE = r"[\x{ad}\x{200b}\x{200e}\x{200f}\x{202a}-\x{202e}\x{2060}-\x{2069}\x{feff}]"
_ASCII_WORD = re.compile(r"[A-Za-z0-9]+(?:'[A-Za-z0-9]+)*|.", re.DOTALL)
_SPACE = re.compile(r"[ \n]")
_NO_SPACE_BEFORE = frozenset(".,!?;:)]}%…")
_NO_SPACE_AFTER = frozenset("([{$#@")


# Scripts without spaces between words: Thai, Lao, Burmese, Khmer, Japanese kana, Chinese characters.
_UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]+"
)

LONGEST_WORD = 6
"""The largest number of characters that a word of such a script usually has."""


def unspaced_share(texts: Iterable[str]) -> float:
    """Return the fraction of letters and digits in long runs of a script that writes no spaces between words.

    A large fraction means that `WordTokenizer` would take whole sentences for words. A run is long if it has more than
    `LONGEST_WORD` characters. Text in which spaces were inserted between the words has short runs, which do not count.

    Example:
        >>> unspaced_share(["今日はとても良い天気です"]), unspaced_share(["今日 は 良い 天気", "fine weather"])
        (1.0, 0.0)
    """
    letters = unspaced = 0
    for text in texts:
        letters += sum(map(str.isalnum, text))
        unspaced += sum(sum(map(str.isalnum, run)) for run in _UNSPACED.findall(text) if len(run) > LONGEST_WORD)
    return unspaced / letters if letters else 0.0


def cut_text(text: str, max_chars: int) -> Iterator[str]:
    """Yield a text in pieces of about `max_chars` characters, each of which ends after a space or a line end.

    Words are never cut, so the words of the pieces are the words of the text. A piece is longer if no space follows.

    Args:
        text: The text.
        max_chars: A piece ends after the first space or line end at or after this many characters.

    Example:
        >>> list(cut_text("one two three", 6))
        ['one two ', 'three']
    """
    begin = 0
    while len(text) - begin > max_chars:
        mark = _SPACE.search(text, begin + max_chars)
        if mark is None:
            break
        yield text[begin : mark.end()]
        begin = mark.end()
    yield text[begin:]


@dataclass(frozen=True, kw_only=True)
class WordTokenizer:
    """Splits text into words. Each punctuation mark and each emoji is a separate token (docs/decisions/0021).

    Args:
        lowercase: Whether words are lower-cased.
        punctuation: "tokens" keeps punctuation marks and emojis as tokens, "drop" removes them.

    Example:
        >>> WordTokenizer(punctuation="drop").split("Well, OK!")
        ['well', 'ok']
        >>> WordTokenizer().join(["well", ",", "ok", "!"])
        'well, ok!'
    """

    lowercase: bool = True
    punctuation: Literal["tokens", "drop"] = "tokens"

    is_subword = False

    def split(self, text: str) -> list[str]:
        """Return the words of a text."""
        return [word for chunk in text.split() for word in self.split_chunk(chunk)]

    def split_chunk(self, chunk: str) -> list[str]:
        """Return the words of a chunk, which is a text without white space.

        `split` calls this function for each chunk of a text, so encoders can cache the words of a chunk.
        """
        if chunk.isascii() and chunk.isprintable():
            # For ASCII this gives the same result as `split_by_rules` in a fifth of the time; a test compares the two.
            words = _ASCII_WORD.findall(chunk.lower() if self.lowercase else chunk)
        else:
            words = self.split_by_rules(chunk)
        if self.punctuation == "drop":
            words = [w for w in words if any(c.isalnum() for c in w)]
        return words

    def split_ascii(self, chunks: list[str]) -> list[str]:
        """Return the words of many chunks of printable ASCII as one list, with "\\n" after the words of each chunk."""
        text = "\n".join([*chunks, ""])
        words = _ASCII_WORD.findall(text.lower() if self.lowercase else text)
        return words if self.punctuation == "tokens" else [w for w in words if w == "\n" or w[0].isalnum()]

    def split_by_rules(self, chunk: str) -> list[str]:
        """Split a chunk into words by the rules of the tokenizer, punctuation included.

        Slow; `split_ascii` is the fast version for many chunks of ASCII text.
        """
        normalise, cut = self._rules
        words = [word for word, _ in cut.pre_tokenize_str(normalise.normalize_str(chunk))]
        return [w for w in words if not w.isspace()]

    def join(self, words: Iterable[str]) -> str:
        """Return words as text with the usual spaces: none before a comma, for example, or after an opening bracket."""
        text, glue = "", ""
        for word in words:
            text += word if word in _NO_SPACE_BEFORE else glue + word
            glue = "" if word in _NO_SPACE_AFTER else " "
        return text

    @cached_property
    def _rules(self):
        """The normaliser, and the pre-tokenizer that cuts text into words and, outside words, visible characters."""
        from tokenizers import Regex, pre_tokenizers

        replaced = {
            r"\p{Cc}": " ",  # NUL and other control characters separate words
            r"[’‘ʼ＇]": "'",
            r"[“”„«»]": '"',
        }
        # \X matches one visible character, so an emoji of several code points, such as a flag, is one token. \s comes
        # first, since \X would join white space with a combining mark that follows it.
        cut = pre_tokenizers.Split(Regex(rf"{_WORD}|\s|\X"), behavior="isolated")
        return _normaliser(replaced, self.lowercase), cut


@dataclass(frozen=True, kw_only=True)
class CharacterTokenizer:
    """Splits text into visible characters, each of one or more code points. A run of white space is one space.

    Args:
        lowercase: Whether text is lower-cased.

    Example:
        >>> CharacterTokenizer().split("Hi  you")
        ['h', 'i', ' ', 'y', 'o', 'u']
    """

    lowercase: bool = True

    is_subword = True

    def split(self, text: str) -> list[str]:
        """Return the characters of a text."""
        normalise, cut = self._rules
        return [c for c, _ in cut.pre_tokenize_str(normalise.normalize_str(" ".join(text.split())))]

    def join(self, words: Iterable[str]) -> str:
        """Return the characters as one text."""
        return "".join(words)

    @cached_property
    def _rules(self):
        """The normaliser, and the pre-tokenizer that cuts text into visible characters."""
        from tokenizers import Regex, pre_tokenizers

        cut = pre_tokenizers.Split(Regex(r"\X"), behavior="isolated")
        return _normaliser({r"\p{Cc}+": " "}, self.lowercase), cut


def _normaliser(replaced: dict[str, str], lowercase: bool):
    """Return a normaliser to the form NFC that removes invisible characters.

    Args:
        replaced: Regular expressions, and the text that replaces each.
        lowercase: Whether text is lower-cased.
    """
    from tokenizers import Regex, normalizers

    patterns = {_INVISIBLE: "", **replaced}
    steps = [normalizers.NFC(), *(normalizers.Replace(Regex(pattern), text) for pattern, text in patterns.items())]
    if lowercase:
        # The result of lower-casing is not always in the form NFC.
        steps += [normalizers.Lowercase(), normalizers.NFC()]
    return normalizers.Sequence(steps)


@dataclass(frozen=True, kw_only=True)
class HuggingFaceTokenizer:
    """The tokenizer of a Hugging Face tokenizer.json. `read` makes one from a file.

    Args:
        definition: The whole content of the tokenizer.json. The store contains it, so the file is not needed later.
    """

    definition: str

    is_subword = True

    @classmethod
    def read(cls, path: str | Path) -> "HuggingFaceTokenizer":
        """Read a tokenizer.json.

        Raises:
            InputError: The file cannot be read, or is not a tokenizer.json.
        """
        try:
            definition = storage.regular_file(path).read_text(encoding="utf-8")
        except OSError as error:
            raise InputError(f"Cannot read the tokenizer {path}: {error.strerror}.") from None
        except UnicodeDecodeError:
            raise InputError(f"{path} is not a Hugging Face tokenizer.json: it is not UTF-8 text.") from None
        tokenizer = cls(definition=definition)
        try:
            _ = tokenizer.tokenizer
        except Exception as error:  # the library raises plain Exception
            raise InputError(f"{path} is not a Hugging Face tokenizer.json: {error}.") from None
        return tokenizer

    def split(self, text: str) -> list[str]:
        """Return the tokens of a text, without special tokens."""
        with _panic_is_an_error():
            return self.tokenizer.encode(text, add_special_tokens=False).tokens

    def join(self, words: Iterable[str]) -> str:
        """Return the tokens as text, by the decoder of the tokenizer; with spaces between them if it has no decoder."""
        words = list(words)
        return self.tokenizer.decoder.decode(words) if self.tokenizer.decoder is not None else " ".join(words)

    def words_by_id(self) -> list[str]:
        """Return the tokens of the tokenizer's vocabulary in the order of its ids, without added (special) tokens.

        For byte-pair encodings, tokens that were merged earlier, and so were more frequent, have smaller ids.
        """
        vocabulary = self.tokenizer.get_vocab(with_added_tokens=False)
        return sorted(vocabulary, key=lambda word: vocabulary[word])

    @cached_property
    def tokenizer(self):
        """The `tokenizers.Tokenizer` of the definition, with truncation and padding turned off."""
        from tokenizers import Tokenizer

        with _panic_is_an_error():
            tokenizer = Tokenizer.from_str(self.definition)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer


@contextlib.contextmanager
def _panic_is_an_error() -> Iterator[None]:
    """Raise `InputError` instead of a panic of the tokenizers library, which is not a subclass of `Exception`."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise InputError(f"The tokenizers library fails with this tokenizer.json: {error}.") from None


TOKENIZER_KINDS: dict[str, type] = {
    "words": WordTokenizer,
    "characters": CharacterTokenizer,
    "tokenizer": HuggingFaceTokenizer,
}
"""The tokenizers by the name of their kind, which is recorded in corpus.json."""


def choose_tokenizer(
    given: str | os.PathLike[str] | Tokenizer, punctuation: Literal["tokens", "drop"] = "tokens"
) -> Tokenizer:
    """Return the tokenizer for the argument `tokens` of `prepare`.

    Args:
        given: "words", "characters", the path of a tokenizer.json, or a tokenizer, which is returned unchanged.
        punctuation: For "words": "tokens" keeps punctuation marks as tokens, "drop" removes them.

    Raises:
        InputError: The file cannot be read, or is not a tokenizer.json.
    """
    if not isinstance(given, str | os.PathLike):
        return given
    if given == "words":
        return WordTokenizer(punctuation=punctuation)
    return CharacterTokenizer() if given == "characters" else HuggingFaceTokenizer.read(Path(given))


def tokenizer_from_table(table: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer of a record: the entry `tokens` of corpus.json, or tokens.json of a run folder."""
    return part_of_kind(TOKENIZER_KINDS, table, "tokens")


def tokenizer_to_table(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the record of a tokenizer: its kind and its fields. The inverse of `tokenizer_from_table`."""
    return table_from_part(tokenizer, TOKENIZER_KINDS)
