"""The token store: a folder that holds the token ids of all users, by split. Training reads nothing else.

    corpus.json        how the store was prepared; it may be published with a run and contains no count of users
    counts.json        exact counts, for the owner only (mode 0600)
    layout.json        the number of shards and the dtype of the ids (mode 0600)
    digests.json       the size and SHA-256 of the other files, except the ledger and ledgers.json (mode 0600); stores of
                       version 0.1.0 have none
    vocabulary.txt     one word per line, in the order of the ids
    train/ held_out/ public/ test_posts/     the shards of each split, optionally features.npy (numbers about each user)
        NNNNN.tokens      ids, little-endian unsigned integers of 2 or 4 bytes (`token_dtype`), one user after the other
        NNNNN.offsets     int64: the index of the first id of each user, and at the end the number of ids
    ledger.jsonl       the privacy ledger of these users, written by training (privacy/population_ledger.py)
    ledgers.json       the last known states of all ledgers of these users (privacy/population_ledger.py)

    store = TokenStore.open("corpora/posts")
    store.train.num_users
    store.train.tokens(0)                         # the ids of user 0, a view of the file
    store.train.users(np.array([7, 3, 12]))       # the ids of a cohort, read in the order of the disk

    Shard, ShardWriter      one shard: read through a memory map, written in one pass
    UserTokens              the users of one split, in all of its shards
    TokenStore              a store that is open for reading
    StoreWriter             writes a store into the folder `<path>.partial`, which is renamed when the store is complete

Users are numbers; the store contains no user ids and no text. An incomplete store is never at its final path. Opening a
store takes milliseconds: it checks the size of every file, and the digest of every file except tokens and features.
`TokenStore.check_files` checks all digests.
"""

import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from unheard import storage
from unheard.config import read_json
from unheard.corpus import AVAILABLE_CORES
from unheard.corpus.vocabulary import BOS, Vocabulary
from unheard.errors import CorpusCorrupt, CorpusError, CorpusMissing
from unheard.privacy.ledger import DIGESTS, NO_LEDGERS, RECORD, corpus_name

OFFSET_BYTES = 8
"""The number of bytes of one entry of an .offsets file (int64)."""
REMEDY = "The store was damaged after it was written: prepare it again, or bring back an undamaged copy."
"""The last sentence of most `CorpusCorrupt` messages: what the owner can do."""
FORMAT = 1
"""The version of the store format, recorded in corpus.json. `TokenStore.open` refuses other versions."""
SPLITS = ("train", "held_out", "public", "test_posts")
"""The names of all splits, which are also the names of their folders. Every store has the first two."""

_LARGE_FILES = (".tokens", ".npy")  # Endings of the files whose digests are not checked when a store is opened.
_WHOLE_STORE_ONLY = ("counts.json", "canaries.json")  # Files that a part of a store does not have.

_LONG_USER = 400  # From this mean number of ids per user on, one copy per user is faster than copying by index.
_SAMPLED_USERS = 64  # The number of users per shard that `UserTokens.samples` hashes.


def token_dtype(vocabulary_size: int) -> np.dtype:
    """Return the dtype of the ids of a store: 2 bytes if the vocabulary has at most 65,536 words, otherwise 4.

    It is little-endian on every machine, so that a store can be copied to a machine of another kind.
    """
    return np.dtype("<u2" if vocabulary_size <= 1 << 16 else "<u4")


class ShardWriter:
    """Writes one shard. A user may be written in pieces, so the ids of a user need not fit into memory.

    `close` gives the files their final names when they are complete and on disk.

    Args:
        folder: The folder of the split; it is created if missing.
        number: The number of the shard.
        dtype: The dtype of the ids.
    """

    def __init__(self, folder: Path, number: int, dtype: np.dtype) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._stem = folder / f"{number:05d}"
        self._dtype = dtype
        self._tokens = open(f"{self._stem}.tokens.writing", "wb")  # noqa: SIM115 (closed by `close` or `abandon`)
        self._ends = [0]
        self._written = 0

    def write(self, piece: bytes | bytearray | memoryview) -> None:
        """Write more ids of the current user.

        Args:
            piece: The bytes of the ids in the dtype of the shard.
        """
        self._tokens.write(piece)
        self._written += len(piece)

    def end_user(self) -> None:
        """End the current user; the next `write` begins the next user."""
        self._ends.append(self._written // self._dtype.itemsize)

    def discard_user(self) -> None:
        """Remove the ids of the current user, that is, everything written since the last `end_user`."""
        self._written = self._ends[-1] * self._dtype.itemsize
        self._tokens.seek(self._written)
        self._tokens.truncate()

    def append(self, tokens: np.ndarray) -> None:
        """Write all ids of one user."""
        self.write(np.ascontiguousarray(tokens, dtype=self._dtype).tobytes())
        self.end_user()

    def append_many(self, flat: np.ndarray, lengths: np.ndarray) -> None:
        """Write all ids of many users.

        Args:
            flat: The ids of all users, one user after the other.
            lengths: The number of ids of each user.
        """
        ends = self._written // self._dtype.itemsize + np.cumsum(lengths)
        self.write(np.ascontiguousarray(flat, dtype=self._dtype).tobytes())
        self._ends.extend(ends.tolist())

    def close(self) -> None:
        """Sync both files to disk and rename them to their final names.

        The .offsets file is renamed last, so if it exists the shard is complete.
        """
        storage.finish_file(self._tokens, Path(f"{self._stem}.tokens"))
        storage.replace_file(Path(f"{self._stem}.offsets"), np.array(self._ends, dtype="<i8").tobytes())

    def abandon(self) -> None:
        """Delete the unfinished file of ids. No shard is written."""
        self._tokens.close()
        Path(f"{self._stem}.tokens.writing").unlink(missing_ok=True)


def write_shard(folder: Path, number: int, users: Iterable[np.ndarray], dtype: np.dtype) -> None:
    """Write a shard from arrays in memory.

    Args:
        folder: The folder of the split; it is created if missing.
        number: The number of the shard.
        users: One array of ids per user.
        dtype: The dtype of the ids.
    """
    writer = ShardWriter(folder, number, dtype)
    for tokens in users:
        writer.append(tokens)
    writer.close()


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One shard on disk. The numbers of users and ids are known when it is opened; the files are mapped on first use.

    Args:
        stem: The path of the two files without their endings.
        dtype: The dtype of the ids.
        num_users: The number of users.
        num_tokens: The number of ids of all users, BOS included.
        is_local: Whether the .tokens file is in this copy of the store.
    """

    stem: str
    dtype: np.dtype
    num_users: int
    num_tokens: int
    is_local: bool = True
    """A part of a store has the .offsets files of all shards, but the .tokens files of only some training shards."""

    @classmethod
    def open(cls, offsets_path: Path, dtype: np.dtype, *, may_lack_tokens: bool = False) -> "Shard":
        """Open a shard and check that the sizes of its two files agree. Reads only the last offset.

        Args:
            offsets_path: The .offsets file.
            dtype: The dtype of the ids.
            may_lack_tokens: Whether the .tokens file may be missing, as in a part of a store.

        Raises:
            CorpusCorrupt: A file is missing or its size is wrong.
        """
        stem = str(offsets_path.with_suffix(""))
        num_offsets, rest = divmod(offsets_path.stat().st_size, OFFSET_BYTES)
        token_bytes = None
        try:
            token_bytes = os.stat(f"{stem}.tokens").st_size
        except FileNotFoundError:
            if not may_lack_tokens:
                raise CorpusCorrupt(f"{stem}.tokens is missing, but its .offsets file exists. {REMEDY}") from None
        if rest or not num_offsets:
            raise CorpusCorrupt(f"{offsets_path} is cut short: {offsets_path.stat().st_size} bytes. {REMEDY}")
        with open(offsets_path, "rb") as offsets:
            offsets.seek(-OFFSET_BYTES, os.SEEK_END)
            last = int.from_bytes(offsets.read(OFFSET_BYTES), "little", signed=True)
        if token_bytes is not None and last * dtype.itemsize != token_bytes:
            wanted = last * dtype.itemsize
            raise CorpusCorrupt(f"{stem}.tokens holds {token_bytes} bytes where its offsets ask for {wanted}. {REMEDY}")
        is_local = token_bytes is not None
        return cls(stem=stem, dtype=dtype, num_users=num_offsets - 1, num_tokens=last, is_local=is_local)

    @cached_property
    def tokens(self) -> np.ndarray:
        """The ids of all users, one user after the other. Raises `CorpusError` if they are not in this copy."""
        if not self.is_local:
            raise CorpusError(
                f"{self.stem}.tokens is not in this part of the store. "
                "Use the whole store, or train on ranks that hold all of it."
            )
        if not self.num_tokens:  # an empty file cannot be mapped
            return np.empty(0, dtype=self.dtype)
        return np.asarray(np.memmap(f"{self.stem}.tokens", dtype=self.dtype, mode="r"))

    @cached_property
    def offsets(self) -> np.ndarray:
        """The index of the first id of each user, and at the end the number of ids."""
        return np.asarray(np.memmap(f"{self.stem}.offsets", dtype="<i8", mode="r"))


class UserTokens:
    """The users of one split, numbered from 0. Each user is an array of token ids.

    Args:
        shards: The shards, in the order of the users.
        dtype: The dtype of the ids.
        features_UF: Numbers about each user, float32 [U, F]; None if the split has no features.
        vocabulary_size: `users` and `concatenated` raise `CorpusCorrupt` for an id that is not smaller; None turns the
            check off.
        location: The folder of the store and the name of the split, with which other processes open the same users.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        dtype: np.dtype,
        features_UF: np.ndarray | None = None,
        vocabulary_size: int | None = None,
        location: tuple[str, str] | None = None,
    ) -> None:
        self.location = location
        """The folder of the store and the name of the split; None for users outside a store."""
        self._shards = shards
        self._vocabulary_size = vocabulary_size
        self._features_UF = features_UF
        self._dtype = dtype
        # The number of the first user of each shard, and at the end the number of users.
        self._first = np.concatenate([[0], np.cumsum([s.num_users for s in shards], dtype=np.int64)]).astype(np.int64)
        self.num_users = int(self._first[-1])
        self.num_tokens = sum(s.num_tokens for s in shards)

    def tokens(self, k: int) -> np.ndarray:
        """Return the ids of user k, as a view of the mapped file. Raise `IndexError` if there is no such user."""
        if not 0 <= k < self.num_users:
            raise IndexError(f"user {k} is out of range: the split has users 0 to {self.num_users - 1}")
        s = int(np.searchsorted(self._first, k, side="right")) - 1
        begin, end = self._shards[s].offsets[k - self._first[s] :][:2]
        return self._shards[s].tokens[begin:end]

    def users(self, cohort: np.ndarray) -> list[np.ndarray]:
        """Return a copy of the ids of each user of a cohort. The users are read in the order in which they are on disk.

        Args:
            cohort: The numbers of the users, in any order.

        Returns:
            An array of ids for each user, in the order of the cohort.

        Raises:
            CorpusCorrupt: An id is outside the vocabulary.
            IndexError: A number in the cohort is negative or not smaller than the number of users.
        """
        flat, lengths = self.concatenated(cohort)
        return np.split(flat, np.cumsum(lengths)[:-1]) if len(lengths) else []

    def random_posts(self, num_tokens: int, salt: str) -> list[np.ndarray]:
        """Draw random posts until they have exactly `num_tokens` predicted tokens (all ids except BOS).

        The paper's test set is 75,122 tokens of random posts of held-out users. The last post is cut to fit. The result
        has fewer tokens if the users have fewer.

        Args:
            num_tokens: The number of predicted tokens.
            salt: The seed of the random choice of posts.

        Returns:
            The ids of each post, beginning with BOS.
        """
        starts = [np.flatnonzero(self.tokens(k) == BOS) for k in range(self.num_users)]
        owner = np.repeat(np.arange(len(starts)), [len(s) for s in starts])
        start = np.concatenate(starts) if starts else np.empty(0, dtype=np.int64)
        seed = int.from_bytes(hashlib.sha256(f"test posts\0{salt}".encode()).digest()[:8], "little")
        posts, left = [], num_tokens
        for i in np.random.Generator(np.random.Philox(seed)).permutation(len(start)).tolist():
            if left <= 0:
                break
            tokens = self.tokens(int(owner[i]))[start[i] :]
            ends = np.flatnonzero(tokens[1:] == BOS)
            post = tokens[: int(ends[0]) + 1 if len(ends) else len(tokens)][: left + 1]
            posts.append(np.array(post))
            left -= len(post) - 1
        return posts

    def concatenated(self, cohort: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of a cohort as one array, user after user, and the number of ids of each user.

        The argument and the errors are those of `users`. For many short users this function is much faster.
        """
        cohort = np.asarray(cohort, dtype=np.int64)
        begins, ends, shard_of = self._spans(cohort)
        lengths = ends - begins
        starts = np.cumsum(lengths) - lengths
        flat = np.empty(int(lengths.sum()), dtype=self._dtype)
        for s in np.unique(shard_of):
            source = np.asarray(self._shards[int(s)].tokens)
            members = np.flatnonzero(shard_of == s)
            are_short = lengths[members].mean() < _LONG_USER
            if are_short and len(members) == len(cohort) and (np.diff(begins) >= 0).all():
                # All users are in one shard and in its order, as samplers draw them: no second list of indices is needed.
                return self._checked(source[ranges(begins, lengths)]), lengths
            members = members[np.argsort(begins[members], kind="stable")]
            if are_short:
                flat[ranges(starts[members], lengths[members])] = source[ranges(begins[members], lengths[members])]
                continue
            for i in members.tolist():
                flat[starts[i] : starts[i] + lengths[i]] = source[begins[i] : ends[i]]
        return self._checked(flat), lengths

    def _checked(self, flat: np.ndarray) -> np.ndarray:
        """Return ids that were read, unchanged. Raise `CorpusCorrupt` if one is outside the vocabulary."""
        if self._vocabulary_size is not None and flat.size and int(flat.max()) >= self._vocabulary_size:
            raise CorpusCorrupt(
                f"A shard in {Path(self._shards[0].stem).parent} holds token ids outside the vocabulary. {REMEDY}"
            )
        return flat

    def check_boundaries(self) -> None:
        """Raise `CorpusCorrupt` if the ids of two users overlap. It reads all offsets, so training calls it once."""
        for shard in self._shards:
            # DP: one person's text under two users would be two users' worth of influence.
            if int(shard.offsets[0]) != 0 or (np.diff(shard.offsets) < 0).any():
                raise CorpusCorrupt(f"{shard.stem}.offsets does not rise from 0: users would overlap. {REMEDY}")

    def shard_of(self, cohort: np.ndarray) -> np.ndarray:
        """Return the number of the shard of each user of a cohort."""
        return np.searchsorted(self._first, np.asarray(cohort, dtype=np.int64), side="right") - 1

    @property
    def shards_here(self) -> np.ndarray:
        """A mask over the shards: True if the ids of the shard are in this copy of the store."""
        return np.array([shard.is_local for shard in self._shards])

    def tokens_of_shards(self) -> np.ndarray:
        """Return the number of ids in each shard, int64."""
        return np.array([shard.num_tokens for shard in self._shards], dtype=np.int64)

    def boundaries_digest(self) -> bytes:
        """Return a hash of the offsets of all users.

        It is the same for all copies of a store, including parts that lack some ids.
        """
        digest = hashlib.sha256()
        for shard in self._shards:
            digest.update(np.ascontiguousarray(shard.offsets).data)
        return digest.digest()

    def samples(self) -> list[str | None]:
        """Return for each shard a hash of the ids and features of some users; None if the shard is not in this copy.

        The hashes tell stores apart that have the same `boundaries_digest`, such as stores in which all users have the
        same length. To hash all ids of a large store would take too long. The sampled users are spread evenly over the
        shard.
        """
        hashes: list[str | None] = []
        for shard, first in zip(self._shards, self._first, strict=False):
            digest = hashlib.sha256()
            for k in np.unique(np.linspace(0, max(shard.num_users - 1, 0), _SAMPLED_USERS, dtype=np.int64))[
                : shard.num_users
            ]:
                if shard.is_local:
                    digest.update(np.ascontiguousarray(shard.tokens[shard.offsets[k] : shard.offsets[k + 1]]).data)
                    digest.update(self.features(np.array([first + k])).tobytes())
            hashes.append(digest.hexdigest() if shard.is_local else None)
        return hashes

    def lengths(self, cohort: np.ndarray | None = None) -> np.ndarray:
        """Return the number of ids of each user, BOS included.

        Args:
            cohort: The numbers of the users; None means all users of the split.
        """
        if cohort is None:
            return np.concatenate([np.diff(s.offsets) for s in self._shards] or [np.empty(0, dtype=np.int64)])
        begins, ends, _ = self._spans(np.asarray(cohort, dtype=np.int64))
        return ends - begins

    @property
    def num_features(self) -> int:
        """The number of features per user; 0 for a split without `features.npy`."""
        return 0 if self._features_UF is None else self._features_UF.shape[1]

    def features(self, cohort: np.ndarray) -> np.ndarray:
        """Return the features of each user of a cohort, float32 [U, F]; F is 0 if the split has no features.

        Features are numbers about the user, which a model may use as an extra input (the paper's appendix B).
        """
        if self._features_UF is None:
            return np.empty((len(cohort), 0), dtype=np.float32)
        return np.asarray(self._features_UF[np.asarray(cohort, dtype=np.int64)], dtype=np.float32)

    def blocks(self, tokens_per_block: int = 1 << 22) -> Iterator[np.ndarray]:
        """Yield the ids of all users in the order of the files, in blocks of up to `tokens_per_block` ids.

        A block may begin and end in the middle of a user.
        """
        for shard in self._shards:
            for begin in range(0, shard.num_tokens, tokens_per_block):
                yield shard.tokens[begin : begin + tokens_per_block]

    def _spans(self, cohort: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return, for each user of a cohort, the index of the first id, the index after the last id, and the shard.

        The indices are relative to the shard. Raises `IndexError` for a number that is not the number of a user.
        """
        if len(cohort) and not (cohort.min() >= 0 and cohort.max() < self.num_users):
            raise IndexError(f"the cohort has numbers outside users 0 to {self.num_users - 1}")
        shard_of = self.shard_of(cohort)
        begins, ends = np.empty(len(cohort), dtype=np.int64), np.empty(len(cohort), dtype=np.int64)
        for s in np.unique(shard_of):
            mine = shard_of == s
            local = cohort[mine] - self._first[s]
            begins[mine], ends[mine] = self._shards[int(s)].offsets[local], self._shards[int(s)].offsets[local + 1]
        return begins, ends, shard_of


class TokenStore:
    """A store that is open for reading. Use `TokenStore.open`, which checks the files, instead of the constructor.

    Args:
        path: The folder.
        info: The content of corpus.json; nothing in it depends on the number of users.
        layout: The content of layout.json: the number of shards and the dtype of the ids.
        vocabulary: The vocabulary of the ids.

    Attributes:
        train, held_out: The users of these splits (`UserTokens`).
        public: Users whose text is public, or None if the store has no such split.
        test_posts: A random sample of held-out posts, each stored as one user; None if there is no such split.
        shards: The number of shards of each split except `test_posts`, which has one.
        dtype: The dtype of the ids in the files.
        part: The content of part.json if this copy is a part of a store (`transform.split_store`); otherwise None.
        digests: The size in bytes and the SHA-256 of each file; None for a store of version 0.1.0.

    Example:
        >>> import tempfile, unheard
        >>> rows = [{"user": f"user {i}", "text": "hello there"} for i in range(40)]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = unheard.prepare(rows, f"{folder}/store").path
        ...     store = unheard.TokenStore.open(path)
        ...     [store.vocabulary.word(i) for i in store.train.tokens(0)]
        ['<BOS>', 'hello', 'there', '<EOS>']
    """

    def __init__(self, path: Path, info: dict[str, Any], layout: dict[str, Any], vocabulary: Vocabulary) -> None:
        self.path = path
        self.info = info
        self.vocabulary = vocabulary
        self.shards = int(layout["shards"])
        self.dtype = np.dtype(layout["dtype"])
        self.part = _read_json(path / "part.json") if (path / "part.json").is_file() else None
        is_recorded = bool(info.get("digests")) or os.path.lexists(path / DIGESTS)
        self.digests = _read_digests(path) if is_recorded else None
        self.train = self._split("train")
        self.held_out = self._split("held_out")
        self.public = self._split("public") if (path / "public").is_dir() else None
        self.test_posts = self._split("test_posts") if (path / "test_posts").is_dir() else None

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> "TokenStore":
        """Open the store at `path` and check its files.

        The sizes of all files are checked, and the digests of all files except tokens and features.

        Raises:
            CorpusMissing: There is no store, or only an unfinished one.
            CorpusCorrupt: A file is missing or damaged, or the store has another format version.
        """
        folder = Path(path)
        for checked in (folder, *(folder / split for split in SPLITS)):
            if special := storage.special_file(checked):
                raise CorpusCorrupt(f"{special} is not a regular file. {REMEDY}")
        if not (folder / "corpus.json").is_file():
            unfinished = partial_path(folder).is_dir()
            # A relative path in a run file may have been written for another current folder.
            seen = "" if folder.is_absolute() else " (seen from here)"
            what = "only an unfinished one (prepare was stopped)" if unfinished else "nothing"
            if folder.is_file():
                raise CorpusMissing(
                    f"{folder} is a file, not a token store. Make a store from it with `unheard prepare {folder} "
                    "--user-field COLUMN --text-field COLUMN --out corpora/NAME`, and name the store."
                )
            if (folder / "run.toml").is_file():
                raise CorpusMissing(
                    f"{folder} is a run folder, not a token store. Name the folder that `unheard prepare --out` wrote."
                )
            if (folder / DIGESTS).exists():
                raise CorpusCorrupt(
                    f"{folder / 'corpus.json'} is missing beside the other files of the store. {REMEDY}"
                )
            raise CorpusMissing(
                f"No token store at {folder}{seen}: there is {what}. "
                f"Make one with `unheard prepare INPUT --out {folder}`"
                f"{' (the same command continues where it stopped)' if unfinished else ''}."
            )
        info, layout = _read_json(folder / "corpus.json"), _read_json(folder / "layout.json")
        if info.get("format") != FORMAT:
            raise CorpusCorrupt(
                f"{folder} has store format {info.get('format')}; this version reads {FORMAT}: prepare it again."
            )
        vocabulary = Vocabulary.load(folder / "vocabulary.txt")
        if vocabulary.digest != info.get("vocabulary", {}).get("sha256"):
            raise CorpusCorrupt(
                f"{folder / 'vocabulary.txt'} is not the word list that the tokens were made with. {REMEDY}"
            )
        if layout.get("dtype") != token_dtype(len(vocabulary)).str or not isinstance(layout.get("shards"), int):
            raise CorpusCorrupt(f"{folder / 'layout.json'} does not fit the vocabulary. {REMEDY}")
        store = cls(folder, info, layout, vocabulary)
        store._check_sizes()
        # DP: a flipped bit in the offsets moves text from one user to another, and no size changes.
        # DP: damaged, corpus.json may have lost the events of a private vocabulary.
        store._check_digests(name for name in store.digests or () if not name.endswith(_LARGE_FILES))
        return store

    def check_files(self) -> int | None:
        """Check the digests of all files of the store. This reads the whole store, about a gigabyte per second.

        Returns:
            The number of files that were checked; None for a store of version 0.1.0, which has no digests.

        Raises:
            CorpusCorrupt: A file is missing, or its content has changed since it was written.
        """
        if self.digests is None:
            return None
        return self._check_digests(self.digests)

    def check_evaluated(self) -> None:
        """Check the digests of the text that evaluations read: that of held-out and public users, and of the test posts.

        Raises:
            CorpusCorrupt: A file is missing, or its content has changed since it was written.
        """
        self._check_digests(name for name in self.digests or () if not name.startswith("train/"))

    def _check_sizes(self) -> None:
        """Raise `CorpusCorrupt` if a file that has a digest is missing or has another size."""
        for name, (size, _) in (self.digests or {}).items():
            try:
                actual = os.stat(self.path / name).st_size
            except FileNotFoundError:
                if self._may_lack(name):
                    continue
                raise CorpusCorrupt(f"{self.path / name} is missing. {REMEDY}") from None
            if actual != size:
                raise CorpusCorrupt(f"{self.path / name} has {actual} bytes instead of {size}. {REMEDY}")

    def _check_digests(self, names: Iterable[str]) -> int:
        """Check the digests of some files and return the number of files that were read.

        Files that a part of a store may lack are skipped if they are missing.

        Args:
            names: The names of the files, relative to the folder of the store.

        Raises:
            CorpusCorrupt: A file cannot be read, or its SHA-256 differs from the one in digests.json.
        """
        checked = 0
        for name in names:
            if self._may_lack(name) and not (self.path / name).exists():
                continue
            if _sha256(self.path / name) != (self.digests or {})[name][1]:
                raise CorpusCorrupt(
                    f"{self.path / name} does not have the content that it was written with: its SHA-256 is not the "
                    f"one in {DIGESTS}. {REMEDY}"
                )
            checked += 1
        return checked

    def _may_lack(self, name: str) -> bool:
        """Whether the file may be missing because this copy is a part of a store.

        A part lacks the ids of some training shards, counts.json and canaries.json.
        """
        is_train = name.startswith("train/") and name.endswith(".tokens")
        return self.part is not None and (is_train or name in _WHOLE_STORE_ONLY)

    def __fspath__(self) -> str:
        """Return the folder of the store, so that a store can be given instead of a path, as in `Run(corpus=store)`."""
        return str(self.path)

    @property
    def name(self) -> str:
        """A hash of corpus.json. It identifies how the store was prepared and may be published.

        It depends neither on the number of users nor on their text, so two stores may have the same name.
        """
        return corpus_name(self.info)

    @property
    def content_digest(self) -> str:
        """A hash of the files of the training split, the same for all parts of a store. It is as secret as the text.

        Two stores that were prepared in the same way have the same `name`, but different content digests.

        A store of version 0.1.0 has no digests. For it this is a hash of the users' offsets only.
        """
        files = sorted(
            (name, sha256) for name, (_, sha256) in (self.digests or {}).items() if name.startswith("train/")
        )
        content = json.dumps(files).encode() if files else self.train.boundaries_digest()
        return hashlib.sha256(content).hexdigest()

    @property
    def counts(self) -> dict[str, Any]:
        """The content of counts.json, or an empty dictionary if this copy has no such file.

        The counts are exact and private: only the owner may see them. They must not enter a report or a run folder.
        """
        file = self.path / "counts.json"
        return _read_json(file) if file.is_file() else {}

    @property
    def vocabulary_events(self) -> list[dict[str, Any]]:
        """The events that the vocabulary cost, as JSON records. The ledger of every run on the store begins with them."""
        return list(self.info["vocabulary"].get("events", []))

    def _split(self, name: str) -> UserTokens:
        """Open all shards and the features of a split. Raise `CorpusCorrupt` if a shard is missing or damaged."""
        is_part = self.part is not None and name == "train"
        paths = sorted((self.path / name).glob("*.offsets"))
        shards = [Shard.open(p, self.dtype, may_lack_tokens=is_part) for p in paths]
        wanted = 1 if name == "test_posts" else self.shards
        if len(shards) != wanted or [Path(s.stem).name for s in shards] != [f"{i:05d}" for i in range(wanted)]:
            raise CorpusCorrupt(f"{self.path / name} does not have its {wanted} shards. {REMEDY}")
        file, size = self.path / name / "features.npy", len(self.vocabulary)
        num_users = sum(shard.num_users for shard in shards)
        features_UF = _read_features(file, num_users) if file.is_file() else None
        location = (str(self.path.resolve()), name)
        return UserTokens(shards, self.dtype, features_UF, vocabulary_size=size, location=location)


class StoreWriter:
    """Writes a store into `<path>.partial` and renames it to `path` when it is complete.

    Args:
        path: The folder of the store. It must be missing or empty.
        keep_partial: Whether an unfinished store is kept, so that a later call can resume it. If not, files of an
            earlier unfinished store are deleted at the start, and those of this one after an error.

    Raises:
        CorpusError: `path` is a file or a folder that is not empty.
    """

    def __init__(self, path: str | os.PathLike[str], *, keep_partial: bool = False) -> None:
        self.path = self.check_path(path)
        self.partial = partial_path(self.path)
        self._keep_partial = keep_partial
        if self.partial.exists() and not keep_partial:
            shutil.rmtree(self.partial)
        self.partial.mkdir(parents=True, exist_ok=True)
        os.chmod(self.partial, 0o700)

    @staticmethod
    def check_path(path: str | os.PathLike[str]) -> Path:
        """Return `path`; raise `CorpusError` if it is a file or a folder that is not empty."""
        path = Path(path)
        if not storage.is_missing_or_empty(path):
            raise CorpusError(f"{path} already exists: name another folder with --out, or remove this one first.")
        return path

    def __enter__(self) -> "StoreWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and not self._keep_partial:
            shutil.rmtree(self.partial, ignore_errors=True)

    def finish(
        self, *, vocabulary: Vocabulary, info: Mapping[str, Any], counts: Mapping[str, Any], shards: int
    ) -> TokenStore:
        """Write all files other than the shards (`describe`), then rename the store to its final path (`publish`).

        Args:
            vocabulary: The vocabulary of the ids.
            info: The entries of corpus.json. They may be published, so they must not contain private values.
            counts: The content of counts.json, for the owner only.
            shards: The number of shards in each split.

        Returns:
            The finished store, open for reading.
        """
        self.describe(vocabulary=vocabulary, info=info, counts=counts, shards=shards)
        return self.publish()

    def describe(
        self, *, vocabulary: Vocabulary, info: Mapping[str, Any], counts: Mapping[str, Any], shards: int
    ) -> TokenStore:
        """Write all files other than the shards, and open the store at its partial path.

        The files are vocabulary.txt, counts.json, layout.json, corpus.json, digests.json and, if it is missing,
        ledgers.json. After this call and before `publish`, a caller may still connect the store with a ledger.

        Args:
            vocabulary, info, counts, shards: As in `finish`.
        """
        vocabulary.save(self.partial / "vocabulary.txt")
        write_private_json(self.partial / "counts.json", counts)
        layout = {"dtype": token_dtype(len(vocabulary)).str, "shards": shards}
        write_private_json(self.partial / "layout.json", layout)
        whole = {"format": FORMAT, **info, "digests": "sha256"}
        whole["vocabulary"] = {
            "kind": "given",
            **info.get("vocabulary", {}),
            "size": len(vocabulary),
            "sha256": vocabulary.digest,
        }
        content = json.dumps(whole, indent=2, ensure_ascii=False) + "\n"
        storage.replace_file(self.partial / "corpus.json", content.encode())
        if not (self.partial / RECORD).exists():  # An existing file names the ledger that this store continues.
            write_private_json(self.partial / RECORD, NO_LEDGERS)
        write_digests(self.partial)
        return TokenStore.open(self.partial)

    def publish(self) -> TokenStore:
        """Rename the complete store to its final path, in one atomic step, and open it there."""
        if self.path.exists():
            self.path.rmdir()  # `check_path` made sure that the folder is empty.
        storage.rename_folder(self.partial, self.path)
        return TokenStore.open(self.path)


def write_store(
    path: str | os.PathLike[str],
    *,
    train: Sequence[np.ndarray],
    held_out: Sequence[np.ndarray],
    vocabulary: Vocabulary,
    info: Mapping[str, Any] | None = None,
    public: Sequence[np.ndarray] | None = None,
    shards: int = 1,
    features: Mapping[str, np.ndarray] | None = None,
) -> TokenStore:
    """Write a store from arrays in memory, and open it. For tests, examples and small corpora.

    Args:
        path: The folder of the store; it must be missing or empty.
        train, held_out, public: For each split, one array of ids per user. None leaves the split out.
        vocabulary: The vocabulary of the ids.
        info: More entries for corpus.json.
        shards: The number of shards of each split.
        features: For each split with features, an array of shape [U, F] with the numbers about each user.
    """
    splits = {"train": train, "held_out": held_out} | ({} if public is None else {"public": public})
    with StoreWriter(path) as writer:
        for name, users in splits.items():
            cuts = np.linspace(0, len(users), shards + 1).astype(int)
            for number, (begin, end) in enumerate(itertools.pairwise(cuts)):
                write_shard(writer.partial / name, number, users[begin:end], token_dtype(len(vocabulary)))
            if features and name in features:
                np.save(writer.partial / name / "features.npy", np.asarray(features[name], dtype=np.float32))
        return writer.finish(vocabulary=vocabulary, info=info or {}, counts={}, shards=shards)


def ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the integers of several ranges, one range after the other.

    Args:
        starts: The first integer of each range.
        lengths: The number of integers in each range.

    >>> ranges(np.array([5, 20]), np.array([3, 2]))
    array([ 5,  6,  7, 20, 21])
    """
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts - before, lengths) + np.arange(int(lengths.sum()))


def _read_features(path: Path, num_users: int) -> np.ndarray:
    """Map features.npy into memory, float32 [U, F].

    Raises:
        CorpusCorrupt: The file has another shape or dtype, or contains pickled objects.
    """
    try:
        features_UF = np.load(path, mmap_mode="r", allow_pickle=False)
        fits = features_UF.ndim == 2 and len(features_UF) == num_users and features_UF.dtype == np.float32
    except (ValueError, OSError, EOFError):
        fits, features_UF = False, np.empty((0, 0))
    if not fits:
        raise CorpusCorrupt(f"{path} must be float32 with one row for each user of its split: write it again.")
    return features_UF


def write_digests(folder: Path, known: Mapping[str, tuple[int, str]] | None = None) -> None:
    """Write digests.json: the size and the SHA-256 of every file of a store except ledger.jsonl and ledgers.json.

    Args:
        folder: The folder of the store. All other files must be complete.
        known: Digests that are written without reading the files. A part of a store uses those of the whole store, so
            its digests.json also lists the files that the part lacks.
    """
    files = dict(known or {})
    names = ["corpus.json", "layout.json", "vocabulary.txt", "part.json", *_WHOLE_STORE_ONLY]
    for split in SPLITS:
        endings = ("*.offsets", "*.tokens", "features.npy")
        names += sorted(f"{split}/{path.name}" for ending in endings for path in (folder / split).glob(ending))
    new = [name for name in names if name not in files and (folder / name).is_file()]
    with ThreadPoolExecutor(AVAILABLE_CORES) as threads:
        for name, digest in zip(new, threads.map(_sha256, [folder / name for name in new]), strict=True):
            files[name] = ((folder / name).stat().st_size, digest)
    content = {name: {"bytes": size, "sha256": digest} for name, (size, digest) in files.items()}
    write_private_json(folder / DIGESTS, {"files": content, "ledgers": (folder / RECORD).is_file()})


def tokens_digest(table: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the record of a tokenizer. The header of a run's ledger contains this digest.

    Args:
        table: The record: the entry `tokens` of corpus.json, or the content of tokens.json in a run folder.
    """
    return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()


def _read_digests(folder: Path) -> dict[str, tuple[int, str]]:
    """Return the size and the SHA-256 of each file, from digests.json.

    Raises:
        CorpusCorrupt: digests.json is missing or damaged.
    """
    try:
        files = _read_json(folder / DIGESTS)["files"]
        return {str(name): (int(entry["bytes"]), str(entry["sha256"])) for name, entry in files.items()}
    except (KeyError, TypeError, ValueError, AttributeError):
        raise CorpusCorrupt(f"{folder / DIGESTS} is damaged. {REMEDY}") from None


def _sha256(path: Path) -> str:
    """Return the SHA-256 of a file of a store. Raise `CorpusCorrupt` if the file cannot be read."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CorpusCorrupt(f"{path} cannot be read: {error.strerror}. {REMEDY}") from None


def write_private_json(path: Path, content: Mapping[str, Any] | Sequence[Any]) -> None:
    """Write a JSON file that only its owner can read (mode 0600).

    The file is created with this mode, so there is no moment at which others can read it.

    Args:
        path: The file; an existing file is replaced.
        content: The value to write.
    """
    path.unlink(missing_ok=True)
    storage.create_file(path, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())


def _read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file of a store.

    Raises:
        CorpusCorrupt: The file is missing or is not JSON, its value is not an object, or its entries `tokens` or
            `vocabulary` are not objects.
    """
    content = read_json(path)
    if not isinstance(content, dict) or not all(isinstance(content.get(k, {}), dict) for k in ("tokens", "vocabulary")):
        raise CorpusCorrupt(f"{path} is missing or damaged. {REMEDY}")
    return content


def partial_path(path: Path) -> Path:
    """Return the folder in which a store is written before it is complete: `<path>.partial`.

    It has the same parent folder as the store, so that the last step is a rename within one file system.
    """
    if path.name in ("", ".."):  # "/", "." and ".." have no name to which an ending can be added.
        path = path.resolve()
    return path.parent / f"{path.name}.partial"
