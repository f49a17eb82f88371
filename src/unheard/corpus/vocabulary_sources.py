"""Vocabularies that are counted: from another, public, text for nothing, or from the users' own at a price.

In: the choice, and the scanned rows. Out: the vocabulary with its provenance and its events.
Where the words come from: each choice finds its vocabulary and says what it cost the users.

In: the choice (a public list, a file, a tokenizer; vocabulary_from_text.py has those that count words). Out: the
vocabulary, its provenance and its events. A vocabulary is public, or paid for (DESIGN, 3.11).
"""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import duckdb
import numpy as np

from unheard.config import require
from unheard.corpus.backends import Grouping, GroupingBackend
from unheard.corpus.private_vocabulary import UNIT, WordRelease
from unheard.corpus.progress import Progress
from unheard.corpus.scan import as_refusal, batches, open_database, scan_sql
from unheard.corpus.sources import Fields, find_sources
from unheard.corpus.store import TokenStore
from unheard.corpus.tokenizers import HuggingFaceTokenizer
from unheard.corpus.vocabulary import SPECIALS, Vocabulary, public_vocabulary, vocabulary_from_file
from unheard.corpus.word_counts import CountVotes, count_public, summed
from unheard.errors import InputError
from unheard.privacy.events import to_record
from unheard.randomness import secure_generator

if TYPE_CHECKING:  # no database is needed to know a tokenizer's words
    from unheard.corpus.backends import Grouping, GroupingBackend
    from unheard.corpus.pipeline import Preparation


@dataclass(frozen=True, kw_only=True)
class VocabularyResult:
    vocabulary: Vocabulary
    provenance: dict[str, Any] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)


class VocabularySource(Protocol):
    def find(
        self, preparation: "Preparation", backend: "GroupingBackend", grouping: "Grouping", progress: Progress
    ) -> VocabularyResult: ...


@dataclass(frozen=True, kw_only=True)
class PublicVocabulary:
    """The most frequent words of a language: nothing of any user in it."""

    size: int = 10_000
    language: str = "en"

    def __post_init__(self) -> None:
        require(self.size > len(SPECIALS), f"size must be above {len(SPECIALS)}, the special words, not {self.size}.")

    def find(
        self, preparation: "Preparation", backend: "GroupingBackend", grouping: "Grouping", progress: Progress
    ) -> VocabularyResult:
        found = public_vocabulary(self.size, self.language, preparation.tokenizer)
        return VocabularyResult(
            vocabulary=found, provenance={"source": f"wordfreq {version('wordfreq')}, {self.language}"}
        )


@dataclass(frozen=True, kw_only=True)
class FileVocabulary:
    """A word list that the user answers for: it must not have been made from the users' own text."""

    path: str
    size: int | None = None

    def find(
        self, preparation: "Preparation", backend: "GroupingBackend", grouping: "Grouping", progress: Progress
    ) -> VocabularyResult:
        return VocabularyResult(
            vocabulary=vocabulary_from_file(self.path, self.size), provenance={"source": Path(self.path).name}
        )


@dataclass(frozen=True, kw_only=True)
class TokenizerVocabulary:
    """All pieces of a tokenizer.json, in its own order."""

    def find(
        self, preparation: "Preparation", backend: "GroupingBackend", grouping: "Grouping", progress: Progress
    ) -> VocabularyResult:
        if not isinstance(preparation.tokenizer, HuggingFaceTokenizer):
            raise InputError("--vocab tokenizer needs --tokens FILE, a tokenizer.json whose pieces it can take.")
        found = tokenizer_vocabulary(preparation.tokenizer)
        return VocabularyResult(vocabulary=found, provenance={"source": "the tokenizer's own pieces"})


def tokenizer_vocabulary(tokens: HuggingFaceTokenizer) -> Vocabulary:
    """A model that was made for this tokenizer knows the store's words by the same rule (models/hugging_face.py)."""
    return Vocabulary.of(w for w in tokens.words_by_id() if w not in SPECIALS)


if TYPE_CHECKING:
    from unheard.corpus.pipeline import Preparation


@dataclass(frozen=True, kw_only=True)
class CorpusVocabulary:
    """The words of another corpus, a public one: a store's own vocabulary, or the most frequent words of raw text."""

    path: str
    size: int = 10_000
    text_field: str | None = None

    def find(
        self, preparation: "Preparation", backend: GroupingBackend, grouping: Grouping, progress: Progress
    ) -> VocabularyResult:
        if (Path(self.path) / "corpus.json").is_file():
            other = TokenStore.open(self.path)
            words = other.vocabulary.words[: self.size]
            provenance = {"source": f"the vocabulary of the store {other.info.get('name', Path(self.path).name)}"}
            # DP: words that cost somebody something keep their price: the users may be the same people.
            return VocabularyResult(vocabulary=Vocabulary(words), provenance=provenance, events=other.vocabulary_events)
        folder = grouping.work / "public-words"
        shutil.rmtree(folder, ignore_errors=True)
        count_public(
            public_texts(self.path, self.text_field or preparation.fields.text, grouping), preparation.tokenizer, folder
        )
        totals = [
            (total, word)
            for words, sums in summed(folder, grouping, 2)
            for word, total in zip(words, sums.tolist(), strict=True)
        ]
        if not totals:
            raise InputError(f"{self.path} holds no word twice: it is too small to make a vocabulary of.")
        totals.sort(key=lambda pair: (-pair[0], pair[1]))
        words = [word for _, word in totals[: self.size - len(SPECIALS)]]
        return VocabularyResult(vocabulary=Vocabulary.of(words), provenance={"source": Path(self.path).name})


@dataclass(frozen=True, kw_only=True)
class PrivateVocabulary:
    """The training users' own words under user-level differential privacy; every run on the store pays for it."""

    epsilon: float
    delta: float
    size: int = 10_000
    words_per_user: int = 100

    def __post_init__(self) -> None:
        WordRelease.for_budget(self.epsilon, self.delta, self.words_per_user)
        require(self.size > len(SPECIALS), f"size must be above {len(SPECIALS)}, the special words, not {self.size}.")

    def find(
        self, preparation: "Preparation", backend: GroupingBackend, grouping: Grouping, progress: Progress
    ) -> VocabularyResult:
        release = WordRelease.for_budget(self.epsilon, self.delta, self.words_per_user)
        saved = grouping.work / "vocabulary.txt"
        # DP: a stopped and repeated prepare keeps its one release; drawing the noise again would be a second one.
        vocabulary = (
            Vocabulary.load(saved) if saved.is_file() else self._draw(release, preparation, backend, grouping, progress)
        )
        vocabulary.save(saved.with_suffix(".writing"))
        saved.with_suffix(".writing").replace(saved)
        figures = {
            "noise_multiplier": release.noise_multiplier,
            "threshold_delta": release.threshold_delta,
            "threshold": release.threshold() / UNIT,
        }
        provenance = {"source": "the training users' own text, differentially private", **figures}
        events = [to_record(event) for event in release.events()]
        return VocabularyResult(vocabulary=vocabulary, provenance=provenance, events=events)

    def _draw(
        self,
        release: WordRelease,
        preparation: "Preparation",
        backend: GroupingBackend,
        grouping: Grouping,
        progress: Progress,
    ) -> Vocabulary:
        folder = grouping.work / "votes"
        shutil.rmtree(folder, ignore_errors=True)
        task = CountVotes(
            folder=folder,
            tokens=preparation.tokenizer,
            rule=preparation.encoding,
            splits=preparation.splits,
            release=release,
        )
        for done, _ in enumerate(backend.over_shards(grouping, task, range(grouping.shards)), start=1):
            progress("Finding words", done / grouping.shards)
        generator = secure_generator()  # DP: keyed by the operating system, known to nobody
        found: list[tuple[int, str]] = []
        for words, sums in summed(folder, grouping):
            passed, noisy = release.release(sums, generator)
            found += [(int(noisy[i]), words[i]) for i in np.flatnonzero(passed)]
        shutil.rmtree(folder, ignore_errors=True)
        if not found:
            raise InputError(
                f"No word has enough users to be released at epsilon {self.epsilon}, delta {self.delta}: "
                "raise --vocab-epsilon, or take --vocab public."
            )
        found.sort(key=lambda pair: (-pair[0], pair[1]))
        return Vocabulary.of(word for _, word in found[: self.size - len(SPECIALS)])


def public_texts(path: str, field: str, grouping: Grouping) -> Iterator[str]:
    """The texts of a public input: lines of a .txt file, or the text field of any input that prepare reads."""
    if path.endswith(".txt") and Path(path).is_file():
        with open(path, encoding="utf-8", errors="replace") as file:
            yield from file
        return
    fields = Fields(user=field, text=field, table=grouping.fields.table)
    database = open_database(grouping.memory_bytes, 1, str(grouping.work / "temp"))
    for batch in batches(find_sources([path])):
        try:
            result = database.execute(
                f"SELECT text FROM ({scan_sql(database, batch, fields, 1, 1 << 30)}) WHERE reason IS NULL"
            )
            while rows := result.fetchmany(4096):
                yield from (row[0] for row in rows)
        except duckdb.Error as trouble:
            raise as_refusal(trouble, batch) from None
    database.close()
