"""Users of a store who are read when somebody looks at them: a round knows who was drawn, whoever sums them reads what they wrote.

In: a split of a store, and numbers of its users. Out: a sequence of `User`, read in one pass at the first look; how much each wrote
is known without reading (from the offsets), so that work can be dealt out to those who will read.
One user's data as a round sees it, and how it is laid out in windows and batches.

In: a user's token stream. Out: windows of T + 1 tokens, [K, T + 1], and batches of them, [S, B, T + 1], padded with PAD.
Where in the paper: section 3, "a local batch size of B = 8, an unroll size of 10 tokens": 80 tokens a batch, a user's 1,600
tokens in 20 batches. What the paper leaves open is decided in docs/decisions/0003-batches-of-a-user.md.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import overload

import numpy as np

from unheard.corpus.store import UserTokens
from unheard.models.model import PAD, LanguageModel


@dataclass(frozen=True)
class User:
    """What one user brings to a round: tokens in the order written, and, if the model asks for them, features."""

    # DP: what a user wrote does not show when a User, or what holds one, is printed or ends up in a message.
    tokens: np.ndarray = field(repr=False)
    features: np.ndarray | None = field(default=None, repr=False)
    number: int = field(default=0, repr=False)
    """Which user of the store this is."""


def windows_of(tokens: np.ndarray, unroll: int) -> np.ndarray:
    """Consecutive windows [K, unroll + 1]; each begins with the last token of the one before, which is input there, target here."""
    num_targets = max(len(tokens) - 1, 0)
    num_windows = -(-num_targets // unroll)
    padded = np.full(num_windows * unroll + 1, PAD, dtype=np.int64)
    if num_windows:
        padded[: len(tokens)] = tokens
    starts_K = np.arange(num_windows) * unroll
    return padded[starts_K[:, None] + np.arange(unroll + 1)]


def batches_of(windows_KW: np.ndarray, batch_size: int) -> np.ndarray:
    """Consecutive batches [S, batch_size, W]; the last one is filled up with empty windows."""
    num_batches = -(-len(windows_KW) // batch_size)
    filled = np.full((num_batches * batch_size, windows_KW.shape[1]), PAD, dtype=np.int64)
    filled[: len(windows_KW)] = windows_KW
    return filled.reshape(num_batches, batch_size, windows_KW.shape[1])


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
