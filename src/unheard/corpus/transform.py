"""A store with a smaller dictionary: words beyond its first ranks become UNK, and nothing else changes.

In: a store whose dictionary is a list by rank. Out: the store that `prepare` would have made with the shorter list, to the byte
(for the public list, whose first words do not depend on how many are taken). No text is read; one large store serves for several.
Its users are the same people, so it has no ledger of its own: what is charged to them goes to the first store's.
A store in parts: for machines without a shared disk, each of which keeps some of the people's text and not the rest.

In: a store. Out: a copy of it in the same format that holds the tokens of some shards of `train` only; offsets, vocabulary and what
describes the store are whole, so that every machine knows which users there are. Held-out text is whole too: after a restart any
machine may be the one that measures. The people's ledger stays where it is: there is one, whoever holds their text. So do
exact counts and who carries canaries, which are the owner's: no machine needs them to train.
How it is used: `unheard corpus part`, and `[engine] corpus_part` in the run file (engines/distributed/store_replicas.py).
"""

import itertools
import os
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np

from unheard.corpus.progress import Progress
from unheard.corpus.shards import Shard, ShardWriter, token_dtype
from unheard.corpus.store import SPLITS, StoreWriter, TokenStore, partial_path, write_private_json
from unheard.corpus.vocabulary import SPECIALS, UNK, Vocabulary
from unheard.errors import CorpusError, InvalidValue
from unheard.privacy.population_ledger import FILE, PopulationLedger

GO = ("corpus.json", "layout.json", "vocabulary.txt")
"""Files of a store that go into every part. The ledger, exact counts and canaries stay, and what else its owner has put there."""


def split_store(
    store: TokenStore, out: str | os.PathLike[str], *, part: int, of: int, progress: Callable[[str, float], None]
) -> TokenStore:
    """Part number `part` (from 1) of `of`: neighbouring shards, in parts of nearly equal text."""
    if store.part is not None:
        raise CorpusError(f"{store.path} is itself a part. Divide the whole store.")
    if not 1 <= part <= of:
        raise InvalidValue(f"--part {part}/{of}: parts are numbered from 1 to {of}.")
    if of > store.shards:
        raise InvalidValue(
            f"--part {part}/{of}: {store.path} has {store.shards} shards, and a shard is never cut. Ask for at most "
            f"{store.shards} parts, or prepare the corpus with --shards {of} or more."
        )
    mine = shards_of_part(store, part, of)
    StoreWriter(out)  # refuses a folder that holds something, and makes the place beside it
    beside = partial_path(Path(out))
    files = [path for path in sorted(store.path.rglob("*")) if path.is_file() and _belongs(store, path, mine)]
    total = sum(path.stat().st_size for path in files) or 1
    copied = 0
    for path in files:
        target = beside / path.relative_to(store.path)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target)  # with its mode: what is for the owner alone stays so
        copied += path.stat().st_size
        progress("Copying", copied / total)
    samples = store.train.samples()  # of all shards: parts of different stores are told apart though they share none
    write_private_json(beside / "part.json", {"part": part, "of": of, "shards": mine, "samples": samples})
    if Path(out).exists():
        Path(out).rmdir()  # empty: checked when the writer was made
    os.replace(beside, out)
    return TokenStore.open(out)


def shards_of_part(store: TokenStore, part: int, of: int) -> list[int]:
    """The shards of one part: each part has at least one, and all have about the same number of tokens."""
    ends = np.cumsum(store.train.tokens_of_shards())
    cuts = [int(np.searchsorted(ends, ends[-1] * k / of)) + 1 for k in range(1, of)]
    # A cut may fall where another is: then the next shard that is free, and always enough left for the parts that follow.
    for k in range(len(cuts)):
        least = cuts[k - 1] + 1 if k else 1
        cuts[k] = min(max(cuts[k], least), store.shards - (of - 1 - k))
    begin, end = list(itertools.pairwise([0, *cuts, store.shards]))[part - 1]
    return list(range(begin, end))


def _belongs(store: TokenStore, path: Path, mine: list[int]) -> bool:
    if path.parent == store.path:
        return path.name in GO  # DP: one ledger: a copy of it would count without the other's rounds
    if path.parent.parent != store.path or path.parent.name not in SPLITS:
        return False
    if path.suffix == ".tokens":
        return path.parent.name != "train" or int(path.stem) in mine
    return path.suffix == ".offsets" or path.name == "features.npy"


_TOKENS_AT_ONCE = 1 << 22


def shrink_vocabulary(
    store: TokenStore,
    out: str | os.PathLike[str],
    *,
    vocabulary_size: int,
    progress: Progress = lambda step, fraction: None,
) -> TokenStore:
    """Write the narrower store beside the one that there is."""
    _check(store, vocabulary_size)
    population = PopulationLedger.open(store.path / FILE, {"corpus": store.name})
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
        population.join(PopulationLedger.open(made.path / FILE, {"corpus": made.name}))
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
