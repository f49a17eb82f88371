"""Computes statistics of a token store for the owner of the data.

    split_statistics(store.train)           users, tokens, posts, percentiles and a histogram of the users' lengths
    cap_effect(store, weight_cap=1600)      the fraction of users that reach a weight cap, and the resulting weights

All numbers are computed from the text of private users without noise. They must not enter a report or a run folder.
"""

from dataclasses import dataclass

import numpy as np

from unheard.corpus.store import TokenStore, UserTokens
from unheard.corpus.vocabulary import BOS, EOS, UNK

PERCENTILES = (0, 1, 10, 25, 50, 75, 90, 99, 100)
"""The percentiles of the users' lengths that `SplitStatistics` contains, in percent."""
MOST_BINS = 12
"""The largest number of bins of the histogram."""
USERS_AT_ONCE = 4096
"""The number of users that are read at a time, which bounds the memory."""


@dataclass(frozen=True, kw_only=True)
class SplitStatistics:
    """The statistics of one split. Private.

    Attributes:
        users: The number of users.
        tokens: The number of predicted tokens: all ids except BOS.
        posts: The number of sequences, each of which begins with BOS.
        out_of_dictionary: The fraction of words that are not in the vocabulary (UNK).
        percentiles: The `PERCENTILES` of the numbers of tokens per user.
        histogram: (least length, largest length, number of users) for each bin; a length is a number of tokens.
        largest_user_share: The fraction of all tokens that the user with the most tokens wrote.
    """

    users: int
    tokens: int
    posts: int
    out_of_dictionary: float
    percentiles: tuple[int, ...]
    histogram: tuple[tuple[int, int, int], ...]
    largest_user_share: float


def split_statistics(users: UserTokens) -> SplitStatistics:
    """Compute the statistics of a split. Reads all ids twice."""
    counts = np.zeros(3, dtype=np.int64)
    for block in users.blocks():
        counts += [np.count_nonzero(block == special) for special in (BOS, EOS, UNK)]
    lengths = predicted_lengths(users)
    words = int(users.num_tokens - counts[BOS] - counts[EOS])
    tokens = int(lengths.sum())
    return SplitStatistics(
        users=users.num_users,
        tokens=tokens,
        posts=int(counts[BOS]),
        out_of_dictionary=float(counts[UNK] / words) if words else 0.0,
        percentiles=tuple(int(p) for p in np.percentile(lengths, PERCENTILES))
        if len(lengths)
        else (0,) * len(PERCENTILES),
        histogram=histogram(lengths, MOST_BINS),
        largest_user_share=float(lengths.max() / tokens) if tokens else 0.0,
    )


def predicted_lengths(users: UserTokens) -> np.ndarray:
    """Return the number of predicted tokens (ids except BOS) of each user."""
    lengths = np.empty(users.num_users, dtype=np.int64)
    for begin in range(0, users.num_users, USERS_AT_ONCE):
        some = users.users(np.arange(begin, min(begin + USERS_AT_ONCE, users.num_users)))
        lengths[begin : begin + len(some)] = [np.count_nonzero(tokens != BOS) for tokens in some]
    return lengths


def histogram(lengths: np.ndarray, bins: int) -> tuple[tuple[int, int, int], ...]:
    """Return a histogram of lengths: (least length, largest length, number of users) for each bin.

    Each bin is twice as wide as the one before, since the lengths of users differ by orders of magnitude.

    Args:
        lengths: The number of tokens of each user.
        bins: The largest number of bins. If more are needed, the first bin contains all small lengths.
    """
    if not len(lengths):
        return ()
    top = int(lengths.max())
    edges = [1]
    while edges[-1] <= top:
        edges.append(edges[-1] * 2)
    edges = [0, *edges[-bins:]] if len(edges) > bins else edges
    counts = np.histogram(lengths, bins=np.array(edges))[0]
    return tuple((edges[i], edges[i + 1] - 1, int(n)) for i, n in enumerate(counts))


@dataclass(frozen=True, kw_only=True)
class CapEffect:
    """The effect of a weight cap w-hat: the weight of a user is min(tokens / w-hat, 1) (paper, section 2). Private.

    Attributes:
        weight_cap: The cap w-hat, in tokens.
        users_at_cap: The fraction of training users whose weight is 1.
        total_weight: The sum of the weights of all training users.
        mean_weight: The mean weight of a training user.
    """

    weight_cap: int
    users_at_cap: float
    total_weight: float
    mean_weight: float


def cap_effect(store: TokenStore, weight_cap: int) -> CapEffect:
    """Compute the effect of a weight cap on the training users of a store. BOS counts as a token, as in training.

    Args:
        store: The store.
        weight_cap: The cap w-hat, in tokens.
    """
    lengths = store.train.lengths()
    weights = np.minimum(lengths / weight_cap, 1.0)
    return CapEffect(
        weight_cap=weight_cap,
        users_at_cap=float(np.mean(lengths >= weight_cap)) if len(lengths) else 0.0,
        total_weight=float(weights.sum()),
        mean_weight=float(weights.mean()) if len(lengths) else 0.0,
    )
