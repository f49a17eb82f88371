"""Threads of a CPU: chunks of users run in parallel, one thread for each chunk.

Both engines for many users use `one_thread_per_chunk`. The sums do not depend on the order in which chunks finish.
"""

import ctypes
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import torch


@cache
def keep_freed_memory() -> None:
    """Asks the C library to keep large blocks of freed memory for the next tensor of their size.

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
    """Yields a `map` that runs chunks in parallel on a CPU, each with one torch thread; on a GPU the built-in `map`.

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
