"""A node of a federated run: it holds the text of one or more users, and answers the server's requests.

    node = Node(NodeData(store=Path("node/store")), memory={})
    answer = node.answer(Packet("describe", {...}))

Input: requests (messages.py), and the node's own store, which never leaves the node. Output: integers within the bound
of the clip for each user (central mode), or one masked vector (secure aggregation). The node computes updates, clips
them and truncates them to integers with the same code as `unheard train`: the engines, and `Contribution` of
mechanism/aggregation.py.

Between requests a node keeps only `memory`: JSON data in Flower's context, with the secrets of an open session of
secure aggregation. The folder of a node on a device (`NodeFolder`) also has the number of its contributions, a file
that says that its users opted out, and the newest released model for the keyboard.
"""

import json
import os
import shutil
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from unheard import storage
from unheard.config import part_from_table, part_of_kind, require
from unheard.corpus.store import TokenStore
from unheard.engines.choice import EngineChoice
from unheard.engines.distributed.engine import plan_from_table
from unheard.engines.engine import Drawn, Engine
from unheard.errors import NodeError, UnheardError
from unheard.federated.messages import Packet, refused
from unheard.mechanism.noise import DistributedGaussianNoise, NoNoise
from unheard.mechanism.plan import RoundPlan
from unheard.models.model import LanguageModel
from unheard.randomness import secure_generator
from unheard.training.run import MODELS
from unheard.updates.user_update import ONE, User, read_users

EXTRAS = 3
"""The number of integers that are summed in addition to the coordinates: the weight drawn, the balance (of an adaptive
clip), and the number of users summed."""
TRUST = ("central", "secure", "distributed")
"""The modes of a federated run. The first needs the most trust in the server, the last the least."""
OWN_MODELS = ("tied_lstm", "tied_gru")
"""The kinds of models that a server may always ask for. Other kinds import code or read files, so the owner of a node
must allow them (`any-model = true`)."""
MODEL_FILES = ("run.toml", "ledger.jsonl", "federated.json", "model.safetensors", "vocabulary.txt", "tokens.json")
"""The files of a run folder that a node keeps. `unheard keyboard` reads these files."""


@dataclass(frozen=True, kw_only=True)
class NodeFolder:
    """The folder of a node on its device.

        store/          the store with the text of its users (`unheard prepare`)
        opted-out       an empty file; if it exists, the users of this node do not take part in any round
        record.json     the number of rounds that the node has contributed to
        contributed     an empty file; if it exists, record.json must exist too
        model/          the newest released model

    Args:
        path: The folder.
    """

    path: Path

    @property
    def store(self) -> Path:
        """The folder of the store with the text of the node's users."""
        return self.path / "store"

    @property
    def model(self) -> Path:
        """The folder of the newest released model, which `unheard keyboard` opens."""
        return self.path / "model"

    @property
    def is_opted_out(self) -> bool:
        """Whether the users of this node have opted out of all rounds."""
        return os.path.lexists(self.path / "opted-out")

    def opt_out(self) -> None:
        """Opt the users of this node out of all later rounds. Earlier contributions stay in the models."""
        storage.replace_file(self.path / "opted-out", b"")

    def opt_in(self) -> None:
        """Let the users of this node take part in rounds again."""
        (self.path / "opted-out").unlink(missing_ok=True)

    @property
    def contributions(self) -> int:
        """The number of rounds that this node has contributed to, over all runs.

        Raises:
            NodeError: The record is damaged, or is missing although this node has contributed.
        """
        file = self.path / "record.json"
        unknown = "so the number of contributions is unknown. Restore it from a backup."
        if not os.path.lexists(file):
            # DP: without its record, a node that has contributed would begin to count from 0 again.
            if os.path.lexists(self._has_contributed):
                raise NodeError(f"{file} is missing, {unknown}")
            return 0
        try:
            count = json.loads(file.read_text(encoding="utf-8"))["contributions"]
        except (ValueError, KeyError, TypeError, OSError, RecursionError):
            count = None
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            raise NodeError(f"{file} is damaged, {unknown}")
        return count

    @property
    def _has_contributed(self) -> Path:
        """The empty file that exists since the first contribution. Folders of earlier versions get it at their next."""
        return self.path / "contributed"

    def record_contribution(self, limit: int | None) -> None:
        """Increase the number of contributions on disk by 1. Called before a contribution is computed.

        Args:
            limit: The largest number of contributions; None for no limit.

        Raises:
            NodeError: The node has already contributed `limit` times, or the record is damaged or missing.
        """
        # DP: under a lock: of two requests at once, each would count from the same number.
        with storage.locked(self.path / ".record.json.lock", wait=60.0):
            count = self.contributions
            # DP: a node's own limit: a node contributes to no more rounds than its user agreed to.
            if limit is not None and count >= limit:
                raise NodeError(f"This node has contributed {count} times, which is its limit.")
            storage.replace_file(self.path / "record.json", json.dumps({"contributions": count + 1}).encode())
            if not os.path.lexists(self._has_contributed):
                storage.replace_file(self._has_contributed, b"")


@dataclass(frozen=True, kw_only=True)
class NodeData:
    """The users of a node, and the rules of its owner.

    Args:
        store: The folder of a store. The node's users are the users of its training split.
        part: The number of this node, from 0, in a simulation in which many nodes read one store.
        parts: The number of nodes that divide the store among them.
        order: The position of this node when the server numbers users: node by node in ascending order, and by the ids
            of nodes with equal order. None: `part`.
        folder: The node's folder, for a node on a device; None in a simulation.
        max_contributions: The largest number of rounds that the node contributes to; None for no limit.
        trust: What the server may see: "central" (each user's update), "secure" (only sums) or "distributed" (only sums
            with the nodes' noise). The node refuses requests of a mode in which the server sees more.
        any_model: Whether the server may name a model that imports code or reads files.

    Raises:
        InvalidValue: `trust` is unknown, or `part` is not below `parts`.
    """

    store: Path
    part: int = 0
    parts: int = 1
    order: int | None = None
    folder: NodeFolder | None = None
    max_contributions: int | None = None
    trust: str = "central"
    any_model: bool = False

    def __post_init__(self) -> None:
        require(self.trust in TRUST, f"trust must be one of {', '.join(TRUST)}, not '{self.trust}'.")
        require(0 <= self.part < self.parts, f"part must be from 0 to parts - 1, not {self.part} of {self.parts}.")

    def numbers(self, num_users: int) -> range:
        """Return the range of user numbers in the store that belong to this node.

        Args:
            num_users: The number of training users of the store.
        """
        # DP: every user is on one node, once.
        return range(self.part * num_users // self.parts, (self.part + 1) * num_users // self.parts)


class Node:
    """A node, which answers the requests of a server.

    Args:
        data: The node's users, and the rules of its owner.
        memory: JSON data that is kept between requests; changed in place.
    """

    def __init__(self, data: NodeData, memory: dict[str, Any]) -> None:
        self.data, self.memory = data, memory

    def answer(self, request: Packet) -> Packet:
        """Return the answer to one request. An error does not raise; it gives an answer of kind `refused`.

        The answer to an unexpected error has only the type of the error: its message may contain a user's data.
        """
        try:
            session = request.fields.get("session")
            fields, arrays = self._act(request)
            return Packet(request.kind, {"session": session, **fields}, arrays)
        except UnheardError as error:
            return refused(request, str(error))
        except Exception as error:
            # DP: the message of an unexpected error may quote a user's data, so it is not sent.
            kind = type(error).__name__
            if isinstance(error, OSError):
                return refused(request, f"{kind} on the node: it cannot read or write one of its files.")
            return refused(request, f"{kind} on the node, which is a bug.")

    def _act(self, request: Packet) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Compute the answer to a request. Return its fields and its arrays.

        Raises:
            NodeError: The node refuses the request.
        """
        folder = self.data.folder
        match request.kind:
            case "describe":
                return self._describe(request.fields), {}
            case "model" if folder is not None:
                keep_model(folder, request, self.data.any_model)
                return {}, {}
        # DP: a user who opted out takes part in nothing from here on, not even in a session that is open.
        if folder is not None and folder.is_opted_out:
            raise NodeError("The users of this node have opted out.")
        match request.kind:
            case "update":
                units_UP, weights_U, balances_U = self._updates(request)
                return {}, {"units": units_UP, "weights": weights_U, "balances": balances_U}
            case "keys" | "share" | "masked" | "reveal":
                return self._aggregate(request)
        raise NodeError(f"This node does not know '{request.kind}': give every node the same version of unheard.")

    def _describe(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return the number of users that take part, and the order of this node.

        Raises:
            NodeError: The server has another vocabulary or tokenizer, or needs features that the store lacks.
        """
        store = _opened(self.data.store)
        own = {"vocabulary": store.vocabulary.digest, "tokens": store.info.get("tokens", {})}
        if {name: fields.get(name) for name in own} != own:
            raise NodeError(
                "The node's store was prepared with another vocabulary or tokenizer than the server's. Prepare it again "
                "with the server's vocabulary.txt (unheard prepare --vocab vocabulary.txt)."
            )
        split = store.train
        split.check_boundaries()
        needed = int(fields.get("features") or 0)
        if needed and split.num_features != needed:
            raise NodeError(f"The model takes {needed} features of each user, the node has {split.num_features}.")
        is_out = self.data.folder is not None and self.data.folder.is_opted_out
        users = 0 if is_out else len(self.data.numbers(split.num_users))
        return {"users": users, "order": self.data.part if self.data.order is None else self.data.order}

    def _updates(self, request: Packet) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Compute the integers, weights and balances of the drawn users, int64 [U, P], [U] and [U]. They are private.

        Raises:
            NodeError: The owner of the node does not allow the mode or the plan, or the request is not valid.
        """
        fields, params = request.fields, request.arrays.get("params")
        model, engine = self._engine(fields)
        plan = plan_from_table(fields["plan"], model.layout)
        mode = "central" if request.kind == "update" else "secure"
        if request.kind == "masked" and isinstance(plan.noise, DistributedGaussianNoise):
            mode = "distributed"
        # DP: the owner decides what the server is trusted with. A plan with distributed noise is accepted only in the
        # mode in which the node adds its share of the noise.
        if TRUST.index(mode) < TRUST.index(self.data.trust) or (
            mode != "distributed" and isinstance(plan.noise, DistributedGaussianNoise)
        ):
            raise NodeError(f"This node does not take part in {mode} mode with this noise.")
        # DP: a device never adds to a model without noise, even if the server asks for it.
        if self.data.folder is not None and isinstance(plan.noise, NoNoise):
            raise NodeError("The server's plan adds no noise, and this node takes part in private runs only.")
        if not isinstance(params, np.ndarray) or params.shape != (model.layout.total,):
            raise NodeError("The parameters from the server do not fit the model.")
        params_P = torch.from_numpy(np.array(params))
        users = self._users(fields["users"], fields["numbers"], bool(model.user_features))
        units_UP = np.zeros((len(users), model.layout.total), np.int64)
        weights_U, balances_U = np.zeros(len(users), np.int64), np.zeros(len(users), np.int64)
        for i, user in enumerate(users):
            one = engine.sum_updates(params_P, [user], plan, Drawn(int(fields["seed"])))
            units_UP[i] = one.units_P.cpu().numpy()
            weights_U[i], balances_U[i] = round(one.weight * ONE), one.balance or 0
        return units_UP, weights_U, balances_U

    def _aggregate(self, request: Packet) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Compute this node's answer in one stage of secure aggregation. Return its fields and its arrays."""
        from unheard.federated.secure_aggregation import Party

        fields, party = request.fields, Party(self.memory)
        session = str(fields.get("session"))
        match request.kind:
            case "keys":
                return dict(party.keys(session)), {}
            case "share":
                return party.share(session, int(fields["own"]), fields["peers"], int(fields["threshold"])), {}
            case "reveal":
                return dict(party.reveal(session, fields["survivors"], fields["dropped"])), {}
        units_P, extra_E = self._vector(request)
        masked_P, masked_E = party.masked(session, fields["received"], units_P, extra_E, int(fields["bits"]))
        return {}, {"masked": masked_P, "extra": masked_E}

    def _vector(self, request: Packet) -> tuple[np.ndarray, np.ndarray]:
        """Return the sum over the drawn users of this node [P], and its `EXTRAS` integers, before masking.

        With distributed noise the sum includes this node's share of the noise, and there are no further integers. A
        node without a drawn user returns zeros (and noise), so that the other nodes do not learn who was drawn.
        """
        model, _ = self._engine(request.fields)
        plan = plan_from_table(request.fields["plan"], model.layout)
        units_P, extra_E = np.zeros(model.layout.total, np.int64), np.zeros(EXTRAS, np.int64)
        if request.fields["users"]:
            units_UP, weights_U, balances_U = self._updates(request)
            units_P = units_UP.sum(axis=0)
            extra_E[:] = weights_U.sum(), balances_U.sum(), len(units_UP)
        if isinstance(plan.noise, DistributedGaussianNoise):
            return units_P + self._noise_share(plan), extra_E[:0]
        return units_P, extra_E

    def _noise_share(self, plan: RoundPlan) -> np.ndarray:
        """Draw this node's share of the noise, int64 [P]."""
        assert isinstance(plan.noise, DistributedGaussianNoise)
        each = plan.contribution
        # DP: the node's own secure generator: a server that knew the noise could subtract it. Weights and counts have
        # no noise, so they are not sent.
        return plan.noise.share(secure_generator(), plan.layout.total, each.l2_bound, each.grid)

    def _engine(self, fields: Mapping[str, Any]) -> tuple[LanguageModel, Engine]:
        """Return the model and the engine that the server names.

        Raises:
            NodeError: The owner of the node does not allow models of this kind.
        """
        kind = fields["model"].get("kind")
        # DP: a server cannot make a node run code or read files unless its owner has agreed.
        if kind not in OWN_MODELS and not self.data.any_model:
            raise NodeError(
                f"This node does not train models of kind '{kind}'. Its owner can allow it: any-model = true."
            )
        return _built(json.dumps(fields["model"], sort_keys=True), json.dumps(fields["engine"], sort_keys=True))

    def _users(self, local: Sequence[int], numbers: Sequence[int], with_features: bool) -> list[User]:
        """Read the drawn users, and count one contribution of this node.

        Args:
            local: The numbers of the users among this node's users.
            numbers: The numbers of the same users on the server.
            with_features: Whether to read users' features.

        Raises:
            NodeError: A user is unknown or is named twice, or the node has reached its limit of contributions.
        """
        split = _opened(self.data.store).train
        own = self.data.numbers(split.num_users)
        chosen = [int(i) for i in local]
        # DP: a user who is named twice would count twice.
        if len(set(chosen)) < len(chosen) or any(not 0 <= i < len(own) for i in chosen) or len(numbers) != len(chosen):
            raise NodeError("The server asks for users that this node does not have, or for one twice.")
        if self.data.folder is not None:
            self.data.folder.record_contribution(self.data.max_contributions)
        users = read_users(split, np.array([own[i] for i in chosen], dtype=np.int64), with_features)
        return [User(user.tokens, user.features, int(number)) for user, number in zip(users, numbers, strict=True)]


def keep_model(folder: NodeFolder, request: Packet, any_model: bool = False) -> None:
    """Save the newest released model of a run for the keyboard on this node.

    The files are `MODEL_FILES` of a run folder. The folder of the model is replaced as a whole. After a crash it holds
    one complete model, or none until the server sends the next one.

    Args:
        folder: The node's folder.
        request: A request of kind "model"; its arrays are the files, as bytes.
        any_model: Whether the model may be of a kind that imports code or reads files.

    Raises:
        NodeError: A file is missing, or the owner did not allow models of this kind.
    """
    files: dict[str, bytes] = {}
    for name in MODEL_FILES:
        content = request.arrays.get(name)
        if not isinstance(content, np.ndarray) or content.dtype != np.uint8 or content.ndim != 1:
            raise NodeError(f"A released model consists of these files, all as bytes: {', '.join(MODEL_FILES)}.")
        files[name] = content.tobytes()
    try:
        kind = tomllib.loads(files["run.toml"].decode())["model"]["kind"]
    except (ValueError, KeyError, TypeError):
        raise NodeError("The run file of the released model cannot be read.") from None
    # DP: the keyboard opens what is kept here, so a server must not be able to make it run code or read files.
    if kind not in OWN_MODELS and not any_model:
        raise NodeError(f"This node keeps no models of kind '{kind}'. Its owner can allow it: any-model = true.")
    before = folder.path / ".model.before"
    shutil.rmtree(before, ignore_errors=True)
    with storage.staged_folder(folder.model) as staged:
        for name, content in files.items():
            storage.replace_file(staged / name, content)
        if folder.model.exists():
            storage.rename_folder(folder.model, before)
    shutil.rmtree(before, ignore_errors=True)


@lru_cache(maxsize=64)
def _opened(path: Path) -> TokenStore:
    """Open a store, or return the store that was opened before."""
    return TokenStore.open(path)


@lru_cache(maxsize=4)
def _built(model: str, engine: str) -> tuple[LanguageModel, Engine]:
    """Build a model and its engine from JSON text. The result is cached: building may take longer than an update."""
    built = part_of_kind(MODELS, json.loads(model), "model")
    return built, part_from_table(EngineChoice, json.loads(engine), "engine").build(built)
