"""The protocol of an engine: parameters and a cohort in, the bounded sum of its updates out.

The plan defines what is computed; the engine decides how. Changing the engine changes neither the result (within stated
rounding) nor the ledger; tests/agreement checks that for each engine.

| engine | for | how |
| --- | --- | --- |
| `reference` | any model; the reference of all tests | a loop over users, the paper's pseudocode line by line |
| `vectorised` | any model | many users at once by torch.func.vmap on a GPU, one at a time per core on a CPU |
| `stacked` | `TiedLSTM`, `TiedGRU` | many users at once with gradients written out by hand, in Triton on a GPU |
| `DistributedEngine` | one of the above on several processes | divides the cohort among ranks and adds integers |

    engine = EngineChoice(kind="auto").build(model)              # engines/choice.py
    total = engine.sum_updates(params_P, users, plan.at(0, model.layout), rng)

On a CPU chunks of users run in parallel, one thread for each chunk: both engines for many users use
`one_thread_per_chunk`. The sums do not depend on the order in which chunks finish.
"""

import ctypes
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from unheard.mechanism.aggregation import CohortSum
from unheard.mechanism.plan import RoundPlan
from unheard.updates.user_update import User


@dataclass(frozen=True, kw_only=True)
class Cohort:
    """The work of one round of one run: the users that were drawn, and what to compute for them.

    Args:
        params_P: theta0, the parameters at the beginning of the round.
        users: The users drawn. Not shown in `repr`: who was drawn, and how many, is private.
        plan: The plan of the round.
        rng: The stream that the seed of FedSGD's batches is drawn from.
    """

    params_P: Tensor = field(repr=False)
    users: Sequence[User] = field(repr=False)
    plan: RoundPlan
    rng: "np.random.Generator | Drawn" = field(repr=False)

    @cached_property
    def seed(self) -> int:
        """The seed of FedSGD's batches, drawn at the first access."""
        return int(self.rng.integers(2**63))


@dataclass(frozen=True)
class Drawn:
    """A seed that is drawn already, in place of a generator: for engines that each sum a part of one cohort."""

    seed: int

    def integers(self, high: int) -> int:
        """The seed, as `numpy.random.Generator.integers` would return it."""
        return self.seed


class Engine(Protocol):
    """An engine for one model on one device.

    It may keep memory between rounds; whatever that memory holds of users is overwritten before it is read again.
    """

    @property
    def device(self) -> torch.device:
        """Where the engine computes, and where its sums are."""
        ...

    def sum_updates(
        self, params_P: Tensor, users: Sequence[User], plan: RoundPlan, rng: np.random.Generator | Drawn
    ) -> CohortSum:
        """The sum over users of w_k * Clip(delta_k).

        Args:
            params_P: theta0, the model that every user starts from.
            users: The cohort; may be empty.
            plan: The plan of the round.
            rng: Seeds FedSGD's batches, nothing else.
        """
        ...

    def sum_cohorts(self, cohorts: Sequence[Cohort]) -> list[CohortSum]:
        """The sums of the cohorts of several runs of one model.

        Each sum is the same as if its cohort were summed alone.
        """
        ...


@cache
def keep_freed_memory() -> None:
    """Ask the C library to keep large blocks of freed memory for the next tensor of their size.

    By default it returns them to the system and faults them in again, page by page, in every step, which takes up to a
    quarter of the time of a user update on a CPU.
    """
    with suppress(OSError, AttributeError):  # not glibc: keep its defaults
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_THRESHOLD, 2**30)
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of glibc's malloc.h


@contextmanager
def one_thread_per_chunk(device: torch.device) -> Iterator[Callable[..., Iterable[Any]]]:
    """Yield a `map` that runs chunks in parallel on a CPU, each with one torch thread; on a GPU the built-in `map`.

    One thread per chunk is faster than many threads per operation: small operations do not parallelise well, and
    threads that wait for each other are slow when the machine is busy.
    """
    if device.type == "cpu":
        keep_freed_memory()
    threads = torch.get_num_threads()
    if device.type != "cpu" or threads == 1:
        yield map
        return
    torch.set_num_threads(1)  # for the pool's threads, which are new
    try:
        with ThreadPoolExecutor(threads) as pool:
            yield pool.map
    finally:
        torch.set_num_threads(threads)
