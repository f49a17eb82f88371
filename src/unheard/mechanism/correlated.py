"""Correlated noise: the noise of one round partly cancels the noise of earlier rounds.

Input: a `BoundedAverage`, independent normals z_t, and the noise of earlier attempts. Output: a `NoisyAverage` with the
noise of row t of C^-1 z, for the matrix C of `privacy/matrix_factorization.py`:

    banded:  x_t = (z_t - sum_(i >= 1) c_i x_(t - i)) / c_0
    BLT:     x_t = s z_t - sum_j s_j buf_j;    buf_j <- d_j buf_j + x_t            (s: the sensitivity of C)

The recursion is in float64 and keeps the unrounded x_t; only the noise that is added to the average is rounded to the
grid. Each product and each sum is a separate operation, in a fixed order, so the same noise can be recomputed bit by
bit after a crash. docs/correlated-noise-proof.md has the proof, the estimators for which it holds, and the combinations
that raise an error. `training/noise_state.py` keeps the keys and the history on disk.

>>> from unheard.privacy.matrix_factorization import optimise
>>> history = NoiseHistory(optimise("banded", rounds=10, separation=4), 3, torch.device("cpu"))
>>> history.next(torch.ones(3, dtype=torch.float64)).shape, history.index
(torch.Size([3]), 1)
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from unheard.config import require
from unheard.errors import InvalidValue, UnprovenCombination
from unheard.mechanism.aggregation import BoundedAverage, NoisyAverage
from unheard.mechanism.noise import LARGEST_MULTIPLIER, GaussianNoise, Normals, NormalsAhead
from unheard.mechanism.sampling import GroupedSampling
from unheard.privacy.events import CorrelatedGaussian
from unheard.privacy.matrix_factorization import BUFFERS, MOST_ROUNDS, Factorisation, optimise
from unheard.randomness import generator_from_key


@dataclass(frozen=True, kw_only=True)
class CorrelatedNoise(GaussianNoise):
    """Gaussian noise that is correlated over rounds (`[noise] kind = "correlated"`).

    With `strategy = "banded"` the noise of a round depends on the noise of the last `bands` - 1 attempts. It needs
    `[sampling] kind = "cyclic_poisson"` or `"min_separation"`. With `strategy = "blt"` it depends on the noise of all
    earlier rounds, through 2 to 4 buffers. It needs `[sampling] kind = "min_separation"`.

    Args:
        noise_multiplier: z, the noise in units of the sensitivity of the whole mechanism (BLT) or of one block of
            rounds (banded).
        noise_std: Must be None; correlated noise has no single sigma.
        strategy: "banded" or "blt".
        rounds: T, the number of rounds that the coefficients are optimised for. None: the rounds of the run. A BLT
            mechanism ends after T attempts, and repeated rounds count. Training then stops with `BudgetExceeded`;
            `resume(rounds=...)` begins a new mechanism, which is charged in full.
        bands: The number of bands of banded noise, at most the number of groups. None: as many bands as groups, but at
            most T and 1024.
        buffers: The number of buffers of BLT noise, 2 to 4.

    Raises:
        InvalidValue: A value is out of range.

    Example:
        >>> CorrelatedNoise(noise_multiplier=2.0, strategy="blt", rounds=2000).buffers
        3
    """

    strategy: Literal["banded", "blt"] = "banded"
    rounds: int | None = None
    bands: int | None = None
    buffers: int = 3

    def __post_init__(self) -> None:
        require(
            self.noise_std is None and self.noise_multiplier is not None,
            "give noise_multiplier (z); correlated noise has no single noise_std.",
        )
        super().__post_init__()
        require(self.strategy in ("banded", "blt"), "strategy must be 'banded' or 'blt'.")
        require(self.rounds is None or 1 <= self.rounds <= MOST_ROUNDS, f"rounds must be from 1 to {MOST_ROUNDS:,}.")
        require(self.bands is None or (self.bands >= 1 and self.strategy == "banded"), "bands are for 'banded' only.")
        require(self.buffers in BUFFERS, f"buffers must be from {BUFFERS[0]} to {BUFFERS[-1]}.")

    def for_rounds(self, rounds: int) -> "CorrelatedNoise":
        """Return the same noise with T = `rounds`, unless the run file declares T."""
        return self if self.rounds is not None else replace(self, rounds=rounds)

    def factorisation(self, sampling: GroupedSampling, population: int) -> Factorisation:
        """Return the matrix C of a new mechanism, optimised for T and for the separation of the sampler.

        Raises:
            InvalidValue: T is not set, or the noise is too large to be added exactly.
        """
        if self.rounds is None:
            raise InvalidValue("[noise] lacks 'rounds', the T that its coefficients are optimised for.")
        separation = sampling.rounds_apart(population)
        matrix = optimise(
            self.strategy, rounds=self.rounds, separation=separation, bands=self.bands, buffers=self.buffers
        )
        widest = self.multiplier(1.0) * float(row_norms(matrix)[-1])
        require(
            widest <= LARGEST_MULTIPLIER, f"The noise is {widest:g} times the sensitivity; at most 2^19 can be added."
        )
        return matrix

    def event(self, sampling: GroupedSampling, population: int, index: int) -> CorrelatedGaussian:
        """Return the event of one attempt. The charge of the first attempt of a block covers the whole block.

        Args:
            sampling: The sampler of the plan.
            population: The declared number of users.
            index: The number of the attempt in its mechanism, from 0.
        """
        # DP: a block is the b rounds in which one user takes part once; with BLT all T rounds are one release.
        block = sampling.rounds_apart(population) if self.strategy == "banded" else self.rounds
        # DP: the sensitivity of BLT covers all participations of a user, so there is no amplification by sampling.
        q = sampling.turn_probability(population) if self.strategy == "banded" else 1.0
        assert self.noise_multiplier is not None
        return CorrelatedGaussian(
            sampling_prob=q, noise_multiplier=self.noise_multiplier, block=block or MOST_ROUNDS, index=index
        )

    def facts(self, sampling: GroupedSampling, population: int) -> dict[str, Any]:
        """Return the facts for the header of a ledger: the coefficients, b, k, T, the sensitivity, q and z."""
        event = self.event(sampling, population, 0)
        return {
            **self.factorisation(sampling, population).to_record(),
            "sampling_prob": event.sampling_prob,
            "noise_multiplier": event.noise_multiplier,
            "block": event.block,
        }

    def changed(self, noise_multiplier: float | None, noise_std: float | None) -> "GaussianNoise":
        """Raise `UnprovenCombination`: one charge covers several rounds, so their noise may not change."""
        raise UnprovenCombination("The noise of a run with correlated noise cannot change during the run.")

    def add(self, average: BoundedAverage, rng: "Normals | CorrelatedNormals") -> NoisyAverage:
        """Add the correlated noise of the attempt, scaled by the sensitivity and rounded to the grid of the average."""
        if not isinstance(rng, CorrelatedNormals):
            raise TypeError("correlated noise is computed from earlier noise: pass CorrelatedNormals, not a generator")
        # DP: the scale is z times the sensitivity that is stored with the average; x already includes the sensitivity of C.
        std = self.std(average.sensitivity)
        row_norm = rng.history.row_norm
        noisy = rounded_onto_grid(average, rng.take(average.units_P.numel()), std)
        return replace(noisy, noise_std=std * row_norm)


def rounded_onto_grid(average: BoundedAverage, normal_P: Tensor, std: float) -> NoisyAverage:
    """Return the average plus `std` times the given numbers, rounded to whole units of the average's grid."""
    # DP: only whole units are added. Adding float noise could leave low bits of a user's data visible.
    noise_P = normal_P * (std / average.unit)
    units_P = average.units_P + noise_P.round().to(torch.int64)
    return NoisyAverage(average_P=units_P.double() * average.unit, noise_std=std)


def row_norms(factorisation: Factorisation) -> np.ndarray:
    """Return the standard deviation of the noise in one coordinate, for each round, if z = 1 and the sensitivity is 1.

    It grows from round to round.
    """
    return np.sqrt(np.cumsum((factorisation.inverse() * factorisation.sensitivity()) ** 2))


class NoiseHistory:
    """PRIVATE. The noise of earlier attempts, and the recursion for the next noise. As secret as the users' text.

    Args:
        factorisation: The matrix C.
        num_parameters: P, the number of parameters.
        device: The device on which the noise is used.
        index: The number of attempts that the history has seen.
        rows_RP: The saved value of `rows`; None for a new history.
    """

    def __init__(
        self,
        factorisation: Factorisation,
        num_parameters: int,
        device: torch.device,
        *,
        index: int = 0,
        rows_RP: Tensor | None = None,
    ) -> None:
        self.factorisation = factorisation
        self.index = index
        self._is_banded = factorisation.strategy == "banded"
        self._sensitivity = factorisation.sensitivity()
        self._device = device
        self._coefficients = torch.tensor(factorisation.coefficients, dtype=torch.float64, device=device)
        self._past: tuple[int, Tensor] | None = None
        count = len(factorisation.coefficients) - 1 if self._is_banded else len(factorisation.decays)
        shape = (count, num_parameters)
        if rows_RP is not None and tuple(rows_RP.shape) != shape:
            raise ValueError(f"the saved history has shape {tuple(rows_RP.shape)}, not {shape}")
        if rows_RP is None:
            self._rows_RP = torch.zeros(shape, dtype=torch.float64, device=device)
        else:
            self._rows_RP = rows_RP.to(device, torch.float64).clone()
        self._row_norms = row_norms(factorisation)

    @property
    def rows(self) -> Tensor:
        """The state to save for the next attempt, [R, P]: the noise of the last rounds (banded) or the buffers (BLT)."""
        return self._rows_RP

    @property
    def row_norm(self) -> float:
        """The standard deviation of each coordinate of the next x_t, in units of z times the sensitivity of a round."""
        return float(self._row_norms[min(self.index, len(self._row_norms) - 1)])

    def prepare(self) -> None:
        """Start to compute the part of the next noise that depends only on earlier noise.

        On a GPU this runs while the cohort is drawn.
        """
        if self._is_banded and (self._past is None or self._past[0] != self.index):
            self._past = (self.index, self._past_banded())

    def next(self, normals_P: Tensor) -> Tensor:
        """Compute the noise x_t of the next attempt, and add it to the history.

        Args:
            normals_P: z_t, independent standard normals in float64, on the history's device.
        """
        return self._next_banded(normals_P) if self._is_banded else self._next_blt(normals_P)

    def _past_banded(self) -> Tensor:
        """Compute sum_(i >= 1) c_i x_(t - i), in the order of the lags i."""
        rows_RP, lags = self._rows_RP, min(self.index, len(self._rows_RP))
        if rows_RP.is_cuda and lags:
            from unheard.mechanism.noise_kernels import weighted_past

            return weighted_past(rows_RP, self._coefficients[1 : lags + 1], self.index)
        past_P = torch.zeros(rows_RP.shape[1], dtype=torch.float64, device=self._device)
        # DP: the unrounded noise of the last rounds, each with its own coefficient, so that C x = z holds row by row.
        for lag in range(1, lags + 1):
            past_P += rows_RP[(self.index - lag) % len(rows_RP)] * self.factorisation.coefficients[lag]
        return past_P

    def _next_banded(self, normals_P: Tensor) -> Tensor:
        """Compute x_t with a banded matrix, from z_t and the noise of the last rounds."""
        self.prepare()
        assert self._past is not None
        # DP: z is scaled by the sensitivity of C (1 up to rounding), because the charge is for C X + z.
        noise_P = normals_P * self._sensitivity
        noise_P -= self._past[1]
        noise_P *= 1 / self.factorisation.coefficients[0]
        if len(self._rows_RP):
            self._rows_RP[self.index % len(self._rows_RP)] = noise_P
        self.index, self._past = self.index + 1, None
        return noise_P

    def _next_blt(self, normals_P: Tensor) -> Tensor:
        """Compute x_t with a BLT matrix, from z_t and the buffers. A buffer is a decaying sum of earlier noise."""
        # DP: z is scaled by the sensitivity of all rounds of one user, because it is charged once for the whole
        # mechanism.
        noise_P = normals_P * self._sensitivity
        product_P = torch.empty_like(noise_P)
        for row_P, scale in zip(self._rows_RP, self.factorisation.scales, strict=True):
            noise_P -= torch.mul(row_P, scale, out=product_P)
        for row_P, decay in zip(self._rows_RP, self.factorisation.decays, strict=True):
            row_P.mul_(decay).add_(noise_P)
        self.index += 1
        return noise_P


class CorrelatedNormals:
    """The noise of one attempt. Other threads draw its normals ahead. `take` can be called once.

    Args:
        key: The key of the attempt, from which its normals are drawn.
        history: The noise of the earlier attempts.
        num_parameters: P, the number of parameters.
        device: The device on which the noise is used.
    """

    def __init__(self, key: bytes, history: NoiseHistory, num_parameters: int, device: torch.device) -> None:
        self._ahead = NormalsAhead(generator_from_key(key), num_parameters, device)
        history.prepare()
        self._device = device
        self._index = history.index
        self.history = history

    def take(self, count: int) -> Tensor:
        """Return the noise x_t of the attempt, in units of z times the sensitivity of one round.

        Raises:
            RuntimeError: The noise was taken before, or the history has moved to a later attempt.
        """
        normals_P = self._ahead.take(count).to(self._device, non_blocking=True)
        # DP: row t of C^-1 z needs each earlier row exactly once.
        if self.history.index != self._index:
            raise RuntimeError("The history has moved on: this noise belongs to an earlier attempt.")
        return self.history.next(normals_P)
