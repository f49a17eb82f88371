"""Compute the coefficients, the sensitivity and the error of correlated noise.

The model after round t is the first model plus the sum of t noisy averages. Independent noise adds up in that sum. With
correlated noise x = C^-1 z, where z is independent noise and C a lower-triangular Toeplitz matrix, part of the noise
cancels in the sum. The privacy is that of independent noise on C X, where X are the averages of all rounds: the release
X + C^-1 z = C^-1 (C X + z) is a function of C X + z (docs/correlated-noise-proof.md). This is a factorisation of the
prefix-sum matrix A into A C^-1 and C.

    optimise("banded", rounds=1500, separation=64)                  at most 64 bands, for cyclic Poisson sampling
    optimise("blt", rounds=2052, separation=342, buffers=3)         a few buffers, for participations 342 rounds apart
    factorisation.sensitivity()                                     always computed from the coefficients
    factorisation.rms_error()                                       noise of the summed updates, in units of z S / (q W)

Input: T rounds, and the smallest number b of rounds from one round of a user to the next. Output: a `Factorisation`,
which the header of a ledger stores as plain numbers. The module needs only numpy and scipy.

Literature: Choquette-Choo et al., "(Amplified) Banded Matrix Factorization" (2023), for bands and cyclic Poisson
sampling; Dvijotham et al., "Efficient and Near-Optimal Noise Generation for Streaming Differential Privacy" (2024), for
buffered linear Toeplitz (BLT) matrices; McMahan, Xu and Zhang, "A Hassle-free Algorithm for Strong Differential Privacy
in Federated Learning Systems" (2024), for BLT with several participations; Kalinin and Lampert, "Banded Square Root
Matrix Factorization" (2024), for the sensitivity of non-increasing coefficients.

>>> factorisation = optimise("banded", rounds=100, separation=8)
>>> round(factorisation.sensitivity(), 6)
1.0
>>> independent_error(100) / factorisation.rms_error() > 1.9
True
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import minimize
from scipy.signal import lfilter

from unheard.config import nearest, require
from unheard.errors import InvalidValue, LedgerError

STRATEGIES = ("banded", "blt")
MOST_ROUNDS = 100_000
MOST_BANDS = 1024
BUFFERS = (2, 3, 4)
ROUNDED_UP = 1 + 1e-12
"""Sensitivities are rounded up by this factor, because a norm computed in float64 may be slightly too small."""


@dataclass(frozen=True, kw_only=True)
class Factorisation:
    """A lower-triangular Toeplitz matrix C, and the pattern of rounds in which one user may take part.

    Args:
        strategy: "banded" or "blt".
        rounds: T, the number of rounds that the coefficients are optimised for. A BLT mechanism ends after T rounds.
        separation: b. Two rounds of one user are at least b rounds apart. b is the number of groups of cyclic Poisson
            sampling, or the minimum separation.
        coefficients: c_0 to c_(bands - 1) of a banded matrix, with norm 1; empty for BLT.
        decays: d_j of BLT, each in (0, 1): c_0 = 1 and c_i = sum_j s_j d_j^(i - 1).
        scales: s_j of BLT, 0 or more, with a sum of at most 1.

    Raises:
        InvalidValue: A value is out of range, or no proof covers the sensitivity of these coefficients.
    """

    strategy: str
    rounds: int
    separation: int
    coefficients: tuple[float, ...] = ()
    decays: tuple[float, ...] = ()
    scales: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        require(
            self.strategy in STRATEGIES, f"Unknown strategy '{self.strategy}'.{nearest(str(self.strategy), STRATEGIES)}"
        )
        for name in ("rounds", "separation"):
            value = getattr(self, name)
            require(type(value) is int and value >= 1, f"{name} must be a whole number from 1 up, not {value!r}.")
        require(self.rounds <= MOST_ROUNDS, f"rounds must be at most {MOST_ROUNDS:,}, not {self.rounds:,}.")
        numbers = (*self.coefficients, *self.decays, *self.scales)
        require(
            all(type(n) is float and math.isfinite(n) for n in numbers), "every coefficient must be a finite number."
        )
        if self.strategy == "banded":
            require(bool(self.coefficients) and self.coefficients[0] > 0, "the first coefficient must be above 0.")
            require(not self.decays and not self.scales, "a banded matrix has coefficients only.")
            # DP: two rounds of one user are b apart; with more bands than that they would share rows of C X.
            require(
                len(self.coefficients) <= self.separation,
                f"{len(self.coefficients)} bands need at least as many groups, not {self.separation}.",
            )
        else:
            require(not self.coefficients, "a BLT matrix has decays and scales only.")
            require(1 <= len(self.decays) == len(self.scales), "a BLT matrix has as many decays as scales.")
            # DP: the sensitivity below is proved only for non-negative, non-increasing coefficients, which these
            # conditions ensure.
            require(
                all(0 < d < 1 for d in self.decays)
                and all(s >= 0 for s in self.scales)
                and math.fsum(self.scales) <= 1,
                "decays must be in (0, 1), and scales 0 or more with a sum of at most 1.",
            )

    @property
    def participations(self) -> int:
        """k = ceil(T / b), the largest number of rounds in which one user can take part."""
        return -(-self.rounds // self.separation)

    def column(self, rounds: int | None = None) -> np.ndarray:
        """Return the first column of C: c_0, c_1, ...; T entries, or `rounds` entries if given."""
        rounds = rounds or self.rounds
        if self.strategy == "banded":
            return np.pad(np.array(self.coefficients), (0, max(0, rounds - len(self.coefficients))))[:rounds]
        return np.concatenate([[1.0], _powers(np.array(self.decays), rounds - 1) @ np.array(self.scales)])

    def sensitivity(self) -> float:
        """Return the sensitivity, rounded up: the largest L2 norm by which one user can move C X.

        Each round of the user moves its row of X by norm 1 at most. For a banded matrix the sensitivity is the norm of
        one column: a block of b rounds is one release, and the columns of two rounds of one user share no row. For a
        BLT matrix all rounds of the mechanism are one release, and the sensitivity covers all participations of a user.
        """
        column = self.column()
        if self.strategy == "banded":
            # DP: the norm of one whole column: no round of a user shares a row of C X with the user's next round.
            return float(np.linalg.norm(self.coefficients)) * ROUNDED_UP
        return separated_sensitivity(column, self.separation, self.participations) * ROUNDED_UP

    def rms_error(self) -> float:
        """Return the error: the root mean square, over the rounds, of the noise in a coordinate of the summed updates.

        The unit is z times the sensitivity of one round: z S / (q W) for averages, and z S for sums.
        """
        return self.sensitivity() * prefix_error(self.inverse())

    def inverse(self) -> np.ndarray:
        """Return the first column of C^-1, T entries."""
        impulse = np.zeros(self.rounds)
        impulse[0] = 1.0
        numerator, denominator = self._rational()
        return np.asarray(lfilter(numerator, denominator, impulse))

    def _rational(self) -> tuple[np.ndarray, np.ndarray]:
        """Return C^-1 as a rational function: the coefficients of its numerator and of its denominator."""
        if self.strategy == "banded":
            return np.ones(1), np.array(self.coefficients)
        return _blt_inverse(np.array(self.decays), np.array(self.scales))

    def to_record(self) -> dict[str, Any]:
        """Return the factorisation as plain JSON values, with sensitivity and participations, for a ledger's header."""
        numbers = (
            {"coefficients": list(self.coefficients)}
            if self.strategy == "banded"
            else {"decays": list(self.decays), "scales": list(self.scales)}
        )
        return {
            "strategy": self.strategy,
            "rounds": self.rounds,
            "separation": self.separation,
            "participations": self.participations,
            "sensitivity": self.sensitivity(),
            **numbers,
        }

    @classmethod
    def from_record(cls, record: Any) -> "Factorisation":
        """Read a record of `to_record` from a ledger's header, and check its sensitivity against the coefficients.

        Raises:
            LedgerError: The record is damaged, or its sensitivity or participations do not match its coefficients.
        """
        keys = {"strategy", "rounds", "separation", "coefficients", "decays", "scales"}
        try:
            values: dict[str, Any] = {
                key: tuple(v) if isinstance(v, list) else v for key, v in record.items() if key in keys
            }
            factorisation = cls(**values)
            expected = factorisation.to_record()
            # DP: the noise is scaled by this number; if the number is too small, so is the noise.
            is_same = expected.keys() <= record.keys() and all(
                math.isclose(record[key], expected[key], rel_tol=1e-9) for key in ("participations", "sensitivity")
            )
        except (AttributeError, TypeError, ValueError, InvalidValue) as error:
            raise LedgerError(
                f"The ledger's first line describes correlated noise that no proof covers: {error}"
            ) from None
        if not is_same:
            raise LedgerError(
                "The ledger's first line states another sensitivity than its coefficients have: the file was changed. "
                "Put the right ledger back."
            )
        return factorisation


def separated_sensitivity(column: np.ndarray, separation: int, participations: int) -> float:
    """Compute the sensitivity of C if the rounds of one user are at least `separation` apart.

    It is || sum_(j < k) shift(c, j b) ||, where shift(c, i) is the first column of C moved down by i rows.

    Args:
        column: The first column of C, non-negative and non-increasing, with T entries.
        separation: b, the smallest number of rounds from one round of a user to the next.
        participations: k, the largest number of rounds of one user.

    Raises:
        InvalidValue: The column increases somewhere or has a negative entry. The formula is not proved for such
            columns.
    """
    # DP: the maximum over all patterns is at 0, b, 2 b, ... only for non-negative, non-increasing coefficients.
    require(
        bool((column >= 0).all()) and bool((np.diff(column) <= 0).all()),
        "the coefficients must be non-negative and non-increasing.",
    )
    return float(np.linalg.norm(_shifted_sum(column, separation, participations)))


def prefix_error(inverse: np.ndarray) -> float:
    """Compute the root mean square, over t, of the norm of row t of A C^-1, where A is the prefix-sum matrix.

    Args:
        inverse: The first column of C^-1.
    """
    noise = np.cumsum(inverse)
    rounds = len(inverse)
    return math.sqrt(float(np.arange(rounds, 0, -1) @ noise**2) / rounds)


def independent_error(rounds: int) -> float:
    """Return `prefix_error` of independent noise (C is the identity): sqrt((T + 1) / 2).

    >>> independent_error(1)
    1.0
    """
    return math.sqrt((rounds + 1) / 2)


def optimise(
    strategy: str, *, rounds: int, separation: int, bands: int | None = None, buffers: int = 3
) -> Factorisation:
    """Find the coefficients with the smallest error for T rounds. This takes up to a few seconds; results are cached.

    Args:
        strategy: "banded" or "blt".
        rounds: T, the number of rounds.
        separation: b, the smallest number of rounds from one round of a user to the next.
        bands: The number of bands of a banded matrix, at most `separation`. None: the smallest of `separation`, T and
            `MOST_BANDS`.
        buffers: The number of buffers of a BLT matrix, 2 to 4.

    Raises:
        InvalidValue: A value is out of range.
    """
    require(strategy in STRATEGIES, f"Unknown strategy '{strategy}'.{nearest(str(strategy), STRATEGIES)}")
    require(1 <= rounds <= MOST_ROUNDS, f"rounds must be from 1 to {MOST_ROUNDS:,}, not {rounds:,}.")
    require(separation >= 1, f"the separation must be at least 1, not {separation}.")
    if strategy == "blt":
        require(buffers in BUFFERS, f"buffers must be from {BUFFERS[0]} to {BUFFERS[-1]}, not {buffers}.")
        return _optimised_blt(rounds, separation, buffers)
    bands = min(separation, rounds, MOST_BANDS) if bands is None else bands
    require(
        1 <= bands <= min(separation, MOST_BANDS),
        f"bands must be from 1 to the number of groups ({separation}) and at most {MOST_BANDS}, not {bands}.",
    )
    return _optimised_banded(rounds, separation, min(bands, rounds))


@functools.lru_cache(maxsize=64)
def _optimised_banded(rounds: int, separation: int, bands: int) -> Factorisation:
    """Minimise log(mean square error) + log(||c||^2) over c_1, ..., with c_0 = 1, by L-BFGS with the exact gradient."""

    def loss(free: np.ndarray) -> tuple[float, np.ndarray]:
        """Return the logarithm of the squared error times the squared sensitivity, and its gradient."""
        column = np.concatenate([[1.0], free])
        with np.errstate(all="ignore"):  # the search may try coefficients whose inverse overflows
            error, gradient = _error_and_gradient(np.ones(1), column, rounds)
        if not math.isfinite(error) or not np.isfinite(gradient).all():
            return 1e6, np.zeros_like(free)
        square = float(column @ column)
        return math.log(error) + math.log(square), gradient[1:bands] / error + 2 * column[1:] / square

    # Start from the coefficients of (1 - x)^(-1/2), which minimise the largest error if each user takes part once.
    start = np.cumprod((2 * np.arange(1, bands) - 1) / (2 * np.arange(1, bands)))
    options = {"maxiter": 500, "maxfun": 700, "ftol": 1e-13, "gtol": 1e-9}
    free = minimize(loss, start, jac=True, method="L-BFGS-B", options=options).x if bands > 1 else start
    column = np.concatenate([[1.0], free])
    column /= np.linalg.norm(column) * ROUNDED_UP
    return Factorisation(
        strategy="banded", rounds=rounds, separation=separation, coefficients=tuple(map(float, column))
    )


@functools.lru_cache(maxsize=64)
def _optimised_blt(rounds: int, separation: int, buffers: int) -> Factorisation:
    """Minimise log(mean square error) + log(sensitivity^2) over the decays and scales, by L-BFGS from two starts."""
    participations = -(-rounds // separation)

    def split(free: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Map unbounded numbers to the decays and the scales of the buffers, which are bounded."""
        exponent = np.exp(free[buffers:] - max(0.0, float(free[buffers:].max())))
        rest = math.exp(-max(0.0, float(free[buffers:].max())))
        return 1 / (1 + np.exp(-free[:buffers])), exponent / (rest + exponent.sum())

    def loss(free: np.ndarray) -> tuple[float, np.ndarray]:
        """Return the logarithm of the squared error times the squared sensitivity, and its gradient."""
        decays, scales = split(free)
        powers = _powers(decays, rounds - 1)
        column = np.concatenate([[1.0], powers @ scales])
        numerator, denominator = _blt_inverse(decays, scales)
        error, gradient = _error_and_gradient(numerator, denominator, rounds)
        total = _shifted_sum(column, separation, participations)
        square = float(total @ total)
        by_column = gradient / error + 2 * _shifted_sum(total[::-1], separation, participations)[::-1] / square
        by_scale = by_column[1:] @ powers
        slopes = np.arange(rounds - 1)[:, None] * _powers(decays, rounds - 1) / decays
        by_decay = scales * (by_column[1:] @ slopes)
        by_free = np.concatenate([by_decay * decays * (1 - decays), scales * (by_scale - by_scale @ scales)])
        return math.log(error) + math.log(square), by_free

    best = None
    for slowest in (min(rounds, 4 * separation), max(4.0, min(rounds, separation) / 4)):
        far = np.geomspace(3.0, max(4.0, slowest), buffers)  # 1 / (1 - d): roughly the memory of a buffer, in rounds
        start = np.concatenate([np.log(far - 1), np.log(0.5 / far**0.5)])
        result = minimize(
            loss,
            start,
            jac=True,
            method="L-BFGS-B",
            bounds=[(-3.0, 14.0)] * buffers + [(-14.0, 6.0)] * buffers,
            options={"maxiter": 500, "maxfun": 700, "ftol": 1e-13, "gtol": 1e-9},
        )
        best = result if best is None or result.fun < best.fun else best
    assert best is not None
    decays, scales = split(best.x)
    order = np.argsort(-decays)
    return Factorisation(
        strategy="blt",
        rounds=rounds,
        separation=separation,
        decays=tuple(map(float, decays[order])),
        scales=tuple(map(float, scales[order])),
    )


def _error_and_gradient(numerator: np.ndarray, denominator: np.ndarray, rounds: int) -> tuple[float, np.ndarray]:
    """Return the mean square error of C^-1 = numerator / denominator, and its gradient by the T coefficients of C.

    Let w be the first column of A C^-1 C^-1. A small change of the coefficients c changes the first column of A C^-1 by
    the convolution of -w with the change. The adjoint of that convolution is the same filter applied to reversed
    vectors.
    """
    impulse = np.zeros(rounds)
    impulse[0] = 1.0
    noise = np.cumsum(lfilter(numerator, denominator, impulse))
    count = np.arange(rounds, 0, -1)
    error = float(count @ noise**2) / rounds
    adjoint = np.cumsum((2 * count * noise / rounds)[::-1])
    adjoint = np.asarray(lfilter(numerator, denominator, lfilter(numerator, denominator, adjoint)))
    return error, np.negative(adjoint[::-1])


def _blt_inverse(decays: np.ndarray, scales: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the numerator and the denominator of 1 / (1 + sum_j s_j x / (1 - d_j x)), by increasing power of x."""
    numerator = np.poly(decays)
    denominator = numerator.copy()
    for j, scale in enumerate(scales):
        denominator[1:] += scale * np.poly(np.delete(decays, j))
    return numerator, denominator


def _powers(decays: np.ndarray, count: int) -> np.ndarray:
    """Return the powers 0 to `count` - 1 of each decay, as an array of shape [count, buffers]."""
    return decays[None, :] ** np.arange(count)[:, None]


def _shifted_sum(column: np.ndarray, separation: int, participations: int) -> np.ndarray:
    """Return the sum over j < k of the column moved down by j b rows. Entries beyond its length are dropped."""
    total = column.copy()
    for j in range(1, participations):
        if j * separation >= len(column):
            break
        total[j * separation :] += column[: len(column) - j * separation]
    return total
