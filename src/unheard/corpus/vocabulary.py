"""Vocabularies: lists of words, most frequent first. The position of a word is its id; other words have the id UNK.

    >>> vocabulary = Vocabulary.of(["the", "cat"])
    >>> vocabulary.id("cat"), vocabulary.id("dog"), vocabulary.word(3)
    (4, 2, 'the')

Ids 0, 1 and 2 are BOS, EOS and UNK in every store. The size of a vocabulary includes them: the paper's 10,000 words are
the rows of one embedding, of which three belong to BOS, EOS and UNK.

A `VocabularySource` builds a vocabulary and states its origin and its privacy cost:

    PublicVocabulary       the most frequent words of a language (the default), from the package `wordfreq`; no cost
    FileVocabulary         a word list; the caller must make sure that it was not made from the users' text; no cost, or
                           the cost of the store or run in whose folder it lies
    TokenizerVocabulary    the tokens of a tokenizer.json; no cost
    CorpusVocabulary       the words of a public corpus (`private_vocabulary`); no cost, or the cost in its store
    PrivateVocabulary      the training users' own words with differential privacy (`private_vocabulary`)

A vocabulary is public, or its cost is charged to the ledger (docs/privacy.md). Until a store is finished, `ReleaseLog`
records the cost of every private vocabulary that was drawn for it. To add a source, implement `VocabularySource` and
list the class in `pipeline.VOCABULARY_KINDS`.
"""

import hashlib
import itertools
import json
import os
import secrets
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from unheard import storage
from unheard.config import nearest, require
from unheard.corpus.tokenizers import HuggingFaceTokenizer, Tokenizer, WordTokenizer
from unheard.errors import CorpusCorrupt, CorpusMissing, InputError, InvalidValue

if TYPE_CHECKING:
    from unheard.corpus.encode import GroupedText

BOS, EOS, UNK = 0, 1, 2
"""The ids of the special words: beginning of a sequence, end of a sequence, word outside the vocabulary."""
SPECIALS = ("<BOS>", "<EOS>", "<UNK>")
"""The names of the special words, in the order of their ids."""


class Vocabulary:
    """An immutable list of words, in the order of their ids. The special words come first.

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
            raise InvalidValue(f"The word {repeated!r} occurs twice in the vocabulary, but each word has one id.")

    @classmethod
    def of(cls, words: Iterable[str]) -> "Vocabulary":
        """Return the vocabulary that consists of the special words and then `words`, most frequent first."""
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
        """Return the id of a word, or UNK if it is not in the vocabulary.

        A word of the text that is spelled like a special word, such as "<BOS>", is UNK.
        """
        i = self._ids.get(word, UNK)
        return i if i > UNK else UNK

    def encode_words(self, words: Sequence[str]) -> np.ndarray:
        """Return the ids of words as an int64 array, with UNK for words that are not in the vocabulary."""
        return np.fromiter((self.id(w) for w in words), dtype=np.int64, count=len(words))

    @property
    def digest(self) -> str:
        """The SHA-256 of the words in their order. A store uses it to detect that its word list was replaced."""
        return hashlib.sha256("\n".join(_one_line(w) for w in self.words).encode("utf-8", "surrogatepass")).hexdigest()

    def word(self, i: int) -> str:
        """Return the word that has the id `i`."""
        return self.words[i]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the words to a file, one per line. An existing file is replaced in one atomic step."""
        storage.replace_file(Path(path), "".join(f"{_one_line(w)}\n" for w in self.words).encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Vocabulary":
        """Return the vocabulary that `save` wrote to a file.

        Raises:
            CorpusMissing: There is no such file.
            CorpusCorrupt: The file does not begin with the special words.
            InputError: The file is not UTF-8 text.
            InvalidValue: A word occurs twice.
        """
        words = read_word_list(path)
        if tuple(words[: len(SPECIALS)]) != SPECIALS:
            raise CorpusCorrupt(
                f"{path} does not begin with {', '.join(SPECIALS)}: it is not the vocabulary of a store."
            )
        return cls(words)


@dataclass(frozen=True, kw_only=True)
class VocabularyResult:
    """A vocabulary with its origin and its privacy cost.

    Attributes:
        vocabulary: The vocabulary.
        provenance: Entries for corpus.json that describe the origin of the words. They may be published.
        events: The privacy cost that the vocabulary of another store brings along, as records of events. The cost of
            words that were drawn for this store is not here, but in the `ReleaseLog`.
    """

    vocabulary: Vocabulary
    provenance: dict[str, Any] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)


class VocabularySource(Protocol):
    """Builds a vocabulary. A source is a frozen dataclass whose fields are recorded in corpus.json."""

    def build(self, text: "GroupedText") -> VocabularyResult:
        """Build the vocabulary.

        Args:
            text: The users' text and the settings of `prepare`. Only `PrivateVocabulary` reads the users' text; the
                other sources use only the tokenizer and the settings.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class PublicVocabulary:
    """The most frequent words of a language, from public text (see `public_vocabulary`).

    Args:
        size: The number of words, including BOS, EOS and UNK.
        language: A language code of `wordfreq`.
    """

    size: int = 10_000
    language: str = "en"

    def __post_init__(self) -> None:
        require(self.size > len(SPECIALS), f"size must be above {len(SPECIALS)}, the special words, not {self.size}.")

    def build(self, text: "GroupedText") -> VocabularyResult:
        """Return the most frequent words of the language (see `VocabularySource.build`)."""
        return VocabularyResult(
            vocabulary=public_vocabulary(self.size, self.language, text.tokenizer),
            provenance={"source": f"wordfreq {version('wordfreq')}, {self.language}"},
        )


@dataclass(frozen=True, kw_only=True)
class FileVocabulary:
    """A word list, one word per line, most frequent first. It must not have been made from the users' own text.

    The vocabulary file of a store or of a run folder keeps its cost. A list that lies elsewhere is declared public.

    Args:
        path: The file.
        size: The largest number of words, including BOS, EOS and UNK; None takes all.
    """

    path: str
    size: int | None = None

    def build(self, text: "GroupedText") -> VocabularyResult:
        """Return the words of the file (see `VocabularySource.build`).

        Raises:
            LedgerError: The file lies in a store or a run folder whose record of the cost is damaged.
        """
        events, draws = _cost_of_list(self.path)
        return VocabularyResult(
            vocabulary=vocabulary_from_file(self.path, self.size),
            provenance={"source": Path(self.path).name, **({"draws": draws} if draws else {})},
            events=events,
        )


def _cost_of_list(path: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the events that a word list has cost, and what identifies its draws (`ReleaseLog.charge`).

    Both are empty for a file that is not the vocabulary of the store or run folder in which it lies.
    """
    from unheard.privacy.events import FailureProbability, Gaussian, to_record  # here, because these load scipy
    from unheard.privacy.ledger import run_id
    from unheard.privacy.population_ledger import read_corpus_record
    from unheard.privacy.run_ledger import read_run_ledger

    folder = Path(path).resolve().parent
    if (folder / "corpus.json").is_file():
        table = read_corpus_record(folder).get("vocabulary")
        events, draws = (table.get("events", []), table.get("draws", [])) if isinstance(table, Mapping) else ([], [])
    elif (folder / "ledger.jsonl").is_file():
        ledger = read_run_ledger(folder)
        table = ledger.facts.get("vocabulary")
        events = [to_record(event) for event in ledger.events if isinstance(event, Gaussian | FailureProbability)]
        draws = [run_id(ledger)] if events else []  # the header of a run does not name the draws
    else:
        return [], []
    digest = vocabulary_from_file(path).digest
    # DP: words that were paid for keep their cost, under whichever path they are named: the users may be the same.
    return (events, draws) if isinstance(table, Mapping) and table.get("sha256", digest) == digest else ([], [])


@dataclass(frozen=True, kw_only=True)
class TokenizerVocabulary:
    """All tokens of the tokenizer.json with which the corpus is split, in the order of their ids."""

    def build(self, text: "GroupedText") -> VocabularyResult:
        """Return the tokens of the tokenizer.json of the corpus (see `VocabularySource.build`).

        Raises:
            InputError: The tokenizer of the corpus is not a tokenizer.json.
        """
        if not isinstance(text.tokenizer, HuggingFaceTokenizer):
            raise InputError("--vocab tokenizer needs --tokens FILE, a tokenizer.json whose pieces it can take.")
        vocabulary = tokenizer_vocabulary(text.tokenizer)
        return VocabularyResult(vocabulary=vocabulary, provenance={"source": "the tokenizer's own pieces"})


def tokenizer_vocabulary(tokenizer: HuggingFaceTokenizer) -> Vocabulary:
    """Return the vocabulary of a tokenizer.json: the special words, then its tokens in the order of their ids.

    models/hugging_face.py calls this function too, to compare the tokenizer of a model with the vocabulary of a store.
    """
    return Vocabulary.of(w for w in tokenizer.words_by_id() if w not in SPECIALS)


@dataclass(frozen=True, kw_only=True)
class ReleaseLog:
    """The record of all private vocabularies that were drawn for an unfinished store, and of their cost.

    The files are in the folder of the unfinished store and are kept when its other files are deleted. So if `prepare`
    fails after the draw and is called again, the same request gets the same words without a new charge, another request
    draws and pays again, and no earlier charge is lost.

    Args:
        folder: The folder of the unfinished store.
        request: A hash of everything that decides which votes are counted, and of the parameters of the mechanism.
    """

    folder: Path
    request: str

    @property
    def file(self) -> Path:
        """The file of charges, with one line of JSON per draw."""
        return self.folder / "releases.jsonl"

    def charge(self, events: list[dict[str, Any]]) -> None:
        """Write the cost of a draw to disk. Call it before the draw.

        Args:
            events: The cost, as records of events.
        """
        # DP: two draws may give the same words. A number of its own keeps the second from passing for the first.
        charge = {"request": self.request, "events": events, "draw": secrets.token_hex(16)}
        storage.append_line(self.file, json.dumps({**charge, "sha256": _charge_digest(charge)}).encode())

    def events(self) -> list[dict[str, Any]]:
        """Return the events of all draws so far, for this and other requests. Raises as `charges`."""
        return [event for charge in self.charges() for event in charge["events"]]

    def draws(self) -> list[str]:
        """Return the random numbers that identify all draws so far. Raises as `charges`."""
        return [charge["draw"] for charge in self.charges() if "draw" in charge]  # earlier versions wrote none

    def charges(self) -> list[dict[str, Any]]:
        """Return the charges of all draws so far, for this and other requests.

        Raises:
            CorpusCorrupt: The file of charges is damaged, or lacks the charge of words that were drawn.
        """
        try:
            lines = self.file.read_bytes().splitlines() if os.path.lexists(self.file) else []
            charges = [json.loads(line) for line in lines]
            drawn = {path.stem.removeprefix("released-") for path in self.folder.glob("released-*.txt")}
            # DP: words without their charge would be free, and a charge that was changed could be too small.
            if any(charge.pop("sha256") != _charge_digest(charge) for charge in charges):
                raise ValueError
            if not drawn <= {charge["request"][:16] for charge in charges}:
                raise ValueError
            if not all(isinstance(charge["events"], list) for charge in charges):
                raise ValueError
            return charges
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise CorpusCorrupt(
                f"{self.file} is damaged: it records what the words that were drawn for this store have cost. "
                "Bring back an undamaged copy."
            ) from None

    def saved(self) -> Vocabulary | None:
        """Return the vocabulary that was already drawn for the same request, or None."""
        return Vocabulary.load(self._words) if self._words.is_file() else None

    def save(self, vocabulary: Vocabulary) -> None:
        """Save the vocabulary that was drawn, so that `saved` returns it if `prepare` is repeated."""
        vocabulary.save(self._words)

    def clear(self, folder: Path) -> None:
        """Delete the files of the log from a store whose corpus.json already contains the events.

        Args:
            folder: The folder of the store.
        """
        for path in folder.glob("released-*.txt"):
            path.unlink()
        (folder / self.file.name).unlink(missing_ok=True)

    @property
    def _words(self) -> Path:
        """The file of the vocabulary that was drawn for this request."""
        return self.folder / f"released-{self.request[:16]}.txt"


def _charge_digest(charge: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a charge in the log of releases, by which a damaged line is noticed."""
    return hashlib.sha256(json.dumps(charge, sort_keys=True).encode()).hexdigest()


def read_word_list(path: str | os.PathLike[str]) -> list[str]:
    """Return the words of a file with one word per line.

    Raises:
        CorpusMissing: There is no such file.
        InputError: The file cannot be read, or is not UTF-8 text.
    """
    try:
        text = storage.regular_file(path).read_text(
            encoding="utf-8-sig"
        )  # a byte-order mark is not part of the first word
    except FileNotFoundError:
        raise CorpusMissing(f"There is no word list at {path}. Check the path.") from None
    except OSError as error:
        raise InputError(f"Cannot read the word list {path}: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise InputError(f"{path} is not UTF-8 text: save the word list as UTF-8, one word on each line.") from None
    lines = text.split("\n")
    return [_from_one_line(line.removesuffix("\r")) for line in (lines[:-1] if lines[-1] == "" else lines)]


def vocabulary_from_file(path: str | os.PathLike[str], size: int | None = None) -> Vocabulary:
    """Return the vocabulary of a word list. Empty lines and repeated words are skipped.

    Args:
        path: A file with one word per line, most frequent first, with or without the special words.
        size: The largest number of words, including BOS, EOS and UNK; None takes all.

    Raises:
        InputError: The file has no words or is not UTF-8 text.
        CorpusMissing: There is no such file.
    """
    words = [w for w in read_word_list(path) if w and w not in SPECIALS]
    words = list(dict.fromkeys(words))
    if not words:
        raise InputError(f"The word list {path} is empty: give one word on each line, most frequent first.")
    return Vocabulary.of(words if size is None else words[: size - len(SPECIALS)])


# Punctuation marks per 1,000 English words in print (V. Cook, "Frequencies for English punctuation marks", 2013); the
# values from "(" on are estimates. The table is needed because `wordfreq` counts words only: without it a public
# vocabulary would have no full stop.
_MARKS_PER_1000_WORDS = {
    ".": 65.3, ",": 61.6, '"': 26.7, "'": 24.3, "-": 15.3, "?": 5.6, ":": 3.4, "!": 3.3, ";": 3.2,
    "(": 2.0, ")": 2.0, "/": 1.0, "&": 0.5, "$": 0.5, "%": 0.5, "*": 0.3, "#": 0.3, "@": 0.3, "+": 0.2, "=": 0.2,
    "[": 0.2, "]": 0.2, "<": 0.1, ">": 0.1, "~": 0.1, "^": 0.1, "_": 0.1, "|": 0.05, "\\": 0.05, "{": 0.02, "}": 0.02,
}  # fmt: skip
# Punctuation marks of other scripts. Each is given the frequency of the English mark to which it is mapped here. The
# English vocabulary contains none of these.
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


def public_vocabulary(size: int = 10_000, language: str = "en", tokenizer: Tokenizer | None = None) -> Vocabulary:
    """Return a vocabulary of the most frequent words of a language. They are public and have no privacy cost.

    Args:
        size: The largest number of words, including BOS, EOS and UNK.
        language: A language code of `wordfreq`, such as "en".
        tokenizer: The tokenizer of the corpus; None is a `WordTokenizer`. The vocabulary has only words that this
            tokenizer can produce. For a subword tokenizer it has the most frequent subword tokens of the language.

    Raises:
        InvalidValue: The language is unknown or the size too small.
    """
    import wordfreq

    tokenizer = tokenizer or WordTokenizer()
    known = wordfreq.available_languages()
    if language not in known:
        raise InvalidValue(f"No public word list for language '{language}'.{nearest(language, known)}")
    if size <= len(SPECIALS):
        raise InvalidValue(
            f"A vocabulary of {size} rows holds no words: {len(SPECIALS)} are BOS, EOS and UNK. Raise it."
        )
    if tokenizer.is_subword:
        weights = _piece_weights(_frequencies(language), tokenizer)
        ranked = _by_weight(weights)
    else:
        more = itertools.islice(_words_by_frequency(language), _FREQUENT, None)
        ranked = itertools.chain(_frequent_words(language), more)
    kept = []
    for word in ranked:
        if len(kept) == size - len(SPECIALS):
            break
        # Skip words that the tokenizer never produces. (A space alone gives no token, but between words it does.)
        if _is_a_word(word) and (tokenizer.split(word) == [word] or word == " "):
            kept.append(word)
    return Vocabulary.of(kept)


def likely_language(texts: Iterable[str]) -> str | None:
    """Return the language whose 200 most frequent words cover the largest part of the texts, as a code of `wordfreq`.

    Returns None if every language covers at most a tenth of the words. Japanese and Chinese are recognised by their
    characters.

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


def vocabulary_unit(info: Mapping[str, Any]) -> str:
    """Return the unit of a store's vocabulary for messages: "characters" or "words".

    Args:
        info: The content of corpus.json.
    """
    return "characters" if info.get("tokens", {}).get("kind") == "characters" else "words"


def advice_on_unknown_words(info: Mapping[str, Any], language: str | None) -> str:
    """Return a sentence that suggests other options of `prepare`, for a store in which many words are UNK.

    Args:
        info: The content of corpus.json.
        language: The likely language of the text (`likely_language`); None if it is not known.
    """
    vocabulary, unit = info["vocabulary"], vocabulary_unit(info)
    tokens = "the tokenizer.json of a model (--tokens FILE)"
    tokens += "" if unit == "characters" else " or --tokens characters"
    if vocabulary["kind"] == "private":
        return (
            f"A larger --vocab-epsilon, or more users, release more {unit}. A public list costs nothing: --vocab public with "
            f"--vocab-language. Or use {tokens}."
        )
    if vocabulary["kind"] != "public":
        return f"Use a list of such text, the users' own {unit} (--vocab private), or {tokens}."
    listed = f"The word list is for the language '{vocabulary['language']}'"
    if language is None:
        listed += ". If the text is in another language, name it (--vocab-language CODE); otherwise"
    elif language == vocabulary["language"]:
        listed += ", and the text seems to be in this language. So"
    else:
        listed += f", but the text seems to be in '{language}': use --vocab-language {language}; otherwise"
    if unit == "characters":
        return f"{listed} use the users' own characters (--vocab private) or a list of them (--vocab FILE)."
    return (
        f"{listed} ask for more words (--vocab-size {3 * vocabulary['size']}), or use the users' own words (--vocab "
        f"private), a word list of such text (--vocab FILE), {tokens}."
    )


def _frequencies(language: str) -> dict[str, float]:
    """Return the frequency of each word and punctuation mark of a language."""
    import wordfreq

    marks = _marks(language)
    # If both tables have a mark, the frequency of `wordfreq` is used for English and that of `_marks` for all other
    # languages, in which `wordfreq` counts "_" only inside words.
    return marks | wordfreq.get_frequency_dict(language) | ({} if language == "en" else marks)


def _marks(language: str) -> dict[str, float]:
    """Return the frequency of each punctuation mark of a language, per word."""
    marks = {mark: count / 1000.0 for mark, count in _MARKS_PER_1000_WORDS.items()}
    if language != "en":
        others = _QUOTES | _MARKS_OF_LANGUAGE.get(language, {})
        marks |= {mark: marks[english] for mark, english in others.items()}
    return marks


def _by_weight(weights: dict[str, float]) -> tuple[str, ...]:
    """Return all words by falling weight; words with equal weights are in alphabetical order."""
    return tuple(sorted(sorted(weights), key=weights.__getitem__, reverse=True))  # `sorted` is stable, also in reverse


_FREQUENT = 20_000  # The number of words that `_frequent_words` caches for a language.


def _words_by_frequency(language: str) -> Iterator[str]:
    """Yield the words of a language by falling frequency, in the order of `_by_weight(_frequencies(language))`.

    It merges the sorted list of `wordfreq` with the punctuation marks. To sort all 300,000 words would be slower, and
    callers need only the first ones.
    """
    import wordfreq

    # Each bucket has the words of one frequency, the most frequent first.
    buckets = wordfreq.get_frequency_list(language)
    marks = _marks(language)
    if language == "en":
        counted = set(itertools.chain.from_iterable(buckets))
        marks = {mark: weight for mark, weight in marks.items() if mark not in counted}
    waiting = list(reversed(_by_weight(marks)))
    for number, bucket in enumerate(buckets):
        weight = wordfreq.cB_to_freq(-number)
        while waiting and marks[waiting[-1]] > weight:
            yield waiting.pop()
        equal = [mark for mark in marks if marks[mark] == weight]
        waiting = [mark for mark in waiting if mark not in equal]
        yield from sorted([word for word in bucket if word not in marks] + equal)
    yield from reversed(waiting)


@lru_cache(maxsize=2)
def _frequent_words(language: str) -> tuple[str, ...]:
    """Return the first `_FREQUENT` words of `_words_by_frequency`, from a cache. Most vocabularies need no others."""
    return tuple(itertools.islice(_words_by_frequency(language), _FREQUENT))


def _piece_weights(words: dict[str, float], tokenizer: Tokenizer) -> dict[str, float]:
    """Return the frequency of each subword token in the words of a language.

    It is assumed that 5 % of the words begin with a capital letter.

    Args:
        words: The frequency of each word. Only the first 20,000 words are split.
        tokenizer: The subword tokenizer.
    """
    weights: dict[str, float] = {" ": sum(words.values())}
    for word, weight in itertools.islice(words.items(), 20_000):  # The other words are about 1 % of the text.
        for form, share in ((word, 0.95), (word.capitalize(), 0.05)):
            for piece in tokenizer.split(form):
                weights[piece] = weights.get(piece, 0.0) + weight * share
    return weights


def _is_a_word(word: str) -> bool:
    """Whether an entry of `wordfreq` is a word, and neither a special word nor a pattern for numbers such as "a00"."""
    return "00" not in word and word not in SPECIALS


def _one_line(word: str) -> str:
    """Return a word with line ends and backslashes escaped, so that it takes one line of a file."""
    return word.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")


def _from_one_line(line: str) -> str:
    """Return the word that `_one_line` has written as this line."""
    if "\\" not in line:
        return line
    parts = line.split("\\\\")
    return "\\".join(part.replace("\\n", "\n").replace("\\r", "\r") for part in parts)
