"""Load balancing: which rank sums which users, so that all ranks finish at about the same time.

Input: the cost of each user (`FedAvg.cost`, from the number of tokens, without reading them), the measured speed of
each rank, and which ranks hold which users. Output: a rank for each user. The assignment changes no result, since
sums are of integers. Speeds depend on users, so they are kept in memory only, never printed or written.

    >>> holds_all = np.ones((1, 2), dtype=bool)
    >>> assign_users(np.array([4.0, 2.0, 2.0]), np.ones(2), np.zeros(3, dtype=int), holds_all).tolist()
    [0, 1, 1]
"""

import numpy as np

LARGEST_SPEED_RATIO = 4.0
"""A rank counts as at most so many times faster or slower than the median rank, so that one slow round does not starve
it."""

ONE_BY_ONE = 512
"""The most users that are assigned one by one: enough to balance the remainder, and a few milliseconds."""


def assign_users(cost_U: np.ndarray, speed_R: np.ndarray, holder_U: np.ndarray, may_HR: np.ndarray) -> np.ndarray:
    """The rank of each user.

    Expensive users are distributed round robin in proportion to the speeds; the cheapest are assigned one by one to the
    rank that would finish first.

    Args:
        cost_U: the cost of each user.
        speed_R: the speed of each rank.
        holder_U: the group (shard) of each user.
        may_HR: bool, which ranks hold which group.
    """
    order = np.argsort(-cost_U, kind="stable")
    one_by_one = min(len(order), ONE_BY_ONE, 16 * len(speed_R))
    bulk, rest = np.split(order, [len(order) - one_by_one])
    # DP: every user is given to one rank, once: summed twice, a user would count for two.
    rank_U = np.full(len(cost_U), -1, dtype=np.int64)
    for h in np.unique(holder_U[bulk]):
        mine = bulk[holder_U[bulk] == h]
        rank_U[mine] = _evenly(len(mine), np.where(may_HR[h], speed_R, 0.0))
    busy_R = np.bincount(rank_U[bulk], weights=cost_U[bulk], minlength=len(speed_R)) / speed_R
    for u in rest.tolist():
        done_R = np.where(may_HR[holder_U[u]], busy_R + cost_U[u] / speed_R, np.inf)
        rank = int(done_R.argmin())
        rank_U[u], busy_R[rank] = rank, done_R[rank]
    return rank_U


def _evenly(count: int, speed_R: np.ndarray) -> np.ndarray:
    """The ranks of `count` users, each rank as evenly spaced as its share of the speed allows."""
    share_R = speed_R / speed_R.sum()
    turns = [(np.arange(int(count * share) + 2) + 0.5) / share for share in share_R if share > 0]
    ranks = np.repeat(np.flatnonzero(share_R), [len(t) for t in turns])
    return ranks[np.argsort(np.concatenate(turns), kind="stable")[:count]]


class RankSpeeds:
    """The cost per second of each rank, measured over the rounds so far; equal until something is measured."""

    def __init__(self, size: int) -> None:
        self._measured_R = np.zeros(size)

    def measured(self, cost_R: np.ndarray, seconds_R: np.ndarray) -> None:
        """Adds the measurements of a round. A rank without users keeps its speed."""
        did_R = (cost_R > 0) & (seconds_R > 0)
        now_R = np.where(did_R, cost_R / np.maximum(seconds_R, 1e-9), 0.0)
        known_R = self._measured_R > 0
        mixed_R = np.where(known_R, (self._measured_R + now_R) / 2, now_R)
        self._measured_R = np.where(did_R, mixed_R, self._measured_R)

    @property
    def speed_R(self) -> np.ndarray:
        """The speeds relative to the median, limited by `LARGEST_SPEED_RATIO`."""
        known = self._measured_R[self._measured_R > 0]
        if not len(known):
            return np.ones(len(self._measured_R))
        middle = float(np.median(known))
        speed_R = np.where(self._measured_R > 0, self._measured_R, middle)
        return np.clip(speed_R, middle / LARGEST_SPEED_RATIO, middle * LARGEST_SPEED_RATIO) / middle
