"""One local step of one user in plain torch: the twin of every kernel, and the engine's way on a CPU.

In: Buffers. Out: the same, one step on. Gradients are written out by hand, so nothing is kept that is not needed: the logits are
overwritten by their exponentials, which are never divided by their sum (the 80 rows that they meet are), the steps on the
matrices are the products themselves, and the step on the word table goes through the cache once, some words at a time.
"""

import torch
from torch import Tensor

from unheard.engines.stacked.buffers import Buffers
from unheard.models.tied import SMALLEST_SQUARE

WORDS_AT_ONCE = 1000
"""Rows of a word table whose gradient, vectors and delta fit a core's own cache together."""

SAFE_LOGIT = 60.0
"""e^60 times any vocabulary is far from overflow, and e^-60 from nothing: below it no maximum need be found first."""


class PlainStep:
    """The local steps of a chunk, one user after the other."""

    def __init__(self, buffers: Buffers) -> None:
        b, s = buffers, buffers.sizes
        self.b = b

        # Of the one user at work: what nothing else remembers.
        def empty(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=b.delta_UP.dtype, device=b.delta_UP.device)

        self.words_VD = empty(s.V, s.D)
        self.inverse_V1 = empty(s.V, 1)
        self.logits_NV = empty(s.N, s.V)
        self.gradient_VD = empty(s.V, s.D)
        self.middle_W = empty(s.middle)

    def run(self, num_steps: int) -> None:
        steps_U = self.b.num_steps_U.tolist()
        for u in range(self.b.U):
            for step in range(min(num_steps, steps_U[u])):
                self.take(u, step)

    @torch.no_grad()
    def take(self, u: int, step: int) -> None:
        b, s = self.b, self.b.sizes
        run = int(b.run_U[u])
        theta0_P, delta_P = b.theta0_RP[run], b.delta_UP[u]
        token_N, target_N = b.token_SUN[step, u].long(), b.target_SUN[step, u].long()
        share_N1 = torch.where(target_N >= 0, b.share_SU[step, u].to(delta_P.dtype), 0.0)[:, None]
        eta, keep = float(b.rate_R[run]), float(b.keep_R[run])
        scale = b.scale_UM[u].tolist()
        end = s.gates_at + s.middle

        words_VD = self.word_vectors(theta0_P[: s.gates_at], delta_P[: s.gates_at], scale[0])
        x_NX = words_VD[token_N]
        if s.F:
            x_NX = torch.cat([x_NX, b.features_UF[u].to(delta_P.dtype).expand(s.N, s.F)], dim=1)
        true_ND = words_VD[target_N.clamp(min=0)]
        middle_P = self.middle_weights(theta0_P[s.gates_at : end], delta_P[s.gates_at : end], scale)
        matrix_GRH = middle_P[: s.G * s.R * s.H].view(s.G, s.R, s.H)
        projection_HD = middle_P[s.G * s.R * s.H : -s.D].view(s.H, s.D)

        gate_GNH = torch.baddbmm(matrix_GRH[:, -1:], x_NX.expand(s.G, -1, -1), matrix_GRH[:, : s.X])
        cells = _cell_forward(gate_GNH, matrix_GRH[:, s.X : -1], s.B, is_gru=s.is_gru)
        state_NH = cells[0]
        output_ND = torch.addmm(middle_P[-s.D :], state_NH, projection_HD)

        read_ND, inverse_N1 = x_NX[:, : s.D], self.inverse_V1[token_N]
        if not s.tied:  # the input's table has been read; the output's takes its place
            words_VD = self.word_vectors(theta0_P[s.output_at :], delta_P[s.output_at :], scale[-1])
            true_ND = words_VD[target_N.clamp(min=0)]
        total_N1, expected_ND = self.attend(output_ND, words_VD)
        output_grad_ND = (expected_ND / total_N1 - true_ND) * share_N1
        state_grad_NH = output_grad_ND @ projection_HD.T

        grad_GNH, state_part_GNH = _cell_backward(
            gate_GNH, cells, state_grad_NH, matrix_GRH[:, s.X : -1], s.B, s.is_gru
        )
        input_grad_ND = torch.bmm(grad_GNH, matrix_GRH[:, : s.D].mT).sum(0)

        self.step_matrices(
            delta_P[s.gates_at : end], x_NX, state_NH, grad_GNH, state_part_GNH, output_grad_ND, eta, keep, scale
        )
        gradient_VD = torch.mm(self.logits_NV.T, output_ND * (share_N1 / total_N1), out=self.gradient_VD)
        gradient_VD.index_add_(0, target_N.clamp(min=0), output_ND * share_N1, alpha=-1)
        if s.tied:
            gradient_VD.index_add_(0, token_N, input_grad_ND)
            self.step_table(delta_P[: s.gates_at], words_VD, gradient_VD, eta, scale[0] * keep)
        else:
            self.step_table(delta_P[s.output_at :], words_VD, gradient_VD, eta, scale[-1] * keep)
            if s.unit_norm:
                outward_N1 = (input_grad_ND * read_ND).sum(1, keepdim=True)
                input_grad_ND = (input_grad_ND - outward_N1 * read_ND) * inverse_N1
            delta_P[: s.gates_at].mul_(scale[0] * keep).view(s.V, s.D).index_add_(0, token_N, input_grad_ND, alpha=-eta)
        clip_scale(b, u, run)

    def word_vectors(self, theta0_L: Tensor, delta_L: Tensor, scale: float) -> Tensor:
        """theta0 + c * delta, on the sphere."""
        torch.add(theta0_L, delta_L, alpha=scale, out=self.words_VD.view(-1))
        if self.b.sizes.unit_norm:
            torch.linalg.vector_norm(self.words_VD, dim=1, keepdim=True, out=self.inverse_V1)
            self.inverse_V1.clamp_(min=SMALLEST_SQUARE**0.5).reciprocal_()
            self.words_VD.mul_(self.inverse_V1)
        return self.words_VD

    def middle_weights(self, theta0_L: Tensor, delta_L: Tensor, scale: list[float]) -> Tensor:
        """theta0 + c * delta for gates and projection; each layer its own c, if they differ."""
        s = self.b.sizes
        if all(c == scale[1] for c in scale):
            return torch.add(theta0_L, delta_L, alpha=scale[1], out=self.middle_W)
        self.middle_W.copy_(delta_L)
        _each_layer(self.middle_W, s.G, s.R, s.H, s.D, scale[1 : 3 + 2 * s.G])
        return self.middle_W.add_(theta0_L)

    def attend(self, output_ND: Tensor, words_VD: Tensor) -> tuple[Tensor, Tensor]:
        """Sums of exponentials [N, 1] and of word vectors weighted by them [N, D]. The exponentials stay in logits_NV."""
        logits_NV = torch.mm(output_ND, words_VD.T, out=self.logits_NV)
        is_safe = self.b.sizes.unit_norm and float(torch.linalg.vector_norm(output_ND, dim=1).max()) < SAFE_LOGIT
        if not is_safe:
            logits_NV.sub_(logits_NV.amax(dim=1, keepdim=True))
        logits_NV.exp_()
        return logits_NV.sum(dim=1, keepdim=True), logits_NV @ words_VD

    def step_matrices(
        self,
        delta_L: Tensor,
        x_NX: Tensor,
        state_NH: Tensor,
        grad_GNH: Tensor,
        state_part_GNH: Tensor,
        output_grad_ND: Tensor,
        eta: float,
        keep: float,
        scale: list[float],
    ) -> None:
        """delta <- c * keep * delta - eta * (inputs, states before, 1)^T gradients, for the gates and the projection."""
        s = self.b.sizes
        layers = [scale[1 + m] * keep for m in range(2 * s.G + 2)]
        left = layers[0]
        if any(c != left for c in layers):
            _each_layer(delta_L, s.G, s.R, s.H, s.D, layers)
            left = 1.0
        delta_GRH = delta_L[: s.G * s.R * s.H].view(s.G, s.R, s.H)
        before_NH = torch.cat([state_NH.new_zeros(s.B, s.H), state_NH[: -s.B]])
        delta_GRH[:, : s.X].baddbmm_(x_NX.T.expand(s.G, -1, -1), grad_GNH, beta=left, alpha=-eta)
        delta_GRH[:, s.X : -1].baddbmm_(before_NH.T.expand(s.G, -1, -1), state_part_GNH, beta=left, alpha=-eta)
        delta_GRH[:, -1].mul_(left).sub_(grad_GNH.sum(1), alpha=eta)
        delta_HD = delta_L[s.G * s.R * s.H : -s.D].view(s.H, s.D)
        delta_HD.addmm_(state_NH.T, output_grad_ND, beta=left, alpha=-eta)
        delta_L[-s.D :].mul_(left).sub_(output_grad_ND.sum(0), alpha=eta)

    def step_table(self, delta_L: Tensor, words_VD: Tensor, gradient_VD: Tensor, eta: float, left: float) -> None:
        """delta <- left * delta - eta * gradient, the gradient through the sphere: what points outward has no effect."""
        s = self.b.sizes
        delta_VD = delta_L.view(s.V, s.D)
        for v in range(0, s.V, WORDS_AT_ONCE):
            tile = slice(v, v + WORDS_AT_ONCE)
            g, w = gradient_VD[tile], words_VD[tile]
            if s.unit_norm:
                outward = torch.linalg.vecdot(g, w)[:, None]
                g.addcmul_(w, outward, value=-1).mul_(self.inverse_V1[tile])
            delta_VD[tile].mul_(left).sub_(g, alpha=eta)


def _each_layer(middle_L: Tensor, G: int, R: int, H: int, D: int, factors: list[float]) -> None:
    """Each of the middle's layers times its own factor."""
    matrix_GRH = middle_L[: G * R * H].view(G, R, H)
    for gate in range(G):
        matrix_GRH[gate, :-1].mul_(factors[2 * gate])
        matrix_GRH[gate, -1].mul_(factors[2 * gate + 1])
    middle_L[G * R * H : -D].mul_(factors[2 * G])
    middle_L[-D:].mul_(factors[2 * G + 1])


def _cell_forward(gate_GNH: Tensor, from_state_GHH: Tensor, B: int, *, is_gru: bool) -> tuple[Tensor, Tensor]:
    """States [N, H], and the LSTM's cells (the GRU's product of state and new gate). `gate_GNH` becomes the gates."""
    _, N, H = gate_GNH.shape
    state_NH, extra_NH = gate_GNH.new_empty(N, H), gate_GNH.new_empty(N, H)
    for n in range(0, N, B):
        now, before = slice(n, n + B), slice(n - B, n)
        gate_GBH = gate_GNH[:, now]
        of_state_GBH = None
        if n:
            of_state_GBH = torch.matmul(state_NH[before], from_state_GHH)
        if is_gru:
            if of_state_GBH is not None:
                gate_GBH[:2] += of_state_GBH[:2]
                extra_NH[now] = of_state_GBH[2]
            else:
                extra_NH[now] = 0.0
            gate_GBH[:2].sigmoid_()
            reset, keep, new = gate_GBH
            new.addcmul_(reset, extra_NH[now]).tanh_()
            torch.mul(1 - keep, new, out=state_NH[now])
            if n:
                state_NH[now].addcmul_(keep, state_NH[before])
            continue
        if of_state_GBH is not None:
            gate_GBH += of_state_GBH
        gate_GBH[:2].sigmoid_()
        gate_GBH[2].tanh_()
        gate_GBH[3].sigmoid_()
        i, f, g, o = gate_GBH
        torch.mul(i, g, out=extra_NH[now])
        if n:
            extra_NH[now].addcmul_(f, extra_NH[before])
        torch.mul(o, torch.tanh(extra_NH[now]), out=state_NH[now])
    return state_NH, extra_NH


def _cell_backward(
    gate_GNH: Tensor,
    cells: tuple[Tensor, Tensor],
    state_grad_NH: Tensor,
    from_state_GHH: Tensor,
    B: int,
    is_gru: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients with respect to what the gates got from the input, and from the state: the same, but for the GRU's new gate."""
    (state_NH, extra_NH), (_, N, H) = cells, gate_GNH.shape
    grad_GNH = torch.empty_like(gate_GNH)
    state_part_GNH = torch.empty_like(gate_GNH) if is_gru else grad_GNH
    carried_BH = gate_GNH.new_zeros(B, H)
    for n in range(N - B, -1, -B):
        now, before, later = slice(n, n + B), slice(n - B, n), slice(n + B, n + 2 * B)
        dh = state_grad_NH[now]
        if n + B < N:
            dh = dh + torch.bmm(state_part_GNH[:, later], from_state_GHH.mT).sum(0)
        if is_gru:
            reset, keep, new = gate_GNH[:, now]
            dh = dh + carried_BH
            d_new = dh * (1 - keep) * (1 - new * new)
            held = state_NH[before] - new if n else -new
            grad_GNH[0, now] = d_new * extra_NH[now] * reset * (1 - reset)
            grad_GNH[1, now] = dh * held * keep * (1 - keep)
            grad_GNH[2, now] = d_new
            state_part_GNH[:2, now] = grad_GNH[:2, now]
            state_part_GNH[2, now] = d_new * reset
            carried_BH = dh * keep
            continue
        i, f, g, o = gate_GNH[:, now]
        cell = torch.tanh(extra_NH[now])
        dcell = torch.addcmul(carried_BH, dh * o, 1 - cell * cell)
        grad_GNH[0, now] = dcell * g * i * (1 - i)
        grad_GNH[1, now] = dcell * extra_NH[before] * f * (1 - f) if n else 0.0
        grad_GNH[2, now] = dcell * i * (1 - g * g)
        grad_GNH[3, now] = dh * cell * o * (1 - o)
        carried_BH = dcell * f
    return grad_GNH, state_part_GNH


def clip_scale(b: Buffers, u: int, run: int) -> None:
    """min(1, S / norm) for each layer: the clip, to be applied when the delta is next read. A NaN gives 1, and is found later."""
    kind = int(b.clip_kind_R[run])
    if kind == 0:
        return
    s = b.sizes
    layers = [b.delta_UP[u]]
    if kind == 2:
        sizes = [s.V * s.D, *([(s.R - 1) * s.H, s.H] * s.G), s.H * s.D, s.D, *([] if s.tied else [s.V * s.D])]
        layers = list(b.delta_UP[u].split(sizes))
    radius = b.radius_RM[run].tolist()
    for m, layer in enumerate(layers):
        norm = float(torch.linalg.vector_norm(layer))
        factor = radius[m] / norm if norm > radius[m] else 1.0
        if kind == 2:
            b.scale_UM[u, m] = factor
        else:
            b.scale_UM[u] = factor
        if factor < 1.0:
            b.unclipped_U[u] = 0
