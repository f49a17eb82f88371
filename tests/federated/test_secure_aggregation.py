"""Secure aggregation: sums are exact with dropouts, masked vectors are uniform without t shares, no secret is reused."""

import contextlib
import itertools
import json
import math
import os

import numpy as np
import pytest

pytest.importorskip("flwr")

from Crypto.Protocol import SecretSharing
from flwr.common.secure_aggregation.crypto import shamir as flower_shamir
from flwr.common.secure_aggregation.crypto.shamir import combine_shares

from unheard.errors import NodeError
from unheard.federated import secure_aggregation
from unheard.federated.secure_aggregation import (
    Party,
    Session,
    combine,
    create_shares,
    folded,
    mask,
    modulus_bits,
    threshold,
)

P, E = 40, 3


def run_session(vectors, *, lost=None, bits=32, neighbours=None, monkeypatch=None):
    """Run a session. `lost` maps a stage to the parties that are gone from this stage on."""
    if neighbours is not None:
        monkeypatch.setattr(secure_aggregation, "NEIGHBOURS", neighbours)
    lost = lost or {}
    parties = {i: Party({}) for i in range(len(vectors))}
    session = Session(bits=bits, count=P, extras=E)
    gone: set[int] = set()

    def alive(stage):
        gone.update(lost.get(stage, ()))
        return [i for i in parties if i not in gone]

    for i in alive("keys"):
        session.add_keys(i, parties[i].keys(session.name))
    for i in alive("share"):
        request = session.share_request(i)
        session.add_shares(i, parties[i].share(session.name, i, request["peers"], request["threshold"]))
    for i in alive("masked"):
        if i in session.shares:
            request = session.masked_request(i)
            extra = np.array([i, -i, 1])
            session.add_vector(i, *parties[i].masked(session.name, request["received"], vectors[i], extra, bits))
    for i in alive("reveal"):
        if i in session.vectors:
            request = session.reveal_request(i)
            session.add_revealed(i, parties[i].reveal(session.name, request["survivors"], request["dropped"]))
    return session, parties


def some_vectors(n, seed=1):
    return np.random.default_rng(seed).integers(-(2**21), 2**21, size=(n, P))


@pytest.mark.parametrize("bits", [32, 64])
def test_the_sum_is_exact(bits):
    vectors = some_vectors(5)
    session, _ = run_session(vectors, bits=bits)
    units, extra = session.total()
    np.testing.assert_array_equal(units, vectors.sum(axis=0))
    assert extra.tolist() == [10, -10, 5]


@pytest.mark.parametrize("stage", ["keys", "share", "masked", "reveal"])
def test_thirty_percent_may_drop_out_at_each_stage(stage):
    vectors = some_vectors(10)
    session, _ = run_session(vectors, lost={stage: [1, 4, 7]})
    kept = range(10) if stage == "reveal" else [i for i in range(10) if i not in (1, 4, 7)]
    np.testing.assert_array_equal(session.total()[0], vectors[list(kept)].sum(axis=0))


def test_the_sparse_graph_sums_as_the_complete_one(monkeypatch):
    vectors = some_vectors(14)
    session, _ = run_session(vectors, neighbours=6, lost={"masked": [3]}, monkeypatch=monkeypatch)
    assert {len(session.neighbours(i)) for i in range(14)} == {7}
    assert all((a in session.neighbours(b)) == (b in session.neighbours(a)) for a in range(14) for b in range(14))
    np.testing.assert_array_equal(session.total()[0], np.delete(vectors, 3, axis=0).sum(axis=0))


def test_with_half_of_them_gone_nothing_is_revealed():
    session, _ = run_session(some_vectors(6), lost={"reveal": [0, 1, 2]})
    with pytest.raises(NodeError, match="Too few"):
        session.total()


def test_what_the_server_sees_of_one_party_is_uniform_without_enough_shares():
    """Two opposite vectors give views that a chi-square test cannot tell from uniform bytes, and t - 1 shares give no
    secret: every secret is consistent with them."""
    for value in (0, 2**21):
        session, _ = run_session(np.full((5, P), value), lost={"reveal": [2, 3, 4]})
        seen = np.concatenate([units.view(np.uint8) for units, _ in session.vectors.values()])
        counts = np.bincount(seen, minlength=256)
        chi = ((counts - seen.size / 256) ** 2 / (seen.size / 256)).sum()
        assert chi < 380  # 255 degrees of freedom: exceeded with probability 1e-6
        # The sum of all vectors cancels the pairwise masks; the self masks remain.
        total = sum(units.astype(np.uint64) for units, _ in session.vectors.values()) % 2**32
        assert not (total == 5 * value).any()
        shares = session.revealed["self"][0]
        assert len(shares) == 2 == threshold(5) - 1
        with pytest.raises(NodeError, match="Too few"):
            session.total()


def test_masked_coordinates_are_uniform_over_sessions():
    """The bits of one masked coordinate over many masks are uniform, for any vector."""
    secret, value = os.urandom(31), np.uint32(7)
    seen = np.array([mask(secret, f"session {i:08d}", 32, 1, 0)[0][0] + value for i in range(4000)], np.uint32)
    ones = ((seen[:, None] >> np.arange(32, dtype=np.uint32)) & 1).mean(axis=0)
    assert np.abs(ones - 0.5).max() < 0.045  # 5.7 deviations


def test_shares_below_the_threshold_fit_every_secret():
    shares = create_shares(b"x" * 31, 3, 5)
    assert combine(shares[1:4]) == b"x" * 31
    for pair in itertools.combinations(shares, 2):
        with contextlib.suppress(ValueError):
            assert combine(list(pair)) != b"x" * 31
    # Other coefficients give other shares of the same secret, so one share says nothing about it.
    assert all(a != b for a, b in zip(shares, create_shares(b"x" * 31, 3, 5), strict=True))


def test_the_shares_are_those_of_flower(monkeypatch):
    """The same polynomial gives the same bytes as in Flower, and each side can combine the other's shares."""
    for t, n in ((2, 3), (5, 9), (33, 65)):
        secret = os.urandom(31)
        shares, theirs = create_shares(secret, t, n), flower_shamir.create_shares(secret, t, n)
        for chosen in (shares[:t], shares[-t:], theirs[::-1][:t]):
            assert combine(chosen) == combine_shares(chosen) == secret
    for wrong in ([shares[0], shares[0], *shares[:3]], [bytes(4) + shares[0][4:], *shares[1:t]], [b"abc"]):
        with pytest.raises(ValueError):
            combine(wrong)
    draws = [os.urandom(16) for _ in range(6)]
    sides = [(SecretSharing, "rng", flower_shamir.create_shares), (os, "urandom", create_shares)]
    results = []
    for module, name, create in sides:
        rest = iter(draws)
        with monkeypatch.context() as patched:
            patched.setattr(module, name, lambda size, rest=rest: next(rest))
            results.append(create(b"one block", 7, 20))
    assert results[0] == results[1]


def test_keys_and_masks_are_new_in_each_session():
    party = Party({})
    assert party.keys("session number 1") != party.keys("session number 2")
    first, second = (mask(b"s", name, 32, 8, 1)[0] for name in ("one session", "two session"))
    assert (first != second).any()


def test_a_stage_happens_once_and_in_order():
    vectors = some_vectors(4)
    session, parties = run_session(vectors)
    request = session.reveal_request(0)
    with pytest.raises(NodeError, match="next stage"):  # replayed
        parties[0].reveal(session.name, request["survivors"], request["dropped"])
    with pytest.raises(NodeError, match="next stage"):
        parties[0].masked(session.name, {}, vectors[0], np.zeros(3, np.int64), 32)
    assert set(parties[0].memory) == {"session", "stage"}  # no secret is left
    session, parties = run_session(vectors, lost={"reveal": range(4)})
    with pytest.raises(NodeError, match="Too few"):
        parties[0].reveal(session.name, [0], [])
    assert set(parties[0].memory) == {"session", "stage"}  # also not after a refusal


def test_no_stage_is_done_for_another_session():
    """Otherwise masks of this session would be used in another session."""
    session, parties = run_session(some_vectors(4), lost={"masked": [0, 1, 2, 3]})
    received, zeros = session.masked_request(0)["received"], (np.zeros(P, np.int64), np.zeros(3, np.int64))
    other = "x" * len(session.name)
    with pytest.raises(NodeError, match="next stage"):
        parties[0].masked(other, received, *zeros, 32)
    for bits in (0, 16, 33, 128):
        memory = json.loads(json.dumps(parties[0].memory))
        with pytest.raises(NodeError, match="not in this session"):
            Party(memory).masked(session.name, received, *zeros, bits)
    parties[0].masked(session.name, received, *zeros, 32)
    with pytest.raises(NodeError, match="next stage"):
        parties[0].reveal(other, [0, 1, 2, 3], [])
    fresh = Party({})
    fresh.keys(session.name)
    with pytest.raises(NodeError, match="next stage"):
        fresh.share(other, 0, session.share_request(0)["peers"], 3)


def test_a_second_vector_under_the_same_mask_is_refused():
    session, parties = run_session(some_vectors(4), lost={"masked": [0, 1, 2, 3]})
    received = session.masked_request(0)["received"]
    vector = np.zeros(P, np.int64)
    parties[0].masked(session.name, received, vector, np.zeros(3, np.int64), 32)
    with pytest.raises(NodeError, match="next stage"):
        parties[0].masked(session.name, received, vector + 1, np.zeros(3, np.int64), 32)


def test_a_node_refuses_a_short_name_of_a_session_and_a_share_from_itself():
    for name in ("", "x" * 15, None, 16 * ["x"]):
        with pytest.raises(NodeError, match="at least 16 characters"):
            Party({}).keys(name)  # pyright: ignore[reportArgumentType]
    Party({}).keys("x" * 16)
    session, parties = run_session(some_vectors(4), lost={"masked": [0, 1, 2, 3]})
    received = session.masked_request(0)["received"]
    for wrong in ({"0": next(iter(received.values()))}, {"9": "x"}):
        memory = json.loads(json.dumps(parties[0].memory))
        with pytest.raises(NodeError, match="not in this session"):
            Party(memory).masked(session.name, {**received, **wrong}, np.zeros(P, np.int64), np.zeros(3, np.int64), 32)


def test_a_node_refuses_both_secrets_of_a_party_and_a_sum_of_few():
    vectors = some_vectors(5)
    session, parties = run_session(vectors, lost={"reveal": range(5)})
    with pytest.raises(NodeError, match="both secrets"):
        parties[0].reveal(session.name, [0, 1, 2, 3], [3, 4])
    with pytest.raises(NodeError, match="Too few"):
        parties[1].reveal(session.name, [0, 1], [2, 3, 4])
    with pytest.raises(NodeError, match="not in this session"):
        parties[2].reveal(session.name, [0, 1, 2, 9], [])
    with pytest.raises(NodeError, match="not in this session"):  # its own pairwise key, though it has finished
        parties[3].reveal(session.name, [0, 1, 2], [3, 4])


def test_a_node_refuses_few_peers_a_low_threshold_and_doubled_keys():
    def begun(n):
        session = Session(bits=32, count=P, extras=E)
        parties = [Party({}) for _ in range(n)]
        for i, party in enumerate(parties):
            session.add_keys(i, party.keys(session.name))
        return session, parties

    session, parties = begun(2)
    with pytest.raises(NodeError, match="at least 3"):
        parties[0].share(session.name, 0, session.share_request(0)["peers"], 2)
    session, parties = begun(5)
    with pytest.raises(NodeError, match="majority"):
        parties[0].share(session.name, 0, session.share_request(0)["peers"], 2)
    for n in (3, 4, 5, 6, 7, 8):  # half of an even number is no majority
        session, parties = begun(n)
        for i, more in ((0, 0), (1, 1)):
            peers = session.share_request(i)["peers"]
            with contextlib.nullcontext() if more else pytest.raises(NodeError, match="majority"):
                parties[i].share(session.name, i, peers, len(peers) // 2 + more)
    session, parties = begun(5)
    with pytest.raises(NodeError, match="majority"):  # a secret that could not be reconstructed
        parties[0].share(session.name, 0, session.share_request(0)["peers"], 6)
    session, parties = begun(4)
    peers = dict(session.share_request(0)["peers"])
    peers["3"] = peers["2"]
    with pytest.raises(NodeError, match="the same key"):
        parties[0].share(session.name, 0, peers, 3)
    session, parties = begun(4)
    peers = {**session.share_request(0)["peers"], "0": session.keys[1]}
    with pytest.raises(NodeError, match="other keys"):
        parties[0].share(session.name, 0, peers, 3)


def test_a_node_sends_nothing_when_few_have_shared():
    session, parties = run_session(some_vectors(6), lost={"share": [3, 4, 5], "masked": [0, 1, 2]})
    received = session.masked_request(0)["received"]
    assert len(received) == 2
    with pytest.raises(NodeError, match="Too few"):
        parties[0].masked(session.name, received, np.zeros(P, np.int64), np.zeros(3, np.int64), 32)


def test_a_share_of_another_session_is_not_used():
    old, _ = run_session(some_vectors(4, seed=2), lost={"reveal": range(4)})
    session, parties = run_session(some_vectors(4), lost={"masked": range(4)})
    received = {**session.masked_request(0)["received"], "1": old.shares[1]["0"]}
    parties[0].masked(session.name, received, np.zeros(P, np.int64), np.zeros(3, np.int64), 32)
    shares = parties[0].reveal(session.name, [0, 1, 2], [3])
    assert (set(shares["self"]), set(shares["pairwise"])) == ({"0", "2"}, {"3"})


def test_a_share_that_was_sealed_for_another_party_is_not_used(monkeypatch):
    """A share of another session or party is rejected, even if a peer encrypted it with the right key."""
    session, parties = run_session(some_vectors(4), lost={"masked": range(4)})
    key = parties[1].memory["sealing"]["0"].encode()
    another = "x" * len(session.name)  # the same length: only the comparison of the names can tell them apart
    sealed = secure_aggregation.encrypt(key, f"{another} 1 0 AAAA AAAA".encode()).decode()
    received = {**session.masked_request(0)["received"], "1": sealed}
    parties[0].masked(session.name, received, np.zeros(P, np.int64), np.zeros(3, np.int64), 32)
    assert set(parties[0].reveal(session.name, [0, 1, 2], [3])["self"]) == {"0", "2"}


def test_a_vector_that_was_late_stays_hidden():
    """The server has the pairwise keys of a dropped party. If its vector arrives late, the self mask still hides it."""
    vectors = some_vectors(5)
    session, parties = run_session(vectors, lost={"masked": [4]})
    session.total()  # the pairwise masks of party 4 are known to the server now
    late, _ = parties[4].masked(
        session.name, session.masked_request(4)["received"], vectors[4], np.zeros(3, np.int64), 32
    )
    key = secure_aggregation._private_key(session._combined({4: "pairwise"})[4])
    for other in range(4):
        public = secure_aggregation._public_key(secure_aggregation._from_base64(session.keys[other]["pairwise"]))
        late = late + mask(secure_aggregation.generate_shared_key(key, public), session.name, 32, P, E)[0]
    assert (late.view(np.int32) != vectors[4]).mean() > 0.9


@pytest.mark.parametrize("lost", [[], [4]])
def test_wrong_shares_of_one_holder_are_left_out(lost):
    vectors = some_vectors(8)
    session, _ = run_session(vectors, lost={"masked": lost})
    for shares in session.revealed.values():
        for by_holder in shares.values():
            by_holder[0] = by_holder[0][:-1] + bytes([by_holder[0][-1] ^ 1])
    np.testing.assert_array_equal(session.total()[0], np.delete(vectors, lost, axis=0).sum(axis=0))
    assert not session.suspects


def test_a_holder_of_one_wrong_share_is_still_asked_for_the_others():
    """Holder 0 lies about party 1. Exactly as many holders as needed hold shares of party 2, and 0 is one of them."""
    vectors = some_vectors(8)
    session, _ = run_session(vectors)
    shares = session.revealed["self"]
    shares[1][0] = shares[1][0][:-1] + bytes([shares[1][0][-1] ^ 1])
    shares[2] = dict(list(shares[2].items())[: secure_aggregation.threshold(len(session.neighbours(2)))])
    assert 0 in shares[2]
    np.testing.assert_array_equal(session.total()[0], vectors.sum(axis=0))
    assert not session.suspects


def test_wrong_shares_of_many_holders_make_nobody_a_suspect():
    session, _ = run_session(some_vectors(6))
    for by_holder in session.revealed["self"].values():
        by_holder.update({n: by_holder[n][:-1] + b"?" for n in (0, 1, 2)})
    with pytest.raises(NodeError, match="do not fit together"):
        session.total()
    assert not session.suspects


def test_wrong_shares_and_vectors_are_noticed():
    session, _ = run_session(some_vectors(5))
    session.revealed["self"][1] = {n: share[:-1] + b"?" for n, share in session.revealed["self"][1].items()}
    with pytest.raises(NodeError, match="cannot be known"):
        session.total()
    assert session.suspects == {1}
    for wrong in (np.zeros(P + 1, np.uint32), np.zeros(P), None):
        with pytest.raises(NodeError, match="another length"):
            session.add_vector(0, wrong, np.zeros(E, np.uint64))
    for wrong in (np.zeros(E + 1, np.uint64), np.zeros(E), np.zeros((1, E), np.uint64), [0] * E, None):
        with pytest.raises(NodeError, match="another length"):
            session.add_vector(0, np.zeros(P, np.uint32), wrong)  # pyright: ignore[reportArgumentType]
    with pytest.raises(NodeError, match="point of the curve"):
        session.add_keys(9, {"encryption": "AAAA", "pairwise": "AAAA"})


def test_shares_for_or_of_other_parties_than_asked_are_refused():
    session, parties = run_session(some_vectors(5), lost={"reveal": range(5)})
    sent, asked = dict(session.shares[0]), session.reveal_request(0)
    for wrong in ({**sent, "9": "x"}, {n: s for n, s in sent.items() if n != "1"}, {**sent, "0": "x"}, None, [*sent]):
        with pytest.raises(NodeError, match="other parties than its neighbours"):
            session.add_shares(0, {"shares": wrong, "commitment": "x"})
    good = parties[0].reveal(session.name, asked["survivors"], asked["dropped"])
    other = next(iter(good["self"].values()))
    for wrong in (
        {"self": {**good["self"], "9": other}},
        {"pairwise": {"1": other}},
        {"self": None},
        {"pairwise": [1]},
    ):
        with pytest.raises(NodeError, match="other parties than it was asked for"):
            session.add_revealed(0, {**good, **wrong})
    assert 0 not in session.answered
    session.add_revealed(0, good)
    assert 0 in session.answered


def test_shares_that_cannot_belong_together_give_no_secret():
    shares = create_shares(b"s" * 32, 3, 5)
    assert combine(shares[:3]) == combine(shares[2:]) == b"s" * 32
    zero = (0).to_bytes(4, "little") + shares[0][4:]
    for wrong in ([shares[0], shares[0], shares[1]], [zero, *shares[1:3]], [shares[0], shares[1], shares[2][:-1]]):
        with pytest.raises(ValueError, match="different secrets"):
            combine(wrong)


def test_no_sum_of_any_cohort_can_wrap():
    assert modulus_bits(512, True) == 32  # 512 * 2^21 = 2^30
    assert modulus_bits(513, True) == 64
    assert modulus_bits(3, False) == 64
    users, std = 400, 2.0**22
    assert modulus_bits(users, True, std, 10**6, 900) == 32
    deviations = (2**30 - users * 2**21 - 900 / 2) / std
    assert 2 * 10**6 * np.exp(-(deviations**2) / 2) * 2**20 < 2.0**-40  # over a million rounds
    assert modulus_bits(users, True, 2.0**25, 10**6) == 64
    assert modulus_bits(512, True, 0.0, 1, 2) == 64


@pytest.mark.parametrize("bits", [32, 64])
def test_two_sums_that_differ_by_n_are_at_most_n_apart(bits):
    """Also if hostile parties moved the sum to the end of the range."""
    end = 2 ** (bits - 2)
    for at in (0, end, 2 * end, 3 * end, 4 * end):
        around = np.array([(at + step) % 2**bits for step in range(-70, 71)], np.dtype(f"<u{bits // 8}"))
        integers = folded(around, bits)
        for n in range(1, 60):
            assert np.abs(integers[n:] - integers[:-n]).max() <= n
        assert np.abs(integers).max() <= end
    honest = np.array([-end, -5, 0, 7, end])
    np.testing.assert_array_equal(folded(honest.astype(f"<i{bits // 8}").view(f"<u{bits // 8}"), bits), honest)


def test_every_secret_of_every_session_is_drawn_by_itself():
    seeds = []
    for name in ("session number 1", "session number 1", "session number 2"):  # the server chooses the name
        party = Party({})
        public = party.keys(name)
        assert len(set(public.values())) == 2
        seeds += party.memory["seeds"].values()
    assert len(set(seeds)) == 9
    first, second = (create_shares(b"s" * 31, 3, 5) for _ in range(2))
    assert not set(first) & set(second)


@pytest.mark.parametrize("secret", ["pairwise", "self"])
def test_a_mask_follows_from_each_of_a_partys_secrets_and_not_from_what_the_server_knows(secret):
    session, parties = run_session(some_vectors(5), lost={"masked": range(5)})
    received, sent = session.masked_request(0)["received"], []
    for seed in (None, secure_aggregation._to_base64(os.urandom(31))):
        memory = json.loads(json.dumps(parties[0].memory))
        memory["seeds"][secret] = seed or memory["seeds"][secret]
        sent.append(Party(memory).masked(session.name, received, np.zeros(P, np.int64), np.zeros(E, np.int64), 32)[0])
    assert (sent[0] != sent[1]).all()


def test_each_block_of_a_secret_is_shared_by_itself():
    """With the same coefficients for both blocks, one share would reveal the difference of the two blocks of the secret."""
    secret, draws = bytes(range(31)), 20
    for holder in range(3):
        blocks = [create_shares(secret, 2, 3)[holder][4:] for _ in range(draws)]
        apart = {int.from_bytes(block[:16]) ^ int.from_bytes(block[16:]) for block in blocks}
        assert len(apart) == draws
        assert len({block[:16] for block in blocks} | {block[16:] for block in blocks}) == 2 * draws


@pytest.mark.parametrize("more", ["num_users", "noise_std", "num_parameters", "num_nodes"])
def test_the_modulus_is_wide_enough_for_users_noise_coordinates_and_nodes(more):
    """A sum of at most 2^30 needs 32 bits. One more user, node or coordinate, or more noise, needs 64."""
    deviations = math.sqrt(2 * math.log(2 / secure_aggregation.WRAP_PROBABILITY))
    fits = {"num_users": 100, "noise_std": (2**30 - 100 * 2**21) / deviations - 1, "num_parameters": 1, "num_nodes": 2}
    assert secure_aggregation.modulus_bits(is_noised=True, **fits) == 32
    larger = {"num_users": 101, "noise_std": fits["noise_std"] + 1, "num_parameters": 2, "num_nodes": 40}
    assert secure_aggregation.modulus_bits(is_noised=True, **{**fits, more: larger[more]}) == 64


@pytest.mark.parametrize("bits", [32, 64])
def test_no_number_of_a_masks_stream_hides_two_values(bits):
    """This includes the values besides the coordinates. The difference of two values under the same mask would be visible."""
    units, extra = mask(bytes(31), "a session of a round", bits, 500, 20)
    drawn = np.concatenate([units.view("<u4"), extra.view("<u4")])
    assert (units.shape, extra.shape) == ((500,), (20,))
    assert len(np.unique(drawn)) == len(drawn)


def test_neighbours_are_drawn_anew_in_each_session(monkeypatch):
    monkeypatch.setattr(secure_aggregation, "NEIGHBOURS", 4)
    seen = set()
    for _ in range(8):
        session = Session(bits=32, count=P, extras=E)
        session.keys = {i: {} for i in range(30)}
        seen.add(tuple(session.neighbours(0)))
    assert len(seen) > 4


def test_shares_of_another_secret_are_noticed():
    """The wrong shares are consistent with each other, so only the commitment or the public key shows the error."""
    for kind, party in (("self", 1), ("pairwise", 2)):
        session, _ = run_session(some_vectors(5), lost={"masked": [2]})
        others = create_shares(os.urandom(31), 3, 5)
        session.revealed[kind][party] = {n: others[i] for i, n in enumerate(session.revealed[kind][party])}
        with pytest.raises(NodeError, match="do not fit together"):
            session.total()
        assert session.suspects == {party}


def test_a_new_session_keeps_nothing_of_one_that_was_not_finished():
    party = Party({"session": "before", "own": 3, "received": {"4": "a share"}, "threshold": 2, "mask": "secret"})
    party.keys("s" * 16)
    assert set(party.memory) == {"session", "stage", "seeds", "public"}
    assert (party.memory["session"], party.memory["stage"]) == ("s" * 16, "keys")
