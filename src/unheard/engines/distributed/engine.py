"""The distributed engine: divides cohorts among the ranks and adds their sums of integers.

Input: cohorts of users of a store. Output: what the local engine of the leader would give, to the bit. The leader draws
the cohort before and the noise after; nothing of the mechanism happens here. A rank receives the numbers of its own
users only. Users that are in no store (in tests and benchmarks) are summed by the leader's local engine.

training/worker.py builds the engine when torchrun or `--processes` started several processes. The other ranks call
`sum_share`:

    leader                                          workers
    assign_users                                    -
    send "sum" with plans, seeds, user numbers  ->  receive
    broadcast parameters                        ->  broadcast
    sum own users                                   sum own users, reply with the time
    send "add", reduce_sum                      ->  reduce_sum

**Where a rank reads users.** `StoreReplicas` opens the store at the leader's path, or this machine's replica or part of
it (`[engine] corpus_part`). Every replica must be of the store that is charged, and must number its users alike;
otherwise one person could be summed twice under two numbers. `shard_holders` checks that before the first round.

**Load balancing.** `assign_users` decides which rank sums which users, so that all ranks finish at about the same time.
Input: the cost of each user (`FedAvg.cost`, from the number of tokens, without reading them), the measured speed of
each rank, and which ranks hold which users. Output: a rank for each user. The assignment changes no result, since
sums are of integers. Speeds depend on users, so they are kept in memory only, never printed or written.

    >>> holds_all = np.ones((1, 2), dtype=bool)
    >>> assign_users(np.array([4.0, 2.0, 2.0]), np.ones(2), np.zeros(3, dtype=int), holds_all).tolist()
    [0, 1, 1]
"""

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unheard.config import part_from_table, part_of_kind, table_from_part
from unheard.corpus.store import TokenStore, UserTokens
from unheard.engines.distributed.process_group import Message, ProcessGroup
from unheard.engines.engine import Cohort, Drawn, Engine
from unheard.errors import CorpusError, InvalidValue, RankError
from unheard.mechanism.aggregation import CohortSum
from unheard.mechanism.clipping import AdaptiveClip
from unheard.mechanism.plan import KINDS, RoundPlan
from unheard.parameters import Layout
from unheard.updates.user_update import ONE, StoredUsers, User

LARGEST_SPEED_RATIO = 4.0
"""A rank counts as at most this many times faster or slower than the median rank, so that one slow round does not starve
it."""

DIGEST = 4
"""int64 numbers of a SHA-256."""

ONE_BY_ONE = 512
"""The most users that are assigned one by one: enough to balance the remainder, and a few milliseconds."""


@dataclass
class StoreReplicas:
    """The stores that this process has opened, by the leader's path of each."""

    ranks: ProcessGroup
    template: str | None = None
    """`[engine] corpus_part`: the path of this machine's part, with {rank}, {local_rank} or {node} in it."""
    _open: dict[str, TokenStore] = field(default_factory=dict)

    def here(self, path: str) -> Path:
        """The path on this machine of the store that the leader has at `path`."""
        if self.template is None:
            return Path(path)
        try:
            filled = self.template.format(rank=self.ranks.rank, local_rank=self.ranks.local_rank, node=self.ranks.node)
        except (KeyError, IndexError, ValueError, AttributeError, TypeError):
            raise InvalidValue(
                f"engine.corpus_part = {self.template!r}: only {{rank}}, {{local_rank}} and {{node}} can be filled in."
            ) from None
        return Path(filled)

    def users(self, split: tuple[str, ...]) -> UserTokens:
        """The users of a split, given as (the leader's path of the store, the name of the split)."""
        path, name = split
        if path not in self._open:
            self._open[path] = TokenStore.open(self.here(path))
        users = getattr(self._open[path], name)
        if not isinstance(users, UserTokens):
            raise CorpusError(f"{self._open[path].path} has no {name}.")
        return users

    def fingerprint(self, split: tuple[str, ...]) -> np.ndarray:
        """The fingerprint of a split on this rank (`store_fingerprint`), and which shards the rank holds."""
        users = self.users(split)
        users.check_boundaries()
        return np.concatenate([store_fingerprint(self._open[split[0]], users), users.shards_here.astype(np.int64)])


def store_fingerprint(store: TokenStore, users: UserTokens) -> np.ndarray:
    """Three hashes as integers: the name of the corpus, the boundaries of its users, and samples of their text."""
    samples = users.samples()
    if store.part is not None:
        recorded = store.part.get("samples")
        recorded = recorded if isinstance(recorded, list) else []
        if len(recorded) != len(samples) or any(
            mine not in (None, whole) for mine, whole in zip(samples, recorded, strict=True)
        ):
            raise CorpusError(
                f"{store.path} is not the part that was made of its store. Make it again: unheard corpus part."
            )
        samples = recorded
    wrote = hashlib.sha256(" ".join(map(str, samples)).encode()).digest()
    return np.frombuffer(bytes.fromhex(store.name) + users.boundaries_digest() + wrote, dtype=np.int64)


def shard_holders(fingerprints: list[np.ndarray], store: TokenStore) -> np.ndarray:
    """Which rank holds which shard, bool [shards, ranks], from the fingerprints of all ranks.

    Args:
        fingerprints: What `StoreReplicas.fingerprint` returned on each rank.
        store: The leader's store.

    Raises:
        CorpusError: If a rank has another corpus, or no rank holds a shard.
    """
    expected, path = store_fingerprint(store, store.train), str(store.path)
    for rank, fingerprint in enumerate(fingerprints):
        # DP: copies that number users differently would let one person in twice, and those of another store are not
        # charged.
        if not np.array_equal(fingerprint[: 3 * DIGEST], expected):
            raise CorpusError(
                f"Rank {rank} has another corpus than the run's {path}. Give every rank a copy, or a part, of that store."
            )
    may_HR = np.stack([mine[3 * DIGEST :] for mine in fingerprints], axis=1).astype(bool)
    if len(lost := np.flatnonzero(~may_HR.any(axis=1))):
        names = ", ".join(f"{shard:05d}" for shard in lost[:8])
        raise CorpusError(
            f"No rank holds shard {names}{' ...' if len(lost) > 8 else ''} of {path}/train: its users could not be read. Start a "
            "rank for every part, or give the whole store."
        )
    return may_HR


def assign_users(cost_U: np.ndarray, speed_R: np.ndarray, holder_U: np.ndarray, may_HR: np.ndarray) -> np.ndarray:
    """Decide which rank sums which user; returns the rank of each user.

    Expensive users are distributed round robin in proportion to the speeds; the cheapest are assigned one by one to the
    rank that would finish first.

    Args:
        cost_U: The cost of each user.
        speed_R: The speed of each rank.
        holder_U: The group (shard) of each user.
        may_HR: Bool, which ranks hold which group.
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
    """Assign `count` users to ranks in proportion to the speeds of the ranks; returns the rank of each user.

    The users of each rank are spread evenly over the list, so that any part of it is balanced too.
    """
    share_R = speed_R / speed_R.sum()
    turns = [(np.arange(int(count * share) + 2) + 0.5) / share for share in share_R if share > 0]
    ranks = np.repeat(np.flatnonzero(share_R), [len(t) for t in turns])
    return ranks[np.argsort(np.concatenate(turns), kind="stable")[:count]]


class RankSpeeds:
    """The cost per second of each rank, measured over the rounds so far; equal until something is measured."""

    def __init__(self, size: int) -> None:
        self._measured_R = np.zeros(size)

    def measured(self, cost_R: np.ndarray, seconds_R: np.ndarray) -> None:
        """Add the measurements of a round. A rank without users keeps its speed."""
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


EXTRA = 4
"""Integers after the coordinates of a sum: the weight drawn, the balance (of an adaptive clip), the number of users
summed, and the sum of their numbers."""


class DistributedEngine:
    """Sums cohorts on several ranks. The leader has this engine; it sends each rank its share of the users.

    Args:
        local: The engine for the leader's own share.
        ranks: The process group; every other rank runs `training.worker.serve`.
        stores: Where this rank reads users.
        layout: The layout of the model's parameters.
    """

    def __init__(self, local: Engine, ranks: ProcessGroup, stores: StoreReplicas, layout: Layout) -> None:
        self.local, self.ranks, self.stores = local, ranks, stores
        self._layout = layout
        self._speeds = RankSpeeds(ranks.size)
        self._may_HR: dict[tuple[str, str], np.ndarray] = {}

    @property
    def device(self) -> torch.device:
        """The device of the leader's local engine."""
        return self.local.device

    def check_replicas(self, store: TokenStore) -> None:
        """Check before a run that every rank has this corpus, and that each training user is on some rank.

        Raises:
            CorpusError: If a rank has another corpus, or nobody holds a shard.
        """
        place = store.train.place
        if place is None or place in self._may_HR:
            return
        self.ranks.send_all("fingerprint", {"split": list(place)})
        fingerprints = [self.stores.fingerprint(place), *(reply.numbers for reply in self.ranks.replies())]
        self._may_HR[place] = shard_holders(fingerprints, store)

    def sum_updates(
        self, params_P: Tensor, users: Sequence[User], plan: RoundPlan, rng: np.random.Generator | Drawn
    ) -> CohortSum:
        """The sum of one cohort, which is divided among the ranks (see `Engine.sum_updates`)."""
        return self.sum_cohorts([Cohort(params_P=params_P, users=users, plan=plan, rng=rng)])[0]

    def sum_cohorts(self, cohorts: Sequence[Cohort]) -> list[CohortSum]:
        """The sum of each cohort. The users of all cohorts are assigned together, which balances the load better."""
        stored = [cohort.users for cohort in cohorts if isinstance(cohort.users, StoredUsers)]
        if len(stored) < len(cohorts) or any(users.source.place not in self._may_HR for users in stored):
            return self.local.sum_cohorts(cohorts)
        cost_U = np.concatenate([c.plan.update.cost(u.lengths()) for c, u in zip(cohorts, stored, strict=True)])
        rank_U = self._assign(stored, cost_U)
        cohort_U = np.repeat(np.arange(len(cohorts)), [len(users) for users in stored])
        number_U = np.concatenate([users.numbers_U for users in stored])
        requests = [
            {
                "plan": plan_table(c.plan),
                "seed": c.seed,
                "split": list(u.source.place or ()),
                "features": u.with_features,
            }
            for c, u in zip(cohorts, stored, strict=True)
        ]
        dtype = str(cohorts[0].params_P.dtype).removeprefix("torch.")
        messages = []
        for rank in self.ranks.others:
            mine_U = rank_U == rank
            counts = np.bincount(cohort_U[mine_U], minlength=len(cohorts)).tolist()
            fields = {"cohorts": requests, "counts": counts, "dtype": dtype}
            messages.append(Message("sum", fields, number_U[mine_U]))
        self.ranks.send(messages)
        params_RP = self.ranks.broadcast(torch.stack([cohort.params_P for cohort in cohorts]))
        own_U = rank_U == 0
        counts = np.bincount(cohort_U[own_U], minlength=len(cohorts)).tolist()
        units_RN, seconds = _sum_here(
            self.local, self.stores, requests, counts, number_U[own_U], params_RP, self._layout
        )
        seconds_R = np.array([seconds, *(reply.seconds for reply in self.ranks.replies())])
        self._speeds.measured(np.bincount(rank_U, weights=cost_U, minlength=self.ranks.size), seconds_R)
        # Sent when all ranks are done: a fast rank waits for this message instead of in the collective, which has a
        # timeout.
        self.ranks.send_all("add")
        units_RN = self.ranks.reduce_sum(units_RN)
        return [
            _cohort_sum(units_N, cohort.plan, users)
            for units_N, cohort, users in zip(units_RN, cohorts, stored, strict=True)
        ]

    def _assign(self, stored: Sequence[StoredUsers], cost_U: np.ndarray) -> np.ndarray:
        """The rank of each user of all cohorts."""
        may_HR, holder_U, first = [], [], 0
        for users in stored:
            assert users.source.place is not None
            may_HR.append(self._may_HR[users.source.place])
            holder_U.append(first + users.source.shard_of(users.numbers_U))
            first += len(may_HR[-1])
        return assign_users(cost_U, self._speeds.speed_R, np.concatenate(holder_U), np.concatenate(may_HR))


def sum_share(
    engine: Engine, stores: StoreReplicas, ranks: ProcessGroup, message: Message, layout: Layout
) -> tuple[Tensor, float]:
    """A worker's part of `sum_cohorts`, up to the sum over ranks: the integers to add, and the seconds that they took.

    Args:
        engine: This rank's engine.
        stores: Where this rank reads users.
        ranks: The process group.
        message: The leader's request, of kind "sum".
        layout: The layout of the model.
    """
    fields = message.fields
    shape = (len(fields["cohorts"]), layout.total)
    params_RP = ranks.broadcast(torch.zeros(shape, dtype=getattr(torch, fields["dtype"])))
    return _sum_here(engine, stores, fields["cohorts"], fields["counts"], message.numbers, params_RP, layout)


def _sum_here(
    engine: Engine,
    stores: StoreReplicas,
    requests: Sequence[Mapping[str, Any]],
    counts: Sequence[int],
    number_U: np.ndarray,
    params_RP: Tensor,
    layout: Layout,
) -> tuple[Tensor, float]:
    """The sums of this rank's users, int64 [cohorts, P + EXTRA], and how many seconds they took."""
    began = time.perf_counter()
    stored = [
        StoredUsers(stores.users(tuple(request["split"])), numbers, with_features=request["features"])
        for request, numbers in zip(requests, np.split(number_U, np.cumsum(counts)[:-1]), strict=True)
    ]
    mine = [
        Cohort(
            params_P=params_P, users=users, plan=plan_from_table(request["plan"], layout), rng=Drawn(request["seed"])
        )
        for request, users, params_P in zip(requests, stored, params_RP, strict=True)
    ]
    sums = engine.sum_cohorts(mine)
    units_RN = torch.empty(len(sums), layout.total + EXTRA, dtype=torch.int64, device=engine.device)
    for row_N, total, users in zip(units_RN, sums, stored, strict=True):
        row_N[: layout.total] = total.units_P
        # The weight is in units of 2^-30 (updates/user_update.py): exact as a float, and as an integer for any cohort.
        row_N[layout.total :] = torch.tensor([round(total.weight * ONE), total.balance or 0, *_checksum(users)])
    if engine.device.type == "cuda":
        torch.cuda.synchronize(engine.device)
    return units_RN, time.perf_counter() - began


def _checksum(users: StoredUsers) -> tuple[int, int]:
    """The number of users and the sum of their numbers (int64 holds it for 2^22 users numbered up to 2^40).

    Computed from the users that are summed, never from the message that names them: a rank that repeats the message
    proves nothing."""
    return len(users), int(users.numbers_U.sum())


def _cohort_sum(units_N: Tensor, plan: RoundPlan, drawn: StoredUsers) -> CohortSum:
    """The sum of one cohort from the integers of all ranks, whose checksum must be that of the users drawn."""
    weight_units, balance, *summed = units_N[-EXTRA:].tolist()
    # DP: everybody who was drawn was summed exactly once, on whichever rank.
    if tuple(summed) != _checksum(drawn):
        raise RankError(
            "The ranks did not sum the users that were drawn, each of them once. The round is charged, and nothing of it is used. "
            "Give every rank the same version of unheard, and start again: the run continues from its last checkpoint."
        )
    return CohortSum(
        units_P=units_N[:-EXTRA],
        grid=plan.contribution.grid,
        weight=weight_units / ONE,
        l2_bound=plan.contribution.l2_bound,
        balance=None if plan.adaptive_clip is None else balance,
    )


def plan_table(plan: RoundPlan) -> dict[str, Any]:
    """The plan of a round as JSON: the parts as in a run file."""
    parts = {name: table_from_part(getattr(plan, name), kinds) for name, kinds in KINDS.items()}
    rule = None if plan.adaptive_clip is None else table_from_part(plan.adaptive_clip)
    return {"population": plan.population, "parts": parts, "adaptive_clip": rule}


def plan_from_table(table: Mapping[str, Any], layout: Layout) -> RoundPlan:
    """The plan of a round from `plan_table`."""
    parts = {name: part_of_kind(kinds, table["parts"][name], name) for name, kinds in KINDS.items()}
    rule = table["adaptive_clip"]
    adaptive = None if rule is None else part_from_table(AdaptiveClip, rule, "clip")
    return RoundPlan(population=table["population"], **parts, layout=layout, adaptive_clip=adaptive)
