"""Where a rank reads users: the store at the leader's path, or this machine's replica or part of it.

Input: splits as messages name them (the leader's path of the store, the name of the split), and `[engine] corpus_part`.
Output: the same users, read on this machine. Every replica must be of the store that is charged, and must number
its users alike; otherwise one person could be summed twice under two numbers. `shard_holders` checks that before
the first round.
"""

import hashlib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from unheard.corpus.store import TokenStore, UserTokens
from unheard.engines.distributed.process_group import ProcessGroup
from unheard.errors import CorpusError, InvalidValue

DIGEST = 4
"""int64 numbers of a SHA-256."""


@dataclass
class StoreReplicas:
    """The stores that this process has opened, by the leader's path of each."""

    ranks: ProcessGroup
    template: str | None = None
    """`[engine] corpus_part`: the path of this machine's part, with {rank}, {local_rank} or {node} in it."""
    _open: dict[str, TokenStore] = field(default_factory=dict)

    def here(self, path: str) -> Path:
        """The path on this machine of the store that the leader has at `path`."""
        if self.template is None:
            return Path(path)
        try:
            filled = self.template.format(rank=self.ranks.rank, local_rank=self.ranks.local_rank, node=self.ranks.node)
        except (KeyError, IndexError, ValueError, AttributeError, TypeError):
            raise InvalidValue(
                f"engine.corpus_part = {self.template!r}: only {{rank}}, {{local_rank}} and {{node}} can be filled in."
            ) from None
        return Path(filled)

    def users(self, split: tuple[str, ...]) -> UserTokens:
        """The users of a split, given as (the leader's path of the store, the name of the split)."""
        path, name = split
        if path not in self._open:
            self._open[path] = TokenStore.open(self.here(path))
        users = getattr(self._open[path], name)
        if not isinstance(users, UserTokens):
            raise CorpusError(f"{self._open[path].path} has no {name}.")
        return users

    def fingerprint(self, split: tuple[str, ...]) -> np.ndarray:
        """The fingerprint of a split on this rank (`store_fingerprint`), and for each shard whether this rank holds
        it."""
        users = self.users(split)
        users.check_boundaries()
        return np.concatenate([store_fingerprint(self._open[split[0]], users), users.shards_here.astype(np.int64)])


def store_fingerprint(store: TokenStore, users: UserTokens) -> np.ndarray:
    """Three hashes as integers: the name of the corpus, the boundaries of its users, and samples of their text."""
    samples = users.samples()
    if store.part is not None:
        recorded = store.part.get("samples")
        recorded = recorded if isinstance(recorded, list) else []
        if len(recorded) != len(samples) or any(
            mine not in (None, whole) for mine, whole in zip(samples, recorded, strict=True)
        ):
            raise CorpusError(
                f"{store.path} is not the part that was made of its store. Make it again: unheard corpus part."
            )
        samples = recorded
    wrote = hashlib.sha256(" ".join(map(str, samples)).encode()).digest()
    return np.frombuffer(bytes.fromhex(store.name) + users.boundaries_digest() + wrote, dtype=np.int64)


def shard_holders(fingerprints: list[np.ndarray], store: TokenStore) -> np.ndarray:
    """Which rank holds which shard, bool [shards, ranks], from the fingerprints of all ranks.

    Raises:
        CorpusError: if a rank has another corpus, or no rank holds a shard.
    """
    expected, path = store_fingerprint(store, store.train), str(store.path)
    for rank, fingerprint in enumerate(fingerprints):
        # DP: copies that number users differently would let one person in twice, and those of another store are not
        # charged.
        if not np.array_equal(fingerprint[: 3 * DIGEST], expected):
            raise CorpusError(
                f"Rank {rank} has another corpus than the run's {path}. Give every rank a copy, or a part, of that store."
            )
    may_HR = np.stack([mine[3 * DIGEST :] for mine in fingerprints], axis=1).astype(bool)
    if len(lost := np.flatnonzero(~may_HR.any(axis=1))):
        names = ", ".join(f"{shard:05d}" for shard in lost[:8])
        raise CorpusError(
            f"No rank holds shard {names}{' ...' if len(lost) > 8 else ''} of {path}/train: its users could not be read. Start a "
            "rank for every part, or give the whole store."
        )
    return may_HR
