"""A federated run gives the same model as `unheard train`, bit for bit; charges, dropouts and refusals of the server."""

import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

import unheard
from tests.federated.network import LocalNetwork, divided, federated, plain
from unheard.engines.choice import EngineChoice
from unheard.engines.engine import Drawn
from unheard.errors import InvalidValue, LedgerError, NodeError, UnprovenCombination
from unheard.federated.messages import Packet
from unheard.federated.server import FederatedEngine
from unheard.mechanism.aggregation import BoundedAverage, CohortSum
from unheard.mechanism.plan import RoundPlan
from unheard.privacy.ledger import Ledger
from unheard.run_folder import RunFolder, read_facts
from unheard.training.checkpoint import newest_checkpoint
from unheard.training.loop import resume, train
from unheard.updates.user_update import StoredUsers

SECURE = EngineChoice(kind="reference", secure_aggregation=True, parties=5)
CENTRAL = EngineChoice(kind="reference")


def seeded(run: unheard.Run, rounds: int = 2, **parts) -> unheard.Run:
    training = replace(run.training, rounds=rounds, reproducible_seed=3)
    return replace(run, training=training, plan=replace(run.plan, **parts))


PLANS = {
    "flat": {},
    "per layer, clipped denominator": dict(
        clip=unheard.PerLayerClip(norm=2.0), estimator=unheard.ClippedDenominator(min_total_weight=30.0)
    ),
    "capped weights, FedSGD": dict(
        weights=unheard.CappedWeights(weight_cap=60, total_weight=40.0), update=unheard.FedSGD(batch_size=2, unroll=5)
    ),
    "adaptive": dict(clip=unheard.AdaptiveClip(initial_norm=1.0)),
}


@pytest.mark.parametrize("parts", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("choice", [CENTRAL, SECURE], ids=["central", "secure"])
def test_the_model_is_that_of_plain_training_to_the_bit(run, tmp_path: Path, parts, choice):
    run = seeded(run, **parts)
    network = LocalNetwork(divided(run.corpus, 7))
    np.testing.assert_array_equal(federated(run, tmp_path / "nodes", network, choice), plain(run, tmp_path / "plain"))
    here, there = (tmp_path / name for name in ("plain", "nodes"))
    of_plain, of_nodes = (read_facts(folder / "model.safetensors") for folder in (here, there))
    assert of_nodes == {**of_plain, "nodes": RunFolder(there).nodes_digest()}
    assert of_plain["nodes"] is None
    facts = Ledger.read(there / "ledger.jsonl").facts
    assert facts.pop("federated") == {"secure_aggregation": choice.secure_aggregation}
    assert facts == Ledger.read(here / "ledger.jsonl").facts
    (there / "federated.json").write_text("[")
    with pytest.raises(LedgerError, match="damaged"):
        _ = Ledger.read(there / "ledger.jsonl").facts


def changed(answer: Packet, **arrays: np.ndarray) -> Packet:
    return Packet(answer.kind, answer.fields, {**answer.arrays, **arrays})


def one_round(run: unheard.Run, network: LocalNetwork, choice: EngineChoice, seed: int = 5):
    """Return the sum of the cohort of one round, and the drawn users."""
    engine = FederatedEngine(network, run.model, choice, unheard.TokenStore.open(run.corpus))
    plan = run.plan.at(0, run.model.layout)
    numbers = plan.sampling.draw(engine.users.num_users, plan.population, np.random.default_rng(seed))
    params = run.model.initial(0)
    users = StoredUsers(engine.users, numbers, with_features=False)
    return engine, engine.sum_updates(params, users, plan, Drawn(1)), numbers


def sum_of(run: unheard.Run, numbers) -> CohortSum:
    """Return the sum over these users by the reference engine."""
    store = unheard.TokenStore.open(run.corpus)
    users = StoredUsers(store.train, np.asarray(numbers), with_features=False)
    plan = run.plan.at(0, run.model.layout)
    return CENTRAL.build(run.model).sum_updates(run.model.initial(0), users, plan, Drawn(1))


def test_a_node_that_does_not_answer_contributes_zero_and_the_charge_stays(run, tmp_path):
    run = seeded(run, rounds=3)
    lost = LocalNetwork(
        divided(run.corpus, 7), lambda node, request, answer: answer if request.kind == "describe" else None
    )
    federated(run, tmp_path / "lost", lost)
    assert len(Ledger.read(tmp_path / "lost" / "ledger.jsonl")) == 3
    dropped = LocalNetwork(
        divided(run.corpus, 7),
        lambda node, request, answer: answer if node > 1001 or request.kind == "describe" else None,
    )
    _, total, numbers = one_round(run, dropped, CENTRAL)
    gone = 2 * 60 // 7
    np.testing.assert_array_equal(total.units_P, sum_of(run, numbers[numbers >= gone]).units_P)


def test_the_charge_is_on_disk_before_anybody_is_asked(run, tmp_path):
    charged = []
    ledger = tmp_path / "out" / "ledger.jsonl"

    def look(node, request, answer):
        if request.kind == "update":
            charged.append(len(Ledger.read(ledger)))
        return answer

    federated(seeded(run), tmp_path / "out", LocalNetwork(divided(run.corpus, 3), look))
    assert charged[0] == 1
    assert set(charged) == {1, 2}


WRONG = {
    "too long": lambda a: changed(a, units=np.concatenate([a.arrays["units"]] * 2, axis=1)),
    "one user twice": lambda a: changed(a, units=np.concatenate([a.arrays["units"]] * 2)),
    "floats": lambda a: changed(a, units=a.arrays["units"].astype(np.float64)),
    "not a number": lambda a: changed(a, units=np.full(a.arrays["units"].shape, np.nan)),
    "another type of integer": lambda a: changed(a, units=a.arrays["units"].astype(np.int32)),
    "gigantic": lambda a: changed(a, units=np.broadcast_to(np.int64(1), (2**20, 2**20))),
    "beyond the bound": lambda a: changed(a, units=a.arrays["units"] + 2**21),
    "far beyond the bound": lambda a: changed(a, units=np.full_like(a.arrays["units"], -(2**63))),
    "weight above one": lambda a: changed(a, weights=a.arrays["weights"] * 2),
    "balance beyond one": lambda a: changed(a, balances=a.arrays["balances"] * 0 + 2),
    "balance below minus one": lambda a: changed(a, balances=a.arrays["balances"] * 0 - 2),
    "negative weight": lambda a: changed(a, weights=-a.arrays["weights"]),
    "nothing": lambda a: Packet(a.kind, a.fields),
    "another session": lambda a: Packet(a.kind, {"session": "0" * 32}, a.arrays),
    "another kind": lambda a: Packet("describe", a.fields, a.arrays),
    "a refusal": lambda a: Packet("refused", {**a.fields, "reason": "no"}),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_a_hostile_node_contributes_exactly_nothing_in_central_mode(run, wrong):
    def tamper(node, request, answer):
        return wrong(answer) if request.kind == "update" and node == 1002 else answer

    network = LocalNetwork(divided(run.corpus, 4), tamper)
    _, total, numbers = one_round(run, network, CENTRAL)
    others = numbers[(numbers < 30) | (numbers >= 45)]
    assert len(others) < len(numbers)
    np.testing.assert_array_equal(total.units_P, sum_of(run, others).units_P)
    assert total.weight == len(others)


def test_an_answer_of_the_round_before_is_not_counted(run):
    kept: dict[int, Packet] = {}

    def replay(node, request, answer):
        if request.kind != "update" or node != 1000:
            return answer
        return kept.setdefault(node, answer)

    network = LocalNetwork(divided(run.corpus, 1), replay)
    engine, first, numbers = one_round(run, network, CENTRAL)
    assert first.units_P.any()
    plan = run.plan.at(0, run.model.layout)
    users = StoredUsers(engine.users, numbers, with_features=False)
    assert not engine.sum_updates(run.model.initial(0), users, plan, Drawn(1)).units_P.any()


OTHER_SESSIONS = {
    "none": lambda own: {},
    "null": lambda own: {"session": None},
    "empty": lambda own: {"session": ""},
    "a beginning": lambda own: {"session": own[:-1]},
    "longer": lambda own: {"session": own + "0"},
    "capitals": lambda own: {"session": own.upper()},
    "a list": lambda own: {"session": [own]},
    "true": lambda own: {"session": True},
    "another name": lambda own: {"Session": own},
}
"""What an answer may say instead of the session of its request."""


@pytest.mark.parametrize("kind", ["update", "keys", "share", "masked", "reveal"])
def test_only_an_answer_of_the_kind_and_session_of_its_request_is_counted(run, kind):
    """At every stage. An answer without a session may be of any round."""
    own = "0123456789abcdef" * 2
    answers: dict[int, Packet] = {1000: Packet(kind, {"session": own, "figure": 1})}
    answers |= {1001 + i: Packet(kind, other(own)) for i, other in enumerate(OTHER_SESSIONS.values())}
    others = [other for other in ("describe", "update", "keys", "share", "masked", "reveal", "") if other != kind]
    answers |= {1100 + i: Packet(other, {"session": own}) for i, other in enumerate(others)}
    answers[1200] = Packet("refused", {"session": own, "reason": "no"})
    asked = {node: ({"session": own}, {}) for node in answers}
    answers[1300] = Packet(kind, {"session": own})  # a node that nobody asked
    engine = FederatedEngine(
        LocalNetwork(divided(run.corpus, 1)), run.model, CENTRAL, unheard.TokenStore.open(run.corpus)
    )
    engine.network = SimpleNamespace(exchange=lambda packets, timeout: answers)  # pyright: ignore[reportAttributeAccessIssue]
    assert engine._ask(kind, asked) == {1000: answers[1000]}
    assert sum(engine._refusals.values()) == len(asked) - 1


@pytest.mark.parametrize("stage", ["update", "keys", "masked"])
def test_a_node_whose_answer_names_no_session_counts_as_gone(run, stage):
    def tamper(node, request, answer):
        return Packet(answer.kind, {**answer.fields, "session": None}, answer.arrays) if bad(node, request) else answer

    def bad(node, request):
        return request.kind == stage and node == 1002

    choice = CENTRAL if stage == "update" else replace(SECURE, parties=6)
    _, total, numbers = one_round(run, LocalNetwork(divided(run.corpus, 6), tamper), choice)
    np.testing.assert_array_equal(total.units_P, sum_of(run, [n for n in numbers if n // 10 != 2]).units_P)


@pytest.mark.parametrize("stage", ["keys", "share", "masked", "reveal"])
def test_a_third_of_the_nodes_may_be_lost_at_each_stage_of_secure_aggregation(run, stage):
    def tamper(node, request, answer):
        return None if request.kind == stage and node in (1001, 1004, 1008) else answer

    network = LocalNetwork(divided(run.corpus, 10), tamper)
    choice = replace(SECURE, parties=10)
    _, total, numbers = one_round(run, network, choice)
    kept = numbers if stage == "reveal" else [n for n in numbers if n // 6 not in (1, 4, 8)]
    np.testing.assert_array_equal(total.units_P, sum_of(run, kept).units_P)


HOSTILE = {
    "keys": lambda a: Packet(a.kind, {**a.fields, "pairwise": "AAAA"}),
    "share": lambda a: Packet(a.kind, {**a.fields, "shares": {}}),
    "masked": lambda a: changed(a, masked=a.arrays["masked"][:-1]),
    "reveal": lambda a: Packet(a.kind, {**a.fields, "self": {}}),
}


@pytest.mark.parametrize("stage", HOSTILE)
def test_a_hostile_node_is_a_dropout_in_secure_aggregation(run, stage):
    def tamper(node, request, answer):
        return HOSTILE[stage](answer) if request.kind == stage and node == 1002 else answer

    _, total, numbers = one_round(run, LocalNetwork(divided(run.corpus, 6), tamper), replace(SECURE, parties=6))
    kept = numbers if stage == "reveal" else [n for n in numbers if n // 10 != 2]
    np.testing.assert_array_equal(total.units_P, sum_of(run, kept).units_P)


def test_shares_of_another_round_spoil_one_round_and_their_node_counts_as_gone(run):
    """The round is abandoned and charged, and no vector is unmasked. The next round succeeds without the hostile node."""
    old: dict[str, str] = {}

    def tamper(node, request, answer):
        if request.kind != "share" or node != 1002:
            return answer
        if not old:
            old.update(answer.fields["shares"])
            return answer
        shares = {n: next(iter(old.values())) for n in answer.fields["shares"]}
        return Packet(answer.kind, {**answer.fields, "shares": shares})

    network = LocalNetwork(divided(run.corpus, 6), tamper)
    engine, first, numbers = one_round(run, network, replace(SECURE, parties=6))
    np.testing.assert_array_equal(first.units_P, sum_of(run, numbers).units_P)
    users = StoredUsers(engine.users, numbers, with_features=False)

    def again():
        return engine.sum_updates(run.model.initial(0), users, run.plan.at(0, run.model.layout), Drawn(1)).units_P

    with pytest.warns(RuntimeWarning, match="charged, and is abandoned"):
        assert not again().any()
    np.testing.assert_array_equal(again(), sum_of(run, [n for n in numbers if n // 10 != 2]).units_P)
    # It is not used as a party without drawn users either.
    for drawn in ({}, {1000: np.array([0])}, {1002: np.array([20])}):
        assert 1002 not in engine._chosen_parties(run.plan.at(0, run.model.layout), drawn)


SAMPLERS = {
    "examples": unheard.ExampleSampling(examples_per_user=3, examples_per_round=12, total_examples=150),
    "groups in turn": unheard.CyclicPoissonSampling(users_per_round=2, groups=3),
    "separation": unheard.MinSeparationSampling(separation=3),
}


@pytest.mark.parametrize("sampling", SAMPLERS.values(), ids=SAMPLERS)
def test_a_sampler_without_a_proof_for_nodes_is_refused_before_anybody_is_asked(run, tmp_path, sampling):
    network = LocalNetwork(divided(run.corpus, 6))
    engine = FederatedEngine(network, run.model, CENTRAL, unheard.TokenStore.open(run.corpus))
    plan = SimpleNamespace(sampling=sampling)
    with pytest.raises(UnprovenCombination, match="kind = 'poisson'"):
        engine.check_plan(plan)  # pyright: ignore[reportArgumentType]
    assert {request.kind for _, request in network.requests} == {"describe"}


def test_the_number_of_parties_does_not_tell_how_many_users_were_drawn(run):
    engine = FederatedEngine(
        LocalNetwork(divided(run.corpus, 8)), run.model, SECURE, unheard.TokenStore.open(run.corpus)
    )
    plan = run.plan.at(0, run.model.layout)
    for drawn in range(6):
        users = {1000 + i: np.array([i]) for i in range(drawn)}
        parties = engine._chosen_parties(plan, users)
        assert set(users) <= set(parties)
        assert len(parties) == len(set(parties)) == 5


@pytest.mark.parametrize("parties", [None, 3])
def test_secure_aggregation_of_two_nodes_is_refused_before_anything_is_charged(run, tmp_path, parties):
    """Each of two nodes could subtract its own vector from the sum and learn the other's."""
    choice = replace(SECURE, parties=parties)
    with pytest.raises(InvalidValue, match="at least 3 nodes per round, and 2 are connected"):
        federated(seeded(run), tmp_path / "out", LocalNetwork(divided(run.corpus, 2)), choice)
    assert not (tmp_path / "out").exists()


def averages_with_and_without(run: unheard.Run, add) -> tuple[RoundPlan, list[BoundedAverage]]:
    """Return the averages of two rounds that differ in one node with one user, while node 1002 adds any vector.

    Args:
        run: The run.
        add: A function that takes the honest sum without that user and returns the vector of node 1002.
    """
    nodes = [replace(node, part=2 * i, parts=60) for i, node in enumerate(divided(run.corpus, 6))]
    plan, users = run.plan.at(0, run.model.layout), range(0, 12, 2)
    far = add(sum_of(run, [n for n in users if n != 8]).units_P.numpy())
    averages = []
    for is_there in (True, False):

        def tamper(node, request, answer, is_there=is_there):
            if request.kind != "masked" or node not in (1002, 1004):
                return answer
            if node == 1004:
                return answer if is_there else None
            masked = answer.arrays["masked"]
            return changed(answer, masked=(masked.astype(np.int64) + far).astype(masked.dtype))

        network = LocalNetwork(nodes, tamper)
        engine = FederatedEngine(network, run.model, replace(SECURE, parties=6), unheard.TokenStore.open(run.corpus))
        users = StoredUsers(engine.users, np.arange(6), with_features=False)
        averages.append(plan.average(engine.sum_updates(run.model.initial(0), users, plan, Drawn(1))))
    return plan, averages


ADDED = {
    "nothing": lambda honest: np.zeros_like(honest),
    "beyond the bound": lambda honest: np.full_like(honest, 2**28),
    "to the end of the range": lambda honest: 2**30 - honest,
    "to where the modulus wraps": lambda honest: 2**31 - 1 - honest,
    "to where it wraps, below": lambda honest: -(2**31) - honest,
}


@pytest.mark.parametrize("add", ADDED.values(), ids=ADDED)
@pytest.mark.parametrize("estimator", ["fixed", "clipped"])
def test_values_beyond_the_bound_leave_the_guarantee_of_others_in_secure_aggregation(run, estimator, add):
    """The server cannot see the values. For any values, another user moves the average by at most the sensitivity."""
    if estimator == "clipped":
        run = seeded(run, estimator=unheard.ClippedDenominator(min_total_weight=15.0))
    plan, (average, without) = averages_with_and_without(run, add)
    moved = (average.units_P - without.units_P).double().norm() * average.unit
    assert 0 < moved <= plan.sensitivity


def test_the_server_never_receives_a_plain_update_in_secure_aggregation(run):
    network = LocalNetwork(divided(run.corpus, 6))
    _, _, numbers = one_round(run, network, replace(SECURE, parties=6))
    plain_updates = [sum_of(run, [n]).units_P.numpy() for n in numbers]
    for _, answer in network.answers:
        for array in answer.arrays.values():
            if array.size < 100:
                continue
            signed = array.view(np.int32).astype(np.int64)
            assert all((signed == update).mean() < 0.01 for update in plain_updates)


def test_an_abandoned_round_is_charged_and_three_in_a_row_end_the_run(run, tmp_path):
    def tamper(node, request, answer):
        return None if request.kind == "reveal" and node != 1000 else answer

    network = LocalNetwork(divided(run.corpus, 6), tamper)
    with pytest.warns(RuntimeWarning, match="abandoned"), pytest.raises(NodeError, match="3 rounds in a row"):
        federated(seeded(run, rounds=6), tmp_path / "out", network, replace(SECURE, parties=6))
    assert len(Ledger.read(tmp_path / "out" / "ledger.jsonl")) == 3


def test_only_failures_in_a_row_end_a_run(run):
    """A round that succeeds begins the count anew."""
    outcomes = iter([False, False, True, False, False, True, False, False, False])
    engine = FederatedEngine(
        LocalNetwork(divided(run.corpus, 6)), run.model, SECURE, unheard.TokenStore.open(run.corpus)
    )
    plan = run.plan.at(0, run.model.layout)
    users = StoredUsers(engine.users, np.array([1]), with_features=False)
    whole = plan.contribution.sum([], plan.layout.total)

    def session(*_):
        if next(outcomes):
            return whole
        raise NodeError("too few")

    engine._session = session
    for _ in range(8):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            engine.sum_updates(run.model.initial(0), users, plan, Drawn(1))
    with pytest.raises(NodeError, match="3 rounds in a row"):
        engine.sum_updates(run.model.initial(0), users, plan, Drawn(1))


def test_nodes_that_were_not_drawn_take_part_with_zero(run):
    network = LocalNetwork(divided(run.corpus, 30))
    one_round(run, network, replace(SECURE, parties=20))
    asked = [request for _, request in network.requests if request.kind == "masked"]
    assert len(asked) == 20
    assert any(not request.fields["users"] for request in asked)


def test_too_few_nodes_and_an_empty_network_are_refused_before_anything_is_charged(run, tmp_path):
    with pytest.raises(InvalidValue, match="Start more"):
        federated(run, tmp_path / "few", LocalNetwork(divided(run.corpus, 2)), SECURE)
    with pytest.raises(NodeError, match="No node"):
        federated(run, tmp_path / "none", LocalNetwork([]))
    assert not (tmp_path / "few").exists()


def test_the_server_cannot_read_a_users_text(run):
    engine, _, _ = one_round(run, LocalNetwork(divided(run.corpus, 2)), CENTRAL)
    for read in (engine.users.users, engine.users.tokens, engine.users.lengths):
        with pytest.raises(NodeError, match="on their nodes"):
            read(np.array([0]))


def test_a_new_node_is_registered_and_old_users_keep_their_numbers(run):
    network = LocalNetwork(divided(run.corpus, 4)[:3])
    engine, _, _ = one_round(run, network, CENTRAL)
    before = dict(engine._registry.by_node)
    assert engine.users.num_users == 45
    network.data.append(divided(run.corpus, 4)[3])
    network.memories.append({})
    numbers = np.array([3, 40])
    users = StoredUsers(engine.users, numbers, with_features=False)
    total = engine.sum_updates(run.model.initial(0), users, run.plan.at(0, run.model.layout), Drawn(1))
    np.testing.assert_array_equal(total.units_P, sum_of(run, numbers).units_P)
    assert engine.users.num_users == 60  # after each round, nodes that have connected since are registered
    assert {node: engine._registry.by_node[node] for node in before} == before


def test_the_run_is_resumed_with_the_next_attempt(run, tmp_path):
    run = seeded(run, rounds=4)
    network = LocalNetwork(divided(run.corpus, 7))
    expected = plain(run, tmp_path / "plain")
    engine = FederatedEngine(network, run.model, CENTRAL, unheard.TokenStore.open(run.corpus))
    reports = train(run, tmp_path / "out", engine=CENTRAL, on=engine)
    assert [next(reports).round, next(reports).round] == [1, 2]
    reports.close()
    assert [report.round for report in resume(tmp_path / "out", on=engine)] == [3, 4]
    np.testing.assert_array_equal(newest_checkpoint(RunFolder.open(tmp_path / "out")).state.params_P, expected)


@pytest.mark.parametrize("began", [CENTRAL, SECURE, None], ids=["central", "secure", "here"])
def test_a_run_continues_with_the_trust_model_that_it_began_with_alone(run, tmp_path, began):
    run = replace(run, training=replace(run.training, rounds=2))
    store, network = unheard.TokenStore.open(run.corpus), LocalNetwork(divided(run.corpus, 7))
    engines = {choice: FederatedEngine(network, run.model, choice, store) for choice in (CENTRAL, SECURE)}
    reports = train(run, tmp_path / "out", engine=began or CENTRAL, on=engines.get(began))
    next(reports)
    reports.close()
    for other in {CENTRAL, SECURE, None} - {began}:
        with pytest.raises(LedgerError, match="whom its users trust"):
            resume(tmp_path / "out", on=engines.get(other), engine=other)
    assert len(Ledger.read(tmp_path / "out" / "ledger.jsonl")) == 1
    list(resume(tmp_path / "out", on=engines.get(began), engine=began))
    assert list(resume(tmp_path / "out", engine=CENTRAL)) == []  # a complete run computes nothing anywhere


def test_parties_and_sessions_of_each_round_are_drawn_anew(run):
    """The other parties and the order of the parties do not reveal which users were drawn."""
    network = LocalNetwork(divided(run.corpus, 30))
    engine = FederatedEngine(network, run.model, replace(SECURE, parties=10), unheard.TokenStore.open(run.corpus))
    plan, drawn = run.plan.at(0, run.model.layout), {1007: np.array([14]), 1003: np.array([6])}
    chosen = [engine._chosen_parties(plan, drawn) for _ in range(20)]
    assert all(len(set(nodes)) == len(nodes) == 10 and set(drawn) <= set(nodes) for nodes in chosen)
    assert len({frozenset(nodes) for nodes in chosen}) > 10
    assert len({nodes.index(1007) for nodes in chosen}) > 3
    for choice in (CENTRAL, SECURE):
        before = len(network.requests)
        for _ in range(2):
            one_round(run, network, choice)
        asked = [request.fields["session"] for _, request in network.requests[before:] if request.kind != "describe"]
        assert len(set(asked)) == 2
        assert {len(session) for session in asked} == {32}


def test_a_node_that_is_described_twice_has_its_users_once(run):
    engine = FederatedEngine(
        LocalNetwork(divided(run.corpus, 3)), run.model, CENTRAL, unheard.TokenStore.open(run.corpus)
    )
    engine._registry.add({1001: Packet("describe", {"users": 20, "order": 1})})
    assert engine.users.num_users == 60
    good = {"users": 1, "order": 1}
    for node, bad in enumerate([{"users": -1}, {"users": 2**20 + 1}, {"users": 1.0}, {"users": None}, {"order": None}]):
        engine._registry.add({2000 + node: Packet("describe", {**good, **bad})})
    assert engine.users.num_users == 60
    engine._registry.add({3000: Packet("describe", good)})
    assert engine.users.num_users == 61


def test_an_answer_of_a_node_that_was_not_asked_is_not_counted(run):
    class Eager(LocalNetwork):
        def exchange(self, requests, timeout):
            answers = super().exchange(requests, timeout)
            return {**answers, 4321: next(iter(answers.values()))}

    _, total, numbers = one_round(run, Eager(divided(run.corpus, 4)), CENTRAL)
    assert torch.equal(total.units_P, sum_of(run, numbers).units_P)


def test_the_server_sums_none_but_the_registered_users(run):
    """It does not sum unregistered users even if it could read their text."""
    engine, _, _ = one_round(run, LocalNetwork(divided(run.corpus, 2)), CENTRAL)
    store, plan = unheard.TokenStore.open(run.corpus), run.plan.at(0, run.model.layout)
    readable = StoredUsers(store.train, np.array([0]), with_features=False)
    for users in (readable, [*readable]):
        with pytest.raises(TypeError, match="registered users"):
            engine.sum_updates(run.model.initial(0), users, plan, Drawn(1))
