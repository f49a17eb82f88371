"""Exact samples of a Gaussian that is rounded to integers: no floating-point idealisation.

`rounded_normals(rng, count, scale)` returns integers with exactly the distribution of `round(scale * X)`, X ~ N(0, 1): each
decision is taken on random bits and on bounds of real numbers, and where the bounds do not decide, more bits are drawn. Rounding
a Gaussian to a public grid is post-processing, so the accountants of the continuous Gaussian mechanism hold for the result.
The float64 sampler of `noise.py` has this distribution only up to the precision of float64 (docs/privacy.md).

The method is inversion. X has the sign of a fair coin, and its absolute value is the number x with Q(x) = P, where P is uniform
in (0, 1/2) and Q(x) is the probability that a normal exceeds x. Of P the first 64 binary digits are drawn. So

    1. x is computed in float64 from these digits, with an error of at most `ERROR` * (1 + x);
    2. if scale * x is farther than this error from the middle between two integers, it is rounded;
    3. otherwise (about one in 2^23 at scale 2^22) P is compared with Q at the nearest middles, which `mpmath` computes with as many
       digits as the comparison takes; where all digits of P are equal to those of Q, more digits of P are drawn.

Steps 1 and 2 are few operations on long arrays, which several threads do at the same time.
"""

from dataclasses import dataclass, field
from threading import Lock

import mpmath
import numpy as np
from scipy.special import ndtri

ERROR = 2.0**-46
"""Bound of the error of step 1, relative to 1 + x. The largest that was measured is below 2^-50 (tests/mechanism)."""
DIGITS = 64
"""Binary digits of P that are drawn at first; more are drawn where these do not decide. The first of them is 0."""
SMALLEST = 2**44
"""With P below 2^-20, the digits are too few for step 1, and step 3 decides."""
MAX_SCALE = 2.0**42
"""Above this, float64 cannot hold the result to a fraction of an integer."""
_MPMATH = Lock()
"""mpmath keeps its precision in a global variable, and several threads draw at the same time."""


@dataclass(frozen=True)
class ExactNormals:
    """Standard normals, each known by its sign and by the first binary digits of P, and by more where they are needed.

    Args:
        words: For each normal 64 random bits: the last one is the sign, the others are the digits of P after the first.
        value: The absolute value of each normal, up to the error of step 1.
        rng: The generator that further digits come from.
    """

    words: np.ndarray
    value: np.ndarray
    rng: np.random.Generator = field(repr=False)

    def __len__(self) -> int:
        return len(self.words)

    def rounded(self, scale: float, *, error: float = ERROR) -> np.ndarray:
        """Return round(scale * normal) for each normal, as int64; exact for the rational number that `scale` is.

        Args:
            scale: Above 0 and at most 2^42.
            error: The error that is assumed of step 1. Tests raise it, so that more cases are decided exactly.
        """
        if not 0 < scale <= MAX_SCALE:
            raise ValueError(f"scale must be above 0 and at most 2^42, not {scale!r}")
        scaled = self.value * scale
        rounded = np.rint(scaled)
        # |scaled - rounded| is at most 1/2; the product is rounded by at most 2^-53 of itself, which ERROR covers.
        np.subtract(scaled, rounded, out=scaled)
        np.abs(scaled, out=scaled)
        # DP: what float64 cannot decide is decided exactly. x is below 5 for P from 2^-20 on.
        undecided = np.flatnonzero((scaled >= 0.5 - 6 * error * scale - 2.0**-52) | (self.words < 2 * SMALLEST))
        for i in undecided:
            rounded[i] = _round_exactly(self.rng, int(self.words[i]) >> 1, scale)
        # DP: a fair coin for the sign, which is no digit of P.
        np.negative(rounded, out=rounded, where=(self.words & np.uint64(1)).view(np.int64).astype(bool))
        return rounded.astype(np.int64)


def exact_normals(rng: np.random.Generator, count: int) -> ExactNormals:
    """Draw standard normals exactly.

    Args:
        rng: A generator of uniform bits; for private noise a secure one (`randomness.secure_generator`).
        count: How many normals to draw.
    """
    words = rng.integers(0, 2**DIGITS, size=count, dtype=np.uint64)
    # The middle of the numbers that begin with the digits. float64 rounds it by at most 2^-52 of itself, and P differs from
    # it by at most 2^-45 of itself (`SMALLEST`) and usually by 2^-64. Since Q(x) <= 1.26 density(x), x differs by at most
    # 1.26 times these numbers.
    probability = (words >> np.uint64(1)) + 0.5
    probability *= 2.0**-DIGITS
    return ExactNormals(words, np.negative(ndtri(probability)), rng)


def rounded_normals(rng: np.random.Generator, count: int, scale: float, *, error: float = ERROR) -> np.ndarray:
    """Draw integers with exactly the distribution of round(scale * N(0, 1)).

    Args:
        rng: As in `exact_normals`.
        count: How many integers to draw.
        scale: The standard deviation in units of the grid, above 0 and at most 2^42. Every float64 is a rational number,
            and that number is the scale.
        error: As in `ExactNormals.rounded`.

    Returns:
        An int64 array of `count` integers.
    """
    return exact_normals(rng, count).rounded(scale, error=error)


def _round_exactly(rng: np.random.Generator, digits_of_p: int, scale: float) -> int:
    """Step 3: the integer n for which P is between Q((n + 1/2) / scale) and Q((n - 1/2) / scale)."""
    p, digits = digits_of_p, DIGITS
    while p < 2**50:  # so many digits that float64 gives the integer or one beside it
        p, digits = _extend(rng, p, digits)
    n = round(-float(ndtri(float(mpmath.ldexp(mpmath.mpf(p), -digits)))) * scale)
    while True:
        below, above = _tail(n, 1, scale, digits), _tail(n, -1, scale, digits)
        # P is in [p, p + 1] / 2^digits; the bounds of Q are whole multiples of 2^-digits, too.
        if p + 1 <= below[0]:
            n += 1
        elif n > 0 and p >= above[1]:
            n -= 1
        elif p >= below[1] and (n == 0 or p + 1 <= above[0]):
            return n
        else:
            p, digits = _extend(rng, p, digits)


def _tail(n: int, side: int, scale: float, digits: int) -> tuple[int, int]:
    """Bounds of 2^digits * Q((n + side / 2) / scale), an integer below and one above it."""
    with _MPMATH, mpmath.workprec(digits + 64):
        x = mpmath.mpf(2 * n + side) / (2 * mpmath.mpf(scale))
        value = mpmath.ldexp(mpmath.erfc(x / mpmath.sqrt(2)), digits - 1)
        slack = mpmath.ldexp(1, -32)  # the error of a value below 2^digits with `digits + 64` digits is far smaller
        return int(mpmath.floor(value - slack)), int(mpmath.ceil(value + slack))


def _extend(rng: np.random.Generator, number: int, digits: int) -> tuple[int, int]:
    """Append 64 more uniform binary digits."""
    return (number << 64) | int(rng.integers(0, 2**64, dtype=np.uint64)), digits + 64
