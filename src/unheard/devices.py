"""Getting numbers onto a device without waiting for it; and waiting for it, where a clock is read."""

import numpy as np
import torch
from torch import Tensor


def to_device(numbers: np.ndarray, device: torch.device) -> Tensor:
    """The same numbers on a device. On CUDA by way of page-locked memory, so that the copy queues behind the work that is under way
    instead of waiting for it: the next chunk, or the next round, is prepared meanwhile."""
    tensor = torch.from_numpy(np.ascontiguousarray(numbers))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def finish(device: torch.device) -> None:
    """Return when the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
