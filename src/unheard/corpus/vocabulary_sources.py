"""The sources of a vocabulary. Each source builds the vocabulary, and states its origin and its privacy cost.

    PublicVocabulary       the most frequent words of a language (the default); no cost
    FileVocabulary         a word list; the user is responsible that it was not made from the users' text
    TokenizerVocabulary    the tokens of a tokenizer.json; no cost
    CorpusVocabulary       the words of another, public corpus; no cost, or the cost that store already has
    PrivateVocabulary      the training users' own words with differential privacy; every run on the store pays for it

A vocabulary is public, or its cost is in the ledger (docs/privacy.md). To add a source, implement `VocabularySource`
and list the class in `VOCABULARY_KINDS`.
"""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import duckdb
import numpy as np

from unheard import storage
from unheard.config import require, table_from_part
from unheard.corpus import Progress
from unheard.corpus.encode import EncodingOptions
from unheard.corpus.grouping import Grouping, GroupingBackend, SplitRule
from unheard.corpus.private_vocabulary import UNIT, CountVotes, WordRelease, count_public, summed
from unheard.corpus.readers import open_database, scan_error, scan_sql
from unheard.corpus.sources import Fields, find_sources, make_batches
from unheard.corpus.store import TokenStore
from unheard.corpus.tokenizers import HuggingFaceTokenizer, Tokenizer
from unheard.corpus.vocabulary import SPECIALS, Vocabulary, public_vocabulary, vocabulary_from_file
from unheard.errors import CorpusCorrupt, InputError
from unheard.privacy.events import to_record
from unheard.randomness import secure_generator


@dataclass(frozen=True, kw_only=True)
class GroupedText:
    """The scanned text of the users and how it will be encoded: what a source may need to count words."""

    tokenizer: Tokenizer
    encoding: EncodingOptions
    splits: SplitRule
    backend: GroupingBackend
    grouping: Grouping
    progress: Progress
    releases: "ReleaseLog"


@dataclass(frozen=True, kw_only=True)
class VocabularyResult:
    """A vocabulary, entries about its origin for corpus.json, and its privacy cost as records of events.

    The cost of words that were drawn for this very store is not among them: it is in the `ReleaseLog`.
    """

    vocabulary: Vocabulary
    provenance: dict[str, Any] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class ReleaseLog:
    """The private vocabularies that were drawn for one store, and what they cost, whether or not the store was finished.

    The log is in the folder of the unfinished store and outlives its other files. So a call that fails after the draw,
    or that is repeated with other choices, neither draws again for free nor forgets a charge.

    Args:
        folder: The folder of the unfinished store.
        request: A hash of everything that decides which votes are counted, and of the mechanism.
    """

    folder: Path
    request: str

    @property
    def file(self) -> Path:
        """The log of charges: one line of events per draw."""
        return self.folder / "releases.jsonl"

    def charge(self, events: list[dict[str, Any]]) -> None:
        """Record the cost of a draw. To be called before the draw."""
        storage.append_line(self.file, json.dumps({"request": self.request, "events": events}).encode())

    def events(self) -> list[dict[str, Any]]:
        """The events of every draw so far.

        Raises:
            CorpusCorrupt: The log does not read back as written.
        """
        if not self.file.is_file():
            return []
        try:
            lines = [json.loads(line) for line in self.file.read_bytes().splitlines()]
            return [event for line in lines for event in line["events"]]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise CorpusCorrupt(
                f"{self.file} is damaged: it records what the words that were drawn for this store have cost. "
                "Bring back an undamaged copy."
            ) from None

    def saved(self) -> Vocabulary | None:
        """The vocabulary that the same request has drawn before; None if there is none."""
        return Vocabulary.load(self._words) if self._words.is_file() else None

    def save(self, vocabulary: Vocabulary) -> None:
        """Keep the vocabulary that was drawn."""
        vocabulary.save(self._words)

    def clear(self, folder: Path) -> None:
        """Delete the log from a finished store, whose corpus.json has the events."""
        for path in folder.glob("released-*.txt"):
            path.unlink()
        (folder / self.file.name).unlink(missing_ok=True)

    @property
    def _words(self) -> Path:
        return self.folder / f"released-{self.request[:16]}.txt"


class VocabularySource(Protocol):
    """Builds a vocabulary. A source is a frozen dataclass whose fields are recorded in corpus.json."""

    def build(self, text: GroupedText) -> VocabularyResult:
        """Build the vocabulary. Only `PrivateVocabulary` reads the users' text."""
        ...


@dataclass(frozen=True, kw_only=True)
class PublicVocabulary:
    """The most frequent words of a language, from public text (see `vocabulary.public_vocabulary`).

    Args:
        size: The number of words, including BOS, EOS and UNK.
        language: A language code of `wordfreq`.
    """

    size: int = 10_000
    language: str = "en"

    def __post_init__(self) -> None:
        require(self.size > len(SPECIALS), f"size must be above {len(SPECIALS)}, the special words, not {self.size}.")

    def build(self, text: GroupedText) -> VocabularyResult:
        """See `VocabularySource`."""
        return VocabularyResult(
            vocabulary=public_vocabulary(self.size, self.language, text.tokenizer),
            provenance={"source": f"wordfreq {version('wordfreq')}, {self.language}"},
        )


@dataclass(frozen=True, kw_only=True)
class FileVocabulary:
    """A word list, one word per line, most frequent first. It must not have been made from the users' own text.

    Args:
        path: The file.
        size: The largest number of words, including BOS, EOS and UNK; None takes all.
    """

    path: str
    size: int | None = None

    def build(self, text: GroupedText) -> VocabularyResult:
        """See `VocabularySource`."""
        return VocabularyResult(
            vocabulary=vocabulary_from_file(self.path, self.size), provenance={"source": Path(self.path).name}
        )


@dataclass(frozen=True, kw_only=True)
class TokenizerVocabulary:
    """All tokens of a tokenizer.json, in the order of their ids."""

    def build(self, text: GroupedText) -> VocabularyResult:
        """See `VocabularySource`; raises `InputError` if the corpus is not split by a tokenizer.json."""
        if not isinstance(text.tokenizer, HuggingFaceTokenizer):
            raise InputError("--vocab tokenizer needs --tokens FILE, a tokenizer.json whose pieces it can take.")
        vocabulary = tokenizer_vocabulary(text.tokenizer)
        return VocabularyResult(vocabulary=vocabulary, provenance={"source": "the tokenizer's own pieces"})


def tokenizer_vocabulary(tokenizer: HuggingFaceTokenizer) -> Vocabulary:
    """Return the vocabulary of a tokenizer. models/hugging_face.py uses the same rule to match a model with a store."""
    return Vocabulary.of(w for w in tokenizer.words_by_id() if w not in SPECIALS)


@dataclass(frozen=True, kw_only=True)
class CorpusVocabulary:
    """The words of another, public corpus: the vocabulary of a store, or the most frequent words of raw text.

    Args:
        path: A token store, a .txt file, or any input of `prepare`.
        size: The largest number of words, including BOS, EOS and UNK.
        text_field: The column with the text; None means the same name as in the main input.
    """

    path: str
    size: int = 10_000
    text_field: str | None = None

    def build(self, text: GroupedText) -> VocabularyResult:
        """See `VocabularySource`."""
        if (Path(self.path) / "corpus.json").is_file():
            other = TokenStore.open(self.path)
            words = other.vocabulary.words[: self.size]
            provenance = {"source": f"the vocabulary of the store {other.info.get('name', Path(self.path).name)}"}
            # DP: words that cost somebody something keep their price: the users may be the same people.
            return VocabularyResult(vocabulary=Vocabulary(words), provenance=provenance, events=other.vocabulary_events)
        grouping = text.grouping
        folder = grouping.work / "public-words"
        shutil.rmtree(folder, ignore_errors=True)
        field = self.text_field or grouping.fields.text
        count_public(public_texts(self.path, field, grouping), text.tokenizer, folder)
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
    """The training users' own words under user-level differential privacy (see `private_vocabulary`).

    Every run on the store pays for it: the events of the release are in the store and begin every ledger.

    Args:
        epsilon, delta: The cost.
        size: The largest number of words, including BOS, EOS and UNK.
        words_per_user: The largest number of words that each user votes for.
    """

    epsilon: float
    delta: float
    size: int = 10_000
    words_per_user: int = 100

    def __post_init__(self) -> None:
        WordRelease.for_budget(self.epsilon, self.delta, self.words_per_user)
        require(self.size > len(SPECIALS), f"size must be above {len(SPECIALS)}, the special words, not {self.size}.")

    def build(self, text: GroupedText) -> VocabularyResult:
        """See `VocabularySource`."""
        release = WordRelease.for_budget(self.epsilon, self.delta, self.words_per_user)
        # DP: a stopped and repeated prepare keeps its one release; drawing the noise again would be a second one.
        vocabulary = text.releases.saved()
        if vocabulary is None:
            vocabulary = self._draw(release, text)
            text.releases.save(vocabulary)
        figures = {
            "noise_multiplier": release.noise_multiplier,
            "threshold_delta": release.threshold_delta,
            "threshold": release.threshold() / UNIT,
        }
        source = "the training users' own text, differentially private"
        provenance = {"source": source, "asked": self.size, **figures}
        return VocabularyResult(vocabulary=vocabulary, provenance=provenance)

    def _draw(self, release: WordRelease, text: GroupedText) -> Vocabulary:
        """Count the votes on all shards and release the words above the threshold."""
        grouping = text.grouping
        folder = grouping.work / "votes"
        shutil.rmtree(folder, ignore_errors=True)
        task = CountVotes(
            folder=folder, tokenizer=text.tokenizer, options=text.encoding, splits=text.splits, release=release
        )
        for done, _ in enumerate(text.backend.over_shards(grouping, task, range(grouping.shards)), start=1):
            text.progress("Finding words", done / grouping.shards)
        # DP: charged before the draw, on disk, so that no failure or repetition makes the store forget it.
        text.releases.charge([to_record(event) for event in release.events()])
        generator = secure_generator()  # DP: keyed by the operating system, known to nobody
        released: list[tuple[int, str]] = []
        for words, sums in summed(folder, grouping):
            passed, noisy = release.release(sums, generator)
            released += [(int(noisy[i]), words[i]) for i in np.flatnonzero(passed)]
        shutil.rmtree(folder, ignore_errors=True)
        if not released:
            raise InputError(
                f"No word has enough users to be released at epsilon {self.epsilon}, delta {self.delta}: "
                "raise --vocab-epsilon, or take --vocab public."
            )
        released.sort(key=lambda pair: (-pair[0], pair[1]))
        return Vocabulary.of(word for _, word in released[: self.size - len(SPECIALS)])


VOCABULARY_KINDS: dict[str, type] = {
    "public": PublicVocabulary,
    "file": FileVocabulary,
    "tokenizer": TokenizerVocabulary,
    "corpus": CorpusVocabulary,
    "private": PrivateVocabulary,
}


def vocabulary_source_to_table(source: VocabularySource) -> dict[str, Any]:
    """Return the record of a source for corpus.json.

    A path is cut to its last name, since corpus.json may be published.
    """
    table = table_from_part(source, VOCABULARY_KINDS)
    if "path" in table:
        table["path"] = Path(table["path"]).name
    return table


def public_texts(path: str, field: str, grouping: Grouping) -> Iterator[str]:
    """Yield the texts of a public input: the lines of a .txt file, or the text column of any input of `prepare`."""
    if path.endswith(".txt") and Path(path).is_file():
        with open(path, encoding="utf-8", errors="replace") as file:
            yield from file
        return
    fields = Fields(user=field, text=field, table=grouping.fields.table)
    database = open_database(grouping.memory_bytes, 1, str(grouping.work / "temp"))
    for batch in make_batches(find_sources([path])):
        try:
            result = database.execute(
                f"SELECT text FROM ({scan_sql(database, batch, fields, 1, 1 << 30)}) WHERE reason IS NULL"
            )
            while rows := result.fetchmany(4096):
                yield from (row[0] for row in rows)
        except duckdb.Error as error:
            raise scan_error(error, batch) from None
    database.close()
