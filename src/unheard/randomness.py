"""Who may draw: secure streams keyed by the operating system, and named reproducible ones for experiments.

In: nothing (secure), or a seed (reproducible). Out: a numpy Generator for each purpose and attempt, never used twice.
The generator is AES-128 in counter mode (randomgen's AESCounter); its output is checked against the `cryptography` package by
test. `torch.manual_seed` and numpy's global state move nothing here.
"""

import hashlib
import os
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from randomgen import AESCounter

GENERATOR = "AES-128 in counter mode (randomgen.AESCounter)"


def secure_generator() -> np.random.Generator:
    """A generator whose 128-bit key comes from the operating system and is kept nowhere else."""
    return _generator(os.urandom(16))


def reproducible_generator(seed: int, *labels: str | int) -> np.random.Generator:
    """The same generator keyed by a hash of the seed and the labels: different labels, independent streams."""
    text = "\x1f".join([str(int(seed)), *(str(label) for label in labels)])
    return _generator(hashlib.sha256(text.encode()).digest()[:16])


def _generator(key: bytes) -> np.random.Generator:
    # DP: `key=` sets the AES key itself; `seed=` would pass it through a 64-bit mixer first.
    return np.random.Generator(AESCounter(key=int.from_bytes(key, "little")))  # pyright: ignore[reportArgumentType]


class Streams(Protocol):
    """What a round may ask for. `attempt` counts rounds ever started in the run, so a round done again draws anew."""

    def sampling(self, attempt: int) -> np.random.Generator: ...

    def batches(self, attempt: int) -> np.random.Generator: ...

    def noise(self, attempt: int) -> np.random.Generator: ...

    def count(self, attempt: int) -> np.random.Generator: ...

    def describe(self) -> dict[str, str]: ...


@dataclass(frozen=True, kw_only=True)
class SecureStreams:
    """A fresh key for every request: nothing can be replayed, not even by whoever ran it."""

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
    """The same run again from the same seed. Whoever knows the seed can subtract the noise: no guarantee against them."""

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
