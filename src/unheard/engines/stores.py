"""Where a rank reads users: the store at the leader's path, or this machine's part of it.

In: places of splits as messages name them, and `[engine] corpus_part`. Out: the same users, read here. Copies of a store must agree
on where every user begins and ends, or one person could be summed twice under two numbers; that is checked before the first round.
"""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from unheard.corpus.store import TokenStore
from unheard.corpus.user_tokens import UserTokens
from unheard.engines.ranks import Ranks
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
        except (KeyError, IndexError, ValueError):
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
        """What this rank says of a split: which corpus it is and where users begin and end (as hashes), and the shards it holds."""
        users = self.users(place)
        users.check_boundaries()
        name = bytes.fromhex(self._open[place[0]].name)
        hashes = np.frombuffer(name + users.boundaries_digest(), dtype=np.int64)
        return np.concatenate([hashes, users.shards_here.astype(np.int64)])


def who_holds_what(looks: list[np.ndarray], path: str) -> np.ndarray:
    """A mask [shards, ranks], from what every rank saw; a copy of something else, or a shard that nobody holds, is refused."""
    for rank, look in enumerate(looks):
        # DP: copies that number users differently would let one person in twice.
        if not np.array_equal(look[: 2 * DIGEST], looks[0][: 2 * DIGEST]):
            raise CorpusError(
                f"Rank {rank} has another corpus than the leader's {path}. Give every rank a copy, or a part, of one store."
            )
    may_HR = np.stack([look[2 * DIGEST :] for look in looks], axis=1).astype(bool)
    if len(lost := np.flatnonzero(~may_HR.any(axis=1))):
        names = ", ".join(f"{shard:05d}" for shard in lost[:8])
        raise CorpusError(
            f"No rank holds shard {names}{' ...' if len(lost) > 8 else ''} of {path}/train: its users could not be read. Start a "
            "rank for every part, or give the whole store."
        )
    return may_HR
