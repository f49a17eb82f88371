"""Who sums whom: users dealt out to ranks so that all end together.

In: what each user will cost (from how much they wrote, without reading it), how fast each rank was, who holds whose text. Out: a
rank for each user. How users are dealt out changes no result: sums are of integers. Speeds follow users, so they are kept in
memory alone, never printed or written.
"""

import numpy as np

from unheard.mechanism.plan import Update
from unheard.updates.fedavg import FedAvg

MOST_APART = 4.0
"""No rank is taken for more than so many times faster or slower than the middle one: one bad moment must not starve it."""

ONE_BY_ONE = 512
"""Users dealt one by one, at most: enough to even out what is left, and a few milliseconds."""


def cost_of(update: Update, num_tokens_U: np.ndarray) -> np.ndarray:
    """Local steps of each user, and one more for the clip and the sum at the end."""
    targets_U = np.maximum(np.asarray(num_tokens_U, dtype=np.int64) - 1, 0)
    if isinstance(update, FedAvg):
        return 1.0 + update.epochs * -(-targets_U // (update.batch_size * update.unroll))
    windows_U = -(-targets_U // update.unroll)  # one step, as long as its batch
    return 1.0 + (windows_U if update.batch_size is None else np.minimum(windows_U, update.batch_size)) / 8


def deal(cost_U: np.ndarray, speed_R: np.ndarray, holder_U: np.ndarray, may_HR: np.ndarray) -> np.ndarray:
    """The rank of each user. `may_HR` says, of each group of users that lie together, which ranks hold them; `holder_U` is each
    user's group. The long ones go round evenly; the short ones, one by one, to whoever would be done with them first."""
    order = np.argsort(-cost_U, kind="stable")
    one_by_one = min(len(order), ONE_BY_ONE, 16 * len(speed_R))
    bulk, rest = np.split(order, [len(order) - one_by_one])
    # DP: every user is given to one rank, once: summed twice, somebody would count for two.
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
    """So many turns, each rank's as evenly spaced as its share of the speed."""
    share_R = speed_R / speed_R.sum()
    turns = [(np.arange(int(count * share) + 2) + 0.5) / share for share in share_R if share > 0]
    ranks = np.repeat(np.flatnonzero(share_R), [len(t) for t in turns])
    return ranks[np.argsort(np.concatenate(turns), kind="stable")[:count]]


class Speeds:
    """How much each rank does in a second, from the rounds so far; equal until something was measured."""

    def __init__(self, size: int) -> None:
        self._measured_R = np.zeros(size)

    def measured(self, cost_R: np.ndarray, seconds_R: np.ndarray) -> None:
        """A round more. Who had nothing to do says nothing."""
        did_R = (cost_R > 0) & (seconds_R > 0)
        now_R = np.where(did_R, cost_R / np.maximum(seconds_R, 1e-9), 0.0)
        known_R = self._measured_R > 0
        mixed_R = np.where(known_R, (self._measured_R + now_R) / 2, now_R)
        self._measured_R = np.where(did_R, mixed_R, self._measured_R)

    @property
    def speed_R(self) -> np.ndarray:
        known = self._measured_R[self._measured_R > 0]
        if not len(known):
            return np.ones(len(self._measured_R))
        middle = float(np.median(known))
        speed_R = np.where(self._measured_R > 0, self._measured_R, middle)
        return np.clip(speed_R, middle / MOST_APART, middle * MOST_APART) / middle
