"""Noise: add noise to the private average of a cohort, so that the result may be released.

Input: a `BoundedAverage` and a stream of random numbers. Output: a `NoisyAverage`. Only this module and `correlated.py`
turn a private average into a public one. In the paper: theta + Delta + N(0, I sigma^2) of Algorithm 1, with
sigma = z * sensitivity.

The noise is a Gaussian, rounded to the public grid of the average: integers that are drawn exactly (`exact_normal.py`)
from a secure generator, and added to integers. The released value is therefore a rounding of the continuous Gaussian
mechanism, so the accountants of that mechanism apply (docs/privacy.md).

    >>> GaussianNoise(noise_multiplier=1.0).std(sensitivity=0.15)
    0.15
    >>> GaussianNoise(noise_std=0.3).multiplier(sensitivity=0.15)
    2.0
    >>> NoNoise().std(sensitivity=0.15)
    0.0

The nodes of a federated run add `DistributedGaussianNoise` themselves, in exact shares, so that users need not trust
the server with sums that have no noise. Correlated noise (`correlated.py`) is a recursion over rounds in float64, and
draws float64 normals.

`ExactNormalsAhead` and `NormalsAhead` draw the noise of a round on other threads, or on a GPU, while the engine sums
the updates. They draw in blocks. Each block has its own part of the round's stream, so the noise does not depend on the
number of threads, and a GPU draws the same integers as a CPU.
"""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from unheard.config import require, require_positive
from unheard.errors import InvalidValue, PrivacyError, UnprovenCombination
from unheard.mechanism.aggregation import BoundedAverage, NoisyAverage, has_kernels
from unheard.mechanism.exact_normal import exact_normals, rounded_normals
from unheard.parameters import host_memory
from unheard.randomness import StreamPart, is_new, split_stream

LARGEST_MULTIPLIER = 2.0**19
"""The largest z. With more noise the integers could overflow, or float64 normals would not reach their low bits."""

SMALLEST_SHARE = 32.0
"""The smallest standard deviation of one node's share, in units of the grid, that the proof covers."""

NORMALS_PER_BLOCK = 2**17
"""The number of normals in a block, which one thread draws from one part of the stream: 1 to 3 ms of work."""

EXACT_NORMALS_PER_BLOCK = 2**15
"""The number of exact normals in a block. The intermediate arrays of a block fit into the cache of a core."""

WIDEST_ON_GPU = 2.0**30
"""The largest standard deviation, in units of the grid, that a GPU draws. With a larger one float64 would leave too
many roundings undecided."""

MAX_THREADS = min(16, os.cpu_count() or 1)
"""The number of threads that draw normals."""


class Noise(Protocol):
    """The interface of a noise, which the plan and the round use.

    The code treats `NoNoise`, and no other class, as a run without noise. Every other class must make a round private.
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
        """Return z, the standard deviation of the noise in units of the sensitivity; 0 for no noise.

        The round's event is charged at this value.
        """
        ...

    def std(self, sensitivity: float) -> float:
        """Return sigma, the standard deviation of the noise in units of the model's parameters."""
        ...

    def changed(self, noise_multiplier: float | None, noise_std: float | None) -> "Noise":
        """Return the same kind of noise with another scale, for a schedule. One of the two is given.

        Args:
            noise_multiplier: The new z; None if `noise_std` is given.
            noise_std: The new sigma; None if `noise_multiplier` is given.
        """
        ...

    def ahead(
        self, rng: np.random.Generator, count: int, device: torch.device, scale: float | None = None
    ) -> "Normals":
        """Start to draw the noise of a round on other threads, while the engine sums the updates.

        Args:
            rng: The noise stream of the attempt.
            count: The number of random numbers that the round needs.
            device: The device on which they are used.
            scale: sigma in units of the average's grid (`RoundPlan.noise_units`); None if it is not known yet.

        Returns:
            The source to pass to `add`. It is `rng` itself if the noise does not draw ahead.
        """
        ...

    def add(self, average: BoundedAverage, rng: "Normals") -> NoisyAverage:
        """Add noise to the average of a cohort. The round may release the result.

        Args:
            average: The average of the cohort, with its sensitivity. Private.
            rng: The source that `ahead` returned, or a generator.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class GaussianNoise:
    """Gaussian noise on every coordinate of the average.

    Args:
        noise_multiplier: z; sigma is then z times the sensitivity.
        noise_std: sigma, instead of z; then z = sigma / sensitivity. The ledger records z in both cases.

    Raises:
        InvalidValue: Both or none of the two are given, or a value is not above 0. `multiplier` raises it if z is above
            2^19.
        UnprovenCombination: The average has no bounded sensitivity (raised by `multiplier`).

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
        """Return z, the standard deviation of the noise in units of the sensitivity."""
        if math.isinf(sensitivity):
            raise UnprovenCombination(
                "Gaussian noise needs an average of bounded sensitivity: a clip ([clip] kind = 'flat' or 'per_layer') and "
                "[estimator] kind = 'fixed_denominator' or 'clipped_denominator'."
            )
        z = self.noise_multiplier if self.noise_multiplier is not None else (self.noise_std or 0.0) / sensitivity
        # DP: the grid is at least 2^-21 of the sensitivity. With more noise the integers could overflow, and float64
        # noise, which fills 2^40 units evenly, would leave their low bits visible.
        if not 0 < z <= LARGEST_MULTIPLIER:
            raise InvalidValue(
                f"The noise is {z:g} times the sensitivity; at most 2^19 can be added exactly. Lower it."
            )
        return z

    def std(self, sensitivity: float) -> float:
        """Return sigma, the standard deviation of the noise in units of the model's parameters."""
        return self.multiplier(sensitivity) * sensitivity

    def changed(self, noise_multiplier: float | None, noise_std: float | None) -> "GaussianNoise":
        """Return the same kind of noise with another scale, for a schedule."""
        return type(self)(noise_multiplier=noise_multiplier, noise_std=noise_std)

    def ahead(
        self, rng: np.random.Generator, count: int, device: torch.device, scale: float | None = None
    ) -> "Normals":
        """Start to draw the noise of a round before its average is known.

        Args:
            rng: The noise stream of the round.
            count: The number of coordinates.
            device: The device of the average.
            scale: The standard deviation of the noise in units of the grid; None if it is not known yet. Then `add`
                draws the noise.

        Returns:
            The noise, to be passed to `add` as `rng`.
        """
        return ExactNormalsAhead(rng, count, device, scale)

    def add(self, average: BoundedAverage, rng: "Normals") -> NoisyAverage:
        """Add N(0, std^2), rounded to the average's grid, to each coordinate."""
        # DP: the scale comes only from the sensitivity that the average carries.
        std = self.std(average.sensitivity)
        count, device = average.units_P.numel(), average.units_P.device
        normals = rng if isinstance(rng, ExactNormalsAhead) else ExactNormalsAhead(_generator_of(rng), count, device)
        # DP: each coordinate gets an independent integer from the exact distribution; no float64 is added to a user's
        # data.
        noise_P = normals.take(count, in_units(std, average.unit))
        return NoisyAverage(average_P=(average.units_P + noise_P).double() * average.unit, noise_std=std)


@dataclass(frozen=True, kw_only=True)
class ExactGaussianNoise(GaussianNoise):
    """The same noise as `GaussianNoise`, for old run files with `[noise] kind = "exact_gaussian"`.

    It was a separate kind before `GaussianNoise` drew its integers exactly.

    Args:
        noise_multiplier: As in `GaussianNoise`.
        noise_std: As in `GaussianNoise`.

    Example:
        >>> ExactGaussianNoise(noise_multiplier=0.5).std(sensitivity=0.002)
        0.001
    """


def in_units(std: float, unit: float) -> float:
    """Convert a standard deviation to units of a grid, rounded up.

    Args:
        std: sigma.
        unit: The size of one unit of the grid.
    """
    # DP: the noise is at least as wide as the event says. The sensitivity, its product with z, the unit and this quotient
    # are each rounded by at most 2^-53 of themselves.
    return std / unit * (1 + 2.0**-50)


@dataclass(frozen=True, kw_only=True)
class DistributedGaussianNoise:
    """Gaussian noise in shares, one from each node that takes part in a round; the server adds none.

    Every node that takes part (a party) adds its share to its integers before secure aggregation. A share is a Gaussian
    that is rounded to the grid and drawn exactly, with variance (z S / g)^2 / n, where n = `min_parties` is declared. A
    sum is used only if at least n parties finished, so its noise has at least the variance (z S / g)^2.

    The accountants of the Gaussian mechanism hold for a sum of rounded Gaussians, for this reason (proof:
    docs/privacy.md, section 14). The sum of m independent rounded Gaussians has the distribution of round(X + V), up to
    a total variation distance below 2^-900 if the standard deviation of each share is at least `SMALLEST_SHARE` units.
    Here X is one Gaussian with the sum of the variances, and V is independent of X and of all data. For a sum u of
    updates, round(u + X + V) is post-processing of u + X.

    In the literature the discrete Gaussian (Kairouz, Liu and Steinke, "The Distributed Discrete Gaussian Mechanism",
    2021) and the Skellam distribution (Agarwal, Kairouz and Liu 2021) are used for the same purpose on coarse grids.
    The grid here is fine (S / g is at least 2^20), so rounded Gaussians need neither a new accountant nor a larger
    epsilon.

    The noise needs secure aggregation (`[engine] secure_aggregation = true`), `[estimator] kind = "fixed_denominator"` and a
    clip that is not adaptive.

    Args:
        noise_multiplier: z of the sum of the shares of `min_parties` nodes.
        min_parties: The smallest number of nodes that must finish a round. With fewer nodes the round is abandoned; its
            charge stays in the ledger.
        noise_std: Always None, because distributed noise is declared by its multiplier only.

    Raises:
        InvalidValue: A number is out of range.

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
        """Return z, the standard deviation of `min_parties` shares in units of the sensitivity."""
        if math.isinf(sensitivity):
            raise UnprovenCombination("Noise needs an average of bounded sensitivity: set [clip] kind = 'flat'.")
        return self.noise_multiplier

    def std(self, sensitivity: float) -> float:
        """Return sigma of `min_parties` shares, in units of the model's parameters."""
        return self.multiplier(sensitivity) * sensitivity

    def changed(self, noise_multiplier: float | None, noise_std: float | None) -> "DistributedGaussianNoise":
        """Return the same noise with another z, for a schedule."""
        if noise_multiplier is None:
            raise InvalidValue("The schedule of distributed noise sets noise_multiplier, not noise_std.")
        return replace(self, noise_multiplier=noise_multiplier)

    def ahead(
        self, rng: np.random.Generator, count: int, device: torch.device, scale: float | None = None
    ) -> "Normals":
        """Return the generator. The server draws no noise, because the nodes draw their own."""
        return rng

    def share_std(self, l2_bound: float, grid: float) -> float:
        """Return the standard deviation of one node's share, in units of the grid.

        Args:
            l2_bound: S, the largest L2 norm of a user's update.
            grid: The size of one unit.

        Raises:
            UnprovenCombination: The share is below `SMALLEST_SHARE`, the smallest that the proof covers.
        """
        # DP: rounded up, so that a share is never below its part of z S / g; the rounding errors of float64 are far
        # below 2^-40.
        std = self.noise_multiplier * (l2_bound / grid) / math.sqrt(self.min_parties) * (1 + 2.0**-40)
        # DP: the proof needs shares much wider than one unit.
        if std < SMALLEST_SHARE:
            raise UnprovenCombination(
                f"The noise of one node would be {std:.3g} units wide; the proof needs {SMALLEST_SHARE:g}. Raise "
                "noise_multiplier, or lower min_parties."
            )
        return std

    def share(self, rng: np.random.Generator, count: int, l2_bound: float, grid: float) -> np.ndarray:
        """Draw the share of one node for one round, int64 [P].

        Args:
            rng: The node's own secure generator (`randomness.secure_generator`).
            count: P, the number of parameters.
            l2_bound: S, the largest L2 norm of a user's update.
            grid: The size of one unit.
        """
        # DP: drawn exactly, one independent integer for each coordinate.
        return rounded_normals(rng, count, self.share_std(l2_bound, grid))

    def add(self, average: BoundedAverage, rng: "Normals") -> NoisyAverage:
        """Return the average as public, after checking that the nodes have added enough noise.

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
    """No noise, for a non-private baseline. The event of a round is `NonPrivate`, and epsilon is infinite.

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
            "The schedule sets noise, but [noise] is 'none'. Start with noise, or leave noise out of [[schedule]]."
        )

    def ahead(
        self, rng: np.random.Generator, count: int, device: torch.device, scale: float | None = None
    ) -> "Normals":
        """Return the generator. There is no noise to draw before the round."""
        return rng

    def add(self, average: BoundedAverage, rng: "Normals") -> NoisyAverage:
        """Return the average unchanged. The round is not private: its event is `NonPrivate`."""
        return NoisyAverage(average_P=average.average_P, noise_std=0.0)


class NormalsAhead:
    """Standard normals in float64, which other threads draw while the engine works. They can be taken once.

    Args:
        rng: The stream of the round's noise.
        count: The number of normals.
        device: The device on which they will be used; for a GPU the memory is pinned.
    """

    def __init__(self, rng: np.random.Generator, count: int, device: torch.device) -> None:
        # The threads draw into memory that a GPU can read directly, which saves a copy.
        normals_P = host_memory((count,), torch.float64, device)
        out_P = normals_P.numpy()
        blocks = [(stream, out_P[part]) for stream, part in _blocks(rng, count, NORMALS_PER_BLOCK)]
        self._ahead: tuple[Tensor, list[Future[None]]] | None = (normals_P, _divided(_fill_blocks, blocks))

    def take(self, count: int) -> Tensor:
        """Wait until all normals are drawn, and return them in host memory.

        Raises:
            RuntimeError: They were taken before, or `count` is not the number that was drawn.
        """
        ahead, self._ahead = self._ahead, None
        # DP: the same normals are never returned twice.
        if ahead is None or count != len(ahead[0]):
            raise RuntimeError("These normals were taken already, or another number of them was drawn.")
        normals_P, drawn = ahead
        # DP: normals are returned only when all of them are drawn; before that the memory has other content.
        for block in drawn:
            block.result()
        return normals_P


class ExactNormalsAhead:
    """The integers of one round's noise. Other threads draw them while the engine works. They can be taken once.

    Args:
        rng: The stream of the round's noise.
        count: The number of integers.
        device: The device on which they will be used. A GPU draws them itself.
        scale: The standard deviation in units of the grid. None if it is not known yet; then `take` draws the integers.
    """

    def __init__(self, rng: np.random.Generator, count: int, device: torch.device, scale: float | None = None) -> None:
        self._rng: np.random.Generator | None = rng
        self._count, self._device, self._scale = count, device, scale
        self._drawn = None if scale is None else self._draw(rng, scale)

    def take(self, count: int, scale: float) -> Tensor:
        """Return round(scale * normal) for each normal, int64, on the device.

        Raises:
            RuntimeError: The integers were taken before, or another number or scale was drawn.
        """
        rng, self._rng = self._rng, None
        # DP: the same exact noise is never returned twice.
        if rng is None or count != self._count:
            raise RuntimeError("These normals were taken already, or another number of them was drawn.")
        # DP: noise with another scale than the average needs is never returned.
        if self._scale not in (None, scale):
            raise RuntimeError(f"These normals were drawn with the scale {self._scale!r}, not {scale!r}.")
        return (self._drawn or self._draw(rng, scale))()

    def _draw(self, rng: np.random.Generator, scale: float) -> Callable[[], Tensor]:
        """Start to draw the integers, and return a function that waits for them and returns them."""
        count, size = self._count, EXACT_NORMALS_PER_BLOCK
        starts = range(0, count, size)
        is_on_gpu = has_kernels(self._device) and scale <= WIDEST_ON_GPU and is_new(rng) and count > 0
        # DP: each block has its own part of the stream, so that no two coordinates share noise.
        parts = split_stream(rng, len(starts))
        if is_on_gpu:
            from unheard.mechanism.noise_kernels import rounded_normals_on

            return rounded_normals_on(self._device, parts, size, count, scale)
        rounded_P = host_memory((count,), torch.int64, self._device)
        out_P = rounded_P.numpy()

        def fill(blocks: Sequence[tuple[StreamPart, int]]) -> None:
            """Draw some of the blocks, each into its place in `out_P`."""
            for part, start in blocks:
                out = out_P[start : start + size]
                out[:] = exact_normals(part, len(out)).rounded(scale)

        tasks = _divided(fill, list(zip(parts, starts, strict=True)))

        def wait() -> Tensor:
            """Wait until all integers are drawn, and return them on the device."""
            # DP: exact noise is returned only when all of it is drawn.
            for task in tasks:
                task.result()
            return rounded_P.to(self._device, non_blocking=True)

        return wait


Normals = np.random.Generator | NormalsAhead | ExactNormalsAhead
"""A source of noise: a generator, or an object whose numbers other threads are drawing already."""


def _blocks(
    rng: np.random.Generator, count: int, size: int
) -> Iterator[tuple[np.random.Generator | StreamPart, slice]]:
    """Divide a draw of `count` normals into blocks of `size`, and yield the stream and the slice of each block."""
    starts = range(0, count, size)
    # DP: each block of float64 normals, too, has its own part of the stream.
    streams = split_stream(rng, len(starts)) if len(starts) > 1 else [rng]
    for stream, start in zip(streams, starts, strict=False):
        yield stream, slice(start, min(start + size, count))


def _divided(work: Callable[[Sequence[Any]], None], blocks: Sequence[Any]) -> list["Future[None]"]:
    """Divide the blocks among the idle threads (at least one task), and start the work.

    If several runs train at the same time, there are more blocks than threads. One task per thread is then faster than
    one task per block, because all threads wait while the interpreter starts a task.

    Args:
        work: Processes a list of blocks.
        blocks: All blocks.

    Returns:
        One future per task.
    """
    busy = [task for task in _TASKS if not task.done()]
    tasks = max(1, min(len(blocks), MAX_THREADS - len(busy)))
    drawn = [_threads().submit(work, blocks[first::tasks]) for first in range(tasks)]
    _TASKS[:] = busy + drawn
    return drawn


_TASKS: list["Future[None]"] = []
"""The tasks that were started and may still be running. It only affects how blocks are divided among threads."""


def _fill_blocks(blocks: Sequence[tuple[np.random.Generator | StreamPart, np.ndarray]]) -> None:
    for stream, out in blocks:
        stream.standard_normal(out=out)


def _generator_of(source: Normals) -> np.random.Generator:
    if not isinstance(source, np.random.Generator):
        raise TypeError(f"this noise needs a generator, not {type(source).__name__}")
    return source


def standard_normals(source: Normals, count: int, device: torch.device) -> Tensor:
    """Draw `count` standard normals in float64, and return them on the device."""
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
