"""Noise that the nodes of a federated run add themselves, before secure aggregation: no server has to be trusted.

Every node that takes part in a round (a party) adds a share of noise to its integers: a Gaussian rounded to the grid,
drawn exactly (exact_normal.py), with variance (z S / g)^2 / n, where n = `min_parties` is declared. A sum is used only
if at least n parties finished, so its noise has at least the variance (z S / g)^2. With fewer the round is abandoned.

Why the accountants of the Gaussian mechanism hold for a sum of rounded Gaussians (the proof is in docs/privacy.md,
section 14): the sum of m independent rounded Gaussians has the distribution of round(X + V), where X is one Gaussian
with the sum of the variances and V is independent of X and of all data, up to a total variation distance below 2^-900
if the standard deviation of each share is at least `SMALLEST_SHARE` units. round(u + X + V) is post-processing of u + X.

In the literature: the discrete Gaussian (Kairouz, Liu and Steinke, "The Distributed Discrete Gaussian Mechanism", 2021)
and the Skellam distribution (Agarwal, Kairouz and Liu 2021) are used for the same purpose on coarse grids. The grid
here is fine (S / g is at least 2^20), so that rounded Gaussians need neither a new accountant nor a larger epsilon.

    [noise]
    kind = "distributed_gaussian"
    noise_multiplier = 1.0
    min_parties = 20
"""

import math
from dataclasses import dataclass, replace

import numpy as np
import torch

from unheard.config import require, require_positive
from unheard.errors import InvalidValue, PrivacyError, UnprovenCombination
from unheard.mechanism.aggregation import BoundedAverage, NoisyAverage
from unheard.mechanism.exact_normal import rounded_normals
from unheard.mechanism.noise import LARGEST_MULTIPLIER, Normals

SMALLEST_SHARE = 32.0
"""The smallest standard deviation of a share, in units of the grid, for which the distance of the proof is tiny."""


@dataclass(frozen=True, kw_only=True)
class DistributedGaussianNoise:
    """Gaussian noise in shares, one from each node that takes part; the server adds none.

    It needs secure aggregation (`[engine] secure_aggregation = true`), `[estimator] kind = "fixed_denominator"` and a
    clip that is not adaptive.

    Args:
        noise_multiplier: z of the shares of `min_parties` nodes together.
        min_parties: The smallest number of nodes that must finish a round; with fewer the round is abandoned, and its
            charge stays.
        noise_std: None: the noise is declared by its multiplier only.

    Raises:
        InvalidValue: For a number out of range.
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
        """The noise from a change of the schedule on."""
        if noise_multiplier is None:
            raise InvalidValue("The schedule of distributed noise sets noise_multiplier, not noise_std.")
        return replace(self, noise_multiplier=noise_multiplier)

    def ahead(self, rng: np.random.Generator, count: int, device: torch.device) -> Normals:
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

    def add(self, average: BoundedAverage, rng: Normals) -> NoisyAverage:
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
