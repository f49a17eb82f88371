"""The server is killed with SIGKILL in each stage and restarted: no charge is missing, and no mask is used twice."""

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("flwr")

import unheard
import unheard.mechanism.noise
from tests.federated.network import LocalNetwork, divided
from tests.federated.test_server import CENTRAL, SECURE, seeded
from unheard.federated.messages import Packet
from unheard.federated.server import FederatedEngine
from unheard.privacy.ledger import Ledger
from unheard.training.loop import resume, train


class DurableNetwork(LocalNetwork):
    """Nodes that survive a kill of the server: their state and their messages are in files."""

    def __init__(self, corpus, folder: Path, kill_at: str | None = None) -> None:
        super().__init__(divided(corpus, 5), self._record)
        self.folder, self.kill_at, self.seen = folder, kill_at, 0
        for i in range(5):
            file = folder / f"{i}.json"
            self.memories[i] = json.loads(file.read_text()) if file.exists() else {}

    def _record(self, node: int, request: Packet, answer: Packet) -> Packet:
        (self.folder / f"{node - 1000}.json").write_text(json.dumps(self.memories[node - 1000]))
        if "masked" in answer.arrays:
            with open(self.folder / "masked.txt", "a") as file:
                file.write(f"{node} {request.fields['session']}\n")
        self.seen += request.kind == self.kill_at
        if self.seen == 7:  # in the middle of this stage of the second round
            os.kill(os.getpid(), signal.SIGKILL)
        return answer


def go(run: unheard.Run, out: Path, network: LocalNetwork, choice) -> None:
    engine = FederatedEngine(network, run.model, choice, unheard.TokenStore.open(run.corpus))
    for _ in resume(out, on=engine) if out.exists() else train(run, out, engine=choice, on=engine):
        pass


@pytest.mark.parametrize("stage", ["update", "keys", "share", "masked", "reveal"])
def test_a_server_that_is_killed_in_any_stage_is_started_again(run, tmp_path, stage):
    run = seeded(replace(run, plan=replace(run.plan, sampling=unheard.PoissonSampling(sampling_prob=0.3))), rounds=3)
    choice = CENTRAL if stage == "update" else replace(SECURE, parties=5)
    nodes, out = tmp_path / "nodes", tmp_path / "out"
    nodes.mkdir()
    child = os.fork()
    if not child:
        unheard.mechanism.noise._threads.cache_clear()  # its threads did not survive the fork
        try:
            go(run, out, DurableNetwork(run.corpus, nodes, kill_at=stage), choice)
        finally:
            os._exit(3)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert len(Ledger.read(out / "ledger.jsonl")) == 2  # the round that was killed is charged
    network = DurableNetwork(run.corpus, nodes)
    go(run, out, network, choice)
    # Checkpoints are saved every other round, so both rounds run again, and are charged again.
    assert len(Ledger.read(out / "ledger.jsonl")) == 5
    if stage != "update":
        sent = (nodes / "masked.txt").read_text().splitlines()
        assert len(set(sent)) == len(sent)
        old = next(session for line in sent for session in [line.split()[1]])
        answer = network.exchange(
            {1000: Packet("reveal", {"session": old, "survivors": [0, 1, 2, 3, 4], "dropped": []})}, 1
        )
        assert "next stage" in answer[1000].fields["reason"]
