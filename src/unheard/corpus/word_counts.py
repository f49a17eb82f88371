"""Counts words within fixed memory: users' votes for a private vocabulary, and plain counts of a public text.

Counts go to Parquet files of (word, sum) whenever there are too many to hold; DuckDB adds the files up (`summed`).

    CountVotes       the task that a grouping backend runs on each shard: the votes of its training users
    count_public     the words of a public text
    summed           the totals over all files

A word gets a vote from each user that chose it, and each user's choice is limited (`private_vocabulary.WordRelease`),
so the sums are what the Gaussian mechanism releases.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import numpy as np

from unheard.corpus.backends import Grouping, Rows, by_user
from unheard.corpus.encode import EncodingOptions
from unheard.corpus.private_vocabulary import MAX_WORD_CHARS, WordRelease
from unheard.corpus.readers import quoted
from unheard.corpus.scan import open_database
from unheard.corpus.splits import SplitRule
from unheard.corpus.tokenizers import Tokenizer, WordTokenizer, cut_text
from unheard.corpus.vocabulary import SPECIALS

_MAX_WORDS = 1 << 19  # different words in memory
_PIECE_CHARS = 1 << 19  # characters of a text that are split at once


@dataclass(frozen=True, kw_only=True)
class CountVotes:
    """A `ShardTask`: counts the votes of the training users of a shard, on the text that the store will contain.

    Args:
        folder: Where the files of sums go.
        tokenizer: Splits text into words.
        options: How posts become streams; only words within the stream of a user count.
        splits: Which users train.
        release: The mechanism, which bounds the votes.
    """

    folder: Path
    tokenizer: Tokenizer
    options: EncodingOptions
    splits: SplitRule
    release: WordRelease

    def __call__(self, shard: int, rows: Rows) -> dict[str, Any]:
        """Write the sums of one shard; return the number of files."""
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
        """Return the different words of a user's stream; none if the user is too short to be in the store."""
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
    """Splits text into words. For a `WordTokenizer` it caches the words of each chunk."""

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
    """Public rules: no special word, and no word above the length limit."""
    return len(word) <= MAX_WORD_CHARS and word not in SPECIALS


class WordSums:
    """Sums of numbers by word. When there are too many words to hold, they go to a Parquet file.

    Args:
        folder: The folder of the files; it is created if missing.
        shard: The number of the shard, which names the files, so that several processes can write into one folder.
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
        """Write the rest; return the number of files."""
        self._write()
        return self._files

    def _write(self) -> None:
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
    """Yield words and their totals over all files, some thousand at a time, in the order of the words.

    Args:
        folder: The folder of the files of `WordSums`.
        grouping: Gives the memory limit and the folder for intermediate results.
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
    """Count the words of a public text into files in `folder`."""
    split = CachedSplitter(tokenizer)
    sums = WordSums(folder, 0)
    for text in texts:
        sums.add(Counter(w for w in split(text) if _votable(w)))
    sums.finish()
