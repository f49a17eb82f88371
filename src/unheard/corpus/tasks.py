"""What is done with one shard's users: their streams are written. The same code on a laptop and on a Spark worker.

In: (user, text) in order. Out: shard files, one for each split, and counts. Nothing here holds more than one user at
a time, and of a long user only a piece.
"""

import functools
import itertools
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from unheard.corpus.cleaning import strip_quotes
from unheard.corpus.shards import Shard, ShardWriter, token_dtype
from unheard.corpus.splits import SplitRule
from unheard.corpus.streams import Encoder, Sequence, stream_pieces
from unheard.corpus.tokens import Tokens
from unheard.corpus.vocabulary import UNK, Vocabulary
from unheard.errors import CorpusError

_HOLD_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class StreamRule:
    """How posts become a stream, and which users stay."""

    sequence: Sequence = "post"
    min_tokens: int = 1
    tokens_per_user: int | None = None
    strip_quotes: bool = False

    def posts(self, texts: Iterator[str]) -> Iterator[str]:
        return map(strip_quotes, texts) if self.strip_quotes else texts


@dataclass(frozen=True, kw_only=True)
class WriteStreams:
    """Writes the streams of a shard into `folder`/<split>/. Given `names`, also who is who, for the owner's map."""

    folder: Path
    tokens: Tokens
    vocabulary: Vocabulary
    rule: StreamRule
    splits: SplitRule
    names: Path | None = None

    def __call__(self, shard: int, rows: Iterator[tuple[str, str]]) -> dict[str, Any]:
        dtype = token_dtype(len(self.vocabulary))
        encoder = _encoder(self.tokens, self.vocabulary)
        writers = {name: ShardWriter(self.folder / name, shard, dtype) for name in self.splits.names()}
        counts: Counter[str] = Counter()
        kept: dict[str, list[str]] = {name: [] for name in writers}
        try:
            for user, posts in itertools.groupby(rows, key=itemgetter(0)):
                split = self.splits.split_of(user)
                tokens = self._write_user(writers[split], encoder, map(itemgetter(1), posts))
                counts["users_seen"] += 1
                if not tokens:
                    counts["users_too_short"] += 1
                    continue
                counts[f"{split}_users"] += 1
                counts[f"{split}_tokens"] += tokens
                if self.names is not None:
                    kept[split].append(user)
            for split, writer in writers.items():
                writer.close()
                counts[f"{split}_unknown"] = _unknown(Shard.found(self.folder / split / f"{shard:05d}.offsets", dtype))
        except OSError as trouble:
            for writer in writers.values():
                writer.abandon()
            raise CorpusError(
                f"Cannot write to {self.folder}: {trouble.strerror}. Make room, then run the same command again."
            ) from None
        if self.names is not None:
            (self.names / f"{shard:05d}.json").write_text(json.dumps(kept), encoding="utf-8")
        return dict(counts)

    def _write_user(self, writer: ShardWriter, encoder: Encoder, texts: Iterator[str]) -> int:
        """One user's stream. The number of its tokens, or 0 and nothing written if it is shorter than the rule asks."""
        held, count = b"", 0
        for piece, tokens in stream_pieces(
            self.rule.posts(texts), encoder, self.rule.sequence, self.rule.tokens_per_user
        ):
            held += piece
            count += tokens
            if len(held) >= _HOLD_BYTES and count >= self.rule.min_tokens:
                writer.write(held)
                held = b""
        if count < self.rule.min_tokens:
            return 0
        writer.write(held)
        writer.end_user()
        return count


@functools.lru_cache(maxsize=1)
def _encoder(tokens: Tokens, vocabulary: Vocabulary) -> Encoder:
    """One for a process, so that what it has by heart serves every shard."""
    return Encoder(tokens, vocabulary)


def _unknown(shard: Shard) -> int:
    blocks = range(0, shard.num_tokens, 1 << 22)
    return sum(int(np.count_nonzero(shard.tokens[b : b + (1 << 22)] == UNK)) for b in blocks)
