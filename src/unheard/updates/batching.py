"""The batches of many users as one array, computed in a few array operations.

Input: users and their update. Output: windows [U, S, B, T + 1] padded with PAD, and how many of the S batches each user
has. The windows are those of `update.batches(user, seed)`, user by user (a test compares them); only the padding of a
user's last batches may differ, where nothing is predicted."""

from collections.abc import Sequence

import numpy as np

from unheard.models.model import PAD
from unheard.updates.fedavg import FedAvg
from unheard.updates.fedsgd import FedSGD
from unheard.updates.users import User, concatenated_tokens

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
