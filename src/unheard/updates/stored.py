"""Users of a store who are read when somebody looks at them: a round knows who was drawn, whoever sums them reads what they wrote.

In: a split of a store, and numbers of its users. Out: a sequence of `User`, read in one pass at the first look; how much each wrote
is known without reading (from the offsets), so that work can be dealt out to those who will read.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import overload

import numpy as np

from unheard.corpus.user_tokens import UserTokens
from unheard.models.model import LanguageModel
from unheard.updates.user import User


class StoredUsers(Sequence[User]):
    """Some users of one split. A part of them (`users[2:5]`, `chosen`) is read apart, and only if it is looked at."""

    # DP: no repr of its own: who was drawn, and how many, does not show when a cohort is printed or ends up in a message.
    def __init__(self, source: UserTokens, numbers_U: np.ndarray, *, with_features: bool) -> None:
        self.source = source
        self.numbers_U = np.asarray(numbers_U, dtype=np.int64)
        self.with_features = with_features

    @cached_property
    def _read(self) -> list[User]:
        return read_users(self.source, self.numbers_U, self.with_features)

    def lengths(self) -> np.ndarray:
        """How many tokens each has; nothing is read but offsets."""
        return self.source.lengths(self.numbers_U)

    def chosen(self, which_U: np.ndarray) -> "StoredUsers":
        """Some of them, by a mask or by places."""
        return StoredUsers(self.source, self.numbers_U[which_U], with_features=self.with_features)

    def __len__(self) -> int:
        return len(self.numbers_U)

    @overload
    def __getitem__(self, place: int) -> User: ...

    @overload
    def __getitem__(self, place: slice) -> "StoredUsers": ...

    def __getitem__(self, place: int | slice) -> "User | StoredUsers":
        if isinstance(place, slice):
            return StoredUsers(self.source, self.numbers_U[place], with_features=self.with_features)
        return self._read[place]

    def __iter__(self) -> Iterator[User]:
        return iter(self._read)


def read_users(source: UserTokens, numbers_U: np.ndarray, with_features: bool) -> list[User]:
    """What they wrote, and what is known about them if a model takes it."""
    tokens = source.users(numbers_U)
    if not with_features:
        return [User(t, None, int(k)) for t, k in zip(tokens, numbers_U, strict=True)]
    return [User(t, f, int(k)) for t, f, k in zip(tokens, source.features(numbers_U), numbers_U, strict=True)]


def users_in_turn(source: UserTokens, model: LanguageModel) -> Iterator[User]:
    """All users of a split in order, a few at a time."""
    for start in range(0, source.num_users, 64):
        numbers_U = np.arange(start, min(start + 64, source.num_users))
        yield from read_users(source, numbers_U, bool(model.user_features))
