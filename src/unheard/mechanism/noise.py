"""NOISE: the one place where a private average becomes a public one.

In: a BoundedAverage and a stream of randomness. Out: a NoisyAverage. Where in the paper: theta + Delta + N(0, I sigma^2),
sigma = z * sensitivity. The noise is drawn in float64 from a secure generator, rounded to the average's own public grid and added
there to whole numbers, so what is released is a rounding of the continuous Gaussian mechanism and its accountants apply.
The standard normals that noise is made of: drawn when they are asked for, or ahead of that, on another thread.

In: a generator of randomness.py. Out: float64 normals on a device. What they are added to, and how wide: noise.py.
"""

import math
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from unheard.config import require, require_positive
from unheard.devices import host_memory
from unheard.errors import InvalidValue, UnprovenCombination
from unheard.mechanism.values import BoundedAverage, NoisyAverage


class NormalsAhead:
    """A generator's first normals, drawn on another thread from now on (drawing lets other threads run). They are given once."""

    def __init__(self, rng: np.random.Generator, count: int, device: torch.device) -> None:
        # Drawn to where the device fetches them from, so that nobody has to copy them.
        normals_P = host_memory((count,), torch.float64, device)
        drawn = _threads().submit(rng.standard_normal, out=normals_P.numpy())
        self._ahead: tuple[Tensor, Future[np.ndarray]] | None = (normals_P, drawn)

    def take(self, count: int) -> Tensor:
        ahead, self._ahead = self._ahead, None
        # DP: noise that was given once is never given again.
        if ahead is None or count != len(ahead[0]):
            raise RuntimeError("These normals were given already, or another number of them was drawn.")
        normals_P, drawn = ahead
        # DP: nor before all of it is drawn: what the memory held until then is no noise.
        drawn.result()
        return normals_P


Normals = np.random.Generator | NormalsAhead
"""Where normals come from: a generator, or what was drawn from one on another thread."""


def standard_normals(source: Normals, count: int, device: torch.device) -> Tensor:
    """So many of them on the device, in float64."""
    if isinstance(source, NormalsAhead):
        normals_P = source.take(count)
    else:
        normals_P = host_memory((count,), torch.float64, device)
        source.standard_normal(out=normals_P.numpy())
    return normals_P.to(device, non_blocking=True)


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(thread_name_prefix="normals")


LARGEST_MULTIPLIER = 2.0**19


@dataclass(frozen=True, kw_only=True)
class GaussianNoise:
    """Give z = noise_multiplier, or sigma = noise_std (then z = sigma / sensitivity, and is what the ledger records)."""

    noise_multiplier: float | None = None
    noise_std: float | None = None

    def __post_init__(self) -> None:
        given = [v for v in (self.noise_multiplier, self.noise_std) if v is not None]
        require(len(given) == 1, "give exactly one of noise_multiplier (z) and noise_std (sigma).")
        require_positive(noise_multiplier=self.noise_multiplier, noise_std=self.noise_std)

    def multiplier(self, sensitivity: float) -> float:
        """z, the noise in units of the sensitivity."""
        if math.isinf(sensitivity):
            raise UnprovenCombination(
                "Gaussian noise needs an average of bounded sensitivity: a clip ([clip] kind = 'flat' or 'per_layer') and "
                "[estimator] kind = 'fixed_denominator' or 'clipped_denominator'."
            )
        z = self.noise_multiplier if self.noise_multiplier is not None else (self.noise_std or 0.0) / sensitivity
        # DP: with the grid at 2^-21 of the sensitivity or coarser, wider noise would overflow the integers or leave their low
        # bits bare; float64 fills 2^40 units evenly.
        if not 0 < z <= LARGEST_MULTIPLIER:
            raise InvalidValue(
                f"The noise is {z:g} times the sensitivity; at most 2^19 can be added exactly. Lower it."
            )
        return z

    def std(self, sensitivity: float) -> float:
        """sigma, the noise in units of the model's parameters."""
        return self.multiplier(sensitivity) * sensitivity

    def add(self, average: BoundedAverage, rng: Normals) -> NoisyAverage:
        # DP: the scale comes from the sensitivity that travels with the value, and from nowhere else.
        std = self.std(average.sensitivity)
        # DP: one independent draw for each coordinate, in float64.
        normal_P = standard_normals(rng, average.units_P.numel(), average.units_P.device)
        # DP: whole units only. Float addition of noise would leave a user's low bits to be seen.
        noise_P = normal_P * (std / average.unit)
        units_P = average.units_P + noise_P.round().to(torch.int64)
        return NoisyAverage(average_P=units_P.double() * average.unit, noise_std=std)


@dataclass(frozen=True, kw_only=True)
class NoNoise:
    """The non-private baseline, spelled out: its event is NonPrivate and its epsilon prints as infinity."""

    def multiplier(self, sensitivity: float) -> float:
        return 0.0

    def std(self, sensitivity: float) -> float:
        return 0.0

    def add(self, average: BoundedAverage, rng: Normals) -> NoisyAverage:
        return NoisyAverage(average_P=average.average_P, noise_std=0.0)


Noise = GaussianNoise | NoNoise
