"""Many processes as one engine: the leader deals a cohort out, every rank sums its own users, and one sum of integers comes back.

In: cohorts of users who lie in a store. Out: what the local engine alone would give, to the bit. Cohort and noise are drawn before
and after, by the leader alone; nothing of the mechanism is here. A rank is told the numbers of its own users and no others. Users
who lie in no store (a test's, a benchmark's) are summed by the leader's own engine. Its plain twin is the local engine.
How it is used: training/crew.py makes one where torchrun or `--processes` started several processes; the other ranks `sum_share`.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unheard.corpus.store import TokenStore
from unheard.engines.engine import Cohort, Drawn, Engine
from unheard.engines.messages import Message
from unheard.engines.ranks import Ranks, same_for_all
from unheard.engines.shares import Speeds, cost_of, deal
from unheard.engines.stores import Stores, who_holds_what
from unheard.errors import RankError
from unheard.mechanism.adaptive import AdaptiveClip
from unheard.mechanism.plan import KINDS, RoundPlan
from unheard.mechanism.values import CohortSum
from unheard.parameters import Layout
from unheard.parts import part_from_table, part_of_kind, table_from_part
from unheard.updates.stored import StoredUsers
from unheard.updates.user import User
from unheard.updates.weighting import ONE

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
        balance=None if plan.following is None else balance,
    )


def plan_table(plan: RoundPlan) -> dict[str, Any]:
    """A round's plan as a message: the parts as a run file has them."""
    parts = {name: table_from_part(getattr(plan, name), kinds) for name, kinds in KINDS.items()}
    follows = None if plan.following is None else table_from_part(plan.following)
    return {"population": plan.population, "parts": parts, "following": follows}


def plan_from_table(table: Mapping[str, Any], layout: Layout) -> RoundPlan:
    parts = {name: part_of_kind(kinds, table["parts"][name], name) for name, kinds in KINDS.items()}
    follows = table["following"]
    following = None if follows is None else part_from_table(AdaptiveClip, follows, "clip")
    return RoundPlan(population=table["population"], **parts, layout=layout, following=following)
