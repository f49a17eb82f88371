"""Noise that is drawn ahead: it is given complete or not at all, to the attempt that it belongs to, from an unused stream."""

import numpy as np
import pytest
import torch

from tests.kernels import needs_triton
from unheard.mechanism import noise as noise_module
from unheard.mechanism.aggregation import BoundedAverage
from unheard.mechanism.correlated import CorrelatedNoise, CorrelatedNormals, NoiseHistory
from unheard.mechanism.noise import WIDEST_ON_GPU, ExactNormalsAhead, NormalsAhead, standard_normals
from unheard.privacy.matrix_factorization import optimise
from unheard.randomness import StreamPart, reproducible_generator, split_stream

CPU = torch.device("cpu")
BLOCKS, SIZE = 6, 100
DRAWS = {
    "float64, ahead": lambda rng: NormalsAhead(rng, BLOCKS * SIZE, CPU).take(BLOCKS * SIZE),
    "float64, at once": lambda rng: standard_normals(rng, BLOCKS * SIZE, CPU),
    "integers, ahead": lambda rng: ExactNormalsAhead(rng, BLOCKS * SIZE, CPU, 4.0).take(BLOCKS * SIZE, 4.0),
    "integers, at once": lambda rng: ExactNormalsAhead(rng, BLOCKS * SIZE, CPU).take(BLOCKS * SIZE, 4.0),
}


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(noise_module, "NORMALS_PER_BLOCK", SIZE)
    monkeypatch.setattr(noise_module, "EXACT_NORMALS_PER_BLOCK", SIZE)


@pytest.mark.parametrize("failing", [None, 0, 1, BLOCKS - 1])
@pytest.mark.parametrize("kind", DRAWS)
def test_noise_of_which_one_block_could_not_be_drawn_is_not_given(small_blocks, monkeypatch, kind, failing):
    """The memory of such a block has other content, such as zeros, which would be released as noise."""
    real = StreamPart._begin

    def begin(part, rng):
        if part._number == failing:
            raise MemoryError("made by a test")
        return real(part, rng)

    monkeypatch.setattr(StreamPart, "_begin", begin)
    if failing is None:
        assert len(DRAWS[kind](reproducible_generator(1))) == BLOCKS * SIZE
    else:
        with pytest.raises(MemoryError):
            DRAWS[kind](reproducible_generator(1))


@needs_triton
@pytest.mark.parametrize(
    ("drawn", "scale", "count", "is_on_gpu"),
    [
        (0, 4.0, 50, True),
        (0, WIDEST_ON_GPU, 50, True),
        (0, 2 * WIDEST_ON_GPU, 50, False),
        (0, 4.0, 0, False),
        *((drawn, 4.0, 50, False) for drawn in (1, 2, 8, 16)),
    ],
)
def test_a_gpu_draws_from_new_streams_only_and_only_what_float64_mostly_decides(
    monkeypatch, drawn, scale, count, is_on_gpu
):
    """A GPU counts from the beginning of the stream: it would repeat the numbers that were drawn before."""
    from unheard.mechanism import noise_kernels

    asked = []

    def on_gpu(device, parts, per_part, count, scale):
        asked.append((len(parts), per_part, count, scale))
        return lambda: torch.zeros(count, dtype=torch.int64)

    monkeypatch.setattr(noise_module, "has_kernels", lambda device: True)
    monkeypatch.setattr(noise_kernels, "rounded_normals_on", on_gpu)
    monkeypatch.setattr(noise_module, "EXACT_NORMALS_PER_BLOCK", 20)
    rng = reproducible_generator(1)
    rng.bit_generator.random_raw(drawn)
    ExactNormalsAhead(rng, count, CPU, scale).take(count, scale)
    assert asked == ([(3, 20, count, scale)] if is_on_gpu else [])


@pytest.mark.parametrize("parts", [1, 3])
def test_round_keys_are_refused_after_any_number_of_draws_before_the_split(parts):
    """Also after whole buffers of numbers, when no number that was computed is left."""
    for drawn in range(40):
        rng = reproducible_generator(1)
        rng.bit_generator.random_raw(drawn)
        first = split_stream(rng, parts)[0]
        if drawn == 0:
            assert len(first.round_keys()) == 44
        else:
            with pytest.raises(RuntimeError, match="does not begin where"):
                first.round_keys()


@pytest.mark.parametrize("strategy", ["banded", "blt"])
@pytest.mark.parametrize("moved_to", [0, 1, 2, 3, 5])
def test_correlated_noise_is_given_at_the_index_of_its_own_attempt_only(strategy, moved_to):
    history = NoiseHistory(optimise(strategy, rounds=9, separation=3, buffers=2), 4, CPU, index=2)
    normals = CorrelatedNormals(bytes(16), history, 4, CPU)
    history.index = moved_to
    if moved_to == 2:
        assert len(normals.take(4)) == 4
    else:
        with pytest.raises(RuntimeError, match="earlier attempt"):
            normals.take(4)


@pytest.mark.parametrize("strategy", ["banded", "blt"])
def test_the_stated_deviation_of_correlated_noise_is_that_of_its_own_round(strategy):
    """It differs from round to round. The covariance of C^-1 z gives it."""
    matrix, z, sensitivity = optimise(strategy, rounds=6, separation=3, buffers=2), 1.5, 0.25
    noise = CorrelatedNoise(noise_multiplier=z, strategy=strategy, rounds=6, buffers=2)
    column = matrix.column(6)
    dense = np.array([[column[i - j] if i >= j else 0.0 for j in range(6)] for i in range(6)])
    expected = np.linalg.norm(np.linalg.inv(dense), axis=1) * matrix.sensitivity() * z * sensitivity
    assert len(set(expected.round(6))) > 2
    history, average = (
        NoiseHistory(matrix, 3, CPU),
        BoundedAverage(units_P=torch.zeros(3, dtype=torch.int64), unit=2.0**-20, sensitivity=sensitivity),
    )
    stated = [noise.add(average, CorrelatedNormals(bytes(16), history, 3, CPU)).noise_std for _ in range(6)]
    assert stated == pytest.approx(expected)


@pytest.mark.parametrize("strategy", ["banded", "blt"])
def test_a_restored_history_leaves_the_rows_that_it_was_given_unchanged(strategy):
    """An attempt that is repeated begins with the same rows."""
    matrix = optimise(strategy, rounds=9, separation=3, buffers=2)
    rows_RP = torch.randn(NoiseHistory(matrix, 4, CPU).rows.shape, dtype=torch.float64)
    before_RP = rows_RP.clone()
    first, again = (
        NoiseHistory(matrix, 4, CPU, index=2, rows_RP=rows_RP).next(torch.ones(4, dtype=torch.float64))
        for _ in range(2)
    )
    assert torch.equal(rows_RP, before_RP)
    assert torch.equal(first, again)
