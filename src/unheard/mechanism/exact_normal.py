"""Draw exact samples of a Gaussian that is rounded to integers, without the rounding errors of floating point.

`rounded_normals(rng, count, scale)` returns integers with exactly the distribution of `round(scale * X)`, X ~ N(0, 1).
Each rounding is decided from random bits and from bounds on real numbers; if the bounds do not decide, more bits are
drawn. Rounding a Gaussian to a public grid is post-processing, so the accountants of the continuous Gaussian mechanism
hold for the result.

The method is inversion. A fair coin gives the sign of X. The absolute value of X is the number x with Q(x) = P, where P
is uniform in (0, 1/2) and Q(x) is the probability that a normal exceeds x. The first 64 binary digits of P are drawn at
once. Then

    1. x is computed in float64 from these digits, with an error of at most `ERROR` * (1 + x);
    2. if scale * x is farther than this error from the middle between two integers, it is rounded to an integer;
    3. otherwise (about one case in 2^20 at scale 2^22) P is compared with Q at the nearest middles. `mpmath` computes Q
       with as many digits as the comparison needs. If all digits of P are equal to those of Q, more digits of P are
       drawn.

The integer depends only on the digits, not on the rounding errors of step 1. A GPU, which does steps 1 and 2 in
`mechanism/noise_kernels.py`, therefore returns the same integers as this module, and so does any number of threads.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from threading import Lock

import mpmath
import numpy as np
from scipy.special import ndtri

from unheard.randomness import StreamPart, split_stream

ERROR = 2.0**-46
"""The bound on the error of step 1, relative to 1 + x. The largest measured error is below 2^-50 (tests/mechanism)."""
DIGITS = 64
"""The number of binary digits of P that are drawn at first. The first of them is 0. More are drawn if needed."""
SMALLEST = 2**44
"""The smallest first digits of P, as an integer, that step 2 accepts: P of at least 2^-20. Below this value the digits
that are not drawn yet could change x by more than `ERROR`, so step 3 decides."""
LARGEST_X = 5.0
"""An upper bound on x if P is at least 2^-20."""
MAX_SCALE = 2.0**42
"""The largest scale. With a larger one float64 cannot represent scale * x to a fraction of an integer."""
_MPMATH = Lock()
"""Protects the precision of mpmath, a global variable, because several threads draw at the same time."""


@dataclass(frozen=True)
class ExactNormals:
    """Standard normals that can be rounded exactly. Each is given by its sign and the first binary digits of its P.

    Args:
        words: 64 random bits for each normal. The last bit is the sign; the others are the digits of P after the first.
        value: The absolute value of each normal, up to the error of step 1.
        part: The part of a stream that the words were drawn from. Further digits are drawn from it too.
    """

    words: np.ndarray = field(repr=False)
    value: np.ndarray = field(repr=False)
    part: StreamPart = field(repr=False)

    def __len__(self) -> int:
        return len(self.words)

    def rounded(self, scale: float, *, error: float = ERROR) -> np.ndarray:
        """Return round(scale * normal) for each normal, as int64. The result is exact.

        Args:
            scale: Above 0 and at most 2^42. Its float64 value is taken as an exact rational number.
            error: The assumed error of step 1. Tests use a larger one, so that step 3 decides more cases.
        """
        check_scale(scale)
        scaled = self.value * scale
        rounded = np.rint(scaled)
        np.subtract(scaled, rounded, out=scaled)
        np.abs(scaled, out=scaled)
        # DP: where float64 cannot decide how to round, the integer is computed exactly.
        undecided = np.flatnonzero((scaled >= decided_below(scale, error)) | (self.words < 2 * SMALLEST))
        for i in undecided.tolist():
            rounded[i] = round_exactly(int(self.words[i]) >> 1, scale, partial(self.part.further, i), error=error)
        # DP: the sign is a fair coin, a bit that is not a digit of P.
        np.negative(rounded, out=rounded, where=(self.words & np.uint64(1)).view(np.int64).astype(bool))
        return rounded.astype(np.int64)


def exact_normals(part: StreamPart, count: int) -> ExactNormals:
    """Draw standard normals that can be rounded exactly.

    Args:
        part: A part of a stream of random bits. Private noise needs a secure stream (`randomness.secure_generator`).
        count: The number of normals.
    """
    words = part.generator().integers(0, 2**DIGITS, size=count, dtype=np.uint64)
    # P is in a small interval that its digits determine; this is the middle of the interval. The relative error of the
    # float64 value is at most 2^-52. The middle differs from P by at most 2^-45 of itself (`SMALLEST`), and usually by
    # 2^-64. Since Q(x) <= 1.26 density(x), the error of x is at most 1.26 times these numbers.
    probability = (words >> np.uint64(1)) + 0.5
    probability *= 2.0**-DIGITS
    return ExactNormals(words, np.negative(ndtri(probability)), part)


def rounded_normals(rng: np.random.Generator, count: int, scale: float, *, error: float = ERROR) -> np.ndarray:
    """Draw integers with exactly the distribution of round(scale * N(0, 1)).

    Args:
        rng: A generator of `randomness`. Private noise needs a secure generator.
        count: The number of integers, at most 2^31.
        scale: The standard deviation in units of the grid, above 0 and at most 2^42. Its float64 value is taken as an
            exact rational number.
        error: As in `ExactNormals.rounded`.

    Returns:
        An int64 array of `count` integers.
    """
    return exact_normals(split_stream(rng, 1)[0], count).rounded(scale, error=error)


def check_scale(scale: float) -> None:
    """Raise `ValueError` for a scale that is not above 0 and at most 2^42."""
    if not 0 < scale <= MAX_SCALE:
        raise ValueError(f"scale must be above 0 and at most 2^42, not {scale!r}")


def decided_below(scale: float, error: float = ERROR, largest_x: float = LARGEST_X) -> float:
    """Return how close scale * x must be to an integer for float64 to decide the rounding (step 2).

    The relative rounding error of the product scale * x is at most 2^-53, which `error` covers.

    Args:
        scale: As in `ExactNormals.rounded`.
        error: As in `ExactNormals.rounded`.
        largest_x: An upper bound on x.
    """
    return 0.5 - (1 + largest_x) * error * scale - 2.0**-52


def round_exactly(digits_of_p: int, scale: float, further: Callable[[int], int], *, error: float = ERROR) -> int:
    """Do step 3: return the integer n for which P is between Q((n + 1/2) / scale) and Q((n - 1/2) / scale).

    Args:
        digits_of_p: The first 64 binary digits of P, as an integer.
        scale: As in `ExactNormals.rounded`.
        further: Returns the next 64 digits of this P, the next after them and so on, for the numbers 0, 1, … No other P
            uses these digits (`StreamPart.further`).
        error: As in `ExactNormals.rounded`.
    """
    p, digits = digits_of_p, DIGITS

    def extend() -> None:
        """Append 64 more uniform binary digits to P."""
        nonlocal p, digits
        p, digits = (p << 64) | further(digits // 64 - 1), digits + 64

    while p < 2**50:  # until the digits that are not drawn can change x by less than `ERROR`
        extend()
    x = -float(ndtri(math.ldexp(p, -digits)))
    n = round(x * scale)
    # DP: in the far tail, too, float64 decides only outside its error bound.
    if abs(x * scale - n) < decided_below(scale, error, x):
        return n
    while True:
        below, above = _tail(n, 1, scale, digits), _tail(n, -1, scale, digits)
        # P is in [p, p + 1] / 2^digits. The bounds on Q are whole multiples of 2^-digits too, so integers are compared.
        if p + 1 <= below[0]:
            n += 1
        elif n > 0 and p >= above[1]:
            n -= 1
        elif p >= below[1] and (n == 0 or p + 1 <= above[0]):
            return n
        else:
            extend()


def _tail(n: int, side: int, scale: float, digits: int) -> tuple[int, int]:
    """Return a lower and an upper bound on 2^digits * Q((n + side / 2) / scale), as integers."""
    with _MPMATH, mpmath.workprec(digits + 64):
        x = mpmath.mpf(2 * n + side) / (2 * mpmath.mpf(scale))
        value = mpmath.ldexp(mpmath.erfc(x / mpmath.sqrt(2)), digits - 1)
        slack = mpmath.ldexp(1, -32)  # far above the error of mpmath, which computes with `digits + 64` digits
        return int(mpmath.floor(value - slack)), int(mpmath.ceil(value + slack))
