"""The shapes of a model and of its batches, and the tensors of a chunk of users.

`Sizes` has the shapes (letters: stacked/__init__.py) and the offsets of the layers in the flat vector:

    embedding            [V, D]
    for each gate:       weight [X + H, H], bias [H]
    projection           weight [H, D], bias [D]
    output embedding     [V, D], only if the model is not tied

A bias directly follows its weight in the vector. Weight and bias therefore form one matrix with R = X + H + 1 rows; the
input of the last row is always 1. So one product computes weight and bias together.

`Buffers` has the inputs of a chunk, and the tensors that are kept from one local step to the next: for each user only
delta, the clip that is to be applied to it, and whether a step was clipped. The buffers are allocated once and reused
for other users. The intermediate tensors of a step belong to the step (plain.py, kernels.py)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from unheard.models.model import LanguageModel
from unheard.models.recurrent import TiedGRU, TiedLSTM


@dataclass(frozen=True)
class Sizes:
    """The shapes of a model and of a local batch, and offsets of layers in the flat vector [P].

    The letters are explained in stacked/__init__.py.
    """

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
        """Return the sizes for a model with batches of B windows of T tokens."""
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
        """The number of positions in a local batch."""
        return self.B * self.T

    @property
    def R(self) -> int:
        """The number of rows of a gate's matrix: those of the input, of the state, and one for the bias."""
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
        """The number of parameters between the two embeddings: all gates and the projection."""
        return self.G * self.R * self.H + (self.H + 1) * self.D

    @property
    def output_at(self) -> int:
        """The offset of the output embedding. If the model is tied, it is that of the input embedding, 0."""
        return 0 if self.tied else self.gates_at + self.middle

    @property
    def P(self) -> int:
        """The number of parameters."""
        return self.gates_at + self.middle + (0 if self.tied else self.V * self.D)

    @property
    def M(self) -> int:
        """The number of layers: the embedding, two per gate, two of the projection, and the output embedding if any."""
        return 3 + 2 * self.G + (0 if self.tied else 1)


@dataclass(frozen=True, repr=False)
class Buffers:
    """The tensors of a chunk: of U users of R runs, for up to S local steps."""

    sizes: Sizes
    U: int
    S: int
    R: int
    # The following tensors are set by Chunk.fill and not changed by the steps.
    theta0_RP: Tensor
    rate_R: Tensor
    """eta, the local learning rate of each run."""
    keep_R: Tensor
    """1 - eta * lambda: the factor by which the penalty on the update shrinks a delta in each step."""
    radius_RM: Tensor
    """The radius of the ball of each layer. For a flat clip, the one radius in every column."""
    clip_kind_R: Tensor
    """0: no clip, 1: flat, 2: per layer."""
    run_U: Tensor
    """The index of each user's run."""
    num_steps_U: Tensor
    features_UF: Tensor
    token_SUN: Tensor
    target_SUN: Tensor
    """The id of the next word, or -1 at positions without a target."""
    share_SU: Tensor
    """1 / (the number of targets of a batch)."""
    # The following tensors are set by Chunk.fill and changed by the steps.
    step: Tensor
    """The number of local steps taken; used by the kernels only."""
    delta_UP: Tensor
    scale_UM: Tensor
    """The factors of the last step's clip, which is applied when the delta is next read.

    The clipped delta of layer m is scale_UM[:, m] times its part of delta_UP.
    """
    unclipped_U: Tensor
    """1 until a local step of the user is clipped, then 0."""
    square_UM: Tensor
    """The squared norms of the delta, for the aggregation. The kernels write them; `PlainStep` leaves them zero.

    For a clip per layer, column m belongs to layer m; otherwise every column has the squared norm of the whole delta.
    """

    @classmethod
    def allocate(cls, sizes: Sizes, *, U: int, S: int, R: int, device: torch.device, dtype: torch.dtype) -> "Buffers":
        """Allocate buffers filled with zeros.

        Args:
            sizes: The shapes of the model and its batches.
            U: The number of users.
            S: The largest number of local steps.
            R: The number of runs.
            device: Where to allocate.
            dtype: The type of deltas and parameters. Learning rates, clips and shares are at least float32.
        """
        N, M, P = sizes.N, sizes.M, sizes.P
        wide = torch.float64 if dtype == torch.float64 else torch.float32

        def floats(*shape: int, of: torch.dtype = wide) -> Tensor:
            return torch.zeros(shape, dtype=of, device=device)

        def rows(count: int, length: int) -> Tensor:
            # Each row begins at a multiple of 64 bytes. On a CPU the last bit of a product can depend on the alignment,
            # and the delta of a user must not depend on the other users of the chunk.
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
