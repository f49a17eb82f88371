"""The protocol of an engine. It takes parameters and a cohort, and returns the sum of the users' clipped updates.

The plan defines what is computed; the engine decides how. Another engine gives the same result (within the rounding
that tests/agreement states) and the same ledger.

| engine | for | how |
| --- | --- | --- |
| `reference` | any model; the reference of all tests | a loop over users, the paper's pseudocode line by line |
| `vectorised` | any model | many users at once by torch.func.vmap on a GPU, one at a time per core on a CPU |
| `stacked` | `TiedLSTM`, `TiedGRU` | many users at once with gradients written out by hand, in Triton on a GPU |
| `DistributedEngine` | one of the above on several processes | divides the cohort among ranks and adds integers |

    engine = EngineChoice(kind="auto").build(model)              # engines/choice.py
    total = engine.sum_updates(params_P, users, plan.at(0, model.layout), rng)

On a CPU, `vectorised` and `stacked` compute chunks of users in parallel, with one thread per chunk
(`one_thread_per_chunk`). The sums are sums of integers, so they do not depend on the order in which chunks finish.
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
    """The users drawn in one round of one run, and what an engine needs to compute their updates.

    Args:
        params_P: theta0, the parameters at the beginning of the round.
        users: The users drawn. Not shown in `repr`, because the users drawn and their number are private.
        plan: The plan of the round.
        rng: The random generator from which the seed of FedSGD's batches is drawn.
    """

    params_P: Tensor = field(repr=False)
    users: Sequence[User] = field(repr=False)
    plan: RoundPlan
    rng: "np.random.Generator | Drawn" = field(repr=False)

    @cached_property
    def seed(self) -> int:
        """The seed of FedSGD's batches. It is drawn at the first access and then kept."""
        return int(self.rng.integers(2**63))


@dataclass(frozen=True)
class Drawn:
    """A seed that has already been drawn. It takes the place of a generator in `Cohort.rng`.

    Ranks that each sum a part of one cohort must use the same seed, so the leader draws it and sends it to them.
    """

    seed: int = field(repr=False)

    def integers(self, high: int) -> int:
        """Return the seed. Has the signature of `numpy.random.Generator.integers`; `high` has no effect."""
        return self.seed


class Engine(Protocol):
    """An engine for one model on one device.

    An engine may keep buffers between rounds. It overwrites the users' data in them before it reads them again.
    """

    @property
    def device(self) -> torch.device:
        """The device on which the engine computes. The sums that it returns are on this device."""
        ...

    def sum_updates(
        self, params_P: Tensor, users: Sequence[User], plan: RoundPlan, rng: np.random.Generator | Drawn
    ) -> CohortSum:
        """Return the sum over users of w_k * Clip(delta_k). The sum is private.

        Args:
            params_P: theta0, the parameters that every user starts from.
            users: The cohort; may be empty.
            plan: The plan of the round.
            rng: The source of the seed of FedSGD's batches; nothing else is drawn from it.
        """
        ...

    def sum_cohorts(self, cohorts: Sequence[Cohort]) -> list[CohortSum]:
        """Return one sum per cohort, for cohorts of several runs of the same model.

        Each sum is the same as if its cohort were summed alone.
        """
        ...


class SumsCohorts:
    """The base class of engines that sum several cohorts together; a single cohort is summed in the same way."""

    def sum_updates(
        self: Engine, params_P: Tensor, users: Sequence[User], plan: RoundPlan, rng: np.random.Generator | Drawn
    ) -> CohortSum:
        """Return the sum of the users' clipped updates (see `Engine.sum_updates`)."""
        return self.sum_cohorts([Cohort(params_P=params_P, users=users, plan=plan, rng=rng)])[0]


@cache
def keep_freed_memory() -> None:
    """Tell the C library to keep large blocks of freed memory, so that later tensors can reuse them.

    By default glibc returns large blocks to the system. The next allocation then causes a page fault for every page,
    which takes up to a quarter of the time of a user update on a CPU. Does nothing if the C library is not glibc.
    """
    with suppress(OSError, AttributeError):  # no `mallopt`: not glibc
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_THRESHOLD, 2**30)
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of glibc's malloc.h


@contextmanager
def one_thread_per_chunk(device: torch.device) -> Iterator[Callable[..., Iterable[Any]]]:
    """Yield a function like `map`. On a CPU it runs chunks in parallel, each with one torch thread; on a GPU in turn.

    One thread per chunk is faster than many threads per operation: small operations do not parallelise well, and
    threads that wait for each other are slow when the machine is busy.
    """
    if device.type == "cpu":
        keep_freed_memory()
    threads = torch.get_num_threads()
    if device.type != "cpu" or threads == 1:
        yield map
        return
    torch.set_num_threads(1)  # The threads of the pool inherit this number when they start.
    try:
        with ThreadPoolExecutor(threads) as pool:
            yield pool.map
    finally:
        torch.set_num_threads(threads)
