"""One local step of one user in plain torch: the twin of every kernel, and the engine's way on a CPU.

In: Buffers. Out: the same, one step on. Gradients are written out by hand, so nothing is kept that is not needed. A word table goes
through the cache twice a step, some words at a time: once to be normalised, multiplied and exponentiated, once to be stepped on.
Exponentials are never divided by their sum (the 80 rows that they meet are), and steps are the products themselves.
"""

import math

import torch
from torch import Tensor

from unheard.engines.stacked.buffers import Buffers
from unheard.engines.stacked.plain_cells import GateWeights, PlainGRU, PlainLSTM
from unheard.engines.stacked.sizes import Sizes
from unheard.models.tied import SMALLEST_SQUARE

WORDS_AT_ONCE = 1000
"""Rows of a word table in hand at once: few enough for a core's own cache, so many that the operations, not the calls, cost."""

SQUARES_AT_ONCE = 2**16
"""Numbers whose squares are added in their own precision, before the sums are added in float64."""

SAFE_LOGIT = 60.0
"""e^60 times any vocabulary is far from overflow, and e^-60 from nothing: below it no maximum need be found first."""

BITS = math.log2(math.e)
"""e^x = 2^(BITS x), at a third of the price."""


class PlainStep:
    """The local steps of a chunk, one user after the other."""

    def __init__(self, buffers: Buffers) -> None:
        s, like = buffers.sizes, buffers.delta_UP
        self.b = buffers
        # Of the one user at work: what nothing else remembers.
        self.cell = PlainGRU(s, like) if s.is_gru else PlainLSTM(s, like)
        self.weights = GateWeights(s, like)
        self.projection_YD = like.new_empty(s.H + 1, s.D)
        self.expected_ND = like.new_empty(s.N, s.D)
        self.words_WD = like.new_empty(min(s.V, WORDS_AT_ONCE), s.D)
        self.scaled_WN = like.new_empty(min(s.V, WORDS_AT_ONCE), s.N)
        self.inverse_V1 = like.new_empty(s.V, 1)
        self.power_VN, self.moment_VN = like.new_empty(2, s.V, s.N)
        self.place_N = torch.arange(s.N, device=like.device)

    def run(self, num_steps: int) -> None:
        steps_U = self.b.num_steps_U.tolist()
        for u in range(self.b.U):
            for step in range(min(num_steps, steps_U[u])):
                self.take(u, step)

    @torch.no_grad()
    def take(self, u: int, step: int) -> None:
        """Forward, backward, step, clip."""
        b, s, cell = self.b, self.b.sizes, self.cell
        run = int(b.run_U[u])
        theta0_P, delta_P = b.theta0_RP[run], b.delta_UP[u]
        reading, writing = ((_table(theta0_P, at, s), _table(delta_P, at, s)) for at in (0, s.output_at))
        theta0_L, delta_L = (p[s.gates_at : s.gates_at + s.middle] for p in (theta0_P, delta_P))
        token_N, target_N = b.token_SUN[step, u].long(), b.target_SUN[step, u].long()
        share_N1 = torch.where(target_N >= 0, b.share_SU[step, u].to(delta_L.dtype), 0.0)[:, None]
        target_N.clamp_(min=0)
        eta, keep = float(b.rate_R[run]), float(b.keep_R[run])
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
        total_N1 = self.attend(*writing, output_ND, output_scale)

        output_grad_ND = (self.expected_ND / total_N1 - true_ND) * share_N1
        cell.backward(output_grad_ND @ self.projection_YD[:-1].T, self.weights)
        input_grad_ND = cell.room.input_gradients(self.weights)
        if s.unit_norm:
            outward_N1 = (input_grad_ND * read_ND).sum(1, keepdim=True)
            input_grad_ND.addcmul_(read_ND, outward_N1, value=-1).mul_(inverse_N1)

        self.step_matrices(delta_L, state_NH, output_grad_ND, eta, [c * keep for c in middle_scale])
        # e^logit - total where true: the softmax's gradient, but for the total, by which the outputs are divided here.
        self.power_VN[target_N, self.place_N] -= total_N1[:, 0]
        if s.unit_norm:
            outward_V = torch.mv(self.moment_VN, (share_N1 / (total_N1 * BITS))[:, 0])
            outward_V.index_add_(0, target_N, (output_ND * true_ND * share_N1).sum(1), alpha=-1)
            self.step_sphere(*writing, output_ND * (share_N1 / total_N1), outward_V, eta, output_scale, keep)
        else:
            writing[1].addmm_(self.power_VN, output_ND * (share_N1 / total_N1), beta=output_scale * keep, alpha=-eta)
        if not s.tied:
            reading[1].mul_(input_scale * keep)
        reading[1].index_add_(0, token_N, input_grad_ND, alpha=-eta)
        clip_scale(b, u, run)

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
        inverse_N1 = _inverse_norms(rows_ND) if self.b.sizes.unit_norm else rows_ND.new_ones(len(rows_ND), 1)
        return rows_ND.mul_(inverse_N1), inverse_N1

    def attend(self, theta0_VD: Tensor, delta_VD: Tensor, output_ND: Tensor, scale: float) -> Tensor:
        """Sums of exponentials [N, 1]; of word vectors weighted by them, into expected_ND. The exponentials stay in power_VN,
        and on the sphere their products with the logits, in bits, in moment_VN."""
        is_safe = self.b.sizes.unit_norm and float(torch.linalg.vector_norm(output_ND, dim=1).max()) < SAFE_LOGIT
        bits_DN, total_N = (output_ND * BITS).T, output_ND.new_zeros(len(output_ND))
        self.expected_ND.zero_()
        tiles = list(zip(*_tiles(theta0_VD, delta_VD, self.inverse_V1, self.moment_VN, self.power_VN), strict=True))
        for theta0_WD, delta_WD, inverse_W1, logits_WN, power_WN in tiles:
            words_WD = self._words(theta0_WD, delta_WD, inverse_W1, scale)
            torch.mm(words_WD, bits_DN, out=logits_WN)
            if is_safe:
                torch.exp2(logits_WN, out=power_WN)
                self._expect(words_WD, logits_WN, power_WN, total_N)
        if not is_safe:
            peak_N = self.moment_VN.amax(dim=0)
            for theta0_WD, delta_WD, inverse_W1, logits_WN, power_WN in tiles:
                torch.sub(logits_WN, peak_N, out=power_WN).exp2_()
                words_WD = self._words(theta0_WD, delta_WD, inverse_W1, scale)
                self._expect(words_WD, logits_WN, power_WN, total_N)
        return total_N[:, None]

    def _words(self, theta0_WD: Tensor, delta_WD: Tensor, inverse_W1: Tensor, scale: float) -> Tensor:
        words_WD = torch.add(theta0_WD, delta_WD, alpha=scale, out=self.words_WD[: len(theta0_WD)])
        return words_WD.mul_(_inverse_norms(words_WD, out=inverse_W1)) if self.b.sizes.unit_norm else words_WD

    def _expect(self, words_WD: Tensor, logits_WN: Tensor, power_WN: Tensor, total_N: Tensor) -> None:
        if self.b.sizes.unit_norm:
            logits_WN.mul_(power_WN)
        total_N += power_WN.sum(0)
        self.expected_ND.addmm_(power_WN.T, words_WD)

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

    def step_sphere(
        self,
        theta0_VD: Tensor,
        delta_VD: Tensor,
        pull_ND: Tensor,
        outward_V: Tensor,
        eta: float,
        scale: float,
        keep: float,
    ) -> None:
        """delta <- c * keep * delta - eta * gradient / norm, the gradient without what points outward, `outward` times the word's
        vector: that has no effect. The vector is (theta0 + c * delta) / norm, so it is theta0 and delta that are added."""
        rate_V1 = self.inverse_V1 * eta
        along_V1 = rate_V1 * self.inverse_V1 * outward_V[:, None]
        left_V1 = along_V1 * scale + scale * keep
        # From the last words to the first: those are still in the cache, and these are what the next step begins with.
        tiles = zip(*_tiles(theta0_VD, delta_VD, rate_V1, along_V1, left_V1, self.power_VN), strict=True)
        for theta0_WD, delta_WD, rate_W1, along_W1, left_W1, power_WN in reversed(list(tiles)):
            scaled_WN = torch.mul(power_WN, rate_W1, out=self.scaled_WN[: len(power_WN)])
            delta_WD.mul_(left_W1).addcmul_(theta0_WD, along_W1).addmm_(scaled_WN, pull_ND, alpha=-1)


def _table(params_P: Tensor, at: int, s: Sizes) -> Tensor:
    return params_P[at : at + s.V * s.D].view(s.V, s.D)


def _tiles(*whole: Tensor) -> list[tuple[Tensor, ...]]:
    return [tensor.split(WORDS_AT_ONCE) for tensor in whole]


def _inverse_norms(rows_WD: Tensor, out: Tensor | None = None) -> Tensor:
    norm_W1 = torch.linalg.vector_norm(rows_WD, dim=1, keepdim=True, out=out)
    return norm_W1.clamp_(min=SMALLEST_SQUARE**0.5).reciprocal_()


def _middle_layers(middle_L: Tensor, s: Sizes) -> tuple[Tensor, ...]:
    """Weight and bias of each gate, and of the projection."""
    return middle_L.split([*([(s.R - 1) * s.H, s.H] * s.G), s.H * s.D, s.D])


def _multiply(layers: tuple[Tensor, ...], factors: list[float]) -> None:
    for layer, factor in zip(layers, factors, strict=True):
        layer.mul_(factor)


def _norm(layer_L: Tensor) -> float:
    """Of a million squares added in float32, three in ten thousand are lost; of fewer at once, next to nothing."""
    return math.hypot(
        *torch.stack([torch.linalg.vector_norm(part) for part in layer_L.split(SQUARES_AT_ONCE)]).tolist()
    )


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
