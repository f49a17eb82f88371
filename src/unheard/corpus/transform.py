"""Makes a store from another store: a part of it for one machine of several, or a copy with a smaller vocabulary.

    split_store(store, out, part=2, of=8)                    some of the training shards, for one machine of several
    shrink_vocabulary(store, out, vocabulary_size=10_000)    the first 10,000 words are kept, all others become UNK

Neither function needs the original text.

**Parts.** A part has the format of a store but lacks the token ids of some training shards. It has all offsets and the
whole vocabulary, so every machine knows all users. It also has all held-out text, since after a restart any machine may
evaluate. `unheard corpus part` writes a part; `[engine] corpus_part` in a run file names it
(engines/distributed/engine.py).

**Smaller vocabularies.** A store with a smaller vocabulary is byte for byte the store that `prepare` makes with the
shorter word list. (For the public list this holds because its first words do not depend on its length.) So one large
store is enough for experiments with several sizes.

**Ledgers.** The new store has the same users as the first store, so all runs on both must be charged to one ledger. A
part therefore has no ledger, and a copy with a smaller vocabulary refers to the ledger of the first store.
"""

import itertools
import os
import shutil
from collections import Counter
from pathlib import Path

import numpy as np

from unheard.corpus import Progress, no_progress
from unheard.corpus.store import (
    SPLITS,
    Shard,
    ShardWriter,
    StoreWriter,
    TokenStore,
    token_dtype,
    write_digests,
    write_private_json,
)
from unheard.corpus.vocabulary import SPECIALS, UNK, Vocabulary
from unheard.errors import CorpusError, InvalidValue
from unheard.privacy.population_ledger import FILE, PopulationLedger, open_population_ledger

COPIED_FILES = ("corpus.json", "layout.json", "vocabulary.txt")
"""The files in the folder of a store that are copied into every part.

Other files, such as the ledger, the exact counts and the record of canaries, are only in the whole store.
"""

_TOKENS_AT_ONCE = 1 << 22  # `shrink_vocabulary` reads about this many tokens at a time, which bounds the memory.


def split_store(
    store: TokenStore, out: str | os.PathLike[str], *, part: int, of: int, progress: Progress = no_progress
) -> TokenStore:
    """Write one part of a store and open it. All parts have about the same number of training tokens.

    Args:
        store: The whole store.
        out: The folder of the part; it must be missing or empty.
        part: The number of the part, from 1.
        of: The number of parts, at most the number of shards.
        progress: A callback that gets the finished fraction.

    Raises:
        CorpusError: The store is itself a part, or `out` is not empty.
        InvalidValue: There is no part with this number, or there are more parts than shards.
    """
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
    writer = StoreWriter(out)
    files = [path for path in sorted(store.path.rglob("*")) if path.is_file() and _is_copied(store, path, mine)]
    total = sum(path.stat().st_size for path in files) or 1
    copied = 0
    for path in files:
        target = writer.partial / path.relative_to(store.path)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target)  # `copy2` keeps the file mode, so files with mode 0600 stay private.
        copied += path.stat().st_size
        progress("Copying", copied / total)
    # Record samples of all shards, not only of this part, so that a run can detect parts of different stores.
    samples = store.train.samples()
    write_private_json(writer.partial / "part.json", {"part": part, "of": of, "shards": mine, "samples": samples})
    if store.digests is not None:
        write_digests(writer.partial, store.digests)
    return writer.publish()


def shards_of_part(store: TokenStore, part: int, of: int) -> list[int]:
    """Return the numbers of the training shards of one part, which are consecutive.

    Each part has at least one shard. All parts have about the same number of tokens.

    Args:
        store: The whole store.
        part: The number of the part, from 1.
        of: The number of parts.
    """
    ends = np.cumsum(store.train.tokens_of_shards())
    cuts = [int(np.searchsorted(ends, ends[-1] * k / of)) + 1 for k in range(1, of)]
    # If two cuts are equal, move the later cut to the next shard, but leave at least one shard for each later part.
    for k in range(len(cuts)):
        least = cuts[k - 1] + 1 if k else 1
        cuts[k] = min(max(cuts[k], least), store.shards - (of - 1 - k))
    begin, end = list(itertools.pairwise([0, *cuts, store.shards]))[part - 1]
    return list(range(begin, end))


def _is_copied(store: TokenStore, path: Path, mine: list[int]) -> bool:
    """Whether a file of the store is copied into a part that has the training shards `mine`."""
    if path.parent == store.path:
        return path.name in COPIED_FILES  # DP: one ledger: a copy of it would count without the other's rounds
    if path.parent.parent != store.path or path.parent.name not in SPLITS:
        return False
    if path.suffix == ".tokens":
        return path.parent.name != "train" or int(path.stem) in mine
    return path.suffix == ".offsets" or path.name == "features.npy"


def shrink_vocabulary(
    store: TokenStore,
    out: str | os.PathLike[str],
    *,
    vocabulary_size: int,
    progress: Progress = no_progress,
) -> TokenStore:
    """Write a copy of a store in which all words after the first `vocabulary_size` are UNK, and open it.

    Runs on the copy are charged to the ledger of the first store.

    Args:
        store: A whole store with a vocabulary that is sorted by frequency.
        out: The folder of the new store; it must be missing or empty.
        vocabulary_size: The number of words to keep, including BOS, EOS and UNK.
        progress: A callback that gets the finished fraction.

    Raises:
        InvalidValue: The size leaves no ordinary word, or is larger than the vocabulary.
        CorpusError: The store is a part, has canaries, or has the vocabulary of a tokenizer.json, which is not sorted
            by frequency.
    """
    _check_can_shrink(store, vocabulary_size)
    population = open_population_ledger(store.path, store.name, store.vocabulary_events, must_be_only=True)
    vocabulary = Vocabulary(store.vocabulary.words[:vocabulary_size])
    splits = [name for name in SPLITS if (store.path / name).is_dir()]
    unknown: Counter[str] = Counter()
    with StoreWriter(out) as writer:
        for done, split in enumerate(splits):
            progress("Narrowing", done / len(splits))
            for path in sorted((store.path / split).glob("*.offsets")):
                shard = Shard.open(path, store.dtype)
                unknown[split] += _shrink_shard(shard, writer.partial / split, int(path.stem), vocabulary_size)
            features = store.path / split / "features.npy"
            if features.is_file():
                shutil.copyfile(features, writer.partial / split / "features.npy")
        progress("Narrowing", 1.0)
        counts = store.counts
        if "users" in counts:
            new = {f"{split}_unknown": count for split, count in unknown.items()}
            counts["users"] |= {key: count for key, count in new.items() if key in counts["users"]}
        info = {**store.info, "vocabulary": {k: v for k, v in store.info["vocabulary"].items() if k != "sha256"}}
        del info["format"]
        if info.get("name") == store.path.resolve().name:  # By default the name of a store is that of its folder.
            info["name"] = Path(out).name
        described = writer.describe(vocabulary=vocabulary, info=info, counts=counts, shards=store.shards)
        # DP: the same users under two ledgers would be charged in each as if the other's runs had not been. So the
        # reference to the first store's ledger is written before the store is at its path. (The reference is relative
        # and the same from the partial path, which has the same parent.)
        population.join(PopulationLedger.open(described.path / FILE, {"corpus": described.name}))
        return writer.publish()


def _check_can_shrink(store: TokenStore, size: int) -> None:
    """Raise `InvalidValue` or `CorpusError` if the vocabulary of the store cannot be reduced to `size` words."""
    if not len(SPECIALS) < size <= len(store.vocabulary):
        raise InvalidValue(
            f"--vocab-size {size}: the store has {len(store.vocabulary)} words, of which {len(SPECIALS)} are BOS, EOS "
            f"and UNK. Choose a size from {len(SPECIALS) + 1} to {len(store.vocabulary)}."
        )
    if store.part is not None:
        raise CorpusError(
            f"{store.path} is a part of a store. Shrink the vocabulary of the whole store, then divide it again."
        )
    if store.info["vocabulary"].get("kind") == "tokenizer":
        raise CorpusError(
            f"{store.path} has a tokenizer's pieces, which are not in order of frequency: prepare the corpus "
            "with a smaller tokenizer."
        )
    if store.info.get("canaries"):
        raise CorpusError(
            f"{store.path} has canaries, whose words must all be in the vocabulary: "
            "prepare the corpus again with the smaller vocabulary."
        )


def _shrink_shard(shard: Shard, folder: Path, number: int, size: int) -> int:
    """Write a copy of a shard in which ids from `size` on are UNK, and return its number of UNK ids.

    Args:
        shard: The shard to copy.
        folder: The folder of the split in the new store.
        number: The number of the shard.
        size: The size of the smaller vocabulary.
    """
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
