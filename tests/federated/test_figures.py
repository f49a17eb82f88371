"""Every figure of a federated sum is that of the same users summed in one process, and every setting is passed on."""

import itertools
import json
import os
from collections.abc import Mapping
from dataclasses import fields, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

import unheard
from tests.conftest import counting_user
from tests.federated.network import LocalNetwork, divided
from tests.federated.test_secure_aggregation import run_session, some_vectors
from tests.federated.test_server import CENTRAL, PLANS, SECURE, one_round, seeded, sum_of
from unheard.config import table_from_part
from unheard.corpus.store import TokenStore, UserTokens, write_store
from unheard.engines.choice import EngineChoice
from unheard.engines.distributed.engine import plan_table
from unheard.engines.engine import Drawn
from unheard.errors import NodeError
from unheard.federated import messages, secure_aggregation
from unheard.federated import node as node_module
from unheard.federated.messages import Packet, refused
from unheard.federated.node import Node, NodeData, NodeFolder
from unheard.federated.server import FederatedEngine, Registry
from unheard.mechanism.aggregation import CohortSum
from unheard.mechanism.noise import DistributedGaussianNoise
from unheard.training.run import MODELS
from unheard.updates.user_update import StoredUsers

SUMS = {
    **PLANS,
    "capped weights, clipped denominator": dict(
        weights=unheard.CappedWeights(weight_cap=60, total_weight=40.0),
        estimator=unheard.ClippedDenominator(min_total_weight=20.0),
    ),
    "a clip that most are under": dict(clip=unheard.AdaptiveClip(initial_norm=50.0)),
}


@pytest.mark.parametrize("parts", SUMS.values(), ids=SUMS)
@pytest.mark.parametrize("choice", [CENTRAL, SECURE], ids=["central", "secure"])
def test_every_field_of_a_sum_is_that_of_the_same_users_in_one_process(run, parts, choice):
    run = seeded(run, **parts)
    _, total, numbers = one_round(run, LocalNetwork(divided(run.corpus, 7)), choice)
    expected = sum_of(run, numbers)
    assert expected.units_P.any()
    assert expected.weight > 0
    if "weights" in parts:
        assert expected.weight < 0.9 * len(numbers)  # not every user has weight 1
    if isinstance(parts.get("clip"), unheard.AdaptiveClip):
        assert expected.balance
    for field in fields(CohortSum):
        found, right = getattr(total, field.name), getattr(expected, field.name)
        if field.name == "units_P":
            np.testing.assert_array_equal(found, right)
        else:
            assert (type(found), found) == (type(right), right), field.name


class Watched(LocalNetwork):
    """A network that records how long the server waits."""

    def exchange(self, requests: Mapping[int, Packet], timeout: float) -> dict[int, Packet]:
        self.__dict__.setdefault("timeouts", []).append(timeout)
        return super().exchange(requests, timeout)


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize(
    ("kind", "precision", "device"), [("reference", "float32", "cpu"), ("vectorised", "auto", "auto")]
)
def test_nodes_are_told_what_to_compute_and_none_of_the_servers_own_settings(run, secure, kind, precision, device):
    told = dict(kind=kind, precision=precision, device=device)
    choice = EngineChoice(
        **told, node_timeout=17.5, rank_timeout=23.0, users_at_once=3, parties=4, secure_aggregation=secure
    )
    network = Watched(divided(run.corpus, 4))
    engine = FederatedEngine(network, run.model, choice, TokenStore.open(run.corpus))
    plan = run.plan.at(0, run.model.layout)
    params, users = run.model.initial(3), StoredUsers(engine.users, np.array([0, 15, 30, 45]), with_features=False)
    for seed in (4711, 4712):
        network.requests.clear()
        engine.sum_updates(params, users, plan, Drawn(seed))
        asked = [request for _, request in network.requests if request.kind in ("update", "masked")]
        assert len(asked) == 4
        for request in asked:
            assert request.fields["seed"] == seed
            assert request.fields["plan"] == json.loads(json.dumps(plan_table(plan)))
            assert request.fields["model"] == json.loads(json.dumps(table_from_part(run.model, MODELS)))
            assert EngineChoice(**request.fields["engine"]) == EngineChoice(**told)
            np.testing.assert_array_equal(request.arrays["params"], params.numpy())
    assert set(network.__dict__["timeouts"]) == {17.5}


def test_nodes_are_asked_for_the_words_and_the_features_of_the_model(run):
    network = LocalNetwork(divided(run.corpus, 2))
    store = TokenStore.open(run.corpus)
    for features in (0, 3):
        network.requests.clear()
        model = unheard.TiedLSTM(vocabulary_size=50, embedding_size=6, hidden_size=8, user_features=features)
        try:
            FederatedEngine(network, model, CENTRAL, store)
            assert not features
        except NodeError:
            assert features
        expected = {"vocabulary": store.vocabulary.digest, "tokens": {"kind": "words"}, "features": features}
        assert [dict(request.fields) for _, request in network.requests] == [expected] * 2


@pytest.fixture(scope="module")
def with_features(tmp_path_factory, store):
    """Return the folders of stores whose users have 0, 2 or 3 features."""
    stores, rng = {}, np.random.default_rng(3)
    for count in (0, 2, 3):
        numbers = {"train": rng.random((4, count), dtype=np.float32)} if count else None
        stores[count] = write_store(
            tmp_path_factory.mktemp("features") / "store",
            train=[counting_user(rng, 20 + k) for k in range(4)],
            held_out=[],
            vocabulary=store.vocabulary,
            info={"tokens": {"kind": "words"}},
            features=numbers,
        ).path
    return stores


@pytest.mark.parametrize(("has", "needs"), [*itertools.product((0, 2, 3), (0, 2, 3))])
def test_a_node_has_the_features_that_the_model_takes_or_the_model_takes_none(with_features, has, needs):
    facts = {"vocabulary": TokenStore.open(with_features[has]).vocabulary.digest, "tokens": {"kind": "words"}}
    answer = Node(NodeData(store=with_features[has]), {}).answer(Packet("describe", {**facts, "features": needs}))
    assert answer.kind == ("describe" if needs in (0, has) else "refused")
    for tokens in ({}, {"kind": "characters"}, {"kind": "words", "more": 1}, None):
        other = Packet("describe", {**facts, "tokens": tokens, "features": 0})
        assert Node(NodeData(store=with_features[has]), {}).answer(other).kind == "refused"


def test_a_node_computes_each_user_alone_with_the_engine_seed_and_numbers_that_the_server_names(
    run, with_features, monkeypatch
):
    network = LocalNetwork(divided(run.corpus, 2))
    one_round(run, network, CENTRAL)
    request = next(request for _, request in network.requests if request.kind == "update")
    model = unheard.TiedLSTM(vocabulary_size=50, embedding_size=6, hidden_size=8, user_features=3)
    seen, built = [], []

    def sum_updates(params_P, users, plan, rng):
        seen.append((users, rng.seed))
        units_P = torch.full((model.layout.total,), len(seen))
        return SimpleNamespace(units_P=units_P, weight=0.25 * len(seen), balance=(1, None, -1)[len(seen) - 1])

    def build(*named):
        built.append([json.loads(text) for text in named])
        return model, SimpleNamespace(sum_updates=sum_updates)

    monkeypatch.setattr(node_module, "_built", build)
    monkeypatch.setattr(node_module, "plan_from_table", lambda table, layout: run.plan.at(0, run.model.layout))
    engine = {"kind": "vectorised", "device": "cpu", "precision": "float32"}
    own = {"users": [1, 0, 3], "numbers": [31, 30, 33], "seed": 4711, "engine": engine, "model": {"kind": "tied_lstm"}}
    params = {"params": np.zeros(model.layout.total, np.float32)}
    answer = Node(NodeData(store=with_features[3]), {}).answer(Packet("update", {**request.fields, **own}, params))
    assert answer.kind == "update", answer.fields
    assert built == [[own["model"], engine]]
    split = TokenStore.open(with_features[3]).train
    for (users, seed), local, number in zip(seen, own["users"], own["numbers"], strict=True):
        (user,) = users
        assert (seed, user.number) == (4711, number)
        np.testing.assert_array_equal(user.tokens, split.tokens(local))
        np.testing.assert_array_equal(user.features, split.features(np.array([local]))[0])
    np.testing.assert_array_equal(answer.arrays["units"], np.tile([[1], [2], [3]], model.layout.total))
    quarter = node_module.ONE // 4
    assert answer.arrays["weights"].tolist() == [quarter, 2 * quarter, 3 * quarter]
    assert answer.arrays["balances"].tolist() == [1, 0, -1]


@pytest.mark.parametrize("order", [None, 0, 1, 7])
@pytest.mark.parametrize("part", [0, 2])
def test_the_order_of_a_node_is_the_one_of_its_configuration_or_else_its_part(store, part, order):
    facts = {"vocabulary": store.vocabulary.digest, "tokens": {"kind": "words"}}
    answer = Node(NodeData(store=store.path, part=part, parts=3, order=order), {}).answer(Packet("describe", facts))
    assert answer.fields["order"] == (part if order is None else order)
    assert answer.fields["users"] == 20


def test_users_are_numbered_by_the_order_of_their_node_then_by_its_id_and_each_is_found_on_it():
    nodes = {90: (1, 4), 20: (2, 0), 70: (2, 3), 10: (2, 0), 30: (3, 5), 80: (0, 0), 5: (3, 2)}  # id: order, users
    expected = [(80, 0), (90, 4), (10, 0), (20, 0), (70, 3), (5, 2), (30, 5)]
    where = [node for node, users in expected for _ in range(users)]
    answers = {n: Packet("describe", {"order": order, "users": users}) for n, (order, users) in nodes.items()}
    for ids in (list(answers), list(reversed(answers)), sorted(answers)):
        registry = Registry()
        registry.add({node: answers[node] for node in ids})
        assert [(one.node, one.users) for one in registry.by_node.values()] == expected
        assert registry.users.num_users == len(where)
        for numbers in ([0], [3, 4], [6, 7, 8], list(range(len(where))), []):
            drawn = registry.drawn(np.array(numbers, dtype=np.int64))
            assert {int(n): node for node, own in drawn.items() for n in own} == {n: where[n] for n in numbers}


def test_nothing_that_reads_text_or_features_works_on_the_server(run):
    engine, _, _ = one_round(run, LocalNetwork(divided(run.corpus, 2)), CENTRAL)
    for name in ("tokens", "users", "lengths", "features"):
        assert callable(getattr(UserTokens, name))
        for arguments in ((0,), (np.array([0]),), ()):
            with pytest.raises(NodeError, match="cannot be read on the server"):
                getattr(engine.users, name)(*arguments)


@pytest.mark.parametrize(
    ("expected", "nodes", "parties", "least", "result"),
    [
        (100.0, 500, None, None, 130),  # 100 + 3 sqrt(100)
        (100.0, 130, None, None, 130),
        (100.0, 129, None, None, 129),
        (0.25, 500, None, None, 8),  # ceil(0.25 + 1.5) = 2
        (4.0, 500, None, None, 10),
        (0.25, 7, None, None, 7),
        (0.25, 2, None, None, 3),
        (0.25, 500, None, 21, 32),  # ceil(1.5 * 21)
        (100.0, 500, None, 21, 130),
        (0.25, 25, None, 21, 25),
        (0.25, 10, None, 21, 21),
        (100.0, 500, 5, None, 5),
        (100.0, 4, 5, None, 5),
        (100.0, 500, 20, 21, 21),
        (100.0, 500, 22, 21, 22),
    ],
)
def test_the_number_of_parties_follows_from_declared_numbers_and_connected_nodes(
    run, expected, nodes, parties, least, result
):
    engine = FederatedEngine(
        LocalNetwork(divided(run.corpus, 1)), run.model, replace(SECURE, parties=parties), TokenStore.open(run.corpus)
    )
    engine._registry = SimpleNamespace(users=SimpleNamespace(num_users=4000), by_node=range(nodes))  # pyright: ignore[reportAttributeAccessIssue]
    noise = unheard.GaussianNoise(noise_multiplier=1.0)
    if least is not None:
        noise = DistributedGaussianNoise(noise_multiplier=1.0, min_parties=least)
    sampling = unheard.PoissonSampling(sampling_prob=expected / 4000)
    plan = SimpleNamespace(noise=noise, sampling=sampling, population=10**6)
    assert engine._parties(plan) == result  # pyright: ignore[reportArgumentType]


def test_an_error_names_the_most_frequent_refusal_and_few_short_ones_are_kept(run):
    reasons = ["seldom", *["often"] * 3, "twice", "twice"]

    def refusing(node, request, answer):
        return refused(request, reasons[node - 1000] if node < 1006 else f"{node} " + "x" * 1000)

    with pytest.raises(NodeError, match=r"No node with users has answered\. The most frequent answer was: often$"):
        FederatedEngine(LocalNetwork(divided(run.corpus, 6), refusing), run.model, CENTRAL, TokenStore.open(run.corpus))
    engine = FederatedEngine(LocalNetwork(divided(run.corpus, 1)), run.model, CENTRAL, TokenStore.open(run.corpus))
    engine.network = LocalNetwork(divided(run.corpus, 60), refusing)
    for k in range(4):
        engine.network.tamper = lambda node, request, answer, k=k: refused(request, f"{k} {node} " + "x" * 1000)
        engine._ask("describe", {node: ({}, {}) for node in engine.network.nodes()})
    assert 50 < len(engine._refusals) <= 100
    assert max(map(len, engine._refusals)) == 300


# ------------------------------------------------------------------------------------------------ messages, files


def test_a_message_is_an_object_of_bounded_length(monkeypatch):
    text = json.dumps({"a": "x" * 40})
    monkeypatch.setattr(messages, "MAX_FIELDS", len(text))
    assert Packet.from_json("keys", text, {}).fields == {"a": "x" * 40}
    for wrong in (text + " ", '{"a": ', "[]", "null", "3", '"a"', "", "[" * 30, '{"a": 1}}'):
        with pytest.raises(NodeError, match="not readable"):
            Packet.from_json("keys", wrong, {})
    with pytest.raises(NodeError, match="not readable"):
        Packet.from_json(3, "{}", {})  # pyright: ignore[reportArgumentType]
    monkeypatch.undo()
    with pytest.raises(NodeError, match="not readable"):
        Packet.from_json("keys", "[" * 100_000, {})
    assert refused(Packet("keys", {"session": "s"}), "why").fields == {"session": "s", "reason": "why"}


def test_a_record_of_a_node_that_cannot_be_written_stays_what_it_was(tmp_path, monkeypatch):
    """A write that a crash may stop halfway would lose the number of contributions, or the wish to opt out."""
    folder, written = NodeFolder(path=tmp_path), []
    folder.record_contribution(None)

    def full(source, target):
        written.append(target)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", full)
        for write in (lambda: folder.record_contribution(None), folder.opt_out):
            with pytest.raises(OSError, match="No space"):
                write()
    assert [os.path.basename(path) for path in written] == ["record.json", "opted-out"]
    assert (folder.contributions, folder.is_opted_out) == (1, False)
    assert {path.name for path in tmp_path.iterdir()} - {".record.json.lock"} == {"record.json", "contributed"}
    folder.opt_in()  # also if nobody had opted out
    folder.opt_out()
    folder.opt_out()
    assert folder.is_opted_out
    folder.opt_in()
    assert not folder.is_opted_out


# ------------------------------------------------------------------------------------------------ the sparse graph


@pytest.fixture
def in_order(monkeypatch):
    """The ring of parties is 0, 1, 2, ...; each has two neighbours on either side, and a threshold of three."""
    monkeypatch.setattr(secure_aggregation.secrets.SystemRandom, "shuffle", lambda self, parties: None)
    return lambda **lost: run_session(some_vectors(14), neighbours=4, lost=lost, monkeypatch=monkeypatch)[0]


def test_a_lost_party_without_a_neighbour_that_finished_leaves_no_mask_in_the_sum(in_order):
    session = in_order(share=[5, 6, 8, 9], masked=[7])
    vectors = np.delete(some_vectors(14), [5, 6, 7, 8, 9], axis=0)
    np.testing.assert_array_equal(session.total()[0], vectors.sum(axis=0))


def test_answers_of_other_parties_do_not_replace_those_of_the_neighbours(in_order):
    """Ten parties answered, and of the neighbours of party 7 only two: nobody is suspected of wrong shares."""
    session = in_order(reveal=[6, 7, 8])
    with pytest.raises(NodeError, match="Too few parties finished"):
        session.total()
    assert not session.suspects


@pytest.mark.parametrize("wrong", range(9))
def test_at_most_a_quarter_of_the_parties_become_suspects(wrong):
    session, _ = run_session(some_vectors(8))
    for party in range(wrong):
        by_holder = session.revealed["self"][party]
        by_holder.update({holder: share[:-1] + b"?" for holder, share in by_holder.items()})
    if wrong:
        with pytest.raises(NodeError, match="do not fit together"):
            session.total()
    else:
        session.total()
    assert session.suspects == (set(range(wrong)) if wrong <= 2 else set())
