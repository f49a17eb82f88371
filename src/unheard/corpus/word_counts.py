"""Counting words without holding them all: users' votes for a private vocabulary, plain counts of a public text.

In: the rows of a shard, or the lines of a public text. Out: files of (word, sum) that DuckDB adds up within its
memory limit.
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
from unheard.corpus.readers.columns import quoted
from unheard.corpus.scan import open_database
from unheard.corpus.splits import SplitRule
from unheard.corpus.tokenizers import Tokenizer, WordTokenizer
from unheard.corpus.vocabulary import SPECIALS

_HELD_WORDS = 1 << 19


@dataclass(frozen=True, kw_only=True)
class CountVotes:
    """The votes of one shard's training users, of the very text that their streams will hold."""

    folder: Path
    tokens: Tokenizer
    rule: EncodingOptions
    splits: SplitRule
    release: WordRelease

    def __call__(self, shard: int, rows: Rows) -> dict[str, Any]:
        split = _splitter(self.tokens)
        sums = SumFiles(self.folder, shard)
        for user, lists in by_user(rows):
            # DP: only training users have a vote: the event is charged to runs on them, and to nobody else.
            if self.splits.split_of(user) != "train":
                continue
            words = self.words_of(itertools.chain.from_iterable(lists), split)
            if words:
                chosen = self.release.choose(words, self.splits.salt, user)
                sums.add(dict.fromkeys(chosen, self.release.vote(len(chosen))))
        return {"files": sums.finish()}

    def words_of(self, texts: Iterator[str], split: "Memo") -> set[str]:
        """The different words of a user's stream; none if the user is too short to be in the store."""
        words: set[str] = set()
        left = self.rule.tokens_per_user
        count = 0
        for text in self.rule.texts(texts):
            found = split(text)
            if not found:
                continue
            words.update(found if left is None else found[:left])
            count += len(found) + 1
            if left is not None:
                left -= len(found) + 1
                if left <= 0:
                    break
        return {w for w in words if _votable(w)} if count >= self.rule.min_tokens else set()


class Memo:
    """text -> words, with chunks of text remembered where that changes nothing."""

    def __init__(self, tokens: Tokenizer) -> None:
        self._tokens = tokens
        self._chunks: dict[str, list[str]] = {}

    def __call__(self, text: str) -> list[str]:
        if not isinstance(self._tokens, WordTokenizer):
            return self._tokens.split(text)
        words: list[str] = []
        for chunk in text.split():
            known = self._chunks.get(chunk)
            if known is None:
                if len(self._chunks) >= _HELD_WORDS:
                    self._chunks.clear()
                known = self._chunks[chunk] = self._tokens.split_chunk(chunk)
            words += known
        return words


def _splitter(tokens: Tokenizer) -> Memo:
    return Memo(tokens)


def _votable(word: str) -> bool:
    """Rules that are public: no special word, none longer than a word can be."""
    return len(word) <= MAX_WORD_CHARS and word not in SPECIALS


class SumFiles:
    """Adds up numbers for words; when it holds too many, what it has goes to a file and it begins again."""

    def __init__(self, folder: Path, shard: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._shard = folder, shard
        self._sums: Counter[str] = Counter()
        self._files = 0

    def add(self, numbers: dict[str, int]) -> None:
        for word, number in numbers.items():
            self._sums[word] += number
        if len(self._sums) >= _HELD_WORDS:
            self._write()

    def finish(self) -> int:
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
    """Words and their totals over all files, some thousand at a time, in order of the words."""
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


def count_public(texts: Iterable[str], tokens: Tokenizer, folder: Path) -> None:
    """Plain counts of a public text, for a vocabulary that costs nobody anything."""
    split = _splitter(tokens)
    sums = SumFiles(folder, 0)
    for text in texts:
        sums.add(Counter(w for w in split(text) if _votable(w)))
    sums.finish()
