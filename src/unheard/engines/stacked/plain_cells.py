"""The paper's cells in plain torch, for one user's local batch: states from words, and gradients from states.

In: the words' vectors, written into `input_NX`, and the gates' weights. Out: states, then gradients. All memory is taken once, and
the views of each step of time are made once, so that a step is a handful of operations on what lies in the cache. What a step of
time need not know of the one before is done for all steps together. Plain twins of cell_kernels.py.
"""

import torch
from torch import Tensor

from unheard.engines.stacked.sizes import Sizes

ALIGNMENT = 16
"""Numbers to a line of the cache: rows that begin with one multiply faster."""


class GateWeights:
    """What the gates are multiplied with: the gates side by side for all inputs at once, one by one for the states of one step."""

    def __init__(self, s: Sizes, like: Tensor) -> None:
        self.s = s
        self.input_XGH = like.new_empty(s.X, s.G, s.H)
        self.state_GHH = like.new_empty(s.G, s.H, s.H)
        self.from_gates_GHH = self.state_GHH.mT
        self.bias_GH = like.new_empty(s.G, s.H)

    def set(self, theta0_GRH: Tensor, delta_GRH: Tensor, scale: float) -> None:
        X = self.s.X
        torch.add(theta0_GRH[:, :X].transpose(0, 1), delta_GRH[:, :X].transpose(0, 1), alpha=scale, out=self.input_XGH)
        torch.add(theta0_GRH[:, X:-1], delta_GRH[:, X:-1], alpha=scale, out=self.state_GHH)
        torch.add(theta0_GRH[:, -1], delta_GRH[:, -1], alpha=scale, out=self.bias_GH)


class Room:
    """What both cells need: what the gates saw, [X inputs, H states of the step before, 1] at each place; gates and gradients,
    those of one step of time together."""

    def __init__(self, s: Sizes, like: Tensor) -> None:
        N, B, width = s.N, s.B, -(-s.R // ALIGNMENT) * ALIGNMENT
        # B rows more than places: the states that the last step leaves. Those before the first step are zeros, and stay so.
        seen = like.new_zeros(N + B, width)[:, : s.R]
        seen[:, -1] = 1
        self.s = s
        self.seen_NR, self.input_NX, self.state_NH = seen[:N], seen[:N, : s.X], seen[B:, s.X : -1]
        self.before_T, self.state_T = seen[:N, s.X : -1].split(B), self.state_NH.split(B)
        self.gate_TGBH, self.grad_TGBH = like.new_empty(2, s.T, s.G, B, s.H)
        self.grad_NGH = like.new_empty(N, s.G, s.H)
        self.through_GBH = like.new_empty(s.G, B, s.H)

    def read(self, weights: GateWeights) -> None:
        """What the gates get from the inputs."""
        s = self.s
        given_NC = torch.addmm(weights.bias_GH.view(-1), self.input_NX, weights.input_XGH.flatten(1))
        self.gate_TGBH.copy_(given_NC.view(s.T, s.B, s.G, s.H).transpose(1, 2))

    def to_state(self, grad_GBH: Tensor, weights: GateWeights) -> Tensor:
        """A step's gradient through the gates' weights on the state, [B, H]."""
        return torch.bmm(grad_GBH, weights.from_gates_GHH, out=self.through_GBH).sum(0)

    def by_place(self) -> None:
        self.grad_NGH.view(self.s.T, self.s.B, self.s.G, self.s.H).copy_(self.grad_TGBH.transpose(1, 2))

    def input_gradients(self, weights: GateWeights) -> Tensor:
        """What the word vectors read would like to be, [N, D]."""
        return torch.mm(self.grad_NGH.flatten(1), weights.input_XGH[: self.s.D].flatten(1).T)

    def step(self, delta_GRH: Tensor, eta: float, left: float) -> None:
        """delta <- left * delta - eta * seen^T gradients: weights and biases of all gates are one product."""
        seen_GRN = self.seen_NR.T.expand(self.s.G, -1, -1)
        delta_GRH.baddbmm_(seen_GRN, self.grad_NGH.transpose(0, 1), beta=left, alpha=-eta)


class PlainLSTM:
    """Gates i, f, g, o."""

    def __init__(self, s: Sizes, like: Tensor) -> None:
        self.room = room = Room(s, like)
        self.new_TBH, self.cell_TBH, self.squashed_TBH, self.through_TBH = like.new_empty(4, s.T, s.B, s.H)
        self.cell_grad_BH, self.carried_BH = like.new_empty(2, s.B, s.H)
        self.gates_T = [(gate, *gate) for gate in room.gate_TGBH]
        self.grads_T = [(grad, grad[:3], grad[3]) for grad in room.grad_TGBH]
        before_T = [before.expand(s.G, -1, -1) for before in room.before_T]
        self.cells_T = list(zip(self.new_TBH, self.cell_TBH, self.squashed_TBH, room.state_T, before_T, strict=True))
        self.through_T = list(self.through_TBH)

    def forward(self, weights: GateWeights) -> Tensor:
        """States [N, H]."""
        room = self.room
        room.read(weights)
        cell_before = None
        for (gate, i, f, g, o), (new, cell, squashed, state, before) in zip(self.gates_T, self.cells_T, strict=True):
            if cell_before is not None:
                gate.baddbmm_(before, weights.state_GHH)
            torch.tanh(g, out=new)
            gate.sigmoid_()  # all four at once; g's is not used
            torch.mul(i, new, out=cell)
            if cell_before is not None:
                cell.addcmul_(f, cell_before)
            torch.tanh(cell, out=squashed)
            torch.mul(o, squashed, out=state)
            cell_before = cell
        return room.state_NH

    def backward(self, state_grad_NH: Tensor, weights: GateWeights) -> None:
        """The room's grad becomes the gradient with respect to what the gates were given."""
        self._slopes()
        dh_T, cell_grad, carried = state_grad_NH.split(self.room.s.B), self.cell_grad_BH, self.carried_BH.zero_()
        for t in reversed(range(len(dh_T))):
            grad, of_cell, of_output = self.grads_T[t]
            torch.addcmul(carried, dh_T[t], self.through_T[t], out=cell_grad)
            of_cell.mul_(cell_grad)
            of_output.mul_(dh_T[t])
            if t:
                torch.mul(cell_grad, self.gates_T[t][2], out=carried)
                dh_T[t - 1].add_(self.room.to_state(grad, weights))
        self.room.by_place()

    def _slopes(self) -> None:
        """The room's grad becomes what each gate's is a multiple of: of the cell's gradient i, f and g, of the state's o."""
        gate_TGBH, slope_TGBH, new = self.room.gate_TGBH, self.room.grad_TGBH, self.new_TBH
        torch.addcmul(gate_TGBH, gate_TGBH, gate_TGBH, value=-1, out=slope_TGBH)  # of a sigmoid y: y - y^2
        of_i, of_f, of_g, of_o = slope_TGBH.unbind(1)
        i, _, _, o = gate_TGBH.unbind(1)
        of_i.mul_(new)
        of_f[0] = 0
        of_f[1:].mul_(self.cell_TBH[:-1])
        torch.addcmul(i, i * new, new, value=-1, out=of_g)
        of_o.mul_(self.squashed_TBH)
        torch.addcmul(o, o * self.squashed_TBH, self.squashed_TBH, value=-1, out=self.through_TBH)

    def step(self, delta_GRH: Tensor, eta: float, left: float) -> None:
        self.room.step(delta_GRH, eta, left)


class PlainGRU:
    """Gates r, z, n; what n gets from the state passes r first."""

    def __init__(self, s: Sizes, like: Tensor) -> None:
        self.room = Room(s, like)
        self.of_state_TGBH = like.new_zeros(s.T, s.G, s.B, s.H)  # at the first step zeros, which stay so
        self.slope_TBH = like.new_empty(s.T, s.B, s.H)

    def forward(self, weights: GateWeights) -> Tensor:
        """States [N, H]."""
        room = self.room
        room.read(weights)
        for t, (gate, of_state) in enumerate(zip(room.gate_TGBH, self.of_state_TGBH, strict=True)):
            if t:
                torch.matmul(room.before_T[t], weights.state_GHH, out=of_state)
                gate[:2].add_(of_state[:2])
            gate[:2].sigmoid_()
            reset, keep, new = gate
            new.addcmul_(reset, of_state[2]).tanh_()
            torch.lerp(new, room.before_T[t], keep, out=room.state_T[t])
        return room.state_NH

    def backward(self, state_grad_NH: Tensor, weights: GateWeights) -> None:
        """The room's grad becomes the gradient with respect to what the gates got from the state; grad_NGH, from the input."""
        room, (reset, keep, new) = self.room, self.room.gate_TGBH.unbind(1)
        of_reset, of_keep, of_new = room.grad_TGBH.unbind(1)
        torch.mul(1 - keep, 1 - new * new, out=self.slope_TBH)
        torch.mul(self.slope_TBH, reset, out=of_new)
        torch.mul(of_new * (1 - reset), self.of_state_TGBH[:, 2], out=of_reset)
        torch.mul(keep * (1 - keep), torch.stack(room.before_T) - new, out=of_keep)
        dh_T = state_grad_NH.split(room.s.B)
        for t in reversed(range(len(dh_T))):
            room.grad_TGBH[t].mul_(dh_T[t])
            if t:
                dh_T[t - 1].add_(room.to_state(room.grad_TGBH[t], weights)).addcmul_(dh_T[t], keep[t])
        room.by_place()
        torch.mul(state_grad_NH, self.slope_TBH.flatten(0, 1), out=room.grad_NGH[:, 2])

    def step(self, delta_GRH: Tensor, eta: float, left: float) -> None:
        """For n's weights on the state, the gradient is the state's part."""
        room, X = self.room, self.room.s.X
        of_n_HH = delta_GRH[2, X:-1] * left
        room.step(delta_GRH, eta, left)
        delta_GRH[2, X:-1] = of_n_HH.addmm_(room.seen_NR[:, X:-1].T, room.grad_TGBH[:, 2].flatten(0, 1), alpha=-eta)
