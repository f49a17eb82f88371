"""Triton kernels of the noise: draw exact normals, and compute the weighted sum of earlier correlated noise.

**Exact normals** (`rounded_normals_on`): steps 1 and 2 of `exact_normal.py`. Input: a new stream, in parts, and a scale.
Output: round(scale * X) for independent normals X, int64, with exactly this distribution. The reference implementation
is `ExactNormals` in exact_normal.py, which explains each step. Both give the same integers, because the integers depend
only on the random digits.

| step | computes |
| --- | --- |
| `_draw` | the words of AES-128 in counter mode (FIPS 197), which `randomgen.AESCounter` draws on a CPU, and the P of each |
| `torch.special.ndtri` | -x of each P |
| `_round` | scale * x rounded, and a list of the numbers whose rounding float64 cannot decide |
| `round_exactly`, on a CPU | the numbers of that list: about four of the 1.3 million parameters of the paper's model |

**The sum of earlier banded noise** (`weighted_past`). Input: the noise of the last rounds [R, P] on a GPU, as a ring
buffer, and the coefficients. Output: sum_i c_i x_(t - i), float64 [P], in one pass over the buffer. The reference
implementation is `NoiseHistory._past_banded` in correlated.py; a test compares the two bit by bit. Products and sums
are rounded one by one (no fused multiply-add), in the same order as there.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache, lru_cache, partial
from threading import Lock

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from unheard.mechanism.exact_normal import DIGITS, ERROR, LARGEST_X, SMALLEST, check_scale, decided_below, round_exactly
from unheard.parameters import host_memory, to_device
from unheard.randomness import StreamPart

BLOCK = 512
"""What one program (one instance of a kernel) processes: blocks of the cipher (two words each) in `_draw`, words in
`_round`."""
PAST_BLOCK = 2048
"""The number of coordinates that one program of `_past` processes."""
AT_ONCE = 2**24
"""The number of words that are processed at the same time; their intermediate results take 256 MB. It must be a
multiple of the number of integers that are drawn from each part."""


def rounded_normals_on(
    device: torch.device, parts: Sequence[StreamPart], per_part: int, count: int, scale: float, *, error: float = ERROR
) -> Callable[[], Tensor]:
    """Start to draw integers with exactly the distribution of round(scale * N(0, 1)), on a GPU.

    The work is queued on a separate CUDA stream, so it does not wait for the users' updates. No other thread of the
    host takes part: a second thread of the interpreter would slow down the one that trains by more than it saves.

    Args:
        device: The GPU. On a CPU the kernels run in Triton's interpreter.
        parts: The parts of a new stream, in order.
        per_part: The number of integers to draw from each part; must be even.
        count: The total number of integers.
        scale: As in `exact_normal.rounded_normals`.
        error: As in `exact_normal.rounded_normals`.

    Returns:
        A function that waits for the draw and returns the integers, int64 [count], for use on the current CUDA stream.
        It raises `RuntimeError` if float64 cannot decide far more numbers than expected.

    Raises:
        RuntimeError: The stream was drawn from before.
    """
    check_scale(scale)
    # The space for numbers that float64 cannot decide: four times the expected number, and 64 more, rounded up so that
    # similar scales use the same memory.
    share = 2 * SMALLEST * 2.0**-DIGITS + 2 * (1 + LARGEST_X) * error * scale
    most = min(count, 1 << (int(4 * count * share) + 63).bit_length())
    numbers = np.empty(24)
    numbers[:2] = scale, decided_below(scale, error)
    numbers[2:] = parts[0].round_keys().view(np.float64)
    is_kept, stream = count <= AT_ONCE, _noise_stream(device)
    with _LOCK, torch.cuda.stream(stream) if stream is not None else nullcontext():
        kernels = _kept(device, per_part, count, most) if is_kept else _Kernels(device, per_part, count, most)
        kernels.queue(numbers)
        # DP: the next draw overwrites the memory of this one, so the caller gets a copy.
        rounded_P = kernels.rounded_P.clone() if is_kept else kernels.rounded_P
        listed = host_memory(tuple(kernels.undecided.shape), torch.int64, device)
        listed.copy_(kernels.undecided, non_blocking=True)
        event = None if stream is None else stream.record_event()

    def finish() -> Tensor:
        """Decide the roundings that float64 cannot decide, and return the integers."""
        if event is not None:
            _wait_for(event, rounded_P)
        number = int(listed[0])
        # DP: a rounding that float64 cannot decide is never taken from float64.
        if number > most:
            raise RuntimeError(
                f"float64 cannot decide the rounding of {number} of {count} numbers, far more than expected. This is a bug."
            )
        exact_2U = np.empty((2, number), np.int64)
        listed_U = zip(listed[1 : 1 + number].tolist(), listed[1 + most : 1 + most + number].tolist(), strict=True)
        for u, (index, word) in enumerate(listed_U):
            part, within = divmod(index, per_part)
            digits_of_p = (word % 2**64) >> 1
            size = round_exactly(digits_of_p, scale, partial(parts[part].further, within), error=error)
            exact_2U[:, u] = index, -size if word & 1 else size
        if number:
            index_U, size_U = to_device(exact_2U, device)
            rounded_P[index_U] = size_U
        return rounded_P

    return finish


def _wait_for(event: torch.cuda.Event, rounded_P: Tensor) -> None:
    """Make a draw on the stream of the noise safe to use on the host and on the current stream.

    Args:
        event: The event at the end of the draw.
        rounded_P: The integers.
    """
    # DP: the host reads the list of undecided numbers only when it is complete.
    event.synchronize()
    stream = torch.cuda.current_stream(rounded_P.device)
    # DP: later operations on this stream wait until all of the noise is drawn.
    stream.wait_event(event)
    rounded_P.record_stream(stream)


_LOCK = Lock()
"""Held by the thread that queues a draw, because draws of the same size share their memory."""


class _Kernels:
    """The kernels of a draw, with their memory.

    On a GPU they are recorded as a CUDA graph, because starting them one by one takes the interpreter longer than they
    take the GPU.

    Args:
        device: As in `rounded_normals_on`.
        per_part: As in `rounded_normals_on`.
        count: As in `rounded_normals_on`.
        most: The largest number of integers that float64 may leave undecided.
    """

    def __init__(self, device: torch.device, per_part: int, count: int, most: int) -> None:
        self.device, self.per_part, self.count, self.most = device, per_part, count, most
        at_once = min(count, AT_ONCE)
        # The scale, the limit of step 2 and the 44 round keys. They are passed in memory, because Triton would pass
        # float arguments of a kernel in float32.
        self.numbers = torch.empty(24, dtype=torch.float64, device=device)
        self.word_L = torch.empty(at_once, dtype=torch.int64, device=device)
        self.value_L = torch.empty(at_once, dtype=torch.float64, device=device)
        self.rounded_P = torch.empty(count, dtype=torch.int64, device=device)
        # The count of undecided numbers, then their indices, then their words.
        self.undecided = torch.empty(1 + 2 * most, dtype=torch.int64, device=device)
        self.graph: torch.cuda.CUDAGraph | None = None

    def queue(self, numbers: np.ndarray) -> None:
        """Queue one draw on the current CUDA stream.

        Args:
            numbers: The content of `self.numbers`.
        """
        self.numbers.copy_(to_device(numbers, self.device), non_blocking=True)
        if self.graph is not None:
            self.graph.replay()
            return
        self._launch()
        if self.device.type == "cuda" and self.count <= AT_ONCE:
            # The first draw has compiled the kernels. Other threads may allocate memory while they are recorded.
            self.graph = torch.cuda.CUDAGraph()
            self.graph.capture_begin(capture_error_mode="thread_local")
            self._launch()
            self.graph.capture_end()

    def _launch(self) -> None:
        """Start the kernels."""
        self.undecided.zero_()
        keys, at_once = self.numbers[2:].view(torch.int32), len(self.word_L)
        for first in range(0, self.count, at_once):
            number = min(at_once, self.count - first)
            _draw[(triton.cdiv(number, 2 * BLOCK),)](
                keys, _mixed_s_box(self.device), self.word_L, self.value_L, first // 2, number,
                PER_PART=self.per_part, UNIT=2.0**-DIGITS, BLOCK=BLOCK, num_warps=4,
            )  # fmt: skip
            torch.special.ndtri(self.value_L, out=self.value_L)
            _round[(triton.cdiv(number, BLOCK),)](
                self.word_L, self.value_L, self.rounded_P, self.undecided, self.numbers, first, number, self.most,
                SMALLEST=2 * SMALLEST, BLOCK=BLOCK, num_warps=4,
            )  # fmt: skip


@lru_cache(maxsize=2)
def _kept(device: torch.device, per_part: int, count: int, most: int) -> _Kernels:
    """Return kernels whose memory is kept for later draws of the same size."""
    return _Kernels(device, per_part, count, most)


@cache
def _noise_stream(device: torch.device) -> torch.cuda.Stream | None:
    """Return the CUDA stream of the noise, one per device; None on a CPU."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None


@cache
def _mixed_s_box(device: torch.device) -> Tensor:
    """Return the lookup table of AES: for each byte a the column (2 S(a), S(a), S(a), 3 S(a)), lowest byte first.

    S and the product by 2 in GF(2^8) are those of FIPS 197, sections 4.2 and 5.1.1.
    """
    power, log = [1], {1: 0}
    for k in range(1, 255):  # the powers of 3, which generates the multiplicative group
        power.append(power[-1] ^ _doubled(power[-1]))
        log[power[-1]] = k
    table = np.empty(256, np.uint32)
    for a in range(256):
        inverse = power[-log[a] % 255] if a else 0
        s = 0x63
        for shift in range(5):
            s ^= (inverse << shift | inverse >> (8 - shift)) & 255
        table[a] = _doubled(s) | s << 8 | s << 16 | (_doubled(s) ^ s) << 24
    return torch.from_numpy(table.view(np.int32)).to(device)


def _doubled(a: int) -> int:
    """Return 2 a in GF(2^8), the field of AES."""
    return (a << 1) ^ (0x11B if a & 0x80 else 0)


@triton.jit
def _entry(table, byte):
    """Return the entry of the table for the lowest 8 bits of `byte`."""
    return tl.load(table + (byte & 255).to(tl.int32)).to(tl.uint32, bitcast=True)


@triton.jit
def _column(table, a, b, c, d, key):
    """Compute one column of the AES state after SubBytes, ShiftRows, MixColumns and AddRoundKey."""
    second, third, fourth = _entry(table, b >> 8), _entry(table, c >> 16), _entry(table, d >> 24)
    mixed = _entry(table, a) ^ (second << 8 | second >> 24) ^ (third << 16 | third >> 16) ^ (fourth << 24 | fourth >> 8)
    return mixed ^ tl.load(key).to(tl.uint32, bitcast=True)


@triton.jit
def _last_column(table, a, b, c, d, key):
    """Compute one column of the AES state after the last round, which has no MixColumns."""
    first, second = (_entry(table, a) >> 8) & 255, _entry(table, b >> 8) & 0xFF00
    third, fourth = (_entry(table, c >> 16) << 8) & 0xFF0000, (_entry(table, d >> 24) << 16) & 0xFF000000
    return first ^ second ^ third ^ fourth ^ tl.load(key).to(tl.uint32, bitcast=True)


@triton.jit
def _draw(
    keys, table, words, probabilities, first, count,
    PER_PART: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Encrypt the counters from `first` on. Each block of the cipher gives two words; each word gives one P."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    part, within = (first + i) // (PER_PART // 2), (first + i) % (PER_PART // 2)
    # DP: the counter of each part begins 2^63 blocks after that of the previous part, so that no two coordinates share
    # a word.
    low, high = within | ((part & 1) << 63), part >> 1
    s0 = low.to(tl.uint32) ^ tl.load(keys).to(tl.uint32, bitcast=True)
    s1 = (low >> 32).to(tl.uint32) ^ tl.load(keys + 1).to(tl.uint32, bitcast=True)
    s2 = high.to(tl.uint32) ^ tl.load(keys + 2).to(tl.uint32, bitcast=True)
    s3 = (high >> 32).to(tl.uint32) ^ tl.load(keys + 3).to(tl.uint32, bitcast=True)
    for r in range(1, 10):
        key = keys + 4 * r
        t0 = _column(table, s0, s1, s2, s3, key)
        t1 = _column(table, s1, s2, s3, s0, key + 1)
        t2 = _column(table, s2, s3, s0, s1, key + 2)
        t3 = _column(table, s3, s0, s1, s2, key + 3)
        s0, s1, s2, s3 = t0, t1, t2, t3
    t0 = _last_column(table, s0, s1, s2, s3, keys + 40).to(tl.uint64)
    t1 = _last_column(table, s1, s2, s3, s0, keys + 41).to(tl.uint64)
    t2 = _last_column(table, s2, s3, s0, s1, keys + 42).to(tl.uint64)
    t3 = _last_column(table, s3, s0, s1, s2, keys + 43).to(tl.uint64)
    _store(words, probabilities, 2 * i, t0 | t1 << 32, count, UNIT)
    _store(words, probabilities, 2 * i + 1, t2 | t3 << 32, count, UNIT)


@triton.jit
def _store(words, probabilities, i, word, count, UNIT: tl.constexpr):
    """Store a random word and the P of its number. The last bit is the sign; the other bits are the first digits of P."""
    tl.store(words + i, word.to(tl.int64, bitcast=True), mask=i < count)
    tl.store(probabilities + i, ((word >> 1).to(tl.float64) + 0.5) * UNIT, mask=i < count)


@triton.jit
def _round(
    words, values, rounded, undecided, limits, first, count, most,
    SMALLEST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Round scale * x, and list the numbers whose rounding float64 cannot decide.

    `values` has -x. The results are stored from index `first` on.
    """
    scale, decided_below = tl.load(limits), tl.load(limits + 1)
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    word = tl.load(words + i, mask=inside, other=0)
    scaled = -tl.load(values + i, mask=inside, other=0.0) * scale
    size = tl.floor(scaled + 0.5)
    # DP: a rounding that float64 cannot decide is decided exactly; a comparison with NaN is false, so a NaN is listed
    # too.
    decided = (tl.abs(scaled - size) < decided_below) & (word.to(tl.uint64, bitcast=True) >= SMALLEST)
    # DP: the sign is a fair coin, a bit that is not a digit of P.
    tl.store(rounded + first + i, tl.where((word & 1) == 1, -size, size).to(tl.int64), mask=inside)
    listed = inside & (decided == 0)
    slot = tl.atomic_add(undecided + tl.zeros([BLOCK], tl.int64), 1, mask=listed)
    tl.store(undecided + 1 + slot, first + i, mask=listed & (slot < most))
    tl.store(undecided + 1 + most + slot, word, mask=listed & (slot < most))


def weighted_past(rows_RP: Tensor, coefficient_L: Tensor, index: int) -> Tensor:
    """Compute the weighted sum of earlier noise.

    It is the sum over lags 1 to L of coefficient[lag - 1] * rows[(index - lag) mod R].

    Args:
        rows_RP: A ring buffer of the noise of the last R rounds, contiguous.
        coefficient_L: The coefficients of lags 1 to L, on the same device; L is at most R.
        index: The number of the next attempt.

    Returns:
        The sum, float64 [P].
    """
    rows, parameters = rows_RP.shape
    past_P = torch.empty(parameters, dtype=torch.float64, device=rows_RP.device)
    grid = (triton.cdiv(parameters, PAST_BLOCK),)
    _past[grid](
        rows_RP, coefficient_L, past_P, index % rows, rows, len(coefficient_L), parameters,
        BLOCK=PAST_BLOCK, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return past_P


@triton.jit
def _past(rows, coefficients, past, index, num_rows, lags, parameters, BLOCK: tl.constexpr):
    """Compute `BLOCK` coordinates of the weighted sum of earlier noise."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < parameters
    total = tl.zeros((BLOCK,), dtype=tl.float64)
    for lag in range(1, lags + 1):
        row = ((index - lag + num_rows) % num_rows).to(tl.int64)
        noise = tl.load(rows + row * parameters + at, mask=inside, other=0.0)
        product = noise * tl.load(coefficients + lag - 1)
        # DP: the noise of the last rounds, each with its own coefficient, as in correlated.py.
        total = total + product
    tl.store(past + at, total, mask=inside)
