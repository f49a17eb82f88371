"""What a chunk of users is given, and what it carries from one local step to the next. Allocated once, used for every chunk.

In: sizes. Out: tensors by name. `delta` is the only thing of a user that outlives a local step; what a step needs for itself
belongs to the step (kernels.py, plain.py). Places n run over time first: those of one step of the cell lie together.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from unheard.engines.stacked.sizes import Sizes


@dataclass(frozen=True, repr=False)
class Buffers:
    """Of U users in R runs, for up to S local steps."""

    sizes: Sizes
    U: int
    S: int
    R: int
    # what the chunk is given
    theta0_RP: Tensor
    rate_R: Tensor
    keep_R: Tensor
    """1 - eta * lambda: what the penalty on the update leaves of a delta at each step."""
    radius_RM: Tensor
    clip_kind_R: Tensor
    """0: none, 1: flat (the same radius for every layer), 2: per layer."""
    run_U: Tensor
    num_steps_U: Tensor
    features_UF: Tensor
    token_SUN: Tensor
    target_SUN: Tensor
    """The next word's number, or -1 where there is nothing to predict."""
    share_SU: Tensor
    """1 / the number of targets of a batch."""
    # what it carries from step to step
    step: Tensor
    delta_UP: Tensor
    scale_UM: Tensor
    """The clip, still to be applied: a delta is scale * delta."""
    unclipped_U: Tensor

    @classmethod
    def allocate(cls, sizes: Sizes, *, U: int, S: int, R: int, device: torch.device, dtype: torch.dtype) -> "Buffers":
        """`dtype` is that of deltas and of what is multiplied; learning rates, clips and shares are float32 at least."""
        N, M, P = sizes.N, sizes.M, sizes.P
        wide = torch.float64 if dtype == torch.float64 else torch.float32

        def floats(*shape: int, of: torch.dtype = wide) -> Tensor:
            return torch.zeros(shape, dtype=of, device=device)

        def rows(count: int, length: int) -> Tensor:
            # Each begins at a multiple of 64 bytes: products on a CPU can differ in their last bit by where numbers lie, and a
            # user's must not differ by who else is in the chunk.
            return floats(count, -(-length // 32) * 32, of=dtype)[:, :length]

        def numbers(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        return cls(
            sizes=sizes, U=U, S=S, R=R,
            theta0_RP=rows(R, P), rate_R=floats(R), keep_R=floats(R), radius_RM=floats(R, M), clip_kind_R=numbers(R),
            run_U=numbers(U), num_steps_U=numbers(U), features_UF=floats(U, sizes.F),
            token_SUN=numbers(S, U, N), target_SUN=numbers(S, U, N), share_SU=floats(S, U),
            step=numbers(1), delta_UP=rows(U, P), scale_UM=floats(U, M), unclipped_U=numbers(U),
        )  # fmt: skip
