"""Defines what one user contributes to a round: the user's data, the local update computed on it, and its weight.

**The data.** `StoredUsers` is a cohort: a sequence of `User` that reads the text of its users from the store at the
first access. `lengths` returns the number of tokens of each user without reading the text, so that a cohort can be
divided among ranks before any rank reads. `windows_of` divides a user's tokens into windows of T + 1 tokens,
[K, T + 1], and `batches_of` groups the windows into batches, [S, B, T + 1]; both pad with PAD. In the paper: section 3,
"a local batch size of B = 8, an unroll size of 10 tokens", which is 80 tokens per batch and 20 batches for a user with
1,600 tokens. docs/decisions/0003-batches-of-a-user.md decides what the paper leaves open.

    >>> windows_of(np.arange(6), unroll=2)
    array([[ 0,  1,  2],
           [ 2,  3,  4],
           [ 4,  5, -1]])

**The update.** With `FedAvg` each user takes many local steps on their own text (UserUpdateFedAvg of Algorithm 1). The
class defines the batches of the local steps and the learning rate. The engines take the steps and clip after each step
(engines/reference.py follows the pseudocode line by line).

    >>> FedAvg(batch_size=2, unroll=5).batches(User(np.arange(23)), seed=0).shape  # [steps, batch, unroll + 1]
    (3, 2, 6)

With `FedSGD` each user contributes one gradient. In the paper: UserUpdateFedSGD of Algorithm 1, and appendix,
"Experiments with SGD" (B = the user's whole data). The engines compute it like FedAvg with a single local step: the
delta is theta0 - eta * gradient, clipped, minus theta0.

    >>> FedSGD(unroll=5).batches(User(np.arange(23)), seed=0).shape  # one batch of all of the user's windows
    (1, 5, 6)

`stacked_batches` computes the batches of many users in a few array operations. Input: users and their update. Output:
windows [U, S, B, T + 1] padded with PAD, and how many of the S batches each user has. The windows are the same as those
of `update.batches(user, seed)` for each user (a test compares them). Only the amount of padding may differ.

**The weight.** w_k = min(n_k / w-hat, 1) is always in [0, 1]. Weights are fixed-point integers in units of 2^-30, so
that a sum of weights does not depend on the order of the users. In the paper: Algorithm 1, "per-user example cap
w-hat", and W = sum of w_k. The true W would reveal something about the users, so W is declared in the run file and
never computed from the store.

    >>> CappedWeights(weight_cap=100, total_weight=5000.0).units(np.array([50, 200])) / ONE
    array([0.5, 1. ])
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import overload

import numpy as np

from unheard.config import LARGEST_NUMBER, require, require_positive
from unheard.corpus.store import UserTokens
from unheard.models.model import PAD, LanguageModel
from unheard.randomness import reproducible_generator

ONE = 2**30
"""The fixed-point integer that stands for the weight 1."""


@dataclass(frozen=True)
class User:
    """The data of one user: token ids in the order written, and the user's features if the model takes features."""

    # DP: repr=False, so that what a user wrote does not show when a User, or what holds one, is printed or ends up in
    # a message.
    tokens: np.ndarray = field(repr=False)
    features: np.ndarray | None = field(default=None, repr=False)
    number: int = field(default=0, repr=False)
    """The number of the user in their split of the store, from 0."""


def windows_of(tokens: np.ndarray, unroll: int) -> np.ndarray:
    """Divide a user's tokens into consecutive windows.

    Each window begins with the last token of the previous window, so that every token except the first is a target
    exactly once.

    Args:
        tokens: One user's tokens in the order written.
        unroll: T, the number of targets of a window.

    Returns:
        Windows, int64 [K, unroll + 1]; the last is padded with PAD. K is 0 if there are fewer than two tokens.
    """
    num_targets = max(len(tokens) - 1, 0)
    num_windows = -(-num_targets // unroll)
    padded = np.full(num_windows * unroll + 1, PAD, dtype=np.int64)
    if num_windows:
        padded[: len(tokens)] = tokens
    starts_K = np.arange(num_windows) * unroll
    return padded[starts_K[:, None] + np.arange(unroll + 1)]


def batches_of(windows_KW: np.ndarray, batch_size: int) -> np.ndarray:
    """Group a user's windows into consecutive batches.

    Args:
        windows_KW: One user's windows.
        batch_size: B, windows per batch.

    Returns:
        Batches, int64 [S, batch_size, W]. The last batch is filled up with windows that contain only PAD.
    """
    num_batches = -(-len(windows_KW) // batch_size)
    filled = np.full((num_batches * batch_size, windows_KW.shape[1]), PAD, dtype=np.int64)
    filled[: len(windows_KW)] = windows_KW
    return filled.reshape(num_batches, batch_size, windows_KW.shape[1])


class StoredUsers(Sequence[User]):
    """Some users of one split, for example a cohort. Their text is read at the first access and then kept.

    A slice (`users[2:5]`) or a choice (`chosen`) is a new object that reads its own users.

    Args:
        source: The split of a store.
        numbers_U: The numbers of the users.
        with_features: Whether to read the users' features as well.
    """

    # DP: this class has no `__repr__`, so printing a cohort does not show which users were drawn, or how many.
    def __init__(self, source: UserTokens, numbers_U: np.ndarray, *, with_features: bool) -> None:
        self.source = source
        self.numbers_U = np.asarray(numbers_U, dtype=np.int64)
        self.with_features = with_features

    @cached_property
    def _read(self) -> list[User]:
        return read_users(self.source, self.numbers_U, self.with_features)

    def concatenated(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of all users in one array, and the number of tokens of each user, int64 [U].

        Each call reads the store again; nothing is kept.
        """
        return self.source.concatenated(self.numbers_U)

    def lengths(self) -> np.ndarray:
        """Return the number of tokens of each user, int64 [U]. Reads the offsets of the store, not the text."""
        return self.source.lengths(self.numbers_U)

    def chosen(self, which_U: np.ndarray) -> "StoredUsers":
        """Return some of these users: `which_U` is a boolean mask, or an array of positions in this sequence."""
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
    """Return the tokens of all users in one array, user after user, and the number of tokens of each, int64 [U]."""
    if isinstance(users, StoredUsers):
        return users.concatenated()
    tokens = [user.tokens for user in users]
    return np.concatenate(tokens or [np.empty(0, dtype=np.int64)]), token_counts(users)


def token_counts(users: Sequence[User]) -> np.ndarray:
    """Return the number of tokens of each user, int64 [U]."""
    if isinstance(users, StoredUsers):
        return users.lengths()
    return np.array([len(user.tokens) for user in users], dtype=np.int64)


class StoredExamples(Sequence[User]):
    """The examples drawn in one round of example-level sampling. Each example, one window, appears as a `User`.

    The text is read from the store at the first access.

    Args:
        source: The split of a store.
        user_E: For each example, the number of the user who wrote it.
        window_E: For each example, the number of its window in that user's text, from 0.
        unroll: T, the number of targets of a window.
    """

    # DP: no repr of its own: who was drawn does not show when a cohort is printed or ends up in a message.
    def __init__(self, source: UserTokens, user_E: np.ndarray, window_E: np.ndarray, unroll: int) -> None:
        self.source, self.user_E, self.window_E, self.unroll = source, user_E, window_E, unroll

    @cached_property
    def _read(self) -> list[User]:
        """Read the windows of all examples. The text of a user with several examples is read only once."""
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
    """Read users from a store, with their tokens and optionally with their features.

    Args:
        source: The split of a store.
        numbers_U: The numbers of the users.
        with_features: Whether to read the users' features as well.
    """
    tokens = source.users(numbers_U)
    if not with_features:
        return [User(t, None, int(k)) for t, k in zip(tokens, numbers_U, strict=True)]
    return [User(t, f, int(k)) for t, f, k in zip(tokens, source.features(numbers_U), numbers_U, strict=True)]


def users_in_turn(source: UserTokens, model: LanguageModel) -> Iterator[User]:
    """Yield all users of a split in order, with features if the model takes them. Reads 64 users at a time."""
    for start in range(0, source.num_users, 64):
        numbers_U = np.arange(start, min(start + 64, source.num_users))
        yield from read_users(source, numbers_U, bool(model.user_features))


@dataclass(frozen=True, kw_only=True)
class FedAvg:
    """The local training of a user by FederatedAveraging. The defaults are the paper's.

    Args:
        batch_size: B, windows per local batch.
        unroll: T, tokens per window.
        epochs: E, passes over the user's text.
        learning_rate: eta of the local steps.
        update_penalty: lambda of an L2 penalty lambda/2 ||theta - theta0||^2 on the update. The paper tried it and
            found no effect (appendix).

    Raises:
        InvalidValue: A value is out of range.

    Example:
        >>> update = FedAvg(batch_size=8, unroll=10, epochs=1)
        >>> user = User(np.arange(3, 1603), None, 0)  # 1,600 tokens
        >>> update.batches(user, seed=0).shape
        (20, 8, 11)
    """

    batch_size: int = 8
    unroll: int = 10
    epochs: int = 1
    learning_rate: float = 6.0
    update_penalty: float = 0.0

    def __post_init__(self) -> None:
        require(1 <= self.batch_size <= 10**6, "batch_size must be at least 1, and at most a million.")
        require(1 <= self.unroll <= 10**6, "unroll must be at least 1 token, and at most a million.")
        require(1 <= self.epochs <= 1000, "epochs must be at least 1, and at most 1000.")
        require_positive(learning_rate=self.learning_rate)
        require(0 <= self.update_penalty <= LARGEST_NUMBER, "update_penalty must be 0 or more.")

    def batches(self, user: User, seed: int) -> np.ndarray:
        """Return the batches of the user's local steps, [S, B, T + 1], in the order in which the steps take them.

        The batches are E passes over the text in the order in which it was written. `seed` is not used: nothing is
        random.
        """
        once_SBW = batches_of(windows_of(user.tokens, self.unroll), self.batch_size)
        return np.tile(once_SBW, (self.epochs, 1, 1))

    def cost(self, num_tokens_U: np.ndarray) -> np.ndarray:
        """Estimate the time of each user's update, in units of one local step, float64 [U].

        The estimate is the number of local steps plus 1 for the clip and the sum. It serves to divide a cohort evenly
        among ranks.
        """
        targets_U = np.maximum(np.asarray(num_tokens_U, dtype=np.int64) - 1, 0)
        return 1.0 + self.epochs * -(-targets_U // (self.batch_size * self.unroll))


@dataclass(frozen=True, kw_only=True)
class FedSGD:
    """The update that consists of one gradient, computed on all or on some of a user's text.

    Args:
        batch_size: The number of windows to draw at random from the user's text; None to use all windows.
        unroll: T, tokens per window.
        learning_rate: eta, the factor of the gradient.

    Raises:
        InvalidValue: A value is out of range.

    Example:
        >>> user = User(np.arange(3, 1603), None, 0)  # 1,600 tokens
        >>> FedSGD(batch_size=8, unroll=10).batches(user, seed=0).shape
        (1, 8, 11)
    """

    batch_size: int | None = None
    unroll: int = 10
    learning_rate: float = 6.0
    # Not a field: the only step starts at theta0, where a penalty on theta - theta0 has no gradient.
    update_penalty = 0.0

    def __post_init__(self) -> None:
        in_range = self.batch_size is None or 1 <= self.batch_size <= 10**6
        require(in_range, "batch_size must be at least 1, and at most a million; leave it out for all data.")
        require(1 <= self.unroll <= 10**6, "unroll must be at least 1 token, and at most a million.")
        require_positive(learning_rate=self.learning_rate)

    def batches(self, user: User, seed: int) -> np.ndarray:
        """Return the user's only batch, [1, B, T + 1]; [0, B, T + 1] if the user has no target.

        Without `batch_size`, B is the number of the user's windows, rounded up; the added windows contain only PAD.

        Args:
            user: The user.
            seed: The seed of the round's batches. The windows depend on this seed and on this user only.
        """
        windows_KW = windows_of(user.tokens, self.unroll)
        if self.batch_size is not None and len(windows_KW) > self.batch_size:
            # DP: a stream for each user, so that one user's presence does not change the windows of another user.
            rng = reproducible_generator(seed, "batch", user.number)
            windows_KW = windows_KW[np.sort(rng.choice(len(windows_KW), size=self.batch_size, replace=False))]
        return batches_of(windows_KW, self.batch_size or _windows_of_batch(len(windows_KW)))

    def cost(self, num_tokens_U: np.ndarray) -> np.ndarray:
        """Estimate the time of each user's update, in local steps of FedAvg with its default batches of 8 windows.

        As in `FedAvg.cost`, 1 is added for the clip and the sum.
        """
        targets_U = np.maximum(np.asarray(num_tokens_U, dtype=np.int64) - 1, 0)
        windows_U = -(-targets_U // self.unroll)
        return 1.0 + (windows_U if self.batch_size is None else np.minimum(windows_U, self.batch_size)) / 8


def _windows_of_batch(windows: int) -> int:
    """Return the size of the batch that holds all windows of a user: `windows`, rounded up to one of a few sizes.

    Engines process users with equal batch sizes together, so few sizes mean large groups. At most a quarter of the
    batch is padding. The size depends on this user only, not on the rest of the cohort.
    """
    step = 2 ** max(windows.bit_length() - 3, 0)
    return max(-(-windows // step) * step, 1)


_LONG_ROW = 400
"""The row length, in tokens, from which `_rows` copies user by user. Below it, one masked assignment is faster."""


def stacked_batches(update: FedAvg | FedSGD, users: Sequence[User], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Compute the batches of many users at once.

    Args:
        update: What each user computes.
        users: The users of a chunk.
        seed: The seed of the round's batches, for FedSGD; FedAvg does not use it.

    Returns:
        Windows, int32 [U, S, B, T + 1], padded with PAD, where S and B are the largest that any user needs; and the
        number of batches of each user, int64 [U]. A user's further batches are padding or repetitions: ignore them.
    """
    if isinstance(update, FedAvg):
        return _consecutive(update, users)
    batches = [update.batches(user, seed) for user in users]
    S = max((len(b) for b in batches), default=0)
    # With a fixed batch size even an empty cohort has this B: it must not change how other runs or ranks are processed.
    B = update.batch_size or max((b.shape[1] for b in batches), default=0)
    windows_USBW = padded_batches(batches, (len(users), S, B, update.unroll + 1), np.int32)
    return windows_USBW, np.array([len(b) for b in batches], dtype=np.int64)


def padded_batches(
    batches: Sequence[np.ndarray], shape: tuple[int, int, int, int], dtype: type[np.integer]
) -> np.ndarray:
    """Copy the batches of several users into one array [U, S, B, W] that is padded with PAD.

    Args:
        batches: The batches of each user; their S and B may differ.
        shape: The shape of the result. U may be larger than the number of users; the further rows are all PAD.
        dtype: The integer type of the result.
    """
    windows_USBW = np.full(shape, PAD, dtype=dtype)
    for row, b in zip(windows_USBW, batches, strict=False):
        row[: b.shape[0], : b.shape[1]] = b
    return windows_USBW


def _consecutive(update: FedAvg, users: Sequence[User]) -> tuple[np.ndarray, np.ndarray]:
    """Return the result of `stacked_batches` for FedAvg.

    The windows are consecutive in a user's text, so they are taken from a strided view of the text, without a loop.
    """
    B, T = update.batch_size, update.unroll
    tokens, lengths_U = concatenated_tokens(users)
    once_U = -(-np.maximum(lengths_U - 1, 0) // (B * T))
    S = int(once_U.max(initial=0))
    tokens_UL = _rows(tokens, lengths_U, max(S, 1) * B * T + 1)
    view_UKW = np.lib.stride_tricks.sliding_window_view(tokens_UL, T + 1, axis=1)[:, : S * B * T : T]
    windows_USBW = np.array(view_UKW).reshape(len(users), S, B, T + 1)
    if update.epochs == 1:
        return windows_USBW, once_U
    # Each user's second pass follows directly after the first, even if another user has a longer first pass.
    which_US = np.arange(S * update.epochs)[None] % np.maximum(once_U, 1)[:, None]
    return np.take_along_axis(windows_USBW, which_US[:, :, None, None], axis=1), once_U * update.epochs


def _rows(tokens: np.ndarray, lengths_U: np.ndarray, L: int) -> np.ndarray:
    """Copy the concatenated tokens of all users into rows, one per user: int32 [U, L], padded with PAD.

    Args:
        tokens: The tokens of all users, user after user.
        lengths_U: The number of tokens of each user, at most L.
        L: The length of a row.
    """
    tokens_UL = np.full((len(lengths_U), L), PAD, dtype=np.int32)
    if L < _LONG_ROW:
        tokens_UL[np.arange(L) < lengths_U[:, None]] = tokens
        return tokens_UL
    ends_U = np.cumsum(lengths_U)
    for row, begin, end in zip(tokens_UL, (ends_U - lengths_U).tolist(), ends_U.tolist(), strict=True):
        row[: end - begin] = tokens[begin:end]
    return tokens_UL


@dataclass(frozen=True, kw_only=True)
class EqualWeights:
    """Gives every user the weight w_k = 1. Then W, the sum of all weights, is the declared population.

    Example:
        >>> EqualWeights().total(population=1_000_000)
        1000000.0
    """

    def units(self, num_tokens_U: np.ndarray) -> np.ndarray:
        """Return w_k of each user in units of 2^-30, int64 [U]."""
        return np.full(len(num_tokens_U), ONE, dtype=np.int64)

    def total(self, population: int) -> float:
        """Return W, the sum of all users' weights, computed from declared numbers only."""
        return float(population)


@dataclass(frozen=True, kw_only=True)
class CappedWeights:
    """Gives each user the weight w_k = min(n_k / weight_cap, 1), where n_k is the number of the user's tokens.

    Args:
        weight_cap: w-hat. A user with at least this many tokens has weight 1.
        total_weight: The declared W: your estimate of the sum of all users' weights, from public knowledge or from a
            count that was charged to a ledger.

    Raises:
        InvalidValue: A value is not above 0.

    Example:
        >>> weights = CappedWeights(weight_cap=1600, total_weight=500_000)
        >>> (weights.units(np.array([400, 3200])) / ONE).tolist()
        [0.25, 1.0]
    """

    weight_cap: float
    total_weight: float

    def __post_init__(self) -> None:
        require_positive(weight_cap=self.weight_cap, total_weight=self.total_weight)

    def units(self, num_tokens_U: np.ndarray) -> np.ndarray:
        """Return w_k of each user in units of 2^-30, rounded down, int64 [U]."""
        # DP: the minimum with 1 bounds what a user with much text can add; floor() so that rounding never raises a
        # weight.
        return np.floor(np.minimum(np.asarray(num_tokens_U, dtype=np.float64) / self.weight_cap, 1.0) * ONE).astype(
            np.int64
        )

    def total(self, population: int) -> float:
        """Return the declared W. `population` is not used."""
        return self.total_weight
