"""One user's data as a round sees it, and how it is laid out in windows and batches.

In: a user's token stream. Out: windows of T + 1 tokens, [K, T + 1], and batches of them, [S, B, T + 1], padded with PAD.
Where in the paper: section 3, "a local batch size of B = 8, an unroll size of 10 tokens": 80 tokens a batch, a user's 1,600
tokens in 20 batches. What the paper leaves open is decided in docs/decisions/0003-batches-of-a-user.md.
"""

from dataclasses import dataclass, field

import numpy as np

from unheard.models.model import PAD


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
