"""The users of one split of a store, read where they lie: any cohort in one pass over the disk.

In: the shards of a split. Out: the tokens of one user (a view), or of a cohort (copied in disk order, given in the
order asked for). Users are numbers; nothing here knows who they are.
"""

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np

from unheard.corpus.shards import CURE, Shard
from unheard.errors import CorpusCorrupt

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
