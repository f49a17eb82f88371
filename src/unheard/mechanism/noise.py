"""Noise: the one place where a private average becomes a public one.

Input: a `BoundedAverage` and a stream of randomness. Output: a `NoisyAverage`. In the paper: theta + Delta + N(0, I
sigma^2) of Algorithm 1, with sigma = z * sensitivity.

The noise is drawn in float64 from a secure generator, rounded to the average's own public grid and added there to
integers. What is released is therefore a rounding of the continuous Gaussian mechanism, so its accountants apply
(docs/privacy.md).

    >>> GaussianNoise(noise_multiplier=1.0).std(sensitivity=0.15)
    0.15
    >>> GaussianNoise(noise_std=0.3).multiplier(sensitivity=0.15)
    2.0
    >>> NoNoise().std(sensitivity=0.15)
    0.0

`ExactGaussianNoise` has the same distribution without the idealisation that float64 normals are Gaussian: its integers
are drawn exactly (`exact_normal.py`). `DistributedGaussianNoise` is added by the nodes of a federated run, in exact
shares, so that no server has to be trusted.

`NormalsAhead` draws the normals of a round on other threads while the engine sums the updates. They are drawn in blocks
of `NORMALS_PER_BLOCK`; each block has a part of the round's stream of its own, so the number of threads does not change
the noise.
"""

import math
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from unheard.config import require, require_positive
from unheard.errors import InvalidValue, PrivacyError, UnprovenCombination
from unheard.mechanism.aggregation import BoundedAverage, NoisyAverage
from unheard.mechanism.exact_normal import ExactNormals, exact_normals, rounded_normals
from unheard.parameters import host_memory
from unheard.randomness import StreamPart, split_stream

LARGEST_MULTIPLIER = 2.0**19
"""The largest z: with wider noise the integers could overflow, or their low bits would not be covered."""

SMALLEST_SHARE = 32.0
"""The smallest standard deviation of a share, in units of the grid, for which the distance of the proof is tiny."""

NORMALS_PER_BLOCK = 2**17
"""Normals that one thread draws from one part of the stream: 1 to 3 ms of work."""

EXACT_NORMALS_PER_BLOCK = 2**15
"""`NORMALS_PER_BLOCK` for exact normals: their arrays of intermediate results stay in the cache of a core."""

MAX_THREADS = min(16, os.cpu_count() or 1)
"""Threads that draw normals."""


class Noise(Protocol):
    """What the plan and the round need of a noise.

    Only `NoNoise` is taken for none: every other class must be private noise.
    """

    @property
    def noise_multiplier(self) -> float | None:
        """z, if the run file declares it; None if it declares sigma or there is no noise."""
        ...

    @property
    def noise_std(self) -> float | None:
        """sigma, if the run file declares it; None if it declares z or there is no noise."""
        ...

    def multiplier(self, sensitivity: float) -> float:
        """z, the standard deviation in units of the sensitivity; 0 for no noise.

        The round's event is charged at this value.
        """
        ...

    def std(self, sensitivity: float) -> float:
        """sigma, the standard deviation in units of the model's parameters."""
        ...

    def changed(self, noise_multiplier: float | None, noise_std: float | None) -> "Noise":
        """Return the same kind of noise with another scale, for a schedule. One of the two is given.

        Args:
            noise_multiplier: The new z; None if `noise_std` is given.
            noise_std: The new sigma; None if `noise_multiplier` is given.
        """
        ...

    def ahead(self, rng: np.random.Generator, count: int, device: torch.device) -> "Normals":
        """Start to draw the `count` normals of a round on other threads; without such a draw, return the generator.

        Args:
            rng: The noise stream of the attempt.
            count: How many normals the round needs.
            device: Where they are used.
        """
        ...

    def add(self, average: BoundedAverage, rng: "Normals") -> NoisyAverage:
        """The average with noise: the value that a round releases.

        Args:
            average: The average of the cohort, with its sensitivity.
            rng: The normals, or the stream to draw them from.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class GaussianNoise:
    """Gaussian noise on every coordinate of the average.

    Args:
        noise_multiplier: z; sigma is then z times the sensitivity.
        noise_std: sigma itself; then z = sigma / sensitivity, which is what the ledger records.

    Raises:
        InvalidValue: Unless exactly one of the two is given, or z is above 2^19.
        UnprovenCombination: If the average has no bounded sensitivity.

    Example:
        >>> GaussianNoise(noise_multiplier=1.0).std(sensitivity=0.003)
        0.003
        >>> GaussianNoise(noise_std=0.003).multiplier(sensitivity=0.003)
        1.0
    """

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
        # DP: with the grid at 2^-21 of the sensitivity or coarser, wider noise would overflow the integers or leave
        # their low bits bare; float64 fills 2^40 units evenly.
        if not 0 < z <= LARGEST_MULTIPLIER:
            raise InvalidValue(
                f"The noise is {z:g} times the sensitivity; at most 2^19 can be added exactly. Lower it."
            )
        return z

    def std(self, sensitivity: float) -> float:
        """sigma, the noise in units of the model's parameters."""
        return self.multiplier(sensitivity) * sensitivity

    def changed(self, noise_multiplier: float | None, noise_std: float | None) -> "GaussianNoise":
        """The same kind of noise with another scale, for a schedule."""
        return type(self)(noise_multiplier=noise_multiplier, noise_std=noise_std)

    def ahead(self, rng: np.random.Generator, count: int, device: torch.device) -> "Normals":
        """Start drawing standard normals on another thread."""
        return NormalsAhead(rng, count, device)

    def add(self, average: BoundedAverage, rng: "Normals") -> NoisyAverage:
        """Add N(0, std^2) to each coordinate, rounded to the average's grid."""
        # DP: the scale comes from the sensitivity that travels with the value, and from nowhere else.
        std = self.std(average.sensitivity)
        # DP: one independent draw for each coordinate, in float64.
        normal_P = standard_normals(rng, average.units_P.numel(), average.units_P.device)
        return rounded_onto_grid(average, normal_P, std)


@dataclass(frozen=True, kw_only=True)
class ExactGaussianNoise(GaussianNoise):
    """Gaussian noise whose rounding to the grid is drawn exactly, in integers (`[noise] kind = "exact_gaussian"`).

    `GaussianNoise` draws float64 normals and rounds them: a Gaussian up to the precision of float64. This class draws
    integers with exactly the distribution of a Gaussian rounded to the grid, so the accountants of the continuous
    mechanism hold without that idealisation. It costs about twice the processor time of `GaussianNoise`, on other threads
    (`benchmarks/normals.py`).

    Args:
        noise_multiplier: As in `GaussianNoise`.
        noise_std: As in `GaussianNoise`.

    Example:
        >>> ExactGaussianNoise(noise_multiplier=0.5).std(sensitivity=0.002)
        0.001
    """

    def ahead(self, rng: np.random.Generator, count: int, device: torch.device) -> "Normals":
        """Start drawing exact normals on another thread."""
        return ExactNormalsAhead(rng, count, device)

    def add(self, average: BoundedAverage, rng: "Normals") -> NoisyAverage:
        """Add discretised normals that are exact on the integers of the average's grid."""
        sigma = self.std(average.sensitivity)
        count = average.units_P.numel()
        device = average.units_P.device
        normals = rng if isinstance(rng, ExactNormalsAhead) else ExactNormalsAhead(_generator_of(rng), count, device)
        # DP: the noise is at least as wide as the event says: products and quotients of float64 may round down.
        scale = math.nextafter(math.nextafter(sigma / average.unit, math.inf), math.inf)
        # DP: integers of the exact distribution; no float64 is added to a user's data.
        noise_P = normals.take_rounded(count, scale).to(device, non_blocking=True)
        return NoisyAverage(average_P=(average.units_P + noise_P).double() * average.unit, noise_std=sigma)


@dataclass(frozen=True, kw_only=True)
class DistributedGaussianNoise:
    """Gaussian noise in shares, one from each node that takes part in a round; the server adds none.

    Every node that takes part (a party) adds its share to its integers before secure aggregation: a Gaussian rounded to
    the grid, drawn exactly, with variance (z S / g)^2 / n, where n = `min_parties` is declared. A sum is used only if
    at least n parties finished, so its noise has at least the variance (z S / g)^2.

    Why the accountants of the Gaussian mechanism hold for a sum of rounded Gaussians (the proof is in docs/privacy.md,
    section 14): the sum of m independent rounded Gaussians has the distribution of round(X + V), where X is one
    Gaussian with the sum of the variances and V is independent of X and of all data, up to a total variation distance
    below 2^-900 if the standard deviation of each share is at least `SMALLEST_SHARE` units. round(u + X + V) is
    post-processing of u + X.

    In the literature the discrete Gaussian (Kairouz, Liu and Steinke, "The Distributed Discrete Gaussian Mechanism",
    2021) and the Skellam distribution (Agarwal, Kairouz and Liu 2021) are used for the same purpose on coarse grids.
    The grid here is fine (S / g is at least 2^20), so rounded Gaussians need neither a new accountant nor a larger
    epsilon.

    The noise needs secure aggregation (`[engine] secure_aggregation = true`), `[estimator] kind = "fixed_denominator"` and a
    clip that is not adaptive.

    Args:
        noise_multiplier: z of the shares of `min_parties` nodes together.
        min_parties: The smallest number of nodes that must finish a round; with fewer the round is abandoned, and its
            charge stays.
        noise_std: None: the noise is declared by its multiplier only.

    Raises:
        InvalidValue: For a number out of range.

    Example:
        >>> DistributedGaussianNoise(noise_multiplier=1.0, min_parties=20).std(sensitivity=0.002)
        0.002
    """

    noise_multiplier: float
    min_parties: int
    noise_std: None = None

    def __post_init__(self) -> None:
        require_positive(noise_multiplier=self.noise_multiplier)
        require(self.noise_multiplier <= LARGEST_MULTIPLIER, "noise_multiplier must be at most 2^19.")
        require(self.min_parties >= 2, "min_parties must be at least 2.")

    def multiplier(self, sensitivity: float) -> float:
        """z, the noise of `min_parties` shares in units of the sensitivity."""
        if math.isinf(sensitivity):
            raise UnprovenCombination("Noise needs an average of bounded sensitivity: set [clip] kind = 'flat'.")
        return self.noise_multiplier

    def std(self, sensitivity: float) -> float:
        """sigma of `min_parties` shares, in units of the model's parameters."""
        return self.multiplier(sensitivity) * sensitivity

    def changed(self, noise_multiplier: float | None, noise_std: float | None) -> "DistributedGaussianNoise":
        """Return the same noise with another z, for a schedule."""
        if noise_multiplier is None:
            raise InvalidValue("The schedule of distributed noise sets noise_multiplier, not noise_std.")
        return replace(self, noise_multiplier=noise_multiplier)

    def ahead(self, rng: np.random.Generator, count: int, device: torch.device) -> "Normals":
        """Nothing is drawn here: the nodes draw their own noise."""
        return rng

    def share_std(self, l2_bound: float, grid: float) -> float:
        """The standard deviation of one node's share, in units of the grid.

        Raises:
            UnprovenCombination: The share is too narrow for the proof.
        """
        # DP: never below its part of z S / g: float64 rounds by far less than 2^-40.
        std = self.noise_multiplier * (l2_bound / grid) / math.sqrt(self.min_parties) * (1 + 2.0**-40)
        # DP: the proof needs shares much wider than one unit.
        if std < SMALLEST_SHARE:
            raise UnprovenCombination(
                f"The noise of one node would be {std:.3g} units wide; the proof needs {SMALLEST_SHARE:g}. Raise "
                "noise_multiplier, or lower min_parties."
            )
        return std

    def share(self, rng: np.random.Generator, count: int, l2_bound: float, grid: float) -> np.ndarray:
        """One node's noise for one round, int64 [P].

        Args:
            rng: The node's own secure generator (`randomness.secure_generator`).
            count: P, the number of parameters.
            l2_bound: S, the largest L2 norm of a user's update.
            grid: The size of one unit.
        """
        # DP: drawn exactly, one independent integer for each coordinate.
        return rounded_normals(rng, count, self.share_std(l2_bound, grid))

    def add(self, average: BoundedAverage, rng: "Normals") -> NoisyAverage:
        """Take over an average whose noise the nodes have added.

        Raises:
            PrivacyError: The average has less noise than the round was charged for.
        """
        std = self.std(average.sensitivity)
        # DP: a sum without the nodes' noise is never released.
        if not average.added_noise * average.unit >= std:
            raise PrivacyError(
                "[noise] kind = 'distributed_gaussian' is added by the nodes of a federated run, and this sum has none. "
                "Train with --on flower and [engine] secure_aggregation = true, or set [noise] kind = 'gaussian'."
            )
        return NoisyAverage(average_P=average.average_P, noise_std=std)


@dataclass(frozen=True, kw_only=True)
class NoNoise:
    """No noise, for a non-private baseline: its event is `NonPrivate`, and its epsilon prints as infinity.

    Example:
        >>> NoNoise().std(sensitivity=0.002)
        0.0
    """

    noise_multiplier = None
    noise_std = None

    def multiplier(self, sensitivity: float) -> float:
        """Return 0, the noise multiplier of no noise."""
        return 0.0

    def std(self, sensitivity: float) -> float:
        """Return 0, the standard deviation of no noise."""
        return 0.0

    def changed(self, noise_multiplier: float | None, noise_std: float | None) -> "NoNoise":
        """Raise `InvalidValue`: there is no noise to change."""
        raise InvalidValue(
            "The schedule sets noise, but [noise] is 'none'. Start with noise, or leave it out throughout."
        )

    def ahead(self, rng: np.random.Generator, count: int, device: torch.device) -> "Normals":
        """Return the generator. There is no noise to draw before the round."""
        return rng

    def add(self, average: BoundedAverage, rng: "Normals") -> NoisyAverage:
        """The average unchanged, with a noise of 0. Its event is `NonPrivate`."""
        return NoisyAverage(average_P=average.average_P, noise_std=0.0)


def rounded_onto_grid(average: BoundedAverage, normal_P: Tensor, std: float) -> NoisyAverage:
    """The average with noise of `std` times the given numbers, rounded to whole units of the average's grid."""
    # DP: whole units only. Float addition of noise would leave a user's low bits to be seen.
    noise_P = normal_P * (std / average.unit)
    units_P = average.units_P + noise_P.round().to(torch.int64)
    return NoisyAverage(average_P=units_P.double() * average.unit, noise_std=std)


class NormalsAhead:
    """The first normals of a generator, drawn on other threads while the engine works. They can be taken once.

    Args:
        rng: The stream of the round's noise.
        count: How many normals to draw.
        device: Where they will be used; the memory is pinned for a GPU.
    """

    def __init__(self, rng: np.random.Generator, count: int, device: torch.device) -> None:
        # Drawn into the memory that the device reads from, which saves a copy.
        normals_P = host_memory((count,), torch.float64, device)
        out_P = normals_P.numpy()
        blocks = [(stream, out_P[part]) for stream, part in _blocks(rng, count, NORMALS_PER_BLOCK)]
        self._ahead: tuple[Tensor, list[Future[None]]] | None = (normals_P, _drawing(blocks))

    def take(self, count: int) -> Tensor:
        """The normals, once all of them are drawn; raises `RuntimeError` at the second call."""
        ahead, self._ahead = self._ahead, None
        # DP: noise that was given once is never given again.
        if ahead is None or count != len(ahead[0]):
            raise RuntimeError("These normals were given already, or another number of them was drawn.")
        normals_P, drawn = ahead
        # DP: noise is given only when all of it is drawn: before that the memory holds other numbers.
        for block in drawn:
            block.result()
        return normals_P


class ExactNormalsAhead:
    """Exact normals of one round, drawn on other threads while the engine works. They can be taken once.

    Args:
        rng: The stream of the round's noise.
        count: How many normals to draw.
        device: Where they will be used; the memory of the rounded normals is pinned for a GPU.
    """

    def __init__(self, rng: np.random.Generator, count: int, device: torch.device) -> None:
        blocks = list(_blocks(rng, count, EXACT_NORMALS_PER_BLOCK))
        self._parts = [part for _, part in blocks]
        self._device = device
        self._ahead: list[Future[ExactNormals]] | None = [
            _threads().submit(_exact_block, stream, part.stop - part.start) for stream, part in blocks
        ]

    def take_rounded(self, count: int, scale: float) -> Tensor:
        """round(scale * normal) for each normal, once all are drawn; raises `RuntimeError` at the second call."""
        drawn, self._ahead = self._ahead, None
        # DP: exact noise that was given once is never given again.
        if drawn is None or sum(len(block.result()) for block in drawn) != count:
            raise RuntimeError("These normals were given already, or another number of them was drawn.")
        rounded_P = host_memory((count,), torch.int64, self._device)
        out_P = rounded_P.numpy()

        def fill(block: Future[ExactNormals], part: slice) -> None:
            """Scale and round one block of normals into its part of the noise."""
            out_P[part] = block.result().rounded(scale)

        # DP: exact noise is given only when all of it is rounded; `list` waits for that.
        list(_threads().map(fill, drawn, self._parts))
        return rounded_P


Normals = np.random.Generator | NormalsAhead | ExactNormalsAhead
"""A source of standard normals: a generator, or normals that are drawn from one on other threads."""


def _blocks(
    rng: np.random.Generator, count: int, size: int
) -> Iterator[tuple[np.random.Generator | StreamPart, slice]]:
    """The blocks of a draw of `count` normals, `size` at a time: the stream of each, and its part of the draw."""
    starts = range(0, count, size)
    # DP: each block has a part of the stream of its own, so that no two coordinates share noise.
    streams = split_stream(rng, len(starts)) if len(starts) > 1 else [rng]
    for stream, start in zip(streams, starts, strict=False):
        yield stream, slice(start, min(start + size, count))


def _drawing(blocks: Sequence[tuple[np.random.Generator | StreamPart, np.ndarray]]) -> list["Future[None]"]:
    """Start to fill the blocks on as many threads as are idle, and on one at least.

    With several runs side by side there are more blocks than threads. One task per thread then costs less than one task
    per block: all threads wait while the interpreter starts a task.
    """
    busy = [task for task in _TASKS if not task.done()]
    tasks = max(1, min(len(blocks), MAX_THREADS - len(busy)))
    drawn = [_threads().submit(_fill_blocks, blocks[first::tasks]) for first in range(tasks)]
    _TASKS[:] = busy + drawn
    return drawn


_TASKS: list["Future[None]"] = []
"""The draws that were started, of which some may be done. It only decides how blocks are divided among threads."""


def _fill_blocks(blocks: Sequence[tuple[np.random.Generator | StreamPart, np.ndarray]]) -> None:
    for stream, out in blocks:
        stream.standard_normal(out=out)


def _exact_block(stream: np.random.Generator | StreamPart, count: int) -> ExactNormals:
    return exact_normals(stream.generator() if isinstance(stream, StreamPart) else stream, count)


def _generator_of(source: Normals) -> np.random.Generator:
    if not isinstance(source, np.random.Generator):
        raise TypeError(f"this noise cannot be made from {type(source).__name__}")
    return source


def standard_normals(source: Normals, count: int, device: torch.device) -> Tensor:
    """`count` standard normals on the device, in float64."""
    if isinstance(source, NormalsAhead):
        normals_P = source.take(count)
    else:
        normals_P = host_memory((count,), torch.float64, device)
        for stream, part in _blocks(_generator_of(source), count, NORMALS_PER_BLOCK):
            stream.standard_normal(out=normals_P.numpy()[part])
    return normals_P.to(device, non_blocking=True)


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=MAX_THREADS, thread_name_prefix="normals")
