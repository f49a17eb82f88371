"""Exact normals of a GPU equal those of a CPU, bit for bit. (Without a GPU: Triton's interpreter.)"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from tests.kernels import KERNEL_DEVICE, needs_triton, quietly

from unheard.mechanism import noise as noise_module
from unheard.mechanism.exact_normal import SMALLEST, exact_normals
from unheard.mechanism.noise import ExactNormalsAhead
from unheard.randomness import generator_from_key, reproducible_generator, secure_generator, split_stream

pytestmark = [needs_triton, quietly]
PER_PART = 600


@pytest.fixture
def kernels():
    from unheard.mechanism import noise_kernels

    return noise_kernels


def parts_of(rng, count):
    return split_stream(rng, -(-count // PER_PART))


def on_cpu(rng, count, scale):
    blocks = [min(PER_PART, count - start) for start in range(0, count, PER_PART)]
    return np.concatenate(
        [exact_normals(part, n).rounded(scale) for part, n in zip(parts_of(rng, count), blocks, strict=True)]
    )


def draw(kernels, rng, count, scale, **settings):
    return kernels.rounded_normals_on(KERNEL_DEVICE, parts_of(rng, count), PER_PART, count, scale, **settings)().cpu()


def drawn_words(kernels, key, count, per_part=PER_PART):
    """Return the words of a stream as the kernel draws them, and the P of each."""
    words = torch.empty(count, dtype=torch.int64, device=KERNEL_DEVICE)
    values = torch.empty(count, dtype=torch.float64, device=KERNEL_DEVICE)
    round_keys = split_stream(generator_from_key(key), 1)[0].round_keys()
    kernels._draw[(-(-count // (2 * kernels.BLOCK)),)](
        torch.from_numpy(round_keys.view(np.int32)).to(KERNEL_DEVICE),
        *(kernels._mixed_s_box(KERNEL_DEVICE), words, values, 0, count),
        PER_PART=per_part,
        UNIT=2.0**-64,
        BLOCK=kernels.BLOCK,
    )
    return words.cpu().numpy().view(np.uint64), values.cpu().numpy()


def test_the_words_are_aes_128_as_published_in_fips_197_and_sp_800_38a(kernels):
    """FIPS 197, appendix A.1 (key expansion), and SP 800-38A's key: the counters 0, 1, … as `cryptography` encrypts them."""
    key = bytes.fromhex("2b7e151628aed2a6abf7158809cf4f3c")
    round_keys = split_stream(generator_from_key(key), 1)[0].round_keys()
    assert round_keys.tobytes()[-16:].hex() == "d014f9a8c9ee2589e13f0cc8b6630ca6"
    cipher = Cipher(algorithms.AES(key), modes.ECB()).encryptor()
    expected = b"".join(cipher.update(((k // 300 << 63) + k % 300).to_bytes(16, "little")) for k in range(700))
    assert drawn_words(kernels, key, 1400)[0].tobytes() == expected


def test_the_table_of_the_cipher_has_the_s_box_of_fips_197(kernels):
    column = kernels._mixed_s_box(torch.device("cpu")).numpy().view(np.uint8).reshape(256, 4)
    assert [hex(s) for s in column[[0x00, 0x01, 0x53, 0xFF], 1]] == ["0x63", "0x7c", "0xed", "0x16"]
    assert sorted(column[:, 1].tolist()) == list(range(256))


def test_p_is_the_middle_of_the_numbers_that_begin_with_the_digits(kernels):
    words, values = drawn_words(kernels, bytes(range(16)), 900)
    assert np.array_equal(values, ((words >> np.uint64(1)) + 0.5) * 2.0**-64)


@pytest.mark.parametrize("at_once", [2**24, 2 * PER_PART])
@pytest.mark.parametrize("scale", [0.4, 3.0, 2.0**21.3, 2.0**30])
def test_a_gpu_draws_the_integers_that_a_cpu_draws(kernels, scale, at_once, monkeypatch):
    monkeypatch.setattr(kernels, "AT_ONCE", at_once)  # also with intermediate results of one part after the other
    expected = on_cpu(reproducible_generator(3), 1501, scale)
    assert np.array_equal(draw(kernels, reproducible_generator(3), 1501, scale), expected)
    # With a large assumed error many numbers are decided exactly, by their further digits.
    assert np.array_equal(
        draw(kernels, reproducible_generator(3), 1501, scale, error=2.0**-6 / max(1, scale)), expected
    )


def test_a_second_draw_of_the_same_size_leaves_the_first_unchanged(kernels):
    """Draws of one size share their memory, and on a GPU a recorded graph. All are started before one is finished."""
    kernels._kept.cache_clear()
    scale, settings = 2.0**21.3, {"error": 2.0**-28}  # with this error some numbers are undecided
    started = [
        kernels.rounded_normals_on(
            KERNEL_DEVICE, parts_of(reproducible_generator(seed), 1501), PER_PART, 1501, scale, **settings
        )
        for seed in range(4)
    ]
    for seed, finish in enumerate(started):
        assert np.array_equal(finish().cpu(), on_cpu(reproducible_generator(seed), 1501, scale))


def test_the_host_and_a_stream_wait_for_the_noise_of_another_stream(kernels, monkeypatch):
    """On a GPU the noise is drawn on a separate CUDA stream."""
    waited, drawn = [], torch.zeros(3)
    stream = SimpleNamespace(wait_event=waited.append)
    event = SimpleNamespace(synchronize=lambda: waited.append("host"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, by: waited.append(by))
    kernels._wait_for(event, drawn)
    assert waited == ["host", event, stream]


def put(kernels, words, values, scale, most=10, below=0.49):
    """Run `_round` on given words and values."""
    count = len(words)
    rounded = torch.empty(count, dtype=torch.int64, device=KERNEL_DEVICE)
    undecided = torch.zeros(1 + 2 * most, dtype=torch.int64, device=KERNEL_DEVICE)
    kernels._round[(1,)](
        torch.tensor(np.array(words, np.uint64).view(np.int64)).to(KERNEL_DEVICE),
        torch.tensor(values, dtype=torch.float64).to(KERNEL_DEVICE),
        *(rounded, undecided, torch.tensor([scale, below], dtype=torch.float64).to(KERNEL_DEVICE), 0, count, most),
        SMALLEST=2 * SMALLEST,
        BLOCK=kernels.BLOCK,
    )
    number = int(undecided[0])
    return rounded.tolist(), sorted(
        zip(undecided[1 : 1 + number].tolist(), undecided[1 + most :].tolist(), strict=False)
    )


def test_what_float64_cannot_decide_is_listed_with_its_word(kernels):
    words = [2**63, 2**63 + 1, 2**62, 2**62 + 1, 2 * SMALLEST - 1, 2 * SMALLEST, 2**60]
    values = [-1.2, -1.2, -1.495, -1.505, -4.0, -4.0, float("nan")]
    rounded, listed = put(kernels, words, values, 1.0)
    assert rounded[:2] == [1, -1]  # the last bit is the sign
    assert listed == [(2, 2**62), (3, 2**62 + 1), (4, 2 * SMALLEST - 1), (6, 2**60)]


def test_more_undecided_numbers_than_expected_are_an_error(kernels, monkeypatch):
    monkeypatch.setattr(kernels, "LARGEST_X", -0.99)  # the expected share is far too small
    with pytest.raises(RuntimeError, match="far more than expected"):
        draw(kernels, reproducible_generator(3), 1501, 3.0, error=0.1)


def test_only_a_new_stream_is_drawn_from_on_a_gpu(kernels):
    used, moved = reproducible_generator(3), reproducible_generator(3)
    used.integers(5)
    split_stream(moved, 1)
    for rng in (used, moved):
        with pytest.raises(RuntimeError, match="does not begin where"):
            draw(kernels, rng, 100, 3.0)
    parts = parts_of(secure_generator(), 100)
    kernels.rounded_normals_on(KERNEL_DEVICE, parts, PER_PART, 100, 3.0)
    with pytest.raises(RuntimeError, match="already"):
        kernels.rounded_normals_on(KERNEL_DEVICE, parts, PER_PART, 100, 3.0)


@pytest.mark.parametrize("scale", [None, 2.0**20])
def test_noise_of_a_round_is_the_same_with_and_without_a_gpu(monkeypatch, scale):
    monkeypatch.setattr(noise_module, "EXACT_NORMALS_PER_BLOCK", PER_PART)
    expected = ExactNormalsAhead(reproducible_generator(4), 1300, torch.device("cpu"), scale).take(1300, 2.0**20)
    monkeypatch.setattr(noise_module, "has_kernels", lambda device: True)
    asked = []
    from unheard.mechanism import noise_kernels

    real = noise_kernels.rounded_normals_on
    monkeypatch.setattr(noise_kernels, "rounded_normals_on", lambda *args: asked.append(args) or real(*args))
    ahead = ExactNormalsAhead(reproducible_generator(4), 1300, KERNEL_DEVICE, scale)
    assert torch.equal(ahead.take(1300, 2.0**20).cpu(), expected.cpu())
    with pytest.raises(RuntimeError, match="taken already"):
        ahead.take(1300, 2.0**20)
    assert len(asked) == 1
    # A stream that was drawn from before, or wide noise, is drawn on the CPU.
    used = reproducible_generator(4)
    used.integers(5)
    ExactNormalsAhead(used, 1300, KERNEL_DEVICE, scale).take(1300, 2.0**20)
    ExactNormalsAhead(reproducible_generator(4), 1300, KERNEL_DEVICE).take(1300, 2.0**31)
    assert len(asked) == 1
