"""Where the words come from: each choice finds its vocabulary and says what it cost the users.

In: the choice (a public list, a file, a tokenizer; vocabulary_from_text.py has those that count words). Out: the
vocabulary, its provenance and its events. A vocabulary is public, or paid for (DESIGN, 3.11).
"""

from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from unheard.corpus.tokens import TokenizerFile
from unheard.corpus.vocabulary import SPECIALS, Vocabulary, public_vocabulary, vocabulary_from_file
from unheard.corpus.workers import Progress
from unheard.errors import InputError
from unheard.parts import require

if TYPE_CHECKING:  # no database is needed to know a tokenizer's words
    from unheard.corpus.grouping import Engine, Grouping
    from unheard.corpus.preparation import Preparation


@dataclass(frozen=True, kw_only=True)
class FoundVocabulary:
    vocabulary: Vocabulary
    provenance: dict[str, Any] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)


class VocabularyChoice(Protocol):
    def find(
        self, preparation: "Preparation", engine: "Engine", grouping: "Grouping", progress: Progress
    ) -> FoundVocabulary: ...


@dataclass(frozen=True, kw_only=True)
class PublicVocabulary:
    """The most frequent words of a language: nothing of any user in it."""

    size: int = 10_000
    language: str = "en"

    def __post_init__(self) -> None:
        require(self.size > len(SPECIALS), f"size must be above {len(SPECIALS)}, the special words, not {self.size}.")

    def find(
        self, preparation: "Preparation", engine: "Engine", grouping: "Grouping", progress: Progress
    ) -> FoundVocabulary:
        found = public_vocabulary(self.size, self.language, preparation.tokens)
        return FoundVocabulary(
            vocabulary=found, provenance={"source": f"wordfreq {version('wordfreq')}, {self.language}"}
        )


@dataclass(frozen=True, kw_only=True)
class FileVocabulary:
    """A word list that the user answers for: it must not have been made from the users' own text."""

    path: str
    size: int | None = None

    def find(
        self, preparation: "Preparation", engine: "Engine", grouping: "Grouping", progress: Progress
    ) -> FoundVocabulary:
        return FoundVocabulary(
            vocabulary=vocabulary_from_file(self.path, self.size), provenance={"source": Path(self.path).name}
        )


@dataclass(frozen=True, kw_only=True)
class TokenizerVocabulary:
    """All pieces of a tokenizer.json, in its own order."""

    def find(
        self, preparation: "Preparation", engine: "Engine", grouping: "Grouping", progress: Progress
    ) -> FoundVocabulary:
        if not isinstance(preparation.tokens, TokenizerFile):
            raise InputError("--vocab tokenizer needs --tokens FILE, a tokenizer.json whose pieces it can take.")
        found = tokenizer_vocabulary(preparation.tokens)
        return FoundVocabulary(vocabulary=found, provenance={"source": "the tokenizer's own pieces"})


def tokenizer_vocabulary(tokens: TokenizerFile) -> Vocabulary:
    """A model that was made for this tokenizer knows the store's words by the same rule (models/hugging_face.py)."""
    return Vocabulary.of(w for w in tokens.words_by_id() if w not in SPECIALS)
