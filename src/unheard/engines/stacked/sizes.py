"""The shapes of a model and of its batches, and the tensors of a chunk of users.

`Sizes` has the shapes (letters: stacked/__init__.py) and the offsets of the layers in the flat vector:

    embedding [V, D] | for each gate: weight [X + H, H] and bias [H] | projection [H, D] and bias [D] | output embedding
    [V, D]

(the last only if the model is not tied). A bias directly follows its weight, so it is the last row of one matrix, [R,
H] with R = X + H + 1, whose input is always 1: a matrix and its bias are one product.

`Buffers` has the tensors that a chunk is given and those that live from one local step to the next; delta and the
pending clip are the only values of a user that outlive a step. They are allocated once and reused for every chunk. What
a step needs for itself belongs to the step (plain.py, kernels.py)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from unheard.models.model import LanguageModel
from unheard.models.recurrent import TiedGRU, TiedLSTM


@dataclass(frozen=True)
class Sizes:
    """The shapes of a model and of a local batch, by the letters of the legend, and offsets in the flat vector [P]."""

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
        """The sizes for a model with batches of B windows of T tokens."""
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
        """The length of the cell's input: a word vector and the user's features."""
        return self.D + self.F

    @property
    def N(self) -> int:
        """Positions in a local batch, ordered by time."""
        return self.B * self.T

    @property
    def R(self) -> int:
        """Rows of a gate's matrix: input, state, and the bias."""
        return self.X + self.H + 1

    @property
    def gates_at(self) -> int:
        """The offset of the first gate's weight."""
        return self.V * self.D

    @property
    def projection_at(self) -> int:
        """The offset of the projection's weight."""
        return self.gates_at + self.G * self.R * self.H

    @property
    def middle(self) -> int:
        """Parameters between the two embeddings: all gates and the projection."""
        return self.G * self.R * self.H + (self.H + 1) * self.D

    @property
    def output_at(self) -> int:
        """The offset of the output table: that of the input table, if tied."""
        return 0 if self.tied else self.gates_at + self.middle

    @property
    def P(self) -> int:
        """All parameters."""
        return self.gates_at + self.middle + (0 if self.tied else self.V * self.D)

    @property
    def M(self) -> int:
        """Layers: the embedding, two for each gate, two for the projection, the output embedding."""
        return 3 + 2 * self.G + (0 if self.tied else 1)


@dataclass(frozen=True, repr=False)
class Buffers:
    """The tensors of U users of R runs, for up to S local steps."""

    sizes: Sizes
    U: int
    S: int
    R: int
    # set by Chunk.fill
    theta0_RP: Tensor
    rate_R: Tensor
    keep_R: Tensor
    """1 - eta * lambda: the factor by which the penalty on the update shrinks a delta in each step."""
    radius_RM: Tensor
    clip_kind_R: Tensor
    """0: none, 1: flat (the same radius for every layer), 2: per layer."""
    run_U: Tensor
    num_steps_U: Tensor
    features_UF: Tensor
    token_SUN: Tensor
    target_SUN: Tensor
    """The number of the next word, or -1 at positions without a target."""
    share_SU: Tensor
    """1 / the number of targets of a batch."""
    # changed by the steps
    step: Tensor
    delta_UP: Tensor
    scale_UM: Tensor
    """The pending clip: the true delta of layer m is scale[m] * delta. It is applied when the delta is next read."""
    unclipped_U: Tensor
    """1 until a local step of the user is clipped, then 0."""
    square_UM: Tensor
    """Written by the kernels: squared norms of the delta by layer, or (unless the clip is per layer) of all layers."""

    @classmethod
    def allocate(cls, sizes: Sizes, *, U: int, S: int, R: int, device: torch.device, dtype: torch.dtype) -> "Buffers":
        """Allocate buffers filled with zeros.

        `dtype` is the type of deltas and factors of products; learning rates, clips and shares are at least float32.
        """
        N, M, P = sizes.N, sizes.M, sizes.P
        wide = torch.float64 if dtype == torch.float64 else torch.float32

        def floats(*shape: int, of: torch.dtype = wide) -> Tensor:
            return torch.zeros(shape, dtype=of, device=device)

        def rows(count: int, length: int) -> Tensor:
            # Each row begins at a multiple of 64 bytes: on a CPU the last bit of a product can depend on the alignment,
            # and a user's result must not depend on who else is in the chunk.
            return floats(count, -(-length // 32) * 32, of=dtype)[:, :length]

        def numbers(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        return cls(
            sizes=sizes, U=U, S=S, R=R,
            theta0_RP=rows(R, P), rate_R=floats(R), keep_R=floats(R), radius_RM=floats(R, M), clip_kind_R=numbers(R),
            run_U=numbers(U), num_steps_U=numbers(U), features_UF=floats(U, sizes.F),
            token_SUN=numbers(S, U, N), target_SUN=numbers(S, U, N), share_SU=floats(S, U),
            step=numbers(1), delta_UP=rows(U, P), scale_UM=floats(U, M), unclipped_U=numbers(U),
            square_UM=floats(U, M, of=torch.float64),
        )  # fmt: skip
