"""Where a rank reads users: the store at the leader's path, or this machine's part of it.

In: places of splits as messages name them, and `[engine] corpus_part`. Out: the same users, read here. Copies of a store must be of
the store that is charged, and agree on who has which number, or one person could be summed twice under two; that is checked before
the first round.
"""

import hashlib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from unheard.corpus.store import TokenStore, UserTokens
from unheard.engines.distributed.process_group import Ranks
from unheard.errors import CorpusError, InvalidValue

DIGEST = 4
"""int64 numbers of a SHA-256."""


@dataclass
class Stores:
    """The stores that this process has opened, by the path that the leader calls them by."""

    ranks: Ranks
    template: str | None = None
    """`[engine] corpus_part`: where parts lie, with {rank}, {local_rank} or {node} in it."""
    _open: dict[str, TokenStore] = field(default_factory=dict)

    def here(self, path: str) -> Path:
        if self.template is None:
            return Path(path)
        try:
            filled = self.template.format(rank=self.ranks.rank, local_rank=self.ranks.local_rank, node=self.ranks.node)
        except (KeyError, IndexError, ValueError, AttributeError, TypeError):
            raise InvalidValue(
                f"engine.corpus_part = {self.template!r}: only {{rank}}, {{local_rank}} and {{node}} can be filled in."
            ) from None
        return Path(filled)

    def users(self, place: tuple[str, ...]) -> UserTokens:
        """The users of a split (a store's folder, a split's name), as they lie here."""
        path, split = place
        if path not in self._open:
            self._open[path] = TokenStore.open(self.here(path))
        found = getattr(self._open[path], split)
        if not isinstance(found, UserTokens):
            raise CorpusError(f"{self._open[path].path} has no {split}.")
        return found

    def look(self, place: tuple[str, ...]) -> np.ndarray:
        """What this rank says of a split: which corpus it is and who has which number (as hashes), and the shards it holds."""
        users = self.users(place)
        users.check_boundaries()
        return np.concatenate([identity(self._open[place[0]], users), users.shards_here.astype(np.int64)])


def identity(store: TokenStore, users: UserTokens) -> np.ndarray:
    """Which corpus it is, where users begin and end, and what some of them wrote: three hashes as whole numbers."""
    samples = users.samples()
    if store.part is not None:
        told = store.part.get("samples")
        told = told if isinstance(told, list) else []
        if len(told) != len(samples) or any(
            mine not in (None, whole) for mine, whole in zip(samples, told, strict=True)
        ):
            raise CorpusError(
                f"{store.path} is not the part that was made of its store. Make it again: unheard corpus part."
            )
        samples = told
    wrote = hashlib.sha256(" ".join(map(str, samples)).encode()).digest()
    return np.frombuffer(bytes.fromhex(store.name) + users.boundaries_digest() + wrote, dtype=np.int64)


def who_holds_what(looks: list[np.ndarray], store: TokenStore) -> np.ndarray:
    """A mask [shards, ranks], from what every rank saw; a copy of something else, or a shard that nobody holds, is refused."""
    meant, path = identity(store, store.train), str(store.path)
    for rank, look in enumerate(looks):
        # DP: copies that number users differently would let one person in twice, and those of another store are not charged.
        if not np.array_equal(look[: 3 * DIGEST], meant):
            raise CorpusError(
                f"Rank {rank} has another corpus than the run's {path}. Give every rank a copy, or a part, of that store."
            )
    may_HR = np.stack([look[3 * DIGEST :] for look in looks], axis=1).astype(bool)
    if len(lost := np.flatnonzero(~may_HR.any(axis=1))):
        names = ", ".join(f"{shard:05d}" for shard in lost[:8])
        raise CorpusError(
            f"No rank holds shard {names}{' ...' if len(lost) > 8 else ''} of {path}/train: its users could not be read. Start a "
            "rank for every part, or give the whole store."
        )
    return may_HR
