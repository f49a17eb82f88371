"""Getting numbers onto a device without waiting for it; and waiting for it, where a clock is read."""

import numpy as np
import torch
from torch import Tensor


def to_device(numbers: np.ndarray, device: torch.device) -> Tensor:
    """The same numbers on a device. On CUDA by way of page-locked memory, so that the copy queues behind the work that is under way
    instead of waiting for it: the next chunk, or the next round, is prepared meanwhile."""
    if device.type != "cuda":
        return torch.from_numpy(np.ascontiguousarray(numbers))
    dtype = torch.from_numpy(np.empty(0, dtype=numbers.dtype)).dtype
    waiting = host_memory(numbers.shape, dtype, device)
    # By this thread alone: torch's own pin_memory() shares the copy among all cores and waits for the slowest, which on a busy
    # machine takes longer than the copy (docs/log.md, 2026-11-15).
    np.copyto(waiting.numpy(), numbers)
    return waiting.to(device, non_blocking=True)


def host_memory(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory of this machine for numbers that the device is to have: page-locked for CUDA, which then fetches them by itself."""
    return torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")


def finish(device: torch.device) -> None:
    """Return when the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
