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
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from randomgen import AESCounter

GENERATOR = "AES-128 in counter mode (randomgen.AESCounter)"
KEY_BYTES = 16
OWN_STREAMS = "of the seed, the settings, the store and the first model"
"""In a ledger's header: what the streams of a seeded run follow from. Ledgers of versions before 0.2.0 lack it."""
SHARED_COHORTS = "shared with other runs of the seed"
"""In a ledger's header: cohorts and batches follow from the seed alone."""


def secure_generator() -> np.random.Generator:
    """Make a generator whose 128-bit key comes from the operating system and is kept nowhere else."""
    return _generator(os.urandom(KEY_BYTES))


def reproducible_generator(seed: int, *labels: str | int) -> np.random.Generator:
    """Make a generator whose key is a hash of a seed and labels.

    Args:
        seed: The seed of the run.
        labels: What the generator is for. Different labels give independent streams.
    """
    return _generator(_reproducible_key(seed, *labels))


def _reproducible_key(seed: int, *labels: str | int) -> bytes:
    text = "\x1f".join([str(int(seed)), *(str(label) for label in labels)])
    return hashlib.sha256(text.encode()).digest()[:KEY_BYTES]


def generator_from_key(key: bytes) -> np.random.Generator:
    """Make a generator from a 128-bit key, which gives the same numbers each time.

    Args:
        key: 16 bytes, from `Streams.noise_key`. As secret as what the numbers hide.
    """
    if len(key) != KEY_BYTES:
        raise ValueError(f"a key has {KEY_BYTES} bytes, not {len(key)}")
    return _generator(key)


class StreamPart:
    """A part of a stream, which can be drawn from once. Made by `split_stream`.

    Args:
        state: The state of the stream where its first part begins.
        number: The number of the part, from 0.
    """

    def __init__(self, state: dict[str, Any], number: int) -> None:
        self._state: dict[str, Any] | None = state
        self._number = number

    def generator(self) -> np.random.Generator:
        """Make a generator of this part.

        Raises:
            RuntimeError: The part was drawn from before.
        """
        return self._begin(_generator(bytes(KEY_BYTES)))

    def standard_normal(self, out: np.ndarray) -> None:
        """Fill `out` with the standard normals that `generator` would draw.

        A new generator costs five times as much as a new state for one that exists, so those of earlier calls are used
        again; no other thread has them meanwhile.

        Raises:
            RuntimeError: The part was drawn from before.
        """
        try:
            rng = _IDLE.pop()
        except IndexError:
            rng = _generator(bytes(KEY_BYTES))
        self._begin(rng).standard_normal(out=out)
        _IDLE.append(rng)

    def _begin(self, rng: np.random.Generator) -> np.random.Generator:
        """Set a generator to the beginning of this part."""
        state, self._state = self._state, None
        # DP: a second draw would begin at the first number again, and give the same noise.
        if state is None:
            raise RuntimeError("This part of a stream was drawn from already.")
        bits = cast(AESCounter, rng.bit_generator)
        bits.state = state
        # DP: the parts are 2^64 numbers apart, so that no two of them share one.
        bits.advance(self._number << 64)
        return rng


_IDLE: list[np.random.Generator] = []
"""Generators that no thread draws from now. Their state is set before each use."""


def split_stream(rng: np.random.Generator, count: int) -> list[StreamPart]:
    """Divide a stream into `count` independent parts, so that a long draw can be divided among threads.

    The parts have the key of `rng`, and their counters are 2^64 numbers apart. The first begins where `rng` is. `rng`
    itself is moved past all of them.

    >>> rng = reproducible_generator(1)
    >>> first, second = split_stream(rng, 2)
    >>> bool(first.generator().integers(2**63) == reproducible_generator(1).integers(2**63))
    True

    Args:
        rng: A generator of this module.
        count: How many parts to make.
    """
    bits = cast(AESCounter, rng.bit_generator)
    state = bits.state
    # DP: what is drawn from `rng` later shares no number with these parts.
    bits.advance(count << 64)
    return [StreamPart(state, part) for part in range(count)]


def _generator(key: bytes) -> np.random.Generator:
    # DP: `key=` sets the AES key itself; `seed=` would pass it through a 64-bit mixer first.
    return np.random.Generator(AESCounter(key=int.from_bytes(key, "little")))  # pyright: ignore[reportArgumentType]


class Streams(ABC):
    """The generators of a run, one per purpose and attempt. Each has a key of its own; a subclass says which.

    `attempt` counts the rounds ever started in the run, so a round that is repeated after a crash draws anew.
    """

    def sampling(self, attempt: int) -> np.random.Generator:
        """The generator that draws the cohort."""
        return _generator(self._key("sampling", attempt))

    def batches(self, attempt: int) -> np.random.Generator:
        """The generator that shuffles each user's local batches."""
        return _generator(self._key("batches", attempt))

    def noise(self, attempt: int) -> np.random.Generator:
        """The generator of the noise on the average."""
        # DP: the purpose and the attempt are in the key, so that no two draws of a run ever share noise.
        return _generator(self._key("noise", attempt))

    def noise_key(self, attempt: int) -> bytes:
        """The key of the noise of an attempt, for correlated noise, which must be able to repeat it after a crash."""
        return self._key("noise", attempt)

    def groups_key(self, attempt: int) -> bytes:
        """The key of the users' groups of a mechanism with correlated noise that begins with this attempt."""
        return self._key("groups", attempt)

    def count(self, attempt: int) -> np.random.Generator:
        """The generator of the noise on the count of unclipped users (adaptive clipping)."""
        return _generator(self._key("count", attempt))

    @abstractmethod
    def describe(self) -> dict[str, str]:
        """The mode and the generator, as the ledger and the statement have them."""

    @abstractmethod
    def _key(self, purpose: str, attempt: int) -> bytes:
        """The 16 bytes of the key for a purpose and an attempt."""


@dataclass(frozen=True, kw_only=True)
class SecureStreams(Streams):
    """A fresh key for every request: nothing can be replayed, not even by the person who ran it."""

    def describe(self) -> dict[str, str]:
        """The mode and the generator: the operating system gives the keys."""
        return {"mode": "secure", "generator": f"{GENERATOR}, keyed by the operating system"}

    def _key(self, purpose: str, attempt: int) -> bytes:
        # DP: a fresh key for every attempt: a round done again shares no noise with the first attempt.
        return os.urandom(KEY_BYTES)


@dataclass(frozen=True, kw_only=True)
class ReproducibleStreams(Streams):
    """The same streams from the same seed, for experiments.

    Anyone who knows the seed can subtract the noise, so there is no guarantee against them; the statement says so.

    >>> first, second = ReproducibleStreams(seed=1, scope="a"), ReproducibleStreams(seed=1, scope="b")
    >>> first.noise(attempt=0).standard_normal() == second.noise(attempt=0).standard_normal()
    False

    Args:
        seed: Not shown by `repr`.
        scope: What else the streams follow from: a digest of the run's settings, its store and its first model. None:
            the seed alone, as runs of versions before 0.2.0 draw.
        shared_cohorts: Whether cohorts and batches follow from the seed alone, so that several runs draw the same
            users. The noise never does.
    """

    seed: int = field(repr=False)
    scope: str | None = None
    shared_cohorts: bool = False

    def describe(self) -> dict[str, str]:
        """The mode and the generator: a seed gives the keys. Also what else they follow from."""
        description = {"mode": "reproducible", "generator": f"{GENERATOR}, keyed by a seed"}
        if self.scope is not None:
            description["streams"] = OWN_STREAMS
        if self.shared_cohorts:
            description["cohorts"] = SHARED_COHORTS
        return description

    def _key(self, purpose: str, attempt: int) -> bytes:
        is_shared = self.shared_cohorts and purpose in ("sampling", "batches")
        # DP: the scope is in the key, so that no two runs of one seed share noise, which their difference would cancel.
        scope = () if self.scope is None or is_shared else (self.scope,)
        return _reproducible_key(self.seed, *scope, purpose, attempt)
