"""A node of a federated run: it holds the text of one or more users, and answers the server's requests.

    node = Node(NodeData(store=Path("node/store")), memory={})
    answer = node.answer(Packet("describe", {...}))

Input: requests (messages.py), and the node's own token store, which never leaves it. Output: per user integers within
the clip's bound (central mode), or one masked vector (secure aggregation). The update, the clip and the truncation to
the grid are those of `unheard train`: the same engines, `Contribution` of mechanism/aggregation.py.

A node answers each request by itself. What it must keep between requests is in `memory`, JSON data that Flower's
context holds: the secrets of an open session of secure aggregation. A folder of a node (`NodeFolder`) also has the
record of its contributions, the mark of a user who opted out, and the newest released model for the keyboard.
"""

import json
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
"""Integers beside the coordinates of a masked vector: weight drawn, balance (of an adaptive clip), users summed."""
TRUST = ("central", "secure", "distributed")
"""What a server may be trusted with, most first."""
OWN_MODELS = ("tied_lstm", "tied_gru")
"""Models that a server may ask for. Other kinds import code or read files, so the node must allow them by itself."""
MODEL_FILES = ("run.toml", "ledger.jsonl", "model.safetensors", "vocabulary.txt", "tokens.json")
"""The files of a run folder that a node keeps: what `unheard keyboard` opens."""


@dataclass(frozen=True, kw_only=True)
class NodeFolder:
    """The folder of a node on its device.

        store/          the token store with the text of its users (`unheard prepare`)
        opted-out       exists if its users take part in no round
        record.json     how many rounds the node has contributed to
        model/          the newest released model

    Args:
        path: The folder.
    """

    path: Path

    @property
    def store(self) -> Path:
        """The token store of the node's users."""
        return self.path / "store"

    @property
    def model(self) -> Path:
        """The newest released model, which `unheard keyboard` opens."""
        return self.path / "model"

    @property
    def is_opted_out(self) -> bool:
        """Whether the users of this node take part in no round."""
        return (self.path / "opted-out").exists()

    def opt_out(self) -> None:
        """Take part in no round from now on. What was contributed before stays in the models."""
        storage.replace_file(self.path / "opted-out", b"")

    def opt_in(self) -> None:
        """Take part again."""
        (self.path / "opted-out").unlink(missing_ok=True)

    @property
    def contributions(self) -> int:
        """How many rounds this node has contributed to, over all runs.

        Raises:
            NodeError: The record is damaged.
        """
        file = self.path / "record.json"
        if not file.exists():
            return 0
        try:
            count = json.loads(file.read_text(encoding="utf-8"))["contributions"]
        except (ValueError, KeyError, TypeError, OSError):
            count = None
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            raise NodeError(f"{file} is damaged: this node no longer knows what it contributed. Put a copy back.")
        return count

    def record_contribution(self, limit: int | None) -> None:
        """Count one more contribution, on disk, before it is computed.

        Raises:
            NodeError: The node has contributed `limit` times.
        """
        count = self.contributions
        # DP: a node's own limit: no server can ask it more often than its user agreed to.
        if limit is not None and count >= limit:
            raise NodeError(f"This node has contributed {count} times, which is its limit.")
        storage.replace_file(self.path / "record.json", json.dumps({"contributions": count + 1}).encode())


@dataclass(frozen=True, kw_only=True)
class NodeData:
    """Where a node has its users' text.

    Args:
        store: The folder of a token store; the users of its training split are the node's.
        part: For a simulation, in which many nodes read one store: the number of this node, from 0.
        parts: How many nodes divide the store.
        order: The server numbers the users node by node, in ascending `order`, and by the ids of nodes with the same
            one. None for `part`.
        folder: The node's folder, for a node on a device; None in a simulation.
        max_contributions: How many rounds the node contributes to at most; None for no limit.
        trust: What the server is trusted with: "central" (each update), "secure" (sums) or "distributed" (sums with the
            nodes' noise). The node refuses requests of a mode that needs more trust.
        any_model: Whether the server may name a model that imports code or reads files.
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
        """Return the numbers of the users of the store that belong to this node.

        Args:
            num_users: The number of training users of the store.
        """
        # DP: every user is on one node, once.
        return range(self.part * num_users // self.parts, (self.part + 1) * num_users // self.parts)


class Node:
    """Answers the requests of a server.

    Args:
        data: The node's users.
        memory: JSON data that is kept between requests; changed in place.
    """

    def __init__(self, data: NodeData, memory: dict[str, Any]) -> None:
        self.data, self.memory = data, memory

    def answer(self, request: Packet) -> Packet:
        """The answer to one request. Never raises: an error is an answer of kind `refused`.

        Of an unexpected error only its type is sent: its message may contain a user's data.
        """
        try:
            session = request.fields.get("session")
            fields, arrays = self._act(request)
            return Packet(request.kind, {"session": session, **fields}, arrays)
        except UnheardError as error:
            return refused(request, str(error))
        except Exception as error:
            # DP: the message of an unexpected error may quote a user's data, so it stays here.
            return refused(request, f"{type(error).__name__} on the node, which is a bug.")

    def _act(self, request: Packet) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Do what a request asks and return the fields and arrays of the answer."""
        folder = self.data.folder
        match request.kind:
            case "describe":
                return self._describe(request.fields), {}
            case "model" if folder is not None:
                keep_model(folder, request, self.data.any_model)
                return {}, {}
        # DP: a user who opted out takes part in nothing from here on, also in a session that is open.
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
        """How many users take part, if the server's vocabulary and tokens are this node's."""
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
        """The integers, weights and balances of the drawn users, int64 [U, P], [U] and [U]."""
        fields, params = request.fields, request.arrays.get("params")
        model, engine = self._engine(fields)
        plan = plan_from_table(fields["plan"], model.layout)
        mode = "central" if request.kind == "update" else "secure"
        if request.kind == "masked" and isinstance(plan.noise, DistributedGaussianNoise):
            mode = "distributed"
        # DP: the owner decides what the server is trusted with, and a plan with the nodes' noise needs it in every mode.
        if TRUST.index(mode) < TRUST.index(self.data.trust) or (
            mode != "distributed" and isinstance(plan.noise, DistributedGaussianNoise)
        ):
            raise NodeError(f"This node does not take part in {mode} mode with this noise.")
        # DP: a device never adds to a model without noise, whatever the server was started with.
        if self.data.folder is not None and isinstance(plan.noise, NoNoise):
            raise NodeError("The plan of the server adds no noise, and this node takes part in private runs only.")
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
        """One stage of secure aggregation."""
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
        """The sum over the drawn users of this node, with its share of the noise if the plan asks for it.

        A node of which no user was drawn adds zero (and noise), so that the others do not know who was drawn.
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
        """Draw this node's share of the noise."""
        assert isinstance(plan.noise, DistributedGaussianNoise)
        each = plan.contribution
        # DP: the node's own secure generator: a server that knew the noise could take it off. Weights and counts have
        # no noise, so they are not sent at all.
        return plan.noise.share(secure_generator(), plan.layout.total, each.l2_bound, each.grid)

    def _engine(self, fields: Mapping[str, Any]) -> tuple[LanguageModel, Engine]:
        """The model and the engine that the server names."""
        kind = fields["model"].get("kind")
        # DP: a server cannot make a node run code or read files that it did not agree to.
        if kind not in OWN_MODELS and not self.data.any_model:
            raise NodeError(
                f"This node does not train models of kind '{kind}'. Its owner can allow it: any-model = true."
            )
        return _built(json.dumps(fields["model"], sort_keys=True), json.dumps(fields["engine"], sort_keys=True))

    def _users(self, local: Sequence[int], numbers: Sequence[int], with_features: bool) -> list[User]:
        """The drawn users, under the numbers that they have on the server."""
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
    """Keep the newest released model of a run for the keyboard on this node.

    The files are those of a run folder without checkpoints. The folder is replaced as a whole: after a crash it holds one
    model, or none until the server sends the next one.

    Args:
        folder: The node's folder.
        request: The files.
        any_model: Whether the model may be of a kind that imports code or reads files.

    Raises:
        NodeError: A file is missing, or the model is of a kind that the owner did not allow.
    """
    files: dict[str, bytes] = {}
    for name in MODEL_FILES:
        content = request.arrays.get(name)
        if not isinstance(content, np.ndarray) or content.dtype != np.uint8 or content.ndim != 1:
            raise NodeError(f"A released model is these files: {', '.join(MODEL_FILES)}.")
        files[name] = content.tobytes()
    try:
        kind = tomllib.loads(files["run.toml"].decode())["model"]["kind"]
    except (ValueError, KeyError, TypeError):
        raise NodeError("The run file of the released model cannot be read.") from None
    # DP: the keyboard opens what is kept here: a server cannot make it run code or read files.
    if kind not in OWN_MODELS and not any_model:
        raise NodeError(f"This node keeps no models of kind '{kind}'. Its owner can allow it: any-model = true.")
    before = folder.path / ".model.before"
    shutil.rmtree(before, ignore_errors=True)
    with storage.staged_folder(folder.model) as staged:
        for name, content in files.items():
            storage.replace_file(staged / name, content)
        if folder.model.exists():
            storage.move_into_place(folder.model, before)
    shutil.rmtree(before, ignore_errors=True)


@lru_cache(maxsize=64)
def _opened(path: Path) -> TokenStore:
    return TokenStore.open(path)


@lru_cache(maxsize=4)
def _built(model: str, engine: str) -> tuple[LanguageModel, Engine]:
    """The model and its engine. Kept, since building takes longer than one user's update of a small model."""
    built = part_of_kind(MODELS, json.loads(model), "model")
    return built, part_from_table(EngineChoice, json.loads(engine), "engine").build(built)
