"""Tokenizers: split text into words, characters, or the tokens of any Hugging Face tokenizer.json, and join them again.

    >>> WordTokenizer().split("Don't panic!")
    ["don't", 'panic', '!']

Each tokenizer is a frozen dataclass. Its record in corpus.json (`tokenizer_to_table`) restores it anywhere, so that a
trained model splits text exactly as its training corpus was split. The rules are normalisers and pre-tokenizers of the
Hugging Face library `tokenizers`. The paper uses words "after normalization".

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
        """Return readable text for tokens."""
        ...


# A word: letters, marks and digits, joined by apostrophes (don't) or by zero-width (non-)joiners (Persian).
_LETTERS = r"[\p{L}\p{M}\p{N}]+"
_WORD = rf"{_LETTERS}(?:['\x{{200c}}\x{{200d}}]{_LETTERS})*"
_INVISIBLE = r"[\x{ad}\x{200b}\x{200e}\x{200f}\x{202a}-\x{202e}\x{2060}-\x{2069}\x{feff}]"  # directions, soft hyphens
_ASCII_WORD = re.compile(r"[A-Za-z0-9]+(?:'[A-Za-z0-9]+)*|.", re.DOTALL)
_SPACE = re.compile(r"[ \n]")
_NO_SPACE_BEFORE = frozenset(".,!?;:)]}%…")
_NO_SPACE_AFTER = frozenset("([{$#@")


# Scripts without spaces between words: Thai, Lao, Burmese, Khmer, Japanese kana, Chinese characters.
_UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]+"
)


def unspaced_share(texts: Iterable[str], longest_word: int = 6) -> float:
    """Return the share of letters that are in runs, longer than a word, of a script without spaces between words.

    Text in which such words are separated by spaces already has short runs.

    Args:
        texts: The texts.
        longest_word: Runs of at most this many characters count as words.

    Example:
        >>> unspaced_share(["今日はとても良い天気です"]), unspaced_share(["今日 は 良い 天気", "fine weather"])
        (1.0, 0.0)
    """
    letters = unspaced = 0
    for text in texts:
        letters += sum(map(str.isalnum, text))
        unspaced += sum(sum(map(str.isalnum, run)) for run in _UNSPACED.findall(text) if len(run) > longest_word)
    return unspaced / letters if letters else 0.0


def cut_text(text: str, max_chars: int) -> Iterator[str]:
    """Cut a text after a space or a line end into pieces of about `max_chars` characters.

    The words of the pieces are the words of the text. A run without spaces stays whole.

    Args:
        text: The text.
        max_chars: A piece ends at the first space or line end from here on.

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
    """Words in lower case; each punctuation mark and each emoji is a token of its own (docs/decisions/0021).

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
        """Return the words of a text without white space.

        `split` works chunk by chunk, so encoders can cache the chunks.
        """
        if chunk.isascii() and chunk.isprintable():
            # The same result as `split_by_rules` for ASCII, five times as fast; a test compares the two.
            words = _ASCII_WORD.findall(chunk.lower() if self.lowercase else chunk)
        else:
            words = self.split_by_rules(chunk)
        if self.punctuation == "drop":
            words = [w for w in words if any(c.isalnum() for c in w)]
        return words

    def split_ascii(self, chunks: list[str]) -> list[str]:
        """Return the words of many printable ASCII chunks at once, with "\\n" after the words of each."""
        text = "\n".join([*chunks, ""])
        words = _ASCII_WORD.findall(text.lower() if self.lowercase else text)
        return words if self.punctuation == "tokens" else [w for w in words if w == "\n" or w[0].isalnum()]

    def split_by_rules(self, chunk: str) -> list[str]:
        """The definition of a word: normalise, then split."""
        normalise, cut = self._rules
        words = [word for word, _ in cut.pre_tokenize_str(normalise.normalize_str(chunk))]
        return [w for w in words if not w.isspace()]

    def join(self, words: Iterable[str]) -> str:
        """Join words as people type them: no space before a comma, none after an opening bracket."""
        text, glue = "", ""
        for word in words:
            text += word if word in _NO_SPACE_BEFORE else glue + word
            glue = "" if word in _NO_SPACE_AFTER else " "
        return text

    @cached_property
    def _rules(self):
        """Cut text into words, and into visible characters where there is no word."""
        from tokenizers import Regex, normalizers, pre_tokenizers

        steps = [
            normalizers.NFC(),
            normalizers.Replace(Regex(_INVISIBLE), ""),
            normalizers.Replace(Regex(r"\p{Cc}"), " "),  # NUL and other control characters separate words
            normalizers.Replace(Regex(r"[’‘ʼ＇]"), "'"),
            normalizers.Replace(Regex(r"[“”„«»]"), '"'),
        ]
        if self.lowercase:
            steps += [normalizers.Lowercase(), normalizers.NFC()]  # lower-casing can undo NFC
        # \X is what a reader sees as one character, so a flag or a family emoji stays whole. White space is matched
        # before it and alone: otherwise it would be joined with a combining mark that follows.
        cut = pre_tokenizers.Split(Regex(rf"{_WORD}|\s|\X"), behavior="isolated")
        return normalizers.Sequence(steps), cut


@dataclass(frozen=True, kw_only=True)
class CharacterTokenizer:
    """Each character that a reader sees is a token; a run of white space is one space.

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
        """Concatenate characters."""
        return "".join(words)

    @cached_property
    def _rules(self):
        """Cut text into visible characters."""
        from tokenizers import Regex, normalizers, pre_tokenizers

        steps = [
            normalizers.NFC(),
            normalizers.Replace(Regex(_INVISIBLE), ""),
            normalizers.Replace(Regex(r"\p{Cc}+"), " "),
        ]
        if self.lowercase:
            steps += [normalizers.Lowercase(), normalizers.NFC()]
        return normalizers.Sequence(steps), pre_tokenizers.Split(Regex(r"\X"), behavior="isolated")


@dataclass(frozen=True, kw_only=True)
class HuggingFaceTokenizer:
    """The tokenizer of a Hugging Face tokenizer.json.

    The store keeps its whole definition, so no path has to stay valid.
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
            definition = Path(path).read_text(encoding="utf-8")
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
        """Decode tokens with the tokenizer's decoder."""
        words = list(words)
        return self.tokenizer.decoder.decode(words) if self.tokenizer.decoder is not None else " ".join(words)

    def words_by_id(self) -> list[str]:
        """Return the tokenizer's own vocabulary in the order of its ids.

        For byte-pair encodings this order begins with the most frequent merges.
        """
        vocabulary = self.tokenizer.get_vocab(with_added_tokens=False)
        return sorted(vocabulary, key=lambda word: vocabulary[word])

    @cached_property
    def tokenizer(self):
        """The `tokenizers.Tokenizer`, without truncation and padding."""
        from tokenizers import Tokenizer

        with _panic_is_an_error():
            tokenizer = Tokenizer.from_str(self.definition)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer


@contextlib.contextmanager
def _panic_is_an_error() -> Iterator[None]:
    """Turn a panic of the tokenizers library, which is no `Exception`, into an `InputError`."""
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


def choose_tokenizer(
    given: str | os.PathLike[str] | Tokenizer, punctuation: Literal["tokens", "drop"] = "tokens"
) -> Tokenizer:
    """Return the tokenizer that a user of `prepare` names.

    Args:
        given: "words", "characters", the path of a tokenizer.json, or a tokenizer, which is returned as it is.
        punctuation: With "words": whether punctuation marks are tokens or are dropped.

    Raises:
        InputError: The file cannot be read, or is not a tokenizer.json.
    """
    if not isinstance(given, str | os.PathLike):
        return given
    if given == "words":
        return WordTokenizer(punctuation=punctuation)
    return CharacterTokenizer() if given == "characters" else HuggingFaceTokenizer.read(Path(given))


def tokenizer_from_table(table: Mapping[str, Any]) -> Tokenizer:
    """Restore the tokenizer that corpus.json or a run folder records."""
    return part_of_kind(TOKENIZER_KINDS, table, "tokens")


def tokenizer_to_table(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the record of a tokenizer, with its kind."""
    return table_from_part(tokenizer, TOKENIZER_KINDS)
