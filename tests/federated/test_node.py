"""A node: requests that it refuses, its folder, opting out, and the newest model for its keyboard."""

import json
import threading
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("flwr")

import unheard
from tests.conftest import counting_user
from tests.federated.network import LocalNetwork, divided, federated
from tests.federated.test_server import CENTRAL, SECURE, one_round, seeded, sum_of
from unheard.corpus.store import write_digests, write_store
from unheard.engines.engine import Drawn
from unheard.errors import InvalidValue, NodeError
from unheard.federated.messages import Packet
from unheard.federated.node import Node, NodeData, NodeFolder
from unheard.federated.server import FederatedEngine
from unheard.updates.user_update import StoredUsers


@pytest.fixture
def devices(store, tmp_path):
    """Return three devices, each with a store of one user."""
    data = []
    for i in range(3):
        folder = NodeFolder(path=tmp_path / f"node-{i}")
        folder.path.mkdir()
        write_store(
            folder.store,
            train=[counting_user(np.random.default_rng(i), 40)],
            held_out=[],
            vocabulary=store.vocabulary,
            info={"tokens": {"kind": "words"}},
        )
        data.append(NodeData(store=folder.store, folder=folder, order=i))
    return data


def test_devices_with_a_store_of_their_own_train_a_model_and_record_it(run, devices, tmp_path):
    everybody = replace(run.plan, sampling=unheard.PoissonSampling(sampling_prob=1.0))
    federated(seeded(replace(run, plan=everybody)), tmp_path / "out", LocalNetwork(devices))
    assert [one.folder.contributions for one in devices] == [2, 2, 2]


def test_two_requests_at_once_count_twice(tmp_path, monkeypatch):
    """The second request reads the number while the first one is about to write it."""
    folder, read, done = NodeFolder(path=tmp_path), NodeFolder.contributions.fget, []

    def other() -> None:
        try:
            NodeFolder(path=tmp_path).record_contribution(1)
        except NodeError as error:
            done.append(error)

    thread = threading.Thread(target=other)

    def slow(self: NodeFolder) -> int:
        count = read(self)
        if threading.current_thread() is not thread:
            thread.start()
            thread.join(timeout=0.3)
        return count

    monkeypatch.setattr(NodeFolder, "contributions", property(slow))
    folder.record_contribution(1)
    thread.join()
    assert len(done) == 1
    assert "which is its limit" in str(done[0])


def test_a_link_that_leads_nowhere_is_no_fresh_start_of_a_node(tmp_path):
    folder = NodeFolder(path=tmp_path)
    for name in ("record.json", "opted-out"):
        (tmp_path / name).symlink_to("nowhere")
    assert folder.is_opted_out
    with pytest.raises(NodeError, match="damaged"):
        _ = folder.contributions
    (tmp_path / "record.json").unlink()
    (tmp_path / "record.json").write_text("[" * 100_000)
    with pytest.raises(NodeError, match="damaged"):
        _ = folder.contributions


def test_a_user_who_opted_out_takes_part_in_nothing(run, devices):
    devices[1].folder.opt_out()
    network = LocalNetwork(devices)
    engine = FederatedEngine(network, run.model, CENTRAL, unheard.TokenStore.open(run.corpus))
    assert engine.users.num_users == 2
    devices[2].folder.opt_out()  # after its user was registered
    for kind in ("update", "keys", "share", "masked", "reveal"):
        answer = Node(devices[2], {}).answer(Packet(kind, {"session": "s" * 32}))
        assert (answer.kind, "opted out" in answer.fields["reason"]) == ("refused", True)
    devices[2].folder.opt_in()
    assert Node(devices[2], {}).answer(Packet("keys", {"session": "s" * 32})).kind == "keys"


def test_a_node_that_leaves_contributes_nothing_and_the_rest_continues(run, devices):
    network = LocalNetwork(devices)
    engine = FederatedEngine(network, run.model, CENTRAL, unheard.TokenStore.open(run.corpus))
    network.tamper = lambda node, request, answer: None if node == 1002 else answer
    users = StoredUsers(engine.users, np.arange(3), with_features=False)
    plan = run.plan.at(0, run.model.layout)
    assert engine.sum_updates(run.model.initial(0), users, plan, Drawn(1)).weight == 2.0


def test_a_node_contributes_no_more_often_than_its_user_agreed_to(run, devices):
    folder = devices[0].folder
    folder.record_contribution(2)
    folder.record_contribution(2)
    with pytest.raises(NodeError, match="its limit"):
        folder.record_contribution(2)
    assert folder.contributions == 2
    (folder.path / "record.json").write_text('{"contributions": 0}')
    assert folder.contributions == 0
    for damaged in ("{}", "[", '{"contributions": -1}', '{"contributions": true}', '{"contributions": 0.5}'):
        (folder.path / "record.json").write_text(damaged)
        with pytest.raises(NodeError, match="damaged"):
            folder.record_contribution(5)


def test_a_node_whose_record_is_deleted_does_not_begin_to_count_again(tmp_path):
    folder, record = NodeFolder(path=tmp_path), tmp_path / "record.json"
    assert folder.contributions == 0
    record.write_text('{"contributions": 1}')  # as an earlier version left it, without the second file
    folder.record_contribution(2)
    record.unlink()
    for count in (lambda: folder.record_contribution(2), lambda: folder.contributions):
        with pytest.raises(NodeError, match=r"record\.json is missing.*backup"):
            count()
    record.write_text('{"contributions": 1}')
    folder.record_contribution(2)
    assert folder.contributions == 2


def asked(run, tmp_path, store_path) -> Packet:
    """Return a request for updates, as a server sends it."""
    network = LocalNetwork(divided(store_path, 2))
    one_round(run, network, CENTRAL)
    return next(request for _, request in network.requests if request.kind == "update")


def test_a_node_refuses_what_it_did_not_agree_to(run, devices, tmp_path):
    request = asked(run, tmp_path, run.corpus)
    fine = {**request.fields, "users": [0], "numbers": [0]}

    def answer(data=devices[0], **changes) -> Packet:
        return Node(data, {}).answer(Packet("update", {**fine, **changes}, request.arrays))

    assert answer().kind == "update"
    assert "once" not in answer(users=[0, 0], numbers=[0, 1]).fields.get("reason", "")
    assert "one twice" in answer(users=[0, 0], numbers=[0, 1]).fields["reason"]
    for users, numbers in (([1], [0]), ([-1], [0]), ([0], []), ([0], [0, 1])):
        assert "one twice" in answer(users=users, numbers=numbers).fields["reason"]
    without = {**request.fields["plan"], "parts": {**request.fields["plan"]["parts"], "noise": {"kind": "none"}}}
    assert "adds no noise" in answer(plan=without).fields["reason"]
    assert answer(NodeData(store=devices[0].store), plan=without).kind == "update"
    code = {"kind": "module", "module": "antigravity:fly", "weights_are_public": True}
    assert "does not train models" in answer(model=code).fields["reason"]
    params = request.arrays["params"]
    for arrays in ({}, {"params": params[:-1]}, {"params": np.append(params, params[:1])}, {"params": params[None]}):
        assert "do not fit" in Node(devices[0], {}).answer(Packet("update", fine, arrays)).fields["reason"]
    assert "does not know" in Node(devices[0], {}).answer(Packet("dance", {})).fields["reason"]


@pytest.mark.parametrize("kind", [ValueError, IndexError, KeyError, TypeError, RuntimeError, OSError, AssertionError])
def test_of_an_unexpected_error_only_its_type_is_sent(run, devices, monkeypatch, kind):
    def fail(*_):
        raise kind("my secret text")

    monkeypatch.setattr(Node, "_act", fail)
    answer = Node(devices[0], {}).answer(Packet("update", {"session": "s"}))
    assert answer.kind == "refused"
    assert "secret" not in json.dumps(dict(answer.fields))
    assert kind.__name__ in answer.fields["reason"]
    assert ("a bug" in answer.fields["reason"]) is (
        kind is not OSError
    )  # a missing file is not an error of the program


def test_a_node_with_another_vocabulary_is_not_registered(run, devices, tmp_path):
    from unheard.corpus.vocabulary import Vocabulary

    other = write_store(
        tmp_path / "other", train=[np.array([0, 3, 1])], held_out=[], vocabulary=Vocabulary.of(["a"]), info={}
    )
    network = LocalNetwork([NodeData(store=other.path)])
    with pytest.raises(NodeError, match="another vocabulary"):
        FederatedEngine(network, run.model, CENTRAL, unheard.TokenStore.open(run.corpus))


def test_every_user_is_on_one_node_once():
    for users, parts in ((60, 7), (3, 10), (10, 1)):
        nodes = [NodeData(store="x", part=i, parts=parts) for i in range(parts)]  # pyright: ignore[reportArgumentType]
        assert [n for node in nodes for n in node.numbers(users)] == list(range(users))
    with pytest.raises(InvalidValue, match="from 0 to parts"):
        NodeData(store="x", part=1)  # pyright: ignore[reportArgumentType]


def test_the_newest_model_is_on_the_node_for_its_keyboard(run, devices, tmp_path, statements):
    pytest.importorskip("flwr")
    from unheard.deployment.model import open_model
    from unheard.federated.flower import send_model

    network = LocalNetwork(devices)
    federated(seeded(run), tmp_path / "out", network)
    assert send_model(network, tmp_path / "out", 5.0) == 3
    model = open_model(devices[0].folder.model)
    assert model.statement["claim"] == json.loads((tmp_path / "out" / "statement.json").read_text())["claim"]
    assert not (devices[0].folder.model / "checkpoints").exists()
    # A newer model replaces it, unless it is not a model of an allowed kind.
    sent = next(request for _, request in reversed(network.requests) if request.kind == "model")
    devices[0].folder.opt_out()
    counted = devices[0].folder.contributions
    folder, words = devices[0].folder.model, np.frombuffer(b"newer", np.uint8)
    newer = {**sent.arrays, "vocabulary.txt": words}
    assert Node(devices[0], {}).answer(Packet("model", {}, newer)).kind == "model"
    assert (folder / "vocabulary.txt").read_bytes() == b"newer"
    assert (devices[0].folder.is_opted_out, devices[0].folder.contributions) == (True, counted)
    assert [path.name for path in folder.parent.iterdir() if "model" in path.name] == ["model"]
    code = np.frombuffer(b'[model]\nkind = "module"\nmodule = "antigravity:fly"', np.uint8)
    for files in ({"run.toml": words}, {**newer, "run.toml": code}, {**newer, "run.toml": words}):
        assert Node(devices[0], {}).answer(Packet("model", {}, files)).kind == "refused"
    for name, content in newer.items():  # each file is a row of bytes, and none is missing
        others = {key: value for key, value in newer.items() if key != name}
        for strange in ({}, {name: content[None]}, {name: content.astype(np.int64)}):
            answer = Node(devices[0], {}).answer(Packet("model", {}, {**others, **strange}))
            assert "consists of these files" in answer.fields["reason"]
    assert (
        Node(replace(devices[0], any_model=True), {}).answer(Packet("model", {}, {**newer, "run.toml": code})).kind
        == "model"
    )


WORK = {"session", "plan", "seed", "model", "engine", "users", "numbers"}
REQUESTS = {
    "describe": ({"vocabulary", "tokens", "features"}, set()),
    "update": (WORK, {"params"}),
    "keys": ({"session"}, set()),
    "share": ({"session", "own", "peers", "threshold"}, set()),
    "masked": ({*WORK, "received", "bits"}, {"params"}),
    "reveal": ({"session", "survivors", "dropped"}, set()),
}
ANSWERS = {
    "describe": ({"session", "users", "order"}, set()),
    "update": ({"session"}, {"units", "weights", "balances"}),
    "keys": ({"session", "encryption", "pairwise"}, set()),
    "share": ({"session", "commitment", "shares"}, set()),
    "masked": ({"session"}, {"masked", "extra"}),
    "reveal": ({"session", "self", "pairwise"}, set()),
}
"""The names of the fields and of the arrays of each kind of packet: what the server and a node learn from each other."""


@pytest.mark.parametrize("choice", [CENTRAL, replace(SECURE, parties=3)], ids=["central", "secure"])
def test_packets_hold_what_their_kind_needs_and_nothing_else(run, devices, choice):
    everybody = replace(run.plan, sampling=unheard.PoissonSampling(sampling_prob=1.0))
    network = LocalNetwork(devices)
    one_round(replace(run, plan=everybody), network, choice)
    for packets, expected in ((network.requests, REQUESTS), (network.answers, ANSWERS)):
        kinds = [packet.kind for _, packet in packets]
        assert set(kinds) == ({"describe", "update"} if choice is CENTRAL else {*expected} - {"update"})
        assert {kinds.count(kind) for kind in kinds} == {3}  # each node once, and registered nodes are not asked again
        for _, packet in packets:
            assert (set(packet.fields), set(packet.arrays)) == expected[packet.kind]
    for node, packet in network.requests:  # a node learns which of its own users were drawn
        if "users" in packet.fields:
            assert (packet.fields["users"], packet.fields["numbers"]) == ([0], [node - 1000])


def test_a_contribution_is_counted_before_text_is_read_and_nothing_is_read_beyond_the_limit(
    run, devices, tmp_path, monkeypatch
):
    request = asked(run, tmp_path, run.corpus)
    packet = Packet("update", {**request.fields, "users": [0], "numbers": [0]}, request.arrays)
    device, counts = replace(devices[0], max_contributions=2), []

    def read(*_):
        counts.append(device.folder.contributions)
        raise OSError("the device was switched off")

    monkeypatch.setattr("unheard.federated.node.read_users", read)
    assert [Node(device, {}).answer(packet).kind for _ in range(4)] == ["refused"] * 4
    assert counts == [1, 2]
    assert device.folder.contributions == 2


def test_a_packet_shows_nothing_when_it_is_printed():
    assert repr(Packet("update", {"users": [1]}, {"units": np.ones(3)})) == "Packet(kind='update')"


def test_opted_out_users_are_summed_by_nobody_in_secure_aggregation(run, tmp_path):
    nodes = divided(run.corpus, 6)
    folder = NodeFolder(path=tmp_path)
    nodes[2] = replace(nodes[2], folder=folder)
    network = LocalNetwork(nodes)

    def tamper(node, request, answer):
        if node == 1005 and request.kind == "describe":
            folder.opt_out()  # when every user is registered
        return answer

    network.tamper = tamper
    _, total, numbers = one_round(run, network, replace(SECURE, parties=6))
    kept = [n for n in numbers if n // 10 != 2]
    np.testing.assert_array_equal(total.units_P, sum_of(run, kept).units_P)


def test_a_node_prepares_its_store_from_a_local_file_with_the_servers_vocabulary(run, tmp_path):
    """The text is prepared on the device, which needs only vocabulary.txt of the server or of a run folder."""
    server = unheard.TokenStore.open(run.corpus)
    (tmp_path / "messages.jsonl").write_text('{"user": "me", "text": "w1 w2 w3"}\n{"user": "me", "text": "w4"}\n')
    out, words = tmp_path / "node" / "store", server.path / "vocabulary.txt"
    store = unheard.prepare(tmp_path / "messages.jsonl", out, vocabulary=str(words), held_out=0.0)
    assert store.train.num_users == 1
    assert store.vocabulary.digest == server.vocabulary.digest
    facts = {"vocabulary": server.vocabulary.digest, "tokens": store.info["tokens"], "features": 0}
    answer = Node(NodeData(store=out), {}).answer(Packet("describe", facts))
    assert (answer.kind, answer.fields["users"]) == ("describe", 1)


def test_a_node_refuses_modes_in_which_it_would_trust_the_server_with_more(run, devices, tmp_path):
    request = asked(run, tmp_path, run.corpus)
    fields = {**request.fields, "users": [0], "numbers": [0], "received": {}, "bits": 32}
    noise = {"kind": "distributed_gaussian", "noise_multiplier": 1.0, "min_parties": 4}
    own = {**fields["plan"], "parts": {**fields["plan"]["parts"], "noise": noise}}

    def reason(trust: str, kind: str, plan=fields["plan"]) -> str:
        data = replace(devices[0], trust=trust)
        packet = Packet(kind, {**fields, "plan": plan}, request.arrays)
        return str(Node(data, {}).answer(packet).fields.get("reason"))

    refusal = "does not take part"
    assert refusal not in reason("central", "update")
    assert refusal in reason("central", "update", own)  # the plan says that its noise comes from the nodes
    assert refusal in reason("secure", "update")
    assert refusal not in reason("secure", "masked")  # refused later: there is no session
    assert refusal in reason("distributed", "masked")
    assert refusal not in reason("distributed", "masked", own)
    with pytest.raises(InvalidValue, match="trust"):
        replace(devices[0], trust="nobody")


def test_a_node_whose_users_have_other_features_than_the_model_takes_is_not_registered(run, devices, tmp_path):
    store = unheard.TokenStore.open(devices[0].store)
    own = {"vocabulary": store.vocabulary.digest, "tokens": store.info.get("tokens", {})}
    assert Node(devices[0], {}).answer(Packet("describe", {**own, "features": 0})).kind == "describe"
    answer = Node(devices[0], {}).answer(Packet("describe", {**own, "features": 3}))
    assert "takes 3 features of each user, the node has 0" in answer.fields["reason"]


def test_a_node_whose_users_overlap_is_not_registered(devices):
    """The text of these users would count twice."""
    store = unheard.TokenStore.open(devices[0].store)
    np.array([0, 20, 10, 40], dtype="<i8").tofile(store.path / "train" / "00000.offsets")
    write_digests(store.path)
    own = {"vocabulary": store.vocabulary.digest, "tokens": store.info.get("tokens", {})}
    answer = Node(devices[0], {}).answer(Packet("describe", {**own, "features": 0}))
    assert (answer.kind, "users would overlap" in answer.fields["reason"]) == ("refused", True)
