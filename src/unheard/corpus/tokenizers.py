"""How text becomes tokens: words, characters, or any tokenizer.json; the same object serves prepare and prediction.

In: a text. Out: a list of strings. Each kind is a frozen part, so its record in corpus.json rebuilds it anywhere.
The rules are Hugging Face `tokenizers` normalisers and pre-tokenisers (the paper: "words, after normalization").
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol

from unheard.config import part_of_kind, table_from_part
from unheard.errors import InputError


class Tokenizer(Protocol):
    """What every kind answers. `split` works on white-space-separated chunks alone where `by_chunks` says so."""

    @property
    def is_subword(self) -> bool: ...

    @property
    def by_chunks(self) -> bool: ...

    def split(self, text: str) -> list[str]: ...

    def join(self, words: Iterable[str]) -> str: ...


# A word: letters, marks and digits, joined inside by an apostrophe (don't) or by a zero-width (non-)joiner (Persian).
_LETTERS = r"[\p{L}\p{M}\p{N}]+"
_WORD = rf"{_LETTERS}(?:['\x{{200c}}\x{{200d}}]{_LETTERS})*"
_INVISIBLE = r"[\x{ad}\x{200b}\x{200e}\x{200f}\x{202a}-\x{202e}\x{2060}-\x{2069}\x{feff}]"  # directions, soft hyphens
_ASCII_WORD = re.compile(r"[A-Za-z0-9]+(?:'[A-Za-z0-9]+)*|.", re.DOTALL)
_NO_SPACE_BEFORE = frozenset(".,!?;:)]}%…")
_NO_SPACE_AFTER = frozenset("([{$#@")


@dataclass(frozen=True, kw_only=True)
class WordTokenizer:
    """Words in lower case; each punctuation mark and each emoji is a token of its own (decision 0021)."""

    lowercase: bool = True
    punctuation: Literal["tokens", "drop"] = "tokens"

    is_subword = False
    by_chunks = True

    def split(self, text: str) -> list[str]:
        return [word for chunk in text.split() for word in self.split_chunk(chunk)]

    def split_chunk(self, chunk: str) -> list[str]:
        """The words of a text without white space: what `split` is made of, and what prepare remembers by heart."""
        if chunk.isascii() and chunk.isprintable():
            # What the rules come to when there is nothing but ASCII: five times as fast, and held to them by a test.
            words = _ASCII_WORD.findall(chunk.lower() if self.lowercase else chunk)
        else:
            words = self.split_by_rules(chunk)
        if self.punctuation == "drop":
            words = [w for w in words if any(c.isalnum() for c in w)]
        return words

    def split_ascii(self, chunks: list[str]) -> list[str]:
        """The words of many printable ASCII chunks in one go, with "\\n" behind the words of each."""
        text = "\n".join([*chunks, ""])
        words = _ASCII_WORD.findall(text.lower() if self.lowercase else text)
        return words if self.punctuation == "tokens" else [w for w in words if w == "\n" or w[0].isalnum()]

    def split_by_rules(self, chunk: str) -> list[str]:
        """The definition: normalise, then cut."""
        normalise, cut = self._rules
        words = [word for word, _ in cut.pre_tokenize_str(normalise.normalize_str(chunk))]
        return [w for w in words if not w.isspace()]

    def join(self, words: Iterable[str]) -> str:
        """Words as a person would type them: no space before a comma, none after an opening bracket."""
        text, glue = "", ""
        for word in words:
            text += word if word in _NO_SPACE_BEFORE else glue + word
            glue = "" if word in _NO_SPACE_AFTER else " "
        return text

    @cached_property
    def _rules(self):
        from tokenizers import Regex, normalizers, pre_tokenizers

        steps = [
            normalizers.NFC(),
            normalizers.Replace(Regex(_INVISIBLE), ""),
            normalizers.Replace(Regex(r"\p{Cc}"), " "),  # NUL and other control characters part words
            normalizers.Replace(Regex(r"[’‘ʼ＇]"), "'"),
            normalizers.Replace(Regex(r"[“”„«»]"), '"'),
        ]
        if self.lowercase:
            steps += [normalizers.Lowercase(), normalizers.NFC()]  # lower case can take a text out of NFC
        # \X is what a reader sees as one character: a flag or a family emoji is not torn apart. White space stands before
        # it, alone: a mark that follows it would else become one with it.
        cut = pre_tokenizers.Split(Regex(rf"{_WORD}|\s|\X"), behavior="isolated")
        return normalizers.Sequence(steps), cut


@dataclass(frozen=True, kw_only=True)
class CharacterTokenizer:
    """Each character that a reader sees is a token; a run of white space is one space."""

    lowercase: bool = True

    is_subword = True
    by_chunks = False

    def split(self, text: str) -> list[str]:
        normalise, cut = self._rules
        return [c for c, _ in cut.pre_tokenize_str(normalise.normalize_str(" ".join(text.split())))]

    def join(self, words: Iterable[str]) -> str:
        return "".join(words)

    @cached_property
    def _rules(self):
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
    """Any Hugging Face tokenizer.json. Its whole definition travels with the store, so no path has to stay valid."""

    definition: str

    is_subword = True
    by_chunks = False

    @classmethod
    def read(cls, path: str | Path) -> "HuggingFaceTokenizer":
        try:
            definition = Path(path).read_text(encoding="utf-8")
        except OSError as trouble:
            raise InputError(f"Cannot read the tokenizer {path}: {trouble.strerror}.") from None
        tokens = cls(definition=definition)
        try:
            _ = tokens.tokenizer
        except Exception as trouble:  # the library raises plain Exception
            raise InputError(f"{path} is not a Hugging Face tokenizer.json: {trouble}.") from None
        return tokens

    def split(self, text: str) -> list[str]:
        return self.tokenizer.encode(text, add_special_tokens=False).tokens

    def join(self, words: Iterable[str]) -> str:
        words = list(words)
        return self.tokenizer.decoder.decode(words) if self.tokenizer.decoder is not None else " ".join(words)

    def words_by_id(self) -> list[str]:
        """Its own vocabulary, in its own order: for byte-pair encodings, most frequent merges first."""
        vocabulary = self.tokenizer.get_vocab(with_added_tokens=False)
        return sorted(vocabulary, key=lambda word: vocabulary[word])

    @cached_property
    def tokenizer(self):
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_str(self.definition)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer


TOKENIZER_KINDS: dict[str, type] = {
    "words": WordTokenizer,
    "characters": CharacterTokenizer,
    "tokenizer": HuggingFaceTokenizer,
}


def tokenizer_from_table(table: Mapping[str, Any]) -> Tokenizer:
    """Rebuild the tokens that a store or a run folder records."""
    return part_of_kind(TOKENIZER_KINDS, table, "tokens")


def tokenizer_to_table(tokens: Tokenizer) -> dict[str, Any]:
    return table_from_part(tokens, TOKENIZER_KINDS)
