"""Random generators: secure ones keyed by the operating system, and reproducible ones keyed by a seed for experiments.

In: nothing (secure) or a seed (reproducible). Out: a numpy `Generator` for each purpose and attempt, never used twice.
The generator is AES-128 in counter mode (randomgen's `AESCounter`; NIST SP 800-90A describes the construction). A test
compares its output with the `cryptography` package. `torch.manual_seed` and numpy's global state have no effect here.

The privacy argument needs from this module that noise is unpredictable and that no two draws share noise
(docs/privacy.md, "noise"). On why a simulation-grade generator is not enough: Garfinkel and Leclerc, "Randomness
Concerns When Deploying Differential Privacy" (2020).

>>> streams = ReproducibleStreams(seed=1)
>>> streams.noise(attempt=0).standard_normal() == streams.noise(attempt=0).standard_normal()
True
>>> streams.noise(attempt=0).standard_normal() == streams.noise(attempt=1).standard_normal()
False
"""

import hashlib
import os
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from randomgen import AESCounter

GENERATOR = "AES-128 in counter mode (randomgen.AESCounter)"


def secure_generator() -> np.random.Generator:
    """Make a generator whose 128-bit key comes from the operating system and is kept nowhere else."""
    return _generator(os.urandom(16))


def reproducible_generator(seed: int, *labels: str | int) -> np.random.Generator:
    """Make a generator whose key is a hash of a seed and labels.

    Args:
        seed: The seed of the run.
        labels: What the generator is for. Different labels give independent streams.
    """
    text = "\x1f".join([str(int(seed)), *(str(label) for label in labels)])
    return _generator(hashlib.sha256(text.encode()).digest()[:16])


def _generator(key: bytes) -> np.random.Generator:
    # DP: `key=` sets the AES key itself; `seed=` would pass it through a 64-bit mixer first.
    return np.random.Generator(AESCounter(key=int.from_bytes(key, "little")))  # pyright: ignore[reportArgumentType]


class Streams(Protocol):
    """The generators of a run, one per purpose and attempt.

    `attempt` counts the rounds ever started in the run, so a round that is repeated after a crash draws anew.
    """

    def sampling(self, attempt: int) -> np.random.Generator:
        """The generator that draws the cohort."""
        ...

    def batches(self, attempt: int) -> np.random.Generator:
        """The generator that shuffles each user's local batches."""
        ...

    def noise(self, attempt: int) -> np.random.Generator:
        """The generator of the noise on the average."""
        ...

    def count(self, attempt: int) -> np.random.Generator:
        """The generator of the noise on the count of clipped updates (adaptive clipping)."""
        ...

    def describe(self) -> dict[str, str]:
        """The mode and the generator, as the statement prints them."""
        ...


@dataclass(frozen=True, kw_only=True)
class SecureStreams:
    """A fresh key for every request: nothing can be replayed, not even by the person who ran it."""

    def sampling(self, attempt: int) -> np.random.Generator:
        return secure_generator()

    def batches(self, attempt: int) -> np.random.Generator:
        return secure_generator()

    def noise(self, attempt: int) -> np.random.Generator:
        return secure_generator()

    def count(self, attempt: int) -> np.random.Generator:
        return secure_generator()

    def describe(self) -> dict[str, str]:
        return {"mode": "secure", "generator": f"{GENERATOR}, keyed by the operating system"}


@dataclass(frozen=True, kw_only=True)
class ReproducibleStreams:
    """The same streams from the same seed, for experiments.

    Anyone who knows the seed can subtract the noise, so there is no guarantee against them; the statement says so.

    Args:
        seed: Not shown by `repr`.
    """

    seed: int = field(repr=False)

    # DP: the purpose and the attempt are in the key, so that no two draws of a run ever share noise.
    def sampling(self, attempt: int) -> np.random.Generator:
        return reproducible_generator(self.seed, "sampling", attempt)

    def batches(self, attempt: int) -> np.random.Generator:
        return reproducible_generator(self.seed, "batches", attempt)

    def noise(self, attempt: int) -> np.random.Generator:
        return reproducible_generator(self.seed, "noise", attempt)

    def count(self, attempt: int) -> np.random.Generator:
        return reproducible_generator(self.seed, "count", attempt)

    def describe(self) -> dict[str, str]:
        return {"mode": "reproducible", "generator": f"{GENERATOR}, keyed by a seed"}
