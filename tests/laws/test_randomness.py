"""Who may draw: the generator is AES as published, keyed by the operating system, and never draws the same twice."""

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
    generator_from_key,
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
