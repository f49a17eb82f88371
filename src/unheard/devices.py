"""Copies between host memory and a torch device that do not make the host wait; and an explicit wait for timing."""

import numpy as np
import torch
from torch import Tensor


def to_device(numbers: np.ndarray, device: torch.device) -> Tensor:
    """Copy an array to a device.

    On CUDA the copy goes through page-locked memory and is queued behind the work that is under way, so that the host
    prepares the next chunk or the next round meanwhile.

    Args:
        numbers: Any shape and dtype that torch supports.
        device: The target. On the CPU the tensor shares the array's memory if the array is contiguous.
    """
    if device.type != "cuda":
        return torch.from_numpy(np.ascontiguousarray(numbers))
    dtype = torch.from_numpy(np.empty(0, dtype=numbers.dtype)).dtype
    pinned = host_memory(numbers.shape, dtype, device)
    # numpy copies on this thread alone. torch's own pin_memory() shares the copy among all cores and waits for the
    # slowest, which on a busy machine takes longer than the copy (docs/log.md, 2026-11-15).
    np.copyto(pinned.numpy(), numbers)
    return pinned.to(device, non_blocking=True)


def host_memory(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate host memory for numbers that go to a device; for CUDA it is page-locked, so copies are asynchronous."""
    return torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")


def finish(device: torch.device) -> None:
    """Wait until the device has completed all queued work; call it before a clock is read."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
