"""The local update of a user: FederatedAveraging and FederatedSGD, and the batches of many users as one array.

**`FedAvg`**: each user takes many local steps on their own text (UserUpdateFedAvg of Algorithm 1). This part defines
which batches a user steps through and with which learning rate; the engines take the steps and clip after each
(engines/reference.py follows the pseudocode line by line).

    >>> from unheard.updates.users import User
    >>> FedAvg(batch_size=2, unroll=5).batches(User(np.arange(23)), seed=0).shape  # [steps, batch, unroll + 1]
    (3, 2, 6)

**`FedSGD`**: each user contributes one gradient. In the paper: UserUpdateFedSGD of Algorithm 1, and appendix,
"Experiments with SGD" (B = the user's whole data). It is one local step, so the engines compute it as they compute
FedAvg: theta0 - eta * gradient, clipped, minus theta0.

    >>> from unheard.updates.users import User
    >>> FedSGD(unroll=5).batches(User(np.arange(23)), seed=0).shape  # one batch of all of the user's windows
    (1, 5, 6)

**`stacked_batches`**: the batches of many users, computed in a few array operations. Input: users and their update.
Output: windows [U, S, B, T + 1] padded with PAD, and how many of the S batches each user has. The windows are those of
`update.batches(user, seed)`, user by user (a test compares them); only the padding of a user's last batches may differ,
where nothing is predicted."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from unheard.config import LARGEST_NUMBER, require, require_positive
from unheard.models.model import PAD
from unheard.randomness import reproducible_generator
from unheard.updates.users import User, batches_of, concatenated_tokens, windows_of


@dataclass(frozen=True, kw_only=True)
class FedAvg:
    """The local training of a user by FederatedAveraging. The defaults are the paper's.

    Args:
        batch_size: B, sequences per local batch.
        unroll: T, tokens per sequence.
        epochs: E, passes over the user's text.
        learning_rate: eta of the local steps.
        update_penalty: lambda of an L2 penalty lambda/2 ||theta - theta0||^2 on the update, which the paper tried
            without effect (appendix).

    Raises:
        InvalidValue: for a number out of range.
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
        """The batches of the user's local steps:

        E passes over their text in the order written, [S, B, T + 1]. Nothing is random.
        """
        once_SBW = batches_of(windows_of(user.tokens, self.unroll), self.batch_size)
        return np.tile(once_SBW, (self.epochs, 1, 1))

    def cost(self, num_tokens_U: np.ndarray) -> np.ndarray:
        """About the time of each user's update, in local steps, plus one for the clip and the sum; to balance the load
        of ranks."""
        targets_U = np.maximum(np.asarray(num_tokens_U, dtype=np.int64) - 1, 0)
        return 1.0 + self.epochs * -(-targets_U // (self.batch_size * self.unroll))

    def at_learning_rate(self, learning_rate: float) -> "FedAvg":
        """The same with another learning rate, for a schedule."""
        return replace(self, learning_rate=learning_rate)


@dataclass(frozen=True, kw_only=True)
class FedSGD:
    """One gradient of a user, on all or on some of their text.

    Args:
        batch_size: windows drawn from the user's own; None: all of them.
        unroll: T, tokens per window.
        learning_rate: eta, the factor of the gradient.

    Raises:
        InvalidValue: for a number out of range.
    """

    batch_size: int | None = None
    unroll: int = 10
    learning_rate: float = 6.0
    update_penalty = 0.0  # the first step starts at theta0, where a penalty on theta - theta0 has no gradient

    def __post_init__(self) -> None:
        in_range = self.batch_size is None or 1 <= self.batch_size <= 10**6
        require(in_range, "batch_size must be at least 1, and at most a million; leave it out for all data.")
        require(1 <= self.unroll <= 10**6, "unroll must be at least 1 token, and at most a million.")
        require_positive(learning_rate=self.learning_rate)

    def batches(self, user: User, seed: int) -> np.ndarray:
        """One batch, [1, B, T + 1], or none if the user has no target. `seed` is the seed of the round's batches."""
        windows_KW = windows_of(user.tokens, self.unroll)
        if self.batch_size is not None and len(windows_KW) > self.batch_size:
            # DP: a stream for each user, so that what one draws does not move what another draws.
            rng = reproducible_generator(seed, "batch", user.number)
            windows_KW = windows_KW[np.sort(rng.choice(len(windows_KW), size=self.batch_size, replace=False))]
        return batches_of(windows_KW, self.batch_size or _windows_of_batch(len(windows_KW)))

    def cost(self, num_tokens_U: np.ndarray) -> np.ndarray:
        """About the time of each user's update, in local steps of FedAvg's default size, plus one for the clip and the
        sum."""
        targets_U = np.maximum(np.asarray(num_tokens_U, dtype=np.int64) - 1, 0)
        windows_U = -(-targets_U // self.unroll)
        return 1.0 + (windows_U if self.batch_size is None else np.minimum(windows_U, self.batch_size)) / 8

    def at_learning_rate(self, learning_rate: float) -> "FedSGD":
        """The same with another learning rate, for a schedule."""
        return replace(self, learning_rate=learning_rate)


def _windows_of_batch(windows: int) -> int:
    """The size of a batch of all of a user's windows, rounded up to one of a few sizes with empty windows (at most a
    quarter).

    Engines process users with batches of one size together. The size depends on this user alone."""
    step = 2 ** max(windows.bit_length() - 3, 0)
    return max(-(-windows // step) * step, 1)


_LONG_ROW = 400
"""Tokens per row from which on rows are filled one by one."""


def stacked_batches(update: FedAvg | FedSGD, users: Sequence[User], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Windows int32 [U, S, B, T + 1], and the number of batches of each user, int64 [U]."""
    if isinstance(update, FedAvg):
        return _consecutive(update, users)
    batches = [update.batches(user, seed) for user in users]
    S = max((len(b) for b in batches), default=0)
    # An empty cohort has the shape of any other, so that it does not change how other runs, or other ranks, are
    # processed.
    B = update.batch_size or max((b.shape[1] for b in batches), default=0)
    windows_USBW = padded_batches(batches, (len(users), S, B, update.unroll + 1), np.int32)
    return windows_USBW, np.array([len(b) for b in batches], dtype=np.int64)


def padded_batches(
    batches: Sequence[np.ndarray], shape: tuple[int, int, int, int], dtype: type[np.integer]
) -> np.ndarray:
    """Users' batches as one array [U, S, B, W], padded with PAD. The shape may have more rows than there are users."""
    windows_USBW = np.full(shape, PAD, dtype=dtype)
    for row, b in zip(windows_USBW, batches, strict=False):
        row[: b.shape[0], : b.shape[1]] = b
    return windows_USBW


def _consecutive(update: FedAvg, users: Sequence[User]) -> tuple[np.ndarray, np.ndarray]:
    """The batches of FedAvg. Its windows are consecutive in a user's text, so they are a view of it."""
    B, T = update.batch_size, update.unroll
    tokens, lengths_U = concatenated_tokens(users)
    once_U = -(-np.maximum(lengths_U - 1, 0) // (B * T))
    S = int(once_U.max(initial=0))
    tokens_UL = _rows(tokens, lengths_U, max(S, 1) * B * T + 1)
    view_UKW = np.lib.stride_tricks.sliding_window_view(tokens_UL, T + 1, axis=1)[:, : S * B * T : T]
    windows_USBW = np.array(view_UKW).reshape(len(users), S, B, T + 1)
    if update.epochs == 1:
        return windows_USBW, once_U
    # A user's further passes begin where the user's own first pass ends, however many batches other users have.
    which_US = np.arange(S * update.epochs)[None] % np.maximum(once_U, 1)[:, None]
    return np.take_along_axis(windows_USBW, which_US[:, :, None, None], axis=1), once_U * update.epochs


def _rows(tokens: np.ndarray, lengths_U: np.ndarray, L: int) -> np.ndarray:
    """The tokens of all users with one row per user, int32 [U, L], padded with PAD."""
    tokens_UL = np.full((len(lengths_U), L), PAD, dtype=np.int32)
    if L < _LONG_ROW:
        tokens_UL[np.arange(L) < lengths_U[:, None]] = tokens
        return tokens_UL
    ends_U = np.cumsum(lengths_U)
    for row, begin, end in zip(tokens_UL, (ends_U - lengths_U).tolist(), ends_U.tolist(), strict=True):
        row[: end - begin] = tokens[begin:end]
    return tokens_UL
