"""Many processes as one engine: the leader deals a cohort out, every rank sums its own users, and one sum of integers comes back.

In: cohorts of users who lie in a store. Out: what the local engine alone would give, to the bit. Cohort and noise are drawn before
and after, by the leader alone; nothing of the mechanism is here. A rank is told the numbers of its own users and no others. Users
who lie in no store (a test's, a benchmark's) are summed by the leader's own engine. Its plain twin is the local engine.
How it is used: training/worker.py makes one where torchrun or `--processes` started several processes; the other ranks `sum_share`.
Who sums whom: users dealt out to ranks so that all end together.

In: what each user will cost (from how much they wrote, without reading it), how fast each rank was, who holds whose text. Out: a
rank for each user. How users are dealt out changes no result: sums are of integers. Speeds follow users, so they are kept in
memory alone, never printed or written.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unheard.config import part_from_table, part_of_kind, table_from_part
from unheard.corpus.store import TokenStore
from unheard.engines.distributed.process_group import Ranks, same_for_all
from unheard.engines.distributed.protocol import Message
from unheard.engines.distributed.store_replicas import Stores, who_holds_what
from unheard.engines.engine import Cohort, Drawn, Engine
from unheard.errors import RankError
from unheard.mechanism.clipping import AdaptiveClip
from unheard.mechanism.plan import KINDS, RoundPlan, Update
from unheard.mechanism.values import CohortSum
from unheard.parameters import Layout
from unheard.updates.fedavg import FedAvg
from unheard.updates.users import StoredUsers, User
from unheard.updates.weighting import ONE

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


EXTRA = 4
"""Numbers behind a sum's coordinates: the weight drawn, the balance (of a clip that follows the users), how many users were summed,
and the sum of their numbers."""


class DistributedEngine:
    """The leader's engine."""

    def __init__(self, local: Engine, ranks: Ranks, stores: Stores, layout: Layout) -> None:
        self.local, self.ranks, self.stores = local, ranks, stores
        self._layout = layout
        self._speeds = Speeds(ranks.size)
        self._may_HR: dict[tuple[str, str], np.ndarray] = {}

    @property
    def device(self) -> torch.device:
        return self.local.device

    def reach(self, store: TokenStore) -> None:
        """Before a run: does every rank have this corpus, and is there a rank for each of its training users?"""
        place = store.train.place
        if place is None or place in self._may_HR:
            return
        self.ranks.tell(same_for_all(self.ranks, "look", {"place": list(place)}))
        looks = [self.stores.look(place), *(answer.numbers for answer in self.ranks.answers())]
        self._may_HR[place] = who_holds_what(looks, store)

    def sum_updates(
        self, params_P: Tensor, users: Sequence[User], plan: RoundPlan, rng: np.random.Generator | Drawn
    ) -> CohortSum:
        return self.sum_cohorts([Cohort(params_P=params_P, users=users, plan=plan, rng=rng)])[0]

    def sum_cohorts(self, cohorts: Sequence[Cohort]) -> list[CohortSum]:
        """Users of all cohorts are dealt out together, so that one run's few may fill up another's round."""
        stored = [cohort.users for cohort in cohorts if isinstance(cohort.users, StoredUsers)]
        if len(stored) < len(cohorts) or any(users.source.place not in self._may_HR for users in stored):
            return self.local.sum_cohorts(cohorts)
        cost_U = np.concatenate([cost_of(c.plan.update, u.lengths()) for c, u in zip(cohorts, stored, strict=True)])
        rank_U = self._deal(stored, cost_U)
        cohort_U = np.repeat(np.arange(len(cohorts)), [len(users) for users in stored])
        number_U = np.concatenate([users.numbers_U for users in stored])
        asked = [
            {
                "plan": plan_table(c.plan),
                "seed": c.seed,
                "place": list(u.source.place or ()),
                "features": u.with_features,
            }
            for c, u in zip(cohorts, stored, strict=True)
        ]
        dtype = str(cohorts[0].params_P.dtype).removeprefix("torch.")
        messages = []
        for rank in self.ranks.others:
            mine_U = rank_U == rank
            counts = np.bincount(cohort_U[mine_U], minlength=len(cohorts)).tolist()
            facts = {"cohorts": asked, "counts": counts, "dtype": dtype}
            messages.append(Message("sum", facts, number_U[mine_U]))
        self.ranks.tell(messages)
        params_RP = self.ranks.hand_out(torch.stack([cohort.params_P for cohort in cohorts]))
        own_U = rank_U == 0
        counts = np.bincount(cohort_U[own_U], minlength=len(cohorts)).tolist()
        units_RN, seconds = _sum_here(self.local, self.stores, asked, counts, number_U[own_U], params_RP, self._layout)
        seconds_R = np.array([seconds, *(answer.seconds for answer in self.ranks.answers())])
        self._speeds.measured(np.bincount(rank_U, weights=cost_U, minlength=self.ranks.size), seconds_R)
        # Now that all are done: whoever was first has waited for this message, not in the sum, where time runs.
        self.ranks.tell(same_for_all(self.ranks, "add", {}))
        units_RN = self.ranks.add_up(units_RN)
        return [
            _cohort_sum(units_N, cohort.plan, users)
            for units_N, cohort, users in zip(units_RN, cohorts, stored, strict=True)
        ]

    def _deal(self, stored: Sequence[StoredUsers], cost_U: np.ndarray) -> np.ndarray:
        may_HR, holder_U, first = [], [], 0
        for users in stored:
            assert users.source.place is not None
            may_HR.append(self._may_HR[users.source.place])
            holder_U.append(first + users.source.shard_of(users.numbers_U))
            first += len(may_HR[-1])
        return deal(cost_U, self._speeds.speed_R, np.concatenate(holder_U), np.concatenate(may_HR))


def sum_share(engine: Engine, stores: Stores, ranks: Ranks, message: Message, layout: Layout) -> tuple[Tensor, float]:
    """Another rank's side of `sum_cohorts`, up to the sum over ranks: what to add, and how long it took."""
    facts = message.facts
    shape = (len(facts["cohorts"]), layout.total)
    params_RP = ranks.hand_out(torch.zeros(shape, dtype=getattr(torch, facts["dtype"])))
    return _sum_here(engine, stores, facts["cohorts"], facts["counts"], message.numbers, params_RP, layout)


def _sum_here(
    engine: Engine,
    stores: Stores,
    asked: Sequence[Mapping[str, Any]],
    counts: Sequence[int],
    number_U: np.ndarray,
    params_RP: Tensor,
    layout: Layout,
) -> tuple[Tensor, float]:
    """The sums of this rank's users, int64 [cohorts, parameters + EXTRA]."""
    began = time.perf_counter()
    stored = [
        StoredUsers(stores.users(tuple(one["place"])), numbers, with_features=one["features"])
        for one, numbers in zip(asked, np.split(number_U, np.cumsum(counts)[:-1]), strict=True)
    ]
    mine = [
        Cohort(params_P=params_P, users=users, plan=plan_from_table(one["plan"], layout), rng=Drawn(one["seed"]))
        for one, users, params_P in zip(asked, stored, params_RP, strict=True)
    ]
    sums = engine.sum_cohorts(mine)
    units_RN = torch.empty(len(sums), layout.total + EXTRA, dtype=torch.int64, device=engine.device)
    for row_N, one, users in zip(units_RN, sums, stored, strict=True):
        row_N[: layout.total] = one.units_P
        # The weight is whole units of 2^-30 (updates/weighting.py): exact as a float, and as an integer for any cohort on earth.
        row_N[layout.total :] = torch.tensor([round(one.weight * ONE), one.balance or 0, *_who(users)])
    if engine.device.type == "cuda":
        torch.cuda.synchronize(engine.device)
    return units_RN, time.perf_counter() - began


def _who(users: StoredUsers) -> tuple[int, int]:
    """How many, and the sum of their numbers (int64 holds it for 2^22 users numbered up to 2^40). Taken from the users who are
    summed, never from the message that asked for them: a rank that only repeats what it was told would prove nothing."""
    return len(users), int(users.numbers_U.sum())


def _cohort_sum(units_N: Tensor, plan: RoundPlan, drawn: StoredUsers) -> CohortSum:
    weight_units, balance, *summed = units_N[-EXTRA:].tolist()
    # DP: everybody who was drawn was summed exactly once, on whichever rank.
    if tuple(summed) != _who(drawn):
        raise RankError(
            "The ranks did not sum the users that were drawn, each of them once. The round is charged, and nothing of it is used. "
            "Give every rank the same version of unheard, and start again: the run goes on from its last checkpoint."
        )
    return CohortSum(
        units_P=units_N[:-EXTRA],
        grid=plan.contribution.grid,
        weight=weight_units / ONE,
        l2_bound=plan.contribution.l2_bound,
        balance=None if plan.adaptive_clip is None else balance,
    )


def plan_table(plan: RoundPlan) -> dict[str, Any]:
    """A round's plan as a message: the parts as a run file has them."""
    parts = {name: table_from_part(getattr(plan, name), kinds) for name, kinds in KINDS.items()}
    rule = None if plan.adaptive_clip is None else table_from_part(plan.adaptive_clip)
    return {"population": plan.population, "parts": parts, "adaptive_clip": rule}


def plan_from_table(table: Mapping[str, Any], layout: Layout) -> RoundPlan:
    parts = {name: part_of_kind(kinds, table["parts"][name], name) for name, kinds in KINDS.items()}
    rule = table["adaptive_clip"]
    adaptive = None if rule is None else part_from_table(AdaptiveClip, rule, "clip")
    return RoundPlan(population=table["population"], **parts, layout=layout, adaptive_clip=adaptive)
