"""The standard normals that noise is made of: drawn when they are asked for, or ahead of that, on another thread.

In: a generator of randomness.py. Out: float64 normals on a device. What they are added to, and how wide: noise.py.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache

import numpy as np
import torch
from torch import Tensor

from unheard.devices import host_memory


class NormalsAhead:
    """A generator's first normals, drawn on another thread from now on (drawing lets other threads run). They are given once."""

    def __init__(self, rng: np.random.Generator, count: int, device: torch.device) -> None:
        # Drawn to where the device fetches them from, so that nobody has to copy them.
        normals_P = host_memory((count,), torch.float64, device)
        drawn = _threads().submit(rng.standard_normal, out=normals_P.numpy())
        self._ahead: tuple[Tensor, Future[np.ndarray]] | None = (normals_P, drawn)

    def take(self, count: int) -> Tensor:
        ahead, self._ahead = self._ahead, None
        # DP: noise that was given once is never given again.
        if ahead is None or count != len(ahead[0]):
            raise RuntimeError("These normals were given already, or another number of them was drawn.")
        normals_P, drawn = ahead
        # DP: nor before all of it is drawn: what the memory held until then is no noise.
        drawn.result()
        return normals_P


Normals = np.random.Generator | NormalsAhead
"""Where normals come from: a generator, or what was drawn from one on another thread."""


def standard_normals(source: Normals, count: int, device: torch.device) -> Tensor:
    """So many of them on the device, in float64."""
    if isinstance(source, NormalsAhead):
        normals_P = source.take(count)
    else:
        normals_P = host_memory((count,), torch.float64, device)
        source.standard_normal(out=normals_P.numpy())
    return normals_P.to(device, non_blocking=True)


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(thread_name_prefix="normals")
