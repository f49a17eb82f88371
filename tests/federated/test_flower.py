"""Flower's simulation gives the model of `unheard train`, opens no port, and ignores replies that are forged or malformed."""

import contextlib
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

import unheard
from tests.federated.network import plain
from unheard.engines.choice import EngineChoice
from unheard.errors import InvalidValue, NodeError, RunFolderMissing
from unheard.federated import flower
from unheard.federated.flower import GridNetwork, from_records, simulated_nodes, ticket_of, to_records
from unheard.federated.messages import Packet
from unheard.federated.node import NodeFolder
from unheard.federated.server import FederatedEngine
from unheard.run_folder import RunFolder
from unheard.training.checkpoint import newest_checkpoint
from unheard.training.loop import train

pytestmark = pytest.mark.filterwarnings("ignore")


def test_a_packet_is_the_same_after_flowers_records():
    packet = Packet("update", {"a": [1, 2]}, {"units": np.arange(6).reshape(2, 3), "masked": np.arange(3, dtype="<u4")})
    back = from_records(to_records(packet))
    assert (back.kind, back.fields) == (packet.kind, packet.fields)
    for name, array in packet.arrays.items():
        np.testing.assert_array_equal(back.arrays[name], array)
        assert back.arrays[name].dtype == array.dtype


def npy(shape: str, data: bytes = b"12345678") -> bytes:
    """Return the bytes of an .npy file whose header declares the given shape."""
    head = f"{{'descr': '<i8', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head.encode() + data


HOSTILE = {
    "gigantic by its header": npy("(1125899906842624,)"),
    "overflows": npy("(4294967296, 4294967296, 4294967296)"),
    "negative": npy("(-1,)"),
    "shorter than its header": npy("(2,)"),
    "longer than its header": npy("(1,)", bytes(16)),
    "objects": b"\x93NUMPY\x01\x00"
    + (64).to_bytes(2, "little")
    + b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }".ljust(63)
    + b"\n12345678",
    "a header that is no Python": npy("(1,").replace(b"}", b"("),
    "a header of many brackets": npy("(" * 60),
    "no array": b"abc",
    "nothing": b"",
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_an_array_that_lies_about_itself_is_no_answer(data):
    """The run continues, and no memory is allocated for numbers that were not sent."""

    def read(file: bytes) -> Packet:
        head, array = ConfigRecord({"kind": "update", "fields": "{}"}), Array("int64", (1,), "numpy.ndarray", file)
        return from_records(RecordDict({"unheard": head, "arrays": ArrayRecord({"units": array})}))

    assert read(npy("(1,)")).arrays["units"].shape == (1,)
    with pytest.raises(NodeError, match="cannot be read"):
        read(data)


class Replies:
    """A replacement of Flower's grid, in which a function returns the replies to each message."""

    def __init__(self, replies) -> None:
        self.replies, self.messages = replies, {}

    def push_messages(self, messages):
        for message in messages:
            self.messages[f"message {message.metadata.dst_node_id}"] = message
        return [*self.messages, None]

    def pull_messages(self, numbers):
        return [reply for number in numbers for reply in self.replies(self.messages.pop(number))]


@pytest.fixture
def identity(monkeypatch):
    """Set what Flower sets in the process of an app, and its messages need."""
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


def answered(message: Message, node: int, ticket: str | None = None, sender: int | None = None) -> Message:
    """Return the reply of a node, which contains the node's id."""
    ticket = ticket_of(message.content) if ticket is None else ticket
    reply = Message(to_records(Packet("keys", {"node": node}), ticket), reply_to=message)
    reply.metadata.__dict__["_src_node_id"] = message.metadata.dst_node_id if sender is None else sender
    return reply


def exchanged(replies) -> dict[int, int]:
    """Return for each of three nodes the node whose answer was accepted."""
    requests = {node: Packet("keys", {"session": "s"}) for node in (1, 2, 3)}
    answers = GridNetwork(Replies(replies)).exchange(requests, 0.0)  # pyright: ignore[reportArgumentType]
    return {node: answer.fields["node"] for node, answer in answers.items()}


def test_a_node_answers_for_itself_alone(identity):
    """Node 3 is hostile: it names other senders, guesses tickets, and replies several times."""

    def replies(message):
        node = message.metadata.dst_node_id
        if node != 3:
            return [answered(message, node)]
        return [
            answered(message, 3, ticket="0" * 32, sender=1),
            answered(message, 3, ticket="", sender=2),
            answered(message, 3, sender=1),
            answered(message, 33),
        ]

    assert exchanged(replies) == {1: 1, 2: 2, 3: 3}


def test_a_ticket_says_nothing_of_its_node_and_is_never_used_again(identity):
    """A hostile node that knows the node ids, or tickets of earlier requests, cannot answer for another node."""
    sent = []

    def replies(message):
        sent.append(ticket_of(message.content))
        return [answered(message, 1, ticket=f"{message.metadata.dst_node_id:0{digits}x}") for digits in (1, 16, 32)]

    assert exchanged(replies) == exchanged(replies) == {}
    assert len({*sent}) == len(sent) == 6
    assert all(len(ticket) == 32 for ticket in sent)


def test_a_reply_that_flower_cannot_read_takes_no_other_with_it(identity):
    def replies(message):
        if message.metadata.dst_node_id == 2:
            raise ValueError("no such object")
        return [answered(message, message.metadata.dst_node_id)]

    assert exchanged(replies) == {1: 1, 3: 3}

    def unreachable(message):
        raise ConnectionError("refused")

    with pytest.raises(NodeError, match="SuperLink cannot be reached: refused"):
        exchanged(unreachable)


def test_a_message_without_the_records_of_unheard_is_ignored():
    for records in (
        {},
        {"unheard": ConfigRecord({"kind": "update"})},
        {"unheard": ConfigRecord({"fields": "[" * 10**6})},
    ):
        with pytest.raises(NodeError, match="same version"):
            from_records(RecordDict(records))


def descendants(pid: int) -> list[int]:
    """Return the ids of a process and of all its descendants, from /proc."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue  # it has ended
        if fields[0] in "ZX":
            continue  # a zombie: it has ended, and its parent has not waited for it
        children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    every = [pid]
    for one in every:
        every += children.get(one, [])
    return every


def listening(pids: list[int]) -> set[str]:
    """Return the addresses on which these processes accept connections, in hexadecimal as in /proc/net."""
    sockets = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended, or closes a file meanwhile
            for name in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    sockets.add(os.readlink(f"/proc/{pid}/fd/{name}"))
    addresses = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in sockets:
                addresses.add(words[1].split(":")[0])
    return addresses


LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}


@pytest.mark.system
def test_the_simulation_gives_the_model_of_plain_training_and_stays_on_this_machine(run, tmp_path):
    run = replace(run, training=replace(run.training, rounds=2, reproducible_seed=3))
    expected = plain(run, tmp_path / "plain")
    before = set(descendants(os.getpid()))
    import ray  # noqa: F401  # as another part of a program may have done before

    with simulated_nodes(run.corpus, 4, processes=1) as network:
        for name in ("central", "secure"):
            choice = EngineChoice(kind="reference", secure_aggregation=name == "secure", parties=3)
            engine = FederatedEngine(network, run.model, choice, unheard.TokenStore.open(run.corpus))
            for _ in train(run, tmp_path / name, engine=choice, on=engine):
                pass
            model = newest_checkpoint(RunFolder.open(tmp_path / name)).state.params_P.numpy()
            np.testing.assert_array_equal(model, expected)
        addresses = listening([os.getpid(), *(set(descendants(os.getpid())) - before)])
        assert addresses
        assert addresses <= LOOPBACK, addresses
        # Ray's dashboard process would query the metadata services of cloud providers.
        from ray._private import worker

        assert worker._global_node is not None
        assert "dashboard" not in worker._global_node.all_processes
        (folder,) = [path for path in Path("/tmp").glob("unheard-ray-*") if _is_ours(path)]
        assert folder.stat().st_mode & 0o777 == 0o700
    assert not folder.exists()
    until = time.monotonic() + 60
    while left := _of_ray(set(descendants(os.getpid())) - before):
        assert time.monotonic() < until, left
        time.sleep(0.1)


def _of_ray(pids: set[int]) -> dict[int, str]:
    """Return the command lines of those processes that belong to Ray or to Flower.

    Python may start helper processes meanwhile, such as the tracker of shared memory, which live as long as this process."""
    commands = {}
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            commands[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return {pid: command for pid, command in commands.items() if "ray" in command or "flwr" in command}


def _is_ours(folder: Path) -> bool:
    return any(str(os.getpid()) == path.name.rsplit("_", 1)[1] for path in folder.glob("ray/session_2*"))


@pytest.mark.parametrize("addresses", [("10.0.0.7",), ("127.0.0.1", "10.0.0.7"), ()])
def test_nothing_is_trained_if_ray_listens_anywhere_but_on_the_loopback_interface(monkeypatch, addresses):
    ended = []
    ray = SimpleNamespace(
        is_initialized=lambda: False,
        init=lambda **_: None,
        nodes=lambda: [{"NodeManagerAddress": address} for address in addresses],
        shutdown=lambda: ended.append(True),
    )
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(flower, "_ray_services", contextlib.nullcontext)
    with pytest.raises(NodeError, match=r"instead of 127\.0\.0\.1"), flower._ray_on_loopback(1):
        pass
    assert ended


def test_a_devices_own_limits_are_those_of_its_configuration():
    given = {"folder": "/x", "max-rounds": 3, "trust": "distributed", "partition-id": 7}
    data = flower._data_on_device(SimpleNamespace(node_config=given))  # pyright: ignore[reportArgumentType]
    assert (data.max_contributions, data.trust, data.any_model, data.order) == (3, "distributed", False, 7)
    assert (data.store, data.folder) == (Path("/x/store"), NodeFolder(path=Path("/x")))
    with pytest.raises(NodeError, match="--node-config 'folder"):
        flower._data_on_device(SimpleNamespace(node_config={}))  # pyright: ignore[reportArgumentType]
    usual = flower._data_on_device(SimpleNamespace(node_config={"folder": "/x"}))  # pyright: ignore[reportArgumentType]
    assert (usual.max_contributions, usual.trust, usual.any_model) == (None, "central", False)


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_a_limit_of_any_number_of_rounds_is_a_limit_and_0_is_the_strictest(tmp_path, limit):
    given = {"folder": str(tmp_path), "max-rounds": limit}
    data = flower._data_on_device(SimpleNamespace(node_config=given))  # pyright: ignore[reportArgumentType]
    assert data.folder is not None
    for _ in range(limit):
        data.folder.record_contribution(data.max_contributions)
    with pytest.raises(NodeError, match=f"has contributed {limit} times, which is its limit"):
        data.folder.record_contribution(data.max_contributions)


@pytest.mark.parametrize("said", ["false", "no", "", 0, 1, "true", None])
def test_only_the_word_true_lets_a_server_name_any_model(said):
    """A quoted "false" is a text, and no text is an agreement."""
    for value, allowed in ((said, False), (True, True), (False, False)):
        given = {"folder": "/x", "any-model": value}
        data = flower._data_on_device(SimpleNamespace(node_config=given))  # pyright: ignore[reportArgumentType]
        assert data.any_model is allowed


def test_the_server_waits_for_enough_nodes_and_sends_no_model_that_is_not_released(run, tmp_path):
    network = SimpleNamespace(nodes=lambda: [1, 2])
    flower.wait_for_nodes(network, 2, 0.0)  # pyright: ignore[reportArgumentType]
    with pytest.raises(NodeError, match="2 nodes are connected after 0 s; 3 are needed"):
        flower.wait_for_nodes(network, 3, 0.0)  # pyright: ignore[reportArgumentType]
    unheard.train(run, tmp_path / "r").close()
    (tmp_path / "r" / "model.safetensors").unlink(missing_ok=True)
    with pytest.raises(RunFolderMissing, match="no model yet"):
        flower.send_model(network, tmp_path / "r", 1.0)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("config", [{"out": "runs/x"}, {"run-file": "run.toml"}])
def test_a_deployed_server_needs_its_run_file_and_its_folder(config):
    with pytest.raises(InvalidValue, match="--run-config"):
        flower._main(None, SimpleNamespace(run_config=config))  # pyright: ignore[reportArgumentType]
