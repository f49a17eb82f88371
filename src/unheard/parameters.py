"""Layout: a model's named tensors and the one flat vector that the mechanism sees, each a view of the other.

The legend of shape letters, used as suffixes of tensor names throughout:

    U  users in a chunk          B  sequences in a local batch      V  rows of the vocabulary
    P  parameters, all layers    T  tokens in an unroll             D  embedding size
    M  layers (named vectors)    K  windows (unrolls) of one user   H  hidden size
    S  local steps of one user   F  features about a user

A "layer" is the paper's "parameter vector" (section 2, per-layer clipping): one named tensor.
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from unheard.errors import ModelError


@dataclass(frozen=True)
class Layout:
    """The names and shapes of a model's tensors, in order."""

    shapes: tuple[tuple[str, tuple[int, ...]], ...]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> "Layout":
        return cls(tuple((name, tuple(tensor.shape)) for name, tensor in tensors.items()))

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.shapes)

    @cached_property
    def slices(self) -> dict[str, slice]:
        """Where each layer lies in the flat vector."""
        sizes = [math.prod(shape) for _, shape in self.shapes]
        ends = list(itertools.accumulate(sizes))
        return {name: slice(end - size, end) for (name, _), size, end in zip(self.shapes, sizes, ends, strict=True)}

    @cached_property
    def total(self) -> int:
        return sum(math.prod(shape) for _, shape in self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    def split(self, flat: Tensor) -> dict[str, Tensor]:
        """Named views of a flat vector [P], or of a stack of them [U, P]."""
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
        """The flat vector of named tensors, which must be exactly this layout's."""
        if list(tensors) != list(self.names) and set(tensors) != set(self.names):
            raise ModelError(f"Tensors {sorted(tensors)} are not this model's: {sorted(self.names)}.")
        for name, shape in self.shapes:
            if tuple(tensors[name].shape) != shape:
                raise ModelError(f"Tensor '{name}' has shape {tuple(tensors[name].shape)}; this model needs {shape}.")
        return torch.cat([tensors[name].reshape(-1) for name in self.names])
