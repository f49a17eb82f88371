"""The distributed engine: divides the users of cohorts among the ranks and adds the integer sums of the ranks.

Input: cohorts of users of a store. Output: the sums that the leader's local engine would compute alone; on equal
hardware they are equal to the bit. The leader alone draws the cohort and the noise, outside of this module. Each rank
receives the user numbers of its own share only. The leader's local engine sums users that are not in a store (in tests
and benchmarks).

training/worker.py builds the engine if torchrun or `--processes` started several processes. The other ranks call
`sum_share`:

    leader                                          workers
    assign_users                                    -
    send "sum" with plans, seeds, user numbers  ->  receive
    broadcast parameters                        ->  broadcast
    sum own users                                   sum own users, reply with the time
    send "add", reduce_sum                      ->  reduce_sum

**Where a rank reads users.** `StoreReplicas` opens the store at the leader's path, or this machine's copy or part of it
(`[engine] corpus_part`). Every copy must be of the store whose ledger is charged, and must number the users in the same
way; otherwise one user could be summed twice under two numbers. `shard_holders` checks this before the first round.

**Load balancing.** `assign_users` decides which rank sums which users, so that all ranks finish at about the same time.
Input: the cost of each user (`FedAvg.cost`, computed from the number of tokens), the measured speed of each rank, and
which ranks hold which users. Output: a rank for each user. The assignment does not change the sums, because integers
are added exactly. The measured speeds depend on the users, so they stay in memory and are never printed or written.

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
from unheard.engines.engine import Cohort, Drawn, Engine, SumsCohorts
from unheard.errors import CorpusError, InvalidValue, RankError
from unheard.mechanism.aggregation import CohortSum
from unheard.mechanism.clipping import AdaptiveClip
from unheard.mechanism.plan import KINDS, RoundPlan
from unheard.parameters import Layout
from unheard.updates.user_update import ONE, StoredUsers

LARGEST_SPEED_RATIO = 4.0
"""The largest ratio of a rank's speed to the median speed, and of the median to the rank's, that `RankSpeeds` reports.

The limit keeps a rank from getting almost no users after one slow round.
"""

DIGEST = 4
"""The number of int64 numbers that hold a SHA-256 hash."""

ONE_BY_ONE = 512
"""The largest number of users that `assign_users` assigns one by one. It takes a few milliseconds, and evens out the
load that remains after the bulk assignment."""


@dataclass
class StoreReplicas:
    """The stores that this process has opened. Each store is named by its path on the leader's machine."""

    ranks: ProcessGroup
    template: str | None = None
    """`[engine] corpus_part`: the path of this rank's part, with {rank}, {local_rank} or {node} in it."""
    _open: dict[str, TokenStore] = field(default_factory=dict)

    def here(self, path: str) -> Path:
        """Return the path on this machine of the store that is at `path` on the leader's machine.

        Raises:
            InvalidValue: The template has another placeholder.
        """
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
        """Return the users of a split of a store; opens the store at the first call.

        Args:
            split: The leader's path of the store, and the name of the split.

        Raises:
            CorpusError: The store cannot be opened or lacks the split.
        """
        path, name = split
        if path not in self._open:
            self._open[path] = TokenStore.open(self.here(path))
        users = getattr(self._open[path], name)
        if not isinstance(users, UserTokens):
            raise CorpusError(f"{self._open[path].path} has no {name}.")
        return users

    def fingerprint(self, split: tuple[str, ...]) -> np.ndarray:
        """Return int64 numbers that `shard_holders` compares between ranks.

        They are the fingerprint of the split (`store_fingerprint`), and then 1 or 0 for each shard: whether this rank
        holds it.
        """
        users = self.users(split)
        users.check_boundaries()
        return np.concatenate([store_fingerprint(self._open[split[0]], users), users.shards_here.astype(np.int64)])


def store_fingerprint(store: TokenStore, users: UserTokens) -> np.ndarray:
    """Return three SHA-256 hashes as int64: of corpus.json, of the boundaries of all users, and of samples of the text.

    A part of a store lacks some of the text, so it has the sampled hashes of the whole store on record; this function
    uses the recorded hashes, after it has compared them with the text that the part holds.

    Raises:
        CorpusError: The text of a part differs from its recorded hashes.
    """
    samples = users.samples()
    if store.part is not None:
        recorded = store.part.get("samples")
        recorded = recorded if isinstance(recorded, list) else []
        if len(recorded) != len(samples) or any(
            mine not in (None, whole) for mine, whole in zip(samples, recorded, strict=True)
        ):
            raise CorpusError(
                f"The text of {store.path} differs from its whole store. Make the part again: unheard corpus part."
            )
        samples = recorded
    wrote = hashlib.sha256(" ".join(map(str, samples)).encode()).digest()
    return np.frombuffer(bytes.fromhex(store.name) + users.boundaries_digest() + wrote, dtype=np.int64)


def shard_holders(fingerprints: list[np.ndarray], store: TokenStore) -> np.ndarray:
    """Return which rank holds which shard of the training users, bool [shards, ranks], and check that all stores agree.

    Args:
        fingerprints: The result of `StoreReplicas.fingerprint` on each rank, in the order of ranks.
        store: The leader's store.

    Raises:
        CorpusError: A rank has another store, or a shard is on no rank.
    """
    expected, path = store_fingerprint(store, store.train), str(store.path)
    for rank, fingerprint in enumerate(fingerprints):
        # DP: if copies numbered users differently, one user could be summed twice; and the users of another store would
        # not be charged.
        if not np.array_equal(fingerprint[: 3 * DIGEST], expected):
            raise CorpusError(
                f"Rank {rank} has another store than the run's {path}. Give every rank a copy or a part of that store."
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
    """Decide which rank sums which user. Return the rank of each user, int64 [U].

    Most users, beginning with the most expensive, are dealt to the ranks in proportion to the speeds. The cheapest
    users are then assigned one by one to the rank that would finish first.

    Args:
        cost_U: The cost of each user.
        speed_R: The speed of each rank.
        holder_U: The number of each user's shard.
        may_HR: Whether each rank holds each shard, bool [shards, ranks].
    """
    order = np.argsort(-cost_U, kind="stable")
    one_by_one = min(len(order), ONE_BY_ONE, 16 * len(speed_R))
    bulk, rest = np.split(order, [len(order) - one_by_one])
    # DP: every user is given to one rank, once. A user who is summed twice would have the influence of two users.
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
    """Assign `count` users to ranks in proportion to the speeds of the ranks. Return the rank of each user.

    The users of each rank are spread evenly over the list, so that every part of the list is balanced too.
    """
    share_R = speed_R / speed_R.sum()
    turns = [(np.arange(int(count * share) + 2) + 0.5) / share for share in share_R if share > 0]
    ranks = np.repeat(np.flatnonzero(share_R), [len(t) for t in turns])
    return ranks[np.argsort(np.concatenate(turns), kind="stable")[:count]]


class RankSpeeds:
    """The cost that each rank computes per second, averaged over the rounds so far, with more weight on recent rounds.

    All ranks have the same speed before the first measurement.
    """

    def __init__(self, size: int) -> None:
        self._measured_R = np.zeros(size)

    def measured(self, cost_R: np.ndarray, seconds_R: np.ndarray) -> None:
        """Add the measurements of a round. A rank without users keeps its speed.

        Args:
            cost_R: The total cost of the users of each rank.
            seconds_R: How long each rank took.
        """
        did_R = (cost_R > 0) & (seconds_R > 0)
        now_R = np.where(did_R, cost_R / np.maximum(seconds_R, 1e-9), 0.0)
        known_R = self._measured_R > 0
        mixed_R = np.where(known_R, (self._measured_R + now_R) / 2, now_R)
        self._measured_R = np.where(did_R, mixed_R, self._measured_R)

    @property
    def speed_R(self) -> np.ndarray:
        """The speed of each rank relative to the median, limited by `LARGEST_SPEED_RATIO`."""
        known = self._measured_R[self._measured_R > 0]
        if not len(known):
            return np.ones(len(self._measured_R))
        middle = float(np.median(known))
        speed_R = np.where(self._measured_R > 0, self._measured_R, middle)
        return np.clip(speed_R, middle / LARGEST_SPEED_RATIO, middle * LARGEST_SPEED_RATIO) / middle


EXTRA = 4
"""The number of integers that follow the coordinates of a sum when ranks add their sums.

They are the weight drawn, the balance (of an adaptive clip), the number of users summed, and the sum of their numbers.
"""


class DistributedEngine(SumsCohorts):
    """An engine that sums cohorts on several ranks. Only the leader has one; it sends each rank its share of the users.

    Args:
        local: The engine that computes the leader's own share.
        ranks: The process group; every other rank runs `training.worker.serve`.
        stores: The stores from which the leader reads its own share.
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
        """Check that every rank has this store, and that each training user is on at least one rank.

        Training calls this before the first round. Cohorts of a store that was not checked are summed by the leader.

        Raises:
            CorpusError: A rank has another store, or a shard is on no rank.
        """
        location = store.train.location
        if location is None or location in self._may_HR:
            return
        self.ranks.send_all("fingerprint", {"split": list(location)})
        fingerprints = [self.stores.fingerprint(location), *(reply.numbers for reply in self.ranks.replies())]
        self._may_HR[location] = shard_holders(fingerprints, store)

    def sum_cohorts(self, cohorts: Sequence[Cohort]) -> list[CohortSum]:
        """Return the sum of each cohort. The users of all cohorts are assigned together, to balance the load better.

        Raises:
            RankError: A rank fails, or the ranks did not sum each drawn user exactly once.
        """
        stored = [cohort.users for cohort in cohorts if isinstance(cohort.users, StoredUsers)]
        if len(stored) < len(cohorts) or any(users.source.location not in self._may_HR for users in stored):
            return self.local.sum_cohorts(cohorts)
        cost_U = np.concatenate([c.plan.update.cost(u.lengths()) for c, u in zip(cohorts, stored, strict=True)])
        rank_U = self._assign(stored, cost_U)
        cohort_U = np.repeat(np.arange(len(cohorts)), [len(users) for users in stored])
        number_U = np.concatenate([users.numbers_U for users in stored])
        requests = [
            {
                "plan": plan_table(c.plan),
                "seed": c.seed,
                "split": list(u.source.location or ()),
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
        # The leader sends "add" only when all ranks are done. A fast rank then waits for this message, which has no
        # timeout; inside the collective its wait would have one.
        self.ranks.send_all("add")
        units_RN = self.ranks.reduce_sum(units_RN)
        return [
            _cohort_sum(units_N, cohort.plan, users)
            for units_N, cohort, users in zip(units_RN, cohorts, stored, strict=True)
        ]

    def _assign(self, stored: Sequence[StoredUsers], cost_U: np.ndarray) -> np.ndarray:
        """Choose the rank that sums each user. Return one rank per user, for the users of all cohorts in order."""
        may_HR, holder_U, first = [], [], 0
        for users in stored:
            assert users.source.location is not None
            may_HR.append(self._may_HR[users.source.location])
            holder_U.append(first + users.source.shard_of(users.numbers_U))
            first += len(may_HR[-1])
        return assign_users(cost_U, self._speeds.speed_R, np.concatenate(holder_U), np.concatenate(may_HR))


def sum_share(
    engine: Engine, stores: StoreReplicas, ranks: ProcessGroup, message: Message, layout: Layout
) -> tuple[Tensor, float]:
    """Compute a worker's share of `DistributedEngine.sum_cohorts`.

    The worker adds the returned integers to those of the other ranks (`reduce_sum`) when the leader sends "add".

    Args:
        engine: This rank's engine.
        stores: The stores from which this rank reads users.
        ranks: The process group.
        message: The leader's request, of kind "sum".
        layout: The layout of the model.

    Returns:
        The sums of this rank's users, int64 [cohorts, P + EXTRA], private; and the seconds that they took.
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
    """Compute the sums of this rank's users, int64 [cohorts, P + EXTRA], and measure how many seconds they take.

    Args:
        engine: This rank's engine.
        stores: The stores from which this rank reads users.
        requests: For each cohort its plan, seed and split, and whether to read users' features.
        counts: How many of this rank's users each cohort has.
        number_U: The numbers of this rank's users, cohort after cohort.
        params_RP: The parameters of each cohort.
        layout: The layout of the model.
    """
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
        # Weights are multiples of 2^-30 (updates/user_update.py), so this product is an integer and nothing is rounded.
        row_N[layout.total :] = torch.tensor(
            [round(total.weight * ONE), total.balance or 0, *_checksum(users.numbers_U)]
        )
    if engine.device.type == "cuda":
        torch.cuda.synchronize(engine.device)
    return units_RN, time.perf_counter() - began


def _checksum(number_U: np.ndarray) -> tuple[int, int]:
    """Return how many users these are, and the sum of a hash of each user's number.

    A rank computes it from the users whose updates it summed, not from the leader's message. It therefore shows which
    users the rank really summed. Each hash has 40 bits, so int64 holds the sum over 2^22 users.
    """
    # Plain numbers would not do: users 4 and 4 have the same sum as users 3 and 5.
    hash_U = number_U.astype(np.uint64) * np.uint64(0x9E37_79B9_7F4A_7C15)
    hash_U = (hash_U ^ (hash_U >> np.uint64(32))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    return len(number_U), int((hash_U >> np.uint64(24)).sum())


def _cohort_sum(units_N: Tensor, plan: RoundPlan, drawn: StoredUsers) -> CohortSum:
    """Return the sum of one cohort, from the added integers of all ranks.

    Args:
        units_N: One row of the sum over ranks, with its `EXTRA` integers.
        plan: The plan of the round.
        drawn: The users that the leader drew.

    Raises:
        RankError: The checksum of the ranks differs from the checksum of the drawn users.
    """
    weight_units, balance, *summed = units_N[-EXTRA:].tolist()
    # DP: the ranks together have summed every drawn user exactly once.
    if tuple(summed) != _checksum(drawn.numbers_U):
        raise RankError(
            "The ranks did not sum each drawn user exactly once. The round is charged, and its sum is discarded. "
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
    """Return the plan of a round as a JSON value for a message. Its parts have the same form as in a run file."""
    parts = {name: table_from_part(getattr(plan, name), kinds) for name, kinds in KINDS.items()}
    rule = None if plan.adaptive_clip is None else table_from_part(plan.adaptive_clip)
    return {"population": plan.population, "parts": parts, "adaptive_clip": rule}


def plan_from_table(table: Mapping[str, Any], layout: Layout) -> RoundPlan:
    """Return the plan of a round from the value that `plan_table` made. Raise `InvalidValue` if it is not valid."""
    parts = {name: part_of_kind(kinds, table["parts"][name], name) for name, kinds in KINDS.items()}
    rule = table["adaptive_clip"]
    adaptive = None if rule is None else part_from_table(AdaptiveClip, rule, "clip")
    return RoundPlan(population=table["population"], **parts, layout=layout, adaptive_clip=adaptive)
