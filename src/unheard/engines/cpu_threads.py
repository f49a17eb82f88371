"""How chunks of users share a CPU's cores: one thread each, side by side."""

import ctypes
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import torch


@cache
def keep_freed_memory() -> None:
    """Ask the C library to keep large pieces of freed memory for the next tensor of their size. By default it gives them back to
    the system and faults them in again, page by page, at every step: up to a quarter of a user update's time on a CPU."""
    with suppress(OSError, AttributeError):  # another C library: then as it comes
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_THRESHOLD, 2**30)
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # glibc's names for them, in malloc.h


@contextmanager
def one_thread_a_chunk(device: torch.device) -> Iterator[Callable[..., Iterable[Any]]]:
    """On a CPU, chunks side by side with one thread each: small operations do not share out well, and threads that wait for
    each other stand still when the machine is busy. Integer sums do not depend on which chunk ends first."""
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
