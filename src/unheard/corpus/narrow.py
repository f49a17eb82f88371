"""A store with a smaller dictionary: words beyond its first ranks become UNK, and nothing else changes.

In: a store whose dictionary is a list by rank. Out: the store that `prepare` would have made with the shorter list, to the byte
(for the public list, whose first words do not depend on how many are taken). No text is read; one large store serves for several.
Its users are the same people, so it has no ledger of its own: what is charged to them goes to the first store's.
"""

import os
import shutil
from collections import Counter
from pathlib import Path

import numpy as np

from unheard.corpus.shards import Shard, ShardWriter, token_dtype
from unheard.corpus.store import SPLITS, StoreWriter, TokenStore
from unheard.corpus.vocabulary import SPECIALS, UNK, Vocabulary
from unheard.corpus.workers import Progress
from unheard.errors import CorpusError, InvalidValue
from unheard.privacy.population import FILE, Population

_TOKENS_AT_ONCE = 1 << 22


def narrow(
    store: TokenStore,
    out: str | os.PathLike[str],
    *,
    vocabulary_size: int,
    progress: Progress = lambda step, fraction: None,
) -> TokenStore:
    """Write the narrower store beside the one that there is."""
    _check(store, vocabulary_size)
    people = Population.open(store.path / FILE, {"corpus": store.name})
    vocabulary = Vocabulary(store.vocabulary.words[:vocabulary_size])
    splits = [name for name in SPLITS if (store.path / name).is_dir()]
    unknown: Counter[str] = Counter()
    with StoreWriter(out) as writer:
        for done, split in enumerate(splits):
            progress("Narrowing", done / len(splits))
            for path in sorted((store.path / split).glob("*.offsets")):
                shard = Shard.found(path, store.dtype)
                unknown[split] += _write(shard, writer.partial / split, int(path.stem), vocabulary_size)
            features = store.path / split / "features.npy"
            if features.is_file():
                shutil.copyfile(features, writer.partial / split / "features.npy")
        progress("Narrowing", 1.0)
        counts = store.counts
        if "users" in counts:
            known = {f"{split}_unknown": count for split, count in unknown.items()}
            counts["users"] |= {key: count for key, count in known.items() if key in counts["users"]}
        info = {**store.info, "vocabulary": {k: v for k, v in store.info["vocabulary"].items() if k != "sha256"}}
        del info["format"]
        if info.get("name") == store.path.resolve().name:  # it was called by its folder
            info["name"] = Path(out).name
        made = writer.describe(vocabulary=vocabulary, info=info, counts=counts, shards=store.shards)
        # DP: the same people under two ledgers would be charged in each as if the other's runs had not been. So the way to the
        # first one's ledger (which is the same from its place beside the store's) is there before the store is.
        people.join(Population.open(made.path / FILE, {"corpus": made.name}))
        return writer.settle()


def _check(store: TokenStore, size: int) -> None:
    if not len(SPECIALS) < size <= len(store.vocabulary):
        raise InvalidValue(
            f"--vocab-size {size}: the store has {len(store.vocabulary)} words, of which {len(SPECIALS)} are BOS, EOS and UNK. "
            "Choose a size between."
        )
    if store.part is not None:
        raise CorpusError(f"{store.path} is a part of a store. Narrow the whole store, then divide it again.")
    if store.info["vocabulary"].get("kind") == "tokenizer":
        raise CorpusError(
            f"{store.path} has a tokenizer's pieces, which are not in order of rank: prepare it with a smaller one."
        )
    if store.info.get("canaries"):
        raise CorpusError(
            f"{store.path} has canaries, whose words must all be in the dictionary: prepare it again with the smaller one."
        )


def _write(shard: Shard, folder: Path, number: int, size: int) -> int:
    """One shard again; how many UNK it holds now."""
    writer, unknown, begin = ShardWriter(folder, number, token_dtype(size)), 0, 0
    while begin < shard.num_users:
        limit = int(shard.offsets[begin]) + _TOKENS_AT_ONCE
        end = max(begin + 1, int(np.searchsorted(shard.offsets, limit, side="right")) - 1)
        edges = np.asarray(shard.offsets[begin : end + 1])
        ids = np.array(shard.tokens[edges[0] : edges[-1]])
        ids[ids >= size] = UNK
        unknown += int(np.count_nonzero(ids == UNK))
        writer.append_many(ids, np.diff(edges))
        begin = end
    writer.close()
    return unknown
