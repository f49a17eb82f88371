"""The layout of the flat parameter vector, and copies between host memory and a device.

Models compute with named tensors; clipping, averaging and noise work on one vector of all parameters. A layout
translates in both directions without copying where it can. A "layer" is the paper's "parameter vector" (section 2,
per-layer clipping): one named tensor.

>>> layout = Layout((("embedding", (3, 2)), ("bias", (2,))))
>>> layout.total, layout.slices["bias"]
(8, slice(6, 8, None))
>>> {name: tuple(tensor.shape) for name, tensor in layout.split(torch.zeros(8)).items()}
{'embedding': (3, 2), 'bias': (2,)}

Shape letters, used as suffixes of tensor names in the whole package:

    U  users in a chunk          B  sequences in a local batch      V  rows of the vocabulary
    P  parameters, all layers    T  tokens in an unroll             D  embedding size
    M  layers (named vectors)    K  windows (unrolls) of one user   H  hidden size
    S  local steps of one user   F  features about a user

`to_device` copies an array to a torch device without making the host wait; `finish` waits, before a clock is read.
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from unheard.errors import ModelError


@dataclass(frozen=True)
class Layout:
    """The names and shapes of a model's tensors, in the order in which they lie in the flat vector.

    Args:
        shapes: Pairs of a name and a shape. `Layout.of(tensors)` takes them from tensors.
    """

    shapes: tuple[tuple[str, tuple[int, ...]], ...]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> "Layout":
        """The layout of these tensors, in their order."""
        return cls(tuple((name, tuple(tensor.shape)) for name, tensor in tensors.items()))

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the layers, in order."""
        return tuple(name for name, _ in self.shapes)

    @cached_property
    def slices(self) -> dict[str, slice]:
        """The part of the flat vector that each layer takes, by name."""
        sizes = [math.prod(shape) for _, shape in self.shapes]
        ends = list(itertools.accumulate(sizes))
        return {name: slice(end - size, end) for (name, _), size, end in zip(self.shapes, sizes, ends, strict=True)}

    @cached_property
    def total(self) -> int:
        """The number of parameters of all layers."""
        return sum(math.prod(shape) for _, shape in self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    def split(self, flat: Tensor) -> dict[str, Tensor]:
        """Split a flat vector into named tensors, which are views of it.

        Args:
            flat: A vector [P], or one per user [U, P]; the tensors then have the dimension U first.

        Raises:
            ModelError: The vector does not have as many numbers as the model has parameters.
        """
        if flat.shape[-1] != self.total:
            raise ModelError(f"A vector of {flat.shape[-1]} numbers does not fit a model of {self.total} parameters.")
        lead = flat.shape[:-1]
        return {
            name: flat[..., self.slices[name]].unflatten(-1, shape)
            if shape
            else flat[..., self.slices[name]].reshape(lead)
            for name, shape in self.shapes
        }

    def join(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Join named tensors into one flat vector [P], a copy.

        Raises:
            ModelError: The names or shapes are not exactly this layout's.
        """
        if list(tensors) != list(self.names) and set(tensors) != set(self.names):
            raise ModelError(f"Tensors {sorted(tensors)} are not this model's: {sorted(self.names)}.")
        for name, shape in self.shapes:
            if tuple(tensors[name].shape) != shape:
                raise ModelError(f"Tensor '{name}' has shape {tuple(tensors[name].shape)}; this model needs {shape}.")
        return torch.cat([tensors[name].reshape(-1) for name in self.names])


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
