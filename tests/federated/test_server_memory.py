"""A search of the server's memory finds a planted update in central mode, and does not find it with secure aggregation.

The server runs in a child process and the nodes in the test's process, so the child has only what the nodes sent. The
planted user's text is drawn after the child was started.
"""

import multiprocessing
import os
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr")

import unheard
from tests.federated.network import LocalNetwork
from tests.federated.test_server import CENTRAL, SECURE
from unheard.corpus.store import write_store
from unheard.engines.engine import Drawn
from unheard.federated.messages import Packet
from unheard.federated.node import NodeData
from unheard.federated.server import FederatedEngine
from unheard.updates.user_update import StoredUsers

pytestmark = pytest.mark.system

NODES = 5


class PipeNetwork:
    """A network whose nodes are at the other end of a pipe. It keeps every answer, so that each stays in memory."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe
        self.received: list[dict] = []

    def nodes(self) -> list[int]:
        return [1000 + i for i in range(NODES)]

    def exchange(self, requests, timeout):
        self.pipe.send({node: (one.kind, one.to_json(), dict(one.arrays)) for node, one in requests.items()})
        self.received.append(self.pipe.recv())
        return {node: Packet.from_json(*one) for node, one in self.received[-1].items()}


def serve(pipe: Connection, run: unheard.Run, choice) -> None:
    """Run one round of the server, then wait, so that everything that it received stays in its memory."""
    pipe.recv()
    network = PipeNetwork(pipe)
    engine = FederatedEngine(network, run.model, choice, unheard.TokenStore.open(run.corpus))
    users = StoredUsers(engine.users, np.arange(engine.users.num_users), with_features=False)
    total = engine.sum_updates(run.model.initial(0), users, run.plan.at(0, run.model.layout), Drawn(1))
    pipe.send(total.units_P.numpy())
    pipe.recv()


def occurrences(pid: int, patterns: list[bytes]) -> np.ndarray:
    """Count how often each pattern occurs in the writable memory of a process."""
    counts = np.zeros(len(patterns), np.int64)
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            area, rights, *_ = line.split()
            begin, end = (int(number, 16) for number in area.split("-"))
            if not rights.startswith("rw"):
                continue
            try:
                memory.seek(begin)
                content = memory.read(end - begin)
            except (OSError, ValueError, OverflowError):
                continue  # an area of a device, or one that was unmapped
            counts += [content.count(pattern) for pattern in patterns]
    return counts


def plant(run: unheard.Run, folder: Path) -> list[NodeData]:
    """Return nodes with one user each, with newly drawn text."""
    rng = np.random.default_rng(int.from_bytes(os.urandom(8), "big"))
    server = unheard.TokenStore.open(run.corpus)
    nodes = []
    for i in range(NODES):
        text = np.concatenate([[0], rng.integers(3, 50, size=60), [1]])
        store = write_store(
            folder / str(i), train=[text], held_out=[], vocabulary=server.vocabulary, info={"tokens": {"kind": "words"}}
        )
        nodes.append(NodeData(store=store.path, order=i))
    return nodes


def patterns_of(units_P: np.ndarray) -> list[bytes]:
    """Return the bytes of eight numbers of an update, as 32-bit and as 64-bit numbers."""
    at = next(at for at in range(len(units_P) // 2, len(units_P) - 8) if np.count_nonzero(units_P[at : at + 8]) == 8)
    return [units_P[at : at + 8].astype(kind).tobytes() for kind in ("<i4", "<i8")]


@pytest.mark.parametrize("mode", ["central", "secure"])
def test_the_servers_memory_holds_no_plain_update_under_secure_aggregation(run, tmp_path, mode):
    choice = CENTRAL if mode == "central" else replace(SECURE, parties=NODES)
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    server = context.Process(target=serve, args=(there, run, choice), daemon=True)
    server.start()
    assert server.pid is not None
    network = LocalNetwork(plant(run, tmp_path))
    here.send("begin")
    seen, planted = 0, None
    try:
        while isinstance(message := here.recv(), dict):
            requests = {node: Packet.from_json(*one) for node, one in message.items()}
            answers = network.exchange(requests, 1.0)
            work = requests[1002]
            if work.kind == "reveal":  # the server has all masked vectors now
                assert planted is not None
                seen += occurrences(server.pid, planted).sum()
            if work.kind in ("update", "masked"):
                update = Packet("update", work.fields, work.arrays)
                (units_P,) = LocalNetwork(network.data).exchange({1002: update}, 1.0)[1002].arrays["units"]
                planted = patterns_of(units_P)
            here.send({node: (one.kind, one.to_json(), dict(one.arrays)) for node, one in answers.items()})
        assert planted is not None
        # The sum is in the server's memory, as 64-bit integers: the search itself works.
        *at_end, of_sum = occurrences(server.pid, [*planted, patterns_of(message)[1]])
        assert of_sum > 0
        assert (seen + sum(at_end) > 0) == (mode == "central")
    except PermissionError:
        pytest.skip("this machine does not let a process read the memory of its child")
    finally:
        server.kill()
        server.join()
