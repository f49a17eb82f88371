"""The server of a federated run: an engine that gets the updates of a cohort from nodes.

    engine = FederatedEngine(network, run.model, choice, store)
    for report in train(run, "runs/first", on=engine): ...

The training loop is that of `unheard train`. It charges the ledgers, draws the cohort among the registered users,
calls `sum_cohorts`, divides by declared constants, adds the noise and takes the server's step. With the same seeds, and
if all nodes answer, the model is equal to that of `unheard train` to the bit.

Input: cohorts of user numbers. Output: the exact sum of the integers of the users whose nodes answered in time. Other
users contribute zero, and the round is charged all the same. There are three modes:

| mode | run file | what the server sees |
| --- | --- | --- |
| central | (default) | the integers of each drawn user |
| secure aggregation | `[engine] secure_aggregation = true` | only the sum of these integers |
| distributed noise | also `[noise] kind = "distributed_gaussian"` | only the sum, with noise from the nodes |

Users are registered when the server first sees their node, and keep their numbers until the server ends.
"""

import math
import secrets
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from unheard.config import table_from_part
from unheard.corpus.store import TokenStore, UserTokens
from unheard.engines.choice import EngineChoice
from unheard.engines.distributed.engine import plan_table
from unheard.engines.engine import Cohort, SumsCohorts
from unheard.errors import InvalidValue, NodeError, PrivacyError, UnheardError, UnprovenCombination
from unheard.federated.messages import Network, Packet
from unheard.federated.node import EXTRAS
from unheard.mechanism.aggregation import CohortSum
from unheard.mechanism.noise import DistributedGaussianNoise
from unheard.mechanism.plan import Plan, RoundPlan
from unheard.mechanism.sampling import FixedSizeSampling, PoissonSampling
from unheard.models.model import LanguageModel
from unheard.parameters import Layout
from unheard.training.run import MODELS
from unheard.updates.user_update import ONE, StoredUsers

ABANDONED_IN_A_ROW = 3
"""Training stops after this many abandoned rounds in a row, because every abandoned round is charged to the ledger."""
USERS_PER_NODE = 2**20
"""The largest number of users of a node. A node that reports more is not registered: the server would draw users who do
not exist."""
SMALLEST_PARTIES = 8
"""The smallest default of `[engine] parties`, if there are so many nodes."""


class RegisteredUsers(UserTokens):
    """The users of all nodes, numbered from 0. The server knows their number, and cannot read their text."""

    def __init__(self) -> None:
        super().__init__([], np.dtype("<u2"))

    def _no_text(self, *_: Any, **__: Any) -> NoReturn:
        """Raise `NodeError`, in place of every method that reads text."""
        raise NodeError("The text of these users is on their nodes, and cannot be read on the server.")

    tokens = users = lengths = features = _no_text


@dataclass(frozen=True)
class RegisteredNode:
    """One node and its users, who have consecutive numbers.

    Attributes:
        node: The id of the node.
        first: The number of its first user on the server.
        users: The number of its users.
    """

    node: int
    first: int
    users: int


@dataclass
class Registry:
    """Which node holds which users."""

    users: RegisteredUsers = field(default_factory=RegisteredUsers)
    by_node: dict[int, RegisteredNode] = field(default_factory=dict)

    def add(self, described: Mapping[int, Packet]) -> None:
        """Register the nodes that are not registered yet, sorted by their order and id.

        A node with an invalid answer is left out.

        Args:
            described: The answers to "describe", by the id of the node.
        """
        new = []
        for node, answer in described.items():
            users, order = answer.fields.get("users"), answer.fields.get("order")
            if (
                isinstance(users, int)
                and isinstance(order, int)
                and 0 <= users <= USERS_PER_NODE
                and node not in self.by_node
            ):
                new.append((order, node, users))
        for _, node, users in sorted(new):
            self.by_node[node] = RegisteredNode(node, self.users.num_users, users)
            self.users.num_users += users

    def drawn(self, numbers_U: np.ndarray) -> dict[int, np.ndarray]:
        """Group drawn users by node.

        Args:
            numbers_U: The numbers of the drawn users on the server.

        Returns:
            The numbers of each node's drawn users, by the id of the node. Nodes without a drawn user are left out.
        """
        nodes = list(self.by_node.values())
        firsts = np.array([one.first for one in nodes], dtype=np.int64)
        # A node without users has the same `first` as the next node. side="right" finds the last of them: it has users.
        which_U = np.searchsorted(firsts, numbers_U, side="right") - 1
        return {nodes[int(i)].node: numbers_U[which_U == i] for i in np.unique(which_U)}


class FederatedEngine(SumsCohorts):
    """An engine that sums cohorts whose users are on nodes: it sends requests to the nodes, and adds their answers.

    Args:
        network: The connection to the nodes.
        model: The model whose updates are summed.
        choice: The engine that the nodes use, and the options of a federated run.
        store: The server's store. Nodes must have its vocabulary and tokenizer.

    Raises:
        NodeError: No node with users has answered.
    """

    def __init__(self, network: Network, model: LanguageModel, choice: EngineChoice, store: TokenStore) -> None:
        self.network, self.choice = network, choice
        self._model = model
        self._store = store
        self._registry = Registry()
        self._abandoned = 0
        self._left_out: set[int] = set()
        self._refusals: dict[str, int] = {}
        self.register()
        if not self.users.num_users:
            raise NodeError(f"No node with users has answered.{self._reasons()}")

    @property
    def device(self) -> torch.device:
        """The device of the sums: always the CPU."""
        return torch.device("cpu")

    @property
    def users(self) -> RegisteredUsers:
        """The registered users."""
        return self._registry.users

    @property
    def facts(self) -> dict[str, Any]:
        """Facts for the record of the run: whether the nodes mask their updates (`secure_aggregation`)."""
        return {"secure_aggregation": self.choice.secure_aggregation}

    def register(self) -> None:
        """Ask the nodes that are not registered yet for the number of their users, and register them."""
        new = [node for node in self.network.nodes() if node not in self._registry.by_node]
        facts = {
            "vocabulary": self._store.vocabulary.digest,
            "tokens": self._store.info.get("tokens", {}),
            "features": self._model.user_features,
        }
        self._registry.add(self._ask("describe", {node: (facts, {}) for node in new}))

    def check_plan(self, plan: Plan) -> None:
        """Check that the nodes can run the plan. Training calls this before the first charge.

        Raises:
            InvalidValue: There are too few nodes for secure aggregation.
            UnprovenCombination: The sampler is neither Poisson nor of fixed size, or the noise of one node is too small.
            PrivacyError: The plan has distributed noise, and secure aggregation is off.
        """
        if not isinstance(plan.sampling, PoissonSampling | FixedSizeSampling):
            raise UnprovenCombination(
                "A federated run draws users, each with everything that is on their node. Set [sampling] kind = 'poisson'."
            )
        for _, phase in plan.phases(self._model.layout):
            nodes = len(self._registry.by_node)
            if isinstance(phase.noise, DistributedGaussianNoise):
                phase.noise.share_std(phase.contribution.l2_bound, phase.contribution.grid)
                if not self.choice.secure_aggregation:
                    raise PrivacyError(
                        "With [noise] kind = 'distributed_gaussian' the noise of one node does not hide its update: "
                        "set [engine] secure_aggregation = true."
                    )
            if self.choice.secure_aggregation and nodes < self._parties(phase):
                raise InvalidValue(
                    f"Secure aggregation is set to at least {self._parties(phase)} nodes per round, and {nodes} are "
                    "connected. Start more, or lower engine.parties (and noise.min_parties)."
                )

    def sum_cohorts(self, cohorts: Sequence[Cohort]) -> list[CohortSum]:
        """Return the sum of each cohort over the nodes that answered, and then register new nodes.

        Raises:
            NodeError: `ABANDONED_IN_A_ROW` secure aggregations in a row have failed.
        """
        sums = [self._sum(cohort) for cohort in cohorts]
        self.register()
        return sums

    def _sum(self, cohort: Cohort) -> CohortSum:
        """Return the sum of a cohort over its nodes, by secure aggregation if the run file asks for it."""
        if not isinstance(cohort.users, StoredUsers) or cohort.users.source is not self.users:
            raise TypeError("A federated engine sums only registered users of its nodes.")
        drawn = self._registry.drawn(cohort.users.numbers_U)
        if self.choice.secure_aggregation:
            return self._secure_sum(cohort, drawn)
        return self._central_sum(cohort, drawn)

    def _central_sum(self, cohort: Cohort, drawn: Mapping[int, np.ndarray]) -> CohortSum:
        """Ask the nodes for the integers of their drawn users, check the integers of each user, and return their sum.

        Args:
            cohort: The cohort.
            drawn: The numbers of the drawn users, by node.
        """
        session, each = secrets.token_hex(16), cohort.plan.contribution
        facts = self._work(cohort, session)
        answers = self._ask(
            "update",
            {node: ({**facts, **self._named(node, numbers_U)}, _params(cohort)) for node, numbers_U in drawn.items()},
        )
        chunks = []
        for node, answer in answers.items():
            try:
                units_UP, weights_U, balances_U = _arrays(answer, len(drawn[node]), cohort.plan.layout)
            except NodeError as error:
                self._refused(str(error))
                continue
            for units_P, weight, balance in zip(units_UP, weights_U.tolist(), balances_U.tolist(), strict=True):
                # DP: the server checks what a node sends; a user beyond the bound contributes exactly zero.
                if not each.accepts(units_P, weight) or abs(balance) > 1:
                    self._refused("A node sent values beyond the bound of one user: it contributes nothing.")
                    continue
                chunks.append(_part(cohort.plan, units_P, weight, balance))
        return _whole(cohort.plan, chunks)

    def _secure_sum(self, cohort: Cohort, drawn: Mapping[int, np.ndarray]) -> CohortSum:
        """Return the sum of a cohort by secure aggregation. If the session fails, warn and return a sum of zero.

        Raises:
            NodeError: This is failure number `ABANDONED_IN_A_ROW` in a row.
        """
        try:
            total = self._session(cohort, drawn)
        except NodeError as error:
            self._abandoned += 1
            reason = f"The round was charged, and is abandoned: {error}"
            if self._abandoned >= ABANDONED_IN_A_ROW:
                raise NodeError(
                    f"{ABANDONED_IN_A_ROW} rounds in a row were abandoned. {error}{self._reasons()} Continue with "
                    "`unheard resume` when more nodes are connected."
                ) from None
            warnings.warn(reason, RuntimeWarning, stacklevel=2)
            # This sum contains no user's data, so it needs no noise from the nodes.
            return replace(_whole(cohort.plan, []), added_noise=math.inf)
        self._abandoned = 0
        return total

    def _session(self, cohort: Cohort, drawn: Mapping[int, np.ndarray]) -> CohortSum:
        """Sum the updates of one cohort by secure aggregation, in its four stages: keys, share, masked, reveal.

        Raises:
            NodeError: Too few nodes finished a stage.
        """
        from unheard.federated.secure_aggregation import FEWEST, Session, modulus_bits

        plan, each = cohort.plan, cohort.plan.contribution
        noise = plan.noise if isinstance(plan.noise, DistributedGaussianNoise) else None
        share = 0.0 if noise is None else noise.share_std(each.l2_bound, each.grid)
        all_nodes = len(self._registry.by_node)
        bits = modulus_bits(
            self.users.num_users, each.is_noised, share * math.sqrt(all_nodes), plan.layout.total, all_nodes
        )
        session = Session(bits=bits, count=plan.layout.total, extras=0 if noise else EXTRAS)
        nodes = self._chosen_parties(plan, drawn)
        party_of = {node: number for number, node in enumerate(nodes)}
        name = {"session": session.name}

        def stage(kind: str, requests: Mapping[int, tuple[dict[str, Any], dict[str, np.ndarray]]], take: Any) -> None:
            """Send one request to each node, and pass each answer to `take`. Ignore answers for which `take` raises."""
            for node, answer in self._ask(kind, requests).items():
                try:
                    take(party_of[node], answer)
                except UnheardError as error:
                    self._refused(str(error))

        stage("keys", {n: (name, {}) for n in nodes}, lambda p, a: session.add_keys(p, a.fields))
        _enough(len(session.keys), max(FEWEST, noise.min_parties if noise else 0))
        in_session = [n for n in nodes if party_of[n] in session.keys]
        requests = {n: ({**name, **session.share_request(party_of[n])}, {}) for n in in_session}
        stage("share", requests, lambda p, a: session.add_shares(p, a.fields))
        in_session = [n for n in nodes if party_of[n] in session.shares]
        facts, params = self._work(cohort, session.name), _params(cohort)
        nobody = np.empty(0, np.int64)
        requests = {
            n: ({**facts, **self._named(n, drawn.get(n, nobody)), **session.masked_request(party_of[n])}, params)
            for n in in_session
        }
        stage("masked", requests, lambda p, a: session.add_vector(p, a.arrays.get("masked"), a.arrays.get("extra")))
        # DP: with fewer than the declared number of shares the noise would be too small, so the sum is not unmasked.
        _enough(len(session.vectors), max(FEWEST, noise.min_parties if noise else 0))
        finished = [n for n in nodes if party_of[n] in session.vectors]
        requests = {n: ({**name, **session.reveal_request(party_of[n])}, {}) for n in finished}
        stage("reveal", requests, lambda p, a: session.add_revealed(p, a.fields))
        try:
            units_P, extra_E = session.total()
        finally:
            # A hostile node can spoil only one round: later sessions leave it out.
            for party in session.suspects:
                self._refused("The shares of a node do not fit together: it is left out of later rounds.")
                self._left_out.add(nodes[party])
        weight, balance = (0, 0) if noise else extra_E[:2].tolist()
        return CohortSum(
            units_P=torch.from_numpy(units_P),
            grid=each.grid,
            weight=weight / ONE,
            l2_bound=each.l2_bound,
            balance=None if plan.adaptive_clip is None else balance,
            added_noise=share * math.sqrt(len(session.vectors)),
        )

    def _parties(self, plan: RoundPlan) -> int:
        """Return the smallest number of nodes in each secure aggregation (see `EngineChoice.parties`)."""
        least = plan.noise.min_parties if isinstance(plan.noise, DistributedGaussianNoise) else 3
        if self.choice.parties is not None:
            return max(self.choice.parties, least)
        expected = plan.sampling.probability(plan.population) * self.users.num_users
        wanted = max(math.ceil(expected + 3 * math.sqrt(expected)), SMALLEST_PARTIES, math.ceil(1.5 * least))
        return max(min(wanted, len(self._registry.by_node)), least)

    def _chosen_parties(self, plan: RoundPlan, drawn: Mapping[int, np.ndarray]) -> list[int]:
        """Return the nodes of a secure aggregation in random order.

        They are the nodes of the drawn users, and random other nodes up to the number of parties.
        """
        drawn_nodes = [node for node in drawn if node not in self._left_out]
        others = [node for node in self._registry.by_node if node not in drawn and node not in self._left_out]
        missing = min(max(self._parties(plan) - len(drawn_nodes), 0), len(others))
        random = secrets.SystemRandom()
        nodes = [*drawn_nodes, *random.sample(others, missing)]
        random.shuffle(nodes)
        return nodes

    def _named(self, node: int, numbers_U: np.ndarray) -> dict[str, Any]:
        """Return the fields of a request that name the drawn users of a node, by their numbers on node and server."""
        first = self._registry.by_node[node].first
        return {"users": (numbers_U - first).tolist(), "numbers": numbers_U.tolist()}

    def _work(self, cohort: Cohort, session: str) -> dict[str, Any]:
        """Return the fields of a request that are the same for all nodes of a round: what to compute."""
        # Timeouts and other settings of the server are not sent.
        engine = EngineChoice(kind=self.choice.kind, device=self.choice.device, precision=self.choice.precision)
        return {
            "session": session,
            "plan": plan_table(cohort.plan),
            "seed": cohort.seed,
            "model": table_from_part(self._model, MODELS),
            "engine": table_from_part(engine),
        }

    def _ask(
        self, kind: str, requests: Mapping[int, tuple[dict[str, Any], dict[str, np.ndarray]]]
    ) -> dict[int, Packet]:
        """Send requests of one kind, and return the answers by node.

        Refusals, and answers of another kind or session, are counted by reason and left out.

        Args:
            kind: The kind of the requests.
            requests: The fields and arrays of each request, by the id of the node.
        """
        if not requests:
            return {}
        packets = {node: Packet(kind, fields, arrays) for node, (fields, arrays) in requests.items()}
        answers = self.network.exchange(packets, self.choice.node_timeout)
        kept = {}
        for node, answer in answers.items():
            if node not in packets:
                continue
            # DP: an answer to another request, of this round or of an earlier one, is not counted.
            if answer.kind == kind and answer.fields.get("session") == packets[node].fields.get("session"):
                kept[node] = answer
            else:
                reason = answer.fields.get("reason")
                self._refused(str(reason)[:300] if answer.kind == "refused" else "A node answered another request.")
        # In the order of the requests, so that no result depends on which node answered first.
        return {node: kept[node] for node in requests if node in kept}

    def _refused(self, reason: str) -> None:
        """Count a reason why a node contributed nothing. Reasons appear in errors only, and are never saved."""
        if len(self._refusals) < 100:
            self._refusals[reason] = self._refusals.get(reason, 0) + 1

    def _reasons(self) -> str:
        """Return a sentence with the most frequent reason, for an error message; "" if there is none."""
        if not self._refusals:
            return ""
        reason, _ = max(self._refusals.items(), key=lambda item: item[1])
        return f" The most frequent answer was: {reason}"


def _enough(have: int, needed: int) -> None:
    """Raise `NodeError` if fewer nodes than needed have finished a stage. The message does not say how many did."""
    if have < needed:
        raise NodeError(f"{needed} nodes must finish each stage, and fewer did.")


def _params(cohort: Cohort) -> dict[str, np.ndarray]:
    """Return the parameters of the round as the arrays of a request."""
    return {"params": cohort.params_P.detach().cpu().numpy()}


def _arrays(answer: Packet, users: int, layout: Layout) -> tuple[Tensor, np.ndarray, np.ndarray]:
    """Return the integers, weights and balances of an answer in central mode, after a check of shapes and types.

    Args:
        answer: The answer of one node.
        users: The number of users that the node was asked for.
        layout: The layout of the model.

    Raises:
        NodeError: An array is missing, or has another shape or type.
    """
    shapes = {"units": (users, layout.total), "weights": (users,), "balances": (users,)}
    arrays = [answer.arrays.get(name) for name in shapes]
    for array, shape in zip(arrays, shapes.values(), strict=True):
        if not isinstance(array, np.ndarray) or array.dtype != np.int64 or array.shape != shape:
            raise NodeError("A node sent arrays of another length or type than it was asked for.")
    units_UP, weights_U, balances_U = arrays
    assert units_UP is not None
    assert weights_U is not None
    assert balances_U is not None
    return torch.from_numpy(np.array(units_UP)), weights_U, balances_U


def _part(plan: RoundPlan, units_P: Tensor, weight_units: int, balance: int) -> CohortSum:
    """Return the contribution of one user, as a node sent it, in the form of a sum."""
    each = plan.contribution
    return CohortSum(
        units_P=units_P,
        grid=each.grid,
        weight=weight_units / ONE,
        l2_bound=each.l2_bound,
        balance=None if plan.adaptive_clip is None else balance,
    )


def _whole(plan: RoundPlan, chunks: Sequence[CohortSum]) -> CohortSum:
    """Return the sum of the contributions."""
    return plan.contribution.sum(chunks, plan.layout.total)
