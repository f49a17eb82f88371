"""One local step in torch operations: the engine's step on a CPU, and the reference for the tests of every kernel.

Input: `Buffers`. Output: the same buffers, one local step later. The equations and the shape letters are in
stacked/__init__.py. Gradients are written out by hand, so that only the values that are needed are stored, and the
product that gives a gradient is added to the delta directly.

- `PlainLSTM` and `PlainGRU` compute the states from the word vectors (`forward`), the gradients of the gates
  (`backward`), and the update of the gates' weights (`step`). They use a `CellWorkspace`: all memory and the views of
  each time step are allocated once, so that a time step is a few operations on data in the cache. Everything that does
  not depend on the previous time step is computed for all time steps together. In Triton: cell_kernels.py.
- `PlainTable` computes the softmax over all words and the update of the word table. It reads the table twice per local
  step, `WORDS_AT_ONCE` words at a time: first to compute logits and exponentials, then to update. The exponentials [V,
  N] are never divided by their sums; the outputs [N, D] that they are multiplied with are divided instead. In Triton:
  table_kernels.py.
- `PlainStep` combines them to the local steps of a chunk. In Triton: kernels.py.

`eta` is the local learning rate, `scale` (c in the formulas) the factor of the clip of the previous step, and `keep` is
1 - eta * lambda, the factor of the penalty on the update. `left` is c * keep, the factor of the old delta in the new
one. "Coarse" means that products are computed in bfloat16.
"""

import math

import torch
from torch import Tensor

from unheard.engines.stacked.sizes import Buffers, Sizes
from unheard.models.recurrent import SMALLEST_SQUARE

ALIGNMENT = 16
"""The number of float32 values per cache line. Products are faster if rows begin at a cache line."""


class GateWeights:
    """theta of the gates: one matrix of all gates for the inputs, and one matrix per gate for the states."""

    def __init__(self, s: Sizes, like: Tensor) -> None:
        self.s = s
        self.input_XGH = like.new_empty(s.X, s.G, s.H)
        self.state_GHH = like.new_empty(s.G, s.H, s.H)
        self.from_gates_GHH = self.state_GHH.mT
        self.bias_GH = like.new_empty(s.G, s.H)

    def set(self, theta0_GRH: Tensor, delta_GRH: Tensor, scale: float) -> None:
        """Set the weights to theta0 + scale * delta."""
        X = self.s.X
        torch.add(theta0_GRH[:, :X].transpose(0, 1), delta_GRH[:, :X].transpose(0, 1), alpha=scale, out=self.input_XGH)
        torch.add(theta0_GRH[:, X:-1], delta_GRH[:, X:-1], alpha=scale, out=self.state_GHH)
        torch.add(theta0_GRH[:, -1], delta_GRH[:, -1], alpha=scale, out=self.bias_GH)


class CellWorkspace:
    """The memory and the operations that `PlainLSTM` and `PlainGRU` have in common.

    The memory holds the gates' inputs [x_n, h_(n - B), 1] at each position, the gates, and their gradients.

    Args:
        s: The sizes of the model and its batches.
        like: A tensor of the device and type to allocate.
        coarse: Whether the update of the weights is computed in bfloat16.
    """

    def __init__(self, s: Sizes, like: Tensor, coarse: bool = False) -> None:
        self.coarse = coarse
        N, B, width = s.N, s.B, -(-s.R // ALIGNMENT) * ALIGNMENT
        # Row n holds the state before position n. The B extra rows hold the states after the last time step. The states
        # before the first time step stay zero.
        seen = like.new_zeros(N + B, width)[:, : s.R]
        seen[:, -1] = 1
        self.s = s
        self.seen_NR, self.input_NX, self.state_NH = seen[:N], seen[:N, : s.X], seen[B:, s.X : -1]
        self.before_T, self.state_T = seen[:N, s.X : -1].split(B), self.state_NH.split(B)
        self.gate_TGBH, self.grad_TGBH = like.new_empty(2, s.T, s.G, B, s.H)
        self.grad_NGH = like.new_empty(N, s.G, s.H)
        self.through_GBH = like.new_empty(s.G, B, s.H)

    def read(self, weights: GateWeights) -> None:
        """Compute x W + b, the part of the gates' sums that comes from the inputs, for all time steps."""
        s = self.s
        given_NC = torch.addmm(weights.bias_GH.view(-1), self.input_NX, weights.input_XGH.flatten(1))
        self.gate_TGBH.copy_(given_NC.view(s.T, s.B, s.G, s.H).transpose(1, 2))

    def to_state(self, grad_GBH: Tensor, weights: GateWeights) -> Tensor:
        """Return what a time step adds to dl/dh [B, H] of the previous one: gradients of the gates times weights."""
        return torch.bmm(grad_GBH, weights.from_gates_GHH, out=self.through_GBH).sum(0)

    def by_position(self) -> None:
        """Copy the gates' gradients from [T, G, B, H] to [N, G, H]."""
        self.grad_NGH.view(self.s.T, self.s.B, self.s.G, self.s.H).copy_(self.grad_TGBH.transpose(1, 2))

    def input_gradients(self, weights: GateWeights) -> Tensor:
        """Return dl/dx [N, D], the gradients with respect to the word vectors that the cell read."""
        return torch.mm(self.grad_NGH.flatten(1), weights.input_XGH[: self.s.D].flatten(1).T)

    def step(self, delta_GRH: Tensor, eta: float, left: float) -> None:
        """Update the gates in place: delta <- left * delta - eta * inputs^T gradients.

        One batched product computes the weights and biases of all gates.
        """
        seen_GRN = self.seen_NR.T.expand(self.s.G, -1, -1)
        if self.coarse:
            product_GRH = torch.bmm(seen_GRN.bfloat16(), self.grad_NGH.transpose(0, 1).bfloat16())
            delta_GRH.mul_(left).sub_(product_GRH, alpha=eta)
            return
        delta_GRH.baddbmm_(seen_GRN, self.grad_NGH.transpose(0, 1), beta=left, alpha=-eta)


class PlainLSTM:
    """The LSTM cell, gates i, f, g, o: c_t = f c_(t-1) + i tanh(g), h_t = o tanh(c_t)."""

    def __init__(self, s: Sizes, like: Tensor, coarse: bool = False) -> None:
        self.workspace = workspace = CellWorkspace(s, like, coarse)
        self.new_TBH, self.cell_TBH, self.squashed_TBH, self.through_TBH = like.new_empty(4, s.T, s.B, s.H)
        self.cell_grad_BH, self.carried_BH = like.new_empty(2, s.B, s.H)
        self.gates_T = [(gate, *gate) for gate in workspace.gate_TGBH]
        self.grads_T = [(grad, grad[:3], grad[3]) for grad in workspace.grad_TGBH]
        before_T = [before.expand(s.G, -1, -1) for before in workspace.before_T]
        self.cells_T = list(
            zip(self.new_TBH, self.cell_TBH, self.squashed_TBH, workspace.state_T, before_T, strict=True)
        )
        self.through_T = list(self.through_TBH)

    def forward(self, weights: GateWeights) -> Tensor:
        """Run the cell over all time steps of a batch, and return its states [N, H]."""
        workspace = self.workspace
        workspace.read(weights)
        cell_before = None
        for (gate, i, f, g, o), (new, cell, squashed, state, before) in zip(self.gates_T, self.cells_T, strict=True):
            if cell_before is not None:
                gate.baddbmm_(before, weights.state_GHH)
            torch.tanh(g, out=new)
            gate.sigmoid_()  # All four at once is faster; the value for g is not used.
            torch.mul(i, new, out=cell)
            if cell_before is not None:
                cell.addcmul_(f, cell_before)
            torch.tanh(cell, out=squashed)
            torch.mul(o, squashed, out=state)
            cell_before = cell
        return workspace.state_NH

    def backward(self, state_grad_NH: Tensor, weights: GateWeights) -> None:
        """Write the gradients with respect to the gates' sums into the workspace.

        Args:
            state_grad_NH: dl/dh from the output; changed in place.
            weights: The weights of the gates.
        """
        self._slopes()
        dh_T, cell_grad, carried = state_grad_NH.split(self.workspace.s.B), self.cell_grad_BH, self.carried_BH.zero_()
        for t in reversed(range(len(dh_T))):
            grad, of_cell, of_output = self.grads_T[t]
            torch.addcmul(carried, dh_T[t], self.through_T[t], out=cell_grad)
            of_cell.mul_(cell_grad)
            of_output.mul_(dh_T[t])
            if t:
                torch.mul(cell_grad, self.gates_T[t][2], out=carried)
                dh_T[t - 1].add_(self.workspace.to_state(grad, weights))
        self.workspace.by_position()

    def _slopes(self) -> None:
        """Write the local derivative of each gate into the gradients.

        `backward` multiplies those of i, f and g by dl/dc, and that of o by dl/dh.
        """
        gate_TGBH, slope_TGBH, new = self.workspace.gate_TGBH, self.workspace.grad_TGBH, self.new_TBH
        # The derivative of a sigmoid y is y - y^2.
        torch.addcmul(gate_TGBH, gate_TGBH, gate_TGBH, value=-1, out=slope_TGBH)
        of_i, of_f, of_g, of_o = slope_TGBH.unbind(1)
        i, _, _, o = gate_TGBH.unbind(1)
        of_i.mul_(new)
        of_f[0] = 0
        of_f[1:].mul_(self.cell_TBH[:-1])
        torch.addcmul(i, i * new, new, value=-1, out=of_g)
        of_o.mul_(self.squashed_TBH)
        torch.addcmul(o, o * self.squashed_TBH, self.squashed_TBH, value=-1, out=self.through_TBH)

    def step(self, delta_GRH: Tensor, eta: float, left: float) -> None:
        """Update the gates in place: delta <- left * delta - eta * gradient (see `CellWorkspace.step`)."""
        self.workspace.step(delta_GRH, eta, left)


class PlainGRU:
    """The GRU cell, gates r, z, n: n = tanh(x W + b + r * (h U)), h_t = (1 - z) n + z h_(t-1)."""

    def __init__(self, s: Sizes, like: Tensor, coarse: bool = False) -> None:
        self.workspace = CellWorkspace(s, like, coarse)
        self.of_state_TGBH = like.new_zeros(s.T, s.G, s.B, s.H)  # `forward` never writes the first time step.
        self.slope_TBH = like.new_empty(s.T, s.B, s.H)

    def forward(self, weights: GateWeights) -> Tensor:
        """Run the cell over all time steps of a batch, and return its states [N, H]."""
        workspace = self.workspace
        workspace.read(weights)
        for t, (gate, of_state) in enumerate(zip(workspace.gate_TGBH, self.of_state_TGBH, strict=True)):
            if t:
                torch.matmul(workspace.before_T[t], weights.state_GHH, out=of_state)
                gate[:2].add_(of_state[:2])
            gate[:2].sigmoid_()
            reset, keep, new = gate
            new.addcmul_(reset, of_state[2]).tanh_()
            torch.lerp(new, workspace.before_T[t], keep, out=workspace.state_T[t])
        return workspace.state_NH

    def backward(self, state_grad_NH: Tensor, weights: GateWeights) -> None:
        """Write the gradients with respect to the gates' sums into the workspace.

        The new gate n adds x W + b and r * (h U), so its two parts have different gradients: `grad_TGBH` has that of
        h U, and `grad_NGH` has that of x W + b.

        Args:
            state_grad_NH: dl/dh from the output; changed in place.
            weights: The weights of the gates.
        """
        workspace, (reset, keep, new) = self.workspace, self.workspace.gate_TGBH.unbind(1)
        of_reset, of_keep, of_new = workspace.grad_TGBH.unbind(1)
        torch.mul(1 - keep, 1 - new * new, out=self.slope_TBH)
        torch.mul(self.slope_TBH, reset, out=of_new)
        torch.mul(of_new * (1 - reset), self.of_state_TGBH[:, 2], out=of_reset)
        torch.mul(keep * (1 - keep), torch.stack(workspace.before_T) - new, out=of_keep)
        dh_T = state_grad_NH.split(workspace.s.B)
        for t in reversed(range(len(dh_T))):
            workspace.grad_TGBH[t].mul_(dh_T[t])
            if t:
                dh_T[t - 1].add_(workspace.to_state(workspace.grad_TGBH[t], weights)).addcmul_(dh_T[t], keep[t])
        workspace.by_position()
        torch.mul(state_grad_NH, self.slope_TBH.flatten(0, 1), out=workspace.grad_NGH[:, 2])

    def step(self, delta_GRH: Tensor, eta: float, left: float) -> None:
        """Update the gates in place (see `CellWorkspace.step`). n's weights on the state use the gradient of h U."""
        workspace, X = self.workspace, self.workspace.s.X
        of_n_HH = delta_GRH[2, X:-1] * left
        workspace.step(delta_GRH, eta, left)
        delta_GRH[2, X:-1] = of_n_HH.addmm_(
            workspace.seen_NR[:, X:-1].T, workspace.grad_TGBH[:, 2].flatten(0, 1), alpha=-eta
        )


WORDS_AT_ONCE = 3400
"""The number of words per tile of a table. A tile fits into the caches, and is so large that threads rarely wait for
the interpreter lock between operations."""

SAFE_LOGIT = 60.0
"""If no logit exceeds this number, the softmax needs no maximum subtracted: e^60 times the number of words does not
overflow, and e^-60 does not underflow."""

BITS = math.log2(math.e)
"""e^x = 2^(BITS x). exp2 takes a third of the time of exp."""


class PlainTable:
    """The softmax over all words and the update of the output table of one user.

    `attend` keeps the exponentials and their products with the logits, [V, N], for `step`. If the model has unit-norm
    word vectors, the table is multiplied without normalisation, and the logits and exponentials are divided by the
    words' norms. So the normalised vectors are never written, and `step` can use the divided exponentials directly.

    Args:
        s: The sizes of the model and its batches.
        like: A tensor of the device and type to allocate.
        coarse: Whether the three products have factors in bfloat16. Everything else, the exponentials included, is
            computed in the precision of the table.
    """

    def __init__(self, s: Sizes, like: Tensor, coarse: bool = False) -> None:
        self.unit_norm, self.coarse = s.unit_norm, coarse
        if coarse:
            self.coarse_WD = like.new_empty(min(s.V, WORDS_AT_ONCE), s.D, dtype=torch.bfloat16)
            self.coarse_WN = like.new_empty(min(s.V, WORDS_AT_ONCE), s.N, dtype=torch.bfloat16)
        self.words_WD = like.new_empty(min(s.V, WORDS_AT_ONCE), s.D)
        self.inverse_V1 = like.new_ones(s.V, 1)
        self.power_VN, self.logit_VN = like.new_empty(2, s.V, s.N)
        self.along_V1, self.left_V1 = like.new_empty(2, s.V, 1)
        self.tiles = _tiles(self.inverse_V1, self.logit_VN, self.power_VN)
        self.place_N = torch.arange(s.N, device=like.device)

    def begin(self, theta0_VD: Tensor, delta_VD: Tensor) -> None:
        """Set the tables of the user whose steps follow.

        The views of the tiles are created here, once per user: creating a view needs the interpreter lock, for which
        other threads wait.
        """
        self.delta_VD, self.tables = delta_VD, _tiles(theta0_VD, delta_VD, self.along_V1, self.left_V1)

    def attend(self, output_ND: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Compute the sums of the softmax for each position: of exponentials [N, 1], and of exp * word vector [N, D].

        Keeps two tensors for `step`: the exponentials in `power_VN` (with unit norms, divided by the words' norms), and
        the base-2 logits in `logit_VN` (with unit norms, times their exponentials).

        Args:
            output_ND: The outputs o.
            scale: c, the factor of the clip of the table from the previous step.
        """
        is_safe = self.unit_norm and float(torch.linalg.vector_norm(output_ND, dim=1).max()) < SAFE_LOGIT
        bits_DN = (output_ND * BITS).T
        if self.coarse:
            bits_DN = bits_DN.bfloat16()
        total_N, expected_ND = output_ND.new_zeros(len(output_ND)), torch.zeros_like(output_ND)
        for (theta0_WD, delta_WD, *_), (inverse_W1, logit_WN, power_WN) in zip(self.tables, self.tiles, strict=True):
            words_WD = self._words(theta0_WD, delta_WD, scale)
            self._multiply(words_WD, bits_DN, logit_WN)
            if self.unit_norm:
                logit_WN.mul_(inverse_norms(words_WD, out=inverse_W1))
            if is_safe:
                torch.exp2(logit_WN, out=power_WN)
                self._expect(words_WD, inverse_W1, logit_WN, power_WN, total_N, expected_ND)
        if not is_safe:
            peak_N = self.logit_VN.amax(dim=0)
            for (theta0_WD, delta_WD, *_), (inverse_W1, logit_WN, power_WN) in zip(
                self.tables, self.tiles, strict=True
            ):
                torch.sub(logit_WN, peak_N, out=power_WN).exp2_()
                words_WD = self._words(theta0_WD, delta_WD, scale)
                if self.coarse:
                    self.coarse_WD[: len(words_WD)].copy_(words_WD)
                self._expect(words_WD, inverse_W1, logit_WN, power_WN, total_N, expected_ND)
        return total_N[:, None], expected_ND

    def _multiply(self, words_WD: Tensor, bits_DN: Tensor, logit_WN: Tensor) -> None:
        """Write the base-2 logits of a tile of words: the product of word vectors and outputs."""
        if not self.coarse:
            torch.mm(words_WD, bits_DN, out=logit_WN)
            return
        coarse_WD, coarse_WN = self.coarse_WD[: len(words_WD)].copy_(words_WD), self.coarse_WN[: len(words_WD)]
        logit_WN.copy_(torch.mm(coarse_WD, bits_DN, out=coarse_WN))

    def _words(self, theta0_WD: Tensor, delta_WD: Tensor, scale: float) -> Tensor:
        """Return theta0 + scale * delta of a tile of words, in memory that the next call overwrites."""
        return torch.add(theta0_WD, delta_WD, alpha=scale, out=self.words_WD[: len(theta0_WD)])

    def _expect(
        self,
        words_WD: Tensor,
        inverse_W1: Tensor,
        logit_WN: Tensor,
        power_WN: Tensor,
        total_N: Tensor,
        expected_ND: Tensor,
    ) -> None:
        """Add the exponentials of a tile of words to both sums, and prepare the tile for `step`."""
        total_N += power_WN.sum(0)
        if self.unit_norm:
            logit_WN.mul_(power_WN)
            power_WN.mul_(inverse_W1)
        if self.coarse:
            coarse_WD, coarse_WN = self.coarse_WD[: len(words_WD)], self.coarse_WN[: len(words_WD)]
            expected_ND += torch.mm(coarse_WN.copy_(power_WN).T, coarse_WD)  # coarse_WD already holds words_WD
            return
        expected_ND.addmm_(power_WN.T, words_WD)

    def step(
        self,
        output_ND: Tensor,
        total_N1: Tensor,
        target_N: Tensor,
        true_ND: Tensor,
        share_N1: Tensor,
        eta: float,
        scale: float,
        keep: float,
    ) -> None:
        """Update the table in place: delta <- c * keep * delta - eta * gradient.

        With unit-norm vectors the gradient is divided by the word's norm, and its radial part, `outward` times the unit
        vector, is subtracted. The unit vector is (theta0 + c * delta) / norm, so multiples of theta0 and of delta are
        added.

        Args:
            output_ND: The outputs o.
            total_N1: The sums of exponentials, from `attend`.
            target_N: The ids of the next words.
            true_ND: The word vectors of the next words.
            share_N1: 1 / (number of targets), and 0 at positions without a target.
            eta: The local learning rate.
            scale: c, the factor of the clip of the table from the previous step.
            keep: 1 - eta * lambda.
        """
        # d loss / d logit = (exp - total * [the word is the target]) / total. `pull_ND` divides the outputs by the total,
        # so that this table need not be divided.
        self.power_VN[target_N, self.place_N] -= total_N1[:, 0] * self.inverse_V1[target_N, 0]
        pull_ND = output_ND * (share_N1 / total_N1)
        if not self.unit_norm and not self.coarse:
            self.delta_VD.addmm_(self.power_VN, pull_ND, beta=scale * keep, alpha=-eta)
            return
        if not self.unit_norm:
            self.delta_VD.mul_(scale * keep)
            for (_, delta_WD, *_), (_, _, power_WN) in zip(reversed(self.tables), reversed(self.tiles), strict=True):
                self._pull(delta_WD, power_WN, pull_ND, eta)
            return
        outward_V = torch.mv(self.logit_VN, (share_N1 / (total_N1 * BITS))[:, 0])
        outward_V.index_add_(0, target_N, (output_ND * true_ND * share_N1).sum(1), alpha=-1)
        torch.mul(self.inverse_V1, self.inverse_V1, out=self.along_V1).mul_(outward_V[:, None]).mul_(eta)
        torch.mul(self.along_V1, scale, out=self.left_V1).add_(scale * keep)
        # Tiles are updated from the last to the first: the last one is still in the cache from `attend`, and the first
        # one is then in the cache for the next `attend`.
        for (theta0_WD, delta_WD, along_W1, left_W1), (_, _, power_WN) in zip(
            reversed(self.tables), reversed(self.tiles), strict=True
        ):
            self._pull(delta_WD.mul_(left_W1).addcmul_(theta0_WD, along_W1), power_WN, pull_ND, eta)

    def _pull(self, delta_WD: Tensor, power_WN: Tensor, pull_ND: Tensor, eta: float) -> None:
        """Update a tile of words in place: delta <- delta - eta * (exponentials times outputs)."""
        if not self.coarse:
            delta_WD.addmm_(power_WN, pull_ND, alpha=-eta)
            return
        coarse_WN = self.coarse_WN[: len(power_WN)].copy_(power_WN)
        delta_WD.sub_(torch.mm(coarse_WN, pull_ND.bfloat16(), out=self.coarse_WD[: len(power_WN)]), alpha=eta)


def _tiles(*whole: Tensor) -> list[tuple[Tensor, ...]]:
    """Split tensors into tiles of `WORDS_AT_ONCE` rows; each item has the corresponding tile of each tensor."""
    return list(zip(*(tensor.split(WORDS_AT_ONCE) for tensor in whole), strict=True))


def inverse_norms(rows_WD: Tensor, out: Tensor | None = None) -> Tensor:
    """Return 1 / norm of each row, [W, 1]; a large finite number for a row of zeros."""
    norm_W1 = torch.linalg.vector_norm(rows_WD, dim=1, keepdim=True, out=out)
    return norm_W1.clamp_(min=SMALLEST_SQUARE**0.5).reciprocal_()


SQUARES_AT_ONCE = 2**16
"""The number of squares that are added in the precision of the deltas. The sums of these groups are added in float64."""


class PlainStep:
    """Computes the local steps of a chunk, one user after the other.

    Args:
        buffers: The buffers of the chunk.
        coarse: Whether the large products are computed in bfloat16, for processors that have instructions for it.
            Deltas stay in the precision of the buffers.
    """

    knows_squares = False
    """Whether the steps write `Buffers.square_UM`."""

    def __init__(self, buffers: Buffers, coarse: bool = False) -> None:
        s, like = buffers.sizes, buffers.delta_UP
        self.b = buffers
        # Memory for the intermediate values of one user.
        self.cell = PlainGRU(s, like, coarse) if s.is_gru else PlainLSTM(s, like, coarse)
        self.weights = GateWeights(s, like)
        self.projection_YD = like.new_empty(s.H + 1, s.D)
        self.table = PlainTable(s, like, coarse)

    @torch.no_grad()
    def run(self, num_steps: int) -> None:
        """Take all local steps of each user, one user after the other; at most `num_steps` steps per user."""
        for u, steps in enumerate(self.b.num_steps_U.tolist()):
            self.begin(u)
            for step in range(min(num_steps, steps)):
                self.take(u, step)

    def begin(self, u: int) -> None:
        """Set the learning rate and the views of the parameters that all steps of user u use."""
        b, s = self.b, self.b.sizes
        self.run_u = run = int(b.run_U[u])
        self.eta, self.keep = float(b.rate_R[run]), float(b.keep_R[run])
        theta0_P, delta_P = b.theta0_RP[run], b.delta_UP[u]
        self.reading = _table(theta0_P, 0, s), _table(delta_P, 0, s)
        self.writing = _table(theta0_P, s.output_at, s), _table(delta_P, s.output_at, s)
        self.middle = theta0_P[s.gates_at : s.gates_at + s.middle], delta_P[s.gates_at : s.gates_at + s.middle]
        self.table.begin(*self.writing)

    def take(self, u: int, step: int) -> None:
        """Take one local step of user u: forward pass, backward pass, update, and the factors of the clip."""
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
        cell.workspace.input_NX[:, : s.D] = read_ND
        if s.F:
            cell.workspace.input_NX[:, s.D :] = b.features_UF[u]
        state_NH = cell.forward(self.weights)
        output_ND = torch.addmm(self.projection_YD[-1], state_NH, self.projection_YD[:-1])
        total_N1, expected_ND = self.table.attend(output_ND, output_scale)

        output_grad_ND = (expected_ND / total_N1 - true_ND) * share_N1
        cell.backward(output_grad_ND @ self.projection_YD[:-1].T, self.weights)
        input_grad_ND = cell.workspace.input_gradients(self.weights)
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
        """Compute theta0 + c * delta for the gates and the projection. `scale` has the factor c of each layer."""
        s, c = self.b.sizes, scale[0]
        if any(other != c for other in scale):
            delta_L, c = delta_L.clone(), 1.0
            _multiply(_middle_layers(delta_L, s), scale)
        gates = s.G * s.R * s.H
        self.weights.set(theta0_L[:gates].view(s.G, s.R, s.H), delta_L[:gates].view(s.G, s.R, s.H), c)
        torch.add(theta0_L[gates:], delta_L[gates:], alpha=c, out=self.projection_YD.view(-1))

    def word_vectors(self, theta0_VD: Tensor, delta_VD: Tensor, word_N: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Return theta0 + c * delta of some words, normalised if the model has unit norms, and 1 / norm of each row."""
        rows_ND = theta0_VD[word_N].add_(delta_VD[word_N], alpha=scale)
        inverse_N1 = inverse_norms(rows_ND) if self.b.sizes.unit_norm else rows_ND.new_ones(len(rows_ND), 1)
        return rows_ND.mul_(inverse_N1), inverse_N1

    def step_matrices(
        self, delta_L: Tensor, state_NH: Tensor, output_grad_ND: Tensor, eta: float, layers: list[float]
    ) -> None:
        """Update the gates and the projection in place: delta <- left * delta - eta * inputs^T gradients.

        Args:
            delta_L: The deltas of the gates and the projection.
            state_NH: The states, which are the input of the projection.
            output_grad_ND: The gradients with respect to the outputs.
            eta: The local learning rate.
            layers: The factor `left` of each layer.
        """
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
    """Return the word table [V, D] at offset `at` of the parameter vector, as a view."""
    return params_P[at : at + s.V * s.D].view(s.V, s.D)


def _middle_layers(middle_L: Tensor, s: Sizes) -> tuple[Tensor, ...]:
    """Return views of the weight and bias of each gate and of the projection."""
    return middle_L.split([*([(s.R - 1) * s.H, s.H] * s.G), s.H * s.D, s.D])


def _multiply(layers: tuple[Tensor, ...], factors: list[float]) -> None:
    """Multiply each layer in place by its factor."""
    for layer, factor in zip(layers, factors, strict=True):
        layer.mul_(factor)


def _norm(layer_L: Tensor) -> float:
    """Return the L2 norm of a layer, added in parts of `SQUARES_AT_ONCE`.

    The sum of a million squares in float32 has a relative error of up to 3e-4. The error of a part is negligible.
    """
    whole = len(layer_L) // SQUARES_AT_ONCE * SQUARES_AT_ONCE
    parts = torch.linalg.vector_norm(layer_L[:whole].view(-1, SQUARES_AT_ONCE), dim=1).tolist()
    return math.hypot(*parts, float(torch.linalg.vector_norm(layer_L[whole:])))


def clip_scale(b: Buffers, u: int, run: int) -> None:
    """Write the factors of the clip of user u, min(1, S / norm), to `scale_UM`. They apply when the delta is next read.

    A norm of NaN gives the factor 1; the aggregation later replaces a delta with a NaN by zero.

    Args:
        b: The buffers.
        u: The index of the user.
        run: The index of the user's run.
    """
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
