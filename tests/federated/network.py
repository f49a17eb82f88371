"""A network of nodes in this process: messages are converted to JSON as with Flower, without Flower and Ray."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import unheard
from unheard.engines.choice import EngineChoice
from unheard.federated.messages import Packet
from unheard.federated.node import Node, NodeData
from unheard.federated.server import FederatedEngine
from unheard.run_folder import RunFolder
from unheard.training.checkpoint import newest_checkpoint
from unheard.training.loop import train

Tamper = Callable[[int, Packet, Packet], Packet | None]
"""A function of (node, request, answer) that returns the answer that arrives; None if it is lost."""


class LocalNetwork:
    """Nodes in a list. Tests can drop or change their answers."""

    def __init__(self, nodes: list[NodeData], tamper: Tamper | None = None) -> None:
        self.memories: list[dict[str, Any]] = [{} for _ in nodes]
        self.data, self.tamper = nodes, tamper
        self.requests: list[tuple[int, Packet]] = []
        self.answers: list[tuple[int, Packet]] = []

    def nodes(self) -> list[int]:
        return [1000 + i for i in range(len(self.data))]

    def exchange(self, requests: Mapping[int, Packet], timeout: float) -> dict[int, Packet]:
        answers = {}
        for node, request in requests.items():
            request = Packet.from_json(request.kind, request.to_json(), request.arrays)
            self.requests.append((node, request))
            i = node - 1000
            memory = self.memories[i] = json.loads(json.dumps(self.memories[i]))
            answer: Packet | None = Node(self.data[i], memory).answer(request)
            answer = Packet.from_json(answer.kind, answer.to_json(), answer.arrays)
            answer = answer if self.tamper is None else self.tamper(node, request, answer)
            if answer is not None:
                self.answers.append((node, answer))
                answers[node] = answer
        return answers


def divided(store: Path | str, parts: int) -> list[NodeData]:
    """Return the nodes of a simulation."""
    return [NodeData(store=Path(store), part=i, parts=parts, any_model=True) for i in range(parts)]


def federated(
    run: unheard.Run, out: Path, network: LocalNetwork, choice: EngineChoice = EngineChoice(kind="reference")
) -> np.ndarray:
    """Train on nodes; return the last model."""
    engine = FederatedEngine(network, run.model, choice, unheard.TokenStore.open(run.corpus))
    for _ in train(run, out, engine=choice, on=engine):
        pass
    return newest_checkpoint(RunFolder.open(out)).state.params_P.numpy()


def plain(run: unheard.Run, out: Path, choice: EngineChoice = EngineChoice(kind="reference")) -> np.ndarray:
    """Train on this process; return the last model."""
    for _ in train(run, out, engine=choice):
        pass
    return newest_checkpoint(RunFolder.open(out)).state.params_P.numpy()
