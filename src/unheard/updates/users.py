"""Users as a round reads them, and how one user's tokens are divided into windows and batches.

`StoredUsers` is a cohort: a sequence of `User` that reads the text of its users from the store when they are first
accessed. How many tokens each user has is known without reading (`lengths`), so that a cohort can be divided among
ranks before any of them reads.

`windows_of` and `batches_of` divide a token stream into windows of T + 1 tokens, [K, T + 1], and batches, [S, B, T +
1], padded with PAD. In the paper: section 3, "a local batch size of B = 8, an unroll size of 10 tokens": 80 tokens per
batch, so a user's 1,600 tokens are 20 batches. docs/decisions/0003-batches-of-a-user.md decides what the paper leaves
open.

    >>> windows_of(np.arange(6), unroll=2)
    array([[ 0,  1,  2],
           [ 2,  3,  4],
           [ 4,  5, -1]])
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
    """The data of one user: tokens in the order written, and features if the model takes them."""

    # DP: what a user wrote does not show when a User, or what holds one, is printed or ends up in a message.
    tokens: np.ndarray = field(repr=False)
    features: np.ndarray | None = field(default=None, repr=False)
    number: int = field(default=0, repr=False)
    """The number of the user in the store."""


def windows_of(tokens: np.ndarray, unroll: int) -> np.ndarray:
    """Consecutive windows [K, unroll + 1]. Each begins with the last token of the window before, so that every token
    but the first is a target exactly once."""
    num_targets = max(len(tokens) - 1, 0)
    num_windows = -(-num_targets // unroll)
    padded = np.full(num_windows * unroll + 1, PAD, dtype=np.int64)
    if num_windows:
        padded[: len(tokens)] = tokens
    starts_K = np.arange(num_windows) * unroll
    return padded[starts_K[:, None] + np.arange(unroll + 1)]


def batches_of(windows_KW: np.ndarray, batch_size: int) -> np.ndarray:
    """Consecutive batches [S, batch_size, W]; the last batch is padded with empty windows."""
    num_batches = -(-len(windows_KW) // batch_size)
    filled = np.full((num_batches * batch_size, windows_KW.shape[1]), PAD, dtype=np.int64)
    filled[: len(windows_KW)] = windows_KW
    return filled.reshape(num_batches, batch_size, windows_KW.shape[1])


class StoredUsers(Sequence[User]):
    """Some users of one split, read at the first access. A part of them (`users[2:5]`, `chosen`) is read separately.

    Args:
        source: the split of a store.
        numbers_U: the numbers of the users.
        with_features: whether to read the users' features as well.
    """

    # DP: no repr of its own: who was drawn, and how many, does not show when a cohort is printed or ends up in a
    # message.
    def __init__(self, source: UserTokens, numbers_U: np.ndarray, *, with_features: bool) -> None:
        self.source = source
        self.numbers_U = np.asarray(numbers_U, dtype=np.int64)
        self.with_features = with_features

    @cached_property
    def _read(self) -> list[User]:
        return read_users(self.source, self.numbers_U, self.with_features)

    def concatenated(self) -> tuple[np.ndarray, np.ndarray]:
        """The tokens of all users in one array, and the number of tokens of each; read anew at each call."""
        return self.source.concatenated(self.numbers_U)

    def lengths(self) -> np.ndarray:
        """The number of tokens of each user; only offsets are read."""
        return self.source.lengths(self.numbers_U)

    def chosen(self, which_U: np.ndarray) -> "StoredUsers":
        """Some of the users, by a mask or by positions."""
        return StoredUsers(self.source, self.numbers_U[which_U], with_features=self.with_features)

    def __len__(self) -> int:
        return len(self.numbers_U)

    @overload
    def __getitem__(self, index: int) -> User: ...

    @overload
    def __getitem__(self, index: slice) -> "StoredUsers": ...

    def __getitem__(self, index: int | slice) -> "User | StoredUsers":
        if isinstance(index, slice):
            return StoredUsers(self.source, self.numbers_U[index], with_features=self.with_features)
        return self._read[index]

    def __iter__(self) -> Iterator[User]:
        return iter(self._read)


def concatenated_tokens(users: Sequence[User]) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of all users in one array, user after user, and the number of tokens of each, int64 [U]."""
    if isinstance(users, StoredUsers):
        return users.concatenated()
    tokens = [user.tokens for user in users]
    return np.concatenate(tokens or [np.empty(0, dtype=np.int64)]), token_counts(users)


def token_counts(users: Sequence[User]) -> np.ndarray:
    """The number of tokens of each user, int64 [U]."""
    if isinstance(users, StoredUsers):
        return users.lengths()
    return np.array([len(user.tokens) for user in users], dtype=np.int64)


class StoredExamples(Sequence[User]):
    """Single windows of users, each as one `User`, for sampling of examples; read at the first access.

    Args:
        source: the split of a store.
        user_E: the number of the user of each example.
        window_E: the number of the window in that user's text.
        unroll: tokens of a window.
    """

    # DP: no repr of its own: who was drawn does not show when a cohort is printed or ends up in a message.
    def __init__(self, source: UserTokens, user_E: np.ndarray, window_E: np.ndarray, unroll: int) -> None:
        self.source, self.user_E, self.window_E, self.unroll = source, user_E, window_E, unroll

    @cached_property
    def _read(self) -> list[User]:
        numbers_U, which_E = np.unique(self.user_E, return_inverse=True)
        tokens = self.source.users(numbers_U)
        starts_E = self.window_E * self.unroll
        return [
            User(tokens[k][start : start + self.unroll + 1], None, int(numbers_U[k]))
            for k, start in zip(which_E, starts_E, strict=True)
        ]

    def __len__(self) -> int:
        return len(self.user_E)

    @overload
    def __getitem__(self, index: int) -> User: ...

    @overload
    def __getitem__(self, index: slice) -> "StoredExamples": ...

    def __getitem__(self, index: int | slice) -> "User | StoredExamples":
        if isinstance(index, slice):
            return StoredExamples(self.source, self.user_E[index], self.window_E[index], self.unroll)
        return self._read[index]


def read_users(source: UserTokens, numbers_U: np.ndarray, with_features: bool) -> list[User]:
    """The users with their tokens, and with their features if asked for."""
    tokens = source.users(numbers_U)
    if not with_features:
        return [User(t, None, int(k)) for t, k in zip(tokens, numbers_U, strict=True)]
    return [User(t, f, int(k)) for t, f, k in zip(tokens, source.features(numbers_U), numbers_U, strict=True)]


def users_in_turn(source: UserTokens, model: LanguageModel) -> Iterator[User]:
    """All users of a split in order, read 64 at a time."""
    for start in range(0, source.num_users, 64):
        numbers_U = np.arange(start, min(start + 64, source.num_users))
        yield from read_users(source, numbers_U, bool(model.user_features))
