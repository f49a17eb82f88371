"""How chunks of users share a CPU's cores: one thread each, side by side."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def one_thread_a_chunk(device: torch.device) -> Iterator[Callable[..., Iterable[Any]]]:
    """On a CPU, chunks side by side with one thread each: small operations do not share out well, and threads that wait for
    each other stand still when the machine is busy. Integer sums do not depend on which chunk ends first."""
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
