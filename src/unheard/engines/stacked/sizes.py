"""Where everything lies: the numbers of a model of the paper's family and of its users' batches, by the legend's letters.

In: a model and the shape of a local batch. Out: sizes and offsets in the flat vector. The layers stand in it as tables: the
embedding [V, D]; for each gate its weight and, right behind it, its bias, together [R, H] with R = X + H + 1; the projection with
its bias, [H + 1, D]; the output embedding [V, D] if it is not tied. So a bias is the last row of its matrix, the one whose input
is always 1, and a matrix and its bias are one product.
"""

from dataclasses import dataclass

from unheard.models.model import LanguageModel
from unheard.models.tied_gru import TiedGRU
from unheard.models.tied_lstm import TiedLSTM


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
