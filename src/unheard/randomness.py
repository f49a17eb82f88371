"""Random generators: secure ones keyed by the operating system, and reproducible ones keyed by a seed for experiments.

`SecureStreams` and `ReproducibleStreams` return a numpy `Generator` for each purpose (cohort, batches, noise, ...) and
each attempt of a round. The generator is AES-128 in counter mode (randomgen's `AESCounter`; NIST SP 800-90A describes the
construction). A test compares its output with the `cryptography` package. `torch.manual_seed` and numpy's global state
have no effect here.

The privacy argument relies on two properties of this module: noise is unpredictable, and no two draws share noise
(docs/privacy.md, "noise"). Garfinkel and Leclerc, "Randomness Concerns When Deploying Differential Privacy" (2020),
explain why a generator made for simulations is not enough.

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
"""A text in a ledger's header: the inputs of a seeded run's streams. Ledgers from before version 0.2.0 do not have it."""
SHARED_COHORTS = "shared with other runs of the seed"
"""A text in a ledger's header: the cohorts and batches of the run depend on the seed alone."""


def secure_generator() -> np.random.Generator:
    """Return a generator with a new 128-bit key from the operating system. The key is not stored outside the generator."""
    return _generator(os.urandom(KEY_BYTES))


def reproducible_generator(seed: int, *labels: str | int) -> np.random.Generator:
    """Return a generator whose key is a hash of a seed and labels.

    Args:
        seed: The seed of the run.
        labels: Words and numbers that name the purpose. Different labels give independent streams.
    """
    return _generator(_reproducible_key(seed, *labels))


def _reproducible_key(seed: int, *labels: str | int) -> bytes:
    text = "\x1f".join([str(int(seed)), *(str(label) for label in labels)])
    return hashlib.sha256(text.encode()).digest()[:KEY_BYTES]


def generator_from_key(key: bytes) -> np.random.Generator:
    """Return a generator with the given 128-bit key. The same key gives the same numbers each time.

    Args:
        key: 16 bytes, from `Streams.noise_key` or `Streams.groups_key`. The key of noise is as secret as the users' text.

    Raises:
        ValueError: The key does not have 16 bytes.
    """
    if len(key) != KEY_BYTES:
        raise ValueError(f"a key has {KEY_BYTES} bytes, not {len(key)}")
    return _generator(key)


class StreamPart:
    """One part of a random stream, which can be drawn from only once. `split_stream` creates the parts of a stream.

    Args:
        state: The generator's state at the beginning of the first part.
        number: The number of the part, counted from 0.
    """

    def __init__(self, state: dict[str, Any], number: int) -> None:
        self._state = state
        self._number = number
        self._is_drawn = False

    def generator(self) -> np.random.Generator:
        """Return a generator that begins with the first number of this part.

        Raises:
            RuntimeError: The part was drawn from before.
        """
        return self._begin(_generator(bytes(KEY_BYTES)))

    def standard_normal(self, out: np.ndarray) -> None:
        """Fill `out` with the standard normals that `generator()` would draw.

        Raises:
            RuntimeError: The part was drawn from before.
        """
        rng = _idle_generator()
        self._begin(rng).standard_normal(out=out)
        _IDLE.append(rng)

    def further(self, index: int, number: int) -> int:
        """Return 64 extra random bits that belong to the `index`-th number of this part.

        No other index, part or method draws these bits. A second call with the same arguments repeats them.

        Args:
            index: The position of the number in this part, below 2^31.
            number: Which extra bits: 0 for the first 64, 1 for the next 64, below 2^32.
        """
        rng = _idle_generator()
        # DP: beyond the part's own numbers, and 2^32 numbers for each index, so that no two of them share one.
        self._move(rng, ((index + 1) << 32) + number)
        bits = int(rng.bit_generator.random_raw())
        _IDLE.append(rng)
        return bits

    def round_keys(self) -> np.ndarray:
        """Return the round keys of AES, uint32 [44], with which a GPU draws this part and the parts after it.

        The GPU counts from 0. So this part must be the first, and no number may have been drawn before the split.

        Raises:
            RuntimeError: The part was drawn from before, or it is not the first of a new stream.
        """
        rng = self._begin(_idle_generator())
        state = rng.bit_generator.state["s"]
        _IDLE.append(rng)
        if not _is_at_start(state):
            raise RuntimeError("This part of a stream does not begin where the stream begins.")
        return state["seed"].view(np.uint32).copy()

    def _begin(self, rng: np.random.Generator) -> np.random.Generator:
        """Set a generator to the beginning of this part and return it. Raise `RuntimeError` at the second call."""
        is_drawn, self._is_drawn = self._is_drawn, True
        # DP: a second draw would begin at the first number again, and give the same noise.
        if is_drawn:
            raise RuntimeError("This part of a stream was drawn from already.")
        self._move(rng, 0)
        return rng

    def _move(self, rng: np.random.Generator, position: int) -> None:
        """Set a generator to a position in this part. The position is counted in 64-bit numbers."""
        bits = cast(AESCounter, rng.bit_generator)
        bits.state = self._state
        # DP: the parts are 2^64 numbers apart, so that no two of them share one.
        bits.advance((self._number << 64) + position)


_EMPTY = 64
"""The offset in the state of an `AESCounter` whose buffer of computed numbers is empty."""
_IDLE: list[np.random.Generator] = []
"""Generators that no thread is using. `StreamPart` sets their state before each use."""


def _idle_generator() -> np.random.Generator:
    """Return a generator that no other thread uses, in any state. The caller appends it to `_IDLE` after use.

    Creating a generator takes five times as long as setting the state of an existing one.
    """
    try:
        return _IDLE.pop()
    except IndexError:
        return _generator(bytes(KEY_BYTES))


def split_stream(rng: np.random.Generator, count: int) -> list[StreamPart]:
    """Divide a stream into `count` independent parts, so that several threads can share a long draw.

    The parts have the key of `rng`, and they begin 2^64 numbers apart. The first part begins at the current position of
    `rng`. Afterwards `rng` is behind the last part.

    >>> rng = reproducible_generator(1)
    >>> first, second = split_stream(rng, 2)
    >>> bool(first.generator().integers(2**63) == reproducible_generator(1).integers(2**63))
    True

    Args:
        rng: A generator of this module.
        count: The number of parts.
    """
    bits = cast(AESCounter, rng.bit_generator)
    state = bits.state
    # DP: what is drawn from `rng` later shares no number with these parts.
    bits.advance(count << 64)
    return [StreamPart(state, part) for part in range(count)]


def is_new(rng: np.random.Generator) -> bool:
    """Whether `rng` is a generator of this module from which no number has been drawn."""
    return isinstance(rng.bit_generator, AESCounter) and _is_at_start(rng.bit_generator.state["s"])


def _is_at_start(state: dict[str, Any]) -> bool:
    """Whether the state of an `AESCounter` is that before its first number."""
    return state["offset"] == _EMPTY and not state["counter"][:2].any()


def _generator(key: bytes) -> np.random.Generator:
    # DP: `key=` sets the AES key itself; `seed=` would pass it through a 64-bit mixer first.
    return np.random.Generator(AESCounter(key=int.from_bytes(key, "little")))  # pyright: ignore[reportArgumentType]


class Streams(ABC):
    """The random generators of a run, one per purpose and attempt. Each has its own key, which the subclass derives.

    `attempt` is the number of entries in the run's ledger before the round is charged. A round that is repeated after a
    crash has a new attempt number, and therefore new random numbers.
    """

    def sampling(self, attempt: int) -> np.random.Generator:
        """Return the generator that draws the cohort."""
        return _generator(self._key("sampling", attempt))

    def batches(self, attempt: int) -> np.random.Generator:
        """Return the generator that draws the seed of FedSGD's batches. FedAvg does not use it."""
        return _generator(self._key("batches", attempt))

    def noise(self, attempt: int) -> np.random.Generator:
        """Return the generator of the noise that is added to the average."""
        # DP: the purpose and the attempt are in the key, so that no two draws of a run ever share noise.
        return _generator(self._key("noise", attempt))

    def noise_key(self, attempt: int) -> bytes:
        """Return the key of the noise of an attempt, for correlated noise. Secret.

        A run with correlated noise stores the key, because it must draw the same noise again after a crash. With
        `SecureStreams` each call returns a new key.
        """
        return self._key("noise", attempt)

    def groups_key(self, attempt: int) -> bytes:
        """Return the key that divides the users into groups, for correlated noise that begins with this attempt."""
        return self._key("groups", attempt)

    def count(self, attempt: int) -> np.random.Generator:
        """Return the generator of the noise that is added to the count of unclipped users (adaptive clipping)."""
        return _generator(self._key("count", attempt))

    @abstractmethod
    def describe(self) -> dict[str, str]:
        """Return the mode and the name of the generator, for the ledger's header and the statement."""

    @abstractmethod
    def _key(self, purpose: str, attempt: int) -> bytes:
        """Return the key for a purpose and an attempt, 16 bytes."""


@dataclass(frozen=True, kw_only=True)
class SecureStreams(Streams):
    """Streams with a new key from the operating system for every call. Nobody can repeat them, not even the trainer."""

    def describe(self) -> dict[str, str]:
        """Return the mode "secure" and the name of the generator."""
        return {"mode": "secure", "generator": f"{GENERATOR}, keyed by the operating system"}

    def _key(self, purpose: str, attempt: int) -> bytes:
        # DP: a fresh key for every attempt: a round done again shares no noise with the first attempt.
        return os.urandom(KEY_BYTES)


@dataclass(frozen=True, kw_only=True)
class ReproducibleStreams(Streams):
    """Streams that depend on a seed, so that an experiment can be repeated.

    Anyone who knows the seed can compute the noise and subtract it, so the guarantee does not hold against them. The
    statement says so.

    >>> first, second = ReproducibleStreams(seed=1, scope="a"), ReproducibleStreams(seed=1, scope="b")
    >>> first.noise(attempt=0).standard_normal() == second.noise(attempt=0).standard_normal()
    False

    Args:
        seed: The seed of the run. `repr` does not show it.
        scope: A digest of the run's settings, its store and its first model, on which the streams also depend. None if
            they depend on the seed alone, as in versions before 0.2.0.
        shared_cohorts: Whether cohorts and batches depend on the seed alone, so that several runs draw the same users.
            Noise always depends on the scope.
    """

    seed: int = field(repr=False)
    scope: str | None = None
    shared_cohorts: bool = False

    def describe(self) -> dict[str, str]:
        """Return the mode "reproducible", the name of the generator, and on which inputs the streams depend."""
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
