"""Exact samples of a Gaussian that is rounded to integers: no floating-point idealisation.

`rounded_normals(rng, count, scale)` returns integers with exactly the distribution of `round(scale * X)`, X ~ N(0, 1): each
decision is taken on random bits and on bounds of real numbers, and where the bounds do not decide, more bits are drawn. Rounding
a Gaussian to a public grid is post-processing, so the accountants of the continuous Gaussian mechanism hold for the result.
The float64 sampler of `noise.py` has this distribution only up to the precision of float64 (docs/privacy.md).

The method is the rejection sampler of Karney, "Sampling exactly from the normal distribution" (ACM TOMS 2016), with arrays
instead of single digits. A half-normal is k + x with k = 0, 1, 2, ... and x in [0, 1):

    1. k is drawn with probability proportional to exp(-k^2 / 2);
    2. x is uniform, known by its first 64 binary digits;
    3. (k, x) is accepted with probability exp(-x (2 k + x) / 2), else both are drawn again (71 % are accepted);
    4. the sign is a fair coin, and scale * (k + x) is rounded to the nearest integer.

Steps 1, 3 and 4 compare a uniform number with a real number. float64 decides almost all comparisons; `MARGIN` is far above its
error. The rest (about one in 2^38 for step 3) is decided by `mpmath` interval arithmetic with as many digits as it takes.
"""

from dataclasses import dataclass, field
from fractions import Fraction
from math import floor
from threading import Lock
from typing import Any, cast

import mpmath
import numpy as np

MARGIN = 2.0**-40
"""Relative error that is allowed for float64's exp of step 3; its true error is below 2^-48."""
DIGITS = 64
"""Binary digits of x and of the uniform number of step 3 that are drawn at first; more are drawn where these do not decide."""
BLOCK = 2**15
"""Candidates per pass: their arrays stay in the cache."""
MAX_SCALE = 2.0**42
"""Above this, float64 cannot hold the result to a fraction of an integer."""
_MPMATH = Lock()
"""mpmath keeps its precision in a global variable, and several threads draw at the same time."""


@dataclass(frozen=True)
class ExactNormals:
    """Standard normals as sign * (k + x), where x is known by its first binary digits and has more where they are needed.

    Args:
        sign: 1 or -1 for each normal.
        k: The integer part of the absolute value.
        digits: The first 64 binary digits of the fractional part x, as an integer.
        more: For the few normals of which more digits were drawn already: these digits and their number.
        rng: The generator that further digits come from.
    """

    sign: np.ndarray
    k: np.ndarray
    digits: np.ndarray
    more: dict[int, tuple[int, int]]
    rng: np.random.Generator = field(repr=False)

    def __len__(self) -> int:
        return len(self.sign)

    def rounded(self, scale: float) -> np.ndarray:
        """Return round(scale * normal) for each normal, as int64; exact for the rational number that `scale` is."""
        if not 0 < scale <= MAX_SCALE:
            raise ValueError(f"scale must be above 0 and at most 2^42, not {scale!r}")
        value = (self.k + self.digits * 2.0**-DIGITS) * scale
        rounded = np.rint(value)
        # The digits of x are rounded by at most 2^-54, the sum and the product by a relative 2^-53 each: together below
        # (k + 1) * scale * 2^-51.
        close = np.abs(np.abs(value - rounded) - 0.5) <= (self.k + 1) * scale * 2.0**-50 + 2.0**-50
        for i in np.flatnonzero(close):
            digits = self.more.get(int(i), (int(self.digits[i]), DIGITS))
            rounded[i] = _round_exactly(self.rng, int(self.k[i]), *digits, scale)
        return self.sign * rounded.astype(np.int64)


def exact_normals(rng: np.random.Generator, count: int, *, margin: float = MARGIN) -> ExactNormals:
    """Draw standard normals exactly.

    Args:
        rng: A generator of uniform bits; for private noise a secure one (`randomness.secure_generator`).
        count: How many normals to draw.
        margin: Relative error that is assumed of float64 in step 3. Tests raise it, so that more cases are decided exactly.
    """
    sign, k, digits = np.empty(count, np.int64), np.empty(count), np.empty(count, np.uint64)
    more: dict[int, tuple[int, int]] = {}
    filled = 0
    while filled < count:
        candidates = min(int((count - filled) * 1.45) + 16, BLOCK)
        words, k_here, accepted, more_here = _candidates(rng, candidates, margin)
        chosen = np.flatnonzero(accepted)[: count - filled]
        part = slice(filled, filled + len(chosen))
        sign[part] = np.where(words[0][chosen] & np.uint64(1), 1, -1)
        k[part], digits[part] = k_here[chosen], words[1][chosen]
        for i, extended in more_here.items():
            position = np.searchsorted(chosen, i)
            if position < len(chosen) and chosen[position] == i:
                more[filled + int(position)] = extended
        filled += len(chosen)
    return ExactNormals(sign, k, digits, more, rng)


def rounded_normals(rng: np.random.Generator, count: int, scale: float, *, margin: float = MARGIN) -> np.ndarray:
    """Draw integers with exactly the distribution of round(scale * N(0, 1)).

    Args:
        rng: As in `exact_normals`.
        count: How many integers to draw.
        scale: The standard deviation in units of the grid, above 0 and at most 2^42. Every float64 is a rational number,
            and that number is the scale.
        margin: As in `exact_normals`.

    Returns:
        An int64 array of `count` integers.
    """
    return exact_normals(rng, count, margin=margin).rounded(scale)


def _candidates(
    rng: np.random.Generator, count: int, margin: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray, dict[int, tuple[int, int]]]:
    """Steps 1 to 3. Returns the random words, the integer parts, which candidates are accepted, and extended digits of x."""
    words = rng.integers(0, 2**64, size=(3, count), dtype=np.uint64)
    k = _integer_parts(rng, words[0] >> np.uint64(1))
    x = words[1] * 2.0**-DIGITS
    # A float64 has 53 digits: converting 64 of them rounds x by at most 2^-54, and the exponent below by less than 2^-48.
    probability = np.exp(-0.5 * x * (2 * k + x))
    uniform = words[2] * 2.0**-DIGITS
    accepted = uniform < probability
    more: dict[int, tuple[int, int]] = {}
    for i in np.flatnonzero(np.abs(uniform - probability) <= margin * probability + 2.0**-52):
        accepted[i], *extended = _accept_exactly(rng, int(k[i]), int(words[1][i]), int(words[2][i]))
        more[int(i)] = (extended[0], extended[1])
    return words, k, accepted, more


def _integer_parts(rng: np.random.Generator, uniform: np.ndarray) -> np.ndarray:
    """Step 1, from 63 uniform digits: k with probability proportional to exp(-k^2 / 2)."""
    k = np.searchsorted(_THRESHOLDS, uniform, side="right").astype(np.float64)
    # A number whose 63 digits are those of a threshold may lie on either side of it.
    for i in np.flatnonzero(np.isin(uniform, _THRESHOLDS)):
        k[i] = _integer_part_exactly(rng, int(uniform[i]), 63)
    return k


def _cumulative(k: int, digits: int) -> int:
    """floor(2^digits * P(integer part <= k)), by interval arithmetic with enough precision."""
    precision = digits + 64
    while True:
        with mpmath.workprec(precision):
            terms = 2 + int(mpmath.sqrt(2 * precision))
            weights = [mpmath.exp(-mpmath.mpf(j * j) / 2) for j in range(max(terms, k + 1) + 1)]
            value = mpmath.ldexp(mpmath.fsum(weights[: k + 1]) / mpmath.fsum(weights), digits)
            below, above = value - mpmath.ldexp(1, -32), value + mpmath.ldexp(1, -32)
            if mpmath.floor(below) == mpmath.floor(above):
                return int(mpmath.floor(value))
        precision += 64


def _integer_part_exactly(rng: np.random.Generator, uniform: int, digits: int) -> int:
    """Step 1 for a number that its digits so far do not place: draw more digits until they do."""
    while True:
        k = 0
        with _MPMATH:
            while (threshold := _cumulative(k, digits)) < uniform:
                k += 1
        if uniform < threshold:
            return k
        uniform, digits = _extend(rng, uniform, digits)


def _accept_exactly(rng: np.random.Generator, k: int, x: int, uniform: int) -> tuple[bool, int, int]:
    """Step 3 with as many digits as it takes. Returns the decision, the digits of x and their number."""
    digits, iv = DIGITS, cast(Any, mpmath.iv)
    while True:
        with _MPMATH:
            iv.prec = digits + 64
            x_interval = iv.mpf([x, x + 1]) / iv.mpf(2) ** digits
            bound = iv.exp(-x_interval * (2 * k + x_interval) / 2) * iv.mpf(2) ** digits
        if uniform + 1 <= bound.a:
            return True, x, digits
        if uniform >= bound.b:
            return False, x, digits
        x, more = _extend(rng, x, digits)
        uniform, digits = _extend(rng, uniform, digits)
        assert more == digits


def _round_exactly(rng: np.random.Generator, k: int, x: int, digits: int, scale: float) -> int:
    """Step 4 in whole numbers: draw digits of x until every number that begins with them rounds alike."""
    exact = Fraction(scale)
    while True:
        low, high = (exact * (k + Fraction(x + end, 2**digits)) + Fraction(1, 2) for end in (0, 1))
        if floor(low) == floor(high):
            return floor(low)
        x, digits = _extend(rng, x, digits)


def _extend(rng: np.random.Generator, number: int, digits: int) -> tuple[int, int]:
    """Append 64 more uniform binary digits."""
    return (number << 64) | int(rng.integers(0, 2**64, dtype=np.uint64)), digits + 64


_THRESHOLDS = np.array([_cumulative(k, 63) for k in range(10)], dtype=np.uint64)
"""floor(2^63 * P(integer part <= k)). The last one is 2^63 - 1, so k >= 9 is decided exactly."""
