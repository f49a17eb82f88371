"""Builds vocabularies from text: from the users' own words with differential privacy, or from a public corpus.

**The users' own words** (`PrivateVocabulary`) are found by bounded votes, Gaussian noise and a threshold. Each user
votes for at most D0 words, with votes of L2 norm at most 1. The votes of each word are summed, Gaussian noise is added,
and the words whose noisy sum exceeds a threshold are released. This costs two events: a Gaussian mechanism, and the
probability that a word which only one user wrote exceeds the threshold.

    release = WordRelease.for_budget(epsilon=1.0, delta=1e-9, words_per_user=100)
    votes = release.vote(len(release.choose(words_of_user, salt, user)))
    passed, noisy = release.release(sums_of_votes, generator)
    release.events()              # the cost, which every run on the store pays

This is the weighted Gaussian mechanism for set union (Gopi et al., "Differentially Private Set Union", ICML 2020). The
proof is in docs/private-vocabulary.md. The paper mentions such a mechanism in its appendix "Model" but does not use it.

**A public corpus** (`CorpusVocabulary`) contributes its most frequent words. They are counted without noise.

**Counting** uses a fixed amount of memory. When the words in memory reach a limit, their sums are written to a Parquet
file with the columns word and total. At the end DuckDB adds up all files.

    CountVotes       counts the votes of the training users of one shard; a grouping backend runs it on each shard
    count_public     counts the words of a public text
    summed           yields the total of each word over all files
"""

import hashlib
import itertools
import math
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import numpy as np

from unheard.config import require
from unheard.corpus.encode import EncodingOptions, GroupedText
from unheard.corpus.grouping import Grouping, Rows, SplitRule, by_user
from unheard.corpus.readers import open_database, quoted, scan_error, scan_sql
from unheard.corpus.sources import Fields, Source, find_sources, make_batches
from unheard.corpus.store import TokenStore
from unheard.corpus.tokenizers import Tokenizer, WordTokenizer, cut_text
from unheard.corpus.vocabulary import SPECIALS, Vocabulary, VocabularyResult
from unheard.errors import InputError, PrivacyError
from unheard.privacy.events import Event, FailureProbability, Gaussian, to_record
from unheard.randomness import secure_generator

UNIT = 1 << 30
"""The integer that represents a vote of 1.0.

Votes are integers, so that their sum does not depend on the order of addition and has no rounding errors, which could
reveal private information.
"""

MAX_WORD_CHARS = 64
"""The largest number of characters of a word in the vocabulary. Longer words get no votes."""

MAX_EPSILON, MAX_WORDS_PER_USER, MAX_NOISE = 1000.0, 1_000_000, 2.0**28
"""The largest epsilon, number of words per user and noise multiplier that are accepted.

A guarantee with a larger epsilon means nothing in practice. Noise with a larger standard deviation could overflow the
64-bit integers.
"""


@dataclass(frozen=True, kw_only=True)
class WordRelease:
    """The mechanism that releases words: bounds the votes of each user, adds noise to the sums and applies a threshold.

    Each user votes for at most `words_per_user` words. The L2 norm of the votes of one user is at most `UNIT`.

    Args:
        noise_multiplier: The standard deviation of the noise, in units of the sensitivity `UNIT`.
        threshold_delta: An upper bound on the probability that any word which only one user wrote is released.
        words_per_user: The largest number of words that a user votes for (D0).

    Raises:
        InvalidValue: A value is outside its limits.
    """

    noise_multiplier: float
    threshold_delta: float
    words_per_user: int

    def __post_init__(self) -> None:
        require(
            0 < self.noise_multiplier <= MAX_NOISE,
            f"noise_multiplier must be above 0 and at most {MAX_NOISE:g}, not {self.noise_multiplier}.",
        )
        require(0 < self.threshold_delta < 1, f"threshold_delta must be in (0, 1), not {self.threshold_delta}.")
        require(
            1 <= self.words_per_user <= MAX_WORDS_PER_USER,
            f"words_per_user must be from 1 to {MAX_WORDS_PER_USER:,}, not {self.words_per_user}.",
        )

    @classmethod
    def for_budget(cls, epsilon: float, delta: float, words_per_user: int) -> "WordRelease":
        """Return the mechanism that costs (epsilon, delta): half of delta for the noise, half for the threshold.

        Args:
            epsilon: The privacy cost of the release, at most `MAX_EPSILON`.
            delta: The delta of the release, between 0 and 1.
            words_per_user: The largest number of words that a user votes for.

        Raises:
            InvalidValue: A value is outside its limits.
        """
        import dp_accounting

        require(0 < epsilon <= MAX_EPSILON, f"epsilon must be above 0 and at most {MAX_EPSILON:g}, not {epsilon}.")
        require(0 < delta < 1, f"delta must be in (0, 1), not {delta}.")
        with np.errstate(all="ignore"):  # the search tries extreme values, for which NumPy would print warnings
            noise_multiplier = dp_accounting.get_sigma_gaussian(epsilon, delta / 2)
        return cls(noise_multiplier=noise_multiplier, threshold_delta=delta / 2, words_per_user=words_per_user)

    def choose(self, words: Iterable[str], salt: str, user: str) -> list[str]:
        """Return the words that a user votes for: all words, or a pseudo-random choice of `words_per_user` of them.

        The choice depends only on the arguments, so the text of other users does not change it.

        Args:
            words: The words of the user, each once.
            salt: The salt of the store.
            user: The id of the user.
        """
        words = list(words)
        if len(words) <= self.words_per_user:
            return words
        key = hashlib.sha256(f"{len(salt)}:{salt}{user}".encode("utf-8", "surrogatepass")).digest()
        words.sort(key=lambda w: hashlib.blake2b(w.encode("utf-8", "surrogatepass"), key=key, digest_size=8).digest())
        # DP: no user votes for more words than the threshold was computed for.
        return words[: self.words_per_user]

    def vote(self, num_words: int) -> int:
        """Return the vote for each word of a user who votes for `num_words` words: UNIT / sqrt(num_words).

        It is rounded down, so that the L2 norm of the votes of the user is at most UNIT.
        """
        # DP: rounding down keeps num_words * vote^2 <= UNIT^2, the sensitivity that the noise is scaled to.
        return math.isqrt(UNIT * UNIT // num_words)

    def threshold(self) -> int:
        """Return the threshold T, in units of votes (1.0 is `UNIT`).

        Consider a user with t words that no other user wrote. T is the smallest integer such that none of these words
        exceeds T, with probability at least exp(-threshold_delta), for every t up to `words_per_user`. In a formula:
        t * -ln Phi((T - vote(t)) / sigma) <= threshold_delta, with sigma = noise_multiplier * UNIT.
        """
        from scipy.special import ndtri_exp

        t = np.arange(1, self.words_per_user + 1)
        # DP: every possible number of words is covered, not only the largest: one word has the largest vote.
        margins = ndtri_exp(-self.threshold_delta / t) * self.noise_multiplier * UNIT
        votes = np.array([self.vote(int(n)) for n in t], dtype=np.float64)
        return math.ceil(float(np.max(votes + margins)))

    def release(self, sums: np.ndarray, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Add noise to the sums of votes and compare them with the threshold.

        Args:
            sums: The sum of the votes for each word, int64. Private.
            generator: The generator of the noise. It must be secure (`secure_generator`) if the result is published.

        Returns:
            A mask of the words that are released, and the noisy sums. The noisy sum of a word that is not released is
            private.
        """
        # DP: one independent draw for each word, scaled to the sensitivity UNIT, rounded to whole votes.
        noise = np.rint(generator.standard_normal(len(sums)) * (self.noise_multiplier * UNIT)).astype(np.int64)
        noisy = sums + noise
        # DP: strictly above; an equal one would pass more often than the threshold's delta allows.
        passed = noisy > self.threshold()
        return passed, noisy

    def events(self) -> list[Event]:
        """Return the cost of the release: the Gaussian mechanism, and the failure probability of the threshold."""
        return [Gaussian(noise_multiplier=self.noise_multiplier), FailureProbability(delta=self.threshold_delta)]


@dataclass(frozen=True, kw_only=True)
class PrivateVocabulary:
    """The training users' own words, released with user-level differential privacy (see `WordRelease`).

    The store records the events of the release, and the ledger of every run on the store begins with them.

    Args:
        epsilon, delta: The privacy cost of the vocabulary.
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
        """Release words of the training users (see `VocabularySource.build`).

        If an interrupted `prepare` has already released the words for the same request, return those words.
        """
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
        """Count the votes on all shards, charge the cost, and return the words above the threshold by noisy sum.

        Raises:
            InputError: No word is above the threshold. The cost stays charged.
        """
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


@dataclass(frozen=True, kw_only=True)
class CorpusVocabulary:
    """The words of a public corpus: the first words of the vocabulary of a store, or the most frequent words of text.

    Args:
        path: A token store, a .txt file, or any input of `prepare`.
        size: The largest number of words, including BOS, EOS and UNK.
        text_field: The column with the text. None means that it has the same name as in the main input.
    """

    path: str
    size: int = 10_000
    text_field: str | None = None

    def check_is_public(self, inputs: Sequence[Source]) -> None:
        """Raise `PrivacyError` if a file of the "public" corpus, or a copy of it, is also an input of `prepare`.

        Paths are compared, and the content of files of equal size. Stores and Hugging Face datasets are not checked.

        Args:
            inputs: The inputs of `prepare`, with the users' text.
        """
        if (Path(self.path) / "corpus.json").is_file() or not Path(self.path).exists():
            return
        is_text = self.path.endswith(".txt") and Path(self.path).is_file()
        given = {Path(self.path).resolve()} if is_text else _files_of(find_sources([self.path]))
        own = _files_of(inputs)
        # DP: a copy of the users' text is no more public than the text.
        if own & given or any(_is_copy(one, other) for one in own for other in given):
            raise PrivacyError(
                f"{self.path} is the users' own text, or a copy of it: its words are not public. Use --vocab private, "
                "which pays for them, or give other text."
            )

    def build(self, text: GroupedText) -> VocabularyResult:
        """Return the words of another store, or count the words of a public text (see `VocabularySource.build`).

        Raises:
            InputError: No word occurs twice in the text, or the text cannot be read.
        """
        if (Path(self.path) / "corpus.json").is_file():
            other = TokenStore.open(self.path)
            words = other.vocabulary.words[: self.size]
            provenance = {
                "source": f"the vocabulary of the store {other.info.get('name', Path(self.path).name)}",
                **{key: value for key, value in other.info["vocabulary"].items() if key == "draws"},
            }
            # DP: words that were paid for keep their cost: the users may be the same.
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
            raise InputError(f"{self.path} holds no word twice: it is too small for a vocabulary. Give more text.")
        totals.sort(key=lambda pair: (-pair[0], pair[1]))
        words = [word for _, word in totals[: self.size - len(SPECIALS)]]
        return VocabularyResult(vocabulary=Vocabulary.of(words), provenance={"source": Path(self.path).name})


def _files_of(sources: Iterable[Source]) -> set[Path]:
    """Return the files of the sources. Hugging Face datasets have none."""
    return {Path(source.path).resolve() for source in sources if source.format != "hub"}


def _is_copy(one: Path, other: Path) -> bool:
    """Whether two files have the same content and are not empty."""
    if not (one.is_file() and other.is_file() and 0 < one.stat().st_size == other.stat().st_size):
        return False
    with open(one, "rb") as first, open(other, "rb") as second:
        return hashlib.file_digest(first, "sha256").digest() == hashlib.file_digest(second, "sha256").digest()


def public_texts(path: str, field: str, grouping: Grouping) -> Iterator[str]:
    """Yield the texts of a public input: the lines of a .txt file, or the text column of any input of `prepare`.

    Args:
        path: The input.
        field: The name of the column with the text. A .txt file needs none.
        grouping: The grouping of the store that is prepared. Its memory limit, its work folder and the name of its
            database table are used.
    """
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


_MAX_WORDS = 1 << 19  # The largest number of different words, and of cached chunks, in memory.
_PIECE_CHARS = 1 << 19  # A longer text is split into words in pieces of about this many characters.


@dataclass(frozen=True, kw_only=True)
class CountVotes:
    """A `ShardTask` that counts the votes of the training users of one shard.

    Users vote only for words of the text that the store will contain.

    Args:
        folder: The folder for the files of sums.
        tokenizer: The tokenizer that splits text into words.
        options: The rules by which posts become a stream. Words after the end of the stream get no votes.
        splits: The rule that assigns users to splits.
        release: The mechanism, which bounds the votes of each user.
    """

    folder: Path
    tokenizer: Tokenizer
    options: EncodingOptions
    splits: SplitRule
    release: WordRelease

    def __call__(self, shard: int, rows: Rows) -> dict[str, Any]:
        """Write the sums of one shard to files, and return `{"files": number of files}`.

        Args:
            shard: The number of the shard.
            rows: The rows of the shard, sorted by user.
        """
        split = CachedSplitter(self.tokenizer)
        sums = WordSums(self.folder, shard)
        for user, lists in by_user(rows):
            # DP: only training users have a vote: the event is charged to runs on them, and to nobody else.
            if self.splits.split_of(user) != "train":
                continue
            words = self.words_of(itertools.chain.from_iterable(lists), split)
            if words:
                chosen = self.release.choose(words, self.splits.salt, user)
                sums.add(dict.fromkeys(chosen, self.release.vote(len(chosen))))
        return {"files": sums.finish()}

    def words_of(self, texts: Iterator[str], split: "CachedSplitter") -> set[str]:
        """Return the words of a user's stream that may be voted for, each once.

        The result is empty if the user has fewer than `options.min_tokens` tokens and so will not be in the store.

        Args:
            texts: The posts of the user, in order.
            split: The function that splits a text into words.
        """
        words: set[str] = set()
        left = self.options.tokens_per_user
        count = 0
        for text in self.options.texts(texts):
            own = split(text)
            if not own:
                continue
            words.update(own if left is None else own[:left])
            count += len(own) + 1
            if left is not None:
                left -= len(own) + 1
                if left <= 0:
                    break
        return {w for w in words if _votable(w)} if count >= self.options.min_tokens else set()


class CachedSplitter:
    """A function that splits text into words. For a `WordTokenizer` it caches the words of each chunk of text.

    Args:
        tokenizer: The tokenizer that defines the words.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._chunks: dict[str, list[str]] = {}

    def __call__(self, text: str) -> list[str]:
        if not isinstance(self._tokenizer, WordTokenizer):
            return self._tokenizer.split(text)
        words: list[str] = []
        for chunk in itertools.chain.from_iterable(piece.split() for piece in cut_text(text, _PIECE_CHARS)):
            known = self._chunks.get(chunk)
            if known is None:
                if len(self._chunks) >= _MAX_WORDS:
                    self._chunks.clear()
                known = self._chunks[chunk] = self._tokenizer.split_chunk(chunk)
            words += known
        return words


def _votable(word: str) -> bool:
    """Whether a word may get votes: it is not a special word and has at most `MAX_WORD_CHARS` characters."""
    return len(word) <= MAX_WORD_CHARS and word not in SPECIALS


class WordSums:
    """Adds up numbers by word. When there are too many words in memory, it writes them to a Parquet file.

    Args:
        folder: The folder of the files; it is created if missing.
        shard: The number of the shard. It is part of the file names, so that several processes can write into one
            folder.
    """

    def __init__(self, folder: Path, shard: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._shard = folder, shard
        self._sums: Counter[str] = Counter()
        self._files = 0

    def add(self, numbers: dict[str, int]) -> None:
        """Add a number to the sum of each word."""
        for word, number in numbers.items():
            self._sums[word] += number
        if len(self._sums) >= _MAX_WORDS:
            self._write()

    def finish(self) -> int:
        """Write the sums that are still in memory, and return the number of files written in all."""
        self._write()
        return self._files

    def _write(self) -> None:
        """Write the sums that are in memory to a new file, and clear them."""
        if not self._sums:
            return
        file = self._folder / f"{self._shard:05d}-{self._files:05d}.parquet"
        database = duckdb.connect(":memory:")
        database.execute(
            "CREATE TABLE sums AS SELECT unnest(?) AS word, unnest(?::BIGINT[]) AS total",
            [[*self._sums], [*self._sums.values()]],
        )
        database.execute(f"COPY sums TO {quoted(str(file))} (FORMAT parquet)")
        database.close()
        self._files += 1
        self._sums.clear()


def summed(folder: Path, grouping: Grouping, at_least: int = 0) -> Iterator[tuple[list[str], np.ndarray]]:
    """Yield the words and their totals over all files, sorted by word, in blocks of up to 65,536 words.

    Args:
        folder: The folder with the files of `WordSums`.
        grouping: The grouping whose memory limit and work folder are used.
        at_least: Words with a smaller total are left out.
    """
    if not any(folder.glob("*.parquet")):
        return
    database = open_database(grouping.memory_bytes, 2, str(grouping.work / "temp"))
    result = database.execute(
        f"SELECT word, CAST(sum(total) AS BIGINT) AS total FROM read_parquet({quoted(str(folder / '*.parquet'))}) "
        f"GROUP BY word HAVING sum(total) >= {at_least} ORDER BY word"
    )
    while rows := result.fetchmany(1 << 16):
        yield [row[0] for row in rows], np.array([row[1] for row in rows], dtype=np.int64)
    database.close()


def count_public(texts: Iterable[str], tokenizer: Tokenizer, folder: Path) -> None:
    """Count how often each word occurs in a public text, and write the counts to files that `summed` reads.

    Args:
        texts: The public texts.
        tokenizer: The tokenizer that splits the texts into words.
        folder: The folder for the files of counts.
    """
    split = CachedSplitter(tokenizer)
    sums = WordSums(folder, 0)
    for text in texts:
        sums.add(Counter(w for w in split(text) if _votable(w)))
    sums.finish()
