"""The layout of the flat parameter vector, and copies between host memory and a device.

Models compute with named tensors; clipping, averaging and noise work on one vector of all parameters. A `Layout`
converts between the two: `split` returns views of the vector, and `join` copies tensors into a new vector. A "layer" is
one named tensor, which the paper calls a "parameter vector" (section 2, per-layer clipping).

>>> layout = Layout((("embedding", (3, 2)), ("bias", (2,))))
>>> layout.total, layout.slices["bias"]
(8, slice(6, 8, None))
>>> {name: tuple(tensor.shape) for name, tensor in layout.split(torch.zeros(8)).items()}
{'embedding': (3, 2), 'bias': (2,)}

Shape letters, used as suffixes of tensor names in the whole package; a module that uses other letters lists them:

    U  users in a chunk          B  sequences in a local batch      V  rows of the vocabulary
    P  parameters, all layers    T  tokens in an unroll             D  embedding size
    M  layers (named vectors)    K  windows (unrolls) of one user   H  hidden size
    S  local steps of one user   W  tokens in a window, T + 1       F  features about a user
    J  balls of a clip           N  positions, or targets that count

`to_device` copies an array to a torch device without blocking the host. `finish` waits for the device, so that a time
measurement includes all queued work.
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
        """Return the layout of named tensors, in the order of the mapping."""
        return cls(tuple((name, tuple(tensor.shape)) for name, tensor in tensors.items()))

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the layers, in order."""
        return tuple(name for name, _ in self.shapes)

    @cached_property
    def slices(self) -> dict[str, slice]:
        """The slice of the flat vector that holds each layer, by name."""
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
            flat: One vector [P], or one vector per user [U, P]. In the second case U is the first dimension of each tensor.

        Raises:
            ModelError: The last dimension of `flat` is not the number of parameters.
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
        """Copy named tensors into one new flat vector [P]. Their order in the mapping does not matter.

        Raises:
            ModelError: The names or shapes differ from those of the layout.
        """
        if list(tensors) != list(self.names) and set(tensors) != set(self.names):
            raise ModelError(
                f"The tensors {sorted(tensors)} do not match the model's layers {sorted(self.names)}. Use the file of this model."
            )
        for name, shape in self.shapes:
            if tuple(tensors[name].shape) != shape:
                raise ModelError(f"Tensor '{name}' has shape {tuple(tensors[name].shape)}; this model needs {shape}.")
        return torch.cat([tensors[name].reshape(-1) for name in self.names])


def to_device(numbers: np.ndarray, device: torch.device) -> Tensor:
    """Copy an array to a device.

    On CUDA the copy goes through page-locked memory and is queued after the work that is under way. The call returns at
    once, and the host can prepare the next chunk or the next round meanwhile.

    Args:
        numbers: An array of any shape, of a dtype that torch supports.
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
    """Allocate an uninitialised tensor in host memory; for CUDA it is page-locked, so that copies are asynchronous."""
    return torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")


def finish(device: torch.device) -> None:
    """Wait until the device has completed all queued work. Call this before reading a clock."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
