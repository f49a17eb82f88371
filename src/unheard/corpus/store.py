"""A token store is a folder of users as numbers: opened in milliseconds, read where it lies, never half-written.

In: token streams of users, by split. Out: `corpus.json` (what may travel into a run folder: no count of any user),
`counts.json` and `layout.json` (exact counts and how the shards lie: for the owner only, mode 0600),
`vocabulary.txt`, and a folder of shards for each split. The paper's appendix "Dataset" is one such store: 763,430
users of exactly 1,600 tokens.
The users of one split of a store, read where they lie: any cohort in one pass over the disk.

In: the shards of a split. Out: the tokens of one user (a view), or of a cohort (copied in disk order, given in the
order asked for). Users are numbers; nothing here knows who they are.
"""

import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from unheard.corpus.shards import CURE, Shard, token_dtype, write_shard
from unheard.corpus.vocabulary import Vocabulary
from unheard.errors import CorpusCorrupt, CorpusError, CorpusMissing

SAMPLED = 64
"""Users of a shard that are looked at to tell copies of a store apart."""


class UserTokens:
    """The users of one split, numbered from 0; each is a run of token ids."""

    def __init__(
        self,
        shards: Sequence[Shard],
        dtype: np.dtype,
        features_UF: np.ndarray | None = None,
        vocabulary_size: int | None = None,
        place: tuple[str, str] | None = None,
    ) -> None:
        self.place = place
        """The store's folder and the split's name, where other processes find the same users; None for users of no store."""
        self._shards = shards
        self._vocabulary_size = vocabulary_size
        self._features_UF = features_UF
        self._dtype = dtype
        # first user of each shard, and at last the number of users
        self._first = np.concatenate([[0], np.cumsum([s.num_users for s in shards], dtype=np.int64)]).astype(np.int64)
        self.num_users = int(self._first[-1])
        self.num_tokens = sum(s.num_tokens for s in shards)

    def tokens(self, k: int) -> np.ndarray:
        """The tokens of user k: a view of the file, nothing is copied."""
        if not 0 <= k < self.num_users:
            raise IndexError(f"user {k} of a split with users 0 to {self.num_users - 1}")
        s = int(np.searchsorted(self._first, k, side="right")) - 1
        begin, end = self._shards[s].offsets[k - self._first[s] :][:2]
        return self._shards[s].tokens[begin:end]

    def users(self, cohort: np.ndarray) -> list[np.ndarray]:
        """The tokens of each user of a cohort, in its order, copied in one pass from the disk's front to its end."""
        cohort = np.asarray(cohort, dtype=np.int64)
        begins, ends, shard_of = self._spans(cohort)
        lengths = ends - begins
        places = np.concatenate([[0], np.cumsum(lengths)])
        flat = np.empty(int(places[-1]), dtype=self._dtype)
        for s in np.unique(shard_of):
            source = self._shards[int(s)].tokens
            for i in _in_disk_order(np.flatnonzero(shard_of == s), begins):
                flat[places[i] : places[i + 1]] = source[begins[i] : ends[i]]
        if self._vocabulary_size is not None and flat.size and int(flat.max()) >= self._vocabulary_size:
            raise CorpusCorrupt(f"{self._shards[0].stem} and its like hold words outside the vocabulary. {CURE}")
        return [flat[places[i] : places[i + 1]] for i in range(len(cohort))]

    def check_boundaries(self) -> None:
        """Refuse a split in which one user's text runs into another's. Reads every offset, so training asks once."""
        for shard in self._shards:
            # DP: one person's text under two users would be two users' worth of influence.
            if int(shard.offsets[0]) != 0 or (np.diff(shard.offsets) < 0).any():
                raise CorpusCorrupt(f"{shard.stem}.offsets does not rise from 0: users would overlap. {CURE}")

    def shard_of(self, cohort: np.ndarray) -> np.ndarray:
        """In which shard each user of a cohort lies."""
        return np.searchsorted(self._first, np.asarray(cohort, dtype=np.int64), side="right") - 1

    @property
    def shards_here(self) -> np.ndarray:
        """Which shards' tokens can be read in this copy of the store, a mask."""
        return np.array([shard.is_here for shard in self._shards])

    def tokens_of_shards(self) -> np.ndarray:
        return np.array([shard.num_tokens for shard in self._shards], dtype=np.int64)

    def boundaries_digest(self) -> bytes:
        """Names where every user begins and ends. Copies of one store agree in it, whatever tokens they hold."""
        digest = hashlib.sha256()
        for shard in self._shards:
            digest.update(np.ascontiguousarray(shard.offsets).data)
        return digest.digest()

    def samples(self) -> list[str | None]:
        """Of each shard that lies here, a hash over some of its users, spread evenly: their tokens, and what is known about them
        beside; of the others, None. Where all users are equally long, copies that number them otherwise differ in nothing else;
        and a whole store takes hours to read."""
        found: list[str | None] = []
        for shard, first in zip(self._shards, self._first, strict=False):
            digest = hashlib.sha256()
            for k in np.unique(np.linspace(0, max(shard.num_users - 1, 0), SAMPLED, dtype=np.int64))[: shard.num_users]:
                if shard.is_here:
                    digest.update(np.ascontiguousarray(shard.tokens[shard.offsets[k] : shard.offsets[k + 1]]).data)
                    digest.update(self.features(np.array([first + k])).tobytes())
            found.append(digest.hexdigest() if shard.is_here else None)
        return found

    def lengths(self, cohort: np.ndarray | None = None) -> np.ndarray:
        """How many ids each user of the cohort (or of the whole split) has, BOS included."""
        if cohort is None:
            return np.concatenate([np.diff(s.offsets) for s in self._shards] or [np.empty(0, dtype=np.int64)])
        begins, ends, _ = self._spans(np.asarray(cohort, dtype=np.int64))
        return ends - begins

    @property
    def num_features(self) -> int:
        """How many numbers there are about each user; 0 for a store without `features.npy`."""
        return 0 if self._features_UF is None else self._features_UF.shape[1]

    def features(self, cohort: np.ndarray) -> np.ndarray:
        """What is known about each user of a cohort beside their text, float32 [U, F] (the paper's appendix)."""
        if self._features_UF is None:
            return np.empty((len(cohort), 0), dtype=np.float32)
        return np.asarray(self._features_UF[np.asarray(cohort, dtype=np.int64)], dtype=np.float32)

    def blocks(self, tokens_per_block: int = 1 << 22) -> Iterator[np.ndarray]:
        """All tokens in disk order, in blocks that cut users anywhere: for whole-store counts."""
        for shard in self._shards:
            for begin in range(0, shard.num_tokens, tokens_per_block):
                yield shard.tokens[begin : begin + tokens_per_block]

    def _spans(self, cohort: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        if len(cohort) and not (cohort.min() >= 0 and cohort.max() < self.num_users):
            raise IndexError(f"a cohort outside users 0 to {self.num_users - 1}")
        shard_of = self.shard_of(cohort)
        begins, ends = np.empty(len(cohort), dtype=np.int64), np.empty(len(cohort), dtype=np.int64)
        for s in np.unique(shard_of):
            mine = shard_of == s
            local = cohort[mine] - self._first[s]
            begins[mine], ends[mine] = self._shards[int(s)].offsets[local], self._shards[int(s)].offsets[local + 1]
        return begins, ends, shard_of


def _in_disk_order(members: np.ndarray, begins: np.ndarray) -> list[int]:
    return members[np.argsort(begins[members], kind="stable")].tolist()


FORMAT = 1
SPLITS = ("train", "held_out", "public", "test_posts")


class TokenStore:
    """A whole store, opened for reading. `info` is corpus.json: nothing in it depends on how many users there are."""

    def __init__(self, path: Path, info: dict[str, Any], layout: dict[str, Any], vocabulary: Vocabulary) -> None:
        self.path = path
        self.info = info
        self.vocabulary = vocabulary
        self.shards = int(layout["shards"])
        self.dtype = np.dtype(layout["dtype"])
        self.part = _read_json(path / "part.json") if (path / "part.json").is_file() else None
        """Which part of a store this copy is (corpus/transform.py); None for a whole one."""
        self.train = self._split("train")
        self.held_out = self._split("held_out")
        self.public = self._split("public") if (path / "public").is_dir() else None
        self.test_posts = self._split("test_posts") if (path / "test_posts").is_dir() else None

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> "TokenStore":
        folder = Path(path)
        if not (folder / "corpus.json").is_file():
            unfinished = partial_path(folder).is_dir()
            seen = "" if folder.is_absolute() else " (seen from here)"  # a run file's path may be meant from elsewhere
            what = "only an unfinished one (prepare was stopped)" if unfinished else "nothing"
            raise CorpusMissing(
                f"No token store at {folder}{seen}: there is {what}. Make one with `unheard prepare INPUT --out {folder}`"
                f"{' (the same command again goes on where it stopped)' if unfinished else ''}."
            )
        info, layout = _read_json(folder / "corpus.json"), _read_json(folder / "layout.json")
        if info.get("format") != FORMAT:
            raise CorpusCorrupt(
                f"{folder} has store format {info.get('format')}; this version reads {FORMAT}: prepare it again."
            )
        vocabulary = Vocabulary.load(folder / "vocabulary.txt")
        if vocabulary.digest != info.get("vocabulary", {}).get("sha256"):
            raise CorpusCorrupt(
                f"{folder / 'vocabulary.txt'} is not the word list that the tokens were made with. {CURE}"
            )
        if layout.get("dtype") != token_dtype(len(vocabulary)).str or not isinstance(layout.get("shards"), int):
            raise CorpusCorrupt(f"{folder / 'layout.json'} does not fit the vocabulary. {CURE}")
        return cls(folder, info, layout, vocabulary)

    @property
    def name(self) -> str:
        """Names a corpus by how it was prepared; corpus.json holds no count and no text."""
        return hashlib.sha256(json.dumps(self.info, sort_keys=True).encode()).hexdigest()

    @property
    def counts(self) -> dict[str, Any]:
        """Exact counts of private users, for the owner. They never enter a report or a run folder."""
        file = self.path / "counts.json"
        return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}

    @property
    def vocabulary_events(self) -> list[dict[str, Any]]:
        """What finding the vocabulary cost the users: every run's ledger begins with these."""
        return list(self.info["vocabulary"].get("events", []))

    def _split(self, name: str) -> UserTokens:
        elsewhere = self.part is not None and name == "train"
        paths = sorted((self.path / name).glob("*.offsets"))
        found = [Shard.found(p, self.dtype, elsewhere=elsewhere) for p in paths]
        wanted = 1 if name == "test_posts" else self.shards
        if len(found) != wanted or [Path(s.stem).name for s in found] != [f"{i:05d}" for i in range(wanted)]:
            raise CorpusCorrupt(f"{self.path / name} does not have its {wanted} shards. {CURE}")
        file, size = self.path / name / "features.npy", len(self.vocabulary)
        num_users = sum(shard.num_users for shard in found)
        features_UF = _read_features(file, num_users) if file.is_file() else None
        place = (str(self.path.resolve()), name)
        return UserTokens(found, self.dtype, features_UF, vocabulary_size=size, place=place)


class StoreWriter:
    """Writes a store beside its place and moves it there when whole: nothing half-written is ever at the place."""

    def __init__(self, path: str | os.PathLike[str], *, keep_partial: bool = False) -> None:
        self.path = Path(path)
        if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise CorpusError(f"{self.path} already exists: name another folder with --out, or remove this one first.")
        self.partial = partial_path(self.path)
        self._keep_partial = keep_partial
        if self.partial.exists() and not keep_partial:
            shutil.rmtree(self.partial)
        self.partial.mkdir(parents=True, exist_ok=True)
        os.chmod(self.partial, 0o700)

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
        """Write what describes the store, corpus.json last, and move the whole to its place."""
        self.describe(vocabulary=vocabulary, info=info, counts=counts, shards=shards)
        return self.settle()

    def describe(
        self, *, vocabulary: Vocabulary, info: Mapping[str, Any], counts: Mapping[str, Any], shards: int
    ) -> TokenStore:
        """All that a store has beside its shards; it can be opened now, where nobody looks for it."""
        vocabulary.save(self.partial / "vocabulary.txt")
        write_private_json(self.partial / "counts.json", counts)
        layout = {"dtype": token_dtype(len(vocabulary)).str, "shards": shards}
        write_private_json(self.partial / "layout.json", layout)
        whole = {"format": FORMAT, **info}
        whole["vocabulary"] = {
            "kind": "given",
            **info.get("vocabulary", {}),
            "size": len(vocabulary),
            "sha256": vocabulary.digest,
        }
        (self.partial / "corpus.json").write_text(
            json.dumps(whole, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
        )
        return TokenStore.open(self.partial)

    def settle(self) -> TokenStore:
        """The whole to its place, in one step."""
        if self.path.exists():
            self.path.rmdir()  # empty: checked when this writer was made
        os.replace(self.partial, self.path)
        return TokenStore.open(self.path)


def write_store(
    path: str | os.PathLike[str],
    *,
    train: Sequence[np.ndarray],
    held_out: Sequence[np.ndarray],
    vocabulary: Vocabulary,
    info: Mapping[str, Any] | None = None,
    public: Sequence[np.ndarray] | None = None,
    test_posts: Sequence[np.ndarray] | None = None,
    counts: Mapping[str, Any] | None = None,
    shards: int = 1,
    features: Mapping[str, np.ndarray] | None = None,
) -> TokenStore:
    """A small store from arrays in memory: tests, examples, and corpora that fit. `features` by split: a row for each user."""
    splits = {"train": train, "held_out": held_out, "public": public, "test_posts": test_posts}
    with StoreWriter(path) as writer:
        for name, users in splits.items():
            if users is None:
                continue
            cuts = (
                np.linspace(0, len(users), shards + 1).astype(int)
                if name != "test_posts"
                else np.array([0, len(users)])
            )
            for number, (begin, end) in enumerate(itertools.pairwise(cuts)):
                write_shard(writer.partial / name, number, users[begin:end], token_dtype(len(vocabulary)))
            if features and name in features:
                np.save(writer.partial / name / "features.npy", np.asarray(features[name], dtype=np.float32))
        return writer.finish(vocabulary=vocabulary, info=info or {}, counts=counts or {}, shards=shards)


def _read_features(path: Path, num_users: int) -> np.ndarray:
    """One row of numbers for each user, as `features.npy` beside the shards; never unpickled."""
    try:
        features_UF = np.load(path, mmap_mode="r", allow_pickle=False)
        fits = features_UF.ndim == 2 and len(features_UF) == num_users and features_UF.dtype == np.float32
    except (ValueError, OSError, EOFError):
        fits, features_UF = False, np.empty((0, 0))
    if not fits:
        raise CorpusCorrupt(f"{path} must be float32 with one row for each user of its split: write it again.")
    return features_UF


def write_private_json(path: Path, content: Mapping[str, Any] | Sequence[Any]) -> None:
    """A file that only its owner can read: made with that mode, so that there is no moment at which others could."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=2, ensure_ascii=False)
        file.write("\n")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        content = None
    if not isinstance(content, dict) or not all(isinstance(content.get(k, {}), dict) for k in ("tokens", "vocabulary")):
        raise CorpusCorrupt(f"{path} is missing or does not read back as written. {CURE}")
    return content


def partial_path(path: Path) -> Path:
    """Where a store is written until it is whole: a sibling, so that the last move is a rename on one disk."""
    return path.with_name(path.name + ".partial")
