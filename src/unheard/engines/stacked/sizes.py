"""What a chunk of users is given, and what it carries from one local step to the next. Allocated once, used for every chunk.

In: sizes. Out: tensors by name. `delta` is the only thing of a user that outlives a local step; what a step needs for itself
belongs to the step (kernels.py, plain.py). Places n run over time first: those of one step of the cell lie together.
Where everything lies: the numbers of a model of the paper's family and of its users' batches, by the legend's letters.

In: a model and the shape of a local batch. Out: sizes and offsets in the flat vector. The layers stand in it as tables: the
embedding [V, D]; for each gate its weight and, right behind it, its bias, together [R, H] with R = X + H + 1; the projection with
its bias, [H + 1, D]; the output embedding [V, D] if it is not tied. So a bias is the last row of its matrix, the one whose input
is always 1, and a matrix and its bias are one product.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from unheard.models.model import LanguageModel
from unheard.models.recurrent import TiedGRU, TiedLSTM


@dataclass(frozen=True)
class Sizes:
    """V, D, H, F as in the legend; G gates; X what a gate sees of the input; N places in a local batch, in order of time."""

    V: int
    D: int
    H: int
    F: int
    G: int
    B: int
    T: int
    is_gru: bool
    tied: bool
    unit_norm: bool

    @classmethod
    def of(cls, model: LanguageModel, B: int, T: int) -> "Sizes":
        assert isinstance(model, TiedLSTM | TiedGRU)
        return cls(
            V=model.vocabulary_size,
            D=model.embedding_size,
            H=model.hidden_size,
            F=model.user_features,
            G=len(model.gates),
            B=B,
            T=T,
            is_gru=isinstance(model, TiedGRU),
            tied=model.tied,
            unit_norm=model.unit_norm,
        )

    @property
    def X(self) -> int:
        return self.D + self.F

    @property
    def N(self) -> int:
        return self.B * self.T

    @property
    def R(self) -> int:
        """Rows of a gate's matrix: input, state, and the bias."""
        return self.X + self.H + 1

    @property
    def gates_at(self) -> int:
        return self.V * self.D

    @property
    def projection_at(self) -> int:
        return self.gates_at + self.G * self.R * self.H

    @property
    def middle(self) -> int:
        """Parameters between the two embeddings: all gates and the projection."""
        return self.G * self.R * self.H + (self.H + 1) * self.D

    @property
    def output_at(self) -> int:
        """Where the table of output embeddings begins: the input's own, if tied."""
        return 0 if self.tied else self.gates_at + self.middle

    @property
    def P(self) -> int:
        return self.gates_at + self.middle + (0 if self.tied else self.V * self.D)

    @property
    def M(self) -> int:
        """Layers: the embedding, two for each gate, two for the projection, the output embedding."""
        return 3 + 2 * self.G + (0 if self.tied else 1)


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
