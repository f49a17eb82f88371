"""A token store is a folder of users as numbers: opened in milliseconds, read where it lies, never half-written.

In: token streams of users, by split. Out: `corpus.json` (what may travel into a run folder: no count of any user),
`counts.json` and `layout.json` (exact counts and how the shards lie: for the owner only, mode 0600),
`vocabulary.txt`, and a folder of shards for each split. The paper's appendix "Dataset" is one such store: 763,430
users of exactly 1,600 tokens.
"""

import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from unheard.corpus.shards import CURE, Shard, token_dtype, write_shard
from unheard.corpus.user_tokens import UserTokens
from unheard.corpus.vocabulary import Vocabulary
from unheard.errors import CorpusCorrupt, CorpusError, CorpusMissing

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
        """Which part of a store this copy is (corpus/dividing.py); None for a whole one."""
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
