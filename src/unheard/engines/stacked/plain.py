"""One local step of one user in plain torch: the twin of every kernel, and the engine's way on a CPU.

In: Buffers. Out: the same, one step on. Gradients are written out by hand, so nothing is kept that is not needed, and steps on
weights are the products themselves. plain_cells.py has the cells, plain_table.py the softmax over all words.
"""

import math

import torch
from torch import Tensor

from unheard.engines.stacked.buffers import Buffers
from unheard.engines.stacked.plain_cells import GateWeights, PlainGRU, PlainLSTM
from unheard.engines.stacked.plain_table import PlainTable, inverse_norms
from unheard.engines.stacked.sizes import Sizes

SQUARES_AT_ONCE = 2**16
"""Numbers whose squares are added in their own precision, before the sums are added in float64."""


class PlainStep:
    """The local steps of a chunk, one user after the other."""

    def __init__(self, buffers: Buffers) -> None:
        s, like = buffers.sizes, buffers.delta_UP
        self.b = buffers
        # Of the one user at work: what nothing else remembers.
        self.cell = PlainGRU(s, like) if s.is_gru else PlainLSTM(s, like)
        self.weights = GateWeights(s, like)
        self.projection_YD = like.new_empty(s.H + 1, s.D)
        self.table = PlainTable(s, like)

    @torch.no_grad()
    def run(self, num_steps: int) -> None:
        for u, steps in enumerate(self.b.num_steps_U.tolist()):
            self.begin(u)
            for step in range(min(num_steps, steps)):
                self.take(u, step)

    def begin(self, u: int) -> None:
        """What stays the same for all steps of a user."""
        b, s = self.b, self.b.sizes
        self.run_u = run = int(b.run_U[u])
        self.eta, self.keep = float(b.rate_R[run]), float(b.keep_R[run])
        theta0_P, delta_P = b.theta0_RP[run], b.delta_UP[u]
        self.reading = _table(theta0_P, 0, s), _table(delta_P, 0, s)
        self.writing = _table(theta0_P, s.output_at, s), _table(delta_P, s.output_at, s)
        self.middle = theta0_P[s.gates_at : s.gates_at + s.middle], delta_P[s.gates_at : s.gates_at + s.middle]
        self.table.begin(*self.writing)

    def take(self, u: int, step: int) -> None:
        """Forward, backward, step, clip."""
        b, s, cell, eta, keep = self.b, self.b.sizes, self.cell, self.eta, self.keep
        reading, writing, (theta0_L, delta_L) = self.reading, self.writing, self.middle
        token_N, target_N = b.token_SUN[step, u].long(), b.target_SUN[step, u].long()
        share_N1 = torch.where(target_N >= 0, b.share_SU[step, u].to(delta_L.dtype), 0.0)[:, None]
        target_N.clamp_(min=0)
        scale = b.scale_UM[u].tolist()
        input_scale, middle_scale, output_scale = scale[0], scale[1 : 3 + 2 * s.G], scale[0 if s.tied else -1]

        self.middle_weights(theta0_L, delta_L, middle_scale)
        read_ND, inverse_N1 = self.word_vectors(*reading, token_N, input_scale)
        true_ND, _ = self.word_vectors(*writing, target_N, output_scale)
        cell.room.input_NX[:, : s.D] = read_ND
        if s.F:
            cell.room.input_NX[:, s.D :] = b.features_UF[u]
        state_NH = cell.forward(self.weights)
        output_ND = torch.addmm(self.projection_YD[-1], state_NH, self.projection_YD[:-1])
        total_N1, expected_ND = self.table.attend(output_ND, output_scale)

        output_grad_ND = (expected_ND / total_N1 - true_ND) * share_N1
        cell.backward(output_grad_ND @ self.projection_YD[:-1].T, self.weights)
        input_grad_ND = cell.room.input_gradients(self.weights)
        if s.unit_norm:
            outward_N1 = (input_grad_ND * read_ND).sum(1, keepdim=True)
            input_grad_ND.addcmul_(read_ND, outward_N1, value=-1).mul_(inverse_N1)

        self.step_matrices(delta_L, state_NH, output_grad_ND, eta, [c * keep for c in middle_scale])
        self.table.step(output_ND, total_N1, target_N, true_ND, share_N1, eta=eta, scale=output_scale, keep=keep)
        if not s.tied:
            reading[1].mul_(input_scale * keep)
        reading[1].index_add_(0, token_N, input_grad_ND, alpha=-eta)
        clip_scale(b, u, self.run_u)

    def middle_weights(self, theta0_L: Tensor, delta_L: Tensor, scale: list[float]) -> None:
        """theta0 + c * delta for gates and projection; each layer its own c, if they differ."""
        s, c = self.b.sizes, scale[0]
        if any(other != c for other in scale):
            delta_L, c = delta_L.clone(), 1.0
            _multiply(_middle_layers(delta_L, s), scale)
        gates = s.G * s.R * s.H
        self.weights.set(theta0_L[:gates].view(s.G, s.R, s.H), delta_L[:gates].view(s.G, s.R, s.H), c)
        torch.add(theta0_L[gates:], delta_L[gates:], alpha=c, out=self.projection_YD.view(-1))

    def word_vectors(self, theta0_VD: Tensor, delta_VD: Tensor, word_N: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """theta0 + c * delta of some words, on the sphere; and one over the norms that they had."""
        rows_ND = theta0_VD[word_N].add_(delta_VD[word_N], alpha=scale)
        inverse_N1 = inverse_norms(rows_ND) if self.b.sizes.unit_norm else rows_ND.new_ones(len(rows_ND), 1)
        return rows_ND.mul_(inverse_N1), inverse_N1

    def step_matrices(
        self, delta_L: Tensor, state_NH: Tensor, output_grad_ND: Tensor, eta: float, layers: list[float]
    ) -> None:
        """delta <- c * keep * delta - eta * inputs^T gradients, for the gates and the projection."""
        s, left = self.b.sizes, layers[0]
        if any(other != left for other in layers):
            _multiply(_middle_layers(delta_L, s), layers)
            left = 1.0
        gates = s.G * s.R * s.H
        self.cell.step(delta_L[:gates].view(s.G, s.R, s.H), eta, left)
        delta_YD = delta_L[gates:].view(s.H + 1, s.D)
        delta_YD[:-1].addmm_(state_NH.T, output_grad_ND, beta=left, alpha=-eta)
        delta_YD[-1].mul_(left).sub_(output_grad_ND.sum(0), alpha=eta)


def _table(params_P: Tensor, at: int, s: Sizes) -> Tensor:
    return params_P[at : at + s.V * s.D].view(s.V, s.D)


def _middle_layers(middle_L: Tensor, s: Sizes) -> tuple[Tensor, ...]:
    """Weight and bias of each gate, and of the projection."""
    return middle_L.split([*([(s.R - 1) * s.H, s.H] * s.G), s.H * s.D, s.D])


def _multiply(layers: tuple[Tensor, ...], factors: list[float]) -> None:
    for layer, factor in zip(layers, factors, strict=True):
        layer.mul_(factor)


def _norm(layer_L: Tensor) -> float:
    """Of a million squares added in float32, three in ten thousand are lost; of fewer at once, next to nothing."""
    whole = len(layer_L) // SQUARES_AT_ONCE * SQUARES_AT_ONCE
    parts = torch.linalg.vector_norm(layer_L[:whole].view(-1, SQUARES_AT_ONCE), dim=1).tolist()
    return math.hypot(*parts, float(torch.linalg.vector_norm(layer_L[whole:])))


def clip_scale(b: Buffers, u: int, run: int) -> None:
    """min(1, S / norm) for each layer: the clip, to be applied when the delta is next read. A NaN gives 1, and is found later."""
    s, kind, delta_P = b.sizes, int(b.clip_kind_R[run]), b.delta_UP[u]
    if kind == 0:
        return
    layers = (delta_P,)
    if kind == 2:
        tables = [s.V * s.D] * (1 if s.tied else 2)
        input_table, middle_L, *output_table = delta_P.split([tables[0], s.middle, *tables[1:]])
        layers = (input_table, *_middle_layers(middle_L, s), *output_table)
    norms = [_norm(layer) for layer in layers]
    factors = [r / norm if norm > r else 1.0 for r, norm in zip(b.radius_RM[run].tolist(), norms, strict=False)]
    b.scale_UM[u] = torch.tensor(factors, dtype=b.scale_UM.dtype)
    if min(factors) < 1.0:
        b.unclipped_U[u] = 0
