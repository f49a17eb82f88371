"""Random generators: AES as published, keyed by the operating system; no two draws share random numbers."""

import hashlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from randomgen import AESCounter

from unheard import randomness
from unheard.randomness import (
    ReproducibleStreams,
    SecureStreams,
    _generator,
    _reproducible_key,
    generator_from_key,
    is_new,
    reproducible_generator,
    secure_generator,
    split_stream,
)


def test_the_generator_is_aes_128_as_published_in_fips_197():
    key = bytes.fromhex("000102030405060708090a0b0c0d0e0f")
    plain = bytes.fromhex("00112233445566778899aabbccddeeff")
    generator = AESCounter(key=int.from_bytes(key, "little"), counter=int.from_bytes(plain, "little"))
    assert generator.random_raw(2).tobytes().hex() == "69c4e0d86a7b0430d8cdb78070b4c55a"


def test_the_generator_is_aes_in_counter_mode_block_after_block():
    key = bytes(range(100, 116))
    ours = AESCounter(key=int.from_bytes(key, "little")).random_raw(2 * 1000).tobytes()
    cipher = Cipher(algorithms.AES(key), modes.ECB()).encryptor()
    assert ours == b"".join(cipher.update(i.to_bytes(16, "little")) for i in range(1000))


def test_the_parts_of_a_stream_are_the_same_cipher_with_counters_far_apart():
    key = bytes(range(100, 116))
    cipher = Cipher(algorithms.AES(key), modes.ECB()).encryptor()
    rng = _generator(key)
    for part, stream in enumerate([*(part.generator() for part in split_stream(rng, 3)), rng]):
        first = part << 63  # 2^64 numbers of 64 bits are 2^63 blocks of the cipher
        expected = b"".join(cipher.update((first + i).to_bytes(16, "little")) for i in range(50))
        assert stream.bit_generator.random_raw(100).tobytes() == expected


def test_a_part_of_a_stream_begins_where_the_stream_is():
    rng, same = reproducible_generator(1), reproducible_generator(1)
    rng.standard_normal(7), same.standard_normal(7)
    first, _ = split_stream(rng, 2)
    assert np.array_equal(first.generator().standard_normal(5), same.standard_normal(5))


def test_a_part_of_a_stream_gives_its_numbers_once():
    for part in split_stream(reproducible_generator(1), 3):
        part.standard_normal(np.empty(5))
        with pytest.raises(RuntimeError, match="already"):
            part.standard_normal(np.empty(5))
        with pytest.raises(RuntimeError, match="already"):
            part.generator()


def test_further_numbers_of_a_part_are_apart_from_its_own_and_from_each_other():
    """Further numbers of the index i begin (i + 1) 2^32 numbers after the part, which is (i + 1) 2^31 blocks."""
    key = bytes(range(100, 116))
    cipher = Cipher(algorithms.AES(key), modes.ECB()).encryptor()
    for number, part in enumerate(split_stream(_generator(key), 3)):
        part.generator()  # they do not depend on what was drawn before
        for index in (0, 1, 7, 2**31 - 1):
            first = (number << 63) + ((index + 1) << 31)
            expected = b"".join(cipher.update((first + i).to_bytes(16, "little")) for i in range(3))
            drawn = np.array([part.further(index, extra) for extra in range(6)], np.uint64)
            assert drawn.tobytes() == expected


def test_round_keys_are_given_once_and_for_the_first_part_of_a_new_stream():
    first, second = split_stream(reproducible_generator(1), 2)
    assert len(first.round_keys()) == 44
    with pytest.raises(RuntimeError, match="already"):
        first.round_keys()
    with pytest.raises(RuntimeError, match="does not begin where"):
        second.round_keys()


def test_a_stream_is_new_until_something_is_drawn():
    rng = reproducible_generator(1)
    assert is_new(rng)
    rng.integers(5)
    assert not is_new(rng)
    moved = reproducible_generator(1)
    split_stream(moved, 1)
    assert not is_new(moved)
    assert not is_new(np.random.default_rng(0))


def test_normals_of_a_part_are_those_of_its_generator_also_when_threads_draw_at_the_same_time():
    expected = [part.generator().standard_normal(10_000) for part in split_stream(reproducible_generator(1), 40)]
    out = np.empty((40, 10_000))
    with ThreadPoolExecutor(8) as threads:
        parts = split_stream(reproducible_generator(1), 40)
        list(threads.map(lambda k: parts[k].standard_normal(out[k]), range(40)))
    assert np.array_equal(out, expected)


def test_a_secure_generator_takes_its_whole_key_from_the_operating_system(monkeypatch: pytest.MonkeyPatch):
    asked = []
    monkeypatch.setattr(randomness.os, "urandom", lambda n: asked.append(n) or bytes(range(n)))
    drawn = secure_generator().bit_generator.random_raw(4).tobytes()
    assert asked == [16]
    assert drawn == AESCounter(key=int.from_bytes(bytes(range(16)), "little")).random_raw(4).tobytes()


@pytest.mark.parametrize("purpose", ["sampling", "batches", "noise"])
def test_secure_streams_never_repeat_even_for_the_same_attempt(purpose: str):
    draw = getattr(SecureStreams(), purpose)
    assert len({draw(0).integers(2**63) for _ in range(50)}) == 50


def test_reproducible_streams_repeat_for_one_attempt_and_purpose_and_for_nothing_else():
    streams = ReproducibleStreams(seed=1)
    assert streams.noise(3).integers(2**63) == ReproducibleStreams(seed=1).noise(3).integers(2**63)
    for purpose in (streams.sampling, streams.batches, streams.noise):
        assert len({purpose(attempt).integers(2**63) for attempt in range(20)}) == 20
    drawn = [
        streams.noise(3),
        streams.noise(4),
        streams.sampling(3),
        streams.batches(3),
        ReproducibleStreams(seed=2).noise(3),
    ]
    assert len({g.integers(2**63) for g in drawn}) == 5


def test_noise_keys_of_secure_streams_are_fresh_and_those_of_a_seed_repeat():
    secure, seeded = SecureStreams(), ReproducibleStreams(seed=1, scope="a")
    assert len({secure.noise_key(0) for _ in range(50)} | {secure.groups_key(0) for _ in range(50)}) == 100
    assert generator_from_key(seeded.noise_key(3)).integers(2**63) == seeded.noise(3).integers(2**63)
    keys = {seeded.noise_key(3), seeded.noise_key(4), seeded.groups_key(3)}
    assert len(keys | {ReproducibleStreams(seed=1, scope="b").noise_key(3)}) == 4
    with pytest.raises(ValueError, match="16 bytes"):
        generator_from_key(b"short")


def test_global_seeds_move_nothing():
    def draw() -> float:
        torch.manual_seed(0)
        np.random.seed(0)
        return secure_generator().standard_normal()

    assert draw() != draw()


def test_labels_do_not_run_together():
    assert reproducible_generator(1, "a", "bc").integers(2**63) != reproducible_generator(1, "ab", "c").integers(2**63)


def test_a_seed_is_not_shown_when_streams_are_printed():
    assert "12345" not in repr(ReproducibleStreams(seed=12345))


def test_the_key_of_a_seeded_stream_is_the_first_half_of_a_hash_of_seed_and_labels():
    for seed, labels in ((0, ()), (2**40 + 1, ("a",)), (-7, ("a", "noise", 12, "b"))):
        text = "\x1f".join(map(str, (seed, *labels)))
        assert _reproducible_key(seed, *labels) == hashlib.sha256(text.encode()).digest()[:16]


EVERY_PURPOSE = ["sampling", "batches", "noise", "count", "noise_key", "groups_key"]


@pytest.mark.parametrize("purpose", EVERY_PURPOSE)
def test_no_two_of_a_thousand_attempts_of_a_seeded_run_share_a_key(monkeypatch, purpose):
    monkeypatch.setattr(randomness, "_generator", lambda key: key)
    keys = [getattr(ReproducibleStreams(seed=1, scope="a"), purpose)(attempt) for attempt in range(1000)]
    assert len(set(keys)) == 1000
    assert {len(key) for key in keys} == {16}


@pytest.mark.parametrize("purpose", EVERY_PURPOSE)
def test_runs_with_shared_cohorts_share_the_keys_of_cohorts_and_batches_alone(monkeypatch, purpose):
    monkeypatch.setattr(randomness, "_generator", lambda key: key)
    one, other = (ReproducibleStreams(seed=1, scope=scope, shared_cohorts=True) for scope in ("a", "b"))
    is_shared = getattr(one, purpose)(3) == getattr(other, purpose)(3)
    assert is_shared == (purpose in ("sampling", "batches"))


def test_a_stream_is_not_new_after_any_number_of_draws_or_parts():
    """Also if a draw ends at the end of a cipher block, or parts reset the lower half of the counter to zero."""
    for drawn in range(1, 40):
        rng = reproducible_generator(1)
        rng.bit_generator.random_raw(drawn)
        assert not is_new(rng), drawn
    for parts in (1, 2, 3, 4, 6, 8):
        rng = reproducible_generator(1)
        split_stream(rng, parts)
        assert not is_new(rng), parts
