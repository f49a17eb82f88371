"""Statistics of a token store for the owner of the data: exact counts, which must not enter a report or a run folder.

    split_statistics(store.train)           users, tokens, posts, percentiles and a histogram of the users' lengths
    cap_effect(store, weight_cap=1600)      how many users reach a weight cap, and the resulting weights

All numbers are computed from private users without noise.
"""

from dataclasses import dataclass

import numpy as np

from unheard.corpus.store import TokenStore, UserTokens
from unheard.corpus.vocabulary import BOS, EOS, UNK

PERCENTILES = (0, 1, 10, 25, 50, 75, 90, 99, 100)


@dataclass(frozen=True, kw_only=True)
class SplitStatistics:
    """Statistics of one split.

    Attributes:
        users: The number of users.
        tokens: The number of predicted tokens: all ids except BOS.
        posts: The number of sequences.
        out_of_dictionary: The fraction of words that are UNK.
        percentiles: The `PERCENTILES` of the users' numbers of tokens.
        histogram: (from, up to, users) for each bin of the numbers of tokens.
        largest_user_share: The share of the tokens that the longest user wrote.
    """

    users: int
    tokens: int
    posts: int
    out_of_dictionary: float
    percentiles: tuple[int, ...]
    histogram: tuple[tuple[int, int, int], ...]
    largest_user_share: float


def split_statistics(users: UserTokens, bins: int = 12) -> SplitStatistics:
    """Compute the statistics of a split in one pass over its ids.

    Args:
        users: The users of the split.
        bins: The largest number of bins of the histogram.
    """
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
        histogram=histogram(lengths, bins),
        largest_user_share=float(lengths.max() / tokens) if tokens else 0.0,
    )


def predicted_lengths(users: UserTokens, users_at_once: int = 4096) -> np.ndarray:
    """Return the number of predicted tokens (ids except BOS) of each user.

    Args:
        users: The users of a split.
        users_at_once: How many users are read at a time.
    """
    lengths = np.empty(users.num_users, dtype=np.int64)
    for begin in range(0, users.num_users, users_at_once):
        some = users.users(np.arange(begin, min(begin + users_at_once, users.num_users)))
        lengths[begin : begin + len(some)] = [np.count_nonzero(tokens != BOS) for tokens in some]
    return lengths


def histogram(lengths: np.ndarray, bins: int) -> tuple[tuple[int, int, int], ...]:
    """Return (from, up to, users) in bins that double, since the lengths of users spread over orders of magnitude.

    Args:
        lengths: The number of tokens of each user.
        bins: The largest number of bins; the smallest lengths share one.
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
    """The effect of a weight cap w-hat: the weight of a user is min(tokens / w-hat, 1) (paper, section 2)."""

    weight_cap: int
    users_at_cap: float
    total_weight: float
    mean_weight: float


def cap_effect(store: TokenStore, weight_cap: int) -> CapEffect:
    """Compute what a weight cap would do to the training users of a store.

    Args:
        store: The store.
        weight_cap: The cap w-hat, in tokens.
    """
    lengths = predicted_lengths(store.train)
    weights = np.minimum(lengths / weight_cap, 1.0)
    return CapEffect(
        weight_cap=weight_cap,
        users_at_cap=float(np.mean(lengths >= weight_cap)) if len(lengths) else 0.0,
        total_weight=float(weights.sum()),
        mean_weight=float(weights.mean()) if len(lengths) else 0.0,
    )
